"""Sixteen calls at once over the clients' other transport, aiohttp."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from typing import Any

import anthropic
import openai

from penstock import Price, PriceBook, contain
from penstock.providers import contained

url, _ = sys.argv[1:]
prompt: Any = [{"role": "user", "content": "hello"}]
prices = PriceBook(unknown="assume", assumed=Price(0, 0, request_usd=0.50), use_genai_prices=False)


async def chat(client: Any) -> None:
    await client.chat.completions.create(model="fake-1", messages=prompt)


async def chat_stream(client: Any) -> None:
    async for _ in await client.chat.completions.create(model="fake-1", messages=prompt, stream=True):
        pass


async def messages(client: Any) -> None:
    await client.messages.create(model="fake-1", messages=prompt, max_tokens=100)


async def main() -> None:
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", http_client=openai.DefaultAioHttpClient()) as one,
        anthropic.AsyncAnthropic(base_url=url, api_key="k", http_client=anthropic.DefaultAioHttpClient()) as other,
    ):
        for ask, client in ((chat, one), (chat_stream, one), (messages, other)):
            with contain(max_cost_usd=1.00, prices=prices) as run, contained(run):
                found = await asyncio.gather(*(ask(client) for _ in range(16)), return_exceptions=True)
            errors = Counter(type(one).__name__ for one in found if isinstance(one, BaseException))
            sys.stdout.write(f"{dict(errors), run.balance.spent_usd + run.balance.unresolved_usd}\n")


asyncio.run(main())
