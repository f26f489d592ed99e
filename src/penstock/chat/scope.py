"""Which agents of a graph the user talks to.

In a chat, the first agent on the way from where the chat starts is given what was said so far; an agent behind another
one is given what that one made of it, and nothing else. Who is first follows from the flow edges alone, through
whatever stands between. A link is composition, and no way from one agent to the next.

Knows two kinds of nodes, by types that are parameters, and one of their settings. Executors find the scope in their
services; neither the kernel nor the runtime looks at it. It is a fact about the graph and not about a run: an agent
behind a branch that is not taken stands behind it still.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from penstock.errors import InvalidValue
from penstock.kernel.graph import GraphSpec, NodeSpec

AGENT_TYPES = frozenset({"agent", "team"})
CHAT_START_TYPES = frozenset({"chat-start"})
INCLUDE_USER_TOOLS = "includeUserTools"
"""The setting of a chat-start that gives the agents it leads to the user's own tools; left out, it does not."""


class ChatScope:
    """What an agent may use of the chat it runs in, by the id of its node. Never changes."""

    __slots__ = ("_with_user_tools", "entry_agent_ids", "entry_node_ids")

    def __init__(
        self,
        graph: GraphSpec,
        entry_node_ids: Iterable[str] | None = None,
        *,
        agent_types: Collection[str] = AGENT_TYPES,
        chat_start_types: Collection[str] = CHAT_START_TYPES,
    ) -> None:
        nodes = {node.id: node for node in graph.nodes}
        starts = {id: node for id, node in nodes.items() if node.type in chat_start_types}
        self.entry_node_ids = _entries(nodes, starts if entry_node_ids is None else entry_node_ids)
        """Where a run of this chat begins: every chat-start, unless others were named."""
        after = _flow_successors(graph, nodes)
        active = _reached(self.entry_node_ids, after)
        agents = {id for id in active if nodes[id].type in agent_types}
        behind_agents = _reached((to for agent in agents for to in after.get(agent, ())), after)
        self.entry_agent_ids = frozenset(agents - behind_agents)
        """The agents with no agent before them on a way that the run can take."""
        include = {id: _includes_user_tools(start) for id, start in starts.items() if id in active}
        granted = _reached((id for id, does in include.items() if does), after)
        refused = _reached((id for id, does in include.items() if not does), after)
        self._with_user_tools = self.entry_agent_ids & granted - refused

    def is_entry_agent(self, node_id: str) -> bool:
        """Whether the node is an agent that the user talks to, and so is given what was said so far."""
        return node_id in self.entry_agent_ids

    def include_user_tools(self, node_id: str) -> bool:
        """Whether the node is an entry agent, and every chat-start that leads to it includes the user's own tools."""
        return node_id in self._with_user_tools

    def __repr__(self) -> str:
        return f"<ChatScope of {len(self.entry_agent_ids)} entry agents>"


def services_for(
    graph: GraphSpec,
    entry_node_ids: Iterable[str] | None = None,
    *,
    agent_types: Collection[str] = AGENT_TYPES,
    chat_start_types: Collection[str] = CHAT_START_TYPES,
) -> dict[str, Any]:
    """The services that make a run of `graph` one of a chat: its `chat_scope`, and where it begins."""
    scope = ChatScope(graph, entry_node_ids, agent_types=agent_types, chat_start_types=chat_start_types)
    if not scope.entry_node_ids:
        expected = f"at least one node to begin a chat with, such as one of type {', '.join(sorted(chat_start_types))}"
        raise InvalidValue("entry_node_ids", list(scope.entry_node_ids), expected)
    return {"chat_scope": scope, "execution": {"entry_node_ids": list(scope.entry_node_ids)}}


def _entries(nodes: Mapping[str, NodeSpec], named: Iterable[str]) -> tuple[str, ...]:
    if isinstance(named, (str, bytes)):
        raise InvalidValue("entry_node_ids", named, "a list of node ids")
    entries = tuple(dict.fromkeys(named))
    for id in entries:
        if id not in nodes:
            raise InvalidValue("entry_node_ids", id, "ids of nodes of the graph")
    return entries


def _flow_successors(graph: GraphSpec, nodes: Mapping[str, NodeSpec]) -> dict[str, list[str]]:
    """Where flow leads from each node; an edge to a node that is not there leads nowhere, and `validate` says so."""
    after: dict[str, list[str]] = {}
    for edge in graph.edges:
        if edge.channel == "flow" and edge.source in nodes and edge.target in nodes:
            after.setdefault(edge.source, []).append(edge.target)
    return after


def _reached(begin: Iterable[str], after: Mapping[str, list[str]]) -> set[str]:
    """The nodes of `begin`, and all that they lead to."""
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
