"""The history of each node on disk: one file per node, one line of JSON per operation.

A history is an observer: it receives the run's events on a thread of its own, and its errors never reach the run. It
records which node did what, when, at what cost and with what result; inputs and outputs are not written.

No file stays open between two batches. So there are never too many open files, and a file that was rotated, moved or
deleted is created again. If a write stops in the middle of a line (a full disk, a crash), the next one begins on a new
line, and readers skip the torn one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from penstock import checks
from penstock.errors import InvalidValue
from penstock.tracing.events import (
    CallEnded,
    CallSettled,
    CallStarted,
    ErrorTrace,
    LimitTrace,
    RunCompleted,
    SafetyTrace,
    TraceEvent,
)

MAX_TEXT = 500
"""Maximum length of a name or an error message."""
MAX_LINE = 1_000_000
"""Maximum length of a line; a longer one was not written by this module."""
MAX_ENDED = 4_096
"""Number of ended calls of a run that are remembered, for entries that follow later: a stop, a late bill."""

PLAIN = re.compile(r"[a-z0-9_](?:[a-z0-9_.-]{0,98}[a-z0-9_-])?")
RESERVED = re.compile(r"(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\..*)?")

OP_OF_STATUS = {"success": "end", "fail": "error", "halt": "halt"}
"""Names of the ends of steps."""


def file_name(id: str) -> str:
    """Return `id` as a file name that is valid on every file system and unique.

    Ids of small letters, digits and `_.-` are unchanged; others are reduced to their readable characters, and
    distinguished by a digest after `~`.
    """
    if PLAIN.fullmatch(id) and not RESERVED.fullmatch(id):
        return id
    readable = re.sub(r"[^a-z0-9_]+", "-", id.lower())[:40].strip("-")
    return f"{readable}~{hashlib.sha256(id.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


def history_file(directory: str | os.PathLike[str], node_id: str, server: str = "default") -> Path:
    """Return the path of a node's history: `{directory}/{server}/{node_id}.jsonl`, with both parts as file names."""
    return Path(directory) / file_name(server) / f"{file_name(node_id)}.jsonl"


@dataclass(frozen=True, slots=True)
class _Place:
    """The step that a call belongs to."""

    graph: str
    node: str
    step: str
    call_id: str
    """The step's own call."""
    attempt: int


class _Places:
    """The step of each call of one run."""

    def __init__(self) -> None:
        self._open: dict[str, _Place] = {}
        self._ended: dict[str, _Place] = {}

    def begin(self, event: CallStarted) -> _Place | None:
        """Record that a call has begun; None if it is neither a step nor inside one."""
        place = _step_of(event) or self.of(event.parent_id)
        if place is not None:
            self._open[event.node_id] = place
        return place

    def end(self, call_id: str) -> _Place | None:
        """Record that a call has ended."""
        place = self._open.pop(call_id, None)
        if place is not None:
            self._ended[call_id] = place
            if len(self._ended) > MAX_ENDED:
                del self._ended[next(iter(self._ended))]
        return place

    def of(self, call_id: str | None) -> _Place | None:
        if call_id is None:
            return None
        return self._open.get(call_id) or self._ended.get(call_id)


def _step_of(event: CallStarted) -> _Place | None:
    about = event.metadata
    if "step" not in about or "node" not in about or "node_type" not in about:
        return None
    graph, node, step = str(about.get("graph", "")), str(about["node"]), str(about["step"])
    return _Place(graph, node, step, event.node_id, int(about.get("attempt", 1)))


class History:
    """Writes the operations of every node of a run to a file per node: `context.observe(History("history"))`.

    One history may observe many runs at once, and many may write to one directory.
    """

    def __init__(self, directory: str | os.PathLike[str], server: str = "default") -> None:
        checks.text("server", server, minimum=1)
        self.directory = Path(directory)
        self.server = server
        self.written = 0
        """Number of lines written."""
        self.lost = 0
        """Number of lines that could not be written."""
        self.failures = 0
        """Number of failed writes; a write contains the lines of one batch for one node."""
        self.last_error: Exception | None = None
        """Error of the last failed write."""
        self._runs: dict[str, _Places] = {}
        self._lock = threading.Lock()

    def __call__(self, events: Sequence[TraceEvent]) -> None:
        """Write a batch of events."""
        lines: dict[str, list[str]] = {}
        with self._lock:
            for event in events:
                entry = self._entry(event)
                if entry is not None:
                    lines.setdefault(entry["node_id"], []).append(json.dumps(entry, separators=(",", ":")))
            for node_id, its_lines in lines.items():
                self._append(history_file(self.directory, node_id, self.server), its_lines)

    # What is written.

    def _entry(self, event: TraceEvent) -> dict[str, Any] | None:
        """Return the line for an event; None if it belongs to no node, or has nothing new."""
        if isinstance(event, RunCompleted):
            self._runs.pop(event.run_id, None)
            return None
        places = self._runs.setdefault(event.run_id, _Places())
        if isinstance(event, CallStarted):
            place = places.begin(event)
            # Of the calls inside a step, the end has all that is recorded.
            return _begun(event, place) if place is not None and place.call_id == event.node_id else None
        if isinstance(event, CallEnded):
            place = places.end(event.node_id)
            return None if place is None else _ended(event, place)
        call_id = _call_of(event)
        place = places.of(call_id)
        return None if place is None else _other_entry(event, place, call_id)

    def _append(self, path: Path, lines: list[str]) -> None:
        data, done = ("\n".join(lines) + "\n").encode(), 0
        try:
            file = _open(path)
            try:
                if _ends_torn(file):
                    os.write(file, b"\n")
                while done < len(data):
                    done += os.write(file, data[done:])
            finally:
                os.close(file)
        except (OSError, ValueError) as error:
            self.failures += 1
            self.last_error = error
        self.written += data[:done].count(b"\n")
        self.lost += data[done:].count(b"\n")

    def __repr__(self) -> str:
        return f"<History in {str(self.directory)!r}: {self.written} line(s), {self.lost} lost>"


def _line(op: str, event: TraceEvent, place: _Place, call_id: str | None, **facts: Any) -> dict[str, Any]:
    return {
        "ts": event.timestamp.isoformat(timespec="milliseconds"),
        "seq": event.seq,
        "run_id": event.run_id,
        "op": op,
        "node_id": place.node,
        "step_id": place.step,
        "graph_id": place.graph,
        "call_id": call_id,
        "parent_id": event.parent_id,
        "attempt": place.attempt,
        "name": None,
        "duration_ms": None,
        "cost_usd": None,
        "tokens": None,
        "error": None,
    } | facts


def _begun(event: CallStarted, place: _Place) -> dict[str, Any]:
    """Return the entry for a step, or its fallback, that has begun."""
    about = event.metadata
    op = next((one for one in ("skip", "fallback", "continue") if one in about), "run")
    why = about.get("skip") or about.get("instead_of") or about.get("continue")
    return _line(op, event, place, event.node_id, name=_cut(event.name), error=None if why is None else _cut(why))


def _ended(event: CallEnded, place: _Place) -> dict[str, Any]:
    is_step = place.call_id == event.node_id
    return _line(
        OP_OF_STATUS.get(event.status, event.status) if is_step else event.call_kind,
        event,
        place,
        event.node_id,
        name=_cut(event.name),
        duration_ms=event.duration_ms,
        cost_usd=None if event.cost_unknown else event.cost,
        tokens=event.input_tokens + event.output_tokens,
        error=None if event.status == "success" else _cut(_why(event)),
    )


def _why(event: CallEnded) -> str:
    return ": ".join(part for part in (event.error, event.stop_reason) if part) or event.status


def _call_of(event: TraceEvent) -> str | None:
    """Return the call that an event is about."""
    return (event.node_id if isinstance(event, CallSettled | LimitTrace) else None) or event.parent_id


def _other_entry(event: TraceEvent, place: _Place, call_id: str | None) -> dict[str, Any]:
    """Return the entry for another event inside a step: a late bill, a stop, the refusal of a hook, an iteration."""
    facts: dict[str, Any] = {}
    if isinstance(event, CallSettled):
        facts = {"cost_usd": event.cost, "tokens": event.input_tokens + event.output_tokens}
    elif isinstance(event, LimitTrace):
        facts = {"name": _cut(event.name), "error": _cut(f"{event.stop_reason}: {event.message}")}
    elif isinstance(event, SafetyTrace):
        facts = {"name": _cut(event.event_type), "error": _cut(f"{event.decision}: {event.reason}")}
    elif isinstance(event, ErrorTrace):
        facts = {"error": _cut(f"{event.error_class}: {event.message}")}
    elif isinstance(name := getattr(event, "name", None), str):
        facts = {"name": _cut(name)}
    # `error` is how a step ends; an error that belongs to no call is something else.
    op = "fault" if isinstance(event, ErrorTrace) else str(event.kind)
    return _line(op, event, place, call_id, **facts)


def _cut(text: object) -> str:
    return str(text)[:MAX_TEXT]


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
    try:
        return os.open(path, flags, 0o666)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o666)


def _ends_torn(file: int) -> bool:
    """Whether the last write to the file stopped in the middle of a line."""
    size = os.fstat(file).st_size
    if size == 0:
        return False
    os.lseek(file, size - 1, os.SEEK_SET)
    return os.read(file, 1) != b"\n"


class Entries:
    """The entries of one node, read anew each time they are iterated over."""

    def __init__(self, path: Path, node_id: str, since: datetime | None, until: datetime | None) -> None:
        self.torn = 0
        """Number of unreadable lines in the last iteration."""
        self._path = path
        self._node_id = node_id
        self._since = None if since is None else _whole_ms(since)
        self._until = until

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.torn = 0
        try:
            file = self._path.open("rb")
        except FileNotFoundError:  # it has not run, or its file was taken away
            return
        with file:
            while line := file.readline(MAX_LINE):
                entry = _parsed(line)
                if entry is None:
                    self.torn += line != b"\n"
                    while line and not line.endswith(b"\n"):  # the rest of one that is too long
                        line = file.readline(MAX_LINE)
                elif entry["node_id"] == self._node_id and self._is_within(entry["ts"]):
                    yield entry

    def _is_within(self, ts: str) -> bool:
        at = datetime.fromisoformat(ts)
        return (self._since is None or at >= self._since) and (self._until is None or at <= self._until)


def read_history(
    directory: str | os.PathLike[str],
    node_id: str,
    server: str = "default",
    since: datetime | None = None,
    until: datetime | None = None,
) -> Entries:
    """Read the entries of a node on disk, from `since` to `until`, such as a StepTrace's start_time and end_time.

    Lines that are torn or foreign are skipped, and counted as `torn` of the result.
    """
    for field, at in (("since", since), ("until", until)):
        if at is not None and checks.instance(field, at, datetime, none="no bound").utcoffset() is None:
            raise InvalidValue(field, at, "a datetime with a time zone, or None")
    return Entries(history_file(directory, node_id, server), node_id, since, until)


def _whole_ms(at: datetime) -> datetime:
    """Round down: entries have whole milliseconds, a step's start is rounded to microseconds and must not be later."""
    try:
        at -= timedelta(microseconds=1)
    except OverflowError:
        return at
    return at.replace(microsecond=at.microsecond // 1_000 * 1_000)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return the entry in a line; None if the line is torn or foreign."""
    if not line.endswith(b"\n"):
        return None
    try:
        entry = json.loads(line)
        datetime.fromisoformat(entry["ts"]).astimezone()
        return entry if isinstance(entry["node_id"], str) else None
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return None
