"""At most so many calls in a window of time, and a refused caller gets in again later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.containment.safety import Decision, ToolCallContext
from penstock.containment.window import BudgetWindowHook
from penstock.errors import InvalidValue
from penstock.stops import StopReason
from penstock.testing import ManualClock
from penstock.testing.contracts.threads import giving_way

CALL = ToolCallContext(request_id="r-1", tool_name="complete")


def in_threads(count: int, work: Callable[[], None]) -> None:
    with giving_way():
        threads = [threading.Thread(target=work) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.mark.requirement("C-9")
def test_calls_pass_then_degrade_then_halt(clock: ManualClock) -> None:
    window = BudgetWindowHook(5, clock=clock)
    answers = [window.before_llm_call(CALL) for _ in range(7)]
    assert answers == [None, None, None, None, Decision.DEGRADE, Decision.HALT, Decision.HALT]


@pytest.mark.requirement("C-9")
def test_a_refused_caller_gets_in_when_the_window_has_passed(clock: ManualClock) -> None:
    window = BudgetWindowHook(1, 60.0, clock=clock)
    assert window.before_llm_call(CALL) is None
    for _ in range(59):
        clock.advance(1)
        assert window.before_llm_call(CALL) is Decision.HALT, "asking again and again must not keep the window full"
    clock.advance(1)
    assert window.before_llm_call(CALL) is None


@pytest.mark.requirement("C-9")
def test_the_window_slides_call_by_call(clock: ManualClock) -> None:
    window = BudgetWindowHook(2, 10.0, None, clock=clock)
    window.before_llm_call(CALL)
    clock.advance(6)
    window.before_llm_call(CALL)
    clock.advance(4)
    assert window.before_llm_call(CALL) is None, "the first call has left the window"
    assert window.before_llm_call(CALL) is Decision.HALT, "the second has not"
    clock.advance(6)
    assert window.before_llm_call(CALL) is None


def test_a_slot_frees_at_the_very_nanosecond_and_not_before(clock: ManualClock) -> None:
    window = BudgetWindowHook(1, 1.0, clock=clock)
    window.before_llm_call(CALL)
    clock.advance_ns(999_999_999)
    assert window.before_llm_call(CALL) is Decision.HALT
    clock.advance_ns(1)
    assert window.before_llm_call(CALL) is None


def test_zero_calls_refuses_always(clock: ManualClock) -> None:
    window = BudgetWindowHook(0, clock=clock)
    for _ in range(3):
        assert window.before_llm_call(CALL) is Decision.HALT
        clock.advance(1_000)
    assert window.explain() == "no calls are allowed at all: max_calls is 0"


@pytest.mark.parametrize(
    ("max_calls", "threshold", "passed", "degraded"),
    [
        (10, 0.8, 8, 2),
        (100, 0.07, 7, 93),  # 0.07 * 100 is 7.000000000000001 in floats
        (6, 0.8, 5, 1),
        (10, 0, 0, 10),
        (10, 1.0, 10, 0),
        (10, 1, 10, 0),
        (10, None, 10, 0),
        (1, 0.8, 1, 0),
    ],
)
def test_degrading_begins_at_the_given_share(
    clock: ManualClock, max_calls: int, threshold: float | None, passed: int, degraded: int
) -> None:
    window = BudgetWindowHook(max_calls, 60.0, threshold, clock=clock)
    answers = [window.before_llm_call(CALL) for _ in range(max_calls + 1)]
    assert answers == [None] * passed + [Decision.DEGRADE] * degraded + [Decision.HALT]


def test_tool_calls_and_model_calls_share_the_window(clock: ManualClock) -> None:
    window = BudgetWindowHook(2, clock=clock)
    assert window.before_tool_call(CALL) is None
    assert window.before_llm_call(CALL) is None
    assert window.before_tool_call(CALL) is Decision.HALT


@pytest.mark.requirement("C-9", "C-11")
def test_it_stops_calls_as_a_rate_limit() -> None:
    assert BudgetWindowHook.stop_reason is StopReason.PROVIDER_RATE_LIMIT


@pytest.mark.requirement("C-9")
def test_it_explains_count_window_and_when_a_slot_frees(clock: ManualClock) -> None:
    window = BudgetWindowHook(2, 60.0, clock=clock)
    window.before_llm_call(CALL)
    assert window.explain() == "1 of 2 calls in the last 60 s; a slot is free now"
    clock.advance(10.5)
    window.before_llm_call(CALL)
    assert window.explain() == "2 of 2 calls in the last 60 s; a slot is free in 49.5 s"
    clock.advance(49.5)
    assert window.explain() == "1 of 2 calls in the last 60 s; a slot is free now"


def test_explaining_takes_no_slot(clock: ManualClock) -> None:
    window = BudgetWindowHook(1, clock=clock)
    for _ in range(5):
        window.explain()
    assert window.before_llm_call(CALL) is None


class SteppingClock(ManualClock):
    now_ns = 0

    def monotonic_ns(self) -> int:
        return self.now_ns


def test_a_clock_that_steps_back_brings_no_call_back_into_the_window() -> None:
    clock = SteppingClock()
    window = BudgetWindowHook(1, 10.0, clock=clock)
    assert window.before_llm_call(CALL) is None
    clock.now_ns = 10 * 10**9
    window.explain()
    clock.now_ns = 0
    assert window.before_llm_call(CALL) is None


def test_a_call_let_through_while_the_clock_was_behind_stays_in_the_window_for_its_whole_length() -> None:
    clock = SteppingClock()
    clock.now_ns = -5 * 10**9
    window = BudgetWindowHook(1, 10.0, clock=clock)
    clock.now_ns -= 10**12
    assert window.before_llm_call(CALL) is None
    clock.now_ns = 5 * 10**9 - 1
    assert window.before_llm_call(CALL) is Decision.HALT
    clock.now_ns += 1
    assert window.before_llm_call(CALL) is None


def test_a_clock_that_jumps_ahead_empties_the_window(clock: ManualClock) -> None:
    window = BudgetWindowHook(3, 60.0, None, clock=clock)
    for _ in range(4):
        window.before_llm_call(CALL)
    clock.advance(1e8)
    assert [window.before_llm_call(CALL) for _ in range(4)] == [None, None, None, Decision.HALT]


def test_memory_is_bounded_by_the_calls_allowed(clock: ManualClock) -> None:
    window = BudgetWindowHook(3, 60.0, clock=clock)
    for _ in range(1_000):
        window.before_llm_call(CALL)
        clock.advance(7)
    assert len(window._let_through) <= 3


@pytest.mark.requirement("C-9")
@pytest.mark.reliability
def test_sixty_four_threads_never_get_more_than_the_calls_allowed(clock: ManualClock) -> None:
    window = BudgetWindowHook(100, 60.0, clock=clock)
    answers: list[Decision | None] = []

    def ask() -> None:
        answers.extend(window.before_llm_call(CALL) for _ in range(20))

    in_threads(64, ask)
    assert len(answers) == 64 * 20
    assert answers.count(None) == 80
    assert answers.count(Decision.DEGRADE) == 20


@pytest.mark.reliability
def test_threads_and_a_moving_clock_never_exceed_the_window(clock: ManualClock) -> None:
    window = BudgetWindowHook(5, 1.0, None, clock=clock)
    let_through: list[int] = []

    def ask() -> None:
        for _ in range(40):
            before_ns = clock.monotonic_ns()
            if window.before_llm_call(CALL) is None and clock.monotonic_ns() == before_ns:
                let_through.append(before_ns)
            clock.advance(0.01)

    in_threads(8, ask)
    let_through.sort()
    assert all(later - earlier >= 10**9 for earlier, later in zip(let_through, let_through[5:], strict=False))


@pytest.mark.requirement("C-9")
@given(
    max_calls=st.integers(0, 6),
    window_s=st.integers(1, 10),
    gaps=st.lists(st.integers(0, 5), max_size=60),
)
def test_any_sequence_agrees_with_counting_by_hand(max_calls: int, window_s: int, gaps: list[int]) -> None:
    clock = ManualClock()
    window = BudgetWindowHook(max_calls, window_s, 0.5, clock=clock)
    let_through: list[int] = []
    now_s = 0
    for gap in gaps:
        clock.advance(gap)
        now_s += gap
        count = sum(1 for at in let_through if at > now_s - window_s)
        answer = window.before_llm_call(CALL)
        if count >= max_calls:
            assert answer is Decision.HALT
        else:
            assert answer is (Decision.DEGRADE if count >= 0.5 * max_calls else None)
            let_through.append(now_s)


@pytest.mark.parametrize("value", [-1, True, 1.0, float("nan"), "3", None, 1 << 62, 10**400])
def test_a_number_of_calls_that_is_none_is_refused_by_name(value: Any) -> None:
    with pytest.raises(InvalidValue, match="max_calls"):
        BudgetWindowHook(value)


@pytest.mark.parametrize("value", [0, -1.0, True, float("nan"), float("inf"), 10**400, "60", None])
def test_a_window_that_is_no_positive_duration_is_refused_by_name(value: Any) -> None:
    with pytest.raises(InvalidValue, match="window_seconds"):
        BudgetWindowHook(1, value)


@pytest.mark.parametrize("value", [-0.1, 1.1, 80, True, float("nan"), float("inf"), "0.8"])
def test_a_threshold_that_is_no_share_is_refused_by_name(value: Any) -> None:
    with pytest.raises(InvalidValue, match="degrade_threshold"):
        BudgetWindowHook(1, 60.0, value)
