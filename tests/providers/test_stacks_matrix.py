"""Every HTTP library in every way that programs use it: the provider's invoice is at most the ceiling.

What the ledger says is at least what the invoice says: nothing is spent that the run does not know of.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from penstock import ExecutionContext, PenstockError, contain
from penstock.providers import contained
from penstock.testing.provider import FakeProviderServer
from tests.providers.stack_calls import ASYNC, SHAPES, SYNC, AsyncSend, Body, Send

pytestmark = pytest.mark.requirement("X-5", "X-11")

PRICE = 0.05
CEILING = 0.25
MANY = 20

Work = Callable[[], object]
Way = Callable[[Work], object]


def once(work: Work) -> None:
    work()


def fan_out(work: Work) -> None:
    threads = [threading.Thread(target=_refused, args=(work,)) for _ in range(MANY)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def thread_pool(work: Work) -> None:
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(_refused, work) for _ in range(MANY)]:
            done.result()


def _refused(work: Work) -> None:
    """Do the work; a refusal is what limits are for."""
    with suppress(PenstockError):
        work()


SYNC_WAYS: list[tuple[Way, bool]] = [
    (once, False),
    (once, True),
    (fan_out, False),
    (fan_out, True),
    (thread_pool, True),
]
"""How sync work is done, and whether its answers are streams."""


def sync_ways() -> Any:
    return [
        pytest.param(send, way, streams, id=f"{send.__name__}-{way.__name__}{'-stream' * streams}")
        for send in SYNC
        for way, streams in SYNC_WAYS
    ]


def request_to(server: FakeProviderServer, shape: str, streams: bool) -> tuple[str, Body]:
    path, body = SHAPES[shape]
    return server.url + path, {**body, "stream": streams}


def check(server: FakeProviderServer, run: ExecutionContext) -> None:
    """The invoice is at most the ceiling, and the ledger has all of it."""
    billed, balance = server.invoice.total_usd, run.balance
    assert 0 < billed <= CEILING
    assert balance.spent_usd + balance.unresolved_usd >= billed
    assert balance.held_nanos == 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("send", "way", "streams"), sync_ways())
def test_a_sync_stack_spends_no_more_than_the_ceiling(send: Send, way: Way, streams: bool, shape: str) -> None:
    with FakeProviderServer.flat(PRICE) as server:
        url, body = request_to(server, shape, streams)
        with contain(max_cost_usd=CEILING, prices=server.provider.prices) as run, contained(run):
            way(lambda: send(url, body))
        check(server, run)
        assert run.balance.steps == len(server.requests)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("streams", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("count", [1, MANY])
@pytest.mark.parametrize("send", ASYNC)
async def test_an_async_stack_spends_no_more_than_the_ceiling(
    send: AsyncSend, count: int, streams: bool, shape: str
) -> None:
    async with FakeProviderServer.flat(PRICE) as server:
        url, body = request_to(server, shape, streams)
        with contain(max_cost_usd=CEILING, prices=server.provider.prices) as run, contained(run):
            outcomes = await asyncio.gather(*(send(url, body) for _ in range(count)), return_exceptions=True)
        check(server, run)
        assert all(isinstance(found, bytes | PenstockError) for found in outcomes)
        assert run.balance.steps == len(server.requests)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("send", ASYNC)
def test_an_async_stack_on_loops_of_a_thread_pool_spends_no_more_than_the_ceiling(send: AsyncSend, shape: str) -> None:
    with FakeProviderServer.flat(PRICE) as server:
        url, body = request_to(server, shape, streams=True)
        with contain(max_cost_usd=CEILING, prices=server.provider.prices) as run, contained(run):
            thread_pool(lambda: asyncio.run(send(url, body)))  # type: ignore[arg-type]  # each is a coroutine
        check(server, run)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("send", SYNC)
def test_a_thread_that_outlives_the_block_is_refused(send: Send, shape: str) -> None:
    left = threading.Event()
    outcomes: list[object] = []

    def later() -> None:
        left.wait()
        try:
            outcomes.append(send(url, body))
        except PenstockError as error:
            outcomes.append(error)

    with FakeProviderServer.flat(PRICE) as server:
        url, body = request_to(server, shape, streams=False)
        with contain(max_cost_usd=CEILING, prices=server.provider.prices) as run, contained(run):
            thread = threading.Thread(target=later)
            thread.start()
            send(url, body)
        left.set()
        thread.join()
        check(server, run)
    assert [type(found).__name__ for found in outcomes] == ["RunEnded"]
    assert len(server.requests) == 1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("send", ASYNC)
async def test_a_task_that_outlives_the_block_is_refused(send: AsyncSend, shape: str) -> None:
    async def later() -> bytes:
        await left.wait()
        return await send(url, body)

    left = asyncio.Event()
    async with FakeProviderServer.flat(PRICE) as server:
        url, body = request_to(server, shape, streams=False)
        with contain(max_cost_usd=CEILING, prices=server.provider.prices) as run, contained(run):
            task = asyncio.create_task(later())
            await send(url, body)
        left.set()
        with pytest.raises(PenstockError) as refused:
            await task
        check(server, run)
    assert type(refused.value).__name__ == "RunEnded"
    assert len(server.requests) == 1
