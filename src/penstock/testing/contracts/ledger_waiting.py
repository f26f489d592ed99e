"""The contract of calls that wait at a ledger store for amounts that others hold.

`containment.waiting` decides which call is next, and has tests of its own. These tests check that a store asks it in
the same transaction as the change that makes room, and which parts of a ticket the store keeps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from penstock.containment.ledger import Amounts, TicketRequest
from penstock.containment.limits import NO_LIMITS, Limits
from penstock.containment.tickets import Waiting
from penstock.errors import InvalidValue, KeyTaken, LedgerError
from penstock.stops import Stop, StopReason
from penstock.testing.contracts.ledger_tests import USED, LedgerStoreTests, figures, raises

LEASE_S = 10.0
TICKET = TicketRequest("run", "owner", lease_s=LEASE_S, max_wait_s=300)


def cost(nanos: int) -> Amounts:
    return Amounts(cost_nanos=nanos)


class WaitingTests(LedgerStoreTests):
    """Tests of `join_queue`, `renew`, `leave_queue`, and of the changes that admit a waiting call."""

    def pass_time(self, seconds: float) -> None:
        """Let time pass on the clock that leases are measured by."""
        self.clock.advance(seconds)

    # Joining.

    def test_a_call_that_fits_holds_at_once_and_has_no_ticket(self) -> None:
        self.open_tree(Limits(cost_nanos=10))
        assert self.join("k", "step", 10) is None
        assert self.held() == {"k"}
        assert dict(self.store.queued()) == {}
        assert self.store.balance("run").held_nanos == 10

    def test_a_call_that_others_keep_out_waits_and_holds_nothing_at_any_level(self) -> None:
        self.full_tree()
        before = self.figures("run")
        answer = self.join("k", "step", 5)
        assert isinstance(answer, Waiting)
        assert (answer.stop.reason, answer.stop.budget, answer.stop.momentary) == (
            StopReason.BUDGET_EXCEEDED,
            "run",
            True,
        )
        assert dict(self.store.queued()) == {"k": cost(5)}
        assert self.held() == {"first"}
        assert self.figures("run") == before
        with raises(LedgerError):
            self.store.settle("k", USED)

    def test_a_call_that_would_not_fit_if_all_holds_came_free_is_refused_at_once(self) -> None:
        self.full_tree()
        answer = self.join("k", "step", 11)
        assert isinstance(answer, Stop)
        assert not answer.momentary
        assert dict(self.store.queued()) == {}

    def test_a_call_that_something_else_than_holds_refuses_does_not_wait(self) -> None:
        for number, limits in enumerate((Limits(steps=1), Limits(api_calls=1), Limits(retries=0), Limits(time_ns=0))):
            name = f"account {number}"
            self.store.open_account(name, replace(limits, cost_nanos=10))
            self.store.hold(f"first {number}", name, Amounts(10, api_calls=1))
            assert isinstance(self.join(f"k {number}", name, 5), Stop), limits
        assert dict(self.store.queued()) == {}

    def test_a_call_waits_for_tokens_as_for_money(self) -> None:
        self.open_tree(Limits(tokens=10))
        self.take("first", ask=Amounts(tokens_in=10))
        answer = self.store.join_queue("k", "step", Amounts(tokens_out=4), TICKET)
        assert isinstance(answer, Waiting)
        assert answer.stop.unit == "tokens"
        self.store.settle("first", Amounts(tokens_in=6))
        assert self.store.renew("k") is None
        assert self.store.balance("run").tokens_held == 4

    def test_joining_again_is_the_same_ticket(self) -> None:
        self.full_tree()
        first, again = self.join("k", "step", 5), self.join("k", "step", 5)
        assert first == again
        assert list(self.store.queued()) == ["k"]

    def test_a_key_that_waits_is_no_key_of_another_call(self) -> None:
        self.full_tree()
        self.join("k", "step", 5)
        uses: list[Callable[[], object]] = [
            lambda: self.join("k", "step", 4),
            lambda: self.join("k", "graph", 5),
            lambda: self.store.hold("k", "step", cost(5)),
            lambda: self.store.charge("k", "step", cost(5)),
        ]
        for use in uses:
            with raises(KeyTaken):
                use()
        assert dict(self.store.queued()) == {"k": cost(5)}

    def test_a_key_that_is_held_or_has_ended_gets_no_ticket(self) -> None:
        self.full_tree()
        assert self.join("first", "step", 10) is None, "the same call, repeated"
        with raises(KeyTaken):
            self.join("first", "step", 9)
        self.store.settle("first", cost(10))
        with raises(KeyTaken):
            self.join("first", "step", 10)
        self.store.charge("charged", "step", cost(1))
        with raises(KeyTaken):
            self.join("charged", "step", 1)
        assert dict(self.store.queued()) == {}

    def test_an_unknown_account_or_key_has_no_ticket(self) -> None:
        with raises(KeyError):
            self.join("k", "unknown", 1)
        self.full_tree()
        for use in (self.store.renew, self.store.leave_queue):
            with raises(LedgerError):
                use("unknown")
            with raises(LedgerError):
                use("first")
        assert self.held() == {"first"}

    def test_a_lease_is_a_time_above_zero_and_a_wait_is_not_negative(self) -> None:
        for wrong in (0, -1, float("nan"), float("inf"), None, "1", True):
            with raises(InvalidValue):
                TicketRequest(lease_s=wrong)  # type: ignore[arg-type]
        for wrong in (-1, float("nan"), float("inf"), None, "1", True):
            with raises(InvalidValue):
                TicketRequest(max_wait_s=wrong)  # type: ignore[arg-type]
        for name in (None, 1, b"x"):
            with raises(InvalidValue):
                TicketRequest(name)  # type: ignore[arg-type]
        self.full_tree()
        with raises(InvalidValue):
            self.store.join_queue("k", "step", cost(1), None)  # type: ignore[arg-type]

    # Whatever makes room admits.

    def test_whatever_ends_a_hold_admits_the_next_call_in_the_same_act(self) -> None:
        for name, end in self.endings().items():
            if name == "leave_unresolved":
                continue
            self.store.open_account(name, Limits(cost_nanos=10))
            self.take(f"{name} first", name, cost(10))
            assert isinstance(self.join(f"{name} k", name, 4), Waiting)
            end(f"{name} first")
            assert f"{name} k" in self.held(), name
            assert self.store.balance(name).held_nanos == 4
            assert self.store.renew(f"{name} k") is None
            assert dict(self.store.queued()) == {}

    def test_a_hold_that_is_left_unresolved_refuses_the_calls_that_cannot_fit_beside_it(self) -> None:
        self.full_tree()
        self.join("k", "step", 5)
        self.store.leave_unresolved("first")
        stop = self.store.renew("k")
        assert isinstance(stop, Stop)
        assert not stop.momentary
        assert dict(self.store.queued()) == {}
        assert self.figures("run") == figures(unresolved_nanos=10, attempts=1)

    def test_a_hold_that_is_left_unresolved_admits_a_call_that_fits_beside_it(self) -> None:
        self.open_tree(Limits(cost_nanos=10))
        self.take("first", ask=cost(4))
        self.take("second", ask=cost(6))
        assert isinstance(self.join("k", "step", 6), Waiting)
        self.store.leave_unresolved("first")
        assert isinstance(self.store.renew("k"), Waiting)
        self.store.release("second")
        assert self.store.renew("k") is None

    def test_a_bill_that_arrives_late_admits_the_next_call(self) -> None:
        self.open_tree(Limits(cost_nanos=10))
        self.take("first", ask=cost(5))
        self.take("second", ask=cost(5))
        self.store.leave_unresolved("first")
        assert isinstance(self.join("k", "step", 4), Waiting)
        self.store.settle("first", cost(1))
        assert self.store.renew("k") is None

    def test_a_grant_admits_the_next_call_at_any_level(self) -> None:
        self.full_tree()
        assert isinstance(self.join("k", "step", 5), Waiting)
        self.store.grant("run", Limits(cost_nanos=15))
        assert self.held() == {"first", "k"}
        assert self.store.renew("k") is None

    def test_a_charge_refuses_the_calls_that_cannot_fit_any_more(self) -> None:
        self.full_tree()
        self.join("k", "step", 5)
        self.store.charge("other", "graph", cost(6))
        assert isinstance(self.store.renew("k"), Stop)

    def test_an_account_that_is_put_under_another_waits_for_room_there(self) -> None:
        self.store.open_account("run", Limits(cost_nanos=10))
        self.take("first", "run", cost(10))
        self.join("k", "run", 5)
        self.store.open_account("day", Limits(cost_nanos=20))
        self.take("other", "day", cost(16))
        self.store.put_under("run", "day")
        self.store.settle("first", cost(0))
        assert isinstance(self.store.renew("k"), Waiting), "there is no room above"
        self.store.release("other")
        assert self.store.renew("k") is None
        assert self.store.balance("day").held_nanos == 5

    def test_a_call_of_another_tree_is_admitted_and_removed_by_its_own(self) -> None:
        self.full_tree()
        self.store.open_account("elsewhere", Limits(cost_nanos=10))
        self.take("there", "elsewhere", cost(10))
        self.join("k", "step", 5)
        assert isinstance(self.join("k2", "elsewhere", 5), Waiting)
        self.store.settle("first", cost(0))
        assert self.held() == {"k", "there"}
        assert isinstance(self.store.renew("k2"), Waiting)

    def test_all_levels_are_taken_or_none(self) -> None:
        self.open_tree(Limits(cost_nanos=10))
        self.store.open_account("narrow", Limits(cost_nanos=5), parent="run")
        self.take("narrow first", "narrow", cost(5))
        self.take("run first", "run", cost(5))
        assert isinstance(self.join("k", "narrow", 5), Waiting)
        self.store.release("run first")
        assert isinstance(self.store.renew("k"), Waiting)
        assert self.store.balance("run").held_nanos == 5
        self.store.release("narrow first")
        assert self.store.renew("k") is None
        assert (self.store.balance("narrow").held_nanos, self.store.balance("run").held_nanos) == (5, 5)

    def test_calls_are_admitted_in_the_order_they_came(self) -> None:
        self.full_tree()
        for key in ("a", "b", "c"):
            assert isinstance(self.join(key, "step", 10), Waiting)
        order = []
        for _ in range(3):
            (now,) = self.held()
            order.append(now)
            self.store.settle(now, cost(0))
        assert order == ["first", "a", "b"]
        assert self.held() == {"c"}

    def test_owners_and_runs_take_turns(self) -> None:
        self.full_tree()
        ann, bob = (TicketRequest(run, run) for run in ("ann", "bob"))
        for number in range(3):
            self.store.join_queue(f"ann {number}", "step", cost(10), ann)
        self.store.join_queue("bob 0", "step", cost(10), bob)
        order = []
        for _ in range(5):
            (now,) = self.held()
            order.append(now)
            self.store.settle(now, cost(0))
        assert order == ["first", "ann 0", "bob 0", "ann 1", "ann 2"]

    def test_an_owner_has_as_many_turns_as_another_however_many_runs_it_has(self) -> None:
        self.full_tree()
        for number in range(3):
            self.store.join_queue(f"ann {number}", "step", cost(10), TicketRequest(f"run {number}", "ann"))
        self.store.join_queue("bob", "step", cost(10), TicketRequest("his run", "bob"))
        order = []
        for _ in range(5):
            (now,) = self.held()
            order.append(now)
            self.store.settle(now, cost(0))
        assert order == ["first", "ann 0", "bob", "ann 1", "ann 2"]

    def test_a_new_call_without_a_ticket_does_not_take_the_room_of_the_next_one(self) -> None:
        self.open_tree(Limits(cost_nanos=10))
        self.take("first", ask=cost(6))
        assert isinstance(self.join("k", "step", 8), Waiting)
        stop = self.refused("late", "step", cost(4))
        assert stop.momentary
        assert "calls that came before" in stop.message
        assert self.figures("run")["held_nanos"] == 6
        assert self.store.hold("small", "step", cost(1)) is None, "both fit beside what is spent"
        self.store.settle("first", cost(0))
        assert self.store.renew("k") is None

    def test_an_admitted_call_ends_as_every_other(self) -> None:
        for name, end in self.endings().items():
            self.store.open_account(name, Limits(cost_nanos=10))
            self.take(f"{name} first", name, cost(10))
            self.join(f"{name} k", name, 4)
            self.store.release(f"{name} first")
            assert self.store.renew(f"{name} k") is None
            end(f"{name} k")
            assert f"{name} k" not in self.held()
            with raises(LedgerError):
                self.store.renew(f"{name} k")

    def test_the_retry_that_was_drawn_for_a_call_admits_it_after_it_has_waited(self) -> None:
        self.open_tree(Limits(cost_nanos=10, retries=1))
        self.take("first", ask=cost(10))
        assert self.store.draw_retry("step", "k")
        assert isinstance(self.store.join_queue("k", "step", cost(5), TICKET, retry_drawn=True), Waiting)
        self.store.release("first")
        assert self.store.renew("k") is None

    # Leases and deadlines.

    def test_a_ticket_that_is_not_renewed_expires_and_the_next_call_passes_it(self) -> None:
        self.full_tree()
        self.join("dead", "step", 10)
        self.pass_time(LEASE_S / 2)
        self.join("alive", "step", 10)
        self.pass_time(LEASE_S / 2)
        self.store.settle("first", cost(0))
        assert self.store.renew("alive") is None
        assert self.held() == {"alive"}
        with raises(LedgerError):
            self.store.renew("dead")

    def test_a_ticket_that_is_renewed_keeps_its_place(self) -> None:
        self.full_tree()
        self.join("a", "step", 10)
        self.join("b", "step", 10)
        for _ in range(4):
            self.pass_time(LEASE_S * 0.7)
            assert isinstance(self.store.renew("a"), Waiting)
            assert isinstance(self.store.renew("b"), Waiting)
        self.store.release("first")
        assert self.held() == {"a"}

    def test_renewing_removes_dead_tickets_and_admits_without_any_other_change(self) -> None:
        self.open_tree(Limits(cost_nanos=10))
        self.take("first", ask=cost(6))
        self.join("dead", "step", 10)
        assert isinstance(self.join("alive", "step", 4), Waiting), "it came later"
        self.pass_time(LEASE_S * 0.6)
        assert isinstance(self.store.renew("alive"), Waiting)
        self.pass_time(LEASE_S * 0.6)
        assert self.store.renew("alive") is None
        assert list(self.store.queued()) == []

    def test_a_hold_that_was_admitted_and_not_picked_up_is_withdrawn_when_its_lease_ends(self) -> None:
        self.full_tree()
        self.join("dead", "step", 10)
        self.join("alive", "step", 10)
        self.store.release("first")
        assert self.held() == {"dead"}
        self.pass_time(LEASE_S * 0.6)
        assert isinstance(self.store.renew("alive"), Waiting)
        self.pass_time(LEASE_S * 0.6)
        assert self.store.renew("alive") is None
        assert self.held() == {"alive"}
        assert self.store.balance("run").held_nanos == 10
        with raises(LedgerError):
            self.store.renew("dead")
        assert isinstance(self.join("dead", "step", 10), Waiting), "its call did not run, so it may come again"

    def test_a_hold_that_was_picked_up_stays_although_its_process_says_no_more(self) -> None:
        self.full_tree()
        self.join("k", "step", 10)
        self.join("next", "step", 10)
        self.store.settle("first", cost(0))
        assert self.store.renew("k") is None
        self.pass_time(LEASE_S * 0.6)
        assert isinstance(self.store.renew("next"), Waiting)
        self.pass_time(LEASE_S * 0.6)
        assert isinstance(self.store.renew("next"), Waiting)
        assert self.held() == {"k"}

    def test_a_ticket_expires_at_its_deadline_however_often_it_is_renewed(self) -> None:
        self.full_tree()
        short = replace(TICKET, max_wait_s=LEASE_S * 1.5)
        assert isinstance(self.store.join_queue("k", "step", cost(5), short), Waiting)
        self.pass_time(LEASE_S * 0.8)
        assert isinstance(self.store.renew("k"), Waiting)
        self.pass_time(LEASE_S * 0.8)
        with raises(LedgerError):
            self.store.renew("k")
        assert dict(self.store.queued()) == {}

    # Leaving.

    def test_a_call_that_leaves_the_queue_leaves_nothing_behind(self) -> None:
        self.full_tree()
        before = self.figures("run")
        self.join("k", "step", 5)
        self.store.leave_queue("k")
        assert dict(self.store.queued()) == {}
        assert self.figures("run") == before
        with raises(LedgerError):
            self.store.leave_queue("k")
        self.store.release("first")
        assert self.held() == set()

    def test_a_call_that_leaves_after_it_was_admitted_gives_its_hold_to_the_next(self) -> None:
        self.full_tree()
        self.join("k", "step", 10)
        self.join("next", "step", 10)
        self.store.release("first")
        self.store.leave_queue("k")
        assert self.held() == {"next"}
        assert self.store.renew("next") is None
        assert self.store.balance("run").held_nanos == 10

    def test_a_call_that_leaves_makes_way_for_those_behind_it(self) -> None:
        self.open_tree(Limits(cost_nanos=10))
        self.take("first", ask=cost(6))
        self.join("head", "step", 10)
        assert isinstance(self.join("small", "step", 4), Waiting)
        self.store.leave_queue("head")
        assert self.store.renew("small") is None

    def test_a_key_that_left_may_join_again_and_another_call_may_have_it(self) -> None:
        self.full_tree()
        self.join("k", "step", 5)
        self.store.leave_queue("k")
        assert isinstance(self.join("k", "graph", 7), Waiting)
        self.store.release("first")
        assert self.store.renew("k") is None
        assert self.store.balance("graph").held_nanos == 7

    # Waking.

    def test_a_call_is_woken_when_its_answer_changes_and_no_more_after_that(self) -> None:
        self.full_tree()
        woken: list[str] = []
        for key in ("k", "next"):
            self.join(key, "step", 10)
        stop_waking = self.store.on_change("k", lambda: woken.append("k"))
        self.store.on_change("next", lambda: woken.append("next"))
        self.store.release("first")
        self.wait_until(lambda: "k" in woken)
        assert self.store.renew("k") is None
        stop_waking()
        stop_waking()
        before = woken.count("k")
        self.store.release("k")
        self.wait_until(lambda: "next" in woken)
        assert woken.count("k") == before

    def test_a_store_says_how_often_to_look(self) -> None:
        assert 0 < self.store.poll_s <= LEASE_S / 2

    # Holds that cannot come free.

    def test_a_call_that_only_its_own_caller_keeps_out_is_refused_at_once(self) -> None:
        self.full_tree()
        stop = self.store.join_queue("inner", "step", cost(5), TICKET, under="first")
        assert isinstance(stop, Stop)
        assert not stop.momentary
        assert "wait themselves" in stop.message
        assert dict(self.store.queued()) == {}

    def test_a_call_waits_while_another_one_under_the_same_caller_runs(self) -> None:
        self.open_tree(Limits(cost_nanos=10))
        self.take("outer", ask=cost(5))
        assert self.store.hold("running", "step", cost(5), under="outer") is None
        assert isinstance(self.store.join_queue("inner", "step", cost(5), TICKET, under="outer"), Waiting)
        self.store.settle("running", cost(0))
        assert self.store.renew("inner") is None

    def test_the_hold_of_a_caller_can_come_free_as_long_as_other_work_under_it_runs(self) -> None:
        self.open_tree(Limits(cost_nanos=10))
        self.take("outer", ask=cost(8))
        assert self.store.hold("running", "step", cost(2), under="outer") is None
        assert isinstance(self.store.join_queue("inner", "step", cost(5), TICKET, under="outer"), Waiting)
        self.store.settle("running", cost(0))
        stop = self.store.renew("inner")
        assert isinstance(stop, Stop)
        assert "wait themselves" in stop.message

    def test_of_two_calls_that_keep_each_other_out_the_newest_is_refused(self) -> None:
        self.open_tree(Limits(cost_nanos=10))
        self.take("a", ask=cost(5))
        self.take("b", ask=cost(5))
        assert isinstance(self.store.join_queue("a inner", "step", cost(5), TICKET, under="a"), Waiting)
        stop = self.store.join_queue("b inner", "step", cost(5), TICKET, under="b")
        assert isinstance(stop, Stop)
        assert "wait themselves" in stop.message
        assert list(self.store.queued()) == ["a inner"]
        self.store.settle("b", cost(0))
        assert self.store.renew("a inner") is None

    def test_a_call_is_refused_when_the_last_hold_that_could_come_free_is_settled_at_its_worst_case(self) -> None:
        self.open_tree(Limits(cost_nanos=10))
        self.take("outer", ask=cost(5))
        self.take("other", ask=cost(5))
        assert isinstance(self.store.join_queue("inner", "step", cost(3), TICKET, under="outer"), Waiting)
        self.store.settle("other", cost(5))
        stop = self.store.renew("inner")
        assert isinstance(stop, Stop)
        assert "wait themselves" in stop.message

    def test_holds_far_above_a_call_that_waits_do_not_count_either(self) -> None:
        self.open_tree(Limits(cost_nanos=10))
        self.take("outer", ask=cost(6))
        assert self.store.hold("middle", "step", cost(4), under="outer") is None
        stop = self.store.join_queue("inner", "step", cost(1), TICKET, under="middle")
        assert isinstance(stop, Stop)
        assert "wait themselves" in stop.message

    def test_a_call_that_waits_for_its_turn_does_not_hide_that_others_block_each_other(self) -> None:
        self.open_tree(Limits(cost_nanos=10))
        self.take("outer", ask=cost(3))
        assert isinstance(self.join("first", "step", 8), Waiting)
        assert isinstance(self.join("second", "step", 4), Waiting)  # it has room, and would take that of the first
        stop = self.store.join_queue("inner", "step", cost(8), TICKET, under="outer")
        assert isinstance(stop, Stop)
        assert "wait themselves" in stop.message
        assert list(self.store.queued()) == ["first", "second"]
        self.store.settle("outer", cost(0))
        assert self.store.renew("first") is None

    # Together.

    def test_an_account_that_a_call_waits_at_is_not_removed(self) -> None:
        self.open_tree(Limits(cost_nanos=10))
        self.store.open_account("leaf", NO_LIMITS, parent="graph")
        self.take("first", "graph", cost(10))
        self.join("k", "leaf", 5)
        assert self.store.forget(["leaf"]) == 0
        self.store.leave_queue("k")
        assert self.store.forget(["leaf"]) == 1

    def test_calls_that_wait_are_listed_by_key_prefix(self) -> None:
        self.full_tree()
        for key in ("r/1/b", "r/1/a", "r/10/a", "r%"):
            self.join(key, "step", 5)
        assert list(self.store.queued("r/1/")) == ["r/1/b", "r/1/a"]
        assert list(self.store.queued("r%")) == ["r%"]
        assert len(self.store.queued()) == 4

    def test_concurrent_calls_whose_worst_cases_do_not_fit_together_all_complete(self) -> None:
        """Each holds more than half of the budget and costs a tenth of its hold; none is refused, and no limit is
        exceeded.
        """
        worst, real, threads = 60, 6, max(2, self.threads // 4)
        self.store.open_account("run", Limits(cost_nanos=worst + real * threads * 2))
        over: list[int] = []

        def work(thread: int) -> int:
            done = 0
            for number in range(2):
                key, woken = f"{thread}:{number}", threading.Event()
                answer = self.join(key, "run", worst)
                stop_waking = self.store.on_change(key, woken.set)
                while isinstance(answer, Waiting) and isinstance(answer := self.store.renew(key), Waiting):
                    woken.wait(self.store.poll_s)
                    woken.clear()
                stop_waking()
                if answer is None:
                    now = self.store.balance("run")
                    if now.spent_nanos + now.held_nanos > now.limits.cost_nanos:
                        over.append(now.held_nanos)
                    self.store.settle(key, cost(real))
                    done += 1
            return done

        assert self.at_once(work, threads) == [2] * threads
        assert over == []
        assert self.store.balance("run").spent_nanos == real * threads * 2
        assert dict(self.store.queued()) == {}

    def full_tree(self) -> None:
        """Open three levels, and hold the run's whole budget."""
        self.open_tree(Limits(cost_nanos=10))
        self.take("first", ask=cost(10))

    def join(self, key: str, account: str, nanos: int) -> Stop | Waiting | None:
        return self.store.join_queue(key, account, cost(nanos), TICKET)

    def held(self) -> set[str]:
        return set(self.store.held())
