"""What becomes of a step that fails: it is tried again, skipped, replaced; and what no policy may touch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from threading import Event, get_ident
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
    FunctionNode,
    Graph,
    Halted,
    InvalidValue,
    Session,
    StepTimeout,
    StopReason,
    contain,
)
from penstock.testing import Answer, FakeProvider, ProviderHTTPError, RefuseFree, check_history
from tests.flow.steps import Boom, sim_loop, simulated

AT_ONCE = {"retry_delay_ms": 0, "retry_jitter": 0.0}


async def until(holds: Callable[[], bool]) -> None:
    """Let a thread get on until something holds."""
    for _ in range(3_000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to hold")


class Flaky:
    """A node that fails so often, and then gives its value."""

    def __init__(self, id: str, failures: int, value: Any = "done", error: Callable[[], BaseException] = Boom) -> None:
        self.id = id
        self.left = failures
        self.value = value
        self.error = error
        self.runs = 0

    async def execute(self, context: ExecutionContext) -> Any:
        self.runs += 1
        if self.left:
            self.left -= 1
            raise self.error()
        return self.value


def one_step(node: Any, policy: ErrorPolicy | None = None, **options: Any) -> Graph:
    return Graph("g").add_step(node, "a", error_policy=policy, **options)


# Failing, trying again, skipping, falling back.


@pytest.mark.requirement("P-E1", "P-P3")
async def test_a_step_that_fails_raises_its_own_error_with_a_note_of_where() -> None:
    with pytest.raises(Boom) as raised:
        await Graph("plan").add_step(Flaky("f", 1), "fetch").execute()
    assert type(raised.value) is Boom
    assert any("'fetch'" in note and "'plan'" in note for note in raised.value.__notes__)


@pytest.mark.requirement("P-P3")
async def test_an_error_that_is_raised_again_and_again_does_not_gather_notes() -> None:
    always_the_same = Boom()
    graph = Graph("plan").add_step(Flaky("f", 99, error=lambda: always_the_same), "fetch")
    for _ in range(3):
        with pytest.raises(Boom):
            await graph.execute()
    assert always_the_same.__notes__ == ["in step 'fetch' of graph 'plan'"]


@pytest.mark.requirement("P-E1")
async def test_a_policy_of_fail_is_no_policy() -> None:
    flaky = Flaky("f", 1)
    with pytest.raises(Boom):
        await one_step(flaky, ErrorPolicy("fail")).execute()
    assert flaky.runs == 1


@pytest.mark.requirement("P-E1", "P-E2")
@pytest.mark.parametrize("on_error", ["fail", "retry"])
async def test_the_last_error_is_raised_when_the_retries_are_used_up(on_error: Any) -> None:
    errors = iter(Boom(at) for at in range(10))
    flaky = Flaky("f", 10, error=lambda: next(errors))
    with pytest.raises(Boom, match="3"):
        await one_step(flaky, ErrorPolicy(on_error, retry_count=3, **AT_ONCE)).execute()
    assert flaky.runs == 4


@pytest.mark.requirement("P-E1")
@pytest.mark.parametrize("value", ["instead", None, 0])
async def test_skip_gives_the_fallback_value_and_the_graph_goes_on(value: Any) -> None:
    graph = one_step(Flaky("f", 9), ErrorPolicy("skip", retry_count=1, fallback_value=value, **AT_ONCE))
    graph.add_step(FunctionNode("echo", lambda ctx: [ctx.input]), "b", depends_on=["a"])
    results = await graph.execute()
    assert results == {"a": value, "b": [value]}
    assert results.errors == {}
    assert results.skipped == []


@pytest.mark.requirement("P-E1")
async def test_a_fallback_value_stands_in() -> None:
    assert await one_step(Flaky("f", 9), ErrorPolicy("fallback", fallback_value=7)).execute() == {"a": 7}


@pytest.mark.requirement("P-E1", "P-E3")
async def test_a_fallback_node_gets_the_same_input_and_upstream() -> None:
    def instead(ctx: ExecutionContext) -> Any:
        return ctx.input, dict(ctx.upstream)

    graph = Graph("g").add_step(FunctionNode("one", lambda ctx: 1), "before")
    policy = ErrorPolicy("fallback", retry_count=1, fallback_node=FunctionNode("instead", instead), **AT_ONCE)
    graph.add_step(Flaky("f", 9), "a", depends_on=["before"], error_policy=policy)
    assert (await graph.execute())["a"] == (1, {"before": 1})


@pytest.mark.requirement("P-E1", "P-E3")
async def test_a_fallback_that_fails_raises_its_own_error_and_is_not_tried_again() -> None:
    instead = Flaky("instead", 9, error=KeyError)
    with pytest.raises(KeyError):
        await one_step(
            Flaky("f", 9), ErrorPolicy("fallback", retry_count=2, fallback_node=instead, **AT_ONCE)
        ).execute()
    assert instead.runs == 1


@pytest.mark.requirement("P-E1")
async def test_a_policy_is_for_its_own_step_alone() -> None:
    graph = one_step(Flaky("f", 9), ErrorPolicy("skip")).add_step(Flaky("g", 9), "b")
    with pytest.raises(Boom):
        await graph.execute()


@pytest.mark.requirement("P-E1")
async def test_an_input_fn_that_raises_is_a_failure_of_its_step() -> None:
    def broken(upstream: Any) -> Any:
        raise Boom("no input")

    graph = one_step(Flaky("f", 0), ErrorPolicy("skip", fallback_value="x"), input_fn=broken)
    assert await graph.execute() == {"a": "x"}


@pytest.mark.requirement("P-C2")
@pytest.mark.parametrize("policy", [None, ErrorPolicy("skip"), ErrorPolicy("retry", retry_count=1, **AT_ONCE)])
async def test_a_step_whose_own_input_fn_cancels_the_run_does_not_run(policy: ErrorPolicy | None) -> None:
    step, run = Flaky("f", 0), ExecutionContext()
    with pytest.raises(CancelledError, match="enough"):
        await one_step(step, policy, input_fn=lambda upstream: run.abort("enough")).execute(run)
    assert step.runs == 0


@pytest.mark.requirement("P-C2", "P-E3")
async def test_a_fallback_whose_input_fn_cancels_the_run_does_not_run() -> None:
    failing, standing_in, run = Flaky("f", 9), Flaky("g", 0), ExecutionContext()

    def cancel_the_second_time(upstream: Any) -> None:
        if failing.runs:
            run.abort("enough")

    policy = ErrorPolicy("fallback", fallback_node=standing_in)
    with pytest.raises(CancelledError, match="enough"):
        await one_step(failing, policy, input_fn=cancel_the_second_time).execute(run)
    assert (failing.runs, standing_in.runs) == (1, 0)


@pytest.mark.requirement("P-E1")
async def test_a_graph_as_a_step_is_retried_as_a_whole() -> None:
    first, second = Flaky("first", 0), Flaky("second", 2)
    inner = Graph("inner").add_step(first, "x").add_step(second, "y", depends_on=["x"])
    outer = Graph("outer").add_step(inner, "a", error_policy=ErrorPolicy("retry", retry_count=2, **AT_ONCE))
    assert await outer.execute() == {"a": {"x": "done", "y": "done"}}
    assert (first.runs, second.runs) == (3, 3)


# When attempts are made.


@pytest.mark.requirement("P-E2")
def test_attempts_are_spaced_by_delay_and_backoff() -> None:
    async def main() -> None:
        started: list[float] = []

        def note(ctx: ExecutionContext) -> None:
            started.append(sim_loop().time())
            raise Boom

        policy = ErrorPolicy("skip", retry_count=3, retry_delay_ms=1_000, retry_backoff=3.0, retry_jitter=0.0)
        await one_step(FunctionNode("note", note), policy).execute(ExecutionContext(clock=sim_loop().clock))
        assert started == pytest.approx([0, 1, 4, 13])

    simulated(main)


@pytest.mark.requirement("P-E2")
def test_a_retry_waits_as_long_as_the_provider_asks_if_that_is_longer_than_the_policy_says() -> None:
    async def main() -> None:
        provider = FakeProvider([RefuseFree(429, retry_after_s=20), RefuseFree(429, retry_after_s=0.5), Answer("hi")])
        started: list[float] = []

        async def ask(ctx: ExecutionContext) -> Any:
            started.append(sim_loop().time())
            return (await ctx.allm(provider.acomplete)) is not None

        policy = ErrorPolicy("retry", retry_count=2, retry_delay_ms=1_000, retry_backoff=1.0, retry_jitter=0.0)
        with ExecutionContext(clock=sim_loop().clock, prices=provider.prices) as ctx:
            assert await one_step(FunctionNode("ask", ask), policy).execute(ctx) == {"a": True}
        assert started == pytest.approx([0, 20, 21])

    simulated(main)


@pytest.mark.requirement("P-E2", "P-C2")
def test_a_cancel_ends_the_sleep_between_two_attempts_at_once() -> None:
    async def main() -> None:
        token, loop = CancellationToken(clock=sim_loop().clock), sim_loop()
        loop.call_later(5, token.cancel, "enough")
        policy = ErrorPolicy("skip", retry_count=5, retry_delay_ms=3_600_000, retry_backoff=1.0)
        ctx = ExecutionContext(cancellation=token, clock=loop.clock)
        with pytest.raises(CancelledError) as raised:
            await one_step(Flaky("f", 9), policy).execute(ctx)
        assert raised.value.reason == "enough"
        assert loop.time() == 5

    simulated(main)


@pytest.mark.requirement("P-E2", "P-E4", "P-C2")
def test_the_deadline_of_the_run_ends_the_sleep_between_two_attempts() -> None:
    async def main() -> None:
        loop = sim_loop()
        policy = ErrorPolicy("skip", retry_count=5, retry_delay_ms=3_600_000)
        ctx = ExecutionContext(budget=Budget(max_time_seconds=2), clock=loop.clock)
        with pytest.raises(BudgetExceededError) as raised:
            await one_step(Flaky("f", 9), policy).execute(ctx)
        assert raised.value.stop_reason is StopReason.TIMEOUT
        assert loop.time() == pytest.approx(2)

    simulated(main)


@pytest.mark.requirement("P-E2")
async def test_every_attempt_skip_and_fallback_is_a_call_in_the_tree() -> None:
    graph = Graph("g").add_step(Flaky("f", 2), "a", error_policy=ErrorPolicy("retry", retry_count=2, **AT_ONCE))
    graph.add_step(Flaky("g", 9), "b", error_policy=ErrorPolicy("skip"))
    policy = ErrorPolicy("fallback", fallback_node=FunctionNode("other", lambda ctx: 1))
    graph.add_step(Flaky("h", 9), "c", error_policy=policy)
    with ExecutionContext() as ctx:
        await graph.execute(ctx)
        calls = [call for call in ctx.graph.calls()[1] if call.parent is not None]
    attempts = [(call.name, call.status, (call.metadata or {}).get("attempt", 1)) for call in calls]
    assert attempts[:3] == [("a", "fail", 1), ("a", "fail", 2), ("a", "success", 3)]
    assert [(name, status) for name, status, _ in attempts[3:]] == [
        ("b", "fail"),
        ("b", "success"),
        ("c", "fail"),
        ("c", "success"),
    ]
    assert "Boom" in (calls[4].metadata or {})["skip"]
    assert (calls[6].metadata or {})["fallback"] == "other"
    assert check_history(ctx.history(), ledger=ctx.balance) == []


@pytest.mark.requirement("P-E2")
async def test_failures_draw_on_the_one_retry_budget_of_the_run() -> None:
    first, second = Flaky("f", 2), Flaky("s", 99)
    policy = ErrorPolicy("retry", retry_count=9, **AT_ONCE)
    graph = Graph("g").add_step(first, "a", error_policy=policy)
    graph.add_step(second, "b", depends_on=["a"], error_policy=policy)
    ctx = ExecutionContext(ExecutionConfig(max_cost_usd=None, max_steps=None, max_retries_total=5))
    with pytest.raises(Halted) as raised:
        await graph.execute(ctx)
    assert isinstance(raised.value.__cause__, Boom)
    assert (first.runs, second.runs) == (3, 4), "five failures are drawn, the sixth ends it"
    assert raised.value.partial == {"a": "done"}


@pytest.mark.requirement("P-E2", "P-E4")
@pytest.mark.parametrize("on_error", ["skip", "fallback"])
async def test_an_exceeded_retry_budget_is_not_skipped_or_replaced(on_error: Any) -> None:
    policy = ErrorPolicy(on_error, retry_count=3, fallback_value="x", **AT_ONCE)
    ctx = ExecutionContext(ExecutionConfig(max_cost_usd=None, max_steps=None, max_retries_total=1))
    with pytest.raises(Halted):
        await one_step(Flaky("f", 9), policy).execute(ctx)


# An attempt's own time limit.


@pytest.mark.requirement("P-E1", "P-E2")
def test_an_attempt_that_takes_too_long_is_a_failure_like_any_other() -> None:
    async def main() -> None:
        waits = iter([10, 10, 0.5])

        async def slow(ctx: ExecutionContext) -> str:
            await asyncio.sleep(next(waits))
            return "in time"

        policy = ErrorPolicy("retry", retry_count=2, timeout_ms=1_000, **AT_ONCE)
        with ExecutionContext(clock=sim_loop().clock) as ctx:
            assert await one_step(FunctionNode("slow", slow), policy).execute(ctx) == {"a": "in time"}
        assert sim_loop().time() == pytest.approx(2.5)

    simulated(main)


async def forever(ctx: ExecutionContext) -> None:
    await asyncio.sleep(1e6)


@pytest.mark.requirement("P-E1")
def test_a_step_that_runs_out_of_its_time_raises_a_timeout_error_that_names_it() -> None:
    async def main() -> None:
        with ExecutionContext(clock=sim_loop().clock) as ctx, pytest.raises(TimeoutError, match=r"'a'.*250 ms") as late:
            await one_step(FunctionNode("f", forever), ErrorPolicy(timeout_ms=250)).execute(ctx)
        assert isinstance(late.value, StepTimeout)
        assert not isinstance(late.value, Halted)

    simulated(main)


@pytest.mark.requirement("P-E1")
@pytest.mark.parametrize("on_error", ["skip", "fallback"])
def test_a_timeout_is_skipped_or_replaced(on_error: Any) -> None:
    async def main() -> None:
        policy = ErrorPolicy(on_error, timeout_ms=10, fallback_value="x")
        with ExecutionContext(clock=sim_loop().clock) as ctx:
            assert await one_step(FunctionNode("f", forever), policy).execute(ctx) == {"a": "x"}

    simulated(main)


@pytest.mark.requirement("P-E1")
def test_a_node_that_swallows_its_timeout_has_timed_out_all_the_same() -> None:
    async def main() -> None:
        async def stubborn(ctx: ExecutionContext) -> str:
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                return "as if nothing had happened"
            return "never"

        policy = ErrorPolicy("skip", timeout_ms=10, fallback_value="x")
        with ExecutionContext(clock=sim_loop().clock) as ctx:
            assert await one_step(FunctionNode("f", stubborn), policy).execute(ctx) == {"a": "x"}

    simulated(main)


@pytest.mark.requirement("P-E3")
def test_a_fallback_node_is_under_the_same_timeout() -> None:
    async def main() -> None:
        policy = ErrorPolicy("fallback", timeout_ms=100, fallback_node=FunctionNode("slow", forever))
        with ExecutionContext(clock=sim_loop().clock) as ctx, pytest.raises(StepTimeout):
            await one_step(Flaky("f", 9), policy).execute(ctx)
        assert sim_loop().time() == pytest.approx(0.1)

    simulated(main)


@pytest.mark.requirement("P-E4")
def test_the_deadline_of_the_run_is_no_timeout_of_the_step() -> None:
    async def main() -> None:
        policy = ErrorPolicy("skip", retry_count=3, timeout_ms=5_000, **AT_ONCE)
        with pytest.raises(BudgetExceededError) as raised:
            ctx = ExecutionContext(budget=Budget(max_time_seconds=2), clock=sim_loop().clock)
            await one_step(FunctionNode("f", forever), policy).execute(ctx)
        assert raised.value.stop_reason is StopReason.TIMEOUT
        assert sim_loop().time() == pytest.approx(2)

    simulated(main)


@pytest.mark.requirement("P-E4")
def test_a_run_and_a_step_that_run_out_of_time_at_one_instant_end_the_run() -> None:
    async def main() -> None:
        policy = ErrorPolicy("skip", timeout_ms=2_000)
        with pytest.raises(BudgetExceededError):
            ctx = ExecutionContext(budget=Budget(max_time_seconds=2), clock=sim_loop().clock)
            graph = one_step(FunctionNode("f", forever), policy)
            await graph.add_step(FunctionNode("g", forever), "b", depends_on=["a"]).execute(ctx)

    simulated(main)


# Fallback nodes.


@pytest.mark.requirement("P-E3")
async def test_what_a_fallback_node_spends_counts_against_the_same_budget() -> None:
    provider = FakeProvider(lambda at: Answer(input_tokens=10, output_tokens=10))
    policy = ErrorPolicy("fallback", fallback_node=FunctionNode("ask", lambda ctx: ctx.allm(provider.acomplete)))
    graph = one_step(Flaky("f", 9), policy, sub_budget=Budget(max_steps=1))
    with contain(prices=provider.prices) as run, pytest.raises(BudgetExceededError) as raised:
        await graph.execute(run)
    assert raised.value.owner == "a"
    assert len(provider.invoice.lines) == 0


@pytest.mark.requirement("P-E3", "P-E4")
def test_a_cancel_reaches_a_fallback_node() -> None:
    async def main() -> None:
        token, loop = CancellationToken(clock=sim_loop().clock), sim_loop()
        loop.call_later(1, token.cancel)
        policy = ErrorPolicy("fallback", fallback_node=FunctionNode("slow", forever))
        with pytest.raises(CancelledError):
            await one_step(Flaky("f", 9), policy).execute(ExecutionContext(cancellation=token, clock=loop.clock))
        assert loop.time() == 1

    simulated(main)


@pytest.mark.requirement("P-E3")
async def test_a_fallback_may_be_a_graph_also_for_a_node_that_blocks() -> None:
    def blocks(ctx: ExecutionContext) -> None:
        raise Boom

    inner = Graph("inner").add_step(Flaky("x", 0), "x")
    graph = one_step(FunctionNode("b", blocks, blocking=True), ErrorPolicy("fallback", fallback_node=inner))
    assert await graph.execute() == {"a": {"x": "done"}}


@pytest.mark.requirement("P-E3")
async def test_a_fallback_that_blocks_runs_on_a_thread_like_any_node_that_does() -> None:
    blocks = FunctionNode("b", lambda ctx: get_ident(), blocking=True)
    results = await one_step(Flaky("f", 9), ErrorPolicy("fallback", fallback_node=blocks)).execute()
    assert results["a"] != get_ident()


@pytest.mark.requirement("P-E3", "P-P2")
def test_a_persistent_fallback_waits_for_its_turn() -> None:
    async def main() -> None:
        inside: list[str] = []

        async def use(ctx: ExecutionContext) -> str:
            assert inside == []
            inside.append("x")
            await asyncio.sleep(1)
            inside.clear()
            return "used"

        shared = FunctionNode("terminal", use, persistent=True)
        graph = Graph("g", max_parallel=2, queue_persistent=True).add_step(shared, "a")
        graph.add_step(Flaky("f", 9), "b", error_policy=ErrorPolicy("fallback", fallback_node=shared))
        assert await graph.execute() == {"a": "used", "b": "used"}
        assert sim_loop().time() == 2

    simulated(main)


@pytest.mark.requirement("P-E3")
async def test_the_same_persistent_node_may_be_its_own_second_chance() -> None:
    class Terminal(Flaky):
        persistent = True

    terminal = Terminal("t", 1)
    assert await one_step(terminal, ErrorPolicy("fallback", fallback_node=terminal)).execute() == {"a": "done"}


@pytest.mark.requirement("P-E3")
async def test_a_fallback_that_is_no_node_is_refused_when_the_step_is_added() -> None:
    with pytest.raises(InvalidValue, match="fallback_node of step 'a'"):
        one_step(Flaky("f", 9), ErrorPolicy("fallback", fallback_node="not a node"))


# What no policy touches.

EVERY_POLICY = [
    ErrorPolicy(),
    ErrorPolicy("retry", retry_count=3, **AT_ONCE),
    ErrorPolicy("skip", retry_count=3, fallback_value="x", **AT_ONCE),
    ErrorPolicy("fallback", retry_count=3, fallback_value="x", **AT_ONCE),
    ErrorPolicy("fallback", fallback_node=FunctionNode("never", lambda ctx: pytest.fail("replaced"))),
    ErrorPolicy("skip", timeout_ms=60_000, fallback_value="x"),
]


@pytest.mark.requirement("P-E4")
@pytest.mark.parametrize("settle", ["fail_fast", "collect", "first"])
@pytest.mark.parametrize("policy", EVERY_POLICY, ids=lambda policy: f"{policy.on_error}{policy.retry_count}")
async def test_a_cancel_passes_through_every_policy(policy: ErrorPolicy, settle: str) -> None:
    runs: list[int] = []

    async def aborts(ctx: ExecutionContext) -> None:
        runs.append(1)
        ctx.abort("stop it")
        await asyncio.sleep(0)

    graph = Graph("g", settle=settle).add_step(Flaky("ok", 0), "before")
    graph.add_step(FunctionNode("aborts", aborts), "a", depends_on=["before"], error_policy=policy)
    graph.add_step(Flaky("ok", 0), "after", depends_on=["a"])
    with pytest.raises(CancelledError) as raised:
        await graph.execute(ExecutionContext())
    assert raised.value.reason == "stop it"
    assert runs == [1]
    assert raised.value.partial == {"before": "done"}


@pytest.mark.requirement("P-E4")
@pytest.mark.parametrize("settle", ["fail_fast", "collect", "first"])
@pytest.mark.parametrize("policy", EVERY_POLICY, ids=lambda policy: f"{policy.on_error}{policy.retry_count}")
async def test_an_exceeded_budget_passes_through_every_policy(policy: ErrorPolicy, settle: str) -> None:
    runs: list[int] = []

    async def spends(ctx: ExecutionContext) -> None:
        runs.append(1)
        await ctx.atool(lambda: 1)
        await ctx.atool(lambda: 2)

    graph = Graph("g", settle=settle).add_step(Flaky("ok", 0), "before")
    graph.add_step(FunctionNode("spends", spends), "a", depends_on=["before"], error_policy=policy)
    with pytest.raises(BudgetExceededError) as raised:
        await graph.execute(ExecutionContext(budget=Budget(max_steps=3)))
    assert runs == [1]
    assert raised.value.partial == {"before": "done"}
    assert raised.value.budget == Budget(max_steps=3)


@pytest.mark.requirement("P-E4")
@pytest.mark.parametrize("policy", EVERY_POLICY, ids=lambda policy: f"{policy.on_error}{policy.retry_count}")
async def test_a_cancel_of_the_task_passes_through_every_policy(policy: ErrorPolicy) -> None:
    started = asyncio.Event()
    runs: list[int] = []

    async def waits(ctx: ExecutionContext) -> None:
        runs.append(1)
        started.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(one_step(FunctionNode("w", waits), policy).execute())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert runs == [1]


@pytest.mark.requirement("P-E4")
@pytest.mark.parametrize("policy", EVERY_POLICY, ids=lambda policy: f"{policy.on_error}{policy.retry_count}")
@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit])
def test_ctrl_c_passes_through_every_policy(policy: ErrorPolicy, raised: type[BaseException]) -> None:
    def interrupt(ctx: ExecutionContext) -> None:
        raise raised

    with pytest.raises(raised):
        asyncio.run(one_step(FunctionNode("i", interrupt), policy).execute())


# Sub-budgets.


@pytest.mark.requirement("P-B4")
async def test_a_sub_budget_holds_over_all_attempts_of_its_step() -> None:
    flaky = Flaky("f", 9)

    async def spend(ctx: ExecutionContext) -> Any:
        await ctx.atool(lambda: 1)
        return await flaky.execute(ctx)

    policy = ErrorPolicy("skip", retry_count=9, **AT_ONCE)
    graph = one_step(FunctionNode("s", spend), policy, sub_budget=Budget(max_steps=3))
    with pytest.raises(BudgetExceededError) as raised:
        await graph.execute(ExecutionContext())
    assert raised.value.owner == "a"
    assert raised.value.budget == Budget(max_steps=3)
    assert flaky.runs <= 3


@pytest.mark.requirement("P-B4")
async def test_a_sub_budget_larger_than_the_runs_does_not_widen_it() -> None:
    graph = one_step(Flaky("f", 0), sub_budget=Budget(max_steps=100))
    for at in range(3):
        graph.add_step(Flaky("f", 0), f"b{at}", sub_budget=Budget(max_steps=100))
    with pytest.raises(BudgetExceededError) as raised:
        await graph.execute(ExecutionContext(budget=Budget(max_steps=2), name="run"))
    assert raised.value.owner == "run"
    assert raised.value.partial == {"a": "done", "b0": "done"}


@pytest.mark.requirement("P-B4")
async def test_what_is_used_under_a_sub_budget_counts_above_it() -> None:
    inner = Graph("inner").add_step(Flaky("x", 0), "x").add_step(Flaky("y", 0), "y")
    outer = Graph("outer").add_step(inner, "a", sub_budget=Budget(max_steps=10)).add_step(Flaky("b", 0), "b")
    with ExecutionContext(budget=Budget(max_steps=4)) as ctx:
        await outer.execute(ctx)
        assert ctx.balance.steps == 4


@pytest.mark.requirement("P-B4")
async def test_nested_graphs_share_the_pool() -> None:
    inner = Graph("inner").add_step(Flaky("x", 0), "x").add_step(Flaky("y", 0), "y")
    outer = Graph("outer").add_step(Flaky("b", 0), "first").add_step(inner, "a").add_step(inner, "b")
    with pytest.raises(BudgetExceededError) as raised:
        await outer.execute(ExecutionContext(budget=Budget(max_steps=5)))
    assert raised.value.partial == {"first": "done", "a": {"x": "done", "y": "done"}}


@pytest.mark.requirement("P-B4")
def test_the_time_of_a_sub_budget_ends_its_step_and_leaves_the_others_alone() -> None:
    async def main() -> None:
        async def takes_three(ctx: ExecutionContext) -> str:
            await asyncio.sleep(3)
            return "done"

        graph = Graph("g", max_parallel=2, settle="collect")
        graph.add_step(FunctionNode("f", forever), "a", sub_budget=Budget(max_time_seconds=1))
        graph.add_step(FunctionNode("t", takes_three), "b")
        with ExecutionContext(clock=sim_loop().clock) as ctx:
            results = await graph.execute(ctx)
        assert results == {"b": "done"}
        assert isinstance(results.errors["a"], BudgetExceededError)
        assert sim_loop().time() == 3

    simulated(main)


@pytest.mark.requirement("P-B4", "P-E4")
async def test_a_steps_own_budget_ends_the_step_and_in_a_graph_that_collects_no_other() -> None:
    graph = Graph("g", settle="collect")
    graph.add_step(
        FunctionNode("s", lambda ctx: ctx.atool(lambda: 1)),
        "a",
        sub_budget=Budget(max_steps=1),
        error_policy=ErrorPolicy("skip", fallback_value="x"),
    )
    graph.add_step(Flaky("b", 0), "b")
    results = await graph.execute(ExecutionContext())
    assert results == {"b": "done"}
    assert isinstance(results.errors["a"], BudgetExceededError)


def graph_of(steps: int, name: str = "inner") -> Graph:
    """A graph of so many plain steps."""
    made = Graph(name)
    for at in range(steps):
        made.add_step(Flaky(f"n{at}", 0), f"s{at}")
    return made


@pytest.mark.requirement("P-B8")
async def test_a_sub_budget_of_one_step_runs_a_graph_of_one_step() -> None:
    outer = Graph("outer").add_step(graph_of(1), "a", sub_budget=Budget(max_steps=1))
    with ExecutionContext() as ctx:
        assert await outer.execute(ctx) == {"a": {"s0": "done"}}
        assert ctx.usage.steps_executed == 2  # the step and the one inside it


@pytest.mark.requirement("P-B8")
@pytest.mark.parametrize("limit", [0, 1, 2])
async def test_a_graph_under_a_sub_budget_is_refused_where_it_is_refused_under_that_budget(limit: int) -> None:
    nested = Graph("outer").add_step(graph_of(3), "a", sub_budget=Budget(max_steps=limit))
    with pytest.raises(BudgetExceededError) as under_sub_budget:
        await nested.execute()
    with pytest.raises(BudgetExceededError) as under_budget:
        await graph_of(3).execute(ExecutionContext(name="a", budget=Budget(max_steps=limit)))
    assert under_sub_budget.value.reason == under_budget.value.reason
    assert under_sub_budget.value.budget == under_budget.value.budget == Budget(max_steps=limit)


@pytest.mark.requirement("P-B8")
async def test_a_graph_in_a_graph_counts_its_own_step_and_those_inside_it() -> None:
    middle = Graph("middle").add_step(graph_of(1), "deep", sub_budget=Budget(max_steps=1))
    for limit, runs in ((1, False), (2, True)):
        with ExecutionContext() as ctx:
            execution = Graph("outer").add_step(middle, "a", sub_budget=Budget(max_steps=limit)).execute(ctx)
            if runs:
                assert await execution == {"a": {"deep": {"s0": "done"}}}
                assert ctx.usage.steps_executed == 3
            else:
                with pytest.raises(BudgetExceededError) as raised:
                    await execution
                assert (raised.value.owner, raised.value.budget) == ("a", Budget(max_steps=limit))


@pytest.mark.requirement("P-B8")
async def test_a_fallback_that_is_a_graph_has_the_steps_of_the_sub_budget_to_itself() -> None:
    policy = ErrorPolicy("fallback", fallback_node=graph_of(1))
    assert await one_step(Flaky("f", 9), policy, sub_budget=Budget(max_steps=1)).execute() == {"a": {"s0": "done"}}
    policy = ErrorPolicy("fallback", fallback_node=graph_of(2))
    with pytest.raises(BudgetExceededError):
        await one_step(Flaky("f", 9), policy, sub_budget=Budget(max_steps=1)).execute()


@pytest.mark.requirement("P-B8")
async def test_a_graph_of_the_session_runs_under_a_sub_budget_of_as_many_steps() -> None:
    session = Session("s")
    session.register(graph_of(1))
    graph = Graph("outer").add_step_ref("inner", "a", sub_budget=Budget(max_steps=1))
    assert await graph.execute(ExecutionContext(session=session)) == {"a": {"s0": "done"}}


# Nodes that block.


@pytest.mark.requirement("P-E1", "P-C2")
async def test_a_blocking_node_that_takes_too_long_is_left_behind_and_its_step_skipped() -> None:
    release = Event()
    policy = ErrorPolicy("skip", timeout_ms=200, fallback_value="x")
    node = FunctionNode("b", lambda ctx: release.wait(30), blocking=True)
    try:
        with ExecutionContext() as ctx:
            assert await one_step(node, policy).execute(ctx) == {"a": "x"}
            (left,) = [call for call in ctx.graph.calls()[1] if call.name == "a" and call.status != "success"]
            assert left.abandoned
    finally:
        release.set()


@pytest.mark.requirement("P-E1", "P-E2")
async def test_timeouts_of_a_blocking_node_draw_on_the_retry_budget() -> None:
    release = Event()
    policy = ErrorPolicy("retry", retry_count=8, timeout_ms=50, **AT_ONCE)
    node = FunctionNode("b", lambda ctx: release.wait(30), blocking=True)
    ctx = ExecutionContext(ExecutionConfig(max_cost_usd=None, max_steps=None, max_retries_total=2))
    try:
        with pytest.raises(Halted) as raised:
            await one_step(node, policy).execute(ctx)
    finally:
        release.set()
    assert raised.value.stop.reason is StopReason.TIMEOUT
    attempts = [call for call in ctx.graph.calls()[1] if call.name == "a"]
    assert (len(attempts), ctx.balance.retries) == (3, 2), "two attempts are retried, the third ends the step"


@pytest.mark.requirement("P-E1")
async def test_an_attempt_whose_time_is_over_before_it_begins_is_a_failure_of_the_step() -> None:
    class Jumping:
        """A clock that advances by a millisecond each time it is read."""

        now_ns = 0

        def monotonic_ns(self) -> int:
            self.now_ns += 1_000_000
            return self.now_ns

        def time_ns(self) -> int:
            return self.now_ns

    policy = ErrorPolicy("skip", timeout_ms=1, fallback_value="x")
    ctx = ExecutionContext(clock=Jumping())
    assert await one_step(FunctionNode("n", lambda ctx: "never"), policy).execute(ctx) == {"a": "x"}


@pytest.mark.requirement("P-E4", "P-C2")
async def test_a_cancel_frees_the_graph_from_a_blocking_node_at_once() -> None:
    release, started = Event(), Event()
    token = CancellationToken()

    def blocks(ctx: ExecutionContext) -> str:
        started.set()
        release.wait(30)
        return "late"

    policy = ErrorPolicy("skip", fallback_value="x")
    ctx = ExecutionContext(cancellation=token)
    task = asyncio.create_task(one_step(FunctionNode("b", blocks, blocking=True), policy).execute(ctx))
    try:
        await until(started.is_set)
        token.cancel("enough")
        with pytest.raises(CancelledError) as raised:
            await task
        assert raised.value.reason == "enough"
        assert not release.is_set()
    finally:
        release.set()


@pytest.mark.requirement("P-E4")
async def test_a_blocking_node_sees_the_cancel_when_it_asks() -> None:
    started = Event()
    seen: list[str] = []
    token = CancellationToken()

    def asks(ctx: ExecutionContext) -> None:
        started.set()
        try:
            for _ in range(10_000):
                ctx.check_cancelled()
                Event().wait(0.001)
        except CancelledError as error:
            seen.append(error.reason)
            raise

    task = asyncio.create_task(
        one_step(FunctionNode("b", asks, blocking=True)).execute(ExecutionContext(cancellation=token))
    )
    await until(started.is_set)
    token.cancel("enough")
    with pytest.raises(CancelledError):
        await task
    await until(lambda: bool(seen))
    assert seen == ["enough"]


@pytest.mark.requirement("P-E2")
async def test_http_errors_keep_their_type_through_a_graph() -> None:
    provider = FakeProvider([RefuseFree(400)])

    async def ask(ctx: ExecutionContext) -> Any:
        return await ctx.allm(provider.acomplete)

    with contain(prices=provider.prices) as run, pytest.raises(ProviderHTTPError):
        await one_step(FunctionNode("ask", ask)).execute(run)
