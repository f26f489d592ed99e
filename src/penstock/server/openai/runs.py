"""Runs of graphs for requests to /v1: graphs as models, a request to run one, and the run that is started for it.

The name of a model is the id of its graph, or `graph@3` for the graph's third version. As in the rest of the API, every
authenticated user may read and run all graphs; runs are private to their owner.

A conversational graph runs as one turn of a chat: find the chat that the request continues, store its new messages, and
run the graph. Any other graph runs on the last user message. In both cases the host owns the run: it has an id, limits
and events, and outlives the request if the request asks for it.

Clients send the whole conversation again with each new turn. Every user message received over /v1 is marked in its chat
with a key derived from the owner, the graph and the whole conversation up to it, including files. A request whose
history contains a marked message continues that chat, below the stored answer if the client sends the same answer, so
that only new turns are stored. A changed or unknown history starts a new chat. So does a history that is marked in two
chats: users who share a token may send the same messages, and the memory of a chat must not be shared between them. The
key includes the owner and the `user` field of the request, so a request never matches another user's chat.

Pictures and files are stored with the message that they came with, as in a chat held on this server. Models accept them
only in user messages, so files of other messages are moved to the next user message.

Errors refer to the request: a value that the chat rejects is reported under the request field that contains it. A
rejected request stores nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

from penstock.chat.conversation import MAX_ATTACHMENTS, ChatLimitReached, ChatNotFound, MessageNotFound, yield_every
from penstock.chat.ports import Attachment
from penstock.chat.turn import KIND, answers_something_else, latest_answer
from penstock.errors import InvalidValue
from penstock.hosting.event_data import STATUS_OF
from penstock.hosting.forking import TAKES_UP
from penstock.hosting.host import GraphArchived
from penstock.hosting.limits import NAMES, RunLimits
from penstock.hosting.ports import (
    ENDED,
    ApprovalRecord,
    ApprovalState,
    Conflict,
    GraphHead,
    GraphRecord,
    HostedEvent,
    RunIdTaken,
    RunRecord,
    StoreUnavailable,
)
from penstock.nodes.client_tools import EXPECTS as CLIENT_TOOLS
from penstock.nodes.client_tools import ClientRequest
from penstock.nodes.embedding import TYPE as EMBEDDING
from penstock.server.auth import User
from penstock.server.errors import RETRY_AFTER_S, ApiError
from penstock.server.graph_check import GraphChecker, is_chat_entered, is_conversational
from penstock.server.openai.entry import EntryAgents, check_options, entry_agents
from penstock.server.openai.refusals import Refused, model_not_found, outcome_unknown
from penstock.server.openai.retries import IDEMPOTENCY_KEY, Entry, Retries
from penstock.server.openai.wire.answer import (
    AnswerBuilder,
    ClientCalls,
    Ended,
    Idle,
    Piece,
    QuestionsChanged,
    answering_nodes,
)
from penstock.server.openai.wire.options import Options
from penstock.server.openai.wire.request import (
    OWN_TOOLS,
    SHOWN_IDS,
    ChatCompletionBody,
    Extension,
    File,
    ToolOutput,
    Turn,
    call_id,
    check_lengths,
    parse_call_id,
    text_of_round,
    text_to_add,
    with_rounds,
)
from penstock.server.schemas import parse_limits
from penstock.server.sse import CLOSING, DISCONNECTED, EventStream, Streams
from penstock.server.unavailable import public

if TYPE_CHECKING:
    from penstock.chat.conversation import ChatMessage
    from penstock.chat.ports import ChatStore
    from penstock.chat.service import ChatService
    from penstock.chat.turn import ChatTurn
    from penstock.hosting.host import RunHost
    from penstock.hosting.ports import GraphStore
    from penstock.storage import Stores

MAX_VERSIONS = 256
MADE_BY = "openai"
"""`made_by` of chats that requests to /v1 create: users do not delete them, so they are removed with their runs."""
OF_CHATS = ("content", "attachments", "messages of the chat")
OF_ONE = " in one message, including those of the tool results before it; send the others in other messages"
OF_NEXT = ", because it is stored as one message; send the others with the next request"
"""Explanations for too many pictures and files."""
OF_FILES = ("attachment", "media_type")
WAITING: tuple[ApprovalState, ...] = ("waiting",)
ANSWERED: tuple[ApprovalState, ...] = ("edited",)
CONVERSATION = "conversation"
"""Key in the stored request of a client: the key of the conversation up to the last user message."""
REPEAT_S = 60.0
"""How long repeated results follow the run that has them; later they start a new one."""
SUPERSEDED = "the client went on without this run"
MAX_LOOKUPS = 100
"""Maximum number of user messages of a history that are looked up, newest first."""


@dataclass(frozen=True, slots=True)
class ModelGraph:
    """A version of a graph as a model, with facts derived from its document."""

    record: GraphRecord
    """Whether the graph is archived now is in its head in the store, not here."""
    is_conversational: bool
    answering: frozenset[str]
    """Ids of the nodes that can answer."""
    entry: EntryAgents
    """The agents that the user talks to."""

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
    retries: Retries[RunHandle]
    client_tools_wait_s: float
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

    async def client_request(self, graph: ModelGraph, options: Options) -> ClientRequest | None:
        """Convert the options for a run of the graph; raise UnsupportedParameter if one cannot be applied."""
        models, programs = self.graphs.models, self.graphs.programs
        return await check_options(options, graph.entry, models, programs, self.client_tools_wait_s)

    async def version_of(self, run: RunRecord) -> ModelGraph | None:
        """Return the version of the graph that a run executes; None if it is not in the store."""
        return await self._version(run.graph_id, run.graph_version)

    async def _version(self, graph_id: str, version: int) -> ModelGraph | None:
        known = self._versions.get((graph_id, version))
        if known is None and (record := await self.stores.graphs.get(graph_id, version)) is not None:
            entry = await entry_agents(record)
            known = ModelGraph(record, is_chat_entered(record), answering_nodes(record.document), entry)
            if len(self._versions) >= MAX_VERSIONS:
                self._versions.clear()
            self._versions[graph_id, version] = known
        return known


class RunBody(Protocol):
    """The fields of a request's body that a run needs."""

    @property
    def model(self) -> str:
        """The id of a graph, optionally with a version."""
        ...

    @property
    def user(self) -> str | None:
        """The client's name for its own user."""
        ...

    @property
    def penstock(self) -> Extension:
        """Penstock's own options."""
        ...


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A request to run a graph on a conversation."""

    service: Service
    user: User
    graph: ModelGraph
    turns: Sequence[Turn]
    body: RunBody
    about: Mapping[str, Any] | None = None
    """Stored with the run."""
    idempotent_id: str | None = None
    """The id of the run that `Idempotency-Key` names."""
    client: ClientRequest | None = None
    """The client's options for the model; None if there are none."""

    @property
    def run_id(self) -> str | None:
        """The id that the client chose for the run; None if the host chooses it."""
        return self.body.penstock.run_id or self.idempotent_id

    @property
    def is_keyed(self) -> bool:
        """Whether `Idempotency-Key` names the run."""
        return self.idempotent_id is not None and self.run_id == self.idempotent_id

    @contextmanager
    def naming_key(self) -> Iterator[None]:
        """Report a taken run id as a conflict of its `Idempotency-Key`, because the client knows only the key."""
        try:
            yield
        except RunIdTaken:
            if not self.is_keyed:
                raise
            message = f"this {IDEMPOTENCY_KEY} was sent with another request, whose run it names; send a new key"
            raise Refused(409, message, param=IDEMPOTENCY_KEY, code="conflict", may_retry=False) from None

    @property
    def where(self) -> str:
        """The field of the request that contains the conversation."""
        return "messages" if isinstance(self.body, ChatCompletionBody) else "input"

    def client_json(self, conversation: str | None = None) -> dict[str, Any] | None:
        """Return the client's options in their stored form, with the key of the conversation."""
        if self.client is None:
            return None
        return self.client.to_dict() | ({} if conversation is None else {CONVERSATION: conversation})

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
    """Its record from the start; the run has continued since."""
    answering: frozenset[str]
    """Ids of the nodes that can answer."""
    own_limits: frozenset[str] = frozenset()
    """Names of the limits that the request set."""
    uses_history: bool = True
    """Whether the graph received the whole conversation."""
    is_named: bool = False
    """Whether the request names the run: a retry gets the same run again."""
    is_keyed: bool = False
    """Whether `Idempotency-Key` names the run: its client comes back for the answer, at any server and any time."""
    rounds: int = 0
    """How often the client had returned results of its tools before this request was answered."""

    @property
    def created(self) -> int:
        """Creation time of the run, in seconds."""
        return self.run.created_ms // 1000

    async def pieces(self, answer: AnswerBuilder) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of the answer as the run emits them, then its end; `answer` accumulates them.

        Calls of the client's tools end the answer too: what follows their results answers another request.
        """
        async with aclosing(self.service.host.events(self.run.id)) as events:
            async for event in events:
                # Of the events that make up an answer, only the end can name a failure.
                for piece in answer.add(public(event) if event.type in STATUS_OF else event):
                    if answer.rounds == self.rounds:
                        yield piece
                        if isinstance(piece, ClientCalls):
                            return
        if answer.ended is None:
            raise outcome_unknown(self.run.id)
        yield answer.ended

    async def pieces_until_idle(self, answer: AnswerBuilder) -> AsyncGenerator[Piece, None]:
        """Like `pieces`, but also end when the run does nothing but wait for a person."""
        async with aclosing(self.pieces(answer)) as pieces:
            async for piece in pieces:
                yield piece
                if isinstance(piece, Idle) and await self._waits_for_a_person(answer):
                    return

    async def _waits_for_a_person(self, answer: AnswerBuilder) -> bool:
        """Whether a question of the answer so far is still open: it may have been answered after these events."""
        questions = {question.id for question in answer.waiting.questions}
        if not questions:
            return False
        waiting = await self.service.stores.approvals.list(run_id=self.run.id, states=WAITING)
        return any(approval.id in questions for approval in waiting)

    async def result(self) -> tuple[AnswerBuilder, Ended | ClientCalls | QuestionsChanged]:
        """Wait for the end of the answer; return the answer, and its end: the run's, calls, or open questions."""
        answer = AnswerBuilder(self.answering)
        end: Ended | ClientCalls | None = None
        async with aclosing(self.pieces_until_idle(answer)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Ended | ClientCalls):
                    end = piece
        return answer, answer.waiting if end is None else end

    def on_disconnect(self, user: User, options: Extension, entry: Entry[RunHandle]) -> Callable[[], Awaitable[None]]:
        """Return the function to call when the client disconnects: it cancels the run, unless the request is keyed.

        If the client repeats the request in a moment, that request follows the run.
        """
        wanted = options.on_disconnect or ("continue" if self.is_keyed else "cancel")

        async def disconnected() -> None:
            if not await entry.is_adopted() and wanted == "cancel":
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


@dataclass(frozen=True, slots=True)
class Continuation:
    """The point where a conversation continues, and its new turns; without a chat, all turns are new."""

    turns: Sequence[Turn]
    chat_id: str | None = None
    parent_id: str | None = None


async def start(request: RunRequest) -> RunHandle:
    """Start a run on a conversation, or continue the one that waits for the tool results at its end."""
    _check(request)
    _must_answer_in_text(request.graph)
    request = replace(request, turns=with_rounds(request.turns))
    if not request.graph.is_conversational:
        return _handle(request, await _submit(request))
    check_lengths(request.turns)
    request = replace(request, turns=[*_with_files_of_user(request.turns)])
    keys = await conversation_keys(request.user.name, request.body.user, request.graph.id, request.turns)
    users = [key for turn, key in zip(request.turns, keys, strict=True) if turn.role == "user"]
    conversation = users[-1] if users else None
    if (pending := await _pending_of(request, conversation)) and (handle := await _deliver(request, pending)):
        return handle
    return _handle(request, await _start_turn(request, keys, conversation))


async def submit_input(request: RunRequest, given: Any) -> RunHandle:
    """Start a run on an input that is not a conversation."""
    _check(request)
    run = await request.service.host.submit(
        owner=request.user.name,
        graph_id=request.graph.id,
        version=request.version,
        input=given,
        limits=request.limits(),
        run_id=request.run_id,
    )
    return _handle(request, run)


async def continue_from(request: RunRequest, before: RunRecord, previous_response_id: str) -> RunHandle:
    """Start a run that continues the conversation of an earlier one."""
    _check(request)
    if request.graph.id != before.graph_id:
        raise InvalidValue("model", request.graph.id, f"{before.graph_id}, the model of the previous response")
    if before.origin.get("kind") != KIND:
        expected = f"a response of a conversation ({_why_no_turn(before, request.graph)})"
        raise InvalidValue("previous_response_id", previous_response_id, expected)
    results = [turn.result for turn in request.turns if turn.result is not None]
    if results:
        return await _continue_with_results(request, before, previous_response_id, results)
    if before.status not in ENDED:
        expected = f"a response that has ended; this one is {before.status}"
        raise InvalidValue("previous_response_id", previous_response_id, expected)
    try:
        run = await _start_next_turn(request, before)
    except (ChatNotFound, MessageNotFound):
        message = (
            f"the conversation of response {previous_response_id!r} was deleted: "
            "start a new one, with its messages in `input`"
        )
        raise Refused(404, message, param="previous_response_id", code="not_found") from None
    return _handle(request, run)


async def _continue_with_results(
    request: RunRequest, before: RunRecord, previous_response_id: str, results: Sequence[ToolOutput]
) -> RunHandle:
    """Continue a response with results of its calls: in its run while that waits, else in a new one."""
    others = [turn for turn in request.turns if turn.result is None]
    contents: dict[str, str] = {}
    for one in results:
        if one.call_id in contents:
            raise InvalidValue(one.where, one.call_id, "one result for each tool call; this call has two")
        contents[one.call_id] = one.content
    pending = await _pending(request, contents, before.owner)
    if pending is None or pending.run.id != before.id:
        expected = f"the id of a tool call of {previous_response_id}: {OWN_TOOLS}"
        raise InvalidValue(results[0].where, results[0].call_id, expected)
    if not others and (handle := await _deliver(request, pending)):
        return handle
    if before.status not in ENDED and pending.approval.state == "waiting":
        await request.service.host.cancel(before.id, reason=SUPERSEDED, by=request.user.name)
    calls = [
        {"id": id, **call, "result": content}
        for (id, content), call in zip(pending.by_index(), pending.approval.value["tool_calls"], strict=True)
    ]
    shown = "\n".join(text_of_round(call["name"], call["arguments"], call["result"]) for call in calls)
    made = Turn("assistant", shown, where="input", tool_round={"text": "", "calls": calls})
    if others:
        text, files = text_to_add(others, "input")
        _check_number_of_files(files, "input", OF_NEXT)
        turns = [made, Turn("user", text, files, "input")]
    else:
        turns = [made]
    check_lengths(turns)
    place = Continuation(turns, before.origin["chat_id"], before.origin.get("user_message_id"))
    with _naming("input", *OF_CHATS):
        return _handle(request, (await _send(request, place, None, None)).run)


@dataclass(frozen=True, slots=True)
class PendingCalls:
    """Calls of the client's tools, with the results that a request has for them."""

    approval: ApprovalRecord
    run: RunRecord
    results: tuple[str, ...]
    """Results in the order of the calls."""

    def by_index(self) -> Iterator[tuple[str, str]]:
        """Yield the id and the result of each call."""
        for at, content in enumerate(self.results):
            yield call_id(self.approval.id, at), content


async def _pending_of(request: RunRequest, conversation: str | None) -> PendingCalls | None:
    """Return the calls that the results at the end of a conversation answer, if their run has the same conversation."""
    tool_round = request.turns[-1].tool_round
    if tool_round is None:
        return None
    results = {call["id"]: call["result"] for call in tool_round["calls"]}
    pending = await _pending(request, results, request.user.name)
    if pending is None or pending.run.graph_id != request.graph.id:
        return None
    known = pending.run.input.get(CONVERSATION) if isinstance(pending.run.input, Mapping) else None
    return pending if known == conversation else None


async def _pending(request: RunRequest, results: Mapping[str, str], owner: str) -> PendingCalls | None:
    """Return the stored calls with these ids; None if there are none. Raise InvalidValue unless each has a result."""
    parsed = {id: parse_call_id(id) for id in results}
    ids = {None if found is None else found[0] for found in parsed.values()}
    approval_id = ids.pop()
    if approval_id is None or ids:
        return None
    approval = await request.service.stores.approvals.get(approval_id)
    if approval is None or approval.owner != owner or not _is_for_client(approval):
        return None
    run = await request.service.host.get(approval.run_id)
    if run is None:
        return None
    by_index = {found[1]: (id, results[id]) for id, found in parsed.items() if found is not None}
    number = len(approval.value["tool_calls"])
    expected = [call_id(approval.id, at) for at in range(number)]
    for at, (id, _) in by_index.items():
        if at >= number:
            raise InvalidValue(request.where, id, f"the id of a tool call: {', '.join(expected[:SHOWN_IDS])}")
    if missing := [id for at, id in enumerate(expected) if at not in by_index]:
        raise InvalidValue(request.where, f"results of {len(by_index)} calls", f"also one of {', '.join(missing)}")
    return PendingCalls(approval, run, tuple(by_index[at][1] for at in range(number)))


def _is_for_client(approval: ApprovalRecord) -> bool:
    return isinstance(approval.expects, Mapping) and CLIENT_TOOLS in approval.expects


async def _deliver(request: RunRequest, pending: PendingCalls) -> RunHandle | None:
    """Deliver the results to the run that waits for them; None if it no longer waits, so that a new run is needed.

    The same results again, within `REPEAT_S`, follow the run that has them: the client has lost the answer.
    """
    service, run, approval = request.service, pending.run, pending.approval
    current: ApprovalRecord | None = approval
    if approval.state == "waiting" and run.status not in ENDED:
        service.chats.must_be_within(run, request.limits())
        wanted = ClientRequest(wait_s=service.client_tools_wait_s) if request.client is None else request.client
        answer = {"results": list(pending.results), "request": wanted.to_dict()}
        try:
            await service.host.answer(approval.id, "edited", answer=answer, by=request.user.name)
        except Conflict:  # answered or given up at this moment
            current = await service.stores.approvals.get(approval.id)
        else:
            return await _handle_after(request, pending)
    if current is None or current.state != "edited" or run.status == "cancelled":
        return None
    if list(current.answer.get("results") or ()) != list(pending.results):
        message = "these tool calls have other results already; continue from the answer to those, or start anew"
        raise Refused(409, message, param=request.where, code="tool_results_conflict", may_retry=False)
    is_recent = service.host.now_ms() - (current.answered_ms or 0) <= REPEAT_S * 1_000
    return await _handle_after(request, pending) if is_recent else None


async def _handle_after(request: RunRequest, pending: PendingCalls) -> RunHandle:
    """Return the run as it answers the results."""
    rounds = [
        approval.id
        for approval in await request.service.stores.approvals.list(run_id=pending.run.id, limit=1_000)
        if _is_for_client(approval)
    ]
    return replace(_handle(request, pending.run), rounds=rounds.index(pending.approval.id) + 1)


async def rounds_of(service: Service, run_id: str) -> int:
    """Return how often the client of a run has returned results of its tools."""
    answered = await service.stores.approvals.list(run_id=run_id, states=ANSWERED, limit=1_000)
    return sum(map(_is_for_client, answered))


def _why_no_turn(run: RunRecord, graph: ModelGraph) -> str:
    """Return why no conversation can continue from the run."""
    kind = run.origin.get("kind")
    if kind in TAKES_UP:
        return f"this one is a {kind} of run {run.origin.get('run_id')}, outside its conversation"
    return "this one ran without a chat" if graph.is_conversational else "this graph has no chat-start, and so none"


def _handle(request: RunRequest, run: RunRecord) -> RunHandle:
    extension = request.body.penstock
    return RunHandle(
        request.service,
        run,
        request.graph.answering,
        own_limits=frozenset(extension.limits or ()),
        uses_history=request.graph.is_conversational,
        is_named=request.run_id is not None,
        is_keyed=request.is_keyed,
    )


async def _submit(request: RunRequest) -> RunRecord:
    """Run the graph without a chat, on the last message; return the run."""
    if request.turns[-1].role != "user":
        expected = "a conversation that ends with a user message: this graph has no chat-start, and takes no results"
        raise InvalidValue(request.where, "the result of a tool", expected)
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


def _must_answer_in_text(graph: ModelGraph) -> None:
    types = {node.get("id"): node.get("type") for node in graph.record.document["nodes"]}
    if {types.get(id) for id in graph.answering} == {EMBEDDING}:
        message = f"the model {graph.id!r} makes embeddings, and no text: send the texts to /v1/embeddings"
        raise Refused(400, message, param="model", code="unsupported_model")


async def _start_turn(request: RunRequest, keys: Sequence[str], conversation: str | None) -> RunRecord:
    """Append the new turns to the chat that the conversation continues, or all to a new chat; return the run."""
    if known := await _known_run(request, conversation):
        return known
    place = await find_continuation(request.service.stores.chats, request.turns, keys)
    with _naming(request.where, *OF_CHATS):
        try:
            turn = await _send(request, place, keys[-1], conversation)
        except (ChatLimitReached, ChatNotFound, MessageNotFound):
            if place.chat_id is None:
                raise
            # The chat is full, or was just removed: use a new one.
            turn = await _send(request, Continuation(request.turns), keys[-1], conversation)
        except Conflict:
            # A concurrent identical request may have started the run in another place.
            if known := await _known_run(request, conversation):
                return known
            raise
    return turn.run


async def _start_next_turn(request: RunRequest, before: RunRecord) -> RunRecord:
    """Append the next user message below the answer of an earlier run; return the new run."""
    check_lengths(request.turns)
    text, files = text_to_add(request.turns, "input")
    _check_number_of_files(files, "input", OF_NEXT)
    chats, chat_id, limits = request.service.chats, before.origin["chat_id"], request.limits()
    answer = latest_answer(await chats.tree(chat_id), before.origin["message_id"], before.id)
    with _naming("input", *OF_CHATS):
        async with _attached(request, before.owner, [files]) as (attached,):
            turn = await chats.stream_chat(
                chat_id,
                text,
                owner=before.owner,
                parent_id=answer.id,
                attachments=attached,
                limits=limits,
                run_id=request.run_id,
                version=request.version,
                about=request.about,
                client_request=request.client_json(),
            )
    return turn.run


async def remove_unused_chat(service: Service, run: RunRecord) -> None:
    """Remove the chat that a request created, if it has no runs left; keep it while another turn runs in it."""
    chats, chat_id = service.stores.chats, run.origin.get("chat_id")
    chat = None if chat_id is None else await chats.get(chat_id)
    if chat is not None and chat.made_by == MADE_BY and not await service.stores.runs.list(chat_id=chat.id, limit=1):
        with suppress(Conflict):
            await chats.remove(chat.id)


async def conversation_keys(owner: str, user: str | None, graph_id: str, turns: Sequence[Turn]) -> list[str]:
    """Return a key for each turn; keys are equal if everything up to that turn is equal."""
    keys = []
    digest = _digest(owner, graph_id, *([] if user is None else [user]))
    for at, turn in enumerate(turns):
        await yield_every(at)
        digest = _digest(digest, turn.role, turn.text, *(part for file in turn.files for part in _parts(file)))
        keys.append(digest[:32])
    return keys


async def find_continuation(chats: ChatStore, turns: Sequence[Turn], keys: Sequence[str]) -> Continuation:
    """Return where the conversation of these turns continues; `keys` are the keys of the turns."""
    user_keys = [key for turn, key in zip(turns[:-1], keys, strict=False) if turn.role == "user"]
    found = await chats.marked(user_keys[: -MAX_LOOKUPS - 1 : -1]) if user_keys else None
    if found is None:
        return Continuation(turns)
    new = turns[keys.index(found.key) + 1 :]
    answer = next((reply.id for reply in reversed(found.replies) if _repeats(new[0], reply)), None)
    if answer is None or len(new) == 1:
        return Continuation(new, found.chat_id, found.message_id)
    return Continuation(new[1:], found.chat_id, answer)


def _repeats(turn: Turn, answer: ChatMessage) -> bool:
    """Whether the turn repeats this stored answer; never true for an answer that is still being written."""
    is_same = (answer.role, answer.content) == (turn.role, turn.text)
    has_files = bool(turn.files or answer.data.get("attachments"))
    return is_same and not has_files and answer.data.get("state") != "writing"


def _parts(file: File) -> Iterator[str]:
    yield from (file.name, file.media_type, hashlib.sha256(file.content).hexdigest())


def _digest(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


async def _known_run(request: RunRequest, conversation: str | None) -> RunRecord | None:
    """Return the run with the requested id, if it exists already; raise Conflict if it answers another request."""
    service, run_id = request.service, request.run_id
    run = None if run_id is None else await service.host.get(run_id)
    if run is None:
        return None
    is_same = (run.origin.get("kind"), run.owner, run.graph_id) == (KIND, request.user.name, request.graph.id)
    is_same = is_same and run.input == request.client_json(conversation)
    if is_same and request.version in (None, run.graph_version):
        path = (await service.chats.tree(run.origin["chat_id"])).before(run.origin["message_id"])
        if await _has_same_messages(service.stores.chats, path, request.turns):
            service.chats.must_be_within(run, request.limits())
            return run
    raise answers_something_else(run_id)


async def _has_same_messages(chats: ChatStore, path: Sequence[ChatMessage], turns: Sequence[Turn]) -> bool:
    """Whether the messages have the same roles, texts and files as the turns."""
    if [(message.role, message.content) for message in path] != [(turn.role, turn.text) for turn in turns]:
        return False
    for message, turn in zip(path, turns, strict=True):
        attached = message.data.get("attachments") or []
        files = [(file.name, file.media_type, len(file.content)) for file in turn.files]
        if [_description(attachment) for attachment in attached] != files:
            return False
        for attachment, file in zip(attached, turn.files, strict=True):
            found = await chats.attachment(attachment["id"])
            if found is None or found[1] != file.content:
                return False
    return True


def _description(attachment: Mapping[str, Any]) -> tuple[str, str, int]:
    return attachment["name"], attachment["media_type"], attachment["size"]


def _with_files_of_user(turns: Iterable[Turn]) -> Iterator[Turn]:
    """Move files of other roles to the next user turn; raise InvalidValue with the turn that has too many."""
    waiting: tuple[File, ...] = ()
    for turn in turns:
        files, waiting = (*waiting, *turn.files), ()
        if turn.role != "user":
            files, waiting = (), files
        _check_number_of_files(files, turn.where, OF_ONE)
        yield turn if files == turn.files else replace(turn, files=files)
    if waiting:
        raise InvalidValue(waiting[0].where, waiting[0].name, "text: pictures of tools need a user message after them")


def _check_number_of_files(files: Sequence[File], where: str, what: str) -> None:
    if len(files) > MAX_ATTACHMENTS:
        raise InvalidValue(where, len(files), f"at most {MAX_ATTACHMENTS} pictures and files{what}")


async def _send(request: RunRequest, place: Continuation, mark: str | None, conversation: str | None) -> ChatTurn:
    limits = request.limits()
    async with _attached(request, request.user.name, [turn.files for turn in place.turns]) as attached:
        messages = [
            {"role": turn.role, "content": turn.text, "attachments": files, "tool_round": turn.tool_round}
            for turn, files in zip(place.turns, attached, strict=True)
        ]
        return await request.service.chats.stream_agent_chat(
            request.graph.id,
            messages,
            owner=request.user.name,
            chat_id=place.chat_id,
            limits=limits,
            run_id=request.run_id,
            version=request.version,
            about=request.about,
            parent_id=place.parent_id,
            made_by=MADE_BY,
            mark=mark,
            client_request=request.client_json(conversation),
        )


@asynccontextmanager
async def _attached(
    request: RunRequest, owner: str, files_of_turns: Sequence[Sequence[File]]
) -> AsyncIterator[list[list[Attachment]]]:
    """Store the files of each turn and yield their attachments; remove those that no message refers to on exit."""
    service = request.service
    attached: list[list[Attachment]] = [[] for _ in files_of_turns]
    are_used = False
    try:
        for files, attachments in zip(files_of_turns, attached, strict=True):
            for file in files:
                with _naming(file.where, *OF_FILES), _naming(file.named_in, "name"):
                    attachments.append(await service.chats.attach(owner, file.name, file.media_type, file.content))
        yield attached
        are_used = request.run_id is None  # with a run id, the run may have existed already with its own files
    finally:
        for attachment in () if are_used else chain.from_iterable(attached):
            with suppress(StoreUnavailable):
                await service.stores.chats.detach(attachment.id)


@contextmanager
def _naming(where: str, *fields: str) -> Iterator[None]:
    """Re-raise InvalidValue for one of these chat fields with `where`, the request field that the value came from."""
    try:
        yield
    except InvalidValue as error:
        if error.field not in fields:
            raise
        raise InvalidValue(where, error.value, error.expected) from None
