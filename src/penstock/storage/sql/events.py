"""What happened to runs, in SQL."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.hosting.ports import Conflict
from penstock.hosting.records import HostedEvent
from penstock.storage.databases.port import FEW, Database, Row, Transaction, Value
from penstock.storage.sql import codec
from penstock.storage.sql.runs import check_claim

INSERT = "INSERT INTO events (run_id, seq, at_ms, type, data) VALUES (?, ?, ?, ?, ?)"
SELECT = "SELECT seq, at_ms, type, data FROM events WHERE run_id = ? AND seq > ? ORDER BY seq LIMIT ?"
SELECT_LAST = "SELECT coalesce(max(seq), 0) FROM events WHERE run_id = ?"


class SqlEventStore:
    """An `EventStore` over a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def append(self, run_id: str, epoch: int, events: Sequence[HostedEvent]) -> None:
        codec.name("run_id", run_id)
        rows = [(run_id, *_written(event)) for event in events]

        async def act(transaction: Transaction) -> None:
            await check_claim(transaction, run_id, epoch, transaction.dialect.update_lock)
            if not events:
                return
            last = await _last(transaction, run_id)
            _check_next(run_id, last, events)
            known = last - events[0].seq + 1
            if known > 0:
                await _check_told(transaction, run_id, events[:known])
            await transaction.run_many(INSERT, rows[known:])
            transaction.ring(f"run:{run_id}")

        await self._database.write(act, brief=len(events) <= FEW)

    async def read(self, run_id: str, after_seq: int = 0, limit: int = 1_000) -> Sequence[HostedEvent]:
        values = codec.sought(run_id), _seq(after_seq), codec.limit(limit)

        async def act(transaction: Transaction) -> Sequence[HostedEvent]:
            return [_event(run_id, row) for row in await transaction.rows(SELECT, *values)]

        return await self._database.read(act, brief=True)

    async def last_seq(self, run_id: str) -> int:
        return await self._database.read(lambda transaction: _last(transaction, codec.sought(run_id)), brief=True)

    async def wait(self, run_id: str, after_seq: int, timeout_s: float) -> bool:
        loop = asyncio.get_running_loop()
        until = loop.time() + codec.timeout(timeout_s)
        while True:
            seen = self._database.rung
            if await self.last_seq(run_id) > _seq(after_seq):
                return True
            if (left := until - loop.time()) <= 0:
                return False
            await self._database.wait(f"run:{run_id}", seen, left)


def _written(event: HostedEvent) -> tuple[Value, ...]:
    return (
        codec.number("seq", event.seq),
        codec.number("at_ms", event.at_ms),
        codec.name("type", event.type),
        codec.object_document("data", event.data),
    )


def _event(run_id: str, row: Row) -> HostedEvent:
    seq, at_ms, type, data = row
    return HostedEvent(seq, at_ms, type, codec.read_object("events", f"{run_id}/{seq}", data))


async def _last(transaction: Transaction, run_id: str) -> int:
    row = await transaction.row(SELECT_LAST, run_id)
    assert row is not None, "a maximum is one row"
    return int(row[0])


def _check_next(run_id: str, last: int, events: Sequence[HostedEvent]) -> None:
    first = events[0].seq
    if not 1 <= first <= last + 1 or [event.seq for event in events] != [*range(first, first + len(events))]:
        which = f"events {first} to {events[-1].seq} of run {run_id!r}"
        raise Conflict(f"{which} are not the next ones in a row: the last one there is {last}; count on from it")


async def _check_told(transaction: Transaction, run_id: str, events: Sequence[HostedEvent]) -> None:
    """Conflict if other events are there in place of these."""
    rows = await transaction.rows(SELECT, run_id, events[0].seq - 1, len(events))
    for row, event in zip(rows, events, strict=True):
        if _canonical(_event(run_id, row)) != _canonical(event):
            raise Conflict(f"another event {event.seq} of run {run_id!r} is there; read the last seq and count on")


def _canonical(event: HostedEvent) -> tuple[int, int, str, str]:
    return event.seq, event.at_ms, event.type, codec.canonical("data", event.data)


def _seq(after: int) -> int:
    return min(max(after, 0), codec.MAX_NUMBER)
