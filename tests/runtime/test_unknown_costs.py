"""Calls of unknown cost: None in results, "unknown" in every sum, and a loud report under a money limit."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from penstock import (
    Budget,
    ExecutionContext,
    Halted,
    InvalidValue,
    ModelCallTrace,
    Price,
    PriceBook,
    Usage,
    contain,
)
from penstock.containment.ledger import MemoryLedgerStore
from penstock.export import trace_mermaid, trace_tree
from penstock.runtime.durable.shared import SharedBudget


def unpriced(model: str = "mystery-1") -> dict[str, Any]:
    return {"model": model, "usage": {"input_tokens": 10, "output_tokens": 5}}


def book(**options: Any) -> PriceBook:
    return PriceBook(registered={"cheap": Price(0, 1_000)}, use_genai_prices=False, **options)


def priced() -> dict[str, Any]:
    return {"model": "cheap", "usage": {"input_tokens": 0, "output_tokens": 120}}


def test_the_cost_of_a_call_that_is_unknown_is_none() -> None:
    with contain(prices=book()) as run:
        outcome = run.call_llm(unpriced)
        assert outcome.call.cost_usd is None
        outcome.call.settle(cost_usd="0.25")
        assert outcome.call.cost_usd == 0.25
        assert run.call_llm(priced).call.cost_usd == 0.12
        assert run.call_tool(lambda: "free").call.cost_usd == 0


def test_every_view_of_a_run_says_which_costs_are_unknown() -> None:
    with contain(prices=book()) as run:
        run.llm(unpriced, name="one")
        run.llm(unpriced, name="other")
        run.llm(priced, name="known")
        one, _, known = run.get_snapshot().nodes
        assert (one.cost_unknown, known.cost_unknown) == (True, False)
        assert (run.stats.total_cost, run.stats.unknown_costs) == (0.12, 2)
        ended = [event for event in run.history() if isinstance(event, ModelCallTrace)]
        assert [event.cost_unknown for event in ended] == [True, True, False]
        whole = run.graph.snapshot()
        _, *calls = whole["nodes"].values()
        assert [node["metadata"].get("cost_unknown") for node in calls] == [True, True, None]
        assert whole["aggregates"]["unknown_costs"] == 2
        lines = run.explain().splitlines()
        assert lines[0].startswith("… main  at least $0.12, 2 calls unknown")
        assert "✓ one  llm mystery-1  cost unknown  10→5 tokens" in lines[1]
        assert lines[-1].startswith("cost at least $0.12, 2 calls unknown · ")
        text = trace_tree(run)
        assert text.count("cost: unknown") == 2
        assert 'TotalCost: "at least $0.12, 2 calls unknown"' in text
        assert trace_mermaid(run).count("cost unknown") == 2


def test_a_run_of_which_no_cost_is_known_does_not_say_zero() -> None:
    with contain(max_cost_usd=1, prices=book()) as run:
        run.llm(unpriced)
        first, last = run.explain().splitlines()[0], run.explain().splitlines()[-1]
    assert first.startswith("… main  unknown (1 call)")
    assert last.startswith("cost unknown (1 call) of $1.00 · ")


def test_a_cost_that_becomes_known_is_not_unknown_any_more() -> None:
    with contain(prices=book()) as run:
        run.call_llm(unpriced).call.settle(cost_usd="0.25")
        (node,) = run.get_snapshot().nodes
        assert (node.cost_usd, node.cost_unknown) == (0.25, False)
        assert (run.stats.total_cost, run.stats.unknown_costs) == (0.25, 0)
        assert "unknown" not in run.explain()
        assert "unknown_costs" not in run.graph.snapshot()["aggregates"]


def test_a_call_that_ran_elsewhere_may_have_an_unknown_cost() -> None:
    with contain() as run:
        run.record_event(ModelCallTrace(name="elsewhere", model="mystery-1", cost_unknown=True))
        assert (run.stats.unknown_costs, run.get_snapshot().unknown_costs) == (1, 1)
        with pytest.raises(InvalidValue, match="cost_unknown must be True or False"):
            run.record_event(ModelCallTrace(name="elsewhere", cost_unknown=1))  # type: ignore[arg-type]


def test_under_a_money_limit_a_model_without_a_price_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    prices = book()
    with caplog.at_level(logging.WARNING, "penstock.prices"):
        for _ in range(2):
            with contain(max_cost_usd=1, prices=prices) as run:
                for model in ("mystery-1", "mystery-2", "mystery-1"):
                    run.llm(unpriced, model)
                run.llm(priced)
                reports = [event for event in run.get_snapshot().events if event.event_type == "price_unknown"]
                traces = [event for event in run.history() if event.kind == "safety"]
            assert [event.metadata["model"] for event in reports] == ["mystery-1", "mystery-2"]
            assert [event.decision for event in reports] == ["ALLOW", "ALLOW"]
            assert len(traces) == 2
    expected = (
        "model 'mystery-1' has no known price, so its calls are not limited by cost: register a price for it "
        "(PriceBook.register, --prices), or refuse such calls (PriceBook(unknown='refuse'), --unknown-prices refuse)"
    )
    assert reports[0].reason == expected
    assert [record.message for record in caplog.records] == [expected, expected.replace("mystery-1", "mystery-2")]


def test_a_failed_call_of_a_model_without_a_price_is_reported_too() -> None:
    def lost() -> None:
        raise ConnectionResetError("gone")

    with contain(max_cost_usd=1, prices=book()) as run:
        with pytest.raises(ConnectionResetError):
            run.llm(lost, model="mystery-1")
        (event,) = run.get_snapshot().events
    assert (event.event_type, event.metadata["model"]) == ("price_unknown", "mystery-1")


@pytest.mark.parametrize(
    "limits",
    [
        {"prices": book()},  # no money limit
        {"prices": book(unknown="assume", assumed=Price(0, 1)), "max_cost_usd": 1},
    ],
)
def test_without_a_money_limit_or_with_another_policy_there_is_no_report(
    limits: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "penstock.prices"), contain(**limits) as run:
        run.llm(unpriced)
        assert run.get_snapshot().events == []
    assert caplog.records == []


def test_a_book_that_refuses_reports_a_model_that_only_the_answer_names() -> None:
    with contain(max_cost_usd=1, prices=book(unknown="refuse")) as run:
        run.llm(unpriced)
        (event,) = run.get_snapshot().events
        assert event.reason.endswith("or name the model in the call, so that it is refused")
        with pytest.raises(Halted, match="no price is known for model 'mystery-1'"):
            run.llm(unpriced, model="mystery-1")


def test_a_limit_of_a_child_or_of_a_store_is_a_money_limit() -> None:
    with contain(prices=book()) as run:
        run.llm(unpriced)
        with run.spawn_child("child", budget=Budget(max_cost_dollars=1)) as child:
            child.llm(unpriced)
        assert len(run.get_snapshot().events) == 1
    store = MemoryLedgerStore()
    store.open_account("team", Budget(max_cost_dollars=1).limits())
    with ExecutionContext(prices=book(), shared_budget=SharedBudget(store, "team", prefix="r/1")) as run:
        run.llm(unpriced)
        assert len(run.get_snapshot().events) == 1


def test_a_call_without_usage_of_a_priced_model_is_not_reported() -> None:
    with contain(max_cost_usd=1, prices=book()) as run:
        run.llm(object, model="cheap")
        assert run.get_snapshot().unknown_costs == 1
        assert run.get_snapshot().events == []


def test_a_cost_that_a_function_reports_is_known() -> None:
    with contain(max_cost_usd=1, prices=book()) as run:
        run.llm(lambda: Usage.of(cost_usd="0.1", model="mystery-1"))
        assert (run.stats.unknown_costs, run.get_snapshot().events) == (0, [])
