"""The census: what a block leaves behind is named; what ends in time, or stays by design, is not."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from penstock.testing import Leak, census, sim_run

BRIEFLY = 0.02
needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the platform does not show them")


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """What the threads of a test wait for; set at its end whatever happens, so that a failing test cannot hang."""
    event = threading.Event()
    yield event
    event.set()


def test_a_tidy_block_passes() -> None:
    with census():
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()


@pytest.mark.parametrize("daemon", [False, True])
def test_a_thread_left_behind_is_named(daemon: bool, release: threading.Event) -> None:
    thread = threading.Thread(target=release.wait, name="straggler", daemon=daemon)
    with pytest.raises(Leak, match=f"{'daemon ' if daemon else ''}thread straggler"), census(grace_s=BRIEFLY):
        thread.start()
    release.set()
    thread.join()


def test_a_thread_that_was_there_before_is_not_counted(release: threading.Event) -> None:
    thread = threading.Thread(target=release.wait)
    thread.start()
    with census(grace_s=BRIEFLY):
        pass
    release.set()
    thread.join()


def test_a_thread_that_ends_within_the_grace_passes(release: threading.Event) -> None:
    thread = threading.Thread(target=release.wait)
    with census():
        thread.start()
        threading.Timer(0.05, release.set).start()


def test_an_idle_worker_of_the_pool_stays_by_design(release: threading.Event) -> None:
    thread = threading.Thread(target=release.wait, name="penstock-worker-1", daemon=True)
    with census(grace_s=BRIEFLY):
        thread.start()
    release.set()
    thread.join()


def test_a_busy_worker_of_the_pool_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = iter([1, 3, 3, 3, 3])
    pool = ModuleType("penstock.runtime.worker")
    pool.busy_workers = lambda: next(busy)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, pool.__name__, pool)
    with pytest.raises(Leak, match="2 busy worker threads"), census(grace_s=BRIEFLY):
        pass


@needs_proc
def test_a_file_left_open_is_named() -> None:
    with pytest.raises(Leak, match=r"file descriptor \d+ \(/dev/null\)"), census(grace_s=BRIEFLY):
        descriptor = os.open("/dev/null", os.O_RDONLY)
    os.close(descriptor)


@needs_proc
def test_a_file_exchanged_for_another_passes() -> None:
    descriptor = os.open("/dev/null", os.O_RDONLY)
    with census(grace_s=BRIEFLY):
        other = os.open("/dev/zero", os.O_RDONLY)
        os.close(descriptor)
    os.close(other)


@needs_proc
def test_a_child_process_left_running_is_named() -> None:
    with pytest.raises(Leak, match=r"child process \d+"), census(grace_s=BRIEFLY):
        child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    child.communicate()


async def test_a_task_left_running_is_named() -> None:
    with pytest.raises(Leak, match=r"task forgotten \(Event\.wait\)"):
        async with census(grace_s=BRIEFLY):
            task = asyncio.create_task(asyncio.Event().wait(), name="forgotten")
    task.cancel()
    await asyncio.wait([task])


async def test_a_plain_block_sees_tasks_as_well() -> None:
    with pytest.raises(Leak) as leak, census(grace_s=BRIEFLY):
        task = asyncio.create_task(asyncio.sleep(0), name="not yet run")
    assert leak.value.found == ("task not yet run (sleep)",)
    await task


def test_a_task_that_ends_by_itself_passes_and_the_loop_may_be_simulated() -> None:
    async def main() -> float:
        async with census(grace_s=2):
            task = asyncio.create_task(asyncio.sleep(1.5))
        assert task.done()
        return asyncio.get_running_loop().time()

    assert 1.5 <= sim_run(main, seed=1) < 2


def test_the_error_of_the_block_is_not_hidden_by_its_leaks(release: threading.Event) -> None:
    thread = threading.Thread(target=release.wait)
    with pytest.raises(LookupError), census(grace_s=BRIEFLY):
        thread.start()
        raise LookupError
    release.set()
    thread.join()


def test_everything_left_behind_is_listed_at_once(release: threading.Event) -> None:
    threads = [threading.Thread(target=release.wait, name=f"straggler-{number}") for number in (2, 1)]
    with pytest.raises(Leak) as leak, census(grace_s=BRIEFLY):
        for thread in threads:
            thread.start()
    assert leak.value.found == ("thread straggler-1", "thread straggler-2")
    release.set()
    for thread in threads:
        thread.join()
