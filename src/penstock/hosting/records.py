"""Stored records of runs, graphs, approvals and cancel requests.

Records are frozen and contain only JSON: a store returns exactly what was stored. Times are milliseconds since 1970.
"""

from __future__ import annotations

import json
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
"""Allowed status changes: failed, halted and cancelled runs can be resumed, completed runs cannot.

`running` to `running` is a takeover by another worker after a lease has expired."""

ENDED: frozenset[RunStatus] = frozenset({"completed", "failed", "halted", "cancelled"})
"""The run has ended and does not continue unless it is resumed."""
QUEUED: frozenset[RunStatus] = frozenset({"queued"})
"""The run waits for a worker."""
PARKED: frozenset[RunStatus] = frozenset({"parked"})
"""The run's host was closed; the next host resumes the run."""
CLAIMED: frozenset[RunStatus] = frozenset({"running", "waiting"})
"""A worker has claimed the run, until its lease expires."""


NO_DATA: Mapping[str, Any] = MappingProxyType({})
SHORT_OUTPUT = 200
"""Maximum length, in characters of JSON, of outputs that are stored with the run, its journal and its last event;
longer outputs are stored once."""


USAGE = ("cost_nanos", "tokens_in", "tokens_out", "unresolved_nanos", "unknown_costs")
"""The usage fields of a run."""


class RunRecord(NamedTuple):
    """The current state of one run."""

    id: str
    owner: str
    """Name of the user the run belongs to."""
    graph_id: str
    graph_version: int
    input: Any = None
    limits: Mapping[str, Any] = NO_DATA
    """Limits of the run, in the form of `RunLimits.to_dict`."""
    origin: Mapping[str, Any] = NO_DATA
    """Origin of the run: `kind` is `run`, `chat`, `fork` or `replay`; the other keys depend on the kind."""
    status: RunStatus = "queued"
    created_ms: int = 0
    started_ms: int | None = None
    ended_ms: int | None = None
    worker: str | None = None
    """Worker that has claimed the run."""
    lease_until_ms: int = 0
    """When the worker's lease expires."""
    epoch: int = 0
    """Number of claims so far. A worker's writes carry its epoch; writes under an earlier one are refused."""
    stop_reason: str | None = None
    """Why the run was halted or cancelled: a value of the closed list in `stops`."""
    error: str | None = None
    """Message of the error or of the limit that stopped the run."""
    output: Any = None
    cost_nanos: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    unresolved_nanos: int = 0
    """Amount held for calls whose actual cost is unknown."""
    unknown_costs: int = 0
    """Number of calls whose cost could not be determined; if there are any, `cost_nanos` is a lower bound."""
    grants: int = 0
    """Number of times the limits were raised."""
    crash_count: int = 0
    """Number of workers lost in a row while executing the run, up to its newest start event; a requeue resets it."""
    worked_ms: int = 0
    """Execution time under the claims that are over, up to the newest start event."""
    resumed_ms: int | None = None
    """When the newest worker after the first one started; None while only one has."""
    halt: Mapping[str, Any] | None = None
    """The limit that halted the run: `whose` it is, `stop_reason`, `message`, its figures and `node_id`; None if no
    limit did."""

    @property
    def chat_id(self) -> Any:
        """The chat the run answers in, or that of the run it was forked from, which it only reads; None for none."""
        return self.origin.get("chat_id") or (self.origin.get("of") or NO_DATA).get("chat_id")


def is_short(output: object) -> bool:
    """Whether an output is known to be short; False for lists and objects, whose length is known only as JSON."""
    if isinstance(output, str):
        return len(output) <= SHORT_OUTPUT and len(json.dumps(output)) <= SHORT_OUTPUT
    return output is None or isinstance(output, int | float)


class HostedEvent(NamedTuple):
    """One event of a run; `seq` counts from 1 without gaps, across all its workers."""

    seq: int
    at_ms: int
    type: str
    data: Mapping[str, Any] = NO_DATA


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """One version of a graph."""

    id: str
    version: int
    """Counts from 1; saving an unchanged graph adds no version."""
    owner: str
    name: str
    document: Mapping[str, Any]
    """The graph as written by an editor."""
    digest: str
    """SHA-256 of the document as canonical JSON."""
    created_ms: int = 0
    is_archived: bool = False
    """Archived graphs are not listed and start no new runs; their runs continue, and their versions can be read."""


class GraphHead(NamedTuple):
    """A graph version without its document, which may be megabytes and is not needed each time a run is submitted."""

    id: str
    version: int
    owner: str
    is_archived: bool


ApprovalState = Literal["waiting", "approved", "edited", "rejected", "withdrawn"]


@dataclass(frozen=True, slots=True)
class ApprovalRecord:
    """An approval requested by a run, and its answer."""

    id: str
    run_id: str
    owner: str
    key: str
    """Identifies the approval within its run; the same when a resumed run reaches it again."""
    node_id: str
    question: str
    value: Any = None
    """The value passed on if approved."""
    state: ApprovalState = "waiting"
    answer: Any = None
    """The value passed on instead, if edited."""
    reason: str = ""
    asked_ms: int = 0
    answered_ms: int | None = None
    answered_by: str | None = None
    expects: Any = None
    """What an edited value may be, as in `ApprovalRequest.expects`; None if anything."""


UNTIL_ENDED = (1 << 63) - 1
"""The `until_ms` of a cancel request for an existing run: it is valid until the run has ended."""


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """A request to cancel a run that may not exist yet."""

    run_id: str
    reason: str
    by: str
    at_ms: int
    until_ms: int
    """When the request expires; see `UNTIL_ENDED`."""
    owner: str = ""
    """Owner of the run; a run of the same id and another owner is not cancelled. Empty applies to any owner."""
