"""The call tree of a run: folded from its events, kept small enough to draw, and drawn as one frame.

The fold only adds and replaces, so the screen's thread may read while another thread adds events. Older finished calls
are counted instead of kept: a frame has room for few. A frame has meters, the tree, and at the end the first stop or
the meaning of the marks. A call that made calls has its own line, which also lists its children without calls, so a
run of many agents fits on a screen. When room is short, running calls are kept before finished ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.cli.render.events import RunEvent, lead
from penstock.cli.render.screen import Line, printable
from penstock.cli.render.text import counted, tokens
from penstock.containment.limits import UNLIMITED
from penstock.money import format_cost, format_usd, to_nanos

if TYPE_CHECKING:
    from penstock.containment.accounts import Balance

MARKS = {"created": "·", "running": "●", "success": "✓", "fail": "✗", "halt": "■"}
COLOURS = {"created": "dim", "running": "cyan", "success": "green", "fail": "red", "halt": "yellow"}
KINDS = {"system": "step"}
"""Kinds of calls that have another name for people."""

MAX_BELOW = 100
"""Maximum number of child calls kept; more than a screen has rows."""
MAX_DEPTH = 50
"""Maximum depth kept; agent trees may be deeper than Python's own stack."""
LONGEST_BAR = 40
SHORTEST_BAR = 8
FIGURES_ROOM = 45
"""Columns reserved beside a bar."""
LONGEST_NAME = 28


@dataclass(eq=False)
class ShownCall:
    """One call with the calls it made."""

    name: str
    kind: str
    path: str = ""
    """Names of the enclosing calls without the root, and its own name."""
    model: str | None = None
    attempt: str = ""
    """Attempt of the step, if not the first, or the fallback or skip that replaced its result."""
    status: str = "running"
    cost_usd: float | None = 0.0
    """None if it was billed at an unknown cost."""
    why: str = ""
    """Why it failed or was stopped, in a few words."""
    refused: bool | None = None
    """Whether a halted call was stopped before it ran; None if that is not known."""
    below: list[ShownCall] = field(default_factory=list)
    left_out: int = 0
    """Number of child calls that are counted and not kept."""
    left_out_usd: float = 0.0
    left_out_unknown: int = 0
    """Number of those whose cost is unknown."""
    depth: int = 0
    counted_in: ShownCall | None = None
    """The call that counts this one, if this one is too deep to be kept."""

    @property
    def total_usd(self) -> float:
        """Its cost and that of everything below it, as far as it is known."""
        return (self.cost_usd or 0) + self.left_out_usd + sum(call.total_usd for call in self.below)

    @property
    def unknown_costs(self) -> int:
        """Number of calls of unknown cost, itself and everything below it."""
        return (self.cost_usd is None) + self.left_out_unknown + sum(call.unknown_costs for call in self.below)

    @property
    def short_cost(self) -> str:
        """The cost of it and everything below it in a few characters; empty if there is none."""
        known = f"${self.total_usd:.4f}" if self.total_usd else ""
        if not self.unknown_costs:
            return known
        return f"≥ {known}" if known else "unknown"

    @property
    def models(self) -> str:
        """The models that it and the calls right below it used."""
        return ", ".join(sorted({call.model for call in (self, *self.below) if call.model}))

    @property
    def made_calls(self) -> bool:
        """Whether there are calls below it."""
        return bool(self.below or self.left_out)

    @property
    def halt(self) -> str:
        """How a halted call ended, in a word; empty for other calls."""
        if self.status != "halt":
            return ""
        if self.made_calls or self.refused is None:
            return "stopped"
        return "refused" if self.refused else "cut off"

    @property
    def result(self) -> str:
        """The result in a word: the cost, or that the call did not run or did not finish."""
        return self.halt or self.short_cost


class Calls:
    """The call tree so far, the steps that have not started, and the first stop."""

    def __init__(self, planned: Sequence[str] = ()) -> None:
        self.root = ShownCall("", "system")
        self.first_stop: RunEvent | None = None
        self.planned = dict.fromkeys(planned)
        """Names of calls below the root that have not started yet."""
        self._open: dict[str, ShownCall] = {}

    def add(self, event: RunEvent) -> ShownCall | None:
        """Apply an event; returns the call that it ended."""
        if event.type == "call.started":
            self._begin(event.data)
        elif event.type == "call.ended":
            return self._end(event.data)
        elif event.type == "limit":
            self.first_stop = self.first_stop or event
        return None

    def _begin(self, data: Mapping[str, Any]) -> None:
        call = ShownCall(data["name"], data["kind"], model=data.get("model"), attempt=_attempt(data))
        self._open[data["call_id"]] = call
        if data["parent_id"] is None:
            self.root = call
            return
        # A server reports only calls of models and tools, so the parent may be unknown.
        parent = self._open.get(data["parent_id"], self.root)
        if parent.depth >= MAX_DEPTH:
            call.depth, call.counted_in = parent.depth, parent.counted_in or parent
            call.path = f"{call.counted_in.path}/…/{call.name}"
            return
        call.depth = parent.depth + 1
        call.path = f"{parent.path}/{call.name}" if parent.path else call.name
        if parent is self.root:
            self.planned.pop(call.name, None)
        parent.below = [*_with_room(parent), call]

    def _end(self, data: Mapping[str, Any]) -> ShownCall | None:
        call = self._open.pop(data["call_id"], None)
        if call is None:  # its start was dropped from the log, or is before the first event that was requested
            return None
        if "error" in data:
            call.refused = data["status"] == "halt" and data["error"] is None and not data["abandoned"]
        call.cost_usd, call.status = _cost(data), data["status"]
        call.model = data.get("model")
        call.why = _why(data)
        if call.counted_in is not None:
            call.counted_in.left_out += 1
            call.counted_in.left_out_usd += call.cost_usd or 0
            call.counted_in.left_out_unknown += call.cost_usd is None
        for below in call.below if call is not self.root else ():
            _fold(below)
        return call


def _with_room(parent: ShownCall) -> list[ShownCall]:
    """Return the child calls, without the oldest finished one if there are too many."""
    if len(parent.below) < MAX_BELOW:
        return parent.below
    oldest = next((call for call in parent.below if call.status not in ("created", "running")), None)
    if oldest is None:
        return parent.below
    parent.left_out += 1
    parent.left_out_usd += oldest.total_usd
    parent.left_out_unknown += oldest.unknown_costs
    return [call for call in parent.below if call is not oldest]


def _fold(call: ShownCall) -> None:
    """Count the children of a call instead of keeping them: they are two levels below a call that has ended."""
    if call.below:
        below = call.below
        call.left_out_usd += sum(child.total_usd for child in below)
        call.left_out_unknown += sum(child.unknown_costs for child in below)
        call.left_out += len(below)
        call.below = []


def _cost(data: Mapping[str, Any]) -> float | None:
    cost = data["cost_usd"]
    return None if cost is None else float(cost)


def _why(data: Mapping[str, Any]) -> str:
    error = data.get("error") if data["status"] == "fail" else None
    return ": ".join(part for part in (error, data.get("stop_reason")) if part) if data["status"] != "success" else ""


def describe_call(data: Mapping[str, Any], call: ShownCall | None) -> str:
    """Describe a call that has ended: kind, path, how it was stopped, cost, tokens, attempt, model and reason."""
    kind = KINDS.get(data["kind"], data["kind"])
    if call is None:  # its start is not known
        call = ShownCall(data["name"], data["kind"], model=data.get("model"), status=data["status"], why=_why(data))
        call.cost_usd = _cost(data)
    used, nanos, unknown = tokens(data), to_nanos(call.total_usd), call.unknown_costs
    if call.cost_usd is None and unknown == 1 and not nanos:
        money = "cost unknown"
    else:
        money = format_cost(nanos, unknown) if nanos or unknown or used else ""
    parts = (
        f"{MARKS[data['status']]} {kind} {call.path or call.name}",
        call.halt,
        money,
        counted(used, "token") if used else "",
        call.attempt,
        call.model if call.model != call.name else "",
        # The child calls show the full reason; their parent only needs its first word.
        call.why.partition(":")[0] if call.made_calls else call.why,
        "from the journal" if data.get("replayed") else "",
    )
    return " · ".join(part for part in parts if part)


def _attempt(data: Mapping[str, Any]) -> str:
    """Return the number of an attempt as text, which a local run has already; empty for the first."""
    attempt = data.get("attempt", "")
    return f"attempt {attempt}" if isinstance(attempt, int) else str(attempt)


# Drawing.


def frame(calls: Calls, balance: Balance, elapsed_s: float, width: int, height: int) -> list[Line]:
    """Return all lines of the current frame."""
    head = meters(balance, elapsed_s, width)
    rows = [*tree(calls.root, width), *_planned(list(calls.planned), height)]
    return [*head, [], *fitting(rows, height - len(head) - 4), [], status(calls)]


def meters(balance: Balance, elapsed_s: float, width: int) -> list[Line]:
    """Return a bar for each limited dimension, and one line of figures for the unlimited ones in use."""
    limits = balance.limits
    spent, held = balance.spent_nanos / 1e9, (balance.held_nanos + balance.unresolved_nanos) / 1e9
    tokens = balance.tokens_in + balance.tokens_out
    every = [
        Meter("cost", spent, held, limits.cost_nanos / 1e9, f"${spent:.4f}", format_usd(limits.cost_nanos),
              f"${held:.4f} held"),
        Meter("steps", balance.steps, balance.steps_open, limits.steps, f"{balance.steps}", f"{limits.steps}",
              f"{balance.steps_open} under way"),
        Meter("tokens", tokens, balance.tokens_held, limits.tokens, f"{tokens:,}", f"{limits.tokens:,}",
              f"{balance.tokens_held:,} held"),
        Meter("retries", balance.retries, 0, limits.retries, f"{balance.retries}", f"{limits.retries}"),
        Meter("time", elapsed_s, 0, limits.time_ns / 1e9, f"{elapsed_s:.1f} s", f"{limits.time_ns / 1e9:g} s"),
    ]  # fmt: skip
    bar = max(SHORTEST_BAR, min(LONGEST_BAR, width - FIGURES_ROOM))
    limited = [meter for meter in every if not meter.is_free]
    free = [meter for meter in every if meter.is_free and (meter.used or meter.held)]
    return [meter.line(bar) for meter in limited] + ([_figures(free)] if free else [])


@dataclass(frozen=True, slots=True)
class Meter:
    """One dimension: used, held by calls under way, limit, and the text for each."""

    name: str
    used: float
    held: float
    limit: float
    figure: str
    out_of: str
    holding: str = ""

    @property
    def is_free(self) -> bool:
        """Whether it is unlimited; every limit that can be set is far below this value."""
        return self.limit >= UNLIMITED / 1e9

    def line(self, bar: int) -> Line:
        """Render a bar: used, held, left."""
        solid = _part(self.used, self.limit, bar)
        dashed = _part(self.used + self.held, self.limit, bar) - solid
        return [
            (f"{self.name:<8}", "dim"),
            ("━" * solid, "green"),
            ("╍" * dashed, "cyan"),
            ("─" * (bar - solid - dashed), "bright_black"),
            (f" {self.figure:>8} ", ""),
            (f"of {self.out_of} ", "dim"),
            (f"+ {self.holding}" if self.held else "", "cyan"),
        ]


def _part(used: float, limit: float, bar: int) -> int:
    """Return the number of filled columns; the whole bar if the limit is zero or reached."""
    return bar if used >= limit else round(used / limit * bar)


def _figures(free: Sequence[Meter]) -> Line:
    line: Line = []
    for meter in free:
        line += [
            (f"{meter.name} ", "dim"),
            (meter.figure, ""),
            (f" + {meter.holding}" if meter.held else "", "cyan"),
            ("   ", ""),
        ]
    return line


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the tree, and the status that determines its importance."""

    line: Line
    status: str
    stands_for: int = 1
    """Number of calls it represents."""


def _planned(planned: Sequence[str], height: int) -> Iterator[Row]:
    """Yield rows for planned steps that have not started, at most as many as fit, and a count of the rest."""
    for name in planned[:height]:
        yield Row([mark("created"), (printable(name), "dim")], "created")
    if more := len(planned[height:]):
        yield Row([(f"  … {more} more to come", "dim")], "created", more)


def tree(root: ShownCall, width: int, depth: int = 0) -> Iterator[Row]:
    """Yield a row for each call below `root`; below the first level, only for calls that made calls."""
    calls = [call for call in root.below if depth == 0 or call.below]
    room = max((len(call.name) for call in calls), default=0)
    name_room = min(max(room, 8), LONGEST_NAME)
    if root.left_out and depth == 0:
        yield Row([(f"  … {root.left_out} more done", "dim")], "success", root.left_out)
    for call in calls:
        yield Row(_row(call, width, depth, name_room), call.status)
        yield from tree(call, width, depth + 1)


def _row(call: ShownCall, width: int, depth: int, name_room: int) -> Line:
    name = printable(call.name)
    name = name if len(name) <= name_room else f"{name[: name_room - 1]}…"
    line: Line = [
        ("  " * depth, ""),
        mark(call.status),
        (f"{name:<{name_room}} ", "dim" if call.status == "halt" else ""),
        (f"{call.short_cost:>8}  ", ""),
        (f"{printable(call.attempt)}  " if call.attempt else "", "yellow"),
        (f"{printable(call.models)}  " if call.models else "", "dim"),
    ]
    leaves = [below for below in call.below if not below.below]
    if leaves or call.left_out:
        return line + _chips(leaves, call.left_out, width - sum(len(text) for text, _ in line))
    return [*line, (_ending(call), COLOURS[call.status] if call.status == "fail" else "dim")]


def _ending(call: ShownCall) -> str:
    """Return why a call failed or was stopped."""
    if call.status == "fail":
        return printable(call.why)
    return printable(call.why.partition(":")[0] or call.result) if call.status == "halt" else ""


def _chips(calls: Sequence[ShownCall], left_out: int, room: int) -> Line:
    """Render calls in a few characters each: the newest that fit, and the number of others."""
    chips: list[Line] = []
    room -= len(f"+{left_out + len(calls)}  ")
    for call in reversed(calls):
        text = printable(f"{call.name} {call.result}".rstrip()) + "  "
        room -= len(text) + 2
        if room < 0:
            break
        chips.append([mark(call.status), (text, "dim")])
    others = left_out + len(calls) - len(chips)
    more: Line = [(f"+{others}  ", "dim")] if others else []
    return more + [piece for chip in reversed(chips) for piece in chip]


def fitting(rows: Sequence[Row], room: int) -> list[Line]:
    """Return the rows that fit, in order; priority: running, failed, halted, done, planned; newest first in each."""
    if len(rows) <= max(room, 1):
        return [row.line for row in rows]
    importance = {"running": 0, "fail": 1, "halt": 2, "success": 3, "created": 4}
    ranked = sorted(range(len(rows)), key=lambda at: (importance.get(rows[at].status, 3), -at))
    kept = sorted(ranked[: max(room, 2) - 1])
    others = sum(row.stands_for for row in rows) - sum(rows[at].stands_for for at in kept)
    return [*(rows[at].line for at in kept), [(f"  … and {others:,} more", "dim")]]


def mark(status: str) -> tuple[str, str]:
    """Return the mark of a status with its colour."""
    return f"{MARKS[status]} ", COLOURS[status]


def status(calls: Calls) -> Line:
    """Render the first stop, or the meaning of the marks while there is none."""
    stop = calls.first_stop
    if stop is None:
        key = {"success": "done", "running": "under way", "halt": "stopped", "fail": "failed"}
        return [piece for status, name in key.items() for piece in (mark(status), (f"{name}   ", "dim"))]
    return [("■ first stop", "yellow"), (lead(stop), "dim"), (printable(explain_stop(stop.data)), "yellow")]


def explain_stop(stop: Mapping[str, Any]) -> str:
    """Return why the call was refused; for a cost limit, as a sum."""
    if stop.get("unit") != "usd" or stop.get("limit") is None:
        return str(stop["message"])
    parts = {"spent": stop.get("used"), "held": stop.get("held"), "requested": stop.get("asked")}
    total = " + ".join(f"${amount or 0:.4f} {name}" for name, amount in parts.items())
    return f"{total} > {format_usd(to_nanos(stop['limit']))}"
