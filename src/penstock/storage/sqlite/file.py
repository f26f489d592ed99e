"""One SQLite file that several threads and processes write.

It opens the file, makes a `with` block one transaction that is recorded whole or not at all, and reports failures. It
knows nothing of the contents of the tables.

Five properties of SQLite shape it:

- A transaction that reads first and writes later fails immediately if another connection wrote in between, whatever the
  busy timeout. So a writer starts with `BEGIN IMMEDIATE`. Then there is one writer at a time, and the rows that it has
  read cannot change until it commits.
- Locks belong to the process, and SQLite remembers which ones it has. A child made by `fork` remembers locks it does
  not have, and even a connection it opens itself relies on that memory. So no connection lives across a fork: it is
  closed just before, and parent and child each open their own at their next transaction.
- A deleted file stays writable for processes that have it open, and their writes are lost. So each transaction first
  checks that the path still leads to the file that was opened. A missing file is never created again, because a new
  ledger would have no spending in it.
- With a write-ahead log, committed data survives the process however it ends. It survives a power cut only if each
  commit waits for the disk, which `fsync` requests.
- Without `fsync`, two operations wait for the disk: folding the log into the file (a checkpoint), which SQLite does in
  the commit that finds the log long, and the first commit to a restarted log. So automatic checkpoints are off and the
  log is folded here; both operations are left to callers that can wait.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, TypeVar

from penstock.containment.ledger import WouldBlock
from penstock.errors import InvalidValue

T = TypeVar("T")

PAGE_SIZE = 1024
"""Small: a transaction changes a few short rows, and each page it touches is written whole."""
LOG_BYTES = 4_000 * PAGE_SIZE
"""Size of the log at which it is folded into the file, which waits for the disk."""
RETRY_INTERVAL_S = 0.001
"""Pause before a lock is tried again. SQLite's own handler waits longer each time, up to 100 ms, while newcomers take
the lock: of four busy processes, one waited for seconds. A constant pause treats all alike."""
SIDE_FILES = ("-wal", "-shm")
"""Suffixes of the files that SQLite keeps beside a database. They are parts of it, and have its mode."""

ADVICE = {
    "SQLITE_BUSY": "another process keeps it locked; find out which, and try again",
    "SQLITE_LOCKED": "another process keeps it locked; find out which, and try again",
    "SQLITE_FULL": "free space on its disk",
    "SQLITE_READONLY": "let this user write to the file and its folder",
    "SQLITE_CANTOPEN": "make its folder, and let this user write there",
    "SQLITE_PERM": "let this user write to the file and its folder",
    "SQLITE_IOERR": "look after its disk, and try again",
    "SQLITE_CORRUPT": "restore it from a backup",
    "SQLITE_NOTADB": "name another file, or restore it from a backup",
    "SQLITE_TOOBIG": "keep less in one row",
    "the file is gone": "put it back and open it anew; it is not made again, for that would forget everything",
}
"""Advice on what to do about an error, by a part of its message."""


@dataclass(frozen=True, slots=True)
class Schema:
    """The tables of a file, and the two numbers in its header that identify them."""

    application_id: int
    version: int
    statements: tuple[str, ...]
    upgrades: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Statements that bring a file of an older version, by that version, to the next one; they only add."""
    additions: tuple[str, ...] = ()
    """Statements that add what processes of this version can do without, where it is missing."""


class SqliteFile:
    """A file with the tables of `schema`, created if missing; `make_error` makes the error for a failed operation."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        schema: Schema,
        *,
        make_error: Callable[[str], Exception],
        busy_timeout_s: float,
        fsync: bool,
        factory: type[sqlite3.Connection],
        checkpoints: bool = True,
        is_tolerant: bool = False,
    ) -> None:
        """With `checkpoints`, transactions checkpoint a long log; otherwise the owner calls `checkpoint`.

        With `is_tolerant`, text that is not UTF-8 is always read as in `tolerant_text`.
        """
        self._text_factory = _decode_with_replacement if is_tolerant else str
        self.path = _check_path(path)
        self._path_text = str(self.path)  # faster to `stat` than a Path, before each transaction
        self._schema = schema
        self._make_error = make_error
        self._busy_timeout_s = busy_timeout_s
        self._synchronous = "FULL" if fsync else "NORMAL"
        self._factory = factory
        self._log_path = f"{self.path}-wal"
        self._checkpoints = checkpoints
        self._max_log_bytes = LOG_BYTES
        """Size of the log above which it is checkpointed; larger while a reader keeps the log from being emptied."""
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None
        """Device and inode of the file that was opened first; None before that, and after `close`."""
        with _FORK_LOCK:  # registered before a connection exists that a fork could catch
            _FILES.add(self)
        with self._exclusive():
            _make_private(self.path)
            self._connection = self._connect("rwc")

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Run the block as one transaction: it sees no concurrent changes, and all of its own are recorded or none."""
        with self._exclusive():
            connection = self._connected()
            try:
                self._retry_busy(lambda: connection.execute("BEGIN IMMEDIATE"))
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                self._undo(connection)
                raise
        if self._checkpoints and not _inline.is_on and self.has_long_log:
            self.checkpoint()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection for reading; each statement sees the file at one instant."""
        with self._exclusive():
            connection = self._connected()
            # The first reader after a writer died recovers its log, and other connections have to wait for that.
            self._retry_busy(lambda: connection.execute("PRAGMA schema_version").fetchone())
            yield connection

    def read(self, body: Callable[[sqlite3.Connection], T]) -> T:
        """Return what `body` reads, all from one instant; `body` changes nothing and may be run again."""
        with self._exclusive():
            connection = self._connected()
            return self._retry_busy(lambda: _read_and_roll_back(connection, body))

    @contextmanager
    def tolerant_text(self) -> Iterator[None]:
        """Read text that is not UTF-8 with a replacement character for the bad bytes; otherwise reading it fails.

        Only for as long as the block runs: a Python function for every text would slow down all reads. Another user of
        the file on another thread may read in the same way meanwhile, which does no harm.
        """
        with self._exclusive():
            connection = self._connected()
            connection.text_factory = _decode_with_replacement
        try:
            yield
        finally:
            connection.text_factory = self._text_factory

    @contextmanager
    def inline(self, *, to_write: bool = True) -> Iterator[None]:
        """Make the block raise WouldBlock where it would wait for another user of the file or for the disk."""
        if self._synchronous == "FULL" or self._connection is None or _inline.is_on:
            raise WouldBlock
        if to_write and not 0 < self._log_size() <= self._max_log_bytes:
            raise WouldBlock
        _inline.is_on = True
        try:
            yield
        finally:
            _inline.is_on = False

    @property
    def has_long_log(self) -> bool:
        """Whether the log is long enough for a checkpoint."""
        return self._log_size() > self._max_log_bytes

    def checkpoint(self) -> None:
        """Fold a long log into the file and empty it, as far as readers permit; waits for the disk alone.

        The rest stays in the log, where nothing is lost, and is tried again when the log has grown.
        """
        with self._lock:
            if self._connection is not None and self.has_long_log:  # else another caller has done it
                _checkpoint(self._connection)
            size = self._log_size()
            self._max_log_bytes = LOG_BYTES if size <= LOG_BYTES else size + LOG_BYTES

    def _log_size(self) -> int:
        try:
            return os.stat(self._log_path).st_size
        except OSError:
            return 0

    def close(self) -> None:
        """Close the file; every later operation fails. Closing is idempotent."""
        with self._lock:
            self._disconnect()
            self._identity = None

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the lock during the block, and raise its errors as those of the store."""
        if _inline.is_on:
            if not self._lock.acquire(blocking=False):
                raise WouldBlock
        elif not self._lock.acquire(timeout=self._busy_timeout_s):
            self._fail(f"other threads of this process have kept it busy for {self._busy_timeout_s:g} s")
        try:
            yield
        except sqlite3.Error as error:
            raise self._error(f"{error} ({getattr(error, 'sqlite_errorname', type(error).__name__)})") from error
        except OverflowError as error:
            raise self._error("a number is larger than 2**63 - 1") from error
        except UnicodeEncodeError as error:
            raise self._error(f"a name or key is not valid text: {error.reason}") from error
        except OSError as error:
            raise self._error(str(error)) from error
        finally:
            self._lock.release()

    def _error(self, why: str) -> Exception:
        return self._make_error(with_advice(f"{str(self.path)!r} cannot record: {why}"))

    def _fail(self, why: str) -> NoReturn:
        raise self._error(why)

    def _connected(self) -> sqlite3.Connection:
        if self._identity is None:
            self._fail("it was closed")
        self._check_identity()
        if self._connection is None:
            self._connection = self._connect("rw")
        return self._connection

    def _check_identity(self) -> None:
        try:
            found = _identity(self._path_text)
        except OSError as error:
            self._fail(f"the file is gone ({error.strerror})")
        if found != self._identity:
            self._fail("another file has taken its place; open that one anew if it is meant")

    def _connect(self, mode: str) -> sqlite3.Connection:
        if found := hindrance(self.path):
            self._fail("; ".join(found))
        connection = sqlite3.connect(
            f"{self.path.as_uri()}?mode={mode}",
            timeout=0,  # see RETRY_INTERVAL_S
            isolation_level=None,
            check_same_thread=False,
            factory=self._factory,
            uri=True,
        )
        connection.text_factory = self._text_factory
        try:
            self._retry_busy(lambda: self._prepare(connection))
            if self._identity is None:
                self._identity = _identity(self._path_text)
            self._check_identity()
        except BaseException:
            connection.close()
            raise
        return connection

    def _retry_busy(self, operation: Callable[[], T]) -> T:
        """Retry `operation` while the file is busy, until the busy timeout; raise WouldBlock if it must not wait."""
        deadline = None
        while True:
            try:
                return operation()
            except sqlite3.OperationalError as error:
                now = time.monotonic()
                if deadline is None:
                    deadline = now + self._busy_timeout_s
                if not _is_busy(error) or now >= deadline:
                    raise
                if _inline.is_on:
                    raise WouldBlock from None
            time.sleep(RETRY_INTERVAL_S)

    def _prepare(self, connection: sqlite3.Connection) -> None:
        connection.execute(f"PRAGMA page_size = {PAGE_SIZE}")
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute("PRAGMA journal_size_limit = 0")  # so that the size of the log file is its length
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute(f"PRAGMA synchronous = {self._synchronous}")
        is_made = self._is_made(connection)  # before changing a file of another application
        if self._identity is not None and not is_made:
            self._fail("it was emptied since it was opened")
        self._use_wal(connection)
        connection.execute("BEGIN IMMEDIATE")  # from here on no other writer is in the way
        if not self._is_made(connection):
            for statement in self._schema.statements:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {self._schema.application_id}")
            connection.execute(f"PRAGMA user_version = {self._schema.version}")
        else:
            self._upgrade(connection)
        for statement in self._schema.additions:
            connection.execute(statement)
        connection.execute("COMMIT")

    def _upgrade(self, connection: sqlite3.Connection) -> None:
        version = _number(connection, "PRAGMA user_version")
        while version in self._schema.upgrades:
            for statement in self._schema.upgrades[version]:
                connection.execute(statement)
            version += 1
            connection.execute(f"PRAGMA user_version = {version}")

    def _is_made(self, connection: sqlite3.Connection) -> bool:
        """Whether the tables exist; an error if they are another application's, or of a version unknown here."""
        if not has_tables(connection):
            return False
        if why := schema_mismatch(connection, self._schema):
            self._fail(why)
        return True

    def _use_wal(self, connection: sqlite3.Connection) -> None:
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            self._fail(f"there is no write-ahead log where it is, only {mode!r}")

    def _undo(self, connection: sqlite3.Connection) -> None:
        """Roll back; a connection that cannot even do that is closed."""
        if connection.in_transaction:
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
        if connection.in_transaction:
            self._disconnect()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def hindrance(path: Path) -> tuple[str, str] | None:
    """Return why this user cannot write to a database in that file, with advice; None if no reason is found.

    Call it before SQLite opens the file: SQLite opens a file it may only read, creates the files beside it equally
    unwritable, and leaves them there.
    """
    parts = [path, *(path.with_name(path.name + end) for end in SIDE_FILES)]
    if not os.path.isdir(path.parent):
        return f"there is no folder {path.parent}", "make it, or name another file"
    if os.path.isdir(path):
        return f"{path} is a folder", "name a file in it"
    if not all(map(os.path.exists, parts)) and not _is_writable(path.parent):
        return f"{path.parent} cannot be written", "let this user write there, or name another file"
    for part in parts:
        if _is_locked(part):
            other = "or name another file" if part == path else f"for it is a part of {path.name}"
            return f"{part} cannot be written", f"let this user write there, {other}"
    return None


def _is_locked(path: Path) -> bool:
    """Whether a file exists and may not be written; files beside a database come and go at any time."""
    return not _is_writable(path) and os.path.exists(path) and not _is_writable(path)


def _is_writable(path: Path) -> bool:
    return os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def with_advice(why: str) -> str:
    """Return the message of an error with advice on what to do about it, if any is known."""
    advice = next((advice for name, advice in ADVICE.items() if name in why), None)
    return why if advice is None or advice in why else f"{why}; {advice}"


def has_tables(connection: sqlite3.Connection) -> bool:
    """Whether the file contains anything."""
    return bool(_number(connection, "SELECT count(*) FROM sqlite_schema"))


def schema_mismatch(connection: sqlite3.Connection, schema: Schema) -> str:
    """Return why the tables in a file cannot be used with the schema; an empty string if they can, after upgrades."""
    if _number(connection, "PRAGMA application_id") != schema.application_id:
        return "it is a database of something else"
    version = _number(connection, "PRAGMA user_version")
    if version != schema.version and version not in schema.upgrades:
        known = f"its tables are of version {version}, and this Penstock knows version {schema.version}"
        return f"{known}; open it with the Penstock that wrote it, or a newer one"
    return ""


def _check_path(path: str | os.PathLike[str]) -> Path:
    text = os.fspath(path)
    if not text or text.startswith(":memory:") or "\0" in text:
        raise InvalidValue("path", text, "the path of a file; a store in memory is MemoryLedgerStore")
    return Path(text).absolute()


def _identity(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


def _number(connection: sqlite3.Connection, statement: str) -> int:
    (number,) = connection.execute(statement).fetchone()
    assert isinstance(number, int)
    return number


def _checkpoint(connection: sqlite3.Connection) -> None:
    """Fold the log while others may write; empty it, which makes them wait, only if all of it was folded."""
    with suppress(sqlite3.Error):
        is_busy, pages, folded = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        if not is_busy and pages == folded:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()


def _read_and_roll_back(connection: sqlite3.Connection, body: Callable[[sqlite3.Connection], T]) -> T:
    if connection.in_transaction:  # an earlier transaction could not be ended
        connection.execute("ROLLBACK")
    connection.execute("BEGIN")
    try:
        return body(connection)
    finally:
        connection.execute("ROLLBACK")


def _make_private(path: Path) -> None:
    """Create the file, if missing, for its owner alone; SQLite gives the files beside it the same mode."""
    with suppress(OSError):  # it exists, or SQLite reports why it cannot
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))


def _decode_with_replacement(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _is_busy(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF == sqlite3.SQLITE_BUSY  # the other bits are the kind of busy


class _Inline(threading.local):
    """Whether this thread must not wait."""

    is_on = False


_inline = _Inline()
_FILES: weakref.WeakSet[SqliteFile] = weakref.WeakSet()
_FORK_LOCK = threading.Lock()
_forking: list[SqliteFile] = []


def _before_fork() -> None:
    """Close every connection, and lock the files until the fork is done."""
    _FORK_LOCK.acquire()
    for file in list(_FILES):
        file._lock.acquire()
        _forking.append(file)
        file._disconnect()


def _after_fork() -> None:
    while _forking:
        _forking.pop()._lock.release()
    _FORK_LOCK.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
