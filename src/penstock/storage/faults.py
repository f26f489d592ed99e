"""Rows that could not be decoded, as found while reading a database.

One unreadable row must not harm the others, so most readers skip it. Skipped rows are noted here for the operator, in a
bounded list that a complete check of the tables replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from penstock.hosting.ports import StoreCorrupt

T = TypeVar("T")
R = TypeVar("R")

MAX_FAULTS = 1_000
"""Maximum number of unreadable rows that are remembered; any further ones are only counted as "or more"."""


class RowFaults:
    """The unreadable rows of one database, by table and key.

    Notes come from the threads of a database too: each is one assignment to a dict, which needs no lock.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], StoreCorrupt] = {}

    def __len__(self) -> int:
        return len(self._found)

    @property
    def rows(self) -> Sequence[StoreCorrupt]:
        """The unreadable rows, by table and key."""
        return [error for _, error in sorted([*self._found.items()], key=lambda item: item[0])]

    def note(self, error: StoreCorrupt) -> None:
        """Remember an unreadable row."""
        if len(self._found) < MAX_FAULTS or (error.table, error.key) in self._found:
            # Without its traceback, whose frames refer to a transaction.
            self._found[error.table, error.key] = StoreCorrupt(error.table, error.key, error.why)

    def replace(self, errors: Iterable[StoreCorrupt]) -> None:
        """Remember these rows instead of all earlier ones: rows that were repaired or removed are forgotten."""
        self._found = {}
        for error in errors:
            self.note(error)

    def readable(self, rows: Iterable[R], decode: Callable[[R], T]) -> list[T]:
        """Return the decoded rows; a row that cannot be decoded is noted and left out."""
        found: list[T] = []
        for row in rows:
            try:
                found.append(decode(row))
            except StoreCorrupt as error:
                self.note(error)
        return found
