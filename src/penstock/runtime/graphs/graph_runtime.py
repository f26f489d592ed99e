"""Runs a graph as an editor writes it, on the scheduler that runs every graph.

`GraphRuntime` is what executors see of the graph around them: nodes, edges, what links lead to, and a cache. `run_flow`
runs it and tells what becomes of every node, in this order and exactly once: `started`, before anything of the node
runs; whatever progress its executor tells; `completed`, `error` or `cancelled`. A node that nothing came to, or that a
limit did not let in, is `skipped` and nothing else.

Knows nodes, handles, edges, channels and values; what a node type does is its executor's business.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

from penstock.containment.safety import ChainMetadata
from penstock.errors import InvalidValue, PenstockError
from penstock.ids import new_run_id
from penstock.kernel.document import parse_graph
from penstock.kernel.executor import ExecutionResult, ExecutorRegistry
from penstock.kernel.graph import Channel, EdgeSpec, GraphSpec, NodeSpec, thawed
from penstock.kernel.links import Key
from penstock.kernel.settle import Settle, as_settle, frontier_for
from penstock.kernel.values import STANDARD_CONVERSIONS, DataValue
from penstock.runtime import door
from penstock.runtime.call import Call, running_call
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable import points
from penstock.runtime.durable.journal import Journal
from penstock.runtime.durable.keys import here
from penstock.runtime.durable.recording import RecordedNodes
from penstock.runtime.graphs.artifacts import Artifacts
from penstock.runtime.graphs.flow_context import FlowContext, entry_node_ids_in, execution_context_in
from penstock.runtime.graphs.graph_plan import GraphPlan
from penstock.runtime.graphs.node_events import NodeEvent, NodeEvents
from penstock.runtime.graphs.node_work import NodePlan, NodeWork
from penstock.runtime.scheduling.listener import Audience, Listener, Listening
from penstock.runtime.scheduling.scheduler import Behaviour, Scheduler

MAX_PARALLEL = 16
"""So many nodes run at once, unless the caller says otherwise."""

GraphDocument = GraphSpec | GraphPlan | str | bytes | bytearray | Mapping[str, Any]
"""A graph as it comes; one that is planned already has its executors."""
Executors = ExecutorRegistry | Mapping[str, Any] | None


class QuorumMissed(PenstockError):
    """The nodes that ran all ended, and fewer of the last ones than were needed had anything come to them."""

    def __init__(self, graph: str, settle: str) -> None:
        self.graph = graph
        self.settle = settle
        super().__init__(f"graph {graph!r} needs {settle} of its last nodes, and too few of them were reached")


class GraphRuntime:
    """A graph in one run: what its executors may ask of it. GraphInvalid if the graph cannot run."""

    __slots__ = (
        "_above",
        "_artifacts",
        "_cache",
        "_entries",
        "_place",
        "_plan",
        "_planned",
        "_recorded",
        "chat_id",
        "conversions",
        "executors",
        "graph",
        "run_id",
        "services",
        "state",
    )

    def __init__(
        self,
        graph: GraphDocument,
        *,
        run_id: str,
        chat_id: str | None = None,
        state: Any = None,
        services: Mapping[str, Any] | None = None,
        executors: Executors = None,
    ) -> None:
        self._plan = _plan(graph, executors)
        self.graph = self._plan.graph
        self.executors = self._plan.executors
        self.conversions = STANDARD_CONVERSIONS
        self.run_id = run_id
        self.chat_id = chat_id
        self.state = {} if state is None else state
        self.services = _mapping(services)
        self._cache: dict[Any, Any] = {}
        self._artifacts: Artifacts | None = None
        """Made when a link is first followed."""
        self._place: ExecutionContext | None = None
        """Where the nodes run, while they do."""
        self._above: Call | None = None
        """The call under which what links lead to is made: it outlives every node."""
        self._recorded: RecordedNodes | None = None
        """What the journal of the run has of them, while they do."""
        self._entries = entry_node_ids_in(self.services)
        self._planned = self._plan.beginning_with(self._entries)

    # What executors ask.

    def get_node(self, node_id: str) -> NodeSpec:
        """The node of that id."""
        try:
            return self._plan.nodes[node_id]
        except (KeyError, TypeError):
            raise InvalidValue("node_id", node_id, f"the id of a node of graph {self.graph.id!r}") from None

    def incoming_edges(
        self, node_id: str, channel: Channel | None = None, target_handle: str | None = None
    ) -> list[EdgeSpec]:
        """The edges into a node, in the order of the graph; those of a channel or a handle alone, if one is named."""
        edges = self._plan.incoming.get(self.get_node(node_id).id, ())
        return [
            edge for edge in edges if channel in (None, edge.channel) and target_handle in (None, edge.target_handle)
        ]

    def outgoing_edges(
        self, node_id: str, channel: Channel | None = None, source_handle: str | None = None
    ) -> list[EdgeSpec]:
        """The edges out of a node, in the order of the graph; those of a channel or a handle alone, if one is named."""
        edges = self._plan.outgoing.get(self.get_node(node_id).id, ())
        return [
            edge for edge in edges if channel in (None, edge.channel) and source_handle in (None, edge.source_handle)
        ]

    async def resolve_links(self, node_id: str, target_handle: str) -> list[Any]:
        """What is linked into a handle, in the order of the edges; each artifact is made once per run."""
        edges = self.incoming_edges(node_id, "link", target_handle)
        return await self._linked([(edge.source, edge.source_handle) for edge in edges])

    async def materialize_output(self, node_id: str, output_handle: str) -> Any:
        """The artifact on a node's output handle, made once per run; LinkCycle if it needs itself."""
        return (await self._linked([(self.get_node(node_id).id, output_handle)]))[0]

    def cache_get(self, key: Any, default: Any = None) -> Any:
        """What was kept under `key` in this run."""
        return self._cache.get(key, default)

    def cache_set(self, key: Any, value: Any) -> None:
        """Keep a value for the other nodes of this run."""
        self._cache[key] = value

    def __repr__(self) -> str:
        return f"<GraphRuntime of {self.graph.id!r} in run {self.run_id!r}>"

    # Inside.

    def _context_of(self, node_id: str, place: ExecutionContext) -> FlowContext:
        return FlowContext(node_id, self.chat_id, self.run_id, self.state, self, self.services, place)

    async def _linked(self, keys: list[Key]) -> list[Any]:
        if not keys:
            return []
        if self._artifacts is None:
            self._artifacts = Artifacts(self._make)
        self._artifacts.above = self._above
        return await self._artifacts.get(keys)

    async def _make(self, key: Key) -> Any:
        """Make an artifact, as a call of the run."""
        node_id, handle = key
        node = self._plan.nodes[node_id]
        place = self._place or execution_context_in(self.services)
        if place is None:
            raise InvalidValue("services", self.services, "a mapping with an `execution_context` when no run is on")
        materialize = getattr(self.executors[node.type], "materialize", None)
        if materialize is None:
            raise InvalidValue("node_id", node_id, f"a node that can be linked to; {node.type!r} has no materialize()")
        if self._recorded is not None:
            here.set(self._recorded.place.node(node_id).mark("link", handle))
        args = (thawed(node.data), handle, self._context_of(node_id, place))
        name = f"materialize {node_id}.{handle}"
        return (await door.acall(place, "system", materialize, args, name, None, None, None, 0, None)).result()

    def _bind(self, context: FlowContext) -> None:
        """What a context says holds for the run, in place of what the runtime was made with."""
        self.run_id = context.run_id or self.run_id
        self.chat_id = self.chat_id if context.chat_id is None else context.chat_id
        self.state = self.state if context.state is None else context.state
        self.services = {**self.services, **_mapping(context.services)}
        entries = entry_node_ids_in(self.services)
        if entries != self._entries:
            self._planned = self._plan.beginning_with(entries)
            self._entries = entries


async def run_flow(
    graph: GraphDocument | GraphRuntime,
    context: ExecutionContext | FlowContext,
    executors: Executors = None,
    *,
    settle: Settle = "fail_fast",
    max_parallel: int = MAX_PARALLEL,
) -> AsyncGenerator[NodeEvent | ExecutionResult, None]:
    """Run a graph: what becomes of its nodes as it happens and, last, the outputs of the last nodes that ran.

    Raises GraphInvalid before anything runs; at the end, after every terminal event, what stopped it: a node's error,
    BudgetExceededError, CancelledError. Leaving it in the middle cancels the graph. Close it (`contextlib.aclosing`) to
    wait until that is done.
    """
    settle = as_settle(settle)
    _check_parallel(max_parallel)
    runtime = _runtime(graph, context, executors)
    given = _execution_context(context, runtime)
    within = _unlimited(runtime) if given is None else given
    token = within._token.child(f"run of {runtime.graph.id}")
    result = ExecutionResult()

    async def run(listener: Listener[NodeEvent]) -> None:
        nonlocal result
        result = await _Flow(runtime, within._under(token), settle, max_parallel, listener).run()

    try:
        async with Listening(run, token) as listener:
            while await listener.has_more():
                while listener.events:
                    yield listener.events.popleft()
    except BaseException as error:
        if given is None:
            within.end(error)
        raise
    if given is None:
        within.end()
    yield result


async def tell_flow(graph: GraphPlan, context: FlowContext, audience: Audience[NodeEvent]) -> ExecutionResult:
    """`run_flow` in the task of the caller: what becomes of nodes is told as it happens; the outputs of the last ones.

    The context has an ExecutionContext. Nobody can leave this in the middle but by a cancel.
    """
    runtime = _runtime(graph, context, None)
    return await _Flow(runtime, context.execution, "fail_fast", MAX_PARALLEL, audience).run()


class _Flow:
    """One graph, run once."""

    def __init__(
        self,
        runtime: GraphRuntime,
        context: ExecutionContext,
        settle: Settle,
        max_parallel: int,
        listener: Audience[NodeEvent],
    ) -> None:
        self._runtime = runtime
        self._nodes: NodePlan = runtime._planned
        self._settle = settle
        self._events = NodeEvents(listener, self._nodes.specs, context, runtime.run_id)
        self._work = work = NodeWork(runtime, self._nodes, self._events)
        behaviour = Behaviour(
            work.run, self._nodes.about, self._nodes.care, keep=work.keep, tell=self._events.lifecycle
        )
        journal = context._run.journal
        if journal is not None:
            behaviour.durable = self._recorded(journal)
        frontier = frontier_for(self._nodes.plan, settle)
        self._scheduler = Scheduler(context, runtime.graph.id, frontier, behaviour, max_parallel)

    def _recorded(self, journal: Journal) -> RecordedNodes:
        """The nodes in the journal of the run."""
        nodes, work = self._nodes, self._work
        recorded = RecordedNodes(
            journal,
            nodes.plan.ids,
            work.written,
            work.read,
            about=nodes.about,
            state=self._runtime.state,
            pure=nodes.pure,
        )
        self._events.replayed = recorded.replayed
        return recorded

    async def run(self) -> ExecutionResult:
        """The outputs of the last nodes that ran."""
        runtime, scheduler = self._runtime, self._scheduler
        if runtime._place is not None:
            raise InvalidValue("graph", runtime, "a GraphRuntime that is not running already")
        runtime._place, runtime._above = scheduler.place, running_call.get()
        runtime._recorded = scheduler.durable
        try:
            await scheduler.execute()
        finally:
            runtime._place = runtime._above = runtime._recorded = None
        if points.hook is not None:
            points.hook("graph.after_last_node")
        if getattr(scheduler.frontier, "is_won", True) is False and not scheduler.errors:
            raise QuorumMissed(runtime.graph.id, str(self._settle))
        return ExecutionResult(self._last_outputs())

    def _last_outputs(self) -> dict[str, DataValue]:
        """What nobody took: the outputs of nodes that led to none that ran, under their handles if it is one node."""
        plan, outputs, started = self._nodes.plan, self._work.outputs, self._events.started
        last = [
            one
            for one, given in outputs.items()
            if not any(
                handle in given and after in started
                for after, handle in zip(
                    plan.successors[plan.index[one]], plan.successor_handles[plan.index[one]], strict=True
                )
            )
        ]
        if len(last) == 1:
            return dict(outputs[last[0]])
        in_order = sorted(last, key=plan.index.__getitem__)
        return {f"{one}.{handle}": value for one in in_order for handle, value in outputs[one].items()}


def _plan(graph: GraphDocument, executors: Executors) -> GraphPlan:
    if isinstance(graph, GraphPlan):
        if executors is not None:
            raise InvalidValue("executors", executors, "left out with a GraphPlan, which has its own")
        return graph
    return GraphPlan(graph if isinstance(graph, GraphSpec) else parse_graph(graph), _registry(executors))


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
    """The context to run in, if there is one."""
    if isinstance(context, ExecutionContext):
        found: ExecutionContext | None = context
    else:
        found = context._execution or execution_context_in(runtime.services)
    if found is not None:
        found._must_be_open(f"graph {runtime.graph.id!r}")
        runtime.run_id = runtime.run_id or found.run_id
    return found


def _unlimited(runtime: GraphRuntime) -> ExecutionContext:
    """A run without limits, for a graph that was given none."""
    runtime.run_id = run_id = runtime.run_id or new_run_id()
    return ExecutionContext(metadata=ChainMetadata(request_id=run_id, chain_id=run_id), name=runtime.graph.id)


def _check_parallel(given: object) -> None:
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise InvalidValue("max_parallel", given, "a whole number of nodes, one or more")


def _registry(executors: Executors) -> ExecutorRegistry:
    if executors is None:
        return ExecutorRegistry.from_entry_points()
    if isinstance(executors, ExecutorRegistry):
        return executors
    if not isinstance(executors, Mapping):
        raise InvalidValue("executors", executors, "an ExecutorRegistry, or executors by type")
    return ExecutorRegistry(executors)


def _mapping(services: object) -> Mapping[str, Any]:
    if services is None:
        return {}
    if not isinstance(services, (dict, Mapping)):  # a dict is known for one at once, a Mapping is asked for
        raise InvalidValue("services", services, "a mapping of names to services")
    return services
