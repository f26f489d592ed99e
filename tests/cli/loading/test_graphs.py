"""Which graph a command is about."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.exits import Refused
from penstock.cli.loading.graphs import load_graph
from penstock.flow.graph import Graph
from penstock.kernel.graph import GraphInvalid, GraphSpec

IMPORTS = "from penstock.flow.graph import Graph\nfrom penstock.kernel.graph import GraphSpec\n"


@pytest.mark.parametrize(
    ("text", "target", "found"),
    [
        ("graph = Graph('a')\nother = Graph('b')", "flows.py", "a"),
        ("graph = Graph('a')\nother = Graph('b')", "flows.py:other", "b"),
        ("only = Graph('c')", "flows.py", "c"),
        ("def graph(): return Graph('d')", "flows.py", "d"),
        ("def build(): return Graph('e')", "flows:build", "e"),
        ("spec = GraphSpec(id='f')", "flows.py", "f"),
        ("class Flows:\n    main = Graph('g')", "flows:Flows.main", "g"),
    ],
)
def test_a_graph_in_python(text: str, target: str, found: str) -> None:
    Path("flows.py").write_text(IMPORTS + text)
    graph = load_graph(target)
    assert isinstance(graph, Graph | GraphSpec)
    assert graph.id == found


@pytest.mark.parametrize(
    ("text", "target", "expected"),
    [
        ("", "flows.py", "flows.py has no Graph and no Agent; add one called 'graph' or 'agent'"),
        ("a = Graph('a')\nb = Graph('b')", "flows.py", "several graphs; name one: flows.py:a, flows.py:b"),
        ("graph = 7", "flows.py", "flows.py:graph is of type int; it must be a Graph, an Agent, a GraphSpec or a"),
        (
            "def graph(): return None",
            "flows.py",
            "what flows.py:graph returned is of type NoneType",
        ),
        ("", "flows:Graph", "flows:Graph is a class; it must be a Graph"),
        ("", "flows.py:nope", "flows.py has no attribute 'nope'; its graphs and agents are: none"),
        ("", "nowhere", "there is no file 'nowhere'; a graph in a module is named package.module:name"),
        ("", "nowhere.json", "FILE: there is no file 'nowhere.json'"),
        ("", ".", "FILE: '.' is a directory; name a file in it"),
        ("", "", "FILE: '.' is a directory"),
        ("", "a\x00b.json", "cannot be read"),
        ("", ":", "there is no file ':'"),
    ],
)
def test_invalid_target_is_refused_with_advice(text: str, target: str, expected: str) -> None:
    Path("flows.py").write_text(IMPORTS + text)
    with pytest.raises(Refused) as refused:
        load_graph(target)
    assert expected in str(refused.value)


@pytest.mark.parametrize(
    ("file", "named", "found"),
    [
        ("flow.json", "", "flow"),
        ("my flow.v2.json", "", "my flow.v2"),
        ("flow.json", '"id": "graph", ', "graph"),
        ("flow.json", '"id": "mine", ', "mine"),
        ("flow.json", '"id": "", ', ""),
    ],
)
def test_a_graph_without_an_id_is_called_as_its_file_is(file: str, named: str, found: str) -> None:
    Path(file).write_text(f'{{{named}"nodes": [{{"id": "a", "type": "x", "data": {{"n": [1]}}}}], "edges": []}}')
    graph = load_graph(file)
    assert isinstance(graph, GraphSpec)
    assert graph.id == found
    assert graph.nodes[0].data == {"n": [1]}


def test_a_file_whose_name_is_no_text_needs_an_id_inside() -> None:
    Path("caf\udce9.json").write_text('{"nodes": [], "edges": []}')
    with pytest.raises(GraphInvalid, match=r"\$\.id"):
        load_graph("caf\udce9.json")


def test_any_other_file_is_a_graph_in_json_also_with_a_colon_in_its_name() -> None:
    Path("a:b").write_text('{"id": "x", "nodes": [], "edges": []}')
    graph = load_graph("a:b")
    assert graph.id == "x"
    Path("flow.yaml").write_text("id: x")
    with pytest.raises(GraphInvalid, match="bad_json"):
        load_graph("flow.yaml")
