"""The answer of a run: its events, folded to what a client of a chat model is to see.

A graph may have many agents, and most of what they say is said to each other. The user is answered by those whose
output is the graph's: `speakers` finds them in the document. Of those the first that says anything has the word; of
it, the agent itself, not the agents it uses as tools. What the run comes to is the truth: if the pieces told on the
way do not end in it, the rest, or all of it, is told at the end. So a graph that does not stream is told in one piece.
A run that was parked or halted may go on: it has ended if nothing comes after its end.

A run that goes on elsewhere tells an answer that was not finished from its beginning: what a model said in full before
comes in one piece, what broke off is asked for again. It is laid over what was told before. As long as it is the same
nothing is told twice; where it first differs, what was told from there on is withdrawn, and told as it is now.

Knows nothing of OpenAI's words; no I/O.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.chat.protocol import answer_text
from penstock.hosting.records import HostedEvent
from penstock.stops import LIMIT_REASONS, StopReason

Ending = Literal["completed", "failed", "halted", "cancelled", "parked"]

ENDINGS: Mapping[str, Ending] = {
    "run.completed": "completed",
    "run.failed": "failed",
    "run.halted": "halted",
    "run.cancelled": "cancelled",
    "run.parked": "parked",
}
ASKING = frozenset({"approval.requested", "approval.answered", "node.completed", "node.error", "node.cancelled"})
"""Events after which a run may wait for other questions than before."""
PRICELESS = "and a run whose cost is limited asks no model without one: whoever runs the server has to register it"
"""What helps a run that was halted for want of a price; its own message is for whoever writes the program."""
PASSES_ON = frozenset({"output"})
"""Nodes that give what came in."""


@dataclass(frozen=True, slots=True)
class Said:
    """A piece of the answer."""

    text: str
    begins: bool = False
    """Whether it begins a statement of its own: the first piece, and the first one after a tool was used."""


@dataclass(frozen=True, slots=True)
class Used:
    """The answering agent used a tool."""

    id: str
    name: str
    arguments: str
    """As JSON; as the model wrote it, if that was none."""


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """So many of the newest statements and uses of tools are no part of the answer: the run has begun them again."""

    items: int


@dataclass(frozen=True, slots=True)
class Question:
    """What a run asks people before it goes on."""

    id: str
    node_id: str
    text: str
    value: Any = field(default=None, compare=False)
    """What is asked about, such as a tool and its arguments; cut as its event has it, if it is long."""


@dataclass(frozen=True, slots=True)
class Waits:
    """The run waits for answers to these questions, and no others; for none, if it goes on."""

    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of the run, and what it cost."""

    status: Ending
    text: str = ""
    """What a completed run came to."""
    reason: str | None = None
    """Why it stopped: a stop reason, or the class of the error."""
    message: str = ""
    cost_usd: float | None = None
    tokens_in: int = 0
    tokens_out: int = 0
    at_ms: int = 0
    unknown_costs: int = 0
    """So many calls cost something that nobody could tell: the cost is then a lower bound."""
    whose: str | None = None
    """Whose limit has halted it: the run's own, that of a node, or what an owner or all may spend in a day."""
    is_momentary: bool = False
    """Whether only calls under way hold what it wanted of that limit."""
    cut: str | None = None
    """Why the model did not say all of what a completed run came to: `length` or `content_filter`; None if it did."""
    unresolved_usd: float = 0.0
    """What is held for calls of which nobody knows what became, as of those under way when a server died."""

    @property
    def cost(self) -> dict[str, Any]:
        """What `usage` says of money: what all of it cost, or that this is not known, and of how many calls."""
        return {"cost": None, "unknown_costs": self.unknown_costs} if self.unknown_costs else {"cost": self.cost_usd}

    @property
    def is_limit(self) -> bool:
        """Whether a ceiling that somebody set ended it."""
        return self.status == "halted" and self.reason in LIMIT_REASONS


Told = Said | Used | Withdrawn | Waits
Piece = Told | Ended


@dataclass(slots=True)
class Retelling:
    """How far a run that goes on has told again what was told of it before."""

    before: Sequence[str | Used]
    """Statements, and the tools between them."""
    item: int = 0
    """So many of them were told again."""
    characters: int = 0
    """So much of the next one, which is a statement then; all of it, as long as more may be said before a tool."""

    @property
    def is_over(self) -> bool:
        """Whether all of it was."""
        return self.item == len(self.before)

    @property
    def begun(self) -> str:
        """What was told again of a statement that is not behind us."""
        told = "" if self.is_over else self.before[self.item]
        return "" if isinstance(told, Used) else told[: self.characters]

    def text(self, text: str) -> str:
        """Go on over what is the same; what of the text is beyond that."""
        told = self.before[self.item]
        if isinstance(told, Used):
            return text
        left = len(told) - self.characters
        if not told.startswith(text[:left], self.characters):
            return text
        self.characters += min(len(text), left)
        if self.characters == len(told) and self.item == len(self.before) - 1:
            self.item, self.characters = self.item + 1, 0
        return text[left:]

    def tool(self, used: Used) -> bool:
        """Go on if the same tool was used at this place; whether it was."""
        if self.characters and self.before[self.item] == self.begun:
            self.item, self.characters = self.item + 1, 0
        is_same = self.before[self.item] == used
        self.item += is_same
        return is_same


@dataclass(slots=True)
class Answer:
    """The fold: give it each event once, in order."""

    speakers: frozenset[str]
    ended: Ended | None = None
    _items: list[list[str] | Used] = field(default_factory=list)
    """What was told and stands: tools, and statements in pieces, which are put together when somebody needs them."""
    _again: Retelling | None = None
    _node: str | None = None
    _source: str = ""
    _questions: tuple[Question, ...] = ()
    """Those that nobody has answered yet."""

    @property
    def said(self) -> str:
        """Everything that was told as text and stands, statements apart by an empty line."""
        return "\n\n".join(item for item in self._whole() if not isinstance(item, Used))

    def add(self, event: HostedEvent) -> Iterator[Told]:
        """What the event adds to the answer; `ended` is set while nothing has happened after an end."""
        self.ended = None
        if event.type == "text.delta":
            if self._has_the_word(event.data):
                yield from self._say(str(event.data.get("text", "")))
        elif event.type == "tool.call":
            if self._has_the_word(event.data):
                yield from self._use(_used(event.data.get("call")))
        elif event.type in ASKING:
            yield from self._wait(event)
        elif event.type == "run.resumed":
            self._again = Retelling(self._whole()) if self._items else None
        elif event.type in ENDINGS:
            self.ended = _ended(ENDINGS[event.type], event.at_ms, event.data)
            yield from self._come_to(self.ended.text)

    def _wait(self, event: HostedEvent) -> Iterator[Waits]:
        """What it waits for now, if that is not what it waited for before."""
        before = self._questions
        if event.type == "approval.requested":
            asked = _question(event.data.get("approval"))
            self._questions = (*(one for one in before if one.id != asked.id), asked)
        elif event.type == "approval.answered":
            self._questions = tuple(one for one in before if one.id != event.data.get("approval_id"))
        else:  # a node that is over waits for nothing, whether it was answered or gave up
            self._questions = tuple(one for one in before if one.node_id != event.data.get("node_id"))
        if set(self._questions) != set(before):
            yield Waits(self._questions)

    def _whole(self) -> list[str | Used]:
        return [item if isinstance(item, Used) else "".join(item) for item in self._items]

    def _has_the_word(self, data: Mapping[str, Any]) -> bool:
        node, source = data.get("node_id"), str(data.get("source", ""))
        if self._node is None and node in self.speakers:
            self._node, self._source = str(node), source
        return node == self._node and source == self._source

    def _say(self, text: str) -> Iterator[Told]:
        if self._again is not None:
            text = self._again.text(text)
            if self._again.is_over:
                self._again = None
            elif text:
                yield from self._differ(self._again)
        if text:
            yield self._put(text)

    def _use(self, used: Used) -> Iterator[Told]:
        if self._again is not None:
            if self._again.tool(used):
                if self._again.is_over:
                    self._again = None
                return
            yield from self._differ(self._again)
        self._items.append(used)
        yield used

    def _put(self, text: str) -> Said:
        if self._items and isinstance(newest := self._items[-1], list):
            newest.append(text)
            return Said(text)
        self._items.append([text])
        return Said(text, begins=True)

    def _differ(self, again: Retelling) -> Iterator[Told]:
        """From here on the run tells something else than before: that is withdrawn, and this is told."""
        self._again = None
        yield self._withdraw(len(self._items) - again.item)
        if again.begun:
            yield self._put(again.begun)

    def _withdraw(self, items: int) -> Withdrawn:
        del self._items[len(self._items) - items :]
        return Withdrawn(items)

    def _come_to(self, text: str) -> Iterator[Told]:
        """Tell what the run came to and nobody has been told; if it came to nothing, what was told stays."""
        if not text:
            return
        again, self._again = self._again, None
        told = self._statement()
        if again is not None and (again.item or again.characters) and not (told and text.startswith(told)):
            yield from self._differ(again)
            told = self._statement()
        if told.endswith(text):
            return
        if not text.startswith(told):  # what was told is something else, as of an attempt that was given up
            yield self._withdraw(1)
            told = ""
        yield self._put(text[len(told) :])

    def _statement(self) -> str:
        """The newest one, if no tool was used since."""
        newest = self._items[-1] if self._items else []
        return "" if isinstance(newest, Used) else "".join(newest)


def speakers(document: Mapping[str, Any]) -> frozenset[str]:
    """The nodes whose output is the graph's: those with no flow behind them, and what feeds an `output` as it is."""
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
        if types.get(node) in PASSES_ON:
            todo.extend(before.get(node, ()))
    return frozenset(found)


def fold(events: Iterable[HostedEvent], speaking: frozenset[str]) -> tuple[list[Piece], Answer]:
    """All pieces of what has happened so far, and the answer they make."""
    answer = Answer(speaking)
    pieces: list[Piece] = [piece for event in events for piece in answer.add(event)]
    return (pieces if answer.ended is None else [*pieces, answer.ended]), answer


def _objects(document: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    found = document.get(key)
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def _used(call: Any) -> Used:
    given = call if isinstance(call, Mapping) else {}
    arguments = given.get("arguments")
    as_text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return Used(str(given.get("id", "")), str(given.get("name", "")), as_text)


def _question(approval: Any) -> Question:
    given = approval if isinstance(approval, Mapping) else {}
    id, node_id, text = (str(given.get(name, "")) for name in ("id", "node_id", "question"))
    return Question(id, node_id, text, given.get("value"))


def _ended(status: Ending, at_ms: int, data: Mapping[str, Any]) -> Ended:
    cost = data.get("cost_usd")
    reason = str(StopReason.ABORTED) if status == "cancelled" else data.get("stop_reason") or data.get("error")
    message = str(data.get("message") or data.get("reason") or "")
    return Ended(
        status,
        answer_text(data.get("output")) if status == "completed" else "",
        reason,
        f"{message.partition(';')[0]}, {PRICELESS}" if reason == StopReason.PRICE_UNKNOWN else message,
        None if cost is None else float(cost),
        int(data.get("tokens_in") or 0),
        int(data.get("tokens_out") or 0),
        at_ms,
        int(data.get("unknown_costs") or 0),
        data.get("whose"),
        data.get("momentary") is True,
        cut if (cut := data.get("finish_reason")) in ("length", "content_filter") else None,
        float(data.get("unresolved_usd") or 0),
    )
