"""One SQLite file that several threads and processes write.

It knows how to open the file, how to make what happens in a `with` block one act that is recorded whole or not at all,
and how to say that it could not. It does not know what is in the tables.

Four things about SQLite shape it:

- A transaction that reads first and writes later fails at once if somebody else wrote in between, whatever the busy
  timeout. So whoever means to write says so at the beginning: `BEGIN IMMEDIATE`. Then there is one writer at a time,
  and what it has read stays true until it commits.
- Locks belong to the process, and SQLite remembers which ones it has. A child made by `fork` remembers locks it does
  not have, and even a connection it opens itself goes by that memory. So no connection lives across a fork: it is
  closed just before, and parent and child each open their own with their next act.
- A file that is deleted stays writable for whoever has it open, and what is written there is lost. So each act first
  looks whether the path still leads to the file that was opened. What is gone is never made anew: that would be a
  ledger in which nothing was spent.
- With a write-ahead log, what was committed survives the process however it ends. It survives a power cut only if each
  commit waits for the disk, which `fsync` asks for.
- Without `fsync`, two things wait for the disk: to fold the log into the file, which SQLite does in the commit that
  finds the log long, and the first commit of a log that is begun anew. So SQLite is told to leave the one, and it is
  done here; and both are for those who can wait.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from penstock.containment.ledger import WouldWait
from penstock.errors import InvalidValue

T = TypeVar("T")

PAGE_SIZE = 1024
"""An act changes a few short rows, and each page it touches is written whole."""
LOG_BYTES = 4_000 * PAGE_SIZE
"""How long the log grows before it is folded into the file, which waits for the disk."""
PAUSE_S = 0.001
"""How long to wait before a lock is asked for again. SQLite's own way is to wait longer each time, up to 100 ms, while
newcomers take the lock: of four busy processes, one waited for seconds. Asking evenly treats all alike."""
BESIDE = ("-wal", "-shm")
"""How the names of the files end that SQLite has beside one. They are parts of it, and have its mode."""

ADVICE = {
    "SQLITE_BUSY": "another process keeps it locked; find out which, and ask again",
    "SQLITE_LOCKED": "another process keeps it locked; find out which, and ask again",
    "SQLITE_FULL": "free space on its disk",
    "SQLITE_READONLY": "let this user write to the file and its folder",
    "SQLITE_CANTOPEN": "make its folder, and let this user write there",
    "SQLITE_PERM": "let this user write to the file and its folder",
    "SQLITE_IOERR": "look after its disk, and ask again",
    "SQLITE_CORRUPT": "restore it from a backup",
    "SQLITE_NOTADB": "name another file, or restore it from a backup",
    "SQLITE_TOOBIG": "keep less in one row",
    "the file is gone": "put it back and open it anew; it is not made again, for that would forget everything",
}
"""What to do about a fault, by what is said of it."""


@dataclass(frozen=True, slots=True)
class Schema:
    """The tables of a file, and the two numbers in its header that say so."""

    application_id: int
    version: int
    statements: tuple[str, ...]


class SqliteFile:
    """A file with the tables of `schema`, made if it is not there; `fault` makes the error for what it cannot do."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        schema: Schema,
        *,
        fault: Callable[[str], Exception],
        busy_timeout_s: float,
        fsync: bool,
        factory: type[sqlite3.Connection],
        folds: bool = True,
    ) -> None:
        """With `folds` an act that leaves a long log folds it; otherwise somebody calls `fold`."""
        self.path = _checked(path)
        self._schema = schema
        self._fault = fault
        self._busy_timeout_s = busy_timeout_s
        self._synchronous = "FULL" if fsync else "NORMAL"
        self._factory = factory
        self._log_path = f"{self.path}-wal"
        self._folds = folds
        self._long_bytes = LOG_BYTES
        """How long a log is folded; longer, while somebody who reads there keeps it from becoming shorter."""
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None
        """Device and inode of the file that was opened first; None before that, and after `close`."""
        with _FORK_LOCK:  # known to the fork before there is a connection that a fork could catch
            _FILES.add(self)
        with self._locked(), self._faults_told():
            _make_private(self.path)
            self._connection = self._connect("rwc")

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """One act: the block sees nobody else's changes, and either all of its own are recorded or none."""
        with self._locked(), self._faults_told():
            connection = self._connected()
            try:
                self._once_free(lambda: connection.execute("BEGIN IMMEDIATE"))
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                self._undo(connection)
                raise
        if self._folds and not _hurry.is_on and self.has_long_log:
            self.fold()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection to look with; each statement sees the file at one instant."""
        with self._locked(), self._faults_told():
            connection = self._connected()
            # Whoever reads first after a writer died puts its log in order, and the others have to wait for that.
            self._once_free(lambda: connection.execute("PRAGMA schema_version").fetchone())
            yield connection

    def look(self, act: Callable[[sqlite3.Connection], T]) -> T:
        """What the act reads, all of it of one instant; it changes nothing, and may be run again."""
        with self._locked(), self._faults_told():
            connection = self._connected()
            return self._once_free(lambda: _rolled_back(connection, act))

    @contextmanager
    def without_waiting(self, *, to_write: bool = True) -> Iterator[None]:
        """What the block does with the file waits for nobody: WouldWait if others are in the way, or the disk is."""
        if self._synchronous == "FULL" or self._connection is None or _hurry.is_on:
            raise WouldWait
        if to_write and not 0 < self._log_size() <= self._long_bytes:
            raise WouldWait
        _hurry.is_on = True
        try:
            yield
        finally:
            _hurry.is_on = False

    @property
    def has_long_log(self) -> bool:
        """Whether the log is to be folded."""
        return self._log_size() > self._long_bytes

    def fold(self) -> None:
        """Fold a long log into the file and empty it, as far as nobody reads there; waits for the disk alone.

        What cannot be folded stays in the log, where nothing is lost, and is tried again when the log has grown.
        """
        with self._lock:
            if self._connection is not None and self.has_long_log:  # else somebody else has done it
                _fold(self._connection)
            size = self._log_size()
            self._long_bytes = LOG_BYTES if size <= LOG_BYTES else size + LOG_BYTES

    def _log_size(self) -> int:
        try:
            return os.stat(self._log_path).st_size
        except OSError:
            return 0

    def close(self) -> None:
        """Give the file back; whatever comes after is a fault. Closing twice is closing once."""
        with self._lock:
            self._disconnect()
            self._identity = None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if _hurry.is_on:
            if not self._lock.acquire(blocking=False):
                raise WouldWait
        elif not self._lock.acquire(timeout=self._busy_timeout_s):
            self._fail(f"other threads of this process have kept it busy for {self._busy_timeout_s:g} s")
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def _faults_told(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._told(f"{error} ({getattr(error, 'sqlite_errorname', type(error).__name__)})") from error
        except OverflowError as error:
            raise self._told("a number is larger than 2**63 - 1") from error
        except UnicodeEncodeError as error:
            raise self._told(f"a name or key is no valid text: {error.reason}") from error
        except OSError as error:
            raise self._told(str(error)) from error

    def _told(self, why: str) -> Exception:
        return self._fault(advised(f"{str(self.path)!r} cannot record: {why}"))

    def _fail(self, why: str) -> NoReturn:
        raise self._told(why)

    def _connected(self) -> sqlite3.Connection:
        self._check_open()
        if self._connection is None:
            self._connection = self._connect("rw")
        return self._connection

    def _check_open(self) -> None:
        if self._identity is None:
            self._fail("it was closed")
        self._check_identity()

    def _check_identity(self) -> None:
        try:
            found = _identity(self.path)
        except OSError as error:
            self._fail(f"the file is gone ({error.strerror})")
        if found != self._identity:
            self._fail("another file has taken its place; open that one anew if it is meant")

    def _connect(self, mode: str) -> sqlite3.Connection:
        if found := hindrance(self.path):
            self._fail("; ".join(found))
        connection = sqlite3.connect(
            f"{self.path.as_uri()}?mode={mode}",
            timeout=0,  # see PAUSE_S
            isolation_level=None,
            check_same_thread=False,
            factory=self._factory,
            uri=True,
        )
        try:
            self._once_free(lambda: self._prepare(connection))
            if self._identity is None:
                self._identity = _identity(self.path)
            self._check_identity()
        except BaseException:
            connection.close()
            raise
        return connection

    def _once_free(self, ask: Callable[[], T]) -> T:
        """Ask until nobody else is in the way, or patience is over."""
        until = time.monotonic() + self._busy_timeout_s
        while True:
            try:
                return ask()
            except sqlite3.OperationalError as error:
                if not _is_busy(error) or time.monotonic() >= until:
                    raise
                if _hurry.is_on:
                    raise WouldWait from None
            time.sleep(PAUSE_S)

    def _prepare(self, connection: sqlite3.Connection) -> None:
        connection.execute(f"PRAGMA page_size = {PAGE_SIZE}")
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute("PRAGMA journal_size_limit = 0")  # so that the log's size says how long it is
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute(f"PRAGMA synchronous = {self._synchronous}")
        is_made = self._is_made(connection)  # before anything is changed in a file that is somebody else's
        if self._identity is not None and not is_made:
            self._fail("it was emptied since it was opened")
        self._use_wal(connection)
        connection.execute("BEGIN IMMEDIATE")  # from here on nobody is in the way
        if not self._is_made(connection):
            for statement in self._schema.statements:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {self._schema.application_id}")
            connection.execute(f"PRAGMA user_version = {self._schema.version}")
        connection.execute("COMMIT")

    def _is_made(self, connection: sqlite3.Connection) -> bool:
        """Whether the tables are there; a fault if they are somebody else's, or of a version unknown here."""
        if not has_tables(connection):
            return False
        if why := strangeness(connection, self._schema):
            self._fail(why)
        return True

    def _use_wal(self, connection: sqlite3.Connection) -> None:
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            self._fail(f"there is no write-ahead log where it is, only {mode!r}")

    def _undo(self, connection: sqlite3.Connection) -> None:
        """Leave nothing half done; a connection that cannot even do that is given up."""
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
    """What keeps this user from writing to a database in that file, and what to do; None if nothing is seen.

    It is to be asked before SQLite is: that opens what it may only read, makes the files beside it as unwritable as it
    is, and leaves them there.
    """
    parts = [path, *(path.with_name(path.name + end) for end in BESIDE)]
    if not os.path.isdir(path.parent):
        return f"there is no folder {path.parent}", "make it, or name another file"
    if os.path.isdir(path):
        return f"{path} is a folder", "name a file in it"
    if not all(map(os.path.exists, parts)) and not _is_writable(path.parent):
        return f"{path.parent} cannot be written", "let this user write there, or name another file"
    for one in parts:
        if _is_locked(one):
            other = "or name another file" if one == path else f"for it is a part of {path.name}"
            return f"{one} cannot be written", f"let this user write there, {other}"
    return None


def _is_locked(path: Path) -> bool:
    """Whether a file is there that may not be written; others make and remove those beside one at any time."""
    return not _is_writable(path) and os.path.exists(path) and not _is_writable(path)


def _is_writable(path: Path) -> bool:
    return os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def advised(why: str) -> str:
    """What is said of a fault, with what to do about it."""
    advice = next((told for name, told in ADVICE.items() if name in why), None)
    return why if advice is None or advice in why else f"{why}; {advice}"


def has_tables(connection: sqlite3.Connection) -> bool:
    """Whether there is anything in the file."""
    return bool(_number(connection, "SELECT count(*) FROM sqlite_schema"))


def strangeness(connection: sqlite3.Connection, schema: Schema) -> str:
    """Why the tables in a file are not those of the schema; nothing, if they are."""
    if _number(connection, "PRAGMA application_id") != schema.application_id:
        return "it is a database of something else"
    version = _number(connection, "PRAGMA user_version")
    if version != schema.version:
        known = f"its tables are of version {version}, and this Penstock knows version {schema.version}"
        return f"{known}; open it with the Penstock that wrote it, or a newer one"
    return ""


def _checked(path: str | os.PathLike[str]) -> Path:
    text = os.fspath(path)
    if not text or text.startswith(":memory:") or "\0" in text:
        raise InvalidValue("path", text, "the path of a file; a store in memory is MemoryLedgerStore")
    return Path(text).absolute()


def _identity(path: Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


def _number(connection: sqlite3.Connection, statement: str) -> int:
    (number,) = connection.execute(statement).fetchone()
    assert isinstance(number, int)
    return number


def _fold(connection: sqlite3.Connection) -> None:
    """Others may write while the log is folded; it is emptied, which they have to wait for, if that is all there is."""
    with suppress(sqlite3.Error):
        is_busy, pages, folded = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        if not is_busy and pages == folded:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()


def _rolled_back(connection: sqlite3.Connection, act: Callable[[sqlite3.Connection], T]) -> T:
    if connection.in_transaction:  # one before could not even be ended
        connection.execute("ROLLBACK")
    connection.execute("BEGIN")
    try:
        return act(connection)
    finally:
        connection.execute("ROLLBACK")


def _make_private(path: Path) -> None:
    """Make the file, if it is not there, for its owner alone; SQLite makes those beside it as it is."""
    with suppress(OSError):  # it is there, or SQLite says why it cannot be
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))


def _is_busy(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF == sqlite3.SQLITE_BUSY  # the rest says which kind of busy


class _Hurry(threading.local):
    """Whether this thread may not wait."""

    is_on = False


_hurry = _Hurry()
_FILES: weakref.WeakSet[SqliteFile] = weakref.WeakSet()
_FORK_LOCK = threading.Lock()
_forking: list[SqliteFile] = []


def _before_fork() -> None:
    """Close every connection, and keep the files still until the fork is done."""
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
