"""One turn of a chat: the request for it, the run that answers it, and that run's input and answer.

A request with a run id is idempotent: repeating it returns the same turn, and a different request with the same id is a
Conflict. Messages hold the names and sizes of attachments; the service compares their bytes.

The input of a run is the messages on the path to its answer. The answer is the output of the graph as text; if the run
failed or was stopped and has no output, it is the text that had been emitted by then. The functions that convert one to
the other are pure; `ChatRunHandler`, the host's handler of these runs, reads and writes them.

The origin of a run has the ids of its chat and its messages, but no content: the conversation is read when the run
starts, on any worker, and the answer is written when the run has ended. Both may be repeated after a crash, with the
same result, because messages never change, except for answers that are being written. So the origin also has the ids of
the answers on the path that were unfinished when the run was submitted (`untold`), and the run never receives their
text. Otherwise a run that another worker takes over, or that is granted more, would continue with a different
conversation than it started with, and a run that waits for an approval with a different one than was approved.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from penstock.agents.messages import Role
from penstock.chat.conversation import MAX_CHARACTERS, ChatMessage, MessageNotFound, MessageTree
from penstock.chat.ports import Attachment, ChatStore, ChatTransaction
from penstock.chat.scope import CHAT_START_TYPES, services_for
from penstock.checks import choice
from penstock.clock import Clock
from penstock.hosting.host_context import Prepared
from penstock.hosting.limits import RunLimits
from penstock.hosting.ports import (
    Conflict,
    EventStore,
    GraphStore,
    HostedEvent,
    RunIdTaken,
    RunRecord,
    RunStatus,
    StoreCorrupt,
    retry_unavailable,
)
from penstock.kernel.document import parse_graph
from penstock.kernel.graph import GraphSpec
from penstock.money import known_usd
from penstock.nodes.chat_start import as_messages
from penstock.nodes.client_tools import SERVICE
from penstock.runtime.graphs.graph_runtime import aside

if TYPE_CHECKING:
    from penstock.hosting.host import RunHost

Limits = RunLimits | Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class NewMessage:
    """One message that the caller adds."""

    role: Role
    content: str
    attached: Sequence[Attachment] | None = ()
    """None to keep the attachments of the message that it replaces."""
    tool_round: Mapping[str, Any] | None = None
    """The `text` and `calls` of an answer that called the client's tools, each with `id`, `name`, `arguments` and
    `result`; `content` has them as text."""

    @property
    def data(self) -> dict[str, Any]:
        """The data stored with the message; attachments are referred to by id, never copied."""
        data: dict[str, Any] = {"state": "complete", "attachments": [_reference(one) for one in self.attached or ()]}
        return data if self.tool_round is None else {**data, "tool_round": dict(self.tool_round)}


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """The request for a turn; the ids of its messages are derived from the run id."""

    run_id: str
    digest: str
    """Digest of the run id."""
    at_ms: int
    limits: Limits
    user_tools: tuple[str, ...]
    is_named: bool
    """Whether the caller supplied the run id, so that this may be a repeated request."""
    messages: tuple[NewMessage, ...] = ()
    """The new messages, the newest last; empty if the turn only requests an answer."""
    version: int | None = None
    """Version of the graph; None means the newest."""
    about: Mapping[str, Any] | None = None
    """Further data stored with the run."""
    below: Callable[[MessageTree], str | None] | None = None
    """Returns the parent id of the first message of the turn; None if the caller gave no position."""
    mark: str | None = None
    """A key that will point to the newest of the new messages."""
    client_request: Mapping[str, Any] | None = None
    """The client's requirements for the agents that the user talks to, stored as the input of the run."""

    @property
    def answer_id(self) -> str:
        return f"a-{self.digest}"

    def user_id(self, number: int = 0) -> str:
        return f"u-{self.digest}" if not number else f"u-{self.digest}-{number}"

    def found_in(self, tree: MessageTree) -> list[tuple[NewMessage, ChatMessage]]:
        """Pair each new message with its stored message in the tree; Conflict if the stored turn differs."""
        ids = [*map(self.user_id, range(1, max(len(self.messages), 1))), self.user_id()]
        there = [tree[id] for id in ids if id in tree]
        is_same = [(one.role, one.content) for one in there] == [(one.role, one.content) for one in self.messages]
        if not is_same or self.user_id(len(ids)) in tree or not self._is_in_place(tree, there):
            raise self.conflict()
        return [*zip(self.messages, there, strict=True)]

    def _is_in_place(self, tree: MessageTree, there: Sequence[ChatMessage]) -> bool:
        first = there[0].id if there else self.answer_id
        return self.below is None or (first in tree and tree[first].parent_id == self.below(tree))

    def conflict(self) -> Conflict:
        """Return the error for a different request with the same run id."""
        return answers_something_else(self.run_id)


def answers_something_else(run_id: str | None) -> RunIdTaken:
    """Return the error for a different request with the same run id."""
    return RunIdTaken(f"run {run_id!r} answers something else; give this one an id of its own")


def user_message_id(answer_id: str) -> str:
    """Return the id of the user message in the turn of an answer, if the turn has one."""
    return f"u-{answer_id.removeprefix('a-')}"


def without_ids(references: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the attachment references without their ids: the same bytes may be attached twice."""
    return [{key: value for key, value in one.items() if key != "id"} for one in references]


def _reference(attached: Attachment) -> dict[str, Any]:
    return {"id": attached.id, "name": attached.name, "media_type": attached.media_type, "size": attached.size}


OnLeave = Literal["continue", "cancel"]

ABANDONED = "the stream of the answer was left"


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A run that answers in a chat. The host owns the run: it continues whether or not a client reads its events."""

    chat_id: str
    run_id: str
    user_message_id: str | None
    """The user message; None if an answer is retried or continued."""
    message_id: str
    """The answer, which exists from the start and is empty until the run ends."""
    run: RunRecord = field(repr=False, compare=False)
    """The run as it was stored when this turn was requested; it has continued since."""
    _host: RunHost = field(repr=False, compare=False)
    _read: Callable[[ChatTurn], Awaitable[ChatMessage]] = field(repr=False, compare=False)

    async def events(self, after: int = 0, *, on_leave: OnLeave = "continue") -> AsyncGenerator[HostedEvent, None]:
        """Yield the events of the run after `after`, until the run has ended or is parked.

        With `on_leave="cancel"`, closing the generator earlier cancels the run and waits until it has ended. Close it
        explicitly (`contextlib.aclosing`) to wait for that.
        """
        choice("on_leave", on_leave, ("continue", "cancel"))
        is_over = False
        try:
            async with aclosing(self._host.events(self.run_id, after)) as events:
                async for event in events:
                    yield event
            is_over = True
        finally:
            if not is_over and on_leave == "cancel":
                await retry_unavailable(lambda: self.cancel(ABANDONED))
                await self._over()

    async def cancel(self, reason: str = "cancelled", *, by: str = "") -> None:
        """Cancel the run; the text it has emitted so far is kept."""
        await self._host.cancel(self.run_id, reason=reason, by=by)

    async def result(self) -> ChatMessage:
        """Wait until the run has ended or is parked, and return the stored answer, complete or not."""
        await self._over()
        return await self._read(self)

    async def _over(self) -> None:
        """Wait for the end of the run by reading its events, which is faster than polling its status."""
        stored_events = self._host.stores.events
        after = await retry_unavailable(lambda: stored_events.last_seq(self.run_id))
        async with aclosing(self._host.events(self.run_id, after)) as events:
            async for _ in events:
                pass


State = Literal["writing", "complete", "partial", "failed", "halted"]

STATES: Mapping[RunStatus, State] = {
    "completed": "complete",
    "cancelled": "partial",
    "failed": "failed",
    "halted": "halted",
}
"""The state of an answer by the final status of its run; until the run ends, the state is "writing"."""

KIND = "chat"
"""The kind of origin of runs that answer in a chat."""

INPUT_TYPES = frozenset({"input"})
"""Types of the nodes where a chat enters a graph that has no chat-start."""

MAX_ERROR = 2_000
CUT = "\n[cut]"
PAGE = 1_000
MAX_HISTORIES = 100
OF_ANSWERS = ("text.delta", "run.started", "run.resumed")
"""The event types from which the text of an unfinished answer is rebuilt."""
MAX_GRAPHS = 256
logger = logging.getLogger("penstock.chat")


def unfinished_answers(path: Iterable[ChatMessage]) -> list[str]:
    """Return the ids of the answers on a path that are still being written, and so are empty."""
    return [message.id for message in path if message.data.get("state") == "writing"]


def history_of(path: Iterable[ChatMessage], skipped: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the messages on a path in the form that models receive; empty answers are left out.

    The ids in `skipped` are left out too: those answers were empty when the run was submitted and may have text by now.
    """
    messages: list[dict[str, Any]] = []
    for message in path:
        attached = message.data.get("attachments")
        if (message.content or attached) and message.id not in skipped:
            messages.append({"role": message.role, "content": message.content})
            if attached:
                messages[-1]["attachments"] = attached
            if "tool_round" in message.data:
                messages[-1]["tool_round"] = message.data["tool_round"]
    return messages


def replace_user_message(history: Sequence[Mapping[str, Any]], given: Any) -> list[dict[str, Any]]:
    """Return the history with its last user message replaced by `given`, and nothing after it.

    The attachments of that message stay. An object with `messages` replaces the whole history.
    """
    messages = [dict(one) for one in as_messages(given)]
    if isinstance(given, Mapping) and "messages" in given:
        return messages
    user_indices = [at for at, one in enumerate(history) if one["role"] == "user"]
    if not user_indices:
        return [*map(dict, history), *messages]
    return [*map(dict, history[: user_indices[-1]]), {**history[user_indices[-1]], **messages[0]}]


def newest_text(history: Sequence[Mapping[str, Any]]) -> str:
    """Return the content of the last user message; empty if there is none."""
    return next((one["content"] for one in reversed(history) if one["role"] == "user"), "")


def chat_services(graph: GraphSpec) -> dict[str, Any]:
    """Return the services for a chat run of `graph`; InvalidValue if the graph has no node where a chat can enter."""
    starts = [node.id for node in graph.nodes if node.type in CHAT_START_TYPES]
    return services_for(graph, starts or [node.id for node in graph.nodes if node.type in INPUT_TYPES])


def answer_text(output: Any) -> str:
    """Render the output of a graph as an answer: text as is, several texts as paragraphs, anything else as JSON."""
    if isinstance(output, Mapping) and output.keys() == {"output"}:
        output = output["output"]
    if output is None:
        return ""
    if isinstance(output, str):
        return as_content(output)
    if isinstance(output, Mapping) and output and all(isinstance(one, str) for one in output.values()):
        return as_content("\n\n".join(output.values()))
    return as_content(json.dumps(output, ensure_ascii=False, default=str))


def as_content(text: str, most: int = MAX_CHARACTERS) -> str:
    """Return text that a message accepts: halves of surrogate pairs are replaced, and long text is truncated."""
    whole = text.encode("utf-8", "replace").decode()
    return whole if len(whole) <= most else whole[: most - len(CUT)] + CUT


def partial_text(events: Iterable[HostedEvent]) -> str:
    """Return the text emitted of an unfinished answer: the deltas of the last node to emit text, since its last start.

    A run that another worker takes over emits an unfinished answer from the beginning. If several agents inside the
    node emitted text, the outermost one counts.
    """
    texts: dict[str, dict[str, list[str]]] = {}
    is_stale = False
    for event in events:
        if event.type in ("run.started", "run.resumed"):
            is_stale = True  # keep the earlier text until the resumed run emits new text
        elif event.type == "text.delta" and event.data.get("text"):
            if is_stale:
                texts, is_stale = {}, False
            node = texts.pop(str(event.data.get("node_id")), {})
            node.setdefault(str(event.data.get("source")), []).append(str(event.data["text"]))
            texts[str(event.data.get("node_id"))] = node
    if not texts:
        return ""
    speakers = list(texts.values())[-1]
    outermost = min(speakers, key=lambda source: source.count("/"))
    return as_content("".join(speakers[outermost]))


def writing(run_id: str) -> dict[str, Any]:
    """Return the data of an answer that is being written."""
    return {"state": "writing", "run_id": run_id, "cost_usd": 0.0, "attachments": []}


def written(run: RunRecord) -> dict[str, Any]:
    """Return the data of the answer of a run that has ended."""
    cost_usd = known_usd(run.cost_nanos, run.unknown_costs)
    data: dict[str, Any] = {"state": STATES[run.status], "run_id": run.id, "cost_usd": cost_usd, "attachments": []}
    if run.unknown_costs:
        data["unknown_costs"] = run.unknown_costs
    if run.error and run.status != "completed":
        data["error"] = as_content(run.error, MAX_ERROR)
    if run.stop_reason and run.status != "completed":
        data["stop_reason"] = run.stop_reason
    return data


class Stores(Protocol):
    """The stores of the host that the handler reads."""

    @property
    def events(self) -> EventStore: ...
    @property
    def graphs(self) -> GraphStore: ...


class RunChatNotFound(Conflict):
    """The chat of a run was deleted."""

    def __init__(self, run_id: str, chat_id: str) -> None:
        self.run_id = run_id
        self.chat_id = chat_id
        super().__init__(f"run {run_id!r} cannot begin again: the chat {chat_id!r} that it answers in was deleted")


class ChatRunHandler:
    """The run handler for runs that answer in a chat."""

    def __init__(self, chats: ChatStore, stores: Stores, clock: Clock) -> None:
        self._chats = chats
        self._stores = stores
        self._clock = clock
        self._histories: dict[str, tuple[ChatMessage, ...]] = {}
        """Histories of runs that were submitted here and have not started, by run id; saves reading them again."""
        self._of_graphs: dict[tuple[str, int], dict[str, Any]] = {}
        """Chat services of recently used graph versions; a version never changes."""

    def cache_history(self, run_id: str, path: tuple[ChatMessage, ...]) -> None:
        """Cache the path to the answer of a run about to be submitted; no message of it may be still being written."""
        self._histories[run_id] = path
        if len(self._histories) > MAX_HISTORIES:
            del self._histories[next(iter(self._histories))]

    def forget_history(self, run_id: str) -> None:
        """Drop the cached history of a run that was refused."""
        self._histories.pop(run_id, None)

    async def on_start(self, run: RunRecord) -> Prepared:
        """Return the history of the answer, and the services that pass it to the entry agents of the graph.

        If a fork was given an input for a node where the chat enters, that input replaces the last user message.
        """
        path = self._histories.pop(run.id, None) or await self._before_answer(run)
        history = history_of(path, frozenset(run.origin.get("untold") or ()))
        of_graph = await self._of_graph(run.graph_id, run.graph_version)
        for node_id, instead in (run.origin.get("inputs") or {}).items():
            if node_id in of_graph["chat_scope"].entry_node_ids:
                history = replace_user_message(history, instead)
        services: dict[str, Any] = {
            **of_graph,
            "chat_input": {"messages": history},
            "user_tools": list(run.origin.get("user_tools") or ()),
            "attachments": self._loader(run.owner),
            SERVICE: run.input,
        }
        return Prepared(newest_text(history), services)

    async def on_resume(self, run: RunRecord) -> None:
        """Raise RunChatNotFound if the chat no longer exists."""
        chat_id = str(run.origin["chat_id"])
        if await self._chats.get(chat_id) is None:
            raise RunChatNotFound(run.id, chat_id)

    async def _of_graph(self, graph_id: str, version: int) -> dict[str, Any]:
        known = self._of_graphs.get((graph_id, version))
        if known is not None:
            return known
        record = await self._stores.graphs.get(graph_id, version)
        assert record is not None, "a run names a version that is there"
        services = chat_services(await aside(record.document, parse_graph))
        if len(self._of_graphs) >= MAX_GRAPHS:
            self._of_graphs.clear()
        self._of_graphs[graph_id, version] = services
        return services

    async def on_end(self, run: RunRecord, stores: ChatTransaction) -> None:
        """Write the result of the run into its answer; do nothing for a parked run, which continues later."""
        if run.status not in STATES:
            return
        chat_id, message_id = str(run.origin["chat_id"]), str(run.origin["message_id"])
        is_whole = run.status == "completed"
        content = answer_text(run.output) if is_whole else await _partial(stores.events, run)
        data = written(run)
        try:
            await stores.chats.finish_message(chat_id, message_id, content, data, now_ms=self._now_ms())
        except KeyError:
            return  # the chat was removed
        except Conflict:  # it was finished before
            await self._add_beside(stores.chats, run, content, data)

    async def _before_answer(self, run: RunRecord) -> tuple[ChatMessage, ...]:
        tree = await load_tree(self._chats, str(run.origin["chat_id"]))
        if run.origin["message_id"] not in tree:
            await self.on_resume(run)
            raise MessageNotFound(str(run.origin["chat_id"]), str(run.origin["message_id"]))
        return tree.before(str(run.origin["message_id"]))

    async def _add_beside(self, chats: ChatStore, run: RunRecord, content: str, data: dict[str, Any]) -> None:
        """Add the result of a run that continued after its answer was finished as a sibling of that answer.

        If the chat is full, the result is stored with the run only.
        """
        chat_id, message_id = str(run.origin["chat_id"]), str(run.origin["message_id"])
        tree = await load_tree(chats, chat_id)
        message = tree[message_id]
        if not all(is_more(one, content, data) for one in (message, latest_answer(tree, message_id, run.id))):
            return
        if tree.is_full:
            logger.warning(
                "chat %r is full: what run %r came to is kept with the run, and not in the chat", chat_id, run.id
            )
            return
        id = f"{message_id}.{run.epoch}"
        beside = replace(message, id=id, content=content, data=data, at_ms=self._now_ms())
        await chats.add_messages(chat_id, [beside], now_ms=self._now_ms())

    def _loader(self, owner: str) -> Any:
        async def load(attachment_id: str) -> bytes | None:
            found = await self._chats.attachment(attachment_id)
            return None if found is None or found[0].owner != owner else found[1]

        return load

    def _now_ms(self) -> int:
        return self._clock.time_ns() // 1_000_000


async def _partial(events: EventStore, run: RunRecord) -> str:
    """Return the text that the run had emitted when it ended."""
    found: list[HostedEvent] = []
    after = 0
    with suppress(StoreCorrupt):  # the text before an event that cannot be read is still an answer
        while page := await events.read(run.id, after, PAGE, OF_ANSWERS):
            found.extend(page)
            after = page[-1].seq
    return partial_text(found)


async def load_tree(chats: ChatStore, chat_id: str) -> MessageTree:
    """Load all messages of a chat; concurrent turns may have exceeded MAX_MESSAGES."""
    return MessageTree.of(*await chats.messages(chat_id), is_kept=True)


def is_more(message: ChatMessage, content: str, data: dict[str, Any]) -> bool:
    """Whether the result of a run differs from the answer that was written when it ended before.

    A complete answer was reported as such: a later worker crash followed by a cancel does not replace it.
    """
    state = message.data.get("state")
    is_whole = state == "complete" and data["state"] != "complete"
    return bool(content) and not is_whole and (message.content, state) != (content, data["state"])


def latest_answer(tree: MessageTree, message_id: str, run_id: str) -> ChatMessage:
    """Return the latest answer of a run: it has several if it continued after it had ended."""
    return [one for one in tree.siblings(message_id) if one.data.get("run_id") == run_id][-1]
