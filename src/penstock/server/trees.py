"""Call trees of runs as columns, kept for the next request: reading a long log again takes seconds."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from penstock.hosting.call_columns import TYPES, CallColumns
from penstock.hosting.ports import EventStore

PAGE = 1_000
"""Number of events read at once."""
MAX_CACHED = 16
"""Maximum number of trees kept for the next reading."""
MAX_CACHED_CALLS = 200_000
"""Maximum number of calls of all trees that are kept."""


class TreeCache:
    """Caches trees, so that only newer events are read. The caller checks who may see the run."""

    def __init__(self) -> None:
        self._trees: OrderedDict[str, CallColumns] = OrderedDict()
        self._locks: dict[str, asyncio.Lock] = {}

    async def tree(self, events: EventStore, run_id: str) -> CallColumns:
        """Return the tree of a run up to its newest event."""
        lock = self._locks.setdefault(run_id, asyncio.Lock())  # of concurrent requests, one folds
        try:
            async with lock:
                tree = self._trees.pop(run_id, None) or CallColumns()
                newest = await events.last_seq(run_id)
                while page := await events.read(run_id, tree.last_seq, PAGE, TYPES):
                    tree.add(page)
                    await asyncio.sleep(0)  # a long log must not block the event loop
                tree.last_seq = max(tree.last_seq, newest)
                self._keep(run_id, tree)
                return tree
        finally:
            if not lock.locked():
                self._locks.pop(run_id, None)

    def _keep(self, run_id: str, tree: CallColumns) -> None:
        self._trees[run_id] = tree
        while len(self._trees) > MAX_CACHED or sum(map(len, self._trees.values())) > MAX_CACHED_CALLS:
            self._trees.popitem(last=False)
