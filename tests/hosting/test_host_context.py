"""The time of a host: it cannot be set, and a machine that was suspended does not go on in the past."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import clock as clock_module
from penstock.clock import SYSTEM_CLOCK
from penstock.hosting.host import RunHost
from penstock.hosting.host_context import SteadyClock
from penstock.storage.memory import MemoryStores
from penstock.testing import ManualClock
from tests.hosting.graphs import SETTINGS, Gate, host_with

NANOS_PER_S = 1_000_000_000
ACTS = st.tuples(st.sampled_from(["advance", "suspend", "jump_wall"]), st.integers(0, 10**9))


@given(st.lists(ACTS), st.integers(0, 10**18))
def test_the_time_of_a_host_advances_asleep_or_awake_and_with_nothing_else(acts: list[Any], start_ns: int) -> None:
    clock = ManualClock(start_ns)
    steady = SteadyClock(clock)
    expected = clock.time_ns()
    assert steady.time_ns() == expected
    for number, (act, seconds) in enumerate(acts):
        sign = -1 if act == "jump_wall" and number % 2 else 1
        getattr(clock, act)(sign * seconds)
        expected += 0 if act == "jump_wall" else seconds * NANOS_PER_S
        assert steady.time_ns() == expected


def test_a_clock_without_suspend_time_counts_by_its_monotonic_time() -> None:
    class Plain:
        def monotonic_ns(self) -> int:
            return manual.monotonic_ns()

        def time_ns(self) -> int:
            return manual.time_ns()

    manual = ManualClock()
    steady = SteadyClock(Plain())
    began = steady.time_ns()
    manual.advance(3)
    manual.suspend(5)
    assert steady.time_ns() - began == 3 * NANOS_PER_S


def test_the_time_of_the_machine_advances() -> None:
    steady, wall_ns = SteadyClock(SYSTEM_CLOCK), SYSTEM_CLOCK.time_ns()
    first = steady.time_ns()
    assert abs(first - wall_ns) < 60 * NANOS_PER_S
    assert first <= steady.time_ns() <= steady.time_ns()


@pytest.mark.parametrize("failing", [OSError("not permitted"), AttributeError("no such clock")])
def test_where_no_clock_counts_suspends_the_monotonic_one_is_read(
    monkeypatch: pytest.MonkeyPatch, failing: Exception
) -> None:
    def refuse(clock: int) -> int:
        raise failing

    monkeypatch.setattr(time, "clock_gettime_ns", refuse)
    assert clock_module._with_suspends() is time.monotonic_ns


class Laptop:
    """A host on a machine that is suspended, and one on a machine that is not; both do background work on demand."""

    def __init__(self) -> None:
        self.clock, self.other_clock = ManualClock(), ManualClock()
        self.stores, self.gate = MemoryStores(clock=self.other_clock), Gate()

    async def host(self, worker: str, clock: ManualClock) -> RunHost:
        settings = replace(SETTINGS, tick_s=10**6)
        host = await host_with(self.stores, clock=clock, worker=worker, gate=self.gate, settings=settings)
        await host.start()
        return host

    def sleeps(self, seconds: float) -> None:
        self.clock.suspend(seconds)
        self.other_clock.advance(seconds)


async def test_a_host_that_was_suspended_finds_its_runs_lost_and_stops() -> None:
    laptop = Laptop()
    asleep, awake = await laptop.host("asleep", laptop.clock), await laptop.host("awake", laptop.other_clock)
    await asleep.submit(owner="ann", graph_id="gate", run_id="r", input="x")
    await laptop.gate.has_come(1)
    lost = asleep._runs.by_id["r"]
    await asleep._tick()  # the lease is renewed, and need not be for a second
    laptop.sleeps(SETTINGS.lease_s + 1)
    await awake._claims._claim()
    await laptop.gate.has_come(2)
    await asleep._tick()
    assert lost.is_fenced
    await lost.gone.wait()
    laptop.gate.opened.set()
    left = await awake.wait("r")
    assert (left.status, left.output, left.epoch) == ("completed", "x", 2)
    assert (asleep.stats()["totals"]["lost"], laptop.gate.came) == (1, 2)
    await asyncio.gather(asleep.close(), awake.close())


async def test_others_honour_the_leases_of_a_host_that_was_suspended_and_it_keeps_them() -> None:
    laptop = Laptop()
    asleep, awake = await laptop.host("asleep", laptop.clock), await laptop.host("awake", laptop.other_clock)
    for number, seconds in enumerate((0.0, 1.0, 86_400.0)):
        laptop.sleeps(seconds)
        await asleep.submit(owner="ann", graph_id="gate", run_id=f"r{number}", input="x")
        await laptop.gate.has_come(number + 1)
        await asleep._tick()
        awake._claims._is_thorough = True
        await awake._claims._claim()
        run = await laptop.stores.runs.get(f"r{number}")
        assert run is not None
        assert (run.worker, run.epoch) == ("asleep", 1)
    laptop.gate.opened.set()
    assert {(await awake.wait(f"r{number}")).status for number in range(3)} == {"completed"}
    await asyncio.gather(asleep.close(), awake.close())
