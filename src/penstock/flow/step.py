"""One step of a graph, and what is told of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from penstock.containment.limits import Budget
from penstock.policies import ErrorPolicy
from penstock.tracing.jsonable import jsonable

if TYPE_CHECKING:
    from penstock.flow.graph import Graph

InputFn = Callable[[Mapping[str, Any]], Any]
"""Makes a step's input from the results so far."""


class Step:
    """A node with its place in a graph. Made by `Graph.step` and `Graph.add_step`; `a >> b` lets b wait for a."""

    __slots__ = ("_graph", "before", "error_policy", "id", "input", "input_fn", "node", "node_id", "sub_budget")

    def __init__(
        self,
        graph: Graph,
        id: str,
        node: Any,
        node_id: str,
        input: Any,
        input_fn: InputFn | None,
        before: tuple[str, ...],
        error_policy: ErrorPolicy | None,
        sub_budget: Budget | None,
    ) -> None:
        self._graph = graph
        self.id = id
        self.node = node
        """What it runs; None if it refers to a node of the session."""
        self.node_id = node_id
        self.input = input
        self.input_fn = input_fn
        self.before = before
        self.error_policy = error_policy
        self.sub_budget = sub_budget

    @property
    def depends_on(self) -> list[str]:
        """The steps it waits for; to change that, use `>>` or `Graph.chain`."""
        return list(self.before)

    def __rshift__(self, after: Step | Iterable[Step]) -> Any:
        """Let `after` wait for this step; a list means each of them."""
        return Steps(self._graph, [self]) >> after

    def __rrshift__(self, before: Iterable[Step]) -> Step:
        """Let this step wait for each of a list."""
        Steps(self._graph, list(before)) >> self
        return self

    def __repr__(self) -> str:
        after = f" after {', '.join(self.before)}" if self.before else ""
        return f"<Step {self.id!r} of {self._graph.id!r}{after}>"


class Steps:
    """Several steps at once, as in `a >> [b, c] >> d`."""

    __slots__ = ("_graph", "steps")

    def __init__(self, graph: Graph, steps: list[Step]) -> None:
        self._graph = graph
        self.steps = steps

    def __rshift__(self, after: Step | Iterable[Step]) -> Any:
        targets = [after] if isinstance(after, Step) else list(after)
        for target in targets:
            for before in self.steps:
                self._graph._connect(before, target)
        return after if isinstance(after, Step) else Steps(self._graph, targets)


StepEventType = Literal["started", "progress", "completed", "error", "cancelled", "skipped"]


@dataclass(frozen=True, slots=True)
class StepEvent:
    """What was just seen of a step while its graph ran."""

    event_type: StepEventType
    graph_id: str
    step_id: str
    """With the steps of the outer graphs before it, if the graph is nested: `outer/inner`."""
    node_id: str
    run_id: str
    timestamp: datetime
    data: Any = None
    """The result, the piece, the error, or why it was skipped."""

    def to_dict(self) -> dict[str, Any]:
        """The event as JSON data."""
        return {
            "event_type": self.event_type,
            "graph_id": self.graph_id,
            "step_id": self.step_id,
            "node_id": self.node_id,
            "run_id": self.run_id,
            "timestamp": self.timestamp.isoformat(),
            "data": jsonable(self.data),
        }
