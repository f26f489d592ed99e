"""A run's call tree as it grows, kept small enough to draw.

A fold over the run's events, taken in on the observer's own thread. It only adds and replaces, so that a screen's
thread may read at any time. Older finished calls are counted instead of kept: a picture has room for few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.tracing.events import CallEnded, CallStarted, LimitTrace, TraceEvent
from penstock.tracing.explain import attempt_of

MAX_BELOW = 100
"""Calls kept below one; more than a screen has rows."""
MAX_DEPTH = 50
"""Levels kept; trees of agents may be deeper than Python's own stack."""


@dataclass(eq=False)
class Shown:
    """One call with the calls it made."""

    name: str
    kind: str
    path: str = ""
    """Its name after those of the calls it was made in, the root's left out."""
    model: str | None = None
    attempt: str = ""
    """Which attempt of a step it is, if not the first, or what it stands in for."""
    status: str = "running"
    cost_usd: float = 0.0
    why: str = ""
    """Why it failed or was stopped, in a few words."""
    refused: bool = False
    """It was stopped before it ran."""
    below: list[Shown] = field(default_factory=list)
    left_out: int = 0
    """Calls below that are counted and not kept."""
    left_out_usd: float = 0.0
    depth: int = 0
    counted_in: Shown | None = None
    """The call that counts this one, if it is too deep to be kept."""

    @property
    def total_usd(self) -> float:
        """Its cost and that of everything below it."""
        return self.cost_usd + self.left_out_usd + sum(call.total_usd for call in self.below)

    @property
    def models(self) -> str:
        """The models that it and the calls right below it used."""
        return ", ".join(sorted({call.model for call in (self, *self.below) if call.model}))

    @property
    def made_calls(self) -> bool:
        """Whether there are calls below it."""
        return bool(self.below or self.left_out)

    @property
    def said(self) -> str:
        """How it came out, in a word: what it cost, or that it did not run, or not to its end."""
        if self.status == "halt":
            return "stopped" if self.made_calls else "refused" if self.refused else "cut off"
        return f"${self.total_usd:.4f}" if self.total_usd else ""


class Calls:
    """The call tree so far, the steps that are still to come, and the first stop."""

    def __init__(self, planned: Sequence[str] = ()) -> None:
        self.root = Shown("", "system")
        self.first_stop: LimitTrace | None = None
        self.began_ms = 0
        self.planned = dict.fromkeys(planned)
        """The names of calls below the root that have not begun yet."""
        self._open: dict[str | None, Shown] = {}

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
        above = self._open.get(event.parent_id)
        call = Shown(event.name, event.call_kind, model=event.model, attempt=attempt_of(event.metadata))
        self._open[event.node_id] = call
        if above is None:
            self.root = call
            return
        if above.depth >= MAX_DEPTH:
            call.depth, call.counted_in = above.depth, above.counted_in or above
            call.path = f"{call.counted_in.path}/…/{event.name}"
            return
        call.depth = above.depth + 1
        call.path = f"{above.path}/{event.name}" if above.path else event.name
        if above is self.root:
            self.planned.pop(event.name, None)
        above.below = [*_with_room(above), call]

    def _end(self, event: CallEnded) -> None:
        call = self._open.pop(event.node_id, None)
        if call is None:  # its beginning was dropped from the log before it was read
            return
        call.refused = event.status == "halt" and event.error is None and not event.abandoned
        call.cost_usd, call.model, call.status = event.cost, event.model, event.status
        call.why = _why(event)
        if call.counted_in is not None:
            call.counted_in.left_out += 1
            call.counted_in.left_out_usd += call.cost_usd
        for below in call.below if call is not self.root else ():
            _fold(below)
        self.ended(call, event)

    def ended(self, call: Shown, event: CallEnded) -> None:
        """A call has ended; for those who tell of each."""


def _with_room(above: Shown) -> list[Shown]:
    """The calls below, without the oldest finished ones if there are too many."""
    if len(above.below) < MAX_BELOW:
        return above.below
    gone = next((call for call in above.below if call.status not in ("created", "running")), None)
    if gone is None:
        return above.below
    above.left_out += 1
    above.left_out_usd += gone.total_usd
    return [call for call in above.below if call is not gone]


def _fold(call: Shown) -> None:
    """Count what is below a call instead of keeping it: it is two levels below one that has ended."""
    if call.below:
        below = call.below
        call.left_out_usd += sum(one.total_usd for one in below)
        call.left_out += len(below)
        call.below = []


def _why(event: CallEnded) -> str:
    if event.status == "fail":
        return f"{event.error}: {event.stop_reason}" if event.stop_reason else str(event.error)
    return (event.stop_reason or "") if event.status == "halt" else ""
