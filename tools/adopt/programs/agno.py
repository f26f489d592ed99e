"""agno."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from agno.agent import Agent
from agno.knowledge.embedder.openai import OpenAIEmbedder
from agno.models.openai import OpenAIChat
from agno.team import Team
from agno.tools import tool

from penstock.adapters import contained_tools
from tools.adopt.probes import REPEATS, TOOL_S, Site, drive, in_threads


def model(site: Site) -> OpenAIChat:
    return OpenAIChat(id=site.model, base_url=site.openai_url, api_key=site.key)


def agent(site: Site, **options: Any) -> Agent:
    return Agent(model=model(site), telemetry=False, **options)


@tool
def slow(query: str) -> str:
    """Search the archive."""
    time.sleep(TOOL_S)
    return "found"


def single(site: Site) -> None:
    agent(site).run("hello")


def embeddings(site: Site) -> None:
    embedder = OpenAIEmbedder(base_url=site.openai_url, api_key=site.key)
    for _ in range(REPEATS):
        embedder.get_embedding("hello")


def threads(site: Site) -> None:
    in_threads(lambda: single(site))


async def fanout(site: Site) -> None:
    await asyncio.gather(*(agent(site).arun("hello") for _ in range(REPEATS)))


def streaming(site: Site) -> None:
    for _ in range(REPEATS):
        list(agent(site).run("hello", stream=True))


def subagents(site: Site) -> None:
    for _ in range(REPEATS):
        Team(members=[agent(site, name="researcher")], model=model(site), telemetry=False).run("hello")


def ceiling(site: Site) -> None:
    for _ in range(REPEATS):
        single(site)


def with_tool(site: Site) -> None:
    agent(site, tools=contained_tools(site.run, [slow])).run("hello")


def cancel(site: Site) -> None:
    single(site)


async def cancel_async(site: Site) -> None:
    await agent(site).arun("hello")


drive(
    "agno",
    "agno",
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
