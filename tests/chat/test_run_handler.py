"""Runs that answer somebody: what their forks are told, and what is kept when one ends more than once."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.chat.message import ChatMessage
from penstock.chat.protocol import KIND
from penstock.chat.run_handler import PAGE
from penstock.hosting.host import UNSET
from penstock.hosting.records import HostedEvent, RunRecord
from tests.chat.chats import ALONE, ANN, Chats, Histories, Slow, chatting
from tests.nodes.graphs import graph, node

ENTERED = graph([node("start", "input"), node("A", "agent", model="A")], ["start > A"])
"""A graph without a chat-start: a chat enters it at its input."""


async def forked(chats: Chats, run_id: str, input: Any = UNSET, *, at: str = "start") -> RunRecord:
    fork = await chats.host.fork(run_id, owner=ANN, at=at, input=input)
    return await chats.host.wait(fork.id)


@pytest.mark.parametrize("document", [ALONE, ENTERED])
async def test_a_fork_where_the_chat_enters_is_told_its_input_as_what_the_user_said_last(document: Any) -> None:
    histories = Histories()
    async with chatting(document, models={"A": histories.model}) as chats:
        for text in ("hello", "count to 5"):
            turn = await chats.service.stream_chat(chats.chat_id, text, owner=ANN)
            await turn.result()
        before = [*await chats.service.tree(chats.chat_id)]
        run = await forked(chats, turn.run_id, "count to 8")
        assert (run.status, "answer 3" in str(run.output)) == ("completed", True)
        again = await forked(chats, turn.run_id)
        of_fork = await forked(chats, run.id, at="A")
        assert (again.status, of_fork.status) == ("completed", "completed")
        assert [*await chats.service.tree(chats.chat_id)] == before
    above = [("user", "hello"), ("assistant", "answer 1")]
    assert histories.asked[2:] == [
        [*above, ("user", "count to 8")],
        [*above, ("user", "count to 5")],
        [*above, ("user", "count to 8")],
    ]


async def test_a_fork_of_an_answer_that_went_on_answers_its_input_and_does_not_go_on() -> None:
    histories, slow = Histories(), Slow("Hel")
    models: dict[str, Any] = {"A": slow}
    async with chatting(models=models) as chats:
        turn = await chats.service.stream_chat(chats.chat_id, "hello", owner=ANN)
        await slow.begun.wait()
        await turn.cancel()
        answer = await turn.result()
        models["A"] = histories.model
        more = await chats.service.continue_message(chats.chat_id, answer.id, owner=ANN)
        await more.result()
        await forked(chats, more.run_id, "count to 8")
    assert histories.asked[-1] == [("user", "count to 8")]


async def test_a_fork_may_be_given_a_conversation_and_keeps_what_was_attached_otherwise() -> None:
    histories = Histories()
    async with chatting(models={"A": histories.model}) as chats:
        dam = await chats.service.attach(ANN, "dam.txt", "text/plain", b"90 m")
        turn = await chats.service.stream_chat(chats.chat_id, "how high?", owner=ANN, attachments=[dam])
        await turn.result()
        await forked(chats, turn.run_id, "how wide?")
        said = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "1"}]
        await forked(chats, turn.run_id, {"messages": [*said, {"role": "user", "content": "two"}]})
        wrong = await forked(chats, turn.run_id, {"messages": [{"role": "nobody", "content": "x"}]})
        assert (wrong.status, "messages[0]" in str(wrong.error)) == ("failed", True)
    wide, conversation = histories.asked[1:]
    assert [(role, "how wide?" in text and "90 m" in text) for role, text in wide] == [("user", True)]
    assert conversation == [("user", "one"), ("assistant", "1"), ("user", "two")]


async def test_an_input_behind_the_start_comes_into_its_node_and_leaves_what_was_said() -> None:
    histories = Histories()
    async with chatting(models={"A": histories.model}) as chats:
        turn = await chats.service.stream_chat(chats.chat_id, "hello", owner=ANN)
        await turn.result()
        await forked(chats, turn.run_id, "in other words", at="A")
    assert histories.asked[-1] == [("user", "hello"), ("user", "in other words")]


async def test_a_whole_answer_is_not_taken_back_by_a_cancel_that_another_worker_finds() -> None:
    async with chatting(models={"A": Histories().model}) as chats:
        turn = await chats.service.stream_chat(chats.chat_id, "one", owner=ANN)
        assert (await turn.result()).data["state"] == "complete"
        before = [*await chats.service.tree(chats.chat_id)]
        run = await chats.host.wait(turn.run_id)
        for status in ("cancelled", "failed", "halted", "completed"):  # by workers that came after one that died
            await chats.host.handlers[KIND].on_end(run._replace(status=status, epoch=run.epoch + 1), chats.stores)
            assert [*await chats.service.tree(chats.chat_id)] == before
        assert (await turn.result()).content == "answer 1"


async def test_of_a_long_answer_that_is_cancelled_every_piece_is_kept() -> None:
    pieces = [f"{number} " for number in range(2 * PAGE + 10)]
    told = [HostedEvent(at, 0, "text.delta", {"node_id": "A", "text": piece}) for at, piece in enumerate(pieces, 1)]
    async with chatting() as chats:
        await chats.host.close()
        writing = ChatMessage("a", None, "assistant", "", 0, {"state": "writing", "run_id": "r"})
        await chats.stores.chats.add_messages(chats.chat_id, [writing], now_ms=0)
        await chats.stores.runs.add(
            RunRecord("r", ANN, "g", 1, origin={"kind": KIND, "chat_id": chats.chat_id, "message_id": "a"})
        )
        await chats.stores.runs.claim("w", now_ms=0, lease_ms=1_000)
        await chats.stores.events.append("r", 1, told)
        await chats.host.handlers[KIND].on_end(await chats.stores.runs.update("r", 1, status="cancelled"), chats.stores)
        (answer,) = await chats.service.tree(chats.chat_id)
    assert (answer.data["state"], answer.content) == ("partial", "".join(pieces))


async def test_what_a_run_comes_to_after_its_answer_was_cut_short_stands_beside_it_once() -> None:
    slow = Slow("Hel")
    async with chatting(models={"A": slow}) as chats:
        turn = await chats.service.stream_chat(chats.chat_id, "one", owner=ANN)
        await slow.begun.wait()
        await chats.host.cancel(turn.run_id)
        assert (await turn.result()).content == "Hel"
        slow.may_end.set()
        await chats.host.resume(turn.run_id)
        run = await chats.host.wait(turn.run_id)
        for again in (run, run._replace(epoch=run.epoch + 1), run._replace(status="cancelled", epoch=run.epoch + 2)):
            await chats.host.handlers[KIND].on_end(again, chats.stores)
            answers = [one for one in await chats.service.tree(chats.chat_id) if one.role == "assistant"]
            assert [(one.content, one.data["state"]) for one in answers] == [
                ("Hel", "partial"),
                ("Hel whole", "complete"),
            ]
