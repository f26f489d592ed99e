"""The arguments and results of model and tool calls, as bounded JSON data for the record.

A payload is converted, redacted if the run asks for that, and truncated, in this order: truncation never leaves half of
a secret. Capturing never raises; a value without a JSON type is recorded by its bounded `repr`. A payload that does not
fit is replaced by a mapping with `truncated`, `original_bytes` and the remaining `content`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

from penstock.tracing.jsonable import LEAVES, Converter, structured
from penstock.tracing.redaction import Redaction

RecordPayloads = Literal["off", "redacted", "full"]
RECORD_PAYLOADS: tuple[RecordPayloads, ...] = ("off", "redacted", "full")

MAX_PAYLOAD_BYTES = 16 * 1_024
SMALLEST_PAYLOAD_BYTES, LARGEST_PAYLOAD_BYTES = 256, 1_024 * 1_024
READ_AHEAD = 4_096
"""Characters read beyond the limit, so that a secret at the end is recognized."""
HALF_SECRET = 64
"""Characters dropped at the end of a text that was read in part, so that no unrecognized part of a secret remains."""

_RULES = Redaction()


class Payload(NamedTuple):
    """The arguments and the result of one call; None where nothing is recorded."""

    input: Any = None
    output: Any = None


class MessageLike(Protocol):
    """A message of a conversation."""

    def to_dict(self) -> dict[str, Any]:
        """Return the message as JSON data."""


class Messages(NamedTuple):
    """The messages of a model call; where not all fit, the newest are recorded."""

    messages: Sequence[MessageLike]
    size: int
    """Bytes of text in all of them."""


class PayloadSource:
    """A value that names the part of itself to record."""

    __slots__ = ()

    def _payload(self) -> Any:
        raise NotImplementedError


class Payloads:
    """How a run records payloads: redacted or in full, and how much of each."""

    __slots__ = ("_max_bytes", "_rules")

    def __init__(self, mode: RecordPayloads, max_bytes: int) -> None:
        self._rules = _RULES if mode == "redacted" else None
        self._max_bytes = max_bytes

    def arguments(self, args: tuple[Any, ...]) -> Any:
        """Return the arguments of a call as JSON data: a single one unchanged, several as a list."""
        return self.capture(args[0] if len(args) == 1 else args)

    def capture(self, value: Any) -> Any:
        """Return the value as JSON data within the limit."""
        try:
            if isinstance(value, PayloadSource):
                value = value._payload()
            return self._newest(value) if isinstance(value, Messages) else self._bounded(value)[0]
        except Exception as error:  # whatever an object does while it is read, the call continues
            return f"<not recorded: {type(error).__name__} while reading {type(value).__name__}>"

    def _newest(self, given: Messages) -> list[Any]:
        kept: list[Any] = []
        room = self._max_bytes
        for message in reversed(given.messages):
            document = message.to_dict()
            data, size = self._bounded(document)
            if kept and size > room:
                break
            kept.append(data if "role" in data else {"role": document["role"], **data})
            room -= size
        if omitted := len(given.messages) - len(kept):
            kept.append({"truncated": True, "original_bytes": given.size, "omitted_messages": omitted})
        return kept[::-1]

    def _bounded(self, value: Any) -> tuple[Any, int]:
        """Return the value as JSON data, and its size in bytes."""
        converter = _PayloadConverter(self._max_bytes + READ_AHEAD, self._rules)
        data = converter.convert(value, 0)
        kept = data if self._rules is None else self._rules.uncut(data)
        text = _encoded(kept)
        size = _bytes(text)
        if size <= self._max_bytes and not converter.unread:
            return kept, size
        content = (kept if isinstance(kept, str) else text).encode("utf-8", "replace")[: self._max_bytes]
        original = _bytes(_encoded(data)) + converter.unread
        cut = {"truncated": True, "original_bytes": original, "content": content.decode("utf-8", "ignore")}
        return cut, len(content)


class _PayloadConverter(Converter):
    """Reads named parts by their names, so that secrets among them are found, and no more text than is recorded."""

    def __init__(self, room: int, rules: Redaction | None) -> None:
        super().__init__()
        self.text_left = room
        self.unread = 0
        """Bytes of text that were omitted."""
        self._rules = rules

    def _converted(self, value: object, depth: int) -> Any:
        if type(value) not in LEAVES:
            names = getattr(value, "_asdict", None) if isinstance(value, tuple) else None
            value = structured(value) if names is None else names()
        return super()._converted(value, depth)

    def _cut(self, text: str) -> str:
        room = self.text_left
        self.text_left = max(0, room - len(text))
        if len(text) <= room:
            return text
        head = text[:room]
        if self._rules is not None:
            head = self._rules.uncut(head)[:-HALF_SECRET]
        self.unread += max(1, _bytes(text) - _bytes(head))
        return head


def _encoded(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False)


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
