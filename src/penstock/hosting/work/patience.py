"""Asking a store again until it answers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

from penstock.errors import LedgerUnavailable
from penstock.hosting.ports import StoreUnavailable

T = TypeVar("T")

FIRST_PAUSE_S = 0.05
A_FEW = 3
"""Tries where somebody waits for the answer, and would rather be told that it cannot be had."""
LONGEST_PAUSE_S = 2.0
"""A store that comes back is noticed within this time."""


async def patiently(ask: Callable[[], Awaitable[T]], tries: float = math.inf) -> T:
    """What `ask` gives, as soon as the store can; asking again is safe by the contract of the stores.

    Without a number of tries it goes on for as long as the store is away: whoever has no more time cancels it.
    """
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return await ask()
        except (StoreUnavailable, LedgerUnavailable):
            tries -= 1
            if tries < 1:
                raise
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
