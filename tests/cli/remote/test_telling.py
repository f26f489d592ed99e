"""Runs and events as lines: what is shown, in as few words as it takes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.cli.remote.telling import (
    about,
    advice_for,
    bill,
    differing,
    dollars,
    event_line,
    short,
    table,
    took,
    used_by,
)

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


def said(kind: str, /, **data: Any) -> str:
    return "".join(text for text, _ in event_line(7, kind, data)).rstrip()


def test_a_run_is_told_with_what_it_used_of_what_it_may() -> None:
    lines = ["".join(text for text, _ in line) for line in about(RUN)]
    assert lines == [
        "r1  halted",
        "graph    g, version 2",
        "owner    ann\N{REPLACEMENT CHARACTER}[31m",
        "took     2.5 s",
        "cost     $0.25 of $0.50, and $0.125 held for calls whose bill nobody knows",
        "tokens   1,200 in, 1 out of 9",
        "stopped  budget_exceeded: no more",
        "→ penstock runs grant r1 --max-cost USD lets it go on",
    ]


@pytest.mark.parametrize(
    ("changed", "advice"),
    [
        ({"status": "completed"}, ""),
        ({"status": "parked"}, "it goes on when a server starts that has its database"),
        ({"status": "halted", "stop_reason": "timeout"}, "penstock runs grant r1 --timeout SECONDS lets it go on"),
        (
            {"status": "halted", "stop_reason": "circuit_open"},
            "penstock runs resume r1 tries again from what it has recorded",
        ),
        (
            {"stop_reason": "price_unknown", "halted_by": None},
            "penstock runs resume r1 lets it go on when the server is started "
            "with --prices that have one for its model",
        ),
        (
            {"status": "failed", "stop_reason": None, "error": "ToolError: JournalMissing"},
            "penstock runs resume r1 tries again from what it has recorded",
        ),
        (
            {"status": "failed", "stop_reason": None, "error": "JournalMissing: run 'r1' has no record of 'a'"},
            "a replay calls nothing, and what is missing was never recorded: penstock runs start g runs it anew",
        ),
        ({"status": "waiting"}, "it is answered, and goes on as soon as a server takes it up"),
        (
            {"stop_reason": "step_limit_exceeded", "halted_by": {"whose": "run", "budget": "main", "node_id": "a"}},
            "penstock runs grant r1 --max-steps N lets it go on",
        ),
        (
            {"halted_by": {"whose": "owner", "budget": "user:ann:2026-01-01", "node_id": "my writer"}},
            "penstock runs resume r1 lets it go on when the server is started with more --user-daily; "
            "or, on another day, penstock runs fork r1 --at 'my writer'",
        ),
        (
            {"halted_by": {"whose": "all", "budget": "all:2026-01-01", "node_id": None}},
            "penstock runs resume r1 lets it go on when the server is started with more --daily; "
            "or, on another day, penstock runs fork r1 --at NODE",
        ),
        (
            {"halted_by": {"whose": "node", "budget": "a", "unit": "usd", "limit": 0.05, "node_id": "a"}},
            "no grant raises the $0.05 of 'a': give it more in graph g, and start a new run",
        ),
        (
            {"halted_by": {"whose": "node", "budget": "Bot\x1b\ud800", "unit": "tokens", "limit": 1e6, "node_id": "a"}},
            "no grant raises the 1,000,000 tokens of 'Bot\\x1b\\ud800' (node 'a'): "
            "give it more in graph g, and start a new run",
        ),
        (
            {"stop_reason": "timeout", "halted_by": {"whose": "node", "budget": "a", "unit": "seconds", "limit": 0.5}},
            "penstock runs resume r1 tries again; no grant raises the 0.5 s of 'a': "
            "give it more in graph g, and start a new run",
        ),
        (
            {"halted_by": {"whose": "node", "budget": "a", "unit": None, "limit": None}},
            "no grant raises the limit of 'a': give it more in graph g, and start a new run",
        ),
    ],
)
def test_what_to_do_depends_on_how_it_stands(changed: dict[str, Any], advice: str) -> None:
    assert advice_for({**RUN, **changed}) == advice


CALL = {"tool": "send_mail", "arguments": {"to": "ann@example.org", "text": "x" * 300}}


@pytest.mark.parametrize(
    ("value", "about_it", "other"),
    [
        (None, [], "something else"),
        ("Two\nlines\x1b[2J", ["value:", "  Two", "  lines\N{REPLACEMENT CHARACTER}[2J"], "something else"),
        ({"tool": "t", "arguments": {}}, ['value: {"tool": "t", "arguments": {}}'], "other arguments"),
    ],
)
def test_what_is_asked_about_stands_at_the_question(value: Any, about_it: list[str], other: str) -> None:
    question = {"run_id": "r1", "question": "May it?", "value": value}
    lines = text_of(about({**RUN, "status": "waiting"}, [question], at=" --url u"))
    assert lines[lines.index("asked    May it?") + 1 : -1] == [f"         {line}" for line in about_it]
    assert lines[-1] == (
        "→ penstock runs answer r1 yes --url u lets it go on, and no does not; "
        f"yes --edit JSON lets it go on with {other}"
    )


def test_the_arguments_of_a_call_are_whole_where_it_is_asked_for() -> None:
    question = {"run_id": "r1", "question": "May send_mail run?", "value": CALL}
    shown = text_of(about({**RUN, "status": "waiting"}, [question]))
    assert any("x" * 300 in line for line in shown)
    assert said("approval.requested", approval=question) == (
        f"     7  approval.requested May send_mail run? · {json.dumps(CALL)}"
    )
    assert said("approval.requested", approval={**question, "value": None}).endswith(" May send_mail run?")
    long = text_of(about({**RUN, "status": "waiting"}, [{**question, "value": "y" * 5_000}], at=" --url u"))
    assert "           … 1000 more characters; penstock runs show r1 --url u --json has them" in long


def test_money_that_is_held_for_calls_whose_bill_nobody_knows_is_told_wherever_cost_is() -> None:
    assert "  $0.25, $0.125 held  " in text_of(table([RUN]))[1]
    assert "  ≥ $0.25, $0.125 held  " in text_of(table([{**RUN, "status": "running"}]))[1]
    assert bill(RUN) == "$0.25, $0.125 held · 1,201 tokens"
    assert said("run.completed", output="x", cost_usd=0.5, unresolved_usd=0.1).endswith(
        " x · $0.50, $0.10 held · 0 tokens"
    )


def test_a_list_of_runs_stays_a_table_whatever_their_owners_are_called() -> None:
    run = {**RUN, "owner": "a \n \n b"}
    heads, row = text_of(table([run], has_owners=True))
    assert row.index("g@2") == heads.index("GRAPH")


def test_events_say_what_happened() -> None:
    call = {"kind": "llm", "name": "m", "status": "success", "cost_usd": 0.000018, "tokens_in": 1, "tokens_out": 0}
    assert said("call.ended", **call) == "     7  call.ended         llm m: success · $0.000018 · 1 token"
    assert said("call.ended", **call, replayed=True).endswith(" · from the journal")
    assert said("node.error", node_id="a", node_type="t", error="ToolError", message="no") == (
        "     7  node.error         a ToolError: no"
    )
    assert said("run.cancelled", reason="enough", cause="user", cost_usd=0, tokens_in=0, tokens_out=0) == (
        "     7  run.cancelled      enough · $0.00 · 0 tokens"
    )
    assert said("run.resumed", epoch=2, replayed=3) == '     7  run.resumed        {"epoch": 2, "replayed": 3}'
    assert said("something.new", what=[1]) == '     7  something.new      {"what": [1]}'
    assert said("run.queued") == "     7  run.queued"
    assert said("node.error", error="GraphInvalid", message="1 problem(s):\n  [x] y").endswith("1 problem(s): [x] y")


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
    assert "cost     $0.10 so far of $0.50, and $0.125 held for calls whose bill nobody knows" in lines
    assert "tokens   3 in, 1 out so far of 9" in lines


def text_of(lines: Any) -> list[str]:
    return ["".join(text for text, _ in line) for line in lines]


def test_calls_whose_cost_nobody_can_tell_are_said_in_the_words_of_penstock_run() -> None:
    run = {**RUN, "unknown_costs": 2, "unresolved_usd": 0}
    assert text_of(about(run))[4:6] == [
        "cost     known ≥ $0.25 of $0.50, unknown 2 calls",
        "beware   no ceiling on money has seen what 2 calls cost",
    ]
    assert "known ≥ $0.25, unknown 2 calls" in text_of(table([run]))[1]
    assert "known ≥ $0.25, unknown 1 call " in text_of(table([{**run, "status": "parked", "unknown_costs": 1}]))[1]
    assert bill({**run, "tokens_in": 0}) == "known ≥ $0.25, unknown 2 calls · 1 token"
    ended = {"kind": "llm", "name": "m", "status": "success", "cost_usd": None, "tokens_in": 4, "tokens_out": 1}
    assert said("call.ended", **ended).endswith("llm m: success · cost unknown · 5 tokens")
    assert said("run.completed", output="x", cost_usd=0, unknown_costs=1).endswith(
        " x · known ≥ $0.00, unknown 1 call · 0 tokens"
    )
    so_far = used_by([ended, {**ended, "replayed": True}, {**ended, "cost_usd": 0.5}])
    assert so_far == {"cost_usd": 0.5, "tokens_in": 8, "tokens_out": 2, "unknown_costs": 1}
    assert text_of(about({**run, "status": "running"}, (), so_far))[4:6] == [
        "cost     known ≥ $0.50 so far of $0.50, unknown 1 call",
        "beware   no ceiling on money has seen what 1 call cost",
    ]
    same = {"run": {**run, "unknown_costs": 0}, "events": []}
    assert list(differing(same, {**same, "run": run})) == [("cost", "$0.25", "known ≥ $0.25, unknown 2 calls")]


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

    assert list(differing(exported(1, outputs=1), exported(1, outputs=1, replayed=True))) == []
    assert list(differing(exported(1), exported(2))) == [("cost", "$1.00, $0.125 held", "$2.00, $0.125 held")]
    assert list(differing({**exported(1), "events": []}, exported(1))) == [
        ("node a", "did not run", {"became": "completed"})
    ]
