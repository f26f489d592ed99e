"""What a store needs of a database.

An act is a coroutine that is given a transaction and waits for nothing but it: then PostgreSQL can run it on the event
loop, and SQLite from beginning to end on a thread of its own, and it is written once. Statements are SQL that both
understand, with `?` for each value. It does not know what is in the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

Value = str | int | bytes | None
Row = Sequence[Any]


@dataclass(frozen=True, slots=True)
class Dialect:
    """Where the two databases need other words for the same thing; each stands at the end of a SELECT."""

    name: str
    update_lock: str
    """Nobody else writes for the rows that were read, until the transaction has ended."""
    share_lock: str
    """Nobody changes the rows that were read; others may hold on to them too."""
    skip_locked: str
    """Take rows to change them, and pass over those that somebody is about to change."""


class Transaction(Protocol):
    """What an act reads and writes through; what it has read stays true as far as it was locked."""

    dialect: Dialect

    async def rows(self, statement: str, *values: Value) -> Sequence[Row]:
        """What the statement gives."""

    async def row(self, statement: str, *values: Value) -> Row | None:
        """The first row it gives; None if there is none."""

    async def run(self, statement: str, *values: Value) -> int:
        """Change something; how many rows."""

    async def run_many(self, statement: str, values: Iterable[Sequence[Value]]) -> None:
        """The same change for each of them."""

    def ring(self, topic: str) -> None:
        """Wake whoever waits for the topic, here and elsewhere, once this is committed."""


Act = Callable[[Transaction], Coroutine[Any, Any, T]]


class Database(Protocol):
    """Acts, each recorded whole or not at all. StoreUnavailable says that one could not be."""

    async def write(self, act: Act[T], *, brief: bool = False) -> T:
        """Run the act in a transaction; when this returns, it is committed.

        An act is brief if it finds and makes but a FEW rows, by keys: it may be done at once, on the event loop. One
        that turns out not to be is undone, and begun anew elsewhere.

        It may run more than once before it is, so it does nothing but read and write. A caller that is cancelled
        meanwhile may find the act done or not done, and never half done.
        """

    async def read(self, act: Act[T], *, brief: bool = False) -> T:
        """Run an act that changes nothing; all it reads is of one instant.

        One that looks by keys, and has nothing sorted, is brief: if the rows are not few, it is begun anew elsewhere.
        """

    @property
    def rung(self) -> int:
        """How often bells have rung: ask before looking, so that nothing is missed between that and `wait`."""

    async def wait(self, topic: str, seen: int, timeout_s: float) -> None:
        """Sleep until the topic is rung after `rung` gave `seen`, the time is over, or something may have been missed.

        Whoever waits looks again afterwards: it may be woken for nothing.
        """

    async def close(self) -> None:
        """Finish what was asked for, then give everything back; what comes after is StoreUnavailable."""


FEW = 32
"""So many rows an act that is brief may find or make."""

MOST_MARKS = 10_000
"""So many values may stand in one list; both databases take about three times as many in a statement."""


def portions(values: Sequence[str]) -> Iterator[Sequence[str]]:
    """The values, as many at a time as may stand in one list."""
    for first in range(0, len(values), MOST_MARKS):
        yield values[first : first + MOST_MARKS]


def marks(count: int) -> str:
    """So many placeholders, as they stand in a list."""
    return ", ".join("?" * count)
