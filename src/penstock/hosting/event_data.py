"""The event data of a hosted run as JSON: converts node events and calls to the type and data of a HostedEvent.

Pure. Every store accepts the results: finite numbers, encodable text, bounded depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from penstock.agents.model import TruncatedByBudget
from penstock.containment.accounts import Taken
from penstock.containment.safety import Decision
from penstock.hosting.ports import USAGE, RunRecord, RunStatus
from penstock.kernel.executor import DataValue, ExecutionResult, PartialValue
from penstock.kernel.graph import DEFAULT_OUTPUT
from penstock.money import known_usd, to_usd
from penstock.nodes.program import CHANGED
from penstock.runtime.graphs.node_execution import LIFECYCLE, NodeEvent
from penstock.runtime.settlement import error_text
from penstock.stops import Stop, StopReason
from penstock.tracing.events import CallWaiting, LimitTrace, SafetyTrace
from penstock.tracing.jsonable import MAX_INT_BITS, jsonable
from penstock.tracing.record import CallRecord, Settlement
from penstock.tracing.redaction import Redaction

EventPayload = tuple[str, dict[str, Any]]
"""The type of an event, and its data."""

MAX_DEPTH = 97
"""Maximum depth of a value: stores accept 100 levels, and an event adds up to three around a value."""
MAX_ERROR = 10_000
SHORT = 10_000
PROGRAM_CHANGED = "program.changed"
"""Type of the event that reports which recorded results a changed program uses."""
NODE_TYPE = "node_type"
"""Key in the metadata of a call that executes a node."""
REPORTED_ELSEWHERE = "approval_requested"
"""Node event for a question that `approval.requested` has reported already."""

ENDINGS: Mapping[RunStatus, str] = {
    "completed": "run.completed",
    "failed": "run.failed",
    "halted": "run.halted",
    "cancelled": "run.cancelled",
    "parked": "run.parked",
}
"""Type of the last event of a run, by its status."""
STATUS_OF: Mapping[str, RunStatus] = {event: status for status, event in ENDINGS.items()}
BILL_RESOLVED, BILL_RELEASED = "bill.resolved", "bill.released"
LAST_EVENTS = frozenset({*STATUS_OF, BILL_RESOLVED, BILL_RELEASED})
"""Types of the last event of a run that has ended or is parked: its end, or bills that were resolved since."""

_figures: Callable[[RunRecord], tuple[int, ...]] = attrgetter(*USAGE)

_REDACTION = Redaction()


def sanitize(text: str) -> str:
    """Return text that every database can store: without NUL and without unpaired surrogates."""
    return text.encode("utf-8", "replace").decode().replace("\0", "�")


def redact(text: str) -> str:
    """Return a message of user code or a provider, truncated, with apparent secrets redacted."""
    return sanitize(_REDACTION.text(text, MAX_ERROR))


def to_json(value: Any) -> Any:
    """Convert a value to JSON, untruncated; a value without a JSON type becomes text."""
    return value if type(value) is str and value.isascii() else _to_json(value, 0)


def truncate(value: Any) -> Any:
    """Convert a value to JSON for display: oversize parts are truncated."""
    if type(value) is str and len(value) <= SHORT and value.isascii():
        return value  # the usual case: nothing to convert
    return _to_json(jsonable(value), 0)


def _to_json(value: Any, depth: int) -> Any:
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
            return {_to_json(str(key), 0): _to_json(one, depth + 1) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [_to_json(one, depth + 1) for one in value]
    return _to_json(str(jsonable(value)), 0)


def output_of(result: ExecutionResult) -> Any:
    """Return the outputs of a graph by handle, or only the value if the default handle is the only one."""
    values = {handle: output.value for handle, output in result.outputs.items()}
    return to_json(values[DEFAULT_OUTPUT] if values.keys() == {DEFAULT_OUTPUT} else values)


def finish_reason(values: Iterable[DataValue]) -> dict[str, Any]:
    """Return the `finish_reason` of the first truncated value as event data; empty if none is truncated."""
    reason: object = None
    for one in values:
        if isinstance(one, PartialValue):
            reason = one.finish_reason
            break
    return {} if reason is None else {"finish_reason": to_json(reason)}


def node_event(event: NodeEvent) -> EventPayload | None:
    """Convert a node event; None if it is reported by another event."""
    what = event.event_type
    if what == "delta" and isinstance(event.data, (dict, Mapping)):  # checking for dict first is faster
        return _delta_event(event)
    if what == REPORTED_ELSEWHERE:
        return None
    if what == CHANGED:
        return PROGRAM_CHANGED, {"node_id": event.node_id, **truncate(event.data)}
    about: dict[str, Any] = {"node_id": event.node_id, "node_type": event.node_type}
    if event.replayed:
        about["replayed"] = True
    if what not in LIFECYCLE:
        about |= {"name": sanitize(what), "data": truncate(event.data)}
        return "node.progress", about
    if what != "started" or event.data is not None:
        about |= _lifecycle_data(event)
    return f"node.{what}", about


def _lifecycle_data(event: NodeEvent) -> dict[str, Any]:
    data = event.data
    if event.event_type == "completed":
        outputs = {to_json(name): truncate(one.value) for name, one in data.items()}
        return {"outputs": outputs, **finish_reason(data.values())}
    if isinstance(data, BaseException):
        return error_data(data)
    return {} if data is None else {"reason": truncate(data)}


def _delta_event(event: NodeEvent) -> EventPayload:
    data = event.data
    about = {"node_id": event.node_id, "source": truncate(data.get("source"))}
    if "tool_call" in data:
        about["call"] = to_json(data["tool_call"])
        return "tool.call", about
    about["text"] = to_json(str(data.get("text", "")))
    return "text.delta", about


def truncated_text(event: NodeEvent) -> EventPayload | None:
    """Return the text of an answer truncated by a limit as a `text.delta`; None if already emitted, or empty.

    The text is paid for, and useful to a client that grants the run more or continues with the partial answer.
    """
    error = event.data
    if not isinstance(error, TruncatedByBudget) or error.was_streamed or not error.text:
        return None
    error.was_streamed = True
    return "text.delta", {"node_id": event.node_id, "source": to_json(error.source), "text": to_json(error.text)}


class CallPlace(NamedTuple):
    """Where a call belongs: the path of its node, such as `each/3/read`, and whether it was served from the journal."""

    node_id: str | None = None
    """Ids of the enclosing nodes, outermost first, each followed by a slash; None outside of any node."""
    replayed: bool = False


NOWHERE = CallPlace()
Whose = Callable[[Stop], str | None]
"""Names the owner of the limit behind a stop: `run`, `owner`, `all` or `node`; None if no limit is behind it."""


def stop_figures(stop: Stop, whose: str | None) -> dict[str, Any]:
    """Convert a stop of a call: its reason, whose budget refused, and the figures; null where there are none."""
    return {
        "reason": str(stop.reason),
        "message": redact(stop.message),
        "budget": to_json(stop.budget),
        "whose": whose,
        "unit": stop.unit,
        "limit": to_json(stop.limit),
        "used": to_json(stop.used),
        "held": to_json(stop.held),
        "asked": to_json(stop.asked),
        "unresolved": to_json(stop.unresolved),
        "momentary": stop.momentary,
    }


def limit_event(
    event: LimitTrace, *, node_id: str | None = None, stop: Stop | None = None, whose: str | None = None, cause: bool
) -> EventPayload:
    """Convert a limit that has stopped a call or a run.

    `cause` is False for a call that was stopped only because a call below it was: the same stop, reported again.
    """
    figures = {name: getattr(event, name) for name in ("budget", "unit", "limit", "used", "held", "asked")}
    return "limit", {
        "stop_reason": event.stop_reason,
        "message": redact(event.message),
        **truncate(figures),
        "unresolved": None if stop is None else to_json(stop.unresolved),
        "momentary": stop is not None and stop.momentary,
        "whose": whose,
        "call_id": event.node_id,
        "name": to_json(event.name),
        "node_id": node_id,
        "cause": cause,
    }


def unpriced_event(event: SafetyTrace) -> EventPayload | None:
    """Convert the report of a model without a price; None for any other safety event."""
    if event.event_type != StopReason.PRICE_UNKNOWN or event.decision != Decision.ALLOW:
        return None
    return "price.unknown", {"model": to_json(event.metadata.get("model")), "message": redact(event.reason)}


def call_started(place: CallPlace, call: CallRecord) -> EventPayload:
    """Convert the start of a call; `held_usd` is included while the call runs and holds money."""
    about = _call_data(place, call)
    about |= _position(call)
    held = call.owner
    if isinstance(held, Taken) and held.state == "held" and held._held_cost:
        about["held_usd"] = to_usd(held._held_cost)
    return "call.started", about


def call_waiting(place: CallPlace, event: CallWaiting, whose: Whose) -> EventPayload:
    """Convert the start of a wait: the call needs more than its budget has left besides the holds of other calls."""
    about: dict[str, Any] = {"call_id": event.node_id, "parent_id": event.parent_id, "kind": event.call_kind}
    about |= {"name": to_json(event.name), "context": to_json(event.source)}
    if place.node_id is not None:
        about["node_id"] = place.node_id
    figures = (event.budget, event.unit, event.limit, event.used, event.held, event.asked)
    stop = Stop(StopReason.BUDGET_EXCEEDED, event.message, *figures, momentary=True)
    about["stop"] = stop_figures(stop, whose(stop))
    return "call.waiting", about


def call_ended(place: CallPlace, call: CallRecord, whose: str | None, *, cause: bool) -> EventPayload:
    """Convert the end of a call; a stopped call has the stop, and whether the stop arose in this call."""
    about, extras = _call_data(place, call), call.extras
    about["status"] = call.status
    about["cost_usd"] = None if extras.cost_unknown else to_usd(call.cost)
    about["tokens_in"] = call.tokens_in or 0
    about["tokens_out"] = call.tokens_out or 0
    about["duration_ms"] = round((call.ended_ns - call.started_ns) / 1_000_000, 3)
    if extras.finish_reason is not None:
        about["finish_reason"] = extras.finish_reason
    if extras.stop_reason is not None:
        about["stop_reason"] = redact(extras.stop_reason)
    if extras.error_class is not None:
        about["error"] = to_json(extras.error_class)
    if extras.retries:
        about["retries_used"] = extras.retries
    if extras.abandoned:
        about["abandoned"] = True
    if extras.stop is not None:
        about["stop"] = {**stop_figures(extras.stop, whose), "cause": cause}
    return "call.ended", about


def call_settled(place: CallPlace, late: Settlement) -> EventPayload:
    """Convert a bill that arrived after its call had ended; its figures are added to those of `call.ended`."""
    figures = {"cost_usd": to_usd(late.cost), "tokens_in": late.tokens_in, "tokens_out": late.tokens_out}
    return "call.settled", {"call_id": late.call.node_id, "node_id": place.node_id, **figures}


def _call_data(place: CallPlace, call: CallRecord) -> dict[str, Any]:
    about: dict[str, Any] = {"call_id": call.node_id, "parent_id": call.parent_id, "kind": call.kind}
    about["name"] = to_json(call.name)
    if place.node_id is not None:
        about["node_id"] = place.node_id
    if call.model is not None:
        about["model"] = to_json(call.model)
    if place.replayed:
        about["replayed"] = True
    return about


def _position(call: CallRecord) -> dict[str, Any]:
    """Return the depth in the call tree and the path of contexts; the attempt and node type, if there are any."""
    about: dict[str, Any] = {"depth": call.depth, "context": to_json(call.source.path)}
    if call.iteration:
        about["iteration"] = call.iteration
    if call.metadata:
        if type(attempt := call.metadata.get("attempt")) is int:
            about["attempt"] = attempt
        if call.kind == "system" and type(node_type := call.metadata.get(NODE_TYPE)) is str:
            about["node_type"] = to_json(node_type)
    return about


def error_data(error: BaseException) -> dict[str, Any]:
    """Return an error as data: its class, and its message with apparent secrets redacted."""
    return {"error": type(error).__name__, "message": redact(error_text(error))}


def stop_data(stop: Stop) -> dict[str, Any]:
    """Return a stop as data: the reason and its figures."""
    figures = {
        "stop_reason": str(stop.reason),
        "message": redact(stop.message),
        "budget": stop.budget,
        "unit": stop.unit,
        "limit": stop.limit,
        "used": stop.used,
        "held": stop.held or None,
        "asked": stop.asked or None,
        "momentary": stop.momentary or None,
    }
    return {name: truncate(one) for name, one in figures.items() if one is not None}


def spent(run: RunRecord, used: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Return the usage of a run as data of its last event; `used` overrides fields not yet in the record."""
    figures = {**dict(zip(USAGE, _figures(run), strict=True)), **(used or {})}
    data: dict[str, Any] = {"cost_usd": known_usd(figures["cost_nanos"], figures["unknown_costs"])}
    data |= {"tokens_in": figures["tokens_in"], "tokens_out": figures["tokens_out"]}
    if figures["unresolved_nanos"]:
        data["unresolved_usd"] = to_usd(figures["unresolved_nanos"])
    if figures["unknown_costs"]:
        data["unknown_costs"] = figures["unknown_costs"]
    return data
