"""Resubmitting a run id returns the existing run, whatever it was granted since."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.agents.scripted import ScriptedModel
from penstock.hosting.host import RunHost
from penstock.hosting.ports import RunIdConflict
from penstock.runtime.billing.usage import Usage
from penstock.storage.stores import open_stores
from tests.hosting.graphs import SETTINGS, host_with
from tests.hosting.test_control import TWO_CALLS
from tests.storage.postgres import postgres_server, postgres_url

__all__ = ["postgres_server", "postgres_url"]


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    return "memory:" if request.param == "memory" else str(tmp_path / "runs.db")


async def with_model(stores: Any) -> RunHost:
    """A host whose graph `two` asks a model twice, at $0.40 each."""
    model = ScriptedModel(lambda request: f"{request.messages[-1].text}!", usage=Usage.of(cost_usd="0.4"))
    await stores.graphs.save("two", "ann", "two", TWO_CALLS, now_ms=0)
    return await host_with(stores, services={"models": {"m": model}}, settings=SETTINGS)


async def test_resubmission_of_a_granted_run_returns_it(url: str) -> None:
    async with await open_stores(url) as stores, await with_model(stores) as host:
        arguments: dict[str, Any] = {"owner": "ann", "graph_id": "two", "input": "hi", "run_id": "r"}
        arguments["limits"] = {"max_cost_usd": "0.5"}
        await host.submit(**arguments)
        assert (await host.wait("r")).status == "halted"
        with pytest.raises(RunIdConflict, match="its limits;"):
            await host.submit(**{**arguments, "limits": {"max_cost_usd": "0.6"}})
        granted = await host.grant("r", {"max_cost_usd": "0.4"}, by="eve")
        again = await host.submit(**arguments)
        assert (again.id, again.limits) == ("r", granted.limits)
        left = await host.wait("r")
        assert (left.status, left.cost_nanos) == ("completed", 800_000_000)
        assert await host.submit(**arguments) == left
        for other in ({"owner": "bob"}, {"input": "ho"}, {"graph_id": "echo"}, {"origin": {"kind": "other"}}):
            with pytest.raises(RunIdConflict, match=f"its ({next(iter(other))}, limits|limits, origin|owner);"):
                await host.submit(**{**arguments, **other})
        assert await host.get("r") == left
