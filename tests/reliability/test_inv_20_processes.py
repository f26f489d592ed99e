"""INV 20 over processes: calls that only the holds of others keep out wait, and all of them complete.

Each test works on a ledger that several processes share, in a file and in PostgreSQL. The worst cases of the calls pass
the ceiling many times over, and what they really cost fits.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.containment.ledger import Amounts, LedgerStore
from penstock.containment.limits import BudgetExceededError, Limits
from penstock.errors import LedgerError
from penstock.hosting.host import HostSettings
from penstock.runtime.billing.usage import Reported
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable import async_ledger, shared
from penstock.runtime.durable.shared import SharedBudget
from penstock.storage import SqliteLedgerStore
from penstock.storage.postgres.ledger import PostgresLedgerStore
from penstock.storage.stores import open_stores
from tests.hosting.graphs import host_with
from tests.hosting.test_truncated_answers import PRICES, Counter, asking, counted
from tests.soak import SOAK, scaled
from tests.storage.ledger_postgres import dsn, ledger_database, postgres_server

__all__ = ["dsn", "ledger_database", "postgres_server"]

pytestmark = [pytest.mark.reliability, pytest.mark.requirement("X-9")]

PROCESSES = 4
THREADS = 3
CALLS = scaled(4, soak=40)
"""Calls of each thread."""
USD = 1_000_000_000
REAL = USD // 100
PATIENCE_S = 60.0
LEASE_S = 0.5
REFUSED, OVER, FAILED = 3, 4, 5
"""How a process ends whose call was refused, that found the ceiling passed, or that failed otherwise."""

Open = Callable[[], Any]


@pytest.fixture(params=["sqlite", "postgresql"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens the ledger; each process opens its own."""
    if request.param == "sqlite":
        return lambda: SqliteLedgerStore(tmp_path / "ledger.db", busy_timeout_s=PATIENCE_S)
    url = request.getfixturevalue("dsn")
    return lambda: PostgresLedgerStore(url, timeout_s=PATIENCE_S)


@pytest.fixture
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a test need not wait long for the ticket of a dead process to expire; children inherit it."""
    monkeypatch.setattr(shared, "LEASE_S", LEASE_S)


class Children:
    """Processes of a test; none is left when it ends."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self.found: list[int] = []

    def start(self, work: Callable[[], int]) -> int:
        pid = os.fork()
        if not pid:
            status = FAILED
            try:
                status = work()
            finally:
                os._exit(status)
        self.pids.append(pid)
        return pid

    def kill(self, pid: int) -> None:
        self.pids.remove(pid)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    def ends(self) -> list[int]:
        """How each process ended; a process that hangs fails the test."""
        until(lambda: not self.look(), "a process hangs")
        return self.found

    def look(self) -> list[int]:
        """The processes that have not ended."""
        for pid in list(self.pids):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.pids.remove(pid)
                self.found.append(os.waitstatus_to_exitcode(status))
        return self.pids


@pytest.fixture
def children() -> Iterator[Children]:
    made = Children()
    yield made
    for pid in list(made.pids):
        made.kill(pid)


def until(condition: Callable[[], bool], what: str = "it never was") -> None:
    ends = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < ends, what
        time.sleep(0.002)


def run_on(store: LedgerStore, name: str, owner: str = "") -> ExecutionContext:
    return ExecutionContext(shared_budget=SharedBudget(store, "team", prefix=f"{name}/1", owner=owner))


def cheap() -> Reported[str]:
    return Reported.of("text", cost_usd=REAL / USD)


def free() -> Reported[str]:
    return Reported.of("text", cost_usd=0)


def total(store: LedgerStore) -> int:
    now = store.balance("team")
    return now.spent_nanos + now.held_nanos + now.unresolved_nanos


# All complete.


def many_calls(open_store: Open, slot: int, ceiling: int) -> int:
    with open_store() as store:

        def look_and_answer() -> Reported[str]:
            if total(store) > ceiling:
                os._exit(OVER)
            return cheap()

        def work(thread: int) -> None:
            with run_on(store, f"run {slot}-{thread}", owner=f"owner {slot}") as run:
                for _ in range(CALLS):
                    run.llm(look_and_answer, cost_hint_usd=1)

        try:
            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(work, range(THREADS)))
        except BudgetExceededError:
            return REFUSED
    return 0


def test_all_calls_of_four_processes_complete_and_the_ceiling_is_never_passed(
    open_store: Open, children: Children
) -> None:
    calls = PROCESSES * THREADS * CALLS
    ceiling = 2 * USD + calls * REAL
    with open_store() as store:
        store.open_account("team", Limits(cost_nanos=ceiling))
    for slot in range(PROCESSES):
        children.start(lambda slot=slot: many_calls(open_store, slot, ceiling))  # type: ignore[misc]
    with open_store() as store:
        most = 0
        while children.pids:
            most = max(most, total(store))
            children.look()
        found = children.found
        assert found == [0] * PROCESSES
        assert most <= ceiling
        assert store.balance("team").spent_nanos == calls * REAL
        assert (dict(store.held()), dict(store.queued()), dict(store.unresolved())) == ({}, {}, {})


# Processes that die.


def one_call(open_store: Open, name: str, fn: Callable[[], Any] = cheap, owner: str = "") -> int:
    with open_store() as store, run_on(store, name, owner) as run:
        try:
            run.llm(fn, cost_hint_usd=1)
        except BudgetExceededError:
            return REFUSED
    return 0


@pytest.mark.usefixtures("short_leases")
def test_a_process_that_is_killed_while_it_waits_does_not_block_the_queue(open_store: Open, children: Children) -> None:
    with open_store() as store:
        store.open_account("team", Limits(cost_nanos=USD + 2 * REAL))
        assert store.hold("outside", "team", Amounts(USD)) is None
        dead = children.start(lambda: one_call(open_store, "dead"))
        until(lambda: len(store.queued()) == 1)
        children.start(lambda: one_call(open_store, "alive"))
        until(lambda: len(store.queued()) == 2)
        children.kill(dead)
        store.settle("outside", Amounts(REAL))
        assert children.ends() == [0]
        assert store.balance("team").spent_nanos == 2 * REAL
        until(lambda: not store.queued())
        assert dict(store.held()) == {}


@pytest.mark.usefixtures("short_leases")
@pytest.mark.parametrize("fits", [True, False], ids=["fits beside it", "does not fit beside it"])
def test_a_hold_of_a_process_that_was_killed_stays_and_those_that_wait_for_it_get_an_answer(
    fits: bool, open_store: Open, children: Children
) -> None:
    ceiling = 2 * USD if fits else USD + REAL
    with open_store() as store:
        store.open_account("team", Limits(cost_nanos=ceiling))
        if fits:
            assert store.hold("outside", "team", Amounts(USD)) is None
        dead = children.start(lambda: one_call(open_store, "dead", lambda: time.sleep(PATIENCE_S)))
        until(lambda: any(key.startswith("dead/") for key in store.held()))
        children.start(lambda: one_call(open_store, "alive"))
        until(lambda: bool(store.queued()))
        children.kill(dead)
        (left,) = SharedBudget(store, "team", prefix="dead/2").recover()
        if fits:
            store.settle("outside", Amounts(0))
        assert children.ends() == [0 if fits else REFUSED]
        assert list(store.unresolved()) == [left]
        assert total(store) == USD + (REAL if fits else 0)
        assert (dict(store.held()), dict(store.queued())) == ({}, {})


@pytest.mark.usefixtures("short_leases")
@pytest.mark.skipif(not SOAK, reason="the long form, with PENSTOCK_SOAK")
def test_processes_that_are_killed_at_any_moment_leave_a_queue_that_moves(open_store: Open, children: Children) -> None:
    rng = random.Random(1)
    ceiling = 20 * USD
    with open_store() as store:
        store.open_account("team", Limits(cost_nanos=ceiling))
        for turn in range(20):
            doomed = [
                children.start(lambda slot=slot, turn=turn: many_calls(open_store, 10 * turn + slot, ceiling))  # type: ignore[misc]
                for slot in range(2)
            ]
            time.sleep(rng.uniform(0.01, 0.5))
            for pid in doomed:
                children.kill(pid)
            assert total(store) <= ceiling
            for key in store.held():
                if key not in store.queued():
                    with suppress(LedgerError):  # the server may still finish what the killed process had sent
                        store.leave_unresolved(key)
            store.grant("team", Limits(cost_nanos=(ceiling := ceiling + total(store))))
            children.start(lambda turn=turn: one_call(open_store, f"after {turn}"))  # type: ignore[misc]
            assert set(children.ends()) == {0}


# Calls of unknown cost.

HALF = 0.5


def unhinted_calls(open_store: Open, slot: int) -> int:
    """Four calls at once; how many of them cost half a dollar."""
    with open_store() as store, ThreadPoolExecutor(4) as pool:

        def work(thread: int) -> int:
            with run_on(store, f"run {slot}-{thread}", owner=f"owner {slot}") as run:
                return 0 if run.call_llm(lambda: Reported.of("text", cost_usd=HALF)).call.stop else 1

        return sum(pool.map(work, range(4)))


def test_unhinted_calls_of_four_processes_pass_a_ceiling_by_one_call_at_most(
    open_store: Open, children: Children
) -> None:
    with open_store() as store:
        store.open_account("team", Limits(cost_nanos=USD))
        for slot in range(PROCESSES):
            children.start(lambda slot=slot: unhinted_calls(open_store, slot))  # type: ignore[misc]
        assert sum(children.ends()) == 2, "the first one alone, and one beside what that has cost"
        assert store.balance("team").spent_nanos == USD
        assert (dict(store.held()), dict(store.queued()), dict(store.unresolved())) == ({}, {}, {})


@pytest.mark.usefixtures("short_leases")
def test_an_unhinted_call_of_a_process_that_was_killed_lets_the_next_one_run_alone(
    open_store: Open, children: Children, tmp_path: Path
) -> None:
    renewals = tmp_path / "renewals"

    def first() -> int:
        with open_store() as store, run_on(store, "dead") as run:
            renew = store.renew_unhinted

            def counted(key: str) -> bool:
                is_needed: bool = renew(key)
                with renewals.open("a") as file:
                    file.write("r")
                return is_needed

            store.renew_unhinted = counted
            run.llm(lambda: time.sleep(PATIENCE_S))
        return FAILED

    with open_store() as store:
        store.open_account("team", Limits(cost_nanos=USD))
        dead = children.start(first)
        until(lambda: bool(store.held()))
        for slot in range(PROCESSES - 1):
            children.start(lambda slot=slot: unhinted_calls(open_store, slot))  # type: ignore[misc]
        until(lambda: len(store.queued()) == 4 * (PROCESSES - 1))
        before = len(renewals.read_text()) if renewals.exists() else 0
        until(lambda: renewals.exists() and len(renewals.read_text()) > before + 2 * async_ledger.RENEWALS)
        assert len(store.queued()) == 4 * (PROCESSES - 1), "its process renews the lease while it lives"
        children.kill(dead)
        assert sum(children.ends()) == 2
        assert store.balance("team").spent_nanos == USD
        assert dict(store.queued()) == {}
        (left,) = store.held()
        assert left.startswith("dead/"), "its bill is unknown"


# Calls inside calls.


def nested(open_store: Open, name: str) -> int:
    with open_store() as store, run_on(store, name) as run:
        refused = 0

        def outer() -> Reported[str]:
            nonlocal refused
            until(lambda: len(store.held()) == 2 and "gate" not in store.held())
            try:
                run.llm(free, cost_hint_usd=1)
            except BudgetExceededError as error:
                refused = REFUSED if "wait themselves" in str(error) else FAILED
            return free()

        run.llm(outer, cost_hint_usd=1)
        return refused


def test_calls_of_two_processes_that_would_wait_for_each_other_end_in_one_refusal(
    open_store: Open, children: Children
) -> None:
    with open_store() as store:
        store.open_account("team", Limits(cost_nanos=2 * USD))
        assert store.hold("gate", "team", Amounts(USD)) is None
        for name in ("a", "b"):
            children.start(lambda name=name: nested(open_store, name))  # type: ignore[misc]
        until(lambda: len(store.held()) == 2 and len(store.queued()) == 1)
        store.withdraw("gate")
        assert sorted(children.ends()) == [0, REFUSED]
        assert (dict(store.held()), dict(store.queued())) == ({}, {})


# Turns.


def many_at_once(open_store: Open, name: str, number: int, order: Path) -> int:
    with open_store() as store, ThreadPoolExecutor(number) as pool:

        def answer() -> Reported[str]:
            with order.open("a") as file:
                file.write(f"{name}\n")
            return free()

        def work(thread: int) -> None:
            with run_on(store, f"{name} {thread}", owner=name) as run:
                run.llm(answer, cost_hint_usd=1)

        list(pool.map(work, range(number)))
    return 0


def test_an_owner_with_one_call_does_not_wait_for_all_calls_of_another(
    open_store: Open, children: Children, tmp_path: Path
) -> None:
    order = tmp_path / "order"
    with open_store() as store:
        store.open_account("team", Limits(cost_nanos=USD))
        assert store.hold("outside", "team", Amounts(USD)) is None
        children.start(lambda: many_at_once(open_store, "ann", 6, order))
        until(lambda: len(store.queued()) == 6)
        children.start(lambda: many_at_once(open_store, "bob", 1, order))
        until(lambda: len(store.queued()) == 7)
        store.release("outside")
        assert children.ends() == [0, 0]
    served = order.read_text().split()
    assert served.index("bob") <= 1, served


# Servers.


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_all_requests_to_two_servers_complete_whose_real_cost_fits_into_the_day(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """30 requests, each of which holds half of the day's budget and costs a hundredth of that."""
    url = str(tmp_path / "runs.db") if kind == "sqlite" else request.getfixturevalue("dsn")
    asyncio.run(_requests_to_two_servers(url, 30))


async def _requests_to_two_servers(url: str, requests: int) -> None:
    async with AsyncExitStack() as closing:
        hosts, models = [], []
        for _ in range(2):
            stores = await closing.enter_async_context(await open_stores(url))
            if not hosts:
                await stores.graphs.save("g", "ann", "g", asking(max_output_tokens=100), now_ms=0)
            models.append(Counter())
            settings = HostSettings(tick_s=0.05, drain_s=0, daily_usd="0.25")
            services = {"models": {"m": models[-1]}}
            host = await host_with(stores, settings=settings, prices=PRICES, services=services)
            hosts.append(await closing.enter_async_context(host))
        for number in range(requests):
            owner = ("ann", "bob", "eve")[number % 3]
            await hosts[number % 2].submit(owner=owner, graph_id="g", run_id=f"r{number}", input="1")
        ended = await asyncio.gather(*(hosts[n % 2].wait(f"r{n}") for n in range(requests)))
        assert [run.output for run in ended] == [counted(1)] * requests, [run.status for run in ended]
        assert set(models[0].allowed + models[1].allowed) == {100}, "no answer was cut because of others"
