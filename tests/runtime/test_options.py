"""What a caller may say about one call: each of it works, and nonsense is refused by name."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import threading
from decimal import Decimal
from typing import Any

import pytest

from penstock import Decision, ExecutionConfig, ExecutionContext, InvalidValue, PriceBook, StopReason, WrapOptions
from penstock.testing import Answer, FakeProvider, ManualClock, Raise


def nothing() -> None:
    pass


class Flaky:
    """A function that fails so many times and then works."""

    def __init__(self, failures: int) -> None:
        self.failures, self.calls = failures, 0

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.failures:
            raise ConnectionRefusedError
        return "done"


@pytest.mark.requirement("C-7")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("operation_name", None),
        ("operation_name", 5),
        ("operation_name", b"ask"),
        ("cost_estimate_hint", math.nan),
        ("cost_estimate_hint", math.inf),
        ("cost_estimate_hint", -0.01),
        ("cost_estimate_hint", True),
        ("cost_estimate_hint", None),
        ("cost_estimate_hint", "a lot"),
        ("cost_estimate_hint", 10**10),
        ("timeout_ms", -1),
        ("timeout_ms", 1.5),
        ("timeout_ms", math.nan),
        ("timeout_ms", True),
        ("timeout_ms", "100"),
        ("timeout_ms", 10**10),
        ("retry_policy_override", -1),
        ("retry_policy_override", 1.0),
        ("retry_policy_override", False),
        ("retry_policy_override", "3"),
        ("model", 5),
        ("degraded", "short answer"),
    ],
)
def test_an_invalid_option_is_refused_and_the_message_names_it(field: str, value: Any) -> None:
    with pytest.raises(InvalidValue, match=f"^{field} must be ") as refused:
        WrapOptions(**{field: value})
    assert refused.value.field == field


@pytest.mark.requirement("C-7")
def test_the_fields_are_those_that_were_promised_and_all_may_be_left_out() -> None:
    options = WrapOptions()
    given = [field.name for field in dataclasses.fields(options) if field.init]
    assert given[:4] == ["operation_name", "cost_estimate_hint", "timeout_ms", "retry_policy_override"]
    assert [getattr(options, name) for name in given] == ["", 0.0, None, None, None, None]
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.operation_name = "other"  # type: ignore[misc]


@pytest.mark.requirement("C-7")
def test_the_name_is_the_calls_and_without_one_it_is_its_kind() -> None:
    ctx = ExecutionContext()
    ctx.wrap_llm_call(nothing, WrapOptions(operation_name="plan"))
    ctx.wrap_llm_call(nothing)
    ctx.wrap_tool_call(nothing, WrapOptions())
    assert [node.operation_name for node in ctx.get_snapshot().nodes] == ["plan", "llm", "tool"]


@pytest.mark.requirement("C-7")
@pytest.mark.parametrize("hint", [0.25, "0.25", Decimal("0.25")], ids=repr)
def test_the_hint_is_held_while_the_call_runs_and_is_its_cost_if_nothing_better_is_known(hint: Any) -> None:
    ctx = ExecutionContext(ExecutionConfig(1, None, None))
    held: list[float] = []
    options = WrapOptions(cost_estimate_hint=hint)
    ctx.wrap_llm_call(lambda: held.append(ctx.balance.held_usd), options)
    assert (held, ctx.balance.held_usd, ctx.balance.spent_usd) == ([0.25], 0, 0.25)
    ctx.wrap_llm_call(lambda: ctx.report(cost_usd=0.10), options)
    assert ctx.balance.spent_usd == 0.35


@pytest.mark.requirement("C-7")
def test_a_hint_of_zero_is_no_hint() -> None:
    ctx = ExecutionContext()
    ctx.wrap_llm_call(lambda: ctx.report(cost_usd=0.30))
    held: list[float] = []
    ctx.wrap_llm_call(lambda: held.append(ctx.balance.held_usd), WrapOptions(cost_estimate_hint=0))
    assert held == [0.30], "without a hint it is the most that such a call has cost so far"


@pytest.mark.requirement("C-7", "C-4")
def test_the_timeout_is_the_calls_own_and_the_run_continues() -> None:
    release = threading.Event()
    ctx = ExecutionContext()
    outcome = ctx.call_tool(lambda: release.wait(30), WrapOptions("slow", timeout_ms=10))
    release.set()
    assert (outcome.decision, outcome.call.stop.budget) == (Decision.HALT, "slow")  # type: ignore[union-attr]
    assert outcome.call.stop.reason is StopReason.TIMEOUT  # type: ignore[union-attr]
    assert ctx.wrap_tool_call(nothing) is Decision.ALLOW


@pytest.mark.requirement("C-7", "C-4")
async def test_the_timeout_cancels_what_is_awaited() -> None:
    cancelled: list[bool] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    ctx = ExecutionContext()
    assert await ctx.awrap_tool_call(slow, WrapOptions("slow", timeout_ms=10)) is Decision.HALT
    assert cancelled == [True]
    assert await ctx.awrap_tool_call(lambda: asyncio.sleep(0)) is Decision.ALLOW


@pytest.mark.requirement("C-7")
def test_a_timeout_of_zero_leaves_the_runs_timeout() -> None:
    assert ExecutionContext().wrap_tool_call(nothing, WrapOptions(timeout_ms=0)) is Decision.ALLOW


@pytest.mark.requirement("C-7", "C-4")
def test_a_longer_timeout_does_not_outlast_the_run() -> None:
    release = threading.Event()
    ctx = ExecutionContext(ExecutionConfig(None, None, None, timeout_ms=20))
    outcome = ctx.call_tool(lambda: release.wait(30), WrapOptions("slow", timeout_ms=25_000))
    release.set()
    assert outcome.decision is Decision.HALT
    assert (outcome.call.stop.limit, outcome.call.stop.budget) == (0.02, "main")  # type: ignore[union-attr]


@pytest.mark.requirement("C-7")
def test_a_call_is_retried_in_place_as_often_as_its_options_allow() -> None:
    ctx, work = ExecutionContext(), Flaky(2)
    outcome = ctx.call_tool(work, WrapOptions("flaky", retry_policy_override=2))
    assert (outcome.value, outcome.decision, work.calls) == ("done", Decision.ALLOW, 3)
    assert [node.status for node in ctx.get_snapshot().nodes] == ["error", "error", "ok"]
    assert ctx.get_snapshot().retries_used == 2
    attempts = [node["metadata"].get("attempt") for node in ctx.graph.snapshot()["nodes"].values()]
    assert attempts == [None, None, 2, 3], "the root, the call, and the two retries of it"


@pytest.mark.requirement("C-7")
def test_without_the_override_a_call_is_tried_once() -> None:
    ctx, work = ExecutionContext(), Flaky(1)
    assert ctx.wrap_tool_call(work) is Decision.RETRY
    assert ctx.wrap_tool_call(work, WrapOptions(retry_policy_override=0)) is Decision.ALLOW
    assert work.calls == 2


@pytest.mark.requirement("C-7")
def test_the_last_of_too_few_attempts_leaves_its_error() -> None:
    ctx, work = ExecutionContext(), Flaky(5)
    outcome = ctx.call_tool(work, WrapOptions(retry_policy_override=1))
    assert (outcome.decision, work.calls) == (Decision.RETRY, 2)
    with pytest.raises(ConnectionRefusedError):
        outcome.call.result()


@pytest.mark.requirement("C-7", "C-3")
@pytest.mark.parametrize("retries", [0, 1, 3])
def test_the_retries_of_a_call_are_drawn_from_those_of_the_run(retries: int) -> None:
    ctx, work = ExecutionContext(ExecutionConfig(None, None, retries)), Flaky(100)
    outcome = ctx.call_tool(work, WrapOptions(retry_policy_override=50))
    assert (outcome.decision, work.calls) == (Decision.HALT, retries + 1 if retries else 0)
    assert ctx.balance.retries == retries
    reason = StopReason.PROVIDER_ERROR if retries else StopReason.RETRY_BUDGET_EXCEEDED
    assert outcome.call.stop.reason is reason  # type: ignore[union-attr]


@pytest.mark.requirement("C-7")
async def test_awaited_calls_are_tried_again_too() -> None:
    provider = FakeProvider([Raise(), Raise(), Answer("at last")])
    ctx = ExecutionContext(prices=PriceBook(use_genai_prices=False))
    outcome = await ctx.acall_llm(provider.acomplete, WrapOptions("ask", retry_policy_override=2))
    assert (outcome.decision, provider.invoice.calls) == (Decision.ALLOW, 3)


@pytest.mark.requirement("C-7")
def test_one_set_of_options_serves_any_number_of_calls_and_runs() -> None:
    options = WrapOptions("step", cost_estimate_hint=0.01, timeout_ms=5_000, retry_policy_override=1, model="m-1")
    for _ in range(3):
        ctx = ExecutionContext(clock=ManualClock())
        assert [ctx.wrap_llm_call(nothing, options) for _ in range(3)] == [Decision.ALLOW] * 3
        assert ctx.stats.model_calls_by_model == {"m-1": 3}
        ctx.end()
