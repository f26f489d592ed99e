"""OpenAI's Responses API, used statelessly: every request has the whole conversation, nothing is stored.

Our messages cannot represent a model's reasoning items, so these are not sent back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from penstock.agents.messages import ContentPart, Message, ToolCall, arguments_json
from penstock.agents.model import FinishReason, ModelRequest, ModelResponse, NamedTool
from penstock.agents.tools import ToolSpec
from penstock.providers.models.formats.format import (
    COMMON,
    Fields,
    StreamError,
    UnsupportedRequest,
    arguments_from,
    cannot_say,
    data_url,
    error_in,
    given,
    is_strict,
    objects,
    text_of,
)
from penstock.runtime.billing.usage import read_usage

ENDS = ("response.completed", "response.incomplete", "response.failed")


@dataclass(frozen=True, slots=True)
class Responses:
    """The Responses API."""

    @property
    def applies(self) -> frozenset[str]:
        """Names of the fields of `ModelSettings` that the API has."""
        return COMMON | {"reasoning_effort"}

    def body(self, model: str, request: ModelRequest, *, streams: bool) -> dict[str, Any]:
        """Return the JSON body of the request."""
        settings = request.settings
        if settings.stop:
            raise UnsupportedRequest("stop", settings.stop, "empty: the Responses API has no stop sequences")
        for name in ("seed", "presence_penalty", "frequency_penalty"):
            if (value := getattr(settings, name)) is not None:
                raise UnsupportedRequest(name, value, f"omitted: the Responses API has no {name}")
        body: dict[str, Any] = {
            "model": model,
            "input": [item for message in request.messages for item in _items(message)],
            "max_output_tokens": request.max_output_tokens,
            "store": False,
        }
        if request.instructions:
            body["instructions"] = request.instructions
        if request.tools:
            body["tools"] = [_tool(spec) for spec in request.tools]
            body |= given(settings, {"parallel_tool_calls": "parallel_tool_calls"})
            if (choice := settings.tool_choice) is not None:
                named = {"type": "function", "name": choice.name} if isinstance(choice, NamedTool) else None
                body["tool_choice"] = named or choice
        body |= given(settings, {"temperature": "temperature", "top_p": "top_p"})
        if settings.reasoning_effort is not None:
            body["reasoning"] = {"effort": settings.reasoning_effort}
        if (schema := settings.output_schema) is not None:
            body["text"] = {
                "format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": is_strict(schema)}
            }
        if streams:
            body["stream"] = True
        return body

    def read(self, answer: Fields) -> ModelResponse | None:
        """Read a response that was not streamed; None if its end marker is missing."""
        status = answer.get("status")
        if status == "failed":
            raise error_in(answer) or StreamError("the response failed")
        if status not in ("completed", "incomplete"):
            return None
        parts = [part for item in objects(answer.get("output")) for part in objects(item.get("content"))]
        refusal = "".join(text_of(part.get("refusal")) for part in parts)
        text = "".join(text_of(part.get("text")) for part in parts if part.get("type") == "output_text") or refusal
        calls = tuple(_call(item) for item in objects(answer.get("output")) if item.get("type") == "function_call")
        usage = read_usage(answer)
        reason = "content_filter" if refusal else _finish(answer, bool(calls))
        return ModelResponse(text, calls, usage, reason, text_of(answer.get("model")) or None)

    def reader(self) -> ResponsesReader:
        """Return a reader for one stream."""
        return ResponsesReader(self)


@dataclass(slots=True)
class ResponsesReader:
    """Reads one stream of events, the last of which has the complete response."""

    api: Responses
    answer: Fields | None = None
    given: list[str | ToolCall] = field(default_factory=list)

    @property
    def is_ended(self) -> bool:
        """Whether the last event has arrived."""
        return self.answer is not None

    def feed(self, event: Fields) -> Iterable[str | ToolCall]:
        """Yield the text and the complete tool calls that `event` adds."""
        kind = event.get("type")
        if kind == "response.output_text.delta" and (text := text_of(event.get("delta"))):
            self.given.append(text)
            yield text
        elif kind == "response.output_item.done" and (event.get("item") or {}).get("type") == "function_call":
            call = _call(event["item"])
            self.given.append(call)
            yield call
        elif kind in ENDS:
            self.answer = event.get("response") or {}
        elif kind == "error":
            raise error_in(event) or StreamError(text_of(event.get("message")) or "an error without a message")

    def whole(self) -> ModelResponse | None:
        """Return the complete response; None until its end marker has arrived."""
        found = None if self.answer is None else self.api.read(self.answer)
        if found is not None and not found.text and not found.tool_calls:
            # A server may omit from the last event the items it has sent before.
            found.text = "".join(one for one in self.given if isinstance(one, str))
            found.tool_calls = tuple(one for one in self.given if isinstance(one, ToolCall))
        return found


def _items(message: Message) -> Iterator[dict[str, Any]]:
    if message.role == "tool":
        yield {"type": "function_call_output", "call_id": message.tool_call_id, "output": message.text}
        return
    if message.content or not message.tool_calls:
        content = message.content if isinstance(message.content, str) else [_part(part) for part in message.content]
        yield {"role": message.role, "content": content}
    for call in message.tool_calls:
        yield {
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": arguments_json(call.arguments),
        }


def _part(part: ContentPart) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "input_text", "text": part}
    if part.media_type.startswith("image/"):
        return {"type": "input_image", "image_url": data_url(part)}
    if part.media_type == "application/pdf":
        if part.url is not None:
            return {"type": "input_file", "file_url": part.url}
        return {"type": "input_file", "filename": "file.pdf", "file_data": data_url(part)}
    raise cannot_say(part, "the Responses API", "pictures and PDF")


def _tool(spec: ToolSpec) -> dict[str, Any]:
    tool = {"type": "function", "name": spec.name, "description": spec.description, "parameters": spec.parameters}
    return {**tool, "strict": False}  # the default of Chat Completions, but not of Responses


def _call(item: Fields) -> ToolCall:
    identity = text_of(item.get("call_id")) or text_of(item.get("id"))
    return ToolCall(identity, text_of(item.get("name")), arguments_from(text_of(item.get("arguments"))))


def _finish(answer: Fields, has_calls: bool) -> FinishReason:
    if answer.get("status") == "incomplete":
        reason = (answer.get("incomplete_details") or {}).get("reason")
        return "content_filter" if reason == "content_filter" else "length"
    return "tool_calls" if has_calls else "stop"
