"""How `make adopt` judges a framework, and the model that its probes talk to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.testing.provider import Say, ToolCall, WireRequest
from tools.adopt.judge import Verdict, judge, table
from tools.adopt.probes import Line, use_tools

HELD = Line("LangGraph", "1.2", "fanout", 0.10, 0.10, 0.10, 0, "BudgetExceededError", 1.0)
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"required": ["query"]}}}


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        (HELD, Verdict.HOLDS),
        (replace(HELD, invoice_usd=0.40), Verdict.LEAKS),
        (replace(HELD, ledger_usd=0.0), Verdict.LEAKS),
        (replace(HELD, invoice_usd=0.40, uncontained=20), Verdict.REPORTED),
        (replace(HELD, probe="cancel", outcome="never returned", seconds=25.0), Verdict.LATE),
        (replace(HELD, probe="tool", seconds=6.1), Verdict.LATE),
        (replace(HELD, probe="single", seconds=6.1), Verdict.HOLDS),
        (replace(HELD, invoice_usd=0.0, ledger_usd=0.0, outcome="NotFoundError"), Verdict.NOT_TRIED),
    ],
)
def test_a_line_is_judged_by_its_invoice_and_its_time(line: Line, verdict: Verdict) -> None:
    assert judge(line) is verdict


def test_the_table_has_a_row_per_framework_and_says_why_one_is_missing() -> None:
    rows = table({"langgraph": ([HELD, replace(HELD, probe="threads", invoice_usd=0.4)], ""), "adk": ([], "no wheel")})
    _, _, langgraph, adk = rows.splitlines()
    assert langgraph.startswith("| LangGraph 1.2 | – | – | **leaks $0.40** | $0.10 |")
    assert adk.startswith("| adk: no wheel | – |")


def test_the_model_calls_a_tool_once_and_then_answers() -> None:
    def request(*messages: dict[str, str]) -> WireRequest:
        return WireRequest(1, 1, "POST", "/", {}, 0, body={"tools": [TOOL], "messages": list(messages)})

    assert use_tools(request({"role": "user"})) == Say(tool_calls=(ToolCall("search", {"query": "dams"}),))
    assert use_tools(request({"role": "user"}, {"role": "tool"})) == Say("done")
