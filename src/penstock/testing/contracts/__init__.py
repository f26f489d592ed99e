"""Contracts of ports: tests that every implementation inherits.

- LedgerStoreContract: accounts by name, holds by key
- `penstock.testing.contracts.stores`: runs, events, journals, graphs, approvals, cancels, chats and memories of
  a service
"""

from penstock.testing.contracts.ledger_store import LedgerStoreContract

__all__ = ["LedgerStoreContract"]
