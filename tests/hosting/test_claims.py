"""Workers that are lost: those that died over a run are counted, those that died while it only waited are not."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from penstock.agents.messages import ToolCall
from penstock.agents.model import ModelResponse
from penstock.agents.scripted import ScriptedModel
from penstock.agents.tools import Tool
from penstock.hosting.records import HostedEvent, RunRecord
from penstock.hosting.work.claims import PAGE, workers_lost
from penstock.hosting.work.execution import MAX_DEATHS
from penstock.storage.memory import MemoryStores
from penstock.testing import SimLoop, sim_run
from tests.hosting.graphs import ASK, Sleeper, graph, host_with, killed

DAYS_S = 1_000_000


def linked(*nodes: tuple[str, str, dict[str, Any]], edges: str, link: str) -> dict[str, Any]:
    """A graph whose last edge is a link from a tool to an agent."""
    document = graph(*nodes, edges=f"{edges} {link}")
    document["edges"][-1] |= {"sourceHandle": "tool", "targetHandle": "tools", "data": {"channel": "link"}}
    return document


def agent(name: str, *tools: str, **data: Any) -> tuple[str, str, dict[str, Any]]:
    return name, "agent", {"model": name, "tools": list(tools), **data}


IN = ("in", "input", {})

WAITING = {
    "an approval": graph(IN, ("ask", "approval", {}), edges="in>ask"),
    "two at once": graph(IN, ("ask", "approval", {}), ("too", "approval", {}), edges="in>ask in>too"),
    "a branch that ends": graph(IN, ("ask", "approval", {}), ("n", "sleeper", {"seconds": 2}), edges="in>ask in>n"),
    "inside a map": graph(IN, ("list", "constant", {"value": ["a", "b"]}), ("each", "map", {"graph": ASK}),
                          edges="list>each"),
    "a tool": graph(IN, agent("payer", "pay"), edges="in>payer"),
    "a tool beside one that ends": graph(IN, agent("both", "pay", "nap"), edges="in>both"),
    "a tool of an agent inside": linked(
        IN, agent("payer", "pay", description="pays"), agent("boss"), edges="in>boss", link="payer>boss"),
}  # fmt: skip
"""Runs that come to a question, and then do nothing else."""

AT_WORK = {
    "nothing but work": graph(IN, ("n", "sleeper", {"seconds": DAYS_S}), edges="in>n"),
    "a branch beside the question": graph(
        IN, ("ask", "approval", {}), ("n", "sleeper", {"seconds": DAYS_S}), edges="in>ask in>n"),
    "a branch beside the question, inside a map": graph(
        IN, ("list", "constant", {"value": ["a"]}), ("each", "map", {"graph": graph(
            IN, ("ask", "approval", {}), ("n", "sleeper", {"seconds": DAYS_S}), edges="in>ask in>n")}),
        edges="list>each"),
    "a tool beside one that needs approval": graph(IN, agent("both", "pay", "dream"), edges="in>both"),
}  # fmt: skip
"""Runs that are at work when they are killed, whether or not they ask as well."""


def services() -> dict[str, Any]:
    async def pay(amount: int) -> str:
        return f"paid {amount}"

    async def nap() -> str:
        await asyncio.sleep(2)
        return "slept"

    async def dream() -> str:
        await asyncio.sleep(DAYS_S)
        return "woke"

    def calling(*names: str) -> ScriptedModel:
        made = {"pay": {"amount": 5}, "payer": {"task": "pay"}}

        def answer(request: Any) -> Any:
            wanted = [one for one in names if one in {tool.name for tool in request.tools}]
            if request.messages[-1].role == "tool":
                return "done"
            return ModelResponse("", tuple(ToolCall(one, one, made.get(one, {})) for one in wanted))

        return ScriptedModel(answer)

    models = {"payer": calling("pay"), "boss": calling("payer"), "both": calling("pay", "nap", "dream")}
    tools = {"pay": Tool(pay, needs_approval=True), "nap": Tool(nap), "dream": Tool(dream)}
    return {"models": models, "tools": tools}


async def claimed_over_and_over(document: Mapping[str, Any], times: int, is_answered: bool) -> RunRecord:
    """So many hosts work on a run for some seconds and die; what the last one leaves."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    stores = MemoryStores(clock=loop.clock)
    await stores.graphs.save("g", "ann", "g", document, now_ms=0)

    async def host() -> Any:
        return await host_with(stores, clock=loop.clock, services=services(), sleeper=Sleeper())

    for number in range(times):
        one = await host()
        await one.start()
        if not number:
            await one.submit(owner="ann", graph_id="g", input="x", run_id="r")
        await asyncio.sleep(10)
        await killed(one)
    async with await host() as last:
        await asyncio.sleep(10)
        run = await last.get("r")
        assert run is not None
        if is_answered:
            assert run.status == "waiting", run
            for approval in await stores.approvals.list(states=["waiting"]):
                await last.answer(approval.id, "approved", by="bob")
            return await last.wait("r")
        return run


@pytest.mark.parametrize("name", WAITING)
def test_a_run_that_only_waits_for_somebody_outlives_any_number_of_hosts(name: str) -> None:
    times = MAX_DEATHS + 3
    left = sim_run(lambda: claimed_over_and_over(WAITING[name], times, is_answered=True), seed=1)
    assert (left.status, left.epoch) == ("completed", times + 1)


@pytest.mark.parametrize("name", AT_WORK)
def test_a_run_that_was_at_work_each_time_fails_after_ten_hosts_also_if_it_asks_meanwhile(name: str) -> None:
    for times, status in ((MAX_DEATHS - 1, {"running", "waiting"}), (MAX_DEATHS, {"failed"})):
        left = sim_run(lambda times=times: claimed_over_and_over(AT_WORK[name], times, is_answered=False), seed=1)  # type: ignore[misc]
        assert left.status in status, left
    assert "10 workers in a row" in str(left.error)


QUEUED, STARTED = ("run.queued", {}), ("run.started", {"epoch": 1})
IDLE, BUSY = ("run.waiting", {"idle": True}), ("run.waiting", {})
LONG = (("node.progress", {}),) * (2 * PAGE + 1)


def resumed(**lost: Any) -> tuple[str, dict[str, Any]]:
    return "run.resumed", {"epoch": 2, **lost}


@pytest.mark.parametrize(
    ("told", "lost"),
    [
        ([], 1),
        ([QUEUED], 1),
        ([QUEUED, STARTED], 1),
        ([QUEUED, STARTED, BUSY], 1),
        ([QUEUED, STARTED, IDLE], 0),
        ([QUEUED, STARTED, IDLE, ("approval.answered", {})], 1),
        ([QUEUED, STARTED, *LONG], 1),
        ([QUEUED, STARTED, resumed(lost=4)], 5),
        ([QUEUED, STARTED, resumed(lost=4), *LONG], 5),
        ([QUEUED, STARTED, resumed(lost=4), *LONG, IDLE], 4),
        ([QUEUED, STARTED, resumed(), IDLE], 0),
        ([QUEUED, STARTED, resumed(lost="many")], 1),
        ([QUEUED, STARTED, resumed(lost=4), ("run.parked", {}), QUEUED], 0),
        ([QUEUED, STARTED, resumed(lost=4), ("run.halted", {}), ("run.granted", {})], 0),
    ],
)
async def test_the_events_of_a_run_tell_how_many_workers_were_lost_over_it(told: Any, lost: int) -> None:
    stores = MemoryStores()
    await stores.runs.add(RunRecord("r", "ann", "g", 1))
    await stores.events.append("r", 0, [HostedEvent(seq, 0, *one) for seq, one in enumerate(told, 1)])
    assert await workers_lost(stores.events, RunRecord("r", "ann", "g", 1, epoch=1)) == 0
    assert await workers_lost(stores.events, RunRecord("r", "ann", "g", 1, epoch=2)) == lost
