"""The contract of model calls whose worst case is not known, at a ledger store.

Under a ceiling of money they run one at a time until one was settled; then each holds the most that one has cost.
"""

from __future__ import annotations

from penstock.containment.ledger import Amounts, TicketRequest
from penstock.containment.limits import NO_LIMITS, Limits
from penstock.containment.tickets import Waiting
from penstock.errors import InvalidValue, KeyTaken, LedgerError
from penstock.stops import Stop, StopReason
from penstock.testing.contracts.ledger_tests import raises
from penstock.testing.contracts.ledger_waiting import WaitingTests

LEASE_S = 10.0
PATIENT = TicketRequest("run", "owner", lease_s=1_000, max_wait_s=10_000)
NOTHING = Amounts()
MONEY = Limits(cost_nanos=100)


class UnhintedTests(WaitingTests):
    """Tests of `unhinted_lease_s` and `renew_unhinted`."""

    def unhinted(
        self, key: str, account: str = "step", *, under: str | None = None, ask: Amounts = NOTHING
    ) -> Stop | None:
        return self.store.hold(key, account, ask, under=under, unhinted_lease_s=LEASE_S)

    def join_unhinted(self, key: str, account: str = "step", *, under: str | None = None) -> Stop | Waiting | None:
        return self.store.join_queue(key, account, NOTHING, PATIENT, under=under, unhinted_lease_s=LEASE_S)

    def held_nanos(self, key: str) -> int:
        return self.store.held()[key].cost_nanos

    def first_and_waiting(self) -> None:
        """Let one un-hinted call run, and two wait for it."""
        self.open_tree(MONEY)
        assert self.unhinted("first") is None
        for key in ("second", "third"):
            assert isinstance(self.join_unhinted(key), Waiting)

    def test_unhinted_calls_run_one_at_a_time_until_one_was_settled(self) -> None:
        self.first_and_waiting()
        stop = self.unhinted("fourth")
        assert stop is not None
        assert (stop.reason, stop.budget, stop.momentary) == (StopReason.BUDGET_EXCEEDED, "run", True)
        assert "one at a time" in stop.message
        assert set(self.store.held()) == {"first"}
        self.store.settle("first", Amounts(30))
        assert set(self.store.held()) == {"second", "third"}, "admitted in the same act"
        assert self.store.renew("second") is self.store.renew("third") is None
        assert (self.held_nanos("second"), self.held_nanos("third")) == (30, 30)
        stop = self.unhinted("fifth")
        assert stop is not None
        assert (stop.momentary, stop.budget) == (True, "run")

    def test_unhinted_calls_hold_the_most_that_one_has_cost(self) -> None:
        self.open_tree(Limits(cost_nanos=1_000))
        for number, (cost, most) in enumerate(((30, 0), (10, 30), (40, 30), (0, 40))):
            assert self.unhinted(f"k{number}") is None
            assert self.held_nanos(f"k{number}") == most
            self.store.settle(f"k{number}", Amounts(cost))
        assert self.unhinted("more", ask=Amounts(60)) is None
        assert self.held_nanos("more") == 60, "it requested more itself"

    def test_a_call_that_may_cost_what_the_dearest_did_is_refused_where_that_is_not_left(self) -> None:
        self.open_tree(MONEY)
        assert self.unhinted("first") is None
        self.store.settle("first", Amounts(60))
        for stop in (self.unhinted("second"), self.join_unhinted("second")):
            assert isinstance(stop, Stop)
            assert not stop.momentary
        assert self.store.hold("hinted", "step", Amounts(40)) is None

    def test_sixteen_unhinted_calls_pass_the_ceiling_by_one_call_at_most(self) -> None:
        self.open_tree(MONEY)
        keys = [f"k{number}" for number in range(16)]
        waiting = [key for key in keys if self.unhinted(key) is not None]
        answers = {key: self.join_unhinted(key) for key in waiting}
        while open_now := list(self.store.held()):
            for key in open_now:
                if isinstance(answers.get(key), Waiting):
                    self.store.renew(key)
                self.store.settle(key, Amounts(50))
        assert self.store.balance("run").spent_nanos == 100
        assert all(isinstance(self.store.renew(key), Stop) for key in self.store.queued())

    def test_hinted_calls_and_calls_without_a_ceiling_of_money_do_not_wait(self) -> None:
        self.first_and_waiting()
        assert self.store.hold("hinted", "step", Amounts(10)) is None
        assert self.join_hinted("joined") is None
        self.store.open_account("free", Limits(steps=1_000, tokens=1_000))
        for number in range(3):
            assert self.unhinted(f"free {number}", "free") is None

    def join_hinted(self, key: str) -> Stop | Waiting | None:
        return self.store.join_queue(key, "step", Amounts(10), PATIENT)

    def test_what_runs_under_an_unhinted_call_does_not_wait_for_it(self) -> None:
        self.first_and_waiting()
        assert self.unhinted("child", under="first") is None
        assert self.store.hold("tool", "step", NOTHING, under="child") is None
        assert self.unhinted("grandchild", under="tool") is None
        assert isinstance(self.join_unhinted("other", under="second"), Waiting), "that one does not hold"
        assert set(self.store.queued()) == {"second", "third", "other"}

    def test_what_runs_under_an_unhinted_call_runs_one_at_a_time_too(self) -> None:
        self.first_and_waiting()
        assert self.unhinted("child", under="first") is None
        for key in ("sibling", "last"):
            assert isinstance(self.join_unhinted(key, under="first"), Waiting)
        assert self.unhinted("grandchild", under="child") is None
        self.store.withdraw("grandchild")
        self.store.release("child")
        assert self.store.renew("sibling") is None, "the one before it failed, and the outer one still runs"
        assert set(self.store.queued()) == {"second", "third", "last"}
        self.store.settle("sibling", Amounts(20))
        assert set(self.store.held()) == {"first", "second", "third", "last"}, "what one costs is known now"
        assert {self.held_nanos(key) for key in ("second", "third", "last")} == {20}

    def test_the_next_one_runs_alone_when_one_ends_without_a_bill(self) -> None:
        for name, end in self.endings().items():
            if name == "settle":
                continue
            self.store.open_account(name, MONEY)
            assert self.unhinted(f"{name} 1", name) is None
            for number in (2, 3):
                assert isinstance(self.join_unhinted(f"{name} {number}", name), Waiting)
            end(f"{name} 1")
            assert set(self.store.held(name)) == {f"{name} 2"}, name
            assert self.store.renew(f"{name} 2") is None
            self.store.settle(f"{name} 2", Amounts(5))
            assert self.store.renew(f"{name} 3") is None
            assert self.held_nanos(f"{name} 3") == 5

    def test_a_late_bill_of_an_unresolved_call_is_known_of(self) -> None:
        self.first_and_waiting()
        self.store.leave_unresolved("first")
        assert self.store.renew("second") is None
        self.store.settle("first", Amounts(7))
        assert self.store.renew("third") is None
        assert self.held_nanos("third") == 7

    def test_a_call_that_leaves_makes_no_other_wait(self) -> None:
        self.first_and_waiting()
        self.store.leave_queue("second")
        self.store.withdraw("first")
        assert set(self.store.held()) == {"third"}
        self.store.leave_queue("third")
        assert dict(self.store.held()) == {}
        assert self.unhinted("third") is None

    def test_a_call_whose_lease_has_ended_keeps_no_other_waiting(self) -> None:
        self.first_and_waiting()
        self.pass_time(LEASE_S * 0.7)
        assert self.store.renew_unhinted("first")
        self.pass_time(LEASE_S * 0.7)
        assert isinstance(self.unhinted("fourth"), Stop), "it was renewed"
        self.pass_time(LEASE_S * 0.7)
        assert isinstance(self.join_unhinted("fourth"), Waiting), "the next one takes its place"
        assert set(self.store.held()) == {"first", "second"}
        self.store.settle("first", Amounts(3))
        assert {"third", "fourth"} < set(self.store.held()), "its bill counts all the same"

    def test_a_lease_is_renewed_only_while_it_is_needed(self) -> None:
        self.open_tree(MONEY)
        assert not self.store.renew_unhinted("unknown")
        for key in ("first", "child"):
            assert self.unhinted(key, under="first") is None
        assert self.store.hold("hinted", "step", Amounts(10)) is None
        assert self.store.renew_unhinted("first")
        assert self.store.renew_unhinted("child")
        assert not self.store.renew_unhinted("hinted")
        self.store.settle("child", Amounts(1))
        assert not self.store.renew_unhinted("child")
        assert not self.store.renew_unhinted("first"), "others know what to hold"

    def test_every_level_with_a_ceiling_of_money_counts(self) -> None:
        self.store.open_account("team", Limits(cost_nanos=1_000))
        for name in ("ann", "bob"):
            self.store.open_account(name, Limits(cost_nanos=500), parent="team")
        assert self.unhinted("ann 1", "ann") is None
        stop = self.unhinted("bob 1", "bob")
        assert stop is not None
        assert stop.budget == "team"
        self.store.settle("ann 1", Amounts(20))
        assert self.unhinted("bob 1", "bob") is None
        assert self.held_nanos("bob 1") == 20
        stop = self.unhinted("bob 2", "bob")
        assert stop is not None
        assert stop.budget == "bob", "none has ended there"
        assert self.unhinted("ann 2", "ann") is None

    def test_an_account_that_comes_above_has_seen_none(self) -> None:
        self.store.open_account("run", NO_LIMITS)
        self.store.open_account("day", MONEY)
        self.store.put_under("run", "day")
        assert self.unhinted("first", "run") is None
        assert isinstance(self.join_unhinted("second", "run"), Waiting)
        self.store.settle("first", Amounts(1))
        assert self.store.renew("second") is None

    def test_a_repeated_request_is_the_same_call(self) -> None:
        self.open_tree(MONEY)
        assert self.unhinted("first") is None
        assert self.unhinted("first") is None
        assert self.join_unhinted("first") is None
        assert self.join_unhinted("second") == self.join_unhinted("second")
        self.store.settle("first", Amounts(30))
        assert self.unhinted_again("second") is None
        assert self.unhinted("third") is None
        assert self.unhinted("third") is None
        assert self.join_unhinted("third") is None
        with raises(KeyTaken):
            self.unhinted("third", "graph")
        with raises(KeyTaken):
            self.unhinted("first")
        assert self.store.balance("run").held_nanos == 60

    def unhinted_again(self, key: str) -> Stop | Waiting | None:
        return self.store.renew(key)

    def test_calls_that_keep_each_other_waiting_end_in_one_refusal(self) -> None:
        self.open_tree(MONEY)
        assert self.store.hold("outer", "step", Amounts(100)) is None
        stop = self.unhinted("first", under="outer")
        assert stop is not None
        self.store.settle("outer", Amounts(0))
        assert self.unhinted("first") is None
        assert self.store.hold("outer 2", "step", Amounts(100)) is None
        hinted = self.store.join_queue("in first", "step", Amounts(1), PATIENT, under="first")
        assert isinstance(hinted, Waiting)
        stop_or_wait = self.join_unhinted("in outer", under="outer 2")
        assert isinstance(stop_or_wait, Stop)
        assert "wait themselves" in stop_or_wait.message

    def test_an_account_with_unhinted_calls_is_removed_with_them(self) -> None:
        self.store.open_account("run", MONEY)
        for end in (self.store.leave_unresolved, lambda key: self.store.settle(key, Amounts(1))):
            key = f"k{len(self.store.unresolved())}"
            assert self.unhinted(key, "run") is None
            end(key)
        assert self.store.forget(["run"]) == 1
        self.store.open_account("run", MONEY)
        assert self.unhinted("k0", "run") is None
        assert self.held_nanos("k0") == 0
        with raises(LedgerError):
            self.store.release("k1")

    def test_a_lease_that_is_no_time_above_zero_takes_nothing(self) -> None:
        self.open_tree(MONEY)
        for wrong in (0, -1, float("nan"), float("inf"), "1", True):
            with raises(InvalidValue):
                self.store.hold("k", "step", NOTHING, unhinted_lease_s=wrong)  # type: ignore[arg-type]
            with raises(InvalidValue):
                self.store.join_queue("k", "step", NOTHING, PATIENT, unhinted_lease_s=wrong)  # type: ignore[arg-type]
        assert dict(self.store.held()) == dict(self.store.queued()) == {}
        assert self.figures("run")["attempts"] == 0

    def test_concurrent_unhinted_calls_begin_one_at_a_time(self) -> None:
        self.store.open_account("run", MONEY)
        answers = self.at_once(lambda thread: self.unhinted(f"k{thread}", "run"))
        assert answers.count(None) == 1
        assert len(self.store.held()) == 1
