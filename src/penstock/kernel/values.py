"""Typed values, and how one type becomes another.

A value that moves along an edge says its type. Where the types of both ends differ, a conversion must have been
declared: nothing is converted by guessing, and one that fails says where, from what, to what, and why.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import InvalidValue, PenstockError

ANY = "any"
Convert = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class DataValue:
    """A value with its type; None is a value."""

    type: str
    value: Any


@dataclass(frozen=True, slots=True)
class PartialValue(DataValue):
    """A value that is not whole, such as an answer that came to its limit; stays one where it is handed on as it is."""

    finish_reason: str
    """Why it ends before its own end, in a word, such as `length`."""


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
    """Return the value with its type; an incomplete one carries its finish reason."""
    if finish_reason is not None:
        return PartialValue(type_of(value), value, finish_reason)
    return DataValue(type_of(value), value)


def as_text(value: Any) -> str:
    """Return the value as text: text unchanged, None as an empty string, anything else as JSON."""
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False, allow_nan=False)


class ConversionFailed(PenstockError):
    """A value could not become what the handle it arrived at takes."""

    def __init__(self, path: str, given: str, wanted: str, why: str) -> None:
        self.path = path
        self.given = given
        self.wanted = wanted
        self.why = why
        super().__init__(f"{path}: {given} cannot become {wanted}: {why}")


class Conversions:
    """Which types become which, and how. Never changes: `extended` makes a new one."""

    __slots__ = ("_table",)

    def __init__(self, table: Mapping[tuple[str, str], Convert] | None = None) -> None:
        self._table = dict(table or {})
        for (given, wanted), convert in self._table.items():
            if not callable(convert):
                raise InvalidValue(f"conversion from {given} to {wanted}", convert, "a function of one value")

    def extended(self, table: Mapping[tuple[str, str], Convert]) -> Conversions:
        """These conversions and those of `table`, which hold where both have one; each raises if it cannot convert."""
        return Conversions({**self._table, **table})

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Which types become which."""
        return list(self._table)

    def fits(self, given: str, wanted: str) -> bool:
        """Whether a value of type `given` can arrive where `wanted` is taken; any fits everywhere."""
        return given == wanted or ANY in (given, wanted) or (given, wanted) in self._table

    def convert(self, value: DataValue, wanted: str, path: str) -> DataValue:
        """`value` as a `wanted`; ConversionFailed names `path` if that is not declared or does not work."""
        if value.type == wanted or ANY in (value.type, wanted):
            return value
        convert = self._table.get((value.type, wanted))
        if convert is None:
            raise ConversionFailed(path, value.type, wanted, "no such conversion is declared")
        try:
            return DataValue(wanted, convert(value.value))
        except Exception as error:
            raise ConversionFailed(path, value.type, wanted, _reason(error)) from error


def _reason(error: Exception) -> str:
    try:
        text = str(error)
    except Exception:  # whatever the conversion raised may not be able to say itself
        text = ""
    return f"{type(error).__name__}: {text[:200]}"


def _parsed_number(text: str) -> float | int:
    number = json.loads(text)
    if isinstance(number, bool) or not isinstance(number, int | float) or not _is_finite(number):
        raise ValueError(f"{text[:40]!r} is not a number")
    return number


def _is_finite(number: float | int) -> bool:
    return isinstance(number, int) or math.isfinite(number)


def _parsed_boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"{str(text)[:40]!r} is neither true nor false")
    return text == "true"


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _as_only_item(value: Any) -> list[Any]:
    return [value]


STANDARD_CONVERSIONS = Conversions(
    {
        ("number", "text"): _as_json,
        ("boolean", "text"): _as_json,
        ("object", "text"): _as_json,
        ("list", "text"): _as_json,
        ("text", "number"): _parsed_number,
        ("text", "boolean"): _parsed_boolean,
        ("text", "list"): _as_only_item,
        ("object", "list"): _as_only_item,
        ("number", "list"): _as_only_item,
        ("boolean", "list"): _as_only_item,
    }
)
"""What becomes what, if nothing else is declared."""
