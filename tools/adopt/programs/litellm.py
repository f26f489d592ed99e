"""LiteLLM: one function for every provider; its async calls have an aiohttp transport of their own."""

from __future__ import annotations

import asyncio
from typing import Any

import litellm

from tools.adopt.probes import REPEATS, Site, drive, in_threads

HELLO = [{"role": "user", "content": "hello"}]


def how(site: Site, **options: Any) -> dict[str, Any]:
    return {"model": f"openai/{site.model}", "api_base": site.openai_url, "api_key": site.key, **options}


def single(site: Site) -> None:
    litellm.completion(messages=HELLO, **how(site))


def embeddings(site: Site) -> None:
    for _ in range(REPEATS):
        litellm.embedding(input=["hello"], **how(site, model="openai/text-embedding-3-small"))


def threads(site: Site) -> None:
    in_threads(lambda: single(site))


async def fanout(site: Site) -> None:
    await asyncio.gather(*(litellm.acompletion(messages=HELLO, **how(site)) for _ in range(REPEATS)))


def streaming(site: Site) -> None:
    for _ in range(REPEATS):
        list(litellm.completion(messages=HELLO, stream=True, **how(site)))


def ceiling(site: Site) -> None:
    for _ in range(REPEATS):
        single(site)


def cancel(site: Site) -> None:
    single(site)


async def cancel_async(site: Site) -> None:
    await litellm.acompletion(messages=HELLO, **how(site))


drive(
    "LiteLLM",
    "litellm",
    single=single,
    embeddings=embeddings,
    threads=threads,
    fanout=fanout,
    streaming=streaming,
    ceiling=ceiling,
    cancel=cancel,
    cancel_async=cancel_async,
)
