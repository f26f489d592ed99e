"""What every `ChatStore` must do."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

from penstock.chat.conversation import MessageTree
from penstock.chat.message import ChatMessage
from penstock.chat.ports import Marked
from penstock.errors import InvalidValue
from penstock.hosting.ports import Conflict
from penstock.testing.contracts.stores.suite import (
    NOT_NAMES,
    ODD_NAMES,
    ODD_VALUES,
    StoreBundle,
    StoreContract,
    a_chat,
    a_message,
    an_attachment,
    brought_to,
    claimed,
    fresh,
    raises,
    until_nothing,
)


class ChatStoreContract(StoreContract):
    """Chats by id, their messages as a tree that only grows, and what is attached."""

    @fresh
    async def test_a_chat_comes_back_as_it_was_created(self, stores: StoreBundle) -> None:
        chat = a_chat(title="T\x00\u00fc\ud83d", created_ms=1, updated_ms=2)
        assert await stores.chats.create(chat) == chat
        assert await stores.chats.get("c") == chat
        assert list(await stores.chats.list()) == [chat]
        for id in ("nobody", "", *NOT_NAMES):
            assert await stores.chats.get(id) is None
            assert list(await stores.chats.list(owner=id)) == []

    @fresh
    async def test_a_chat_is_created_once(self, stores: StoreBundle) -> None:
        chat = await stores.chats.create(a_chat(title="first"))
        assert await stores.chats.create(a_chat(title="second", graph_id="h", created_ms=9)) == chat
        with raises(Conflict):
            await stores.chats.create(a_chat(owner="bob"))
        assert await stores.chats.get("c") == chat

    @fresh
    async def test_a_chat_that_no_database_could_keep_is_refused(self, stores: StoreBundle) -> None:
        for name in NOT_NAMES:
            for chat in (a_chat(name), a_chat(owner=name), a_chat(graph_id=name)):
                with raises(InvalidValue):
                    await stores.chats.create(chat)
        with raises(InvalidValue):
            await stores.chats.create(a_chat(created_ms=2**63))
        await stores.chats.create(a_chat())
        with raises(InvalidValue):
            await stores.chats.add_messages("c", [a_message("fine"), a_message("a\x00")], now_ms=1)
        assert list((await stores.chats.messages("c"))[0]) == []

    @fresh
    async def test_chats_are_listed_the_one_used_last_first_a_page_at_a_time(self, stores: StoreBundle) -> None:
        for number, id in enumerate(ODD_NAMES):
            await stores.chats.create(a_chat(id, updated_ms=number // 3))
        await stores.chats.create(a_chat("another's", owner="bob", updated_ms=1))
        expected = sorted(((number // 3, id) for number, id in enumerate(ODD_NAMES)), reverse=True)
        found = await until_nothing(lambda last: stores.chats.list(owner="ann", before=last, limit=4))
        assert [chat.id for chat in found] == [id for _, id in expected]
        assert len(await stores.chats.list()) == len(ODD_NAMES) + 1
        assert list(await stores.chats.list(limit=0)) == list(await stores.chats.list(before="nobody")) == []
        with raises(InvalidValue):
            await stores.chats.list(limit=-1)

    @fresh
    async def test_whatever_is_said_or_renamed_makes_a_chat_the_one_used_last(self, stores: StoreBundle) -> None:
        for id in ("1", "2", "3"):
            await stores.chats.create(a_chat(id))
        await stores.chats.rename("1", "new", now_ms=2_000)
        await stores.chats.add_messages("2", [a_message("m"), a_message("n", "m", state="writing")], now_ms=3_000)
        assert [chat.id for chat in await stores.chats.list()] == ["2", "1", "3"]
        await stores.chats.rename("1", "newer", now_ms=4_000)
        await stores.chats.finish_message("2", "n", "done", {"state": "complete"}, now_ms=5_000)
        assert [(chat.id, chat.updated_ms) for chat in await stores.chats.list()][:2] == [("2", 5_000), ("1", 4_000)]

    @fresh
    async def test_a_chat_gets_another_title(self, stores: StoreBundle) -> None:
        chat = await stores.chats.create(a_chat())
        renamed = await stores.chats.rename("c", "\x00\ud83d new", now_ms=2_000)
        assert renamed == replace(chat, title="\x00\ud83d new", updated_ms=2_000)
        assert await stores.chats.get("c") == renamed
        with raises(KeyError):
            await stores.chats.rename("nobody", "x", now_ms=1)

    @fresh
    async def test_messages_come_back_in_the_order_they_were_added(self, stores: StoreBundle) -> None:
        await stores.chats.create(a_chat())
        said = [a_message("z", None, "q\x00\u2028"), a_message("b", "z", "x" * 1_000_000, state="writing", a=[1])]
        await stores.chats.add_messages("c", said, now_ms=1)
        await stores.chats.add_messages("c", [a_message("a", "b")], now_ms=2)
        messages, in_view = await stores.chats.messages("c")
        assert list(messages) == [*said, a_message("a", "b")]
        assert set(in_view) <= {"z", "b", "a"}
        assert await stores.chats.message("c", "b") == said[1]

    @fresh
    async def test_messages_that_are_not_there_are_none(self, stores: StoreBundle) -> None:
        await stores.chats.create(a_chat("c"))
        await stores.chats.create(a_chat("d"))
        await stores.chats.add_messages("c", [a_message("m")], now_ms=1)
        assert await stores.chats.message("c", "nobody") is None
        assert await stores.chats.message("d", "m") is None
        assert await stores.chats.message("nobody", "m") is None
        for chat_id in ("d", "nobody"):
            messages, in_view = await stores.chats.messages(chat_id)
            assert (list(messages), list(in_view)) == ([], [])

    @fresh
    async def test_odd_data_comes_back_exactly_and_may_be_changed(self, stores: StoreBundle) -> None:
        await stores.chats.create(a_chat())
        keepable = [value for value in ODD_VALUES if "\\ud83d" not in repr(value)]
        said = [a_message(f"m{number}", None, value=value) for number, value in enumerate(keepable)]
        await stores.chats.add_messages("c", said, now_ms=1)
        for message in said:
            found = await stores.chats.message("c", message.id)
            assert repr(found) == repr(message)
            assert found is not None
            found.data.clear()  # type: ignore[attr-defined]
            assert await stores.chats.message("c", message.id) == message
        for message in (await stores.chats.messages("c"))[0]:
            message.data.clear()  # type: ignore[attr-defined]
        assert list((await stores.chats.messages("c"))[0]) == said

    @fresh
    async def test_a_message_that_is_there_is_skipped_if_it_is_the_same_in_every_field(
        self, stores: StoreBundle
    ) -> None:
        await stores.chats.create(a_chat())
        first, second = a_message("m", None, "q", a=1, b=2), a_message("n", "m")
        await stores.chats.add_messages("c", [first], now_ms=1)
        await stores.chats.add_messages("c", [a_message("m", None, "q", b=2, a=1), second, second], now_ms=2)
        assert list((await stores.chats.messages("c"))[0]) == [first, second]
        others = [replace(first, content="other"), replace(first, at_ms=2), replace(first, role="system")]
        others += [
            replace(first, data={"a": 1}),
            replace(first, data={"a": True, "b": 2}),
            replace(first, parent_id="n"),
        ]
        for other in others:
            with raises(Conflict):
                await stores.chats.add_messages("c", [a_message("new"), other], now_ms=3)
        assert list((await stores.chats.messages("c"))[0]) == [first, second]

    @fresh
    async def test_the_same_id_in_two_chats_is_two_messages(self, stores: StoreBundle) -> None:
        for id in ("c", "d"):
            await stores.chats.create(a_chat(id))
            await stores.chats.add_messages(id, [a_message("m", None, f"in {id}")], now_ms=1)
        for id in ("c", "d"):
            assert await stores.chats.message(id, "m") == a_message("m", None, f"in {id}")

    @fresh
    async def test_messages_are_added_all_or_none_each_below_one_that_is_there(self, stores: StoreBundle) -> None:
        await stores.chats.create(a_chat())
        await stores.chats.add_messages("c", [a_message("m")], now_ms=1)
        misplaced: list[list[ChatMessage]] = [
            [a_message("x", "nobody")],
            [a_message("x", "m"), a_message("y", "nobody")],
            [a_message("x", "x")],
            [a_message("x", "y"), a_message("y", "x")],
            [a_message("x", "m"), a_message("y", "z"), a_message("z", "y")],
            [a_message("x", "m"), a_message("x", "m", "another")],
        ]
        for batch in misplaced:
            with raises(Conflict):
                await stores.chats.add_messages("c", batch, now_ms=2)
        assert list((await stores.chats.messages("c"))[0]) == [a_message("m")]
        await stores.chats.add_messages("c", [a_message("y", "x"), a_message("x", "m")], now_ms=2)
        assert [message.id for message in (await stores.chats.messages("c"))[0]] == ["m", "y", "x"]
        with raises(KeyError):
            await stores.chats.add_messages("nobody", [a_message("m")], now_ms=1)
        with raises(KeyError):
            await stores.chats.add_messages("nobody", [], now_ms=1)

    @fresh
    async def test_whatever_is_added_or_chosen_is_in_view_as_in_a_tree(self, stores: StoreBundle) -> None:
        await stores.chats.create(a_chat())
        rng, tree, ids = random.Random(7), MessageTree(), list[str]()
        for number in range(60):
            if ids and rng.random() < 0.3:
                chosen = rng.choice(ids)
                tree.switch(chosen)
                await stores.chats.choose("c", chosen)
            else:
                message = a_message(f"m{number}", rng.choice([None, *ids[-3:], *ids]))
                tree = MessageTree.of([*tree, message], tree.chosen())
                tree.switch(message.id)
                ids.append(message.id)
                await stores.chats.add_messages("c", [message], now_ms=number)
            assert await self.view(stores) == [one.id for one in tree.active_path()], number

    @fresh
    async def test_of_siblings_added_at_once_the_last_is_in_view(self, stores: StoreBundle) -> None:
        await stores.chats.create(a_chat())
        batch = [a_message("q"), a_message("1", "q"), a_message("2", "q"), a_message("3", "1")]
        await stores.chats.add_messages("c", batch[:3], now_ms=1)
        assert await self.view(stores) == ["q", "2"]
        await stores.chats.add_messages("c", batch, now_ms=1)
        assert await self.view(stores) == ["q", "1", "3"], "what was new came into view"
        await stores.chats.choose("c", "2")
        await stores.chats.add_messages("c", batch, now_ms=1)
        assert await self.view(stores) == ["q", "2"], "what is there already changes nothing"

    @fresh
    async def test_what_is_added_at_once_comes_into_view_one_after_the_other(self, stores: StoreBundle) -> None:
        await stores.chats.create(a_chat())
        rng, tree, ids = random.Random(11), MessageTree(), list[str]()
        for number in range(30):
            batch = list[ChatMessage]()
            for at in range(rng.randrange(1, 6)):
                below = rng.choice([None, *ids[-3:], *ids, *(one.id for one in batch)])
                batch.append(a_message(f"m{number}-{at}", below))
            rng.shuffle(batch)
            tree = MessageTree.of([*tree, *batch], tree.chosen())
            for message in batch:
                tree.switch(message.id)
            ids += [message.id for message in batch]
            await stores.chats.add_messages("c", batch, now_ms=number)
            assert await self.view(stores) == [one.id for one in tree.active_path()], number

    @fresh
    async def test_what_was_just_said_is_taken_back_and_the_chat_is_as_it_was(self, stores: StoreBundle) -> None:
        await stores.chats.create(a_chat())
        kept = [a_message("q"), a_message("1", "q"), a_message("2", "q"), a_message("3", "1")]
        await stores.chats.add_messages("c", kept, now_ms=1)
        await stores.chats.choose("c", "3")
        said = [a_message("new"), a_message("answer", "new", "", state="writing")]
        for first in ("q", "1", "3"):
            batch = [replace(said[0], parent_id=first), said[1]]
            await stores.chats.add_messages("c", batch, now_ms=2)
            assert (await self.view(stores))[-2:] == ["new", "answer"]
            for _ in range(2):
                await stores.chats.take_back("c", ["new", "answer", "nobody"], in_view="3")
            assert list((await stores.chats.messages("c"))[0]) == kept
            assert await self.view(stores) == ["q", "1", "3"]
        await stores.chats.add_messages("c", said, now_ms=3)
        assert await self.view(stores) == ["new", "answer"], "an id that was taken back can be said again"

    @fresh
    async def test_what_is_taken_back_out_of_view_leaves_the_view_alone(self, stores: StoreBundle) -> None:
        await stores.chats.create(a_chat())
        await stores.chats.add_messages("c", [a_message("q"), a_message("1", "q"), a_message("2", "q")], now_ms=1)
        await stores.chats.take_back("c", ["1"], in_view="q")
        assert await self.view(stores) == ["q", "2"]
        await stores.chats.take_back("c", ["q", "2"], in_view=None)
        assert (await self.view(stores), list((await stores.chats.messages("c"))[0])) == ([], [])

    @fresh
    async def test_what_something_follows_is_not_taken_back(self, stores: StoreBundle) -> None:
        await stores.chats.create(a_chat())
        kept = [a_message("q"), a_message("a", "q"), a_message("below", "a")]
        await stores.chats.add_messages("c", kept, now_ms=1)
        for ids in (["q"], ["a"], ["q", "a"]):
            with raises(Conflict):
                await stores.chats.take_back("c", ids, in_view=None)
        for chat_id, in_view in (("nobody", None), ("c", "nobody")):
            with raises(KeyError):
                await stores.chats.take_back(chat_id, ["below"], in_view=in_view)
        assert list((await stores.chats.messages("c"))[0]) == kept
        assert await self.view(stores) == ["q", "a", "below"]

    @fresh
    async def test_what_is_not_there_cannot_be_chosen(self, stores: StoreBundle) -> None:
        await stores.chats.create(a_chat())
        await stores.chats.create(a_chat("d"))
        await stores.chats.add_messages("d", [a_message("m")], now_ms=1)
        for chat_id in ("c", "nobody"):
            with raises(KeyError):
                await stores.chats.choose(chat_id, "m")

    @fresh
    async def test_an_answer_that_was_being_written_is_finished_once(self, stores: StoreBundle) -> None:
        await stores.chats.create(a_chat())
        asked, writing = a_message("q"), a_message("a", "q", "", state="writing", run_id="r")
        await stores.chats.add_messages("c", [asked, writing], now_ms=1)
        data = {"state": "complete", "cost_usd": "0.1"}
        done = await stores.chats.finish_message("c", "a", "hello\x00", data, now_ms=2)
        assert done == replace(writing, content="hello\x00", data=data)
        assert await stores.chats.message("c", "a") == done
        again = {"cost_usd": "0.1", "state": "complete"}
        assert await stores.chats.finish_message("c", "a", "hello\x00", again, now_ms=2) == done
        for content, other in (
            ("other", data),
            ("hello\x00", {"state": "failed"}),
            ("hello\x00", {"state": "writing"}),
        ):
            with raises(Conflict):
                await stores.chats.finish_message("c", "a", content, other, now_ms=3)
        assert list((await stores.chats.messages("c"))[0]) == [asked, done]

    @fresh
    async def test_what_is_not_being_written_cannot_be_finished(self, stores: StoreBundle) -> None:
        await stores.chats.create(a_chat())
        said = [a_message("plain"), a_message("failed", "plain", state="failed"), a_message("odd", "plain", state=None)]
        await stores.chats.add_messages("c", said, now_ms=1)
        for message in said:
            with raises(Conflict):
                await stores.chats.finish_message("c", message.id, "x", {"state": "complete"}, now_ms=2)
        for chat_id, message_id in (("c", "nobody"), ("nobody", "plain")):
            with raises(KeyError):
                await stores.chats.finish_message(chat_id, message_id, "x", {}, now_ms=2)
        assert list((await stores.chats.messages("c"))[0]) == said

    @fresh
    async def test_an_answer_can_be_kept_while_it_is_still_being_written(self, stores: StoreBundle) -> None:
        await stores.chats.create(a_chat())
        await stores.chats.add_messages("c", [a_message("q"), a_message("a", "q", "", state="writing")], now_ms=1)
        for content, state in (("he", "writing"), ("hell", "writing"), ("hello", "partial")):
            said = await stores.chats.finish_message("c", "a", content, {"state": state}, now_ms=2)
            assert (said.content, said.data) == (content, {"state": state})
        with raises(InvalidValue):
            await stores.chats.finish_message("c", "a", "x" * 1_000_001, {}, now_ms=3)

    @fresh
    async def test_many_answers_at_once_are_all_there(self, stores: StoreBundle) -> None:
        await stores.chats.create(a_chat())
        await stores.chats.add_messages("c", [a_message("q")], now_ms=1)
        async with self.another(stores) as other:
            both = (stores, other)
            adding = [
                both[number % 2].chats.add_messages("c", [a_message(f"a{number:02d}", "q")], now_ms=2)
                for number in range(self.claimants)
            ]
            await asyncio.gather(*adding)
        messages, in_view = await stores.chats.messages("c")
        tree = MessageTree.of(messages, in_view)
        assert len(tree.replies("q")) == self.claimants
        assert len(tree.active_path()) == 2

    @fresh
    async def test_a_long_chat_comes_back_whole(self, stores: StoreBundle) -> None:
        await stores.chats.create(a_chat())
        said = [a_message(f"m{number}", f"m{number - 1}" if number else None) for number in range(1_500)]
        await stores.chats.add_messages("c", said[:1_000], now_ms=1)
        await stores.chats.add_messages("c", said[1_000:], now_ms=2)
        assert list((await stores.chats.messages("c"))[0]) == said
        assert len(await self.view(stores)) == 1_500

    @fresh
    async def test_bytes_come_back_as_they_were_attached(self, stores: StoreBundle) -> None:
        for number, content in enumerate((b"", b"\x00\xff\xfe'", bytes(range(256)) * 4_000)):
            given = an_attachment(f"f{number}", len(content), name="a\x00\ud83d.bin", media_type="x/y")
            assert await stores.chats.attach(given, content) == given
            assert await stores.chats.attachment(f"f{number}") == (given, content)
        assert await stores.chats.attachment("nobody") is None

    @fresh
    async def test_an_id_is_attached_once(self, stores: StoreBundle) -> None:
        given = an_attachment()
        for _ in range(2):
            assert await stores.chats.attach(given, b"abc") == given
        others = [(given, b"xyz"), (an_attachment(owner="bob"), b"abc"), (an_attachment(name="b"), b"abc")]
        for other, content in others:
            with raises(Conflict):
                await stores.chats.attach(other, content)
        assert await stores.chats.attachment("f") == (given, b"abc")

    @fresh
    async def test_an_attachment_has_the_size_it_says_and_a_name_that_can_be_kept(self, stores: StoreBundle) -> None:
        for wrong in (an_attachment(size=2), an_attachment(size=-3), *(an_attachment(name) for name in NOT_NAMES)):
            with raises(InvalidValue):
                await stores.chats.attach(wrong, b"abc")
        assert await stores.chats.attachment("f") is None

    @fresh
    async def test_bytes_that_no_message_refers_to_are_detached(self, stores: StoreBundle) -> None:
        await stores.chats.create(a_chat())
        for id in ("used", "unused"):
            await stores.chats.attach(an_attachment(id), b"abc")
        await stores.chats.add_messages("c", [a_message("m", attachments=[{"id": "used"}])], now_ms=1)
        for id in ("used", "unused", "unused", "nobody"):
            await stores.chats.detach(id)
        assert await stores.chats.attachment("unused") is None
        assert await stores.chats.attachment("used") == (an_attachment("used"), b"abc")
        await stores.chats.attach(an_attachment("unused", 1), b"x")
        await stores.chats.take_back("c", ["m"], in_view=None)
        await stores.chats.detach("used")
        assert await stores.chats.attachment("used") is None

    @fresh
    async def test_a_key_leads_to_a_message_and_what_follows_it(self, stores: StoreBundle) -> None:
        for id in ("c", "d"):
            await stores.chats.create(a_chat(id))
            said = [a_message("q"), a_message("1", "q", f"in {id}"), a_message("2", "q"), a_message("3", "1")]
            await stores.chats.add_messages(id, said, now_ms=1)
        assert await stores.chats.marked([]) is await stores.chats.marked(["k", *NOT_NAMES]) is None
        await stores.chats.mark("k", "c", "q")
        await stores.chats.mark("l", "c", "3")
        assert await stores.chats.marked(["nobody", "l", "k"]) == Marked("l", "c", "3", [])
        found = await stores.chats.marked(["k", "l"])
        assert found == Marked("k", "c", "q", [a_message("1", "q", "in c"), a_message("2", "q")])
        await stores.chats.mark("l", "c", "q")
        assert await stores.chats.marked(["l"]) == replace(found, key="l")
        for chat_id, message_id in (("d", "1"), ("d", "1"), ("c", "q")):
            await stores.chats.mark("k", chat_id, message_id)
            assert await stores.chats.marked(["k"]) is None, "it has led to two chats"
            assert (await stores.chats.marked(["k", "l"])) is not None
        for chat_id, message_id in (("c", "nobody"), ("nobody", "q")):
            with raises(KeyError):
                await stores.chats.mark("k", chat_id, message_id)
        for name in NOT_NAMES:
            with raises(InvalidValue):
                await stores.chats.mark(name, "c", "q")

    @fresh
    async def test_a_chat_is_removed_with_all_that_is_its_own(self, stores: StoreBundle) -> None:
        files = {"own": ["c"], "both": ["c", "d"], "bob's": ["c"], "other": ["d"]}
        for id in ("c", "d"):
            await stores.chats.create(a_chat(id))
            await stores.memories.put(f"chat:{id}", "k", "a dam")
        for file, chats in files.items():
            await stores.chats.attach(an_attachment(file, owner="bob" if file == "bob's" else "ann"), b"abc")
            for id in chats:
                odd = [{"id": name} for name in ("nobody", "\x00", "x" * 1_001)]
                named = a_message(file, attachments=[{"id": file}, *odd, {}, {"id": 7}, 7])
                await stores.chats.add_messages(id, [named], now_ms=1)
                await stores.chats.mark(f"{file} {id}", id, file)
        for _ in range(2):
            await stores.chats.remove("c")
        await stores.chats.remove("nobody")
        assert [chat.id for chat in await stores.chats.list()] == ["d"]
        assert await stores.chats.get("c") is None
        assert await stores.chats.message("c", "own") is None
        assert await stores.chats.marked(["own c"]) is None
        assert await stores.chats.marked(["both d"]) is not None
        assert [file for file in files if await stores.chats.attachment(file)] == ["both", "bob's", "other"]
        assert await stores.memories.get("chat:c", "k") is None
        assert await stores.memories.get("chat:d", "k") is not None
        await stores.chats.create(a_chat())
        assert await stores.chats.messages("c") == ([], []), "nothing is left for one of the same id"

    @fresh
    async def test_a_chat_is_not_removed_while_somebody_is_answered_there(self, stores: StoreBundle) -> None:
        await stores.chats.create(a_chat())
        said = [a_message("q"), a_message("a", "q", "", state="writing")]
        await stores.chats.add_messages("c", said, now_ms=1)
        with raises(Conflict):
            await stores.chats.remove("c")
        await stores.chats.finish_message("c", "a", "so", {"state": "halted"}, now_ms=2)
        run = await claimed(stores, origin={"kind": "fork", "of": {"kind": "chat", "chat_id": "c"}})
        with raises(Conflict):
            await stores.chats.remove("c")
        assert len((await stores.chats.messages("c"))[0]) == 2
        await stores.runs.update("r", run.epoch, status="halted", ended_ms=2_000)
        await stores.chats.remove("c")
        assert await stores.chats.get("c") is None

    @fresh
    async def test_chats_that_nobody_made_go_when_they_are_not_used(self, stores: StoreBundle) -> None:
        made = {"new": 3_000, "b": 1_000, "a": 1_000, "oldest": 500, "with a run": 500}
        for id, at_ms in made.items():
            await stores.chats.create(a_chat(id, made_by="it", updated_ms=at_ms))
            await stores.chats.add_messages(id, [a_message("m", attachments=[{"id": id}])], now_ms=at_ms)
            await stores.chats.attach(an_attachment(id), b"abc")
        await stores.chats.create(a_chat("somebody's", updated_ms=0))
        await brought_to(stores, "completed", origin={"kind": "chat", "chat_id": "with a run"})
        assert list(await stores.chats.remove_unused(3_000, limit=0)) == []
        assert list(await stores.chats.remove_unused(3_000, limit=2)) == ["oldest", "a"]
        assert list(await stores.chats.remove_unused(3_000)) == ["b"]
        assert list(await stores.chats.remove_unused(3_000)) == []
        assert [id for id in made if await stores.chats.attachment(id)] == ["new", "with a run"]
        await stores.runs.remove_ended(9_000)
        assert list(await stores.chats.remove_unused(3_000)) == ["with a run"]
        assert sorted([chat.id for chat in await stores.chats.list()]) == ["new", "somebody's"]

    async def view(self, stores: StoreBundle) -> Sequence[str]:
        messages, in_view = await stores.chats.messages("c")
        return [message.id for message in MessageTree.of(messages, in_view).active_path()]
