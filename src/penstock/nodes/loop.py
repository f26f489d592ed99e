"""`loop`: run a nested graph repeatedly on its own output until a condition holds, up to a maximum."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from penstock.errors import PenstockError
from penstock.kernel.executor import DataValue, ExecutionResult, ExecutorRegistry, Handle, typed
from penstock.nodes.parts import condition, nested
from penstock.nodes.parts.condition import Condition
from penstock.nodes.parts.nested import GraphData
from penstock.runtime.graphs.graph_runtime import FlowContext
from penstock.runtime.graphs.node_execution import NodeEvent
from penstock.runtime.graphs.settings import Checked, Data, Finding, Settings, Text, Within

MAX_ITERATIONS = 10_000
NAMES = ("input", "output", "iteration")
"""Names in the condition: the loop's input, the output of the last iteration, and its number, from 1."""


class LoopNotDone(PenstockError):
    """A loop has reached its maximum number of iterations, and its condition does not hold."""

    def __init__(self, node_id: str, iterations: int, until: str) -> None:
        self.iterations = iterations
        super().__init__(
            f"loop {node_id!r} ran {iterations} times, the maximum (max_iterations), and {until!r} does not hold"
        )


@dataclass(frozen=True, slots=True)
class LoopData(Data):
    """The graph, its maximum number of iterations, and the condition to stop."""

    graph: GraphData
    max_iterations: Annotated[int, Within(1, MAX_ITERATIONS)]
    until: Text | None = None
    """CEL condition, evaluated after each iteration; without it the graph runs `max_iterations` times."""
    at_limit: Literal["error", "output"] = "error"
    """At `max_iterations` without the condition: fail, or output the last result."""


class Loop(Checked[LoopData]):
    """Runs a graph repeatedly: each iteration gets the output of the previous one."""

    settings = Settings(LoopData)
    inputs = (Handle("input"),)
    outputs = (Handle("output"),)

    def look(self, data: LoopData, executors: ExecutorRegistry) -> Iterator[Finding]:
        """Report problems of the nested graph and of the condition."""
        yield from nested.findings(data.graph, executors)
        if data.until is not None and (wrong := condition.findings(data.until, NAMES)):
            yield ".until", wrong

    def look_inside(self, data: Mapping[str, Any], executors: ExecutorRegistry) -> Iterable[Finding]:
        """Report problems of the nested graph."""
        return nested.findings_in(data, executors)

    async def execute(
        self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext
    ) -> nested.Events:
        """Yield the events of each iteration, and the result of the last one."""
        read = self.settings.read(data)
        graph = await nested.plan_of(read.graph, context)
        until = None if read.until is None else Condition(read.until, NAMES)
        given = inputs["input"].value if "input" in inputs else context.execution.input
        output = typed(given)
        for iteration in range(1, read.max_iterations + 1):
            yield NodeEvent.progress("iteration", iteration)
            async with aclosing(nested.run(graph, output.value, context, number=iteration)) as everything:
                async for event in everything:
                    if isinstance(event, ExecutionResult):
                        output = nested.only(event)
                    else:
                        yield nested.inside(event, str(iteration))
            values = {"input": given, "output": output.value, "iteration": iteration}
            if until is not None and until.holds(values):
                break
        else:
            if until is not None and read.at_limit == "error":
                raise LoopNotDone(str(context.node_id), read.max_iterations, until.expression)
        yield ExecutionResult({"output": output})
