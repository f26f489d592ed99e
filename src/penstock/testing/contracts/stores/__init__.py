"""The contract of every store of the service; the in-memory stores are the specification.

Inherit and define how stores are opened, and pytest runs every test against them:

    class TestMyStores(StoresContract):
        async def open_stores(self) -> StoreBundle:
            return await open_stores(self.url)

Each test opens its own empty stores, on its own event loop, and closes them. A folder or a server comes from a fixture
of the inheriting class. Stores that several processes can share return a second connection to the same database from
`open_another`, and the concurrent tests use both. One port alone is `RunStoreContract` and so on, with the same method.

- RunStoreContract, EventStoreContract, JournalStoreContract, GraphStoreContract, ApprovalStoreContract,
  CancelStoreContract, PayloadStoreContract, SpendingStoreContract, ChatStoreContract, MemoryStoreContract,
  TokenStoreContract, AuditStoreContract, PersonStoreContract:
  one port each
- FaultsContract: after any call fails, repeating it leaves the same state as one successful call
- TransactionContract: a transaction over several stores happens as a whole or not at all
- StoresContract: all of them
- agree: the same random operations on two sets of stores return the same answers

`pytest.register_assert_rewrite("penstock.testing.contracts")` in a conftest shows both sides of a failed assertion.
Async tests need a plugin, or a hook, that runs them.
"""

from penstock.testing.contracts.stores.agreement import agree
from penstock.testing.contracts.stores.approvals import ApprovalStoreContract, CancelStoreContract
from penstock.testing.contracts.stores.audit import AuditStoreContract
from penstock.testing.contracts.stores.chats import ChatStoreContract
from penstock.testing.contracts.stores.events import EventStoreContract, JournalStoreContract
from penstock.testing.contracts.stores.faults import FaultsContract
from penstock.testing.contracts.stores.graphs import GraphStoreContract
from penstock.testing.contracts.stores.memories import MemoryStoreContract
from penstock.testing.contracts.stores.payloads import PayloadStoreContract
from penstock.testing.contracts.stores.people import PersonStoreContract
from penstock.testing.contracts.stores.runs import RunStoreContract
from penstock.testing.contracts.stores.spending import SpendingStoreContract
from penstock.testing.contracts.stores.suite import StoreBundle, StoreContract
from penstock.testing.contracts.stores.tokens import TokenStoreContract
from penstock.testing.contracts.stores.transactions import TransactionContract

__all__ = [
    "ApprovalStoreContract",
    "AuditStoreContract",
    "CancelStoreContract",
    "ChatStoreContract",
    "EventStoreContract",
    "FaultsContract",
    "GraphStoreContract",
    "JournalStoreContract",
    "MemoryStoreContract",
    "PayloadStoreContract",
    "PersonStoreContract",
    "RunStoreContract",
    "SpendingStoreContract",
    "StoreBundle",
    "StoreContract",
    "StoresContract",
    "TokenStoreContract",
    "TransactionContract",
    "agree",
]


class StoresContract(
    RunStoreContract,
    EventStoreContract,
    JournalStoreContract,
    GraphStoreContract,
    ApprovalStoreContract,
    CancelStoreContract,
    PayloadStoreContract,
    SpendingStoreContract,
    ChatStoreContract,
    MemoryStoreContract,
    TokenStoreContract,
    AuditStoreContract,
    PersonStoreContract,
    FaultsContract,
    TransactionContract,
):
    """The suites of all ports in one."""
