"""DSPy, which calls models through its copy of lm15, and embeddings through LiteLLM."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import dspy

from penstock.adapters import contained_tools
from penstock.testing.provider import Say
from tools.adopt.probes import REPEATS, THREADS, TOOL_S, Site, drive

ANSWER = "[[ ## answer ## ]]\ndams\n\n[[ ## completed ## ]]"
"""As DSPy's own format has it."""


def model(site: Site) -> Any:
    return dspy.LM(f"openai/{site.model}", api_base=site.openai_url, api_key=site.key, cache=False, num_retries=0)


def slow(query: str) -> str:
    """Search the archive."""
    time.sleep(TOOL_S)
    return "found"


def single(site: Site) -> None:
    model(site)("hello")


def embeddings(site: Site) -> None:
    embedder = dspy.Embedder("openai/text-embedding-3-small", api_base=site.openai_url, api_key=site.key, caching=False)
    for _ in range(REPEATS):
        embedder(["hello"])


def threads(site: Site) -> None:
    ask = model(site)

    class Ask(dspy.Module):  # type: ignore[misc]
        def forward(self, question: str) -> Any:
            return ask(question)

    module = Ask()
    pairs = [(module, dspy.Example(question="hello").with_inputs("question")) for _ in range(REPEATS)]
    dspy.Parallel(num_threads=THREADS, max_errors=REPEATS, disable_progress_bar=True)(pairs)


async def fanout(site: Site) -> None:
    ask = model(site)
    await asyncio.gather(*(ask.acall("hello") for _ in range(REPEATS)))


async def streaming(site: Site) -> None:
    with dspy.context(lm=model(site)):
        listener = dspy.streaming.StreamListener(signature_field_name="answer", allow_reuse=True)
        ask = dspy.streamify(dspy.Predict("question -> answer"), stream_listeners=[listener])
        for _ in range(REPEATS):
            async for _ in ask(question="hello"):
                pass


def ceiling(site: Site) -> None:
    ask = model(site)
    for _ in range(REPEATS):
        ask("hello")


def with_tool(site: Site) -> None:
    [search] = contained_tools(site.run, [slow])
    single(site)
    dspy.Tool(search)(query="dams")


def cancel(site: Site) -> None:
    single(site)


async def cancel_async(site: Site) -> None:
    await model(site).acall("hello")


drive(
    "DSPy",
    "dspy",
    script=lambda _: Say(ANSWER),
    single=single,
    embeddings=embeddings,
    threads=threads,
    fanout=fanout,
    streaming=streaming,
    ceiling=ceiling,
    tool=with_tool,
    cancel=cancel,
    cancel_async=cancel_async,
)
