"""Shared state of the routes, their dependencies, and checks of ownership."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, Path, Query
from starlette.requests import Request

from penstock import logs
from penstock.clock import Clock
from penstock.hosting.ports import RunRecord, StoreCorrupt
from penstock.server.audit import note
from penstock.server.auth import User
from penstock.server.errors import ApiError, not_found
from penstock.server.graph_check import GraphChecker
from penstock.server.metrics import Metrics
from penstock.server.readiness import Readiness
from penstock.server.run_counts import RunCounts
from penstock.server.schemas import AN_ID
from penstock.server.settings import ServerSettings
from penstock.server.sse import Streams
from penstock.server.tokens import StoredTokens
from penstock.server.trees import TreeCache
from penstock.server.ui_files import UiFiles

if TYPE_CHECKING:
    from penstock.chat.service import ChatService
    from penstock.hosting.host import RunHost
    from penstock.kernel.executor import ExecutorRegistry

MAX_PAGE = 500
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class ServerState:
    """The parts that the app was composed of."""

    host: RunHost
    chats: ChatService
    stores: Any
    graphs: GraphChecker
    settings: ServerSettings
    metrics: Metrics
    streams: Streams
    readiness: Readiness
    clock: Clock
    ui: UiFiles
    tokens: StoredTokens
    run_counts: RunCounts
    trees: TreeCache = field(default_factory=TreeCache)

    async def must_run(
        self, graph_id: str, version: int | None = None, *, run_id: str | None = None, in_chat: bool = False
    ) -> None:
        """Raise GraphNotFound, GraphArchived or GraphInvalid if a new run of the graph could not start."""
        if run_id is None or await self.host.get(run_id) is None:
            graph = await self.host.graph_to_begin(graph_id, version)
            await self.graphs.must_run(graph, in_chat=in_chat)

    def executors(self) -> ExecutorRegistry:
        """Return the executors of the node types on this server."""
        return self.host.executors

    async def needs_tokens(self) -> bool:
        """Whether clients need a token: of the environment, or of the database."""
        return bool(self.settings.tokens) or await self.tokens.are_required()

    def now_ms(self) -> int:
        """Return the current time in milliseconds since 1970."""
        return self.clock.time_ns() // 1_000_000


async def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


async def _user(request: Request) -> User:
    user: User = request.state.user
    return user


async def _check_query(request: Request) -> None:
    """Raise 422 for a query parameter that the route does not know, rather than ignore it."""
    known = list(_query_names(request.scope["route"].dependant))
    for name in request.query_params:
        if name not in known and request.url.path.startswith("/api/"):  # health probes may add parameters of their own
            allowed = f"its parameters are {', '.join(known)}" if known else "it takes none"
            message = f"this route has no query parameter {name[:80]!r}; {allowed}"
            raise ApiError(422, message, path=f"query.{name[:80]}")


def _query_names(dependant: Any) -> Iterator[str]:
    yield from (field.alias for field in dependant.query_params)
    for dependency in dependant.dependencies:
        yield from _query_names(dependency)


KNOWN_QUERY = Depends(_check_query)
"""Dependency of every router except /v1, whose clients may send unknown parameters."""
Service = Annotated[ServerState, Depends(_state)]
CurrentUser = Annotated[User, Depends(_user)]
PathId = Annotated[str, Path(pattern=AN_ID)]
QueryId = Annotated[str | None, Query(pattern=AN_ID)]
PageSize = Annotated[int, Query(ge=1, le=MAX_PAGE)]


def readable(what: str, record: Any, user: User) -> Any:
    """Return the record if the user may read it; 404 both for a missing record and for another user's."""
    if record is None or not user.may_see(record.owner):
        raise not_found(what)
    note(owner=record.owner)
    return record


async def readable_run(service: ServerState, run_id: str, user: User) -> RunRecord:
    """Return the run if the user may read it; the request's log record names it."""
    run: RunRecord = readable("run", await service.host.get(run_id), user)
    logs.note(run_id=run.id)
    return run


async def check_cursor(what: str, reading: Awaitable[Any], user: User) -> None:
    """Raise 422 unless the record that a page continues after exists and is the user's; the page would be empty."""
    try:
        record = await reading
    except StoreCorrupt:  # the unreadable record ends the previous page, and the next page follows it
        return
    if record is None or not user.may_see(record.owner):
        message = f"there is no such {what} to continue after; send the `next` of the previous page, or omit it"
        raise ApiError(422, message, path="query.before")


def owner_filter(user: User, owner: str | None) -> str | None:
    """Return the owner to filter a list by: the user; for an admin `owner`, or None for all owners.

    Raises 403 if a user who is not an admin names another owner: their own things would look like the other's.
    """
    if user.is_admin:
        return owner
    if owner not in (None, user.name):
        message = f"only admins may list the things of other owners; omit `owner` to list your own, {user.name}'s"
        raise ApiError(403, message, path="query.owner")
    return user.name


def may_start_later(id: str, user: User) -> bool:
    """Whether the user may be about to start a run of that id, which does not exist, rather than have mistyped it.

    True for an admin, for ids that begin with the user's name, and for UUIDs, which programs choose in advance.
    """
    return user.is_admin or id.startswith(f"{user.name}:") or UUID.fullmatch(id) is not None
