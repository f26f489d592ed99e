"""The contract of every `ChatStore`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

from penstock.chat.conversation import ChatMessage, MessageTree
from penstock.chat.ports import MAX_PREVIEW, ChatPreview, Marked, PathWindow
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
    """Chats by id, their messages as a tree that only grows, and their attachments."""

    @fresh
    async def test_a_chat_is_read_back_unchanged(self, stores: StoreBundle) -> None:
        chat = a_chat(title="T\x00\u00fc\ud83d", created_ms=1, updated_ms=2)
        assert await stores.chats.create(chat) == chat
        assert await stores.chats.get("c") == chat
        assert list(await stores.chats.list()) == [chat]
        for id in ("unknown", "", *NOT_NAMES):
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
    async def test_a_chat_that_cannot_be_stored_is_refused(self, stores: StoreBundle) -> None:
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
    async def test_chats_are_listed_by_last_use_a_page_at_a_time(self, stores: StoreBundle) -> None:
        for number, id in enumerate(ODD_NAMES):
            await stores.chats.create(a_chat(id, updated_ms=number // 3))
        await stores.chats.create(a_chat("another's", owner="bob", updated_ms=1))
        expected = sorted(((number // 3, id) for number, id in enumerate(ODD_NAMES)), reverse=True)
        found = await until_nothing(lambda last: stores.chats.list(owner="ann", before=last, limit=4))
        assert [chat.id for chat in found] == [id for _, id in expected]
        assert len(await stores.chats.list()) == len(ODD_NAMES) + 1
        assert list(await stores.chats.list(limit=0)) == list(await stores.chats.list(before="unknown")) == []
        with raises(InvalidValue):
            await stores.chats.list(limit=-1)

    @fresh
    async def test_chats_are_listed_by_graph_and_text(self, stores: StoreBundle) -> None:
        await stores.chats.create(a_chat("1", title="Dams of 100%_!", graph_id="g", updated_ms=1))
        await stores.chats.create(a_chat("2", title="Privet", graph_id="h", updated_ms=2))
        await stores.chats.create(a_chat("3", title="", owner="bob", graph_id="h", updated_ms=3))
        messages = [a_message("m", None, "How HIGH\nis the dam?"), a_message("n", "m", "Привет, “мир”\u0000")]
        await stores.chats.add_messages("2", messages, now_ms=2)
        await stores.chats.add_messages("3", [a_message("m", None, "a dam of bob's")], now_ms=3)
        expected = {
            "dam": "321", "DAM": "321", "high is": "2", "  high   is ": "2", "привет": "2", "Привет": "2", "мир": "2",
            "100%_!": "1", "%": "1", "_": "1", "!": "1", "dam%": "", "?": "2", '"': "", "": "321", "nis": "", "x": "",
        }  # fmt: skip
        for text, ids in expected.items():
            assert "".join([chat.id for chat in await stores.chats.list(text=text)]) == ids, text
        assert [chat.id for chat in await stores.chats.list(graph_id="h")] == ["3", "2"]
        assert [chat.id for chat in await stores.chats.list(graph_id="h", owner="ann", text="dam")] == ["2"]
        found = await until_nothing(lambda last: stores.chats.list(text="dam", before=last, limit=1))
        assert [chat.id for chat in found] == ["3", "2", "1"]
        for name in NOT_NAMES:
            assert list(await stores.chats.list(graph_id=name)) == []
        with raises(InvalidValue):
            await stores.chats.list(text="x" * 1_001)

    @fresh
    async def test_the_preview_of_a_chat_is_its_last_message_in_view(self, stores: StoreBundle) -> None:
        for id in ("c", "empty"):
            await stores.chats.create(a_chat(id))
        sent = [a_message("q", None, '\U0001f600\\\\"' * 200), a_message("1", "q", "x" * 100_000, state="writing")]
        await stores.chats.add_messages("c", sent, now_ms=1)
        found = await stores.chats.previews(["c", "empty", "unknown", *NOT_NAMES])
        assert found == {"c": ChatPreview("1", "assistant", "x" * MAX_PREVIEW, sent[1].at_ms, "writing")}
        await stores.chats.add_messages("c", [a_message("2", "q", "two")], now_ms=2)
        assert (await stores.chats.previews(["c"]))["c"].content == "two"
        await stores.chats.add_messages("c", [a_message("3", None, sent[0].content)], now_ms=3)
        assert (await stores.chats.previews(["c"]))["c"].content == sent[0].content[:MAX_PREVIEW]
        await stores.chats.choose("c", "q")
        assert (await stores.chats.previews(["c"]))["c"] == ChatPreview.of(a_message("2", "q", "two"))
        await stores.chats.add_messages("c", [a_message("4", "2", "four")], now_ms=4)
        assert await self.view(stores) == ["q", "2", "4"]
        assert (await stores.chats.previews(["c"]))["c"].content == "four"
        for length in range(2_390, 2_410):
            await stores.chats.add_messages("c", [a_message(f"l{length}", "4", "a" * length + '\\\n"é')], now_ms=5)
            assert (await stores.chats.previews(["c"]))["c"].content == "a" * MAX_PREVIEW

    @fresh
    async def test_a_window_of_a_path_has_the_messages_around_one_and_their_siblings(self, stores: StoreBundle) -> None:
        await stores.chats.create(a_chat())
        assert await stores.chats.path("c", above=5) == await stores.chats.path("unknown") == PathWindow()
        rng, ids = random.Random(3), list[str]()
        for number in range(60):
            below = rng.choice([None, *ids[-2:], *ids[-2:], *ids])
            ids.append(f"m{number}")
            await stores.chats.add_messages("c", [a_message(ids[-1], below)], now_ms=number)
            if rng.random() < 0.3:
                await stores.chats.choose("c", rng.choice(ids))
        tree = MessageTree.of(*await stores.chats.messages("c"))
        for id in [None, *ids]:
            above, below_it = rng.randrange(4), rng.randrange(4)
            window = await stores.chats.path("c", id, above=above, below=below_it)
            middle = tree.active_path()[-1].id if id is None else id
            seen = MessageTree.of([*tree], tree.chosen())
            path = [one.id for one in tree.path_to(middle)]
            first = max(0, len(path) - 1 - above)
            assert [one.id for one in window.messages][: len(path) - first] == path[first:]
            assert window.has_earlier == (first > 0)
            assert list(window.places) == [tree.place_of(one.id) for one in window.messages]
            rest = [one.id for one in window.messages][len(path) - first :]
            assert len(rest) == below_it or not window.has_later
            seen.switch(middle)
            whole = [one.id for one in seen.active_path()]
            assert whole[len(path) : len(path) + below_it] == rest
            assert window.end_id == whole[-1]
        for chat_id, message_id in (("c", "unknown"), ("unknown", "m1"), *(("c", name) for name in NOT_NAMES)):
            with raises(KeyError):
                await stores.chats.path(chat_id, message_id)
        with raises(InvalidValue):
            await stores.chats.path("c", above=-1)

    @fresh
    async def test_a_new_message_or_title_makes_a_chat_the_last_used(self, stores: StoreBundle) -> None:
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
            await stores.chats.rename("unknown", "x", now_ms=1)

    @fresh
    async def test_messages_are_returned_in_the_order_they_were_added(self, stores: StoreBundle) -> None:
        await stores.chats.create(a_chat())
        sent = [a_message("z", None, "q\x00\u2028"), a_message("b", "z", "x" * 1_000_000, state="writing", a=[1])]
        await stores.chats.add_messages("c", sent, now_ms=1)
        await stores.chats.add_messages("c", [a_message("a", "b")], now_ms=2)
        messages, in_view = await stores.chats.messages("c")
        assert list(messages) == [*sent, a_message("a", "b")]
        assert set(in_view) <= {"z", "b", "a"}
        assert await stores.chats.message("c", "b") == sent[1]

    @fresh
    async def test_unknown_messages_are_none(self, stores: StoreBundle) -> None:
        await stores.chats.create(a_chat("c"))
        await stores.chats.create(a_chat("d"))
        await stores.chats.add_messages("c", [a_message("m")], now_ms=1)
        assert await stores.chats.message("c", "unknown") is None
        assert await stores.chats.message("d", "m") is None
        assert await stores.chats.message("unknown", "m") is None
        for chat_id in ("d", "unknown"):
            messages, in_view = await stores.chats.messages(chat_id)
            assert (list(messages), list(in_view)) == ([], [])

    @fresh
    async def test_odd_data_is_read_back_exactly_and_is_a_copy(self, stores: StoreBundle) -> None:
        await stores.chats.create(a_chat())
        keepable = [value for value in ODD_VALUES if "\\ud83d" not in repr(value)]
        sent = [a_message(f"m{number}", None, value=value) for number, value in enumerate(keepable)]
        await stores.chats.add_messages("c", sent, now_ms=1)
        for message in sent:
            found = await stores.chats.message("c", message.id)
            assert repr(found) == repr(message)
            assert found is not None
            found.data.clear()  # type: ignore[attr-defined]
            assert await stores.chats.message("c", message.id) == message
        for message in (await stores.chats.messages("c"))[0]:
            message.data.clear()  # type: ignore[attr-defined]
        assert list((await stores.chats.messages("c"))[0]) == sent

    @fresh
    async def test_an_existing_message_is_skipped_if_every_field_is_equal(self, stores: StoreBundle) -> None:
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
    async def test_messages_are_added_all_or_none_each_below_an_existing_one(self, stores: StoreBundle) -> None:
        await stores.chats.create(a_chat())
        await stores.chats.add_messages("c", [a_message("m")], now_ms=1)
        misplaced: list[list[ChatMessage]] = [
            [a_message("x", "unknown")],
            [a_message("x", "m"), a_message("y", "unknown")],
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
            await stores.chats.add_messages("unknown", [a_message("m")], now_ms=1)
        with raises(KeyError):
            await stores.chats.add_messages("unknown", [], now_ms=1)

    @fresh
    async def test_added_and_chosen_messages_are_in_view_with_their_ancestors(self, stores: StoreBundle) -> None:
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
            assert await self.view(stores) == [message.id for message in tree.active_path()], number

    @fresh
    async def test_of_siblings_added_together_the_last_is_in_view(self, stores: StoreBundle) -> None:
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
    async def test_messages_added_together_come_into_view_in_order(self, stores: StoreBundle) -> None:
        await stores.chats.create(a_chat())
        rng, tree, ids = random.Random(11), MessageTree(), list[str]()
        for number in range(30):
            batch = list[ChatMessage]()
            for at in range(rng.randrange(1, 6)):
                below = rng.choice([None, *ids[-3:], *ids, *(message.id for message in batch)])
                batch.append(a_message(f"m{number}-{at}", below))
            rng.shuffle(batch)
            tree = MessageTree.of([*tree, *batch], tree.chosen())
            for message in batch:
                tree.switch(message.id)
            ids += [message.id for message in batch]
            await stores.chats.add_messages("c", batch, now_ms=number)
            assert await self.view(stores) == [message.id for message in tree.active_path()], number

    @fresh
    async def test_an_unknown_message_cannot_be_chosen(self, stores: StoreBundle) -> None:
        await stores.chats.create(a_chat())
        await stores.chats.create(a_chat("d"))
        await stores.chats.add_messages("d", [a_message("m")], now_ms=1)
        for chat_id in ("c", "unknown"):
            with raises(KeyError):
                await stores.chats.choose(chat_id, "m")

    @fresh
    async def test_an_answer_that_was_being_written_is_finished_once(self, stores: StoreBundle) -> None:
        await stores.chats.create(a_chat())
        question, writing = a_message("q"), a_message("a", "q", "", state="writing", run_id="r")
        await stores.chats.add_messages("c", [question, writing], now_ms=1)
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
        assert list((await stores.chats.messages("c"))[0]) == [question, done]

    @fresh
    async def test_only_an_answer_being_written_can_be_finished(self, stores: StoreBundle) -> None:
        await stores.chats.create(a_chat())
        sent = [a_message("plain"), a_message("failed", "plain", state="failed"), a_message("odd", "plain", state=None)]
        await stores.chats.add_messages("c", sent, now_ms=1)
        for message in sent:
            with raises(Conflict):
                await stores.chats.finish_message("c", message.id, "x", {"state": "complete"}, now_ms=2)
        for chat_id, message_id in (("c", "unknown"), ("unknown", "plain")):
            with raises(KeyError):
                await stores.chats.finish_message(chat_id, message_id, "x", {}, now_ms=2)
        assert list((await stores.chats.messages("c"))[0]) == sent

    @fresh
    async def test_an_answer_can_be_saved_while_it_is_being_written(self, stores: StoreBundle) -> None:
        await stores.chats.create(a_chat())
        await stores.chats.add_messages("c", [a_message("q"), a_message("a", "q", "", state="writing")], now_ms=1)
        for content, state in (("he", "writing"), ("hell", "writing"), ("hello", "partial")):
            sent = await stores.chats.finish_message("c", "a", content, {"state": state}, now_ms=2)
            assert (sent.content, sent.data) == (content, {"state": state})
        with raises(InvalidValue):
            await stores.chats.finish_message("c", "a", "x" * 1_000_001, {}, now_ms=3)

    @fresh
    async def test_concurrent_answers_are_all_stored(self, stores: StoreBundle) -> None:
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
    async def test_a_long_chat_is_read_back_whole(self, stores: StoreBundle) -> None:
        await stores.chats.create(a_chat())
        sent = [a_message(f"m{number}", f"m{number - 1}" if number else None) for number in range(1_500)]
        await stores.chats.add_messages("c", sent[:1_000], now_ms=1)
        await stores.chats.add_messages("c", sent[1_000:], now_ms=2)
        assert list((await stores.chats.messages("c"))[0]) == sent
        assert len(await self.view(stores)) == 1_500

    @fresh
    async def test_attached_bytes_are_read_back_unchanged(self, stores: StoreBundle) -> None:
        for number, content in enumerate((b"", b"\x00\xff\xfe'", bytes(range(256)) * 4_000)):
            attachment = an_attachment(f"f{number}", len(content), name="a\x00\ud83d.bin", media_type="x/y")
            assert await stores.chats.attach(attachment, content) == attachment
            assert await stores.chats.attachment(f"f{number}") == (attachment, content)
        assert await stores.chats.attachment("unknown") is None

    @fresh
    async def test_an_id_is_attached_once(self, stores: StoreBundle) -> None:
        attachment = an_attachment()
        for _ in range(2):
            assert await stores.chats.attach(attachment, b"abc") == attachment
        others = [(attachment, b"xyz"), (an_attachment(owner="bob"), b"abc"), (an_attachment(name="b"), b"abc")]
        for other, content in others:
            with raises(Conflict):
                await stores.chats.attach(other, content)
        assert await stores.chats.attachment("f") == (attachment, b"abc")

    @fresh
    async def test_an_attachment_with_a_wrong_size_or_name_is_refused(self, stores: StoreBundle) -> None:
        for wrong in (an_attachment(size=2), an_attachment(size=-3), *(an_attachment(name) for name in NOT_NAMES)):
            with raises(InvalidValue):
                await stores.chats.attach(wrong, b"abc")
        assert await stores.chats.attachment("f") is None

    @fresh
    async def test_unreferenced_attachments_can_be_detached(self, stores: StoreBundle) -> None:
        await stores.chats.create(a_chat())
        for id in ("used", "unused"):
            await stores.chats.attach(an_attachment(id), b"abc")
        await stores.chats.add_messages("c", [a_message("m", attachments=[{"id": "used"}])], now_ms=1)
        for id in ("used", "unused", "unused", "unknown"):
            await stores.chats.detach(id)
        assert await stores.chats.attachment("unused") is None
        assert await stores.chats.attachment("used") == (an_attachment("used"), b"abc")
        await stores.chats.attach(an_attachment("unused", 1), b"x")
        await stores.chats.remove("c")
        await stores.chats.detach("used")
        assert await stores.chats.attachment("used") is None

    @fresh
    async def test_a_key_leads_to_a_message_and_its_replies(self, stores: StoreBundle) -> None:
        for id in ("c", "d"):
            await stores.chats.create(a_chat(id))
            sent = [a_message("q"), a_message("1", "q", f"in {id}"), a_message("2", "q"), a_message("3", "1")]
            await stores.chats.add_messages(id, sent, now_ms=1)
        assert await stores.chats.marked([]) is await stores.chats.marked(["k", *NOT_NAMES]) is None
        await stores.chats.mark("k", "c", "q")
        await stores.chats.mark("l", "c", "3")
        assert await stores.chats.marked(["unknown", "l", "k"]) == Marked("l", "c", "3", [])
        found = await stores.chats.marked(["k", "l"])
        assert found == Marked("k", "c", "q", [a_message("1", "q", "in c"), a_message("2", "q")])
        await stores.chats.mark("l", "c", "q")
        assert await stores.chats.marked(["l"]) == replace(found, key="l")
        for chat_id, message_id in (("d", "1"), ("d", "1"), ("c", "q")):
            await stores.chats.mark("k", chat_id, message_id)
            assert await stores.chats.marked(["k"]) is None, "it has led to two chats"
            assert (await stores.chats.marked(["k", "l"])) is not None
        for chat_id, message_id in (("c", "unknown"), ("unknown", "q")):
            with raises(KeyError):
                await stores.chats.mark("k", chat_id, message_id)
        for name in NOT_NAMES:
            with raises(InvalidValue):
                await stores.chats.mark(name, "c", "q")

    @fresh
    async def test_a_chat_is_removed_with_all_its_data(self, stores: StoreBundle) -> None:
        files = {"own": ["c"], "both": ["c", "d"], "bob's": ["c"], "other": ["d"]}
        for id in ("c", "d"):
            await stores.chats.create(a_chat(id))
            await stores.memories.put(f"chat:{id}", "k", "a dam")
        for file, chats in files.items():
            await stores.chats.attach(an_attachment(file, owner="bob" if file == "bob's" else "ann"), b"abc")
            for id in chats:
                odd = [{"id": name} for name in ("unknown", "\x00", "x" * 1_001)]
                named = a_message(file, attachments=[{"id": file}, *odd, {}, {"id": 7}, 7])
                await stores.chats.add_messages(id, [named], now_ms=1)
                await stores.chats.mark(f"{file} {id}", id, file)
        for _ in range(2):
            await stores.chats.remove("c")
        await stores.chats.remove("unknown")
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
    async def test_a_chat_is_not_removed_while_an_answer_is_being_written(self, stores: StoreBundle) -> None:
        await stores.chats.create(a_chat())
        sent = [a_message("q"), a_message("a", "q", "", state="writing")]
        await stores.chats.add_messages("c", sent, now_ms=1)
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
    async def test_generated_chats_are_removed_when_unused(self, stores: StoreBundle) -> None:
        generated = {"new": 3_000, "b": 1_000, "a": 1_000, "oldest": 500, "with a run": 500}
        for id, at_ms in generated.items():
            await stores.chats.create(a_chat(id, made_by="it", updated_ms=at_ms))
            await stores.chats.add_messages(id, [a_message("m", attachments=[{"id": id}])], now_ms=at_ms)
            await stores.chats.attach(an_attachment(id), b"abc")
        await stores.chats.create(a_chat("manual", updated_ms=0))
        await brought_to(stores, "completed", origin={"kind": "chat", "chat_id": "with a run"})
        assert list(await stores.chats.remove_unused(3_000, limit=0)) == []
        assert list(await stores.chats.remove_unused(3_000, limit=2)) == ["oldest", "a"]
        assert list(await stores.chats.remove_unused(3_000)) == ["b"]
        assert list(await stores.chats.remove_unused(3_000)) == []
        assert [id for id in generated if await stores.chats.attachment(id)] == ["new", "with a run"]
        await stores.runs.remove_ended(9_000)
        assert list(await stores.chats.remove_unused(3_000)) == ["with a run"]
        assert sorted([chat.id for chat in await stores.chats.list()]) == ["manual", "new"]

    async def view(self, stores: StoreBundle) -> Sequence[str]:
        messages, in_view = await stores.chats.messages("c")
        return [message.id for message in MessageTree.of(messages, in_view).active_path()]
