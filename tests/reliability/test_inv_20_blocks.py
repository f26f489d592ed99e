"""INV 1 and 20 with blocks: workers that set parts of a day's budget aside, in every order of their operations.

Random workloads on a simulated loop. Between any two operations at the ledger other workers may go on, and a worker may
die. After each operation, what all runs have really taken is at most the day's budget; what is set aside for a block
covers its ceiling. If all calls fit one after the other and no worker dies, every call is admitted.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.containment.ledger import Amounts, MemoryLedgerStore
from penstock.containment.limits import UNLIMITED, Limits
from penstock.containment.tickets import Waiting
from penstock.errors import LedgerError
from penstock.runtime.durable import blocks
from penstock.runtime.durable.async_ledger import AsyncLedger
from penstock.runtime.durable.blocks import BLOCKS, HELD, Blocks, recall
from penstock.runtime.durable.shared import SharedBudget
from penstock.stops import Stop
from penstock.storage import open_stores
from penstock.testing import SimLoop, sim_run
from tests.forked import Program
from tests.reliability.blocks_driver import AT_ONCE, DAY, LIMIT, WORST
from tests.soak import scaled
from tests.storage.postgres import postgres_server, postgres_url

__all__ = ["postgres_server", "postgres_url"]

pytestmark = [pytest.mark.reliability, pytest.mark.requirement("X-9")]

SEEDS = scaled(150, soak=10_000)
MAX_TIME_S = 20_000
CENT = 10_000_000
ANN, BOB = "user:ann:2026-01-02", "user:bob/x:2026-01-02"


class Watched(AsyncLedger):
    """A ledger in memory whose operations take a while, in which others go on; checks the accounts after each."""

    def __init__(self, store: MemoryLedgerStore, chance: random.Random) -> None:
        super().__init__(store)
        self.chance = chance
        self.blocks_seen = 0
        self.is_exact = True
        """Whether no call costs more than its worst case."""
        self.violations: list[str] = []
        """Kept, because an error of an operation is not always one of its caller."""

    async def _run(self, name: str, inline: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        await asyncio.sleep(self.chance.choice((0, 0, 0.01, 0.3)))
        try:
            return await super()._run(name, inline, args, kwargs)
        finally:
            self.check()
            await asyncio.sleep(self.chance.choice((0, 0, 0.01)))

    def check(self) -> None:
        store = self.store
        assert isinstance(store, MemoryLedgerStore)
        runs = sum(account.committed for name, account in store._accounts.items() if name.startswith("run:"))
        if self.is_exact and runs > store._accounts[DAY].max_cost:
            self.violations.append(f"{runs} are taken")
        set_aside = store.held(f"{HELD}{BLOCKS}")
        for name, account in store._accounts.items():
            if name.startswith(BLOCKS) and account.parent is None:
                self.blocks_seen += 1
                held = sum(one.cost_nanos for key, one in set_aside.items() if key.startswith(f"{HELD}{name}/#"))
                # Before a block has anything that is held for it, it has no ceiling above zero either.
                if max(account.committed, account.max_cost) > held:
                    self.violations.append(f"{name} has {account.committed} of {account.max_cost}; {held} are held")


class Day:
    """A ledger with the budgets of one day, and the workers of its runs."""

    def __init__(self, chance: random.Random, *, limit: int, owners: bool) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        self.clock, self.chance = loop.clock, chance
        self.store = MemoryLedgerStore(clock=loop.clock)
        self.ledger = Watched(self.store, chance)
        self.limit = limit * CENT
        self.store.open_account(DAY, Limits(cost_nanos=self.limit))
        self.chains: list[list[str]] = [[DAY]]
        if owners:
            for name in (ANN, BOB):
                self.store.open_account(name, Limits(cost_nanos=self.limit), parent=DAY)
            self.chains = [[DAY, ANN], [DAY, BOB]]
        self.workers = [Blocks(self.ledger, f"worker{number}", loop.clock) for number in range(3)]
        self.billed = 0
        self.runs = 0

    async def run(self, calls: list[tuple[int, int]]) -> SharedBudget:
        """Open a run on some worker, and make its calls, several at once; worst case and real cost in cents."""
        chance, levels = self.chance, self.chance.choice(self.chains)
        self.runs += 1
        name, account = f"r{self.runs}", f"run:r{self.runs}"
        parent = await chance.choice(self.workers).account_for(levels)
        await self.ledger.open_account(account, Limits(), parent=parent)
        above = levels[::-1] if parent == levels[-1] else [parent, *levels[::-1]]
        shared = SharedBudget(self.store, account, prefix=f"{name}/1-mark", owner=levels[-1], above=above)
        shared.ledger = self.ledger
        shared.flush_soon = lambda: None  # type: ignore[method-assign]  # nothing reports what a dead worker had not
        await asyncio.gather(*(self.call(shared, str(number), *call) for number, call in enumerate(calls)))
        await shared.aflush()
        return shared

    async def call(self, shared: SharedBudget, node: str, worst: int, cost: int) -> None:
        key, chance = shared.key(node), self.chance
        await asyncio.sleep(chance.randint(0, 3))
        answer = await shared.take(key, Amounts(worst * CENT), False, max_wait_s=MAX_TIME_S)
        while isinstance(answer, Waiting):
            await asyncio.sleep(self.store.poll_s)
            try:
                answer = await shared.renew(key)
            except LedgerError:  # its ticket has expired, because this worker was slow
                answer = await shared.take(key, Amounts(worst * CENT), False, max_wait_s=MAX_TIME_S)
        assert not isinstance(answer, Stop), answer
        self.billed += cost * CENT
        await asyncio.sleep(chance.randint(0, 5))
        if cost > worst and chance.random() < 0.5:
            shared.charged(f"{key}/more", Amounts((cost - worst) * CENT))
            cost = worst
        shared.settled(key, Amounts(cost * CENT), True)
        await shared.aflush()


def fitting(chance: random.Random, total: int) -> list[tuple[int, int]]:
    """Worst cases and real costs of calls that fit into the total one after the other."""
    costs = [chance.randint(0, total // 20) for _ in range(chance.randint(2, 20))]
    rest = total - sum(costs)
    return [(chance.randint(max(1, cost), chance.choice((cost + 3, rest + cost))), cost) for cost in costs]


@contextmanager
def small_blocks(monkeypatch: pytest.MonkeyPatch, share: int = 4) -> Iterator[None]:
    """Blocks of a quarter of what is left, or less, for the fewest calls, and replaced every few seconds."""
    with monkeypatch.context() as patch:
        patch.setattr(blocks, "SHARE", share)
        patch.setattr(blocks, "MIN_CALLS", 1)
        patch.setattr(blocks, "LASTS_S", 5.0)
        yield


def explored(monkeypatch: pytest.MonkeyPatch, one: Callable[[random.Random], Any], share: int = 4) -> None:
    with small_blocks(monkeypatch, share):
        for seed in range(SEEDS):
            sim_run(lambda seed=seed: one(random.Random(seed)), seed=seed)  # type: ignore[misc]


async def _split(day: Day, calls: list[tuple[int, int]]) -> list[SharedBudget]:
    """Make these calls in several runs at once."""
    runs: list[list[tuple[int, int]]] = [[] for _ in range(day.chance.randint(1, 6))]
    for call in calls:
        day.chance.choice(runs).append(call)
    return await asyncio.wait_for(asyncio.gather(*(day.run(run) for run in runs)), MAX_TIME_S)


def test_calls_that_fit_one_after_the_other_are_all_admitted_beside_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [0]

    async def one(chance: random.Random) -> None:
        day = Day(chance, limit=100, owners=chance.random() < 0.5)
        await _split(day, fitting(chance, 100))
        for worker in day.workers:
            await worker.close()
        balance = day.store.balance(DAY)
        assert (balance.spent_nanos, balance.held_nanos, balance.unresolved_nanos) == (day.billed, 0, 0)
        assert day.store.held() == {}
        assert day.ledger.violations == []
        seen[0] += day.ledger.blocks_seen > 0

    explored(monkeypatch, one)
    assert seen[0] > SEEDS / 2, "blocks were hardly used"


def test_workers_that_die_at_any_operation_leave_no_room_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    async def one(chance: random.Random) -> None:
        day = Day(chance, limit=100, owners=chance.random() < 0.5)
        first = [asyncio.create_task(day.run(fitting(chance, 30))) for _ in range(3)]
        await asyncio.sleep(chance.uniform(0, 8))
        for task in first:
            task.cancel()
        outcomes = await asyncio.gather(*first, return_exceptions=True)
        assert not [one for one in outcomes if isinstance(one, Exception)], outcomes
        # Their processes are gone, with what they had not reported; others take the runs over.
        for number in range(1, day.runs + 1):
            try:
                day.store.balance(f"run:r{number}")
            except KeyError:
                continue
            taken = SharedBudget(day.store, f"run:r{number}", prefix=f"r{number}/2-mark")
            await taken.arecover()
        left = day.limit - sum(
            account.committed for name, account in day.store._accounts.items() if name.startswith("run:")
        )
        day.workers = [Blocks(day.ledger, "later", day.clock)]
        await _split(day, fitting(chance, max(20, left // CENT)) if left >= 20 * CENT else [])
        await recall(day.ledger, DAY)
        balance = day.store.balance(DAY)
        assert balance.held_nanos == 0
        assert day.billed <= balance.spent_nanos + balance.unresolved_nanos <= day.limit
        assert day.ledger.violations == []

    explored(monkeypatch, one)


def test_what_is_dearer_than_it_was_held_for_is_known_to_the_day_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bills above the worst case pass a ceiling, as without blocks; but no block goes on as if it had not happened."""

    async def one(chance: random.Random) -> None:
        day = Day(chance, limit=1_000, owners=False)
        calls = [(chance.randint(1, 5), chance.randint(0, 75)) for _ in range(chance.randint(2, 12))]
        await _split(day, calls)
        assert day.ledger.violations == []
        await recall(day.ledger, DAY)
        assert day.store.balance(DAY).spent_nanos == day.billed

    explored(monkeypatch, one, share=16)


def test_a_call_that_waits_gets_what_was_set_aside_while_it_joined_the_queue() -> None:
    class Between(AsyncLedger):
        """Another worker sets something aside between the refusal of a call and its ticket."""

        other: Blocks

        async def _run(self, name: str, inline: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if name == "join_queue":
                assert (await self.other.account_for([DAY])).startswith(BLOCKS)
            return await super()._run(name, inline, args, kwargs)

    async def main() -> None:
        day, key = Day(random.Random(1), limit=100, owners=False), "waits/1-m/a"
        day.store.open_account("run:waits", Limits(), parent=DAY)
        shared = SharedBudget(day.store, "run:waits", prefix="waits/1-m", above=[DAY])
        between = Between(day.store)
        shared.ledger, between.other = between, day.workers[0]
        assert day.store.hold("other", DAY, Amounts(36 * CENT)) is None
        assert isinstance(await shared.take(key, Amounts(100 * CENT), False, max_wait_s=600), Waiting)
        day.store.settle("other", Amounts())
        assert day.store.balance(DAY).held_nanos == CENT
        assert await shared.renew(key) is None
        assert day.store.balance(DAY).held_nanos == 100 * CENT

    sim_run(main, seed=1)


def test_blocks_get_smaller_as_the_budget_is_used_and_end_near_the_ceiling() -> None:
    async def main() -> None:
        day = Day(random.Random(1), limit=100, owners=False)
        worker = day.workers[0]
        sizes = []
        for spent in (0, 50, 40, 9):
            if spent:
                assert day.store.hold(f"x{spent}", DAY, Amounts(spent * CENT)) is None
                day.store.settle(f"x{spent}", Amounts(spent * CENT))
            account = await worker.account_for([DAY])
            sizes.append(day.store.balance(account).limits.cost_nanos if account.startswith(BLOCKS) else 0)
            assert account.startswith(BLOCKS) or account == DAY
            await asyncio.sleep(blocks.LASTS_S + 1)
        # The last one is of the cent that is left.
        assert sizes == [100 * CENT // 64, 50 * CENT // 64, 10 * CENT // 64, 0]
        assert day.store.balance(DAY).held_nanos == 0
        assert (await worker.account_for([DAY])) == DAY

    sim_run(main, seed=1)


def test_a_run_in_a_block_locks_no_account_of_the_day() -> None:
    async def main() -> None:
        day = Day(random.Random(1), limit=1_000, owners=True)
        block = await day.workers[0].account_for([DAY, ANN])
        day.store.open_account("run:r", Limits(), parent=block)
        before = day.store.balance(DAY)
        for number in range(3):
            assert day.store.hold(f"r/1-m/{number}", "run:r", Amounts(CENT)) is None
            day.store.settle(f"r/1-m/{number}", Amounts(CENT))
        assert day.store.balance(DAY) == before
        await day.workers[0].close()
        for account in (DAY, ANN):
            assert (day.store.balance(account).spent_nanos, day.store.balance(account).held_nanos) == (3 * CENT, 0)
        assert day.store.balance(block).limits.cost_nanos == UNLIMITED

    sim_run(main, seed=1)


PROCESSES, KILLED = 4, 2


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/runs.db"
    return str(request.getfixturevalue("postgres_url"))


@pytest.mark.usefixtures("forks")
async def test_processes_that_set_budget_aside_and_are_killed_never_pass_the_ceiling(url: str, tmp_path: Path) -> None:
    async with await open_stores(url) as stores:
        ledger = AsyncLedger(stores.ledger)
        await ledger.open_account(DAY, Limits(cost_nanos=LIMIT))
        programs = [
            Program(["-m", "tests.reliability.blocks_driver", url, str(tmp_path / f"{name}.log"), f"w{name}"])
            for name in range(PROCESSES)
        ]
        try:
            for killed, program in enumerate(programs[:KILLED]):
                while len(lines(tmp_path)) < 40 * (killed + 1):  # noqa: ASYNC110  # other processes write them
                    await asyncio.sleep(0.01)
                program.kill()
                await asyncio.to_thread(program.wait)
                for key in await ledger.held(f"w{killed}-"):  # as the worker that takes over its runs does
                    await ledger.leave_unresolved(key)
            codes = [await asyncio.to_thread(program.wait) for program in programs]
            errors_of = [await asyncio.to_thread(program.stderr.read) for program in programs]
        finally:
            for program in programs:
                program.kill()
                await asyncio.to_thread(program.__exit__)
        assert codes == [-9] * KILLED + [0] * (PROCESSES - KILLED), errors_of
        found = lines(tmp_path)
        await recall(ledger, DAY)
        balance = await ledger.balance(DAY)
    billed = sum(int(line[2]) for line in found)
    assert balance.held_nanos == 0
    assert billed <= balance.spent_nanos + balance.unresolved_nanos <= LIMIT
    # What is unresolved was under way in the killed ones, and the others have used the rest to the last call.
    assert balance.unresolved_nanos <= KILLED * AT_ONCE * WORST
    assert LIMIT - balance.spent_nanos - balance.unresolved_nanos < WORST
    in_blocks = [line[1].startswith(BLOCKS) for line in found]
    assert in_blocks.count(True) > len(in_blocks) / 4


def lines(folder: Path) -> list[list[str]]:
    """What was billed: run, account above it, and amount."""
    return [line.split() for log in folder.glob("*.log") for line in log.read_text().splitlines() if line.endswith(".")]
