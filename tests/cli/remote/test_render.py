"""Runs and events as lines: what is shown, in as few words as it takes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.cli.remote.render import about, advice_for, differences, table, took, used_by
from penstock.cli.render.call_tree import describe_call
from penstock.cli.render.events import RunEvent, event_line
from penstock.cli.render.text import bill, dollars, short

RUN: dict[str, Any] = {
    "id": "r1",
    "status": "halted",
    "graph_id": "g",
    "graph_version": 2,
    "owner": "ann\x1b[31m",
    "started_ms": 1_000,
    "ended_ms": 3_500,
    "cost_usd": 0.25,
    "unresolved_usd": 0.125,
    "tokens_in": 1_200,
    "tokens_out": 1,
    "limits": {"max_cost_usd": "0.50", "max_tokens": 9},
    "stop_reason": "budget_exceeded",
    "error": "no more",
    "output": None,
}


def line(kind: str, /, **data: Any) -> str:
    return "".join(text for text, _ in event_line(RunEvent(7, kind, data))).rstrip()


def test_run_is_shown_with_its_usage_and_limits() -> None:
    lines = ["".join(text for text, _ in line) for line in about(RUN)]
    assert lines == [
        "r1  halted",
        "graph    g, version 2",
        "owner    ann\N{REPLACEMENT CHARACTER}[31m",
        "took     2.5 s",
        "cost     $0.25 of $0.50, and $0.125 held for unresolved calls",
        "tokens   1,200 in, 1 out of 9",
        "stopped  budget_exceeded: no more",
        "→ raise the limit with: penstock runs grant r1 --max-cost USD",
    ]


@pytest.mark.parametrize(
    ("changed", "advice"),
    [
        ({"status": "completed"}, ""),
        ({"status": "parked"}, "it resumes when a server starts with its database"),
        (
            {"status": "halted", "stop_reason": "timeout"},
            "raise the limit with: penstock runs grant r1 --timeout SECONDS",
        ),
        (
            {"status": "halted", "stop_reason": "circuit_open"},
            "resume it from its journal with: penstock runs resume r1",
        ),
        (
            {"stop_reason": "price_unknown", "halted_by": None},
            "restart the server with --prices that include its model, then resume it with: penstock runs resume r1",
        ),
        (
            {"status": "failed", "stop_reason": None, "error": "ToolError: JournalMissing"},
            "resume it from its journal with: penstock runs resume r1",
        ),
        (
            {"status": "failed", "stop_reason": None, "error": "JournalMissing: run 'r1' has no record of 'a'"},
            "a replay makes no calls, and a result is missing from the journal; "
            "start a new run with: penstock runs start g",
        ),
        ({"status": "waiting"}, "it is answered, and resumes when a server claims it"),
        (
            {"stop_reason": "step_limit_exceeded", "halted_by": {"whose": "run", "budget": "main", "node_id": "a"}},
            "raise the limit with: penstock runs grant r1 --max-steps N",
        ),
        (
            {"halted_by": {"whose": "owner", "budget": "user:ann:2026-01-01", "node_id": "my writer"}},
            "restart the server with a higher --user-daily, then: penstock runs resume r1; "
            "or fork it on another day: penstock runs fork r1 --at 'my writer'",
        ),
        (
            {
                "halted_by": {"whose": "owner", "budget": "user:ann:2026-01-01", "node_id": "a"},
                "advice": [{"step": "resolve_bills", "message": "", "amount_usd": 0.4}],
                "unresolved_usd": 0,
            },
            "unresolved bills of other runs hold $0.40 of it (GET /api/bills lists them): resolve them with: "
            "penstock runs bills RUN, then: penstock runs resume r1; "
            "or restart the server with a higher --user-daily, then: penstock runs resume r1; "
            "or fork it on another day: penstock runs fork r1 --at a",
        ),
        (
            {"halted_by": {"whose": "all", "budget": "all:2026-01-01", "node_id": None}},
            "restart the server with a higher --daily, then: penstock runs resume r1; "
            "or fork it on another day: penstock runs fork r1 --at NODE",
        ),
        (
            {"halted_by": {"whose": "node", "budget": "a", "unit": "usd", "limit": 0.05, "node_id": "a"}},
            "raise the $0.05 of 'a' in graph g and start a new run; a grant cannot raise it",
        ),
        (
            {"halted_by": {"whose": "node", "budget": "Bot\x1b\ud800", "unit": "tokens", "limit": 1e6, "node_id": "a"}},
            "raise the 1,000,000 tokens of 'Bot\\x1b\\ud800' (node 'a') in graph g and start a new run; "
            "a grant cannot raise it",
        ),
        (
            {"stop_reason": "timeout", "halted_by": {"whose": "node", "budget": "a", "unit": "seconds", "limit": 0.5}},
            "try again with: penstock runs resume r1; "
            "or raise the 0.5 s of 'a' in graph g and start a new run; a grant cannot raise it",
        ),
        (
            {"halted_by": {"whose": "node", "budget": "a", "unit": None, "limit": None}},
            "raise the limit of 'a' in graph g and start a new run; a grant cannot raise it",
        ),
    ],
)
def test_advice_depends_on_the_status_of_the_run(changed: dict[str, Any], advice: str) -> None:
    assert advice_for({**RUN, **changed}) == advice


CALL = {"tool": "send_mail", "arguments": {"to": "ann@example.org", "text": "x" * 300}}


@pytest.mark.parametrize(
    ("value", "about_it", "other"),
    [
        (None, [], "another value"),
        ("Two\nlines\x1b[2J", ["value:", "  Two", "  lines\N{REPLACEMENT CHARACTER}[2J"], "another value"),
        ({"tool": "t", "arguments": {}}, ['value: {"tool": "t", "arguments": {}}'], "other arguments"),
    ],
)
def test_value_is_shown_below_its_question(value: Any, about_it: list[str], other: str) -> None:
    question = {"run_id": "r1", "question": "May it?", "value": value}
    lines = text_of(about({**RUN, "status": "waiting"}, [question], at=" --url u"))
    assert lines[lines.index("question May it?") + 1 : -1] == [f"         {line}" for line in about_it]
    assert lines[-1] == (
        "→ approve with: penstock runs answer r1 yes --url u; reject with no; "
        f"use yes --edit JSON to continue with {other}"
    )


def test_arguments_of_a_call_are_complete_in_its_question() -> None:
    question = {"run_id": "r1", "question": "May send_mail run?", "value": CALL}
    shown = text_of(about({**RUN, "status": "waiting"}, [question]))
    assert any("x" * 300 in line for line in shown)
    assert line("approval.requested", approval=question) == (
        f"     7  approval.requested May send_mail run? · {json.dumps(CALL)}"
    )
    assert line("approval.requested", approval={**question, "value": None}).endswith(" May send_mail run?")
    long = text_of(about({**RUN, "status": "waiting"}, [{**question, "value": "y" * 5_000}], at=" --url u"))
    assert "           … 1000 more characters; shown by: penstock runs show r1 --url u --json" in long


def test_unresolved_holds_are_shown_wherever_the_cost_is() -> None:
    assert "  $0.25, $0.125 held  " in text_of(table([RUN]))[1]
    assert "  ≥ $0.25, $0.125 held  " in text_of(table([{**RUN, "status": "running"}]))[1]
    assert bill(RUN) == "$0.25, $0.125 held · 1,201 tokens"
    assert line("run.completed", output="x", cost_usd=0.5, unresolved_usd=0.1).endswith(
        " x · $0.50, $0.10 held · 0 tokens"
    )


def test_a_list_of_runs_stays_a_table_whatever_their_owners_are_called() -> None:
    run = {**RUN, "owner": "a \n \n b"}
    heads, row = text_of(table([run], has_owners=True))
    assert row.index("g@2") == heads.index("GRAPH")


def test_events_are_described() -> None:
    call = {"kind": "llm", "name": "m", "status": "success", "cost_usd": 0.000018, "tokens_in": 1, "tokens_out": 0}
    assert describe_call(call, None) == "✓ llm m · $0.000018 · 1 token"
    assert describe_call({**call, "replayed": True}, None).endswith(" · from the journal")
    assert line("node.error", node_id="a", node_type="t", error="ToolError", message="no") == (
        "     7  node.error         a ToolError: no"
    )
    assert line("run.cancelled", reason="enough", cause="user", cost_usd=0, tokens_in=0, tokens_out=0) == (
        "     7  run.cancelled      enough · $0.00 · 0 tokens"
    )
    assert line("run.resumed", epoch=2, replayed=3) == '     7  run.resumed        {"epoch": 2, "replayed": 3}'
    assert line("something.new", what=[1]) == '     7  something.new      {"what": [1]}'
    assert line("run.queued") == "     7  run.queued"
    assert line("node.error", error="GraphInvalid", message="1 problem(s):\n  [x] y").endswith("1 problem(s): [x] y")


def test_what_calls_have_used_leaves_out_what_was_paid_before() -> None:
    call = {"cost_usd": 0.1, "tokens_in": 3, "tokens_out": 1}
    assert used_by([call, {**call, "replayed": True}, call, call, {}]) == {
        "cost_usd": 0.3,
        "tokens_in": 9,
        "tokens_out": 3,
        "unknown_costs": 0,
    }
    assert used_by([]) == {"cost_usd": 0, "tokens_in": 0, "tokens_out": 0, "unknown_costs": 0}
    lines = ["".join(text for text, _ in line) for line in about({**RUN, "status": "waiting"}, (), used_by([call]))]
    assert "cost     $0.10 so far of $0.50, and $0.125 held for unresolved calls" in lines
    assert "tokens   3 in, 1 out so far of 9" in lines


def text_of(lines: Any) -> list[str]:
    return ["".join(text for text, _ in line) for line in lines]


def test_calls_of_unknown_cost_are_shown_as_penstock_run_shows_them() -> None:
    run = {**RUN, "unknown_costs": 2, "unresolved_usd": 0}
    assert text_of(about(run))[4:6] == [
        "cost     at least $0.25 of $0.50, 2 calls unknown",
        "warning  the cost of 2 calls is unknown and not limited",
    ]
    assert "at least $0.25, 2 calls unknown" in text_of(table([run]))[1]
    assert "at least $0.25, 1 call unknown " in text_of(table([{**run, "status": "parked", "unknown_costs": 1}]))[1]
    assert bill({**run, "tokens_in": 0}) == "at least $0.25, 2 calls unknown · 1 token"
    ended = {"kind": "llm", "name": "m", "status": "success", "cost_usd": None, "tokens_in": 4, "tokens_out": 1}
    assert describe_call(ended, None) == "✓ llm m · cost unknown · 5 tokens"
    assert line("run.completed", output="x", cost_usd=0, unknown_costs=1).endswith(" x · unknown (1 call) · 0 tokens")
    so_far = used_by([ended, {**ended, "replayed": True}, {**ended, "cost_usd": 0.5}])
    assert so_far == {"cost_usd": 0.5, "tokens_in": 8, "tokens_out": 2, "unknown_costs": 1}
    assert text_of(about({**run, "status": "running"}, (), so_far))[4:6] == [
        "cost     at least $0.50 so far of $0.50, 1 call unknown",
        "warning  the cost of 1 call is unknown and not limited",
    ]
    same = {"run": {**run, "unknown_costs": 0}, "events": []}
    assert list(differences(same, {**same, "run": run})) == [("cost", "$0.25", "at least $0.25, 2 calls unknown")]


def test_amounts_are_as_exact_as_they_are() -> None:
    assert [dollars(one) for one in (None, 0, 1, 0.5, 1.77e-05)] == ["$0.00", "$0.00", "$1.00", "$0.50", "$0.0000177"]
    assert bill({}) == "$0.00 · 0 tokens"
    assert [took({}), took({"started_ms": 5}), took({"started_ms": 5, "ended_ms": 4})] == [
        "not started",
        "not ended",
        "0.0 s",
    ]


def test_what_is_long_is_cut_and_stays_on_one_line() -> None:
    assert short("a\n b\u2028c\x00") == "a b c\N{REPLACEMENT CHARACTER}"
    assert len(short("x" * 1_000)) == 160
    assert short({"ä": None}) == '{"ä": null}'


def test_runs_differ_in_what_came_of_them_and_not_in_where_it_came_from() -> None:
    def exported(cost: float, **data: Any) -> dict[str, Any]:
        event = {"type": "node.completed", "data": {"node_id": "a", "node_type": "t", **data}}
        return {"run": {**RUN, "cost_usd": cost}, "events": [event]}

    assert list(differences(exported(1, outputs=1), exported(1, outputs=1, replayed=True))) == []
    assert list(differences(exported(1), exported(2))) == [("cost", "$1.00, $0.125 held", "$2.00, $0.125 held")]
    assert list(differences({**exported(1), "events": []}, exported(1))) == [
        ("node a", "did not run", {"status": "completed"})
    ]
