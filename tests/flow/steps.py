"""Steps and loops that tests of graphs use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from penstock import ExecutionContext, FunctionNode
from penstock.testing import SimLoop, sim_run


class Boom(Exception):
    """What breaks."""


def sim_loop() -> SimLoop:
    """The simulated loop that runs this."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    return loop


def simulated(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run it in virtual time."""
    sim_run(main, seed=1)


def const(id: str, value: Any = 1) -> FunctionNode:
    """A node that gives a value at once."""
    return FunctionNode(id, lambda ctx: value)


def takes(seconds: float, value: Any = "done") -> FunctionNode:
    """A node that gives a value after a while."""

    async def wait(ctx: ExecutionContext) -> Any:
        await asyncio.sleep(seconds)
        return value

    return FunctionNode(f"takes {seconds}", wait)
