"""Unresolved bills over HTTP: the owner of a run, or an admin, lists and resolves them."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from penstock.hosting.host import HostSettings
from penstock.server.settings import ServerSettings
from tests.hosting.test_bills import ASK, CEILING, HELD, Losing, prices
from tests.server.served import Served, served

pytestmark = pytest.mark.requirement("X-10")


def serving(settings: ServerSettings | None = None) -> AbstractAsyncContextManager[Served]:
    return served(settings, prices=prices(), models={"m": Losing()})


async def halted(server: Served, owner: str = "ann") -> str:
    """Return the id of the unresolved bill of run `r`, which is halted."""
    await server.save("one", ASK)
    await server.host.submit(owner=owner, graph_id="one", run_id="r", input="hi", limits=CEILING)
    assert (await server.host.wait("r")).unresolved_nanos == HELD
    (bill,) = await server.host.bills("r")
    return bill.call_id


async def test_a_run_without_bills_has_an_empty_list() -> None:
    async with serving() as server, server.client("ann") as ann:
        await halted(server)
        bills = (await ann.get("/api/runs/r/bills")).json()["bills"]
        await ann.post("/api/runs/r/bills/release", json={"call_id": bills[0]["call_id"]})
        assert (await ann.get("/api/runs/r/bills")).json() == {"bills": [], "unresolved_usd": 0.0}


async def test_a_halted_run_goes_on_after_its_bill_is_resolved() -> None:
    async with serving() as server, server.client("ann") as ann:
        call_id = await halted(server)
        listed = (await ann.get("/api/runs/r/bills")).json()
        (bill,) = listed["bills"]
        assert {name: bill[name] for name in ("call_id", "name", "model", "held_usd", "reason")} == {
            "call_id": call_id,
            "name": "scripted",
            "model": "scripted",
            "held_usd": 0.4096,
            "reason": "the peer has gone",
        }
        assert listed["unresolved_usd"] == 0.4096
        assert bill["at_ms"] > 0
        body = {"call_id": call_id, "cost_usd": "0.02", "tokens_in": 7, "tokens_out": 3}
        resolved = await ann.post("/api/runs/r/bills/resolve", json=body)
        assert resolved.status_code == 200, resolved.text
        shown = resolved.json()
        assert (shown["status"], shown["cost_usd"], shown["unresolved_usd"]) == ("halted", 0.02, 0.0)
        assert (await ann.post("/api/runs/r/resume")).status_code == 200
        left = await server.host.wait("r")
        events = (await ann.get("/api/runs/r/events", headers={"accept": "application/json"})).json()["events"]
    assert (left.status, left.output, left.cost_nanos) == ("completed", "hi!", 30_000_000)
    (event,) = [event for event in events if event["type"] == "bill.resolved"]
    assert (event["data"]["by"], event["data"]["cost_usd"], event["data"]["call_id"]) == ("ann", 0.02, call_id)


async def test_resolved_bill_is_in_the_tree_of_its_run_at_its_call() -> None:
    async with serving() as server, server.client("ann") as ann:
        call_id = await halted(server)
        body = {"call_id": call_id, "cost_usd": "0.02", "tokens_in": 7, "tokens_out": 3}
        record = (await ann.post("/api/runs/r/bills/resolve", json=body)).json()
        columns = (await ann.get("/api/runs/r/tree")).json()["columns"]
        billed = columns["call"].index(int(call_id.rpartition("n")[2]))
        assert columns["cost_nanos"][billed] == sum(columns["cost_nanos"]) == record["cost_nanos"] == 20_000_000
        assert (columns["tokens_in"][billed], columns["tokens_out"][billed]) == (7, 3)
        await ann.post("/api/runs/r/resume")
        await server.host.wait("r")
        columns = (await ann.get("/api/runs/r/tree")).json()["columns"]
        assert sum(columns["cost_nanos"]) == 10_000_000, "the bill was of a call of the attempt before"


async def test_the_person_who_is_recorded_is_the_owner_of_the_token() -> None:
    async with serving() as server, server.client("ann") as ann, server.client("root") as root:
        call_id = await halted(server)
        wrong = await ann.post("/api/runs/r/bills/release", json={"call_id": call_id, "by": "bob"})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (422, "invalid_value")
        assert "by must be left out, or your own name: ann" in wrong.json()["error"]["message"]
        released = await root.post("/api/runs/r/bills/release", json={"call_id": call_id, "by": "root"})
        assert released.status_code == 200, released.text
        (event,) = [one for one in await server.stores.events.read("r") if one.type == "bill.released"]
    assert event.data["by"] == "root"


@pytest.mark.parametrize(("given", "recorded"), [({}, "local"), ({"by": "ann"}, "ann")])
async def test_without_tokens_the_name_is_the_given_one(given: dict[str, str], recorded: str) -> None:
    async with serving(ServerSettings()) as server, server.client() as client:
        call_id = await halted(server, "local")
        assert (await client.post("/api/runs/r/bills/release", json={"call_id": call_id, **given})).status_code == 200
        (event,) = [one for one in await server.stores.events.read("r") if one.type == "bill.released"]
    assert event.data["by"] == recorded


async def test_bills_of_others_are_hidden_and_viewers_do_not_resolve_theirs() -> None:
    async with serving() as server, server.client("bob") as bob, server.client("vera") as vera:
        call_id = await halted(server, "vera")
        body = {"call_id": call_id, "cost_usd": 0}
        assert (await bob.get("/api/runs/r/bills")).status_code == 404
        assert (await bob.post("/api/runs/r/bills/resolve", json=body)).status_code == 404
        assert (await vera.get("/api/runs/r/bills")).status_code == 200
        assert (await vera.post("/api/runs/r/bills/resolve", json=body)).status_code == 403
        assert len(await server.host.bills("r")) == 1


async def test_a_bill_that_is_not_there_or_resolved_is_a_conflict() -> None:
    async with serving() as server, server.client("ann") as ann:
        call_id = await halted(server)
        missing = await ann.post("/api/runs/r/bills/release", json={"call_id": "1-x/n000002"})
        await ann.post("/api/runs/r/bills/resolve", json={"call_id": call_id, "cost_usd": 0.02})
        again = await ann.post("/api/runs/r/bills/release", json={"call_id": call_id})
    assert (missing.status_code, again.status_code) == (409, 409)
    assert "has no unresolved bill of call '1-x/n000002'" in missing.json()["error"]["message"]
    assert "was resolved at $0.02 by 'ann'" in again.json()["error"]["message"]


@pytest.mark.parametrize(
    "changes",
    [{"cost_usd": -1}, {"cost_usd": "NaN"}, {"cost_usd": True}, {"cost_usd": None}, {"call_id": ""}, {"by": ""},
     {"tokens_in": -1}, {"tokens_in": "1"}, {"owner": "bob"}],
)  # fmt: skip
async def test_an_invalid_resolution_is_refused(changes: dict[str, Any]) -> None:
    async with serving() as server, server.client("ann") as ann:
        call_id = await halted(server)
        answer = await ann.post("/api/runs/r/bills/resolve", json={"call_id": call_id, "cost_usd": "0.02", **changes})
        assert answer.status_code == 422, answer.text
        assert len(await server.host.bills("r")) == 1


async def test_the_advice_of_a_halted_run_names_the_step_that_helps() -> None:
    async with serving() as server, server.client("ann") as ann:
        call_id = await halted(server)
        advice = (await ann.get("/api/runs/r")).json()["advice"]
        refused = await ann.post("/api/runs/r/grant", json={"limits": {"max_steps": 1}})
        await ann.post("/api/runs/r/bills/resolve", json={"call_id": call_id, "cost_usd": "0.02"})
        later = (await ann.get("/api/runs/r")).json()["advice"]
    assert [(step["step"], step["amount_usd"]) for step in advice] == [
        ("resolve_bills", 0.4096),
        ("limit_output", None),
        ("grant", 0.4092),
    ]
    assert advice[0]["message"] == "resolve its unresolved bills, which hold $0.4096, then resume it"
    assert advice[2]["message"] == "grant it max_cost_usd, at least $0.4092 more"
    message = refused.json()["error"]["message"]
    assert "grant max_cost_usd, or resolve its unresolved bills, which hold $0.4096" in message
    assert [(step["step"], step["amount_usd"]) for step in later] == [("resume", None), ("grant", 0.0196)]


async def test_a_run_halted_by_the_bills_of_another_is_advised_to_resolve_those() -> None:
    settings = HostSettings(owner_daily_usd="0.41")
    async with (
        served(host_settings=settings, prices=prices(), models={"m": Losing()}) as server,
        server.client("ann") as ann,
    ):
        await halted(server)
        await server.host.submit(owner="ann", graph_id="one", run_id="later", input="hi", limits=CEILING)
        assert (await server.host.wait("later")).status == "halted"
        run = (await ann.get("/api/runs/later")).json()
    assert (run["halted_by"]["whose"], run["unresolved_usd"]) == ("owner", 0.0)
    assert [(step["step"], step["amount_usd"]) for step in run["advice"]] == [
        ("resolve_bills", 0.4096),
        ("raise_daily_budget", None),
    ]
    assert run["advice"][0]["message"] == (
        "resolve the unresolved bills of other runs, which hold $0.4096 of it, then resume it"
    )


async def test_the_openai_api_names_the_step_that_helps() -> None:
    async with serving() as server, server.client("ann") as ann:
        await server.save("one", ASK)
        body = {"model": "one", "messages": [{"role": "user", "content": "hi"}], "penstock": {"limits": CEILING}}
        refused = await ann.post("/v1/chat/completions", json=body)
    assert refused.status_code == 402
    assert "unresolved bills hold $0.4096 of it: list them with GET /api/runs/" in refused.json()["error"]["message"]
