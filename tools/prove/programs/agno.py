"""agno."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from agno.agent import Agent
from agno.db.sqlite import SqliteDb
from agno.models.openai import OpenAIChat
from agno.run.agent import RunStatus
from agno.tools import tool

from tools.prove.site import Site

DISTRIBUTION = "agno"
NOT_APPLICABLE: dict[str, str] = {
    "timeouts": "has no time limit of a run or a tool",
}


def agent(site: Site, **options: Any) -> Agent:
    model = OpenAIChat(id=site.model, base_url=site.openai_url, api_key=site.key)
    return Agent(model=model, telemetry=False, **options)


async def budget(site: Site) -> None:
    writer = agent(site, tool_call_limit=3)
    await asyncio.gather(*(writer.arun(f"dam {at}") for at in range(site.calls)))


def subagents(site: Site) -> None:
    researcher = agent(site, name="researcher")

    @tool
    async def research(topic: str) -> str:
        """Research a topic."""
        return str((await researcher.arun(topic)).content)

    lead = agent(site, name="lead", tools=[research], tool_call_limit=3)  # and two of its own
    asyncio.run(lead.arun("compare twenty dams"))


def failures(site: Site) -> None:
    asks = agent(site, tool_call_limit=3)
    for _ in range(site.calls):
        asks.run("hello")  # its errors are in `status`


def retries(site: Site) -> None:
    asks = agent(site, retries=2, tool_call_limit=3)
    for _ in range(3):
        if asks.run("hello").status is RunStatus.completed:
            return


def cancel_before(site: Site) -> None:
    Agent.cancel_run("run-1")
    site.cancelling()
    site.stopped(str(agent(site).run("hello", run_id="run-1").status))


async def cancel_during(site: Site) -> None:
    async def three() -> None:
        for number, text in enumerate(("first step", "second step", "third step"), start=1):
            await agent(site).arun(text, run_id=f"run-{number}")

    task = asyncio.create_task(three())
    await site.asked()
    site.cancelling()
    await Agent.acancel_run("run-1")
    await asyncio.wait([task], timeout=1)
    task.cancel()  # `acancel_run` takes effect between two pieces of an answer, and there is none
    with suppress(asyncio.CancelledError):
        await task


def events(site: Site) -> None:
    kinds = {"RunStarted": "start", "RunCompleted": "end", "RunError": "end", "RunCancelled": "end"}

    async def follow(case: str) -> None:
        asks = agent(site)
        async for event in asks.arun(f"case {case}", stream=True, stream_events=True, run_id=f"run-{case}"):
            kind = getattr(event, "event", "")
            if kind in kinds:
                site.event(case, kinds[kind], kind)

    async def cancelled() -> None:
        task = asyncio.create_task(follow("cancel"))
        await site.asked(3)
        await Agent.acancel_run("run-cancel")
        done, _ = await asyncio.wait([task], timeout=5)
        if not done:  # `acancel_run` takes effect between two pieces of an answer, and there is none
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    for case in ("complete", "fail"):
        with suppress(Exception):
            asyncio.run(follow(case))
    asyncio.run(cancelled())


def resume(site: Site) -> None:
    @tool
    def step_one(topic: str) -> str:
        """Take the first step."""
        return str(agent(site).run("first step").content)

    @tool
    def step_two(topic: str) -> str:
        """Take the second step."""
        return str(agent(site).run("second step").content)

    database = SqliteDb(db_file=str(site.folder / "runs.db"))
    lead = agent(site, db=database, tools=[step_one, step_two], checkpoint="tool-batch", session_id="1")
    if site.attempt == 1:
        lead.run("Take both steps.", run_id="run-1")
    else:
        site.answer(lead.continue_run(run_id="run-1", session_id="1").content)


def chat(site: Site) -> None:
    database = SqliteDb(db_file=str(site.folder / "chats.db"))
    asks = agent(
        site, db=database, add_history_to_context=True, num_history_runs=10, session_id="chat-1", checkpoint="runs"
    )
    for text in ("question one", "question two") if site.attempt == 1 else ("question three",):
        list(asks.run(text, stream=True))
