"""The call tree as text, without what looks like a secret."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.money import format_cost, format_usd
from penstock.tracing.execution_graph import ExecutionGraph
from penstock.tracing.lifecycle import Status
from penstock.tracing.record import OPEN, CallRecord

if TYPE_CHECKING:
    from penstock.tracing.redaction import Redaction

MARKS = {"created": "·", "running": "…", "success": "✓", "fail": "✗", "halt": "■"}
MAX_LINES = 500


def explain(graph: ExecutionGraph, max_lines: int = MAX_LINES) -> str:
    """Return which calls ran below which, with cost, time, and the reason of each failure or stop."""
    from penstock.tracing.redaction import Redaction  # its patterns take 2 ms to make, which every import would pay

    seq, calls = graph.calls()
    children = _by_parent(calls)
    subtotal = _subtotals(graph, calls, children)
    unknown = _unknown_below(calls, children, seq)
    redaction = Redaction()
    lines: list[str] = []
    # A stack, not recursion: agent trees may be deeper than Python's.
    stack = [(call, "", "", "") for call in reversed(children.get(None, []))]
    while stack and len(lines) < max_lines:
        call, indent, branch, onward = stack.pop()
        lines.append(indent + branch + _line(graph, call, seq, subtotal[call.number], unknown[call.number], redaction))
        below = children.get(call.number, [])
        last = below[-1] if below else None
        for child in reversed(below):
            ends = child is last
            stack.append((child, indent + onward, "└─ " if ends else "├─ ", "   " if ends else "│  "))
    left_out = len(calls) - len(lines)
    if left_out:
        lines.append(f"… and {left_out} more calls")
    return "\n".join(lines)


def _by_parent(calls: list[CallRecord]) -> dict[int | None, list[CallRecord]]:
    """Return the kept calls below their nearest kept ancestor."""
    kept = {call.number for call in calls}
    children: dict[int | None, list[CallRecord]] = {}
    for call in calls:
        above = call.parent
        while above is not None and above.number not in kept:
            above = above.parent
        children.setdefault(above.number if above else None, []).append(call)
    return children


def _subtotals(
    graph: ExecutionGraph, calls: list[CallRecord], children: Mapping[int | None, list[CallRecord]]
) -> dict[int, int]:
    """Return the cost of each call including everything below it."""
    subtotal = {call.number: _cost(call) for call in calls}
    for number, folded in list(graph.folded.items()):
        subtotal[number] = subtotal.get(number, 0) + folded.cost
    # A call has a higher number than the one that made it: from the last to the first, what is below is done before.
    for call in reversed(calls):
        subtotal[call.number] += sum(subtotal[below.number] for below in children.get(call.number, ()))
    return subtotal


def _unknown_below(
    calls: list[CallRecord], children: Mapping[int | None, list[CallRecord]], seq: int
) -> dict[int, int]:
    """Return the number of calls with an unknown cost that each call stands for, including everything below it."""
    unknown = {call.number: int(call.end_seq <= seq and call.is_unpaid_at(seq)) for call in calls}
    for call in reversed(calls):
        unknown[call.number] += sum(unknown[below.number] for below in children.get(call.number, ()))
    return unknown


def _cost(call: CallRecord) -> int:
    if call.end_seq == OPEN:
        return 0
    return call.cost + (call.settled.cost if call.settled else 0)


def _line(graph: ExecutionGraph, call: CallRecord, seq: int, subtotal: int, unknown: int, redaction: Redaction) -> str:
    status = call.status_at(seq)
    parts = [f"{MARKS[status]} {call.name}"]
    if attempt := attempt_of(call.metadata or {}):
        parts.append(attempt)
    if call.kind != "system":
        parts.append(call.kind if call.model is None else f"{call.kind} {call.model}")
    cost = subtotal if call.kind == "system" else _cost(call)
    if call.kind != "system" and call.end_seq <= seq and call.is_unpaid_at(seq):
        parts.append("cost unknown")
    elif cost or (unknown and call.kind == "system"):
        parts.append(format_cost(cost, unknown if call.kind == "system" else 0))
    if call.waiting:
        parts.append("waits for other calls to end")
    elif waited_ms := (call.metadata or {}).get("waited_ms"):
        parts.append(f"waited {_duration(waited_ms * 1_000_000)}")
    if call.end_seq <= seq:
        parts += _ending(call, status)
    folded = graph.folded.get(call.number)
    if folded is not None:
        parts.append(f"({folded.calls} more calls folded, {format_usd(folded.cost)})")
    return "  ".join(_printable(redaction.text(part)) for part in parts)


def attempt_of(about: Mapping[str, object]) -> str:
    """Return the number of the attempt, or the replacement for a missing result, from the metadata; usually empty."""
    if "skip" in about:
        return f"skipped after {about['skip']}"
    if "fallback" in about:
        return f"fallback {about['fallback']}"
    return f"attempt {about['attempt']}" if "attempt" in about else ""


def _ending(call: CallRecord, status: Status) -> list[str]:
    parts = []
    late = call.settled
    tokens_in = (call.tokens_in or 0) + (late.tokens_in if late else 0)
    tokens_out = (call.tokens_out or 0) + (late.tokens_out if late else 0)
    if tokens_in or tokens_out:
        parts.append(f"{tokens_in}→{tokens_out} tokens")
    parts.append(_duration(call.ended_ns - call.started_ns))
    if status == "fail":
        parts.append(f"{call.error_class}: {call.stop_reason}" if call.stop_reason else str(call.error_class))
    elif call.stop_reason:
        # The calls below a context say what refused them; the context itself only needs the word.
        parts.append(call.stop_reason if call.kind != "system" else call.stop_reason.partition(":")[0])
    if call.finish_reason is not None:
        parts.append(f"not whole: {call.finish_reason}")
    if call.abandoned:
        parts.append("abandoned" + (", settled late" if late else ""))
    return parts


def _duration(ns: int) -> str:
    return f"{ns / 1_000_000:.1f} ms" if ns < 1_000_000_000 else f"{ns / 1_000_000_000:.2f} s"


def _printable(text: str) -> str:
    """Return one line of plain text: names come from anywhere, and may contain line breaks or terminal codes."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
