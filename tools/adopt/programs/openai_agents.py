"""The OpenAI Agents SDK."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from agents import Agent, OpenAIResponsesModel, Runner, function_tool
from openai import AsyncOpenAI

from penstock.adapters import contained_tools
from tools.adopt.probes import REPEATS, TOOL_S, Site, drive, in_threads


def agent(site: Site, name: str = "writer", **options: Any) -> Agent[None]:
    client = AsyncOpenAI(base_url=site.openai_url, api_key=site.key)
    return Agent(name=name, model=OpenAIResponsesModel(site.model, client), **options)


@function_tool
def slow(query: str) -> str:
    """Search the archive."""
    time.sleep(TOOL_S)
    return "found"


async def single(site: Site) -> None:
    await Runner.run(agent(site), "hello")


def threads(site: Site) -> None:
    in_threads(lambda: asyncio.run(single(site)))


async def fanout(site: Site) -> None:
    await asyncio.gather(*(single(site) for _ in range(REPEATS)))


async def streaming(site: Site) -> None:
    for _ in range(REPEATS):
        async for _event in Runner.run_streamed(agent(site), "hello").stream_events():
            pass


async def subagents(site: Site) -> None:
    for _ in range(REPEATS):
        tool = agent(site, "researcher").as_tool("research", "Research a topic.")
        await Runner.run(agent(site, tools=[tool]), "hello")


async def ceiling(site: Site) -> None:
    for _ in range(REPEATS):
        await single(site)


async def with_tool(site: Site) -> None:
    await Runner.run(agent(site, tools=contained_tools(site.run, [slow])), "hello")


def cancel(site: Site) -> None:
    asyncio.set_event_loop(asyncio.new_event_loop())
    Runner.run_sync(agent(site), "hello")


async def cancel_async(site: Site) -> None:
    await single(site)


drive(
    "OpenAI Agents SDK",
    "openai-agents",
    single=single,
    threads=threads,
    fanout=fanout,
    streaming=streaming,
    subagents=subagents,
    ceiling=ceiling,
    tool=with_tool,
    cancel=cancel,
    cancel_async=cancel_async,
)
