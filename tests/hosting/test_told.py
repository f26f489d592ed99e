"""What a hosted run tells, as JSON."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest

from penstock.hosting.work.told import SHORT, not_whole, of_node, plain, shown
from penstock.kernel.values import DataValue, PartialValue
from penstock.runtime.graphs.node_events import NodeEvent
from penstock.tracing.jsonable import MAX_TEXT

WHERE = {"node_id": "n", "node_type": "t"}


class Text(str):
    """A text of somebody's own."""


def event(event_type: str, data: Any = None, *, replayed: bool = False) -> NodeEvent:
    return NodeEvent("n", "t", event_type, "r", data, replayed=replayed)


@pytest.mark.parametrize("text", ["", "a", "x" * (SHORT + 1), "x" * (MAX_TEXT + 1), "é", Text("a"), Text("é")])
def test_a_text_that_can_be_encoded_is_told_as_it_is(text: str) -> None:
    assert plain(text) == text
    assert shown(text) == text if len(text) <= MAX_TEXT else shown(text).startswith("xxx")
    assert len(shown(text)) < MAX_TEXT + 100


@pytest.mark.parametrize("told", [plain, shown])
def test_half_a_surrogate_pair_is_replaced(told: Any) -> None:
    assert told("a\ud800") == "a?"
    assert told(["a\ud800"]) == ["a?"]


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
def test_an_event_of_a_node_is_told_with_the_node(seen: NodeEvent, type: str, data: dict[str, Any]) -> None:
    assert of_node(seen) == (type, {**WHERE, **data})


@pytest.mark.parametrize("of", [dict, MappingProxyType])
def test_a_delta_is_a_piece_of_a_text_or_a_call_of_a_tool(of: Any) -> None:
    said = of_node(event("delta", of({"source": "a", "text": "x"})))
    assert said == ("text.delta", {"node_id": "n", "source": "a", "text": "x"})
    called = of_node(event("delta", of({"source": "a", "text": "x", "tool_call": {"name": "f"}})))
    assert called == ("tool.call", {"node_id": "n", "source": "a", "call": {"name": "f"}})


def test_a_question_is_told_elsewhere() -> None:
    assert of_node(event("approval_requested", {"id": "q"})) is None


def test_the_first_value_that_is_not_whole_says_why() -> None:
    whole, cut = DataValue("text", "x"), PartialValue("text", "x", "length")
    assert not_whole([]) == not_whole([whole]) == {}
    assert not_whole([whole, cut, PartialValue("text", "x", "content_filter")]) == {"finish_reason": "length"}
    told = of_node(event("completed", {"a": whole, "b": cut}))
    assert told == ("node.completed", {**WHERE, "outputs": {"a": "x", "b": "x"}, "finish_reason": "length"})
