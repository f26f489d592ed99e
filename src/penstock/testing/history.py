"""Check whether a recorded history is possible.

Reads the record of a run, the provider's bill, the state of the ledger and the effects that really happened, and lists
every contradiction. It requires no event class: anything with `seq` and `kind` is an event, and events about calls have
a `node_id`. It knows nothing of the origin of the history.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

TERMINAL_STATUSES = frozenset({"success", "fail", "halt"})

MAY_STOP_RUNNING_WORK = frozenset(
    {"aborted", "timeout", "hook_denied", "diverged", "retry_budget_exceeded", "provider_error", "provider_rate_limit"}
)
"""Stop reasons of a halt that do not prove that the call never ran; every other one is decided before the call runs."""


class HistoryEvent(Protocol):
    """The attributes every event must have; call events also have `node_id` and `parent_id`, their ends `status`."""

    @property
    def seq(self) -> int: ...

    @property
    def kind(self) -> str: ...


class BilledTotal(Protocol):
    """The part of an invoice that is read here."""

    @property
    def total_nanos(self) -> int: ...


class LedgerTotals(Protocol):
    """The part of a drained ledger that is read here."""

    @property
    def spent_nanos(self) -> int: ...

    @property
    def held_nanos(self) -> int: ...

    @property
    def unresolved_nanos(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Violation:
    """One violation of the rules, and where it happened."""

    rule: str
    detail: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.detail}"


def check_history(
    events: Iterable[HistoryEvent],
    *,
    invoice: BilledTotal | None = None,
    ceiling_nanos: int | None = None,
    ledger: LedgerTotals | None = None,
    effects: Iterable[str] | None = None,
) -> list[Violation]:
    """Return every violation, in a fixed order; an empty result means that all sources are consistent.

    `effects` are the node ids whose function really ran, as recorded by the functions themselves.
    """
    history = _History(list(events))
    violations = [*_sequence(history), *_run_bounds(history), *_calls(history), *_tree(history), *_settlements(history)]
    violations += _money(invoice, ceiling_nanos, ledger)
    if effects is not None:
        violations += _effects(history, list(effects))
    return violations


class _History:
    """The events by node; positions in the list, not `seq`, define the order."""

    def __init__(self, events: Sequence[Any]) -> None:
        self.events = events
        self.starts: dict[str, list[int]] = {}
        self.ends: dict[str, list[int]] = {}
        self.parents: dict[str, str] = {}
        for at, event in enumerate(events):
            if event.kind == "call_started":
                self.starts.setdefault(event.node_id, []).append(at)
                if event.parent_id is not None:
                    self.parents.setdefault(event.node_id, event.parent_id)
            elif event.kind == "call_ended":
                self.ends.setdefault(event.node_id, []).append(at)

    def end(self, node: str) -> Any:
        ends = self.ends.get(node)
        return self.events[ends[0]] if ends else None


def _sequence(history: _History) -> Iterator[Violation]:
    for before, after in zip(history.events, history.events[1:], strict=False):
        if after.seq != before.seq + 1:
            yield Violation("seq", f"{after.kind} has seq {after.seq} after {before.kind} with seq {before.seq}")


def _run_bounds(history: _History) -> Iterator[Violation]:
    events = history.events
    for at, event in enumerate(events):
        if event.kind == "run_started" and at != 0:
            yield Violation("run", f"run_started is event {at + 1} of the run (seq {event.seq}), not the first")
    ended = [at for at, event in enumerate(events) if event.kind == "run_ended"]
    if len(ended) != 1:
        yield Violation("run", f"run_ended was recorded {len(ended)} times, not once")
    elif ended[0] != len(events) - 1:
        follower = events[ended[0] + 1]
        yield Violation("run", f"{follower.kind} (seq {follower.seq}) follows run_ended")


def _calls(history: _History) -> Iterator[Violation]:
    for node, starts in history.starts.items():
        ends = history.ends.get(node, [])
        if len(starts) > 1:
            yield Violation("lifecycle", f"call {node} started {len(starts)} times")
        if len(ends) != 1:
            yield Violation("lifecycle", f"call {node} started and has {len(ends)} ends, not one")
        if ends and ends[0] < starts[0]:
            yield Violation("lifecycle", f"call {node} ended before it started")
    for node, ends in history.ends.items():
        if node not in history.starts:
            yield Violation("lifecycle", f"call {node} ended and never started")
        for end in (history.events[at] for at in ends):
            if end.status not in TERMINAL_STATUSES:
                yield Violation("lifecycle", f"call {node} ended as {end.status!r}, which is no end")
            if end.cost_nanos < 0:
                yield Violation("money", f"call {node} cost {end.cost_nanos} nano-dollars")


def _tree(history: _History) -> Iterator[Violation]:
    for child, parent in history.parents.items():
        started = history.starts[child][0]
        if parent not in history.starts:
            yield Violation("tree", f"call {child} has parent {parent}, which never started")
        elif history.starts[parent][0] >= started:
            yield Violation("tree", f"call {child} started before its parent {parent}")
        elif parent in history.ends:
            yield from _inside_parent(history, child, parent)


def _inside_parent(history: _History, child: str, parent: str) -> Iterator[Violation]:
    parent_end = history.ends[parent][0]
    if history.starts[child][0] > parent_end:
        yield Violation("tree", f"call {child} started after its parent {parent} had ended")
    elif child in history.ends and history.ends[child][0] > parent_end and not _abandoned(history.end(child)):
        yield Violation("tree", f"call {child} ended after its parent {parent}")


def _settlements(history: _History) -> Iterator[Violation]:
    for at, event in enumerate(history.events):
        if event.kind == "call_settled" and history.ends.get(event.node_id, [at])[0] >= at:
            yield Violation("money", f"call {event.node_id} was settled (seq {event.seq}) before it ended")


def _money(invoice: BilledTotal | None, ceiling: int | None, ledger: LedgerTotals | None) -> Iterator[Violation]:
    if ledger is None:
        if invoice is not None and ceiling is not None and invoice.total_nanos > ceiling:
            yield Violation("money", f"the invoice is {invoice.total_nanos} nano-dollars, the ceiling {ceiling}")
        return
    counted = ledger.spent_nanos + ledger.unresolved_nanos
    parts = f"{ledger.spent_nanos} spent, {ledger.unresolved_nanos} unresolved"
    ours = f"the ledger counts {counted} nano-dollars ({parts})"
    if ledger.held_nanos != 0:
        yield Violation("money", f"{ledger.held_nanos} nano-dollars are still held and nothing runs")
    if invoice is not None and counted < invoice.total_nanos:
        yield Violation("money", f"{ours}, less than the invoice of {invoice.total_nanos}")
    if ceiling is not None and counted > ceiling:
        yield Violation("money", f"{ours}, over the ceiling of {ceiling}")


def _effects(history: _History, effects: list[str]) -> Iterator[Violation]:
    parents = frozenset(history.parents.values())
    for node, times in Counter(effects).items():
        if times > 1:
            yield Violation("effects", f"call {node} ran {times} times")
        if node not in history.starts:
            yield Violation("effects", f"call {node} ran and was never recorded as started")
        elif node not in parents and _was_refused(history.end(node)):
            yield Violation("effects", f"call {node} was refused and ran all the same")


def _was_refused(end: Any) -> bool:
    """Return whether a halt was decided at admission; a call with a cost, or an abandoned one, may have run."""
    if end is None or end.status != "halt" or _abandoned(end) or end.cost_nanos > 0:
        return False
    reason, _, _ = (getattr(end, "stop_reason", None) or "").partition(":")
    return reason not in MAY_STOP_RUNNING_WORK


def _abandoned(end: Any) -> bool:
    return bool(getattr(end, "abandoned", False))
