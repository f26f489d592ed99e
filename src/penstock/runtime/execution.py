"""Execute calls: the one place that runs a function between admission and settlement.

    recorded     the call is recorded under the call that made it
    contained    cancelled? limits and the hold, at every level atomically; divergence; hooks; breaker
    executed     under its deadline, cancellable
    settled      its actual cost replaces its hold, at every level
    recorded     exactly one end

`admission.admit` is the first half, `settlement.succeed` and `fail` are the second; a function runs in between, and
only in this module: `run_sync` runs it in the caller's thread or on a worker, `run_async` in a task or on a worker that
a task waits for. Two callers do not use it:

- The scheduler inlines it in its loop, for the steps of a graph that have no options: calling `attempt_async` for each
  of them costs a tenth of a step. `tests/runtime/scheduling/test_inlined_steps.py` compares the two.
- A streamed HTTP exchange has no function to run: it holds with `hold_remote` or `ahold_remote`, and ends with `finish`
  or `finish_failed`.

A `Call` belongs to one caller. A concurrent end (a timeout, the end of the run) uses `abandon`, and the run's lock
decides which comes first: the first one ends the record. The other finds it ended, and only settles.

Calls made by an abandoned call are refused, and those it has already started end with it. A sync call made inside
another has its token, and so its deadline; on a loop, the interruption of the task has the same effect.

The run's lock is acquired twice in a call that succeeds: once for record and hold, once for settlement and record.
"""

from __future__ import annotations

import asyncio
from asyncio import current_task
from collections.abc import Awaitable, Callable
from contextlib import aclosing, closing
from functools import partial
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, NoReturn, Protocol

from penstock.clock import utc_from_ns
from penstock.containment.limits import UNLIMITED
from penstock.errors import CancelledError, InvalidValue
from penstock.runtime import remote_holds, worker
from penstock.runtime.admission import admit, await_room, wait_for_room
from penstock.runtime.billing.usage import WITHOUT_USAGE, retry_after_s
from penstock.runtime.call import RETRY, Call, CallSpec, Work, blank, interruption, running_call, stop_of
from penstock.runtime.cancellation import CancellationToken, drain_cancel, translate_cancel
from penstock.runtime.handle import Handle
from penstock.runtime.remote_holds import Shrink
from penstock.runtime.settlement import (
    abandon,
    end_failed,
    end_interrupted,
    fail,
    load_prices_for,
    settle_and_end,
    succeed,
)
from penstock.runtime.streams import STREAMS, first_pieces, turning
from penstock.runtime.waiting import Reclamp
from penstock.tracing.record import OPEN

ASYNC = (CoroutineType, AsyncGeneratorType)


class AttemptHooks(Protocol):
    """Callbacks of a caller that has its own retry policy."""

    def starting(self, call: Call) -> None:
        """Called in the task when the call is admitted, before its function runs; an error it raises fails the call."""

    def timed_out(self) -> Exception | None:
        """Return the error to fail with if the attempt's own time limit ended it; None if it did not."""

    def left_behind(self) -> None:
        """Called when the call ends while its function still runs on a worker."""

    def finished_late(self) -> None:
        """Called on the worker when that function has returned."""


# In the caller's thread.


def run_sync(context: Handle, spec: CallSpec, fn: Work, args: tuple[Any, ...] = (), retries: int = 0) -> Call:
    """Run `fn(*args)` as a recorded, contained call; retry up to `retries` times while it fails."""
    attempt = 1
    run = context._run
    if run.prices.is_pending:
        model = spec.model
        if model is None and spec.kind == "llm":
            model = run.worst_case["llm"].model
        if model is not None:
            run.prices.begin_load(model)
    shared = None if spec.kind == "system" else run.shared
    timeout_s = spec.timeout_s
    outer = context._token
    parent_call = running_call.get()
    if parent_call is not None and parent_call.context._token is outer and parent_call.record.end_seq == OPEN:
        outer = parent_call.token
    while True:
        token = outer if timeout_s is None else outer.child(spec.name, deadline_s=timeout_s)
        call = blank(Call)
        try:
            if (admit(call, context, spec, token, args, attempt, "sync") or wait_for_room(call)) and (
                shared is None or remote_holds.hold(shared, call)
            ):
                work = fn if call.degraded is None or spec.degraded is None else spec.degraded
                mode = run.settings.sync_calls
                call.began = True
                running_call.set(call)
                # On a worker if the caller may have to be released before the function has returned.
                if mode != "inline" and (
                    token.deadline_ns < UNLIMITED or run.external_token or mode == "thread" or worker.others_alive()
                ):
                    _execute_on_worker(call, work, args)
                else:
                    try:
                        value = work(*args) if args else work()  # unpacking an empty tuple takes time
                        if type(value) is GeneratorType:
                            value = _drain(call, value)
                    except BaseException as error:
                        fail(call, error)
                    else:
                        if type(value) in ASYNC:
                            _refuse_async(call, work, value)
                        succeed(call, value)
                running_call.set(parent_call)
                if shared is not None:
                    remote_holds.end(shared, call)
        except BaseException as error:
            if running_call.get() is call:
                running_call.set(parent_call)
            if shared is not None and getattr(call, "began", False):
                remote_holds.leave(shared, call)
            end_interrupted(call, error)
            raise
        if call.decision is not RETRY or attempt > retries:
            return call
        pause_s = retry_pause(call)
        if pause_s:
            outer.wait_sync(pause_s)
        attempt += 1


def _execute_on_worker(call: Call, fn: Work, args: tuple[Any, ...]) -> None:
    def work() -> Any:
        value = fn(*args)
        return _drain(call, value) if type(value) is GeneratorType else value

    def finish_late(value: Any, error: BaseException | None) -> None:
        if type(value) is CoroutineType:
            value.close()
        _finish_late(call, value, error)

    token = call.token
    job = worker.Job(work, finish_late, is_counted=True)
    remove = token.add_callback(job.wake)
    try:
        try:
            worker.start(job)
        except RuntimeError as error:  # no thread is available, or too many hang
            end_failed(call, error, never_ran=True)
            return
        finished = job.wait(token.seconds_left())
    except BaseException as error:
        abandon(call, interruption(error))
        if not job.leave():
            finish_late(job.value, job.error)
        raise
    finally:
        remove()
    if not finished:
        token.is_cancelled  # noqa: B018  notices the deadline
        abandon(call, stop_of(token))
    elif job.error is not None:
        fail(call, job.error)
    else:
        if type(job.value) in ASYNC:
            _refuse_async(call, fn, job.value)
        succeed(call, job.value)


def _refuse_async(call: Call, fn: Work, value: Any) -> NoReturn:
    """Refuse the coroutine or async generator that a sync call returned: nothing in a sync call can await it."""
    if type(value) is CoroutineType:
        value.close()
    misuse = InvalidValue("fn", fn, "a sync function; await allm, atool, acall_… or awrap_… for an async one")
    call.error = misuse
    settle_and_end(call, "fail", None, True, str(misuse), misuse)
    if call.context._run.breaker is not None:
        call.context._run.breaker.record_abandoned(call.permit)
    raise misuse


def _finish_late(call: Call, value: Any, error: BaseException | None) -> None:
    """Settle a call whose caller has left: only the bill matters now."""
    try:
        succeed(call, value) if error is None else fail(call, error)
    except BaseException as raised:
        if raised is not error:
            raise
    finally:
        _leave_remote(call)


# In a task.


async def run_async(
    context: Handle,
    spec: CallSpec,
    fn: Work,
    args: tuple[Any, ...] = (),
    retries: int = 0,
    *,
    on_worker: bool = False,
    unless: Callable[[], bool] | None = None,
    shrink: Shrink | None = None,
    reclamp: Reclamp | None = None,
) -> Call:
    """Await `fn(*args)` as a recorded, contained call; retry up to `retries` times while it fails.

    With `on_worker` the function is a sync one, and a worker runs it. `unless` is called after a failure and returns
    whether the call must not be repeated, for example because a part of its value was already delivered. When a shared
    budget refuses the call, `shrink` returns the amounts with which it can proceed; `reclamp` does so when others spend
    what it waits for.
    """
    attempt = 1
    while True:
        call = await attempt_async(context, spec, fn, args, attempt, on_worker, shrink, None, reclamp)
        if call.decision is not RETRY or attempt > retries or (unless is not None and unless()):
            return call
        pause_s = retry_pause(call)
        if pause_s:
            await pause(context._token, pause_s)
        attempt += 1


async def attempt_async(
    context: Handle,
    spec: CallSpec,
    fn: Work,
    args: tuple[Any, ...] = (),
    attempt: int = 1,
    on_worker: bool = False,
    shrink: Shrink | None = None,
    hooks: AttemptHooks | None = None,
    reclamp: Reclamp | None = None,
) -> Call:
    """Await `fn(*args)` as a recorded, contained call, once.

    Admission and execution are one coroutine, because every coroutine between a caller and its function costs time in
    each call. An Exception of the function is stored in the call; any other error is raised.
    """
    run = context._run
    prices = run.prices
    if run.demands_price and prices.is_pending and spec.kind == "llm" and spec.hold_nanos is None:
        await load_prices(context, spec.model or run.worst_case["llm"].model)
    token = context._token if spec.timeout_s is None else context._token.child(spec.name, deadline_s=spec.timeout_s)
    call = blank(Call)
    try:
        if not (admit(call, context, spec, token, args, attempt, "async", reclamp) or await await_room(call)):
            return call
        shared = run.shared
        if shared is not None and spec.kind != "system" and not await remote_holds.ahold(shared, call, shrink):
            return call
        if call.degraded is not None and spec.degraded is not None:
            fn = spec.degraded
        task = current_task()
        assert task is not None
        requested = task.cancelling()
        watching = token.watch(task)
        previous = running_call.set(call)
        job: worker.LoopJob | None = None
        try:
            call.began = True
            if hooks is not None:
                hooks.starting(call)
            if token.cancellation is not None:
                raise CancelledError(stop=token.stop)
            if on_worker:
                # A caller with hooks refuses coroutines itself, or has them awaited here.
                work = (lambda: fn(*args)) if hooks is not None else (lambda: _without_coroutine(fn(*args)))
                late = partial(_end_late, call, hooks=hooks)
                job = worker.LoopJob(work, late, is_counted=True)
                value = await job.result()
            else:
                value = fn(*args) if args else fn()
            if type(value) is CoroutineType or hasattr(type(value), "__await__"):
                value = await value
            if type(value) in STREAMS and hooks is None and not on_worker:  # a caller with hooks drains it itself
                value = await _adrain(call, value)
            if prices.is_pending and (type(value) not in WITHOUT_USAGE or call.usage is not None):
                await load_prices_for(call, value)
        except BaseException as error:
            cause = translate_cancel(token, task, error, requested)
            is_left = job is not None and job.leave()
            if job is not None and not is_left and type(job.value) is CoroutineType:
                job.value.close()  # the stop came between the function's return and the await of what it returned
            try:
                if isinstance(cause, worker.TooManyAbandoned):
                    end_failed(call, cause, never_ran=True)
                elif is_left:
                    _leave_behind(call, cause, hooks)
                elif hooks is None or not _settle_timeout(call, hooks):
                    fail(call, cause)
            except BaseException:
                _leave_remote(call)
                raise
        else:
            if hooks is None or not _settle_timeout(call, hooks):
                succeed(call, value)
        finally:
            try:  # noqa: SIM105  in every call; a context manager costs more than all of this
                running_call.reset(previous)
            except ValueError:
                # An unfinished coroutine is closed from another context, where there is nothing to reset.
                pass
            if spec.timeout_s is not None:
                token.close()
            if watching and token.unwatch(task) is not None:
                await drain_cancel(task, requested)
        if shared is not None and spec.kind != "system":
            await remote_holds.aend(shared, call)
    except BaseException as error:
        if running_call.get() is call:
            running_call.set(call.parent_call)
        end_interrupted(call, error)
        raise
    return call


def _settle_timeout(call: Call, hooks: AttemptHooks) -> bool:
    """Fail the call if the attempt's own time limit ended it; return whether it did."""
    timeout = hooks.timed_out()
    if timeout is not None:
        end_failed(call, timeout)
    return timeout is not None


def _leave_behind(call: Call, error: BaseException, hooks: AttemptHooks | None) -> None:
    """End the call without its function, which still runs on a worker."""
    if hooks is not None:
        hooks.left_behind()
    ours = isinstance(error, CancelledError)
    by_token = ours or (hooks is not None and hooks.timed_out() is not None)
    abandon(call, stop_of(call.token) if by_token else interruption(error))
    call.error = error
    if not ours:
        raise error


def _end_late(call: Call, value: Any, error: BaseException | None, hooks: AttemptHooks | None) -> None:
    if type(value) is CoroutineType:
        value.close()
    try:
        _finish_late(call, value, error)
    finally:
        if hooks is not None:
            hooks.finished_late()


def _without_coroutine(value: Any) -> Any:
    """Return the value; a coroutine is refused, because nothing on a worker can await it."""
    if type(value) is CoroutineType:
        value.close()
        raise InvalidValue(
            "fn", value, "an async function if it is to be awaited (async def, not one that returns one)"
        )
    return value


# Streams.


def collect_into(call: Call, pieces: list[Any]) -> None:
    """Let `pieces`, which the stream of `call` appends to, be kept if the call is stopped."""
    call.stream = partial(first_pieces, pieces, call.context._run.settings.max_kept_pieces)


def _drain(call: Call, stream: GeneratorType[Any, Any, Any]) -> list[Any]:
    """Return the pieces of a generator as the value of its call; raise CancelledError when the call is stopped."""
    pieces: list[Any] = []
    collect_into(call, pieces)
    token, record = call.token, call.record
    with closing(stream):
        for piece in stream:
            pieces.append(piece)
            token.check()
            if record.end_seq != OPEN:  # the caller was interrupted and has abandoned this thread
                raise CancelledError(stop=call.stop)
    return pieces


async def _adrain(call: Call, stream: GeneratorType[Any, Any, Any] | AsyncGeneratorType[Any, Any]) -> list[Any]:
    """Drain a generator on an event loop, yielding to the loop after each piece of a sync generator."""
    coming = turning(stream) if isinstance(stream, GeneratorType) else stream
    pieces: list[Any] = []
    collect_into(call, pieces)
    token = call.token
    async with aclosing(coming):
        async for piece in coming:
            pieces.append(piece)
            token.check()
    return pieces


# Without a function.


def record_value(context: Handle, spec: CallSpec, value: Any) -> Call:
    """Admit a call whose value is already known, and settle it."""
    call = blank(Call)
    try:
        if admit(call, context, spec, context._token):
            succeed(call, value)
    except BaseException as error:
        end_interrupted(call, error)
        raise
    return call


def hold_remote(call: Call) -> bool:
    """Hold at the shared budget, if there is one; return False if it refuses the call."""
    shared = call.context._run.shared
    return shared is None or remote_holds.hold(shared, call)


async def ahold_remote(call: Call) -> bool:
    """Hold at the shared budget, if there is one; return False if it refuses the call."""
    shared = call.context._run.shared
    return shared is None or await remote_holds.ahold(shared, call)


def finish(call: Call) -> None:
    """Settle an exchange that is complete, with the usage it reported; from any thread."""
    succeed(call, None)
    _leave_remote(call)


def finish_failed(call: Call, error: BaseException) -> None:
    """Settle an exchange that failed or was stopped; from any thread."""
    try:
        fail(call, error)
    finally:
        _leave_remote(call)


def _leave_remote(call: Call) -> None:
    shared = call.context._run.shared
    if shared is not None:
        remote_holds.leave(shared, call)


# Waiting.


async def load_prices(context: Handle, model: str | None) -> None:
    """Load the price table, off the event loop, if looking up `model` would load it; a cancel ends the wait."""
    prices = context._run.prices
    if prices.must_load_for(model):
        await _wait(context._token, prices.aload)


async def pause(token: CancellationToken, seconds: float) -> None:
    """Sleep on the loop's clock; a cancel of the token ends the sleep."""
    await _wait(token, lambda: asyncio.sleep(seconds))


async def _wait(token: CancellationToken, work: Callable[[], Awaitable[None]]) -> None:
    """Await `work`; a cancel of the token ends the wait, and is left to the next check of the token."""
    task = current_task()
    assert task is not None
    requested = task.cancelling()
    watching = token.watch(task)
    try:
        if token.cancellation is None:
            await work()
    except asyncio.CancelledError as error:
        if translate_cancel(token, task, error, requested) is error:
            raise
    finally:
        if watching and token.unwatch(task) is not None:
            await drain_cancel(task, requested)


def retry_pause(call: Call) -> float:
    """Return the provider's requested pause before the next attempt in seconds; 0 if there is none."""
    run = call.context._run
    return retry_after_s(call.error, utc_from_ns(run.clock.time_ns())) or 0.0 if call.error else 0.0
