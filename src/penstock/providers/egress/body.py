"""Read the body of a response up to its size limit."""

from __future__ import annotations

from collections.abc import AsyncIterator

from penstock.providers.reading.codings import Unpacker, Unreadable


async def read(chunks: AsyncIterator[bytes], coding: str | None, max_bytes: int) -> AsyncIterator[bytes]:
    """Yield the decompressed body in pieces; raise Unreadable as soon as it is larger than `max_bytes`."""
    count = 0
    async for piece in chunks if coding is None else _unpacked(chunks, Unpacker(coding)):
        count += len(piece)
        if count > max_bytes:
            raise Unreadable(f"it is larger than {max_bytes:,} bytes")
        yield piece


async def _unpacked(chunks: AsyncIterator[bytes], unpacker: Unpacker) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        for piece in unpacker.feed(chunk):
            yield piece
    for piece in unpacker.end():
        yield piece
