"""How a record is kept in memory: its texts and numbers checked, its JSON as text.

A store that kept what it was given would change with it, and one that gave it out could be changed through it. So JSON
is written down on the way in and read on the way out, by the codec that the databases use: what memory accepts, they
accept, and what comes back is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from operator import attrgetter
from typing import Any, Generic, TypeVar

from penstock.errors import InvalidValue
from penstock.storage.sql import codec

Record = TypeVar("Record")

Check = Callable[[str, object], object]


class Shape(Generic[Record]):
    """Which of a record's fields are what.

    `names` are looked up and sorted by, `texts` are anything that somebody said, `documents` are JSON, and `objects`
    those of them that are objects; what is `optional` may be None, and `choices` are names out of a closed list.
    """

    __slots__ = ("_at", "_checked", "_checks", "_documents", "_make", "_values", "_written")

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
            **{name: partial(_check_choice, known) for name, known in (choices or {}).items()},
        }
        self._make: Callable[[Iterable[Any]], Record] = kind._make if is_tuple else partial(_made, kind)  # type: ignore[attr-defined]
        self._values: Callable[[Record], Iterable[Any]] = iter if is_tuple else attrgetter(*by_name)  # type: ignore[assignment]
        self._at = {name: at for at, name in enumerate(by_name)}
        self._checks = {name: (check, name in optional) for name, check in checks.items()}
        self._checked = [(name, self._at[name], *self._checks[name]) for name in checks]
        self._documents = frozenset(documents)
        self._written = [(name, self._at[name]) for name in documents]

    def kept(self, record: Record) -> Record:
        """The record to keep, itself if nothing in it is JSON; InvalidValue if a database could not."""
        values = [*self._values(record)]
        for name, at, check, is_optional in self._checked:
            value = values[at]
            if value is not None or not is_optional:
                check(name, value)
        if not self._written:
            return record
        for name, at in self._written:
            values[at] = codec.document(name, values[at])
        return self._make(values)

    def changed(self, record: Record, changes: Mapping[str, Any]) -> Record:
        """A record that is kept, with other values in some fields; InvalidValue if a database could not."""
        values = [*self._values(record)]
        for name, value in changes.items():
            if name in self._checks:
                check, is_optional = self._checks[name]
                if value is not None or not is_optional:
                    check(name, value)
            values[self._at[name]] = codec.document(name, value) if name in self._documents else value
        return self._make(values)

    def given(self, record: Record) -> Record:
        """The record as it came, with values of its own."""
        values = [*self._values(record)]
        for _, at in self._written:
            values[at] = codec.read_document("", "", values[at])
        return self._make(values)

    def is_same(self, one: Record, other: Record) -> bool:
        """Whether two records that are kept are equal, whatever the order of keys in their JSON."""
        return one == other or self._canonical(one) == self._canonical(other)

    def _canonical(self, record: Record) -> list[Any]:
        values = [*self._values(record)]
        for name, at in self._written:
            values[at] = codec.canonical(name, codec.read_document("", "", values[at]))
        return values


def _made(kind: Callable[..., Record], values: Iterable[Any]) -> Record:
    return kind(*values)


def _check_choice(known: Collection[str], field: str, value: object) -> None:
    codec.one_of(field, value, known)


def check_text(field: str, value: object) -> None:
    """InvalidValue for what is not text at all."""
    if not isinstance(value, str):
        raise InvalidValue(field, value, "text")


def check_object(field: str, value: object) -> None:
    """InvalidValue for JSON that is not an object."""
    if not isinstance(value, (dict, Mapping)):  # a dict is known for one at once, a Mapping is asked for
        raise InvalidValue(field, value, "an object of JSON")


def is_same(one: object, other: object) -> bool:
    """Whether two values are the same JSON, whatever the order of keys; 1, 1.0 and true are three."""
    return codec.canonical("value", one) == codec.canonical("value", other)
