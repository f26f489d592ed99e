"""What dead gateways held: left unresolved by another gateway on the same ledger, which the provider may charge for."""

from __future__ import annotations

from penstock.containment.ledger import Amounts, MemoryLedgerStore
from penstock.containment.limits import NO_LIMITS, Limits
from penstock.errors import LedgerUnavailable
from penstock.gateway.key_accounts import key_account, run_account
from penstock.gateway.processes import LEASE_S, PROCESSES, Processes
from penstock.hosting.durability import day_of
from penstock.testing.clock import ManualClock

OURS, OTHERS = "0" * 12, "f" * 12


def _ledger_with_a_call_of(mark: str) -> tuple[MemoryLedgerStore, str]:
    """A ledger in which a gateway holds a dollar for one call."""
    ledger, day = MemoryLedgerStore(), day_of(0)
    run = run_account("0123456789ab", "day", day)
    ledger.open_account(key_account("0123456789ab", day), NO_LIMITS)
    ledger.open_account(run, NO_LIMITS, parent=key_account("0123456789ab", day))
    key = f"{run}/{mark}-00000000/fake-1"
    ledger.hold(key, run, Amounts(1_000_000_000, api_calls=1))
    return ledger, key


async def test_holds_of_a_dead_gateway_become_unresolved_after_its_lease() -> None:
    ledger, key = _ledger_with_a_call_of(OTHERS)
    clock = ManualClock()
    dead, ours = Processes(ledger, OTHERS, clock), Processes(ledger, OURS, clock)
    await dead.beat()
    assert await ours.resolve_dead() == 0
    clock.advance(LEASE_S)
    assert await ours.resolve_dead() == 0
    clock.advance(1)
    assert await ours.resolve_dead() == 1
    assert (ledger.held(), list(ledger.unresolved())) == ({}, [key])
    assert await ours.resolve_dead() == 0


async def test_gateway_that_beats_keeps_its_holds_however_long_they_last() -> None:
    ledger, key = _ledger_with_a_call_of(OTHERS)
    clock = ManualClock()
    alive, ours = Processes(ledger, OTHERS, clock), Processes(ledger, OURS, clock)
    for _ in range(5):
        await alive.beat()
        clock.advance(LEASE_S)
        assert await ours.resolve_dead() == 0
    assert list(ledger.held()) == [key]


async def test_holds_of_a_gateway_that_was_killed_before_this_one_started_become_unresolved() -> None:
    ledger, key = _ledger_with_a_call_of(OTHERS)
    clock = ManualClock()
    ours = Processes(ledger, OURS, clock)
    assert await ours.resolve_dead() == 0
    clock.advance(LEASE_S + 1)
    assert await ours.resolve_dead() == 1
    assert list(ledger.unresolved()) == [key]


async def test_stalled_gateway_still_settles_what_was_left_unresolved() -> None:
    ledger, key = _ledger_with_a_call_of(OTHERS)
    clock = ManualClock()
    ours = Processes(ledger, OURS, clock)
    await ours.resolve_dead()
    clock.advance(LEASE_S + 1)
    await ours.resolve_dead()
    ledger.settle(key, Amounts(250_000_000, 3, 4, 1))
    balance = ledger.balance(key_account("0123456789ab", day_of(0)))
    assert (balance.spent_nanos, balance.held_nanos, balance.unresolved_nanos) == (250_000_000, 0, 0)


async def test_gateway_leaves_nothing_of_its_own_holds_and_no_account_behind() -> None:
    ledger, key = _ledger_with_a_call_of(OURS)
    clock = ManualClock()
    ours = Processes(ledger, OURS, clock)
    async with ours.watched():
        clock.advance(LEASE_S + 1)
        assert await ours.resolve_dead() == 0
        assert ledger.balance(PROCESSES + OURS).limits.steps > 0
    assert list(ledger.held()) == [key]
    assert PROCESSES + OURS not in ledger.aged(0)


async def test_gateway_starts_while_its_ledger_is_unavailable() -> None:
    class Busy(MemoryLedgerStore):
        def grant(self, account: str, limits: Limits) -> None:
            raise LedgerUnavailable("busy")

    async with Processes(Busy(), OURS, ManualClock()).watched():
        pass
