"""A run as its owner sees it: what is refused and in which order, which events are emitted, what is recorded."""

from __future__ import annotations

import asyncio
import contextvars
import json
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import Any, ClassVar

import pytest

from penstock import (
    Budget,
    BudgetExceededError,
    BudgetWindowHook,
    CancellationToken,
    CancelledError,
    ChainMetadata,
    ChildCompleteTrace,
    ChildSpawnTrace,
    CircuitBreaker,
    CustomTrace,
    Decision,
    ExecutionConfig,
    ExecutionContext,
    Halted,
    InvalidValue,
    IterationEndTrace,
    IterationStartTrace,
    ModelCallTrace,
    PolicyContext,
    PolicyDecision,
    Price,
    PriceBook,
    RunSettings,
    SafetyEvent,
    ShieldPipeline,
    StopReason,
    ToolCallContext,
    ToolCallTrace,
    TraceEvent,
    Verdict,
    WrapOptions,
    contain,
    current_context,
)
from penstock.containment import Outcome
from penstock.events import (
    CallEnded,
    CallSettled,
    CallStarted,
    CompactionTrace,
    DivergenceDetector,
    ErrorTrace,
    LimitTrace,
    RunCompleted,
    RunStarted,
)
from penstock.testing import Answer, FakeProvider, ManualClock, check_history
from penstock.testing.clock import WALL_START_NS

PRICES = PriceBook(registered={"fake-1": Price(3, 15)}, use_genai_prices=False)
META = ChainMetadata(
    request_id="req-1",
    chain_id="chain-1",
    org_id="acme",
    team="search",
    service="summariser",
    user_id="user-42",
    model="large-1",
    tags={"env": "prod"},
)


def nothing() -> None:
    pass


def fails() -> None:
    raise ValueError("no answer")


async def nothing_later() -> None:
    await asyncio.sleep(0)


def the_stop(ctx: ExecutionContext) -> SafetyEvent:
    """The one safety event there is."""
    (event,) = ctx.get_snapshot().events
    return event


class Deny:
    """A hook that says no to everything, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def before_llm_call(self, ctx: ToolCallContext) -> Verdict:
        self.calls += 1
        return Verdict.deny("not today")

    before_tool_call = before_llm_call


class Watched(CircuitBreaker):
    """A breaker that counts its checks."""

    def __init__(self) -> None:
        super().__init__(failure_threshold=1)
        self.checks = 0

    def check(self, context: PolicyContext | None = None) -> PolicyDecision:
        self.checks += 1
        return super().check(context)


# The order of checks.

ORDER = (
    ("abort", StopReason.ABORTED),
    ("cost", StopReason.BUDGET_EXCEEDED),
    ("steps", StopReason.STEP_LIMIT_EXCEEDED),
    ("retries", StopReason.RETRY_BUDGET_EXCEEDED),
    ("time", StopReason.TIMEOUT),
    ("tokens", StopReason.TOKEN_LIMIT_EXCEEDED),
    ("api calls", StopReason.API_CALL_LIMIT_EXCEEDED),
    ("hold", StopReason.BUDGET_EXCEEDED),
    ("shield", StopReason.HOOK_DENIED),
    ("breaker", StopReason.CIRCUIT_OPEN),
)
NAMES = [name for name, _ in ORDER]
TOO_DEAR = WrapOptions(operation_name="ask", cost_estimate_hint=1.00)
CHEAP = WrapOptions(operation_name="ask", cost_estimate_hint=0.01)


@dataclass
class Violating:
    """A run in which everything of `ORDER` from `first` on would refuse."""

    first: int

    def __post_init__(self) -> None:
        wrong = set(NAMES[self.first :])
        clock = ManualClock()
        self.hook, self.breaker = Deny(), Watched()
        self.breaker.record_failure()
        self.options = TOO_DEAR if "hold" in wrong else CHEAP
        self.ctx = ExecutionContext(
            ExecutionConfig(
                max_cost_usd=0 if "cost" in wrong else 0.10,
                max_steps=0 if "steps" in wrong else 1,
                max_retries_total=0 if "retries" in wrong else 1,
                timeout_ms=1_000,
            ),
            ShieldPipeline(pre_dispatch=self.hook) if "shield" in wrong else None,
            budget=Budget(
                max_tokens=0 if "tokens" in wrong else 1,
                max_api_calls=0 if "api calls" in wrong else 1,
            ),
            breaker=self.breaker,
            settings=RunSettings(sync_calls="inline"),
            clock=clock,
        )
        clock.advance(2 if "time" in wrong else 0.5)
        if "abort" in wrong:
            self.ctx.abort("enough")
        self.ran = 0

    def work(self) -> None:
        self.ran += 1


@pytest.mark.requirement("C-5")
@pytest.mark.parametrize("first", range(len(ORDER)), ids=NAMES)
@pytest.mark.parametrize("door", ["wrap", "await"])
async def test_the_first_check_that_refuses_ends_the_checks(first: int, door: str) -> None:
    case = Violating(first)
    if door == "wrap":
        decision = case.ctx.wrap_llm_call(case.work, case.options)
    else:
        decision = await case.ctx.awrap_llm_call(case.work, case.options)
    assert (decision, case.ran) == (Decision.HALT, 0)
    name, reason = ORDER[first]
    assert case.ctx.get_snapshot().events[-1].event_type == reason
    assert case.hook.calls == (1 if name == "shield" else 0)
    assert case.breaker.checks == (1 if name == "breaker" else 0)


@pytest.mark.requirement("C-5")
def test_a_refused_call_has_taken_nothing_whatever_refused_it() -> None:
    for first in range(len(ORDER)):
        case = Violating(first)
        case.ctx.wrap_llm_call(case.work, case.options)
        figures = case.ctx.balance
        taken = (figures.held_nanos, figures.unresolved_nanos, figures.spent_nanos, figures.attempts, figures.api_calls)
        assert taken == (0, 0, 0, 0, 0), NAMES[first]
        assert (figures.steps, figures.steps_open) == (0, 0), NAMES[first]


@pytest.mark.requirement("C-5")
def test_an_unpriced_or_looping_call_is_refused_before_hooks_and_breaker_run() -> None:
    hook, breaker = Deny(), Watched()
    pipeline = ShieldPipeline(pre_dispatch=hook)
    strict = ExecutionContext(None, pipeline, breaker=breaker, settings=RunSettings(strict=True))
    strict.wrap_llm_call(nothing)
    in_circles = ExecutionContext(None, pipeline, breaker=breaker, divergence=DivergenceDetector(repeats=2, halts=True))
    in_circles.tool(len, "the same")
    before = breaker.checks
    with pytest.raises(Halted) as refused:
        in_circles.tool(len, "the same")
    assert (the_stop(strict).event_type, refused.value.stop_reason) == ("price_unknown", "diverged")
    assert (hook.calls, breaker.checks - before) == (0, 0)


@pytest.mark.requirement("C-5")
def test_the_order_of_checks_comes_before_the_order_of_levels_and_the_nearest_level_comes_first() -> None:
    run = ExecutionContext(ExecutionConfig(0, 0, None), name="run")
    child = run.spawn_child("child", budget=Budget(max_steps=0))
    with pytest.raises(BudgetExceededError) as refused:
        child.tool(nothing)
    assert (refused.value.stop_reason, refused.value.owner) == ("budget_exceeded", "run")
    run = ExecutionContext(ExecutionConfig(None, 0, None), name="run")
    child = run.spawn_child("child", budget=Budget(max_steps=0))
    with pytest.raises(BudgetExceededError) as refused:
        child.tool(nothing)
    assert (refused.value.stop_reason, refused.value.owner) == ("step_limit_exceeded", "child")


# Why something stopped.


def over_the_cost() -> ExecutionContext:
    ctx = ExecutionContext(ExecutionConfig(0.50, None, None), metadata=META)
    ctx.wrap_llm_call(nothing, WrapOptions(cost_estimate_hint=0.40))
    ctx.wrap_llm_call(nothing, WrapOptions("ask", cost_estimate_hint=0.20))
    return ctx


def out_of_retries() -> ExecutionContext:
    ctx = ExecutionContext(ExecutionConfig(None, None, 1), metadata=META)
    ctx.wrap_llm_call(fails)
    ctx.wrap_llm_call(nothing, WrapOptions("ask"))
    return ctx


def circuit_open() -> ExecutionContext:
    breaker = CircuitBreaker(failure_threshold=1, name="model API")
    ctx = ExecutionContext(metadata=META, breaker=breaker)
    breaker.record_failure()
    ctx.wrap_llm_call(nothing, WrapOptions("ask"))
    return ctx


def out_of_steps() -> ExecutionContext:
    ctx = ExecutionContext(ExecutionConfig(None, 1, None), metadata=META)
    ctx.wrap_llm_call(nothing)
    ctx.wrap_llm_call(nothing, WrapOptions("ask"))
    return ctx


def timed_out() -> ExecutionContext:
    clock = ManualClock()
    ctx = ExecutionContext(ExecutionConfig(None, None, None, timeout_ms=1_000), metadata=META, clock=clock)
    clock.advance(3)
    ctx.wrap_llm_call(nothing, WrapOptions("ask"))
    return ctx


def aborted() -> ExecutionContext:
    ctx = ExecutionContext(metadata=META)
    ctx.abort("the user left")
    return ctx


def rate_limited() -> ExecutionContext:
    window = BudgetWindowHook(max_calls=1, window_seconds=60, degrade_threshold=None)
    ctx = ExecutionContext(pipeline=ShieldPipeline(pre_dispatch=window), metadata=META)
    ctx.wrap_llm_call(nothing)
    ctx.wrap_llm_call(nothing, WrapOptions("ask"))
    return ctx


def out_of_attempts() -> ExecutionContext:
    ctx = ExecutionContext(ExecutionConfig(None, None, 1), metadata=META)
    ctx.wrap_llm_call(fails, WrapOptions("ask", retry_policy_override=5))
    return ctx


def out_of_tokens() -> ExecutionContext:
    ctx = ExecutionContext(budget=Budget(max_tokens=100), metadata=META)
    ctx.wrap_llm_call(lambda: ctx.report(input_tokens=70, output_tokens=30, cost_usd=0))
    ctx.wrap_llm_call(nothing, WrapOptions("ask"))
    return ctx


def out_of_api_calls() -> ExecutionContext:
    ctx = ExecutionContext(budget=Budget(max_api_calls=1), metadata=META)
    ctx.wrap_llm_call(nothing)
    ctx.wrap_llm_call(nothing, WrapOptions("ask"))
    return ctx


def price_unknown() -> ExecutionContext:
    ctx = ExecutionContext(metadata=META, settings=RunSettings(strict=True))
    ctx.wrap_llm_call(nothing, WrapOptions("ask"))
    return ctx


def diverged() -> ExecutionContext:
    ctx = ExecutionContext(metadata=META, divergence=DivergenceDetector(repeats=2, halts=True))
    ctx.llm(len, "the same", name="ask")
    with pytest.raises(Halted):
        ctx.llm(len, "the same", name="ask")
    return ctx


STOPS: Mapping[str, tuple[Callable[[], ExecutionContext], dict[str, Any]]] = {
    "budget_exceeded": (
        over_the_cost,
        {"budget": "main", "unit": "usd", "limit": 0.50, "used": 0.40, "held": 0.0, "asked": 0.20},
    ),
    "retry_budget_exceeded": (out_of_retries, {"budget": "main", "unit": "retries", "limit": 1, "used": 1}),
    "circuit_open": (circuit_open, {"budget": None}),
    "step_limit_exceeded": (out_of_steps, {"budget": "main", "unit": "steps", "limit": 1, "used": 1, "held": 0}),
    "timeout": (timed_out, {"budget": "main", "unit": "seconds", "limit": 1, "used": 3}),
    "aborted": (aborted, {"budget": "main"}),
    "provider_rate_limit": (rate_limited, {"hook": "BudgetWindowHook"}),
    "provider_error": (out_of_attempts, {"budget": None}),
    "token_limit_exceeded": (out_of_tokens, {"budget": "main", "unit": "tokens", "limit": 100, "used": 100}),
    "api_call_limit_exceeded": (out_of_api_calls, {"budget": "main", "unit": "api calls", "limit": 1, "used": 1}),
    "price_unknown": (price_unknown, {"budget": None}),
    "diverged": (diverged, {"budget": None}),
}
WHY = {
    "budget_exceeded": "$0.40 spent of the $0.50 of 'main'; the call would hold $0.20",
    "retry_budget_exceeded": "1 of the 1 retries of 'main' used",
    "circuit_open": "circuit 'model API' is open after 1 failure; it tries again in",
    "step_limit_exceeded": "1 of the 1 steps of 'main' used",
    "timeout": "3.000 s elapsed of the 1 s of 'main'",
    "aborted": "the user left",
    "provider_rate_limit": "1 of 1 calls in the last 60 s; a slot is free in",
    "provider_error": "ValueError: no answer; the retry budget has nothing left for another attempt",
    "token_limit_exceeded": "100 of the 100 tokens of 'main' used",
    "api_call_limit_exceeded": "1 of the 1 api calls of 'main' used",
    "price_unknown": "the run is strict and the call has no cost hint; pass one",
    "diverged": "",
}


BEFORE = {"retry_budget_exceeded": ["provider_error"]}
"""Stops that are recorded before another one: the failure that used up the retry budget is final."""


@pytest.mark.requirement("C-11")
@pytest.mark.parametrize("reason", STOPS)
def test_every_stop_is_recorded_once_with_its_reason_and_its_figures(reason: str) -> None:
    stopped, figures = STOPS[reason]
    *earlier, event = stopped().get_snapshot().events
    assert [before.event_type for before in earlier] == BEFORE.get(reason, [])
    assert (event.event_type, event.hook, event.decision) == (reason, "ExecutionContext", Decision.HALT)
    assert event.reason.startswith(WHY[reason])
    assert event.reason
    assert {key: event.metadata[key] for key in figures} == figures
    assert event.request_id == "req-1"
    assert event.metadata["operation_name"] == ("main" if reason == "aborted" else "ask")


@pytest.mark.requirement("C-11")
@pytest.mark.parametrize("reason", STOPS)
def test_every_stop_is_in_the_log_with_the_call_it_stopped(reason: str) -> None:
    stopped, figures = STOPS[reason]
    ctx = stopped()
    *earlier, limit = [event for event in ctx.history() if isinstance(event, LimitTrace)]
    assert [before.stop_reason for before in earlier] == BEFORE.get(reason, [])
    assert (limit.stop_reason, limit.message) == (reason, ctx.get_snapshot().events[-1].reason)
    facts = {"budget": limit.budget, "unit": limit.unit, "limit": limit.limit, "used": limit.used}
    assert facts == {key: figures.get(key) for key in facts}
    if reason != "aborted":
        assert ctx.graph.snapshot()["nodes"][limit.node_id]["stop_reason"].startswith(f"{reason}: ") or (
            reason == "provider_error"
        )


@pytest.mark.requirement("C-11")
def test_a_denial_for_a_reason_of_the_hooks_own_carries_the_name_of_the_hook() -> None:
    ctx = ExecutionContext(pipeline=ShieldPipeline(tool_dispatch=Deny()), metadata=META)
    with pytest.raises(Halted, match="not today"):
        ctx.tool(nothing, name="delete")
    event = the_stop(ctx)
    assert (event.event_type, event.hook, event.reason) == ("hook_denied", "Deny", "not today")
    assert event.metadata["operation_name"] == "delete"


@pytest.mark.requirement("C-11")
def test_the_eight_reasons_of_a_run_are_all_reached() -> None:
    chain_level = {
        "budget_exceeded",
        "retry_budget_exceeded",
        "circuit_open",
        "step_limit_exceeded",
        "timeout",
        "aborted",
        "provider_rate_limit",
        "provider_error",
    }
    assert chain_level <= STOPS.keys()
    everywhere = {*STOPS, "hook_denied", "ledger_unavailable"}
    assert everywhere == set(StopReason)


@pytest.mark.requirement("C-11")
def test_a_stop_names_its_budget_and_not_the_stopped_context() -> None:
    run = ExecutionContext(ExecutionConfig(None, 1, None), name="run")
    child = run.spawn_child("child", budget=Budget(max_steps=5))
    child.tool(nothing)
    assert child.wrap_tool_call(nothing) is Decision.HALT
    assert the_stop(run).metadata["budget"] == "run"


# The doors.


@pytest.mark.requirement("C-6")
@pytest.mark.parametrize("kind", ["llm", "tool"])
def test_a_call_is_made_for_its_decision_its_outcome_or_its_value(kind: str) -> None:
    ctx = ExecutionContext()
    wrap, call, plain = (getattr(ctx, name) for name in (f"wrap_{kind}_call", f"call_{kind}", kind))
    assert wrap(lambda: 42) is Decision.ALLOW
    outcome = call(lambda: 42)
    assert isinstance(outcome, Outcome)
    assert (outcome.value, outcome.decision, outcome.call.node_id) == (42, Decision.ALLOW, "n000003")
    assert plain(lambda: 42) == 42
    assert [node.kind for node in ctx.get_snapshot().nodes] == [kind] * 3


@pytest.mark.requirement("C-6")
@pytest.mark.parametrize("kind", ["llm", "tool"])
async def test_every_door_has_a_twin_that_awaits(kind: str) -> None:
    async def answer() -> int:
        await asyncio.sleep(0)
        return 42

    ctx = ExecutionContext()
    wrap, call, plain = (getattr(ctx, name) for name in (f"awrap_{kind}_call", f"acall_{kind}", f"a{kind}"))
    assert await wrap(answer) is Decision.ALLOW
    outcome = await call(answer)
    assert (outcome.value, outcome.decision) == (42, Decision.ALLOW)
    assert await plain(answer) == 42
    assert [node.kind for node in ctx.get_snapshot().nodes] == [kind] * 3


@pytest.mark.requirement("C-6")
async def test_a_failure_is_a_retry_to_who_wants_the_decision_and_raised_to_who_wants_the_value() -> None:
    async def fails_later() -> None:
        raise ValueError("no answer")

    ctx = ExecutionContext()
    assert ctx.wrap_llm_call(fails) is await ctx.awrap_llm_call(fails_later) is Decision.RETRY
    outcome = ctx.call_tool(fails)
    assert (outcome.value, outcome.decision) == (None, Decision.RETRY)
    assert isinstance(outcome.call.error, ValueError)
    with pytest.raises(ValueError, match="no answer"):
        ctx.llm(fails)
    with pytest.raises(ValueError, match="no answer"):
        await ctx.atool(fails_later)


@pytest.mark.requirement("C-6")
async def test_a_refusal_is_halt_to_who_wants_the_decision_and_raised_to_who_wants_the_value() -> None:
    ctx = ExecutionContext(ExecutionConfig(None, 0, None))
    assert ctx.wrap_tool_call(nothing) is await ctx.awrap_tool_call(nothing_later) is Decision.HALT
    for refused in (lambda: ctx.tool(nothing), ctx.call_llm(nothing).call.result):
        with pytest.raises(BudgetExceededError):
            refused()
    with pytest.raises(BudgetExceededError):
        await ctx.allm(nothing_later)
    ctx.abort("enough")
    with pytest.raises(CancelledError, match="enough"):
        ctx.llm(nothing)


@pytest.mark.requirement("C-6")
def test_arguments_are_passed_on_and_the_function_gives_the_call_its_name() -> None:
    ctx = ExecutionContext()
    assert ctx.tool(max, 3, 7) == 7
    assert ctx.llm(str.upper, "a") == "A"
    assert ctx.tool(lambda: 1) == 1
    assert ctx.tool(max, 3, 7, name="largest") == 7
    assert [node.operation_name for node in ctx.get_snapshot().nodes] == ["max", "upper", "tool", "largest"]


@pytest.mark.requirement("C-6")
@pytest.mark.parametrize("door", ["wrap_llm_call", "wrap_tool_call", "call_llm", "call_tool", "llm", "tool"])
@pytest.mark.parametrize("given", [None, "the result", 42], ids=repr)
def test_a_result_in_the_place_of_a_function_is_refused_before_anything_is_recorded(door: str, given: Any) -> None:
    ctx = ExecutionContext()
    with pytest.raises(InvalidValue, match=r"^fn must be a function to call, as in \(fetch, url\)"):
        getattr(ctx, door)(given)
    assert ctx.get_snapshot().nodes == []
    assert ctx.balance.retries == 0


@pytest.mark.requirement("C-6")
async def test_a_coroutine_in_the_place_of_a_function_is_refused_and_closed() -> None:
    ctx = ExecutionContext()
    with pytest.raises(InvalidValue, match="fn must be a function"):
        await ctx.allm(nothing_later())
    assert ctx.get_snapshot().nodes == []


@pytest.mark.requirement("C-7")
@pytest.mark.parametrize("door", ["llm", "tool", "allm", "atool"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", 5),
        ("name", None),
        ("name", b"ask"),
        ("cost_hint_usd", math.nan),
        ("cost_hint_usd", -0.01),
        ("cost_hint_usd", True),
        ("timeout_s", math.nan),
        ("timeout_s", math.inf),
        ("timeout_s", -1),
        ("timeout_s", "5"),
        ("retries", -1),
        ("retries", 1.5),
        ("retries", "3"),
        ("retries", True),
        ("degraded", "short answer"),
    ],
)
async def test_an_invalid_argument_of_a_call_is_refused_by_name_and_nothing_runs(
    door: str, field: str, value: Any
) -> None:
    ctx, ran = ExecutionContext(), []
    with pytest.raises(InvalidValue) as refused:
        pending = getattr(ctx, door)(lambda: ran.append(1), **{field: value})
        await pending
    assert refused.value.field == field
    assert (ran, ctx.get_snapshot().nodes) == ([], [])


def test_an_invalid_model_name_is_refused() -> None:
    with pytest.raises(InvalidValue, match="model must be a string, or None, not 5"):
        ExecutionContext().llm(nothing, model=5)  # type: ignore[arg-type]


@pytest.mark.requirement("C-7")
def test_options_that_are_none_of_ours_are_refused() -> None:
    with pytest.raises(InvalidValue, match="options must be WrapOptions or None"):
        ExecutionContext().wrap_llm_call(nothing, {"operation_name": "ask"})  # type: ignore[arg-type]


# Nothing but limits, or not even those.


@pytest.mark.requirement("C-16")
async def test_a_run_without_any_configuration_does_everything() -> None:
    async with ExecutionContext() as ctx:
        assert ctx.wrap_llm_call(nothing) is await ctx.awrap_tool_call(nothing_later) is Decision.ALLOW
        assert ctx.wrap_tool_call(fails) is Decision.RETRY
        assert ctx.egress("https://example.org") is Decision.ALLOW
        with ctx.spawn_child("child") as child:
            child.tool(nothing, name="inner")
        ctx.record_event(SafetyEvent("note", Decision.ALLOW, "all is well", "test"))
        ctx.trace_custom("note")
        ctx.check_budget()
        ctx.check_cancelled()
    snapshot = ctx.get_snapshot()
    assert (snapshot.step_count, snapshot.aborted, snapshot.chain_id) == (3, False, ctx.run_id)
    assert (ctx.budget, ctx.metadata.chain_id, ctx.termination_reason) == (None, ctx.run_id, "success")
    assert ctx.explain().splitlines()[0].startswith("✓ main")
    assert check_history(ctx.history()) == []


@pytest.mark.requirement("C-16")
@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (ExecutionConfig(0.02, None, None), 2),
        (ExecutionConfig(None, 2, None), 2),
        (ExecutionConfig(None, None, 2), 3),
        (ExecutionConfig(None, None, None), 3),
    ],
    ids=["cost", "steps", "retries", "none"],
)
def test_with_limits_and_no_pipeline_the_limits_hold(config: ExecutionConfig, kept: int) -> None:
    ctx = ExecutionContext(config, None)
    decisions = [ctx.wrap_llm_call(nothing, CHEAP) for _ in range(3)]
    assert decisions == [Decision.ALLOW] * kept + [Decision.HALT] * (3 - kept)


@pytest.mark.requirement("C-1")
@pytest.mark.parametrize("limits", [(0, None, None), (None, 0, None), (None, None, 0), ("0", 0, 0), (Decimal(0), 9, 9)])
def test_a_limit_of_zero_halts_the_first_call(limits: tuple[Any, Any, Any]) -> None:
    ctx, ran = ExecutionContext(ExecutionConfig(*limits)), []
    assert ctx.wrap_tool_call(lambda: ran.append(1)) is Decision.HALT
    assert ran == []


@pytest.mark.requirement("C-1")
def test_a_timeout_of_zero_is_no_timeout() -> None:
    clock = ManualClock()
    ctx = ExecutionContext(ExecutionConfig(None, None, None, timeout_ms=0), clock=clock)
    clock.advance(10**6)
    assert ctx.wrap_tool_call(nothing) is Decision.ALLOW


@pytest.mark.requirement("C-1")
def test_the_tighter_limit_of_config_and_budget_holds_in_each_dimension() -> None:
    ctx = ExecutionContext(ExecutionConfig(0.50, 9, None), budget=Budget(max_cost_dollars=0.90, max_steps=2))
    limits = ctx.balance.limits
    assert (limits.cost_nanos, limits.steps) == (500_000_000, 2)


ARGUMENTS = ("config", "pipeline", "metadata", "budget", "cancellation", "breaker", "prices", "divergence", "ledger")


@pytest.mark.requirement("C-1")
@pytest.mark.parametrize(
    ("field", "wrong"),
    [(field, wrong) for field in (*ARGUMENTS, "settings") for wrong in (5, "main", {"max_steps": 3})]
    + [("upstream", ["a"]), ("upstream", 5), ("name", 5), ("name", ["main"])],
)
def test_an_argument_of_the_wrong_kind_is_refused_by_name(field: str, wrong: Any) -> None:
    with pytest.raises(InvalidValue) as refused:
        ExecutionContext(**{field: wrong})
    assert refused.value.field == field


def test_a_name_of_none_is_refused() -> None:
    with pytest.raises(InvalidValue, match="name must be text, not None"):
        ExecutionContext(name=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["", "Übergabe", "検索", "🛑", "a/b", "two\nlines", "\x1b[31mred", "e\u0301", "x" * 10_000]
)
def test_names_in_any_script_come_back_as_they_were(name: str) -> None:
    with ExecutionContext(name=name) as ctx:
        ctx.tool(nothing, name=name or "tool")
        ctx.spawn_child(name).end()
    assert ctx.get_snapshot().nodes[0].operation_name == (name or "tool")
    assert [event.name for event in ctx.history() if isinstance(event, ToolCallTrace)] == [name or "tool"]
    assert (ctx.name, ctx.children[0].name) == (name, name)
    json.dumps([event.to_dict() for event in ctx.history()])
    assert len(ctx.explain().splitlines()) == 4


# Budgets.

DIMENSIONS = [
    pytest.param(Budget(max_tokens=100), "token_limit_exceeded", 100, id="tokens"),
    pytest.param(Budget(max_steps=2), "step_limit_exceeded", 2, id="steps"),
    pytest.param(Budget(max_api_calls=2), "api_call_limit_exceeded", 2, id="api calls"),
    pytest.param(Budget(max_cost_dollars=0.10), "budget_exceeded", 0.10, id="cost"),
    pytest.param(Budget(max_time_seconds=2), "timeout", 2, id="time"),
]


def one_half(ctx: ExecutionContext, clock: ManualClock) -> None:
    """A call that takes half of each dimension of `DIMENSIONS`."""
    clock.advance(1)
    ctx.report(input_tokens=30, output_tokens=20, cost_usd="0.05")


@pytest.mark.requirement("P-B1", "P-B5")
@pytest.mark.parametrize(("budget", "reason", "limit"), DIMENSIONS)
def test_reaching_a_limit_exactly_is_fine_and_starting_after_it_is_not(
    budget: Budget, reason: str, limit: float
) -> None:
    clock = ManualClock()
    ctx = ExecutionContext(budget=budget, clock=clock, settings=RunSettings(sync_calls="inline"))
    options = WrapOptions("half", cost_estimate_hint=0.05)
    for _ in range(2):
        ctx.check_budget()
        outcome = ctx.call_llm(lambda: one_half(ctx, clock), options)
        if reason != "timeout":
            assert outcome.decision is Decision.ALLOW
    with pytest.raises(BudgetExceededError) as used_up:
        ctx.check_budget()
    ran: list[int] = []
    assert ctx.wrap_llm_call(lambda: ran.append(1), options) is Decision.HALT
    assert ran == []
    assert the_stops(ctx)[-1] == reason
    assert (used_up.value.stop_reason, used_up.value.stop.limit, used_up.value.stop.used) == (reason, limit, limit)


def the_stops(ctx: ExecutionContext) -> list[str]:
    return [event.event_type for event in ctx.get_snapshot().events]


@pytest.mark.requirement("P-B5")
def test_a_run_that_finished_exactly_at_its_limits_was_a_success() -> None:
    with ExecutionContext(ExecutionConfig(0.10, 2, None)) as ctx:
        for _ in range(2):
            ctx.tool(nothing, cost_hint_usd=0.05)
    assert (ctx.balance.spent_usd, ctx.balance.steps, ctx.termination_reason) == (0.10, 2, "success")
    assert the_stops(ctx) == []


@pytest.mark.requirement("P-B1")
def test_a_budget_of_none_limits_nothing() -> None:
    clock = ManualClock()
    ctx = ExecutionContext(budget=Budget(), clock=clock)
    for _ in range(50):
        ctx.llm(lambda: one_half(ctx, clock))
    ctx.check_budget()
    usage = ctx.usage
    assert (usage.tokens_used, usage.steps_executed, usage.api_calls, usage.cost_dollars) == (2_500, 50, 50, 2.50)
    assert usage.time_elapsed_seconds == 50


@pytest.mark.requirement("P-B1")
def test_elapsed_time_is_not_moved_by_the_wall_clock() -> None:
    clock = ManualClock()
    ctx = ExecutionContext(budget=Budget(max_time_seconds=10), clock=clock)
    clock.jump_wall(3_600)
    assert ctx.wrap_tool_call(nothing) is Decision.ALLOW
    clock.jump_wall(-7_200)
    clock.advance(9)
    assert (ctx.usage.time_elapsed_seconds, ctx.usage.start_time.timestamp()) == (9, WALL_START_NS / 1e9)  # type: ignore[union-attr]
    ctx.check_budget()


@pytest.mark.requirement("P-B3")
def test_an_exceeded_budget_carries_usage_budget_reason_owner_and_what_was_done() -> None:
    ctx = ExecutionContext(ExecutionConfig(0.50, None, None), budget=Budget(max_tokens=100), name="research")
    ctx.llm(lambda: ctx.report(input_tokens=90, output_tokens=20, cost_usd=0.10) or "found", name="read")
    with pytest.raises(BudgetExceededError) as refused:
        ctx.llm(nothing, name="write")
    error = refused.value
    assert (error.usage.tokens_used, error.usage.steps_executed, error.usage.cost_dollars) == (110, 1, 0.10)
    assert (error.budget.max_tokens, error.budget.max_cost_dollars, error.budget.max_steps) == (100, 0.50, None)
    assert (error.reason, error.owner) == ("110 of the 100 tokens of 'research' used", "research")
    assert str(error) == "token_limit_exceeded: 110 of the 100 tokens of 'research' used"
    assert error.partial == {"read": "found"}


@pytest.mark.requirement("P-B3")
def test_the_budget_that_refused_is_found_even_if_another_has_its_name() -> None:
    outer = ExecutionContext(budget=Budget(max_tokens=100), name="work")
    inner = outer.with_sub_budget(Budget(max_tokens=200, max_steps=7))
    outer.record_event(ModelCallTrace(name="elsewhere", input_tokens=100))
    with pytest.raises(BudgetExceededError) as refused:
        inner.llm(nothing)
    assert (refused.value.budget.max_tokens, refused.value.budget.max_steps) == (100, None)


@pytest.mark.requirement("P-B3", "C-12")
def test_partial_results_are_listed_by_name_and_repeated_names_have_the_call_id() -> None:
    ctx = ExecutionContext(ExecutionConfig(None, 4, None))
    ctx.tool(lambda: 1, name="search")
    ctx.tool(lambda: 2, name="search")
    ctx.wrap_tool_call(fails, WrapOptions("fails"))
    with ctx.spawn_child("helper") as helper:
        helper.tool(lambda: 3, name="search")
        helper.tool(lambda: None, name="returns nothing")
    with pytest.raises(BudgetExceededError) as refused:
        ctx.tool(lambda: 5, name="late")
    expected = {"search": 1, "search#n000003": 2, "helper/search": 3, "helper/returns nothing": None}
    assert refused.value.partial == ctx.partial_results == expected


def test_only_so_many_results_are_kept_the_latest_ones() -> None:
    ctx = ExecutionContext(settings=RunSettings(max_kept_results=2))
    for number in range(4):
        ctx.tool(lambda n=number: n, name=f"step {number}")
    assert ctx.partial_results == {"step 2": 2, "step 3": 3}


@pytest.mark.requirement("P-B1")
def test_check_budget_checks_every_level() -> None:
    run = ExecutionContext(ExecutionConfig(None, 1, None), name="run")
    child = run.spawn_child("child", budget=Budget(max_steps=5))
    grandchild = child.spawn_child("grandchild")
    grandchild.check_budget()
    run.tool(nothing)
    with pytest.raises(BudgetExceededError) as used_up:
        grandchild.check_budget()
    assert used_up.value.owner == "run"


def test_checking_for_a_cancel_raises_what_no_handler_of_exceptions_catches() -> None:
    token = CancellationToken()
    ctx = ExecutionContext(cancellation=token)
    ctx.check_cancelled()
    token.cancel("closing time")
    with pytest.raises(CancelledError, match="closing time"):
        ctx.check_cancelled()


def test_checking_for_a_cancel_notices_the_deadline() -> None:
    clock = ManualClock()
    ctx = ExecutionContext(ExecutionConfig(None, None, None, timeout_ms=1_000), clock=clock)
    clock.advance(1)
    with pytest.raises(CancelledError) as cancelled:
        ctx.check_cancelled()
    assert cancelled.value.stop.reason is StopReason.TIMEOUT


# The same place in another form.


def test_another_input_is_another_handle_at_the_same_place() -> None:
    ctx = ExecutionContext(ExecutionConfig(None, 2, None), input="first", data={"k": 1}, session="s")
    other = ctx.with_input("second")
    assert (ctx.input, other.input, other.data, other.session, other.name) == ("first", "second", {"k": 1}, "s", "main")
    other.tool(nothing, name="there")
    assert (ctx.balance.steps, ctx.depth, other.depth, other.parent) == (1, 0, 0, None)
    assert {node["parent_id"] for node in ctx.graph.snapshot()["nodes"].values()} == {None, "n000001"}
    assert other.stats == ctx.stats
    assert other.events == ctx.events


def test_upstream_results_are_added_and_the_handle_they_are_added_to_is_left_alone() -> None:
    given = {"a": 1}
    ctx = ExecutionContext(upstream=given)
    given["a"] = 99
    other = ctx.with_upstream({"b": 2}).with_upstream({"a": 3})
    assert (ctx.upstream, other.upstream) == ({"a": 1}, {"a": 3, "b": 2})


def test_a_handle_at_the_same_place_ends_nothing() -> None:
    ctx = ExecutionContext()
    child = ctx.spawn_child("child")
    for handle in (ctx.with_input(1), ctx.with_upstream({}), ctx.with_sub_budget(Budget()), child.with_input(2)):
        with handle:
            handle.tool(nothing)
        handle.end()
    assert (ctx.termination_reason, child.termination_reason) == (None, None)
    child.end()
    ctx.end()
    assert (child.with_input(1).termination_reason, ctx.with_input(1).termination_reason) == ("success", "success")


def test_iterations_are_those_of_the_place() -> None:
    clock = ManualClock()
    ctx = ExecutionContext(clock=clock)
    ctx.start_iteration()
    clock.advance(0.25)
    ctx.with_input("next").end_iteration("terminate")
    ended = ctx.events[-1]
    assert isinstance(ended, IterationEndTrace)
    assert (ended.duration_ms, ended.action, ctx.with_input(1).iteration) == (250, "terminate", 1)


def test_a_limit_that_stopped_a_handle_has_stopped_its_place() -> None:
    with ExecutionContext(ExecutionConfig(None, 0, None)) as ctx:
        ctx.with_input("x").wrap_tool_call(nothing)
    assert (ctx.termination_reason, ctx.stop.reason) == ("limit_exceeded", "step_limit_exceeded")  # type: ignore[union-attr]


@pytest.mark.requirement("P-B4")
def test_a_sub_budget_counts_from_nothing_and_counts_above_too() -> None:
    ctx = ExecutionContext(budget=Budget(max_steps=10))
    ctx.tool(nothing)
    part = ctx.with_sub_budget(Budget(max_steps=2), name="part")
    part.tool(nothing)
    assert (part.usage.steps_executed, ctx.usage.steps_executed) == (1, 2)
    assert (part.budget, ctx.budget) == (Budget(max_steps=2), Budget(max_steps=10))
    with pytest.raises(InvalidValue, match="sub_budget must be Budget"):
        ctx.with_sub_budget({"max_steps": 2})  # type: ignore[arg-type]


@pytest.mark.requirement("P-B4", "C-4")
async def test_the_time_of_a_sub_budget_stops_what_runs_under_it_and_nothing_else() -> None:
    ctx = ExecutionContext()
    part = ctx.with_sub_budget(Budget(max_time_seconds=0.02), name="part")
    outcome = await part.acall_tool(lambda: asyncio.sleep(30))
    assert (outcome.decision, outcome.call.stop.budget) == (Decision.HALT, "part")  # type: ignore[union-attr]
    assert outcome.call.stop.reason is StopReason.TIMEOUT  # type: ignore[union-attr]
    assert await ctx.atool(nothing_later) is None
    assert part.wrap_tool_call(nothing) is Decision.HALT


# Where we are.


@pytest.mark.requirement("T-1")
def test_the_innermost_context_that_was_entered_is_the_current_one() -> None:
    assert current_context() is None
    with ExecutionContext(name="outer") as outer:
        assert current_context() is outer
        with outer.spawn_child("child") as child, ExecutionContext(name="other") as other:
            assert current_context() is other
            other.end()
            assert current_context() is other
        assert (child.termination_reason, current_context()) == ("success", outer)
    assert current_context() is None


@pytest.mark.requirement("T-1")
async def test_tasks_inherit_the_current_context_and_leave_it_to_each_other() -> None:
    seen: dict[str, ExecutionContext | None] = {}

    async def enter(name: str) -> None:
        seen[f"{name} before"] = current_context()
        async with ExecutionContext(name=name) as own:
            await asyncio.sleep(0)
            seen[name] = current_context()
            assert seen[name] is own

    async with ExecutionContext() as run:
        await asyncio.gather(enter("a"), enter("b"))
        assert current_context() is run
    assert (seen["a before"], seen["b before"]) == (run, run)


@pytest.mark.requirement("T-1")
def test_a_thread_of_a_worker_knows_the_current_context_and_a_plain_thread_does_not() -> None:
    with contain(timeout_s=30) as run:
        assert run.tool(current_context) is run
        found: list[ExecutionContext | None] = []
        thread = threading.Thread(target=lambda: found.append(current_context()))
        thread.start()
        thread.join()
    assert found == [None]


@pytest.mark.requirement("T-1")
def test_one_context_goes_through_model_tool_hook_and_sub_agent_into_one_ledger_and_one_log() -> None:
    provider = FakeProvider(lambda _: Answer(input_tokens=1_000, output_tokens=100))
    contexts: list[ToolCallContext] = []

    class Listen:
        def before_llm_call(self, ctx: ToolCallContext) -> None:
            contexts.append(ctx)

    def model(ctx: ExecutionContext, prompt: str) -> Any:
        return ctx.llm(provider.complete, prompt, name=prompt, model="fake-1", cost_hint_usd=0.01)

    def tool(ctx: ExecutionContext) -> str:
        with ctx.spawn_child("sub-agent") as agent:
            model(agent, "look closer")
        return "seen"

    def loop(ctx: ExecutionContext) -> None:
        ctx.start_iteration()
        model(ctx, "what next?")
        ctx.tool(tool, ctx, name="look")
        ctx.end_iteration("terminate")

    pipeline = ShieldPipeline(pre_dispatch=Listen())
    with ExecutionContext(ExecutionConfig(1, None, None), pipeline, prices=PRICES) as ctx:
        loop(ctx)
    assert ctx.balance.spent_nanos == provider.invoice.total_nanos == 9_000_000
    assert [(hook.tool_name, hook.chain_id) for hook in contexts] == [
        ("what next?", ctx.run_id),
        ("look closer", ctx.run_id),
    ]
    nodes = ctx.graph.snapshot()["nodes"]
    parent_of = {node["name"]: nodes[node["parent_id"]]["name"] for node in nodes.values() if node["parent_id"]}
    assert parent_of == {"what next?": "main", "look": "main", "sub-agent": "look", "look closer": "sub-agent"}
    assert check_history(ctx.history(), invoice=provider.invoice, ledger=ctx.balance) == []


# Who a run belongs to.


@pytest.mark.requirement("C-15")
def test_every_hook_receives_the_owner_of_the_run() -> None:
    contexts: dict[str, ToolCallContext] = {}

    class Listen:
        def before_llm_call(self, ctx: ToolCallContext) -> None:
            contexts["llm"] = ctx

        def before_tool_call(self, ctx: ToolCallContext) -> None:
            contexts["tool"] = ctx

        def before_egress(self, ctx: ToolCallContext, url: str, method: str) -> None:
            contexts["egress"] = ctx

        def on_error(self, ctx: ToolCallContext, err: BaseException) -> None:
            contexts["error"] = ctx

        def before_charge(self, ctx: ToolCallContext, cost_usd: float) -> None:
            contexts["charge"] = ctx

    hook = Listen()
    ctx = ExecutionContext(None, ShieldPipeline(hook, hook, hook, hook, hook), META)
    ctx.llm(nothing, name="ask", cost_hint_usd=0.25)
    ctx.tool(lambda: ctx.egress("https://example.org"), name="fetch")
    ctx.wrap_tool_call(fails)
    assert contexts.keys() == {"llm", "tool", "egress", "error", "charge"}
    for about in contexts.values():
        who = (about.request_id, about.chain_id, about.org_id, about.team, about.service, about.user_id)
        assert who == ("req-1", "chain-1", "acme", "search", "summariser", "user-42")
        assert about.tags == {"env": "prod"}
    llm, egress = contexts["llm"], contexts["egress"]
    assert (llm.tool_name, llm.kind, llm.model) == ("ask", "llm", "large-1")
    assert (llm.cost_usd, llm.node_id, egress.tool_name) == (0.25, "n000002", "fetch")


@pytest.mark.requirement("C-15")
def test_the_owner_of_a_run_is_in_its_first_event_its_root_its_safety_events_and_its_snapshot() -> None:
    class Slow:
        def before_tool_call(self, ctx: ToolCallContext) -> Verdict:
            return Verdict.degrade(reason="slow down")

    clock = ManualClock()
    ctx = ExecutionContext(ExecutionConfig(None, 1, None), ShieldPipeline(tool_dispatch=Slow()), META, clock=clock)
    clock.advance(5)
    ctx.wrap_tool_call(nothing)
    ctx.wrap_tool_call(nothing)
    described = {
        "request_id": "req-1",
        "chain_id": "chain-1",
        "org_id": "acme",
        "team": "search",
        "service": "summariser",
        "user_id": "user-42",
        "model": "large-1",
        "tags": {"env": "prod"},
    }
    started, root = ctx.history()[:2]
    assert isinstance(started, RunStarted)
    assert isinstance(root, CallStarted)
    assert (started.run_id, started.metadata, root.metadata) == ("chain-1", described, described)
    assert ctx.graph.snapshot()["nodes"]["n000001"]["metadata"] == described
    degraded, refused = ctx.get_snapshot().events
    assert (degraded.event_type, refused.event_type) == ("degrade", "step_limit_exceeded")
    for event in (degraded, refused):
        assert event.request_id == "req-1"
        assert event.ts.timestamp() == WALL_START_NS / 1e9 + 5
        about = {key: event.metadata[key] for key in ("chain_id", "org_id", "team", "service", "user_id", "tags")}
        assert about == {"chain_id": "chain-1"} | {key: described[key] for key in about if key != "chain_id"}
    snapshot = ctx.get_snapshot()
    assert (snapshot.chain_id, snapshot.request_id, ctx.run_id, ctx.metadata) == ("chain-1", "req-1", "chain-1", META)


# What is written down.


@pytest.mark.requirement("C-13")
def test_a_safety_event_of_the_callers_is_in_the_combined_log_in_its_place() -> None:
    ctx = ExecutionContext(ExecutionConfig(None, 1, None), ShieldPipeline(pre_dispatch=Deny()))
    own = SafetyEvent("pii_found", Decision.QUARANTINE, "an address", "Scanner", "req-9", metadata={"field": "body"})
    ctx.tool(lambda: ctx.record_event(own), name="scan")
    ctx.spawn_child("child").wrap_tool_call(nothing)
    assert ctx.get_snapshot().events[0] is own
    assert the_stops(ctx) == ["pii_found", "step_limit_exceeded"]
    (safety,) = [event for event in ctx.history() if event.kind == "safety"]
    assert safety.to_dict() | {"reason": "an address", "hook": "Scanner", "decision": "QUARANTINE"} == safety.to_dict()
    assert safety.parent_id == "n000002"


@pytest.mark.requirement("C-13")
def test_safety_events_are_bounded_and_what_was_dropped_is_counted() -> None:
    ctx = ExecutionContext(ExecutionConfig(None, 0, None), settings=RunSettings(max_safety_events=3))
    for number in range(5):
        ctx.record_event(SafetyEvent(f"own {number}", Decision.ALLOW, "", "test"))
    ctx.wrap_tool_call(nothing)
    snapshot = ctx.get_snapshot()
    assert [event.event_type for event in snapshot.events] == ["own 3", "own 4", "step_limit_exceeded"]
    assert snapshot.events_dropped == 3


@pytest.mark.requirement("C-13")
def test_with_no_room_at_all_every_safety_event_is_counted_as_dropped() -> None:
    ctx = ExecutionContext(settings=RunSettings(max_safety_events=0))
    ctx.record_event(SafetyEvent("own", Decision.ALLOW, "", "test"))
    snapshot = ctx.get_snapshot()
    assert (snapshot.events, snapshot.events_dropped) == ([], 1)


@pytest.mark.requirement("C-13", "T-3")
def test_a_call_that_ran_elsewhere_is_counted_with_what_it_cost() -> None:
    clock = ManualClock()
    ctx = ExecutionContext(ExecutionConfig(0.50, None, None), clock=clock)
    clock.advance(10)
    ctx.record_event(
        ModelCallTrace(name="ask", model="m-1", input_tokens=70, output_tokens=30, cost=0.20, duration_ms=1_500)
    )
    ctx.record_event(ToolCallTrace(name="search", cost=0.05, error=ValueError("nothing found")))
    stats, figures, (answered, searched) = ctx.stats, ctx.balance, ctx.get_snapshot().nodes
    assert (stats.total_cost, stats.total_input_tokens, stats.total_output_tokens) == (0.25, 70, 30)
    assert (stats.cost_by_model, stats.tool_calls_by_name, stats.failed_count) == ({"m-1": 0.20}, {"search": 1}, 1)
    assert (figures.spent_usd, figures.tokens_in, figures.tokens_out, figures.api_calls) == (0.25, 70, 30, 1)
    assert (answered.status, answered.cost_usd, searched.status) == ("ok", 0.20, "error")
    assert answered.end_ts is not None
    assert (answered.end_ts - answered.start_ts).total_seconds() == 1.5
    assert answered.end_ts.timestamp() == WALL_START_NS / 1e9 + 10
    ended = [event for event in ctx.history() if isinstance(event, CallEnded)]
    assert [(event.name, event.error) for event in ended] == [("ask", None), ("search", "ValueError")]


@pytest.mark.requirement("C-13")
def test_a_call_that_ran_elsewhere_and_cost_too_much_stops_the_next_one() -> None:
    ctx = ExecutionContext(ExecutionConfig(0.50, None, None), budget=Budget(max_tokens=1_000))
    ctx.record_event(ModelCallTrace(name="ask", cost=0.70, input_tokens=5))
    with pytest.raises(BudgetExceededError, match=r"\$0.70 spent of the \$0.50 of 'main'"):
        ctx.tool(nothing)


class Retrieved(CustomTrace):
    """A kind of event of the user's own, without so much as a decorator."""

    kind: ClassVar[str] = "retrieved"


@dataclass(frozen=True, kw_only=True)
class Ranked(CustomTrace):
    """Another one, with fields."""

    kind: ClassVar[str] = "ranked"
    documents: int = 0
    best: Any = None


WELL_KNOWN: list[TraceEvent] = [
    ModelCallTrace(name="ask", model="m-1"),
    ToolCallTrace(name="search"),
    CallEnded(name="group"),
    CompactionTrace(before=10, after=3),
    LimitTrace(stop_reason="budget_exceeded"),
    ErrorTrace(error_class="ValueError", message="no"),
    IterationStartTrace(),
    IterationEndTrace(),
    ChildSpawnTrace(child_name="outside"),
    ChildCompleteTrace(child_name="outside"),
    CustomTrace(name="note", data={"n": 1}),
    Retrieved(name="found", data={"where": object()}),
    Ranked(documents=3, best={"score": math.nan}),
]


@pytest.mark.requirement("T-2")
@pytest.mark.parametrize("event", WELL_KNOWN, ids=lambda event: type(event).__name__)
def test_time_place_iteration_and_depth_are_filled_in_for_every_kind_of_event(event: TraceEvent) -> None:
    clock = ManualClock()
    ctx = ExecutionContext(clock=clock)
    child = ctx.spawn_child("loop")
    for _ in range(3):
        child.start_iteration()
    clock.advance(7)
    child.record_event(event)
    written = child.events[-1]
    assert type(written) is type(event)
    assert (written.run_id, written.seq, written.source) == (ctx.run_id, len(ctx.history()), "main/loop")
    assert (written.depth, written.iteration, written.at_ms) == (1, 3, WALL_START_NS // 10**6 + 7_000)
    assert written.timestamp.timestamp() == WALL_START_NS / 1e9 + 7
    assert written.parent_id == "n000002"
    own = {one.name for one in fields(event)} - {one.name for one in fields(TraceEvent)} - {"node_id"}
    assert {name: getattr(written, name) for name in own - {"best"}} == {
        name: getattr(event, name) for name in own - {"best"}
    }
    assert json.loads(json.dumps(written.to_dict(), allow_nan=False))["kind"] == event.kind


@pytest.mark.requirement("T-2", "T-12")
@pytest.mark.parametrize(
    ("event", "field"),
    [
        (ModelCallTrace(name="ask", stop_reason=object()), "stop_reason"),  # type: ignore[arg-type]
        (ModelCallTrace(name="ask", error=7), "error"),  # type: ignore[arg-type]
        (ToolCallTrace(name=7), "name"),  # type: ignore[arg-type]
        (ToolCallTrace(name="search", duration_ms=math.nan), "duration_ms"),
        (CustomTrace(name=7), "name"),  # type: ignore[arg-type]
        (CustomTrace(name="note", data=[1]), "data"),  # type: ignore[arg-type]
        (Ranked(data=None), "data"),  # type: ignore[arg-type]
    ],
    ids=lambda one: one if isinstance(one, str) else type(one).__name__,
)
def test_an_event_with_a_wrong_field_is_refused_and_not_recorded(event: TraceEvent, field: str) -> None:
    ctx = ExecutionContext()
    before = ctx.history()
    with pytest.raises(InvalidValue, match=f"^{field} must be"):
        ctx.record_event(event)
    assert ctx.history() == before
    json.dumps(ctx.graph.snapshot())


@pytest.mark.requirement("T-2")
def test_events_that_happen_inside_a_call_name_it() -> None:
    ctx = ExecutionContext()
    ctx.start_iteration()
    ctx.tool(lambda: ctx.trace_custom("inside", {"n": 1}), name="search")
    (event,) = [event for event in ctx.events if isinstance(event, CustomTrace)]
    assert (event.name, event.data, event.parent_id, event.iteration, event.depth) == (
        "inside",
        {"n": 1},
        "n000002",
        1,
        0,
    )


@pytest.mark.requirement("T-2")
def test_an_iteration_has_a_start_an_end_and_every_call_in_it_carries_its_number() -> None:
    clock = ManualClock()
    ctx = ExecutionContext(clock=clock)
    assert ctx.iteration == 0
    for action in ("continue", "terminate"):
        assert ctx.start_iteration() == ctx.iteration
        clock.advance(0.5)
        ctx.llm(nothing, name="ask")
        ctx.end_iteration(action)
    iterations = [(event.kind, event.iteration) for event in ctx.events if event.iteration]
    assert iterations == [
        (kind, number)
        for number in (1, 2)
        for kind in ("iteration_started", "call_started", "call_ended", "iteration_ended")
    ]
    ends = [event for event in ctx.events if isinstance(event, IterationEndTrace)]
    assert [(end.action, end.duration_ms) for end in ends] == [("continue", 500), ("terminate", 500)]


def test_an_iteration_that_was_never_started_cannot_be_ended() -> None:
    with pytest.raises(InvalidValue, match="end_iteration must be called after start_iteration"):
        ExecutionContext().end_iteration()


@pytest.mark.requirement("C-13")
@pytest.mark.parametrize(
    "garbage",
    [
        *(None, "event", {"kind": "custom"}, CustomTrace, SafetyEvent, Decision.HALT),
        *(RunStarted(), RunCompleted(), CallStarted(name="ask"), CallSettled(cost=-1)),
    ],
    ids=lambda garbage: getattr(garbage, "__name__", type(garbage).__name__),
)
def test_invalid_events_and_events_of_the_run_itself_are_refused(garbage: Any) -> None:
    with ExecutionContext() as ctx:
        before = len(ctx.history())
        with pytest.raises(InvalidValue) as refused:
            ctx.record_event(garbage)
        assert refused.value.field == "event"
        assert len(ctx.history()) == before
    assert check_history(ctx.history()) == []


@pytest.mark.requirement("C-13")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", 5),
        ("cost", math.nan),
        ("cost", -0.01),
        ("input_tokens", -1),
        ("output_tokens", 1.5),
        ("duration_ms", math.nan),
        ("duration_ms", -1),
        ("duration_ms", "long"),
        ("status", "running"),
        ("call_kind", "planet"),
        ("model", 5),
        ("error", 5),
    ],
)
def test_a_recorded_call_with_an_invalid_figure_is_refused_by_name_and_leaves_nothing(field: str, value: Any) -> None:
    with ExecutionContext(budget=Budget(max_tokens=10)) as ctx:
        with pytest.raises(InvalidValue) as refused:
            ctx.record_event(ModelCallTrace(**({"name": "ask"} | {field: value})))
        assert refused.value.field == field
        assert (ctx.get_snapshot().nodes, ctx.balance.tokens_in, ctx.balance.api_calls) == ([], 0, 0)
    assert check_history(ctx.history()) == []


@pytest.mark.parametrize(("name", "data", "field"), [(5, None, "name"), ("note", 5, "data")])
def test_an_invalid_custom_event_is_refused_by_name(name: Any, data: Any, field: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        ExecutionContext().trace_custom(name, data)
    assert refused.value.field == field


def test_history_is_the_whole_run_and_events_are_those_of_one_context() -> None:
    ctx = ExecutionContext()
    child = ctx.spawn_child("child")
    child.tool(nothing, name="there")
    ctx.tool(nothing, name="here")
    everything = ctx.history()
    assert [event.seq for event in everything] == list(range(1, len(everything) + 1))
    assert child.history() == everything
    assert [event.seq for event in ctx.history(since=3, limit=2)] == [4, 5]
    assert ctx.history(since=len(everything)) == []
    assert sorted([*ctx.events, *child.events], key=lambda event: event.seq) == everything
    assert {event.source for event in child.events} == {"main/child"}


def test_an_observer_is_handed_everything_from_the_first_event_to_the_last() -> None:
    seen: list[TraceEvent] = []
    with ExecutionContext() as ctx:
        ctx.tool(nothing)
        subscription = ctx.observe(seen.extend)
        ctx.tool(nothing)
    assert subscription.drain(30)
    assert seen == ctx.history()
    assert seen[-1].kind == "run_ended"


def test_two_threads_may_begin_to_observe_at_the_same_moment() -> None:
    ctx = ExecutionContext()
    together, found = threading.Barrier(8), []

    def observe() -> None:
        together.wait()
        found.append(ctx.observe(lambda batch: None))

    threads = [threading.Thread(target=observe) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ctx.end()
    assert len(found) == 8
    assert all(subscription.drain(30) for subscription in found)


# What a call says of itself.


@pytest.mark.requirement("P-B2", "T-3")
def test_a_call_reports_its_usage_from_inside_and_reports_add_up() -> None:
    ctx = ExecutionContext()

    def ask() -> str:
        ctx.report(cost_usd="0.10", input_tokens=50, model="m-1")
        ctx.report(cost_usd=0.05, output_tokens=20)
        return "answer"

    assert ctx.llm(ask, cost_hint_usd=0.90) == "answer"
    assert (ctx.balance.spent_usd, ctx.balance.held_usd) == (0.15, 0)
    assert (ctx.stats.cost_by_model, ctx.stats.total_input_tokens, ctx.stats.total_output_tokens) == (
        {"m-1": 0.15},
        50,
        20,
    )


@pytest.mark.requirement("P-B2")
def test_a_reported_usage_is_charged_whatever_the_outcome_of_the_call() -> None:
    ctx = ExecutionContext()

    def breaks() -> None:
        ctx.report(cost_usd=0.10)
        raise ValueError("too late")

    assert ctx.wrap_llm_call(breaks, WrapOptions(cost_estimate_hint=0.90)) is Decision.RETRY
    assert (ctx.balance.spent_usd, ctx.balance.unresolved_usd) == (0.10, 0)


def test_the_innermost_call_is_the_one_that_is_reported_for() -> None:
    ctx = ExecutionContext()
    ctx.tool(lambda: ctx.tool(lambda: ctx.report(cost_usd=0.10), name="inner"), name="outer")
    assert ctx.stats.cost_by_name == {"inner": 0.10}


def test_a_report_from_outside_a_call_is_refused_with_a_hint() -> None:
    ctx, other = ExecutionContext(), ExecutionContext()
    for report in (lambda: ctx.report(cost_usd=1), lambda: other.tool(lambda: ctx.report(cost_usd=1))):
        with pytest.raises(InvalidValue, match="report must be called from inside a function that this run executes"):
            report()
    assert ctx.balance.spent_usd == other.balance.spent_usd == 0


def test_a_report_that_comes_after_its_call_has_ended_is_refused_and_not_lost_in_silence() -> None:
    ctx = ExecutionContext()
    go, refused = threading.Event(), []

    def report_later() -> None:
        assert go.wait(30)
        try:
            ctx.report(cost_usd=1)
        except InvalidValue as error:
            refused.append(str(error))

    def ask() -> threading.Thread:
        thread = threading.Thread(target=contextvars.copy_context().run, args=(report_later,))
        thread.start()
        return thread

    thread = ctx.tool(ask, name="ask")
    go.set()
    thread.join()
    assert refused == ["report must be called while the call 'ask' runs, not 'after its end'"]


@pytest.mark.parametrize(
    "figures", [{"cost_usd": math.nan}, {"input_tokens": -1}, {"output_tokens": 0.5}, {"model": ""}]
)
def test_a_report_with_an_invalid_figure_is_refused_by_name(figures: dict[str, Any]) -> None:
    ctx = ExecutionContext()
    with pytest.raises(InvalidValue) as refused:
        ctx.tool(lambda: ctx.report(**figures))
    assert [refused.value.field] == list(figures)


# Who may be called.


class OnlyExample:
    """An egress hook that knows one host."""

    def before_egress(self, ctx: ToolCallContext, url: str, method: str) -> Verdict | None:
        return None if "example.org" in url and method == "GET" else Verdict.deny(f"{method} {url} is not on the list")


def test_egress_hooks_run_and_their_denial_is_recorded() -> None:
    ctx = ExecutionContext(pipeline=ShieldPipeline(egress=OnlyExample()), metadata=META)
    assert ctx.egress("https://example.org") is Decision.ALLOW
    assert ctx.tool(lambda: ctx.egress("https://evil.test", "POST"), name="fetch") is Decision.HALT
    event = the_stop(ctx)
    assert (event.event_type, event.hook, event.decision) == ("hook_denied", "OnlyExample", Decision.HALT)
    assert event.reason == "POST https://evil.test is not on the list"
    assert (event.metadata["operation_name"], event.metadata["node_id"], event.metadata["team"]) == (
        "fetch",
        "n000002",
        "search",
    )


def test_a_question_about_egress_belongs_to_the_run_that_asks_it() -> None:
    contexts: list[ToolCallContext] = []

    class Listen:
        def before_egress(self, ctx: ToolCallContext, url: str, method: str) -> Decision:
            contexts.append(ctx)
            return Decision.HALT

    inner = ExecutionContext(pipeline=ShieldPipeline(egress=Listen()), name="inner")
    outer = ExecutionContext(name="outer")
    outer.tool(nothing)
    outer.tool(lambda: inner.egress("https://example.org"), name="of the outer run")
    assert [(hook.chain_id, hook.tool_name) for hook in contexts] == [(inner.run_id, "inner")]
    assert the_stop(inner).metadata["node_id"] == "n000001"
    assert outer.get_snapshot().events == []


# Stopping.


@pytest.mark.requirement("C-11")
def test_a_repeated_abort_is_recorded_once() -> None:
    ctx = ExecutionContext()
    ctx.abort("first")
    ctx.abort("second")
    assert [event.reason for event in ctx.get_snapshot().events] == ["first"]
    assert (ctx.cancellation.reason, ctx.stop.reason) == ("first", StopReason.ABORTED)  # type: ignore[union-attr]


@pytest.mark.parametrize("reason", [None, 5, b"enough"], ids=repr)
def test_a_reason_to_abort_is_text(reason: Any) -> None:
    ctx = ExecutionContext()
    with pytest.raises(InvalidValue, match="reason must be text"):
        ctx.abort(reason)
    assert ctx.wrap_tool_call(nothing) is Decision.ALLOW


def test_the_repr_of_a_context_names_it() -> None:
    ctx = ExecutionContext(metadata=META, name="run")
    assert repr(ctx) == "<ExecutionContext run of chain-1>"
    assert repr(ctx.spawn_child("part")) == "<ExecutionContext run/part of chain-1>"
