"""`penstock run` with agents in a graph: their models, tools and prices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Penstock

MINE = """
from penstock.agents.messages import ToolCall
from penstock.agents.scripted import ScriptedModel
from penstock.agents.tools import tool
from penstock.runtime.billing.prices import Price
from penstock.runtime.billing.usage import Usage
from penstock.server.examples import ExampleModel


@tool
def depth(lake: str) -> str:
    "How deep a lake is."
    return f"{lake} is 30 m deep"


def answer(request):
    return f"heard {request.messages[-1].content}"


models = {
    "mine": ScriptedModel(answer, name="mine-1", usage=Usage(1000, 1000)),
    "diver": ScriptedModel([ToolCall("1", "depth", {"lake": "it"}), "deep enough"], name="mine-1"),
    "quick": ExampleModel(words_per_second=0),
}
tools = {"depth": depth}
prices = {"mine-1": Price("1", "2")}
wrong = {"mine-1": 3}
nameless = {"": Price("1", "2")}
"""


@pytest.fixture(autouse=True)
def only_what_tests_install() -> None:
    """Here the node types that come with the package are offered."""


@pytest.fixture(autouse=True)
def mine(directory: Path) -> None:
    (directory / "mine.py").write_text(MINE)


def write_agent(**data: Any) -> str:
    nodes = [
        {"id": "start", "type": "chat-start"},
        {"id": "agent", "type": "agent", "data": {"instructions": "Answer.", **data}},
    ]
    edges = [{"id": "e", "source": "start", "target": "agent", "data": {"channel": "flow"}}]
    Path("agent.json").write_text(json.dumps({"nodes": nodes, "edges": edges}))
    return "agent.json"


def test_built_in_model_is_available_and_its_cost_is_shown(penstock: Penstock) -> None:
    ended = penstock("run", write_agent(model="example"), "--input", '"count to 3"', "--max-cost", "0.10")
    assert (ended.code, ended.out) == (0, "start: count to 3\nagent: 1, 2, 3.\n")
    assert "cost $0.00000" in ended.err
    assert "of $0.10" in ended.err


def test_what_has_a_price_is_held_before_a_call_leaves(penstock: Penstock) -> None:
    ended = penstock("run", write_agent(model="example"), "--input", '"hello"', "--max-cost", "0.000001")
    assert (ended.code, ended.out) == (3, "start: hello\n")
    assert "the call would hold $" in ended.err


def test_a_model_from_a_file_answers_and_costs_what_its_price_says(penstock: Penstock) -> None:
    given = ("--models", "mine.py:models", "--prices", "mine.py:prices", "--unknown-prices", "refuse")
    ended = penstock("run", write_agent(model="mine"), "--input", '"hello"', "--max-cost", "0.10", "--json", *given)
    read = json.loads(ended.out)
    assert (ended.code, read["results"]["agent"]) == (0, "heard hello")
    assert read["usage"]["cost_usd"] == 0.003


def test_an_example_model_of_ones_own_has_its_price(penstock: Penstock) -> None:
    given = ("--models", "mine.py:models", "--unknown-prices", "refuse")
    ended = penstock("run", write_agent(model="quick"), "--input", '"count to 2"', *given)
    assert (ended.code, ended.out.splitlines()[-1]) == (0, "agent: 1, 2.")


@pytest.mark.parametrize(("policy", "code"), [("count", 0), ("refuse", 3)])
def test_a_model_without_a_price_is_counted_or_refused(penstock: Penstock, policy: str, code: int) -> None:
    given = ("--models", "mine.py:models", "--unknown-prices", policy)
    assert penstock("run", write_agent(model="mine"), "--input", '"hello"', *given).code == code


def test_tools_are_there_by_name(penstock: Penstock) -> None:
    given = ("--models", "mine.py:models", "--tools", "mine.py:tools")
    ended = penstock("run", write_agent(model="diver", tools=["depth"]), "--input", '"how deep?"', *given)
    assert (ended.code, ended.out.splitlines()[-1]) == (0, "agent: deep enough")
    assert "/depth" in ended.err


def test_unknown_model_is_a_failure_that_lists_the_known_ones(penstock: Penstock) -> None:
    ended = penstock("run", write_agent(model="unknown"), "--models", "mine.py:models", "--input", '"hello"')
    assert ended.code == 2
    assert "there is no model 'unknown'; use one of: diver, example, mine, quick, or" in ended.err


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--models", "models"], "--models takes module:attribute or file.py:attribute, not 'models'"),
        (["--models", "nowhere:models"], "there is no module 'nowhere'"),
        (["--models", "mine.py:depth"], "--models mine.py:depth is of type Tool; it must be a mapping of names"),
        (["--tools", "mine.py:nothing"], "mine.py has no attribute 'nothing'"),
        (["--prices", "mine.py:wrong"], "--prices: the price of 'mine-1' must be a penstock Price"),
        (["--prices", "mine.py:nameless"], "--prices: model must be a model name"),
        (["--unknown-prices", "guess"], "'--unknown-prices'"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_used_is_refused_before_anything_runs(
    penstock: Penstock, given: list[str], expected: str
) -> None:
    ended = penstock("run", write_agent(model="example"), "--input", '"hello"', *given)
    assert (ended.code, ended.out, ended.err.count("\n")) == (64, "", 1)
    assert expected in ended.err


@pytest.mark.parametrize(
    "given",
    [
        ["--models", "no:such"],
        ["--tools", "no:such"],
        ["--prices", "no:such"],
        ["--unknown-prices", "refuse"],
        ["--unknown-prices", "count"],
        ["--executors", "no:such"],
        ["--approve", "all"],
        ["--approve", "none"],
    ],
    ids=" ".join,
)
def test_a_graph_in_python_takes_none_of_them(penstock: Penstock, given: list[str]) -> None:
    Path("story.py").write_text("from penstock.flow.graph import Graph\ngraph = Graph('story')\n")
    ended = penstock("run", "story.py", *given)
    assert (ended.code, ended.out) == (64, "")
    assert ended.err == (
        f"penstock: {given[0]} can only be used with a graph in JSON: story.py is a Graph in Python, "
        "whose steps bring their own\n"
    )


def test_a_graph_of_nodes_that_python_made_may_have_them(penstock: Penstock) -> None:
    agent = write_agent(model="mine")
    Path("made.py").write_text(
        "from pathlib import Path\nfrom penstock.kernel.document import parse_graph\n\n"
        f"graph = parse_graph(Path({agent!r}).read_text())\n"
    )
    ended = penstock("run", "made.py", "--models", "mine.py:models", "--input", '"hello"')
    assert (ended.code, ended.out.splitlines()[-1]) == (0, "agent: heard hello")


def test_a_graph_without_an_id_is_called_as_its_file_is(penstock: Penstock) -> None:
    ended = penstock("run", write_agent(model="example"), "--input", '"hello"', "--max-cost", "0")
    assert ended.code == 3
    assert "of 'agent'" in ended.err


@pytest.mark.requirement("X-13")
@pytest.mark.parametrize("target", ["helper.py:agent", "helper.py"])
def test_an_agent_in_python_runs_on_the_input_like_a_graph(directory: Path, penstock: Penstock, target: str) -> None:
    (directory / "helper.py").write_text(
        "from mine import depth, models\nfrom penstock.agents.agent import Agent\n"
        "agent = Agent(models['diver'], 'Be brief.', [depth], name='helper')\n"
    )
    ended = penstock("run", target, "--input", "how deep is it?")
    assert (ended.code, ended.out) == (0, "helper: deep enough\n")
    assert "✓ tool helper/helper/depth" in ended.err
    halted = penstock("run", target, "--input", "how deep is it?", "--max-steps", "1", "--json")
    assert (halted.code, json.loads(halted.out)["status"]) == (3, "halted")


@pytest.mark.requirement("X-13")
def test_missing_agent_in_python_is_named_with_the_closest_one(directory: Path, penstock: Penstock) -> None:
    (directory / "helper.py").write_text(
        "from mine import models\nfrom penstock.agents.agent import Agent\nagent = Agent(models['mine'])\nnumber = 7\n"
    )
    ended = penstock("run", "helper.py:agnt")
    assert ended.code == 64
    assert "helper.py has no attribute 'agnt'; did you mean 'agent'? its graphs and agents are: agent" in ended.err
    ended = penstock("run", "helper.py:number")
    assert (ended.code, "helper.py:number is of type int; it must be a Graph, an Agent" in ended.err) == (64, True)


@pytest.mark.requirement("X-13")
@pytest.mark.parametrize(
    ("approve", "done"), [(["--approve", "all"], True), (["--approve", "none"], False), ([], False)], ids=str
)
def test_tools_of_an_agent_in_python_are_approved_like_those_of_a_graph(
    directory: Path, penstock: Penstock, approve: list[str], done: bool
) -> None:
    (directory / "digger.py").write_text(
        "from pathlib import Path\nfrom penstock.agents import Agent, ScriptedModel, Tool, ToolCall\n"
        "def dig():\n    Path('dug').touch()\n"
        "model = ScriptedModel([ToolCall('1', 'dig', {}), 'so be it'])\n"
        "agent = Agent(model, tools=[Tool(dig, needs_approval=True)])\n"
    )
    ended = penstock("run", "digger.py:agent", *approve)
    assert (ended.code, ended.out) == (0, "agent: so be it\n")
    assert (directory / "dug").exists() == done
    assert ("? May dig run?" in ended.err) == bool(approve)
