"""The answer of a run: its events, folded to what a client of a chat model is to see.

A graph may have many agents, and most of what they say is said to each other. The user is answered by those whose
output is the graph's: `speakers` finds them in the document. Of those the first that says anything has the word; of
it, the agent itself, not the agents it uses as tools. What the run comes to is the truth: if the pieces told on the
way do not end in it, the rest, or all of it, is told at the end. So a graph that does not stream is told in one piece.
A run that was parked or halted may go on: it has ended if nothing comes after its end.

Knows nothing of OpenAI's words; no I/O.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.chat.protocol import answer_text
from penstock.hosting.records import HostedEvent
from penstock.stops import LIMIT_REASONS

Ending = Literal["completed", "failed", "halted", "cancelled", "parked"]

ENDINGS: Mapping[str, Ending] = {
    "run.completed": "completed",
    "run.failed": "failed",
    "run.halted": "halted",
    "run.cancelled": "cancelled",
    "run.parked": "parked",
}
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

    @property
    def is_limit(self) -> bool:
        """Whether a ceiling that somebody set ended it."""
        return self.status == "halted" and self.reason in LIMIT_REASONS


Piece = Said | Used | Ended


@dataclass(slots=True)
class Answer:
    """The fold: give it each event once, in order."""

    speakers: frozenset[str]
    ended: Ended | None = None
    _said: list[str] = field(default_factory=list)
    _statement: list[str] = field(default_factory=list)
    """What was told since the last use of a tool; put together once, at the end."""
    _node: str | None = None
    _source: str = ""

    @property
    def said(self) -> str:
        """Everything that was told as text, statements apart by an empty line."""
        return "".join(self._said)

    def add(self, event: HostedEvent) -> Iterator[Said | Used]:
        """What the event adds to the answer; `ended` is set while nothing has happened after an end."""
        self.ended = None
        if event.type == "text.delta":
            if self._has_the_word(event.data):
                yield from self._say(str(event.data.get("text", "")))
        elif event.type == "tool.call":
            if self._has_the_word(event.data):
                self._statement.clear()
                yield _used(event.data.get("call"))
        elif event.type in ENDINGS:
            self.ended = _ended(ENDINGS[event.type], event.data)
            yield from self._say(self._untold(self.ended))

    def _has_the_word(self, data: Mapping[str, Any]) -> bool:
        node, source = data.get("node_id"), str(data.get("source", ""))
        if self._node is None and node in self.speakers:
            self._node, self._source = str(node), source
        return node == self._node and source == self._source

    def _say(self, text: str) -> Iterator[Said]:
        if text:
            piece = Said(text, not self._statement)
            if piece.begins and self._said:
                self._said.append("\n\n")
            self._said.append(text)
            self._statement.append(text)
            yield piece

    def _untold(self, ended: Ended) -> str:
        """What the run came to and nobody has been told."""
        told = "".join(self._statement)
        if ended.text.startswith(told):
            return ended.text[len(told) :]
        if told.endswith(ended.text):  # also of a run that came to nothing
            return ""
        self._statement.clear()  # what was told is something else, as of an attempt that was given up
        return ended.text


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


def _ended(status: Ending, data: Mapping[str, Any]) -> Ended:
    cost = data.get("cost_usd")
    return Ended(
        status,
        answer_text(data.get("output")) if status == "completed" else "",
        data.get("stop_reason") or data.get("cause") or data.get("error"),
        str(data.get("message") or data.get("reason") or ""),
        None if cost is None else float(cost),
        int(data.get("tokens_in") or 0),
        int(data.get("tokens_out") or 0),
    )
