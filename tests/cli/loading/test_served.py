"""What a server loads: each target on its own, code once for all targets in it, and anew when it is loaded again."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.loading.served import folders_of, load_again, load_served, snapshot
from penstock.flow.graph import Graph
from penstock.kernel.graph import Problem

pytestmark = pytest.mark.requirement("X-13")

TWO = """
from penstock import Graph
from penstock.agents import Agent, ScriptedModel
from penstock.kernel.graph import GraphSpec, NodeSpec
from helper import WORD

with open("imports.log", "a") as file:
    file.write("x")

graph = Graph("flow")
graph.step(lambda context: WORD, WORD)
agent = Agent(ScriptedModel([WORD]), name="speaker")
spec = GraphSpec((NodeSpec("a", "text", {"text": WORD}),), (), "drawn")


def make():
    made = Graph("made")
    made.step(lambda context: WORD, "only")
    return made
"""


def no_problems(document: Mapping[str, Any]) -> Sequence[Problem]:
    return ()


@pytest.fixture(autouse=True)
def files(directory: Path) -> Path:
    (directory / "two.py").write_text(TWO)
    (directory / "helper.py").write_text("WORD = 'one'\n")
    return directory


def test_module_of_several_targets_is_imported_once(files: Path) -> None:
    served = load_served(["two.py:graph", "two.py:agent", "two.py:spec", "two.py:make"])
    assert [*served.files] == ["flow", "speaker", "drawn", "made"]
    assert {name: program.kind for name, program in served.programs.items()} == {
        "flow": "graph",
        "speaker": "agent",
        "made": "graph",
    }
    assert (served.refused, (files / "imports.log").read_text()) == ([], "x")


def test_two_files_of_one_name_are_two_modules(files: Path) -> None:
    for folder in ("a", "b"):
        (files / folder).mkdir()
        (files / folder / "app.py").write_text(
            f"from penstock import Graph\ngraph = Graph('{folder}')\ngraph.step(print)\n"
        )
    assert [*load_served(["a/app.py", "b/app.py"]).files] == ["a", "b"]


def test_target_that_is_named_twice_is_served_once_and_reported(files: Path) -> None:
    (files / "flows").mkdir()
    (files / "flows" / "drawing.json").write_text('{"id": "drawing", "nodes": [], "edges": []}')
    served = load_served(["two.py:graph", "./two.py:graph", "flows", "flows/drawing.json"])
    assert [*served.files] == ["flow", "drawing"]
    assert [str(refused) for refused in served.refused] == [
        "./two.py:graph is named twice; name it once",
        "flows/drawing.json is named twice; name it once",
    ]


def test_loading_again_imports_neighbours_anew_and_old_programs_keep_theirs(files: Path) -> None:
    old = load_served(["two.py:graph"]).programs["flow"].target
    (files / "helper.py").write_text("WORD = 'two'\n")
    new = load_again(["two.py:graph"], no_problems).programs["flow"].target
    assert isinstance(old, Graph)
    assert isinstance(new, Graph)
    steps = [program.execution_order() for program in (old, new)]
    assert steps == [["one"], ["two"]]
    assert [program._steps[name].node.fn(None) for program, (name,) in zip((old, new), steps, strict=True)] == [
        "one",
        "two",
    ]


def test_modules_that_cannot_be_loaded_again_stay_loaded(files: Path) -> None:
    load_served(["two.py:graph"])
    helper = sys.modules["helper"]
    (files / "two.py").write_text("1 / 0\n")
    served = load_again(["two.py:graph"], no_problems)
    assert [str(refused) for refused in served.refused] == [
        "two.py:graph: two.py cannot be imported: ZeroDivisionError: division by zero (two.py, line 1)"
    ]
    assert sys.modules["helper"] is helper


def test_snapshot_covers_programs_their_neighbours_and_graphs_in_json(files: Path) -> None:
    (files / "flows").mkdir()
    (files / "flows" / "flow.json").write_text("{}")
    targets = ["two.py:graph", "flows"]
    load_served(targets)
    before = snapshot(targets, folders_of(targets))
    assert sorted(path.name for path in before) == ["flow.json", "helper.py", "two.py"]  # each of them once
    (files / "flows" / "flow.json").write_text("{ }")
    (files / "flows" / "new.json").write_text("{}")
    now = snapshot(targets, folders_of(targets))
    assert {path.name for path in now if now[path] != before.get(path)} == {"flow.json", "new.json"}
