"""What hosting needs of a database: six stores, each with one suite that memory, SQLite and PostgreSQL must pass.

Every method is atomic. A store that cannot do it raises StoreUnavailable, and nothing of what was asked is there; if
the answer was lost on the way, asking again is safe. What a worker writes names the epoch of its claim, and a claim
that another worker has taken over is refused as Fenced: a worker that slept through its lease cannot write.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from penstock.containment.ledger import LedgerStore
from penstock.errors import PenstockError
from penstock.hosting.records import (
    ApprovalRecord,
    ApprovalState,
    CancelIntent,
    GraphHead,
    GraphRecord,
    HostedEvent,
    RunRecord,
    RunStatus,
)
from penstock.runtime.durable.ports import JournalEntry, JournalStore

if TYPE_CHECKING:
    from penstock.nodes.memory import MemoryStore


class StoreUnavailable(PenstockError):
    """A database could not do what was asked: busy, full, read-only, broken or gone. Nothing was changed."""


class Fenced(PenstockError):
    """A worker wrote for a run that is not its own any more."""

    def __init__(self, run_id: str, epoch: int) -> None:
        self.run_id = run_id
        self.epoch = epoch
        super().__init__(f"run {run_id!r} was taken over from claim {epoch}: what this worker knows of it is old")


class Conflict(PenstockError):
    """What was asked contradicts what is there: an id that is taken, a version that is not the newest, a state."""


class AnotherRun(Conflict):
    """The id is that of a run that is `known` and not what is asked for: they differ in these fields."""

    def __init__(self, known: RunRecord, fields: Sequence[str]) -> None:
        self.known = known
        self.fields = tuple(fields)
        # What is in another's run is not to be found out by asking for it until the answer changes.
        differs = "owner" if "owner" in fields else ", ".join(fields)
        super().__init__(f"run {known.id!r} is there with another {differs}; give this one an id of its own")


class RunStore(Protocol):
    """Runs by id."""

    async def add(self, run: RunRecord, journal: Sequence[JournalEntry] = ()) -> RunRecord:
        """Keep a new run and, in the same act, the `journal` it begins with. One that is there already with the same
        owner, graph, input, limits and origin (but for what it says `about` the run) is given back as it is, with its
        own journal; AnotherRun if it differs."""

    async def get(self, run_id: str) -> RunRecord | None:
        """The run; None if there is none of that id."""

    async def list(
        self,
        *,
        owner: str | None = None,
        statuses: Collection[RunStatus] = (),
        graph_id: str | None = None,
        chat_id: str | None = None,
        before: str | None = None,
        limit: int = 50,
    ) -> Sequence[RunRecord]:
        """Runs, the newest first (by created_ms, then id); `before` is the id of the last one of the page before."""

    async def count(self, *, owner: str | None = None, statuses: Collection[RunStatus] = ()) -> int:
        """How many there are."""

    async def claim(self, worker: str, *, now_ms: int, lease_ms: int, run_id: str | None = None) -> RunRecord | None:
        """Take the oldest run that is queued, or claimed under a lease that has run out; of one id alone, if given.

        It is `running` from then on, with the next epoch. Of any number of workers that ask, one gets it.
        """

    async def renew(self, worker: str, run_ids: Collection[str], *, now_ms: int, lease_ms: int) -> Collection[str]:
        """Make the leases longer; which of the runs are still this worker's."""

    async def update(self, run_id: str, epoch: int, **changes: Any) -> RunRecord:
        """Change fields of a claimed run: Fenced for another epoch, Conflict for a status it cannot go to.

        An ended or parked status gives the claim back.
        """

    async def requeue(
        self, run_id: str, epoch: int, *, limits: Mapping[str, Any] | None = None, was: RunStatus | None = None
    ) -> RunRecord:
        """Let a run that is parked, failed, halted or cancelled go on, perhaps with other limits; Conflict else.

        With `was`, only one that is still so, or waits for its turn already: whoever asks has looked at that.
        Fenced for another epoch: it went on, and was claimed, since whoever asks has looked at it.
        """

    async def end(self, run_id: str, status: RunStatus, *, now_ms: int, **changes: Any) -> RunRecord:
        """End a run that nobody has claimed (queued or parked); Conflict if somebody has, or it has ended."""

    async def remove_ended(self, before_ms: int, *, limit: int = 1_000) -> Sequence[str]:
        """Forget runs that ended before then, with their events, journal and approvals; which ones."""

    async def remove(self, run_id: str) -> None:
        """Forget one run in the same way; Conflict if it has not ended, and one that is not there is fine."""


class EventStore(Protocol):
    """What happened to runs, by seq."""

    async def append(self, run_id: str, epoch: int, events: Sequence[HostedEvent]) -> None:
        """Keep the next events. What is there already is skipped; Conflict if there would be a gap; Fenced."""

    async def read(self, run_id: str, after_seq: int = 0, limit: int = 1_000) -> Sequence[HostedEvent]:
        """The events after that one, in order; empty for a run that is not there."""

    async def last_seq(self, run_id: str) -> int:
        """The newest one's; 0 if there is none."""

    async def wait(self, run_id: str, after_seq: int, timeout_s: float) -> bool:
        """Sleep until there is something after that one, or the time is over; whether there is."""


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
    ) -> GraphRecord:
        """Keep a version. The newest again, with name and document the same, is no new one; Conflict if the newest is
        not `expected_version` (0: there is none), or the graph is another owner's."""

    async def get(self, graph_id: str, version: int | None = None) -> GraphRecord | None:
        """That version, the newest if none is named."""

    async def head(self, graph_id: str, version: int | None = None) -> GraphHead | None:
        """Whose that version is, and whether it is archived; the newest if none is named."""

    async def list(
        self, *, owner: str | None = None, before: str | None = None, limit: int = 100
    ) -> Sequence[GraphRecord]:
        """The newest version of each graph that is not archived, by id; `before` is the last id of the page before."""

    async def versions(self, graph_id: str) -> Sequence[GraphRecord]:
        """All versions, the newest first."""

    async def archive(self, graph_id: str, *, is_archived: bool = True) -> None:
        """Take it out of the list, or put it back."""


class ApprovalStore(Protocol):
    """Questions and answers."""

    async def ask(self, approval: ApprovalRecord, *, epoch: int = 0) -> ApprovalRecord:
        """Put a question; one that the run has put under this key already is given back as it stands.

        A withdrawn one waits again. Fenced unless `epoch` is the newest claim of the run; 0 where nobody claims."""

    async def get(self, approval_id: str) -> ApprovalRecord | None:
        """The question of that id."""

    async def list(
        self,
        *,
        run_id: str | None = None,
        owner: str | None = None,
        states: Collection[ApprovalState] = (),
        before: str | None = None,
        limit: int = 100,
    ) -> Sequence[ApprovalRecord]:
        """Questions, the oldest first (by asked_ms, then id); in any state, if none is named.

        `before` is the id of the last one of the page before, in whichever state that is by now."""

    async def answer(
        self, approval_id: str, state: ApprovalState, *, answer: Any = None, reason: str = "", by: str, now_ms: int
    ) -> ApprovalRecord:
        """The first answer counts: Conflict if it does not wait any more. KeyError if there is none of that id."""

    async def withdraw(self, run_id: str, epoch: int, *, now_ms: int) -> None:
        """The run ends under this claim: what it still asks, nobody needs to answer. Fenced for another one."""

    async def answered(self, approval_ids: Collection[str]) -> Mapping[str, ApprovalRecord]:
        """Those of them that do not wait any more."""

    async def wait(self, approval_id: str, timeout_s: float) -> ApprovalRecord | None:
        """Sleep until it is answered or withdrawn, or the time is over; None if it still waits."""


class CancelStore(Protocol):
    """Who is to stop, also before it is there."""

    async def put(self, intent: CancelIntent) -> CancelIntent:
        """Remember it; the first for a run and an owner counts until it is dropped or forgotten, and is given back.

        It is kept as long as the longest that was put since."""

    async def find(self, owners: Mapping[str, str], *, now_ms: int) -> Mapping[str, CancelIntent]:
        """Those that are not forgotten and count for these runs, whose owners are known; of several the first."""

    async def of(self, run_id: str) -> Sequence[CancelIntent]:
        """All that is wished for the run, by whomever, as it stands."""

    async def lasting(self, *, limit: int = 1_000) -> Sequence[CancelIntent]:
        """Those that are kept until their run has ended, the oldest first (by at_ms, then run_id and owner)."""

    async def drop(self, run_id: str, wishes: Collection[CancelIntent] | None = None) -> None:
        """What was wished for the run, by whomever, has been done, or is not wanted any more.

        With `wishes`, those alone, and only while they stand as they are given: what was put since stays."""

    async def prune(self, *, now_ms: int) -> int:
        """Forget those whose time is over; how many."""


class HostStores(Protocol):
    """All that a host keeps things in."""

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
    def ledger(self) -> LedgerStore: ...

    @property
    def memories(self) -> MemoryStore: ...
