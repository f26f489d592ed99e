"""What became of earlier claims of a run, as its events tell it: how many workers in a row were lost at work.

A run that kills its process must not kill every host, and so somebody has to count. A worker that was lost while the
run did nothing but wait for people has not died of it, whatever it died of: that is what `idle` says of `run.waiting`,
as the last thing that a claim has told. Each beginning says how many were lost before it, so that nothing is read
beyond the last one; who resumes a run, or grants it more, begins to count anew.

Knows events and calls; nothing of who works on runs.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from penstock.hosting.ports import EventStore
from penstock.hosting.records import HostedEvent, RunRecord
from penstock.hosting.work.patience import A_FEW, patiently
from penstock.tracing.record import CallRecord

BEGINNINGS = ("run.started", "run.resumed")
GOES_ON = ("run.queued", "run.granted")
"""What is said of a run that goes on because somebody wants it to, and of one that is new."""
PAGE = 500
MAX_LOOK = 10_000
"""So many events are looked through for who asks whether a run is the same: anybody may, at any time."""


async def newest_first(store: EventStore, run_id: str, tries: float = math.inf) -> AsyncGenerator[HostedEvent, None]:
    """The events of a run, back to its first one; no more is read than is asked for."""
    until = await patiently(lambda: store.last_seq(run_id), tries)
    while until > 0:
        first = max(0, until - PAGE)
        page: Sequence[HostedEvent] = await patiently(partial(store.read, run_id, first, until - first), tries)
        for event in reversed(page):
            yield event
        until = first


async def was_granted(store: EventStore, run_id: str) -> bool:
    """Whether the limits of a run were raised after it was asked for, as far back as it is looked."""
    seen = 0
    async with aclosing(newest_first(store, run_id, A_FEW)) as events:
        async for event in events:
            if event.type == "run.granted":
                return True
            seen += 1
            if seen >= MAX_LOOK:
                break
    return False


async def workers_lost(store: EventStore, run: RunRecord) -> int:
    """How many workers in a row were lost over a run that was claimed, since somebody last wanted it to go on."""
    if run.epoch == 1:
        return 0
    last: HostedEvent | None = None
    async with aclosing(newest_first(store, run.id)) as events:
        async for event in events:
            if event.type in GOES_ON and event.seq > 1:
                return 0
            last = last or event
            if event.type in BEGINNINGS:
                before: Any = event.data.get("lost", 0)
                return (before if isinstance(before, int) else 0) + (0 if _is_idle(last) else 1)
    return 1  # the first to begin does not wait until that is written


def _is_idle(event: HostedEvent) -> bool:
    return event.type == "run.waiting" and event.data.get("idle") is True


def only_asks(under_way: Collection[CallRecord], asking: Collection[CallRecord]) -> bool:
    """Whether, of the calls that are under way in a run, the innermost all wait for answers to what they have asked.

    An agent has a place of its own inside of the call that asks for it; a model or a tool that is at work there is a
    call that does not wait.
    """
    asks = {call.number for call in asking}
    above = {call.parent.number for call in under_way if call.parent is not None}
    return all(_is_asking(call, asks) for call in under_way if call.number not in above)


def _is_asking(call: CallRecord, asks: Collection[int]) -> bool:
    at: CallRecord | None = call
    while at is not None and at.number not in asks:
        if at.kind != "system":
            return False
        at = at.parent
    return at is not None
