"""Joined text: fewer events, the same text, the same order of everything else, and every position can be resumed."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.hosting.ports import HostedEvent, RunRecord
from penstock.server.joined_text import MAX_CHARACTERS, MAX_PIECES, Group, TextJoiner, group_json
from penstock.server.multiplex import Multiplex, Topic
from penstock.server.sse import event_json
from penstock.storage.memory import MemoryStores
from tests.server.served import ECHO, eventually, parse_events, served

LONG_S = 1_000.0


def piece(text: str = "a", node: str = "n", source: Any = None) -> tuple[str, dict[str, Any]]:
    return "text.delta", {"node_id": node, "source": source, "text": text}


def numbered(*events: tuple[str, dict[str, Any]], first: int = 1) -> list[HostedEvent]:
    return [HostedEvent(seq, 1_000 + 7 * seq, type, data) for seq, (type, data) in enumerate(events, first)]


pieces = st.builds(
    piece,
    st.text(max_size=5) | st.sampled_from(["😀", "x" * (MAX_CHARACTERS // 2), "y" * (MAX_CHARACTERS + 1)]),
    st.sampled_from(["a", "b"]),
    st.sampled_from([None, "agent", {"run": "x"}]),
)
others = st.tuples(
    st.sampled_from(["call.started", "budget", "node.completed", "tool.call", "text.delta"]),
    st.sampled_from([{}, {"node_id": "a"}, {"lost": "the event cannot be stored"}]),
)
logs = st.lists(pieces | others, max_size=40).map(lambda events: numbered(*events))


def taken_apart(event: dict[str, Any]) -> list[dict[str, Any]]:
    """The events that a joined one stands for, as a client takes it apart."""
    joined = event.get("joined")
    if joined is None:
        return [event]
    text, found = event["data"]["text"], []
    for at, (ago_ms, size) in enumerate(joined):
        data = {**event["data"], "text": text[:size]}
        found.append(
            {**event, "seq": event["seq"] - len(joined) + 1 + at, "at_ms": event["at_ms"] - ago_ms, "data": data}
        )
        text = text[size:]
        del found[-1]["joined"]
    assert text == ""
    return found


@given(logs, st.sets(st.integers(0, 40)))
def test_any_log_joined_in_any_way_is_the_same_log_in_the_same_order(log: list[HostedEvent], flushed: set[int]) -> None:
    joiner, groups = TextJoiner(), list[Group]()
    for at, event in enumerate(log):
        groups += joiner.add(event)
        if at in flushed:
            groups += joiner.flush()
            assert not joiner.is_waiting
    groups += joiner.flush()
    shown = [json.loads(json.dumps(group_json(group))) for group in groups]
    assert [one for event in shown for one in taken_apart(event)] == [event_json(event) for event in log]
    assert [event["seq"] for event in shown] == sorted(event["seq"] for event in shown)
    for group, event in zip(groups, shown, strict=True):
        assert len(group) == 1 or len(event["data"]["text"]) <= MAX_CHARACTERS
        assert len(group) <= MAX_PIECES


def test_neighbours_of_one_text_are_joined_until_another_event_comes() -> None:
    joiner = TextJoiner()
    log = numbered(piece("Hel"), piece("lo"), ("call.ended", {}), piece("!"), piece("?", node="other"), piece("."))
    groups = [group for event in log for group in joiner.add(event)] + joiner.flush()
    assert [[event.seq for event in group] for group in groups] == [[1, 2], [3], [4], [5], [6]]
    assert group_json(groups[0]) == {
        "seq": 2,
        "at_ms": 1_014,
        "type": "text.delta",
        "data": {"node_id": "n", "source": None, "text": "Hello"},
        "joined": [[7, 3], [0, 2]],
    }


def test_joined_text_is_bounded_in_characters_and_in_pieces() -> None:
    joiner = TextJoiner()
    groups = [group for event in numbered(*[piece("")] * (2 * MAX_PIECES + 1)) for group in joiner.add(event)]
    assert [len(group) for group in [*groups, *joiner.flush()]] == [MAX_PIECES, MAX_PIECES, 1]
    half = "x" * (MAX_CHARACTERS // 2)
    groups = [group for event in numbered(*[piece(half)] * 3) for group in joiner.add(event)]
    assert [len(group) for group in [*groups, *joiner.flush()]] == [2, 1]


async def stored(*logs: list[HostedEvent]) -> MemoryStores:
    """Runs r0, r1, …, each with these events."""
    stores = MemoryStores()
    for number, log in enumerate(logs):
        await stores.runs.add(RunRecord(f"r{number}", "ann", "g", 1))
        run = await stores.runs.claim("w", now_ms=0, lease_ms=1_000_000_000, run_id=f"r{number}")
        assert run is not None
        if log:
            await stores.events.append(run.id, run.epoch, log)
    return stores


def multiplex(stores: MemoryStores, places: list[int], **options: Any) -> Multiplex:
    names = [f"r{number}" for number in range(len(places))]
    return Multiplex(stores, names, places, heartbeat_s=LONG_S, **{"coalesce_s": LONG_S, **options})


async def received(stores: MemoryStores, places: list[int], **options: Any) -> list[dict[str, Any]]:
    stream = multiplex(stores, places, follows=False, **options)
    async with aclosing(stream.frames()) as frames:
        return parse_events("".join([frame.decode() async for frame in frames]))


def whole(events: list[dict[str, Any]], run_id: str) -> list[dict[str, Any]]:
    """The events of a run, taken apart."""
    of_run = [event["data"] for event in events if event["data"]["run_id"] == run_id]
    return [{key: one[key] for key in one if key != "run_id"} for event in of_run for one in taken_apart(event)]


@given(logs, logs, st.sampled_from([set(), {"text.delta"}, {"text.delta", "budget"}]))
def test_client_that_resumes_at_any_joined_event_misses_nothing_and_gets_nothing_twice(
    one: list[HostedEvent], other: list[HostedEvent], types: set[str]
) -> None:
    async def check() -> None:
        stores = await stored(one, other)
        events = await received(stores, [0, 0], types=types)
        for run_id, log in (("r0", one), ("r1", other)):
            wanted = [event_json(event) for event in log if not types or event.type in types]
            assert whole(events, run_id) == wanted
        for at, event in enumerate(events):
            places = [int(place) for place in event["id"].split(",")]
            rest = await received(stores, places, types=types)
            for run_id in ("r0", "r1"):
                assert whole(rest, run_id) == whole(events[at + 1 :], run_id)

    asyncio.run(check())


async def test_events_of_other_types_are_left_out_and_still_separate_text() -> None:
    log = numbered(piece("a"), ("budget", {}), piece("b"), piece("c"), ("run.completed", {}))
    events = await received(await stored(log), [0], types={"text.delta"})
    assert [(event["id"], event["data"]["data"]["text"]) for event in events] == [("1", "a"), ("4", "bc")]


async def append(stores: MemoryStores, *events: tuple[str, dict[str, Any]]) -> None:
    last = await stores.events.last_seq("r0")
    await stores.events.append("r0", 1, numbered(*events, first=last + 1))


async def test_first_text_is_sent_at_once_and_the_following_waits_for_the_next_event_that_is_none() -> None:
    stores = await stored([])
    async with aclosing(multiplex(stores, [0]).frames()) as frames:
        assert (await anext(frames)).startswith(b"retry: ")
        coming = asyncio.ensure_future(anext(frames))
        await append(stores, piece("Hel"))
        assert [event["id"] for event in parse_events((await coming).decode())] == ["1"]
        coming = asyncio.ensure_future(anext(frames))
        for text in ("lo", ", ", "you"):
            await append(stores, piece(text))
            await asyncio.wait((coming,), timeout=0)
        await append(stores, ("call.ended", {}))
        events = parse_events((await coming).decode())
    assert [(event["id"], event["event"]) for event in events] == [("4", "text.delta"), ("5", "call.ended")]
    assert events[0]["data"]["data"]["text"] == "lo, you"


async def test_text_that_waits_is_sent_when_its_time_is_over() -> None:
    stores = await stored([])
    async with aclosing(multiplex(stores, [0], coalesce_s=0.001).frames()) as frames:
        await anext(frames)
        for text in ("a", "b", "c"):
            await append(stores, piece(text))
            events = parse_events((await anext(frames)).decode())
            assert [event["data"]["data"]["text"] for event in events] == [text]


async def test_ids_of_other_runs_stay_before_text_that_waits() -> None:
    stores = await stored([], [])
    async with aclosing(multiplex(stores, [0, 0]).frames()) as frames:
        await anext(frames)
        await append(stores, piece("a"))
        assert b"id: 1,0\n" in await anext(frames)
        coming = asyncio.ensure_future(anext(frames))
        await append(stores, piece("b"))
        await asyncio.wait((coming,), timeout=0)
        await stores.events.append("r1", 1, numbered(("run.started", {})))
        (event,) = parse_events((await coming).decode())
    assert (event["id"], event["data"]["run_id"]) == ("1,1", "r1")
    rest = await received(stores, [1, 1])
    assert [one["data"]["data"] for one in rest] == [piece("b")[1]]


async def test_rest_is_what_was_not_sent_when_the_server_closes() -> None:
    stores = await stored([])
    blocked = asyncio.Event()

    async def changes() -> bytes:
        if await stores.events.last_seq("r0") == 3:
            blocked.set()
            await asyncio.Event().wait()
        return b""

    topic = Topic(changes)
    stream = multiplex(stores, [0], topics=[topic])
    async with aclosing(stream.frames()) as frames:
        await anext(frames)
        await append(stores, piece("a"))
        await anext(frames)
        topic.due_s = 0.0
        coming = asyncio.ensure_future(anext(frames))
        await append(stores, piece("b"), ("budget", {}))  # framed, but not yielded: the topic does not answer
        await blocked.wait()
        await append(stores, piece("c"))  # not read
        coming.cancel()
        await asyncio.wait((coming,))
    events = parse_events(stream.rest().decode())
    assert [event["id"] for event in events] == ["2", "3"]
    assert [one["data"]["data"] for one in await received(stores, [3])] == [piece("c")[1]]


async def test_server_that_closes_sends_the_text_that_waits() -> None:
    stores = await stored(numbered(("run.started", {})))
    stream = multiplex(stores, [0])
    async with aclosing(stream.frames()) as frames:
        await anext(frames)
        await anext(frames)
        for text in ("a", "b", "c"):
            await append(stores, piece(text))
        await anext(frames)
        await append(stores, piece("d"))
        coming = asyncio.ensure_future(anext(frames))
        await eventually(lambda: stream._logs[0].read == 5)
        coming.cancel()
        await asyncio.wait((coming,))
    assert [event["data"]["data"]["text"] for event in parse_events(stream.rest().decode())] == ["d"]
    assert stream.rest() == b""


@pytest.mark.parametrize("value", ["-1", "1001", "x", "1.5"])
async def test_time_out_of_bounds_is_refused_by_name(value: str) -> None:
    async with served() as server, server.client("ann") as ann:
        answer = await ann.get("/api/stream", params={"topics": "runs", "follow": "false", "coalesce_ms": value})
    error = answer.json()["error"]
    assert (answer.status_code, error["path"]) == (422, "query.coalesce_ms"), error


async def test_run_of_a_server_is_the_same_with_and_without_joining() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("echo", ECHO)
        run = await server.host.submit(owner="ann", graph_id="echo", input="hi")
        await server.host.wait(run.id)
        query = {"runs": f"{run.id}@0", "follow": "false"}
        plain, joined = [
            parse_events((await ann.get("/api/stream", params={**query, "coalesce_ms": ms})).text) for ms in (0, 1_000)
        ]
    assert whole(plain, run.id) == whole(joined, run.id) != []
