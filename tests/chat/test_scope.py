"""Which agents the user talks to follows from the flow edges of the graph, and executors act on it in a run."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.chat import ChatScope, services_for
from penstock.errors import InvalidValue
from penstock.kernel.document import graph_to_json, parse_graph
from penstock.kernel.executor import DataValue, ExecutionResult
from penstock.kernel.graph import Channel, EdgeSpec, GraphSpec, NodeSpec
from penstock.runtime.graphs.graph_runtime import FlowContext
from penstock.runtime.graphs.node_execution import NodeEvent, run_flow
from penstock.testing import explore

TYPES = {"S": "chat-start", "A": "agent", "x": "step"}
ON, OFF = {"includeUserTools": True}, {"includeUserTools": False}


def graph(*ways: str, links: str = "", **data: Mapping[str, Any]) -> GraphSpec:
    """`S > x1 > A` are flow edges; the first letter of a name says its type; `links` are written the same way."""
    edges: dict[tuple[str, str, Channel], None] = {}
    names: dict[str, None] = {}
    channels: list[tuple[str, Channel]] = [*((way, "flow") for way in ways), (links, "link")]
    for way, channel in channels:
        on_the_way = way.split(" > ") if way else []
        names.update(dict.fromkeys(on_the_way))
        edges.update(dict.fromkeys((a, b, channel) for a, b in pairwise(on_the_way)))
    nodes = [NodeSpec(name, TYPES[name[0]], data.get(name, {})) for name in names]
    return GraphSpec(tuple(nodes), tuple(EdgeSpec(f"{a}-{b}-{c}", a, b, c) for a, b, c in edges))


def entry_agents(graph: GraphSpec) -> set[str]:
    scope = ChatScope(graph)
    return {node.id for node in graph.nodes if scope.is_entry_agent(node.id)}


def with_tools(graph: GraphSpec) -> set[str]:
    scope = ChatScope(graph)
    return {node.id for node in graph.nodes if scope.include_user_tools(node.id)}


ENTRY: dict[str, tuple[GraphSpec, set[str]]] = {
    "a pipeline": (graph("S > A1 > A2 > A3"), {"A1"}),
    "nodes between": (graph("S > x1 > x2 > A1 > x3 > A2"), {"A1"}),
    "two side by side": (graph("S > A1", "S > A2"), {"A1", "A2"}),
    "a diamond of agents": (graph("S > A1 > A3", "S > A2 > A3"), {"A1", "A2"}),
    "a diamond before the agent": (graph("S > x1 > A1", "S > x2 > A1"), {"A1"}),
    "a way around an agent": (graph("S > A1 > A2", "S > x1 > A2"), {"A1"}),
    "a short and a long way": (graph("S > A2", "S > x1 > x2 > A1 > A2"), {"A1"}),
    "two starts": (graph("S1 > A1", "S2 > x1 > A2"), {"A1", "A2"}),
    "a start behind an agent": (graph("S1 > A1 > S2 > A2"), {"A1"}),
    "two starts into one": (graph("S1 > A1 > A2", "S2 > A2"), {"A1"}),
    "an agent that is a tool": (graph("S > A1", links="A2 > A1"), {"A1"}),
    "a link between agents is no way": (graph("S > A1", "S > A2", links="A1 > A2"), {"A1", "A2"}),
    "a link is no way from the start": (graph("S > x1", "A1 > x2", links="S > A1"), set()),
    "an agent nothing leads to": (graph("S > A1", "A2 > A3"), {"A1"}),
    "an agent upstream that does not run": (graph("S > x1 > A1", "A2 > x1"), {"A1"}),
    "a circle elsewhere": (graph("S > A1", "A2 > A3 > A2"), {"A1"}),
    "a circle elsewhere that leads here": (graph("S > A1", "A2 > A3 > A2", "A3 > A1"), {"A1"}),
    "no start": (graph("x1 > A1"), set()),
    "no agent": (graph("S > x1"), set()),
    "nothing": (GraphSpec(), set()),
    "an edge to nowhere": (GraphSpec(graph("S > A1").nodes, graph("S > A1 > A2", "x1 > A1").edges), {"A1"}),
}


@pytest.mark.parametrize(("of", "expected"), ENTRY.values(), ids=ENTRY)
def test_an_entry_agent_has_no_agent_before_it_on_a_way_from_the_start(of: GraphSpec, expected: set[str]) -> None:
    assert entry_agents(of) == expected


TOOLS: dict[str, tuple[GraphSpec, set[str]]] = {
    "included": (graph("S > A1", S=ON), {"A1"}),
    "not included": (graph("S > A1", S=OFF), set()),
    "not set": (graph("S > A1"), set()),
    "included through other nodes": (graph("S > x1 > x2 > A1", S=ON), {"A1"}),
    "not included through other nodes": (graph("S > x1 > x2 > A1", S=OFF), set()),
    "not for agents behind agents": (graph("S > A1 > x1 > A2", S=ON), {"A1"}),
    "each start its own": (graph("S1 > x1 > A1", "S2 > x2 > A2", S1=ON, S2=OFF), {"A1"}),
    "one that does not is enough": (graph("S1 > x1 > A1", "S2 > x1", "S1 > A2", S1=ON, S2=OFF), {"A2"}),
    "all that lead to it do": (graph("S1 > x1 > A1", "S2 > x1", S1=ON, S2=ON), {"A1"}),
    "a start behind a start": (graph("S1 > S2 > A1", S1=OFF, S2=ON), set()),
    "a link gives none": (graph("S1 > A1", links="S2 > A1", S1=OFF, S2=ON), set()),
    "a link takes none": (graph("S1 > A1", "S2 > x1", links="S2 > A1", S1=ON, S2=OFF), {"A1"}),
    "other nodes do not say": (graph("S > x1 > A1", S=ON, x1=OFF), {"A1"}),
}


@pytest.mark.parametrize(("of", "expected"), TOOLS.values(), ids=TOOLS)
def test_user_tools_go_where_every_start_that_leads_there_says_so(of: GraphSpec, expected: set[str]) -> None:
    assert with_tools(of) == expected


def test_a_policy_that_is_neither_true_nor_false_is_refused() -> None:
    with pytest.raises(InvalidValue, match="includeUserTools of node 'S' must be true or false"):
        ChatScope(graph("S > A1", S={"includeUserTools": "false"}))


def test_which_types_are_agents_and_starts_is_a_parameter() -> None:
    pipeline = graph("x1 > A1 > A2", x1=ON)
    scope = ChatScope(pipeline, agent_types={"agent"}, chat_start_types={"step"})
    assert (scope.entry_node_ids, scope.entry_agent_ids) == (("x1",), {"A1"})
    assert scope.include_user_tools("A1")
    assert ChatScope(graph("S > A1 > x1"), agent_types=["step"]).entry_agent_ids == {"x1"}


def test_a_chat_may_begin_at_named_nodes() -> None:
    two = graph("S1 > x1 > A1 > A2", "S2 > x1", S1=ON, S2=OFF)
    assert ChatScope(two, ["S1"]).include_user_tools("A1"), "a start that does not run has no say"
    assert not ChatScope(two, ["S2"]).include_user_tools("A1")
    assert ChatScope(two, ["A2"]).entry_agent_ids == {"A2"}


def test_a_node_that_is_not_there_is_no_entry_agent() -> None:
    scope = ChatScope(graph("S > A1", S=ON))
    assert not scope.is_entry_agent("nowhere")
    assert not scope.include_user_tools("nowhere")


@pytest.mark.parametrize("entries", [["nowhere"], "S", []])
def test_a_chat_that_can_begin_nowhere_is_refused(entries: Any) -> None:
    with pytest.raises(InvalidValue, match="entry_node_ids"):
        services_for(graph("S > A1"), entries)
    with pytest.raises(InvalidValue, match="such as one of type chat-start"):
        services_for(graph("x1 > A1"))


def test_the_services_of_a_chat_name_the_scope_and_where_it_begins() -> None:
    services = services_for(graph("S1 > A1", "S2 > A1", "x1 > A1"))
    assert services["execution"] == {"entry_node_ids": ["S1", "S2"]}
    assert services["chat_scope"].is_entry_agent("A1")


names = st.sampled_from(["S1", "S2", "A1", "A2", "A3", "A4", "x1", "x2", "x3"])


@given(st.lists(st.tuples(names, names, st.sampled_from(["flow", "flow", "link"])), max_size=14), st.booleans())
def test_the_scope_is_what_looking_at_every_ancestor_finds(ways: list[tuple[str, str, Any]], first: bool) -> None:
    ids = sorted({"S1", "S2", *(end for a, b, _ in ways for end in (a, b))})
    policy = {"S1": first, "S2": True}
    nodes = tuple(NodeSpec(id, TYPES[id[0]], {"includeUserTools": policy.get(id, False)}) for id in ids)
    spec = GraphSpec(nodes, tuple(EdgeSpec(f"e{at}", *way) for at, way in enumerate(ways)))
    flow = {(a, b) for a, b, channel in ways if channel == "flow"}

    def ancestors(id: str, among: set[str]) -> set[str]:
        found: set[str] = set()
        for _ in ids:
            found |= {a for a, b in flow if (b == id or b in found) and a in among}
        return found

    active = {id for id in ids if id in policy or ancestors(id, set(ids)) & policy.keys()}
    scope = ChatScope(spec)
    for id in ids:
        above = ancestors(id, active)
        is_entry = id in active and id[0] == "A" and not any(one[0] == "A" for one in above)
        assert scope.is_entry_agent(id) == is_entry
        assert scope.include_user_tools(id) == (is_entry and all(policy[one] for one in above & policy.keys()))


def test_a_scope_looks_at_each_edge_a_bounded_number_of_times() -> None:
    """Layers of diamonds: as many ways as 2**n, of which none is walked."""
    ways = [f"x{at} > {side}{at} > x{at + 1}" for at in range(2_000) for side in ("A", "x_")]
    assert entry_agents(graph("S > x0", *ways)) == {"A0"}


# In a run: executors that look at the scope as an agent's does.

HISTORY = ["how deep?", "what?", "the lake"]


class Start:
    def execute(self, data: Any, inputs: Any, context: FlowContext) -> DataValue:
        return DataValue("text", context.services["history"][-1])


class Step:
    async def execute(self, data: Any, inputs: Mapping[str, DataValue], context: FlowContext) -> DataValue:
        return DataValue("text", f"{context.node_id}({inputs['input'].value})")


class Agent:
    """Tells what it was given, and which of the user's tools."""

    async def execute(self, data: Any, inputs: Mapping[str, DataValue], context: FlowContext) -> DataValue:
        scope, node = context.services["chat_scope"], context.node_id
        assert node is not None
        given = context.services["history"] if scope.is_entry_agent(node) else [inputs["input"].value]
        tools = context.services["user_tools"] if scope.include_user_tools(node) else []
        context.state[node] = (list(given), list(tools))
        return DataValue("text", f"{node}: {len(given)}")


EXECUTORS = {"chat-start": Start(), "step": Step(), "agent": Agent()}


async def given_to_agents(of: GraphSpec) -> dict[str, Any]:
    """What each agent that ran was given."""
    seen: dict[str, Any] = {}
    services = {"history": HISTORY, "user_tools": ["calendar"], **services_for(of)}
    emitted = [one async for one in run_flow(of, FlowContext(services=services, state=seen), EXECUTORS)]
    assert isinstance(emitted[-1], ExecutionResult)
    assert {one.node_id for one in emitted if isinstance(one, NodeEvent) and one.node_id in seen} == seen.keys()
    return seen


parse_graph(graph_to_json(graph("S > A1")))  # whatever is loaded once is loaded now, and not on an event loop

PIPELINES: dict[str, tuple[GraphSpec, dict[str, Any]]] = {
    "start, A, B": (graph("S > A1 > A2", S=ON), {"A1": (HISTORY, ["calendar"]), "A2": (["A1: 3"], [])}),
    "nodes between, tools": (
        graph("S > x1 > A1 > x2 > A2", S=ON),
        {"A1": (HISTORY, ["calendar"]), "A2": (["x2(A1: 3)"], [])},
    ),
    "nodes between, no tools": (
        graph("S > x1 > A1 > x2 > A2", S=OFF),
        {"A1": (HISTORY, []), "A2": (["x2(A1: 3)"], [])},
    ),
    "parts that nothing leads to": (
        graph("S > A1 > A2", "A3 > A4", "A5 > A6 > A5"),
        {"A1": (HISTORY, []), "A2": (["A1: 3"], [])},
    ),
    "two starts": (
        graph("S1 > A1 > A2", "S2 > x1 > A3", S1=ON, S2=OFF),
        {"A1": (HISTORY, ["calendar"]), "A2": (["A1: 3"], []), "A3": (HISTORY, [])},
    ),
}


@pytest.mark.parametrize(("of", "expected"), PIPELINES.values(), ids=PIPELINES)
async def test_the_first_agent_gets_the_history_and_the_next_what_it_made_of_it(
    of: GraphSpec, expected: dict[str, Any]
) -> None:
    assert await given_to_agents(of) == expected
    assert await given_to_agents(parse_graph(graph_to_json(of))) == expected


def test_who_gets_the_history_does_not_depend_on_who_runs_first() -> None:
    of, expected = PIPELINES["two starts"]
    assert all(seen == expected for seen in explore(lambda _: given_to_agents(of), schedules=50))
