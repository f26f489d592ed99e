"""The graph stays inside its budget, and a halted run keeps its finished results. Run this file with pytest."""

from __future__ import annotations

import asyncio

import app  # type: ignore[import-not-found, unused-ignore]
import pytest

from penstock import Budget, BudgetExceededError, ExecutionContext, Price, PriceBook

PRICES = PriceBook(registered={"example": Price("0.15", "0.60")}, use_genai_prices=False)


def test_a_briefing_costs_less_than_a_tenth_of_a_cent() -> None:
    with ExecutionContext(input="dams", prices=PRICES, budget=Budget(max_cost_dollars=0.001)) as run:
        results = asyncio.run(app.graph.execute(run))
    assert "history of dams" in results["brief"]
    assert run.balance.spent_usd <= 0.001


def test_a_briefing_that_is_too_expensive_is_halted_and_keeps_what_was_finished() -> None:
    budget = Budget(max_cost_dollars=0.00003)
    with (
        pytest.raises(BudgetExceededError) as stopped,
        ExecutionContext(input="dams", prices=PRICES, budget=budget) as run,
    ):
        asyncio.run(app.graph.execute(run))
    assert "brief" not in stopped.value.partial_results
    assert run.balance.spent_usd <= 0.00003
