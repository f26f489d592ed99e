"""Run a graph as an editor writes it, on the scheduler that runs every graph.

`run_flow` emits the events of every node, in this order and exactly once: `started`, before anything of the node runs;
the progress its executor emits; `completed`, `error` or `cancelled`. A node that no value reached, or that a limit did
not admit, is `skipped` and emits nothing else.

An executor answers with a result, a value, None, an awaitable of one of these, or a stream of progress that ends with
one. Anything else is `ExecutorMisbehaved`, an error of that node like any other. An executor with `blocking = True` is
sync code that runs on a thread.

Knows nodes, handles, edges, channels and values; the work of a node type is up to its executor. The scheduler decides
when a node runs and how it ends.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import partial
from types import CoroutineType
from typing import Any

from penstock import checks
from penstock.clock import utc_from_ns, utc_now
from penstock.containment.safety import ChainMetadata
from penstock.errors import InvalidValue, PenstockError
from penstock.ids import new_run_id
from penstock.kernel.executor import ANY, DataValue, ExecutionResult, PartialValue
from penstock.kernel.frontier import Settle, as_settle, frontier_for
from penstock.kernel.graph import DEFAULT_OUTPUT, NodeSpec, shown, thawed
from penstock.kernel.routing import route
from penstock.runtime.billing.usage import WITHOUT_USAGE
from penstock.runtime.call import running_call
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable import failpoints
from penstock.runtime.durable.journal import must_be_json
from penstock.runtime.graphs.execution import GraphExecution, stream_run
from penstock.runtime.graphs.graph_runtime import (
    Executors,
    FlowContext,
    GraphDocument,
    GraphPlan,
    GraphRuntime,
    execution_context_in,
)
from penstock.runtime.graphs.node_options import NOTHING
from penstock.runtime.scheduling.listener import Audience, Listener
from penstock.runtime.scheduling.scheduler import NodeCallbacks, NodeStatus, Scheduler
from penstock.runtime.settlement import error_text
from penstock.runtime.streams import PieceBuffer
from penstock.tracing.jsonable import jsonable

MAX_PARALLEL = 16
"""Default maximum number of concurrent nodes."""
RESULTS = (ExecutionResult, DataValue)
WITHOUT_USAGE.add(ExecutionResult)

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
    """The answer of an executor that reports progress through a callback instead of yielding it.

    The runtime uses it directly: `work` runs in the task of the node, and progress is emitted as it is made. For any
    other consumer, such as an executor that wraps another one, it is a stream like any other; a task then does the
    work, under a token of its own: leaving the stream cancels the task and waits for it.
    """

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


Progress = Callable[[int, NodeEvent], None]


class ExecutorMisbehaved(PenstockError):
    """An executor broke the executor contract; names the node and the violation."""

    def __init__(self, node_id: str, node_type: str, what: str) -> None:
        self.node_id = node_id
        self.node_type = node_type
        self.what = what
        super().__init__(f"the executor of node {node_id!r} (type {node_type!r}) {what}")


class QuorumMissed(PenstockError):
    """All nodes that ran have ended, and fewer of the last nodes than required were reached."""

    def __init__(self, graph: str, settle: str) -> None:
        self.graph = graph
        self.settle = settle
        super().__init__(f"graph {graph!r} needs {settle} of its last nodes, and too few of them were reached")


def run_flow(
    graph: GraphDocument | GraphRuntime,
    context: ExecutionContext | FlowContext,
    executors: Executors = None,
    *,
    settle: Settle = "fail_fast",
    max_parallel: int = MAX_PARALLEL,
) -> AsyncGenerator[NodeEvent | ExecutionResult, None]:
    """Run a graph: yield the events of its nodes as they happen and, last, the outputs of the last nodes that ran.

    Raises GraphInvalid before anything runs; at the end, after every terminal event, raises the error that stopped it:
    a node's error, BudgetExceededError, CancelledError. Leaving the iteration early cancels the graph. Close it
    (`contextlib.aclosing`) to wait until that is done.
    """
    settle = as_settle(settle)
    checks.integer("max_parallel", max_parallel, minimum=1, of="nodes")
    runtime = _runtime(graph, context, executors)
    found = _execution_context(context, runtime)

    def work(place: ExecutionContext, listener: Listener[NodeEvent]) -> Awaitable[ExecutionResult]:
        return NodeExecution(runtime, place, settle, max_parallel, listener).run()

    return stream_run(partial(_unlimited, runtime) if found is None else found, f"run of {runtime.graph.id}", work)


async def emit_flow(graph: GraphPlan, context: FlowContext, audience: Audience[NodeEvent]) -> ExecutionResult:
    """Run a graph in the caller's task: emit node events to `audience`, and return the outputs of the last nodes.

    The context must have an ExecutionContext. The only way to leave early is to cancel the task.
    """
    runtime = _runtime(graph, context, None)
    return await NodeExecution(runtime, context.execution, "fail_fast", MAX_PARALLEL, audience).run()


class NodeExecution(GraphExecution[NodeEvent]):
    """One run of one JSON graph."""

    __slots__ = ("_max_parallel", "_nodes", "_outputs", "_runtime", "_settle")

    def __init__(
        self,
        runtime: GraphRuntime,
        context: ExecutionContext,
        settle: Settle,
        max_parallel: int,
        audience: Audience[NodeEvent],
    ) -> None:
        super().__init__(context, audience)
        self._runtime = runtime
        self._nodes = runtime._planned
        self._settle = settle
        self._max_parallel = max_parallel
        self._outputs: dict[str, Mapping[str, DataValue]] = {}
        """Outputs of completed nodes, by node id and handle."""

    async def run(self) -> ExecutionResult:
        """Run the graph and return the outputs of the last nodes that ran."""
        runtime, scheduler = self._runtime, self._scheduler()
        if runtime._place is not None:
            raise InvalidValue("graph", runtime, "a GraphRuntime that is not running already")
        runtime._place, runtime._above = scheduler.place, running_call.get()
        runtime._recorded = scheduler.recorder
        try:
            await scheduler.execute()
        finally:
            runtime._place = runtime._above = runtime._recorded = None
        if failpoints.hook is not None:
            failpoints.hook("graph.after_last_node")
        if getattr(scheduler.frontier, "is_won", True) is False and not scheduler.errors:
            raise QuorumMissed(runtime.graph.id, str(self._settle))
        return ExecutionResult(self._last_outputs())

    def _scheduler(self) -> Scheduler:
        nodes, runtime = self._nodes, self._runtime
        callbacks = NodeCallbacks(
            self._run, nodes.calls, nodes.options, store=self._store, notify_recovery=self._emit_recovery
        )
        frontier = frontier_for(nodes.plan, self._settle)
        return self._scheduler_of(
            runtime.graph.id, frontier, callbacks, self._max_parallel, state=runtime.state, pure=nodes.pure
        )

    def _last_outputs(self) -> dict[str, DataValue]:
        """Return the outputs of nodes that fed no started node; keyed by handle alone if there is one such node."""
        plan, outputs = self._nodes.plan, self._outputs
        last = [node_id for node_id, values in outputs.items() if not self._fed_others(plan.index[node_id], values)]
        if len(last) == 1:
            return dict(outputs[last[0]])
        in_order = sorted(last, key=plan.index.__getitem__)
        return {f"{node_id}.{handle}": value for node_id in in_order for handle, value in outputs[node_id].items()}

    def _fed_others(self, node: int, values: Mapping[str, DataValue]) -> bool:
        plan = self._nodes.plan
        edges = zip(plan.successors[node], plan.successor_handles[node], strict=True)
        return any(handle in values and successor in self.started for successor, handle in edges)

    # Events.

    def _event(self, event_type: str, node: int, data: Any) -> NodeEvent:
        spec, run = self._nodes.specs[node], self._context._run
        event: Any = UnfrozenEvent()
        event.node_id = spec.id
        event.node_type = spec.type
        event.event_type = event_type
        event.run_id = self._runtime.run_id
        event.data = data
        event.timestamp = utc_from_ns(run.wall_time_ns(run.now()))
        event.replayed = node in self.replayed
        event.__class__ = NodeEvent
        return event  # type: ignore[no-any-return]

    def _emit_lifecycle(self, event_type: NodeStatus, node: int, data: Any) -> None:
        if event_type == "completed":
            data = data.outputs
        elif event_type == "skipped":
            data = str(data)
        super()._emit_lifecycle(event_type, node, data)

    def _emit_recovery(self, event_type: str, node: int, data: Mapping[str, Any]) -> None:
        """Emit the retry or the replacement by which the error policy recovers a failed node."""
        assert self._audience is not None
        self._audience.emit(self._event(event_type, node, dict(data)))

    def _emit(self, node: int, event: NodeEvent) -> None:
        self._emit_progress(node, event.event_type, event.data)

    # Nodes.

    def _run(self, node: int, place: ExecutionContext) -> Any:
        """Return the node's result, or an awaitable of it."""
        nodes = self._nodes
        spec = nodes.specs[node]
        if nodes.options is not None and (options := nodes.options[node]) is not None and options.on_thread:
            return self._run_on_thread(node, spec, place)
        value = nodes.runs[node](
            thawed(nodes.data[node]), self._inputs(node), self._runtime._context_of(spec.id, place)
        )
        if type(value) is ExecutionResult:
            return self._result(node, value, self._emit)
        return self._answer(node, value, self._emit)

    def _store(self, node: int, result: ExecutionResult) -> Collection[str] | None:
        """Store the node's outputs for its successors; return the handles it used, None for all that have an edge."""
        plan = self._nodes.plan
        if self._streams:
            self._streams.pop(node, None)
        outputs = self._outputs[plan.ids[node]] = dict(result.outputs)
        for handle in plan.successor_handles[node]:
            if handle not in outputs:
                return outputs.keys()
        return None

    # Journal.

    def _encode(self, node: int, value: ExecutionResult) -> dict[str, Any]:
        """Encode the node's outputs; raises NotRecordable, naming the handle, for a value that is not JSON."""
        for handle, output in value.outputs.items():
            must_be_json(f"node {self._nodes.plan.ids[node]!r}, handle {handle!r}", output.value)
        return {handle: _encoded(output) for handle, output in value.outputs.items()}

    def _decode(self, node: int, encoded: Mapping[str, Any]) -> ExecutionResult:
        return ExecutionResult({handle: _decoded(output) for handle, output in encoded.items()})

    # Inputs.

    def _inputs(self, node: int) -> dict[str, DataValue]:
        nodes = self._nodes
        feed = nodes.feeds[node]
        if feed is not None:
            source, source_handle, target_handle, wanted = feed
            value = self._outputs.get(source, {}).get(source_handle)
            if value is not None and (wanted == ANY or value.type == wanted):
                return {target_handle: value}
        incoming, declared = nodes.incoming[node], nodes.inputs[node]
        if not incoming and not declared:
            return {}
        return route(nodes.plan.ids[node], incoming, self._outputs, declared, self._runtime.conversions)

    # Answers.

    def _answer(self, node: int, value: Any, progress: Progress) -> Any:
        """Return the result in an executor's answer, or an awaitable of it if the answer is async."""
        if value is None:
            return NOTHING
        if isinstance(value, RESULTS):
            return self._result(node, value, progress)
        kind = type(value)
        if kind is ProgressStream:
            return self._progressed(node, value)
        if hasattr(kind, "__await__"):
            return self._awaited(node, value)
        if hasattr(kind, "__aiter__"):
            return self._streamed(node, value)
        if hasattr(kind, "__next__"):
            return self._drained(node, value)
        raise self._misbehaved(
            node, f"returned {shown(value)}, which is neither a result nor a stream that ends in one"
        )

    async def _awaited(self, node: int, value: Awaitable[Any]) -> ExecutionResult:
        answer = await value
        if type(answer) is ExecutionResult:
            return self._result(node, answer, self._emit)
        if hasattr(type(answer), "__await__"):
            _discard(answer)
            raise self._misbehaved(node, "returned an awaitable of an awaitable")
        result = self._answer(node, answer, self._emit)
        return await result if type(result) is CoroutineType else result  # type: ignore[no-any-return]

    async def _progressed(self, node: int, stream: ProgressStream) -> ExecutionResult:
        """Return the answer; raises the first error of emitting, even if the executor caught it."""
        buffer = self._buffer(node)
        failed: list[Exception] = []

        def emit(name: str, data: Any) -> None:
            try:
                self._emit_progress(node, name, data)
            except Exception as error:
                failed.append(error)
                raise
            buffer.append((name, data))

        answer = await stream.run(emit)
        if failed:
            raise failed[0]
        await self._make_room()
        return self._result(node, answer, self._emit)

    async def _streamed(self, node: int, stream: AsyncIterable[Any]) -> ExecutionResult:
        result: ExecutionResult | None = None
        buffer = self._buffer(node)
        iterator = aiter(stream)
        try:
            async for piece in iterator:
                result = self._piece(node, piece, result, self._emit, buffer)
                await self._make_room()
        finally:
            close = getattr(iterator, "aclose", None)
            if close is not None:
                await close()
        return NOTHING if result is None else result

    async def _drained(self, node: int, stream: Iterator[Any]) -> ExecutionResult:
        pieces = self._pieces(node, stream, self._emit)
        try:
            while True:
                next(pieces)
                await self._make_room()
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        finally:
            pieces.close()

    def _pieces(self, node: int, stream: Iterator[Any], progress: Progress) -> Any:
        """Emit the pieces of a sync stream, one at a time, and return the result it yields last or returns."""
        result: ExecutionResult | None = None
        buffer = self._buffer(node)
        try:
            while True:
                try:
                    piece = next(stream)
                except StopIteration as end:
                    if end.value is not None:
                        result = self._piece(node, end.value, result, progress, buffer)
                    break
                result = self._piece(node, piece, result, progress, buffer)
                yield
        finally:
            close = getattr(stream, "close", None)
            if close is not None:
                close()
        return NOTHING if result is None else result

    def _buffer(self, node: int) -> PieceBuffer:
        """Create the buffer that keeps a streaming node's progress, in case the node is stopped."""
        call = running_call.get()
        assert call is not None, "nodes of a graph are recorded"
        buffer = PieceBuffer(call.context._run.settings.max_kept_pieces)
        call.stream = self._streams[node] = buffer.output
        return buffer

    def _piece(
        self, node: int, piece: Any, result: ExecutionResult | None, progress: Progress, buffer: PieceBuffer
    ) -> ExecutionResult | None:
        if result is not None:
            raise self._misbehaved(node, f"yielded {shown(piece)} after its result")
        if isinstance(piece, NodeEvent):
            self._check_event(node, piece)
            progress(node, piece)
            buffer.append((piece.event_type, piece.data))
            return None
        if isinstance(piece, RESULTS):
            return self._result(node, piece, progress)
        raise self._misbehaved(node, f"yielded {shown(piece)}, which is neither a NodeEvent nor a result")

    def _result(self, node: int, value: ExecutionResult | DataValue, progress: Progress) -> ExecutionResult:
        """Validate a result, emit its events and return it."""
        result = ExecutionResult({DEFAULT_OUTPUT: value}) if isinstance(value, DataValue) else value
        outputs: object = result.outputs
        if type(outputs) is not dict:
            if not isinstance(outputs, Mapping):
                raise self._misbehaved(node, f"returned the outputs {shown(outputs)} instead of values by handle")
            outputs = dict(outputs)
            result = ExecutionResult(outputs, result.events)
        declared = self._nodes.outputs[node]
        for name, one in outputs.items():
            if type(name) is not str:
                raise self._misbehaved(node, f"returned a value on {shown(name)}, which is not the name of a handle")
            if type(one) is not DataValue and not isinstance(one, DataValue):
                raise self._misbehaved(node, f"returned {shown(one)} on handle {shown(name)}, which is not a DataValue")
            if declared is not None and ((handle := declared.get(name)) is None or handle.channel != "flow"):
                known = ", ".join(handle.name for handle in declared.values() if handle.channel == "flow") or "none"
                raise self._misbehaved(node, f"returned a value on handle {shown(name)}; it declares: {known}")
        for event in result.events:
            self._check_event(node, event)
            progress(node, event)
        return result

    def _check_event(self, node: int, event: object) -> None:
        event_type: object = event.event_type if isinstance(event, NodeEvent) else None
        if not isinstance(event_type, str) or not event_type:
            raise self._misbehaved(node, f"emitted {shown(event)}, which is not a NodeEvent with a type")
        if event_type in LIFECYCLE:
            raise self._misbehaved(node, f"emitted {event_type!r}, a lifecycle event: only the runtime emits those")

    def _misbehaved(self, node: int, what: str) -> ExecutorMisbehaved:
        spec = self._nodes.specs[node]
        return ExecutorMisbehaved(spec.id, spec.type, what)

    # On a thread.

    def _run_on_thread(self, node: int, spec: NodeSpec, place: ExecutionContext) -> ExecutionResult:
        def progress(node: int, event: NodeEvent) -> None:
            place.check_cancelled()
            self._emit(node, event)
            self._wait_for_room(place.cancellation)

        context = self._runtime._context_of(spec.id, place)
        value = self._nodes.runs[node](thawed(self._nodes.data[node]), self._inputs(node), context)
        kind = type(value)
        if hasattr(kind, "__await__") or hasattr(kind, "__aiter__"):
            _discard(value)
            raise self._misbehaved(node, "is blocking and returned something async")
        if not isinstance(value, RESULTS) and hasattr(kind, "__next__"):
            return _exhausted(self._pieces(node, value, progress))
        return self._answer(node, value, progress)  # type: ignore[no-any-return]


def _encoded(output: DataValue) -> dict[str, Any]:
    encoded = {"type": output.type, "value": output.value}
    return {**encoded, "finish_reason": output.finish_reason} if isinstance(output, PartialValue) else encoded


def _decoded(encoded: Mapping[str, Any]) -> DataValue:
    if "finish_reason" in encoded:
        return PartialValue(encoded["type"], encoded["value"], encoded["finish_reason"])
    return DataValue(encoded["type"], encoded["value"])


def _exhausted(pieces: Any) -> ExecutionResult:
    """Return the value that a generator returns."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def _discard(value: object) -> None:
    """Close a coroutine that will not be awaited."""
    if type(value) is CoroutineType:
        value.close()


def _runtime(
    graph: GraphDocument | GraphRuntime, context: ExecutionContext | FlowContext, executors: Executors
) -> GraphRuntime:
    if isinstance(graph, GraphRuntime):
        if executors is not None:
            raise InvalidValue("executors", executors, "left out with a GraphRuntime, which has its own")
        if graph._place is not None:
            raise InvalidValue("graph", graph, "a GraphRuntime that is not running already")
        if isinstance(context, FlowContext):
            graph._bind(context)
        return graph
    if isinstance(context, ExecutionContext):
        return GraphRuntime(graph, run_id=context.run_id, executors=executors)
    if not isinstance(context, FlowContext):
        raise InvalidValue("context", context, "an ExecutionContext or a FlowContext")
    return GraphRuntime(
        graph,
        run_id=context.run_id or "",
        chat_id=context.chat_id,
        state=context.state,
        services=context.services,
        executors=executors,
    )


def _execution_context(context: ExecutionContext | FlowContext, runtime: GraphRuntime) -> ExecutionContext | None:
    """Return the context to run in, or None."""
    if isinstance(context, ExecutionContext):
        found: ExecutionContext | None = context
    else:
        found = context._execution or execution_context_in(runtime.services)
    if found is not None:
        found._must_take_work(f"graph {runtime.graph.id!r}")
        runtime.run_id = runtime.run_id or found.run_id
    return found


def _unlimited(runtime: GraphRuntime) -> ExecutionContext:
    """Return a run without limits, for a graph that was given no context."""
    runtime.run_id = run_id = runtime.run_id or new_run_id()
    return ExecutionContext(metadata=ChainMetadata(request_id=run_id, chain_id=run_id), name=runtime.graph.id)
