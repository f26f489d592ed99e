"""A run that takes up another at one node: what runs again, and what comes into that node.

The node is found by identity of its graph: a graph inside may have a node of the same name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.errors import InvalidValue
from penstock.hosting.records import RunRecord
from penstock.kernel.executor import ExecutorRegistry
from penstock.kernel.graph import GraphSpec
from penstock.kernel.values import DataValue
from penstock.nodes.parts.values import typed
from penstock.runtime.graphs.flow_context import FlowContext
from penstock.runtime.graphs.graph_plan import GraphPlan

TAKES_UP = ("fork", "replay")
"""The kinds of runs that go the way of another."""


def nodes_from(graph: GraphSpec, at: str) -> frozenset[str]:
    """The node `at` and all that come after it in flow."""
    _node(graph, at)
    found, todo = {at}, [at]
    while todo:
        one = todo.pop()
        after = {edge.target for edge in graph.edges if edge.source == one and edge.channel == "flow"} - found
        found |= after
        todo += after
    return frozenset(found)


def check_input(graph: GraphSpec, at: str, value: Any) -> None:
    """InvalidValue unless `value` can come into the node: where several edges arrive, it says what on each handle."""
    handles = _handles_into(graph, at)
    if len(handles) > 1 and not (isinstance(value, Mapping) and value.keys() <= handles):
        raise InvalidValue("input", value, f"an object with any of {', '.join(sorted(handles))}, which {at!r} takes")


def whole_input(graph: GraphSpec, at: str, value: Any, before: Mapping[str, Any]) -> Any:
    """What a fork at a node is given there with `value`, if those that it takes up were given `before`, by nodes.

    Where several edges arrive, handles that `value` does not name get what they had.
    """
    return {**before.get(at, {}), **value} if len(_handles_into(graph, at)) > 1 else value


def inputs_of(run: RunRecord) -> dict[str, Any]:
    """What a run was given for nodes of its graph, by their ids: by a fork, or by those that it takes up."""
    if run.origin.get("kind") not in TAKES_UP:
        return {}
    given = dict(run.origin.get("inputs", {}))
    if "input" in run.origin:
        given[str(run.origin["at"])] = run.origin["input"]
    return given


def plan_of(plan: GraphPlan, run: RunRecord) -> GraphPlan:
    """The graph of a run; that of a fork that has an input has executors that hand it to its node."""
    graph, executors = plan.graph, plan.executors
    for at, value in inputs_of(run).items():
        node_type = _node(graph, at)
        executors = _Replaced(executors, node_type, _Given(executors[node_type], graph, at, value))
    return plan if executors is plan.executors else plan.with_executors(executors)


class _Given:
    """An executor that, at one node of one graph, is given something else than what came there."""

    def __init__(self, executor: Any, graph: GraphSpec, at: str, value: Any) -> None:
        self._executor = executor
        self._graph = graph
        self._at = at
        self._value = value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def execute(self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext) -> Any:
        if context.node_id == self._at and context.runtime is not None and context.runtime.graph is self._graph:
            inputs, context = self._replaced(inputs, context)
        return self._executor.execute(data, inputs, context)

    def _replaced(
        self, inputs: Mapping[str, DataValue], context: FlowContext
    ) -> tuple[Mapping[str, DataValue], FlowContext]:
        handles, value = _handles_into(self._graph, self._at), self._value
        if len(handles) > 1:
            return {**inputs, **{name: typed(one) for name, one in value.items()}}, context
        if handles:
            return {handles.pop(): typed(value)}, context
        place = context.execution.with_input(value)
        services, state = context.services, context.state
        return inputs, FlowContext(
            context.node_id, context.chat_id, context.run_id, state, context.runtime, services, place
        )


class _Replaced(ExecutorRegistry):
    """A registry with another executor for one type."""

    __slots__ = ("_others",)

    def __init__(self, others: ExecutorRegistry, node_type: str, executor: Any) -> None:
        super().__init__({node_type: executor})
        self._others = others

    def __contains__(self, node_type: object) -> bool:
        return node_type in self._others

    def __iter__(self) -> Iterator[str]:
        return iter(self._others)

    def __len__(self) -> int:
        return len(self._others)

    def _found(self, node_type: str) -> Any:
        return super()._found(node_type) or self._others._found(node_type)


def _node(graph: GraphSpec, node_id: str) -> str:
    """The type of a node; InvalidValue if there is none of that id."""
    for node in graph.nodes:
        if node.id == node_id:
            return node.type
    raise InvalidValue("at", node_id, f"the id of a node of graph {graph.id!r}")


def _handles_into(graph: GraphSpec, node_id: str) -> set[str]:
    return {edge.target_handle for edge in graph.edges if edge.target == node_id and edge.channel == "flow"}
