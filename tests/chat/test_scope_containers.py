"""Chat scope sees into containers: who gets the history and the user's tools when agents are inside nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.agents.messages import ToolCall
from penstock.agents.model import ModelRequest
from penstock.agents.scripted import ScriptedModel
from penstock.agents.tools import Tool
from penstock.chat import ChatScope, services_for
from penstock.chat.turn import ChatTurn
from penstock.errors import InvalidValue
from penstock.kernel.document import graph_to_json, parse_graph
from penstock.kernel.executor import DataValue
from penstock.kernel.graph import EdgeSpec, GraphSpec, NodeSpec
from penstock.nodes.parts.chat import GO_ON
from tests.chat.chats import ANN, Chats, chatting
from tests.nodes.graphs import Json, events_of, graph, node

pytestmark = pytest.mark.requirement("K-17")

MESSAGES = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "first"},
    {"role": "user", "content": "two"},
]
HISTORY = ["one", "first", "two"]
TOOLS = ["calendar"]
ENTRY = (HISTORY, TOOLS)
"""The messages an entry agent gets, and the tools it is offered."""


def behind(*payload: str) -> tuple[list[str], list[str]]:
    return [*payload], []


def agent(id: str, **data: Any) -> Json:
    return node(id, "agent", model=id, **data)


def start(include: bool = True) -> Json:
    return node("start", "chat-start", includeUserTools=include)


def container(kind: str, id: str, *inside: Any, **data: Any) -> Json:
    """A container around a graph: nodes, then its flow edges, then its links."""
    return node(id, kind, graph=graph(*inside), **data)


def sub(id: str, *inside: Any) -> Json:
    return container("subgraph", id, *inside)


def loop(id: str, *inside: Any, times: int = 1) -> Json:
    return container("loop", id, *inside, max_iterations=times)


def each(id: str, *inside: Any) -> Json:
    return container("map", id, *inside)


class Same:
    def execute(self, data: Any, inputs: Any, context: Any) -> DataValue:
        return inputs["input"] if "input" in inputs else DataValue("any", context.execution.input)


class Split:
    def execute(self, data: Any, inputs: Any, context: Any) -> DataValue:
        return DataValue("list", ["item 1", "item 2"])


SAME, SPLIT = node("same", "same"), node("split", "split")
A, B, C = agent("A"), agent("B"), agent("C")

Seen = dict[str, list[tuple[list[str], list[str]]]]

TOPOLOGIES: dict[str, tuple[Json, Seen]] = {
    "a subgraph that comes first": (
        graph([start(), sub("s", [A]), B], ["start > s", "s > B"]),
        {"A": [ENTRY], "B": [behind("A!")]},
    ),
    "a subgraph behind another node": (
        graph(
            [start(), SAME, sub("s", [node("in", "input"), A], ["in > A"]), B], ["start > same", "same > s", "s > B"]
        ),
        {"A": [ENTRY], "B": [behind("A!")]},
    ),
    "a pipeline inside": (
        graph([start(), sub("s", [A, B], ["A > B"]), C], ["start > s", "s > C"]),
        {"A": [ENTRY], "B": [behind("A!")], "C": [behind("B!")]},
    ),
    "a subgraph behind an agent": (
        graph([start(), A, sub("s", [B])], ["start > A", "A > s"]),
        {"A": [ENTRY], "B": [behind("A!")]},
    ),
    "one subgraph behind another": (
        graph([start(), sub("s", [A]), sub("t", [B])], ["start > s", "s > t"]),
        {"A": [ENTRY], "B": [behind("A!")]},
    ),
    "two side by side": (
        graph([start(), sub("s", [A]), loop("l", [B]), C], ["start > s", "start > l", "s > C"]),
        {"A": [ENTRY], "B": [ENTRY], "C": [behind("A!")]},
    ),
    "no agent inside": (
        graph([start(), sub("s", [SAME]), B, C], ["start > s", "s > B", "B > C"]),
        {"B": [ENTRY], "C": [behind("B!")]},
    ),
    "one of two branches inside has an agent": (
        graph(
            [start(), sub("s", [SAME, A, node("other", "same")], ["same > A", "same > other"]), B],
            ["start > s", "s > B"],
        ),
        {"A": [ENTRY], "B": [behind('{"A.output": "A!", "other.output": "two"}')]},
    ),
    "a way around the container": (
        graph([start(), sub("s", [A]), node("m", "merge"), B], ["start > s", "s > m", "start > m", "m > B"]),
        {"A": [ENTRY], "B": [behind('["A!", "two"]')]},
    ),
    "a loop that runs once": (
        graph([start(), loop("l", [A]), B], ["start > l", "l > B"]),
        {"A": [ENTRY], "B": [behind("A!")]},
    ),
    "a loop that runs three times": (
        graph([start(), loop("l", [A, B], ["A > B"], times=3), C], ["start > l", "l > C"]),
        {"A": [ENTRY, behind("B!"), behind("B!")], "B": [behind("A!")] * 3, "C": [behind("B!")]},
    ),
    "a map": (
        graph([start(), SPLIT, each("m", [A]), B], ["start > split", "split > m", "m > B"]),
        {"A": [([*HISTORY, "item 1"], TOOLS), ([*HISTORY, "item 2"], TOOLS)], "B": [behind('["A!", "A!"]')]},
    ),
    "an agent that is linked into a map": (
        graph(
            [start(), SPLIT, node("m", "map"), agent("A"), B],
            ["start > split", "split > m", "m > B"],
            ["A.tool > m.each"],
        ),
        {"A": [behind("item 1"), behind("item 2")], "B": [([*HISTORY, '["A!", "A!"]'], TOOLS)]},
    ),
    "a subgraph in a loop in a map": (
        graph(
            [start(), SPLIT, each("m", [loop("l", [sub("s", [A, B], ["A > B"])], times=2)]), C],
            ["start > split", "split > m", "m > C"],
        ),
        {
            "A": [([*HISTORY, "item 1"], TOOLS), ([*HISTORY, "item 2"], TOOLS), behind("B!"), behind("B!")],
            "B": [behind("A!")] * 4,
            "C": [behind('["B!", "B!"]')],
        },
    ),
    "a loop in a loop": (
        graph([start(), loop("l", [loop("k", [A], times=2)], times=2)], ["start > l"]),
        {"A": [ENTRY, behind("A!"), behind("A!"), behind("A!")]},
    ),
    "an agent of the same id inside and behind": (
        graph([start(), sub("A", [A]), B], ["start > A", "A > B"]),
        {"A": [ENTRY], "B": [behind("A!")]},
    ),
    "an agent that is a tool inside": (
        graph([start(), sub("s", [agent("D"), A], [], ["A.tool > D.tools"]), B], ["start > s", "s > B"]),
        {
            "D": [(HISTORY, [*TOOLS, "A"]), ([*HISTORY, "", "A!"], [*TOOLS, "A"])],
            "A": [behind("ask")],
            "B": [behind("D!")],
        },
    ),
    "an agent in the graph of a tool": (
        graph(
            [
                start(),
                agent("D"),
                node(
                    "A",
                    "tool",
                    graph=graph([A]),
                    parameters={"type": "object", "properties": {"task": {"type": "string"}}},
                ),
            ],
            ["start > D"],
            ["A.tool > D.tools"],
        ),
        {"D": [(HISTORY, [*TOOLS, "A"]), ([*HISTORY, "", "A!"], [*TOOLS, "A"])], "A": [behind('{"task": "ask"}')]},
    ),
    "a team inside": (
        graph(
            [start(), sub("s", [node("T", "team", model="D"), A], [], ["A.tool > T.members"]), B],
            ["start > s", "s > B"],
        ),
        {
            "D": [(HISTORY, [*TOOLS, "A"]), ([*HISTORY, "", "A!"], [*TOOLS, "A"])],
            "A": [behind("ask")],
            "B": [behind("D!")],
        },
    ),
    "user tools not included": (
        graph([start(include=False), sub("s", [A])], ["start > s"]),
        {"A": [(HISTORY, [])]},
    ),
    "a chat-start inside that does not include them": (
        graph([start(), sub("s", [node("again", "chat-start"), A], ["again > A"])], ["start > s"]),
        {"A": [(HISTORY, [])]},
    ),
}


class Models:
    """A model for each agent, which records its requests. `D` calls the tool `A` first."""

    def __init__(self) -> None:
        self.seen: Seen = {}
        self.by_name = {name: ScriptedModel(self._answer(name)) for name in "ABCD"}

    def _answer(self, name: str) -> Callable[[ModelRequest], Any]:
        def answer(request: ModelRequest) -> Any:
            requests = self.seen.setdefault(name, [])
            requests.append(([one.text for one in request.messages], [one.name for one in request.tools]))
            return ToolCall("1", "A", {"task": "ask"}) if name == "D" and len(requests) == 1 else f"{name}!"

        return answer


def calendar() -> Tool:
    return Tool(lambda: "free", name="calendar", description="")


EXECUTORS = {"same": Same(), "split": Split()}


@pytest.mark.parametrize(("document", "expected"), TOPOLOGIES.values(), ids=TOPOLOGIES)
async def test_the_first_agent_gets_the_history_wherever_it_is(document: Json, expected: Seen) -> None:
    models = Models()
    services = {
        **services_for(parse_graph(document)),
        "chat_input": {"messages": MESSAGES},
        "user_tools": [calendar()],
        "models": models.by_name,
    }
    await events_of(document, "two", services=services, more=EXECUTORS)
    assert {name: sorted(requests) for name, requests in models.seen.items()} == {
        name: sorted(requests) for name, requests in expected.items()
    }


async def test_a_team_behind_an_agent_that_answers_nothing_gets_nothing() -> None:
    document = graph(
        [start(), agent("A"), node("T", "team", mode="parallel"), B], ["start > A", "A > T"], ["B.tool > T.members"]
    )
    models = Models()
    models.by_name["A"] = ScriptedModel([""])
    services = {**services_for(parse_graph(document)), "chat_input": {"messages": MESSAGES}, "models": models.by_name}
    await events_of(document, "two", services=services)
    assert models.seen["B"] == [behind()]


# In a chat: every entry point keeps the rules.

Entry = Callable[[Chats, ChatTurn], Any]

NEXT: dict[str, tuple[Entry, list[str]]] = {
    "stream_chat": (
        lambda chats, _: chats.service.stream_chat(chats.chat_id, "two", owner=ANN),
        ["one", "B!", "two"],
    ),
    "continue_message": (
        lambda chats, one: chats.service.continue_message(one.chat_id, one.message_id, owner=ANN),
        ["one", "B!", GO_ON],
    ),
    "retry_message": (
        lambda chats, one: chats.service.retry_message(one.chat_id, one.message_id, owner=ANN),
        ["one"],
    ),
    "edit_user_message": (
        lambda chats, one: chats.service.edit_user_message(one.chat_id, str(one.user_message_id), "another", owner=ANN),
        ["another"],
    ),
    "stream_agent_chat": (
        lambda chats, _: chats.service.stream_agent_chat("g", "two", owner=ANN),
        ["two"],
    ),
}


@pytest.mark.parametrize("kind", ["subgraph", "loop"])
@pytest.mark.parametrize("entry", NEXT)
async def test_every_way_to_go_on_with_a_chat_keeps_the_rules(entry: str, kind: str) -> None:
    inner = container(kind, "c", [A], **({"max_iterations": 2} if kind == "loop" else {}))
    models = Models()
    document = graph([start(), inner, B], ["start > c", "c > B"])
    async with chatting(document, models.by_name, tools={"calendar": calendar()}) as chats:
        first = await chats.service.stream_chat(chats.chat_id, "one", owner=ANN, user_tools=["calendar"])
        await first.result()
        models.seen.clear()
        go_on, history = NEXT[entry]
        await (await go_on(chats, first)).result()
    texts_of_a = [texts for texts, _ in models.seen["A"]]
    assert texts_of_a == ([history, ["A!"]] if kind == "loop" else [history])
    assert [texts for texts, _ in models.seen["B"]] == [["A!"]]


async def test_the_tools_of_the_user_reach_the_first_agent_inside_in_a_chat() -> None:
    models = Models()
    document = graph([start(), sub("s", [A, B], ["A > B"])], ["start > s"])
    async with chatting(document, models.by_name, tools={"calendar": calendar()}) as chats:
        turn = await chats.service.stream_chat(chats.chat_id, "one", owner=ANN, user_tools=["calendar"])
        await turn.result()
    assert models.seen == {"A": [(["one"], TOOLS)], "B": [behind("A!")]}


# The scope itself.


def scope_of(*nodes: Json, flow: list[str], **options: Any) -> ChatScope:
    return ChatScope(parse_graph(graph(list(nodes), flow)), **options)


def test_the_scope_inside_a_node_names_the_entry_agents_there() -> None:
    scope = scope_of(start(), sub("s", [loop("l", [A, B], ["A > B"])]), C, flow=["start > s", "s > C"])
    inner = scope.inside("s").inside("l")
    assert (scope.entry_agent_ids, scope.inside("s").entry_agent_ids, inner.entry_agent_ids) == (set(), set(), {"A"})
    assert (inner.is_entry_agent("A"), inner.is_entry_agent("B"), inner.include_user_tools("A")) == (True, False, True)
    assert not scope.is_entry_agent("A"), "the same id in another graph is another node"
    assert scope.entry_node_ids == ("start",)
    assert inner.entry_node_ids == ()


def test_later_iterations_have_no_entry_agents() -> None:
    scope = scope_of(start(), loop("l", [sub("s", [A])]), flow=["start > l"])
    assert scope.inside("l").inside("s").is_entry_agent("A")
    again = scope.inside("l", 2).inside("s")
    assert not again.is_entry_agent("A")
    assert not again.include_user_tools("A")


@pytest.mark.parametrize("iteration", [0, -1, True, 1.0, "1", None])
def test_an_iteration_is_a_number_from_one_on(iteration: Any) -> None:
    with pytest.raises(InvalidValue, match="iteration must be a whole number"):
        scope_of(start(), flow=[]).inside("start", iteration)


def test_the_types_of_containers_are_a_parameter() -> None:
    nodes = [start(), container("box", "c", [A]), B]
    flow = ["start > c", "c > B"]
    assert scope_of(*nodes, flow=flow).entry_agent_ids == {"B"}
    seen = scope_of(*nodes, flow=flow, container_types={"box"})
    assert (seen.entry_agent_ids, seen.inside("c").entry_agent_ids) == (set(), {"A"})
    services = services_for(parse_graph(graph(nodes, flow)), container_types=["box"])
    assert services["chat_scope"].inside("c").is_entry_agent("A")


UNREADABLE: dict[str, Any] = {
    "not a graph": 5,
    "no nodes": {"nodes": 5, "edges": []},
    "an edge without a channel": {
        "nodes": [{"id": "A", "type": "agent"}],
        "edges": [{"id": "e", "source": "A", "target": "A"}],
    },
}


@pytest.mark.parametrize("inner", UNREADABLE.values(), ids=UNREADABLE)
def test_a_graph_inside_that_cannot_be_read_has_no_agents(inner: Any) -> None:
    outer = GraphSpec(
        (NodeSpec("start", "chat-start"), NodeSpec("s", "subgraph", {"graph": inner}), NodeSpec("B", "agent")),
        (EdgeSpec("1", "start", "s", "flow"), EdgeSpec("2", "s", "B", "flow")),
    )
    assert ChatScope(outer).entry_agent_ids == {"B"}


def test_a_graph_that_contains_itself_ends() -> None:
    itself: Json = graph([A])
    itself["nodes"].append({"id": "s", "type": "subgraph", "data": {"graph": itself}})
    outer = GraphSpec(
        (NodeSpec("start", "chat-start"), NodeSpec("s", "subgraph", {"graph": itself})),
        (EdgeSpec("1", "start", "s", "flow"),),
    )
    assert not ChatScope(outer).inside("s").entry_agent_ids


def test_containers_as_deep_as_a_document_allows() -> None:
    document, depth = graph([A]), 14
    for _ in range(depth):
        document = graph([container("subgraph", "s", *[document["nodes"]])])
    scope = ChatScope(parse_graph(document), ["s"])
    for _ in range(depth):
        scope = scope.inside("s")
    assert scope.entry_agent_ids == {"A"}


class OneGraphOnly:
    """The scope that a caller wrote for one graph."""

    def is_entry_agent(self, node_id: str) -> bool:
        return True

    def include_user_tools(self, node_id: str) -> bool:
        return True


async def test_a_scope_that_knows_one_graph_is_not_used_inside() -> None:
    models = Models()
    services = {"chat_scope": OneGraphOnly(), "chat_input": {"messages": MESSAGES}, "models": models.by_name}
    await events_of(graph([sub("s", [A]), B], ["s > B"]), "two", services=services)
    assert models.seen == {"A": [behind("two")], "B": [([*HISTORY, "A!"], [])]}


# Properties.


@dataclass(frozen=True)
class Level:
    """A graph whose nodes are agents (`A`), steps (`x`), chat-starts (`S`) or graphs; edges lead from left to right."""

    nodes: tuple[Any, ...]
    edges: frozenset[tuple[int, int]]


def levels(of: st.SearchStrategy[Any]) -> st.SearchStrategy[Level]:
    def build(nodes: list[Any], bits: int) -> Level:
        pairs = [(a, b) for b in range(len(nodes)) for a in range(b)]
        return Level(tuple(nodes), frozenset(one for at, one in enumerate(pairs) if bits >> at & 1))

    return st.builds(build, st.lists(of, max_size=4), st.integers(0, 63))


PLAIN = st.sampled_from(["A", "x", "A", "x", "S+", "S-"])
NESTED = levels(st.recursive(PLAIN, lambda inner: PLAIN | levels(inner), max_leaves=6))
TYPES = {"A": "agent", "x": "text", "S+": "chat-start", "S-": "chat-start"}


def plain(id: str, letter: str) -> NodeSpec:
    return NodeSpec(id, TYPES[letter], {"includeUserTools": letter == "S+"} if letter[0] == "S" else {})


def nested(level: Level, kind: str = "subgraph") -> GraphSpec:
    nodes = [
        NodeSpec(f"n{at}", kind, {"graph": graph_to_json(nested(one))})
        if isinstance(one, Level)
        else plain(f"n{at}", one)
        for at, one in enumerate(level.nodes)
    ]
    edges = [EdgeSpec(f"{a}-{b}", f"n{a}", f"n{b}", "flow") for a, b in sorted(level.edges)]
    return GraphSpec(tuple(nodes), tuple(edges))


def inlined(level: Level, around: str = "") -> tuple[list[NodeSpec], set[tuple[str, str]], list[str], list[str]]:
    """The nodes and edges of a level without containers, and its first and last nodes.

    An edge into a container goes to the first nodes of its graph, and one out of it comes from the last; a container
    of an empty graph is a step.
    """
    nodes: list[NodeSpec] = []
    edges: set[tuple[str, str]] = set()
    firsts: dict[int, list[str]] = {}
    lasts: dict[int, list[str]] = {}
    for at, one in enumerate(level.nodes):
        id = f"{around}n{at}"
        if isinstance(one, Level) and one.nodes:
            inner_nodes, inner_edges, firsts[at], lasts[at] = inlined(one, f"{id}/")
            nodes += inner_nodes
            edges |= inner_edges
        else:
            nodes.append(plain(id, "x" if isinstance(one, Level) else one))
            firsts[at] = lasts[at] = [id]
    edges |= {(a, b) for left, right in level.edges for a in lasts[left] for b in firsts[right]}
    begins = [id for at in firsts if not any(b == at for _, b in level.edges) for id in firsts[at]]
    ends = [id for at in lasts if not any(a == at for a, _ in level.edges) for id in lasts[at]]
    return nodes, edges, begins, ends


def flat(level: Level) -> GraphSpec:
    nodes, edges, _, _ = inlined(level)
    return GraphSpec(tuple(nodes), tuple(EdgeSpec(f"{a}>{b}", a, b, "flow") for a, b in sorted(edges)))


def agents_in(level: Level, scope: ChatScope, around: str = "") -> Iterator[tuple[str, bool, bool]]:
    """Every agent by its path, whether it is an entry agent, and whether it gets the user's tools."""
    for at, one in enumerate(level.nodes):
        id = f"n{at}"
        if isinstance(one, Level):
            yield from agents_in(one, scope.inside(id), f"{around}{id}/")
        elif one == "A":
            yield f"{around}{id}", scope.is_entry_agent(id), scope.include_user_tools(id)


def starting(level: Level, include: bool) -> Level:
    """The level behind a chat-start that leads to each of its nodes that nothing leads to."""
    led_to = {b for _, b in level.edges}
    first = {(0, at + 1) for at in range(len(level.nodes)) if at not in led_to}
    return Level(("S+" if include else "S-", *level.nodes), frozenset({(a + 1, b + 1) for a, b in level.edges} | first))


@given(NESTED, st.booleans(), st.sampled_from(["subgraph", "loop", "map"]))
def test_inlining_containers_changes_neither_the_entry_agents_nor_their_tools(
    level: Level, include: bool, kind: str
) -> None:
    whole = starting(level, include)
    flattened = ChatScope(flat(whole), ["n0"])
    found = list(agents_in(whole, ChatScope(nested(whole, kind), ["n0"])))
    assert found == [(id, flattened.is_entry_agent(id), flattened.include_user_tools(id)) for id, _, _ in found]


@given(NESTED, st.integers(1, 3))
def test_a_loop_is_its_graph_written_once_for_each_iteration(level: Level, times: int) -> None:
    document = {"graph": graph_to_json(nested(level))}
    ids = ["start", *(f"c{at}" for at in range(1, times + 1))]
    written = GraphSpec(
        (
            NodeSpec("start", "chat-start", {"includeUserTools": True}),
            *(NodeSpec(id, "subgraph", document) for id in ids[1:]),
        ),
        tuple(EdgeSpec(f"{a}-{b}", a, b, "flow") for a, b in pairwise(ids)),
    )
    looped = replace(
        written,
        nodes=(written.nodes[0], NodeSpec("l", "loop", document)),
        edges=(EdgeSpec("e", "start", "l", "flow"),),
    )
    for at in range(1, times + 1):
        inside = ChatScope(looped).inside("l", at)
        assert list(agents_in(level, inside)) == list(agents_in(level, ChatScope(written).inside(f"c{at}")))
