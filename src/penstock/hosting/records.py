"""What is kept of runs, graphs, approvals and cancels.

Frozen, and JSON all through: what a store gives back is what it was given. Times are milliseconds since 1970.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

RunStatus = Literal["queued", "running", "waiting", "parked", "completed", "failed", "halted", "cancelled"]

TRANSITIONS: Mapping[RunStatus, frozenset[RunStatus]] = {
    "queued": frozenset({"running", "cancelled"}),
    "running": frozenset({"running", "waiting", "parked", "completed", "failed", "halted", "cancelled"}),
    "waiting": frozenset({"running", "waiting", "parked", "completed", "failed", "halted", "cancelled"}),
    "parked": frozenset({"queued", "running", "cancelled"}),
    "completed": frozenset(),
    "failed": frozenset({"queued"}),
    "halted": frozenset({"queued"}),
    "cancelled": frozenset({"queued"}),
}
"""Where a run may go from where it is: what failed, was halted or cancelled can be resumed, what is complete cannot.

`running` to `running` is another worker taking over from one whose lease ran out."""

ENDED: frozenset[RunStatus] = frozenset({"completed", "failed", "halted", "cancelled"})
"""Nothing more happens to it by itself."""
QUEUED: frozenset[RunStatus] = frozenset({"queued"})
"""It waits for a worker."""
PARKED: frozenset[RunStatus] = frozenset({"parked"})
"""The host that had it was closed; the next one lets it go on."""
CLAIMED: frozenset[RunStatus] = frozenset({"running", "waiting"})
"""A worker has it, until its lease runs out."""


NO_DATA: Mapping[str, Any] = MappingProxyType({})


class RunRecord(NamedTuple):
    """One run, as it stands."""

    id: str
    owner: str
    """Whose it is: the name of a user."""
    graph_id: str
    graph_version: int
    input: Any = None
    limits: Mapping[str, Any] = NO_DATA
    """What it may use, as `RunLimits.to_dict` writes it."""
    origin: Mapping[str, Any] = NO_DATA
    """Where it comes from: `kind` is `run`, `chat` or `fork`, and the rest is that kind's own."""
    status: RunStatus = "queued"
    created_ms: int = 0
    started_ms: int | None = None
    ended_ms: int | None = None
    worker: str | None = None
    """Who works on it."""
    lease_until_ms: int = 0
    """Until when it is theirs."""
    epoch: int = 0
    """How often it was claimed. Whoever writes says under which claim; one that was taken over is refused."""
    stop_reason: str | None = None
    """Why it was halted or cancelled, by the closed list of `stops`."""
    error: str | None = None
    """What went wrong, or what the limit said, in words."""
    output: Any = None
    cost_nanos: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    unresolved_nanos: int = 0
    """What calls held whose bill nobody knows."""
    unknown_costs: int = 0
    """How many of its calls cost something that nobody could tell; if there are any, `cost_nanos` is a lower bound."""

    @property
    def chat_id(self) -> Any:
        """The chat that it answers in, or that it looks into because what it was forked from did; None for none."""
        return self.origin.get("chat_id") or (self.origin.get("of") or NO_DATA).get("chat_id")


class HostedEvent(NamedTuple):
    """One thing that happened to a run; `seq` counts from 1 without gaps, over all workers that had it."""

    seq: int
    at_ms: int
    type: str
    data: Mapping[str, Any] = NO_DATA


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """One version of a graph."""

    id: str
    version: int
    """From 1; saving what is there already makes no new one."""
    owner: str
    name: str
    document: Mapping[str, Any]
    """As an editor writes it."""
    digest: str
    """SHA-256 of the document as canonical JSON."""
    created_ms: int = 0
    is_archived: bool = False
    """Archived graphs are not listed, and begin nothing new; their runs go on, and their versions can be read."""


class GraphHead(NamedTuple):
    """Which version of a graph is there, without what is in it: that may be megabytes, and runs begin by the second."""

    id: str
    version: int
    owner: str
    is_archived: bool


ApprovalState = Literal["waiting", "approved", "edited", "rejected", "withdrawn"]


@dataclass(frozen=True, slots=True)
class ApprovalRecord:
    """A question that a run put, and what became of it."""

    id: str
    run_id: str
    owner: str
    key: str
    """Which question of the run it is: the same when the run is resumed and comes to it again."""
    node_id: str
    question: str
    value: Any = None
    """What goes on if it is approved."""
    state: ApprovalState = "waiting"
    answer: Any = None
    """What goes on instead, if it was edited."""
    reason: str = ""
    asked_ms: int = 0
    answered_ms: int | None = None
    answered_by: str | None = None
    expects: Any = None
    """What may go on instead, as `ApprovalRequest.expects` says it; None if anything may."""


UNTIL_ENDED = (1 << 63) - 1
"""The `until_ms` of a wish for a run that is there: it is kept until the run has ended, however long that takes."""


@dataclass(frozen=True, slots=True)
class CancelIntent:
    """Somebody wants a run to stop, whether it is there yet or not."""

    run_id: str
    reason: str
    by: str
    at_ms: int
    until_ms: int
    """After that it is forgotten; see `UNTIL_ENDED`."""
    owner: str = ""
    """Whose run it is meant for: another's of the same id is left alone. Empty, it is for anybody's."""
