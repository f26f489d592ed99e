"""The steps that let a halted run go on, by what halted it."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.hosting.halts import advice
from penstock.hosting.ports import TRANSITIONS, RunRecord

MONEY = {"whose": "run", "stop_reason": "budget_exceeded", "unit": "usd", "limit": 1.0, "used": 0.6}


def halted(halt: dict[str, Any] | None, reason: str = "budget_exceeded", **figures: Any) -> RunRecord:
    return RunRecord("r", "ann", "g", 1, status="halted", stop_reason=reason, halt=halt, **figures)


def steps(run: RunRecord) -> list[tuple[str, float | None]]:
    return [(step.step, step.amount_usd) for step in advice(run)]


@pytest.mark.requirement("X-10")
@pytest.mark.parametrize(
    ("halt", "figures", "expected"),
    [
        ({"asked": 0.5}, {}, [("grant", 0.1)]),
        ({}, {}, [("grant", None)]),
        (
            {"asked": 0.5, "held": 0.3},
            {"unresolved_nanos": 300_000_000},
            [("resolve_bills", 0.3), ("limit_output", None), ("grant", 0.4)],
        ),
        ({"asked": 0.5, "held": 0.3}, {}, [("resume", None), ("grant", 0.1)]),
        ({"asked": 0.3, "held": 0.3}, {}, [("resume", None), ("grant", None)]),
        ({"asked": 0.5, "held": 0.3, "momentary": True}, {}, [("wait", None), ("grant", 0.1)]),
        ({"whose": "owner"}, {}, [("raise_daily_budget", None)]),
        ({"whose": "all", "held": 0.1, "momentary": True}, {}, [("wait", None), ("raise_daily_budget", None)]),
        (
            {"whose": "owner", "held": 0.3},
            {"unresolved_nanos": 300_000_000},
            [("resolve_bills", 0.3), ("limit_output", None), ("raise_daily_budget", None)],
        ),
        ({"whose": "node"}, {"unresolved_nanos": 1}, [("change_graph", None)]),
        ({"whose": "node", "unit": "seconds"}, {}, [("resume", None), ("change_graph", None)]),
    ],
)
def test_advice_for_a_limit_of_money(
    halt: dict[str, Any], figures: dict[str, int], expected: list[tuple[str, float | None]]
) -> None:
    assert steps(halted({**MONEY, **halt}, cost_nanos=600_000_000, **figures)) == expected


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("step_limit_exceeded", [("grant", None)]),
        ("timeout", [("grant", None)]),
        ("price_unknown", [("register_price", None)]),
        ("circuit_open", [("resume", None)]),
    ],
)
def test_advice_for_other_reasons(reason: str, expected: list[tuple[str, float | None]]) -> None:
    assert steps(halted(None, reason, unresolved_nanos=5)) == expected


@pytest.mark.parametrize("status", TRANSITIONS)
def test_only_halted_runs_get_advice(status: Any) -> None:
    assert bool(advice(halted(None)._replace(status=status))) is (status == "halted")
