"""LiteLLM's proxy, with the OpenAI client in front of it.

Budgets of virtual keys need PostgreSQL and a query engine that its installer downloads; the budget used here is that of
the router, which needs neither.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, OpenAI, OpenAIError

from tools.prove.site import Site

DISTRIBUTION = "litellm"
NOT_APPLICABLE: dict[str, str] = {
    "subagents": "sees calls and no agents: the same as the budget above",
    "cancel_before": "has no runs that could be cancelled before they start",
    "timeouts": "sees model calls, and no tools",
    "events": "has no runs",
    "resume": "has no runs",
    "chat": "stores no chats",
}

START_S = 60
MASTER_KEY = "sk-" + "0123456789abcdef" * 4


@contextmanager
def proxy(site: Site) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    upstream = {
        "model": f"openai/{site.model}",
        "api_base": site.openai_url,
        "api_key": site.key,
        "input_cost_per_token": 0,
        "output_cost_per_token": site.call_usd / site.max_tokens,
    }
    budget = {"openai": {"budget_limit": site.ceiling_usd, "time_period": "1d"}}
    config = {
        "model_list": [{"model_name": site.model, "litellm_params": upstream}],
        "general_settings": {"master_key": MASTER_KEY},
        "router_settings": {"provider_budget_config": budget, "num_retries": 2},
    }
    path = site.folder / "config.yaml"
    path.write_text(json.dumps(config))
    command = [str(Path(sys.executable).parent / "litellm"), "--config", str(path), "--port", str(port)]
    with (site.folder / "proxy.txt").open("w") as log:
        process = subprocess.Popen([*command, "--host", "127.0.0.1", "--telemetry", "False"], stdout=log, stderr=log)
        url = f"http://127.0.0.1:{port}"
        ends = time.monotonic() + START_S
        while True:
            with suppress(OSError), urllib.request.urlopen(f"{url}/health/liveliness"):
                break
            if time.monotonic() > ends or process.poll() is not None:
                raise RuntimeError(f"the proxy did not start: {(site.folder / 'proxy.txt').read_text()[-300:]}")
            time.sleep(0.2)
        yield url  # the proxy is left running: what it does after the program counts


def ask(client: OpenAI, site: Site) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    client.chat.completions.create(model=site.model, messages=messages, max_tokens=site.max_tokens)


def budget(site: Site) -> None:
    with proxy(site) as url, OpenAI(base_url=url, api_key=MASTER_KEY) as client:
        with ThreadPoolExecutor(site.calls) as pool:
            futures = [pool.submit(ask, client, site) for _ in range(site.calls)]
        for error in filter(None, (future.exception() for future in futures)):
            if not isinstance(error, OpenAIError):
                raise error
            site.stopped(error)


def failures(site: Site) -> None:
    with proxy(site) as url, OpenAI(base_url=url, api_key=MASTER_KEY) as client:
        for _ in range(site.calls):
            with suppress(OpenAIError):
                ask(client, site)


def retries(site: Site) -> None:
    with proxy(site) as url, OpenAI(base_url=url, api_key=MASTER_KEY, max_retries=2) as client:
        for _ in range(3):
            with suppress(OpenAIError):
                ask(client, site)


async def cancel_during(site: Site) -> None:
    with proxy(site) as url:
        client = AsyncOpenAI(base_url=url, api_key=MASTER_KEY)

        async def three() -> None:
            for text in ("first step", "second step", "third step"):
                await client.chat.completions.create(model=site.model, messages=[{"role": "user", "content": text}])

        task = asyncio.create_task(three())
        await site.asked()
        site.cancelling()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
