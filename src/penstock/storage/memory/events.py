"""The events and journals of runs, in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any

from penstock.hosting.ports import HostedEvent
from penstock.notify import Notifier, wait_until
from penstock.runtime.durable.ports import JournalEntry
from penstock.storage import codec
from penstock.storage.codec import MAX_NUMBER
from penstock.storage.memory.record_codec import RecordCodec, decode_json, is_flat
from penstock.storage.memory.runs import MemoryRunStore
from penstock.storage.rules import JOURNAL_KINDS, check_next_events, different_event

StoredEvent = tuple[int, int, str, object]
"""A stored `HostedEvent`. Does not use `RecordCodec`, for speed: a run emits a dozen, and each is stored and read."""
_event: Callable[[Iterable[Any]], HostedEvent] = partial(tuple.__new__, HostedEvent)
"""Creates an event from its values, without a Python call for each."""
ENTRY = RecordCodec(
    JournalEntry,
    names=("key",),
    numbers=("cost_nanos", "tokens_in", "tokens_out", "at_ms"),
    documents=("value",),
    choices={"kind": JOURNAL_KINDS},
)


class MemoryEventStore:
    """Events by run and seq."""

    def __init__(self, runs: MemoryRunStore | None = None) -> None:
        self._runs = runs or MemoryRunStore()
        self._runs.on_remove(self._remove_run)
        self._events: dict[str, list[StoredEvent]] = {}
        self._notifier = Notifier()

    async def append(self, run_id: str, epoch: int, events: Sequence[HostedEvent]) -> None:
        codec.name("run_id", run_id)
        encoded = [*map(_encode, events)]
        self._runs.fence(run_id, epoch)
        stored = self._events.get(run_id, [])
        new = encoded[_check_known(run_id, stored, encoded) :]
        if new:
            known = len(stored)
            self._runs.undo.step(lambda: stored.__delitem__(slice(known, None)))
            self._events.setdefault(run_id, stored).extend(new)
            self._notifier.notify(run_id)

    async def read(
        self, run_id: str, after_seq: int = 0, limit: int = 1_000, types: Sequence[str] = ()
    ) -> Sequence[HostedEvent]:
        codec.limit(limit)
        first = max(after_seq, 0)
        stored = self._events.get(run_id, [])
        chosen = (event for event in stored[first:] if event[2] in types) if types else stored[first : first + limit]
        return [
            _event((seq, at_ms, kind, {**data} if type(data) is dict else decode_json(data)))
            for seq, at_ms, kind, data in islice(chosen, limit)
        ]

    async def last_seq(self, run_id: str) -> int:
        return self._last_seq(run_id)

    async def wait(self, run_id: str, after_seq: int, timeout_s: float) -> bool:
        return await wait_until(
            self._notifier, run_id, lambda: self._last_seq(run_id) > max(after_seq, 0), codec.timeout(timeout_s)
        )

    def _last_seq(self, run_id: str) -> int:
        return len(self._events.get(run_id, ()))

    def _remove_run(self, run_id: str) -> None:
        self._runs.undo.entry(self._events, run_id)
        self._events.pop(run_id, None)


def _encode(event: HostedEvent) -> StoredEvent:
    """Encode an event; the codec checks numbers only if they are outside the usual range."""
    seq, at_ms, kind, data = event
    if type(seq) is not int or not 0 <= seq <= MAX_NUMBER:
        codec.number("seq", seq)
    if type(at_ms) is not int or not 0 <= at_ms <= MAX_NUMBER:
        codec.number("at_ms", at_ms)
    codec.name("type", kind)
    if type(data) is dict and is_flat(data):
        return seq, at_ms, kind, {**data}
    return seq, at_ms, kind, (codec.encode_object("data", data),)


def _check_known(run_id: str, stored: Sequence[StoredEvent], events: Sequence[StoredEvent]) -> int:
    """Return how many of the events exist already; Conflict if there is a gap or an existing event differs."""
    if not events:
        return 0
    check_next_events(run_id, len(stored), [event[0] for event in events])
    first = events[0][0]
    for known, event in zip(stored[first - 1 :], events, strict=False):
        if known[:3] != event[:3] or not codec.is_same(decode_json(known[3]), decode_json(event[3])):
            raise different_event(run_id, event[0])
    return len(stored) - first + 1


class MemoryJournalStore:
    """Entries by run and key."""

    def __init__(self, runs: MemoryRunStore | None = None) -> None:
        self._runs = runs or MemoryRunStore()
        self._runs.on_remove(self._remove_run)
        self._runs.on_begin(self._begin)
        self._entries: dict[str, dict[str, JournalEntry]] = {}

    async def load(self, run_id: str) -> Sequence[JournalEntry]:
        return [ENTRY.decode(entry) for entry in self._entries.get(run_id, {}).values()]

    async def append(self, run_id: str, entries: Sequence[JournalEntry], *, epoch: int = 0) -> None:
        codec.name("run_id", run_id)
        encoded = [ENTRY.encode(entry) for entry in entries]
        self._runs.fence(run_id, epoch)
        self._put(run_id, encoded)

    async def shorten(self, run_id: str, entries: Sequence[JournalEntry], *, epoch: int = 0) -> None:
        codec.name("run_id", run_id)
        encoded = [ENTRY.encode(entry) for entry in entries]
        self._runs.fence(run_id, epoch)
        entries_of_run = self._entries.get(run_id, {})
        for entry in encoded:
            if entry.key in entries_of_run:
                self._runs.undo.entry(entries_of_run, entry.key)
                entries_of_run[entry.key] = entry

    async def forget(self, run_id: str) -> None:
        self._remove_run(run_id)

    def _begin(self, run_id: str, entries: Sequence[JournalEntry]) -> None:
        self._remove_run(run_id)  # remove leftovers of an earlier run with this id
        self._put(run_id, [ENTRY.encode(entry) for entry in entries])

    def _put(self, run_id: str, encoded: Sequence[JournalEntry]) -> None:
        entries_of_run = self._entries.setdefault(run_id, {})
        for entry in encoded:
            if entry.key not in entries_of_run:
                self._runs.undo.entry(entries_of_run, entry.key)
                entries_of_run[entry.key] = entry

    def _remove_run(self, run_id: str) -> None:
        self._runs.undo.entry(self._entries, run_id)
        self._entries.pop(run_id, None)
