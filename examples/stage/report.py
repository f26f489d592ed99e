"""A run that has ended: what ran, why it stopped, what it left, and whether the money agrees."""

from __future__ import annotations

from collections.abc import Mapping

from stage.live import SCREEN

from penstock import ExecutionContext, Stop
from penstock.cli.render.call_tree import COLOURS, explain_stop
from penstock.cli.render.events import lead
from penstock.cli.render.local import run_event
from penstock.cli.render.screen import Line
from penstock.events import LimitTrace
from penstock.testing import Invoice

COLOUR_OF = {"✓": "green", "■": "yellow", "✗": "red"}


def report(
    run: ExecutionContext, invoice: Invoice, stop: Stop | None, findings: Mapping[str, str], *, asked_for: int
) -> bool:
    """Print it all; whether the ceiling held."""
    SCREEN.show(heading("What ran: run.explain()"), *explained(run), [])
    SCREEN.show(heading("Why it stopped"), *stopped(run, stop), [])
    SCREEN.show(heading(f"What is there: {len(findings)} of {asked_for} findings"), *found(findings), [])
    checks = agreement(run, invoice)
    SCREEN.show(heading("What it cost"), *compared(run, invoice), [], *map(checked, checks.items()))
    return all(checks.values())


def heading(text: str) -> Line:
    """A heading."""
    return [(text, "bold")]


def explained(run: ExecutionContext) -> list[Line]:
    """`run.explain()`, with every mark in its colour."""
    lines: list[Line] = []
    for line in run.explain().splitlines():
        mark = next((mark for mark in COLOUR_OF if mark in line), "")
        before, _, after = line.partition(mark) if mark else (line, "", "")
        lines.append([(f"  {before}", "dim"), (mark, COLOUR_OF.get(mark, "")), (after, "")])
    return lines


def stopped(run: ExecutionContext, stop: Stop | None) -> list[Line]:
    """Which limit, whose budget, how much; and every call that it refused."""
    if stop is None:
        return [[("  It was not: it ran to its end within its limits.", "")]]
    lines: list[Line] = [[("  ■ ", COLOURS["halt"]), (f"{stop.reason}: {stop.message}", "")]]
    log = run.history()
    for trace in log:
        if isinstance(trace, LimitTrace) and trace.unit == "usd":
            event = run_event(trace, log[0].at_ms)
            agent, call = trace.source.rpartition("/")[2], run.graph.call(trace.parent_id or "").name
            lines.append(
                [(f"  {lead(event)}", "dim"), (f"{agent:<16}{call:<10}", ""), (explain_stop(event.data), "dim")]
            )
    return lines


def found(findings: Mapping[str, str]) -> list[Line]:
    """The results that were complete when the stop came."""
    if not findings:
        return [[("  none was complete yet", "dim")]]
    return [[("  ✓ ", COLOURS["success"]), (f"{name:<16}", ""), (text, "dim")] for name, text in findings.items()]


def compared(run: ExecutionContext, invoice: Invoice) -> list[Line]:
    """The provider's invoice beside the run's ledger."""
    ledger, lines = run.balance, invoice.lines
    rows = [
        ("", "provider's invoice", "ledger"),
        ("model calls", f"{invoice.calls}", f"{ledger.api_calls}"),
        ("input tokens", f"{sum(line.input_tokens for line in lines):,}", f"{ledger.tokens_in:,}"),
        ("output tokens", f"{sum(line.output_tokens for line in lines):,}", f"{ledger.tokens_out:,}"),
        ("cost", usd(invoice.total_nanos), usd(ledger.spent_nanos)),
        ("held", "", usd(ledger.held_nanos)),
        ("bill unknown", "", usd(ledger.unresolved_nanos)),
        ("ceiling", "", usd(ledger.limits.cost_nanos)),
    ]
    return [[(f"  {name:<14}", "dim"), (f"{left:>20}{right:>16}", "" if name else "dim")] for name, left, right in rows]


def agreement(run: ExecutionContext, invoice: Invoice) -> dict[str, bool]:
    """What must be true of every run under a ceiling, however it ended."""
    ledger = run.balance
    owed, spent, unknown = invoice.total_nanos, ledger.spent_nanos, ledger.unresolved_nanos
    checks = {
        "the invoice is within the ceiling": owed <= ledger.limits.cost_nanos,
        "nothing is held any more": ledger.held_nanos == 0,
    }
    if unknown:
        return checks | {"the ledger keeps enough for the calls that were cut off": spent <= owed <= spent + unknown}
    return checks | {"the ledger and the invoice are the same": spent == owed}


def checked(check: tuple[str, bool]) -> Line:
    """One check, as it came out."""
    claim, holds = check
    return [("  ✓ " if holds else "  ✗ ", "green" if holds else "red"), (claim, "")]


def usd(nanos: int) -> str:
    """An amount with all the digits these prices have."""
    return f"${nanos / 1e9:.6f}"
