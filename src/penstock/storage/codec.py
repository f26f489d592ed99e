"""Encode values as columns and decode them, in the same way for every store, including the stores in memory.

Every accepted value is read back unchanged; a value that would change is refused before anything is stored. There are
three kinds of columns:

- Names, for lookup and sorting (ids, owners, states): plain text. A NUL character or half of a surrogate pair, which
  not every database can store, is InvalidValue.
- All other text of people or models, and all JSON: JSON text in ASCII, in which such characters are escaped and so
  preserved. NaN, the infinities, keys that are not text, and values that are not JSON are InvalidValue. A tuple is
  read back as a list.
- Whole numbers, up to 2**63 - 1.

A stored value that cannot be decoded is StoreCorrupt: another program wrote it, or the disk is damaged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from penstock import checks
from penstock.errors import InvalidValue
from penstock.hosting.ports import StoreCorrupt
from penstock.tracing.jsonable import LEAVES

MAX_NUMBER = 2**63 - 1
MIN_NUMBER = -MAX_NUMBER
MAX_NAME = 1_000
"""Maximum length of a name in bytes: longer than any id, and two fit into a PostgreSQL index entry of 2,700 bytes."""
MAX_SHOWN = 200
"""Maximum length of the text shown in place of an unreadable one."""
NO_MATCH = " " * (MAX_NAME + 1)
"""A value longer than any valid name, so a lookup of it finds nothing."""
MAX_DEPTH = 100
"""Maximum nesting depth of values: low enough to decode any stored value, however much of the stack is in use."""

SOURCE_MARK = " "
"""The first character of a column with an object in its original spelling; other encodings begin with `{`."""

UNREADABLE = "(unreadable: "
"""Start of the text shown in place of an unreadable one."""
UNDECODABLE = "\ufffd"
"""Stands for bytes that are not UTF-8; nothing encoded here contains it, because JSON is stored in ASCII."""
TOO_DEEP = f"more than {MAX_DEPTH} levels"


def name(field: str, value: object) -> str:
    """Return `value` if it is text that a database can look up and sort by; raise InvalidValue otherwise."""
    if isinstance(value, str) and "\0" not in value and (len(value) if value.isascii() else _size(value)) <= MAX_NAME:
        return value
    raise InvalidValue(field, value, f"text of at most {MAX_NAME} bytes, without NUL or half a surrogate pair")


def lookup_key(value: object) -> str:
    """Return the name to look up; for a value that cannot be a name, return one that matches nothing."""
    try:
        return name("name", value)
    except InvalidValue:
        return NO_MATCH


def optional_name(field: str, value: object) -> str | None:
    """Like `name`, but None is allowed."""
    return None if value is None else name(field, value)


def number(field: str, value: object) -> int:
    """Return `value` if it is a whole number that fits into a column; raise InvalidValue otherwise."""
    if type(value) is int and MIN_NUMBER <= value <= MAX_NUMBER:
        return value
    raise InvalidValue(field, value, "a whole number of at most 2**63 - 1")


def optional_number(field: str, value: object) -> int | None:
    """Like `number`, but None is allowed."""
    return None if value is None else number(field, value)


def numbers(record: object, *fields: str) -> list[int]:
    """Return the values of these fields of a record; raise InvalidValue if one is not a valid `number`."""
    values = []
    for field in fields:
        value = getattr(record, field)
        values.append(value if type(value) is int and MIN_NUMBER <= value <= MAX_NUMBER else number(field, value))
    return values


def limit(value: object) -> int:
    """Return `value` if it is a valid page size, which may be 0; raise InvalidValue otherwise."""
    return checks.integer("limit", value, maximum=MAX_NUMBER)


def timeout(value: object) -> float:
    """Return `value` if it is a valid timeout, which may be infinite; raise InvalidValue otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise InvalidValue("timeout_s", value, "a number of seconds")
    return value


def encode_text(field: str, value: object) -> str:
    """Encode any text; equal texts have equal encodings."""
    return json.dumps(checks.text(field, value))


def encode_optional_text(field: str, value: object) -> str | None:
    """Like `encode_text`, but None is allowed."""
    return None if value is None else encode_text(field, value)


def encode_document(field: str, value: object) -> str:
    """Encode a JSON value."""
    if value is None:
        return "null"
    try:
        encoded = "".join(_pieces(value, 0))
        if type(value) not in LEAVES:
            _check_inside(value, MAX_DEPTH)
    except (TypeError, ValueError, RecursionError) as error:
        shown = f"this {type(value).__name__} ({str(error)[:200]})"  # showing it may take as long as encoding it
        raise InvalidValue(field, shown, f"JSON: no NaN, every key text, at most {MAX_DEPTH} levels") from None
    return encoded


def encode_object(field: str, value: object) -> str:
    """Encode a JSON object."""
    if not isinstance(value, (dict, Mapping)):
        raise InvalidValue(field, f"this {type(value).__name__}", "an object")
    return encode_document(field, value)


def encode_source(field: str, value: object, source: str) -> str:
    """Encode a JSON object as its source text, if there is one: the object and its text in one column.

    A text with U+FFFD is not kept, because in a column that character stands for bytes that could not be decoded.
    """
    encoded = encode_object(field, value)
    if not source:
        return encoded
    try:
        source.encode()
        is_its_text = canonical(field, json.loads(source)) == canonical(field, value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidValue("source", f"this text ({str(error)[:200]})", "JSON") from None
    if not is_its_text:
        raise InvalidValue("source", "another value", f"the JSON text of the {field}")
    return encoded if UNDECODABLE in source else SOURCE_MARK + source


def decode_source(encoded: str) -> str:
    """Return the source text that `encode_source` stored; empty if there was none."""
    return encoded[1:] if encoded.startswith(SOURCE_MARK) else ""


def is_same(one: object, other: object) -> bool:
    """Whether two values are the same JSON, ignoring the order of keys; 1, 1.0 and true are distinct."""
    return canonical("value", one) == canonical("value", other)


def canonical(field: str, value: object) -> str:
    """Return the canonical encoding of a JSON value, independent of key order; 1, 1.0 and true stay distinct."""
    return json.dumps(json.loads(encode_document(field, value)), sort_keys=True, separators=(",", ":"))


def decode_document(table: str, key: str, encoded: str) -> Any:
    """Decode a value that `encode_document` encoded."""
    try:
        value, end = _scan(encoded, 0)
        if end == len(encoded) and encoded.isascii():
            return value
    except (StopIteration, TypeError, ValueError, RecursionError):
        pass
    try:
        if UNDECODABLE in encoded:
            raise ValueError("bytes that are not UTF-8")
        return _decoder.decode(encoded)  # surrounding whitespace, or not JSON: then this raises the reason
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreCorrupt(table, key, f"it is not JSON ({error})") from None


def decode_object(table: str, key: str, encoded: str) -> dict[str, Any]:
    """Decode an object that `encode_document` encoded."""
    value = decode_document(table, key, encoded)
    if not isinstance(value, dict):
        raise StoreCorrupt(table, key, f"{type(value).__name__} where an object should be")
    return value


def decode_objects(table: str, keys: Callable[[int], str], encoded: Sequence[str]) -> list[dict[str, Any]]:
    """Decode objects that `encode_document` encoded, all at once, because that takes a fraction of the time.

    `keys` returns the key of the object at an index.
    """
    text = f"[{','.join(encoded)}]"
    try:
        values, end = _scan(text, 0)
        if end == len(text) and text.isascii() and [*map(type, values)] == [dict] * len(encoded):
            return values  # type: ignore[no-any-return]  # it is a list of objects
    except (StopIteration, TypeError, ValueError, RecursionError):
        pass
    return [decode_object(table, keys(index), each) for index, each in enumerate(encoded)]


def decode_optional_object(table: str, key: str, encoded: str) -> dict[str, Any] | None:
    """Decode an object or null that `encode_document` encoded."""
    return None if encoded == "null" else decode_object(table, key, encoded)


def decode_text(table: str, key: str, encoded: str) -> str:
    """Decode a text that `encode_text` encoded."""
    value = decode_document(table, key, encoded)
    if not isinstance(value, str):
        raise StoreCorrupt(table, key, f"{type(value).__name__} where a text should be")
    return value


def decode_optional_text(table: str, key: str, encoded: str | None) -> str | None:
    """Decode a text that `encode_optional_text` encoded."""
    return None if encoded is None else decode_text(table, key, encoded)


def decode_one_of(table: str, key: str, known: Collection[str], encoded: str) -> Any:
    """Return `encoded` if it is in `known`; raise StoreCorrupt otherwise."""
    if encoded not in known:
        raise StoreCorrupt(table, key, f"{encoded[:80]!r} is none of {', '.join(known)}")
    return encoded


def unreadable(error: StoreCorrupt) -> str:
    """Return the text to show in place of an unreadable one."""
    return f"{UNREADABLE}{error.why})"[:MAX_SHOWN]


def _size(value: str) -> float:
    """Return the size in bytes; infinite for text with half of a surrogate pair, which cannot be encoded."""
    try:
        return len(value.encode())
    except UnicodeEncodeError:
        return math.inf


def _plain(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not a value of JSON")


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError("a number is too large")
    return number


def _encoder() -> Callable[[object, int], Iterable[str]]:
    """Return a function for the pieces of a value's JSON; a value that contains itself fails by its infinite nesting.

    `JSONEncoder.encode` creates a new C encoder for each value, which takes longer than encoding a small value.
    """
    encoder = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=_plain, check_circular=False)
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return lambda value, _: encoder.iterencode(value)
    text = json.encoder.encode_basestring_ascii
    pieces: Callable[[object, int], Iterable[str]]
    pieces = make(None, _plain, text, None, encoder.key_separator, encoder.item_separator, False, False, False)
    return pieces


_pieces = _encoder()
_decoder = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
_scan: Callable[[str, int], tuple[Any, int]] = _decoder.scan_once  # type: ignore[attr-defined]


def _check_inside(value: object, levels: int) -> None:
    """Check the depth and the keys, which the encoder does not check: it would write the key 1 as "1"."""
    if isinstance(value, (list, tuple)):
        if not levels:
            raise ValueError(TOO_DEEP)
        for item in value:
            if type(item) not in LEAVES:
                _check_inside(item, levels - 1)
    elif isinstance(value, (dict, Mapping)):  # last: the check for Mapping is slower than that for dict
        if not levels:
            raise ValueError(TOO_DEEP)
        for key, item in value.items():
            if type(key) is not str and not isinstance(key, str):
                raise TypeError("a key is not text")
            if type(item) not in LEAVES:
                _check_inside(item, levels - 1)
