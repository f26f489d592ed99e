"""OpenAI-compatible endpoints: models, chat completions, responses (in `responses`) and embeddings (in `embeddings`).

The server has already authenticated the caller; `current_user` returns the user. These routes report every error in
OpenAI's format.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Query, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from penstock.server.auth import User, current_user
from penstock.server.graph_check import GraphChecker
from penstock.server.openai import responses
from penstock.server.openai.embeddings import EmbeddingBody, embed
from penstock.server.openai.refusals import Refused, encode_json, failure_of, naming_run, refusal_of, stream_error
from penstock.server.openai.retries import Entry, Retries, is_retry, request_key, run_id_from
from penstock.server.openai.runs import RunHandle, RunRequest, Service, model_object, open_stream, start
from penstock.server.openai.wire.answer import AnswerBuilder, Ended, TextAdded
from penstock.server.openai.wire.chunks import Completion
from penstock.server.openai.wire.described import (
    CompletionAnswer,
    Described,
    EmbeddingsAnswer,
    ErrorAnswer,
    ModelFacts,
    ModelList,
    ResponseAnswer,
    ResponseDeleted,
)
from penstock.server.openai.wire.options import read_options
from penstock.server.openai.wire.request import ChatCompletionBody, ResponseBody, check_supported, completion_turns
from penstock.server.settings import ServerSettings
from penstock.server.sse import (
    CLIENT_CLOSED_REQUEST,
    HEARTBEAT,
    ClientDisconnected,
    EventStream,
    Streams,
    cancel_on_disconnect,
    encoded,
    framed,
    with_heartbeats,
)

if TYPE_CHECKING:
    from penstock.chat.service import ChatService
    from penstock.hosting.host import RunHost
    from penstock.storage import Stores

DONE = b"data: [DONE]\n\n"
ERROR = {"model": ErrorAnswer, "description": "An error, in OpenAI's format"}
ERRORS: dict[int | str, dict[str, Any]] = {"4XX": ERROR, "5XX": ERROR}

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class OpenAIRoute(APIRoute):
    """A route that returns errors in OpenAI's format; unexpected errors propagate to the server."""

    def get_route_handler(self) -> Handler:
        """Return the handler, wrapped to convert errors to responses."""
        handle: Handler = super().get_route_handler()

        async def respond(request: Request) -> Response:
            try:
                return await handle(request)
            except Exception as error:
                if refused := refusal_of(error):
                    return refused.response()
                raise

        return respond


def answers(model: type[Described], *, streamed: bool = False) -> dict[int | str, dict[str, Any]]:
    """Describe a successful response for OpenAPI: as JSON and, if `streamed`, also as an event stream."""
    return {200: {"model": model, **({"content": {"text/event-stream": {}}} if streamed else {})}}


def create_openai_router(
    host: RunHost,
    chats: ChatService,
    stores: Stores,
    graphs: GraphChecker,
    *,
    streams: Streams,
    settings: ServerSettings,
    retries: Retries[RunHandle] | None = None,
    user_of: Callable[[Request], User] = current_user,
) -> APIRouter:
    """Create the routes under /v1."""
    retries = Retries[RunHandle](settings.retry_grace_s) if retries is None else retries
    service = Service(host, chats, stores, graphs, streams, retries, settings.client_tools_wait_s)
    router = APIRouter(prefix="/v1", tags=["openai"], route_class=OpenAIRoute, responses=ERRORS)
    _add_models(router, service)
    _add_chat_completions(router, service, user_of)
    _add_responses(router, service, user_of)
    _add_embeddings(router, service, user_of)
    return router


def _add_models(router: APIRouter, service: Service) -> None:
    @router.get("/models", responses=answers(ModelList))
    async def list_models() -> Response:
        """List the graphs that can run, as models."""
        found = await service.graphs.runnable(service.stores.graphs)
        return _json({"object": "list", "data": [model_object(graph) for graph in found]})

    @router.get("/models/{model_id}", responses=answers(ModelFacts))
    async def get_model(model_id: str) -> Response:
        """Get one graph as a model; `graph@3` is its third version."""
        found = await service.graph_of(model_id)
        return _json({**model_object(found.record), "id": model_id})


def _add_chat_completions(router: APIRouter, service: Service, user_of: Callable[[Request], User]) -> None:
    @router.post("/chat/completions", responses=answers(CompletionAnswer, streamed=True))
    async def create_chat_completion(body: ChatCompletionBody, request: Request) -> Response:
        """Run a graph on a conversation; with `stream`, the answer is streamed."""
        return await _complete(service, user_of(request), body, request)


def _add_embeddings(router: APIRouter, service: Service, user_of: Callable[[Request], User]) -> None:
    @router.post("/embeddings", responses=answers(EmbeddingsAnswer))
    async def create_embeddings(body: EmbeddingBody, request: Request) -> Response:
        """Run a graph that makes embeddings, and return the vectors of the texts."""
        return await embed(service, user_of(request), body, request)


def _add_responses(router: APIRouter, service: Service, user_of: Callable[[Request], User]) -> None:
    @router.post("/responses", responses=answers(ResponseAnswer, streamed=True))
    async def create_response(body: ResponseBody, request: Request) -> Response:
        """Run a graph on some input; `stream` streams the answer, `background` returns without waiting for it."""
        return await responses.respond(service, user_of(request), body, request)

    @router.get("/responses/{response_id}", responses=answers(ResponseAnswer, streamed=True))
    async def get_response(
        response_id: str, request: Request, starting_after: int | None = Query(None, ge=0), stream: bool = False
    ) -> Response:
        """Get a response in its current state, or its stream, from the beginning or after `starting_after`."""
        return await responses.retrieve(service, user_of(request), response_id, starting_after, stream=stream)

    @router.delete("/responses/{response_id}", responses=answers(ResponseDeleted))
    async def delete_response(response_id: str, request: Request) -> Response:
        """Remove a response that has ended, and its run; its messages stay while other responses continue from them."""
        await responses.delete(service, user_of(request), response_id)
        return _json({"id": response_id, "object": "response", "deleted": True})

    @router.post("/responses/{response_id}/cancel", responses=answers(ResponseAnswer))
    async def cancel_response(response_id: str, request: Request) -> Response:
        """Cancel the run of a response."""
        return await responses.cancel(service, user_of(request), response_id)


async def _complete(service: Service, user: User, body: ChatCompletionBody, request: Request) -> Response:
    """Run the graph on the conversation, and respond as the model of that name."""
    if body.stream:
        return await open_stream(service, user, lambda: _stream(service, user, body, request))
    handle, entry = await _start(service, user, body, request)
    try:
        with naming_run(handle.run.id):
            answer, end = await cancel_on_disconnect(request.receive, handle.result())
    except ClientDisconnected:
        await handle.on_disconnect(user, body.penstock, entry)()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        entry.delivered()
    if failure := _failure(end, answer, handle):
        raise failure
    entry.answered()
    return _json(_completion(handle, body).whole(answer.text, end))


async def _start(
    service: Service, user: User, body: ChatCompletionBody, request: Request
) -> tuple[RunHandle, Entry[RunHandle]]:
    check_supported(body)
    turns, options = completion_turns(body), read_options(body)
    key = request_key(user, "chat/completions", body, request.headers)
    handle = service.retries.take_up(key, is_retry=is_retry(request))
    if handle is None:
        idempotent_id = run_id_from(user, request.headers)
        graph = await service.graph_of(body.model, body.penstock.run_id or idempotent_id)
        client = await service.client_request(graph, options)
        run_request = RunRequest(service, user, graph, turns, body, None, idempotent_id, client)
        with run_request.naming_key():
            handle = await start(run_request)
    return handle, service.retries.add(key, handle)


async def _stream(service: Service, user: User, body: ChatCompletionBody, request: Request) -> EventStream:
    handle, entry = await _start(service, user, body, request)
    frames = _frames(handle, _completion(handle, body), entry)
    on_disconnect = handle.on_disconnect(user, body.penstock, entry)
    return EventStream(
        frames, service.streams, user, on_disconnect=on_disconnect, reports_shutdown=True, may_compress=False
    )


def _completion(handle: RunHandle, body: ChatCompletionBody) -> Completion:
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    ignored = body.ignored(uses_history=handle.uses_history)
    return Completion(handle.run.id, body.model, handle.created, ignored, include_usage, body.metadata, handle.rounds)


async def _frames(handle: RunHandle, completion: Completion, entry: Entry[RunHandle]) -> AsyncGenerator[bytes, None]:
    answer = AnswerBuilder(handle.answering)
    yield framed(completion.opening())
    try:
        async with aclosing(with_heartbeats(handle.pieces(answer), handle.service.streams)) as pieces:
            async for piece in pieces:
                if piece is None:
                    yield HEARTBEAT
                elif failure := _failure(piece, answer, handle):
                    yield framed(failure.to_dict())
                elif isinstance(piece, TextAdded):
                    yield completion.framed_text(piece, framed, encoded)
                else:
                    for chunk in completion.chunks(piece):
                        yield framed(chunk)
    except Exception as error:  # the status is already sent, so every error is reported in the stream
        yield framed(stream_error(error, handle.run.id).to_dict())
    entry.delivered()
    yield DONE


def _failure(piece: object, answer: AnswerBuilder, handle: RunHandle) -> Refused | None:
    if not isinstance(piece, Ended):
        return None
    return failure_of(
        piece, handle.run.id, has_text=bool(answer.text), own_limits=handle.own_limits, is_named=handle.is_named
    )


def _json(data: object) -> Response:
    return Response(encode_json(data), media_type="application/json")
