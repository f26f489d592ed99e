"""What an answer says about itself, while it passes by: its usage, and whether it is complete.

A plain answer is one JSON object; a stream is a line of events, each with a JSON object. What the client gets is what
the provider sent, byte for byte, except the one event that reports the usage of a stream whose client did not ask for
it: many a program takes it for granted that every chunk has a choice.

What is believed. Only the usage that comes with the end counts: what is reported on the way is not the bill. A usage
without input, or with less output than was seen to arrive, is a mistake or a lie, and then nothing is known. Smaller
lies cannot be seen from here.

Knows the shapes of the APIs, and nothing of clients, prices or limits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from penstock.providers.http.asked import Api
from penstock.runtime.billing.usage import Usage, read_usage

MAX_BYTES_PER_TOKEN = 32
"""No text has more in a token, on average; English has four or five."""
MAX_KEPT_BYTES = 16 * 1024 * 1024
"""Of an answer or an event that is larger, nothing is known."""


class Answer:
    """An answer on its way."""

    def __init__(self) -> None:
        self.is_complete = False
        """Whether it came to its end, by the provider's own mark."""
        self.usage: Usage | None = None
        """What the whole of it used, if it said so in a way that can be believed."""
        self.fault: str | None = None
        """What the provider said went wrong on the way."""

    def take(self, data: bytes) -> bytes:
        """Look at what came; what of it the client is to get."""
        raise NotImplementedError

    def end(self) -> bytes:
        """Nothing more comes; what the client is still to get."""
        raise NotImplementedError


class Unreadable(Answer):
    """An answer in a coding that is not read here: it is complete when it has ended, and its usage is not known."""

    def take(self, data: bytes) -> bytes:
        return data

    def end(self) -> bytes:
        self.is_complete = True
        return b""


class Plain(Answer):
    """One JSON object."""

    def __init__(self) -> None:
        super().__init__()
        self._kept = bytearray()
        self._is_too_large = False

    def take(self, data: bytes) -> bytes:
        self._is_too_large = self._is_too_large or len(self._kept) + len(data) > MAX_KEPT_BYTES
        if self._is_too_large:
            self._kept.clear()
        else:
            self._kept += data
        return data

    def end(self) -> bytes:
        if self._is_too_large:
            self.is_complete = True
            return b""
        body = _json(bytes(self._kept))
        self._kept.clear()
        if isinstance(body, dict):
            self.is_complete = True
            self.usage = _believed(read_usage(body), _text_size(body))
        return b""


class Events(Answer):
    """A stream of events."""

    def __init__(self, api: Api, answers: int = 1, withholds_usage: bool = False) -> None:
        super().__init__()
        self._api = api
        self._unfinished = answers
        self._withholds_usage = withholds_usage
        self._kept = bytearray()
        self._text_size = 0
        self._so_far: dict[str, Any] = {}
        """What a stream of messages has told of its usage: each report adds to the one before."""
        self._model: str | None = None

    def take(self, data: bytes) -> bytes:
        self._kept += data
        if len(self._kept) > MAX_KEPT_BYTES:
            passed, self._kept = bytes(self._kept), bytearray()
            return passed
        # Events reach the client whole: only then is it known whether one is withheld.
        return b"".join(event for event in self._whole_events() if self._passes(event))

    def end(self) -> bytes:
        rest, self._kept = bytes(self._kept), bytearray()
        return rest if rest and self._passes(rest) else b""

    def _whole_events(self) -> Iterable[bytes]:
        while (end := _end_of_event(self._kept)) is not None:
            event = bytes(self._kept[:end])
            del self._kept[:end]
            yield event

    def _passes(self, event: bytes) -> bool:
        """Look at one event; whether the client is to get it."""
        data = _json(_data_of(event))
        if not isinstance(data, dict):
            return True
        if data.get("error") or data.get("type") == "error":
            self.fault = str(data.get("error") or data.get("message"))[:500]
        match self._api:
            case "chat":
                return self._see_chunk(data)
            case "responses":
                self._see_response_event(data)
            case "messages":
                self._see_message_event(data)
        return True

    def _see_chunk(self, chunk: dict[str, Any]) -> bool:
        choices = [choice for choice in _list(chunk, "choices") if isinstance(choice, dict)]
        for choice in choices:
            self._text_size += _message_size(choice.get("delta"))
            if choice.get("finish_reason"):
                self._unfinished -= 1
        self.is_complete = self._unfinished <= 0
        if not isinstance(chunk.get("usage"), dict):
            return True
        if self.is_complete:
            self.usage = _believed(read_usage(chunk), self._text_size)
        return bool(choices) or not self._withholds_usage

    def _see_response_event(self, event: dict[str, Any]) -> None:
        kind, response = str(event.get("type")), event.get("response")
        if kind.endswith(".delta"):
            self._text_size += _size(event.get("delta"))
        if kind in ("response.completed", "response.incomplete") and isinstance(response, dict):
            self.is_complete = True
            self.usage = _believed(read_usage(response), self._text_size)
        elif kind == "response.failed" and isinstance(response, dict):
            self.fault = str(response.get("error"))[:500]
            self.usage = _believed(read_usage(response), self._text_size)

    def _see_message_event(self, event: dict[str, Any]) -> None:
        kind = event.get("type")
        if kind == "message_start" and isinstance(message := event.get("message"), dict):
            self._model = message.get("model")
            self._add_usage(message.get("usage"))
        elif kind == "content_block_delta" and isinstance(delta := event.get("delta"), dict):
            self._text_size += sum(_size(delta.get(name)) for name in ("text", "partial_json", "thinking"))
        elif kind == "message_delta":
            tells = self._add_usage(event.get("usage"))
            delta = event.get("delta")
            if isinstance(delta, dict) and delta.get("stop_reason"):
                self.is_complete = True
                whole = {"usage": self._so_far, "model": self._model}
                self.usage = _believed(read_usage(whole), self._text_size) if tells else None

    def _add_usage(self, usage: object) -> bool:
        """Whether it told how much output there is by now."""
        if not isinstance(usage, dict):
            return False
        self._so_far |= {name: count for name, count in usage.items() if count is not None}
        return usage.get("output_tokens") is not None


def _believed(usage: Usage | None, text_size: int) -> Usage | None:
    if usage is None or usage.input_tokens == 0 or usage.output_tokens * MAX_BYTES_PER_TOKEN < text_size:
        return None
    return usage


def _text_size(body: dict[str, Any]) -> int:
    """How many bytes of text a plain answer has, as far as it is text."""
    choices = [choice for choice in _list(body, "choices") if isinstance(choice, dict)]
    items = [item for item in _list(body, "output") if isinstance(item, dict)]
    parts = [*_list(body, "content"), *items, *(part for item in items for part in _list(item, "content"))]
    said = sum(_part_size(part) for part in parts if isinstance(part, dict))
    return said + sum(_message_size(choice.get("message")) for choice in choices)


def _part_size(part: dict[str, Any]) -> int:
    """Text, thoughts, and the arguments of a tool: text with Responses, an object with messages."""
    given = part.get("input")
    arguments = json.dumps(given, ensure_ascii=False, separators=(",", ":")) if isinstance(given, dict) else None
    return sum(map(_size, (part.get("text"), part.get("thinking"), part.get("arguments"), arguments)))


def _message_size(message: object) -> int:
    if not isinstance(message, dict):
        return 0
    calls = [call.get("function") for call in _list(message, "tool_calls") if isinstance(call, dict)]
    arguments = [function.get("arguments") for function in calls if isinstance(function, dict)]
    return _size(message.get("content")) + sum(map(_size, arguments))


def _list(holder: object, name: str) -> list[Any]:
    held = holder.get(name) if isinstance(holder, dict) else None
    return held if isinstance(held, list) else []


def _size(text: object) -> int:
    return len(text.encode(errors="replace")) if isinstance(text, str) else 0


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _end_of_event(data: bytearray) -> int | None:
    """Behind the empty line that ends the first event; None if there is none yet."""
    ends = [at + len(mark) for mark in (b"\n\n", b"\r\n\r\n", b"\r\r") if (at := data.find(mark)) >= 0]
    return min(ends, default=None)


def _data_of(event: bytes) -> bytes:
    lines = event.splitlines()
    return b"\n".join(line[5:].strip() for line in lines if line.startswith(b"data:"))
