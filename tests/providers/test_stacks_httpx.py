"""A stop reaches a request wherever it is: the caller gets an error, the socket is closed, and the call has its end."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

import httpx
import httpx2
import pytest

from penstock import BudgetExceededError, CancelledError, PenstockError, PriceBook, contain
from penstock.providers import contained
from penstock.runtime import worker
from penstock.runtime.billing import price_table, prices
from penstock.runtime.billing.price_table import PriceTable
from penstock.testing.provider import FakeProviderServer, Hang, Say
from tests.providers.sdk_calls import (
    ASYNC_CALLS,
    ASYNC_STREAMS,
    CALLS,
    MODEL,
    PROMPT,
    AsyncCall,
    Call,
    async_clients,
    chat,
    clients,
    limits,
    outcome,
)
from tests.providers.servers import redirecting_to
from tests.providers.shapes import OFFICIAL

pytestmark = pytest.mark.requirement("X-5")

HANGS = Say("hello " * 30, then=Hang())
HANGS_IN_THE_MIDDLE = Say("hello " * 30, then=Hang(after=3))
NEVER = 3_600.0


def when(condition: Callable[[], object], act: Callable[[], object], server: FakeProviderServer) -> threading.Thread:
    """A thread that does `act` once the condition is true of the server."""

    def wait() -> None:
        server.wait_until(condition)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.parametrize("call", ASYNC_CALLS)
def test_an_async_request_loads_the_table_of_prices_on_a_thread(
    call: AsyncCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def load(export: object = None) -> PriceTable:
        threads.append(threading.current_thread())
        return PriceTable()

    monkeypatch.setattr(prices, "_table", None)
    monkeypatch.setattr(price_table, "load_table", load)

    async def main(server: FakeProviderServer) -> None:
        async with async_clients(server) as to:
            with contain(prices=PriceBook()) as run, contained(run):
                await call(to)

    with FakeProviderServer() as server:
        asyncio.run(main(server))
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("warm", [False, True], ids=["a new connection", "a connection used before"])
def test_an_abort_frees_a_waiting_sync_caller_and_closes_the_socket(call: Call, warm: bool) -> None:
    with (
        FakeProviderServer(script=[*(["hello"] if warm else []), HANGS]) as server,
        clients(server, timeout=NEVER) as to,
        contain(prices=server.provider.prices) as run,
        contained(run),
    ):
        if warm:
            call(to)
        aborting = when(lambda: len(server.requests) == 1 + warm, lambda: run.abort("enough"), server)
        with pytest.raises(CancelledError, match="enough"):
            call(to)
        aborting.join()
        server.wait_until(lambda: server.disconnects)
    assert run.balance.held_nanos == 0
    assert run.balance.unresolved_nanos >= server.invoice.lines[-1].cost_nanos
    assert "■" in run.explain()


@pytest.mark.parametrize("api", ["chat", "messages"])
def test_an_abort_frees_a_sync_caller_in_the_middle_of_a_stream(api: str) -> None:
    got: list[Any] = []
    with (
        FakeProviderServer(script=[HANGS_IN_THE_MIDDLE]) as server,
        clients(server, timeout=NEVER) as to,
        limits(server) as run,
    ):
        create = to.openai.chat.completions.create if api == "chat" else to.anthropic.messages.create
        aborting = when(lambda: len(got) >= 3 and worker.busy_workers() == 1, lambda: run.abort("enough"), server)
        with pytest.raises(CancelledError, match="enough"):
            for event in create(model=MODEL, messages=PROMPT, max_tokens=100, stream=True):
                got.append(event)
        aborting.join()
        server.wait_until(lambda: server.disconnects)
    assert run.balance.unresolved_nanos >= server.invoice.total_nanos


@pytest.mark.parametrize("call", ASYNC_CALLS)
async def test_an_abort_frees_a_waiting_task_and_closes_the_socket(call: AsyncCall) -> None:
    async with FakeProviderServer(script=[HANGS]) as server, async_clients(server, timeout=NEVER) as to:
        with contain(prices=server.provider.prices) as run, contained(run):
            task = asyncio.create_task(call(to))  # type: ignore[arg-type]  # each is a coroutine
            await server.until(lambda: server.in_flight == 1)
            run.abort("enough")
            with pytest.raises(CancelledError, match="enough"):
                await task
            await server.until(lambda: server.disconnects)
    assert run.balance.held_nanos == 0
    assert run.balance.unresolved_nanos >= server.invoice.total_nanos


@pytest.mark.parametrize("call", ASYNC_STREAMS)
async def test_an_abort_frees_a_task_in_the_middle_of_a_stream(call: AsyncCall) -> None:
    async with FakeProviderServer(script=[HANGS_IN_THE_MIDDLE]) as server, async_clients(server, timeout=NEVER) as to:
        with contain(prices=server.provider.prices) as run:

            async def inside() -> None:
                with contained(run):
                    await call(to)

            task = asyncio.create_task(inside())
            await server.until(lambda: server.in_flight == 1)
            await asyncio.to_thread(run.abort, "enough")
            with pytest.raises(CancelledError, match="enough"):
                await task
            await server.until(lambda: server.disconnects)
    assert run.balance.unresolved_nanos >= server.invoice.total_nanos


def test_an_abort_closes_the_socket_of_a_stream_that_is_not_being_read() -> None:
    with (
        FakeProviderServer(script=[HANGS_IN_THE_MIDDLE]) as server,
        clients(server, timeout=NEVER) as to,
        limits(server) as run,
    ):
        stream = to.openai.chat.completions.create(model=MODEL, messages=PROMPT, stream=True)
        chunks = iter(stream)
        next(chunks)
        run.abort("enough")
        server.wait_until(lambda: server.disconnects)
        with pytest.raises(CancelledError, match="enough"):
            list(chunks)


async def test_an_abort_closes_the_socket_of_an_async_stream_that_is_not_being_read() -> None:
    async with FakeProviderServer(script=[HANGS_IN_THE_MIDDLE]) as server, async_clients(server, timeout=NEVER) as to:
        with contain(prices=server.provider.prices) as run, contained(run):
            async with await to.anthropic.messages.create(
                model=MODEL, messages=PROMPT, max_tokens=50, stream=True
            ) as stream:
                await anext(stream)
                run.abort("enough")
                await server.until(lambda: server.disconnects)
                with pytest.raises(CancelledError, match="enough"):
                    [_ async for _ in stream]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("fate", [HANGS, HANGS_IN_THE_MIDDLE], ids=["before the answer", "in the middle"])
def test_the_deadline_of_the_run_frees_a_sync_caller(call: Call, fate: Say) -> None:
    with FakeProviderServer(script=["warm", fate]) as server, clients(server, timeout=NEVER, max_retries=5) as to:
        call(to)  # all is loaded and connected: the deadline comes after the request has left
        with limits(server, timeout_s=1.0), pytest.raises(BudgetExceededError, match="timeout"):
            call(to)
        server.wait_until(lambda: server.disconnects)
    assert len(server.requests) == 2


@pytest.mark.parametrize("call", CALLS)
def test_a_stop_while_a_sync_request_connects_sends_nothing(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    connects, stopped = threading.Event(), threading.Event()
    connect = socket.create_connection

    def slow(*args: Any, **options: Any) -> socket.socket:
        connects.set()
        stopped.wait(60)
        return connect(*args, **options)

    with FakeProviderServer() as server, clients(server, timeout=NEVER) as to, limits(server) as run:
        monkeypatch.setattr(socket, "create_connection", slow)
        stopper = threading.Thread(target=lambda: (connects.wait(60), run.abort("enough")))
        stopper.start()
        with pytest.raises(CancelledError, match="enough"):
            call(to)
        stopper.join()
        stopped.set()
        server.wait_until(lambda: worker.busy_workers() == 0)
        assert server.requests == ()
    assert run.balance.held_nanos == 0


@pytest.mark.parametrize("call", ASYNC_CALLS)
@pytest.mark.parametrize("fate", [HANGS, HANGS_IN_THE_MIDDLE], ids=["before the answer", "in the middle"])
async def test_the_deadline_of_the_run_frees_a_task(call: AsyncCall, fate: Say) -> None:
    async with FakeProviderServer(script=["warm", fate]) as server, async_clients(server, timeout=NEVER) as to:
        await call(to)  # all is loaded and connected: the deadline comes after the request has left
        with contain(timeout_s=0.3, prices=server.provider.prices) as run, contained(run):
            with pytest.raises(BudgetExceededError, match="timeout"):
                await call(to)
            await server.until(lambda: server.disconnects)
    assert len(server.requests) == 2


def test_the_timeout_of_the_tool_around_it_frees_a_call() -> None:
    with FakeProviderServer(script=[HANGS]) as server, clients(server, timeout=NEVER) as to, limits(server) as run:
        with pytest.raises(BudgetExceededError, match="timeout"):
            run.tool(chat, to, timeout_s=0.2)
        server.wait_until(lambda: server.disconnects)
        server.wait_until(lambda: run.balance.held_nanos == 0)


def test_the_abort_of_a_child_frees_a_call_made_in_it_by_a_tool() -> None:
    def tool() -> None:
        with run.spawn_child("child") as child:
            aborting = when(lambda: server.in_flight == 1, lambda: child.abort("enough"), server)
            try:
                with pytest.raises(CancelledError, match="enough"):
                    chat(to)
            finally:
                aborting.join()

    with FakeProviderServer(script=[HANGS]) as server, clients(server, timeout=NEVER) as to, limits(server) as run:
        run.tool(tool)
        server.wait_until(lambda: server.disconnects)
    assert run.balance.steps == 1


@pytest.mark.parametrize("call", ASYNC_CALLS)
async def test_a_task_that_is_cancelled_from_outside_stays_cancelled(call: AsyncCall) -> None:
    async with FakeProviderServer(script=[HANGS]) as server, async_clients(server, timeout=NEVER) as to:
        with contain(prices=server.provider.prices) as run, contained(run):
            task = asyncio.create_task(call(to))  # type: ignore[arg-type]  # each is a coroutine
            await server.until(lambda: server.in_flight == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await server.until(lambda: server.disconnects)
    assert run.balance.unresolved_nanos >= server.invoice.total_nanos


def test_the_timeout_of_the_client_itself_leaves_the_bill_open() -> None:
    with (
        FakeProviderServer(script=[HANGS]) as server,
        clients(server, timeout=0.2, max_retries=0) as to,
        limits(server) as run,
    ):
        assert type(outcome(lambda: chat(to))).__name__ == "APITimeoutError"
    assert run.balance.unresolved_nanos >= server.invoice.total_nanos > 0


def test_a_connection_that_never_opened_is_free() -> None:
    with FakeProviderServer() as server:
        pass
    with FakeProviderServer() as other, clients(other, max_retries=1) as to:
        to.openai.base_url = _closed_port()
        with contain(prices=server.provider.prices) as run, contained(run):
            assert type(outcome(lambda: chat(to))).__name__ == "APIConnectionError"
    assert run.balance.attempts == 2
    assert run.balance.spent_nanos == run.balance.unresolved_nanos == 0


def test_a_redirect_is_free_and_its_target_is_contained() -> None:
    body = {"model": MODEL, "messages": PROMPT, "max_tokens": 50}
    with (
        FakeProviderServer() as server,
        redirecting_to(server.openai_url) as elsewhere,
        limits(server) as run,
        httpx2.Client(follow_redirects=True) as client,
    ):
        assert client.post(f"{elsewhere}/chat/completions", json=body).status_code == 200
    assert (run.balance.attempts, run.balance.steps) == (2, 1)
    assert run.balance.spent_nanos == server.invoice.total_nanos
    assert run.balance.unresolved_nanos == 0


def test_inline_calls_stay_in_the_thread_that_makes_them() -> None:
    with FakeProviderServer() as server, clients(server) as to, limits(server, sync_calls="inline") as run:
        before = threading.active_count()
        assert chat(to)
        assert threading.active_count() <= before
    assert run.balance.spent_nanos == server.invoice.total_nanos


def test_a_request_that_is_not_for_a_model_passes_unchanged() -> None:
    with FakeProviderServer() as server, contain(max_cost_usd=0) as run, contained(run), httpx2.Client() as client:
        listed = client.get(server.openai_url + "/models")
        odd: list[Any] = [
            client.post(server.openai_url + "/chat/completions", content=b"not JSON"),
            client.post(server.url + "/v1/messages", json={"channel": "general", "text": "hello"}),
        ]
    assert listed.status_code == 200
    assert [found.status_code for found in odd] == [400, 400]
    assert server.requests[1].raw == b"not JSON"
    assert run.balance.attempts == 0


def _closed_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/v1/"


@pytest.mark.parametrize("library", [httpx2, httpx])
def test_an_async_request_on_a_loop_that_is_not_of_asyncio_is_refused_before_it_is_held(library: Any) -> None:
    with FakeProviderServer() as server, limits(server) as run:
        transport = library.AsyncHTTPTransport(verify=False)
        request = library.Request("POST", server.url + OFFICIAL["chat"].path, json=OFFICIAL["chat"].body)
        with pytest.raises(PenstockError, match="event loops of asyncio alone"):
            transport.handle_async_request(request).send(None)  # as a loop of trio takes its first step
        assert (run.balance.steps, run.balance.unresolved_nanos, server.requests) == (0, 0, ())
