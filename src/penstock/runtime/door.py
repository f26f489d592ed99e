"""The door: the one way in for everything that runs.

    recorded     the call is written down under the call that made it
    contained    cancelled? limits and the hold, at every level in one act; divergence; hooks; breaker
    executed     under its deadline, cancellable
    settled      what it really cost replaces what it held, at every level
    recorded     exactly one end

`enter` is the first half, `succeed` and `fail` are the second; `call` and `acall` stand between them and differ only
in how they wait. All four work on a `Call`, which belongs to one caller. What may happen at the same time from
elsewhere (a timeout, the end of the run) goes through `abandon`, and the run's lock decides who comes first: whoever
ends the record. The other one finds it ended, and only settles.

What a call that was cut off still asks for is refused, and what it has begun ends with it. A sync call made inside
another one has the token of that one, and so its deadline; on a loop, the interruption of the task does the same.

The run's lock is taken twice in a call that succeeds: once for record and hold, once for settlement and record.
"""

from __future__ import annotations

import asyncio
from asyncio import current_task
from collections.abc import Callable, Coroutine
from types import CoroutineType
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.clock import utc_from_ns
from penstock.containment.limits import UNLIMITED
from penstock.errors import CancelledError, InvalidValue
from penstock.runtime import worker
from penstock.runtime.admission import enter
from penstock.runtime.billing.usage import retry_after_s
from penstock.runtime.call import RETRY, Call, interruption, running_call, stop_of
from penstock.runtime.cancellation import CancellationToken, absorb, taken_back
from penstock.runtime.durable import holding
from penstock.runtime.settlement import abandon, end_failed, fail, settle_and_end, succeed
from penstock.tracing.lifecycle import CallKind
from penstock.tracing.record import OPEN

if TYPE_CHECKING:
    from penstock.runtime.durable.holding import Less
    from penstock.runtime.durable.shared import SharedBudget
    from penstock.runtime.handle import Handle

Work = Callable[..., Any]


def call(
    context: Handle,
    kind: CallKind,
    fn: Work,
    args: tuple[Any, ...],
    name: str,
    hint: int | None,
    model: str | None,
    timeout_s: float | None,
    retries: int,
    degraded: Work | None,
    tokens: int | None = None,
) -> Call:
    """Run `fn(*args)` as one recorded, contained call; again, if it fails and may be retried.

    `hint` and `tokens` are the most it can cost, in nano-dollars, and use; None where that is not known.
    """
    attempt = 1
    shared = context._run.shared
    around = context._token
    above = running_call.get()
    if above is not None and above.context._token is around and above.record.end_seq == OPEN:
        around = above.token
    while True:
        token = around if timeout_s is None else around.child(name, deadline_s=timeout_s)
        made = enter(context, kind, name, hint, model, token, args, attempt, None, tokens)
        if made.stop is None:
            work = fn if made.degraded is None or degraded is None else degraded
            if shared is None or kind == "system":
                _execute(made, work, args)
            else:
                _execute_shared(shared, made, work, args)
        if made.decision is not RETRY or attempt > retries:
            return made
        pause_s = retry_pause(made)
        if pause_s:
            around.wait_sync(pause_s)
        attempt += 1


def _execute_shared(shared: SharedBudget, made: Call, fn: Work, args: tuple[Any, ...]) -> None:
    """Execute it if a budget that other processes share has room as well."""
    if not holding.hold(shared, made):
        return
    try:
        _execute(made, fn, args)
    except BaseException:
        holding.leave(shared, made)
        raise
    holding.end(shared, made)


def _execute(made: Call, fn: Work, args: tuple[Any, ...]) -> None:
    run = made.context._run
    mode = run.settings.sync_calls
    previous = running_call.set(made)
    try:
        # The caller may have to get free before the function has returned.
        if mode == "thread" or (
            mode == "auto" and (made.token.deadline_ns < UNLIMITED or run.external_token or worker.others_alive())
        ):
            _execute_on_worker(made, fn, args)
        else:
            try:
                value = fn(*args) if args else fn()  # most have none, and unpacking nothing takes time as well
            except BaseException as error:
                fail(made, error)
            else:
                if type(value) is CoroutineType:
                    _refuse_coroutine(made, fn, value)
                succeed(made, value)
    finally:
        running_call.reset(previous)


def _refuse_coroutine(made: Call, fn: Work, value: CoroutineType[Any, Any, Any]) -> NoReturn:
    """A coroutine is no value, and nobody in a sync call could await it."""
    value.close()
    misuse = InvalidValue("fn", fn, "a sync function; await allm, atool, acall_… or awrap_… for an async one")
    made.error = misuse
    settle_and_end(made, "fail", None, True, str(misuse), misuse)
    if made.context._run.breaker is not None:
        made.context._run.breaker.record_abandoned(made.permit)
    raise misuse


def _execute_on_worker(made: Call, fn: Work, args: tuple[Any, ...]) -> None:
    def finish_late(value: Any, error: BaseException | None) -> None:
        # Nobody is there to be told: only the bill matters now.
        if type(value) is CoroutineType:
            value.close()
        try:
            succeed(made, value) if error is None else fail(made, error)
        except BaseException as raised:
            if raised is not error:
                raise
        finally:
            if (shared := made.context._run.shared) is not None:
                holding.leave(shared, made)

    token = made.token
    job = worker.Job(lambda: fn(*args), finish_late)
    remove = token.add_callback(job.wake)
    try:
        try:
            worker.start(job)
        except RuntimeError as error:  # no thread is to be had
            end_failed(made, error, never_ran=True)
            return
        finished = job.wait(token.seconds_left())
    except BaseException as error:
        abandon(made, interruption(error))
        if not job.leave():
            finish_late(job.value, job.error)
        raise
    finally:
        remove()
    if not finished:
        token.is_cancelled  # noqa: B018  notices the deadline
        abandon(made, stop_of(token))
    elif job.error is not None:
        fail(made, job.error)
    else:
        if type(job.value) is CoroutineType:
            _refuse_coroutine(made, fn, job.value)
        succeed(made, job.value)


def acall(
    context: Handle,
    kind: CallKind,
    fn: Work,
    args: tuple[Any, ...],
    name: str,
    hint: int | None,
    model: str | None,
    timeout_s: float | None,
    retries: int,
    degraded: Work | None,
    tokens: int | None = None,
    unless: Callable[[], bool] | None = None,
    less: Less | None = None,
) -> Coroutine[Any, Any, Call]:
    """Await `fn(*args)` as one recorded, contained call; again, if it fails and may be retried.

    `unless` is asked after a failure whether this one may not, such as because somebody has a part of its value. `less`
    is asked, when a shared budget refuses the call, how much it can do with.
    """
    # Every coroutine between the caller and the function costs time in each call: without retries there is one.
    if not retries:
        return attempt(context, kind, fn, args, name, hint, model, timeout_s, degraded, 1, tokens, less)
    return _attempts(context, kind, fn, args, name, hint, model, timeout_s, degraded, retries, tokens, unless, less)


async def _attempts(
    context: Handle,
    kind: CallKind,
    fn: Work,
    args: tuple[Any, ...],
    name: str,
    hint: int | None,
    model: str | None,
    timeout_s: float | None,
    degraded: Work | None,
    retries: int,
    tokens: int | None,
    unless: Callable[[], bool] | None,
    less: Less | None,
) -> Call:
    number = 1
    while True:
        made = await attempt(context, kind, fn, args, name, hint, model, timeout_s, degraded, number, tokens, less)
        if made.decision is not RETRY or number > retries or (unless is not None and unless()):
            return made
        pause_s = retry_pause(made)
        if pause_s:
            await pause(context._token, pause_s)
        number += 1


async def attempt(
    context: Handle,
    kind: CallKind,
    fn: Work,
    args: tuple[Any, ...],
    name: str,
    hint: int | None,
    model: str | None,
    timeout_s: float | None,
    degraded: Work | None,
    number: int = 1,
    tokens: int | None = None,
    less: Less | None = None,
) -> Call:
    """Await `fn(*args)` as one recorded, contained call, once; `number` says which attempt it is."""
    token = context._token if timeout_s is None else context._token.child(name, deadline_s=timeout_s)
    made = enter(context, kind, name, hint, model, token, args, number, None, tokens)
    if made.stop is not None:
        return made
    shared = context._run.shared
    if shared is not None and kind != "system" and not await holding.ahold(shared, made, less):
        return made
    if made.degraded is not None and degraded is not None:
        fn = degraded
    task = current_task()
    assert task is not None
    requested = task.cancelling()
    watching = token.watch(task)
    previous = running_call.set(made)
    try:
        if token.cancellation is not None:
            raise CancelledError(stop=token.stop)
        value = fn(*args) if args else fn()
        if type(value) is CoroutineType or hasattr(type(value), "__await__"):
            value = await value
    except BaseException as error:
        try:
            fail(made, taken_back(token, task, error, requested))
        except BaseException:
            if shared is not None:
                holding.leave(shared, made)
            raise
    else:
        succeed(made, value)
    finally:
        try:  # noqa: SIM105  in every call; a context manager costs more than all of this
            running_call.reset(previous)
        except ValueError:
            # A coroutine that nobody finishes is closed from elsewhere, where there is nothing to reset.
            pass
        if timeout_s is not None:
            token.close()
        if watching and token.unwatch(task) is not None:
            await absorb(task, requested)
    if shared is not None:
        await holding.aend(shared, made)
    return made


async def pause(token: CancellationToken, seconds: float) -> None:
    """Sleep on the loop's clock; a cancel of the token ends the sleep."""
    task = current_task()
    assert task is not None
    requested = task.cancelling()
    watching = token.watch(task)
    try:
        if token.cancellation is None:
            await asyncio.sleep(seconds)
    except asyncio.CancelledError as error:
        if taken_back(token, task, error, requested) is error:
            raise
    finally:
        if watching and token.unwatch(task) is not None:
            await absorb(task, requested)


def retry_pause(made: Call) -> float:
    """How long the provider asked us to wait before the next attempt; 0 if it did not."""
    run = made.context._run
    return retry_after_s(made.error, utc_from_ns(run.clock.time_ns())) or 0.0 if made.error else 0.0
