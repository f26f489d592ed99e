"""A run gets the same history however often it is started, also if answers above its own were unfinished."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.chat.conversation import ChatMessage
from penstock.chat.ports import ChatRecord
from penstock.chat.service import ChatService
from penstock.chat.turn import KIND, ChatTurn, writing
from penstock.hosting.host import RunHost
from penstock.hosting.ports import INTERACTIVE_ATTEMPTS, Conflict, RunRecord, StoreUnavailable
from penstock.storage.memory import MemoryStores
from penstock.testing import ManualClock
from tests.chat.chats import ALONE, ANN, Chats, Histories, Slow, chatting, hosted
from tests.chat.test_service_refused import fail
from tests.hosting.graphs import SETTINGS, executors, killed
from tests.hosting.test_approvals import pending_approval
from tests.nodes.graphs import graph, node

ASKING = graph(
    [node("start", "chat-start"), node("ask", "approval", question="Send this?"), node("out", "output")],
    ["start.messages > ask", "ask.approved > out"],
)
"""A graph that asks whether the conversation may go on."""
HISTORY = [("user", "one"), ("user", "two")]
"""What there is below an answer that is not finished."""


class Unfinished:
    """A chat with a first turn whose answer is being written, until it may end."""

    def __init__(self, chats: Chats, models: dict[str, Any], slow: Slow, first: ChatTurn) -> None:
        self.chats = chats
        self.slow = slow
        self.first = first
        self.models, self.histories = models, Histories()
        models["A"] = self.histories.model

    async def reply(self, **options: Any) -> ChatTurn:
        """Send a message below the answer that is not finished."""
        id = self.chats.chat_id
        return await self.chats.service.stream_chat(id, "two", owner=ANN, parent_id=self.first.message_id, **options)

    async def finished(self) -> None:
        self.slow.may_end.set()
        assert (await self.first.result()).content == "Hello whole"

    async def unfinished_ids(self, turn: ChatTurn) -> Any:
        """The ids of unfinished answers that are recorded with the turn's run."""
        run = await self.chats.host.get(turn.run_id)
        assert run is not None
        return run.origin.get("untold")


@asynccontextmanager
async def unfinished(stores: Any = None) -> AsyncIterator[Unfinished]:
    slow = Slow("Hello")
    models: dict[str, Any] = {"A": slow}
    async with chatting(models=models, stores=stores) as chats:
        first = await chats.service.stream_chat(chats.chat_id, "one", owner=ANN)
        await slow.begun.wait()
        yield Unfinished(chats, models, slow, first)


async def test_what_was_approved_goes_on_though_the_answer_above_came_and_the_host_died() -> None:
    clock = ManualClock()
    stores = MemoryStores(clock=clock)
    await stores.graphs.save("g", ANN, "g", ASKING, now_ms=0)
    dying, heir = (
        RunHost(stores, executors=executors(), settings=SETTINGS, clock=clock, worker=worker) for worker in "ab"
    )
    service, _ = (ChatService(host, stores.chats) for host in (dying, heir))
    await dying.start()
    chat = await service.create_chat(owner=ANN, graph_id="g")
    first = await service.stream_chat(chat.id, "one", owner=ANN)
    second = await service.stream_chat(chat.id, "two", owner=ANN, parent_id=first.message_id)
    question = await pending_approval(dying, second.run_id)
    await dying.answer((await pending_approval(dying, first.run_id)).id, "edited", answer="a secret", by=ANN)
    assert (await first.result()).content == "a secret"
    await killed(dying)
    clock.advance(5)
    async with heir:
        await heir.answer(question.id, "approved", by=ANN)
        went_on = (await heir.wait(second.run_id)).output
    assert went_on == question.value == [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]


async def test_granted_run_receives_the_history_as_of_its_submission() -> None:
    async with unfinished() as scene:
        turn = await scene.reply(limits={"max_steps": 0})
        assert (await turn.result()).data["state"] == "halted"
        await scene.finished()
        await scene.chats.host.grant(turn.run_id, {"max_steps": 100}, by=ANN)
        assert (await scene.chats.host.wait(turn.run_id)).status == "completed"
    assert scene.histories.requests == [HISTORY]


async def test_resumed_run_receives_the_same_history() -> None:
    async with unfinished() as scene:
        scene.models["A"] = slow = Slow("I")
        turn = await scene.reply()
        await slow.begun.wait()
        await turn.cancel()
        assert (await turn.result()).data["state"] == "partial"
        await scene.finished()
        scene.models["A"] = scene.histories.model
        await scene.chats.host.resume(turn.run_id)
        assert (await scene.chats.host.wait(turn.run_id)).status == "completed"
    assert scene.histories.requests == [HISTORY]


async def test_fork_or_replay_receives_the_same_history() -> None:
    async with unfinished() as scene:
        host, turn = scene.chats.host, await scene.reply()
        await turn.result()
        await scene.finished()
        fork = await host.fork(turn.run_id, owner=ANN, at="start")
        assert (await host.wait(fork.id)).status == "completed"
        again = await host.fork(fork.id, owner=ANN, at="A")
        assert (await host.wait(again.id)).status == "completed"
        replay = await host.replay(turn.run_id, owner=ANN)
        assert (await host.wait(replay.id)).status == "completed"
    assert scene.histories.requests == [HISTORY] * 3, "a replay calls nothing"


@pytest.mark.parametrize("way", ["edit", "retry", "continue"])
async def test_below_an_unfinished_answer_every_way_to_be_answered_notes_it(way: str) -> None:
    async with unfinished() as scene:
        service, id, none = scene.chats.service, scene.chats.chat_id, {"max_steps": 0}
        below = await scene.reply(limits=none)
        await below.result()
        if way == "edit":
            turn = await service.edit_user_message(id, str(below.user_message_id), "two", owner=ANN, limits=none)
        else:
            act = service.retry_message if way == "retry" else service.continue_message
            turn = await act(id, below.message_id, owner=ANN, limits=none)
        await turn.result()
        await scene.finished()
        await scene.chats.host.grant(turn.run_id, {"max_steps": 100}, by=ANN)
        await scene.chats.host.wait(turn.run_id)
    assert scene.histories.requests == [HISTORY]


async def test_a_message_after_a_finished_answer_gets_the_whole_history_and_records_no_unfinished_ids() -> None:
    async with unfinished() as scene:
        await scene.finished()
        turn = await scene.reply()
        await turn.result()
        assert await scene.unfinished_ids(turn) is None
    assert scene.histories.requests == [[("user", "one"), ("assistant", "Hello whole"), ("user", "two")]]


async def test_a_turn_that_is_submitted_again_is_the_same_when_the_answer_above_has_come() -> None:
    async with unfinished() as scene:
        turn = await scene.reply(run_id="r")
        await turn.result()
        await scene.finished()
        assert await scene.reply(run_id="r") == turn
        assert await scene.unfinished_ids(turn) == [scene.first.message_id]


async def test_a_turn_that_was_interrupted_gets_the_history_as_of_its_second_submission() -> None:
    stores: Any = MemoryStores()
    async with unfinished(stores) as scene:
        fail(stores, INTERACTIVE_ATTEMPTS, is_done=False)
        with pytest.raises(StoreUnavailable):
            await scene.reply(run_id="r")
        await scene.finished()
        turn = await scene.reply(run_id="r")
        await turn.result()
        assert await scene.unfinished_ids(turn) is None
    assert scene.histories.requests == [[("user", "one"), ("assistant", "Hello whole"), ("user", "two")]]


class Late:
    """Chats that are read when they may be."""

    def __init__(self, chats: Any) -> None:
        self._chats = chats
        self.reading, self.may_read = asyncio.Event(), asyncio.Event()

    async def messages(self, chat_id: str) -> Any:
        self.reading.set()
        await self.may_read.wait()
        return await self._chats.messages(chat_id)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chats, name)


@pytest.mark.parametrize("tools", [(), ("search",)])
async def test_a_turn_submitted_twice_at_once_is_one_turn_though_the_answer_above_came_in_between(tools: Any) -> None:
    stores = MemoryStores()
    async with unfinished(stores) as scene:
        late = Late(stores.chats)
        beside = ChatService(RunHost(stores, executors=executors(), settings=SETTINGS), late)
        message, below = (scene.chats.chat_id, "two"), scene.first.message_id
        asking = asyncio.create_task(
            beside.stream_chat(*message, owner=ANN, parent_id=below, run_id="r", user_tools=tools)
        )
        await late.reading.wait()  # there was no such run when it looked
        turn = await scene.reply(run_id="r")
        await turn.result()
        await scene.finished()
        late.may_read.set()
        if tools:
            with pytest.raises(Conflict):
                await asking
        else:
            other = await asking
            assert (other.run_id, other.message_id) == (turn.run_id, turn.message_id)
        assert await scene.unfinished_ids(turn) == [below]
    assert scene.histories.requests == [HISTORY]


async def prepared(unfinished: list[str] | None, *, is_cached: bool) -> Any:
    """The history that a run gets below an answer which has come by now."""
    stores = MemoryStores()
    await stores.graphs.save("g", ANN, "g", ALONE, now_ms=0)
    async with hosted(stores) as chats:
        await stores.chats.create(ChatRecord("c", ANN, "", "g", 0, 0))
        path = [
            ChatMessage("q1", None, "user", "one", 0),
            ChatMessage("a1", "q1", "assistant", "1", 0, {"state": "complete"}),
            ChatMessage("q2", "a1", "user", "two", 0),
        ]
        answer = ChatMessage("a2", "q2", "assistant", "", 0, writing("r"))
        await stores.chats.add_messages("c", [*path, answer], now_ms=0)
        if is_cached:
            chats.service._handler.cache_history("r", tuple(path))
        noted = {} if unfinished is None else {"untold": unfinished}
        run = RunRecord("r", ANN, "g", 1, origin={"kind": KIND, "chat_id": "c", "message_id": "a2", **noted})
        given = await chats.host.handlers[KIND].on_start(run)
        return [one["content"] for one in given.services["chat_input"]["messages"]]


@pytest.mark.parametrize("is_cached", [False, True])
async def test_unfinished_answers_are_left_out_of_a_cached_history_too(
    is_cached: bool,
) -> None:
    assert await prepared(["a1"], is_cached=is_cached) == ["one", "two"]
    assert await prepared(None, is_cached=is_cached) == ["one", "1", "two"]
