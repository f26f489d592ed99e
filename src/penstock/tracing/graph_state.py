"""The call tree at one seq, rendered when it is read.

Taking the state copies references only. Records of finished calls do not change, so rendering them later gives what
they were; nodes of calls under way are rendered when the state is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from penstock.tracing import views
from penstock.tracing.record import CallRecord
from penstock.tracing.stats import Tallies, Tally

by_number = attrgetter("number")
"""The order in which calls began."""


class Counted(NamedTuple):
    """The sums of the log up to a seq; immutable."""

    seq: int
    sums: Tally


class Captured(NamedTuple):
    """A copy of the data that a writer's lock protects."""

    chain_id: str
    root: CallRecord | None
    seq: int
    calls: list[CallRecord]
    """Every call that is kept one by one, in no order."""
    folded: Mapping[int, views.Folded]
    max_depth: int
    counted: Counted
    uncounted: Sequence[object]
    """The entries of the log after `counted`."""
    now_ns: int
    wall_offset_ns: int


class GraphState:
    """The call tree at one seq; `render` makes JSON data of it, once."""

    __slots__ = ("_captured", "_rendered", "_under_way")

    def __init__(self, captured: Captured) -> None:
        self._captured: Captured | None = captured
        self._rendered: dict[str, Any] | None = None
        self._under_way = {call.number: _node(captured, call) for call in captured.calls if call.end_seq > captured.seq}

    def render(self) -> dict[str, Any]:
        """Return the state as JSON data; the same object each time."""
        captured = self._captured
        if captured is None:
            assert self._rendered is not None, "rendered before the capture is dropped"
            return self._rendered
        self._rendered = rendered = self._render(captured)
        self._captured = None  # another thread may be rendering too, with a reference of its own
        return rendered

    def __reduce__(self) -> tuple[Any, ...]:
        # Copied and pickled as plain data: records lead to locks and functions of the run.
        return dict, (self.render(),)

    def _render(self, captured: Captured) -> dict[str, Any]:
        calls, sums = sorted(captured.calls, key=by_number), Tallies()
        nodes = {call.node_id: self._under_way.get(call.number) or _node(captured, call) for call in calls}
        if captured.folded:
            _reattach(nodes, calls)
        sums.absorb(captured.uncounted, captured.counted.seq + 1)
        sums.run.include(captured.counted.sums)
        return {
            "chain_id": captured.chain_id,
            "root_id": captured.root.node_id if captured.root else None,
            "nodes": nodes,
            "aggregates": views.aggregates(sums.run, captured.max_depth),
            "seq": captured.seq,
            "snapshot_ts_ms": (captured.now_ns + captured.wall_offset_ns) // 1_000_000,
        }


def _node(captured: Captured, call: CallRecord) -> dict[str, Any]:
    return views.node(call, captured.seq, captured.wall_offset_ns, captured.folded.get(call.number))


def _reattach(nodes: dict[str, dict[str, Any]], calls: Sequence[CallRecord]) -> None:
    """Attach calls whose parent was folded to their nearest kept ancestor."""
    for call in calls:
        node = nodes[call.node_id]
        if node["parent_id"] is not None and node["parent_id"] not in nodes:
            above = call.parent
            while above is not None and above.node_id not in nodes:
                above = above.parent
            node["parent_id"] = above.node_id if above else None
