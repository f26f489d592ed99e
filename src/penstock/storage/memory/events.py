"""What runs told and what they had done, in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from penstock.hosting.ports import Conflict
from penstock.hosting.records import HostedEvent
from penstock.runtime.durable.ports import JournalEntry
from penstock.storage.memory.bells import Bells
from penstock.storage.memory.runs import MemoryRunStore
from penstock.storage.memory.shapes import Shape, is_flat, is_same, to_give
from penstock.storage.sql import codec
from penstock.storage.sql.codec import MAX_NUMBER

Told = tuple[int, int, str, object]
"""A `HostedEvent` as it is kept, without a `Shape`: a run tells a dozen, and each is kept and read."""
_event: Callable[[Iterable[Any]], HostedEvent] = partial(tuple.__new__, HostedEvent)
"""Makes an event of its values, without a call of Python for each."""
ENTRY = Shape(
    JournalEntry,
    names=("key",),
    numbers=("cost_nanos", "tokens_in", "tokens_out", "at_ms"),
    documents=("value",),
    choices={"kind": ("node", "llm", "tool", "value")},
)


class MemoryEventStore:
    """Events by run and seq."""

    def __init__(self, runs: MemoryRunStore | None = None) -> None:
        self._runs = runs or MemoryRunStore()
        self._runs.on_forget(self._forget)
        self._events: dict[str, list[Told]] = {}
        self._bells = Bells()

    async def append(self, run_id: str, epoch: int, events: Sequence[HostedEvent]) -> None:
        codec.name("run_id", run_id)
        kept = [*map(_kept, events)]
        self._runs.fence(run_id, epoch)
        told = self._events.get(run_id, [])
        new = kept[_check_known(run_id, told, kept) :]
        if new:
            self._events.setdefault(run_id, told).extend(new)
            self._bells.ring(run_id)

    async def read(self, run_id: str, after_seq: int = 0, limit: int = 1_000) -> Sequence[HostedEvent]:
        codec.limit(limit)
        first = max(after_seq, 0)
        return [
            _event((seq, at_ms, kind, {**kept} if type(kept) is dict else to_give(kept)))
            for seq, at_ms, kind, kept in self._events.get(run_id, [])[first : first + limit]
        ]

    async def last_seq(self, run_id: str) -> int:
        return self._last_seq(run_id)

    async def wait(self, run_id: str, after_seq: int, timeout_s: float) -> bool:
        return await self._bells.until(run_id, lambda: self._last_seq(run_id) > max(after_seq, 0), timeout_s)

    def _last_seq(self, run_id: str) -> int:
        return len(self._events.get(run_id, ()))

    def _forget(self, run_id: str) -> None:
        self._events.pop(run_id, None)


def _kept(event: HostedEvent) -> Told:
    """The event as it is kept; numbers are asked about only if they are out of the ordinary."""
    seq, at_ms, kind, data = event
    if type(seq) is not int or not 0 <= seq <= MAX_NUMBER:
        codec.number("seq", seq)
    if type(at_ms) is not int or not 0 <= at_ms <= MAX_NUMBER:
        codec.number("at_ms", at_ms)
    codec.name("type", kind)
    if type(data) is dict and is_flat(data):
        return seq, at_ms, kind, {**data}
    return seq, at_ms, kind, (codec.object_document("data", data),)


def _check_known(run_id: str, told: Sequence[Told], events: Sequence[Told]) -> int:
    """How many of the events are there already; Conflict if they are not the next, or others are in their place."""
    if not events:
        return 0
    first, last = events[0][0], events[-1][0]
    if not 1 <= first <= len(told) + 1 or [event[0] for event in events] != [*range(first, first + len(events))]:
        count = f"events {first} to {last} of run {run_id!r}"
        raise Conflict(f"{count} are not the next ones in a row: the last one there is {len(told)}; count on from it")
    for known, event in zip(told[first - 1 :], events, strict=False):
        if known[:3] != event[:3] or not is_same(to_give(known[3]), to_give(event[3])):
            raise Conflict(f"another event {event[0]} of run {run_id!r} is there; read the last seq and count on")
    return len(told) - first + 1


class MemoryJournalStore:
    """Entries by run and key."""

    def __init__(self, runs: MemoryRunStore | None = None) -> None:
        self._runs = runs or MemoryRunStore()
        self._runs.on_forget(self._forget)
        self._runs.on_begin(self._begin)
        self._entries: dict[str, dict[str, JournalEntry]] = {}

    async def load(self, run_id: str) -> Sequence[JournalEntry]:
        return [ENTRY.given(entry) for entry in self._entries.get(run_id, {}).values()]

    async def append(self, run_id: str, entries: Sequence[JournalEntry], *, epoch: int = 0) -> None:
        codec.name("run_id", run_id)
        kept = [ENTRY.kept(entry) for entry in entries]
        self._runs.fence(run_id, epoch)
        self._put(run_id, kept)

    async def shorten(self, run_id: str, entries: Sequence[JournalEntry], *, epoch: int = 0) -> None:
        codec.name("run_id", run_id)
        kept = [ENTRY.kept(entry) for entry in entries]
        self._runs.fence(run_id, epoch)
        written = self._entries.get(run_id, {})
        written.update({entry.key: entry for entry in kept if entry.key in written})

    async def forget(self, run_id: str) -> None:
        self._forget(run_id)

    def _begin(self, run_id: str, entries: Sequence[JournalEntry]) -> None:
        self._forget(run_id)  # nothing that was left under its id
        self._put(run_id, [ENTRY.kept(entry) for entry in entries])

    def _put(self, run_id: str, kept: Sequence[JournalEntry]) -> None:
        written = self._entries.setdefault(run_id, {})
        for entry in kept:
            written.setdefault(entry.key, entry)

    def _forget(self, run_id: str) -> None:
        self._entries.pop(run_id, None)
