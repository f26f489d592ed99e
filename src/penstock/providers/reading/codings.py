"""Decompress a body in pieces of bounded size.

A few kilobytes can decompress to gigabytes, and codings can be nested. So only a single coding is accepted, and each
piece is counted by the reader before the next one is produced.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

PIECE = 65_536
ACCEPTED = "gzip, deflate"
"""Value of the Accept-Encoding header."""
WINDOW = {"gzip": zlib.MAX_WBITS | 16, "x-gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS | 32}


class Unreadable(Exception):
    """The body is larger than allowed, or does not match its declared coding."""


def coding_of(header: str | None) -> str | None:
    """Return the coding of a body, None if uncompressed; Unreadable if it is unsupported or there are several."""
    codings = [each for each in (part.strip().lower() for part in (header or "").split(",")) if each != "identity"]
    codings = [each for each in codings if each]
    if not codings:
        return None
    if len(codings) > 1 or codings[0] not in WINDOW:
        raise Unreadable(f"its coding {', '.join(codings)[:40]!r} was not requested")
    return codings[0]


class Unpacker:
    """Decompresses one body; each piece has at most `PIECE` bytes."""

    def __init__(self, coding: str) -> None:
        self._unpack = zlib.decompressobj(WINDOW[coding])
        self._begun = False

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the pieces that `chunk` adds."""
        unpack = self._unpack
        self._begun = self._begun or bool(chunk)
        try:
            while chunk and not unpack.eof:
                piece = unpack.decompress(chunk, PIECE)
                chunk = unpack.unconsumed_tail
                if piece:
                    yield piece
        except zlib.error as error:
            raise Unreadable("it cannot be unpacked") from error

    def end(self) -> Iterator[bytes]:
        """Yield the remaining pieces; raise Unreadable if the body is incomplete."""
        unpack = self._unpack
        try:
            # After the input is exhausted, the decompressor holds output only if the last piece was full.
            while self._begun and not unpack.eof and (piece := unpack.decompress(b"", PIECE)):
                yield piece
        except zlib.error as error:
            raise Unreadable("it cannot be unpacked") from error
        if self._begun and not unpack.eof:
            raise Unreadable("it ends in the middle")
