"""Server-sent events, read as the JSON objects they carry. Knows no API and no client."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

MAX_EVENT_BYTES = 16 * 1024 * 1024
"""An event that does not end is not kept for ever."""
DONE = b"[DONE]"


class UnreadableEvent(ValueError):
    """An event is no JSON object, or does not end."""


async def events(chunks: AsyncIterator[bytes]) -> AsyncGenerator[dict[str, Any], None]:
    """The objects in a stream of bytes, up to the mark of its end or to where it breaks off.

    Lines are split as bytes: a JSON text may have characters in it that split text, and end no line here.
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
                said = b"\n".join(data)
                data.clear()
                if said == DONE:
                    return
                yield _object(said)


def _object(said: bytes) -> dict[str, Any]:
    try:
        value = json.loads(said)
    except (ValueError, RecursionError) as error:
        raise UnreadableEvent("an event is not JSON") from error
    if not isinstance(value, dict):
        raise UnreadableEvent("an event is not a JSON object")
    return value
