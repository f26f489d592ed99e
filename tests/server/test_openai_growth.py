"""What /v1 stores: each message once, however often clients repeat the history, and for as long as runs are kept."""

from __future__ import annotations

import asyncio
import base64
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from penstock.agents.scripted import ScriptedModel
from penstock.chat.conversation import ChatMessage
from penstock.chat.ports import ChatRecord
from penstock.chat.service import ChatService
from penstock.hosting.host import HostSettings, RunHost
from penstock.hosting.retention import DAY_S, remove_ended
from penstock.nodes import executors
from penstock.server.app import create_app
from penstock.storage import Stores
from penstock.storage.memory import MemoryStores
from penstock.testing.clock import ManualClock
from tests.server.openai_service import BERT, GRAPHS, Served, chat_with, serving

PNG = b"\x89PNG of a dam"
PICTURE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(PNG).decode()}"}}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


async def complete(client: openai.AsyncOpenAI, messages: list[Any], model: str = "listener", **more: Any) -> str:
    """Send a request as clients do, with the whole history; the history has the answer afterwards."""
    answer = await client.chat.completions.create(model=model, messages=messages, **more)
    text = str(answer.choices[0].message.content)
    messages.append(assistant(text))
    return text


async def all_chats(served: Served) -> list[ChatRecord]:
    return list(await served.stores.chats.list(limit=1_000))


async def all_messages(served: Served) -> list[ChatMessage]:
    return [one for chat in await all_chats(served) for one in (await served.stores.chats.messages(chat.id))[0]]


def kept_beside_events(path: Path) -> tuple[int, int]:
    """The rows of all tables but that of events, and the bytes in them."""
    rows = size = 0
    with closing(sqlite3.connect(path)) as file:
        tables = file.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
        for (table,) in tables.fetchall():
            columns = [row[1] for row in file.execute(f"PRAGMA table_info({table})")]
            lengths = " + ".join(f"coalesce(length(CAST({column} AS BLOB)), 0)" for column in columns)
            found = file.execute(f"SELECT count(*), coalesce(sum({lengths}), 0) FROM {table}").fetchone()
            if table != "events":
                rows, size = rows + found[0], size + found[1]
    return rows, size


# Growth


async def test_a_conversation_sent_with_each_turn_stores_only_new_messages(tmp_path: Path) -> None:
    path = tmp_path / "penstock.db"
    async with serving(url=f"sqlite:///{path}") as served, served.client() as client:
        messages: list[Any] = [{"role": "system", "content": "Repeat."}]
        figures = {0: kept_beside_events(path)}
        for number in range(1, 81):
            messages.append(user(f"{number:04d} " * 200))
            assert await complete(client, messages, "parrot") == messages[-2]["content"]
            if number in (20, 40, 80):
                figures[number] = kept_beside_events(path)
        assert len(await all_chats(served)) == 1
        assert [one.content for one in await all_messages(served)] == [one["content"] for one in messages]
    (rows, size), (rows_40, size_40), (rows_80, size_80) = figures[20], figures[40], figures[80]
    assert rows_80 - rows_40 == 2 * (rows_40 - rows)
    assert size_80 - size_40 <= 2.05 * (size_40 - size)
    assert size_80 - figures[0][1] < 2 * (80 * 2 * 1_000)


async def test_the_model_receives_the_clients_messages() -> None:
    async with serving() as served, served.client() as client:
        messages: list[Any] = [{"role": "system", "content": "Be kind."}, user("One")]
        assert await complete(client, messages) == "system: Be kind. | user: One"
        messages[-1] = assistant("Edited by the client.")
        messages.append(user("Two"))
        expected = "system: Be kind. | user: One | assistant: Edited by the client. | user: Two"
        assert await complete(client, messages) == expected
        messages.append(user("Three"))
        assert await complete(client, messages) == f"{expected} | assistant: {expected} | user: Three"
        assert len(await all_chats(served)) == 1
        assert len(await all_messages(served)) == 8, "what was answered, and what the client made of it"


async def test_a_repeated_question_becomes_a_branch_of_the_same_chat() -> None:
    async with serving() as served, served.client() as client:
        messages = [user("One")]
        await complete(client, messages, "parrot")
        history = [*messages, user("Two")]
        await asyncio.gather(*(complete(client, [*history], "parrot") for _ in range(5)))
        (chat,) = await all_chats(served)
        assert len(await all_messages(served)) == 2 + 5 * 2
        await complete(client, [*history, assistant("Two"), user("Three")], "parrot")
        assert [one.id for one in await all_chats(served)] == [chat.id]
        assert len(await all_messages(served)) == 2 + 5 * 2 + 2


async def test_an_unknown_history_starts_a_new_chat() -> None:
    async with serving() as served, served.client() as client:
        examples = [user("1+1"), assistant("2"), user("2+2"), assistant("4")]
        for _ in range(3):
            assert await complete(client, [*examples, user("3+3")], "parrot") == "3+3"
        assert len(await all_chats(served)) == 3
        assert await complete(client, [*examples[2:], user("3+3")], "parrot") == "3+3"
        assert len(await all_chats(served)) == 4, "a history without its beginning is another one"


async def test_users_of_one_token_with_the_same_messages_get_separate_chats() -> None:
    async with serving() as served, served.client() as client:
        one, two, three = [user("Hello")], [user("Hello")], [user("Hello")]
        for history in (one, two, three):
            await complete(client, history)
        for name, history in (("ann", one), ("bob", two), ("cid", three)):
            for turn in range(3):
                history.append(user(f"I am {name}, {turn}"))
                await complete(client, history)
        whose = [
            {name for name in ("ann", "bob", "cid") for one in stored if f"I am {name}" in one.content}
            for stored in [(await served.stores.chats.messages(chat.id))[0] for chat in await all_chats(served)]
        ]
        assert sorted(map(sorted, whose)) == [[], [], [], ["ann"], ["bob"], ["cid"]]


async def test_the_user_field_separates_chats() -> None:
    async with serving() as served, served.client() as client:
        one, two = [user("Hello")], [user("Hello")]
        for name, history in (("ann", one), ("bob", two), ("ann", one), ("bob", two)):
            if len(history) > 1:
                history.append(user(f"I am {name}"))
            await complete(client, history, user=name)
        assert len(await all_chats(served)) == 2


async def test_a_chat_continues_only_for_its_owner_and_graph() -> None:
    async with serving() as served, served.client() as anna, served.client(BERT) as bert:
        messages = [user("One")]
        await complete(anna, messages, "parrot")
        for client, model in ((bert, "parrot"), (anna, "quiet"), (anna, "parrot")):
            assert await complete(client, [*messages, user("Two")], model) == "Two"
        chats = await all_chats(served)
        whose = sorted((chat.owner, chat.graph_id) for chat in chats)
        assert whose == [("anna", "parrot"), ("anna", "quiet"), ("bert", "parrot")]
        for chat in chats:
            assert {run.owner for run in await served.stores.runs.list(chat_id=chat.id)} == {chat.owner}


async def test_streams_and_responses_continue_stored_chats_too() -> None:
    async with serving() as served, served.client() as client:
        messages: list[Any] = [user("One")]
        await complete(client, messages, "parrot")
        messages.append(user("Two"))
        stream = await client.chat.completions.create(model="parrot", messages=messages, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]) == "Two"
        longer = [*messages, assistant("Two"), user("Three")]
        response = await client.responses.create(model="parrot", input=longer)
        assert response.output_text == "Three"
        second: Any = [*longer, *[item.model_dump() for item in response.output], user("Four")]
        assert (await client.responses.create(model="parrot", input=second)).output_text == "Four"
        later = await client.responses.create(model="parrot", input="Five", previous_response_id=response.id)
        assert later.output_text == "Five"
        assert len(await all_chats(served)) == 1
        assert len(await all_messages(served)) == 2 * 5


async def test_a_named_run_is_found_after_its_conversation_continued() -> None:
    async with serving() as served, served.client() as client:
        messages = [user("One")]
        await complete(client, messages, "parrot")
        messages.append(user("Two"))
        named = {"penstock": {"run_id": "anna:two"}}
        await complete(client, [*messages], "parrot", extra_body=named)
        await complete(client, [user("One")], "parrot")  # from now on this is the latest place of "One"
        await complete(client, [*messages], "parrot", extra_body=named)
        assert len(await served.runs()) == 3
        for other in ([user("Two")], [user("Uno"), *messages[1:]], [*messages[:-1], user("Zwei")]):
            with pytest.raises(openai.ConflictError, match="answers something else"):
                await complete(client, other, "parrot", extra_body=named)


async def test_a_removed_conversation_starts_again() -> None:
    async with serving() as served, served.client() as client:
        messages = [user("One")]
        await complete(client, messages)
        (chat,) = await all_chats(served)
        await served.stores.chats.remove(chat.id)
        messages.append(user("Two"))
        assert (await complete(client, messages)).endswith("user: Two")
        assert len(await all_messages(served)) == 4


# Pictures


async def test_a_picture_sent_with_every_turn_is_stored_once() -> None:
    async with serving() as served, served.client() as client:
        messages: list[Any] = [user([{"type": "text", "text": "One"}, PICTURE])]
        await complete(client, messages, "parrot")
        for text in ("Two", "Three"):
            messages.append(user(text))
            await complete(client, messages, "parrot")
        attached = [one.data.get("attachments") for one in await all_messages(served) if one.role == "user"]
        assert [len(one or ()) for one in attached] == [1, 0, 0]
        messages[0] = user([{"type": "text", "text": "One"}, {**PICTURE, "image_url": {"url": "data:image/png,other"}}])
        messages.append(user("Four"))
        await complete(client, messages, "parrot")
        assert len(await all_chats(served)) == 2, "with another picture it is another conversation"


async def test_a_picture_of_a_repeated_request_is_stored_once(tmp_path: Path) -> None:
    path = tmp_path / "penstock.db"
    async with serving(url=f"sqlite:///{path}") as served, served.client() as client:
        shown: Any = user([{"type": "input_text", "text": "See"}, {**PICTURE, "type": "input_image"}])
        shown["content"][1]["image_url"] = PICTURE["image_url"]["url"]  # type: ignore[index]
        first = await client.responses.create(model="parrot", input="One")
        for before in (None, first.id):
            for _ in range(2):
                named = {"penstock": {"run_id": f"anna:{before}"}}
                await client.responses.create(
                    model="parrot", input=[shown], previous_response_id=before, extra_body=named
                )
        assert len(await served.runs()) == 3
        (one, other) = [one.data["attachments"] for one in await all_messages(served) if one.data.get("attachments")]
        for attached in (*one, *other):
            assert await served.stores.chats.attachment(attached["id"]) is not None
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("SELECT count(*) FROM attachments").fetchone() == (2,)


@pytest.mark.parametrize("endpoint", ["completions", "responses", "next response"])
async def test_a_refused_request_stores_nothing(endpoint: str, tmp_path: Path) -> None:
    path = tmp_path / "penstock.db"
    settings = HostSettings(max_running=1, max_queued=1, drain_s=0)
    async with serving(settings, f"sqlite:///{path}") as served, served.client(max_retries=0) as client:
        first = await client.responses.create(model="parrot", input="x")
        await client.responses.create(model="slow", input="x", background=True)
        await served.gate.reached.wait()
        await client.responses.create(model="slow", input="x", background=True)
        before = kept_beside_events(path)
        shown = {"type": "input_image", "image_url": PICTURE["image_url"]["url"]}  # type: ignore[index]
        item: Any = user([{"type": "input_text", "text": "See"}, shown])
        for _ in range(5):
            with pytest.raises(openai.RateLimitError):
                if endpoint == "completions":
                    await complete(client, [user([{"type": "text", "text": "See"}, PICTURE])], "slow")
                elif endpoint == "responses":
                    await client.responses.create(model="slow", input=[item])
                else:
                    await client.responses.create(model="parrot", input=[item], previous_response_id=first.id)
        assert kept_beside_events(path) == before


# Retention


@asynccontextmanager
async def kept_for(days: int, clock: ManualClock) -> AsyncIterator[tuple[RunHost, Any, openai.AsyncOpenAI]]:
    """A service whose runs are kept for so many days of this clock, and a client of it."""
    stores: Any = MemoryStores(clock=clock)
    models = {"parrot": ScriptedModel(lambda request: request.messages[-1].text, name="parrot")}
    settings = HostSettings(keep_days=days, drain_s=0)
    host = RunHost(stores, executors=executors(), services={"models": models}, settings=settings, clock=clock)
    chats = ChatService(host, stores.chats, clock=clock)
    await stores.graphs.save("parrot", "local", "Parrot", chat_with("parrot"), now_ms=0)
    inside = httpx2.AsyncClient(transport=httpx2.ASGITransport(create_app(host, chats, stores)))
    client = openai.AsyncOpenAI(api_key="-", base_url="http://127.0.0.1/v1", http_client=inside)
    async with host, client:
        yield host, chats, client


async def test_chats_created_by_requests_are_removed_with_their_runs_and_others_stay() -> None:
    clock = ManualClock(start_ns=1_000)
    async with kept_for(3, clock) as (host, chats, client):
        stores: Stores = host.stores  # type: ignore[assignment]
        picture = await chats.attach("local", "dam.png", "image/png", PNG)
        theirs = await chats.stream_agent_chat("parrot", "Mine", owner="local", attachments=[picture.id])
        await theirs.result()
        messages: list[Any] = [user([{"type": "text", "text": "One"}, PICTURE])]
        await complete(client, messages, "parrot")
        (made,) = [chat for chat in await stores.chats.list() if chat.id != theirs.chat_id]
        (attached,) = (await stores.chats.messages(made.id))[0][0].data["attachments"]
        clock.advance(2 * DAY_S)
        await complete(client, [*messages, user("Two")], "parrot")
        clock.advance(2 * DAY_S)
        await remove_ended(host._context)
        assert len(await stores.runs.list()) == 1, "the first two are gone"
        assert len((await stores.chats.messages(made.id))[0]) == 4, "the chat is in use"
        clock.advance(2 * DAY_S)
        await remove_ended(host._context)
        assert list(await stores.runs.list()) == []
        assert [chat.id for chat in await stores.chats.list()] == [theirs.chat_id]
        assert await stores.chats.attachment(attached["id"]) is None
        assert await stores.chats.attachment(picture.id) is not None
        await complete(client, [*messages, user("Three")], "parrot")


async def test_a_chat_stays_while_one_of_its_runs_may_continue() -> None:
    clock = ManualClock(start_ns=1_000)
    async with kept_for(3, clock) as (host, _, client):
        stores: Stores = host.stores  # type: ignore[assignment]
        await stores.graphs.save("question", "local", "Question", GRAPHS["question"], now_ms=0)
        begun = await client.responses.create(model="question", input="Shall I?", background=True)
        run_id = begun.id.removeprefix("resp_")
        async for event in host.events(run_id):
            if event.type == "run.waiting":
                break
        clock.advance(40 * DAY_S)
        await remove_ended(host._context)
        (chat,) = await stores.chats.list()
        assert [one.data["state"] for one in (await stores.chats.messages(chat.id))[0]] == ["complete", "writing"]
        await client.responses.cancel(begun.id)
        assert [one.data["state"] for one in (await stores.chats.messages(chat.id))[0]] == ["complete", "partial"]


async def test_a_response_can_be_continued_only_after_it_ended() -> None:
    async with serving() as served, served.client() as client:
        first = await client.responses.create(model="slow", input="x", background=True)
        await served.gate.reached.wait()
        with pytest.raises(openai.BadRequestError, match="previous_response_id must be a response that has ended"):
            await client.responses.create(model="slow", input="y", previous_response_id=first.id)
        assert len(await served.runs()) == 1


# Deleting


async def test_deleting_the_last_response_removes_its_chat() -> None:
    async with serving() as served, served.client() as client:
        first = await client.responses.create(model="parrot", input="One")
        second = await client.responses.create(model="parrot", input="Two", previous_response_id=first.id)
        async with httpx2.AsyncClient(base_url=str(client.base_url), headers=client.auth_headers) as http:
            deleted = await http.delete(f"responses/{first.id}")
        assert deleted.json() == {"id": first.id, "object": "response", "deleted": True}
        for again in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(openai.NotFoundError):
                await again(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="parrot", input="Else", previous_response_id=first.id)
        third = await client.responses.create(model="listener", input="x")
        assert len(await all_messages(served)) == 4 + 2, "what the second went on from stays"
        for one in (second, third):
            await client.responses.delete(one.id)
        assert await all_chats(served) == await served.runs() == []


async def test_a_response_is_deleted_only_by_its_owner_and_after_its_end() -> None:
    async with serving() as served, served.client() as client, served.client(BERT) as bert:
        begun = await client.responses.create(model="slow", input="x", background=True)
        await served.gate.reached.wait()
        with pytest.raises(openai.ConflictError, match="cancel it first"):
            await client.responses.delete(begun.id)
        await client.responses.cancel(begun.id)
        with pytest.raises(openai.NotFoundError):
            await bert.responses.delete(begun.id)
        await client.responses.delete(begun.id)
        assert await served.runs() == []


async def test_a_chat_created_by_a_user_stays_when_its_response_is_deleted() -> None:
    async with serving() as served, served.client() as client:
        chats = served.app.state.server.chats
        turn = await chats.stream_agent_chat("parrot", "Mine", owner="anna")
        await turn.result()
        await client.responses.delete(f"resp_{turn.run_id}")
        assert [chat.id for chat in await all_chats(served)] == [turn.chat_id]
