"""Events of several runs, and changes of lists, on one stream: a browser has six connections for all its tabs.

A subscriber is a position in each log, as in `sse`. The id of every event has the positions of all runs, so that a
client that reconnects with it misses nothing and sees nothing twice. A run that has ended stays subscribed: it may be
resumed. Lists have no positions: a subscriber gets their state first, and again after each reconnect, then the changes.

Text may be joined: the first piece is sent at once, and what follows within `coalesce_s` as one event. Until it is
sent, the positions in ids stay before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from penstock.hosting.ports import HostedEvent
from penstock.server.joined_text import Group, TextJoiner, group_json
from penstock.server.sse import CHUNK_BYTES, HEARTBEAT, PAGE, RETRY_MS, LogStores, first_done, framed

MAX_STREAM_RUNS = 50
"""Maximum number of runs on one stream."""
POLL_INTERVAL_S = 1.0
"""Interval at which lists are read that do not change."""

Changes = Callable[[], Awaitable[bytes]]
"""Reads a list and returns frames of its changes since the last reading; empty if there are none."""


@dataclass(slots=True)
class Topic:
    """A list that is read at intervals."""

    changes: Changes
    after_change_s: float = POLL_INTERVAL_S
    """Time until it is read again after a change; the shortest between two changes."""
    due_s: float = 0.0
    """When to read it next, on the clock of the event loop."""


@dataclass(slots=True)
class _Log:
    """A position in the log of one run."""

    run_id: str
    sent: int
    """The last event that was sent, or left out because of its type."""
    read: int
    """The last event that was read: those after `sent` wait in `joiner`."""
    joiner: TextJoiner = field(default_factory=TextJoiner)
    due_s: float = 0.0
    """When text is sent that waits, or that comes."""


class Multiplex:
    """The events of the runs after the given places, of these types if any are given, and the topics."""

    def __init__(
        self,
        stores: LogStores,
        runs: Sequence[str],
        places: Sequence[int],
        *,
        heartbeat_s: float,
        types: Collection[str] = (),
        topics: Sequence[Topic] = (),
        follows: bool = True,
        coalesce_s: float = 0.0,
    ) -> None:
        self._stores = stores
        self._logs = [_Log(run_id, place, place) for run_id, place in zip(runs, places, strict=True)]
        self._heartbeat_s = heartbeat_s
        self._types = types
        self._topics = topics
        self._follows = follows
        self._coalesce_s = coalesce_s
        self._loop = asyncio.get_running_loop()
        self._chunk = bytearray()
        """Frames that were not handed to the client yet."""

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield frames; ends only when the client disconnects or the server closes, or without `follows` after all
        that exists now.
        """
        yield f"retry: {RETRY_MS}\n\n".encode()
        sent_s = self._loop.time()
        while True:
            for log in self._logs:
                while await self._read(log):
                    if len(self._chunk) >= CHUNK_BYTES:
                        yield self._take()
                        sent_s = self._loop.time()
            self._flush_due()
            for topic in self._topics:
                if self._loop.time() >= topic.due_s:
                    changes = await topic.changes()
                    self._chunk += changes
                    topic.due_s = self._loop.time() + (topic.after_change_s if changes else POLL_INTERVAL_S)
            if not self._chunk and self._loop.time() - sent_s >= self._heartbeat_s:
                self._chunk += HEARTBEAT
            if self._chunk:
                yield self._take()
                sent_s = self._loop.time()
            if not self._follows:
                return
            await self._news(sent_s + self._heartbeat_s)

    def rest(self) -> bytes:
        """Return the frames that were not yielded, and the text that waits, when the server closes."""
        for log in self._logs:
            self._send(log, log.joiner.flush())
        return self._take()

    def _take(self) -> bytes:
        # Cleared before it is yielded: what the client was handed is not part of the rest.
        taken, self._chunk = bytes(self._chunk), bytearray()
        return taken

    async def _read(self, log: _Log) -> bool:
        """Add the frames of the next events of a run; False if there are no more."""
        page = await self._stores.events.read(log.run_id, log.read, PAGE)
        for event in page:
            self._add(log, event)
            if len(self._chunk) >= CHUNK_BYTES:
                return True
        if page:
            await asyncio.sleep(0)
        return bool(page)

    def _add(self, log: _Log, event: HostedEvent) -> None:
        log.read = event.seq
        if self._types and event.type not in self._types:
            self._send(log, log.joiner.flush())
            log.sent = event.seq
        else:
            self._send(log, log.joiner.add(event) if self._coalesce_s else [(event,)])

    def _send(self, log: _Log, groups: Iterable[Group]) -> None:
        for group in groups:
            log.sent = group[-1].seq
            data = {"run_id": log.run_id, **group_json(group)}
            id = ",".join(str(each.sent) for each in self._logs)
            self._chunk += framed(data, event=group[-1].type, id=id)

    def _flush_due(self) -> None:
        """Send the text that has waited long enough; all of it, if the stream ends now."""
        for log in self._logs:
            if log.joiner.is_waiting and (self._loop.time() >= log.due_s or not self._follows):
                self._send(log, log.joiner.flush())
                log.due_s = self._loop.time() + self._coalesce_s

    async def _news(self, due_s: float) -> None:
        """Wait until one of the runs has a new event, or something is due."""
        due_s = min([due_s, *(topic.due_s for topic in self._topics)])
        due_s = min([due_s, *(log.due_s for log in self._logs if log.joiner.is_waiting)])
        timeout_s = max(0.0, due_s - self._loop.time())
        if not self._logs:
            await asyncio.sleep(timeout_s)
            return
        waits = [asyncio.ensure_future(self._stores.events.wait(log.run_id, log.read, timeout_s)) for log in self._logs]
        for wait in await first_done(*waits):
            if not wait.cancelled():
                wait.result()
