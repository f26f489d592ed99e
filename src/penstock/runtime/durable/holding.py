"""Calls at a budget that several processes share: how the door holds there, and tells there how a call ended.

Stores block, so that they are asked on a worker, outside the run's lock; unless they can answer at once. A caller who
is stopped while the store is asked does not wait for it: the worker learns the answer, and what was taken is given
back, for the call never ran.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.containment import accounts
from penstock.containment.ledger import Amounts, WouldWait
from penstock.containment.safety import Decision, SafetyEvent
from penstock.errors import CancelledError
from penstock.runtime import worker
from penstock.runtime.admission import refuse
from penstock.runtime.call import Call, interruption, stop_of
from penstock.runtime.cancellation import absorb, taken_back
from penstock.runtime.durable.shared import SharedBudget, ignore
from penstock.stops import Stop, StopReason
from penstock.tracing.record import OPEN, CallRecord, Source

Less = Callable[[Stop], "tuple[int | None, int] | None"]
"""What a call that was refused so can do with, as cost and tokens; None if less would not help. The cost is None if it
is not known."""

if TYPE_CHECKING:
    from penstock.runtime.run import Run


def bind(shared: SharedBudget, run: Run, source: Source) -> None:
    """Let the run know what its shared budget could not be told."""

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


class _Asking:
    """One call's question to the store."""

    __slots__ = ("call", "key", "less", "shared")

    def __init__(self, shared: SharedBudget, call: Call, less: Less | None = None) -> None:
        self.shared = shared
        self.call = call
        self.less = less
        self.key = _key(shared, call)

    def ask(self) -> Stop | None:
        return self.shared.take(self.key, self._amounts(), self.call.attempt > 1, self._ask_less)

    def _amounts(self) -> Amounts:
        call = self.call
        return Amounts(call._held_cost, call._held_tokens, 0, call._held_api_calls)

    def _ask_less(self, stop: Stop) -> Amounts | None:
        """What the call can do with instead of what was refused, and holds from now on here; None if it cannot."""
        less = None if self.less is None else self.less(stop)
        if less is None:
            return None
        call, (cost, tokens) = self.call, less
        with call.context._run.lock:
            most = call._held_cost, call._held_tokens
            wanted = most[0] if cost is None else min(cost, most[0]), min(tokens, most[1])
            if call.state != "held" or wanted == most:  # whoever asked has left meanwhile; or it is refused for good
                return None
            accounts.shrink(call, *wanted)
        return self._amounts()

    def give_back(self, answer: object, error: BaseException | None) -> None:
        """The store has answered after the caller had left."""
        self.shared.withdrawn(self.key)
        self.shared.catch_up_soon()

    def answered(self, stop: Stop | None) -> bool:
        if stop is not None:
            _refuse(self.call, stop)
        return stop is None

    def at_once(self) -> bool | None:
        """Whether the store lets it through; None if whoever asks would have to wait for that."""
        try:
            return self.answered(self.shared.at_once(self.ask))
        except WouldWait:
            return None
        except BaseException as error:
            _turn_away(self.call, interruption(error))
            raise

    def left(self, job: worker.Job, stop: Stop) -> None:
        if not job.leave():
            self.give_back(job.value, job.error)
        _turn_away(self.call, stop)


def hold(shared: SharedBudget, call: Call) -> bool:
    """Hold at the store what the call holds here; False if it was refused there, and so it is here."""
    asking, token = _Asking(shared, call), call.token
    if (said := asking.at_once()) is not None:
        return said
    job = worker.Job(asking.ask, asking.give_back)
    remove = token.add_callback(job.wake)
    try:
        worker.start(job)
        finished = job.wait(token.seconds_left())
    except RuntimeError as error:  # no thread is to be had
        _refuse(call, shared.unavailable(error))
        return False
    except BaseException as error:
        asking.left(job, interruption(error))
        raise
    finally:
        remove()
    if not finished:
        token.is_cancelled  # noqa: B018  notices the deadline
        _turn_away(call, stop_of(token))
    elif job.error is not None:
        asking.left(job, interruption(job.error))
        raise job.error
    else:
        asking.answered(job.value)
    return call.stop is None


async def ahold(shared: SharedBudget, call: Call, less: Less | None = None) -> bool:
    """Hold at the store what the call holds here; False if it was refused there, and so it is here.

    A call that can do with less is asked, when the store refuses it, with how much.
    """
    asking, token = _Asking(shared, call, less), call.token
    if (said := asking.at_once()) is not None:
        return said
    task = asyncio.current_task()
    assert task is not None
    requested = task.cancelling()
    watching = token.watch(task)
    job = worker.LoopJob(asking.ask, asking.give_back)
    try:
        token.check()
        asking.answered(await job.result())
    except RuntimeError as error:  # no thread is to be had
        _refuse(call, shared.unavailable(error))
    except BaseException as error:
        told = taken_back(token, task, error, requested)
        ours = isinstance(told, CancelledError)
        asking.left(job, stop_of(token) if ours else interruption(told))
        if not ours:
            raise
    finally:
        if watching and token.unwatch(task) is not None:
            await absorb(task, requested)
    return call.stop is None


def _turn_away(call: Call, stop: Stop, hook: str = "ExecutionContext") -> None:
    """The call does not run, though everybody else had let it through."""
    refuse(call, stop, hook=hook)
    if (breaker := call.context._run.breaker) is not None:
        breaker.record_abandoned(call.permit)


def _refuse(call: Call, stop: Stop) -> None:
    _turn_away(call, stop, "SharedBudget")


def note_end(shared: SharedBudget, call: Call) -> None:
    """Write down for the store what has become of the call, from what has become of it here.

    The bill of a call whose record had ended before is told by `note_late_bill`, for the record does not know it.
    """
    record = call.record
    key = _key(shared, call)
    if not shared.is_open(key):
        return
    if record.retries:
        shared.retry_drawn(key)
    if call.state == "settled":
        if record.end_seq == OPEN or record.abandoned or record.settled is not None:
            return
        shared.settled(key, _billed(record), record.status == "success")
    elif call.state == "released":
        shared.released(key)
    elif call.state == "withdrawn":
        shared.withdrawn(key)
    elif call.state == "unresolved":
        shared.unresolved(key)


def note_unknown(shared: SharedBudget, call: Call) -> None:
    """Write down for the store whether nobody can tell what the call cost, before it is told how the call ended."""
    note = shared.unknown if call.unknown else shared.known
    note(_key(shared, call))


def note_late_bill(shared: SharedBudget, call: Call, cost: int, tokens_in: int, tokens_out: int) -> None:
    """Write down for the store what a call has cost whose record had ended before."""
    key = _key(shared, call)
    actual = Amounts(cost, tokens_in, tokens_out)
    if shared.is_open(key):
        if call.state == "released":
            shared.released(key)
        else:
            shared.settled(key, actual, False)
    elif cost or tokens_in or tokens_out:
        shared.charged(f"{key}/bill", actual)
    shared.catch_up_soon()


def note_charge(
    shared: SharedBudget, record: CallRecord, cost: int, tokens_in: int, tokens_out: int, api_calls: int = 0
) -> None:
    """Write down for the store what was spent where nothing is held there; what is replayed was paid for then."""
    if not (record.metadata or {}).get("replayed"):
        shared.charged(shared.key(record.node_id), Amounts(cost, tokens_in, tokens_out, api_calls))
        shared.catch_up_soon()


def leave(shared: SharedBudget, call: Call) -> None:
    """The call is over, and whoever made it does not wait: a worker tells the store."""
    note_end(shared, call)
    shared.catch_up_soon()


def end(shared: SharedBudget, call: Call) -> None:
    """The call is over: tell the store, and wait for that unless the call is stopped."""
    note_end(shared, call)
    if not shared.waiting:
        return
    try:
        shared.at_once(shared.catch_up)  # what it cannot record now, the next act tells it
        return
    except WouldWait:
        pass
    job = worker.Job(shared.catch_up, ignore)
    remove = call.token.add_callback(job.wake)
    try:
        worker.start(job)
        job.wait(call.token.seconds_left())
    except RuntimeError:  # no thread is to be had: the next act tells it
        return
    finally:
        remove()


async def aend(shared: SharedBudget, call: Call) -> None:
    """The call is over: tell the store, and wait for that unless the call is stopped."""
    note_end(shared, call)
    if not shared.waiting:
        return
    try:
        shared.at_once(shared.catch_up)  # what it cannot record now, the next act tells it
        return
    except WouldWait:
        pass
    job = worker.LoopJob(shared.catch_up, ignore)
    remove = call.token.add_callback(job.wake)
    try:
        await job.result()
    except RuntimeError:  # no thread is to be had: the next act tells it
        return
    finally:
        remove()


def _key(shared: SharedBudget, call: Call) -> str:
    return shared.key(call.record.node_id, unpriced=call.is_unpriced)


def _billed(record: CallRecord) -> Amounts:
    return Amounts(record.cost, record.tokens_in or 0, record.tokens_out or 0)
