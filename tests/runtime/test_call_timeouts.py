"""A call's own timeout overrides the run's, within the run's remaining time."""

from __future__ import annotations

import asyncio

import pytest

from penstock import Decision, ExecutionConfig, ExecutionContext, RunSettings, StopReason, WrapOptions, current_call
from penstock.testing import ManualClock
from penstock.testing.sim import SimLoop, explore

CASES = pytest.mark.parametrize(
    ("run_ms", "call_ms", "seconds"),
    [
        pytest.param(15_000, 2_000, 2.0, id="shorter"),
        pytest.param(15_000, 10_000, 10.0, id="exactly what is left"),
        pytest.param(15_000, 60_000, 10.0, id="longer"),
        pytest.param(15_000, 0, 10.0, id="zero"),
        pytest.param(15_000, None, 10.0, id="none"),
        pytest.param(0, 60_000, 60.0, id="run without a limit"),
        pytest.param(0, 0, None, id="zero in a run without a limit"),
        pytest.param(0, None, None, id="no limit at all"),
    ],
)


@pytest.mark.requirement("C-20")
@CASES
@pytest.mark.parametrize("kind", ["llm", "tool"])
def test_a_call_has_its_own_timeout_within_what_is_left_of_the_run(
    run_ms: int, call_ms: int | None, seconds: float | None, kind: str
) -> None:
    clock = ManualClock()
    config = ExecutionConfig(None, None, None, timeout_ms=run_ms)
    run = ExecutionContext(config, clock=clock, settings=RunSettings(sync_calls="inline"))
    clock.advance(5)

    def left() -> float | None:
        call = current_call()
        assert call is not None
        return call.token.seconds_left()

    outcome = getattr(run, f"call_{kind}")(left, WrapOptions(timeout_ms=call_ms))
    assert (outcome.decision, outcome.value) == (Decision.ALLOW, seconds)


@pytest.mark.requirement("C-20")
@CASES
def test_an_awaited_call_is_stopped_when_that_time_is_up(
    run_ms: int, call_ms: int | None, seconds: float | None
) -> None:
    async def schedule(seed: int) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        run = ExecutionContext(ExecutionConfig(None, None, None, timeout_ms=run_ms), clock=loop.clock)
        await asyncio.sleep(5)
        began = loop.time()
        outcome = await run.acall_tool(lambda: asyncio.sleep(3_600), WrapOptions("slow", timeout_ms=call_ms))
        took = loop.time() - began
        assert took == pytest.approx(3_600 if seconds is None else seconds, abs=0.01)
        if seconds is None:
            assert outcome.decision is Decision.ALLOW
            return
        stop = outcome.call.stop
        assert stop is not None
        own = bool(call_ms) and (not run_ms or seconds < 10)
        assert (outcome.decision, stop.reason, stop.budget) == (
            Decision.HALT,
            StopReason.TIMEOUT,
            "slow" if own else "main",
        )
        after = await run.awrap_tool_call(lambda: asyncio.sleep(0))
        assert after is (Decision.ALLOW if own else Decision.HALT)  # only the run's own limit stops the run

    explore(schedule, schedules=1)
