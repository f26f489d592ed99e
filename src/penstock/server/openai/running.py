"""From a conversation to a run, and from a run to what it says.

A graph that converses runs as one turn of a chat; any other runs on what the user said last. Either way the run is
the host's: it has an id, limits and events, and outlives the request if it is told to.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.chat.limits import ChatUnknown, MessageUnknown
from penstock.chat.protocol import KIND
from penstock.errors import InvalidValue
from penstock.hosting.records import ENDED, GraphRecord, HostedEvent, RunRecord
from penstock.hosting.work.forking import TAKES_UP
from penstock.server.auth import User
from penstock.server.errors import RETRY_AFTER_S, ApiError
from penstock.server.openai.conversing import converse, limits_of, say_next
from penstock.server.openai.leaving import RunStream
from penstock.server.openai.models import converses, find, named_version
from penstock.server.openai.refusals import Refused, of_run, unknown_end
from penstock.server.openai.wire.answer import Answer, Piece, speakers
from penstock.server.openai.wire.bodies import ChatCompletionBody, Extension, ResponseBody
from penstock.server.openai.wire.conversation import Turn
from penstock.server.outages import public
from penstock.server.parts import check_new_id
from penstock.server.runnable import Runnable
from penstock.server.sse import Streams

if TYPE_CHECKING:
    from penstock.chat.service import ChatService
    from penstock.hosting.host import RunHost
    from penstock.storage import Stores

LEFT = "the client left"


@dataclass(frozen=True, slots=True)
class Service:
    """What the endpoints work with."""

    host: RunHost
    chats: ChatService
    stores: Stores
    graphs: Runnable
    streams: Streams

    async def graph_of(self, model: str, run_id: str | None = None) -> GraphRecord:
        """The graph behind a model; Refused if there is none, GraphInvalid if it cannot run.

        For a run that is there it is the version that it is of: whatever was saved since, and also if it was archived.
        """
        run = None if run_id is None else await self.host.get(run_id)
        if run is not None and model in (run.graph_id, f"{run.graph_id}@{run.graph_version}"):
            known = await self.stores.graphs.get(run.graph_id, run.graph_version)
            if known is not None:
                return known
        graph = await find(self.stores.graphs, model)
        return await self.graphs.must_run(graph, in_chat=converses(graph))


@dataclass(frozen=True, slots=True)
class Started:
    """A run that was begun for a request."""

    service: Service
    run: RunRecord
    speaking: frozenset[str]
    asked: frozenset[str] = frozenset()
    """The limits that the request set."""
    is_heard: bool = True
    """Whether the graph was given the whole conversation."""

    @property
    def created(self) -> int:
        """When, in seconds."""
        return self.run.created_ms // 1000

    async def pieces(self, answer: Answer) -> AsyncGenerator[Piece, None]:
        """What the run says, as it says it, and its end; `answer` holds it all."""
        async with aclosing(self.service.host.events(self.run.id)) as events:
            async for event in events:
                for piece in answer.add(public(event)):
                    yield piece
        if answer.ended is None:
            raise unknown_end(self.run.id)
        yield answer.ended

    async def followed(self) -> Answer:
        """The whole answer."""
        answer = Answer(self.speaking)
        async with aclosing(self.pieces(answer)) as pieces:
            async for _ in pieces:
                pass
        return answer

    async def stop(self, user: User) -> None:
        """Its client is gone, and nobody else waits for it."""
        await self.service.host.cancel(self.run.id, reason=LEFT, by=user.name)


async def streaming(streams: Streams, user: User, begin: Callable[[], Awaitable[RunStream]]) -> RunStream:
    """A stream for which there is room: nothing is begun if there is none."""
    with streams.place(user.name):
        return await begin()


def on_leave(begun: Started, user: User, asked: Extension) -> Callable[[], Awaitable[None]]:
    """What is to happen to a run whose client leaves."""

    async def left() -> None:
        if asked.on_disconnect == "cancel":
            await begun.stop(user)

    return left


async def start(
    service: Service,
    user: User,
    graph: GraphRecord,
    turns: Sequence[Turn],
    body: ChatCompletionBody | ResponseBody,
    about: Mapping[str, Any] | None = None,
) -> Started:
    """Begin a run on a conversation; `about` is kept with it."""
    _check(service, user, body)
    begin = converse if converses(graph) else _run_plainly
    return await _started(service, await begin(service, user, graph, turns, body, about), graph, body)


async def go_on(
    service: Service,
    user: User,
    graph: GraphRecord,
    before: RunRecord,
    turns: Sequence[Turn],
    body: ResponseBody,
    about: Mapping[str, Any] | None = None,
) -> Started:
    """Begin a run that goes on with the conversation of an earlier one; `about` is kept with it."""
    _check(service, user, body)
    if graph.id != before.graph_id:
        raise InvalidValue("model", graph.id, f"{before.graph_id}, which gave the response before")
    given = str(body.previous_response_id)
    if before.origin.get("kind") != KIND:
        raise InvalidValue("previous_response_id", given, f"a turn of a conversation ({_is_no_turn(before, graph)})")
    if before.status not in ENDED:
        raise InvalidValue("previous_response_id", given, f"a response that is over; this one is {before.status}")
    try:
        run_id = await say_next(service, graph, before, turns, body, about)
    except (ChatUnknown, MessageUnknown):
        message = (
            f"the conversation of response {given!r} was deleted: begin another one, with what was said in `input`"
        )
        raise Refused(404, message, param="previous_response_id", code="not_found") from None
    return await _started(service, run_id, graph, body)


def _is_no_turn(run: RunRecord, graph: GraphRecord) -> str:
    """Why nobody can go on from it."""
    kind = run.origin.get("kind")
    if kind in TAKES_UP:
        return f"this one is a {kind} of run {run.origin.get('run_id')}, beside its conversation"
    return "this one was run by itself" if converses(graph) else "this graph has no chat-start, and so none"


async def _started(
    service: Service, run_id: str, graph: GraphRecord, body: ChatCompletionBody | ResponseBody
) -> Started:
    """The run, to be followed."""
    with of_run(run_id):
        run = await service.host.get(run_id)
        assert run is not None, "a run that was just begun is there"
    return Started(service, run, speakers(graph.document), frozenset(body.penstock.limits or ()), converses(graph))


async def events_so_far(service: Service, run_id: str) -> list[HostedEvent]:
    """Everything that has happened to a run."""
    found: list[HostedEvent] = []
    while page := await service.stores.events.read(run_id, found[-1].seq if found else 0):
        found.extend(map(public, page))
    return found


async def _run_plainly(
    service: Service,
    user: User,
    graph: GraphRecord,
    turns: Sequence[Turn],
    body: ChatCompletionBody | ResponseBody,
    about: Mapping[str, Any] | None,
) -> str:
    if any(turn.files for turn in turns):
        raise InvalidValue("model", graph.id, "a graph with a chat-start, for only those take files")
    run = await service.host.submit(
        owner=user.name,
        graph_id=graph.id,
        version=named_version(graph, body.model),
        input=turns[-1].text,
        limits=limits_of(service, body),
        run_id=body.penstock.run_id,
        origin={"kind": "run", "about": dict(about)} if about else None,
    )
    return run.id


def _check(service: Service, user: User, body: ChatCompletionBody | ResponseBody) -> None:
    """Refused for the id of another's run, and when the server closes: a run would be parked before it began."""
    if service.streams.closing().is_set():
        raise ApiError(503, "the server is closing; ask again", retry_after_s=RETRY_AFTER_S)
    try:
        check_new_id(body.penstock.run_id, user, "penstock.run_id")
    except ApiError as error:
        raise Refused(400, str(error), param="penstock.run_id", code=error.code) from None
