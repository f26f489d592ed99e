"""The clock that a test moves."""

from __future__ import annotations

import threading

import pytest

from penstock.clock import Clock
from penstock.testing import ManualClock


def test_it_is_a_clock_and_does_not_advance_by_itself() -> None:
    clock: Clock = ManualClock(start_ns=5, wall_start_ns=7)
    assert [(clock.monotonic_ns(), clock.time_ns()) for _ in range(2)] == [(5, 7), (5, 7)]


def test_advancing_moves_both_clocks() -> None:
    clock = ManualClock(start_ns=0, wall_start_ns=100)
    clock.advance(1.5)
    clock.advance_ns(1)
    assert (clock.monotonic_ns(), clock.time_ns()) == (1_500_000_001, 1_500_000_101)


@pytest.mark.parametrize("seconds", [86_400.0, -86_400.0])
def test_a_jump_moves_the_wall_clock_alone(seconds: float) -> None:
    clock = ManualClock()
    monotonic, wall = clock.monotonic_ns(), clock.time_ns()
    clock.jump_wall(seconds)
    assert clock.monotonic_ns() == monotonic
    assert clock.time_ns() == wall + seconds * 1_000_000_000


def test_a_suspended_machine_finds_its_monotonic_clock_where_it_was() -> None:
    clock = ManualClock(start_ns=5, wall_start_ns=100)
    clock.suspend(2)
    assert (clock.monotonic_ns(), clock.passed_ns(), clock.time_ns()) == (5, 2_000_000_005, 2_000_000_100)
    clock.jump_wall(-1)
    clock.advance_ns(1)
    assert (clock.monotonic_ns(), clock.passed_ns(), clock.time_ns()) == (6, 2_000_000_006, 1_000_000_101)


def test_time_cannot_pass_backwards() -> None:
    with pytest.raises(ValueError, match="jump_wall"):
        ManualClock().advance(-1)
    with pytest.raises(ValueError, match="suspended for -1 s"):
        ManualClock().suspend(-1)


def test_no_advance_is_lost_between_threads() -> None:
    clock = ManualClock(wall_start_ns=0)

    def tick() -> None:
        for _ in range(2000):
            clock.advance_ns(1)
            clock.jump_wall(1e-9)

    threads = [threading.Thread(target=tick) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (clock.monotonic_ns(), clock.time_ns()) == (16_000, 32_000)
