"""Following a run from outside, in whichever process it is worked on.

A reader is a place in the log: it holds one batch of events and nothing is queued for it, so that a slow one costs
nobody anything. Near a run that is worked on here it sleeps by that run's bell, and is given what was just written
without asking the store; else it sleeps by the store's bell, and reads there.

The last event is written before the status is changed. A reader holds it back until the status agrees, so that whoever
has read it finds the run as it says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import suppress

from penstock.errors import InvalidValue
from penstock.hosting.control import UnknownRun
from penstock.hosting.ports import StoreUnavailable
from penstock.hosting.records import ENDED, PARKED, HostedEvent, RunRecord
from penstock.hosting.work.execution import HostedRun
from penstock.hosting.work.log import RunLog
from penstock.hosting.work.patience import patiently
from penstock.hosting.work.told import STATUS_OF
from penstock.hosting.work.workplace import Workplace

BATCH = 200
LOOK_S = 1.0
"""How long a reader sleeps before it looks whether the run is still there."""
SOON_S = 0.02
RESTING = ENDED | PARKED


class Reading:
    """Who reads about runs, on one host."""

    def __init__(self, at: Workplace, here: Mapping[str, HostedRun], coming: Collection[str]) -> None:
        self._at = at
        self._here = here
        self._coming = coming
        """What is about to be worked on here."""
        self.is_working = False
        """Whether the host takes up what is parked."""
        self.is_closed = False

    def close(self) -> None:
        """Let everybody who reads come to an end."""
        self.is_closed, self.is_working = True, False

    async def events(self, run_id: str, after: int) -> AsyncGenerator[HostedEvent, None]:
        """The events after that one, in order, as they come."""
        given: object = after
        if type(given) is not int or given < 0:
            raise InvalidValue("after", after, "0, or the seq of an event of the run")
        seq, is_known, log = after, run_id in self._here or run_id in self._coming, None
        while True:
            log = self._log_of(run_id) or log  # one that was closed still has the end of the run at hand
            batch = await self._read(run_id, seq, log)
            for event in batch:
                seq, is_last = event.seq, event.type in STATUS_OF and event is batch[-1]
                is_over = is_last and await self._is_over(run_id, seq)
                yield event
                if is_over:
                    return
            if len(batch) == BATCH:
                continue
            is_known = is_known or bool(batch)
            if not is_known or not await self._news(run_id, seq):
                run = await self._get(run_id)
                if run is None and not is_known:
                    raise UnknownRun(run_id)
                is_known = True
                if self._is_resting(run) and await self._last_seq(run_id) <= seq:
                    return

    async def wait(self, run_id: str) -> RunRecord:
        """The run once it has ended; or is parked, and nobody here will take it up."""
        pause_s = SOON_S
        while True:
            run = await self._get(run_id)
            if run is None:
                raise UnknownRun(run_id)
            if run.status in ENDED or self.is_closed or (run.status == "parked" and not self.is_working):
                return run
            hosted = self._here.get(run_id)
            if hosted is None:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, self._at.settings.tick_s, LOOK_S)
            else:
                await hosted.gone.wait()

    async def _read(self, run_id: str, seq: int, log: RunLog | None) -> Sequence[HostedEvent]:
        at_hand = None if log is None else log.after(seq, BATCH)
        if at_hand or (at_hand is not None and log is self._log_of(run_id)):
            return at_hand
        return await patiently(lambda: self._at.stores.events.read(run_id, seq, BATCH))

    def _log_of(self, run_id: str) -> RunLog | None:
        """The log that is being written here; None if somebody else may write it."""
        hosted = self._here.get(run_id)
        log = None if hosted is None else hosted.log
        return None if log is None or log.is_lost else log

    async def _last_seq(self, run_id: str) -> int:
        return await patiently(lambda: self._at.stores.events.last_seq(run_id))

    async def _get(self, run_id: str) -> RunRecord | None:
        return await patiently(lambda: self._at.stores.runs.get(run_id))

    def _is_resting(self, run: RunRecord | None) -> bool:
        return run is None or run.status in RESTING or self.is_closed

    async def _is_over(self, run_id: str, seq: int) -> bool:
        """Wait until the run is as its last event says, or goes on; which of the two."""
        if run_id in self._here:
            await self._a_moment(run_id)
        while True:
            run = await self._get(run_id)
            if await self._last_seq(run_id) > seq:
                return False
            if self._is_resting(run):
                return True
            await self._a_moment(run_id)

    async def _a_moment(self, run_id: str) -> None:
        """Until this host is done with the run, or for a moment if it is another's."""
        hosted = self._here.get(run_id)
        if hosted is None:
            await asyncio.sleep(SOON_S)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(SOON_S):
                await hosted.gone.wait()

    async def _news(self, run_id: str, seq: int) -> bool:
        """Sleep until there may be more; False if nothing came for a while."""
        if self.is_closed:
            return False
        log = self._log_of(run_id)
        if log is not None:
            if log.written <= seq:
                await log.bell.wait(LOOK_S)
            return log.written > seq
        try:
            return await self._at.stores.events.wait(run_id, seq, LOOK_S)
        except StoreUnavailable:
            await asyncio.sleep(SOON_S)
            return False
