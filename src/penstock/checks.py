"""Checks of arguments: each returns the value, or raises InvalidValue with the field, the value and what is expected.

Knows types and ranges only. What an amount of money is, `money.to_nanos` knows; what makes a graph valid, the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeGuard, TypeVar

from penstock.errors import InvalidValue
from penstock.ids import AN_ID, ID

T = TypeVar("T")

MAX_SECONDS = 1e9
"""Longest accepted duration, about 32 years: more is a mistake, and overflows timers."""


def integer(
    field: str, value: object, *, minimum: int | None = 0, maximum: int | None = None, of: str = "", none: str = ""
) -> int:
    """Return a whole number in the range; a bool is none.

    `of` names what is counted ("tokens"); `none` says what the caller accepts None for, such as "no limit".
    """
    # `type` first: it is the usual case, and faster than isinstance with bool excluded.
    if (type(value) is int or (isinstance(value, int) and not isinstance(value, bool))) and (
        (minimum is None or value >= minimum) and (maximum is None or value <= maximum)
    ):
        return value
    what = f"a whole number of {of}" if of else "a whole number"
    raise InvalidValue(field, value, what + _range(minimum, maximum) + _or_none(none))


def seconds(field: str, value: object, *, above_zero: bool = False, none: str = "") -> float:
    """Return a finite duration in seconds, at most `MAX_SECONDS`; zero only unless `above_zero`."""
    if _is_number(value) and 0 <= value <= MAX_SECONDS and (value > 0 or not above_zero):  # NaN fails every comparison
        return value
    what = "more than zero" if above_zero else "zero or more"
    raise InvalidValue(field, value, f"a finite number of seconds, {what}" + _or_none(none))


def number(field: str, value: object, *, minimum: float = -math.inf, maximum: float = math.inf) -> float:
    """Return a finite number in the range; a bool is none."""
    if _is_number(value) and _is_finite(value) and minimum <= value <= maximum:
        return value
    limits = [None if math.isinf(one) else one for one in (minimum, maximum)]
    raise InvalidValue(field, value, "a finite number" + _range(*limits))


def boolean(field: str, value: object) -> bool:
    """Return True or False; no other value stands for them."""
    if isinstance(value, bool):
        return value
    raise InvalidValue(field, value, "True or False")


def text(field: str, value: object, *, minimum: int = 0, maximum: int | None = None, none: str = "") -> str:
    """Return a string of `minimum` to `maximum` characters."""
    if isinstance(value, str) and minimum <= len(value) and (maximum is None or len(value) <= maximum):
        return value
    if maximum is None:
        what = "text" if minimum == 0 else "text that is not empty"
    else:
        what = f"text of {minimum} to {maximum} characters" if minimum else f"text of at most {maximum} characters"
    raise InvalidValue(field, value, what + _or_none(none))


def line(field: str, value: object, *, maximum: int) -> str:
    """Return one printable line of 1 to `maximum` characters."""
    if isinstance(value, str) and 1 <= len(value) <= maximum and value.isprintable():
        return value
    raise InvalidValue(field, value, f"1 to {maximum} characters on one line")


def identifier(field: str, value: object) -> str:
    """Return the id of a run, graph or chat."""
    if isinstance(value, str) and ID.fullmatch(value) is not None:
        return value
    raise InvalidValue(field, value, f"an id: {AN_ID}")


def choice(field: str, value: T, choices: Collection[T]) -> T:
    """Return one of the choices, which the error lists in their order."""
    try:
        if value in choices:
            return value
    except TypeError:  # unhashable, so it is none of them
        pass
    raise InvalidValue(field, value, one_of(choices))


def one_of(choices: Collection[object]) -> str:
    """The choices in words: `'a', 'b' or 'c'`."""
    *most, last = [repr(one) for one in choices]
    return f"{', '.join(most)} or {last}" if most else last


def instance(field: str, value: object, kind: type[T], expected: str = "", *, none: str = "") -> T:
    """Return an instance of `kind`; `expected` describes it where the name of the class does not."""
    if isinstance(value, kind):
        return value
    article = "an" if kind.__name__[0] in "AEIOUaeiou" else "a"
    raise InvalidValue(field, value, (expected or f"{article} {kind.__name__}") + _or_none(none))


def optional(field: str, value: object, kind: type) -> None:
    """Accept None, and an instance of `kind`."""
    if value is not None and not isinstance(value, kind):
        raise InvalidValue(field, value, f"{kind.__name__} or None")


def function(field: str, value: Callable[..., T], expected: str = "a function") -> Callable[..., T]:
    """Return something callable."""
    if callable(value):
        return value
    raise InvalidValue(field, value, expected)


def mapping(field: str, value: object, of: str) -> Mapping[str, Any]:
    """Return a mapping with text as its keys; `of` says what it maps ("tools by name")."""
    if isinstance(value, dict | Mapping) and all(isinstance(key, str) for key in value):
        return value
    raise InvalidValue(field, value, f"a mapping of {of}")


def labels(field: str, value: object) -> Mapping[str, str]:
    """Return a mapping of text to text."""
    given = mapping(field, value, "text to text")
    if all(isinstance(text, str) for text in given.values()):
        return given
    raise InvalidValue(field, value, "a mapping of text to text")


def sequence(field: str, value: object, of: str) -> Sequence[Any]:
    """Return a list or another sequence of `of`; text and bytes are refused although they are sequences."""
    # list and tuple come first because the check against the abstract class is slower.
    if isinstance(value, list | tuple | Sequence) and not isinstance(value, str | bytes | bytearray):
        return value
    raise InvalidValue(field, value, f"a list of {of}")


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False


def _range(minimum: float | None, maximum: float | None) -> str:
    if minimum is not None and maximum is not None:
        return f" from {minimum} to {maximum}"
    words = {0: "zero", 1: "one"}
    if minimum is not None:
        return f", {words.get(int(minimum), minimum) if minimum == int(minimum) else minimum} or more"
    return "" if maximum is None else f", {maximum} or less"


def _or_none(meaning: str) -> str:
    return f", or None for {meaning}" if meaning else ""
