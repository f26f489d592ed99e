"""A caller that is unsure whether a run or a fork was accepted repeats the request, and gets the existing one."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.hosting.ports import RunIdConflict
from penstock.storage.stores import open_stores
from tests.hosting.test_control import TWO_CALLS
from tests.hosting.test_resubmission import url, with_model
from tests.storage.postgres import postgres_server, postgres_url

__all__ = ["postgres_server", "postgres_url", "url"]


def moved(document: dict[str, Any]) -> dict[str, Any]:
    """The same graph, elsewhere in the editor."""
    return {**document, "nodes": [{**node, "position": {"x": 9, "y": 9}} for node in document["nodes"]]}


async def test_resubmitting_a_run_of_the_newest_version_returns_it_when_there_is_a_newer_one(url: str) -> None:
    async with await open_stores(url) as stores, await with_model(stores) as host:
        arguments: dict[str, Any] = {"owner": "ann", "graph_id": "two", "input": "hi", "run_id": "r"}
        arguments["limits"] = {"max_cost_usd": "0.5"}
        await host.submit(**arguments)
        halted = await host.wait("r")
        await stores.graphs.save("two", "ann", "two", moved(TWO_CALLS), now_ms=0)
        assert await host.submit(**arguments) == halted
        await host.grant("r", {"max_cost_usd": "0.4"}, by="eve")
        left = await host.wait("r")
        assert await host.submit(**arguments) == left
        assert (await host.submit(**arguments, version=1)).graph_version == 1
        with pytest.raises(RunIdConflict, match="its graph_version"):
            await host.submit(**arguments, version=2)
        for other in ({"owner": "bob"}, {"input": "ho"}, {"origin": {"kind": "other"}}):
            with pytest.raises(RunIdConflict, match=next(iter(other))):
                await host.submit(**{**arguments, **other})
        assert (await host.submit(**{**arguments, "run_id": "s"})).graph_version == 2


async def test_forking_again_returns_the_fork_when_its_source_was_granted_more(url: str) -> None:
    async with await open_stores(url) as stores, await with_model(stores) as host:
        await host.submit(owner="ann", graph_id="two", input="hi", run_id="r", limits={"max_cost_usd": "0.5"})
        await host.wait("r")
        arguments: dict[str, Any] = {"owner": "ann", "at": "b", "input": "ho", "run_id_new": "f"}
        await host.fork("r", **arguments)
        left = await host.wait("f")
        await host.grant("r", {"max_cost_usd": "0.4"}, by="eve")
        await host.wait("r")
        assert await host.fork("r", **arguments) == left
        await host.submit(owner="ann", graph_id="two", input="hi", run_id="another")
        with pytest.raises(RunIdConflict, match="its limits, origin"):
            await host.fork("another", **arguments)
        for other in ({"at": "a"}, {"input": "hey"}, {"owner": "bob"}):
            with pytest.raises(RunIdConflict, match=r"origin|owner"):
                await host.fork("r", **{**arguments, **other})


async def test_a_run_that_is_submitted_with_an_id_takes_no_more_store_calls() -> None:
    """An existing run is found when the new one is stored."""
    async with await open_stores("memory:") as stores:
        host = await with_model(stores)
        looked: list[str] = []
        get = stores.runs.get

        async def counted(run_id: str) -> Any:
            looked.append(run_id)
            return await get(run_id)

        stores.runs.get = counted  # type: ignore[method-assign]
        await stores.graphs.save("two", "ann", "two", moved(TWO_CALLS), now_ms=0)
        await host.submit(owner="ann", graph_id="two", input="hi", run_id="r")
        await host.submit(owner="ann", graph_id="two", input="hi")
        assert looked == []
