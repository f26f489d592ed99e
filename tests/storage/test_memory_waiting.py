"""A waiter at a store in memory is woken the moment it happens, in every order, and leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from penstock.hosting.ports import ApprovalRecord, HostedEvent, RunRecord
from penstock.notify import Notifier, wait_until
from penstock.storage.memory import MemoryStores
from penstock.testing import explore, sim_run


def now() -> float:
    return asyncio.get_running_loop().time()


async def hosted() -> MemoryStores:
    stores = MemoryStores()
    await stores.runs.add(RunRecord("r", "ann", "g", 1))
    await stores.approvals.ask(ApprovalRecord("a", "r", "ann", "k", "n", "Send it?"))
    return stores


async def tell(stores: MemoryStores) -> None:
    await stores.events.append("r", 0, [HostedEvent(1, 0, "run.queued")])


async def answer(stores: MemoryStores) -> None:
    await stores.approvals.answer("a", "approved", by="bob", now_ms=1)


async def withdraw(stores: MemoryStores) -> None:
    await stores.approvals.withdraw("r", 0, now_ms=1)


@pytest.mark.parametrize(
    ("wait", "happen"),
    [
        (lambda stores: stores.events.wait("r", 0, 60), tell),
        (lambda stores: stores.approvals.wait("a", 60), answer),
        (lambda stores: stores.approvals.wait("a", 60), withdraw),
    ],
)
def test_all_waiters_are_woken_immediately(
    wait: Callable[[MemoryStores], Awaitable[object]], happen: Callable[[MemoryStores], Awaitable[None]]
) -> None:
    async def main(seed: int) -> float:
        stores = await hosted()

        async def later() -> None:
            await asyncio.sleep(7)
            await happen(stores)

        found = await asyncio.gather(later(), *(wait(stores) for _ in range(5)))
        assert all(found[1:])
        return now()

    assert set(explore(main, schedules=30)) == {7.0}


def test_waiters_are_not_woken_by_events_of_other_runs() -> None:
    async def main() -> float:
        stores = await hosted()
        await stores.runs.add(RunRecord("s", "ann", "g", 1))
        waiting = asyncio.ensure_future(stores.events.wait("r", 0, 60))
        await asyncio.sleep(1)
        await stores.events.append("s", 0, [HostedEvent(1, 0, "run.queued")])
        assert await waiting is False
        return now()

    assert sim_run(main, seed=0) == 60


def test_an_event_exactly_at_the_timeout_is_seen_or_too_late() -> None:
    async def main(seed: int) -> bool:
        stores = await hosted()

        async def later() -> None:
            await asyncio.sleep(60)
            await tell(stores)

        _, found = await asyncio.gather(later(), stores.events.wait("r", 0, 60))
        assert await stores.events.wait("r", 0, 60) is True
        return found

    assert set(explore(main, schedules=60)) == {True, False}


def test_an_unlimited_wait_ends_with_the_event() -> None:
    async def main() -> bool:
        stores = await hosted()
        waiting = asyncio.ensure_future(stores.events.wait("r", 0, float("inf")))
        await asyncio.sleep(86_400)
        await tell(stores)
        return await waiting

    assert sim_run(main, seed=0)


def test_an_approval_removed_during_a_wait_is_a_key_error() -> None:
    async def main() -> float:
        stores = await hosted()
        waiting = asyncio.ensure_future(stores.approvals.wait("a", 60))
        await asyncio.sleep(1)
        await stores.runs.end("r", "cancelled", now_ms=1)
        await stores.runs.remove_ended(2)
        with pytest.raises(KeyError, match="no approval 'a'"):
            await waiting
        return now()

    assert sim_run(main, seed=0) == 1


def test_no_waiter_is_left_after_a_wake_up_timeout_or_cancel() -> None:
    async def main(seed: int) -> None:
        notifier, happened = Notifier(), False

        async def happen() -> None:
            nonlocal happened
            await asyncio.sleep(2)
            happened = True
            notifier.notify("k")

        waits = [
            asyncio.ensure_future(wait_until(notifier, "k", lambda: happened, timeout_s))
            for timeout_s in (1, 3, 5, 7, 9)
        ]
        await asyncio.sleep(1)
        waits[3].cancel()
        await asyncio.gather(happen(), *waits, return_exceptions=True)
        assert waits[3].cancelled()
        assert [wait.result() for wait in (waits[0], waits[2], waits[4])] == [False, True, True]
        assert not notifier.has_waiters

    explore(main, schedules=40)


async def test_stores_are_closed_by_their_context_manager() -> None:
    async with MemoryStores() as stores:
        assert stores.url == "memory:"
        await stores.runs.add(RunRecord("r", "ann", "g", 1))
    await stores.close()
