"""Hold amounts for calls at a budget that several processes share, and report there how each call ended.

A store request is made outside the run's lock: inline if the store can answer without waiting, otherwise by a task of
the caller's loop or, for a caller that blocks, on a worker. A caller that is stopped during a request does not wait for
it: the task or the worker receives the answer and gives back what was taken, because the call never ran.

A call that only the holds of others keep out waits at the store. Its hold in the run's own ledger is withdrawn
meanwhile, and taken again, with all checks, once the store has admitted it. A cancel or a deadline ends the wait.
"""

from __future__ import annotations

import _thread
import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any

from penstock.containment import accounts
from penstock.containment.ledger import Amounts, LedgerStore, WouldBlock
from penstock.containment.limits import seconds_to_ns
from penstock.containment.safety import Decision, SafetyEvent
from penstock.containment.tickets import Waiting
from penstock.containment.waiting import Waiter
from penstock.errors import CancelledError, LedgerError
from penstock.runtime import worker
from penstock.runtime.admission import refuse
from penstock.runtime.call import Call, interruption, running_call, stop_of
from penstock.runtime.cancellation import drain_cancel, translate_cancel
from penstock.runtime.durable.async_ledger import blocking, ignore
from penstock.runtime.durable.shared import SharedBudget, key_of, note_end
from penstock.runtime.run import Run
from penstock.runtime.waiting import ON_A_LOOP, holds_above, record_wait
from penstock.stops import Stop, StopReason
from penstock.tracing.record import OPEN, Source, mark_waiting

Shrink = Callable[[Stop], "tuple[int | None, int] | None"]
"""Return the smaller cost and tokens with which a refused call can proceed; None if less would not help. The cost is
None if it is not known."""


def bind(shared: SharedBudget, run: Run, source: Source) -> None:
    """Record failures to report to the shared budget as safety events of the run."""

    def record_fault(message: str) -> None:
        event = SafetyEvent(
            event_type=str(StopReason.LEDGER_UNAVAILABLE),
            decision=Decision.ALLOW,
            reason=message,
            hook="SharedBudget",
            request_id=run.metadata.request_id,
            ts=run.wall_time(),
            metadata=run.about(None) | {"budget": shared.account, "waiting": shared.waiting},
        )
        run.record_safety(event, source, None)

    shared.on_fault = record_fault


Answer = Stop | Waiting | None
"""A store's answer to a call: refused, not yet, or held."""
Ask = Callable[[], Coroutine[Any, Any, Answer]]
"""One request to a store."""


class _Left(Exception):
    """The caller was stopped while its call waited."""

    def __init__(self, stop: Stop) -> None:
        super().__init__(stop.message)
        self.stop = stop


class _HoldRequest(ABC):
    """One call's hold request to the store; a subclass knows how its caller waits."""

    __slots__ = ("_ends_ns", "call", "job", "key", "may_wait", "shared", "shrink", "under")

    def __init__(self, shared: SharedBudget, call: Call, shrink: Shrink | None, may_wait: bool) -> None:
        self.shared = shared
        self.call = call
        self.shrink = shrink
        self.may_wait = may_wait
        self.key = key_of(shared, call)
        self.under = _key_above(shared.store, running_call.get() if call.parent_call is None else call.parent_call)
        """The key of the call that made this one."""
        self.job: worker.Job | None = None
        """The request that a worker or a task makes now."""
        self._ends_ns: int | None = None
        """When the call stops waiting, on the run's clock; None until it has to wait."""

    @abstractmethod
    async def answer(self, ask: Ask) -> Answer:
        """Return the store's answer; the caller may be stopped before it comes."""

    @abstractmethod
    async def pause(self, seconds: float) -> None:
        """Wait until `wake` or a cancel, or so long."""

    @abstractmethod
    def wake(self) -> None:
        """End a pause; called on any thread."""

    async def ask(self) -> Answer:
        call = self.call
        return await self.shared.take(
            self.key,
            self._amounts(),
            call.attempt > 1,
            self._shrunk,
            max_wait_s=(self.seconds_to_wait() or None) if self.may_wait else None,
            under=self.under,
            is_unhinted=not call.hinted and call.record.kind == "llm",
        )

    async def renew(self) -> Answer:
        try:
            return await self.shared.renew(self.key)
        except LedgerError:  # the ticket has expired: this process was held up for longer than its lease
            return await self.ask()

    def seconds_to_wait(self) -> float:
        """Return how long the call may still wait: as long as the run's settings allow, and until its deadline."""
        run, left_s = self.call.context._run, self.call.token.seconds_left()
        if self._ends_ns is None:
            self._ends_ns = run.now() + seconds_to_ns(run.settings.max_wait_s, "max_wait_s")
        longest_s = max(0, self._ends_ns - run.now()) / 1e9
        return longest_s if left_s is None else min(left_s, longest_s)

    def _amounts(self) -> Amounts:
        call = self.call
        return Amounts(call._held_cost, call._held_tokens, 0, call._held_api_calls)

    def _shrunk(self, stop: Stop) -> Amounts | None:
        """Shrink the call's hold to what it can proceed with after a refusal, and return that; None if it cannot."""
        smaller = None if self.shrink is None else self.shrink(stop)
        if smaller is None:
            return None
        call, (cost, tokens) = self.call, smaller
        with call.context._run.lock:
            most = call._held_cost, call._held_tokens
            wanted = most[0] if cost is None else min(cost, most[0]), min(tokens, most[1])
            if call.state != "held" or wanted == most:  # the caller has left meanwhile, or the refusal is final
                return None
            accounts.shrink(call, *wanted)
        return self._amounts()

    def give_back(self, answer: object = None, error: BaseException | None = None) -> None:
        """Withdraw the hold, or give the ticket back, when the store answers after the caller has left."""
        self.shared.give_back(self.key)
        self.shared.flush_soon()

    def is_admitted(self, answer: Answer) -> bool:
        """Return whether the final answer admits the call; otherwise refuse the call."""
        if answer is None:
            return True
        assert isinstance(answer, Stop), "a call that waits has no answer yet"
        if answer.momentary and not self.may_wait:
            answer = replace(answer, message=f"{answer.message}{ON_A_LOOP}")
        _refuse(self.call, answer)
        return False

    def inline(self, ask: Ask) -> Answer:
        """Return the store's answer; WouldBlock if the caller would have to wait for it."""
        try:
            return self.shared.try_inline(ask)
        except WouldBlock:
            raise
        except BaseException as error:
            self.left(interruption(error))
            raise

    def left(self, stop: Stop) -> None:
        """Refuse the call whose caller was stopped; a request under way gives back what it takes."""
        job, self.job = self.job, None
        if job is None or not job.leave():
            self.give_back()
        if self.call.stop is None:
            _reject(self.call, stop)


def _key_above(store: LedgerStore, above: Call | None) -> str | None:
    """Return the key of the nearest of this call and those around it that holds something at the store.

    The call may be of another run than the one that it makes a call of.
    """
    while above is not None:
        shared = above.context._run.shared
        if shared is not None and shared.store is store and shared.is_open(key := key_of(shared, above)):
            return key
        above = above.parent_call
    return None


# Waiting. A call that waits holds nothing: neither here nor at the store.


class _OwnRoom(Waiter):
    """A call that the store has admitted, and that waits for room in the run's own ledger."""

    __slots__ = ("is_decided", "notify")

    def __init__(self, call: Call, notify: Callable[[], None]) -> None:
        amounts = call._held_cost, call._held_tokens, call._held_api_calls
        run, above = call.context._run, holds_above(call)
        super().__init__(call, call.context._account, *amounts, call.attempt > 1, run=run, above=above)
        self.is_decided = False
        self.notify = notify

    def was_taken(self) -> bool:
        return self.taken.state == "held"

    def wake(self) -> None:
        self.is_decided = True
        self.notify()


async def _wait(request: _HoldRequest) -> Answer:
    """Wait at the store, and return the final answer.

    If the run's own ledger has no room any more when the store admits the
    call, the store's hold is given back, and the call waits for both again. A call that may do with less asks the store
    again when it is refused after all.
    """
    call, shared = request.call, request.shared
    answer: Answer = None
    remove = shared.store.on_change(request.key, request.wake)
    own: _OwnRoom | None = None
    since_ns: int | None = None
    try:
        while True:
            _wait_began(call)
            # The first renewal comes without a pause: the ticket may have changed before `on_change`.
            while isinstance(answer := await request.answer(request.renew), Waiting):
                if since_ns is None:
                    since_ns = _show_wait(call, answer.stop)
                if not request.seconds_to_wait():
                    return _waited_too_long(request, answer.stop)
                await request.pause(min(shared.store.poll_s, request.seconds_to_wait()))
                _check_running(call)
            if isinstance(answer, Stop) and request.shrink is None:
                return answer
            own = _wait_ended(call, request.wake)
            if own.is_decided and own.stop is None and answer is None:
                return None
            if answer is None:  # there is no room here any more: what the store holds is of no use meanwhile
                request.give_back()
            while not own.is_decided:
                if not request.seconds_to_wait():
                    stop = accounts.refusal(own.account, own.cost, own.tokens, own.api_calls, call.context._run.now())
                    return _waited_too_long(request, stop)
                await request.pause(request.seconds_to_wait())
                _check_running(call)
            if own.stop is not None:
                return own.stop
            if not isinstance(answer := await request.answer(request.ask), Waiting):
                return answer
    finally:
        remove()
        if since_ns is not None:
            _show_end_of_wait(call, since_ns)
        if own is not None and not own.is_decided:
            _leave_own_room(call, own)
        shared.flush_soon()  # others may wait for what this call gives back


def _wait_began(call: Call) -> None:
    """Give back what the call holds in the run's own ledger, for as long as it waits at the store."""
    run = call.context._run
    with run.lock:
        if call.state == "held":
            accounts.withdraw(call)
            if run.room.queues:
                run.room.changed(run.now())


def _show_wait(call: Call, stop: Stop) -> int:
    """Record that the call waits; return since when."""
    run = call.context._run
    now_ns = run.now()
    with run.lock:
        mark_waiting(call.record, True)
        record_wait(call, stop, now_ns)
    return now_ns


def _show_end_of_wait(call: Call, since_ns: int) -> None:
    run, record = call.context._run, call.record
    with run.lock:
        mark_waiting(record, False)
        record.metadata = {**(record.metadata or {}), "waited_ms": (run.now() - since_ns) // 1_000_000}


def _wait_ended(call: Call, wake: Callable[[], None]) -> _OwnRoom:
    """Hold in the run's own ledger what the call held there before it waited, now or as soon as there is room."""
    _check_running(call)
    run, own = call.context._run, _OwnRoom(call, wake)
    with run.lock:
        run.room.join(own)
        run.room.changed(run.now())
    return own


def _leave_own_room(call: Call, own: _OwnRoom) -> None:
    run = call.context._run
    with run.lock:
        if run.room.leave(own):
            run.room.changed(run.now())


def _check_running(call: Call) -> None:
    """Raise _Left if the call was cancelled, or has ended with its run."""
    if call.token.is_cancelled:
        raise _Left(stop_of(call.token))
    if call.record.end_seq != OPEN:
        raise _Left(call.stop or Stop(StopReason.ABORTED, "the run ended while the call waited"))


def _waited_too_long(request: _HoldRequest, stop: Stop) -> Stop:
    """Return the stop of a call whose wait is over; _Left if its deadline has passed."""
    request.give_back()
    token = request.call.token
    if token.is_cancelled:
        raise _Left(stop_of(token))
    waited_s = request.call.context._run.settings.max_wait_s
    return replace(stop, message=f"{stop.message}; waited {waited_s:g} s for other calls to end")


class _BlockingRequest(_HoldRequest):
    """A request whose caller blocks its thread."""

    __slots__ = ("_woken",)

    def __init__(self, shared: SharedBudget, call: Call) -> None:
        # Not on the thread of an event loop, which may have to run the calls that it would wait for.
        super().__init__(shared, call, None, may_wait=asyncio._get_running_loop() is None)
        self._woken = _thread.allocate_lock()
        self._woken.acquire()

    def wake(self) -> None:
        with suppress(RuntimeError):  # it is awake already
            self._woken.release()

    async def pause(self, seconds: float) -> None:
        self._woken.acquire(timeout=seconds)

    async def answer(self, ask: Ask) -> Answer:
        """Return the store's answer; _Left if the caller is stopped before it comes."""
        try:
            return self.inline(ask)
        except WouldBlock:
            pass
        token = self.call.token
        self.job = job = worker.Job(lambda: blocking(ask()), self.give_back)
        remove = token.add_callback(job.wake)
        try:
            worker.start(job)
            finished = job.wait(token.seconds_left())
        except RuntimeError as error:  # no thread is available
            self.job = None
            return self.shared.unavailable(error)
        finally:
            remove()
        if not finished:
            token.is_cancelled  # noqa: B018  notices the deadline
            raise _Left(stop_of(token))
        if job.error is not None:
            raise job.error
        self.job = None
        answer: Answer = job.value
        return answer


def hold(shared: SharedBudget, call: Call) -> bool:
    """Hold at the store what the call holds locally; if the store refuses, refuse the call and return False.

    A call that only the holds of others keep out waits for them, but not on the thread of an event loop.
    """
    request, remove = _BlockingRequest(shared, call), None
    try:
        answer = blocking(request.answer(request.ask))
        if isinstance(answer, Waiting):
            remove = call.token.add_callback(request.wake)
            answer = blocking(_wait(request))
    except _Left as stopped:
        request.left(stopped.stop)
        return False
    except BaseException as error:
        request.left(interruption(error))
        raise
    finally:
        if remove is not None:
            remove()
    return request.is_admitted(answer)


class _TaskRequest(_HoldRequest):
    """A request that a task waits for."""

    __slots__ = ("_loop", "_woken")

    def __init__(self, shared: SharedBudget, call: Call, shrink: Shrink | None) -> None:
        super().__init__(shared, call, shrink, may_wait=True)
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()

    def wake(self) -> None:
        with suppress(RuntimeError):  # the loop is closed, so no task waits
            self._loop.call_soon_threadsafe(self._woken.set)

    async def pause(self, seconds: float) -> None:
        timer = self._loop.call_later(seconds, self._woken.set)
        try:
            await self._woken.wait()
        finally:
            timer.cancel()
        self._woken.clear()

    async def answer(self, ask: Ask) -> Answer:
        try:
            return self.inline(ask)
        except WouldBlock:
            return await self.answer_later(ask)

    async def answer_later(self, ask: Ask) -> Answer:
        """Return the store's answer, which something else waits for as well."""
        self.job = job = self.shared.ledger.job(ask, self.give_back)
        answer: Answer = await job.result()
        self.job = None
        return answer


async def ahold(shared: SharedBudget, call: Call, shrink: Shrink | None = None) -> bool:
    """Hold at the store what the call holds locally; if the store refuses, refuse the call and return False.

    A call that only the holds of others keep out waits for them. If the store refuses it for good, `shrink` returns the
    smaller amounts with which the call can proceed.
    """
    request, token = _TaskRequest(shared, call, shrink), call.token
    answer: Answer = None
    is_answered = True
    try:
        answer = request.inline(request.ask)
    except WouldBlock:
        is_answered = False
    if is_answered and not isinstance(answer, Waiting):
        return request.is_admitted(answer)
    task = asyncio.current_task()
    assert task is not None
    requested = task.cancelling()
    watching = token.watch(task)
    try:
        token.check()
        if not is_answered:
            answer = await request.answer_later(request.ask)
        if isinstance(answer, Waiting):
            answer = await _wait(request)
        request.is_admitted(answer)
    except RuntimeError as error:  # no thread is available
        request.give_back()
        _refuse(call, shared.unavailable(error))
    except _Left as stopped:
        request.left(stopped.stop)
    except BaseException as error:
        cause = translate_cancel(token, task, error, requested)
        ours = isinstance(cause, CancelledError)
        request.left(stop_of(token) if ours else interruption(cause))
        if not ours:
            raise
    finally:
        if watching and token.unwatch(task) is not None:
            await drain_cancel(task, requested)
    return call.stop is None


def _reject(call: Call, stop: Stop, hook: str = "ExecutionContext") -> None:
    """Refuse the call although every other check had admitted it."""
    refuse(call, stop, hook=hook)
    if (breaker := call.context._run.breaker) is not None:
        breaker.record_abandoned(call.permit)


def _refuse(call: Call, stop: Stop) -> None:
    _reject(call, stop, "SharedBudget")


def leave(shared: SharedBudget, call: Call) -> None:
    """Report the end of the call to the store on a worker, without waiting for it."""
    note_end(shared, call)
    shared.flush_soon()


def end(shared: SharedBudget, call: Call) -> None:
    """Report the end of the call to the store, and wait for that unless the call is stopped."""
    note_end(shared, call)
    if not shared.waiting:
        return
    try:
        shared.try_inline(shared.aflush)  # whatever cannot be recorded now is reported with the next act
        return
    except WouldBlock:
        pass
    job = worker.Job(shared.flush, ignore)
    remove = call.token.add_callback(job.wake)
    try:
        worker.start(job)
        job.wait(call.token.seconds_left())
    except RuntimeError:  # no thread is available: the next act reports it
        return
    finally:
        remove()


async def aend(shared: SharedBudget, call: Call) -> None:
    """Report the end of the call to the store, and wait for that unless the call is stopped."""
    note_end(shared, call)
    if not shared.waiting:
        return
    try:
        shared.try_inline(shared.aflush)  # whatever cannot be recorded now is reported with the next act
        return
    except WouldBlock:
        pass
    job = shared.ledger.job(shared.aflush, ignore)
    remove = call.token.add_callback(job.wake)
    try:
        await job.result()
    except RuntimeError:  # no thread is available: the next act reports it
        return
    finally:
        remove()
