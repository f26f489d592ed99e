"""The data of one person over HTTP: found, exported, erased."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.agents.scripted import ScriptedModel
from penstock.hosting.host import HostSettings
from penstock.nodes.memory import space_of_owner
from penstock.runtime.billing.usage import Usage
from tests.hosting.graphs import graph
from tests.server.served import CHAT, GATE, Served, served

READ = graph(("in", "input", {}), ("read", "llm-completion", {"model": "m"}), edges="in>read")
SECRET = "canary-of-ann"


def models() -> dict[str, Any]:
    usage = Usage.of(cost_usd="0.25", input_tokens=3, output_tokens=2)
    return {"m": ScriptedModel(lambda request: "221 m", usage=usage)}


async def lived(server: Served, name: str, word: str) -> str:
    """Leave a run with payloads, a chat, a file and a memory of a person; return the run."""
    await server.save("reader", READ, owner="root")
    await server.save("chat", CHAT, owner="root")
    async with server.client(name) as client:
        run: str = (await client.post("/api/runs", json={"graph_id": "reader", "input": word})).json()["id"]
        await server.host.wait(run)
        turn = (await client.post("/api/agents/chat/chat", json={"content": word})).json()
        await server.host.wait(turn["run_id"])
        upload = await client.post("/api/attachments?name=a.txt&media_type=text/plain", content=word.encode())
        assert upload.status_code == 201, upload.text
    await server.stores.memories.put(space_of_owner(name), "word", word)
    return run


def everything(server: Served) -> str:
    """All that the stores in memory hold, as text."""
    stores = server.stores
    parts: list[Any] = [stores.runs._runs, stores.events._events, stores.journal._entries, stores.payloads._payloads]
    parts += [stores.chats._chats, stores.chats._attachments, stores.memories._spaces, stores.approvals._approvals]
    parts += [stores.tokens._tokens, stores.audit._entries, stores.spending._shares, stores.spending._removed]
    shown = [[(key, _fields(value)) for key, value in part.items()] for part in parts]
    return repr(shown)


def _fields(value: Any) -> Any:
    slots = getattr(type(value), "__slots__", ())
    return {name: getattr(value, name, None) for name in slots} or getattr(value, "__dict__", None) or value


@pytest.mark.requirement("X-19")
async def test_everything_of_a_person_is_exported_and_erased_and_money_stays() -> None:
    recording = HostSettings(tick_s=0.05, drain_s=0, record_payloads="full")
    async with served(host_settings=recording, models=models()) as server, server.client("root") as root:
        token = (await root.post("/api/tokens", json={"name": "carl", "role": "user"})).json()
        run = await lived(server, "bob", "of-bob")
        async with server.client(Authorization=f"Bearer {token['secret']}") as carl:
            mine = (await carl.post("/api/runs", json={"graph_id": "reader", "input": SECRET})).json()["id"]
            await server.host.wait(mine)
            turn = (await carl.post("/api/agents/chat/chat", json={"content": SECRET})).json()
            await server.host.wait(turn["run_id"])
            await carl.post("/api/attachments?name=a.txt&media_type=text/plain", content=SECRET.encode())
            await carl.post(f"/api/runs/{mine}/cancel", json={"reason": "of carl"})
            assert (await carl.get("/api/people/carl")).status_code == 403
        await server.stores.memories.put(space_of_owner("carl"), "word", SECRET)
        found = (await root.get("/api/people/carl")).json()
        assert (found["places"]["runs.owner"], found["places"]["chats.owner"]) == (2, 1)
        export = await root.get("/api/people/carl/export")
        kinds = [next(iter(json.loads(line))) for line in export.text.splitlines()]
        assert set(kinds) == {"run", "event", "payload", "chat", "attachment", "memory", "token", "audit"}
        assert "of-bob" not in export.text
        assert token["secret"] not in export.text
        spent = await server.stores.spending.sums()
        erased = await root.post("/api/people/carl/erase")
        assert erased.status_code == 200, erased.text
        assert (erased.json()["runs"], erased.json()["chats"]) == (2, 1)
        left = everything(server)
        assert SECRET not in left
        assert "'carl'" not in left
        assert "of-bob" in left
        assert (await server.host.get(run)) is not None
        assert [one._replace(owner=None) for one in await server.stores.spending.sums()] == spent
        assert (await root.get("/api/people/carl")).status_code == 404
        async with server.client(Authorization=f"Bearer {token['secret']}") as carl:
            assert (await carl.get("/api/me")).status_code == 401
        entry, *_ = await server.stores.audit.list()
        assert (entry.action, entry.target) == ("person.erase", erased.json()["pseudonym"])


async def test_erasing_is_refused_while_runs_go_on_for_oneself_and_for_names_in_the_environment() -> None:
    async with served() as server, server.client("root") as root:
        await server.save("gate", GATE)
        run = await server.host.submit(owner="dora", graph_id="gate")
        await server.gate.entered.wait()
        refused = await root.post("/api/people/dora/erase")
        assert (refused.status_code, run.id in refused.text) == (409, True)
        for name, says in (("root", "you cannot erase yourself"), ("ann", "token in the server's environment")):
            refused = await root.post(f"/api/people/{name}/erase")
            assert (refused.status_code, says in refused.text) == (409, True)
        assert (await root.post("/api/people/unknown/erase")).status_code == 404
        server.gate.opened.set()
        await server.host.wait(run.id)


@pytest.mark.parametrize("name", ["a b", "..", "%00", "x" * 300])
async def test_names_that_cannot_be_are_refused(name: str) -> None:
    async with served() as server, server.client("root") as root:
        assert (await root.get(f"/api/people/{name}")).status_code in (404, 422)
