"""What does exporting a run cost the run, with a collector that is dead, slow or not there?

Model calls that take some milliseconds each, several at a time, as agents make them. Every contestant makes the same
calls; what is compared is the time the run takes, as a ratio to the run that exports nothing. The collector that is
slow accepts a connection and never answers; the one that is dead refuses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import statistics
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from benchmarks._report import Cell, Table, main
from benchmarks._rounds import Contestant, expect, measure, play, versions

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

PARALLEL = 8
WAIT_MS = 20
"""Faster than models answer: the shorter a call, the more an export shows."""
TIME_LIMIT_S = 120.0

CONTESTANTS: list[tuple[str, str, str]] = [
    ("no export", "", ""),
    ("export, spans go nowhere", "nowhere", ""),
    ("export, dead collector", "bounded", "dead"),
    ("export, slow collector", "bounded", "slow"),
    ("export, dead collector, BatchSpanProcessor", "batch", "dead"),
    ("export, slow collector, BatchSpanProcessor", "batch", "slow"),
]
"""Label, processor, collector."""


@contextlib.contextmanager
def collector(kind: str) -> Iterator[str]:
    """The address of a collector that is dead or slow."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if kind == "slow":
            listening.listen(64)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1/traces"


def provider_for(processor: str, endpoint: str) -> TracerProvider:
    """A provider with that processor in front of the collector."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from penstock.telemetry import otlp_provider

    if processor == "bounded":
        return otlp_provider(endpoint)
    provider = TracerProvider(shutdown_on_exit=False)
    if processor == "batch":
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return provider


async def make_calls(run: Any, calls: int, wait_ms: float) -> None:
    """`calls` model calls of that length, PARALLEL at a time."""

    async def answer() -> None:
        await asyncio.sleep(wait_ms / 1_000)
        run.report(input_tokens=100, output_tokens=20, cost_usd=0.001, model="claude-3-haiku")

    async def agent() -> None:
        for _ in range(calls // PARALLEL):
            await run.allm(answer, name="ask")

    async with asyncio.TaskGroup() as group:
        for _ in range(PARALLEL):
            group.create_task(agent())


def time_run(processor: str, kind: str, calls: int, reps: int, wait_ms: float) -> dict[str, Any]:
    """The time of each run, its CPU time on all threads, and how long the provider takes to shut down at the end."""
    from penstock import ExecutionContext
    from penstock.telemetry import export_to_otel

    logging.disable()
    wall_ms, cpu_us = [], []
    with collector(kind) as endpoint:
        provider = provider_for(processor, endpoint) if processor else None
        for _ in range(reps + 1):
            run = ExecutionContext(name="benchmark")
            began, cpu = time.perf_counter(), time.process_time()
            export = export_to_otel(run, provider) if provider is not None else None
            with run:
                asyncio.run(make_calls(run, calls, wait_ms))
            wall_ms.append((time.perf_counter() - began) * 1_000)
            expect("model calls", run.stats.model_call_count, calls // PARALLEL * PARALLEL)
            if export is not None:
                expect("everything read", export.drain(30.0), True)
            cpu_us.append((time.process_time() - cpu) * 1e6 / calls)
        began = time.perf_counter()
        if provider is not None:
            provider.shutdown()
        shutdown_s = time.perf_counter() - began
    return {"wall_ms": wall_ms[1:], "cpu_us": cpu_us[1:], "shutdown_s": [shutdown_s]}


def ask(quick: bool) -> list[Table]:
    """What exporting costs a run, and how long the end of the program waits for a collector."""
    reps, rounds = (2, 1) if quick else (5, 3)
    return [
        _compare(
            "What does exporting a run cost the run?",
            CONTESTANTS[:4] if quick else CONTESTANTS,
            400,
            reps,
            rounds,
            WAIT_MS,
        ),
        _compare("And if its calls take no time at all?", CONTESTANTS[:4], 4_000, reps, rounds, 0),
    ]


def _compare(
    question: str, chosen: list[tuple[str, str, str]], calls: int, reps: int, rounds: int, wait_ms: float
) -> Table:
    contestants = [
        Contestant(label, "time_run", None, {"processor": processor, "kind": kind}) for label, processor, kind in chosen
    ]

    def once(each: Contestant) -> None:
        about = {"calls": calls, "reps": reps, "wait_ms": wait_ms, **each.settings}
        measure(each, "benchmarks.telemetry", "time_run", TIME_LIMIT_S, **about)

    play(contestants, rounds, once)
    return Table(
        question=question,
        measured=f"{calls:,} model calls of {wait_ms:g} ms, {PARALLEL} at a time; medians over {rounds} shuffled "
        "rounds in fresh processes. The ratio is to the run that exports nothing; CPU is of all threads.",
        columns=("", "run ms", "ratio", "CPU µs/call", "shutdown s"),
        rows=[_row(each, contestants[0]) for each in contestants],
        versions=versions(contestants),
        raw={each.label: {name: each.figures(name) for name in ("wall_ms", "shutdown_s")} for each in contestants},
    )


def _row(each: Contestant, alone: Contestant) -> tuple[Cell, ...]:
    if each.trouble:
        return (each.label, each.trouble, None, None, None)
    wall, cpu = statistics.median(each.figures("wall_ms")), statistics.median(each.figures("cpu_us"))
    ratio = wall / statistics.median(alone.figures("wall_ms")) if alone.results else None
    return (each.label, wall, ratio, cpu, max(each.figures("shutdown_s")))


if __name__ == "__main__":
    main(ask)
