"""Whether a graph can run: every problem at once, each with a code and its place in the JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from penstock.kernel.executor import ExecutorRegistry, Handle
from penstock.kernel.graph import CHANNELS, EdgeSpec, GraphSpec, NodeSpec, Problem
from penstock.kernel.plan import CycleFound, compile_plan
from penstock.kernel.values import STANDARD_CONVERSIONS, Conversions

MAX_NODES = 100_000
MAX_EDGES = 1_000_000


def validate(
    graph: GraphSpec,
    executors: ExecutorRegistry | None = None,
    *,
    entries: Iterable[str] | None = None,
    conversions: Conversions = STANDARD_CONVERSIONS,
) -> list[Problem]:
    """Everything that keeps the graph from running; with `executors`, types and handles are looked at too."""
    problems = [*_too_large(graph), *_bad_ids(graph), *_bad_edges(graph)]
    if executors is not None:
        problems += [*_unknown_types(graph, executors), *_bad_handles(graph, executors, conversions)]
    if not problems:
        problems += _bad_order(graph, entries)
    return problems


def _too_large(graph: GraphSpec) -> Iterator[Problem]:
    for what, count, limit in (("nodes", len(graph.nodes), MAX_NODES), ("edges", len(graph.edges), MAX_EDGES)):
        if count > limit:
            yield Problem("too_large", f"$.{what}", f"{count} {what} are more than the {limit} a graph may have")


def _bad_ids(graph: GraphSpec) -> Iterator[Problem]:
    for what, ids in (("nodes", [node.id for node in graph.nodes]), ("edges", [edge.id for edge in graph.edges])):
        seen: dict[str, int] = {}
        for at, one in enumerate(ids):
            path = f"$.{what}[{at}].id"
            if not one:
                yield Problem("empty_id", path, "an id cannot be empty")
            elif one in seen:
                yield Problem("duplicate_id", path, f"{one!r} is already the id of {what}[{seen[one]}]")
            else:
                seen[one] = at


def _bad_edges(graph: GraphSpec) -> Iterator[Problem]:
    known = {node.id for node in graph.nodes}
    for at, edge in enumerate(graph.edges):
        path = f"$.edges[{at}]"
        if edge.channel not in CHANNELS:
            yield Problem("bad_channel", f"{path}.data.channel", f"{edge.channel!r} is neither flow nor link")
        for end, node in (("source", edge.source), ("target", edge.target)):
            if node not in known:
                yield Problem("unknown_node", f"{path}.{end}", f"there is no node {node!r}")
        if edge.source == edge.target and edge.source in known:
            yield Problem("self_loop", path, f"node {edge.source!r} is connected to itself")


def _unknown_types(graph: GraphSpec, executors: ExecutorRegistry) -> Iterator[Problem]:
    for at, node in enumerate(graph.nodes):
        if node.type not in executors:
            message = f"no executor is registered for type {node.type!r}; there are: {', '.join(sorted(executors))}"
            yield Problem("unknown_type", f"$.nodes[{at}].type", message)


def _bad_handles(graph: GraphSpec, executors: ExecutorRegistry, conversions: Conversions) -> Iterator[Problem]:
    type_of = {node.id: node.type for node in graph.nodes}
    arriving: Counter[tuple[str, str]] = Counter()
    for at, edge in enumerate(graph.edges):
        leaves = _handle(executors, type_of.get(edge.source), "outputs", edge.source_handle)
        arrives = _handle(executors, type_of.get(edge.target), "inputs", edge.target_handle)
        yield from _bad_ends(f"$.edges[{at}]", edge, leaves, arrives, conversions)
        if isinstance(arrives, Handle):
            arriving[edge.target, edge.target_handle] += 1
            if arrives.many == "one" and arriving[edge.target, edge.target_handle] == 2:
                message = f"handle {edge.target_handle!r} of {edge.target!r} takes one edge, and this is another"
                yield Problem("too_many_edges", f"$.edges[{at}].targetHandle", message)
    for number, node in enumerate(graph.nodes):
        yield from _missing_inputs(f"$.nodes[{number}]", node, executors, arriving)


def _handle(executors: ExecutorRegistry, node_type: str | None, side: str, name: str) -> Handle | str | None:
    """The declared handle.

    None where handles are left open; the known names, as text, where this one is not declared.
    """
    if node_type is None:
        return None
    declared = executors.handles(node_type, "outputs" if side == "outputs" else "inputs")
    if declared is None:
        return None
    return declared.get(name) or (", ".join(declared) or "none")


def _bad_ends(
    path: str, edge: EdgeSpec, leaves: Handle | str | None, arrives: Handle | str | None, conversions: Conversions
) -> Iterator[Problem]:
    ends = (
        ("sourceHandle", edge.source, edge.source_handle, leaves),
        ("targetHandle", edge.target, edge.target_handle, arrives),
    )
    for field, node, name, handle in ends:
        if isinstance(handle, str):
            yield Problem("unknown_handle", f"{path}.{field}", f"{node!r} has no handle {name!r}; it has: {handle}")
        elif handle is not None and handle.channel != edge.channel:
            message = f"handle {name!r} of {node!r} is for {handle.channel}, the edge is a {edge.channel}"
            yield Problem("channel_mismatch", f"{path}.data.channel", message)
    if not (isinstance(leaves, Handle) and isinstance(arrives, Handle)) or edge.channel != "flow":
        return
    if not conversions.fits(leaves.type, arrives.type):
        message = f"{leaves.type} cannot become {arrives.type}, and no conversion is declared"
        yield Problem("type_mismatch", path, message)


def _missing_inputs(
    path: str, node: NodeSpec, executors: ExecutorRegistry, arriving: Counter[tuple[str, str]]
) -> Iterator[Problem]:
    for handle in (executors.handles(node.type, "inputs") or {}).values():
        if handle.required and not arriving[node.id, handle.name]:
            message = f"handle {handle.name!r} of {node.id!r} needs an edge and has none"
            yield Problem("missing_input", path, message)


def _bad_order(graph: GraphSpec, entries: Iterable[str] | None) -> Iterator[Problem]:
    known = {node.id for node in graph.nodes}
    chosen = None if entries is None else list(entries)
    unknown = [entry for entry in chosen or () if entry not in known]
    for entry in unknown:
        yield Problem("unknown_entry", "$.nodes", f"the entry {entry!r} is no node of the graph")
    if unknown:
        return
    try:
        compile_plan([node.id for node in graph.nodes], flow_edges(graph), chosen)
    except CycleFound as cycle:
        yield Problem("cycle", "$.edges", str(cycle))


def flow_edges(graph: GraphSpec) -> list[tuple[str, str, str]]:
    """The flow edges as (source, source handle, target)."""
    return [(edge.source, edge.source_handle, edge.target) for edge in graph.edges if edge.channel == "flow"]
