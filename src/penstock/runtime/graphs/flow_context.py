"""What the executors of a graph are given.

Knows no node type: what is in `state` and `services` is between those who put it there and those who read it. Two
names in `services` are the runtime's: `execution_context`, the context that calls are made with, and `execution`,
which may say with `entry_node_ids` where the run begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.errors import InvalidValue
from penstock.runtime.context import ExecutionContext

if TYPE_CHECKING:
    from penstock.runtime.graphs.graph_runtime import GraphRuntime


class FlowContext:
    """What an executor is given beside its data and its inputs."""

    __slots__ = ("_execution", "chat_id", "node_id", "run_id", "runtime", "services", "state")

    def __init__(
        self,
        node_id: str | None = None,
        chat_id: str | None = None,
        run_id: str | None = None,
        state: Any = None,
        runtime: GraphRuntime | None = None,
        services: Mapping[str, Any] | None = None,
        execution: ExecutionContext | None = None,
    ) -> None:
        self.node_id = node_id
        self.chat_id = chat_id
        self.run_id = run_id
        self.state = state
        """What the nodes of a run share: a dict, unless the run was given something else."""
        self.runtime = runtime
        """The graph around the node, and what it links to."""
        self.services: Mapping[str, Any] = {} if services is None else services
        """What executors depend on, by name."""
        self._execution = execution

    @property
    def execution(self) -> ExecutionContext:
        """What calls are made with: they are recorded under this node, and held to the limits of the run."""
        found = self._execution if self._execution is not None else execution_context_in(self.services)
        if found is None:
            raise InvalidValue("services", self.services, "a mapping with an ExecutionContext as `execution_context`")
        return found

    def __repr__(self) -> str:
        return f"<FlowContext of node {self.node_id!r} in run {self.run_id!r}>"


def execution_context_in(services: Mapping[str, Any]) -> ExecutionContext | None:
    """The context that `services` carry for calls, if they do."""
    found = services.get("execution_context")
    if found is not None and not isinstance(found, ExecutionContext):
        raise InvalidValue("services['execution_context']", found, "an ExecutionContext, or left out")
    return found


def entry_node_ids_in(services: Mapping[str, Any]) -> list[str] | None:
    """The nodes that `services` say a run begins with; None if they do not say."""
    scope = services.get("execution")
    if scope is None:
        return None
    is_mapping = isinstance(scope, (dict, Mapping))  # a dict is known for one at once, a Mapping is asked for
    named = scope.get("entry_node_ids") if is_mapping else getattr(scope, "entry_node_ids", None)
    if named is None:
        return None
    if isinstance(named, str | bytes) or not hasattr(named, "__iter__"):
        raise InvalidValue("entry_node_ids", named, "a list of node ids")
    return list(named)
