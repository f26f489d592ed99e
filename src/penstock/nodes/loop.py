"""`loop`: a graph inside the graph, run again on what it came to, until a condition holds; never more than so often."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from penstock.errors import PenstockError
from penstock.kernel.executor import ExecutionResult, ExecutorRegistry, Handle
from penstock.kernel.values import DataValue
from penstock.nodes.parts import condition, nested
from penstock.nodes.parts.condition import Condition
from penstock.nodes.parts.nested import GraphData
from penstock.nodes.parts.settings import BudgetData, Checked, Data, Finding, Settings, Text, Within
from penstock.nodes.parts.values import typed
from penstock.runtime.graphs.flow_context import FlowContext
from penstock.runtime.graphs.node_events import NodeEvent

MAX_ITERATIONS = 10_000
NAMES = ("input", "output", "iteration")
"""What the condition may speak of: what the loop was given, what the last round came to, and its number, from 1."""


class LoopNotDone(PenstockError):
    """A loop has run as often as it may, and its condition does not hold."""

    def __init__(self, node_id: str, iterations: int, until: str) -> None:
        self.iterations = iterations
        super().__init__(f"loop {node_id!r} ran {iterations} times, which is all it may, and {until!r} does not hold")


@dataclass(frozen=True, slots=True)
class LoopData(Data):
    """The graph of one round, how often it may run, and when it is done."""

    graph: GraphData
    max_iterations: Annotated[int, Within(1, MAX_ITERATIONS)]
    until: Text | None = None
    """In CEL, asked after each round; without it the graph runs `max_iterations` times."""
    at_limit: Literal["error", "output"] = "error"
    """What becomes of a loop that is not done by then: it fails, or gives what it has."""
    budget: BudgetData | None = None


class Loop(Checked[LoopData]):
    """Runs a graph round by round: each is given what the one before came to."""

    settings = Settings(LoopData)
    inputs = (Handle("input"),)
    outputs = (Handle("output"),)

    def look(self, data: LoopData, executors: ExecutorRegistry) -> Iterator[Finding]:
        """What keeps the graph inside from running, and whether the condition can be read."""
        yield from nested.findings(data.graph, executors)
        if data.until is not None and (wrong := condition.findings(data.until, NAMES)):
            yield ".until", wrong

    async def execute(
        self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext
    ) -> nested.Told:
        """What is told in each round, and what the last one came to."""
        read = self.settings.read(data)
        graph, place = await nested.plan_of(read.graph, context), nested.place_of(context, read.budget)
        until = None if read.until is None else Condition(read.until, NAMES)
        given = inputs["input"].value if "input" in inputs else context.execution.input
        output = typed(given)
        for iteration in range(1, read.max_iterations + 1):
            yield NodeEvent.progress("iteration", iteration)
            async with aclosing(nested.run(graph, output.value, context, place, number=iteration)) as everything:
                async for told in everything:
                    if isinstance(told, ExecutionResult):
                        output = nested.only(told)
                    else:
                        yield nested.inside(told, str(iteration))
            asked = {"input": given, "output": output.value, "iteration": iteration}
            if until is not None and until.holds(asked):
                break
        else:
            if until is not None and read.at_limit == "error":
                raise LoopNotDone(str(context.node_id), read.max_iterations, until.expression)
        yield ExecutionResult({"output": output})
