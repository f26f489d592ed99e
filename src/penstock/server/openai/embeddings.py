"""`/v1/embeddings`: runs of graphs with an `embedding` node.

A request is a run like any other: it has an owner, limits, holds, events and a record, and counts towards daily
budgets. A graph without such a node is refused by name, with the models that make embeddings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import Request
from pydantic import Field, StringConstraints
from starlette.responses import Response

from penstock.agents.embedding import from_base64, to_base64
from penstock.hosting.ports import GraphRecord
from penstock.nodes.embedding import MAX_DIMENSIONS, TYPE, texts_in
from penstock.server.auth import User
from penstock.server.openai.refusals import Refused, encode_json, failure_of, model_not_found, naming_run
from penstock.server.openai.retries import Entry, is_retry, request_key, run_id_from
from penstock.server.openai.runs import ModelGraph, RunHandle, RunRequest, Service, submit_input
from penstock.server.openai.wire.answer import Ended
from penstock.server.openai.wire.chunks import facts, usage
from penstock.server.openai.wire.request import Extension, RequestObject, Text
from penstock.server.sse import CLIENT_CLOSED_REQUEST, ClientDisconnected, cancel_on_disconnect

MAX_NAMED = 20
"""Maximum number of models named in a refusal."""

Token = Annotated[int, Field(strict=True, ge=0, lt=2**31)]


class EmbeddingBody(RequestObject):
    """A request to /v1/embeddings."""

    without_effect = frozenset({"user"})

    model: Annotated[Text, StringConstraints(min_length=1, max_length=200)]
    """The id of a graph; `graph@3` for its third version."""
    input: Text | list[Text] | list[Token] | list[list[Token]]
    """One text or several, each as text or as tokens."""
    dimensions: Annotated[int, Field(strict=True, ge=1, le=MAX_DIMENSIONS)] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    user: Text | None = None
    penstock: Extension = Extension()

    def run_input(self) -> dict[str, Any]:
        """Return the input of the run: the texts, and the length of their vectors if the request sets one."""
        texts = texts_in(self.input)
        return {"input": texts} | ({} if self.dimensions is None else {"dimensions": self.dimensions})


async def embed(service: Service, user: User, body: EmbeddingBody, request: Request) -> Response:
    """Run the graph on the texts, and respond with their vectors."""
    handle, entry = await _start(service, user, body, request)
    try:
        with naming_run(handle.run.id):
            _, end = await cancel_on_disconnect(request.receive, handle.result())
            answer = await _answer(handle, body, _completed(end, handle))
    except ClientDisconnected:
        await handle.on_disconnect(user, body.penstock, entry)()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        entry.delivered()
    entry.answered()
    return Response(answer, media_type="application/json")


async def _start(
    service: Service, user: User, body: EmbeddingBody, request: Request
) -> tuple[RunHandle, Entry[RunHandle]]:
    given = body.run_input()
    key = request_key(user, "embeddings", body, request.headers)
    handle = service.retries.take_up(key, is_retry=is_retry(request))
    if handle is None:
        idempotent_id = run_id_from(user, request.headers)
        graph = await _graph_of(service, body, body.penstock.run_id or idempotent_id)
        run_request = RunRequest(service, user, graph, (), body, None, idempotent_id)
        with run_request.naming_key():
            handle = await submit_input(run_request, given)
    return handle, service.retries.add(key, handle)


async def _graph_of(service: Service, body: EmbeddingBody, run_id: str | None) -> ModelGraph:
    try:
        graph = await service.graph_of(body.model, run_id)
    except Refused as refused:
        if refused.code != "model_not_found":
            raise
        raise model_not_found(body.model, await _advice(service)) from None
    if not makes_embeddings(graph.record):
        why = f"it has no {TYPE} node; {await _advice(service)}"
        raise Refused(
            400, f"the model {body.model!r} makes no embeddings: {why}", param="model", code="unsupported_model"
        )
    return graph


def makes_embeddings(graph: GraphRecord) -> bool:
    """Whether a graph has a node that makes embeddings."""
    nodes = graph.document.get("nodes")
    listed: Sequence[Any] = nodes if isinstance(nodes, list) else ()
    return any(isinstance(node, Mapping) and node.get("type") == TYPE for node in listed)


async def _advice(service: Service) -> str:
    found = [graph.id for graph in await service.graphs.runnable(service.stores.graphs) if makes_embeddings(graph)]
    if not found:
        return (
            f"no model of this server does: offer an EmbeddingModel with --models, or save a graph with an {TYPE} node"
        )
    return f"models that make embeddings: {', '.join(found[:MAX_NAMED])}"


def _completed(end: object, handle: RunHandle) -> Ended:
    if not isinstance(end, Ended):
        fact = f"run {handle.run.id} waits for an approval, which a request for embeddings cannot show"
        why = f"{fact}: remove it from the graph"
        raise Refused(400, why, param="model", code="unsupported_model", may_retry=False)
    run_id, own_limits, is_named = handle.run.id, handle.own_limits, handle.is_named
    if failure := failure_of(end, run_id, has_text=False, own_limits=own_limits, is_named=is_named):
        raise failure
    return end


async def _answer(handle: RunHandle, body: EmbeddingBody, end: Ended) -> bytes:
    run = await handle.service.host.get(handle.run.id)
    vectors = None if run is None else run.output
    return await asyncio.to_thread(_encoded, handle.run.id, body, vectors, end)


def _encoded(run_id: str, body: EmbeddingBody, vectors: Any, end: Ended) -> bytes:
    data = [
        {"object": "embedding", "index": at, "embedding": _as_requested(vector, body.encoding_format)}
        for at, vector in enumerate(_vectors(run_id, body, vectors))
    ]
    spent = usage(end)
    used = {name: spent[name] for name in ("prompt_tokens", "total_tokens", "cost", "unknown_costs") if name in spent}
    about = facts(run_id, sorted(body.ignored_fields()), end)
    return encode_json({"object": "list", "data": data, "model": body.model, "usage": used, "penstock": about})


def _vectors(run_id: str, body: EmbeddingBody, output: Any) -> Sequence[Any]:
    expected = len(texts_in(body.input))
    if isinstance(output, list) and len(output) == expected and all(isinstance(one, str | list) for one in output):
        return output
    fact = f"run {run_id} of {body.model!r} has another output than {expected} vectors"
    why = f"{fact}: let the graph end with its {TYPE} node"
    raise Refused(502, why, param="model", code="bad_output", may_retry=False)


def _as_requested(vector: Any, encoding: str) -> Any:
    if encoding == "base64":
        return vector if isinstance(vector, str) else to_base64(vector)
    return from_base64(vector) if isinstance(vector, str) else vector
