"""Threads and the work of executors belong to the scope in which they were started.

Context variables do not follow a `threading.Thread` or an item of a `ThreadPoolExecutor`, so a program that fans out
would leave its scope without a word. `Thread.start` takes the scope of the starter into the thread, for its whole life;
so does a `Timer`, and every subclass. `ThreadPoolExecutor.submit`, and with it `map` and `loop.run_in_executor`, takes
the scope into the one item: the thread of the pool has none before and after, even if the item was what started it.

Taken along are the open scopes, the running call and the entered contexts, and nothing else. Copying the whole context
would change what the program itself sees: its own variables, its decimal precision, its tracing spans would suddenly
be those of the code that started the thread.

A thread that was started with `_thread.start_new_thread`, and a pool of another library that was there before the
scope, have no scope; `uncontained` reports their requests.
"""

from __future__ import annotations

from typing import Any

from penstock.providers.current import NO_SCOPE, Captured, captured
from penstock.providers.hooks import Method, Patch


def _start(original: Method) -> Method:
    def start(thread: Any) -> None:
        scope = captured()
        if scope is None:
            original(thread)
            return
        run = thread.run
        try:
            thread.run = _in_scope(scope, thread, run)  # on the instance: a subclass may have a `run` of its own
        except AttributeError:  # it allows none: its requests are reported
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
        # Without a scope: a thread that the pool starts now will run the items of others too.
        return NO_SCOPE.run(original, pool, scope.run, function, *args, **kwargs)

    return submit


THREADS = (
    Patch("threading", "Thread", "start", _start),
    Patch("concurrent.futures.thread", "ThreadPoolExecutor", "submit", _submit),
)
