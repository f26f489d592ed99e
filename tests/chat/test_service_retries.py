"""A chat whose model is busy at first: the request is sent again, and the answer is there once."""

from __future__ import annotations

from penstock.agents.scripted import ScriptedModel
from tests.chat.chats import ANN, chatting


async def test_a_chat_is_answered_once_by_a_model_that_refuses_at_first() -> None:
    model = ScriptedModel([ConnectionRefusedError("busy"), "an answer"], name="A")
    model.retries = 1
    async with chatting(models={"A": model}) as chats:
        turn = await chats.service.stream_chat(chats.chat_id, "one", owner=ANN)
        streamed = "".join([one.data["text"] async for one in turn.events() if one.type == "text.delta"])
        answer = await turn.result()
    assert (streamed, answer.content, answer.data["state"]) == ("an answer", "an answer", "complete")
    assert model.calls == 2


async def test_a_chat_is_not_answered_again_once_a_piece_of_the_answer_was_emitted() -> None:
    model = ScriptedModel(lambda request: "an answer", name="A", piece_characters=3, breaks_off_after=1)
    model.retries = 5
    async with chatting(models={"A": model}) as chats:
        turn = await chats.service.stream_chat(chats.chat_id, "one", owner=ANN)
        answer = await turn.result()
    assert (answer.content, answer.data["state"], model.calls) == ("an ", "failed", 1)
