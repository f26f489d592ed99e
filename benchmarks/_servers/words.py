"""What every model of these servers answers; the standard library is all it needs, so that peers can load it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

ANSWER = "water"


async def words(request: str) -> AsyncIterator[str]:
    """Yield words at a pace: a request says `COUNT PER_SECOND`, such as "250 50"."""
    count, per_second = (int(one) for one in request.split())
    loop = asyncio.get_running_loop()
    started = loop.time()
    for at in range(count):
        await asyncio.sleep(max(0.0, started + (at + 1) / per_second - loop.time()))
        yield f"w{at} "
