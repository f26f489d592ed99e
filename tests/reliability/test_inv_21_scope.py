"""INV 21: no request leaves its scope silently, whatever starts it and however long it lives; the invoice is the judge.

A provider of 25 cents a call, a ceiling of 50 cents, and a program that fans out in every way Python has. The invoice
is never above the ceiling and the ledger never below the invoice, or the requests outside are reported. Every HTTP
library is tried in each of these ways; tests/providers/test_stacks_matrix.py tries them with every shape of request.
"""

from __future__ import annotations

import _thread
import asyncio
import contextvars
import gc
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.pool import ThreadPool
from typing import Any

import httpx2
import pytest

from penstock import BudgetExceededError, ExecutionContext, contain, contained, current_context
from penstock.errors import Halted, RunEnded
from penstock.hosting.host import RunHost
from penstock.providers import UncontainedRequest, contained_client
from penstock.storage.memory import MemoryStores
from penstock.testing.provider import FakeProviderServer
from penstock.tracing.events import SafetyTrace
from tests.providers.matrix import PAID, Tally, Trial, Verdict, provider
from tests.providers.sdk_calls import Clients, achat, async_clients, chat, clients, messages, outcome
from tests.providers.shapes import OFFICIAL, SHAPES
from tests.providers.stack_calls import ASYNC, SYNC, over_botocore

pytestmark = [pytest.mark.reliability, pytest.mark.requirement("X-11")]

CALL_USD = 0.25
CEILING_USD = 0.50
ATTEMPTS = 6


@contextmanager
def program(**options: Any) -> Iterator[tuple[FakeProviderServer, Clients]]:
    with FakeProviderServer.flat(CALL_USD, **options) as server, clients(server) as to:
        yield server, to


def limited(server: FakeProviderServer, **options: Any) -> ExecutionContext:
    return contain(**{"max_cost_usd": CEILING_USD, "prices": server.provider.prices, **options})


def assert_held(server: FakeProviderServer, run: ExecutionContext) -> None:
    """The invoice is within the ceiling, the ledger has all of it, and nothing went past the run."""
    balance = run.balance
    assert server.invoice.total_usd <= CEILING_USD
    assert balance.spent_nanos + balance.unresolved_nanos >= server.invoice.total_nanos
    assert run.uncontained_requests == 0


Work = Callable[[], Any]
FanOut = Callable[[Work, ThreadPoolExecutor], list[Any]]


def started(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def in_threads(work: Work, pool: ThreadPoolExecutor) -> list[Any]:
    outcomes: list[Any] = []
    started([threading.Thread(target=lambda: outcomes.append(work())) for _ in range(ATTEMPTS)])
    return outcomes


def in_threads_with_a_run_of_their_own(work: Work, pool: ThreadPoolExecutor) -> list[Any]:
    outcomes: list[Any] = []

    class Agent(threading.Thread):
        def run(self) -> None:
            outcomes.append(work())

    started([Agent() for _ in range(ATTEMPTS)])
    return outcomes


def in_threads_of_threads(work: Work, pool: ThreadPoolExecutor) -> list[Any]:
    outcomes: list[Any] = []
    started([threading.Thread(target=lambda: outcomes.extend(in_threads(work, pool))) for _ in range(2)])
    return outcomes


def in_timers(work: Work, pool: ThreadPoolExecutor) -> list[Any]:
    outcomes: list[Any] = []
    started([threading.Timer(0, lambda: outcomes.append(work())) for _ in range(ATTEMPTS)])
    return outcomes


def in_a_pool_made_before(work: Work, pool: ThreadPoolExecutor) -> list[Any]:
    return [future.result() for future in [pool.submit(work) for _ in range(ATTEMPTS)]]


def in_a_pool_made_inside(work: Work, pool: ThreadPoolExecutor) -> list[Any]:
    with ThreadPoolExecutor(3) as own:
        return in_a_pool_made_before(work, own)


def in_a_pool_with_map(work: Work, pool: ThreadPoolExecutor) -> list[Any]:
    return list(pool.map(lambda _: work(), range(ATTEMPTS)))


def in_pools_of_pools(work: Work, pool: ThreadPoolExecutor) -> list[Any]:
    nested = [pool.submit(in_a_pool_made_inside, work, pool) for _ in range(2)]
    return [found for future in nested for found in future.result()]


def in_callbacks_of_items(work: Work, pool: ThreadPoolExecutor) -> list[Any]:
    may_end = threading.Event()
    found: list[Future[Any]] = [Future() for _ in range(ATTEMPTS)]
    for each in found:
        pool.submit(may_end.wait).add_done_callback(lambda _, each=each: each.set_result(work()))  # type: ignore[misc]
    may_end.set()
    return [each.result() for each in found]


def in_initializers_of_pools(work: Work, pool: ThreadPoolExecutor) -> list[Any]:
    outcomes: list[Any] = []
    for _ in range(ATTEMPTS):
        with ThreadPoolExecutor(1, initializer=lambda: outcomes.append(work())) as own:
            own.submit(int)
    return outcomes


def in_a_thread_pool_of_multiprocessing(work: Work, pool: ThreadPoolExecutor) -> list[Any]:
    with ThreadPool(2) as own:
        found = own.map(lambda _: work(), range(ATTEMPTS))
        own.close()
        own.join()
    return found


def in_run_in_executor(work: Work, pool: ThreadPoolExecutor) -> list[Any]:
    async def main() -> list[Any]:
        loop = asyncio.get_running_loop()
        default = [loop.run_in_executor(None, work) for _ in range(ATTEMPTS)]
        return await asyncio.gather(*default, *(loop.run_in_executor(pool, work) for _ in range(ATTEMPTS)))

    return asyncio.run(main())


def in_to_thread(work: Work, pool: ThreadPoolExecutor) -> list[Any]:
    async def main() -> list[Any]:
        return await asyncio.gather(*(asyncio.to_thread(work) for _ in range(ATTEMPTS)))

    return asyncio.run(main())


def on_a_loop_in_another_thread(work: Work, pool: ThreadPoolExecutor) -> list[Any]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    contextvars.Context().run(thread.start)  # a loop that was there before the scope

    async def task() -> Any:
        return await asyncio.to_thread(work)

    futures = [asyncio.run_coroutine_threadsafe(task(), loop) for _ in range(ATTEMPTS)]
    found = [future.result() for future in futures]
    asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    return found


FAN_OUTS: list[FanOut] = [
    in_threads,
    in_threads_with_a_run_of_their_own,
    in_threads_of_threads,
    in_timers,
    in_a_pool_made_before,
    in_a_pool_made_inside,
    in_a_pool_with_map,
    in_pools_of_pools,
    in_callbacks_of_items,
    in_initializers_of_pools,
    in_a_thread_pool_of_multiprocessing,
    in_run_in_executor,
    in_to_thread,
    on_a_loop_in_another_thread,
]


@pytest.mark.parametrize("fan_out", FAN_OUTS)
def test_whatever_starts_the_work_the_ceiling_holds(fan_out: FanOut) -> None:
    with program() as (server, to), ThreadPoolExecutor(3) as pool:
        pool.submit(int).result()  # its first thread is older than the scope
        with limited(server) as run, contained(run):
            outcomes = fan_out(lambda: outcome(lambda: chat(to)), pool)
        assert sum(isinstance(found, str) for found in outcomes) == 2
        assert sum(isinstance(found, BudgetExceededError) for found in outcomes) == len(outcomes) - 2
        assert server.invoice.total_usd == CEILING_USD
        assert_held(server, run)


TALLY = Tally()
STACKS: list[Callable[..., Any]] = [*SYNC, over_botocore, *ASYNC]


def request_over(send: Callable[..., Any], server: FakeProviderServer) -> Work:
    """One request over that library, as sync work."""
    shape = SHAPES["converse"] if send is over_botocore else OFFICIAL["chat"]
    if send in ASYNC:
        return lambda: asyncio.run(send(server.url + shape.path, shape.body))
    return lambda: send(server.url + shape.path, shape.body)


@pytest.mark.parametrize("fan_out", FAN_OUTS)
def test_whatever_starts_the_work_the_ceiling_holds_over_every_library(fan_out: FanOut) -> None:
    with provider() as server, ThreadPoolExecutor(3) as pool:
        pool.submit(int).result()  # its first thread is older than the scope
        for send in STACKS:
            trial, work = Trial(server, send.__name__, fan_out.__name__, "chat"), request_over(send, server)
            with trial.entered():
                trial.outcomes += fan_out(lambda work=work: outcome(work), pool)  # type: ignore[misc]
            cell = trial.judged()
            assert cell.verdict is Verdict.HELD, cell
            assert (trial.answers, trial.foreign_errors) == (PAID, []), cell
            TALLY.add([cell])


def test_inv_21_no_library_in_any_way_to_start_work_is_silent() -> None:
    cells = {(send.__name__, fan_out.__name__, "chat") for send in STACKS for fan_out in FAN_OUTS}
    if len(TALLY.cells) < len(cells):
        pytest.skip(f"only a part of the ways was run: {TALLY}")
    sys.stdout.write(f"{TALLY}\n")  # shown by `pytest -rP`
    assert TALLY.cells.keys() == cells
    assert TALLY.count(Verdict.SILENT) == 0


def test_a_thread_sees_the_context_and_the_call_of_its_starter() -> None:
    seen: list[Any] = []
    with program() as (server, to), limited(server) as run, contained(run):

        def tool() -> None:
            started([threading.Thread(target=lambda: seen.extend((current_context(), chat(to))))])

        run.tool(tool, name="search")
    assert seen[0] is run
    tree = run.explain().splitlines()
    assert "search" in tree[1]
    assert "fake-1" in tree[2]
    assert tree[2].startswith("   ")  # below the tool


def test_a_thread_does_not_get_the_variables_of_the_program() -> None:
    theirs: contextvars.ContextVar[str] = contextvars.ContextVar("theirs", default="default")
    seen: list[str] = []
    with contain() as run, contained(run), ThreadPoolExecutor(1) as pool:
        theirs.set("of the starter")
        started([threading.Thread(target=lambda: seen.append(theirs.get()))])
        pool.submit(lambda: seen.append(theirs.get())).result()
    assert seen == ["default", "default"]


def test_a_thread_that_a_scope_has_started_in_a_pool_keeps_nothing_of_it() -> None:
    with program() as (server, to), ThreadPoolExecutor(1) as pool:
        with limited(server) as first, contained(first):
            assert pool.submit(chat, to).result()
        assert pool.submit(current_context).result() is None
        assert pool.submit(chat, to).result()  # outside of any scope, as a program without Penstock
        with limited(server) as second, contained(second):
            assert pool.submit(chat, to).result()
    assert [first.balance.spent_usd, second.balance.spent_usd] == [CALL_USD, CALL_USD]
    assert server.invoice.total_usd == 3 * CALL_USD


def test_two_runs_in_two_threads_do_not_mix_in_a_pool_they_share() -> None:
    both_open = threading.Barrier(2)
    runs: dict[str, ExecutionContext] = {}

    def one(name: str, count: int) -> None:
        with limited(server, name=name) as run, contained(run):
            both_open.wait()
            futures = [pool.submit(outcome, lambda: chat(to)) for _ in range(count)]
            runs[name] = run
            for future in futures:
                future.result()
            both_open.wait()

    with program() as (server, to), ThreadPoolExecutor(4) as pool:
        started([threading.Thread(target=one, args=("a", 1)), threading.Thread(target=one, args=("b", 6))])
    assert (runs["a"].balance.spent_usd, runs["b"].balance.spent_usd) == (0.25, 0.50)
    assert server.invoice.total_usd == 0.75
    assert [run.uncontained_requests for run in runs.values()] == [0, 0]


def test_a_thread_that_could_not_be_started_can_be_started_outside_of_the_scope(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(current_context()))

    def refuse(*args: Any, **options: Any) -> None:
        raise RuntimeError("can't start new thread")

    with (
        contain() as run,
        contained(run),
        monkeypatch.context() as patch,
        pytest.raises(RuntimeError, match="new thread"),
    ):
        starts = next(name for name in ("_start_joinable_thread", "_start_new_thread") if hasattr(threading, name))
        patch.setattr(threading, starts, refuse)
        thread.start()
    started([thread])
    assert seen == [None]


def test_a_worker_that_a_scope_has_started_does_not_keep_the_run_alive() -> None:
    ready = threading.Barrier(20)  # more than are idle by now

    def tools() -> weakref.ref[Any]:
        with contain(sync_calls="thread") as run, contained(run):
            started([threading.Thread(target=run.tool, args=(ready.wait,)) for _ in range(ready.parties)])
            return weakref.ref(run)

    kept = tools()
    gc.collect()
    assert kept() is None


# Work that outlives its block.


async def test_tasks_that_outlive_a_gather_that_failed_are_refused_when_the_run_has_ended() -> None:
    async with FakeProviderServer.flat(CALL_USD) as server, async_clients(server) as to:
        block_has_ended, has_begun = asyncio.Event(), asyncio.Event()

        async def agent() -> None:
            await achat(to)
            has_begun.set()
            await block_has_ended.wait()
            while True:
                await achat(to)

        async def fails() -> None:
            await has_begun.wait()
            raise ValueError("one of them fails")

        with pytest.raises(ValueError, match="fails"), limited(server) as run, contained(run):
            agents = [asyncio.create_task(agent())]
            await asyncio.gather(*agents, fails())
        block_has_ended.set()
        [found] = await asyncio.gather(*agents, return_exceptions=True)
    assert isinstance(found, RunEnded)
    assert server.invoice.total_usd == CALL_USD
    assert_held(server, run)


async def test_a_task_that_outlives_its_block_belongs_to_the_run_while_it_is_open() -> None:
    async with FakeProviderServer.flat(CALL_USD) as server, async_clients(server) as to:
        block_has_ended = asyncio.Event()

        async def agent() -> None:
            await block_has_ended.wait()
            while True:
                await achat(to)

        with limited(server) as run:
            with contained(run):
                tasks = [asyncio.create_task(agent()) for _ in range(4)]
            block_has_ended.set()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(found).__mro__[1] for found in outcomes] == [BudgetExceededError] * 4
    assert server.invoice.total_usd == run.balance.spent_usd == CEILING_USD


def test_a_thread_that_outlives_its_run_is_refused_with_an_error_that_says_so() -> None:
    run_has_ended = threading.Event()
    outcomes: list[Any] = []

    def agent() -> None:
        run_has_ended.wait()
        outcomes.extend((outcome(lambda: chat(to)), outcome(lambda: messages(to))))

    with program() as (server, to):
        with limited(server) as run, contained(run):
            thread = threading.Thread(target=agent)
            thread.start()
        run_has_ended.set()
        thread.join()
    assert [isinstance(found, RunEnded) for found in outcomes] == [True, True]
    assert "has ended" in str(outcomes[0])
    assert server.requests == ()


# Requests that no scope reaches.


def bare_thread(work: Work) -> Any:
    """What the work comes to in a thread that Penstock cannot see."""
    found: Future[Any] = Future()
    _thread.start_new_thread(lambda: found.set_result(outcome(work)), ())
    return found.result()


def test_requests_that_no_scope_reaches_are_reported_once_and_counted() -> None:
    with program() as (server, to), limited(server) as run, contained(run):
        with pytest.warns(RuntimeWarning, match="a model request to 127.0.0.1 belongs to no run") as reported:
            outcomes = [bare_thread(lambda: chat(to)) for _ in range(3)]
        assert [type(found) for found in outcomes] == [str, str, str]
        assert len(reported) == 1
        assert run.uncontained_requests == len(server.requests) == 3
        assert run.balance.spent_usd == 0
        last = run.explain().splitlines()[-1]
    assert last == "3 uncontained requests to 127.0.0.1: not limited, and in no figure of this run"
    [event] = [event for event in run.history() if isinstance(event, SafetyTrace)]
    assert (event.event_type, event.metadata["host"]) == ("uncontained_request", "127.0.0.1")


def test_every_open_run_reports_them() -> None:
    with program() as (server, to), limited(server) as outer, limited(server) as inner:
        with contained(outer), contained(inner), pytest.warns(RuntimeWarning) as reported:
            assert bare_thread(lambda: chat(to))
        assert chat(to)  # no block is open: nothing is reported
    assert (outer.uncontained_requests, inner.uncontained_requests, len(reported)) == (1, 1, 1)


def test_requests_that_are_no_model_requests_are_not_reported() -> None:
    with program() as (server, to), limited(server, strict=True) as run, contained(run):
        assert bare_thread(lambda: to.openai.models.list().data)
        assert bare_thread(lambda: httpx2.post(f"{server.url}/v3/mail/messages", data={"to": "a"}).status_code) == 404
    assert run.uncontained_requests == 0


def test_a_contained_client_elsewhere_makes_nothing_uncontained() -> None:
    with program() as (server, to), limited(server) as run, limited(server) as other, contained_client(other) as http:
        careful = to.openai.with_options(http_client=http)
        assert chat(Clients(careful, None))
        assert bare_thread(lambda: chat(to))
        with contained(run):
            assert bare_thread(lambda: chat(Clients(careful, None)))
    assert (run.uncontained_requests, other.uncontained_requests, other.balance.spent_usd) == (0, 0, 0.50)


def test_a_strict_run_refuses_them() -> None:
    with program() as (server, to), limited(server, strict=True) as run, contained(run):
        found = bare_thread(lambda: chat(to))
        assert chat(to)
    assert isinstance(found, UncontainedRequest)
    assert run.run_id in str(found)
    assert len(server.requests) == 1
    assert_held(server, run)


def test_a_run_that_adopts_pays_for_them() -> None:
    with program() as (server, to), limited(server, adopt=True) as run, contained(run):
        outcomes = [bare_thread(lambda: chat(to)) for _ in range(ATTEMPTS)]
    assert sum(isinstance(found, str) for found in outcomes) == 2
    assert sum(isinstance(found, BudgetExceededError) for found in outcomes) == 4
    assert server.invoice.total_usd == run.balance.spent_usd == CEILING_USD
    assert_held(server, run)


def test_of_two_open_runs_none_adopts() -> None:
    with program() as (server, to), limited(server, adopt=True) as one, limited(server, adopt=True) as other:
        with contained(one), contained(other), pytest.warns(RuntimeWarning, match="belongs to no run"):
            assert bare_thread(lambda: chat(to))
        assert (one.uncontained_requests, other.uncontained_requests) == (1, 1)
        assert (one.balance.spent_usd, other.balance.spent_usd) == (0, 0)
        with contained(one):
            assert bare_thread(lambda: chat(to))
    assert (one.balance.spent_usd, other.balance.spent_usd) == (0.25, 0)


async def test_where_runs_are_hosted_for_others_none_adopts() -> None:
    async with FakeProviderServer.flat(CALL_USD) as server, async_clients(server) as to:
        with limited(server, adopt=True) as run, contained(run):
            nowhere = contextvars.Context()
            async with RunHost(MemoryStores(), executors={}):
                with pytest.warns(RuntimeWarning, match="belongs to no run"):
                    await asyncio.create_task(achat(to), context=nowhere)
            assert (run.uncontained_requests, run.balance.spent_usd) == (1, 0)
            await asyncio.create_task(achat(to), context=nowhere)
    assert (run.uncontained_requests, run.balance.spent_usd) == (1, 0.25)


# Stops that are swallowed.


def swallowing(to: Clients) -> str:
    """A framework that turns every error into an answer."""
    try:
        return chat(to)
    except Exception:
        return "I cannot answer that."


def test_a_block_that_ends_normally_although_its_run_was_stopped_warns_once() -> None:
    with program() as (server, to), limited(server, max_cost_usd=0) as run:
        for expected in (1, 0):
            with warnings.catch_warnings(record=True) as reported:
                warnings.simplefilter("always")
                with contained(run):
                    assert swallowing(to) == "I cannot answer that."
            assert [str(each.message).partition(":")[0] for each in reported] == [
                f"the block ended normally although run {run.run_id} was stopped (budget_exceeded"
            ] * expected
        assert "a block ended normally although the run was stopped (budget_exceeded: " in run.explain()


def test_a_swallowed_stop_is_raised_at_the_end_of_a_block_that_raises_stops() -> None:
    with (
        program() as (server, to),
        limited(server, max_cost_usd=0) as run,
        pytest.raises(BudgetExceededError) as refused,
        contained(run, on_stop="raise"),
    ):
        swallowing(to)
    assert refused.value.owner == "main"
    assert "ended normally" not in run.explain()


def test_a_deadline_that_a_framework_swallowed_is_raised_too() -> None:
    with (
        program(latency_s=5) as (server, to),
        pytest.raises(Halted, match="time"),
        limited(server, timeout_s=0.05) as run,
        contained(run, on_stop="raise"),
        suppress(BaseException),
    ):
        chat(to)
    assert run.stop is not None


def test_a_swallowed_stop_can_be_accepted() -> None:
    with program() as (server, to), limited(server, max_cost_usd=0) as run, warnings.catch_warnings():
        warnings.simplefilter("error")
        with contained(run, on_stop="ignore"):
            swallowing(to)
    assert "ended normally" not in run.explain()


class FrameworkError(Exception):
    """How a framework reports whatever went wrong."""


def wrapping(to: Clients) -> None:
    try:
        chat(to)
    except Exception as error:
        raise FrameworkError("generation failed") from error


def regrouping(to: Clients) -> None:
    raise ExceptionGroup("tasks failed", [error for error in [outcome(lambda: wrapping(to))] if error])


def hiding(to: Clients) -> None:
    swallowing(to)
    raise FrameworkError("500: try again later")


@pytest.mark.parametrize("framework", [wrapping, regrouping, hiding])
def test_an_error_that_a_framework_made_of_a_stop_is_raised_as_the_stop_in_a_block_that_raises_stops(
    framework: Callable[[Clients], None],
) -> None:
    with program() as (server, to), limited(server, max_cost_usd=0) as run:
        with pytest.raises((FrameworkError, ExceptionGroup)), contained(run):
            framework(to)
        with pytest.raises(BudgetExceededError), contained(run, on_stop="raise"):
            framework(to)


def test_an_interrupt_is_never_replaced_by_the_stop() -> None:
    with (
        program() as (server, to),
        limited(server, max_cost_usd=0) as run,
        pytest.raises(KeyboardInterrupt),
        contained(run, on_stop="raise"),
    ):
        swallowing(to)
        raise KeyboardInterrupt


def test_a_fault_in_a_block_whose_run_was_not_stopped_stays_as_it_is() -> None:
    with contain(max_cost_usd=1) as run, pytest.raises(FrameworkError), contained(run, on_stop="raise"):
        raise FrameworkError("a fault")


# Other processes, and the end of this one.


def run_program(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, timeout=60)


PROGRAM = """
import multiprocessing, os, sys, threading, time
import openai
from penstock import BudgetExceededError, contain, contained
from penstock.testing.provider import FakeProviderServer

def chat(server):
    with openai.OpenAI(base_url=server.openai_url, api_key="k", max_retries=0) as client:
        return client.chat.completions.create(
            model="fake-1", messages=[{"role": "user", "content": "hi"}], max_tokens=50
        ).choices[0].message.content

def in_child(work):
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(30)
    assert child.exitcode == 0, child.exitcode
"""


def test_a_forked_process_is_reported_and_can_have_a_scope_of_its_own() -> None:
    done = run_program(
        PROGRAM
        + """
def without_a_scope():
    for _ in range(2):
        chat(server)

def with_its_own():
    run = contain(max_cost_usd=0.25, prices=server.provider.prices)
    with contained(run, on_stop="ignore"):
        chat(server)
        try:
            chat(server)
        except BudgetExceededError:
            print("refused", flush=True)

with FakeProviderServer.flat(0.25) as server, contain(max_cost_usd=0.25, prices=server.provider.prices) as run:
    with contained(run):
        run._run.lock.acquire()  # as another thread might, at the moment of the fork
        in_child(without_a_scope)
        in_child(with_its_own)
        run._run.lock.release()
        chat(server)
    print(len(server.requests), run.balance.spent_usd, run.uncontained_requests)
"""
    )
    assert done.stdout == "refused\n4 0.25 0\n", done.stderr
    assert (
        done.stderr.count("RuntimeWarning: a model request to 127.0.0.1 is not limited: this process was forked") == 1
    )


def test_a_process_forked_while_another_thread_enters_a_scope_does_not_hang() -> None:
    done = run_program(
        PROGRAM
        + """
from penstock.providers import scope, uncontained

def child():
    with contain() as own, contained(own):
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

with uncontained._lock, scope._hooks._lock:  # as another thread has them while it enters or leaves
    in_child(child)
print("done")
"""
    )
    assert (done.stdout, done.stderr) == ("done\n", "")


@pytest.mark.parametrize("daemon", [True, False])
def test_the_interpreter_ends_while_a_thread_of_a_scope_is_alive(daemon: bool) -> None:
    done = run_program(
        PROGRAM
        + f"""
server = FakeProviderServer.flat(0.25).__enter__()

def agent():
    waiting.set()
    threading.main_thread().join(None if {not daemon} else 60)
    try:
        chat(server)
    except Exception as error:
        print(type(error).__name__, flush=True)

waiting = threading.Event()
with contain(max_cost_usd=1, prices=server.provider.prices) as run, contained(run):
    threading.Thread(target=agent, daemon={daemon}).start()
    waiting.wait()
"""
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "" if daemon else "RunEnded\n", "")
