"""The arithmetic of limits, against a model that adds everything up anew at every step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from penstock.containment import accounts
from penstock.containment.accounts import HOLD_TRANSITIONS, Account, Balance, Hold
from penstock.containment.limits import NO_LIMITS, UNLIMITED, Limits
from penstock.errors import LedgerError
from penstock.stops import Stop, StopReason
from tests.soak import scaled

FIGURES = [field.name for field in fields(Balance) if field.name not in ("name", "limits")]
MAX_DEPTH = 4


@dataclass
class Entry:
    """One thing that happened to one account, and what it says about each figure of that account and those above."""

    account: Account
    cost: int = 0
    tokens: int = 0
    api_calls: int = 0
    state: str = "held"
    paid: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    is_step: bool = False

    def figures(self) -> dict[str, int]:
        used = {"spent_nanos": self.paid, "tokens_in": self.tokens_in, "tokens_out": self.tokens_out}
        ran = {"attempts": 1, "api_calls": self.api_calls}
        match self.state:
            case "held":
                return {**ran, "held_nanos": self.cost, "tokens_held": self.tokens, "steps_open": 1}
            case "unresolved":
                return {**ran, "unresolved_nanos": self.cost, "tokens_held": self.tokens}
            case "settled":
                return {**ran, **used, "steps": int(self.is_step)}
            case "released":
                return ran
            case "charge":
                return {**used, "api_calls": self.api_calls}
            case "retry":
                return {"retries": 1}
            case _:
                return {}


Sums = dict[Account, dict[str, int]]


def above(account: Account) -> list[Account]:
    """The account and all its ancestors, the nearest first."""
    return [account, *(above(account.parent) if account.parent is not None else [])]


class Model:
    """A list of entries. Every figure is their sum, every refusal is worked out from those sums."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def own(self) -> Sums:
        """For each account, the sum over what happened to it alone."""
        return self._sums(lambda account: [account])

    def sums(self) -> Sums:
        """For each account, the sum over what happened to it and to all below it."""
        return self._sums(above)

    def _sums(self, counted_at: Callable[[Account], list[Account]]) -> Sums:
        total: Sums = defaultdict(lambda: dict.fromkeys(FIGURES, 0))
        for entry in self.entries:
            for level in counted_at(entry.account):
                for name, amount in entry.figures().items():
                    total[level][name] += amount
        return total

    def refusal(self, ask: Entry, now: int, drawn: bool) -> tuple[StopReason, str] | None:
        """Reason and budget of the refusal that is due; None if every level has room.

        One that would go away if all holds came free is due only if there is no other.
        """
        sums = self.sums()
        found = [(level, self.left(level, sums[level], now)) for level in above(ask.account)]
        requested = {COST: ask.cost, TOKENS: ask.tokens, API_CALLS: ask.api_calls}
        refusals = [
            (reason, level, 1)
            for reason in ORDER
            for level, left in found
            if left[reason] <= 0 and not (drawn and reason is StopReason.RETRY_BUDGET_EXCEEDED)
        ]
        refusals += [
            (reason, level, amount)
            for level, left in found
            for reason, amount in requested.items()
            if amount > left[reason]
        ]
        lefts = dict(found)
        final = [
            (reason, level)
            for reason, level, amount in refusals
            if lefts[level][reason] + self.held(level, reason) < max(amount, 1)
        ]
        due = final or [(reason, level) for reason, level, _ in refusals]
        return (due[0][0], due[0][1].name) if due else None

    def held(self, level: Account, reason: StopReason) -> int:
        """What calls under way hold of it."""
        if reason not in (COST, TOKENS):
            return 0
        open_calls = [entry for entry in self.entries if entry.state == "held" and level in above(entry.account)]
        return sum(entry.cost if reason is COST else entry.tokens for entry in open_calls)

    @staticmethod
    def left(level: Account, sums: dict[str, int], now: int) -> dict[StopReason, int]:
        limits = level.limits
        return {
            COST: limits.cost_nanos - sums["spent_nanos"] - sums["held_nanos"] - sums["unresolved_nanos"],
            STEPS: limits.steps - sums["steps"] - sums["steps_open"],
            RETRIES: limits.retries - sums["retries"],
            TIME: limits.time_ns - (now - level.opened_ns),
            TOKENS: limits.tokens - sums["tokens_in"] - sums["tokens_out"] - sums["tokens_held"],
            API_CALLS: limits.api_calls - sums["api_calls"],
        }


COST, STEPS, RETRIES = StopReason.BUDGET_EXCEEDED, StopReason.STEP_LIMIT_EXCEEDED, StopReason.RETRY_BUDGET_EXCEEDED
TIME, TOKENS, API_CALLS = StopReason.TIMEOUT, StopReason.TOKEN_LIMIT_EXCEEDED, StopReason.API_CALL_LIMIT_EXCEEDED
ORDER = [COST, STEPS, RETRIES, TIME, TOKENS, API_CALLS]

amount = st.integers(0, 5)
ceilings = {"cost_nanos": 30, "steps": 6, "tokens": 30, "api_calls": 16, "retries": 4, "time_ns": 20}
one_limit = st.sampled_from(sorted(ceilings)).flatmap(
    lambda dimension: st.builds(Limits, **{dimension: st.integers(0, ceilings[dimension])})
)
limits = st.just(NO_LIMITS) | one_limit | st.builds(Limits.tighter, one_limit, one_limit)
"""Mostly few and wide enough, so that calls get in and then reach them."""


class Ledgering(RuleBasedStateMachine):
    """Random accounts in a tree, random calls on them, checked against the model after every step."""

    opened = Bundle("opened")
    held = Bundle("held")
    unresolved = Bundle("unresolved")
    ended = Bundle("ended")

    @initialize(target=opened, chain=st.lists(limits, min_size=2, max_size=MAX_DEPTH))
    def begin(self, chain: list[Limits]) -> Any:
        self.now = 0
        self.model = Model()
        self.accounts: list[Account] = []
        for limits in chain:
            parent = self.accounts[-1] if self.accounts else None
            self.accounts.append(Account(f"a{len(self.accounts)}", limits, parent))
        return multiple(*self.accounts)

    @rule(target=opened, parent=opened, limits=limits)
    def open(self, parent: Account, limits: Limits) -> Any:
        if len(above(parent)) == MAX_DEPTH:
            return multiple()
        self.accounts.append(Account(f"a{len(self.accounts)}", limits, parent, self.now))
        return self.accounts[-1]

    @rule(
        target=held,
        calls=st.lists(st.tuples(opened, amount, amount, st.integers(0, 3), st.booleans()), min_size=1, max_size=6),
    )
    def hold_some(self, calls: list[tuple[Account, int, int, int, bool]]) -> Any:
        taken = [self.hold(*call) for call in calls]
        return multiple(*(held for held in taken if held is not None))

    def hold(self, account: Account, cost: int, tokens: int, api_calls: int, drawn: bool) -> Any:
        entry = Entry(account, cost, tokens, api_calls)
        expected = self.model.refusal(entry, self.now, drawn)
        before = self.snapshot()
        taken = accounts.hold(account, cost, tokens, api_calls, self.now, drawn)
        if isinstance(taken, Stop):
            assert (taken.reason, taken.budget) == expected, f"a refusal is right, and names the right budget: {taken}"
            assert self.snapshot() == before, "a refused hold changes nothing anywhere"
            return None
        assert expected is None, f"{expected} should have refused"
        self.model.entries.append(entry)
        sums = self.model.sums()
        for level in above(account):
            left = self.model.left(level, sums[level], self.now)
            assert min(left[reason] for reason in ORDER if reason is not RETRIES) >= 0, f"{level.name} was passed"
        return taken, entry

    @rule(
        target=ended,
        calls=st.lists(st.tuples(consumes(held), amount, amount, amount, st.booleans()), min_size=1, max_size=5),
    )
    def settle_some(self, calls: list[tuple[tuple[Hold, Entry], int, int, int, bool]]) -> Any:
        for (taken, entry), paid, tokens_in, tokens_out, success in calls:
            accounts.settle(taken, paid, tokens_in, tokens_out, success)
            entry.state, entry.paid, entry.tokens_in, entry.tokens_out = "settled", paid, tokens_in, tokens_out
            entry.is_step = success
        return multiple(*(held for held, *_ in calls))

    @rule(target=ended, held=consumes(held))
    def release(self, held: tuple[Hold, Entry]) -> Any:
        accounts.release(held[0])
        held[1].state = "released"
        return held

    @rule(target=ended, held=consumes(held))
    def withdraw(self, held: tuple[Hold, Entry]) -> Any:
        accounts.withdraw(held[0])
        held[1].state = "withdrawn"
        return held

    @rule(target=unresolved, held=consumes(held))
    def leave_unresolved(self, held: tuple[Hold, Entry]) -> Any:
        accounts.leave_unresolved(held[0])
        held[1].state = "unresolved"
        return held

    @rule(target=ended, left=consumes(unresolved), paid=amount, tokens_in=amount, success=st.booleans())
    def settle_what_was_unresolved(self, left: tuple[Hold, Entry], paid: int, tokens_in: int, success: bool) -> Any:
        taken, entry = left
        accounts.settle(taken, paid, tokens_in, 0, success)
        entry.state, entry.paid, entry.tokens_in = "settled", paid, tokens_in
        return left

    @rule(target=ended, left=consumes(unresolved))
    def release_what_was_unresolved(self, left: tuple[Hold, Entry]) -> Any:
        accounts.release(left[0])
        left[1].state = "released"
        return left

    @rule(left=unresolved)
    def neither_withdraw_nor_leave_again_what_is_unresolved(self, left: tuple[Hold, Entry]) -> None:
        self.refuses_and_changes_nothing(left[0], ("withdraw", "leave_unresolved"))

    @rule(ended=ended)
    def end_what_has_ended(self, ended: tuple[Hold, Entry]) -> None:
        self.refuses_and_changes_nothing(ended[0], ENDINGS)

    @rule(account=opened, paid=amount, tokens_in=amount, tokens_out=amount, api_calls=st.integers(0, 1))
    def charge(self, account: Account, paid: int, tokens_in: int, tokens_out: int, api_calls: int) -> None:
        accounts.charge(account, paid, tokens_in, tokens_out, api_calls)
        entry = Entry(account, api_calls=api_calls, state="charge")
        entry.paid, entry.tokens_in, entry.tokens_out = paid, tokens_in, tokens_out
        self.model.entries.append(entry)

    @rule(account=opened)
    def draw_retry(self, account: Account) -> None:
        sums = self.model.sums()
        has_room = all(sums[level]["retries"] < level.limits.retries for level in above(account))
        before = self.snapshot()
        assert accounts.draw_retry(account) == has_room
        if has_room:
            self.model.entries.append(Entry(account, state="retry"))
        else:
            assert self.snapshot() == before

    @rule(account=opened, limits=limits)
    def grant(self, account: Account, limits: Limits) -> None:
        accounts.set_limits(account, limits)

    @rule(passed=st.integers(1, 2))
    def let_time_pass(self, passed: int) -> None:
        self.now += passed

    @invariant()
    def every_level_has_what_the_model_says(self) -> None:
        sums = self.model.sums()
        for account in self.accounts:
            now = accounts.balance(account)
            assert {name: getattr(now, name) for name in FIGURES} == sums[account], account.name

    @invariant()
    def what_is_committed_is_spent_or_held_or_unresolved(self) -> None:
        all_sums = self.model.sums()
        for account in self.accounts:
            sums = all_sums[account]
            assert account.committed == sums["spent_nanos"] + account.held + account.unresolved
            assert account.steps_taken == sums["steps"] + account.steps_open
            assert account.tokens_committed == sums["tokens_in"] + sums["tokens_out"] + sums["tokens_held"]
            assert sums["tokens_held"] == account.tokens_held + account.tokens_unresolved
            assert min(account.held, account.unresolved, account.steps_open) >= 0, account.name
            assert min(account.tokens_held, account.tokens_unresolved) >= 0, account.name

    @invariant()
    def a_parent_has_what_its_children_have_and_its_own(self) -> None:
        own = self.model.own()
        for account in self.accounts:
            whole = accounts.balance(account)
            below = [accounts.balance(child) for child in self.accounts if child.parent is account]
            for name in FIGURES:
                parts = sum(getattr(child, name) for child in below)
                assert getattr(whole, name) == own[account][name] + parts, f"{name} of {account.name}"

    @invariant()
    def cost_left_is_what_the_tightest_level_has_left(self) -> None:
        sums = self.model.sums()
        for account in self.accounts:
            left = [
                self.model.left(level, sums[level], self.now)[COST] + self.model.held(level, COST)
                for level in above(account)
            ]
            assert accounts.cost_left(account) == max(0, min(*left, UNLIMITED))

    @invariant()
    def there_is_room_for_what_is_left_and_for_no_more(self) -> None:
        for account in self.accounts:
            cost, tokens = accounts.cost_left(account), accounts.tokens_left(account)
            overdrawn = [
                level
                for level in above(account)
                if level.committed - level.held >= level.max_cost
                or level.tokens_committed - level.tokens_held >= level.max_tokens
            ]
            assert accounts.fits_alone(account, cost, tokens) == (not overdrawn)
            assert not accounts.fits_alone(account, cost + 1, tokens)
            assert not accounts.fits_alone(account, cost, tokens + 1)

    def snapshot(self) -> list[list[object]]:
        return [everything(account) for account in self.accounts]

    def refuses_and_changes_nothing(self, hold: Hold, endings: Any) -> None:
        before, state = self.snapshot(), hold.state
        for name in endings:
            with pytest.raises(LedgerError, match=f"^a hold that is {state} cannot become "):
                ENDINGS[name](hold)
        assert self.snapshot() == before
        assert hold.state == state


ENDINGS: dict[str, Callable[[Hold], None]] = {
    "settle": lambda hold: accounts.settle(hold, 1, 1, 1, True),
    "release": accounts.release,
    "withdraw": accounts.withdraw,
    "leave_unresolved": accounts.leave_unresolved,
}


def everything(account: Account) -> list[object]:
    return [getattr(account, name) for name in Account.__slots__]


Ledgering.TestCase.settings = settings(max_examples=scaled(50, soak=2_000), stateful_step_count=40)
TestLedgering = pytest.mark.reliability(pytest.mark.requirement("X-1", "P-B4", "P-B5", "C-3")(Ledgering.TestCase))


def take(
    account: Account, cost: int = 0, tokens: int = 0, api_calls: int = 0, *, now: int = 0, drawn: bool = False
) -> Hold:
    taken = accounts.hold(account, cost, tokens, api_calls, now, drawn)
    assert isinstance(taken, Hold), taken
    return taken


def refusal(
    account: Account, cost: int = 0, tokens: int = 0, api_calls: int = 0, *, now: int = 0, drawn: bool = False
) -> Stop:
    stop = accounts.hold(account, cost, tokens, api_calls, now, drawn)
    assert isinstance(stop, Stop), "it was admitted"
    return stop


NOTHING = [
    (Limits(cost_nanos=0), COST, "usd"),
    (Limits(steps=0), STEPS, "steps"),
    (Limits(retries=0), RETRIES, "retries"),
    (Limits(time_ns=0), TIME, "seconds"),
    (Limits(tokens=0), TOKENS, "tokens"),
    (Limits(api_calls=0), API_CALLS, "api calls"),
]
BY_REASON = [str(reason) for _, reason, _ in NOTHING]


@pytest.mark.parametrize(("limits", "reason", "unit"), NOTHING, ids=BY_REASON)
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.requirement("C-1", "P-B1")
def test_a_limit_of_zero_halts_the_first_call_at_any_level(
    limits: Limits, reason: StopReason, unit: str, depth: int
) -> None:
    account = Account("owner", limits)
    for level in range(depth):
        account = Account(f"below {level}", NO_LIMITS, account)
    stop = refusal(account)
    assert (stop.reason, stop.unit, stop.budget, stop.limit, stop.used) == (reason, unit, "owner", 0, 0)


@pytest.mark.parametrize(
    ("limits", "reason", "ask"),
    [
        (Limits(cost_nanos=30), COST, {"cost": 10}),
        (Limits(steps=3), STEPS, {}),
        (Limits(tokens=30), TOKENS, {"tokens": 10}),
        (Limits(api_calls=3), API_CALLS, {"api_calls": 1}),
    ],
    ids=["cost", "steps", "tokens", "api calls"],
)
@pytest.mark.parametrize("ends", ["held", "settled"])
@pytest.mark.requirement("P-B5")
def test_reaching_a_limit_is_fine_and_the_next_call_stops(
    limits: Limits, reason: StopReason, ask: dict[str, Any], ends: str
) -> None:
    account = Account("main", limits)
    for _ in range(3):
        held = take(account, **ask)
        if ends == "settled":
            accounts.settle(held, held.cost, held.tokens, 0, True)
    assert refusal(account, **ask).reason is reason
    assert refusal(account).reason is reason, "what asks for nothing is refused too"


@pytest.mark.requirement("P-B5")
def test_a_call_starts_until_the_last_nanosecond_and_not_at_the_deadline() -> None:
    account = Account("main", Limits(time_ns=100), now_ns=1_000)
    take(account, now=1_099)
    assert refusal(account, now=1_100).reason is TIME


@pytest.mark.requirement("C-3", "P-B5")
def test_the_last_retry_is_for_the_attempt_it_was_drawn_for() -> None:
    account = Account("main", Limits(retries=2))
    assert accounts.draw_retry(account)
    take(account)
    assert accounts.draw_retry(account)
    assert refusal(account).reason is RETRIES
    take(account, drawn=True)
    assert not accounts.draw_retry(account)
    assert account.retries == 2


@pytest.mark.parametrize(
    ("limits", "reason"), [(limits, reason) for limits, reason, _ in NOTHING if reason is not RETRIES], ids=str
)
def test_a_drawn_retry_gets_past_no_other_limit(limits: Limits, reason: StopReason) -> None:
    assert refusal(Account("main", limits), drawn=True).reason is reason


def test_of_several_used_up_limits_the_first_in_the_stated_order_is_named() -> None:
    used_up = Limits(0, 0, 0, 0, 0, 0)
    dimensions = ["cost_nanos", "steps", "retries", "time_ns", "tokens", "api_calls"]
    for dimension, (_, reason, _) in zip(dimensions, NOTHING, strict=True):
        account = Account("main", used_up)
        assert refusal(account).reason is reason
        used_up = replace(used_up, **{dimension: UNLIMITED})
    take(Account("main", used_up))


@pytest.mark.requirement("P-B4")
def test_a_limit_further_up_is_named_before_a_later_one_nearby() -> None:
    run = Account("run", Limits(cost_nanos=0))
    step = Account("step", Limits(steps=0), run)
    assert (refusal(step).reason, refusal(step).budget) == (COST, "run")


def test_a_hold_that_does_not_fit_is_reported_only_when_nothing_is_used_up() -> None:
    run = Account("run", Limits(api_calls=0))
    step = Account("step", Limits(cost_nanos=5), run)
    assert refusal(step, cost=6).reason is API_CALLS
    accounts.set_limits(run, Limits(cost_nanos=5))
    assert (refusal(step, cost=6).reason, refusal(step, cost=6).budget) == (COST, "step")


@pytest.mark.requirement("P-B4")
def test_the_nearest_of_two_used_up_budgets_is_named() -> None:
    run = Account("run", Limits(steps=0))
    graph = Account("graph", Limits(steps=0), run)
    assert refusal(Account("step", NO_LIMITS, graph)).budget == "graph"


@pytest.mark.requirement("P-B1")
def test_a_hold_of_several_api_calls_does_not_pass_their_limit() -> None:
    account = Account("main", Limits(api_calls=3))
    take(account, api_calls=2)
    stop = refusal(account, api_calls=2)
    assert (stop.reason, stop.limit, stop.used, stop.asked) == (API_CALLS, 3, 2, 2)
    take(account, api_calls=1)


def test_a_failure_gives_its_step_back_and_stays_an_attempt() -> None:
    account = Account("main", Limits(steps=1))
    for failed in (accounts.release, lambda held: accounts.settle(held, 0, 0, 0, False), accounts.leave_unresolved):
        failed(take(account))
    accounts.settle(take(account), 0, 0, 0, True)
    assert (account.steps_taken, account.attempts) == (1, 4)
    assert refusal(account).reason is STEPS


def test_a_withdrawn_call_was_not_even_an_attempt() -> None:
    account = Account("main", Limits(steps=1, api_calls=1))
    before = everything(account)
    accounts.withdraw(take(account, cost=5, tokens=5, api_calls=1))
    assert everything(account) == before


@pytest.mark.requirement("X-1")
def test_a_bill_that_arrives_late_is_spent_and_makes_no_step() -> None:
    account = Account("main", Limits(steps=1))
    late = take(account, cost=10, tokens=4)
    accounts.leave_unresolved(late)
    accounts.settle(take(account), 0, 0, 0, True)
    accounts.settle(late, 7, 2, 1, True)
    now = accounts.balance(account)
    assert (now.spent_nanos, now.unresolved_nanos, now.tokens_in, now.tokens_out) == (7, 0, 2, 1)
    assert now.steps == 1, "its slot was given back and is taken by another; the limit of one holds"


def test_a_bill_higher_than_its_hold_is_spent_in_full_and_then_nothing_more_starts() -> None:
    run = Account("run", Limits(cost_nanos=10))
    step = Account("step", NO_LIMITS, run)
    accounts.settle(take(step, cost=1), 25, 0, 0, True)
    assert accounts.balance(run).spent_nanos == 25
    assert accounts.cost_left(step) == 0
    assert refusal(step).used == 25e-9


def test_a_charge_past_the_ceiling_counts_and_then_nothing_more_starts() -> None:
    account = Account("main", Limits(cost_nanos=10, tokens=10))
    accounts.charge(account, 11, 6, 6, 1)
    now = accounts.balance(account)
    assert (now.spent_nanos, now.tokens_in, now.tokens_out, now.api_calls, now.attempts) == (11, 6, 6, 1, 0)
    assert refusal(account).reason is COST


def test_a_ceiling_lowered_below_what_is_taken_refuses_and_what_runs_still_settles() -> None:
    account = Account("main", Limits(cost_nanos=100, steps=5, retries=5))
    held = take(account, cost=60)
    accounts.draw_retry(account)
    accounts.set_limits(account, Limits(cost_nanos=50, retries=5))
    assert accounts.cost_left(account) == 50, "if the hold came free"
    assert (refusal(account).limit, refusal(account).held) == (50e-9, 60e-9)
    accounts.set_limits(account, Limits(cost_nanos=50, steps=0, retries=0))
    assert refusal(account).reason is STEPS, "the hold may come free, the steps do not"
    assert not accounts.draw_retry(account)
    accounts.settle(held, 55, 0, 0, True)
    assert refusal(account).message == "$0.000000055 spent of the $0.00000005 of 'main'"


def test_a_raised_ceiling_admits_again() -> None:
    account = Account("main", Limits(steps=0, time_ns=10), now_ns=5)
    assert refusal(account, now=20).reason is STEPS
    accounts.set_limits(account, Limits(steps=1, time_ns=20))
    take(account, now=24)
    assert refusal(account, now=25).reason is STEPS


@pytest.mark.parametrize("cost", [UNLIMITED + 1, 2**64, 10**30])
def test_a_hold_larger_than_any_amount_is_refused_even_without_a_limit(cost: int) -> None:
    account = Account("main")
    assert refusal(account, cost=cost).reason is COST
    assert refusal(account, tokens=cost).reason is TOKENS
    assert everything(account) == everything(Account("main"))


def test_sums_past_what_stands_for_no_limit_do_not_wrap_around() -> None:
    account = Account("main")
    for _ in range(3):
        accounts.charge(account, 2**61, 2**61, 0, 0)
    assert accounts.balance(account).spent_nanos == 3 * 2**61
    assert accounts.cost_left(account) == 0
    assert refusal(account).reason is COST


def test_a_hold_moves_only_along_its_table() -> None:
    names = {"settle": "settled", "release": "released", "withdraw": "withdrawn", "leave_unresolved": "unresolved"}
    assert set(names.values()) | {"held"} == set(HOLD_TRANSITIONS)
    assert set(names.values()) == HOLD_TRANSITIONS["held"], "from held every way is open, which the code relies on"
    for name, state in names.items():
        for other, next_state in names.items():
            hold = take(Account("main"), cost=3, tokens=3, api_calls=1)
            ENDINGS[name](hold)
            if next_state in HOLD_TRANSITIONS[state]:  # type: ignore[index]
                ENDINGS[other](hold)
                assert hold.state == next_state
            else:
                with pytest.raises(LedgerError, match=rf"^a hold that is {state} cannot become {next_state}$"):
                    ENDINGS[other](hold)


def test_a_refusal_is_momentary_if_only_calls_under_way_hold_what_is_missing() -> None:
    account = Account("research", Limits(cost_nanos=100, tokens=100))
    held = take(account, cost=60, tokens=60)
    assert refusal(account, cost=50).momentary
    assert refusal(account, tokens=50).momentary
    assert not refusal(account, cost=101).momentary, "it would not fit if nothing were held"
    assert not refusal(account, tokens=101).momentary
    accounts.leave_unresolved(held)
    assert not refusal(account, cost=50).momentary, "money that is spent does not come back"
    assert not refusal(account, tokens=50).momentary
    accounts.settle(held, 100, 50, 50, True)
    assert not refusal(account).momentary


def test_a_call_that_does_with_less_gives_the_rest_back_at_every_level() -> None:
    above = Account("run", Limits(cost_nanos=100, tokens=100))
    account = Account("node", Limits(), above)
    held = take(account, cost=80, tokens=70)
    accounts.shrink(held, 30, 70)
    accounts.shrink(held, 30, 20)
    for level in (account, above):
        assert (level.committed, level.held, level.tokens_committed, level.tokens_held) == (30, 30, 20, 20)
    with pytest.raises(LedgerError, match="cannot be changed to 31 and 20 tokens"):
        accounts.shrink(held, 31, 20)
    with pytest.raises(LedgerError, match="cannot be changed to 30 and 21 tokens"):
        accounts.shrink(held, 30, 21)
    accounts.settle(held, 10, 3, 4, True)
    for level in (account, above):
        assert (level.committed, level.held, level.tokens_committed, level.tokens_held) == (10, 0, 7, 0)
    with pytest.raises(LedgerError, match="a hold that is settled cannot"):
        accounts.shrink(held, 0, 0)


def test_the_level_with_the_least_left_is_the_tightest_and_of_several_the_nearest() -> None:
    above = Account("run", Limits(cost_nanos=100, tokens=50))
    account = Account("node", Limits(cost_nanos=100), above)
    assert (accounts.tightest(account, "usd").name, accounts.tightest(account, "tokens").name) == ("node", "run")
    held = take(above, cost=1)
    assert accounts.tightest(account, "usd").name == "node", "what is held may come free"
    accounts.settle(held, 1, 0, 0, True)
    assert accounts.tightest(account, "usd").name == "run"


def test_a_refusal_reads_as_figures_and_whose_they_are() -> None:
    account = Account("research", Limits(cost_nanos=1_000_000_000, steps=9, tokens=1_000_000, api_calls=9))
    accounts.settle(take(account, cost=250_000_000), 250_000_000, 0, 0, True)
    accounts.leave_unresolved(take(account, cost=125_000_000, tokens=200_000))
    take(account, cost=500_000_000, api_calls=7)
    assert refusal(account, cost=200_000_000) == Stop(
        COST,
        "$0.25 spent, $0.50 held, $0.125 unresolved of the $1.00 of 'research'; the call would hold $0.20",
        budget="research",
        unit="usd",
        limit=1.0,
        used=0.25,
        held=0.625,
        asked=0.2,
        momentary=True,
        unresolved=0.125,
    )
    assert refusal(account, tokens=900_000).message == (
        "0 and 200000 held of the 1000000 tokens of 'research' used; the call would take 900000"
    )
    assert refusal(account, api_calls=3).message == "7 of the 9 api calls of 'research' used; the call would take 3"
    accounts.set_limits(account, Limits(steps=2))
    assert refusal(account).message == "1 and 1 held of the 2 steps of 'research' used"
    accounts.set_limits(account, Limits(time_ns=1_500_000_000))
    late = refusal(account, now=2_000_000_000)
    assert late == Stop(TIME, "2.000 s elapsed of the 1.5 s of 'research'", "research", "seconds", 1.5, 2.0)
    accounts.set_limits(account, Limits(retries=0))
    assert refusal(account).message == "0 of the 0 retries of 'research' used"


def test_a_balance_reads_as_a_sentence_and_says_unlimited() -> None:
    run = accounts.Account("main", Limits(cost_nanos=10_000_000, steps=20))
    accounts.hold(run, 2_000_000, 0, 1, 0)
    assert str(accounts.balance(run)) == (
        "main: $0.00 spent, $0.002 held of $0.01; 0 of 20 steps, 0 of unlimited tokens, 1 of unlimited api calls, "
        "0 of unlimited retries"
    )
    assert "4611686018427387904" not in repr(accounts.balance(run))
    assert "tokens=unlimited" in repr(run.limits)
