"""How `make adopt` judges what a framework did, and the model that its probes talk to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.testing.provider import Say, ToolCall, WireRequest
from tools.adopt.judge import Verdict, judge, table
from tools.adopt.probes import TOOL_TIMEOUT_S, Line, use_tools

HOLDS = Line(
    framework="F",
    version="1",
    probe="threads",
    invoice_usd=0.10,
    ledger_usd=0.10,
    ceiling_usd=0.10,
    uncontained=0,
    outcome="BudgetExceededError",
    seconds=1.0,
    note="",
)


TOOL = {"type": "function", "function": {"name": "search", "parameters": {"required": ["query"]}}}


@pytest.mark.requirement("X-11")
@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        (HOLDS, Verdict.HOLDS),
        (replace(HOLDS, invoice_usd=0.40, ledger_usd=0.0), Verdict.LEAKS),
        (replace(HOLDS, invoice_usd=0.40, ledger_usd=0.40), Verdict.LEAKS),
        (replace(HOLDS, ledger_usd=0.08), Verdict.LEAKS),
        (replace(HOLDS, ledger_usd=0.08, uncontained=1), Verdict.REPORTED),
        (replace(HOLDS, invoice_usd=0, ledger_usd=0), Verdict.NOT_TRIED),
        (replace(HOLDS, probe="cancel", outcome="never returned"), Verdict.LATE),
        (replace(HOLDS, probe="tool", seconds=6.1), Verdict.LATE),
        (replace(HOLDS, probe="single", seconds=6.1), Verdict.HOLDS),
        (replace(HOLDS, probe="tool", seconds=TOOL_TIMEOUT_S + 0.1), Verdict.HOLDS),
        (replace(HOLDS, probe="tool", seconds=0.4, outcome="returned"), Verdict.NOT_TRIED),
    ],
)
def test_a_probe_is_judged_by_the_invoice_and_by_the_time(line: Line, verdict: Verdict) -> None:
    assert judge(line) is verdict


def test_the_table_shows_what_leaks_and_what_was_not_tried() -> None:
    leaks = replace(HOLDS, invoice_usd=0.40, ledger_usd=0)
    single = replace(HOLDS, probe="single", invoice_usd=0, ledger_usd=0, outcome="ClientError")
    rows = table({"f": ([single, leaks], ""), "g": ([], "not installed: no such package")}).splitlines()
    assert rows[2].startswith("| F 1 | not tried (ClientError) | – | **leaks $0.40** |")
    assert rows[3].startswith("| g: not installed: no such package | – |")


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        (HOLDS, "BudgetExceededError"),
        (
            replace(HOLDS, outcome="ClientError", note="caused by Halted; 1 requests not in the tree"),
            "ClientError, caused by Halted",
        ),
        (replace(HOLDS, outcome="ClientError", note="some text"), "ClientError"),
        (replace(HOLDS, outcome="returned"), "no error"),
    ],
)
def test_the_last_column_is_what_the_program_gets_at_the_ceiling(line: Line, seen: str) -> None:
    [_, _, row] = table({"f": ([replace(line, probe="ceiling")], "")}).splitlines()
    assert row.endswith(f"| {seen} |")


@pytest.mark.parametrize(
    ("line", "cell"),
    [
        (replace(HOLDS, outcome="CancelledError"), "1.0 s"),
        (replace(HOLDS, outcome="RuntimeError", note="caused by CancelledError"), "1.0 s"),
        (replace(HOLDS, outcome="AttributeError", note="no attribute 'generations'"), "1.0 s, AttributeError"),
        (replace(HOLDS, outcome="returned"), "1.0 s, returned"),
        (replace(HOLDS, outcome="never returned"), "**never returned**"),
    ],
)
def test_a_cancel_that_reaches_the_program_as_another_error_is_shown(line: Line, cell: str) -> None:
    [_, _, row] = table({"f": ([replace(line, probe="cancel_async")], "")}).splitlines()
    assert f"| {cell} |" in row


def test_the_model_calls_a_tool_once_and_then_answers() -> None:
    def request(*messages: dict[str, str]) -> WireRequest:
        return WireRequest(1, 1, "POST", "/", {}, 0, body={"tools": [TOOL], "messages": list(messages)})

    assert use_tools(request({"role": "user"})) == Say(tool_calls=(ToolCall("search", {"query": "dams"}),))
    assert use_tools(request({"role": "user"}, {"role": "tool"})) == Say("done")


@pytest.mark.parametrize("parameters", ["parameters", "parametersJsonSchema", "parameters_json_schema"])
def test_the_model_calls_a_tool_of_gemini_once_and_then_answers(parameters: str) -> None:
    schema = {"type": "OBJECT", "properties": {"query": {"type": "STRING"}, "top": {"type": "INTEGER"}}}
    search = {"name": "search", parameters: {**schema, "required": ["query", "top"]}}
    question = {"role": "user", "parts": [{"text": "dams?"}]}
    answered = {"role": "user", "parts": [{"functionResponse": {"name": "search", "response": {"result": "none"}}}]}

    def request(*contents: dict[str, Any]) -> WireRequest:
        body = {"tools": [{"functionDeclarations": [search]}], "contents": list(contents)}
        return WireRequest(1, 1, "POST", "/", {}, 0, body=body)

    assert use_tools(request(question)) == Say(tool_calls=(ToolCall("search", {"query": "dams", "top": 1}),))
    assert use_tools(request(question, answered)) == Say("done")
