"""Write the log of a service to a stream, one line for each record, as JSON or text.

**Injection.** Every value is escaped: control characters, line ends, escape sequences of terminals, and everything that
is not ASCII, including characters that change the direction of text. So a name cannot begin a line of its own, nor look
like another name.

**Failures.** Lines are written on a thread of their own from a bounded queue. A full disk, a closed pipe or an unread
pipe loses lines, which are counted, but never stops or delays the service. When lines can be written again, the number
of lost ones is logged.

Messages of other loggers are redacted. An exception is logged by its type and locations, without its message, which may
contain anything.
"""

from __future__ import annotations

import json
import logging
import os
import re
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from penstock.cli.options import LogFormat
from penstock.logs import FIELDS
from penstock.server.errors import fault_location
from penstock.tracing.redaction import Redaction

MAX_WAITING = 10_000
"""Maximum number of lines waiting to be written; further lines are lost."""
MAX_LINE = 8_000
"""Maximum number of characters of a message, or of a field of text."""
LINGER_S = 0.02
"""How long a line waits for further lines, to be written together."""
WRITE_S = 1.0
"""How long a write waits for a pipe that is full, before its lines are lost."""
CLOSE_S = 1.0
"""How long the service waits for the last lines when it ends."""
PLAIN = re.compile(r"[A-Za-z0-9_.:/@{}*+-]+")
"""Values that text shows without quotes."""
SERVICE = "penstock"


class LineFormatter(logging.Formatter):
    """Renders a record as one line of ASCII."""

    def __init__(self, form: LogFormat) -> None:
        super().__init__()
        self._form = form
        self._redaction = Redaction()

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line, without a line end."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        head = {"time": at, "level": record.levelname.lower()}
        return render_line(head | self._fields(record), self._form)

    def _fields(self, record: logging.LogRecord) -> dict[str, Any]:
        fields: Mapping[str, Any] | None = getattr(record, FIELDS, None)
        if fields is not None:
            return {"event": record.getMessage(), **fields}
        error = record.exc_info[1] if record.exc_info else None
        found = {"event": "log", "logger": record.name, "message": self._redaction.text(record.getMessage(), MAX_LINE)}
        return found if error is None else {**found, "error": fault_location(error)}


def render_line(fields: Mapping[str, Any], form: LogFormat) -> str:
    """Render fields as one line of printable ASCII."""
    if form is LogFormat.JSON:
        return _escaped({name: _bounded(value) for name, value in fields.items()})
    shown = (f"{name}={_as_text(_bounded(value))}" for name, value in fields.items() if name not in _LEADING)
    return " ".join((str(fields["time"]), f"{fields['level']!s:<7}", str(fields["event"]), *shown))


_LEADING = frozenset({"time", "level", "event"})


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) and PLAIN.fullmatch(value) else _escaped(value)


def _bounded(value: Any) -> Any:
    return f"{value[:MAX_LINE]}…" if isinstance(value, str) and len(value) > MAX_LINE else value


def _escaped(value: Any) -> str:
    """Return JSON in printable ASCII; `json` leaves only DEL as it is."""
    return json.dumps(value, ensure_ascii=True, default=repr).replace("\x7f", "\\u007f")


class LogHandler(logging.Handler):
    """Queues the lines of records, and writes them to a file descriptor on a thread of its own."""

    def __init__(self, fd: int, form: LogFormat) -> None:
        super().__init__()
        self.setFormatter(LineFormatter(form))
        self.lost = 0
        """Lines that could not be written."""
        self._form = form
        self._fd = fd
        self._lines: deque[str] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._is_busy = False
        """Whether a batch is being written."""
        self._reported = 0
        """Lost lines that have been logged."""
        self._is_line_open = False
        """Whether the last write ended inside a line."""
        self._thread = threading.Thread(target=self._work, name="penstock log", daemon=True)
        self._thread.start()

    @property
    def is_writing(self) -> bool:
        """Whether the thread has not ended, because a write blocks."""
        return self._thread.is_alive()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the record's line; never waits and never raises."""
        try:
            line = self.format(record)
        except Exception:  # a record that cannot be rendered, such as one with wrong arguments
            line = None
        with self._changed:
            if line is None or self._is_closed or len(self._lines) >= MAX_WAITING:
                self.lost += 1
                return
            self._lines.append(line)
            if len(self._lines) == 1:
                self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all lines are written or lost, for a limited time."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lines and not self._is_busy, CLOSE_S)

    def close(self) -> None:
        """Write the waiting lines, for a limited time, and stop."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)
        super().close()

    # The thread's side.

    def _work(self) -> None:
        while batch := self._next():
            self._write(batch)
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()

    def _next(self) -> list[str]:
        """Return the waiting lines; an empty list if there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._is_closed)
            self._changed.wait_for(lambda: self._is_closed, LINGER_S)
            batch = list(self._lines)
            self._lines.clear()
            self._is_busy = bool(batch)
            return batch

    def _write(self, batch: list[str]) -> None:
        lost = self.lost
        first = [] if lost == self._reported else [self._loss(lost - self._reported)]
        start = "\n" if self._is_line_open else ""
        try:
            self._write_all((start + "".join(f"{line}\n" for line in (*first, *batch))).encode("ascii"))
        except OSError:
            with self._changed:
                self.lost += len(batch)
        else:
            self._reported = lost

    def _loss(self, lines: int) -> str:
        at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        about = {"time": at, "level": "warning", "event": "log_lines_lost", "lines": lines}
        return render_line(about, self._form)

    def _write_all(self, data: bytes) -> None:
        left, deadline = memoryview(data), time.monotonic() + WRITE_S
        while left:
            try:
                count = os.write(self._fd, left)
            except BlockingIOError:
                self._await_room(deadline)
                continue
            self._is_line_open = left[count - 1] != ord("\n") if count else self._is_line_open
            left = left[count:]

    def _await_room(self, deadline: float) -> None:
        if not select.select((), (self._fd,), (), max(0.0, deadline - time.monotonic()))[1]:
            raise TimeoutError


@contextmanager
def logging_to_stderr(form: LogFormat | None) -> Iterator[None]:
    """Log to standard error inside the block; nothing without a form, or if standard error is closed."""
    if form is None or sys.stderr is None or sys.stderr.closed:
        yield
        return
    fd = os.dup(sys.stderr.fileno())  # its own: the number of a closed one may become another file's
    handler = LogHandler(fd, form)
    root, service = logging.getLogger(), logging.getLogger(SERVICE)
    before = service.level
    root.addHandler(handler)
    service.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        service.setLevel(before)
        handler.close()
        if not handler.is_writing:
            os.close(fd)  # else the pipe is not read, and the thread ends with the process
