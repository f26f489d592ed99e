"""Long lists, gone through so that others are served in between.

Whatever runs on the event loop for long makes everybody wait. A short list is gone through at once.
"""

from __future__ import annotations

import asyncio

SOME = 250
"""So many things are done at a time: a few milliseconds of work."""


async def pause_at(number: int) -> None:
    """Before the thing of that number, from 0: whoever waits for the loop has a turn, if SOME were done since."""
    if number and not number % SOME:
        await asyncio.sleep(0)
