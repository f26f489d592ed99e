"""INV 12: planted secrets never leave over HTTP: not in answers, logs, streams, metrics, or a database."""

from __future__ import annotations

import logging

import pytest

from penstock.chat.service import ChatService
from penstock.hosting.host import HostSettings, RunHost
from penstock.server.app import create_app
from penstock.server.settings import ServerSettings
from penstock.storage import open_stores
from tests.reliability.kept import Kept, kept, postgres_server, postgres_url
from tests.server.served import CHAT, ECHO, SECRETS, TOKENS, Echo, Gate, Served, served
from tests.server.test_matrix import ask, declared, prepared

__all__ = ["kept", "postgres_server", "postgres_url"]

pytestmark = pytest.mark.reliability

CANARIES = [*SECRETS.values(), "canary-env-0123456789", "canary-db-0123456789"]


def leaks(text: str) -> list[str]:
    return [canary for canary in CANARIES if canary in text]


class Broken:
    """An executor whose error says too much."""

    async def execute(self, *_: object) -> None:
        raise RuntimeError("cannot reach postgresql://admin:canary-db-0123456789@db/prod")


async def test_no_response_of_any_route_contains_a_secret(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "canary-env-0123456789")
    with caplog.at_level(logging.DEBUG):
        async with served() as server:
            things = await prepared(server)
            for name in ("ann", "vera", "root", None):
                async with server.client(name) as client:
                    for method, path, _ in declared():
                        answer = await ask(client, method, path, things["ann"])
                        assert leaks(answer.text + str(answer.headers)) == [], (method, path)
    assert leaks(caplog.text) == []


async def test_secrets_are_removed_from_published_errors(caplog: pytest.LogCaptureFixture) -> None:
    graph = {"nodes": [{**ECHO["nodes"][0], "type": "broken"}], "edges": []}
    with caplog.at_level(logging.DEBUG):
        async with served() as server, server.client("ann") as ann:
            server.host.executors.register("broken", Broken())
            await server.save("broken", graph)
            run = (await ann.post("/api/runs", json={"graph_id": "broken"})).json()
            await server.host.wait(run["id"])
            paths = ("", "/events", "/export")
            shown = [(await ann.get(f"/api/runs/{run['id']}{path}")).text for path in paths]
            assert "RuntimeError" in shown[1]
            assert leaks("".join(shown)) == []
    assert leaks(caplog.text) == []


def test_tokens_are_kept_as_digests_alone() -> None:
    settings = ServerSettings(tokens=TOKENS)
    assert leaks(repr(settings) + repr(TOKENS)) == []
    assert leaks(str([token.digest for token in TOKENS])) == []


async def test_the_database_of_a_server_has_no_token_in_it(kept: Kept) -> None:
    async with await open_stores(kept.url) as stores:
        executors = {"echo": Echo(), "gate": Gate()}
        async with RunHost(stores, executors=executors, settings=HostSettings(drain_s=0)) as host:
            chats = ChatService(host, stores.chats)
            app = create_app(host, chats, stores, ServerSettings(tokens=TOKENS))
            server = Served(app, host, chats, stores, Gate())  # type: ignore[arg-type]
            async with server.client("ann") as ann:
                echo = {"nodes": [CHAT["nodes"][1]], "edges": []}
                assert (await ann.put("/api/graphs/echo", json={"document": echo})).status_code == 200
                run = (await ann.post("/api/runs", json={"graph_id": "echo", "input": "kept-text"})).json()
                assert (await host.wait(run["id"])).status == "completed"
    found = b"".join((await kept.everything()).values())
    assert b"kept-text" in found
    assert [one for one in CANARIES if one.encode() in found] == []
