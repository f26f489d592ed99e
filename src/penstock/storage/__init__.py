"""What outlives a process.

Adapters of the ports that are declared where they are used. Nothing here is loaded before it is asked for by name.

- open_stores, Stores: all that a service keeps, by URL
- migrate, schema_version, newest_version: the version of a database
- SqliteLedgerStore, PostgresLedgerStore: a budget that several processes share
- StoreCorrupt: a row that cannot be read back
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.storage.postgres_ledger import PostgresLedgerStore
    from penstock.storage.sql.codec import StoreCorrupt
    from penstock.storage.sqlite_ledger import SqliteLedgerStore
    from penstock.storage.stores import Stores, migrate, newest_version, open_stores, schema_version

_HOME = {
    "PostgresLedgerStore": "penstock.storage.postgres_ledger",
    "SqliteLedgerStore": "penstock.storage.sqlite_ledger",
    "StoreCorrupt": "penstock.storage.sql.codec",
    "Stores": "penstock.storage.stores",
    "migrate": "penstock.storage.stores",
    "newest_version": "penstock.storage.stores",
    "open_stores": "penstock.storage.stores",
    "schema_version": "penstock.storage.stores",
}

__all__ = [
    "PostgresLedgerStore",
    "SqliteLedgerStore",
    "StoreCorrupt",
    "Stores",
    "migrate",
    "newest_version",
    "open_stores",
    "schema_version",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'penstock.storage' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value
