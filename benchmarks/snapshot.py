"""How long does a snapshot keep writers waiting?

Measured in two ways. From outside, for every contestant: eight threads write, and the slowest write while snapshots are
taken is compared with the slowest one without; threads also wait for each other and for the interpreter, which is what
the second figure shows. From inside, for Penstock alone: a lock that keeps time reports how long a snapshot holds it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks._peers import load
from benchmarks._report import Cell, Table, main
from benchmarks._rounds import Contestant, expect, measure, play, versions

if TYPE_CHECKING:
    from penstock import ExecutionContext

CALLS = 10_000
WRITERS = 8
SNAPSHOTS = 10
CHANGES = 10
PAUSE_S = 0.001
"""What a writer does between two writes: as good as nothing, but it lets the others in."""

Act = Callable[[], object]


class TimedLock:
    """A reentrant lock that knows, for each thread, the longest it waited for it and the longest it held it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._taken_ns = 0
        self.longest_wait_ns: dict[int, int] = {}
        self.longest_hold_ns: dict[int, int] = {}

    def acquire(self) -> bool:
        requested_ns = time.perf_counter_ns()
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._taken_ns = time.perf_counter_ns()
            _raise_to(self.longest_wait_ns, self._taken_ns - requested_ns)
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            _raise_to(self.longest_hold_ns, time.perf_counter_ns() - self._taken_ns)
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()

    def _is_owned(self) -> bool:
        return self._lock._is_owned()  # type: ignore[attr-defined, no-any-return]

    def forget(self) -> None:
        self.longest_wait_ns.clear()
        self.longest_hold_ns.clear()


def _raise_to(longest: dict[int, int], taken_ns: int) -> None:
    me = threading.get_ident()
    if taken_ns > longest.get(me, -1):
        longest[me] = taken_ns


# What is written to and looked at.


def penstock(calls: int, lock: TimedLock | None = None) -> tuple[ExecutionContext, Act]:
    """A run of that many calls, and how to write one more."""
    from penstock import WrapOptions, contain
    from penstock.stores import Ledger

    ledger = Ledger()
    if lock is not None:
        ledger.lock = lock  # type: ignore[assignment]
    run = contain(max_cost_usd=1e6, max_steps=10**9, ledger=ledger)
    options = WrapOptions(operation_name="step")

    def write() -> None:
        run.wrap_llm_call(int, options)

    for _ in range(calls):
        write()
    return run, write


def veronica_core(calls: int) -> tuple[Any, Act]:
    """A graph of that many nodes, and how to write one more."""
    graph = load("veronica_core.containment.execution_graph").ExecutionGraph(chain_id="c")
    root = graph.create_root(name="root")

    def write() -> None:
        node = graph.begin_node(parent_id=root, kind="llm", name="step", model="m")
        graph.mark_running(node)
        graph.mark_success(node, cost_usd=0.001, tokens_in=10, tokens_out=5)

    for _ in range(calls):
        write()
    return graph, write


# Measuring.


def snapshot_penstock(calls: int) -> dict[str, Any]:
    """All figures of Penstock; in a process of its own."""
    run, write = penstock(calls)
    expect("calls in a snapshot", len(run.graph.snapshot()["nodes"]) - 1, calls)
    lock = TimedLock()
    timed_run, timed_write = penstock(calls, lock)
    expect("changes", len(run.graph.changes_since(run.graph.seq)["nodes"]), 0)
    return {
        "graph_ms": _best_ms(run.graph.snapshot),
        "context_ms": _best_ms(run.get_snapshot),
        "changes_ms": _changes_ms(run, write),
        "held_ms": _held_ms(timed_run, lock),
        **_lock_times_beside_writers(timed_run, timed_write, lock),
        **_slowest_writes(run.graph.snapshot, write),
    }


def snapshot_veronica_core(calls: int) -> dict[str, Any]:
    """What can be seen of veronica-core from outside; in a process of its own."""
    graph, write = veronica_core(calls)
    expect("calls in a snapshot", len(graph.snapshot()["nodes"]) - 1, calls)
    return {"graph_ms": _best_ms(graph.snapshot), **_slowest_writes(graph.snapshot, write)}


def _best_ms(act: Act, times: int = 5) -> list[float]:
    return [_ms_of(act) for _ in range(times)]


def _ms_of(act: Act) -> float:
    started_ns = time.perf_counter_ns()
    act()
    return (time.perf_counter_ns() - started_ns) / 1e6


def _changes_ms(run: ExecutionContext, write: Act) -> list[float]:
    seq = run.graph.seq
    for _ in range(CHANGES):
        write()
    expect("changes", len(run.graph.changes_since(seq)["nodes"]), CHANGES)
    return _best_ms(lambda: run.graph.changes_since(seq), times=20)


def _held_ms(run: ExecutionContext, lock: TimedLock) -> list[float]:
    """The longest that the first snapshot, which has every call to count, held the lock in one go."""
    lock.forget()
    run.graph.snapshot()
    run.get_snapshot()
    return [lock.longest_hold_ns[threading.get_ident()] / 1e6]


def _lock_times_beside_writers(run: ExecutionContext, write: Act, lock: TimedLock) -> dict[str, list[float]]:
    """While others write: the longest that a snapshot held the lock in one go, and that a writer waited for it."""
    lock.forget()
    _slowest_write_ms(write, lambda: _take_snapshots(run.graph.snapshot))
    held_ns = lock.longest_hold_ns[threading.get_ident()]
    waited_ns = max(wait for thread, wait in lock.longest_wait_ns.items() if thread != threading.get_ident())
    return {"held_beside_ms": [held_ns / 1e6], "waited_ms": [waited_ns / 1e6]}


def _slowest_writes(snapshot: Act, write: Act) -> dict[str, Any]:
    """From outside: the slowest write while snapshots are taken, and for as long without."""
    started = time.perf_counter()
    beside = _slowest_write_ms(write, lambda: _take_snapshots(snapshot))
    taken_s = time.perf_counter() - started
    alone = _slowest_write_ms(write, lambda: time.sleep(taken_s))
    return {"write_beside_ms": [beside], "write_alone_ms": [alone]}


def _take_snapshots(snapshot: Act) -> None:
    for _ in range(SNAPSHOTS):
        snapshot()
        time.sleep(PAUSE_S)


@dataclass(slots=True)
class Writers:
    """Threads that write until they are stopped."""

    write: Act
    stop: threading.Event = field(default_factory=threading.Event)
    slowest_ms: list[float] = field(default_factory=list)

    def write_on(self) -> None:
        slowest = 0.0
        while not self.stop.is_set():
            slowest = max(slowest, _ms_of(self.write))
            time.sleep(PAUSE_S)
        self.slowest_ms.append(slowest)


def _slowest_write_ms(write: Act, meanwhile: Act) -> float:
    writers = Writers(write)
    threads = [threading.Thread(target=writers.write_on) for _ in range(WRITERS)]
    for thread in threads:
        thread.start()
    meanwhile()
    writers.stop.set()
    for thread in threads:
        thread.join()
    expect("writers that came to their end", len(writers.slowest_ms), WRITERS)
    return max(writers.slowest_ms)


# The question.

ROWS = (
    ("graph.snapshot()", "graph_ms"),
    ("get_snapshot() of the run", "context_ms"),
    (f"graph.changes_since(seq), {CHANGES} changes", "changes_ms"),
    ("a snapshot holds the lock in one go, alone, at most", "held_ms"),
    (f"a snapshot holds the lock in one go beside {WRITERS} writers, at most", "held_beside_ms"),
    (f"one of {WRITERS} writers waits for the lock, at most", "waited_ms"),
    (f"slowest write of {WRITERS} threads while snapshots are taken", "write_beside_ms"),
    (f"slowest write of {WRITERS} threads without snapshots", "write_alone_ms"),
)
AT_MOST = {"held_ms", "held_beside_ms", "waited_ms", "write_beside_ms", "write_alone_ms"}
"""Of these the worst round counts, of the others the best."""


def ask(quick: bool) -> list[Table]:
    """Snapshots of a run of many calls, and what they cost those who write."""
    calls, rounds = (2_000, 1) if quick else (CALLS, 5)
    ours, theirs = Contestant("penstock", "penstock"), Contestant("veronica-core", "veronica_core", "veronica-core")
    play(
        [ours, theirs],
        rounds,
        lambda each: measure(each, "benchmarks.snapshot", f"snapshot_{each.name}", calls=calls),
    )
    return [
        Table(
            question=f"How long does a snapshot of {calls:,} calls keep writers waiting?",
            measured=f"Wall ms in {rounds} shuffled rounds: the best of all for what is called, the worst of all for "
            f"what is “at most” or “slowest”; {SNAPSHOTS} snapshots while others write. A write is a whole contained "
            f"call here, and one node of the graph there.",
            columns=("", *(each.label for each in (ours, theirs))),
            rows=[(label, _cell(ours, figure), _cell(theirs, figure)) for label, figure in ROWS],
            versions=versions([theirs]),
            raw={each.label: each.results for each in (ours, theirs)},
        )
    ]


def _cell(contestant: Contestant, figure: str) -> Cell:
    if contestant.trouble:
        return contestant.trouble
    if figure not in contestant.results[0]:
        return "not visible"
    figures = contestant.figures(figure)
    return max(figures) if figure in AT_MOST else min(figures)


if __name__ == "__main__":
    main(ask)
