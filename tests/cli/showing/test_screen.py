"""Streams of every kind."""

from __future__ import annotations

import io

import pytest

from penstock.cli.showing.screen import Screen, complain, encodable, printable, speaks_unicode, write


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
    complain("text")


def test_which_streams_take_every_character() -> None:
    assert [speaks_unicode(stream(one)) for one in ("utf-8", "utf-16", "ascii", "cp1252")] == [True, True, False, False]
    assert speaks_unicode(None)


def test_text_on_one_line() -> None:
    assert printable("a\x1b[1m\r\nb\u202e") == "a\ufffd[1m\ufffd\ufffdb\ufffd"
