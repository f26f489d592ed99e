"""The calls that wait at a ledger store, for the length of one transaction.

A store reads the tickets of one tree of accounts, and the holds around them, into a `Queue`; lets it decide, as
`waiting.WaitingRoom` decides for one process; and writes the outcome back. Which tickets have expired is for the store
to say, by its own clock.

**Calls of unknown cost.** A model call whose worst case is not known is `unhinted`. Under a ceiling of money, at any
level, such calls run one at a time until one of them has been settled at that level; then each holds the most that one
has cost there. What runs under such a call does not wait for it, but un-hinted calls among that run one at a time too.
After one that ends without a bill, or is withdrawn, the next one runs alone. Its process keeps a lease, so that one
that died does not keep the others waiting.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple
from weakref import proxy

from penstock.containment import accounts
from penstock.containment.accounts import Account, Hold, Taken
from penstock.containment.limits import UNLIMITED
from penstock.containment.waiting import Waiter, WaitingRoom, refused_as_stuck
from penstock.errors import LedgerError
from penstock.stops import Stop, StopReason

TicketState = Literal["waiting", "admitted", "refused"]
"""An admitted ticket has a hold, which its call has not picked up yet."""

BEHIND = "; calls that came before wait for the rest"
ONE_AT_A_TIME = (
    "the cost of model calls without a hint is not known at {!r} until one has succeeded, and under a money limit they "
    "run one at a time until then; pass a cost hint"
)


@dataclass(frozen=True, slots=True)
class Waiting:
    """The answer of a store to a call that has a ticket and is not admitted yet."""

    stop: Stop
    """What refused the call when it joined the queue."""
    number: int
    """Arrival number of the ticket; a later call has a larger one."""


class Ticket(Waiter):
    """A call that waits at a store, by the key that it will hold under."""

    __slots__ = ("is_expired", "key", "queue", "reason", "requested", "state", "under", "unhinted_lease_s")

    def __init__(
        self,
        key: str,
        account: Account,
        amounts: tuple[int, int, int],
        retry_drawn: bool,
        *,
        under: str | None,
        run: str = "",
        owner: str = "",
        unhinted_lease_s: float | None = None,
    ) -> None:
        """`amounts` are the cost, the tokens and the API calls. `unhinted_lease_s` is None if the cost has a hint."""
        super().__init__(Hold(account, *amounts), account, *amounts, retry_drawn, run=run, owner=owner)
        self.key = key
        self.under = under
        self.unhinted_lease_s = unhinted_lease_s
        self.requested = amounts[0]
        """The requested cost; an un-hinted call may hold more."""
        self.queue: Queue | None = None
        """Weak. Knows whether an un-hinted call has to wait for another one; None for all others."""
        self.reason: Stop | None = None
        """What refused the call when it joined, and then what refuses it for good; None before it joins."""
        self.state: TicketState = "waiting"
        self.is_expired = False

    def waits_for(self) -> Taken | None:
        """Return the un-hinted call that has to end first."""
        return None if self.queue is None else self.queue.first_for(self)

    def entered(self) -> None:
        """Let other un-hinted calls wait for this one."""
        if self.queue is not None:
            self.queue.runs_alone(self)


class UnderWay(NamedTuple):
    """A call that holds, and the key of the hold it runs under."""

    held: Taken
    under: str | None


class Queue:
    """The tickets of one tree of accounts, and what was decided about them since they were read.

    A store writes in this order: `withdrawn` holds, holds of the `admitted` and the `entered`, then the tickets.
    """

    def __init__(
        self,
        tickets: Iterable[Ticket],
        under_way: Mapping[str, UnderWay],
        now_ns: int,
        unhinted: Collection[str] = (),
        dearest: Mapping[Account, int] | None = None,
    ) -> None:
        """`under_way` has the holds that waiting calls are part of, and every hold directly under one of those.

        It also has the holds of `unhinted`: those of un-hinted calls whose lease lasts. `dearest` is the most that one
        has cost at an account; an account is not in it until one was settled there.
        """
        self.tickets: dict[str, Ticket] = {}
        self.removed: list[Ticket] = []
        """Tickets that are gone: they have expired, were given back, or their call has its answer."""
        self.withdrawn: list[Ticket] = []
        """Tickets whose hold is withdrawn, because their call did not pick it up."""
        self.admitted: list[Ticket] = []
        self.entered: list[Ticket] = []
        """Calls that hold without having waited."""
        self.joined: Ticket | None = None
        self._now_ns = now_ns
        self._under_way = dict(under_way)
        self._room = WaitingRoom()
        self._before: dict[Ticket, tuple[str, int]] = {}
        self._woken: list[str] = []
        self._alone = {key: under_way[key].held for key in unhinted if key in under_way}
        self._dearest = dearest or {}
        for ticket in tickets:
            ticket.queue = proxy(self) if ticket.unhinted_lease_s is not None else None
            self.tickets[ticket.key] = ticket
            self._before[ticket] = ticket.state, ticket.passed
            if ticket.state == "waiting":
                ticket.above = self._above(ticket.under)
                self._room.restore(ticket)
        for ticket in [ticket for ticket in self.tickets.values() if ticket.is_expired]:
            self._remove(ticket)
        self.advance()

    @property
    def changed(self) -> list[Ticket]:
        """Tickets that were there before, are still there, and have another state or were passed."""
        return [
            ticket
            for ticket, before in self._before.items()
            if ticket.key in self.tickets and before != (ticket.state, ticket.passed)
        ]

    @property
    def woken(self) -> list[str]:
        """Keys of calls for which the store has another answer than before."""
        return self._woken

    def advance(self) -> None:
        """Admit and refuse all calls that can be decided now."""
        while decided := self._room.admit(self._now_ns):
            for waiter in decided:
                assert isinstance(waiter, Ticket)
                if waiter.stop is not None:
                    self._refuse(waiter, waiter.stop)
                else:
                    self._admit(waiter)
        self._refuse_stuck()

    def enter(self, newcomer: Ticket) -> Stop | None:
        """Take what a call that has no ticket asks for, unless it would take the room of one that has."""
        newcomer.above = self._above(newcomer.under)
        newcomer.queue = proxy(self) if newcomer.unhinted_lease_s is not None else None
        stop = (
            self._one_at_a_time(newcomer)
            or self._first_of_those_that_wait(newcomer)
            or accounts.take(
                newcomer.taken,
                newcomer.account,
                newcomer.cost,
                newcomer.tokens,
                newcomer.api_calls,
                self._now_ns,
                newcomer.retry_drawn,
            )
        )
        if stop is None:
            self.entered.append(newcomer)
            newcomer.entered()
            self._under_way[newcomer.key] = UnderWay(newcomer.taken, newcomer.under)
        return stop

    def enter_or_join(self, newcomer: Ticket) -> Stop | Waiting | None:
        """Take what a call asks for, or let it wait; unless nothing that could come free would make room for it."""
        if (stop := self.enter(newcomer)) is None or not stop.momentary:
            return stop
        newcomer.reason = stop
        self.tickets[newcomer.key] = newcomer
        self._room.join(newcomer)
        self._refuse_stuck()
        if newcomer.state == "waiting":
            self.joined = newcomer
        return self.answer(newcomer.key)

    def first_for(self, ticket: Ticket) -> Taken | None:
        """Return the un-hinted call, if any, that has to end before this one, which is un-hinted too.

        Raises what the ticket takes to the most that such a call has cost.
        """
        levels = limited(ticket.account)
        ticket.cost = max([ticket.requested, *(self._dearest[level] for level in levels if level in self._dearest)])
        if not self._alone or not (unknown := self._unknown(ticket)):
            return None
        for key in sorted(self._alone.keys() - self._keys_above(ticket.under)):
            if any(level in unknown for level in accounts.levels_of(self._alone[key]._account)):
                return self._alone[key]
        return None

    def runs_alone(self, ticket: Ticket) -> None:
        """Let un-hinted calls wait for this one, where none has ended yet."""
        self._alone[ticket.key] = ticket.taken

    def answer(self, key: str) -> Stop | Waiting | None:
        """Return the answer to the call of a ticket; a final one removes the ticket. LedgerError if there is none."""
        if (ticket := self.tickets.get(key)) is None:
            raise no_ticket(key)
        if ticket.state == "waiting":
            assert ticket.reason is not None
            return Waiting(ticket.reason, ticket.number)
        del self.tickets[key]
        self.removed.append(ticket)
        return None if ticket.state == "admitted" else ticket.reason

    def leave(self, key: str) -> None:
        """Remove a ticket; if its call was admitted, withdraw the hold. LedgerError if there is no such ticket."""
        if (ticket := self.tickets.get(key)) is None:
            raise no_ticket(key)
        self._remove(ticket)
        self.advance()

    def _remove(self, ticket: Ticket) -> None:
        del self.tickets[ticket.key]
        self.removed.append(ticket)
        self._woken.append(ticket.key)
        if ticket.state == "admitted":
            accounts.withdraw(ticket.taken)
            self._under_way.pop(ticket.key, None)
            self._alone.pop(ticket.key, None)
            if ticket in self.admitted:  # in this very transaction: the store has no hold yet
                self.admitted.remove(ticket)
            else:
                self.withdrawn.append(ticket)
        elif ticket.state == "waiting":
            self._room.leave(ticket)

    def _unknown(self, ticket: Ticket) -> list[Account]:
        """Return the levels where no un-hinted call was settled, the nearest first."""
        return [level for level in limited(ticket.account) if level not in self._dearest]

    def _one_at_a_time(self, newcomer: Ticket) -> Stop | None:
        if (first := newcomer.waits_for()) is None:
            return None
        if (stop := accounts.used_up(newcomer.account, self._now_ns, newcomer.retry_drawn)) is not None:
            return stop
        others = accounts.levels_of(first._account)
        level = next(level for level in self._unknown(newcomer) if level in others)
        message = ONE_AT_A_TIME.format(level.name)
        return Stop(StopReason.BUDGET_EXCEEDED, message, budget=level.name, momentary=True)

    def _first_of_those_that_wait(self, newcomer: Ticket) -> Stop | None:
        """Return the stop of a call that fits, and would take the room of one that waits."""
        if accounts.without_room(newcomer.account, newcomer.cost, newcomer.tokens) or self._room.may_enter(newcomer):
            return None
        first = self._room.first()
        assert isinstance(first, Ticket)
        assert first.reason is not None
        return replace(first.reason, message=f"{first.reason.message}{BEHIND}", momentary=True)

    def _admit(self, ticket: Ticket) -> None:
        ticket.state = "admitted"
        self.admitted.append(ticket)
        self._woken.append(ticket.key)
        self._under_way[ticket.key] = UnderWay(ticket.taken, ticket.under)

    def _refuse_stuck(self) -> None:
        # A refused call ends, and the one it is part of continues: each refusal may be enough.
        while (newest := self._room.stuck(self._blocked())) is not None:
            assert isinstance(newest, Ticket)
            assert newest.reason is not None
            self._refuse(newest, refused_as_stuck(newest.reason))

    def _refuse(self, ticket: Ticket, stop: Stop) -> None:
        ticket.state, ticket.reason = "refused", stop
        self._woken.append(ticket.key)

    def _blocked(self) -> list[Taken]:
        """Return the holds whose calls cannot end, because all that runs under them waits."""
        waiting = {key for ticket in self._room if isinstance(ticket, Ticket) for key in self._keys_above(ticket.under)}
        free = {
            above
            for key in self._under_way
            if key not in waiting  # it runs, and so does everything that it is part of
            for above in self._keys_above(key)
        }
        return [self._under_way[key].held for key in waiting - free]

    def _above(self, under: str | None) -> list[Taken]:
        found = ((key, self._under_way[key].held) for key in self._keys_above(under))
        return [held for key, held in found if held._held_cost or held._held_tokens or key in self._alone]

    def _keys_above(self, key: str | None) -> Iterator[str]:
        """Yield the key and those of the holds that it is under, as far as they are still held."""
        seen: set[str] = set()  # keys come from callers: a circle of them must not hang a store
        while key is not None and key in self._under_way and key not in seen:
            seen.add(key)
            yield key
            key = self._under_way[key].under


def limited(account: Account) -> list[Account]:
    """Return the levels of an account that have a ceiling of money."""
    return [level for level in accounts.levels_of(account) if level.max_cost < UNLIMITED]


def no_ticket(key: str) -> LedgerError:
    """The error of a store for a key that does not wait."""
    return LedgerError(f"no ticket {key!r}: it expired, was given back, or never existed; join the queue first")
