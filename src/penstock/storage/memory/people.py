"""The data of a person, in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.nodes.memory import space_of_owner
from penstock.storage import codec
from penstock.storage.memory.approvals import MemoryApprovalStore
from penstock.storage.memory.audit import MemoryAuditStore
from penstock.storage.memory.chats import MemoryChatStore
from penstock.storage.memory.graphs import MemoryGraphStore
from penstock.storage.memory.memories import InProcessMemory
from penstock.storage.memory.runs import MemoryRunStore
from penstock.storage.memory.spending import GROUP, MemorySpendingStore
from penstock.storage.memory.tokens import MemoryTokenStore
from penstock.storage.rules import check_nothing_owned


class MemoryPersonStore:
    """Reads and changes the other stores in memory; it awaits nothing, so that each call is atomic."""

    def __init__(
        self,
        runs: MemoryRunStore,
        chats: MemoryChatStore,
        memories: InProcessMemory,
        graphs: MemoryGraphStore,
        approvals: MemoryApprovalStore,
        spending: MemorySpendingStore,
        tokens: MemoryTokenStore,
        audit: MemoryAuditStore,
    ) -> None:
        self._runs = runs
        self._chats = chats
        self._memories = memories
        self._graphs = graphs
        self._approvals = approvals
        self._spending = spending
        self._tokens = tokens
        self._audit = audit

    async def places(self, name: str) -> Mapping[str, int]:
        return self._places(codec.lookup_key(name))

    async def attachments(self, name: str) -> Sequence[str]:
        return sorted(id for id, (found, _) in self._chats._attachments.items() if found.owner == name)

    async def forget(self, name: str, pseudonym: str) -> Mapping[str, int]:
        codec.name("name", name), codec.name("pseudonym", pseudonym)
        found = self._places(name)
        check_nothing_owned(name, found)
        for id in await self.attachments(name):
            del self._chats._attachments[id]
            self._chats._uses.pop(id, None)
        self._memories._spaces.pop(space_of_owner(name), None)
        for _, entries, key, record, field in self._named(name):
            change = {field: pseudonym}
            entries[key] = record._replace(**change) if hasattr(record, "_replace") else replace(record, **change)
        removed = self._spending._removed  # its keys have the owner too
        self._spending._removed = {tuple(getattr(one, part) for part in GROUP): one for one in removed.values()}
        return found

    def _places(self, name: str) -> Mapping[str, int]:
        found = {
            "runs.owner": sum(run.owner == name for run in self._runs._runs.values()),
            "chats.owner": sum(chat.record.owner == name for chat in self._chats._chats.values()),
            "attachments.owner": sum(one.owner == name for one, _ in self._chats._attachments.values()),
            "memories.owner": len(self._memories._spaces.get(space_of_owner(name), ())),
        }
        for place, *_ in self._named(name):
            found[place] = found.get(place, 0) + 1
        return {place: count for place, count in found.items() if count}

    def _named(self, name: str) -> Iterator[tuple[str, Any, Any, Any, str]]:
        """Yield each record that has the name: its place, its container and key, and the field.

        A record is read anew for each of its fields, since the caller replaces it.
        """
        versions: list[tuple[str, Any]] = [("graph_versions", entries) for entries in self._graphs._graphs.values()]
        shares: list[tuple[str, Any]] = [("spending", entries) for entries in self._spending._shares.values()]
        for table, entries in (
            ("tokens", self._tokens._tokens),
            ("approvals", self._approvals._approvals),
            ("audit", self._audit._entries),
            ("spending", self._spending._removed),
            *versions,
            *shares,
        ):
            keys: Any = list(entries) if isinstance(entries, dict) else range(len(entries))
            for key in keys:
                for field in FIELDS[table]:
                    record = entries[key]
                    if getattr(record, field) == name:
                        yield f"{table}.{field}", entries, key, record, field
        for graph in self._graphs._graphs.values():  # all versions have the owner of their graph
            if graph and graph[0].owner == name:
                yield "graphs.owner", graph, 0, graph[0], "owner"
                for at in range(1, len(graph)):
                    graph[at] = replace(graph[at], owner=graph[0].owner)


FIELDS = {
    "tokens": ("name", "created_by", "revoked_by"),
    "approvals": ("answered_by",),
    "audit": ("actor", "owner"),
    "spending": ("owner",),
    "graph_versions": ("saved_by",),
}
