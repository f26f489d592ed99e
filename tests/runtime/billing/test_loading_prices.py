"""The table of prices is loaded in another process, off the event loop, before the first call that needs it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest

from penstock import Agent, ExecutionContext, FunctionNode, Graph, Halted, Price, PriceBook, contain
from penstock.agents import ScriptedModel
from penstock.agents.model import ModelResponse
from penstock.runtime.billing import price_table
from penstock.runtime.billing import prices as prices_module
from penstock.runtime.billing.price_table import PriceTable
from penstock.runtime.billing.usage import Usage
from penstock.testing import sim_run

ANSWER = ModelResponse("yes", usage=Usage(1_000, 10, model="gpt-4o"))

FRESH = """
import asyncio, json, sys, threading

turns = threading.Semaphore(0)
loaded_on = []

def started(event, args):
    # Lets the process that exports the table start only after the event loop has turned ten times meanwhile.
    if event == "subprocess.Popen":
        loaded_on.append(threading.current_thread() is threading.main_thread())
        if not loaded_on[-1]:
            for _ in range(10):
                assert turns.acquire(timeout=30), "the event loop stands still"

sys.addaudithook(started)
from penstock import *
from penstock.agents import ScriptedModel
from penstock.agents.model import ModelResponse
from penstock.runtime.billing.usage import Usage

ANSWER = ModelResponse("yes", usage=Usage(1_000, 10, model="gpt-4o"))

async def ticks():
    while True:
        turns.release()
        await asyncio.sleep(0.001)

async def main():
    ticking = asyncio.ensure_future(ticks())
    await asyncio.sleep(0)
    cost = await work()
    ticking.cancel()
    return cost

{work}

cost = asyncio.run(main())
imported = [name for name in sys.modules if name.startswith("genai_prices")]
print(json.dumps({{"on_main": loaded_on, "cost": cost, "imported": imported}}))
"""

AGENT = """
async def work():
    return (await Agent(ScriptedModel([ANSWER], name="gpt-4o")).run("Well?")).cost_usd
"""
AGENT_STEP = """
async def work():
    with ExecutionContext(input="Well?") as run:
        await Graph("g").add_step(Agent(ScriptedModel([ANSWER], name="gpt-4o")), "agent").execute(run)
    return run.stats.total_cost
"""
WRAPPED = """
async def answers():
    return ANSWER

async def work():
    with contain() as run:
        await run.awrap_llm_call(answers, WrapOptions(model="gpt-4o"))
    return run.stats.total_cost
"""
REFUSING = """
async def answers():
    return ANSWER

async def work():
    with contain(prices=PriceBook(unknown="refuse")) as run:
        await run.allm(answers, model="gpt-4o")
    return run.stats.total_cost
"""
STEP = """
async def answers(ctx):
    return ANSWER

async def work():
    with ExecutionContext() as run:
        await Graph("g").add_step(FunctionNode("ask", answers), "ask").execute(run)
    return run.stats.total_cost
"""
SYNC_STEP = """
def answers(ctx):
    return ANSWER

async def work():
    with ExecutionContext() as run:
        await Graph("g").add_step(FunctionNode("ask", answers), "ask").execute(run)
    return run.stats.total_cost
"""
STEP_WITH_A_POLICY = STEP.replace('"ask").execute', '"ask", error_policy=ErrorPolicy(timeout_ms=60_000)).execute')


@pytest.mark.parametrize(
    "work",
    [AGENT, AGENT_STEP, WRAPPED, REFUSING, STEP, SYNC_STEP, STEP_WITH_A_POLICY],
    ids=["agent", "agent step", "wrapped call", "refusing prices", "step", "sync step", "step with a policy"],
)
def test_the_first_priced_call_loads_the_table_in_another_process_while_the_event_loop_turns(work: str) -> None:
    """An import on a thread would hold the interpreter lock for up to a second: nothing of it is imported here."""
    code = FRESH.format(work=textwrap.dedent(work))
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    result: dict[str, Any] = json.loads(shown.stdout)
    assert result["on_main"] == [False]
    assert result["imported"] == []
    assert result["cost"] == pytest.approx(0.0026)


SYNC_CALL = """
import asyncio, sys

happened = []
sys.addaudithook(lambda event, args: happened.append("export") if event == "subprocess.Popen" else None)
from penstock import *
from penstock.runtime.billing.usage import Usage
from penstock.agents.model import ModelResponse

def ask():
    happened.append("call")
    return ModelResponse("yes", usage=Usage(1_000, 10, model="gpt-4o"))

async def main():
    with {contained} as run:
        {call}
    assert "genai_prices" not in sys.modules
    print(*happened, run.stats.total_cost)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("contained", "call", "expected"),
    [
        ("contain()", 'run.wrap_llm_call(ask, WrapOptions(model="gpt-4o"))', "export call 0.0026"),
        ("contain()", 'run.llm(ask, model="gpt-4o")', "export call 0.0026"),
        ("contain()", "run.llm(ask)", "call export 0.0026"),  # only the answer names the model
        ("contain(metadata=ChainMetadata('r', 'c', model='gpt-4o'))", "run.llm(ask)", "export call 0.0026"),
        (
            "contain(prices=PriceBook(registered={'gpt-4o': Price(1, 2)}))",
            "run.llm(ask, model='gpt-4o')",
            "call 0.00102",
        ),
    ],
    ids=["options", "argument", "no model", "metadata", "registered"],
)
def test_a_sync_call_on_an_event_loop_loads_the_table_while_its_function_runs(
    contained: str, call: str, expected: str
) -> None:
    """It cannot wait without blocking the loop, so all it can do is to begin early."""
    code = SYNC_CALL.format(contained=contained, call=call)
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (shown.stdout.strip(), shown.returncode) == (expected, 0), shown.stderr


class Loader:
    """Stands in for the table: says on which thread it was loaded, and how often."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[threading.Thread] = []
        self.began, self.may_end = threading.Event(), threading.Event()
        monkeypatch.setattr(prices_module, "_table", None)
        monkeypatch.setattr(price_table, "load_table", self.load)

    def load(self, export: object = None) -> PriceTable:
        self.threads.append(threading.current_thread())
        self.began.set()
        assert self.may_end.wait(30)
        return PriceTable()


async def test_tasks_that_need_the_table_at_the_same_time_wait_for_one_load(monkeypatch: pytest.MonkeyPatch) -> None:
    loader, book = Loader(monkeypatch), PriceBook()
    waiting = [asyncio.ensure_future(book.aload()) for _ in range(20)]
    await asyncio.sleep(0)
    waiting[0].cancel()  # the others still wait for it
    loader.may_end.set()
    assert await asyncio.gather(*waiting[1:]) == [None] * 19
    assert len(loader.threads) == 1
    assert not book.is_pending
    await book.aload()
    assert len(loader.threads) == 1


async def test_an_abort_ends_the_wait_for_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = Loader(monkeypatch)
    with contain(prices=PriceBook()) as run:
        asking = asyncio.ensure_future(ScriptedModel([ANSWER], name="gpt-4o").generate(run, []))
        assert await asyncio.to_thread(loader.began.wait, 30)
        run.abort("enough")
        with pytest.raises(BaseException, match="enough"):
            await asking
    loader.may_end.set()
    assert run.stats.total_cost == 0


def test_a_loop_without_threads_waits_for_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    loader, book = Loader(monkeypatch), PriceBook()
    loader.may_end.set()
    sim_run(book.aload, seed=1)
    assert loader.threads == [threading.main_thread()]


@pytest.mark.parametrize(
    ("book", "model", "otherwise", "loads"),
    [
        (PriceBook(), "gpt-4o", None, True),
        (PriceBook(), None, "gpt-4o", True),
        (PriceBook(), None, None, False),
        (PriceBook(use_genai_prices=False), "gpt-4o", None, False),
        (PriceBook(registered={"gpt-4o": Price(1, 2)}), "gpt-4o", None, False),
        (PriceBook(registered={"gpt-4o": Price(1, 2)}), "azure/gpt-4o", None, False),
        (PriceBook(registered={"gpt-4o": Price(1, 2)}), "gpt-4o-2024", "gpt-4o", False),
        (PriceBook(registered={"gpt-4o": Price(1, 2)}), "gpt-5", None, True),
    ],
)
def test_the_table_is_loaded_only_for_a_look_up_that_needs_it(
    book: PriceBook, model: str | None, otherwise: str | None, loads: bool
) -> None:
    assert book.must_load_for(model, otherwise) is loads


async def test_calls_that_need_no_price_do_not_load_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = Loader(monkeypatch)
    book = PriceBook(registered={"gpt-4o": Price(1, 2)})

    async def page(ctx: object) -> dict[str, int]:
        return {"page": 1}

    with ExecutionContext(prices=book, input="Well?") as run:
        await run.allm(lambda: asyncio.sleep(0, "text"), cost_hint_usd=0.1)
        await run.atool(lambda: asyncio.sleep(0, {"found": 1}))
        await run.allm(lambda: asyncio.sleep(0, ANSWER), model="gpt-4o")
        await Graph("g").add_step(FunctionNode("read", page), "read").execute(run)
        await Graph("g").add_step(Agent(ScriptedModel([ANSWER], name="gpt-4o")), "agent").execute(run)
    assert loader.threads == []
    assert book.is_pending


@pytest.mark.parametrize("limits", [{}, {"max_cost_usd": 1}, {"max_steps": 9}], ids=["none", "money", "steps"])
async def test_a_graph_with_sync_steps_loads_the_table_before_its_first_step(
    limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sync step cannot wait for it without blocking the event loop."""
    loader = Loader(monkeypatch)
    loader.may_end.set()
    pending: list[bool] = []
    graph = Graph("g").add_step(FunctionNode("read", lambda ctx: pending.append(book.is_pending)), "read")
    book = PriceBook()
    with contain(prices=book, **limits) as run:
        await graph.execute(run)
    assert pending == [False]
    assert len(loader.threads) == 1
    assert threading.current_thread() not in loader.threads


async def test_a_graph_with_sync_steps_does_not_load_the_table_of_a_book_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loader = Loader(monkeypatch)
    graph = Graph("g").add_step(FunctionNode("read", lambda ctx: 1), "read")
    with contain(prices=PriceBook(use_genai_prices=False)) as run:
        assert await graph.execute(run) == {"read": 1}
    assert loader.threads == []


async def test_a_graph_with_async_steps_loads_the_table_when_a_call_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = Loader(monkeypatch)

    async def read(ctx: object) -> None: ...

    with contain(prices=PriceBook(), max_cost_usd=1) as run:
        await Graph("g").add_step(FunctionNode("read", read), "read").execute(run)
    assert loader.threads == []


async def test_a_call_that_is_refused_for_its_price_needs_the_table_too() -> None:
    with contain(prices=PriceBook(unknown="refuse")) as run:
        with pytest.raises(Halted, match="no price is known"):
            await run.allm(lambda: asyncio.sleep(0), model="unknown-model")
        assert await run.allm(lambda: asyncio.sleep(0, "free"), cost_hint_usd=0) == "free"


def test_a_look_up_without_an_event_loop_waits_for_the_table() -> None:
    book = PriceBook()
    assert book.is_priced("gpt-4o")
    assert not book.is_pending
