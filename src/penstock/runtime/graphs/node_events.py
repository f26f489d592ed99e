"""Events of the nodes of a JSON graph, and answers that emit some of them through a callback.

A `ProgressStream` is the answer of an executor that reports progress through a callback instead of yielding it. The
runtime uses it directly: progress is emitted in the task of the node, as it is made. For any other consumer, such as an
executor that wraps another one, it is a stream like any other; a task then does the work, under a token of its own:
leaving the stream cancels the task and waits for it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any

from penstock.clock import utc_now
from penstock.kernel.values import DataValue
from penstock.runtime.context import ExecutionContext
from penstock.runtime.graphs.execution import stream_run
from penstock.runtime.scheduling.listener import Listener
from penstock.runtime.settlement import error_text
from penstock.tracing.jsonable import jsonable

TERMINAL = frozenset({"completed", "error", "cancelled"})
"""Final events of a node that was started: each such node gets exactly one of these."""
LIFECYCLE = TERMINAL | {"started", "skipped"}
"""Event types that only the runtime emits; every other type of event is progress."""


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """One event of a node: `started`, `completed`, `error`, `cancelled`, `skipped`, or progress of its own."""

    node_id: str
    node_type: str
    event_type: str
    run_id: str
    data: Any = None
    """The outputs by handle, the error, the reason it was skipped; or the data of a progress event."""
    timestamp: datetime = field(default_factory=utc_now)
    replayed: bool = False
    """Whether the node did not run now: its result came from the journal."""

    @classmethod
    def progress(cls, event_type: str, data: Any = None) -> NodeEvent:
        """Return a progress event for an executor to emit; the runtime fills in the node and the time."""
        return cls("", "", event_type, "", data)

    def to_dict(self) -> dict[str, Any]:
        """Return the event as JSON data."""
        document = {
            "node_id": self.node_id,
            "node_type": self.node_type,
            "event_type": self.event_type,
            "run_id": self.run_id,
            "data": _as_json(self.data),
            "timestamp": self.timestamp.isoformat(),
        }
        return {**document, "replayed": True} if self.replayed else document


class UnfrozenEvent:
    """A NodeEvent under construction, which is then turned into one.

    Several are made for every node, and setting the fields of a frozen dataclass takes four times as long.
    """

    __slots__ = tuple(one.name for one in fields(NodeEvent))


def _as_json(data: Any) -> Any:
    if isinstance(data, BaseException):
        return {"error": type(data).__name__, "message": error_text(data)}
    if isinstance(data, Mapping) and any(isinstance(one, DataValue) for one in data.values()):
        return jsonable({name: _value_as_json(one) for name, one in data.items()})
    return jsonable(data)


def _value_as_json(value: Any) -> Any:
    return {"type": value.type, "value": value.value} if isinstance(value, DataValue) else value


EmitProgress = Callable[[str, Any], None]
"""Emits progress of a node: the type of the event, and its data."""
ProgressWork = Callable[[ExecutionContext, EmitProgress], Awaitable[Any]]
"""Works in a context, emits progress, and returns the answer."""


class ProgressStream:
    """Progress and an answer, produced by `work` in `context`."""

    __slots__ = ("_context", "_work")

    def __init__(self, context: ExecutionContext, work: ProgressWork) -> None:
        self._context = context
        self._work = work

    def run(self, emit: EmitProgress) -> Awaitable[Any]:
        """Return an awaitable of the answer; progress is passed to `emit`."""
        return self._work(self._context, emit)

    def __aiter__(self) -> AsyncGenerator[Any, None]:
        def work(context: ExecutionContext, listener: Listener[NodeEvent]) -> Awaitable[Any]:
            return self._work(context, lambda name, data: listener.emit(NodeEvent.progress(name, data)))

        return stream_run(self._context, "stream", work)
