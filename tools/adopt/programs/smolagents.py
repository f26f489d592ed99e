"""smolagents."""

from __future__ import annotations

import time
from typing import Any

from smolagents import OpenAIModel, ToolCallingAgent, tool

from penstock.adapters import contained_tools
from tools.adopt.probes import REPEATS, TOOL_S, Site, drive, in_threads, use_tools

HELLO = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]


def model(site: Site) -> OpenAIModel:
    return OpenAIModel(site.model, api_base=site.openai_url, api_key=site.key)


def agent(site: Site, tools: list[Any], **options: Any) -> ToolCallingAgent:
    return ToolCallingAgent(tools, model(site), verbosity_level=0, **options)


@tool
def slow(query: str) -> str:
    """Search the archive.

    Args:
        query: what to search for
    """
    time.sleep(TOOL_S)
    return "found"


def single(site: Site) -> None:
    model(site).generate(HELLO)


def threads(site: Site) -> None:
    in_threads(lambda: single(site))


def streaming(site: Site) -> None:
    for _ in range(REPEATS):
        list(model(site).generate_stream(HELLO))


def subagents(site: Site) -> None:
    for _ in range(REPEATS):
        researcher = agent(site, [], name="researcher", description="Research a topic.")
        agent(site, [], managed_agents=[researcher]).run("hello")


def ceiling(site: Site) -> None:
    for _ in range(REPEATS):
        agent(site, []).run("hello")


def with_tool(site: Site) -> None:
    agent(site, contained_tools(site.run, [slow])).run("hello")


def cancel(site: Site) -> None:
    agent(site, []).run("hello")


drive(
    "smolagents",
    "smolagents",
    script=use_tools,
    single=single,
    threads=threads,
    streaming=streaming,
    subagents=subagents,
    ceiling=ceiling,
    tool=with_tool,
    cancel=cancel,
)
