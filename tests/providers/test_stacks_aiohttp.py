"""aiohttp under the limits of a run: bodies, reads, failures, stops, and the transports on top of it."""

from __future__ import annotations

import asyncio
import gc
import io
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest

from penstock import BudgetExceededError, CancelledError, ExecutionContext
from penstock.providers import ExcessOutput
from penstock.testing.provider import Cut, Endless, FakeProviderServer, Hang, RefuseFree, Say
from tests.providers.sdk_calls import limits
from tests.providers.servers import redirecting_to
from tests.providers.stack_calls import CHAT, chat, encoded
from tests.providers.test_stacks_http_client import text_of

pytestmark = pytest.mark.requirement("X-5")

TEXT = "hello " * 30
HANGS = Say(TEXT, then=Hang())
HANGS_IN_THE_MIDDLE = Say(TEXT, then=Hang(after=3))


@asynccontextmanager
async def contained_session(
    script: Any = None, *, session: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[FakeProviderServer, ExecutionContext, aiohttp.ClientSession]]:
    """A server with this script, a run with these options, and a session for the server."""
    async with (
        FakeProviderServer(script=script) as server,
        aiohttp.ClientSession(server.url, **(session or {})) as client,
    ):
        with limits(server, **options) as run:
            yield server, run, client


async def pieces() -> AsyncIterator[bytes]:
    for byte in encoded(chat()):
        yield bytes([byte])


BODIES: dict[str, Callable[[], dict[str, Any]]] = {
    "json": lambda: {"json": chat()},
    "bytes": lambda: {"data": encoded(chat())},
    "bytearray": lambda: {"data": bytearray(encoded(chat()))},
    "text": lambda: {"data": encoded(chat()).decode()},
    "file": lambda: {"data": io.BytesIO(encoded(chat()))},
    "generator": lambda: {"data": pieces()},
    "payload": lambda: {"data": aiohttp.BytesPayload(encoded(chat()))},
    "wrong length": lambda: {"json": chat(), "headers": {"Content-Length": "3"}},
}


@pytest.mark.parametrize("kind", BODIES)
async def test_every_kind_of_body_is_read_and_counted(kind: str) -> None:
    async with contained_session() as (server, run, session), session.post(CHAT, **BODIES[kind]()) as response:
        assert text_of(await response.read())
    [sent] = server.requests
    assert sent.headers["accept-encoding"] == "identity"
    assert sent.headers["content-length"] == str(len(sent.raw))
    assert run.balance.spent_nanos == server.invoice.total_nanos > 0


@pytest.mark.parametrize(
    "body",
    [
        lambda: {"data": b"not JSON"},
        lambda: {"data": aiohttp.FormData({"a": "b"})},
        lambda: {"data": {"a": "b"}},
        lambda: {"data": pieces_of(b"not", b" JSON")},
        dict,
    ],
    ids=["bytes", "form", "dict", "generator", "nothing"],
)
async def test_a_request_that_is_not_for_a_model_passes_unchanged(body: Callable[[], dict[str, Any]]) -> None:
    async with FakeProviderServer() as server, aiohttp.ClientSession(server.url) as session:
        await (await session.post(CHAT, **body())).read()
        with limits(server, max_cost_usd=0) as run:
            await (await session.post(CHAT, **body())).read()
            assert await (await session.get("/v1/models")).json()
    plain, contained, *_ = server.requests
    assert contained.raw == plain.raw
    assert contained.headers.get("content-type") == plain.headers.get("content-type")
    assert run.balance.attempts == 0


async def pieces_of(*given: bytes) -> AsyncIterator[bytes]:
    for piece in given:
        yield piece


async def test_what_is_refused_never_leaves() -> None:
    async with contained_session(max_cost_usd=0) as (server, _, session):
        with pytest.raises(BudgetExceededError):
            await session.post(CHAT, json=chat())
    assert server.requests == ()


async def read_by(response: aiohttp.ClientResponse, how: str) -> bytes:
    """Everything in the response, read in that way."""
    content = response.content
    match how:
        case "read":
            return await response.read()
        case "text":
            return (await response.text()).encode()
        case "iter_any":
            return b"".join([piece async for piece in content.iter_any()])
        case "iter_chunked":
            return b"".join([piece async for piece in content.iter_chunked(7)])
        case "iter_chunks":
            return b"".join([piece async for piece, _ in content.iter_chunks()])
        case "readline":
            return b"".join([line async for line in _until_empty(content.readline)])
        case "content.read(n)":
            return b"".join([line async for line in _until_empty(lambda: content.read(100))])
        case "content.read":
            return await content.read()
    return b"".join([line async for line in content])


async def _until_empty(read: Callable[[], Any]) -> AsyncIterator[bytes]:
    while piece := await read():
        yield piece


WAYS = [
    "read",
    "text",
    "iter_any",
    "iter_chunked",
    "iter_chunks",
    "readline",
    "content.read(n)",
    "content.read",
    "lines",
]


@pytest.mark.parametrize("streams", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("how", WAYS)
async def test_every_way_to_read_gets_the_answer_and_frees_the_connection(how: str, streams: bool) -> None:
    async with contained_session(lambda _: TEXT) as (server, run, session):
        for _ in range(2):
            response = await session.post(CHAT, json=chat(stream=streams))
            answer = await read_by(response, how)
            assert text_of(answer) == TEXT
            assert b'"prompt_tokens"' not in answer or not streams  # the usage was requested by us alone
    assert {request.connection for request in server.requests} == {1}
    assert run.balance.spent_nanos == server.invoice.total_nanos
    assert run.balance.steps == 2


async def test_chunks_of_a_stream_are_marked_as_complete() -> None:
    async with contained_session([TEXT]) as (_, _, session), session.post(CHAT, json=chat(stream=True)) as response:
        assert all([complete async for piece, complete in response.content.iter_chunks() if piece])


@pytest.mark.parametrize("ends", ["release", "close", "context"])
async def test_a_response_that_is_released_early_is_unresolved_and_its_connection_is_broken(ends: str) -> None:
    async with contained_session([HANGS_IN_THE_MIDDLE]) as (server, run, session):
        response = await session.post(CHAT, json=chat(stream=True))
        assert await response.content.readany()
        if ends == "context":
            async with response:
                pass
        else:
            getattr(response, ends)()
        assert run.balance.held_nanos == 0
        await server.until(lambda: server.disconnects)
    assert run.balance.unresolved_nanos >= server.invoice.total_nanos > 0


async def test_the_hold_of_a_response_that_is_never_read_becomes_unresolved() -> None:
    async with contained_session() as (server, run, session):
        response: Any = await session.post(CHAT, json=chat(stream=True))
        assert run.balance.held_nanos > 0
        del response
        gc.collect()
        await server.until(lambda: run.balance.held_nanos == 0)
    assert run.balance.unresolved_nanos >= server.invoice.total_nanos > 0


@pytest.mark.parametrize("status", [401, 429, 500])
async def test_an_error_status_reaches_the_caller_and_is_free(status: int) -> None:
    async with contained_session([RefuseFree(status), "hello"]) as (server, run, session):
        response = await session.post(CHAT, json=chat())
        assert f"the script says {status}".encode() in await response.read()
        assert run.balance.spent_nanos == run.balance.unresolved_nanos == run.balance.held_nanos == 0
        assert await (await session.post(CHAT, json=chat())).read()
    assert {request.connection for request in server.requests} == {1}


async def test_an_error_status_is_raised_by_a_session_that_raises() -> None:
    async with contained_session([RefuseFree(429)], session={"raise_for_status": True}) as (_, run, session):
        with pytest.raises(aiohttp.ClientResponseError, match="429"):
            await session.post(CHAT, json=chat())
    assert run.balance.spent_nanos == run.balance.unresolved_nanos == run.balance.held_nanos == 0


async def test_a_redirect_is_free_and_its_target_is_paid_once() -> None:
    async with contained_session() as (server, run, session):
        with redirecting_to(server.url) as elsewhere:
            async with session.post(elsewhere + CHAT, json=chat()) as response:
                assert text_of(await response.read())
    assert run.balance.spent_nanos == server.invoice.total_nanos > 0
    assert (run.balance.steps, run.balance.unresolved_nanos) == (1, 0)


async def test_a_connection_that_is_refused_is_free() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{free.getsockname()[1]}"
    async with contained_session() as (_, run, session):
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.post(closed + CHAT, json=chat())
    assert run.balance.attempts == 1
    assert run.balance.spent_nanos == run.balance.unresolved_nanos == run.balance.held_nanos == 0


@pytest.mark.parametrize("streams", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("after", [None, 3], ids=["before the headers", "in the middle"])
async def test_a_server_that_hangs_up_leaves_the_bill_open(streams: bool, after: int | None) -> None:
    async with contained_session([Say(TEXT, then=Cut(after))]) as (server, run, session):
        with pytest.raises((aiohttp.ClientError, OSError)):
            async with session.post(CHAT, json=chat(stream=streams)) as response:
                await response.read()
    assert run.balance.unresolved_nanos >= server.invoice.total_nanos > 0
    assert run.balance.held_nanos == 0


@pytest.mark.parametrize("streams", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("endless", [Endless(), Endless("line"), Endless("padding"), Endless(compressed=True)], ids=str)
async def test_an_endless_answer_is_cut(streams: bool, endless: Endless) -> None:
    async with contained_session([Say(TEXT, then=endless), "hello"]) as (server, run, session):
        response = await session.post(CHAT, json=chat(stream=streams))
        with pytest.raises(ExcessOutput):
            await response.content.read()
        await server.until(lambda: server.disconnects)
        async with session.post(CHAT, json=chat()) as response:
            assert text_of(await response.read()) == "hello"
    assert [request.connection for request in server.requests] == [1, 2]
    assert run.balance.spent_nanos + run.balance.unresolved_nanos >= server.invoice.total_nanos


async def test_an_endless_error_answer_is_cut() -> None:
    async with contained_session([Say(TEXT, then=Endless("padding", status=500))]) as (server, _, session):
        response = await session.post(CHAT, json=chat())
        with pytest.raises(Exception, match="larger than"):
            await response.content.read()
        await server.until(lambda: server.disconnects)


@pytest.mark.parametrize("fate", [HANGS, HANGS_IN_THE_MIDDLE], ids=["waits", "reads"])
@pytest.mark.parametrize("from_outside", [False, True], ids=["abort", "cancel"])
async def test_a_stop_frees_a_task_and_closes_the_socket(fate: Say, from_outside: bool) -> None:
    async def call() -> bytes:
        async with session.post(CHAT, json=chat(stream=True)) as response:
            return await response.read()

    async with contained_session([fate]) as (server, run, session):
        task = asyncio.create_task(call())
        await server.until(lambda: server.in_flight == 1)
        if from_outside:
            task.cancel()
        else:
            run.abort("enough")
        with pytest.raises(asyncio.CancelledError if from_outside else CancelledError):
            await task
        await server.until(lambda: server.disconnects)
    assert run.balance.held_nanos == 0
    assert run.balance.unresolved_nanos >= server.invoice.total_nanos


async def test_an_abort_frees_a_task_that_connects_and_nothing_is_sent() -> None:
    connecting = asyncio.Event()

    async def connect(address: Any) -> socket.socket:
        connecting.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with contained_session() as (server, run, session):
        connector: Any = session.connector
        connector._wrap_create_connection = lambda *_, **__: connect(None)
        task = asyncio.create_task(session.post(CHAT, json=chat())._coro)
        await connecting.wait()
        run.abort("enough")
        with pytest.raises(CancelledError, match="enough"):
            await task
    assert server.requests == ()
    assert run.balance.held_nanos == 0


@pytest.mark.parametrize("fate", [HANGS, HANGS_IN_THE_MIDDLE], ids=["before the answer", "in the middle"])
async def test_the_deadline_of_the_run_frees_a_task(fate: Say) -> None:
    async with contained_session([fate], timeout_s=0.2) as (server, _, session):
        with pytest.raises(BudgetExceededError, match="timeout"):
            async with session.post(CHAT, json=chat(stream=True)) as response:
                await response.read()
        await server.until(lambda: server.disconnects)


async def test_the_timeout_of_the_client_itself_leaves_the_bill_open() -> None:
    async with contained_session([HANGS]) as (server, run, session):
        with pytest.raises(TimeoutError):
            await session.post(CHAT, json=chat(), timeout=aiohttp.ClientTimeout(total=0.2))
    assert run.balance.unresolved_nanos >= server.invoice.total_nanos > 0


async def test_an_abort_closes_the_socket_of_a_response_that_is_not_being_read() -> None:
    async with (
        contained_session([HANGS_IN_THE_MIDDLE]) as (server, run, session),
        session.post(CHAT, json=chat(stream=True)) as response,
    ):
        assert await response.content.readline()
        run.abort("enough")
        await server.until(lambda: server.disconnects)
        with pytest.raises(CancelledError, match="enough"):
            await response.content.read()


@pytest.mark.parametrize("streams", [False, True], ids=["plain", "stream"])
async def test_a_request_of_an_sdk_over_aiohttp_is_counted_once(streams: bool) -> None:
    async with (
        FakeProviderServer(script=[TEXT]) as server,
        openai.AsyncOpenAI(
            base_url=server.openai_url, api_key="k", http_client=openai.DefaultAioHttpClient()
        ) as client,
    ):
        with limits(server, max_cost_usd=1) as run:
            found: Any = await client.chat.completions.create(**chat(stream=streams))
            if streams:
                assert "".join([chunk.choices[0].delta.content or "" async for chunk in found]) == TEXT
            else:
                assert found.choices[0].message.content == TEXT
    assert (run.balance.attempts, run.balance.api_calls) == (1, 1)
    assert run.balance.spent_nanos == server.invoice.total_nanos > 0


async def test_headers_that_can_be_read_once_are_sent() -> None:
    async with contained_session(["hello"]) as (server, run, session):
        pairs = iter([("x-mine", "1")])
        async with session.post(CHAT, json=chat(), headers=pairs) as response:
            await response.content.wait_eof()
        assert server.requests[0].headers["x-mine"] == "1"
    assert run.balance.held_nanos == 0
