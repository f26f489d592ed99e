"""INV 1 and 20 through the gateway: many clients, errors, disconnects and lies; the invoice stays below the ceiling.

Clients are tasks with raw connections, so that hundreds are cheap; each sends a few requests, streamed and not, and
some disconnect in the middle of an answer. `make soak` runs the long form.
"""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import suppress

import pytest

from penstock.testing.provider import (
    Cut,
    FakeProvider,
    FakeProviderServer,
    Hang,
    RefuseFree,
    Say,
    ServerError,
    by_chance,
)
from penstock.tracing.events import CallWaiting
from tests.gateway.conftest import KEY, Served, gateway
from tests.soak import SOAK

CLIENTS = 500 if SOAK else 60
REQUESTS = 10 if SOAK else 3
CEILING_USD = 0.50 if SOAK else 0.05
FAULTS = [
    (0.10, RefuseFree(429, 0)),
    (0.05, ServerError(500)),
    (0.05, ServerError(502, billed=True)),
    (0.05, Say(then=Cut())),
    (0.05, Say("word " * 40, then=Cut(3))),
]


@pytest.mark.reliability
@pytest.mark.requirement("X-12")
@pytest.mark.parametrize("seed", range(4 if SOAK else 1))
def test_invoice_never_passes_the_ceiling_and_nothing_stays_held(seed: int) -> None:
    with FakeProviderServer(FakeProvider(latency_s=0.002), by_chance(FAULTS, seed=seed)) as provider:  # noqa: SIM117
        with gateway(provider, max_cost_usd=CEILING_USD, max_wait_s=5) as served:
            statuses = asyncio.run(_many_clients(served, seed))
            provider.wait_until(lambda: served.run.balance.held_nanos == 0, 60)
    balance = served.run.balance
    assert provider.invoice.total_nanos <= balance.spent_nanos + balance.unresolved_nanos
    assert balance.spent_nanos + balance.unresolved_nanos <= CEILING_USD * 1_000_000_000
    assert balance.steps_open == 0
    assert statuses.count(200) > CLIENTS / 10
    assert 402 in statuses


async def _many_clients(served: Served, seed: int) -> list[int]:
    statuses: list[int] = []
    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(_client(served, random.Random(f"{seed}/{number}"), statuses))
    return statuses


async def _client(served: Served, chance: random.Random, statuses: list[int]) -> None:
    for _ in range(REQUESTS):
        body = some_body(chance)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            statuses.append(await send_request(served.url, KEY, body, leaves_early=chance.random() < 0.15))


def some_body(chance: random.Random) -> dict[str, object]:
    """A request of some size, streamed or not."""
    return {
        "model": "fake-1",
        "messages": [{"role": "user", "content": "hello " * chance.randint(1, 30)}],
        "max_tokens": chance.choice([20, 50, 200]),
        "stream": chance.random() < 0.5,
    }


async def send_request(url: str, key: str, body: dict[str, object], *, leaves_early: bool) -> int:
    """Send a request on a connection of its own; return the status, or 0 for one that is left at once."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    head = f"POST /openai/v1/chat/completions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {key}\r\n"
    writer.write(f"{head}connection: close\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content)
    try:
        if leaves_early:
            return 0
        status = int((await reader.readline()).split()[1])
        await reader.read()
        return status
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.reliability
def test_calls_that_fit_together_all_complete_by_waiting() -> None:
    """Each call holds far more than it costs; together they fit: all complete, none is refused or clamped."""
    with FakeProviderServer(FakeProvider(latency_s=0.01)) as provider:  # noqa: SIM117
        with gateway(provider, max_cost_usd="0.10", max_wait_s=60) as served:
            answers = asyncio.run(_big_calls(served, 30))
    assert answers == [200] * 30
    assert {request.body["max_tokens"] for request in provider.requests} == {2_000}
    assert provider.invoice.total_usd < 0.03


async def _big_calls(served: Served, count: int) -> list[int]:
    body = {"model": "fake-1", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2_000}
    return await asyncio.gather(*(send_request(served.url, KEY, body, leaves_early=False) for _ in range(count)))


def test_client_that_disconnects_while_it_waits_leaves_the_queue() -> None:
    with FakeProviderServer(script=[Say(then=Hang())]) as provider, gateway(provider, max_cost_usd="0.02") as served:
        asyncio.run(_leave_the_queue(served))
    assert len(provider.requests) == 1
    assert served.run.balance.held_nanos == 0


async def _leave_the_queue(served: Served) -> None:
    body = {"model": "fake-1", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1_000}
    first = asyncio.create_task(send_request(served.url, KEY, body, leaves_early=False))
    await served.provider.until(lambda: served.provider.in_flight)
    second = asyncio.create_task(send_request(served.url, KEY, body, leaves_early=False))
    await served.provider.until(lambda: any(isinstance(event, CallWaiting) for event in served.run.events))
    for task in (second, first):
        task.cancel()
    await asyncio.wait((first, second))
    await served.provider.until(lambda: served.run.balance.held_nanos == 0)
