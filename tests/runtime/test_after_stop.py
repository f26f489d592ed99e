"""Calls that come after the end of a run.

Refused as halted if the run was stopped or a limit was reached; RunEnded if it ended normally, with room in its limits.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from penstock import (
    Budget,
    BudgetExceededError,
    CancellationToken,
    CancelledError,
    Decision,
    ExecutionConfig,
    ExecutionContext,
    FunctionNode,
    Graph,
    Halted,
    Reported,
    RunEnded,
    ShieldPipeline,
    StopReason,
    ToolCallContext,
    Verdict,
    WrapOptions,
)
from penstock.testing import ManualClock

WRAPS = ["wrap_llm_call", "wrap_tool_call", "awrap_llm_call", "awrap_tool_call"]
Stopping = Callable[[ExecutionContext, ManualClock], None]


class Deny:
    def before_tool_call(self, ctx: ToolCallContext) -> Verdict:
        return Verdict.deny("not today")


def never() -> None:
    pytest.fail("it ran")


def called(context: ExecutionContext, way: str) -> Any:
    """What a call returns that must not run; async ways are awaited."""
    found = getattr(context, way)(never)
    return asyncio.run(found) if inspect.iscoroutine(found) else found


def aborted(context: ExecutionContext, clock: ManualClock) -> None:
    context.abort("enough")


def over_its_steps(context: ExecutionContext, clock: ManualClock) -> None:
    assert [context.wrap_tool_call(lambda: 1) for _ in range(2)] == [Decision.ALLOW, Decision.HALT]


def over_its_cost(context: ExecutionContext, clock: ManualClock) -> None:
    assert context.wrap_llm_call(never, WrapOptions(cost_estimate_hint=5)) is Decision.HALT


def over_its_retries(context: ExecutionContext, clock: ManualClock) -> None:
    def fails() -> None:
        raise ConnectionResetError("gone")

    assert [context.wrap_llm_call(fails) for _ in range(2)] == [Decision.RETRY, Decision.HALT]


def over_its_time(context: ExecutionContext, clock: ManualClock) -> None:
    clock.advance(2)


def cancelled_by_its_token(context: ExecutionContext, clock: ManualClock) -> None:
    context.data.cancel("the user left")


def interrupted(context: ExecutionContext, clock: ManualClock) -> None:
    raise KeyboardInterrupt


def denied(context: ExecutionContext, clock: ManualClock) -> None:
    ExecutionContext(pipeline=ShieldPipeline(tool_dispatch=Deny())).tool(never)


STOPS: dict[Stopping, StopReason] = {
    aborted: StopReason.ABORTED,
    over_its_steps: StopReason.STEP_LIMIT_EXCEEDED,
    over_its_cost: StopReason.BUDGET_EXCEEDED,
    over_its_retries: StopReason.RETRY_BUDGET_EXCEEDED,
    over_its_time: StopReason.TIMEOUT,
    cancelled_by_its_token: StopReason.ABORTED,
    interrupted: StopReason.ABORTED,
    denied: StopReason.ABORTED,
}


def stopped_run(stopping: Stopping) -> ExecutionContext:
    """A run that was stopped in that way, and has ended."""
    clock = ManualClock()
    token = CancellationToken(clock=clock)
    config = ExecutionConfig(1, 1, 1, timeout_ms=1_000)
    with suppress(KeyboardInterrupt, Halted):  # noqa: SIM117  the run ends first
        with ExecutionContext(config, cancellation=token, data=token, clock=clock) as context:
            stopping(context, clock)
    return context


@pytest.mark.requirement("C-18")
@pytest.mark.parametrize("way", WRAPS)
@pytest.mark.parametrize("stopping", STOPS, ids=lambda stopping: stopping.__name__)
def test_wrap_returns_halt_after_the_end_of_a_stopped_run(stopping: Stopping, way: str) -> None:
    run = stopped_run(stopping)
    before, events = run.history(), run.get_snapshot().events
    assert [called(run, way) for _ in range(2)] == [Decision.HALT, Decision.HALT]
    assert called(run.with_input(1), way) is Decision.HALT
    assert (run.history(), run.get_snapshot().events) == (before, events)  # the log is closed


@pytest.mark.requirement("C-18")
@pytest.mark.parametrize("stopping", STOPS, ids=lambda stopping: stopping.__name__)
def test_the_other_ways_to_call_report_the_stop_too(stopping: Stopping) -> None:
    run = stopped_run(stopping)
    for way in ("call_llm", "call_tool", "acall_llm", "acall_tool"):
        outcome = called(run, way)
        assert (outcome.value, outcome.decision, outcome.call.stop.reason) == (None, Decision.HALT, STOPS[stopping])
    for way in ("llm", "tool", "allm", "atool"):
        with pytest.raises((Halted, CancelledError)) as refused:
            called(run, way)
        assert refused.value.stop.reason is STOPS[stopping]


@pytest.mark.requirement("C-18")
@pytest.mark.parametrize("way", WRAPS)
@pytest.mark.parametrize("error", [None, ValueError("no answer")])
def test_a_run_that_was_not_stopped_raises_run_ended(way: str, error: Exception | None) -> None:
    with suppress(ValueError), ExecutionContext(ExecutionConfig(1, 2, 1, timeout_ms=1_000)) as run:
        run.tool(lambda: 1)
        if error is not None:
            raise error
    with pytest.raises(RunEnded):
        called(run, way)


LIMITS = {
    "steps": (Budget(max_steps=1), StopReason.STEP_LIMIT_EXCEEDED),
    "cost": (Budget(max_cost_dollars=0.5), StopReason.BUDGET_EXCEEDED),
    "tokens": (Budget(max_tokens=5), StopReason.TOKEN_LIMIT_EXCEEDED),
    "API calls": (Budget(max_api_calls=1), StopReason.API_CALL_LIMIT_EXCEEDED),
}


@pytest.mark.requirement("C-18")
@pytest.mark.parametrize("way", WRAPS)
@pytest.mark.parametrize("limit", LIMITS)
def test_wrap_returns_halt_after_a_normal_end_at_a_limit(limit: str, way: str) -> None:
    """Nothing was refused while the run was open, but a limit that is reached refuses every later call."""
    budget, reason = LIMITS[limit]
    with ExecutionContext(budget=budget) as run:
        run.llm(lambda: Reported.of(1, input_tokens=5, cost_usd=0.5))
        with run.spawn_child("child") as child:
            pass
    assert run.termination_reason == "success"
    assert [called(one, way) for one in (run, child)] == [Decision.HALT, Decision.HALT]
    assert called(run, "call_llm").call.stop.reason is reason


@pytest.mark.requirement("C-18")
def test_wrap_returns_halt_after_a_normal_end_with_all_retries_used() -> None:
    with ExecutionContext(ExecutionConfig(None, None, 1)) as run:
        assert run.wrap_llm_call(lambda: 1 / 0) is Decision.RETRY
    assert run.wrap_llm_call(never) is Decision.HALT


@pytest.mark.requirement("C-18")
def test_time_that_passes_after_a_normal_end_uses_up_no_limit() -> None:
    clock = ManualClock()
    with ExecutionContext(ExecutionConfig(1, 2, 1, timeout_ms=1_000), clock=clock) as run:
        run.tool(lambda: 1)
    clock.advance(2)
    with pytest.raises(RunEnded):
        run.wrap_tool_call(never)


@pytest.mark.requirement("C-18")
@pytest.mark.parametrize("way", WRAPS)
def test_abort_halts_a_run_that_has_ended_normally(way: str) -> None:
    with ExecutionContext() as run, run.spawn_child("child") as child:
        pass
    run.abort("late")
    assert (called(run, way), called(child, way)) == (Decision.HALT, Decision.HALT)
    assert run.termination_reason == "success"


@pytest.mark.requirement("C-18")
def test_work_left_running_at_a_normal_end_does_not_make_it_a_stop() -> None:
    async def main() -> ExecutionContext:
        run = ExecutionContext()
        child = run.spawn_child("child")
        child.end()
        asking = asyncio.create_task(run.acall_llm(asyncio.Event().wait))
        await asyncio.sleep(0)
        run.end()
        await asking
        for ended in (run, child):
            with pytest.raises(RunEnded):
                ended.wrap_tool_call(never)
        return run

    assert asyncio.run(main()).cancellation.is_cancelled


@pytest.mark.requirement("C-18")
@pytest.mark.parametrize("way", WRAPS)
def test_a_child_that_has_ended_halts_if_it_or_its_run_was_stopped(way: str) -> None:
    with ExecutionContext() as run:
        with run.spawn_child("stopped") as stopped:
            stopped.abort("enough")
        with run.spawn_child("ended") as ended:
            pass
        assert called(stopped, way) is Decision.HALT
        with pytest.raises(RunEnded):
            called(ended, way)
        assert run.wrap_tool_call(lambda: 1) is Decision.ALLOW
        run.abort("enough")
        assert called(ended, way) is Decision.HALT


@pytest.mark.requirement("C-18")
@pytest.mark.parametrize("way", WRAPS)
@pytest.mark.parametrize("stopped", [True, False])
def test_a_run_that_ends_while_a_call_is_on_its_way_in(way: str, stopped: bool) -> None:
    class EndingClock(ManualClock):
        """Ends the run when the door reads the time, which is after it looked whether the run is open."""

        ending: ExecutionContext | None = None

        def monotonic_ns(self) -> int:
            run, self.ending = self.ending, None
            if run is not None:
                if stopped:
                    run.abort("enough")
                run.end()
            return super().monotonic_ns()

    clock = EndingClock()
    run = ExecutionContext(clock=clock)
    clock.ending = run
    if stopped:
        assert called(run, way) is Decision.HALT
    else:
        with pytest.raises(RunEnded):
            called(run, way)


@pytest.mark.requirement("C-18")
async def test_a_graph_reports_the_stop_of_an_ended_run() -> None:
    run = stopped_run(over_its_steps)
    graph = Graph("g")
    graph.add_step(FunctionNode("n", lambda ctx: never()), "a")
    with pytest.raises(BudgetExceededError):
        await graph.execute(run)
