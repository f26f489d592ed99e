"""The agents of a graph that a user talks to, and whether they can do what a request wants of the model.

Tools of the client, settings and output formats are for the entry agents of a graph: agents with nothing but a
chat-start and plain nodes before them. What cannot be applied is refused with the name of the parameter, before a run
starts. A graph without an entry agent, a team, and an agent inside a container apply nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.chat.run_handler import chat_services
from penstock.errors import InvalidValue, PenstockError
from penstock.hosting.ports import GraphRecord
from penstock.kernel.document import parse_graph
from penstock.kernel.graph import GraphInvalid, NodeSpec
from penstock.nodes.agent import AgentData, AgentNode
from penstock.nodes.client_tools import ClientRequest
from penstock.nodes.parts.services import model_among
from penstock.runtime.graphs.graph_plan import aside
from penstock.server.graph_check import is_conversational
from penstock.server.openai.wire.options import Options, UnsupportedParameter

NOT_SETTINGS = frozenset({"tools", "schema", "output_schema"})


@dataclass(frozen=True, slots=True)
class EntryAgents:
    """The entry agents of a graph."""

    agents: tuple[tuple[str, AgentData], ...] = ()
    """By node id."""
    why_not: str = ""
    """Why nothing can be applied to them; empty if it can."""


async def entry_agents(record: GraphRecord) -> EntryAgents:
    """Return the entry agents of a graph."""
    if not is_conversational(record):
        return EntryAgents(why_not=f"the graph {record.id!r} has no chat-start, and so no agent that the user talks to")
    try:
        found: EntryAgents = await aside(record.document, lambda document: _find(record.id, document))
    except (GraphInvalid, InvalidValue):  # reported when a run is requested
        return EntryAgents(why_not=f"the graph {record.id!r} cannot run")
    return found


def _find(graph_id: str, document: Any) -> EntryAgents:
    graph = parse_graph(document)
    scope = chat_services(graph)["chat_scope"]
    entries: list[NodeSpec] = [node for node in graph.nodes if node.id in scope.entry_agent_ids]
    if inner := scope.inner_entry_agents:
        container = min(inner)[0]
        why = f"the user of graph {graph_id!r} talks to an agent inside node {container!r}, which takes only messages"
        return EntryAgents(why_not=why)
    if not entries:
        return EntryAgents(why_not=f"the graph {graph_id!r} has no agent that the user talks to")
    for node in entries:
        if node.type != "agent":
            why = f"the user of graph {graph_id!r} talks to node {node.id!r}, a {node.type}, which takes only messages"
            return EntryAgents(why_not=why)
    return EntryAgents(tuple((node.id, AgentNode.settings.read(node.data)) for node in entries))


async def check_options(
    options: Options, entry: EntryAgents, answering: frozenset[str], models: Mapping[str, Any], wait_s: float
) -> ClientRequest | None:
    """Return what a run has to do for these options; None for nothing. Raise UnsupportedParameter if it cannot."""
    params = options.params
    if not params:
        return None
    if entry.why_not:
        raise UnsupportedParameter(next(iter(params.values())), entry.why_not)
    is_strict = options.is_strict
    for id, data in entry.agents:
        if options.schema is not None:
            _check_format(params["schema"], id, data, answering)
        applies = await _applied(data, models)
        if applies is None:
            continue
        for setting, param in params.items():
            if setting not in NOT_SETTINGS and setting not in applies:
                raise UnsupportedParameter(param, f"the model of agent {id!r} ({_shown(data)}) cannot apply it")
        is_strict = is_strict and "output_schema" in applies
    ends = all(id in answering for id, _ in entry.agents)
    return ClientRequest(options.tools, options.settings, options.schema, is_strict, wait_s, ends)


def _check_format(param: str, id: str, data: AgentData, answering: frozenset[str]) -> None:
    if id not in answering:
        raise UnsupportedParameter(param, f"the answer of agent {id!r} is not that of the graph: other nodes follow it")
    if data.output is not None:
        raise UnsupportedParameter(param, f"agent {id!r} has an output format of its own")


async def _applied(data: AgentData, models: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the settings that the model of an agent applies; None if there is no such model, which the run reports."""
    try:
        return (await model_among(data.model, models)).applies
    except PenstockError:
        return None


def _shown(data: AgentData) -> str:
    return data.model if isinstance(data.model, str) else "a script"
