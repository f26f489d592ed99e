"""INV 9: whatever a store does wrong, and at whichever call: no model call leaves unrecorded, callers are answered at
once when to come back, and when the store is well again the same requests succeed, once.

First every call of a chat over HTTP in virtual time, with each kind of fault and with stores that stay away for a
while; then real databases, hurt from outside.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from penstock.agents.model import Model, ModelRequest, ModelResponse
from penstock.chat.service import ChatService
from penstock.hosting.host import HostSettings, RunHost
from penstock.runtime.billing.usage import Usage
from penstock.server.app import create_app
from penstock.server.settings import ServerSettings
from penstock.storage.memory import MemoryStores
from penstock.testing import SimLoop, sim_run
from penstock.testing.faulty import FAULTS, Fault, FaultKind, FaultyStores
from tests.nodes.graphs import graph, node, registry
from tests.server.served import SECRETS, TOKENS, parse_events
from tests.soak import SOAK

pytestmark = [pytest.mark.reliability, pytest.mark.timeout(900)]

ANSWERS_WITHIN_S = 2.0
WELL_WITHIN_S = 30.0
AWAY_S = 10.0
"""Every call with every kind of fault; else each kind has some of the calls, and all calls have one."""

CHAT = graph([node("start", "chat-start"), node("A", "agent", model="m", stream=True)], ["start > A"])
COST_NANOS = 20_000


class Careful(Model):
    """A model that fails the test when it is called while its cost could not be recorded."""

    max_output_tokens = 64

    def __init__(self, ledger: Any) -> None:
        super().__init__("gpt-4o-mini")
        self._ledger = ledger
        self.answered = 0

    async def request(self, request: ModelRequest) -> ModelResponse:
        assert self._ledger.held(), "a call has left, and the ledger knows nothing of it"
        await asyncio.sleep(0.2)
        self.answered += 1
        usage = Usage.of(cost_usd="0.00002", input_tokens=9, output_tokens=9)
        return ModelResponse(f"answer to {request.messages[-1].text}", usage=usage)


class Outage(Fault):
    """All calls from the `at`-th on fail, for a while of virtual time."""

    __slots__ = ("until",)
    until: float | None

    def __init__(self, kind: FaultKind, at: int) -> None:
        super().__init__(kind, at)
        self.until = None

    def is_next(self, method: str) -> bool:
        self.calls += 1
        now = asyncio.get_running_loop().time()
        if self.calls == self.at:
            self.hit, self.until = method, now + AWAY_S
        return self.until is not None and now < self.until


@dataclass
class Service:
    """A server over stores that fail, and the stores that do not."""

    app: FastAPI
    stores: MemoryStores
    model: Careful

    def client(self) -> httpx2.AsyncClient:
        headers = {"Authorization": f"Bearer {SECRETS['ann']}"}
        transport = httpx2.ASGITransport(app=self.app)
        return httpx2.AsyncClient(transport=transport, base_url="http://localhost:8642", headers=headers)


@asynccontextmanager
async def serving(fault: Fault) -> AsyncIterator[Service]:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    stores = MemoryStores(clock=loop.clock)
    await stores.graphs.save("chat", "ann", "chat", CHAT, now_ms=0)
    faulty: Any = FaultyStores(stores, fault)
    model = Careful(stores.ledger)
    services = {"models": {"m": model}}
    settings = HostSettings(drain_s=0, daily_usd="1")
    host = RunHost(faulty, executors=registry(), services=services, settings=settings, worker="w", clock=loop.clock)
    async with host:
        chats = ChatService(host, faulty.chats, clock=loop.clock)
        yield Service(create_app(host, chats, faulty, ServerSettings(tokens=TOKENS)), stores, model)


async def ask(client: httpx2.AsyncClient, method: str, path: str, **options: Any) -> httpx2.Response:
    """Send a request as a careful client does: retry when the server says so."""
    loop = asyncio.get_running_loop()
    last_s = loop.time() + AWAY_S + WELL_WITHIN_S
    while True:
        began_s = loop.time()
        answer = await client.request(method, path, **options)
        assert loop.time() - began_s <= ANSWERS_WITHIN_S or "/events" in path, (method, path, loop.time() - began_s)
        if answer.status_code != 503:
            return answer
        assert 1 <= int(answer.headers["Retry-After"]) <= 5
        assert answer.json()["error"]["code"] in ("store_unavailable", "ledger_unavailable")
        assert loop.time() < last_s, "the stores are well, and the server is not"
        await asyncio.sleep(int(answer.headers["Retry-After"]))


async def follow(client: httpx2.AsyncClient, run_id: str) -> list[dict[str, Any]]:
    """All events of a run up to its end, taken up again wherever a stream broke off."""
    events: list[dict[str, Any]] = []
    while True:
        after = {"Last-Event-ID": events[-1]["id"]} if events else {}
        answer = await ask(client, "GET", f"/api/runs/{run_id}/events", headers=after)
        if answer.status_code == 204:  # the stream broke off behind the end
            return events
        assert answer.status_code == 200, answer.text
        came = parse_events(answer.text)
        events += [one for one in came if one["event"] != "error"]
        if not came or came[-1]["event"] != "error":
            return events
        await asyncio.sleep(1)


async def chat(fault: Fault) -> None:
    async with serving(fault) as service, service.client() as client:
        made = await ask(client, "POST", "/api/chats", json={"graph_id": "chat", "chat_id": "c"})
        assert made.status_code == 201, made.text
        for number in (1, 2):
            message = {"content": f"word {number}", "run_id": f"r{number}"}
            turn = await ask(client, "POST", "/api/chats/c/messages", json=message)
            assert turn.status_code == 200, turn.text
            events = await follow(client, f"r{number}")
            while events[-1]["event"] != "run.completed":  # the ledger could not record: nothing left, it is resumed
                assert events[-1]["event"] == "run.halted", events
                assert events[-1]["data"]["data"]["stop_reason"] == "ledger_unavailable"
                resumed = await ask(client, "POST", f"/api/runs/r{number}/resume")
                assert resumed.status_code in (200, 202), resumed.text
                events = await follow(client, f"r{number}")
            assert [int(one["id"]) for one in events] == [*range(1, len(events) + 1)]
        seen = (await ask(client, "GET", "/api/chats/c")).json()
        run = (await ask(client, "GET", "/api/runs/r2")).json()
        if isinstance(fault, Outage) and fault.until is not None:
            assert asyncio.get_running_loop().time() - fault.until <= WELL_WITHIN_S
        await asyncio.sleep(WELL_WITHIN_S)
        await check(service, seen, run)


async def check(service: Service, seen: dict[str, Any], run: dict[str, Any]) -> None:
    """Nothing is lost, and nothing was done twice."""
    texts = {one["id"]: one["content"] for one in seen["messages"]}
    shown = [texts[id] for id in seen["active"]]
    assert shown == ["word 1", "answer to word 1", "word 2", "answer to word 2"], json.dumps(seen)
    assert run["status"] == "completed"
    assert service.model.answered == 2
    ledger = service.stores.ledger
    assert not ledger.held()
    (day,) = [name for name in ledger._accounts if name.startswith("all:")]
    assert (ledger.balance(day).spent_nanos, ledger.balance(day).held_nanos) == (2 * COST_NANOS, 0)
    assert ledger.balance(day).unresolved_nanos == 0


def calls_of_a_chat() -> int:
    healthy = Fault("io", None)
    sim_run(lambda: chat(healthy), seed=9)
    assert healthy.calls > 60
    return healthy.calls


def with_a_fault(kind: FaultKind, at: int, make: Callable[[FaultKind, int], Fault]) -> None:
    """One chat in which the call of that number fails; an error says which it was."""
    fault = make(kind, at)
    try:
        sim_run(lambda: chat(fault), seed=at)
    except BaseException as error:
        error.add_note(f"call {at} failed: {kind} in {fault.hit}")
        raise


@pytest.mark.parametrize("kind", FAULTS)
def test_whichever_call_of_a_chat_fails_it_is_answered_once_and_paid_once(kind: FaultKind) -> None:
    first = 1 if SOAK else 1 + list(FAULTS).index(kind)
    for at in range(first, calls_of_a_chat(), 1 if SOAK else len(FAULTS)):
        with_a_fault(kind, at, Fault)


@pytest.mark.parametrize("kind", ["gone", "write-then-timeout"])
def test_a_chat_continues_after_its_stores_were_unavailable_from_any_moment(kind: FaultKind) -> None:
    for at in range(1, calls_of_a_chat(), 1 if SOAK else 7):
        with_a_fault(kind, at, Outage)
