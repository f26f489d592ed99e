"""Chats that are deleted: by whom, when not, and while messages are being sent."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from penstock.chat.conversation import ChatNotFound, MessageNotFound
from penstock.hosting.ports import Conflict
from penstock.testing import explore
from penstock.testing.faulty import Fault
from tests.chat.chats import ANN, Histories, Slow, chatting
from tests.chat.test_service_faults import SCHEDULES, behind


async def test_a_chat_is_deleted_by_its_owner() -> None:
    async with chatting(models={"A": Histories().model}) as chats:
        await (await chats.service.stream_chat(chats.chat_id, "one", owner=ANN)).result()
        with pytest.raises(ChatNotFound):
            await chats.service.delete_chat(chats.chat_id, owner="bob")
        await chats.service.delete_chat(chats.chat_id, owner=ANN)
        for again in (chats.service.delete_chat(chats.chat_id), chats.service.tree(chats.chat_id)):
            with pytest.raises(ChatNotFound):
                await again


async def test_an_answer_that_is_being_written_keeps_its_chat() -> None:
    slow = Slow("so far")
    async with chatting(models={"A": slow}) as chats:
        turn = await chats.service.stream_chat(chats.chat_id, "one", owner=ANN)
        await slow.begun.wait()
        with pytest.raises(Conflict, match="being written"):
            await chats.service.delete_chat(chats.chat_id)
        await turn.cancel()
        await turn.result()
        await chats.service.delete_chat(chats.chat_id)


async def test_runs_of_a_chat_that_was_deleted_neither_go_on_nor_are_taken_up() -> None:
    async with chatting(models={"A": Histories().model}) as chats:
        halted = await chats.service.stream_chat(chats.chat_id, "one", owner=ANN, limits={"max_api_calls": 0})
        assert (await halted.result()).data["state"] == "halted"
        turn = await chats.service.stream_chat(chats.chat_id, "two", owner=ANN)
        await turn.result()
        fork = await chats.host.fork(turn.run_id, owner=ANN, at="A")
        await chats.host.wait(fork.id)
        await chats.service.delete_chat(chats.chat_id)
        before = await chats.stores.runs.list()
        for again in (
            chats.host.grant(halted.run_id, {"max_api_calls": 5}, by="root"),
            chats.host.resume(halted.run_id),
            chats.host.fork(turn.run_id, owner=ANN, at="A"),
            chats.host.fork(fork.id, owner=ANN, at="A"),
            chats.host.replay(turn.run_id, owner=ANN),
        ):
            with pytest.raises(Conflict, match=f"the chat '{chats.chat_id}' that it answers in was deleted"):
                await again
        assert await chats.stores.runs.list() == before


async def deleted_while_messages_are_sent(seed: int) -> None:
    """Either the chat is gone and messages are refused, or it stays and they are answered; an answer may go unread."""
    stores, host, service = await behind(Fault("io", None))
    async with host:

        async def says(text: str) -> None:
            with suppress(ChatNotFound):
                turn = await service.stream_chat("c", text, owner=ANN, run_id=text)
                try:
                    assert (await turn.result()).content == f"answer to {text}"
                except MessageNotFound:  # it was answered, and deleted before that was read
                    assert await stores.chats.get("c") is None

        async def deletes() -> None:
            await asyncio.sleep(seed % 4 * 0.05)
            with suppress(Conflict):
                await service.delete_chat("c", owner=ANN)

        async with asyncio.TaskGroup() as tasks:
            for work in (says("one"), deletes(), says("two")):
                tasks.create_task(work)
    runs = await stores.runs.list()
    assert {run.status for run in runs} <= {"completed"}
    messages, _ = await stores.chats.messages("c")
    is_there = await stores.chats.get("c") is not None
    assert len(messages) == (2 * len(runs) if is_there else 0)


@pytest.mark.reliability
def test_a_chat_that_is_deleted_while_messages_are_sent_is_gone_or_answers() -> None:
    explore(deleted_while_messages_are_sent, schedules=SCHEDULES)
