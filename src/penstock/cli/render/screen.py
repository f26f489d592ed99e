"""Prints coloured lines to a terminal and plain lines to a file.

rich draws on terminals, and is imported only for them. Elsewhere lines are plain, and characters that a stream cannot
encode are replaced by ASCII. Does not know the meaning of the lines.
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

from penstock.cli.exits import WriteFailed

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

Line = list[tuple[str, str]]
"""Pieces of text, each with the name of its colour; "" is the terminal's default."""

FRAMES_PER_SECOND = 12
WRITE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})
"""Error numbers of a stream that cannot be written to."""
SHOW_CURSOR = "\x1b[?25h"
WHITE = re.compile(r"\s+")
GAPS = frozenset("\t\n\v\f\r\x85\u2028\u2029")
"""Line ends and other white space that is replaced by a space."""

IN_ASCII = str.maketrans(
    {"✓": "+", "✗": "x", "■": "#", "●": "*", "…": "...", "·": "-", "━": "=", "╍": "~", "─": "-", "│": "|", "├": "|"}
    | {"└": "`", "→": "->", "⇢": "..>", "≥": ">=", "“": '"', "”": '"', "’": "'"}
)


_abandoned: WeakSet[TextIO] = WeakSet()
"""Streams for which a write has failed."""


class Screen:
    """A stream to draw on."""

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream
        self._console = _console(stream)
        self._live: Live | None = None
        """The active animation, if there is one."""

    @property
    def moves(self) -> bool:
        """Whether the stream is a terminal that can show animations."""
        return self._console is not None

    @property
    def width(self) -> int:
        """Columns; 100 if unknown."""
        return 100 if self._console is None else self._console.width

    @property
    def height(self) -> int:
        """Rows; 24 if unknown."""
        return 24 if self._console is None else self._console.height

    def show(self, *lines: Line, whole: bool = False) -> None:
        """Print the lines; a line too long for a terminal ends in an ellipsis, or wraps if `whole`."""
        if self._console is not None:
            # The terminal itself wraps whole lines, so that a command copied from it is still on one line.
            self._console.print(self._styled(lines, sys.maxsize if whole else self.width), soft_wrap=whole)
            return
        for line in lines:
            write("".join(text for text, _ in line).rstrip(), self.stream)

    @contextmanager
    def moving(self, picture: Callable[[], Iterable[Line]]) -> Iterator[None]:
        """Draw the current frame twelve times a second on a separate thread; the last frame stays."""
        self._begin(picture)
        try:
            yield
        finally:
            if self._live is not None:
                self._live.stop()
                self._live = None

    @contextmanager
    def still(self) -> Iterator[None]:
        """Remove the animation, if one is active, while the block uses the terminal."""
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
        """Make the cursor visible again, for an exit during an animation."""
        if self._console is not None and self.stream is not None:
            # Past the stream's buffer: a signal handler may have interrupted a write to it, which cannot be re-entered.
            with suppress(OSError, ValueError):
                os.write(self.stream.fileno(), f"{SHOW_CURSOR}\n".encode())

    def _styled(self, lines: Iterable[Line], width: int) -> Text:
        """Return the lines as rich text, each truncated to `width`."""
        from rich.text import Text

        texts = [Text.assemble(*(_encodable_piece(piece, self.stream) for piece in line)) for line in lines]
        for text in texts:
            text.truncate(width, overflow="ellipsis")
        return Text("\n").join(texts)


def _encodable_piece(piece: tuple[str, str], stream: TextIO | None) -> tuple[str, str]:
    return encodable(piece[0], stream), piece[1]


def _console(stream: TextIO | None) -> Console | None:
    """Return a console if the stream is a capable terminal and rich is installed."""
    if stream is None or stream.closed or not stream.isatty() or os.environ.get("TERM") == "dumb":
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream, highlight=False, markup=False, emoji=False)


def print_text(text: str) -> None:
    """Print plain text on standard output."""
    write(text, sys.stdout)


def print_error(text: str) -> None:
    """Print a message on standard error."""
    write(f"penstock: {printable(text)}", sys.stderr)


def write(text: str, stream: TextIO | None, end: str = "\n") -> None:
    """Print plain text on a stream; a closed stream or a disconnected reader is not an error.

    An unwritable standard error, such as a log on a full disk, is not one either; lost results raise `WriteFailed`.
    """
    if stream is None or stream.closed:
        return
    try:
        print(encodable(text, stream), end=end, file=stream, flush=True)
    except OSError as error:
        _discard(stream)
        if stream is not sys.stderr and not isinstance(error, BrokenPipeError):
            raise _write_failed(error) from error


@contextmanager
def printing() -> Iterator[None]:
    """Raise `WriteFailed` also if output that the block prints itself, such as typer's help, cannot be written."""
    try:
        yield
    except OSError as error:
        if error.errno not in WRITE_ERRORS or error.filename is not None or sys.stdout is None:
            raise  # not a failed write to standard output
        _discard(sys.stdout)
        raise _write_failed(error) from error


def _write_failed(error: OSError) -> WriteFailed:
    return WriteFailed(f"standard output cannot be written: {error.strerror}")


def reader_is_gone(stream: TextIO | None) -> bool:
    """Whether the stream is a pipe whose reader has disconnected; a caller that only prints can then exit."""
    if stream is None or stream in _abandoned:
        return stream is not None
    with suppress(AttributeError, OSError, ValueError):  # not a file, or poll is not supported
        poll = select.poll()
        poll.register(stream, 0)
        return any(found & select.POLLERR for _, found in poll.poll(0))
    return False


def encodable(text: str, stream: TextIO | None) -> str:
    """Return `text` as the stream can encode it: Penstock's marks in ASCII, other characters as escapes."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        if encodes_unicode(stream):  # then it is a lone surrogate, which no encoding has
            return text.encode(encoding, "backslashreplace").decode(encoding)
        return text.translate(IN_ASCII).encode(encoding, "backslashreplace").decode(encoding)
    return text


def encodes_unicode(stream: TextIO | None) -> bool:
    """Whether the stream can encode every character."""
    return (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "").startswith("utf")


def printable(text: str) -> str:
    """Return `text` on one line: line ends become spaces, and control characters a replacement character."""
    if text.isprintable():
        return text
    flat = WHITE.sub(lambda found: found[0] if GAPS.isdisjoint(found[0]) else " ", text)
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in flat)


def prepare_streams() -> None:
    """Make standard output and error escape characters that they cannot encode, for all code that prints."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            with suppress(OSError):  # text that an earlier write left in the buffer; the next write reports the failure
                stream.reconfigure(errors="backslashreplace")


def flush() -> None:
    """Flush standard output and error; failures are ignored."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            try:
                stream.flush()
            except OSError:
                _discard(stream)


def _discard(stream: TextIO) -> None:
    """Redirect the stream to the null device: the interpreter flushes at exit and would report an error."""
    _abandoned.add(stream)
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
