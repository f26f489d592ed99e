"""An exported run as one HTML page."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from penstock.cli.remote.run_page import page_data, run_page

HOSTILE = "</script><script>alert(1)</script><!--\u2028\x1b[31m"
RUN = {
    "id": "r",
    "graph_id": "g",
    "status": "halted",
    "started_ms": 1_000,
    "ended_ms": 4_000,
    "last_seq": 9,
    "stop_reason": "budget_exceeded",
    "error": None,
    "cost_usd": 0.5,
    "unresolved_usd": 0.25,
    "unknown_costs": 1,
    "tokens_in": 7,
    "tokens_out": 8,
}


def event(seq: int, at_ms: int, type: str, **data: Any) -> dict[str, Any]:
    return {"seq": seq, "at_ms": at_ms, "type": type, "data": data}


def started(seq: int, at_ms: int, id: str, parent: str | None, kind: str = "llm", **more: Any) -> dict[str, Any]:
    return event(seq, at_ms, "call.started", call_id=id, parent_id=parent, kind=kind, name=id, depth=1, **more)


def ended(seq: int, at_ms: int, id: str, parent: str | None, kind: str = "llm", **more: Any) -> dict[str, Any]:
    figures = {"status": "success", "cost_usd": 0.25, "tokens_in": 3, "tokens_out": 4, "duration_ms": 500.0}
    about = {"call_id": id, "parent_id": parent, "kind": kind, "name": id}
    return event(seq, at_ms, "call.ended", **about, **{**figures, **more})


def exported(*events: dict[str, Any], **run: Any) -> dict[str, Any]:
    return {"run": {**RUN, **run}, "graph": None, "events": list(events)}


def data_in(page: str) -> Any:
    (found,) = re.findall(r'<script type="application/json" id="trace">(.*?)</script>', page, re.DOTALL)
    return json.loads(found)


def test_calls_are_folded_with_their_times_costs_and_late_bills() -> None:
    data = page_data(
        exported(
            event(1, 1_000, "run.started", epoch=1),
            started(2, 1_100, "n1", None, "system", context="main"),
            started(3, 1_200, "n2", "n1", context="main", iteration=2, model="m"),
            ended(4, 1_700, "n2", "n1", cost_usd=None, error="Timeout", status="fail"),
            event(5, 1_900, "call.settled", call_id="n2", node_id=None, cost_usd=0.125, tokens_in=1, tokens_out=1),
            started(6, 2_000, "n3", "n1", "tool", context="main"),
        )
    )
    top, model, tool = data["calls"]
    assert (top["is_context"], top["status"], top["offset_ms"], top["duration_ms"]) == (True, "running", 100, 2_900)
    assert (model["cost_usd"], model["tokens_in"], model["error_class"], model["iteration"]) == (0.125, 4, "Timeout", 2)
    assert (tool["status"], tool["duration_ms"]) == ("running", 2_000)
    assert (data["stats"]["model_call_count"], data["stats"]["tool_call_count"]) == (1, 1)
    assert (data["stats"]["total_cost"], data["stats"]["failed_count"]) == (0.75, 1)
    assert (data["status"], data["stop_reason"], data["duration_ms"]) == ("halt", "budget_exceeded", 3_000)


def test_a_run_that_another_worker_continued_has_the_calls_of_the_last_one() -> None:
    data = page_data(
        exported(
            event(1, 1_000, "run.started", epoch=1),
            started(2, 1_100, "n1", None),
            started(3, 1_150, "n2", "n1"),
            event(4, 2_000, "run.resumed", epoch=2),
            started(5, 2_100, "n1", None),
        )
    )
    assert [(call["node_id"], call["offset_ms"]) for call in data["calls"]] == [("n1", 100)]


def test_limits_are_those_of_the_newest_reports_and_say_which_of_them_stopped_the_run() -> None:
    def budget(seq: int, spent: float, limit: float | None) -> dict[str, Any]:
        unit = {"unit": "usd", "spent": spent, "held": 0.0, "unresolved": 0.25, "waiting": 0, "limit": limit, "left": 0}
        return event(seq, 1_000, "budget", budget="run:r", level="run", node_id=None, units=[unit])

    stop = event(4, 1_000, "limit", budget="run:r", unit="usd", call_id=None)
    (meter,) = page_data(exported(budget(1, 0.1, 1.0), budget(2, 0.5, 1.0), stop))["limits"]
    assert meter == {"budget": "run:r", "unit": "usd", "used": 0.75, "held": 0.0, "ceiling": 1.0, "tripped": True}
    assert page_data(exported(budget(1, 0.1, None)))["limits"] == []


@pytest.mark.parametrize("status", ["queued", "running", "waiting", "parked", "completed", "failed", "cancelled"])
def test_a_run_in_any_state_has_a_page(status: str) -> None:
    early = {"started_ms": None, "ended_ms": None, "cost_usd": None} if status == "queued" else {}
    assert data_in(run_page(exported(status=status, **early)))["about"]["termination_reason"] == status


def test_no_name_in_a_run_becomes_part_of_the_page() -> None:
    events = [started(1, 1, "n1", None, context=HOSTILE), event(2, 2, HOSTILE, text=HOSTILE, parent_id=HOSTILE)]
    events[0]["data"]["name"] = HOSTILE
    page = run_page(exported(*events, id=HOSTILE, graph_id=HOSTILE, error=HOSTILE, stop_reason=HOSTILE))
    assert "alert(1)</script>" not in page
    assert page.count("<script") == 2
    data = data_in(page)
    assert (data["calls"][0][3], data["about"]["run_id"]) == (HOSTILE, HOSTILE)
