"""INV 10: clock jumps end no healthy run and let no two workers write for one run; a stopped worker cannot write.

People and NTP set wall clocks forward and back. A host reads the wall clock once, when it is created, and then adds the
time that has passed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from penstock.clock import Clock
from penstock.hosting.host import HostSettings
from penstock.hosting.ports import HostedEvent, RunRecord
from penstock.storage.memory import MemoryStores
from penstock.storage.stores import ledger_path, open_stores
from penstock.testing import SimLoop, sim_run
from tests.hosting import worker_program
from tests.hosting.graphs import Gate, Sleeper, graph, host_with

DAY_S = 86_400
SETTINGS = HostSettings(tick_s=0.5, lease_s=3, drain_s=0)
NAPS = graph(
    ("in", "input", {}),
    ("one", "sleeper", {"seconds": 7}),
    ("two", "sleeper", {"seconds": 8}),
    edges="in>one one>two",
)


class JumpingClock:
    """Time that passes with the loop, and a wall clock that can be set."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.monotonic_ns = clock.monotonic_ns
        self.offset_s = 0.0

    def time_ns(self) -> int:
        return self._clock.time_ns() + round(self.offset_s * 1_000_000_000)


class Counted(Sleeper):
    """Counts how often a node ran, and how many did at once."""

    def __init__(self) -> None:
        self.times = 0

    async def execute(self, data, inputs, context):  # type: ignore[no-untyped-def]
        self.times += 1
        return await super().execute(data, inputs, context)


async def story(seed: int) -> None:
    chance, loop = random.Random(seed), asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    stores, naps = MemoryStores(clock=loop.clock), Counted()
    clocks = [JumpingClock(loop.clock) for _ in range(3)]
    hosts = [
        await host_with(stores, settings=SETTINGS, clock=clock, worker=f"w{number}", sleeper=naps)
        for number, clock in enumerate(clocks)
    ]
    await stores.graphs.save("naps", "ann", "naps", NAPS, now_ms=0)
    for host in hosts:
        await host.start()

    async def jump() -> None:
        for _ in range(5):
            await asyncio.sleep(chance.uniform(0, 4))
            chance.choice(clocks).offset_s += chance.choice([DAY_S, -DAY_S, 3_600, -1])

    jumping = asyncio.create_task(jump())
    runs = [await chance.choice(hosts).submit(owner="ann", graph_id="naps", input=n) for n in range(3)]
    left = [await hosts[0].wait(run.id) for run in runs]
    await jumping
    for host in hosts:
        await host.close()
    assert [(run.status, run.epoch) for run in left] == [("completed", 1)] * 3
    assert naps.times == 6
    assert sum(host.stats()["totals"].get("lost", 0) for host in hosts) == 0


@pytest.mark.reliability
@pytest.mark.timeout(900)
def test_a_wall_clock_that_jumps_by_a_day_ends_no_run_and_lets_no_worker_take_one_over() -> None:
    for seed in range(100):
        sim_run(lambda seed=seed: story(seed), seed=seed)  # type: ignore[misc]


async def timed_out(seed: int) -> float:
    """How long a run of at most 5 seconds took whose host's clock is set again and again."""
    chance, loop = random.Random(seed), asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    clock = JumpingClock(loop.clock)
    stores = MemoryStores(clock=clock)
    await stores.graphs.save("naps", "ann", "naps", NAPS, now_ms=0)
    async with await host_with(stores, settings=SETTINGS, clock=clock, sleeper=Sleeper()) as host:
        began = loop.time()
        run = await host.submit(owner="ann", graph_id="naps", limits={"timeout_s": 5})
        for _ in range(chance.randrange(1, 9)):
            await asyncio.sleep(chance.uniform(0, 0.6))
            clock.offset_s += chance.choice([DAY_S, -DAY_S])
        left = await host.wait(run.id)
        assert (left.status, left.stop_reason) == ("halted", "timeout")
        return loop.time() - began


@pytest.mark.reliability
@pytest.mark.timeout(900)
def test_a_time_limit_is_not_moved_by_a_wall_clock_that_jumps() -> None:
    for seed in range(50):
        assert 5 <= sim_run(lambda seed=seed: timed_out(seed), seed=seed) <= 5.25  # type: ignore[misc]


async def stopped_worker(seed: int) -> None:
    """A worker whose loop does not turn for a while, as under SIGSTOP: its own tasks go on later, all at once."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    chance = random.Random(seed)
    stores, naps = MemoryStores(clock=loop.clock), Counted()
    stopped = await host_with(stores, settings=SETTINGS, clock=loop.clock, worker="stopped", sleeper=naps)
    other = await host_with(stores, settings=SETTINGS, clock=loop.clock, worker="other", sleeper=naps)
    await stores.graphs.save("naps", "ann", "naps", NAPS, now_ms=0)
    await stopped.start()
    run = await stopped.submit(owner="ann", graph_id="naps", input="x")
    await asyncio.sleep(chance.uniform(0.1, 14))
    hosted = stopped._runs.by_id.get(run.id)
    assert stopped._claims is not None
    for task in (stopped._claims.task, stopped._ticking, stopped._tidying):  # nothing renews, nothing looks
        if task is not None:
            task.cancel()
    await other.start()
    left = await other.wait(run.id)
    if hosted is not None:
        await hosted.gone.wait()
    events = await stores.events.read(run.id)
    assert left.status == "completed"
    assert [event.seq for event in events] == [*range(1, len(events) + 1)]
    assert [event.type for event in events].count("run.completed") == 1
    resumed = [number for number, event in enumerate(events) if event.type == "run.resumed"]
    assert len(resumed) == left.epoch - 1
    late = [HostedEvent(len(events) + 1, 0, "late")]
    if left.epoch > 1:
        with pytest.raises(Exception, match="taken over"):
            await stores.events.append(run.id, 1, late)
        with pytest.raises(Exception, match="taken over"):
            await stores.runs.update(run.id, 1, status="failed")
    await other.close()
    await stopped.close()


@pytest.mark.reliability
@pytest.mark.timeout(900)
def test_a_worker_that_slept_through_its_lease_cannot_write() -> None:
    for seed in range(200):
        sim_run(lambda seed=seed: stopped_worker(seed), seed=seed)  # type: ignore[misc]


@pytest.mark.reliability
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_the_run_of_a_stopped_or_killed_process_is_taken_over_and_the_process_writes_nothing_afterwards(
    tmp_path: Path, how: signal.Signals
) -> None:
    asyncio.run(_submitted(tmp_path))
    program = [sys.executable, "-m", "tests.hosting.worker_program", str(tmp_path)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "entered\n"
            if how is signal.SIGSTOP:
                _stop_between_writes(child, tmp_path)
            else:
                child.send_signal(how)
            (tmp_path / "go").touch()
            before, left = asyncio.run(_taken_over(tmp_path))
            assert (left.status, left.output, left.epoch) == ("completed", "x", 2)
            child.send_signal(signal.SIGCONT)
            printed = child.stdout.read()
        finally:
            child.kill()
    after = asyncio.run(_log(tmp_path))
    assert after == before
    assert [event.type for event in after].count("run.completed") == 1
    if how is signal.SIGSTOP:
        assert json.loads(printed)["lost"] == 1


def _stop_between_writes(child: subprocess.Popen[str], folder: Path) -> None:
    """Stop a process that holds no lock of a database: no one could write while a stopped process keeps one."""
    while True:
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        if all(_is_unlocked(file) for file in (folder / "runs.db", ledger_path(folder / "runs.db"))):
            return
        child.send_signal(signal.SIGCONT)


def _is_unlocked(file: Path) -> bool:
    with closing(sqlite3.connect(file, timeout=0, isolation_level=None)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        connection.execute("ROLLBACK")
        return True


async def _submitted(folder: Path) -> None:
    async with await open_stores(str(folder / "runs.db")) as stores:
        host = await host_with(stores)
        await host.submit(owner="ann", graph_id="gate", run_id="r", input="x")


async def _taken_over(folder: Path) -> tuple[list[HostedEvent], RunRecord]:
    gate = Gate()
    gate.opened.set()
    async with (
        await open_stores(str(folder / "runs.db")) as stores,
        await host_with(stores, settings=worker_program.SETTINGS, worker="second", gate=gate) as host,
    ):
        left = await host.wait("r")
        return list(await stores.events.read("r")), left


async def _log(folder: Path) -> list[HostedEvent]:
    async with await open_stores(str(folder / "runs.db")) as stores:
        return list(await stores.events.read("r"))
