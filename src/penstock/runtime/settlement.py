"""Settle a call: its outcome, its cost, and the end of its record.

`succeed`, `fail` and `abandon` may race for a call whose caller was released. The first to end the record decides the
outcome; the others find it ended, and only settle the cost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from penstock.containment import accounts
from penstock.containment.safety import Decision
from penstock.containment.shield import ShieldPipeline, Slot, Verdict
from penstock.errors import CancelledError, Halted, StepTimeout
from penstock.money import to_usd
from penstock.runtime import waiting
from penstock.runtime.billing.usage import (
    WITHOUT_USAGE,
    Reported,
    Usage,
    is_free_failure,
    read_usage,
    usage_of_failure,
)
from penstock.runtime.call import RETRY, Call, describe, draw_retry, interruption, stop_of
from penstock.runtime.durable.shared import note_charge, note_end, note_late_bill, note_unknown
from penstock.runtime.handle import Handle
from penstock.runtime.locking import unlock
from penstock.runtime.run import Run
from penstock.stops import Stop, StopReason
from penstock.tracing.events import DivergenceTrace
from penstock.tracing.lifecycle import Status
from penstock.tracing.payloads import Payload
from penstock.tracing.record import (
    NO_EXTRAS,
    NOT_WHOLE,
    ONLY_COST_UNKNOWN,
    OPEN,
    CallRecord,
    keep_payload,
    mark_cost_unknown,
    mark_not_whole,
    mark_stopped,
)

OPEN_HOLDS = ("held", "unresolved")
"""States in which a bill can be settled. An abandoned call may end after a person has resolved its bill."""
_FIELDS_OF_A_CANCEL = vars(CancelledError()).keys()


def _truncation_reason(value: Any) -> str | None:
    """Return the finish reason if our models mark the answer as incomplete; None for any other value."""
    try:
        finish_reason = getattr(value, "finish_reason", None)
    except Exception:  # whatever the attribute raises, the call has to be settled
        return None
    return finish_reason if type(finish_reason) is str and finish_reason in NOT_WHOLE else None


def succeed(call: Call, value: Any) -> None:
    """Settle a call whose function returned, and set its value unless it was stopped meanwhile."""
    run, record = call.context._run, call.record
    cost = call._held_cost if call.hinted else 0
    tokens_in = tokens_out = 0
    known = True
    finish_reason = None
    if type(value) not in WITHOUT_USAGE or call.usage is not None:
        cost, tokens_in, tokens_out, known = _bill(call, _usage_of(call, value), cost)
        if type(value) is Reported:
            value = value.value
        if record.kind == "llm" and type(value) not in WITHOUT_USAGE:
            finish_reason = _truncation_reason(value)
    elif not call.hinted and record.kind == "llm":
        known = False
    payload = denied = stop = None
    token, now_ns = call.token, run.now()
    if token.cancellation is not None or (now_ns >= token.deadline_ns and token.is_cancelled):
        stop = token.stop
    if run.checks_results:
        if run.payloads is not None and record.kind != "system":
            payload = Payload(record.payload and record.payload.input, run.payloads.capture(value))
        if run.pipeline is not None and run.pipeline.has(Slot.BUDGET):
            try:
                denied = _judge_charge(run.pipeline, call, cost, tokens_in, tokens_out)
            except BaseException as error:
                call.usage = Usage(tokens_in, tokens_out, cost_nanos=cost)
                fail(call, error)
                return
            if denied is not None and stop is not None:
                run.record_verdict(denied, call.context._source, record)
                denied = None
            elif denied is not None:
                stop = Stop(denied.stop_reason, denied.reason)
    lock = run.lock
    try:  # in place of `with`: see `locking`
        lock.acquire()
        is_open = call._state in OPEN_HOLDS
        if is_open:
            accounts.settle(call, cost, tokens_in, tokens_out, stop is None)
        if known is call.unknown:
            if known or run.shared is not None or record.extras is not NO_EXTRAS:
                _note_unknown(call, not known)
            else:  # `_note_unknown`, inlined: without known prices, this branch runs in every call
                run.unknown_costs += 1
                call.unknown = True
                record.extras = ONLY_COST_UNKNOWN
        used = cost or tokens_in or tokens_out
        if used and (tokens_in + tokens_out > call._held_tokens or (cost > call._held_cost and not call.hinted)):
            run.learn(record.kind, 0 if call.hinted else cost, tokens_in + tokens_out)
        if finish_reason is not None and record.end_seq == OPEN:
            mark_not_whole(record, finish_reason)
        if stop is None:
            if payload is not None and record.end_seq == OPEN:
                keep_payload(record, payload)
            ended = run.graph.end(record, now_ns, "success", cost, tokens_in or None, tokens_out or None)
            if ended:
                if run.results is not None:
                    run.results.append((record, value))
                else:
                    run.keep_result(record, value)
        else:
            mark_stopped(record, stop)
            ended = run.graph.end(record, now_ns, "halt", cost, tokens_in or None, tokens_out or None, str(stop))
            if ended and call.stream is not None:
                run.keep_incomplete(record, call.stream())
        if not ended:
            run.graph.settle_late(record, now_ns, cost, tokens_in, tokens_out)
        record.owner = None
        if run.queues or run.is_learning:  # after the end: what only this call kept running may be stuck now
            _let_others_go(call, now_ns, True)
        lock.release()
    except BaseException:
        if lock._is_owned():  # type: ignore[attr-defined]
            status: Status = "success" if stop is None else "halt"
            _finish_settlement(call, status, now_ns, cost, tokens_in, tokens_out, None if stop is None else str(stop))
        unlock(lock)
        raise
    if call.unknown and record.model is not None:
        _report_unpriced(call)
    if run.breaker is not None:
        run.breaker.record_success(call.permit)
    if used:
        if run.divergence is not None:
            _watch_rate(call, now_ns, cost, tokens_in + tokens_out)
        if record.kind == "system" and run.shared is not None:
            note_charge(run.shared, record, cost, tokens_in, tokens_out)
    if not ended:
        if run.shared is not None and is_open:
            note_late_bill(run.shared, call, cost, tokens_in, tokens_out)
        # The reason was recorded when the record ended.
        call.decision = Decision.HALT
        call.stop = call.stop or stop or Stop(StopReason.ABORTED, "the run ended while the call was running")
    elif stop is not None:
        _discard(call, stop, denied)
    else:
        call.value = value
        if call.degraded is not None:
            call.decision = Decision.DEGRADE


def _let_others_go(call: Call, now_ns: int, has_succeeded: bool) -> None:
    """Admit the calls that waited for this one. The caller holds the lock."""
    run = call.context._run
    if run.is_learning and (
        call in run.first_calls or (has_succeeded and call.record.kind == "llm" and not call._held_tokens)
    ):
        run.end_first_call(call, call.hinted, has_succeeded)
    if run.queues:
        run.room.changed(now_ns)


def _finish_settlement(
    call: Call, status: Status, now_ns: int, cost: int, tokens_in: int, tokens_out: int, stop_reason: str | None
) -> None:
    """Finish what a signal handler has interrupted between the settlement and the end. The caller holds the lock."""
    run, record = call.context._run, call.record
    if call.state in OPEN_HOLDS:
        accounts.settle(call, cost, tokens_in, tokens_out, status == "success")
    run.graph.end(record, now_ns, status, cost, tokens_in or None, tokens_out or None, stop_reason)
    if record.abandoned:
        run.graph.settle_late(record, now_ns, cost, tokens_in, tokens_out)
    record.owner = None
    _let_others_go(call, now_ns, status == "success")


def end_interrupted(call: Call, error: BaseException) -> None:
    """End a call that an exception has interrupted outside its function, unless it has ended.

    A signal handler may raise anywhere. A call whose function may have run leaves its hold unresolved, any other one
    gives it back.
    """
    context: Handle | None = getattr(call, "context", None)
    if context is None:
        return  # it was blank
    run, stop = context._run, interruption(error)
    unlock(run.lock)  # it is still held if the last instruction of a block was interrupted
    with run.lock:
        now_ns = run.now()
        record = getattr(call, "record", None)
        if record is None:
            record = next((one for one in run.graph.open_calls() if one.owner is call), None)
        if record is not None:
            call.record = record
            waiting.give_up(call, now_ns, stop)
        if call.state == "held":
            if not call.began:
                accounts.withdraw(call)
            elif run.settings.unknown_bill == "release" or call._held_cost == call._held_tokens == 0:
                accounts.release(call)
            else:
                _leave_unresolved(run, call, str(stop), now_ns)
        elif record is None or record.end_seq != OPEN:
            _let_others_go(call, now_ns, False)
            return
        if record is not None:
            call.decision, call.stop = Decision.HALT, stop
            mark_stopped(record, stop)
            run.graph.end(record, now_ns, "halt", stop_reason=str(stop), error_class=type(error).__name__)
            record.owner = None
        _let_others_go(call, now_ns, False)
    if run.shared is not None and record is not None:
        note_end(run.shared, call)
        run.shared.flush_soon()


async def load_prices_for(call: Call, value: Any) -> None:
    """Load the table of prices, off the event loop, if settling `call` with `value` needs it."""
    usage = call.usage or read_usage(value)
    if usage is None or usage.cost_nanos is not None:
        return
    prices = call.context._run.prices
    if prices.must_load_for(usage.model, call.record.model):
        await prices.aload()


def _usage_of(call: Call, value: Any) -> Usage | None:
    """Return the usage that `value` reports, unless a call below has already paid for it."""
    paid = call.billed_below is not None and any(value is billed for billed in call.billed_below)
    usage = None if paid else read_usage(value)
    parent = call.parent_call
    if parent is not None and (paid or usage is not None):
        if parent.billed_below is None:
            parent.billed_below = []
        parent.billed_below.append(value.value if type(value) is Reported else value)
    return usage or (Usage(cost_nanos=0) if paid and call.usage is None else None)


def _judge_charge(pipeline: ShieldPipeline, call: Call, cost: int, tokens_in: int, tokens_out: int) -> Verdict | None:
    """Return the verdict that refuses the charge; None if no hook does."""
    verdict = pipeline.judge(Slot.BUDGET, describe(call, tokens_in, tokens_out), to_usd(cost))
    if verdict is not None and verdict.decision is Decision.DEGRADE:
        call.context._run.record_verdict(verdict, call.context._source, call.record)
        return None
    return verdict


def _bill(call: Call, found: Usage | None, hinted_cost: int) -> tuple[int, int, int, bool]:
    """Return the cost and tokens of the call, from its report or its value, else its hint; and whether it is known."""
    usage = call.usage or found
    record = call.record
    if usage is None:
        return hinted_cost, 0, 0, call.hinted or record.kind != "llm"
    if usage.model is not None and record.model in (None, call.context._run.metadata.model):
        record.model = usage.model
    price = call.context._run.prices.cost(usage, record.model)
    if not price.known and call.hinted:
        return max(price.nanos, hinted_cost), usage.input_tokens, usage.output_tokens, True
    return price.nanos, usage.input_tokens, usage.output_tokens, price.known


def _watch_rate(call: Call, now_ns: int, cost: int, tokens: int) -> None:
    run = call.context._run
    detector = run.divergence
    assert detector is not None
    for shape in detector.saw_spend(now_ns, cost, tokens):
        event = DivergenceTrace(shape=shape.shape, signature=shape.signature, message=shape.message)
        run.record(event, call.context._source, call.record)
        if detector.halts:
            call.context._token.cancel(stop=Stop(StopReason.DIVERGED, shape.message), cause="limit")


def _discard(call: Call, stop: Stop, denied: Verdict | None) -> None:
    """Stop a call whose function returned too late, or whose charge was refused: the value is discarded."""
    call.stop = stop
    call.decision = Decision.HALT if denied is None else denied.decision
    hook = "ExecutionContext" if denied is None else denied.hook
    call.context._run.record_stop(stop, call.decision, call.context._source, call.record, hook)


def fail(call: Call, error: BaseException) -> None:
    """Settle a call whose function raised, and decide whether it may be retried.

    An error that is neither an Exception nor a cancel of ours is raised again.
    """
    if type(error) is CancelledError and error.stop is call.token.stop:
        # The plain cancel, the fast path: when a run is aborted, every running call ends this way.
        _end_stopped(call, call.stop or error.stop, error, free=False)
        return
    stopped = next((one for one in _leaves(error) if isinstance(one, Halted | CancelledError)), None)
    cut_off = call.token.is_cancelled or call.record.end_seq != OPEN
    if isinstance(stopped, Halted) and _may_be_kept(error):
        _end_stopped(call, stopped.stop, error, free=stopped is error)
    elif cut_off and _may_be_kept(error):
        _end_stopped(call, call.stop or stop_of(call.token), error, free=False)
    elif stopped is not None and _may_be_kept(error):
        # Only something below was cancelled, a child or another run: it stops this call, and nothing else.
        _end_stopped(call, stopped.stop, error, free=False)
    elif isinstance(error, Exception):
        end_failed(call, error)
    else:
        _end_stopped(call, call.token.stop or interruption(error), error, free=False)
        raise error


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the error itself, or the errors inside an exception group."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _may_be_kept(error: BaseException) -> bool:
    """Whether `error` consists of Exceptions and cancels of ours alone; anything else has to reach the caller."""
    if isinstance(error, BaseExceptionGroup):
        kept = (Exception, CancelledError, asyncio.CancelledError)
        return all(isinstance(one, kept) for one in _leaves(error))
    return isinstance(error, Exception | CancelledError)


def _end_stopped(call: Call, stop: Stop, error: BaseException, free: bool) -> None:
    """End a call that was stopped while it ran."""
    run = call.context._run
    call.decision, call.stop, call.error = Decision.HALT, stop, error
    ended = settle_and_end(call, "halt", _failure_bill(call, error), free, str(stop), error, stop)
    if run.breaker is not None:
        run.breaker.record_abandoned(call.permit)
    if ended:
        run.record_stop(stop, Decision.HALT, call.context._source, call.record, "ExecutionContext")


def end_failed(call: Call, error: Exception, never_ran: bool = False) -> None:
    """End a failed call: it may be retried while the retry budget lasts."""
    run, record = call.context._run, call.record
    call.error = error
    message = error_text(error)
    drawn = error is call.failed_below
    if not drawn:
        with run.lock:
            drawn = draw_retry(call.context._account, record)
    free = never_ran or is_free_failure(error)
    settle_and_end(call, "fail", _failure_bill(call, error), free, message, error)
    if run.breaker is not None:
        run.breaker.record_failure(call.permit)
    verdict = run.pipeline.judge(Slot.RETRY, describe(call), error) if run.pipeline and run.asks(Slot.RETRY) else None
    if verdict is not None:
        run.record_verdict(verdict, call.context._source, record)
    provider_error = Stop(
        StopReason.PROVIDER_ERROR,
        f"{type(error).__name__}: {message}; the retry budget has nothing left for another attempt",
    )
    if not drawn:
        call.decision, call.stop = Decision.HALT, provider_error
        run.record_stop(provider_error, Decision.HALT, call.context._source, record, "ExecutionContext")
    elif verdict is not None and verdict.decision is not Decision.RETRY:
        call.decision = verdict.decision
        if verdict.decision is not Decision.DEGRADE:
            call.stop = Stop(verdict.stop_reason, verdict.reason)
    else:
        call.decision = RETRY
        run.last_failure = (provider_error, call.context._source, record)


def error_text(error: BaseException) -> str:
    """Return the error's message, truncated; safe even if its `__str__` raises."""
    try:
        return str(error)[:500]
    except Exception as failure:
        return f"<no message: its __str__ raised {type(failure).__name__}>"


def _failure_bill(call: Call, error: BaseException) -> tuple[int, int, int, bool] | None:
    """Return the known cost of a call that did not succeed; None if unknown, or paid by a call below."""
    usage = call.usage
    if usage is None and error is not call.failed_below and not _has_no_bill(error):
        usage = usage_of_failure(error)
    return None if usage is None else _bill(call, usage, call._held_cost if call.hinted else 0)


def _has_no_bill(error: BaseException) -> bool:
    """Whether it is a plain cancel of ours, without a usage attribute or a cause."""
    return type(error) is CancelledError and error.__cause__ is None and vars(error).keys() == _FIELDS_OF_A_CANCEL


def settle_and_end(
    call: Call,
    status: Status,
    bill: tuple[int, int, int, bool] | None,
    free: bool,
    message: str,
    error: BaseException,
    stop: Stop | None = None,
) -> bool:
    """Settle at the bill, or at nothing if the call was free, else leave the hold unresolved; and end the record.

    Returns False if the record had already ended.
    """
    run, record = call.context._run, call.record
    cost, tokens_in, tokens_out, known = bill or (0, 0, 0, True)
    now_ns = run.now()
    unknown = not known or (bill is None and not free and call.is_unpriced and error is not call.failed_below)
    lock, is_open = run.lock, False
    had_ended: bool | None = None
    try:  # in place of `with`: see `locking`
        lock.acquire()
        is_open = call._state in OPEN_HOLDS
        had_ended = record.end_seq != OPEN
        _end_unsuccessful(call, status, bill, free, message, error, stop, now_ns, unknown, had_ended)
        lock.release()
    except BaseException:
        try:
            if lock._is_owned() and had_ended is not None:  # type: ignore[attr-defined]
                _end_unsuccessful(call, status, bill, free, message, error, stop, now_ns, unknown, had_ended)
        finally:
            unlock(lock)
        raise
    ended = not had_ended
    if call.unknown and record.model is not None:
        _report_unpriced(call)
    if call.parent_call is not None:
        call.parent_call.failed_below = error
    if bill is not None and run.shared is not None:
        if record.kind == "system":
            note_charge(run.shared, record, cost, tokens_in, tokens_out)
        elif not ended and is_open:
            note_late_bill(run.shared, call, cost, tokens_in, tokens_out)
    return ended


def _end_unsuccessful(
    call: Call,
    status: Status,
    bill: tuple[int, int, int, bool] | None,
    free: bool,
    message: str,
    error: BaseException,
    stop: Stop | None,
    now_ns: int,
    unknown: bool,
    had_ended: bool,
) -> None:
    """Settle and end a call that did not succeed; again, finish what was interrupted. The caller holds the lock."""
    run, record = call.context._run, call.record
    cost, tokens_in, tokens_out, _ = bill or (0, 0, 0, True)
    if call._state not in OPEN_HOLDS:
        pass
    elif bill is not None:
        accounts.settle(call, cost, tokens_in, tokens_out, False)
        run.learn(record.kind, 0 if call.hinted else cost, tokens_in + tokens_out)
    elif free or run.settings.unknown_bill == "release" or call._held_cost == call._held_tokens == 0:
        accounts.release(call)
    elif call.state == "held":
        _leave_unresolved(run, call, message if status == "halt" else _error_line(error, message), now_ns)
    if unknown is not call.unknown:
        _note_unknown(call, unknown)
    mark_stopped(record, stop)
    if had_ended:
        if cost:
            run.graph.settle_late(record, now_ns, cost, tokens_in, tokens_out)
    elif record.end_seq == OPEN:
        failed = type(error).__name__
        run.graph.end(record, now_ns, status, cost, tokens_in or None, tokens_out or None, message, failed)
        if call.stream is not None and (status == "halt" or isinstance(error, StepTimeout)):
            run.keep_incomplete(record, call.stream())
    record.owner = None
    if run.queues or run.is_learning:
        _let_others_go(call, now_ns, False)


def _report_unpriced(call: Call) -> None:
    """Report a call of unknown cost under a money limit, if the reason is that its model has no price."""
    run = call.context._run
    if run.shared is not None or accounts.has_cost_limit(call.context._account):
        run.record_unpriced(call.context._source, call.record)


def _error_line(error: BaseException, message: str) -> str:
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _leave_unresolved(run: Run, call: Call, reason: str, now_ns: int) -> None:
    """Leave the hold of a call whose bill is unknown, until it is resolved. The caller holds the lock."""
    try:
        accounts.leave_unresolved(call)
        run.keep_bill(call, call.record, reason, now_ns)
    except BaseException:
        if call.state == "unresolved":  # a bill that is not kept could never be resolved
            run.keep_bill(call, call.record, reason, now_ns)
        raise


def _note_unknown(call: Call, unknown: bool) -> None:
    """Mark the cost of the call as unknown; or, for an abandoned call, as known after all.

    Call it before the record ends, with the lock held.
    """
    run = call.context._run
    unknown_costs = run.unknown_costs + (1 if unknown else -1)
    if unknown and call.record.end_seq == OPEN:
        mark_cost_unknown(call.record)
    try:
        run.unknown_costs = unknown_costs
        call.unknown = unknown
    except BaseException:  # from a signal handler: it is counted once
        run.unknown_costs, call.unknown = unknown_costs, unknown
        raise
    if run.shared is not None:
        note_unknown(run.shared, call)


def leave_running(run: Run, record: CallRecord, now_ns: int, why: str, stop: Stop | None = None) -> None:
    """End the record of a call whose function still runs, and leave its hold unresolved. The caller holds the lock."""
    call = record.owner if isinstance(record.owner, Call) else None
    if call is not None and call.waiter is not None:
        waiting.give_up(call, now_ns, Stop(StopReason.ABORTED, why))
    held = call if call is not None and call.state == "held" else None
    if held is not None and held.is_unpriced:
        _note_unknown(held, True)
    mark_stopped(record, stop)
    run.graph.end(record, now_ns, "halt", stop_reason=why, abandoned=True)
    if call is not None and call.stream is not None:
        run.keep_incomplete(record, call.stream())
    if held is not None:
        _leave_unresolved(run, held, why, now_ns)
        if run.queues or run.is_learning:
            _let_others_go(held, now_ns, False)
        if run.shared is not None:
            note_end(run.shared, held)


def abandon(call: Call, stop: Stop) -> bool:
    """Release the caller while the function still runs; return False if the call has already ended.

    The hold stays unresolved until the function is done and its bill known. Calls that it started are abandoned too.
    """
    run, record = call.context._run, call.record
    call.decision, call.stop = Decision.HALT, stop
    now_ns = run.now()
    with run.lock:
        if record.end_seq != OPEN:
            return False
        below = [one for one in run.graph.open_calls() if one is record or one.is_under(record)]
        for one in below:
            leave_running(run, one, now_ns, str(stop), stop)
        if run.queues:
            run.room.changed(now_ns)
    if run.shared is not None:
        run.shared.flush_soon()
    if run.breaker is not None:
        for one in below:
            if isinstance(left := one.owner, Call):
                run.breaker.record_abandoned(left.permit)
    run.record_stop(stop, Decision.HALT, call.context._source, record, "ExecutionContext")
    return True
