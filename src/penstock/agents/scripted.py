"""A model with scripted answers, for tests, examples and benchmarks.

It needs no network, is charged by the run's price table, and can fail or break off as scripted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from inspect import isawaitable
from typing import Any

from penstock.agents.messages import ToolCall
from penstock.agents.model import Model, ModelRequest, ModelResponse, ModelSettings
from penstock.errors import InvalidValue, PenstockError
from penstock.runtime.billing.usage import Usage

Reply = str | ToolCall | Sequence[ToolCall] | ModelResponse | BaseException
"""Text, tool calls, a whole response, or an error to raise."""

BYTES_PER_OUTPUT_TOKEN = 4


class ScriptEnded(PenstockError):
    """A scripted model got more requests than its script has replies."""


class ScriptedModel(Model):
    """A model whose replies are a list, or the results of a function of the request."""

    applies = frozenset(field.name for field in fields(ModelSettings))
    """All of them: the function gets the settings with the request, and a list is a choice of its own."""

    def __init__(
        self,
        replies: Iterable[Reply] | Callable[[ModelRequest], Any],
        *,
        name: str = "scripted",
        usage: Usage | None = None,
        latency_s: float = 0.0,
        piece_characters: int = 16,
        breaks_off_after: int | None = None,
    ) -> None:
        super().__init__(name)
        if isinstance(replies, str):
            raise InvalidValue("replies", replies, f"a list, such as [{replies!r}], or a function")
        self._answer = replies if callable(replies) else _one_by_one(iter(replies))
        self.usage = usage
        """Usage that every reply reports; None estimates it from the request and the reply."""
        self.latency_s = latency_s
        self.piece_characters = piece_characters
        """Length of the pieces of a streamed text."""
        self.breaks_off_after = breaks_off_after
        """Number of pieces after which a stream breaks off; None for never."""
        self.calls = 0
        self.last_request: ModelRequest | None = None

    async def request(self, request: ModelRequest) -> ModelResponse:
        """Return the next reply."""
        self.calls += 1
        self.last_request = request
        if self.latency_s:
            await asyncio.sleep(self.latency_s)
        reply = self._answer(request)
        if type(reply) is ModelResponse:
            return reply
        if isawaitable(reply):
            reply = await reply
        return self._response(request, reply)

    async def request_stream(self, request: ModelRequest) -> AsyncIterator[str | ToolCall | Usage | ModelResponse]:
        """Yield the next reply in pieces, and let other tasks run between them."""
        response = await self.request(request)
        size, text = self.piece_characters, response.text
        pieces: list[str | ToolCall] = [text[at : at + size] for at in range(0, len(text), size)]
        for number, piece in enumerate([*pieces, *response.tool_calls]):
            if number == self.breaks_off_after:
                return
            yield piece
            await asyncio.sleep(0)
        if self.breaks_off_after is None:
            yield response

    def _response(self, request: ModelRequest, reply: Any) -> ModelResponse:
        if isinstance(reply, BaseException):
            raise reply
        if isinstance(reply, ModelResponse):
            return reply
        text = reply if isinstance(reply, str) else ""
        calls: tuple[ToolCall, ...] = ()
        if not isinstance(reply, str):
            calls = (reply,) if isinstance(reply, ToolCall) else tuple(reply)
        usage = self.usage or self._counted(request, text, calls)
        return ModelResponse(text, calls, usage, "tool_calls" if calls else "stop", self.name)

    def _counted(self, request: ModelRequest, text: str, calls: Sequence[ToolCall]) -> Usage:
        size = len(text) + sum(len(call.name) + len(str(call.arguments)) for call in calls)
        output = min(size // BYTES_PER_OUTPUT_TOKEN + 1, request.max_output_tokens)
        return Usage(self.count_input(request), output)


def _one_by_one(replies: Iterator[Reply]) -> Callable[[ModelRequest], Reply]:
    def answer(request: ModelRequest) -> Reply:
        try:
            return next(replies)
        except StopIteration:
            raise ScriptEnded("the script has no more replies: add one for every request") from None

    return answer
