"""Split the bytes of a stream into its objects.

Four framings: server-sent events, lines of JSON (Ollama), one JSON array (Gemini), and frames of the AWS event stream
(Bedrock). A splitter removes complete parts from the front of a buffer, each with its object; the buffer keeps the
beginning of the next part. Parts are returned byte for byte, so that they can be passed on.

Knows nothing of the meaning of the objects.
"""

from __future__ import annotations

import binascii
import json
import re
import struct
from collections.abc import Iterator
from typing import Any, Protocol

Part = tuple[bytes, Any]
"""The bytes of a part, and its JSON; None if it has none, or it cannot be parsed."""

MAX_END_BYTES = 4
"""Length of the longest separator between two events."""
_EMPTY_LINE = re.compile(rb"\n\n|\r\n\r\n|\r\r")
_NEWLINE = re.compile(rb"\n")
_BEFORE_ITEM = re.compile(rb"[\s,\[\]]*")
_PRELUDE = struct.Struct(">III")
_STRING = 7
"""Type of a header whose value is a text."""
_FIXED_SIZES = {0: 0, 1: 0, 2: 1, 3: 2, 4: 4, 5: 8, 8: 8, 9: 16}
"""Sizes of header values by their type; the others begin with their size."""


class Splitter(Protocol):
    """Takes whole parts from the front of a buffer."""

    def split(self, buffer: bytearray) -> Iterator[Part]:
        """Yield the complete parts, and remove them from the buffer."""

    def last(self, data: bytes) -> Any:
        """Return the object in the rest of the buffer at the end of the stream; None if there is none."""


class _Separated:
    """Parts that end with a separator."""

    def __init__(self, end: re.Pattern[bytes]) -> None:
        self._end = end
        self._searched = 0
        """Number of bytes in the buffer that are known to contain no end of a part."""

    def split(self, buffer: bytearray) -> Iterator[Part]:
        while (found := self._end.search(buffer, min(self._searched, len(buffer)))) is not None:
            part = bytes(buffer[: found.end()])
            del buffer[: found.end()]
            self._searched = 0
            yield part, self.last(part)
        self._searched = max(0, len(buffer) - MAX_END_BYTES)

    def last(self, data: bytes) -> Any:
        return parse_json(data)


class EventSplitter(_Separated):
    """Server-sent events."""

    def __init__(self) -> None:
        super().__init__(_EMPTY_LINE)

    def last(self, data: bytes) -> Any:
        text = b"\n".join(line[5:].strip() for line in data.splitlines() if line.startswith(b"data:"))
        return parse_json(text) if text else None  # a comment has no data


class LineSplitter(_Separated):
    """Lines of JSON."""

    def __init__(self) -> None:
        super().__init__(_NEWLINE)


class ArraySplitter:
    """The objects in one JSON array."""

    def __init__(self) -> None:
        self._next_try = 0
        """Buffer size at which decoding is tried again: an eighth more than at the last try."""

    def split(self, buffer: bytearray) -> Iterator[Part]:
        if len(buffer) < self._next_try and not buffer[-8:].rstrip().endswith((b"}", b"]")):
            return
        while b"}" in buffer:
            found = _BEFORE_ITEM.match(buffer)
            begin = found.end() if found is not None else 0
            # The last character may be incomplete: it is behind every complete object.
            text = bytes(buffer[begin:]).decode("utf-8", "ignore")
            try:
                item, length = json.JSONDecoder().raw_decode(text)
            except (ValueError, RecursionError):
                self._next_try = len(buffer) + len(buffer) // 8
                return
            self._next_try = 0
            end = begin + len(text[:length].encode())
            part = bytes(buffer[:end])
            del buffer[:end]
            yield part, item

    def last(self, data: bytes) -> Any:
        return None


class FrameSplitter:
    """Frames of the AWS event stream: lengths, headers, a JSON payload, and checksums, which are left to the client.

    An event is returned as `{type: payload}`; a chunk of an invocation as the vendor's own event in it; an exception as
    `{"error": …}`.
    """

    def split(self, buffer: bytearray) -> Iterator[Part]:
        while len(buffer) >= _PRELUDE.size:
            size, headers_size, _ = _PRELUDE.unpack_from(buffer)
            if len(buffer) < size or size < headers_size + _PRELUDE.size + 4:
                return
            frame = bytes(buffer[:size])
            del buffer[:size]
            yield frame, _event_in(frame, headers_size)

    def last(self, data: bytes) -> Any:
        return None


def parse_json(data: bytes) -> Any:
    """Return the JSON in `data`; None if it cannot be parsed."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _event_in(frame: bytes, headers_size: int) -> Any:
    begin = _PRELUDE.size
    headers = _headers(frame[begin : begin + headers_size])
    payload = parse_json(frame[begin + headers_size : -4])
    if headers.get(":message-type") in ("exception", "error"):
        kind = headers.get(":exception-type") or headers.get(":error-code")
        return {"error": f"{kind}: {payload}"}
    if not isinstance(payload, dict):
        return None
    if headers.get(":event-type") == "chunk" and isinstance(data := payload.get("bytes"), str):
        try:
            return parse_json(binascii.a2b_base64(data))
        except binascii.Error:
            return None
    return {headers.get(":event-type", ""): payload}


def _headers(data: bytes) -> dict[str, str]:
    """Return the headers that are texts; the rest of damaged headers is left out."""
    headers: dict[str, str] = {}
    try:
        at = 0
        while at < len(data):
            name = data[at + 1 : at + 1 + data[at]].decode("utf-8", "replace")
            at += 1 + data[at]
            kind, at = data[at], at + 1
            if (size := _FIXED_SIZES.get(kind)) is None:
                size, at = int.from_bytes(data[at : at + 2], "big"), at + 2
            if kind == _STRING:
                headers[name] = data[at : at + size].decode("utf-8", "replace")
            at += size
    except IndexError:
        pass
    return headers
