"""pydantic-ai."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from openai import AsyncOpenAI
from pydantic_ai import Agent, CancellationToken, RunContext, UsageLimits
from pydantic_ai.capabilities import Hooks
from pydantic_ai.exceptions import ModelAPIError, ModelHTTPError, RunCancelled, RunTimedOut, UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import RunUsage

from tools.prove.site import Site

DISTRIBUTION = "pydantic-ai-slim"
NOT_APPLICABLE: dict[str, str] = {
    "resume": "durable execution comes from Temporal, DBOS, Prefect or Restate, which it integrates",
    "chat": "the documentation leaves the storage of messages to the application",
}


def agent(site: Site, **options: Any) -> Agent[None, str]:
    client = AsyncOpenAI(base_url=site.openai_url, api_key=site.key)
    return Agent(OpenAIChatModel(site.model, provider=OpenAIProvider(openai_client=client)), **options)


async def budget(site: Site) -> None:
    usage, limits = RunUsage(), UsageLimits(request_limit=site.max_calls)
    writer = agent(site)
    asked = [writer.run(f"dam {at}", usage=usage, usage_limits=limits) for at in range(site.calls)]
    for result in await asyncio.gather(*asked, return_exceptions=True):
        if isinstance(result, UsageLimitExceeded):
            site.stopped(result)
        elif isinstance(result, BaseException):
            raise result


async def subagents(site: Site) -> None:
    researcher = agent(site)
    limits = UsageLimits(request_limit=site.max_calls, tool_calls_limit=3)

    async def research(ctx: RunContext[None], topic: str) -> str:
        """Research a topic."""
        return (await researcher.run(topic, usage=ctx.usage, usage_limits=limits)).output

    try:
        await agent(site, tools=[research]).run("compare twenty dams", usage_limits=limits)
    except UsageLimitExceeded as error:
        site.stopped(error)


async def failures(site: Site) -> None:
    usage, limits = RunUsage(), UsageLimits(request_limit=site.max_calls)
    asks = agent(site)
    try:
        for _ in range(site.calls):
            with suppress(ModelAPIError):
                await asks.run("hello", usage=usage, usage_limits=limits)
    except UsageLimitExceeded as error:
        site.stopped(error)


async def retries(site: Site) -> None:
    usage, limits = RunUsage(), UsageLimits(request_limit=1 + site.max_retries)
    asks = agent(site)

    async def step() -> None:
        for attempt in range(3):
            try:
                await asks.run("hello", usage=usage, usage_limits=limits)
            except ModelHTTPError:
                if attempt == 2:
                    raise

    for _ in range(3):
        try:
            await step()
        except ModelHTTPError:
            continue
        except UsageLimitExceeded as error:
            site.stopped(error)
            return


async def cancel_before(site: Site) -> None:
    token = CancellationToken()
    token.cancel()
    site.cancelling()
    try:
        await agent(site).run("hello", cancellation_token=token)
    except RunCancelled as error:
        site.stopped(error)


async def cancel_during(site: Site) -> None:
    token = CancellationToken()

    async def cancel() -> None:
        await site.asked()
        site.cancelling()
        token.cancel()

    cancelling = asyncio.create_task(cancel())
    try:
        for text in ("first step", "second step", "third step"):
            await agent(site).run(text, cancellation_token=token)
    except RunCancelled as error:
        site.stopped(error)
    await cancelling


async def timeouts(site: Site) -> None:
    def search(topic: str) -> str:
        """Search the archive."""
        return site.slow_tool()

    site.began()
    try:
        await agent(site, tools=[search]).run("hello", timeout=site.timeout_s)
    except RunTimedOut as error:
        site.stopped(error)


async def events(site: Site) -> None:
    async def follow(case: str, token: CancellationToken | None = None) -> None:
        async def before(ctx: RunContext[None]) -> None:
            site.event(case, "start", "before_run")

        async def after(ctx: RunContext[None], *, result: Any) -> Any:
            site.event(case, "end", "after_run")
            return result

        async def failed(ctx: RunContext[None], *, error: BaseException) -> Any:
            site.event(case, "end", "run_error")
            raise error

        hooks: Any = Hooks(before_run=before, after_run=after, run_error=failed)
        await agent(site, capabilities=[hooks]).run(f"case {case}", cancellation_token=token)

    await follow("complete")
    with suppress(ModelHTTPError):
        await follow("fail")
    token = CancellationToken()
    task = asyncio.create_task(follow("cancel", token))
    await site.asked(3)
    token.cancel()
    with suppress(RunCancelled):
        await task
