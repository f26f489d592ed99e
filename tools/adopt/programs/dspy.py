"""DSPy, which calls models through its copy of lm15, and embeddings through LiteLLM."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import dspy
import litellm  # noqa: F401  # DSPy imports it with the first embedding, which can take longer than a probe may

from penstock.adapters import contained_tools
from penstock.testing.provider import Say, WireRequest
from tools.adopt.probes import REPEATS, THREADS, TOOL_S, Site, drive


def answer(**fields: str) -> Say:
    """Return an answer with these fields in DSPy's own format."""
    return Say("".join(f"[[ ## {name} ## ]]\n{value}\n\n" for name, value in fields.items()) + "[[ ## completed ## ]]")


def react(request: WireRequest) -> Say:
    """Play a model that calls the first tool of a `ReAct` once, and answers after its result."""
    prompt = str(request.fields.get("messages") or request.fields.get("input"))
    if "next_tool_name" not in prompt:
        return answer(reasoning="none", answer="dams")
    tools = re.findall(r"\(1\) (\w+)", prompt)
    name, args = ("finish", "{}") if "observation_0" in prompt else (tools[0], '{"query": "dams"}')
    return answer(next_thought="none", next_tool_name=name, next_tool_args=args)


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


def subagents(site: Site) -> None:
    def research(query: str) -> str:
        """Research a topic."""
        return str(dspy.Predict("question -> answer")(question=query).answer)

    with dspy.context(lm=model(site)):
        lead = dspy.ReAct("question -> answer", tools=[research])
        for _ in range(REPEATS):
            lead(question="hello")


def ceiling(site: Site) -> None:
    ask = model(site)
    for _ in range(REPEATS):
        ask("hello")


def with_tool(site: Site) -> None:
    with dspy.context(lm=model(site)):
        dspy.ReAct("question -> answer", tools=contained_tools(site.run, [slow]))(question="hello")


def cancel(site: Site) -> None:
    single(site)


async def cancel_async(site: Site) -> None:
    await model(site).acall("hello")


drive(
    "DSPy",
    "dspy",
    script=lambda _: answer(answer="dams"),
    tools_script=react,
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
