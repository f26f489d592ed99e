"""Recorded and contained: whether a call may run.

In this order, and what refuses consults nothing after it: ended? cancelled? cost, steps, retries, time, tokens, api
calls and the hold, at every level in one act; then the price, the shape of the run, the hooks, the breaker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.containment import accounts
from penstock.containment.safety import Decision
from penstock.containment.shield import Slot
from penstock.runtime.call import ALLOW, Call, describe, interruption, running_call
from penstock.runtime.cancellation import CancellationToken
from penstock.runtime.locking import unlock
from penstock.stops import LIMIT_REASONS, Stop, StopReason
from penstock.tracing.events import DivergenceTrace
from penstock.tracing.lifecycle import CallKind
from penstock.tracing.record import OPEN

if TYPE_CHECKING:
    from penstock.runtime.handle import Handle

blank = object.__new__


def enter(
    context: Handle,
    kind: CallKind,
    name: str,
    hint: int | None,
    model: str | None,
    token: CancellationToken,
    args: tuple[Any, ...] = (),
    attempt: int = 1,
    metadata: Mapping[str, Any] | None = None,
    tokens: int | None = None,
) -> Call:
    """Write the call down and judge it. If it may run, `stop` is None and it holds its worst case.

    `metadata` is what the record says of the call beside its name: kept as it is, and shared, not copied. `tokens` are
    the most it can use; None where that is not known.
    """
    run = context._run
    base = context._base
    above = running_call.get()
    parent = base
    cancelled = token.cancellation
    if above is not None:
        if above.context._run is not run:
            above = None
        else:
            if above.record.depth > base.depth:
                parent = above.record
            cancelled = cancelled or above.token.cancellation
    worst = run.worst_case[kind]
    if model is None:
        model = worst.model
    cost = worst.cost if hint is None else hint
    if tokens is None:
        tokens = worst.tokens
    now_ns = run.now()
    if attempt > 1:
        metadata = {**(metadata or {}), "attempt": attempt}
    # What `Call(…)` does, field by field: to call it takes longer than all of them.
    call = blank(Call)
    call.context = context
    call.token = token
    call.above = above
    call.hinted = hint is not None
    call.decision = ALLOW
    call.unknown = False
    call.value = call.error = call.stop = call.degraded = call.usage = call.permit = None
    call.billed_below = call.failed_below = None
    lock = run.lock
    try:  # in place of `with`: see `locking`
        lock.acquire()
        while parent.end_seq != OPEN and parent.parent is not None:
            # What made the call is over already: a task that outlives it, a function that was left behind.
            parent = parent.parent
        call.record = run.graph.begin(parent, kind, name, model, context._source, now_ns, True, metadata, call)
        if cancelled is not None and cancelled.stop.reason is StopReason.ABORTED:
            refused: Stop | None = cancelled.stop
        else:
            refused = accounts.take(call, context._account, cost, tokens, worst.api_calls, now_ns, attempt > 1)
    except BaseException:
        unlock(lock)
        raise
    lock.release()
    if refused is not None:
        refuse(call, refused)
        return call
    if now_ns >= token.deadline_ns or cancelled is not None:
        # A deadline that no account knows of: the token's own, or that of one above it.
        token.is_cancelled  # noqa: B018
        stop = token.stop or (cancelled.stop if cancelled else None)
        if stop is not None:
            refuse(call, stop)
            return call
    if attempt > 1:
        args = ()  # the first attempt has shown its shape
    if run.guarded or (hint is None and run.demands_price) or (args and run.divergence is not None):
        _ask(call, model, args)
    return call


def _ask(call: Call, model: str | None, args: tuple[Any, ...]) -> None:
    """Let everybody else who may refuse the call have a look at it: the price, the shape of the run, the guards."""
    run = call.context._run
    try:
        if not call.hinted and run.demands_price:
            _demand_a_price(call, call.record.kind, model)
        if call.stop is None and args and run.divergence is not None:
            _watch_shape(call, args)
        if call.stop is None and run.guarded:
            _ask_guards(call)
    except BaseException as error:
        if call.stop is None:
            refuse(call, interruption(error))
        raise


def _demand_a_price(call: Call, kind: CallKind, model: str | None) -> None:
    run = call.context._run
    if run.settings.strict:
        message = "the run is strict and the call has no cost hint; pass one (cost_hint_usd=…), 0 if it is free"
        refuse(call, Stop(StopReason.PRICE_UNKNOWN, message))
    elif kind == "llm" and model is not None and not run.prices.is_priced(model):
        message = f"no price is known for model {model!r}; register one, or pass a cost hint"
        refuse(call, Stop(StopReason.PRICE_UNKNOWN, message))


def _watch_shape(call: Call, args: tuple[Any, ...]) -> None:
    run, record = call.context._run, call.record
    detector = run.divergence
    assert detector is not None
    for shape in detector.saw_call(record.kind, record.name, args):
        event = DivergenceTrace(shape=shape.shape, signature=shape.signature, message=shape.message)
        run.record(event, call.context._source, record)
        if detector.halts and call.stop is None:
            stop = Stop(StopReason.DIVERGED, shape.message)
            call.context._token.cancel(stop=stop, cause="limit")
            refuse(call, stop)


def _ask_guards(call: Call) -> None:
    run, record = call.context._run, call.record
    if run.pipeline is not None:
        slot = Slot.PRE_DISPATCH if record.kind == "llm" else Slot.TOOL_DISPATCH
        if run.pipeline.has(slot):
            verdict = run.pipeline.judge(slot, describe(call))
            if verdict is not None and verdict.decision is not Decision.DEGRADE:
                stop = Stop(verdict.stop_reason, verdict.reason)
                refuse(call, stop, verdict.decision, hook=verdict.hook)
                return
            if verdict is not None:
                call.degraded = verdict
                record.model = verdict.model or record.model
                run.record_verdict(verdict, call.context._source, record)
    if run.breaker is not None:
        decision = run.breaker.check(call.context._policy_context())
        call.permit = decision.permit
        if not decision.allowed:
            refuse(call, Stop(StopReason.CIRCUIT_OPEN, decision.reason))


def refuse(call: Call, stop: Stop, decision: Decision = Decision.HALT, hook: str = "ExecutionContext") -> None:
    """The call does not run: give back what it held, and write down why."""
    context, run, record = call.context, call.context._run, call.record
    call.decision, call.stop = decision, stop
    if stop.reason in LIMIT_REASONS:
        context._remember(stop)
    now_ns = run.now()
    with run.lock:
        if call.state == "held":
            accounts.withdraw(call)
        elif call.state == "unresolved":
            accounts.release(call)
        run.graph.end(record, now_ns, "halt", stop_reason=str(stop))
        record.owner = None
    run.record_stop(stop, decision, context._source, record, hook)
