"""A graph as integers and lists.

Compiled once, run any number of times: the hot loop looks up no string and builds no dictionary. Only what can be
reached from the entries is in it; a cycle elsewhere does no harm, a cycle inside is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from penstock.errors import PenstockError


class CycleFound(PenstockError):
    """Nodes wait for each other in a circle, so none of them can ever run."""

    def __init__(self, path: Sequence[str]) -> None:
        self.path = tuple(path)
        super().__init__(f"the nodes wait for each other: {' → '.join(self.path)}")


class Plan:
    """The order of a graph: who waits for whom, by number."""

    __slots__ = ("entries", "ids", "incoming", "index", "predecessors", "size", "successor_handles", "successors")

    def __init__(
        self,
        ids: list[str],
        index: dict[str, int],
        predecessors: list[list[int]],
        successors: list[list[int]],
        successor_handles: list[list[str]],
        entries: list[int],
    ) -> None:
        self.ids = ids
        self.index = index
        self.size = len(ids)
        self.predecessors = predecessors
        self.successors = successors
        self.successor_handles = successor_handles
        self.incoming = [len(before) for before in predecessors]
        self.entries = entries


def compile_plan(
    ids: Iterable[str], edges: Iterable[tuple[str, str, str]], entries: Iterable[str] | None = None
) -> Plan:
    """The plan of the nodes reachable from `entries` (all that nothing leads to, if None) over (source, handle,
    target).

    Every id of an edge is one of `ids`; CycleFound names the nodes of a cycle among those that would run.
    """
    names = list(ids)
    index = {name: number for number, name in enumerate(names)}
    predecessors: list[list[int]] = [[] for _ in names]
    successors: list[list[int]] = [[] for _ in names]
    handles: list[list[str]] = [[] for _ in names]
    for source, handle, target in edges:
        before, after = index[source], index[target]
        successors[before].append(after)
        handles[before].append(handle)
        predecessors[after].append(before)
    if entries is None:
        starts = [number for number, before in enumerate(predecessors) if not before]
        plan = Plan(names, index, predecessors, successors, handles, starts)
    else:
        plan = _reachable(names, predecessors, successors, handles, [index[entry] for entry in entries])
    _refuse_cycles(plan)
    return plan


def topological_order(plan: Plan) -> list[int]:
    """The nodes so that each comes after those it waits for; shorter than the plan if there is a cycle."""
    left = plan.incoming.copy()
    order = [node for node in range(plan.size) if not left[node]]
    for node in order:
        for after in plan.successors[node]:
            left[after] -= 1
            if not left[after]:
                order.append(after)
    return order


def _reachable(
    names: list[str],
    predecessors: list[list[int]],
    successors: list[list[int]],
    handles: list[list[str]],
    entries: list[int],
) -> Plan:
    """The part of the graph that the entries lead to; an entry that another one leads to waits for it like any node."""
    reached: dict[int, None] = dict.fromkeys(entries)
    todo = list(entries)
    while todo:
        for one in successors[todo.pop()]:
            if one not in reached:
                reached[one] = None
                todo.append(one)
    kept = sorted(reached)
    number = {old: new for new, old in enumerate(kept)}
    before = [[number[one] for one in predecessors[old] if one in reached] for old in kept]
    after = [[number[one] for one in successors[old]] for old in kept]
    return Plan(
        [names[old] for old in kept],
        {names[old]: new for old, new in number.items()},
        before,
        after,
        [handles[old] for old in kept],
        [new for new, waits_for in enumerate(before) if not waits_for],
    )


def _refuse_cycles(plan: Plan) -> None:
    order = topological_order(plan)
    if len(order) < plan.size:
        raise CycleFound([plan.ids[node] for node in _find_cycle(plan.successors, set(range(plan.size)) - set(order))])


def _find_cycle(successors: Mapping[int, list[int]] | list[list[int]], among: set[int]) -> list[int]:
    """One cycle within `among`, each of whose nodes has a predecessor in it; its first node is repeated at the end."""
    walk: list[int] = []
    seen: dict[int, int] = {}
    came_from: dict[int, int] = {}
    for node in among:
        for after in successors[node]:
            if after in among:
                came_from[after] = node
    node = next(iter(came_from))
    while node not in seen:
        seen[node] = len(walk)
        walk.append(node)
        node = came_from[node]
    cycle = walk[seen[node] :]
    cycle.reverse()
    return [cycle[-1], *cycle]
