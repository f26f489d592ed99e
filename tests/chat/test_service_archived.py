"""Chats with a graph that was archived: old messages can be read, and no new ones are accepted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from penstock.agents.scripted import ScriptedModel
from penstock.chat.turn import ChatTurn
from penstock.hosting.host import GraphArchived
from tests.chat.chats import ANN, chatting


async def test_turn_with_an_archived_graph_is_refused_and_not_stored() -> None:
    async with chatting(models={"A": ScriptedModel(lambda request: "an answer", name="A")}) as chats:
        service, chat_id = chats.service, chats.chat_id
        first = await service.stream_chat(chat_id, "one", owner=ANN, run_id="mine")
        await first.result()
        await chats.stores.graphs.archive("g")
        requests: list[Callable[[], Awaitable[ChatTurn]]] = [
            lambda: service.stream_chat(chat_id, "two", owner=ANN),
            lambda: service.stream_chat(chat_id, "two", owner=ANN, run_id="new"),
            lambda: service.stream_agent_chat("g", "two", owner=ANN),
            lambda: service.stream_agent_chat("g", "two", owner=ANN, version=1, run_id="other"),
            lambda: service.retry_message(chat_id, first.message_id, owner=ANN),
            lambda: service.continue_message(chat_id, first.message_id, owner=ANN),
            lambda: service.edit_user_message(chat_id, str(first.user_message_id), "uno", owner=ANN),
        ]
        for ask in requests:
            with pytest.raises(GraphArchived):
                await ask()
        assert [one.content for one in await service.tree(chat_id)] == ["one", "an answer"]
        assert [one.id for one in await chats.stores.chats.list()] == [chat_id]
        again = await service.stream_chat(chat_id, "one", owner=ANN, run_id="mine")
        assert again.message_id == first.message_id, "the turn from before is returned"
