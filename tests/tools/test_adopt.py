"""How `make adopt` judges what a framework did."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tools.adopt.judge import Verdict, judge, table
from tools.adopt.probes import Line

HOLDS = Line(
    framework="F",
    version="1",
    probe="threads",
    invoice_usd=0.10,
    ledger_usd=0.10,
    ceiling_usd=0.10,
    uncontained=0,
    outcome="BudgetExceededError",
    seconds=1.0,
    note="",
)


@pytest.mark.requirement("X-11")
@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        (HOLDS, Verdict.HOLDS),
        (replace(HOLDS, invoice_usd=0.40, ledger_usd=0.0), Verdict.LEAKS),
        (replace(HOLDS, invoice_usd=0.40, ledger_usd=0.40), Verdict.LEAKS),
        (replace(HOLDS, ledger_usd=0.08), Verdict.LEAKS),
        (replace(HOLDS, ledger_usd=0.08, uncontained=1), Verdict.REPORTED),
        (replace(HOLDS, invoice_usd=0, ledger_usd=0), Verdict.NOT_TRIED),
        (replace(HOLDS, probe="cancel", outcome="never returned"), Verdict.LATE),
        (replace(HOLDS, probe="tool", seconds=6.1), Verdict.LATE),
        (replace(HOLDS, probe="tool", seconds=1.1), Verdict.HOLDS),
        (replace(HOLDS, probe="tool", seconds=0.4, outcome="returned"), Verdict.NOT_TRIED),
    ],
)
def test_a_probe_is_judged_by_the_invoice_and_by_the_time(line: Line, verdict: Verdict) -> None:
    assert judge(line) is verdict


def test_the_table_shows_what_leaks_and_what_was_not_tried() -> None:
    leaks = replace(HOLDS, invoice_usd=0.40, ledger_usd=0)
    single = replace(HOLDS, probe="single", invoice_usd=0, ledger_usd=0, outcome="ClientError")
    rows = table({"f": ([single, leaks], ""), "g": ([], "not installed: no such package")}).splitlines()
    assert rows[2].startswith("| F 1 | not tried (ClientError) | – | **leaks $0.40** |")
    assert rows[3].startswith("| g: not installed: no such package | – |")
