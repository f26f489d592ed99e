"""What outlives a process.

Adapters of the ports that are declared where they are used. Nothing here is loaded before it is imported by name.
"""

from __future__ import annotations

from penstock.storage.sqlite_ledger import SqliteLedgerStore

__all__ = ["SqliteLedgerStore"]
