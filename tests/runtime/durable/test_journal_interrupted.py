"""A journalled run that is cut off anywhere, in the middle of a write too, ends whole, and another goes on with it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing, suppress
from typing import Any

import pytest

from penstock.errors import CancelledError
from penstock.kernel.executor import ExecutionResult
from penstock.runtime.durable.journal import Journal
from penstock.runtime.durable.ports import JournalEntry
from penstock.runtime.graphs.graph_runtime import FlowContext
from penstock.runtime.graphs.node_execution import TERMINAL, NodeEvent, run_flow
from penstock.testing import SimLoop, check_history, sim_run
from tests.nodes.graphs import Json, registry
from tests.runtime.durable.journalled import MANY_PARTS, JsonJournals, Log, Thinker, context_for, tools
from tests.runtime.durable.test_journal_keys import a_graph


class Unhurried(JsonJournals):
    """Takes its time before it keeps something, and after."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.chance = chance

    async def append(self, run_id: str, entries: Sequence[JournalEntry], *, epoch: int = 0) -> None:
        await asyncio.sleep(self.chance.random())
        await super().append(run_id, entries, epoch=epoch)
        await asyncio.sleep(self.chance.random())


async def passed(store: Unhurried, document: Json, log: Log, stop_after_s: float | None, how: str) -> Any:
    """One pass, stopped after a while; what it came to, None if it was stopped before."""
    chance, loop = store.chance, asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)

    async def wait() -> None:
        await asyncio.sleep(chance.random())

    context = context_for(await Journal.open(store, "r"), clock=loop.clock)
    services = {"models": {"thinker": Thinker(log, wait)}, "tools": tools(log, wait)}
    flow = FlowContext(run_id="r", services=services, execution=context)
    events: list[NodeEvent] = []
    came_to: list[Any] = []

    async def once() -> None:
        async with aclosing(run_flow(document, flow, registry(), max_parallel=3)) as everything:
            async for one in everything:
                if isinstance(one, ExecutionResult):
                    came_to.append({handle: value.value for handle, value in one.outputs.items()})
                else:
                    events.append(one)

    task = asyncio.create_task(once())
    if stop_after_s is not None:
        act = task.cancel if how == "task" else lambda: context.abort("enough")
        loop.call_later(stop_after_s, act)
    with suppress(CancelledError, asyncio.CancelledError):
        await task
    context.end()
    assert check_history(context.history(), ledger=context.balance) == []
    started = Counter(event.node_id for event in events if event.event_type == "started")
    ended = Counter(event.node_id for event in events if event.event_type in TERMINAL)
    assert set(started.values()) <= {1}
    assert set(ended.values()) <= {1}
    if how == "abort":  # a task that is cancelled reads no more
        assert started == ended
    return came_to[0] if came_to else None


@pytest.mark.parametrize("how", ["abort", "task"])
@pytest.mark.parametrize("shape", range(8))
def test_a_run_that_is_killed_repeatedly_has_the_same_result_and_repeats_nothing(shape: int, how: str) -> None:
    chance = random.Random(shape)
    document = MANY_PARTS if shape == 0 else a_graph(chance)
    whole = Unhurried(random.Random(0))
    right = sim_run(lambda: passed(whole, document, Log(), None, how), seed=0)
    store = Unhurried(random.Random(shape))
    came_to, passes = None, 0
    while came_to is None:
        passes += 1
        log, before = Log(), {f"r/{key}" for key in store.keys_of()}
        stop_after_s = chance.uniform(0, 8) if passes < 30 else None
        main = passed(store, document, log, stop_after_s, how)
        came_to = sim_run(lambda main=main: main, seed=passes)  # type: ignore[misc]
        assert before.isdisjoint(log.lines), "something recorded ran again"
        assert max(Counter(log.lines).values(), default=1) == 1
    assert came_to == right
    assert set(store.keys_of()) == set(whole.keys_of())
    assert store.kept["r"] == whole.kept["r"]
