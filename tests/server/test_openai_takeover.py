"""Answers of runs that are left in the middle and go on elsewhere: the official SDK against a whole server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from penstock.agents.messages import ToolCall
from penstock.agents.model import Model, ModelRequest, ModelResponse
from penstock.agents.tools import tool
from penstock.chat.service import ChatService
from penstock.hosting.host import HostSettings, RunHost
from penstock.hosting.ports import RunRecord, StoreUnavailable
from penstock.nodes import executors
from penstock.server.app import create_app
from penstock.server.metrics import Metrics
from penstock.server.openai.responses import _frames
from penstock.server.openai.retries import Retries
from penstock.server.openai.runs import RunHandle, Service
from penstock.server.openai.wire.answer import AnswerBuilder, Piece
from penstock.server.openai.wire.response import EchoedRequest, ResponseBuilder
from penstock.server.settings import ServerSettings
from penstock.server.sse import Streams
from penstock.storage import Stores, open_stores
from tests.hosting.graphs import killed
from tests.nodes.graphs import graph, node
from tests.server.openai_service import ANNA, TOKENS
from tests.server.served import listening

QUICK = HostSettings(drain_s=0, lease_s=0.3, tick_s=0.05)
DOCUMENT = graph(
    [node("start", "chat-start"), node("agent", "agent", model="teller", stream=True, tools=["look"])],
    ["start > agent"],
)
BEGUN = "".join(f"{number}, " for number in range(1, 63))
WHOLE = "".join(f"{number}, " for number in range(1, 100)) + "100."


class Hangs:
    """Where an attempt comes to a halt until its worker is gone."""


HANGS = Hangs()
Saying = Sequence[str | ToolCall | Hangs]


class Teller(Model):
    """A model that answers each request with the next of its answers; some never end."""

    def __init__(self, answers: Sequence[Saying]) -> None:
        super().__init__("teller")
        self._answers = list(answers)
        self.calls = 0

    async def request_stream(self, request: ModelRequest) -> AsyncIterator[Any]:
        self.calls += 1
        answer = self._answers.pop(0)
        for piece in answer:
            if isinstance(piece, Hangs):
                await asyncio.Event().wait()
            yield piece
        text = "".join(piece for piece in answer if isinstance(piece, str))
        tools = tuple(piece for piece in answer if isinstance(piece, ToolCall))
        yield ModelResponse(text, tools, finish_reason="tool_calls" if tools else "stop")


@tool
def look(at: str) -> str:
    """Look at something."""
    return f"{at} is bright"


class Scene:
    """One server on one set of stores, and hosts that come and go behind it."""

    def __init__(self, stores: Stores, answers: Sequence[Saying]) -> None:
        self.stores = stores
        self.teller = Teller(answers)
        self.first = self.host()
        self.client: openai.AsyncOpenAI

    def host(self) -> RunHost:
        services = {"models": {"teller": self.teller}, "tools": {"look": look}}
        return RunHost(self.stores, executors=executors(), services=services, settings=QUICK)

    @asynccontextmanager
    async def serving(self, host: RunHost) -> AsyncIterator[openai.AsyncOpenAI]:
        app = create_app(host, ChatService(host, self.stores.chats), self.stores, ServerSettings(tokens=TOKENS))
        async with listening(app) as (_, port):
            url = f"http://127.0.0.1:{port}/v1"
            async with openai.AsyncOpenAI(api_key=ANNA, base_url=url, timeout=30, max_retries=0) as client:
                yield client

    @asynccontextmanager
    async def taken_over(self) -> AsyncIterator[RunHost]:
        """The first host dies, and while the block lasts another one is there."""
        await killed(self.first)
        async with self.host() as second:
            ChatService(second, self.stores.chats)
            yield second

    async def wait_for_text(self, text: str) -> None:
        """Once so much of the answer is in the database."""
        (run,) = await self.stores.runs.list()
        emitted, after = "", 0
        while not emitted.endswith(text):
            await self.stores.events.wait(run.id, after, 1)
            for event in await self.stores.events.read(run.id, after):
                after, emitted = event.seq, emitted + str(event.data.get("text", ""))


@asynccontextmanager
async def scene(*answers: Saying) -> AsyncIterator[Scene]:
    async with await open_stores("memory:") as stores:
        await stores.graphs.save("teller", "anna", "Teller", DOCUMENT, now_ms=1)
        there = Scene(stores, answers)
        async with there.first, there.serving(there.first) as client:
            there.client = client
            yield there


async def heard_until(stream: Any, end: str) -> list[Any]:
    """The events of a stream up to the one that completes this text."""
    seen: list[Any] = []
    emitted = ""
    async for event in stream:
        seen.append(event)
        emitted += event.delta if event.type == "response.output_text.delta" else ""
        if emitted.endswith(end):
            return seen
    raise AssertionError(f"the stream ended after {emitted!r}")


def deltas(events: Sequence[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


SAME: Saying = (WHOLE[:50], WHOLE[50:])
OTHER: Saying = ("1, 2, ", "buckle my shoe.")


@pytest.mark.parametrize("again", [SAME, OTHER, ("1, 2.",)], ids=["the same", "something else", "less"])
async def test_the_response_of_a_taken_over_run_is_its_output(again: Saying) -> None:
    text = "".join(map(str, again))
    async with scene((BEGUN, HANGS), again) as it:
        stream = await it.client.responses.create(model="teller", input="Count.", stream=True, background=True)
        seen = await heard_until(stream, BEGUN)
        async with it.taken_over() as second:
            seen += [event async for event in stream]
            assert seen[-1].type == "response.completed"
            assert seen[-1].response.output_text == text
            assert [event.sequence_number for event in seen] == list(range(len(seen)))
            given = await it.client.responses.retrieve(seen[-1].response.id)
            assert given == seen[-1].response
            run = await second.get(given.id.removeprefix("resp_"))
            assert run is not None
            assert (run.output, run.epoch) == (text, 2)
            later = await it.client.responses.retrieve(given.id, stream=True)
            assert [event async for event in later] == seen
    assert it.teller.calls == 2


async def test_a_stream_across_a_takeover_repeats_nothing() -> None:
    async with scene((BEGUN, HANGS), SAME) as it:
        stream = await it.client.responses.create(model="teller", input="Count.", stream=True, background=True)
        seen = await heard_until(stream, BEGUN)
        async with it.taken_over():
            seen += [event async for event in stream]
    assert deltas(seen) == WHOLE
    assert [event.type for event in seen].count("response.output_item.added") == 1


async def test_a_response_retrieved_midway_repeats_nothing() -> None:
    async with scene((BEGUN, HANGS), (WHOLE[:300], HANGS)) as it:
        given = await it.client.responses.create(model="teller", input="Count.", background=True)
        await it.wait_for_text(BEGUN)
        async with it.taken_over():
            await it.wait_for_text(WHOLE[:300])
            now = await it.client.responses.retrieve(given.id)
    assert (now.status, now.output_text) == ("in_progress", WHOLE[:300])


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_completion_across_a_takeover_repeats_nothing(streamed: bool) -> None:
    async with scene((BEGUN, HANGS), SAME) as it:
        asking = asyncio.ensure_future(_completed(it.client, streamed))
        while not await it.stores.runs.list():  # noqa: ASYNC110  it is on its way
            await asyncio.sleep(0.01)
        await it.wait_for_text(BEGUN)
        async with it.taken_over():
            assert await asking == WHOLE


async def _completed(client: openai.AsyncOpenAI, streamed: bool) -> str | None:
    emitted: Any = [{"role": "user", "content": "Count."}]
    if not streamed:
        whole = await client.chat.completions.create(model="teller", messages=emitted)
        return whole.choices[0].message.content
    stream = await client.chat.completions.create(model="teller", messages=emitted, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def test_text_before_a_tool_call_is_not_repeated_after_a_takeover() -> None:
    looking = ("Let me look. ", ToolCall("c1", "look", {"at": "it"}))
    async with scene(looking, ("It is ", HANGS), ("It is ", "bright.")) as it:
        stream = await it.client.responses.create(model="teller", input="Look.", stream=True, background=True)
        seen = await heard_until(stream, "It is ")
        async with it.taken_over():
            seen += [event async for event in stream]
    items = seen[-1].response.output
    assert [item.type for item in items] == ["message", "function_call", "message"]
    assert deltas(seen) == seen[-1].response.output_text == "Let me look. It is bright."
    assert it.teller.calls == 3


async def test_the_stream_of_a_parked_run_is_resumed_where_it_stopped() -> None:
    async with scene((BEGUN, HANGS), SAME) as it:
        stream = await it.client.responses.create(model="teller", input="Count.", stream=True, background=True)
        seen = await heard_until(stream, BEGUN)
        await it.first.close(drain_s=0)
        (parked,) = [event async for event in stream]
        assert (parked.type, parked.code) == ("error", "parked")
        place = parked.sequence_number
        again = await it.client.responses.retrieve(seen[0].response.id, stream=True, starting_after=place)
        assert [event async for event in again] == [parked]
        async with it.host() as second, it.serving(second) as client:
            rest = await client.responses.retrieve(
                seen[0].response.id, stream=True, starting_after=parked.sequence_number
            )
            seen += [event async for event in rest]
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert deltas(seen) == seen[-1].response.output_text == WHOLE


class Away(RunHandle):
    """A run that nothing can be read of."""

    async def pieces(self, answer: AnswerBuilder) -> AsyncGenerator[Piece, None]:
        raise StoreUnavailable("gone")
        yield


@pytest.mark.parametrize(("after", "place"), [(None, 1), (0, 1), (7, 7)])
async def test_a_stream_that_fails_before_its_start_position_keeps_that_position(after: int | None, place: int) -> None:
    settings = ServerSettings()
    service = Service(Any, Any, Any, Any, Streams(settings, Metrics()), Retries(0), 1)  # type: ignore[arg-type]
    run = RunRecord("r", "anna", "teller", 1, created_ms=1)
    under_way = ResponseBuilder("r", 0, EchoedRequest("teller"))
    *_, last = [frame async for frame in _frames(Away(service, run, frozenset()), under_way, after)]
    error = json.loads(last.decode().partition("data: ")[2])
    assert (error["type"], error["code"], error["sequence_number"]) == ("error", "store_unavailable", place)
