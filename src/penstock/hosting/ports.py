"""The database ports of hosting: eight stores, and the records that they hold.

Each store has one test suite that memory, SQLite and PostgreSQL must pass. Every method is atomic. A store that cannot
perform it raises StoreUnavailable and changes nothing; if only the response was lost, repeating the call is safe. A
worker's writes carry the epoch of its claim, and a write under a claim that another worker has taken over is refused as
Fenced: a worker that slept through its lease cannot write. `retry_unavailable` repeats an operation while its store is
unavailable.

Records are frozen and contain only JSON: a store returns exactly what was stored. Times are milliseconds since 1970.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

from penstock.containment.ledger import LedgerStore
from penstock.errors import LedgerUnavailable, PenstockError
from penstock.hosting.audit import AuditStore
from penstock.runtime.durable.ports import JournalEntry, JournalStore

if TYPE_CHECKING:
    from penstock.nodes.memory import MemoryStore

T = TypeVar("T")

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


MAX_SHARES = 200
"""Maximum number of shares of one run."""
MAX_FIGURE = 10**15
"""Maximum of each figure of a share, so that sums stay in range: a million US dollars."""
USAGE = ("cost_nanos", "tokens_in", "tokens_out", "unresolved_nanos", "unknown_costs")
"""The usage fields of a run."""


USUAL_PRIORITY, LOWEST_PRIORITY = 3, 5
"""The default priority of a run, and the lowest one; 1 is the highest."""


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
    queue: str | None = None
    """Queue of the engine that the run is dispatched to; None if hosts claim it themselves."""
    priority: int = USUAL_PRIORITY
    """From 1, the first to be worked on, to 5; only an engine with queues applies it."""
    fence: int = 0
    """Number of the engine's newest dispatch that a worker took the run under; 0 if no engine ever dispatched it."""

    @property
    def chat_id(self) -> Any:
        """The chat that the run answers in; for a fork or a replay, the chat of its original run, which it only reads.
        None if there is none."""
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
    saved_by: str = ""
    """Who saved this version; empty for versions that are older than this field."""
    note: str = ""
    """Why it was saved, in the words of the person who saved it."""


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
    """Requirements for an edited value, as in `ApprovalRequest.expects`; None allows any value."""


class PayloadRecord(NamedTuple):
    """The request and the response of one call of a run, as bounded JSON data; stored apart from events."""

    run_id: str
    call_id: str
    epoch: int
    """The claim under which it was recorded: call ids begin anew with each."""
    recording: Literal["redacted", "full"]
    """Whether secrets were removed: `redacted` or `full`."""
    request: Any = None
    response: Any = None
    at_ms: int = 0


class CostShare(NamedTuple):
    """The usage of one node's calls to one model in a run; all shares of a run add up to its usage."""

    node: str = ""
    """The node of the graph; empty for usage that is known only of the run as a whole."""
    model: str = ""
    """The model, as in the events of calls; empty for tools, and for usage that is known only of the run as a whole."""
    calls: int = 0
    """Number of model calls."""
    cost_nanos: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    unknown_costs: int = 0
    """Number of calls whose cost could not be determined."""


FIGURES = CostShare._fields[2:]
"""The fields of a share that add up."""

SpendingKey = Literal["day", "owner", "graph_id", "node", "model"]
"""Keys by which spending can be summed; `day` is the number of days since 1970, in UTC."""


class SpendingSum(NamedTuple):
    """Sums over the shares of a group; the fields that it was not grouped by are None."""

    day: int | None = None
    owner: str | None = None
    graph_id: str | None = None
    node: str | None = None
    model: str | None = None
    runs: int = 0
    """Number of runs. A run counts once, in the group of its first share."""
    calls: int = 0
    cost_nanos: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    unknown_costs: int = 0


class SpendingFilter(NamedTuple):
    """Conditions on the spending to sum; None leaves one out."""

    since_day: int | None = None
    """Submitted on this day or later; days since 1970, in UTC."""
    until_day: int | None = None
    """Submitted on this day or before."""
    owner: str | None = None
    graph_id: str | None = None


ALL_SPENDING = SpendingFilter()


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


class StoreUnavailable(PenstockError):
    """The database could not perform the operation: busy, full, read-only, broken or gone. Nothing was changed."""


class StoreCorrupt(PenstockError):
    """A row cannot be decoded: `table` and `key` identify it, `why` gives the reason. Other rows are not affected."""

    def __init__(self, table: str, key: str, why: str) -> None:
        self.table = table
        self.key = key
        self.why = why
        super().__init__(
            f"the row {key!r} of table {table!r} cannot be read: {why}; restore it from a backup, or remove it"
        )


class Fenced(PenstockError):
    """A worker tried to write for a run that another worker has claimed since."""

    def __init__(self, run_id: str, epoch: int) -> None:
        self.run_id = run_id
        self.epoch = epoch
        super().__init__(f"run {run_id!r} was taken over from claim {epoch}: what this worker knows of it is old")


class Conflict(PenstockError):
    """The request contradicts stored data: an id that is taken, a version that is not the newest, a state."""


class RunIdTaken(Conflict):
    """The id of a request belongs to the run of another request."""


class RunIdConflict(RunIdTaken):
    """The id belongs to the existing run `known`, which differs from the requested one in `fields`."""

    def __init__(self, known: RunRecord, fields: Sequence[str]) -> None:
        self.known = known
        self.fields = tuple(fields)
        # The contents of another owner's run must not be discoverable by guessing until the message changes.
        differs = "owner" if "owner" in fields else ", ".join(fields)
        super().__init__(f"run {known.id!r} exists and differs in its {differs}; choose another id")


BillState = Literal["unresolved", "unknown"]
"""`unresolved` holds money until a person resolves it; `unknown` is a cost that no sum includes."""
RunOrder = Literal["created", "cost"]
"""Sort key of a list of runs, in descending order; runs of equal rank are sorted by age."""


class RunFilter(NamedTuple):
    """Further conditions on a list of runs; None leaves one out."""

    since_ms: int | None = None
    """Submitted at this time or later."""
    until_ms: int | None = None
    """Submitted before this time."""
    stop_reason: str | None = None
    min_cost_nanos: int | None = None
    """Lowest recorded cost; the cost of a run in progress is recorded when it ends."""
    text: str | None = None
    """Part of the id of the run or of its graph, in upper or lower case."""
    bills: BillState | None = None
    """Runs with holds for unresolved bills, or with calls of unknown cost."""
    origin: str | None = None
    """How the run began: the `kind` of its origin, such as `fork`."""


NO_FILTER = RunFilter()


class AddedRun(NamedTuple):
    """The result of `RunStore.add`."""

    run: RunRecord
    is_new: bool
    """False if the run existed before."""


class RunStore(Protocol):
    """Runs by id."""

    async def add(self, run: RunRecord, journal: Sequence[JournalEntry] = ()) -> AddedRun:
        """Add a new run together with its initial `journal`.

        An existing run with the same id, owner, graph, input, limits and origin (except `about` in it) is returned
        unchanged, with its own journal; RunIdConflict if it differs.
        """

    async def get(self, run_id: str) -> RunRecord | None:
        """Return the run, or None if the id is unknown."""

    async def list(
        self,
        *,
        owner: str | None = None,
        statuses: Collection[RunStatus] = (),
        graph_id: str | None = None,
        chat_id: str | None = None,
        before: str | None = None,
        limit: int = 50,
        matching: RunFilter = NO_FILTER,
        order: RunOrder = "created",
    ) -> Sequence[RunRecord]:
        """Return runs, newest first (by created_ms, then id); `before` is the last id of the previous page.

        With `order="cost"` the most expensive ones come first, and of equal ones the newest.
        """

    async def count(
        self,
        *,
        owner: str | None = None,
        statuses: Collection[RunStatus] = (),
        graph_id: str | None = None,
        chat_id: str | None = None,
        matching: RunFilter = NO_FILTER,
        at_most: int | None = None,
    ) -> int:
        """Return the number of matching runs; the store stops counting at `at_most`, if given."""

    async def claim(self, worker: str, *, now_ms: int, lease_ms: int, run_id: str | None = None) -> RunRecord | None:
        """Claim the oldest run that is queued or whose lease has expired; only the run `run_id`, if given.

        The run is then `running`, with the next epoch. Of any number of concurrent workers, one gets it. A run whose
        row cannot be read is not returned: it becomes `failed`, with an error that names the row. A run with a `queue`
        is left to the engine that dispatches it.
        """

    async def take(
        self, run_id: str, worker: str, fence: int, *, queue: str, now_ms: int, lease_ms: int
    ) -> RunRecord | None:
        """Take a run that an engine has dispatched to this worker; the newer `fence` wins.

        The run is then `running` in this queue, with the next epoch. None if the run is unknown, has ended or is
        parked, was taken under this fence or a newer one, or is claimed by a host without an engine whose lease has not
        expired. Repeating the call with the same worker and fence returns the run. A row that cannot be read is treated
        as in `claim`.
        """

    async def database_id(self) -> str:
        """Return the random id of this database, which a copy or a restored backup of it shares."""

    async def fail_unreadable(self, run_id: str, error: StoreCorrupt, *, now_ms: int, epoch: int | None = None) -> None:
        """Make a run `failed` because one of its rows cannot be read.

        Does nothing if the run has ended, or is claimed under another epoch than `epoch`. Without an `epoch`, it leaves
        every claimed run as it is.
        """

    async def renew(self, worker: str, run_ids: Collection[str], *, now_ms: int, lease_ms: int) -> Collection[str]:
        """Extend the leases; return the ids of the runs that still belong to this worker."""

    async def update(self, run_id: str, epoch: int, **changes: Any) -> RunRecord:
        """Change fields of a claimed run: Fenced for another epoch, Conflict for a status it cannot change to.

        An ended or parked status releases the claim.
        """

    async def requeue(
        self, run_id: str, epoch: int, *, limits: Mapping[str, Any] | None = None, was: RunStatus | None = None
    ) -> RunRecord:
        """Queue a parked, failed, halted or cancelled run again, optionally with other limits; Conflict otherwise.

        With `was`, the status the caller has read, Conflict unless the run still has it or is already queued.
        Fenced for another epoch: the run was resumed and claimed since the caller read it.
        """

    async def end(self, run_id: str, status: RunStatus, *, now_ms: int, **changes: Any) -> RunRecord:
        """End an unclaimed run (queued or parked); Conflict if a worker has claimed it, or it has ended."""

    async def set_usage(self, run_id: str, epoch: int, **usage: int) -> RunRecord:
        """Replace figures of an ended or parked run, whose bills are resolved later; Conflict if it has not ended.

        Fenced for another epoch. `usage` has fields of `USAGE`.
        """

    async def remove_ended(self, before_ms: int, *, limit: int = 1_000) -> Sequence[str]:
        """Remove runs that ended before `before_ms`, with their events, journal and approvals; return their ids."""

    async def remove(self, run_id: str) -> None:
        """Remove one run in the same way; Conflict if it has not ended, no error if it does not exist."""


class EventStore(Protocol):
    """Events of runs, by seq."""

    async def append(self, run_id: str, epoch: int, events: Sequence[HostedEvent]) -> None:
        """Append the next events; skip stored ones. Conflict if there would be a gap; Fenced for an old epoch."""

    async def read(
        self, run_id: str, after_seq: int = 0, limit: int = 1_000, types: Sequence[str] = ()
    ) -> Sequence[HostedEvent]:
        """Return the events after `after_seq`, in order, only of these types if any are given.

        Empty for an unknown run.
        """

    async def last_seq(self, run_id: str) -> int:
        """Return the seq of the newest event; 0 if there are no events."""

    async def wait(self, run_id: str, after_seq: int, timeout_s: float) -> bool:
        """Wait until an event after `after_seq` exists, or the timeout expires; return whether it exists."""


class GraphStore(Protocol):
    """Graphs by id and version."""

    async def save(
        self,
        graph_id: str,
        owner: str,
        name: str,
        document: Mapping[str, Any],
        *,
        now_ms: int,
        expected_version: int | None = None,
        saved_by: str = "",
        note: str = "",
        source: str = "",
    ) -> GraphRecord:
        """Store a version; the same name and document as the newest add no new one. Conflict if the newest is not
        `expected_version` (0: the graph must not exist), or the graph belongs to another owner.

        `source` is the JSON text that the document was read from, if its spacing and spelling are to be kept.
        """

    async def source(self, graph_id: str, version: int | None = None) -> str:
        """Return the text that a version, or the newest, was saved with; empty if there was none."""

    async def get(self, graph_id: str, version: int | None = None) -> GraphRecord | None:
        """Return that version, or the newest if `version` is None."""

    async def head(self, graph_id: str, version: int | None = None) -> GraphHead | None:
        """Return the owner and archived flag of that version, or of the newest if `version` is None."""

    async def list(
        self,
        *,
        owner: str | None = None,
        before: str | None = None,
        limit: int = 100,
        is_archived: bool = False,
        text: str | None = None,
    ) -> Sequence[GraphRecord]:
        """Return the newest version of each unarchived (or archived) graph, by id; `before` is the last id of the
        previous page, and `text` a part of the id or of the name, in upper or lower case."""

    async def versions(self, graph_id: str) -> Sequence[GraphRecord]:
        """Return all versions, newest first."""

    async def archive(self, graph_id: str, *, is_archived: bool = True) -> None:
        """Archive the graph, which removes it from the list, or restore it."""

    async def layout(self, graph_id: str) -> Mapping[str, Any]:
        """Return the stored positions of a graph's nodes, by node; empty if none are stored."""

    async def arrange(self, graph_id: str, positions: Mapping[str, Any]) -> Mapping[str, Any]:
        """Store positions of nodes and return all of them; a position of None is removed. Makes no version.

        Positions belong to the graph and not to a version of it. KeyError for an unknown graph.
        """


class ApprovalStore(Protocol):
    """Approvals and their answers."""

    async def ask(self, approval: ApprovalRecord, *, epoch: int = 0) -> ApprovalRecord:
        """Store an approval request; an existing one of the run with the same key is returned as it is.

        A withdrawn one waits again. Fenced unless `epoch` is the newest claim of the run; 0 if runs are not claimed.
        """

    async def get(self, approval_id: str) -> ApprovalRecord | None:
        """Return the approval, or None if the id is unknown."""

    async def list(
        self,
        *,
        run_id: str | None = None,
        owner: str | None = None,
        states: Collection[ApprovalState] = (),
        before: str | None = None,
        limit: int = 100,
    ) -> Sequence[ApprovalRecord]:
        """Return approvals, oldest first (by asked_ms, then id); in any state, if `states` is empty.

        `before` is the id of the last approval of the previous page, whose state may have changed since."""

    async def answer(
        self, approval_id: str, state: ApprovalState, *, answer: Any = None, reason: str = "", by: str, now_ms: int
    ) -> ApprovalRecord:
        """Store the first answer: Conflict if the approval is no longer waiting, KeyError if the id is unknown."""

    async def withdraw(self, run_id: str, epoch: int, *, now_ms: int) -> None:
        """Withdraw the waiting approvals of a run that ends under this claim; Fenced for another epoch."""

    async def answered(self, approval_ids: Collection[str]) -> Mapping[str, ApprovalRecord]:
        """Return those approvals that are no longer waiting, by id."""

    async def wait(self, approval_id: str, timeout_s: float) -> ApprovalRecord | None:
        """Wait until the approval is answered or withdrawn, or the timeout expires; None if it is still waiting."""


class PayloadStore(Protocol):
    """Recorded payloads of calls; removed with their run, or sooner."""

    async def put(self, run_id: str, payloads: Sequence[PayloadRecord], *, epoch: int = 0) -> None:
        """Store payloads; those of the same calls are replaced. Fenced unless `epoch` is the newest claim of the run.

        All of them are of this run.
        """

    async def get(self, run_id: str, call_id: str) -> PayloadRecord | None:
        """Return the payload of a call; None if there is none, or no longer."""

    async def remove_before(self, before_ms: int, *, limit: int = 1_000) -> int:
        """Remove payloads recorded before this time, oldest first, at most `limit`; return how many."""


class SpendingStore(Protocol):
    """The usage of runs by day, owner, graph, node and model. It outlives the runs: removed runs are kept as sums.

    A run counts on the day on which it was submitted, as in the daily budgets.
    """

    async def record(self, run: RunRecord, shares: Sequence[CostShare], *, is_first: bool = False) -> None:
        """Replace the shares of a run, in the transaction that stores its usage.

        With `is_first`, only an earlier attempt of this call, whose outcome was unknown, can have recorded shares of
        the run before.

        Usage of the run that the shares do not cover is stored as a share without node and model. Shares that exceed
        the usage, or are more than `MAX_SHARES`, are replaced by one such share.
        """

    async def of(self, run_id: str) -> Sequence[CostShare]:
        """Return the shares of a run, by node and model; empty for a run without any."""

    async def sums(
        self, by: Sequence[SpendingKey] = (), matching: SpendingFilter = ALL_SPENDING, *, limit: int = 1_000
    ) -> Sequence[SpendingSum]:
        """Return sums for each group, ordered by the keys in `by`; one sum without keys, or none if nothing matches.

        The keys in `by` must be distinct.
        """


class CancelStore(Protocol):
    """Cancel requests, including requests for runs that do not exist yet."""

    async def put(self, request: CancelRequest) -> CancelRequest:
        """Store a cancel request; the first one per run and owner is valid until dropped or expired, and is returned.

        Its expiry is the latest of all requests stored since."""

    async def find(self, owners: Mapping[str, str], *, now_ms: int) -> Mapping[str, CancelRequest]:
        """Return the unexpired requests that apply to these runs, given their owners; of several, the first."""

    async def of(self, run_id: str) -> Sequence[CancelRequest]:
        """Return all cancel requests for the run, for any owner, as stored."""

    async def lasting(self, *, limit: int = 1_000) -> Sequence[CancelRequest]:
        """Return the requests valid until their run has ended, oldest first (by at_ms, then run_id and owner)."""

    async def drop(self, run_id: str, requests: Collection[CancelRequest] | None = None) -> None:
        """Remove the cancel requests for the run, for any owner: they were carried out, or are void.

        With `requests`, remove only those, and only if stored unchanged: newer requests stay."""

    async def prune(self, *, now_ms: int) -> int:
        """Remove expired requests; return how many."""


class TransactionStores(Protocol):
    """The stores that a transaction covers."""

    @property
    def runs(self) -> RunStore: ...

    @property
    def events(self) -> EventStore: ...

    @property
    def graphs(self) -> GraphStore: ...

    @property
    def approvals(self) -> ApprovalStore: ...

    @property
    def cancels(self) -> CancelStore: ...

    @property
    def journal(self) -> JournalStore: ...

    @property
    def payloads(self) -> PayloadStore: ...

    @property
    def spending(self) -> SpendingStore: ...


class HostStores(TransactionStores, Protocol):
    """All stores of a host."""

    async def transaction(self, unit: Callable[[Any], Coroutine[Any, Any, T]], *, inline: bool = False) -> T:
        """Run `unit(stores)` in one transaction over the stores it is passed: all of it is committed, or nothing.

        The unit may run more than once and must await only those stores, which include no ledger and no memories.
        """

    @property
    def ledger(self) -> LedgerStore: ...

    @property
    def memories(self) -> MemoryStore: ...

    @property
    def audit(self) -> AuditStore: ...


async def newest_to_replace(graphs: GraphStore, graph_id: str) -> GraphRecord | None:
    """Return the newest version of a graph that is about to be saved again; None if there is none.

    A version that cannot be read is returned without its document, and with the id as its name.
    """
    try:
        return await graphs.get(graph_id)
    except StoreCorrupt:
        newest, *_ = await graphs.versions(graph_id)
        return replace(newest, name=graph_id)


# Retries.

INITIAL_BACKOFF_S = 0.05
INTERACTIVE_ATTEMPTS = 3
"""Attempts when a caller is waiting for the result and prefers an error to a long wait."""
MAX_BACKOFF_S = 2.0
"""Longest pause between attempts, and so the longest delay before recovery is noticed."""


async def retry_unavailable(operation: Callable[[], Awaitable[T]], attempts: float = math.inf) -> T:
    """Run `operation` until the store is available, with exponential backoff; return its result.

    Safe because store operations are idempotent. Retries for ever by default; cancel the task to give up.
    """
    pause_s = INITIAL_BACKOFF_S
    while True:
        try:
            return await operation()
        except (StoreUnavailable, LedgerUnavailable):
            attempts -= 1
            if attempts < 1:
                raise
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_BACKOFF_S)
