"""Stores: databases, ledgers of budgets, and journals of durable runs.

Names are loaded when they are first used, because a database needs its own packages.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.containment.accounts import Account as Account
    from penstock.containment.accounts import Balance as Balance
    from penstock.containment.accounts import Hold as Hold
    from penstock.containment.ledger import Amounts as Amounts
    from penstock.containment.ledger import Ledger as Ledger
    from penstock.containment.ledger import LedgerStore as LedgerStore
    from penstock.containment.ledger import MemoryLedgerStore as MemoryLedgerStore
    from penstock.containment.ledger import TicketRequest as TicketRequest
    from penstock.containment.tickets import Waiting as Waiting
    from penstock.errors import LedgerError as LedgerError
    from penstock.errors import LedgerUnavailable as LedgerUnavailable
    from penstock.hosting.ports import StoreCorrupt as StoreCorrupt
    from penstock.runtime.durable.journal import Journal as Journal
    from penstock.runtime.durable.journal import JournalMissing as JournalMissing
    from penstock.runtime.durable.journal import fork_journal as fork_journal
    from penstock.runtime.durable.keys import display_id as display_id
    from penstock.runtime.durable.keys import entry_node as entry_node
    from penstock.runtime.durable.keys import idempotency_key as idempotency_key
    from penstock.runtime.durable.shared import SharedBudget as SharedBudget
    from penstock.storage.postgres.ledger import PostgresLedgerStore as PostgresLedgerStore
    from penstock.storage.sqlite.ledger import SqliteLedgerStore as SqliteLedgerStore
    from penstock.storage.stores import Stores as Stores
    from penstock.storage.stores import migrate as migrate
    from penstock.storage.stores import newest_version as newest_version
    from penstock.storage.stores import open_stores as open_stores
    from penstock.storage.stores import schema_version as schema_version

_HOME = {
    "Account": "penstock.containment.accounts",
    "Amounts": "penstock.containment.ledger",
    "Balance": "penstock.containment.accounts",
    "Hold": "penstock.containment.accounts",
    "Journal": "penstock.runtime.durable.journal",
    "JournalMissing": "penstock.runtime.durable.journal",
    "Ledger": "penstock.containment.ledger",
    "LedgerError": "penstock.errors",
    "LedgerStore": "penstock.containment.ledger",
    "LedgerUnavailable": "penstock.errors",
    "MemoryLedgerStore": "penstock.containment.ledger",
    "PostgresLedgerStore": "penstock.storage.postgres.ledger",
    "SharedBudget": "penstock.runtime.durable.shared",
    "SqliteLedgerStore": "penstock.storage.sqlite.ledger",
    "StoreCorrupt": "penstock.hosting.ports",
    "Stores": "penstock.storage.stores",
    "TicketRequest": "penstock.containment.ledger",
    "Waiting": "penstock.containment.tickets",
    "display_id": "penstock.runtime.durable.keys",
    "entry_node": "penstock.runtime.durable.keys",
    "fork_journal": "penstock.runtime.durable.journal",
    "idempotency_key": "penstock.runtime.durable.keys",
    "migrate": "penstock.storage.stores",
    "newest_version": "penstock.storage.stores",
    "open_stores": "penstock.storage.stores",
    "schema_version": "penstock.storage.stores",
}

__all__ = [
    "Account",
    "Amounts",
    "Balance",
    "Hold",
    "Journal",
    "JournalMissing",
    "Ledger",
    "LedgerError",
    "LedgerStore",
    "LedgerUnavailable",
    "MemoryLedgerStore",
    "PostgresLedgerStore",
    "SharedBudget",
    "SqliteLedgerStore",
    "StoreCorrupt",
    "Stores",
    "TicketRequest",
    "Waiting",
    "display_id",
    "entry_node",
    "fork_journal",
    "idempotency_key",
    "migrate",
    "newest_version",
    "open_stores",
    "schema_version",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'penstock.stores' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
