"""INV 8: a whole day of a service, in virtual time: chats and graphs arrive, fail, are stopped, run out of money.

Every run is looked at once it has ended, before retention takes it away; at the end of the day the sums must agree.
What the provider billed is counted where it bills, so that no book of ours is judged by itself.
"""

from __future__ import annotations

import asyncio
import gc
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest

from penstock.agents.model import Model, ModelRequest, ModelResponse
from penstock.chat.service import ChatService
from penstock.cli.service.gc_tuning import freeze_heap, relaxed_gc
from penstock.clock import utc_from_ns
from penstock.hosting.event_data import STATUS_OF
from penstock.hosting.host import HostSettings, RunHost
from penstock.hosting.ports import ENDED, RunRecord
from penstock.runtime.billing.usage import Usage
from penstock.storage.memory import MemoryStores
from penstock.testing import SimLoop, sim_run
from tests.nodes.graphs import graph, node, registry
from tests.soak import scaled

pytestmark = [pytest.mark.reliability, pytest.mark.timeout(900)]

DAY_S = 86_400
RUNS = scaled(1_500, soak=86_400)
OWNERS = [f"owner-{number}" for number in range(12)]
ERRORS, CANCELS, HALTS, CHATS = 0.10, 0.05, 0.02, 0.5
TURNS = 8
"""So many turns a chat has before its owner begins another."""
KEEP_S = 600
REMOVED_EVERY_S = 60
MESSAGE_BLOCKS = 20
"""The most that one message of a chat, which is kept for good, may take of Python's memory: about a kilobyte."""
MODEL = "gpt-4o-mini"
"""A name that price tables know, so that a worst case can be held."""
ANSWER_USD = "0.00002"
ANSWER_NANOS = 20_000
HOUR_S = 3_600
EARLY, LATE = 5, 23
"""The hours of the day whose memory is compared."""

SETTINGS = HostSettings(
    tick_s=2, keep_days=KEEP_S / DAY_S, early_cancel_s=KEEP_S, daily_usd="100000", owner_daily_usd="10000"
)
CHAT = graph([node("start", "chat-start"), node("A", "agent", model="m", stream=True)], ["start > A"])
TWO = graph(
    [node("in", "input"), node("a", "llm-completion", model="m"), node("b", "llm-completion", model="m"),
     node("out", "output")],
    ["in > a", "a > b", "b > out"],
)  # fmt: skip


class ProviderDown(Exception):
    """The provider answers nothing, and says that it billed nothing."""

    status_code = 429


class Billing(Model):
    """A model that takes its time, fails on request, and writes a bill."""

    max_output_tokens = 64

    def __init__(self, chance: random.Random) -> None:
        super().__init__(MODEL)
        self._chance = chance
        self.billed_nanos = 0
        self.begun = self.answered = 0

    async def request(self, request: ModelRequest) -> ModelResponse:
        self.begun += 1
        await asyncio.sleep(self._chance.expovariate(1 / 3))
        text = request.messages[-1].text
        if "fail" in text:
            raise ProviderDown(f"cannot answer {text!r}")
        self.answered += 1
        self.billed_nanos += ANSWER_NANOS
        return ModelResponse(f"answer to {text}"[:80], usage=Usage.of(cost_usd=ANSWER_USD, input_tokens=9))

    async def request_stream(self, request: ModelRequest) -> AsyncIterator[Any]:
        response = await self.request(request)
        for word in response.text.split():
            yield f"{word} "
        yield response


@dataclass
class Seen:
    """The sums over all runs that were looked at."""

    runs: set[str] = field(default_factory=set)
    statuses: Counter[str] = field(default_factory=Counter)
    stops: Counter[str] = field(default_factory=Counter)
    cost_nanos: int = 0
    unresolved_nanos: int = 0
    accounts_nanos: int = 0
    most: Counter[str] = field(default_factory=Counter)
    """The most that there was of something at any time."""
    blocks: list[int] = field(default_factory=list)
    """Blocks of memory at the hours that are compared."""


class Day:
    """One service, those who use it, and who looks at what came of it."""

    def __init__(self, seed: int) -> None:
        self.loop = _loop()
        self.chance = random.Random(seed)
        self.stores = MemoryStores(clock=self.loop.clock)
        self.model = Billing(random.Random(seed + 1))
        services = {"models": {"m": self.model}}
        self.host = RunHost(
            self.stores, executors=registry(), services=services, settings=SETTINGS, worker="w", clock=self.loop.clock
        )
        self.chats = ChatService(self.host, self.stores.chats, clock=self.loop.clock, new_id=self._new_id)
        self.seen = Seen()
        self.submitted = 0
        self._ids = 0
        self._chat_of: dict[str, tuple[str, int]] = {}
        self._doing: set[asyncio.Task[None]] = set()

    def _new_id(self) -> str:
        self._ids += 1
        return f"id-{self._ids}"

    # Those who use it.

    async def arrivals(self) -> None:
        """Runs come one by one, at random, so many a day."""
        while self.submitted < RUNS:
            await asyncio.sleep(self.chance.expovariate(RUNS / DAY_S))
            self.submitted += 1
            self._do(self._come(f"r{self.submitted}"))

    async def _come(self, run_id: str) -> None:
        owner, says = self.chance.choice(OWNERS), f"{run_id} says something"
        is_poor, is_chat = self.chance.random() < HALTS, self.chance.random() < CHATS
        if self.chance.random() < ERRORS:
            says += " to fail"
        if self.chance.random() < CANCELS:
            self._do(self._cancel(run_id))
        limits = {"max_cost_usd": "0.00001"} if is_poor else {"max_cost_usd": "0.1"}
        if is_chat:
            await self._say(owner, says, run_id, limits)
        else:
            await self.host.submit(owner=owner, graph_id="two", input=says, limits=limits, run_id=run_id)

    async def _say(self, owner: str, says: str, run_id: str, limits: dict[str, Any]) -> None:
        chat_id, turns = self._chat_of.get(owner, ("", TURNS))
        if turns == TURNS:
            chat_id, turns = (await self.chats.create_chat(owner=owner, graph_id="chat")).id, 0
        self._chat_of[owner] = chat_id, turns + 1
        await self.chats.stream_chat(chat_id, says, owner=owner, run_id=run_id, limits=limits)

    async def _cancel(self, run_id: str) -> None:
        """Before it is there, while it is there, or after it has gone."""
        await asyncio.sleep(self.chance.choice([0, 0.001, self.chance.uniform(0, 6), self.chance.uniform(0, 60)]))
        await self.host.cancel(run_id, reason="changed my mind", by="ann")

    def _do(self, what: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(what)
        self._doing.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._doing.discard(task)
        task.result()

    # Who looks at it.

    async def inspections(self) -> None:
        """Look at every run that has ended, well before retention takes it."""
        while True:
            await asyncio.sleep(KEEP_S / 3)
            await self.inspect()

    async def inspect(self) -> None:
        for run in await self.stores.runs.list(statuses=ENDED, limit=1_000_000):
            if run.id not in self.seen.runs:
                await self._look_at(run)
        tasks, sizes = {"tasks": len(asyncio.all_tasks())}, self.sizes()
        for name, size in {**tasks, **sizes}.items():
            self.seen.most[name] = max(self.seen.most[name], size)

    async def _look_at(self, run: RunRecord) -> None:
        check_story(run, [(one.seq, one.type, one.data) for one in await self.stores.events.read(run.id, limit=10_000)])
        seen = self.seen
        seen.runs.add(run.id)
        seen.statuses[run.status] += 1
        seen.stops[str(run.stop_reason)] += 1
        seen.cost_nanos += run.cost_nanos
        seen.unresolved_nanos += run.unresolved_nanos
        assert self._paid(run) == (run.cost_nanos, run.unresolved_nanos, 0), run

    def _paid(self, run: RunRecord) -> tuple[int, int, int]:
        """Spent, unresolved and held at the ledger; what was stopped before it began has no account there."""
        if run.status == "cancelled" and f"run:{run.id}" not in self.stores.ledger._accounts:
            return 0, 0, 0
        balance = self.stores.ledger.balance(f"run:{run.id}")
        return balance.spent_nanos, balance.unresolved_nanos, balance.held_nanos

    def sizes(self) -> dict[str, int]:
        stores = self.stores
        return {
            "runs": len(stores.runs._runs),
            "events": sum(map(len, stores.events._events.values())),
            "logs": len(stores.events._events),
            "journals": len(stores.journal._entries),
            "cancels": len(stores.cancels._requests),
            "accounts": len(stores.ledger._accounts),
            "holds": len(stores.ledger._holds),
        }

    async def hours(self) -> None:
        """Count the blocks of memory, once everything is there that there will be, and in the end."""
        for hours in (EARLY, LATE - EARLY):
            await asyncio.sleep(hours * HOUR_S)
            gc.collect()
            self.seen.blocks.append(sys.getallocatedblocks())

    async def pass_by(self) -> None:
        """The day."""
        await self.stores.graphs.save("chat", "root", "chat", CHAT, now_ms=0)
        await self.stores.graphs.save("two", "root", "two", TWO, now_ms=0)
        async with self.host:
            async with asyncio.TaskGroup() as watching:
                tasks = [watching.create_task(self.inspections()), watching.create_task(self.hours())]
                await self.arrivals()
                while self._doing or self.host.stats()["running"] or self.host.stats()["queued"]:  # noqa: ASYNC110
                    await asyncio.sleep(KEEP_S / 10)
                await self.inspect()
                for task in tasks:
                    task.cancel()
            await asyncio.sleep(KEEP_S * 2)
        self.left = {task.get_name() for task in asyncio.all_tasks()} - {asyncio.current_task().get_name()}  # type: ignore[union-attr]


def _loop() -> SimLoop:
    running = asyncio.get_running_loop()
    assert isinstance(running, SimLoop)
    return running


def check_story(run: RunRecord, events: list[tuple[int, str, Any]]) -> None:
    """No gap, one end and that last, and every node and call begun before it ended, and ended once."""
    assert [seq for seq, _, _ in events] == [*range(1, len(events) + 1)], run
    types = [type for _, type, _ in events]
    assert [type for type in types if type in STATUS_OF] == [types[-1]] == [f"run.{run.status}"], (run, types)
    open_now: set[str] = set()
    ended: set[str] = set()
    for _, type, data in events:
        name = data.get("node_id") if type.startswith("node.") else data.get("call_id")
        if type in ("node.started", "call.started"):
            assert name not in open_now | ended, (run, types)
            open_now.add(name)
        elif type in ("node.completed", "node.error", "node.cancelled", "call.ended"):
            assert name in open_now, (run, type, name, types)
            open_now.discard(name)
            ended.add(name)
    assert not open_now, (run, types)


async def a_day(seed: int) -> Day:
    day = Day(seed)
    await day.pass_by()
    return day


@pytest.fixture(scope="module")
def day() -> Day:
    async def main() -> Day:
        return await a_day(8)

    with relaxed_gc():  # as `penstock serve` is
        freeze_heap()
        return sim_run(main, seed=8)


def test_every_run_of_a_day_ends_once_with_a_consistent_history(day: Day) -> None:
    seen = day.seen
    assert len(seen.runs) == RUNS
    assert sum(seen.statuses.values()) == RUNS
    for status, share in (("failed", ERRORS), ("cancelled", CANCELS / 2), ("halted", HALTS)):
        assert seen.statuses[status] > RUNS * share / 2, seen.statuses
    assert seen.stops["budget_exceeded"] == seen.statuses["halted"]


def test_the_books_of_a_day_agree_with_the_bill(day: Day) -> None:
    seen, days = day.seen, [(utc_from_ns(_start_ns(day)) + timedelta(days=n)).date() for n in range(3)]
    names = [f"all:{one}" for one in days if f"all:{one}" in day.stores.ledger._accounts]
    balances = [day.stores.ledger.balance(name) for name in names]
    assert len(names) >= 1
    assert sum(one.held_nanos for one in balances) == 0
    assert sum(one.spent_nanos for one in balances) == seen.cost_nanos
    assert sum(one.unresolved_nanos for one in balances) == seen.unresolved_nanos
    assert not day.stores.ledger.held()
    # What was answered after its run was stopped is on the bill, and among what is unresolved.
    assert seen.cost_nanos <= day.model.billed_nanos <= seen.cost_nanos + seen.unresolved_nanos


def test_a_day_leaves_nothing_that_retention_does_not_keep(day: Day) -> None:
    most, bound = day.seen.most, 2 * RUNS * (KEEP_S + REMOVED_EVERY_S) / DAY_S + 50
    for name in ("runs", "logs", "journals", "holds"):
        assert most[name] < 2 * bound, (name, most)
    assert most["events"] < 40 * bound
    assert most["tasks"] < 200
    left = day.sizes()
    assert left.pop("accounts") <= 2 * (len(OWNERS) + 1), "those of the days, of everybody and of all"
    assert set(left.values()) == {0}, left
    assert day.left == set()


def test_memory_of_a_day_grows_with_its_chats_only(day: Day) -> None:
    early, late = day.seen.blocks
    per_thousand = (late - early) / (LATE - EARLY) / (RUNS / 24) * 1_000
    assert per_thousand < MESSAGE_BLOCKS * 2 * CHATS * 1_000, day.seen.blocks


def _start_ns(day: Day) -> int:
    return day.loop.clock.time_ns() - day.loop.clock.monotonic_ns()
