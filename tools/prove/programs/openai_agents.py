"""The OpenAI Agents SDK."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from agents import Agent, MaxTurnsExceeded, OpenAIChatCompletionsModel, RunHooks, Runner, SQLiteSession, function_tool
from openai import AsyncOpenAI, OpenAIError

from tools.prove.site import Site

DISTRIBUTION = "openai-agents"
NOT_APPLICABLE: dict[str, str] = {
    "resume": "durable execution comes from Temporal, Restate or DBOS, which it integrates",
}


def agent(site: Site, name: str = "writer", **options: Any) -> Agent[None]:
    client = AsyncOpenAI(base_url=site.openai_url, api_key=site.key)
    return Agent(name=name, model=OpenAIChatCompletionsModel(site.model, client), **options)


async def budget(site: Site) -> None:
    writer = agent(site)
    asked = [Runner.run(writer, f"dam {at}", max_turns=site.max_calls) for at in range(site.calls)]
    await asyncio.gather(*asked)


async def subagents(site: Site) -> None:
    tool = agent(site, "researcher").as_tool("research", "Research a topic.", max_turns=site.max_calls)
    try:
        await Runner.run(agent(site, tools=[tool]), "compare twenty dams", max_turns=site.max_calls)
    except MaxTurnsExceeded as error:
        site.stopped(error)


async def failures(site: Site) -> None:
    asks = agent(site)
    try:
        for _ in range(site.calls):
            with suppress(OpenAIError):
                await Runner.run(asks, "hello", max_turns=site.max_calls)
    except MaxTurnsExceeded as error:
        site.stopped(error)


async def retries(site: Site) -> None:
    asks = agent(site)

    async def step() -> None:
        for attempt in range(3):
            try:
                await Runner.run(asks, "hello", max_turns=1 + site.max_retries)
            except OpenAIError:
                if attempt == 2:
                    raise

    for _ in range(3):
        try:
            await step()
        except OpenAIError:
            continue
        except MaxTurnsExceeded as error:
            site.stopped(error)
            return


async def cancel_before(site: Site) -> None:
    result = Runner.run_streamed(agent(site), "hello")
    result.cancel()
    site.cancelling()
    async for _ in result.stream_events():
        pass


async def cancel_during(site: Site) -> None:
    async def cancel() -> None:
        await site.asked()
        site.cancelling()
        running[0].cancel()

    running = [Runner.run_streamed(agent(site), "first step")]
    cancelling = asyncio.create_task(cancel())
    for text in ("second step", "third step", None):
        async for _ in running[0].stream_events():
            pass
        if text is None or cancelling.done():
            break  # `cancel` ends the stream without an error: the program has to know
        running[0] = Runner.run_streamed(agent(site), text)


async def timeouts(site: Site) -> None:
    @function_tool
    def search(topic: str) -> str:
        """Search the archive."""
        return site.slow_tool()

    site.began()
    with suppress(TimeoutError):
        await asyncio.wait_for(Runner.run(agent(site, tools=[search]), "hello"), site.timeout_s)


async def events(site: Site) -> None:
    class Follow(RunHooks[None]):
        def __init__(self, case: str) -> None:
            self.case = case

        async def on_agent_start(self, context: Any, agent: Any) -> None:
            site.event(self.case, "start", "on_agent_start")

        async def on_agent_end(self, context: Any, agent: Any, output: Any) -> None:
            site.event(self.case, "end", "on_agent_end")

    async def follow(case: str) -> None:
        result = Runner.run_streamed(agent(site), f"case {case}", hooks=Follow(case))
        if case == "cancel":
            await site.asked(3)
            result.cancel()
        async for _ in result.stream_events():
            pass

    await follow("complete")
    with suppress(OpenAIError):
        await follow("fail")
    await follow("cancel")


async def chat(site: Site) -> None:
    session = SQLiteSession("chat-1", str(site.folder / "chats.db"))
    for text in ("question one", "question two") if site.attempt == 1 else ("question three",):
        result = Runner.run_streamed(agent(site), text, session=session)
        async for _ in result.stream_events():
            pass
