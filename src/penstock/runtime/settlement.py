"""Settled and recorded: what came of a call, what it cost, and its one end.

`succeed`, `fail` and `abandon` may race for a call whose caller was let go. Whoever ends the record decides what came
of it; the others find it ended, and only settle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from penstock.containment import accounts
from penstock.containment.safety import Decision
from penstock.containment.shield import ShieldPipeline, Slot, Verdict
from penstock.errors import CancelledError, Halted
from penstock.money import to_usd
from penstock.runtime.billing.usage import (
    WITHOUT_USAGE,
    Reported,
    Usage,
    is_free_failure,
    read_usage,
    usage_of_failure,
)
from penstock.runtime.call import RETRY, Call, describe, interruption, stop_of
from penstock.runtime.durable import holding
from penstock.runtime.locking import unlock
from penstock.stops import Stop, StopReason
from penstock.tracing.events import DivergenceTrace
from penstock.tracing.lifecycle import Status
from penstock.tracing.record import NOT_WHOLE, OPEN, CallRecord, count_retry, mark_cost_unknown, mark_not_whole

if TYPE_CHECKING:
    from penstock.runtime.run import Run

_FIELDS_OF_A_CANCEL = vars(CancelledError()).keys()


def _why_not_whole(value: Any) -> str | None:
    """Why the answer of a model is not whole, as our models say it; what else a function gives may say nothing."""
    try:
        said = getattr(value, "finish_reason", None)
    except Exception:  # whatever looking at it does, the call is to be paid
        return None
    return said if type(said) is str and said in NOT_WHOLE else None


def succeed(call: Call, value: Any) -> None:
    """The function returned: settle what it cost, and give its value unless the call was stopped meanwhile."""
    run, record = call.context._run, call.record
    cost = call._held_cost if call.hinted else 0
    tokens_in = tokens_out = 0
    known = True
    finish_reason = None
    if type(value) not in WITHOUT_USAGE or call.usage is not None:
        cost, tokens_in, tokens_out, known = _bill(call, _usage_of(call, value), cost)
        if type(value) is Reported:
            value = value.value
        if record.kind == "llm":
            finish_reason = _why_not_whole(value)
    elif not call.hinted and record.kind == "llm":
        known = False
    token, now_ns = call.token, run.now()
    stop = None
    if token.cancellation is not None or (now_ns >= token.deadline_ns and token.is_cancelled):
        stop = token.stop
    denied = None
    if run.pipeline is not None and run.pipeline.has(Slot.BUDGET):
        try:
            denied = _ask_before_charge(run.pipeline, call, cost)
        except BaseException as error:
            call.usage = Usage(tokens_in, tokens_out, cost_nanos=cost)
            fail(call, error)
            return
        if denied is not None and stop is None:
            stop = Stop(denied.stop_reason, denied.reason)
        else:
            denied = None
    lock = run.lock
    try:  # in place of `with`: see `locking`
        lock.acquire()
        accounts.settle(call, cost, tokens_in, tokens_out, stop is None)
        if known is call.unknown:
            _note_unknown(call, not known)
        used = cost or tokens_in or tokens_out
        if used and (tokens_in + tokens_out > call._held_tokens or (cost > call._held_cost and not call.hinted)):
            run.learn(record.kind, 0 if call.hinted else cost, tokens_in + tokens_out)
        if finish_reason is not None and record.end_seq == OPEN:
            mark_not_whole(record, finish_reason)
        if stop is None:
            ended = run.graph.end(record, now_ns, "success", cost, tokens_in or None, tokens_out or None)
            if ended:
                if run.results is not None:
                    run.results.append((record, value))
                else:
                    run.keep_result(record, value)
        else:
            ended = run.graph.end(record, now_ns, "halt", cost, tokens_in or None, tokens_out or None, str(stop))
        if not ended:
            run.graph.settle_late(record, now_ns, cost, tokens_in, tokens_out)
        record.owner = None
    except BaseException:
        unlock(lock)
        raise
    lock.release()
    if run.breaker is not None:
        run.breaker.record_success(call.permit)
    if used:
        if run.divergence is not None:
            _watch_rate(call, now_ns, cost, tokens_in + tokens_out)
        if record.kind == "system" and run.shared is not None:
            holding.note_charge(run.shared, record, cost, tokens_in, tokens_out)
    if not ended:
        if run.shared is not None:
            holding.note_late_bill(run.shared, call, cost, tokens_in, tokens_out)
        # Whoever ended the record has told why.
        call.decision = Decision.HALT
        call.stop = call.stop or stop or Stop(StopReason.ABORTED, "the run ended while the call was running")
    elif stop is not None:
        _discard(call, stop, denied)
    else:
        call.value = value
        if call.degraded is not None:
            call.decision = Decision.DEGRADE


def _usage_of(call: Call, value: Any) -> Usage | None:
    """What `value` says of its usage, unless a call below has paid for it already."""
    paid = call.billed_below is not None and any(value is one for one in call.billed_below)
    usage = None if paid else read_usage(value)
    above = call.above
    if above is not None and (paid or usage is not None):
        if above.billed_below is None:
            above.billed_below = []
        above.billed_below.append(value.value if type(value) is Reported else value)
    return usage or (Usage(cost_nanos=0) if paid and call.usage is None else None)


def _ask_before_charge(pipeline: ShieldPipeline, call: Call, cost: int) -> Verdict | None:
    """What refuses the charge; None if nothing does."""
    verdict = pipeline.judge(Slot.BUDGET, describe(call), to_usd(cost))
    return None if verdict is None or verdict.decision is Decision.DEGRADE else verdict


def _bill(call: Call, found: Usage | None, hinted_cost: int) -> tuple[int, int, int, bool]:
    """What the call cost, from what it reported or returned, else its hint; and whether that is known."""
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
    """The function returned too late, or its charge was refused: the caller gets the stop, not the value."""
    call.stop = stop
    call.decision = Decision.HALT if denied is None else denied.decision
    hook = "ExecutionContext" if denied is None else denied.hook
    call.context._run.record_stop(stop, call.decision, call.context._source, call.record, hook)


def fail(call: Call, error: BaseException) -> None:
    """The function raised: settle what that cost, and decide.

    What is no Exception of the call's own is raised again.
    """
    if type(error) is CancelledError and error.stop is call.token.stop:
        # The cancel itself, and nothing around it. When a run is aborted, every call under way comes through here.
        _end_stopped(call, call.stop or error.stop, error, free=False)
        return
    stopped = next((one for one in _leaves(error) if isinstance(one, Halted | CancelledError)), None)
    cut_off = call.token.is_cancelled or call.record.end_seq != OPEN
    if isinstance(stopped, Halted) and _may_be_kept(error):
        _end_stopped(call, stopped.stop, error, free=stopped is error)
    elif cut_off and _may_be_kept(error):
        _end_stopped(call, call.stop or stop_of(call.token), error, free=False)
    elif stopped is not None and _may_be_kept(error):
        # Something below was cancelled by itself: a child, another run. That stops this call, and nothing else.
        _end_stopped(call, stopped.stop, error, free=False)
    elif isinstance(error, Exception):
        end_failed(call, error)
    else:
        _end_stopped(call, call.token.stop or interruption(error), error, free=False)
        raise error


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The error itself; or, of a group that a task group made, the errors inside."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _may_be_kept(error: BaseException) -> bool:
    """Whether `error` is nothing but faults and cancels of ours: what else it is, nobody but the caller may catch."""
    if isinstance(error, BaseExceptionGroup):
        kept = (Exception, CancelledError, asyncio.CancelledError)
        return all(isinstance(one, kept) for one in _leaves(error))
    return isinstance(error, Exception | CancelledError)


def _end_stopped(call: Call, stop: Stop, error: BaseException, free: bool) -> None:
    """The call ends as halted: something stopped it while it ran."""
    run = call.context._run
    call.decision, call.stop, call.error = Decision.HALT, stop, error
    ended = settle_and_end(call, "halt", _failure_bill(call, error), free, str(stop), error)
    if run.breaker is not None:
        run.breaker.record_abandoned(call.permit)
    if ended:
        run.record_stop(stop, Decision.HALT, call.context._source, call.record, "ExecutionContext")


def end_failed(call: Call, error: Exception, never_ran: bool = False) -> None:
    """The call ends as failed: it may be tried again while the retry budget lasts."""
    run, record = call.context._run, call.record
    call.error = error
    told = told_by(error)
    drawn = error is call.failed_below
    if not drawn:
        with run.lock:
            drawn = accounts.draw_retry(call.context._account)
            if drawn:
                count_retry(record)
    free = never_ran or is_free_failure(error)
    settle_and_end(call, "fail", _failure_bill(call, error), free, told, error)
    if run.breaker is not None:
        run.breaker.record_failure(call.permit)
    verdict = run.pipeline.judge(Slot.RETRY, describe(call), error) if run.pipeline and run.asks(Slot.RETRY) else None
    if not drawn:
        message = f"{type(error).__name__}: {told}; the retry budget has nothing left for another attempt"
        call.decision, call.stop = Decision.HALT, Stop(StopReason.PROVIDER_ERROR, message)
        run.record_stop(call.stop, Decision.HALT, call.context._source, record, "ExecutionContext")
    elif verdict is not None and verdict.decision is not Decision.RETRY:
        call.decision = verdict.decision
        if verdict.decision is not Decision.DEGRADE:
            call.stop = Stop(verdict.stop_reason, verdict.reason)
        run.record_verdict(verdict, call.context._source, record)
    else:
        call.decision = RETRY


def told_by(error: BaseException) -> str:
    """The error's own message, bounded, whatever its `__str__` does."""
    try:
        return str(error)[:500]
    except Exception as failure:
        return f"<no message: its __str__ raised {type(failure).__name__}>"


def _failure_bill(call: Call, error: BaseException) -> tuple[int, int, int, bool] | None:
    """What a call that did not succeed is known to have cost; None if nobody said, or a call below has paid for it."""
    usage = call.usage
    if usage is None and error is not call.failed_below and not _says_nothing(error):
        usage = usage_of_failure(error)
    return None if usage is None else _bill(call, usage, call._held_cost if call.hinted else 0)


def _says_nothing(error: BaseException) -> bool:
    """Whether it is a cancel as we make them: nobody has written a bill on it, or raised it from something else."""
    return type(error) is CancelledError and error.__cause__ is None and vars(error).keys() == _FIELDS_OF_A_CANCEL


def settle_and_end(
    call: Call, status: Status, bill: tuple[int, int, int, bool] | None, free: bool, told: str, error: BaseException
) -> bool:
    """Settle at the bill, at nothing if it was free, else leave what it held unresolved; and write the end.

    False if the record had ended already.
    """
    run, record = call.context._run, call.record
    cost, tokens_in, tokens_out, known = bill or (0, 0, 0, True)
    now_ns = run.now()
    with run.lock:
        if bill is not None:
            accounts.settle(call, cost, tokens_in, tokens_out, False)
        elif free or run.settings.unknown_bill == "release" or call._held_cost == call._held_tokens == 0:
            accounts.release(call)
        elif call.state == "held":
            accounts.leave_unresolved(call)
        unknown = not known or (bill is None and not free and call.is_unpriced and error is not call.failed_below)
        if unknown is not call.unknown:
            _note_unknown(call, unknown)
        failed = type(error).__name__
        ended = run.graph.end(record, now_ns, status, cost, tokens_in or None, tokens_out or None, told, failed)
        if not ended and cost:
            run.graph.settle_late(record, now_ns, cost, tokens_in, tokens_out)
        record.owner = None
    if call.above is not None:
        call.above.failed_below = error
    if bill is not None and run.shared is not None:
        if record.kind == "system":
            holding.note_charge(run.shared, record, cost, tokens_in, tokens_out)
        elif not ended:
            holding.note_late_bill(run.shared, call, cost, tokens_in, tokens_out)
    return ended


def _note_unknown(call: Call, unknown: bool) -> None:
    """Nobody can tell what the call costs; or, of one that was abandoned, somebody can after all.

    To be written down before its end is; the caller holds the lock.
    """
    run = call.context._run
    run.unknown_costs += 1 if unknown else -1
    call.unknown = unknown
    if unknown and call.record.end_seq == OPEN:
        mark_cost_unknown(call.record)
    if run.shared is not None:
        holding.note_unknown(run.shared, call)


def leave_running(run: Run, record: CallRecord, now_ns: int, why: str) -> None:
    """End the record of a call whose function still runs; what it holds stays taken as unresolved. Under the lock."""
    call = record.owner
    held = call if isinstance(call, Call) and call.state == "held" else None
    if held is not None and held.is_unpriced:
        _note_unknown(held, True)
    run.graph.end(record, now_ns, "halt", stop_reason=why, abandoned=True)
    if held is not None:
        accounts.leave_unresolved(held)
        if run.shared is not None:
            holding.note_end(run.shared, held)


def abandon(call: Call, stop: Stop) -> bool:
    """Let the caller go while the function still runs; False if the call has ended already.

    What it holds stays taken as unresolved until the function is done and its bill is known. What it has begun itself
    is abandoned with it.
    """
    run, record = call.context._run, call.record
    call.decision, call.stop = Decision.HALT, stop
    now_ns = run.now()
    with run.lock:
        if record.end_seq != OPEN:
            return False
        below = [one for one in run.graph.open_calls() if one is record or one.is_under(record)]
        for one in below:
            leave_running(run, one, now_ns, str(stop))
    if run.shared is not None:
        run.shared.catch_up_soon()
    if run.breaker is not None:
        for one in below:
            if isinstance(left := one.owner, Call):
                run.breaker.record_abandoned(left.permit)
    run.record_stop(stop, Decision.HALT, call.context._source, record, "ExecutionContext")
    return True
