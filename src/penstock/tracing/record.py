"""The records of a run in progress.

The hot path writes one `CallRecord` when a call begins and fills in its second half when the call ends; everything that
people read (events, nodes, stats, trees) is a view computed from these when it is read. Two rules make that safe
without copying:

- A record's first half never changes. (A model that only the answer names is written with the second half. A folded
call is linked to a kept ancestor, so that it does not keep other folded calls alive.) Its second half is written
once, `end_seq` last; a reader that reads `end_seq` first therefore sees a call that is either open or complete. - `seq`
numbers are positions in the run's log, assigned under the run's lock: they have no gaps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.ids import call_id
from penstock.stops import Stop
from penstock.tracing.lifecycle import CallKind, Status
from penstock.tracing.payloads import Payload

NOT_WHOLE = frozenset({"length", "content_filter"})
"""Finish reasons of incomplete answers."""

OPEN = 1 << 62
"""The `end_seq` of a call that has not ended: larger than any seq."""


class Source:
    """A place in the tree of contexts: a run's main one, a child, a child's child."""

    __slots__ = ("depth", "iteration", "name", "parent", "path")

    def __init__(self, name: str, parent: Source | None = None) -> None:
        self.name = name
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.path: str = name if parent is None else f"{parent.path}/{name}"
        self.iteration = 0


class CallExtras(NamedTuple):
    """Data that few calls have: most calls share one empty value."""

    retries: int = 0
    running: bool = True
    waiting: bool = False
    settled: Settlement | None = None
    stop_reason: str | None = None
    error_class: str | None = None
    abandoned: bool = False
    folded_from: int | None = None
    cost_unknown: bool = False
    finish_reason: str | None = None
    payload: Payload | None = None
    stop: Stop | None = None


NO_EXTRAS = CallExtras()
ONLY_COST_UNKNOWN = CallExtras(cost_unknown=True)
"""Shared by all calls without other extras: in a run whose prices are unknown, that is every call."""


class CallRecord:
    """One call: what it is, when it began, and, once it has ended, how. The graph's `begin` and `end` fill it in.

    A run keeps one of these for every call, so each field costs memory for all: derived data is not stored, and rare
    data only by reference.
    """

    __slots__ = (
        "cost",
        "depth",
        "end_seq",
        "ended_ns",
        "extras",
        "iteration",
        "kind",
        "metadata",
        "model",
        "name",
        "number",
        "owner",
        "parent",
        "source",
        "started_ns",
        "status",
        "tokens_in",
        "tokens_out",
    )

    number: int
    parent: CallRecord | None
    depth: int
    kind: CallKind
    name: str
    model: str | None
    source: Source
    iteration: int
    started_ns: int
    metadata: Mapping[str, Any] | None
    owner: object
    """The object that runs the call while it is open; the runtime sets and clears it."""
    extras: CallExtras
    end_seq: int
    """A reader of the log knows its place there; that of its end distinguishes the two."""

    status: Status
    ended_ns: int
    cost: int
    tokens_in: int | None
    tokens_out: int | None

    @property
    def retries(self) -> int:
        """Number of retries drawn for the call."""
        return self.extras.retries

    @property
    def running(self) -> bool:
        """Whether the call has begun to run."""
        return self.extras.running

    @property
    def waiting(self) -> bool:
        """Whether the call was created and waits for other calls to end."""
        return self.extras.waiting

    @property
    def settled(self) -> Settlement | None:
        """The bill that arrived after the end of the call, if one did."""
        return self.extras.settled

    @property
    def stop_reason(self) -> str | None:
        """The reason of the stop, or the message of the error."""
        return self.extras.stop_reason

    @property
    def stop(self) -> Stop | None:
        """The stop behind `stop_reason`, with its figures; None if no stop ended the call, or they were dropped."""
        return self.extras.stop

    @property
    def error_class(self) -> str | None:
        """The class of the error."""
        return self.extras.error_class

    @property
    def abandoned(self) -> bool:
        """Whether the function was abandoned while it was still running."""
        return self.extras.abandoned

    @property
    def cost_unknown(self) -> bool:
        """Whether the call was billed at an unknown amount: `cost` is the known part of it."""
        return self.extras.cost_unknown

    @property
    def finish_reason(self) -> str | None:
        """Why the answer of a model is incomplete, one of NOT_WHOLE; None if it is complete, or if that is unknown."""
        return self.extras.finish_reason

    @property
    def payload(self) -> Payload | None:
        """The arguments and the result, if the run records them."""
        return self.extras.payload

    @property
    def folded_from(self) -> int | None:
        """The number of the parent when the call was folded; None for kept calls."""
        return self.extras.folded_from

    @property
    def node_id(self) -> str:
        """The public id of this call."""
        return call_id(self.number)

    @property
    def result_name(self) -> str:
        """The name of the result among those of the run: the call name, prefixed with the path of a child context."""
        _, _, place = self.source.path.partition("/")
        return f"{place}/{self.name}" if place else self.name

    @property
    def parent_number(self) -> int:
        """The number of the parent; 0 for the root."""
        parent = self.parent  # before `folded_from`, which is written before the call is linked to another one
        if (folded_from := self.extras.folded_from) is not None:
            return folded_from
        return 0 if parent is None else parent.number

    @property
    def parent_id(self) -> str | None:
        """The id of the parent; None for the root."""
        return call_id(number) if (number := self.parent_number) else None

    def is_under(self, other: CallRecord) -> bool:
        """Whether this call was made by `other`, directly or indirectly."""
        above = self.parent
        while above is not None and above.depth > other.depth:
            above = above.parent
        return above is other

    def is_unpaid_at(self, seq: int) -> bool:
        """Whether the cost of this ended call is unknown in the log up to `seq`."""
        late = self.extras.settled
        return self.extras.cost_unknown and (late is None or late.seq > seq or not late.cost)

    def status_at(self, seq: int) -> Status:
        """Return the status of the call in the log up to `seq`."""
        if self.end_seq <= seq:
            return self.status
        return "running" if self.running else "created"


class IterationMark:
    """The beginning or the end of an iteration of a loop; its event is created when it is read."""

    __slots__ = ("action", "at_ns", "base", "iteration", "source", "started_ns")

    def __init__(self, source: Source, base: CallRecord, at_ns: int, started_ns: int, action: str | None) -> None:
        self.source = source
        self.iteration = source.iteration
        self.base = base
        self.at_ns = at_ns
        self.started_ns = started_ns
        self.action = action
        """The loop's next action; None for the beginning of an iteration."""


class RunMark:
    """The beginning of the run; its event is created from the root when it is read."""

    __slots__ = ()


RUN_BEGINS = RunMark()


class Settlement:
    """The bill of a call that arrived after the call had ended."""

    __slots__ = ("at_ns", "call", "cost", "seq", "tokens_in", "tokens_out")

    def __init__(self, call: CallRecord, seq: int, at_ns: int, cost: int, tokens_in: int, tokens_out: int) -> None:
        self.call = call
        self.seq = seq
        self.at_ns = at_ns
        self.cost = cost
        self.tokens_in = tokens_in
        self.tokens_out = tokens_out


def mark_cost_unknown(call: CallRecord) -> None:
    """Record that the cost of a call about to end is unknown. The caller holds the lock of its run."""
    call.extras = ONLY_COST_UNKNOWN if call.extras is NO_EXTRAS else call.extras._replace(cost_unknown=True)


def mark_waiting(call: CallRecord, waits: bool) -> None:
    """Record that an open call waits for other calls to end, or has stopped waiting. The caller holds the lock of its
    run.
    """
    call.extras = call.extras._replace(waiting=waits)


def mark_stopped(call: CallRecord, stop: Stop | None) -> None:
    """Record the stop that is about to end the call; without one, or if it has ended, nothing. The caller holds the
    lock of its run."""
    if stop is not None and call.end_seq == OPEN:
        call.extras = call.extras._replace(stop=stop)


def mark_not_whole(call: CallRecord, finish_reason: str) -> None:
    """Record that the answer of a call about to end is incomplete. The caller holds the lock of its run."""
    call.extras = call.extras._replace(finish_reason=finish_reason)


def keep_payload(call: CallRecord, payload: Payload) -> None:
    """Record the arguments and the result of an open call. The caller holds the lock of its run."""
    call.extras = call.extras._replace(payload=payload)


def count_retry(call: CallRecord) -> None:
    """Count one more retry of the call. The caller holds the lock of its run."""
    call.extras = call.extras._replace(retries=call.extras.retries + 1)
