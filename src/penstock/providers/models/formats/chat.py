"""OpenAI's Chat Completions API, and compatible servers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from penstock.agents.messages import ContentPart, Media, Message, ToolCall, arguments_json
from penstock.agents.model import FinishReason, ModelRequest, ModelResponse, NamedTool, ToolChoice
from penstock.agents.tools import ToolSpec
from penstock.providers.models.formats.format import (
    COMMON,
    Fields,
    arguments_from,
    cannot_say,
    data_url,
    encoded,
    error_in,
    given,
    is_strict,
    objects,
    text_of,
)
from penstock.runtime.billing.usage import read_usage

SOUNDS: Mapping[str, str] = MappingProxyType({"audio/wav": "wav", "audio/x-wav": "wav", "audio/mpeg": "mp3"})
FINISHES: Mapping[str, FinishReason] = MappingProxyType(
    {
        "stop": "stop",
        "length": "length",
        "tool_calls": "tool_calls",
        "function_call": "tool_calls",
        "content_filter": "content_filter",
    }
)


SAMPLING: Mapping[str, str] = MappingProxyType(
    {
        name: name
        for name in ("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "reasoning_effort")
    }
)
"""Fields of the settings that the body has under the same name."""


@dataclass(frozen=True, slots=True)
class Chat:
    """Chat Completions; `cap` is the field for the output limit: compatible servers know the older name."""

    cap: Literal["max_completion_tokens", "max_tokens"] = "max_completion_tokens"

    @property
    def applies(self) -> frozenset[str]:
        """Names of the fields of `ModelSettings` that the API has."""
        return COMMON | SAMPLING.keys() | {"stop"}

    def body(self, model: str, request: ModelRequest, *, streams: bool) -> dict[str, Any]:
        """Return the JSON body of the request."""
        settings = request.settings
        body: dict[str, Any] = {
            "model": model,
            "messages": _messages(request),
            self.cap: request.max_output_tokens,
        }
        if request.tools:
            body["tools"] = [_tool(spec) for spec in request.tools]
            body |= given(settings, {"parallel_tool_calls": "parallel_tool_calls"})
            if settings.tool_choice is not None:
                body["tool_choice"] = _choice(settings.tool_choice)
        body |= given(settings, SAMPLING)
        if settings.stop:
            body["stop"] = list(settings.stop)
        if settings.output_schema is not None:
            schema = {"name": "answer", "schema": settings.output_schema, "strict": is_strict(settings.output_schema)}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        if streams:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def read(self, answer: Fields) -> ModelResponse | None:
        """Read a response that was not streamed; None if its end marker is missing."""
        choice = next(iter(objects(answer.get("choices"))), {})
        message = choice.get("message") or {}
        calls = [_Begun.of(part, at) for at, part in enumerate(objects(message.get("tool_calls")))]
        reader = ChatReader(
            [_text_in(message.get("content"))],
            text_of(message.get("refusal")),
            calls,
            text_of(choice.get("finish_reason")),
        )
        reader.about = answer
        return reader.whole()

    def reader(self) -> ChatReader:
        """Return a reader for one stream."""
        return ChatReader()


@dataclass(slots=True)
class _Begun:
    """A tool call that may be incomplete."""

    index: int
    id: str
    name: str
    arguments: str

    @classmethod
    def of(cls, part: Fields, at: int) -> _Begun:
        function = part.get("function") or {}
        index = part.get("index")
        written = function.get("arguments")
        arguments = arguments_json(written) if isinstance(written, dict) else text_of(written)
        number = index if isinstance(index, int) else at
        return cls(number, text_of(part.get("id")), text_of(function.get("name")), arguments)

    def call(self) -> ToolCall:
        return ToolCall(self.id or f"call_{self.index}", self.name, arguments_from(self.arguments))


@dataclass(slots=True)
class ChatReader:
    """Reads one stream of chunks."""

    texts: list[str] = field(default_factory=list)
    refusal: str = ""
    begun: list[_Begun] = field(default_factory=list)
    finish: str = ""
    about: Fields = field(default_factory=dict)
    """The event with the metadata of the response: the model, the usage."""

    @property
    def is_ended(self) -> bool:
        """Always False: usage follows the end marker, and the stream's terminator is not an event."""
        return False

    def feed(self, event: Fields) -> Iterable[str | ToolCall]:
        """Yield the text and the complete tool calls that `event` adds."""
        if (failure := error_in(event)) is not None:
            raise failure
        if event.get("usage") is not None or not self.about:
            self.about = event
        for choice in objects(event.get("choices"))[:1]:
            delta = choice.get("delta") or {}
            if text := _text_in(delta.get("content")):
                self.texts.append(text)
                yield text
            self.refusal += text_of(delta.get("refusal"))
            for part in objects(delta.get("tool_calls")):
                yield from self._piece(part)
            if choice.get("finish_reason") and not self.finish:
                self.finish = text_of(choice["finish_reason"])
                yield from (call.call() for call in self.begun[-1:])

    def whole(self) -> ModelResponse | None:
        """Return the complete response; None until its end marker has arrived."""
        if not self.finish:
            return None
        text = "".join(self.texts) or self.refusal
        calls = tuple(call.call() for call in self.begun)
        reason: FinishReason = "content_filter" if self.refusal else FINISHES.get(self.finish, "stop")
        if calls and reason == "stop":
            reason = "tool_calls"  # some servers report "stop" together with tool calls
        usage = read_usage(self.about)
        return ModelResponse(text, calls, usage, reason, text_of(self.about.get("model")) or None)

    def _piece(self, part: Fields) -> Iterable[ToolCall]:
        """Add one piece of a tool call; yield the previous call, then complete, when a new one begins."""
        last = self.begun[-1] if self.begun else None
        at = 0 if last is None else last.index + 1 if part.get("id") else last.index
        piece = _Begun.of(part, at)
        if last is not None and piece.index == last.index and piece.id in ("", last.id):
            last.arguments += piece.arguments
            return
        if last is not None:
            yield last.call()
        self.begun.append(piece)


def _text_in(content: Any) -> str:
    """Return the text of a response; some servers send it in parts, some of which are the model's thinking."""
    return text_of(content) or "".join(text_of(part.get("text")) for part in objects(content))


def _messages(request: ModelRequest) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": request.instructions}] if request.instructions else []
    return [*system, *map(_message, request.messages)]


def _message(message: Message) -> dict[str, Any]:
    if message.role == "tool":
        return {"role": "tool", "tool_call_id": message.tool_call_id, "content": message.text}
    content = message.content if isinstance(message.content, str) else [_part(part) for part in message.content]
    item: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        item["content"] = content or None
        item["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": arguments_json(call.arguments)},
            }
            for call in message.tool_calls
        ]
    return item


def _part(part: ContentPart) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if part.media_type.startswith("image/"):
        return {"type": "image_url", "image_url": {"url": data_url(part)}}
    if part.data is not None and part.media_type in SOUNDS:
        return {"type": "input_audio", "input_audio": {"data": encoded(part), "format": SOUNDS[part.media_type]}}
    if part.data is not None and part.media_type == "application/pdf":
        return {"type": "file", "file": {"filename": "file.pdf", "file_data": data_url(part)}}
    raise _unknown(part)


def _unknown(part: Media) -> Exception:
    return cannot_say(part, "Chat Completions", "pictures; wav, mp3 and PDF by their bytes")


def _choice(choice: ToolChoice) -> str | dict[str, Any]:
    return {"type": "function", "function": {"name": choice.name}} if isinstance(choice, NamedTool) else choice


def _tool(spec: ToolSpec) -> dict[str, Any]:
    function = {"name": spec.name, "description": spec.description, "parameters": spec.parameters}
    return {"type": "function", "function": function}
