"""How a record is kept in memory: its texts and numbers checked, its JSON as text.

A store that kept what it was given would change with it, and one that gave it out could be changed through it. So JSON
is written down on the way in and read on the way out, by the codec that the databases use: what memory accepts, they
accept, and what comes back is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from penstock.errors import InvalidValue
from penstock.storage.sql import codec

Record = TypeVar("Record")


@dataclass(frozen=True, slots=True)
class Shape(Generic[Record]):
    """Which of a record's fields are what."""

    names: tuple[str, ...] = ()
    """Looked up and sorted by."""
    texts: tuple[str, ...] = ()
    """Anything that somebody said."""
    numbers: tuple[str, ...] = ()
    documents: tuple[str, ...] = ()
    """JSON."""
    objects: tuple[str, ...] = ()
    """Those of them that are objects."""
    optional: tuple[str, ...] = ()
    """Those that may be None."""
    choices: Mapping[str, Collection[str]] | None = None
    """Names out of a closed list."""

    def kept(self, record: Record) -> Record:
        """The record to keep; InvalidValue if a database could not."""
        self._check(record, self.names, codec.name)
        self._check(record, self.texts, check_text)
        self._check(record, self.numbers, codec.number)
        for name in self.objects:
            check_object(name, getattr(record, name))
        for name, known in (self.choices or {}).items():
            codec.one_of(name, getattr(record, name), known)
        return self._with(record, {name: codec.document(name, getattr(record, name)) for name in self.documents})

    def given(self, record: Record) -> Record:
        """The record as it came, with values of its own."""
        return self._with(record, {name: codec.read_document("", "", getattr(record, name)) for name in self.documents})

    def is_same(self, one: Record, other: Record) -> bool:
        """Whether two records that are kept are equal, whatever the order of keys in their JSON."""
        return self._canonical(one) == self._canonical(other)

    def _canonical(self, record: Record) -> Record:
        given = self.given(record)
        return self._with(record, {name: codec.canonical(name, getattr(given, name)) for name in self.documents})

    def _check(self, record: Record, fields: tuple[str, ...], check: Callable[[str, object], object]) -> None:
        for name in fields:
            value = getattr(record, name)
            if value is not None or name not in self.optional:
                check(name, value)

    @staticmethod
    def _with(record: Any, values: Mapping[str, Any]) -> Record:
        changed: Record = replace(record, **values)
        return changed


def check_text(field: str, value: object) -> None:
    """InvalidValue for what is not text at all."""
    if not isinstance(value, str):
        raise InvalidValue(field, value, "text")


def check_object(field: str, value: object) -> None:
    """InvalidValue for JSON that is not an object."""
    if not isinstance(value, Mapping):
        raise InvalidValue(field, value, "an object of JSON")


def is_same(one: object, other: object) -> bool:
    """Whether two values are the same JSON, whatever the order of keys; 1, 1.0 and true are three."""
    return codec.canonical("value", one) == codec.canonical("value", other)
