"""A graph is drawn the same every time, and nothing in it is read as syntax."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.graph import EdgeSpec, GraphSpec, NodeSpec
from penstock.kernel.render import to_mermaid, to_text
from tests.kernel.graphs import flow, link

GRAPH = GraphSpec(
    (NodeSpec("fetch", "http"), NodeSpec("sort", "branch"), NodeSpec("store", "sink")),
    (flow("fetch", "sort"), flow("sort", "store", "yes"), link("store", "sort", "table", "tables")),
    "nightly",
)


def test_mermaid_draws_flow_solid_and_links_dashed() -> None:
    assert to_mermaid(GRAPH) == (
        "flowchart LR\n"
        '    n0["fetch<br/>http"]\n'
        '    n1["sort<br/>branch"]\n'
        '    n2["store<br/>sink"]\n'
        "    n0 --> n1\n"
        '    n1 -->|"yes → input"| n2\n'
        '    n2 -.->|"table → tables"| n1\n'
    )


def test_text_lists_each_node_and_what_leaves_it() -> None:
    assert to_text(GRAPH) == (
        "nightly: 3 nodes, 3 edges\n"
        "  fetch (http)\n"
        "    output → sort.input\n"
        "  sort (branch)\n"
        "    yes → store.input\n"
        "  store (sink)\n"
        "    table ⇢ sort.tables\n"
    )


def test_a_graph_without_nodes_can_be_drawn() -> None:
    assert to_mermaid(GraphSpec()) == "flowchart LR\n"
    assert to_text(GraphSpec((NodeSpec("a", "b"),))) == "graph: 1 node, 0 edges\n  a (b)\n"


def test_a_node_that_is_not_there_is_drawn_as_missing() -> None:
    graph = GraphSpec((NodeSpec("a", "step"),), (flow("a", "gone"), flow("ghost", "a")))
    assert 'n1["gone<br/>(no such node)"]' in to_mermaid(graph)
    assert "n2 --> n0" in to_mermaid(graph)
    assert "  ghost (no such node)\n    output → a.input\n" in to_text(graph)


def test_labels_cannot_end_themselves_or_be_markup() -> None:
    graph = GraphSpec((NodeSpec('"]; click n0 href "javascript:1', "<script>`#&"),))
    label = to_mermaid(graph).splitlines()[1]
    assert label.count('"') == 2
    assert "<script" not in label
    assert "`" not in label
    assert "#34;#93;; click n0 href #34;javascript:1<br/>#60;script#62;#96;#35;#38;" in label


ANY_TEXT = st.text(max_size=8) | st.sampled_from(
    ['"', "\n    n9", "|", "end", "\ud800", "%%{init}%%", "\u2028", "\x00"]
)


@given(ANY_TEXT, ANY_TEXT, ANY_TEXT, ANY_TEXT)
def test_whatever_the_names_are_there_is_one_line_for_each_thing(a: str, b: str, handle: str, type: str) -> None:
    nodes = (NodeSpec(a, type), NodeSpec(b + "'", type), NodeSpec(a + b + "''", type))
    graph = GraphSpec(nodes, (EdgeSpec("e", a, b + "'", "flow", handle), EdgeSpec("f", a, a, "link", "x", handle)), a)
    drawn, text = to_mermaid(graph), to_text(graph)
    lines = drawn.removesuffix("\n").split("\n")
    assert len(lines) == 1 + len({node.id for node in nodes}) + 2 or len({node.id for node in nodes}) < 3
    assert all(re.fullmatch(r'    n\d+\["[^"]*"\]|    n\d+ -\.?->(\|"[^"|]*"\|)? n\d+', line) for line in lines[1:])
    assert len(drawn.splitlines()) == len(lines)
    assert len(text.splitlines()) == 1 + 3 + 2
    assert (drawn + text).encode("utf-8")
    assert (drawn, text) == (to_mermaid(graph), to_text(graph))
