"""Concurrent grants to one run: each counts once or is refused, and is emitted once."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from penstock.clock import Clock
from penstock.errors import InvalidValue
from penstock.hosting.host import HostSettings, RunHost, RunLimits
from penstock.hosting.ports import Conflict, RunRecord, StoreUnavailable
from penstock.storage.memory import MemoryStores
from penstock.testing import SimLoop, explore
from tests.hosting.graphs import executors, host_with

ASYNC = ("runs", "events", "graphs", "approvals", "cancels", "journal")
MORE = RunLimits(max_steps=1)


class Between:
    """A store that lets others go first, before and after everything that it does."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.refused: set[str] = set()
        """What cannot be had of it."""

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(0)
            if name in self.refused:
                raise StoreUnavailable(f"{name} cannot be had")
            answer = await method(*args, **kwargs)
            await asyncio.sleep(0)
            return answer

        return call


class BetweenStores:
    """Stores in memory, where every act of one may come between any two of another."""

    def __init__(self, clock: Clock) -> None:
        self.memory = stores = MemoryStores(clock=clock)
        for name in ASYNC:
            setattr(self, name, Between(getattr(stores, name)))
        self.ledger, self.memories = stores.ledger, stores.memories

    async def transaction(self, unit: Any, *, inline: bool = False) -> Any:
        await asyncio.sleep(0)
        answer = await self.memory.transaction(unit, inline=inline)
        await asyncio.sleep(0)
        return answer


def made() -> tuple[Any, Clock]:
    """The stores, and the clock that goes with them."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    return BetweenStores(loop.clock), loop.clock


def host_at(stores: Any, clock: Clock, worker: str) -> RunHost:
    settings = HostSettings(drain_s=0, tick_s=0.01)
    return RunHost(stores, executors=executors(), settings=settings, worker=worker, clock=clock)


async def halted_run(stores: Any, clock: Clock, steps: int = 0) -> RunRecord:
    """A run that was halted by its limit of steps, and that no host works on."""
    await host_with(stores.memory)
    async with host_at(stores.memory, clock, "first") as host:
        await host.submit(owner="ann", graph_id="echo", run_id="r", input="it", limits={"max_steps": steps})
        left = await host.wait("r")
    assert left.status == "halted"
    return left


async def granted_events(stores: Any) -> list[Any]:
    return [one for one in await stores.memory.events.read("r", limit=10_000) if one.type == "run.granted"]


async def counted(*asking: Any) -> int:
    """How many of the grants were answered with yes; the others say that they do not count."""
    answers = await asyncio.gather(*asking, return_exceptions=True)
    refused = [answer for answer in answers if not isinstance(answer, RunRecord)]
    assert all(isinstance(answer, Conflict) for answer in refused), refused
    return len(answers) - len(refused)


def test_of_grants_that_come_at_once_each_counts_or_says_that_it_does_not() -> None:
    async def schedule(seed: int) -> int:
        stores, clock = made()
        run = await halted_run(stores, clock)
        one, other = (host_at(stores, clock, worker) for worker in ("one", "other"))
        chance = random.Random(seed)

        async def grant(host: RunHost) -> RunRecord:
            await asyncio.sleep(chance.choice([0, 0, 0.01, 0.02]))
            return await host.grant("r", MORE, by="eve")

        async with one:
            yes = await counted(*(grant(host) for host in (one, other) * 3))
            left = await other.wait("r")
        assert yes >= 1
        assert left.limits["max_steps"] == run.limits["max_steps"] + yes
        granted = await granted_events(stores)
        assert [event.data["limits"]["max_steps"] for event in granted] == [*range(1, yes + 1)]
        return yes

    assert {1} < set(explore(schedule, schedules=300)), "some came when it was halted again, and count too"


def test_of_grants_to_a_run_that_no_host_takes_up_exactly_one_counts() -> None:
    async def schedule(seed: int) -> None:
        stores, clock = made()
        await halted_run(stores, clock)
        hosts = [host_at(stores, clock, worker) for worker in ("one", "other")]
        grants = [host.grant("r", RunLimits(max_steps=more), by="eve") for host in hosts for more in (1, 1, 5)]
        assert await counted(*grants) == 1
        (granted,) = await granted_events(stores)
        left = await hosts[0].get("r")
        assert left is not None
        assert (left.status, left.limits) == ("queued", granted.data["limits"])

    explore(schedule, schedules=100)


def test_of_grants_that_come_at_once_those_that_give_nothing_of_what_halted_the_run_never_count() -> None:
    async def schedule(seed: int) -> None:
        stores, clock = made()
        run = await halted_run(stores, clock)
        one, other = (host_at(stores, clock, worker) for worker in ("one", "other"))
        useful = [host.grant("r", RunLimits(max_steps=9), by="eve") for host in (one, other)]
        useless = [host.grant("r", RunLimits(timeout_s=9, max_cost_usd=9), by="bob") for host in (one, other)]
        async with one:
            assert await counted(*useless, *useful) == 1
            left = await other.wait("r")
        assert (left.status, left.limits) == ("completed", {**run.limits, "max_steps": 9})
        assert [granted.data["by"] for granted in await granted_events(stores)] == ["eve"]

    explore(schedule, schedules=100)


def test_grants_that_come_at_once_do_not_pass_what_may_be_granted() -> None:
    async def schedule(seed: int) -> tuple[int, int]:
        stores, clock = made()
        await halted_run(stores, clock)
        chance, most = random.Random(seed), RunLimits(max_steps=1)

        async def grant(host: RunHost) -> RunRecord:
            await asyncio.sleep(chance.choice([0, 0.01, 0.02, 0.03]))
            return await host.grant("r", MORE, by="eve", within=most)

        async with host_at(stores, clock, "one") as host:
            answers = await asyncio.gather(*(grant(host) for _ in range(6)), return_exceptions=True)
            left = await host.wait("r")
        yes = sum(isinstance(answer, RunRecord) for answer in answers)
        assert left.limits["max_steps"] == yes <= 1
        return yes, sum(isinstance(answer, InvalidValue) for answer in answers)

    assert max(explore(schedule, schedules=100)) >= (1, 1)


def test_a_grant_and_a_resume_at_once_either_count_together_or_the_grant_says_no() -> None:
    async def schedule(seed: int) -> bool:
        stores, clock = made()
        run = await halted_run(stores, clock)
        host = host_at(stores, clock, "one")
        resumed, granted = await asyncio.gather(
            host.resume("r"), host.grant("r", MORE, by="eve"), return_exceptions=True
        )
        left = await host.get("r")
        assert left is not None
        assert left.status == "queued"
        assert isinstance(resumed, RunRecord) or isinstance(granted, RunRecord)
        assert isinstance(resumed, RunRecord | Conflict), resumed
        if isinstance(granted, RunRecord):
            assert left.limits["max_steps"] == run.limits["max_steps"] + 1
            return True
        assert isinstance(granted, Conflict)
        assert left.limits == run.limits
        return False

    assert set(explore(schedule, schedules=100)) == {True, False}


def test_a_cancel_that_comes_with_a_grant_is_done_or_reports_that_the_run_had_ended() -> None:
    async def schedule(seed: int) -> str:
        stores, clock = made()
        await halted_run(stores, clock)
        async with host_at(stores, clock, "one") as host:
            result, *_ = await asyncio.gather(
                host.cancel("r"), host.grant("r", RunLimits(max_steps=9), by="eve"), return_exceptions=True
            )
            left = await host.wait("r")
        events = [event.type for event in await stores.memory.events.read("r", limit=10_000)]
        assert events[-1] == f"run.{left.status}"
        return f"{result} {left.status}"

    assert set(explore(schedule, schedules=200)) <= {"ended completed", "cancelled cancelled", "ended halted"}


async def test_a_grant_takes_limits_or_a_mapping_and_anything_else_is_refused() -> None:
    stores = MemoryStores()
    async with await host_with(stores) as host:
        run = await host.submit(owner="ann", graph_id="echo", input="it", limits={"max_steps": 0})
        await host.wait(run.id)
        for more in (None, 5, "1", [("max_steps", 1)], {"max_step": 1}, {"max_steps": -1}, {"timeout_s": float("nan")}):
            with pytest.raises(InvalidValue):
                await host.grant(run.id, more, by="eve")  # type: ignore[arg-type]
        for by in (None, 5, b"eve"):
            with pytest.raises(InvalidValue, match="by"):
                await host.grant(run.id, {"max_steps": 9}, by=by)  # type: ignore[arg-type]
        assert not [one for one in await stores.events.read(run.id) if one.type == "run.granted"]
        await host.grant(run.id, {"max_steps": 9, "max_cost_usd": 1}, by="e\ud800ve\0")
        left = await host.wait(run.id)
    assert (left.status, left.limits["max_steps"], left.limits["max_cost_usd"]) == ("completed", 9, "2")
    (granted,) = [one for one in await stores.events.read(run.id) if one.type == "run.granted"]
    assert granted.data["by"] == "e?ve\ufffd"
