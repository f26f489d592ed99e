"""What executors may ask of the graph around them: nodes, edges, artifacts that are made once, a cache."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import types
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from penstock import ExecutionConfig, ExecutionContext, Halted, InvalidValue
from penstock.kernel.document import graph_to_json
from penstock.kernel.executor import ExecutorBroken, ExecutorRegistry
from penstock.kernel.graph import EdgeSpec, GraphInvalid, GraphSpec, NodeSpec
from penstock.kernel.links import LinkCycle
from penstock.runtime.graphs.graph_runtime import FlowContext, GraphRuntime
from penstock.testing import check_history, explore
from tests.kernel.graphs import Stub, flow, link
from tests.kernel.test_no_domain_words import words
from tests.soak import scaled


def graph(*edges: EdgeSpec, **types: str) -> GraphSpec:
    return GraphSpec(tuple(NodeSpec(name, type) for name, type in types.items()), edges)


def runtime(spec: GraphSpec, executors: Mapping[str, Any], context: ExecutionContext | None = None) -> GraphRuntime:
    services = {} if context is None else {"execution_context": context}
    return GraphRuntime(spec, run_id="r1", services=services, executors=executors)


class Part:
    """Makes an artifact named after its node and handle; asks for what is linked to it first."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.fails: list[Exception] = []

    async def materialize(self, data: Any, output_handle: str, context: FlowContext) -> Any:
        assert context.runtime is not None
        assert context.node_id is not None
        self.made.append(context.node_id)
        below = await context.runtime.resolve_links(context.node_id, "input")
        await self.gate.wait()
        if self.fails:
            raise self.fails.pop()
        return (context.node_id, output_handle, *below)


EDGES = (
    flow("a", "b"),
    link("c", "b", target_handle="parts"),
    link("d", "b", "other", "parts"),
    flow("a", "b", "no", "input"),
)


@pytest.mark.requirement("K-3")
def test_the_graph_around_a_node_can_be_inspected() -> None:
    around = runtime(graph(*EDGES, a="stub", b="stub", c="stub", d="stub"), {"stub": Stub()})
    assert around.get_node("a") == NodeSpec("a", "stub")
    assert around.incoming_edges("b") == list(EDGES)
    assert around.incoming_edges("b", "link") == [EDGES[1], EDGES[2]]
    assert around.incoming_edges("b", "flow", "input") == [EDGES[0], EDGES[3]]
    assert around.incoming_edges("b", target_handle="parts") == [EDGES[1], EDGES[2]]
    assert around.incoming_edges("a") == []
    assert around.outgoing_edges("a", "flow", "no") == [EDGES[3]]
    assert around.outgoing_edges("d", source_handle="output") == []


@pytest.mark.requirement("K-3")
@pytest.mark.parametrize("ask", ["get_node", "incoming_edges", "outgoing_edges"])
@pytest.mark.parametrize("name", ["z", None, ["a"]])
def test_a_node_that_is_not_there_is_named(ask: str, name: Any) -> None:
    around = runtime(graph(a="stub"), {"stub": Stub()})
    with pytest.raises(InvalidValue, match="the id of a node of graph 'graph'"):
        getattr(around, ask)(name)


@pytest.mark.requirement("K-3")
def test_the_cache_keeps_none_apart_from_nothing() -> None:
    around = runtime(graph(a="stub"), {"stub": Stub()})
    assert around.cache_get("k", 5) == 5
    around.cache_set("k", None)
    assert around.cache_get("k", 5) is None


def test_what_the_run_was_given_can_be_read_back() -> None:
    around = GraphRuntime(graph(), run_id="r", chat_id="c", state=[1], services={"x": 1}, executors={})
    assert (around.run_id, around.chat_id, around.state, around.services) == ("r", "c", [1], {"x": 1})
    assert GraphRuntime(graph(), run_id="r", executors={}).state == {}


@pytest.mark.requirement("K-2")
@pytest.mark.parametrize("data", [{}, {"channel": "data"}, {"channel": None}])
def test_a_graph_with_an_edge_that_does_not_say_its_channel_is_refused(data: Any) -> None:
    document = graph_to_json(graph(flow("a", "b"), a="stub", b="stub"))
    document["edges"][0]["data"] = data
    with pytest.raises(GraphInvalid) as caught:
        GraphRuntime(document, run_id="r", executors={"stub": Stub()})
    assert [problem.path for problem in caught.value.problems] == ["$.edges[0].data.channel"]


# Links.


@pytest.mark.requirement("K-3", "K-5")
async def test_links_are_resolved_in_the_order_of_the_edges() -> None:
    part = Part()
    with ExecutionContext() as run:
        around = runtime(graph(*EDGES, a="stub", b="stub", c="part", d="part"), {"stub": Stub(), "part": part}, run)
        assert await around.resolve_links("b", "parts") == [("c", "output"), ("d", "other")]
        assert await around.resolve_links("b", "input") == []
        assert await around.materialize_output("c", "output") == ("c", "output")
        assert await around.materialize_output("c", "other") == ("c", "other")
    assert part.made == ["c", "d", "c"]


@pytest.mark.requirement("K-5")
async def test_an_artifact_is_made_once_for_concurrent_consumers() -> None:
    part = Part()
    part.gate.clear()
    with ExecutionContext() as run:
        around = runtime(graph(a="part"), {"part": part}, run)
        asking = [asyncio.ensure_future(around.materialize_output("a", "x")) for _ in range(5)]
        await asyncio.sleep(0)
        part.gate.set()
        got = await asyncio.gather(*asking)
        assert all(one is got[0] for one in got)
    assert part.made == ["a"]


@pytest.mark.requirement("K-5")
async def test_none_is_an_artifact_and_sync_materialize_will_do() -> None:
    made = []

    class Nothing:
        def materialize(self, data: Any, output_handle: str, context: Any) -> None:
            made.append(output_handle)

    with ExecutionContext() as run:
        around = runtime(graph(a="nothing"), {"nothing": Nothing()}, run)
        assert [await around.materialize_output("a", "x") for _ in range(3)] == [None, None, None]
    assert made == ["x"]


@pytest.mark.requirement("K-5")
async def test_a_diamond_of_links_is_no_cycle() -> None:
    part = Part()
    links = (link("b", "a"), link("c", "a"), link("d", "b"), link("d", "c"))
    with ExecutionContext() as run:
        around = runtime(graph(*links, a="part", b="part", c="part", d="part"), {"part": part}, run)
        (d,) = (("d", "output"),)
        assert await around.materialize_output("a", "x") == ("a", "x", ("b", "output", d), ("c", "output", d))
    assert sorted(part.made) == ["a", "b", "c", "d"]


@pytest.mark.requirement("K-5")
@pytest.mark.parametrize(
    ("links", "path"),
    [
        ([link("a", "a", "x")], ["a.x", "a.x"]),
        ([link("b", "a"), link("c", "b"), link("a", "c", "x")], ["c.output", "a.x", "b.output", "c.output"]),
    ],
)
async def test_a_real_cycle_names_its_path(links: list[EdgeSpec], path: list[str]) -> None:
    with ExecutionContext() as run:
        around = runtime(graph(*links, a="part", b="part", c="part"), {"part": Part()}, run)
        with pytest.raises(LinkCycle) as caught:
            await around.materialize_output("a", "x")
        assert list(caught.value.path) == path


@pytest.mark.requirement("K-5")
async def test_a_failure_is_raised_to_all_waiters_and_can_be_retried() -> None:
    part = Part()
    part.gate.clear()
    part.fails = [ValueError("once")]
    with ExecutionContext() as run:
        around = runtime(graph(a="part"), {"part": part}, run)
        asking = [asyncio.ensure_future(around.materialize_output("a", "x")) for _ in range(3)]
        await asyncio.sleep(0)
        part.gate.set()
        got = await asyncio.gather(*asking, return_exceptions=True)
        assert [str(one) for one in got] == ["once"] * 3
        assert await around.materialize_output("a", "x") == ("a", "x")
    assert part.made == ["a", "a"]


@pytest.mark.requirement("K-5")
async def test_a_consumer_that_is_cancelled_does_not_take_the_artifact_from_the_others() -> None:
    part = Part()
    part.gate.clear()
    with ExecutionContext() as run:
        around = runtime(graph(a="part"), {"part": part}, run)
        first, second = (asyncio.ensure_future(around.materialize_output("a", "x")) for _ in range(2))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        assert first.cancelled()
        part.gate.set()
        assert await second == ("a", "x")
    assert part.made == ["a"]


@pytest.mark.requirement("K-5")
async def test_an_artifact_without_waiters_is_dropped_and_made_again_on_demand() -> None:
    part = Part()
    part.gate.clear()
    with ExecutionContext() as run:
        around = runtime(graph(a="part"), {"part": part}, run)
        asking = [asyncio.ensure_future(around.materialize_output("a", "x")) for _ in range(2)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for one in asking:
            one.cancel()
        await asyncio.wait(asking)
        part.gate.set()
        assert await around.materialize_output("a", "x") == ("a", "x")
    assert part.made == ["a", "a"]
    assert check_history(run.history(), ledger=run.balance) == []


@pytest.mark.requirement("K-5")
async def test_making_an_artifact_is_a_call_of_the_run_with_its_calls_below_it() -> None:
    class Priced:
        def materialize(self, data: Any, output_handle: str, context: FlowContext) -> str:
            value: str = context.execution.tool(lambda: "made", name="look up", cost_hint_usd=0.25)
            return value

    with ExecutionContext() as run:
        assert await runtime(graph(a="priced"), {"priced": Priced()}, run).materialize_output("a", "x") == "made"
        root, made, below = run.graph.snapshot()["nodes"].values()
    assert (made["kind"], made["name"], made["parent_id"]) == ("system", "materialize a.x", root["node_id"])
    assert (below["name"], below["parent_id"], below["cost_usd"]) == ("look up", made["node_id"], 0.25)


@pytest.mark.requirement("K-5")
async def test_an_artifact_the_limits_do_not_allow_is_not_made() -> None:
    part = Part()
    with ExecutionContext(ExecutionConfig(None, 0, None)) as run, pytest.raises(Halted, match="step"):
        await runtime(graph(a="part"), {"part": part}, run).materialize_output("a", "x")
    assert part.made == []


async def test_an_artifact_needs_a_run_to_be_made_in() -> None:
    with pytest.raises(InvalidValue, match="execution_context"):
        await runtime(graph(a="part"), {"part": Part()}).materialize_output("a", "x")


async def test_a_node_that_cannot_be_linked_to_says_so() -> None:
    class Runs:
        def execute(self, data: Any, inputs: Any, context: Any) -> None: ...

    with ExecutionContext() as run, pytest.raises(InvalidValue, match="'runs' has no materialize"):
        await runtime(graph(a="runs"), {"runs": Runs()}, run).materialize_output("a", "x")


async def links_schedule(seed: int) -> None:
    """Consumers of shared artifacts that come, wait, are cancelled and come again; some artifacts fail."""
    loop = asyncio.get_running_loop()
    chance = random.Random(seed)
    alive: dict[str, int] = {}

    class Slow:
        async def materialize(self, data: Any, output_handle: str, context: FlowContext) -> Any:
            assert context.runtime is not None
            node = context.node_id
            assert node is not None
            assert not alive.get(node), "made twice at the same time"
            alive[node] = 1
            try:
                await asyncio.sleep(chance.choice([0, 0.01, 0.02]))
                below = await context.runtime.resolve_links(node, "input")
                if chance.random() < 0.2:
                    raise ValueError(node)
                return (node, *below)
            except asyncio.CancelledError:
                if chance.random() < 0.3:
                    return (node, "after all")
                await asyncio.sleep(chance.choice([0, 0.01]))
                raise
            finally:
                alive[node] = 0

    links = [link(a, b) for a, b in ("ba", "ca", "db", "dc", "eb") if chance.random() < 0.8]
    with ExecutionContext(clock=loop.clock) as run:  # type: ignore[attr-defined]
        around = runtime(graph(*links, a="s", b="s", c="s", d="s", e="s"), {"s": Slow()}, run)
        asking = [asyncio.ensure_future(around.materialize_output(chance.choice("abcde"), "output")) for _ in range(5)]
        cancels = [chance.choice([0, 0, 1, 2]) for _ in asking]
        for one, times in zip(asking, cancels, strict=True):
            for _ in range(times):
                loop.call_later(chance.choice([0, 0.005, 0.01, 0.02]), one.cancel)
        got = await asyncio.gather(*asking, return_exceptions=True)
        for outcome, times in zip(got, cancels, strict=True):
            assert isinstance(outcome, tuple | ValueError) or (times and isinstance(outcome, asyncio.CancelledError))
        assert not any(alive.values()), "nothing is being made without a waiter"
        assert len(asyncio.all_tasks()) == 1
    assert run.balance.held_nanos == run.balance.steps_open == 0
    assert check_history(run.history(), ledger=run.balance) == []


@pytest.mark.requirement("K-5")
@pytest.mark.reliability
def test_no_interleaving_makes_an_artifact_twice_at_once_or_leaves_one_behind() -> None:
    explore(links_schedule, schedules=scaled(500, soak=20_000))


# Executors.


class Offered:
    def execute(self, data: Any, inputs: Any, context: Any) -> None: ...


offered = Offered()


def offering(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    monkeypatch.setitem(sys.modules, __name__, types.SimpleNamespace(offered=offered, Offered=Offered))
    points = [EntryPoint(name, f"{__name__}:{value}", "penstock.executors") for name, value in values.items()]
    points += [EntryPoint("twice", value, "penstock.executors") for value in ("one:x", "one:x", "two:x")]
    monkeypatch.setattr("penstock.kernel.executor._installed", lambda: points)


@pytest.mark.requirement("K-4")
def test_executors_of_installed_packages_are_there_when_none_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    offering(monkeypatch, instance="offered", kind="Offered", broken="nowhere")
    registry = GraphRuntime(graph(a="instance", b="kind"), run_id="r").executors
    assert set(registry) == {"instance", "kind", "broken", "twice"}
    assert registry["instance"] is offered
    assert isinstance(registry["kind"], Offered)
    assert len(registry) == 4


@pytest.mark.requirement("K-4")
def test_an_installed_executor_that_is_broken_is_named_when_a_graph_asks_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offering(monkeypatch, broken="nowhere")
    with pytest.raises(ExecutorBroken, match=r"type 'broken' that is installed as '.*:nowhere'"):
        GraphRuntime(graph(a="broken"), run_id="r")
    with pytest.raises(ExecutorBroken, match="'one:x' and 'two:x' cannot be used: a type is taken once"):
        GraphRuntime(graph(a="twice"), run_id="r")


def test_registered_executors_take_precedence_over_installed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    offering(monkeypatch, broken="nowhere")
    registry = ExecutorRegistry.from_entry_points()
    registry.register("broken", offered)
    assert registry["broken"] is offered


def test_an_installed_executor_that_several_threads_ask_for_at_once_is_loaded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first that loads it goes on once another has come: to the lock, or, were there none, to the load."""
    offering(monkeypatch, kind="Offered")
    registry, another = ExecutorRegistry.from_entry_points(), threading.Event()
    load, loads = EntryPoint.load, []

    class Reporting:
        """The registry's lock, which reports when it is found taken."""

        def __init__(self, lock: Any) -> None:
            self._lock = lock

        def __enter__(self) -> None:
            if not self._lock.acquire(blocking=False):
                another.set()
                self._lock.acquire()

        def __exit__(self, *error: object) -> None:
            self._lock.release()

    def loaded(point: EntryPoint) -> Any:
        loads.append(point)
        if len(loads) > 1:
            another.set()
        assert another.wait(60)
        return load(point)

    registry._loading = Reporting(registry._loading)  # type: ignore[assignment]
    monkeypatch.setattr(EntryPoint, "load", loaded)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: registry["kind"], range(4)))
    assert len(loads) == 1
    assert all(one is found[0] for one in found)


@pytest.mark.requirement("K-4")
@pytest.mark.parametrize("executors", [[], 5, "x"])
def test_executors_are_a_registry_or_a_mapping(executors: Any) -> None:
    with pytest.raises(InvalidValue, match="executors"):
        GraphRuntime(graph(), run_id="r", executors=executors)


RUNTIME = Path(__file__).parents[3] / "src" / "penstock" / "runtime"
OURS = [RUNTIME / "scheduling" / "listener.py", *sorted((RUNTIME / "graphs").glob("*.py"))]
DOMAIN = {"agent", "assistant", "chat", "conversation", "llm", "model", "prompt", "team", "tool", "user"}


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_what_runs_graphs_has_no_domain_word(path: Path) -> None:
    source = path.read_text().replace("chat_id", "")
    assert DOMAIN.isdisjoint(word.removesuffix("s") for word in words(source))
