"""Granting more, forking and replaying."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from penstock.agents.scripted import ScriptedModel
from penstock.errors import InvalidValue
from penstock.hosting.host import HostSettings, Overloaded, RunHost, RunLimits, RunNotFound
from penstock.hosting.ports import Conflict, RunRecord
from penstock.kernel.executor import DataValue, ExecutionResult, Handle
from penstock.runtime.billing.prices import PriceBook
from penstock.runtime.billing.usage import Usage
from penstock.runtime.durable.ports import JournalEntry
from penstock.runtime.graphs.graph_runtime import FlowContext
from penstock.storage.memory import MemoryJournalStore, MemoryStores
from penstock.testing import crash_points
from tests.hosting.graphs import SETTINGS, graph, host_with, without_steps

TWO_CALLS = graph(
    ("in", "input", {}),
    ("a", "llm-completion", {"model": "m"}),
    ("b", "llm-completion", {"model": "m"}),
    ("out", "output", {}),
    edges="in>a a>b b>out",
)


class Join:
    """A node that two edges lead into."""

    inputs = (Handle("left"), Handle("right"))
    outputs = (Handle("output"),)

    def execute(self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext) -> Any:
        return ExecutionResult({"output": DataValue("text", f"{inputs['left'].value}+{inputs['right'].value}")})


async def with_model(stores: MemoryStores, **options: Any) -> tuple[RunHost, ScriptedModel]:
    """A host whose model `m` answers `<the prompt>!`, at $0.40 each."""
    usage = Usage.of(cost_usd="0.4", input_tokens=10, output_tokens=5)
    model = ScriptedModel(lambda request: f"{request.messages[-1].text}!", usage=usage)
    host = await host_with(stores, services={"models": {"m": model}}, join=Join(), **options)
    await stores.graphs.save("two", "ann", "two", TWO_CALLS, now_ms=0)
    return host, model


# Granting.


@pytest.mark.requirement("X-3")
async def test_halted_run_that_is_granted_more_continues_and_pays_for_nothing_twice() -> None:
    stores = MemoryStores()
    host, model = await with_model(stores)
    async with host:
        run = await host.submit(owner="ann", graph_id="two", input="hi", limits={"max_cost_usd": "0.5"})
        halted = await host.wait(run.id)
        assert (halted.status, halted.stop_reason, halted.cost_nanos) == ("halted", "budget_exceeded", 400_000_000)
        assert model.calls == 1
        granted = await host.grant(run.id, RunLimits(max_cost_usd="0.4", max_steps=5), by="eve")
        assert granted.limits["max_cost_usd"] == "0.9"
        assert granted.limits["max_steps"] == 1_005
        left = await host.wait(run.id)
        events = [event async for event in host.events(run.id)]
        replayed = await host.wait((await host.replay(run.id, owner="ann")).id)
    assert (left.status, left.output, left.cost_nanos) == ("completed", "hi!!", 800_000_000)
    assert (replayed.status, replayed.output, replayed.cost_nanos) == ("completed", "hi!!", 0)
    assert model.calls == 2
    assert stores.ledger.balance(f"run:{run.id}").spent_nanos == 800_000_000
    (event,) = [event for event in events if event.type == "run.granted"]
    assert (event.data["by"], event.data["limits"]["max_cost_usd"]) == ("eve", "0.9")
    assert [event.data["replayed"] for event in events if event.type == "run.resumed"] == [2]
    found = [event for event in without_steps(events) if event.data.get("replayed") is True]
    assert [event.type for event in found if event.type.startswith("call.")] == ["call.started", "call.ended"]
    assert [event.data["node_id"] for event in found if event.type == "node.completed"] == ["a"]


@pytest.mark.requirement("X-3")
async def test_a_halted_run_resumed_without_a_grant_holds_as_much_for_its_next_call_as_before() -> None:
    stores = MemoryStores()
    host, model = await with_model(stores)
    async with host:
        run = await host.submit(owner="ann", graph_id="two", input="hi", limits={"max_cost_usd": "0.5"})
        await host.wait(run.id)
        for _ in range(2):
            await host.resume(run.id)
            halted = await host.wait(run.id)
            assert (halted.status, halted.stop_reason, halted.cost_nanos) == ("halted", "budget_exceeded", 400_000_000)
    assert model.calls == 1
    assert stores.ledger.balance(f"run:{run.id}").spent_nanos == 400_000_000


async def test_only_a_run_that_was_halted_is_granted_more() -> None:
    stores = MemoryStores()
    host, _ = await with_model(stores)
    async with host:
        run = await host.submit(owner="ann", graph_id="echo")
        await host.wait(run.id)
        with pytest.raises(Conflict, match="completed"):
            await host.grant(run.id, RunLimits(max_steps=1), by="eve")
        with pytest.raises(Conflict, match="nothing to resume"):
            await host.resume(run.id)
        with pytest.raises(RunNotFound):
            await host.grant("nope", RunLimits(max_steps=1), by="eve")


async def test_resumed_run_continues_where_it_failed() -> None:
    stores = MemoryStores()
    host, model = await with_model(stores)
    is_broken = True
    answer = model._answer

    def reply(request: Any) -> Any:
        if is_broken and request.messages[-1].text.endswith("!"):
            raise ValueError("broken")
        return answer(request)

    model._answer = reply
    async with host:
        # $0.40, the call of unknown cost at as much, and the one that is made in its place.
        run = await host.submit(owner="ann", graph_id="two", input="hi", limits={"max_cost_usd": "1.2"})
        assert (await host.wait(run.id)).status == "failed"
        is_broken = False
        await host.resume(run.id)
        left = await host.wait(run.id)
    assert (left.status, left.output) == ("completed", "hi!!")
    assert model.calls == 3


async def test_the_budget_of_a_day_holds_over_all_runs_of_an_owner() -> None:
    stores = MemoryStores()
    settings = HostSettings(tick_s=0.05, drain_s=0, owner_daily_usd="1", daily_usd="1.5")
    host, _ = await with_model(stores, settings=settings)
    async with host:
        ends = []
        for owner in ("ann", "ann", "bob"):
            run = await host.submit(owner=owner, graph_id="two", input="hi")
            ends.append((await host.wait(run.id)).status)
    assert ends == ["completed", "halted", "halted"]


# Forking and replaying.


async def test_an_id_that_comes_again_when_its_run_was_removed_is_paid_for_again() -> None:
    stores = MemoryStores()
    host, _ = await with_model(stores)
    async with host:
        await host.wait((await host.submit(owner="ann", graph_id="two", input="hi", run_id="r")).id)
    await asyncio.sleep(0.002)
    host, model = await with_model(stores, settings=HostSettings(keep_days=1e-9, drain_s=0, owner_daily_usd="0.7"))
    async with host:
        assert await host.get("r") is None
        await host.submit(owner="ann", graph_id="two", input="hi", run_id="r")
        halted = await host.wait("r")
        assert (halted.status, model.calls) == ("halted", 1)  # by the budget of the day
    assert stores.ledger.balance("run:r").spent_nanos == 400_000_000


async def test_a_fork_repeats_a_node_and_its_successors_and_nothing_before_it() -> None:
    stores = MemoryStores()
    host, model = await with_model(stores)
    async with host:
        run = await host.submit(owner="ann", graph_id="two", input="hi")
        await host.wait(run.id)
        fork = await host.fork(run.id, owner="bob", at="b", run_id_new="f")
        left = await host.wait(fork.id)
        assert (left.id, left.owner, left.output, model.calls) == ("f", "bob", "hi!!", 3)
        taken_up = {"kind": "fork", "run_id": run.id, "at": "b", "of": {"kind": "run"}}
        assert left.origin == {**taken_up, "about": {"inherited": 2}}
        other = await host.wait((await host.fork(run.id, owner="bob", at="b", input="yo")).id)
        assert (other.output, model.calls) == ("yo!", 4)
        first = await host.wait((await host.fork(run.id, owner="bob", at="in", input="ha")).id)
        assert (first.output, model.calls) == ("ha!!", 6)
        again = await host.wait((await host.fork(other.id, owner="bob", at="out")).id)
        assert (again.output, model.calls) == ("yo!", 6)
        old = await host.get(run.id)
        assert old is not None
        assert old.output == "hi!!"


async def test_fork_has_its_own_limits_and_reports_its_own_cost() -> None:
    stores = MemoryStores()
    host, _ = await with_model(stores)
    async with host:
        run = await host.submit(owner="ann", graph_id="two", input="hi", limits={"max_cost_usd": "0.9"})
        assert (await host.wait(run.id)).cost_nanos == 800_000_000
        fork = await host.wait((await host.fork(run.id, owner="ann", at="b")).id)
        assert (fork.status, fork.cost_nanos, fork.tokens_in) == ("completed", 400_000_000, 10)
        whole = await host.wait((await host.fork(run.id, owner="ann", at="in")).id)
        assert (whole.status, whole.cost_nanos) == ("completed", 800_000_000)
    assert stores.ledger.balance(f"run:{fork.id}").spent_nanos == 400_000_000


@pytest.mark.parametrize(
    "limits", [{"max_cost_usd": "0.5"}, {"max_api_calls": 2}, {"max_tokens": 29}, {"max_steps": 4}]
)
async def test_a_fork_of_a_run_with_exhausted_limits_does_not_pay_for_recorded_results(limits: Any) -> None:
    host, model = await with_model(MemoryStores())
    async with host:
        run = await host.submit(owner="ann", graph_id="two", input="hi", limits=limits)
        assert (await host.wait(run.id)).status == "halted"
        calls = model.calls
        fork = await host.wait((await host.fork(run.id, owner="ann", at="b")).id)
    assert (fork.status, fork.output, model.calls) == ("completed", "hi!!", calls + 1)


async def test_a_fork_of_a_run_that_was_granted_more_than_the_ceiling_is_given_the_ceiling() -> None:
    stores = MemoryStores()
    host, model = await with_model(stores, settings=replace(SETTINGS, ceilings=RunLimits(max_cost_usd="0.5")))
    async with host:
        run = await host.submit(owner="ann", graph_id="two", input="hi")
        assert (await host.wait(run.id)).status == "halted"
        await host.grant(run.id, RunLimits(max_cost_usd="9"), by="root")
        assert (await host.wait(run.id)).limits["max_cost_usd"] == "9.5"
        for _ in range(2):  # the same fork again is the same
            fork = await host.fork(run.id, owner="ann", at="in", run_id_new="f")
        assert (fork.limits["max_cost_usd"], fork.limits["max_steps"]) == ("0.5", 1_000)
        assert (await host.wait("f")).status == "halted"
        replay = await host.wait((await host.replay(run.id, owner="ann")).id)
        assert (replay.status, replay.cost_nanos) == ("completed", 0), "a replay pays nothing, and goes the whole way"
    assert model.calls == 3


async def test_a_fork_at_a_node_with_several_edges_sets_the_input_of_each_handle() -> None:
    stores = MemoryStores()
    host, _ = await with_model(stores)
    document = graph(("l", "input", {}), ("r", "input", {}), ("j", "join", {}), edges="l>j r>j")
    for edge, handle in zip(document["edges"], ("left", "right"), strict=True):
        edge["targetHandle"] = handle
    await stores.graphs.save("joined", "ann", "joined", document, now_ms=0)
    async with host:
        run = await host.submit(owner="ann", graph_id="joined", input="x")
        assert (await host.wait(run.id)).output == "x+x"
        fork = await host.fork(run.id, owner="ann", at="j", input={"right": "y"})
        assert (await host.wait(fork.id)).output == "x+y"
        with pytest.raises(InvalidValue, match="left, right"):
            await host.fork(run.id, owner="ann", at="j", input="y")


async def test_a_fork_needs_an_existing_node_and_an_existing_run() -> None:
    stores = MemoryStores()
    host, _ = await with_model(stores)
    run = await host.submit(owner="ann", graph_id="two")
    with pytest.raises(InvalidValue, match="nope"):
        await host.fork(run.id, owner="ann", at="nope")
    with pytest.raises(RunNotFound):
        await host.fork("nope", owner="ann", at="a")
    with pytest.raises(RunNotFound):
        await host.replay("nope", owner="ann")


async def test_repeated_fork_request_returns_the_existing_run() -> None:
    stores = MemoryStores()
    host, model = await with_model(stores, settings=HostSettings(tick_s=0.05, drain_s=0, max_queued=1))
    async with host:
        run = await host.submit(owner="ann", graph_id="two", input="hi")
        await host.wait(run.id)
        await host.wait((await host.fork(run.id, owner="ann", at="b", run_id_new="f")).id)
        again = await host.fork(run.id, owner="ann", at="b", run_id_new="f")
        assert (again.status, model.calls) == ("completed", 3)
    await host.submit(owner="ann", graph_id="two")
    with pytest.raises(Overloaded):
        await host.fork(run.id, owner="ann", at="b", run_id_new="g")
    assert not await stores.journal.load("g")


async def test_the_id_of_a_fork_that_goes_another_way_is_another_runs() -> None:
    host, _ = await with_model(MemoryStores())
    async with host:
        run = await host.wait((await host.submit(owner="ann", graph_id="two", input="hi")).id)
        await host.wait((await host.fork(run.id, owner="ann", at="b", run_id_new="f")).id)
        with pytest.raises(Conflict, match="its origin"):
            await host.fork(run.id, owner="ann", at="a", run_id_new="f")
        with pytest.raises(Conflict, match="its origin"):
            await host.fork(run.id, owner="ann", at="b", input="yo", run_id_new="f")


class MeanwhileJournals(MemoryJournalStore):
    """Journals in memory; while one is read, something else happens."""

    def __init__(self, stores: MemoryStores) -> None:
        super().__init__(stores.runs)
        self.before: Callable[[], Awaitable[object]] | None = None
        self.after: Callable[[], Awaitable[object]] | None = None

    async def load(self, run_id: str) -> Sequence[JournalEntry]:
        if self.before is not None:
            await self.before()
        entries = await super().load(run_id)
        if self.after is not None:
            await self.after()
        return entries


async def taken_up_meanwhile() -> tuple[RunHost, ScriptedModel, MeanwhileJournals, RunRecord]:
    """A host with a run of ann's that is complete."""
    stores = MemoryStores()
    stores.journal = journals = MeanwhileJournals(stores)
    host, model = await with_model(stores)
    async with host:
        run = await host.wait((await host.submit(owner="ann", graph_id="two", input="hi")).id)
    return host, model, journals, run


@pytest.mark.requirement("X-3")
async def test_a_fork_leaves_nothing_in_an_id_that_becomes_another_users_meanwhile() -> None:
    host, model, journals, run = await taken_up_meanwhile()
    journals.after = lambda: host.submit(owner="bob", graph_id="two", input="yo", run_id="f")
    with pytest.raises(Conflict, match="its owner"):
        await host.fork(run.id, owner="ann", at="b", run_id_new="f")
    journals.after = None
    assert not await journals.load("f")
    async with host:
        assert (await host.wait("f")).output == "yo!!"
    assert model.calls == 4


async def test_a_fork_that_died_before_it_was_there_has_left_nothing_for_the_next_of_its_id() -> None:
    host, model, journals, run = await taken_up_meanwhile()

    def die() -> None:
        raise EOFError

    crash_points.arm("fork.read", die=die)
    try:
        with pytest.raises(EOFError):
            await host.fork(run.id, owner="ann", at="b", run_id_new="f")
    finally:
        crash_points.disarm()
    assert not await journals.load("f")
    async with host:
        left = await host.wait((await host.fork(run.id, owner="ann", at="a", input="yo", run_id_new="f")).id)
    assert (left.output, model.calls) == ("yo!!", 4)


@pytest.mark.parametrize("again", ["fork", "replay"])
async def test_a_run_that_is_removed_while_it_is_taken_up_is_unknown(again: str) -> None:
    host, _, journals, run = await taken_up_meanwhile()
    journals.before = lambda: host.remove(run.id)
    with pytest.raises(RunNotFound):
        await (host.fork(run.id, owner="ann", at="b") if again == "fork" else host.replay(run.id, owner="ann"))
    assert await host.stores.runs.count() == 0


async def test_a_run_that_is_removed_once_it_was_taken_up_is_gone_on_with_all_the_same() -> None:
    host, model, _, run = await taken_up_meanwhile()
    fork = await host.fork(run.id, owner="ann", at="b")
    await host.remove(run.id)
    async with host:
        assert (await host.wait(fork.id)).output == "hi!!"
    assert model.calls == 3


async def test_forks_and_replays_of_a_fork_use_its_input() -> None:
    host, _ = await with_model(MemoryStores())
    async with host:
        run = await host.wait((await host.submit(owner="ann", graph_id="echo", input="hi")).id)
        fork = await host.wait((await host.fork(run.id, owner="ann", at="in", input="yo")).id)
        replay = await host.wait((await host.replay(fork.id, owner="ann")).id)
        behind = await host.wait((await host.fork(replay.id, owner="ann", at="out")).id)
        same = await host.wait((await host.fork(fork.id, owner="ann", at="in")).id)
        other = await host.wait((await host.fork(fork.id, owner="ann", at="in", input="ha")).id)
        assert [one.output for one in (fork, replay, behind, same, other)] == ["yo", "yo", "yo", "yo", "ha"]

        run = await host.wait((await host.submit(owner="ann", graph_id="two", input="hi")).id)
        fork = await host.wait((await host.fork(run.id, owner="ann", at="b", input="yo")).id)
        same = await host.wait((await host.fork(fork.id, owner="ann", at="b")).id)
        before = await host.wait((await host.fork(fork.id, owner="ann", at="a")).id)
        assert [one.output for one in (fork, same, before)] == ["yo!", "yo!", "hi!!"]  # behind `a`, what comes now


async def test_a_replay_calls_nothing_and_fails_where_nothing_was_recorded() -> None:
    stores = MemoryStores()
    host, model = await with_model(stores)
    async with host:
        run = await host.submit(owner="ann", graph_id="two", input="hi", limits={"max_cost_usd": "0.5"})
        await host.wait(run.id)
        left = await host.wait((await host.replay(run.id, owner="ann")).id)
        assert left.status == "failed"
        assert "JournalMissing" in str(left.error)
        assert model.calls == 1
        with pytest.raises(KeyError):
            stores.ledger.balance(f"run:{left.id}")


async def test_calls_of_a_run_are_emitted_with_their_cost() -> None:
    stores = MemoryStores()
    host, _ = await with_model(stores)
    async with host:
        run = await host.submit(owner="ann", graph_id="two", input="hi")
        events = [event async for event in host.events(run.id)]
    events = without_steps(events)
    types = [event.type for event in events]
    ended = [event.data for event in events if event.type == "call.ended"]
    assert [(one["kind"], one["status"], one["cost_usd"], one["tokens_out"]) for one in ended] == [
        ("llm", "success", 0.4, 5)
    ] * 2
    assert types.count("call.started") == 2
    assert events[-1].data["cost_usd"] == 0.8
    assert types.index("call.started") > types.index("node.started")


async def test_a_run_with_settings_of_its_own_keeps_them() -> None:
    assert SETTINGS.default_limits.to_dict() == {"max_cost_usd": "1", "max_steps": 1_000, "timeout_s": 3_600}


async def test_a_host_has_its_own_prices() -> None:
    host, model = await with_model(MemoryStores(), prices=PriceBook(unknown="refuse", use_genai_prices=False))
    async with host:
        run = await host.submit(owner="ann", graph_id="two", input="hi")
        left = await host.wait(run.id)
    assert (left.status, left.stop_reason, model.calls) == ("halted", "price_unknown", 0)
