"""A contained request in flight: how its caller waits, how a stop reaches it, and how it ends.

A sync request waits on a worker: a stop releases the caller at once, and the socket is shut down, which ends the
worker's wait. An async request is interrupted where it waits. Knows exchanges, and nothing of HTTP libraries.
"""

from __future__ import annotations

import _thread
import socket
from asyncio import _get_running_loop, current_task
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, NoReturn

from penstock.errors import CancelledError, PenstockError
from penstock.providers.http.exchange import Exchange
from penstock.providers.reading.families import in_the_families
from penstock.runtime import worker
from penstock.runtime.call import stop_of
from penstock.runtime.cancellation import CancellationToken, drain_cancel, translate_cancel


def waited(
    exchange: Exchange,
    work: Callable[[], Any],
    late: Callable[[Any, BaseException | None], None],
    leave: Callable[[], None],
) -> Any:
    """Return the result of `work`; a stop releases the caller at once, and `late` receives the late result."""
    token = exchange.token
    if exchange.blocks_inline:
        token.check()
        return work()
    job = worker.Job(work, late)
    remove = token.add_callback(job.wake)
    try:
        worker.start(job)
        finished = job.wait(token.seconds_left())
    except BaseException:
        if job.leave():
            leave()
        else:
            late(job.value, job.error)
        raise
    finally:
        remove()
    if not finished:
        token.is_cancelled  # noqa: B018  reading it applies the deadline
        leave()
        raise CancelledError(stop=stop_of(token))
    if job.error is not None:
        raise job.error
    return job.value


def check_loop() -> None:
    """Raise if the caller is on no event loop of asyncio: nothing could stop its request."""
    if _get_running_loop() is None:
        what = "an async model request is contained on event loops of asyncio alone, and not on those of trio"
        raise in_the_families(PenstockError(f"{what}: make it with a sync client in a thread"))


async def reached(token: CancellationToken, work: Callable[[], Awaitable[Any]]) -> Any:
    """Await `work` and return its result; a stop of the call interrupts it."""
    task = current_task()
    assert task is not None
    requested = task.cancelling()
    watching = token.watch(task)
    try:
        token.check()
        return await work()
    except BaseException as error:
        failure = translate_cancel(token, task, error, requested)
        if failure is error:
            raise
        raise failure from error
    finally:
        if watching and token.unwatch(task) is not None:
            await drain_cancel(task, requested)


def fail(exchange: Exchange, error: BaseException) -> NoReturn:
    """Settle a failed exchange, and raise the error that its caller gets."""
    failure = exchange.failed(error)
    if failure is error:
        raise error
    raise failure from error


def abandon(exchange: Exchange) -> None:
    """Settle an exchange whose response is closed or dropped, also in a finalizer.

    The garbage collector may run a finalizer in the middle of a change of the run's accounts, in the same thread: the
    settlement then waits for the lock in a thread of its own.
    """
    if exchange.call.context._run.lock._is_owned():  # type: ignore[attr-defined]
        _thread.start_new_thread(exchange.closed, ())
    else:
        exchange.closed()


def shut_down(wire: Any) -> None:
    """Break a connection, from any thread: a thread that waits for it wakes up."""
    if wire is not None:
        with suppress(OSError):
            wire.shutdown(socket.SHUT_RDWR)
