"""A graph as integers and lists.

Compiled once, run any number of times: the hot loop looks up no string and builds no dictionary. A plan contains only
the nodes reachable from the entries; a cycle among them is an error, a cycle elsewhere does no harm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from penstock.errors import InvalidValue, PenstockError


class CycleFound(PenstockError):
    """Nodes wait for each other in a cycle, so none of them can run."""

    def __init__(self, path: Sequence[str]) -> None:
        self.path = tuple(path)
        """The nodes of the cycle, each leading to the next; the first is repeated at the end."""
        super().__init__(f"the nodes wait for each other: {way(self.path)}")


class Plan:
    """The dependencies of a graph, by number. A duplicate edge counts twice."""

    __slots__ = ("_predecessors", "entries", "ids", "incoming", "index", "size", "successor_handles", "successors")

    def __init__(
        self,
        ids: list[str],
        index: dict[str, int],
        incoming: list[int],
        successors: list[tuple[int, ...]],
        successor_handles: list[tuple[str, ...]],
    ) -> None:
        self.ids = ids
        self.index = index
        self.size = len(ids)
        self.incoming = incoming
        """Number of incoming edges of each node."""
        self.successors = successors
        self.successor_handles = successor_handles
        """The handle that each edge of `successors` leaves from."""
        self.entries = [node for node, edges in enumerate(incoming) if not edges]
        self._predecessors: list[list[int]] | None = None

    @property
    def predecessors(self) -> list[list[int]]:
        """The nodes that each node waits for; computed on first use, because running does not need it."""
        if self._predecessors is None:
            self._predecessors = [[] for _ in self.ids]
            for node, successors in enumerate(self.successors):
                for after in successors:
                    self._predecessors[after].append(node)
        return self._predecessors


def compile_plan(
    ids: Iterable[str], edges: Iterable[tuple[str, str, str]], entries: Iterable[str] | None = None
) -> Plan:
    """Return the plan of the nodes reachable from `entries` over edges of (source, handle, target).

    Without `entries`, every node without incoming edges is one. An entry with incoming edges waits for them like any
    other node. Raises CycleFound if nodes that would run form a cycle.
    """
    listed = list(edges)
    sources, handles, targets = ([edge[column] for edge in listed] for column in range(3))
    return plan_columns(list(ids), sources, handles, targets, entries)


def plan_columns(
    ids: list[str], sources: list[str], handles: list[str], targets: list[str], entries: Iterable[str] | None = None
) -> Plan:
    """Return the same plan for edges given as columns."""
    index = dict(zip(ids, range(len(ids)), strict=True))
    if len(index) < len(ids):
        twice = [name for name, times in Counter(ids).items() if times > 1]
        raise InvalidValue("ids", twice, "different from each other")
    number = index.__getitem__
    try:
        before, after = list(map(number, sources)), list(map(number, targets))
        chosen = None if entries is None else list(map(number, entries))
    except KeyError as unknown:
        raise InvalidValue("a node of an edge or an entry", unknown.args[0], "one of the ids") from None
    plan = _grouped(ids, index, before, handles, after)
    if chosen is not None:
        plan = _reachable(plan, chosen)
    _refuse_cycles(plan)
    return plan


def _grouped(ids: list[str], index: dict[str, int], before: list[int], handles: list[str], after: list[int]) -> Plan:
    """Return the plan of these edges, with the edges of one source together.

    They are sorted once and cut into tuples: the garbage collector would visit one list per node again and again, while
    it ignores tuples of numbers.
    """
    incoming, outgoing = [0] * len(ids), [0] * len(ids)
    for source, target in zip(before, after, strict=True):
        outgoing[source] += 1
        incoming[target] += 1
    by_source = sorted(range(len(before)), key=before.__getitem__)
    all_successors = tuple(map(after.__getitem__, by_source))
    all_handles = tuple(map(handles.__getitem__, by_source))
    cuts = [0, *accumulate(outgoing)]
    return Plan(
        ids,
        index,
        incoming,
        [all_successors[first:last] for first, last in pairwise(cuts)],
        [all_handles[first:last] for first, last in pairwise(cuts)],
    )


def topological_order(plan: Plan) -> list[int]:
    """Return the nodes so that each comes after its predecessors; shorter than the plan if there is a cycle."""
    left = plan.incoming.copy()
    successors = plan.successors
    order = plan.entries.copy()
    for node in order:
        for after in successors[node]:
            left[after] -= 1
            if not left[after]:
                order.append(after)
    return order


def _reachable(plan: Plan, entries: list[int]) -> Plan:
    """Return the part of the plan that is reachable from the entries."""
    reached = set(entries)
    todo = list(reached)
    while todo:
        for after in plan.successors[todo.pop()]:
            if after not in reached:
                reached.add(after)
                todo.append(after)
    kept = sorted(reached)
    number = {old: new for new, old in enumerate(kept)}
    successors = [tuple([number[after] for after in plan.successors[old]]) for old in kept]
    incoming = [0] * len(kept)
    for edges in successors:
        for after in edges:
            incoming[after] += 1
    names = [plan.ids[old] for old in kept]
    index = {name: new for new, name in enumerate(names)}
    return Plan(names, index, incoming, successors, [plan.successor_handles[old] for old in kept])


def _refuse_cycles(plan: Plan) -> None:
    order = topological_order(plan)
    if len(order) < plan.size:
        stuck = set(range(plan.size)).difference(order)
        raise CycleFound([plan.ids[node] for node in _find_cycle(plan.successors, stuck)])


def _find_cycle(successors: list[tuple[int, ...]], stuck: set[int]) -> list[int]:
    """Return one cycle among the nodes that can never run; its first node is repeated at the end.

    Each of them waits for another one of them, so walking backwards must reach a node twice.
    """
    waits_for: dict[int, int] = {}
    for node in sorted(stuck):
        for after in successors[node]:
            waits_for.setdefault(after, node)
    walk: dict[int, None] = {}
    node = min(stuck)
    while node not in walk:
        walk[node] = None
        node = waits_for[node]
    path = list(walk)
    cycle = path[path.index(node) :][::-1]
    return [cycle[-1], *cycle]


def way(path: Sequence[str], most: int = 12) -> str:
    """Return a path as text, with the middle of a long one left out."""
    parts = list(path) if len(path) <= most else [*path[: most - 2], f"… {len(path) - most + 1} more …", path[-1]]
    return " → ".join(parts)
