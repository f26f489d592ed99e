"""Entry agents: the agents of a graph that a user talks to, and whether they can apply the options of a request.

Tools of the client, settings and output formats apply to the entry agents of a graph: agents with nothing but a
chat-start and plain nodes before them. Entry agents may be inside subgraphs, or written in Python. An option that
cannot be applied is refused by the name of its parameter, before a run starts. No options can be applied to a graph
without an entry agent, a team, a graph written in Python, or an agent inside a loop or a map, which runs it several
times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.agents.agent import Agent
from penstock.agents.model import Model
from penstock.chat.scope import ChatScope
from penstock.chat.turn import chat_services
from penstock.errors import InvalidValue, PenstockError
from penstock.hosting.ports import GraphRecord
from penstock.kernel.document import parse_graph, parse_part
from penstock.kernel.graph import GraphInvalid, GraphSpec, NodeSpec
from penstock.nodes.agent import AgentData, AgentNode
from penstock.nodes.client_tools import ClientRequest, can_use_client_tools
from penstock.nodes.parts.services import model_among
from penstock.nodes.program import Program, program_kind
from penstock.runtime.graphs.graph_runtime import aside
from penstock.server.graph_check import is_chat_entered
from penstock.server.openai.wire.answer import answering_nodes
from penstock.server.openai.wire.options import Options, UnsupportedParameter

NOT_SETTINGS = frozenset({"tools", "schema", "output_schema"})
TRANSPARENT = "subgraph"
"""The type of containers that run once, so that their entry agents are also entry agents of the graph."""


@dataclass(frozen=True, slots=True)
class EntryAgent:
    """An agent that the user talks to."""

    id: str
    """Node ids of the containers around it and its own, joined by slashes."""
    about: AgentData | str
    """The data of its node, or the name of the Python program."""
    is_answering: bool
    """Whether its output is the graph's."""

    @property
    def name(self) -> str:
        """Its name in messages: that of its program, or its id."""
        return self.about if isinstance(self.about, str) else self.id


@dataclass(frozen=True, slots=True)
class EntryAgents:
    """The entry agents of a graph."""

    agents: tuple[EntryAgent, ...] = ()
    why_not: str = ""
    """Why no options can be applied to them; empty if options can."""


class _NotApplicable(Exception):  # never leaves this module
    """Why no options can be applied."""


async def entry_agents(record: GraphRecord) -> EntryAgents:
    """Return the entry agents of a graph."""
    if not is_chat_entered(record):
        return EntryAgents(why_not=f"the graph {record.id!r} has no chat-start, and so no agent that the user talks to")
    try:
        found: EntryAgents = await aside(record.document, lambda document: _find(record.id, document))
    except (GraphInvalid, InvalidValue):  # reported when a run is requested
        return EntryAgents(why_not=f"the graph {record.id!r} cannot run")
    return found


def _find(graph_id: str, document: Any) -> EntryAgents:
    graph = parse_graph(document)
    scope: ChatScope = chat_services(graph)["chat_scope"]
    paths = sorted({(id,) for id in scope.entry_agent_ids} | scope.inner_entry_agents)
    if not paths:
        return EntryAgents(why_not=f"the graph {graph_id!r} has no agent that the user talks to")
    try:
        return EntryAgents(tuple(_entry_agent(path, graph, document) for path in paths))
    except _NotApplicable as why:
        return EntryAgents(why_not=f"the user of graph {graph_id!r} talks to {why}, which takes only messages")


def _entry_agent(path: tuple[str, ...], graph: GraphSpec, document: Any) -> EntryAgent:
    is_answering = True
    for container_id in path[:-1]:
        container = _node(graph, container_id)
        if container.type != TRANSPARENT:
            raise _NotApplicable(f"an agent inside node {container_id!r}, a {container.type}")
        is_answering = is_answering and container_id in answering_nodes(document)
        document = container.data["graph"]
        graph = parse_part(document)
    node = _node(graph, path[-1])
    return EntryAgent("/".join(path), _about(node), is_answering and node.id in answering_nodes(document))


def _node(graph: GraphSpec, id: str) -> NodeSpec:
    return next(node for node in graph.nodes if node.id == id)


def _about(node: NodeSpec) -> AgentData | str:
    if node.type == "agent":
        return AgentNode.settings.read(node.data)
    if node.type == "program" and program_kind(node.data) == "agent":
        return str(node.data["program"])
    if node.type == "program":
        raise _NotApplicable(f"{node.data['program']!r}, a graph in Python")
    raise _NotApplicable(f"node {node.id!r}, a {node.type}")


async def check_options(
    options: Options, entry: EntryAgents, models: Mapping[str, Any], programs: Mapping[str, Program], wait_s: float
) -> ClientRequest | None:
    """Convert the options for a run; None if there are none. Raise UnsupportedParameter if one cannot be applied."""
    params = options.params
    if not params:
        return None
    if entry.why_not:
        raise UnsupportedParameter(next(iter(params.values())), entry.why_not)
    is_strict = options.is_strict
    for agent in entry.agents:
        if options.schema is not None:
            _check_format(params["schema"], agent, programs)
        model = await _model_of(agent, models, programs, next(iter(params.values())))
        if model is None:
            continue
        for setting, param in params.items():
            if setting not in NOT_SETTINGS and setting not in model.applies:
                raise UnsupportedParameter(
                    param, f"the model of agent {agent.name!r} ({_shown(agent)}) cannot apply it"
                )
        is_strict = is_strict and "output_schema" in model.applies
    ends = all(agent.is_answering for agent in entry.agents)
    return ClientRequest(options.tools, options.settings, options.schema, is_strict, wait_s, ends)


def _check_format(param: str, agent: EntryAgent, programs: Mapping[str, Program]) -> None:
    if not agent.is_answering:
        why = f"the answer of agent {agent.name!r} is not that of the graph: other nodes follow it"
        raise UnsupportedParameter(param, why)
    if isinstance(agent.about, AgentData):
        has_format = agent.about.output is not None
    else:
        target = _target(agent.about, programs)
        has_format = target is not None and getattr(target.loop, "output", None) is not None
    if has_format:
        raise UnsupportedParameter(param, f"agent {agent.name!r} has an output format of its own")


async def _model_of(
    agent: EntryAgent, models: Mapping[str, Any], programs: Mapping[str, Program], param: str
) -> Model | None:
    """Return the model of an agent; None if there is no such model or program, which the run reports."""
    if isinstance(agent.about, AgentData):
        try:
            return await model_among(agent.about.model, models)
        except PenstockError:
            return None
    target = _target(agent.about, programs)
    if target is not None and not can_use_client_tools(target):
        why = f"agent {agent.name!r} runs a loop of its own ({type(target.loop).__name__}), which takes only messages"
        raise UnsupportedParameter(param, why)
    return None if target is None else target.model


def _target(name: str, programs: Mapping[str, Program]) -> Agent | None:
    target = programs[name].target if name in programs else None
    return target if isinstance(target, Agent) else None


def _shown(agent: EntryAgent) -> str:
    if isinstance(agent.about, str):
        return "in Python"
    return agent.about.model if isinstance(agent.about.model, str) else "a script"
