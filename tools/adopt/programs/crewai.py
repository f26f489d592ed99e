"""CrewAI."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from crewai import LLM, Agent, Crew, Process, Task
from crewai.rag.embeddings.factory import build_embedder
from crewai.tools import tool

from penstock.adapters import contained_tools
from tools.adopt.probes import REPEATS, TOOL_S, Site, drive


def model(site: Site, **options: Any) -> Any:
    return LLM(model=f"openai/{site.model}", base_url=site.openai_url, api_key=site.key, **options)


def agent(site: Site, role: str = "writer", **options: Any) -> Agent:
    return Agent(role=role, goal="write", backstory="a writer", llm=model(site), verbose=False, **options)


def crew(site: Site, *agents: Agent, **options: Any) -> Crew:
    tasks = [Task(description="Say hello.", expected_output="a greeting", agent=one) for one in agents]
    return Crew(agents=list(agents), tasks=tasks, verbose=False, tracing=False, **options)


@tool
def slow(query: str) -> str:
    """Search the archive."""
    time.sleep(TOOL_S)
    return "found"


def single(site: Site) -> None:
    crew(site, agent(site)).kickoff()


def embeddings(site: Site) -> None:
    settings = {"model_name": "text-embedding-3-small", "api_base": site.openai_url, "api_key": site.key}
    embedder: Any = build_embedder({"provider": "openai", "config": settings})
    for _ in range(REPEATS):
        embedder(["hello"])


def threads(site: Site) -> None:
    tasks = [
        Task(description="Say hello.", expected_output="a greeting", agent=agent(site), async_execution=True)
        for _ in range(REPEATS)
    ]
    last = Task(description="Sum up.", expected_output="a greeting", agent=agent(site))
    Crew(agents=[task.agent for task in tasks], tasks=[*tasks, last], verbose=False, tracing=False).kickoff()


async def fanout(site: Site) -> None:
    await asyncio.gather(*(crew(site, agent(site)).kickoff_async() for _ in range(REPEATS)))


def streaming(site: Site) -> None:
    ask = model(site, stream=True)
    for _ in range(REPEATS):
        ask.call("hello")


def subagents(site: Site) -> None:
    for _ in range(REPEATS):
        crew(site, agent(site), process=Process.hierarchical, manager_llm=model(site)).kickoff()


def ceiling(site: Site) -> None:
    for _ in range(REPEATS):
        single(site)


def with_tool(site: Site) -> None:
    crew(site, agent(site, tools=contained_tools(site.run, [slow]))).kickoff()


def cancel(site: Site) -> None:
    single(site)


async def cancel_async(site: Site) -> None:
    await crew(site, agent(site)).akickoff()


drive(
    "CrewAI",
    "crewai",
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
