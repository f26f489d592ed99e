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
from collections.abc import Callable, Iterator
from contextvars import ContextVar, Token
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from penstock.clock import utc_from_ns
from penstock.containment import accounts
from penstock.containment.accounts import Hold
from penstock.containment.limits import UNLIMITED
from penstock.containment.safety import Decision, ToolCallContext
from penstock.containment.shield import ShieldPipeline, Slot, Verdict
from penstock.errors import BudgetExceededError, CancelledError, Halted, InvalidValue, LedgerError
from penstock.money import Usd, to_usd
from penstock.runtime import worker
from penstock.runtime.cancellation import CancellationToken
from penstock.runtime.usage import (
    WITHOUT_USAGE,
    Reported,
    Usage,
    is_free_failure,
    read_usage,
    retry_after_s,
    usage_of_failure,
)
from penstock.stops import LIMIT_REASONS, Stop, StopReason
from penstock.tracing.events import DivergenceTrace
from penstock.tracing.lifecycle import CallKind, Status
from penstock.tracing.record import OPEN, CallRecord

if TYPE_CHECKING:
    from penstock.runtime.handle import Handle

current_call: ContextVar[Call | None] = ContextVar("penstock_call", default=None)
"""The call that is being executed here; calls made meanwhile are its children."""

ALLOW, RETRY = Decision.ALLOW, Decision.RETRY
"""Every call reads them, and looking a member up in its enum costs as much as a function call."""


class Call:
    """One call on its way through the door, and what came of it."""

    __slots__ = (
        "above",
        "attempt",
        "billed_below",
        "context",
        "decision",
        "degraded",
        "drawn_below",
        "error",
        "hinted",
        "hold",
        "permit",
        "record",
        "stop",
        "token",
        "usage",
        "value",
    )

    def __init__(
        self,
        context: Handle,
        record: CallRecord,
        hinted: bool,
        token: CancellationToken,
        above: Call | None = None,
    ) -> None:
        self.context = context
        self.record = record
        self.hinted = hinted
        self.token = token
        self.above = above
        """The call of the same run that made this one."""
        self.billed_below: list[Any] | None = None
        """Values whose usage a call made by this one has paid for: handing one on costs nothing more."""
        self.drawn_below: BaseException | None = None
        """The last error for which a call made by this one has drawn a retry: passing it on draws no other."""
        self.hold: Hold | None = None
        self.decision: Decision = ALLOW
        self.value: Any = None
        self.error: BaseException | None = None
        self.stop: Stop | None = None
        """Why the call did not run, or was stopped; None if nothing stopped it."""
        self.degraded: Verdict | None = None
        """Set when a hook let the call run in degraded form only."""
        self.usage: Usage | None = None
        """What the function itself reported while it ran."""
        self.permit: int | None = None
        self.attempt = 1

    @property
    def node_id(self) -> str:
        """The id of this call in the run's graph."""
        return self.record.node_id

    @property
    def cost_usd(self) -> float:
        """What the call cost, as far as that is settled."""
        late = self.record.settled
        settled = getattr(self.record, "cost", 0) + (late.cost if late else 0)
        return to_usd(settled)

    @property
    def degraded_model(self) -> str | None:
        """The model a hook wants instead, if the call runs in degraded form."""
        return self.degraded.model if self.degraded else None

    def settle(
        self,
        *,
        cost_usd: Usd = 0,
        input_tokens: int = 0,
        output_tokens: int = 0,
    ) -> None:
        """Say what a call with an unknown bill has cost after all, 0 if nothing; LedgerError if its bill is known."""
        usage = Usage.of(cost_usd=cost_usd, input_tokens=input_tokens, output_tokens=output_tokens)
        run, cost = self.context._run, usage.cost_nanos or 0
        if self.hold is None or self.hold.state != "unresolved":
            raise LedgerError(f"the bill of call {self.node_id} is not open")
        now_ns = run.now()
        with run.lock:
            accounts.settle(self.hold, cost, input_tokens, output_tokens, False)
            run.graph.settle_late(self.record, now_ns, cost, input_tokens, output_tokens)

    def result(self) -> Any:
        """The value; or raise what kept the call from having one."""
        if self.stop is not None:
            raise stopped(self.context, self.stop) from self.error
        if self.error is not None:
            raise self.error
        return self.value


def stopped(context: Handle, stop: Stop) -> Halted | CancelledError:
    """The exception that tells of `stop`, with what was used and what is already there."""
    if stop.reason is StopReason.ABORTED:
        return CancelledError(stop.message, stop=stop)
    partial = context._run.partial_results()
    if stop.reason in LIMIT_REASONS:
        return BudgetExceededError(
            context.usage, context._budget_behind(stop), stop.message, stop=stop, partial=partial
        )
    return Halted(stop, partial=partial)


# Recorded and contained.


def enter(
    context: Handle,
    kind: CallKind,
    name: str,
    hint: int | None,
    model: str | None,
    token: CancellationToken,
    args: tuple[Any, ...] = (),
    attempt: int = 1,
) -> Call:
    """Write the call down and judge it. If it may run, `stop` is None and it holds its worst case."""
    run = context._run
    base = context._base
    above = current_call.get()
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
    cost, tokens = (worst.cost, worst.tokens) if hint is None else (hint, 0)
    now_ns = run.now()
    metadata = None if attempt == 1 else {"attempt": attempt}
    with run.lock:
        while parent.end_seq != OPEN and parent.parent is not None:
            # What made the call is over already: a task that outlives it, a function that was left behind.
            parent = parent.parent
        record = run.graph.begin(parent, kind, name, model, context._source, now_ns, True, metadata)
        taken: Hold | Stop
        if cancelled is not None and cancelled.stop.reason is StopReason.ABORTED:
            taken = cancelled.stop
        else:
            taken = accounts.hold(context._account, cost, tokens, worst.api_calls, now_ns, attempt > 1)
        call = Call(context, record, hint is not None, token, above)
        record.owner = call
        if not isinstance(taken, Stop):
            call.hold = taken
    if isinstance(taken, Stop):
        _refuse(call, taken)
        return call
    call.attempt = attempt
    if now_ns >= token.deadline_ns or cancelled is not None:
        # A deadline that no account knows of: the token's own, or that of one above it.
        token.is_cancelled  # noqa: B018
        stop = token.stop or (cancelled.stop if cancelled else None)
        if stop is not None:
            _refuse(call, stop)
            return call
    try:
        if hint is None and run.demands_price:
            _demand_a_price(call, kind, model)
        if call.stop is None and args and run.divergence is not None and attempt == 1:
            _watch_shape(call, args)
        if call.stop is None and run.guarded:
            _ask_guards(call)
    except BaseException as error:
        if call.stop is None:
            _refuse(call, _interruption(error))
        raise
    return call


def _demand_a_price(call: Call, kind: CallKind, model: str | None) -> None:
    run = call.context._run
    if run.settings.strict:
        message = "the run is strict and the call has no cost hint; pass one (cost_hint_usd=…), 0 if it is free"
        _refuse(call, Stop(StopReason.PRICE_UNKNOWN, message))
    elif kind == "llm" and model is not None and not run.prices.is_priced(model):
        message = f"no price is known for model {model!r}; register one, or pass a cost hint"
        _refuse(call, Stop(StopReason.PRICE_UNKNOWN, message))


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
            _refuse(call, stop)


def _ask_guards(call: Call) -> None:
    run, record = call.context._run, call.record
    if run.pipeline is not None:
        slot = Slot.PRE_DISPATCH if record.kind == "llm" else Slot.TOOL_DISPATCH
        if run.pipeline.has(slot):
            verdict = run.pipeline.judge(slot, describe(call))
            if verdict is not None and verdict.decision is not Decision.DEGRADE:
                stop = Stop(verdict.stop_reason, verdict.reason)
                _refuse(call, stop, verdict.decision, hook=verdict.hook)
                return
            if verdict is not None:
                call.degraded = verdict
                run.record_verdict(verdict, call.context._source, record)
    if run.breaker is not None:
        decision = run.breaker.check(call.context._policy_context())
        call.permit = decision.permit
        if not decision.allowed:
            _refuse(call, Stop(StopReason.CIRCUIT_OPEN, decision.reason))


def describe(call: Call) -> ToolCallContext:
    """What hooks are told about a call."""
    record, who = call.record, call.context._run.metadata
    return ToolCallContext(
        request_id=who.request_id,
        tool_name=record.name,
        kind=record.kind,
        model=record.model or who.model,
        cost_usd=to_usd(call.hold.cost) if call.hold else 0.0,
        chain_id=who.chain_id,
        node_id=record.node_id,
        org_id=who.org_id,
        team=who.team,
        service=who.service,
        user_id=who.user_id,
        tags=who.tags,
    )


def _refuse(call: Call, stop: Stop, decision: Decision = Decision.HALT, hook: str = "ExecutionContext") -> None:
    """The call does not run: give back what it held, and write down why."""
    context, run, record = call.context, call.context._run, call.record
    call.decision, call.stop = decision, stop
    if stop.reason in LIMIT_REASONS:
        context._remember(stop)
    now_ns = run.now()
    with run.lock:
        if call.hold is not None and call.hold.state == "held":
            accounts.withdraw(call.hold)
        elif call.hold is not None and call.hold.state == "unresolved":
            accounts.release(call.hold)
        run.graph.end(record, now_ns, "halt", stop_reason=str(stop))
        record.owner = None
    run.record_stop(stop, decision, context._source, record, hook)


# Settled and recorded.


def succeed(call: Call, value: Any) -> None:
    """The function returned: settle what it cost, and give its value unless the call was stopped meanwhile."""
    run, record, hold = call.context._run, call.record, call.hold
    assert hold is not None
    cost, tokens_in, tokens_out, known = hold.cost if call.hinted else 0, 0, 0, True
    if type(value) not in WITHOUT_USAGE or call.usage is not None:
        cost, tokens_in, tokens_out, known = _bill(call, _usage_of(call, value), cost)
        if type(value) is Reported:
            value = value.value
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
    with run.lock:
        accounts.settle(hold, cost, tokens_in, tokens_out, stop is None)
        if not known:
            run.unknown_costs += 1
        if not call.hinted and (cost > hold.cost or tokens_in + tokens_out > hold.tokens):
            run.worst_case[record.kind].learn(cost, tokens_in + tokens_out)
        if stop is None:
            ended = run.graph.end(record, now_ns, "success", cost, tokens_in or None, tokens_out or None)
            if ended:
                run.results.append((record, value))
        else:
            ended = run.graph.end(record, now_ns, "halt", cost, tokens_in or None, tokens_out or None, str(stop))
        if not ended:
            run.graph.settle_late(record, now_ns, cost, tokens_in, tokens_out)
        record.owner = None
    if run.breaker is not None:
        run.breaker.record_success(call.permit)
    if run.divergence is not None and (cost or tokens_in or tokens_out):
        _watch_rate(call, now_ns, cost, tokens_in + tokens_out)
    if not ended:
        # Whoever ended the record has told why.
        call.decision = Decision.HALT
        call.stop = call.stop or stop or Stop(StopReason.ABORTED, "the run ended while the call was running")
    elif stop is not None:
        _discard(call, stop, denied)
    else:
        call.value = value
        call.decision = ALLOW if call.degraded is None else Decision.DEGRADE


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
    if record.model is None:
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
    halt = next((one for one in _leaves(error) if isinstance(one, Halted)), None)
    cut_off = call.token.is_cancelled or call.record.end_seq != OPEN
    if halt is not None and _may_be_kept(error):
        _end_stopped(call, halt.stop, error, free=halt is error)
    elif cut_off and _may_be_kept(error):
        _end_stopped(call, call.stop or _stop_of(call.token), error, free=False)
    elif isinstance(error, Exception):
        _end_failed(call, error)
    else:
        _end_stopped(call, call.token.stop or _interruption(error), error, free=False)
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


def _interruption(error: BaseException) -> Stop:
    return Stop(StopReason.ABORTED, f"interrupted by {type(error).__name__}")


def _stop_of(token: CancellationToken) -> Stop:
    return token.stop or Stop(StopReason.ABORTED, "cancelled")


def _end_stopped(call: Call, stop: Stop, error: BaseException, free: bool) -> None:
    """The call ends as halted: something stopped it while it ran."""
    run = call.context._run
    call.decision, call.stop, call.error = Decision.HALT, stop, error
    ended = _settle_and_end(call, "halt", _failure_bill(call, error), free, str(stop), type(error).__name__)
    if run.breaker is not None:
        run.breaker.record_abandoned(call.permit)
    if ended:
        run.record_stop(stop, Decision.HALT, call.context._source, call.record, "ExecutionContext")


def _end_failed(call: Call, error: Exception, never_ran: bool = False) -> None:
    """The call ends as failed: it may be tried again while the retry budget lasts."""
    run, record = call.context._run, call.record
    call.error = error
    told = told_by(error)
    drawn = error is call.drawn_below
    if not drawn:
        with run.lock:
            drawn = accounts.draw_retry(call.context._account)
            if drawn:
                record.retries += 1
    if drawn and call.above is not None:
        call.above.drawn_below = error
    free = never_ran or is_free_failure(error)
    _settle_and_end(call, "fail", _failure_bill(call, error), free, told, type(error).__name__)
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
    """What a call that did not succeed is known to have cost; None if nobody said."""
    usage = call.usage or usage_of_failure(error)
    hold = call.hold
    assert hold is not None
    return None if usage is None else _bill(call, usage, hold.cost if call.hinted else 0)


def _settle_and_end(
    call: Call, status: Status, bill: tuple[int, int, int, bool] | None, free: bool, told: str, error_class: str
) -> bool:
    """Settle at the bill, at nothing if it was free, else leave what it held unresolved; and write the end.

    False if the record had ended already.
    """
    run, record, hold = call.context._run, call.record, call.hold
    assert hold is not None
    cost, tokens_in, tokens_out, known = bill or (0, 0, 0, True)
    now_ns = run.now()
    with run.lock:
        if bill is not None:
            accounts.settle(hold, cost, tokens_in, tokens_out, False)
        elif free or run.settings.unknown_bill == "release" or hold.cost == hold.tokens == 0:
            accounts.release(hold)
        elif hold.state == "held":
            accounts.leave_unresolved(hold)
        if not known or (bill is None and not free and hold.cost == 0 and record.kind == "llm" and not call.hinted):
            run.unknown_costs += 1
        ended = run.graph.end(record, now_ns, status, cost, tokens_in or None, tokens_out or None, told, error_class)
        if not ended and cost:
            run.graph.settle_late(record, now_ns, cost, tokens_in, tokens_out)
        record.owner = None
    return ended


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
        below = [one for one in run.graph.open_calls() if one is record or _is_below(one, record)]
        for one in below:
            run.graph.end(one, now_ns, "halt", stop_reason=str(stop), abandoned=True)
            left = one.owner
            if isinstance(left, Call) and left.hold is not None and left.hold.state == "held":
                accounts.leave_unresolved(left.hold)
    if run.breaker is not None:
        for one in below:
            if isinstance(left := one.owner, Call):
                run.breaker.record_abandoned(left.permit)
    run.record_stop(stop, Decision.HALT, call.context._source, record, "ExecutionContext")
    return True


def _is_below(one: CallRecord, record: CallRecord) -> bool:
    above = one.parent
    while above is not None and above.depth > record.depth:
        above = above.parent
    return above is record


# Executed.

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
) -> Call:
    """Run `fn(*args)` as one recorded, contained call; again, if it fails and may be retried."""
    attempt = 1
    around = context._token
    above = current_call.get()
    if above is not None and above.context._token is around and above.record.end_seq == OPEN:
        around = above.token
    while True:
        token = around if timeout_s is None else around.child(name, deadline_s=timeout_s)
        made = enter(context, kind, name, hint, model, token, args, attempt)
        if made.stop is None:
            _execute(made, fn if made.degraded is None or degraded is None else degraded, args)
        if made.decision is not RETRY or attempt > retries:
            return made
        pause_s = retry_pause(made)
        if pause_s:
            around.wait_sync(pause_s)
        attempt += 1


def _execute(made: Call, fn: Work, args: tuple[Any, ...]) -> None:
    previous = current_call.set(made)
    try:
        if _may_need_the_caller_back(made):
            _execute_on_worker(made, fn, args)
        else:
            try:
                value = fn(*args)
            except BaseException as error:
                fail(made, error)
            else:
                _accept(made, fn, value)
    finally:
        current_call.reset(previous)


def _accept(made: Call, fn: Work, value: Any) -> None:
    """Take the value of a sync function; a coroutine is none, and nobody here could await it."""
    if type(value) is not CoroutineType:
        succeed(made, value)
        return
    value.close()
    misuse = InvalidValue("fn", fn, "a sync function; await allm, atool, acall_… or awrap_… for an async one")
    made.error = misuse
    _settle_and_end(made, "fail", None, True, str(misuse), type(misuse).__name__)
    if made.context._run.breaker is not None:
        made.context._run.breaker.record_abandoned(made.permit)
    raise misuse


def _may_need_the_caller_back(made: Call) -> bool:
    run = made.context._run
    mode = run.settings.sync_calls
    if mode == "auto":
        return made.token.deadline_ns < UNLIMITED or run.external_token
    return mode == "thread"


def _execute_on_worker(made: Call, fn: Work, args: tuple[Any, ...]) -> None:
    def finish_late(value: Any, error: BaseException | None) -> None:
        # Nobody is there to be told: only the bill matters now.
        try:
            succeed(made, value) if error is None else fail(made, error)
        except BaseException as raised:
            if raised is not error:
                raise

    token = made.token
    job = worker.Job(lambda: fn(*args), finish_late)
    remove = token.add_callback(job.wake)
    try:
        try:
            worker.start(job)
        except RuntimeError as error:  # no thread is to be had
            _end_failed(made, error, never_ran=True)
            return
        finished = job.wait(token.seconds_left())
    except BaseException as error:
        abandon(made, _interruption(error))
        if not job.leave():
            finish_late(job.value, job.error)
        raise
    finally:
        remove()
    if not finished:
        token.is_cancelled  # noqa: B018  notices the deadline
        abandon(made, _stop_of(token))
    elif job.error is not None:
        fail(made, job.error)
    else:
        _accept(made, fn, job.value)


async def acall(
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
) -> Call:
    """Await `fn(*args)` as one recorded, contained call; again, if it fails and may be retried."""
    attempt = 1
    while True:
        token = context._token if timeout_s is None else context._token.child(name, deadline_s=timeout_s)
        made = enter(context, kind, name, hint, model, token, args, attempt)
        if made.stop is None:
            await _execute_awaiting(made, fn if made.degraded is None or degraded is None else degraded, args)
        if timeout_s is not None:
            token.close()
        if made.decision is not RETRY or attempt > retries:
            return made
        pause_s = retry_pause(made)
        if pause_s:
            await pause(context._token, pause_s)
        attempt += 1


async def _execute_awaiting(made: Call, fn: Work, args: tuple[Any, ...]) -> None:
    task = current_task()
    assert task is not None
    token = made.token
    requested = task.cancelling()
    watching = token.watch(task)
    previous = current_call.set(made)
    try:
        if token.cancellation is not None:
            raise CancelledError(stop=token.stop)
        value = fn(*args)
        if type(value) is CoroutineType or hasattr(type(value), "__await__"):
            value = await value
    except BaseException as error:
        fail(made, _taken_back(token, task, error, requested))
    else:
        succeed(made, value)
    finally:
        _leave(previous)
        if watching and token.unwatch(task) is not None:
            await _absorb(task, requested)


def _leave(previous: Token[Call | None]) -> None:
    try:  # noqa: SIM105  in every call; a context manager costs more than all of this
        current_call.reset(previous)
    except ValueError:
        # A coroutine that nobody finishes is closed from elsewhere, where there is nothing to reset.
        pass


def _taken_back(
    token: CancellationToken, task: asyncio.Task[Any], error: BaseException, requested: int
) -> BaseException:
    """If `error` is the interruption our own cancel caused, take it back from the task and name it as ours.

    `requested` is how many cancels the task had when we began to watch it. If one more than ours has come since then,
    somebody else wants the task to end too: ours is taken back, theirs goes on.
    """
    if isinstance(error, asyncio.CancelledError):
        delivery = token.delivery_to(task)
        if delivery is not None:
            delivery.pending = False
            if task.uncancel() <= requested:
                return CancelledError(stop=token.stop)
    return error


async def _absorb(task: asyncio.Task[Any], requested: int) -> None:
    """Our interruption was swallowed, or has not struck yet: it must not strike what the task does next."""
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        if task.uncancel() > requested:
            raise
    else:
        task.uncancel()


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
        if _taken_back(token, task, error, requested) is error:
            raise
    finally:
        if watching and token.unwatch(task) is not None:
            await _absorb(task, requested)


def retry_pause(made: Call) -> float:
    """How long the provider asked us to wait before the next attempt; 0 if it did not."""
    run = made.context._run
    return retry_after_s(made.error, utc_from_ns(run.clock.time_ns())) or 0.0 if made.error else 0.0
