"""A sync function as a contained call that a task waits for.

The function runs on a worker. If the call is cut off (its time is up, the run is cancelled), the task is free at once
and the function is left behind: it finishes on its own, its late value is discarded, and its bill is settled.
"""

from __future__ import annotations

from asyncio import current_task
from collections.abc import Callable
from contextlib import suppress
from types import CoroutineType
from typing import Any

from penstock.errors import CancelledError, InvalidValue
from penstock.runtime.admission import enter
from penstock.runtime.call import Call, interruption, running_call, stop_of
from penstock.runtime.cancellation import absorb, taken_back
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable import holding
from penstock.runtime.settlement import abandon, fail, succeed
from penstock.runtime.worker import LoopJob
from penstock.tracing.lifecycle import CallKind


async def call_on_worker(
    context: ExecutionContext,
    kind: CallKind,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    name: str,
    hint: int | None,
    timeout_s: float | None,
) -> Call:
    """Run `fn(*args)` on a worker as one recorded, contained call."""
    above = context._token
    token = above if timeout_s is None else above.child(name, deadline_s=timeout_s)
    made = enter(context, kind, name, hint, None, token, args)
    shared = context._run.shared
    if made.stop is not None or (shared is not None and not await holding.ahold(shared, made)):
        return made
    task = current_task()
    assert task is not None
    requested = task.cancelling()
    watching = token.watch(task)
    outside = running_call.set(made)
    job: LoopJob | None = None
    try:
        token.check()
        job = LoopJob(lambda: _plain(fn(*args)), lambda value, error: _end_late(made, value, error))
        value = await job.result()
    except BaseException as error:
        told = taken_back(token, task, error, requested)
        try:
            if job is not None and job.leave():
                _leave_behind(made, told)
            else:
                fail(made, told)
        except BaseException:
            if shared is not None:
                holding.leave(shared, made)
            raise
    else:
        succeed(made, value)
    finally:
        with suppress(ValueError):  # closed from elsewhere, where there is nothing to reset
            running_call.reset(outside)
        if token is not above:
            token.close()
        if watching and token.unwatch(task) is not None:
            await absorb(task, requested)
    if shared is not None:
        await holding.aend(shared, made)
    return made


def _plain(value: Any) -> Any:
    """The value; a coroutine is none, and nobody on the worker could await it."""
    if type(value) is CoroutineType:
        value.close()
        raise InvalidValue(
            "fn", value, "an async function if it is to be awaited (async def, not one that returns one)"
        )
    return value


def _leave_behind(made: Call, error: BaseException) -> None:
    ours = isinstance(error, CancelledError)
    abandon(made, stop_of(made.token) if ours else interruption(error))
    made.error = error
    if not ours:
        raise error


def _end_late(made: Call, value: Any, error: BaseException | None) -> None:
    """The function is done after its caller has left: only the bill matters now."""
    with suppress(BaseException if error is None else type(error)):
        succeed(made, value) if error is None else fail(made, error)
    if (shared := made.context._run.shared) is not None:
        holding.leave(shared, made)
