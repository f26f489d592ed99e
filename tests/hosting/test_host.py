"""The host, on stores in memory."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from penstock.errors import InvalidValue
from penstock.hosting.event_data import MAX_DEPTH
from penstock.hosting.host import (
    GraphArchived,
    GraphNotFound,
    HostSettings,
    Prepared,
    RunHost,
    RunLimits,
    RunNotFound,
)
from penstock.hosting.ports import Conflict, HostedEvent, RunRecord, StoreUnavailable
from penstock.hosting.queue import MAX_WAITING, Overloaded
from penstock.storage.memory import InProcessMemory, MemoryStores
from penstock.testing import SimLoop, sim_run
from tests.hosting.graphs import SETTINGS, Gate, Teller, graph, host_with, without_steps


class Panic(BaseException):
    """As libraries that are not written in Python raise it."""


async def types_of(host: RunHost, run_id: str, after: int = 0) -> list[str]:
    return [event.type async for event in host.events(run_id, after)]


async def test_a_run_that_is_submitted_is_worked_on_and_can_be_read_to_its_end() -> None:
    stores = MemoryStores()
    async with await host_with(stores) as host:
        run = await host.submit(owner="ann", graph_id="echo", input="hello")
        events = [event async for event in host.events(run.id)]
        left = await host.get(run.id)
    assert [event.seq for event in events] == [*range(1, len(events) + 1)]
    assert [event.type for event in without_steps(events)] == [
        "run.queued",
        "run.started",
        "node.started",
        "node.completed",
        "node.started",
        "node.completed",
        "run.completed",
    ]
    assert events[-1].data == {"output": "hello", "cost_usd": 0.0, "tokens_in": 0, "tokens_out": 0}
    assert left is not None
    assert (left.status, left.output, left.worker, left.error) == ("completed", "hello", None, None)


async def test_node_that_raises_fails_its_run_with_its_message() -> None:
    stores = MemoryStores()
    async with await host_with(stores) as host:
        broken = graph(("in", "input", {}), ("bad", "breaker", {"message": "no \0 luck"}), edges="in>bad")
        await stores.graphs.save("broken", "ann", "broken", broken, now_ms=0)
        run = await host.submit(owner="ann", graph_id="broken")
        left = await host.wait(run.id)
        events = [event async for event in host.events(run.id)]
    assert (left.status, left.error) == ("failed", "ValueError: no � luck")
    assert [event.type for event in without_steps(events)][-2:] == ["node.error", "run.failed"]


@pytest.mark.parametrize(
    "error", [SystemExit(3), asyncio.CancelledError(), RecursionError("deep"), GeneratorExit(), Panic()]
)
@pytest.mark.parametrize("is_late", [True, False])
async def test_whatever_a_node_raises_ends_its_run_and_nothing_else(error: BaseException, is_late: bool) -> None:
    class Odd:
        async def execute(self, data: Any, inputs: Any, context: Any) -> Any:
            if is_late:
                await asyncio.sleep(0)
            raise error

    stores = MemoryStores()
    async with await host_with(stores, odd=Odd()) as host:
        document = graph(("in", "input", {}), ("odd", "odd", {}), edges="in>odd")
        await stores.graphs.save("odd", "ann", "odd", document, now_ms=0)
        left = await host.wait((await host.submit(owner="ann", graph_id="odd")).id)
        assert left.status in ("failed", "cancelled")
        other = await host.submit(owner="ann", graph_id="echo")
        assert (await host.wait(other.id)).status == "completed"


async def test_invalid_graph_fails_its_run_with_the_reason() -> None:
    stores = MemoryStores()
    async with await host_with(stores) as host:
        await stores.graphs.save("odd", "ann", "odd", graph(("a", "no-such-type", {})), now_ms=0)
        left = await host.wait((await host.submit(owner="ann", graph_id="odd")).id)
    assert left.status == "failed"
    assert "no-such-type" in str(left.error)


async def test_run_that_reaches_a_limit_is_halted_and_names_it() -> None:
    stores = MemoryStores()
    async with await host_with(stores) as host:
        run = await host.submit(owner="ann", graph_id="echo", limits={"max_steps": 1})
        left = await host.wait(run.id)
        events = [event async for event in host.events(run.id)]
    assert (left.status, left.stop_reason) == ("halted", "step_limit_exceeded")
    assert "limit" in [event.type for event in events]
    assert events[-1].data["stop_reason"] == "step_limit_exceeded"
    assert events[-1].data["limit"] == 1


async def test_a_run_that_takes_too_long_is_halted_by_its_timeout() -> None:
    stores = MemoryStores()
    async with await host_with(stores, gate=Gate()) as host:
        left = await host.wait((await host.submit(owner="ann", graph_id="gate", limits={"timeout_s": 0.01})).id)
    assert (left.status, left.stop_reason) == ("halted", "timeout")


@pytest.mark.parametrize("value", [None, 0, "", "ünï\0cödé 🚰", "\ud800", [1, {"a": None}], {"n": 2**70}, 1.5])
async def test_any_value_is_returned_unchanged_or_refused(value: Any) -> None:
    stores = MemoryStores()
    async with await host_with(stores) as host:
        try:
            run = await host.submit(owner="ann", graph_id="echo", input=value)
        except InvalidValue:
            assert value == "\ud800"
            return
        left = await host.wait(run.id)
    assert left.status == "completed"
    assert left.output == ("?" if value == "\ud800" else value)


async def test_a_value_with_the_maximum_number_of_levels_is_returned_unchanged() -> None:
    deep: Any = "water"
    for _ in range(MAX_DEPTH):
        deep = [deep]
    stores = MemoryStores()
    async with await host_with(stores) as host:
        run = await host.submit(owner="ann", graph_id="echo", input=deep)
        assert (await host.wait(run.id)).output == deep
        assert [event async for event in host.events(run.id)][-1].data["output"] == deep


# Submitting.


async def test_submitting_the_same_run_again_returns_the_existing_run() -> None:
    stores = MemoryStores()
    host = await host_with(stores, settings=HostSettings(max_queued=1))
    first = await host.submit(owner="ann", graph_id="echo", input=1, run_id="r1")
    again = await host.submit(owner="ann", graph_id="echo", input=1, run_id="r1")
    assert again == first
    with pytest.raises(Conflict):
        await host.submit(owner="ann", graph_id="echo", input=2, run_id="r1")


async def test_a_graph_or_a_version_that_is_not_there_is_refused() -> None:
    host = await host_with(MemoryStores())
    with pytest.raises(GraphNotFound, match="'nope'"):
        await host.submit(owner="ann", graph_id="nope")
    with pytest.raises(GraphNotFound, match="version 7"):
        await host.submit(owner="ann", graph_id="echo", version=7)


@pytest.mark.parametrize("run_id", ["", "a b", "x" * 101, "-a", "a/b", "ü", "a\n"])
async def test_an_id_that_cannot_be_part_of_a_url_is_refused(run_id: str) -> None:
    host = await host_with(MemoryStores())
    with pytest.raises(InvalidValue):
        await host.submit(owner="ann", graph_id="echo", run_id=run_id)


async def test_as_many_runs_wait_as_the_limit_says_and_one_more_is_refused_with_a_retry_time() -> None:
    host = await host_with(MemoryStores(), settings=HostSettings(max_queued=3, max_queued_per_owner=2))
    for _ in range(2):
        await host.submit(owner="ann", graph_id="echo")
    with pytest.raises(Overloaded) as refused:
        await host.submit(owner="ann", graph_id="echo")
    assert (refused.value.owner, refused.value.limit) == ("ann", 2)
    assert 1 <= refused.value.retry_after_s <= 60
    await host.submit(owner="bob", graph_id="echo")
    with pytest.raises(Overloaded) as refused:
        await host.submit(owner="cid", graph_id="echo")
    assert (refused.value.owner, refused.value.limit) == (None, 3)


async def test_of_many_who_submit_at_once_as_many_get_in_as_there_is_room() -> None:
    host = await host_with(MemoryStores(), settings=HostSettings(max_queued=5))
    submissions = [host.submit(owner="ann", graph_id="echo") for _ in range(20)]
    got = await asyncio.gather(*submissions, return_exceptions=True)
    assert sum(isinstance(one, RunRecord) for one in got) == 5
    assert sum(isinstance(one, Overloaded) for one in got) == 15


async def test_no_more_runs_are_worked_on_at_once_than_may_be_and_an_owner_has_no_more_than_a_share() -> None:
    stores, gate = MemoryStores(), Gate()
    settings = HostSettings(max_running=3, max_running_per_owner=2, tick_s=0.01)
    async with await host_with(stores, settings=settings, gate=gate) as host:
        anns = [await host.submit(owner="ann", graph_id="gate", run_id=f"a{n}") for n in range(4)]
        bobs = [await host.submit(owner="bob", graph_id="gate", run_id=f"b{n}") for n in range(2)]
        await gate.has_come(3)
        for _ in range(100):
            await asyncio.sleep(0)
        running = {run.id: run.owner for run in await stores.runs.list(statuses=["running"])}
        assert sorted(running.values()) == ["ann", "ann", "bob"]
        assert {anns[0].id, anns[1].id, bobs[0].id} == running.keys()
        assert host.stats()["running"] == 3
        gate.opened.set()
        left = [await host.wait(run.id) for run in [*anns, *bobs]]
    assert {run.status for run in left} == {"completed"}
    assert gate.came == 6


def test_runs_that_wait_for_answers_leave_room_for_others_up_to_a_bound() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        stores = MemoryStores(clock=loop.clock)
        settings = HostSettings(max_running=1, drain_s=0)
        async with await host_with(stores, settings=settings, clock=loop.clock) as host:
            for _ in range(MAX_WAITING + 1):
                await host.submit(owner="ann", graph_id="ask", input="it")
            await asyncio.sleep(60)
            assert (host.stats()["waiting"], host.stats()["running"], host.stats()["queued"]) == (MAX_WAITING, 0, 1)
            (first, *_) = await stores.approvals.list()
            await host.answer(first.id, "approved", by="bob")
            await host.wait(first.run_id)
            await asyncio.sleep(60)
            assert (host.stats()["waiting"], host.stats()["queued"]) == (MAX_WAITING, 0)

    sim_run(main, seed=1)


async def test_missing_limits_get_the_defaults_and_none_exceeds_its_ceiling() -> None:
    settings = HostSettings(default_limits=RunLimits(max_cost_usd="5", max_steps=9), ceilings=RunLimits(max_cost_usd=2))
    host = await host_with(MemoryStores(), settings=settings)
    run = await host.submit(owner="ann", graph_id="echo", limits={"max_tokens": 0})
    assert run.limits == {"max_cost_usd": "2", "max_steps": 9, "max_tokens": 0}
    with pytest.raises(InvalidValue, match="max_cost_usd"):
        await host.submit(owner="ann", graph_id="echo", limits={"max_cost_usd": "2.01"})
    with pytest.raises(InvalidValue, match="max_stepps"):
        await host.submit(owner="ann", graph_id="echo", limits={"max_stepps": 1})


@pytest.mark.parametrize(
    "wrong",
    [{"max_steps": True}, {"max_steps": 1.0}, {"max_steps": "1"}, {"max_steps": 1, "timeout_s": []}],
)
async def test_limits_that_equal_accepted_ones_but_have_another_type_are_refused(wrong: dict[str, Any]) -> None:
    host = await host_with(MemoryStores())
    for _ in range(2):
        taken = await host.submit(owner="ann", graph_id="echo", limits={"max_steps": 1})
        assert taken.limits["max_steps"] == 1
        with pytest.raises(InvalidValue):
            await host.submit(owner="ann", graph_id="echo", limits=wrong)
    unset = await host.submit(owner="ann", graph_id="echo", limits={"max_steps": 1, "max_cost_usd": None})
    assert unset.limits == taken.limits


# Reading.


async def test_events_can_be_read_from_any_place_without_a_gap_or_a_double() -> None:
    stores = MemoryStores()
    async with await host_with(stores) as host:
        run = await host.submit(owner="ann", graph_id="echo")
        whole = [event async for event in host.events(run.id)]
        for after in range(len(whole) + 1):
            assert [event async for event in host.events(run.id, after)] == whole[after:]


async def test_a_reader_who_comes_early_sees_the_same_as_one_who_comes_late() -> None:
    stores, gate = MemoryStores(), Gate()
    async with await host_with(stores, gate=gate) as host:
        run = await host.submit(owner="ann", graph_id="gate")
        early = asyncio.create_task(types_of(host, run.id))
        await gate.entered.wait()
        gate.opened.set()
        assert await early == await types_of(host, run.id)


async def test_reader_that_stops_in_the_middle_leaves_nothing_behind() -> None:
    stores, gate = MemoryStores(), Gate()
    async with await host_with(stores, gate=gate) as host:
        run = await host.submit(owner="ann", graph_id="gate")
        async with aclosing(host.events(run.id)) as events:
            async for event in events:
                if event.type == "node.started":
                    break
        gate.opened.set()
        assert (await host.wait(run.id)).status == "completed"


async def test_a_run_that_is_not_there_cannot_be_read_or_waited_for() -> None:
    host = await host_with(MemoryStores())
    with pytest.raises(RunNotFound):
        await anext(host.events("nope"))
    with pytest.raises(RunNotFound):
        await host.wait("nope")
    with pytest.raises(InvalidValue):
        await anext(host.events("nope", -1))
    assert await host.get("nope") is None


async def test_pieces_of_a_text_are_joined_and_nothing_of_it_is_lost() -> None:
    stores = MemoryStores()
    document = graph(("in", "input", {}), ("say", "speaker", {"pieces": 1_000}), edges="in>say")
    async with await host_with(stores) as host:
        await stores.graphs.save("say", "ann", "say", document, now_ms=0)
        run = await host.submit(owner="ann", graph_id="say")
        events = [event async for event in host.events(run.id)]
    deltas = [event for event in events if event.type == "text.delta"]
    assert "".join(event.data["text"] for event in deltas) == "".join(f"{number} " for number in range(1_000))
    assert len(deltas) < 1_000
    assert {(event.data["node_id"], event.data["source"]) for event in deltas} == {("say", "speaker")}


# Kinds of runs.


MINE = {"kind": "mine"}


class Kind:
    """Records the ends of runs, and the events stored by then."""

    def __init__(self, stores: MemoryStores) -> None:
        self.stores = stores
        self.ends: list[tuple[str, Any]] = []
        self.events_by_then: list[str] = []

    async def on_start(self, run: RunRecord) -> Prepared:
        return Prepared(f"prepared {run.input}", {"models": {}})

    async def on_resume(self, run: RunRecord) -> None:
        """It may."""

    async def on_end(self, run: RunRecord, stores: Any) -> None:
        self.ends.append((run.status, run.output))
        self.events_by_then = [event.type for event in await self.stores.events.read(run.id)]


async def test_a_handler_prepares_its_runs_and_is_called_in_the_transaction_of_their_end() -> None:
    stores = MemoryStores()
    async with await host_with(stores) as host:
        kind = host.handlers["mine"] = Kind(stores)
        run = await host.submit(owner="ann", graph_id="echo", input="x", origin={"kind": "mine"})
        left = await host.wait(run.id)
    assert left.output == "prepared x"
    assert kind.ends == [("completed", "prepared x")]
    assert kind.events_by_then[-1] == "run.completed"


async def test_handler_can_refuse_a_resume_before_anything_is_written() -> None:
    class Gone(Kind):
        async def on_resume(self, run: RunRecord) -> None:
            assert run.origin["kind"] == "mine", "also of a fork of one"
            raise Conflict("gone")

    stores = MemoryStores()
    async with await host_with(stores) as host:
        kind = host.handlers["mine"] = Kind(stores)
        run = await host.submit(owner="ann", graph_id="echo", input="x", limits={"max_steps": 1}, origin=MINE)
        assert (await host.wait(run.id)).status == "halted"
        fork = await host.fork(run.id, owner="ann", at="in")
        assert (await host.wait(fork.id)).status == "halted"
        host.handlers["mine"] = Gone(stores)
        before = await stores.runs.list(), await stores.events.read(run.id)
        for ended in (run, fork):
            for again in (
                host.grant(ended.id, {"max_steps": 5}, by="root"),
                host.resume(ended.id),
                host.fork(ended.id, owner="ann", at="in"),
                host.replay(ended.id, owner="ann"),
            ):
                with pytest.raises(Conflict, match="gone"):
                    await again
        assert (await stores.runs.list(), await stores.events.read(run.id)) == before
        host.handlers["mine"] = kind
        await host.grant(run.id, {"max_steps": 5}, by="root")
        assert (await host.wait(run.id)).output == "prepared x"


async def test_a_parked_run_ends_even_if_its_handler_would_refuse_it() -> None:
    class Gone(Kind):
        async def on_start(self, run: RunRecord) -> Prepared:
            raise Conflict("gone")

        async def on_resume(self, run: RunRecord) -> None:
            raise Conflict("gone")

    stores, gate = MemoryStores(), Gate()
    first = await host_with(stores, gate=gate)
    first.handlers["mine"] = Kind(stores)
    await first.start()
    run = await first.submit(owner="ann", graph_id="gate", origin=MINE)
    await gate.has_come(1)
    await first.close()
    second = await host_with(stores, gate=gate)
    second.handlers["mine"] = Gone(stores)
    async with second:
        left = await second.wait(run.id)
    assert (left.status, left.error) == ("failed", "Conflict: gone")


async def test_failing_handler_does_not_keep_the_run_from_ending(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Kind):
        async def on_end(self, run: RunRecord, stores: Any) -> None:
            raise ValueError("no")

    stores = MemoryStores()
    async with await host_with(stores) as host:
        host.handlers["mine"] = Broken(stores)
        run = await host.submit(owner="ann", graph_id="echo", origin={"kind": "mine"})
        assert (await host.wait(run.id)).status == "completed"
        assert host.stats()["totals"]["kind_failures"] == 1
    assert "could not store its end" in caplog.text


async def test_handler_that_raises_conflict_does_not_look_like_a_takeover() -> None:
    class Conflicting(Kind):
        async def on_end(self, run: RunRecord, stores: Any) -> None:
            raise Conflict("the chat is gone")

    stores = MemoryStores()
    async with await host_with(stores) as host:
        host.handlers["mine"] = Conflicting(stores)
        run = await host.submit(owner="ann", graph_id="echo", origin={"kind": "mine"})
        assert (await host.wait(run.id)).status == "completed"
        assert host.stats()["totals"]["kind_failures"] == 1


@pytest.mark.parametrize("where", ["in the handler", "after it"])
async def test_unavailable_store_at_the_end_is_retried_and_not_taken_for_a_failing_handler(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Once(Kind):
        async def on_end(self, run: RunRecord, stores: Any) -> None:
            self.ends.append((run.status, run.output))
            if len(self.ends) > 1:
                monkeypatch.undo()
            elif where == "in the handler":
                raise StoreUnavailable("busy")
            else:
                monkeypatch.setattr(stores.runs, "update", unavailable)

    async def unavailable(*args: Any, **changes: Any) -> Any:
        raise StoreUnavailable("busy")

    stores = MemoryStores()
    async with await host_with(stores) as host:
        kind = host.handlers["mine"] = Once(stores)
        run = await host.submit(owner="ann", graph_id="echo", input="x", origin={"kind": "mine"})
        assert (await host.wait(run.id)).status == "completed"
        assert "kind_failures" not in host.stats()["totals"]
    assert kind.ends == [("completed", "prepared x")] * 2


async def test_run_whose_task_is_cancelled_in_its_handler_is_not_ended() -> None:
    class Stuck(Kind):
        async def on_end(self, run: RunRecord, stores: Any) -> None:
            host._runs.tasks[host._runs.by_id[run.id]].cancel()
            raise asyncio.CancelledError

    stores = MemoryStores()
    host = await host_with(stores)
    host.handlers["mine"] = Stuck(stores)
    async with host:
        run = await host.submit(owner="ann", graph_id="echo", origin={"kind": "mine"})
        while host._runs.tasks:
            await asyncio.wait(list(host._runs.tasks.values()))
        assert (await host.get(run.id)).status == "running"  # type: ignore[union-attr]
        assert "kind_failures" not in host.stats()["totals"]


async def test_what_ended_long_ago_is_removed() -> None:
    stores = MemoryStores()
    settings = HostSettings(keep_days=1e-9, tick_s=0.01, drain_s=0)
    async with await host_with(stores, settings=settings) as host:
        run = await host.submit(owner="ann", graph_id="echo")
        await host.wait(run.id)
    async with await host_with(stores, settings=SETTINGS) as host:
        assert await host.get(run.id) is not None
    await asyncio.sleep(0.002)
    async with await host_with(stores, settings=settings) as host:
        assert await host.get(run.id) is None


async def test_paused_reader_delays_no_run_and_misses_nothing() -> None:
    stores = MemoryStores()
    document = graph(("in", "input", {}), ("tell", "teller", {"events": 2_000}), edges="in>tell")
    async with await host_with(stores, teller=Teller()) as host:
        await stores.graphs.save("tell", "ann", "tell", document, now_ms=0)
        run = await host.submit(owner="ann", graph_id="tell")
        async with aclosing(host.events(run.id)) as events:
            seqs = [(await anext(events)).seq]
            assert (await host.wait(run.id)).status == "completed"  # while the reader does not read
            seqs += [event.seq async for event in events]
        assert seqs == [*range(1, await stores.events.last_seq(run.id) + 1)]
    assert len(seqs) > 2_000


@pytest.mark.parametrize("room", [{"max_running": 1}, {"max_running_per_owner": 1}])
async def test_a_queued_run_begins_when_another_run_has_ended(
    room: dict[str, int],
) -> None:
    gate = Gate()
    gate.opened.set()
    settings = HostSettings(tick_s=3_600, drain_s=0, **room)
    async with await host_with(MemoryStores(), settings=settings, gate=gate) as host:
        runs = [await host.submit(owner="ann", graph_id="gate") for _ in range(4)]
        left = [await host.wait(run.id) for run in runs]
    assert {run.status for run in left} == {"completed"}


async def test_an_existing_run_is_returned_although_the_queue_is_full() -> None:
    host = await host_with(MemoryStores(), settings=HostSettings(max_queued=1))
    there = await host.submit(owner="ann", graph_id="echo", run_id="r", input=1)
    assert await host.submit(owner="ann", graph_id="echo", run_id="r", input=1) == there
    with pytest.raises(Conflict):
        await host.submit(owner="ann", graph_id="echo", run_id="r", input=2)
    with pytest.raises(Overloaded):
        await host.submit(owner="ann", graph_id="echo", run_id="another")
    assert host.stats()["totals"]["submitted"] == 1


async def test_a_reader_near_a_run_sees_what_one_sees_who_asks_the_store() -> None:
    stores, gate = MemoryStores(), Gate()
    async with await host_with(stores, gate=gate) as host:
        run = await host.submit(owner="ann", graph_id="gate", input="🌊 ü")
        near = asyncio.create_task(_all(host, run.id))
        await gate.entered.wait()
        late = asyncio.create_task(_all(host, run.id))
        gate.opened.set()
        seen = await near, await late
    kept = [*await stores.events.read(run.id)]
    assert seen == (kept, kept)


async def _all(host: RunHost, run_id: str) -> list[HostedEvent]:
    return [event async for event in host.events(run_id)]


async def test_an_archived_graph_begins_nothing_new_in_any_of_its_versions() -> None:
    stores = MemoryStores()
    async with await host_with(stores) as host:
        await stores.graphs.archive("echo")
        for version in (None, 1):
            with pytest.raises(GraphArchived, match="restore it first"):
                await host.submit(owner="ann", graph_id="echo", version=version, run_id="new")
        assert await stores.runs.list() == []
        await stores.graphs.archive("echo", is_archived=False)
        assert (await host.wait((await host.submit(owner="ann", graph_id="echo")).id)).status == "completed"


async def test_runs_of_an_archived_graph_can_be_read_resumed_forked_and_replayed() -> None:
    stores, gate = MemoryStores(), Gate()
    async with await host_with(stores, gate=gate) as host:
        arguments: dict[str, Any] = {"owner": "ann", "graph_id": "gate", "input": 1, "run_id": "r"}
        await host.submit(**arguments)
        await gate.entered.wait()
        await host.cancel("r")
        await host.wait("r")
        await stores.graphs.archive("gate")
        assert (await host.submit(**arguments)).status == "cancelled", "submitted again, it is the existing run"
        gate.opened.set()
        await host.resume("r")
        assert (await host.wait("r")).status == "completed"
        again = [await host.fork("r", owner="ann", at="gate"), await host.replay("r", owner="ann")]
        assert [(await host.wait(one.id)).status for one in again] == ["completed", "completed"]


@pytest.mark.parametrize("own", [None, InProcessMemory()], ids=["of the stores", "of its own"])
async def test_nodes_have_the_memory_of_the_stores_unless_the_host_is_given_another(
    own: InProcessMemory | None,
) -> None:
    stores = MemoryStores()
    keep = graph(("in", "input", {}), ("m", "memory", {"action": "remember", "scope": "owner"}), edges="in>m")
    async with await host_with(stores, services=None if own is None else {"memory": own}) as host:
        await stores.graphs.save("keep", "ann", "keep", keep, now_ms=0)
        run = await host.submit(owner="ann", graph_id="keep", input="the dam is 221 m high")
        left = await host.wait(run.id)
        assert (left.status, left.error) == ("completed", None)
        here, there = (stores.memories, own) if own is None else (own, stores.memories)
        assert len(await here.search("owner:ann", "dam", 5)) == 1
        assert there is None or not await there.search("owner:ann", "dam", 5)


@pytest.mark.parametrize("changed", [{}, {"input": "another"}, {"limits": {"max_steps": 3}}, {"graph_id": "ask"}])
async def test_the_contents_of_the_run_of_another_owner_cannot_be_guessed(changed: dict[str, Any]) -> None:
    async with await host_with(MemoryStores()) as host:
        arguments: dict[str, Any] = {"graph_id": "echo", "input": "secret", "run_id": "r", "limits": {"max_steps": 7}}
        await host.submit(owner="ann", **arguments)
        with pytest.raises(Conflict) as raised:
            await host.submit(owner="bob", **{**arguments, **changed})
    assert str(raised.value) == "run 'r' exists and differs in its owner; choose another id"
