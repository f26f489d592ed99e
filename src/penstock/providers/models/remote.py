"""A model behind an API, reached through the provider's own client.

The client keeps connections, signs requests and makes errors of bad statuses, with its own retries off: the door
retries. What is sent and what comes back is written and read by a format. Whether a call may be made, what it holds
and what it costs is the business of `Model` and the door behind it.

An answer is whole when the provider's mark of its end has come; without it, it is a TruncatedResponse. What a stream
used is told only with its end: what is said on the way is less than what is billed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from penstock.agents.messages import ToolCall, bytes_of
from penstock.agents.model import BYTES_PER_TOKEN, Model, ModelRequest, ModelResponse, TruncatedResponse
from penstock.containment.breaker import CircuitBreaker
from penstock.errors import InvalidValue
from penstock.providers.models.breakers import breakers, passing
from penstock.providers.models.connections import Borrowed, Connections
from penstock.providers.models.events import events
from penstock.providers.models.formats.format import CannotAsk, Format, StreamReader
from penstock.providers.scope import already_held
from penstock.runtime.billing.usage import MAX_NAME, Usage
from penstock.runtime.options import must_be_at_least

DRAIN_S = 0.05
"""So long a server may take to close a stream that it has ended; then the connection is not used again."""

OURS = frozenset(
    {
        *("model", "messages", "input", "system", "instructions", "tools", "stream", "stream_options"),
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of"),
    }
)
"""Fields that settings may not set beside ours: what a call may cost hangs on them."""


@dataclass(frozen=True, slots=True)
class Library:
    """The classes of a provider's client that its `post` has to be told of."""

    answer: Any
    """What is returned as it came."""
    stream: Any


class RemoteModel(Model):
    """A model behind an API; made by `model("openai:gpt-4o")` and by the classes for each provider."""

    provider = ""
    """As the name of its circuit begins."""
    path = ""
    """Where requests go, below the client's base URL."""
    message_tokens = 32
    """What a message, or a tool call with its result, has around its text: ids, names, marks."""
    tools_tokens = 0
    """What the provider adds to the input of a request that has tools."""

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
    ) -> None:
        _check_name(name)
        must_be_at_least(1, "max_output_tokens", max_output_tokens)
        must_be_at_least(1, "floor", floor)
        must_be_at_least(0, "retries", retries)
        super().__init__(name)
        self.format = format
        self._library = library
        self.max_output_tokens = max_output_tokens
        self.floor = floor
        self.retries = retries
        self.breaker = _circuit(breaker, f"{self.provider}:{name}")
        """What refuses requests while the provider fails; None lets all of them through."""
        self._connections = connections

    async def request(self, request: ModelRequest) -> ModelResponse:
        """Ask, and wait for the whole answer."""
        with passing(self.breaker):
            body = self._body(request, streams=False)
            client = await self._connections.client()
            with already_held():
                answered = await self._post(client, body, cast_to=self._library.answer)
            return self._read(answered.content)

    async def request_stream(self, request: ModelRequest) -> AsyncIterator[str | ToolCall | Usage | ModelResponse]:
        """Ask, and give text and tool calls as they come; the whole last."""
        with passing(self.breaker):
            body = self._body(request, streams=True)
            client = await self._connections.client()
            stream_cls = self._library.stream
            with already_held():
                stream = await self._post(client, body, cast_to=object, stream=True, stream_cls=stream_cls)
            reader = self.format.reader()
            # The client's own way of reading a stream makes an object of every event, which takes four times as long.
            async with (
                aclosing(stream.response) as answered,
                aclosing(self._pieces(answered.aiter_bytes(), reader)) as pieces,
            ):
                async for piece in pieces:
                    yield piece
            whole = reader.whole()
            assert whole is not None, "what has no end was raised"
        yield whole

    async def _post(self, client: Any, body: dict[str, Any], **how: Any) -> Any:
        try:
            return await client.post(self.path, body=body, **how)
        except UnicodeEncodeError:
            # Half of a pair of surrogates, from a tool, a page or the model itself; nothing was sent.
            return await client.post(self.path, body=_sendable(body), **how)

    async def _pieces(self, chunks: AsyncIterator[bytes], reader: StreamReader) -> AsyncGenerator[str | ToolCall, None]:
        """What comes, to the very end; or raise TruncatedResponse."""
        received: list[str] = []
        try:
            async with aclosing(events(chunks)) as coming:
                async for event in coming:
                    for piece in reader.feed(event):
                        if isinstance(piece, str):
                            received.append(piece)
                        yield piece
                    if reader.is_ended:
                        break
            is_whole = reader.whole() is not None
        except Exception as error:  # of the connection, of the provider, or of what it sent
            raise TruncatedResponse(self.name, "".join(received), _why(error)) from error
        if not is_whole:
            raise TruncatedResponse(self.name, "".join(received))
        await _drain(chunks)

    def count_input(self, request: ModelRequest) -> int:
        """The most tokens the input can have, with what the API puts around it."""
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
            raise CannotAsk("extra", taken, "fields that the model does not set itself")
        return {**self.format.body(self.name, request, streams=streams), **extra}

    def _read(self, content: bytes) -> ModelResponse:
        try:
            answer = json.loads(content)
            whole = self.format.read(answer)
        except Exception as error:  # of the provider, or of what it sent
            raise TruncatedResponse(self.name, "", _why(error)) from error
        if whole is None:
            raise TruncatedResponse(self.name, "")
        whole.raw = answer
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
    """Read to the very end, so that the connection can be used again."""
    with suppress(Exception):  # the answer is whole, whatever becomes of the connection
        async with asyncio.timeout(DRAIN_S):
            async for _ in chunks:
                pass


def _sendable(body: dict[str, Any]) -> Any:
    """The same with a question mark for every character that UTF-8 has no bytes for."""
    return json.loads(json.dumps(body, ensure_ascii=False).encode(errors="replace"))


def _why(error: Exception) -> str:
    told = str(error)[:500]
    return f"because of {type(error).__name__}{f': {told}' if told else ''}"
