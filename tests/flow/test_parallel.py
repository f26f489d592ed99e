"""Steps that run at the same time: how many, from when, and what a failure does to the others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock import (
    Budget,
    BudgetExceededError,
    CancellationToken,
    CancelledError,
    ErrorPolicy,
    ExecutionContext,
    FunctionNode,
    Graph,
    quorum,
)
from penstock.testing import check_history, explore, sim_run
from tests.flow.steps import Boom, sim_loop, simulated, takes

SCHEDULES = 100


def fails_after(seconds: float, error: BaseException | None = None) -> FunctionNode:
    async def wait(ctx: ExecutionContext) -> Any:
        await asyncio.sleep(seconds)
        raise error or Boom(f"after {seconds}")

    return FunctionNode(f"fails after {seconds}", wait)


class Gauge:
    """Counts how many of its nodes run at once."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0
        self.ran = 0

    def node(self, seconds: float = 1.0) -> FunctionNode:
        async def run(ctx: ExecutionContext) -> int:
            self.now += 1
            self.most = max(self.most, self.now)
            try:
                await asyncio.sleep(seconds)
            finally:
                self.now -= 1
            self.ran += 1
            return self.ran

        return FunctionNode("gauge", run)


# How many at once.


@pytest.mark.requirement("P-P1")
@pytest.mark.parametrize(("cap", "seconds"), [(1, 12), (2, 6), (5, 3), (12, 1), (100, 1)])
def test_as_many_steps_run_at_once_as_are_allowed(cap: int, seconds: float) -> None:
    async def main() -> None:
        gauge, graph = Gauge(), Graph("g", max_parallel=cap)
        for at in range(12):
            graph.add_step(gauge.node(), f"s{at}")
        await graph.execute()
        assert gauge.most == min(cap, 12)
        assert sim_loop().time() == seconds

    simulated(main)


def nest(gauge: Gauge, depth: int, width: int, cap: int) -> Graph:
    graph = Graph(f"level {depth}", max_parallel=cap)
    for at in range(width):
        graph.add_step(gauge.node() if depth == 0 else nest(gauge, depth - 1, width, cap), f"s{at}")
    return graph


@pytest.mark.requirement("P-P1")
@pytest.mark.parametrize("cap", [1, 2, 3, 7])
def test_the_cap_is_one_over_the_whole_nest(cap: int) -> None:
    async def schedule(seed: int) -> None:
        gauge = Gauge()
        outer = Graph("outer", max_parallel=cap)
        for at in range(3):
            outer.add_step(nest(gauge, 1, 3, cap=10), f"nested{at}").add_step(gauge.node(), f"own{at}")
        await outer.execute()
        assert gauge.ran == 3 * 9 + 3
        assert gauge.most <= cap

    explore(schedule, schedules=SCHEDULES)


@pytest.mark.requirement("P-P1")
def test_the_whole_cap_is_used_by_whatever_part_of_the_nest_has_work() -> None:
    async def main() -> None:
        gauge = Gauge()
        inner = Graph("inner", max_parallel=10)
        for at in range(8):
            inner.add_step(gauge.node(), f"s{at}")
        outer = Graph("outer", max_parallel=4).add_step(inner, "inner")
        await outer.execute()
        assert gauge.most == 4
        assert sim_loop().time() == 2

    simulated(main)


@pytest.mark.requirement("P-P1")
def test_slots_that_become_free_go_to_the_graph_that_still_has_work() -> None:
    async def main() -> None:
        gauge = Gauge()
        wide = Graph("wide", max_parallel=10)
        for at in range(9):
            wide.add_step(gauge.node(), f"s{at}")
        outer = Graph("outer", max_parallel=3).add_step(gauge.node(), "a").add_step(gauge.node(), "b")
        await outer.add_step(wide, "wide").execute()
        assert gauge.most == 3
        assert gauge.ran == 11
        assert sim_loop().time() == 4, "eleven seconds of work, three at a time"

    simulated(main)


@pytest.mark.requirement("P-P1")
def test_a_graph_inside_may_allow_itself_less() -> None:
    async def main() -> None:
        gauge, inner = Gauge(), Graph("inner", max_parallel=2)
        for at in range(6):
            inner.add_step(gauge.node(), f"s{at}")
        await Graph("outer", max_parallel=10).add_step(inner, "inner").execute()
        assert gauge.most == 2

    simulated(main)


@pytest.mark.requirement("P-P1")
def test_three_levels_of_nesting_under_a_cap_of_one_never_wait_for_each_other() -> None:
    async def schedule(seed: int) -> None:
        gauge = Gauge()
        await nest(gauge, 3, 2, cap=1).execute()
        assert (gauge.ran, gauge.most) == (16, 1)

    explore(schedule, schedules=SCHEDULES)


@pytest.mark.requirement("P-P1")
def test_two_graphs_that_run_beside_each_other_have_a_cap_each() -> None:
    async def main() -> None:
        gauge = Gauge()
        graphs = [Graph(f"g{at}", max_parallel=2) for at in range(2)]
        for graph in graphs:
            for at in range(4):
                graph.add_step(gauge.node(), f"s{at}")
        await asyncio.gather(*(graph.execute() for graph in graphs))
        assert gauge.most == 4

    simulated(main)


# From when.


@pytest.mark.requirement("P-P1")
def test_a_step_starts_when_its_own_inputs_are_ready_whatever_a_slow_sibling_does() -> None:
    async def main() -> None:
        started: dict[str, float] = {}

        def noting(id: str, seconds: float) -> FunctionNode:
            async def run(ctx: ExecutionContext) -> None:
                started[id] = sim_loop().time()
                await asyncio.sleep(seconds)

            return FunctionNode(id, run)

        graph = Graph("g", max_parallel=10)
        graph.add_step(noting("slow", 100), "slow").add_step(noting("quick", 1), "quick")
        graph.add_step(noting("next", 1), "next", depends_on=["quick"])
        graph.add_step(noting("last", 1), "last", depends_on=["next"])
        graph.add_step(noting("join", 1), "join", depends_on=["last", "slow"])
        await graph.execute()
        assert started == {"slow": 0, "quick": 0, "next": 1, "last": 2, "join": 100}

    simulated(main)


@pytest.mark.requirement("P-P1")
def test_steps_that_are_ready_together_start_in_the_order_they_were_added() -> None:
    async def schedule(seed: int) -> None:
        started: list[int] = []
        graph = Graph("g", max_parallel=2)
        for at in range(8):
            graph.add_step(FunctionNode("n", lambda ctx: started.append(ctx.input) or asyncio.sleep(1)), f"s{at}", at)
        await graph.execute()
        assert started == list(range(8))

    explore(schedule, schedules=20)


@pytest.mark.requirement("P-P1")
def test_results_do_not_depend_on_the_interleaving() -> None:
    async def schedule(seed: int) -> dict[str, Any]:
        graph = Graph("g", max_parallel=4)
        for row in range(4):
            for column in range(4):
                before = [f"{row - 1}{other}" for other in (column, (column + 1) % 4)] if row else None
                graph.add_step(FunctionNode("sum", add_up), f"{row}{column}", depends_on=before)
        with ExecutionContext(input=1, clock=sim_loop().clock) as ctx:
            results = await graph.execute(ctx)
        assert check_history(ctx.history(), ledger=ctx.balance) == []
        assert list(results) == graph.list_steps()
        return results

    async def add_up(ctx: ExecutionContext) -> int:
        for _ in range(3):
            await asyncio.sleep(0)
        return sum(ctx.input.values()) if isinstance(ctx.input, dict) else ctx.input

    outcomes = explore(schedule, schedules=SCHEDULES)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert outcomes[0]["30"] == 8


@pytest.mark.requirement("P-P1", "P-B4")
def test_parallel_steps_under_a_step_limit_are_exactly_as_many_as_it_allows() -> None:
    async def schedule(seed: int) -> None:
        gauge, graph = Gauge(), Graph("g", max_parallel=20)
        for at in range(20):
            graph.add_step(gauge.node(), f"s{at}")
        ctx = ExecutionContext(budget=Budget(max_steps=1), clock=sim_loop().clock)
        with pytest.raises(BudgetExceededError):
            await graph.execute(ctx)
        assert (gauge.most, gauge.now) == (1, 0)

    explore(schedule, schedules=SCHEDULES)


# When one fails.


@pytest.mark.requirement("P-P3")
def test_fail_fast_stops_the_siblings_and_waits_until_they_have_ended() -> None:
    async def schedule(seed: int) -> None:
        ended: list[str] = []

        async def tidies_up(ctx: ExecutionContext) -> None:
            try:
                await asyncio.sleep(1000)
            finally:
                await asyncio.sleep(5)
                ended.append("tidy")

        graph = Graph("g", max_parallel=3).add_step(takes(0.5, "early"), "early").add_step(fails_after(1), "bad")
        graph.add_step(FunctionNode("tidy", tidies_up), "tidy").add_step(takes(1), "never", depends_on=["tidy"])
        ctx = ExecutionContext(clock=sim_loop().clock)
        with pytest.raises(Boom) as raised:
            await graph.execute(ctx)
        assert raised.value.__notes__[0] == "in step 'bad' of graph 'g'"
        assert ended == ["tidy"]
        assert sim_loop().time() == pytest.approx(6)
        status = {call.name: call.status for call in ctx.graph.calls()[1] if call.parent is not None}
        assert status == {"early": "success", "bad": "fail", "tidy": "halt"}
        ctx.end()
        assert check_history(ctx.history(), ledger=ctx.balance) == []

    explore(schedule, schedules=SCHEDULES)


@pytest.mark.requirement("P-P3")
def test_two_that_fail_at_one_instant_raise_one_error_and_leave_nothing() -> None:
    async def schedule(seed: int) -> str:
        graph = Graph("g", max_parallel=3).add_step(fails_after(1, Boom("a")), "a")
        graph.add_step(fails_after(1, Boom("b")), "b").add_step(takes(100), "c")
        with pytest.raises(Boom) as raised:
            await graph.execute(ExecutionContext(clock=sim_loop().clock))
        return str(raised.value)

    assert set(explore(schedule, schedules=SCHEDULES)) == {"a", "b"}


@pytest.mark.requirement("P-P3")
def test_collect_runs_whatever_does_not_hang_on_the_failure() -> None:
    async def main() -> None:
        graph = Graph("g", max_parallel=3, settle="collect")
        graph.add_step(fails_after(1), "bad").add_step(takes(2, "b"), "b").add_step(
            takes(1, "c"), "c", depends_on=["b"]
        )
        graph.add_step(takes(1), "lost", depends_on=["bad", "b"]).add_step(takes(1), "lost too", depends_on=["lost"])
        results = await graph.execute()
        assert results == {"b": "b", "c": "c"}
        assert list(results.errors) == ["bad"]
        assert isinstance(results.errors["bad"], Boom)
        assert sorted(results.skipped) == ["lost", "lost too"]

    simulated(main)


@pytest.mark.requirement("P-P3")
def test_collect_keeps_every_error() -> None:
    async def main() -> None:
        graph = Graph("g", max_parallel=3, settle="collect")
        for at in range(3):
            graph.add_step(fails_after(at, Boom(at)), f"s{at}")
        results = await graph.execute()
        assert results == {}
        assert {step: str(error) for step, error in results.errors.items()} == {"s0": "0", "s1": "1", "s2": "2"}

    simulated(main)


@pytest.mark.requirement("P-P3")
def test_the_first_of_the_last_steps_to_succeed_wins_and_the_others_are_cancelled() -> None:
    async def schedule(seed: int) -> None:
        graph = Graph("g", max_parallel=4, settle="first").add_step(takes(1), "start")
        graph.add_step(takes(9), "slow", depends_on=["start"]).add_step(fails_after(1), "bad", depends_on=["start"])
        graph.add_step(takes(2, "won"), "quick", depends_on=["start"])
        ctx = ExecutionContext(clock=sim_loop().clock)
        results = await graph.execute(ctx)
        assert results == {"start": "done", "quick": "won"}
        assert list(results.errors) == ["bad"]
        assert sim_loop().time() == 3
        status = {call.name: call.status for call in ctx.graph.calls()[1] if call.parent is not None}
        assert status["slow"] == "halt"

    explore(schedule, schedules=20)


@pytest.mark.requirement("P-P3")
@pytest.mark.parametrize("settle", [quorum(2), "quorum(2)"])
def test_a_quorum_is_so_many_of_the_last_steps(settle: Any) -> None:
    async def main() -> None:
        graph = Graph("g", max_parallel=4, settle=settle)
        for at in range(4):
            graph.add_step(takes(at, at), f"s{at}")
        assert await graph.execute() == {"s0": 0, "s1": 1}
        assert sim_loop().time() == 1

    simulated(main)


@pytest.mark.requirement("P-P3")
def test_a_quorum_that_can_no_longer_be_reached_ends_at_once_with_all_errors() -> None:
    async def main() -> None:
        graph = Graph("g", max_parallel=4, settle=quorum(3))
        graph.add_step(takes(100), "a").add_step(takes(100), "b")
        graph.add_step(fails_after(1, Boom("c")), "c").add_step(fails_after(2, Boom("d")), "d")
        with pytest.raises(ExceptionGroup) as raised:
            await graph.execute()
        assert sorted(str(error) for error in raised.value.exceptions) == ["c", "d"]
        assert "'g'" in raised.value.message
        assert sim_loop().time() == 2

    simulated(main)


@pytest.mark.requirement("P-P3")
def test_a_quorum_lost_through_one_error_raises_that_error() -> None:
    async def main() -> None:
        graph = Graph("g", max_parallel=4, settle=quorum(2))
        graph.add_step(takes(100), "a").add_step(fails_after(1), "b")
        with pytest.raises(Boom) as raised:
            await graph.execute()
        assert "'b'" in raised.value.__notes__[0]

    simulated(main)


@pytest.mark.requirement("P-P3")
def test_a_quorum_is_lost_when_a_step_before_the_last_ones_fails() -> None:
    async def main() -> None:
        graph = Graph("g", max_parallel=4, settle="first").add_step(fails_after(1), "start")
        graph.add_step(takes(1), "a", depends_on=["start"]).add_step(takes(1), "b", depends_on=["start"])
        with pytest.raises(Boom):
            await graph.execute()

    simulated(main)


@pytest.mark.requirement("P-P3")
def test_a_skip_or_a_fallback_counts_as_a_success_for_a_quorum() -> None:
    async def main() -> None:
        graph = Graph("g", max_parallel=4, settle="first").add_step(takes(100), "a")
        graph.add_step(fails_after(1), "b", error_policy=ErrorPolicy("skip", fallback_value="instead"))
        assert await graph.execute() == {"b": "instead"}

    simulated(main)


@pytest.mark.requirement("P-P3")
def test_each_graph_of_a_nest_has_a_settle_policy_of_its_own() -> None:
    async def main() -> None:
        inner = Graph("inner", max_parallel=4, settle="collect").add_step(fails_after(1), "x").add_step(takes(2), "y")
        race = Graph("race", max_parallel=4, settle="first").add_step(takes(5), "p").add_step(takes(1), "q")
        outer = Graph("outer", max_parallel=8).add_step(inner, "inner").add_step(race, "race")
        results = await outer.execute()
        assert results == {"inner": {"y": "done"}, "race": {"q": "done"}}
        assert list(results["inner"].errors) == ["x"]

    simulated(main)


@pytest.mark.requirement("P-P3")
def test_a_failure_deep_inside_stops_the_whole_nest() -> None:
    async def schedule(seed: int) -> None:
        gauge = Gauge()
        inner = Graph("inner", max_parallel=4).add_step(gauge.node(100), "w").add_step(fails_after(1), "bad")
        middle = Graph("middle", max_parallel=4).add_step(inner, "i").add_step(gauge.node(100), "w")
        outer = Graph("outer", max_parallel=8).add_step(middle, "m").add_step(gauge.node(100), "w")
        with pytest.raises(Boom) as raised:
            await outer.execute()
        assert [note for note in raised.value.__notes__ if note.startswith("in step")] == [
            "in step 'bad' of graph 'inner'",
            "in step 'i' of graph 'middle'",
            "in step 'm' of graph 'outer'",
        ]
        assert gauge.now == 0
        assert sim_loop().time() == 1

    explore(schedule, schedules=SCHEDULES)


@pytest.mark.requirement("P-P3")
def test_a_sibling_that_gives_its_value_after_the_stop_changes_nothing() -> None:
    async def schedule(seed: int) -> None:
        async def stubborn(ctx: ExecutionContext) -> str:
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                await asyncio.sleep(1)
            return "all the same"

        graph = Graph("g", max_parallel=3).add_step(FunctionNode("s", stubborn), "s").add_step(fails_after(1), "bad")
        graph.add_step(takes(1), "never", depends_on=["s"])
        ctx = ExecutionContext(clock=sim_loop().clock)
        with pytest.raises(Boom):
            await graph.execute(ctx)
        assert {call.name for call in ctx.graph.calls()[1]} == {"main", "s", "bad"}

    explore(schedule, schedules=20)


# Cancels from outside.


@pytest.mark.requirement("P-P3", "P-C2")
def test_a_cancel_reaches_every_nested_step_and_carries_partial_results() -> None:
    async def schedule(seed: int) -> None:
        gauge, loop = Gauge(), sim_loop()
        inner = Graph("inner", max_parallel=4).add_step(takes(1, "x"), "x").add_step(gauge.node(100), "w")
        outer = Graph("outer", max_parallel=8).add_step(takes(0.5, "a"), "a").add_step(inner, "i")
        outer.add_step(gauge.node(100), "w")
        token = CancellationToken(clock=loop.clock)
        ctx = ExecutionContext(cancellation=token, clock=loop.clock)
        loop.call_later(3, token.cancel, "enough")
        with pytest.raises(CancelledError) as raised:
            await outer.execute(ctx)
        assert loop.time() == 3
        assert gauge.now == 0
        assert raised.value.reason == "enough"
        assert raised.value.partial["a"] == "a"
        ctx.end(raised.value)
        assert check_history(ctx.history(), ledger=ctx.balance) == []

    explore(schedule, schedules=SCHEDULES)


@pytest.mark.requirement("P-P3", "P-C2")
def test_a_task_that_is_cancelled_again_and_again_still_waits_for_its_steps() -> None:
    async def schedule(seed: int) -> None:
        ended: list[str] = []

        async def tidies_up(ctx: ExecutionContext) -> None:
            try:
                await asyncio.sleep(1000)
            finally:
                await asyncio.sleep(5)
                ended.append("tidy")

        graph = Graph("g", max_parallel=4)
        for at in range(3):
            graph.add_step(FunctionNode("t", tidies_up), f"s{at}")
        task = asyncio.create_task(graph.execute())
        for _ in range(3):
            await asyncio.sleep(1)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(ended) >= 2, "the one whose task was cancelled again may be interrupted in its tidying up"
        assert len(asyncio.all_tasks()) == 1

    explore(schedule, schedules=SCHEDULES)


@pytest.mark.requirement("P-P3", "P-C2")
def test_an_abort_from_inside_a_step_stops_the_others_whatever_the_policy_of_that_step() -> None:
    async def schedule(seed: int) -> None:
        async def aborts(ctx: ExecutionContext) -> None:
            await asyncio.sleep(1)
            ctx.abort("that is enough")

        options: dict[str, Any] = [
            {},
            {"error_policy": ErrorPolicy("skip", timeout_ms=60_000)},
            {"sub_budget": Budget(max_steps=5)},
            {"sub_budget": Budget(max_steps=5), "error_policy": ErrorPolicy("skip", timeout_ms=60_000)},
        ][seed % 4]
        gauge = Gauge()
        graph = Graph("g", max_parallel=3, settle="collect").add_step(gauge.node(100), "a")
        graph.add_step(FunctionNode("aborts", aborts), "b", **options).add_step(gauge.node(100), "c")
        with pytest.raises(CancelledError) as raised:
            await graph.execute(ExecutionContext(clock=sim_loop().clock))
        assert raised.value.reason == "that is enough"
        assert gauge.now == 0
        assert sim_loop().time() == 1
        assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]

    explore(schedule, schedules=SCHEDULES)


@pytest.mark.requirement("P-P3")
def test_a_deadline_of_the_run_ends_a_parallel_graph_with_what_was_there() -> None:
    async def schedule(seed: int) -> None:
        graph = Graph("g", max_parallel=3).add_step(takes(1, "a"), "a").add_step(takes(100), "b")
        graph.add_step(takes(100), "c", depends_on=["a"])
        ctx = ExecutionContext(budget=Budget(max_time_seconds=10), clock=sim_loop().clock)
        with pytest.raises(BudgetExceededError) as raised:
            await graph.execute(ctx)
        assert raised.value.partial == {"a": "a"}
        assert sim_loop().time() == pytest.approx(10)

    explore(schedule, schedules=20)


@pytest.mark.requirement("P-P3")
def test_whatever_happens_every_step_that_began_has_one_end_and_no_task_is_left() -> None:
    async def schedule(seed: int) -> None:
        loop = sim_loop()
        settle = ["fail_fast", "collect", "first", quorum(2)][seed % 4]
        graph = Graph("g", max_parallel=1 + seed % 5, settle=settle)
        for at in range(8):
            fate = fails_after(at % 3, Boom()) if (seed >> at) % 3 == 0 else takes(at % 4)
            before = [f"s{at - 3}"] if at > 3 else None
            policy = [None, ErrorPolicy("skip"), ErrorPolicy("retry", retry_count=1, timeout_ms=2_000)][at % 3]
            graph.add_step(fate, f"s{at}", depends_on=before, error_policy=policy)
        token = CancellationToken(clock=loop.clock)
        if seed % 3 == 0:
            loop.call_later(seed % 7, token.cancel)
        ctx = ExecutionContext(cancellation=token, clock=loop.clock)
        try:
            await graph.execute(ctx)
        except (Boom, ExceptionGroup, CancelledError, TimeoutError) as error:
            ctx.end(error)
        else:
            ctx.end()
        assert check_history(ctx.history(), ledger=ctx.balance) == []
        assert ctx.balance.steps_open == 0
        assert len(asyncio.all_tasks()) == 1

    explore(schedule, schedules=400)


def test_where_everything_is_collected_a_budget_that_is_used_up_lets_what_runs_come_to_its_end() -> None:
    async def main() -> tuple[dict[str, Any], float]:
        async def costs(ctx: ExecutionContext) -> str:
            await ctx.atool(lambda: asyncio.sleep(1), cost_hint_usd=0.25)
            return "paid for"

        graph = Graph("g", max_parallel=8, settle="collect")
        for number in range(8):
            graph.add_step(FunctionNode("n", costs), f"s{number}")
        run = ExecutionContext(budget=Budget(max_cost_dollars=1.00))
        with pytest.raises(BudgetExceededError) as stopped:
            await graph.execute(run)
        return dict(stopped.value.partial), run.balance.spent_usd

    partial, spent_usd = sim_run(main, seed=3)
    assert list(partial.values()) == ["paid for"] * 4
    assert spent_usd == 1.00
