"""Sums keep themselves: by model, by tool, by child, by name; exact, and a parent is never behind its children."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from penstock import ExecutionContext
from penstock.tracing.execution_graph import ExecutionGraph
from penstock.tracing.lifecycle import CallKind, Status
from penstock.tracing.record import CallRecord, Source
from penstock.tracing.stats import ExecutionStats, Tallies

pytestmark = pytest.mark.requirement("T-3")

NANOS = 1_000_000_000


@pytest.fixture
def fast_switching() -> Iterator[None]:
    """Threads take turns far more often than usual."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


class Run:
    """A graph with a tree of contexts, written to the way the runtime does."""

    def __init__(self) -> None:
        self.main = Source("main")
        self.child = Source("child", self.main)
        self.grandchild = Source("grandchild", self.child)
        self.other = Source("other", self.main)
        self.graph = ExecutionGraph("run", source=self.main)
        self.graph.create_root("main")

    def call(
        self,
        source: Source,
        kind: CallKind = "llm",
        name: str = "ask",
        model: str | None = "large",
        cost: int = 0,
        tokens: tuple[int, int] = (0, 0),
        status: Status = "success",
    ) -> CallRecord:
        graph = self.graph
        with graph.lock:
            call = graph.begin(graph.root, kind, name, model, source, 0)
            graph.end(call, 0, status, cost, *tokens)
        return call

    def stats(self, source: Source | None = None) -> ExecutionStats:
        return self.graph.stats(source or self.main)


@pytest.fixture
def run() -> Run:
    return Run()


def own(stats: ExecutionStats) -> ExecutionStats:
    assert stats.own is not None
    return stats.own


def nanos(usd: float) -> int:
    return round(usd * NANOS)


def test_a_context_that_did_nothing_has_used_nothing(run: Run) -> None:
    assert run.stats() == ExecutionStats(own=ExecutionStats())
    assert run.stats(Source("stranger")) == ExecutionStats(own=ExecutionStats())


def test_model_calls_are_summed_by_model(run: Run) -> None:
    run.call(run.main, model="large", cost=50, tokens=(10, 1))
    run.call(run.main, model="large", cost=70, tokens=(20, 2))
    run.call(run.main, model="small", cost=3, tokens=(5, 5))
    run.call(run.main, model=None, cost=1, tokens=(1, 0))
    stats = run.stats()
    assert stats.model_call_count == 4
    assert stats.model_calls_by_model == {"large": 2, "small": 1, "unknown": 1}
    assert {model: nanos(usd) for model, usd in stats.cost_by_model.items()} == {"large": 120, "small": 3, "unknown": 1}
    assert stats.input_tokens_by_model == {"large": 30, "small": 5, "unknown": 1}
    assert stats.output_tokens_by_model == {"large": 3, "small": 5}
    assert (nanos(stats.total_cost), stats.total_input_tokens, stats.total_output_tokens) == (124, 36, 8)


def test_tool_calls_are_summed_by_name(run: Run) -> None:
    for name in ("search", "read", "search"):
        run.call(run.main, "tool", name, None, cost=7)
    stats = run.stats()
    assert stats.tool_call_count == 3
    assert stats.tool_calls_by_name == {"search": 2, "read": 1}
    assert {name: nanos(usd) for name, usd in stats.cost_by_name.items()} == {"search": 14, "read": 7}
    assert (stats.model_call_count, stats.cost_by_model) == (0, {})


def test_costs_by_name_are_of_every_kind(run: Run) -> None:
    for kind in ("llm", "tool", "system"):
        run.call(run.main, kind, "work", cost=2)
    assert {name: nanos(usd) for name, usd in run.stats().cost_by_name.items()} == {"work": 6}


def test_failed_and_halted_calls_are_counted_with_what_they_cost(run: Run) -> None:
    run.call(run.main, cost=5, tokens=(1, 1))
    run.call(run.main, cost=11, tokens=(2, 0), status="fail")
    run.call(run.main, cost=13, tokens=(0, 4), status="halt")
    stats = run.stats()
    assert (stats.failed_count, stats.halted_count, stats.model_call_count) == (1, 1, 3)
    assert (nanos(stats.total_cost), stats.total_input_tokens, stats.total_output_tokens) == (29, 3, 5)


def test_a_call_under_way_counts_when_it_ends(run: Run) -> None:
    node = run.graph.begin_node("n000001", "llm", "ask")
    assert run.stats().model_call_count == 0
    run.graph.mark_success(node, "0.5")
    assert (run.stats().model_call_count, run.stats().total_cost) == (1, 0.5)


def test_a_late_bill_counts_everywhere_and_the_call_does_not_count_twice(run: Run) -> None:
    call = run.call(run.grandchild, cost=1, tokens=(1, 1), status="halt")
    run.stats()
    with run.graph.lock:
        run.graph.settle_late(call, 0, 9, 5, 6)
    for source in (run.main, run.child, run.grandchild):
        stats = run.stats(source)
        assert (nanos(stats.total_cost), stats.total_input_tokens, stats.total_output_tokens) == (10, 6, 7)
        assert (stats.halted_count, stats.model_call_count) == (1, 1)
    assert {name: nanos(usd) for name, usd in run.stats().cost_by_child.items()} == {"child": 10}


# Contexts.


def test_a_call_counts_for_its_context_and_every_one_above_at_once(run: Run) -> None:
    run.call(run.grandchild, cost=10, tokens=(3, 2))
    for source in (run.grandchild, run.child, run.main):
        assert nanos(run.stats(source).total_cost) == 10
        assert run.stats(source).total_input_tokens == 3
    assert run.stats(run.other).total_cost == 0


def test_what_a_context_used_itself_stands_apart(run: Run) -> None:
    run.call(run.main, cost=1)
    run.call(run.child, cost=20)
    run.call(run.grandchild, cost=300)
    totals = [nanos(run.stats(source).total_cost) for source in (run.main, run.child, run.grandchild)]
    apart = [nanos(own(run.stats(source)).total_cost) for source in (run.main, run.child, run.grandchild)]
    assert (totals, apart) == ([321, 320, 300], [1, 20, 300])
    assert own(run.stats()).own is None


def test_costs_by_child_are_those_of_the_direct_children(run: Run) -> None:
    run.call(run.main, cost=1)
    run.call(run.child, cost=20)
    run.call(run.grandchild, cost=300)
    run.call(run.other, cost=4_000)
    by_child = {name: nanos(usd) for name, usd in run.stats().cost_by_child.items()}
    assert by_child == {"child": 320, "other": 4_000}
    assert {name: nanos(usd) for name, usd in run.stats(run.child).cost_by_child.items()} == {"grandchild": 300}
    assert run.stats(run.grandchild).cost_by_child == {}
    assert own(run.stats()).cost_by_child == {}


def test_stats_do_not_change_after_they_were_read(run: Run) -> None:
    run.call(run.child, "tool", "search", None, cost=5)
    before = run.stats()
    run.call(run.child, "tool", "search", None, cost=5)
    assert nanos(before.total_cost) == 5
    assert before.tool_calls_by_name == {"search": 1}
    assert before != run.stats()


def test_contexts_of_the_same_name_are_kept_apart(run: Run) -> None:
    twin = Source("child", run.main)
    run.call(run.child, cost=1)
    run.call(twin, cost=2)
    assert [nanos(run.stats(source).total_cost) for source in (run.child, twin)] == [1, 2]
    assert {name: nanos(usd) for name, usd in run.stats().cost_by_child.items()} == {"child": 3}


def test_what_carries_no_figures_is_passed_over() -> None:
    tallies = Tallies()
    tallies.absorb(["something else"], 1)
    assert tallies.of(Source("main")) == ExecutionStats(own=ExecutionStats())


# Threads.


@pytest.mark.usefixtures("fast_switching")
def test_sums_are_exact_while_threads_write_and_others_read(run: Run) -> None:
    writers, calls = 8, 2_000
    sources = [Source(f"worker {n}", run.child) for n in range(writers)]
    behind: list[tuple[int, int]] = []
    done = threading.Event()

    def write(source: Source) -> None:
        for _ in range(calls):
            run.call(source, cost=3, tokens=(2, 1))

    def read() -> None:
        while not done.is_set():
            below = sum(nanos(run.stats(source).total_cost) for source in sources)
            above = nanos(run.stats().total_cost)
            if above < below:
                behind.append((above, below))

    threads = [threading.Thread(target=write, args=(source,)) for source in sources]
    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads + readers:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    for thread in readers:
        thread.join()

    assert behind == [], "a parent's figures were behind its children's"
    stats = run.stats()
    assert nanos(stats.total_cost) == writers * calls * 3
    assert stats.model_call_count == writers * calls
    assert (stats.total_input_tokens, stats.total_output_tokens) == (writers * calls * 2, writers * calls)
    assert [run.stats(source).model_call_count for source in sources] == [calls] * writers


def test_a_parent_sees_what_a_running_child_has_used() -> None:
    with ExecutionContext() as ctx:
        child = ctx.spawn_child("research").spawn_child("reader")
        child.llm(lambda: "answer", cost_hint_usd="0.25", model="large")
        assert ctx.stats.total_cost == 0.25
        assert ctx.stats.cost_by_child == {"research": 0.25}
        assert own(ctx.stats).total_cost == 0
        assert ctx.stats.model_calls_by_model == {"large": 1}
