"""One line at the bottom of a terminal, beside the output of another program.

The scrolling region of the terminal ends above the line, so that the program's output scrolls without it. Without
a terminal, nothing is drawn.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TextIO

INTERVAL_S = 0.25
MIN_ROWS = 5


@asynccontextmanager
async def shown_below(stream: TextIO | None, text: Callable[[], str]) -> AsyncIterator[None]:
    """Draw `text()` on the last line of the terminal inside the block, whenever it has changed."""
    size = _size(stream)
    if stream is None or size is None:
        yield
        return
    line = _StatusLine(stream)
    drawing = asyncio.create_task(line.draw(text))
    try:
        yield
    finally:
        drawing.cancel()
        await asyncio.wait((drawing,))
        line.erase()


class _StatusLine:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._drawn: tuple[object, str] = (None, "")

    async def draw(self, text: Callable[[], str]) -> None:
        while True:
            size, content = _size(self._stream), text()
            if size is not None and (size, content) != self._drawn:
                self._write(size, content, is_new=size != self._drawn[0])
                self._drawn = (size, content)
            await asyncio.sleep(INTERVAL_S)

    def _write(self, size: os.terminal_size, content: str, *, is_new: bool) -> None:
        # A line feed first, so that the last line is free; then the region, which moves the cursor: save and restore.
        region = f"\n\x1b7\x1b[1;{size.lines - 1}r\x1b8\x1b[1A" if is_new else ""
        self._put(f"{region}\x1b7\x1b[{size.lines};1H\x1b[2K\x1b[2m{content[: size.columns - 1]}\x1b[0m\x1b8")

    def erase(self) -> None:
        """Give the line back to the program."""
        if (size := _size(self._stream)) is not None and self._drawn[0] is not None:
            self._put(f"\x1b7\x1b[r\x1b[{size.lines};1H\x1b[2K\x1b8")

    def _put(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()


def _size(stream: TextIO | None) -> os.terminal_size | None:
    """Return the size of the terminal; None if the stream is not one, or it is too small for another line."""
    try:
        if stream is None or not stream.isatty() or os.environ.get("TERM", "dumb") == "dumb":
            return None
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return None
    return size if size.lines >= MIN_ROWS else None
