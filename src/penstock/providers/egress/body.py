"""The body of an answer, unpacked a little at a time and counted after that.

A few kilobytes can unpack to gigabytes, and codings can be put inside each other. So one coding is understood, it is
unpacked in pieces of bounded size, and whatever comes out is counted before the next piece is made.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator

PIECE = 65_536
ACCEPTED = "gzip, deflate"
"""What we say we can unpack."""
WINDOW = {"gzip": zlib.MAX_WBITS | 16, "x-gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS | 32}


class Unreadable(Exception):
    """The body is larger than allowed, or not what it says it is."""


def coding_of(header: str | None) -> str | None:
    """The one coding of a body, None for a plain one; Unreadable if there is another, or more than one."""
    codings = [each for each in (part.strip().lower() for part in (header or "").split(",")) if each != "identity"]
    codings = [each for each in codings if each]
    if not codings:
        return None
    if len(codings) > 1 or codings[0] not in WINDOW:
        raise Unreadable(f"its coding {', '.join(codings)[:40]!r} was not asked for")
    return codings[0]


async def read(chunks: AsyncIterator[bytes], coding: str | None, max_bytes: int) -> AsyncIterator[bytes]:
    """The body as it was before it was packed, in pieces; Unreadable as soon as it is larger than `max_bytes`."""
    count = 0
    pieces = _whole(chunks) if coding is None else _unpacked(chunks, WINDOW[coding])
    async for piece in pieces:
        count += len(piece)
        if count > max_bytes:
            raise Unreadable(f"it is larger than {max_bytes:,} bytes")
        yield piece


async def _whole(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        yield chunk


async def _unpacked(chunks: AsyncIterator[bytes], window: int) -> AsyncIterator[bytes]:
    unpack = zlib.decompressobj(window)
    begun = False
    try:
        async for chunk in chunks:
            begun = begun or bool(chunk)
            while chunk and not unpack.eof:
                piece = unpack.decompress(chunk, PIECE)
                chunk = unpack.unconsumed_tail
                if piece:
                    yield piece
        # What an exhausted input still holds is less than a piece, except when the last piece was full.
        while begun and not unpack.eof and (piece := unpack.decompress(b"", PIECE)):
            yield piece
    except zlib.error as error:
        raise Unreadable("it cannot be unpacked") from error
    if begun and not unpack.eof:
        raise Unreadable("it ends in the middle")
