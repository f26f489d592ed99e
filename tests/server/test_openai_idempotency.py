"""A request that names its run is that run when it is sent again, and a conflict when it asks for something else."""

from __future__ import annotations

import asyncio
import base64
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx2
import openai
import pytest

from penstock.hosting.limits import RunLimits
from tests.server.openai_service import ANNA, Served, serving
from tests.server.served import CHAT, served
from tests.storage.postgres import postgres_server, postgres_url

__all__ = ["postgres_server", "postgres_url"]

NAMED = {"run_id": "mine"}


def shown(content: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(content).decode()}"}}


def see(*pictures: bytes, text: str = "See?") -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text}, *map(shown, pictures)]}


def see_item(*pictures: bytes) -> dict[str, Any]:
    parts = [{"type": "input_image", "image_url": shown(one)["image_url"]["url"]} for one in pictures]
    return {"role": "user", "content": [{"type": "input_text", "text": "See?"}, *parts]}


async def completed(client: openai.AsyncOpenAI, messages: list[Any], **penstock: Any) -> str:
    body = {"penstock": {**NAMED, **penstock}}
    answer = await client.chat.completions.create(model="parrot", messages=messages, extra_body=body)
    assert answer.id.endswith("mine")
    return str(answer.choices[0].message.content)


async def ran_once(served: Served) -> bool:
    return [run.id for run in await served.runs()] == ["mine"]


@pytest.mark.parametrize("url", ["memory:", "sqlite"])
async def test_a_completion_with_another_picture_is_a_conflict_and_not_the_old_answer(url: str, tmp_path: Any) -> None:
    kept = url if url == "memory:" else f"sqlite:///{tmp_path}/p.db"
    async with serving(url=kept) as served, served.client(max_retries=0) as client:
        history = [see(b"dam", text="One"), {"role": "assistant", "content": "One"}]
        for _ in range(2):
            assert await completed(client, [*history, see(b"cat", b"dog")]) == "See?"
        wrong: list[list[Any]] = [
            [*history, see(b"cat", b"cow")],
            [*history, see(b"cat", b"doggy")],
            [*history, see(b"cat")],
            [*history, see()],
            [*history, see(b"dog", b"cat")],
            [see(b"sea", text="One"), history[1], see(b"cat", b"dog")],
            [see(text="One"), history[1], see(b"dam", b"cat", b"dog")],
        ]
        for messages in wrong:
            with pytest.raises(openai.ConflictError, match="'mine' answers something else"):
                await completed(client, messages)
        assert await ran_once(served)


async def test_a_completion_within_other_limits_is_a_conflict() -> None:
    async with serving() as served, served.client(max_retries=0) as client:
        limits = {"max_cost_usd": "2.50"}
        for same in (limits, {"max_cost_usd": 2.5}, None):
            assert await completed(client, [see()], limits=same) == "See?"
        for wrong in ({"max_cost_usd": 2}, {**limits, "max_steps": 40}):
            with pytest.raises(openai.ConflictError, match="its limits"):
                await completed(client, [see()], limits=wrong)
        assert await ran_once(served)


async def test_a_halted_completion_is_answered_after_a_grant_when_repeated() -> None:
    async with serving() as served, served.client(max_retries=0) as client:
        body = {"penstock": {**NAMED, "limits": {"max_api_calls": 1}}}
        request_fields: Any = {"model": "looker", "messages": [{"role": "user", "content": "look"}], "extra_body": body}
        with pytest.raises(openai.APIStatusError):
            await client.chat.completions.create(**request_fields)
        await served.host.grant("mine", RunLimits(max_api_calls=1), by="anna")
        answer = await client.chat.completions.create(**request_fields)
        assert answer.choices[0].message.content == "Bright."
        assert await ran_once(served)


@pytest.mark.parametrize("goes_on", [False, True])
async def test_a_response_with_another_picture_or_within_other_limits_is_a_conflict(goes_on: bool) -> None:
    async with serving() as served, served.client(max_retries=0) as client:
        before = (await client.responses.create(model="parrot", input="One")).id if goes_on else None

        async def respond(item: Any, **penstock: Any) -> str:
            body, request_fields = {"penstock": {**NAMED, **penstock}}, {"model": "parrot", "input": [item]}
            response = await client.responses.create(**request_fields, previous_response_id=before, extra_body=body)
            return response.id

        for _ in range(2):
            assert await respond(see_item(b"cat"), limits={"max_steps": 40}) == "resp_mine"
        for item, limits in ((see_item(b"cow"), 40), (see_item(), 40), (see_item(b"cat"), 41)):
            with pytest.raises(openai.ConflictError):
                await respond(item, limits={"max_steps": limits})
        assert len(await served.runs()) == 1 + goes_on


@pytest.mark.parametrize("model", ["parrot", "plain"])
async def test_a_repeated_response_keeps_its_metadata(url: str, model: str) -> None:
    async with serving(url=url) as served, served.client(max_retries=0) as client:
        for metadata in ({"for": "this"}, {"for": "that"}, None):
            response = await client.responses.create(
                model=model, input="x", metadata=metadata, extra_body={"penstock": NAMED}
            )
            assert response.metadata == {"for": "this"}
        with pytest.raises(openai.ConflictError):
            await client.responses.create(model=model, input="y", extra_body={"penstock": NAMED})
        assert await ran_once(served)


async def test_a_message_of_a_chat_with_another_picture_or_within_other_limits_is_a_conflict() -> None:
    async with serving() as served:
        headers = {"Authorization": f"Bearer {ANNA}"}
        async with httpx2.AsyncClient(base_url=served.url, headers=headers) as client:
            chat = (await client.post("/api/chats", json={"graph_id": "parrot"})).json()["id"]
            files = [
                (await client.post("/api/attachments?name=a.png&media_type=image/png", content=one)).json()["id"]
                for one in (b"cat", b"cow")
            ]

            async def say(**body: Any) -> int:
                request_fields = {"content": "See?", "run_id": "mine", **body}
                return (await client.post(f"/api/chats/{chat}/messages", json=request_fields)).status_code

            same: Any = {"attachments": files[:1], "limits": {"max_steps": 40}}
            assert [await say(**same), await say(**same)] == [200, 200]
            for wrong in (
                {"attachments": files[1:]},
                {"attachments": []},
                {"limits": {"max_steps": 41}},
            ):
                assert await say(**{**same, **wrong}) == 409
            assert await say(**{**same, "limits": None}) == 200, "limits that are not named may be any"
        assert await ran_once(served)


@asynccontextmanager
async def two_servers(url: str) -> AsyncIterator[list[Served]]:
    """Two over one database; of memory there is one for each, and so one server."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(serving(url=url)) for _ in range(1 if url == "memory:" else 2)]


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Any) -> str:
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    return "memory:" if request.param == "memory" else f"sqlite:///{tmp_path}/p.db"


async def at_once(servers: list[Served], ask: Callable[[Served], Awaitable[str]]) -> set[str]:
    """What is answered to four that ask the same at once, of each server in turn."""
    return {*await asyncio.gather(*(ask(servers[at % len(servers)]) for at in range(4)))}


@pytest.mark.parametrize("model", ["parrot", "plain"])
async def test_concurrent_identical_requests_share_one_run(url: str, model: str) -> None:
    async with two_servers(url) as servers:

        async def complete(served: Served) -> str:
            async with served.client(max_retries=0) as client:
                sent: Any = [{"role": "user", "content": "Hi"}]
                body: Any = {"penstock": {"run_id": "completion"}}
                return (await client.chat.completions.create(model=model, messages=sent, extra_body=body)).id

        async def respond(served: Served) -> str:
            async with served.client(max_retries=0) as client:
                body: Any = {"penstock": {"run_id": "response"}}
                return (await client.responses.create(model=model, input="Hi", extra_body=body)).id

        assert len(await at_once(servers, complete)) == 1
        assert await at_once(servers, respond) == {"resp_response"}
        assert {run.id for run in await servers[0].runs()} == {"completion", "response"}


async def test_concurrent_identical_continuations_are_stored_once(url: str) -> None:
    async with two_servers(url) as servers:
        async with servers[0].client() as client:
            before = (await client.responses.create(model="parrot", input="One")).id

        async def go_on(served: Served) -> str:
            async with served.client(max_retries=0) as client:
                request_fields: Any = {"input": [see_item(b"cat")], "previous_response_id": before}
                body: Any = {"penstock": NAMED}
                return (await client.responses.create(model="parrot", **request_fields, extra_body=body)).id

        async def say(served: Served) -> str:
            headers = {"Authorization": f"Bearer {ANNA}"}
            async with httpx2.AsyncClient(base_url=served.url, headers=headers) as client:
                answer = await client.post("/api/chats/c/messages", json={"content": "Hi", "run_id": "sent"})
                assert answer.status_code == 200, answer.text
                return str(answer.json()["run_id"])

        async with httpx2.AsyncClient(base_url=servers[0].url, headers={"Authorization": f"Bearer {ANNA}"}) as client:
            await client.post("/api/chats", json={"graph_id": "parrot", "chat_id": "c"})
        assert await at_once(servers, go_on) == {"resp_mine"}
        assert await at_once(servers, say) == {"sent"}
        await servers[0].run("sent")
        assert len(await servers[0].runs()) == 3


@pytest.mark.requirement("X-14")
@pytest.mark.parametrize("kind", ["completion", "stream", "response"])
async def test_a_run_with_an_idempotency_key_waits_for_its_client_to_come_back_to_any_server(
    url: str, kind: str
) -> None:
    async with two_servers(url) as servers, servers[0].client(max_retries=0) as client:
        first, last = servers[0], servers[-1]

        def send(to: openai.AsyncOpenAI, **more: Any) -> asyncio.Future[Any]:
            named: Any = {"extra_headers": {"Idempotency-Key": "order 1"}, **more}
            if kind == "response":
                return asyncio.ensure_future(to.responses.create(model="slow", input="x", **named))
            messages: Any = [{"role": "user", "content": "x"}]
            create: Any = to.chat.completions.create(model="slow", messages=messages, stream=kind == "stream", **named)
            return asyncio.ensure_future(create)

        lost = send(client)
        await first.gate.reached.wait()
        if kind == "stream":
            await (await lost).close()
        else:
            lost.cancel()
            await asyncio.gather(lost, return_exceptions=True)
        await first.no_open_streams()
        while [*first.app.state.retries]:  # noqa: ASYNC110  until the server has noticed
            await asyncio.sleep(0.01)
        async with last.client(max_retries=0) as elsewhere:
            again = send(elsewhere)
            first.gate.opened.set()
            answer = await again
            if kind == "response":
                text = answer.output_text
            elif kind == "completion":
                text = answer.choices[0].message.content
            else:
                text = "".join([chunk.choices[0].delta.content or "" async for chunk in answer])
        assert text == "After all: x"
        (run,) = await first.runs()
        assert (run.status, first.models["slow"].calls) == ("completed", 1)


async def test_a_run_with_an_idempotency_key_is_cancelled_if_the_request_says_so() -> None:
    async with serving() as served, served.client(max_retries=0) as client:
        lost = asyncio.ensure_future(
            client.chat.completions.create(
                model="slow",
                messages=[{"role": "user", "content": "x"}],
                extra_headers={"Idempotency-Key": "order 1"},
                extra_body={"penstock": {"on_disconnect": "cancel"}},
            )
        )
        await served.gate.reached.wait()
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        (run,) = await served.runs()
        assert (await served.run(run.id)).status == "cancelled"


class Seen:
    """Chats that two look for a place in at the same time, of whom the first finds none."""

    def __init__(self, chats: Any) -> None:
        self._chats = chats
        self._meeting = asyncio.Barrier(2)

    async def marked(self, keys: Any) -> Any:
        found = await self._chats.marked(keys)
        return None if await self._meeting.wait() else found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chats, name)


async def test_concurrent_requests_that_find_different_places_share_one_run() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("chat", CHAT)

        async def complete(*history: str, **more: Any) -> Any:
            roles = itertools.cycle(("user", "assistant"))
            sent = [{"role": role, "content": text} for role, text in zip(roles, history, strict=False)]
            answer = await ann.post("/v1/chat/completions", json={"model": "chat", "messages": sent, **more})
            assert answer.status_code == 200, answer.text
            return answer.json()

        first = await complete("One")
        stores: Any = server.stores
        stores.chats = Seen(stores.chats)
        texts = "One", first["choices"][0]["message"]["content"], "Two"
        again = await asyncio.gather(*(complete(*texts, penstock=NAMED) for _ in range(2)))
        assert [one["penstock"]["run_id"] for one in again] == ["mine", "mine"]
        assert len(await stores.runs.list()) == 2
