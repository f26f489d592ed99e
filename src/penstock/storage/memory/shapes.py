"""How a record is kept in memory: its texts and numbers checked, its JSON as text, or copied where that is the same.

A store that kept what it was given would change with it, and one that gave it out could be changed through it. So JSON
is written down on the way in and read on the way out, by the codec that the databases use: what memory accepts, they
accept, and what comes back is the same. Most of it is flat, an object of plain values: a copy of that is what would
come back, for a fraction of the time, and so is a plain text itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from math import isfinite
from operator import attrgetter
from typing import Any, Generic, TypeVar

from penstock.errors import InvalidValue
from penstock.storage.sql import codec
from penstock.storage.sql.codec import MAX_NUMBER, MIN_NUMBER

Record = TypeVar("Record")

Check = Callable[[str, object], object]


class Shape(Generic[Record]):
    """Which of a record's fields are what.

    `names` are looked up and sorted by, `texts` are anything that somebody said, `documents` are JSON, and `objects`
    those of them that are objects; what is `optional` may be None, and `choices` are names out of a closed list.
    """

    __slots__ = ("_checked", "_counted", "_fields", "_make", "_values", "_written")

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
        by_name: Sequence[str] = kind._fields if is_tuple else [one.name for one in fields(kind)]  # type: ignore[attr-defined, arg-type]
        checks: dict[str, Check] = {
            **dict.fromkeys(names, codec.name),
            **dict.fromkeys(texts, check_text),
            **dict.fromkeys(numbers, codec.number),
            **dict.fromkeys(objects, check_object),
            **{name: partial(codec.one_of, known=known) for name, known in (choices or {}).items()},
        }
        self._make: Callable[[Iterable[Any]], Record] = partial(tuple.__new__ if is_tuple else _made, kind)  # type: ignore[type-var]
        self._values: Callable[[Record], Iterable[Any]] = iter if is_tuple else attrgetter(*by_name)  # type: ignore[assignment]
        self._fields = {
            name: (at, checks.get(name), name in optional, name in documents) for at, name in enumerate(by_name)
        }
        self._counted = [(name, by_name.index(name)) for name in numbers if name not in optional]
        counted = {name for name, _ in self._counted}
        self._checked = [
            (name, by_name.index(name), check, name in optional)
            for name, check in checks.items()
            if name not in counted
        ]
        self._written = [(name, by_name.index(name)) for name in documents]

    def kept(self, record: Record) -> Record:
        """The record to keep, itself if nothing in it is JSON; InvalidValue if a database could not."""
        values = [*self._values(record)]
        for name, at, check, is_optional in self._checked:
            value = values[at]
            if value is not None or not is_optional:
                check(name, value)
        for name, at in self._counted:  # most fields of a run: those that are well need no call each
            value = values[at]
            if type(value) is not int or not MIN_NUMBER <= value <= MAX_NUMBER:
                codec.number(name, value)
        if not self._written:
            return record
        for name, at in self._written:
            values[at] = to_keep(name, values[at])
        return self._make(values)

    def changed(self, record: Record, changes: Mapping[str, Any]) -> Record:
        """A record that is kept, with other values in some fields; InvalidValue if a database could not."""
        values = [*self._values(record)]
        for name, value in changes.items():
            at, check, is_optional, is_document = self._fields[name]
            if check is not None and (value is not None or not is_optional):
                check(name, value)
            values[at] = to_keep(name, value) if is_document else value
        return self._make(values)

    def given(self, record: Record) -> Record:
        """The record as it came, with values of its own."""
        values = [*self._values(record)]
        for _, at in self._written:
            kept = values[at]
            if kept is not None:
                values[at] = {**kept} if type(kept) is dict else to_give(kept)
        return self._make(values)

    def is_same(self, one: Record, other: Record) -> bool:
        """Whether two records that are kept are equal, whatever the order of keys in their JSON."""
        return self._canonical(one) == self._canonical(other)

    def _canonical(self, record: Record) -> list[Any]:
        values = [*self._values(record)]
        for name, at in self._written:
            values[at] = codec.canonical(name, to_give(values[at]))
        return values


def _made(kind: Callable[..., Record], values: Iterable[Any]) -> Record:
    return kind(*values)


def check_text(field: str, value: object) -> None:
    """InvalidValue for what is not text at all."""
    if not isinstance(value, str):
        raise InvalidValue(field, value, "text")


def check_object(field: str, value: object) -> None:
    """InvalidValue for JSON that is not an object."""
    if not isinstance(value, (dict, Mapping)):  # a dict is known for one at once, a Mapping is asked for
        raise InvalidValue(field, value, "an object of JSON")


def to_keep(field: str, value: Any) -> object:
    """JSON as it is kept; InvalidValue if a database could not keep it.

    None and plain text are kept as they are, a flat object as a copy, and of all else a tuple with what was written.
    """
    kind = type(value)
    if value is None or (kind is str and value.isascii()):
        return value
    return {**value} if kind is dict and is_flat(value) else (codec.document(field, value),)


def to_give(kept: Any) -> Any:
    """The JSON that is kept, with values of its own."""
    kind = type(kept)
    if kind is dict:
        return {**kept}
    return codec.read_document("", "", kept[0]) if kind is tuple else kept


def is_flat(value: dict[Any, Any]) -> bool:
    """Whether nothing is in it that JSON would write in another way, or not at all."""
    for key, one in value.items():
        kind = type(one)
        if type(key) is not str or not key.isascii():
            return False
        if kind is str:
            if not one.isascii():
                return False
        elif kind is int:
            if not MIN_NUMBER <= one <= MAX_NUMBER:
                return False
        elif kind is float:
            if not isfinite(one):
                return False
        elif one is not None and kind is not bool:
            return False
    return True


def is_same(one: object, other: object) -> bool:
    """Whether two values are the same JSON, whatever the order of keys; 1, 1.0 and true are three."""
    return codec.canonical("value", one) == codec.canonical("value", other)
