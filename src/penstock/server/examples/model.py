"""A model for trying things out: no key, no network, the same answer each time.

It has no knowledge. It repeats the user's message, counts on request (“count to 100”), and calls a tool that the
message names. It answers at a limited speed and has a price, so that streaming and cost accounting can be observed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

from penstock.agents.messages import Message, ToolCall
from penstock.agents.model import FinishReason, Model, ModelRequest, ModelResponse
from penstock.nodes.parts.chat import GO_ON
from penstock.runtime.billing.prices import Price
from penstock.runtime.billing.usage import Usage

EXAMPLE_PRICE = Price("0.15", "0.60")
"""US dollars per million tokens, as for a small model. Cost holds for its calls need this price in the price book."""

MAX_COUNT = 1_000
SHOWN_CHARACTERS = 200
COUNT_TO = re.compile(r"\bcount(?:\s+\w+)?\s+to\s+(\d{1,6})\b", re.IGNORECASE)


class ExampleModel(Model):
    """The built-in model; `words_per_second` is its output speed, 0 for no delay."""

    def __init__(self, name: str = "example", *, words_per_second: float = 25.0) -> None:
        super().__init__(name)
        self._pause_s = 1 / words_per_second if words_per_second else 0.0

    async def request(self, request: ModelRequest) -> ModelResponse:
        """Return the whole answer, after the time that streaming it would take."""
        response = self._answer(request)
        await asyncio.sleep(self._pause_s * len(response.text.split()))
        return response

    async def request_stream(self, request: ModelRequest) -> AsyncIterator[str | ToolCall | Usage | ModelResponse]:
        """Stream the answer word by word, with the usage so far after each word in case the stream is cut off."""
        response = self._answer(request)
        for count, word in enumerate(re.findall(r"\S+\s*", response.text), 1):
            await asyncio.sleep(self._pause_s)
            yield word
            yield self._usage(request, count)
        for call in response.tool_calls:
            yield call
        yield response

    def _answer(self, request: ModelRequest) -> ModelResponse:
        call = _wanted_tool(request)
        text = "" if call is not None else _reply(request)
        words = re.findall(r"\S+\s*", text)
        limit = max(request.max_output_tokens, 1)
        cut = len(words) > limit
        text = "".join(words[:limit])
        calls = () if call is None else (call,)
        finish: FinishReason = "tool_calls" if calls else "length" if cut else "stop"
        return ModelResponse(text, calls, self._usage(request, min(len(words), limit)), finish, self.name)

    def _usage(self, request: ModelRequest, words: int) -> Usage:
        tokens_in, tokens_out = self.count_input(request), max(words, 1)
        cost_nanos = EXAMPLE_PRICE.cost_nanos(Usage(tokens_in, tokens_out))
        return Usage(tokens_in, tokens_out, model=self.name, cost_nanos=cost_nanos)


def _wanted_tool(request: ModelRequest) -> ToolCall | None:
    """Return a call of the tool named in the last user message; None if a tool result follows that message."""
    messages = list(request.messages)
    last_user = next((at for at in range(len(messages) - 1, -1, -1) if messages[at].role == "user"), None)
    if last_user is None or any(message.role == "tool" for message in messages[last_user:]):
        return None
    text = _text(messages[last_user])
    for tool in request.tools:
        if re.search(rf"\b{re.escape(tool.name)}\b", text):
            takes = tool.parameters.get("properties", {})
            first = next((name for name, about in takes.items() if about.get("type", "string") == "string"), None)
            return ToolCall(f"call-{len(messages)}", tool.name, {} if first is None else {first: text})
    return None


def _reply(request: ModelRequest) -> str:
    messages = list(request.messages)
    last = messages[-1] if messages else Message.user("")
    if last.role == "tool":
        return f"The tool {last.name or 'it'} says: {_shortened(_text(last))}"
    if last.role == "assistant":
        return _rest(messages)
    text = _text(last)
    if text == GO_ON:
        return _rest(messages[:-1])
    if end := _requested_count(text):
        return _counted(1, end)
    before = sum(message.role == "user" for message in messages) - 1
    earlier = f" It is message {before + 1} of our conversation." if before > 0 else ""
    return (
        f"You wrote: “{_shortened(text)}”.{earlier} I am the example model, and know nothing; "
        "name another model in the graph, or tell me how far to count."
    )


def _rest(messages: list[Message]) -> str:
    """Continue the last answer: the remaining numbers, if it was counting."""
    numbers = re.findall(r"\d+", _last_text(messages, "assistant"))
    end = _requested_count(_last_text(messages, "user"))
    if end and numbers and int(numbers[-1]) < end:
        return _counted(int(numbers[-1]) + 1, end)
    return "… and that is where I had stopped; there is no more to it."


def _last_text(messages: list[Message], role: str) -> str:
    return next((_text(message) for message in reversed(messages) if message.role == role), "")


def _requested_count(text: str) -> int:
    """Return the number to count to; 0 if the text does not request counting."""
    match = COUNT_TO.search(text)
    return min(int(match[1]), MAX_COUNT) if match else 0


def _counted(first: int, last: int) -> str:
    return ", ".join(map(str, range(first, last + 1))) + "."


def _text(message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    return " ".join(part for part in message.content if isinstance(part, str))


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
