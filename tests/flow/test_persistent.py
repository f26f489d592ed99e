"""Nodes with state of their own: one step uses them at a time, over all graphs, and no step waits forever."""

from __future__ import annotations

import asyncio
from threading import Event
from typing import Any

import pytest

from penstock import (
    CancellationToken,
    CancelledError,
    DeadlockError,
    ErrorPolicy,
    ExecutionContext,
    FunctionNode,
    Graph,
    GraphInvalid,
    Session,
)
from penstock.testing import explore
from tests.flow.steps import sim_loop, simulated

pytestmark = pytest.mark.requirement("P-P2")


class Terminal:
    """A persistent node that notices when two use it at once."""

    persistent = True

    def __init__(self, id: str, seconds: float = 1.0) -> None:
        self.id = id
        self.seconds = seconds
        self.user: object = None
        self.turns = 0

    async def execute(self, context: ExecutionContext) -> int:
        assert self.user is None, f"{self.id} is in use"
        self.user = context
        await asyncio.sleep(self.seconds)
        self.user = None
        self.turns += 1
        return self.turns


# What is refused beforehand.


@pytest.mark.requirement("P-G1")
async def test_two_parallel_steps_on_one_persistent_node_are_a_problem_that_names_them() -> None:
    terminal = Terminal("t")
    graph = Graph("g", max_parallel=2).add_step(terminal, "a").add_step(terminal, "b")
    (problem,) = graph.validate()
    assert "'a'" in problem
    assert "'b'" in problem
    assert "'t'" in problem
    assert "dependency" in problem
    with pytest.raises(GraphInvalid):
        await graph.execute()
    assert terminal.turns == 0


@pytest.mark.parametrize(
    ("options", "arrows"),
    [
        ({"max_parallel": 1}, []),
        ({"max_parallel": 2, "queue_persistent": True}, []),
        ({"max_parallel": 2}, [("a", "b")]),
        ({"max_parallel": 2}, [("a", "between"), ("between", "b")]),
    ],
)
def test_steps_that_cannot_meet_or_may_queue_are_no_problem(
    options: dict[str, Any], arrows: list[tuple[str, str]]
) -> None:
    terminal = Terminal("t")
    graph = Graph("g", **options).add_step(terminal, "a").add_step(terminal, "b")
    graph.add_step(FunctionNode("f", lambda ctx: 1), "between")
    for before, after in arrows:
        graph.chain(before, after)
    assert graph.validate() == []


def test_parallel_steps_on_different_persistent_nodes_are_no_problem_whatever_they_are_called() -> None:
    graph = Graph("g", max_parallel=2).add_step(Terminal("t"), "a").add_step(Terminal("t"), "b")
    assert graph.validate() == []


def test_parallel_steps_on_a_node_without_state_are_no_problem() -> None:
    node = FunctionNode("f", lambda ctx: 1)
    assert Graph("g", max_parallel=2).add_step(node, "a").add_step(node, "b").validate() == []


def test_parallel_steps_that_refer_to_a_node_without_state_are_no_problem() -> None:
    session = Session()
    session.register(FunctionNode("f", lambda ctx: 1))
    graph = Graph("g", session, max_parallel=2).add_step_ref("f", "a").add_step_ref("f", "b")
    assert graph.validate() == []


async def test_parallel_steps_that_refer_to_a_persistent_node_are_a_problem() -> None:
    session = Session()
    terminal = Terminal("t")
    session.register(terminal)
    graph = Graph("g", session, max_parallel=2).add_step_ref("t", "a").add_step(terminal, "b")
    assert len(graph.validate()) == 1
    with pytest.raises(GraphInvalid, match="persistent"):
        await graph.execute()


def test_a_problem_of_a_nested_graph_is_found_from_outside() -> None:
    terminal = Terminal("t")
    inner = Graph("inner", max_parallel=2).add_step(terminal, "a").add_step(terminal, "b")
    (problem,) = Graph("outer").add_step(inner, "i").validate()
    assert "inner" in problem


# Taking turns.


def test_parallel_steps_that_may_queue_use_the_node_one_after_the_other() -> None:
    async def schedule(seed: int) -> None:
        terminal, graph = Terminal("t"), Graph("g", max_parallel=5, queue_persistent=True)
        for at in range(5):
            graph.add_step(terminal, f"s{at}")
        results = await graph.execute()
        assert sorted(results.values()) == [1, 2, 3, 4, 5]
        assert sim_loop().time() == 5

    explore(schedule, schedules=50)


def test_graphs_that_run_beside_each_other_share_the_turn() -> None:
    async def schedule(seed: int) -> None:
        terminal = Terminal("t")
        graphs = [Graph(f"g{at}").add_step(terminal, "a").add_step(terminal, "b") for at in range(4)]
        await asyncio.gather(*(graph.execute() for graph in graphs))
        assert terminal.turns == 8
        assert sim_loop().time() == 8

    explore(schedule, schedules=50)


def test_a_step_and_a_nested_graph_share_the_turn() -> None:
    async def schedule(seed: int) -> None:
        terminal = Terminal("t")
        inner = Graph("inner").add_step(terminal, "x")
        outer = Graph("outer", max_parallel=3, queue_persistent=True)
        await outer.add_step(terminal, "a").add_step(inner, "b").add_step(inner, "c").execute()
        assert terminal.turns == 3

    explore(schedule, schedules=50)


def test_a_function_node_may_be_persistent() -> None:
    async def main() -> None:
        terminal = Terminal("t")
        node = FunctionNode("f", terminal.execute, persistent=True)
        graph = Graph("g", max_parallel=2, queue_persistent=True).add_step(node, "a").add_step(node, "b")
        await graph.execute()
        assert terminal.turns == 2

    simulated(main)


def test_two_graphs_that_use_two_nodes_in_opposite_order_a_thousand_times_never_stop() -> None:
    async def schedule(seed: int) -> None:
        one, two = Terminal("one", 0.001), Terminal("two", 0.001)
        there = Graph("there", max_parallel=2, queue_persistent=True).add_step(one, "a").add_step(two, "b")
        back = Graph("back", max_parallel=2, queue_persistent=True).add_step(two, "a").add_step(one, "b")

        async def often(graph: Graph, chained: bool) -> None:
            if chained:
                graph.chain("a", "b")
            for _ in range(1_000):
                await graph.execute()

        chained = seed % 2 == 0
        await asyncio.gather(often(there, chained), often(back, chained))
        assert (one.turns, two.turns) == (2_000, 2_000)

    explore(schedule, schedules=2)


def test_between_two_attempts_others_have_their_turn() -> None:
    async def main() -> None:
        used: list[str] = []

        def use(ctx: ExecutionContext) -> None:
            used.append(ctx.input)
            if used.count("flaky") < 2 and ctx.input == "flaky":
                raise ConnectionError

        node = FunctionNode("t", use, persistent=True)
        policy = ErrorPolicy("retry", retry_count=1, retry_delay_ms=60_000)
        graph = Graph("g", max_parallel=2, queue_persistent=True)
        graph.add_step(node, "flaky", "flaky", error_policy=policy).add_step(node, "other", "other")
        await graph.execute()
        assert used == ["flaky", "other", "flaky"]

    simulated(main)


async def test_a_node_that_was_left_behind_on_its_thread_keeps_its_turn_until_it_is_done() -> None:
    release, inside, most = Event(), [0], [0]

    def use(ctx: ExecutionContext) -> str:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        if ctx.input == "hangs":
            release.wait(30)
        inside[0] -= 1
        return "used"

    node = FunctionNode("t", use, persistent=True, blocking=True)
    graph = Graph("g").add_step(node, "a", "hangs", error_policy=ErrorPolicy("skip", timeout_ms=200))
    graph.add_step(FunctionNode("go", lambda ctx: release.set()), "go", depends_on=["a"])
    graph.add_step(node, "b", "quick", depends_on=["a"])
    impatient = Graph("impatient", turn_timeout_s=0).add_step(node, "c", "quick")
    with ExecutionContext() as ctx:
        first = Graph("first").add_step(node, "a", "hangs", error_policy=ErrorPolicy("skip", timeout_ms=200))
        await first.execute(ctx)
        with pytest.raises(DeadlockError):
            await impatient.execute(ctx)
        release.set()
        assert (await Graph("then").add_step(node, "b", "quick").execute(ctx))["b"] == "used"
        release.clear()
        assert (await graph.execute(ctx))["b"] == "used"
    assert most == [1]


# Waiting too long, or in vain.


def test_a_wait_that_takes_too_long_is_a_deadlock_error_that_names_node_and_holder() -> None:
    async def main() -> None:
        terminal = Terminal("t", seconds=100)
        holding = asyncio.create_task(Graph("holding").add_step(terminal, "a").execute())
        await asyncio.sleep(1)
        graph = Graph("waiting", turn_timeout_s=5).add_step(terminal, "b")
        with pytest.raises(DeadlockError) as raised:
            await graph.execute()
        assert raised.value.node == "t"
        assert raised.value.waited_s == 5
        assert "step 'a' of graph 'holding'" in str(raised.value)
        assert sim_loop().time() == 6
        await holding
        assert await graph.execute() == {"b": 2}, "a wait that was given up leaves nothing behind"

    simulated(main)


def test_the_usual_patience_is_half_a_minute() -> None:
    async def main() -> None:
        terminal = Terminal("t", seconds=100)
        holding = asyncio.create_task(Graph("holding").add_step(terminal, "a").execute())
        await asyncio.sleep(1)
        with pytest.raises(DeadlockError):
            await Graph("waiting").add_step(terminal, "b").execute()
        assert sim_loop().time() == 31
        await holding

    simulated(main)


@pytest.mark.requirement("P-E1")
def test_a_wait_that_takes_too_long_is_a_failure_that_policies_recover_from() -> None:
    async def main() -> None:
        terminal = Terminal("t", seconds=9)
        holding = asyncio.create_task(Graph("holding").add_step(terminal, "a").execute())
        await asyncio.sleep(1)
        graph = Graph("waiting", max_parallel=2, turn_timeout_s=5, queue_persistent=True)
        retry = ErrorPolicy("retry", retry_count=1, retry_delay_ms=0)
        graph.add_step(terminal, "tries again", error_policy=retry)
        graph.add_step(terminal, "skips", error_policy=ErrorPolicy("skip", fallback_value="instead"))
        assert await graph.execute() == {"tries again": 2, "skips": "instead"}
        await holding

    simulated(main)


@pytest.mark.requirement("P-C2")
def test_a_cancel_ends_the_wait_for_a_turn_at_once() -> None:
    async def main() -> None:
        terminal, loop = Terminal("t", seconds=100), sim_loop()
        holding = asyncio.create_task(Graph("holding").add_step(terminal, "a").execute())
        token = CancellationToken(clock=loop.clock)
        loop.call_later(3, token.cancel, "enough")
        await asyncio.sleep(1)
        with pytest.raises(CancelledError) as raised:
            await Graph("waiting").add_step(terminal, "b").execute(ExecutionContext(cancellation=token))
        assert raised.value.reason == "enough"
        assert loop.time() == 3
        assert await holding == {"a": 1}

    simulated(main)


def test_a_failed_turn_is_given_back() -> None:
    async def main() -> None:
        def breaks(ctx: ExecutionContext) -> None:
            raise ConnectionError("broken")

        node = FunctionNode("t", breaks, persistent=True)
        for _ in range(3):
            with pytest.raises(ConnectionError):
                await Graph("g").add_step(node, "a").execute()

    simulated(main)


def test_a_node_that_runs_a_graph_which_needs_the_node_is_refused_at_once() -> None:
    async def main() -> None:
        inner = Graph("inner")

        async def reenter(ctx: ExecutionContext) -> Any:
            return await inner.execute(ctx)

        terminal = FunctionNode("t", reenter, persistent=True)
        inner.add_step(terminal, "again")
        with pytest.raises(DeadlockError) as raised:
            await Graph("outer").add_step(terminal, "first").execute()
        assert raised.value.waited_s is None
        assert sim_loop().time() == 0

    simulated(main)


def test_two_nodes_that_each_run_a_graph_with_the_other_are_refused_instead_of_waiting() -> None:
    async def schedule(seed: int) -> None:
        def holding(id: str, inside: Graph) -> FunctionNode:
            async def use(ctx: ExecutionContext) -> Any:
                await asyncio.sleep(1)
                return await inside.execute(ctx)

            return FunctionNode(id, use, persistent=True)

        wants_two, wants_one = Graph("wants two"), Graph("wants one")
        one, two = holding("one", wants_two), holding("two", wants_one)
        wants_two.add_step(two, "x")
        wants_one.add_step(one, "y")
        graph = Graph("g", max_parallel=2, settle="collect").add_step(one, "a").add_step(two, "b")
        results = await graph.execute()
        assert any(isinstance(error, DeadlockError) for error in results.errors.values())
        assert sim_loop().time() < 30

    explore(schedule, schedules=20)


def test_a_persistent_graph_is_one_turn_for_all_that_is_inside_it() -> None:
    async def main() -> None:
        inside: list[str] = []

        async def look(ctx: ExecutionContext) -> None:
            inside.append("in")
            await asyncio.sleep(1)
            inside.append("out")

        inner = Graph("inner").add_step(FunctionNode("look", look), "x")
        inner.persistent = True
        outer = Graph("outer", max_parallel=3, queue_persistent=True)
        await outer.add_step(inner, "a").add_step(inner, "b").add_step(inner, "c").execute()
        assert inside == ["in", "out"] * 3

    simulated(main)
