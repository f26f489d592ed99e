"""Streams: framing that nothing inside can break, resuming anywhere, and ends that are noticed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.hosting.ports import HostedEvent, RunRecord, StoreUnavailable
from penstock.server.auth import User
from penstock.server.errors import ApiError
from penstock.server.metrics import Metrics
from penstock.server.settings import ServerSettings
from penstock.server.sse import (
    CHUNK_BYTES,
    HEARTBEAT,
    READ_AHEAD,
    EventStream,
    ServerShutdown,
    Streams,
    _chunk,
    follow,
    frame,
    framed,
    is_over,
    with_heartbeats,
)
from penstock.storage.memory import MemoryStores
from tests.server.served import GATE, SECRETS, TOKENS, happened, listening, parse_events, served, wire

ANN = User("ann", "user")
PAGE = {"Accept": "application/json"}
HOSTILE = "a\r\nevent: run.completed\ndata: {}\n\nid: 9\r\r\0\u2028\u2029\x0b😀"


@pytest.mark.parametrize("text", [HOSTILE, "\ud800", "\n\n", "data: x", ":", ""])
def test_model_output_cannot_break_the_framing(text: str) -> None:
    wire_form = frame(HostedEvent(7, 0, "text.delta", {"text": text}))
    lines = wire_form.split(b"\n")
    assert lines[0] == b"id: 7"
    assert lines[1] == b"event: text.delta"
    assert lines[2].startswith(b"data: ")
    assert lines[3:] == [b"", b""]
    assert b"\r" not in wire_form
    assert b"\0" not in wire_form
    assert parse_events(wire_form.decode())[0]["data"]["data"] == {"text": text}


@given(st.text())
def test_any_text_is_framed_losslessly(text: str) -> None:
    wire_form = framed({"text": text}, event="text.delta", id="1")
    assert wire_form.count(b"\n") == 4
    assert parse_events(wire_form.decode())[0]["data"] == {"text": text}


def test_an_invalid_event_type_is_omitted() -> None:
    assert framed(1, event="a\nb") == b"data: 1\n\n"


async def log_of(*types: str, status: str = "completed", text: str = "") -> MemoryStores:
    """A run that has emitted these events, and has this status."""
    stores = MemoryStores()
    await stores.runs.add(RunRecord("r", "ann", "g", 1))
    run = await stores.runs.claim("w", now_ms=0, lease_ms=1_000_000_000)
    assert run is not None
    events = [HostedEvent(at, 0, type, {"text": text}) for at, type in enumerate(types, 1)]
    await stores.events.append("r", run.epoch, events)
    if status != "running":
        await stores.runs.update("r", run.epoch, status=status)
    return stores


async def frames_of(stores: MemoryStores, after: int = 0, heartbeat_s: float = 0.001) -> list[dict[str, Any]]:
    async with aclosing(follow(stores, "r", after, heartbeat_s)) as frames:
        return parse_events("".join([one.decode() async for one in frames]))


@pytest.mark.requirement("X-6")
async def test_a_stream_can_be_resumed_at_every_event_without_gap_or_repetition() -> None:
    types = ["run.queued", *["text.delta"] * 200, "run.completed"]
    stores = await log_of(*types)
    for after in (0, 1, 63, 64, 65, 128, 201, 202, 500):
        assert [int(one["id"]) for one in await frames_of(stores, after)] == list(range(after + 1, 203))


async def test_a_stream_resumed_after_the_end_is_over_at_once() -> None:
    stores = await log_of("run.queued", "run.failed", status="failed")
    assert await frames_of(stores, 2, heartbeat_s=1_000) == []
    assert await frames_of(stores, 2_000, heartbeat_s=1_000) == []


async def test_a_resumed_end_is_not_final() -> None:
    stores = await log_of("run.halted", "run.granted", "run.completed")
    assert [one["event"] for one in await frames_of(stores)] == ["run.halted", "run.granted", "run.completed"]


async def test_a_stream_waits_for_both_final_event_and_final_status() -> None:
    stores = await log_of("run.completed", status="running")
    async with aclosing(follow(stores, "r", 1, 1_000)) as frames:
        await anext(frames)
        ending = asyncio.ensure_future(anext(frames, None))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not ending.done()
        await stores.runs.update("r", 1, status="completed")
        assert await ending is None
    assert await frames_of(await log_of("run.queued")) != []  # completed, without an event that says so


async def test_an_idle_stream_sends_comments() -> None:
    stores = await log_of("run.queued", status="running")
    async with aclosing(follow(stores, "r", 1, 0.001)) as frames:
        assert (await anext(frames)).startswith(b"retry: ")
        assert [await anext(frames) for _ in range(3)] == [HEARTBEAT] * 3


async def test_a_chunk_is_small_whatever_the_events_are() -> None:
    stores = MemoryStores()
    await stores.runs.add(RunRecord("r", "ann", "g", 1))
    run = await stores.runs.claim("w", now_ms=0, lease_ms=1_000_000)
    assert run is not None
    large = [HostedEvent(at, 0, "text.delta", {"text": "x" * 20_000}) for at in range(1, 11)]
    await stores.events.append("r", run.epoch, large)
    async with aclosing(follow(stores, "r", 0, 0.001)) as frames:
        await anext(frames)
        sizes = [len(await anext(frames)) for _ in range(10)]
    assert max(sizes) <= CHUNK_BYTES


@pytest.mark.parametrize("size", [1_000, CHUNK_BYTES // 3, CHUNK_BYTES - 100, 2 * CHUNK_BYTES])
async def test_an_event_that_does_not_fit_starts_the_next_chunk(size: int) -> None:
    types = ["run.queued", *["text.delta"] * 70, "run.completed"]
    stores = await log_of(*types, text="x" * size)
    for after in (0, 1, 40, 71):
        assert [int(one["id"]) for one in await frames_of(stores, after)] == list(range(after + 1, 73))


@pytest.mark.parametrize("spare", [-1, 0, 1])
async def test_each_chunk_ends_with_the_event_that_its_place_names(spare: int) -> None:
    """Also where two events fill a chunk to the byte, or are a byte too long for one."""
    empty = len(frame(HostedEvent(10, 0, "text.delta", {"text": ""})))
    text = "x" * (CHUNK_BYTES // 2 - empty)
    events = [HostedEvent(at, 0, "text.delta", {"text": text}) for at in range(10, 15)]
    events[1] = HostedEvent(11, 0, "text.delta", {"text": text[: len(text) - spare] + "x" * -spare})
    seen, place = [], 9
    while rest := [event for event in events if event.seq > place]:
        chunk, place = _chunk(rest, place)
        seen.append([int(one["id"]) for one in parse_events(chunk.decode())])
        assert place == seen[-1][-1]
    assert seen == ([[10, 11], [12, 13], [14]] if spare >= 0 else [[10], [11], [12, 13], [14]])
    assert _chunk([], 14) == (b"", 14)


class Client:
    """The other side of an ASGI connection, by hand."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.left = asyncio.Event()
        self._news = asyncio.Condition()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        async with self._news:
            self.sent.append(message)
            self._news.notify_all()

    async def has_read(self, messages: int) -> None:
        async with self._news:
            await self._news.wait_for(lambda: len(self.sent) >= messages)

    def text(self) -> str:
        return b"".join(one.get("body", b"") for one in self.sent).decode()


SCOPE: dict[str, Any] = {"type": "http", "path": "/api/runs/r/events", "headers": []}


def opened(frames: Any, streams: Streams, **options: Any) -> EventStream:
    """A stream of ann's that has its place."""
    with streams.place(ANN.name):
        return EventStream(frames, streams, ANN, **options)


async def endless(gone: asyncio.Event) -> Any:
    """Frames without end, and without ever waiting."""
    try:
        while True:
            yield b":\n\n"
    finally:
        gone.set()


async def test_a_stream_ends_after_a_disconnect_that_send_does_not_report() -> None:
    client, gone, left = Client(), asyncio.Event(), asyncio.Event()
    metrics = Metrics()

    async def on_disconnect() -> None:
        left.set()

    stream = opened(endless(gone), Streams(ServerSettings(), metrics), on_disconnect=on_disconnect)
    running = asyncio.ensure_future(stream(SCOPE, client.receive, client.send))
    await client.has_read(10)
    assert metrics.open_streams == 1
    client.left.set()
    await running
    assert gone.is_set()
    assert left.is_set()
    assert metrics.open_streams == 0


async def test_a_stream_is_cancelled_with_its_request_and_leaves_nothing() -> None:
    client, gone = Client(), asyncio.Event()
    metrics = Metrics()
    stream = opened(endless(gone), Streams(ServerSettings(), metrics))
    running = asyncio.ensure_future(stream(SCOPE, client.receive, client.send))
    await client.has_read(3)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert gone.is_set()
    assert metrics.open_streams == 0


async def test_at_shutdown_every_stream_ends_cleanly() -> None:
    client, gone = Client(), asyncio.Event()
    streams = Streams(ServerSettings(), Metrics())
    running = asyncio.ensure_future(opened(endless(gone), streams)(SCOPE, client.receive, client.send))
    await client.has_read(3)
    streams.close()
    await running
    assert client.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    assert refused(streams, "ann") == 503


@pytest.mark.parametrize("is_slow", [False, True])
async def test_at_shutdown_a_stream_sends_the_rest_unless_a_send_was_interrupted(is_slow: bool) -> None:
    client, streams, blocked = Client(), Streams(ServerSettings(), Metrics()), asyncio.Event()

    async def waiting() -> AsyncGenerator[bytes, None]:
        yield b"first\n\n"
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if is_slow and message.get("body") == b"first\n\n":
            blocked.set()
            await asyncio.Event().wait()
        await client.send(message)

    stream = opened(waiting(), streams, rest=lambda: b"rest\n\n")
    running = asyncio.ensure_future(stream(SCOPE, client.receive, send))
    await (blocked.wait() if is_slow else client.has_read(2))
    streams.close()
    await running
    assert client.text() == ("" if is_slow else "first\n\nrest\n\n")


def refused(streams: Streams, user: str) -> int:
    with pytest.raises(ApiError) as caught, streams.place(user):
        pass
    return caught.value.status


async def test_streams_at_the_limit_are_fine_and_one_more_is_refused() -> None:
    streams = Streams(ServerSettings(max_streams=3, max_streams_per_user=2), Metrics())
    streams.enter("ann")
    streams.enter("ann")
    assert refused(streams, "ann") == 429
    streams.enter("bob")
    assert refused(streams, "cat") == 429
    streams.leave("ann")
    streams.enter("ann")


def test_a_reservation_is_released_if_no_stream_is_opened() -> None:
    streams = Streams(ServerSettings(max_streams_per_user=1), Metrics())
    for _ in range(3):
        with pytest.raises(StoreUnavailable), streams.place("ann"):
            raise StoreUnavailable("gone")


CHAT_GATE = {"nodes": [*GATE["nodes"][1:], {**GATE["nodes"][0], "type": "chat-start"}], "edges": GATE["edges"]}
BEGINNING = [
    ("/api/runs", {"graph_id": "gate"}),
    ("/api/agents/chat/chat", {"content": "hi"}),
    ("/api/chats/{chat}/messages", {"content": "hi"}),
    ("/api/chats/{chat}/messages/{message}/retry", {}),
    ("/api/chats/{chat}/messages/{message}/continue", {}),
    ("/api/chats/{chat}/messages/{user_message}/edit", {"content": "hello"}),
]


@pytest.mark.parametrize(("path", "body"), BEGINNING)
@pytest.mark.parametrize(("why", "status"), [("crowded", 429), ("closing", 503)])
async def test_nothing_is_started_for_a_stream_over_the_limit(path: str, body: Any, why: str, status: int) -> None:
    settings = ServerSettings(tokens=TOKENS, max_streams_per_user=1)
    async with served(settings) as server, server.client("ann") as ann:
        await server.save("gate", GATE)
        await server.save("chat", CHAT_GATE)
        turn = (await ann.post("/api/agents/chat/chat", json={"content": "hi"})).json()
        await ann.post(f"/api/runs/{turn['run_id']}/cancel")
        await server.host.wait(turn["run_id"])
        ids = {"chat": turn["chat_id"], "message": turn["message_id"], "user_message": turn["user_message_id"]}
        streams, before = server.app.state.server.streams, await everything(server)
        if why == "crowded":
            streams.enter("ann")
        else:
            streams.close()
        for query, headers in (("?stream=true", {}), ("", {"Accept": "text/event-stream"})):
            refused = await ann.post(path.format(**ids) + query, json=body, headers=headers)
            assert (refused.status_code, refused.headers.get("x-run-id")) == (status, None)
            assert "retry-after" in refused.headers
        assert await everything(server) == before


async def everything(server: Any) -> tuple[set[str], dict[str, int]]:
    """All runs, and the number of messages in each chat."""
    chats = await server.stores.chats.list()
    turn = {chat.id: len([*await server.chats.tree(chat.id)]) for chat in chats}
    return {run.id for run in await server.stores.runs.list()}, turn


async def test_a_stream_that_cannot_start_releases_its_reservation() -> None:
    async with served(ServerSettings(tokens=TOKENS, max_streams_per_user=1)) as server, server.client("ann") as ann:
        await server.save("gate", GATE)
        server.gate.opened.set()
        for _ in range(3):
            refused = await ann.post("/api/runs?stream=true", json={"graph_id": "gate", "limits": {"timeout_s": 1e9}})
            assert refused.status_code == 422
            taken = await ann.post("/api/chats/none/messages?stream=true", json={"content": "x"})
            assert taken.status_code == 404
        whole = await ann.post("/api/runs?stream=true", json={"graph_id": "gate"})
        assert parse_events(whole.text)[-1]["event"] == "run.completed"
        assert (await ann.get(f"/api/runs/{whole.headers['x-run-id']}/export")).status_code == 200
        assert server.app.state.server.metrics.open_streams == 0


async def test_an_outage_is_reported_in_the_stream_and_keeps_the_position() -> None:
    async def frames() -> Any:
        yield frame(HostedEvent(1, 0, "run.queued"))
        raise StoreUnavailable("the disk is full; password=canary-1234")

    client = Client()
    await opened(frames(), Streams(ServerSettings(), Metrics()))(SCOPE, client.receive, client.send)
    *_, error = parse_events(client.text())
    assert (error["event"], error["data"]["code"]) == ("error", "store_unavailable")
    assert "id" not in error
    assert "canary" not in client.text()
    assert client.sent[-1]["more_body"] is False


@pytest.mark.requirement("X-6")
async def test_a_client_reconnecting_over_a_socket_gets_every_event_once() -> None:
    async with served() as server, listening(server.app) as address:
        await server.save("gate", GATE)
        run = await server.host.submit(owner="ann", graph_id="gate", input="x")
        token = f"Bearer {SECRETS['ann']}"
        async with wire(address) as first:
            first.send("GET", f"/api/runs/{run.id}/events", Authorization=token)
            await first.until(b"event: run.started")
        await server.gate.entered.wait()
        server.gate.opened.set()
        await happened(server, run.id, "run.completed")
        async with server.client("ann") as ann:
            whole = parse_events((await ann.get(f"/api/runs/{run.id}/events")).text)
            for place in range(len(whole) + 1):
                rest = await ann.get(f"/api/runs/{run.id}/events", headers={"Last-Event-ID": str(place)})
                assert parse_events(rest.text) == whole[place:]
                assert parse_events((await ann.get(f"/api/runs/{run.id}/events?after={place}")).text) == whole[place:]
            page = await ann.get(f"/api/runs/{run.id}/events?after=1&limit=2", headers={"Accept": "application/json"})
            assert page.json()["events"] == [one["data"] for one in whole[1:3]]
            assert page.json()["last_seq"] == len(whole)


@pytest.mark.parametrize("place", ["-1", "x", "9" * 30, "1.5", ""])
async def test_an_invalid_position_is_refused_by_name(place: str) -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("gate", GATE)
        run = await server.host.submit(owner="ann", graph_id="gate")
        answer = await ann.get(f"/api/runs/{run.id}/events", headers={"Last-Event-ID": place})
        assert answer.status_code == 422


@pytest.mark.parametrize(("on_leave", "status"), [("cancel", "cancelled"), ("continue", "completed")])
async def test_a_disconnect_from_a_chat_stream_cancels_only_if_requested(on_leave: str, status: str) -> None:
    async with served() as server, listening(server.app) as address:
        await server.save("slow", CHAT_GATE)
        async with wire(address) as client:
            headers = {"Authorization": f"Bearer {SECRETS['ann']}", "Content_Type": "application/json"}
            target = f"/api/agents/slow/chat?stream=true&on_leave={on_leave}"
            client.send("POST", target, b'{"content": "hi"}', **headers)
            await server.gate.entered.wait()
            await client.until(b"event: node.started")
        (run,) = await server.stores.runs.list()
        if on_leave == "continue":
            server.gate.opened.set()
        assert (await server.host.wait(run.id)).status == status


@pytest.mark.parametrize("status", ["queued", "running", "waiting", "parked", "completed", "failed", "halted"])
@pytest.mark.parametrize("way", ["after", "header", "page"])
async def test_a_position_ahead_of_the_log_is_refused_with_the_newest_position(status: str, way: str) -> None:
    """In whatever state the run is: a stream from there would never say anything."""
    async with served(ServerSettings(tokens=TOKENS, heartbeat_s=1_000)) as server, server.client("ann") as ann:
        newest = await standing(server, status)
        path = "/api/runs/r/events"
        for ahead in (newest + 1, newest + 500, 10**15 - 1):
            if way == "header":
                answer = await ann.get(path, headers={"Last-Event-ID": str(ahead)})
            else:
                headers = {"Accept": "application/json"} if way == "page" else {}
                answer = await ann.get(f"{path}?after={ahead}", headers=headers)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (422, "invalid_value")
            assert error["path"] == ("header.last-event-id" if way == "header" else "query.after")
            assert error["details"] == [{"last_seq": newest, "status": status}]
            assert f"send {newest}, or 0 for all events" in error["message"]


async def standing(server: Any, status: str) -> int:
    """A run of ann's with this status, which no host works on; the seq of its newest event."""
    stores = server.stores
    await server.host.close()
    await stores.runs.add(RunRecord("r", "ann", "g", 1))
    if status == "queued":
        await stores.events.append("r", 0, [HostedEvent(1, 0, "run.queued")])
        return 1
    run = await stores.runs.claim("w", now_ms=0, lease_ms=1_000_000_000)
    types = ["run.queued", "run.started", "node.started"]
    types += [f"run.{status}"] if status != "running" else []
    await stores.events.append("r", run.epoch, [HostedEvent(at, 0, type) for at, type in enumerate(types, 1)])
    if status != "running":
        await stores.runs.update("r", run.epoch, status=status)
    return len(types)


async def test_a_run_without_events_is_followed_only_from_the_beginning() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.host.close()
        await server.stores.runs.add(RunRecord("r", "ann", "g", 1))
        answer = await ann.get("/api/runs/r/events?after=1")
        assert (answer.status_code, answer.json()["error"]["details"][0]["last_seq"]) == (422, 0)
        page = await ann.get("/api/runs/r/events", headers={"Accept": "application/json"})
        assert (page.status_code, page.json()["events"]) == (200, [])


async def test_a_refused_client_continues_from_the_named_position() -> None:
    async with served() as server, server.client("ann") as ann:
        newest = await standing(server, "completed")
        refused = (await ann.get("/api/runs/r/events?after=99")).json()["error"]
        place = refused["details"][0]["last_seq"]
        assert parse_events((await ann.get(f"/api/runs/r/events?after={place}")).text) == []
        assert len(parse_events((await ann.get("/api/runs/r/events")).text)) == newest


@pytest.mark.parametrize("status", ["completed", "failed", "halted", "cancelled"])
async def test_after_the_final_event_the_response_is_204_so_that_browsers_do_not_reconnect(status: str) -> None:
    async with served() as server, server.client("ann") as ann:
        newest = await standing(server, status)
        for query, place in ((f"?after={newest}", {}), ("", {"Last-Event-ID": str(newest)})):
            over = await ann.get(f"/api/runs/r/events{query}", headers={"Accept": "text/event-stream", **place})
            assert (over.status_code, over.content, over.headers["x-run-id"]) == (204, b"", "r")
        one_before = await ann.get(f"/api/runs/r/events?after={newest - 1}")
        assert [one["event"] for one in parse_events(one_before.text)] == [f"run.{status}"]
        page = await ann.get(f"/api/runs/r/events?after={newest}", headers=PAGE)
        assert (page.status_code, page.json()["events"], page.json()["last_seq"]) == (200, [], newest)


async def test_a_parked_or_active_run_is_not_over_after_its_newest_event() -> None:
    settings = ServerSettings(tokens=TOKENS, heartbeat_s=0.001)
    async with served(settings) as server, server.client("ann") as ann:
        newest = await standing(server, "parked")
        parked = await ann.get(f"/api/runs/r/events?after={newest}")
        assert (parked.status_code, parse_events(parked.text)) == (200, []), (
            "come back: another server will go on with it"
        )
    async with served(settings) as server, server.client("ann") as ann:
        newest = await standing(server, "failed")
        await server.host.resume("r")
        assert (await ann.get(f"/api/runs/r/events?after={newest}", headers=PAGE)).json()["last_seq"] == newest + 1
        run = await server.stores.runs.get("r")
        assert run is not None
        assert not await is_over(server.stores, run, newest)
        assert not await is_over(server.stores, run, newest + 1)


async def test_other_users_do_not_learn_the_position_of_a_run() -> None:
    async with served() as server, server.client("bob") as bob:
        await standing(server, "running")
        assert (await bob.get("/api/runs/r/events?after=99")).json() == (await bob.get("/api/runs/none/events")).json()


# Items with heartbeats.


async def numbers(count: int, taken: list[int], pause: asyncio.Event | None = None) -> AsyncGenerator[int, None]:
    try:
        for number in range(count):
            taken.append(number)
            yield number
        if pause is not None:
            await pause.wait()
    finally:
        taken.append(-1)


def streams_with(heartbeat_s: float) -> Streams:
    return Streams(ServerSettings(heartbeat_s=heartbeat_s), Metrics())


async def test_items_come_in_order_and_then_the_end() -> None:
    taken: list[int] = []
    assert [item async for item in with_heartbeats(numbers(100, taken), streams_with(60))] == [*range(100)]
    assert taken == [*range(100), -1]


async def test_a_reader_that_stops_is_read_ahead_of_by_a_few_items_only() -> None:
    taken: list[int] = []
    async with aclosing(with_heartbeats(numbers(1_000, taken), streams_with(60))) as items:
        assert await anext(items) == 0
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(taken) <= READ_AHEAD + 2
    assert taken[-1] == -1  # the generator is closed with its reader


async def test_heartbeats_come_while_there_is_no_item_and_the_end_at_shutdown() -> None:
    streams, taken = streams_with(0.01), list[int]()
    async with aclosing(with_heartbeats(numbers(2, taken, asyncio.Event()), streams)) as items:
        assert [await anext(items) for _ in range(4)] == [0, 1, None, None]
        streams.close()
        with pytest.raises(ServerShutdown):
            while await anext(items) is None:
                pass
    assert taken[-1] == -1


async def test_an_error_comes_after_the_items_before_it() -> None:
    async def failing() -> AsyncGenerator[int, None]:
        yield 1
        yield 2
        raise StoreUnavailable("gone")

    got: list[int | None] = []
    with pytest.raises(StoreUnavailable):
        async for item in with_heartbeats(failing(), streams_with(60)):
            got.append(item)
    assert got == [1, 2]


# Followers of runs that this host works on.


async def test_a_run_that_the_host_works_on_is_followed_without_reading_the_stores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served() as server:
        await server.save("gate", GATE)
        run = await server.host.submit(owner="ann", graph_id="gate", input="x")
        await server.gate.entered.wait()

        async def unread(*anything: Any) -> Any:
            raise StoreUnavailable("the stores are not read")

        with monkeypatch.context() as patch:
            for reading in ("read", "last_seq", "wait"):
                patch.setattr(type(server.stores.events), reading, unread)
            followed = b""
            async with aclosing(follow(server.host.run_logs(), run.id, 0, 60)) as frames:
                async for piece in frames:
                    followed += piece
                    server.gate.opened.set()
        whole = await server.stores.events.read(run.id)
        assert followed == b"retry: 2000\n\n" + b"".join(frame(event) for event in whole)


async def test_a_follower_of_a_run_that_was_taken_over_reads_what_the_other_host_writes() -> None:
    async with served() as server:
        await server.save("gate", GATE)
        run = await server.host.submit(owner="ann", graph_id="gate", input="x")
        await server.gate.entered.wait()
        logs = server.host.run_logs()
        while not await logs.events.read(run.id):
            await logs.events.wait(run.id, 0, 5)
        seen = await server.stores.events.last_seq(run.id)
        server.host._runs.by_id[run.id].fence()
        taken = await server.stores.runs.claim("other", now_ms=10**14, lease_ms=10**6, run_id=run.id)
        assert taken is not None
        seen = await server.stores.events.last_seq(run.id)
        await server.stores.events.append(run.id, taken.epoch, [HostedEvent(seen + 1, 0, "progress", {})])
        assert await logs.events.wait(run.id, seen, 5)
        assert [event.seq for event in await logs.events.read(run.id, seen)] == [seen + 1]
        server.gate.opened.set()
