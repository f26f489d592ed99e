"""JSON values and the names of their types, as handles and conversions know them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from penstock.kernel.values import ANY, DataValue, PartialValue

ValueType = Literal["any", "text", "number", "boolean", "object", "list"]


def type_of(value: Any) -> str:
    """The type of a JSON value; any, for what has none of its own."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "text"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, Mapping):
        return "object"
    if isinstance(value, list | tuple):
        return "list"
    return ANY


def typed(value: Any, finish_reason: str | None = None) -> DataValue:
    """The value with its type; one that is not whole says why."""
    if finish_reason is not None:
        return PartialValue(type_of(value), value, finish_reason)
    return DataValue(type_of(value), value)


def as_text(value: Any) -> str:
    """The value as a model is told it: text as it is, nothing as nothing, anything else as JSON."""
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False, allow_nan=False)
