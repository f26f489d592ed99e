"""The contract of every bundle of stores for transactions over several of them."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.hosting.ports import UNTIL_ENDED, Conflict, Fenced, RunIdConflict
from penstock.testing.contracts.stores.faults import contents
from penstock.testing.contracts.stores.suite import (
    LONG_S,
    StoreBundle,
    StoreContract,
    a_cancel_request,
    a_chat,
    a_message,
    a_run,
    an_approval,
    an_attachment,
    an_entry,
    an_event,
    claimed,
    fresh,
    let_others_run,
    raises,
)


class Abandoned(Exception):
    """Raised by a transaction body that is to be rolled back."""


class TransactionContract(StoreContract):
    """A transaction is committed as a whole, or has no effect."""

    @fresh
    async def test_a_transaction_commits_its_changes_in_every_store(self, stores: StoreBundle) -> None:
        async def unit(inside: Any) -> str:
            await inside.chats.create(a_chat())
            await inside.chats.add_messages("c", [a_message("q")], now_ms=2)
            await inside.runs.add(a_run())
            run = await inside.runs.claim("w", now_ms=1_000, lease_ms=100, run_id="r")
            await inside.events.append("r", run.epoch, [an_event(1)])
            await inside.journal.append("r", [an_entry("k", 1)], epoch=run.epoch)
            return "done"

        assert await stores.transaction(unit, inline=True) == "done"
        run = await stores.runs.get("r")
        assert run is not None
        assert (run.status, run.worker, run.epoch) == ("running", "w", 1)
        assert list(await stores.events.read("r")) == [an_event(1)]
        assert [entry.key for entry in await stores.journal.load("r")] == ["k"]
        assert [message.id for message in (await stores.chats.messages("c"))[0]] == ["q"]

    @fresh
    async def test_a_transaction_reads_its_own_writes(self, stores: StoreBundle) -> None:
        async def unit(inside: Any) -> tuple[Any, int]:
            await claimed(inside)
            await inside.events.append("r", 1, [an_event(1)])
            return await inside.runs.get("r"), await inside.events.last_seq("r")

        run, last = await stores.transaction(unit)
        assert (run.status, last) == ("running", 1)

    @fresh
    async def test_a_transaction_that_raises_changes_nothing(self, stores: StoreBundle) -> None:
        await something_of_each(stores)
        before = await contents(stores)
        for unit in (changed_everything, removed_everything):
            for inline in (True, False):
                with raises(Abandoned):
                    await stores.transaction(unit, inline=inline)
                assert await contents(stores) == before
        await stores.chats.remove("d")
        assert await stores.chats.attachment("g") is None, "the uses were undone too: the last chat takes it along"

    @fresh
    async def test_a_refusal_in_the_middle_rolls_back_earlier_changes(self, stores: StoreBundle) -> None:
        await stores.runs.add(a_run(owner="bob"))

        async def unit(inside: Any) -> None:
            await inside.chats.create(a_chat())
            await inside.chats.add_messages("c", [a_message("q")], now_ms=2)
            await inside.runs.add(a_run())

        with raises(RunIdConflict):
            await stores.transaction(unit, inline=True)
        assert await stores.chats.get("c") is None
        assert (await stores.chats.messages("c"))[0] == []

    @fresh
    async def test_a_refusal_that_the_unit_handles_rolls_back_nothing(self, stores: StoreBundle) -> None:
        await claimed(stores)

        async def unit(inside: Any) -> None:
            await inside.events.append("r", 1, [an_event(1)])
            with raises(Fenced):
                await inside.events.append("r", 2, [an_event(2)])
            with raises(Conflict):
                await inside.events.append("r", 1, [an_event(5)])
            await inside.events.append("r", 1, [an_event(2)])

        await stores.transaction(unit)
        assert await stores.events.last_seq("r") == 2

    @fresh
    async def test_waiters_are_woken_by_the_commit(self, stores: StoreBundle) -> None:
        await claimed(stores)
        waiting = asyncio.create_task(stores.events.wait("r", 0, LONG_S))
        await let_others_run()

        async def unit(inside: Any) -> None:
            await inside.events.append("r", 1, [an_event(1)])

        await stores.transaction(unit, inline=True)
        assert await asyncio.wait_for(waiting, LONG_S)

    @fresh
    async def test_concurrent_transactions_are_committed_whole_or_not_at_all(self, stores: StoreBundle) -> None:
        await stores.chats.create(a_chat())
        async with self.another(stores) as other:

            def adding(number: int) -> Any:
                async def unit(inside: Any) -> None:
                    await inside.chats.add_messages("c", [a_message(f"m{number}")], now_ms=number)
                    await inside.runs.add(a_run(f"r{number}"))
                    if number % 3 == 0:
                        raise Abandoned

                return unit

            transactions = [(other if n % 2 else stores).transaction(adding(n), inline=n % 4 == 0) for n in range(24)]
            answers = await asyncio.gather(*transactions, return_exceptions=True)
        assert [isinstance(answer, Abandoned) for answer in answers] == [number % 3 == 0 for number in range(24)]
        runs = {run.id.removeprefix("r") for run in await stores.runs.list()}
        messages = {message.id.removeprefix("m") for message in (await stores.chats.messages("c"))[0]}
        assert runs == messages == {str(number) for number in range(24) if number % 3}


async def something_of_each(stores: StoreBundle) -> None:
    """Add a record to every store, for a transaction to change."""
    for id in ("r", "s", "old"):
        run = await claimed(stores, id)
        await stores.events.append(id, run.epoch, [an_event(1)])
        await stores.journal.append(id, [an_entry("k", "v"), an_entry("l", 2)], epoch=run.epoch)
    await stores.runs.update("old", 1, status="halted", ended_ms=2_000)
    await stores.approvals.ask(an_approval("a"), epoch=1)
    await stores.cancels.put(a_cancel_request("r"))
    await stores.graphs.save("g", "ann", "G", {"n": 1}, now_ms=1)
    await stores.chats.create(a_chat())
    await stores.chats.attach(an_attachment(), b"abc")
    messages = [
        a_message("q", attachments=[{"id": "f"}]),
        a_message("1", "q"),
        a_message("2", "q", "", state="writing"),
    ]
    await stores.chats.add_messages("c", messages, now_ms=2)
    await stores.chats.mark("k", "c", "q")
    await stores.chats.create(a_chat("d"))
    await stores.chats.attach(an_attachment("g"), b"abc")
    await stores.chats.add_messages("d", [a_message("q", attachments=[{"id": "g"}])], now_ms=2)
    await stores.approvals.ask(an_approval("of old", run_id="old"), epoch=1)


async def removed_everything(inside: Any) -> None:
    """Remove the records in the stores, and fail."""
    await inside.cancels.drop("r")
    await inside.runs.remove("old")
    await inside.chats.remove("d")
    await inside.chats.detach("g")
    await inside.chats.detach("f")
    raise Abandoned


async def changed_everything(inside: Any) -> None:
    """Change something in every store, in every possible way, and fail."""
    await inside.runs.update("r", 1, status="completed", output=[1], ended_ms=2_000)
    await inside.runs.renew("w", ["s"], now_ms=1_050, lease_ms=100)
    await inside.runs.set_usage("old", 1, cost_nanos=7)
    await inside.runs.requeue("old", 1)
    await inside.runs.end("old", "cancelled", now_ms=9_000)
    await inside.runs.add(a_run("new"), [an_entry("k")])
    await inside.events.append("s", 1, [an_event(2), an_event(3)])
    await inside.journal.append("s", [an_entry("m", 3)], epoch=1)
    await inside.journal.shorten("s", [an_entry("k")], epoch=1)
    await inside.approvals.answer("a", "approved", by="bob", now_ms=2_000)
    await inside.approvals.ask(an_approval("b"), epoch=1)
    await inside.approvals.withdraw("r", 1, now_ms=3_000)
    await inside.cancels.put(a_cancel_request("r", until_ms=UNTIL_ENDED))
    await inside.cancels.put(a_cancel_request("s"))
    await inside.cancels.drop("r")
    await inside.graphs.save("g", "ann", "G", {"n": 2}, now_ms=2)
    await inside.graphs.save("h", "ann", "H", {}, now_ms=2)
    await inside.graphs.archive("g")
    await inside.chats.finish_message("c", "2", "hello", {"state": "complete"}, now_ms=4)
    await inside.chats.add_messages("c", [a_message("3", "2", attachments=[{"id": "f"}])], now_ms=5)
    await inside.chats.choose("c", "1")
    await inside.chats.rename("c", "title", now_ms=6)
    await inside.chats.create(a_chat("e"))
    await inside.chats.add_messages("e", [a_message("q", attachments=[{"id": "g"}])], now_ms=6)
    await inside.chats.mark("k", "e", "q")
    await inside.chats.attach(an_attachment("h"), b"abc")
    await inside.chats.remove("e")
    await inside.runs.remove_ended(10_000)
    raise Abandoned
