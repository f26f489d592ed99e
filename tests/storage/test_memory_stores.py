"""The stores in memory do what every store must."""

from __future__ import annotations

from penstock.storage.memory import MemoryStores
from penstock.testing.contracts.stores import StoresContract
from penstock.testing.faulty import FAULTS


class TestMemoryStores(StoresContract):
    fault_kinds = tuple(FAULTS)

    async def open_stores(self) -> MemoryStores:
        return MemoryStores()
