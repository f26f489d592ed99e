"""Running a node that asks for more than being run: a policy, a budget of its own, a thread, its turn.

Retries stand outside the door: every attempt, every fallback and every skip is a call in the tree, and every failure
draws on the run's one retry budget. Cancels and exceeded budgets pass through: they are never tried again, skipped or
replaced. The time limit of an attempt is the exception, because it is the policy's own: running out of it is a failure
like any other.
"""

from __future__ import annotations

import random
from asyncio import current_task
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from penstock.containment import accounts
from penstock.containment.limits import Budget
from penstock.errors import CancelledError, DeadlockError, InvalidValue, StepTimeout
from penstock.policies import ErrorPolicy
from penstock.runtime import worker
from penstock.runtime.admission import enter
from penstock.runtime.call import RETRY, Call, interruption, running_call, stop_of
from penstock.runtime.cancellation import CancellationToken, absorb, taken_back
from penstock.runtime.context import ExecutionContext
from penstock.runtime.door import pause, retry_pause
from penstock.runtime.scheduling.exclusive import Holder, Turn
from penstock.runtime.settlement import abandon, end_failed, fail, succeed, told_by
from penstock.tracing.record import OPEN

if TYPE_CHECKING:
    from penstock.runtime.scheduling.scheduler import Scheduler, Work

PLAINLY = ErrorPolicy()

_holder: ContextVar[Holder | None] = ContextVar("penstock_holder", default=None)
"""The step whose turn at a persistent node this is part of."""


@dataclass(frozen=True, slots=True)
class Care:
    """What one node asks for beyond being run."""

    policy: ErrorPolicy = PLAINLY
    sub_budget: Budget | None = None
    on_thread: bool = False
    turn: Turn | None = None
    """Of a node that only one may use at a time."""
    turn_timeout_s: float = 30.0
    fallback: Care | None = None
    """What the node that stands in asks for, under the same policy."""
    chance: Callable[[], float] = random.random
    """Where the jitter of retries comes from."""


async def run_with_care(graph: Scheduler, node: int, care: Care) -> Any:
    """The node's value, or what stands in for it; or raise what kept it from having one."""
    if care.sub_budget is None:
        return await _recover(graph, node, care, graph.place)
    place = graph.place.with_sub_budget(care.sub_budget, graph.names[node])
    try:
        return await _recover(graph, node, care, place)
    finally:
        place._token.close()
        _pass_on_abort(place._token, graph.place._token)


async def _recover(graph: Scheduler, node: int, care: Care, place: ExecutionContext) -> Any:
    policy, about = care.policy, graph.about[node]
    attempt = 1
    while True:
        made = await _attempt(graph, node, care, place, graph.work, about, attempt)
        if made.stop is None and made.error is None:
            return made.value
        if made.stop is not None or made.decision is not RETRY:
            break
        if attempt > policy.retry_count:
            return await _stand_in(graph, node, care, place, made, attempt)
        await pause(place._token, max(policy.delay_s(attempt, care.chance()), retry_pause(made)))
        attempt += 1
    raise graph.failure_of(made)


async def _stand_in(graph: Scheduler, node: int, care: Care, place: ExecutionContext, made: Call, attempt: int) -> Any:
    """What the policy gives when the attempts are used up."""
    policy, error = care.policy, made.error
    assert error is not None
    about = graph.about[node] or {}
    why = f"{type(error).__name__}: {told_by(error)}"
    if policy.on_error == "skip":
        _record_stand_in(graph, node, place, {**about, "skip": why})
        return policy.fallback_value
    if policy.on_error != "fallback":
        raise error
    if policy.fallback_node is None:
        _record_stand_in(graph, node, place, {**about, "fallback": "value", "instead_of": why})
        return policy.fallback_value
    assert graph.fallback is not None
    named = getattr(policy.fallback_node, "id", "node")
    about = {**about, "fallback": str(named), "instead_of": why}
    other = await _attempt(graph, node, care.fallback or care, place, graph.fallback, about, attempt + 1)
    if other.stop is not None or other.error is not None:
        raise graph.failure_of(other)
    return other.value


async def _attempt(
    graph: Scheduler,
    node: int,
    care: Care,
    place: ExecutionContext,
    work: Work,
    about: Mapping[str, Any] | None,
    attempt: int,
) -> Call:
    """One attempt; in its turn, if only one may use the node at a time. Between attempts, others have theirs."""
    if care.turn is None:
        return await _attempt_now(graph, node, care, place, work, about, attempt, None)
    use = _Use(care.turn, Holder(f"step {graph.names[node]!r} of graph {graph.name!r}", _holder.get()))
    try:
        await care.turn.take(use.holder, place._token, care.turn_timeout_s)
    except (DeadlockError, CancelledError) as error:
        return _never_began(graph, node, place, about, attempt, error)
    outside = _holder.set(use.holder)
    try:
        return await _attempt_now(graph, node, care, place, work, about, attempt, use)
    finally:
        with suppress(ValueError):  # closed from elsewhere, where there is nothing to reset
            _holder.reset(outside)
        if not use.goes_on:
            use.end()


class _Use:
    """One attempt's use of a persistent node."""

    __slots__ = ("goes_on", "holder", "turn")

    def __init__(self, turn: Turn, holder: Holder) -> None:
        self.turn = turn
        self.holder = holder
        self.goes_on = False
        """Whether the function was left behind on its thread: then the turn ends when the function does."""

    def end(self) -> None:
        """The next in line may have it."""
        self.turn.give_back(self.holder)


async def _attempt_now(
    graph: Scheduler,
    node: int,
    care: Care,
    place: ExecutionContext,
    work: Work,
    about: Mapping[str, Any] | None,
    attempt: int,
    use: _Use | None,
) -> Call:
    name, above = graph.names[node], place._token
    token = above
    if care.policy.timeout_ms is not None:
        token = above.child(name, deadline_s=care.policy.timeout_ms / 1_000)
        place = place._under(token)
    made = enter(place, "system", name, graph.hint, None, token, (), attempt, about)
    if made.stop is not None:
        graph.log(made)
        if _is_its_own(token, above):  # so little time that it was over before it began
            _fail_after_all(made, _timeout(graph, node, care))
        return made
    graph.tell_started(node)
    task = current_task()
    assert task is not None
    requested = task.cancelling()
    watching = token.watch(task)
    outside = running_call.set(made)
    job: worker.LoopJob | None = None
    try:
        if graph.durable is not None:
            graph.durable.begin(node, attempt)
        if care.on_thread:
            job = worker.LoopJob(
                lambda: _plain(work(node, place)), lambda value, error: _end_late(made, use, value, error)
            )
            value = await job.result()
        else:
            value = work(node, place)
            if type(value) is CoroutineType or hasattr(type(value), "__await__"):
                value = await value
    except BaseException as error:
        told = taken_back(token, task, error, requested)
        if job is not None and job.leave():
            if use is not None:
                use.goes_on = True
            _leave_behind(made, token, above, told)
        elif _is_its_own(token, above):
            end_failed(made, _timeout(graph, node, care))
        else:
            fail(made, told)
    else:
        if _is_its_own(token, above):
            end_failed(made, _timeout(graph, node, care))
        else:
            succeed(made, value)
    finally:
        with suppress(ValueError):  # closed from elsewhere, where there is nothing to reset
            running_call.reset(outside)
        if token is not above:
            token.close()
        pending = token.unwatch(task) if watching else None
        if pending is not None:
            await absorb(task, requested)
        graph.log(made)
        _pass_on_abort(token, above)
    if job is not None and _is_its_own(token, above):
        _fail_after_all(made, _timeout(graph, node, care))
    return made


def _plain(value: Any) -> Any:
    if type(value) is CoroutineType:
        value.close()
        raise InvalidValue("blocking", True, "left out for an async function")
    return value


def _is_its_own(token: CancellationToken, above: CancellationToken) -> bool:
    """Whether it is the attempt's own time limit that ended it, and nothing above."""
    return token is not above and token.is_cancelled and token.cause == "deadline"


def _timeout(graph: Scheduler, node: int, care: Care) -> StepTimeout:
    return StepTimeout(graph.names[node], care.policy.timeout_ms or 0)


def _leave_behind(made: Call, token: CancellationToken, above: CancellationToken, error: BaseException) -> None:
    """The function still runs on its thread: the call ends without it."""
    ours = isinstance(error, CancelledError)
    abandon(made, stop_of(token) if ours or _is_its_own(token, above) else interruption(error))
    made.error = error
    if not ours:
        raise error


def _fail_after_all(made: Call, error: StepTimeout) -> None:
    """An attempt that its own time limit ended before its function was done may be made again."""
    if made.stop is None:
        return
    with made.context._run.lock:
        drawn = accounts.draw_retry(made.context._account)
    if drawn:  # otherwise the time limit stands as what stopped it
        made.stop, made.error, made.decision = None, error, RETRY


def _end_late(made: Call, use: _Use | None, value: Any, error: BaseException | None) -> None:
    """The function is done after its caller has left: only the bill and the turn matter now."""
    try:
        with suppress(BaseException if error is None else type(error)):
            succeed(made, value) if error is None else fail(made, error)
    finally:
        if use is not None:
            use.end()


def _pass_on_abort(token: CancellationToken, above: CancellationToken) -> None:
    """Time is a step's own; whatever else cancels its context, such as an abort from inside, is meant for the graph."""
    cancelled = token.cancellation
    if token is not above and cancelled is not None and cancelled.cause not in ("deadline", "parent"):
        above.cancel(cause=cancelled.cause, stop=cancelled.stop)


def _never_began(
    graph: Scheduler,
    node: int,
    place: ExecutionContext,
    about: Mapping[str, Any] | None,
    attempt: int,
    error: BaseException,
) -> Call:
    """An attempt that failed before it could begin."""
    made = enter(place, "system", graph.names[node], graph.hint, None, place._token, (), attempt, about)
    if made.stop is None:
        graph.tell_started(node)
        fail(made, error)
    graph.log(made)
    return made


def _record_stand_in(graph: Scheduler, node: int, place: ExecutionContext, about: Mapping[str, Any]) -> None:
    """Write down what was given in place of a value."""
    run, now_ns = place._run, place._run.now()
    with run.lock:
        parent = place._here()
        while parent.end_seq != OPEN and parent.parent is not None:
            parent = parent.parent
        if run.graph.closed:
            return
        record = run.graph.begin(parent, "system", graph.names[node], None, place._source, now_ns, True, about)
        run.graph.end(record, now_ns, "success")
    graph.log_record(record)
