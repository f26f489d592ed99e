"""Streams of every kind."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

import pytest

from penstock.cli.render.screen import (
    Screen,
    encodable,
    encodes_unicode,
    print_error,
    printable,
    printing,
    reader_is_gone,
    write,
)


def stream(encoding: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding)


def written(text: str, encoding: str) -> str:
    out = stream(encoding)
    write(text, out)
    raw = out.buffer.getvalue()  # type: ignore[attr-defined]
    return str(raw.decode(encoding))


def test_lines_are_plain_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    screen = Screen(out)
    screen.show([("✓ ", "green"), ("done  ", "")], [])
    assert (out.getvalue(), screen.moves) == ("✓ done\n\n", False)
    with screen.moving(list):
        pass


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("utf-8", "✓ … ☃ é"), ("ascii", "+ ... \\u2603 \\xe9"), ("latin-1", "+ ... \\u2603 é"), ("utf-16-le", "✓ … ☃ é")],
)
def test_what_cannot_be_encoded_is_spelled(encoding: str, shown: str) -> None:
    assert written("✓ … ☃ é", encoding) == f"{shown}\n"


def test_half_a_character_is_escaped_everywhere() -> None:
    assert encodable("a\ud800b✓", stream("utf-8")) == "a\\ud800b✓"


def test_streams_that_are_closed_or_missing_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = stream("utf-8")
    closed.close()
    for nothing in (None, closed):
        write("text", nothing)
        Screen(nothing).show([("text", "")])
    monkeypatch.setattr("sys.stderr", None)
    print_error("text")


def test_which_streams_take_every_character() -> None:
    assert [encodes_unicode(stream(one)) for one in ("utf-8", "utf-16", "ascii", "cp1252")] == [
        True,
        True,
        False,
        False,
    ]
    assert encodes_unicode(None)


def test_text_on_one_line() -> None:
    assert printable("a\x1b[1m\r\nb\u202e") == "a\ufffd[1m b\ufffd"
    assert printable("2 problem(s):\n  [one] a\n\n  [two] b") == "2 problem(s): [one] a [two] b"
    assert printable("a  b\u2028c\td \v\x85\f e") == "a  b c d e"
    assert printable("x" + " " * 200_000 + "\x07").endswith(" \ufffd")  # in no time, however much there is of it


class Terminal(io.StringIO):
    """A terminal, as far as anybody can tell who writes to it."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "20")
    return Terminal()


def test_a_line_that_is_whole_is_broken_by_the_terminal_alone(terminal: Terminal) -> None:
    command = "penstock runs answer 01a1e029-24b4-7629-8e04-a429c61ef6a1 yes"
    Screen(terminal).show([(command, "")], whole=True)
    assert terminal.getvalue() == f"{command}\n"


def test_a_picture_makes_room_and_comes_back_below(terminal: Terminal) -> None:
    screen = Screen(terminal)
    with screen.moving(lambda: [[("one", "")], [("two", "")]]), screen.still():
        before = terminal.getvalue()
        screen.show([("a question", "")])
    after = terminal.getvalue().removeprefix(before)
    assert before.endswith("\x1b[2K\x1b[1A\x1b[2K"), "what was drawn is gone"
    assert after.index("a question") < after.index("one")
    assert "\x1b[1A" not in after[: after.index("one")], "and it is not drawn over what was printed meanwhile"
    assert after.rindex("\x1b[?25h") > after.rindex("\x1b[?25l")
    with Screen(io.StringIO()).still():
        pass


def test_a_pipe_whose_reader_has_left_is_known_before_and_after_it_is_written_to() -> None:
    reads, writes = os.pipe()
    with os.fdopen(writes, "w") as out:
        assert not reader_is_gone(out)
        os.close(reads)
        assert reader_is_gone(out)
        write("text", out)
        assert reader_is_gone(out)
        write("it goes nowhere, and is no error", out)


def test_what_is_no_pipe_is_not_left(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        assert [reader_is_gone(one) for one in (None, io.StringIO(), stream("utf-8"), file)] == [False] * 4
    assert not reader_is_gone(file)


@pytest.mark.parametrize("other", [OSError(errno.ENOSPC, "full", "file.json"), OSError(errno.ECONNRESET, "reset")])
def test_what_is_no_fault_of_standard_output_is_not_taken_for_one(other: OSError) -> None:
    with pytest.raises(OSError, match=str(other.strerror)) as caught, printing():
        raise other
    assert caught.value is other
