"""What a hosted run tells, as JSON."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest

from penstock.hosting.event_data import SHORT, finish_reason, node_event, to_json, truncate
from penstock.kernel.executor import DataValue, PartialValue
from penstock.runtime.graphs.node_execution import NodeEvent
from penstock.tracing.jsonable import MAX_TEXT

WHERE = {"node_id": "n", "node_type": "t"}


class Text(str):
    """A user's own text type."""


def event(event_type: str, data: Any = None, *, replayed: bool = False) -> NodeEvent:
    return NodeEvent("n", "t", event_type, "r", data, replayed=replayed)


@pytest.mark.parametrize("text", ["", "a", "x" * (SHORT + 1), "x" * (MAX_TEXT + 1), "é", Text("a"), Text("é")])
def test_encodable_text_is_unchanged(text: str) -> None:
    assert to_json(text) == text
    assert truncate(text) == text if len(text) <= MAX_TEXT else truncate(text).startswith("xxx")
    assert len(truncate(text)) < MAX_TEXT + 100


@pytest.mark.parametrize("convert", [to_json, truncate])
def test_half_a_surrogate_pair_is_replaced(convert: Any) -> None:
    assert convert("a\ud800") == "a?"
    assert convert(["a\ud800"]) == ["a?"]


@pytest.mark.parametrize(
    ("seen", "type", "data"),
    [
        (event("started"), "node.started", {}),
        (event("started", "why"), "node.started", {"reason": "why"}),
        (event("started", replayed=True), "node.started", {"replayed": True}),
        (event("skipped", "no way"), "node.skipped", {"reason": "no way"}),
        (event("cancelled"), "node.cancelled", {}),
        (event("error", ValueError("no")), "node.error", {"error": "ValueError", "message": "no"}),
        (event("completed", {"out": DataValue("text", "x")}), "node.completed", {"outputs": {"out": "x"}}),
        (event("thinking", 1), "node.progress", {"name": "thinking", "data": 1}),
        (event("delta", "no mapping"), "node.progress", {"name": "delta", "data": "no mapping"}),
    ],
)
def test_node_event_contains_its_node(seen: NodeEvent, type: str, data: dict[str, Any]) -> None:
    assert node_event(seen) == (type, {**WHERE, **data})


@pytest.mark.parametrize("of", [dict, MappingProxyType])
def test_a_delta_is_a_piece_of_a_text_or_a_call_of_a_tool(of: Any) -> None:
    encoded = node_event(event("delta", of({"source": "a", "text": "x"})))
    assert encoded == ("text.delta", {"node_id": "n", "source": "a", "text": "x"})
    called = node_event(event("delta", of({"source": "a", "text": "x", "tool_call": {"name": "f"}})))
    assert called == ("tool.call", {"node_id": "n", "source": "a", "call": {"name": "f"}})


def test_approval_request_is_reported_by_another_event() -> None:
    assert node_event(event("approval_requested", {"id": "q"})) is None


def test_first_truncated_value_gives_the_finish_reason() -> None:
    whole, cut = DataValue("text", "x"), PartialValue("text", "x", "length")
    assert finish_reason([]) == finish_reason([whole]) == {}
    assert finish_reason([whole, cut, PartialValue("text", "x", "content_filter")]) == {"finish_reason": "length"}
    encoded = node_event(event("completed", {"a": whole, "b": cut}))
    assert encoded == ("node.completed", {**WHERE, "outputs": {"a": "x", "b": "x"}, "finish_reason": "length"})
