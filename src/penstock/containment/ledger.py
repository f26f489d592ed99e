"""The judge of money, steps, tokens, calls and retries.

`Ledger` is the in-process judge: one lock for a whole tree of accounts, so that a hold at a budget and at all of its
ancestors is one act. `LedgerStore` is the same contract by name and key, for budgets that outlive a process or are
shared by several; the in-memory store is its specification.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile, islice, takewhile
from typing import Protocol

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.containment import accounts
from penstock.containment.accounts import Account, Balance, Hold
from penstock.containment.limits import NO_LIMITS, Ceilings, Limits, as_limits, seconds_to_ns
from penstock.errors import InvalidValue, KeyTaken, LedgerError
from penstock.stops import Stop

MAX_PAGE = 10_000
"""So many accounts are listed at once, however many are asked for."""


class Ledger:
    """A tree of accounts that threads may use at the same time."""

    __slots__ = ("clock", "lock", "root")

    def __init__(self, name: str = "main", limits: Ceilings = NO_LIMITS, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.clock = clock
        self.lock = threading.RLock()
        """Taken for every change. A caller that has more to do in the same act may hold it and use `accounts`."""
        self.root = Account(name, as_limits(limits), None, clock.monotonic_ns())

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
        with self.lock:
            accounts.settle(held, cost_nanos, tokens_in, tokens_out, succeeded)

    def release(self, held: Hold) -> None:
        """The call failed and cost nothing."""
        with self.lock:
            accounts.release(held)

    def withdraw(self, held: Hold) -> None:
        """The call never ran."""
        with self.lock:
            accounts.withdraw(held)

    def leave_unresolved(self, held: Hold) -> None:
        """The call is over and its bill is unknown: what it held stays taken."""
        with self.lock:
            accounts.leave_unresolved(held)

    def draw_retry(self, account: Account) -> bool:
        """Take one retry from every level; False if one has none left."""
        with self.lock:
            return accounts.draw_retry(account)

    def grant(self, account: Account, limits: Ceilings) -> None:
        """Replace the ceilings of an account; what was taken stays taken."""
        with self.lock:
            accounts.set_limits(account, as_limits(limits))

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
        # Made twice for every call that a store is asked for: by name they are looked at if one of them is wrong.
        if (
            not type(cost_nanos) is type(tokens_in) is type(tokens_out) is type(api_calls) is int
            or cost_nanos < 0
            or tokens_in < 0
            or tokens_out < 0
            or api_calls < 0
        ):
            _check_amounts(cost_nanos=cost_nanos, tokens_in=tokens_in, tokens_out=tokens_out, api_calls=api_calls)


class LedgerStore(Protocol):
    """Accounts by name and holds by key; every method is atomic, and every one with a key is idempotent by it.

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

    def hold(self, key: str, account: str, ask: Amounts, *, retry_drawn: bool = False) -> Stop | None:
        """Take `ask` from the account and every ancestor, or say what refuses.

        A key is taken once: asking again while it is held answers None and takes nothing. KeyTaken if it is asked
        again of another account or with other amounts, for then one of the two calls is not the one that was admitted;
        and once the call has ended, for then it is another call that asks. What was refused or withdrawn has left
        nothing behind, so its key may be asked for again.
        """

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

    def unresolved(self) -> Mapping[str, Amounts]:
        """The keys whose bill is unknown, with what each still holds."""

    def held(self, prefix: str = "") -> Mapping[str, Amounts]:
        """The keys that begin with `prefix` and are still held, with what each holds.

        Their calls are under way, or their process died before it said how they ended.
        """

    def aged(self, age_s: float, *, after: str | None = None, limit: int = 1_000) -> Sequence[str]:
        """Accounts that were opened at least so long ago, in the order they were opened in.

        `after` is the last one of the page before; behind one that is not there any more comes nothing.
        """

    def forget(self, names: Collection[str]) -> int:
        """Remove accounts, and every key that was theirs; how many. What they used stays counted above them.

        For what nobody asks for any more. Those that others are under, or that something is held from, are left.
        """


class WouldWait(BaseException):
    """What was asked of a store that may not wait has to: nothing of it was done, and somebody asks again who can wait.

    It is nobody's error, and passes by whoever looks after errors.
    """


class MemoryLedgerStore:
    """The store that keeps nothing beyond its process: the specification of `LedgerStore`."""

    is_immediate = True
    """It answers at once: whoever asks on an event loop needs no thread."""

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._accounts: dict[str, Account] = {}
        self._holds: dict[str, tuple[Hold, Amounts]] = {}
        self._keys_of: dict[Account, set[str]] = {}
        """The keys of what was held from each account: to forget one takes no look at what all others have held."""
        self._charges: dict[str, tuple[Account, Amounts]] = {}
        self._draws: dict[str, Account] = {}

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
            accounts.set_limits(self._account(account), limits)

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

    def hold(self, key: str, account: str, ask: Amounts, *, retry_drawn: bool = False) -> Stop | None:
        with self._lock:
            target = self._account(account)
            if key in self._charges:
                raise charged_not_held(key)
            known, asked = self._holds.get(key, (None, None))
            if known is not None and known.state != "withdrawn":
                check_held(key, known.state)
                check_same("hold", key, (known.account.name, asked), (account, ask))
                return None
            tokens, now_ns = ask.tokens_in + ask.tokens_out, self._clock.monotonic_ns()
            taken = accounts.hold(target, ask.cost_nanos, tokens, ask.api_calls, now_ns, retry_drawn)
            if isinstance(taken, Stop):
                return taken
            if known is not None:  # it was withdrawn, perhaps from another account
                self._keys_of[known.account].discard(key)
            self._holds[key] = taken, ask
            self._keys_of.setdefault(target, set()).add(key)
            return None

    def settle(self, key: str, actual: Amounts, *, succeeded: bool = True) -> None:
        with self._lock:
            held = self._hold(key)
            if held.state != "settled":
                accounts.settle(held, actual.cost_nanos, actual.tokens_in, actual.tokens_out, succeeded)

    def release(self, key: str) -> None:
        with self._lock:
            held = self._hold(key)
            if held.state != "released":
                accounts.release(held)

    def withdraw(self, key: str) -> None:
        with self._lock:
            held = self._hold(key)
            if held.state != "withdrawn":
                accounts.withdraw(held)

    def leave_unresolved(self, key: str) -> None:
        with self._lock:
            held = self._hold(key)
            if held.state != "unresolved":
                accounts.leave_unresolved(held)

    def charge(self, key: str, account: str, actual: Amounts) -> None:
        with self._lock:
            target = self._account(account)
            known, amounts = self._charges.get(key, (None, None))
            if known is not None:
                check_same("charge", key, (known.name, amounts), (account, actual))
                return
            if key in self._holds:
                raise held_not_charged(key)
            accounts.charge(target, actual.cost_nanos, actual.tokens_in, actual.tokens_out, actual.api_calls)
            self._charges[key] = target, actual

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

    def unresolved(self) -> Mapping[str, Amounts]:
        with self._lock:
            return {key: ask for key, (held, ask) in self._holds.items() if held.state == "unresolved"}

    def held(self, prefix: str = "") -> Mapping[str, Amounts]:
        with self._lock:
            mine = ((key, held, ask) for key, (held, ask) in self._holds.items() if key.startswith(prefix))
            return {key: ask for key, held, ask in mine if held.state == "held"}

    def aged(self, age_s: float, *, after: str | None = None, limit: int = 1_000) -> Sequence[str]:
        age_ns, limit = check_page(age_s, limit)
        with self._lock:
            before_ns = self._clock.monotonic_ns() - age_ns
            opened: Iterable[Account] = self._accounts.values()
            if after is not None:
                opened = islice(dropwhile(lambda account: account.name != after, opened), 1, None)
            old = takewhile(lambda account: account.opened_ns <= before_ns, opened)
            return [account.name for account in islice(old, limit)]

    def forget(self, names: Collection[str]) -> int:
        with self._lock:
            asked = {self._accounts[name] for name in names if name in self._accounts}
            # Of one that no other is under, the calls under way are its own.
            free = {account for account in asked if account.steps_taken == account.steps_done}
            gone = free - {account.parent for account in self._accounts.values()}
            self._charges = {key: one for key, one in self._charges.items() if one[0] not in gone}
            self._draws = {key: account for key, account in self._draws.items() if account not in gone}
            for account in gone:
                for key in self._keys_of.pop(account, ()):
                    del self._holds[key]
                del self._accounts[account.name]
            return len(gone)

    def _account(self, name: str) -> Account:
        try:
            return self._accounts[name]
        except KeyError:
            raise no_account(name) from None

    def _hold(self, key: str) -> Hold:
        if key in self._charges:
            raise charged_not_held(key)
        try:
            return self._holds[key][0]
        except KeyError:
            raise no_hold(key) from None


def check_page(age_s: float, limit: int) -> tuple[int, int]:
    """An age in nanoseconds and the size of a page; InvalidValue if one of them is none."""
    if type(limit) is not int or limit < 1:
        raise InvalidValue("limit", limit, "a whole number, one or more")
    return seconds_to_ns(age_s, "age_s"), min(limit, MAX_PAGE)


def no_account(name: str) -> KeyError:
    """What a store says of an account that nobody opened."""
    return KeyError(f"no account {name!r}; open it first")


def no_hold(key: str) -> LedgerError:
    """What a store says of a key that nobody holds."""
    return LedgerError(f"no hold {key!r}: it was refused, or never asked for")


def charged_not_held(key: str) -> KeyTaken:
    """What a store says if a key that was charged is used as that of a hold."""
    return KeyTaken(key, f"{key!r} was charged, not held; a hold needs a key of its own")


def above_already(account: str, parent: str) -> LedgerError:
    """What a store says if an account is to be put under itself, or one that is under it."""
    return LedgerError(f"account {account!r} cannot be put under {parent!r}, which is under it")


def under_another(account: str, parent: str, above: str) -> LedgerError:
    """What a store says if an account is to leave the one it is under."""
    return LedgerError(
        f"account {account!r} cannot be put under {parent!r}: it is under {above!r}; put {parent!r} under that first"
    )


def check_held(key: str, state: str | None) -> None:
    """KeyTaken if what was taken under a key is not held any more: nobody would pay for a call that leaves now."""
    if state != "held":
        raise KeyTaken(key, f"hold {key!r} is {state}: its call has ended, and another call needs a key of its own")


def held_not_charged(key: str) -> KeyTaken:
    """What a store says if a key that was held is to be charged."""
    return KeyTaken(key, f"{key!r} was held, not charged; settle it, or charge under a key of its own")


def check_same(what: str, key: str, known: tuple[str, Amounts | None], asked: tuple[str, Amounts | None]) -> None:
    """KeyTaken if a key that a store knows is used for another account, or with other amounts."""
    if known[0] != asked[0]:
        raise KeyTaken(key, f"{what} {key!r} was taken from {known[0]!r}, not from {asked[0]!r}")
    if known[1] != asked[1]:
        raise KeyTaken(key, f"{what} {key!r} was taken for {known[1]}, not for {asked[1]}")


def _check_amounts(**amounts: int) -> None:
    """A negative amount would give money back that nobody took, a fraction would make sums inexact."""
    for field, amount in amounts.items():
        if type(amount) is not int or amount < 0:
            raise InvalidValue(field, amount, "a whole number, zero or more")
