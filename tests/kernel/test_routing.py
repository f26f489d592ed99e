"""What arrives at a handle is what was declared, never whatever came last."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.executor import ConversionFailed, Conversions, DataValue, Handle
from penstock.kernel.routing import Outputs, RoutingFailed, route
from tests.kernel.graphs import flow, link


def text(value: str) -> DataValue:
    return DataValue("text", value)


OUTPUTS: Outputs = {"a": {"output": text("A")}, "b": {"output": text("B"), "yes": text("Y")}}
EDGES = [flow("a", "c"), flow("b", "c")]


def handles(*declared: Handle) -> dict[str, Handle]:
    return {handle.name: handle for handle in declared}


def test_a_value_arrives_at_the_handle_of_its_edge() -> None:
    edges = [flow("a", "c", target_handle="left"), flow("b", "c", "yes", "right"), flow("a", "other")]
    assert route("c", edges, OUTPUTS) == {"left": text("A"), "right": text("Y")}


def test_an_edge_from_a_handle_that_was_not_used_brings_nothing() -> None:
    assert route("c", [flow("a", "c", "no"), flow("skipped", "c")], OUTPUTS) == {}


def test_a_link_brings_no_value() -> None:
    assert route("c", [link("a", "c")], OUTPUTS) == {}


def test_none_is_a_value_that_arrives() -> None:
    assert route("b", [flow("a", "b")], {"a": {"output": DataValue("any", None)}}) == {"input": DataValue("any", None)}


def test_a_handle_that_takes_a_list_gets_all_live_values_in_the_order_of_the_edges() -> None:
    declared = handles(Handle("input", many="list"))
    assert route("c", EDGES, OUTPUTS, declared) == {"input": DataValue("list", ["A", "B"])}
    assert route("c", EDGES[::-1], OUTPUTS, declared) == {"input": DataValue("list", ["B", "A"])}
    assert route("c", EDGES, {"b": OUTPUTS["b"]}, declared) == {"input": DataValue("list", ["B"])}


def test_a_handle_that_takes_the_first_gets_the_first_that_is_live() -> None:
    declared = handles(Handle("input", many="first"))
    assert route("c", EDGES, OUTPUTS, declared) == {"input": text("A")}
    assert route("c", EDGES, {"b": OUTPUTS["b"]}, declared) == {"input": text("B")}


@pytest.mark.parametrize("declared", [None, {}, handles(Handle("input"))])
def test_two_live_values_where_one_is_taken_are_an_error_that_names_both(declared: dict[str, Handle] | None) -> None:
    with pytest.raises(RoutingFailed, match=r"c\.input: .* a\.output and b\.output") as caught:
        route("c", EDGES, OUTPUTS, declared)
    assert caught.value.path == "c.input"


def test_an_open_handle_takes_whichever_branch_was_live() -> None:
    assert route("c", EDGES, {"b": OUTPUTS["b"]}) == {"input": text("B")}


def test_values_are_converted_to_the_type_of_the_handle() -> None:
    outputs = {"a": {"output": text("1")}, "b": {"output": text("2")}}
    assert route("c", EDGES, outputs, handles(Handle("input", "number", many="list"))) == {
        "input": DataValue("list", [1, 2])
    }
    assert route("c", EDGES[:1], outputs, handles(Handle("input", "number"))) == {"input": DataValue("number", 1)}


def test_a_failed_conversion_names_the_edge() -> None:
    with pytest.raises(ConversionFailed, match=r"a\.output → c\.input: text cannot become number"):
        route("c", EDGES[:1], OUTPUTS, handles(Handle("input", "number")))


def test_conversions_can_be_the_callers_own() -> None:
    own = Conversions({("text", "number"): len})
    assert route("c", EDGES[:1], OUTPUTS, handles(Handle("input", "number")), own) == {"input": DataValue("number", 1)}


def test_a_missing_required_value_is_an_error() -> None:
    declared = handles(Handle("input"), Handle("other", required=True), Handle("parts", channel="link", required=True))
    with pytest.raises(RoutingFailed, match=r"c\.other: a value is required"):
        route("c", EDGES[:1], OUTPUTS, declared)


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=6), st.sampled_from(["one", "list", "first"])
)
def test_every_live_value_is_taken_refused_or_passed_over_as_declared(edges: list[tuple[str, bool]], many: str) -> None:
    outputs = {f"n{at}": {"output": text(name)} for at, (name, live) in enumerate(edges) if live}
    live = [name for name, is_live in edges if is_live]
    into = [flow(f"n{at}", "z") for at in range(len(edges))]
    declared = handles(Handle("input", many=many))  # type: ignore[arg-type]
    if many == "one" and len(live) > 1:
        with pytest.raises(RoutingFailed):
            route("z", into, outputs, declared)
        return
    arrived = route("z", into, outputs, declared).get("input")
    if not live:
        assert arrived is None
    else:
        assert arrived == (DataValue("list", live) if many == "list" else text(live[0]))
