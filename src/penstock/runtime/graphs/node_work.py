"""What a node does when it runs: values in, the answer of its executor out, checked.

An executor answers with a result, a value, nothing, an awaitable of one of these, or a stream of progress that ends
with one. Whatever else it does is `ExecutorMisbehaved`, an error of that node like any other. An executor with
`blocking = True` is sync code that runs on a thread.

Who runs when, and how a node ends, is the scheduler's business.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockError
from penstock.kernel.executor import ExecutionResult, ExecutorRegistry, Handle
from penstock.kernel.graph import DEFAULT_OUTPUT, EdgeSpec, NodeSpec, shown, thawed
from penstock.kernel.plan import Plan
from penstock.kernel.routing import route
from penstock.kernel.values import ANY, DataValue, PartialValue
from penstock.runtime.billing.usage import WITHOUT_USAGE
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable.journal import must_be_json
from penstock.runtime.graphs.node_events import LIFECYCLE, NodeEvent, NodeEvents
from penstock.runtime.graphs.telling import Telling
from penstock.runtime.scheduling.recovery import Care

if TYPE_CHECKING:
    from penstock.runtime.graphs.graph_runtime import GraphRuntime

NOTHING = ExecutionResult()
"""The result of a node that used no handle."""
ON_A_THREAD = Care(on_thread=True)

RESULTS = (ExecutionResult, DataValue)
WITHOUT_USAGE.add(ExecutionResult)

Feed = tuple[str, str, str, str]
"""The one edge into a node: source, its handle, the handle it arrives at, the type that one takes."""
Progress = Callable[[int, NodeEvent], None]


class ExecutorMisbehaved(PenstockError):
    """An executor did what an executor may not do; says at which node, and what."""

    def __init__(self, node_id: str, node_type: str, what: str) -> None:
        self.node_id = node_id
        self.node_type = node_type
        self.what = what
        super().__init__(f"the executor of node {node_id!r} (type {node_type!r}) {what}")


@dataclass(frozen=True, slots=True)
class NodePlan:
    """The nodes of a plan by number, each with all that running it needs."""

    plan: Plan
    specs: list[NodeSpec]
    runs: list[Callable[..., Any]]
    """Each node's `execute`."""
    inputs: list[Mapping[str, Handle] | None]
    outputs: list[Mapping[str, Handle] | None]
    incoming: list[tuple[EdgeSpec, ...]]
    """The flow edges into each node, in the order of the graph."""
    feeds: list[Feed | None]
    """For nodes whose one value needs no routing."""
    about: list[Mapping[str, Any] | None]
    care: list[Care | None] | None
    pure: frozenset[int]
    """Nodes whose executor says that they give the same each time, call nothing and change nothing."""


def plan_nodes(
    plan: Plan, nodes: Mapping[str, NodeSpec], incoming: Mapping[str, list[EdgeSpec]], executors: ExecutorRegistry
) -> NodePlan:
    """What running the nodes of `plan` needs, looked up once."""
    specs = [nodes[one] for one in plan.ids]
    behind = {one: executors[one] for one in {spec.type for spec in specs}}
    inputs = {one: executors.handles(one, "inputs") for one in behind}
    outputs = {one: executors.handles(one, "outputs") for one in behind}
    about = {one: {"node_type": one} for one in behind}
    care = {one: ON_A_THREAD if getattr(executor, "blocking", False) else None for one, executor in behind.items()}
    arriving = [tuple([edge for edge in incoming.get(one, ()) if edge.channel == "flow"]) for one in plan.ids]
    return NodePlan(
        plan,
        specs,
        [behind[spec.type].execute for spec in specs],
        [inputs[spec.type] for spec in specs],
        [outputs[spec.type] for spec in specs],
        arriving,
        [_feed(edges, inputs[spec.type]) for spec, edges in zip(specs, arriving, strict=True)],
        [about[spec.type] for spec in specs],
        [care[spec.type] for spec in specs] if any(care.values()) else None,
        frozenset(at for at, spec in enumerate(specs) if getattr(behind[spec.type], "is_pure", False) is True),
    )


def _feed(edges: tuple[EdgeSpec, ...], declared: Mapping[str, Handle] | None) -> Feed | None:
    if len(edges) != 1:
        return None
    (edge,) = edges
    wanted = ANY
    if declared is not None:
        handle = declared[edge.target_handle]
        if handle.many == "list" or any(one.required for one in declared.values() if one is not handle):
            return None
        wanted = handle.type
    return edge.source, edge.source_handle, edge.target_handle, wanted


class NodeWork:
    """The nodes of one run at work."""

    __slots__ = ("_events", "_nodes", "_runtime", "outputs")

    def __init__(self, runtime: GraphRuntime, nodes: NodePlan, events: NodeEvents) -> None:
        self._runtime = runtime
        self._nodes = nodes
        self._events = events
        self.outputs: dict[str, Mapping[str, DataValue]] = {}
        """What the nodes that have completed gave, by handle."""

    def run(self, node: int, place: ExecutionContext) -> Any:
        """The node's result, or an awaitable of it."""
        nodes = self._nodes
        spec = nodes.specs[node]
        if nodes.care is not None and nodes.care[node] is not None:
            return self._run_on_thread(node, spec, place)
        value = nodes.runs[node](thawed(spec.data), self._inputs(node), self._runtime._context_of(spec.id, place))
        if type(value) is ExecutionResult:
            return self._result(node, value, self._events.progress)
        return self._answer(node, value, self._events.progress)

    def keep(self, node: int, result: ExecutionResult) -> Collection[str] | None:
        """Keep what the node gave for those that come after it; the handles it used, None for all that lead on."""
        plan = self._nodes.plan
        given = self.outputs[plan.ids[node]] = dict(result.outputs)
        for handle in plan.successor_handles[node]:
            if handle not in given:
                return given.keys()
        return None

    # In a journal.

    def written(self, node: int, result: ExecutionResult) -> dict[str, Any]:
        """What the node gave, as JSON; NotRecordable names the handle of what is none."""
        for handle, given in result.outputs.items():
            must_be_json(f"node {self._nodes.plan.ids[node]!r}, handle {handle!r}", given.value)
        return {handle: _written(given) for handle, given in result.outputs.items()}

    def read(self, node: int, written: Mapping[str, Any]) -> ExecutionResult:
        """What the node gave when it ran."""
        return ExecutionResult({handle: _read(one) for handle, one in written.items()})

    # Values in.

    def _inputs(self, node: int) -> dict[str, DataValue]:
        nodes = self._nodes
        feed = nodes.feeds[node]
        if feed is not None:
            source, source_handle, target_handle, wanted = feed
            given = self.outputs.get(source, {}).get(source_handle)
            if given is not None and (wanted == ANY or given.type == wanted):
                return {target_handle: given}
        incoming, declared = nodes.incoming[node], nodes.inputs[node]
        if not incoming and not declared:
            return {}
        return route(nodes.plan.ids[node], incoming, self.outputs, declared, self._runtime.conversions)

    # The answer out.

    def _answer(self, node: int, value: Any, progress: Progress) -> Any:
        """The result in what an executor returned; an awaitable of it, if it is still to come."""
        if value is None:
            return NOTHING
        if isinstance(value, RESULTS):
            return self._result(node, value, progress)
        kind = type(value)
        if kind is Telling:
            return self._told(node, value)
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
            return self._result(node, answer, self._events.progress)
        if hasattr(type(answer), "__await__"):
            _discard(answer)
            raise self._misbehaved(node, "returned an awaitable of an awaitable")
        result = self._answer(node, answer, self._events.progress)
        return await result if type(result) is CoroutineType else result  # type: ignore[no-any-return]

    async def _told(self, node: int, telling: Telling) -> ExecutionResult:
        """The answer of an executor of ours; should telling fail, that is told, though whoever asks goes on."""
        events = self._events
        failed: list[Exception] = []

        def tell(name: str, data: Any) -> None:
            try:
                events.say(node, name, data)
            except Exception as error:
                failed.append(error)
                raise

        answer = await telling.to(tell)
        if failed:
            raise failed[0]
        await events.make_room()
        return self._result(node, answer, events.progress)

    async def _streamed(self, node: int, stream: AsyncIterable[Any]) -> ExecutionResult:
        result: ExecutionResult | None = None
        events = self._events
        iterator = aiter(stream)
        try:
            async for piece in iterator:
                result = self._piece(node, piece, result, events.progress)
                await events.make_room()
        finally:
            close = getattr(iterator, "aclose", None)
            if close is not None:
                await close()
        return NOTHING if result is None else result

    async def _drained(self, node: int, stream: Iterator[Any]) -> ExecutionResult:
        events = self._events
        pieces = self._pieces(node, stream, events.progress)
        try:
            while True:
                next(pieces)
                await events.make_room()
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        finally:
            pieces.close()

    def _pieces(self, node: int, stream: Iterator[Any], progress: Progress) -> Any:
        """Tell what a sync stream yields, one piece at a time, and return its result; a generator may return it too."""
        result: ExecutionResult | None = None
        try:
            while True:
                try:
                    piece = next(stream)
                except StopIteration as end:
                    if end.value is not None:
                        result = self._piece(node, end.value, result, progress)
                    break
                result = self._piece(node, piece, result, progress)
                yield
        finally:
            close = getattr(stream, "close", None)
            if close is not None:
                close()
        return NOTHING if result is None else result

    def _piece(
        self, node: int, piece: Any, result: ExecutionResult | None, progress: Progress
    ) -> ExecutionResult | None:
        if result is not None:
            raise self._misbehaved(node, f"went on after its result, with {shown(piece)}")
        if isinstance(piece, NodeEvent):
            self._tell(node, piece, progress)
            return None
        if isinstance(piece, RESULTS):
            return self._result(node, piece, progress)
        raise self._misbehaved(node, f"yielded {shown(piece)}, which is neither a NodeEvent nor a result")

    def _result(self, node: int, value: ExecutionResult | DataValue, progress: Progress) -> ExecutionResult:
        """The result, once everything in it is what it may be; its events are told."""
        result = ExecutionResult({DEFAULT_OUTPUT: value}) if isinstance(value, DataValue) else value
        outputs: object = result.outputs
        if type(outputs) is not dict:
            if not isinstance(outputs, Mapping):
                raise self._misbehaved(node, f"gave outputs that are {shown(outputs)}, and not values by handle")
            outputs = dict(outputs)
            result = ExecutionResult(outputs, result.events)
        declared = self._nodes.outputs[node]
        for name, one in outputs.items():
            if type(name) is not str:
                raise self._misbehaved(node, f"gave a value on {shown(name)}, which is no name of a handle")
            if type(one) is not DataValue and not isinstance(one, DataValue):
                raise self._misbehaved(node, f"gave {shown(one)} on handle {shown(name)}, which is no DataValue")
            if declared is not None and ((handle := declared.get(name)) is None or handle.channel != "flow"):
                known = ", ".join(handle.name for handle in declared.values() if handle.channel == "flow") or "none"
                raise self._misbehaved(node, f"gave a value on handle {shown(name)}; it declares: {known}")
        for event in result.events:
            self._tell(node, event, progress)
        return result

    def _tell(self, node: int, event: object, progress: Progress) -> None:
        named: object = event.event_type if isinstance(event, NodeEvent) else None
        if not isinstance(event, NodeEvent) or not isinstance(named, str) or not named:
            raise self._misbehaved(node, f"told {shown(event)}, which is no NodeEvent with a type")
        if event.event_type in LIFECYCLE:
            raise self._misbehaved(node, f"told that it is {event.event_type!r}: the lifecycle is told by the runtime")
        progress(node, event)

    def _misbehaved(self, node: int, what: str) -> ExecutorMisbehaved:
        spec = self._nodes.specs[node]
        return ExecutorMisbehaved(spec.id, spec.type, what)

    # On a thread.

    def _run_on_thread(self, node: int, spec: NodeSpec, place: ExecutionContext) -> ExecutionResult:
        def progress(node: int, event: NodeEvent) -> None:
            self._events.progress_from_thread(node, event, place)

        context = self._runtime._context_of(spec.id, place)
        value = self._nodes.runs[node](thawed(spec.data), self._inputs(node), context)
        kind = type(value)
        if hasattr(kind, "__await__") or hasattr(kind, "__aiter__"):
            _discard(value)
            raise self._misbehaved(node, "is blocking and returned something async")
        if not isinstance(value, RESULTS) and hasattr(kind, "__next__"):
            return _exhausted(self._pieces(node, value, progress))
        return self._answer(node, value, progress)  # type: ignore[no-any-return]


def _written(given: DataValue) -> dict[str, Any]:
    written = {"type": given.type, "value": given.value}
    return {**written, "finish_reason": given.finish_reason} if isinstance(given, PartialValue) else written


def _read(written: Mapping[str, Any]) -> DataValue:
    if "finish_reason" in written:
        return PartialValue(written["type"], written["value"], written["finish_reason"])
    return DataValue(written["type"], written["value"])


def _exhausted(pieces: Any) -> ExecutionResult:
    """The value that a generator returns."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def _discard(value: object) -> None:
    """A coroutine that nobody will await."""
    if type(value) is CoroutineType:
        value.close()
