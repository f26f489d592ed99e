"""Forks of a run at one node: the nodes that run again, and the input of that node.

The node is matched by the identity of its graph, because a nested graph may have a node with the same id.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.errors import InvalidValue
from penstock.hosting.ports import RunRecord
from penstock.kernel.executor import DataValue, ExecutorRegistry, typed
from penstock.kernel.graph import GraphSpec
from penstock.runtime.graphs.graph_runtime import FlowContext, GraphPlan

TAKES_UP = ("fork", "replay")
"""Kinds of runs that start from the journal of another run."""


def nodes_from(graph: GraphSpec, at: str) -> frozenset[str]:
    """Return the ids of node `at` and all nodes after it on flow edges."""
    _node(graph, at)
    found, todo = {at}, [at]
    while todo:
        one = todo.pop()
        after = {edge.target for edge in graph.edges if edge.source == one and edge.channel == "flow"} - found
        found |= after
        todo += after
    return frozenset(found)


def check_input(graph: GraphSpec, at: str, value: Any) -> None:
    """Raise InvalidValue unless `value` can be the node's input; several handles need a mapping by handle."""
    handles = _handles_into(graph, at)
    if len(handles) > 1 and not (isinstance(value, Mapping) and value.keys() <= handles):
        raise InvalidValue("input", value, f"an object with any of {', '.join(sorted(handles))}, which {at!r} takes")


def whole_input(graph: GraphSpec, at: str, value: Any, before: Mapping[str, Any]) -> Any:
    """Return the full input of node `at` for a fork given `value`; `before` are the replaced inputs of earlier forks.

    With several input handles, the handles that `value` does not name keep their earlier replacement.
    """
    return {**before.get(at, {}), **value} if len(_handles_into(graph, at)) > 1 else value


def inputs_of(run: RunRecord) -> dict[str, Any]:
    """Return the replaced node inputs of a fork or replay by node id, including those inherited from earlier forks."""
    if run.origin.get("kind") not in TAKES_UP:
        return {}
    given = dict(run.origin.get("inputs", {}))
    if "input" in run.origin:
        given[str(run.origin["at"])] = run.origin["input"]
    return given


def plan_of(plan: GraphPlan, run: RunRecord) -> GraphPlan:
    """Return the graph plan of a run, with executors that pass the replaced inputs of a fork to their nodes."""
    graph, executors = plan.graph, plan.executors
    for at, value in inputs_of(run).items():
        node_type = _node(graph, at)
        executors = _Replaced(executors, node_type, _Given(executors[node_type], graph, at, value))
    return plan if executors is plan.executors else plan.with_executors(executors)


class _Given:
    """An executor whose input is replaced at one node of one graph."""

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
    """A registry with a different executor for one node type."""

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
    """Return the type of a node; raise InvalidValue if the graph has no node with that id."""
    for node in graph.nodes:
        if node.id == node_id:
            return node.type
    raise InvalidValue("at", node_id, f"the id of a node of graph {graph.id!r}")


def _handles_into(graph: GraphSpec, node_id: str) -> set[str]:
    return {edge.target_handle for edge in graph.edges if edge.target == node_id and edge.channel == "flow"}
