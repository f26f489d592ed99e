"""What does a graph cost beside plain asyncio, and beside the peers?

The same graphs for everybody, each written as its users would write it: `benchmarks/_graphs` has a module for each.
Work that does nothing is counted in CPU time, work that sleeps in wall time. The first row is what asyncio itself
takes.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks._graphs.shapes import Layers
from benchmarks._report import Ask, Cell, Table, main
from benchmarks._rounds import Contestant, least_and_median, measure, play, versions

TIMING = "benchmarks._graphs.timing"
TIME_LIMIT_S = 60.0
ONCE_IS_ENOUGH_S = 15.0
"""Who takes longer for a measurement is measured in one round only."""
SLEEP_S = 0.01
SIZES = (100, 1_000, 10_000, 100_000)
QUICK_PEERS = {"burr", "hamilton", "pydantic_graph"}


@dataclass(frozen=True, slots=True)
class Effort:
    """How thoroughly is measured."""

    rounds: int
    enough_s: float
    """How long one process goes on measuring."""
    steps: int
    """Of the long chain, and of the graph that is only built."""
    runs: int
    """At once."""
    sizes: tuple[int, ...]
    peers: frozenset[str] | None = None
    """Those who take part, or None for all."""


THOROUGH = Effort(rounds=3, enough_s=1.0, steps=10_000, runs=10_000, sizes=SIZES)
QUICK = Effort(rounds=1, enough_s=0.3, steps=1_000, runs=1_000, sizes=SIZES[:3], peers=frozenset(QUICK_PEERS))


def floor(label: str = "asyncio") -> Contestant:
    return Contestant(label, "floor")


def ours(sync: bool = False) -> list[Contestant]:
    rows = [
        Contestant("penstock, every limit set", "ours", settings={"limits": True}),
        Contestant("penstock, nothing on", "ours", settings={"limits": False, "recorded": False}),
    ]
    by_hand = Contestant(
        "penstock, every limit but a deadline, sync steps", "ours", settings={"limits": True, "sync": True}
    )
    return [*rows, by_hand] if sync else rows


def peers(effort: Effort, *without: str) -> list[Contestant]:
    """Those who can express the shape."""
    everybody = [
        Contestant("Burr", "burr", "burr"),
        Contestant("Hamilton", "hamilton", "hamilton"),
        Contestant("pydantic-graph", "pydantic_graph", "pydantic-graph"),
        Contestant("Haystack", "haystack", "haystack"),
        Contestant("LangGraph", "langgraph", "langgraph"),
        Contestant("LlamaIndex Workflows", "llama_index", "llama-index-workflows"),
    ]
    names = effort.peers or {each.name for each in everybody}
    return [each for each in everybody if each.name in names and each.name not in without]


# One table after the other.


def sequential(effort: Effort) -> Table:
    return compare(
        Comparison(
            "What does a step cost? 100 steps, one after the other",
            "CPU µs per step",
            [floor("asyncio, plain awaits"), *ours(sync=True), *peers(effort)],
            "time_cpu",
            "cpu_us",
            {"shape": "chain", "size": 100},
        ),
        effort,
    )


def traced(effort: Effort) -> Table:
    read = Contestant("penstock, every limit set, the trace read", "ours", settings={"limits": True, "read": True})
    return compare(
        Comparison(
            "What does a traced step cost? 100 steps, every one recorded",
            "CPU µs per step",
            [floor("asyncio, a record per step"), *ours(sync=True), read, *peers(effort, "hamilton")],
            "time_traced",
            "cpu_us",
            {"size": 100},
        ),
        effort,
    )


def long_chain(effort: Effort) -> Table:
    return compare(
        Comparison(
            f"What does a step of a long run cost? {effort.steps:,} steps, one after the other",
            "CPU µs per step",
            # Hamilton goes down into itself for each node that another one needs, deeper than Python lets it.
            [floor("asyncio, plain awaits"), *ours(), *peers(effort, "hamilton")],
            "time_cpu",
            "cpu_us",
            {"shape": "chain", "size": effort.steps},
        ),
        effort,
    )


def fan_out(effort: Effort) -> Table:
    return compare(
        Comparison(
            "What does a fan-out cost? 1 step, then 1,000 at once, then a join; none of them waits",
            "CPU µs per step",
            _fanned(effort),
            "time_cpu",
            "cpu_us",
            {"shape": "fan", "size": 1_000},
        ),
        effort,
    )


def fan_out_sleeping(effort: Effort) -> Table:
    return compare(
        Comparison(
            "How long does a fan-out take? 1 step, then 1,000 at once that sleep 10 ms, then a join",
            "Wall ms of one run",
            _fanned(effort),
            "time_wall",
            "wall_ms",
            {"shape": "fan", "size": 1_000, "sleep_s": SLEEP_S},
        ),
        effort,
    )


def _fanned(effort: Effort) -> list[Contestant]:
    grouped = Contestant("asyncio, TaskGroup", "floor", settings={"group": True})
    spelled_out = Contestant("LangGraph, a node each", "langgraph", "langgraph", {"send": False})
    everybody = [floor("asyncio, gather"), grouped, *ours(), *peers(effort)]
    return everybody if effort.peers else [*everybody, spelled_out]


def layered(effort: Effort) -> Table:
    comparison = Comparison(
        "Does anybody wait for a layer? 10 layers of 100 steps, each needs 3 and sleeps 1 to 20 ms",
        "Wall ms of one run",
        [floor("asyncio, a task per step"), *ours(), *peers(effort, "burr")],
        "time_wall",
        "wall_ms",
        {"shape": "layers", "size": 100},
    )
    table = compare(comparison, effort)
    least = Layers.of(100).critical_path_s * 1e3
    table.rows.insert(0, ("the longest path: nothing can be faster", least, None, None, None))
    return table


def build(effort: Effort) -> Table:
    return compare(
        Comparison(
            f"What does building cost? A chain of {effort.steps:,} nodes, until it could be run",
            "CPU µs per node, for building, validating, and planning or compiling",
            [floor("asyncio, a list of functions"), ours()[0], *peers(effort)],
            "time_build",
            "cpu_us",
            {"size": effort.steps},
        ),
        effort,
    )


def many_runs(effort: Effort) -> Table:
    """Time, and in other processes memory, because counting it slows a process down."""
    weighed = [floor(), *ours(), *peers(effort)]
    _play(weighed, Effort(1, 0, 0, 0, ()), "weigh_many", {"size": 10, "runs": 1_000})
    comparison = Comparison(
        f"What do many runs at once take? {effort.runs:,} runs of 10 steps that sleep 10 ms",
        "Wall s until all have ended, and CPU s of the process; kB per run while 1,000 wait in their first step",
        [floor(), *ours(), *peers(effort)],
        "time_many",
        "wall_s",
        {"size": 10, "runs": effort.runs, "sleep_s": SLEEP_S},
    )
    table = compare(comparison, effort, reps=False)
    more = zip(_cells(comparison.everybody, "cpu_s"), _cells(weighed, "kb"), strict=True)
    rows: list[tuple[Cell, ...]] = [(*row, *cells) for row, cells in zip(table.rows, more, strict=True)]
    raw = {
        "time": {each.label: each.results for each in comparison.everybody},
        "memory": {each.label: each.results for each in weighed},
    }
    columns = (*table.columns, "min CPU s", "kB per waiting run")
    return Table(table.question, table.measured, columns, rows, table.versions, raw)


# What all these have in common.


@dataclass(frozen=True, slots=True)
class Comparison:
    """A question to everybody; the first of them is the floor."""

    question: str
    unit: str
    everybody: list[Contestant]
    function: str
    figure: str
    arguments: dict[str, object]


def compare(comparison: Comparison, effort: Effort, reps: bool = True) -> Table:
    arguments = {**comparison.arguments, "enough_s": effort.enough_s} if reps else comparison.arguments
    _play(comparison.everybody, effort, comparison.function, arguments)
    first, *others = comparison.everybody
    bare = _least([first], comparison.figure)
    best = _least([each for each in others if each.peer], comparison.figure)
    return Table(
        question=comparison.question,
        measured=f"{comparison.unit}; {effort.rounds} shuffled rounds in fresh processes, but only one for who takes "
        f"longer than {ONCE_IS_ENOUGH_S:g} s; a measurement is ended after {TIME_LIMIT_S:g} s. The ratios are of the "
        "minima.",
        columns=("", f"min {_unit(comparison)}", f"median {_unit(comparison)}", "× asyncio", "× best peer"),
        rows=[_row(each, comparison.figure, bare, best) for each in comparison.everybody],
        versions=versions(comparison.everybody),
        raw={each.label: each.figures(comparison.figure) for each in comparison.everybody},
    )


def _play(everybody: Sequence[Contestant], effort: Effort, function: str, arguments: dict[str, object]) -> None:
    slow: set[str] = set()

    def once(each: Contestant) -> None:
        if each.label in slow:
            return
        started = time.perf_counter()
        about = {"contestant": each.name, **arguments, **each.settings}
        measure(each, TIMING, function, TIME_LIMIT_S, **about)
        if time.perf_counter() - started > ONCE_IS_ENOUGH_S:
            slow.add(each.label)

    play(everybody, effort.rounds, once)


def _least(contestants: Sequence[Contestant], figure: str) -> float | None:
    return min((min(each.figures(figure)) for each in contestants if not each.trouble), default=None)


def _unit(comparison: Comparison) -> str:
    return {"cpu_us": "µs", "wall_ms": "ms", "wall_s": "s"}[comparison.figure]


def _row(contestant: Contestant, figure: str, bare: float | None, best: float | None) -> tuple[Cell, ...]:
    if contestant.trouble:
        return contestant.label, contestant.trouble, None, None, None
    lowest, median = least_and_median(contestant.figures(figure))
    return contestant.label, lowest, median, bare and lowest / bare, best and lowest / best


# Questions to Penstock alone.


def tracing(effort: Effort) -> Table:
    """Traced and untraced in turn in one process, because what is sought is less than what processes differ by."""
    rows = [
        Contestant("no limits, sync steps", "ours", settings={"limits": False, "sync": True}),
        Contestant("every limit set, async steps", "ours", settings={"limits": True}),
    ]
    pairs = 20 if effort.rounds == 1 else 200
    _play(rows, effort, "compare_tracing", {"size": 100, "times": 10, "pairs": pairs})
    return Table(
        question="What does tracing add? 100 steps, one after the other",
        measured=f"CPU µs per step, the average of 10 runs without a trace and of 10 runs with one, in turn, {pairs} "
        f"times in each of {effort.rounds} fresh processes: the least of each and what the one is more than the other, "
        "and the median of what the pairs differ by.",
        columns=("penstock", "untraced min µs", "traced min µs", "more, %", "median more, %"),
        rows=[_added(each) for each in rows],
        raw={each.label: each.results for each in rows},
    )


def _added(contestant: Contestant) -> tuple[Cell, ...]:
    if contestant.trouble:
        return contestant.label, contestant.trouble, None, None, None
    untraced_us, traced_us = contestant.figures("untraced_us"), contestant.figures("traced_us")
    pairs = [(more / less - 1) * 100 for less, more in zip(untraced_us, traced_us, strict=True)]
    least, least_traced = min(untraced_us), min(traced_us)
    more = (least_traced / least - 1) * 100
    return contestant.label, least, least_traced, f"{more:+.1f}", f"{statistics.median(pairs):+.1f}"


def growth(effort: Effort) -> Table:
    stages = {size: Contestant(f"stages, {size:,}", "ours") for size in effort.sizes}
    runners = {
        each.label: {
            size: Contestant(f"{each.label}, {size:,}", each.name, None, each.settings) for size in effort.sizes
        }
        for each in [floor("run: asyncio, plain awaits"), *_running(ours())]
    }
    for size in effort.sizes:
        _play([stages[size]], effort, "time_stages", {"size": size, "enough_s": effort.enough_s})
        about: dict[str, object] = {"shape": "chain", "size": size, "enough_s": effort.enough_s}
        _play([row[size] for row in runners.values()], effort, "time_cpu", about)
    return Table(
        question="Does a step cost more in a larger graph?",
        measured=f"CPU µs per node or step of a chain, the minimum of {effort.rounds} rounds in fresh processes, by "
        "its length.",
        columns=("nodes in one graph", *(f"{size:,}" for size in effort.sizes)),
        rows=[
            ("penstock: add_step", *_cells(stages.values(), "build_us")),
            ("penstock: validate and plan", *_cells(stages.values(), "plan_us")),
            *((label, *_cells(row.values(), "cpu_us")) for label, row in runners.items()),
        ],
        raw={each.label: each.results for row in (stages, *runners.values()) for each in row.values()},
    )


def _running(contestants: list[Contestant]) -> list[Contestant]:
    return [Contestant(f"run: {each.label}", each.name, each.peer, each.settings) for each in contestants]


def _cells(contestants: Iterable[Contestant], figure: str) -> list[Cell]:
    return [each.trouble or min(each.figures(figure)) for each in contestants]


Question = Callable[[Effort], Table]
QUESTIONS: tuple[Question, ...] = (
    sequential,
    traced,
    tracing,
    long_chain,
    growth,
    fan_out,
    fan_out_sleeping,
    layered,
    build,
    many_runs,
)


def _ask(question: Question, quick: bool) -> list[Table]:
    return [question(QUICK if quick else THOROUGH)]


ASKS: list[Ask] = [functools.partial(_ask, question) for question in QUESTIONS]
"""One by one, so that each table is shown when it is there."""


if __name__ == "__main__":
    main(*ASKS)
