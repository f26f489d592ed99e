"""Brings an order to its caller, or fails to, as its fate says. Decides nothing and bills nothing by itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from penstock.testing.provider.http.desk import Order
from penstock.testing.provider.http.fates import Break, Cut, Fail, Garble, Hang, Refusal, Say, Truncate
from penstock.testing.provider.http.formats.format import Format, Stream
from penstock.testing.provider.http.generation import Generation
from penstock.testing.provider.http.protocol import Exchange

JSON = {"content-type": "application/json"}
EVENTS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


async def deliver(order: Order, format: Format, exchange: Exchange, *, streams: bool) -> None:
    """Play the order's fate; cancelled when the caller goes away."""
    await asyncio.sleep(order.fate.latency_s or 0)
    if isinstance(order.fate, Refusal) or order.generation is None:
        await _refuse(order, format, exchange)
    else:
        await _Delivery(order, order.fate, format, exchange).play(order.generation, streams)


async def answer_error(
    exchange: Exchange, format: Format, status: int, message: str, headers: Mapping[str, str] | None = None
) -> None:
    """An error in the words of the API."""
    await answer_json(exchange, status, format.error(status, message), headers)


async def answer_json(
    exchange: Exchange, status: int, body: dict[str, Any], headers: Mapping[str, str] | None = None
) -> None:
    """A plain answer."""
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
    """One answer on its way."""

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
            case fault:
                await self._send(generation, fault, streams)

    async def _send(self, generation: Generation, fault: Break | None, streams: bool) -> None:
        headers = self._format.headers(self._order.number)
        if streams:
            stream, length = self._format.stream(generation), None
            await self._exchange.begin(200, {**EVENTS, **headers}, length)
        else:
            stream = _in_halves(self._format.plain(generation))
            length = len(stream.opening) + (0 if isinstance(fault, Truncate) else len(stream.ending))
            await self._exchange.begin(200, {**JSON, **headers}, length)
        await self._write(stream, fault, streams)

    async def _write(self, stream: Stream, fault: Break | None, streams: bool) -> None:
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
                *pieces, ending = _broken(*stream.pieces[shown:], stream.ending)
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


def _in_halves(answer: dict[str, Any]) -> Stream:
    """A plain answer as a stream without pieces, so that it can break in the middle too."""
    body = json.dumps(answer).encode()
    middle = len(body) // 2
    return Stream(body[:middle], (), body[middle:])


def _broken(part: bytes, *others: bytes) -> tuple[bytes, ...]:
    """The parts with the first event of the first of them cut off before its last brace."""
    first, end, rest = part.partition(b"\n\n")
    return first[:-1] + end + rest, *others


async def _forever() -> None:
    await asyncio.Event().wait()
