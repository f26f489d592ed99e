"""What a result means, and the table of all of them.

Knows the lines that programs print, and nothing of how they came about.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

from tools.adopt.probes import CAUSED_BY, PROBES, TOOL_TIMEOUT_S, Line

CENT_USD = 0.001
SOON_S = 3.0
"""Time within which a framework returns after a stop, its own clean-up included."""

EARLY_S = 0.1
"""A timer may fire a moment early."""

COLUMNS = {"cancel_async": "cancel, async", "fanout": "fan-out", "subagents": "sub-agents", "tool": "slow tool"}
"""Headings of probes that differ from their names."""


LAST_COLUMN = "at the ceiling the program gets"


class Verdict(StrEnum):
    """What one line says about containment."""

    HOLDS = "holds"
    REPORTED = "reported"
    LEAKS = "leaks"
    LATE = "late"
    NOT_TRIED = "not tried"


def judge(line: Line) -> Verdict:
    """Judge one probe: by the invoice, and where the run was stopped by the time, too."""
    if line.invoice_usd > line.ceiling_usd + CENT_USD or line.ledger_usd < line.invoice_usd - CENT_USD:
        return Verdict.REPORTED if line.uncontained else Verdict.LEAKS
    if line.outcome == "never returned" or line.seconds > _allowed_s(line.probe):
        return Verdict.LATE
    if line.invoice_usd == 0 or (line.probe == "tool" and line.seconds < TOOL_TIMEOUT_S - EARLY_S):
        return Verdict.NOT_TRIED  # nothing was requested, or the agent answered without its tool
    return Verdict.HOLDS


def _allowed_s(probe: str) -> float:
    if probe == "tool":
        return TOOL_TIMEOUT_S + SOON_S
    return SOON_S if probe.startswith("cancel") else float("inf")


def table(results: Mapping[str, tuple[Iterable[Line], str]]) -> str:
    """Return the results as a Markdown table, one row per framework."""
    headings = ["framework", *(COLUMNS.get(probe, probe) for probe in PROBES), LAST_COLUMN]
    rows = [_row(name, {line.probe: line for line in lines}, problem) for name, (lines, problem) in results.items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *rows))


def _row(name: str, lines: Mapping[str, Line], problem: str) -> list[str]:
    first = next(iter(lines.values()), None)
    heading = f"{name}: {problem}" if first is None else f"{first.framework} {first.version}"
    cells = [_cell(lines[probe]) if probe in lines else "–" for probe in PROBES]
    return [heading, *cells, _stopped(lines.get("ceiling"))]


def _stopped(line: Line | None) -> str:
    """Return how the probe of the ceiling ended: what the program gets when nothing is left."""
    if line is None:
        return "–"
    if line.outcome == "returned":
        return "no error"
    cause = _cause(line)
    return f"{line.outcome}, caused by {cause}" if cause else line.outcome


def _cause(line: Line) -> str:
    """Return the name of our error that the outcome was made of; empty if there is none."""
    note = line.note.partition(";")[0]
    return note.removeprefix(CAUSED_BY) if note.startswith(CAUSED_BY) else ""


def _cell(line: Line) -> str:
    amount, how_long = f"${line.invoice_usd:.2f}", f"{line.seconds:.1f} s"
    match judge(line):
        case Verdict.LEAKS:
            return f"**leaks {amount}**"
        case Verdict.REPORTED:
            return f"{amount}, reported"
        case Verdict.LATE:
            return f"**{line.outcome if line.outcome == 'never returned' else how_long}**"
        case Verdict.NOT_TRIED:
            return f"not tried ({line.outcome})"
        case Verdict.HOLDS if line.probe.startswith("cancel"):
            return how_long if "CancelledError" in (line.outcome, _cause(line)) else f"{how_long}, {line.outcome}"
        case Verdict.HOLDS:
            return how_long if line.probe == "tool" else amount
