"""Sixteen pydantic-ai agents at once, each of which asks a model."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from penstock import Price, PriceBook, contain
from penstock.providers import contained

url, api = sys.argv[1:]
model: Any
if api == "openai":
    model = OpenAIChatModel("fake-1", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="k"))
else:
    import anthropic

    provider = AnthropicProvider(anthropic_client=anthropic.AsyncAnthropic(base_url=url, api_key="k"))
    model = AnthropicModel("fake-1", provider=provider)
agent = Agent(model)


async def stream() -> str:
    async with agent.run_stream("hello") as result:
        return str(await result.get_output())


async def plain() -> str:
    return (await agent.run("hello")).output


async def main() -> None:
    for ask in (plain, stream):
        with contain(max_cost_usd=1.00, prices=prices) as run, contained(run):
            found = await asyncio.gather(*(ask() for _ in range(16)), return_exceptions=True)
        errors = Counter(type(one).__name__ for one in found if isinstance(one, BaseException))
        sys.stdout.write(f"{dict(errors), run.balance.spent_usd + run.balance.unresolved_usd}\n")


prices = PriceBook(unknown="assume", assumed=Price(0, 0, request_usd=0.50), use_genai_prices=False)
asyncio.run(main())
