"""The call tree as text."""

from __future__ import annotations

from penstock.money import format_usd
from penstock.tracing.execution_graph import ExecutionGraph
from penstock.tracing.record import CallRecord

MARKS = {"created": "·", "running": "…", "success": "✓", "fail": "✗", "halt": "■"}
MAX_LINES = 500


def explain(graph: ExecutionGraph, max_lines: int = MAX_LINES) -> str:
    """What ran under what, with its cost, its time, and why it failed or was stopped."""
    seq, calls = graph.calls()
    kept = {call.number for call in calls}
    children: dict[int | None, list[CallRecord]] = {}
    for call in calls:
        above = call.parent
        while above is not None and above.number not in kept:
            above = above.parent
        children.setdefault(above.number if above else None, []).append(call)
    lines: list[str] = []
    # A stack, not recursion: agent trees may be deeper than Python's.
    stack = [(call, "", True, True) for call in reversed(children.get(None, []))]
    while stack and len(lines) < max_lines:
        call, indent, last, top = stack.pop()
        below = children.get(call.number, [])
        branch = "" if top else ("└─ " if last else "├─ ")
        lines.append(indent + branch + _line(graph, call, seq))
        onward = "" if top else indent + ("   " if last else "│  ")
        stack.extend((child, onward, child is below[-1], False) for child in reversed(below))
    left_out = len(calls) - len(lines)
    if left_out:
        lines.append(f"… and {left_out} more calls")
    return "\n".join(lines)


def _line(graph: ExecutionGraph, call: CallRecord, seq: int) -> str:
    status = call.status_at(seq)
    parts = [f"{MARKS[status]} {_printable(call.name)}"]
    if call.kind != "system":
        parts.append(call.kind if call.model is None else f"{call.kind} {call.model}")
    if call.end_seq <= seq:
        late = call.settled
        if cost := call.cost + (late.cost if late else 0):
            parts.append(format_usd(cost))
        tokens_in = (call.tokens_in or 0) + (late.tokens_in if late else 0)
        tokens_out = (call.tokens_out or 0) + (late.tokens_out if late else 0)
        if tokens_in or tokens_out:
            parts.append(f"{tokens_in}→{tokens_out} tokens")
        parts.append(f"{(call.ended_ns - call.started_ns) / 1_000_000:.1f} ms")
        if status == "fail":
            parts.append(f"{call.error_class}: {call.stop_reason}" if call.stop_reason else str(call.error_class))
        elif call.stop_reason:
            parts.append(call.stop_reason)
        if call.abandoned:
            parts.append("abandoned" + (", settled late" if late else ""))
    folded = graph.folded.get(call.number)
    if folded is not None:
        parts.append(f"({folded.calls} more calls folded, {format_usd(folded.cost)})")
    return "  ".join(_printable(part) for part in parts)


def _printable(text: str) -> str:
    """One line of plain text: names come from anywhere, and may hold line breaks or terminal codes."""
    return "".join(c if c.isprintable() else "�" for c in text)
