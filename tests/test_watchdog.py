"""The timeout of the tests: one thread watches whichever test runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests import watchdog


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[watchdog.Watchdog, threading.Event, list[str]]]:
    """A watchdog, an event for when it has ended a test, and the tests that it has ended."""
    names: list[str] = []
    event = threading.Event()

    def end(item: Any, settings: Any) -> None:
        names.append(item.name)
        event.set()

    monkeypatch.setattr(watchdog, "LOOKS_EVERY_S", 0.001)
    monkeypatch.setattr("pytest_timeout.timeout_timer", end)
    dog = watchdog.Watchdog()
    yield dog, event, names
    dog.pytest_unconfigure()


def item(name: str) -> Any:
    return SimpleNamespace(name=name)


def settings(timeout: float, method: str = "thread") -> Any:
    return SimpleNamespace(timeout=timeout, method=method)


def test_a_test_that_passes_its_time_is_ended_and_those_before_it_are_not(
    ended: tuple[watchdog.Watchdog, threading.Event, list[str]],
) -> None:
    dog, event, names = ended
    for name, timeout in (("quick", 600), ("slow", 0), ("never started", 600)):
        assert dog.pytest_timeout_set_timer(item(name), settings(timeout))
        if name == "slow":
            event.wait()
        dog.pytest_timeout_cancel_timer()
    assert set(names) == {"slow"}


def test_one_thread_watches_all_tests(ended: tuple[watchdog.Watchdog, threading.Event, list[str]]) -> None:
    dog, _, _ = ended
    before = threading.active_count()
    for name in ("first", "second", "third"):
        dog.pytest_timeout_set_timer(item(name), settings(600))
        dog.pytest_timeout_cancel_timer()
    assert threading.active_count() == before + 1


def test_a_timeout_by_a_signal_is_left_to_the_plugin(
    ended: tuple[watchdog.Watchdog, threading.Event, list[str]],
) -> None:
    dog, _, _ = ended
    assert dog.pytest_timeout_set_timer(item("any"), settings(600, "signal")) is None
