"""The contract of every `LedgerStore`; the in-memory store is the specification.

Inherit and define how a store is made, and pytest runs every test below against it:

    class TestMyStore(LedgerStoreContract):
        def make_store(self, clock: Clock) -> LedgerStore:
            return MyStore(clock=clock)

A fresh, empty store is made for each test. A store that needs a folder or a server takes it from a fixture of the
inheriting class. `pytest.register_assert_rewrite("penstock.testing.contracts")` in a conftest shows both sides of a
failed assertion. Only the standard library is imported here; not even pytest.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable
from dataclasses import replace

from penstock.containment.accounts import Balance
from penstock.containment.ledger import Amounts
from penstock.containment.limits import NO_LIMITS, Limits
from penstock.errors import InvalidValue, KeyTaken, LedgerError, LedgerUnavailable
from penstock.stops import StopReason
from penstock.testing.contracts.ledger_tests import ASK, FIGURES, USED, figures, raises
from penstock.testing.contracts.ledger_unhinted import UnhintedTests


class LedgerStoreContract(UnhintedTests):
    """The tests a `LedgerStore` must pass: override `make_store`, and `broken` if the store can be broken."""

    def test_a_new_account_is_empty(self) -> None:
        limits = Limits(cost_nanos=5, steps=4, tokens=3, api_calls=2, retries=1, time_ns=9)
        self.store.open_account("run", limits)
        assert self.store.balance("run") == Balance("run", limits, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)

    def test_balances_are_those_of_the_accounts_that_exist(self) -> None:
        self.open_tree(Limits(cost_nanos=100))
        self.take("k")
        names = ("step", "unknown", "run", "step", "")
        assert self.store.balances(names) == {name: self.store.balance(name) for name in ("step", "run")}
        assert self.store.balances(()) == {}

    def test_opening_an_account_again_changes_nothing(self) -> None:
        self.open_tree(Limits(cost_nanos=100))
        self.take("k")
        before = self.figures()
        self.open_tree(Limits(cost_nanos=100))
        assert self.figures() == before

    def test_opening_an_account_again_does_not_restart_its_time(self) -> None:
        self.store.open_account("run", Limits(time_ns=100))
        self.clock.advance_ns(100)
        self.store.open_account("run", Limits(time_ns=100))
        assert self.refused("k", "run").reason is StopReason.TIMEOUT

    def test_an_account_cannot_be_opened_again_with_other_limits(self) -> None:
        self.store.open_account("run", Limits(cost_nanos=100))
        with raises(LedgerError):
            self.store.open_account("run", Limits(cost_nanos=101))
        assert self.store.balance("run").limits == Limits(cost_nanos=100)

    def test_an_account_cannot_be_opened_again_under_another_parent(self) -> None:
        self.open_tree()
        for other in ("run", None):
            with raises(LedgerError):
                self.store.open_account("step", NO_LIMITS, parent=other)

    def test_an_unknown_account_is_a_key_error(self) -> None:
        with raises(KeyError):
            self.store.open_account("run", NO_LIMITS, parent="unknown")
        with raises(KeyError):
            self.store.balance("run")
        with raises(KeyError):
            self.store.hold("k", "unknown", ASK)
        with raises(KeyError):
            self.store.draw_retry("unknown")
        with raises(KeyError):
            self.store.draw_retry("unknown", "k")
        with raises(KeyError):
            self.store.grant("unknown", NO_LIMITS)
        with raises(KeyError):
            self.store.charge("k", "unknown", USED)
        self.store.open_account("run", NO_LIMITS)
        with raises(KeyError):
            self.store.put_under("unknown", "run")
        with raises(KeyError):
            self.store.put_under("run", "unknown")

    def test_a_hold_takes_from_its_account_and_every_ancestor_atomically(self) -> None:
        self.open_tree()
        self.take("k")
        for account in ("step", "graph", "run"):
            assert self.figures(account) == figures(
                held_nanos=10, steps_open=1, tokens_held=7, api_calls=1, attempts=1
            ), account

    def test_a_settled_hold_is_replaced_by_what_was_used_at_every_level(self) -> None:
        self.open_tree()
        self.take("k")
        self.store.settle("k", USED)
        for account in ("step", "graph", "run"):
            assert self.figures(account) == figures(
                spent_nanos=6, steps=1, tokens_in=3, tokens_out=2, api_calls=1, attempts=1
            ), account

    def test_a_failure_that_cost_something_gives_its_step_back_and_nothing_else(self) -> None:
        self.open_tree()
        self.take("k")
        self.store.settle("k", USED, succeeded=False)
        assert self.figures() == figures(spent_nanos=6, tokens_in=3, tokens_out=2, api_calls=1, attempts=1)

    def test_a_released_hold_has_cost_nothing_and_was_an_attempt(self) -> None:
        self.open_tree()
        self.take("k")
        self.store.release("k")
        assert self.figures() == figures(api_calls=1, attempts=1)

    def test_a_withdrawn_hold_leaves_nothing_behind(self) -> None:
        self.open_tree()
        self.take("k")
        self.store.withdraw("k")
        assert self.figures() == figures()

    def test_an_unresolved_hold_stays_taken(self) -> None:
        self.open_tree(Limits(cost_nanos=10))
        self.take("k")
        self.store.leave_unresolved("k")
        assert self.figures() == figures(unresolved_nanos=10, tokens_held=7, api_calls=1, attempts=1)
        assert self.refused("k2", "step").reason is StopReason.BUDGET_EXCEEDED

    def test_children_and_their_parent_hold_apart_what_is_apart(self) -> None:
        self.open_tree()
        self.store.open_account("sibling", NO_LIMITS, parent="graph")
        self.take("k1", "step", Amounts(1))
        self.take("k2", "sibling", Amounts(20))
        self.take("k3", "graph", Amounts(300))
        held = {name: self.store.balance(name).held_nanos for name in ("step", "sibling", "graph", "run")}
        assert held == {"step": 1, "sibling": 20, "graph": 321, "run": 321}

    def test_every_ending_is_idempotent_by_its_key(self) -> None:
        for name, end in self.endings().items():
            self.store.open_account(name, NO_LIMITS)
            self.take(name, name)
            end(name)
            before = self.figures(name)
            end(name)
            assert self.figures(name) == before, name

    def test_the_first_settlement_stands(self) -> None:
        self.open_tree()
        self.take("k")
        self.store.settle("k", USED)
        before = self.figures()
        self.store.settle("k", replace(USED, cost_nanos=9_999), succeeded=False)
        assert self.figures() == before

    def test_holding_a_held_key_again_takes_nothing(self) -> None:
        self.open_tree(Limits(cost_nanos=10, steps=1))
        self.take("k")
        before = self.figures()
        assert self.store.hold("k", "step", ASK) is None, "there is no room for a second one, and none is needed"
        assert self.figures() == before

    def test_a_key_whose_call_has_ended_is_not_held_again(self) -> None:
        for name, end in self.endings().items():
            if name != "withdraw":
                self.store.open_account(name, NO_LIMITS)
                self.take(name, name)
                end(name)
                before = self.figures(name)
                with raises(KeyTaken):
                    self.store.hold(name, name, ASK)
                assert self.figures(name) == before, f"{name}: a call that left now would not be charged to any budget"

    def test_a_withdrawn_key_can_be_held_anew(self) -> None:
        self.open_tree()
        self.take("k")
        self.store.withdraw("k")
        self.take("k", "graph", USED)
        assert self.figures("graph") == figures(held_nanos=6, steps_open=1, tokens_held=5, attempts=1), (
            "nothing ran under this key, so it may stand for another call"
        )
        self.store.withdraw("k")
        assert self.figures("graph") == figures()

    def test_a_key_cannot_be_held_for_other_amounts(self) -> None:
        self.open_tree()
        self.take("k")
        before = self.figures()
        for other in (
            Amounts(),
            Amounts(11, 3, 4, 1),
            Amounts(10, 2, 4, 1),
            Amounts(10, 3, 5, 1),
            Amounts(10, 3, 4, 2),
        ):
            with raises(KeyTaken):
                self.store.hold("k", "step", other)
        assert self.figures() == before

    def test_a_key_cannot_be_held_for_another_account(self) -> None:
        self.open_tree()
        self.take("k", "step")
        before = self.figures("run")
        for other in ("graph", "run"):
            with raises(KeyTaken):
                self.store.hold("k", other, ASK)
        assert self.figures("run") == before

    def test_a_key_that_was_never_held_is_a_ledger_error(self) -> None:
        for end in self.endings().values():
            with raises(LedgerError):
                end("unknown")

    def test_a_hold_that_has_ended_cannot_end_in_another_way(self) -> None:
        for name, end in self.endings().items():
            for other, end_otherwise in self.endings().items():
                if name == other or (name == "leave_unresolved" and other in ("settle", "release")):
                    continue
                account = f"{name}, then {other}"
                self.store.open_account(account, NO_LIMITS)
                self.take(account, account)
                end(account)
                before = self.figures(account)
                with raises(LedgerError):
                    end_otherwise(account)
                assert self.figures(account) == before, account

    def test_a_refusal_names_the_reason_the_unit_the_figures_and_whose_budget(self) -> None:
        cases = {
            Limits(cost_nanos=0): (StopReason.BUDGET_EXCEEDED, "usd"),
            Limits(steps=0): (StopReason.STEP_LIMIT_EXCEEDED, "steps"),
            Limits(retries=0): (StopReason.RETRY_BUDGET_EXCEEDED, "retries"),
            Limits(time_ns=0): (StopReason.TIMEOUT, "seconds"),
            Limits(tokens=0): (StopReason.TOKEN_LIMIT_EXCEEDED, "tokens"),
            Limits(api_calls=0): (StopReason.API_CALL_LIMIT_EXCEEDED, "api calls"),
        }
        for number, (limits, (reason, unit)) in enumerate(cases.items()):
            self.store.open_account(f"top {number}", limits)
            self.store.open_account(f"below {number}", NO_LIMITS, parent=f"top {number}")
            stop = self.refused("k", f"below {number}", Amounts())
            assert (stop.reason, stop.unit, stop.budget, stop.limit) == (reason, unit, f"top {number}", 0)
            assert repr(f"top {number}") in stop.message

    def test_the_nearest_of_two_used_up_budgets_is_named(self) -> None:
        self.store.open_account("run", Limits(steps=0))
        self.store.open_account("graph", Limits(steps=0), parent="run")
        self.store.open_account("step", NO_LIMITS, parent="graph")
        assert self.refused("k", "step").budget == "graph"

    def test_a_hold_that_does_not_fit_is_refused_with_the_requested_amount(self) -> None:
        self.open_tree(Limits(cost_nanos=10_000_000_000))
        self.take("k1", "step", Amounts(7_000_000_000))
        stop = self.refused("k2", "step", Amounts(4_000_000_000))
        assert (stop.limit, stop.used, stop.held, stop.asked) == (10.0, 0.0, 7.0, 4.0)
        assert stop.budget == "run"
        self.take("k3", "step", Amounts(3_000_000_000))

    def test_a_refused_hold_leaves_no_trace_at_any_level(self) -> None:
        self.open_tree(Limits(cost_nanos=9))
        self.refused("k", "step")
        for account in ("step", "graph", "run"):
            assert self.figures(account) == figures(), account
        with raises(LedgerError):
            self.store.settle("k", USED)

    def test_a_refused_key_can_be_requested_again(self) -> None:
        self.open_tree(Limits(cost_nanos=10))
        self.take("k1")
        self.refused("k2", "step")
        self.store.release("k1")
        self.take("k2", "step", Amounts(1))

    def test_reaching_a_limit_is_fine_and_the_next_call_stops(self) -> None:
        self.store.open_account("run", Limits(cost_nanos=20, steps=2, tokens=14, api_calls=2))
        self.take("k1", "run")
        self.take("k2", "run")
        stop = self.refused("k3", "run")
        assert stop.reason is StopReason.STEP_LIMIT_EXCEEDED, "what is held may come free, the steps do not"
        self.store.settle("k1", ASK)
        self.store.settle("k2", ASK)
        assert self.refused("k3", "run").reason is StopReason.BUDGET_EXCEEDED

    def test_time_runs_out_on_the_clock_the_store_was_given(self) -> None:
        self.store.open_account("run", Limits(time_ns=1_000))
        self.clock.advance_ns(999)
        self.take("k1", "run")
        self.clock.advance_ns(1)
        assert self.refused("k2", "run").reason is StopReason.TIMEOUT

    def test_a_retry_is_drawn_from_every_level_or_from_none(self) -> None:
        self.store.open_account("run", Limits(retries=2))
        self.store.open_account("graph", Limits(retries=1), parent="run")
        assert self.store.draw_retry("graph")
        assert not self.store.draw_retry("graph")
        assert (self.store.balance("graph").retries, self.store.balance("run").retries) == (1, 1)
        assert self.store.draw_retry("run")
        assert not self.store.draw_retry("run")
        assert (self.store.balance("graph").retries, self.store.balance("run").retries) == (1, 2)

    def test_the_last_retry_admits_the_attempt_it_was_drawn_for_and_no_other_call(self) -> None:
        self.store.open_account("run", Limits(retries=1))
        assert self.store.draw_retry("run")
        assert self.refused("k1", "run").reason is StopReason.RETRY_BUDGET_EXCEEDED
        assert self.store.hold("k2", "run", ASK, retry_drawn=True) is None

    def test_a_key_draws_its_retry_once(self) -> None:
        self.store.open_account("run", Limits(retries=2))
        self.store.open_account("graph", NO_LIMITS, parent="run")
        for _ in range(3):
            assert self.store.draw_retry("graph", "k1")
        assert self.store.draw_retry("graph", "k2")
        assert not self.store.draw_retry("graph", "k3")
        assert self.store.draw_retry("graph", "k1"), "it was drawn for this one already"
        assert (self.store.balance("graph").retries, self.store.balance("run").retries) == (2, 2)

    def test_a_retry_that_was_refused_can_be_drawn_once_there_is_one(self) -> None:
        self.store.open_account("run", Limits(retries=0))
        assert not self.store.draw_retry("run", "k")
        self.store.grant("run", Limits(retries=1))
        assert self.store.draw_retry("run", "k")
        assert self.store.balance("run").retries == 1

    def test_the_retry_of_a_key_cannot_be_drawn_from_another_account(self) -> None:
        self.open_tree()
        assert self.store.draw_retry("step", "k")
        with raises(LedgerError):
            self.store.draw_retry("graph", "k")
        assert self.store.balance("run").retries == 1

    def test_the_key_of_a_retry_may_be_that_of_a_hold(self) -> None:
        self.open_tree()
        self.take("k")
        assert self.store.draw_retry("step", "k")
        assert self.figures("run")["held_nanos"] == 10

    def test_more_is_granted_to_an_account_that_has_used_up_what_it_had(self) -> None:
        self.open_tree(Limits(cost_nanos=10, steps=1, tokens=7, api_calls=1))
        self.take("k1")
        self.refused("k2", "step")
        before = self.figures("run")
        self.store.grant("run", Limits(cost_nanos=20, steps=2, tokens=14, api_calls=2))
        assert self.figures("run") == before
        assert self.store.balance("run").limits == Limits(cost_nanos=20, steps=2, tokens=14, api_calls=2)
        self.take("k2")
        self.refused("k3", "step")

    def test_ceilings_may_be_lowered_below_what_was_taken_and_then_nothing_more_starts(self) -> None:
        self.open_tree()
        for key in ("k1", "k2"):
            self.take(key)
            assert self.store.draw_retry("step", key)
        before = self.figures("run")
        self.store.grant("run", Limits(cost_nanos=1, steps=1, tokens=1, api_calls=1, retries=1))
        assert self.figures("run") == before
        assert self.refused("k3", "step").reason is StopReason.STEP_LIMIT_EXCEEDED
        self.store.settle("k1", USED)
        self.store.leave_unresolved("k2")
        assert self.figures("run") == figures(
            spent_nanos=6,
            unresolved_nanos=10,
            steps=1,
            tokens_in=3,
            tokens_out=2,
            tokens_held=7,
            api_calls=2,
            retries=2,
            attempts=2,
        )

    def test_time_that_is_granted_counts_from_when_the_account_was_opened(self) -> None:
        self.store.open_account("run", Limits(time_ns=100))
        self.clock.advance_ns(100)
        assert self.refused("k", "run").reason is StopReason.TIMEOUT
        self.store.grant("run", Limits(time_ns=101))
        self.take("k", "run")
        self.clock.advance_ns(1)
        assert self.refused("k2", "run").reason is StopReason.TIMEOUT

    def test_an_account_is_opened_again_with_the_ceilings_it_was_granted(self) -> None:
        self.store.open_account("run", Limits(steps=1))
        self.store.grant("run", Limits(steps=2))
        self.store.open_account("run", Limits(steps=2))
        with raises(LedgerError):
            self.store.open_account("run", Limits(steps=1))

    def test_a_charge_is_spent_at_every_level(self) -> None:
        self.open_tree()
        self.store.charge("k", "step", replace(USED, api_calls=1))
        for account in ("step", "graph", "run"):
            assert self.figures(account) == figures(spent_nanos=6, tokens_in=3, tokens_out=2, api_calls=1), account

    def test_a_charge_may_pass_every_ceiling_and_then_nothing_more_starts(self) -> None:
        self.open_tree(Limits(cost_nanos=1, steps=0, tokens=1, api_calls=0, retries=0, time_ns=0))
        self.store.charge("k", "step", Amounts(100, 20, 30, 4))
        assert self.figures("run") == figures(spent_nanos=100, tokens_in=20, tokens_out=30, api_calls=4)
        assert self.refused("k2", "step", Amounts()).reason is StopReason.BUDGET_EXCEEDED

    def test_a_key_is_charged_once(self) -> None:
        self.open_tree()
        for _ in range(3):
            self.store.charge("k", "step", USED)
        assert self.figures("run") == figures(spent_nanos=6, tokens_in=3, tokens_out=2)
        for account, amounts in (("step", replace(USED, cost_nanos=7)), ("graph", USED)):
            with raises(LedgerError):
                self.store.charge("k", account, amounts)
        assert self.figures("run") == figures(spent_nanos=6, tokens_in=3, tokens_out=2)

    def test_a_key_is_that_of_a_charge_or_of_a_hold(self) -> None:
        self.open_tree()
        self.take("held")
        self.store.charge("charged", "step", USED)
        before = self.figures()
        with raises(LedgerError):
            self.store.charge("held", "step", ASK)
        with raises(LedgerError):
            self.store.hold("charged", "step", USED)
        for end in self.endings().values():
            with raises(LedgerError):
                end("charged")
        assert self.figures() == before

    def test_what_an_account_has_taken_counts_at_its_new_parent_and_all_ancestors(self) -> None:
        self.open_tree()
        self.use_all_kinds("step")
        self.store.open_account("day", NO_LIMITS)
        self.store.open_account("owner", NO_LIMITS, parent="day")
        self.store.charge("before", "owner", USED)
        charged = self.figures("owner")
        self.store.put_under("run", "owner")
        for account in ("owner", "day"):
            above = {name: charged[name] + figure for name, figure in self.figures("run").items()}
            assert self.figures(account) == above, account

    def test_holds_that_end_after_their_account_was_moved_end_at_its_new_ancestors_too(self) -> None:
        self.open_tree()
        for key in ("step", "graph"):
            self.use_all_kinds(key)
        self.store.open_account("day", NO_LIMITS)
        self.store.put_under("run", "day")
        for key in ("step", "graph"):
            self.store.settle(f"{key} held", USED)
            self.store.settle(f"{key} unresolved", USED, succeeded=False)
        assert self.store.draw_retry("step")
        self.take("new")
        assert self.figures("day") == self.figures("run")
        self.store.withdraw("new")
        assert self.figures("day") == self.figures("run")
        assert self.store.balance("day").held_nanos == 0

    def test_the_ceilings_of_a_new_parent_apply_to_an_account_and_its_descendants(self) -> None:
        self.open_tree()
        self.take("k", ask=Amounts(6))
        self.store.open_account("day", Limits(cost_nanos=10))
        self.store.put_under("run", "day")
        assert self.refused("k2", "step", Amounts(5)).budget == "day"
        self.store.settle("k", Amounts(5))
        self.take("k2", "graph", Amounts(5))

    def test_an_account_may_be_put_under_a_parent_whose_ceilings_it_exceeds_and_then_nothing_starts(self) -> None:
        self.store.open_account("run", NO_LIMITS)
        self.use_all_kinds("run")
        used_up = Limits(cost_nanos=1, steps=0, tokens=1, api_calls=0, retries=0)
        self.store.open_account("day", used_up)
        self.store.put_under("run", "day")
        assert self.figures("day") == self.figures("run")
        assert self.store.balance("day").limits == used_up
        assert self.refused("k", "run").budget == "day"

    def test_putting_an_account_under_the_same_parent_again_counts_once(self) -> None:
        self.open_tree()
        self.use_all_kinds("step")
        before = self.figures("run")
        for parent in ("graph", "run", "run"):
            self.store.put_under("step", parent)
        assert self.figures("run") == before
        with raises(LedgerError):
            self.store.open_account("step", NO_LIMITS, parent="run")
        self.store.open_account("step", NO_LIMITS, parent="graph")

    def test_an_account_can_be_put_between_another_and_its_parent(self) -> None:
        self.store.open_account("day", NO_LIMITS)
        self.store.open_account("run", NO_LIMITS, parent="day")
        self.use_all_kinds("run")
        before = self.figures("day")
        self.store.open_account("owner", NO_LIMITS, parent="day")
        self.store.put_under("run", "owner")
        self.store.open_account("run", NO_LIMITS, parent="owner")
        assert self.figures("day") == self.figures("owner") == before
        self.take("k", "run")
        assert self.figures("day") == self.figures("owner") == self.figures("run")
        assert self.store.forget(["owner", "day"]) == 0, "an account is under them"

    def test_an_account_is_not_put_under_itself_nor_removed_from_its_parent(self) -> None:
        self.open_tree()
        self.store.open_account("other", NO_LIMITS)
        self.use_all_kinds("step")
        before = {name: self.figures(name) for name in ("run", "graph", "step", "other")}
        for account, parent in (
            ("run", "run"),
            ("run", "step"),
            ("step", "step"),
            ("step", "other"),
            ("graph", "other"),
        ):
            with raises(LedgerError):
                self.store.put_under(account, parent)
        assert {name: self.figures(name) for name in before} == before

    def test_accounts_that_are_used_while_they_are_put_under_another_leave_exact_figures_there(self) -> None:
        self.store.open_account("day", NO_LIMITS)
        names = [f"run {number}" for number in range(max(2, self.threads // 4))]
        for name in names:
            self.store.open_account(name, NO_LIMITS)

        def work(thread: int) -> None:
            name = names[thread % len(names)]
            if thread >= len(names):
                self.store.put_under(name, "day")
            self.store.open_account(f"{name} step {thread}", NO_LIMITS, parent=name)
            for number in range(self.holds_per_thread):
                key, account = f"{thread}:{number}", f"{name} step {thread}" if number % 2 else name
                self.take(key, account)
                if number % 3 == 0:
                    self.store.leave_unresolved(key)
                elif number % 3 == 1:
                    self.store.settle(key, USED)
            self.store.charge(f"{thread}", name, USED)

        self.at_once(work)
        for name in names:
            self.store.put_under(name, "day")
        under = [self.figures(name) for name in names]
        assert self.figures("day") == {figure: sum(child[figure] for child in under) for figure in FIGURES}
        assert self.store.balance("day").attempts == self.threads * self.holds_per_thread

    def test_a_ceiling_is_not_passed_by_holds_that_meet_an_account_being_put_under_it(self) -> None:
        room = self.threads * self.holds_per_thread // 2
        self.store.open_account("day", Limits(steps=room))
        self.store.open_account("run", NO_LIMITS)
        self.take("first", "run")

        def work(thread: int) -> int:
            self.store.put_under("run", "day")
            keys = [f"{thread}:{number}" for number in range(self.holds_per_thread)]
            return [self.store.hold(key, "run", ASK) for key in keys].count(None)

        assert sum(self.at_once(work)) == room - 1
        assert self.figures("day") == self.figures("run")
        assert self.store.balance("day").steps_open == room

    def test_open_holds_are_listed_by_key_prefix(self) -> None:
        self.open_tree()
        assert dict(self.store.held()) == {}
        for key in ("r/1/a", "r/1/b", "r/10/a", "R/1/a", "r%", "r_1/a", "x/r/1", "r/1/ünï🌊/a"):
            self.take(key)
        self.take("r/1/other", ask=Amounts(1))
        self.store.settle("r/1/b", USED)
        self.store.charge("r/1/charged", "step", USED)
        assert dict(self.store.held("r/1/")) == {"r/1/a": ASK, "r/1/other": Amounts(1), "r/1/ünï🌊/a": ASK}
        assert dict(self.store.held("r/1/ünï🌊")) == {"r/1/ünï🌊/a": ASK}
        assert set(self.store.held("r%")) == {"r%"}
        assert set(self.store.held("r_")) == {"r_1/a"}
        assert len(self.store.held()) == 8
        self.store.leave_unresolved("r/1/a")
        self.store.withdraw("r/1/other")
        assert set(self.store.held("r/1/")) == {"r/1/ünï🌊/a"}

    def test_concurrent_charges_and_draws_of_one_key_count_once(self) -> None:
        self.open_tree(Limits(retries=3))
        self.at_once(lambda thread: self.store.charge("k", "step", USED))
        assert set(self.at_once(lambda thread: self.store.draw_retry("step", "k"))) == {True}
        assert self.figures("run") == figures(spent_nanos=6, tokens_in=3, tokens_out=2, retries=1)

    def test_unresolved_holds_are_listed_with_their_amounts(self) -> None:
        self.open_tree()
        assert dict(self.store.unresolved()) == {}
        for key in ("held", "settled", "lost"):
            self.take(key)
        self.store.settle("settled", USED)
        self.store.leave_unresolved("lost")
        assert dict(self.store.unresolved()) == {"lost": ASK}

    def test_unresolved_holds_are_listed_by_prefix(self) -> None:
        self.open_tree()
        for key in ("r/1/a", "r/1/b", "r/2/a", "r%", "r_1/a", "rest"):
            self.take(key)
            self.store.leave_unresolved(key)
        self.take("r/1/held")
        assert set(self.store.unresolved("r/1/")) == {"r/1/a", "r/1/b"}
        assert set(self.store.unresolved("r/")) == {"r/1/a", "r/1/b", "r/2/a"}
        assert (set(self.store.unresolved("r%")), set(self.store.unresolved("r_"))) == ({"r%"}, {"r_1/a"})

    def test_an_unresolved_hold_can_be_settled_when_its_bill_arrives(self) -> None:
        self.open_tree()
        self.take("k")
        self.store.leave_unresolved("k")
        self.store.settle("k", USED)
        assert dict(self.store.unresolved()) == {}
        for account in ("step", "graph", "run"):
            assert self.figures(account) == figures(
                spent_nanos=6, tokens_in=3, tokens_out=2, api_calls=1, attempts=1
            ), f"{account}: its step was given back when it was left, and the bill does not make it a success"

    def test_an_unresolved_hold_can_be_released_when_it_turns_out_to_have_been_free(self) -> None:
        self.open_tree()
        self.take("k")
        self.store.leave_unresolved("k")
        self.store.release("k")
        assert dict(self.store.unresolved()) == {}
        assert self.figures("run") == figures(api_calls=1, attempts=1)

    def test_concurrent_holds_never_pass_a_ceiling_and_leave_exact_figures(self) -> None:
        wanted = self.threads * self.holds_per_thread
        room = wanted // 2
        self.store.open_account("run", Limits(cost_nanos=10 * room))
        self.store.open_account("narrow", Limits(steps=wanted // 4), parent="run")
        self.store.open_account("wide", NO_LIMITS, parent="run")
        over: list[Balance] = []

        def work(thread: int) -> int:
            taken = 0
            account = "narrow" if thread % 2 else "wide"
            for number in range(self.holds_per_thread):
                key = f"{thread}:{number}"
                if self.store.hold(key, account, ASK) is None:
                    now = self.store.balance("run")
                    if now.spent_nanos + now.held_nanos > 10 * room:
                        over.append(now)
                    self.store.settle(key, replace(ASK, api_calls=0))
                    taken += 1
            return taken

        taken = self.at_once(work)
        run, narrow, wide = (self.store.balance(name) for name in ("run", "narrow", "wide"))
        assert over == []
        assert sum(taken) == run.steps == run.attempts == run.api_calls
        assert run.spent_nanos == 10 * sum(taken) <= 10 * room
        assert run.spent_nanos == narrow.spent_nanos + wide.spent_nanos
        assert narrow.steps <= wanted // 4
        assert (run.held_nanos, run.steps_open, run.tokens_held) == (0, 0, 0)

    def test_exactly_as_many_concurrent_holds_are_admitted_as_there_are_steps(self) -> None:
        steps = self.threads // 2
        self.store.open_account("run", Limits(steps=steps))
        answers = self.at_once(lambda thread: self.store.hold(str(thread), "run", ASK))
        assert answers.count(None) == steps
        assert self.store.balance("run").steps_open == steps

    def test_exactly_as_many_concurrent_retries_are_drawn_as_there_are(self) -> None:
        retries = self.threads // 2
        self.store.open_account("run", Limits(retries=retries))
        assert self.at_once(lambda thread: self.store.draw_retry("run")).count(True) == retries
        assert self.store.balance("run").retries == retries

    def test_concurrent_holds_of_one_key_take_it_once(self) -> None:
        self.open_tree()
        assert set(self.at_once(lambda thread: self.store.hold("k", "step", ASK))) == {None}
        assert self.figures("run") == figures(held_nanos=10, steps_open=1, tokens_held=7, api_calls=1, attempts=1)

    def test_of_concurrent_openings_with_other_limits_one_succeeds(self) -> None:
        def work(thread: int) -> int | None:
            try:
                self.store.open_account("run", Limits(steps=thread))
            except LedgerError:
                return None
            return thread

        opened = [steps for steps in self.at_once(work) if steps is not None]
        assert opened == [self.store.balance("run").limits.steps]

    def test_a_balance_is_of_one_instant(self) -> None:
        self.store.open_account("run", NO_LIMITS)
        keys = [str(number) for number in range(self.holds_per_thread)]
        for key in keys:
            self.take(key, "run", Amounts(10))

        def work(thread: int) -> set[int]:
            if thread == 0:
                for key in keys:
                    self.store.leave_unresolved(key)
            seen = [self.store.balance("run") for _ in keys]
            return {now.spent_nanos for now in seen} | {now.held_nanos + now.unresolved_nanos for now in seen}

        assert set().union(*self.at_once(work)) == {0, 10 * len(keys)}, "nothing was spent, nothing was lost"

    def test_concurrent_settlements_of_one_key_count_once(self) -> None:
        self.open_tree()
        self.take("k")
        self.at_once(lambda thread: self.store.settle("k", USED))
        assert self.store.balance("run").spent_nanos == 6

    def test_a_removed_account_is_unknown_and_its_use_stays_counted_at_its_ancestors(self) -> None:
        self.open_tree()
        for key, end in self.endings().items():
            self.take(key)
            end(key)
        self.store.charge("charged", "step", USED)
        self.store.draw_retry("step", "drawn")
        before = self.figures("graph")
        assert self.store.forget(["step"]) == 1
        assert self.figures("graph") == before
        assert self.store.unresolved() == {}
        with raises(KeyError):
            self.store.balance("step")
        with raises(LedgerError):
            self.store.settle("settle", USED)
        self.store.open_account("step", Limits(steps=9), parent="run")
        self.take("settle")
        assert self.figures() == figures(held_nanos=10, tokens_held=7, steps_open=1, attempts=1, api_calls=1)

    def test_accounts_with_children_or_open_holds_are_not_removed(self) -> None:
        self.open_tree()
        self.store.open_account("other", NO_LIMITS, parent="graph")
        self.take("k")
        assert self.store.forget(["run", "graph", "step", "other", "unknown"]) == 1
        with raises(KeyError):
            self.store.balance("other")
        self.store.release("k")
        assert self.store.forget(["run", "graph", "step", "other"]) == 1
        assert self.store.forget(["graph", "graph"]) == 1
        assert self.store.forget([]) == 0
        assert self.store.forget(["run"]) == 1

    def test_old_accounts_are_listed_in_the_order_they_were_opened_in(self) -> None:
        for name in ("z", "a", "m"):
            self.store.open_account(name, NO_LIMITS)
            self.clock.advance(10)
        self.store.open_account("z", NO_LIMITS)
        self.store.grant("a", Limits(steps=9))
        assert list(self.store.aged(30)) == ["z"]
        assert list(self.store.aged(20)) == ["z", "a"]
        assert list(self.store.aged(20.000001)) == ["z"]
        assert list(self.store.aged(0)) == ["z", "a", "m"]
        assert list(self.store.aged(30.000001)) == list(self.store.aged(1e9)) == []

    def test_old_accounts_are_listed_page_by_page(self) -> None:
        names = [f"account {number}" for number in range(7)]
        for name in names:
            self.store.open_account(name, NO_LIMITS)
        found: list[str] = []
        while page := self.store.aged(0, after=found[-1] if found else None, limit=3):
            assert len(page) <= 3
            found += page
        assert found == names
        assert list(self.store.aged(0, after="unknown")) == [], "a page after an unknown account is empty"
        assert len(self.store.aged(0, limit=10**30)) == 7

    def test_old_accounts_are_listed_by_the_beginning_of_their_names(self) -> None:
        names = ["run:1", "key:1", "run:%", "run:2", "Run:3", "run_4"]
        for name in names:
            self.store.open_account(name, NO_LIMITS)
        assert list(self.store.aged(0, prefix="run:")) == ["run:1", "run:%", "run:2"]
        assert list(self.store.aged(0, prefix="run:%")) == ["run:%"], "a prefix is no pattern"
        assert list(self.store.aged(0, prefix="run:", after="key:1", limit=1)) == ["run:%"]
        assert list(self.store.aged(0, prefix="")) == names

    def test_a_removed_account_is_not_listed_and_its_name_can_be_used_again(self) -> None:
        for name in ("a", "b", "c"):
            self.store.open_account(name, NO_LIMITS)
        self.clock.advance(10)
        self.store.forget(["a", "c"])
        self.store.open_account("a", NO_LIMITS)
        assert list(self.store.aged(10)) == ["b"]
        assert list(self.store.aged(0)) == ["b", "a"]

    def test_an_age_is_a_time_and_a_page_has_a_size(self) -> None:
        for age_s in (-1, float("nan"), float("inf"), None, "1", True):
            with raises(InvalidValue):
                self.store.aged(age_s)  # type: ignore[arg-type]
        for limit in (0, -1, 1.5, None, True):
            with raises(InvalidValue):
                self.store.aged(0, limit=limit)  # type: ignore[arg-type]

    def test_a_store_that_cannot_record_raises_and_changes_nothing(self) -> None:
        self.open_tree()
        self.store.open_account("unused", NO_LIMITS)
        self.take("k")
        before = self.figures()
        broken = self.broken(self.store)
        if broken is None:
            raise unittest.SkipTest("nothing can break this store")
        operations: dict[str, Callable[[], object]] = {
            "open_account": lambda: self.store.open_account("new", NO_LIMITS),
            "hold": lambda: self.store.hold("k2", "step", ASK),
            "grant": lambda: self.store.grant("run", Limits(steps=9)),
            "put_under": lambda: self.store.put_under("unused", "run"),
            "charge": lambda: self.store.charge("k3", "step", USED),
            "draw_retry": lambda: self.store.draw_retry("step"),
            "draw_retry by key": lambda: self.store.draw_retry("step", "k"),
            "settle": lambda: self.store.settle("k", USED),
            "release": lambda: self.store.release("k"),
            "withdraw": lambda: self.store.withdraw("k"),
            "leave_unresolved": lambda: self.store.leave_unresolved("k"),
            "forget": lambda: self.store.forget(["unused"]),
        }
        with broken:
            for operation in operations.values():
                with raises(LedgerUnavailable):
                    operation()
        assert self.figures() == before
        self.store.settle("k", USED)
        assert self.store.balance("run").spent_nanos == 6
