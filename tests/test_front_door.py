"""Limits in one line for code that exists already: every argument works, and nonsense is refused by name."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from typing import Any

import pytest

from penstock import (
    Budget,
    BudgetExceededError,
    CancellationToken,
    ChainMetadata,
    CircuitBreaker,
    Decision,
    ExecutionContext,
    Halted,
    InvalidValue,
    Limits,
    Price,
    PriceBook,
    ShieldPipeline,
    StopReason,
    ToolCallContext,
    WrapOptions,
    contain,
    current_context,
)
from penstock.events import DivergenceDetector
from penstock.stores import Ledger, MemoryLedgerStore
from penstock.testing import Answer, FailAfterBilling, FakeProvider, ManualClock


def nothing() -> None:
    pass


def fetch(url: str) -> str:
    return f"what {url} says"


@pytest.mark.requirement("C-16")
def test_the_example_of_the_readme() -> None:
    provider = FakeProvider(lambda _: Answer("…", input_tokens=1_000, output_tokens=200))
    prices = PriceBook(registered={"fake-1": Price(3, 15)}, use_genai_prices=False)
    with contain(max_cost_usd=0.50, max_steps=20, timeout_s=60, prices=prices) as run:
        run.llm(provider.complete, "Summarise this.")
        page = run.tool(fetch, "https://example.org", name="fetch", cost_hint_usd=0.001)
    assert page == "what https://example.org says"
    assert run.balance.spent_usd == 0.007
    assert run.explain().splitlines()[-1] == "cost $0.007 of $0.50 · 2/20 steps · 1200 tokens · 1 api call"


@pytest.mark.requirement("C-16")
def test_runaway_agent_is_stopped_and_its_calls_are_recorded() -> None:
    again = Answer("again", input_tokens=0, output_tokens=1_000)
    provider = FakeProvider(lambda _: again, output_usd_per_mtok=100)
    prices = PriceBook(registered={"fake-1": Price(0, 100)}, use_genai_prices=False)
    with pytest.raises(BudgetExceededError) as stopped, contain(max_cost_usd=0.50, prices=prices) as run:
        while True:
            run.llm(provider.complete, name="think", cost_hint_usd=0.10)
    assert (provider.invoice.calls, provider.invoice.total_usd) == (5, 0.50)
    assert stopped.value.stop_reason is StopReason.BUDGET_EXCEEDED
    assert len(stopped.value.partial) == 5
    assert run.termination_reason == "limit_exceeded"


# Every argument.


@pytest.mark.requirement("C-1")
@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ({"max_cost_usd": 0.20}, "budget_exceeded"),
        ({"max_cost_usd": "0.20"}, "budget_exceeded"),
        ({"max_steps": 2}, "step_limit_exceeded"),
        ({"max_tokens": 20}, "token_limit_exceeded"),
        ({"max_api_calls": 2}, "api_call_limit_exceeded"),
        ({"timeout_s": 2}, "timeout"),
    ],
)
def test_each_limit_lets_two_calls_through_and_stops_the_third(limit: dict[str, Any], reason: str) -> None:
    clock = ManualClock()
    with contain(**limit, sync_calls="inline", clock=clock) as run:

        def ask() -> None:
            run.report(cost_usd=0.10, input_tokens=10)
            clock.advance(0.9)

        for _ in range(2):
            run.llm(ask, cost_hint_usd=0.10)
        clock.advance(0.3)
        with pytest.raises(BudgetExceededError) as stopped:
            run.llm(ask, cost_hint_usd=0.10)
    assert (stopped.value.stop_reason, stopped.value.owner) == (reason, "main")


@pytest.mark.requirement("C-1")
def test_max_retries_is_the_number_of_failures_a_run_tolerates() -> None:
    def fails() -> None:
        raise ConnectionRefusedError

    with contain(max_retries=2) as run:
        decisions = [run.wrap_tool_call(fails) for _ in range(3)]
        assert run.wrap_tool_call(nothing) is Decision.HALT
    assert decisions == [Decision.RETRY, Decision.RETRY, Decision.HALT]


@pytest.mark.requirement("C-1")
@pytest.mark.parametrize(
    "limit", ["max_cost_usd", "max_steps", "max_tokens", "max_api_calls", "max_retries", "timeout_s"]
)
def test_none_is_no_limit_and_zero_is_nothing(limit: str) -> None:
    assert contain(**{limit: None}).wrap_llm_call(nothing) is Decision.ALLOW
    assert contain(**{limit: 0}).wrap_llm_call(nothing) is Decision.HALT


@pytest.mark.requirement("C-4")
def test_timeout_wakes_waiting_callers() -> None:
    release = threading.Event()
    with contain(timeout_s=0.02) as run:
        with pytest.raises(Halted) as stopped:
            run.tool(release.wait, 30)
        release.set()
    assert stopped.value.stop_reason is StopReason.TIMEOUT


def test_name_is_used_everywhere() -> None:
    with contain(name="nightly", max_steps=0) as run, pytest.raises(BudgetExceededError, match="of 'nightly' used"):
        run.tool(nothing)
    assert (run.name, run.events[0].source, run.explain().split()[1]) == ("nightly", "nightly", "nightly")


@pytest.mark.requirement("X-2")
def test_strict_refuses_calls_without_a_cost_hint() -> None:
    with contain(strict=True) as run:
        with pytest.raises(Halted, match="pass one"):
            run.tool(nothing)
        run.tool(nothing, cost_hint_usd=0)
    assert run.balance.steps == 1


@pytest.mark.parametrize(("unknown_bill", "unresolved"), [("hold", 0.25), ("release", 0)])
def test_hold_of_a_failed_call_of_unknown_cost_is_kept_or_released(unknown_bill: Any, unresolved: float) -> None:
    provider = FakeProvider([FailAfterBilling()])
    with contain(unknown_bill=unknown_bill) as run:
        run.wrap_llm_call(provider.complete, WrapOptions(cost_estimate_hint=0.25))
    assert run.balance.unresolved_usd == unresolved


@pytest.mark.parametrize(("sync_calls", "inline"), [("auto", True), ("inline", True), ("thread", False)])
def test_sync_functions_run_where_the_option_says(
    sync_calls: Any, inline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.runtime.worker.others_alive", lambda: False)
    with contain(sync_calls=sync_calls) as run:
        assert (run.tool(threading.get_ident) == threading.get_ident()) == inline
    with contain(sync_calls=sync_calls, timeout_s=30) as run:
        assert (run.tool(threading.get_ident) == threading.get_ident()) == (sync_calls == "inline")


def test_only_max_kept_calls_are_kept_and_the_totals_stay_complete() -> None:
    with contain(max_kept_calls=10) as run:
        for _ in range(100):
            run.tool(nothing, cost_hint_usd=0.01)
    assert len(run.get_snapshot().nodes) <= 10
    assert (run.balance.steps, run.stats.total_cost) == (100, 1.00)


@pytest.mark.requirement("C-8", "C-15")
def test_hooks_breaker_metadata_and_prices_are_those_that_were_given() -> None:
    contexts: list[ToolCallContext] = []

    class Listen:
        def before_llm_call(self, ctx: ToolCallContext) -> None:
            contexts.append(ctx)

    breaker = CircuitBreaker(failure_threshold=1)
    with contain(
        pipeline=ShieldPipeline(pre_dispatch=Listen()),
        breaker=breaker,
        metadata=ChainMetadata("req-1", "chain-1", team="search"),
        prices=PriceBook(registered={"fake-1": Price(0, 1_000)}, use_genai_prices=False),
    ) as run:
        run.llm(FakeProvider([Answer(output_tokens=100)]).complete)
        breaker.record_failure()
        with pytest.raises(Halted) as stopped:
            run.llm(nothing)
    assert [(ctx.chain_id, ctx.team) for ctx in contexts] == [("chain-1", "search")] * 2
    assert (stopped.value.stop_reason, run.run_id, run.balance.spent_usd) == ("circuit_open", "chain-1", 0.10)


@pytest.mark.requirement("G-12")
def test_runaway_shapes_are_noticed_by_default_and_halt_on_request() -> None:
    with contain() as run:
        for _ in range(6):
            run.tool(fetch, "https://example.org")
    assert [event.kind for event in run.history()].count("divergence_noticed") == 1
    with contain(divergence=DivergenceDetector(repeats=3, halts=True)) as run, pytest.raises(Halted, match="fetch"):
        for _ in range(6):
            run.tool(fetch, "https://example.org")
    assert run.balance.steps == 2


@pytest.mark.requirement("C-4")
async def test_given_token_stops_the_run_and_is_not_cancelled_by_it() -> None:
    token = CancellationToken()
    async with contain(cancellation=token) as run:
        running = asyncio.create_task(run.acall_tool(lambda: asyncio.sleep(30)))
        await asyncio.sleep(0)
        token.cancel("closing time")
        outcome = await asyncio.wait_for(running, 30)
    assert (outcome.decision, run.termination_reason) == (Decision.HALT, "context_canceled")
    token = CancellationToken()
    async with contain(cancellation=token) as run:
        run.abort("only this one")
    assert not token.is_cancelled


def test_the_clock_is_the_one_that_was_given() -> None:
    clock = ManualClock()
    with contain(clock=clock) as run:
        clock.advance(90)
    assert run.get_snapshot().elapsed_ms == 90_000


# One budget over several runs.


@pytest.mark.requirement("P-B4")
def test_runs_that_share_a_ledger_share_its_budget_and_keep_their_own() -> None:
    day = Ledger("day", Budget(max_cost_dollars=1.00).limits())
    with contain(name="morning", max_cost_usd=0.60, ledger=day) as morning:
        decisions = [morning.wrap_llm_call(nothing, WrapOptions(cost_estimate_hint=0.30)) for _ in range(3)]
    assert decisions == [Decision.ALLOW, Decision.ALLOW, Decision.HALT]
    with contain(name="evening", max_cost_usd=0.60, ledger=day) as evening:
        evening.llm(nothing, cost_hint_usd=0.30)
        with pytest.raises(BudgetExceededError) as stopped:
            evening.llm(nothing, cost_hint_usd=0.30)
    assert (stopped.value.owner, stopped.value.budget.max_cost_dollars) == ("day", 1.00)
    assert (morning.balance.spent_usd, evening.balance.spent_usd, day.balance().spent_usd) == (0.60, 0.30, 0.90)
    assert (morning.run_id != evening.run_id, evening.ledger) == (True, day)


@pytest.mark.requirement("P-B4", "C-2")
def test_runs_in_many_threads_never_pass_the_budget_they_share() -> None:
    shared, together = Ledger("shared", Limits(cost_nanos=10**9, steps=50)), threading.Barrier(16)
    ran: list[int] = []

    def work() -> None:
        together.wait()
        with contain(ledger=shared) as run:
            for _ in range(10):
                run.wrap_tool_call(lambda: ran.append(1), WrapOptions(cost_estimate_hint=0.01))

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    figures = shared.balance()
    assert (len(ran), figures.steps, figures.spent_usd, figures.held_usd) == (50, 50, 0.50, 0)


def test_the_end_of_one_run_leaves_the_others_of_its_ledger_running() -> None:
    shared = Ledger("shared")
    first, second = contain(ledger=shared), contain(ledger=shared)
    first.tool(nothing)
    first.abort("enough")
    first.end()
    assert second.wrap_tool_call(nothing) is Decision.ALLOW
    assert [event.kind for event in second.history()].count("call_started") == 2


def test_a_run_uses_the_clock_of_its_ledger() -> None:
    clock = ManualClock()
    day = Ledger("day", Budget(max_time_seconds=60).limits(), clock=clock)
    run = contain(ledger=day, timeout_s=10, sync_calls="inline")
    assert run.wrap_tool_call(nothing) is Decision.ALLOW
    clock.advance(11)
    assert (run.wrap_tool_call(nothing), contain(ledger=day).wrap_tool_call(nothing)) == (Decision.HALT, Decision.ALLOW)
    clock.advance(50)
    assert contain(ledger=day).wrap_tool_call(nothing) is Decision.HALT
    with pytest.raises(InvalidValue, match="clock must be the clock of the ledger"):
        contain(ledger=day, clock=ManualClock())


# Nonsense.


@pytest.mark.requirement("C-1")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("max_cost_usd", value) for value in (math.nan, math.inf, -1, True, "a lot", [], 10**10)),
        *(
            (field, value)
            for field in ("max_steps", "max_tokens", "max_api_calls", "max_retries")
            for value in (-1, 1.5)
        ),
        *(
            (field, value)
            for field in ("max_steps", "max_tokens", "max_api_calls", "max_retries")
            for value in (True, "3")
        ),
        *(("timeout_s", value) for value in (math.nan, math.inf, -1, True, "60", 1e12)),
        *(("max_wait_s", value) for value in (math.nan, math.inf, -1, True, "60", None)),
        *(("name", value) for value in (None, 5, b"main")),
        *(("strict", value) for value in ("no", 1, None)),
        *(("unknown_bill", value) for value in ("forget", None)),
        *(("sync_calls", value) for value in ("process", None)),
        *(("max_kept_calls", value) for value in (0, -1, 1.5, True, "all")),
        *(("record_payloads", value) for value in ("on", True, None)),
        *(
            (field, 5)
            for field in ("prices", "pipeline", "breaker", "divergence", "metadata", "cancellation", "ledger")
        ),
        ("ledger", MemoryLedgerStore()),
        ("pipeline", nothing),
        ("metadata", {"request_id": "r"}),
    ],
)
def test_an_invalid_argument_is_refused_by_its_own_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidValue, match=f"^{field} must be ") as refused:
        contain(**{field: value})
    assert refused.value.field == field


def test_every_argument_is_tested_here() -> None:
    arguments = set(inspect.signature(contain).parameters)
    with open(__file__) as this:
        source = this.read()
    assert {name for name in arguments if f"{name}=" not in source and f'"{name}"' not in source} == set()


def test_what_is_returned_is_an_ordinary_context() -> None:
    run = contain()
    assert isinstance(run, ExecutionContext)
    assert (run.depth, run.parent, run.name) == (0, None, "main")


def test_prices_can_be_a_plain_mapping() -> None:
    provider = FakeProvider(lambda _: Answer("…", input_tokens=1_000, output_tokens=200))
    with contain(prices={"fake-1": Price(3, 15)}) as run:
        run.llm(provider.complete, "Summarise this.")
    assert run.balance.spent_usd == 0.006
    with pytest.raises(InvalidValue, match="price must be a Price"):
        contain(prices={"fake-1": 3})  # type: ignore[dict-item]


@pytest.mark.parametrize("adopt", [1, None, "yes"])
def test_adopt_is_true_or_false(adopt: Any) -> None:
    with pytest.raises(InvalidValue, match="adopt must be True or False"):
        contain(adopt=adopt)


def test_each_call_of_a_decorated_function_is_a_run_under_the_same_limits() -> None:
    runs: list[Any] = []

    @contain(max_steps=2, name="agent", metadata=ChainMetadata("request", "chain", team="blue"))
    def agent(steps: int, *, then: str) -> str:
        """An agent."""
        run = current_context()
        assert run is not None
        runs.append(run)
        for _ in range(steps):
            run.tool(nothing)
        return then

    assert agent.__name__ == "agent"
    assert agent(2, then="done") == agent(1, then="done") == "done"
    with pytest.raises(BudgetExceededError):
        agent(3, then="never")
    assert [run.balance.steps for run in runs] == [2, 1, 2]
    assert len({run.run_id for run in runs} - {"chain"}) == 3
    assert {(run.name, run.metadata.team) for run in runs} == {("agent", "blue")}
    assert [str(run.termination_reason) for run in runs] == ["success", "success", "limit_exceeded"]
    assert current_context() is None


async def test_each_call_of_a_decorated_async_function_is_a_run_of_its_own() -> None:
    @contain(max_steps=1)
    async def agent() -> str:
        run = current_context()
        assert run is not None
        await asyncio.sleep(0)
        await run.atool(nothing)
        return run.run_id

    assert len(set(await asyncio.gather(*(agent() for _ in range(5))))) == 5


def test_the_runs_of_a_decorated_function_share_a_ledger() -> None:
    ledger = Ledger("team", Limits(steps=2))

    @contain(ledger=ledger)
    def agent() -> None:
        run = current_context()
        assert run is not None
        run.tool(nothing)

    agent()
    agent()
    with pytest.raises(BudgetExceededError):
        agent()
