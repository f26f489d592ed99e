"""Any value as JSON data.

What is shown or exported must never fail because of what somebody put into it, and never take longer than its size
deserves: depth, text and the number of parts are bounded, so that cycles and shared structures end too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 16
MAX_PARTS = 10_000
MAX_TEXT = 100_000
MAX_INT_BITS = 1_024


def jsonable(value: object) -> Any:
    """`value` in JSON's own types; what JSON has no type for becomes its text, and what is oversize is cut."""
    return _Converter().convert(value, 0)


class _Converter:
    def __init__(self) -> None:
        self.parts_left = MAX_PARTS

    def convert(self, value: object, depth: int) -> Any:
        self.parts_left -= 1
        if value is None or value is True or value is False:
            return value
        if isinstance(value, str):
            return str(value) if len(value) <= MAX_TEXT else f"{value[:MAX_TEXT]}… ({len(value)} characters)"
        if isinstance(value, int):
            return int(value) if value.bit_length() <= MAX_INT_BITS else f"<int of {value.bit_length()} bits>"
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else str(value)
        if isinstance(value, (Mapping, list, tuple, set, frozenset)):
            return self._container(value, depth)
        return _text(value)

    def _container(self, value: Any, depth: int) -> Any:
        if depth >= MAX_DEPTH or self.parts_left <= 0:
            return f"<{type(value).__name__} of {len(value)}>"
        if isinstance(value, Mapping):
            pairs: dict[str, Any] = {}
            for key, item in list(value.items()):
                if self.parts_left <= 0:
                    break
                pairs[key if isinstance(key, str) else _text(key)] = self.convert(item, depth + 1)
            return pairs
        items: list[Any] = []
        for item in list(value):
            if self.parts_left <= 0:
                break
            items.append(self.convert(item, depth + 1))
        return items


def _text(value: object) -> str:
    try:
        text = value.isoformat() if hasattr(value, "isoformat") else repr(value)
    except Exception as error:
        return f"<{type(value).__name__}: {type(error).__name__} while showing it>"
    return str(text)[:MAX_TEXT]
