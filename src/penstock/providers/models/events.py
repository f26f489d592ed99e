"""Parse server-sent events into the JSON objects they carry. Knows no API and no client."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from penstock.providers.reading.meter import Meter

MAX_EVENT_BYTES = 16 * 1024 * 1024
"""Maximum size of an unfinished event line, so that memory stays bounded."""
DONE = b"[DONE]"


class UnreadableEvent(ValueError):
    """An event is not a JSON object, or is too large."""


async def events(chunks: AsyncIterator[bytes], meter: Meter) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the objects in a stream of bytes, up to the end marker or to where the stream breaks off.

    The text of each object is counted by `meter`, also while its line is unfinished.
    Lines are split as bytes: JSON may contain Unicode line separators, which do not end a line here.
    """
    rest = b""
    data: list[bytes] = []
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > MAX_EVENT_BYTES:
            raise UnreadableEvent(f"an event has more than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].strip(b" "))
            elif not line and data:
                data_text = b"\n".join(data)
                data.clear()
                if data_text == DONE:
                    return
                event = _object(data_text)
                meter.finish_object()
                meter.add_event(event)
                yield event
        meter.check_unfinished(rest)


def _object(data_text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data_text)
    except (ValueError, RecursionError) as error:
        raise UnreadableEvent("an event is not JSON") from error
    if not isinstance(value, dict):
        raise UnreadableEvent("an event is not a JSON object")
    return value
