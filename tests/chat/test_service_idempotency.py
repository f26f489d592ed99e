"""Submitting a turn is idempotent: the same `run_id` returns the existing run, and other arguments are a conflict.

The arguments that count are those that would make another answer: message, attachments, place, limits and tools.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from penstock.agents.messages import ToolCall
from penstock.agents.scripted import ScriptedModel
from penstock.chat.ports import Attachment
from penstock.chat.turn import ChatTurn
from penstock.hosting.limits import HostSettings, RunLimits
from penstock.hosting.ports import Conflict
from tests.chat.chats import ANN, Chats, Histories, chatting

Ask = Callable[..., Awaitable[ChatTurn]]


async def picture(chats: Chats, content: bytes = b"\x89PNG of a dam", name: str = "dam.png") -> Attachment:
    return await chats.service.attach(ANN, name, "image/png", content)


def saying(chats: Chats, **usual: Any) -> Ask:
    async def ask(content: str = "See?", **options: Any) -> ChatTurn:
        return await chats.service.stream_chat(
            chats.chat_id, content, **{"owner": ANN, "run_id": "r", **usual, **options}
        )

    return ask


def beginning(chats: Chats, **usual: Any) -> Ask:
    async def ask(messages: Any = "See?", **options: Any) -> ChatTurn:
        return await chats.service.stream_agent_chat("g", messages, **{"owner": ANN, "run_id": "r", **usual, **options})

    return ask


@pytest.mark.parametrize("way", [saying, beginning])
async def test_with_another_picture_or_none_it_is_a_conflict_and_with_the_same_bytes_the_same_turn(way: Any) -> None:
    histories = Histories()
    async with chatting(models={"A": histories.model}) as chats:
        seen, ask = await picture(chats), way(chats)
        first = await ask(attachments=[seen])
        await first.result()
        same = await picture(chats)
        for attached in ([seen], [seen.id], [same]):
            assert await ask(attachments=attached) == first
        others = [await picture(chats, b"\x89PNG of a cat"), await picture(chats, name="cat.png")]
        other_size = await picture(chats, b"")
        for wrong in ([], [others[0]], [others[1]], [other_size], [seen, same]):
            with pytest.raises(Conflict, match="'r' answers something else"):
                await ask(attachments=wrong)
        assert len(histories.requests) == 1


async def test_a_history_with_another_picture_is_a_conflict() -> None:
    async with chatting(models={"A": Histories().model}) as chats:
        seen, ask = await picture(chats), beginning(chats)
        first_message = {"role": "user", "content": "Look", "attachments": [seen]}
        last_message = {"role": "user", "content": "And?"}
        first = await ask([first_message, last_message])
        await first.result()
        assert await ask([{**first_message, "attachments": [await picture(chats)]}, last_message]) == first
        for wrong in (
            [{**first_message, "attachments": [await picture(chats, b"other")]}, last_message],
            [{**first_message, "attachments": []}, {**last_message, "attachments": [seen]}],
            [{**first_message, "role": "assistant"}, last_message],
        ):
            with pytest.raises(Conflict, match="something else"):
                await ask(wrong)


async def test_an_edited_message_keeps_its_picture_and_is_the_same_when_it_is_submitted_again() -> None:
    async with chatting(models={"A": Histories().model}) as chats:
        seen = await picture(chats)
        first = await saying(chats)(attachments=[seen])
        await first.result()

        async def edit(**options: Any) -> ChatTurn:
            id = str(first.user_message_id)
            return await chats.service.edit_user_message(chats.chat_id, id, "Better", owner=ANN, run_id="e", **options)

        edited = await edit()
        await edited.result()
        assert await edit() == await edit(attachments=[seen]) == edited
        with pytest.raises(Conflict, match="something else"):
            await edit(attachments=[])


@pytest.mark.parametrize("way", [saying, beginning])
async def test_within_other_limits_it_is_a_conflict(way: Any) -> None:
    settings = HostSettings(tick_s=0.05, drain_s=0, default_limits=RunLimits(max_steps=50))
    async with chatting(models={"A": Histories().model}, settings=settings) as chats:
        ask = way(chats)
        first = await ask(limits={"max_tokens": 5_000})
        await first.result()
        for same in (None, RunLimits(max_tokens=5_000), {"max_tokens": 5_000, "max_steps": 50}):
            assert await ask(limits=same) == first
        for wrong in ({"max_tokens": 5_001}, {"max_tokens": 5_000, "max_steps": 49}, {"max_cost_usd": 1}):
            with pytest.raises(Conflict, match="its limits"):
                await ask(limits=wrong)
        usual = await way(chats, run_id="usual")()
        await usual.result()
        assert await way(chats, run_id="usual")(limits=RunLimits(max_steps=50)) == usual


async def test_a_run_that_was_granted_more_is_still_the_same_run() -> None:
    replies = ["first", ToolCall("c", "nothing", {}), "after all"]
    async with chatting(models={"A": ScriptedModel(replies, name="A")}) as chats:
        await (await saying(chats)(run_id="before")).result()
        ask = saying(chats, limits={"max_api_calls": 1})
        first = await ask()
        assert (await first.result()).data["state"] == "halted"
        await chats.host.grant("r", {"max_api_calls": 5}, by="admin")
        assert (await (await ask()).result()).content == "after all"


async def test_with_other_tools_it_is_a_conflict() -> None:
    async with chatting(models={"A": Histories().model}) as chats:
        first = await saying(chats)(user_tools=["look"])
        await first.result()
        assert await saying(chats)(user_tools=["look"]) == first
        for wrong in ([], ["look", "leap"]):
            with pytest.raises(Conflict, match="something else"):
                await saying(chats)(user_tools=wrong)


async def test_in_another_place_of_the_chat_it_is_a_conflict() -> None:
    async with chatting(models={"A": Histories().model}) as chats:
        service, id = chats.service, chats.chat_id
        one = await saying(chats, run_id="one")()
        await one.result()
        two = await saying(chats, run_id="two")()
        await two.result()
        for name, act in (("retry", service.retry_message), ("continue", service.continue_message)):
            turn = await act(id, one.message_id, owner=ANN, run_id=name)
            await turn.result()
            assert await act(id, one.message_id, owner=ANN, run_id=name) == turn
            with pytest.raises(Conflict, match="something else"):
                await act(id, two.message_id, owner=ANN, run_id=name)
        message_ids = str(one.user_message_id), str(two.user_message_id)
        edit = [lambda of=of: service.edit_user_message(id, of, "x", owner=ANN, run_id="edit") for of in message_ids]
        await (await edit[0]()).result()
        with pytest.raises(Conflict, match="something else"):
            await edit[1]()
        below = await saying(chats, run_id="below")(parent_id=one.message_id)
        await below.result()
        assert await saying(chats, run_id="below")(parent_id=one.message_id) == below
        with pytest.raises(Conflict, match="something else"):
            await saying(chats, run_id="below")(parent_id=two.message_id)


async def test_what_else_is_kept_with_a_run_makes_it_no_other() -> None:
    async with chatting(models={"A": Histories().model}) as chats:
        first = await saying(chats)(about={"for": "this"})
        await first.result()
        assert await saying(chats)(about={"for": "that"}) == first
        run = await chats.host.get("r")
        assert run is not None
        assert run.origin["about"] == {"for": "this"}
