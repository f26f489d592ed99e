"""The history checker: every kind of impossible history is named, and a possible one is not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.testing import FakeProvider, Violation, check_history


@dataclass(frozen=True)
class Event:
    kind: str
    node_id: str = ""
    parent_id: str | None = None
    status: str = ""
    cost_nanos: int = 0
    stop_reason: str | None = None
    abandoned: bool = False
    seq: int = 0


def history(*events: Event) -> list[Event]:
    """Number the events 1, 2, 3, … as a run would."""
    return [replace(event, seq=seq) for seq, event in enumerate(events, start=1)]


def start(node: str, parent: str | None = None) -> Event:
    return Event("call_started", node, parent)


def end(node: str, status: str = "success", **fields: Any) -> Event:
    return Event("call_ended", node, status=status, **fields)


def settled(node: str) -> Event:
    return Event("call_settled", node)


RUN, OTHER, DONE = Event("run_started"), Event("custom"), Event("run_ended")
GOOD = history(RUN, start("a"), start("b", "a"), OTHER, end("b"), end("a"), settled("b"), DONE)

IMPOSSIBLE: dict[str, tuple[list[Event], str]] = {
    "no end of the run": (history(RUN, start("a"), end("a")), "run: run_ended was recorded 0 times, not once"),
    "two ends of the run": (history(RUN, DONE, DONE), "run: run_ended was recorded 2 times, not once"),
    "nothing at all": ([], "run: run_ended was recorded 0 times, not once"),
    "the run starts late": (
        history(start("a"), RUN, end("a"), DONE),
        "run: run_started is event 2 of the run (seq 2), not the first",
    ),
    "something after the end": (
        history(RUN, start("a"), end("a"), DONE, settled("a")),
        "run: call_settled (seq 5) follows run_ended",
    ),
    "a gap": ([replace(RUN, seq=1), replace(DONE, seq=3)], "seq: run_ended has seq 3 after run_started with seq 1"),
    "a repeated seq": (
        [replace(RUN, seq=1), replace(DONE, seq=1)],
        "seq: run_ended has seq 1 after run_started with seq 1",
    ),
    "a call without an end": (
        history(RUN, start("a"), DONE),
        "lifecycle: call a started and has 0 ends, not one",
    ),
    "a call with two ends": (
        history(RUN, start("a"), end("a"), end("a", "halt"), DONE),
        "lifecycle: call a started and has 2 ends, not one",
    ),
    "a call that starts twice": (
        history(RUN, start("a"), start("a"), end("a"), DONE),
        "lifecycle: call a started 2 times",
    ),
    "an end before the start": (
        history(RUN, end("a"), start("a"), DONE),
        "lifecycle: call a ended before it started",
    ),
    "an end without a start": (history(RUN, end("a"), DONE), "lifecycle: call a ended and never started"),
    "an end that is none": (
        history(RUN, start("a"), end("a", "running"), DONE),
        "lifecycle: call a ended as 'running', which is no end",
    ),
    "an unknown parent": (
        history(RUN, start("a", "ghost"), end("a"), DONE),
        "tree: call a has parent ghost, which never started",
    ),
    "a child before its parent": (
        history(RUN, start("b", "a"), start("a"), end("b"), end("a"), DONE),
        "tree: call b started before its parent a",
    ),
    "a call that is its own parent": (
        history(RUN, start("a", "a"), end("a"), DONE),
        "tree: call a started before its parent a",
    ),
    "a child that outlives its parent": (
        history(RUN, start("a"), start("b", "a"), end("a"), end("b"), DONE),
        "tree: call b ended after its parent a",
    ),
    "a child of the dead": (
        history(RUN, start("a"), end("a"), start("b", "a"), end("b", abandoned=True), DONE),
        "tree: call b started after its parent a had ended",
    ),
    "a negative cost": (
        history(RUN, start("a"), end("a", cost_nanos=-5), DONE),
        "money: call a cost -5 nano-dollars",
    ),
    "a bill before the end": (
        history(RUN, start("a"), settled("a"), end("a"), DONE),
        "money: call a was settled (seq 3) before it ended",
    ),
    "a bill for nothing": (
        history(RUN, settled("a"), DONE),
        "money: call a was settled (seq 2) before it ended",
    ),
}


def as_sentences(violations: list[Violation]) -> list[str]:
    return [str(violation) for violation in violations]


def test_a_possible_history_has_no_violation() -> None:
    assert check_history(GOOD, effects=["a", "b"]) == []


def test_a_history_may_be_watched_from_a_later_seq_on() -> None:
    assert check_history([replace(RUN, seq=41), replace(DONE, seq=42)]) == []


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_an_impossible_history_is_named(case: str) -> None:
    events, sentence = IMPOSSIBLE[case]
    assert as_sentences(check_history(events)) == [sentence]


def test_an_abandoned_child_may_end_after_its_parent() -> None:
    events = history(RUN, start("a"), start("b", "a"), end("a"), end("b", "halt", abandoned=True), DONE)
    assert check_history(events) == []


def test_events_need_no_class_of_ours() -> None:
    events = [
        SimpleNamespace(seq=0, kind="call_started", node_id="x", parent_id=None),
        SimpleNamespace(seq=1, kind="call_ended", node_id="x", parent_id=None, status="halt", cost_nanos=0),
        SimpleNamespace(seq=2, kind="run_ended"),
    ]
    assert check_history(events) == []
    assert as_sentences(check_history(events, effects=["x"])) == ["effects: call x was refused and ran all the same"]


@given(st.permutations(range(len(GOOD))))
def test_no_other_order_of_calls_and_run_passes_unnoticed(order: list[int]) -> None:
    events = [GOOD[at] for at in order]
    assert (check_history(events) == []) == (events == GOOD)


@given(st.sets(st.integers(0, len(GOOD) - 1), min_size=1))
def test_only_entries_before_the_first_call_or_after_the_last_can_be_missing(missing: set[int]) -> None:
    events = [event for at, event in enumerate(GOOD) if at not in missing]
    assert check_history(events) != [] or events in (GOOD[1:], GOOD[-1:])


@dataclass
class Ledger:
    spent_nanos: int = 0
    held_nanos: int = 0
    unresolved_nanos: int = 0


@pytest.mark.parametrize(
    ("ledger", "sentences"),
    [
        (Ledger(spent_nanos=1_050_000), []),
        (Ledger(spent_nanos=50_000, unresolved_nanos=1_000_000), []),
        (Ledger(spent_nanos=2_000_000), []),
        (Ledger(1_050_000, held_nanos=1), ["money: 1 nano-dollars are still held and nothing runs"]),
        (
            Ledger(1_000_000),
            [
                "money: the ledger counts 1000000 nano-dollars (1000000 spent, 0 unresolved), "
                "less than the invoice of 1050000"
            ],
        ),
        (
            Ledger(2_000_000, unresolved_nanos=1),
            [
                "money: the ledger counts 2000001 nano-dollars (2000000 spent, 1 unresolved), "
                "over the ceiling of 2000000"
            ],
        ),
    ],
)
def test_the_ledger_is_judged_by_the_invoice_and_the_ceiling(ledger: Ledger, sentences: list[str]) -> None:
    fake = FakeProvider()  # 100 tokens at $3 and 50 at $15 per million
    fake.complete()
    assert as_sentences(check_history(GOOD, invoice=fake.invoice, ledger=ledger, ceiling_nanos=2_000_000)) == sentences


def test_without_a_ledger_the_invoice_itself_must_keep_the_ceiling() -> None:
    fake = FakeProvider()
    fake.complete()
    assert check_history(GOOD, invoice=fake.invoice, ceiling_nanos=1_050_000) == []
    assert as_sentences(check_history(GOOD, invoice=fake.invoice, ceiling_nanos=1_049_999)) == [
        "money: the invoice is 1050000 nano-dollars, the ceiling 1049999"
    ]


def halted(**fields: Any) -> list[Event]:
    return history(RUN, start("a"), end("a", "halt", **fields), DONE)


@pytest.mark.parametrize("reason", ["budget_exceeded", "step_limit_exceeded", "circuit_open", None])
def test_a_refused_call_may_not_have_run(reason: str | None) -> None:
    assert check_history(halted(stop_reason=reason), effects=[]) == []
    violations = check_history(halted(stop_reason=reason), effects=["a"])
    assert as_sentences(violations) == ["effects: call a was refused and ran all the same"]


@pytest.mark.parametrize("reason", ["aborted", "timeout"])
def test_a_call_stopped_on_its_way_may_have_run(reason: str) -> None:
    assert check_history(halted(stop_reason=reason), effects=["a"]) == []


def test_a_halted_call_that_cost_something_did_run() -> None:
    assert check_history(halted(stop_reason="budget_exceeded", cost_nanos=5), effects=["a"]) == []


def test_a_call_that_an_inner_refusal_stopped_may_have_run() -> None:
    inner = end("b", "halt", stop_reason="budget_exceeded")
    outer = end("a", "halt", stop_reason="budget_exceeded")
    events = history(RUN, start("a"), start("b", "a"), inner, outer, DONE)
    assert check_history(events, effects=["a"]) == []
    assert as_sentences(check_history(events, effects=["a", "b"])) == [
        "effects: call b was refused and ran all the same"
    ]


def test_nothing_may_run_twice_or_unrecorded() -> None:
    assert as_sentences(check_history(GOOD, effects=["a", "b", "a", "ghost"])) == [
        "effects: call a ran 2 times",
        "effects: call ghost ran and was never recorded as started",
    ]


def test_several_violations_come_in_a_fixed_order() -> None:
    events = history(start("a"), RUN, start("b", "x"), DONE, DONE)
    first = check_history(events, ledger=Ledger(held_nanos=1), effects=["c"])
    assert first == check_history(events, ledger=Ledger(held_nanos=1), effects=["c"])
    assert [violation.rule for violation in first] == [
        "run",
        "run",
        "lifecycle",
        "lifecycle",
        "tree",
        "money",
        "effects",
    ]
