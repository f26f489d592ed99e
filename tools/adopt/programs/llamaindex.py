"""LlamaIndex."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent
from llama_index.embeddings.openai import OpenAIEmbedding
from llama_index.llms.openai_like import OpenAILike

from penstock.adapters import contained_tools
from tools.adopt.probes import REPEATS, TOOL_S, Site, drive, in_threads


def model(site: Site) -> OpenAILike:
    return OpenAILike(
        model=site.model,
        api_base=site.openai_url,
        api_key=site.key,
        is_chat_model=True,
        is_function_calling_model=True,
    )


def agent(site: Site, **options: Any) -> FunctionAgent:
    return FunctionAgent(llm=model(site), streaming=False, **options)


def slow(query: str) -> str:
    """Search the archive."""
    time.sleep(TOOL_S)
    return "found"


def single(site: Site) -> None:
    model(site).complete("hello")


def embeddings(site: Site) -> None:
    embedder = OpenAIEmbedding(api_base=site.openai_url, api_key=site.key, max_retries=0)
    for _ in range(REPEATS):
        embedder.get_text_embedding("hello")


def threads(site: Site) -> None:
    in_threads(lambda: single(site))


async def fanout(site: Site) -> None:
    client = model(site)
    await asyncio.gather(*(client.acomplete("hello") for _ in range(REPEATS)))


def streaming(site: Site) -> None:
    for _ in range(REPEATS):
        list(model(site).stream_complete("hello"))


async def subagents(site: Site) -> None:
    async def research(query: str) -> str:
        """Research a topic."""
        return str(await AgentWorkflow(agents=[agent(site, name="researcher", tools=[])]).run("hello"))

    for _ in range(REPEATS):
        await AgentWorkflow(agents=[agent(site, name="lead", tools=[research])]).run("hello")


async def ceiling(site: Site) -> None:
    for _ in range(REPEATS):
        await agent(site, tools=[]).run("hello")


async def with_tool(site: Site) -> None:
    await agent(site, tools=contained_tools(site.run, [slow])).run("hello")


def cancel(site: Site) -> None:
    single(site)


async def cancel_async(site: Site) -> None:
    await agent(site, tools=[]).run("hello")


drive(
    "LlamaIndex",
    "llama-index-core",
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
