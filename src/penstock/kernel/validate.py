"""Check whether a graph can run: every problem at once, each with a code and its place in the JSON.

`validate` and `compile_graph` share one examination, so that they cannot disagree. The whole graph is checked, but
cycles only among the nodes reachable from the entries: elsewhere they do no harm. No problem hides another: cycles are
found among the sound nodes and edges of a graph with other problems.

The data of a node is the business of its executor. If the executor has `check(data, executors)`, it is called and
yields (path, sentence) for each problem, with a path relative to the data, such as `.items[0]`. The settings that every
running node may have besides are passed by the caller as `NodeOptions`.

Links have no order: two nodes may link to each other if each can be made without the other, which only an executor
knows. An executor that always follows the links into a handle can declare it, `follows = {"execute": (…),
"materialize": (…)}`, with the handles by operation; then artifacts that need themselves are found here, and otherwise
when they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain, islice
from typing import Any, Literal, Protocol

from penstock.kernel.executor import STANDARD_CONVERSIONS, Conversions, ExecutorRegistry, Handle, Side
from penstock.kernel.graph import (
    CHANNELS,
    MAX_EDGES,
    MAX_NODES,
    MAX_PROBLEMS,
    EdgeSpec,
    GraphInvalid,
    GraphSpec,
    NodeSpec,
    Problem,
    shown,
)
from penstock.kernel.links import Key, LinkCycle
from penstock.kernel.plan import CycleFound, Plan, plan_columns

Act = Literal["execute", "materialize"]
"""The operations of an executor: run a node, or make an artifact that others link to."""


class NodeOptions(Protocol):
    """Settings that the data of every running node may have, besides those of its executor."""

    names: frozenset[str]

    def check(
        self, data: Mapping[str, Any], outputs: Mapping[str, Handle] | None, runs: bool
    ) -> Iterable[tuple[str, str]]:
        """Yield (path, sentence) for each invalid option of a node with these outputs that `runs` or is linked to."""

    def output(self, data: Mapping[str, Any]) -> str | None:
        """Return the flow handle that the node has in addition to those of its type."""


def validate(
    graph: GraphSpec,
    executors: ExecutorRegistry | None = None,
    *,
    entries: Iterable[str] | None = None,
    conversions: Conversions = STANDARD_CONVERSIONS,
    options: NodeOptions | None = None,
) -> list[Problem]:
    """Return every problem that keeps the graph from running, up to MAX_PROBLEMS.

    With `executors`, types, handles and the settings of executors are checked too.
    """
    examined = _examine(graph, executors, entries, conversions, options)
    return [] if isinstance(examined, Plan) else examined


def compile_graph(
    graph: GraphSpec,
    executors: ExecutorRegistry | None = None,
    *,
    entries: Iterable[str] | None = None,
    conversions: Conversions = STANDARD_CONVERSIONS,
    options: NodeOptions | None = None,
) -> Plan:
    """Return the plan of a valid graph; raises GraphInvalid with all problems of any other."""
    examined = _examine(graph, executors, entries, conversions, options)
    if not isinstance(examined, Plan):
        raise GraphInvalid(examined)
    return examined


def flow_edges(graph: GraphSpec) -> list[tuple[str, str, str]]:
    """Return the flow edges as (source, source handle, target)."""
    return [(edge.source, edge.source_handle, edge.target) for edge in graph.edges if edge.channel == "flow"]


def _examine(
    graph: GraphSpec,
    executors: ExecutorRegistry | None,
    entries: Iterable[str] | None,
    conversions: Conversions,
    options: NodeOptions | None,
) -> Plan | list[Problem]:
    too_large = list(_too_large(graph))
    if too_large:
        return too_large
    ids = [node.id for node in graph.nodes]
    known = frozenset(filter(_is_name, ids))
    chosen = None if entries is None else list(entries)
    found = chain(
        _bad_ids("nodes", ids),
        _bad_nodes(graph.nodes),
        _bad_ids("edges", [edge.id for edge in graph.edges]),
        _bad_edges(graph.edges, known),
        _unknown_entries(chosen or (), known),
        () if executors is None else _unknown_types(graph.nodes, executors),
        () if executors is None else _bad_handles(graph, known, executors, conversions, options),
        () if executors is None else _bad_parts(graph, known, executors, chosen or ()),
        _bad_data(graph, known, executors or ExecutorRegistry(), options),
    )
    problems = list(islice(found, MAX_PROBLEMS))
    if not problems:
        return _plan_or_cycles(graph, executors, chosen)
    examined = _plan_or_cycles(*_sound_part(graph, known, executors, chosen))
    return problems if isinstance(examined, Plan) else [*problems, *examined][:MAX_PROBLEMS]


def _plan_or_cycles(
    graph: GraphSpec, executors: ExecutorRegistry | None, entries: list[str] | None
) -> Plan | list[Problem]:
    """Return the plan of a graph whose nodes and edges are sound, or the cycles in it."""
    ids = [node.id for node in graph.nodes]
    flow = [edge for edge in graph.edges if edge.channel == "flow"]
    sources, targets = [edge.source for edge in flow], [edge.target for edge in flow]
    problems: list[Problem] = []
    plan = None
    if entries is None:
        parts = _parts(graph, executors, {*sources, *targets})
        ids = [one for one in ids if one not in parts] if parts else ids
    try:
        plan = plan_columns(ids, sources, [edge.source_handle for edge in flow], targets, entries)
    except CycleFound as cycle:
        problems.append(Problem("cycle", "$.edges", str(cycle)))
    running = plan.ids if plan is not None else ids if entries is None else entries
    circle = None if executors is None else _link_circle(graph, executors, running)
    if circle is not None:
        problems.append(Problem("link_cycle", "$.edges", str(LinkCycle(circle))))
    return plan if plan is not None and not problems else problems


def _sound_part(
    graph: GraphSpec, known: frozenset[str], executors: ExecutorRegistry | None, entries: list[str] | None
) -> tuple[GraphSpec, ExecutorRegistry | None, list[str] | None]:
    """Return a graph with problems without the nodes and edges that are not sound, so that its cycles are found too."""
    nodes: dict[str, NodeSpec] = {}
    for node in graph.nodes:
        if _is_name(node.id) and (executors is None or (_is_name(node.type) and node.type in executors)):
            nodes.setdefault(node.id, node)
    edges = [edge for _, edge in _sound_edges(graph.edges, known) if {edge.source, edge.target} <= nodes.keys()]
    chosen = None if entries is None else [entry for entry in entries if _is_name(entry) and entry in nodes]
    return GraphSpec(tuple(nodes.values()), tuple(edges), graph.id), executors, chosen


def _too_large(graph: GraphSpec) -> Iterator[Problem]:
    for what, count, limit in (("nodes", len(graph.nodes), MAX_NODES), ("edges", len(graph.edges), MAX_EDGES)):
        if count > limit:
            yield Problem("too_large", f"$.{what}", f"{count} {what} are more than the {limit} a graph may have")


def _bad_ids(what: str, ids: list[Any]) -> Iterator[Problem]:
    if _are_names(ids) and len(set(ids)) == len(ids):
        return
    seen: dict[str, int] = {}
    for at, one in enumerate(ids):
        path = f"$.{what}[{at}].id"
        if not isinstance(one, str):
            yield Problem("wrong_type", path, f"an id is text, not {type(one).__name__}")
        elif not one:
            yield Problem("empty_id", path, "an id cannot be empty")
        elif one in seen:
            yield Problem("duplicate_id", path, f"{shown(one)} is already the id of {what}[{seen[one]}]")
        else:
            seen[one] = at


def _bad_nodes(nodes: Sequence[NodeSpec]) -> Iterator[Problem]:
    if _are_names([node.type for node in nodes]) and {type(node.data) for node in nodes} <= {dict}:
        return
    for at, node in enumerate(nodes):
        if not _is_name(node.type):
            yield Problem("bad_type", f"$.nodes[{at}].type", "a type is a name, and cannot be empty")
        data: object = node.data
        if not isinstance(data, Mapping):
            yield Problem("wrong_type", f"$.nodes[{at}].data", f"data is an object, not {type(data).__name__}")


def _bad_edges(edges: Sequence[EdgeSpec], known: frozenset[str]) -> Iterator[Problem]:
    if _are_sound(edges, known):
        return
    for at, edge in enumerate(edges):
        yield from _bad_edge(f"$.edges[{at}]", edge, known)


def _are_sound(edges: Sequence[EdgeSpec], known: frozenset[str]) -> bool:
    """Whether `_bad_edge` finds no problem in any of them."""
    ends = [edge.source for edge in edges] + [edge.target for edge in edges]
    handles = [edge.source_handle for edge in edges] + [edge.target_handle for edge in edges]
    channels = [edge.channel for edge in edges]
    return (
        _are_names(ends)
        and known.issuperset(ends)
        and _are_names(handles)
        and channels.count("flow") + channels.count("link") == len(edges)
    )


def _bad_edge(path: str, edge: EdgeSpec, known: frozenset[str]) -> Iterator[Problem]:
    if edge.channel not in CHANNELS:
        yield Problem("bad_channel", f"{path}.data.channel", f"{shown(edge.channel)} is neither flow nor link")
    for end, node in (("source", edge.source), ("target", edge.target)):
        if not _is_name(node) or node not in known:
            yield Problem("unknown_node", f"{path}.{end}", f"there is no node {shown(node)}")
    for field, handle in (("sourceHandle", edge.source_handle), ("targetHandle", edge.target_handle)):
        if not _is_name(handle):
            yield Problem("bad_handle", f"{path}.{field}", "a handle is a name, and cannot be empty")


def _unknown_entries(entries: Sequence[str], known: frozenset[str]) -> Iterator[Problem]:
    for entry in entries:
        if not _is_name(entry) or entry not in known:
            yield Problem("unknown_entry", "$.nodes", f"the entry {shown(entry)} is no node of the graph")


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _are_names(values: list[Any]) -> bool:
    """Whether all of them are names, checked together: nearly every graph is sound, and single checks take longer."""
    return set(map(type, values)) <= {str} and "" not in values


def _unknown_types(nodes: Sequence[NodeSpec], executors: ExecutorRegistry) -> Iterator[Problem]:
    for at, node in enumerate(nodes):
        if _is_name(node.type) and node.type not in executors:
            known = ", ".join(sorted(executors)) or "none"
            detail = f"no executor is registered for type {shown(node.type)}; there are: {known}"
            yield Problem("unknown_type", f"$.nodes[{at}].type", detail)


def _bad_handles(
    graph: GraphSpec,
    known: frozenset[str],
    executors: ExecutorRegistry,
    conversions: Conversions,
    options: NodeOptions | None,
) -> Iterator[Problem]:
    added = (
        {}
        if options is None
        else {node.id: options.output(node.data) for node in _with(options, graph.nodes) if _is_name(node.id)}
    )
    type_of = {node.id: node.type for node in graph.nodes if _is_name(node.id) and _is_name(node.type)}
    arriving: dict[tuple[str, str], int] = {}
    fine: set[tuple[str | bool | None, ...]] = set()
    for at, edge in _sound_edges(graph.edges, known):
        source, target = type_of.get(edge.source), type_of.get(edge.target)
        is_added = edge.channel == "flow" and added.get(edge.source) == edge.source_handle
        way = (source, edge.source_handle, target, edge.target_handle, edge.channel, is_added)
        if way not in fine:  # many edges go the same way
            leaves = _handle(executors, source, "outputs", edge.source_handle)
            if is_added and isinstance(leaves, str):
                leaves = None  # its type does not declare it
            arrives = _handle(executors, target, "inputs", edge.target_handle)
            found = list(_bad_ends(f"$.edges[{at}]", edge, leaves, arrives, conversions))
            yield from found
            if not found:
                fine.add(way)
        there = (edge.target, edge.target_handle)
        arriving[there] = arriving.get(there, 0) + 1
        if arriving[there] > 1:
            yield from _one_too_many(at, edge, _handle(executors, target, "inputs", edge.target_handle))
    yield from _missing_inputs(graph.nodes, executors, {*arriving, *_meant_for(graph.edges, known)})


def _meant_for(edges: Sequence[EdgeSpec], known: frozenset[str]) -> Iterator[Key]:
    """Return the targets of unsound edges: once these are corrected, values arrive there."""
    if not _are_sound(edges, known):
        ends = ((edge.target, edge.target_handle) for edge in edges)
        yield from (end for end in ends if _are_names([*end]))


def _parts(graph: GraphSpec, executors: ExecutorRegistry | None, in_flow: set[str]) -> set[str]:
    """Return the nodes that do not run: without a flow edge, and linked to or with nothing to execute."""
    parts = _linked_only(graph.edges, in_flow)
    if executors is not None:
        idle = {one for one in {node.type for node in graph.nodes} if not executors.can(one, "execute")}
        if idle:
            parts |= {node.id for node in graph.nodes if node.type in idle} - in_flow
    return parts


def _bad_parts(
    graph: GraphSpec, known: frozenset[str], executors: ExecutorRegistry, entries: Sequence[str]
) -> Iterator[Problem]:
    """Return the problems of flow through nodes that do not run, and of links to nodes that cannot be linked to."""
    types = {node.type for node in graph.nodes if _is_name(node.type)}
    idle = {one for one in types if not executors.can(one, "execute")}
    closed = {one for one in types if not executors.can(one, "materialize")}
    if not idle and not closed:
        return
    type_of = {node.id: node.type for node in graph.nodes if _is_name(node.id) and _is_name(node.type)}
    for entry in entries:
        if _is_name(entry) and type_of.get(entry) in idle:
            yield Problem("unknown_entry", "$.nodes", f"the entry {shown(entry)} has nothing to execute")
    for at, edge in _sound_edges(graph.edges, known):
        if edge.channel == "link":
            if type_of.get(edge.source) in closed:
                detail = f"{shown(edge.source)} cannot be linked to: its executor has no materialize()"
                yield Problem("not_linkable", f"$.edges[{at}].source", detail)
            continue
        for end, node in (("source", edge.source), ("target", edge.target)):
            if type_of.get(node) in idle:
                detail = f"{shown(node)} does not run: its executor has no execute()"
                yield Problem("not_runnable", f"$.edges[{at}].{end}", detail)


def _link_circle(graph: GraphSpec, executors: ExecutorRegistry, running: Iterable[str]) -> list[str] | None:
    """Return the cycle of an artifact that running nodes request and that needs itself, each needing the next."""
    linked: dict[Key, list[Key]] = {}
    for edge in graph.edges:
        if edge.channel == "link":
            linked.setdefault((edge.target, edge.target_handle), []).append((edge.source, edge.source_handle))
    if not linked:
        return None
    type_of = {node.id: node.type for node in graph.nodes}
    follows = {one: _follows(executors[one]) for one in set(type_of.values())}

    def needs(node: str, act: Act) -> Iterator[Key]:
        handles = follows[type_of[node]].get(act, ())
        return chain.from_iterable(linked.get((node, handle), ()) for handle in handles)

    wanted = chain.from_iterable(needs(node, "execute") for node in running)
    return _circle(wanted, lambda key: needs(key[0], "materialize"))


def _follows(executor: Any) -> dict[Any, list[str]]:
    """Return the handles whose links an executor declares to follow, by operation; nothing if the declaration is
    malformed.
    """
    declared = getattr(executor, "follows", None)
    entries = declared.items() if isinstance(declared, Mapping) else ()
    return {act: list(filter(_is_name, handles)) for act, handles in entries if isinstance(handles, list | tuple)}


def _circle(wanted: Iterable[Key], needs: Callable[[Key], Iterator[Key]]) -> list[str] | None:
    """Return a path from a wanted key back to itself, if there is one; walked without recursion."""
    sound: set[Key] = set()
    for first in wanted:
        way = {} if first in sound else {first: needs(first)}
        while way:
            last = next(reversed(way))
            key = next(way[last], None)
            if key is None:
                sound.add(last)
                del way[last]
            elif key in way:
                walked = list(way)
                return [f"{node}.{handle}" for node, handle in [*walked[walked.index(key) :], key]]
            elif key not in sound:
                way[key] = needs(key)
    return None


def _bad_data(
    graph: GraphSpec, known: frozenset[str], executors: ExecutorRegistry, options: NodeOptions | None
) -> Iterator[Problem]:
    """Return the problems of options, and those that executors find in the data."""
    types = {node.type for node in graph.nodes if _is_name(node.type) and node.type in executors}
    checks = {one: check for one in types if callable(check := getattr(executors[one], "check", None))}
    having = set() if options is None else {id(node) for node in _with(options, graph.nodes)}
    if not checks and not having:
        return
    sound = [edge for _, edge in _sound_edges(graph.edges, known)] if having else []
    in_flow = {end for edge in sound if edge.channel == "flow" for end in (edge.source, edge.target)}
    linked_only = _linked_only(sound, in_flow)
    for at, node in enumerate(graph.nodes):
        data = node.data
        if not _is_name(node.type) or not isinstance(data, Mapping):
            continue
        found: list[tuple[str, str]] = []
        if options is not None and id(node) in having and executors.can(node.type, "execute"):
            found += options.check(data, executors.handles(node.type, "outputs"), node.id not in linked_only)
            data = {name: value for name, value in data.items() if name not in options.names}
        if node.type in checks:
            found += _found_by(checks[node.type], data, executors)
        for path, sentence in found:
            yield Problem("bad_data", f"$.nodes[{at}].data{path}", sentence)


def _with(options: NodeOptions, nodes: Sequence[NodeSpec]) -> list[NodeSpec]:
    """Return the nodes whose data has options."""
    names, having = options.names, []
    for node in nodes:
        data: object = node.data
        if isinstance(data, (dict, Mapping)) and not names.isdisjoint(data):
            having.append(node)
    return having


def _linked_only(edges: Sequence[EdgeSpec], in_flow: set[str]) -> set[str]:
    """Return the nodes that are linked to and that no flow edge touches: they are parts of others."""
    return {edge.source for edge in edges if edge.channel == "link" and edge.source != edge.target} - in_flow


def _found_by(check: Any, data: Mapping[str, Any], executors: ExecutorRegistry) -> list[tuple[str, str]]:
    try:
        return [(str(path), str(sentence)) for path, sentence in check(data, executors)]
    except RecursionError:
        return [("", "it is nested too deeply to be checked")]
    except Exception as error:  # third-party code: its failure is one more problem to list
        return [("", f"it could not be checked: {type(error).__name__}: {str(error)[:200]}")]


def _sound_edges(edges: Sequence[EdgeSpec], known: frozenset[str]) -> Iterable[tuple[int, EdgeSpec]]:
    if _are_sound(edges, known):
        return enumerate(edges)
    return ((at, edge) for at, edge in enumerate(edges) if not any(_bad_edge("", edge, known)))


def _handle(executors: ExecutorRegistry, node_type: str | None, side: Side, name: str) -> Handle | str | None:
    """Return the declared handle.

    None if the handles are not declared; the known names, as text, if this one is not among them.
    """
    declared = None if node_type is None else executors.handles(node_type, side)
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
            yield Problem(
                "unknown_handle", f"{path}.{field}", f"{shown(node)} has no handle {shown(name)}; it has: {handle}"
            )
        elif handle is not None and handle.channel != edge.channel:
            detail = f"handle {shown(name)} of {shown(node)} is for {handle.channel}, the edge is a {edge.channel}"
            yield Problem("channel_mismatch", f"{path}.data.channel", detail)
    if not (isinstance(leaves, Handle) and isinstance(arrives, Handle)) or edge.channel != "flow":
        return
    if not conversions.fits(leaves.type, arrives.type):
        detail = f"{leaves.type} cannot become {arrives.type}, and no conversion is declared"
        yield Problem("type_mismatch", path, detail)


def _one_too_many(at: int, edge: EdgeSpec, arrives: Handle | str | None) -> Iterator[Problem]:
    if isinstance(arrives, Handle) and arrives.many == "one":
        detail = f"handle {shown(edge.target_handle)} of {shown(edge.target)} takes one edge, and this is another"
        yield Problem("too_many_edges", f"$.edges[{at}].targetHandle", detail)


def _missing_inputs(nodes: Sequence[NodeSpec], executors: ExecutorRegistry, arriving: Set[Key]) -> Iterator[Problem]:
    types = {node.type for node in nodes if _is_name(node.type)}
    declared = {one: (executors.handles(one, "inputs") or {}).values() for one in types}
    required = {one: [handle.name for handle in handles if handle.required] for one, handles in declared.items()}
    if not any(required.values()):
        return
    for at, node in enumerate(nodes):
        if _is_name(node.id) and _is_name(node.type):
            for name in required.get(node.type, ()):
                if (node.id, name) not in arriving:
                    detail = f"handle {shown(name)} of {shown(node.id)} needs an edge and has none"
                    yield Problem("missing_input", f"$.nodes[{at}]", detail)
