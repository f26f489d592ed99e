"""Which agents of a graph the user talks to.

In a chat, the first agent on each path from where the chat starts is an entry agent: it gets the conversation so far.
An agent downstream of another agent gets only that agent's payload. Which agents come first depends only on the flow
edges, through any nodes in between. A link is composition and not a path.

The rules apply inside containers too: nodes that run a graph from their data. A container is treated as if its graph
were inlined in its place, at any depth; the graph of a loop, as if it were inlined once per iteration.

Depends on three kinds of nodes, whose types are parameters, and on one setting. Executors find the scope in their
services; neither the kernel nor the runtime reads it. It is a property of the graph and not of a run: an agent
downstream of a branch that is not taken is still downstream of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from penstock import checks
from penstock.errors import InvalidValue
from penstock.kernel.document import parse_graph, parse_part
from penstock.kernel.graph import GraphInvalid, GraphSpec, NodeSpec
from penstock.runtime.graphs.graph_runtime import Services

AGENT_TYPES = frozenset({"agent", "program", "team"})
"""Types of nodes that answer: a program answers whether it is an agent or a graph."""
CHAT_START_TYPES = frozenset({"chat-start"})
CONTAINER_TYPES = frozenset({"subgraph", "loop", "map"})
"""Types of nodes that run the graph in their data's `graph`."""
INCLUDE_USER_TOOLS = "includeUserTools"
"""The setting of a chat-start that gives the user's own tools to the agents it leads to; off by default."""


Path = tuple[str, ...]
"""The ids of the containers around a node, the outermost first, and the id of the node."""
Successors = dict[Path, list[Path]]


class ChatScope:
    """Which parts of a chat each agent of a graph receives, by node id. Immutable."""

    __slots__ = ("_entry_agents", "_path", "_with_user_tools", "entry_node_ids")

    def __init__(
        self,
        graph: GraphSpec,
        entry_node_ids: Iterable[str] | None = None,
        *,
        agent_types: Collection[str] = AGENT_TYPES,
        chat_start_types: Collection[str] = CHAT_START_TYPES,
        container_types: Collection[str] = CONTAINER_TYPES,
    ) -> None:
        nodes, after = _flattened(graph, container_types)
        own = [node.id for node in graph.nodes]
        starts = {path: node for path, node in nodes.items() if node.type in chat_start_types}
        named = [id for id in own if (id,) in starts] if entry_node_ids is None else entry_node_ids
        self._path: Path = ()
        """The containers around the graph of this scope."""
        self.entry_node_ids = _entries(own, named)
        """The nodes that a run of this chat starts from: every chat-start, unless the caller named others."""
        active = _reached(((id,) for id in self.entry_node_ids), after)
        agents = {path for path in active if path in nodes and nodes[path].type in agent_types}
        behind_agents = _reached((to for agent in agents for to in after.get(agent, ())), after)
        self._entry_agents = frozenset(agents - behind_agents)
        include = {path: _includes_user_tools(start) for path, start in starts.items() if path in active}
        granted = _reached((path for path, does in include.items() if does), after)
        refused = _reached((path for path, does in include.items() if not does), after)
        self._with_user_tools = self._entry_agents & granted - refused

    @property
    def entry_agent_ids(self) -> frozenset[str]:
        """The agents of this graph with no agent upstream on any path that the run can take."""
        return frozenset(path[-1] for path in self._entry_agents if path[:-1] == self._path)

    @property
    def inner_entry_agents(self) -> frozenset[Path]:
        """The paths of the entry agents inside containers of this graph."""
        return frozenset(path for path in self._entry_agents if path[:-1] != self._path)

    def is_entry_agent(self, node_id: str) -> bool:
        """Whether the node is an agent that the user talks to, and so gets the conversation so far."""
        return (*self._path, node_id) in self._entry_agents

    def include_user_tools(self, node_id: str) -> bool:
        """Whether the node is an entry agent, and every chat-start that leads to it includes the user's own tools."""
        return (*self._path, node_id) in self._with_user_tools

    def inside(self, node_id: str, iteration: int = 1) -> ChatScope:
        """Return the scope of the graph inside a node.

        It has no entry agents from the second iteration of a loop on, because every agent of the loop's graph is then
        downstream of the previous iteration, nor for a node that is not a container, such as a tool.
        """
        checks.integer("iteration", iteration, minimum=1)
        inner = object.__new__(ChatScope)
        inner._path = (*self._path, node_id)
        inner.entry_node_ids = ()
        inner._entry_agents = self._entry_agents if iteration == 1 else frozenset()
        inner._with_user_tools = self._with_user_tools if iteration == 1 else frozenset()
        return inner

    def __repr__(self) -> str:
        return f"<ChatScope of {len(self.entry_agent_ids)} entry agents>"


def services_for(
    graph: GraphSpec,
    entry_node_ids: Iterable[str] | None = None,
    *,
    agent_types: Collection[str] = AGENT_TYPES,
    chat_start_types: Collection[str] = CHAT_START_TYPES,
    container_types: Collection[str] = CONTAINER_TYPES,
) -> Services:
    """Return the services for a chat run of `graph`: its `chat_scope`, and the nodes it starts from."""
    scope = ChatScope(
        graph,
        entry_node_ids,
        agent_types=agent_types,
        chat_start_types=chat_start_types,
        container_types=container_types,
    )
    if not scope.entry_node_ids:
        expected = f"at least one node to begin a chat with, such as one of type {', '.join(sorted(chat_start_types))}"
        raise InvalidValue("entry_node_ids", list(scope.entry_node_ids), expected)
    return Services(chat_scope=scope, execution=Services(entry_node_ids=list(scope.entry_node_ids)))


def _entries(own: Collection[str], named: Iterable[str]) -> tuple[str, ...]:
    if isinstance(named, (str, bytes)):
        raise InvalidValue("entry_node_ids", named, "a list of node ids")
    entries, known = tuple(dict.fromkeys(named)), frozenset(own)
    for id in entries:
        if id not in known:
            raise InvalidValue("entry_node_ids", id, "ids of nodes of the graph")
    return entries


def _flattened(graph: GraphSpec, container_types: Collection[str]) -> tuple[dict[Path, NodeSpec], Successors]:
    """Return every node by its path, and the flow successors of each path, with containers inlined.

    A container leads to the nodes of its graph, they lead to its exit, and the exit to the container's successors.
    """
    nodes: dict[Path, NodeSpec] = {}
    after: Successors = {}
    todo: list[tuple[Path, GraphSpec]] = [((), graph)]
    while todo:
        around, level = todo.pop()
        left_by: dict[str, Path] = {}
        """The path from which each node's outgoing flow starts: for a container, its exit."""
        for node in level.nodes:
            path = left_by[node.id] = (*around, node.id)
            nodes[path] = node
            inner = _graph_in(node, container_types, is_read=bool(around))
            if inner is not None:
                left_by[node.id] = _exit(path)
                after[path] = [_exit(path)]
                todo.append((path, inner))
        for edge in level.edges:  # skip edges with a missing end, which `validate` reports
            if edge.channel == "flow" and edge.source in left_by and edge.target in left_by:
                after.setdefault(left_by[edge.source], []).append((*around, edge.target))
        for id in _running(level) if around else ():
            after[around].append((*around, id))
            after.setdefault(left_by[id], []).append(_exit(around))
    return nodes, after


def _exit(container: Path) -> Path:
    return (*container, "")  # no node has an empty id


def _graph_in(node: NodeSpec, container_types: Collection[str], *, is_read: bool) -> GraphSpec | None:
    """Return the graph of a container, or None if it has no valid one, which `validate` reports.

    `parse_graph` bounds the depth and copies; graphs nested further inside were parsed with it (`is_read`).
    """
    document = node.data.get("graph") if node.type in container_types else None
    if not isinstance(document, Mapping):
        return None
    try:
        return parse_part(document) if is_read else parse_graph(document)
    except GraphInvalid:
        return None


def _running(graph: GraphSpec) -> list[str]:
    """Return the ids of the nodes that run in a container's graph: all except those that are only linked to others."""
    in_flow = {end for edge in graph.edges if edge.channel == "flow" for end in (edge.source, edge.target)}
    linked = {edge.source for edge in graph.edges if edge.channel == "link" and edge.source != edge.target}
    return [node.id for node in graph.nodes if node.id in in_flow or node.id not in linked]


def _reached(begin: Iterable[Path], after: Mapping[Path, list[Path]]) -> set[Path]:
    """Return the nodes of `begin` and all nodes reachable from them."""
    reached = set(begin)
    todo = list(reached)
    while todo:
        for to in after.get(todo.pop(), ()):
            if to not in reached:
                reached.add(to)
                todo.append(to)
    return reached


def _includes_user_tools(start: NodeSpec) -> bool:
    setting = start.data.get(INCLUDE_USER_TOOLS, False)
    if not isinstance(setting, bool):
        raise InvalidValue(f"{INCLUDE_USER_TOOLS} of node {start.id!r}", setting, "true or false")
    return setting
