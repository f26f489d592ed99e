"""Calls that make calls: nothing is billed, drawn or counted twice, and nothing slips by."""

from __future__ import annotations

import pytest

from penstock import (
    CancelledError,
    ChainMetadata,
    Decision,
    ExecutionConfig,
    ExecutionContext,
    Halted,
    InvalidValue,
    Price,
    PriceBook,
    Reported,
    RunEnded,
    ShieldPipeline,
    StopReason,
    Verdict,
    WrapOptions,
    contain,
    current_call,
)
from penstock.events import DivergenceDetector
from penstock.stores import LedgerError
from penstock.testing import Answer, FailAfterBilling, FakeProvider, ManualClock, RefuseFree, check_history


@pytest.mark.requirement("X-1", "P-B2")
def test_a_response_that_is_handed_up_through_three_calls_is_billed_once() -> None:
    provider = FakeProvider(lambda _: Answer(input_tokens=10, output_tokens=5))
    with contain(prices=provider.prices) as run:

        def ask() -> object:
            return run.llm(provider.complete, name="ask")

        def search() -> object:
            return run.tool(ask, name="search")

        run.tool(search, name="research")
    assert run.balance.spent_nanos == provider.invoice.total_nanos > 0
    assert run.usage.tokens_used == 15
    assert run.explain().endswith("3 steps · 15 tokens · 1 api call")


@pytest.mark.requirement("X-1")
def test_a_reported_value_that_is_handed_up_is_billed_once() -> None:
    with contain() as run:
        run.tool(lambda: run.tool(lambda: Reported.of({"usage": None}, cost_usd=0.25)))
    assert run.balance.spent_usd == 0.25


@pytest.mark.requirement("X-1")
def test_a_call_that_makes_its_own_response_beside_one_it_hands_up_is_billed_for_its_own() -> None:
    provider = FakeProvider(lambda _: Answer(input_tokens=10, output_tokens=5))
    with contain(prices=provider.prices) as run:

        def twice() -> object:
            run.llm(provider.complete, name="inner")
            return provider.complete()

        run.llm(twice, name="outer")
    assert run.balance.spent_nanos == provider.invoice.total_nanos


@pytest.mark.requirement("P-B2")
def test_a_cost_hint_does_not_let_tokens_pass_their_ceiling() -> None:
    provider = FakeProvider(lambda _: Answer(input_tokens=30, output_tokens=20))
    with contain(max_tokens=100, prices=provider.prices) as run:
        decisions = [run.wrap_llm_call(provider.complete, WrapOptions(cost_estimate_hint=0.01)) for _ in range(4)]
        assert decisions == [Decision.ALLOW] * 2 + [Decision.HALT] * 2
        waiting = run.spawn_child("waiting")
        assert waiting.usage.tokens_used == 100


@pytest.mark.requirement("C-6")
@pytest.mark.parametrize("door", ["llm", "tool", "call_llm", "call_tool", "wrap_llm_call", "wrap_tool_call"])
@pytest.mark.parametrize("timeout_s", [None, 60])
def test_an_async_function_in_a_sync_door_is_refused_with_what_to_use_instead(
    door: str, timeout_s: float | None
) -> None:
    async def answer() -> str:
        return "never awaited"

    with contain(timeout_s=timeout_s, max_retries=3) as run:
        with pytest.raises(InvalidValue, match="a sync function; await allm, atool"):
            getattr(run, door)(answer)
        assert run.balance.steps == run.balance.steps_open == run.balance.retries == 0


@pytest.mark.requirement("X-2", "X-1")
def test_a_billed_failure_without_a_hint_is_reported_as_unknown_and_not_as_zero() -> None:
    provider = FakeProvider([FailAfterBilling(), RefuseFree(429)])
    ctx = ExecutionContext()
    ctx.wrap_llm_call(provider.complete)
    assert ctx.get_snapshot().unknown_costs == 1
    ctx.wrap_llm_call(provider.complete)
    assert ctx.get_snapshot().unknown_costs == 1, "a 429 is known to be free"
    assert "unknown (1 call)" in ctx.explain()


@pytest.mark.requirement("X-1")
def test_the_bill_of_a_failed_call_can_be_settled_later_once() -> None:
    provider = FakeProvider([FailAfterBilling()])
    with contain(max_cost_usd=1.00) as run:
        _, _, call = run.call_llm(provider.complete, WrapOptions(cost_estimate_hint=0.60))
        assert run.balance.unresolved_usd == 0.60
        call.settle(cost_usd=0.10, input_tokens=100, output_tokens=50)
        with pytest.raises(LedgerError, match="is not open"):
            call.settle(cost_usd=0.10)
        assert (run.balance.spent_usd, run.balance.unresolved_usd, run.stats.total_cost) == (0.10, 0, 0.10)
        assert call.cost_usd == 0.10
    assert check_history(run.history(), ledger=run.balance) == []


@pytest.mark.requirement("X-1", "X-2")
def test_a_call_of_unknown_cost_can_be_settled_and_is_then_known() -> None:
    provider = FakeProvider([FailAfterBilling()])
    with contain() as run:
        _, _, call = run.call_llm(provider.complete)
        assert run.get_snapshot().unknown_costs == 1
        call.settle(cost_usd=0.25)
        assert (run.get_snapshot().unknown_costs, run.balance.spent_usd) == (0, 0.25)


@pytest.mark.requirement("X-1")
def test_the_bill_of_an_error_that_passes_through_outer_calls_is_counted_once() -> None:
    class Billed(Exception):
        cost_usd = 0.10

    def breaks() -> None:
        raise Billed

    def unbilled() -> None:
        raise ConnectionResetError

    with contain() as run:
        with pytest.raises(Billed):
            run.tool(lambda: run.llm(lambda: run.llm(breaks)))
        assert run.balance.spent_usd == 0.10
    with contain() as run:
        with pytest.raises(ConnectionResetError):
            run.llm(lambda: run.llm(unbilled))
        assert run.get_snapshot().unknown_costs == 1


@pytest.mark.requirement("C-3", "G-7")
def test_an_error_that_passes_through_outer_calls_draws_one_retry() -> None:
    def breaks() -> None:
        raise ValueError("broken")

    with contain(max_retries=5) as run:
        with pytest.raises(ValueError, match="broken"):
            run.tool(lambda: run.tool(lambda: run.llm(breaks)))
        assert run.balance.retries == 1
        assert run.graph.aggregates["total_retries"] == 1
        with pytest.raises(ValueError, match="broken"):
            run.llm(breaks)
        assert run.balance.retries == 2


@pytest.mark.requirement("C-3", "C-7")
def test_nested_retries_reach_the_provider_once_and_then_as_often_as_the_budget_has_retries() -> None:
    reached = []

    def provider() -> None:
        reached.append(1)
        raise ConnectionResetError

    ctx = ExecutionContext(ExecutionConfig(None, None, 5))

    def layer(depth: int) -> None:
        ctx.tool(provider if depth == 0 else (lambda: layer(depth - 1)), name=f"layer {depth}", retries=2)

    with pytest.raises((Halted, ConnectionResetError)):
        layer(2)
    assert len(reached) == 1 + 5


@pytest.mark.requirement("T-4")
def test_a_child_that_has_ended_takes_no_more_calls() -> None:
    with contain() as run:
        with run.spawn_child("child") as child:
            child.tool(lambda: None)
        with pytest.raises(RunEnded, match="context 'main/child' of run"):
            child.tool(lambda: None)
        assert run.tool(lambda: "the run goes on") == "the run goes on"


@pytest.mark.requirement("G-12")
def test_a_detector_that_halts_stops_the_run_and_not_one_call() -> None:
    with contain(divergence=DivergenceDetector(repeats=3, halts=True)) as run:
        ran: list[str] = []
        for _ in range(2):
            run.tool(ran.append, "the same page", name="fetch")
        for _ in range(4):
            with pytest.raises(Halted) as halted:
                run.tool(ran.append, "the same page", name="fetch")
            assert halted.value.stop_reason is StopReason.DIVERGED
        assert len(ran) == 2
        noticed = [event for event in run.history() if event.kind == "divergence_noticed"]
        assert len(noticed) == 1


@pytest.mark.requirement("G-12")
def test_retries_of_one_call_are_not_taken_for_a_repetition() -> None:
    def flaky(_: str) -> None:
        raise ConnectionResetError

    with contain(divergence=DivergenceDetector(repeats=2, halts=True)) as run:
        with pytest.raises(ConnectionResetError):
            run.tool(flaky, "u", name="flaky", retries=5)
        assert run.call_tool(lambda: None).decision is Decision.ALLOW


@pytest.mark.requirement("T-4", "C-4")
def test_an_abort_reaches_a_child_that_is_nested_deeper_than_pythons_stack() -> None:
    ctx = deepest = ExecutionContext()
    for _ in range(3_000):
        deepest = deepest.spawn_child("d")
    ctx.abort("stop")
    assert deepest.wrap_llm_call(lambda: None) is Decision.HALT


@pytest.mark.requirement("C-15", "P-B2")
def test_the_model_of_the_run_is_the_model_of_its_calls_and_prices_them() -> None:
    prices = PriceBook(registered={"m": Price(1000, 1000)}, use_genai_prices=False)
    ctx = ExecutionContext(ExecutionConfig(0.05, None, None), None, ChainMetadata("r", "c", model="m"), prices=prices)
    answer = {"usage": {"input_tokens": 10, "output_tokens": 10}}
    decisions = [ctx.wrap_llm_call(lambda: answer) for _ in range(5)]
    assert decisions == [Decision.ALLOW] * 2 + [Decision.HALT] * 3
    assert ctx.stats.cost_by_model == {"m": 0.04}
    ctx.wrap_tool_call(lambda: None)
    assert [node["model"] for node in ctx.graph.snapshot()["nodes"].values() if node["kind"] == "tool"] == [None]


@pytest.mark.requirement("C-8")
def test_a_degraded_call_is_priced_as_the_model_the_hook_names() -> None:
    class Cheaper:
        def before_llm_call(self, ctx: object) -> Verdict:
            return Verdict.degrade(model="small")

    prices = PriceBook(registered={"big": Price(1000, 1000), "small": Price(1, 1)}, use_genai_prices=False)
    with contain(pipeline=ShieldPipeline(pre_dispatch=Cheaper()), prices=prices) as run:
        seen = run.llm(lambda: Reported.of(current_call().degraded_model, input_tokens=10), model="big")
    assert seen == "small"
    assert run.stats.cost_by_model == {"small": 0.00001}


@pytest.mark.requirement("C-11")
@pytest.mark.parametrize("look", [True, False])
def test_a_deadline_that_no_call_ran_into_is_still_published(look: bool) -> None:
    clock = ManualClock()
    with ExecutionContext(ExecutionConfig(None, None, None, timeout_ms=20), clock=clock) as ctx:
        clock.advance(0.05)
        if look:
            assert ctx.get_snapshot().aborted
    events = [(event.event_type, event.hook) for event in ctx.get_snapshot().events]
    assert events == [("timeout", "ExecutionContext")]
    assert ctx.termination_reason == "limit_exceeded"


@pytest.mark.requirement("C-6", "T-4")
def test_a_cancel_that_belongs_to_a_child_is_a_decision_for_its_parent() -> None:
    ctx = ExecutionContext()
    child = ctx.spawn_child("child")
    child.abort("no")
    assert ctx.wrap_tool_call(lambda: child.llm(lambda: 1)) is Decision.HALT
    with pytest.raises(CancelledError, match="no"):
        ctx.tool(lambda: child.llm(lambda: 1))
    assert ctx.tool(lambda: "goes on") == "goes on"
