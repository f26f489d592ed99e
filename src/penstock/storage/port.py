"""The database interface of the stores.

A transaction body is a coroutine function that receives a transaction and awaits nothing else. So it is written once,
and PostgreSQL can run it on the event loop, SQLite from start to end on its own thread. Statements are SQL that both
databases accept, with `?` for each value. This module is independent of the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from penstock.storage.faults import RowFaults

T = TypeVar("T")

Value = str | int | bytes | None
Row = Sequence[Any]


@dataclass(frozen=True, slots=True)
class Dialect:
    """The clauses that differ between the databases; each is appended to a SELECT."""

    name: str
    update_lock: str
    """Lock the selected rows against other writers until the transaction ends."""
    share_lock: str
    """Lock the selected rows against changes; other transactions may hold the same lock."""
    skip_locked: str
    """Lock the selected rows for a change, and skip rows that another transaction has locked."""


class Transaction(Protocol):
    """The reads and writes of a body; rows that it has read stay unchanged only if it locked them."""

    dialect: Dialect
    claims: dict[str, tuple[int, str]]
    """Epochs of runs whose rows this transaction has locked, each with the lock; it changes none of these epochs."""

    async def rows(self, statement: str, *values: Value) -> Sequence[Row]:
        """Return the rows that the statement selects."""

    async def row(self, statement: str, *values: Value) -> Row | None:
        """Return the first row that the statement selects; None if there is none."""

    async def run(self, statement: str, *values: Value) -> int:
        """Run a statement that changes rows, and return their number."""

    async def run_many(self, statement: str, values: Iterable[Sequence[Value]]) -> None:
        """Run the statement once for each sequence of values."""

    def notify(self, topic: str) -> None:
        """Wake all waiters for the topic, in this and other processes, once the transaction is committed."""


TransactionBody = Callable[[Transaction], Coroutine[Any, Any, T]]
"""The reads and writes of one transaction."""
Unit = Callable[[Any], Coroutine[Any, Any, T]]
"""The body of a transaction over several stores: it receives those stores, and awaits nothing else."""


class Database(Protocol):
    """Runs transactions, each committed completely or not at all; StoreUnavailable means that one was not committed."""

    faults: RowFaults
    """Rows that could not be decoded: those that stores skip, and those for which a body raised StoreCorrupt."""

    async def write(self, body: TransactionBody[T], *, inline: bool = False) -> T:
        """Run the body in a transaction, and return its result once the transaction is committed.

        With `inline` the body may run on the event loop: pass it for bodies that read and write at most INLINE_MAX_ROWS
        rows, by key. A body that exceeds that is rolled back and restarted off the loop.

        A body may run more than once before it is committed, so it must only read and write. If the caller is cancelled
        meanwhile, the transaction is either committed or not, and never in part.
        """

    async def read(self, body: TransactionBody[T], *, inline: bool = False, single: bool = False) -> T:
        """Run a body that changes nothing; it reads one consistent snapshot.

        Pass `inline` for bodies that read by key, without sorting. One that reads more than INLINE_MAX_ROWS rows is
        restarted off the loop. Pass `single` for bodies that nearly always read with a single statement, which needs no
        transaction of its own; one that makes another statement is restarted in a transaction.
        """

    @property
    def version(self) -> int:
        """The number of notifications so far: get it before reading, so that `wait` misses none after that."""

    async def wait(self, topic: str, seen: int, timeout_s: float) -> None:
        """Wait for a notification of the topic since `version` was `seen`, a possibly missed one, or the timeout.

        Wake-ups may be spurious: the caller must read again afterwards.
        """

    async def close(self) -> None:
        """Finish pending operations and release all resources; later operations raise StoreUnavailable."""


class SqlStore:
    """A store whose methods each run one transaction of a database, or join the open one."""

    __slots__ = ("_database",)

    def __init__(self, database: Database) -> None:
        self._database = database


def drive(body: Coroutine[Any, Any, T]) -> T:
    """Run a body to its end without an event loop, and return its result; its transaction must never suspend.

    A body that yields to the event loop (`asyncio.sleep(0)`) continues immediately.
    """
    while True:
        try:
            awaited = body.send(None)
        except StopIteration as done:
            result: T = done.value
            return result
        if awaited is not None:
            body.close()
            raise RuntimeError("a transaction awaited something that is not one of its stores")


@dataclass(frozen=True, slots=True)
class TableCheck:
    """How to check that every row of a table can be decoded."""

    table: str
    columns: str
    """The columns that `decode` receives, in its order."""
    keys: tuple[str, ...]
    """Columns of a unique key, by which the rows are read page by page."""
    first: tuple[Value, ...]
    """A value of the key that comes before every row's."""
    decode: Callable[[Row], object]
    """Raises StoreCorrupt for a row that cannot be decoded."""

    @property
    def select(self) -> str:
        """The statement for the page after the values of a key."""
        keys = ", ".join(self.keys)
        after = f"({keys}) > ({placeholders(len(self.keys))})"
        return f"SELECT {keys}, {self.columns} FROM {self.table} WHERE {after} ORDER BY {keys} LIMIT ?"


INLINE_MAX_ROWS = 32
"""Maximum number of rows that a body may read or write on the event loop."""

MAX_PLACEHOLDERS = 10_000
"""Maximum number of values in one list; both databases accept about three times as many per statement."""


def chunks(values: Sequence[str]) -> Iterator[Sequence[str]]:
    """Split the values into chunks of at most MAX_PLACEHOLDERS."""
    for first in range(0, len(values), MAX_PLACEHOLDERS):
        yield values[first : first + MAX_PLACEHOLDERS]


def placeholders(count: int) -> str:
    """Return `count` placeholders, separated by commas."""
    return ", ".join("?" * count)
