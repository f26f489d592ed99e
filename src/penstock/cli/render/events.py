"""The events of a run, and one line of text for each.

Every run is rendered from this one stream, whether it runs in this process (`render.local` converts its trace) or on a
server. Event types and their data are those of the server's event log. Pure: prints nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from penstock.cli.exits import Exit
from penstock.cli.render.screen import Line, printable
from penstock.cli.render.text import bill, short

EXITS = {"completed": Exit.OK, "failed": Exit.FAILED, "halted": Exit.HALTED, "cancelled": Exit.CANCELLED}
"""Exit code of a command that has followed a run to its end, by status."""
FINAL = frozenset(f"run.{status}" for status in EXITS)
"""Types of the last event of a run."""
STATUS_COLOURS = {
    "queued": "cyan",
    "running": "cyan",
    "waiting": "yellow",
    "parked": "yellow",
    "completed": "green",
    "failed": "red",
    "halted": "red",
    "cancelled": "yellow",
}
STATUS_MARKS = {"completed": "✓", "failed": "✗", "halted": "■", "cancelled": "■"}
MAX_QUESTION = 1_000
"""Maximum characters of a question, and of its value, on one line; large, because the answer depends on them."""


class RunEvent(NamedTuple):
    """One event of a run."""

    seq: int
    """Number of the event in its run: 1, 2, 3, …"""
    type: str
    data: Mapping[str, Any]
    at_s: float | None = None
    """Seconds since the start of the run; None if it runs on a server."""

    @property
    def status(self) -> str:
        """The status of the run after a `run.*` event."""
        return self.type.removeprefix("run.")


def event_line(event: RunEvent, content: str | None = None) -> Line:
    """Render an event: number or time, type and content; `content` replaces the description from the data alone."""
    content = describe(event.type, event.data) if content is None else content
    return [(lead(event), "dim"), (f"{event.type:<18} ", _colour(event.type)), (printable(content), "")]


def lead(event: RunEvent) -> str:
    """Return the first column: the time of a local event, the number of a server's event."""
    return f"{event.seq:>6}  " if event.at_s is None else f"{event.at_s:6.2f} s  "


def describe(kind: str, data: Mapping[str, Any]) -> str:
    """Describe what happened in a few words: node, message or output, and the cost at the end of a run."""
    if kind == "approval.requested":
        return _question(data["approval"])
    if kind == "text.delta":
        return f"{data.get('node_id', '')} {short(data.get('text', ''))}"
    is_replayed = data.get("replayed") is True  # for a resumed run it is the number of replayed calls
    hidden = ("node_id", "node_type", *(["replayed"] if is_replayed else []))
    rest = {name: value for name, value in data.items() if name not in hidden}
    if "message" in rest or "reason" in rest:
        text = reason(rest)
    elif "output" in rest or "outputs" in rest:
        text = short(rest.get("output", rest.get("outputs")))
    else:
        text = short(rest) if rest else ""
    price = f"· {bill(data)}" if kind.startswith("run.") and "cost_usd" in data else ""
    again = "· from the journal" if is_replayed else ""
    return " ".join(part for part in (str(data.get("node_id", "")), text, price, again) if part)


def reason(data: Mapping[str, Any]) -> str:
    """Return why something failed or was stopped: the stop reason or the error class, and the message."""
    fault = data.get("stop_reason") or data.get("error")
    return ": ".join(str(part) for part in (fault, data.get("message") or data.get("reason")) if part)


def ending(event: RunEvent) -> Iterator[Line]:
    """Yield how a run ended: errors of nodes that did not end it, skipped nodes, its status, and why."""
    colour = STATUS_COLOURS[event.status]
    for node, error in event.data.get("errors", {}).items():
        yield [(f"✗ {printable(node)}: {printable(error)}", "red")]
    if skipped := event.data.get("skipped"):
        yield [(f"  skipped: {printable(', '.join(skipped))}", "dim")]
    if stop := event.data.get("handled_stop"):
        yield [(f"■ on the way: {printable(stop)}", "yellow")]
    status: Line = [(f"{STATUS_MARKS[event.status]} {event.status}", colour)]
    why = reason(event.data)
    yield [*status, (f": {printable(why)}", "")] if why else status


def _question(question: Mapping[str, Any]) -> str:
    """Render a question and its value on one line."""
    value = [] if question.get("value") is None else [short(question["value"], MAX_QUESTION)]
    return " · ".join([short(question["question"], MAX_QUESTION), *value])


def _colour(kind: str) -> str:
    return STATUS_COLOURS.get(kind.removeprefix("run."), "red" if kind in ("node.error", "limit") else "")
