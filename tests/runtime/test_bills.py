"""Unresolved bills of a run: a person lists them, and resolves or releases each once."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime
from typing import Any

import pytest

from penstock import ExecutionContext, InvalidValue, Usage, WrapOptions, contain
from penstock.containment import UnresolvedBill
from penstock.containment.ledger import MemoryLedgerStore
from penstock.containment.limits import Budget
from penstock.runtime import run as run_module
from penstock.runtime.durable.shared import SharedBudget
from penstock.stores import LedgerError
from penstock.testing import ManualClock, check_history

pytestmark = pytest.mark.requirement("X-10")

HINT = WrapOptions(cost_estimate_hint=0.25)


def lost() -> str:
    raise ConnectionResetError("the peer has gone")


def lose(run: ExecutionContext, hint: float = 0.25, name: str = "ask") -> str:
    """Make a call whose connection is lost; return its id."""
    with pytest.raises(ConnectionResetError):
        run.llm(lost, cost_hint_usd=hint, name=name, model="fake-1")
    return run.unresolved()[-1].call_id


def test_a_run_without_unresolved_bills_lists_none() -> None:
    with contain(max_cost_usd=1) as run:
        run.llm(lambda: "fine", cost_hint_usd=0.25)
        assert run.unresolved() == []


def test_an_unresolved_bill_says_which_call_it_is_of_and_why_it_is_unknown() -> None:
    clock = ManualClock()
    with contain(max_cost_usd=1, clock=clock) as run:
        call_id = lose(run)
        at = datetime.fromtimestamp(clock.time_ns() / 1e9, UTC)
        (bill,) = run.unresolved()
    reason = "ConnectionResetError: the peer has gone"
    assert bill == UnresolvedBill(call_id, "ask", "fake-1", 0.25, 0, at, reason)
    assert call_id in {node.node_id for node in run.get_snapshot().nodes}


def test_bills_are_listed_oldest_first_from_every_context_of_the_run() -> None:
    with contain(max_cost_usd=1) as run:
        first = lose(run, name="first")
        with run.spawn_child("child") as child:
            second = lose(child, name="second")
            assert [bill.call_id for bill in child.unresolved()] == [first, second]
        assert [bill.name for bill in run.unresolved()] == ["first", "second"]


def test_resolving_a_bill_replaces_its_hold_by_what_it_cost() -> None:
    with contain(max_cost_usd=1) as run:
        call_id = lose(run)
        run.resolve(call_id, cost_usd="0.02", by="ann", input_tokens=100, output_tokens=20)
        assert run.unresolved() == []
        assert (run.balance.spent_usd, run.balance.unresolved_usd) == (0.02, 0.0)
        assert (run.balance.tokens_in, run.balance.tokens_out) == (100, 20)
    assert check_history(run.history(), ledger=run.balance) == []


def test_releasing_a_bill_gives_its_hold_back() -> None:
    with contain(max_cost_usd=1) as run:
        run.release(lose(run), by="ann")
        assert run.unresolved() == []
        assert (run.balance.spent_usd, run.balance.unresolved_usd) == (0.0, 0.0)
    assert check_history(run.history(), ledger=run.balance) == []


def test_a_bill_may_be_more_than_its_hold_and_is_counted() -> None:
    with contain(max_cost_usd=1) as run:
        run.resolve(lose(run), cost_usd=1.5, by="ann")
        assert run.balance.spent_usd == 1.5
        with pytest.raises(Exception, match=r"\$1\.50 spent of the \$1\.00 of 'main'"):
            run.llm(lambda: "more", cost_hint_usd=0.01)


def test_a_halted_run_continues_after_its_bills_are_resolved() -> None:
    with contain(max_cost_usd="0.30") as run:
        call_id = lose(run)
        with pytest.raises(Exception, match=r"\$0\.25 unresolved of the \$0\.30"):
            run.llm(lambda: "fine", cost_hint_usd=0.25)
        run.resolve(call_id, cost_usd="0.01", by="ann")
        assert run.llm(lambda: "fine", cost_hint_usd=0.25) == "fine"


@pytest.mark.parametrize("how", ["resolve", "release"])
def test_who_resolved_a_bill_and_at_what_is_recorded(how: str) -> None:
    with contain(max_cost_usd=1) as run:
        call_id = lose(run)
        if how == "resolve":
            run.resolve(call_id, cost_usd="0.02", by="ann")
        else:
            run.release(call_id, by="ann")
        event = run.get_snapshot().events[-1]
        trace = run.history()[-1]
    assert event.event_type == f"bill_{how}d"
    cost = 0.02 if how == "resolve" else 0.0
    facts = {name: event.metadata[name] for name in ("node_id", "by", "cost_usd", "held_usd")}
    assert facts == {"node_id": call_id, "by": "ann", "cost_usd": cost, "held_usd": 0.25}
    at = " at $0.02" if how == "resolve" else ""
    assert event.reason == f"ann {how}d the bill of call {call_id}{at}; it held $0.25"
    assert (trace.kind, trace.reason) == ("safety", event.reason)  # type: ignore[attr-defined]


def test_a_bill_can_be_resolved_after_the_end_of_the_run() -> None:
    with contain(max_cost_usd=1) as run:
        first, second = lose(run), lose(run)
    run.resolve(first, cost_usd="0.02", by="ann")
    run.release(second, by="ann")
    assert (run.balance.spent_usd, run.balance.unresolved_usd) == (0.02, 0.0)
    assert [event.event_type for event in run.get_snapshot().events[-2:]] == ["bill_resolved", "bill_released"]


def test_an_unknown_id_is_refused() -> None:
    with contain() as run:
        fine = run.call_llm(lambda: "fine")
        for call_id in ("n999999", "", fine.call.node_id):
            expected = f"has no unresolved bill of call {call_id!r}; list them with unresolved\\(\\)"
            with pytest.raises(LedgerError, match=expected):
                run.resolve(call_id, cost_usd=0, by="ann")
            with pytest.raises(LedgerError, match=expected):
                run.release(call_id, by="ann")


def test_a_bill_is_resolved_once() -> None:
    with contain(max_cost_usd=1) as run:
        call_id = lose(run)
        run.resolve(call_id, cost_usd="0.02", by="ann")
        already = rf"call {call_id} is not unresolved any more: ann resolved the bill of call {call_id} at \$0\.02"
        with pytest.raises(LedgerError, match=already):
            run.resolve(call_id, cost_usd="0.03", by="bob")
        with pytest.raises(LedgerError, match=already):
            run.release(call_id, by="bob")
        assert run.balance.spent_usd == 0.02


def test_of_people_who_resolve_a_bill_at_once_one_does() -> None:
    with contain(max_cost_usd=1) as run:
        call_id = lose(run)
        start, outcomes = threading.Barrier(8), []

        def resolve(person: int) -> None:
            start.wait()
            try:
                run.resolve(call_id, cost_usd=f"0.0{person + 1}", by=f"p{person}")
                outcomes.append(person)
            except LedgerError:
                outcomes.append(None)

        threads = [threading.Thread(target=resolve, args=(person,)) for person in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = (person for person in outcomes if person is not None)
        assert run.balance.spent_usd == (winner + 1) / 100
        people = [event.metadata["by"] for event in run.get_snapshot().events if event.event_type == "bill_resolved"]
        assert people == [f"p{winner}"]


@pytest.mark.parametrize("cost", [-0.01, float("nan"), float("inf"), "a lot", None, True])
def test_an_invalid_amount_is_refused_and_changes_nothing(cost: Any) -> None:
    with contain(max_cost_usd=1) as run:
        call_id = lose(run)
        with pytest.raises(InvalidValue, match="cost_usd"):
            run.resolve(call_id, cost_usd=cost, by="ann")
        with pytest.raises(InvalidValue, match="input_tokens"):
            run.resolve(call_id, cost_usd=0, by="ann", input_tokens=-1)
        assert len(run.unresolved()) == 1


@pytest.mark.parametrize("by", ["", "  ", None, 7, "two\nlines", "x" * 201])
def test_a_resolution_needs_the_name_of_a_person(by: Any) -> None:
    with contain(max_cost_usd=1) as run:
        call_id = lose(run)
        with pytest.raises(InvalidValue, match="by must be"):
            run.resolve(call_id, cost_usd=0, by=by)
        with pytest.raises(InvalidValue, match="by must be"):
            run.release(call_id, by=by)
        assert len(run.unresolved()) == 1


def test_a_bill_that_became_known_is_not_listed() -> None:
    with contain(max_cost_usd=1) as run:
        first = run.call_llm(lost, HINT).call
        first.settle(cost_usd="0.01")
        assert run.unresolved() == []
        with pytest.raises(LedgerError, match="is not unresolved any more: its cost has become known"):
            run.release(first.node_id, by="ann")


@pytest.mark.parametrize("error", [None, ConnectionResetError("gone")])
def test_an_abandoned_call_that_ends_after_its_bill_was_resolved_changes_nothing(error: Exception | None) -> None:
    store = MemoryLedgerStore()
    store.open_account("team", Budget(max_cost_dollars=1).limits())
    run = ExecutionContext(shared_budget=SharedBudget(store, "team", prefix="r/1"))

    def late() -> dict[str, Any]:
        run.end()  # the run does not wait for this call
        (bill,) = run.unresolved()
        assert bill.reason == "aborted: the run ended while the call was running"
        run.resolve(bill.call_id, cost_usd="0.02", by="ann")
        if error is not None:
            raise error
        return {"usage": Usage.of(cost_usd=0.25)}

    run.call_llm(late, HINT)
    for balance in (run.balance, store.balance("team")):
        assert (balance.spent_usd, balance.unresolved_usd, balance.held_usd) == (0.02, 0.0, 0.0)


async def test_the_shared_budget_learns_of_a_resolution() -> None:
    store = MemoryLedgerStore()
    store.open_account("team", Budget(max_cost_dollars=1).limits())
    with ExecutionContext(shared_budget=SharedBudget(store, "team", prefix="r/1")) as run:
        for _ in range(2):
            await run.acall_llm(lost_async, HINT)
        assert store.balance("team").unresolved_usd == 0.5
        first, second = run.unresolved()
        run.resolve(first.call_id, cost_usd="0.02", by="ann", input_tokens=7)
        run.release(second.call_id, by="ann")
    balance = store.balance("team")
    assert (balance.spent_usd, balance.unresolved_usd, balance.tokens_in) == (0.02, 0.0, 7)


async def lost_async() -> str:
    await asyncio.sleep(0)
    raise ConnectionResetError("gone")


def test_a_run_keeps_a_bounded_number_of_bills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "MAX_BILLS", 2)
    with contain(max_cost_usd=1) as run:
        kept = [lose(run, 0.1), lose(run, 0.1)]
        with pytest.raises(ConnectionResetError):
            run.llm(lost, cost_hint_usd=0.1)
        assert [bill.call_id for bill in run.unresolved()] == kept
        assert run.balance.unresolved_usd == 0.3
        run.release(kept[0], by="ann")
        third = lose(run, 0.1)
        assert [bill.call_id for bill in run.unresolved()] == [kept[1], third]
