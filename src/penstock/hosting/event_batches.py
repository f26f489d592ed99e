"""The events that all runs of a host have emitted in the last few milliseconds, written in one transaction.

A transaction costs more than the event in it. One timer for the host gathers the events of its runs, longer when many
runs are at work than when few are; each run keeps its own buffer, its own sequence numbers and its own readers.

The transaction appends for each run under that run's own claim, so it checks everything that a separate one checks. If
it fails, whatever the reason, none of it is stored, and each run writes its own events by itself, with its own retries:
a run that was taken over, or an event that cannot be stored, delays others by one attempt and harms none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from penstock.hosting.ports import HostedEvent, TransactionStores
from penstock.runtime.durable import failpoints

T = TypeVar("T")
Unit = Callable[[Any], Coroutine[Any, Any, T]]
GATHER_S = 0.01
"""How long the first event after a pause is delayed to batch it with others."""
BUSY_GATHER_S = 0.025
"""The same while more than `FEW` runs emit events."""
FEW = 4
MAX_INLINE_EVENTS = 32
"""Maximum number of events written in a transaction on the event loop."""


class Transact(Protocol):
    """Runs a unit of work in one transaction; see `HostStores.transaction`."""

    async def __call__(self, unit: Unit[T], *, inline: bool = False) -> T: ...


class Log(Protocol):
    """The event writer of a run."""

    run_id: str
    epoch: int

    def begin_batch(self) -> list[HostedEvent]:
        """Return the events to write now; the writer writes none itself until one of the next two is called."""

    def end_batch(self, batch: list[HostedEvent]) -> None:
        """Called when the events are stored."""

    def write_alone(self) -> None:
        """Called when the events are not stored; the writer writes them itself."""


Batch = tuple[Log, list[HostedEvent]]


class EventBatches:
    """Writes the events of several event writers together."""

    def __init__(self, transact: Transact) -> None:
        self._transact = transact
        self._due: dict[Log, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_busy = False
        self._writing: set[asyncio.Task[None]] = set()

    def schedule(self, log: Log) -> None:
        """Write the events of this log with those of others, soon."""
        self._due[log] = None
        if self._timer is None:
            gather_s = BUSY_GATHER_S if self._is_busy else GATHER_S
            self._timer = asyncio.get_running_loop().call_later(gather_s, self._fire)

    def cancel(self, log: Log) -> None:
        """Leave the events of this log to their writer."""
        self._due.pop(log, None)

    async def close(self) -> None:
        """Wait until nothing is being written."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._writing:
            await asyncio.wait(self._writing)

    def _fire(self) -> None:
        self._timer = None
        due, self._due = self._due, {}
        self._is_busy = len(due) > FEW
        batches = [(log, events) for log in due if (events := log.begin_batch())]
        if len(batches) == 1:
            batches[0][0].write_alone()
        elif batches:
            task = asyncio.get_running_loop().create_task(self._write(batches), name="logs of several runs")
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    async def _write(self, batches: list[Batch]) -> None:
        batches.sort(key=lambda batch: batch[0].run_id)  # hosts that lock the same runs do so in the same order
        left = batches
        try:
            while left:
                portion = _portion(left)
                left = left[len(portion) :]
                await self._write_portion(portion)
        finally:
            for log, _ in left:  # this task was cancelled
                log.write_alone()

    async def _write_portion(self, portion: Sequence[Batch]) -> None:
        is_stored = False
        try:
            if failpoints.hook is not None:
                failpoints.hook("events.before_append")
            await self._append(portion)
            if failpoints.hook is not None:
                failpoints.hook("events.after_append")
            is_stored = True
        except Exception:
            pass  # each writer meets its own error, if it has one
        finally:
            for log, events in portion:
                if is_stored:
                    log.end_batch(events)
                else:
                    log.write_alone()

    async def _append(self, portion: Sequence[Batch]) -> None:
        async def unit(stores: TransactionStores) -> None:
            for log, events in portion:
                await stores.events.append(log.run_id, log.epoch, events)

        await self._transact(unit, inline=sum(len(events) for _, events in portion) <= MAX_INLINE_EVENTS)


def _portion(batches: Sequence[Batch]) -> Sequence[Batch]:
    """Return the first batches, as many as one transaction may write on the event loop; at least one."""
    count = 0
    for at, (_, events) in enumerate(batches):
        count += len(events)
        if count > MAX_INLINE_EVENTS and at:
            return batches[:at]
    return batches
