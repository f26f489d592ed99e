"""What stands behind a node type.

An executor has `execute`, and `materialize` if others may link to it. It may declare its handles; what is declared is
checked before a graph runs, what is not is open. The kernel calls executors by these names and knows nothing else of
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from penstock.errors import InvalidValue
from penstock.kernel.graph import Channel
from penstock.kernel.values import ANY, DataValue

Many = Literal["one", "list", "first"]


@dataclass(frozen=True, slots=True)
class Handle:
    """A place where edges arrive or leave: its type, its channel, and what several edges into it mean."""

    name: str
    type: str = ANY
    channel: Channel = "flow"
    many: Many = "one"
    """one: a second edge is an error; list: all values in the order of the edges; first: the first that is live."""
    required: bool = False


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """What a node gave: a value on each handle it used, and the events it wants told."""

    outputs: Mapping[str, DataValue] = field(default_factory=dict)
    events: Sequence[Any] = ()


@runtime_checkable
class NodeExecutor(Protocol):
    """The code behind a node type.

    May also have `materialize(data, output_handle, context)`, `inputs` and `outputs`.
    """

    def execute(self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: Any) -> Any:
        """Run the node: an ExecutionResult, an awaitable of one, or an async iterator of events that ends with one."""


class ExecutorRegistry:
    """Executors by node type."""

    def __init__(self, executors: Mapping[str, Any] | None = None) -> None:
        self._executors: dict[str, Any] = {}
        for node_type, executor in (executors or {}).items():
            self.register(node_type, executor)

    def register(self, node_type: str, executor: Any) -> None:
        """Let `executor` run nodes of this type; a type is taken once."""
        if not node_type:
            raise InvalidValue("node_type", node_type, "a name")
        if not callable(getattr(executor, "execute", None)) and not callable(getattr(executor, "materialize", None)):
            raise InvalidValue(
                f"executor of {node_type!r}", executor, "an object with execute(), materialize() or both"
            )
        if node_type in self._executors:
            raise InvalidValue("node_type", node_type, "a type that is not registered yet")
        self._executors[node_type] = executor

    def __contains__(self, node_type: object) -> bool:
        return node_type in self._executors

    def __iter__(self) -> Iterator[str]:
        return iter(self._executors)

    def __getitem__(self, node_type: str) -> Any:
        return self._executors[node_type]

    def handles(self, node_type: str, side: Literal["inputs", "outputs"]) -> Mapping[str, Handle] | None:
        """The handles a type declares on that side, by name; None if it leaves them open."""
        declared: Sequence[Handle] | None = getattr(self._executors.get(node_type), side, None)
        return None if declared is None else {handle.name: handle for handle in declared}
