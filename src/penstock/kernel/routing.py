"""The inputs of a node: the live values on its edges, by handle, converted to the type of the handle.

Never "last wins": the handle decides what several edges into it mean. A handle that is not declared takes one live
value from any branch; two at once are an error that names both sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from penstock.errors import PenstockError
from penstock.kernel.executor import STANDARD_CONVERSIONS, Conversions, DataValue, Handle
from penstock.kernel.graph import EdgeSpec

Outputs = Mapping[str, Mapping[str, DataValue]]
"""The outputs of each node that has run, by node and handle."""


OPEN = Handle("open")
"""Stands for a handle that is not declared."""


class RoutingFailed(PenstockError):
    """The handle does not take the values on the edges into it."""

    def __init__(self, path: str, why: str) -> None:
        self.path = path
        self.why = why
        super().__init__(f"{path}: {why}")


def route(
    node_id: str,
    edges: Iterable[EdgeSpec],
    outputs: Outputs,
    handles: Mapping[str, Handle] | None = None,
    conversions: Conversions = STANDARD_CONVERSIONS,
) -> dict[str, DataValue]:
    """Return the inputs of a node from its incoming flow edges, in their order, without the handles that no value
    reached.

    Raises ConversionFailed, which names the edge, or RoutingFailed, which names the handle.
    """
    arrived: dict[str, list[EdgeSpec]] = {}
    for edge in edges:
        if edge.target == node_id and edge.channel == "flow" and edge.source_handle in outputs.get(edge.source, ()):
            arrived.setdefault(edge.target_handle, []).append(edge)
    declared = handles or {}
    _refuse_missing(node_id, arrived, declared)
    return {
        name: _arriving(f"{node_id}.{name}", declared.get(name) or OPEN, live, outputs, conversions)
        for name, live in arrived.items()
    }


def _refuse_missing(node_id: str, arrived: Mapping[str, Sequence[EdgeSpec]], handles: Mapping[str, Handle]) -> None:
    for handle in handles.values():
        if handle.required and handle.channel == "flow" and handle.name not in arrived:
            raise RoutingFailed(f"{node_id}.{handle.name}", "a value is required, but none arrived")


def _arriving(
    path: str, handle: Handle, live: Sequence[EdgeSpec], outputs: Outputs, conversions: Conversions
) -> DataValue:
    if handle.many == "one" and len(live) > 1:
        sources = " and ".join(f"{edge.source}.{edge.source_handle}" for edge in live)
        raise RoutingFailed(path, f"it takes one value, but {sources} each sent one")
    taken = live if handle.many == "list" else live[:1]
    values = [
        conversions.convert(
            outputs[edge.source][edge.source_handle],
            handle.type,
            f"{edge.source}.{edge.source_handle} → {path}",
        )
        for edge in taken
    ]
    return DataValue("list", [value.value for value in values]) if handle.many == "list" else values[0]
