"""Encode records for the stores in memory: text and numbers are checked, JSON is stored as text or as a copy.

A store that shared mutable values with its callers could be changed through them. So JSON is encoded on the way in and
decoded on the way out, by the codec of the databases: memory accepts and returns the same values as they do. Most JSON
is flat, an object of plain values: a copy of it equals the decoded value and takes a fraction of the time. Plain text
is stored as is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from math import isfinite
from operator import attrgetter
from typing import Any, Generic, TypeVar

from penstock import checks
from penstock.errors import InvalidValue
from penstock.storage import codec
from penstock.storage.codec import MAX_NUMBER, MIN_NUMBER

Record = TypeVar("Record")

Check = Callable[[str, object], object]


class RecordCodec(Generic[Record]):
    """The kinds of a record's fields.

    `names` are for lookup and sorting, `texts` are any text, `documents` are JSON, and `objects` are the documents that
    must be objects; `optional` fields may be None, and `choices` are names from a closed list.
    """

    __slots__ = ("_checked", "_documents", "_fields", "_make", "_numbers", "_values")

    def __init__(
        self,
        kind: type[Record],
        *,
        names: Collection[str] = (),
        texts: Collection[str] = (),
        numbers: Collection[str] = (),
        documents: Collection[str] = (),
        objects: Collection[str] = (),
        optional: Collection[str] = (),
        choices: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        is_tuple = issubclass(kind, tuple)
        by_name: Sequence[str] = kind._fields if is_tuple else [field.name for field in fields(kind)]  # type: ignore[attr-defined, arg-type]
        check_of: dict[str, Check] = {
            **dict.fromkeys(names, codec.name),
            **dict.fromkeys(texts, checks.text),
            **dict.fromkeys(numbers, codec.number),
            **dict.fromkeys(objects, check_object),
            **{name: partial(checks.choice, choices=known) for name, known in (choices or {}).items()},
        }
        self._make: Callable[[Iterable[Any]], Record] = partial(tuple.__new__ if is_tuple else _construct, kind)  # type: ignore[type-var]
        self._values: Callable[[Record], Iterable[Any]] = iter if is_tuple else attrgetter(*by_name)  # type: ignore[assignment]
        self._fields = {
            name: (at, check_of.get(name), name in optional, name in documents) for at, name in enumerate(by_name)
        }
        self._numbers = [(name, by_name.index(name)) for name in numbers if name not in optional]
        required_numbers = {name for name, _ in self._numbers}
        self._checked = [
            (name, by_name.index(name), check, name in optional)
            for name, check in check_of.items()
            if name not in required_numbers
        ]
        self._documents = [(name, by_name.index(name)) for name in documents]

    def encode(self, record: Record) -> Record:
        """Encode a record (itself if it has no JSON fields); InvalidValue if a database could not store it."""
        values = [*self._values(record)]
        for name, at, check, is_optional in self._checked:
            value = values[at]
            if value is not None or not is_optional:
                check(name, value)
        for name, at in self._numbers:  # most fields of a run: valid ones need no call each
            value = values[at]
            if type(value) is not int or not MIN_NUMBER <= value <= MAX_NUMBER:
                codec.number(name, value)
        if not self._documents:
            return record
        for name, at in self._documents:
            values[at] = encode_json(name, values[at])
        return self._make(values)

    def change(self, record: Record, changes: Mapping[str, Any]) -> Record:
        """Return an encoded record with some fields changed; InvalidValue if a database could not store it."""
        values = [*self._values(record)]
        for name, value in changes.items():
            at, check, is_optional, is_document = self._fields[name]
            if check is not None and (value is not None or not is_optional):
                check(name, value)
            values[at] = encode_json(name, value) if is_document else value
        return self._make(values)

    def decode(self, record: Record) -> Record:
        """Decode a record, with its own copies of JSON values."""
        values = [*self._values(record)]
        for _, at in self._documents:
            stored = values[at]
            if stored is not None:
                values[at] = {**stored} if type(stored) is dict else decode_json(stored)
        return self._make(values)

    def is_same(self, one: Record, other: Record) -> bool:
        """Whether two encoded records are equal, ignoring the order of keys in their JSON."""
        return self._canonical(one) == self._canonical(other)

    def _canonical(self, record: Record) -> list[Any]:
        values = [*self._values(record)]
        for name, at in self._documents:
            values[at] = codec.canonical(name, decode_json(values[at]))
        return values


def _construct(kind: Callable[..., Record], values: Iterable[Any]) -> Record:
    return kind(*values)


def check_object(field: str, value: object) -> None:
    """Raise InvalidValue unless `value` is a JSON object."""
    if not isinstance(value, (dict, Mapping)):  # dict first: the check for Mapping is slower
        raise InvalidValue(field, value, "an object of JSON")


def encode_json(field: str, value: Any) -> object:
    """Encode a JSON value; InvalidValue if a database could not store it.

    None and ASCII text are stored as is, a flat object as a copy, and any other value as a tuple with its JSON text.
    """
    kind = type(value)
    if value is None or (kind is str and value.isascii()):
        return value
    return {**value} if kind is dict and is_flat(value) else (codec.encode_document(field, value),)


def decode_json(stored: Any) -> Any:
    """Decode a stored JSON value into an independent copy."""
    kind = type(stored)
    if kind is dict:
        return {**stored}
    return codec.decode_document("", "", stored[0]) if kind is tuple else stored


def is_flat(value: dict[Any, Any]) -> bool:
    """Whether a shallow copy equals the JSON round trip: ASCII keys, and only plain values that JSON preserves."""
    for key, item in value.items():
        kind = type(item)
        if type(key) is not str or not key.isascii():
            return False
        if kind is str:
            if not item.isascii():
                return False
        elif kind is int:
            if not MIN_NUMBER <= item <= MAX_NUMBER:
                return False
        elif kind is float:
            if not isfinite(item):
                return False
        elif item is not None and kind is not bool:
            return False
    return True
