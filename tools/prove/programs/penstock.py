"""Penstock: existing clients in a `contained` block; graphs, chats and journals where the probe needs one."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from openai import OpenAI, OpenAIError

import penstock
from penstock import (
    Budget,
    BudgetExceededError,
    CancelledError,
    ErrorPolicy,
    ExecutionContext,
    Graph,
    Halted,
    Price,
    PriceBook,
    contain,
    contained,
)
from penstock.agents import Agent
from penstock.chat import ChatService
from penstock.hosting import RunHost
from penstock.nodes import Program
from penstock.providers.models import model
from penstock.stores import Journal, open_stores
from tools.prove.site import Site

VERSION = penstock.__version__
NOT_APPLICABLE: dict[str, str] = {}


def prices(site: Site) -> PriceBook:
    per_mtok = 1_000_000 * site.call_usd / site.max_tokens
    return PriceBook(registered={site.model: Price(0, per_mtok)}, use_genai_prices=False)


def limits(site: Site, **more: Any) -> Any:
    return contain(max_cost_usd=site.ceiling_usd, prices=prices(site), **more)


def ask(client: OpenAI, site: Site, text: str = "hello") -> str:
    messages: Any = [{"role": "user", "content": text}]
    answer = client.chat.completions.create(model=site.model, messages=messages, max_tokens=site.max_tokens)
    return answer.choices[0].message.content or ""


def budget(site: Site) -> None:
    with OpenAI(base_url=site.openai_url, api_key=site.key) as client, limits(site) as run, contained(run):
        with ThreadPoolExecutor(site.calls) as pool:
            futures = [pool.submit(ask, client, site) for _ in range(site.calls)]
        for error in filter(None, (future.exception() for future in futures)):
            if not isinstance(error, BudgetExceededError):
                raise error
            site.stopped(error)


async def subagents(site: Site) -> None:
    options: Any = {"base_url": site.openai_url, "api_key": site.key, "max_output_tokens": site.max_tokens}
    researcher = Agent(model(f"openai:{site.model}", **options), name="researcher")
    tool = researcher.as_tool("research", "Research a topic.")
    lead = Agent(model(f"openai:{site.model}", **options), tools=[tool], name="lead")
    async with limits(site) as run:
        try:
            await lead.run("compare twenty dams", run)
        except BudgetExceededError as error:
            site.stopped(error)


def failures(site: Site) -> None:
    with OpenAI(base_url=site.openai_url, api_key=site.key) as client, limits(site) as run, contained(run):
        try:
            for _ in range(site.calls):
                with suppress(OpenAIError):
                    ask(client, site)
        except BudgetExceededError as error:
            site.stopped(error)


def retries(site: Site) -> None:
    with (
        OpenAI(base_url=site.openai_url, api_key=site.key, max_retries=2) as client,
        contain(max_retries=site.max_retries, prices=prices(site)) as run,
        contained(run),
    ):
        graph = Graph("question")
        policy = ErrorPolicy("retry", retry_count=2, retry_delay_ms=1)
        graph.step(lambda ctx: ask(client, site), "ask", error_policy=policy, blocking=True)
        for _ in range(3):
            try:
                asyncio.run(graph.execute(run))
            except OpenAIError:
                continue
            except Halted as error:
                site.stopped(error)
                return


def cancel_before(site: Site) -> None:
    with OpenAI(base_url=site.openai_url, api_key=site.key) as client, limits(site) as run, contained(run):
        run.abort("not needed any more")
        site.cancelling()
        try:
            ask(client, site)
        except CancelledError as error:
            site.stopped(error)


def cancel_during(site: Site) -> None:
    with OpenAI(base_url=site.openai_url, api_key=site.key) as client, limits(site) as run, contained(run):

        def cancel() -> None:
            site.wait_asked()
            site.cancelling()
            run.abort("the user left")

        threading.Thread(target=cancel).start()
        try:
            for _ in range(3):
                ask(client, site)
        except CancelledError as error:
            site.stopped(error)


def timeouts(site: Site) -> None:
    site.began()
    with contain(timeout_s=site.timeout_s) as run:
        try:
            run.tool(site.slow_tool, name="search")
        except BudgetExceededError as error:
            site.stopped(error)


async def events(site: Site) -> None:
    kinds = {"run.started": "start", "run.completed": "end", "run.failed": "end", "run.cancelled": "end"}
    async with await open_stores("memory:") as stores:
        await stores.graphs.save("asks", "ann", "Asks", Program.of(agent(site)).document(), now_ms=0)
        async with host_on(stores, site) as host:
            for case in ("complete", "fail", "cancel"):
                run = await host.submit(owner="ann", graph_id="asks", input=f"case {case}")
                asked = 3 if case == "cancel" else 0
                async for event in host.events(run.id):
                    if event.type in kinds:
                        site.event(case, kinds[event.type], event.type)
                    if asked and event.type == "run.started":
                        await site.asked(asked)
                        await host.cancel(run.id)


async def resume(site: Site) -> None:
    client = model(f"openai:{site.model}", base_url=site.openai_url, api_key=site.key)

    async def step(ctx: Any) -> str:
        return str((await Agent(client).run(ctx.input, ctx)).output)

    graph = Graph("two steps")
    graph.step(step, "first", input="first step")
    graph.step(step, "second", input="second step", depends_on=["first"])
    async with await open_stores(str(site.folder / "runs.db")) as stores:
        journal = await Journal.open(stores.journal, "run-1")
        budget = Budget(max_cost_dollars=site.ceiling_usd)
        async with ExecutionContext(budget=budget, prices=prices(site), journal=journal) as run:
            results = await graph.execute(run)
            site.answer(results["second"])


def agent(site: Site) -> Agent:
    return Agent(model(f"openai:{site.model}", base_url=site.openai_url, api_key=site.key), name="asks")


def host_on(stores: Any, site: Site) -> RunHost:
    return RunHost(stores, services={"programs": {"asks": Program.of(agent(site))}}, prices=prices(site))


async def chat(site: Site) -> None:
    async with await open_stores(str(site.folder / "chats.db")) as stores:
        await stores.graphs.save("asks", "ann", "Asks", Program.of(agent(site)).document(), now_ms=0)
        host = host_on(stores, site)
        chats = ChatService(host, stores.chats)
        async with host:
            if site.attempt == 1:
                chat = await chats.create_chat(owner="ann", graph_id="asks", chat_id="chat-1")
                await (await chats.stream_chat(chat.id, "question one", owner="ann")).result()
                await (await chats.stream_chat(chat.id, "question two", owner="ann", run_id="second")).result()
            else:
                await host.wait(
                    "second"
                )  # the new process finishes the answer once the lease of the killed one is over
                await (await chats.stream_chat("chat-1", "question three", owner="ann")).result()
