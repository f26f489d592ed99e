"""A model behind an API, reached through the provider's own client.

The client keeps connections, signs requests and raises errors for bad statuses, with its own retries off: the contained
call retries. A format writes the request and reads the response. Admission, holds and cost are handled by `Model` and
the runtime behind it.

A response is complete when the provider's end marker has arrived; without it, TruncatedResponse is raised. The usage of
a stream is reported only at its end: earlier counts are lower than the bill. A response longer than was paid for is cut
off with TruncatedResponse, and at least the received part is charged.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from penstock import checks
from penstock.agents.messages import ToolCall, bytes_of
from penstock.agents.model import BYTES_PER_TOKEN, Model, ModelRequest, ModelResponse, TruncatedResponse
from penstock.containment.breaker import CircuitBreaker
from penstock.errors import InvalidValue
from penstock.providers.current import already_held
from penstock.providers.models.breakers import breakers, passing
from penstock.providers.models.connections import Borrowed, Connections
from penstock.providers.models.events import events
from penstock.providers.models.formats.format import Format, StreamReader, UnsupportedRequest
from penstock.providers.reading.bodies import UnreadableAnswer, reading
from penstock.providers.reading.meter import Allowance, Counted, ExcessOutput, JsonBody, Meter
from penstock.runtime.billing.error_bill import ErrorBill, check_error_bill, mark_bill
from penstock.runtime.billing.usage import MAX_NAME, Usage

DRAIN_S = 0.05
"""Time a server may take to close a finished stream; after that the connection is not reused."""

OURS = frozenset(
    {
        *("model", "messages", "input", "system", "instructions", "tools", "stream", "stream_options"),
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of"),
    }
)
"""Fields that `extra` settings may not override, because the cost of a call depends on them."""


@dataclass(frozen=True, slots=True)
class Library:
    """The classes of a provider's client that its `post` takes as arguments."""

    answer: Any
    """Class of an unparsed response."""
    stream: Any


class RemoteModel(Model):
    """A model behind an API; created by `model("openai:gpt-4o")` and by the classes for each provider."""

    provider = ""
    """Prefix of the name of its circuit."""
    path = ""
    """Path of requests, below the client's base URL."""
    message_tokens = 32
    """Tokens around the text of a message, or of a tool call with its result: ids, names, markers."""
    tools_tokens = 0
    """Tokens that the provider adds to the input of a request with tools."""

    def __init__(
        self,
        name: str,
        format: Format,
        library: Library,
        connections: Connections | Borrowed,
        *,
        max_output_tokens: int = Model.max_output_tokens,
        floor: int = Model.floor,
        retries: int = 0,
        breaker: CircuitBreaker | bool = False,
        error_bill: ErrorBill | None = None,
    ) -> None:
        _check_name(name)
        checks.integer("max_output_tokens", max_output_tokens, minimum=1, of="tokens")
        checks.integer("floor", floor, minimum=1, of="tokens")
        checks.integer("retries", retries)
        super().__init__(name)
        self.format = format
        self.applies = format.applies
        self._library = library
        self.max_output_tokens = max_output_tokens
        self.floor = floor
        self.retries = retries
        self.breaker = _circuit(breaker, f"{self.provider}:{name}")
        """Circuit that refuses requests while the provider fails; None lets all of them through."""
        self._error_bill = check_error_bill(error_bill)
        self._connections = connections

    async def request(self, request: ModelRequest) -> ModelResponse:
        """Send a request and return the complete response."""
        with passing(self.breaker), _sent_once_if_exceeded(request):
            body = self._body(request, streams=False)
            meter = self._meter(request, body)
            client = await self._connections.client()
            try:
                with already_held(), reading(JsonBody(meter)):
                    answered = await self._post(client, body, cast_to=self._library.answer)
            except (ExcessOutput, UnreadableAnswer) as error:
                raise TruncatedResponse(self.name, "", _why(error)) from error
            return self._read(answered.content, meter)

    async def request_stream(self, request: ModelRequest) -> AsyncIterator[str | ToolCall | Usage | ModelResponse]:
        """Send a request and yield text and tool calls as they arrive; the complete response last."""
        with passing(self.breaker), _sent_once_if_exceeded(request):
            body = self._body(request, streams=True)
            meter = self._meter(request, body)
            client = await self._connections.client()
            stream_cls = self._library.stream
            with already_held(), reading(Counted(meter)):
                stream = await self._post(client, body, cast_to=object, stream=True, stream_cls=stream_cls)
            reader = self.format.reader()
            # The client's own stream reader builds an object for every event, which takes four times as long.
            async with (
                aclosing(stream.response) as answered,
                aclosing(self._pieces(answered.aiter_bytes(), reader, meter)) as pieces,
            ):
                async for piece in pieces:
                    yield piece
            whole = reader.whole()
            assert whole is not None, "a stream without an end has raised"
        yield _billed(whole, meter)

    async def _post(self, client: Any, body: dict[str, Any], **how: Any) -> Any:
        try:
            try:
                return await client.post(self.path, body=body, **how)
            except UnicodeEncodeError:
                # A lone surrogate, from a tool, a page or the model itself; nothing was sent.
                return await client.post(self.path, body=_sendable(body), **how)
        except Exception as error:
            mark_bill(error, self._error_bill)
            raise

    async def _pieces(
        self, chunks: AsyncIterator[bytes], reader: StreamReader, meter: Meter
    ) -> AsyncGenerator[str | ToolCall, None]:
        """Yield text and tool calls up to the end of the stream; raise TruncatedResponse if it is incomplete."""
        received: list[str] = []
        try:
            async with aclosing(events(chunks, meter)) as coming:
                async for event in coming:
                    for piece in reader.feed(event):
                        if isinstance(piece, str):
                            received.append(piece)
                        yield piece
                    if reader.is_ended:
                        break
            is_whole = reader.whole() is not None
        except Exception as error:  # from the connection, the provider, or malformed data
            raise TruncatedResponse(self.name, "".join(received), _why(error)) from error
        if not is_whole:
            raise TruncatedResponse(self.name, "".join(received))
        await _drain(chunks)

    def count_input(self, request: ModelRequest) -> int:
        """Return the maximum number of input tokens, including the API's additions."""
        schema = request.settings.output_schema
        around = self.message_tokens * (len(request.messages) + len(request.tools))
        if schema is not None:
            around += bytes_of(json.dumps(schema)) // BYTES_PER_TOKEN
        if request.tools:
            around += self.tools_tokens
        return super().count_input(request) + around

    def _body(self, request: ModelRequest, *, streams: bool) -> dict[str, Any]:
        extra = request.settings.extra
        if taken := sorted(OURS.intersection(extra)):
            raise UnsupportedRequest("extra", taken, "fields that the model does not set itself")
        return {**self.format.body(self.name, request, streams=streams), **extra}

    def _meter(self, request: ModelRequest, body: dict[str, Any]) -> Meter:
        return Meter(Allowance.of(body, self.count_input(request), request.max_output_tokens))

    def _read(self, content: bytes, meter: Meter) -> ModelResponse:
        try:
            answer = json.loads(content)
            meter.check_whole(answer)
            whole = self.format.read(answer)
        except Exception as error:  # from the provider, or malformed data
            raise TruncatedResponse(self.name, "", _why(error)) from error
        if whole is None:
            raise TruncatedResponse(self.name, "")
        whole.raw = answer
        return _billed(whole, meter)


@contextmanager
def _sent_once_if_exceeded(request: ModelRequest) -> Iterator[None]:
    """Do not send the request again if its answer was longer than was paid for: it would be paid for again."""
    try:
        yield
    except TruncatedResponse as error:
        request._is_final = request._is_final or isinstance(error.__cause__, ExcessOutput)
        raise


def _billed(whole: ModelResponse, meter: Meter) -> ModelResponse:
    """Return the response without an implausible usage: the hold is charged, or the received output if larger."""
    if whole.usage is None or not meter.is_plausible(whole.usage):
        whole.usage = meter.worst_case() if meter.is_over else None
    return whole


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not 0 < len(name.strip()) <= MAX_NAME:
        raise InvalidValue("name of the model", name, f"a text of 1 to {MAX_NAME} characters, such as 'gpt-4o'")


def _circuit(breaker: object, name: str) -> CircuitBreaker | None:
    if not isinstance(breaker, CircuitBreaker | bool):
        raise InvalidValue("breaker", breaker, "a CircuitBreaker, or True for the one that is shared")
    if isinstance(breaker, CircuitBreaker):
        return breaker
    return breakers.of(name) if breaker else None


async def _drain(chunks: AsyncIterator[bytes]) -> None:
    """Read the stream to its end, so that the connection can be reused."""
    with suppress(Exception):  # the response is complete, so errors of the connection do not matter
        async with asyncio.timeout(DRAIN_S):
            async for _ in chunks:
                pass


def _sendable(body: dict[str, Any]) -> Any:
    """Return the body with a question mark for every character that UTF-8 cannot encode."""
    return json.loads(json.dumps(body, ensure_ascii=False).encode(errors="replace"))


def _why(error: Exception) -> str:
    message = str(error)[:500]
    return f"because of {type(error).__name__}{f': {message}' if message else ''}"
