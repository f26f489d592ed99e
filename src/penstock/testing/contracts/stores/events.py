"""The contract of every `EventStore` and every `JournalStore`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.errors import InvalidValue
from penstock.hosting.ports import Conflict, Fenced, HostedEvent
from penstock.runtime.durable.ports import JournalEntry
from penstock.testing.contracts.stores.suite import (
    LONG_S,
    NOT_JSON,
    NOT_NAMES,
    NOT_OBJECTS,
    ODD_NAMES,
    ODD_VALUES,
    SOON_S,
    StoreBundle,
    StoreContract,
    a_run,
    an_entry,
    an_event,
    claimed,
    fresh,
    let_others_run,
    raises,
)


class EventStoreContract(StoreContract):
    """Events by run: in order, without gaps, written by the claim holder; and waiting for the next."""

    @fresh
    async def test_events_are_read_back_in_order_and_unchanged(self, stores: StoreBundle) -> None:
        await claimed(stores)
        events = [HostedEvent(1, 5, "run.started", {"epoch": 1}), HostedEvent(2, 4, "x", {"b": 1, "a": [None]})]
        await stores.events.append("r", 1, events)
        await stores.events.append("r", 1, [an_event(3), an_event(4)])
        assert list(await stores.events.read("r")) == [*events, an_event(3), an_event(4)]
        assert await stores.events.last_seq("r") == 4

    @fresh
    async def test_a_run_without_events_has_none(self, stores: StoreBundle) -> None:
        await stores.runs.add(a_run())
        for run_id in ("r", "unknown", "", *NOT_NAMES):
            assert list(await stores.events.read(run_id)) == []
            assert await stores.events.last_seq(run_id) == 0
            for after_seq in (0, -1, 5):
                assert list(await stores.events.read(run_id, after_seq)) == []
                assert await stores.events.wait(run_id, after_seq, 0) is False

    @fresh
    async def test_odd_values_of_events_are_read_back_exactly(self, stores: StoreBundle) -> None:
        await claimed(stores)
        events = [an_event(number, value=value) for number, value in enumerate(ODD_VALUES, 1)]
        await stores.events.append("r", 1, events)
        assert [repr(event) for event in await stores.events.read("r")] == [repr(event) for event in events]

    @fresh
    async def test_a_batch_with_an_event_that_cannot_be_stored_is_refused(self, stores: StoreBundle) -> None:
        await claimed(stores)
        wrong = [an_event(2, value=value) for value in NOT_JSON]
        wrong += [HostedEvent(2, 1, name) for name in NOT_NAMES]
        wrong += [HostedEvent(2, 1, "x", data) for data in NOT_OBJECTS]
        wrong += [HostedEvent(2, at_ms, "x") for at_ms in (2**63, 1.5, "1")]  # type: ignore[arg-type]
        for event in wrong:
            with raises(InvalidValue):
                await stores.events.append("r", 1, [an_event(1), event])
        assert await stores.events.last_seq("r") == 0

    @fresh
    async def test_a_page_begins_after_the_given_seq(self, stores: StoreBundle) -> None:
        await claimed(stores)
        await stores.events.append("r", 1, [an_event(seq) for seq in range(1, 2_501)])
        cases = {
            (0, 3): [1, 2, 3],
            (-7, 2): [1, 2],
            (2, 2): [3, 4],
            (2_499, 9): [2_500],
            (2_500, 9): [],
            (9_999, 9): [],
            (0, 0): [],
        }
        for (after, limit), seqs in cases.items():
            assert [event.seq for event in await stores.events.read("r", after, limit)] == seqs
        assert [event.seq for event in await stores.events.read("r")] == [*range(1, 1_001)]
        assert [event.seq for event in await stores.events.read("r", 5, 10_000)] == [*range(6, 2_501)]
        with raises(InvalidValue):
            await stores.events.read("r", 0, -1)

    @fresh
    async def test_a_page_of_some_types_has_no_other_events(self, stores: StoreBundle) -> None:
        await claimed(stores)
        events = [HostedEvent(seq, 1, f"{'abc'[seq % 3]}.x", {"n": seq}) for seq in range(1, 301)]
        await stores.events.append("r", 1, events)
        cases = {
            (0, 3, ("a.x",)): [3, 6, 9],
            (6, 2, ("a.x",)): [9, 12],
            (0, 4, ("b.x", "a.x")): [1, 3, 4, 6],
            (290, 99, ("c.x", "unknown")): [293, 296, 299],
            (0, 99, ("unknown", "", "a", "A.X", "\0", "a.x' OR ''='")): [],
            (0, 0, ("a.x",)): [],
        }
        for (after, limit, types), seqs in cases.items():
            found = await stores.events.read("r", after, limit, types)
            assert [(event.seq, event.data) for event in found] == [(seq, {"n": seq}) for seq in seqs]
        assert list(await stores.events.read("r", 0, 1_000, ("a.x", "b.x", "c.x"))) == events
        assert list(await stores.events.read("unknown", 0, 9, ("a.x",))) == []

    @fresh
    async def test_events_already_stored_are_skipped(self, stores: StoreBundle) -> None:
        await claimed(stores)
        events = [an_event(seq, b=1, a=2) for seq in range(1, 6)]
        await stores.events.append("r", 1, events[:3])
        await stores.events.append("r", 1, events[:3])
        await stores.events.append("r", 1, events[1:2])
        await stores.events.append("r", 1, events[1:])
        await stores.events.append("r", 1, [])
        assert list(await stores.events.read("r")) == events

    @fresh
    async def test_a_different_event_with_the_same_seq_is_a_conflict(self, stores: StoreBundle) -> None:
        await claimed(stores)
        await stores.events.append("r", 1, [an_event(1), an_event(2, by="one")])
        for other in (an_event(2, by="another"), an_event(2), HostedEvent(2, 9, "node.started", {"by": "one"})):
            with raises(Conflict):
                await stores.events.append("r", 1, [other, an_event(3)])
        assert list(await stores.events.read("r")) == [an_event(1), an_event(2, by="one")]

    @fresh
    async def test_a_gap_is_a_conflict_and_nothing_is_stored(self, stores: StoreBundle) -> None:
        await claimed(stores)
        await stores.events.append("r", 1, [an_event(1)])
        for seqs in ((3,), (2, 4), (2, 2), (3, 2), (1, 3), (0,), (-1,), (0, 1), (2, 3, 5)):
            with raises((Conflict, InvalidValue)):
                await stores.events.append("r", 1, [an_event(seq) for seq in seqs])
        assert list(await stores.events.read("r")) == [an_event(1)]

    @fresh
    async def test_a_fenced_worker_appends_no_events(self, stores: StoreBundle) -> None:
        await claimed(stores)
        await stores.events.append("r", 1, [an_event(1)])
        await stores.runs.claim("v", now_ms=9_000, lease_ms=1)
        for epoch in (0, 1, 3):
            with raises(Fenced):
                await stores.events.append("r", epoch, [an_event(2)])
            with raises(Fenced):
                await stores.events.append("r", epoch, [an_event(1)])
        await stores.events.append("r", 2, [an_event(2)])
        assert await stores.events.last_seq("r") == 2

    @fresh
    async def test_the_epoch_is_checked_for_empty_batches_and_after_the_end(self, stores: StoreBundle) -> None:
        await stores.runs.add(a_run())
        await stores.events.append("r", 0, [an_event(1)])
        await stores.runs.claim("w", now_ms=1, lease_ms=1)
        await stores.runs.update("r", 1, status="completed", ended_ms=2)
        await stores.events.append("r", 1, [an_event(2)])
        with raises(Fenced):
            await stores.events.append("r", 0, [an_event(3)])
        assert await stores.events.last_seq("r") == 2

    @fresh
    async def test_an_unknown_run_has_epoch_0(self, stores: StoreBundle) -> None:
        with raises(Fenced):
            await stores.events.append("unknown", 1, [an_event(1)])
        assert await stores.events.last_seq("unknown") == 0

    @fresh
    async def test_runs_do_not_see_each_others_events(self, stores: StoreBundle) -> None:
        for name in ODD_NAMES:
            await claimed(stores, name)
            await stores.events.append(name, 1, [an_event(1, of=name)])
        for name in ODD_NAMES:
            assert list(await stores.events.read(name)) == [an_event(1, of=name)]

    @fresh
    async def test_of_concurrent_appends_at_one_seq_one_succeeds(self, stores: StoreBundle) -> None:
        await claimed(stores)
        async with self.another(stores) as other:
            both = (stores, other)

            async def append(number: int) -> bool:
                try:
                    await both[number % 2].events.append("r", 1, [an_event(1, by=number), an_event(2, by=number)])
                except Conflict:
                    return False
                return True

            wrote = await asyncio.gather(*map(append, range(self.claimants)))
        assert sum(wrote) == 1
        by = wrote.index(True)
        assert list(await stores.events.read("r")) == [an_event(1, by=by), an_event(2, by=by)]

    @fresh
    async def test_waiting_ends_with_the_next_event(self, stores: StoreBundle) -> None:
        await claimed(stores)
        async with self.another(stores) as other:
            for seq, writer in ((1, stores), (2, other), (3, stores)):
                waits = [
                    asyncio.ensure_future(bundle.events.wait("r", seq - 1, LONG_S)) for bundle in (stores, other) * 3
                ]
                await let_others_run()
                await writer.events.append("r", 1, [an_event(seq)])
                assert await asyncio.gather(*waits) == [True] * 6

    @fresh
    async def test_waiting_for_a_stored_event_returns_immediately(self, stores: StoreBundle) -> None:
        await claimed(stores)
        await stores.events.append("r", 1, [an_event(1), an_event(2)])
        for timeout_s in (0, -1, SOON_S, LONG_S, float("inf")):
            assert await stores.events.wait("r", 1, timeout_s) is True
        with raises(InvalidValue):
            await stores.events.wait("r", 1, float("nan"))

    @fresh
    async def test_waiting_for_an_event_times_out(self, stores: StoreBundle) -> None:
        await claimed(stores)
        await claimed(stores, "other")
        await stores.events.append("other", 1, [an_event(1)])
        for timeout_s in (SOON_S, 0, -1):
            assert await stores.events.wait("r", 0, timeout_s) is False
        waiting = asyncio.ensure_future(stores.events.wait("r", 5, SOON_S))
        await let_others_run()
        await stores.events.append("r", 1, [an_event(1)])
        assert await waiting is False, "it waits for the sixth"

    @fresh
    async def test_a_cancelled_wait_for_an_event_leaves_the_others_waiting(self, stores: StoreBundle) -> None:
        await claimed(stores)
        waits = [asyncio.ensure_future(stores.events.wait("r", 0, LONG_S)) for _ in range(3)]
        await let_others_run()
        waits[1].cancel()
        await asyncio.wait([waits[1]])
        assert waits[1].cancelled()
        await stores.events.append("r", 1, [an_event(1)])
        assert [await waits[0], await waits[2]] == [True, True]


class JournalStoreContract(StoreContract):
    """Entries by run and key: written once, all or none, by the claim holder."""

    @fresh
    async def test_entries_are_read_back_in_the_order_they_were_written(self, stores: StoreBundle) -> None:
        whole = JournalEntry("n/1", "llm", {"text": "hi"}, cost_nanos=2**63 - 1, tokens_in=1, tokens_out=2, at_ms=3)
        await stores.journal.append("r", [whole, an_entry("b")])
        await stores.journal.append("r", [an_entry("a")])
        assert list(await stores.journal.load("r")) == [whole, an_entry("b"), an_entry("a")]
        assert list(await stores.journal.load("unknown")) == []

    @fresh
    async def test_a_key_is_written_once(self, stores: StoreBundle) -> None:
        await stores.journal.append("r", [an_entry("k", "first"), an_entry("l", 1), an_entry("l", 2)])
        await stores.journal.append("r", [an_entry("k", "second"), an_entry("m", 3)])
        await stores.journal.append("r", [])
        found = [(entry.key, entry.value) for entry in await stores.journal.load("r")]
        assert found == [("k", "first"), ("l", 1), ("m", 3)]

    @fresh
    async def test_odd_values_and_keys_are_read_back_exactly(self, stores: StoreBundle) -> None:
        entries = [an_entry(f"v{number}", value) for number, value in enumerate(ODD_VALUES)]
        entries += [an_entry(name) for name in ODD_NAMES]
        await stores.journal.append("r", entries)
        assert [repr(entry) for entry in await stores.journal.load("r")] == [repr(entry) for entry in entries]

    @fresh
    async def test_entries_are_written_all_or_none(self, stores: StoreBundle) -> None:
        wrong = [an_entry("wrong", value) for value in NOT_JSON] + [an_entry(name) for name in NOT_NAMES]
        wrong += [an_entry("wrong", cost_nanos=cost) for cost in (2**63, 1.5, "1", None)]
        wrong += [JournalEntry("wrong", "other", 1)]  # type: ignore[arg-type]
        for entry in wrong:
            with raises(InvalidValue):
                await stores.journal.append("r", [an_entry("right"), entry])
        assert list(await stores.journal.load("r")) == []

    @fresh
    async def test_loaded_entries_are_copies(self, stores: StoreBundle) -> None:
        original = {"a": [1]}
        await stores.journal.append("r", [an_entry("k", original)])
        original["a"].append(2)
        (await stores.journal.load("r"))[0].value["a"].append(3)
        assert [entry.value for entry in await stores.journal.load("r")] == [{"a": [1]}]

    @fresh
    async def test_a_fenced_worker_appends_no_entries(self, stores: StoreBundle) -> None:
        await claimed(stores)
        await stores.journal.append("r", [an_entry("first")], epoch=1)
        await stores.runs.claim("v", now_ms=9_000, lease_ms=1)
        for epoch in (0, 1, 3):
            with raises(Fenced):
                await stores.journal.append("r", [an_entry("late")], epoch=epoch)
            with raises(Fenced):
                await stores.journal.append("r", [an_entry("first")], epoch=epoch)
        await stores.journal.append("r", [an_entry("second")], epoch=2)
        assert [entry.key for entry in await stores.journal.load("r")] == ["first", "second"]

    @fresh
    async def test_entries_can_be_shortened(self, stores: StoreBundle) -> None:
        long = [an_entry("n", "whole"), an_entry("n/llm", "x" * 1_000, cost_nanos=7), an_entry("m")]
        await stores.journal.append("r", long)
        short = [an_entry("n/llm", None, cost_nanos=7), an_entry("gone")]
        await stores.journal.shorten("r", short)
        await stores.journal.shorten("r", short)
        await stores.journal.shorten("unknown", short)
        assert list(await stores.journal.load("r")) == [long[0], short[0], long[2]]
        assert list(await stores.journal.load("unknown")) == []

    @fresh
    async def test_a_fenced_worker_shortens_no_entries(self, stores: StoreBundle) -> None:
        await claimed(stores)
        await stores.journal.append("r", [an_entry("k", "whole")], epoch=1)
        for epoch in (0, 2):
            with raises(Fenced):
                await stores.journal.shorten("r", [an_entry("k", "short")], epoch=epoch)
        assert list(await stores.journal.load("r")) == [an_entry("k", "whole")]

    @fresh
    async def test_an_unclaimed_run_is_written_under_epoch_0(self, stores: StoreBundle) -> None:
        await stores.journal.append("not hosted", [an_entry("k")])
        with raises(Fenced):
            await stores.journal.append("not hosted", [an_entry("l")], epoch=1)
        await stores.runs.add(a_run())
        await stores.journal.append("r", [an_entry("k")], epoch=0)
        assert [entry.key for entry in await stores.journal.load("not hosted")] == ["k"]
        assert [entry.key for entry in await stores.journal.load("r")] == ["k"]

    @fresh
    async def test_a_journal_can_be_removed(self, stores: StoreBundle) -> None:
        for run_id in ("r", "s"):
            await stores.journal.append(run_id, [an_entry("k")])
        await stores.journal.forget("r")
        await stores.journal.forget("r")
        await stores.journal.forget("unknown")
        assert list(await stores.journal.load("r")) == []
        assert len(await stores.journal.load("s")) == 1
        await stores.journal.append("r", [an_entry("k", "anew")])
        assert [entry.value for entry in await stores.journal.load("r")] == ["anew"]

    @fresh
    async def test_concurrent_appends_store_each_key_once(self, stores: StoreBundle) -> None:
        async with self.another(stores) as other:
            both = (stores, other)
            entries = [
                [an_entry("all", number), an_entry(f"k{number:02d}", number)] for number in range(self.claimants)
            ]
            await asyncio.gather(*(both[number % 2].journal.append("r", two) for number, two in enumerate(entries)))
        found: Sequence[JournalEntry] = await stores.journal.load("r")
        assert sorted(entry.key for entry in found) == ["all", *(f"k{number:02d}" for number in range(self.claimants))]

    @fresh
    async def test_a_cancelled_append_has_written_all_or_none(self, stores: StoreBundle) -> None:
        pairs = [[an_entry(f"a{number}"), an_entry(f"b{number}")] for number in range(10)]
        appends = [asyncio.ensure_future(stores.journal.append("r", pair)) for pair in pairs]
        for number, append in enumerate(appends):
            await let_others_run(number)
            append.cancel()
        await asyncio.wait(appends)
        keys = {entry.key for entry in await stores.journal.load("r")}
        for number, append in enumerate(appends):
            assert (f"a{number}" in keys) == (f"b{number}" in keys)
            assert f"a{number}" in keys or append.cancelled(), "what was answered is there"
        for pair in pairs:
            await stores.journal.append("r", pair)
        assert len(await stores.journal.load("r")) == 20

    @fresh
    async def test_a_long_journal_is_read_back_whole(self, stores: StoreBundle) -> None:
        entries = [an_entry(f"k{number}", {"text": "x" * 100}) for number in range(3_000)]
        await stores.journal.append("r", entries)
        assert list(await stores.journal.load("r")) == entries
