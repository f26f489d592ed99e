"""Everything that keeps a graph from running is found at once, with its code and its place."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.executor import STANDARD_CONVERSIONS, DataValue, ExecutorRegistry, Handle
from penstock.kernel.frontier import Frontier
from penstock.kernel.graph import MAX_PROBLEMS, EdgeSpec, GraphInvalid, GraphSpec, NodeSpec, Problem
from penstock.kernel.links import LinkCycle
from penstock.kernel.plan import CycleFound, compile_plan
from penstock.kernel.validate import compile_graph, flow_edges, validate
from penstock.runtime.graphs.graph_runtime import FlowContext
from penstock.runtime.graphs.node_execution import run_flow
from tests.kernel.graphs import Stub, chain, edge_lists, flow, graph, link

Found = list[tuple[str, str]]


def found(problems: list[Problem]) -> Found:
    return [(problem.code, problem.path) for problem in problems]


def test_a_graph_that_can_run_has_no_problems() -> None:
    assert validate(graph("abcd", "ab", "ac", "bd", "cd", link("a", "d", target_handle="parts"))) == []
    assert validate(GraphSpec()) == []


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (GraphSpec((NodeSpec("", "t"),)), [("empty_id", "$.nodes[0].id")]),
        (GraphSpec((NodeSpec(5, "t"),)), [("wrong_type", "$.nodes[0].id")]),  # type: ignore[arg-type]
        (GraphSpec((NodeSpec(["a"], "t"),)), [("wrong_type", "$.nodes[0].id")]),  # type: ignore[arg-type]
        (graph("aba"), [("duplicate_id", "$.nodes[2].id")]),
        (GraphSpec((NodeSpec("a", ""),)), [("bad_type", "$.nodes[0].type")]),
        (GraphSpec((NodeSpec("a", ["t"]),)), [("bad_type", "$.nodes[0].type")]),  # type: ignore[arg-type]
        (GraphSpec((NodeSpec("a", "t", data=[1]),)), [("wrong_type", "$.nodes[0].data")]),  # type: ignore[arg-type]
        (graph("ab", flow("a", "b", id="e"), flow("a", "b", id="e")), [("duplicate_id", "$.edges[1].id")]),
        (graph("ab", EdgeSpec("", "a", "b", "flow")), [("empty_id", "$.edges[0].id")]),
        (graph("ab", flow("a", "x")), [("unknown_node", "$.edges[0].target")]),
        (graph("ab", link("x", "b")), [("unknown_node", "$.edges[0].source")]),
        (graph("ab", flow({}, "b")), [("unknown_node", "$.edges[0].source")]),  # type: ignore[arg-type]
        (graph("ab", EdgeSpec("e", "a", "b", "")), [("bad_channel", "$.edges[0].data.channel")]),  # type: ignore[arg-type]
        (graph("ab", EdgeSpec("e", "a", "b", {})), [("bad_channel", "$.edges[0].data.channel")]),  # type: ignore[arg-type]
        (graph("ab", flow("a", "b", "")), [("bad_handle", "$.edges[0].sourceHandle")]),
        (graph("ab", flow("a", "b", "output", [])), [("bad_handle", "$.edges[0].targetHandle")]),  # type: ignore[arg-type]
        (graph("ab", "ab", "ba"), [("cycle", "$.edges")]),
        (graph("a", "aa"), [("cycle", "$.edges")]),
    ],
)
def test_each_kind_of_problem_has_a_code_and_a_path(bad: GraphSpec, expected: Found) -> None:
    assert found(validate(bad)) == expected
    assert all(problem.detail for problem in validate(bad))


def test_all_problems_are_listed_at_once() -> None:
    bad = GraphSpec(
        (NodeSpec("a", "t"), NodeSpec("a", ""), NodeSpec("", "t")),
        (flow("a", "x", id="e"), EdgeSpec("e", "y", "a", "none")),  # type: ignore[arg-type]
    )
    assert found(validate(bad, entries=["z"])) == [
        ("duplicate_id", "$.nodes[1].id"),
        ("empty_id", "$.nodes[2].id"),
        ("bad_type", "$.nodes[1].type"),
        ("duplicate_id", "$.edges[1].id"),
        ("unknown_node", "$.edges[0].target"),
        ("bad_channel", "$.edges[1].data.channel"),
        ("unknown_node", "$.edges[1].source"),
        ("unknown_entry", "$.nodes"),
    ]


def test_a_cycle_is_named_where_the_entries_lead_and_ignored_elsewhere() -> None:
    cyclic = graph("abxy", "ab", "xy", "yx")
    assert validate(cyclic, entries=["a"]) == []
    (problem,) = validate(cyclic, entries=["x"])
    assert problem.detail == "the nodes wait for each other: x → y → x"


def test_links_are_in_no_order() -> None:
    assert validate(graph("ab", "ab", link("b", "a"), link("a", "b"), link("a", "a"))) == []


@pytest.mark.parametrize("entry", ["x", "", None, 5, ["a"]])
def test_an_entry_that_is_no_node_is_a_problem(entry: Any) -> None:
    assert found(validate(graph("a"), entries=[entry])) == [("unknown_entry", "$.nodes")]


def test_100_000_nodes_are_fine_and_a_million_are_refused_by_counting() -> None:
    assert validate(chain(100_000)) == []
    many = (NodeSpec("a", "t"),) * 1_000_000
    (problem,) = validate(GraphSpec(many))
    assert (problem.code, problem.path) == ("too_large", "$.nodes")
    assert problem.detail == "1000000 nodes are more than the 100000 a graph may have"


def test_too_many_edges_are_refused_by_counting() -> None:
    edges = (flow("a", "b"),) * 1_000_001
    assert found(validate(GraphSpec((), edges))) == [("too_large", "$.edges")]


def test_a_graph_that_is_all_wrong_is_given_up_before_it_fills_the_memory() -> None:
    assert len(validate(GraphSpec((), (flow("x", "y"),) * 100_000))) == MAX_PROBLEMS


# with executors


REGISTRY = ExecutorRegistry(
    {
        "open": Stub(),
        "text": Stub(inputs=[Handle("input", "text")], outputs=[Handle("output", "text")]),
        "flag": Stub(inputs=[], outputs=[Handle("output", "boolean")]),
        "sum": Stub(inputs=[Handle("input", "number", many="list", required=True)]),
        "parts": Stub(inputs=[Handle("input"), Handle("parts", channel="link", many="list")]),
        "part": Stub(outputs=[Handle("output", channel="link")]),
    }
)


def typed(*edges: EdgeSpec, **types: str) -> GraphSpec:
    return GraphSpec(tuple(NodeSpec(node, type) for node, type in types.items()), edges)


@pytest.mark.parametrize(
    "good",
    [
        typed(flow("a", "b"), a="text", b="text"),
        typed(flow("a", "b"), a="flag", b="text"),
        typed(flow("a", "b", "anything", "whatever"), a="open", b="open"),
        typed(flow("a", "c"), flow("b", "c"), a="text", b="text", c="sum"),
        typed(
            link("a", "c", target_handle="parts"), link("b", "c", target_handle="parts"), a="part", b="part", c="parts"
        ),
    ],
)
def test_declared_handles_and_data_are_accepted(good: GraphSpec) -> None:
    assert validate(good, REGISTRY) == []


@pytest.mark.parametrize(
    ("bad", "code", "path", "words"),
    [
        (typed(a="none"), "unknown_type", "$.nodes[0].type", "flag, open, part, parts, sum, text"),
        (
            typed(flow("a", "b", "yes"), a="text", b="text"),
            "unknown_handle",
            "$.edges[0].sourceHandle",
            "it has: output",
        ),
        (typed(flow("a", "b"), a="text", b="flag"), "unknown_handle", "$.edges[0].targetHandle", "it has: none"),
        (typed(link("a", "b"), a="open", b="text"), "channel_mismatch", "$.edges[0].data.channel", "is for flow"),
        (typed(flow("a", "b"), a="part", b="open"), "channel_mismatch", "$.edges[0].data.channel", "is for link"),
        (typed(flow("a", "b"), a="flag", b="sum"), "type_mismatch", "$.edges[0]", "boolean cannot become number"),
        (
            typed(flow("a", "c"), flow("b", "c"), a="text", b="text", c="text"),
            "too_many_edges",
            "$.edges[1].targetHandle",
            "takes one edge",
        ),
        (typed(a="sum"), "missing_input", "$.nodes[0]", "handle 'input' of 'a' needs an edge"),
    ],
)
def test_a_graph_that_contradicts_the_declarations_of_executors_is_invalid(
    bad: GraphSpec, code: str, path: str, words: str
) -> None:
    (problem,) = validate(bad, REGISTRY)
    assert (problem.code, problem.path) == (code, path)
    assert words in problem.detail
    assert validate(bad) == [], "without executors there is nothing to hold it against"


def test_every_edge_is_looked_at_also_where_many_go_the_same_way() -> None:
    bad = typed(flow("a", "b"), flow("c", "b"), a="flag", b="sum", c="flag")
    assert found(validate(bad, REGISTRY)) == [("type_mismatch", "$.edges[0]"), ("type_mismatch", "$.edges[1]")]


def test_a_good_edge_does_not_speak_for_others_of_the_same_node() -> None:
    bad = typed(
        flow("a", "b"), flow("a", "c", "no"), flow("a", "d"), link("a", "e", "output"), flow("a", "e", "output", "no"),
        a="text", b="text", c="text", d="flag", e="text",
    )  # fmt: skip
    assert found(validate(bad, REGISTRY)) == [
        ("unknown_handle", "$.edges[1].sourceHandle"),
        ("unknown_handle", "$.edges[2].targetHandle"),
        ("channel_mismatch", "$.edges[3].data.channel"),
        ("channel_mismatch", "$.edges[3].data.channel"),
        ("unknown_handle", "$.edges[4].targetHandle"),
    ]


def test_declared_conversions_decide_what_fits() -> None:
    bad = typed(flow("a", "b"), a="flag", b="sum")
    assert validate(bad, REGISTRY, conversions=STANDARD_CONVERSIONS.extended({("boolean", "number"): int})) == []


def test_a_broken_edge_is_not_held_against_the_handles_as_well() -> None:
    bad = typed(flow("x", "a"), flow([], "a", "b", "c"), a="text")  # type: ignore[arg-type]
    assert found(validate(bad, REGISTRY)) == [
        ("unknown_node", "$.edges[0].source"),
        ("unknown_node", "$.edges[1].source"),
    ]


# compile_graph


def test_compiling_a_bad_graph_raises_all_its_problems() -> None:
    with pytest.raises(GraphInvalid, match=r"2 problem\(s\)") as caught:
        compile_graph(graph("aa", flow("a", "x")))
    assert found(list(caught.value.problems)) == [
        ("duplicate_id", "$.nodes[1].id"),
        ("unknown_node", "$.edges[0].target"),
    ]


def test_many_problems_are_all_kept_and_a_few_shown() -> None:
    error = GraphInvalid([Problem("cycle", f"$.edges[{at}]", "no") for at in range(1_000)])
    assert len(error.problems) == 1_000
    assert "and 990 more" in str(error)
    assert len(str(error).splitlines()) == 12


@given(edge_lists(acyclic=False), st.data())
def test_validate_finds_nothing_exactly_when_the_graph_compiles_and_every_reached_node_runs(
    drawn: tuple[list[str], list[tuple[str, str, str]]], data: st.DataObject
) -> None:
    ids, edges = drawn
    entries = data.draw(st.none() | st.lists(st.sampled_from(ids), max_size=3) if ids else st.none())
    channels = [data.draw(st.sampled_from(["flow", "flow", "link"])) for _ in edges]
    drawn_graph = GraphSpec(
        tuple(NodeSpec(name, "t") for name in ids),
        tuple(
            EdgeSpec(f"e{at}", source, target, channel, handle)
            for at, ((source, handle, target), channel) in enumerate(zip(edges, channels, strict=True))
        ),
    )
    problems = validate(drawn_graph, entries=entries)
    in_flow = {end for source, _, target in flow_edges(drawn_graph) for end in (source, target)}
    linked = {edge.source for edge in drawn_graph.edges if edge.channel == "link" and edge.source != edge.target}
    running = [one for one in ids if entries is not None or one in in_flow or one not in linked]
    try:
        plan = compile_plan(running, flow_edges(drawn_graph), entries)
    except CycleFound:
        assert [problem.code for problem in problems] == ["cycle"]
        with pytest.raises(GraphInvalid):
            compile_graph(drawn_graph, entries=entries)
        return
    assert problems == []
    assert compile_graph(drawn_graph, entries=entries).successors == plan.successors
    frontier = Frontier(plan)
    ran = frontier.start()
    for node in ran:
        ran += frontier.finish(node)
    assert sorted(ran) == list(range(plan.size))


class Part:
    """Something that can be linked to and does not run."""

    def materialize(self, data: Any, output_handle: str, context: Any) -> Any: ...


class Runs:
    """Something that runs and cannot be linked to."""

    def execute(self, data: Any, inputs: Any, context: Any) -> Any: ...


PARTS = ExecutorRegistry({"part": Part(), "runs": Runs(), "both": Stub()})


def test_what_only_links_lead_out_of_does_not_run_by_itself() -> None:
    whole = typed(link("a", "c"), link("b", "c"), link("e", "e"), a="part", b="both", c="runs", d="part", e="both")
    assert compile_graph(whole, PARTS).ids == ["c", "e"]
    assert compile_graph(whole, PARTS, entries=["b"]).ids == ["b"]


@pytest.mark.parametrize(
    ("edges", "entries", "code", "path"),
    [
        ([flow("a", "c")], None, "not_runnable", "$.edges[0].source"),
        ([flow("c", "a")], None, "not_runnable", "$.edges[0].target"),
        ([link("c", "b")], None, "not_linkable", "$.edges[0].source"),
        ([], ["a"], "unknown_entry", "$.nodes"),
    ],
)
def test_an_edge_that_needs_an_operation_its_node_lacks_is_a_problem(
    edges: list[EdgeSpec], entries: list[str] | None, code: str, path: str
) -> None:
    problems = validate(typed(*edges, a="part", b="both", c="runs"), PARTS, entries=entries)
    assert [(problem.code, problem.path) for problem in problems] == [(code, path)]


# links


class Follower:
    """Follows the links into some of its handles: when it runs, and when it is made."""

    def __init__(self, execute: str = "", materialize: str = "", *, says_so: bool = True) -> None:
        self.runs, self.makes = list(execute), list(materialize)
        if says_so:
            self.follows = {"execute": self.runs, "materialize": tuple(self.makes)}

    async def execute(self, data: Any, inputs: Any, context: FlowContext) -> DataValue:
        await self._follow(self.runs, context)
        return DataValue("text", "on")

    async def materialize(self, data: Any, output_handle: str, context: FlowContext) -> None:
        await self._follow(self.makes, context)

    async def _follow(self, handles: list[str], context: FlowContext) -> None:
        for handle in handles:
            await context.runtime.resolve_links(context.node_id, handle)  # type: ignore[union-attr, arg-type]


KINDS = {"both": ("xy", "xy"), "runs": ("x", ""), "makes": ("", "y"), "one": ("y", "x"), "neither": ("", "")}


def followers(*, say_so: bool) -> ExecutorRegistry:
    return ExecutorRegistry({kind: Follower(*handles, says_so=say_so) for kind, handles in KINDS.items()})


def circle(graph: GraphSpec, entries: list[str] | None = None) -> str:
    (problem,) = validate(graph, followers(say_so=True), entries=entries)
    assert (problem.code, problem.path) == ("link_cycle", "$.edges")
    return problem.detail.removeprefix("the links need each other: ")


def test_artifacts_that_need_each_other_are_named_where_they_are_followed() -> None:
    each_other = typed(
        flow("s", "a"), link("a", "b", "o", "x"), link("b", "a", "o", "x"), s="neither", a="both", b="both"
    )
    assert circle(each_other) == "b.o → a.o → b.o"
    assert validate(each_other) == [], "without executors it is unknown which links are followed"
    assert validate(each_other, followers(say_so=False)) == [], "those that say nothing may not follow them"
    assert validate(each_other, followers(say_so=True), entries=["s"]) != []


def test_a_link_from_a_node_to_itself_is_a_circle_only_if_it_is_followed_to_be_made() -> None:
    assert circle(typed(link("a", "a", "o", "x"), a="both")) == "a.o → a.o"
    assert validate(typed(link("a", "a", "o", "x"), a="runs"), followers(say_so=True)) == []
    assert validate(typed(link("a", "a", "o", "z"), a="both"), followers(say_so=True)) == [], "another handle"


def test_a_circle_of_links_that_no_running_node_asks_for_does_no_harm() -> None:
    apart = typed(
        flow("s", "t"), link("a", "b", "o", "x"), link("b", "a", "o", "x"), s="both", t="both", a="both", b="both"
    )
    assert validate(apart, followers(say_so=True)) == []
    assert circle(apart, entries=["a"]) == "b.o → a.o → b.o"


def test_two_ways_to_one_artifact_are_no_circle_however_many_there_are() -> None:
    ladder = [link(f"n{at}", f"n{at + 1}", name, "x") for at in range(200) for name in "pq"]
    graph = typed(*ladder, **{f"n{at}": "both" for at in range(201)})
    assert validate(graph, followers(say_so=True)) == []


def test_a_long_cycle_is_found_without_recursion_and_reported_in_short() -> None:
    size = 20_000
    around = [link(f"n{at}", f"n{(at + 1) % size}", "o", "x") for at in range(size)]
    graph = typed(flow("s", "n0"), *around, s="neither", **{f"n{at}": "both" for at in range(size)})
    message = circle(graph)
    assert message.startswith("n19999.o → n19998.o → ")
    assert "… 19990 more …" in message


@pytest.mark.parametrize(
    "follows", [None, "x", 5, {"execute": "x"}, {"execute": 5}, {"execute": [[], None, ""]}, {1: "x"}]
)
def test_something_else_that_is_called_follows_says_nothing(follows: Any) -> None:
    odd = Follower("x", "x")
    odd.follows = follows
    assert validate(typed(link("a", "a", "o", "x"), a="odd"), ExecutorRegistry({"odd": odd})) == []


@given(
    st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=6),
    st.lists(st.tuples(*[st.integers(0, 5)] * 2, st.sampled_from("op"), st.sampled_from("xyz")), max_size=10),
    st.lists(st.tuples(*[st.integers(0, 5)] * 2), max_size=2),
)
def test_a_circle_is_found_before_the_run_exactly_when_the_run_would_find_it(
    kinds: list[str], links: list[tuple[int, int, str, str]], flows: list[tuple[int, int]]
) -> None:
    size = len(kinds)
    graph = GraphSpec(
        tuple(NodeSpec(f"n{at}", kind) for at, kind in enumerate(kinds)),
        (
            *(link(f"n{a % size}", f"n{b % size}", out, to, id=f"l{at}") for at, (a, b, out, to) in enumerate(links)),
            *(
                flow(f"n{a}", f"n{b}", "output", f"in{at}", id=f"f{at}")
                for at, (a, b) in enumerate(flows)
                if a < b < size
            ),
        ),
    )
    found_before = [problem.code for problem in validate(graph, followers(say_so=True))]
    assert found_before == (["link_cycle"] if asyncio.run(runs_into_a_circle(graph)) else [])


async def runs_into_a_circle(graph: GraphSpec) -> bool:
    """Whether a run finds one; its executors do not say before what they follow."""
    try:
        async for _ in run_flow(graph, FlowContext(), followers(say_so=False)):
            pass
    except LinkCycle:
        return True
    return False
