"""Microsoft's agent-framework."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from agent_framework import Agent
from agent_framework.openai import OpenAIChatCompletionClient, OpenAIEmbeddingClient

from penstock.adapters import contained_tools
from tools.adopt.probes import REPEATS, TOOL_S, Site, drive, in_threads


def agent(site: Site, **options: Any) -> Agent:
    client = OpenAIChatCompletionClient(site.model, base_url=site.openai_url, api_key=site.key)
    return Agent(client, **options)


def slow(query: str) -> str:
    """Search the archive."""
    time.sleep(TOOL_S)
    return "found"


async def single(site: Site) -> None:
    await agent(site).run("hello")


async def embeddings(site: Site) -> None:
    embedder = OpenAIEmbeddingClient(model="text-embedding-3-small", base_url=site.openai_url, api_key=site.key)
    for _ in range(REPEATS):
        await embedder.get_embeddings(["hello"])


def threads(site: Site) -> None:
    in_threads(lambda: asyncio.run(single(site)))


async def fanout(site: Site) -> None:
    await asyncio.gather(*(single(site) for _ in range(REPEATS)))


async def streaming(site: Site) -> None:
    for _ in range(REPEATS):
        async for _piece in agent(site).run("hello", stream=True):
            pass


async def subagents(site: Site) -> None:
    for _ in range(REPEATS):
        researcher = agent(site, name="researcher", description="Research a topic.")
        await agent(site, tools=[researcher.as_tool()]).run("hello")


async def ceiling(site: Site) -> None:
    for _ in range(REPEATS):
        await single(site)


async def with_tool(site: Site) -> None:
    await agent(site, tools=contained_tools(site.run, [slow])).run("hello")


async def cancel_async(site: Site) -> None:
    await single(site)


drive(
    "agent-framework",
    "agent-framework-core",
    single=single,
    embeddings=embeddings,
    threads=threads,
    fanout=fanout,
    streaming=streaming,
    subagents=subagents,
    ceiling=ceiling,
    tool=with_tool,
    cancel_async=cancel_async,
)
