"""The fake provider behind a real socket.

It has a thread and an event loop of its own, so that a blocking client, an async one and a whole framework can all use
it, in one process. Every request is recorded, and so is the moment at which a caller disconnects: the loop reads the
socket all the time, so that a close is seen when it happens and not at the next write.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from types import TracebackType
from typing import Any

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.money import Usd
from penstock.runtime.billing.prices import Price, PriceBook
from penstock.testing.provider.fake import FakeProvider
from penstock.testing.provider.fates import Script
from penstock.testing.provider.formats import FORMATS, format_of, free_answer, is_free
from penstock.testing.provider.formats.format import Format
from penstock.testing.provider.http.delivery import answer_error, answer_json, deliver
from penstock.testing.provider.http.desk import Desk
from penstock.testing.provider.http.protocol import BadRequest, Exchange, Head, Wire, read_body, read_head
from penstock.testing.provider.invoice import Invoice
from penstock.testing.provider.request import WireRequest

BACKLOG = 1_024
NS_PER_S = 1_000_000_000
STEP_S = 0.001
HEAR_OUT_S = 2.0
STOP_S = 60.0
NO_RETRY = {"x-should-retry": "false"}
MODELS = "/v1/models"


@dataclass(frozen=True, slots=True)
class Disconnect:
    """A caller that disconnected before the answer was complete."""

    request: WireRequest
    at_ns: int
    """When it was noticed, on the server's monotonic clock."""
    bytes_sent: int = 0
    """Bytes of the body that were handed to the connection until then."""


class FakeProviderServer:
    """A scripted model provider on 127.0.0.1: `with` or `async with` starts it, and leaves nothing behind.

    `script` is a list of fates, one per request; or a function from the request to its fate; or None for the provider's
    own script, and without one for an echo of `output_tokens` tokens. A fate is a text, a `Say`, or a behaviour of
    `FakeProvider`. With `keeps_generating=False` a stream whose caller has disconnected is billed as far as it was
    sent.
    """

    def __init__(
        self,
        provider: FakeProvider | None = None,
        script: Script = None,
        *,
        output_tokens: int = 50,
        keeps_generating: bool = True,
        max_body_bytes: int = 16 * 1024 * 1024,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.provider = provider or FakeProvider()
        self._desk = Desk(self.provider, script, output_tokens, keeps_generating)
        self._max_body_bytes = max_body_bytes
        self._clock = clock
        self._requests: list[WireRequest] = []
        self._disconnects: list[Disconnect] = []
        self._errors: list[Exception] = []
        self._connections: set[asyncio.Task[None]] = set()
        self._connection_numbers = count(1)
        self._in_flight = 0
        self._most_in_flight = 0
        self._running: _Running | None = None

    @classmethod
    def flat(
        cls,
        cost_usd: Usd,
        script: Script = None,
        *,
        model: str = "fake-1",
        output_tokens: int = 50,
        latency_s: float = 0,
    ) -> FakeProviderServer:
        """Return a server whose calls cost exactly `cost_usd`, whatever tokens and model; `provider.prices` agrees."""
        provider = FakeProvider(model=model, input_usd_per_mtok=0, output_usd_per_mtok=0, latency_s=latency_s)
        price = Price(0, 0, request_usd=cost_usd)
        provider.prices = PriceBook(registered={model: price}, unknown="assume", assumed=price, use_genai_prices=False)
        return cls(provider, script, output_tokens=output_tokens)

    @property
    def url(self) -> str:
        """The base URL for the clients of Anthropic, Google, Amazon Bedrock and Ollama."""
        if self._running is None:
            raise RuntimeError("the server is not running: use `with FakeProviderServer() as server`")
        return f"http://127.0.0.1:{self._running.port}"

    @property
    def openai_url(self) -> str:
        """The base URL for OpenAI's clients."""
        return f"{self.url}/v1"

    @property
    def invoice(self) -> Invoice:
        """The provider's invoice: the amounts really spent."""
        return self.provider.invoice

    @property
    def requests(self) -> tuple[WireRequest, ...]:
        """Every request that was read completely, in the order of arrival, including retries and refusals."""
        return tuple(self._requests)

    @property
    def disconnects(self) -> tuple[Disconnect, ...]:
        """Every caller that disconnected before the end, in that order."""
        return tuple(self._disconnects)

    @property
    def in_flight(self) -> int:
        """Number of requests being answered now."""
        return self._in_flight

    @property
    def most_in_flight(self) -> int:
        """Highest number of requests that were being answered at one time."""
        return self._most_in_flight

    @property
    def open_connections(self) -> int:
        """Number of sockets open now, including idle ones."""
        return len(self._connections)

    def wait_until(self, condition: Callable[[], object], timeout_s: float = 10.0) -> None:
        """Block until `condition()` is true; raises TimeoutError if it does not become true."""
        for _step in self._until(condition, timeout_s):
            time.sleep(STEP_S)

    async def until(self, condition: Callable[[], object], timeout_s: float = 10.0) -> None:
        """Async version of `wait_until`."""
        for _step in self._until(condition, timeout_s):
            await asyncio.sleep(STEP_S)

    def __enter__(self) -> FakeProviderServer:
        if self._running is not None:
            raise RuntimeError("the server is running already")
        self._running = _Running(self._connected, self._hang_up)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._running is not None:
            self._running.stop()
            self._running.thread.join()
        self._stopped(error)

    async def __aenter__(self) -> FakeProviderServer:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._running is not None:
            self._running.stop()
            thread = self._running.thread
            await self.until(lambda: not thread.is_alive(), STOP_S)  # a join would block the caller's loop
        self._stopped(error)

    def _stopped(self, error: BaseException | None) -> None:
        self._running = None
        if error is None and self._errors:
            raise self._errors[0]  # the caller only saw a status, and may have taken it for a scripted one

    def _until(self, condition: Callable[[], object], timeout_s: float) -> Iterator[None]:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                seen = (
                    f"{len(self._requests)} requests, {self._in_flight} in flight, {len(self._disconnects)} disconnects"
                )
                raise TimeoutError(f"not so after {timeout_s:g} s: {seen}")
            yield

    def _connected(self, wire: Wire, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._talk(wire, reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        task.add_done_callback(lambda _: writer.transport.abort())  # also for a task that was cancelled before it began

    async def _hang_up(self) -> None:
        """End every connection, whatever its state; a connection being accepted is accepted first, and then ended."""
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in self._connections:
                task.cancel()
            await asyncio.wait(tasks)

    async def _talk(self, wire: Wire, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve all requests of one connection, one after the other."""
        number = next(self._connection_numbers)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._serve_one(number, wire, reader, writer):
                pass
            writer.close()
            await writer.wait_closed()

    async def _serve_one(
        self, connection: int, wire: Wire, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Read and answer one request; return whether another may follow."""
        exchange = Exchange(writer, None)
        try:
            head = await read_head(reader)
            if head is None:
                return False
            exchange = Exchange(writer, head)
            if head.headers.get("expect", "").lower() == "100-continue":
                exchange.go_on()
            raw = await read_body(reader, head, self._max_body_bytes)
        except BadRequest as error:
            exchange.keeps_alive = False
            await answer_error(exchange, FORMATS["/v1/chat/completions"], error.status, error.message)
            await _hear_out(reader, writer)
            return False
        request = self._recorded(connection, head, raw)
        answered = await _unless_gone(wire, self._counted(self._answer(request, exchange)))
        if not answered:
            self._disconnects.append(Disconnect(request, self._clock.monotonic_ns(), exchange.bytes_sent))
        return answered and exchange.keeps_alive

    def _recorded(self, connection: int, head: Head, raw: bytes) -> WireRequest:
        body = None
        with suppress(ValueError, RecursionError):
            body = json.loads(raw, parse_constant=_no_constant)
        number, at_ns = len(self._requests) + 1, self._clock.monotonic_ns()
        request = WireRequest(number, connection, head.method, head.path, head.headers, at_ns, raw, body, head.query)
        self._requests.append(request)
        return request

    async def _counted(self, work: Coroutine[Any, Any, None]) -> None:
        self._in_flight += 1
        self._most_in_flight = max(self._most_in_flight, self._in_flight)
        try:
            await work
        finally:
            self._in_flight -= 1

    async def _answer(self, request: WireRequest, exchange: Exchange) -> None:
        format = format_of(request)
        if request.path == MODELS or is_free(request.path):
            await self._answer_free(request, exchange)
        elif format is None:
            await _refuse(exchange, 404, f"there is no {request.path} here")
        elif request.method != "POST":
            await answer_error(exchange, format, 405, f"{request.path} takes POST", {"allow": "POST"})
        elif (terms := format.terms(request)) is None:
            await answer_error(exchange, format, 400, "the body is not a JSON object")
        elif problem := format.problem(terms):
            await answer_error(exchange, format, 400, problem)
        else:
            await self._answer_order(replace(request, terms=terms), format, exchange)

    async def _answer_free(self, request: WireRequest, exchange: Exchange) -> None:
        """Answer a request that a provider does not charge for."""
        if request.path == MODELS and request.method == "GET":
            model = {"id": self.provider.model, "object": "model", "created": 0, "owned_by": "penstock"}
            await answer_json(exchange, 200, {"object": "list", "data": [model]})
        elif is_free(request.path) and request.method == "POST":
            await answer_json(exchange, 200, free_answer(request))
        else:
            await _refuse(exchange, 405, f"{request.path} does not take {request.method}")

    async def _answer_order(self, request: WireRequest, format: Format, exchange: Exchange) -> None:
        try:
            order = self._desk.take(request, self._clock.time_ns() // NS_PER_S)
        except Exception as error:  # of the script, which is the test's own code: raised at the end of the `with`
            self._errors.append(error)
            return await answer_error(exchange, format, 500, f"the script failed: {error!r}", NO_RETRY)
        try:
            await deliver(order, format, exchange, streams=request.streams)
        finally:
            order.leave()


class _Running:
    """The thread, the loop and the listening socket of a running server.

    The socket listens before the thread starts, so that there is nothing to wait for: a client that connects is in the
    backlog until the loop accepts it.
    """

    def __init__(
        self,
        connected: Callable[[Wire, asyncio.StreamReader, asyncio.StreamWriter], None],
        hang_up: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self._connected = connected
        self._hang_up = hang_up
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._stopping = asyncio.Event()
        self._accepting: set[asyncio.Task[Any]] = set()
        self.thread = threading.Thread(target=self._run, name="fake-provider", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)

    def _run(self) -> None:
        with self._runner:
            self._runner.run(self._serve())

    async def _serve(self) -> None:
        # Not `create_server`: closing it while it accepts loses sockets, which it then neither serves nor closes.
        self._loop.add_reader(self._listener, self._accept)
        try:
            await self._stopping.wait()
        finally:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            await self._hang_up()
            await asyncio.sleep(0)  # an aborted transport closes its socket in the next turn

    def _accept(self) -> None:
        with suppress(BlockingIOError, ConnectionAbortedError):  # the client has already disconnected
            wire, _ = self._listener.accept()
            accepting = self._loop.connect_accepted_socket(lambda: Wire(self._connected), wire)
            task = self._loop.create_task(accepting)
            self._accepting.add(task)
            task.add_done_callback(self._accepting.discard)


async def _unless_gone(wire: Wire, work: Coroutine[Any, Any, None]) -> bool:
    """Return whether `work` ended before the caller disconnected; it is cancelled if not."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(wire.gone.wait())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()  # has no effect if it is done
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
    if working.cancelled():
        return False
    error = working.exception()
    if error is not None and not isinstance(error, ConnectionError):
        raise error
    return error is None


async def _refuse(exchange: Exchange, status: int, message: str) -> None:
    await answer_error(exchange, FORMATS["/v1/chat/completions"], status, message)


async def _hear_out(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Let a caller that is still sending see the refusal: closing on unread data would reset the connection."""
    with suppress(TimeoutError, OSError):
        writer.write_eof()
        async with asyncio.timeout(HEAR_OUT_S):
            while await reader.read(65_536):
                pass


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
