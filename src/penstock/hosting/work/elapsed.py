"""How long earlier claims have worked on a run, as its events tell it.

A claim begins with `run.started` or `run.resumed` and lasts until its worker told the end, or until the last thing that
it told before it died: what it did in silence after that nobody knows. Each beginning says what came before it, so that
nothing is read beyond the last one. What is told while no worker has the run does not count.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace

from penstock.hosting.limits import Ceilings
from penstock.hosting.ports import EventStore
from penstock.hosting.records import HostedEvent, RunRecord
from penstock.hosting.work.claims import BEGINNINGS, newest_first
from penstock.hosting.work.told import STATUS_OF


async def worked_ms(store: EventStore, run: RunRecord) -> int:
    """How long others have worked on a run that was claimed."""
    if run.epoch == 1:
        return 0
    left_ms: int | None = None
    async with aclosing(newest_first(store, run.id)) as events:
        async for event in events:
            if event.type in BEGINNINGS:
                worked = 0 if left_ms is None else max(0, left_ms - event.at_ms)
                return _told_before(event) + worked
            if left_ms is None or event.type in STATUS_OF:  # what comes after the first end is not the worker's
                left_ms = event.at_ms
    return 0


def _told_before(begun: HostedEvent) -> int:
    """How long others had worked on the run then."""
    told: object = begun.data.get("worked_ms", 0)
    return told if isinstance(told, int) else 0


def with_time_left(ceilings: Ceilings, worked_ms: int) -> Ceilings:
    """The ceilings of a run that has been worked on for so long."""
    most_s = ceilings.budget.max_time_seconds
    if most_s is None or not worked_ms:
        return ceilings
    left_s = max(0.0, most_s - worked_ms / 1_000)
    return replace(ceilings, budget=replace(ceilings.budget, max_time_seconds=left_s))
