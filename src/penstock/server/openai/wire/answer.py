"""The answer of a run: its events, folded to the view of a chat model's client.

A graph may have many agents, and most of their output goes to each other. The answer comes from the nodes whose output
is the graph's output: `answering_nodes` finds them in the document. The first of them to emit output is the answering
node; only its own agent counts, not the agents that it uses as tools. The run's output is authoritative: if the emitted
pieces do not end with it, the rest, or all of it, is emitted at the end. So a graph that does not stream is emitted in
one piece. A parked or halted run may continue: it has ended only if no event follows its end.

A resumed run emits an unfinished answer again from its beginning: completed model responses come in one piece, and
interrupted ones are requested again. The repeated output is compared with what was emitted before. While they are
equal, nothing is emitted twice; from the first difference on, the earlier output is withdrawn and the new output
emitted.

Knows nothing of OpenAI's formats; no I/O.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.chat.turn import answer_text
from penstock.hosting.event_data import STATUS_OF
from penstock.hosting.ports import HostedEvent, RunStatus
from penstock.nodes.client_tools import EXPECTS as CLIENT_TOOLS
from penstock.server.openai.wire.request import call_id
from penstock.stops import LIMIT_REASONS, StopReason

QUESTION_EVENTS = frozenset(
    {"approval.requested", "approval.answered", "node.completed", "node.error", "node.cancelled"}
)
"""Events that can change the set of questions a run waits for."""
PRICE_ADVICE = "and a run with a cost limit calls no model without one: the operator of the server has to register it"
"""Advice for a run halted because a price is unknown; the advice in its own message is for programmers."""
FORWARDING_TYPES = frozenset({"output"})
"""Types of nodes whose output is their input."""


@dataclass(frozen=True, slots=True)
class TextAdded:
    """A piece of the answer's text."""

    text: str
    begins: bool = False
    """Whether it starts a new statement: the first piece, and the first one after a tool call."""


@dataclass(frozen=True, slots=True)
class ToolCalled:
    """A tool call by the answering agent."""

    id: str
    name: str
    arguments: str
    """As JSON, or the model's own text if that was not valid JSON."""


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """Removes the newest `items` statements and tool calls from the answer: the run has started them again."""

    items: int


@dataclass(frozen=True, slots=True)
class Question:
    """A question that a run waits for a person to answer."""

    id: str
    node_id: str
    text: str
    value: Any = field(default=None, compare=False)
    """Subject of the question, such as a tool and its arguments; truncated as in its event, if it is long."""


@dataclass(frozen=True, slots=True)
class QuestionsChanged:
    """The complete set of questions that the run waits for; empty when it continues."""

    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class Spent:
    """Tokens and cost of calls."""

    tokens_in: int = 0
    tokens_out: int = 0
    cost_usd: float = 0.0
    unknown_costs: int = 0

    def plus(self, other: Spent) -> Spent:
        """Return the sum."""
        return Spent(
            self.tokens_in + other.tokens_in,
            self.tokens_out + other.tokens_out,
            self.cost_usd + other.cost_usd,
            self.unknown_costs + other.unknown_costs,
        )

    @property
    def cost(self) -> dict[str, Any]:
        """Cost fields of `usage`: the total cost, or None with the number of calls whose cost is unknown."""
        return {"cost": None, "unknown_costs": self.unknown_costs} if self.unknown_costs else {"cost": self.cost_usd}


@dataclass(frozen=True, slots=True)
class ClientCalls:
    """Calls of the client's tools: they end the answer to this request, and the run waits for their results."""

    approval_id: str
    """The stored question that the results answer."""
    calls: tuple[ToolCalled, ...]
    """The calls, with the ids that the client sends back."""
    spent: Spent = field(default=Spent(), compare=False)
    """Usage since the request."""


@dataclass(frozen=True, slots=True)
class Idle:
    """The run does nothing but wait for answers to its questions."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The outcome of the run, and its cost."""

    status: RunStatus
    text: str = ""
    """Output of a completed run."""
    reason: str | None = None
    """Why it stopped: a stop reason, or the class of the error."""
    message: str = ""
    cost_usd: float | None = None
    tokens_in: int = 0
    tokens_out: int = 0
    at_ms: int = 0
    unknown_costs: int = 0
    """Number of calls whose cost is unknown; if not 0, `cost_usd` is a lower bound."""
    whose: str | None = None
    """Scope of the limit that halted it: the run, a node, or the daily budget of the owner or of all users."""
    is_momentary: bool = False
    """Whether the limit was reached only because of holds for calls under way."""
    truncated_by: str | None = None
    """Why the output of a completed run is truncated: `length` or `content_filter`; None if it is complete."""
    unresolved_usd: float = 0.0
    """Amount held for calls with an unknown outcome, such as those under way when a server crashed."""
    before: Spent = Spent()
    """Usage of earlier requests that the same run answered with calls of the client's tools."""

    @property
    def cost(self) -> dict[str, Any]:
        """Cost fields of `usage`: the cost of this request, or None with the number of calls of unknown cost."""
        if self.unknown_costs or self.cost_usd is None:
            return {"cost": None, "unknown_costs": self.unknown_costs} if self.unknown_costs else {"cost": None}
        return {"cost": round(self.cost_usd - self.before.cost_usd, 9) if self.before.cost_usd else self.cost_usd}

    @property
    def is_free(self) -> bool:
        """Whether the run is known to have cost nothing."""
        return self.cost_usd == 0 and not self.unknown_costs and not self.unresolved_usd

    @property
    def is_limit(self) -> bool:
        """Whether a configured limit halted the run."""
        return self.status == "halted" and self.reason in LIMIT_REASONS


AnswerPiece = TextAdded | ToolCalled | Withdrawn | QuestionsChanged | ClientCalls | Idle
Piece = AnswerPiece | Ended


@dataclass(slots=True)
class Repetition:
    """Tracks how much of its earlier output a resumed run has repeated."""

    before: Sequence[str | ToolCalled]
    """Earlier statements and tool calls, in order."""
    item: int = 0
    """Number of items that were repeated in full."""
    characters: int = 0
    """Repeated characters of the next item, a statement; its full length, while more text may precede a tool call."""

    @property
    def has_begun(self) -> bool:
        """Whether any of the earlier output was repeated."""
        return bool(self.item or self.characters)

    @property
    def is_over(self) -> bool:
        """Whether all earlier output was repeated."""
        return self.item == len(self.before)

    @property
    def unfinished(self) -> str:
        """The repeated part of the statement that is not repeated in full yet."""
        item = "" if self.is_over else self.before[self.item]
        return "" if isinstance(item, ToolCalled) else item[: self.characters]

    def text(self, text: str) -> str:
        """Advance over text that repeats earlier output, and return the part that does not."""
        statement = self.before[self.item]
        if isinstance(statement, ToolCalled):
            return text
        left = len(statement) - self.characters
        if not statement.startswith(text[:left], self.characters):
            return text
        self.characters += min(len(text), left)
        if self.characters == len(statement) and self.item == len(self.before) - 1:
            self.item, self.characters = self.item + 1, 0
        return text[left:]

    def tool(self, call: ToolCalled) -> bool:
        """Advance if the earlier output has the same tool call here; return whether it has."""
        if self.characters and self.before[self.item] == self.unfinished:
            self.item, self.characters = self.item + 1, 0
        is_same = self.before[self.item] == call
        self.item += is_same
        return is_same


@dataclass(slots=True)
class AnswerBuilder:
    """Folds the events of a run into its answer; add each event once, in order."""

    answering_nodes: frozenset[str]
    ended: Ended | None = None
    _items: list[list[str] | ToolCalled] = field(default_factory=list)
    """Emitted items that were not withdrawn: tool calls, and statements as lists of pieces, joined on demand."""
    _repetition: Repetition | None = None
    """Set while a resumed run repeats its earlier output."""
    _node: str | None = None
    _source: str = ""
    _questions: tuple[Question, ...] = ()
    """Questions not yet answered."""
    _client_questions: set[str] = field(default_factory=set)
    """Ids of the questions that the client's tools answer."""
    _spent: list[Spent] = field(default_factory=lambda: [Spent()])
    """Usage of each request that the run has answered or answers."""
    _round_start: int = 0
    """Index of the first item since the client returned results."""
    _answered: set[str] = field(default_factory=set)
    """Ids of the client's questions that were answered."""

    @property
    def rounds(self) -> int:
        """How often the client has returned results of its tools so far."""
        return len(self._answered)

    @property
    def text(self) -> str:
        """The text emitted since the client returned results that was not withdrawn, with an empty line between."""
        return "\n\n".join(item for item in self._whole()[self._round_start :] if not isinstance(item, ToolCalled))

    @property
    def waiting(self) -> QuestionsChanged:
        """The questions that the run waits for."""
        return QuestionsChanged(self._questions)

    def add(self, event: HostedEvent) -> Iterator[AnswerPiece]:
        """Yield the pieces that the event adds to the answer; `ended` is set only while the end is the newest event."""
        self.ended = None
        if event.type == "text.delta":
            if self._is_answering(event.data):
                yield from self._add_text(str(event.data.get("text", "")))
        elif event.type == "tool.call":
            if self._is_answering(event.data):
                yield from self._add_call(_parse_call(event.data.get("call")))
        elif event.type == "call.ended":
            self._add_spent(event.data)
        elif event.type == "run.waiting":
            if event.data.get("idle") is True:
                yield Idle()
        elif event.type in QUESTION_EVENTS:
            calls = self._client_calls(event)
            yield from self._update_questions(event) if calls is None else calls
        elif event.type == "run.resumed":
            self._repetition = Repetition(self._whole()) if self._items else None
        elif event.type in STATUS_OF:
            before = Spent()
            for earlier in self._spent[:-1]:
                before = before.plus(earlier)
            self.ended = replace(_parse_end(STATUS_OF[event.type], event.at_ms, event.data), before=before)
            yield from self._complete(self.ended.text)

    def _add_spent(self, data: Mapping[str, Any]) -> None:
        if data.get("replayed"):
            return  # it was counted when it was made
        cost = data.get("cost_usd")
        tokens = int(data.get("tokens_in") or 0), int(data.get("tokens_out") or 0)
        self._spent[-1] = self._spent[-1].plus(Spent(*tokens, float(cost or 0), int(cost is None)))

    def _client_calls(self, event: HostedEvent) -> list[AnswerPiece] | None:
        """Return the calls that an event puts to the client, if any; None if the event is about other questions."""
        if event.type == "approval.requested":
            approval = event.data.get("approval")
            if not isinstance(approval, Mapping) or approval.get("kind") != CLIENT_TOOLS:
                return None
            id = str(approval.get("id"))
            self._client_questions.add(id)
            return [ClientCalls(id, _parse_client_calls(id, approval.get("value")), self._spent[-1])]
        id = str(event.data.get("approval_id"))
        if event.type != "approval.answered" or id not in self._client_questions:
            return None
        if id not in self._answered:
            self._answered.add(id)
            self._spent.append(Spent())
            self._round_start = len(self._items)
        return []

    def _update_questions(self, event: HostedEvent) -> Iterator[QuestionsChanged]:
        """Yield the questions that the run waits for, if the event changed them."""
        before = self._questions
        if event.type == "approval.requested":
            question = _parse_question(event.data.get("approval"))
            self._questions = (*(other for other in before if other.id != question.id), question)
        elif event.type == "approval.answered":
            self._questions = tuple(question for question in before if question.id != event.data.get("approval_id"))
        else:  # a node that has ended waits for nothing, whether or not its questions were answered
            self._questions = tuple(question for question in before if question.node_id != event.data.get("node_id"))
        if set(self._questions) != set(before):
            yield QuestionsChanged(self._questions)

    def _whole(self) -> list[str | ToolCalled]:
        return [item if isinstance(item, ToolCalled) else "".join(item) for item in self._items]

    def _is_answering(self, data: Mapping[str, Any]) -> bool:
        node, source = data.get("node_id"), str(data.get("source", ""))
        if self._node is None and node in self.answering_nodes:
            self._node, self._source = str(node), source
        return node == self._node and source == self._source

    def _add_text(self, text: str) -> Iterator[AnswerPiece]:
        if self._repetition is not None:
            text = self._repetition.text(text)
            if self._repetition.is_over:
                self._repetition = None
            elif text:
                yield from self._replace(self._repetition)
        if text:
            yield self._append(text)

    def _add_call(self, call: ToolCalled) -> Iterator[AnswerPiece]:
        if self._repetition is not None:
            if self._repetition.tool(call):
                if self._repetition.is_over:
                    self._repetition = None
                return
            yield from self._replace(self._repetition)
        self._items.append(call)
        yield call

    def _append(self, text: str) -> TextAdded:
        if self._items and isinstance(newest := self._items[-1], list):
            newest.append(text)
            return TextAdded(text)
        self._items.append([text])
        return TextAdded(text, begins=True)

    def _replace(self, repetition: Repetition) -> Iterator[AnswerPiece]:
        """Withdraw the earlier items that were not repeated, and emit the repeated part of a statement again."""
        self._repetition = None
        yield self._withdraw(len(self._items) - repetition.item)
        if repetition.unfinished:
            yield self._append(repetition.unfinished)

    def _withdraw(self, items: int) -> Withdrawn:
        del self._items[len(self._items) - items :]
        return Withdrawn(items)

    def _complete(self, text: str) -> Iterator[AnswerPiece]:
        """Emit the part of the run's output that was not emitted yet; without an output, keep what was emitted."""
        if not text:
            return
        repetition, self._repetition = self._repetition, None
        emitted = self._statement()
        if repetition is not None and repetition.has_begun and not (emitted and text.startswith(emitted)):
            yield from self._replace(repetition)
            emitted = self._statement()
        if emitted.endswith(text):
            return
        if not text.startswith(emitted):  # the emitted text is of something else, such as an abandoned attempt
            yield self._withdraw(1)
            emitted = ""
        yield self._append(text[len(emitted) :])

    def _statement(self) -> str:
        """Return the newest statement; empty if a tool call follows it."""
        newest = self._items[-1] if self._items else []
        return "" if isinstance(newest, ToolCalled) else "".join(newest)


def answering_nodes(document: Mapping[str, Any]) -> frozenset[str]:
    """Return the nodes whose output is the graph's: those without outgoing flow, and those feeding an `output` node."""
    types = {str(node.get("id")): node.get("type") for node in _objects(document, "nodes")}
    before: dict[str, list[str]] = {}
    feeding: set[str] = set()
    for edge in _objects(document, "edges"):
        if (edge.get("data") or {}).get("channel", "flow") == "flow":
            before.setdefault(str(edge.get("target")), []).append(str(edge.get("source")))
            feeding.add(str(edge.get("source")))
    todo = [node for node in types if node not in feeding]
    found: set[str] = set()
    while todo:
        node = todo.pop()
        if node in found:
            continue
        found.add(node)
        if types.get(node) in FORWARDING_TYPES:
            todo.extend(before.get(node, ()))
    return frozenset(found)


def fold(
    events: Iterable[HostedEvent], answering: frozenset[str], rounds: int = 0
) -> tuple[list[Piece], AnswerBuilder]:
    """Return the pieces of the events so far since the client returned results `rounds` times, and their answer."""
    answer = AnswerBuilder(answering)
    pieces: list[Piece] = []
    for event in events:
        for piece in answer.add(event):
            if answer.rounds == rounds:
                pieces.append(piece)
                if isinstance(piece, ClientCalls):
                    return pieces, answer
    return (pieces if answer.ended is None else [*pieces, answer.ended]), answer


def _objects(document: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    found = document.get(key)
    return [item for item in found if isinstance(item, Mapping)] if isinstance(found, list) else []


def _parse_call(call: Any) -> ToolCalled:
    given = call if isinstance(call, Mapping) else {}
    arguments = given.get("arguments")
    as_text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return ToolCalled(str(given.get("id", "")), str(given.get("name", "")), as_text)


def _parse_client_calls(approval_id: str, value: Any) -> tuple[ToolCalled, ...]:
    given = value.get("tool_calls") if isinstance(value, Mapping) else ()
    calls = [_parse_call(call) for call in given or ()]
    return tuple(replace(call, id=call_id(approval_id, at)) for at, call in enumerate(calls))


def _parse_question(approval: Any) -> Question:
    given = approval if isinstance(approval, Mapping) else {}
    id, node_id, text = (str(given.get(name, "")) for name in ("id", "node_id", "question"))
    return Question(id, node_id, text, given.get("value"))


def _parse_end(status: RunStatus, at_ms: int, data: Mapping[str, Any]) -> Ended:
    cost = data.get("cost_usd")
    reason = str(StopReason.ABORTED) if status == "cancelled" else data.get("stop_reason") or data.get("error")
    message = str(data.get("message") or data.get("reason") or "")
    return Ended(
        status,
        answer_text(data.get("output")) if status == "completed" else "",
        reason,
        f"{message.partition(';')[0]}, {PRICE_ADVICE}" if reason == StopReason.PRICE_UNKNOWN else message,
        None if cost is None else float(cost),
        int(data.get("tokens_in") or 0),
        int(data.get("tokens_out") or 0),
        at_ms,
        int(data.get("unknown_costs") or 0),
        data.get("whose"),
        data.get("momentary") is True,
        finish if (finish := data.get("finish_reason")) in ("length", "content_filter") else None,
        float(data.get("unresolved_usd") or 0),
    )
