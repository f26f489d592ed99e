"""The calls that wait at a ledger store, for the length of one transaction.

A store reads the tickets of one tree of accounts, and the holds around them, into a `Queue`; lets it decide, as
`waiting.WaitingRoom` decides for one process; and writes the outcome back. Which tickets have expired is for the store
to say, by its own clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from penstock.containment import accounts
from penstock.containment.accounts import Account, Hold, Taken
from penstock.containment.waiting import Waiter, WaitingRoom, refused_as_stuck
from penstock.errors import LedgerError
from penstock.stops import Stop

TicketState = Literal["waiting", "admitted", "refused"]
"""An admitted ticket has a hold, which its call has not picked up yet."""

BEHIND = "; calls that came before wait for the rest"


@dataclass(frozen=True, slots=True)
class Waiting:
    """The answer of a store to a call that has a ticket and is not admitted yet."""

    stop: Stop
    """What refused the call when it joined the queue."""
    number: int
    """Arrival number of the ticket; a later call has a larger one."""


class Ticket(Waiter):
    """A call that waits at a store, by the key that it will hold under."""

    __slots__ = ("is_expired", "key", "reason", "state", "under")

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
    ) -> None:
        """`amounts` are the cost, the tokens and the API calls."""
        super().__init__(Hold(account, *amounts), account, *amounts, retry_drawn, run=run, owner=owner)
        self.key = key
        self.under = under
        self.reason: Stop | None = None
        """What refused the call when it joined, and then what refuses it for good; None before it joins."""
        self.state: TicketState = "waiting"
        self.is_expired = False


class UnderWay(NamedTuple):
    """A call that holds, and the key of the hold it runs under."""

    held: Taken
    under: str | None


class Queue:
    """The tickets of one tree of accounts, and what was decided about them since they were read.

    A store writes in this order: `withdrawn` holds, holds of the `admitted` and the `entered`, then the tickets.
    """

    def __init__(self, tickets: Iterable[Ticket], under_way: Mapping[str, UnderWay], now_ns: int) -> None:
        """`under_way` has the holds that waiting calls are part of, and every hold directly under one of those."""
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
        for ticket in tickets:
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
        stop = self._first_of_those_that_wait(newcomer) or accounts.take(
            newcomer.taken,
            newcomer.account,
            newcomer.cost,
            newcomer.tokens,
            newcomer.api_calls,
            self._now_ns,
            newcomer.retry_drawn,
        )
        if stop is None:
            self.entered.append(newcomer)
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
            if ticket in self.admitted:  # in this very transaction: the store has no hold yet
                self.admitted.remove(ticket)
            else:
                self.withdrawn.append(ticket)
        elif ticket.state == "waiting":
            self._room.leave(ticket)

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
        holds = (self._under_way[key].held for key in self._keys_above(under))
        return [held for held in holds if held._held_cost or held._held_tokens]

    def _keys_above(self, key: str | None) -> Iterator[str]:
        """Yield the key and those of the holds that it is under, as far as they are still held."""
        seen: set[str] = set()  # keys come from callers: a circle of them must not hang a store
        while key is not None and key in self._under_way and key not in seen:
            seen.add(key)
            yield key
            key = self._under_way[key].under


def no_ticket(key: str) -> LedgerError:
    """The error of a store for a key that does not wait."""
    return LedgerError(f"no ticket {key!r}: it expired, was given back, or never existed; join the queue first")
