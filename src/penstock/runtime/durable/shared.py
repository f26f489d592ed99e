"""A budget that several processes share: a run's account in a ledger store, and the acts not yet reported there.

The store decides for all processes, the run's own ledger for this run; a call needs both. A call's hold is taken at the
store before the call starts, and a call that the store cannot record does not start. Its outcome is reported
afterwards, and that may fail: the call has happened, so the run continues, the hold stays taken at the store, which is
the safe side, and the report waits here, in order, for the next act.

Every act has a key, and a store applies each key once, so an act whose answer was lost can be repeated. Where it is not
known whether a hold was recorded, it is withdrawn later, if it exists.

A call that only the holds of others keep out may wait at the store with a ticket (`take`, then `renew` until the answer
is another one). It holds nothing meanwhile. What to do between two requests is up to the caller.

Its operations at the store are coroutines over an `AsyncLedger`: tasks await them, threads run them with `blocking`.
Knows no calls; `remote_holds` connects it to admission.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol, TypedDict, TypeVar

from penstock import checks
from penstock.containment.ledger import Amounts, LedgerStore, TicketRequest, WouldBlock
from penstock.containment.limits import Budget, Limits
from penstock.containment.tickets import Waiting
from penstock.errors import InvalidValue, KeyTaken, LedgerError, LedgerUnavailable
from penstock.runtime import worker
from penstock.runtime.durable import failpoints
from penstock.runtime.durable.async_ledger import AsyncLedger, blocking, drop_lease, ignore, keep_lease, mode
from penstock.runtime.durable.blocks import end_block, is_block, make_room
from penstock.runtime.locking import unlock
from penstock.stops import LIMIT_REASONS, Stop, StopReason
from penstock.tracing.record import OPEN, CallRecord

T = TypeVar("T")

ShrinkAmounts = Callable[[Stop], Amounts | None]
"""Return the amounts to request in place of those that were refused; None for nothing."""

UNPRICED = "/unpriced"
"""Suffix of the key of a call that starts without a known price."""
MAX_ROOM_MADE = 8
"""Maximum number of times that blocks make room for one request."""
MAX_HOLD_REQUESTS = 4
"""Maximum number of hold requests for one call, each for less: the parents of the refusing account may refuse too."""
LEASE_S = 10.0
"""How long a store keeps the ticket of a call of which it hears nothing more."""
GRACE_S = 10.0
"""How much later than the call itself the store ends its wait, for a call that cannot any more."""
MAX_INLINE_ACTS = 8
"""Maximum number of waiting acts reported on the event loop before other tasks run; more would block it."""

Do = Callable[[AsyncLedger], Awaitable[object]]
"""What an act does at the store."""


class _HoldOptions(TypedDict, total=False):
    """Options of a hold at the store; what a store need not know is left out."""

    retry_drawn: bool
    under: str
    unhinted_lease_s: float


class _Request(NamedTuple):
    """A request for a hold."""

    key: str
    ask: Amounts
    shrink: ShrinkAmounts | None
    max_wait_s: float | None
    options: _HoldOptions


class Act(NamedTuple):
    """An act not yet reported to the store."""

    key: str
    do: Do


class HeldCall(Protocol):
    """A call, as far as its outcome is reported to a store."""

    record: CallRecord
    unknown: bool
    """Whether it was billed and its cost is unknown."""

    @property
    def state(self) -> str | None:
        """The state of its hold; None if nothing was held."""

    @property
    def is_unpriced(self) -> bool:
        """Whether it may be billed although nothing is held for it."""


class _Turn:
    """Whose turn it is to report acts: a thread's, which has `lock` meanwhile, or that of a task of any event loop.

    Threads wait for each other, and tasks for the one that has the turn. A thread does not wait for a task, whose loop
    may be the one that it keeps: a sync call on an event loop waits for its worker.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Reentrant, because a signal handler may report acts in the middle of a report."""
        self.task: object | None = None
        """What a task that has the turn passed to `take`; set and read under the lock."""
        self._starting = threading.Lock()
        """So that `lock` is found taken only while a thread has the turn."""
        self._wakes: deque[Callable[[], object]] = deque()

    async def take(self, task: object) -> None:
        """Wait for the turn, as a task."""
        loop = asyncio.get_running_loop()
        while not self._try_take(task):
            woken = asyncio.Event()
            self._wakes.append(partial(loop.call_soon_threadsafe, woken.set))
            if self._try_take(task):  # the turn ended before it could wake this task
                return
            await woken.wait()

    def _try_take(self, task: object) -> bool:
        with self._starting:
            try:  # a signal handler may raise as soon as the lock is acquired
                if self.task is None and self.lock.acquire(blocking=False):
                    self.task = task
            finally:
                unlock(self.lock)
        return self.task is task

    def give(self, task: object) -> None:
        """End the turn of a task, if it has it."""
        if self.task is task:
            self.task = None
            self.wake()

    def wake(self) -> None:
        """Wake the tasks that wait, after the turn has ended."""
        while self._wakes:
            with suppress(IndexError, RuntimeError):  # another one has woken it, or its loop is closed
                self._wakes.popleft()()


class SharedBudget:
    """An account of `store` that a run also pays from; `prefix` is `run id/claim`, unique to each claim.

    Pass it as `ExecutionContext(shared_budget=…)`. The account has to be open. One run uses it at a time. `unknown`
    names another account, opened when it is needed, which counts the calls whose cost is unknown. Calls of different
    owners that wait for the same room take turns; `owner` is the owner of the run. `above` are the accounts above it,
    the lowest first, as far as `blocks` may make room there; the first one may be a block.
    """

    def __init__(
        self,
        store: LedgerStore,
        account: str,
        *,
        prefix: str,
        unknown: str | None = None,
        owner: str = "",
        above: Sequence[str] = (),
    ) -> None:
        checks.text("account", account, minimum=1)
        checks.text("prefix", prefix)
        checks.text("owner", owner)
        if not all(prefix.rpartition("/")):
            raise InvalidValue("prefix", prefix, "the run's id, a slash, and a name unique to this claim")
        self.store = store
        self.ledger = AsyncLedger(store)
        self.account = account
        self.unknown_account = unknown
        """Account that counts each call of unknown cost as an api call, and as a token too once the cost becomes known;
        None for no such account."""
        self.prefix = prefix
        self.owner = owner
        self.above = tuple(above)
        self._block = above[0] if above and is_block(above[0]) else None
        """The block that this account is in; None once the block has ended."""
        self._costs: dict[str, int] = {}
        """What calls in that block are held for, and calls that wait; by key."""
        self.on_fault: Callable[[str], None] | None = None
        """Called when the store cannot be updated: once when that begins, and each time an act is given up."""
        self._lock = threading.Lock()
        """Guards the in-memory state; no blocking operation runs under it."""
        self._turn = _Turn()
        """Taken while waiting acts are reported to the store: in order, one at a time."""
        self._waiting: deque[Act] = deque()
        self._open: set[str] = set()
        self._asking: set[str] = set()
        """Keys being requested from the store, and keys taken whose calls have no known outcome yet: a caller may have
        left, and what was taken for it is only then given back."""
        self._unhinted: set[str] = set()
        """Keys of model calls of unknown cost that are held, wait or ask."""
        self._queued: dict[str, bool] = {}
        """Keys with a ticket, and whether the retry of their attempt was drawn."""
        self._is_over = False
        self._refusing: set[str | None] = set()
        self._undrawn = 0
        self._is_behind = False
        self._is_flush_scheduled = False

    @property
    def waiting(self) -> int:
        """Number of acts not yet reported to the store."""
        return len(self._waiting)

    @property
    def asking(self) -> int:
        """Number of calls that are requesting a hold, or were admitted and have not ended.

        Once a run is over, these are the calls whose callers did not wait for the answer: what the store takes for them
        is given back when it has answered.
        """
        return len(self._asking)

    def key(self, node_id: str, *, unpriced: bool = False) -> str:
        """Return the key of the call of that id at the store.

        If calls of unknown cost are counted, the key of a call without a known price contains that fact: should its
        process die, another process could not distinguish it from a call that costs nothing.
        """
        is_counted = unpriced and self.unknown_account is not None
        return f"{self.prefix}/{node_id}{UNPRICED if is_counted else ''}"

    def recover(self) -> tuple[str, ...]:
        """Run `arecover` on this thread, which it blocks."""
        return blocking(self.arecover())

    async def arecover(self) -> tuple[str, ...]:
        """Mark holds left by earlier claims of this run as unresolved, as their bills are unknown; return their keys.

        A claim that is still at work loses nothing by this: what it held stays taken, and can still be settled. Calls
        among them without a known price are counted as of unknown cost. Calls that still wait leave the queue.
        """
        ledger = self.ledger
        for key in self._left_behind(await ledger.queued(f"{self.run_id}/")):
            await _try_each(key, ledger.leave_queue)
        left = self._left_behind(await ledger.held(f"{self.run_id}/"))
        for key in left:
            if key.endswith(UNPRICED):
                await self._count_unknown(ledger, key)
            await _try_each(key, ledger.leave_unresolved)  # unless it has ended since `held` was read
        return left

    def _left_behind(self, listed: Mapping[str, Amounts]) -> tuple[str, ...]:
        """Return the listed keys of earlier claims of this run."""
        return tuple(key for key in listed if not key.startswith(f"{self.prefix}/"))

    @property
    def run_id(self) -> str:
        """The id of the run, which all of its claims share."""
        return self.prefix.rpartition("/")[0]

    def try_inline(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of `ask` if it need not wait for the store; raise WouldBlock if it must."""
        if self.ledger.is_immediate:
            return blocking(ask())
        inline = self.ledger.try_inline
        if inline is None or self.waiting > MAX_INLINE_ACTS or not self._turn.lock.acquire(blocking=False):
            raise WouldBlock
        answers: list[T] = []
        try:
            if self._turn.task is not None:
                raise WouldBlock
            with suppress(Exception):  # the request that follows, which may wait, reports the error
                inline(lambda: answers.append(blocking(ask())))
        finally:
            self._turn.lock.release()
            self._turn.wake()
        if not answers:
            raise WouldBlock
        return answers[0]

    # Before a call.

    async def take(
        self,
        key: str,
        ask: Amounts,
        retried: bool,
        shrink: ShrinkAmounts | None = None,
        *,
        max_wait_s: float | None = None,
        under: str | None = None,
        is_unhinted: bool = False,
    ) -> Stop | Waiting | None:
        """Hold `ask` at the store, or return the stop that refuses it; any failure refuses.

        `shrink` returns the amounts to request instead of the refused ones; None if no smaller amounts would do. With
        `max_wait_s` a call that only the holds of others keep out gets a ticket, and Waiting is returned: `renew` it,
        or `leave_queue`. `under` is the key of the call that made this one. `is_unhinted` is for a model call whose
        worst case is not known.
        """
        with self._lock:
            if self._is_over:
                return self._over()
            self._asking.add(key)
        options: _HoldOptions = {"under": under} if under is not None else {}
        if is_unhinted:
            options["unhinted_lease_s"] = LEASE_S
            self._unhinted.add(key)
        try:
            return await self._hold_or_refuse(_Request(key, ask, shrink, max_wait_s, options), retried)
        finally:
            self._stop_asking(key)

    async def _hold_or_refuse(self, request: _Request, retried: bool) -> Stop | Waiting | None:
        await self.aflush()
        if failpoints.hook is not None:
            failpoints.hook("hold.before")
        key = request.key
        is_drawn = self._queued[key] if key in self._queued else retried and self._is_drawn()
        request.options["retry_drawn"] = is_drawn
        try:
            answer = await self._held(request)
        except WouldBlock:  # the request is repeated, and its retry is not drawn then either
            if retried and not is_drawn and key not in self._queued:
                self._was_not_drawn()
            raise
        except BaseException as error:
            return self._in_doubt(key, error)
        return self._answered(key, answer, is_drawn)

    async def _held(self, request: _Request) -> Stop | Waiting | None:
        key, ask, shrink, *_ = request
        answer: Stop | Waiting | None = None
        for _ in range(MAX_HOLD_REQUESTS):
            answer = await self._decided(request, ask)
            if not isinstance(answer, Stop):
                break
            with self._lock:
                self._refusing.add(answer.budget)
            smaller = None if shrink is None else shrink(answer)
            if smaller is None:
                break
            ask = smaller
        if self.above and not isinstance(answer, Stop):
            self._costs[key] = ask.cost_nanos
        return answer

    async def _decided(self, request: _Request, ask: Amounts) -> Stop | Waiting | None:
        """Return the store's decision for these amounts; what a block refuses is decided again, by all accounts."""
        key, _, _, max_wait_s, options = request
        answer: Stop | Waiting | None = None
        if "unhinted_lease_s" in options:
            await self._leave_block(self.ledger)
        for _ in range(MAX_ROOM_MADE):
            answer = await self.ledger.hold(key, self.account, ask, **options)
            if answer is not None and await self._has_made_room(answer, ask):
                continue
            if answer is not None and answer.momentary and max_wait_s is not None:
                longest_s = min(max_wait_s + GRACE_S, checks.MAX_SECONDS)
                ticket = TicketRequest(self.run_id, self.owner, LEASE_S, longest_s)
                answer = await self.ledger.join_queue(key, self.account, ask, ticket, **options)
            if not isinstance(answer, Stop) or not is_block(answer.budget):
                break
            await self._has_made_room(answer, ask)
        return answer

    async def _has_made_room(self, stop: Stop, ask: Amounts) -> bool:
        """Whether there may be room now for a refused call, because a block got more or gave something back."""
        if stop.budget is None or stop.budget == self.account or stop.unit != "usd":
            return False
        return (is_block(stop.budget) or stop.momentary) and await make_room(self.ledger, stop.budget, ask.cost_nanos)

    async def _has_room_above(self, key: str) -> bool:
        """Whether blocks have given something back for a call that waits.

        Every level is looked at: the one that refused the call when it came need not be the one that it waits for now.
        """
        cost, has_changed = self._costs.get(key, 0), False
        for account in self.above:
            try:
                balance = await self.ledger.balance(account)
            except KeyError:
                continue
            taken = balance.spent_nanos + balance.held_nanos + balance.unresolved_nanos
            if balance.limits.cost_nanos - taken < max(cost, 1):
                has_changed |= await make_room(self.ledger, account, cost)
        return has_changed

    async def _leave_block(self, ledger: AsyncLedger) -> None:
        """End the block, because more will be spent than is held: the accounts above have to know at once."""
        if self._block is not None:
            await end_block(ledger, self._block)
            self._block = None

    async def renew(self, key: str) -> Stop | Waiting | None:
        """Return the store's answer to a call that waits; any failure refuses. LedgerError if its ticket has expired.

        A call whose ticket has expired may `take` again.
        """
        if self._is_over:
            self.leave_queue(key)
            return self._over()
        await self.aflush()
        try:
            answer = await self.ledger.renew(key)
            if isinstance(answer, Waiting) and self.above and await self._has_room_above(key):
                answer = await self.ledger.renew(key)
            if isinstance(answer, Stop) and await self._has_made_room(answer, Amounts(self._costs.get(key, 0))):
                raise LedgerError(f"{key!r} has lost its ticket to a block that was ending")
        except WouldBlock:
            raise
        except BaseException as error:
            if isinstance(error, LedgerError) and not isinstance(error, LedgerUnavailable):
                raise
            answer = self._in_doubt(key, error)
        else:
            answer = self._answered(key, answer, self._queued.get(key, True))
        self._stop_asking(key)
        return answer

    def give_back(self, key: str) -> None:
        """Queue the withdrawal of a call that never ran, or that it gives its ticket back."""
        if key in self._queued:
            self.leave_queue(key)
        else:
            self.withdrawn(key)

    def leave_queue(self, key: str) -> None:
        """Queue that the call gives its ticket back, or what was held for it meanwhile."""
        self._queued.pop(key, None)
        self._costs.pop(key, None)
        self._unhinted.discard(key)
        self._later(key, _never_ran(key))

    def _in_doubt(self, key: str, error: BaseException) -> Stop:
        """Return the stop of a request that failed; what it may have taken is given back later."""
        if isinstance(error, KeyTaken):  # the key is another call's
            self._queued.pop(key, None)
        else:  # only the answer may have been lost
            self.leave_queue(key)
        if not isinstance(error, Exception):
            raise error
        return self.unavailable(error)

    def _answered(self, key: str, answer: Stop | Waiting | None, is_drawn: bool) -> Stop | Waiting | None:
        if failpoints.hook is not None:
            failpoints.hook("hold.after")
        with self._lock:
            self._queued.pop(key, None)
            if answer is None:
                self._open.add(key)
                if key in self._unhinted:
                    keep_lease(self, key, partial(self.store.renew_unhinted, key), LEASE_S)
            elif isinstance(answer, Waiting):
                self._queued[key] = is_drawn
            else:
                self._refusing.add(answer.budget)
        return answer

    def _stop_asking(self, key: str) -> None:
        with self._lock:
            if key not in self._open and key not in self._queued:
                self._asking.discard(key)
                self._unhinted.discard(key)

    def _over(self) -> Stop:
        return self.unavailable(RuntimeError("its run is over"))

    def close(self) -> None:
        """Mark the run as over: a call whose caller left before a worker requested its hold no longer requests it."""
        with self._lock:
            self._is_over = True

    def has_refused(self, stop: Stop) -> bool:
        """Return whether the stop is of the store's account or of a parent of it, and so stops the whole run."""
        return stop.reason in LIMIT_REASONS and stop.budget in self._refusing

    def unavailable(self, error: Exception) -> Stop:
        """Return the stop of a call that the store cannot record."""
        detail = error.args[0] if isinstance(error, KeyError) and error.args else error
        message = f"the shared budget {self.account!r} cannot be held: {detail or type(error).__name__}"
        return Stop(StopReason.LEDGER_UNAVAILABLE, message, budget=self.account)

    def _is_drawn(self) -> bool:
        """Return whether the retry of this attempt was drawn at the store as well."""
        with self._lock:
            if not self._undrawn:
                return True
            self._undrawn -= 1
            return False

    def _was_not_drawn(self) -> None:
        with self._lock:
            self._undrawn += 1

    # After a call; these methods only queue acts for the store.

    def is_open(self, key: str) -> bool:
        """Return whether something was taken under that key whose end is not final."""
        return key in self._open

    def settled(self, key: str, actual: Amounts, succeeded: bool) -> None:
        """Queue the actual usage of the call."""
        is_dearer = self._block is not None and actual.cost_nanos > self._costs.get(key, 0)

        async def settle(ledger: AsyncLedger) -> None:
            if is_dearer:
                await self._leave_block(ledger)
            await ledger.settle(key, actual, succeeded=succeeded)

        self._end(key, settle)

    def released(self, key: str) -> None:
        """Queue the release of a call that failed and cost nothing."""
        self._end(key, lambda ledger: ledger.release(key))

    def withdrawn(self, key: str) -> None:
        """Queue the withdrawal of a call that never ran."""
        self._end(key, _never_ran(key, may_wait=False))

    def unresolved(self, key: str) -> None:
        """Queue that the call is over and its bill unknown; it may still be settled."""
        if self.is_open(key):
            self._later(key, lambda ledger: ledger.leave_unresolved(key))
            drop_lease(self, key)

    def charged(self, key: str, actual: Amounts) -> None:
        """Queue spending for which nothing was held."""

        async def charge(ledger: AsyncLedger) -> None:
            if actual.cost_nanos:
                await self._leave_block(ledger)
            await ledger.charge(key, self.account, actual)

        self._later(key, charge)

    def unknown(self, key: str) -> None:
        """Queue that the cost of the call under that key is unknown."""
        if self.unknown_account is not None:
            self._later(key, lambda ledger: self._count_unknown(ledger, key))

    def known(self, key: str) -> None:
        """Queue that the cost of that call has become known after all."""
        account = self.unknown_account
        if account is not None:
            self._later(key, lambda ledger: ledger.charge(f"{key}/known", account, Amounts(tokens_in=1)))

    def unknown_costs(self) -> int:
        """Run `aunknown_costs` on this thread, which it blocks."""
        return blocking(self.aunknown_costs())

    async def aunknown_costs(self) -> int:
        """Return the number of calls of unknown cost that the store knows of, over all claims."""
        try:
            balance = await self.ledger.balance(self.unknown_account or "")
        except KeyError:  # no call has needed the account yet
            return 0
        return balance.api_calls - balance.tokens_in

    async def _count_unknown(self, ledger: AsyncLedger, key: str) -> None:
        account = self.unknown_account
        if account is not None:
            await ledger.open_account(account, Limits())
            await ledger.charge(f"{key}/unknown", account, Amounts(api_calls=1))

    def retry_drawn(self, key: str) -> None:
        """Queue that the call under that key has failed and drawn a retry of the run."""

        async def draw(ledger: AsyncLedger) -> None:
            if not await ledger.draw_retry(self.account, key):
                self._was_not_drawn()

        self._later(key, draw)

    def _end(self, key: str, do: Do) -> None:
        """Queue the final act of what was taken under that key; no effect if nothing is taken or its end is queued."""
        with self._lock:
            if key in self._open:
                act = Act(key, do)
                try:
                    self._waiting.append(act)
                    self._open.discard(key)
                except BaseException:  # from a signal handler: an act is queued once, and none is lost
                    if self._waiting and self._waiting[-1] is act:
                        self._open.discard(key)
                    raise
                self._costs.pop(key, None)
                self._asking.discard(key)
                self._unhinted.discard(key)
        drop_lease(self, key)

    def _later(self, key: str, do: Do) -> None:
        with self._lock:
            self._waiting.append(Act(key, do))
            self._asking.discard(key)

    # Reporting to the store.

    def flush(self) -> int:
        """Run `aflush` on this thread, which it blocks."""
        return blocking(self.aflush())

    async def aflush(self) -> int:
        """Report waiting acts to the store, as far as possible; return how many still wait."""
        is_available = True
        while self._waiting and is_available:
            is_available = await (self._flush_as_thread() if mode.may_block else self._flush_as_task())
        return self.waiting

    async def _flush_as_thread(self) -> bool:
        try:
            with self._turn.lock:
                # A task that has the turn reports these acts too: it looks for more after the end of its turn.
                return self._turn.task is None and await self._report_all()
        finally:
            self._turn.wake()

    async def _flush_as_task(self) -> bool:
        task = object()
        try:
            await self._turn.take(task)
            is_available = await self._report_all()
        except BaseException:  # the task was cancelled, and threads rely on it to report their acts
            self._turn.give(task)
            self.flush_soon()
            raise
        self._turn.give(task)
        return is_available

    async def _report_all(self) -> bool:
        """Report the waiting acts; return False if the store cannot record one of them."""
        reported = 0
        while self._waiting:
            if not await self._report(self._waiting[0]):
                return False
            reported += 1
            if reported % MAX_INLINE_ACTS == 0 and not mode.may_block:
                await asyncio.sleep(0)  # the store may have answered all of them inline
        return True

    def flush_soon(self) -> None:
        """Start a worker that reports waiting acts to the store, without waiting for it."""
        if self.ledger.is_immediate:
            self.flush()
            return
        with self._lock:
            if self._is_flush_scheduled or not self._waiting:
                return
            self._is_flush_scheduled = True
        try:
            worker.start(worker.Job(self._run_scheduled_flush, ignore))
        except RuntimeError:  # no thread is available: the next act reports it
            self._is_flush_scheduled = False

    def _run_scheduled_flush(self) -> None:
        self._is_flush_scheduled = False
        self.flush()

    async def _report(self, act: Act) -> bool:
        """Do the oldest waiting act; return False if the store cannot record it now."""
        if failpoints.hook is not None:
            failpoints.hook("settle.before")
        try:
            await act.do(self.ledger)
        except LedgerUnavailable as error:
            return self._stays(act, error)
        except (LedgerError, KeyError) as error:
            # The hold has already ended in another way, which takes precedence.
            self._is_done(act)
            self._report_fault(f"{act.key!r} could not be ended at the shared budget {self.account!r}: {error}")
            return True
        except Exception as error:
            return self._stays(act, error)
        if failpoints.hook is not None:
            failpoints.hook("settle.after")
        self._is_done(act)
        self._is_behind = False
        return True

    def _is_done(self, act: Act) -> None:
        with self._lock:
            self._waiting.remove(act)

    def _stays(self, act: Act, error: Exception) -> bool:
        """Move the act and later ones of its key behind the others; acts of one key keep their order."""
        with self._lock:
            same_key = [queued for queued in self._waiting if queued.key == act.key]
            self._waiting = deque([*(queued for queued in self._waiting if queued.key != act.key), *same_key])
        if not self._is_behind:
            self._is_behind = True
            self._report_fault(
                f"the shared budget {self.account!r} could not record how {act.key!r} ended; its hold stays there "
                f"until it can: {error}"
            )
        return False

    def _report_fault(self, message: str) -> None:
        if self.on_fault is not None:
            self.on_fault(message)

    def __repr__(self) -> str:
        return f"<SharedBudget {self.account!r} as {self.prefix!r}>"


def _never_ran(key: str, *, may_wait: bool = True) -> Do:
    """Return an act that gives back what the key holds, if it holds something, and its ticket, if it has one."""

    def give_back(ledger: AsyncLedger) -> Awaitable[None]:
        # A hold that was recovered meanwhile can be released; one that was never recorded has nothing to give back.
        return _try_each(key, *([ledger.leave_queue] if may_wait else []), ledger.withdraw, ledger.release)

    return give_back


async def _try_each(key: str, *ends: Callable[[str], Awaitable[None]]) -> None:
    """Do the first of these that the store accepts for the key."""
    for end in ends:
        try:
            return await end(key)
        except LedgerUnavailable:
            raise
        except LedgerError:
            continue
    return None


def budget_behind(stop: Stop) -> Budget:
    """Return the one ceiling that a stop of the store names, as a Budget; a ceiling on retries has no field there."""
    limit = stop.limit
    if limit is None:
        return Budget()
    if stop.unit == "usd":
        return Budget(max_cost_dollars=limit)
    if stop.unit == "seconds":
        return Budget(max_time_seconds=limit)
    counted = {"steps": "max_steps", "tokens": "max_tokens", "api calls": "max_api_calls"}.get(stop.unit or "")
    return Budget() if counted is None else Budget(**{counted: int(limit)})


# Reports of calls.


def note_end(shared: SharedBudget, call: HeldCall) -> None:
    """Queue the call's outcome for the store, as it is recorded locally.

    A bill that arrives after the call's record has ended is queued by `note_late_bill`, because it is not in the
    record.
    """
    record = call.record
    key = key_of(shared, call)
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


def note_unknown(shared: SharedBudget, call: HeldCall) -> None:
    """Queue for the store whether the call's cost is unknown, before the call's outcome is queued."""
    note = shared.unknown if call.unknown else shared.known
    note(key_of(shared, call))


def note_late_bill(
    shared: SharedBudget, call: HeldCall, cost: int, tokens_in: int, tokens_out: int, is_open: bool | None = None
) -> None:
    """Queue for the store the cost of a call whose record had already ended.

    `is_open` says whether the call holds something at the store, for a caller that may call this twice.
    """
    key = key_of(shared, call)
    actual = Amounts(cost, tokens_in, tokens_out)
    if shared.is_open(key) if is_open is None else is_open:
        if call.state == "released":
            shared.released(key)
        else:
            shared.settled(key, actual, False)
    elif cost or tokens_in or tokens_out:
        shared.charged(f"{key}/bill", actual)
    shared.flush_soon()


def note_charge(
    shared: SharedBudget, record: CallRecord, cost: int, tokens_in: int, tokens_out: int, api_calls: int = 0
) -> None:
    """Queue spending for which nothing is held at the store; replayed calls were charged when they first ran."""
    if not (record.metadata or {}).get("replayed"):
        shared.charged(shared.key(record.node_id), Amounts(cost, tokens_in, tokens_out, api_calls))
        shared.flush_soon()


def key_of(shared: SharedBudget, call: HeldCall) -> str:
    """Return the key of the call at the store."""
    return shared.key(call.record.node_id, unpriced=call.is_unpriced)


def _billed(record: CallRecord) -> Amounts:
    return Amounts(record.cost, record.tokens_in or 0, record.tokens_out or 0)
