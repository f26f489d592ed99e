"""`penstock run` with a graph from an editor and executors from Python."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from tests.cli.conftest import Penstock

NODES = """
from penstock.kernel.executor import ExecutionResult
from penstock.kernel.executor import DataValue


class Ask:
    async def execute(self, data, inputs, context):
        text = f"{data['prefix']} {context.execution.input}"
        return ExecutionResult({"output": DataValue("text", text)})


class Shout:
    async def execute(self, data, inputs, context):
        await context.execution.atool(str, 1, name="shout aloud", cost_hint_usd=0.01)
        loud = inputs["input"].value.upper()
        return ExecutionResult({"output": DataValue("text", loud), "length": DataValue("number", len(loud))})


class Fails:
    async def execute(self, data, inputs, context):
        raise LookupError("nothing there")


registry = {"ask": Ask(), "shout": Shout(), "fails": Fails()}
"""


def node(id: str, type: str, **data: str) -> dict[str, object]:
    return {"id": id, "type": type, "position": {"x": 0, "y": 0}, "data": data}


def write_flow(*nodes: dict[str, object]) -> None:
    ids = [one["id"] for one in nodes]
    edges = [
        {"id": f"e{at}", "source": a, "target": b, "data": {"channel": "flow"}}
        for at, (a, b) in enumerate(pairwise(ids))
    ]
    Path("flow.json").write_text(json.dumps({"id": "flow", "nodes": nodes, "edges": edges}))


@pytest.fixture(autouse=True)
def nodes(directory: Path) -> None:
    (directory / "nodes.py").write_text(NODES)
    write_flow(node("first", "ask", prefix="about"), node("then", "shout"))


RUN = ("run", "flow.json", "--executors", "nodes:registry")


def test_each_node_has_its_value_and_the_input_reaches_the_executors(penstock: Penstock) -> None:
    ended = penstock(*RUN, "--input", '"dams"')
    assert ended.code == 0
    assert ended.out == 'first: about dams\nthen: {"output": "ABOUT DAMS", "length": 10}\n'
    assert "✓ tool then/shout aloud · $0.01" in ended.err


def test_a_node_that_fails_is_2_with_the_results_before_it(penstock: Penstock) -> None:
    write_flow(node("first", "ask", prefix="x"), node("then", "fails"), node("last", "shout"))
    ended = penstock(*RUN, "--json")
    read = json.loads(ended.out)
    assert (ended.code, read["status"], list(read["results"])) == (2, "failed", ["first"])
    assert read["error"]["message"].startswith("LookupError: nothing there (nodes.py, line ")


def test_a_limit_is_3_and_names_its_budget(penstock: Penstock) -> None:
    ended = penstock(*RUN, "--max-cost", "0.005")
    assert ended.code == 3
    assert "■ halted: budget_exceeded: " in ended.err
    assert "of 'flow'" in ended.err
    assert ended.out == "first: about None\n"


def test_executors_that_are_missing_are_problems_of_the_graph(penstock: Penstock) -> None:
    ended = penstock("run", "flow.json")
    assert ended.code == 2
    assert ended.err.count("unknown_type  $.nodes[") == 2
    assert "Traceback" not in ended.err


def test_an_executor_that_gives_nonsense_is_a_failure_in_one_sentence(penstock: Penstock) -> None:
    Path("odd.py").write_text(
        "class Odd:\n    def execute(self, data, inputs, context):\n        return 7\nall = {'odd': Odd()}"
    )
    write_flow(node("only", "odd"))
    ended = penstock("run", "flow.json", "--executors", "odd.py:all")
    assert ended.code == 2
    assert "✗ failed: " in ended.err
    assert "Traceback" not in ended.err


def test_nodes_remember_for_as_long_as_the_run_lasts(penstock: Penstock) -> None:
    write_flow(
        node("given", "input"),
        node("keep", "memory", action="remember", key="dam"),
        node("find", "memory", action="recall", key="dam"),
    )
    ended = penstock("run", "flow.json", "--executors", "penstock.nodes:executors", "--input", '"Verzasca"')
    assert (ended.code, "find: Verzasca" in ended.out) == (0, True), ended.err
    write_flow(node("find", "memory", action="recall", key="dam"))
    ended = penstock("run", "flow.json", "--executors", "penstock.nodes:executors")
    assert (ended.code, "Verzasca" in ended.out) == (0, False), ended.err
