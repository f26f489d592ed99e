"""Admit a call: record it, and decide whether it may run.

The checks run in this order, and the first refusal ends them: ended? cancelled? cost, steps, retries, time, tokens, api
calls and the hold, at every level atomically; then the price, the divergence detector, the hooks, the breaker. A call
that only the holds of others stand in the way of waits (`waiting`); the checks run again afterwards.
"""

from __future__ import annotations

from typing import Any

from penstock.containment import accounts
from penstock.containment.safety import Decision
from penstock.containment.shield import Slot
from penstock.errors import RunEnded
from penstock.runtime.call import ALLOW, NOT_WAITING, Call, CallSpec, describe, interruption, running_call, stop_of
from penstock.runtime.cancellation import CancellationToken
from penstock.runtime.handle import Handle
from penstock.runtime.locking import unlock
from penstock.runtime.waiting import CallWaiter, Reclamp, Waits, join, take_or_wait, wait_async, wait_sync
from penstock.stops import LIMIT_REASONS, Stop, StopReason
from penstock.tracing.events import DivergenceTrace
from penstock.tracing.lifecycle import CallKind
from penstock.tracing.payloads import Payload
from penstock.tracing.record import OPEN, keep_payload, mark_stopped


def admit(
    call: Call,
    context: Handle,
    spec: CallSpec,
    token: CancellationToken,
    args: tuple[Any, ...] = (),
    attempt: int = 1,
    waits: Waits = "no",
    reclamp: Reclamp | None = None,
) -> bool:
    """Record the call and decide whether it may run: if it may, it holds its worst case, and `stop` is None.

    `call` is blank, and filled in here: its maker keeps it also if a signal handler raises on the way. Unless `waits`
    is "no", `call.waiter` is set if the call has to wait, and `wait_for_room` or `await_room` follows.
    """
    kind, hold_nanos = spec.kind, spec.hold_nanos
    run = context._run
    base = context._base
    parent_call = running_call.get()
    parent = base
    cancelled = token.cancellation
    if parent_call is not None:
        if parent_call.context._run is not run:
            if parent_call.context._run.ledger is run.ledger:
                call._outer_call = parent_call
            parent_call = None
        else:
            if parent_call.record.depth > base.depth:
                parent = parent_call.record
            cancelled = cancelled or parent_call.token.cancellation
    worst = run.worst_case[kind]
    model = worst.model if spec.model is None else spec.model
    now_ns = run.now()
    # `Call(…)`, inlined field by field: calling it takes longer than all of these.
    call.token = token
    call.parent_call = parent_call
    call.hinted = hold_nanos is not None
    call.decision = ALLOW
    call.unknown = call.began = False
    call.value = call.error = call.stop = call.degraded = call.usage = call.permit = call.stream = None
    call.waiter = NOT_WAITING
    call.billed_below = call.failed_below = None
    call.context = context  # the last one: a call that has it is not blank any more
    metadata = spec.metadata
    if attempt > 1:
        metadata = {**(metadata or {}), "attempt": attempt}
        last = run.last_failure
        if last is not None and last[2].name == spec.name and last[2].source is context._source:
            run.last_failure = None  # it is retried in place
    lock = run.lock
    try:  # in place of `with`: see `locking`
        lock.acquire()
        while parent.end_seq != OPEN and parent.parent is not None:
            # The parent has already ended: this is a task that outlives it, or an abandoned function.
            parent = parent.parent
        refused: Stop | None
        if cancelled is not None and cancelled.stop.reason is StopReason.ABORTED:
            refused = cancelled.stop
        elif run.queues or (
            kind == "llm"
            and (
                (spec.hold_tokens is None and (worst.tokens_unknown or run.ledger.unhinted))
                or (hold_nanos is None and (worst.is_unknown or run.ledger.unhinted))
            )
        ):
            refused = take_or_wait(call, spec, args, attempt, now_ns, waits, reclamp)
        else:
            cost = worst.cost if hold_nanos is None else hold_nanos
            tokens = worst.tokens if spec.hold_tokens is None else spec.hold_tokens
            refused = accounts.take(call, context._account, cost, tokens, worst.api_calls, now_ns, attempt > 1)
            if refused is not None and refused.momentary and waits != "no":
                refused = take_or_wait(call, spec, args, attempt, now_ns, waits, reclamp)
        if refused is None or call.waiter is None:
            call.record = run.graph.begin(parent, kind, spec.name, model, context._source, now_ns, True, metadata, call)
        else:
            join(call, parent, model, metadata, now_ns, refused)
        lock.release()
    except RunEnded:
        # The run ended after the caller's check.
        if call.state == "held":
            accounts.withdraw(call)
        unlock(lock)
        after_end(context, f"{kind} call {spec.name!r}", call)
        return False
    except BaseException:
        unlock(lock)
        raise
    if refused is not None:
        if call.waiter is None:
            refuse(call, refused)
        return False
    if (now_ns >= token.deadline_ns or cancelled is not None) and _is_stopped(call):
        return False
    if run.checks_calls or (args and run.reads_args):
        return _check_further(call, args, attempt)
    return True


def wait_for_room(call: Call) -> bool:
    """Block this thread until the call is admitted, if it waits; return whether it may run."""
    waiter = call.waiter
    return isinstance(waiter, CallWaiter) and _end_wait(call, waiter, wait_sync(call))


async def await_room(call: Call) -> bool:
    """Wait, in a task, until the call is admitted, if it waits; return whether it may run."""
    waiter = call.waiter
    return isinstance(waiter, CallWaiter) and _end_wait(call, waiter, await wait_async(call))


def _end_wait(call: Call, waiter: CallWaiter, stop: Stop | None) -> bool:
    """Check again what may have changed while the call waited."""
    if stop is not None:
        refuse(call, stop)
        return False
    return not _is_stopped(call) and _check_further(call, waiter.args, waiter.attempt)


def after_end(context: Handle, what: str, call: Call | None = None) -> Call:
    """Return the call of a context that has ended, refused: as halted if it was stopped, or a limit was reached.

    RunEnded if it ended normally, below its limits. The log of an ended context is closed, so the refusal leaves no
    record of its own.
    """
    stop = context._stop_after_end()
    if stop is None:
        raise context._after_the_end(what)
    if call is None:
        call = Call.__new__(Call)
    Call.__init__(call, context, context._base, False, context._token)
    call.decision, call.stop = Decision.HALT, stop
    return call


def _is_stopped(call: Call) -> bool:
    """Refuse the call if it was cancelled, or its deadline has passed."""
    token = call.token
    # Also a deadline that no account has: the token's own, or an outer token's.
    stop = stop_of(token) if token.is_cancelled else call.parent_call.token.stop if call.parent_call else None
    if stop is not None:
        refuse(call, stop)
    return stop is not None


def _check_further(call: Call, args: tuple[Any, ...], attempt: int) -> bool:
    """Apply the checks that follow the hold: the price, divergence, the hooks, the breaker."""
    run = call.context._run
    try:
        if run.payloads is not None and args and call.record.kind != "system":
            payload = Payload(run.payloads.arguments(args))
            with run.lock:
                keep_payload(call.record, payload)
        if not call.hinted and run.demands_price:
            _require_price(call, call.record.kind, call.record.model)
        # Retries have the same arguments as the first attempt.
        if call.stop is None and args and attempt == 1 and run.divergence is not None:
            _watch_shape(call, args)
        if call.stop is None and run.guarded:
            _check_guards(call)
    except BaseException as error:
        if call.stop is None:
            refuse(call, interruption(error))
        raise
    return call.stop is None


def _require_price(call: Call, kind: CallKind, model: str | None) -> None:
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


def _check_guards(call: Call) -> None:
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
    """Refuse the call: give back its hold, and record why."""
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
        if call in run.first_calls:
            run.end_first_call(call, call.hinted, has_succeeded=False)
        mark_stopped(record, stop)
        run.graph.end(record, now_ns, "halt", stop_reason=str(stop))
        record.owner = None
        if run.queues:
            run.room.changed(now_ns)
        failure = None
        if stop.reason is StopReason.RETRY_BUDGET_EXCEEDED:
            failure, run.last_failure = run.last_failure, None
    if failure is not None:
        # The caller retries in its own loop: the failure it would retry is final.
        provider_error, source, failed = failure
        run.record_stop(provider_error, Decision.HALT, source, failed, "ExecutionContext")
    run.record_stop(stop, decision, context._source, record, hook)
