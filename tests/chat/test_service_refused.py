"""Turns that are refused for now: whoever is told to come back says it again, and so nothing of it is kept."""

from __future__ import annotations

import asyncio
import inspect
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.chat.conversation import MessageTree
from penstock.chat.message import ChatMessage
from penstock.chat.service import ChatService
from penstock.hosting.host import Overloaded, RunHost
from penstock.hosting.ports import Conflict, StoreUnavailable
from penstock.hosting.records import RunRecord
from penstock.hosting.settings import HostSettings
from penstock.storage.memory import MemoryStores
from penstock.testing import explore
from tests.chat.chats import ANN, ECHOING, Chats, Echo, Histories, Slow, chatting, loop
from tests.nodes.graphs import registry

SCHEDULES = 1_000 if os.environ.get("PENSTOCK_SOAK") else 30


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


async def test_a_turn_that_was_refused_for_want_of_room_is_taken_on_later_and_said_once() -> None:
    async with full() as chats:
        with pytest.raises(Overloaded):
            await chats.service.stream_chat(chats.chat_id, "two", owner=ANN, run_id="mine")
        (waiting,) = await chats.stores.runs.list(statuses=("queued",))
        await chats.host.cancel(waiting.id)
        turn = await chats.service.stream_chat(chats.chat_id, "two", owner=ANN, run_id="mine")
        await turn.cancel()
        tree = await chats.service.tree(chats.chat_id)
        assert [one.content for one in tree] == ["one", "answer 1", "two", ""]


async def test_a_turn_that_was_interrupted_and_finds_no_room_stays_to_be_asked_for_again() -> None:
    async with full() as chats:
        turn = chats.service._asked(None, "mine", ())
        unfinished = [
            ChatMessage(turn.user_id(), None, "user", "two", turn.at_ms, {"state": "complete", "attachments": []}),
            ChatMessage(turn.answer_id, turn.user_id(), "assistant", "", turn.at_ms, {"state": "writing"}),
        ]
        await chats.stores.chats.add_messages(chats.chat_id, unfinished, now_ms=turn.at_ms)
        before = await everything(chats)
        with pytest.raises(Overloaded):
            await chats.service.stream_chat(chats.chat_id, "two", owner=ANN, run_id="mine")
        assert await everything(chats) == before


async def test_a_place_is_kept_while_what_was_said_is_written_down() -> None:
    slow, may_write, writes = Slow("x"), asyncio.Event(), asyncio.Event()
    settings = HostSettings(tick_s=0.05, drain_s=0, max_running=1, max_queued=1)
    async with chatting(models={"A": slow}, settings=settings) as chats:
        first = await chats.service.stream_chat(chats.chat_id, "runs", owner=ANN)
        await slow.begun.wait()
        add = chats.stores.chats.add_messages

        async def add_when_it_may(*args: Any, **options: Any) -> None:
            if not writes.is_set():
                writes.set()
                await may_write.wait()
            await add(*args, **options)

        chats.stores.chats.add_messages = add_when_it_may
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


async def test_a_caller_that_leaves_while_it_writes_gives_its_place_to_others() -> None:
    settings = HostSettings(tick_s=0.05, drain_s=0, max_queued=1)
    async with chatting(models={"A": Histories().model}, settings=settings) as chats:
        add, writes = chats.stores.chats.add_messages, asyncio.Event()

        async def never(*args: Any, **options: Any) -> None:
            writes.set()
            await asyncio.Event().wait()

        chats.stores.chats.add_messages = never
        leaving = asyncio.create_task(chats.service.stream_chat(chats.chat_id, "one", owner=ANN))
        await writes.wait()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        chats.stores.chats.add_messages = add
        await (await chats.service.stream_chat(chats.chat_id, "two", owner=ANN)).result()
        assert [one.content for one in await chats.service.tree(chats.chat_id)] == ["two", "answer 1"]


class Slowly:
    """A store that takes a while for everything, before and after it is done, and does not always add what it is to."""

    def __init__(self, store: Any, rng: random.Random) -> None:
        self._store = store
        self._rng = rng

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._store, name)
        if not inspect.iscoroutinefunction(real):
            return real

        async def ask(*args: Any, **options: Any) -> Any:
            await asyncio.sleep(self._rng.random() / 50)
            if name == "add" and self._rng.random() < 0.3:
                raise StoreUnavailable("the disk failed; ask again")
            answer = await real(*args, **options)
            await asyncio.sleep(self._rng.random() / 50)
            return answer

        return ask


async def the_same_at_two_servers(seed: int) -> None:
    """Turns that two servers are asked for at once, by name, while there is room for one at a time."""
    kept, rng, texts = MemoryStores(clock=loop().clock), random.Random(seed), ("one", "two", "three")
    await kept.graphs.save("g", ANN, "g", ECHOING, now_ms=0)
    stores: Any = SimpleNamespace(**vars(kept))
    for name in ("runs", "chats"):
        setattr(stores, name, Slowly(getattr(kept, name), rng))
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
    assert refused, "nothing was tried"
    messages, _ = await kept.chats.messages("c")
    expected = sorted(pair for text in texts for pair in ((text, "complete"), (f"answer to {text}", "complete")))
    assert sorted((one.content, one.data["state"]) for one in messages) == expected


@pytest.mark.reliability
def test_whoever_asks_again_wherever_is_answered_once_and_has_said_it_once() -> None:
    explore(the_same_at_two_servers, schedules=SCHEDULES)


class Failing:
    """A store of which one method fails so many times, before or after it has done its work."""

    def __init__(self, store: Any, method: str, *, is_done: bool) -> None:
        self._store = store
        self._method = method
        self._is_done = is_done
        self.left = 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._store, name)
        if name != self._method or not self.left:
            return real
        self.left -= 1

        async def fail(*args: Any, **options: Any) -> Any:
            if self._is_done:
                await real(*args, **options)
            raise StoreUnavailable("the disk failed; ask again")

        return fail


FAULTS = [("runs", "add", False), ("chats", "add_messages", False), ("chats", "add_messages", True)]


@pytest.mark.parametrize(("store", "method", "is_done"), FAULTS)
@pytest.mark.parametrize("way", SAYING)
async def test_a_turn_that_a_store_could_not_take_leaves_the_chat_as_it_was(
    way: str, store: str, method: str, is_done: bool
) -> None:
    stores: Any = MemoryStores()
    failing = Failing(getattr(stores, store), method, is_done=is_done)
    setattr(stores, store, failing)
    async with chatting(models={"A": Histories().model}, stores=stores) as chats:
        for text in ("one", "first retry", "second retry"):
            await (await chats.service.stream_chat(chats.chat_id, text, owner=ANN)).result()
        tree = await chats.service.tree(chats.chat_id)
        await (await chats.service.edit_user_message(chats.chat_id, tree.active_path()[0].id, "1", owner=ANN)).result()
        tree = await chats.service.switch(chats.chat_id, tree.active_path()[0].id)
        before = await said_in(chats)
        for _ in range(3):
            failing.left = 1
            with pytest.raises(StoreUnavailable):
                await SAYING[way](chats, tree, None)
        assert await said_in(chats) == before
        assert (await chats.service.tree(chats.chat_id)).active_path() == tree.active_path()
        await (await SAYING[way](chats, tree, None)).result()


async def test_a_run_that_is_there_after_all_is_the_turn_and_nothing_is_taken_back() -> None:
    stores: Any = MemoryStores()
    stores.runs = failing = Failing(stores.runs, "add", is_done=True)
    async with chatting(models={"A": Histories().model}, stores=stores) as chats:
        failing.left = 1
        turn = await chats.service.stream_chat(chats.chat_id, "one", owner=ANN)
        assert (await turn.result()).content == "answer 1"
        assert [one.content for one in await chats.service.tree(chats.chat_id)] == ["one", "answer 1"]


async def test_a_run_that_comes_after_its_turn_was_taken_back_is_not_wanted_and_asks_nobody() -> None:
    stores: Any = MemoryStores()
    histories, add, late = Histories(), stores.runs.add, []

    async def add_later(run: RunRecord, *args: Any) -> RunRecord:
        late.append(run)
        raise StoreUnavailable("no answer came in time, it may have been done; ask again")

    async with chatting(models={"A": histories.model}, stores=stores) as chats:
        stores.runs.add = add_later
        with pytest.raises(StoreUnavailable):
            await chats.service.stream_chat(chats.chat_id, "one", owner=ANN)
        assert [*await chats.service.tree(chats.chat_id)] == []
        for run in late:
            await add(run)
        assert [(await chats.host.wait(run.id)).status for run in late] == ["cancelled"]
        assert [*await chats.service.tree(chats.chat_id)] == []
        stores.runs.add = add
        again = await chats.service.stream_chat(chats.chat_id, "one", owner=ANN)
        assert (await again.result()).content == "answer 1"
    assert histories.asked == [[("user", "one")]]


async def test_what_somebody_has_built_upon_is_not_taken_back() -> None:
    stores: Any = MemoryStores()
    stores.runs = failing = Failing(stores.runs, "add", is_done=False)
    async with chatting(models={"A": Histories().model}, stores=stores) as chats:
        real = stores.chats.add_messages

        async def add_and_follow(chat_id: str, messages: Any, **options: Any) -> None:
            await real(chat_id, messages, **options)
            await real(chat_id, [ChatMessage("below", messages[-1].id, "user", "and?", 1)], **options)

        stores.chats.add_messages = add_and_follow
        failing.left = 1
        with pytest.raises(StoreUnavailable):
            await chats.service.stream_chat(chats.chat_id, "one", owner=ANN)
        assert [one.content for one in await chats.service.tree(chats.chat_id)] == ["one", "", "and?"]


async def test_a_store_that_stays_away_is_told_of_and_asking_again_by_name_says_it_once() -> None:
    stores: Any = MemoryStores()
    stores.runs = failing = Failing(stores.runs, "add", is_done=False)
    async with chatting(models={"A": Histories().model}, stores=stores) as chats:
        failing.left = 2
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await chats.service.stream_chat(chats.chat_id, "one", owner=ANN, run_id="mine")
        turn = await chats.service.stream_chat(chats.chat_id, "one", owner=ANN, run_id="mine")
        assert (await turn.result()).content == "answer 1"
        assert [one.content for one in await chats.service.tree(chats.chat_id)] == ["one", "answer 1"]


async def said_in(chats: Chats) -> Any:
    """What is said in each of ann's chats; when it was used last may have changed."""
    return {chat.id: (await chats.stores.chats.messages(chat.id))[0] for chat, _ in await everything(chats)}
