"""Run a node with options: an error policy, a sub-budget, a thread, exclusive use.

Each attempt is admitted by itself: every attempt, every fallback and every skip is a call in the tree, and every
failure draws on the run's retry budget. Cancels and exceeded budgets are never retried, skipped or replaced. The one
exception is the time limit of an attempt, because it belongs to the policy: exceeding it is an ordinary failure.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import CoroutineType
from typing import Any, Literal, Protocol

from penstock.containment import accounts
from penstock.containment.limits import Budget
from penstock.errors import CancelledError, DeadlockError, InvalidValue, StepTimeout
from penstock.policies import ErrorPolicy
from penstock.runtime.admission import admit
from penstock.runtime.call import RETRY, Call, CallSpec, blank
from penstock.runtime.cancellation import CancellationToken
from penstock.runtime.context import ExecutionContext
from penstock.runtime.execution import attempt_async, pause, retry_pause
from penstock.runtime.scheduling.exclusive import Holder, Turn
from penstock.runtime.scheduling.recording import RecordedNodes
from penstock.runtime.settlement import end_interrupted, error_text, fail
from penstock.tracing.record import OPEN, CallRecord
from penstock.tracing.redaction import Redaction

Work = Callable[[int, ExecutionContext], Any]
"""Run a node at a place; return its value, or an awaitable of it."""
NotifyRecovery = Callable[[Literal["retry", "recovered"], int, Mapping[str, Any]], None]
"""Called when the policy of a failed node retries it or replaces its value."""

DEFAULT_POLICY = ErrorPolicy()
MAX_MESSAGE = 500
"""Maximum length of an error message in a value or a record."""

_REDACTION = Redaction()

_holder: ContextVar[Holder | None] = ContextVar("penstock_holder", default=None)
"""The innermost step around this code that uses a node exclusively."""


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How to run one node."""

    policy: ErrorPolicy = DEFAULT_POLICY
    sub_budget: Budget | None = None
    on_thread: bool = False
    may_return_awaitable: bool = False
    """Whether the event loop awaits what the function returns on its thread; otherwise a coroutine is refused."""
    turn: Turn | None = None
    """For exclusive use of the node; None if steps may share it."""
    turn_timeout_s: float = 30.0
    fallback: StepOptions | None = None
    """Options of the fallback node, under the same policy."""
    is_graph: bool = False
    """Whether the node is a graph: its steps count against the sub-budget, the step that runs it does not."""
    stand_in: Callable[[Any], Any] | None = None
    """Converts the policy's replacement into a value of the node; None leaves it as it is."""
    chance: Callable[[], float] = random.random
    """Source of the jitter of retries."""


PLAIN = StepOptions()


class RunningGraph(Protocol):
    """The scheduler of a graph, as far as one of its nodes needs it."""

    name: str
    place: ExecutionContext
    calls: Sequence[CallSpec]
    work: Work
    fallback: Work | None
    notify_recovery: NotifyRecovery | None
    recorder: RecordedNodes | None

    @property
    def names(self) -> Sequence[str]:
        """The ids of its nodes, by number."""

    def notify_started(self, node: int) -> None:
        """Report that the node was admitted, unless that was reported before."""

    def failure_of(self, call: Call) -> BaseException:
        """The error to raise for a call without a value."""

    def log(self, call: Call) -> None:
        """Add the record of a node's call to the call log."""

    def log_record(self, record: CallRecord) -> None:
        """Add a record to the call log."""


async def run_with_options(graph: RunningGraph, node: int, options: StepOptions) -> Any:
    """Return the node's value or its replacement; raise the error if it has neither."""
    if options.sub_budget is None:
        return await _recover(graph, node, options, graph.place)
    place = graph.place.with_sub_budget(options.sub_budget, graph.names[node])
    _count_own_step(place, options)
    try:
        return await _recover(graph, node, options, place)
    finally:
        place._token.close()
        _pass_on_abort(place._token, graph.place._token)


def _count_own_step(place: ExecutionContext, options: StepOptions) -> None:
    with place._run.lock:
        accounts.count_own_step(place._account, counts=not options.is_graph)


async def _recover(graph: RunningGraph, node: int, options: StepOptions, place: ExecutionContext) -> Any:
    policy, spec, recorder = options.policy, graph.calls[node], graph.recorder
    stands_in = policy.on_error not in ("fail", "retry")
    attempt = 1
    if recorder is not None:
        # Attempts that failed before the run was resumed count: continue with the next one.
        failed, error = recorder.replay_failures(node, policy.retry_count + stands_in, place)
        if failed > policy.retry_count:
            return await _stand_in(graph, node, options, place, error, failed)
        if failed:
            await pause(place._token, policy.delay_s(failed, options.chance()))
            attempt += failed
    while True:
        call = await _attempt(graph, node, options, place, graph.work, spec, attempt)
        if call.stop is None and call.error is None:
            return call.value
        if call.stop is not None or call.decision is not RETRY or (attempt > policy.retry_count and not stands_in):
            raise graph.failure_of(call)
        assert call.error is not None
        error = error_as_value(call.error)
        if recorder is not None:
            await recorder.record_failure(node, attempt, error)
        if attempt > policy.retry_count:
            return await _stand_in(graph, node, options, place, error, attempt)
        delay_s = max(policy.delay_s(attempt, options.chance()), retry_pause(call))
        if graph.notify_recovery is not None:
            graph.notify_recovery("retry", node, {"attempt": attempt, "delay_s": round(delay_s, 3), **error})
        await pause(place._token, delay_s)
        attempt += 1


def error_as_value(error: BaseException) -> Mapping[str, Any]:
    """Return an error as JSON: its class, and its message with secrets redacted."""
    return {"error": type(error).__name__, "message": _REDACTION.text(error_text(error), MAX_MESSAGE)}


async def _stand_in(
    graph: RunningGraph,
    node: int,
    options: StepOptions,
    place: ExecutionContext,
    error: Mapping[str, Any],
    attempt: int,
) -> Any:
    """Return the policy's replacement when the attempts are used up; `error` is that of the last one."""
    policy = options.policy
    spec = graph.calls[node]
    about = spec.metadata or {}
    why = f"{error['error']}: {error['message']}"
    if policy.fallback_node is None:
        if graph.notify_recovery is not None:
            graph.notify_recovery("recovered", node, {"on_error": policy.on_error, **error})
        replaced = {"fallback": "value", "instead_of": why}
        marks: Mapping[str, str] = replaced if policy.on_error == "fallback" else {str(policy.on_error): why}
        _record_stand_in(graph, node, place, {**about, **marks})
        value = dict(error) if policy.on_error == "continue" else policy.fallback_value
        return value if options.stand_in is None else options.stand_in(value)
    assert graph.fallback is not None
    named = getattr(policy.fallback_node, "id", "node")
    spec = replace(spec, metadata={**about, "fallback": str(named), "instead_of": why})
    fallback = options.fallback or options
    if options.sub_budget is not None:
        _count_own_step(place, fallback)
    other = await _attempt(graph, node, fallback, place, graph.fallback, spec, attempt + 1)
    if other.stop is not None or other.error is not None:
        raise graph.failure_of(other)
    return other.value


async def _attempt(
    graph: RunningGraph,
    node: int,
    options: StepOptions,
    place: ExecutionContext,
    work: Work,
    spec: CallSpec,
    attempt: int,
) -> Call:
    """Make one attempt, with exclusive use if the node needs it; between attempts, other steps may use the node."""
    if options.turn is None:
        return await _attempt_now(graph, node, options, place, work, spec, attempt, None)
    use = _Use(options.turn, Holder(f"step {graph.names[node]!r} of graph {graph.name!r}", _holder.get()))
    try:
        await options.turn.take(use.holder, place._token, options.turn_timeout_s)
    except (DeadlockError, CancelledError) as error:
        return _never_began(graph, node, place, spec, attempt, error)
    outside = _holder.set(use.holder)
    try:
        return await _attempt_now(graph, node, options, place, work, spec, attempt, use)
    finally:
        with suppress(ValueError):  # closed from elsewhere, where there is nothing to reset
            _holder.reset(outside)
        if not use.is_left_running:
            use.end()


class _Use:
    """One attempt's exclusive use of a node."""

    __slots__ = ("holder", "is_left_running", "turn")

    def __init__(self, turn: Turn, holder: Holder) -> None:
        self.turn = turn
        self.holder = holder
        self.is_left_running = False
        """Whether the function was left running on its thread: the turn then ends when the function does."""

    def end(self) -> None:
        """Give the turn to the next step in the queue."""
        self.turn.give_back(self.holder)


async def _attempt_now(
    graph: RunningGraph,
    node: int,
    options: StepOptions,
    place: ExecutionContext,
    work: Work,
    spec: CallSpec,
    attempt: int,
    use: _Use | None,
) -> Call:
    if graph.recorder is not None:
        try:
            await graph.recorder.before(node)
        except Exception as error:
            return _never_began(graph, node, place, spec, attempt, error)
    outer = place._token
    token = outer
    if options.policy.timeout_ms is not None:
        token = outer.child(spec.name, deadline_s=options.policy.timeout_ms / 1_000)
        place = place._under(token)
    refuses_async = options.on_thread and not options.may_return_awaitable
    run = (lambda node, place: _plain(work(node, place))) if refuses_async else work
    hooks = _Hooks(graph, node, options, attempt, token, outer, use)
    try:
        call = await attempt_async(place, spec, run, (node, place), attempt, options.on_thread, None, hooks)
    finally:
        if token is not outer:
            token.close()
        if hooks.call is not None:
            graph.log(hooks.call)
            _pass_on_abort(token, outer)
    if hooks.call is None:
        graph.log(call)
    if (hooks.call is None or options.on_thread) and _is_its_own(token, outer):
        # The time limit expired before the function started, or the function is still running on a worker.
        _fail_after_all(call, _timeout(graph, node, options))
    return call


@dataclass(slots=True)
class _Hooks:
    """Callbacks around the function of one attempt."""

    graph: RunningGraph
    node: int
    options: StepOptions
    attempt: int
    token: CancellationToken
    outer: CancellationToken
    use: _Use | None
    call: Call | None = None
    """None until the attempt is admitted."""

    def starting(self, call: Call) -> None:
        self.call = call
        self.graph.notify_started(self.node)
        if self.graph.recorder is not None:
            self.graph.recorder.begin(self.node, self.attempt)

    def timed_out(self) -> StepTimeout | None:
        return _timeout(self.graph, self.node, self.options) if _is_its_own(self.token, self.outer) else None

    def left_behind(self) -> None:
        if self.use is not None:
            self.use.is_left_running = True

    def finished_late(self) -> None:
        if self.use is not None:
            self.use.end()


def _plain(value: Any) -> Any:
    if type(value) is CoroutineType:
        value.close()
        raise InvalidValue("blocking", True, "left out for an async function")
    return value


def _is_its_own(token: CancellationToken, outer: CancellationToken) -> bool:
    """Whether the attempt's own time limit ended it, not an outer cancel."""
    return token is not outer and token.is_cancelled and token.cause == "deadline"


def _timeout(graph: RunningGraph, node: int, options: StepOptions) -> StepTimeout:
    return StepTimeout(graph.names[node], options.policy.timeout_ms or 0)


def _fail_after_all(call: Call, error: StepTimeout) -> None:
    """Turn a call that its own time limit stopped into a failure that may be retried."""
    if call.stop is None:
        return
    with call.context._run.lock:
        drawn = accounts.draw_retry(call.context._account)
    if drawn:  # otherwise the time limit remains the reason of the stop
        call.stop, call.error, call.decision = None, error, RETRY


def _pass_on_abort(token: CancellationToken, outer: CancellationToken) -> None:
    """Cancel the graph with the step, except for a deadline, which is the step's own."""
    cancelled = token.cancellation
    if token is not outer and cancelled is not None and cancelled.cause not in ("deadline", "parent"):
        outer.cancel(cause=cancelled.cause, stop=cancelled.stop)


def _never_began(
    graph: RunningGraph,
    node: int,
    place: ExecutionContext,
    spec: CallSpec,
    attempt: int,
    error: BaseException,
) -> Call:
    """Record an attempt that failed before it could start."""
    call = blank(Call)
    try:
        if admit(call, place, spec, place._token, attempt=attempt):
            graph.notify_started(node)
            fail(call, error)
    except BaseException as interruption:
        end_interrupted(call, interruption)
        raise
    graph.log(call)
    return call


def _record_stand_in(graph: RunningGraph, node: int, place: ExecutionContext, about: Mapping[str, Any]) -> None:
    """Record that a replacement was used for the node's value."""
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
