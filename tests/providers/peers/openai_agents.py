"""Sixteen agents of the OpenAI Agents SDK at once, each of which asks a model."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from typing import Any

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

from penstock import Price, PriceBook, contain
from penstock.providers import contained

url, _ = sys.argv[1:]
set_tracing_disabled(True)
prices = PriceBook(unknown="assume", assumed=Price(0, 0, request_usd=0.50), use_genai_prices=False)


async def stream(agent: Any) -> str:
    result = Runner.run_streamed(agent, "hello")
    async for _ in result.stream_events():
        pass
    return str(result.final_output)


async def main(kind: Any, streams: bool) -> None:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="k") as client:
        agent = Agent(name="asker", model=kind("fake-1", openai_client=client))
        with contain(max_cost_usd=1.00, prices=prices) as run, contained(run):
            work = [stream(agent) if streams else Runner.run(agent, "hello") for _ in range(16)]
            found = await asyncio.gather(*work, return_exceptions=True)
    errors = Counter(type(one).__name__ for one in found if isinstance(one, BaseException))
    sys.stdout.write(f"{dict(errors), run.balance.spent_usd + run.balance.unresolved_usd}\n")


for model in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
    for streams in (False, True):
        asyncio.run(main(model, streams))
