"""Which run pays for work in other threads, with two runs open at once: that of who submits an item.

Every case has a worker that was started in the block of one run, and work that comes from the block of another, or from
outside of any. A provider of 25 cents a call says who has paid.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool
from types import ModuleType
from typing import Any

import anyio.to_thread
import pytest

from penstock import ExecutionContext, contain, contained, current_context
from penstock.errors import RunEnded
from penstock.providers.current import ELSEWHERE, captured
from penstock.testing.provider import FakeProviderServer
from tests.providers.sdk_calls import Clients, chat, clients, outcome

pytestmark = pytest.mark.requirement("X-11")

CALL_USD = 0.25

Work = Callable[[], Any]
Submit = Callable[[Work], Any]
"""Runs the work in a worker, and returns what it returns."""


class Setting:
    """A provider, and two runs that are open at once."""

    def __init__(self, server: FakeProviderServer, to: Clients, starter: ExecutionContext, other: ExecutionContext):
        self.server = server
        self.starter = starter
        self.other = other
        self._to = to

    def ask(self) -> Any:
        """Make one model call; return its error if it is refused."""
        return outcome(lambda: chat(self._to))

    @property
    def paid(self) -> tuple[float, float]:
        """What the run that started the worker has paid, and what the other has."""
        return self.starter.balance.spent_usd, self.other.balance.spent_usd


@contextmanager
def two_runs() -> Iterator[Setting]:
    with FakeProviderServer.flat(CALL_USD) as server, clients(server) as to:
        prices = server.provider.prices
        yield Setting(server, to, contain(name="starter", prices=prices), contain(name="other", prices=prices))


def outside(work: Callable[..., Any], *args: Any) -> Any:
    """Run the work in a context without any block."""
    return contextvars.Context().run(work, *args)


# Pools that pass items on.


@contextmanager
def executor() -> Iterator[Submit]:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        yield lambda work: pool.submit(work).result()


@contextmanager
def executor_with_callbacks() -> Iterator[Submit]:
    """Work that the thread of a pool does when an item of it has ended."""

    def submit(work: Work) -> Any:
        found: Future[Any] = Future()
        may_end = threading.Event()
        item = pool.submit(may_end.wait)
        item.add_done_callback(lambda _: found.set_result(work()))
        may_end.set()
        return found.result()

    with ThreadPoolExecutor(1) as pool:
        yield submit


@contextmanager
def thread_pool(submit: Callable[[ThreadPool, Work], Any]) -> Iterator[Submit]:
    with ThreadPool(1) as pool:
        yield lambda work: submit(pool, work)
        pool.close()
        pool.join()


def by_callback(pool: ThreadPool, work: Work) -> Any:
    found: Future[Any] = Future()
    pool.apply_async(int, callback=lambda _: found.set_result(work()))
    return found.result()


def by_error_callback(pool: ThreadPool, work: Work) -> Any:
    found: Future[Any] = Future()
    pool.map_async(int, ["not a number"], error_callback=lambda _: found.set_result(work()))
    return found.result()


def by_lazy_arguments(pool: ThreadPool, work: Work) -> Any:
    return next(pool.imap(lambda found: found, (work() for _ in range(1))))


@contextmanager
def worker_with_contexts() -> Iterator[Submit]:
    """A thread that takes work from a queue, and runs each item in the context it came with."""
    items: queue.Queue[tuple[contextvars.Context, Work, Future[Any]] | None] = queue.Queue()

    def loop() -> None:
        while (item := items.get()) is not None:
            context, work, found = item
            found.set_result(context.run(work))

    def submit(work: Work) -> Any:
        found: Future[Any] = Future()
        items.put((contextvars.copy_context(), work, found))
        return found.result()

    thread = threading.Thread(target=loop)
    thread.start()
    yield submit
    items.put(None)
    thread.join()


PER_ITEM: dict[str, Callable[[], Any]] = {
    "ThreadPoolExecutor": executor,
    "callback of a future": executor_with_callbacks,
    "apply": lambda: thread_pool(lambda pool, work: pool.apply(work)),
    "apply with arguments": lambda: thread_pool(
        lambda pool, work: pool.apply(lambda f, *, g: g(f), (work,), {"g": run})
    ),
    "map": lambda: thread_pool(lambda pool, work: pool.map(run, [work])[0]),
    "starmap": lambda: thread_pool(lambda pool, work: pool.starmap(run, [(work,)])[0]),
    "imap": lambda: thread_pool(lambda pool, work: next(pool.imap(run, [work]))),
    "imap in chunks": lambda: thread_pool(lambda pool, work: next(iter(pool.imap(run, [work], chunksize=2)))),
    "imap_unordered": lambda: thread_pool(lambda pool, work: next(pool.imap_unordered(run, [work]))),
    "callback": lambda: thread_pool(by_callback),
    "error callback": lambda: thread_pool(by_error_callback),
    "lazy arguments": lambda: thread_pool(by_lazy_arguments),
    "queue with contexts": worker_with_contexts,
}


def run(work: Work) -> Any:
    return work()


@pytest.mark.parametrize("worker", PER_ITEM.values(), ids=PER_ITEM)
def test_an_item_is_paid_by_the_run_that_submits_it_and_not_by_the_one_that_started_the_pool(worker: Any) -> None:
    with two_runs() as setting, contained(setting.starter), worker() as submit:
        with contained(setting.other):
            assert isinstance(submit(setting.ask), str)
        assert setting.paid == (0, CALL_USD)
        assert isinstance(submit(setting.ask), str)
        assert setting.paid == (CALL_USD, CALL_USD)
    assert setting.starter.uncontained_requests == setting.other.uncontained_requests == 0


@pytest.mark.parametrize("worker", PER_ITEM.values(), ids=PER_ITEM)
def test_an_item_from_outside_of_any_block_is_reported_and_not_paid_by_the_run_that_started_the_pool(
    worker: Any,
) -> None:
    with two_runs() as setting, contained(setting.starter), worker() as submit:
        with pytest.warns(RuntimeWarning, match="belongs to no run"):
            assert isinstance(outside(submit, setting.ask), str)
        assert outside(submit, current_context) is None
    assert setting.paid == (0, 0)
    assert setting.starter.uncontained_requests == len(setting.server.requests) == 1


@pytest.mark.parametrize("worker", PER_ITEM.values(), ids=PER_ITEM)
def test_a_pool_outlives_the_run_that_started_it(worker: Any) -> None:
    with two_runs() as setting:
        with setting.starter, contained(setting.starter):
            entered = worker()
            submit = entered.__enter__()
        with contained(setting.other):
            assert isinstance(submit(setting.ask), str)
        entered.__exit__(None, None, None)
    assert setting.paid == (0, CALL_USD)


def test_an_item_of_a_worker_thread_of_anyio_is_paid_by_the_run_that_submits_it() -> None:
    async def submit(work: Work) -> tuple[int, Any]:
        return await anyio.to_thread.run_sync(lambda: (threading.get_ident(), work()))

    async def main() -> None:
        started, _ = await submit(int)
        with contained(setting.other):
            assert isinstance((await submit(setting.ask))[1], str)
        assert setting.paid == (0, CALL_USD)
        with pytest.warns(RuntimeWarning, match="belongs to no run"):
            used, _ = await asyncio.create_task(submit(setting.ask), context=contextvars.Context())
        assert used == started  # the thread that the block has started

    with two_runs() as setting, contained(setting.starter):
        asyncio.run(main())
    assert setting.paid == (0, CALL_USD)
    assert setting.starter.uncontained_requests == 1


def test_an_item_of_to_thread_is_paid_by_the_run_that_submits_it() -> None:
    async def main() -> None:
        await asyncio.to_thread(int)
        with contained(setting.other):
            assert isinstance(await asyncio.to_thread(setting.ask), str)

    with two_runs() as setting, contained(setting.starter):
        asyncio.run(main())
    assert setting.paid == (0, CALL_USD)


def test_the_initializer_of_a_thread_pool_is_paid_by_the_run_that_makes_the_pool() -> None:
    with two_runs() as setting, contained(setting.starter), ThreadPool(1, lambda ask: ask(), (setting.ask,)) as pool:
        with contained(setting.other):
            pool.map(abs, [-1])
        pool.close()
        pool.join()
    assert setting.paid == (CALL_USD, 0)


def test_the_initializer_of_an_executor_is_paid_by_the_run_that_makes_it() -> None:
    with (
        two_runs() as setting,
        contained(setting.starter),
        ThreadPoolExecutor(1, "", lambda ask: ask(), (setting.ask,)) as pool,
        contained(setting.other),
    ):
        assert pool.submit(captured).result() is not None
    assert setting.paid == (CALL_USD, 0)


def test_an_initializer_that_is_none_is_refused_as_before() -> None:
    with contain() as run, contained(run), pytest.raises(TypeError, match="initializer must be a callable"):
        ThreadPoolExecutor(1, initializer=7)  # type: ignore[arg-type]


def test_a_callback_that_outlives_its_run_is_refused() -> None:
    run_has_ended = threading.Event()
    found: Future[Any] = Future()
    with two_runs() as setting, ThreadPoolExecutor(1) as pool:
        with setting.starter, contained(setting.starter):
            item = pool.submit(run_has_ended.wait)
            item.add_done_callback(lambda _: found.set_result(setting.ask()))
        run_has_ended.set()
        assert isinstance(found.result(), RunEnded)
        assert setting.server.requests == ()


def test_the_arguments_and_results_of_a_thread_pool_stay_as_they_are() -> None:
    with contain() as limits, contained(limits), ThreadPool(2) as pool:
        assert pool.apply(divmod, (7, 2)) == (3, 1)
        assert pool.apply(dict, (), {"a": 1}) == {"a": 1}
        assert pool.map(abs, range(-3, 0), chunksize=2) == [3, 2, 1]
        assert pool.starmap(divmod, [(7, 2), (9, 4)]) == [(3, 1), (2, 1)]
        assert list(pool.imap(abs, iter(range(-3, 0)))) == [3, 2, 1]
        assert sorted(pool.imap_unordered(abs, range(-3, 0), chunksize=2)) == [1, 2, 3]
        with pytest.raises(ZeroDivisionError):
            pool.apply(divmod, (1, 0))
        with pytest.raises(TypeError, match="not iterable"):
            list(pool.imap(abs, 7))  # type: ignore[arg-type]
        pool.close()
        pool.join()


def test_a_pool_of_processes_gets_its_functions_as_they_are() -> None:
    program = """
import multiprocessing
from penstock import contain, contained
with contain() as run, contained(run), multiprocessing.get_context("fork").Pool(1) as pool:
    print(pool.apply(abs, (-1,)), pool.map(abs, [-1, -2]), list(pool.imap(abs, [-1])))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("1 [1, 2] [1]\n", "")


def test_a_run_whose_work_went_to_another_process_says_so() -> None:
    program = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from penstock import contain, contained

fork = multiprocessing.get_context("fork")

def process():
    child = fork.Process(target=int)
    child.start()
    child.join()

with contain() as run, contained(run):
    pass
with fork.Pool(1) as pool, ProcessPoolExecutor(1, mp_context=fork) as executor:  # their processes are there before
    executor.submit(int).result()
    process()
    print(run.explain().splitlines()[-1])
    for work in process, lambda: pool.map(int, [1]), lambda: executor.submit(int).result():
        with contain() as outer, contained(outer), contain() as run, contained(run):
            work()
        print(run.explain().splitlines()[-1])
    print(outer.explain().splitlines()[-1])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout.splitlines()[1:], done.stderr) == ([ELSEWHERE] * 4, "")
    assert ELSEWHERE not in done.stdout.splitlines()[0]


def test_an_item_for_another_interpreter_is_submitted_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreters: Any = ModuleType("concurrent.futures.interpreter")  # from Python 3.14 on
    interpreters.InterpreterPoolExecutor = type("InterpreterPoolExecutor", (ThreadPoolExecutor,), {})
    monkeypatch.setitem(sys.modules, interpreters.__name__, interpreters)
    with (
        contain() as run,
        contained(run),
        interpreters.InterpreterPoolExecutor(1) as pool,
        ThreadPoolExecutor(1) as threads,
    ):
        assert ELSEWHERE not in run.explain()
        assert pool.submit(captured).result() is None
        assert run.explain().endswith(ELSEWHERE)
        assert threads.submit(captured).result() is not None


# Threads that take work from a queue.


class Worker:
    """A thread that takes work from a queue, as the threads of many libraries do."""

    def __init__(self) -> None:
        self._items: queue.Queue[tuple[Work, Future[Any]] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._loop)
        self._thread.start()

    def submit(self, work: Work) -> Any:
        found: Future[Any] = Future()
        self._items.put((work, found))
        return found.result()

    def close(self) -> None:
        self._items.put(None)
        self._thread.join()

    def _loop(self) -> None:
        while (item := self._items.get()) is not None:
            work, found = item
            found.set_result(work())


def test_work_from_a_queue_is_paid_by_the_run_that_started_the_thread_while_that_is_open() -> None:
    with two_runs() as setting, contained(setting.starter):
        worker = Worker()
        with contained(setting.other):
            assert isinstance(worker.submit(setting.ask), str)
        assert isinstance(outside(worker.submit, setting.ask), str)
        worker.close()
    assert setting.paid == (2 * CALL_USD, 0)
    assert setting.starter.uncontained_requests == setting.other.uncontained_requests == 0


def test_work_from_a_queue_is_refused_when_the_run_that_started_the_thread_has_ended() -> None:
    with two_runs() as setting:
        with setting.starter, contained(setting.starter):
            worker = Worker()
        with contained(setting.other):
            assert isinstance(worker.submit(setting.ask), RunEnded)
        worker.close()
    assert setting.server.requests == ()


def test_a_block_around_an_item_from_a_queue_counts_more_than_the_thread() -> None:
    def ask() -> Any:
        with contained(setting.other):
            return setting.ask()

    with two_runs() as setting, contained(setting.starter):
        worker = Worker()
        assert isinstance(worker.submit(ask), str)
        worker.close()
    assert setting.paid == (0, CALL_USD)


def test_work_from_a_queue_of_a_thread_that_is_older_than_the_blocks_is_reported() -> None:
    with two_runs() as setting:
        worker = Worker()
        with (
            contained(setting.starter),
            contained(setting.other),
            pytest.warns(RuntimeWarning, match="belongs to no run"),
        ):
            assert isinstance(worker.submit(setting.ask), str)
        worker.close()
    assert setting.paid == (0, 0)
    assert (setting.starter.uncontained_requests, setting.other.uncontained_requests) == (1, 1)


def thread_in(context: contextvars.Context, work: Work) -> threading.Thread:
    """A thread that is given a context, which Python has from 3.14 on; before, a class that runs the same way."""
    if sys.version_info >= (3, 14):
        return threading.Thread(target=work, context=context)

    class InContext(threading.Thread):
        _context = context

        def _bootstrap_inner(self) -> None:
            context.run(super()._bootstrap_inner)  # type: ignore[misc]

    return InContext(target=work)


def test_a_thread_that_is_given_a_context_belongs_to_the_run_of_that_context() -> None:
    with two_runs() as setting:
        with contained(setting.other):
            context = contextvars.copy_context()
        with contained(setting.starter):
            thread = thread_in(context, setting.ask)
            thread.start()
            thread.join()
    assert setting.paid == (0, CALL_USD)
