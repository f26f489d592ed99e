"""The contract of every `RunStore`."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.errors import InvalidValue
from penstock.hosting.ports import (
    CLAIMED,
    ENDED,
    PARKED,
    TRANSITIONS,
    Conflict,
    Fenced,
    RunFilter,
    RunIdConflict,
    RunRecord,
    RunStatus,
)
from penstock.testing.contracts.stores.suite import (
    NOT_JSON,
    NOT_NAMES,
    NOT_OBJECTS,
    ODD_NAMES,
    ODD_VALUES,
    StoreBundle,
    StoreContract,
    a_cancel_request,
    a_run,
    an_approval,
    an_entry,
    an_event,
    brought_to,
    claimed,
    fresh,
    let_others_run,
    raises,
    until_nothing,
)


class RunStoreContract(StoreContract):
    """Runs by id: stored, listed, claimed by one worker, fenced, moved between statuses, removed."""

    @fresh
    async def test_a_run_is_read_back_unchanged(self, stores: StoreBundle) -> None:
        whole = a_run(
            input={"text": "hi"},
            limits={"max_cost_usd": "0.5"},
            origin={"kind": "chat", "chat_id": "c"},
            started_ms=None,
            stop_reason="aborted",
            error="in\x00words",
            output=[1, 2],
            cost_nanos=2**63 - 1,
            tokens_in=2,
            tokens_out=3,
            unresolved_nanos=4,
            unknown_costs=5,
            crash_count=6,
            worked_ms=7,
            resumed_ms=8,
            halt={"whose": "run", "limit": 1.5},
        )
        assert (await stores.runs.add(whole)).run == whole
        assert await stores.runs.get("r") == whole
        assert list(await stores.runs.list()) == [whole]

    @fresh
    async def test_requeue_resets_the_crashes_and_the_halt_and_keeps_the_time_worked(self, stores: StoreBundle) -> None:
        run = await claimed(stores)
        facts = {"crash_count": 3, "worked_ms": 700, "resumed_ms": 90, "halt": {"whose": "run"}}
        halted = await stores.runs.update(run.id, run.epoch, status="halted", ended_ms=5, **facts)
        assert {name: getattr(halted, name) for name in facts} == facts
        queued = await stores.runs.requeue(run.id, run.epoch)
        assert (queued.crash_count, queued.halt, queued.worked_ms, queued.resumed_ms) == (0, None, 700, 90)

    @fresh
    async def test_an_unknown_run_is_none(self, stores: StoreBundle) -> None:
        for id in ("r", "", *NOT_NAMES):
            assert await stores.runs.get(id) is None
            assert await stores.runs.claim("w", now_ms=1, lease_ms=1, run_id=id) is None
            assert list(await stores.runs.list(owner=id)) == []
        assert list(await stores.runs.list()) == []
        assert await stores.runs.count() == 0

    @fresh
    async def test_odd_values_of_a_run_come_back_exactly(self, stores: StoreBundle) -> None:
        for number, value in enumerate(ODD_VALUES):
            added = (await stores.runs.add(a_run(f"r{number}", input=value, origin={"value": value}))).run
            found = await stores.runs.get(f"r{number}")
            assert found is not None
            assert (repr(found.input), repr(found.origin)) == (repr(value), repr({"value": value}))
            assert found == added

    @fresh
    async def test_odd_names_are_names(self, stores: StoreBundle) -> None:
        for name in ODD_NAMES:
            await stores.runs.add(a_run(name, owner=name, graph_id=name))
        for name in ODD_NAMES:
            found = await stores.runs.get(name)
            assert found is not None
            assert (found.id, found.owner, found.graph_id) == (name, name, name)
            assert [run.id for run in await stores.runs.list(owner=name)] == [name]

    @fresh
    async def test_a_run_that_cannot_be_stored_is_refused(self, stores: StoreBundle) -> None:
        refused = [a_run(input=value) for value in NOT_JSON]
        refused += [a_run(limits={"max_steps": value}) for value in NOT_JSON]
        refused += [a_run(name) for name in NOT_NAMES] + [a_run(owner=name) for name in NOT_NAMES]
        refused += [a_run(limits=value) for value in NOT_OBJECTS] + [a_run(origin=value) for value in NOT_OBJECTS]
        refused += [a_run(cost_nanos=number) for number in (2**63, -(2**63) - 1, 1.5, "1", True)]
        needed = ("id", "owner", "graph_id", "graph_version", "created_ms", "cost_nanos")
        refused += [a_run()._replace(**{field: None}) for field in needed]  # type: ignore[arg-type]
        for run in refused:
            with raises(InvalidValue):
                await stores.runs.add(run)
        with raises(InvalidValue):
            await stores.runs.add(a_run(status="lost"))
        assert await stores.runs.count() == 0

    @fresh
    async def test_a_value_that_is_nested_too_deeply_is_refused(self, stores: StoreBundle) -> None:
        deep: list[object] = []
        for _ in range(100_000):
            deep = [deep]
        with raises(InvalidValue):
            await stores.runs.add(a_run(input=deep))
        assert await stores.runs.get("r") is None

    @fresh
    async def test_records_are_independent_of_what_callers_change_in_them(self, stores: StoreBundle) -> None:
        original = {"list": [1]}
        back = (await stores.runs.add(a_run(input=original))).run
        found = await stores.runs.get("r")
        assert found is not None
        for value in (original, back.input, found.input):
            value["list"].append(2)
        again = await stores.runs.get("r")
        assert again is not None
        assert again.input == {"list": [1]}

    @fresh
    async def test_a_run_is_added_once(self, stores: StoreBundle) -> None:
        run = await claimed(stores, input={"a": 1, "b": 2})
        assert (await stores.runs.add(a_run(input={"b": 2, "a": 1}, created_ms=9_999))).run == run, "as it is by now"
        assert await stores.runs.count() == 1

    @fresh
    async def test_an_id_that_is_taken_by_another_run_is_a_conflict(self, stores: StoreBundle) -> None:
        run = (await stores.runs.add(a_run(input=1, limits={"max_steps": 1}))).run
        others: list[dict[str, Any]] = [{"owner": "bob"}, {"graph_id": "h"}, {"graph_version": 2}]
        others += [{"limits": {"max_steps": 2}}, {"origin": {"kind": "fork", "run_id": "s", "at": "n"}}]
        others += [{"input": value} for value in (2, 1.0, True, "1", None, [1])]
        for other in others:
            refusal = await refused(stores, run._replace(**other))
            assert (refusal.known, refusal.fields) == (run, tuple(other))
        assert await stores.runs.get("r") == run

    @fresh
    async def test_about_is_ignored_when_submissions_are_compared(self, stores: StoreBundle) -> None:
        run = (await stores.runs.add(a_run(origin={"kind": "run", "about": {"for": "this"}}))).run
        for about in ({"about": {"for": "that"}}, {"about": None}, {}):
            assert (await stores.runs.add(run._replace(origin={"kind": "run", **about}))).run == run
        with raises(RunIdConflict):
            await stores.runs.add(run._replace(origin={"kind": "other", "about": {"for": "this"}}))

    @fresh
    async def test_concurrent_submissions_of_one_run_all_get_the_same_run(self, stores: StoreBundle) -> None:
        async with self.another(stores) as other:
            both = (stores, other)
            added = [both[number % 2].runs.add(a_run(created_ms=number)) for number in range(self.claimants)]
            answers = await asyncio.gather(*added)
            assert len({answer.run.created_ms for answer in answers}) == 1
            assert [answer.is_new for answer in answers].count(True) == 1
        assert await stores.runs.count() == 1

    @fresh
    async def test_a_run_is_added_together_with_its_journal(self, stores: StoreBundle) -> None:
        entries = [an_entry(f"k{number}", value=number) for number in range(self.claimants)]
        added = (await stores.runs.add(a_run(), entries)).run
        assert await stores.runs.get("r") == added
        assert list(await stores.journal.load("r")) == entries
        assert await stores.runs.claim("w", now_ms=1, lease_ms=1) is not None
        await stores.journal.append("r", [an_entry("k0", value="another"), an_entry("own")], epoch=1)
        assert list(await stores.journal.load("r")) == [*entries, an_entry("own")]

    @fresh
    async def test_an_existing_run_keeps_its_own_journal(self, stores: StoreBundle) -> None:
        first, other = [an_entry("k", value="first")], [an_entry("k", value="other"), an_entry("more")]
        await stores.runs.add(a_run("with"), first)
        await stores.runs.add(a_run("without"))
        for id in ("with", "without"):
            await stores.runs.add(a_run(id), other)
            with raises(Conflict):
                await stores.runs.add(a_run(id, owner="bob"), other)
        assert list(await stores.journal.load("with")) == first
        assert list(await stores.journal.load("without")) == []

    @fresh
    async def test_concurrent_runs_with_one_id_leave_the_journal_of_the_one_that_was_added(
        self, stores: StoreBundle
    ) -> None:
        async def add(which: StoreBundle, owner: str) -> str | None:
            try:
                return (
                    await which.runs.add(a_run(owner=owner), [an_entry(owner), an_entry("k", value=owner)])
                ).run.owner
            except Conflict:
                return None

        async with self.another(stores) as other:
            both = (stores, other)
            calls = [add(both[number % 2], f"user {number}") for number in range(self.claimants)]
            (owner,) = [got for got in await asyncio.gather(*calls) if got is not None]
        assert list(await stores.journal.load("r")) == [an_entry(owner), an_entry("k", value=owner)]

    @fresh
    async def test_a_run_with_a_journal_that_cannot_be_stored_is_not_added(self, stores: StoreBundle) -> None:
        for value in NOT_JSON:
            with raises(InvalidValue):
                await stores.runs.add(a_run(), [an_entry("k"), an_entry("k2", value=value)])
        assert await stores.runs.get("r") is None
        assert list(await stores.journal.load("r")) == []

    @fresh
    async def test_runs_are_listed_newest_first_then_by_id(self, stores: StoreBundle) -> None:
        ids = ["B", "a", "Z", "\u00e9", "b", "10", "9", "\U0001f30a"]
        for id in ids:
            await stores.runs.add(a_run(id))
        await stores.runs.add(a_run("newest", created_ms=2_000))
        await stores.runs.add(a_run("oldest", created_ms=0))
        listed = [run.id for run in await stores.runs.list()]
        assert listed == ["newest", *sorted(ids, reverse=True), "oldest"], "by code points, as Python sorts text"

    @fresh
    async def test_pages_follow_each_other_without_gap_or_repetition(self, stores: StoreBundle) -> None:
        for number in range(10):
            await stores.runs.add(a_run(f"r{number}", created_ms=number // 3))
        assert len(await stores.runs.list(limit=3)) == 3
        found = await until_nothing(lambda last: stores.runs.list(before=last, limit=3))
        assert [run.id for run in found] == [f"r{number}" for number in reversed(range(10))]

    @fresh
    async def test_a_page_of_size_0_and_a_page_after_an_unknown_run_are_empty(self, stores: StoreBundle) -> None:
        await stores.runs.add(a_run())
        assert list(await stores.runs.list(limit=0)) == []
        assert list(await stores.runs.list(before="unknown")) == []
        for wrong in (-1, 2**63, 1.5, True, None, "1"):
            with raises(InvalidValue):
                await stores.runs.list(limit=wrong)  # type: ignore[arg-type]

    @fresh
    async def test_runs_are_listed_by_time_stop_reason_cost_and_part_of_their_names(self, stores: StoreBundle) -> None:
        for number, graph_id in enumerate(("Report", "report_2", "100%", "other")):
            await stores.runs.add(a_run(f"r{number}", graph_id=graph_id, created_ms=number * 10))
            claimed = await stores.runs.claim("w", now_ms=1, lease_ms=1, run_id=f"r{number}")
            reason = "budget_exceeded" if number == 2 else None
            facts = {"status": "halted", "stop_reason": reason, "ended_ms": 1, "cost_nanos": (number * 7) % 4}
            await stores.runs.update(f"r{number}", claimed.epoch, **facts)  # type: ignore[union-attr]

        async def found(**wanted: Any) -> list[str]:
            return [run.id for run in await stores.runs.list(matching=RunFilter(**wanted))]

        assert await found() == ["r3", "r2", "r1", "r0"]
        assert await found(since_ms=10, until_ms=30) == ["r2", "r1"]
        assert await found(stop_reason="budget_exceeded") == ["r2"]
        assert await found(min_cost_nanos=2) == ["r2", "r1"]
        assert await found(text="REPORT") == ["r1", "r0"]
        assert await found(text="R3") == ["r3"]
        assert await found(text="t_2") == ["r1"], "an underscore is a character like any other"
        assert await found(text="0%") == ["r2"]
        assert await found(text="!") == []
        assert await stores.runs.count(matching=RunFilter(since_ms=10, text="r")) == 3
        assert await stores.runs.count(graph_id="other", statuses=["halted"], matching=RunFilter(since_ms=10)) == 1
        assert [await stores.runs.count(at_most=most) for most in (0, 3, 4, 9)] == [0, 3, 4, 4]
        by_cost = await until_nothing(lambda last: stores.runs.list(before=last, limit=1, order="cost"))
        assert [run.id for run in by_cost] == ["r1", "r2", "r3", "r0"]

    @fresh
    async def test_a_large_page_has_everything(self, stores: StoreBundle) -> None:
        await asyncio.gather(*(stores.runs.add(a_run(f"r{number}")) for number in range(300)))
        assert len(await stores.runs.list(limit=10_000)) == 300
        assert len(await stores.runs.list()) == 50

    @fresh
    async def test_runs_are_listed_and_counted_by_owner_status_graph_and_chat(self, stores: StoreBundle) -> None:
        await stores.runs.add(a_run("1", owner="ann", graph_id="g", origin={"chat_id": "c", "kind": "chat"}))
        await stores.runs.add(a_run("2", owner="bob", graph_id="g", origin={"chat_id": "d"}))
        await stores.runs.add(a_run("3", owner="bob", graph_id="h", origin={"kind": "run"}))
        await stores.runs.claim("w", now_ms=1, lease_ms=1, run_id="3")
        cases: list[tuple[dict[str, object], str]] = [
            ({}, "321"),
            ({"owner": "bob"}, "32"),
            ({"graph_id": "g"}, "21"),
            ({"chat_id": "c"}, "1"),
            ({"statuses": ["running"]}, "3"),
            ({"statuses": {"running", "queued"}}, "321"),
            ({"statuses": ("halted",)}, ""),
            ({"owner": "bob", "statuses": ["queued"], "graph_id": "g", "chat_id": "d"}, "2"),
            ({"owner": "unknown"}, ""),
            ({"owner": ""}, ""),
            ({"matching": RunFilter(origin="chat")}, "1"),
            ({"matching": RunFilter(origin="run")}, "3"),
            ({"matching": RunFilter(origin="CHAT")}, ""),
            ({"matching": RunFilter(origin="cha")}, ""),
            ({"matching": RunFilter(origin='chat","x":"')}, ""),
            ({"owner": "bob", "before": "3"}, "2"),
        ]
        for filters, ids in cases:
            assert "".join(run.id for run in await stores.runs.list(**filters)) == ids, filters  # type: ignore[arg-type]
        assert await stores.runs.count() == 3
        assert await stores.runs.count(owner="bob") == 2
        assert await stores.runs.count(owner="bob", statuses=["queued"]) == 1
        assert await stores.runs.count(statuses=["queued", "running"]) == 3
        for wrong in (["lost"], ["queued", ""]):
            with raises(InvalidValue):
                await stores.runs.list(statuses=wrong)  # type: ignore[arg-type]
            with raises(InvalidValue):
                await stores.runs.count(statuses=wrong)  # type: ignore[arg-type]

    @fresh
    async def test_a_claim_takes_the_oldest_run_that_is_queued(self, stores: StoreBundle) -> None:
        for id, created_ms in (("young", 3), ("b", 2), ("a", 2), ("old", 1)):
            await stores.runs.add(a_run(id, created_ms=created_ms))
        order = []
        for run in await until_nothing(lambda last: stores.runs.claim("w", now_ms=5_000, lease_ms=100)):
            assert (run.status, run.worker, run.lease_until_ms, run.epoch) == ("running", "w", 5_100, 1)
            assert run.started_ms == 5_000
            assert await stores.runs.get(run.id) == run
            order.append(run.id)
        assert order == ["old", "a", "b", "young"]

    @fresh
    async def test_a_claim_of_one_id_takes_no_other(self, stores: StoreBundle) -> None:
        await stores.runs.add(a_run("old", created_ms=1))
        await stores.runs.add(a_run("young", created_ms=2))
        run = await stores.runs.claim("w", now_ms=1, lease_ms=100, run_id="young")
        assert run is not None
        assert run.id == "young"
        assert await stores.runs.claim("v", now_ms=1, lease_ms=100, run_id="young") is None
        assert await stores.runs.claim("v", now_ms=1, lease_ms=100, run_id="unknown") is None

    @fresh
    async def test_a_claim_that_cannot_be_stored_is_refused(self, stores: StoreBundle) -> None:
        run = (await stores.runs.add(a_run())).run
        for worker in NOT_NAMES:
            with raises(InvalidValue):
                await stores.runs.claim(worker, now_ms=1, lease_ms=1)
        for now_ms, lease_ms in ((2**63, 1), (1, 2**63), (2**62, 2**62)):
            with raises(InvalidValue):
                await stores.runs.claim("w", now_ms=now_ms, lease_ms=lease_ms)
        assert await stores.runs.get("r") == run

    @fresh
    async def test_a_cancelled_claim_has_claimed_the_run_or_left_it(self, stores: StoreBundle) -> None:
        for number in range(8):
            await stores.runs.add(a_run(f"r{number}"))
        calls = [asyncio.ensure_future(stores.runs.claim("w", now_ms=1, lease_ms=9)) for _ in range(8)]
        for number, claim in enumerate(calls):
            await let_others_run(number)
            claim.cancel()
        await asyncio.wait(calls)
        for run in await stores.runs.list():
            as_it_was = a_run(run.id)
            taken = as_it_was._replace(status="running", worker="w", epoch=1, lease_until_ms=10, started_ms=1)
            assert run in (as_it_was, taken)
        again = await until_nothing(lambda last: stores.runs.claim("v", now_ms=10, lease_ms=9))
        assert sorted(run.id for run in again) == [f"r{number}" for number in range(8)]

    @fresh
    async def test_concurrent_claims_give_each_run_to_one_worker(self, stores: StoreBundle) -> None:
        runs = self.claimants // 2
        for number in range(runs):
            await stores.runs.add(a_run(f"r{number:02d}"))
        async with self.another(stores) as other:
            both = (stores, other)
            calls = [both[n % 2].runs.claim(f"w{n}", now_ms=1, lease_ms=100) for n in range(self.claimants)]
            answers = await asyncio.gather(*calls)
        got = [run for run in answers if run is not None]
        assert sorted(run.id for run in got) == [f"r{number:02d}" for number in range(runs)]
        assert len({run.worker for run in got}) == runs
        assert {run.epoch for run in got} == {1}

    @fresh
    async def test_concurrent_takeovers_give_the_run_to_one_worker(self, stores: StoreBundle) -> None:
        await claimed(stores)
        async with self.another(stores) as other:
            both = (stores, other)
            calls = [both[n % 2].runs.claim(f"w{n}", now_ms=9_000, lease_ms=1) for n in range(self.claimants)]
            got = [run for run in await asyncio.gather(*calls) if run is not None]
        assert [run.epoch for run in got] == [2]

    @fresh
    async def test_a_run_is_taken_over_when_its_lease_has_expired_and_not_before(self, stores: StoreBundle) -> None:
        for id, status in (("r", "running"), ("w", "waiting")):
            run = await brought_to(stores, status, id)  # type: ignore[arg-type]
            assert await stores.runs.claim("v", now_ms=1_099, lease_ms=50, run_id=id) is None
            taken = await stores.runs.claim("v", now_ms=1_100, lease_ms=50, run_id=id)
            assert taken is not None
            assert (taken.status, taken.worker, taken.epoch) == ("running", "v", run.epoch + 1)
            assert (taken.lease_until_ms, taken.started_ms) == (1_150, 1_000), (
                "it was started when it was first claimed"
            )

    @fresh
    async def test_queued_and_expired_runs_are_claimed_oldest_first(self, stores: StoreBundle) -> None:
        await claimed(stores, "left", created_ms=1)
        await stores.runs.add(a_run("queued", created_ms=2))
        first = await stores.runs.claim("w", now_ms=5_000, lease_ms=100)
        second = await stores.runs.claim("w", now_ms=5_000, lease_ms=100)
        assert first is not None
        assert second is not None
        assert (first.id, second.id) == ("left", "queued")

    @fresh
    async def test_only_queued_and_expired_runs_can_be_claimed(self, stores: StoreBundle) -> None:
        for status in TRANSITIONS:
            await brought_to(stores, status, status)
        taken = await until_nothing(lambda last: stores.runs.claim("v", now_ms=9_000, lease_ms=100))
        assert {run.id for run in taken} == {"queued", *CLAIMED}

    @fresh
    async def test_a_run_of_an_engine_is_not_claimed(self, stores: StoreBundle) -> None:
        await stores.runs.add(a_run("dispatched", created_ms=1, queue="gpu"))
        await stores.runs.add(a_run("free", created_ms=2))
        first = await stores.runs.claim("w", now_ms=5_000, lease_ms=100)
        assert first is not None
        assert first.id == "free"
        assert await stores.runs.claim("w", now_ms=5_000, lease_ms=100, run_id="dispatched") is None
        assert await stores.runs.claim("w", now_ms=5_000, lease_ms=100) is None
        taken = await stores.runs.take("dispatched", "w", 7, queue="gpu", now_ms=5_000, lease_ms=100)
        assert taken is not None
        assert await stores.runs.claim("v", now_ms=9_000, lease_ms=100, run_id="dispatched") is None, (
            "the lease is over"
        )

    @fresh
    async def test_a_run_is_taken_under_a_newer_fence_only(self, stores: StoreBundle) -> None:
        run = (await stores.runs.add(a_run(queue="gpu", priority=1))).run
        first = await stores.runs.take("r", "w", 5, queue="other", now_ms=1_000, lease_ms=100)
        taken = run._replace(status="running", worker="w", epoch=1, lease_until_ms=1_100, started_ms=1_000)
        assert first == taken._replace(queue="other", fence=5) == await stores.runs.get("r")
        again = await stores.runs.take("r", "w", 5, queue="other", now_ms=1_050, lease_ms=100)
        assert again == first, "the response to the first call was lost"
        for worker, fence in (("v", 5), ("v", 4), ("w", 4)):
            assert await stores.runs.take("r", worker, fence, queue="other", now_ms=9_000, lease_ms=100) is None
        newer = await stores.runs.take("r", "v", 6, queue="other", now_ms=1_050, lease_ms=100)
        assert newer is not None, "the lease of the other worker does not matter"
        assert (newer.worker, newer.epoch, newer.fence, newer.started_ms) == ("v", 2, 6, 1_000)
        with raises(Fenced):
            await stores.runs.update("r", 1, cost_nanos=1)
        assert not await stores.runs.renew("w", ["r"], now_ms=1_060, lease_ms=100)

    @fresh
    async def test_fences_outlive_the_end_of_a_run(self, stores: StoreBundle) -> None:
        await stores.runs.add(a_run(queue="gpu"))
        taken = await stores.runs.take("r", "w", 2**32 + 1, queue="gpu", now_ms=1, lease_ms=100)
        assert taken is not None
        ended = await stores.runs.update("r", 1, status="halted", ended_ms=2)
        assert await stores.runs.take("r", "w", 2**33, queue="gpu", now_ms=3, lease_ms=100) is None, "it has ended"
        queued = await stores.runs.requeue("r", ended.epoch)
        assert (queued.fence, queued.queue) == (2**32 + 1, "gpu")
        assert await stores.runs.take("r", "v", 2**32, queue="gpu", now_ms=3, lease_ms=100) is None
        again = await stores.runs.take("r", "w", 2**33, queue="gpu", now_ms=3, lease_ms=100)
        assert again is not None
        assert (again.status, again.epoch, again.fence) == ("running", 2, 2**33)

    @fresh
    async def test_only_queued_and_claimed_runs_can_be_taken(self, stores: StoreBundle) -> None:
        for status in TRANSITIONS:
            await brought_to(stores, status, status)
            taken = await stores.runs.take(status, "v", 9, queue="q", now_ms=9_000, lease_ms=100)
            assert (taken is not None) == (status in {"queued", *CLAIMED}), status
        assert await stores.runs.take("unknown", "v", 9, queue="q", now_ms=9_000, lease_ms=100) is None

    @fresh
    async def test_a_run_that_a_host_claimed_is_taken_only_after_its_lease(self, stores: StoreBundle) -> None:
        run = await claimed(stores)
        before = run.lease_until_ms - 1
        assert await stores.runs.take("r", "v", 9, queue="q", now_ms=before, lease_ms=100) is None
        taken = await stores.runs.take("r", "v", 9, queue="q", now_ms=before + 1, lease_ms=100)
        assert taken is not None
        assert (taken.worker, taken.queue, taken.epoch) == ("v", "q", run.epoch + 1)

    @fresh
    async def test_a_take_that_cannot_be_stored_is_refused(self, stores: StoreBundle) -> None:
        run = (await stores.runs.add(a_run())).run
        for name in NOT_NAMES:
            with raises(InvalidValue):
                await stores.runs.take("r", name, 1, queue="q", now_ms=1, lease_ms=1)
            with raises(InvalidValue):
                await stores.runs.take("r", "w", 1, queue=name, now_ms=1, lease_ms=1)
        for fence in (0, -1, 2**63, True, None, "1"):
            with raises(InvalidValue):
                await stores.runs.take("r", "w", fence, queue="q", now_ms=1, lease_ms=1)  # type: ignore[arg-type]
        assert await stores.runs.get("r") == run

    @fresh
    async def test_concurrent_takes_under_one_fence_give_the_run_to_one_worker(self, stores: StoreBundle) -> None:
        await stores.runs.add(a_run())
        async with self.another(stores) as other:
            both = (stores, other)
            takes = [
                both[n % 2].runs.take("r", f"w{n}", 3, queue="q", now_ms=1, lease_ms=100) for n in range(self.claimants)
            ]
            got = [run for run in await asyncio.gather(*takes) if run is not None]
        assert [run.epoch for run in got] == [1]

    @fresh
    async def test_a_database_has_one_id(self, stores: StoreBundle) -> None:
        async with self.another(stores) as other:
            ids = await asyncio.gather(*(both.runs.database_id() for both in (stores, other) * 4))
        assert len(set(ids)) == 1
        assert ids[0]

    @fresh
    async def test_a_lease_is_renewed_only_for_its_worker(self, stores: StoreBundle) -> None:
        await claimed(stores, "mine", "w")
        await claimed(stores, "waits", "w")
        await stores.runs.update("waits", 1, status="waiting")
        await claimed(stores, "theirs", "v")
        await brought_to(stores, "completed", "done")
        await stores.runs.add(a_run("queued"))
        calls = ["mine", "waits", "theirs", "done", "queued", "unknown"]
        assert set(await stores.runs.renew("w", calls, now_ms=1_090, lease_ms=100)) == {"mine", "waits"}
        for id, until_ms in (("mine", 1_190), ("waits", 1_190), ("theirs", 1_100)):
            run = await stores.runs.get(id)
            assert run is not None
            assert (run.lease_until_ms, run.epoch) == (until_ms, 1)
        assert set(await stores.runs.renew("w", [], now_ms=1_090, lease_ms=100)) == set()

    @fresh
    async def test_an_expired_lease_can_be_renewed_until_the_run_is_taken_over(self, stores: StoreBundle) -> None:
        await claimed(stores)
        assert set(await stores.runs.renew("w", ["r"], now_ms=5_000, lease_ms=100)) == {"r"}
        assert await stores.runs.claim("v", now_ms=5_050, lease_ms=100) is None
        assert await stores.runs.claim("v", now_ms=5_100, lease_ms=100) is not None
        assert set(await stores.runs.renew("w", ["r"], now_ms=5_150, lease_ms=100)) == set()

    @fresh
    async def test_renewing_never_makes_a_lease_shorter(self, stores: StoreBundle) -> None:
        await claimed(stores)
        assert set(await stores.runs.renew("w", ["r"], now_ms=0, lease_ms=1)) == {"r"}
        run = await stores.runs.get("r")
        assert run is not None
        assert run.lease_until_ms == 1_100

    @fresh
    async def test_a_worker_updates_its_claimed_run(self, stores: StoreBundle) -> None:
        run = await claimed(stores)
        used = {"cost_nanos": 5, "tokens_in": 1, "tokens_out": 2, "unresolved_nanos": 3, "unknown_costs": 4}
        changed = await stores.runs.update("r", 1, limits={"max_steps": 9}, **used)
        assert changed == run._replace(limits={"max_steps": 9}, **used)  # type: ignore[arg-type]
        assert await stores.runs.get("r") == await stores.runs.update("r", 1) == changed
        ended = await stores.runs.update("r", 1, status="completed", output={"\u00fc": [1]}, ended_ms=2_000)
        assert ended == changed._replace(
            status="completed", output={"\u00fc": [1]}, ended_ms=2_000, worker=None, lease_until_ms=0
        ), "the claim is released"

    @fresh
    async def test_an_update_under_another_claim_is_fenced(self, stores: StoreBundle) -> None:
        await claimed(stores)
        taken = await stores.runs.claim("v", now_ms=5_000, lease_ms=100)
        for epoch in (0, 1, 3):
            with raises(Fenced):
                await stores.runs.update("r", epoch, status="completed", output="old")
        assert await stores.runs.get("r") == taken

    @fresh
    async def test_changes_that_a_worker_may_not_make_are_refused(self, stores: StoreBundle) -> None:
        run = await claimed(stores)
        for change in (
            *({"id": "s"}, {"owner": "bob"}, {"graph_id": "h"}, {"graph_version": 2}, {"input": 1}, {"origin": {}}),
            *({"worker": "v"}, {"lease_until_ms": 9}, {"created_ms": 9}, {"nothing": 1}),
            *({"status": "lost"}, {"cost_nanos": 2**63}, {"cost_nanos": "1"}, {"unknown_costs": None}),
            *({"limits": value} for value in NOT_OBJECTS),
            *({"output": value} for value in NOT_JSON),
        ):
            with raises(InvalidValue):
                await stores.runs.update("r", 1, **change)  # type: ignore[arg-type]
            with raises(InvalidValue):
                await stores.runs.update("r", 1, tokens_in=5, **change)  # type: ignore[arg-type]
        assert await stores.runs.get("r") == run

    @fresh
    async def test_updates_follow_the_transition_table(self, stores: StoreBundle) -> None:
        for status in CLAIMED:
            for target in TRANSITIONS:
                run = await brought_to(stores, status, f"{status} to {target}")
                if target in TRANSITIONS[status]:
                    after = await stores.runs.update(run.id, 1, status=target)
                    is_kept = target in CLAIMED
                    assert (after.status, after.worker) == (target, "w" if is_kept else None), run.id
                    assert after.lease_until_ms == (1_100 if is_kept else 0), run.id
                else:
                    with raises(Conflict):
                        await stores.runs.update(run.id, 1, status=target)
                    assert await stores.runs.get(run.id) == run, run.id

    @fresh
    async def test_an_unclaimed_run_is_not_updated(self, stores: StoreBundle) -> None:
        for status in TRANSITIONS.keys() - CLAIMED:
            run = await brought_to(stores, status, status)
            for target in TRANSITIONS.keys() - {status}:
                with raises(Conflict):
                    await stores.runs.update(run.id, run.epoch, status=target)
            with raises(Conflict):
                await stores.runs.update(run.id, run.epoch, tokens_in=1)
            assert await stores.runs.get(run.id) == run

    @fresh
    async def test_an_update_whose_answer_was_lost_can_be_repeated(self, stores: StoreBundle) -> None:
        for status in (*ENDED, "parked"):
            await claimed(stores, status)
            changes = {"status": status, "output": {"a": 1, "b": 2}, "ended_ms": 2_000, "cost_nanos": 3}
            ended = await stores.runs.update(status, 1, **changes)
            assert await stores.runs.update(status, 1, **{**changes, "output": {"b": 2, "a": 1}}) == ended
            with raises(Conflict):
                await stores.runs.update(status, 1, **{**changes, "cost_nanos": 4})

    @fresh
    async def test_requeuing_follows_the_transition_table(self, stores: StoreBundle) -> None:
        for status in TRANSITIONS:
            run = await brought_to(stores, status, status)
            if "queued" in TRANSITIONS[status]:
                after = await stores.runs.requeue(run.id, run.epoch)
                cleared = {"ended_ms": None, "stop_reason": None, "error": None, "output": None}
                assert after == run._replace(status="queued", **cleared), status  # type: ignore[arg-type]
                taken = await stores.runs.claim("v", now_ms=9_000, lease_ms=1, run_id=run.id)
                assert taken is not None
                assert (taken.epoch, taken.started_ms) == (2, 1_000)
            elif status != "queued":
                with raises(Conflict):
                    await stores.runs.requeue(run.id, run.epoch)
                assert await stores.runs.get(run.id) == run

    @fresh
    async def test_a_requeued_run_has_no_result_and_may_have_other_limits(self, stores: StoreBundle) -> None:
        await claimed(stores, limits={"max_steps": 1})
        why = {"stop_reason": "step_limit_exceeded", "error": "1 of 1 steps", "output": "half"}
        await stores.runs.update("r", 1, status="halted", ended_ms=2_000, cost_nanos=7, **why)
        run = await stores.runs.requeue("r", 1, limits={"max_steps": 2})
        assert (run.limits, run.cost_nanos, run.status) == ({"max_steps": 2}, 7, "queued")
        assert (run.stop_reason, run.error, run.output, run.ended_ms) == (None, None, None, None)
        assert await stores.runs.get("r") == run

    @fresh
    async def test_a_run_is_requeued_only_from_the_expected_status(self, stores: StoreBundle) -> None:
        await brought_to(stores, "parked")
        run = await stores.runs.end("r", "cancelled", now_ms=2_000)
        for was in ("parked", "halted", "failed"):
            with raises(Conflict):
                await stores.runs.requeue("r", 1, was=was)
        assert await stores.runs.get("r") == run
        queued = await stores.runs.requeue("r", 1, was="cancelled")
        assert queued.status == "queued"
        assert await stores.runs.requeue("r", 1, was="cancelled") == queued

    @fresh
    async def test_the_usage_of_a_run_is_replaced_only_while_no_worker_counts_it(self, stores: StoreBundle) -> None:
        usage: dict[str, Any] = {"cost_nanos": 7, "tokens_in": 1, "tokens_out": 2}
        usage |= {"unresolved_nanos": 0, "unknown_costs": 3}
        for status in TRANSITIONS:
            run = await brought_to(stores, status, status)
            if status in ENDED | PARKED:
                after = await stores.runs.set_usage(run.id, run.epoch, **usage)
                assert after == run._replace(**usage)
                assert await stores.runs.set_usage(run.id, run.epoch, **usage) == after
            else:
                with raises(Conflict):
                    await stores.runs.set_usage(run.id, run.epoch, **usage)
                after = run
            with raises(Fenced):
                await stores.runs.set_usage(run.id, run.epoch + 1, cost_nanos=9)
            assert await stores.runs.get(run.id) == after
        wrong: list[dict[str, Any]] = [{"status": "queued"}, {"cost_nanos": -1}, {"cost_nanos": 0.5}, {"output": 1}]
        for changes in wrong:
            with raises(InvalidValue):
                await stores.runs.set_usage("halted", 1, **changes)
        with raises(KeyError):
            await stores.runs.set_usage("missing", 0, cost_nanos=1)

    @fresh
    async def test_requeuing_is_idempotent(self, stores: StoreBundle) -> None:
        await brought_to(stores, "parked")
        run = await stores.runs.requeue("r", 1, limits={"max_steps": 2})
        assert await stores.runs.requeue("r", 1, limits={"max_steps": 2}) == run
        assert await stores.runs.requeue("r", 1) == run
        with raises(Conflict):
            await stores.runs.requeue("r", 1, limits={"max_steps": 3})
        for limits in NOT_OBJECTS[:-1]:
            with raises(InvalidValue):
                await stores.runs.requeue("r", 1, limits=limits)
        assert await stores.runs.get("r") == run

    @fresh
    async def test_a_run_that_was_claimed_since_is_not_requeued_under_its_old_epoch(self, stores: StoreBundle) -> None:
        await brought_to(stores, "halted")
        await stores.runs.requeue("r", 1, limits={"max_steps": 2})
        for status in ("running", "halted"):
            if status == "running":
                await stores.runs.claim("v", now_ms=9_000, lease_ms=1, run_id="r")
            else:
                await stores.runs.update("r", 2, status=status, ended_ms=9_001)
            run = await stores.runs.get("r")
            for epoch, limits in ((1, {"max_steps": 1}), (1, {"max_steps": 2}), (1, None), (0, None), (3, None)):
                with raises(Fenced):
                    await stores.runs.requeue("r", epoch, limits=limits)
            assert await stores.runs.get("r") == run
        assert (await stores.runs.requeue("r", 2)).limits == {"max_steps": 2}

    @fresh
    async def test_ending_an_unclaimed_run_follows_the_transition_table(self, stores: StoreBundle) -> None:
        for status in TRANSITIONS:
            for target in ENDED:
                run = await brought_to(stores, status, f"{status} to {target}")
                if status not in CLAIMED and target in TRANSITIONS[status]:
                    after = await stores.runs.end(run.id, target, now_ms=5_000, stop_reason="aborted", error="by ann")
                    result = {"stop_reason": "aborted", "error": "by ann"}
                    assert after == run._replace(status=target, ended_ms=5_000, **result), run.id  # type: ignore[arg-type]
                else:
                    with raises(Conflict):
                        await stores.runs.end(run.id, target, now_ms=5_000)
                    assert await stores.runs.get(run.id) == run, run.id

    @fresh
    async def test_ending_a_run_is_idempotent(self, stores: StoreBundle) -> None:
        await stores.runs.add(a_run())
        run = await stores.runs.end("r", "cancelled", now_ms=5_000, error="by ann")
        assert await stores.runs.end("r", "cancelled", now_ms=5_000, error="by ann") == run
        for now_ms, error in ((5_001, "by ann"), (5_000, "by bob")):
            with raises(Conflict):
                await stores.runs.end("r", "cancelled", now_ms=now_ms, error=error)
        for status in ("queued", "running", "parked", "lost"):
            with raises(InvalidValue):
                await stores.runs.end("r", status, now_ms=5_000)  # type: ignore[arg-type]
        for change in ({"worker": "v"}, {"owner": "bob"}, {"output": float("nan")}, {"error": 5}, {"cost_nanos": None}):
            with raises(InvalidValue):
                await stores.runs.end("r", "cancelled", now_ms=5_000, **change)
        assert await stores.runs.get("r") == run

    @fresh
    async def test_of_a_concurrent_claim_and_end_one_takes_effect(self, stores: StoreBundle) -> None:
        async def end(id: str) -> RunStatus | None:
            try:
                return (await stores.runs.end(id, "cancelled", now_ms=1)).status
            except Conflict:
                return None

        for number in range(10):
            id = f"r{number}"
            await stores.runs.add(a_run(id))
            claim, ended = await asyncio.gather(stores.runs.claim("w", now_ms=1, lease_ms=9, run_id=id), end(id))
            assert (claim is None) != (ended is None)

    @fresh
    async def test_an_unknown_run_cannot_be_changed(self, stores: StoreBundle) -> None:
        with raises(KeyError):
            await stores.runs.update("unknown", 0, tokens_in=1)
        with raises(KeyError):
            await stores.runs.requeue("unknown", 0)
        with raises(KeyError):
            await stores.runs.end("unknown", "cancelled", now_ms=1)

    @fresh
    async def test_old_runs_are_removed_with_all_their_data(self, stores: StoreBundle) -> None:
        for id, ended_ms in (("old", 2_000), ("older", 1_999), ("young", 3_000)):
            await claimed(stores, id)
            await stores.events.append(id, 1, [an_event(1)])
            await stores.journal.append(id, [an_entry("k")], epoch=1)
            await stores.approvals.ask(an_approval(f"a {id}", run_id=id), epoch=1)
            await stores.cancels.put(a_cancel_request(id))
            await stores.runs.update(id, 1, status="failed", ended_ms=ended_ms)
        for status in ("queued", "parked", *CLAIMED):
            await brought_to(stores, status, status)
        assert list(await stores.runs.remove_ended(3_000)) == ["older", "old"]
        assert list(await stores.runs.remove_ended(3_000)) == []
        assert {run.id for run in await stores.runs.list()} == {"young", "queued", "parked", *CLAIMED}
        for id, is_left in (("old", False), ("young", True)):
            assert (await stores.runs.get(id) is not None) is is_left
            assert await stores.events.last_seq(id) == int(is_left)
            assert len(await stores.events.read(id)) == len(await stores.journal.load(id)) == int(is_left)
            assert (await stores.approvals.get(f"a {id}") is not None) is is_left
            assert len(await stores.approvals.list(run_id=id)) == int(is_left)
        assert set(await stores.cancels.find({"old": "ann"}, now_ms=100)) == {"old"}, "it has a time of its own"

    @fresh
    async def test_runs_are_removed_longest_ended_first_a_page_at_a_time(self, stores: StoreBundle) -> None:
        for number in range(5):
            await claimed(stores, f"r{number}")
            await stores.runs.update(f"r{number}", 1, status="completed", ended_ms=100 - number)
        assert list(await stores.runs.remove_ended(1_000, limit=2)) == ["r4", "r3"]
        assert list(await stores.runs.remove_ended(1_000, limit=0)) == []
        assert list(await stores.runs.remove_ended(1_000, limit=100)) == ["r2", "r1", "r0"]

    @fresh
    async def test_an_ended_run_is_removed_with_all_its_data(self, stores: StoreBundle) -> None:
        for id in ("one", "other"):
            await claimed(stores, id)
            await stores.events.append(id, 1, [an_event(1)])
            await stores.journal.append(id, [an_entry("k")], epoch=1)
            await stores.approvals.ask(an_approval(f"a {id}", run_id=id), epoch=1)
            await stores.runs.update(id, 1, status="halted", ended_ms=2_000)
        for status in ("queued", "parked", *CLAIMED):
            await brought_to(stores, status, status)
            with raises(Conflict):
                await stores.runs.remove(status)
        for id in ("one", "one", "unknown"):
            await stores.runs.remove(id)
        assert {run.id for run in await stores.runs.list()} == {"other", "queued", "parked", *CLAIMED}
        assert await stores.approvals.get("a one") is None
        assert (await stores.events.last_seq("one"), await stores.events.last_seq("other")) == (0, 1)
        assert (len(await stores.journal.load("one")), len(await stores.journal.load("other"))) == (0, 1)

    @fresh
    async def test_the_id_of_a_removed_run_can_be_used_again(self, stores: StoreBundle) -> None:
        await claimed(stores)
        await stores.events.append("r", 1, [an_event(1)])
        await stores.runs.update("r", 1, status="completed", ended_ms=2_000)
        await stores.runs.remove_ended(9_000)
        run = (await stores.runs.add(a_run(owner="bob"))).run
        assert (run.epoch, run.owner) == (0, "bob")
        await stores.events.append("r", 0, [an_event(1, new=True)])
        assert [event.data for event in await stores.events.read("r")] == [{"new": True}]


async def refused(stores: StoreBundle, run: RunRecord) -> RunIdConflict:
    """Add the run and return the conflict it raises."""
    try:
        await stores.runs.add(run)
    except RunIdConflict as error:
        return error
    raise AssertionError(f"{run} was taken on")
