"""INV 25: a provider that sends more than was paid for is cut off, in bounded memory, and charged no less than came.

| answer | read at most |
|---|---|
| text, streamed or not, also inside one line without an end | twice the tokens that were paid for |
| anything else: comments, whitespace | the bytes that `Allowance` grants |
| either, compressed | the same, after decompression |

The limit is exact within one read of the connection. What the provider has sent besides is in the buffers of the
sockets, `BUFFERED_BYTES` at most.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from penstock import ExecutionContext, Halted, Price, PriceBook, StopReason, contain
from penstock.agents import TruncatedResponse
from penstock.hosting.host import HostSettings, RunHost
from penstock.nodes import executors
from penstock.providers import contained
from penstock.providers.models import AnthropicModel, OpenAIModel
from penstock.providers.reading.bodies import UnreadableAnswer
from penstock.providers.reading.meter import ECHO_BYTES_PER_TOKEN, ENVELOPE_BYTES, STREAM_BYTES_PER_TOKEN, ExcessOutput
from penstock.storage.memory import MemoryStores
from penstock.testing import check_history
from penstock.testing.provider import Endless, FakeProviderServer, Say, WireRequest
from tests.nodes.graphs import graph, node
from tests.providers import remote_models

pytestmark = [pytest.mark.reliability]

PAID_TOKENS = 200
MODEL = "fake-1"
PROMPT: Any = [{"role": "user", "content": "hello"}]
TEXT = "some words that go on "
READ_BYTES = 64 * 1024
"""Maximum size of one read of the HTTP library."""
BUFFERED_BYTES = int(Path("/proc/sys/net/ipv4/tcp_rmem").read_text().split()[2]) + 256 * 1024
"""What the kernel may receive ahead of a reader, which it adapts to the sender, and the fake provider's buffers."""
EVENT_BYTES = 320
"""More than an event of the fake provider has for a token."""
EVENT_TOKENS = 4
"""More than one event of the fake provider has."""
MAX_GROWTH_BYTES = 16 * 1024 * 1024

Ask = Callable[[FakeProviderServer, ExecutionContext, bool], None]

ENDLESS = [
    pytest.param(Endless(what, compressed), id=f"{what}{', compressed' if compressed else ''}")  # type: ignore[arg-type]
    for what in ("text", "line", "padding")
    for compressed in (False, True)
]


def openai_sync(server: FakeProviderServer, run: ExecutionContext, streams: bool) -> None:
    with contained(run), openai.OpenAI(base_url=server.openai_url, api_key="k") as client:
        answer = client.chat.completions.create(
            model=MODEL, messages=PROMPT, max_completion_tokens=PAID_TOKENS, stream=streams
        )
        if streams:
            for _ in answer:
                pass


def openai_async(server: FakeProviderServer, run: ExecutionContext, streams: bool) -> None:
    async def main() -> None:
        with contained(run):
            async with openai.AsyncOpenAI(base_url=server.openai_url, api_key="k") as client:
                answer: Any = await client.responses.create(
                    model=MODEL, input="hello", max_output_tokens=PAID_TOKENS, stream=streams
                )
                if streams:
                    async for _ in answer:
                        pass

    asyncio.run(main())


def anthropic_sync(server: FakeProviderServer, run: ExecutionContext, streams: bool) -> None:
    with contained(run), anthropic.Anthropic(base_url=server.url, api_key="k") as client:
        answer: Any = client.messages.create(model=MODEL, messages=PROMPT, max_tokens=PAID_TOKENS, stream=streams)
        if streams:
            for _ in answer:
                pass


def request_body(streams: bool) -> dict[str, Any]:
    return {"model": MODEL, "messages": PROMPT, "max_tokens": PAID_TOKENS, "stream": streams}


def httpx2_sync(server: FakeProviderServer, run: ExecutionContext, streams: bool) -> None:
    url = f"{server.openai_url}/chat/completions"
    with (
        contained(run),
        httpx2.Client() as client,
        client.stream("POST", url, json=request_body(streams)) as answer,
    ):
        answer.read()


def httpx2_async(server: FakeProviderServer, run: ExecutionContext, streams: bool) -> None:
    async def main() -> None:
        with contained(run):
            async with httpx2.AsyncClient() as client:
                await client.post(f"{server.openai_url}/chat/completions", json=request_body(streams))

    asyncio.run(main())


def our_model(make: remote_models.Make) -> Ask:
    def ask(server: FakeProviderServer, run: ExecutionContext, streams: bool) -> None:
        model = make(server, max_output_tokens=PAID_TOKENS)
        asyncio.run(remote_models.ask(model, run, streams))

    return ask


CLIENTS: dict[str, Ask] = {
    "openai": openai_sync,
    "openai, async": openai_async,
    "anthropic": anthropic_sync,
    "httpx2": httpx2_sync,
    "httpx2, async": httpx2_async,
}
MODELS: dict[str, Ask] = {
    f"our {make.__name__}": our_model(make)
    for make in (remote_models.chat, remote_models.responses, remote_models.messages)
}
each_way = pytest.mark.parametrize("ask", [*CLIENTS.values(), *MODELS.values()], ids=[*CLIENTS, *MODELS])
streamed_or_not = remote_models.streamed_or_not


@contextmanager
def bounded_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before < MAX_GROWTH_BYTES


def excess_in(error: BaseException) -> ExcessOutput:
    """The reason of an error: our models keep what came of an answer, and so raise TruncatedResponse from it."""
    reason = error.__cause__ if isinstance(error, TruncatedResponse) else error
    assert isinstance(reason, ExcessOutput)
    return reason


def most_sent(endless: Endless, streams: bool, input_tokens: int) -> int:
    """How much the provider may send until it notices that it was cut off."""
    if endless.what == "padding":
        read = ENVELOPE_BYTES + input_tokens * ECHO_BYTES_PER_TOKEN + PAID_TOKENS * STREAM_BYTES_PER_TOKEN
    else:
        is_framed = streams and endless.what == "text"
        read = 2 * PAID_TOKENS * (EVENT_BYTES if is_framed else 4)
    return read + READ_BYTES + BUFFERED_BYTES


@pytest.mark.requirement("X-1")
@each_way
@streamed_or_not
@pytest.mark.parametrize("endless", ENDLESS)
def test_an_endless_answer_is_cut_off_and_charged(ask: Ask, streams: bool, endless: Endless) -> None:
    with FakeProviderServer(script=[Say(TEXT, then=endless)]) as server, bounded_memory():
        run = contain(max_cost_usd=10, prices=server.provider.prices)
        with pytest.raises((ExcessOutput, TruncatedResponse), match="200 tokens were paid for") as raised:
            ask(server, run, streams)
        server.wait_until(lambda: server.disconnects and not server.open_connections)
        (sent,) = server.disconnects
    excess = excess_in(raised.value)
    (line,) = server.invoice.lines  # it was not sent again
    came = excess.usage.output_tokens
    assert sent.bytes_sent <= most_sent(endless, streams, excess.usage.input_tokens)
    is_framed = streams and endless.what == "text"
    assert PAID_TOKENS <= came <= 2 * PAID_TOKENS + (EVENT_TOKENS if is_framed else READ_BYTES // 4)
    if endless.what != "padding":
        assert came > 2 * PAID_TOKENS
    balance = run.balance
    assert (balance.held_usd, balance.unresolved_usd) == (0, 0)
    assert balance.spent_usd >= server.provider.worst_case_usd(line.input_tokens, came)
    assert balance.spent_usd >= server.invoice.total_usd
    run.end()
    assert check_history(run.history(), ledger=balance) == []


@pytest.mark.requirement("X-1")
@streamed_or_not
@pytest.mark.parametrize("what", ["text", "line", "padding"])
async def test_a_model_with_retries_does_not_pay_for_an_endless_answer_again(streams: bool, what: Any) -> None:
    async with FakeProviderServer(script=lambda _: Say(TEXT, then=Endless(what))) as server:
        run = contain(max_cost_usd=10, max_retries=5, prices=server.provider.prices)
        model = remote_models.chat(server, max_output_tokens=PAID_TOKENS, retries=2)
        with pytest.raises(TruncatedResponse):
            await remote_models.ask(model, run, streams)
    assert len(server.requests) == 1


@pytest.mark.requirement("X-1")
@each_way
@streamed_or_not
def test_an_endless_error_is_cut_off(ask: Ask, streams: bool) -> None:
    with FakeProviderServer(script=[Say(TEXT, then=Endless("padding", status=400))]) as server, bounded_memory():
        run = contain(max_cost_usd=10, prices=server.provider.prices)
        with pytest.raises((UnreadableAnswer, TruncatedResponse), match="larger than 1,048,576 bytes"):
            ask(server, run, streams)
        server.wait_until(lambda: server.disconnects and not server.open_connections)
    assert len(server.requests) == 1
    assert run.balance.held_usd == 0


@pytest.mark.requirement("X-1")
@each_way
def test_a_stream_that_only_keeps_the_connection_alive_ends_with_the_time_of_its_run(ask: Ask) -> None:
    with FakeProviderServer(script=[Say(TEXT, drip_s=0.02, then=Endless("padding"))]) as server:
        run = contain(max_cost_usd=10, timeout_s=0.5, prices=server.provider.prices)
        with pytest.raises(Halted) as raised:
            ask(server, run, True)
        server.wait_until(lambda: server.disconnects and not server.open_connections)
    assert raised.value.stop.reason is StopReason.TIMEOUT
    assert (run.balance.held_usd, run.balance.spent_usd) == (0, 0)
    assert run.balance.unresolved_usd > 0


@contextmanager
def endless_head(opening: bytes, repeated: bytes) -> Iterator[str]:
    """The URL of a server that never comes to the end of the head of its answers."""

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(READ_BYTES)
            connection.sendall(opening)
            while True:
                connection.sendall(repeated)

    def accept() -> None:
        with suppress(OSError):
            while True:
                answer(listener.accept()[0])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


HEADS = {
    "headers": (b"HTTP/1.1 200 OK\r\n", b"x-a: " + b"b" * 1_000 + b"\r\n"),
    "one header": (b"HTTP/1.1 200 OK\r\nx-a: ", b"b" * 1_000),
    "informational responses": (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"),
}


@pytest.mark.requirement("X-1")
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("of", ["openai", "our model"])
def test_an_endless_head_ends_by_itself_or_with_the_time_of_its_run(head: tuple[bytes, bytes], of: str) -> None:
    prices = PriceBook(registered={MODEL: Price(3, 15)}, use_genai_prices=False)
    with endless_head(*head) as url, bounded_memory():
        run = contain(max_cost_usd=1, timeout_s=1, prices=prices)
        with pytest.raises((openai.APIConnectionError, Halted)):
            if of == "openai":
                with contained(run), openai.OpenAI(base_url=url, api_key="k", max_retries=0) as client:
                    client.chat.completions.create(model=MODEL, messages=PROMPT, max_completion_tokens=PAID_TOKENS)
            else:
                model = OpenAIModel(MODEL, base_url=url, api_key="k", max_output_tokens=PAID_TOKENS)
                asyncio.run(remote_models.ask(model, run, False))
    assert (run.balance.held_usd, run.balance.spent_usd) == (0, 0)
    assert run.balance.unresolved_usd > 0


@pytest.mark.requirement("X-1")
@streamed_or_not
async def test_a_served_run_with_an_endless_provider_ends(streams: bool) -> None:
    def fate(_: WireRequest) -> Say:
        return Say(TEXT, then=Endless())

    stores = MemoryStores()
    document = graph(
        [node("in", "input"), node("agent", "agent", model="m", stream=streams, max_output_tokens=PAID_TOKENS)],
        ["in > agent"],
    )
    await stores.graphs.save("endless", "ann", "endless", document, now_ms=0)
    async with FakeProviderServer(script=fate) as server:
        services = {"models": {"m": remote_models.chat(server)}}
        settings, prices = HostSettings(drain_s=0), server.provider.prices
        async with RunHost(stores, executors=executors(), services=services, settings=settings, prices=prices) as host:
            run = await host.submit(owner="ann", graph_id="endless", input="hello")
            ended = await host.wait(run.id)
        await server.until(lambda: server.disconnects)
    assert ended.status == "failed"
    assert ended.cost_nanos >= server.invoice.total_nanos


@pytest.mark.requirement("X-1")
@each_way
@streamed_or_not
def test_an_answer_that_uses_its_limit_is_not_cut_off(ask: Ask, streams: bool) -> None:
    with FakeProviderServer(script=[Say(output_tokens=PAID_TOKENS * 3)]) as server:
        run = contain(max_cost_usd=10, prices=server.provider.prices)
        ask(server, run, streams)
    assert run.balance.spent_usd == server.invoice.total_usd > 0


@pytest.mark.requirement("X-1")
async def test_a_client_of_the_callers_own_is_limited_too() -> None:
    hooks: list[Any] = []

    async def own_hook(response: Any) -> None:
        hooks.append(response.status_code)

    for make, name in ((openai.AsyncOpenAI, "openai"), (anthropic.AsyncAnthropic, "anthropic")):
        async with FakeProviderServer(script=lambda _: Say(TEXT, then=Endless())) as server:
            url = server.openai_url if name == "openai" else server.url
            async with make(base_url=url, api_key="k") as client:  # type: ignore[operator]
                client._client.event_hooks["response"].append(own_hook)
                model: Any = OpenAIModel if name == "openai" else AnthropicModel
                for _ in range(2):  # hooks are added once, however many models there are
                    bounded = model(MODEL, client=client, max_output_tokens=PAID_TOKENS)
                run = contain(max_cost_usd=10, prices=server.provider.prices)
                with pytest.raises(TruncatedResponse, match="200 tokens were paid for"):
                    await remote_models.ask(bounded, run, False)
                assert len(client._client.event_hooks["response"]) == 2
    assert hooks == [200, 200]
