"""What it costs to let calls wait that are parts of calls that hold something."""

from __future__ import annotations

import asyncio

from penstock import ExecutionContext, Price, contain
from tests.reliability.operations import operations

USAGE = {"model": "m", "usage": {"prompt_tokens": 1, "completion_tokens": 1}}


async def agents(count: int) -> ExecutionContext:
    """Run so many tools at once, each with a hold of its own and a model call that has to wait inside."""
    async with contain(max_cost_usd=1, prices={"m": Price(1, 1)}) as run:

        async def answer() -> object:
            await asyncio.sleep(0)
            return USAGE

        async def agent() -> object:
            return await run.allm(answer, model="m", cost_hint_usd=0.3)

        await asyncio.gather(*(run.atool(agent, cost_hint_usd=0.01 / count) for _ in range(count)))
    return run


def test_four_times_as_many_nested_calls_that_wait_cost_at_most_sixteen_times_as_much() -> None:
    few, many = (operations(lambda count=count: asyncio.run(agents(count))) for count in (15, 60))  # type: ignore[misc]
    assert many < few * 4**2


def test_all_nested_calls_that_wait_complete() -> None:
    run = asyncio.run(agents(60))
    assert run.balance.api_calls == 60
    assert run.balance.held_nanos == 0
