"""Every HTTP library with the requests of every API: a fan-out stays under the ceiling, and the ledger has the bill."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from urllib.parse import urlsplit

import aiohttp
import pytest

from penstock import BudgetExceededError, contain
from penstock.providers import contained
from penstock.testing.provider import FakeProviderServer
from tests.providers.shapes import SHAPES, Shape
from tests.providers.stack_calls import ASYNC, SYNC, AsyncSend, Send

pytestmark = pytest.mark.requirement("X-11")

MANY = 20
UNSIGNED = {name: shape for name, shape in SHAPES.items() if not shape.headers}
SIGNED = {name: shape for name, shape in SHAPES.items() if shape.headers}


@contextmanager
def under_a_ceiling(server: FakeProviderServer, name: str, shape: Shape) -> Iterator[list[object]]:
    """A block whose requests of that shape must stay inside; the outcomes are those of its requests."""
    before, outcomes = server.invoice.total_usd, list[object]()
    ceiling = 0.005 if shape.has_output else len(str(shape.body)) * 2e-6
    with contain(max_cost_usd=ceiling, prices=server.provider.prices) as run, contained(run, on_stop="ignore"):
        yield outcomes
    billed, balance = server.invoice.total_usd - before, run.balance
    assert 0 < billed <= ceiling + 1e-9, name
    assert balance.spent_usd + balance.unresolved_usd >= billed - 1e-9, name
    assert (balance.held_nanos, run.uncontained_requests) == (0, 0), name
    answered = [found for found in outcomes if isinstance(found, bytes)]
    assert 0 < len(answered) < MANY, name
    assert all(isinstance(found, bytes | BudgetExceededError) for found in outcomes), (name, outcomes)


@pytest.mark.parametrize("send", SYNC)
def test_a_pool_of_threads_stays_under_the_ceiling_with_every_api(send: Send) -> None:
    with FakeProviderServer() as server, ThreadPoolExecutor(4) as pool:
        for name, shape in UNSIGNED.items():
            with under_a_ceiling(server, name, shape) as outcomes:
                items = [pool.submit(send, server.url + shape.path, shape.body) for _ in range(MANY)]
                outcomes += [item.exception() or item.result() for item in items]


@pytest.mark.parametrize("send", ASYNC)
async def test_tasks_at_once_stay_under_the_ceiling_with_every_api(send: AsyncSend) -> None:
    async with FakeProviderServer() as server:
        for name, shape in UNSIGNED.items():
            with under_a_ceiling(server, name, shape) as outcomes:
                tasks = (send(server.url + shape.path, shape.body) for _ in range(MANY))
                outcomes += await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("shape", SIGNED.values(), ids=SIGNED)
def test_a_signed_request_over_http_client_is_sent_byte_for_byte(shape: Shape) -> None:
    body = json.dumps(shape.body).encode()
    with FakeProviderServer() as server, contain(max_cost_usd=1, prices=server.provider.prices) as run, contained(run):
        connection = http.client.HTTPConnection(urlsplit(server.url).netloc)
        connection.request("POST", shape.path, body, {**shape.headers, "content-type": "application/json"})
        with connection.getresponse() as response:
            response.read()
        connection.close()
    assert server.requests[0].raw == body
    assert run.balance.spent_usd == pytest.approx(server.invoice.total_usd, abs=1e-9)


@pytest.mark.parametrize("shape", SIGNED.values(), ids=SIGNED)
async def test_a_signed_request_over_aiohttp_is_sent_byte_for_byte(shape: Shape) -> None:
    body = json.dumps(shape.body).encode()
    async with FakeProviderServer() as server:
        with contain(max_cost_usd=1, prices=server.provider.prices) as run, contained(run):
            async with (
                aiohttp.ClientSession() as session,
                session.post(server.url + shape.path, data=body, headers=shape.headers) as response,
            ):
                await response.read()
    assert server.requests[0].raw == body
    assert run.balance.spent_usd == pytest.approx(server.invoice.total_usd, abs=1e-9)
