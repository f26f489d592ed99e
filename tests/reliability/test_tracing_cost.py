"""What a trace adds to the graph that it watches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from penstock import ExecutionContext, ExecutionTrace, FunctionNode, Graph, Session
from penstock.testing import ManualClock
from tests.reliability.operations import operations

MAX_OVERHEAD = 0.05
PAIRS = 5
"""Measured in turn; the least of each counts, since whatever else happens meanwhile only adds to it."""


def traced() -> ExecutionTrace:
    return ExecutionTrace(graph_id="perf-test", start_time=datetime.now(UTC))


@pytest.mark.requirement("P-O2")
def test_a_trace_adds_less_than_5_percent_to_a_graph_of_100_steps() -> None:
    """In instructions of the interpreter, which a busy machine does not change; `make bench` has the time."""
    session = Session()
    graph = Graph("perf-test")
    for at in range(100):
        node = FunctionNode("add", lambda ctx: ctx.input + 1)
        graph.add_step(node, f"s{at}", None if at else 1, depends_on=[f"s{at - 1}"] if at else None)

    with asyncio.Runner() as runner:

        def executed(trace: Callable[[], ExecutionTrace | None]) -> int:
            async def execute() -> None:
                await graph.execute(ExecutionContext(session=session, trace=trace(), clock=ManualClock()))

            return operations(lambda: runner.run(execute()))

        executed(traced)  # what is made once is made now
        counted = [(executed(lambda: None), executed(traced)) for _ in range(PAIRS)]
    baseline, with_trace = (min(counts) for counts in zip(*counted, strict=True))
    overhead = with_trace / baseline - 1
    assert 0 < overhead < MAX_OVERHEAD, f"Tracing overhead {overhead:.1%} exceeds {MAX_OVERHEAD:.0%} limit"
