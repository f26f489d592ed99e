"""What the routes work with, and how they get hold of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, Path, Query
from starlette.requests import Request

from penstock.clock import Clock
from penstock.server.auth import User
from penstock.server.errors import ApiError, not_found
from penstock.server.metrics import Metrics
from penstock.server.readiness import Readiness
from penstock.server.runnable import Runnable
from penstock.server.schemas import AN_ID
from penstock.server.settings import ServerSettings
from penstock.server.sse import Streams

if TYPE_CHECKING:
    from penstock.chat.service import ChatService
    from penstock.hosting.host import RunHost
    from penstock.kernel.executor import ExecutorRegistry

MAX_PAGE = 500
MADE_BY_PROGRAMS = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything that was composed into the app."""

    host: RunHost
    chats: ChatService
    stores: Any
    graphs: Runnable
    settings: ServerSettings
    metrics: Metrics
    streams: Streams
    readiness: Readiness
    clock: Clock

    async def must_run(
        self, graph_id: str, version: int | None = None, *, run_id: str | None = None, in_chat: bool = False
    ) -> None:
        """UnknownGraph, GraphArchived or GraphInvalid, if a run of the graph could not begin; one that is there has."""
        if run_id is None or await self.host.get(run_id) is None:
            graph = await self.host.graph_to_begin(graph_id, version)
            await self.graphs.must_run(graph, in_chat=in_chat)

    def executors(self) -> ExecutorRegistry:
        """What stands behind the node types of graphs here."""
        return self.host.executors

    def now_ms(self) -> int:
        """Milliseconds since 1970."""
        return self.clock.time_ns() // 1_000_000


async def _parts(request: Request) -> Parts:
    parts: Parts = request.app.state.parts
    return parts


async def _asker(request: Request) -> User:
    user: User = request.state.user
    return user


async def _must_know_query(request: Request) -> None:
    """422 for a name in the query that the route does not know: what it should have done would not be done."""
    known = [field.alias for field in request.scope["route"].dependant.query_params]
    for name in request.query_params:
        if name not in known and request.url.path.startswith("/api/"):  # probes of others add what they like
            may = f"there may be {', '.join(known)}" if known else "nothing may stand there"
            raise ApiError(422, f"there is no {name[:80]!r} in the query here; {may}", path=f"query.{name[:80]}")


KNOWN_QUERY = Depends(_must_know_query)
"""Every router but that of /v1 has it, where clients send what they like."""
Service = Annotated[Parts, Depends(_parts)]
Asker = Annotated[User, Depends(_asker)]
PathId = Annotated[str, Path(pattern=AN_ID)]
QueryId = Annotated[str | None, Query(pattern=AN_ID)]
PageSize = Annotated[int, Query(ge=1, le=MAX_PAGE)]


def readable(what: str, record: Any, user: User) -> Any:
    """The record, if it is there and theirs; another's is as if it were not there."""
    if record is None or not (user.is_admin or record.owner == user.name):
        raise not_found(what)
    return record


def check_place(what: str, record: Any, user: User) -> None:
    """The record that a page is to come behind must be there and theirs: behind nothing there would be nothing."""
    if record is None or not (user.is_admin or record.owner == user.name):
        message = f"there is no such {what} to go on behind; send the `next` of the page before, or leave it out"
        raise ApiError(422, message, path="query.before")


def whose(user: User, owner: str | None) -> str | None:
    """Whose things a list shows: one's own; an admin sees everybody's, or those of whom they name.

    403 for whoever names another and is no admin: one's own would look like the other's.
    """
    if user.is_admin:
        return owner
    if owner not in (None, user.name):
        message = f"only an admin may list what is others'; you are {user.name}, and get your own without an owner"
        raise ApiError(403, message, path="query.owner")
    return user.name


def check_new_id(id: str | None, user: User, field: str) -> None:
    """Ids with a colon begin with the name of whose they are, so that nobody can take, or cancel, another's ahead."""
    if id is not None and ":" in id and not id.startswith(f"{user.name}:") and not user.is_admin:
        raise ApiError(422, f"an id with a colon begins with your own name, {user.name}:", path=f"$.{field}")


def may_come(id: str, user: User) -> bool:
    """Whether a run of that id, which is not there, may be about to come from them, and is no mere slip of the pen.

    They are named after whose they are, or made by a program that says beforehand how its run will be called.
    """
    return user.is_admin or id.startswith(f"{user.name}:") or MADE_BY_PROGRAMS.fullmatch(id) is not None
