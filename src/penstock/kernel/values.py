"""Typed values, and how one type becomes another.

A value that moves along an edge says its type. Where the types of both ends differ, a conversion must have been
declared: nothing is converted by guessing, and one that fails says which value, from what to what.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import PenstockError

ANY = "any"
Convert = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class DataValue:
    """A value with its type; None is a value."""

    type: str
    value: Any


class ConversionFailed(PenstockError):
    """A value could not become what the handle it arrived at takes."""

    def __init__(self, path: str, given: str, wanted: str, why: str) -> None:
        self.path = path
        self.given = given
        self.wanted = wanted
        super().__init__(f"{path}: {given} cannot become {wanted}: {why}")


class Conversions:
    """Which types become which, and how; a copy can be extended without touching the original."""

    __slots__ = ("_table",)

    def __init__(self, table: Mapping[tuple[str, str], Convert] | None = None) -> None:
        self._table = dict(table or {})

    def declare(self, given: str, wanted: str, convert: Convert) -> None:
        """Let `given` become `wanted` by `convert`, which raises if it cannot."""
        self._table[given, wanted] = convert

    def copy(self) -> Conversions:
        """The same conversions, to be extended apart."""
        return Conversions(self._table)

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
            raise ConversionFailed(path, value.type, wanted, f"{type(error).__name__}: {error}") from error


def _parsed_number(text: str) -> float | int:
    number = json.loads(text)
    if (
        isinstance(number, bool)
        or not isinstance(number, int | float)
        or number != number
        or abs(number) == float("inf")
    ):
        raise ValueError(f"{text[:40]!r} is not a number")
    return number


def _parsed_boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"{text[:40]!r} is neither true nor false")
    return text == "true"


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


STANDARD_CONVERSIONS = Conversions(
    {
        ("number", "text"): _as_json,
        ("boolean", "text"): _as_json,
        ("object", "text"): _as_json,
        ("list", "text"): _as_json,
        ("text", "number"): _parsed_number,
        ("text", "boolean"): _parsed_boolean,
        ("text", "list"): lambda text: [text],
        ("object", "list"): lambda one: [one],
        ("number", "list"): lambda one: [one],
        ("boolean", "list"): lambda one: [one],
    }
)
"""What becomes what, if nothing else is declared."""
