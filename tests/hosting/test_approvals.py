"""Questions to people: put, answered from anywhere, kept over a restart, withdrawn."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.agents.messages import ToolCall
from penstock.agents.scripted import ScriptedModel
from penstock.agents.tools import Tool
from penstock.errors import InvalidValue
from penstock.hosting.host import ApprovalNotFound, RunHost
from penstock.hosting.ports import ApprovalRecord, Conflict
from penstock.storage.memory import MemoryStores
from penstock.storage.stores import open_stores
from penstock.testing import ManualClock, SimLoop, sim_run
from tests.hosting.graphs import ASK, SETTINGS, Gate, graph, host_with, killed, without_steps
from tests.hosting.test_host import types_of

pytestmark = pytest.mark.requirement("X-7")


async def pending_approval(host: RunHost, run_id: str, after: int = 0) -> ApprovalRecord:
    """The question that the run puts next."""
    async for event in host.events(run_id, after):
        if event.type == "run.waiting":
            approval = await host.stores.approvals.get(event.data["approval_id"])
            assert approval is not None
            return approval
    raise AssertionError("the run ended without a question")


async def test_run_waits_for_an_answer_and_continues_with_the_approved_value() -> None:
    stores = MemoryStores()
    async with await host_with(stores) as host:
        run = await host.submit(owner="ann", graph_id="ask", input="it")
        approval = await pending_approval(host, run.id)
        assert (approval.question, approval.value, approval.owner) == ("May it go?", "it", "ann")
        for _ in range(10):
            await asyncio.sleep(0)
        assert (await stores.runs.get(run.id)).status == "waiting"  # type: ignore[union-attr]
        assert host.stats()["waiting"] == 1
        await host.answer(approval.id, "approved", by="bob")
        left = await host.wait(run.id)
        assert (left.status, left.output) == ("completed", "it")
        emitted = without_steps([event async for event in host.events(run.id)])
        assert [event.type for event in emitted if not event.type.startswith("node.")] == [
            "run.queued",
            "run.started",
            "approval.requested",
            "run.waiting",
            "approval.answered",
            "run.completed",
        ]
        types = await types_of(host, run.id)
        assert types.index("approval.requested") > [n for n, one in enumerate(types) if one == "node.started"][1]


@pytest.mark.parametrize(
    ("state", "answer", "output"),
    [("edited", {"n": [1, None]}, {"n": [1, None]}), ("edited", None, None), ("edited", 0, 0)],
)
async def test_answer_may_replace_the_value(state: Any, answer: Any, output: Any) -> None:
    stores = MemoryStores()
    async with await host_with(stores) as host:
        run = await host.submit(owner="ann", graph_id="ask", input="it")
        await host.answer((await pending_approval(host, run.id)).id, state, answer=answer, by="bob")
        assert (await host.wait(run.id)).output == output


async def test_rejected_value_is_not_passed_on_and_the_first_answer_counts() -> None:
    stores = MemoryStores()
    async with await host_with(stores) as host:
        run = await host.submit(owner="ann", graph_id="ask", input="it")
        approval = await pending_approval(host, run.id)
        await host.answer(approval.id, "rejected", reason="no", by="bob")
        with pytest.raises(Conflict):
            await host.answer(approval.id, "approved", by="eve")
        left = await host.wait(run.id)
        assert (left.status, left.output) == ("completed", {"rejected": {"value": "it", "reason": "no"}})


async def test_an_answer_that_is_given_elsewhere_reaches_the_run() -> None:
    stores = MemoryStores()
    async with await host_with(stores) as host:
        run = await host.submit(owner="ann", graph_id="ask", input="it")
        elsewhere = await host_with(stores)
        await elsewhere.answer((await pending_approval(elsewhere, run.id)).id, "approved", by="bob")
        assert (await elsewhere.wait(run.id)).output == "it"


@pytest.mark.parametrize("is_killed", [True, False])
@pytest.mark.parametrize("is_answered_meanwhile", [True, False])
async def test_a_question_survives_a_restart_and_is_put_once(is_killed: bool, is_answered_meanwhile: bool) -> None:
    stores, clock = MemoryStores(), ManualClock()
    first = await host_with(stores, clock=clock)
    await first.start()
    run = await first.submit(owner="ann", graph_id="ask", input="it")
    approval = await pending_approval(first, run.id)
    await (killed(first) if is_killed else first.close())
    assert (await stores.approvals.get(approval.id)).state == "waiting"  # type: ignore[union-attr]
    clock.advance(SETTINGS.lease_s + 1)
    second = await host_with(stores, clock=clock)
    if is_answered_meanwhile:
        await second.answer(approval.id, "edited", answer="that", by="bob")
    before = await stores.events.last_seq(run.id)
    async with second:
        if not is_answered_meanwhile:
            assert (await pending_approval(second, run.id, before)).id == approval.id
            await second.answer(approval.id, "edited", answer="that", by="bob")
        left = await second.wait(run.id)
    assert (left.status, left.output) == ("completed", "that")
    assert len(await stores.approvals.list(run_id=run.id)) == 1
    answers = [event.data for event in await stores.events.read(run.id, before) if event.type == "approval.answered"]
    assert answers == [{"approval_id": approval.id, "state": "edited", "by": "bob"}]


async def test_approval_without_an_answer_in_time_is_closed_and_the_run_continues() -> None:
    stores = MemoryStores()
    nodes: Any = (("in", "input", {}), ("ask", "approval", {"timeout_s": 0.01}), ("no", "output", {}))
    async with await host_with(stores) as host:
        document = graph(*nodes, edges="in>ask ask.rejected>no")
        await stores.graphs.save("quick", "ann", "quick", document, now_ms=0)
        run = await host.submit(owner="ann", graph_id="quick", input="it")
        left = await host.wait(run.id)
    assert left.output == {"value": "it", "reason": "not answered within 0.01 s"}
    (approval,) = await stores.approvals.list(run_id=run.id)
    assert (approval.state, approval.answered_by) == ("rejected", "timeout")
    answers = [event.data for event in await stores.events.read(run.id) if event.type == "approval.answered"]
    assert answers == [{"approval_id": approval.id, "state": "rejected", "by": "timeout"}]


async def test_runs_that_wait_for_answers_do_not_keep_others_from_running() -> None:
    stores, gate = MemoryStores(), Gate()
    gate.opened.set()
    settings = type(SETTINGS)(max_running=1, tick_s=0.01, drain_s=0)
    async with await host_with(stores, settings=settings, gate=gate) as host:
        waiting = [await host.submit(owner="ann", graph_id="ask", input="it") for _ in range(3)]
        questions = [await pending_approval(host, run.id) for run in waiting]
        run = await host.submit(owner="ann", graph_id="gate", input="x")
        assert (await host.wait(run.id)).status == "completed"
        for approval in questions:
            await host.answer(approval.id, "approved", by="bob")
        assert {(await host.wait(run.id)).status for run in waiting} == {"completed"}


async def test_approvals_inside_a_map_are_distinct() -> None:
    stores = MemoryStores()
    document = graph(("in", "input", {}), ("each", "map", {"graph": ASK}), edges="in>each")
    async with await host_with(stores) as host:
        await stores.graphs.save("each", "ann", "each", document, now_ms=0)
        run = await host.submit(owner="ann", graph_id="each", input=["a", "b"])
        seen: set[str] = set()
        async for event in host.events(run.id):
            if event.type == "approval.requested":
                approval = event.data["approval"]
                seen.add(approval["value"])
                await host.answer(approval["id"], "edited", answer=approval["value"] * 2, by="bob")
        left = await host.get(run.id)
    assert left is not None
    assert seen == {"a", "b"}, left
    assert left.output == ["aa", "bb"], left


@pytest.mark.parametrize("approval_id", ["nope", "", "\ud800", "x" * 10_000])
async def test_answer_to_an_unknown_approval_is_not_found(approval_id: str) -> None:
    host = await host_with(MemoryStores())
    with pytest.raises(ApprovalNotFound, match="there is no approval") as raised:
        await host.answer(approval_id, "approved", by="eve")
    assert raised.value.approval_id == approval_id


# The time a question has, over restarts.


TIMED = graph(
    ("in", "input", {}),
    ("ask", "approval", {"timeout_s": 60}),
    ("yes", "output", {}),
    ("no", "output", {}),
    edges="in>ask ask.approved>yes ask.rejected>no",
)


def timed(story: Callable[[SimLoop, MemoryStores], Awaitable[None]]) -> None:
    """A story on a simulated loop, in whose stores is a graph that asks, and waits for a minute."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        stores = MemoryStores(clock=loop.clock)
        await stores.graphs.save("timed", "ann", "timed", TIMED, now_ms=0)
        await story(loop, stores)

    sim_run(main, seed=1)


def test_the_time_of_a_question_is_over_at_the_same_moment_however_often_its_host_dies() -> None:
    async def story(loop: SimLoop, stores: MemoryStores) -> None:
        host = await host_with(stores, clock=loop.clock)
        await host.start()
        run = await host.submit(owner="ann", graph_id="timed", input="it")
        approval, after = await pending_approval(host, run.id), 0
        began = loop.time()
        for number in range(4):
            await asyncio.sleep(10)
            await (host.close() if number == 2 else killed(host))
            host, after = await host_with(stores, clock=loop.clock), await stores.events.last_seq(run.id)
            await host.start()
            assert (await pending_approval(host, run.id, after)).id == approval.id
        left = await host.wait(run.id)
        assert left.output == {"value": "it", "reason": "not answered within 60 s"}
        assert 59 < loop.time() - began < 61
        await host.close()

    timed(story)


@pytest.mark.parametrize("is_answered", [True, False])
def test_approval_that_timed_out_while_no_worker_had_the_run_is_not_waited_for_again(is_answered: bool) -> None:
    async def story(loop: SimLoop, stores: MemoryStores) -> None:
        first = await host_with(stores, clock=loop.clock)
        await first.start()
        run = await first.submit(owner="ann", graph_id="timed", input="it")
        approval = await pending_approval(first, run.id)
        await killed(first)
        await asyncio.sleep(61)
        second = await host_with(stores, clock=loop.clock)
        if is_answered:
            await second.answer(approval.id, "approved", by="bob")
        began = loop.time()
        await second.start()
        left = await second.wait(run.id)
        late = {"value": "it", "reason": "not answered within 60 s"}
        assert left.output == ("it" if is_answered else late)
        assert loop.time() - began < 1
        await second.close()

    timed(story)


def test_an_answer_that_was_given_elsewhere_just_before_the_time_was_up_counts() -> None:
    async def story(loop: SimLoop, stores: MemoryStores) -> None:
        seldom = replace(SETTINGS, tick_s=1_000, lease_s=10_000)  # the one who asks does not look in between
        here = await host_with(stores, clock=loop.clock, settings=seldom)
        elsewhere = await host_with(stores, clock=loop.clock)
        await here.start()
        run = await here.submit(owner="ann", graph_id="timed", input="it")
        approval = await pending_approval(here, run.id)
        await asyncio.sleep(59.9)
        await elsewhere.answer(approval.id, "edited", answer="that", by="bob")
        left = await here.wait(run.id)
        assert left.output == "that"
        assert "approval.answered" in await types_of(here, run.id)
        await here.close()

    timed(story)


def test_a_question_that_was_withdrawn_has_all_its_time_when_it_is_put_again() -> None:
    async def story(loop: SimLoop, stores: MemoryStores) -> None:
        async with await host_with(stores, clock=loop.clock) as host:
            run = await host.submit(owner="ann", graph_id="timed", input="it")
            await pending_approval(host, run.id)
            await host.cancel(run.id)
            await host.wait(run.id)
            await asyncio.sleep(1_000)
            after = await stores.events.last_seq(run.id)
            await host.resume(run.id)
            approval = await pending_approval(host, run.id, after)
            await asyncio.sleep(55)
            await host.answer(approval.id, "approved", by="bob")
            assert (await host.wait(run.id)).output == "it"

    timed(story)


# Questions about tools.


PAYER = graph(
    ("in", "input", {}), ("payer", "agent", {"model": "m", "tools": ["pay"]}), ("out", "output", {}),
    edges="in>payer payer>out",
)  # fmt: skip


def paying() -> dict[str, Any]:
    """A model that pays once, and repeats the tool's result."""

    async def pay(amount: int) -> str:
        return f"paid {amount}"

    def answer(request: Any) -> Any:
        last = request.messages[-1]
        return last.text if last.role == "tool" else ToolCall("call_0", "pay", {"amount": 5})

    return {"models": {"m": ScriptedModel(answer)}, "tools": {"pay": Tool(pay, needs_approval=True)}}


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_edit_that_a_tool_cannot_use_is_refused_and_the_approval_stays_pending(kind: str, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        stores: Any = MemoryStores()
        if kind == "sqlite":
            stores = await stack.enter_async_context(await open_stores(str(tmp_path / "runs.db")))
        await stores.graphs.save("payer", "ann", "payer", PAYER, now_ms=0)
        host = await stack.enter_async_context(await host_with(stores, services=paying()))
        run = await host.submit(owner="ann", graph_id="payer", input="go")
        approval = await pending_approval(host, run.id)
        assert approval.value == {"tool": "pay", "arguments": {"amount": 5}}
        elsewhere = await host_with(stores)  # it has no tools
        for wrong in ("seven", [1], None, {}, {"amount": "seven"}, {"tool": "mail", "arguments": {"amount": 7}}):
            with pytest.raises(InvalidValue, match="pay"):
                await elsewhere.answer(approval.id, "edited", answer=wrong, by="bob")
        assert await stores.approvals.get(approval.id) == approval
        edit = {"tool": "pay", "arguments": {"amount": 7}}
        kept = await elsewhere.answer(approval.id, "edited", answer=edit, by="bob")
        assert (kept.state, kept.answer) == ("edited", {"amount": 7})
        left = await host.wait(run.id)
        assert (left.status, left.output) == ("completed", "paid 7")
