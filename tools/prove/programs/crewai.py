"""CrewAI."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from crewai import LLM, Agent, Crew, Task
from crewai.events import CrewKickoffCompletedEvent, CrewKickoffFailedEvent, CrewKickoffStartedEvent, crewai_event_bus
from crewai.flow import Flow, persist
from crewai.flow.conversational import ConversationConfig, ConversationState
from crewai.flow.persistence.sqlite import SQLiteFlowPersistence
from crewai.state.checkpoint_config import CheckpointConfig
from crewai.tools import tool

from tools.prove.site import Site

DISTRIBUTION = "crewai"
NOT_APPLICABLE: dict[str, str] = {}


def agent(site: Site, **options: Any) -> Agent:
    model = LLM(model=f"openai/{site.model}", base_url=site.openai_url, api_key=site.key)
    return Agent(role="writer", goal="write", backstory="a writer", llm=model, verbose=False, **options)


def task(text: str, one: Agent, **options: Any) -> Task:
    return Task(description=text, expected_output="a text", agent=one, **options)


def crew(*tasks: Task, **options: Any) -> Crew:
    agents = [one.agent for one in tasks if one.agent is not None]
    return Crew(agents=agents, tasks=list(tasks), verbose=False, tracing=False, **options)


def budget(site: Site) -> None:
    writer = agent(site, max_iter=site.max_calls)
    writers = [agent(site, max_iter=site.max_calls) for _ in range(site.calls)]
    tasks = [task(f"Describe dam {at}.", one, async_execution=True) for at, one in enumerate(writers)]
    crew(*tasks, task("Compare the dams.", writer)).kickoff()


def subagents(site: Site) -> None:
    researcher = agent(site)

    @tool
    def research(topic: str) -> str:
        """Research a topic."""
        return str(researcher.kickoff(topic).raw)

    research.max_usage_count = 3
    crew(task("Compare twenty dams.", agent(site, tools=[research], max_iter=site.max_calls))).kickoff()


def failures(site: Site) -> None:
    writer = agent(site, max_iter=site.max_calls, max_retry_limit=0)
    for _ in range(site.calls):
        with suppress(Exception):
            crew(task("Say hello.", writer)).kickoff()


def retries(site: Site) -> None:
    writer = agent(site, max_iter=1 + site.max_retries, max_retry_limit=2)
    for _ in range(3):
        with suppress(Exception):
            crew(task("Say hello.", writer)).kickoff()


async def cancel_before(site: Site) -> None:
    running = asyncio.create_task(crew(task("Say hello.", agent(site))).akickoff())
    running.cancel()
    site.cancelling()
    with suppress(asyncio.CancelledError):
        await running


async def cancel_during(site: Site) -> None:
    writer = agent(site)
    tasks = [task(text, writer) for text in ("first step", "second step", "third step")]
    running = asyncio.create_task(crew(*tasks).akickoff())
    await site.asked()
    site.cancelling()
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


def timeouts(site: Site) -> None:
    @tool
    def search(topic: str) -> str:
        """Search the archive."""
        return site.slow_tool()

    writer = agent(site, tools=[search], max_execution_time=int(site.timeout_s), max_retry_limit=0)
    site.began()
    try:
        crew(task("Say hello.", writer)).kickoff()
    except TimeoutError as error:
        site.stopped(error)


async def events(site: Site) -> None:
    case = "complete"

    @crewai_event_bus.on(CrewKickoffStartedEvent)
    def started(source: Any, event: Any) -> None:
        site.event(case, "start", event.type)

    @crewai_event_bus.on(CrewKickoffCompletedEvent)
    def completed(source: Any, event: Any) -> None:
        site.event(case, "end", event.type)

    @crewai_event_bus.on(CrewKickoffFailedEvent)
    def failed(source: Any, event: Any) -> None:
        site.event(case, "end", event.type)

    for case in ("complete", "fail"):
        with suppress(Exception):
            await crew(task(f"case {case}", agent(site, max_retry_limit=0))).akickoff()
        crewai_event_bus.flush()
    case = "cancel"
    running = asyncio.create_task(crew(task("case cancel", agent(site, max_retry_limit=0))).akickoff())
    await site.asked(3)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    crewai_event_bus.flush()


def resume(site: Site) -> None:
    folder = site.folder / "checkpoints"
    if site.attempt == 1:
        writer = agent(site)
        tasks = [task("first step", writer), task("second step", writer)]
        crew(*tasks, checkpoint=CheckpointConfig(location=str(folder))).kickoff()
    else:
        newest = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_mtime)
        site.answer(Crew.from_checkpoint(CheckpointConfig(restore_from=str(newest))).kickoff())


def chat(site: Site) -> None:
    model = LLM(model=f"openai/{site.model}", base_url=site.openai_url, api_key=site.key)

    @persist(SQLiteFlowPersistence(db_path=str(site.folder / "chats.db")))
    @ConversationConfig(llm=model)
    class Talk(Flow[ConversationState]):
        """A conversation."""

    for text in ("question one", "question two") if site.attempt == 1 else ("question three",):
        Talk().handle_turn(text, session_id="chat-1")
