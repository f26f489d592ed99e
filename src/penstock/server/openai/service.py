"""What the /v1 endpoints share: graphs as models, a request to run one, and the run that was started for it.

The name of a model is the id of its graph, or `graph@3` for the graph's third version. As in the rest of the API, every
authenticated user may read and run all graphs; runs are private to their owner.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.errors import InvalidValue
from penstock.hosting.event_data import STATUS_OF
from penstock.hosting.host import GraphArchived
from penstock.hosting.limits import NAMES, RunLimits
from penstock.hosting.records import GraphHead, GraphRecord, HostedEvent, RunRecord
from penstock.server.auth import User
from penstock.server.graph_check import GraphChecker, is_conversational
from penstock.server.openai.refusals import model_not_found, outcome_unknown
from penstock.server.openai.wire.answer import AnswerBuilder, Piece, answering_nodes
from penstock.server.openai.wire.request import ChatCompletionBody, Extension, ResponseBody, Turn
from penstock.server.schemas import parse_limits
from penstock.server.sse import DISCONNECTED, EventStream, Streams
from penstock.server.unavailable import public

if TYPE_CHECKING:
    from penstock.chat.service import ChatService
    from penstock.hosting.host import RunHost
    from penstock.hosting.ports import GraphStore
    from penstock.storage import Stores

MAX_VERSIONS = 256


@dataclass(frozen=True, slots=True)
class ModelGraph:
    """A version of a graph as a model, with what follows from its document."""

    record: GraphRecord
    """Its head in the store, and not this, says whether the graph is archived now."""
    is_conversational: bool
    answering: frozenset[str]
    """Ids of the nodes that can answer."""

    @property
    def id(self) -> str:
        """The id of the graph, which is the name of the model."""
        return self.record.id


@dataclass(frozen=True, slots=True)
class Service:
    """Shared objects of the endpoints."""

    host: RunHost
    chats: ChatService
    stores: Stores
    graphs: GraphChecker
    streams: Streams
    _versions: dict[tuple[str, int], ModelGraph] = field(default_factory=dict, repr=False)
    """Graphs that were used recently, by id and version: their documents, which never change, may be large."""

    async def graph_of(self, model: str, run_id: str | None = None) -> ModelGraph:
        """Return the graph of a model; raise Refused if it does not exist, GraphInvalid if it cannot run.

        For an existing run, return the version that it runs, even if a newer one was saved or the graph was archived.
        """
        run = None if run_id is None else await self.host.get(run_id)
        if run is not None and model in (run.graph_id, f"{run.graph_id}@{run.graph_version}"):
            known = await self.version_of(run)
            if known is not None:
                return known
        head = await _find(self.stores.graphs, model)
        graph = await self._version(head.id, head.version)
        assert graph is not None, "a version with a head exists"
        await self.graphs.must_run(graph.record, in_chat=graph.is_conversational)
        return graph

    async def version_of(self, run: RunRecord) -> ModelGraph | None:
        """Return the version of the graph that a run executes; None if it is not in the store."""
        return await self._version(run.graph_id, run.graph_version)

    async def _version(self, graph_id: str, version: int) -> ModelGraph | None:
        known = self._versions.get((graph_id, version))
        if known is None and (record := await self.stores.graphs.get(graph_id, version)) is not None:
            known = ModelGraph(record, is_conversational(record), answering_nodes(record.document))
            if len(self._versions) >= MAX_VERSIONS:
                self._versions.clear()
            self._versions[graph_id, version] = known
        return known


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A request to run a graph on a conversation."""

    service: Service
    user: User
    graph: ModelGraph
    turns: Sequence[Turn]
    body: ChatCompletionBody | ResponseBody
    about: Mapping[str, Any] | None = None
    """Stored with the run."""

    @property
    def run_id(self) -> str | None:
        """The id that the client chose for the run; None if the host chooses it."""
        return self.body.penstock.run_id

    @property
    def version(self) -> int | None:
        """The version of the graph that the model name selects; None for the newest version."""
        return self.graph.record.version if "@" in self.body.model else None

    def limits(self) -> RunLimits | None:
        """Return the limits that the request sets; raise InvalidValue with the field that is invalid or too high."""
        given = self.body.penstock.limits
        if given is None:
            return None
        try:
            return parse_limits(given).within(self.service.host.settings.ceilings)
        except InvalidValue as error:
            name = f".{error.field}" if error.field in NAMES else ""
            raise InvalidValue(f"penstock.limits{name}", error.value, error.expected) from None


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


async def events_so_far(service: Service, run_id: str) -> list[HostedEvent]:
    """Return all stored events of a run."""
    found: list[HostedEvent] = []
    while page := await service.stores.events.read(run_id, found[-1].seq if found else 0):
        found.extend(map(public, page))
    return found


async def _find(graphs: GraphStore, model: str) -> GraphHead:
    """Return the head of a model's graph; raise Refused if it does not exist or is archived."""
    graph_id, at, version = model.partition("@")
    if at and not (version.isascii() and version.isdigit() and len(version) < 10):
        raise model_not_found(model)
    head = await graphs.head(graph_id, int(version) if at else None)
    if head is None:
        raise model_not_found(model)
    if head.is_archived:
        raise model_not_found(model, str(GraphArchived(graph_id)))
    return head


def model_object(record: GraphRecord) -> dict[str, Any]:
    """Return the graph as an OpenAI model object."""
    about = {"name": record.name, "version": record.version, "chat": is_conversational(record)}
    return {
        "id": record.id,
        "object": "model",
        "created": record.created_ms // 1000,
        "owned_by": record.owner,
        "penstock": about,
    }
