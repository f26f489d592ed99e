"""A worker of many small runs that sets budget aside, in a process that may be killed: `blocks_driver URL LOG NAME`.

It goes on until the day's budget is used up. What a call is billed is in the log before the ledger knows it.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from penstock.clock import SYSTEM_CLOCK
from penstock.containment.ledger import Amounts
from penstock.containment.limits import Limits
from penstock.containment.tickets import Waiting
from penstock.errors import LedgerError
from penstock.runtime.durable import blocks
from penstock.runtime.durable.async_ledger import AsyncLedger
from penstock.runtime.durable.shared import SharedBudget
from penstock.stops import Stop
from penstock.storage import open_stores

CENT = 10_000_000
DAY = "all:2026-01-02"
LIMIT, WORST, COST = 300 * CENT, 3 * CENT, 1 * CENT
AT_ONCE = 3
CALLS = 3
"""Calls of a run."""


async def main(url: str, log: Path, name: str) -> None:
    blocks.SHARE, blocks.MIN_CALLS, blocks.LASTS_S = 8, 2, 0.5
    async with await open_stores(url) as stores:
        ledger = AsyncLedger(stores.ledger)
        own = blocks.Blocks(ledger, name, SYSTEM_CLOCK)
        await asyncio.gather(*(work(stores.ledger, own, log, f"{name}-{number}") for number in range(AT_ONCE)))
        await own.close()


async def work(store: object, own: blocks.Blocks, log: Path, name: str) -> None:
    ledger = AsyncLedger(store)  # type: ignore[arg-type]
    number = 0
    while True:
        number += 1
        run_id, parent = f"{name}-{number}", await own.account_for([DAY])
        await ledger.open_account(f"run:{run_id}", Limits(), parent=parent)
        above = [parent, DAY] if parent != DAY else [DAY]
        shared = SharedBudget(store, f"run:{run_id}", prefix=f"{run_id}/1-m", owner=name, above=above)  # type: ignore[arg-type]
        for call in range(CALLS):
            key = shared.key(str(call))
            answer = await taken(shared, key)
            if isinstance(answer, Stop):
                await shared.aflush()
                return
            with log.open("a") as file:
                file.write(f"{run_id} {parent} {COST} .\n")
            await asyncio.sleep(0.005)
            shared.settled(key, Amounts(COST), True)
            await shared.aflush()


async def taken(shared: SharedBudget, key: str) -> Stop | None:
    """Hold the worst case of a call, or return what refuses it for good."""
    while True:
        try:
            answer = await shared.take(key, Amounts(WORST), False, max_wait_s=60)
            while isinstance(answer, Waiting):
                await asyncio.sleep(0.05)
                answer = await shared.renew(key)
            return answer
        except LedgerError:  # its ticket has expired
            continue


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
