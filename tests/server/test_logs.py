"""What a server logs of requests and runs: ids, names and figures, and nothing that people or models wrote."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from penstock import logs
from penstock.hosting.ports import RunRecord
from tests.server.served import CHAT, ECHO, SECRETS, served

PROMPT = "canary-of-a-prompt"


def records(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    return [getattr(record, logs.FIELDS) for record in caplog.records if record.getMessage() == event]


@pytest.mark.requirement("X-15")
async def test_each_request_and_each_run_is_one_record(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock")
    async with served() as server, server.client("ann") as ann, server.client("bob") as bob:
        await server.save("echo", ECHO)
        await server.save("chat", CHAT)
        body = {"graph_id": "echo", "input": PROMPT}
        run = (await ann.post("/api/runs", json=body)).json()
        await server.host.wait(run["id"])
        await bob.get(f"/api/runs/{run['id']}/events?q={PROMPT}")
        await ann.get(f"/api/runs/{run['id']}")
        await ann.get(f"/api/{PROMPT}")
        turn = await ann.post("/api/agents/chat/chat", json={"content": PROMPT})
        await server.host.wait(turn.json()["run_id"])
        model = {"model": "chat", "messages": [{"role": "user", "content": PROMPT}]}
        assert (await ann.post("/v1/chat/completions", json=model)).status_code == 200
    started, hidden, read, unknown, talked, completed = records(caplog, "request")
    assert started | {"duration_ms": 0, "request_id": ""} == {
        "request_id": "",
        "method": "POST",
        "route": "/api/runs",
        "status": 201,
        "duration_ms": 0,
        "user": "ann",
        "run_id": run["id"],
    }
    assert started["duration_ms"] > 0
    shown = (hidden["route"], hidden["status"], hidden["user"], hidden.get("run_id"))
    assert shown == ("/api/runs/{run_id}/events", 422, "bob", None)
    assert (read["route"], read["run_id"]) == ("/api/runs/{run_id}", run["id"])
    assert (unknown["route"], unknown["status"], "run_id" in unknown) == ("other", 404, False)
    assert talked["run_id"] == turn.json()["run_id"]
    ended = {record["run_id"]: record for record in records(caplog, "run")}
    assert ended.keys() == {run["id"], turn.json()["run_id"], completed["run_id"]}
    record = ended[run["id"]]
    assert [record[name] for name in ("owner", "graph_id", "status", "kind")] == ["ann", "echo", "completed", "run"]
    assert (record["cost_usd"], record["tokens_in"], record["graph_version"]) == (0, 0, 1)
    assert record["duration_ms"] >= 0
    everything = str([vars(record) for record in caplog.records if record.name.startswith("penstock")])
    assert PROMPT not in everything
    assert not any(secret in everything for secret in SECRETS.values())


async def test_client_chooses_no_field_of_a_record(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock")
    async with served() as server, server.client(**{"X-Request-Id": 'a"\x1b b'}) as client:
        assert (await client.request("EVIL", "/api/runs/%0aevent=run")).status_code == 401
    (record,) = records(caplog, "request")
    assert record["request_id"] != 'a"\x1b b'
    assert (record["method"], record["status"]) == ("other", 401)
    assert "user" not in record


async def test_without_a_reader_no_record_is_built() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("echo", ECHO)
        run = (await ann.post("/api/runs", json={"graph_id": "echo"})).json()
        left = await server.host.wait(run["id"])
        assert isinstance(left, RunRecord)
        assert logs.current_request.get() is None
