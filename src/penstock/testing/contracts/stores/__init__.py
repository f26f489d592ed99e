"""What every store of the service must do; those in memory are the specification.

Inherit and say how stores are made, and pytest runs every sentence over them:

    class TestMyStores(StoresContract):
        async def open_stores(self) -> StoreBundle:
            return await open_stores(self.url)

Each test opens stores of its own, empty ones, on its own event loop, and closes them. A folder or a server comes from a
fixture of the inheriting class. Stores that several processes can share give a second way to the same database in
`open_another`, and the concurrent tests use both. One port alone is `RunStoreContract` and so on, with the same method.

- RunStoreContract, EventStoreContract, JournalStoreContract, GraphStoreContract, ApprovalStoreContract,
  CancelStoreContract, ChatStoreContract, MemoryStoreContract: one port each
- FaultsContract: after any failure of any call, asking again leaves what one ask would have left
- StoresContract: all of them
- agree: the same random acts over two sets of stores have the same answers

`pytest.register_assert_rewrite("penstock.testing.contracts")` in a conftest shows both sides of a failed assertion.
Async tests need a plugin, or a hook, that runs them.
"""

from penstock.testing.contracts.stores.agreement import agree
from penstock.testing.contracts.stores.approvals import ApprovalStoreContract, CancelStoreContract
from penstock.testing.contracts.stores.chats import ChatStoreContract
from penstock.testing.contracts.stores.events import EventStoreContract, JournalStoreContract
from penstock.testing.contracts.stores.faults import FaultsContract
from penstock.testing.contracts.stores.graphs import GraphStoreContract
from penstock.testing.contracts.stores.memories import MemoryStoreContract
from penstock.testing.contracts.stores.runs import RunStoreContract
from penstock.testing.contracts.stores.suite import StoreBundle, StoreContract

__all__ = [
    "ApprovalStoreContract",
    "CancelStoreContract",
    "ChatStoreContract",
    "EventStoreContract",
    "FaultsContract",
    "GraphStoreContract",
    "JournalStoreContract",
    "MemoryStoreContract",
    "RunStoreContract",
    "StoreBundle",
    "StoreContract",
    "StoresContract",
    "agree",
]


class StoresContract(
    RunStoreContract,
    EventStoreContract,
    JournalStoreContract,
    GraphStoreContract,
    ApprovalStoreContract,
    CancelStoreContract,
    ChatStoreContract,
    MemoryStoreContract,
    FaultsContract,
):
    """The suites of all ports in one."""
