"""Runs that answer in a chat: their input and that of their forks, and the answer that is stored when they end."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.chat.conversation import MAX_CHARACTERS, ChatMessage
from penstock.chat.turn import (
    CUT,
    KIND,
    MAX_ERROR,
    PAGE,
    answer_text,
    as_content,
    chat_services,
    history_of,
    newest_text,
    partial_text,
    written,
)
from penstock.errors import InvalidValue
from penstock.hosting.host import UNSET
from penstock.hosting.ports import HostedEvent, RunRecord
from penstock.kernel.document import parse_graph
from tests.chat.chats import ALONE, ANN, Chats, Histories, Slow, chatting
from tests.nodes.graphs import graph, node

ENTERED = graph([node("start", "input"), node("A", "agent", model="A")], ["start > A"])
"""A graph without a chat-start: a chat enters it at its input."""


async def forked(chats: Chats, run_id: str, input: Any = UNSET, *, at: str = "start") -> RunRecord:
    fork = await chats.host.fork(run_id, owner=ANN, at=at, input=input)
    return await chats.host.wait(fork.id)


@pytest.mark.parametrize("document", [ALONE, ENTERED])
async def test_a_fork_where_the_chat_enters_gets_its_input_as_the_last_user_message(document: Any) -> None:
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
    assert histories.requests[2:] == [
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
    assert histories.requests[-1] == [("user", "count to 8")]


async def test_a_fork_may_be_given_a_conversation_and_keeps_what_was_attached_otherwise() -> None:
    histories = Histories()
    async with chatting(models={"A": histories.model}) as chats:
        dam = await chats.service.attach(ANN, "dam.txt", "text/plain", b"90 m")
        turn = await chats.service.stream_chat(chats.chat_id, "how high?", owner=ANN, attachments=[dam])
        await turn.result()
        await forked(chats, turn.run_id, "how wide?")
        earlier = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "1"}]
        await forked(chats, turn.run_id, {"messages": [*earlier, {"role": "user", "content": "two"}]})
        wrong = await forked(chats, turn.run_id, {"messages": [{"role": "stranger", "content": "x"}]})
        assert (wrong.status, "messages[0]" in str(wrong.error)) == ("failed", True)
    wide, conversation = histories.requests[1:]
    assert [(role, "how wide?" in text and "90 m" in text) for role, text in wide] == [("user", True)]
    assert conversation == [("user", "one"), ("assistant", "1"), ("user", "two")]


async def test_an_input_behind_the_start_comes_into_its_node_and_leaves_the_history() -> None:
    histories = Histories()
    async with chatting(models={"A": histories.model}) as chats:
        turn = await chats.service.stream_chat(chats.chat_id, "hello", owner=ANN)
        await turn.result()
        await forked(chats, turn.run_id, "in other words", at="A")
    assert histories.requests[-1] == [("user", "hello"), ("user", "in other words")]


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
    deltas = [HostedEvent(at, 0, "text.delta", {"node_id": "A", "text": piece}) for at, piece in enumerate(pieces, 1)]
    async with chatting() as chats:
        await chats.host.close()
        writing = ChatMessage("a", None, "assistant", "", 0, {"state": "writing", "run_id": "r"})
        await chats.stores.chats.add_messages(chats.chat_id, [writing], now_ms=0)
        await chats.stores.runs.add(
            RunRecord("r", ANN, "g", 1, origin={"kind": KIND, "chat_id": chats.chat_id, "message_id": "a"})
        )
        await chats.stores.runs.claim("w", now_ms=0, lease_ms=1_000)
        await chats.stores.events.append("r", 1, deltas)
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


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ("text", "text"),
        (None, ""),
        ({"output": "text"}, "text"),
        ({"output": None}, ""),
        ({"a.output": "one", "b.output": "two"}, "one\n\ntwo"),
        ({"metres": 221}, '{"metres": 221}'),
        ({"output": {"höhe": 221}}, '{"höhe": 221}'),
        ([1, "x"], '[1, "x"]'),
        ({}, "{}"),
        (0, "0"),
        (False, "false"),
        (float("nan"), "NaN"),
        ("half \ud800 a pair", "half ? a pair"),
    ],
)
def test_what_a_graph_came_to_is_an_answer(output: Any, text: str) -> None:
    assert answer_text(output) == text
    ChatMessage("a", None, "assistant", answer_text(output), 0)


def test_answer_that_is_too_long_is_truncated_and_marked() -> None:
    cut = as_content("x" * (MAX_CHARACTERS + 1))
    assert len(cut) == MAX_CHARACTERS
    assert cut.endswith(CUT)


def events_of(*events: tuple[str, str, str] | str) -> list[HostedEvent]:
    """Pieces as (node, source, text); a word alone is another event."""
    made: list[HostedEvent] = []
    for seq, one in enumerate(events, 1):
        if isinstance(one, str):
            made.append(HostedEvent(seq, 0, one))
        else:
            node_id, source, text = one
            made.append(HostedEvent(seq, 0, "text.delta", {"node_id": node_id, "source": source, "text": text}))
    return made


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ([], ""),
        (["run.started"], ""),
        (["run.started", ("A", "main/A", "Hel"), ("A", "main/A", "lo")], "Hello"),
        ([("A", "main/A", "first"), ("B", "main/B", "sec"), ("B", "main/B", "ond")], "second"),
        ([("A", "main/A", "Let me ask. "), ("A", "main/A/helper", "221"), ("A", "main/A", "It")], "Let me ask. It"),
        ([("T", "main/T/wide", "routed")], "routed"),
        (["run.started", ("A", "main/A", "Hel"), "run.resumed", ("A", "main/A", "Hello, ag")], "Hello, ag"),
        (["run.started", ("A", "main/A", "Hel"), "run.resumed"], "Hel"),
        ([("A", "main/A", "a"), ("B", "main/B", "b"), ("A", "main/A", "c")], "ac"),
        ([("A", "main/A", "text"), ("B", "main/B", "")], "text"),
    ],
)
def test_text_emitted_of_an_interrupted_answer(events: Any, text: str) -> None:
    assert partial_text(events_of(*events)) == text


def test_history_leaves_out_empty_messages_and_keeps_references() -> None:
    attached = [{"id": "x", "name": "n", "media_type": "image/png", "size": 1}]
    path = [
        ChatMessage("1", None, "user", "hi", 0),
        ChatMessage("2", "1", "assistant", "", 0, {"state": "failed"}),
        ChatMessage("3", "2", "user", "", 0, {"attachments": attached}),
        ChatMessage("4", "3", "assistant", "half", 0, {"state": "partial"}),
    ]
    history = history_of(path)
    assert history == [
        {"role": "user", "content": "hi"},
        {"role": "user", "content": "", "attachments": attached},
        {"role": "assistant", "content": "half"},
    ]
    assert newest_text(history) == ""
    assert newest_text(history[:1]) == "hi"
    assert newest_text([]) == ""


def test_a_chat_enters_at_chat_starts_else_at_inputs_else_nowhere() -> None:
    both = parse_graph(graph([node("s", "chat-start"), node("i", "input"), node("a", "agent", model="m")], ["s > a"]))
    assert chat_services(both)["execution"] == {"entry_node_ids": ["s"]}
    plain = parse_graph(graph([node("i", "input"), node("a", "agent", model="m")], ["i > a"]))
    services = chat_services(plain)
    assert services["execution"] == {"entry_node_ids": ["i"]}
    assert services["chat_scope"].is_entry_agent("a")
    with pytest.raises(InvalidValue, match="chat-start"):
        chat_services(parse_graph(graph([node("a", "agent", model="m")])))


def test_data_of_an_answer_has_the_outcome_of_its_run() -> None:
    run = RunRecord("r", "ann", "g", 1, status="halted", stop_reason="budget_exceeded", error="x" * 5_000)
    data = written(run)
    assert data["state"] == "halted"
    assert data["stop_reason"] == "budget_exceeded"
    assert len(data["error"]) == MAX_ERROR
    done = written(RunRecord("r", "ann", "g", 1, status="completed", cost_nanos=1_500_000, error="old"))
    assert done == {"state": "complete", "run_id": "r", "cost_usd": 0.0015, "attachments": []}
