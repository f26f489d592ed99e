"""Turns that are refused for now: the client will retry, so nothing of the turn is kept."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from penstock.chat.conversation import ChatMessage, MessageTree
from penstock.chat.service import ChatService
from penstock.hosting.host import Overloaded, RunHost
from penstock.hosting.limits import HostSettings
from penstock.hosting.ports import INTERACTIVE_ATTEMPTS, Conflict, StoreUnavailable
from penstock.storage.memory import MemoryStores
from penstock.testing import explore
from tests.chat.chats import ANN, ECHOING, Chats, Echo, Histories, Slow, chatting, loop
from tests.nodes.graphs import registry
from tests.soak import scaled

SCHEDULES = scaled(30, soak=1_000)


@asynccontextmanager
async def full() -> AsyncIterator[Chats]:
    """A chat with a turn of which nothing is under way, on a host that takes on no more."""
    slow, histories = Slow("x"), Histories()
    models: dict[str, Any] = {"A": histories.model}
    settings = HostSettings(tick_s=0.05, drain_s=0, max_running=1, max_queued=1)
    async with chatting(models=models, settings=settings) as chats:
        await (await chats.service.stream_chat(chats.chat_id, "one", owner=ANN)).result()
        models["A"] = slow
        other = await chats.service.create_chat(owner=ANN, graph_id="g")
        first = await chats.service.stream_chat(other.id, "runs", owner=ANN)
        await slow.begun.wait()
        second = await chats.service.stream_chat(other.id, "waits", owner=ANN)
        yield chats
        slow.may_end.set()
        for turn in (first, second):
            await chats.host.wait(turn.run_id)


SAYING: dict[str, Callable[[Chats, MessageTree, str | None], Awaitable[Any]]] = {
    "say": lambda chats, tree, id: chats.service.stream_chat(chats.chat_id, "two", owner=ANN, run_id=id),
    "begin": lambda chats, tree, id: chats.service.stream_agent_chat("g", "two", owner=ANN, run_id=id),
    "continue": lambda chats, tree, id: chats.service.continue_message(
        chats.chat_id, tree.active_path()[1].id, owner=ANN, run_id=id
    ),
    "retry": lambda chats, tree, id: chats.service.retry_message(
        chats.chat_id, tree.active_path()[1].id, owner=ANN, run_id=id
    ),
    "edit": lambda chats, tree, id: chats.service.edit_user_message(
        chats.chat_id, tree.active_path()[0].id, "two", owner=ANN, run_id=id
    ),
}


async def everything(chats: Chats) -> Any:
    """All that is kept of ann's chats."""
    return [(chat, await chats.stores.chats.messages(chat.id)) for chat in await chats.stores.chats.list(owner=ANN)]


@pytest.mark.parametrize("run_id", [None, "mine"])
@pytest.mark.parametrize("way", SAYING)
async def test_a_turn_that_there_is_no_room_for_leaves_the_chat_as_it_was(way: str, run_id: str | None) -> None:
    async with full() as chats:
        tree, before = await chats.service.tree(chats.chat_id), await everything(chats)
        for _ in range(5):
            with pytest.raises(Overloaded, match="try again in"):
                await SAYING[way](chats, tree, run_id)
        assert await everything(chats) == before


async def test_a_turn_that_was_refused_for_want_of_room_is_taken_on_later_and_stored_once() -> None:
    async with full() as chats:
        with pytest.raises(Overloaded):
            await chats.service.stream_chat(chats.chat_id, "two", owner=ANN, run_id="mine")
        (waiting,) = await chats.stores.runs.list(statuses=("queued",))
        await chats.host.cancel(waiting.id)
        turn = await chats.service.stream_chat(chats.chat_id, "two", owner=ANN, run_id="mine")
        await turn.cancel()
        tree = await chats.service.tree(chats.chat_id)
        assert [one.content for one in tree] == ["one", "answer 1", "two", ""]


async def test_a_turn_that_was_interrupted_and_finds_no_room_stays_to_be_submitted_again() -> None:
    async with full() as chats:
        turn = chats.service._turn_request(None, "mine", ())
        unfinished = [
            ChatMessage(turn.user_id(), None, "user", "two", turn.at_ms, {"state": "complete", "attachments": []}),
            ChatMessage(turn.answer_id, turn.user_id(), "assistant", "", turn.at_ms, {"state": "writing"}),
        ]
        await chats.stores.chats.add_messages(chats.chat_id, unfinished, now_ms=turn.at_ms)
        before = await everything(chats)
        with pytest.raises(Overloaded):
            await chats.service.stream_chat(chats.chat_id, "two", owner=ANN, run_id="mine")
        assert await everything(chats) == before


async def test_a_place_is_kept_while_a_turn_is_being_added() -> None:
    slow, may_write, writes = Slow("x"), asyncio.Event(), asyncio.Event()
    settings = HostSettings(tick_s=0.05, drain_s=0, max_running=1, max_queued=1)
    stores: Any = MemoryStores()
    async with chatting(models={"A": slow}, settings=settings, stores=stores) as chats:
        first = await chats.service.stream_chat(chats.chat_id, "runs", owner=ANN)
        await slow.begun.wait()
        real = stores.transaction

        async def when_it_may(unit: Any, **options: Any) -> Any:
            if not writes.is_set():
                writes.set()
                await may_write.wait()
            return await real(unit, **options)

        stores.transaction = when_it_may
        waiting = asyncio.create_task(chats.service.stream_chat(chats.chat_id, "waits", owner=ANN))
        await writes.wait()
        for _ in range(3):
            with pytest.raises(Overloaded):
                await chats.service.stream_chat(chats.chat_id, "is refused", owner=ANN)
        with pytest.raises(Overloaded):
            await chats.host.submit(owner=ANN, graph_id="g", input="a run of no chat has no other queue")
        may_write.set()
        second = await waiting
        slow.may_end.set()
        await asyncio.gather(first.result(), second.result())
        assert [one.content for one in await chats.service.tree(chats.chat_id) if one.role == "user"] == [
            "runs",
            "waits",
        ]


async def test_a_caller_that_leaves_while_its_turn_is_added_gives_its_place_to_others() -> None:
    settings = HostSettings(tick_s=0.05, drain_s=0, max_queued=1)
    stores: Any = MemoryStores()
    async with chatting(models={"A": Histories().model}, settings=settings, stores=stores) as chats:
        real, writes = stores.transaction, asyncio.Event()

        async def never(unit: Any, **options: Any) -> None:
            writes.set()
            await asyncio.Event().wait()

        stores.transaction = never
        leaving = asyncio.create_task(chats.service.stream_chat(chats.chat_id, "one", owner=ANN))
        await writes.wait()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        stores.transaction = real
        await (await chats.service.stream_chat(chats.chat_id, "two", owner=ANN)).result()
        assert [one.content for one in await chats.service.tree(chats.chat_id)] == ["two", "answer 1"]


async def test_a_caller_that_leaves_when_its_turn_was_committed_is_answered_all_the_same() -> None:
    stores: Any = MemoryStores()
    async with chatting(models={"A": Histories().model}, stores=stores) as chats:
        real, committed = stores.transaction, asyncio.Event()

        async def slow_to_answer(unit: Any, **options: Any) -> Any:
            answer = await real(unit, **options)
            committed.set()
            await asyncio.sleep(0.01)
            return answer

        stores.transaction = slow_to_answer
        leaving = asyncio.create_task(chats.service.stream_chat(chats.chat_id, "one", owner=ANN, run_id="r"))
        await committed.wait()
        stores.transaction = real
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        run = await chats.stores.runs.get("r")
        assert run is not None
        assert run.status == "running", "the lost answer has claimed it for this host"
        assert (await chats.host.wait("r")).status == "completed"
        assert [one.content for one in await chats.service.tree(chats.chat_id)] == ["one", "answer 1"]


class Slowly:
    """Stores that take a while for every transaction, and of which some fail before they are done."""

    def __init__(self, stores: MemoryStores, rng: random.Random) -> None:
        self._stores = stores
        self._rng = rng

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stores, name)

    async def transaction(self, unit: Any, *, inline: bool = False) -> Any:
        await asyncio.sleep(self._rng.random() / 50)
        if self._rng.random() < 0.6:
            raise StoreUnavailable("the disk failed; ask again")
        answer = await self._stores.transaction(unit, inline=inline)
        await asyncio.sleep(self._rng.random() / 50)
        return answer


async def the_same_at_two_servers(seed: int) -> int:
    """Turns submitted to two servers at once, by run id, with room for one at a time; how many were refused."""
    kept, rng, texts = MemoryStores(clock=loop().clock), random.Random(seed), ("one", "two", "three")
    await kept.graphs.save("g", ANN, "g", ECHOING, now_ms=0)
    stores: Any = Slowly(kept, rng)
    settings = HostSettings(drain_s=0, max_running=1, max_queued=1)
    refused = 0

    async def ask(service: ChatService, text: str) -> None:
        nonlocal refused
        for _ in range(200):
            try:
                turn = await service.stream_chat("c", text, owner=ANN, run_id=text)
            except (Overloaded, Conflict, StoreUnavailable):
                refused += 1
                await asyncio.sleep(rng.random())
                continue
            assert (await turn.result()).content == f"answer to {text}"
            return
        raise AssertionError(f"{text!r} was never taken on")

    async with AsyncExitStack() as hosts:
        services = []
        for worker in "vw":
            options = {"executors": registry({"echo": Echo()}), "settings": settings, "clock": loop().clock}
            host = RunHost(stores, worker=worker, **options)
            services.append(ChatService(host, stores.chats, clock=loop().clock))
            await hosts.enter_async_context(host)
        await services[0].create_chat(owner=ANN, graph_id="g", chat_id="c")
        async with asyncio.TaskGroup() as group:
            for service in services:
                for text in texts:
                    group.create_task(ask(service, text))
    messages, _ = await kept.chats.messages("c")
    expected = sorted(pair for text in texts for pair in ((text, "complete"), (f"answer to {text}", "complete")))
    assert sorted((one.content, one.data["state"]) for one in messages) == expected
    return refused


@pytest.mark.reliability
def test_a_turn_retried_at_any_server_is_answered_once_and_stored_once() -> None:
    assert any(explore(the_same_at_two_servers, schedules=SCHEDULES)), "nothing was refused"


def fail(stores: Any, times: int, *, is_done: bool) -> None:
    """Have so many transactions fail, before or after they are committed."""
    real = stores.transaction

    async def failing(unit: Any, **options: Any) -> Any:
        nonlocal times
        times -= 1
        if times <= 0:
            stores.transaction = real
        if is_done:
            await real(unit, **options)
        raise StoreUnavailable("the disk failed; ask again")

    stores.transaction = failing


@pytest.mark.parametrize("way", SAYING)
async def test_a_turn_that_the_stores_could_not_take_leaves_the_chat_as_it_was(way: str) -> None:
    stores: Any = MemoryStores()
    async with chatting(models={"A": Histories().model}, stores=stores) as chats:
        for text in ("one", "first retry", "second retry"):
            await (await chats.service.stream_chat(chats.chat_id, text, owner=ANN)).result()
        tree = await chats.service.tree(chats.chat_id)
        await (await chats.service.edit_user_message(chats.chat_id, tree.active_path()[0].id, "1", owner=ANN)).result()
        tree = await chats.service.switch(chats.chat_id, tree.active_path()[0].id)
        before = await everything(chats)
        for _ in range(3):
            fail(stores, INTERACTIVE_ATTEMPTS, is_done=False)
            with pytest.raises(StoreUnavailable):
                await SAYING[way](chats, tree, None)
        assert await everything(chats) == before
        assert (await chats.service.tree(chats.chat_id)).active_path() == tree.active_path()
        await (await SAYING[way](chats, tree, None)).result()


@pytest.mark.parametrize("is_done", [True, False])
async def test_a_turn_whose_transaction_fails_once_is_added_once(is_done: bool) -> None:
    stores: Any = MemoryStores()
    async with chatting(models={"A": Histories().model}, stores=stores) as chats:
        fail(stores, 1, is_done=is_done)
        turn = await chats.service.stream_chat(chats.chat_id, "one", owner=ANN)
        assert (await turn.result()).content == "answer 1"
        assert [one.content for one in await chats.service.tree(chats.chat_id)] == ["one", "answer 1"]


async def test_a_store_that_stays_away_is_reported_and_asking_again_by_name_says_it_once() -> None:
    stores: Any = MemoryStores()
    async with chatting(models={"A": Histories().model}, stores=stores) as chats:
        for _ in range(2):
            fail(stores, INTERACTIVE_ATTEMPTS, is_done=False)
            with pytest.raises(StoreUnavailable):
                await chats.service.stream_chat(chats.chat_id, "one", owner=ANN, run_id="mine")
        turn = await chats.service.stream_chat(chats.chat_id, "one", owner=ANN, run_id="mine")
        assert (await turn.result()).content == "answer 1"
        assert [one.content for one in await chats.service.tree(chats.chat_id)] == ["one", "answer 1"]
