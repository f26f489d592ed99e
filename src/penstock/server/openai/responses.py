"""POST /v1/responses, and retrieval, cancellation and deletion of a response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.hosting.ports import ENDED, RunRecord
from penstock.server.audit import note
from penstock.server.auth import User
from penstock.server.openai.refusals import Refused, encode_json, naming_run, parked_error, stream_error
from penstock.server.openai.retries import Entry, is_retry, request_key, run_id_from
from penstock.server.openai.runs import (
    RunHandle,
    RunRequest,
    Service,
    continue_from,
    events_so_far,
    open_stream,
    remove_unused_chat,
    rounds_of,
    start,
)
from penstock.server.openai.wire.answer import AnswerBuilder, fold
from penstock.server.openai.wire.options import Options, read_options
from penstock.server.openai.wire.request import ResponseBody, Turn, check_supported, response_turns
from penstock.server.openai.wire.response import STATUSES, EchoedRequest, ResponseBuilder, run_id_of
from penstock.server.sse import (
    CLIENT_CLOSED_REQUEST,
    HEARTBEAT,
    ClientDisconnected,
    EventStream,
    cancel_on_disconnect,
    framed,
    with_heartbeats,
)

CANCEL_S = 5.0
"""Maximum time that a cancel request waits for the run to end."""


async def respond(service: Service, user: User, body: ResponseBody, request: Request) -> Response:
    """Run the graph on the input, and respond as the model of that name."""
    if body.stream:
        return await open_stream(service, user, lambda: _stream(service, user, body, request))
    handle, entry = await _start(service, user, body, request)
    response, current = _builder(handle, body), None
    try:
        with naming_run(handle.run.id):
            if body.background:
                run = await service.host.get(handle.run.id) or handle.run
                current = await _current(service, run, handle.answering, response)
            else:
                await cancel_on_disconnect(request.receive, _complete(handle, response))
    except ClientDisconnected:
        await handle.on_disconnect(user, body.penstock, entry)()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        entry.delivered()
    if current is None and response.ended is not None and response.ended.status == "parked":
        raise parked_error(response.ended, handle.run.id)
    entry.answered()
    return _json(current or response)


async def _stream(service: Service, user: User, body: ResponseBody, request: Request) -> EventStream:
    handle, entry = await _start(service, user, body, request)
    on_disconnect = None if body.background else handle.on_disconnect(user, body.penstock, entry)
    frames = _delivering(_frames(handle, _builder(handle, body)), entry)
    return EventStream(
        frames, service.streams, user, on_disconnect=on_disconnect, reports_shutdown=True, may_compress=False
    )


async def retrieve(service: Service, user: User, response_id: str, after: int | None, *, stream: bool) -> Response:
    """Return a response in its current state, or its stream of events after number `after`."""
    run, rounds = await _run_of(service, user, response_id, "response_id")
    graph = await service.version_of(run)
    answering = graph.answering if graph is not None else frozenset()
    response = ResponseBuilder(run.id, run.created_ms // 1000, _stored_request(run), rounds=rounds)
    if stream:
        if after is not None:
            await _check_exists(service, run, answering, after, rounds)
        with service.streams.place(user.name):
            frames = _frames(RunHandle(service, run, answering, rounds=rounds), response, after)
            # A disconnect from a retrieved stream does not affect the run.
            return EventStream(frames, service.streams, user, reports_shutdown=True, may_compress=False)
    return _json(await _current(service, run, answering, response))


async def cancel(service: Service, user: User, response_id: str) -> Response:
    """Cancel the run of a response, and return the response; a response that has ended is returned unchanged."""
    run, _ = await _run_of(service, user, response_id, "response_id")
    note(target=run.id, owner=run.owner)
    if run.status not in ENDED:
        await service.host.cancel(run.id, reason="cancelled over /v1/responses", by=user.name)
        await _until_ended(service, run.id)
    return await retrieve(service, user, response_id, None, stream=False)


async def delete(service: Service, user: User, response_id: str) -> None:
    """Remove a response that has ended, with its run, and with its chat if no other run uses it."""
    run, _ = await _run_of(service, user, response_id, "response_id")
    note(target=run.id, owner=run.owner)
    await service.host.remove(run.id)
    await remove_unused_chat(service, run)


async def _until_ended(service: Service, run_id: str) -> None:
    """Wait for the run to end, at most `CANCEL_S`: if its worker died, it ends only after another worker claims it."""
    try:
        async with asyncio.timeout(CANCEL_S):
            await service.host.wait(run_id)
    except TimeoutError:
        pass


async def _start(
    service: Service, user: User, body: ResponseBody, request: Request
) -> tuple[RunHandle, Entry[RunHandle]]:
    check_supported(body)
    turns, options = response_turns(body), read_options(body)
    key = request_key(user, "responses", body, request.headers)
    handle = service.retries.take_up(key, is_retry=is_retry(request))
    if handle is None:
        handle = await _start_run(service, user, body, turns, options, run_id_from(user, request.headers))
    return handle, service.retries.add(key, handle)


async def _start_run(
    service: Service,
    user: User,
    body: ResponseBody,
    turns: Sequence[Turn],
    options: Options,
    idempotent_id: str | None,
) -> RunHandle:
    previous_id = body.previous_response_id
    graph = await service.graph_of(body.model, body.penstock.run_id or idempotent_id)
    about = _echoed(body, uses_history=previous_id is not None or graph.is_conversational).to_store()
    client = await service.client_request(graph, options)
    request = RunRequest(service, user, graph, turns, body, about, idempotent_id, client)
    with request.naming_key():
        if previous_id is None:
            return await start(request)
        before, _ = await _run_of(service, user, previous_id, "previous_response_id")
        return await continue_from(request, before, previous_id)


async def _delivering(frames: AsyncGenerator[bytes, None], entry: Entry[RunHandle]) -> AsyncGenerator[bytes, None]:
    """Yield the frames, then mark the request as delivered."""
    async with aclosing(frames):
        async for content in frames:
            yield content
    entry.delivered()


async def _run_of(service: Service, user: User, response_id: str, param: str) -> tuple[RunRecord, int]:
    """Return the run of a response, and how often its client had returned results of its tools before."""
    run_id, rounds = run_id_of(response_id) or (None, 0)
    run = None if run_id is None else await service.host.get(run_id)
    is_there = run is not None and (not rounds or rounds <= await rounds_of(service, run.id))
    if run is None or not user.may_see(run.owner) or not is_there:
        raise Refused(404, f"there is no response {response_id!r}", param=param, code="not_found")
    return run, rounds


async def _complete(handle: RunHandle, response: ResponseBuilder) -> None:
    """Wait for the end of the run, and add everything it emits to the response."""
    async with aclosing(handle.pieces_until_idle(AnswerBuilder(handle.answering))) as pieces:
        async for piece in pieces:
            for _ in response.events(piece):
                pass


async def _current(
    service: Service, run: RunRecord, answering: frozenset[str], response: ResponseBuilder
) -> ResponseBuilder:
    """Bring a new response to the current state of its run."""
    pieces, answer = fold(await events_so_far(service, run.id), answering, response.rounds)
    for piece in pieces:
        for _ in response.events(piece):
            pass
    if answer.ended is None and response.calls is None:
        response.status = STATUSES[run.status]
    if run.status != "waiting":
        response.waiting = None
    return response


async def _check_exists(service: Service, run: RunRecord, answering: frozenset[str], after: int, rounds: int) -> None:
    """Raise Refused if `after` is past the newest event: a stream from there would be empty, even without an end."""
    so_far = ResponseBuilder(run.id, 0, _stored_request(run), rounds=rounds)
    for _ in so_far.opening():
        pass
    emitted = (await _current(service, run, answering, so_far)).emitted
    if after >= emitted:
        message = f"there is no event {after} yet; the newest is {emitted - 1}: omit it to start from the beginning"
        raise Refused(400, message, param="starting_after", code="invalid_value")


async def _frames(
    handle: RunHandle, response: ResponseBuilder, after: int | None = None
) -> AsyncGenerator[bytes, None]:
    for event in response.opening():
        if _is_wanted(event, after):
            yield _frame(event)
    try:
        pieces = handle.pieces(AnswerBuilder(handle.answering))
        async with aclosing(with_heartbeats(pieces, handle.service.streams)) as coming:
            async for piece in coming:
                if piece is None:
                    yield HEARTBEAT
                    continue
                for event in response.events(piece):
                    if _is_wanted(event, after):
                        yield _frame(event)
    except Exception as error:  # the status is already sent, so every error is reported in the stream
        refused = stream_error(error, handle.run.id)
        error_event = response.broken(refused.code or "server_error", refused.message)
        yield _frame({**error_event, "sequence_number": max(error_event["sequence_number"], after or 0)})


def _is_wanted(event: Mapping[str, Any], after: int | None) -> bool:
    """Whether to send the event: it comes after `after`, or is an error, which repeats the preceding number."""
    return after is None or event["sequence_number"] > after or event["type"] == "error"


def _builder(handle: RunHandle, body: ResponseBody) -> ResponseBuilder:
    metadata = _stored_request(handle.run).metadata  # an existing run keeps its own metadata
    echoed = replace(_echoed(body, uses_history=handle.uses_history), metadata=metadata)
    return ResponseBuilder(handle.run.id, handle.created, echoed, rounds=handle.rounds)


def _echoed(body: ResponseBody, *, uses_history: bool) -> EchoedRequest:
    ignored = body.ignored(uses_history=uses_history)
    form = body.text.format if body.text else None
    return EchoedRequest(
        body.model,
        None if "instructions" in ignored else body.instructions,
        body.previous_response_id,
        body.metadata or {},
        bool(body.background),
        body.temperature,
        body.top_p,
        body.max_output_tokens,
        body.user,
        ignored,
        body.tools or (),
        body.tool_choice or "auto",
        body.parallel_tool_calls is not False,
        None if form is None else form.model_dump(mode="json", by_alias=True, exclude_none=True),
    )


def _stored_request(run: RunRecord) -> EchoedRequest:
    return EchoedRequest.restore(run.origin.get("about"), run.graph_id)


def _json(response: ResponseBuilder) -> Response:
    return Response(encode_json(response.to_dict()), media_type="application/json")


def _frame(event: Mapping[str, Any]) -> bytes:
    return framed(event, event=event["type"])
