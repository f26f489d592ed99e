"""One stream of events, whether the run is local or on a server: the lines of a log, and how a run ended."""

from __future__ import annotations

import io
from typing import Any

import pytest

from penstock.cli.render.events import RunEvent, ending
from penstock.cli.render.local import Shown, run_event
from penstock.cli.render.renderers import EventLog
from penstock.cli.render.screen import Screen
from penstock.front_door import contain
from penstock.runtime.calls import WrapOptions

CALL: dict[str, Any] = {"call_id": "c1", "parent_id": "c0", "kind": "llm", "name": "writer"}
ENDED = {**CALL, "status": "success", "cost_usd": 0.25, "tokens_in": 3, "tokens_out": 1}


def logged(*events: RunEvent, everything: bool = False) -> list[str]:
    out = io.StringIO()
    log = EventLog(Screen(out), everything)
    for event in events:
        log.add(event)
    log.end_text()
    return out.getvalue().splitlines()


def text(seq: int, node_id: str, piece: str) -> RunEvent:
    return RunEvent(seq, "text.delta", {"node_id": node_id, "text": piece})


@pytest.mark.parametrize(("at_s", "lead"), [(None, "     2  "), (1.5, "  1.50 s  ")], ids=["server", "local"])
def test_an_event_has_the_same_line_from_a_server_and_from_this_process(at_s: float | None, lead: str) -> None:
    events = RunEvent(1, "call.started", CALL, at_s), RunEvent(2, "call.ended", ENDED, at_s)
    assert logged(*events) == [f"{lead}call.ended         ✓ llm writer · $0.25 · 4 tokens"]


def test_the_trace_of_a_local_run_is_converted_to_the_events_of_a_server() -> None:
    with contain(name="main") as run, run.spawn_child("agent") as agent:
        agent.tool(str, 1, name="think", cost_hint_usd=0.25)
    events = [run_event(trace, trace.at_ms) for trace in run.history() if isinstance(trace, Shown)]
    assert [event.type for event in events] == ["call.started"] * 3 + ["call.ended"] * 3
    assert logged(*events) == [
        "  0.00 s  call.ended         ✓ tool agent/think · $0.25",
        "  0.00 s  call.ended         ✓ step agent · $0.25",
    ]


def test_a_limit_that_stopped_a_call_is_printed_once() -> None:
    with contain(max_steps=0) as run:
        run.call_tool(lambda: 1, WrapOptions(operation_name="think"))
    events = [run_event(trace, trace.at_ms) for trace in run.history() if isinstance(trace, Shown)]
    (line,) = logged(*events)
    assert line.startswith("  0.00 s  call.ended         ■ tool think · refused · step_limit_exceeded: ")
    assert sum("  limit  " in line for line in logged(*events, everything=True)) >= 1


def test_text_of_a_node_shares_a_line_and_the_end_of_its_call_follows() -> None:
    started, ended = RunEvent(1, "call.started", CALL), RunEvent(3, "call.ended", ENDED)
    assert logged(started, text(2, "a", "one "), ended, text(4, "a", "two\n"), text(5, "b", "three")) == [
        "     2  text.delta         a one two ",
        "     3  call.ended         ✓ llm writer · $0.25 · 4 tokens",
        "     5  text.delta         b three",
    ]


def test_a_call_whose_start_was_not_received_is_described_by_its_end() -> None:
    assert logged(RunEvent(3, "call.ended", {**ENDED, "status": "halt", "stop_reason": "timeout: 5 s"})) == [
        "     3  call.ended         ■ llm writer · stopped · $0.25 · 4 tokens · timeout: 5 s"
    ]


def test_how_a_run_ended_is_rendered_with_its_reason() -> None:
    data = {"stop_reason": "timeout", "message": "5 s are over", "errors": {"a": "ValueError: no"}, "skipped": ["b"]}
    lines = ["".join(piece for piece, _ in line) for line in ending(RunEvent(9, "run.halted", data))]
    assert lines == ["✗ a: ValueError: no", "  skipped: b", "■ halted: timeout: 5 s are over"]
    (line,) = ending(RunEvent(9, "run.completed", {"output": 1}))
    assert line == [("✓ completed", "green")]
