"""All stores in memory: the reference implementation of the ports, and the stores of a service without persistence.

Used by one event loop at a time; nothing survives the process. The databases pass the same test suites, in
`penstock.testing.contracts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.containment.ledger import MemoryLedgerStore
from penstock.hosting.ports import StoreCorrupt
from penstock.storage.faults import RowFaults
from penstock.storage.memory.approvals import MemoryApprovalStore
from penstock.storage.memory.audit import MemoryAuditStore
from penstock.storage.memory.chats import MemoryChatStore
from penstock.storage.memory.events import MemoryEventStore, MemoryJournalStore
from penstock.storage.memory.graphs import MemoryGraphStore
from penstock.storage.memory.memories import InProcessMemory
from penstock.storage.memory.payloads import MemoryPayloadStore
from penstock.storage.memory.people import MemoryPersonStore
from penstock.storage.memory.runs import MemoryCancelStore, MemoryRunStore
from penstock.storage.memory.spending import MemorySpendingStore
from penstock.storage.memory.tokens import MemoryTokenStore
from penstock.storage.memory.undo import UndoLog
from penstock.storage.port import T, Unit, drive

__all__ = [
    "InProcessMemory",
    "MemoryApprovalStore",
    "MemoryAuditStore",
    "MemoryCancelStore",
    "MemoryChatStore",
    "MemoryEventStore",
    "MemoryGraphStore",
    "MemoryJournalStore",
    "MemoryPayloadStore",
    "MemoryRunStore",
    "MemorySpendingStore",
    "MemoryStores",
    "MemoryTokenStore",
]


class MemoryStores:
    """All stores of one service; removing a run removes its data from each of them."""

    url = "memory:"

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._undo = UndoLog()
        self.runs = MemoryRunStore(self._undo)
        self.events = MemoryEventStore(self.runs)
        self.graphs = MemoryGraphStore(self._undo)
        self.approvals = MemoryApprovalStore(self.runs)
        self.cancels = MemoryCancelStore(self._undo)
        self.journal = MemoryJournalStore(self.runs)
        self.chats = MemoryChatStore(self.runs)
        self.payloads = MemoryPayloadStore(self.runs)
        self.spending = MemorySpendingStore(self.runs)
        self.memories = InProcessMemory(self.runs, self.chats)
        self.tokens = MemoryTokenStore(self._undo)
        self.audit = MemoryAuditStore(self._undo)
        self.people = MemoryPersonStore(
            self.runs,
            self.chats,
            self.memories,
            self.graphs,
            self.approvals,
            self.spending,
            self.tokens,
            self.audit,
        )
        self.ledger = MemoryLedgerStore(clock=clock)
        self.faults = RowFaults()

    async def transaction(self, unit: Unit[T], *, inline: bool = False) -> T:
        with self._undo.transaction():
            return drive(unit(self))

    async def scan(self, pause_s: float) -> Sequence[StoreCorrupt]:
        """Return no row: nothing in memory is decoded."""
        return ()

    async def size_bytes(self) -> None:
        """Return None: there is no database."""

    async def check_rows(self, *, pause_s: float = 0.0) -> Sequence[StoreCorrupt]:
        """Return no row: nothing in memory is decoded."""
        return await self.scan(pause_s)

    async def close(self) -> None:
        """Do nothing: there are no resources to release."""

    async def __aenter__(self) -> MemoryStores:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
