"""Runs: started, watched, and told what to do next."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.errors import PenstockError
from penstock.hosting.control import UNSET
from penstock.hosting.records import RunRecord, RunStatus
from penstock.hosting.settings import NO_CEILINGS
from penstock.hosting.work.halts import halt_of
from penstock.server.auth import User
from penstock.server.errors import ApiError, api_error, not_found
from penstock.server.parts import (
    KNOWN_QUERY,
    Asker,
    PageSize,
    Parts,
    PathId,
    QueryId,
    Service,
    check_new_id,
    check_place,
    may_come,
    readable,
    whose,
)
from penstock.server.schemas import (
    Cancel,
    CancelShown,
    EventPage,
    EventShown,
    Fork,
    Grant,
    NewRun,
    RunPage,
    RunShown,
    RunSummary,
    run_limits,
)
from penstock.server.sse import EventStream, event_json, follow, is_over

router = APIRouter(prefix="/api/runs", tags=["runs"], dependencies=[KNOWN_QUERY])

MAX_SEQ = 2**53 - 1
EXPORT_PAGE = 200
Stream = Annotated[bool, Query(description="true: answer with the run's events at once")]
Place = Annotated[int, Query(ge=0, le=MAX_SEQ)]
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
OVER: dict[int | str, dict[str, Any]] = {204: {"description": "The run has ended, and its last event is the one named"}}


@router.get("")
async def list_runs(
    service: Service,
    user: Asker,
    status: Annotated[list[RunStatus] | None, Query(max_length=8)] = None,
    graph_id: QueryId = None,
    chat_id: QueryId = None,
    owner: QueryId = None,
    before: QueryId = None,
    limit: PageSize = 50,
) -> RunPage:
    """One's own runs, the newest first; an admin sees everybody's."""
    if before is not None:
        check_place("run", await service.stores.runs.get(before), user)
    found = await service.stores.runs.list(
        owner=whose(user, owner),
        statuses=status or (),
        graph_id=graph_id,
        chat_id=chat_id,
        before=before,
        limit=limit + 1,
    )
    shown = [RunSummary.of(run) for run in found[:limit]]
    return RunPage(runs=shown, next=shown[-1].id if len(found) > limit else None)


@router.post("", status_code=201, response_model=RunShown, responses=STREAMED)
async def start_run(body: NewRun, request: Request, service: Service, user: Asker, stream: Stream = False) -> Any:
    """Start a run of a graph; it goes on whether or not anybody watches."""
    check_new_id(body.run_id, user, "run_id")
    await service.must_run(body.graph_id, body.version, run_id=body.run_id)
    if not (stream or wants_events(request)):
        return await _begun(service, await _submitted(service, user, body))
    with service.streams.place(user.name):
        return told(service, user, (await _submitted(service, user, body)).id)


@router.get("/{run_id}")
async def get_run(run_id: PathId, service: Service, user: Asker) -> RunShown:
    """The run as it stands."""
    return await _shown(service, await _own(service, run_id, user))


@router.get("/{run_id}/events", response_model=EventPage, responses={**STREAMED, **OVER})
async def get_events(
    run_id: PathId,
    request: Request,
    service: Service,
    user: Asker,
    after: Place = 0,
    limit: PageSize = 200,
    last_event_id: Annotated[str | None, Header(pattern=r"^[0-9]{1,15}$")] = None,
) -> Any:
    """The run's events as a stream, from the beginning or after the one named; as a page, if JSON is asked for.

    422 if the one named is ahead of the newest; `details` has that one's number. 204 for a stream in which nothing
    would come, because the one named has ended the run: a browser's EventSource asks again after any other end.
    """
    run = await _own(service, run_id, user)
    place = after if last_event_id is None else int(last_event_id)
    await _must_have_come_to(service, run, place, "query.after" if last_event_id is None else "header.last-event-id")
    if _wants_page(request):
        return await _page(service, run, place, limit)
    if await is_over(service.stores, run, place):
        return Response(status_code=204, headers={"X-Run-Id": run.id})
    with service.streams.place(user.name):
        return told(service, user, run.id, place)


@router.get("/{run_id}/export", response_class=Response, responses={200: {"content": {"application/x-ndjson": {}}}})
async def export_run(run_id: PathId, service: Service, user: Asker) -> Response:
    """Everything there is of it, a JSON value per line: the run, its graph, its events."""
    run = await _own(service, run_id, user)
    disposition = {"Content-Disposition": f'attachment; filename="run-{run_id.replace(":", "-")}.ndjson"'}
    with service.streams.place(user.name):
        lines = _exported(service, run)
        return EventStream(lines, service.streams, user, headers=disposition, media_type="application/x-ndjson")


@router.post("/{run_id}/cancel")
async def cancel_run(run_id: PathId, service: Service, user: Asker, body: Cancel | None = None) -> CancelShown:
    """Stop a run, wherever it is; one that is not there yet will stop as soon as it comes, if it is the asker's.

    That is remembered for UUIDs, and for ids that begin with the asker's name and a colon; an admin's is for any id,
    whoever's run it will be.
    """
    run = await service.host.get(run_id)
    is_theirs = run is not None and (user.is_admin or run.owner == user.name)
    if not is_theirs and not may_come(run_id, user):
        raise not_found("run")
    # Another's run is left alone by the host, which says the same of it as of one that is not there.
    owner = None if user.is_admin else user.name
    result = await service.host.cancel(run_id, reason=(body or Cancel()).reason, by=user.name, owner=owner)
    return CancelShown.model_validate({"result": str(result.value)})


@router.post("/{run_id}/resume")
async def resume_run(run_id: PathId, service: Service, user: Asker) -> RunShown:
    """Let a run that is parked, failed, halted or cancelled go on from what it has done."""
    await _own(service, run_id, user)
    return await _shown(service, await service.host.resume(run_id))


@router.post("/{run_id}/grant")
async def grant_run(run_id: PathId, body: Grant, service: Service, user: Asker) -> RunShown:
    """Raise a run's ceilings, no further than the host allows, unless an admin does; a halted run goes on.

    409 if it gives nothing of what has halted the run, which would halt at the same place; the message says what helps.
    """
    await _own(service, run_id, user)
    more, most = body.limits.to_run_limits(), NO_CEILINGS if user.is_admin else service.host.settings.ceilings
    return await _shown(service, await service.host.grant(run_id, more, by=user.name, within=most))


@router.post("/{run_id}/fork", status_code=201)
async def fork_run(run_id: PathId, body: Fork, service: Service, user: Asker) -> RunShown:
    """A new run that takes over what this one did before the node `at`, and runs it and all behind it again."""
    await _own(service, run_id, user)
    check_new_id(body.run_id, user, "run_id")
    given = body.input if "input" in body.model_fields_set else UNSET
    forked = await service.host.fork(run_id, owner=user.name, at=body.at, input=given, run_id_new=body.run_id)
    return await _begun(service, forked)


@router.post("/{run_id}/replay", status_code=201)
async def replay_run(run_id: PathId, service: Service, user: Asker) -> RunShown:
    """A new run that does what this one did, from its journal alone: nothing is called, nothing is spent."""
    await _own(service, run_id, user)
    return await _begun(service, await service.host.replay(run_id, owner=user.name))


def wants_events(request: Request) -> bool:
    """Whether a stream is asked for by name."""
    return "text/event-stream" in request.headers.get("accept", "")


def told(
    service: Parts, user: User, run_id: str, after: int = 0, *, is_cancelled_on_leave: bool = False
) -> EventStream:
    """The run's events as an answer that has its place; the run may be cancelled when its only watcher leaves."""

    async def cancel() -> None:
        await service.host.cancel(run_id, reason="the client left", by=user.name)

    frames = follow(service.stores, run_id, after, service.streams.heartbeat_s)
    on_left = cancel if is_cancelled_on_leave else None
    return EventStream(frames, service.streams, user, on_left=on_left, headers={"X-Run-Id": run_id})


def _wants_page(request: Request) -> bool:
    return "application/json" in request.headers.get("accept", "") and not wants_events(request)


async def _submitted(service: Parts, user: User, body: NewRun) -> RunRecord:
    return await service.host.submit(
        owner=user.name,
        graph_id=body.graph_id,
        version=body.version,
        input=body.input,
        limits=run_limits(body.limits),
        run_id=body.run_id,
    )


async def _begun(service: Parts, run: RunRecord) -> RunShown:
    """A run that is new, as it stands; if that cannot be said, that there is one: to ask again would begin another."""
    try:
        return await _shown(service, run)
    except PenstockError as error:
        said = api_error(error)
        if said.status == 500:
            raise
        why = str(said).partition(";")[0]  # and what it advises is to ask again
        message = f"run {run.id} was started, and how it stands cannot be told: {why}; GET /api/runs/{run.id} later"
        raise ApiError(said.status, message, code=said.code, headers={**said.headers, "X-Run-Id": run.id}) from error


async def _own(service: Parts, run_id: str, user: User) -> RunRecord:
    run: RunRecord = readable("run", await service.host.get(run_id), user)
    return run


async def _must_have_come_to(service: Parts, run: RunRecord, place: int, path: str) -> None:
    """422 for a place ahead of the log: what was there is gone, or was another run's, and nothing would ever come."""
    newest = await service.stores.events.last_seq(run.id) if place else 0
    if place > newest:
        message = f"the run has told {newest} events, and there is no event {place}: ask after {newest}, or 0 for all"
        raise ApiError(422, message, path=path, details=[{"last_seq": newest, "status": run.status}])


async def _shown(service: Parts, run: RunRecord) -> RunShown:
    events = service.stores.events
    last_seq = await events.last_seq(run.id)
    newest = await events.read(run.id, last_seq - 1, 1) if run.status == "halted" and last_seq else ()
    return RunShown.whole(run, last_seq, halt_of(newest[0] if newest else None))


async def _page(service: Parts, run: RunRecord, after: int, limit: int) -> JSONResponse:
    events = [EventShown(**event_json(one)) for one in await service.stores.events.read(run.id, after, limit)]
    now = await service.host.get(run.id)
    page = EventPage(events=events, last_seq=await service.stores.events.last_seq(run.id), status=(now or run).status)
    return JSONResponse(page.model_dump(mode="json"))


async def _exported(service: Parts, run: RunRecord) -> AsyncGenerator[bytes, None]:
    yield _line({"run": (await _shown(service, run)).model_dump(mode="json")})
    graph = await service.stores.graphs.get(run.graph_id, run.graph_version)
    if graph is not None:
        yield _line({"graph": {"id": graph.id, "version": graph.version, "document": dict(graph.document)}})
    place = 0
    while page := await service.stores.events.read(run.id, place, EXPORT_PAGE):
        for event in page:
            yield _line({"event": event_json(event)})
        place = page[-1].seq


def _line(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n"
