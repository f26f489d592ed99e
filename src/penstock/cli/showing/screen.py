"""Lines with colours, for a terminal or for a file.

rich draws on terminals, and is loaded only there. Everywhere else lines are plain, and characters that a stream cannot
encode are spelled in ASCII. Knows nothing of what is shown.
"""

from __future__ import annotations

import errno
import os
import re
import select
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import TYPE_CHECKING, TextIO
from weakref import WeakSet

from penstock.cli.exits import Unwritten

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

Line = list[tuple[str, str]]
"""Pieces of text, each with the name of its colour; "" is the terminal's own."""

FRAMES_PER_SECOND = 12
TAKES_NOTHING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})
"""What a stream says that cannot be written to."""
SHOW_CURSOR = "\x1b[?25h"
WHITE = re.compile(r"\s+")
GAPS = frozenset("\t\n\v\f\r\x85\u2028\u2029")
"""What ends a line, or leaves a gap in one: a space says as much."""

IN_ASCII = str.maketrans(
    {"✓": "+", "✗": "x", "■": "#", "●": "*", "…": "...", "·": "-", "━": "=", "╍": "~", "─": "-", "│": "|", "├": "|"}
    | {"└": "`", "→": "->", "⇢": "..>", "≥": ">=", "“": '"', "”": '"', "’": "'"}
)


_left: WeakSet[TextIO] = WeakSet()
"""Streams that could not be written to any more."""


class Screen:
    """One stream as something to draw on."""

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream
        self._console = _console(stream)
        self._live: Live | None = None
        """What draws a picture that moves, while one does."""

    @property
    def moves(self) -> bool:
        """Whether a person is looking, and pictures can move."""
        return self._console is not None

    @property
    def width(self) -> int:
        """Columns; 100 where nobody says."""
        return 100 if self._console is None else self._console.width

    @property
    def height(self) -> int:
        """Rows; 24 where nobody says."""
        return 24 if self._console is None else self._console.height

    def show(self, *lines: Line, whole: bool = False) -> None:
        """Print the lines; one that is too long for a terminal ends in an ellipsis, or goes on below if `whole`."""
        if self._console is not None:
            # The terminal itself breaks what is whole, so that a command copied from there is still on one line.
            self._console.print(self._styled(lines, sys.maxsize if whole else self.width), soft_wrap=whole)
            return
        for line in lines:
            write("".join(text for text, _ in line).rstrip(), self.stream)

    @contextmanager
    def moving(self, picture: Callable[[], Iterable[Line]]) -> Iterator[None]:
        """Draw the newest picture, twelve times a second, on a thread of its own; the last one stays."""
        self._begin(picture)
        try:
            yield
        finally:
            if self._live is not None:
                self._live.stop()
                self._live = None

    @contextmanager
    def still(self) -> Iterator[None]:
        """Take the picture away, if one moves, for as long as the block needs the terminal."""
        if self._live is None:
            yield
            return
        self._live.transient = True
        self._live.stop()
        try:
            yield
        finally:
            self._begin(self._picture)

    def _begin(self, picture: Callable[[], Iterable[Line]]) -> None:
        if self._console is None:
            return
        from rich.live import Live

        self._picture = picture
        self._live = Live(
            get_renderable=lambda: self._styled(picture(), self.width),
            console=self._console,
            refresh_per_second=FRAMES_PER_SECOND,
        )
        self._live.start()

    def restore(self) -> None:
        """Make the cursor visible again, for whoever leaves in the middle of a picture."""
        if self._console is not None and self.stream is not None:
            with suppress(OSError):
                self.stream.write(f"{SHOW_CURSOR}\n")
                self.stream.flush()

    def _styled(self, lines: Iterable[Line], width: int) -> Text:
        """The lines for rich to draw, each cut to `width`."""
        from rich.text import Text

        texts = [Text.assemble(*(_spelled(piece, self.stream) for piece in line)) for line in lines]
        for text in texts:
            text.truncate(width, overflow="ellipsis")
        return Text("\n").join(texts)


def _spelled(piece: tuple[str, str], stream: TextIO | None) -> tuple[str, str]:
    return encodable(piece[0], stream), piece[1]


def _console(stream: TextIO | None) -> Console | None:
    """A console where a person is looking, and rich is there to draw for them."""
    if stream is None or stream.closed or not stream.isatty() or os.environ.get("TERM") == "dumb":
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream, highlight=False, markup=False, emoji=False)


def say(text: str) -> None:
    """Print plain text on standard output."""
    write(text, sys.stdout)


def complain(text: str) -> None:
    """Say on standard error what is wrong."""
    write(f"penstock: {printable(text)}", sys.stderr)


def write(text: str, stream: TextIO | None, end: str = "\n") -> None:
    """Print plain text on a stream; one that is closed, or a reader that has left, is no error.

    Neither is a standard error that takes nothing, such as a log on a full disk; results that are lost are `Unwritten`.
    """
    if stream is None or stream.closed:
        return
    try:
        print(encodable(text, stream), end=end, file=stream, flush=True)
    except OSError as error:
        _discard(stream)
        if stream is not sys.stderr and not isinstance(error, BrokenPipeError):
            raise _unwritten(error) from error


@contextmanager
def printing() -> Iterator[None]:
    """What the block prints by itself, such as typer its help, is `Unwritten` too where standard output is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in TAKES_NOTHING or error.filename is not None or sys.stdout is None:
            raise  # it was something else that could not be done
        _discard(sys.stdout)
        raise _unwritten(error) from error


def _unwritten(error: OSError) -> Unwritten:
    return Unwritten(f"standard output cannot be written: {error.strerror}")


def is_left(stream: TextIO | None) -> bool:
    """Whether the stream is a pipe whose reader has left; who has nothing else to do can leave, too."""
    if stream is None or stream in _left:
        return stream is not None
    with suppress(AttributeError, OSError, ValueError):  # it is no file, or the system cannot tell
        asked = select.poll()
        asked.register(stream, 0)
        return any(found & select.POLLERR for _, found in asked.poll(0))
    return False


def encodable(text: str, stream: TextIO | None) -> str:
    """`text` as the stream can encode it: our own marks in ASCII, anything else by its escape."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        if speaks_unicode(stream):  # then it is half a character that no encoding has
            return text.encode(encoding, "backslashreplace").decode(encoding)
        return text.translate(IN_ASCII).encode(encoding, "backslashreplace").decode(encoding)
    return text


def speaks_unicode(stream: TextIO | None) -> bool:
    """Whether every character can be written there."""
    return (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "").startswith("utf")


def printable(text: str) -> str:
    """`text` on one line: line ends are spaces, and what could steer a terminal is a replacement character."""
    if text.isprintable():
        return text
    flat = WHITE.sub(lambda found: found[0] if GAPS.isdisjoint(found[0]) else " ", text)
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in flat)


def prepare_streams() -> None:
    """Let nothing that is printed fail for its characters, whoever prints it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def flush() -> None:
    """Write out what is still to be written; what cannot be is no error any more."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            try:
                stream.flush()
            except OSError:
                _discard(stream)


def _discard(stream: TextIO) -> None:
    """Send what still comes to nowhere: the interpreter flushes at its end, and would complain."""
    _left.add(stream)
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
