"""A run while it goes on: its calls, its meters, what stopped it.

All that is shown is a fold over the run's events. They are taken in on the observer's own thread and drawn on the
screen's, so the run waits for neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from stage.screen import COLOURS, MARKS, Line, is_terminal, show, styled
from stage.script import FAST, QUESTION, TOPICS, price_without_ceiling_usd

from penstock import CallEnded, CallStarted, ExecutionContext, LimitTrace, TraceEvent

FRAMES_PER_SECOND = 12
BAR = 40
ROOM = (8, 14, 16)
"""Columns for a researcher's first, second and third call."""


@contextmanager
def watched(run: ExecutionContext) -> Iterator[None]:
    """Show `run` until it ends: moving on a terminal, line by line anywhere else."""
    moving = is_terminal() and not FAST
    calls = Calls() if moving else Printed()
    show(*opening(run), [])
    observing = run.observe(calls.take)
    with moving_picture(run, calls) if moving else nullcontext():
        yield
        observing.drain(timeout_s=2)
    show([])


def moving_picture(run: ExecutionContext, calls: Calls) -> AbstractContextManager[object]:
    """Draws the newest frame, twelve times a second, on a thread of its own."""
    from rich.live import Live  # here, because it may not be installed

    return Live(get_renderable=lambda: styled(frame(run, calls)), refresh_per_second=FRAMES_PER_SECOND)


def opening(run: ExecutionContext) -> list[Line]:
    """What is about to happen."""
    work, ceiling = f"${price_without_ceiling_usd():.2f}", f"${run.balance.limits.cost_nanos / 1e9:.2f}"
    stakes = f"{work} of work, {len(TOPICS)} researchers at once, a ceiling of {ceiling}"
    return [[("Penstock  ", "bold"), (stakes, "")], [(f"“{QUESTION}”", "dim")]]


# The calls, as the events tell of them.


@dataclass
class Shown:
    """One call, or one researcher with the calls it made."""

    name: str
    kind: str
    model: str | None
    status: str = "running"
    cost_usd: float = 0.0
    refused: bool = False
    below: list[Shown] = field(default_factory=list)

    @property
    def total_usd(self) -> float:
        """Its cost and that of everything below it."""
        return self.cost_usd + sum(call.total_usd for call in self.below)

    @property
    def models(self) -> str:
        """The models it used."""
        return ", ".join(sorted({call.model for call in (self, *self.below) if call.model}))

    @property
    def said(self) -> str:
        """How it came out, in a word: what it cost, or that it did not run, or not to its end."""
        if self.status == "halt":
            return "refused" if self.refused else "cut off"
        return f"${self.cost_usd:.4f}" if self.cost_usd else ""


class Calls:
    """The call tree so far. The observer's thread only adds, so that the screen's thread may read at any time."""

    def __init__(self) -> None:
        self.root = Shown("", "system", None)
        self.first_stop: LimitTrace | None = None
        self.began_ms = 0
        self._by_id: dict[str | None, Shown] = {}

    def take(self, events: Sequence[TraceEvent]) -> None:
        """Take in what happened."""
        for event in events:
            self.began_ms = self.began_ms or event.at_ms
            if isinstance(event, CallStarted):
                self._begin(event)
            elif isinstance(event, CallEnded):
                self._end(event)
            elif isinstance(event, LimitTrace):
                self.first_stop = self.first_stop or event

    def _begin(self, event: CallStarted) -> None:
        call = Shown(event.name, event.call_kind, event.model)
        above = self._by_id.get(event.parent_id)
        self._by_id[event.node_id] = call
        if above is None:
            self.root = call
        else:
            above.below.append(call)

    def _end(self, event: CallEnded) -> None:
        call = self._by_id[event.node_id]
        call.refused = event.status == "halt" and event.error is None
        call.cost_usd, call.model, call.status = event.cost, event.model, event.status


class Printed(Calls):
    """The same for pipes and logs: a line for each call that ends."""

    def _end(self, event: CallEnded) -> None:
        super()._end(event)
        if event.call_kind != "system":
            call, who = self._by_id[event.node_id], event.source.rpartition("/")[2]
            show([*clock(event, self.began_ms), mark(event.status), (f"{who:<16}{call.name:<10}{call.said}", "")])


# One picture of them.


def frame(run: ExecutionContext, calls: Calls) -> list[Line]:
    """Everything that is on the screen now."""
    return [*meters(run), [], *(row(call) for call in calls.root.below), [], status(calls)]


def meters(run: ExecutionContext) -> list[Line]:
    """What is used of what is allowed."""
    now, limits, elapsed_s = run.balance, run.balance.limits, run.usage.time_elapsed_seconds
    spent, held, ceiling = now.spent_nanos / 1e9, (now.held_nanos + now.unresolved_nanos) / 1e9, limits.cost_nanos / 1e9
    steps, under_way, time_s = now.steps, now.steps_open, limits.time_ns / 1e9
    return [
        meter("cost", spent, held, ceiling, f"${spent:.4f}", f"of ${ceiling:.2f}", f"+ ${held:.4f} held"),
        meter("steps", steps, under_way, limits.steps, f"{steps}", f"of {limits.steps}", f"+ {under_way} under way"),
        meter("time", elapsed_s, 0, time_s, f"{elapsed_s:.1f} s", f"of {time_s:.0f} s"),
    ]


def meter(name: str, used: float, held: float, limit: float, figure: str, out_of: str, holding: str = "") -> Line:
    """A bar: what is used, what is held by calls under way, what is left."""
    solid = round(min(used / limit, 1) * BAR)
    dashed = round(min((used + held) / limit, 1) * BAR) - solid
    return [
        (f"{name:<7}", "dim"),
        ("━" * solid, "green"),
        ("╍" * dashed, "cyan"),
        ("─" * (BAR - solid - dashed), "bright_black"),
        (f" {figure:>8} ", ""),
        (f"{out_of:<9}", "dim"),
        (holding if held else "", "cyan"),
    ]


def row(call: Shown) -> Line:
    """A call, or a researcher with its calls beside it."""
    cost = f"${call.total_usd:.4f}" if call.total_usd else ""
    name = (f"{call.name:<15}", "dim" if call.status == "halt" else "")
    line = [mark(call.status), name, (f"{cost:>8}  ", ""), (f"{call.models:<8}", "dim")]
    if call.kind != "system":
        return [*line, (call.said if call.status == "halt" else "", "dim")]
    return line + [piece for below, room in zip(call.below, ROOM, strict=False) for piece in chip(below, room)]


def chip(call: Shown, room: int) -> Line:
    """One call of a researcher, in a few characters."""
    return [mark(call.status), (f"{call.name} {call.said}".ljust(room), "dim")]


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
        key = {"success": "done", "running": "under way", "halt": "stopped"}
        return [piece for status, name in key.items() for piece in (mark(status), (f"{name}   ", "dim"))]
    return [("■ first stop", "yellow"), *clock(stop, calls.began_ms), (sum_of(stop), "yellow")]


def sum_of(stop: LimitTrace) -> str:
    """Why it was refused, as a sum where it is one."""
    if stop.unit != "usd" or stop.limit is None:
        return stop.message
    parts = {"spent": stop.used, "held": stop.held, "asked": stop.asked}
    return " + ".join(f"${amount or 0:.4f} {name}" for name, amount in parts.items()) + f" > ${stop.limit:.2f}"
