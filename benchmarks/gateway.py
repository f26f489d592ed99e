"""What does a request through the gateway cost, beside a proxy that contains nothing, and LiteLLM's proxy?

Each contestant is a process of its own between a client and a fake provider. Measured are the CPU time of that process
for a request, for a streamed request and for one of its chunks, and its memory at the end. LiteLLM has one worker and a
key with a budget in memory, which needs no database.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks._peers import NotInstalled, python_of
from benchmarks._report import Cell, Table, main
from benchmarks._rounds import expect

PARALLEL = 20
TEXT = "word " * 200
"""250 pieces of four characters: a stream has a chunk for each."""
CHUNKS = len(TEXT) // 4
BODY: dict[str, Any] = {"model": "fake-1", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 400}
LITELLM = "litellm"
LITELLM_AUTH = """
from litellm.proxy._types import UserAPIKeyAuth

async def user_api_key_auth(request, api_key):
    return UserAPIKeyAuth(api_key=api_key, token=api_key, max_budget=1000.0, spend=0.0)
"""
START_S = 120.0
CONTESTANTS = (
    ("a proxy without containment", "bare"),
    ("penstock exec's gateway", "run"),
    ("penstock gateway, keys in SQLite", "keys"),
    ("LiteLLM's proxy, a key with a budget", LITELLM),
)
KEY = "sk-bench"


async def bare_proxy(upstream: str) -> Any:
    """An ASGI app that passes requests and answers on, over the same libraries."""
    from penstock.gateway.client import Client
    from penstock.gateway.connections import Connections
    from penstock.gateway.upstreams import Upstream, chunks, returned_headers
    from penstock.gateway.wires import OPENAI

    to, connections = Upstream("openai", OPENAI, upstream, KEY), Connections()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        client = Client(scope, receive, send)
        body = await client.body()
        path = scope["path"].removeprefix("/openai")
        response = await connections.send("POST", to.target(path, ""), to.headers(client.raw_headers, body), body)
        await client.begin(response.status, returned_headers(response))
        async for chunk in chunks(response):
            await client.write(chunk)
        await client.write(b"", is_last=True)
        await response.aclose()

    return app


async def contained(upstream: str, folder: str | None) -> tuple[Any, str]:
    """The gateway of one run, or that of a database, and the key for it."""
    from penstock.front_door import contain
    from penstock.gateway.app import Gateway
    from penstock.gateway.connections import Connections
    from penstock.gateway.grants import Grant, OneKey
    from penstock.gateway.stored_keys import StoredKeys
    from penstock.gateway.upstreams import upstreams_in
    from penstock.providers.http.exchange import Terms
    from penstock.runtime.billing.prices import Price, PriceBook
    from penstock.server.tokens import create_token
    from penstock.storage import open_stores

    upstreams = upstreams_in({"OPENAI_BASE_URL": upstream, "OPENAI_API_KEY": KEY})
    prices = PriceBook(registered={"fake-1": Price("3", "15")}, use_genai_prices=False)
    if folder is None:
        run = contain(max_cost_usd=1_000, prices=prices, max_kept_calls=1_000, divergence=False)
        return Gateway(upstreams, OneKey(KEY, Grant(Terms(run, 4_096, 16))), Connections()), KEY
    stores = await open_stores(f"sqlite:///{folder}/keys.db")
    now_ms = time.time_ns() // 1_000_000
    record, secret = create_token("ann", "user", by="", now_ms=now_ms, kind="gateway", limits={"daily_usd": "1000"})
    await stores.tokens.add(record)
    return Gateway(upstreams, StoredKeys(stores.tokens, stores.ledger, prices), Connections()), secret


async def serve(kind: str, upstream: str) -> None:
    """What the process of a contestant does, until its input ends."""
    from penstock.gateway.loopback import serving

    with tempfile.TemporaryDirectory() as folder:
        if kind == "bare":
            app, key = await bare_proxy(upstream), KEY
        else:
            app, key = await contained(upstream, folder if kind == "keys" else None)
        async with serving(app) as url:
            print(url, key, flush=True)
            await asyncio.to_thread(sys.stdin.read)
        os._exit(0)


@contextmanager
def litellm_proxy(upstream: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """LiteLLM's proxy as a process, its base URL and a key for it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        model = {"model": "openai/fake-1", "api_base": upstream, "api_key": KEY}
        prices = {"input_cost_per_token": 3e-6, "output_cost_per_token": 15e-6}
        config = {
            "model_list": [{"model_name": "fake-1", "litellm_params": {**model, **prices}}],
            "general_settings": {"custom_auth": "auth.user_api_key_auth", "custom_auth_run_common_checks": True},
        }
        Path(folder, "auth.py").write_text(LITELLM_AUTH)
        Path(folder, "config.yaml").write_text(json.dumps(config))
        python = Path(python_of(LITELLM))
        command = [str(python.parent / "litellm"), "--config", "config.yaml", "--port", str(port), "--num_workers", "1"]
        env = {
            **os.environ,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "NO_PROXY": "*",
            "LITELLM_MASTER_KEY": "sk-0123456789abcdef0123456789abcdef",
        }
        with (
            Path(folder, "log").open("w") as log,
            subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=env, text=True) as started,
        ):
            try:
                base = f"http://127.0.0.1:{port}"
                _await_answer(f"{base}/health/liveliness")
                yield started, f"{base}/v1", KEY
            finally:
                started.kill()


def _await_answer(url: str) -> None:
    import httpx2

    until_s = time.monotonic() + START_S
    while True:
        try:
            expect("status", httpx2.get(url, trust_env=False).status_code, 200)
        except httpx2.TransportError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.2)
        else:
            return


@contextmanager
def gateway_process(kind: str, upstream: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """One of our own contestants as a process, its base URL and a key for it."""
    with process("serve", kind, upstream) as (started, line):
        url, key = line.split()
        yield started, f"{url}/openai/v1", key


@contextmanager
def process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process of this module, and the first line that it printed."""
    command = [sys.executable, "-m", "benchmarks.gateway", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        try:
            yield started, started.stdout.readline().strip()
        finally:
            started.kill()


def provide() -> None:
    """What the process of the provider does."""
    from penstock.testing.provider import FakeProviderServer, Say

    with FakeProviderServer(script=lambda request: Say(TEXT)) as provider:
        print(provider.openai_url, flush=True)
        sys.stdin.read()


async def load(url: str, key: str, requests: int, *, streams: bool) -> None:
    """Send so many requests, PARALLEL at a time."""
    import httpx2

    async def client(http: httpx2.AsyncClient) -> None:
        for _ in range(requests // PARALLEL):
            answer = await http.post(f"{url}/chat/completions", json={**BODY, "stream": streams})
            expect("status", answer.status_code, 200)

    headers = {"authorization": f"Bearer {key}"}
    async with httpx2.AsyncClient(headers=headers, timeout=120, trust_env=False) as http, asyncio.TaskGroup() as group:
        for _ in range(PARALLEL):
            group.create_task(client(http))


def cpu_s(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int) -> float:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1_000_000


def measured(kind: str, upstream: str, requests: int) -> tuple[float, float, float]:
    """CPU milliseconds of a request and of a streamed one, and megabytes at the end."""
    contestant = litellm_proxy(upstream) if kind == LITELLM else gateway_process(kind, upstream)
    with contestant as (started, url, key):
        cost_ms = []
        for streams, count in ((False, requests), (True, requests // 5)):
            asyncio.run(load(url, key, PARALLEL, streams=streams))  # connections and caches
            before = cpu_s(started.pid)
            asyncio.run(load(url, key, count, streams=streams))
            cost_ms.append((cpu_s(started.pid) - before) * 1_000 / count)
        return cost_ms[0], cost_ms[1], memory_mb(started.pid)


def ask(quick: bool) -> list[Table]:
    """One request, streamed and not, through each contestant."""
    requests = 200 if quick else 2_000
    rows: list[tuple[Cell, ...]] = []
    with process("provide") as (_, upstream):
        for label, kind in CONTESTANTS:
            try:
                plain_ms, stream_ms, megabytes = measured(kind, upstream, requests)
            except NotInstalled:
                rows.append((label, "not installed", None, None, None))
                continue
            chunk_us = (stream_ms - plain_ms) * 1_000 / CHUNKS
            rows.append((label, plain_ms, stream_ms, chunk_us, megabytes))
    how = (
        f"CPU time of the process in between; {requests:,} requests, {PARALLEL} at a time; streams of {CHUNKS} chunks."
    )
    columns = ("", "ms a request", "ms a stream", "µs a chunk", "MB")
    return [Table("What does a request through the gateway cost?", how, columns, rows)]


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        asyncio.run(serve(*sys.argv[2:4]))
    elif sys.argv[1:2] == ["provide"]:
        provide()
    else:
        main(ask)
