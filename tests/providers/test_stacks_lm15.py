"""lm15: errors, stops and responses that are left, on a client with sockets of its own."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import lm15.transports
import pytest

from penstock import BudgetExceededError, CancelledError, contain
from penstock.providers import ExcessOutput, contained
from penstock.runtime import worker
from penstock.testing.provider import Endless, FakeProviderServer, Hang, RefuseFree, Say
from tests.providers.stack_calls import CHAT, JSON, chat, encoded, over_lm15, over_lm15_async

pytestmark = pytest.mark.requirement("X-11")

HANGS_IN_THE_MIDDLE = Say("hello " * 30, then=Hang(after=3))


def request_to(server: FakeProviderServer, **more: Any) -> Any:
    return lm15.transports.TransportRequest("POST", server.url + CHAT, list(JSON.items()), encoded(chat(**more)))


def test_an_error_status_is_passed_on_and_free() -> None:
    with FakeProviderServer(script=[RefuseFree(429)]) as server, contain(prices=server.provider.prices) as run:
        with contained(run):
            assert b"error" in over_lm15(server.url + CHAT, chat())
        assert (run.balance.spent_nanos, run.balance.unresolved_nanos, run.balance.held_nanos) == (0, 0, 0)


async def test_an_error_status_of_an_async_request_is_passed_on_and_free() -> None:
    async with FakeProviderServer(script=[RefuseFree(429)]) as server:
        with contain(prices=server.provider.prices) as run, contained(run):
            assert b"error" in await over_lm15_async(server.url + CHAT, chat())
        assert (run.balance.spent_nanos, run.balance.unresolved_nanos, run.balance.held_nanos) == (0, 0, 0)


def test_an_abort_frees_a_sync_caller_in_the_middle_of_a_stream_and_closes_the_socket() -> None:
    with FakeProviderServer(script=[HANGS_IN_THE_MIDDLE]) as server, contain(prices=server.provider.prices) as run:
        stopper = threading.Thread(target=lambda: (server.wait_until(lambda: server.in_flight), run.abort("enough")))
        stopper.start()
        with contained(run), pytest.raises(CancelledError, match="enough"):
            over_lm15(server.url + CHAT, chat(stream=True))
        stopper.join()
        server.wait_until(lambda: server.disconnects)
        server.wait_until(lambda: worker.busy_workers() == 0)
    assert run.balance.held_nanos == 0
    assert run.balance.unresolved_nanos >= server.invoice.total_nanos


async def test_an_abort_frees_a_task_and_closes_the_socket() -> None:
    async with FakeProviderServer(script=[HANGS_IN_THE_MIDDLE]) as server:
        with contain(prices=server.provider.prices) as run, contained(run):
            task = asyncio.create_task(over_lm15_async(server.url + CHAT, chat(stream=True)))
            await server.until(lambda: server.in_flight == 1)
            run.abort("enough")
            with pytest.raises(CancelledError, match="enough"):
                await task
            await server.until(lambda: server.disconnects)
    assert run.balance.held_nanos == 0


def test_a_response_that_is_left_early_keeps_its_hold_as_unresolved() -> None:
    with (
        FakeProviderServer(script=[Say("hello " * 30)]) as server,
        contain(prices=server.provider.prices) as run,
        contained(run),
        lm15.transports.StdlibTransport(verify=False) as transport,
        transport.stream(request_to(server, stream=True)) as response,
    ):
        next(iter(response))
    assert run.balance.held_nanos == 0
    assert run.balance.unresolved_nanos >= server.invoice.total_nanos > 0


@pytest.mark.parametrize("streams", [False, True])
def test_an_endless_answer_is_cut(streams: bool) -> None:
    with FakeProviderServer(script=[Say("and so on ", then=Endless())]) as server:
        run = contain(max_cost_usd=1, prices=server.provider.prices)
        with contained(run), pytest.raises(ExcessOutput):
            over_lm15(server.url + CHAT, chat(stream=streams))
        server.wait_until(lambda: server.disconnects)
    assert run.balance.spent_usd >= server.invoice.total_usd


def test_a_refused_request_never_leaves() -> None:
    with FakeProviderServer() as server, contain(max_cost_usd=0, prices=server.provider.prices) as run:
        with contained(run), pytest.raises(BudgetExceededError):
            over_lm15(server.url + CHAT, chat())
        assert server.requests == ()
