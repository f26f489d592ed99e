"""One stream for several runs and for lists: whole, resumable, and of its owner alone."""

from __future__ import annotations

import json
from typing import Any

from penstock.server.multiplex import MAX_STREAM_RUNS
from tests.server.served import ASK, ECHO, GATE, Served, happened, listening, parse_events, served, wire


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
