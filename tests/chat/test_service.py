"""Chats on a host: five ways to say something, one way to be answered, and answers that are kept however runs end."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from functools import partial
from typing import Any

import pytest

from penstock.agents.messages import Media, ToolCall
from penstock.agents.model import ModelRequest
from penstock.agents.scripted import ScriptedModel
from penstock.chat.conversation import ChatMessage
from penstock.chat.turn import ChatTurn
from penstock.errors import InvalidValue
from penstock.hosting.host import GraphNotFound
from penstock.hosting.limits import HostSettings, RunLimits
from penstock.hosting.ports import Conflict
from penstock.nodes.parts.chat import GO_ON
from penstock.storage.memory import MemoryStores
from tests.chat.chats import ALONE, ANN, Chats, Histories, Slow, chatting, hosted
from tests.nodes.graphs import graph, node


async def say(chats: Chats, content: str, **options: Any) -> tuple[ChatTurn, ChatMessage]:
    turn = await chats.service.stream_chat(chats.chat_id, content, owner=ANN, **options)
    return turn, await turn.result()


async def shown(chats: Chats) -> list[tuple[str, str]]:
    tree = await chats.service.tree(chats.chat_id)
    return [(one.role, one.content) for one in tree.active_path()]


@pytest.mark.requirement("K-10")
async def test_all_five_entry_points_run_one_path() -> None:
    """Each submits one run of the same shape, which differs in the ids of its messages and in nothing else."""
    histories = Histories()
    async with chatting(models={"A": histories.model}) as chats:
        service, chat_id = chats.service, chats.chat_id
        first, answer = await say(chats, "one")
        again = await service.retry_message(chat_id, answer.id, owner=ANN)
        await again.result()
        more = await service.continue_message(chat_id, again.message_id, owner=ANN)
        await more.result()
        edited = await service.edit_user_message(chat_id, str(first.user_message_id), "uno", owner=ANN)
        await edited.result()
        new = await service.stream_agent_chat("g", "two", owner=ANN)
        await new.result()
        turns = [first, again, more, edited, new]
        assert len(chats.host.submitted) == len(turns)
        for turn, submitted in zip(turns, chats.host.submitted, strict=True):
            assert submitted == {
                "owner": ANN,
                "graph_id": "g",
                "version": None,
                "input": None,
                "limits": None,
                "run_id": turn.run_id,
                "origin": {
                    "kind": "chat",
                    "chat_id": turn.chat_id,
                    "message_id": turn.message_id,
                    "user_message_id": turn.user_message_id,
                },
            }
        ways = [[one.type async for one in turn.events() if one.type.startswith(("run.", "node."))] for turn in turns]
        assert all(way == ways[0] for way in ways)
        assert [turn.user_message_id is None for turn in turns] == [False, True, True, False, False]
    assert histories.requests == [
        [("user", "one")],
        [("user", "one")],
        [("user", "one"), ("assistant", "answer 2"), ("user", GO_ON)],
        [("user", "uno")],
        [("user", "two")],
    ]


@pytest.mark.requirement("K-15")
async def test_retry_and_edit_add_siblings_and_nothing_is_deleted() -> None:
    async with chatting(models={"A": Histories().model}) as chats:
        first, answer = await say(chats, "one")
        again = await chats.service.retry_message(chats.chat_id, answer.id, owner=ANN)
        await again.result()
        assert await shown(chats) == [("user", "one"), ("assistant", "answer 2")]
        edited = await chats.service.edit_user_message(chats.chat_id, str(first.user_message_id), "uno", owner=ANN)
        await edited.result()
        assert await shown(chats) == [("user", "uno"), ("assistant", "answer 3")]
        tree = await chats.service.tree(chats.chat_id)
        assert [one.content for one in tree] == ["one", "answer 1", "answer 2", "uno", "answer 3"]
        assert [one.id for one in tree.siblings(answer.id)] == [answer.id, again.message_id]
        assert str(tree.place_of(str(edited.user_message_id))) == "‹2/2›"
        switched = await chats.service.switch(chats.chat_id, answer.id, owner=ANN)
        assert [one.content for one in switched.active_path()] == ["one", "answer 1"]


async def test_earlier_messages_are_the_history_of_the_next_turn() -> None:
    histories = Histories()
    async with chatting(models={"A": histories.model}) as chats:
        _, answer = await say(chats, "one")
        await say(chats, "two")
        await say(chats, "three", parent_id=answer.id)
        assert await shown(chats) == [
            ("user", "one"),
            ("assistant", "answer 1"),
            ("user", "three"),
            ("assistant", "answer 3"),
        ]
    assert histories.requests[1] == [("user", "one"), ("assistant", "answer 1"), ("user", "two")]
    assert histories.requests[2] == [("user", "one"), ("assistant", "answer 1"), ("user", "three")]


async def test_answer_exists_from_the_start_and_is_complete_with_the_last_event() -> None:
    slow = Slow("Hel", "lo")
    async with chatting(models={"A": slow}) as chats:
        turn = await chats.service.stream_chat(chats.chat_id, "hi", owner=ANN)
        await slow.begun.wait()
        message = await chats.stores.chats.message(chats.chat_id, turn.message_id)
        assert (message.content, message.data["state"], message.data["run_id"]) == ("", "writing", turn.run_id)
        slow.may_end.set()
        async for event in turn.events():
            if event.type == "run.completed":
                message = await chats.stores.chats.message(chats.chat_id, turn.message_id)
                assert (message.content, message.data["state"]) == ("Hello whole", "complete")
        assert await turn.result() == message


async def test_text_of_a_cancelled_answer_is_kept_and_can_be_continued() -> None:
    slow, histories = Slow("Hel", "lo"), Histories()
    models: dict[str, Any] = {"A": slow}
    async with chatting(models=models) as chats:
        turn = await chats.service.stream_chat(chats.chat_id, "hi", owner=ANN)
        await slow.begun.wait()
        await turn.cancel("enough", by=ANN)
        message = await turn.result()
        assert (message.content, message.data["state"], message.data["error"]) == ("Hello", "partial", "enough")
        models["A"] = histories.model
        more = await chats.service.continue_message(chats.chat_id, message.id, owner=ANN)
        assert (await more.result()).parent_id == message.id
    assert histories.requests == [[("user", "hi"), ("assistant", "Hello"), ("user", GO_ON)]]


async def test_failed_answer_has_its_error_and_the_chat_continues() -> None:
    histories = Histories()
    models: dict[str, Any] = {"A": ScriptedModel([ValueError("the wall \ud800 cracked")])}
    async with chatting(models=models) as chats:
        _, message = await say(chats, "one")
        assert (message.content, message.data["state"]) == ("", "failed")
        assert "cracked" in message.data["error"]
        models["A"] = histories.model
        assert (await say(chats, "two"))[1].content == "answer 1"
    assert histories.requests == [[("user", "one"), ("user", "two")]]


async def test_an_answer_that_a_limit_halts_says_so_and_a_grant_gives_one_beside_it() -> None:
    async def look() -> str:
        return "221 m"

    document = graph([node("start", "chat-start"), node("A", "agent", model="A", tools=["look"])], ["start > A"])
    model = ScriptedModel([ToolCall("1", "look", {}), "221 m high", "221 m high"])
    async with chatting(document, {"A": model}, tools={"look": look}) as chats:
        turn, message = await say(chats, "how high?", limits=RunLimits(max_api_calls=1))
        assert message.data["state"] == "halted"
        assert message.data["stop_reason"]
        await chats.host.grant(turn.run_id, RunLimits(max_api_calls=5), by="root")
        answer = await turn.result()
        assert (answer.content, answer.data["state"]) == ("221 m high", "complete")
        tree = await chats.service.tree(chats.chat_id)
        assert [one.data["state"] for one in tree.siblings(message.id)] == ["halted", "complete"]
        assert tree.leaf == answer
        run = await chats.host.get(turn.run_id)
        assert run is not None
        await chats.host.handlers["chat"].on_end(
            run._replace(epoch=run.epoch + 1), chats.stores
        )  # a worker died before it could tell
        assert len(await chats.service.tree(chats.chat_id)) == len(tree)


async def test_a_run_that_was_parked_finishes_the_same_answer_on_the_next_host() -> None:
    slow, stores = Slow("Hel", "lo"), MemoryStores()
    async with chatting(models={"A": slow}, stores=stores) as chats:
        turn = await chats.service.stream_chat(chats.chat_id, "hi", owner=ANN)
        await slow.begun.wait()
    parked = await stores.chats.message(chats.chat_id, turn.message_id)
    assert parked is not None
    assert parked.data["state"] == "writing"
    assert "kind_failures" not in chats.host.stats()["totals"]
    slow.may_end.set()
    async with hosted(stores, {"A": slow}) as chats:
        await chats.host.wait(turn.run_id)
        async with asyncio.timeout(10):
            while (message := await stores.chats.message(turn.chat_id, turn.message_id)).data["state"] == "writing":
                await stores.events.wait(turn.run_id, await stores.events.last_seq(turn.run_id), 0.01)
        assert (message.content, message.data["state"]) == ("Hello whole", "complete")
        assert len(await chats.service.tree(turn.chat_id)) == 2
    assert slow.calls == 2


@pytest.mark.requirement("K-14")
async def test_leaving_a_stream_that_cancels_leaves_nothing_running() -> None:
    slow = Slow("Hel", "lo")
    async with chatting(models={"A": slow}) as chats:
        turn = await chats.service.stream_chat(chats.chat_id, "hi", owner=ANN)
        async with aclosing(turn.events(on_leave="cancel")) as events:
            async for event in events:
                if event.type == "text.delta":
                    break
        run = await chats.host.get(turn.run_id)
        assert run is not None
        assert run.status == "cancelled"
        message = await turn.result()
        assert (message.content, message.data["state"]) == ("Hello", "partial")


@pytest.mark.requirement("K-14")
async def test_a_reader_that_is_cancelled_leaves_nothing_running_either() -> None:
    slow = Slow("Hel", "lo")
    async with chatting(models={"A": slow}) as chats:
        turn = await chats.service.stream_chat(chats.chat_id, "hi", owner=ANN)

        async def read() -> None:
            async with aclosing(turn.events(on_leave="cancel")) as events:
                async for _ in events:
                    pass

        reading = asyncio.create_task(read())
        await slow.begun.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        run = await chats.host.get(turn.run_id)
        assert run is not None
        assert run.status == "cancelled"


@pytest.mark.requirement("K-14")
async def test_a_run_that_may_go_on_without_its_reader_does_so_and_its_events_can_be_read_again() -> None:
    slow = Slow("Hel", "lo")
    async with chatting(models={"A": slow}) as chats:
        turn = await chats.service.stream_chat(chats.chat_id, "hi", owner=ANN)
        last = 0
        async with aclosing(turn.events(on_leave="continue")) as events:
            async for event in events:
                last = event.seq
                if event.type == "text.delta":
                    break
        slow.may_end.set()
        rest = [event async for event in turn.events(last)]
        assert [event.seq for event in rest] == list(range(last + 1, last + 1 + len(rest)))
        assert rest[-1].type == "run.completed"
        assert (await turn.result()).content == "Hello whole"


async def test_a_stream_that_came_to_its_end_cancels_nothing() -> None:
    async with chatting(models={"A": Histories().model}) as chats:
        turn = await chats.service.stream_chat(chats.chat_id, "hi", owner=ANN)
        types = [event.type async for event in turn.events(on_leave="cancel")]
        assert types[-1] == "run.completed"
        assert (await turn.result()).data["state"] == "complete"


async def test_a_message_below_an_unfinished_answer_gets_the_history_as_of_its_submission() -> None:
    """The next run begins when there is room for it, and does not get the answer above it that has come by then."""
    slow = Slow("Hel", "lo")
    histories = Histories()
    models: dict[str, Any] = {"A": slow}
    settings = HostSettings(tick_s=0.05, drain_s=0, max_running=1)
    async with chatting(models=models, settings=settings) as chats:
        first = await chats.service.stream_chat(chats.chat_id, "one", owner=ANN)
        await slow.begun.wait()
        models["A"] = histories.model
        second = await chats.service.stream_chat(chats.chat_id, "two", owner=ANN, parent_id=first.message_id)
        slow.may_end.set()
        await asyncio.gather(first.result(), second.result())
        assert [text for _, text in await shown(chats)] == ["one", "Hello whole", "two", "answer 1"]
    assert histories.requests == [[("user", "one"), ("user", "two")]]


async def test_two_turns_at_once_are_two_branches() -> None:
    async with chatting(models={"A": Histories().model}) as chats:
        _, answer = await say(chats, "one")
        turns = await asyncio.gather(
            *(
                chats.service.stream_chat(chats.chat_id, text, owner=ANN, parent_id=answer.id)
                for text in ("left", "right")
            )
        )
        answers = await asyncio.gather(*(turn.result() for turn in turns))
        assert {one.data["state"] for one in answers} == {"complete"}
        tree = await chats.service.tree(chats.chat_id)
        assert {one.content for one in tree.replies(answer.id)} == {"left", "right"}


async def test_a_turn_that_begins_while_another_is_under_way_is_a_branch_beside_it() -> None:
    slow, histories = Slow("1, 2"), Histories()
    models: dict[str, Any] = {"A": histories.model}
    async with chatting(models=models) as chats:
        _, answer = await say(chats, "one")
        models["A"] = slow
        counting = await chats.service.stream_chat(chats.chat_id, "count to 60", owner=ANN)
        await slow.begun.wait()
        models["A"] = histories.model
        greeting, hello = await say(chats, "hello")
        tree = await chats.service.tree(chats.chat_id)
        assert [one.content for one in tree.replies(answer.id)] == ["count to 60", "hello"]
        assert await shown(chats) == [
            ("user", "one"),
            ("assistant", "answer 1"),
            ("user", "hello"),
            ("assistant", "answer 2"),
        ]
        slow.may_end.set()
        await counting.result()
        tree = await chats.service.tree(chats.chat_id)
        assert tree[str(greeting.user_message_id)].parent_id == answer.id
        assert tree.leaf == hello, "the newest turn is in view, also when an older one has ended"
    assert histories.requests[-1] == [("user", "one"), ("assistant", "answer 1"), ("user", "hello")]


async def test_a_first_turn_that_is_under_way_has_the_next_beside_it_at_the_beginning() -> None:
    slow, histories = Slow("1, 2"), Histories()
    models: dict[str, Any] = {"A": slow}
    async with chatting(models=models) as chats:
        counting = await chats.service.stream_chat(chats.chat_id, "count to 60", owner=ANN)
        await slow.begun.wait()
        models["A"] = histories.model
        await say(chats, "hello")
        slow.may_end.set()
        await counting.result()
        tree = await chats.service.tree(chats.chat_id)
        assert [one.content for one in tree.replies(None)] == ["count to 60", "hello"]
    assert histories.requests == [[("user", "hello")]]


@pytest.mark.parametrize("again", ["retry", "continue"])
async def test_a_message_sent_while_an_answer_is_retried_or_continued_has_the_parent_of_that_answer(again: str) -> None:
    slow, histories = Slow("1, 2"), Histories()
    models: dict[str, Any] = {"A": histories.model}
    async with chatting(models=models) as chats:
        turn, answer = await say(chats, "one")
        models["A"] = slow
        ask = chats.service.retry_message if again == "retry" else chats.service.continue_message
        under_way = await ask(chats.chat_id, answer.id, owner=ANN)
        await slow.begun.wait()
        models["A"] = histories.model
        then, _ = await say(chats, "two")
        slow.may_end.set()
        await under_way.result()
        tree = await chats.service.tree(chats.chat_id)
        follows = tree[str(then.user_message_id)].parent_id
        assert follows == tree[under_way.message_id].parent_id
        assert follows == (turn.user_message_id if again == "retry" else answer.id)


async def test_turns_under_way_below_each_other_are_not_built_upon_either() -> None:
    slow, histories = Slow("1, 2"), Histories()
    models: dict[str, Any] = {"A": histories.model}
    async with chatting(models=models) as chats:
        _, answer = await say(chats, "one")
        models["A"] = slow
        first = await chats.service.stream_chat(chats.chat_id, "two", owner=ANN)
        below = await chats.service.stream_chat(chats.chat_id, "three", owner=ANN, parent_id=first.message_id)
        await slow.begun.wait()
        models["A"] = histories.model
        last, _ = await say(chats, "four")
        slow.may_end.set()
        await asyncio.gather(first.result(), below.result())
        tree = await chats.service.tree(chats.chat_id)
        assert tree[str(last.user_message_id)].parent_id == answer.id


async def test_the_same_run_id_again_is_the_same_turn() -> None:
    histories = Histories()
    async with chatting(models={"A": histories.model}) as chats:
        first, _ = await say(chats, "one", run_id="mine")
        second, _ = await say(chats, "one", run_id="mine")
        assert (first, first.run_id) == (second, "mine")
        new = await chats.service.stream_agent_chat("g", "hello", owner=ANN, run_id="another")
        assert await chats.service.stream_agent_chat("g", "hello", owner=ANN, run_id="another") == new
        with pytest.raises(Conflict, match="'mine'"):
            await chats.service.stream_agent_chat("g", "hello", owner=ANN, run_id="mine")
        assert len(await chats.service.tree(chats.chat_id)) == 2
        await new.result()
        states = [
            one.data.get("state")
            for chat in await chats.stores.chats.list()
            for one in await chats.service.tree(chat.id)
        ]
        assert states == ["complete"] * 4
    assert len(histories.requests) == 2


async def test_same_run_id_with_another_message_is_a_conflict() -> None:
    histories = Histories()
    async with chatting(models={"A": histories.model}) as chats:
        first, _ = await say(chats, "one", run_id="mine")
        service, earlier = chats.service, [{"role": "user", "content": "0"}, {"role": "assistant", "content": "1"}]
        new = await service.stream_agent_chat(
            "g", [*earlier, {"role": "user", "content": "2"}], owner=ANN, run_id="new"
        )
        await new.result()
        wrong = [
            lambda: service.stream_chat(chats.chat_id, "two", owner=ANN, run_id="mine"),
            lambda: service.retry_message(chats.chat_id, first.message_id, owner=ANN, run_id="mine"),
            lambda: service.continue_message(chats.chat_id, first.message_id, owner=ANN, run_id="mine"),
            lambda: service.edit_user_message(
                chats.chat_id, str(first.user_message_id), "two", owner=ANN, run_id="mine"
            ),
            lambda: service.stream_agent_chat("g", "2", owner=ANN, run_id="new"),
            lambda: service.stream_agent_chat(
                "g", [*earlier, *earlier, {"role": "user", "content": "2"}], owner=ANN, run_id="new"
            ),
        ]
        for ask in wrong:
            with pytest.raises(Conflict, match="answers something else"):
                await ask()
        again = await service.retry_message(chats.chat_id, first.message_id, owner=ANN, run_id="again")
        assert await service.retry_message(chats.chat_id, first.message_id, owner=ANN, run_id="again") == again
        await again.result()
    assert len(histories.requests) == 3


async def test_a_turn_that_was_interrupted_before_its_run_was_there_is_taken_up_by_asking_again() -> None:
    async with chatting(models={"A": Histories().model}) as chats:
        turn, _ = await say(chats, "one", run_id="mine")
        written = await chats.service.tree(chats.chat_id)
    stores = MemoryStores()
    async with chatting(models={"A": Histories().model}, stores=stores) as chats:
        interrupted = [written[str(turn.user_message_id)]]
        unfinished = ChatMessage(turn.message_id, turn.user_message_id, "assistant", "", 0, {"state": "writing"})
        await stores.chats.add_messages(chats.chat_id, [*interrupted, unfinished], now_ms=0)
        with pytest.raises(Conflict, match="answers something else"):
            await chats.service.stream_chat(chats.chat_id, "two", owner=ANN, run_id="mine")
        again, answer = await say(chats, "one", run_id="mine")
        assert (again.user_message_id, again.message_id) == (turn.user_message_id, turn.message_id)
        assert answer.content == "answer 1"
        assert len(await chats.service.tree(chats.chat_id)) == 2


async def test_a_cancel_that_comes_before_the_turn_is_not_lost() -> None:
    async with chatting(models={"A": Histories().model}) as chats:
        await chats.host.cancel("mine", reason="too late", by=ANN)
        _, message = await say(chats, "one", run_id="mine")
        assert (message.content, message.data["state"], message.data["error"]) == ("", "partial", "too late")


async def test_what_could_never_be_run_is_refused_before_anything_is_written() -> None:
    async with chatting(settings=HostSettings(ceilings=RunLimits(max_steps=5))) as chats:
        service = chats.service
        nowhere = await service.create_chat(owner=ANN, graph_id="nothing")
        with pytest.raises(GraphNotFound, match="nothing"):
            await service.stream_chat(nowhere.id, "one", owner=ANN)
        with pytest.raises(InvalidValue, match="run_id"):
            await service.stream_chat(chats.chat_id, "one", owner=ANN, run_id="no id")
        for limits in (RunLimits(max_steps=6), {"max_steps": 6}, {"max_steps": -1}, {"what": 1}):
            with pytest.raises(InvalidValue, match="max_steps"):
                await service.stream_chat(chats.chat_id, "one", owner=ANN, limits=limits)
        assert not await chats.stores.runs.list()
        assert [len(await service.tree(id)) for id in (nowhere.id, chats.chat_id)] == [0, 0]


async def test_a_graph_that_a_chat_cannot_enter_fails_with_what_is_missing() -> None:
    async with chatting(graph([node("A", "agent", model="A")]), {"A": Histories().model}) as chats:
        _, message = await say(chats, "one")
        assert message.data["state"] == "failed"
        assert "chat-start" in message.data["error"]


async def test_a_graph_that_begins_with_an_input_can_be_talked_to_as_well() -> None:
    histories = Histories()
    document = graph([node("in", "input"), node("A", "agent", model="A")], ["in > A"])
    async with chatting(document, {"A": histories.model}) as chats:
        await say(chats, "one")
        await say(chats, "two")
    assert histories.requests[1] == [("user", "one"), ("assistant", "answer 1"), ("user", "two")]


async def test_a_conversation_that_was_had_elsewhere_goes_on_in_a_chat_of_its_own() -> None:
    histories = Histories()
    async with chatting(models={"A": histories.model}) as chats:
        before = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "1"},
            {"role": "user", "content": "two\n  times"},
        ]
        turn = await chats.service.stream_agent_chat("g", before, owner=ANN)
        await turn.result()
        chat = await chats.service.get_chat(turn.chat_id, owner=ANN)
        assert chat.title == "two times"
        assert len(await chats.service.tree(turn.chat_id)) == 5
    assert histories.requests == [[(one["role"], one["content"]) for one in before]]


async def test_attachments_are_shown_to_the_agent_and_are_in_no_event_and_no_journal() -> None:
    seen: list[Any] = []

    def answer(request: ModelRequest) -> str:
        seen.append(request.messages[-1].content)
        return "a picture"

    async with chatting(models={"A": ScriptedModel(answer)}) as chats:
        kept = await chats.service.attach(ANN, "dam.png", "IMAGE/png", b"bytes of a picture")
        turn, _ = await say(chats, "what is it?", attachments=[kept.id])
        edited = await chats.service.edit_user_message(chats.chat_id, str(turn.user_message_id), "and now?", owner=ANN)
        await edited.result()
        bare = await chats.service.edit_user_message(
            chats.chat_id, str(turn.user_message_id), "bare", owner=ANN, attachments=()
        )
        await bare.result()
        message = await chats.stores.chats.message(chats.chat_id, turn.user_message_id)
        reference = {"id": kept.id, "name": "dam.png", "media_type": "image/png", "size": 18}
        assert message.data["attachments"] == [reference]
        picture = Media("image/png", data=b"bytes of a picture")
        assert seen == [("what is it?", picture), ("and now?", picture), "bare"]
        events = [event async for event in turn.events()]
        assert "bytes of" not in repr(events)
        journal = [one async for one in _entries(chats, turn.run_id)]
        assert "bytes of" not in repr(journal)


async def test_a_reference_to_what_is_not_the_owners_shows_nothing() -> None:
    """Whatever a message says: whose bytes they are is looked at when they are read."""
    seen: list[str] = []
    model = ScriptedModel(lambda request: seen.append(request.messages[0].text) or "ok")
    async with chatting(models={"A": model}) as chats:
        kept = await chats.service.attach("bob", "plan.txt", "text/plain", b"bob's secret")
        reference = {"id": kept.id, "name": kept.name, "media_type": kept.media_type, "size": kept.size}
        forged = ChatMessage("forged", None, "user", "look", 0, {"attachments": [reference]})
        await chats.stores.chats.add_messages(chats.chat_id, [forged], now_ms=0)
        await say(chats, "and?")
    assert "plan.txt" in seen[0]
    assert "secret" not in seen[0]


async def _entries(chats: Chats, run_id: str) -> Any:
    for one in await chats.stores.journal.load(run_id):
        yield one


async def test_the_users_tools_are_those_that_the_service_offers_by_name() -> None:
    async def diary() -> str:
        return "dear diary"

    document = graph([node("start", "chat-start", includeUserTools=True), node("A", "agent", model="A")], ["start > A"])
    tools: list[list[str]] = []
    model = ScriptedModel(lambda request: tools.append([one.name for one in request.tools]) or "ok")
    async with chatting(document, {"A": model}, tools={"diary": diary}) as chats:
        await say(chats, "one", user_tools=["diary"])
        await say(chats, "two")
        _, failed = await say(chats, "three", user_tools=["mail"])
        assert "'mail'" in failed.data["error"]
    assert tools == [["diary"], []]


async def test_an_answer_that_is_being_written_cannot_be_continued_yet() -> None:
    slow = Slow("x")
    async with chatting(models={"A": slow}) as chats:
        turn = await chats.service.stream_chat(chats.chat_id, "hi", owner=ANN)
        with pytest.raises(Conflict, match="still being written"):
            await chats.service.continue_message(chats.chat_id, turn.message_id, owner=ANN)
        slow.may_end.set()
        await turn.result()


async def test_the_record_of_a_run_holds_nothing_of_earlier_turns() -> None:
    """The storage of a long chat grows with its length, not with the square of it."""
    async with chatting(models={"A": Histories().model}) as chats:
        await say(chats, "the secret of the first turn")
        turn, _ = await say(chats, "second")
        run = await chats.host.get(turn.run_id)
        events = [dict(event.data) async for event in turn.events()]
        assert "secret" not in repr(run)
        assert "secret" not in json.dumps(events)


def test_the_graph_of_these_tests_streams() -> None:
    assert ALONE["nodes"][1]["data"]["stream"]


NEW = graph([node("start", "chat-start"), node("t", "prompt-template", template="new")], ["start > t"])


async def test_a_turn_is_answered_by_the_version_that_is_named_and_keeps_its_about() -> None:
    histories = Histories()
    async with chatting(models={"A": histories.model}) as chats:
        service = chats.service
        await chats.stores.graphs.save("g", ANN, "new", NEW, now_ms=1)
        old = await service.stream_chat(chats.chat_id, "one", owner=ANN, version=1, about={"from": "☀", "n": [1]})
        assert (await old.result()).content == "answer 1"
        new = await service.stream_chat(chats.chat_id, "two", owner=ANN)
        assert (await new.result()).content == "new"
        begun = await service.stream_agent_chat("g", "three", owner=ANN, version=1)
        assert (await begun.result()).content == "answer 2"
        runs = [await chats.host.get(turn.run_id) for turn in (old, new, begun)]
        assert [run.graph_version for run in runs if run] == [1, 2, 1]
        assert [run.origin.get("about") for run in runs if run] == [{"from": "☀", "n": [1]}, None, None]


async def test_a_version_that_is_not_there_is_refused_before_anything_is_written() -> None:
    async with chatting() as chats:
        with pytest.raises(GraphNotFound, match="version 7 of graph 'g'"):
            await chats.service.stream_chat(chats.chat_id, "x", owner=ANN, version=7)
        assert len(await chats.service.tree(chats.chat_id)) == 0


async def test_the_same_run_id_for_another_version_is_a_conflict() -> None:
    async with chatting(models={"A": Histories().model}) as chats:
        await chats.stores.graphs.save("g", ANN, "new", NEW, now_ms=1)
        ask = partial(chats.service.stream_chat, chats.chat_id, "x", owner=ANN, run_id="r")
        first = await ask(version=1)
        assert (await ask(version=1)).message_id == first.message_id
        assert (await ask()).message_id == first.message_id, "whichever was the newest then"
        with pytest.raises(Conflict, match="answers something else"):
            await ask(version=2)
        await first.result()


async def test_a_chat_that_is_there_is_given_back_to_its_owner_and_with_its_graph_alone() -> None:
    async with chatting() as chats:
        service = chats.service
        chat = await service.create_chat(owner=ANN, graph_id="g", chat_id="mine", title="first")
        assert await service.create_chat(owner=ANN, graph_id="g", chat_id="mine", title="second") == chat
        for other, why in (({"graph_id": "h"}, "uses graph 'g'"), ({"owner": "bob"}, "is another owner's")):
            with pytest.raises(Conflict, match=why):
                await service.create_chat(**{"owner": ANN, "graph_id": "g", "chat_id": "mine", **other})
