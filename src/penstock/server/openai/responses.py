"""POST /v1/responses, and what is asked of a response afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.hosting.records import ENDED, RunRecord
from penstock.server.auth import User
from penstock.server.openai.conversing import forget_chat_of
from penstock.server.openai.leaving import CLIENT_CLOSED_REQUEST, ClientLeft, RunStream, unless_left, with_heartbeats
from penstock.server.openai.models import converses
from penstock.server.openai.refusals import Refused, broken_off, of_run, set_aside, written
from penstock.server.openai.running import Service, Started, events_so_far, go_on, on_leave, start, streaming
from penstock.server.openai.wire.answer import Answer, fold, speakers
from penstock.server.openai.wire.bodies import ResponseBody
from penstock.server.openai.wire.conversation import check_supported, of_response
from penstock.server.openai.wire.response import STATUSES, Asked, ResponseUnderWay, run_id_of
from penstock.server.sse import HEARTBEAT, framed

CANCEL_S = 5.0
"""How long the answer to a cancel waits for the run's end."""


async def respond(service: Service, user: User, body: ResponseBody, request: Request) -> Response:
    """Run the graph on what was given, and answer as the model of that name."""
    if body.stream:
        return await streaming(service.streams, user, lambda: _streamed(service, user, body))
    begun = await _begin(service, user, body)
    under_way = _under_way(begun, body)
    try:
        with of_run(begun.run.id):
            if body.background:
                return _json(await _as_it_stands(service, begun.run, begun.speaking, under_way))
            await unless_left(request.receive, _followed(begun, under_way))
    except ClientLeft:
        await on_leave(begun, user, body.penstock)()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    if under_way.ended is not None and under_way.ended.status == "parked":
        raise set_aside(under_way.ended, begun.run.id)
    return _json(under_way)


async def _streamed(service: Service, user: User, body: ResponseBody) -> RunStream:
    begun = await _begin(service, user, body)
    left = _let_it_go_on if body.background else on_leave(begun, user, body.penstock)
    return RunStream(_frames(begun, _under_way(begun, body)), service.streams, user.name, left)


async def retrieve(service: Service, user: User, response_id: str, after: int | None, *, stream: bool) -> Response:
    """A response as it stands now, or its stream from the event after `after` on."""
    run = await _run_of(service, user, response_id, "response_id")
    graph = await service.stores.graphs.get(run.graph_id, run.graph_version)
    speaking = speakers(graph.document if graph else {})
    under_way = ResponseUnderWay(run.id, run.created_ms // 1000, _asked_once(run))
    if stream:
        if after is not None:
            await _must_have_come_to(service, run, speaking, after)
        with service.streams.place(user.name):
            frames = _frames(Started(service, run, speaking), under_way, after)
            return RunStream(frames, service.streams, user.name, _let_it_go_on)
    return _json(await _as_it_stands(service, run, speaking, under_way))


async def cancel(service: Service, user: User, response_id: str) -> Response:
    """Stop the run behind a response; one that has ended is given as it is."""
    run = await _run_of(service, user, response_id, "response_id")
    if run.status not in ENDED:
        await service.host.cancel(run.id, reason="cancelled over /v1/responses", by=user.name)
        await _until_ended(service, run.id)
    return await retrieve(service, user, response_id, None, stream=False)


async def delete(service: Service, user: User, response_id: str) -> None:
    """Remove a response that is over, with its run, and with its chat if nothing else is there."""
    run = await _run_of(service, user, response_id, "response_id")
    await service.host.remove(run.id)
    await forget_chat_of(service, run)


async def _until_ended(service: Service, run_id: str) -> None:
    """Most runs end at once; one whose worker has died ends when another takes it over, which nobody waits for."""
    try:
        async with asyncio.timeout(CANCEL_S):
            await service.host.wait(run_id)
    except TimeoutError:
        pass


async def _begin(service: Service, user: User, body: ResponseBody) -> Started:
    check_supported(body)
    turns = of_response(body)
    graph = await service.graph_of(body.model, body.penstock.run_id)
    if body.previous_response_id is None:
        return await start(service, user, graph, turns, body, _asked(body, is_heard=converses(graph)).kept())
    before = await _run_of(service, user, body.previous_response_id, "previous_response_id")
    return await go_on(service, user, graph, before, turns, body, _asked(body, is_heard=True).kept())


async def _run_of(service: Service, user: User, response_id: str, param: str) -> RunRecord:
    run_id = run_id_of(response_id)
    run = None if run_id is None else await service.host.get(run_id)
    if run is None or not (user.is_admin or run.owner == user.name):
        raise Refused(404, f"there is no response {response_id!r}", param=param, code="not_found")
    return run


async def _followed(begun: Started, under_way: ResponseUnderWay) -> None:
    async with aclosing(begun.pieces(Answer(begun.speaking))) as pieces:
        async for piece in pieces:
            for _ in under_way.events(piece):
                pass


async def _as_it_stands(
    service: Service, run: RunRecord, speaking: frozenset[str], under_way: ResponseUnderWay
) -> ResponseUnderWay:
    pieces, answer = fold(await events_so_far(service, run.id), speaking)
    for piece in pieces:
        for _ in under_way.events(piece):
            pass
    if answer.ended is None:
        under_way.status = STATUSES[run.status]
    if run.status != "waiting":
        under_way.waits = None
    return under_way


async def _must_have_come_to(service: Service, run: RunRecord, speaking: frozenset[str], after: int) -> None:
    """Refused for a place ahead of what was told: a stream from there would have nothing to say, not even its end."""
    so_far = ResponseUnderWay(run.id, 0, _asked_once(run))
    for _ in so_far.opening():
        pass
    told = (await _as_it_stands(service, run, speaking, so_far)).told
    if after >= told:
        message = f"event {after} is ahead of the newest, which is {told - 1}: leave it out to begin again"
        raise Refused(400, message, param="starting_after", code="invalid_value")


async def _frames(begun: Started, under_way: ResponseUnderWay, after: int | None = None) -> AsyncGenerator[bytes, None]:
    for event in under_way.opening():
        if _is_wanted(event, after):
            yield _frame(event)
    try:
        pieces = begun.pieces(Answer(begun.speaking))
        async with aclosing(with_heartbeats(pieces, begun.service.streams)) as coming:
            async for piece in coming:
                if piece is None:
                    yield HEARTBEAT
                    continue
                for event in under_way.events(piece):
                    if _is_wanted(event, after):
                        yield _frame(event)
    except Exception as error:  # the status is sent already: whatever it is, the stream has to say it
        refused = broken_off(error, begun.run.id)
        error_event = under_way.broken(refused.code or "server_error", refused.message)
        yield _frame({**error_event, "sequence_number": max(error_event["sequence_number"], after or 0)})


def _is_wanted(event: Mapping[str, Any], after: int | None) -> bool:
    """Whether it was not told before; an error is no event of its own, and keeps the number of the one before it."""
    return after is None or event["sequence_number"] > after or event["type"] == "error"


async def _let_it_go_on() -> None:
    """Whoever looks again at a response does not own its run's fate."""


def _under_way(begun: Started, body: ResponseBody) -> ResponseUnderWay:
    metadata = _asked_once(begun.run).metadata  # of a run that was there, it is what the run has
    asked = replace(_asked(body, is_heard=begun.is_heard), metadata=metadata)
    return ResponseUnderWay(begun.run.id, begun.created, asked)


def _asked(body: ResponseBody, *, is_heard: bool) -> Asked:
    ignored = body.ignored(is_heard=is_heard)
    return Asked(
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
    )


def _asked_once(run: RunRecord) -> Asked:
    return Asked.of(run.origin.get("about"), run.graph_id)


def _json(under_way: ResponseUnderWay) -> Response:
    return Response(written(under_way.to_dict()), media_type="application/json")


def _frame(event: Mapping[str, Any]) -> bytes:
    return framed(event, event=event["type"])
