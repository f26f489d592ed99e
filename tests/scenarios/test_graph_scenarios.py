"""Graphs from end to end: the named scenarios, and limits, retries and nested graphs together."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import pytest

from penstock import (
    Budget,
    BudgetExceededError,
    CancellationToken,
    CancelledError,
    ErrorPolicy,
    ExecutionConfig,
    ExecutionContext,
    ExecutionTrace,
    FunctionNode,
    Graph,
    Halted,
    Price,
    PriceBook,
    Session,
    StopReason,
    contain,
)
from penstock.testing import Answer, FakeProvider, ServerError, check_history, explore
from tests.flow.steps import Boom, const, sim_loop, simulated, takes


def fails_times(times: int, ran: list[int]) -> FunctionNode:
    def run(ctx: ExecutionContext) -> str:
        ran.append(1)
        if len(ran) <= times:
            raise Boom("not yet")
        return "success"

    return FunctionNode("flaky", run)


# The table of scenarios, row by row.


@pytest.mark.requirement("P-G2", "P-E1")
async def test_retry_succeeds_on_the_second_attempt() -> None:
    ran: list[int] = []
    policy = ErrorPolicy(on_error="retry", retry_count=1, retry_delay_ms=0)
    graph = Graph("retry").add_step(fails_times(1, ran), "step", error_policy=policy)
    results = await graph.execute(ExecutionContext(session=Session()))
    assert results == {"step": "success"}
    assert len(ran) == 2


@pytest.mark.requirement("P-G2", "P-E1")
async def test_skip_on_error_lets_the_graph_continue_with_the_fallback_value() -> None:
    policy = ErrorPolicy(on_error="skip", fallback_value="default")
    graph = Graph("skip").add_step(fails_times(9, []), "fails", error_policy=policy)
    graph.add_step(FunctionNode("next", lambda ctx: f"got {ctx.input}"), "next", depends_on=["fails"])
    assert await graph.execute(ExecutionContext()) == {"fails": "default", "next": "got default"}


@pytest.mark.requirement("P-G2", "P-E3")
async def test_the_fallback_node_executes_when_the_primary_fails_and_only_then() -> None:
    ran: list[str] = []
    other = FunctionNode("other", lambda ctx: ran.append("other") or "from the other")
    policy = ErrorPolicy(on_error="fallback", fallback_node=other)
    graph = Graph("fallback").add_step(fails_times(1, []), "bad", error_policy=policy)
    graph.add_step(const("fine", "from the first"), "good", error_policy=policy)
    assert await graph.execute(ExecutionContext()) == {"bad": "from the other", "good": "from the first"}
    assert ran == ["other"]


@pytest.mark.requirement("P-G2", "P-B3")
async def test_a_budget_exceeded_in_the_middle_raises_with_the_partial_results() -> None:
    graph = Graph("budget")
    for at in range(5):
        graph.add_step(const("n", at), f"s{at}", depends_on=[f"s{at - 1}"] if at else None)
    ctx = ExecutionContext(budget=Budget(max_steps=3), name="run")
    with pytest.raises(BudgetExceededError) as raised:
        await graph.execute(ctx)
    error = raised.value
    assert error.partial == {"s0": 0, "s1": 1, "s2": 2}
    assert error.budget == Budget(max_steps=3)
    assert error.usage.steps_executed == 3
    assert error.owner == "run"
    assert error.stop_reason is StopReason.STEP_LIMIT_EXCEEDED


@pytest.mark.requirement("P-G2", "P-B2", "P-B3")
@pytest.mark.parametrize(
    ("budget", "reason"),
    [
        (Budget(max_tokens=300), StopReason.TOKEN_LIMIT_EXCEEDED),
        (Budget(max_steps=4), StopReason.STEP_LIMIT_EXCEEDED),
        (Budget(max_api_calls=2), StopReason.API_CALL_LIMIT_EXCEEDED),
        (Budget(max_cost_dollars=0.0021), StopReason.BUDGET_EXCEEDED),
        (Budget(max_time_seconds=5), StopReason.TIMEOUT),
    ],
    ids=["tokens", "steps", "api calls", "cost", "time"],
)
def test_each_kind_of_budget_stops_a_graph_of_model_calls_after_two_of_them(budget: Budget, reason: StopReason) -> None:
    async def main() -> None:
        provider = FakeProvider(lambda at: Answer(input_tokens=100, output_tokens=50, latency_s=2))

        async def ask(ctx: ExecutionContext) -> str:
            await ctx.allm(provider.acomplete)
            return "answered"

        graph = Graph("models")
        for at in range(6):
            graph.add_step(FunctionNode("ask", ask), f"s{at}", depends_on=[f"s{at - 1}"] if at else None)
        ctx = ExecutionContext(budget=budget, prices=provider.prices, clock=sim_loop().clock)
        with pytest.raises(BudgetExceededError) as raised:
            await graph.execute(ctx)
        assert raised.value.stop_reason is reason
        assert raised.value.partial == {"s0": "answered", "s1": "answered"}
        completed = [line for line in provider.invoice.lines if line.outcome == "answered"]
        assert len(completed) == 2

    simulated(main)


@pytest.mark.requirement("P-G2", "P-C2")
def test_a_cancel_in_the_middle_raises_with_the_partial_results() -> None:
    async def main() -> None:
        loop = sim_loop()
        token = CancellationToken(clock=loop.clock)
        graph = Graph("cancel").add_step(takes(1, "one"), "a").add_step(takes(1, "two"), "b", depends_on=["a"])
        graph.add_step(takes(100), "c", depends_on=["b"]).add_step(takes(1), "d", depends_on=["c"])
        loop.call_later(5, token.cancel, "the user left")
        ctx = ExecutionContext(cancellation=token, clock=loop.clock)
        with pytest.raises(CancelledError) as raised:
            await graph.execute(ctx)
        assert raised.value.partial == {"a": "one", "b": "two"}
        assert raised.value.reason == "the user left"
        assert loop.time() == 5
        assert not isinstance(raised.value, Exception), "no policy and no user code can swallow it by accident"

    simulated(main)


@pytest.mark.requirement("P-G2", "P-C2")
async def test_a_cancel_from_another_thread_stops_a_graph_that_waits() -> None:
    token = CancellationToken()
    started = asyncio.Event()

    async def wait(ctx: ExecutionContext) -> None:
        started.set()
        await asyncio.Event().wait()

    graph = Graph("cancel").add_step(const("a"), "a").add_step(FunctionNode("w", wait), "b", depends_on=["a"])
    task = asyncio.create_task(graph.execute(ExecutionContext(cancellation=token)))
    await started.wait()
    await asyncio.to_thread(token.cancel, "from a thread")
    with pytest.raises(CancelledError) as raised:
        await task
    assert raised.value.partial == {"a": 1}


@pytest.mark.requirement("P-G2", "P-O1")
async def test_a_trace_captures_all_steps_and_explains_the_full_history() -> None:
    trace = ExecutionTrace(graph_id="main", start_time=datetime.now(UTC))
    policy = ErrorPolicy("retry", retry_count=1, retry_delay_ms=0)
    graph = Graph("main").add_step(const("fetch"), "fetch").add_step(fails_times(1, []), "parse", error_policy=policy)
    graph.add_step(Graph("inner").add_step(const("x"), "check"), "verify", depends_on=["parse"])
    await graph.execute(ExecutionContext(session=Session(), trace=trace))
    assert [step.step_id for step in trace.steps] == ["fetch", "parse", "parse", "verify", "check"]
    assert trace.status == "completed"
    explained = trace.explain()
    for part in ("Graph: main", "Status: completed", "fetch", "parse", "Error: Boom: not yet", "verify", "check"):
        assert part in explained


# The table of parallel tests, row by row.


@pytest.mark.requirement("P-G2", "P-P1")
def test_two_independent_steps_take_the_time_of_one() -> None:
    async def main() -> None:
        graph = Graph("parallel", max_parallel=2).add_step(takes(10), "a").add_step(takes(10), "b")
        await graph.execute(ExecutionContext(clock=sim_loop().clock))
        assert sim_loop().time() == 10

    simulated(main)


@pytest.mark.requirement("P-G2", "P-P1")
@pytest.mark.parametrize(("cap", "seconds"), [(1, 80), (2, 40), (4, 20), (8, 10)])
def test_parallel_independent_steps_are_faster_by_as_much_as_they_are_allowed(cap: int, seconds: float) -> None:
    async def main() -> None:
        graph = Graph("parallel", max_parallel=cap)
        for at in range(8):
            graph.add_step(takes(10), f"s{at}")
        await graph.execute(ExecutionContext(clock=sim_loop().clock))
        assert sim_loop().time() == seconds

    simulated(main)


@pytest.mark.requirement("P-G2", "P-P2")
def test_parallel_steps_with_a_shared_node_do_not_race() -> None:
    async def schedule(seed: int) -> None:
        state = {"count": 0}

        async def increment(ctx: ExecutionContext) -> int:
            seen = state["count"]
            await asyncio.sleep(0)
            state["count"] = seen + 1
            return state["count"]

        shared = FunctionNode("counter", increment, persistent=True)
        graph = Graph("shared", max_parallel=10, queue_persistent=True)
        for at in range(10):
            graph.add_step(shared, f"s{at}")
        assert sorted((await graph.execute()).values()) == list(range(1, 11))

    explore(schedule, schedules=50)


@pytest.mark.requirement("P-G2", "P-P2")
def test_contention_for_many_shared_nodes_never_deadlocks() -> None:
    async def schedule(seed: int) -> None:
        turns = Counter[str]()

        def terminal(id: str) -> FunctionNode:
            async def use(ctx: ExecutionContext) -> None:
                await asyncio.sleep(0.01)
                turns[id] += 1

            return FunctionNode(id, use, persistent=True)

        nodes = [terminal(f"t{at}") for at in range(4)]
        graphs = []
        for offset in range(6):
            graph = Graph(f"g{offset}", max_parallel=1 + offset % 3, queue_persistent=True)
            for at in range(8):
                before = [f"s{at - 2}"] if at >= 2 and offset % 2 else None
                graph.add_step(nodes[(at * (1 + offset) + offset) % 4], f"s{at}", depends_on=before)
            graphs.append(graph)
        await asyncio.gather(*(graph.execute() for graph in graphs))
        assert turns.total() == 48

    explore(schedule, schedules=100)


# Retries inside retries.


@pytest.mark.requirement("P-G2", "P-E2")
@pytest.mark.parametrize(("retry_budget", "requests"), [(None, 27), (5, 6), (1, 2), (0, 0)])
async def test_three_layers_of_three_attempts_share_one_retry_budget(retry_budget: int | None, requests: int) -> None:
    provider = FakeProvider(lambda at: ServerError(500))
    again = ErrorPolicy("retry", retry_count=2, retry_delay_ms=0)

    async def ask(ctx: ExecutionContext) -> Any:
        return await ctx.allm(provider.acomplete, retries=2, name="ask the model")

    inner = Graph("inner").add_step(FunctionNode("ask", ask), "inner step", error_policy=again)
    outer = Graph("outer").add_step(inner, "outer step", error_policy=again)
    config = ExecutionConfig(max_cost_usd=None, max_steps=None, max_retries_total=retry_budget)
    with ExecutionContext(config, prices=provider.prices) as ctx:
        with pytest.raises(Exception) as raised:
            await outer.execute(ctx)
        assert len(provider.invoice.lines) == requests
        if retry_budget is None:
            assert type(raised.value).__name__ == "ProviderHTTPError"
        else:
            assert isinstance(raised.value, Halted)
            assert ctx.balance.retries == retry_budget
        calls = [call for call in ctx.graph.calls()[1] if call.parent is not None]
        assert sum(call.name == "ask the model" for call in calls) == requests
        layers = [(call.name, (call.metadata or {}).get("attempt", 1)) for call in calls]
        assert layers[0] == ("outer step", 1)
        if requests >= 6:
            assert layers[:8] == [
                ("outer step", 1),
                ("inner step", 1),
                ("ask the model", 1),
                ("ask the model", 2),
                ("ask the model", 3),
                ("inner step", 2),
                ("ask the model", 1),
                ("ask the model", 2),
            ], "the tree shows which layer retried"
        explained = ctx.explain()
    assert explained.count("ask the model") == requests
    assert check_history(ctx.history(), ledger=ctx.balance) == []


@pytest.mark.requirement("P-E2", "P-P1")
def test_parallel_steps_draw_on_one_retry_budget_in_every_interleaving() -> None:
    async def schedule(seed: int) -> None:
        ran: list[int] = []

        async def fails(ctx: ExecutionContext) -> None:
            ran.append(1)
            await asyncio.sleep(1)
            raise Boom

        graph = Graph("g", max_parallel=4, settle="collect")
        for at in range(4):
            policy = ErrorPolicy("retry", retry_count=50, retry_delay_ms=100)
            graph.add_step(FunctionNode("f", fails), f"s{at}", error_policy=policy)
        config = ExecutionConfig(max_cost_usd=None, max_steps=None, max_retries_total=10)
        ctx = ExecutionContext(config, clock=sim_loop().clock)
        try:
            await graph.execute(ctx)
        except Halted as error:
            ctx.end(error)
        assert ctx.balance.retries == 10
        assert len(ran) <= 10 + 4, "what ran when the budget was used up, and nothing after it"

    explore(schedule, schedules=50)


# Limits and nests.


@pytest.mark.requirement("P-B4", "P-P1")
def test_a_nest_of_parallel_graphs_never_spends_more_than_the_run_has() -> None:
    async def schedule(seed: int) -> None:
        provider = FakeProvider(lambda at: Answer(cost_usd=0.10, latency_s=1))
        prices = PriceBook(registered={"fake-1": Price(0, 0, request_usd=0.10)}, use_genai_prices=False)

        async def ask(ctx: ExecutionContext) -> None:
            await ctx.allm(provider.acomplete, cost_hint_usd=0.10)

        inner = Graph("inner", max_parallel=4)
        for at in range(4):
            inner.add_step(FunctionNode("ask", ask), f"x{at}")
        outer = Graph("outer", max_parallel=16)
        for at in range(4):
            outer.add_step(inner, f"s{at}", sub_budget=Budget(max_cost_dollars=0.30))
        ctx = ExecutionContext(budget=Budget(max_cost_dollars=1.00), prices=prices, clock=sim_loop().clock, name="run")
        with pytest.raises(BudgetExceededError) as raised:
            await outer.execute(ctx)
        assert raised.value.owner in {"run", "s0", "s1", "s2", "s3"}
        assert provider.invoice.total_nanos <= 1_000_000_000
        ctx.end(raised.value)
        assert check_history(ctx.history(), invoice=provider.invoice, ceiling_nanos=1_000_000_000) == []

    explore(schedule, schedules=50)


@pytest.mark.requirement("P-B4")
async def test_a_step_is_limited_to_its_share_while_the_graph_has_more() -> None:
    provider = FakeProvider(lambda at: Answer(input_tokens=300, output_tokens=100))

    async def ask(ctx: ExecutionContext) -> str:
        await ctx.allm(provider.acomplete)
        return "answered"

    def chain_of(count: int) -> Graph:
        graph = Graph(f"chain of {count}")
        for at in range(count):
            graph.add_step(FunctionNode("ask", ask), f"x{at}", depends_on=[f"x{at - 1}"] if at else None)
        return graph

    outer = Graph("outer", settle="collect").add_step(chain_of(5), "limited", sub_budget=Budget(max_tokens=1_000))
    outer.add_step(chain_of(5), "free")
    with contain(max_tokens=10_000, prices=provider.prices) as run:
        results = await outer.execute(run)
        error = results.errors["limited"]
        assert isinstance(error, BudgetExceededError)
        assert error.owner == "limited"
        assert list(results["free"]) == ["x0", "x1", "x2", "x3", "x4"]
        assert run.usage.tokens_used <= 10_000


@pytest.mark.requirement("P-G1", "P-B3")
async def test_partial_results_of_a_nest_show_how_far_each_level_came() -> None:
    inner = Graph("inner")
    for at in range(4):
        inner.add_step(const("n", at), f"x{at}", depends_on=[f"x{at - 1}"] if at else None)
    outer = Graph("outer").add_step(const("a", "first"), "a").add_step(inner, "b", depends_on=["a"])
    with pytest.raises(BudgetExceededError) as raised:
        await outer.execute(ExecutionContext(budget=Budget(max_steps=4)))
    assert raised.value.partial == {"a": "first", "b": {"x0": 0, "x1": 1}}


@pytest.mark.requirement("P-G1")
async def test_a_graph_is_a_tool_like_any_function() -> None:
    graph = Graph("research").add_step(FunctionNode("look", lambda ctx: f"about {ctx.input}"), "look")
    with contain(max_steps=10) as run:
        results = await run.atool(graph.execute, run.with_input("penstocks"), name="research")
        assert results == {"look": "about penstocks"}
        assert "research" in run.explain()


@pytest.mark.requirement("P-C2")
def test_a_run_cancelled_at_any_moment_leaves_nothing_and_has_a_consistent_history() -> None:
    async def schedule(seed: int) -> None:
        loop = sim_loop()
        provider = FakeProvider(lambda at: Answer(latency_s=0.5) if at % 3 else ServerError(500))

        async def ask(ctx: ExecutionContext) -> None:
            await ctx.allm(provider.acomplete, retries=1)

        again = ErrorPolicy("retry", retry_count=2, retry_delay_ms=100, timeout_ms=2_000)
        shared = FunctionNode("shared", ask, persistent=True)
        inner = Graph("inner", max_parallel=3, settle="collect", queue_persistent=True)
        inner.add_step(FunctionNode("ask", ask), "x", error_policy=again).add_step(shared, "y").add_step(shared, "z")
        outer = Graph("outer", max_parallel=4).add_step(inner, "a").add_step(inner, "b")
        outer.add_step(FunctionNode("ask", ask), "c", error_policy=ErrorPolicy("skip"))
        token = CancellationToken(clock=loop.clock)
        loop.call_later((seed % 40) / 10, token.cancel, "now")
        ctx = ExecutionContext(cancellation=token, clock=loop.clock, prices=provider.prices)
        try:
            await outer.execute(ctx)
        except CancelledError as error:
            assert loop.time() == pytest.approx((seed % 40) / 10)
            ctx.end(error)
        except Exception as error:
            ctx.end(error)
        else:
            ctx.end()
        assert ctx.balance.steps_open == 0
        assert len(asyncio.all_tasks()) == 1
        assert check_history(ctx.history(), ledger=ctx.balance) == []

    explore(schedule, schedules=200)
