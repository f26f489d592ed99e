"""Who is admitted next, when calls wait for what others hold.

A call that fits beside what is spent and unresolved, but not beside what other calls hold, waits in a `WaitingRoom`. It
holds nothing meanwhile. When something comes free, `admit` takes the worst case of the next ones from their accounts,
in one act, and says whom to wake. The rules:

- Runs and owners take turns; the calls of one run come first come first served.
- A later call may pass one that still waits if both fit beside what is spent, or if the earlier one waits for room
  elsewhere; but only `MAX_PASSED` times. After that, the account drains for the one that waits.
- A call that is part of another one that holds something may always pass: the hold of that one ends after it.
- A hold can come free only while work under it is running. If all that stands in the way are holds whose calls wait
  themselves, nothing would ever come free: the newest call that waits under one of them is refused (`stuck`).

Pure: the caller holds the lock of the accounts, or its transaction, and passes the time. The stores read their queue
into a room, let it decide, and write the outcome back.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import merge
from itertools import chain, islice
from operator import attrgetter
from typing import Any

from penstock.containment import accounts
from penstock.containment.accounts import Account, Taken
from penstock.stops import Stop

MAX_PASSED = 4
"""How many later calls may pass one that waits."""
LOOKAHEAD = 16
"""How many calls of one account are considered at a time, so that a long queue costs no more than a short one."""

STUCK = "; the calls that hold the rest wait themselves, so waiting would not end"

_order = attrgetter("turn", "number")


class Waiter:
    """A call that waits, and what it will take."""

    __slots__ = (
        "above",
        "account",
        "api_calls",
        "cost",
        "number",
        "owner",
        "passed",
        "retry_drawn",
        "run",
        "stop",
        "taken",
        "tokens",
        "turn",
    )

    def __init__(
        self,
        taken: Taken,
        account: Account,
        cost: int,
        tokens: int,
        api_calls: int,
        retry_drawn: bool = False,
        *,
        run: object = None,
        owner: object = None,
        above: Collection[Taken] = (),
    ) -> None:
        self.taken = taken
        """Filled in when it is admitted."""
        self.account = account
        self.cost = cost
        self.tokens = tokens
        self.api_calls = api_calls
        self.retry_drawn = retry_drawn
        self.run = run
        self.owner = run if owner is None else owner
        self.above = above
        """The holds of the calls that this one is part of, as far as they hold money or tokens."""
        self.number = 0
        """In the order of arrival."""
        self.turn = 0
        self.passed = 0
        """How many later calls have passed it."""
        self.stop: Stop | None = None
        """Why it was refused."""

    def waits_for(self) -> Taken | None:
        """The call, if any, that has to end first for another reason than room."""
        return None

    def was_taken(self) -> bool:
        """Whether its worst case is taken although it is still here: a signal handler has raised in between."""
        return False

    def blocked(self, seen: dict[object, Any]) -> Collection[Taken]:
        """Those of `above` that cannot end, because all that runs under them waits.

        `seen` is for what one call finds out and the next ones need too: it is passed to all of them, and then dropped.
        """
        return self.above

    def refusal(self, now_ns: int) -> Stop:
        """Return what keeps it waiting."""
        return accounts.refusal(self.account, self.cost, self.tokens, self.api_calls, now_ns, self.retry_drawn)

    def shrinks(self) -> bool:
        """Do with less, if it can, when it no longer fits beside what is spent; return whether it does."""
        return False

    def entered(self) -> None:
        """Called when it was admitted, before the next one is considered."""

    def wake(self) -> None:
        """Called when it was admitted or refused; may be called again."""


@dataclass(slots=True)
class _Share:
    """The calls of one run that wait."""

    calls: int = 0
    last_turn: int = -1


class WaitingRoom:
    """The calls that wait for room in one tree of accounts."""

    __slots__ = ("_last_number", "_last_turn", "_nested", "_owners", "queues")

    def __init__(self) -> None:
        self.queues: dict[Account, list[Waiter]] = {}
        """The calls that wait, by account, the next one first; empty while no call waits."""
        # What follows only repeats what is in the queues, so that no step looks at all who wait. A signal handler may
        # raise between a change of both: then turns are a little uneven until the room is empty.
        self._owners: dict[object, dict[object, _Share]] = {}
        """How many calls of each run wait, by owner."""
        self._nested: dict[Waiter, None] = {}
        """Those that are part of a call that holds something."""
        self._last_number = 0
        self._last_turn = 0

    def __iter__(self) -> Iterator[Waiter]:
        """All that wait, in no order."""
        return chain.from_iterable(self.queues.values())

    def __len__(self) -> int:
        return sum(map(len, self.queues.values()))

    def join(self, waiter: Waiter) -> None:
        """Add a new call behind those of its run, and in turn with the others."""
        self._last_number = waiter.number = self._last_number + 1
        waiter.turn = self._turn_of(waiter)
        self.restore(waiter)

    def restore(self, waiter: Waiter) -> None:
        """Add a call that joined before and has its number and its turn."""
        queue = self.queues.get(waiter.account)
        # In one act: a signal handler may raise anywhere, and an empty queue would look like calls that wait.
        if queue is None:
            self.queues[waiter.account] = [waiter]
        else:
            insort(queue, waiter, key=_order)
        self._last_number = max(self._last_number, waiter.number)
        share = self._owners.setdefault(waiter.owner, {}).setdefault(waiter.run, _Share())
        share.calls += 1
        share.last_turn = max(share.last_turn, waiter.turn)
        if waiter.above:
            self._nested[waiter] = None

    def _turn_of(self, newcomer: Waiter) -> int:
        """One turn for each run, and for each owner as many as for any other, however many runs it has."""
        first = min((queue[0].turn for queue in self.queues.values()), default=self._last_turn)
        runs = self._owners.get(newcomer.owner, {})
        share = runs.get(newcomer.run)
        if share is None:
            return first + len(runs)
        return first + len(runs) - 1 if share.last_turn < first else share.last_turn + len(runs)

    def leave(self, waiter: Waiter) -> bool:
        """Remove the call; False if it waits no more."""
        queue = self.queues.get(waiter.account)
        if queue is None or waiter not in queue:
            return False
        self._nested.pop(waiter, None)  # first: one that is gone must not be considered
        if len(queue) == 1:
            del self.queues[waiter.account]
        else:
            queue.remove(waiter)
        self._forget(waiter)
        return True

    def _forget(self, waiter: Waiter) -> None:
        """Count one call less of the waiter's run."""
        if not self.queues:
            self._owners.clear()
            self._nested.clear()
            return
        runs = self._owners.get(waiter.owner, {})
        share = runs.get(waiter.run)
        if share is not None and share.calls > 1:
            share.calls -= 1
        elif share is not None:
            del runs[waiter.run]
            if not runs:
                del self._owners[waiter.owner]

    def may_enter(self, newcomer: Waiter) -> bool:
        """Whether a call that has just come, and that there is room for, may pass all that wait; counts that it did."""
        ahead = []
        for waiter in self._considered():
            if waiter.waits_for() is None:
                ahead.append((waiter, accounts.without_room(waiter.account, waiter.cost, waiter.tokens)))
        return _passes(newcomer, ahead)

    def admit(self, now_ns: int) -> list[Waiter]:
        """Admit and refuse all that can be decided now, and return them: `stop` is None for the admitted ones."""
        decided: list[Waiter] = []
        self._admit_into(decided, now_ns)
        return decided

    def _admit_into(self, decided: list[Waiter], now_ns: int) -> None:
        ahead: list[tuple[Waiter, list[Account]]] = []
        for waiter in self._considered():
            if not waiter.was_taken():
                if waiter.waits_for() is not None:
                    continue
                account = waiter.account
                if _fits_alone(waiter) or (waiter.shrinks() and _fits_alone(waiter)):
                    if blocked := accounts.without_room(account, waiter.cost, waiter.tokens):
                        ahead.append((waiter, blocked))
                        continue
                    if not _passes(waiter, ahead):
                        continue
                # Takes it; or says why it can never be taken.
                waiter.stop = accounts.take(
                    waiter.taken, account, waiter.cost, waiter.tokens, waiter.api_calls, now_ns, waiter.retry_drawn
                )
            decided.append(waiter)  # first: one that has left must not be forgotten
            self.leave(waiter)
            self._last_turn = waiter.turn
            if waiter.stop is None:
                waiter.entered()

    def changed(self, now_ns: int) -> None:
        """Decide what can be decided now that something came free or another call waits, and wake those concerned."""
        decided: list[Waiter] = []
        try:
            self._decide(decided, now_ns)
        except BaseException:  # from a signal handler: deciding and waking again does no harm, not waking would
            self._decide(decided, now_ns)
            raise

    def _decide(self, decided: list[Waiter], now_ns: int) -> None:
        self._admit_into(decided, now_ns)
        while self.queues and self._nested and (newest := self._newest_if_stuck(self._blocked())) is not None:
            newest.stop = refused_as_stuck(newest.refusal(now_ns))
            decided.append(newest)
            self.leave(newest)
        for waiter in decided:
            waiter.wake()

    def stuck(self, blocked: Collection[Taken]) -> Waiter | None:
        """Remove and return the newest call under one of `blocked` if nothing that would let any call go can come free.

        `blocked` are the holds of calls that cannot end, because all that runs under them waits.
        """
        newest = self._newest_if_stuck(blocked)
        if newest is not None:
            self.leave(newest)
        return newest

    def _newest_if_stuck(self, blocked: Collection[Taken]) -> Waiter | None:
        if not blocked or self._moves_without(blocked):
            return None
        under = (waiter for waiter in self._nested if any(held in blocked for held in waiter.above))
        return max(under, key=attrgetter("number"), default=None)

    def _moves_without(self, blocked: Collection[Taken]) -> bool:
        """Whether any call could be admitted or refused once all holds but these have come free.

        Room alone is not enough: a call also has to pass those that came before it and still wait.
        """
        ahead: list[tuple[Waiter, list[Account]]] = []
        for waiter in self._considered():
            first = waiter.waits_for()
            if first is not None:
                if first not in blocked:
                    return True
                continue
            short_of = _short_of_room(waiter, blocked)
            if not _fits_alone(waiter) or (not short_of and _may_pass(waiter, ahead) is not None):
                return True
            ahead.append((waiter, short_of))
        return False

    def _blocked(self) -> Collection[Taken]:
        seen: dict[object, Any] = {}
        return {held for waiter in self._nested for held in waiter.blocked(seen)}

    def first(self) -> Waiter:
        """Return the next one."""
        return min((queue[0] for queue in self.queues.values()), key=_order)

    def _considered(self) -> list[Waiter]:
        """Return the first ones of each account, and those that are part of a call that holds something."""
        first = list(merge(*(islice(queue, LOOKAHEAD) for queue in self.queues.values()), key=_order))
        if not self._nested:
            return first
        waiting = set(self)  # a signal handler may have left one in `_nested` that has gone
        return sorted({*first, *(waiter for waiter in self._nested if waiter in waiting)}, key=_order)


def refused_as_stuck(stop: Stop) -> Stop:
    """Return the stop of a call for which nothing will come free."""
    return replace(stop, message=f"{stop.message}{STUCK}", momentary=False)


def _fits_alone(waiter: Waiter) -> bool:
    return accounts.fits_alone(waiter.account, waiter.cost, waiter.tokens)


def _passes(later: Waiter, ahead: Iterable[tuple[Waiter, list[Account]]]) -> bool:
    """Whether the later call may go before all of these; if so, counts that it passed them."""
    passed = _may_pass(later, ahead)
    for waiter in passed or ():
        waiter.passed += 1
    return passed is not None


def _may_pass(later: Waiter, ahead: Iterable[tuple[Waiter, list[Account]]]) -> list[Waiter] | None:
    """Return those that wait for room where the later call takes some, if it may go before all of them; else None."""
    passed: list[Waiter] = []
    if later.above:
        return passed
    own = accounts.levels_of(later.account)
    for waiter, blocked in ahead:
        shared = [level for level in blocked if level in own]
        if not shared:
            continue
        if waiter.passed >= MAX_PASSED or not all(_both_fit(level, later, waiter) for level in shared):
            return None
        passed.append(waiter)
    return passed


def _both_fit(level: Account, later: Waiter, waiter: Waiter) -> bool:
    """Whether both fit beside what is spent and unresolved."""
    cost = level.committed - level.held + later.cost + waiter.cost
    tokens = level.tokens_committed - level.tokens_held + later.tokens + waiter.tokens
    return cost <= level.max_cost and tokens <= level.max_tokens


def _short_of_room(waiter: Waiter, blocked: Collection[Taken]) -> list[Account]:
    """Return the levels that would have no room for it if all holds but these came free."""
    short_of = []
    for level in accounts.without_room(waiter.account, waiter.cost, waiter.tokens):
        cost = level.committed - level.held + (waiter.cost or 1)
        tokens = level.tokens_committed - level.tokens_held + (waiter.tokens or 1)
        for held in blocked:
            if level in accounts.levels_of(held._account):
                cost += held._held_cost
                tokens += held._held_tokens
        if cost > level.max_cost or tokens > level.max_tokens:
            short_of.append(level)
    return short_of
