"""Pictures of a conversation that is sent over /v1 are where they would be had it been held here turn by turn."""

from __future__ import annotations

import base64
from typing import Any

import openai
import pytest

from penstock.agents.messages import Media
from tests.server.openai_service import Served, serving

Seen = list[tuple[str, str, list[bytes]]]


def picture(number: int) -> dict[str, Any]:
    data = base64.b64encode(f"picture {number}".encode()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def user(number: int, *pictures: int) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": f"Turn {number}"}, *map(picture, pictures)]}


def shown_to(served: Served, model: str) -> Seen:
    """The last request to a model, as roles, texts and pictures; without its answer, which is there by then."""
    request = served.models[model].last_request
    assert request is not None
    received = []
    for message in request.messages:
        parts = message.content if isinstance(message.content, (list, tuple)) else []
        received.append((message.role, message.text, [one.data or b"" for one in parts if isinstance(one, Media)]))
    return received[:-1]


async def complete(client: openai.AsyncOpenAI, messages: list[Any]) -> None:
    answer = await client.chat.completions.create(model="parrot", messages=messages)
    messages.append({"role": "assistant", "content": answer.choices[0].message.content})


async def test_a_changed_history_shows_the_model_the_same_pictures() -> None:
    async with serving() as served, served.client() as client:
        messages: list[Any] = [{"role": "system", "content": "Look."}]
        for number in range(23):
            messages.append(user(number, number))
            await complete(client, messages)
        turn_by_turn = shown_to(served, "parrot")
        assert [data for _, _, data in turn_by_turn if data] == [[b"picture %d" % number] for number in range(23)]
        again = [{"role": "system", "content": "Look well."}, *messages[1:-1]]
        await complete(client, again)
        assert shown_to(served, "parrot") == [("system", "Look well.", []), *turn_by_turn[1:]]
        again.append(user(23, 23))
        await complete(client, again)
        assert shown_to(served, "parrot")[-1] == ("user", "Turn 23", [b"picture 23"])
        assert len(await served.stores.chats.list()) == 2, "the second one was gone on with"


async def test_pictures_of_a_tool_result_are_sent_with_the_next_user_message() -> None:
    async with serving() as served, served.client() as client:
        tool: Any = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "found"}, picture(2)]}
        messages: list[Any] = [user(1, 1), tool, user(2, 3), {"role": "assistant", "content": "Well"}, user(3)]
        await complete(client, messages)
        assert [data for _, _, data in shown_to(served, "parrot")] == [
            [b"picture 1"], [], [b"picture 2", b"picture 3"], [], [],
        ]  # fmt: skip


async def test_too_many_pictures_in_one_message_are_refused_with_its_path() -> None:
    async with serving() as served, served.client(max_retries=0) as client:
        most: list[Any] = [user(0, *range(20)), {"role": "assistant", "content": "Well"}, user(1, *range(20))]
        await complete(client, most)
        most.append(user(2, *range(21)))
        with pytest.raises(openai.BadRequestError, match="at most 20 pictures and files in one message") as refused:
            await complete(client, most)
        assert refused.value.param == "messages.4.content"
        assert "not 21" in str(refused.value)
        before = await client.responses.create(model="parrot", input="x")
        items = [
            {"role": "user", "content": [{"type": "input_image", "image_url": picture(at)["image_url"]["url"]}]}
            for at in range(21)
        ]
        with pytest.raises(openai.BadRequestError, match="stored as one message") as refused:
            await client.responses.create(model="parrot", input=items, previous_response_id=before.id)  # type: ignore[arg-type]
        assert refused.value.param == "input"
