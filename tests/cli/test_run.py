"""`penstock run`: what it runs, what it prints, how it ends."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from penstock.cli.run_command import LIMITS
from tests.cli.conftest import Penstock

GRAPH = """
import os
from penstock.flow.graph import Graph
from penstock.flow.node import FunctionNode


async def outline(context):
    print("printed by a step")
    return {"about": context.input}


async def draft(context):
    for turn in range(2):
        await context.atool(str, turn, name="think", cost_hint_usd=0.01)
    return "line one\\nline two"


async def review(context):
    return {1}


graph = Graph("story")
graph.add_step(FunctionNode("outline", outline), "outline")
graph.add_step(FunctionNode("draft", draft), "draft", depends_on=["outline"])
graph.add_step(FunctionNode("review", review), "review", depends_on=["draft"])
"""

FAILING = GRAPH.replace("    return {1}", "    raise ValueError('no ending')")


@pytest.fixture(autouse=True)
def story(directory: Path) -> Path:
    path = directory / "story.py"
    path.write_text(GRAPH)
    return path


def document(text: str) -> dict[str, object]:
    read: dict[str, object] = json.loads(text)
    return read


def test_results_go_to_standard_output_and_progress_to_standard_error(penstock: Penstock) -> None:
    ended = penstock("run", "story.py", "--input", '"a dam"')
    assert ended.code == 0
    assert ended.out == 'outline: {"about": "a dam"}\ndraft:\n  line one\n  line two\nreview: [1]\n'
    assert "✓ tool draft/think · $0.01" in ended.err
    assert "✓ completed\n  cost $0.02 · 5 steps · " in ended.err
    assert "printed by a step" in ended.err


def test_json_is_one_document_and_nothing_else(penstock: Penstock) -> None:
    ended = penstock("run", "story.py:graph", "--input", "1", "--max-cost", "0.50", "--json")
    read = document(ended.out)
    assert list(read) == ["status", "results", "stop", "error", "errors", "skipped", "usage", "trace", "run_id"]
    assert read["status"] == "ok"
    assert read["results"] == {"outline": {"about": 1}, "draft": "line one\nline two", "review": [1]}
    usage = read["usage"]
    assert isinstance(usage, dict)
    assert (usage["cost_usd"], usage["steps"], usage["limits"]["cost_usd"]) == (0.02, 5, 0.5)
    assert read["trace"]["chain_id"] == read["run_id"]  # type: ignore[index]


def test_failed_step_exits_with_2_and_shows_its_location(penstock: Penstock, story: Path) -> None:
    story.write_text(FAILING)
    ended = penstock("run", "story.py")
    line = FAILING[: FAILING.index("raise ValueError")].count("\n") + 1
    assert ended.code == 2
    assert f"✗ failed: ValueError: no ending (story.py, line {line})\n" in ended.err
    assert ended.out.startswith("outline: ")
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("code", ["", "0", "3", "'a word'"])
def test_a_step_that_ends_the_program_has_failed_whatever_code_it_asks_for(
    penstock: Penstock, story: Path, code: str
) -> None:
    story.write_text(GRAPH.replace("    return {1}", f"    raise SystemExit({code})"))
    ended = penstock("run", "story.py", "--json")
    read = document(ended.out)
    assert (ended.code, read["status"], read["stop"]) == (2, "failed", None)
    assert read["error"]["type"] == "SystemExit"  # type: ignore[index]
    assert list(read["results"]) == ["outline", "draft"]  # type: ignore[call-overload]


def test_a_failure_is_in_the_document_with_the_results_before_it(penstock: Penstock, story: Path) -> None:
    story.write_text(FAILING)
    read = document(penstock("run", "story.py", "--json").out)
    assert read["status"] == "failed"
    assert read["error"]["type"] == "ValueError"  # type: ignore[index]
    assert list(read["results"]) == ["outline", "draft"]  # type: ignore[call-overload]
    assert read["errors"] == {}  # the error that ended the run is not repeated


@pytest.mark.parametrize(
    ("option", "limit", "reason"),
    [
        ("--max-steps", "2", "step_limit_exceeded"),
        ("--max-cost", "0.015", "budget_exceeded"),
        ("--max-cost", "0", "budget_exceeded"),
        ("--timeout", "0", "timeout"),
    ],
)
def test_a_limit_is_3_and_named(penstock: Penstock, option: str, limit: str, reason: str) -> None:
    ended = penstock("run", "story.py", option, limit)
    assert ended.code == 3
    assert f"■ halted: {reason}: " in ended.err
    read = document(penstock("run", "story.py", option, limit, "--json").out)
    assert (read["status"], read["stop"]["reason"]) == ("halted", reason)  # type: ignore[index]


def test_a_graph_that_collects_is_run_to_its_end_and_has_failed_if_a_step_has(penstock: Penstock, story: Path) -> None:
    story.write_text(
        FAILING.replace('Graph("story")', 'Graph("story", settle="collect")')
        + "graph.step(FunctionNode('after', review), 'after', depends_on=['review'])\n"
    )
    ended = penstock("run", "story.py")
    assert ended.code == 2
    assert "✗ review: ValueError: no ending" in ended.err
    assert "  skipped: after\n" in ended.err
    read = document(penstock("run", "story.py", "--json").out)
    assert (list(read["errors"]), read["skipped"]) == (["review"], ["after"])  # type: ignore[call-overload]


def test_a_graph_whose_race_is_won_is_ok_whatever_became_of_the_others(penstock: Penstock, story: Path) -> None:
    raced = FAILING.replace('Graph("story")', 'Graph("story", settle="first", max_parallel=2)')
    story.write_text(raced.replace(', depends_on=["outline"]', "").replace(', depends_on=["draft"]', ""))
    ended = penstock("run", "story.py")
    assert ended.code == 0


def test_input_from_a_file_and_from_standard_input(penstock: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("input.json").write_text('{"n": 1}')
    assert '"about": {"n": 1}' in penstock("run", "story.py", "--input", "@input.json").out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"[1, 2]")))
    assert '"about": [1, 2]' in penstock("run", "story.py", "--input", "-").out


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("{", "--input is not JSON: "),
        ('"a dam', "to pass it as text, quote it as JSON"),
        ("NaN", "NaN is not a JSON number"),
        ("[" * 100_000, "--input is nested too deeply"),
        ("@nowhere.json", "--input: there is no file 'nowhere.json'"),
        ("@.", "--input: '.' is a directory; name a file in it"),
        ("@story.py", "--input @story.py is not JSON: "),
    ],
    ids=lambda given: str(given)[:20],
)
def test_an_input_that_cannot_be_read_is_refused_before_anything_runs(
    penstock: Penstock, given: str, expected: str
) -> None:
    ended = penstock("run", "story.py", "--input", given)
    assert (ended.code, ended.out) == (64, "")
    assert expected in ended.err
    assert len(ended.err.splitlines()) == 1


def test_standard_input_that_is_closed_is_refused(penstock: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert "standard input is closed" in penstock("run", "story.py", "--input", "-").err


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1e999", "x", "", "1_0", "١"])
@pytest.mark.parametrize("option", [*LIMITS, "--max-parallel"])
def test_a_limit_that_is_none_is_refused_by_its_option(penstock: Penstock, option: str, value: str) -> None:
    ended = penstock("run", "story.py", f"{option}={value}")
    assert (ended.code, ended.out) == (64, "")
    assert ended.err.startswith(f"penstock: {option} must be ")
    assert len(ended.err.splitlines()) == 1


@pytest.mark.parametrize("option", [*LIMITS, "--max-parallel"])
def test_a_limit_may_have_spaces_around_it(penstock: Penstock, option: str) -> None:
    assert penstock("run", "story.py", option, " 60 ").code == 0


def test_an_invalid_graph_is_2_with_its_problems_also_in_the_document(penstock: Penstock) -> None:
    Path("flow.json").write_text(
        '{"nodes": [{"id": "a", "type": "nothing", "position": {"x": 0, "y": 0}, "data": {}}], "edges": []}'
    )
    ended = penstock("run", "flow.json", "--json")
    assert ended.code == 2
    assert "unknown_type  $.nodes[0].type  no executor is registered for type 'nothing'" in ended.err
    assert "name the executors of these types with --executors module:name" in ended.err
    read = document(ended.out)
    assert (read["status"], read["run_id"], read["results"]) == ("failed", None, {})
    assert read["error"]["problems"][0]["code"] == "unknown_type"  # type: ignore[index]


def test_values_that_are_not_json_are_shown_by_their_repr_and_cut(penstock: Penstock, story: Path) -> None:
    story.write_text(GRAPH.replace("    return {1}", "    return [object, 'x' * 200_000, float('nan')]"))
    ended = penstock("run", "story.py")
    assert "<class 'object'>" in ended.out
    assert len(ended.out) < 6_000
    assert "more characters; --json shows them" in ended.out
    assert len(penstock("run", "story.py", "--json").out) < 200_000


def test_a_result_cannot_steer_the_terminal(penstock: Penstock, story: Path) -> None:
    story.write_text(GRAPH.replace("    return {1}", "    return '\\x1b[2J\\x9b31m\\ttab'"))
    out = penstock("run", "story.py").out
    assert "\x1b" not in out
    assert "\x9b" not in out
    assert "tab" in out


def test_an_abort_from_inside_is_cancelled_130(penstock: Penstock, story: Path) -> None:
    story.write_text(GRAPH.replace("    return {1}", "    context.abort('enough')\n    context.check_cancelled()"))
    ended = penstock("run", "story.py")
    assert ended.code == 130
    assert "■ cancelled: aborted: enough" in ended.err
    assert ended.out.startswith("outline: ")


def test_a_limit_met_inside_a_task_group_is_a_halt_and_not_a_failure(penstock: Penstock, story: Path) -> None:
    grouped = """    import asyncio
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(context.atool(str, 1, name="one", cost_hint_usd=9))"""
    story.write_text(GRAPH.replace("    return {1}", grouped))
    ended = penstock("run", "story.py", "--max-cost", "1")
    assert ended.code == 3
    assert "■ halted: budget_exceeded: " in ended.err


def test_limit_that_a_step_handled_is_reported_and_the_run_completes(penstock: Penstock, story: Path) -> None:
    dealt_with = """    from penstock.errors import Halted
    try:
        await context.atool(str, 1, name="dear", cost_hint_usd=9)
    except Halted:
        return 'did without'"""
    story.write_text(GRAPH.replace("    return {1}", dealt_with))
    ended = penstock("run", "story.py", "--max-cost", "1")
    assert (ended.code, ended.out.splitlines()[-1]) == (0, "review: did without")
    assert "■ on the way: budget_exceeded: " in ended.err


def test_a_graph_inside_a_graph_is_one_result(penstock: Penstock, story: Path) -> None:
    story.write_text(GRAPH + "inner, graph = graph, Graph('outer')\ngraph.add_step(inner, 'inside')\n")
    ended = penstock("run", "story.py", "--json")
    assert document(ended.out)["results"] == {
        "inside": {"outline": {"about": None}, "draft": "line one\nline two", "review": [1]}
    }


def test_max_parallel_holds_whatever_the_graph_says(penstock: Penstock, story: Path) -> None:
    story.write_text("""
import asyncio
from penstock.flow.graph import Graph
from penstock.flow.node import FunctionNode

inside = 0

async def count(context):
    global inside
    inside += 1
    most = inside
    for _ in range(5):
        await asyncio.sleep(0)
        most = max(most, inside)
    inside -= 1
    return most

graph = Graph("wide", max_parallel=4)
for name in "abcd":
    graph.add_step(FunctionNode(name, count), name)
""")
    for given, most in ((["--max-parallel", "2"], 2), ([], 4)):
        results = document(penstock("run", "story.py", "--json", *given).out)["results"]
        assert max(results.values()) == most  # type: ignore[attr-defined]


def test_where_the_stream_has_no_terminal_nothing_moves(penstock: Penstock) -> None:
    assert "\x1b" not in penstock("run", "story.py").err


def test_a_namespace_may_hold_the_graph(penstock: Penstock, story: Path) -> None:
    story.write_text(GRAPH + "from types import SimpleNamespace\nflows = SimpleNamespace(main=graph)\ndel graph\n")
    assert penstock("run", "story.py:flows.main").code == 0
