"""Logs of a service: one line a record that nothing can forge, on a stream that may fail."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from penstock import logs
from penstock.cli.options import LogFormat
from penstock.cli.service import log_output
from penstock.cli.service.log_output import LogHandler, logging_to_stderr
from penstock.clock import SYSTEM_CLOCK

HOSTILE = {
    "line end": 'ann\n{"event": "run", "status": "completed"}',
    "carriage return": "ann\rroot",
    "terminal": "ann\x1b[2K\x1b]0;title\x07",
    "C1": "ann\x9b31mred",
    "delete": "ann\x7f\x7f\x7fbob",
    "bidi": "ann\u202egnp.exe\u2066",
    "separators": "ann\u2028bob\u2029\x85\x0b\x0c\x1c",
    "zero width": "a\u200bn\ufeffn",
    "half a pair": "ann\ud800",
    "quotes": 'ann" user="root',
    "key": "ann user=root status=200",
    "NUL": "ann\0",
}
LOGGER = logging.getLogger("tests.log")


@contextmanager
def logging_to(fd: int, form: LogFormat = LogFormat.JSON) -> Iterator[LogHandler]:
    with closing(LogHandler(fd, form)) as handler:
        LOGGER.addHandler(handler)
        LOGGER.setLevel(logging.INFO)
        LOGGER.propagate = False
        try:
            yield handler
        finally:
            LOGGER.removeHandler(handler)


def opened(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def full_pipe() -> tuple[int, int]:
    """A pipe whose next write blocks."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    with suppress(BlockingIOError):
        while True:
            os.write(write, b"x" * 4096)
    os.set_blocking(write, True)
    return read, write


@pytest.mark.requirement("X-15")
@pytest.mark.parametrize("form", list(LogFormat))
def test_no_value_can_begin_a_line_or_reach_a_terminal(tmp_path: Path, form: LogFormat) -> None:
    fd = opened(tmp_path / "log")
    with logging_to(fd, form):
        for name, value in HOSTILE.items():
            logs.record(LOGGER, "request", {"user": value, "case": name})
            LOGGER.warning("message of %s", value)
    os.close(fd)
    data = (tmp_path / "log").read_bytes()
    assert all(byte == 10 or 32 <= byte < 127 for byte in data)
    lines = data.decode("ascii").splitlines()
    assert len(lines) == 2 * len(HOSTILE)
    if form is LogFormat.JSON:
        assert [json.loads(line)["user"] for line in lines[::2]] == list(HOSTILE.values())
        assert {json.loads(line)["event"] for line in lines[1::2]} == {"log"}
    else:
        for line, value in zip(lines[::2], HOSTILE.values(), strict=True):
            assert f" user={json.dumps(value)} ".replace("\x7f", "\\u007f") in line
            assert line.split(" user=")[0].endswith("request")


def test_text_shows_plain_values_as_they_are(tmp_path: Path) -> None:
    fd = opened(tmp_path / "log")
    with logging_to(fd, LogFormat.TEXT):
        logs.record(LOGGER, "request", {"route": "/api/runs/{run_id}", "status": 200, "user": "ann", "run_id": None})
    os.close(fd)
    time, rest = (tmp_path / "log").read_text().split(" ", 1)
    assert time.endswith("Z")
    assert rest == "info    request route=/api/runs/{run_id} status=200 user=ann\n"


def test_messages_are_redacted_and_errors_have_no_message(tmp_path: Path) -> None:
    fd = opened(tmp_path / "log")
    with logging_to(fd) as handler:
        try:
            raise ValueError("the prompt of ann")
        except ValueError:
            LOGGER.exception("failed with api_key=sk-abcdefgh12345678")
        LOGGER.info("x" * 100_000)
        handler.handle(logging.LogRecord(LOGGER.name, logging.INFO, "", 1, "wrong arguments %s %s", ("one",), None))
    assert handler.lost == 1
    os.close(fd)
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    first, long = (line for line in lines if line["event"] == "log")
    assert "sk-abc" not in str(first)
    assert "prompt" not in str(first)
    assert first["error"].startswith("ValueError at test_log_output.py:")
    assert len(long["message"]) < 10_000


@pytest.mark.requirement("X-15")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_loses_lines_and_the_log_says_so_when_there_is_room_again(tmp_path: Path) -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    with logging_to(fd) as handler:
        for number in range(3):
            logs.record(LOGGER, "request", {"number": number})
            handler.flush()
        assert handler.lost == 3
        room = opened(tmp_path / "log")
        os.dup2(room, fd)
        os.close(room)
        logs.record(LOGGER, "request", {"number": 3})
    os.close(fd)
    lost, line = map(json.loads, (tmp_path / "log").read_text().splitlines())
    assert (lost["event"], lost["lines"]) == ("log_lines_lost", 3)
    assert line["number"] == 3


@pytest.mark.requirement("X-15")
def test_closed_pipe_loses_lines() -> None:
    read, write = os.pipe()
    os.close(read)
    with logging_to(write) as handler:
        logs.record(LOGGER, "request", {})
        handler.flush()
        assert handler.lost == 1
        logs.record(LOGGER, "request", {})
    assert handler.lost == 2
    os.close(write)


def test_pipe_that_is_not_read_never_delays_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_output, "CLOSE_S", 0.01)
    monkeypatch.setattr(log_output, "MAX_WAITING", 100)
    read, write = full_pipe()
    with logging_to(write) as handler:
        started_ns = SYSTEM_CLOCK.monotonic_ns()
        for _ in range(5_000):
            logs.record(LOGGER, "request", {"user": "x" * 100})
        assert SYSTEM_CLOCK.monotonic_ns() > started_ns  # it has returned, with a pipe that is full
        assert handler.lost > 0
    assert handler.is_writing
    os.close(read)  # the blocked write fails, and the thread ends
    handler._thread.join()
    os.close(write)


def test_pipe_that_does_not_block_and_is_full_loses_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_output, "WRITE_S", 0.01)
    read, write = os.pipe()
    os.set_blocking(write, False)
    with logging_to(write) as handler:
        logs.record(LOGGER, "request", {"user": "x" * 7_000})
        for _ in range(20):
            logs.record(LOGGER, "request", {"user": "x" * 7_000})
        handler.flush()
        assert handler.lost > 0
        os.read(read, 1 << 20)
        logs.record(LOGGER, "request", {"user": "last"})
    lines = os.read(read, 1 << 20).decode().splitlines()
    assert json.loads(lines[-1])["user"] == "last"  # on a line of its own, behind the one that was cut
    assert json.loads(lines[-2])["event"] == "log_lines_lost"
    os.close(read)
    os.close(write)


def test_without_a_form_or_standard_error_nothing_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    with logging_to_stderr(None):
        assert not logs.REQUESTS.isEnabledFor(logging.INFO)
    monkeypatch.setattr(sys, "stderr", None)
    with logging_to_stderr(LogFormat.JSON):
        assert not logs.REQUESTS.isEnabledFor(logging.INFO)
