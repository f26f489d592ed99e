"""How values become columns, and columns values: decided once, for every store, those in memory too.

Whatever is accepted comes back exactly as it was, and whatever would not is refused before anything is written. There
are three kinds of columns:

- Names, to look up and sort by (ids, owners, states): plain text. A NUL character or half of a surrogate pair, which
  not every database can keep, is InvalidValue.
- Everything else that people or models say, and all JSON: a JSON text in ASCII, in which such characters are escapes,
  so that they come back. NaN and the infinities, keys that are no text, and what is no JSON at all, are InvalidValue.
  A tuple is a list, as everywhere in JSON.
- Whole numbers, up to 2**63 - 1.

What is read and cannot be understood is StoreCorrupt: somebody else wrote it, or the disk did.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from penstock.errors import InvalidValue, PenstockError
from penstock.tracing.jsonable import LEAVES

MAX_NUMBER = 2**63 - 1
MIN_NUMBER = -MAX_NUMBER
MAX_NAME = 1_000
"""In bytes: longer than any id, and two of them are short enough for an index of PostgreSQL, which takes 2,700."""
NOBODY = " " * (MAX_NAME + 1)
"""Longer than a name can be, so nothing is ever found under it."""
MAX_DEPTH = 100
"""So deeply values may be nested: whoever could write them can read them, however much of the stack is in use."""

TOO_DEEP = f"more than {MAX_DEPTH} levels"


class StoreCorrupt(PenstockError):
    """A row that cannot be read back: `table` and `key` say which, `why` what is wrong with it."""

    def __init__(self, table: str, key: str, why: str) -> None:
        self.table = table
        self.key = key
        self.why = why
        super().__init__(
            f"the row {key!r} of table {table!r} cannot be read: {why}; restore it from a backup, or remove it"
        )


def name(field: str, value: object) -> str:
    """Text that a database can look up and sort by."""
    if isinstance(value, str) and "\0" not in value and (len(value) if value.isascii() else _size(value)) <= MAX_NAME:
        return value
    raise InvalidValue(field, value, f"text of at most {MAX_NAME} bytes, without NUL or half a surrogate pair")


def sought(value: object) -> str:
    """The name to look for; for what cannot be a name, one that nothing is found under."""
    try:
        return name("name", value)
    except InvalidValue:
        return NOBODY


def optional_name(field: str, value: object) -> str | None:
    """The same, or None."""
    return None if value is None else name(field, value)


def number(field: str, value: object) -> int:
    """A whole number that fits into a column."""
    if type(value) is int and MIN_NUMBER <= value <= MAX_NUMBER:
        return value
    raise InvalidValue(field, value, "a whole number of at most 2**63 - 1")


def optional_number(field: str, value: object) -> int | None:
    """The same, or None."""
    return None if value is None else number(field, value)


def limit(value: object) -> int:
    """How long a page may be; one of nothing is fine."""
    most = number("limit", value)
    if most < 0:
        raise InvalidValue("limit", value, "zero or more")
    return most


def timeout(value: object) -> float:
    """A time to wait; the infinite one is fine."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise InvalidValue("timeout_s", value, "a number of seconds")
    return value


def one_of(field: str, value: object, known: Collection[str]) -> str:
    """A name out of a closed list."""
    if not isinstance(value, str) or value not in known:
        raise InvalidValue(field, value, f"one of {', '.join(sorted(known))}")
    return value


def text(field: str, value: object) -> str:
    """Any text at all, as it is kept; equal texts are kept equal."""
    if not isinstance(value, str):
        raise InvalidValue(field, value, "text")
    return json.dumps(value)


def optional_text(field: str, value: object) -> str | None:
    """The same, or None."""
    return None if value is None else text(field, value)


def document(field: str, value: object) -> str:
    """A value of JSON, as it is kept."""
    if value is None:
        return "null"
    try:
        written = _write(value)
        if type(value) not in LEAVES:
            _check_inside(value, MAX_DEPTH)
    except (TypeError, ValueError, RecursionError) as error:
        shown = f"this {type(value).__name__} ({str(error)[:200]})"  # to show it may take as long as to write it
        raise InvalidValue(field, shown, f"JSON: no NaN, every key text, at most {MAX_DEPTH} levels") from None
    return written


def object_document(field: str, value: object) -> str:
    """An object of JSON, as it is kept."""
    if not isinstance(value, (dict, Mapping)):
        raise InvalidValue(field, f"this {type(value).__name__}", "an object")
    return document(field, value)


def canonical(field: str, value: object) -> str:
    """The one way to write a value of JSON, whatever the order of its keys; 1, 1.0 and true are three values."""
    return json.dumps(json.loads(document(field, value)), sort_keys=True, separators=(",", ":"))


def read_document(table: str, key: str, written: str) -> Any:
    """The value that `document` wrote."""
    try:
        value, end = _scan(written, 0)
        if end == len(written):
            return value
    except (StopIteration, TypeError, ValueError, RecursionError):
        pass
    try:
        return json.loads(written)  # it has spaces around it, or is none: this says what is wrong with it
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreCorrupt(table, key, f"no JSON ({error})") from None


def read_object(table: str, key: str, written: str) -> dict[str, Any]:
    """The object that `document` wrote."""
    value = read_document(table, key, written)
    if not isinstance(value, dict):
        raise StoreCorrupt(table, key, f"{type(value).__name__} where an object should be")
    return value


def read_text(table: str, key: str, written: str) -> str:
    """The text that `text` wrote."""
    value = read_document(table, key, written)
    if not isinstance(value, str):
        raise StoreCorrupt(table, key, f"{type(value).__name__} where a text should be")
    return value


def read_optional_text(table: str, key: str, written: str | None) -> str | None:
    """The text that `optional_text` wrote."""
    return None if written is None else read_text(table, key, written)


def read_one_of(table: str, key: str, known: Collection[str], written: str) -> Any:
    """A name out of a closed list."""
    if written not in known:
        raise StoreCorrupt(table, key, f"{written!r} is none of {', '.join(known)}")
    return written


def _size(value: str) -> float:
    """In bytes; no end of them for half of a surrogate pair, which cannot be written."""
    try:
        return len(value.encode())
    except UnicodeEncodeError:
        return math.inf


def _plain(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not a value of JSON")


def _writer() -> Callable[[object], str]:
    """How JSON is written: what contains itself is nested without end, and refused for that.

    `encode` makes the part that is written in C anew for each value, which takes longer than to write a small one.
    """
    encoder = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=_plain, check_circular=False)
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return encoder.encode
    text = json.encoder.encode_basestring_ascii
    parts = make(None, _plain, text, None, encoder.key_separator, encoder.item_separator, False, False, False)
    return lambda value: "".join(parts(value, 0))


_write = _writer()
_scan: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


def _check_inside(value: object, levels: int) -> None:
    """What the encoder lets pass: depth, and the key 1, which it would write as "1"."""
    if isinstance(value, (list, tuple)):
        if not levels:
            raise ValueError(TOO_DEEP)
        for one in value:
            if type(one) not in LEAVES:
                _check_inside(one, levels - 1)
    elif isinstance(value, (dict, Mapping)):  # last: a dict is known for one at once, but a Mapping is asked for
        if not levels:
            raise ValueError(TOO_DEEP)
        for key, one in value.items():
            if type(key) is not str and not isinstance(key, str):
                raise TypeError("a key is no text")
            if type(one) not in LEAVES:
                _check_inside(one, levels - 1)
