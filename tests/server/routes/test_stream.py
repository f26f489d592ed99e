"""One stream for several runs and for lists: whole, resumable, and of its owner alone."""

from __future__ import annotations

import asyncio
import itertools
import json
from contextlib import aclosing
from typing import Any

from penstock.agents.scripted import ScriptedModel
from penstock.hosting.host import HostSettings
from penstock.runtime.billing.prices import Price, PriceBook
from penstock.runtime.billing.usage import Usage
from penstock.server.multiplex import MAX_STREAM_RUNS, POLL_INTERVAL_S, Multiplex, Topic
from penstock.storage.memory import MemoryStores
from tests.server.served import (
    ASK,
    ECHO,
    GATE,
    Served,
    edge,
    happened,
    listening,
    node,
    parse_events,
    parts,
    served,
    wire,
)


async def ended(server: Served, owner: str = "ann") -> str:
    run = await server.host.submit(owner=owner, graph_id="echo", input="hi")
    await server.host.wait(run.id)
    return run.id


async def received(client: Any, headers: Any = None, **query: Any) -> list[dict[str, Any]]:
    answer = await client.get("/api/stream", params={"follow": "false", **query}, headers=headers)
    assert answer.status_code == 200, answer.text
    return parse_events(answer.text)


async def test_stream_has_all_events_of_every_run_in_order() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("echo", ECHO)
        runs = [await ended(server), await ended(server)]
        events = await received(ann, runs=",".join(f"{run}@0" for run in runs))
        for run in runs:
            own = [event["data"] for event in events if event["data"]["run_id"] == run]
            assert [one["seq"] for one in own] == [*range(1, await server.stores.events.last_seq(run) + 1)]
            assert own[-1]["type"] == "run.completed"


async def test_client_that_reconnects_at_any_event_misses_nothing_and_sees_nothing_twice() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("echo", ECHO)
        named = ",".join([f"{await ended(server)}@0", f"{await ended(server)}@0"])
        events = await received(ann, runs=named)
        for at, event in enumerate(events):
            assert await received(ann, {"Last-Event-ID": event["id"]}, runs=named) == events[at + 1 :]


async def test_only_events_of_the_given_types_are_sent() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("echo", ECHO)
        run = await ended(server)
        events = await received(ann, runs=f"{run}@0", types=["run.started", "run.completed"])
    assert [event["event"] for event in events] == ["run.started", "run.completed"]


async def test_run_of_another_user_is_answered_like_one_that_does_not_exist() -> None:
    async with served() as server, server.client("bob") as bob, server.client("root") as root:
        await server.save("echo", ECHO)
        run = await ended(server)
        answers = [await bob.get("/api/stream", params={"runs": f"{one}@0"}) for one in (run, "nothing")]
        assert [answer.status_code for answer in answers] == [404, 404]
        assert answers[0].text == answers[1].text
        assert await received(bob, topics="runs") == []
        assert await received(root, runs=f"{run}@0")


async def test_bad_parameters_are_refused_by_name() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("echo", ECHO)
        run = await ended(server)
        wrong = ["", "x", "x@", "x@-1", f"{run}@99", f"{run}@0,{run}@0", ",".join(f"r{n}@0" for n in range(51))]
        for runs in wrong:
            answer = await ann.get("/api/stream", params={"runs": runs})
            assert (answer.status_code, answer.json()["error"]["path"]) == (422, "query.runs"), runs
        answer = await ann.get("/api/stream", params={"runs": f"{run}@0"}, headers={"Last-Event-ID": "1,2"})
        assert (answer.status_code, answer.json()["error"]["path"]) == (422, "header.last-event-id")
        most = ",".join(f"r{number}@0" for number in range(MAX_STREAM_RUNS))
        assert (await ann.get("/api/stream", params={"runs": most})).status_code == 404


async def test_topics_send_the_state_of_their_lists() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("ask", ASK)
        run = await server.host.submit(owner="ann", graph_id="ask", input=1)
        await happened(server, run.id, "run.waiting")
        events = {event["event"]: event["data"] for event in await received(ann, topics=["runs", "approvals"])}
    assert events["run.summary"]["run"]["id"] == run.id
    assert [one["run_id"] for one in events["approvals.open"]["approvals"]] == [run.id]


def spending() -> Any:
    prices = PriceBook(registered={"gpt": Price(0, 1)}, use_genai_prices=False)
    model = ScriptedModel(
        lambda request: "a", name="gpt", usage=Usage.of(cost_usd="0.01", input_tokens=1, output_tokens=1)
    )
    settings = HostSettings(tick_s=0.05, drain_s=0, daily_usd="5", owner_daily_usd="1")
    return served(models={"m": model}, prices=prices, host_settings=settings)


PAID = {"nodes": [node("in", "input"), node("ask", "llm-completion", model="m")], "edges": [edge("in", "ask")]}


async def paid(server: Served, owner: str) -> None:
    await server.save("paid", PAID)
    run = await server.host.submit(owner=owner, graph_id="paid", input="x", limits={"max_cost_usd": "0.5"})
    await server.host.wait(run.id)


async def test_budgets_begin_with_what_the_list_of_budgets_shows_this_user() -> None:
    async with spending() as server:
        for owner in ("ann", "bob"):
            await paid(server, owner)
        shown = {}
        for user in ("ann", "vera", "root"):
            async with server.client(user) as client:
                (event,) = await received(client, topics="budgets")
                listed = (await client.get("/api/budgets")).json()
            assert (event["event"], "id" in event) == ("budgets.day", False)
            assert {**event["data"], "now_ms": 0} == {"type": "budgets.day", **listed, "now_ms": 0}
            shown[user] = {one["name"]: one["spent_usd"] for one in event["data"]["budgets"]}
    assert shown == {
        "ann": {"": 0.02, "ann": 0.01},
        "vera": {"": 0.02, "vera": 0.0},
        "root": {"": 0.02, "ann": 0.01, "bob": 0.01},
    }


async def test_budgets_are_sent_again_when_they_have_changed_and_only_then() -> None:
    async with spending() as server, listening(server.app) as address, wire(address) as client:
        client.send("GET", "/api/stream?topics=budgets", Authorization=server.client("ann").headers["Authorization"])
        assert await client.status() == 200
        await client.until(b"event: budgets.day")
        assert b'"name":"ann","limit_usd":1.0,"spent_usd":0.0' in await client.until(b"\n\n")
        reading = parts(server.app).host
        readings, original = asyncio.Semaphore(0), reading.budgets_of_day

        async def budgets_of_day(*given: Any) -> Any:
            found = await original(*given)
            readings.release()
            return found

        reading.budgets_of_day = budgets_of_day
        for _ in range(2):
            await readings.acquire()
        await paid(server, "ann")
        received = await client.until(b'"spent_usd":0.01,"held_usd":0.0,"unresolved_usd":0.0,"left_usd":0.99}]}\n\n')
    sent = [event["data"] for event in parse_events(received.decode()) if event.get("event") == "budgets.day"]
    assert all(one["budgets"] != other["budgets"] for one, other in itertools.pairwise(sent))
    assert [one["name"] for one in sent[-1]["budgets"]] == ["", "ann"]
    assert all(held["held_usd"] + held["spent_usd"] > 0 for event in sent for held in event["budgets"])


async def test_topic_is_read_at_its_interval_after_a_change_and_less_often_without() -> None:
    due, changed = list[float](), iter([b":a\n\n", b":b\n\n", b"", b":c\n\n"])
    loop = asyncio.get_running_loop()

    async def changes() -> bytes:
        due.append(loop.time())
        return next(changed)

    topic = Topic(changes, after_change_s=0.001)
    async with aclosing(Multiplex(MemoryStores(), [], [], heartbeat_s=1_000, topics=[topic]).frames()) as frames:
        got = [await anext(frames) for _ in range(4)]
    assert got[1:] == [b":a\n\n", b":b\n\n", b":c\n\n"]
    gaps = [later - earlier for earlier, later in itertools.pairwise(due)]
    assert gaps[0] >= 0.001
    assert gaps[2] >= POLL_INTERVAL_S, "nothing had changed at the reading before"


async def test_run_that_goes_on_is_followed_with_an_ended_one_on_the_same_connection() -> None:
    async with served() as server:
        await server.save("echo", ECHO)
        await server.save("gate", GATE)
        over = await ended(server)
        run = await server.host.submit(owner="ann", graph_id="gate")
        await server.gate.entered.wait()
        async with listening(server.app) as address, wire(address) as client:
            token = server.client("ann").headers["Authorization"]
            client.send("GET", f"/api/stream?runs={over}@0,{run.id}@0", Authorization=token)
            assert await client.status() == 200
            await client.until(b"run.completed")
            server.gate.opened.set()
            await client.until(b"run.completed")
            line = (await client.until(b"data: ")) + await client.until(b"}}")
    assert json.loads(line[line.index(b"data: ") + 6 :])["run_id"] == run.id
