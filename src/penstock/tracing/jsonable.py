"""Any value as JSON data.

Showing or exporting a value must never fail because of its contents, and never take longer than its size deserves:
depth, text and the number of parts are bounded, so that cycles and shared structures end too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

MAX_DEPTH = 16
MAX_PARTS = 10_000
MAX_TEXT = 100_000
MAX_TEXT_TOTAL = 1_000_000
MAX_KEY = 1_000
MAX_INT_BITS = 1_024
LEAVES = frozenset({str, int, float, bool, type(None)})
"""Immutable types without parts; nearly all values of JSON are of exactly these types."""


def jsonable(value: object) -> Any:
    """Return `value` in JSON's types; a value without one becomes text, and large values are truncated."""
    return Converter().convert(value, 0)


def structured(value: Any) -> Any:
    """Return the data of a pydantic model or a dataclass; any other value, and one that cannot be read, unchanged."""
    try:
        if callable(dump := getattr(value, "model_dump", None)):
            return dump(mode="json")
        if is_dataclass(value) and not isinstance(value, type):
            return {field.name: structured(getattr(value, field.name)) for field in fields(value)}
    except Exception:  # whatever its class does; it is shown by its repr
        return value
    return value


class Converter:
    """Converts one value, and counts its parts and its text."""

    def __init__(self) -> None:
        self.parts_left = MAX_PARTS
        self.text_left = MAX_TEXT_TOTAL

    def convert(self, value: object, depth: int) -> Any:
        """Return the value as JSON data; unreadable parts are named."""
        self.parts_left -= 1
        try:
            return self._converted(value, depth)
        except Exception as error:
            return _not_shown(value, error)

    def _converted(self, value: object, depth: int) -> Any:
        if value is None or value is True or value is False:
            return value
        if isinstance(value, str):
            return self._cut(str(value))
        if isinstance(value, int):
            return int(value) if value.bit_length() <= MAX_INT_BITS else f"<int of {value.bit_length()} bits>"
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else str(value)
        if isinstance(value, (Mapping, list, tuple, set, frozenset)):
            return self._container(value, depth)
        return self._cut(_text(value)) if self.text_left > 0 else f"<{type(value).__name__}>"

    def _cut(self, text: str) -> str:
        room = min(MAX_TEXT, self.text_left)
        self.text_left -= min(len(text), room)
        return text if len(text) <= room else f"{text[:room]}… ({len(text)} characters)"

    def _container(self, value: Any, depth: int) -> Any:
        if depth >= MAX_DEPTH or self.parts_left <= 0:
            return f"<{type(value).__name__} of {len(value)}>"
        if isinstance(value, Mapping):
            pairs: dict[str, Any] = {}
            for key, item in list(value.items()):
                if self.parts_left <= 0:
                    pairs["…"] = f"({len(value)} keys)"
                    break
                pairs[(str(key) if isinstance(key, str) else _text(key))[:MAX_KEY]] = self.convert(item, depth + 1)
            return pairs
        items: list[Any] = []
        for item in list(value):
            if self.parts_left <= 0:
                items.append(f"… ({len(value)} items)")
                break
            items.append(self.convert(item, depth + 1))
        return items


def _text(value: object) -> str:
    if isinstance(value, (bytes, bytearray)) and len(value) > MAX_TEXT:
        return f"<{type(value).__name__} of {len(value)}>"
    try:
        return str(value.isoformat() if hasattr(value, "isoformat") else repr(value))
    except Exception as error:
        return _not_shown(value, error)


def _not_shown(value: object, error: Exception) -> str:
    return f"<{type(value).__name__}: {type(error).__name__} while showing it>"
