"""What is long on the event loop is done in pieces, with others served in between."""

from __future__ import annotations

import asyncio

import pytest

from penstock.agents.scripted import ScriptedModel
from penstock.chat.conversation import YIELD_EVERY, yield_every
from tests.chat.chats import ANN, chatting


class Turns:
    """How often another task has had a turn on the loop."""

    def __init__(self) -> None:
        self.count = 0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Turns:
        self._task = asyncio.create_task(self._take())
        await asyncio.sleep(0)
        self.count = 0
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait((self._task,))

    async def _take(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)


async def test_a_short_list_is_gone_through_at_once() -> None:
    async with Turns() as others:
        for number in range(YIELD_EVERY):
            await yield_every(number)
        assert others.count == 0


async def test_others_are_served_while_a_long_list_is_gone_through() -> None:
    async with Turns() as others:
        for number in range(4 * YIELD_EVERY + 1):
            await yield_every(number)
        assert others.count == 4


async def test_others_are_served_while_a_long_history_is_taken_on() -> None:
    async with chatting(models={"A": ScriptedModel(lambda _: "yes")}) as chats:
        turns = {}
        for length in (1, 8 * YIELD_EVERY):
            history = [{"role": "assistant", "content": "x"} for _ in range(length)]
            async with Turns() as others:
                turn = await chats.service.stream_agent_chat(
                    "g", [*history, {"role": "user", "content": "?"}], owner=ANN
                )
                turns[length] = others.count
            await turn.result()
    assert turns[8 * YIELD_EVERY] - turns[1] >= 2 * 7, (
        "while it is looked through, and while it is written into the tree"
    )


@pytest.mark.parametrize("after", range(0, 30, 3))
async def test_who_leaves_while_a_long_history_is_taken_on_may_say_it_again(after: int) -> None:
    async with chatting(models={"A": ScriptedModel(lambda _: "yes")}) as chats:
        history = [{"role": "assistant", "content": "x"} for _ in range(3 * YIELD_EVERY)]
        messages = [*history, {"role": "user", "content": "?"}]
        leaving = asyncio.create_task(chats.service.stream_agent_chat("g", messages, owner=ANN, run_id="mine"))
        for _ in range(after):
            await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait((leaving,))
        turn = await chats.service.stream_agent_chat("g", messages, owner=ANN, run_id="mine")
        assert (await turn.result()).content == "yes"
        assert len(await chats.service.tree(turn.chat_id)) == len(messages) + 1
        assert [run.id for run in await chats.stores.runs.list()] == ["mine"]
