"""Persistent storage.

Adapters for the ports, which are declared where they are used. Each name is imported on first use.

- open_stores, Stores: all stores of a service, by URL
- migrate, schema_version, newest_version: the schema version of a database
- SqliteLedgerStore, PostgresLedgerStore: a budget that several processes share
- StoreCorrupt: a row that cannot be decoded
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.hosting.ports import StoreCorrupt
    from penstock.storage.postgres.ledger import PostgresLedgerStore
    from penstock.storage.sqlite.ledger import SqliteLedgerStore
    from penstock.storage.stores import Stores, migrate, newest_version, open_stores, schema_version

_HOME = {
    "PostgresLedgerStore": "penstock.storage.postgres.ledger",
    "SqliteLedgerStore": "penstock.storage.sqlite.ledger",
    "StoreCorrupt": "penstock.hosting.ports",
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
