"""The example graphs run end to end on the command line, on models that are scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.kernel.document import parse_graph
from penstock.kernel.executor import ExecutorRegistry
from penstock.kernel.validate import validate

EXAMPLES = Path(__file__).parents[2] / "examples" / "graphs"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.json"))


def run(capsys: pytest.CaptureFixture[str], name: str, *options: str) -> tuple[int, Any]:
    code = main(["run", str(EXAMPLES / f"{name}.json"), "--json", *options])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_valid_with_what_is_installed(name: str) -> None:
    graph = parse_graph((EXAMPLES / f"{name}.json").read_bytes())
    assert validate(graph, ExecutorRegistry.from_entry_points()) == []


@pytest.mark.requirement("K-12")
def test_research_is_a_pipeline_whose_first_agent_has_an_agent_as_a_tool(capsys: pytest.CaptureFixture[str]) -> None:
    code, ended = run(capsys, "research", "--input", '"How high?"')
    assert (code, ended["status"]) == (0, "ok")
    assert ended["results"] == {
        "question": "How high?",
        "researcher": "Hoover Dam is 221 m high, says the almanac.",
        "prompt": "Make one line of this: Hoover Dam is 221 m high, says the almanac.",
        "writer": "Hoover Dam: 221 m.",
    }


def test_review_loops_until_its_condition_holds(capsys: pytest.CaptureFixture[str]) -> None:
    code, ended = run(capsys, "review")
    assert code == 0
    assert ended["results"]["result"] == {"draft": "A dam holds water, and so does this draft.", "approved": True}


def test_sort_goes_through_a_list_and_takes_a_branch_for_each_item(capsys: pytest.CaptureFixture[str]) -> None:
    dams = [{"name": "Aswan", "metres": 111}, {"name": "Hoover", "metres": 221}, {"name": "Mosul", "metres": 113}]
    code, ended = run(capsys, "sort", "--input", json.dumps(dams))
    assert code == 0
    assert ended["results"]["report"] == ["Dams", ["Aswan is low", "Hoover is high: 221 m", "Mosul is low"]]


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_halted_by_a_limit(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, ended = run(capsys, name, "--max-steps", "3")
    assert (code, ended["status"]) == (3, "halted")
