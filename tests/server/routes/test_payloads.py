"""Recorded payloads over HTTP: what the operator records is shown to the owner of the run, while it is kept."""

from __future__ import annotations

import time
from typing import Any, Literal

import pytest

from penstock.agents.scripted import ScriptedModel
from penstock.hosting.host import HostSettings
from penstock.hosting.payloads import is_truncated
from penstock.hosting.retention import DAY_S, remove_payloads
from penstock.runtime.billing.usage import Usage
from penstock.testing import ManualClock
from tests.hosting.graphs import graph
from tests.server.served import Served, served

pytestmark = pytest.mark.requirement("T-12")

KEY = "sk-proj-Q2hhcmxlcw8fJzAxMjM0NTY3ODk"
READ = graph(("in", "input", {}), ("read", "llm-completion", {"model": "m"}), edges="in>read")
EACH = graph(("in", "input", {}), ("each", "map", {"graph": READ}), edges="in>each")


def models(text: str = f"Your key is {KEY}.") -> dict[str, Any]:
    return {"m": ScriptedModel(lambda request: text, usage=Usage.of(cost_usd="0.01", input_tokens=1, output_tokens=1))}


def recording(mode: Literal["off", "redacted", "full"], **settings: Any) -> HostSettings:
    return HostSettings(tick_s=0.05, drain_s=0, record_payloads=mode, **settings)


async def ran(server: Served, document: Any = READ, input: Any = f"Use {KEY}, please.") -> str:
    await server.save("g", document)
    run = await server.host.submit(owner="ann", graph_id="g", input=input)
    await server.host.wait(run.id)
    return run.id


async def model_calls(server: Served, run_id: str) -> list[str]:
    events = [event async for event in server.host.events(run_id)]
    return [event.data["call_id"] for event in events if event.type == "call.ended" and event.data["kind"] == "llm"]


async def payloads(server: Served, run_id: str, user: str = "ann") -> list[dict[str, Any]]:
    async with server.client(user) as client:
        answers = [await client.get(f"/api/runs/{run_id}/calls/{id}") for id in await model_calls(server, run_id)]
    return [answer.json() for answer in answers]


async def test_payloads_are_not_recorded_unless_the_operator_says_so() -> None:
    async with served(models=models()) as server:
        run_id = await ran(server)
        (call_id,) = await model_calls(server, run_id)
        assert await payloads(server, run_id) == [
            {
                "call_id": call_id,
                "recording": "off",
                "request": None,
                "response": None,
                "truncated": False,
                "expired": False,
            }
        ]
        assert await server.stores.payloads.get(run_id, call_id) is None


async def test_redacted_payloads_have_messages_and_answer_without_secrets() -> None:
    async with served(models=models(), host_settings=recording("redacted")) as server:
        (shown,) = await payloads(server, await ran(server))
    assert shown["recording"] == "redacted"
    assert KEY not in str(shown)
    assert shown["request"][0]["role"] == "user"
    assert shown["request"][0]["content"].startswith("Use ")
    assert "Your key is" in str(shown["response"])
    assert (shown["truncated"], shown["expired"]) == (False, False)


async def test_full_payloads_have_what_was_sent_and_answered() -> None:
    async with served(models=models(), host_settings=recording("full")) as server:
        (shown,) = await payloads(server, await ran(server))
    assert shown["recording"] == "full"
    assert KEY in str(shown["request"])
    assert KEY in str(shown["response"])


async def test_each_call_of_a_run_has_its_own_payload() -> None:
    async with served(models=models("answer"), host_settings=recording("full")) as server:
        shown = await payloads(server, await ran(server, EACH, ["one", "two", "three"]))
    assert sorted(payload["request"][0]["content"] for payload in shown) == ["one", "three", "two"]


async def test_large_payloads_are_truncated_and_say_so() -> None:
    settings = recording("full", max_payload_bytes=256)
    async with served(models=models("a" * 5_000), host_settings=settings) as server:
        (shown,) = await payloads(server, await ran(server, input="b" * 5_000))
    assert shown["truncated"] is True
    assert is_truncated(shown["response"])
    assert len(str(shown)) < 2_000


async def test_payloads_beyond_the_size_of_a_run_are_left_out() -> None:
    settings = recording("full", max_run_payload_bytes=300)
    async with served(models=models("a" * 80), host_settings=settings) as server:
        shown = await payloads(server, await ran(server, EACH, ["b" * 40, "c" * 40]))
    assert [payload["truncated"] for payload in shown].count(True) == 1


@pytest.mark.parametrize("mode", ["redacted", "full"])
async def test_payloads_of_another_owner_do_not_exist(mode: Literal["redacted", "full"]) -> None:
    async with served(models=models(), host_settings=recording(mode)) as server:
        run_id = await ran(server)
        (call_id,) = await model_calls(server, run_id)
        for name, status in (("bob", 404), ("vera", 404), ("root", 200), ("ann", 200)):
            async with server.client(name) as client:
                answer = await client.get(f"/api/runs/{run_id}/calls/{call_id}")
                assert answer.status_code == status
                assert ("please" in answer.text) is (status == 200)


async def test_call_that_does_not_exist_is_not_found() -> None:
    async with served(models=models(), host_settings=recording("full")) as server, server.client("ann") as ann:
        run_id = await ran(server)
        for call_id in ("n999999", "nothing"):
            answer = await ann.get(f"/api/runs/{run_id}/calls/{call_id}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_payloads_expire_before_their_run() -> None:
    clock = ManualClock(wall_start_ns=time.time_ns())
    settings = recording("full", keep_payload_days=2)
    async with served(models=models(), host_settings=settings, clock=clock) as server:
        run_id = await ran(server)
        (call_id,) = await model_calls(server, run_id)
        clock.advance(1.9 * DAY_S)
        assert (await payloads(server, run_id))[0]["recording"] == "full"
        clock.advance(0.2 * DAY_S)
        assert (await payloads(server, run_id))[0] == {
            "call_id": call_id,
            "recording": "off",
            "request": None,
            "response": None,
            "truncated": False,
            "expired": True,
        }


async def test_expired_payloads_are_removed_from_the_store_and_the_run_stays() -> None:
    async with served(models=models(), host_settings=recording("full", keep_payload_days=2)) as server:
        run_id = await ran(server)
        (call_id,) = await model_calls(server, run_id)
        stored = await server.stores.payloads.get(run_id, call_id)
        assert stored is not None
        await remove_payloads(server.host._context)
        assert await server.stores.payloads.get(run_id, call_id) == stored
        older = stored._replace(at_ms=stored.at_ms - 2 * DAY_S * 1_000 - 1)
        await server.stores.payloads.put(run_id, [older], epoch=stored.epoch)
        await remove_payloads(server.host._context)
        assert await server.stores.payloads.get(run_id, call_id) is None
        assert await server.host.get(run_id) is not None


async def test_payloads_are_erased_with_their_run() -> None:
    async with served(models=models(), host_settings=recording("full")) as server:
        run_id = await ran(server)
        (call_id,) = await model_calls(server, run_id)
        await server.host.remove(run_id)
        assert await server.stores.payloads.get(run_id, call_id) is None


async def test_payload_of_an_earlier_claim_is_not_shown_for_a_call_of_the_same_id() -> None:
    async with served(models=models(), host_settings=recording("full")) as server:
        run_id = await ran(server)
        (call_id,) = await model_calls(server, run_id)
        stored = await server.stores.payloads.get(run_id, call_id)
        assert stored is not None
        await server.stores.payloads.put(run_id, [stored._replace(epoch=0)], epoch=stored.epoch)
        (shown,) = await payloads(server, run_id)
        assert shown["recording"] == "off"


async def test_events_of_calls_have_no_payloads() -> None:
    async with served(models=models("a secret answer"), host_settings=recording("full")) as server:
        run_id = await ran(server, input="a secret question")
        events = [event async for event in server.host.events(run_id)]
    assert not any("question" in str(event.data) for event in events if event.type.startswith("call."))
