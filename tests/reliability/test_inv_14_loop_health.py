"""INV 14: nothing of ours blocks an event loop, and nothing spins on it.

Every async test of the suite runs under the detector of blocking calls; here it is shown to be there, and to see them.
What an idle host does is counted in simulated time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from blockbuster import BlockingError
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.storage.memory import MemoryStores
from penstock.testing import SimLoop, sim_run
from tests.hosting.graphs import SETTINGS, Gate, host_with

pytestmark = pytest.mark.reliability

BLOCKING = """
import socket, threading, time

def sleep():
    time.sleep(0.001)

def lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=0.001)

def read():
    with open("/dev/null") as file:
        return file.read()

def connect():
    with socket.socket() as client:
        client.settimeout(0.001)
        client.connect(("127.0.0.1", 1))
"""
KINDS = ("sleep", "lock", "read", "connect")


blocking: dict[str, Callable[[], object]] = {}
# As if it were a module of ours: the detector looks at where the code comes from.
exec(compile(BLOCKING, str(Path(penstock.__file__).with_name("blocking.py")), "exec"), blocking)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_that_blocks_the_loop_is_an_error_in_every_async_test(kind: str) -> None:
    with pytest.raises(BlockingError):
        blocking[kind]()


@settings(max_examples=4)
@given(st.sampled_from(KINDS))
async def test_a_call_that_blocks_the_loop_is_an_error_under_hypothesis_too(kind: str) -> None:
    with pytest.raises(BlockingError):
        blocking[kind]()


HOUR_S = 3_600.0


@contextmanager
def callbacks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Counts the callbacks that the event loop runs."""
    count, run = [0], asyncio.Handle._run

    def counted(handle: asyncio.Handle) -> None:
        count[0] += 1
        run(handle)

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", counted)
        yield count


@pytest.mark.parametrize("state", ["empty", "waiting for an answer", "working"])
def test_a_host_with_nothing_to_do_rests_between_its_ticks(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tick_s = 1.0

    async def main() -> int:
        loop, gate = asyncio.get_running_loop(), Gate()
        assert isinstance(loop, SimLoop)
        quiet = replace(SETTINGS, tick_s=tick_s, lease_s=30)
        host = await host_with(MemoryStores(clock=loop.clock), clock=loop.clock, settings=quiet, gate=gate)
        await host.start()
        try:
            if state != "empty":
                graph = "ask" if "answer" in state else "gate"
                await host.submit(owner="ann", graph_id=graph, run_id="r", input="x")
            await asyncio.sleep(60)
            with callbacks(monkeypatch) as count:
                await asyncio.sleep(HOUR_S)
            return count[0]
        finally:
            await host.close()

    ticks = HOUR_S / tick_s
    assert ticks < sim_run(main, seed=1) < MAX_PER_TICK * ticks


MAX_PER_TICK = 10
"""Callbacks per tick, of which an idle host needs three or four; a loop that spins has no bound."""
