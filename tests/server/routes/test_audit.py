"""The audit log over HTTP: what is recorded of whom, who reads it, and what happens if it cannot be stored."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.hosting import retention
from penstock.hosting.audit import AuditRecord
from penstock.hosting.host import HostSettings
from penstock.hosting.ports import StoreUnavailable
from penstock.server.audit import ACTIONS, NOT_RECORDED
from penstock.server.auth import ACCESS
from penstock.storage.memory import MemoryStores
from penstock.testing.clock import ManualClock
from tests.hosting.graphs import Gate, host_with
from tests.server.served import ASK, CHAT, ECHO, GATE, Served, happened, served

CHANGING = {"POST", "PUT", "PATCH", "DELETE"}


async def entries(server: Served) -> Sequence[tuple[str, str, str, str]]:
    found = await server.stores.audit.list()
    return [(entry.actor, entry.action, entry.target, entry.owner) for entry in reversed(found)]


def test_every_route_that_changes_something_is_recorded_or_says_why_not() -> None:
    changing = {(route, method) for route, methods in ACCESS.items() for method in CHANGING & methods.keys()}
    recorded = {(route, method) for route, methods in ACTIONS.items() for method in methods}
    left_out = {(route, method) for route, methods in NOT_RECORDED.items() for method in methods}
    assert changing - recorded == left_out
    assert not recorded & left_out


@pytest.mark.requirement("X-15")
async def test_what_people_do_to_runs_and_approvals_is_recorded_with_whose_they_are() -> None:
    async with served() as server, server.client("ann") as ann, server.client("root") as root:
        await server.save("gate", GATE)
        await server.save("ask", ASK)
        run = (await ann.post("/api/runs", json={"graph_id": "gate", "input": "a secret dam"})).json()["id"]
        await server.gate.entered.wait()
        assert (await root.post(f"/api/runs/{run}/cancel", json={"reason": "too dear"})).status_code == 200
        await server.host.wait(run)
        server.gate.opened.set()
        assert (await ann.post(f"/api/runs/{run}/resume")).status_code == 200
        await server.host.wait(run)
        asking = (await ann.post("/api/runs", json={"graph_id": "ask", "input": "a secret dam"})).json()["id"]
        await happened(server, asking, "approval.requested")
        question = (await server.stores.approvals.list(run_id=asking))[0].id
        body = {"answer": "another secret", "reason": "as agreed"}
        assert (await root.post(f"/api/approvals/{question}/edit", json=body)).status_code == 200
        assert (await root.post(f"/api/approvals/{question}/approve")).status_code == 409
        assert (await ann.post("/api/runs/unknown/resume")).status_code == 404
        assert await entries(server) == [
            ("root", "run.cancel", run, "ann"),
            ("ann", "run.resume", run, ""),
            ("root", "approval.edit", question, "ann"),
        ]
        edited, _, cancelled = await server.stores.audit.list()
        assert cancelled.details == {"reason": "too dear"}
        assert edited.details == {"run_id": asking, "node_id": "ask", "reason": "as agreed"}
        assert "secret" not in str(await server.stores.audit.list())


async def test_what_people_do_to_graphs_chats_and_tokens_is_recorded() -> None:
    async with served() as server, server.client("ann") as ann, server.client("root") as root:
        assert (await ann.put("/api/graphs/echo", json={"document": ECHO})).status_code == 200
        assert (await root.delete("/api/graphs/echo")).status_code == 204
        await server.save("chat", CHAT)
        chat = (await ann.post("/api/chats", json={"graph_id": "chat"})).json()["id"]
        assert (await root.delete(f"/api/chats/{chat}")).status_code == 204
        created = (await root.post("/api/tokens", json={"name": "carl", "role": "viewer"})).json()
        token = created["token"]["id"]
        assert (await root.post(f"/api/tokens/{token}/revoke")).status_code == 200
        assert await entries(server) == [
            ("ann", "graph.save", "echo", ""),
            ("root", "graph.archive", "echo", "ann"),
            ("root", "chat.delete", chat, "ann"),
            ("root", "token.create", token, "carl"),
            ("root", "token.revoke", token, "carl"),
        ]
        found = {entry.action: entry.details for entry in await server.stores.audit.list()}
        assert found["graph.save"] == {"version": 1}
        assert found["token.create"] == {"kind": "user", "role": "viewer"}
        assert created["secret"] not in str(found)


async def test_only_admins_read_the_log_in_pages() -> None:
    async with served() as server, server.client("root") as root, server.client("ann") as ann:
        for number in range(5):
            actor = "ann" if number % 2 else "bob"
            await server.stores.audit.append(AuditRecord(f"a{number}", number, actor, "run.cancel", f"r{number}"))
        assert (await ann.get("/api/audit")).status_code == 403
        first = (await root.get("/api/audit?limit=2")).json()
        assert [entry["id"] for entry in first["entries"]] == ["a4", "a3"]
        rest = (await root.get(f"/api/audit?limit=10&before={first['next']}")).json()
        assert ([entry["id"] for entry in rest["entries"]], rest["next"]) == (["a2", "a1", "a0"], None)
        found = (await root.get("/api/audit?actor=ann&action=run&since=2&until=4")).json()["entries"]
        assert found == [
            {
                "id": "a3",
                "at_ms": 3,
                "actor": "ann",
                "action": "run.cancel",
                "target": "r3",
                "owner": "",
                "source": "api",
                "details": {},
            }
        ]
        for wrong in ("actor=%00", "since=x", "limit=0", "who=ann"):
            assert (await root.get(f"/api/audit?{wrong}")).status_code == 422, wrong


async def test_act_succeeds_while_its_entry_cannot_be_stored_and_the_entry_is_stored_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with served() as server, server.client("root") as root:
        stored = server.stores.audit.append
        is_away = True

        async def append(entry: AuditRecord) -> None:
            if is_away:
                raise StoreUnavailable("the disk is full")
            await stored(entry)

        monkeypatch.setattr(server.stores.audit, "append", append)
        token = (await root.post("/api/tokens", json={"name": "carl"})).json()["token"]["id"]
        assert (await server.stores.tokens.get(token)) is not None
        assert f"token.create of {token}" in caplog.text
        is_away = False
        assert (await root.post(f"/api/tokens/{token}/revoke")).status_code == 200
        assert [action for _, action, _, _ in await entries(server)] == ["token.create", "token.revoke"]


async def test_entries_are_logged_without_their_details(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock")
    async with served() as server, server.client("root") as root:
        await root.post("/api/runs/some-run/cancel", json={"reason": "words of a person"})
    (record,) = [record for record in caplog.records if record.getMessage() == "audit"]
    fields: dict[str, Any] = record.penstock_fields  # type: ignore[attr-defined]
    assert (fields["actor"], fields["action"], fields["target"]) == ("root", "run.cancel", "some-run")
    assert "words of a person" not in str(vars(record))


async def test_entries_are_removed_after_their_retention_time() -> None:
    clock = ManualClock(start_ns=1_000)
    stores = MemoryStores(clock=clock)
    settings = HostSettings(tick_s=0.05, drain_s=0, keep_audit_days=2)
    async with await host_with(stores, settings=settings, clock=clock, gate=Gate()) as host:
        began_ms = clock.time_ns() // 1_000_000
        for day in range(5):
            await stores.audit.append(AuditRecord(f"a{day}", began_ms + day * 86_400_000, "ann", "run.cancel"))
        clock.advance(4 * 86_400)
        await retention.remove_audit(host._context)
        assert [entry.id for entry in await stores.audit.list()] == ["a4", "a3", "a2"]
