"""INV 1 and 20 over several gateways on one database: clients that disconnect, errors, and gateways that are killed.

Each gateway is a process of its own. After the last client, a gateway on the same database leaves unresolved what the
killed ones held; then nothing is held, and the invoice is covered by what was spent and what is unresolved.

Calls that fit together by what they cost, and not by what they hold, wait for each other over all processes.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

import pytest

from penstock.containment.accounts import Balance
from penstock.gateway.key_accounts import KEYS
from penstock.gateway.processes import LEASE_S, Processes
from penstock.server.tokens import create_token
from penstock.storage import Stores, open_stores
from penstock.testing.clock import ManualClock
from penstock.testing.provider import FakeProvider, FakeProviderServer, by_chance
from tests.forked import Program
from tests.gateway.conftest import environment
from tests.gateway.test_inv_01_through_the_gateway import FAULTS, send_request, some_body
from tests.soak import SOAK, scaled
from tests.storage.postgres import postgres_server, postgres_url

__all__ = ["postgres_server", "postgres_url"]

T = TypeVar("T")

GATEWAYS = 4
CLIENTS = scaled(24, soak=500)
REQUESTS = scaled(3, soak=10)
KILLS = scaled(1, soak=6)
CEILING_USD = "0.50" if SOAK else "0.03"
PATIENT_GATEWAYS = scaled(2, soak=4)
PATIENT = scaled(16, soak=200)
"""Calls that are sent at once, each for $0.000777."""
PATIENT_USD = "0.25" if SOAK else "0.10"
"""What they cost together, and room for three of their holds of $0.03."""
WATCHER = "0" * 12
"""The mark of the gateway that looks after the killed ones."""

pytestmark = [pytest.mark.reliability, pytest.mark.usefixtures("forks")]


@pytest.fixture(params=["sqlite", "postgresql"])
def db(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/team.db"
    url: str = request.getfixturevalue("postgres_url")
    return url


class Gateways:
    """Running gateways, the killed ones replaced."""

    def __init__(
        self, db: str, provider: FakeProviderServer, folder: Path, stack: ExitStack, count: int = GATEWAYS
    ) -> None:
        (folder / "prices.py").write_text("from penstock import Price\nprices = {'fake-1': Price('3', '15')}\n")
        self._command = ["-m", "penstock.cli", "gateway", "--db", db, "--port", "0", "--prices", "prices:prices"]
        self._options = {"env": {**os.environ, **environment(provider)}, "cwd": folder}
        self._stack = stack
        self.programs = [self._start() for _ in range(count)]
        self.urls = [_url(program) for program in self.programs]

    def _start(self) -> Program:
        program = self._stack.enter_context(Program(self._command, **self._options))  # type: ignore[arg-type]
        self._stack.callback(program.kill)  # before its end is waited for, if the test fails
        return program

    def kill(self, at: int) -> None:
        self.programs[at].send_signal(signal.SIGKILL)
        self.programs[at].wait()
        self.programs[at] = self._start()
        self.urls[at] = _url(self.programs[at])

    def stop(self) -> list[int]:
        for program in self.programs:
            program.send_signal(signal.SIGTERM)
        return [program.wait() for program in self.programs]


def _url(program: Program) -> str:
    greeting = program.stderr.readline()
    assert greeting.startswith("Penstock gateway is listening on "), greeting
    return greeting.split()[-1]


@pytest.mark.requirement("X-12")
def test_invoice_never_passes_the_budget_of_a_key_and_nothing_stays_held(db: str, tmp_path: Path) -> None:
    with (
        FakeProviderServer(FakeProvider(latency_s=0.01), by_chance(FAULTS, seed=1)) as provider,
        ExitStack() as stack,
    ):
        key, id = asyncio.run(_with_stores(db, lambda stores: _new_key(stores, CEILING_USD)))
        gateways = Gateways(db, provider, tmp_path, stack)
        statuses = asyncio.run(_many_clients(gateways, key))
        assert gateways.stop() == [0] * GATEWAYS
        balance, left = asyncio.run(_with_stores(db, lambda stores: _drained(stores, id)))
    assert left == 0
    assert balance.held_nanos == balance.steps_open == 0
    assert provider.invoice.total_nanos <= balance.spent_nanos + balance.unresolved_nanos
    assert balance.spent_nanos + balance.unresolved_nanos <= balance.limits.cost_nanos
    assert statuses.count(200) > CLIENTS / 10
    assert 402 in statuses


async def _with_stores(db: str, use: Callable[[Stores], Awaitable[T]]) -> T:
    async with await open_stores(db) as stores:
        return await use(stores)


async def _new_key(stores: Stores, daily_usd: str) -> tuple[str, str]:
    now_ms = time.time_ns() // 1_000_000
    limits = {"daily_usd": daily_usd}
    record, secret = create_token("ann", "user", by="", now_ms=now_ms, kind="gateway", limits=limits)
    await stores.tokens.add(record)
    return secret, record.id


async def _drained(stores: Stores, id: str) -> tuple[Balance, int]:
    """Leave unresolved what killed gateways held; return the account of the key, and how many holds are left."""
    clock = ManualClock()
    processes = Processes(stores.ledger, WATCHER, clock)
    await processes.resolve_dead()
    clock.advance(LEASE_S + 1)
    await processes.resolve_dead()
    (account,) = [name for name in await asyncio.to_thread(stores.ledger.aged, 0) if name.startswith(f"{KEYS}{id}:")]
    return await asyncio.to_thread(stores.ledger.balance, account), len(await asyncio.to_thread(stores.ledger.held))


async def _many_clients(gateways: Gateways, key: str) -> list[int]:
    statuses: list[int] = []
    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(_client(gateways, key, random.Random(number), statuses))
        for number in range(KILLS):
            wanted = CLIENTS * REQUESTS * (number + 1) // (KILLS + 2)
            while len(statuses) < wanted:  # noqa: ASYNC110  # the clients count what they have sent
                await asyncio.sleep(0.01)
            await asyncio.to_thread(gateways.kill, number % GATEWAYS)
    return statuses


async def _client(gateways: Gateways, key: str, chance: random.Random, statuses: list[int]) -> None:
    for _ in range(REQUESTS):
        status = 0
        with suppress(OSError, asyncio.IncompleteReadError, IndexError):  # its gateway was killed
            url = chance.choice(gateways.urls)
            status = await send_request(url, key, some_body(chance), leaves_early=chance.random() < 0.15)
        statuses.append(status)


@pytest.mark.requirement("X-12")
def test_calls_that_fit_together_all_complete_by_waiting_for_each_other(db: str, tmp_path: Path) -> None:
    """Each call holds $0.03 of the budget of its key and costs a fraction: none is refused, and none is clamped."""
    with FakeProviderServer(FakeProvider(latency_s=0.01)) as provider, ExitStack() as stack:
        key, id = asyncio.run(_with_stores(db, lambda stores: _new_key(stores, PATIENT_USD)))
        gateways = Gateways(db, provider, tmp_path, stack, PATIENT_GATEWAYS)
        statuses = asyncio.run(_patient_clients(gateways, key))
        assert gateways.stop() == [0] * PATIENT_GATEWAYS
        balance, left = asyncio.run(_with_stores(db, lambda stores: _drained(stores, id)))
    assert statuses == [200] * PATIENT
    assert {request.body["max_tokens"] for request in provider.requests} == {2_000}
    assert (left, balance.held_nanos, balance.unresolved_nanos) == (0, 0, 0)
    assert balance.spent_nanos == provider.invoice.total_nanos < balance.limits.cost_nanos


async def _patient_clients(gateways: Gateways, key: str) -> list[int]:
    body: dict[str, object] = {
        "model": "fake-1",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 2_000,
    }
    urls = [gateways.urls[number % len(gateways.urls)] for number in range(PATIENT)]
    return await asyncio.gather(*(send_request(url, key, body, leaves_early=False) for url in urls))
