"""The audit log in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.hosting.audit import AUDIT_SOURCES, NO_AUDIT_FILTER, AuditFilter, AuditRecord
from penstock.storage import codec
from penstock.storage.memory.record_codec import RecordCodec
from penstock.storage.memory.undo import UndoLog
from penstock.storage.rules import check_audit_filter

ENTRY = RecordCodec(
    AuditRecord,
    names=("id", "actor", "action", "target", "owner"),
    numbers=("at_ms",),
    documents=("details",),
    objects=("details",),
    choices={"source": AUDIT_SOURCES},
)


class MemoryAuditStore:
    """Entries by id."""

    def __init__(self, undo: UndoLog | None = None) -> None:
        self._undo = undo or UndoLog()
        self._entries: dict[str, AuditRecord] = {}

    async def append(self, entry: AuditRecord) -> None:
        encoded = ENTRY.encode(entry)
        if entry.id not in self._entries:
            self._set(encoded)

    async def list(
        self, matching: AuditFilter = NO_AUDIT_FILTER, *, before: str | None = None, limit: int = 100
    ) -> Sequence[AuditRecord]:
        codec.limit(limit)
        check_audit_filter(matching)
        newest = sorted(self._entries.values(), key=_age, reverse=True)
        if before is not None:
            last = self._entries.get(before)
            newest = [] if last is None else [entry for entry in newest if _age(entry) < _age(last)]
        return [ENTRY.decode(entry) for entry in newest if _matches(entry, matching)][:limit]

    async def rename(self, name: str, pseudonym: str) -> int:
        codec.name("name", name), codec.name("pseudonym", pseudonym)
        named = [entry for entry in self._entries.values() if name in (entry.actor, entry.owner)]
        for entry in named:
            actor, owner = (pseudonym if found == name else found for found in (entry.actor, entry.owner))
            self._set(replace(entry, actor=actor, owner=owner))
        return len(named)

    async def remove_before(self, before_ms: int, *, limit: int = 1_000) -> int:
        codec.number("before_ms", before_ms), codec.limit(limit)
        old = sorted((entry for entry in self._entries.values() if entry.at_ms < before_ms), key=_age)[:limit]
        for entry in old:
            self._undo.entry(self._entries, entry.id)
            del self._entries[entry.id]
        return len(old)

    def _set(self, entry: AuditRecord) -> None:
        self._undo.entry(self._entries, entry.id)
        self._entries[entry.id] = entry


def _age(entry: AuditRecord) -> tuple[int, str]:
    return entry.at_ms, entry.id


def _matches(entry: AuditRecord, wanted: AuditFilter) -> bool:
    return (
        (wanted.actor is None or wanted.actor in (entry.actor, entry.owner))
        and (wanted.action is None or f"{entry.action}.".startswith(f"{wanted.action}."))
        and (wanted.target is None or wanted.target == entry.target)
        and (wanted.since_ms is None or entry.at_ms >= wanted.since_ms)
        and (wanted.until_ms is None or entry.at_ms < wanted.until_ms)
    )
