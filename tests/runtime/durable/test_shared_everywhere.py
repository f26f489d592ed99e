"""A shared budget and the run that pays from it come to the same figures, whatever calls it and whatever fails."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path
from typing import Any, get_args

import openai
import pytest

from penstock.agents.messages import ToolCall
from penstock.agents.tools import Tool, Tools, execute_one
from penstock.containment.ledger import LedgerStore, MemoryLedgerStore
from penstock.containment.limits import NO_LIMITS, BudgetExceededError, Limits
from penstock.errors import CancelledError, Halted, LedgerUnavailable
from penstock.flow.graph import Graph
from penstock.flow.node import FunctionNode
from penstock.providers import contained_async_client, contained_client
from penstock.runtime.billing.usage import Reported
from penstock.runtime.call import CallSpec
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable.shared import SharedBudget
from penstock.runtime.execution import run_async
from penstock.storage import SqliteLedgerStore
from penstock.testing import explore
from penstock.testing.faulty import Fault, FaultKind, FaultyStore, every_call
from penstock.testing.provider import FakeProviderServer

USD = 1_000_000_000
ASK: Any = {"model": "fake-1", "messages": [{"role": "user", "content": "Say hello."}], "max_completion_tokens": 20}


def memory(limits: Limits = NO_LIMITS) -> MemoryLedgerStore:
    store = MemoryLedgerStore()
    store.open_account("team", limits)
    return store


def figures(of: Any) -> tuple[int, int, int]:
    """Spent, held and unresolved, of a run or of the account at a store."""
    now = of.balance if isinstance(of, ExecutionContext) else of.balance("team")
    return now.spent_nanos, now.held_nanos, now.unresolved_nanos


async def flushed(shared: SharedBudget, run: ExecutionContext, store: LedgerStore) -> None:
    """Wait until everything is flushed to the store, and compare."""
    for _ in range(20_000):
        if not await shared.aflush() and figures(store) == figures(run):
            break
        await asyncio.sleep(0.001)
    assert figures(store) == figures(run)
    assert not store.held()


# Any order of things.


@pytest.mark.requirement("P-B4")
def test_in_any_order_runs_that_share_a_budget_stay_inside_it_and_agree_with_it() -> None:
    async def main(seed: int) -> None:
        rng, ceiling = random.Random(seed), 6 * USD
        store = memory(Limits(cost_nanos=ceiling))
        runs = [
            ExecutionContext(shared_budget=SharedBudget(store, "team", prefix=f"{number}/1")) for number in range(3)
        ]

        async def ask(run: ExecutionContext) -> None:
            asking = asyncio.ensure_future(run.allm(Provider(rng).answer, cost_hint_usd=1, retries=rng.randint(0, 1)))
            await asyncio.sleep(rng.choice([0, 0, 1]))
            assert sum(figures(store)) <= ceiling
            if rng.random() < 0.3:
                asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

        await asyncio.gather(*(ask(rng.choice(runs)) for _ in range(30)))
        runs[0].abort("enough")
        assert figures(store) == tuple(map(sum, zip(*map(figures, runs), strict=True)))
        assert not store.held()

    explore(main, schedules=60)


# Clients that people already have.


@pytest.mark.parametrize("streams", [False, True], ids=["plain", "streamed"])
def test_a_contained_client_pays_from_the_shared_budget(streams: bool) -> None:
    store = memory(Limits(cost_nanos=USD))
    shared = SharedBudget(store, "team", prefix="run/1")
    with (
        FakeProviderServer.flat(0.25) as server,
        ExecutionContext(prices=server.provider.prices, shared_budget=shared) as run,
        contained_client(run) as http,
        openai.OpenAI(base_url=server.openai_url, api_key="k", http_client=http, max_retries=0) as client,
    ):
        for _ in range(4):
            answer = client.chat.completions.create(**ASK, stream=streams)
            if streams:
                assert list(answer)
        with pytest.raises(BudgetExceededError) as refused:
            client.chat.completions.create(**ASK, stream=streams)
        assert refused.value.owner == "team"
        asyncio.run(flushed(shared, run, store))
    assert server.invoice.total_usd == 1.0
    assert figures(store) == (USD, 0, 0)


@pytest.mark.parametrize("streams", [False, True], ids=["plain", "streamed"])
async def test_a_contained_async_client_pays_from_the_shared_budget(streams: bool) -> None:
    store = memory(Limits(cost_nanos=USD))
    shared = SharedBudget(store, "team", prefix="run/1")
    async with FakeProviderServer.flat(0.25) as server:
        with ExecutionContext(prices=server.provider.prices, shared_budget=shared) as run:
            async with contained_async_client(run) as http:
                client = openai.AsyncOpenAI(base_url=server.openai_url, api_key="k", http_client=http, max_retries=0)

                async def ask() -> None:
                    answer = await client.chat.completions.create(**ASK, stream=streams)
                    if streams:
                        assert [chunk async for chunk in answer]

                outcomes = await asyncio.gather(*(ask() for _ in range(8)), return_exceptions=True)
            await flushed(shared, run, store)
    assert server.invoice.total_usd == 1.0
    assert sum(isinstance(found, BudgetExceededError) for found in outcomes) == 4


async def test_a_stream_abandoned_in_the_middle_is_unresolved_at_the_store() -> None:
    store = memory()
    shared = SharedBudget(store, "team", prefix="run/1")
    async with FakeProviderServer(script=["a long answer of many words"]) as server:
        with ExecutionContext(prices=server.provider.prices, shared_budget=shared) as run:
            async with contained_async_client(run) as http:
                client = openai.AsyncOpenAI(base_url=server.openai_url, api_key="k", http_client=http, max_retries=0)
                answer = await client.chat.completions.create(**ASK, stream=True)
                await anext(aiter(answer))
                await answer.close()
            await flushed(shared, run, store)
    assert figures(store)[2] > 0


def test_no_request_leaves_while_the_ledger_cannot_record() -> None:
    store = FaultyStore(memory(), "gone")
    shared = SharedBudget(store, "team", prefix="run/1")  # type: ignore[arg-type]
    with (
        FakeProviderServer.flat(0.25) as server,
        ExecutionContext(prices=server.provider.prices, shared_budget=shared) as run,
        contained_client(run) as http,
        openai.OpenAI(base_url=server.openai_url, api_key="k", http_client=http, max_retries=0) as client,
    ):
        with pytest.raises(Halted, match="ledger_unavailable"):
            client.chat.completions.create(**ASK)
        assert server.invoice.total_usd == 0


# Sync tools that a task waits for.


async def test_a_tool_on_a_worker_pays_and_one_that_is_left_behind_settles_late() -> None:
    store, go_on = memory(Limits(cost_nanos=2 * USD)), threading.Event()
    shared = SharedBudget(store, "team", prefix="run/1")

    def slow() -> Reported[None]:
        assert go_on.wait(60)
        return Reported.of(None, cost_usd=0.5)

    with ExecutionContext(shared_budget=shared) as run:
        assert (await run_async(run, CallSpec("tool", "quick", USD), lambda: 7, on_worker=True)).value == 7
        left = await run_async(run, CallSpec("tool", "slow", USD, timeout_s=0.01), slow, on_worker=True)
        assert left.stop is not None
        refused = await run_async(run, CallSpec("tool", "third", USD), lambda: 8, on_worker=True)
        assert refused.stop is not None
        assert refused.stop.budget == "team"
        go_on.set()
        for _ in range(20_000):
            if not figures(run)[2]:
                break
            await asyncio.sleep(0.001)
        await flushed(shared, run, store)
    assert figures(store) == (3 * USD // 2, 0, 0)


# What the store refuses stops the run, wherever it is refused.


async def test_a_tool_that_the_store_refuses_ends_the_agent_and_is_not_reported_to_the_model() -> None:
    store = memory(Limits(cost_nanos=USD))
    chain = Tools([Tool(lambda: "dug", name="dig", cost_usd="0.8")])
    with ExecutionContext(shared_budget=SharedBudget(store, "team", prefix="run/1")) as run:
        assert not (await execute_one(chain, run, ToolCall("1", "dig", {}))).is_error
        with pytest.raises(BudgetExceededError):
            await execute_one(chain, run, ToolCall("2", "dig", {}))


async def test_a_step_that_the_store_refuses_ends_a_graph_that_could_continue_without_it() -> None:
    store = memory(Limits(cost_nanos=USD))
    graph = Graph("digging", settle="collect")
    graph.add_step(FunctionNode("asks", lambda ctx: ctx.allm(lambda: None, cost_hint_usd=2)), "asks")
    graph.add_step(FunctionNode("rests", lambda ctx: "rested"), "rests")
    shared = SharedBudget(store, "team", prefix="run/1")
    with ExecutionContext(shared_budget=shared) as run, pytest.raises(BudgetExceededError):
        await graph.execute(run)


# Faults at every act, and at any.


@pytest.mark.parametrize("kind", get_args(FaultKind))
async def test_whichever_act_fails_the_store_and_the_run_come_to_the_same_figures(kind: FaultKind) -> None:
    async def scenario(fault: Fault) -> None:
        inner = memory(Limits(retries=9))
        store: Any = FaultyStore(inner, fault)
        shared = SharedBudget(store, "team", prefix="run/1")
        with ExecutionContext(shared_budget=shared) as run:
            provider = Provider(random.Random(3), script=[0.9, 0.05, 0.15, 0.25, 0.9, 0.9])
            for _ in range(4):
                await run.acall_llm(provider.answer, _options(retries=1))
            run.call_tool(lambda: 7, _options())
            await flushed(shared, run, inner)

    assert await every_call(scenario, kind) >= 12


class Provider:
    """Answers, fails for free, fails with a bill that is known or unknown."""

    def __init__(self, rng: random.Random, script: list[float] | None = None) -> None:
        self.rng = rng
        self.script = iter(script or ())

    async def answer(self) -> Reported[str]:
        fate = next(self.script, None)
        fate = self.rng.random() if fate is None else fate
        await asyncio.sleep(0)
        if fate < 0.1:
            raise ConnectionRefusedError
        if fate < 0.2:
            raise ConnectionResetError
        if fate < 0.3:
            raise type("Billed", (Exception,), {"cost_usd": 0.25})()
        return Reported.of("text", cost_usd=0.5, input_tokens=3, output_tokens=2)


def _options(retries: int = 0) -> Any:
    from penstock.runtime.calls import WrapOptions

    return WrapOptions(cost_estimate_hint=1, retry_policy_override=retries)


class Flaky:
    """A store of which any act fails one time in five, half of them after they were recorded."""

    def __init__(self, store: LedgerStore, rng: random.Random) -> None:
        self.store = store
        self.rng = rng
        self.is_well = False

    def __getattr__(self, name: str) -> Any:
        act = getattr(self.store, name)

        def do(*args: Any, **options: Any) -> Any:
            fate = 1.0 if self.is_well else self.rng.random()
            if fate < 0.1:
                raise LedgerUnavailable("before")
            answer = act(*args, **options)
            if fate < 0.2:
                raise LedgerUnavailable("after")
            return answer

        return do


@pytest.mark.reliability
@pytest.mark.requirement("X-1", "P-B4")
@pytest.mark.parametrize("seed", range(6))
async def test_many_calls_at_a_store_that_fails_at_random_leave_the_same_figures(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    inner: Any = memory() if seed % 2 else await asyncio.to_thread(_file, tmp_path)
    flaky: Any = Flaky(inner, rng)
    shared = SharedBudget(flaky, "team", prefix="run/1")

    async def lane(run: ExecutionContext) -> None:
        for _ in range(25):
            asking = asyncio.ensure_future(run.allm(Provider(rng).answer, cost_hint_usd=1, retries=rng.randint(0, 2)))
            if rng.random() < 0.2:
                for _ in range(rng.randint(0, 5)):
                    await asyncio.sleep(rng.choice([0, 0.001]))
                asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    with ExecutionContext(shared_budget=shared) as run:
        lanes = [lane(run) for _ in range(4)]
        await asyncio.gather(*lanes)
        child = run.spawn_child("cut off")
        left = asyncio.ensure_future(child.allm(asyncio.Event().wait, cost_hint_usd=1))
        await asyncio.sleep(0.01)
        child.abort("enough")
        with pytest.raises((CancelledError, Halted)):
            await left
        child.end()
        flaky.is_well = True
        for _ in range(20_000):
            if not await shared.aflush():
                break
        look = await asyncio.to_thread(lambda: (figures(inner), dict(inner.held())))
        for _ in range(2_000):
            if look == (figures(run), {}):
                break
            await shared.aflush()
            await asyncio.sleep(0.001)
            look = await asyncio.to_thread(lambda: (figures(inner), dict(inner.held())))
        assert look == (figures(run), {})
    if isinstance(inner, SqliteLedgerStore):
        await asyncio.to_thread(inner.close)


def _file(folder: Path) -> SqliteLedgerStore:
    store = SqliteLedgerStore(folder / "ledger.db", busy_timeout_s=60)
    store.open_account("team", NO_LIMITS)
    return store
