"""A cancel finds its run, before it begins, while it runs, twice, and after its end; none is ever lost."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from penstock import Budget, CancelledError, ChainMetadata, ExecutionConfig, ExecutionContext, InvalidValue, RunEnded
from penstock.runtime.watching import registry as module
from penstock.runtime.watching.registry import CancelResult, EarlyCancelsFull, RunRegistry
from penstock.stops import StopReason, TerminationReason
from penstock.testing import ManualClock, SimLoop, explore
from penstock.testing.contracts.threads import at_once
from penstock.tracing.events import LimitTrace
from tests.soak import scaled

TIMINGS = scaled(500, soak=20_000)
CANCELLED, ALREADY, REMEMBERED, ENDED = CancelResult


def a_run(run_id: str = "r1", **options: Any) -> ExecutionContext:
    return ExecutionContext(metadata=ChainMetadata(request_id=run_id, chain_id=run_id), **options)


@pytest.fixture
def registry() -> RunRegistry:
    return RunRegistry()


# Finding.


def test_a_registered_run_is_found_by_its_id(registry: RunRegistry) -> None:
    first, second = a_run("r1"), a_run("r2")
    registry.register(first)
    registry.register(second)
    assert registry.get("r1") is first
    assert registry.running() == ["r1", "r2"]
    assert len(registry) == 2
    assert "r2" in registry
    assert "r3" not in registry
    assert 3 not in registry
    assert registry.get("r3") is None


def test_an_ended_run_is_removed_automatically(registry: RunRegistry) -> None:
    context = a_run()
    registry.register(context)
    context.end()
    assert registry.get("r1") is None
    assert "r1" not in registry
    assert (registry.running(), len(registry)) == ([], 0)


def test_an_id_can_be_taken_once_at_a_time(registry: RunRegistry) -> None:
    first, second = a_run(), a_run()
    registry.register(first)
    for again in (first, second):
        with pytest.raises(InvalidValue, match="run_id must be one that no other run under way has, not 'r1'"):
            registry.register(again)
    first.end()
    registry.register(second)
    assert registry.get("r1") is second
    assert registry.cancel("r1") is CANCELLED


@pytest.mark.parametrize("context", [None, "r1", pytest.param("child", id="a child")])
def test_only_the_main_context_of_a_run_is_registered(registry: RunRegistry, context: Any) -> None:
    with a_run() as main, pytest.raises(InvalidValue) as refused:
        registry.register(main.spawn_child("child") if context == "child" else context)
    assert refused.value.field == "context"


def test_registering_a_handle_registers_its_run(registry: RunRegistry) -> None:
    context = a_run()
    registry.register(context.with_sub_budget(Budget(max_steps=1)))
    assert registry.get("r1") is context
    assert registry.cancel("r1") is CANCELLED
    assert context.cancellation.is_cancelled


def test_a_run_that_has_ended_is_not_registered(registry: RunRegistry) -> None:
    context = a_run()
    context.end()
    with pytest.raises(RunEnded):
        registry.register(context)
    assert registry.cancel("r1") is REMEMBERED


# Cancelling.


def test_a_cancel_stops_the_run_and_is_written_down(registry: RunRegistry) -> None:
    with a_run() as context:
        registry.register(context)
        assert registry.cancel("r1", "no longer needed") is CANCELLED
        with pytest.raises(CancelledError, match="no longer needed"):
            context.check_cancelled()
    assert context.termination_reason is TerminationReason.CONTEXT_CANCELED
    assert [event.message for event in context.history() if isinstance(event, LimitTrace)] == ["no longer needed"]


def test_an_early_cancel_is_applied_at_registration(registry: RunRegistry) -> None:
    assert registry.cancel("r1", "too late") is REMEMBERED
    with a_run() as context:
        registry.register(context)
        with pytest.raises(CancelledError, match="too late"):
            context.check_cancelled()
        assert registry.cancel("r1") is ALREADY
    assert context.termination_reason is TerminationReason.CONTEXT_CANCELED


def test_a_remembered_cancel_is_for_one_run(registry: RunRegistry) -> None:
    registry.cancel("r1")
    with a_run() as first:
        registry.register(first)
    with a_run() as second:
        registry.register(second)
        second.check_cancelled()
    assert second.termination_reason is TerminationReason.SUCCESS


@pytest.mark.parametrize("early", [True, False])
def test_the_first_reason_of_several_cancels_counts(registry: RunRegistry, early: bool) -> None:
    context = a_run()
    if not early:
        registry.register(context)
    answers = [registry.cancel("r1", reason) for reason in ("first", "second", "third")]
    if early:
        registry.register(context)
    assert answers == ([REMEMBERED] * 3 if early else [CANCELLED, ALREADY, ALREADY])
    assert context.cancellation.reason == "first"


def test_a_cancel_after_the_end_returns_that_and_changes_nothing(registry: RunRegistry) -> None:
    with a_run() as context:
        registry.register(context)
    events = context.history()
    assert [registry.cancel("r1"), registry.cancel("r1")] == [ENDED, ENDED]
    assert context.history() == events
    assert context.termination_reason is TerminationReason.SUCCESS
    assert not context.cancellation.is_cancelled


def test_a_cancel_after_a_cancelled_run_has_ended_returns_that_it_has(registry: RunRegistry) -> None:
    with a_run() as context:
        registry.register(context)
        registry.cancel("r1")
    assert registry.cancel("r1") is ENDED


def test_a_run_that_was_aborted_elsewhere_is_already_cancelled(registry: RunRegistry) -> None:
    context = a_run()
    registry.register(context)
    context.abort("by hand")
    assert registry.cancel("r1") is ALREADY
    assert context.cancellation.reason == "by hand"


def test_a_run_past_its_deadline_is_stopped_by_whichever_is_noticed_first(registry: RunRegistry) -> None:
    clock = ManualClock()
    context = a_run(
        config=ExecutionConfig(max_cost_usd=1, max_steps=1, max_retries_total=1, timeout_ms=10), clock=clock
    )
    registry.register(context)
    clock.advance(1)
    assert context.cancellation.is_cancelled
    assert registry.cancel("r1") is ALREADY
    context.end()
    assert context.termination_reason is TerminationReason.LIMIT_EXCEEDED
    assert registry.cancel("r1") is ENDED


def test_a_cancel_reaches_a_call_that_waits(registry: RunRegistry) -> None:
    async def main() -> TerminationReason | None:
        started = asyncio.Event()

        async def forever() -> None:
            started.set()
            await asyncio.get_running_loop().create_future()

        async def run(context: ExecutionContext) -> None:
            with context:
                await context.atool(forever)

        context = a_run()
        registry.register(context)
        task = asyncio.create_task(run(context))
        await started.wait()
        assert await asyncio.to_thread(registry.cancel, "r1") is CANCELLED
        with pytest.raises(CancelledError):
            await task
        return context.termination_reason

    assert asyncio.run(main()) is TerminationReason.CONTEXT_CANCELED


@pytest.mark.parametrize(("field", "arguments"), [("run_id", (7,)), ("reason", ("r1", None))])
def test_ids_and_reasons_that_are_not_text_are_refused(
    registry: RunRegistry, field: str, arguments: tuple[Any, ...]
) -> None:
    with pytest.raises(InvalidValue) as refused:
        registry.cancel(*arguments)
    assert refused.value.field == field


# Removing runs, and the bounds of memory.


def test_a_forgotten_run_counts_as_ended(registry: RunRegistry) -> None:
    context = a_run()
    registry.register(context)
    registry.forget("r1")
    registry.forget("r1")
    assert registry.get("r1") is None
    assert registry.cancel("r1") is ENDED
    assert not context.cancellation.is_cancelled


def test_a_remembered_cancel_can_be_forgotten(registry: RunRegistry) -> None:
    registry.cancel("r1")
    registry.forget("r1")
    context = a_run()
    registry.register(context)
    assert not context.cancellation.is_cancelled


@pytest.mark.parametrize(("waited_s", "strikes"), [(59.999, True), (60.0, False)])
def test_a_cancel_is_remembered_for_its_time_to_live(waited_s: float, strikes: bool) -> None:
    clock = ManualClock()
    registry = RunRegistry(early_cancel_ttl_s=60, clock=clock)
    registry.cancel("r1")
    clock.advance(waited_s)
    context = a_run()
    registry.register(context)
    assert context.cancellation.is_cancelled is strikes


def test_asking_again_remembers_for_longer_and_keeps_the_first_reason() -> None:
    clock = ManualClock()
    registry = RunRegistry(early_cancel_ttl_s=60, clock=clock)
    registry.cancel("r1", "first")
    registry.cancel("r2")
    clock.advance(40)
    registry.cancel("r1", "second")
    clock.advance(40)
    contexts = a_run("r1"), a_run("r2")
    for context in contexts:
        registry.register(context)
    assert [context.cancellation.reason for context in contexts] == ["first", None]


def test_a_full_memory_refuses_rather_than_break_a_promise() -> None:
    clock = ManualClock()
    registry = RunRegistry(early_cancel_ttl_s=60, max_early=2, clock=clock)
    assert [registry.cancel("r1"), registry.cancel("r2"), registry.cancel("r1")] == [REMEMBERED] * 3
    with pytest.raises(EarlyCancelsFull, match="run r3 is not known, and 2 cancels") as full:
        registry.cancel("r3")
    assert (full.value.run_id, full.value.limit) == ("r3", 2)
    context = a_run("r2")
    registry.register(context)
    assert context.cancellation.is_cancelled
    assert registry.cancel("r3") is REMEMBERED
    clock.advance(60)
    assert [registry.cancel("r4"), registry.cancel("r5")] == [REMEMBERED] * 2
    assert len(registry._early) == 2


def test_ended_runs_are_removed_as_others_are_registered(registry: RunRegistry) -> None:
    waiting = [a_run(f"waiting {number}") for number in range(100)]
    for context in waiting:
        registry.register(context)
    most = 0
    for number in range(1_000):
        with a_run(f"r{number}") as context:
            registry.register(context)
        most = max(most, len(registry._runs))
    assert most <= 2 * len(waiting) + module.SWEEP_FROM
    assert len(registry) == len(waiting)
    assert registry.cancel("r0") is ENDED


def test_only_the_ids_of_the_newest_ended_runs_are_kept(registry: RunRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ENDED", 3)
    for number in (0, 1, 2, 3, 4, 2):
        with a_run(f"r{number}") as context:
            registry.register(context)
        assert context.run_id not in registry
    assert list(registry._ended) == ["r3", "r4", "r2"]
    assert registry.cancel("r4") is ENDED


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("early_cancel_ttl_s", 0),
        ("early_cancel_ttl_s", -1),
        ("early_cancel_ttl_s", float("nan")),
        ("max_early", 0),
        ("max_early", 1.5),
        ("max_early", True),
    ],
)
def test_bounds_that_are_none_are_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidValue) as refused:
        RunRegistry(**{field: value})
    assert refused.value.field == field


# Any timing.


def in_time(answer: CancelResult) -> bool:
    return answer is not ENDED


@pytest.mark.reliability
def test_no_cancel_is_lost_at_any_moment_of_a_run() -> None:
    async def one_timing(seed: int) -> CancelResult:
        loop, chance = asyncio.get_running_loop(), random.Random(seed)
        assert isinstance(loop, SimLoop)
        registry, answers = RunRegistry(clock=loop.clock), []
        context = a_run(clock=loop.clock)

        async def run() -> None:
            await asyncio.sleep(chance.choice((0, 1, 2)))
            with context:
                registry.register(context)
                for _ in range(3):
                    await context.atool(asyncio.sleep, chance.choice((0, 1)))

        async def cancel() -> None:
            await asyncio.sleep(chance.choice((0, 1, 2, 3, 4, 5)))
            answers.append(registry.cancel("r1"))

        await asyncio.gather(run(), *(cancel() for _ in range(chance.choice((1, 1, 2, 3)))), return_exceptions=True)
        was_cancelled = context.termination_reason is TerminationReason.CONTEXT_CANCELED
        assert was_cancelled == any(map(in_time, answers)), answers
        assert answers.count(CANCELLED) <= 1
        return answers[0]

    met = Counter(explore(one_timing, schedules=TIMINGS))
    assert min(met[CANCELLED], met[REMEMBERED], met[ENDED]) > TIMINGS // 20, met


class Race:
    """One timing of a run that one thread makes while two others cancel it."""

    def __init__(self, chance: random.Random, turns: int) -> None:
        self.registry, self.context = RunRegistry(), a_run()
        self.turns = chance.randrange(turns), chance.randrange(2 * turns), chance.randrange(2 * turns)
        self.turns_inside = chance.randrange(turns)
        self.answers: list[CancelResult] = []

    def take_part(self, thread: int) -> None:
        give_way(self.turns[thread])
        if thread == 0:
            with self.context:
                self.registry.register(self.context)
                give_way(self.turns_inside)
        else:
            self.answers.append(self.registry.cancel("r1"))


def give_way(turns: int) -> None:
    for _ in range(turns):
        time.sleep(0)


@pytest.mark.reliability
@pytest.mark.parametrize(
    ("timings", "turns", "within"),
    [
        pytest.param(TIMINGS, 6, "nothing", id="as they come"),
        pytest.param(200, 30, "penstock.runtime.watching.registry", id="giving way at every line"),
    ],
)
def test_no_cancel_is_lost_between_threads(timings: int, turns: int, within: str) -> None:
    chance = random.Random(16)
    races = [Race(chance, turns) for _ in range(timings)]
    reached = [0.0, 0.0, 0.0]

    def take_part_in_all(thread: int) -> None:
        try:
            for number, race in enumerate(races):
                reached[thread] = number
                while min(reached) < number:
                    time.sleep(0)
                race.take_part(thread)
        finally:
            reached[thread] = float("inf")

    at_once(3, take_part_in_all, within=within)
    for race in races:
        stop = race.context.stop
        if any(map(in_time, race.answers)):
            assert stop is not None, race.answers
            assert stop.reason is StopReason.ABORTED
        else:
            assert race.context.termination_reason is TerminationReason.SUCCESS
        assert race.answers.count(CANCELLED) <= 1
    met = Counter(answer for race in races for answer in race.answers)
    assert min(met[CANCELLED], met[REMEMBERED], met[ENDED]) > 0, met


def test_exactly_one_of_many_concurrent_cancels_is_the_first(registry: RunRegistry) -> None:
    context = a_run()
    registry.register(context)
    answers = at_once(8, lambda _: registry.cancel("r1"), within="penstock.runtime")
    assert Counter(answers) == {CANCELLED: 1, ALREADY: 7}


def test_one_of_many_registrations_of_the_same_id_succeeds(registry: RunRegistry) -> None:
    contexts = [a_run() for _ in range(8)]

    def register(number: int) -> bool:
        try:
            registry.register(contexts[number])
        except InvalidValue:
            return False
        return True

    took = at_once(8, register, within="penstock.runtime.watching.registry")
    assert took.count(True) == 1
    assert registry.get("r1") is contexts[took.index(True)]


class Meddling(ManualClock):
    """A clock that does something when it is read, as another thread might at that moment."""

    readings_left = 0

    def __init__(self) -> None:
        super().__init__()
        self.act: Callable[[], None] = lambda: None

    def monotonic_ns(self) -> int:
        self.readings_left -= 1
        if self.readings_left == 0:
            self.act()
        return super().monotonic_ns()


@pytest.mark.parametrize("reading", [1, 2, 3])
def test_a_cancel_that_comes_while_the_run_ends_is_answered_truly(registry: RunRegistry, reading: int) -> None:
    clock = Meddling()
    context = a_run(clock=clock)
    registry.register(context)
    answers: list[CancelResult] = []
    clock.act, clock.readings_left = lambda: answers.append(registry.cancel("r1")), reading
    context.end()
    answers = answers or [registry.cancel("r1")]
    was_cancelled = context.termination_reason is TerminationReason.CONTEXT_CANCELED
    assert [was_cancelled] == [in_time(answer) for answer in answers]
