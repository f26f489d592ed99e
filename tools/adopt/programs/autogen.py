"""AutoGen: an assistant, and a team of two."""

from __future__ import annotations

import asyncio
import tempfile
import time
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_agentchat.tools import AgentTool
from autogen_core.memory import MemoryContent, MemoryMimeType
from autogen_core.models import ModelFamily, ModelInfo
from autogen_ext.memory.chromadb import (
    ChromaDBVectorMemory,
    CustomEmbeddingFunctionConfig,
    PersistentChromaDBVectorMemoryConfig,
)
from autogen_ext.models.openai import OpenAIChatCompletionClient
from chromadb.utils.embedding_functions import OpenAIEmbeddingFunction

from penstock.adapters import contained_tools
from tools.adopt.probes import REPEATS, TOOL_S, Site, drive, in_threads

ABILITIES = ModelInfo(
    vision=False, function_calling=True, json_output=False, family=ModelFamily.UNKNOWN, structured_output=False
)


def assistant(site: Site, name: str = "writer", **options: Any) -> AssistantAgent:
    client = OpenAIChatCompletionClient(
        model=site.model, base_url=site.openai_url, api_key=site.key, model_info=ABILITIES
    )
    return AssistantAgent(name, client, **options)


def slow(query: str) -> str:
    """Search the archive."""
    time.sleep(TOOL_S)
    return "found"


async def single(site: Site) -> None:
    await assistant(site).run(task="hello")


async def embeddings(site: Site) -> None:
    def embedder() -> OpenAIEmbeddingFunction:
        return OpenAIEmbeddingFunction(api_key=site.key, api_base=site.openai_url, model_name="text-embedding-3-small")

    with tempfile.TemporaryDirectory() as folder:
        memory = ChromaDBVectorMemory(
            PersistentChromaDBVectorMemoryConfig(
                persistence_path=folder, embedding_function_config=CustomEmbeddingFunctionConfig(function=embedder)
            )
        )
        for _ in range(REPEATS):
            await memory.add(MemoryContent(content="hello", mime_type=MemoryMimeType.TEXT))


def threads(site: Site) -> None:
    in_threads(lambda: asyncio.run(single(site)))


async def fanout(site: Site) -> None:
    await asyncio.gather(*(assistant(site).run(task="hello") for _ in range(REPEATS)))


async def streaming(site: Site) -> None:
    for _ in range(REPEATS):
        async for _piece in assistant(site, model_client_stream=True).run_stream(task="hello"):
            pass


async def subagents(site: Site) -> None:
    for _ in range(REPEATS):
        tool = AgentTool(assistant(site, "researcher", description="Research a topic."))
        await assistant(site, tools=[tool], reflect_on_tool_use=True).run(task="hello")


async def ceiling(site: Site) -> None:
    team = RoundRobinGroupChat(
        [assistant(site), assistant(site, "critic")], termination_condition=MaxMessageTermination(REPEATS)
    )
    await team.run(task="hello")


async def with_tool(site: Site) -> None:
    await assistant(site, tools=contained_tools(site.run, [slow])).run(task="hello")


async def cancel_async(site: Site) -> None:
    team = RoundRobinGroupChat(
        [assistant(site), assistant(site, "critic")], termination_condition=MaxMessageTermination(REPEATS)
    )
    await team.run(task="hello")


drive(
    "AutoGen",
    "autogen-agentchat",
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
