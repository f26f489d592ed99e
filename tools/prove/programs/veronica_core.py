"""veronica-core: calls wrapped by its ExecutionContext, around the OpenAI client."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from openai import OpenAI
from veronica_core import ExecutionConfig, ExecutionContext, WrapOptions

from tools.prove.site import Site

DISTRIBUTION = "veronica-core"
NOT_APPLICABLE: dict[str, str] = {
    "subagents": "sees calls and no agents: the same as the budget above",
    "resume": "contains calls; it does not continue a program",
    "chat": "stores no chats",
}


def context(site: Site, **limits: Any) -> ExecutionContext:
    settings: dict[str, Any] = {"max_cost_usd": site.ceiling_usd, "max_steps": 1_000, "max_retries_total": 1_000}
    return ExecutionContext(config=ExecutionConfig(**{**settings, **limits}))


def options(site: Site) -> WrapOptions:
    return WrapOptions(operation_name="ask", cost_estimate_hint=site.call_usd)


def ask(client: OpenAI, site: Site, text: str = "hello") -> str:
    messages: Any = [{"role": "user", "content": text}]
    answer = client.chat.completions.create(model=site.model, messages=messages, max_tokens=site.max_tokens)
    return answer.choices[0].message.content or ""


def budget(site: Site) -> None:
    with OpenAI(base_url=site.openai_url, api_key=site.key) as client, context(site) as ctx:
        with ThreadPoolExecutor(site.calls) as pool:
            futures = [
                pool.submit(ctx.wrap_llm_call, lambda: ask(client, site), options(site)) for _ in range(site.calls)
            ]
        for future in futures:
            if future.result().name == "HALT":
                site.stopped("HALT")


def failures(site: Site) -> None:
    with OpenAI(base_url=site.openai_url, api_key=site.key) as client, context(site) as ctx:
        for _ in range(site.calls):
            if ctx.wrap_llm_call(lambda: ask(client, site), options(site)).name == "HALT":
                site.stopped("HALT")
                return


def retries(site: Site) -> None:
    with (
        OpenAI(base_url=site.openai_url, api_key=site.key, max_retries=2) as client,
        context(site, max_retries_total=site.max_retries) as ctx,
    ):
        for _ in range(3):
            for _ in range(3):
                decision = ctx.wrap_llm_call(lambda: ask(client, site), options(site))
                if decision.name == "HALT":
                    site.stopped("HALT")
                    return


def cancel_before(site: Site) -> None:
    with OpenAI(base_url=site.openai_url, api_key=site.key) as client, context(site) as ctx:
        ctx.abort("not needed any more")
        site.cancelling()
        site.stopped(ctx.wrap_llm_call(lambda: ask(client, site), options(site)).name)


def cancel_during(site: Site) -> None:
    with OpenAI(base_url=site.openai_url, api_key=site.key) as client, context(site) as ctx:

        def cancel() -> None:
            site.wait_asked()
            site.cancelling()
            ctx.abort("the user left")

        threading.Thread(target=cancel, daemon=True).start()
        for _ in range(3):
            if ctx.wrap_llm_call(lambda: ask(client, site), options(site)).name == "HALT":
                site.stopped("HALT")
                return


def timeouts(site: Site) -> None:
    site.began()
    with context(site, timeout_ms=int(site.timeout_s * 1000)) as ctx:
        site.stopped(ctx.wrap_tool_call(site.slow_tool, WrapOptions(operation_name="search")).name)


def events(site: Site) -> None:
    ends = ("success", "fail", "halt")
    with OpenAI(base_url=site.openai_url, api_key=site.key, max_retries=0, timeout=10) as client:
        for case in ("complete", "fail", "cancel"):
            with context(site) as ctx:
                if case == "cancel":

                    def cancel(ctx: ExecutionContext = ctx) -> None:
                        site.wait_asked(3)
                        ctx.abort("the user left")

                    threading.Thread(target=cancel, daemon=True).start()
                ctx.wrap_llm_call(lambda case=case: ask(client, site, f"case {case}"), options(site))
            # It has no stream of events: its execution graph says when each call began, and how it ended.
            for node in ctx.get_graph_snapshot()["nodes"].values():
                if node["kind"] == "llm":
                    site.event(case, "start", "begin_node")
                    if node["status"] in ends:
                        site.event(case, "end", node["status"])
