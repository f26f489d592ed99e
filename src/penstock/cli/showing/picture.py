"""One picture of a run: meters above, the call tree below, what stopped it or what the marks mean at the end.

Pure: lines from figures. A call that made calls has a line of its own, with those that made none beside it; so a run
of many agents fits on a screen. Where there is too little room, what runs is kept before what is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.cli.showing.calls import Calls, Shown
from penstock.cli.showing.screen import Line, printable
from penstock.containment.accounts import Balance
from penstock.containment.limits import UNLIMITED
from penstock.money import format_usd, to_nanos
from penstock.tracing.events import LimitTrace, TraceEvent

MARKS = {"created": "·", "running": "●", "success": "✓", "fail": "✗", "halt": "■"}
COLOURS = {"created": "dim", "running": "cyan", "success": "green", "fail": "red", "halt": "yellow"}

LONGEST_BAR = 40
SHORTEST_BAR = 8
FIGURES_ROOM = 45
"""Columns that stand beside a bar."""
LONGEST_NAME = 28


def frame(calls: Calls, balance: Balance, elapsed_s: float, width: int, height: int) -> list[Line]:
    """Everything that is on the screen now."""
    above = meters(balance, elapsed_s, width)
    rows = [*tree(calls.root, width), *_to_come(list(calls.planned), height)]
    return [*above, [], *fitting(rows, height - len(above) - 4), [], status(calls)]


def meters(balance: Balance, elapsed_s: float, width: int) -> list[Line]:
    """What is used of what is allowed: a bar for each limit; what has none is a figure."""
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
    limited = [one for one in every if not one.is_free]
    free = [one for one in every if one.is_free and (one.used or one.held)]
    return [one.line(bar) for one in limited] + ([_figures(free)] if free else [])


@dataclass(frozen=True, slots=True)
class Meter:
    """One dimension: what is used, what calls under way hold, what is allowed, and the words for each."""

    name: str
    used: float
    held: float
    limit: float
    figure: str
    out_of: str
    holding: str = ""

    @property
    def is_free(self) -> bool:
        """Whether nothing limits it; every limit that can be set is far below this."""
        return self.limit >= UNLIMITED / 1e9

    def line(self, bar: int) -> Line:
        """A bar: what is used, what is held, what is left."""
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
    """How much of the bar that is; all of it where nothing is allowed."""
    return bar if used >= limit else round(used / limit * bar)


def _figures(free: Sequence[Meter]) -> Line:
    line: Line = []
    for one in free:
        line += [
            (f"{one.name} ", "dim"),
            (one.figure, ""),
            (f" + {one.holding}" if one.held else "", "cyan"),
            ("   ", ""),
        ]
    return line


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the tree, and the status that says how much it matters."""

    line: Line
    status: str
    stands_for: int = 1
    """How many calls it shows."""


def _to_come(planned: Sequence[str], height: int) -> Iterator[Row]:
    """What has not begun yet, as far as it could be seen."""
    for name in planned[:height]:
        yield Row([mark("created"), (printable(name), "dim")], "created")
    if more := len(planned[height:]):
        yield Row([(f"  … {more} more to come", "dim")], "created", more)


def tree(root: Shown, width: int, depth: int = 0) -> Iterator[Row]:
    """The calls below `root`, a line for each; below the first level, for each that made calls itself."""
    calls = [call for call in root.below if depth == 0 or call.below]
    room = max((len(call.name) for call in calls), default=0)
    name_room = min(max(room, 8), LONGEST_NAME)
    if root.left_out and depth == 0:
        yield Row([(f"  … {root.left_out} more done", "dim")], "success", root.left_out)
    for call in calls:
        yield Row(_row(call, width, depth, name_room), call.status)
        yield from tree(call, width, depth + 1)


def _row(call: Shown, width: int, depth: int, name_room: int) -> Line:
    name = printable(call.name)
    name = name if len(name) <= name_room else f"{name[: name_room - 1]}…"
    cost = f"${call.total_usd:.4f}" if call.total_usd else ""
    line: Line = [
        ("  " * depth, ""),
        mark(call.status),
        (f"{name:<{name_room}} ", "dim" if call.status == "halt" else ""),
        (f"{cost:>8}  ", ""),
        (f"{printable(call.attempt)}  " if call.attempt else "", "yellow"),
        (f"{printable(call.models)}  " if call.models else "", "dim"),
    ]
    leaves = [below for below in call.below if not below.below]
    if leaves or call.left_out:
        return line + _chips(leaves, call.left_out, width - sum(len(text) for text, _ in line))
    return [*line, (_ending(call), COLOURS[call.status] if call.status == "fail" else "dim")]


def _ending(call: Shown) -> str:
    """Why a call came to a bad end."""
    if call.status == "fail":
        return printable(call.why)
    return printable(call.why.partition(":")[0] or call.said) if call.status == "halt" else ""


def _chips(calls: Sequence[Shown], left_out: int, room: int) -> Line:
    """Calls in a few characters each: the newest that fit, and how many others there are."""
    chips: list[Line] = []
    room -= len(f"+{left_out + len(calls)}  ")
    for call in reversed(calls):
        text = printable(f"{call.name} {call.said}".rstrip()) + "  "
        room -= len(text) + 2
        if room < 0:
            break
        chips.append([mark(call.status), (text, "dim")])
    others = left_out + len(calls) - len(chips)
    more: Line = [(f"+{others}  ", "dim")] if others else []
    return more + [piece for chip in reversed(chips) for piece in chip]


def fitting(rows: Sequence[Row], room: int) -> list[Line]:
    """As many rows as there is room for, in their order: first what runs, then what ended badly, then the newest."""
    if len(rows) <= max(room, 1):
        return [row.line for row in rows]
    importance = {"running": 0, "fail": 1, "halt": 2, "success": 3, "created": 4}
    ranked = sorted(range(len(rows)), key=lambda at: (importance.get(rows[at].status, 3), -at))
    kept = sorted(ranked[: max(room, 2) - 1])
    others = sum(row.stands_for for row in rows) - sum(rows[at].stands_for for at in kept)
    return [*(rows[at].line for at in kept), [(f"  … and {others:,} more", "dim")]]


def mark(status: str) -> tuple[str, str]:
    """The mark of a status, in its colour."""
    return f"{MARKS[status]} ", COLOURS[status]


def clock(event: TraceEvent, began_ms: int) -> Line:
    """When it happened, from the start of the run."""
    return [(f"{(event.at_ms - began_ms) / 1_000:6.2f} s  ", "dim")]


def status(calls: Calls) -> Line:
    """The first stop, once there is one; until then, what the marks mean."""
    stop = calls.first_stop
    if stop is None:
        key = {"success": "done", "running": "under way", "halt": "stopped", "fail": "failed"}
        return [piece for status, name in key.items() for piece in (mark(status), (f"{name}   ", "dim"))]
    return [("■ first stop", "yellow"), *clock(stop, calls.began_ms), (printable(sum_of(stop)), "yellow")]


def sum_of(stop: LimitTrace) -> str:
    """Why it was refused, as a sum where it is one."""
    if stop.unit != "usd" or stop.limit is None:
        return stop.message
    parts = {"spent": stop.used, "held": stop.held, "asked": stop.asked}
    return (
        " + ".join(f"${amount or 0:.4f} {name}" for name, amount in parts.items())
        + f" > {format_usd(to_nanos(stop.limit))}"
    )
