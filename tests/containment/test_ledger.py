"""The ledger under threads: every ceiling holds at every moment, and every sum is exact."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, asdict, replace
from typing import Any

import pytest

from penstock.containment.accounts import Account, Balance, Hold
from penstock.containment.ledger import Ledger
from penstock.containment.limits import NO_LIMITS, Limits
from penstock.errors import InvalidValue, LedgerError
from penstock.stops import Stop, StopReason
from penstock.testing import ManualClock
from penstock.testing.contracts.threads import at_once


def taken_of(balance: Balance) -> int:
    return balance.spent_nanos + balance.held_nanos + balance.unresolved_nanos


def take(ledger: Ledger, account: Account, cost_nanos: int = 0, **ask: Any) -> Hold:
    held = ledger.hold(account, cost_nanos, **ask)
    assert isinstance(held, Hold), held
    return held


@pytest.mark.parametrize(
    ("holds", "within"),
    [(4, "penstock.containment"), (150, "no module")],
    ids=["giving way at every line", "running free"],
)
@pytest.mark.requirement("X-1", "P-B4", "C-3")
def test_sixty_four_threads_never_pass_a_ceiling_on_two_levels_and_leave_exact_sums(holds: int, within: str) -> None:
    """Each thread holds, looks, and ends its hold in one of five ways; together they want twice what there is."""
    wanted = 64 * holds
    ledger = Ledger("run", Limits(cost_nanos=wanted, steps=wanted // 3, tokens=wanted, api_calls=wanted // 2))
    child = ledger.open("child", Limits(cost_nanos=wanted // 2, steps=wanted // 4, tokens=wanted // 2))
    passed: list[Balance] = []

    def look() -> None:
        with ledger.lock:
            levels = [ledger.balance(), ledger.balance(child)]
        passed.extend(
            now
            for now in levels
            if taken_of(now) > now.limits.cost_nanos
            or now.steps + now.steps_open > now.limits.steps
            or now.tokens_in + now.tokens_out + now.tokens_held > now.limits.tokens
            or now.api_calls > now.limits.api_calls
        )
        assert taken_of(levels[0]) >= taken_of(levels[1]), "a parent has at least what its child has"

    def work(thread: int) -> dict[str, int]:
        own = {"spent": 0, "steps": 0, "unresolved": 0, "attempts": 0, "tokens": 0}
        account = child if thread % 4 else ledger.root
        for number in range(holds):
            cost = 1 + (thread + number) % 7
            held = ledger.hold(account, cost, tokens=cost, api_calls=1)
            look()
            if isinstance(held, Stop):
                continue
            end = (thread + number) % 5
            if end == 0:
                ledger.release(held)
            elif end == 1:
                ledger.withdraw(held)
            elif end == 2:
                ledger.leave_unresolved(held)
                own["unresolved"] += cost
            else:
                ledger.settle(held, cost - 1, cost - 1, 0, succeeded=end == 3)
                own["spent"] += cost - 1
                own["tokens"] += cost - 1
                own["steps"] += end == 3
            own["attempts"] += end != 1
        return own

    threads = at_once(64, work, within=within)
    now, below = ledger.balance(), ledger.balance(child)
    assert passed == []
    assert now.spent_nanos == sum(own["spent"] for own in threads)
    assert now.unresolved_nanos == sum(own["unresolved"] for own in threads)
    assert now.tokens_in == sum(own["tokens"] for own in threads)
    assert now.steps == sum(own["steps"] for own in threads)
    assert now.attempts == now.api_calls == sum(own["attempts"] for own in threads)
    assert below.spent_nanos == sum(own["spent"] for thread, own in enumerate(threads) if thread % 4)
    assert (now.held_nanos, now.steps_open) == (0, 0)
    assert now.tokens_held == now.unresolved_nanos, "only the call whose bill is unknown is still held"
    assert wanted // 5 < now.attempts < wanted, "many got in, and many did not"


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (Limits(steps=5), StopReason.STEP_LIMIT_EXCEEDED),
        (Limits(cost_nanos=50), StopReason.BUDGET_EXCEEDED),
        (Limits(tokens=50), StopReason.TOKEN_LIMIT_EXCEEDED),
        (Limits(api_calls=5), StopReason.API_CALL_LIMIT_EXCEEDED),
    ],
    ids=["steps", "cost", "tokens", "api calls"],
)
@pytest.mark.parametrize("level", ["run", "child"])
@pytest.mark.requirement("C-3")
def test_room_for_five_and_fifty_threads_admit_exactly_five(limits: Limits, reason: StopReason, level: str) -> None:
    ledger = Ledger("run", limits if level == "run" else NO_LIMITS)
    child = ledger.open("child", limits if level == "child" else NO_LIMITS)
    answers = at_once(50, lambda thread: ledger.hold(child, 10, tokens=10, api_calls=1))
    refused = [answer for answer in answers if isinstance(answer, Stop)]
    assert len(answers) - len(refused) == 5
    assert {(stop.reason, stop.budget) for stop in refused} == {(reason, level)}


@pytest.mark.requirement("C-3")
def test_five_retries_and_fifty_threads_draw_exactly_five() -> None:
    ledger = Ledger("run", Limits(retries=5))
    child = ledger.open("child")
    assert at_once(50, lambda thread: ledger.draw_retry(child)).count(True) == 5
    assert (ledger.balance().retries, ledger.balance(child).retries) == (5, 5)


@pytest.mark.requirement("X-1", "P-B4")
def test_two_parents_with_eight_children_each_hold_their_ceilings_all_at_once() -> None:
    """Children ask for twice what a child may have, children together for more than a parent, parents than the run."""
    ledger = Ledger("run", Limits(cost_nanos=150))
    parents = [ledger.open(f"parent {number}", Limits(cost_nanos=100)) for number in range(2)]
    children = [ledger.open(f"child {number}", Limits(cost_nanos=20), parents[number // 8]) for number in range(16)]
    everyone = [ledger.root, *parents, *children]
    passed: list[Balance] = []

    def work(thread: int) -> int:
        account, spent = children[thread], 0
        for _ in range(4):
            held = ledger.hold(account, 10)
            for level in (account, account.parent, ledger.root):
                now = ledger.balance(level)
                if taken_of(now) > now.limits.cost_nanos:
                    passed.append(now)
            if isinstance(held, Hold):
                ledger.settle(held, 10)
                spent += 10
        return spent

    spent = at_once(16, work)
    assert passed == []
    assert [ledger.balance(child).spent_nanos for child in children] == spent
    assert [ledger.balance(parent).spent_nanos for parent in parents] == [sum(spent[:8]), sum(spent[8:])]
    assert ledger.balance().spent_nanos == sum(spent) == 150, "all that was allowed was spent, and not more"
    assert {ledger.balance(account).held_nanos for account in everyone} == {0}


@pytest.mark.parametrize("ending", ["settle", "release", "withdraw", "leave_unresolved"])
@pytest.mark.requirement("X-1")
def test_of_many_that_end_the_same_hold_exactly_one_does(ending: str) -> None:
    ledger = Ledger("run")
    held = take(ledger, ledger.root, 10)
    arguments = {"cost_nanos": 10} if ending == "settle" else {}

    def end(thread: int) -> bool:
        try:
            getattr(ledger, ending)(held, **arguments)
        except LedgerError:
            return False
        return True

    assert at_once(32, end).count(True) == 1
    now = ledger.balance()
    assert (now.held_nanos, now.steps_open) == (0, 0)
    assert taken_of(now) == (10 if ending in ("settle", "leave_unresolved") else 0)


def test_a_balance_is_of_one_instant() -> None:
    """Money moves from held to unresolved here and is never spent, but between two instants it seems to be."""
    ledger = Ledger("run")
    held = [take(ledger, ledger.root, 10) for _ in range(30)]

    def work(thread: int) -> set[tuple[int, int]]:
        if thread == 0:
            for hold in held:
                ledger.leave_unresolved(hold)
        seen = [ledger.balance() for _ in range(30)]
        return {(now.spent_nanos, now.held_nanos + now.unresolved_nanos) for now in seen}

    assert set().union(*at_once(3, work)) == {(0, 300)}


def test_an_account_opens_under_the_root_unless_a_parent_is_named() -> None:
    ledger = Ledger("run")
    child = ledger.open("child")
    grandchild = ledger.open("grandchild", parent=child)
    assert (child.parent, grandchild.parent) == (ledger.root, child)
    assert ledger.balance().name == "run"
    assert ledger.balance(grandchild).name == "grandchild"


@pytest.mark.requirement("P-B5")
def test_time_counts_from_when_the_account_was_opened() -> None:
    clock = ManualClock()
    ledger = Ledger("run", clock=clock)
    clock.advance(5)
    child = ledger.open("child", Limits(time_ns=1_000_000_000))
    clock.advance(0.999)
    take(ledger, child)
    clock.advance(0.001)
    stop = ledger.hold(child)
    assert stop == Stop(StopReason.TIMEOUT, "1.000 s elapsed of the 1 s of 'child'", "child", "seconds", 1.0, 1.0)
    take(ledger, ledger.root)


def test_time_that_passes_while_waiting_for_the_lock_counts() -> None:
    clock = ManualClock()

    class Contended:
        """A lock that another thread gives back after a second."""

        def __enter__(self) -> None:
            clock.advance(1)

        def __exit__(self, *error: object) -> None:
            pass

    ledger = Ledger("run", Limits(time_ns=1_000_000_000), clock=clock)
    ledger.lock = Contended()  # type: ignore[assignment]
    stop = ledger.hold(ledger.root)
    assert isinstance(stop, Stop)
    assert stop.reason is StopReason.TIMEOUT


@pytest.mark.requirement("C-3")
def test_the_last_retry_admits_the_attempt_it_was_drawn_for_and_no_other_call() -> None:
    ledger = Ledger("run", Limits(retries=1))
    assert ledger.draw_retry(ledger.root)
    stop = ledger.hold(ledger.root)
    assert isinstance(stop, Stop)
    assert stop.reason is StopReason.RETRY_BUDGET_EXCEEDED
    take(ledger, ledger.root, retry_drawn=True)


def test_a_grant_admits_what_was_refused_and_forgets_nothing() -> None:
    ledger = Ledger("run", Limits(cost_nanos=10))
    ledger.settle(take(ledger, ledger.root, 10), 10)
    assert isinstance(ledger.hold(ledger.root, 5), Stop)
    ledger.grant(ledger.root, Limits(cost_nanos=15))
    take(ledger, ledger.root, 5)
    assert (ledger.balance().spent_nanos, ledger.balance().held_nanos) == (10, 5)
    assert isinstance(ledger.hold(ledger.root, 1), Stop)


NOT_AMOUNTS: list[Any] = [-1, -(10**30), 0.5, float("nan"), float("inf"), True, None, "1"]


@pytest.mark.parametrize("value", NOT_AMOUNTS)
@pytest.mark.parametrize("field", ["cost_nanos", "tokens", "api_calls"])
@pytest.mark.requirement("X-1")
def test_a_hold_of_less_than_nothing_or_of_no_number_is_refused_by_name(field: str, value: Any) -> None:
    ledger = Ledger("run", Limits(cost_nanos=10))
    with pytest.raises(InvalidValue, match=rf"^{field} must be a whole number, zero or more, not "):
        ledger.hold(ledger.root, **{field: value})
    assert ledger.balance() == Ledger("run", Limits(cost_nanos=10)).balance()


@pytest.mark.parametrize("value", NOT_AMOUNTS)
@pytest.mark.parametrize("field", ["cost_nanos", "tokens_in", "tokens_out"])
@pytest.mark.requirement("X-1")
def test_a_bill_of_less_than_nothing_or_of_no_number_leaves_the_hold_as_it_was(field: str, value: Any) -> None:
    ledger = Ledger("run", Limits(cost_nanos=10))
    held = take(ledger, ledger.root, 10)
    before = ledger.balance()
    with pytest.raises(InvalidValue, match=rf"^{field} must be a whole number, zero or more, not "):
        ledger.settle(held, **{"cost_nanos": 0, field: value})
    assert ledger.balance() == before
    ledger.settle(held, 3)


def test_a_balance_equals_one_made_by_hand() -> None:
    ledger = Ledger("run")
    take(ledger, ledger.root, 10)
    now = ledger.balance()
    assert type(now) is Balance
    assert now == replace(now) == pickle.loads(pickle.dumps(now)) == Balance(**asdict(now) | {"limits": now.limits})
    with pytest.raises(FrozenInstanceError):
        now.steps = 2  # type: ignore[misc]


def test_a_balance_shows_dollars_too() -> None:
    ledger = Ledger("run")
    ledger.settle(take(ledger, ledger.root, 1), 500_000_000)
    take(ledger, ledger.root, 250_000_000)
    ledger.leave_unresolved(take(ledger, ledger.root, 125_000_000))
    now = ledger.balance()
    assert (now.spent_usd, now.held_usd, now.unresolved_usd) == (0.5, 0.25, 0.125)
