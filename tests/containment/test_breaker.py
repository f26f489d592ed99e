"""A circuit refuses what would fail, lets a counted few find out when it no longer would, and ignores late news."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.containment.breaker import (
    TRANSITIONS,
    CircuitBreaker,
    CircuitSnapshot,
    CircuitState,
    PolicyContext,
    PolicyDecision,
    Trigger,
)
from penstock.errors import InvalidValue
from penstock.testing import ManualClock
from penstock.testing.contracts.threads import giving_way
from tests.soak import scaled

CLOSED, OPEN, HALF_OPEN = CircuitState
CALL = PolicyContext(cost_usd=0.01, step_count=3)


def all_at_once(count: int, work: Callable[[], Any]) -> list[Any]:
    """What `work` returned in each of `count` threads that began together."""
    barrier = threading.Barrier(count)
    results: list[Any] = []

    def one() -> None:
        barrier.wait()
        results.append(work())

    with giving_way():
        threads = [threading.Thread(target=one) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == count
    return results


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start_ns=1_000)


def opened(clock: ManualClock, *, probes: int = 1, name: str = "") -> CircuitBreaker:
    breaker = CircuitBreaker(3, 60.0, half_open_probes=probes, name=name, clock=clock)
    for _ in range(3):
        breaker.record_failure(breaker.check(CALL).permit)
    return breaker


def half_opened(clock: ManualClock, *, probes: int = 1) -> CircuitBreaker:
    breaker = opened(clock, probes=probes)
    clock.advance(60)
    return breaker


@pytest.mark.requirement("C-10")
def test_a_new_circuit_is_closed_and_lets_calls_pass() -> None:
    breaker = CircuitBreaker()
    assert breaker.state is CLOSED
    assert breaker.check(CALL).allowed
    assert breaker.check().policy_type == "circuit_breaker"


@pytest.mark.requirement("C-10")
def test_the_failure_that_reaches_the_threshold_opens_the_circuit(clock: ManualClock) -> None:
    breaker = CircuitBreaker(3, clock=clock)
    breaker.record_failure()
    breaker.record_failure()
    assert breaker.state is CLOSED
    breaker.record_failure()
    assert breaker.state is OPEN
    assert not breaker.check(CALL).allowed


def test_only_failures_in_a_row_count(clock: ManualClock) -> None:
    breaker = CircuitBreaker(3, clock=clock)
    for _ in range(10):
        breaker.record_failure()
        breaker.record_failure()
        breaker.record_success()
    assert breaker.state is CLOSED
    assert breaker.snapshot().failures == 0


def test_a_call_without_a_verdict_neither_counts_nor_resets(clock: ManualClock) -> None:
    breaker = CircuitBreaker(2, clock=clock)
    breaker.record_failure()
    breaker.record_abandoned(breaker.check().permit)
    assert breaker.snapshot().failures == 1


def test_the_usual_answer_takes_no_lock_and_builds_nothing(clock: ManualClock) -> None:
    breaker = CircuitBreaker(clock=clock)
    breaker._lock.acquire()
    assert breaker.check(CALL) is breaker.check(CALL)
    breaker.record_success(breaker.check(CALL).permit)
    breaker._lock.release()


@pytest.mark.requirement("C-10")
def test_an_open_circuit_says_what_failed_and_when_it_tries_again(clock: ManualClock) -> None:
    breaker = opened(clock, name="oracle-große-日本")
    clock.advance(47.5)
    assert breaker.check(CALL) == PolicyDecision(
        allowed=False,
        policy_type="circuit_breaker",
        reason="circuit 'oracle-große-日本' is open after 3 failures in a row; it tries again in 12.5 s",
    )


def test_a_nameless_circuit_speaks_of_itself_plainly(clock: ManualClock) -> None:
    breaker = CircuitBreaker(1, 5, clock=clock)
    breaker.record_failure()
    assert breaker.check().reason == "the circuit is open after 1 failure; it tries again in 5 s"


@pytest.mark.requirement("C-10")
def test_a_circuit_is_half_open_from_the_very_moment_the_recovery_time_has_passed(clock: ManualClock) -> None:
    breaker = opened(clock)
    clock.advance_ns(60_000_000_000 - 1)
    assert breaker.state is OPEN
    assert not breaker.check().allowed
    clock.advance_ns(1)
    assert breaker.state is HALF_OPEN
    assert breaker.check().allowed


def test_reading_the_state_takes_no_probe(clock: ManualClock) -> None:
    breaker = half_opened(clock)
    for _ in range(5):
        assert breaker.state is HALF_OPEN
        assert breaker.snapshot().state is HALF_OPEN
    assert breaker.check().allowed


def test_a_clock_that_jumps_far_ahead_half_opens_and_one_that_steps_back_keeps_open() -> None:
    class SteppingClock(ManualClock):
        now_ns = 0

        def monotonic_ns(self) -> int:
            return self.now_ns

    clock = SteppingClock()
    breaker = opened(clock)
    clock.now_ns = -(10**18)
    assert breaker.state is OPEN
    assert not breaker.check().allowed
    clock.now_ns = 10**18
    assert breaker.state is HALF_OPEN
    assert breaker.check().allowed


def test_the_wall_clock_does_not_matter(clock: ManualClock) -> None:
    breaker = opened(clock)
    clock.jump_wall(86_400)
    assert breaker.state is OPEN


@pytest.mark.requirement("C-10")
def test_a_probe_that_succeeds_closes_the_circuit(clock: ManualClock) -> None:
    breaker = half_opened(clock)
    breaker.record_success(breaker.check().permit)
    assert breaker.state is CLOSED
    assert breaker.snapshot().failures == 0
    assert breaker.check().allowed


def test_the_circuit_closes_when_as_many_probes_have_succeeded_as_it_needs(clock: ManualClock) -> None:
    breaker = half_opened(clock, probes=3)
    first, second, third = (breaker.check().permit for _ in range(3))
    breaker.record_success(second)
    breaker.record_success(first)
    assert breaker.state is HALF_OPEN
    assert not breaker.check().allowed, "three probes were let through; there is no fourth"
    breaker.record_success(third)
    assert breaker.state is CLOSED


@pytest.mark.requirement("C-10")
def test_a_probe_that_fails_opens_the_circuit_for_the_whole_recovery_time_again(clock: ManualClock) -> None:
    breaker = half_opened(clock)
    probe = breaker.check()
    clock.advance(20)
    breaker.record_failure(probe.permit)
    assert breaker.check().reason.endswith("open after 4 failures in a row; it tries again in 60 s")
    clock.advance(59.9)
    assert breaker.state is OPEN
    clock.advance(0.1)
    assert breaker.state is HALF_OPEN


def test_one_failed_probe_opens_the_circuit_whatever_the_others_reported(clock: ManualClock) -> None:
    breaker = half_opened(clock, probes=3)
    permits = [breaker.check().permit for _ in range(3)]
    breaker.record_success(permits[0])
    breaker.record_failure(permits[1])
    breaker.record_success(permits[2])
    assert breaker.state is OPEN
    assert breaker.snapshot().probes_succeeded == 0


@pytest.mark.requirement("C-10")
def test_a_probe_without_a_verdict_gives_its_slot_to_the_next_caller(clock: ManualClock) -> None:
    breaker = half_opened(clock)
    probe = breaker.check()
    assert not breaker.check().allowed
    breaker.record_abandoned(probe.permit)
    assert breaker.state is HALF_OPEN
    assert breaker.check().allowed
    assert not breaker.check().allowed


def test_the_result_of_a_probe_counts_once(clock: ManualClock) -> None:
    breaker = half_opened(clock, probes=2)
    first, second = breaker.check(), breaker.check()
    breaker.record_success(first.permit)
    breaker.record_success(first.permit)
    breaker.record_abandoned(first.permit)
    assert breaker.state is HALF_OPEN
    assert not breaker.check().allowed
    breaker.record_success(second.permit)
    assert breaker.state is CLOSED


def test_probes_may_be_recorded_without_permits(clock: ManualClock) -> None:
    breaker = half_opened(clock, probes=2)
    breaker.check()
    breaker.check()
    breaker.record_abandoned()
    assert breaker.check().allowed
    breaker.record_success()
    assert breaker.snapshot().probes_out == 1
    assert breaker.state is HALF_OPEN
    breaker.record_success()
    assert breaker.state is CLOSED


@pytest.mark.requirement("C-10")
@pytest.mark.parametrize("abandoned", [True, False])
def test_a_result_without_a_check_before_it_is_a_probe_of_a_half_open_circuit(
    clock: ManualClock, abandoned: bool
) -> None:
    def ready(probes: int = 1) -> CircuitBreaker:
        breaker = half_opened(clock, probes=probes)
        if abandoned:  # the circuit was consulted since, and has no probe out
            breaker.record_abandoned(breaker.check().permit)
        return breaker

    succeeding = ready()
    succeeding.record_success()
    assert (succeeding.state, succeeding.snapshot().failures) == (CLOSED, 0)

    failing = ready()
    times = failing.snapshot().times_opened
    failing.record_failure()
    assert (failing.state, failing.snapshot().times_opened) == (OPEN, times + 1)
    assert failing.snapshot().retry_in_s == 60.0

    slowly = ready(probes=2)
    slowly.record_success()
    assert (slowly.state, slowly.snapshot().probes_succeeded) == (HALF_OPEN, 1)
    slowly.record_success()
    assert slowly.state is CLOSED

    left = ready()
    left.record_abandoned()
    assert left.state is HALF_OPEN
    assert left.check().allowed


@pytest.mark.requirement("C-10")
def test_a_stale_permit_is_no_probe_of_a_half_open_circuit_that_was_not_checked(clock: ManualClock) -> None:
    breaker = CircuitBreaker(1, 60.0, clock=clock)
    slow = breaker.check()
    breaker.record_failure(breaker.check().permit)
    clock.advance(60)
    for record in (breaker.record_success, breaker.record_failure, breaker.record_abandoned):
        record(slow.permit)
        assert (breaker.state, breaker.snapshot().times_opened) == (HALF_OPEN, 1)


@pytest.mark.requirement("C-10")
@pytest.mark.parametrize("with_permit", [True, False])
def test_a_late_success_does_not_close_an_open_circuit(clock: ManualClock, with_permit: bool) -> None:
    breaker = CircuitBreaker(1, clock=clock)
    slow = breaker.check()
    breaker.record_failure()
    breaker.record_success(slow.permit if with_permit else None)
    assert breaker.state is OPEN


@pytest.mark.requirement("C-10")
@pytest.mark.parametrize("with_permit", [True, False])
def test_a_late_failure_does_not_extend_an_open_circuit(clock: ManualClock, with_permit: bool) -> None:
    breaker = CircuitBreaker(1, 60.0, clock=clock)
    slow = breaker.check()
    breaker.record_failure()
    clock.advance(59)
    breaker.record_failure(slow.permit if with_permit else None)
    assert breaker.snapshot().failures == 1
    clock.advance(1)
    assert breaker.state is HALF_OPEN


def test_late_news_of_either_kind_is_no_verdict_on_a_recovery(clock: ManualClock) -> None:
    breaker = CircuitBreaker(1, 60.0, clock=clock)
    slow = breaker.check()
    breaker.record_failure()
    clock.advance(60)
    assert breaker.check().allowed
    for record in (breaker.record_success, breaker.record_failure, breaker.record_abandoned):
        record(slow.permit)
        assert breaker.state is HALF_OPEN
        assert breaker.snapshot().probes_out == 1


def test_a_probe_of_an_earlier_recovery_has_no_say_in_a_later_one(clock: ManualClock) -> None:
    breaker = half_opened(clock, probes=2)
    slow, quick = breaker.check(), breaker.check()
    breaker.record_failure(quick.permit)
    clock.advance(60)
    breaker.check()
    breaker.record_failure(slow.permit)
    assert breaker.state is HALF_OPEN


def test_failures_from_before_a_recovery_do_not_count_after_it(clock: ManualClock) -> None:
    breaker = CircuitBreaker(1, 60.0, clock=clock)
    slow = breaker.check()
    breaker.record_failure()
    clock.advance(60)
    breaker.record_success(breaker.check().permit)
    breaker.record_failure(slow.permit)
    assert breaker.state is CLOSED


def test_a_reset_closes_the_circuit_and_ignores_what_was_under_way(clock: ManualClock) -> None:
    breaker = half_opened(clock)
    probe = breaker.check()
    breaker.reset()
    assert breaker.state is CLOSED
    for _ in range(3):
        breaker.record_failure(probe.permit)
    assert breaker.snapshot().failures == 0


@pytest.mark.reliability
def test_failures_of_many_threads_open_the_circuit_once(clock: ManualClock) -> None:
    breaker = CircuitBreaker(64, clock=clock)
    permit = breaker.check().permit
    all_at_once(64, lambda: breaker.record_failure(permit))
    assert breaker.snapshot().failures == 64
    assert breaker.snapshot().times_opened == 1


@pytest.mark.requirement("C-10")
@pytest.mark.reliability
def test_callers_that_probe_and_give_up_never_exceed_the_probes_together(clock: ManualClock) -> None:
    breaker = half_opened(clock, probes=2)
    lock = threading.Lock()
    out = most = passed = 0

    def probe_and_give_up() -> None:
        nonlocal out, most, passed
        for _ in range(20):
            decision = breaker.check()
            if decision.allowed:
                with lock:
                    out += 1
                    passed += 1
                    most = max(most, out)
                with lock:
                    out -= 1
                breaker.record_abandoned(decision.permit)

    all_at_once(64, probe_and_give_up)
    assert passed >= 2
    assert most <= 2
    assert breaker.snapshot().probes_out == 0
    assert breaker.check().allowed


def test_every_state_can_be_reset_and_every_trigger_leads_somewhere() -> None:
    assert set(TRANSITIONS) == set(CircuitState)
    assert all(moves[Trigger.RESET] is CLOSED for moves in TRANSITIONS.values())
    assert {trigger for moves in TRANSITIONS.values() for trigger in moves} == set(Trigger)


def test_a_snapshot_has_the_whole_circuit(clock: ManualClock) -> None:
    breaker = opened(clock, name="provider", probes=2)
    clock.advance(15)
    assert breaker.name == "provider"
    assert breaker.snapshot() == CircuitSnapshot("provider", OPEN, 3, 0, 0, 45.0, 1)
    clock.advance(45)
    breaker.check()
    breaker.record_success(breaker.check().permit)
    assert breaker.snapshot() == CircuitSnapshot("provider", HALF_OPEN, 3, 1, 1, None, 1)


def test_contexts_and_decisions_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        CircuitBreaker().check().allowed = False  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        CALL.step_count = 4  # type: ignore[misc]


@pytest.mark.parametrize("field", ["failure_threshold", "half_open_probes"])
@pytest.mark.parametrize("value", [0, -1, True, False, 1.0, float("nan"), "3", None])
def test_counts_that_are_not_positive_whole_numbers_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidValue, match=field):
        CircuitBreaker(**{field: value})


@pytest.mark.parametrize("value", [0, 0.0, -1, True, float("nan"), float("inf"), 1e300, 10**400, "60", None])
def test_a_recovery_time_that_is_no_positive_duration_is_refused_by_name(value: Any) -> None:
    with pytest.raises(InvalidValue, match="recovery_timeout"):
        CircuitBreaker(recovery_timeout=value)


def test_a_name_must_be_text() -> None:
    with pytest.raises(InvalidValue, match="name"):
        CircuitBreaker(name=7)  # type: ignore[arg-type]


@dataclass
class Period:
    """The model of one stay in one state: what it let through is all it listens to."""

    state: CircuitState
    since_s: int = 0
    failures: int = 0
    successes: int = 0
    out: int = 0


class CircuitsAgainstAModel(RuleBasedStateMachine):
    """Any order of checks, results, late results and waiting: the circuit and a plain model of it agree."""

    THRESHOLD, RECOVERY_S, PROBES = 2, 10, 2

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.now_s = 0
        self.breaker = CircuitBreaker(self.THRESHOLD, self.RECOVERY_S, half_open_probes=self.PROBES, clock=self.clock)
        self.period = Period(CLOSED)
        self.calls: list[tuple[int | None, Period]] = []

    def expected_state(self) -> CircuitState:
        recovered = self.now_s >= self.period.since_s + self.RECOVERY_S
        return HALF_OPEN if self.period.state is OPEN and recovered else self.period.state

    @rule()
    def check(self) -> None:
        if self.period.state is OPEN and self.expected_state() is HALF_OPEN:
            self.period = Period(HALF_OPEN)
        period = self.period
        expected = period.state is CLOSED or (period.state is HALF_OPEN and period.out + period.successes < self.PROBES)
        decision = self.breaker.check(CALL)
        assert decision.allowed is expected
        assert bool(decision.reason) is not expected
        if expected:
            period.out += 1
            self.calls.append((decision.permit, period))

    def ended(self, data: st.DataObject) -> tuple[int | None, Period | None]:
        permit, period = self.calls.pop(data.draw(st.integers(0, len(self.calls) - 1)))
        if period is not self.period:
            return permit, None
        period.out -= 1
        return permit, period

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def success(self, data: st.DataObject) -> None:
        permit, period = self.ended(data)
        self.breaker.record_success(permit)
        if period is not None:
            period.failures = 0
            period.successes += 1
            if period.state is HALF_OPEN and period.successes == self.PROBES:
                self.period = Period(CLOSED)

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def failure(self, data: st.DataObject) -> None:
        permit, period = self.ended(data)
        self.breaker.record_failure(permit)
        if period is not None:
            period.failures += 1
            if period.state is HALF_OPEN or period.failures == self.THRESHOLD:
                self.period = Period(OPEN, since_s=self.now_s)

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def abandoned(self, data: st.DataObject) -> None:
        permit, _ = self.ended(data)
        self.breaker.record_abandoned(permit)

    @rule(seconds=st.sampled_from([1, 9, 10, 1_000_000]))
    def wait(self, seconds: int) -> None:
        self.clock.advance(seconds)
        self.now_s += seconds

    @rule()
    def reset(self) -> None:
        self.breaker.reset()
        self.period = Period(CLOSED)

    @invariant()
    def they_agree(self) -> None:
        assert self.breaker.state is self.expected_state()
        if self.period.state is HALF_OPEN:
            assert self.breaker.snapshot().probes_out == self.period.out


TestCircuitsAgainstAModel = CircuitsAgainstAModel.TestCase
TestCircuitsAgainstAModel.settings = settings(max_examples=scaled(50, soak=2_000), stateful_step_count=40)
TestCircuitsAgainstAModel = pytest.mark.reliability(pytest.mark.requirement("C-10")(TestCircuitsAgainstAModel))
