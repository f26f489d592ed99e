"""Read the usage and the completeness of a response while it is passed on to the client.

A plain response is one JSON object; a stream is a sequence of events, each with a JSON object. The client receives what
the provider sent, byte for byte, except the one event that reports the usage of a stream whose client did not request
it: many programs assume that every chunk has a choice. A response of more than was paid for raises ExcessOutput.

Which usage is trusted. Only the usage reported at the end counts: intermediate reports are not the bill. A usage
without input, or with less output than arrived, is wrong, and then the usage is unknown. Smaller errors cannot be
detected here.

Knows the shapes of the APIs, and nothing of clients, prices or limits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from penstock.providers.http.forms import Api
from penstock.providers.reading.meter import MAX_KEPT_BYTES, JsonBody, Meter
from penstock.runtime.billing.usage import Usage, read_usage

_EMPTY_LINE = re.compile(rb"\n\n|\r\n\r\n|\r\r")
MAX_END_BYTES = 4
"""Length of the longest mark between two events."""


class Answer:
    """A response while it is being received."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.is_complete = False
        """Whether the provider's end marker has arrived."""
        self.usage: Usage | None = None
        """Total usage of the response, if it reported a plausible one."""
        self.fault: str | None = None
        """Error that the provider reported in the middle of the response."""

    def take(self, data: bytes) -> bytes:
        """Inspect received bytes, decompressed; return the bytes to pass on to the client."""
        raise NotImplementedError

    def end(self) -> bytes:
        """Finish the response; return the remaining bytes to pass on to the client."""
        raise NotImplementedError

    def _plausible(self, usage: Usage | None) -> Usage | None:
        return usage if usage is not None and self.meter.is_plausible(usage) else None


class Plain(Answer):
    """A response of one JSON object."""

    def __init__(self, meter: Meter) -> None:
        super().__init__(meter)
        self._body = JsonBody(meter)

    def take(self, data: bytes) -> bytes:
        return self._body.take(data)

    def end(self) -> bytes:
        content = self._body.content()
        body = None if content is None else _json(content)
        if isinstance(body, dict):
            self.meter.check_whole(body)
            self.usage = self._plausible(read_usage(body))
        self.is_complete = content is None or isinstance(body, dict)
        return b""


class Events(Answer):
    """A stream of events."""

    def __init__(
        self,
        meter: Meter,
        api: Api,
        answers: int = 1,
        withholds_usage: bool = False,
        on_text: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(meter)
        self._api = api
        self._on_text = on_text
        """Called with each non-empty piece of text as it arrives."""
        self._unfinished = answers
        self._withholds_usage = withholds_usage
        self._kept = bytearray()
        self._searched = 0
        """Number of bytes in `_kept` that are known to contain no end of an event."""
        self._so_far: dict[str, Any] = {}
        """Usage reported so far by a Messages stream: each report updates the one before."""
        self._model: str | None = None

    def take(self, data: bytes) -> bytes:
        self.meter.count_bytes(len(data))
        self._kept += data
        if len(self._kept) > MAX_KEPT_BYTES:
            passed, self._kept, self._searched = bytes(self._kept), bytearray(), 0
            return passed
        # Events are passed on whole: whether one is withheld is known only then.
        passed = b"".join(event for event in self._whole_events() if self._passes(event))
        self.meter.check_unfinished(self._kept)
        return passed

    def end(self) -> bytes:
        rest, self._kept = bytes(self._kept), bytearray()
        return rest if rest and self._passes(rest) else b""

    def _whole_events(self) -> Iterable[bytes]:
        while (end := _end_of_event(self._kept, self._searched)) is not None:
            event = bytes(self._kept[:end])
            del self._kept[:end]
            self._searched = 0
            self.meter.finish_object()
            yield event
        self._searched = max(0, len(self._kept) - MAX_END_BYTES)

    def _passes(self, event: bytes) -> bool:
        """Inspect one event; return whether to pass it on to the client."""
        text = _data_of(event)
        data = _json(text) if text else None  # a comment has no data
        if not isinstance(data, dict):
            return True
        if data.get("error") or data.get("type") == "error":
            self.fault = str(data.get("error") or data.get("message"))[:500]
        self.meter.add_event(data)
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
            delta = choice.get("delta")
            if isinstance(delta, dict):
                self._emit_text(delta.get("content"))
            if choice.get("finish_reason"):
                self._unfinished -= 1
        self.is_complete = self._unfinished <= 0
        if not isinstance(chunk.get("usage"), dict):
            return True
        if self.is_complete:
            self.usage = self._plausible(read_usage(chunk))
        return bool(choices) or not self._withholds_usage

    def _see_response_event(self, event: dict[str, Any]) -> None:
        kind, response = str(event.get("type")), event.get("response")
        if kind == "response.output_text.delta":
            self._emit_text(event.get("delta"))
        if kind in ("response.completed", "response.incomplete") and isinstance(response, dict):
            self.is_complete = True
            self.usage = self._plausible(read_usage(response))
        elif kind == "response.failed" and isinstance(response, dict):
            self.fault = str(response.get("error"))[:500]
            self.usage = self._plausible(read_usage(response))

    def _see_message_event(self, event: dict[str, Any]) -> None:
        kind = event.get("type")
        if kind == "message_start" and isinstance(message := event.get("message"), dict):
            self._model = message.get("model")
            self._add_usage(message.get("usage"))
        elif kind == "content_block_delta" and isinstance(delta := event.get("delta"), dict):
            self._emit_text(delta.get("text"))
        elif kind == "message_delta":
            has_output = self._add_usage(event.get("usage"))
            delta = event.get("delta")
            if isinstance(delta, dict) and delta.get("stop_reason"):
                self.is_complete = True
                whole = {"usage": self._so_far, "model": self._model}
                self.usage = self._plausible(read_usage(whole)) if has_output else None

    def _emit_text(self, text: object) -> None:
        if self._on_text is not None and isinstance(text, str) and text:
            self._on_text(text)

    def _add_usage(self, usage: object) -> bool:
        """Merge a usage report; return whether it includes the output tokens."""
        if not isinstance(usage, dict):
            return False
        self._so_far |= {name: count for name, count in usage.items() if count is not None}
        return usage.get("output_tokens") is not None


def _list(holder: object, name: str) -> list[Any]:
    held = holder.get(name) if isinstance(holder, dict) else None
    return held if isinstance(held, list) else []


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _end_of_event(data: bytearray, begin: int) -> int | None:
    """Return the position after the first empty line from `begin` on; None if it has not arrived."""
    found = _EMPTY_LINE.search(data, begin)
    return None if found is None else found.end()


def _data_of(event: bytes) -> bytes:
    lines = event.splitlines()
    return b"\n".join(line[5:].strip() for line in lines if line.startswith(b"data:"))
