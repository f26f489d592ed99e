"""pydantic-ai."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from pydantic_ai import Agent, Embedder
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.toolsets import FunctionToolset

from penstock.adapters import contained_tools
from tools.adopt.probes import REPEATS, TOOL_S, Site, drive, in_threads


def provider(site: Site) -> OpenAIProvider:
    return OpenAIProvider(base_url=site.openai_url, api_key=site.key)


def agent(site: Site, **options: Any) -> Agent[None, str]:
    return Agent(OpenAIChatModel(site.model, provider=provider(site)), **options)


def slow(query: str) -> str:
    """Search the archive."""
    time.sleep(TOOL_S)
    return "found"


def single(site: Site) -> None:
    agent(site).run_sync("hello")


async def embeddings(site: Site) -> None:
    embedder = Embedder(OpenAIEmbeddingModel("text-embedding-3-small", provider=provider(site)))
    for _ in range(REPEATS):
        await embedder.embed_query("hello")


def threads(site: Site) -> None:
    in_threads(lambda: asyncio.run(agent(site).run("hello")))


async def fanout(site: Site) -> None:
    await asyncio.gather(*(agent(site).run("hello") for _ in range(REPEATS)))


async def streaming(site: Site) -> None:
    for _ in range(REPEATS):
        async with agent(site).run_stream("hello") as result:
            async for _piece in result.stream_text():
                pass


async def subagents(site: Site) -> None:
    researcher = agent(site)

    async def research(query: str) -> str:
        """Research a topic."""
        return (await researcher.run("hello")).output

    for _ in range(REPEATS):
        await agent(site, tools=[research]).run("hello")


def ceiling(site: Site) -> None:
    for _ in range(REPEATS):
        agent(site).run_sync("hello")


async def with_tool(site: Site) -> None:
    await agent(site, toolsets=contained_tools(site.run, [FunctionToolset([slow])])).run("hello")


def cancel(site: Site) -> None:
    agent(site).run_sync("hello")


async def cancel_async(site: Site) -> None:
    await agent(site).run("hello")


drive(
    "pydantic-ai",
    "pydantic-ai-slim",
    single=single,
    embeddings=embeddings,
    threads=threads,
    fanout=fanout,
    streaming=streaming,
    subagents=subagents,
    ceiling=ceiling,
    tool=with_tool,
    cancel=cancel,
    cancel_async=cancel_async,
)
