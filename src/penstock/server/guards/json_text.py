"""JSON from outside, read before anything else looks at it.

What a parser accepts and programs choke on is refused here, with its place: text that is not UTF-8, halves of surrogate
pairs, NUL, NaN and infinities, whole numbers that no database has, keys that are there twice, nesting that ends in a
RecursionError, and more values than anybody means to send.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from penstock.server.errors import ApiError

MAX_WHOLE_NUMBER = 2**63 - 1

Place = tuple[Any, Any] | None
"""The way to a value: the place it is in, and its key there; spelled out only when there is something to say."""


def read_json(raw: bytes, *, max_depth: int, max_values: int) -> Any:
    """The value in `raw`; ApiError says what is wrong and where."""
    value = _parsed(raw, max_depth)
    _check(value, max_depth, max_values, has_escapes=b"\\u" in raw)
    return value


def _parsed(raw: bytes, max_depth: int) -> Any:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad(400, "bad_text", f"byte {error.start} is not UTF-8") from None
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object)
    except RecursionError:
        raise _too_deep(max_depth, None) from None
    except json.JSONDecodeError as error:
        raise _bad(400, "bad_json", f"this is not JSON: {error.msg} at character {error.pos}") from None
    except ValueError:  # of int(): more digits than Python reads
        raise _bad(422, "bad_number", "a whole number has thousands of digits") from None


def _refuse_constant(name: str) -> Any:
    raise _bad(422, "bad_number", f"{name} is not a number of JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise _bad(422, "duplicate_key", f"the key {ascii(twice)[:80]} is there twice in one object")
    return found


def _check(value: Any, max_depth: int, max_values: int, *, has_escapes: bool) -> None:
    """Look at every value; without a loop in Python for texts that cannot hold anything odd."""
    todo: list[tuple[Any, Place, int]] = [(value, None, 0)]
    left = max_values
    while todo:
        one, place, depth = todo.pop()
        left -= 1
        if left < 0:
            raise _bad(422, "too_large", f"there are more than {max_values} values")
        if isinstance(one, str):
            if has_escapes:
                _check_text(one, place)
        elif isinstance(one, (dict, list)):
            if depth >= max_depth:
                raise _too_deep(max_depth, place)
            todo.extend((inside, (place, key), depth + 1) for key, inside in _inside(one, place, has_escapes))
        elif isinstance(one, (int, float)):
            _check_number(one, place)


def _inside(one: dict[str, Any] | list[Any], place: Place, has_escapes: bool) -> Iterator[tuple[Any, Any]]:
    if isinstance(one, list):
        return enumerate(one)
    if has_escapes:
        for key in one:
            _check_text(key, place)
    return iter(one.items())


def _check_text(text: str, place: Place) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _bad(422, "bad_text", "a text has half of a surrogate pair", place) from None
    if "\0" in text:
        raise _bad(422, "bad_text", "a text has a NUL character", place)


def _check_number(number: float, place: Place) -> None:
    if isinstance(number, int) and abs(number) > MAX_WHOLE_NUMBER:
        raise _bad(422, "bad_number", f"a whole number has more than {MAX_WHOLE_NUMBER.bit_length() + 1} bits", place)
    if not math.isfinite(number):
        raise _bad(422, "bad_number", "a number is too large", place)


def _too_deep(max_depth: int, place: Place) -> ApiError:
    return _bad(422, "too_deep", f"values are nested deeper than {max_depth} levels", place)


def _bad(status: int, code: str, message: str, place: Place = None) -> ApiError:
    path = _spelled(place)
    return ApiError(status, f"{path}: {message}", code=code, path=path)


def _spelled(place: Place) -> str:
    steps: list[str] = []
    while place is not None:
        place, key = place
        steps.append(
            f"[{key}]" if isinstance(key, int) else f".{key[:80]}" if key.isidentifier() else f"[{_quoted(key)}]"
        )
    return "$" + "".join(reversed(steps))[:500]


def _quoted(key: str) -> str:
    return json.dumps(key[:80])  # escapes whatever could not be sent
