"""The run's lock where every call takes it: given back whatever strikes, and only by who has it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from penstock.containment.safety import Decision
from penstock.runtime.context import ExecutionContext
from penstock.runtime.locking import unlock


class Struck(BaseException):
    """What the signal handler raises."""


@pytest.fixture(autouse=True)
def struck_by_a_signal() -> Iterator[None]:
    def strike(number: int, frame: object) -> None:
        raise Struck

    before = signal.signal(signal.SIGUSR1, strike)
    yield
    signal.signal(signal.SIGUSR1, before)


def is_free(lock: threading.RLock) -> bool:
    """Whether another thread can have it."""
    taken: list[bool] = []

    def take() -> None:
        if lock.acquire(blocking=False):
            taken.append(True)
            lock.release()

    other = threading.Thread(target=take)
    other.start()
    other.join()
    return bool(taken)


def test_only_the_thread_that_has_the_lock_releases_it() -> None:
    lock = threading.RLock()
    unlock(lock)
    lock.acquire()
    unlock(lock)
    assert is_free(lock)


class Contended:
    """A lock that another thread holds: the thread that waits for it is interrupted."""

    def __init__(self, lock: threading.RLock) -> None:
        self.lock = lock

    def acquire(self) -> None:
        signal.raise_signal(signal.SIGUSR1)

    def release(self) -> None:
        self.lock.release()

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *error: object) -> None:
        self.lock.release()

    def _is_owned(self) -> bool:
        return self.lock._is_owned()  # type: ignore[attr-defined, no-any-return]


def test_a_call_interrupted_while_it_waits_for_the_lock_does_not_release_it() -> None:
    run = ExecutionContext()
    lock = run._run.lock
    run._run.lock = Contended(lock)  # type: ignore[assignment]
    with pytest.raises(Struck):
        run.wrap_tool_call(lambda: 1)
    run._run.lock = lock
    assert is_free(lock)
    assert run.wrap_tool_call(lambda: 1) is Decision.ALLOW


@pytest.mark.parametrize("part", ["begin", "end"])
def test_a_call_interrupted_during_accounting_leaves_the_lock_free(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ExecutionContext()
    graph_type = type(run.graph)
    written = getattr(graph_type, part)

    def strikes(*args: object) -> object:
        monkeypatch.setattr(graph_type, part, written)
        signal.raise_signal(signal.SIGUSR1)
        raise AssertionError("not struck")

    monkeypatch.setattr(graph_type, part, strikes)
    with pytest.raises(Struck):
        run.wrap_tool_call(lambda: 1)
    assert is_free(run._run.lock)
    assert run.wrap_tool_call(lambda: 1) is Decision.ALLOW
