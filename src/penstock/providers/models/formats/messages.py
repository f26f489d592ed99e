"""Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from penstock.agents.messages import ContentPart, Message, ToolCall
from penstock.agents.model import FinishReason, ModelRequest, ModelResponse, ModelSettings, NamedTool
from penstock.agents.tools import ToolSpec
from penstock.providers.models.formats.format import (
    COMMON,
    Fields,
    UnsupportedRequest,
    arguments_from,
    cannot_say,
    encoded,
    error_in,
    given,
    objects,
    text_of,
)
from penstock.runtime.billing.usage import read_usage

FINISHES: Mapping[str, FinishReason] = MappingProxyType(
    {
        "end_turn": "stop",
        "stop_sequence": "stop",
        "max_tokens": "length",
        "model_context_window_exceeded": "length",
        "tool_use": "tool_calls",
        "refusal": "content_filter",
    }
)


@dataclass(frozen=True, slots=True)
class Messages:
    """The Messages API."""

    @property
    def applies(self) -> frozenset[str]:
        """Names of the fields of `ModelSettings` that the API has."""
        return COMMON | {"stop"}

    def body(self, model: str, request: ModelRequest, *, streams: bool) -> dict[str, Any]:
        """Return the JSON body of the request."""
        settings = request.settings
        body: dict[str, Any] = {
            "model": model,
            "messages": _turns(request.messages),
            "max_tokens": request.max_output_tokens,
        }
        texts = [request.instructions, *(message.text for message in request.messages if message.role == "system")]
        if system := "\n\n".join(filter(None, texts)):
            body["system"] = system
        if request.tools:
            body["tools"] = [_tool(spec) for spec in request.tools]
            if (choice := _choice(settings)) is not None:
                body["tool_choice"] = choice
        for name in ("seed", "presence_penalty", "frequency_penalty", "reasoning_effort"):
            if (value := getattr(settings, name)) is not None:
                raise UnsupportedRequest(name, value, f"omitted: the Messages API has no {name}")
        body |= given(settings, {"temperature": "temperature", "top_p": "top_p"})
        if settings.stop:
            body["stop_sequences"] = list(settings.stop)
        if settings.output_schema is not None:
            body["output_config"] = {"format": {"type": "json_schema", "schema": settings.output_schema}}
        if streams:
            body["stream"] = True
        return body

    def read(self, answer: Fields) -> ModelResponse | None:
        """Read a response that was not streamed; None if its end marker is missing."""
        blocks = objects(answer.get("content"))
        text = "".join(text_of(block.get("text")) for block in blocks if block.get("type") == "text")
        calls = [_call(block, block.get("input")) for block in blocks if block.get("type") == "tool_use"]
        return _response(answer, text, tuple(calls), text_of(answer.get("stop_reason")))

    def reader(self) -> MessagesReader:
        """Return a reader for one stream."""
        return MessagesReader()


@dataclass(slots=True)
class MessagesReader:
    """Reads one stream of events."""

    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    finish: str = ""
    is_ended: bool = False
    model: Any = None
    counts: dict[str, Any] = field(default_factory=dict)
    open_tools: dict[Any, tuple[Fields, list[str]]] = field(default_factory=dict)
    """Tool calls whose arguments are incomplete, by block index."""

    def feed(self, event: Fields) -> Iterable[str | ToolCall]:
        """Yield the text and the complete tool calls that `event` adds."""
        match event.get("type"):
            case "content_block_delta":
                yield from self._piece(event.get("index"), event.get("delta") or {})
            case "content_block_start":
                yield from self._begin(event.get("index"), event.get("content_block") or {})
            case "content_block_stop" if event.get("index") in self.open_tools:
                block, pieces = self.open_tools.pop(event.get("index"))
                self.calls.append(_call(block, "".join(pieces) or block.get("input")))
                yield self.calls[-1]
            case "message_start":
                begun = event.get("message") or {}
                self.model = begun.get("model")
                self._count(begun.get("usage"))
            case "message_delta":
                self._count(event.get("usage"))
                self.finish = text_of((event.get("delta") or {}).get("stop_reason")) or self.finish
            case "message_stop":
                self.is_ended = True
            case _:
                if (failure := error_in(event)) is not None:
                    raise failure

    def whole(self) -> ModelResponse | None:
        """Return the complete response; None until its end marker has arrived."""
        answer = {"model": self.model, "usage": self.counts or None}
        return _response(answer, "".join(self.texts), tuple(self.calls), self.finish)

    def _begin(self, index: Any, block: Fields) -> Iterator[str]:
        if block.get("type") == "tool_use":
            self.open_tools[index] = (block, [])
        elif block.get("type") == "text" and (text := text_of(block.get("text"))):
            self.texts.append(text)
            yield text

    def _piece(self, index: Any, delta: Fields) -> Iterator[str]:
        if text := text_of(delta.get("text")):
            self.texts.append(text)
            yield text
        elif index in self.open_tools:
            self.open_tools[index][1].append(text_of(delta.get("partial_json")))

    def _count(self, counts: Any) -> None:
        """Merge a usage report: a later count of the same kind is the new total."""
        if isinstance(counts, dict):
            self.counts |= {name: count for name, count in counts.items() if count is not None}


def _response(answer: Fields, text: str, calls: tuple[ToolCall, ...], finish: str) -> ModelResponse | None:
    if not finish:
        return None
    usage = read_usage(answer)
    return ModelResponse(text, calls, usage, FINISHES.get(finish, "stop"), text_of(answer.get("model")) or None)


def _call(block: Fields, written: Any) -> ToolCall:
    arguments = arguments_from(written) if isinstance(written, str) else written if isinstance(written, dict) else {}
    return ToolCall(text_of(block.get("id")), text_of(block.get("name")), arguments)


def _turns(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Return the conversation in turns: tool results have the user role, all results of a turn in one message."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        if message.role == "system":
            continue
        role = "assistant" if message.role == "assistant" else "user"
        blocks = list(_blocks(message))
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        elif blocks:
            turns.append({"role": role, "content": blocks})
    return turns


def _blocks(message: Message) -> Iterator[dict[str, Any]]:
    if message.role == "tool":
        yield {"type": "tool_result", "tool_use_id": message.tool_call_id, "content": message.text}
        return
    parts = (message.content,) if isinstance(message.content, str) else message.content
    yield from (_part(part) for part in parts if part)  # the API refuses empty text
    for call in message.tool_calls:
        arguments = {"arguments": call.arguments} if isinstance(call.arguments, str) else dict(call.arguments)
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _part(part: ContentPart) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    source = {"type": "base64", "media_type": part.media_type, "data": encoded(part)}
    if part.url is not None:
        source = {"type": "url", "url": part.url}
    if part.media_type.startswith("image/"):
        return {"type": "image", "source": source}
    if part.media_type == "application/pdf":
        return {"type": "document", "source": source}
    raise cannot_say(part, "the Messages API", "pictures and PDF")


def _choice(settings: ModelSettings) -> dict[str, Any] | None:
    """Return the tool choice, which in this API also determines whether one answer may call several tools."""
    choice, parallel = settings.tool_choice, settings.parallel_tool_calls
    if choice is None and parallel is None:
        return None
    if isinstance(choice, NamedTool):
        written: dict[str, Any] = {"type": "tool", "name": choice.name}
    else:
        written = {"type": "any" if choice == "required" else choice or "auto"}
    if parallel is not None and choice != "none":
        written["disable_parallel_tool_use"] = not parallel
    return written


def _tool(spec: ToolSpec) -> dict[str, Any]:
    return {"name": spec.name, "description": spec.description, "input_schema": spec.parameters}
