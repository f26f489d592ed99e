"""The bytes of a response pass through a reader, decompressed in pieces, which may end the response at any of them."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator

import httpx2
import pytest

from penstock.providers.reading.bodies import (
    ERROR_BYTES,
    Capped,
    Limited,
    Sink,
    UnreadableAnswer,
    decoded,
    hooked,
    limit,
)
from penstock.providers.reading.codings import PIECE

BODY = b"some words that go on " * 1_000


class Recorder:
    """Keeps the size of each piece, and its end."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.is_ended = False

    def take(self, data: bytes) -> bytes:
        self.sizes.append(len(data))
        return data

    def end(self) -> bytes:
        self.is_ended = True
        return b""


def passed(sink: Sink, data: bytes, size: int = 100) -> bytes:
    return b"".join(sink.take(data[at : at + size]) for at in range(0, len(data), size)) + sink.end()


@pytest.mark.parametrize("header", ["", "identity", "gzip", "x-gzip", "GZIP", "deflate"])
def test_a_body_is_decompressed_by_its_coding(header: str) -> None:
    packed = {"gzip": gzip.compress, "x-gzip": gzip.compress, "deflate": zlib.compress}.get(header.lower(), bytes)(BODY)
    sink = Recorder()
    assert passed(decoded(sink, header), packed) == BODY
    assert sink.is_ended


def test_a_bomb_comes_in_small_pieces() -> None:
    sink = Recorder()
    decoded(sink, "gzip").take(gzip.compress(bytes(10_000_000)))
    assert (max(sink.sizes), sum(sink.sizes)) == (PIECE, 10_000_000)


@pytest.mark.parametrize(
    ("header", "data", "why"),
    [
        ("br", b"x", "'br' was not requested"),
        ("zstd", b"", "'zstd' was not requested"),
        ("gzip, gzip", b"x", "'gzip, gzip' was not requested"),
        ("gzip", b"not gzip", "cannot be unpacked"),
        ("gzip", gzip.compress(BODY)[:-9], "ends in the middle"),
    ],
)
def test_a_body_that_cannot_be_decompressed_in_pieces_is_refused(header: str, data: bytes, why: str) -> None:
    with pytest.raises(UnreadableAnswer, match=why):
        passed(decoded(Recorder(), header), data)


def test_a_capped_body_passes_up_to_its_cap() -> None:
    assert passed(Capped(len(BODY)), BODY) == BODY
    with pytest.raises(UnreadableAnswer, match="larger than 21,999 bytes"):
        passed(Capped(len(BODY) - 1), BODY)


class Chunks(httpx2.SyncByteStream):
    """A body of so many bytes, and whether it was closed."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.is_closed = False

    def __iter__(self) -> Iterator[bytes]:
        for _ in range(self._size // 1_024):
            yield bytes(1_024)

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("extra", [0, 1_024])
def test_a_response_without_an_answer_is_read_up_to_a_limit_and_closed_there(extra: int) -> None:
    stream = Chunks(ERROR_BYTES + extra)
    response = httpx2.Response(500, stream=stream)
    limit(response, Limited)
    if extra:
        with pytest.raises(UnreadableAnswer, match="larger than 1,048,576 bytes"):
            response.read()
    else:
        assert len(response.read()) == ERROR_BYTES
    assert stream.is_closed


def test_our_hooks_are_added_once_and_keep_those_of_the_client() -> None:
    def own(response: object) -> None: ...

    once = hooked({"response": [own]})
    assert once["response"][0] is own
    assert {name: len(hooks) for name, hooks in once.items()} == {"request": 1, "response": 2}
    assert hooked(once) == once
