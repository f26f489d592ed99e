"""An exported run as one HTML page: the same page as for a run in Python, made of the run's events.

Depends on the format of an export, not on the server. If several workers have continued a run, the page shows the calls
of the last worker, which found the results of the earlier ones in the journal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.tracing.page import page_html

STATUSES: Mapping[str, str] = {
    "queued": "created",
    "running": "running",
    "waiting": "running",
    "parked": "running",
    "completed": "success",
    "failed": "fail",
    "halted": "halt",
    "cancelled": "halt",
}
"""Status on the page, by status of the run."""
NO_CALL: Mapping[str, Any] = {
    "model": None,
    "status": "created",
    "duration_ms": 0.0,
    "cost_usd": 0.0,
    "tokens_in": 0,
    "tokens_out": 0,
    "stop_reason": None,
    "error_class": None,
    "retries_used": 0,
    "iteration": 0,
}


def run_page(exported: Mapping[str, Any]) -> str:
    """Return the page of an exported run."""
    return page_html(page_data(exported), f"{exported['run']['graph_id']} · {exported['run']['status']}")


def page_data(exported: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run as the data of a trace, in the format of `trace_data`."""
    run, events = exported["run"], exported["events"]
    calls = _Calls()
    for event in events:
        calls.add(event)
    start_ms = run["started_ms"]
    last_ms = run["ended_ms"] or (events[-1]["at_ms"] if events else start_ms)
    calls.end_open(last_ms)
    return {
        "format": 1,
        "run_id": run["id"],
        "context": "",
        "name": run["graph_id"],
        "seq": run["last_seq"],
        "status": STATUSES.get(run["status"], "running"),
        "termination_reason": run["status"],
        "stop_reason": run["stop_reason"],
        "error_class": run["error"],
        "start_ts_ms": start_ms,
        "duration_ms": 0.0 if start_ms is None else float(max(0, last_ms - start_ms)),
        "metadata": {},
        "limits": _meters(events),
        "stats": calls.stats(run),
        "calls": list(calls.by_id.values()),
        "events": [_event(event) for event in events],
        "dropped_events": 0,
    }


class _Calls:
    """The calls of a run, folded from its events."""

    def __init__(self) -> None:
        self.by_id: dict[str, dict[str, Any]] = {}
        self._base_ms: int | None = None

    def add(self, event: Mapping[str, Any]) -> None:
        kind, data = event["type"], event["data"]
        if kind in ("run.started", "run.resumed"):
            self.by_id.clear()
            self._base_ms = event["at_ms"]
        elif kind in ("call.waiting", "call.started", "call.ended"):
            call = self._call(event)
            call |= {name: data[name] for name in ("model", "iteration") if name in data}
            if kind == "call.started":
                call |= {"status": "running", "offset_ms": self._offset_ms(event)}
            elif kind == "call.ended":
                self._end(call, data)
        elif kind == "call.settled" and (late := self.by_id.get(data["call_id"])) is not None:
            for name in ("cost_usd", "tokens_in", "tokens_out"):
                late[name] += data[name]

    def end_open(self, at_ms: int | None) -> None:
        """Set the duration of calls in progress, up to the newest event."""
        for call in self.by_id.values():
            if call["status"] in ("created", "running") and at_ms is not None:
                call["duration_ms"] = max(0.0, float(at_ms - (self._base_ms or 0)) - call["offset_ms"])

    def stats(self, run: Mapping[str, Any]) -> dict[str, Any]:
        """Return the totals: money and tokens from the run's record, numbers of calls from the page."""
        calls = [call for call in self.by_id.values() if not call["is_context"]]
        return {
            "total_cost": (run["cost_usd"] or 0.0) + run["unresolved_usd"],
            "unknown_costs": run["unknown_costs"],
            "total_input_tokens": run["tokens_in"],
            "total_output_tokens": run["tokens_out"],
            "model_call_count": sum(call["kind"] == "llm" for call in calls),
            "tool_call_count": sum(call["kind"] == "tool" for call in calls),
            "failed_count": sum(call["status"] == "fail" for call in calls),
            "halted_count": sum(call["status"] == "halt" for call in calls),
        }

    def _call(self, event: Mapping[str, Any]) -> dict[str, Any]:
        data = event["data"]
        call = self.by_id.get(data["call_id"])
        if call is None:
            above = self.by_id.get(data["parent_id"] or "")
            context = data.get("context", above["context"] if above else "")
            shown = {name: data[name] for name in ("node_id", "node_type", "attempt", "replayed") if name in data}
            call = self.by_id[data["call_id"]] = {
                **NO_CALL,
                "node_id": data["call_id"],
                "parent_id": data["parent_id"],
                "kind": data["kind"],
                "name": data["name"],
                "context": context,
                "is_context": data["kind"] == "system" and (above is None or context != above["context"]),
                "offset_ms": self._offset_ms(event),
                "metadata": shown,
            }
        return call

    def _end(self, call: dict[str, Any], data: Mapping[str, Any]) -> None:
        call |= {name: data[name] for name in ("status", "duration_ms", "tokens_in", "tokens_out")}
        call["cost_usd"] = data["cost_usd"] or 0.0
        call["stop_reason"] = data.get("stop_reason")
        call["error_class"] = data.get("error")
        call["retries_used"] = data.get("retries_used", 0)

    def _offset_ms(self, event: Mapping[str, Any]) -> float:
        if self._base_ms is None:
            self._base_ms = event["at_ms"]
        return float(max(0, event["at_ms"] - self._base_ms))


def _meters(events: list[Any]) -> list[dict[str, Any]]:
    """Return the limits in the newest report of each budget; `tripped` marks those that have stopped something."""
    newest: dict[tuple[str, str | None], Mapping[str, Any]] = {}
    tripped: set[tuple[str, str]] = set()
    for event in events:
        data = event["data"]
        if event["type"] == "budget":
            newest[data["budget"], data["node_id"]] = data
        elif event["type"] == "limit":
            tripped.add((data.get("budget"), data.get("unit")))
    return [
        {
            "budget": data["budget"],
            "unit": unit["unit"],
            "used": unit["spent"] + unit["unresolved"],
            "held": unit["held"],
            "ceiling": unit["limit"],
            "tripped": (data["budget"], unit["unit"]) in tripped,
        }
        for data in newest.values()
        for unit in data["units"]
        if unit["limit"] is not None
    ]


def _event(event: Mapping[str, Any]) -> dict[str, Any]:
    data = event["data"]
    about = {name: value for name, value in data.items() if name not in ("kind", "seq", "at_ms", "source")}
    own = {"seq": event["seq"], "at_ms": event["at_ms"], "kind": event["type"], "source": str(data.get("context", ""))}
    return {**about, **own, "node_id": data.get("call_id"), "parent_id": None}
