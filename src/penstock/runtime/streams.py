"""Streams: a generator is drained inside its call, and the pieces of a stream that was stopped are kept.

The value of a stream that ends by itself is the list of its pieces. A stream that is stopped has no value: its output
so far is kept as an `IncompleteOutput`, a type of its own, so that a reader cannot take it for a result.

A stop reaches a stream where it waits (the task is interrupted), and between two pieces: a generator that never waits
would otherwise run past every deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import closing
from dataclasses import dataclass
from types import AsyncGeneratorType, GeneratorType
from typing import Any

STREAMS = (GeneratorType, AsyncGeneratorType)


@dataclass(frozen=True, slots=True)
class IncompleteOutput:
    """The output of a stream that was stopped before its end. It appears in `partial`, and is never a result."""

    pieces: tuple[Any, ...]
    """Pieces that the stream yielded before the stop, from the beginning."""
    dropped: int = 0
    """Number of pieces yielded after these and not kept (`RunSettings.max_kept_pieces`)."""


Output = Callable[[], IncompleteOutput | None]
"""Returns the output of a stream so far, None if it has yielded nothing; may be called from any thread."""


def first_pieces(pieces: list[Any], max_kept: int) -> IncompleteOutput | None:
    """Return the first `max_kept` of `pieces`, None if there are none; another thread may append meanwhile."""
    count = len(pieces)
    kept = tuple(pieces[: min(count, max_kept)])
    return IncompleteOutput(kept, count - len(kept)) if count else None


class PieceBuffer:
    """The first pieces of a stream whose value is not the list of them."""

    __slots__ = ("_dropped", "_max_kept", "_pieces")

    def __init__(self, max_kept: int) -> None:
        self._pieces: list[Any] = []
        self._max_kept = max_kept
        self._dropped = 0

    def append(self, piece: Any) -> None:
        """Keep the piece, or count it if the buffer is full."""
        if len(self._pieces) < self._max_kept:
            self._pieces.append(piece)
        else:
            self._dropped += 1

    def output(self) -> IncompleteOutput | None:
        """Return the output so far; None if nothing was yielded."""
        pieces, dropped = tuple(self._pieces), self._dropped
        return IncompleteOutput(pieces, dropped) if pieces or dropped else None


async def turning(stream: GeneratorType[Any, Any, Any]) -> AsyncGenerator[Any, None]:
    """Wrap a sync generator as an async one that yields to the event loop after each piece."""
    with closing(stream):
        for piece in stream:
            yield piece
            await asyncio.sleep(0)
