"""Every store in memory: the specification of the ports, and what a service that keeps nothing runs on.

One event loop at a time; nothing survives the process. The databases pass the same suites, those of
`penstock.testing.contracts`.
"""

from __future__ import annotations

from types import TracebackType

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.containment.ledger import MemoryLedgerStore
from penstock.storage.memory.approvals import MemoryApprovalStore, MemoryCancelStore
from penstock.storage.memory.chats import MemoryChatStore
from penstock.storage.memory.events import MemoryEventStore, MemoryJournalStore
from penstock.storage.memory.graphs import MemoryGraphStore
from penstock.storage.memory.memories import InProcessMemory
from penstock.storage.memory.runs import MemoryRunStore

__all__ = [
    "InProcessMemory",
    "MemoryApprovalStore",
    "MemoryCancelStore",
    "MemoryChatStore",
    "MemoryEventStore",
    "MemoryGraphStore",
    "MemoryJournalStore",
    "MemoryRunStore",
    "MemoryStores",
]


class MemoryStores:
    """All stores of one service; what a run left in any of them goes with it."""

    url = "memory:"

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.runs = MemoryRunStore()
        self.events = MemoryEventStore(self.runs)
        self.graphs = MemoryGraphStore()
        self.approvals = MemoryApprovalStore(self.runs)
        self.cancels = MemoryCancelStore()
        self.journal = MemoryJournalStore(self.runs)
        self.chats = MemoryChatStore(self.runs)
        self.memories = InProcessMemory(self.runs, self.chats)
        self.ledger = MemoryLedgerStore(clock=clock)

    async def close(self) -> None:
        """There is nothing to give back."""

    async def __aenter__(self) -> MemoryStores:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
