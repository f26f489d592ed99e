"""A turn submitted several times at once under one run id is one turn: stored once, answered once, returned to all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.agents.scripted import ScriptedModel
from penstock.chat.conversation import MessageTree
from penstock.chat.turn import ChatTurn
from penstock.hosting.ports import RunIdTaken
from penstock.storage.memory import MemoryStores
from penstock.storage.stores import open_stores
from penstock.testing import ManualClock, crash_points
from tests.chat.chats import ALONE, ANN, Chats, hosted
from tests.storage.postgres import postgres_server, postgres_url

__all__ = ["postgres_server", "postgres_url"]

TIMES = 4


class Meeting:
    """Chats that are read and not changed until so many have read them: what was not there then is not seen by any."""

    def __init__(self, chats: Any, readers: asyncio.Barrier) -> None:
        self._chats = chats
        self._readers = readers
        self._left = 0

    def await_all(self, times: int) -> None:
        self._left = times

    async def messages(self, chat_id: str) -> Any:
        found = await self._chats.messages(chat_id)
        if self._left:
            self._left -= 1
            await self._readers.wait()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chats, name)


class Met:
    """Stores whose chats are a meeting."""

    def __init__(self, stores: Any, readers: asyncio.Barrier) -> None:
        self._stores = stores
        self.chats = Meeting(stores.chats, readers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stores, name)


class Services:
    """Two services over the same chats; on memory, two over the same stores."""

    def __init__(self) -> None:
        self.readers = asyncio.Barrier(TIMES)
        self.chats: list[Chats] = []
        self.answered = 0
        self.model = ScriptedModel(self._answer)

    def _answer(self, request: Any) -> str:
        self.answered += 1
        return f"answer to {request.messages[-1].text}"

    async def begin(self, stack: AsyncExitStack, url: str) -> None:
        kept: Any = MemoryStores() if url == "memory:" else None
        for number in range(2):
            stores = kept or await stack.enter_async_context(await open_stores(url))
            met = Met(stores, self.readers)
            clock = ManualClock()
            clock.jump_wall(number)  # each records its own time of submission
            if not number:
                await stores.graphs.save("g", ANN, "g", ALONE, now_ms=0)
            self.chats.append(await stack.enter_async_context(hosted(met, {"A": self.model}, clock=clock)))
        await self.chats[0].service.create_chat(owner=ANN, graph_id="g", chat_id="c")

    async def at_once(self, *ask: Callable[[Chats], Awaitable[ChatTurn]]) -> list[ChatTurn | BaseException]:
        """What comes of asking so many times, each time of the other service, when none has seen another."""
        for chats in self.chats:
            chats.stores.chats.await_all(TIMES // len(self.chats))
        asking = [ask[at % len(ask)](self.chats[at % len(self.chats)]) for at in range(TIMES)]
        return await asyncio.gather(*asking, return_exceptions=True)

    async def tree(self, chat_id: str = "c") -> MessageTree:
        return await self.chats[0].service.tree(chat_id)


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    return "memory:" if request.param == "memory" else f"sqlite:///{tmp_path}/p.db"


@asynccontextmanager
async def both(url: str) -> AsyncIterator[Services]:
    services = Services()
    async with AsyncExitStack() as stack:
        await services.begin(stack, url)
        yield services


async def one_of(turns: list[ChatTurn | BaseException]) -> ChatTurn:
    """The turn that all of them are, once it was answered."""
    first = turns[0]
    assert isinstance(first, ChatTurn), first
    assert turns == [first] * TIMES
    await first.result()
    return first


async def test_concurrent_identical_requests_add_one_turn(url: str) -> None:
    async with both(url) as services:
        turn = await one_of(
            await services.at_once(lambda chats: chats.service.stream_chat("c", "Hi", owner=ANN, run_id="r"))
        )
        tree = await services.tree()
        assert [one.content for one in tree] == ["Hi", "answer to Hi"]
        assert (turn.user_message_id, turn.message_id) == tuple(one.id for one in tree)
        assert services.answered == 1


async def test_a_chat_that_is_begun_several_times_at_once_is_one_chat_with_its_history_and_pictures(url: str) -> None:
    async with both(url) as services:

        async def begin(chats: Chats) -> ChatTurn:
            picture = await chats.service.attach(ANN, "a.png", "image/png", b"\x89PNG")
            messages = [
                {"role": "user", "content": "One", "attachments": [picture]},
                {"role": "user", "content": "Two"},
            ]
            return await chats.service.stream_agent_chat("g", messages, owner=ANN, run_id="r")

        turn = await one_of(await services.at_once(begin))
        assert [one.content for one in await services.tree(turn.chat_id)] == ["One", "Two", "answer to Two"]
        assert services.answered == 1


@pytest.mark.parametrize("way", ["edit", "retry", "continue"])
async def test_concurrent_requests_for_one_answer_return_one_run(url: str, way: str) -> None:
    async with both(url) as services:
        first = await services.chats[0].service.stream_chat("c", "One", owner=ANN)
        await first.result()

        async def ask(chats: Chats) -> ChatTurn:
            if way == "edit":
                message_id = str(first.user_message_id)
                return await chats.service.edit_user_message("c", message_id, "Two", owner=ANN, run_id="r")
            act = chats.service.retry_message if way == "retry" else chats.service.continue_message
            return await act("c", first.message_id, owner=ANN, run_id="r")

        turn = await one_of(await services.at_once(ask))
        tree = await services.tree()
        assert len(tree) == (4 if way == "edit" else 3)
        assert tree.leaf is not None
        assert tree.leaf.id == turn.message_id
        assert services.answered == 2


async def test_of_two_messages_sent_at_once_under_one_run_id_one_is_stored_and_the_other_is_a_conflict(
    url: str,
) -> None:
    async with both(url) as services:
        first, other = (
            lambda chats, text=text: chats.service.stream_chat("c", text, owner=ANN, run_id="r")
            for text in ("Hi", "Ho")
        )
        turns = await services.at_once(first, other)
        refused = [one for one in turns if not isinstance(one, ChatTurn)]
        assert [type(one) for one in refused] == [RunIdTaken] * (TIMES // 2)
        assert {str(one) for one in refused} == {"run 'r' answers something else; give this one an id of its own"}
        (turn, same) = (one for one in turns if isinstance(one, ChatTurn))
        assert turn == same
        await turn.result()
        assert len(await services.tree()) == 2
        assert services.answered == 1


async def test_cancelled_request_does_not_take_the_answer_from_the_others(url: str) -> None:
    def leave() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    crash_points.arm("submit.added", die=leave)
    try:
        async with both(url) as services:
            turns = await services.at_once(lambda chats: chats.service.stream_chat("c", "Hi", owner=ANN, run_id="r"))
            assert [type(one) for one in turns if not isinstance(one, ChatTurn)] == [asyncio.CancelledError]
            for turn in turns:
                if isinstance(turn, ChatTurn):
                    answer = await turn.result()
                    assert (answer.content, answer.data["state"]) == ("answer to Hi", "complete")
            assert services.answered == 1
    finally:
        crash_points.disarm()
