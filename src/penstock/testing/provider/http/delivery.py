"""Deliver an order to its caller, or fail to, as its fate requires. Decides nothing and bills nothing by itself."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Mapping
from typing import Any

from penstock.testing.provider.fates import Cut, Endless, Fail, Garble, Hang, Refusal, Say, Truncate
from penstock.testing.provider.formats.format import Format, Stream
from penstock.testing.provider.generation import Generation
from penstock.testing.provider.http.desk import Order
from penstock.testing.provider.http.protocol import Exchange

JSON = {"content-type": "application/json"}
BLOCK = 4_096
"""Size of one write of an endless body."""
GZIP = zlib.MAX_WBITS | 16
NormalBreak = Cut | Hang | Truncate | Garble


async def deliver(order: Order, format: Format, exchange: Exchange, *, streams: bool) -> None:
    """Play the order's fate; cancelled when the caller disconnects."""
    await asyncio.sleep(order.fate.latency_s or 0)
    if isinstance(order.fate, Refusal) or order.generation is None:
        await _refuse(order, format, exchange)
    else:
        await _Delivery(order, order.fate, format, exchange).play(order.generation, streams)


async def answer_error(
    exchange: Exchange, format: Format, status: int, message: str, headers: Mapping[str, str] | None = None
) -> None:
    """Answer with an error in the format of the API."""
    await answer_json(exchange, status, format.error(status, message), headers)


async def answer_json(
    exchange: Exchange, status: int, body: dict[str, Any], headers: Mapping[str, str] | None = None
) -> None:
    """Answer with plain JSON."""
    await exchange.answer(status, {**JSON, **(headers or {})}, json.dumps(body).encode())


async def _refuse(order: Order, format: Format, exchange: Exchange) -> None:
    fate = order.fate
    order.settle()
    if not isinstance(fate, Refusal) or fate.status is None:
        exchange.reset()
        return
    headers = format.headers(order.number)
    if fate.retry_after_s is not None:
        headers["retry-after"] = f"{fate.retry_after_s:g}"
    await answer_error(exchange, format, fate.status, f"the script says {fate.status}", headers)


class _Delivery:
    """The delivery of one answer."""

    def __init__(self, order: Order, say: Say, format: Format, exchange: Exchange) -> None:
        self._order = order
        self._say = say
        self._format = format
        self._exchange = exchange

    async def play(self, generation: Generation, streams: bool) -> None:
        match self._say.then:
            case Fail(status):
                self._order.settle()
                headers = self._format.headers(self._order.number)
                await answer_error(self._exchange, self._format, status, f"the script says {status}", headers)
            case Cut(None):
                self._order.settle()
                self._exchange.reset()
            case Hang(None):
                await _forever()
            case Endless() as endless:
                await self._send_endless(generation, endless, streams)
            case fault:
                await self._send(generation, fault, streams)

    async def _send_endless(self, generation: Generation, endless: Endless, streams: bool) -> None:
        """Send a body without an end, until the caller disconnects."""
        opening, block = _endless_parts(self._format, generation, endless, streams)
        headers = self._headers(generation, streams)
        packer = zlib.compressobj(wbits=GZIP) if endless.compressed else None
        if packer is not None:
            headers["content-encoding"] = "gzip"
        self._exchange.shrink_buffers()
        await self._exchange.begin(endless.status, headers, None)
        part = opening
        while True:
            await self._exchange.write(
                part if packer is None else packer.compress(part) + packer.flush(zlib.Z_SYNC_FLUSH)
            )
            part = block
            if self._say.drip_s:
                await asyncio.sleep(self._say.drip_s)

    async def _send(self, generation: Generation, fault: NormalBreak | None, streams: bool) -> None:
        headers = self._headers(generation, streams)
        if streams:
            stream, length = self._format.stream(generation), None
        else:
            stream = _in_halves(self._format.plain(generation))
            length = len(stream.opening) + (0 if isinstance(fault, Truncate) else len(stream.ending))
        await self._exchange.begin(200, headers, length)
        await self._write(stream, fault, streams)

    def _headers(self, generation: Generation, streams: bool) -> dict[str, str]:
        format = self._format
        kind = {"content-type": format.stream_type if streams else format.plain_type}
        caching = {"cache-control": "no-cache"} if streams else {}
        usage = {} if streams else format.usage_headers(generation)
        return {**kind, **caching, **usage, **format.headers(self._order.number)}

    async def _write(self, stream: Stream, fault: NormalBreak | None, streams: bool) -> None:
        shown = len(stream.pieces) if fault is None else fault.after or 0
        await self._exchange.write(stream.opening)
        await self._pieces(stream.pieces[:shown])
        match fault:
            case Hang():
                await _forever()
            case Cut():
                self._order.settle()
                self._exchange.reset()
            case Truncate():
                self._order.settle()
                await self._exchange.end()
            case Garble() if streams:
                *pieces, ending = _broken(self._format.separator, *stream.pieces[shown:], stream.ending)
                await self._pieces(tuple(pieces))
                await self._end(ending)
            case Garble():
                await self._end(b"?" * len(stream.ending))
            case None:
                await self._end(stream.ending)

    async def _pieces(self, pieces: tuple[bytes, ...]) -> None:
        for piece in pieces:
            if self._say.drip_s:
                await asyncio.sleep(self._say.drip_s)
            await self._exchange.write(piece)
            self._order.pieces_sent += 1

    async def _end(self, ending: bytes) -> None:
        self._order.settle()
        await self._exchange.write(ending)
        await self._exchange.end()


def _endless_parts(format: Format, generation: Generation, endless: Endless, streams: bool) -> tuple[bytes, bytes]:
    """Return the beginning of an endless body, and the part that is repeated after it."""
    stream = format.stream(generation) if streams else None
    what = endless.what if generation.pieces else "padding"  # an answer without text has nothing else to repeat
    match what:
        case "padding" if stream is not None:
            return stream.opening, format.padding * (BLOCK // len(format.padding))
        case "padding":
            return b"{", b" " * BLOCK
        case "text" if stream is not None:
            pieces = b"".join(stream.pieces)
            return stream.opening, pieces * max(1, BLOCK // len(pieces))
    first = generation.pieces[0]
    before = json.dumps(format.plain(generation)) if stream is None else stream.pieces[0].decode()
    opening = before[: before.index(f'"{first}') + 1].encode()
    text = f"{generation.text} ".encode()
    return (opening if stream is None else stream.opening + opening), text * max(1, BLOCK // len(text))


def _in_halves(answer: dict[str, Any] | bytes) -> Stream:
    """Return a plain answer as a stream without pieces, so that it can break in the middle too."""
    body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    middle = len(body) // 2
    return Stream(body[:middle], (), body[middle:])


def _broken(separator: bytes, part: bytes, *others: bytes) -> tuple[bytes, ...]:
    """Return the parts with the last brace of the first event damaged."""
    first, end, rest = part.partition(separator)
    last = first.rindex(b"}")
    return first[:last] + b"?" + first[last + 1 :] + end + rest, *others


async def _forever() -> None:
    await asyncio.Event().wait()
