"""One run of one graph, whether its steps are Python or its nodes JSON: the scheduler, the journal and the events.

`GraphExecution` is the common part of both kinds of graphs. `flow.execution` adds the arguments of a step,
`node_execution` those of an executor and its possible answers. The scheduler holds the execution and not the other way
round, so that both are freed as soon as the run has ended.

Events go to one audience, in the order they happened. A node that has ended emits nothing more, even if one of its
functions is still running on a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import suppress
from threading import get_ident
from typing import Any, Generic, TypeVar

from penstock.kernel.frontier import Frontier
from penstock.runtime.cancellation import CancellationToken
from penstock.runtime.context import ExecutionContext
from penstock.runtime.scheduling.listener import CATCH_UP_S, Audience, Listener, Listening
from penstock.runtime.scheduling.recording import RecordedNodes
from penstock.runtime.scheduling.scheduler import NodeCallbacks, NodeStatus, Scheduler
from penstock.runtime.streams import Output

E = TypeVar("E")
R = TypeVar("R")


class GraphExecution(Generic[E]):
    """One run of one graph. A subclass runs the nodes, makes their events, and encodes their values as JSON."""

    __slots__ = ("_audience", "_context", "_ended", "_loop", "_streams", "_thread", "replayed", "started")

    _loop: asyncio.AbstractEventLoop
    _thread: int
    _ended: set[int]
    started: set[int]
    """Nodes that have started; recorded, like `_ended`, only where there is an audience."""

    def __init__(self, context: ExecutionContext, audience: Audience[E] | None) -> None:
        self._context = context
        self._audience = audience
        self._streams: dict[int, Output] = {}
        """The output so far of each node that streams."""
        self.replayed: Collection[int] = ()
        """Nodes whose results came from the journal."""
        if audience is not None:
            self._loop = asyncio.get_running_loop()
            self._thread = get_ident()
            self._ended = set()
            self.started = set()

    # For subclasses.

    def _event(self, event_type: str, node: int, data: Any) -> E:
        raise NotImplementedError

    def _encode(self, node: int, value: Any) -> Any:
        """Return the value of a node as JSON; raises NotRecordable if it is not."""
        raise NotImplementedError

    def _decode(self, node: int, encoded: Any) -> Any:
        raise NotImplementedError

    def _scheduler_of(
        self,
        name: str,
        frontier: Frontier,
        callbacks: NodeCallbacks,
        max_parallel: int,
        *,
        results: dict[str, Any] | None = None,
        state: object = None,
        pure: Collection[int] = (),
    ) -> Scheduler:
        """Return the scheduler that runs the nodes; in a durable run, it records and replays them."""
        callbacks.streams = self._streams
        if self._audience is not None:
            callbacks.notify = self._emit_lifecycle
        journal = self._context._run.journal
        if journal is not None:
            callbacks.recorder = recorded = RecordedNodes(
                journal, frontier.plan.ids, self._encode, self._decode, calls=callbacks.calls, state=state, pure=pure
            )
            self.replayed = recorded.replayed
        return Scheduler(self._context, name, frontier, callbacks, max_parallel, results)

    # Events.

    def _emit_lifecycle(self, event_type: NodeStatus, node: int, data: Any) -> None:
        """Emit a lifecycle event reported by the scheduler."""
        assert self._audience is not None
        (self.started if event_type == "started" else self._ended).add(node)
        self._audience.emit(self._event(event_type, node, data))

    def _emit_progress(self, node: int, event_type: str, data: Any) -> None:
        """Emit progress of a running node, from any thread: functions called by it may run on another one."""
        if self._audience is None:
            return
        if get_ident() != self._thread:
            with suppress(RuntimeError):  # the loop is closed: no reader is left
                self._loop.call_soon_threadsafe(self._emit_progress, node, event_type, data)
        elif node not in self._ended:
            self._audience.emit(self._event(event_type, node, data))

    async def _make_room(self) -> None:
        """Wait until a reader that is behind has caught up."""
        if self._audience is not None and self._audience.is_behind:
            await self._audience.make_room()

    def _wait_for_room(self, token: CancellationToken) -> None:
        """Block the thread of a node while the reader is behind, until the node is cancelled."""
        if self._audience is not None:
            while self._audience.is_behind and not token.wait_sync(CATCH_UP_S):
                pass


async def stream_run(
    context: ExecutionContext | Callable[[], ExecutionContext],
    name: str,
    work: Callable[[ExecutionContext, Listener[E]], Awaitable[R | None]],
) -> AsyncGenerator[E | R, None]:
    """Run `work` in a task and under a token of its own; yield its events and, last, its result unless that is None.

    Leaving the iteration early cancels the work and waits for it. If `context` is a function, the context that it
    returns is ended with the work.
    """
    is_own = not isinstance(context, ExecutionContext)
    place = context if isinstance(context, ExecutionContext) else context()
    token = place._token.child(name)
    result: R | None = None

    async def run(listener: Listener[E]) -> None:
        nonlocal result
        result = await work(place._under(token), listener)

    try:
        async with Listening(run, token) as listener:
            while await listener.has_more():
                while listener.events:
                    yield listener.events.popleft()
    except BaseException as error:
        if is_own:
            place.end(error)
        raise
    if is_own:
        place.end()
    if result is not None:
        yield result
