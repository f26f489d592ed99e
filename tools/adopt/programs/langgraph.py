"""LangChain and LangGraph."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from penstock.adapters import contained_tools
from tools.adopt.probes import REPEATS, THREADS, TOOL_S, Site, drive

QUESTION = {"messages": [{"role": "user", "content": "hello"}]}


def model(site: Site) -> ChatOpenAI:
    return ChatOpenAI(model=site.model, base_url=site.openai_url, api_key=site.key)


@tool
def slow(query: str) -> str:
    """Search the archive."""
    time.sleep(TOOL_S)
    return "found"


def single(site: Site) -> None:
    model(site).invoke("hello")


def embeddings(site: Site) -> None:
    embedder = OpenAIEmbeddings(base_url=site.openai_url, api_key=site.key, check_embedding_ctx_length=False)
    for _ in range(REPEATS):
        embedder.embed_query("hello")


def threads(site: Site) -> None:
    model(site).batch(["hello"] * REPEATS, config={"max_concurrency": THREADS})


async def fanout(site: Site) -> None:
    client = model(site)
    await asyncio.gather(*(client.ainvoke("hello") for _ in range(REPEATS)))


def streaming(site: Site) -> None:
    for _ in range(REPEATS):
        list(model(site).stream("hello"))


def subagents(site: Site) -> None:
    researcher = create_agent(model(site), [])

    @tool
    def research(query: str) -> str:
        """Research a topic."""
        return str(researcher.invoke(QUESTION)["messages"][-1].content)

    lead = create_agent(model(site), [research])
    for _ in range(REPEATS):
        lead.invoke(QUESTION)


def ceiling(site: Site) -> None:
    agent: Any = create_agent(model(site), [])
    for _ in range(REPEATS):
        agent.invoke(QUESTION)


def with_tool(site: Site) -> None:
    create_agent(model(site), contained_tools(site.run, [slow])).invoke(QUESTION)


def cancel(site: Site) -> None:
    create_agent(model(site), []).invoke(QUESTION)


async def cancel_async(site: Site) -> None:
    await create_agent(model(site), []).ainvoke(QUESTION)


drive(
    "LangGraph",
    "langgraph",
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
