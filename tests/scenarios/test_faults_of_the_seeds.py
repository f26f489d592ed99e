"""Each way in which the designs this one grew from let a limit slip, as a scenario that must not slip here."""

from __future__ import annotations

import asyncio
import threading

import pytest

from penstock import (
    Budget,
    BudgetExceededError,
    CancellationToken,
    CancelledError,
    Decision,
    ExecutionConfig,
    ExecutionContext,
    Halted,
    ShieldPipeline,
    StopReason,
    Verdict,
    WrapOptions,
    contain,
)
from penstock.testing import FailAfterBilling, FakeProvider, ProviderHTTPError, RefuseFree

HALF_DOLLAR = WrapOptions(operation_name="ask", cost_estimate_hint=0.50)


def half_dollar_provider(behaviour: object = None) -> FakeProvider:
    script = None if behaviour is None else (lambda _: behaviour)
    return FakeProvider(script, input_usd_per_mtok=0, output_usd_per_mtok=10_000)  # type: ignore[arg-type]


@pytest.mark.requirement("C-2", "X-1")
def test_a_hundred_failing_half_dollar_calls_under_a_dollar_cost_at_most_a_dollar() -> None:
    provider = half_dollar_provider(FailAfterBilling())
    ctx = ExecutionContext(ExecutionConfig(1.00, None, None))
    decisions = [ctx.wrap_llm_call(provider.complete, HALF_DOLLAR) for _ in range(100)]
    assert decisions == [Decision.RETRY] * 2 + [Decision.HALT] * 98
    assert provider.invoice.total_usd == 1.00
    assert ctx.balance.unresolved_usd == 1.00


@pytest.mark.requirement("G-10")
def test_the_parent_of_a_call_is_the_call_that_made_it_and_not_the_last_one_recorded() -> None:
    with contain() as run:
        run.llm(lambda: "first", name="first")
        run.tool(lambda: run.llm(lambda: "inner", name="inner"), name="outer")
        run.llm(lambda: "last", name="last")
    nodes = run.graph.snapshot()["nodes"]
    parent_of = {node["name"]: nodes[node["parent_id"]]["name"] for node in nodes.values() if node["parent_id"]}
    assert parent_of == {"first": "main", "outer": "main", "inner": "outer", "last": "main"}


@pytest.mark.requirement("C-14")
@pytest.mark.parametrize("signal", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("door", ["wrap_llm_call", "wrap_tool_call", "call_llm", "call_tool", "llm", "tool"])
def test_ctrl_c_inside_a_call_is_raised_and_recorded(signal: type[BaseException], door: str) -> None:
    def interrupted() -> None:
        raise signal

    ctx = ExecutionContext()
    with pytest.raises(signal):
        getattr(ctx, door)(interrupted)
    (call,) = ctx.get_snapshot().nodes
    assert (call.status, call.end_ts is not None) == ("aborted", True)
    assert ctx.balance.steps_open == 0


@pytest.mark.requirement("C-3")
def test_with_five_steps_and_fifty_threads_exactly_five_run() -> None:
    ctx = ExecutionContext(ExecutionConfig(None, 5, None))
    together, ran = threading.Barrier(50), []

    def attempt() -> None:
        together.wait()
        ctx.wrap_tool_call(lambda: ran.append(1))

    _in_threads(50, attempt)
    assert len(ran) == 5
    assert ctx.get_snapshot().step_count == 5


@pytest.mark.requirement("C-2")
def test_a_twenty_cent_call_does_not_start_under_a_one_cent_ceiling() -> None:
    ctx, ran = ExecutionContext(ExecutionConfig(0.01, None, None)), []
    decision = ctx.wrap_llm_call(lambda: ran.append(1), WrapOptions(cost_estimate_hint=0.20))
    assert (decision, ran) == (Decision.HALT, [])


@pytest.mark.requirement("C-4")
def test_a_timeout_frees_the_caller_of_a_sync_call_while_it_still_runs() -> None:
    release, finished = threading.Event(), threading.Event()

    def slow() -> str:
        release.wait(30)
        finished.set()
        return "late"

    ctx = ExecutionContext(ExecutionConfig(1.00, None, None, timeout_ms=100))
    outcome = ctx.call_tool(slow, WrapOptions(operation_name="slow", cost_estimate_hint=0.25))
    assert not finished.is_set()
    assert (outcome.decision, outcome.value) == (Decision.HALT, None)
    assert outcome.call.stop is not None
    assert outcome.call.stop.reason is StopReason.TIMEOUT
    assert ctx.balance.unresolved_usd == 0.25
    release.set()
    assert finished.wait(30)
    _until(lambda: ctx.balance.spent_usd == 0.25)
    assert ctx.balance.unresolved_usd == 0
    assert ctx.get_snapshot().nodes[0].status == "timeout"
    assert "abandoned, settled late" in ctx.explain()


@pytest.mark.requirement("P-B4", "T-3")
def test_two_children_never_spend_more_than_their_parent_has_and_stop_when_it_is_aborted() -> None:
    parent = ExecutionContext(ExecutionConfig(1.00, None, None))
    left, right = parent.spawn_child("left", budget=Budget(max_cost_dollars=0.95)), parent.spawn_child("right")
    spent = WrapOptions(cost_estimate_hint=0.45)
    decisions = [child.wrap_llm_call(lambda: None, spent) for child in (left, right, left, right)]
    assert decisions == [Decision.ALLOW, Decision.ALLOW, Decision.HALT, Decision.HALT]
    assert parent.balance.spent_usd == 0.90
    parent.abort("enough")
    assert left.wrap_tool_call(lambda: None) is right.wrap_tool_call(lambda: None) is Decision.HALT


@pytest.mark.requirement("C-8")
def test_a_degraded_call_runs_in_its_degraded_form() -> None:
    class Cheaper:
        def before_llm_call(self, ctx: object) -> Verdict:
            return Verdict.degrade(model="small-1", reason="over the soft limit")

    ctx = ExecutionContext(pipeline=ShieldPipeline(pre_dispatch=Cheaper()))
    options = WrapOptions(operation_name="ask", degraded=lambda: "short answer")
    outcome = ctx.call_llm(lambda: "long answer", options)
    assert (outcome.value, outcome.decision) == ("short answer", Decision.DEGRADE)
    assert outcome.call.degraded_model == "small-1"


@pytest.mark.requirement("C-13")
def test_runs_that_share_a_pipeline_do_not_see_each_others_events() -> None:
    class Deny:
        def before_llm_call(self, ctx: object) -> Decision:
            return Decision.HALT

    shared = ShieldPipeline(pre_dispatch=Deny())
    one, other = ExecutionContext(pipeline=shared), ExecutionContext(pipeline=shared)
    one.wrap_llm_call(lambda: None)
    for _ in range(3):
        other.wrap_llm_call(lambda: None)
    assert [len(ctx.get_snapshot().events) for ctx in (one, other)] == [1, 3]


@pytest.mark.requirement("P-B1", "C-1")
@pytest.mark.parametrize(
    "budget",
    [
        Budget(max_tokens=0),
        Budget(max_steps=0),
        Budget(max_api_calls=0),
        Budget(max_cost_dollars=0),
        Budget(max_time_seconds=0),
    ],
)
def test_zero_allows_nothing(budget: Budget) -> None:
    ctx, ran = ExecutionContext(budget=budget), []
    assert ctx.wrap_llm_call(lambda: ran.append(1)) is Decision.HALT
    with pytest.raises(BudgetExceededError):
        ctx.check_budget()
    assert ran == []


@pytest.mark.requirement("P-C1")
def test_a_cancel_is_not_caught_by_code_that_catches_exceptions() -> None:
    token = CancellationToken()
    token.cancel("stop now")
    with pytest.raises(CancelledError, match="stop now"):
        try:
            token.check()
        except Exception:
            pytest.fail("a cancel was swallowed")


@pytest.mark.requirement("P-C2", "P-C1")
def test_a_cancel_does_not_wait_for_the_pause_before_a_retry() -> None:
    provider = FakeProvider(lambda _: RefuseFree(429, retry_after_s=3600))
    token = CancellationToken()
    ctx = ExecutionContext(cancellation=token)
    done = threading.Event()
    outcomes = []

    def ask() -> None:
        outcomes.append(ctx.call_llm(provider.complete, WrapOptions(retry_policy_override=3)))
        done.set()

    thread = threading.Thread(target=ask)
    thread.start()
    _until(lambda: provider.invoice.calls == 1)
    token.cancel("enough")
    assert done.wait(30)
    thread.join()
    assert provider.invoice.calls == 1
    assert outcomes[0].decision is Decision.HALT


@pytest.mark.requirement("P-C2")
async def test_a_cancel_ends_the_pause_before_a_retry_on_the_loop_too() -> None:
    provider = FakeProvider(lambda _: RefuseFree(429, retry_after_s=3600))
    ctx = ExecutionContext()
    asking = asyncio.create_task(ctx.acall_llm(provider.acomplete, WrapOptions(retry_policy_override=3)))
    for _ in range(10):
        await asyncio.sleep(0)
    assert provider.invoice.calls == 1
    ctx.abort("enough")
    outcome = await asyncio.wait_for(asking, 30)
    assert outcome.decision is Decision.HALT
    assert provider.invoice.calls == 1


@pytest.mark.requirement("P-B4")
def test_a_sub_budget_is_judged_together_with_the_budget_above_it() -> None:
    ctx = ExecutionContext(budget=Budget(max_tokens=100))
    inner = ctx.with_sub_budget(Budget(max_tokens=60), name="inner")
    inner.llm(lambda: inner.report(input_tokens=50, cost_usd=0), name="one")
    with pytest.raises(BudgetExceededError) as stopped:
        inner.llm(lambda: None, name="two")
    assert (stopped.value.owner, stopped.value.budget.max_tokens) == ("inner", 60)
    ctx.llm(lambda: ctx.report(input_tokens=50, cost_usd=0), name="three")
    with pytest.raises(BudgetExceededError) as stopped:
        inner.llm(lambda: None, name="four")
    assert stopped.value.owner == "main"


@pytest.mark.requirement("P-C1")
async def test_a_cancel_from_another_thread_wakes_a_waiter_at_once() -> None:
    token = CancellationToken()
    waiting = asyncio.create_task(token.wait())
    await asyncio.sleep(0)
    thread = threading.Thread(target=token.cancel)
    thread.start()
    await asyncio.wait_for(waiting, 30)
    thread.join()
    assert token.is_cancelled


@pytest.mark.requirement("T-3", "T-4")
def test_a_parents_limit_stops_a_running_child_and_the_child_reports_it() -> None:
    with ExecutionContext(ExecutionConfig(None, 3, None), name="parent") as parent:
        with pytest.raises(Halted), parent.spawn_child("child") as child:
            for number in range(10):
                child.tool(lambda: None, name=f"step {number}")
        assert parent.stats.tool_calls_by_name == {"step 0": 1, "step 1": 1, "step 2": 1, "step 3": 1}
        assert child.termination_reason == "limit_exceeded"
        stops = [event for event in child.events if event.kind == "limit_reached"]
        assert [stop.budget for stop in stops] == ["parent"]


@pytest.mark.requirement("T-3")
def test_a_model_call_that_fails_is_counted_without_a_response_to_read() -> None:
    provider = FakeProvider(lambda _: RefuseFree(400))
    ctx = ExecutionContext()
    with pytest.raises(ProviderHTTPError):
        ctx.llm(provider.complete, name="ask", model="fake-1")
    assert ctx.stats.failed_count == 1
    assert ctx.stats.model_calls_by_model == {"fake-1": 1}
    assert ctx.stats.total_cost == 0


def _in_threads(count: int, work: object) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _until(holds: object) -> None:
    tick = threading.Event()
    for _ in range(3_000):
        if holds():  # type: ignore[operator]
            return
        tick.wait(0.01)
    raise AssertionError("it never came to hold")
