"""`penstock graph`: validate, show, schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.kernel.document import parse_graph
from tests.cli.conftest import Penstock

TWO_NODES = {
    "id": "triage",
    "nodes": [
        {"id": "read", "type": "text", "position": {"x": 0, "y": 0}, "data": {}},
        {"id": "answer", "type": "shout", "position": {"x": 0, "y": 0}, "data": {}},
    ],
    "edges": [{"id": "e1", "source": "read", "target": "answer", "data": {"channel": "flow"}}],
}

EXECUTORS = """
class Any:
    def execute(self, data, inputs, context):
        return None

registry = {"text": Any(), "shout": Any()}
"""

STORY = """
from penstock.flow.graph import Graph
from penstock.flow.node import FunctionNode

graph = Graph("story")
graph.add_step(FunctionNode("draft", lambda context: 1), "draft")
graph.add_step(FunctionNode("edit", lambda context: 2), "edit", depends_on=["draft"])
"""


@pytest.fixture
def flow(directory: Path) -> Path:
    path = directory / "flow.json"
    path.write_text(json.dumps(TWO_NODES))
    return path


def test_valid_graph_is_reported_with_what_was_not_checked(penstock: Penstock, flow: Path) -> None:
    ended = penstock("graph", "validate", flow.name)
    assert ended.code == 0
    assert ended.out == (
        "flow.json: valid, 2 nodes, 1 edge; types and handles were not checked: name the executors with --executors\n"
    )


@pytest.mark.requirement("P-E5")
@pytest.mark.parametrize("options", [[], ["--executors", "nodes:registry"]], ids=["alone", "with executors"])
def test_a_wrong_error_policy_is_named_with_its_path(penstock: Penstock, flow: Path, options: list[str]) -> None:
    Path("nodes.py").write_text(EXECUTORS)
    document = json.loads(flow.read_text())
    document["nodes"][1]["data"] = {"error_policy": {"max_retries": 3}}
    flow.write_text(json.dumps(document))
    ended = penstock("graph", "validate", flow, *options)
    assert ended.code == 2
    assert "bad_data  $.nodes[1].data.error_policy.max_retries  there is no such setting\n" in ended.out


def test_types_are_checked_against_the_executors_that_are_named(penstock: Penstock, flow: Path) -> None:
    Path("nodes.py").write_text(EXECUTORS)
    assert (
        penstock("graph", "validate", flow, "--executors", "nodes:registry").out == f"{flow}: valid, 2 nodes, 1 edge\n"
    )
    Path("fewer.py").write_text(EXECUTORS + "del registry['shout']\n")
    ended = penstock("graph", "validate", flow, "--executors", "fewer.py:registry")
    assert ended.code == 2
    assert ended.out.startswith("unknown_type  $.nodes[1].type  no executor is registered for type 'shout'")


def test_every_problem_is_printed_as_code_path_and_sentence(penstock: Penstock, flow: Path) -> None:
    broken = {**TWO_NODES, "nodes": [*TWO_NODES["nodes"], TWO_NODES["nodes"][0]]}
    broken["edges"] = [{"id": "e1", "source": "read", "target": "ghost", "data": {"channel": "flow"}}]
    flow.write_text(json.dumps(broken))
    ended = penstock("graph", "validate", flow.name)
    assert ended.code == 2
    assert ended.out.splitlines() == [
        "duplicate_id  $.nodes[2].id  'read' is already the id of nodes[0]",
        "unknown_node  $.edges[0].target  there is no node 'ghost'",
    ]
    assert ended.err == "penstock: flow.json is not a valid graph: 2 problems\n"


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", '"text"', "\x00", '{"nodes": NaN}'], ids=repr)
def test_what_is_not_a_graph_is_a_problem_like_any_other(penstock: Penstock, flow: Path, content: str) -> None:
    flow.write_text(content)
    ended = penstock("graph", "validate", flow.name)
    assert ended.code == 2
    assert "  $" in ended.out
    assert "flow.json is not a valid graph: " in ended.err


def test_bytes_that_are_not_text_are_a_problem(penstock: Penstock, flow: Path) -> None:
    flow.write_bytes(b"\xff\xfe{}")
    assert penstock("graph", "validate", flow.name).out.startswith("bad_json  $  ")


def test_a_name_that_would_steer_the_terminal_is_only_shown(penstock: Penstock, flow: Path) -> None:
    twice = {"id": "\x1b[2J", "type": "text", "position": {"x": 0, "y": 0}, "data": {}}
    flow.write_text(json.dumps({**TWO_NODES, "nodes": [twice, twice], "edges": []}))
    for command in (["validate"], ["show"], ["show", "--format", "mermaid"], ["show", "--format", "json"]):
        assert "\x1b" not in penstock("graph", *command, flow.name).out


def test_executors_are_refused_where_no_node_needs_one(penstock: Penstock) -> None:
    Path("story.py").write_text("from penstock.flow.graph import Graph\ngraph = Graph('story')\n")
    ended = penstock("graph", "validate", "story.py", "--executors", "no:such")
    assert (ended.code, ended.out) == (64, "")
    assert ended.err.startswith("penstock: --executors can only be used with a graph in JSON: story.py is a Graph")


def test_agents_linked_to_each_other_are_reported_before_they_run(penstock: Penstock) -> None:
    agents = [{"id": id, "type": "agent", "data": {"model": "example"}} for id in "ab"]
    links = [
        {"id": f"{one}{other}", "source": one, "sourceHandle": "tool", "target": other, "targetHandle": "tools"}
        | {"data": {"channel": "link"}}
        for one, other in ("ab", "ba")
    ]
    flow = {"id": "f", "source": "in", "target": "a", "data": {"channel": "flow"}}
    document = {"nodes": [{"id": "in", "type": "input"}, *agents], "edges": [flow, *links]}
    Path("flow.json").write_text(json.dumps(document))
    for command in (["graph", "validate", "flow.json"], ["run", "flow.json", "--input", "1"]):
        ended = penstock(*command, "--executors", "penstock.nodes:executors")
        assert ended.code == 2
        assert "link_cycle  $.edges  the links need each other: b.tool → a.tool → b.tool\n" in ended.out + ended.err


def test_a_graph_in_python_is_validated_and_shown_like_one_in_json(penstock: Penstock) -> None:
    Path("story.py").write_text(STORY)
    assert penstock("graph", "validate", "story.py").out == "story.py: valid, 2 nodes, 1 edge\n"
    assert penstock("graph", "show", "story.py:graph").out == (
        "story: 2 nodes, 1 edge\n  draft (function)\n    output → edit.input\n  edit (function)\n"
    )


def test_the_problems_of_a_graph_in_python_are_printed_too(penstock: Penstock) -> None:
    Path("story.py").write_text(STORY + "graph.get_step('edit') >> graph.get_step('draft')\n")
    ended = penstock("graph", "validate", "story.py")
    assert ended.code == 2
    assert ended.out.startswith("cycle  steps  ")


def test_a_graph_that_cannot_run_is_drawn_all_the_same(penstock: Penstock, flow: Path) -> None:
    flow.write_text(json.dumps({**TWO_NODES, "nodes": TWO_NODES["nodes"][:1]}))
    ended = penstock("graph", "show", flow.name)
    assert ended.code == 0
    assert "read (text)\n    output → answer.input" in ended.out


def test_the_three_formats(penstock: Penstock, flow: Path) -> None:
    assert penstock("graph", "show", flow.name).out.startswith("triage: 2 nodes, 1 edge\n")
    assert penstock("graph", "show", flow.name, "--format", "mermaid").out.startswith("flowchart LR\n")
    shown = penstock("graph", "show", flow.name, "--format", "json").out
    assert parse_graph(shown) == parse_graph(flow.read_text())


def test_the_schema_is_json_schema(penstock: Penstock) -> None:
    ended = penstock("graph", "schema")
    assert json.loads(ended.out)["$schema"] == "https://json-schema.org/draft/2020-12/schema"
