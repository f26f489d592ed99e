"""Agents that share a budget wait for each other instead of refusing each other."""

from __future__ import annotations

import asyncio

import pytest

from penstock import Agent, contain
from penstock.agents.model import ModelRequest, ModelResponse
from penstock.agents.scripted import ScriptedModel
from penstock.events import CallWaiting
from penstock.runtime.billing.prices import Price, PriceBook
from penstock.runtime.billing.usage import Usage
from penstock.testing import SimLoop, check_history, sim_run

pytestmark = pytest.mark.requirement("X-9")

PRICES = PriceBook(registered={"scripted": Price(15, 75)}, use_genai_prices=False)
"""US dollars per million tokens."""


class Slow(ScriptedModel):
    """A model whose calls overlap, and whose worst case is a third of a dollar."""

    max_output_tokens = 4_096

    async def request(self, request: ModelRequest) -> ModelResponse:
        await asyncio.sleep(1)
        return await super().request(request)


def test_six_agents_complete_under_a_dollar_although_three_of_their_worst_cases_fill_it() -> None:
    seen: list[int] = []

    def answer(request: ModelRequest) -> ModelResponse:
        seen.append(request.max_output_tokens)
        return ModelResponse("found", usage=Usage(200, 100, model="scripted"))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        agent = Agent(Slow(answer), name="researcher")
        run = contain(max_cost_usd=1, prices=PRICES, clock=loop.clock)
        results = await asyncio.gather(*(agent.run(f"topic {n}", run) for n in range(6)))
        assert [(result.output, result.error) for result in results] == [("found", None)] * 6
        assert run.balance.spent_usd == pytest.approx(6 * (200 * 15 + 100 * 75) / 1e6)
        assert any(isinstance(event, CallWaiting) for event in run.history())
        run.end()
        assert check_history(run.history(), ledger=run.balance) == []

    sim_run(main, seed=1)
    assert seen == [4_096] * 6, "no answer was clamped because of the others"
