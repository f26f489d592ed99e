"""Calls made against the rules of the server's own schema, on databases: what memory takes, they may not.

A NUL, half of a surrogate pair or a number that is too large is refused before a database sees it, or by a typed error.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from schemathesis import GenerationMode

from penstock.chat.service import ChatService
from penstock.hosting.host import HostSettings, RunHost
from penstock.nodes import executors
from penstock.server.app import create_app
from penstock.server.settings import ServerSettings
from penstock.storage import open_stores
from tests.server.served import Echo, Gate, Served
from tests.server.test_generated_calls import Asking, call_it
from tests.server.test_matrix import Things, prepared
from tests.soak import SOAK
from tests.storage.postgres import postgres_server, postgres_url

__all__ = ["postgres_server", "postgres_url"]


class AskingADatabase(Asking):
    """The same, of a server that stores what it gets."""

    def __init__(self, runner: asyncio.Runner, url: str) -> None:
        super().__init__(runner)
        self._url = url

    async def _begin(self) -> tuple[Any, Things]:
        gate, settings = Gate(), ServerSettings(max_streams_per_user=1_000)
        stores = await self._stack.enter_async_context(await open_stores(self._url))
        host = RunHost(
            stores,
            executors={**executors(), "gate": gate, "echo": Echo()},
            settings=HostSettings(tick_s=0.05, drain_s=0),
        )
        await self._stack.enter_async_context(host)
        chats = ChatService(host, stores.chats)
        server = Served(create_app(host, chats, stores, settings), host, chats, stores, gate)  # type: ignore[arg-type]
        things = await prepared(server)
        self._client = await self._stack.enter_async_context(server.client())
        return server.app.openapi(), things["ann"]


@pytest.mark.reliability
@pytest.mark.timeout(3_600 if SOAK else 300)
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
@pytest.mark.filterwarnings("ignore")
def test_no_call_against_the_rules_is_a_server_error(
    database: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    is_file = database == "sqlite"
    url = f"sqlite:///{tmp_path / 'data.db'}" if is_file else request.getfixturevalue("postgres_url")
    with asyncio.Runner() as runner:
        asking = AskingADatabase(runner, url)
        description, things = asking.begin()
        try:
            for found in schemathesis.openapi.from_dict(description).get_all_operations():
                call_it(asking, found.ok(), GenerationMode.NEGATIVE, things)
        finally:
            asking.end()
    assert asking.calls > 40
    assert 422 in asking.statuses
