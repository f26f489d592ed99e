"""One stream for everything that a browser watches: several runs, lists of runs and approvals, budgets of today."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query
from starlette.responses import Response

from penstock.server.auth import User
from penstock.server.errors import ApiError, not_found
from penstock.server.multiplex import MAX_STREAM_RUNS, Changes, Multiplex, Topic
from penstock.server.routes.money import budgets_for
from penstock.server.schemas import ApprovalShown, RunSummary
from penstock.server.sse import EventStream, framed
from penstock.server.state import KNOWN_QUERY, CurrentUser, ServerState, Service

router = APIRouter(prefix="/api/stream", tags=["runs"], dependencies=[KNOWN_QUERY])

LISTED = 50
"""Number of the newest runs, and of the oldest open approvals, that a topic covers."""
RUN = re.compile(r"(?P<id>[A-Za-z0-9][A-Za-z0-9._:-]{0,99})@(?P<seq>[0-9]{1,15})")
EXPECTED = "ids of runs, each followed by @ and the number of the last event seen, such as `RUN@0`, separated by commas"

MAX_COALESCE_MS = 1_000

BUDGETS_INTERVAL_S = 0.25
"""Shortest time between two events with the budgets of today."""

TopicName = Literal["runs", "approvals", "budgets"]


@router.get("", response_class=Response, responses={200: {"content": {"text/event-stream": {}}}})
async def get_stream(
    service: Service,
    user: CurrentUser,
    runs: Annotated[str, Query(max_length=6_000, description="Runs to follow: `RUN@SEQ,RUN@SEQ`")] = "",
    topics: Annotated[list[TopicName] | None, Query(max_length=3, description="Lists to follow")] = None,
    types: Annotated[
        list[Annotated[str, Query(pattern=r"^[a-z0-9_.-]{1,100}$")]] | None,
        Query(max_length=50, description="Only events of these types"),
    ] = None,
    follow: Annotated[bool, Query(description="With false, end when everything there is was sent")] = True,
    coalesce_ms: Annotated[
        int,
        Query(
            ge=0,
            le=MAX_COALESCE_MS,
            description="Join texts of one node that come within this time into one event, with its pieces in `joined`",
        ),
    ] = 0,
    last_event_id: Annotated[str | None, Header(pattern=r"^[0-9]{1,15}(,[0-9]{1,15})*$")] = None,
) -> EventStream:
    """Stream the events of several runs and the changes of lists; reconnect with the id of the last event received.

    Every event has the `run_id` it belongs to. `run.summary` reports a run of the list that is new or has changed,
    `approvals.open` the open approvals, `budgets.day` what `GET /api/budgets` returns. 404 if one of the runs does not
    exist or belongs to another user.
    """
    ids, places = _parse(runs, last_event_id)
    if not ids and not topics:
        raise ApiError(422, "name at least one run in `runs`, or a topic: runs, approvals, budgets", path="query.runs")
    for run_id, place in zip(ids, places, strict=True):
        await _check(service, user, run_id, place)
    watched: dict[TopicName, Topic] = {
        "runs": Topic(_run_list(service, user)),
        "approvals": Topic(_approval_list(service, user)),
        "budgets": Topic(_budgets(service, user), after_change_s=BUDGETS_INTERVAL_S),
    }
    with service.streams.place(user.name):
        multiplex = Multiplex(
            service.stores,
            ids,
            places,
            heartbeat_s=service.streams.heartbeat_s,
            types=frozenset(types or ()),
            topics=[watched[topic] for topic in dict.fromkeys(topics or ())],
            follows=follow,
            coalesce_s=coalesce_ms / 1_000,
        )
        return EventStream(multiplex.frames(), service.streams, user, rest=multiplex.rest)


def _parse(runs: str, last_event_id: str | None) -> tuple[list[str], list[int]]:
    """Return the ids of the runs and the positions to start after; the header takes precedence."""
    parts = runs.split(",") if runs else []
    matches = [RUN.fullmatch(part) for part in parts]
    if not all(matches) or len({match["id"] for match in matches if match}) < len(parts):
        raise ApiError(422, f"`runs` must be different {EXPECTED}", path="query.runs")
    if len(parts) > MAX_STREAM_RUNS:
        raise ApiError(422, f"at most {MAX_STREAM_RUNS} runs are allowed on one stream", path="query.runs")
    ids = [match["id"] for match in matches if match]
    places = [int(match["seq"]) for match in matches if match]
    if last_event_id is not None:
        places = [int(place) for place in last_event_id.split(",")]
        if len(places) != len(ids):
            message = f"the id has {len(places)} positions for {len(ids)} runs; reconnect with the same `runs`"
            raise ApiError(422, message, path="header.last-event-id")
    return ids, places


async def _check(service: ServerState, user: User, run_id: str, place: int) -> None:
    run = await service.host.get(run_id)
    if run is None or not user.may_see(run.owner):
        raise not_found("run")
    newest = await service.stores.events.last_seq(run_id) if place else 0
    if place > newest:
        message = f"run {run_id} has no event {place} yet; its newest is {newest}: send {newest}, or 0 for all events"
        raise ApiError(422, message, path="query.runs", details=[{"run_id": run_id, "last_seq": newest}])


def _run_list(service: ServerState, user: User) -> Changes:
    owner, known = None if user.is_admin else user.name, dict[str, Any]()

    async def changes() -> bytes:
        runs = await service.stores.runs.list(owner=owner, limit=LISTED)
        live = await service.host.live_usage(runs)
        frames, now = b"", {}
        for run in reversed(runs):
            now[run.id] = shown = RunSummary.of(run, live.get(run.id)).model_dump(mode="json")
            if known.get(run.id) != shown:
                frames += framed({"type": "run.summary", "run": shown}, event="run.summary")
        known.clear()
        known.update(now)
        return frames

    return changes


def _approval_list(service: ServerState, user: User) -> Changes:
    owner, known = None if user.is_admin else user.name, list[Any]()

    async def changes() -> bytes:
        found = await service.stores.approvals.list(owner=owner, states=("waiting",), limit=LISTED)
        shown = [ApprovalShown.of(approval).model_dump(mode="json") for approval in found]
        if known and known[0] == shown:
            return b""
        known[:] = [shown]
        return framed({"type": "approvals.open", "approvals": shown}, event="approvals.open")

    return changes


def _budgets(service: ServerState, user: User) -> Changes:
    known = list[Any]()

    async def changes() -> bytes:
        shown = (await budgets_for(service, user)).model_dump(mode="json")
        # The time of the reading always differs.
        if known == [{**shown, "now_ms": None}]:
            return b""
        known[:] = [{**shown, "now_ms": None}]
        return framed({"type": "budgets.day", **shown}, event="budgets.day")

    return changes
