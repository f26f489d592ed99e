"""Every HTTP library, in every way that programs use it, with every shape of request that it carries.

The invoice of the provider is at most the ceiling and the ledger has all of it, or the run reports what it could not
limit or price; and each request is counted once. A test is one library called in one way; it tries all shapes.
"""

from __future__ import annotations

import _thread
import asyncio
import contextvars
import itertools
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, get_args

import pytest

from penstock import CancelledError, contain, contained
from penstock.providers.http.forms import FORMS, Api, form_of
from penstock.testing.provider import FakeProviderServer, Hang, Say
from tests.providers.matrix import CEILING_USD, MANY, PAID, Cell, Tally, Trial, Verdict, address, provider
from tests.providers.sdk_calls import outcome
from tests.providers.shapes import EVERY, UNPRICED, UNSIGNED, Shape
from tests.providers.stack_calls import ASYNC, SYNC, AsyncSend, Send, over_botocore

pytestmark = [pytest.mark.requirement("X-5", "X-11"), pytest.mark.usefixtures("at_home")]

Work = Callable[[], Any]
AsyncWork = Callable[[], Awaitable[Any]]

WORKERS = 4
BEDROCK = {name: shape for name, shape in UNSIGNED.items() if shape.path.startswith("/model/")}
"""What botocore sends, with a signature of its own."""


# Ways to call a sync library.


def once(trial: Trial, work: Work) -> None:
    with trial.entered():
        trial.outcomes.append(outcome(work))


def fan_out(trial: Trial, work: Work) -> None:
    def agent() -> None:
        trial.outcomes.append(outcome(work))

    with trial.entered():
        threads = [threading.Thread(target=agent) for _ in range(MANY)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def thread_pool(trial: Trial, work: Work) -> None:
    with ThreadPoolExecutor(WORKERS) as pool:
        everyone = threading.Barrier(WORKERS)
        list(pool.map(lambda _: everyone.wait(), range(WORKERS)))  # its threads are older than the scope
        with trial.entered():
            items = [pool.submit(outcome, work) for _ in range(MANY)]
            trial.outcomes += [item.result() for item in items]


def outlives(trial: Trial, work: Work) -> None:
    """Call once after the block has ended, and once more after the run has."""
    block_ended, answered, run_ended = threading.Event(), threading.Event(), threading.Event()

    def agent() -> None:
        block_ended.wait()
        trial.outcomes.append(outcome(work))
        answered.set()
        run_ended.wait()
        trial.outcomes.append(outcome(work))

    thread = threading.Thread(target=agent)
    with trial.run:
        with trial.block():
            thread.start()
        block_ended.set()
        answered.wait()
    run_ended.set()
    thread.join()


def unreached(trial: Trial, work: Work) -> None:
    """Call in a thread that cannot be followed."""
    found: Future[Any] = Future()
    with trial.entered(), trial.warned():
        _thread.start_new_thread(lambda: found.set_result(outcome(work)), ())
        trial.outcomes.append(found.result())


# The same for an async library.


async def settled(work: AsyncWork) -> Any:
    """Return what the work returns or raises."""
    [found] = await asyncio.gather(work(), return_exceptions=True)
    return found


async def once_async(trial: Trial, work: AsyncWork) -> None:
    with trial.entered():
        trial.outcomes.append(await settled(work))


async def fan_out_async(trial: Trial, work: AsyncWork) -> None:
    with trial.entered():
        trial.outcomes += await asyncio.gather(*(work() for _ in range(MANY)), return_exceptions=True)


async def outlives_async(trial: Trial, work: AsyncWork) -> None:
    block_ended, answered, run_ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def agent() -> None:
        await block_ended.wait()
        trial.outcomes.append(await settled(work))
        answered.set()
        await run_ended.wait()
        trial.outcomes.append(await settled(work))

    with trial.run:
        with trial.block():
            task = asyncio.create_task(agent())
        block_ended.set()
        await answered.wait()
    run_ended.set()
    await task


async def unreached_async(trial: Trial, work: AsyncWork) -> None:
    with trial.entered(), trial.warned():
        trial.outcomes.append(await asyncio.create_task(settled(work), context=contextvars.Context()))


SYNC_WAYS: Mapping[str, Callable[[Trial, Work], None]] = MappingProxyType(
    {
        "once": once,
        "fan-out": fan_out,
        "thread pool": thread_pool,
        "outlives": outlives,
        "unreached": unreached,
    }
)
ASYNC_WAYS: Mapping[str, Callable[[Trial, AsyncWork], Awaitable[None]]] = MappingProxyType(
    {
        "once": once_async,
        "fan-out": fan_out_async,
        "outlives": outlives_async,
        "unreached": unreached_async,
    }
)
PAID_CALLS_PASS = {"BudgetExceededError": MANY - PAID}
REFUSALS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {"fan-out": PAID_CALLS_PASS, "thread pool": PAID_CALLS_PASS, "outlives": {"RunEnded": 1}}
)
"""The errors of each way that has some: under the ceiling five of twenty calls are paid for."""


def name_of(send: Callable[..., Any]) -> str:
    return send.__name__.removeprefix("over_")


def carried_by(send: Callable[..., Any]) -> Mapping[str, Shape]:
    return BEDROCK if send is over_botocore else EVERY


TALLY = Tally()
STACKS: list[Callable[..., Any]] = [*SYNC, over_botocore, *ASYNC]


def checked(trial: Trial) -> Cell:
    """Judge the cell, and compare its outcomes with what its way leads to."""
    cell = trial.judged()
    is_unpriced = cell.shape in UNPRICED  # what has no price passes the ceiling, and is reported
    assert cell.verdict is (Verdict.REPORTED if is_unpriced or cell.way == "unreached" else Verdict.HELD), cell
    refusals = {} if is_unpriced and cell.way != "outlives" else REFUSALS.get(cell.way, {})
    assert not trial.foreign_errors, (cell, trial.foreign_errors)
    assert trial.errors == refusals, (cell, trial.errors)
    assert trial.answers == len(trial.outcomes) - sum(refusals.values()) == cell.requests, cell
    assert trial.run.balance.held_nanos == 0, cell
    assert cell.ledger_usd == (cell.invoice_usd if cell.verdict is Verdict.HELD else 0), cell
    return cell


@pytest.mark.parametrize("way", SYNC_WAYS)
@pytest.mark.parametrize("send", [*SYNC, over_botocore], ids=name_of)
def test_a_sync_stack_spends_nothing_silently(send: Send, way: str) -> None:
    with provider() as server:
        for name, shape in carried_by(send).items():
            trial = Trial(server, name_of(send), way, name)
            SYNC_WAYS[way](trial, partial(send, address(server, shape), shape.body, shape.file))
            TALLY.add([checked(trial)])


@pytest.mark.parametrize("way", ASYNC_WAYS)
@pytest.mark.parametrize("send", ASYNC, ids=name_of)
async def test_an_async_stack_spends_nothing_silently(send: AsyncSend, way: str) -> None:
    async with provider() as server:
        for name, shape in EVERY.items():
            trial = Trial(server, name_of(send), way, name)
            await ASYNC_WAYS[way](trial, partial(send, address(server, shape), shape.body, shape.file))
            TALLY.add([checked(trial)])


@pytest.mark.parametrize("send", ASYNC, ids=name_of)
def test_an_async_stack_on_loops_of_a_thread_pool_spends_nothing_silently(send: AsyncSend) -> None:
    def work(server: FakeProviderServer, shape: Shape) -> Any:
        return asyncio.run(send(address(server, shape), shape.body, shape.file))  # type: ignore[arg-type]

    with provider() as server:
        for name, shape in EVERY.items():
            trial = Trial(server, name_of(send), "thread pool", name)
            thread_pool(trial, partial(work, server, shape))
            TALLY.add([checked(trial)])


@pytest.mark.parametrize("send", STACKS, ids=name_of)
def test_an_answer_that_is_still_arriving_when_its_run_ends_is_cut_off_and_stays_on_the_bill(
    send: Callable[..., Any],
) -> None:
    shape = EVERY["converse stream" if send is over_botocore else "chat stream"]
    with FakeProviderServer.flat(CEILING_USD, lambda _: Say("so on", then=Hang(after=1))) as server:

        def work() -> Any:
            found = send(address(server, shape), shape.body)
            return asyncio.run(found) if asyncio.iscoroutine(found) else found

        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(outcome(work)))
        with contain(max_cost_usd=CEILING_USD, prices=server.provider.prices) as run, contained(run):
            thread.start()
            server.wait_until(lambda: server.requests)
        thread.join()
        server.wait_until(lambda: server.disconnects)
    assert isinstance(found[0], CancelledError), found
    assert "has ended" in str(found[0])
    assert server.invoice.total_nanos > 0
    assert run.balance.spent_nanos + run.balance.unresolved_nanos >= server.invoice.total_nanos
    assert run.balance.held_nanos == 0


def test_no_cell_of_the_matrix_is_left_out_and_none_is_silent() -> None:
    cells = {
        (name_of(send), way, shape) for send in STACKS for way, shape in itertools.product(SYNC_WAYS, carried_by(send))
    }
    if len({cell[:2] for cell in TALLY.cells}) < len({cell[:2] for cell in cells}):
        pytest.skip(f"only a part of the matrix was run: {TALLY}")
    sys.stdout.write(f"{TALLY}\n")  # shown by `pytest -rP`
    assert TALLY.cells.keys() == cells
    assert TALLY.count(Verdict.SILENT) == 0


def test_every_api_that_is_recognised_is_in_the_matrix() -> None:
    forms = [form_of("POST", shape.host, shape.path) for shape in EVERY.values()]
    assert {form.api for form in forms if form is not None} == set(get_args(Api))
    paths = [path for path, _ in FORMS if not any(shape.path.endswith(path) for shape in EVERY.values())]
    assert paths == ["/agents/completions", "/fim/completions"]  # Mistral's, which are chats and completions


HELD = Cell("s", "once", "chat", invoice_usd=0.25, ledger_usd=0.25, requests=5, counted=5, reported=0)


@pytest.mark.parametrize(
    ("cell", "verdict"),
    [
        (HELD, Verdict.HELD),
        (replace(HELD, ledger_usd=0.30), Verdict.HELD),
        (replace(HELD, invoice_usd=0.30, ledger_usd=0.30), Verdict.SILENT),
        (replace(HELD, ledger_usd=0.20), Verdict.SILENT),
        (replace(HELD, ledger_usd=0, reported=4), Verdict.SILENT),
        (replace(HELD, ledger_usd=0, reported=5), Verdict.REPORTED),
        (replace(HELD, counted=4), Verdict.SILENT),
        (replace(HELD, counted=10), Verdict.SILENT),
        (replace(HELD, invoice_usd=0, ledger_usd=0, requests=0, counted=0), Verdict.SILENT),
    ],
)
def test_a_cell_is_silent_if_the_invoice_says_more_than_the_run(cell: Cell, verdict: Verdict) -> None:
    assert cell.verdict is verdict
