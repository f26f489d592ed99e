"""Threads and the work of pools belong to the scope in which they were started.

Context variables do not follow a thread or an item of a pool, so a program that fans out would silently leave its
scope. A request belongs to a run according to the place it is made in:

- in a `threading.Thread`, a `Timer`, or a subclass: the run of the code that called `start()`, for the thread's life
- in an item of a `ThreadPoolExecutor` (`submit`, `map`, `run_in_executor`, `asyncio.to_thread`): that of the code that
  submits it
- in the initializer of a `ThreadPoolExecutor`: that of the code that makes the pool
- in a callback of a `concurrent.futures.Future`, which the thread that finishes the item calls: that of the code that
  adds it
- in an item of a `multiprocessing.pool.ThreadPool`, which joblib's threads are (`apply`, `map`, `starmap`, `imap`, and
  their callbacks): that of the code that submits it
- in code that a thread runs in a context of its own (worker threads of anyio and asgiref, `copy_context().run`,
  `Thread(context=…)`): that of this context, which may have another scope than the thread, or none
- in a thread that takes work from a queue: the run of the code that started the thread, not that of the code that put
  the work there
- in a thread of `_thread.start_new_thread`, or one that is older than the block: none, and it is reported
- in an item of an `InterpreterPoolExecutor` (Python 3.14): none, as in another process; the item is not changed,
  because anything sent to another interpreter has to be shareable
- in another process: none. Work started with `multiprocessing`, or submitted to a pool of processes, is noted on the
  run, so that its `explain()` does not look complete

A pool's own threads have no scope before and after an item, even if the item was what started them. An item submitted
outside of any scope has none inside.

The origin of an item in a queue cannot be seen. A thread that takes it belongs to the run that started the thread:
while that run is open it pays, and once it has ended, the requests are refused, even if another run is open by then. So
work may be charged to the wrong run, but never to none. The alternative, giving such threads no scope, would let every
worker loop of a program spend without a limit and only report it; and a worker loop cannot be recognised either. A
program that shares such a thread between runs puts `contextvars.copy_context()` into the queue with each item and runs
the item with it.

Only the open scopes, the running call and the entered contexts are taken along. Copying the whole context would change
the program's own state: its variables, its decimal precision and its tracing spans would suddenly be those of the code
that started the thread.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from penstock.providers.current import NO_SCOPE, Captured, captured, note_work_elsewhere
from penstock.providers.hooks import Method, Patch

_END = object()


def _start(original: Method) -> Method:
    def start(thread: Any) -> None:
        scope = captured()
        # Since Python 3.14 a thread may be created with a context, which then determines its scope.
        if scope is None or getattr(thread, "_context", None) is not None:
            original(thread)
            return
        run = thread.run
        try:
            thread.run = _in_scope(scope, thread, run)  # on the instance: a subclass may have a `run` of its own
        except AttributeError:  # its class does not allow it: its requests are reported
            original(thread)
            return
        try:
            original(thread)
        except BaseException:  # it did not start now, and may be started again from elsewhere
            thread.run = run
            raise

    return start


def _in_scope(scope: Captured, thread: Any, run: Method) -> Method:
    def run_in_scope() -> None:
        vars(thread).pop("run", None)  # or the thread would refer to itself
        scope.enter()
        run()

    return run_in_scope


def _submit(original: Method) -> Method:
    def submit(pool: Any, function: Method, /, *args: Any, **kwargs: Any) -> Any:
        scope = captured()
        if scope is None:
            return original(pool, function, *args, **kwargs)
        item: tuple[Any, ...] = (scope.run, function)
        if _runs_elsewhere(pool):
            note_work_elsewhere()
            item = (function,)
        # Without a scope: a thread that the pool starts now will also run items of other callers.
        return NO_SCOPE.run(original, pool, *item, *args, **kwargs)

    return submit


def _init_executor(original: Method) -> Method:
    def __init__(
        pool: Any,
        max_workers: int | None = None,
        thread_name_prefix: str = "",
        initializer: Method | None = None,
        *args: Any,
        **options: Any,
    ) -> None:
        scope = captured()
        if scope is not None and callable(initializer) and not _runs_elsewhere(pool):
            initializer = _within(scope, initializer)
        original(pool, max_workers, thread_name_prefix, initializer, *args, **options)

    return __init__


def _add_done_callback(original: Method) -> Method:
    def add_done_callback(future: Any, fn: Method) -> None:
        scope = captured()
        original(future, fn if scope is None else partial(scope.run, fn))

    return add_done_callback


def _runs_elsewhere(pool: Any) -> bool:
    """Whether the items of the pool run in another interpreter."""
    interpreters = sys.modules.get("concurrent.futures.interpreter")
    return interpreters is not None and isinstance(pool, interpreters.InterpreterPoolExecutor)


# Pools of multiprocessing: those of threads, and not those of processes.


def _init(original: Method) -> Method:
    def __init__(
        pool: Any, processes: int | None = None, initializer: Method | None = None, *args: Any, **kwargs: Any
    ) -> None:
        scope = _scope_for(pool)
        if scope is None:
            original(pool, processes, initializer, *args, **kwargs)
        else:  # without a scope: its threads will also run items of other callers
            NO_SCOPE.run(original, pool, processes, _within(scope, initializer), *args, **kwargs)

    return __init__


def _apply_async(original: Method) -> Method:
    def apply_async(
        pool: Any,
        func: Method,
        args: Iterable[Any] = (),
        kwds: Mapping[str, Any] = MappingProxyType({}),
        callback: Method | None = None,
        error_callback: Method | None = None,
    ) -> Any:
        scope = _scope_for(pool)
        if scope is None:
            return original(pool, func, args, kwds, callback, error_callback)
        callbacks = _within(scope, callback), _within(scope, error_callback)
        return original(pool, scope.run, (func, *args), kwds, *callbacks)

    return apply_async


def _map_async(original: Method) -> Method:
    def _map_async(
        pool: Any,
        func: Method,
        iterable: Any,
        mapper: Method,
        chunksize: int | None = None,
        callback: Method | None = None,
        error_callback: Method | None = None,
    ) -> Any:
        scope = _scope_for(pool)
        if scope is not None:
            func = partial(scope.run, func)
            callback, error_callback = _within(scope, callback), _within(scope, error_callback)
        return original(pool, func, iterable, mapper, chunksize, callback, error_callback)

    return _map_async


def _imap(original: Method) -> Method:
    def imap(pool: Any, func: Method, iterable: Iterable[Any], chunksize: int = 1) -> Any:
        scope = _scope_for(pool)
        if scope is None:
            return original(pool, func, iterable, chunksize)
        return original(pool, partial(scope.run, func), _iterated(scope, iterable), chunksize)

    return imap


def _scope_for(pool: Any) -> Captured | None:
    """Return the scope of an item that is submitted here; None outside of any, and for processes."""
    if isinstance(pool, sys.modules["multiprocessing.pool"].ThreadPool):
        return captured()
    note_work_elsewhere()
    return None


def _within(scope: Captured, callback: Method | None) -> Method | None:
    return None if callback is None else partial(scope.run, callback)


def _iterated(scope: Captured, iterable: Iterable[Any]) -> Iterator[Any]:
    """Iterate in the scope: a pool takes the arguments of `imap` one by one, in a thread of its own."""
    items = scope.run(iter, iterable)
    while (item := scope.run(next, items, _END)) is not _END:
        yield item


# Processes: a copy of a run limits nothing there, so the run records that there were some.


def _noted(original: Method) -> Method:
    def start_or_submit(*args: Any, **options: Any) -> Any:
        note_work_elsewhere()
        return original(*args, **options)

    return start_or_submit


THREADS = (
    Patch("threading", "Thread", "start", _start),
    Patch("concurrent.futures.thread", "ThreadPoolExecutor", "__init__", _init_executor),
    Patch("concurrent.futures.thread", "ThreadPoolExecutor", "submit", _submit),
    Patch("concurrent.futures", "Future", "add_done_callback", _add_done_callback),
    Patch("multiprocessing.pool", "Pool", "__init__", _init),
    Patch("multiprocessing.pool", "Pool", "apply_async", _apply_async),
    Patch("multiprocessing.pool", "Pool", "_map_async", _map_async),
    Patch("multiprocessing.pool", "Pool", "imap", _imap),
    Patch("multiprocessing.pool", "Pool", "imap_unordered", _imap),
    Patch("multiprocessing.process", "BaseProcess", "start", _noted),
    Patch("concurrent.futures.process", "ProcessPoolExecutor", "submit", _noted),
)
