"""Does a call cost more in a long run, and what does a run keep of it?

The door's contestants in runs of growing length: time in one process, memory in another, because counting memory
slows a process down. To keep anything of a call takes memory that was not touched before, and gives the garbage
collector more to look at: the first row is what that costs by itself, and what grows beyond it is the runtime's.
"""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

from benchmarks import door
from benchmarks._report import Cell, Table, main
from benchmarks._rounds import Contestant, expect, measure, play, versions

SIZES = (100, 1_000, 10_000, 100_000)
TIME_LIMIT_S = 30.0
MEMORY_LIMIT_S = 120.0

RUNNERS: list[tuple[str, str, str | None, dict[str, object]]] = [
    ("bare: the call itself, and an object kept for each", "record_kept", None, {}),
    ("penstock", "penstock_sync", None, {}),
    ("penstock, max_kept_calls=1_000", "penstock_sync", None, {"max_kept_calls": 1_000}),
    ("veronica-core", "veronica_core", "veronica-core", {}),
]
"""Label, contestant of the door, peer, settings."""


def trace_memory(contestant: str, calls: int, **settings: Any) -> dict[str, Any]:
    """The most bytes per call that a run of that many calls took at once; in a process of its own."""
    door.time_calls(contestant, 100, 1, **settings)  # what is made once is made now
    timed = getattr(door, contestant)(calls, **settings)
    next(timed)
    gc.collect()
    tracemalloc.start()
    next(timed)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    expect("an end after the checks", next(timed, "ended"), "ended")
    return {"bytes": [peak / calls]}


def ask(quick: bool) -> list[Table]:
    """Time and memory per call, by the length of the run."""
    sizes, rounds = (SIZES[:3], 1) if quick else (SIZES, 5)
    times, memory = _by_size(sizes), _by_size(sizes)
    for size in sizes:
        _time_all([row[size] for row in times.values()], size, rounds)
        _trace_all([row[size] for row in memory.values()], size)
    return [
        _table(
            "Does a call cost more in a long run?",
            f"CPU µs per call, the minimum of {rounds} shuffled rounds, by the number of calls in one run; "
            f"a measurement that takes longer than {TIME_LIMIT_S:g} s is ended.",
            times,
            "cpu_us",
        ),
        _table(
            "What does a run keep of a call?",
            "Bytes per call, the most that was allocated at once, by the number of calls in one run.",
            memory,
            "bytes",
        ),
    ]


def _by_size(sizes: tuple[int, ...]) -> dict[str, dict[int, Contestant]]:
    return {
        label: {size: Contestant(f"{label}, {size:,} calls", name, peer, settings) for size in sizes}
        for label, name, peer, settings in RUNNERS
    }


def _time_all(contestants: list[Contestant], calls: int, rounds: int) -> None:
    reps = max(2, min(50, 20_000 // calls))
    play(contestants, rounds, lambda each: door.time_fresh(each, calls, reps, TIME_LIMIT_S))


def _trace_all(contestants: list[Contestant], calls: int) -> None:
    def once(each: Contestant) -> None:
        about = {"contestant": each.name, "calls": calls, **each.settings}
        measure(each, "benchmarks.growth", "trace_memory", MEMORY_LIMIT_S, **about)

    play(contestants, 1, once)


def _table(question: str, measured: str, rows: dict[str, dict[int, Contestant]], figure: str) -> Table:
    everybody = [each for row in rows.values() for each in row.values()]
    return Table(
        question=question,
        measured=measured,
        columns=("calls in one run", *(f"{size:,}" for size in next(iter(rows.values())))),
        rows=[(label, *(_cell(each, figure) for each in row.values())) for label, row in rows.items()],
        versions=versions(everybody),
        raw={each.label: each.figures(figure) for each in everybody},
    )


def _cell(contestant: Contestant, figure: str) -> Cell:
    return contestant.trouble or min(contestant.figures(figure))


if __name__ == "__main__":
    main(ask)
