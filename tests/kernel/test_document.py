"""Graph JSON is read strictly: a graph, or every problem it has, and never anything else."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel import document
from penstock.kernel.document import graph_to_json, is_large, parse_graph, parse_part
from penstock.kernel.graph import MAX_PROBLEMS, EdgeSpec, GraphInvalid, GraphSpec, NodeSpec
from penstock.runtime.graphs.document_schema import json_schema

NODE = {"id": "a", "type": "step", "position": {"x": 1, "y": 2.5}, "data": {"depth": 3}}
EDGE = {
    "id": "e",
    "source": "a",
    "sourceHandle": None,
    "target": "b",
    "targetHandle": "left",
    "data": {"channel": "flow"},
}


def doc(*, nodes: Any = (NODE,), edges: Any = (), **more: Any) -> dict[str, Any]:
    listed = {"nodes": nodes, "edges": edges}
    return {name: list(one) if isinstance(one, tuple) else one for name, one in listed.items()} | more


def without(where: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in where.items() if name not in names}


def problems(given: Any) -> list[tuple[str, str]]:
    with pytest.raises(GraphInvalid) as caught:
        parse_graph(given)
    assert all(problem.detail for problem in caught.value.problems)
    str(caught.value).encode()
    return [(problem.code, problem.path) for problem in caught.value.problems]


def test_a_document_becomes_a_graph() -> None:
    graph = parse_graph(doc(nodes=(NODE, without(NODE, "position", "data") | {"id": "b"}), edges=(EDGE,), id="mine"))
    assert graph == GraphSpec(
        (NodeSpec("a", "step", {"depth": 3}, (1.0, 2.5)), NodeSpec("b", "step")),
        (EdgeSpec("e", "a", "b", "flow", "output", "left"),),
        "mine",
    )


@pytest.mark.parametrize(
    "given", [json.dumps(doc()), json.dumps(doc()).encode(), bytearray(json.dumps(doc()), "utf-8")]
)
def test_text_bytes_and_mappings_are_read_alike(given: str | bytes) -> None:
    assert parse_graph(given) == parse_graph(doc()) == parse_graph(MappingProxyType(doc()))


def test_a_handle_that_is_null_or_absent_is_the_usual_one() -> None:
    null = doc(edges=(EDGE | {"targetHandle": None},))
    absent = doc(edges=(without(EDGE, "sourceHandle", "targetHandle"),))
    for one in (null, absent):
        (edge,) = parse_graph(one).edges
        assert (edge.source_handle, edge.target_handle) == ("output", "input")


def test_other_fields_of_an_editor_are_ignored() -> None:
    node = NODE | {"selected": True, "width": 120, "measured": {"width": 1}}
    edge = EDGE | {"animated": True, "data": {"channel": "flow", "label": "x"}}
    assert parse_graph(doc(nodes=(node,), edges=(edge,), viewport={"zoom": 1})) == parse_graph(doc(edges=(EDGE,)))


def test_a_graph_is_independent_of_its_document() -> None:
    given = doc(nodes=({**NODE, "data": {"list": [1]}},))
    graph = parse_graph(given)
    given["nodes"][0]["data"]["list"].append(2)
    assert graph.nodes[0].data == {"list": [1]}
    written = graph_to_json(graph)
    written["nodes"][0]["data"]["list"].append(3)
    assert graph.nodes[0].data == {"list": [1]}


@pytest.mark.parametrize(
    ("data", "code", "path"),
    [
        ({}, "missing_channel", "$.edges[0].data.channel"),
        ({"channel": None}, "bad_channel", "$.edges[0].data.channel"),
        ({"channel": ""}, "bad_channel", "$.edges[0].data.channel"),
        ({"channel": "Flow"}, "bad_channel", "$.edges[0].data.channel"),
        ({"channel": ["flow"]}, "bad_channel", "$.edges[0].data.channel"),
        (None, "wrong_type", "$.edges[0].data"),
        ("flow", "wrong_type", "$.edges[0].data"),
    ],
)
def test_a_channel_is_never_inferred(data: Any, code: str, path: str) -> None:
    assert problems(doc(edges=(EDGE | {"data": data},))) == [(code, path)]


def test_an_edge_without_data_has_no_channel_either() -> None:
    assert problems(doc(edges=(without(EDGE, "data"),))) == [("missing_field", "$.edges[0].data")]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], [("wrong_type", "$")]),
        (None, [("wrong_type", "$")]),
        (5, [("wrong_type", "$")]),
        ({}, [("missing_field", "$.nodes"), ("missing_field", "$.edges")]),
        (doc(nodes=None), [("wrong_type", "$.nodes")]),
        (doc(nodes={"a": NODE}), [("wrong_type", "$.nodes")]),
        (doc(nodes=(5, NODE, None)), [("wrong_type", "$.nodes[0]"), ("wrong_type", "$.nodes[2]")]),
        (doc(nodes=(NODE | {"id": 5},)), [("wrong_type", "$.nodes[0].id")]),
        (doc(nodes=(NODE | {"id": b"a"},)), [("wrong_type", "$.nodes[0].id")]),
        (doc(nodes=(NODE | {"data": None},)), [("wrong_type", "$.nodes[0].data")]),
        (doc(nodes=(NODE | {"data": [1]},)), [("wrong_type", "$.nodes[0].data")]),
        (doc(nodes=(NODE | {"position": {"x": "1", "y": 2}},)), [("wrong_type", "$.nodes[0].position.x")]),
        (doc(nodes=(NODE | {"position": {"x": True, "y": 2}},)), [("wrong_type", "$.nodes[0].position.x")]),
        (doc(nodes=(NODE | {"position": {"x": 1}},)), [("missing_field", "$.nodes[0].position.y")]),
        (doc(nodes=(NODE | {"id": "a" * 501},)), [("too_large", "$.nodes[0].id")]),
        (doc(edges=(EDGE | {"sourceHandle": 0},)), [("wrong_type", "$.edges[0].sourceHandle")]),
        (doc(id=None), [("wrong_type", "$.id")]),
    ],
)
def test_each_wrong_shape_has_a_code_and_a_path(given: Any, expected: list[tuple[str, str]]) -> None:
    assert problems(given) == expected


def test_all_wrong_shapes_are_listed_at_once() -> None:
    given = doc(nodes=(without(NODE, "id"), NODE | {"type": 1}), edges=(EDGE, EDGE | {"source": None, "data": {}}))
    assert problems(given) == [
        ("missing_field", "$.nodes[0].id"),
        ("wrong_type", "$.nodes[1].type"),
        ("wrong_type", "$.edges[1].source"),
        ("missing_channel", "$.edges[1].data.channel"),
    ]


def with_data(value: Any) -> dict[str, Any]:
    return doc(nodes=(NODE | {"data": {"a key": [value]}},))


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (math.nan, "bad_number"),
        (-math.inf, "bad_number"),
        pytest.param(10**5_000, "bad_number", id="a huge int"),
        (2**63, "bad_number"),
        ("\ud800", "bad_text"),
        ({"\udfff": 1}, "bad_text"),
        ({5: 1}, "wrong_type"),
        (b"bytes", "wrong_type"),
        ({1, 2}, "wrong_type"),
        (object(), "wrong_type"),
    ],
)
def test_data_is_json_all_through(value: Any, code: str) -> None:
    assert problems(with_data(value)) == [(code, '$.nodes[0].data["a key"][0]')]


@pytest.mark.parametrize(
    "value", [None, True, 2**63 - 1, -(2**63) + 1, 1e308, -0.0, "\U0001f600\x00\u2028", "\\ud800", [], {}]
)
def test_odd_values_that_are_json_are_kept(value: Any) -> None:
    assert parse_graph(with_data(value)).nodes[0].data == {"a key": [value]}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "bad_json"),
        ("{", "bad_json"),
        ("nonsense", "bad_json"),
        ("[" * 1_000_000, "too_deep"),
        ('{"a":' * 1_000_000, "too_deep"),
        ('{"nodes": [], "edges": [], "x": NaN}', "bad_json"),
        ('{"nodes": [], "edges": [], "x": -Infinity}', "bad_json"),
        ('{"nodes": [], "edges": [], "x": ' + "9" * 10_000 + "}", "bad_json"),
        ('{"nodes": [], "edges": [], "edges": []}', "bad_json"),
        ('{"nodes": [], "edges": []} {}', "bad_json"),
        ("\ufeff{}", "bad_json"),
        (b"\xff\xfe{\x00}\x00", "bad_json"),
        (b'{"nodes": "\xc3\x28"}', "bad_json"),
        ('{"nodes": [], "edges": [], "x": 1e999}', "bad_number"),
        ('{"nodes": [], "edges": [], "x": "\\ud800"}', "bad_text"),
    ],
    ids=range(15),
)
def test_text_that_is_no_strict_json_is_one_problem(text: str | bytes, code: str) -> None:
    ((found, _),) = problems(text)
    assert found == code


def test_nesting_is_fine_up_to_its_limit_and_refused_after_it() -> None:
    def nested(levels: int) -> dict[str, Any]:
        value: Any = 1
        for _ in range(levels):
            value = [value]
        return doc(nodes=(NODE | {"data": {"deep": value}},))

    above = 4  # the document, its nodes, a node, its data
    assert parse_graph(nested(document.MAX_DEPTH - above))
    ((code, path),) = problems(nested(document.MAX_DEPTH - above + 1))
    assert code == "too_deep"
    assert path.startswith("$.nodes[0].data.deep[0]")


def test_an_object_that_contains_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    line: dict[str, Any] = {}
    line["self"] = line
    assert [code for code, _ in problems(with_data(line))] == ["too_deep"]
    monkeypatch.setattr(document, "MAX_VALUES", 10_000)
    bomb: list[Any] = []
    bomb += [bomb] * 10
    assert ("too_large", "$") in problems(with_data(bomb))


@pytest.mark.parametrize("what", ["nodes", "edges"])
def test_a_list_that_is_too_long_is_refused_before_it_is_looked_at(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, f"MAX_{what.upper()}", 3)
    assert problems(doc(**{what: [object()] * 4})) == [("too_large", f"$.{what}")]


def test_text_that_is_too_long_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps(doc())
    monkeypatch.setattr(document, "MAX_DOCUMENT_BYTES", len(text))
    assert parse_graph(text)
    assert problems("{" + text) == [("too_large", "$")]


def test_a_problem_far_down_a_long_list_has_its_own_number() -> None:
    edges = [EDGE] * 2_499 + [EDGE | {"data": {"channel": "none"}}]
    assert problems(doc(edges=edges)) == [("bad_channel", "$.edges[2499].data.channel")]


@pytest.mark.parametrize("bad", [5, math.nan])
def test_a_document_that_is_all_wrong_is_given_up_before_it_fills_the_memory(bad: Any) -> None:
    most = MAX_PROBLEMS + document.PIECE
    assert MAX_PROBLEMS <= len(problems(doc(nodes=[bad] * 50_000, edges=[bad] * 50_000))) <= most


def test_a_duplicate_key_among_many_is_found_quickly() -> None:
    pairs = ", ".join(f'"k{at}": 0' for at in range(200_000))
    assert problems("{" + pairs + ', "k199999": 0}') == [("bad_json", "$")]


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
PLACES = st.floats(-1e9, 1e9)
GRAPHS = st.builds(
    GraphSpec,
    st.lists(
        st.builds(NodeSpec, NAMES, NAMES, st.dictionaries(NAMES, JSON, max_size=3), st.tuples(PLACES, PLACES)),
        max_size=4,
    ).map(tuple),
    st.lists(st.builds(EdgeSpec, NAMES, NAMES, NAMES, st.sampled_from(["flow", "link"]), NAMES, NAMES), max_size=4).map(
        tuple
    ),
    NAMES,
)


@given(GRAPHS)
def test_a_graph_written_and_read_again_is_the_same(graph: GraphSpec) -> None:
    written = graph_to_json(graph)
    assert parse_graph(written) == graph
    assert parse_graph(json.dumps(written, allow_nan=False)) == graph


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["id", "data", "channel"]), inner),
    max_leaves=6,
)
ALMOST = st.fixed_dictionaries(
    {},
    optional={
        "nodes": ANYTHING
        | st.lists(
            ANYTHING | st.fixed_dictionaries({"id": ANYTHING, "type": ANYTHING}, optional={"data": ANYTHING}),
            max_size=3,
        ),
        "edges": ANYTHING | st.lists(ANYTHING | st.fixed_dictionaries({"id": ANYTHING, "data": ANYTHING}), max_size=3),
        "id": ANYTHING,
    },
)


@given(ALMOST | ANYTHING | st.text() | st.binary())
def test_whatever_is_given_is_a_graph_or_problems(given: Any) -> None:
    try:
        graph = parse_graph(given)
    except GraphInvalid as invalid:
        found = invalid.problems
        assert found
        assert all(problem.path.startswith("$") and problem.detail for problem in found)
    else:
        assert isinstance(graph, GraphSpec)


def test_the_schema_describes_the_accepted_documents() -> None:
    schema = json_schema()
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert schema["required"] == ["nodes", "edges"]
    assert schema["$defs"]["EdgeData"]["properties"]["channel"]["enum"] == ["flow", "link"]
    assert schema["$defs"]["EdgeData"]["required"] == ["channel"]
    assert schema["$defs"]["Edge"]["required"] == ["id", "source", "target", "data"]
    assert schema["$defs"]["Node"]["required"] == ["id", "type"]
    json.dumps(schema)


@pytest.mark.parametrize(
    "module", ["graph", "plan", "frontier", "validate", "executor", "links", "routing", "render", "document"]
)
def test_pydantic_is_loaded_when_a_graph_is_read_and_not_before(module: str) -> None:
    code = f"import sys, penstock.kernel.{module}; print('pydantic' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


# Parts of documents, and large ones.


def test_a_part_of_a_document_that_was_read_is_not_copied() -> None:
    node = {**NODE, "data": {"words": ["a"]}}
    whole = parse_graph(doc(nodes=({**NODE, "data": {"graph": doc(nodes=(node,))}},)))
    part = whole.nodes[0].data["graph"]
    read = parse_part(part)
    assert read == parse_graph(part)
    assert read.nodes[0].data["words"] is part["nodes"][0]["data"]["words"]


@pytest.mark.parametrize("part", [{"nodes": 3}, doc(nodes=({"id": 1},)), {}, doc(edges=({**EDGE, "data": {}},))])
def test_a_part_that_is_no_graph_is_reported_as_for_a_whole_document(part: Any) -> None:
    with pytest.raises(GraphInvalid) as whole:
        parse_graph(part)
    with pytest.raises(GraphInvalid) as read:
        parse_part(part)
    assert read.value.problems == whole.value.problems


def test_a_graph_is_large_by_all_that_is_in_it_however_deep() -> None:
    assert not is_large(doc())
    assert not is_large({})
    many = [{**NODE, "id": str(number)} for number in range(document.SMALL // 10)]
    assert is_large(doc(nodes=many))
    inside = doc(nodes=many[: len(many) // 4])
    assert not is_large(inside)
    for _ in range(3):
        inside = doc(nodes=[{**NODE, "id": str(number), "data": {"graph": inside}} for number in range(2)])
    assert is_large(inside)
    around: dict[str, Any] = {}
    around["nodes"] = [around]
    assert is_large(around)
