"""What a hosted run tells, as JSON: from events of nodes and calls to the type and data of a HostedEvent.

Pure. Every store takes what comes out of here: finite numbers, text that can be encoded, no depth without end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any

from penstock.agents.model import AnswerCut
from penstock.hosting.records import RunRecord, RunStatus
from penstock.kernel.executor import ExecutionResult
from penstock.kernel.graph import DEFAULT_OUTPUT
from penstock.kernel.values import DataValue, PartialValue
from penstock.money import to_usd
from penstock.runtime.graphs.node_events import LIFECYCLE, NodeEvent
from penstock.runtime.settlement import told_by
from penstock.stops import Stop
from penstock.tracing.events import LimitTrace
from penstock.tracing.jsonable import MAX_INT_BITS, jsonable
from penstock.tracing.record import CallRecord
from penstock.tracing.redaction import Redaction

Told = tuple[str, dict[str, Any]]
"""The type of an event, and its data."""

MAX_DEPTH = 97
"""Stores take 100 levels, and an event has up to three around a value."""
MAX_ERROR = 10_000
SHORT = 10_000
ASKED_ELSEWHERE = "approval_requested"
"""What a node says of a question that `approval.requested` has told already."""

ENDINGS: Mapping[RunStatus, str] = {
    "completed": "run.completed",
    "failed": "run.failed",
    "halted": "run.halted",
    "cancelled": "run.cancelled",
    "parked": "run.parked",
}
"""The last event of a run that is in this status."""
STATUS_OF: Mapping[str, RunStatus] = {event: status for status, event in ENDINGS.items()}

FIGURES = ("cost_nanos", "tokens_in", "tokens_out", "unresolved_nanos", "unknown_costs")
"""The fields of a run that say what it has used."""
_figures: Callable[[RunRecord], tuple[int, ...]] = attrgetter(*FIGURES)

_REDACTION = Redaction()


def clean(text: str) -> str:
    """Text that every database can keep: without NUL, and without halves of surrogate pairs."""
    return text.encode("utf-8", "replace").decode().replace("\0", "�")


def safe(text: str) -> str:
    """What somebody's code or a provider said, cut, and without what looks like a secret."""
    return clean(_REDACTION.text(text, MAX_ERROR))


def plain(value: Any) -> Any:
    """A value as JSON, whole; what JSON has no type for becomes its text."""
    return value if type(value) is str and value.isascii() else _plain(value, 0)


def shown(value: Any) -> Any:
    """A value as JSON for whoever looks on: what is oversize is cut."""
    if type(value) is str and len(value) <= SHORT and value.isascii():
        return value  # nothing is to be done about it, as about nearly all that is told
    return _plain(jsonable(value), 0)


def _plain(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, int) and value.bit_length() <= MAX_INT_BITS:
        return value
    if depth < MAX_DEPTH:
        if isinstance(value, Mapping):
            return {_plain(str(key), 0): _plain(one, depth + 1) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [_plain(one, depth + 1) for one in value]
    return _plain(str(jsonable(value)), 0)


def output_of(result: ExecutionResult) -> Any:
    """What a graph came to; the value alone, if it is on the usual handle and there is no other."""
    values = {handle: output.value for handle, output in result.outputs.items()}
    return plain(values[DEFAULT_OUTPUT] if values.keys() == {DEFAULT_OUTPUT} else values)


def not_whole(values: Iterable[DataValue]) -> dict[str, Any]:
    """What is said beside values of which one is not whole: why."""
    reason: object = None
    for one in values:
        if isinstance(one, PartialValue):
            reason = one.finish_reason
            break
    return {} if reason is None else {"finish_reason": plain(reason)}


def of_node(event: NodeEvent) -> Told | None:
    """What is told of an event of a node; None for what is told elsewhere."""
    what = event.event_type
    if what == "delta" and isinstance(event.data, (dict, Mapping)):  # a dict is known for one at once
        return _of_delta(event)
    if what == ASKED_ELSEWHERE:
        return None
    about: dict[str, Any] = {"node_id": event.node_id, "node_type": event.node_type}
    if event.replayed:
        about["replayed"] = True
    if what not in LIFECYCLE:
        about |= {"name": clean(what), "data": shown(event.data)}
        return "node.progress", about
    if what != "started" or event.data is not None:
        about |= _of_lifecycle(event)
    return f"node.{what}", about


def _of_lifecycle(event: NodeEvent) -> dict[str, Any]:
    data = event.data
    if event.event_type == "completed":
        outputs = {plain(name): shown(one.value) for name, one in data.items()}
        return {"outputs": outputs, **not_whole(data.values())}
    if isinstance(data, BaseException):
        return error_data(data)
    return {} if data is None else {"reason": shown(data)}


def _of_delta(event: NodeEvent) -> Told:
    data = event.data
    about = {"node_id": event.node_id, "source": shown(data.get("source"))}
    if "tool_call" in data:
        about["call"] = plain(data["tool_call"])
        return "tool.call", about
    about["text"] = plain(str(data.get("text", "")))
    return "text.delta", about


def of_cut(event: NodeEvent) -> Told | None:
    """The text of an answer that a limit has cut, as it would have been told while it came; None if it was, or is none.

    It is paid for, and whoever grants the run more, or reads on with what there is, wants to see it.
    """
    error = event.data
    if not isinstance(error, AnswerCut) or error.is_told or not error.text:
        return None
    error.is_told = True
    return "text.delta", {"node_id": event.node_id, "source": plain(error.source), "text": plain(error.text)}


def of_limit(event: LimitTrace) -> Told:
    """What is told of a limit that has stopped something."""
    figures = {"budget": event.budget, "unit": event.unit, "limit": event.limit, "used": event.used}
    return "limit", {"stop_reason": event.stop_reason, "message": safe(event.message), **shown(figures)}


def of_begun(replayed: set[int], call: CallRecord) -> Told:
    """What is told of a model or tool call that has begun; `replayed` remembers those that the journal had."""
    if call.metadata and call.metadata.get("replayed"):
        replayed.add(call.number)
    return "call.started", _of_call(replayed, call)


def of_ended(replayed: set[int], call: CallRecord) -> Told:
    """What is told of a model or tool call that has ended; of those that are `replayed`, it is the last."""
    about = _of_call(replayed, call)
    replayed.discard(call.number)
    about["status"] = call.status
    about["cost_usd"] = None if call.cost_unknown else to_usd(call.cost)
    about["tokens_in"] = call.tokens_in or 0
    about["tokens_out"] = call.tokens_out or 0
    about["duration_ms"] = round((call.ended_ns - call.started_ns) / 1_000_000, 3)
    if call.finish_reason is not None:
        about["finish_reason"] = call.finish_reason
    if call.stop_reason is not None:
        about["stop_reason"] = safe(call.stop_reason)
    return "call.ended", about


def _of_call(replayed: set[int], call: CallRecord) -> dict[str, Any]:
    about: dict[str, Any] = {"call_id": call.node_id, "parent_id": call.parent_id, "kind": call.kind}
    about["name"] = plain(call.name)
    if call.model is not None:
        about["model"] = plain(call.model)
    if call.number in replayed:
        about["replayed"] = True
    return about


def error_data(error: BaseException) -> dict[str, Any]:
    """An error as data: its class, and what it says, without what looks like a secret."""
    return {"error": type(error).__name__, "message": safe(told_by(error))}


def stop_data(stop: Stop) -> dict[str, Any]:
    """A stop as data: the reason, and the figures behind it."""
    figures = {
        "stop_reason": str(stop.reason),
        "message": safe(stop.message),
        "budget": stop.budget,
        "unit": stop.unit,
        "limit": stop.limit,
        "used": stop.used,
        "held": stop.held or None,
        "momentary": stop.momentary or None,
    }
    return {name: shown(one) for name, one in figures.items() if one is not None}


def spent(run: RunRecord, used: Mapping[str, int] | None = None) -> dict[str, Any]:
    """What a run has used, as its last event says it; where its record does not say so yet, `used` does."""
    figures = {**dict(zip(FIGURES, _figures(run), strict=True)), **(used or {})}
    told: dict[str, Any] = {"cost_usd": to_usd(figures["cost_nanos"])}
    told |= {"tokens_in": figures["tokens_in"], "tokens_out": figures["tokens_out"]}
    if figures["unresolved_nanos"]:
        told["unresolved_usd"] = to_usd(figures["unresolved_nanos"])
    if figures["unknown_costs"]:
        told["unknown_costs"] = figures["unknown_costs"]
    return told
