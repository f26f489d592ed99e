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
from penstock.hosting.hosted_run import MAX_CRASHES, before_this_claim
from penstock.hosting.ports import HostedEvent, RunRecord
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
def test_run_that_only_waits_for_an_answer_outlives_any_number_of_hosts(name: str) -> None:
    times = MAX_CRASHES + 3
    left = sim_run(lambda: claimed_over_and_over(WAITING[name], times, is_answered=True), seed=1)
    assert (left.status, left.epoch) == ("completed", times + 1)


@pytest.mark.parametrize("name", AT_WORK)
def test_a_run_that_was_at_work_each_time_fails_after_ten_hosts_also_if_it_asks_meanwhile(name: str) -> None:
    for times, status in ((MAX_CRASHES - 1, {"running", "waiting"}), (MAX_CRASHES, {"failed"})):
        left = sim_run(lambda times=times: claimed_over_and_over(AT_WORK[name], times, is_answered=False), seed=1)  # type: ignore[misc]
        assert left.status in status, left
    assert "10 workers in a row" in str(left.error)


IDLE, BUSY = ("run.waiting", {"idle": True}), ("run.waiting", {})


@pytest.mark.parametrize(
    ("last", "crashes"),
    [
        (None, 5),
        ((1, "run.queued", {}), 5),
        ((2, "run.started", {"epoch": 1}), 5),
        ((3, *BUSY), 5),
        ((3, *IDLE), 4),
        ((4, "approval.answered", {}), 5),
    ],
)
def test_worker_that_vanishes_counts_as_lost_unless_the_run_only_waited(last: Any, crashes: int) -> None:
    event = None if last is None else HostedEvent(last[0], 0, *last[1:])
    run = RunRecord("r", "ann", "g", 1, epoch=2, crash_count=4)
    assert before_this_claim(run, event)[0] == crashes


@pytest.mark.parametrize("type", ["run.queued", "run.granted"])
def test_requeued_run_has_lost_no_worker(type: str) -> None:
    run = RunRecord("r", "ann", "g", 1, epoch=3, worked_ms=700, resumed_ms=10)
    assert before_this_claim(run, HostedEvent(9, 90_000, type)) == (0, 700)


@pytest.mark.parametrize(
    ("run", "last_ms", "worked_ms"),
    [
        (RunRecord("r", "ann", "g", 1, epoch=2, started_ms=1_000), 1_700, 700),
        (RunRecord("r", "ann", "g", 1, epoch=2, started_ms=1_000), 400, 0),
        (RunRecord("r", "ann", "g", 1, epoch=3, started_ms=1_000, worked_ms=500, resumed_ms=8_000), 8_020, 520),
        (RunRecord("r", "ann", "g", 1, epoch=1, started_ms=1_000), 9_000, 0),
    ],
)
def test_lost_worker_has_worked_until_its_last_event(run: RunRecord, last_ms: int, worked_ms: int) -> None:
    assert before_this_claim(run, HostedEvent(7, last_ms, "node.started"))[1] == worked_ms
