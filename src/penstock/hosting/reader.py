"""Follow the events of a run, whichever process executes it.

A reader is a position in the event log: it holds one batch of events and nothing is queued for it, so that a slow
reader costs other readers and the run nothing. For a run active on this host, the reader waits for the run's event
writer and reads recent events from its memory; otherwise it waits for the store and reads from there.

The last event may be readable before the status is changed. A reader holds it back until the status agrees, so that a
client that has received the event finds the run in the status it reports.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import suppress

from penstock import checks
from penstock.hosting.control import RunNotFound
from penstock.hosting.event_data import LAST_EVENTS
from penstock.hosting.event_pipeline import EventWriter
from penstock.hosting.host_context import HostContext
from penstock.hosting.hosted_run import HostedRun
from penstock.hosting.ports import ENDED, PARKED, HostedEvent, RunRecord, StoreUnavailable, retry_unavailable

BATCH = 200
POLL_INTERVAL_S = 1.0
"""How long a reader waits before it checks whether the run still exists."""
SOON_S = 0.02
RESTING = ENDED | PARKED


class RunLogs:
    """Runs and events for one follower, from memory while this host works on a run, else from the stores.

    For followers that stop when a run has ended: they do not see a later resume. Everything in memory is already
    stored.
    """

    def __init__(self, context: HostContext, active: Mapping[str, HostedRun]) -> None:
        self._stores = context.stores
        self._active = active
        self._hosted: HostedRun | None = None
        """The run that was read last, also after it has left this host."""

    @property
    def runs(self) -> RunLogs:
        """Read runs."""
        return self

    @property
    def events(self) -> RunLogs:
        """Read events."""
        return self

    async def get(self, run_id: str) -> RunRecord | None:
        """Return a run; if this host works on it, only its status is up to date."""
        hosted = self._here(run_id)
        if hosted is None:
            return await self._stores.runs.get(run_id)
        ended = hosted.decided if hosted.log is not None and hosted.log.is_ended else None
        return hosted.run if ended is None else hosted.run._replace(status=ended)

    async def read(self, run_id: str, after_seq: int = 0, limit: int = 1_000) -> Sequence[HostedEvent]:
        """Return at most `limit` events after `after_seq`."""
        hosted = self._here(run_id)
        recent = None if hosted is None or hosted.log is None else hosted.log.after(after_seq, limit)
        return await self._stores.events.read(run_id, after_seq, limit) if recent is None else recent

    async def last_seq(self, run_id: str) -> int:
        """Return the sequence number of the newest stored event."""
        hosted = self._here(run_id)
        if hosted is None or hosted.log is None:
            return await self._stores.events.last_seq(run_id)
        return hosted.log.written

    async def wait(self, run_id: str, after_seq: int, timeout_s: float) -> bool:
        """Wait until an event after `after_seq` exists; return False if the timeout expires or the run ends before."""
        hosted = self._here(run_id)
        if hosted is None or hosted.log is None:
            return await self._stores.events.wait(run_id, after_seq, timeout_s)
        loop, log = asyncio.get_running_loop(), hosted.log
        deadline_s = loop.time() + timeout_s
        while log.written <= after_seq and not log.is_ended and self._here(run_id) is hosted:
            if (left_s := deadline_s - loop.time()) <= 0:
                return False
            await log.changed(left_s)
        return log.written > after_seq

    def _here(self, run_id: str) -> HostedRun | None:
        """Return the run if its events in the memory of this host are up to date; None otherwise."""
        hosted = self._active.get(run_id)
        if hosted is None and self._hosted is not None and self._hosted.run.id == run_id:
            hosted = self._hosted
            if hosted.log is None or not hosted.log.is_ended or hosted.decided not in ENDED:
                hosted = self._hosted = None  # parked, or taken over
        if hosted is None or hosted.log is None or hosted.log.is_fenced or hosted.is_fenced:
            return None
        self._hosted = hosted
        return hosted


class Reading:
    """The readers of runs on one host."""

    def __init__(self, context: HostContext, active: Mapping[str, HostedRun], coming: Collection[str]) -> None:
        self._context = context
        self._active = active
        self._coming = coming
        """Runs submitted to this host and not claimed yet."""
        self.is_working = False
        """Whether the host resumes parked runs."""
        self.is_closed = False

    def close(self) -> None:
        """Let all readers finish."""
        self.is_closed, self.is_working = True, False

    def logs(self) -> RunLogs:
        """Return a reader for one follower of a run."""
        return RunLogs(self._context, self._active)

    async def events(self, run_id: str, after: int) -> AsyncGenerator[HostedEvent, None]:
        """Yield the events after seq `after`, in order, as they are stored."""
        checks.integer("after", after)
        seq, is_known, log = after, run_id in self._active or run_id in self._coming, None
        while True:
            log = self._log_of(run_id) or log  # a closed writer still has the end of the run in memory
            batch = await self._read(run_id, seq, log)
            for event in batch:
                seq, is_last = event.seq, event.type in LAST_EVENTS and event is batch[-1]
                is_over = is_last and await self._is_over(run_id, seq, log)
                yield event
                if is_over:
                    return
            if len(batch) == BATCH:
                continue
            is_known = is_known or bool(batch)
            if not is_known or not await self._news(run_id, seq):
                run = await self._get(run_id)
                if run is None and not is_known:
                    raise RunNotFound(run_id)
                is_known = True
                if self._is_resting(run) and await self._last_seq(run_id) <= seq:
                    return

    async def wait(self, run_id: str) -> RunRecord:
        """Wait until the run has ended, or is parked and this host will not resume it; return the run."""
        pause_s = SOON_S
        while True:
            run = await self._get(run_id)
            if run is None:
                raise RunNotFound(run_id)
            if run.status in ENDED or self.is_closed or (run.status == "parked" and not self.is_working):
                return run
            hosted = self._active.get(run_id)
            if hosted is None:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, self._context.settings.tick_s, POLL_INTERVAL_S)
            else:
                await hosted.gone.wait()

    async def _read(self, run_id: str, seq: int, log: EventWriter | None) -> Sequence[HostedEvent]:
        recent = None if log is None else log.after(seq, BATCH)
        if recent or (recent is not None and log is self._log_of(run_id)):
            return recent
        return await retry_unavailable(lambda: self._context.stores.events.read(run_id, seq, BATCH))

    def _log_of(self, run_id: str) -> EventWriter | None:
        """Return the run's event writer on this host; None if another host may be writing the events."""
        hosted = self._active.get(run_id)
        log = None if hosted is None else hosted.log
        return None if log is None or log.is_fenced else log

    async def _last_seq(self, run_id: str) -> int:
        return await retry_unavailable(lambda: self._context.stores.events.last_seq(run_id))

    async def _get(self, run_id: str) -> RunRecord | None:
        return await retry_unavailable(lambda: self._context.stores.runs.get(run_id))

    def _is_resting(self, run: RunRecord | None) -> bool:
        return run is None or run.status in RESTING or self.is_closed

    async def _is_over(self, run_id: str, seq: int, log: EventWriter | None) -> bool:
        """Wait until the run's status agrees with its last event (True), or the run continues (False)."""
        if run_id in self._active:
            await self._a_moment(run_id)
        if log is not None and log.is_ended and log.written == seq:
            return True
        while True:
            run = await self._get(run_id)
            if await self._last_seq(run_id) > seq:
                return False
            if self._is_resting(run):
                return True
            await self._a_moment(run_id)

    async def _a_moment(self, run_id: str) -> None:
        """Wait at most `SOON_S`, less if this host finishes with the run earlier."""
        hosted = self._active.get(run_id)
        if hosted is None:
            await asyncio.sleep(SOON_S)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(SOON_S):
                await hosted.gone.wait()

    async def _news(self, run_id: str, seq: int) -> bool:
        """Wait for new events; return False if none came within `POLL_INTERVAL_S`."""
        if self.is_closed:
            return False
        log = self._log_of(run_id)
        if log is not None:
            if log.written <= seq:
                await log.changed(POLL_INTERVAL_S)
            return log.written > seq
        try:
            return await self._context.stores.events.wait(run_id, seq, POLL_INTERVAL_S)
        except StoreUnavailable:
            await asyncio.sleep(SOON_S)
            return False
