"""Start a run for a conversation, and follow its answer.

A conversational graph runs as one turn of a chat; any other graph runs on the last user message. In both cases the host
owns the run: it has an id, limits and events, and outlives the request if the request says so.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from penstock.chat.limits import ChatNotFound, MessageNotFound
from penstock.chat.protocol import KIND
from penstock.errors import InvalidValue
from penstock.hosting.event_data import STATUS_OF
from penstock.hosting.forking import TAKES_UP
from penstock.hosting.records import ENDED, GraphRecord, HostedEvent, RunRecord
from penstock.server.auth import User
from penstock.server.errors import RETRY_AFTER_S, ApiError
from penstock.server.graph_check import is_conversational
from penstock.server.openai.chat_turn import start_next_turn, start_turn
from penstock.server.openai.refusals import Refused, outcome_unknown
from penstock.server.openai.service import RunRequest, Service
from penstock.server.openai.wire.answer import AnswerBuilder, Piece, answering_nodes
from penstock.server.openai.wire.request import Extension
from penstock.server.sse import CLOSING, DISCONNECTED, EventStream
from penstock.server.unavailable import public


@dataclass(frozen=True, slots=True)
class RunHandle:
    """A run that was started for a request."""

    service: Service
    run: RunRecord
    """As it was stored when it was started; it has gone on since."""
    answering: frozenset[str]
    """Ids of the nodes that can answer."""
    own_limits: frozenset[str] = frozenset()
    """Names of the limits that the request set."""
    uses_history: bool = True
    """Whether the graph received the whole conversation."""
    is_named: bool = False
    """Whether the request names the run: a retry gets the same run again."""

    @property
    def created(self) -> int:
        """Creation time of the run, in seconds."""
        return self.run.created_ms // 1000

    async def pieces(self, answer: AnswerBuilder) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of the answer as the run emits them, then its end; `answer` accumulates them."""
        async with aclosing(self.service.host.events(self.run.id)) as events:
            async for event in events:
                # Of all that an answer is made of, only the end can name a failure.
                for piece in answer.add(public(event) if event.type in STATUS_OF else event):
                    yield piece
        if answer.ended is None:
            raise outcome_unknown(self.run.id)
        yield answer.ended

    async def result(self) -> AnswerBuilder:
        """Wait for the end of the run, and return the whole answer."""
        answer = AnswerBuilder(self.answering)
        async with aclosing(self.pieces(answer)) as pieces:
            async for _ in pieces:
                pass
        return answer

    def on_disconnect(self, user: User, options: Extension) -> Callable[[], Awaitable[None]]:
        """Return the function to call when the client disconnects: it cancels the run if the request says so."""

        async def disconnected() -> None:
            if options.on_disconnect == "cancel":
                await self.service.host.cancel(self.run.id, reason=DISCONNECTED, by=user.name)

        return disconnected


async def open_stream(service: Service, user: User, start: Callable[[], Awaitable[EventStream]]) -> EventStream:
    """Start a stream if the stream limit allows it; otherwise raise without calling `start`."""
    with service.streams.place(user.name):
        return await start()


async def start(request: RunRequest) -> RunHandle:
    """Start a run on a conversation."""
    _check(request)
    uses_history = is_conversational(request.graph)
    run = await (start_turn if uses_history else _submit)(request)
    return _handle(request, run, uses_history=uses_history)


async def continue_from(request: RunRequest, before: RunRecord, previous_response_id: str) -> RunHandle:
    """Start a run that continues the conversation of an earlier one."""
    _check(request)
    if request.graph.id != before.graph_id:
        raise InvalidValue("model", request.graph.id, f"{before.graph_id}, the model of the previous response")
    if before.origin.get("kind") != KIND:
        expected = f"a response of a conversation ({_why_no_turn(before, request.graph)})"
        raise InvalidValue("previous_response_id", previous_response_id, expected)
    if before.status not in ENDED:
        expected = f"a response that has ended; this one is {before.status}"
        raise InvalidValue("previous_response_id", previous_response_id, expected)
    try:
        run = await start_next_turn(request, before)
    except (ChatNotFound, MessageNotFound):
        message = (
            f"the conversation of response {previous_response_id!r} was deleted: "
            "start a new one, with its messages in `input`"
        )
        raise Refused(404, message, param="previous_response_id", code="not_found") from None
    return _handle(request, run, uses_history=is_conversational(request.graph))


def _why_no_turn(run: RunRecord, graph: GraphRecord) -> str:
    """Return why no conversation can continue from the run."""
    kind = run.origin.get("kind")
    if kind in TAKES_UP:
        return f"this one is a {kind} of run {run.origin.get('run_id')}, outside its conversation"
    return "this one ran without a chat" if is_conversational(graph) else "this graph has no chat-start, and so none"


def _handle(request: RunRequest, run: RunRecord, *, uses_history: bool) -> RunHandle:
    asked = request.body.penstock
    return RunHandle(
        request.service,
        run,
        answering_nodes(request.graph.document),
        own_limits=frozenset(asked.limits or ()),
        uses_history=uses_history,
        is_named=asked.run_id is not None,
    )


async def events_so_far(service: Service, run_id: str) -> list[HostedEvent]:
    """Return all stored events of a run."""
    found: list[HostedEvent] = []
    while page := await service.stores.events.read(run_id, found[-1].seq if found else 0):
        found.extend(map(public, page))
    return found


async def _submit(request: RunRequest) -> RunRecord:
    """Run the graph without a chat, on the last message; return the run."""
    if any(turn.files for turn in request.turns):
        raise InvalidValue("model", request.graph.id, "a graph with a chat-start; other graphs do not accept files")
    return await request.service.host.submit(
        owner=request.user.name,
        graph_id=request.graph.id,
        version=request.version,
        input=request.turns[-1].text,
        limits=request.limits(),
        run_id=request.run_id,
        origin={"kind": "run", "about": dict(request.about)} if request.about else None,
    )


def _check(request: RunRequest) -> None:
    """Reject a run id of another user, and any request during shutdown, when a run would be parked before it starts."""
    if request.service.streams.closing().is_set():
        raise ApiError(503, CLOSING, retry_after_s=RETRY_AFTER_S)
    request.user.check_new_id("penstock.run_id", request.run_id)
