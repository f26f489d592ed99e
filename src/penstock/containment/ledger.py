"""The judge of money, steps, tokens, calls and retries.

`Ledger` is the in-process judge: one lock for a whole tree of accounts, so that a hold at a budget and at all of its
ancestors is one act. `LedgerStore` is the same contract by name and key, for budgets that outlive a process or are
shared by several; the in-memory store is its specification.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile, islice, takewhile
from typing import Protocol, TypeVar

from penstock import checks
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.containment import accounts
from penstock.containment.accounts import Account, Balance, Hold, HoldState, Taken
from penstock.containment.limits import NO_LIMITS, Ceilings, Limits, as_limits, seconds_to_ns
from penstock.containment.tickets import Queue, Ticket, UnderWay, Waiting, limited, no_ticket
from penstock.containment.waiting import WaitingRoom
from penstock.errors import KeyTaken, LedgerError, UnderAnother
from penstock.notify import Wakeups
from penstock.stops import Stop

T = TypeVar("T")

MAX_PAGE = 10_000
"""Maximum number of accounts in one page, whatever `limit` is."""


class UnhintedCalls:
    """Model calls without a hint, of all runs that pay from the root of one ledger.

    A run that has a ledger of its own knows all of them itself.
    """

    __slots__ = ("first_calls", "is_unknown", "most_cost", "most_tokens", "tokens_unknown")

    def __init__(self) -> None:
        self.first_calls: tuple[Taken, ...] = ()
        """The one that runs alone, until it ends; then one that it made, and so on."""
        self.is_unknown = True
        """Whether none has succeeded or was billed: under a ceiling of money, they run one at a time until then."""
        self.tokens_unknown = True
        """Whether none has succeeded or used tokens: the same under a ceiling of tokens."""
        self.most_cost = 0
        """The most that one has cost."""
        self.most_tokens = 0


class Ledger:
    """A tree of accounts that threads may use at the same time."""

    __slots__ = ("clock", "lock", "room", "root", "unhinted")

    def __init__(self, name: str = "main", limits: Ceilings = NO_LIMITS, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.clock = clock
        self.lock = threading.RLock()
        """Taken for every change. A caller that has more to do in the same act may hold it and use `accounts`."""
        self.room = WaitingRoom()
        """The calls that wait for what others hold. Tell it, with `changed`, when something came free."""
        self.root = Account(name, as_limits(limits), None, clock.monotonic_ns())
        self.unhinted: UnhintedCalls | None = None
        """Set by the first run that opens its budget under the root."""

    def open(self, name: str, limits: Ceilings = NO_LIMITS, parent: Account | None = None) -> Account:
        """A new account under `parent` (the root, if none is given)."""
        return Account(name, as_limits(limits), parent or self.root, self.clock.monotonic_ns())

    def hold(
        self,
        account: Account,
        cost_nanos: int = 0,
        tokens: int = 0,
        api_calls: int = 0,
        *,
        retry_drawn: bool = False,
    ) -> Hold | Stop:
        """Take the worst case of one call from the account and every ancestor, or say what refuses.

        `retry_drawn` is for the attempt that a retry was drawn for: a retry budget used up by that does not refuse it.
        """
        _check_amounts(cost_nanos=cost_nanos, tokens=tokens, api_calls=api_calls)
        with self.lock:
            now_ns = self.clock.monotonic_ns()  # after the wait for the lock, which may have passed a deadline
            return accounts.hold(account, cost_nanos, tokens, api_calls, now_ns, retry_drawn)

    def settle(
        self, held: Hold, cost_nanos: int, tokens_in: int = 0, tokens_out: int = 0, *, succeeded: bool = True
    ) -> None:
        """Replace the hold by what the call really used; also for a hold that was left unresolved."""
        _check_amounts(cost_nanos=cost_nanos, tokens_in=tokens_in, tokens_out=tokens_out)
        self._change(lambda: accounts.settle(held, cost_nanos, tokens_in, tokens_out, succeeded))

    def release(self, held: Hold) -> None:
        """The call failed and cost nothing."""
        self._change(lambda: accounts.release(held))

    def withdraw(self, held: Hold) -> None:
        """The call never ran."""
        self._change(lambda: accounts.withdraw(held))

    def leave_unresolved(self, held: Hold) -> None:
        """The call is over and its bill is unknown: what it held stays taken."""
        self._change(lambda: accounts.leave_unresolved(held))

    def draw_retry(self, account: Account) -> bool:
        """Take one retry from every level; False if one has none left."""
        with self.lock:
            return accounts.draw_retry(account)

    def grant(self, account: Account, limits: Ceilings) -> None:
        """Replace the ceilings of an account; what was taken stays taken."""
        ceilings = as_limits(limits)
        self._change(lambda: accounts.set_limits(account, ceilings))

    def _change(self, change: Callable[[], None]) -> None:
        """Make a change, and admit the calls that waited for it: also if a signal handler raises in between."""
        with self.lock:
            try:
                change()
                self._changed()
            except BaseException:
                self._changed()
                raise

    def _changed(self) -> None:
        if self.room.queues:
            self.room.changed(self.clock.monotonic_ns())

    def balance(self, account: Account | None = None) -> Balance:
        """The figures of an account (the root, if none is given), all of the same instant."""
        with self.lock:
            return accounts.balance(account or self.root)


@dataclass(frozen=True, slots=True)
class Amounts:
    """What a call asks for, or what it used."""

    cost_nanos: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    api_calls: int = 0

    def __post_init__(self) -> None:
        cost_nanos, tokens_in, tokens_out, api_calls = self.cost_nanos, self.tokens_in, self.tokens_out, self.api_calls
        # Created twice for every call on a store, so one quick test; the slow one by name only if something is wrong.
        if (
            not type(cost_nanos) is type(tokens_in) is type(tokens_out) is type(api_calls) is int
            or cost_nanos < 0
            or tokens_in < 0
            or tokens_out < 0
            or api_calls < 0
        ):
            _check_amounts(cost_nanos=cost_nanos, tokens_in=tokens_in, tokens_out=tokens_out, api_calls=api_calls)

    @property
    def has_bill(self) -> bool:
        """Whether there is anything to pay: money or tokens."""
        return bool(self.cost_nanos or self.tokens_in or self.tokens_out)


DEFAULT_LEASE_S = 10.0
DEFAULT_MAX_WAIT_S = 300.0


@dataclass(frozen=True, slots=True)
class TicketRequest:
    """How a call waits at a store for holds of other calls."""

    run: str = ""
    """The run of the call. Runs of one owner take turns."""
    owner: str = ""
    """The owner of the run. Owners take turns."""
    lease_s: float = DEFAULT_LEASE_S
    """Seconds until the ticket expires unless it is renewed; by the clock of the store."""
    max_wait_s: float = DEFAULT_MAX_WAIT_S
    """Seconds after which the ticket expires although it is renewed; by the clock of the store."""

    def __post_init__(self) -> None:
        checks.text("run", self.run)
        checks.text("owner", self.owner)
        checks.seconds("lease_s", self.lease_s, above_zero=True)
        checks.seconds("max_wait_s", self.max_wait_s)


class LedgerStore(Protocol):
    """Accounts by name and holds by key; every method is atomic, and every one with a key is idempotent by it.

    A call that has to wait for the holds of others has a ticket: `hold` refuses it for the moment, `join_queue` makes
    the ticket, `renew` keeps it, and `leave_queue` gives it back. It holds nothing until it is admitted. A ticket that
    is not renewed within its lease is removed, and what was held for it meanwhile is withdrawn, since its call did not
    run. `containment.waiting` decides who is next, for all stores.

    An account that was never opened is a KeyError, a key that was never held is a LedgerError. A store that cannot
    record raises LedgerUnavailable, and then no call may leave. `penstock.testing.contracts` holds every store to this.
    """

    def open_account(self, account: str, limits: Limits, *, parent: str | None = None) -> None:
        """Make the account if it is not there; LedgerError if it is there with other limits or another parent."""

    def grant(self, account: str, limits: Limits) -> None:
        """Replace the ceilings of the account; what was taken stays taken, also where it is more than they allow."""

    def put_under(self, account: str, parent: str) -> None:
        """Count what the account has taken, and takes from now on, at `parent` and all above it as well.

        For a budget that comes later than what it is for. It is never refused: it may pass a ceiling, and then nothing
        starts. An account that is under `parent` already stays where it is. LedgerError if it is above `parent`, or
        under one that is not: what was counted somewhere stays counted there.
        """

    def hold(
        self,
        key: str,
        account: str,
        ask: Amounts,
        *,
        retry_drawn: bool = False,
        under: str | None = None,
        unhinted_lease_s: float | None = None,
    ) -> Stop | None:
        """Take `ask` from the account and every ancestor, or say what refuses.

        A key is taken once: holding it again while it is held returns None and takes nothing. KeyTaken if it is used
        for another account or with other amounts, because one of the two calls is then not the one that was admitted;
        and once its call has ended, because it is then another call. A refused or withdrawn hold leaves nothing
        behind, so its key may be used again.

        `under` is the key of the hold of the call that made this one. While calls wait for the same room, a new hold
        is refused if it would take the room of the next one.

        `unhinted_lease_s` is for a model call whose worst case is not known. Where a level has a ceiling of money, such
        calls run one at a time, except under one another, until one was settled at that level; then each holds at least
        the most that one has cost there. The lease keeps the others waiting that long; see `renew_unhinted`.
        """

    def join_queue(
        self,
        key: str,
        account: str,
        ask: Amounts,
        ticket: TicketRequest,
        *,
        retry_drawn: bool = False,
        under: str | None = None,
        unhinted_lease_s: float | None = None,
    ) -> Stop | Waiting | None:
        """Take `ask` as `hold` does, and if only holds of other calls are in the way, wait for them with a ticket.

        Whatever makes room admits waiting calls in the same transaction: all levels of a call, or none. A call is
        refused at once if nothing that could come free would make room for it. Joining again renews the ticket.
        KeyTaken as for `hold`, also for a key that waits for another account or for other amounts.
        """

    def renew(self, key: str) -> Stop | Waiting | None:
        """Renew the lease of a ticket. None if the call is admitted: it holds, and has no ticket any more.

        A Stop ends the ticket, too. LedgerError if the key has no ticket: it expired, or never existed.
        """

    def leave_queue(self, key: str) -> None:
        """Give the ticket back; if the call was admitted meanwhile, withdraw its hold.

        LedgerError if the key has no ticket, because its call has left, or holds and `renew` has returned that.
        """

    def renew_unhinted(self, key: str) -> bool:
        """Renew the lease of an un-hinted call that holds; False if no call has to wait for it, now or later."""

    def queued(self, prefix: str = "") -> Mapping[str, Amounts]:
        """The keys that begin with `prefix` and have a ticket, with what each waits for, in the order they came in."""

    def on_change(self, key: str, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` when `renew` may have another answer for the key; return a function that ends this.

        It is called on any thread, perhaps more often than needed, and perhaps not for changes that another process
        makes: renew every `poll_s` seconds as well.
        """

    @property
    def poll_s(self) -> float:
        """Longest time after which a waiting call renews its ticket, however long its lease is."""

    def settle(self, key: str, actual: Amounts, *, succeeded: bool = True) -> None:
        """Replace the hold by what was used. Settling a settled key again changes nothing, whatever it says."""

    def release(self, key: str) -> None:
        """The call failed and cost nothing."""

    def withdraw(self, key: str) -> None:
        """The call never ran."""

    def leave_unresolved(self, key: str) -> None:
        """The call is over and its bill is unknown."""

    def charge(self, key: str, account: str, actual: Amounts) -> None:
        """Count what was spent outside any hold. It is never refused: it may pass a ceiling, and then nothing starts.

        A key is charged once: again, it changes nothing. KeyTaken if it is another account's, is charged with other
        amounts, or was held; and a key that was charged cannot be held.
        """

    def draw_retry(self, account: str, key: str | None = None) -> bool:
        """Take one retry from every level; False if one has none left.

        A key draws once, and has the same answer for as long as it is yes. Without a key, each time draws one.
        """

    def balance(self, account: str) -> Balance:
        """The figures of the account; KeyError if there is none of that name."""

    def balances(self, names: Sequence[str]) -> Mapping[str, Balance]:
        """The figures of these accounts, all from one instant; those that do not exist are left out."""

    def unresolved(self, prefix: str = "") -> Mapping[str, Amounts]:
        """The keys that begin with `prefix` and whose bill is unknown, with what each still holds."""

    def held(self, prefix: str = "") -> Mapping[str, Amounts]:
        """The keys that begin with `prefix` and are still held, with what each holds.

        Their calls are under way, or their process died before it recorded how they ended.
        """

    def aged(self, age_s: float, *, prefix: str = "", after: str | None = None, limit: int = 1_000) -> Sequence[str]:
        """Accounts that begin with `prefix` and were opened at least so long ago, in the order they were opened in.

        `after` is the last one of the page before; behind one that is not there any more comes nothing.
        """

    def forget(self, names: Collection[str]) -> int:
        """Remove accounts, and every key that was theirs; how many. What they used stays counted above them.

        For accounts that are no longer needed. Those with accounts under them, with open holds or with tickets are
        kept.
        """


class WouldBlock(BaseException):
    """A store that must not block would have to: nothing was done, and the caller repeats the operation where it may.

    No Exception: it is not an error, and code that handles errors does not see it.
    """


@dataclass(slots=True)
class _Lease:
    """A ticket of the store in memory, and how long it lasts."""

    ticket: Ticket
    ask: Amounts
    length_ns: int
    expires_ns: int
    ends_ns: int

    def renew(self, now_ns: int) -> None:
        self.expires_ns = min(now_ns + self.length_ns, self.ends_ns)


@dataclass(slots=True)
class _Unhinted:
    """The lease of an un-hinted call of the store in memory."""

    length_ns: int
    expires_ns: int = 0


class MemoryLedgerStore:
    """The store that keeps nothing beyond its process: the specification of `LedgerStore`."""

    is_immediate = True
    """It never blocks: it can be called on an event loop without a thread."""
    poll_s = 1.0

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._accounts: dict[str, Account] = {}
        self._holds: dict[str, tuple[Taken, Amounts]] = {}
        self._under_way: dict[str, UnderWay] = {}
        """Those of the holds that are held."""
        self._keys_of: dict[Account, set[str]] = {}
        """The keys of what was held from each account: to forget one takes no look at what all others have held."""
        self._charges: dict[str, tuple[Account, Amounts]] = {}
        self._draws: dict[str, Account] = {}
        self._leases: dict[str, _Lease] = {}
        self._unhinted: dict[str, _Unhinted] = {}
        """Those of un-hinted calls that hold, or whose bill is unknown."""
        self._dearest: dict[Account, int] = {}
        """The most that an un-hinted call has cost at an account; not there until one was settled."""
        self._wakeups = Wakeups()

    def open_account(self, account: str, limits: Limits, *, parent: str | None = None) -> None:
        with self._lock:
            above = None if parent is None else self._account(parent)
            known = self._accounts.get(account)
            if known is None:
                self._accounts[account] = Account(account, limits, above, self._clock.monotonic_ns())
            elif known.limits != limits or known.parent is not above:
                raise LedgerError(f"account {account!r} exists with other limits or another parent")

    def grant(self, account: str, limits: Limits) -> None:
        with self._lock:
            target = self._account(account)
            accounts.set_limits(target, limits)
            woken = self._advance(target)
        self._wakeups.wake(woken)

    def put_under(self, account: str, parent: str) -> None:
        with self._lock:
            target, above = self._account(account), self._account(parent)
            if accounts.is_under(above, target):
                raise above_already(account, parent)
            if accounts.is_under(target, above):
                return
            if target.parent is not None and not accounts.is_under(above, target.parent):
                raise under_another(account, parent, target.parent.name)
            accounts.put_under(target, above)
            woken = self._advance(target)
        self._wakeups.wake(woken)

    def hold(
        self,
        key: str,
        account: str,
        ask: Amounts,
        *,
        retry_drawn: bool = False,
        under: str | None = None,
        unhinted_lease_s: float | None = None,
    ) -> Stop | None:
        with self._lock:
            target = self._account(account)
            if self._is_held(key, account, ask, unhinted_lease_s is not None):
                return None
            if key in self._leases:
                raise waits_already(key)
            if unhinted_lease_s is not None and not limited(target):
                unhinted_lease_s = None
            if not self._leases and unhinted_lease_s is None:
                tokens, now_ns = ask.tokens_in + ask.tokens_out, self._clock.monotonic_ns()
                taken = accounts.hold(target, ask.cost_nanos, tokens, ask.api_calls, now_ns, retry_drawn)
                if isinstance(taken, Stop):
                    return taken
                self._record(key, taken, ask, under)
                return None
            queue = self._queue(target)
            newcomer = new_ticket(key, target, ask, retry_drawn, under, unhinted_lease_s=unhinted_lease_s)
            stop = queue.enter(newcomer)
            woken = self._keep(queue, ask)
        self._wakeups.wake(woken)
        return stop

    def join_queue(
        self,
        key: str,
        account: str,
        ask: Amounts,
        ticket: TicketRequest,
        *,
        retry_drawn: bool = False,
        under: str | None = None,
        unhinted_lease_s: float | None = None,
    ) -> Stop | Waiting | None:
        checks.instance("ticket", ticket, TicketRequest)
        with self._lock:
            target = self._account(account)
            lease = self._leases.get(key)
            if lease is not None:
                check_same("ticket", key, (lease.ticket.account.name, lease.ask), (account, ask))
            elif self._is_held(key, account, ask, unhinted_lease_s is not None):
                return None
            queue = self._queue(target)
            if key in queue.tickets:
                answer = self._renewed(queue, key)
            else:
                if not limited(target):
                    unhinted_lease_s = None
                newcomer = new_ticket(key, target, ask, retry_drawn, under, ticket, unhinted_lease_s)
                answer = queue.enter_or_join(newcomer)
                if isinstance(answer, Waiting):
                    now_ns, length_ns = self._clock.monotonic_ns(), seconds_to_ns(ticket.lease_s, "lease_s")
                    lease = _Lease(newcomer, ask, length_ns, 0, now_ns + seconds_to_ns(ticket.max_wait_s, "max_wait_s"))
                    lease.renew(now_ns)
                    self._leases[key] = lease
            woken = self._keep(queue, ask)
        self._wakeups.wake(woken)
        return answer

    def renew(self, key: str) -> Stop | Waiting | None:
        return self._at_ticket(key, lambda queue: self._renewed(queue, key))

    def leave_queue(self, key: str) -> None:
        self._at_ticket(key, lambda queue: queue.leave(key))

    def renew_unhinted(self, key: str) -> bool:
        with self._lock:
            unhinted, held = self._unhinted.get(key), self._under_way.get(key)
            if unhinted is None or held is None or all(level in self._dearest for level in limited(held.held._account)):
                return False
            unhinted.expires_ns = self._clock.monotonic_ns() + unhinted.length_ns
            return True

    def queued(self, prefix: str = "") -> Mapping[str, Amounts]:
        with self._lock:
            return {key: lease.ask for key, lease in self._leases.items() if key.startswith(prefix)}

    def on_change(self, key: str, wake: Callable[[], None]) -> Callable[[], None]:
        return self._wakeups.add(key, wake)

    def settle(self, key: str, actual: Amounts, *, succeeded: bool = True) -> None:
        used = actual.cost_nanos, actual.tokens_in, actual.tokens_out
        self._end(key, "settled", lambda held: accounts.settle(held, *used, succeeded), actual.cost_nanos)

    def release(self, key: str) -> None:
        self._end(key, "released", accounts.release)

    def withdraw(self, key: str) -> None:
        self._end(key, "withdrawn", accounts.withdraw)

    def leave_unresolved(self, key: str) -> None:
        self._end(key, "unresolved", accounts.leave_unresolved)

    def charge(self, key: str, account: str, actual: Amounts) -> None:
        with self._lock:
            target = self._account(account)
            known, amounts = self._charges.get(key, (None, None))
            if known is not None:
                check_same("charge", key, (known.name, amounts), (account, actual))
                return
            if key in self._holds:
                raise held_not_charged(key)
            if key in self._leases:
                raise waits_already(key)
            charged, figures = Taken(), (actual.cost_nanos, actual.tokens_in, actual.tokens_out, actual.api_calls)
            try:
                accounts.charge(target, *figures, charged=charged)
                self._charges[key] = target, actual
            except BaseException:
                if charged.state == "settled":  # from a signal handler: it must not be charged again under that key
                    self._charges[key] = target, actual
                raise
            woken = self._advance(target)
        self._wakeups.wake(woken)

    def draw_retry(self, account: str, key: str | None = None) -> bool:
        with self._lock:
            target = self._account(account)
            known = None if key is None else self._draws.get(key)
            if known is not None:
                check_same("retry", str(key), (known.name, None), (account, None))
                return True
            drawn = accounts.draw_retry(target)
            if drawn and key is not None:
                self._draws[key] = target
            return drawn

    def balance(self, account: str) -> Balance:
        with self._lock:
            return accounts.balance(self._account(account))

    def balances(self, names: Sequence[str]) -> Mapping[str, Balance]:
        with self._lock:
            return {name: accounts.balance(self._accounts[name]) for name in names if name in self._accounts}

    def unresolved(self, prefix: str = "") -> Mapping[str, Amounts]:
        return self._in_state("unresolved", prefix)

    def held(self, prefix: str = "") -> Mapping[str, Amounts]:
        return self._in_state("held", prefix)

    def _in_state(self, state: HoldState, prefix: str) -> Mapping[str, Amounts]:
        with self._lock:
            mine = ((key, held, ask) for key, (held, ask) in self._holds.items() if key.startswith(prefix))
            return {key: ask for key, held, ask in mine if held.state == state}

    def aged(self, age_s: float, *, prefix: str = "", after: str | None = None, limit: int = 1_000) -> Sequence[str]:
        age_ns, limit = check_page(age_s, limit)
        with self._lock:
            before_ns = self._clock.monotonic_ns() - age_ns
            opened: Iterable[Account] = self._accounts.values()
            if after is not None:
                opened = islice(dropwhile(lambda account: account.name != after, opened), 1, None)
            old = takewhile(lambda account: account.opened_ns <= before_ns, opened)
            return list(islice((account.name for account in old if account.name.startswith(prefix)), limit))

    def forget(self, names: Collection[str]) -> int:
        with self._lock:
            named = {self._accounts[name] for name in names if name in self._accounts}
            # Of one that no other is under, the calls under way are its own.
            free = {account for account in named if account.steps_taken == account.steps_done}
            waiting = {lease.ticket.account for lease in self._leases.values()}
            gone = free - {account.parent for account in self._accounts.values()} - waiting
            self._charges = {key: one for key, one in self._charges.items() if one[0] not in gone}
            self._draws = {key: account for key, account in self._draws.items() if account not in gone}
            for account in gone:
                self._dearest.pop(account, None)
                for key in self._keys_of.pop(account, ()):
                    self._unhinted.pop(key, None)
                    del self._holds[key]
                del self._accounts[account.name]
            return len(gone)

    def _account(self, name: str) -> Account:
        try:
            return self._accounts[name]
        except KeyError:
            raise no_account(name) from None

    def _hold(self, key: str) -> Taken:
        if key in self._charges:
            raise charged_not_held(key)
        try:
            return self._holds[key][0]
        except KeyError:
            raise no_hold(key) from None

    def _is_held(self, key: str, account: str, ask: Amounts, is_unhinted: bool) -> bool:
        """Whether exactly this is held under the key; KeyTaken if the key was used for something else."""
        if key in self._charges:
            raise charged_not_held(key)
        known, amounts = self._holds.get(key, (None, None))
        if known is None or known.state == "withdrawn":
            return False
        check_held(key, known.state)
        check_same("hold", key, (known._account.name, amounts), (account, as_held(ask, amounts, is_unhinted)))
        return True

    def _record(self, key: str, taken: Taken, ask: Amounts, under: str | None) -> None:
        known = self._holds.get(key)
        if known is not None:  # it was withdrawn, perhaps from another account
            self._keys_of[known[0]._account].discard(key)
        self._holds[key] = taken, ask
        self._under_way[key] = UnderWay(taken, under)
        self._keys_of.setdefault(taken._account, set()).add(key)

    def _end(self, key: str, to: HoldState, end: Callable[[Taken], None], cost: int = 0) -> None:
        with self._lock:
            held = self._hold(key)
            if held.state == to:
                return
            end(held)
            self._under_way.pop(key, None)
            if key in self._unhinted:
                for level in limited(held._account) if to == "settled" else ():
                    self._dearest[level] = max(cost, self._dearest.get(level, 0))
                if to != "unresolved":
                    del self._unhinted[key]
            woken = [key] if self._leases.pop(key, None) else []  # admitted, and its call had not picked it up
            woken += self._advance(held._account)
        self._wakeups.wake(woken)

    def _advance(self, account: Account) -> list[str]:
        """Admit waiting calls after a change at the account; return the keys to wake."""
        return self._keep(self._queue(account)) if self._leases else []

    def _queue(self, account: Account) -> Queue:
        root, now_ns = accounts.levels_of(account)[-1], self._clock.monotonic_ns()
        tickets = []
        for lease in self._leases.values():
            if accounts.levels_of(lease.ticket.account)[-1] is root:
                lease.ticket.is_expired = now_ns >= lease.expires_ns
                tickets.append(lease.ticket)
        unhinted = [key for key, lease in self._unhinted.items() if now_ns < lease.expires_ns]
        return Queue(tickets, self._under_way, now_ns, unhinted, self._dearest)

    def _keep(self, queue: Queue, ask: Amounts | None = None) -> list[str]:
        """Record what was decided, and return the keys to wake; `ask` is that of a call that has just come."""
        for ticket in queue.withdrawn:
            del self._under_way[ticket.key]
            self._unhinted.pop(ticket.key, None)
        for ticket in queue.admitted:
            self._enter(ticket, self._leases[ticket.key].ask)
        for ticket in queue.entered:
            assert ask is not None, "only a call that has just come enters"
            self._enter(ticket, ask)
        for ticket in queue.removed:
            self._leases.pop(ticket.key, None)
        return queue.woken

    def _enter(self, ticket: Ticket, ask: Amounts) -> None:
        self._record(ticket.key, ticket.taken, taken_for(ticket, ask), ticket.under)
        if ticket.unhinted_lease_s is not None:
            length_ns = seconds_to_ns(ticket.unhinted_lease_s, "unhinted_lease_s")
            self._unhinted[ticket.key] = _Unhinted(length_ns, self._clock.monotonic_ns() + length_ns)

    def _at_ticket(self, key: str, do: Callable[[Queue], T]) -> T:
        woken: list[str] = []
        try:
            with self._lock:
                if key not in self._leases:
                    raise no_ticket(key)
                queue = self._queue(self._leases[key].ticket.account)
                try:
                    return do(queue)
                finally:  # also if the ticket has expired: others may have been admitted
                    woken = self._keep(queue)
        finally:
            self._wakeups.wake(woken)

    def _renewed(self, queue: Queue, key: str) -> Stop | Waiting | None:
        answer = queue.answer(key)
        if isinstance(answer, Waiting):
            self._leases[key].renew(self._clock.monotonic_ns())
        return answer


def new_ticket(
    key: str,
    account: Account,
    ask: Amounts,
    retry_drawn: bool,
    under: str | None,
    request: TicketRequest | None = None,
    unhinted_lease_s: float | None = None,
) -> Ticket:
    """Return the ticket of a call that has just come."""
    if unhinted_lease_s is not None:
        checks.seconds("unhinted_lease_s", unhinted_lease_s, above_zero=True)
    amounts = ask.cost_nanos, ask.tokens_in + ask.tokens_out, ask.api_calls
    run, owner = ("", "") if request is None else (request.run, request.owner)
    return Ticket(
        key, account, amounts, retry_drawn, under=under, run=run, owner=owner, unhinted_lease_s=unhinted_lease_s
    )


def taken_for(ticket: Ticket, ask: Amounts) -> Amounts:
    """Return what the call of a ticket with these amounts holds: an un-hinted one perhaps more."""
    return ask if ticket.unhinted_lease_s is None else replace(ask, cost_nanos=ticket.cost)


def as_held(ask: Amounts, held: Amounts | None, is_unhinted: bool) -> Amounts:
    """Return the requested amounts as they are held: an un-hinted call may hold more."""
    if not is_unhinted or held is None:
        return ask
    return replace(ask, cost_nanos=max(ask.cost_nanos, held.cost_nanos))


def check_page(age_s: float, limit: int) -> tuple[int, int]:
    """An age in nanoseconds and the size of a page; InvalidValue if one of them is none."""
    return seconds_to_ns(age_s, "age_s"), min(checks.integer("limit", limit, minimum=1), MAX_PAGE)


def no_account(name: str) -> KeyError:
    """The error of a store for an account that was never opened."""
    return KeyError(f"no account {name!r}; open it first")


def no_hold(key: str) -> LedgerError:
    """The error of a store for a key that is not held."""
    return LedgerError(f"no hold {key!r}: it was refused, or never taken")


def charged_not_held(key: str) -> KeyTaken:
    """The error of a store for a hold under a key that was charged."""
    return KeyTaken(key, f"{key!r} was charged, not held; a hold needs a key of its own")


def above_already(account: str, parent: str) -> LedgerError:
    """The error of a store for an account put under itself, or under one that is below it."""
    return LedgerError(f"account {account!r} cannot be put under {parent!r}, which is under it")


def under_another(account: str, parent: str, above: str) -> LedgerError:
    """The error of a store for an account that is already under another one."""
    return UnderAnother(account, parent, above)


def check_held(key: str, state: str | None) -> None:
    """KeyTaken if what was taken under a key is no longer held: a call that leaves now would not be paid for."""
    if state != "held":
        raise KeyTaken(key, f"hold {key!r} is {state}: its call has ended, and another call needs a key of its own")


def held_not_charged(key: str) -> KeyTaken:
    """The error of a store for a charge under a key that was held."""
    return KeyTaken(key, f"{key!r} was held, not charged; settle it, or charge under a key of its own")


def waits_already(key: str) -> KeyTaken:
    """The error of a store for a hold under a key that waits."""
    return KeyTaken(key, f"{key!r} waits for holds of other calls; renew its ticket, or leave the queue first")


def check_same(what: str, key: str, known: tuple[str, Amounts | None], given: tuple[str, Amounts | None]) -> None:
    """KeyTaken if a key that a store knows is used for another account, or with other amounts."""
    if known[0] != given[0]:
        raise KeyTaken(key, f"{what} {key!r} was taken from {known[0]!r}, not from {given[0]!r}")
    if known[1] != given[1]:
        raise KeyTaken(key, f"{what} {key!r} was taken for {known[1]}, not for {given[1]}")


def _check_amounts(**amounts: int) -> None:
    """A negative amount would give back money that was never taken, a fraction would make sums inexact."""
    for field, amount in amounts.items():
        checks.integer(field, amount)
