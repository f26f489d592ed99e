"""Runs: start, follow and control them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.errors import InvalidValue, PenstockError
from penstock.hosting.control import UNSET
from penstock.hosting.limits import NO_CEILINGS
from penstock.hosting.ports import RunFilter, RunOrder, RunRecord, RunStatus
from penstock.money import to_nanos, to_usd
from penstock.server.audit import note
from penstock.server.auth import LOCAL, User
from penstock.server.errors import ApiError, api_error, not_found
from penstock.server.schemas import (
    MAX_MONEY_USD,
    BillList,
    BillShown,
    Cancel,
    CancelShown,
    EventPage,
    EventShown,
    Fork,
    Grant,
    NewRun,
    ReleaseBill,
    ResolveBill,
    RunPage,
    RunShown,
    RunSummary,
    run_limits,
)
from penstock.server.sse import DISCONNECTED, EventStream, event_json, follow, is_over
from penstock.server.state import (
    KNOWN_QUERY,
    CurrentUser,
    PageSize,
    PathId,
    QueryId,
    ServerState,
    Service,
    check_cursor,
    may_start_later,
    owner_filter,
    readable_run,
)
from penstock.stops import StopReason

router = APIRouter(prefix="/api/runs", tags=["runs"], dependencies=[KNOWN_QUERY])

MAX_SEQ = 2**53 - 1
EXPORT_PAGE = 200
MAX_COUNTED = 10_000
"""Number of runs at which counting stops: a larger count needs a long scan."""
Stream = Annotated[bool, Query(description="Respond with a stream of the run's events")]
Place = Annotated[int, Query(ge=0, le=MAX_SEQ)]
Origin = Literal["run", "chat", "fork", "replay"]
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
OVER: dict[int | str, dict[str, Any]] = {
    204: {"description": "The run has ended with the given event; no more events follow"}
}


@router.get("")
async def list_runs(
    service: Service,
    user: CurrentUser,
    status: Annotated[list[RunStatus] | None, Query(max_length=8)] = None,
    graph_id: QueryId = None,
    chat_id: QueryId = None,
    owner: QueryId = None,
    before: QueryId = None,
    limit: PageSize = 50,
    since: Annotated[int | None, Query(ge=0, le=MAX_SEQ, description="Submitted at this time, in ms, or later")] = None,
    until: Annotated[int | None, Query(ge=0, le=MAX_SEQ, description="Submitted before this time, in ms")] = None,
    stop_reason: Annotated[StopReason | None, Query(description="Why the run was halted or cancelled")] = None,
    min_cost_usd: Annotated[float | None, Query(ge=0, le=MAX_MONEY_USD, description="Recorded cost")] = None,
    q: Annotated[
        str | None,
        Query(max_length=100, pattern=r"^[^\x00-\x1f\x7f]+$", description="Part of the run's or graph's id"),
    ] = None,
    origin: Annotated[Origin | None, Query(description="How the run began")] = None,
    sort: Annotated[RunOrder, Query(description="Newest or most expensive first")] = "created",
    count: Annotated[bool, Query(description="Count the runs of all pages")] = False,
) -> RunPage:
    """List your own runs, newest first; admins see all runs.

    Runs in progress have `live` figures: their spending and the amounts held for their calls. With `count`, `total` is
    the number of runs that match on all pages; 10,000 stands for that many or more.
    """
    if before is not None:
        await check_cursor("run", service.stores.runs.get(before), user)
    cost_nanos = None if min_cost_usd is None else to_nanos(min_cost_usd)
    reason = None if stop_reason is None else str(stop_reason)
    matching = RunFilter(since, until, reason, cost_nanos, q, origin=origin)
    wanted = {"owner": owner_filter(user, owner), "statuses": status or (), "graph_id": graph_id, "chat_id": chat_id}
    found = await service.stores.runs.list(before=before, limit=limit + 1, matching=matching, order=sort, **wanted)
    total = await service.stores.runs.count(matching=matching, at_most=MAX_COUNTED, **wanted) if count else None
    live = await service.host.live_usage(found[:limit])
    shown = [RunSummary.of(run, live.get(run.id)) for run in found[:limit]]
    return RunPage(runs=shown, next=shown[-1].id if len(found) > limit else None, total=total)


@router.post("", status_code=201, response_model=RunShown, responses=STREAMED)
async def start_run(body: NewRun, request: Request, service: Service, user: CurrentUser, stream: Stream = False) -> Any:
    """Start a run of a graph; it continues whether or not a client follows it."""
    user.check_new_id("run_id", body.run_id)
    await service.must_run(body.graph_id, body.version, run_id=body.run_id)
    if not (stream or wants_events(request)):
        return await _started(service, await _submit(service, user, body))
    with service.streams.place(user.name):
        return event_stream(service, user, (await _submit(service, user, body)).id)


@router.get("/{run_id}")
async def get_run(run_id: PathId, service: Service, user: CurrentUser) -> RunShown:
    """Return the current state of a run."""
    return await _shown(service, await readable_run(service, run_id, user))


@router.get("/{run_id}/events", response_model=EventPage, responses={**STREAMED, **OVER})
async def get_events(
    run_id: PathId,
    request: Request,
    service: Service,
    user: CurrentUser,
    after: Place = 0,
    limit: PageSize = 200,
    last_event_id: Annotated[str | None, Header(pattern=r"^[0-9]{1,15}$")] = None,
) -> Any:
    """Stream the run's events, from the first or after the given one; return a page if `Accept` requests JSON.

    422 if the given event is ahead of the newest, whose number is in `details`. 204 if the given event ended the run
    and no more events follow: a browser's EventSource would reconnect after any other response.
    """
    run = await readable_run(service, run_id, user)
    place = after if last_event_id is None else int(last_event_id)
    await _check_event_exists(service, run, place, "query.after" if last_event_id is None else "header.last-event-id")
    if _wants_page(request):
        return await _page(service, run, place, limit)
    if await is_over(service.stores, run, place):
        return Response(status_code=204, headers={"X-Run-Id": run.id})
    with service.streams.place(user.name):
        return event_stream(service, user, run.id, place)


@router.get("/{run_id}/export", response_class=Response, responses={200: {"content": {"application/x-ndjson": {}}}})
async def export_run(run_id: PathId, service: Service, user: CurrentUser) -> Response:
    """Export a run as one JSON value per line: the run, its graph, its events."""
    run = await readable_run(service, run_id, user)
    disposition = {"Content-Disposition": f'attachment; filename="run-{run_id.replace(":", "-")}.ndjson"'}
    with service.streams.place(user.name):
        lines = _export(service, run)
        return EventStream(lines, service.streams, user, headers=disposition, media_type="application/x-ndjson")


@router.post("/{run_id}/cancel")
async def cancel_run(run_id: PathId, service: Service, user: CurrentUser, body: Cancel | None = None) -> CancelShown:
    """Cancel a run on any host; a run that does not exist yet is cancelled on submission, if it is the caller's.

    Such a cancel request is kept for UUIDs and for ids that begin with the caller's name and a colon; an admin's for
    any id and any owner.
    """
    run = await service.host.get(run_id)
    is_visible = run is not None and user.may_see(run.owner)
    if not is_visible and not may_start_later(run_id, user):
        raise not_found("run")
    # The host does not cancel another owner's run, and returns the same result as for a run that does not exist.
    owner = None if user.is_admin else user.name
    note(owner=run.owner if run is not None and is_visible else None, reason=(body or Cancel()).reason)
    result = await service.host.cancel(run_id, reason=(body or Cancel()).reason, by=user.name, owner=owner)
    return CancelShown.model_validate({"result": str(result.value)})


@router.post("/{run_id}/resume")
async def resume_run(run_id: PathId, service: Service, user: CurrentUser) -> RunShown:
    """Resume a parked, failed, halted or cancelled run from its completed work."""
    await readable_run(service, run_id, user)
    return await _shown(service, await service.host.resume(run_id))


@router.post("/{run_id}/grant")
async def grant_run(run_id: PathId, body: Grant, service: Service, user: CurrentUser) -> RunShown:
    """Raise a run's limits, up to the host's ceilings unless the caller is an admin; a halted run continues.

    409 if it does not raise the limit that halted the run, which would halt again; the message says what helps.
    """
    await readable_run(service, run_id, user)
    note(limits=body.limits.model_dump(mode="json", exclude_none=True))
    more, most = body.limits.to_run_limits(), NO_CEILINGS if user.is_admin else service.host.settings.ceilings
    return await _shown(service, await service.host.grant(run_id, more, by=user.name, within=most))


@router.get("/{run_id}/bills")
async def list_bills(run_id: PathId, service: Service, user: CurrentUser) -> BillList:
    """List the calls of a run whose bill is unknown: their holds stay taken until each is resolved or released."""
    await readable_run(service, run_id, user)
    bills = await service.host.bills(run_id)
    held_nanos = sum(bill.held.cost_nanos for bill in bills)
    return BillList(bills=[BillShown.of(bill) for bill in bills], unresolved_usd=to_usd(held_nanos))


@router.post("/{run_id}/bills/resolve")
async def resolve_bill(run_id: PathId, body: ResolveBill, service: Service, user: CurrentUser) -> RunShown:
    """Settle an unresolved bill of an ended run at the real cost of its call, which may be more than its hold.

    The event `bill.resolved` records who did it. 409 if the run has no such bill, it was resolved already, or the run
    has continued.
    """
    await readable_run(service, run_id, user)
    note(call_id=body.call_id, cost_usd=str(body.cost_usd))
    run = await service.host.resolve_bill(
        run_id,
        body.call_id,
        cost_usd=body.cost_usd,
        by=_person(user, body.by),
        tokens_in=body.tokens_in,
        tokens_out=body.tokens_out,
    )
    return await _shown(service, run)


@router.post("/{run_id}/bills/release")
async def release_bill(run_id: PathId, body: ReleaseBill, service: Service, user: CurrentUser) -> RunShown:
    """Release an unresolved bill of an ended run, whose call cost nothing; the event is `bill.released`."""
    await readable_run(service, run_id, user)
    note(call_id=body.call_id)
    return await _shown(service, await service.host.release_bill(run_id, body.call_id, by=_person(user, body.by)))


@router.post("/{run_id}/fork", status_code=201)
async def fork_run(run_id: PathId, body: Fork, service: Service, user: CurrentUser) -> RunShown:
    """Start a new run that reuses this run's work before the node `at`, and runs it and all later nodes again."""
    await readable_run(service, run_id, user)
    user.check_new_id("run_id", body.run_id)
    given = body.input if "input" in body.model_fields_set else UNSET
    forked = await service.host.fork(run_id, owner=user.name, at=body.at, input=given, run_id_new=body.run_id)
    return await _started(service, forked)


@router.post("/{run_id}/replay", status_code=201)
async def replay_run(run_id: PathId, service: Service, user: CurrentUser) -> RunShown:
    """Start a new run that repeats this run from its journal alone: nothing is called or spent."""
    await readable_run(service, run_id, user)
    return await _started(service, await service.host.replay(run_id, owner=user.name))


def _person(user: User, given: str | None) -> str:
    """Return who resolves a bill: the user of the token; without tokens, the given name."""
    if given is None or given == user.name:
        return user.name
    if user is not LOCAL:
        raise InvalidValue("by", given, f"left out, or your own name: {user.name}")
    return given


def wants_events(request: Request) -> bool:
    """Whether the Accept header requests an event stream."""
    return "text/event-stream" in request.headers.get("accept", "")


def event_stream(
    service: ServerState, user: User, run_id: str, after: int = 0, *, cancel_on_disconnect: bool = False
) -> EventStream:
    """Return the run's events as a reserved stream; optionally cancel the run when this client disconnects."""

    async def cancel() -> None:
        await service.host.cancel(run_id, reason=DISCONNECTED, by=user.name)

    frames = follow(service.host.run_logs(), run_id, after, service.streams.heartbeat_s)
    on_disconnect = cancel if cancel_on_disconnect else None
    return EventStream(frames, service.streams, user, on_disconnect=on_disconnect, headers={"X-Run-Id": run_id})


def _wants_page(request: Request) -> bool:
    return "application/json" in request.headers.get("accept", "") and not wants_events(request)


async def _submit(service: ServerState, user: User, body: NewRun) -> RunRecord:
    return await service.host.submit(
        owner=user.name,
        graph_id=body.graph_id,
        version=body.version,
        input=body.input,
        limits=run_limits(body.limits),
        run_id=body.run_id,
    )


async def _started(service: ServerState, run: RunRecord) -> RunShown:
    """Return a new run; if that fails, the error names the run, because a retry would start another one."""
    try:
        return await _shown(service, run)
    except PenstockError as error:
        known = api_error(error)
        if known.status == 500:
            raise
        why = str(known).partition(";")[0]  # drop the advice to retry the request
        message = f"run {run.id} was started, but its state cannot be read: {why}; GET /api/runs/{run.id} later"
        raise ApiError(known.status, message, code=known.code, headers={**known.headers, "X-Run-Id": run.id}) from error


async def _check_event_exists(service: ServerState, run: RunRecord, place: int, path: str) -> None:
    """Raise 422 for an event ahead of the log: it was lost or is another run's, and no event would follow."""
    newest = await service.stores.events.last_seq(run.id) if place else 0
    if place > newest:
        message = f"the run has no event {place} yet; its newest is {newest}: send {newest}, or 0 for all events"
        raise ApiError(422, message, path=path, details=[{"last_seq": newest, "status": run.status}])


async def _shown(service: ServerState, run: RunRecord) -> RunShown:
    live = await service.host.live_usage([run])
    return RunShown.whole(run, await service.stores.events.last_seq(run.id), live.get(run.id))


async def _page(service: ServerState, run: RunRecord, after: int, limit: int) -> JSONResponse:
    events = [EventShown(**event_json(event)) for event in await service.stores.events.read(run.id, after, limit)]
    now = await service.host.get(run.id)
    page = EventPage(events=events, last_seq=await service.stores.events.last_seq(run.id), status=(now or run).status)
    return JSONResponse(page.model_dump(mode="json"))


async def _export(service: ServerState, run: RunRecord) -> AsyncGenerator[bytes, None]:
    yield json_line({"run": (await _shown(service, run)).model_dump(mode="json")})
    graph = await service.stores.graphs.get(run.graph_id, run.graph_version)
    if graph is not None:
        yield json_line({"graph": {"id": graph.id, "version": graph.version, "document": dict(graph.document)}})
    place = 0
    while page := await service.stores.events.read(run.id, place, EXPORT_PAGE):
        for event in page:
            yield json_line({"event": event_json(event)})
        place = page[-1].seq


def json_line(value: Any) -> bytes:
    """Return the value as a line of JSON in ASCII."""
    return json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n"
