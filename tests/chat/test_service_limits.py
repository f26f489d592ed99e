"""Whose chats are whose, and what a chat takes at most."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.chat import conversation
from penstock.chat import service as chat_service
from penstock.chat.conversation import AttachmentNotFound, ChatLimitReached, ChatNotFound, MessageNotFound
from penstock.errors import InvalidValue
from penstock.hosting.ports import Conflict
from tests.chat.chats import ANN, Histories, chatting

BOB = "bob"


@pytest.mark.parametrize("chat", ["hers", "none"])
async def test_anothers_chat_is_as_unknown_as_one_that_never_was(chat: str) -> None:
    async with chatting(models={"A": Histories().model}) as chats:
        service = chats.service
        turn = await service.stream_chat(chats.chat_id, "one", owner=ANN)
        await turn.result()
        id = chats.chat_id if chat == "hers" else "none"
        message_id, answer = str(turn.user_message_id), turn.message_id
        for request in (
            lambda: service.stream_chat(id, "x", owner=BOB),
            lambda: service.continue_message(id, answer, owner=BOB),
            lambda: service.retry_message(id, answer, owner=BOB),
            lambda: service.edit_user_message(id, message_id, "x", owner=BOB),
            lambda: service.tree(id, owner=BOB),
            lambda: service.switch(id, answer, owner=BOB),
            lambda: service.get_chat(id, owner=BOB),
        ):
            with pytest.raises(ChatNotFound) as unknown:
                await request()
            assert str(unknown.value) == f"there is no chat {id!r}; list yours, or create one"
        assert len(chats.host.submitted) == 1
        with pytest.raises(Conflict):
            await service.create_chat(owner=BOB, graph_id="g", chat_id=chats.chat_id)
        with pytest.raises(Conflict):
            await service.stream_agent_chat("g", "x", owner=BOB, chat_id=chats.chat_id)


async def test_what_another_has_attached_cannot_be_named() -> None:
    async with chatting() as chats:
        kept = await chats.service.attach(BOB, "x", "text/plain", b"secret")
        assert await chats.service.attachment(kept.id, owner=BOB) == (kept, b"secret")
        for id in (kept.id, "none"):
            with pytest.raises(AttachmentNotFound):
                await chats.service.attachment(id, owner=ANN)
            with pytest.raises(AttachmentNotFound):
                await chats.service.stream_chat(chats.chat_id, "x", owner=ANN, attachments=[id])
        assert len(await chats.service.tree(chats.chat_id)) == 0


async def test_a_history_names_only_what_is_ones_own_and_no_more_than_a_message_takes() -> None:
    async with chatting() as chats:
        own, secret = [await chats.service.attach(who, "x", "text/plain", b"x") for who in (ANN, BOB)]
        asks = {"role": "user", "content": "?"}
        wrong: list[tuple[type[Exception], str, Any]] = [
            (AttachmentNotFound, secret.id, {"attachments": [secret.id]}),
            (AttachmentNotFound, secret.id, {"attachments": [secret]}),
            (ChatLimitReached, r"messages\[0\].attachments must be at most 20", {"attachments": [own] * 21}),
            (InvalidValue, r"messages\[0\].attachments must be a list", {"attachments": own.id}),
            (InvalidValue, r"messages\[0\].attachments must be a list", {"attachments": None}),
        ]
        for kind, why, fields in wrong:
            with pytest.raises(kind, match=why):
                await chats.service.stream_agent_chat("g", [{**asks, **fields}, asks], owner=ANN)
        last = {**asks, "attachments": [own] * 11}
        with pytest.raises(ChatLimitReached, match="attachments must be at most 20"):
            await chats.service.stream_agent_chat("g", [asks, last], owner=ANN, attachments=[own] * 10)
        assert [chat.id for chat in await chats.stores.chats.list()] == [chats.chat_id]


async def test_a_message_that_is_not_there_is_named() -> None:
    async with chatting() as chats:
        service, id = chats.service, chats.chat_id
        for request in (
            lambda: service.stream_chat(id, "x", owner=ANN, parent_id="none"),
            lambda: service.continue_message(id, "none", owner=ANN),
            lambda: service.retry_message(id, "none", owner=ANN),
            lambda: service.edit_user_message(id, "none", "x", owner=ANN),
            lambda: service.switch(id, "none"),
        ):
            with pytest.raises(MessageNotFound, match="'none'"):
                await request()
        assert not chats.host.submitted


async def test_an_answer_is_retried_and_a_question_edited_and_not_the_other_way_round() -> None:
    async with chatting(models={"A": Histories().model}) as chats:
        turn = await chats.service.stream_chat(chats.chat_id, "one", owner=ANN)
        await turn.result()
        with pytest.raises(InvalidValue, match="role assistant"):
            await chats.service.retry_message(chats.chat_id, str(turn.user_message_id), owner=ANN)
        with pytest.raises(InvalidValue, match="role assistant"):
            await chats.service.continue_message(chats.chat_id, str(turn.user_message_id), owner=ANN)
        with pytest.raises(InvalidValue, match="role user"):
            await chats.service.edit_user_message(chats.chat_id, turn.message_id, "x", owner=ANN)


async def test_more_than_a_chat_takes_is_refused_with_the_figures_and_nothing_is_written() -> None:
    async with chatting() as chats:
        service, id = chats.service, chats.chat_id
        too_long = "x" * (conversation.MAX_CHARACTERS + 1)
        for what, most, request in (
            ("content", conversation.MAX_CHARACTERS, lambda: service.stream_chat(id, too_long, owner=ANN)),
            ("attachments", 20, lambda: service.stream_chat(id, "x", owner=ANN, attachments=["a"] * 21)),
            ("attachment", 20 * 1024 * 1024, lambda: service.attach(ANN, "x", "a/b", bytes(20 * 1024 * 1024 + 1))),
            ("title", conversation.MAX_TITLE, lambda: service.create_chat(owner=ANN, graph_id="g", title="x" * 1_001)),
            ("user_tools", 200, lambda: service.stream_chat(id, "x", owner=ANN, user_tools=["t"] * 201)),
        ):
            with pytest.raises(ChatLimitReached) as refused:
                await request()
            assert (refused.value.what, refused.value.most) == (what, most)
        assert len(await service.tree(id)) == 0


async def test_a_full_chat_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (conversation, chat_service):
        monkeypatch.setattr(module, "MAX_MESSAGES", 3)
    async with chatting(models={"A": Histories().model}) as chats:
        turn = await chats.service.stream_chat(chats.chat_id, "one", owner=ANN)
        await turn.result()
        with pytest.raises(ChatLimitReached, match="begin another one") as full:
            await chats.service.stream_chat(chats.chat_id, "two", owner=ANN)
        assert full.value.most == 3
        assert len(await chats.service.tree(chats.chat_id)) == 2


async def test_in_a_full_chat_the_answer_of_a_run_that_went_on_is_kept_with_the_run_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (conversation, chat_service):
        monkeypatch.setattr(module, "MAX_MESSAGES", 2)
    async with chatting(models={"A": Histories().model}) as chats:
        turn = await chats.service.stream_chat(chats.chat_id, "one", owner=ANN, limits={"max_steps": 0})
        halted = await turn.result()
        before = [*await chats.service.tree(chats.chat_id)]
        await chats.host.grant(turn.run_id, {"max_steps": 100}, by=ANN)
        run = await chats.host.wait(turn.run_id)
        assert (run.status, "answer 1" in str(run.output)) == ("completed", True)
        assert [*await chats.service.tree(chats.chat_id)] == before
        assert await turn.result() == halted
    assert [one.getMessage() for one in caplog.records if one.name == "penstock.chat"] == [
        f"chat {turn.chat_id!r} is full: what run {turn.run_id!r} came to is kept with the run, and not in the chat"
    ]


async def test_a_chat_that_has_more_than_it_takes_is_read_and_deleted_and_takes_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with chatting(models={"A": Histories().model}) as chats:
        service, id = chats.service, chats.chat_id
        turn = await service.stream_chat(id, "one", owner=ANN, limits={"max_steps": 0})
        halted = await turn.result()
        for module in (conversation, chat_service):
            monkeypatch.setattr(module, "MAX_MESSAGES", 1)
        assert len(await service.tree(id)) == 2
        assert await turn.result() == halted
        await service.switch(id, turn.message_id)
        for request in (
            lambda: service.stream_chat(id, "two", owner=ANN),
            lambda: service.retry_message(id, turn.message_id, owner=ANN),
            lambda: service.continue_message(id, turn.message_id, owner=ANN),
            lambda: service.edit_user_message(id, str(turn.user_message_id), "uno", owner=ANN),
        ):
            with pytest.raises(ChatLimitReached, match="begin another one"):
                await request()
        await chats.host.grant(turn.run_id, {"max_steps": 100}, by=ANN)
        assert (await chats.host.wait(turn.run_id)).status == "completed"
        assert len(await service.tree(id)) == 2
        await service.delete_chat(id)
        with pytest.raises(ChatNotFound):
            await service.tree(id)


async def test_a_chat_may_be_only_so_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (conversation, chat_service):
        monkeypatch.setattr(module, "MAX_DEPTH", 3)
    async with chatting(models={"A": Histories().model}) as chats:
        turn = await chats.service.stream_chat(chats.chat_id, "one", owner=ANN)
        await turn.result()
        with pytest.raises(ChatLimitReached, match="begin another one") as deep:
            await chats.service.stream_chat(chats.chat_id, "two", owner=ANN)
        assert deep.value.most == 3


@pytest.mark.parametrize("wrong", ["", None, 3, "half \ud800 a pair", ["x"]])
async def test_content_that_is_no_text_is_refused(wrong: Any) -> None:
    async with chatting() as chats:
        with pytest.raises(InvalidValue, match="content"):
            await chats.service.stream_chat(chats.chat_id, wrong, owner=ANN)
        assert len(await chats.service.tree(chats.chat_id)) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        None,
        [{"role": "assistant", "content": "x"}],
        [{"role": "tool", "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": 1}],
        ["x"],
        [{"role": "user", "content": "x"}, None],
        [{"role": "user", "content": "\ud800"}],
    ],
)
async def test_a_conversation_that_is_none_is_refused_and_makes_no_chat(wrong: Any) -> None:
    async with chatting() as chats:
        with pytest.raises(InvalidValue, match="messages"):
            await chats.service.stream_agent_chat("g", wrong, owner=ANN)
        assert len(await chats.stores.chats.list(owner=ANN)) == 1


@pytest.mark.parametrize(("name", "media_type"), [("", "a/b"), ("x", ""), ("a\nb", "a/b"), ("x" * 256, "a/b")])
async def test_an_attachment_has_a_name_and_a_type(name: str, media_type: str) -> None:
    async with chatting() as chats:
        with pytest.raises(InvalidValue, match="on one line"):
            await chats.service.attach(ANN, name, media_type, b"")


async def test_a_chat_is_with_one_graph() -> None:
    async with chatting() as chats:
        with pytest.raises(Conflict, match="'g'"):
            await chats.service.stream_agent_chat("another", "x", owner=ANN, chat_id=chats.chat_id)


async def test_tools_are_named() -> None:
    async with chatting() as chats:
        for wrong in (print, "", "\ud800", "x" * 256):
            with pytest.raises(InvalidValue, match="user_tools"):
                await chats.service.stream_chat(chats.chat_id, "x", owner=ANN, user_tools=[wrong])  # type: ignore[list-item]
        assert len(await chats.service.tree(chats.chat_id)) == 0


@pytest.mark.parametrize("id", ["no id", "/", "-x", "x" * 101])
async def test_a_chat_has_an_id_that_fits_everywhere(id: str) -> None:
    async with chatting() as chats:
        with pytest.raises(InvalidValue, match="chat_id"):
            await chats.service.create_chat(owner=ANN, graph_id="g", chat_id=id)


async def test_a_stream_is_left_in_one_of_two_ways() -> None:
    async with chatting(models={"A": Histories().model}) as chats:
        turn = await chats.service.stream_chat(chats.chat_id, "x", owner=ANN)
        with pytest.raises(InvalidValue, match="'continue' or 'cancel'"):
            await anext(turn.events(on_leave="stay"))  # type: ignore[arg-type]
        await turn.result()


@pytest.mark.parametrize("wrong", [None, 3, b"x", ["x"], "half \ud800 a pair", "x" * 1_001])
async def test_a_title_is_text_that_is_not_too_long(wrong: Any) -> None:
    async with chatting() as chats:
        with pytest.raises(InvalidValue, match="title"):
            await chats.service.create_chat(owner=ANN, graph_id="g", title=wrong)
        with pytest.raises(InvalidValue, match="title"):
            await chats.service.stream_agent_chat("g", "x", owner=ANN, title=wrong)
        assert len(await chats.stores.chats.list(owner=ANN)) == 1


NAMES = (None, 3, b"x", ["x"], {}, "", "\ud800", "a\0b", "x" * 201)
"""What is no name and no id of anything."""


@pytest.mark.parametrize("wrong", NAMES)
async def test_what_is_no_name_is_refused_by_the_name_of_its_field(wrong: Any) -> None:
    async with chatting() as chats:
        service, id = chats.service, chats.chat_id
        requests: list[tuple[str, Any]] = [
            ("owner", lambda: service.create_chat(owner=wrong, graph_id="g")),
            ("graph_id", lambda: service.create_chat(owner=ANN, graph_id=wrong)),
            ("graph_id", lambda: service.stream_agent_chat(wrong, "x", owner=ANN)),
            ("chat_id", lambda: service.get_chat(wrong)),
            ("chat_id", lambda: service.tree(wrong)),
            ("chat_id", lambda: service.stream_chat(wrong, "x", owner=ANN)),
            ("message_id", lambda: service.switch(id, wrong)),
            ("message_id", lambda: service.retry_message(id, wrong, owner=ANN)),
            ("message_id", lambda: service.continue_message(id, wrong, owner=ANN)),
            ("message_id", lambda: service.edit_user_message(id, wrong, "x", owner=ANN)),
            ("owner", lambda: service.attach(wrong, "x", "a/b", b"")),
            ("attachment", lambda: service.attachment(wrong, owner=ANN)),
            ("attachment", lambda: service.stream_chat(id, "x", owner=ANN, attachments=[wrong])),
        ]
        if wrong is not None:  # which means any owner, or no id
            requests += [
                ("owner", lambda: service.get_chat(id, owner=wrong)),
                ("chat_id", lambda: service.create_chat(owner=ANN, graph_id="g", chat_id=wrong)),
                ("message_id", lambda: service.stream_chat(id, "x", owner=ANN, parent_id=wrong)),
                ("run_id", lambda: service.stream_chat(id, "x", owner=ANN, run_id=wrong)),
                ("run_id", lambda: service.stream_agent_chat("g", "x", owner=ANN, run_id=wrong)),
            ]
        for field, ask in requests:
            with pytest.raises(InvalidValue, match=field):
                await ask()
        assert len(await chats.service.tree(id)) == 0
        assert len(await chats.stores.chats.list(owner=ANN)) == 1


@pytest.mark.parametrize("wrong", [None, "abc", b"abc", 3, {"a": 1}, {"a"}])
async def test_a_list_is_one_and_a_text_is_none(wrong: Any) -> None:
    async with chatting() as chats:
        for field in ("attachments", "user_tools"):
            with pytest.raises(InvalidValue, match=f"{field} must be a list"):
                await chats.service.stream_chat(chats.chat_id, "x", owner=ANN, **{field: wrong})
        assert len(await chats.service.tree(chats.chat_id)) == 0


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        *[("limits", one) for one in (3, "x", ["max_steps"], {"max_steps": "x"}, {"max_cost_usd": float("nan")})],
        *[("limits", one) for one in (0, "", [])],
        *[("version", one) for one in (0, -1, True, "1", 1.0)],
        *[("about", one) for one in (3, "x", ["x"])],
    ],
)
async def test_what_a_run_cannot_be_given_is_refused_before_anything_is_written(field: str, wrong: Any) -> None:
    async with chatting() as chats:
        with pytest.raises(InvalidValue):
            await chats.service.stream_chat(chats.chat_id, "x", owner=ANN, **{field: wrong})
        assert len(await chats.service.tree(chats.chat_id)) == 0


@pytest.mark.parametrize("content", [None, "text", 3, ["x"]])
async def test_what_is_attached_is_bytes(content: Any) -> None:
    async with chatting() as chats:
        with pytest.raises(InvalidValue, match="attachment must be bytes"):
            await chats.service.attach(ANN, "x", "a/b", content)
        for name, media_type in ((None, "a/b"), (3, "a/b"), ("x", None), ("x", b"a/b"), ("\ud800", "a/b")):
            with pytest.raises(InvalidValue, match="on one line"):
                await chats.service.attach(ANN, name, media_type, b"")  # type: ignore[arg-type]
