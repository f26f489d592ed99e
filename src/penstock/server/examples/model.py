"""A model for trying things out: no key, no network, the same answer each time.

It knows nothing. It says what it was asked, counts when it is told to (“count to 100”), and asks for a tool whose name
it is told. It takes its time, as models do, and has a price, so that streams stream and meters move.
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
"""As a small model of the day costs, for a million tokens. A price book has to be told, for its calls to be held."""

MAX_COUNT = 1_000
SHOWN_CHARACTERS = 200
COUNT_TO = re.compile(r"\bcount(?:\s+\w+)?\s+to\s+(\d{1,6})\b", re.IGNORECASE)


class ExampleModel(Model):
    """The built-in model; `words_per_second` is how fast it speaks, 0 as fast as it can."""

    def __init__(self, name: str = "example", *, words_per_second: float = 25.0) -> None:
        super().__init__(name)
        self._pause_s = 1 / words_per_second if words_per_second else 0.0

    async def request(self, request: ModelRequest) -> ModelResponse:
        """The whole answer, after the time it takes to say it."""
        response = self._answer(request)
        await asyncio.sleep(self._pause_s * len(response.text.split()))
        return response

    async def request_stream(self, request: ModelRequest) -> AsyncIterator[str | ToolCall | Usage | ModelResponse]:
        """The answer, word by word; what it has cost so far goes with it, for a stream that is cut off."""
        response = self._answer(request)
        for said, word in enumerate(re.findall(r"\S+\s*", response.text), 1):
            await asyncio.sleep(self._pause_s)
            yield word
            yield self._usage(request, said)
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
        given, said = self.count_input(request), max(words, 1)
        return Usage(given, said, model=self.name, cost_nanos=EXAMPLE_PRICE.cost_nanos(Usage(given, said)))


def _wanted_tool(request: ModelRequest) -> ToolCall | None:
    """A call of the tool that the user names, unless it was called since."""
    messages = list(request.messages)
    asked = next((at for at in range(len(messages) - 1, -1, -1) if messages[at].role == "user"), None)
    if asked is None or any(message.role == "tool" for message in messages[asked:]):
        return None
    text = _text(messages[asked])
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
    if end := _count_asked_for(text):
        return _counted(1, end)
    before = sum(message.role == "user" for message in messages) - 1
    earlier = f" It is message {before + 1} of our conversation." if before > 0 else ""
    return (
        f"You said: “{_shortened(text)}”.{earlier} I am the example model, and know nothing; "
        "name another model in the graph, or tell me how far to count."
    )


def _rest(messages: list[Message]) -> str:
    """More of the last answer: the numbers that it did not come to, if it was counting."""
    asked = next((_text(one) for one in reversed(messages) if one.role == "user"), "")
    said = re.findall(r"\d+", next((_text(one) for one in reversed(messages) if one.role == "assistant"), ""))
    end = _count_asked_for(asked)
    if end and said and int(said[-1]) < end:
        return _counted(int(said[-1]) + 1, end)
    return "… and that is where I had stopped; there is no more to it."


def _count_asked_for(text: str) -> int:
    """How far to count; 0 if nobody wants it."""
    asked = COUNT_TO.search(text)
    return min(int(asked[1]), MAX_COUNT) if asked else 0


def _counted(first: int, last: int) -> str:
    return ", ".join(map(str, range(first, last + 1))) + "."


def _text(message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    return " ".join(part for part in message.content if isinstance(part, str))


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
