"""`graph validate`, `run`, `serve` and the server's API list the same problems of a graph, all in one pass."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Ended, Penstock
from tests.server.served import served

BASIC = ("--executors", "penstock.nodes:executors")
"""The node types of the package, which the tests of the command line otherwise leave out."""

SERVICES = """
from penstock.agents import ScriptedModel

models = {"house": ScriptedModel(["hello"])}

def look(at: str) -> str:
    "Look at something."
    return at

tools = {"look": look}
"""

INSIDE = {
    "nodes": [
        {"id": "in", "type": "input"},
        {"id": "helper", "type": "agent", "data": {"model": "ghost", "tools": ["look", "smell"]}},
        {"id": "lost", "type": "uper"},
    ],
    "edges": [{"id": "e", "source": "in", "target": "nowhere", "data": {"channel": "flow"}}],
}

BROKEN: dict[str, Any] = {
    "id": "broken",
    "nodes": [
        {"id": "in", "type": "input"},
        {"id": "clerk", "type": "agent", "data": {"model": "hous", "tools": ["look", "sniff"], "max_turns": "many"}},
        {"id": "unreal", "type": "telepathy"},
        {"id": "round", "type": "loop", "data": {"graph": INSIDE}},
        {"id": "servers", "type": "mcp-server", "data": {"server": "files"}},
        {"id": "tool", "type": "tool", "data": {"tool": "taste"}},
        {"id": "code", "type": "program", "data": {"program": "gone"}},
        {"type": "text", "data": {"text": "no id"}},
        {"id": "a", "type": "merge"},
        {"id": "b", "type": "merge"},
        {"id": "fine", "type": "agent", "data": {"model": "openai:gpt-4o", "tools": ["look"]}},
    ],
    "edges": [
        {"id": "e1", "source": "in", "target": "clerk", "data": {"channel": "flow"}},
        {"id": "e2", "source": "a", "target": "b", "data": {"channel": "flow"}},
        {"id": "e3", "source": "b", "target": "a", "data": {"channel": "flow"}},
        {"id": "e4", "source": "in", "target": "missing", "data": {"channel": "flow"}},
    ],
}

EXPECTED = {
    ("missing_field", "$.nodes[7].id"),
    ("bad_data", "$.nodes[1].data.max_turns"),
    ("unknown_type", "$.nodes[2].type"),
    ("bad_data", "$.nodes[3].data.max_iterations"),
    ("bad_data", "$.nodes[3].data.graph.edges[0].target"),
    ("bad_data", "$.nodes[3].data.graph.nodes[2].type"),
    ("unknown_node", "$.edges[3].target"),
    ("cycle", "$.edges"),
    ("unknown_model", "$.nodes[1].data.model"),
    ("unknown_tool", "$.nodes[1].data.tools[1]"),
    ("unknown_model", "$.nodes[3].data.graph.nodes[1].data.model"),
    ("unknown_tool", "$.nodes[3].data.graph.nodes[1].data.tools[1]"),
    ("unknown_mcp_server", "$.nodes[4].data.server"),
    ("unknown_tool", "$.nodes[5].data.tool"),
    ("unknown_program", "$.nodes[6].data.program"),
}


@pytest.fixture(autouse=True)
def services(directory: Path) -> None:
    (directory / "mine.py").write_text(SERVICES)
    (directory / "broken.json").write_text(json.dumps(BROKEN))


SERVED = ("--models", "mine.py:models", "--tools", "mine.py:tools", *BASIC)


def listed(ended: Ended) -> list[str]:
    """The lines of problems that a command printed."""
    assert ended.code == 2, ended.err
    return [line for line in (ended.out + ended.err).splitlines() if "  $" in line]


async def listed_by_the_api(document: dict[str, Any]) -> list[str]:
    from mine import models, tools  # type: ignore[import-not-found]  # written by the fixture

    async with served(models=models, tools=tools) as server, server.client("ann") as ann:
        found = (await ann.post("/api/graphs/validate", json={"document": document})).json()
        assert found["valid"] is False
        return [f"{one['code']}  {one['path']}  {one['message']}" for one in found["problems"]]


def places(lines: Sequence[str]) -> list[tuple[str, str]]:
    """The code and path of each line."""
    return [(line.split("  ")[0], line.split("  ")[1]) for line in lines]


def test_every_problem_is_listed_in_one_pass_and_everywhere_alike(
    penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(".")
    found = listed(penstock("graph", "validate", "broken.json", *SERVED))
    assert set(places(found)) == EXPECTED
    assert listed(penstock("run", "broken.json", *SERVED)) == found
    assert listed(penstock("serve", "broken.json", "--port", "0", "--db", "memory:", *SERVED)) == found
    assert places(asyncio.run(listed_by_the_api(BROKEN))) == places(found)  # offers other names


def test_what_is_offered_and_models_of_providers_are_no_problem(penstock: Penstock) -> None:
    document = {"id": "fine", "nodes": [BROKEN["nodes"][0], BROKEN["nodes"][-1]], "edges": []}
    Path("fine.json").write_text(json.dumps(document))
    assert penstock("graph", "validate", "fine.json", *SERVED).code == 0


def test_options_that_add_what_is_missing_are_named_once(penstock: Penstock) -> None:
    ended = penstock("graph", "validate", "broken.json", *BASIC)
    assert ended.code == 2
    for option in ("--models", "--tools", "--executors"):
        assert ended.err.count(f"with {option} module:name") == 1


def test_a_graph_in_python_without_steps_is_refused_like_one_in_json(penstock: Penstock) -> None:
    Path("empty.py").write_text("from penstock import Graph\ngraph = Graph('empty')\n")
    for command in (["graph", "validate"], ["run"], ["serve", "--port", "0", "--db", "memory:"]):
        assert listed(penstock(*command, "empty.py")) == ["empty  $.nodes  the graph has no steps; add one"]
