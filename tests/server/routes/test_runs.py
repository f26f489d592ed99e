"""Runs over HTTP: the same again, stopped, resumed, granted, forked, replayed, exported."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.hosting.host import HostSettings
from penstock.hosting.limits import RunLimits
from penstock.hosting.ports import HostedEvent, RunRecord
from penstock.server.auth import Token
from penstock.server.routes.runs import EXPORT_PAGE
from penstock.server.settings import ServerSettings
from tests.server.served import ASK, ECHO, GATE, TOKENS, happened, parse_events, parts, served


async def test_the_same_run_id_returns_the_same_run_and_conflicts_with_other_content() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("echo", ECHO)
        body = {"graph_id": "echo", "run_id": "one", "input": {"a": [1, None, "é"]}}
        first, again = [await ann.post("/api/runs", json=body) for _ in range(2)]
        assert first.json()["id"] == again.json()["id"] == "one"
        other = await ann.post("/api/runs", json={**body, "input": 2})
        assert (other.status_code, other.json()["error"]["code"]) == (409, "conflict")


LATER: dict[str, Any] = {
    "saved": {**ECHO, "nodes": [*ECHO["nodes"], {**ECHO["nodes"][0], "id": "also"}]},
    "a draft": {"nodes": [{**ECHO["nodes"][0], "type": "nothing-like-it"}], "edges": []},
    "archived": None,
}
"""What may have become of a graph since a run of it began."""


@pytest.mark.parametrize("since", LATER)
@pytest.mark.parametrize("door", ["/api/runs", "/v1/chat/completions", "/v1/responses"])
async def test_a_repeated_submission_returns_the_run_even_if_its_graph_changed(door: str, since: str) -> None:
    bodies = {
        "/api/runs": {"graph_id": "echo", "run_id": "one", "input": "hi"},
        "/v1/chat/completions": {"model": "echo", "messages": [{"role": "user", "content": "hi"}]},
        "/v1/responses": {"model": "echo", "input": "hi"},
    }
    body = {**bodies[door], **({} if door == "/api/runs" else {"penstock": {"run_id": "one"}})}
    async with served() as server, server.client("ann") as ann:
        await server.save("echo", ECHO)
        first = await ann.post(door, json=body)
        assert first.is_success, first.text
        await server.host.wait("one")
        if LATER[since] is None:
            await server.stores.graphs.archive("echo")
        else:
            await server.save("echo", LATER[since])
        again = await ann.post(door, json=body)
        assert again.is_success, again.text
        assert again.json()["id"] == first.json()["id"]
        assert [run.graph_version for run in await server.stores.runs.list()] == [1]
        other = await ann.post(door, json={**body, "run_id": "two"} if door == "/api/runs" else bodies[door])
        assert other.is_success is (since == "saved"), other.text


async def test_a_run_of_a_missing_graph_is_not_found() -> None:
    async with served() as server, server.client("ann") as ann:
        answer = await ann.post("/api/runs", json={"graph_id": "none"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_a_full_queue_refuses_with_retry_after() -> None:
    one = HostSettings(tick_s=0.05, drain_s=0, max_running=1, max_queued_per_owner=1)
    async with served(host_settings=one) as server, server.client("ann") as ann:
        await server.save("gate", GATE)
        await ann.post("/api/runs", json={"graph_id": "gate"})
        await server.gate.entered.wait()
        assert (await ann.post("/api/runs", json={"graph_id": "gate"})).status_code == 201
        late = await ann.post("/api/runs", json={"graph_id": "gate"})
        assert (late.status_code, late.json()["error"]["code"]) == (429, "overloaded")
        assert int(late.headers["retry-after"]) >= 1
        server.gate.opened.set()


async def test_cancel_before_during_twice_and_after_a_run() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("gate", GATE)
        early = await ann.post("/api/runs/ann:1/cancel")
        assert early.json() == {"result": "remembered"}
        run = (await ann.post("/api/runs", json={"graph_id": "gate", "run_id": "ann:1"})).json()
        assert (await server.host.wait(run["id"])).status == "cancelled"
        assert (await ann.post("/api/runs/ann:1/cancel")).json() == {"result": "ended"}


async def test_a_user_whose_name_is_a_prefix_of_another_cannot_take_or_cancel_their_ids() -> None:
    tokens = (*TOKENS, Token.of("annabel", "user", "secret-of-annabel"))
    async with (
        served(ServerSettings(tokens=tokens)) as server,
        server.client("ann") as ann,
        server.client(Authorization="Bearer secret-of-annabel") as annabel,
    ):
        await server.save("echo", ECHO)
        for other in ("annabel:1", "annabel", "Ann:1", "bob:ann:1"):
            refused = await ann.post(f"/api/runs/{other}/cancel")
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")
        taken = await ann.post("/api/runs", json={"graph_id": "echo", "run_id": "annabel:1"})
        assert (taken.status_code, taken.json()["error"]["path"]) == (422, "$.run_id")
        run = await annabel.post("/api/runs", json={"graph_id": "echo", "run_id": "annabel:1"})
        assert run.status_code == 201
        assert (await server.host.wait("annabel:1")).status == "completed"


async def test_a_cancelled_run_is_resumed_and_a_completed_one_is_not() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("gate", GATE)
        run = (await ann.post("/api/runs", json={"graph_id": "gate", "input": "x"})).json()
        await server.gate.entered.wait()
        await ann.post(f"/api/runs/{run['id']}/cancel")
        assert (await server.host.wait(run["id"])).status == "cancelled"
        server.gate.opened.set()
        assert (await ann.post(f"/api/runs/{run['id']}/resume")).status_code == 200
        assert (await server.host.wait(run["id"])).status == "completed"
        assert (await ann.post(f"/api/runs/{run['id']}/resume")).status_code == 409


async def test_a_halted_run_names_the_limit_and_a_useless_grant_is_a_conflict_even_for_admins() -> None:
    async with served() as server, server.client("ann") as ann, server.client("root") as root:
        await server.save("echo", ECHO)
        run = (await ann.post("/api/runs", json={"graph_id": "echo", "limits": {"max_steps": 1}})).json()
        assert run["halted_by"] is None
        await server.host.wait(run["id"])
        path = f"/api/runs/{run['id']}"
        halted = (await ann.get(path)).json()
        limit = {"unit": "steps", "limit": 1.0, "used": 1.0, "node_id": None}
        assert halted["halted_by"] == {"whose": "run", "budget": "main", **limit}
        exported = json.loads((await ann.get(f"{path}/export")).text.splitlines()[0])
        assert exported["run"]["halted_by"] == halted["halted_by"]
        for client in (ann, root):
            refused = await client.post(f"{path}/grant", json={"limits": {"timeout_s": 9, "max_cost_usd": "0.01"}})
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
            assert refused.json()["error"]["message"].endswith("grant max_steps")
        assert (await ann.get(path)).json() == halted
        granted = await ann.post(f"{path}/grant", json={"limits": {"max_steps": 5}})
        assert (granted.status_code, granted.json()["halted_by"]) == (200, None)
        assert (await server.host.wait(run["id"])).status == "completed"


async def test_a_users_grant_is_capped_by_the_ceilings_and_an_admins_is_not() -> None:
    few = HostSettings(tick_s=0.05, drain_s=0, ceilings=RunLimits(max_steps=5))
    async with served(host_settings=few) as server, server.client("ann") as ann, server.client("root") as root:
        await server.save("echo", ECHO)
        run = (await ann.post("/api/runs", json={"graph_id": "echo", "limits": {"max_steps": 1}})).json()
        await server.host.wait(run["id"])
        path = f"/api/runs/{run['id']}"
        halted = (await ann.get(path)).json()
        for steps in (5, 50):
            refused = await ann.post(f"{path}/grant", json={"limits": {"max_steps": steps}})
            assert (refused.status_code, refused.json()["error"]["code"]) == (422, "invalid_value")
            assert "at most 5, which is the ceiling of a run here" in refused.json()["error"]["message"]
            assert (await ann.get(path)).json() == halted
        granted = await root.post(f"{path}/grant", json={"limits": {"max_steps": 50}})
        assert (granted.status_code, granted.json()["limits"]["max_steps"]) == (200, 51)
        assert (await server.host.wait(run["id"])).status == "completed"


async def test_a_run_is_forked_with_another_input_and_replayed() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("echo", ECHO)
        run = (await ann.post("/api/runs", json={"graph_id": "echo", "input": "old"})).json()
        await server.host.wait(run["id"])
        forked = await ann.post(f"/api/runs/{run['id']}/fork", json={"at": "out", "input": "new", "run_id": "fork"})
        assert forked.status_code == 201, forked.text
        assert "new" in json.dumps((await server.host.wait("fork")).output)
        replayed = (await ann.post(f"/api/runs/{run['id']}/replay")).json()
        again = await server.host.wait(replayed["id"])
        assert again.output == (await server.host.wait(run["id"])).output


async def test_runs_are_filtered_and_listed_without_their_input() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("echo", ECHO)
        await server.save("ask", ASK)
        done = (await ann.post("/api/runs", json={"graph_id": "echo", "input": "payload"})).json()
        await server.host.wait(done["id"])
        waiting = (await ann.post("/api/runs", json={"graph_id": "ask", "input": 1})).json()
        await happened(server, waiting["id"], "run.waiting")
        found = await ann.get("/api/runs", params={"status": ["completed", "failed"]})
        assert [one["id"] for one in found.json()["runs"]] == [done["id"]]
        assert "payload" not in found.text
        found = await ann.get("/api/runs", params={"graph_id": "ask"})
        assert [one["status"] for one in found.json()["runs"]] == ["waiting"]
        newest = (await ann.get("/api/runs", params={"limit": 1})).json()
        older = (await ann.get("/api/runs", params={"limit": 1, "before": newest["next"]})).json()
        assert ({newest["runs"][0]["id"], older["runs"][0]["id"]}, older["next"]) == ({done["id"], waiting["id"]}, None)


async def test_a_run_is_exported_whole() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("echo", ECHO)
        run = (await ann.post("/api/runs", json={"graph_id": "echo", "input": "x\ny"})).json()
        await server.host.wait(run["id"])
        exported = await ann.get(f"/api/runs/{run['id']}/export")
        lines = [json.loads(line) for line in exported.text.splitlines()]
        assert lines[0]["run"]["input"] == "x\ny"
        assert lines[1]["graph"]["document"] == ECHO
        events = [line["event"] for line in lines[2:]]
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        assert exported.headers["content-disposition"].startswith("attachment")


async def test_a_long_run_is_exported_with_each_of_its_events_once() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.host.close()
        await server.stores.runs.add(RunRecord("r", "ann", "g", 1))
        await server.stores.runs.claim("w", now_ms=0, lease_ms=1_000)
        many = range(1, 2 * EXPORT_PAGE + 10)
        await server.stores.events.append("r", 1, [HostedEvent(seq, 0, "node.progress") for seq in many])
        lines = (await ann.get("/api/runs/r/export")).text.splitlines()
        assert [json.loads(line)["event"]["seq"] for line in lines[1:]] == [*many]


@pytest.mark.parametrize("way", ["accept", "query"])
async def test_a_run_can_be_watched_from_the_call_that_starts_it(way: str) -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("echo", ECHO)
        options = {"headers": {"Accept": "text/event-stream"}} if way == "accept" else {"params": {"stream": "true"}}
        watched = await ann.post("/api/runs", json={"graph_id": "echo"}, **options)  # type: ignore[arg-type]
        assert parse_events(watched.text)[-1]["event"] == "run.completed"
        assert watched.headers["x-run-id"]
        assert parts(server.app).metrics.open_streams == 0
