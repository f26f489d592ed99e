"""Wait, before a call starts, for what other calls hold.

`admission.admit` comes here when a call does not fit beside the holds of others, when others wait already, or when the
worst case of a model call is not known yet. The call then waits in the room of its ledger (`containment.waiting` has
the rules): its record is created, it holds nothing, and its time limit keeps running. A call that ends admits the next
ones under the same lock and wakes them. A cancel, a time limit and `max_wait_s` end the wait.

**Calls of unknown cost.** Without a hint, a model call holds the most that one of the run has cost so far. Before one
has succeeded, or failed with a bill, that is nothing, so under a money limit these calls run one at a time until then.
What the running one calls itself does not wait for it, but runs one at a time too. Runs that share the ceiling of a
ledger share this too: their calls hold the most that one of any run has cost, and run one at a time until the first of
all has ended so. So do runs that share an account in a store, which decides that itself (`containment.tickets`). The
same holds for tokens, which have no hint, under a token limit; a store does not know of that.

**Steps.** A step that takes nothing starts whether or not calls wait. A step whose call waits keeps its slot of the
graph's concurrency limit and the node that it uses exclusively: it has started, and `max_parallel=1` promises that no
other step runs in between. If it gave its slot away, it would come back with money held and no slot, and a graph inside
the step that has the slot could wait for just that money.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import time
from asyncio import current_task
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from penstock.containment import accounts
from penstock.containment.accounts import Account, Taken
from penstock.containment.ledger import UnhintedCalls
from penstock.containment.waiting import Waiter
from penstock.runtime.call import Call, CallSpec
from penstock.runtime.cancellation import call_on, drain_cancel, translate_cancel
from penstock.runtime.run import Run, WorstCase
from penstock.stops import Stop, StopReason
from penstock.tracing.events import CallWaiting
from penstock.tracing.record import CallRecord

SLICE_S = 0.1
"""A thread that waits wakes so often: a signal that another thread received is handled by the main thread then."""

Waits = Literal["no", "sync", "async"]
"""How a caller can wait: not at all, by blocking its thread, or in a task."""
Reclamp = Callable[[], "tuple[int | None, int]"]
"""Return the cost and tokens of the call with as much output as its budgets can pay for now; the cost is None if it is
not known."""

ON_A_LOOP = "; a sync call cannot wait for other calls on an event loop: await its async twin (allm, atool, acall_…)"
ONE_AT_A_TIME = (
    "the cost of model calls of this run is not known until one has succeeded, and under a money limit they run one at "
    "a time until then; pass a cost hint"
)
IN_ORDER = "calls that came earlier wait for room in the same budget"


class CallWaiter(Waiter):
    """A call of a run that waits."""

    __slots__ = ("args", "attempt", "call", "is_decided", "notify", "reclamp", "since_ns", "spec")

    def __init__(
        self,
        call: Call,
        spec: CallSpec,
        account: Account,
        args: tuple[Any, ...],
        attempt: int,
        now_ns: int,
        reclamp: Reclamp | None,
    ) -> None:
        super().__init__(
            call, account, 0, 0, call.context._run.worst_case[spec.kind].api_calls, attempt > 1, run=call.context._run
        )
        self.call = call
        self.spec = spec
        self.args = args
        self.attempt = attempt
        self.since_ns = now_ns
        self.reclamp = reclamp
        self.is_decided = False
        self.notify: Callable[[], None] | None = None
        self.estimate()

    def estimate(self) -> None:
        """Set the amounts of a call without a hint: the most that one like it has used so far."""
        run, spec = self.call.context._run, self.spec
        if self.reclamp is None or not self.number:  # what was clamped while it waited stays so
            worst, shared = run.worst_case[spec.kind], run.ledger.unhinted
            cost, tokens = worst.cost, worst.tokens
            if shared is not None and spec.kind == "llm":
                if accounts.has_cost_limit(run.ledger.root):
                    cost = max(cost, shared.most_cost)
                if accounts.has_token_limit(run.ledger.root):
                    tokens = max(tokens, shared.most_tokens)
            self.cost = cost if spec.hold_nanos is None else spec.hold_nanos
            self.tokens = tokens if spec.hold_tokens is None else spec.hold_tokens

    def waits_for(self) -> Taken | None:
        self.estimate()
        run = self.call.context._run
        shared = run.ledger.unhinted
        first: tuple[Taken, ...] = ()
        if run.first_calls and self._must_know(run.worst_case["llm"], self.account):
            first = run.first_calls
        if shared is not None and shared.first_calls and self._must_know(shared, run.ledger.root):
            first += shared.first_calls
        return next((call for call in first if not self._is_under(call)), None)

    def _must_know(self, known: WorstCase | UnhintedCalls, account: Account) -> bool:
        """Whether an amount that this call may use is unknown, and limited at the account."""
        spec = self.spec
        if spec.kind != "llm":
            return False
        if known.is_unknown and spec.hold_nanos is None and accounts.has_cost_limit(account):
            return True
        return known.tokens_unknown and spec.hold_tokens is None and accounts.has_token_limit(account)

    def was_taken(self) -> bool:
        return self.call.state == "held"

    def entered(self) -> None:
        run, spec = self.call.context._run, self.spec
        worst, shared = run.worst_case["llm"], run.ledger.unhinted
        if self._must_know(worst, self.account) or (shared is not None and self._must_know(shared, run.ledger.root)):
            run.begin_first_call(self.call, has_limits=True)
        elif spec.kind == "llm" and spec.hold_nanos is None and worst.is_unknown:
            run.begin_first_call(self.call, has_limits=False)

    def refusal(self, now_ns: int) -> Stop:
        if self.waits_for() is None:
            return super().refusal(now_ns)
        return _momentary(self.account, ONE_AT_A_TIME)

    def shrinks(self) -> bool:
        if self.reclamp is None:
            return False
        cost, tokens = self.reclamp()
        cost = self.cost if cost is None else cost
        is_less = (cost, tokens) != (self.cost, self.tokens) and cost <= self.cost and tokens <= self.tokens
        if is_less:
            self.cost, self.tokens = cost, tokens
        return is_less

    def blocked(self, seen: dict[object, Any]) -> Collection[Taken]:
        calls = (held for held in self.above if isinstance(held, Call))
        return [call for call in calls if call.record not in _above_running(call.context._run, seen)]

    def wake(self) -> None:
        self.is_decided = True
        if self.notify is not None:
            self.notify()

    def _is_under(self, other: Taken) -> bool:
        above = _enclosing(self.call)
        while above is not None and above is not other:
            above = _enclosing(above)
        return above is not None


def _above_running(run: Run, seen: dict[object, Any]) -> set[CallRecord]:
    """Return the calls under which something runs that does not wait. The caller has the lock.

    `seen` has what was found for other runs of the ledger.
    """
    if run in seen:
        found: set[CallRecord] = seen[run]
        return found
    seen[run] = found = set()
    open_calls = run.graph.open_calls()
    waiting = {call.record for waiter in run.room for call in _waiting_with(waiter, run, seen)}
    outer = {record.parent for record in open_calls}
    for record in open_calls:
        # A context has no owner: what runs in it are its calls.
        if record.owner is not None and record not in waiting and record not in outer:
            above = record.parent
            while above is not None and above not in found:
                found.add(above)
                above = above.parent
    return found


def _waiting_with(waiter: Waiter, run: Run, seen: dict[object, Any]) -> Iterator[Call]:
    """Yield the calls of the run that wait: the waiter's own, and those around it that made a call of another run.

    As long as anything runs in that other run, they do not count.
    """
    call = waiter.call if isinstance(waiter, CallWaiter) else None
    if call is not None and call.context._run is run:
        yield call
    while call is not None:
        inside, call = call, _enclosing(call)
        is_in_another = call is not inside.parent_call  # a call of this run may have made one of another run
        if call is not None and is_in_another and call.context._run is run:
            inner_run = inside.context._run
            if inner_run.graph.root not in _above_running(inner_run, seen):
                yield call


def take_or_wait(
    call: Call,
    spec: CallSpec,
    args: tuple[Any, ...],
    attempt: int,
    now_ns: int,
    waits: Waits,
    reclamp: Reclamp | None,
) -> Stop | None:
    """Take the worst case of the call, or return why not; `call.waiter` is set if it waits. The caller has the lock."""
    run, account = call.context._run, call.context._account
    waiter = CallWaiter(call, spec, account, args, attempt, now_ns, reclamp)
    waiter.above = holds_above(call)
    cost, tokens, api_calls = waiter.cost, waiter.tokens, waiter.api_calls
    if waiter.waits_for() is not None:
        why = accounts.used_up(account, now_ns, attempt > 1)
        stop = why or _momentary(account, ONE_AT_A_TIME)
    elif accounts.without_room(account, cost, tokens):
        stop = accounts.refusal(account, cost, tokens, api_calls, now_ns, attempt > 1)
    elif run.queues and not (_takes_nothing(waiter) or run.room.may_enter(waiter)):
        stop = _momentary(account, IN_ORDER)
    else:
        refused = accounts.take(call, account, cost, tokens, api_calls, now_ns, attempt > 1)
        if refused is None:
            waiter.entered()
        return refused
    if not stop.momentary or waits == "no" or not run.settings.max_wait_s:
        return stop
    if waits == "sync" and asyncio._get_running_loop() is not None:
        return replace(stop, message=stop.message + ON_A_LOOP)
    call.waiter = waiter
    return stop


def _takes_nothing(waiter: CallWaiter) -> bool:
    """Whether those that wait lose nothing if it goes first; a model call of unknown cost may take all there is."""
    return not waiter.cost and not waiter.tokens and waiter.spec.kind != "llm"


def _momentary(account: Account, message: str) -> Stop:
    return Stop(StopReason.BUDGET_EXCEEDED, message, budget=account.name, unit="usd", momentary=True)


def _enclosing(call: Call) -> Call | None:
    """Return the call that made this one: of its own run, or of another run with the same ledger."""
    parent = call.parent_call
    return getattr(call, "_outer_call", None) if parent is None else parent


def holds_above(call: Call) -> Collection[Taken]:
    """Return the calls that this one is part of, as far as others wait for them: they hold something, or run alone."""
    above, outer = [], _enclosing(call)
    while outer is not None:
        if outer.state == "held" and (outer._held_cost or outer._held_tokens or _runs_alone(outer)):
            above.append(outer)
        outer = _enclosing(outer)
    return above


def _runs_alone(call: Call) -> bool:
    return call in call.context._run.first_calls


def join(
    call: Call,
    parent: CallRecord,
    model: str | None,
    metadata: Mapping[str, Any] | None,
    now_ns: int,
    stop: Stop,
) -> None:
    """Record that the call waits, and let it wait. The caller has the lock."""
    run, waiter = call.context._run, call.waiter
    assert isinstance(waiter, CallWaiter)
    spec, source = waiter.spec, call.context._source
    call.record = run.graph.begin(parent, spec.kind, spec.name, model, source, now_ns, None, metadata, call)
    call.stop = stop
    record_wait(call, stop, now_ns)
    run.room.join(waiter)
    run.room.changed(now_ns)


def record_wait(call: Call, stop: Stop, now_ns: int) -> None:
    """Write that the call waits, and for what. The caller has the lock."""
    run, record = call.context._run, call.record
    if run.graph.closed:
        return
    run.graph.append(
        CallWaiting(
            **run.where(record.source, record.parent, now_ns),
            node_id=record.node_id,
            call_kind=record.kind,
            name=record.name,
            message=stop.message,
            budget=stop.budget,
            unit=stop.unit,
            limit=stop.limit,
            used=stop.used,
            held=stop.held,
            asked=stop.asked,
        )
    )


def wait_sync(call: Call) -> Stop | None:
    """Block this thread until the call is admitted; return why it is not, if it is refused."""
    waiter, token = call.waiter, call.token
    assert isinstance(waiter, CallWaiter)
    woken = _thread.allocate_lock()
    woken.acquire()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # it is awake already
            woken.release()

    waiter.notify = wake
    remove = token.add_callback(wake)
    ends = time.monotonic() + _max_wait_s(call)
    try:
        while not waiter.is_decided and not token.is_cancelled and time.monotonic() < ends:
            woken.acquire(timeout=max(0.0, min(SLICE_S, ends - time.monotonic())))
    finally:
        remove()
    return _end(call, waiter)


async def wait_async(call: Call) -> Stop | None:
    """Wait, in a task, until the call is admitted; return why it is not, if it is refused."""
    waiter, token, task = call.waiter, call.token, current_task()
    assert isinstance(waiter, CallWaiter)
    assert task is not None
    loop = task.get_loop()
    woken = loop.create_future()

    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    waiter.notify = lambda: call_on(loop, wake)
    requested = task.cancelling()
    watching = token.watch(task)
    timer = loop.call_later(_max_wait_s(call), wake)
    try:
        if not waiter.is_decided and not token.is_cancelled:
            await woken
    except asyncio.CancelledError as error:
        if translate_cancel(token, task, error, requested) is error:
            raise
    finally:
        timer.cancel()
        if watching and token.unwatch(task) is not None:
            await drain_cancel(task, requested)
    return _end(call, waiter)


def _max_wait_s(call: Call) -> float:
    left_s = call.token.seconds_left()
    longest_s = call.context._run.settings.max_wait_s
    return longest_s if left_s is None else min(left_s, longest_s)


def _end(call: Call, waiter: CallWaiter) -> Stop | None:
    """End the wait: the call starts, or is refused."""
    run = call.context._run
    now_ns = run.now()
    stop = call.stop
    with run.lock:
        if leave(call, now_ns):
            waited_s = (now_ns - waiter.since_ns) / 1e9
            assert stop is not None
            message = f"{stop.message}; waited {waited_s:.3g} s for other calls to end"
            waiter.stop = replace(stop, message=message)
        _start(call, waiter, now_ns)
    if waiter.stop is not None and call.token.is_cancelled:
        return call.token.stop
    return waiter.stop


def _start(call: Call, waiter: CallWaiter, now_ns: int) -> None:
    waited_ms = (now_ns - waiter.since_ns) // 1_000_000
    about = {**(call.record.metadata or {}), "waited_ms": waited_ms}
    call.context._run.graph.start(call.record, now_ns, about)


def leave(call: Call, now_ns: int) -> bool:
    """Take the call out of the room; False if it was admitted or refused before. The caller has the lock."""
    waiter, call.waiter, call.stop = call.waiter, None, None
    run = call.context._run
    if not isinstance(waiter, CallWaiter) or not run.room.leave(waiter):
        return False
    if run.queues:
        run.room.changed(now_ns)
    return True


def give_up(call: Call, now_ns: int, stop: Stop) -> None:
    """End the wait of a call from elsewhere: its record is about to be ended. The caller has the lock."""
    waiter = call.waiter
    if isinstance(waiter, CallWaiter):
        if leave(call, now_ns):
            waiter.stop = stop
        _start(call, waiter, now_ns)
        waiter.wake()
