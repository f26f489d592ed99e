"""INV 2 for graphs: one start, one end for every step and every attempt of it, whatever the order; nothing is left."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest

from penstock import (
    Budget,
    CancelledError,
    DeadlockError,
    ErrorPolicy,
    ExecutionConfig,
    ExecutionContext,
    ExecutionTrace,
    FunctionNode,
    Graph,
    Halted,
    quorum,
)
from penstock.events import StepEvent
from penstock.testing import SimLoop, check_history, explore
from tests.soak import scaled

pytestmark = [pytest.mark.reliability]

SCHEDULES = scaled(1_250, soak=200_000)

TERMINAL = ("completed", "error", "cancelled")


class Boom(Exception):
    pass


class World:
    """One random run: what its steps do, how many do it at once, and what of it was seen."""

    def __init__(self, seed: int, loop: SimLoop) -> None:
        self.rng = random.Random(seed)
        self.loop = loop
        self.inside = 0
        self.most_inside = 0
        self.using: Counter[str] = Counter()
        self.persistent = [FunctionNode(f"terminal{i}", self.behave, persistent=True) for i in range(2)]
        self.graphs = 0
        self.fail_fast: set[str] = set()

    async def behave(self, context: ExecutionContext) -> Any:
        rng, kind = self.rng, self.rng.random()
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        try:
            await asyncio.sleep(rng.choice([0, 0, 0.01, 0.03, 0.3]))
            if kind < 0.1:
                await context.atool(self.call, name="inner", cost_hint_usd=0.01, retries=rng.choice([0, 1]))
        except asyncio.CancelledError:
            if kind < 0.2:
                return "swallowed"
            if kind < 0.3:
                await asyncio.sleep(0.02)
            if kind < 0.4:
                raise Boom from None
            raise
        finally:
            self.inside -= 1
        if kind > 0.8:
            raise Boom
        if kind > 0.78:
            context.abort("from inside")
        return kind

    async def call(self) -> str:
        await asyncio.sleep(self.rng.choice([0, 0.02]))
        if self.rng.random() < 0.3:
            raise Boom
        return "called"

    def at_once(self, context: ExecutionContext) -> Any:
        if self.rng.random() < 0.15:
            raise Boom
        return "at once"

    async def streams(self, context: ExecutionContext) -> AsyncIterator[str]:
        for piece in ("a", "b", "c"):
            await asyncio.sleep(self.rng.choice([0, 0.01]))
            if self.rng.random() < 0.05:
                raise Boom
            yield piece

    def node(self, depth: int) -> Any:
        kind = self.rng.random()
        if kind < 0.15 and depth < 2:
            return self.graph(depth + 1)
        if kind < 0.3:
            return self.rng.choice(self.persistent)
        fn = self.rng.choice([self.behave, self.behave, self.at_once, self.streams])
        return FunctionNode(f"node{self.rng.randrange(10**9)}", fn)

    def policy(self) -> ErrorPolicy | None:
        rng = self.rng
        if rng.random() < 0.6:
            return None
        retries, delay, limit = rng.choice([0, 1, 2]), rng.choice([0, 10, 50]), rng.choice([None, 15, 100])
        how = {"retry_count": retries, "retry_delay_ms": delay, "timeout_ms": limit}
        on_error = rng.choice(["fail", "skip", "fallback"])
        if on_error == "fallback":
            how |= {"fallback_node": FunctionNode("other", rng.choice([self.behave, self.at_once]))}
        return ErrorPolicy(on_error=on_error, **how)

    def graph(self, depth: int = 0) -> Graph:
        rng = self.rng
        self.graphs += 1
        made = Graph(
            f"g{self.graphs}",
            max_parallel=rng.choice([1, 2, 3, 10]),
            settle=rng.choice(["fail_fast", "fail_fast", "collect", "first", quorum(1)]),
            queue_persistent=True,
            turn_timeout_s=rng.choice([0.05, 30]),
        )
        if made.settle == "fail_fast":
            self.fail_fast.add(made.id)
        for number in range(rng.randint(1, 6)):
            before = [f"s{one}" for one in range(number) if rng.random() < 0.4]
            made.add_step(
                self.node(depth),
                f"s{number}",
                depends_on=before,
                error_policy=self.policy(),
                sub_budget=rng.choice([None, None, None, Budget(max_steps=2), Budget(max_time_seconds=0.02)]),
            )
        return made


async def one_schedule(seed: int) -> None:
    """A random graph of graphs with everything in it: failures, policies, turns, cancels of every kind, streams."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    world = World(seed, loop)
    rng = world.rng
    graph = world.graph()
    assert graph.validate() == []
    trace = ExecutionTrace(graph.id) if rng.random() < 0.3 else None
    run = ExecutionContext(
        ExecutionConfig(
            max_cost_usd=rng.choice([None, 0.02, 1.0]),
            max_steps=rng.choice([None, None, 3, 8]),
            max_retries_total=rng.choice([None, None, 2, 5]),
            timeout_ms=rng.choice([0, 0, 40, 200]),
        ),
        trace=trace,
        clock=loop.clock,
    )
    seen: list[StepEvent] = []
    stop_reading_after = rng.choice([None, None, 1, 4])

    async def read() -> None:
        async with aclosing(graph.execute_stream(run)) as events:
            async for event in events:
                seen.append(event)
                if rng.random() < 0.1:
                    await asyncio.sleep(0.01)
                if len(seen) == stop_reading_after:
                    break

    cancels = 0

    async def undisturbed(work: Callable[[], Awaitable[Any]]) -> Any:
        """What a cancel of ours leaves in the task must not strike what the task does next."""
        try:
            return await work()
        finally:
            if cancels == 0:
                task = asyncio.current_task()
                assert task is not None
                assert task.cancelling() == 0
                await asyncio.sleep(0)

    def cancel() -> None:
        nonlocal cancels
        cancels += 1
        task.cancel()

    streamed = rng.random() < 0.4
    task = asyncio.ensure_future(undisturbed(read if streamed else lambda: graph.execute(run)))
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        loop.call_later(rng.choice([0, 0.01, 0.015, 0.05, 0.3]), cancel)
    if rng.random() < 0.2:
        loop.call_later(rng.choice([0, 0.02]), run.abort, "from outside")
    if rng.random() < 0.1:
        loop.call_later(rng.choice([0, 0.02]), graph.interrupt)
    (result,) = await asyncio.gather(task, return_exceptions=True)
    expected = (asyncio.CancelledError, CancelledError, Halted, Boom, DeadlockError, ExceptionGroup, TimeoutError, dict)
    assert result is None or isinstance(result, expected), result
    assert world.inside == 0, "a step outlived its graph"
    assert [one for one in loop.pending() if one is not asyncio.current_task()] == []
    assert not graph._running
    assert run.balance.held_nanos == run.balance.steps_open == 0
    assert not any(node for node in world.persistent if _turn(node).waiting or _turn(node)._holder)
    run.end()
    assert check_history(run.history(), ledger=run.balance) == []
    if streamed and stop_reading_after is None and not isinstance(result, asyncio.CancelledError):
        _check_events(seen, world.fail_fast)
    if trace is not None:
        assert trace.status != "running" or not trace.steps  # cancelled before it began
        assert len(trace.steps) == len({step.call_id for step in trace.steps})
        trace.explain()
    assert world.most_inside <= graph.max_parallel, "one cap over the whole nest"


def _turn(node: object) -> Any:
    from penstock.runtime.scheduling.exclusive import turn_of

    return turn_of(node, "")


def _check_events(seen: list[StepEvent], fail_fast: set[str]) -> None:
    """Each step that was started ends once, and after it began; a step inside of another ends before that."""
    open_now: set[str] = set()
    failed: set[tuple[str, str]] = set()
    for event in seen:
        where = event.graph_id, event.step_id.rpartition("/")[0]
        if event.event_type == "started":
            assert where not in failed, f"{event} after a failure"
            assert event.step_id not in open_now, event
            open_now.add(event.step_id)
        elif event.event_type in TERMINAL:
            assert event.step_id in open_now, event
            open_now.remove(event.step_id)
            assert not [one for one in open_now if one.startswith(f"{event.step_id}/")]
            if event.event_type == "error" and event.graph_id in fail_fast and not where[1]:
                failed.add(where)  # a graph inside another may be tried again as a whole
        elif event.event_type == "progress":
            assert event.step_id in open_now
    assert not open_now, f"never ended: {open_now}"


@pytest.mark.timeout(900)
def test_no_interleaving_breaks_the_life_of_a_step() -> None:
    explore(one_schedule, schedules=SCHEDULES)
