"""Every event that runs emit fits the published union, and what does not is refused by it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.hosting.event_data import ENDINGS, LAST_EVENTS
from penstock.hosting.host import HostSettings
from penstock.server.event_schemas import RUN_EVENT, TYPES, event_components
from penstock.server.sse import event_json
from tests.hosting.graphs import graph
from tests.server.routes.test_run_views import EACH, READ, models
from tests.server.served import ASK, GATE, Served, happened, served
from tools.ui_types import description

BROKEN = graph(("in", "input", {}), ("t", "prompt-template", {"template": "{{ missing }}"}), edges="in>t")


async def valid(server: Served, run_id: str) -> set[str]:
    """The types of the events of a run, each of which fits the union."""
    found = await server.stores.events.read(run_id, limit=10_000)
    for event in found:
        RUN_EVENT.validate_python(event_json(event))
    return {event.type for event in found}


async def test_every_event_of_runs_that_end_in_every_way_fits_the_union() -> None:
    settings = HostSettings(tick_s=0.05, drain_s=0, daily_usd="5")
    async with served(host_settings=settings, models=models()) as server, server.client("ann") as ann:
        seen: set[str] = set()
        for name, document in (("each", EACH), ("read", READ), ("ask", ASK), ("gate", GATE), ("broken", BROKEN)):
            await server.save(name, document)
        for name, input, limits in (
            ("each", ["a", "b"], {}),
            ("read", "a", {"max_steps": 1}),
            ("read", "a", {"max_api_calls": 0}),
            ("broken", "a", {}),
        ):
            run = await server.host.submit(owner="ann", graph_id=name, input=input, limits=limits)
            await server.host.wait(run.id)
            seen |= await valid(server, run.id)
            if limits:
                await server.host.grant(run.id, {"max_steps": 100, "max_api_calls": 9}, by="ann")
                await server.host.wait(run.id)
                seen |= await valid(server, run.id)
        asking = await server.host.submit(owner="ann", graph_id="ask", input=1)
        await happened(server, asking.id, "run.waiting")
        (approval,) = await server.stores.approvals.list(run_id=asking.id)
        await ann.post(f"/api/approvals/{approval.id}/approve")
        await server.host.wait(asking.id)
        seen |= await valid(server, asking.id)
        waiting = await server.host.submit(owner="ann", graph_id="gate")
        await server.gate.entered.wait()
        await ann.post(f"/api/runs/{waiting.id}/cancel")
        await server.host.wait(waiting.id)
        seen |= await valid(server, waiting.id)
    assert seen >= {"run.completed", "run.halted", "run.failed", "run.cancelled", "run.granted", "run.resumed"}
    assert seen >= {"call.started", "call.ended", "limit", "budget", "approval.requested", "approval.answered"}


def test_every_last_event_is_in_the_union() -> None:
    assert set(TYPES) >= {*ENDINGS.values(), *LAST_EVENTS}


@pytest.mark.parametrize(
    "wrong",
    [
        {"seq": 1, "at_ms": 1, "type": "run.odd", "data": {}},
        {"seq": 1, "at_ms": 1, "type": "run.queued", "data": {"more": 1}},
        {"seq": 1, "at_ms": 1, "type": "call.ended", "data": {"call_id": "n000001"}},
    ],
)
def test_event_of_another_shape_does_not_fit(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RUN_EVENT.validate_python(wrong)


async def test_description_has_the_union_with_its_discriminator() -> None:
    async with served() as server, server.client("ann") as ann:
        schemas = (await ann.get("/api/openapi.json")).json()["components"]["schemas"]
    assert schemas["EventPage"]["properties"]["events"]["items"] == {"$ref": "#/components/schemas/RunEvent"}
    mapping = schemas["RunEvent"]["discriminator"]["mapping"]
    assert set(mapping) == set(TYPES)
    assert all(reference.rpartition("/")[2] in schemas for reference in mapping.values())


def test_published_description_has_the_events_under_names_of_their_own() -> None:
    published = asyncio.run(description())["components"]["schemas"]
    components = event_components()
    assert {name: published[name] for name in components} == components
    union = published["RunEvent"]
    assert set(union["discriminator"]["mapping"]) == set(TYPES)
    for type_name, reference in union["discriminator"]["mapping"].items():
        event = published[reference.rpartition("/")[2]]
        data = published[event["properties"]["data"]["$ref"].rpartition("/")[2]]
        assert set(data["properties"]) == set(TYPES[type_name].model_fields), type_name
