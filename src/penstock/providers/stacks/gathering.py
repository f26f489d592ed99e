"""Gather the body of a model request before it is sent, because its cost is estimated from it.

A body that a library sends while reading it, such as a file or a generator, is read first. It is kept in memory, so its
size is bounded.
"""

from __future__ import annotations

from penstock.errors import PenstockError
from penstock.providers.reading.families import in_the_families

MAX_BODY_BYTES = 128 * 1024 * 1024
"""More than providers accept in one model request."""


class RequestTooLarge(PenstockError):
    """The body of a model request is too large to be kept, and so its cost cannot be known before it is sent."""

    def __init__(self, max_bytes: int = MAX_BODY_BYTES) -> None:
        super().__init__(
            f"the body of a model request is larger than {max_bytes:,} bytes and was not sent; "
            "upload files separately and refer to them"
        )


class Gathered:
    """Bytes that are kept, up to a number of bytes."""

    def __init__(self, max_bytes: int = MAX_BODY_BYTES) -> None:
        self.data = bytearray()
        self._max_bytes = max_bytes

    def add(self, piece: bytes | bytearray | memoryview) -> None:
        """Keep another piece; raise RequestTooLarge if it is too much."""
        if len(self.data) + len(piece) > self._max_bytes:
            raise in_the_families(RequestTooLarge(self._max_bytes))
        self.data += piece
