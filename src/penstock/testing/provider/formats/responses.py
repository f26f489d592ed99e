"""OpenAI's Responses."""

from __future__ import annotations

from itertools import count
from typing import Any

from penstock.testing.provider.fates import ToolCall
from penstock.testing.provider.formats.format import (
    Fields,
    Format,
    Stream,
    common_problem,
    event,
    openai_error,
    openai_headers,
)
from penstock.testing.provider.generation import Generation


def _problem(fields: Fields) -> str | None:
    given = fields.get("input")
    if not isinstance(given, str | list) or not given:
        return "input: a text or a list of at least one item is needed"
    return common_problem(fields)


def _plain(generation: Generation) -> dict[str, Any]:
    status = "incomplete" if generation.cut_short else "completed"
    reason = {"reason": "max_output_tokens"} if generation.cut_short else None
    answer = {**_response(generation, status, _output(generation)), "incomplete_details": reason}
    return answer if generation.usage is None else {**answer, "usage": _usage(*generation.usage)}


def _stream(generation: Generation) -> Stream:
    writer = _Events(generation)
    opening = writer.opening()
    pieces = (*writer.texts(), *writer.calls())
    return Stream(opening, pieces, writer.ending())


class _Events:
    """The events of one stream; each carries the next number of the sequence."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._numbers = count()
        self._has_text = bool(generation.text or not generation.tool_calls)

    def opening(self) -> bytes:
        started = _response(self._generation, "in_progress", [])
        opening = self._event("response.created", response=started)
        opening += self._event("response.in_progress", response=started)
        if not self._has_text:
            return opening
        item = {**_message(self._generation), "status": "in_progress", "content": []}
        opening += self._event("response.output_item.added", output_index=0, item=item)
        opening += self._event("response.content_part.added", **self._place, part=_text_part(""))
        return opening if self._generation.text else opening + self._text_done()

    def texts(self) -> list[bytes]:
        deltas = [
            self._event("response.output_text.delta", **self._place, delta=piece, logprobs=[])
            for piece in self._generation.pieces
        ]
        if deltas:
            deltas[-1] += self._text_done()
        return deltas

    def calls(self) -> list[bytes]:
        return [self._call(index, call) for index, call in enumerate(self._generation.tool_calls, int(self._has_text))]

    def ending(self) -> bytes:
        whole = _plain(self._generation)
        return self._event(f"response.{whole['status']}", response=whole)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": _message_id(self._generation), "output_index": 0, "content_index": 0}

    def _text_done(self) -> bytes:
        text = self._generation.text
        done = self._event("response.output_text.done", **self._place, text=text, logprobs=[])
        done += self._event("response.content_part.done", **self._place, part=_text_part(text))
        return done + self._event("response.output_item.done", output_index=0, item=_message(self._generation))

    def _call(self, index: int, call: ToolCall) -> bytes:
        item = _function_call(call)
        place = {"item_id": item["id"], "output_index": index}
        begun = {**item, "status": "in_progress", "arguments": ""}
        events = self._event("response.output_item.added", output_index=index, item=begun)
        events += self._event("response.function_call_arguments.delta", **place, delta=call.arguments)
        events += self._event("response.function_call_arguments.done", **place, arguments=call.arguments)
        return events + self._event("response.output_item.done", output_index=index, item=item)

    def _event(self, kind: str, **data: Any) -> bytes:
        return event({"type": kind, "sequence_number": next(self._numbers), **data}, kind)


def _response(generation: Generation, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": f"resp_{generation.number}",
        "object": "response",
        "created_at": generation.created_s,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "model": generation.model,
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "truncation": "disabled",
        "user": None,
    }


def _output(generation: Generation) -> list[dict[str, Any]]:
    calls = [_function_call(call) for call in generation.tool_calls]
    return [_message(generation), *calls] if generation.text or not calls else calls


def _message_id(generation: Generation) -> str:
    return f"msg_{generation.number}"


def _message(generation: Generation) -> dict[str, Any]:
    return {
        "id": _message_id(generation),
        "type": "message",
        "status": "incomplete" if generation.cut_short else "completed",
        "role": "assistant",
        "content": [_text_part(generation.text)],
    }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _function_call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": f"fc_{call.id}",
        "type": "function_call",
        "status": "completed",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
    }


def _usage(taken: int, given: int) -> dict[str, Any]:
    return {
        "input_tokens": taken,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": given,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": taken + given,
    }


FORMAT = Format(_problem, _plain, _stream, openai_error, openai_headers)
