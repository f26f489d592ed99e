"""INV 12 over a whole service: secrets are planted where services have them, and everything that leaves, or is kept, is
searched for them.

A real provider's client with a key from the environment, a provider that fails and is called again, a tool and a node
whose errors say too much, callers with right and wrong tokens; on a real socket, over a real file or a real server.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest

from penstock.agents.messages import ToolCall
from penstock.agents.scripted import ScriptedModel
from penstock.agents.tools import tool
from penstock.chat.service import ChatService
from penstock.hosting.host import HostSettings, RunHost
from penstock.providers.models import OpenAIModel
from penstock.server.app import create_app
from penstock.server.auth import Token
from penstock.server.settings import ServerSettings
from penstock.storage import open_stores
from penstock.testing import RefuseFree, ServerError
from penstock.testing.provider import FakeProviderServer
from tests.nodes.graphs import graph, node, registry
from tests.reliability.kept import Kept, kept, postgres_server, postgres_url
from tests.server.served import listening

__all__ = ["kept", "postgres_server", "postgres_url"]

pytestmark = pytest.mark.reliability

ANN, ROOT, STRANGER = (f"4nAry-{name}-token-0123456789abcdef" for name in ("ann", "root", "stranger"))
API_KEY = "4nAry-of-the-environment-0123456789"
"""It looks like nothing: it is not found anywhere because it is put nowhere, not because it was recognised."""
IN_A_HEADER = "4nAryHeader0123456789"
IN_A_URL = "4nAryPassword0123456789"
IN_A_TEXT = "sk-proj-4nAryAbCdEf0123456789"
CANARIES = (ANN, ROOT, STRANGER, API_KEY, IN_A_HEADER, IN_A_URL, IN_A_TEXT)
TOKENS = (Token.of("ann", "user", ANN), Token.of("root", "admin", ROOT))

PLACES = {
    True: {"data.db", "data.db-wal", "data.db.ledger"},
    False: {"runs", "messages", "penstock_ledger_accounts"},
}
"""Some that have to be among those that are searched: files, or tables."""

OpenAIModel("fake-1", api_key="k")  # what the first one reads from disk is read before any loop runs


def leaks(found: bytes | str) -> list[str]:
    content = found.encode() if isinstance(found, str) else found
    return [canary for canary in CANARIES if canary.encode() in content]


@tool
def look_up(what: str) -> str:
    """Look something up."""
    raise RuntimeError(f"GET /{what} was refused; sent Authorization: Bearer {IN_A_HEADER} and key {IN_A_TEXT}")


class Broken:
    """A node whose error says too much."""

    async def execute(self, *_: object) -> None:
        raise ConnectionError(f"cannot reach postgresql://admin:{IN_A_URL}@db/prod, api_key={IN_A_TEXT}")


def chat_with(model: str, **data: Any) -> dict[str, Any]:
    nodes = [node("start", "chat-start"), node("agent", "agent", model=model, stream=True, **data)]
    return graph(nodes, ["start > agent"])


GRAPHS = {
    "remote": chat_with("remote"),
    "plain": graph([node("in", "input"), node("a", "llm-completion", model="remote")], ["in > a"]),
    "looker": chat_with("looker", tools=["look_up"]),
    "broken": graph([node("in", "input"), node("b", "broken")], ["in > b"]),
}


@asynccontextmanager
async def service(url: str, provider: FakeProviderServer) -> AsyncIterator[tuple[RunHost, tuple[str, int]]]:
    remote = OpenAIModel("fake-1", base_url=provider.openai_url, retries=2)
    looker = ScriptedModel(lambda request: _look(len(request.messages)))
    services = {"models": {"remote": remote, "looker": looker}, "tools": {"look_up": look_up}}
    executors = registry({"broken": Broken()})
    settings = HostSettings(tick_s=0.05, drain_s=0, daily_usd="10")
    async with await open_stores(url) as stores:
        for name, document in GRAPHS.items():
            await stores.graphs.save(name, "ann", name, document, now_ms=0)
        async with RunHost(stores, executors=executors, services=services, settings=settings) as host:
            chats = ChatService(host, stores.chats)
            async with listening(create_app(host, chats, stores, ServerSettings(tokens=TOKENS))) as address:
                yield host, address


def _look(messages: int) -> Any:
    return ToolCall("c1", "look_up", {"what": "it"}) if messages < 3 else "It cannot be found."


class Searched:
    """A client that keeps whatever comes back."""

    def __init__(self, address: tuple[str, int], token: str) -> None:
        headers = {"Authorization": f"Bearer {token}"}
        self.url = f"http://{address[0]}:{address[1]}"
        self._client = httpx2.AsyncClient(base_url=self.url, headers=headers, timeout=30)
        self.answers: list[str] = []

    async def __aenter__(self) -> Searched:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> httpx2.Response:
        answer = await self._client.request(method, path, json=body, headers=headers)
        self.answers.append(f"{answer.status_code} {dict(answer.headers)} {answer.text}")
        return answer


async def use(host: RunHost, ann: Searched) -> set[str]:
    """Chats and runs that succeed after retries, fail, and are looked at from all sides; what became of them."""
    run_ids = []
    for name in ("remote", "looker", "remote", "remote"):
        turn = await ann.ask("POST", f"/api/agents/{name}/chat?stream=true", {"content": f"hello {name}"})
        assert turn.status_code == 200
        run_ids += [run["id"] for run in (await ann.ask("GET", "/api/runs?limit=1")).json()["runs"]]
    for name in ("plain", "plain", "plain", "broken"):
        run_ids.append((await ann.ask("POST", "/api/runs", {"graph_id": name, "input": "hello"})).json()["id"])
    outcomes: set[str] = {(await host.wait(id)).status for id in run_ids}
    for id in run_ids:
        for path in ("", "/events", "/export"):
            assert (await ann.ask("GET", f"/api/runs/{id}{path}")).status_code == 200
    for chat in (await ann.ask("GET", "/api/chats")).json()["chats"]:
        await ann.ask("GET", f"/api/chats/{chat['id']}")
    await ann.ask("POST", f"/api/runs/{run_ids[-1]}/resume")
    await ann.ask("POST", f"/api/runs/{run_ids[-1]}/fork", {"at": "b"})
    completion = {"model": "looker", "messages": [{"role": "user", "content": "look"}], "stream": True}
    await ann.ask("POST", "/v1/chat/completions", completion)
    return outcomes


async def ask_wrongly(anyone: Searched) -> None:
    """Everything that answers with an error page."""
    for method, path in (("GET", "/api/me"), ("GET", "/nowhere"), ("POST", "/api/runs"), ("DELETE", "/health")):
        await anyone.ask(method, path, {"token": IN_A_TEXT} if method == "POST" else None)
    await anyone.ask("GET", f"/api/runs/{IN_A_TEXT}")
    await anyone.ask("GET", "/api/me", Cookie=f"session={IN_A_HEADER}")


def fails_now_and_then(provider_calls: list[int]) -> Any:
    fates = [ServerError(500), RefuseFree(429), "well", ServerError(503), "well again", RefuseFree(401), "fine"]

    def script(_: object) -> Any:
        provider_calls.append(1)
        return fates[(len(provider_calls) - 1) % len(fates)]

    return script


async def test_secrets_of_a_service_are_in_nothing_that_leaves_it_and_nothing_that_it_keeps(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", API_KEY)
    calls: list[int] = []
    with caplog.at_level(logging.DEBUG):
        async with FakeProviderServer(script=fails_now_and_then(calls)) as provider:
            async with service(kept.url, provider) as (host, address):
                async with Searched(address, ANN) as ann, Searched(address, STRANGER) as stranger:
                    outcomes = await use(host, ann)
                    await ask_wrongly(stranger)
                    await ask_wrongly(ann)
                async with Searched(address, ROOT) as root:
                    assert (await root.ask("GET", "/metrics")).status_code == 200
                    await root.ask("GET", "/ready")
                found = await kept.everything()
            sent = [dict(one.headers) for one in provider.requests]
        later = await kept.everything()
    assert any(API_KEY in str(headers) for headers in sent), "the key was used"
    assert "failed" in outcomes
    assert len(calls) > 6, "requests were sent again"
    assert found.keys() >= PLACES[kept.folder is not None]
    assert b"hello remote" in b"".join(found.values())
    for name, content in {**found, **{f"{name}, closed": one for name, one in later.items()}}.items():
        assert leaks(content) == [], name
    for answer in [*ann.answers, *stranger.answers, *root.answers]:
        assert leaks(answer) == [], answer
    own_requests = [
        record for record in caplog.records if record.getMessage().startswith(f"HTTP Request: GET {ann.url}")
    ]
    assert leaks("\n".join(_logged(record) for record in caplog.records if record not in own_requests)) == []
    assert leaks("".join(capfd.readouterr())) == []


def _logged(record: logging.LogRecord) -> str:
    """The whole of a record: its message, where it was raised, and what hangs on it."""
    return f"{logging.Formatter().format(record)} {record.__dict__}"
