"""Google's ADK, over Gemini's own format."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models import Gemini
from google.adk.runners import InMemoryRunner
from google.adk.tools.agent_tool import AgentTool
from google.genai.types import Content, Part

from penstock.adapters import contained_tools
from tools.adopt.probes import REPEATS, TOOL_S, Site, drive, in_threads


def agent(site: Site, name: str = "writer", **options: Any) -> LlmAgent:
    os.environ["GOOGLE_GEMINI_BASE_URL"] = site.url
    return LlmAgent(name=name, model=Gemini(model="gemini-2.5-flash", base_url=site.url), **options)


async def ask(root: LlmAgent, **options: Any) -> None:
    await InMemoryRunner(root, app_name="adopt").run_debug("hello", quiet=True, **options)


def slow(query: str) -> str:
    """Search the archive."""
    time.sleep(TOOL_S)
    return "found"


async def single(site: Site) -> None:
    await ask(agent(site))


def threads(site: Site) -> None:
    in_threads(lambda: asyncio.run(single(site)))


async def fanout(site: Site) -> None:
    await asyncio.gather(*(single(site) for _ in range(REPEATS)))


async def streaming(site: Site) -> None:
    for _ in range(REPEATS):
        await ask(agent(site), run_config=RunConfig(streaming_mode=StreamingMode.SSE))


async def subagents(site: Site) -> None:
    researcher = agent(site, "researcher", description="Research a topic.")
    for _ in range(REPEATS):
        await ask(agent(site, tools=[AgentTool(researcher)]))


async def ceiling(site: Site) -> None:
    for _ in range(REPEATS):
        await single(site)


async def with_tool(site: Site) -> None:
    await ask(agent(site, tools=contained_tools(site.run, [slow])))


def cancel(site: Site) -> None:
    runner = InMemoryRunner(agent(site), app_name="adopt")
    session = asyncio.run(runner.session_service.create_session(app_name="adopt", user_id="someone"))
    hello = Content(role="user", parts=[Part(text="hello")])
    for _event in runner.run(user_id="someone", session_id=session.id, new_message=hello):
        pass


async def cancel_async(site: Site) -> None:
    await single(site)


drive(
    "ADK",
    "google-adk",
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
