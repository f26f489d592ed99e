"""The arguments of an executor of a JSON graph: services, the context of its node, and the graph around it.

`GraphPlan` is a graph with its executors, analysed once and shared by any number of runs. Nothing in a plan changes
from run to run, and it holds no state of a run. Its owner must not change the graph or its executors.

`GraphRuntime` is one graph in one run: its nodes and edges, linked artifacts, and a cache. `FlowContext` is passed to a
node beside its data and its inputs. `Services` are the dependencies of executors by name: `services["clock"]` and
`services.clock` are the same. A caller passes a mapping, or an object whose public attributes are the services.

Knows no node type: the contents of `state` and `services` are agreed between the code that sets them and the code that
reads them. Two names in `services` belong to the runtime: `execution_context`, the context that calls are made with,
and `execution`, whose `entry_node_ids` may name the nodes where the run begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.errors import InvalidValue
from penstock.kernel.document import is_large, parse_graph
from penstock.kernel.executor import ANY, STANDARD_CONVERSIONS, ExecutorRegistry, Handle
from penstock.kernel.graph import Channel, EdgeSpec, GraphSpec, NodeSpec, thawed
from penstock.kernel.links import Key
from penstock.kernel.plan import Plan
from penstock.runtime import execution
from penstock.runtime.call import Call, CallSpec
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable.keys import current_scope
from penstock.runtime.graphs.artifacts import Artifacts
from penstock.runtime.graphs.node_options import linked_data, options_of, own_data
from penstock.runtime.graphs.validation import compile_graph
from penstock.runtime.scheduling.recording import RecordedNodes
from penstock.runtime.scheduling.recovery import StepOptions

T = TypeVar("T")

Feed = tuple[str, str, str, str]
"""The only edge into a node: source, source handle, target handle, and the type the target handle accepts."""

MAX_ENTRIES = 64
"""Maximum number of entry-node combinations cached for one graph."""


@dataclass(frozen=True, slots=True)
class NodePlan:
    """The nodes of a plan by number, each with everything needed to run it."""

    plan: Plan
    specs: list[NodeSpec]
    data: list[Mapping[str, Any]]
    """The settings of each node's executor."""
    runs: list[Callable[..., Any]]
    """Each node's `execute`."""
    inputs: list[Mapping[str, Handle] | None]
    outputs: list[Mapping[str, Handle] | None]
    incoming: list[tuple[EdgeSpec, ...]]
    """The flow edges into each node, in the order of the graph."""
    feeds: list[Feed | None]
    """The single edge of each node whose one value needs no routing."""
    calls: list[CallSpec]
    options: list[StepOptions | None] | None
    pure: frozenset[int]
    """Nodes whose executor declares that they always return the same, call nothing and change nothing."""


def plan_nodes(
    plan: Plan, nodes: Mapping[str, NodeSpec], incoming: Mapping[str, list[EdgeSpec]], executors: ExecutorRegistry
) -> NodePlan:
    """Look up once everything needed to run the nodes of `plan`."""
    specs = [nodes[one] for one in plan.ids]
    behind = {one: executors[one] for one in {spec.type for spec in specs}}
    inputs = {one: executors.handles(one, "inputs") for one in behind}
    outputs = {one: executors.handles(one, "outputs") for one in behind}
    metadata = {one: {"node_type": one} for one in behind}
    blocking = {one for one, executor in behind.items() if getattr(executor, "blocking", False)}
    options = [options_of(spec, spec.type in blocking) for spec in specs]
    arriving = [tuple([edge for edge in incoming.get(one, ()) if edge.channel == "flow"]) for one in plan.ids]
    return NodePlan(
        plan,
        specs,
        [own_data(spec.data) for spec in specs],
        [behind[spec.type].execute for spec in specs],
        [inputs[spec.type] for spec in specs],
        [outputs[spec.type] for spec in specs],
        arriving,
        [_feed(edges, inputs[spec.type]) for spec, edges in zip(specs, arriving, strict=True)],
        [CallSpec("system", spec.id, metadata=metadata[spec.type]) for spec in specs],
        options if any(options) else None,
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


class GraphPlan:
    """A graph that any number of runs can share, with a plan for each combination of entry nodes."""

    __slots__ = ("_by_entries", "_inside", "_is_large", "executors", "graph", "incoming", "nodes", "outgoing")

    def __init__(self, graph: GraphSpec, executors: ExecutorRegistry, *, is_large: bool = False) -> None:
        self.graph = graph
        self.executors = executors
        self.nodes = {node.id: node for node in graph.nodes}
        self.incoming: dict[str, list[EdgeSpec]] = {}
        self.outgoing: dict[str, list[EdgeSpec]] = {}
        for edge in graph.edges:
            self.incoming.setdefault(edge.target, []).append(edge)
            self.outgoing.setdefault(edge.source, []).append(edge)
        self._by_entries: dict[tuple[str, ...] | None, NodePlan] = {}
        self._inside: dict[str, tuple[str, GraphPlan]] = {}
        """Graphs in the data of nodes, by node id, each with the text it was read from; small graphs only."""
        self._is_large = is_large

    @classmethod
    async def of(cls, document: Mapping[str, Any], executors: ExecutorRegistry) -> GraphPlan:
        """Parse the graph in a document; a large one is parsed on a thread."""
        graph = await aside(document, parse_graph)
        return cls(graph, executors, is_large=is_large(document))

    def with_executors(self, executors: ExecutorRegistry) -> GraphPlan:
        """Return a plan of the same graph with other executors."""
        return GraphPlan(self.graph, executors, is_large=self._is_large)

    async def get_ready(self, entries: Sequence[str] | None = None) -> None:
        """Prepare to begin with these nodes without blocking the event loop: a large graph is analysed on a thread."""
        if self._is_large and _has_threads():
            await asyncio.to_thread(self.beginning_with, entries)

    async def inside(self, node_id: str, document: Mapping[str, Any]) -> GraphPlan:
        """Return the graph in a node's data, shared by all runs of that node; a large one is parsed each time."""
        written = None if is_large(document) else _written(document)
        known = self._inside.get(node_id)
        if known is not None and known[0] == written:
            return known[1]
        plan = await GraphPlan.of(document, self.executors)
        await plan.get_ready()
        if written is not None:
            self._inside[node_id] = written, plan
        return plan

    def beginning_with(self, entries: Sequence[str] | None) -> NodePlan:
        """Return the plan from these nodes, or from all without predecessors; raises GraphInvalid if it cannot run."""
        key = None if entries is None else tuple(entries)
        known = self._by_entries.get(key) if _are_names(key) else None
        if known is None:
            plan = compile_graph(self.graph, self.executors, entries=entries)
            known = plan_nodes(plan, self.nodes, self.incoming, self.executors)
            if len(self._by_entries) >= MAX_ENTRIES:
                self._by_entries.clear()
            self._by_entries[key] = known
        return known


async def aside(document: Mapping[str, Any], read: Callable[[Mapping[str, Any]], T]) -> T:
    """Apply `read` to a document: on a thread if it is large, so that the event loop is not blocked."""
    return await asyncio.to_thread(read, document) if is_large(document) and _has_threads() else read(document)


def _has_threads() -> bool:
    """Return whether the loop supports threads; a loop with a reproducible schedule does not."""
    return getattr(asyncio.get_running_loop(), "has_threads", True)


def _written(document: Mapping[str, Any]) -> str | None:
    """Return a text that identifies the document and distinguishes 1, True and 1.0; None if there is none."""
    try:
        return repr(document)
    except Exception:  # contains objects that are not JSON, or is nested too deeply
        return None


def _are_names(entries: Sequence[object] | None) -> bool:
    return entries is None or all(isinstance(one, str) for one in entries)


GraphDocument = GraphSpec | GraphPlan | str | bytes | bytearray | Mapping[str, Any]
"""A graph in any accepted form; a GraphPlan already has its executors."""
Executors = ExecutorRegistry | Mapping[str, Any] | None


class Services(dict[str, Any]):
    """Services by name, as items and as attributes. A service with the name of a `dict` method is an item only."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            known = ", ".join(sorted(self)) or "none"
            raise AttributeError(f"there is no service {name!r}; there are: {known}", name=name, obj=self) from None


def as_services(given: object) -> Services:
    """Convert a caller's services; raises InvalidValue if they are neither a mapping of names nor an object.

    They are read once: a service added to `given` later is not seen. `execution` may be a mapping or an object.
    """
    if type(given) is Services:
        return given
    if given is None:
        return Services()
    if isinstance(given, (dict, Mapping)):  # a dict is recognised immediately, a Mapping takes a subclass check
        services = Services(given)
        for name in services:
            if not isinstance(name, str):
                raise InvalidValue("services", name, "a mapping whose keys are names")
    elif _has_attributes(given):
        services = Services({name: getattr(given, name) for name in dir(given) if not name.startswith("_")})
    else:
        expected = "a mapping of names to services, or an object that has them as attributes"
        raise InvalidValue("services", given, expected)
    execution = services.get("execution")
    if isinstance(execution, (dict, Mapping)):
        services["execution"] = Services(execution)
    elif execution is not None and not _has_attributes(execution):
        raise InvalidValue("services['execution']", execution, "a mapping or an object with `entry_node_ids`")
    return services


def _has_attributes(given: object) -> bool:
    """Return whether it is an instance of a class outside of `builtins`, and not a class or a run."""
    return type(given).__module__ != "builtins" and not isinstance(given, type | ExecutionContext)


class FlowContext:
    """The context an executor receives beside its data and its inputs."""

    __slots__ = ("_execution", "chat_id", "node_id", "run_id", "runtime", "services", "state")

    def __init__(
        self,
        node_id: str | None = None,
        chat_id: str | None = None,
        run_id: str | None = None,
        state: Any = None,
        runtime: GraphRuntime | None = None,
        services: Mapping[str, Any] | object | None = None,
        execution: ExecutionContext | None = None,
    ) -> None:
        self.node_id = node_id
        self.chat_id = chat_id
        self.run_id = run_id
        self.state = state
        """State shared by the nodes of a run: a dict, unless the run was given something else."""
        self.runtime = runtime
        """The graph around the node, and the artifacts it links to."""
        self.services = services if type(services) is Services else as_services(services)
        """Dependencies of executors, by name: `services["clock"]` or `services.clock`."""
        self._execution = execution

    @property
    def execution(self) -> ExecutionContext:
        """The context for calls: they are recorded under this node, and subject to the limits of the run."""
        found = self._execution if self._execution is not None else execution_context_in(self.services)
        if found is None:
            raise InvalidValue("services", self.services, "a mapping with an ExecutionContext as `execution_context`")
        return found

    def __repr__(self) -> str:
        return f"<FlowContext of node {self.node_id!r} in run {self.run_id!r}>"


def execution_context_in(services: Mapping[str, Any]) -> ExecutionContext | None:
    """Return the execution context in `services`, or None; raises InvalidValue if it is something else."""
    found = services.get("execution_context")
    if found is not None and not isinstance(found, ExecutionContext):
        raise InvalidValue("services['execution_context']", found, "an ExecutionContext, or left out")
    return found


def entry_node_ids_in(services: Mapping[str, Any]) -> list[str] | None:
    """Return the nodes at which `services` let a run begin; None if they do not name any."""
    scope = services.get("execution")
    if scope is None:
        return None
    is_mapping = isinstance(scope, (dict, Mapping))  # fast for a dict; a Mapping needs a subclass check
    named = scope.get("entry_node_ids") if is_mapping else getattr(scope, "entry_node_ids", None)
    if named is None:
        return None
    if isinstance(named, str | bytes) or not hasattr(named, "__iter__"):
        raise InvalidValue("entry_node_ids", named, "a list of node ids")
    return list(named)


class GraphRuntime:
    """A graph in one run, as its executors see it. Raises GraphInvalid if the graph cannot run."""

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
        services: Mapping[str, Any] | object | None = None,
        executors: Executors = None,
    ) -> None:
        self._plan = _plan(graph, executors)
        self.graph = self._plan.graph
        self.executors = self._plan.executors
        self.conversions = STANDARD_CONVERSIONS
        self.run_id = run_id
        self.chat_id = chat_id
        self.state = {} if state is None else state
        self.services = as_services(services)
        self._cache: dict[Any, Any] = {}
        self._artifacts: Artifacts | None = None
        """Created when a link is first followed."""
        self._place: ExecutionContext | None = None
        """Where the nodes run; None while the graph is not running."""
        self._above: Call | None = None
        """The call under which linked artifacts are made: it outlives every node."""
        self._recorded: RecordedNodes | None = None
        """The recorded nodes of the run's journal; None while the graph is not running."""
        self._entries = entry_node_ids_in(self.services)
        self._planned = self._plan.beginning_with(self._entries)

    # For executors.

    def get_node(self, node_id: str) -> NodeSpec:
        """Return the node of that id; raises InvalidValue if the graph has none."""
        try:
            return self._plan.nodes[node_id]
        except (KeyError, TypeError):
            raise InvalidValue("node_id", node_id, f"the id of a node of graph {self.graph.id!r}") from None

    def incoming_edges(
        self, node_id: str, channel: Channel | None = None, target_handle: str | None = None
    ) -> list[EdgeSpec]:
        """Return the edges into a node, in the order of the graph, optionally of one channel or handle only."""
        edges = self._plan.incoming.get(self.get_node(node_id).id, ())
        return [
            edge for edge in edges if channel in (None, edge.channel) and target_handle in (None, edge.target_handle)
        ]

    def outgoing_edges(
        self, node_id: str, channel: Channel | None = None, source_handle: str | None = None
    ) -> list[EdgeSpec]:
        """Return the edges out of a node, in the order of the graph, optionally of one channel or handle only."""
        edges = self._plan.outgoing.get(self.get_node(node_id).id, ())
        return [
            edge for edge in edges if channel in (None, edge.channel) and source_handle in (None, edge.source_handle)
        ]

    async def resolve_links(self, node_id: str, target_handle: str) -> list[Any]:
        """Return the artifacts linked into a handle, in the order of the edges; each is made once per run."""
        edges = self.incoming_edges(node_id, "link", target_handle)
        return await self._linked([(edge.source, edge.source_handle) for edge in edges])

    async def materialize_output(self, node_id: str, output_handle: str) -> Any:
        """Return the artifact on a node's output handle, made once per run; raises LinkCycle if it needs itself."""
        return (await self._linked([(self.get_node(node_id).id, output_handle)]))[0]

    def cache_get(self, key: Any, default: Any = None) -> Any:
        """Return the value cached under `key` in this run."""
        return self._cache.get(key, default)

    def cache_set(self, key: Any, value: Any) -> None:
        """Cache a value for the other nodes of this run."""
        self._cache[key] = value

    def __repr__(self) -> str:
        return f"<GraphRuntime of {self.graph.id!r} in run {self.run_id!r}>"

    # Internals.

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
            current_scope.set(self._recorded.place.node(node_id).child("link", handle))
        args = (thawed(linked_data(node.data)), handle, self._context_of(node_id, place))
        spec = CallSpec("system", f"materialize {node_id}.{handle}")
        return (await execution.run_async(place, spec, materialize, args)).result()

    def _bind(self, context: FlowContext) -> None:
        """Replace the runtime's values with those the context sets."""
        self.run_id = context.run_id or self.run_id
        self.chat_id = self.chat_id if context.chat_id is None else context.chat_id
        self.state = self.state if context.state is None else context.state
        self.services = as_services({**self.services, **context.services})
        entries = entry_node_ids_in(self.services)
        if entries != self._entries:
            self._planned = self._plan.beginning_with(entries)
            self._entries = entries


def _plan(graph: GraphDocument, executors: Executors) -> GraphPlan:
    if isinstance(graph, GraphPlan):
        if executors is not None:
            raise InvalidValue("executors", executors, "left out with a GraphPlan, which has its own")
        return graph
    return GraphPlan(graph if isinstance(graph, GraphSpec) else parse_graph(graph), _registry(executors))


def _registry(executors: Executors) -> ExecutorRegistry:
    if executors is None:
        return ExecutorRegistry.from_entry_points()
    if isinstance(executors, ExecutorRegistry):
        return executors
    if not isinstance(executors, Mapping):
        raise InvalidValue("executors", executors, "an ExecutorRegistry, or executors by type")
    return ExecutorRegistry(executors)
