"""The call tree of a hosted run as text, like `explain()` of a run in the process: the nested calls, and their ends.

Pure: reads columns of calls. Texts come from anywhere, so each line is plain text without apparent secrets.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.hosting.call_columns import ABANDONED, COST_UNKNOWN, KINDS, NONE, REPLAYED, STATUSES, TEXTS, CallColumns
from penstock.money import format_cost
from penstock.tracing.explain import MARKS
from penstock.tracing.redaction import Redaction

MAX_LINES = 2_000
WAITING_MARK = "◇"
MAX_INDENT = 120
"""Calls that are deeper are not indented further."""
MAX_TEXT = 300
"""Maximum length of a name or of the message of a stop."""


def explain_columns(tree: CallColumns, max_lines: int = MAX_LINES) -> tuple[str, int]:
    """Return one line for each call, indented below the call that made it, and the number of calls left out."""
    columns = tree.columns
    below: dict[int, list[int]] = {}
    for row, parent in enumerate(columns["parent"]):
        below.setdefault(parent, []).append(row)
    costs, unknown = _sums(tree)
    redaction = Redaction()
    lines: list[str] = []
    # A stack, not recursion: agent trees may be deeper than Python's.
    stack = [(row, "", "", "") for row in reversed(below.get(NONE, []))]
    while stack and len(lines) < max_lines:
        row, indent, branch, onward = stack.pop()
        parts = _parts(tree, row, costs[row], unknown[row])
        lines.append(indent + branch + "  ".join(_plain(redaction.text(part)) for part in parts))
        children = below.get(row, [])
        deeper = indent + onward if len(indent) < MAX_INDENT else indent
        for child in reversed(children):
            ends = child == children[-1]
            stack.append((child, deeper, "└─ " if ends else "├─ ", "   " if ends else "│  "))
    left_out = len(tree) + tree.left_out - len(lines)
    return "\n".join(lines), left_out


def _sums(tree: CallColumns) -> tuple[list[int], list[int]]:
    """Return the cost of each call with its descendants, and the number of calls of unknown cost among them."""
    parents, flags = tree.columns["parent"], tree.columns["flags"]
    # Results from the journal were paid for by an earlier attempt.
    costs = [0 if flag & REPLAYED else cost for cost, flag in zip(tree.columns["cost_nanos"], flags, strict=True)]
    unknown = [int(bool(flag & COST_UNKNOWN) and not flag & REPLAYED) for flag in flags]
    for row in range(len(tree) - 1, -1, -1):  # a call comes after the one that made it
        if parents[row] != NONE:
            costs[parents[row]] += costs[row]
            unknown[parents[row]] += unknown[row]
    return costs, unknown


def _parts(tree: CallColumns, row: int, cost: int, unknown: int) -> Iterator[str]:
    value = {name: column[row] for name, column in tree.columns.items()}
    status, kind = STATUSES[value["status"]], KINDS[value["kind"]]
    text = {name: "" if value[name] == NONE else tree.strings[value[name]] for name in TEXTS}
    yield f"{MARKS.get(status, WAITING_MARK)} {text['name']}"
    if text["node_type"]:
        yield f"{text['node_type']} {text['node']}"
    elif kind != "system":
        yield f"{kind} {text['model']}".rstrip()
    if value["attempt"] > 1:
        yield f"attempt {value['attempt']}"
    if cost or unknown:
        yield format_cost(cost, unknown)
    if value["tokens_in"] or value["tokens_out"]:
        yield f"{value['tokens_in']}→{value['tokens_out']} tokens"
    if value["end_ms"] != NONE:
        yield _duration(value["end_ms"] - value["start_ms"])
    else:
        yield "waits for a budget" if status == "waiting" else "in progress"
    if value["flags"] & REPLAYED:
        yield "from the journal"
    if value["flags"] & ABANDONED:
        yield "abandoned"
    if status not in ("success", "running", "waiting") and value["stop"] != NONE:
        stop = tree.stops[value["stop"]]
        yield str(stop["message"] if stop.get("cause", True) else stop["reason"])


def _duration(ms: int) -> str:
    return f"{ms} ms" if ms < 1_000 else f"{ms / 1_000:.2f} s"


def _plain(text: str) -> str:
    """Return one line of printable text: names may hold line breaks or terminal codes."""
    shown = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in shown)
