"""A stream that ends at any byte: what came is kept, and only what is whole counts as whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any
from urllib.request import Request, urlopen

import pytest

from penstock.agents import Message, ModelRequest, Transcript, TruncatedResponse
from penstock.providers.models.remote import RemoteModel
from penstock.providers.reading.meter import Allowance, Meter
from penstock.testing.provider import FakeProviderServer, Say
from penstock.testing.provider import ToolCall as RequestedTool
from tests.providers.remote_models import Make, each_api

TEXT = "four score and “seven” years ago"


def whole_stream(server: FakeProviderServer, model: RemoteModel) -> bytes:
    """The bytes of one streamed answer, as they come over the wire."""
    request = ModelRequest(Transcript([Message.user("hello")]), max_output_tokens=100)
    body = json.dumps(model._body(request, streams=True)).encode()
    url = (server.url if model.path.startswith("/v1") else server.openai_url) + model.path
    headers = {"content-type": "application/json", "authorization": "Bearer none", "x-api-key": "none"}
    with urlopen(Request(url, body, headers)) as answered:
        sent: bytes = answered.read()
    return sent


async def read(model: RemoteModel, sent: bytes) -> tuple[str, list[Any], bool]:
    """The text and the tool calls that came of these bytes, and whether they were the whole."""

    async def chunks() -> AsyncIterator[bytes]:
        yield sent

    pieces: list[Any] = []
    meter = Meter(Allowance(100, 100, 1_000_000))
    try:
        async with aclosing(model._pieces(chunks(), model.format.reader(), meter)) as coming:
            async for piece in coming:
                pieces.append(piece)
    except TruncatedResponse as cut:
        return cut.partial, [piece for piece in pieces if not isinstance(piece, str)], False
    return "".join(p for p in pieces if isinstance(p, str)), [p for p in pieces if not isinstance(p, str)], True


@pytest.mark.requirement("T-10")
@each_api
@pytest.mark.parametrize("calls", [False, True], ids=["text", "tool call"])
async def test_a_stream_cut_at_any_byte_is_truncated_and_what_came_is_kept(make: Make, calls: bool) -> None:
    answer = Say(tool_calls=[RequestedTool("search", {"for": "dams"})]) if calls else Say(TEXT)
    async with FakeProviderServer(script=[answer]) as server:
        model = make(server)
        sent = await asyncio.to_thread(whole_stream, server, model)
    whole, tools, is_whole = await read(model, sent)
    assert is_whole
    assert (whole, len(tools)) == (("", 1) if calls else (TEXT, 0))
    seen_whole = False
    for end in range(len(sent)):
        text, found, is_whole = await read(model, sent[:end])
        assert whole.startswith(text)
        assert found in ([], tools)
        if is_whole:
            assert (text, found) == (whole, tools), f"cut at byte {end}: called whole, and is not"
        assert is_whole or not seen_whole, "more bytes do not make it less"
        seen_whole = is_whole
    assert seen_whole or sent.endswith(b"\n\n")
