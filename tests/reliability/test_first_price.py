"""What the first priced call of a process costs an event loop."""

from __future__ import annotations

import json
import subprocess
import sys

COLD = """
import asyncio, json, time
from penstock import WrapOptions, contain
from penstock.agents.model import ModelResponse
from penstock.runtime.billing import price_export
from penstock.runtime.billing.usage import Usage

turns = [time.process_time()]

async def tick():
    while True:
        await asyncio.sleep(0.001)
        turns.append(time.process_time())

async def answer():
    return ModelResponse("yes", usage=Usage(1_000, 10, model="gpt-4o"))

async def main():
    ticking = asyncio.ensure_future(tick())
    with contain() as run:
        await run.awrap_llm_call(answer, WrapOptions(model="gpt-4o"))
    await asyncio.sleep(0.001)
    ticking.cancel()
    assert run.stats.total_cost == 0.0026

asyncio.run(main())
began = time.process_time()
list(price_export.lines())
gaps = [after - before for before, after in zip(turns, turns[1:])]
print(json.dumps([max(gaps), time.process_time() - began, len(gaps)]))
"""

MAX_SHARE = 0.1
"""Measured: 0.004 to 0.016. With the table made on a thread of the same process: 0.2 and more."""
ATTEMPTS = 3


def test_the_first_priced_call_keeps_the_event_loop_from_turning_for_a_small_part_of_the_load() -> None:
    """In CPU time of the process between two turns of a ticker, beside that of making the table in place."""
    shares = []
    for _ in range(ATTEMPTS):
        shown = subprocess.run([sys.executable, "-c", COLD], capture_output=True, text=True, check=True)
        longest, in_place, turns = json.loads(shown.stdout)
        assert turns > 10
        shares.append(longest / in_place)
        if shares[-1] < MAX_SHARE:
            return
    raise AssertionError(f"the event loop stood still for {min(shares):.0%} of the time the table takes")
