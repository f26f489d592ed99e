"""What is told of the nodes of a run, and the one who tells it.

The lifecycle comes from the scheduler, progress from executors; both go to one listener, in the order they happened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import datetime
from threading import get_ident
from typing import Any

from penstock.clock import utc_from_ns, utc_now
from penstock.kernel.graph import NodeSpec
from penstock.kernel.values import DataValue
from penstock.runtime.context import ExecutionContext
from penstock.runtime.scheduling.listener import Audience
from penstock.runtime.scheduling.scheduler import Told
from penstock.runtime.settlement import told_by
from penstock.tracing.jsonable import jsonable

TERMINAL = frozenset({"completed", "error", "cancelled"})
"""How a node that was started ends: each gets exactly one of these."""
LIFECYCLE = TERMINAL | {"started", "skipped"}
"""What only the runtime tells; every other type of event is progress."""

CATCH_UP_S = 0.01
"""How often a thread looks whether a reader who was behind has caught up."""


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """What was just seen of a node: `started`, `completed`, `error`, `cancelled`, `skipped`, or progress of its own."""

    node_id: str
    node_type: str
    event_type: str
    run_id: str
    data: Any = None
    """The outputs by handle, the error, why it was skipped; or what the executor has to tell."""
    timestamp: datetime = field(default_factory=utc_now)
    replayed: bool = False
    """Whether the node did not run now: the journal had what it gave before."""

    @classmethod
    def progress(cls, event_type: str, data: Any = None) -> NodeEvent:
        """An event for an executor to tell; which node it is of, and when, is filled in by the runtime."""
        return cls("", "", event_type, "", data)

    def to_dict(self) -> dict[str, Any]:
        """The event as JSON data."""
        said = {
            "node_id": self.node_id,
            "node_type": self.node_type,
            "event_type": self.event_type,
            "run_id": self.run_id,
            "data": _as_json(self.data),
            "timestamp": self.timestamp.isoformat(),
        }
        return {**said, "replayed": True} if self.replayed else said


class _Unfrozen:
    """A NodeEvent that is being filled in, and then becomes one.

    Several are made for every node, and to write the fields of what is frozen takes four times as long.
    """

    __slots__ = tuple(one.name for one in fields(NodeEvent))


def _as_json(data: Any) -> Any:
    if isinstance(data, BaseException):
        return {"error": type(data).__name__, "message": told_by(data)}
    if isinstance(data, Mapping) and any(isinstance(one, DataValue) for one in data.values()):
        return jsonable({name: _value_as_json(one) for name, one in data.items()})
    return jsonable(data)


def _value_as_json(value: Any) -> Any:
    return {"type": value.type, "value": value.value} if isinstance(value, DataValue) else value


class NodeEvents:
    """Tells a listener what becomes of the nodes of one run."""

    __slots__ = ("_ended", "_listener", "_loop", "_run", "_run_id", "_specs", "_thread", "replayed", "started")

    def __init__(
        self, listener: Audience[NodeEvent], specs: Sequence[NodeSpec], context: ExecutionContext, run_id: str
    ) -> None:
        self._listener = listener
        self._specs = specs
        self._run = context._run
        self._run_id = run_id
        self._loop = asyncio.get_running_loop()
        self._thread = get_ident()
        self.started: set[int] = set()
        self.replayed: Collection[int] = ()
        """Nodes that a journal had already."""
        self._ended: set[int] = set()

    def lifecycle(self, told: Told, node: int, data: Any) -> None:
        """What the scheduler says has become of a node."""
        if told == "started":
            self.started.add(node)
        else:
            self._ended.add(node)
            if told == "completed":
                data = data.outputs
            elif told == "skipped":
                data = str(data)
        self._listener.tell(self._event(told, node, data))

    def progress(self, node: int, event: NodeEvent) -> None:
        """What the executor of a node that runs has to tell; on the loop."""
        self.say(node, event.event_type, event.data)

    def say(self, node: int, event_type: str, data: Any) -> None:
        """The same by what it is, from any thread: what an executor calls may have been moved to another one."""
        if get_ident() != self._thread:
            with suppress(RuntimeError):  # the loop is closed: nobody listens any more
                self._loop.call_soon_threadsafe(self.say, node, event_type, data)
        elif node not in self._ended:  # a function that was left behind on its thread may still tell
            self._listener.tell(self._event(event_type, node, data))

    async def make_room(self) -> None:
        """Wait until a reader who is behind has caught up."""
        if self._listener.is_behind:
            await self._listener.make_room()

    def progress_from_thread(self, node: int, event: NodeEvent, place: ExecutionContext) -> None:
        """The same from a thread, which waits there while the reader is behind, and is told if the run is over."""
        place.check_cancelled()
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self.progress, node, event)
        while self._listener.is_behind and not place.cancellation.wait_sync(CATCH_UP_S):
            pass

    def _event(self, event_type: str, node: int, data: Any) -> NodeEvent:
        spec, run = self._specs[node], self._run
        made: Any = _Unfrozen()
        made.node_id = spec.id
        made.node_type = spec.type
        made.event_type = event_type
        made.run_id = self._run_id
        made.data = data
        made.timestamp = utc_from_ns(run.wall_time_ns(run.now()))
        made.replayed = node in self.replayed
        made.__class__ = NodeEvent
        return made  # type: ignore[no-any-return]
