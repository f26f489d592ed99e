"""LangGraph, with LangChain's agents and their middleware."""

from __future__ import annotations

import asyncio
import operator
from contextlib import suppress
from typing import Annotated, Any, TypedDict

from langchain.agents import create_agent
from langchain.agents.middleware import ModelCallLimitMiddleware, ModelRetryMiddleware, ToolCallLimitMiddleware
from langchain.agents.middleware.model_call_limit import ModelCallLimitExceededError
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send
from openai import OpenAIError

from tools.prove.site import Site

DISTRIBUTION = "langgraph"
NOT_APPLICABLE: dict[str, str] = {}

THREAD: Any = {"configurable": {"thread_id": "1"}}


class Found(TypedDict):
    found: Annotated[list[str], operator.add]


class State(TypedDict, total=False):
    first: str
    second: str
    third: str


def model(site: Site, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(model=site.model, base_url=site.openai_url, api_key=site.key, **options)


def question(text: str) -> Any:
    return {"messages": [{"role": "user", "content": text}]}


async def budget(site: Site) -> None:
    limit = ModelCallLimitMiddleware(run_limit=site.max_calls)
    writer = create_agent(model(site), [], middleware=[limit])

    async def describe(dam: str) -> dict[str, list[str]]:
        return {"found": [str((await writer.ainvoke(question(dam)))["messages"][-1].content)]}

    graph = StateGraph(Found)
    graph.add_node("describe", describe)
    graph.add_conditional_edges(START, lambda _: [Send("describe", f"dam {at}") for at in range(site.calls)])
    await graph.compile().ainvoke({"found": []}, {"recursion_limit": site.max_calls})


def subagents(site: Site) -> None:
    limits: Any = [ModelCallLimitMiddleware(run_limit=site.max_calls), ToolCallLimitMiddleware(run_limit=3)]
    researcher = create_agent(model(site), [], middleware=limits[:1])

    @tool
    def research(topic: str) -> str:
        """Research a topic."""
        return str(researcher.invoke(question(topic))["messages"][-1].content)

    create_agent(model(site), [research], middleware=limits).invoke(question("compare twenty dams"))


def failures(site: Site) -> None:
    limit = ModelCallLimitMiddleware(thread_limit=site.max_calls, exit_behavior="error")
    agent = create_agent(model(site), [], middleware=[limit], checkpointer=InMemorySaver())
    try:
        for _ in range(site.calls):
            with suppress(OpenAIError):
                agent.invoke(question("hello"), THREAD)
    except ModelCallLimitExceededError as error:
        site.stopped(error)


def retries(site: Site) -> None:
    limit = ModelCallLimitMiddleware(thread_limit=1 + site.max_retries, exit_behavior="error")
    again = ModelRetryMiddleware(max_retries=2, on_failure="error", initial_delay=0.01)
    agent = create_agent(model(site, max_retries=2), [], middleware=[limit, again], checkpointer=InMemorySaver())
    for _ in range(3):
        try:
            agent.invoke(question("hello"), THREAD)
        except OpenAIError:
            continue
        except ModelCallLimitExceededError as error:
            site.stopped(error)
            return


async def cancel_before(site: Site) -> None:
    task = asyncio.create_task(create_agent(model(site), []).ainvoke(question("hello")))
    task.cancel()
    site.cancelling()
    with suppress(asyncio.CancelledError):
        await task


def three_steps(site: Site) -> Any:
    def asks(name: str) -> Any:
        async def node(state: State) -> dict[str, str]:
            return {name: str((await model(site).ainvoke(f"{name} step")).content)}

        return node

    graph = StateGraph(State)
    for name in ("first", "second", "third"):
        graph.add_node(f"{name}_node", asks(name))
    graph.add_edge(START, "first_node")
    graph.add_edge("first_node", "second_node")
    graph.add_edge("second_node", "third_node")
    graph.add_edge("third_node", END)
    return graph.compile()


async def cancel_during(site: Site) -> None:
    task = asyncio.create_task(three_steps(site).ainvoke({}))
    await site.asked()
    site.cancelling()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def timeouts(site: Site) -> None:
    @tool
    def search(topic: str) -> str:
        """Search the archive."""
        return site.slow_tool()

    agent = create_agent(model(site), [search])
    agent.step_timeout = site.timeout_s
    site.began()
    try:
        await agent.ainvoke(question("hello"))
    except TimeoutError as error:
        site.stopped(error)


async def events(site: Site) -> None:
    kinds = {"on_chain_start": "start", "on_chain_end": "end", "on_chain_error": "end"}
    agent = create_agent(model(site), [])

    async def follow(case: str) -> None:
        async for event in agent.astream_events(question(f"case {case}"), version="v2"):
            if not event["parent_ids"] and event["event"] in kinds:
                site.event(case, kinds[event["event"]], event["event"])

    await follow("complete")
    with suppress(OpenAIError):
        await follow("fail")
    task = asyncio.create_task(follow("cancel"))
    await site.asked(3)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def resume(site: Site) -> None:
    def first(state: State) -> State:
        return {"first": str(model(site).invoke("first step").content)}

    def second(state: State) -> State:
        return {"second": str(model(site).invoke("second step").content)}

    graph = StateGraph(State)
    graph.add_node("one", first)
    graph.add_node("two", second)
    graph.add_edge(START, "one")
    graph.add_edge("one", "two")
    graph.add_edge("two", END)
    with SqliteSaver.from_conn_string(str(site.folder / "runs.db")) as saver:
        compiled = graph.compile(checkpointer=saver)
        given: Any = {} if site.attempt == 1 else None
        site.answer(compiled.invoke(given, THREAD)["second"])


def chat(site: Site) -> None:
    with SqliteSaver.from_conn_string(str(site.folder / "chats.db")) as saver:
        agent = create_agent(model(site, streaming=True), [], checkpointer=saver)
        for text in ("question one", "question two") if site.attempt == 1 else ("question three",):
            agent.invoke(question(text), THREAD)
