"""Read graph JSON as an editor writes it into a GraphSpec, and write it back.

The input may be hostile. In this order: the size is bounded; the text is read as strict JSON; every value is checked
and copied (depth, numbers, text that cannot be encoded); only then does pydantic check the shape. `parse_graph` reports
all problems that one step finds, up to MAX_PROBLEMS; the steps after it do not run.

`read_loosely` continues after problems: it returns as much of the graph as can be read, for `validate`, which checks
whether the graph can run and ignores values of the wrong type. Nodes and edges keep their positions, so that all paths
are those of the document.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.kernel.graph import (
    DEFAULT_INPUT,
    DEFAULT_OUTPUT,
    MAX_EDGES,
    MAX_NODES,
    MAX_PROBLEMS,
    EdgeSpec,
    GraphInvalid,
    GraphSpec,
    NodeSpec,
    Problem,
    shown,
    thawed,
)

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

    from penstock.kernel.schema import Edge, Node, Outline

MAX_DOCUMENT_BYTES = 64 * 1024 * 1024
MAX_DEPTH = 64
MAX_VALUES = 5_000_000
MAX_WHOLE_NUMBER = 2**63 - 1
PIECE = 1_000
SMALL = 2_000
"""Number of values that are read faster inline than on a thread; a plain node with an edge has about twenty."""

STEP = re.compile(r"\.\w+|\[[^\]]*\]")
"""One step of a path, as `_step` writes it."""

T = TypeVar("T")

CODES: Mapping[str, str] = {
    "missing": "missing_field",
    "literal_error": "bad_channel",
    "string_too_long": "too_large",
    "too_long": "too_large",
    "finite_number": "bad_number",
}
"""Our codes for the errors of pydantic; any other error is a wrong_type."""


def parse_graph(document: str | bytes | bytearray | Mapping[str, Any]) -> GraphSpec:
    """Return the graph in `document`; raises GraphInvalid with every problem of a malformed one."""
    decoded = document if isinstance(document, Mapping) else _decoded(document)
    _raise_any(_too_large(decoded))
    problems: list[Problem] = []
    plain = _Copying(problems).copy(decoded, lambda: "$", 0)
    _raise_any(problems)
    return _shaped(plain)


def parse_part(document: Mapping[str, Any]) -> GraphSpec:
    """Return the graph in a part of a document that `parse_graph` has read: only its shape is checked, and nothing is
    copied.
    """
    _raise_any(_too_large(document))
    return _shaped(document)


def read_loosely(
    document: str | bytes | bytearray | Mapping[str, Any], *, is_part: bool = False
) -> tuple[GraphSpec | None, list[Problem]]:
    """Return as much of the graph as can be read, and every problem of its JSON; None if the nodes cannot be found.

    A name that is missing or has the wrong type is "" in the graph, which `validate` treats as missing. For
    `parse_graph`, a graph with problems is invalid. Of a part of a document that was already read, only the shape is
    checked.
    """
    problems: list[Problem] = []
    try:
        decoded = document if isinstance(document, Mapping) else _decoded(document)
        _raise_any(_too_large(decoded))
        plain = decoded if is_part else _Copying(problems).copy(decoded, lambda: "$", 0)
    except GraphInvalid as invalid:
        return None, list(invalid.problems)
    outline, nodes, edges, misshapen = _shape(plain)
    problems = without_repeats(problems, misshapen)
    if not problems and outline is not None:
        return GraphSpec(tuple(map(_as_node, nodes)), tuple(map(_as_edge, edges)), outline.get("id", "graph")), []
    return _loose_graph(plain), problems


def without_repeats(first: Sequence[Problem], second: Iterable[Problem]) -> list[Problem]:
    """Join both lists, up to MAX_PROBLEMS; a problem of the second at or inside a place of the first is omitted."""
    places = {problem.path for problem in first}
    new = (problem for problem in second if places.isdisjoint(_places_around(problem.path)))
    return [*first, *islice(new, max(0, MAX_PROBLEMS - len(first)))] if places else list(islice(second, MAX_PROBLEMS))


def _places_around(path: str) -> Iterator[str]:
    """Return the path and those of its containers, except the lists of a graph and the graph itself."""
    yield path
    for step in reversed(list(STEP.finditer(path))[2:]):
        yield path[: step.start()]


def is_large(document: Mapping[str, Any]) -> bool:
    """Whether reading the document, nested graphs included, takes so long that it should not block others."""
    left = SMALL
    todo: list[Any] = [document]
    while todo:
        one = todo.pop()
        left -= 1 + len(one)
        if left < 0:
            return True
        inside = one.values() if isinstance(one, Mapping) else one
        todo.extend(value for value in inside if isinstance(value, (Mapping, list, tuple)))
    return False


def graph_to_json(graph: GraphSpec) -> dict[str, Any]:
    """Return the graph as `parse_graph` reads it, with every handle and channel written out."""
    return {
        "id": graph.id,
        "nodes": [_node_to_json(node) for node in graph.nodes],
        "edges": [_edge_to_json(edge) for edge in graph.edges],
    }


def _decoded(document: str | bytes | bytearray) -> Any:
    if not isinstance(document, (str, bytes, bytearray)):
        raise GraphInvalid([Problem("wrong_type", "$", f"a graph is a JSON object, not {type(document).__name__}")])
    if len(document) > MAX_DOCUMENT_BYTES:
        detail = f"{len(document)} bytes are more than the {MAX_DOCUMENT_BYTES} a graph may have"
        raise GraphInvalid([Problem("too_large", "$", detail)])
    try:
        text = document if isinstance(document, str) else document.decode("utf-8")
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_as_object)
    except RecursionError:
        problem = Problem("too_deep", "$", f"values are nested deeper than the {MAX_DEPTH} levels a graph may have")
    except ValueError as error:
        problem = Problem("bad_json", "$", f"this is not JSON: {str(error)[:200]}")
    raise GraphInvalid([problem])


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def _as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {shown(twice)} occurs twice in one object")
    return found


def _too_large(decoded: Any) -> Iterator[Problem]:
    """Return the problems that counting alone finds."""
    for what, limit in (("nodes", MAX_NODES), ("edges", MAX_EDGES)):
        listed = decoded.get(what) if isinstance(decoded, Mapping) else None
        if isinstance(listed, (list, tuple)) and len(listed) > limit:
            yield Problem("too_large", f"$.{what}", f"{len(listed)} {what} are more than the {limit} a graph may have")


def _raise_any(problems: Iterator[Problem] | list[Problem]) -> None:
    found = list(problems)
    if found:
        raise GraphInvalid(found)


Path = Callable[[], str]
"""The path of the current value, joined only when there is a problem to report."""


class _Copying:
    """Copies a JSON value, and records the places that are not JSON.

    The copy makes a graph independent of the document it came from. Depth bounds the recursion, and a count bounds the
    work: an object that contains itself many times is small to send and endless to walk.
    """

    def __init__(self, problems: list[Problem]) -> None:
        self._problems = problems
        self._left = MAX_VALUES

    def copy(self, value: Any, path: Path, depth: int) -> Any:
        self._left -= 1
        if self._left < 0:
            return self._refuse_size()
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return self._text(value, path)
        if isinstance(value, (int, float)):
            return self._number(value, path)
        if depth >= MAX_DEPTH:
            detail = f"values are nested deeper than the {MAX_DEPTH} levels a graph may have"
            return self._note("too_deep", path, detail)
        if isinstance(value, Mapping):
            return self._object(value, path, depth)
        if isinstance(value, (list, tuple)):
            return [self.copy(one, lambda at=at: f"{path()}[{at}]", depth + 1) for at, one in enumerate(value)]  # type: ignore[misc]
        return self._note("wrong_type", path, f"{type(value).__name__} is not a value of JSON")

    def _object(self, value: Mapping[Any, Any], path: Path, depth: int) -> dict[str, Any]:
        copied: dict[str, Any] = {}
        for key, one in value.items():
            if not isinstance(key, str):
                self._note("wrong_type", path, f"the key {_shown(key)} is not text")
            elif not _is_encodable(key):
                self._note("bad_text", path, f"the key {_shown(key)} has half of a surrogate pair")
            else:
                copied[str(key)] = self.copy(one, lambda key=key: path() + _step(key), depth + 1)  # type: ignore[misc]
        return copied

    def _text(self, value: str, path: Path) -> Any:
        if _is_encodable(value):
            return str(value)
        return self._note("bad_text", path, f"{_shown(value)} has half of a surrogate pair")

    def _number(self, value: float | int, path: Path) -> Any:
        if isinstance(value, int) and abs(value) > MAX_WHOLE_NUMBER:
            return self._note("bad_number", path, f"a whole number of {value.bit_length()} bits is too large")
        if isinstance(value, float) and not math.isfinite(value):
            return self._note("bad_number", path, "NaN and infinities are not numbers of JSON")
        return value

    def _refuse_size(self) -> None:
        self._problems.append(Problem("too_large", "$", f"a graph may have {MAX_VALUES} values, and this has more"))
        raise GraphInvalid(self._problems)

    def _note(self, code: str, path: Path, detail: str) -> None:
        self._problems.append(Problem(code, path(), detail))
        if len(self._problems) >= MAX_PROBLEMS:
            raise GraphInvalid(self._problems)


def _is_encodable(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: object) -> str:
    return ascii(value)[:80] if isinstance(value, str) else f"of type {type(value).__name__}"


def _step(key: str | int) -> str:
    """Return one step of a JSON path: `.name`, `[3]`, or `["any other name"]`."""
    if isinstance(key, int):
        return f"[{key}]"
    return f".{key}" if key.isidentifier() else f"[{json.dumps(key[:80])}]"


def _shaped(plain: Any) -> GraphSpec:
    """Return the graph in a value that is known to be JSON."""
    outline, nodes, edges, problems = _shape(plain)
    if outline is None or problems:
        raise GraphInvalid(problems)
    return GraphSpec(tuple(map(_as_node, nodes)), tuple(map(_as_edge, edges)), outline.get("id", "graph"))


def _shape(plain: Any) -> tuple[Outline | None, list[Node], list[Edge], list[Problem]]:
    """Return what has the right shape, and all problems; lists are checked in chunks, to stop at MAX_PROBLEMS."""
    from penstock.kernel.schema import EDGES, NODES, OUTLINE

    problems: list[Problem] = []
    outline = _checked(OUTLINE, plain, (), 0, problems)
    listed = plain if isinstance(plain, dict) else {}
    nodes = list(_checked_list(NODES, listed.get("nodes"), "nodes", problems))
    edges = list(_checked_list(EDGES, listed.get("edges"), "edges", problems))
    return outline, nodes, edges, problems


def _loose_graph(plain: Any) -> GraphSpec | None:
    """Return the graph in a value that does not have its shape; None if it has no list of nodes."""
    if not isinstance(plain, dict) or not isinstance(plain.get("nodes"), list):
        return None
    edges = plain.get("edges")
    nodes = tuple(map(_loose_node, plain["nodes"]))
    return GraphSpec(nodes, tuple(map(_loose_edge, edges if isinstance(edges, list) else ())))


def _loose_node(node: Any) -> NodeSpec:
    fields = node if isinstance(node, dict) else {}
    data = fields.get("data")
    return NodeSpec(_name(fields, "id"), _name(fields, "type"), data if isinstance(data, dict) else {})


def _loose_edge(edge: Any) -> EdgeSpec:
    fields = edge if isinstance(edge, dict) else {}
    data = fields.get("data")
    channel: Any = _name(data if isinstance(data, dict) else {}, "channel")
    return EdgeSpec(
        _name(fields, "id"),
        _name(fields, "source"),
        _name(fields, "target"),
        channel,
        _name(fields, "sourceHandle", DEFAULT_OUTPUT),
        _name(fields, "targetHandle", DEFAULT_INPUT),
    )


def _name(fields: Mapping[str, Any], name: str, default: str = "") -> str:
    """Return the text in a field: `default` if it is null or missing, "" (not a valid name) if it is not text."""
    value = fields.get(name)
    return default if value is None else value if isinstance(value, str) else ""


def _checked_list(adapter: TypeAdapter[list[T]], listed: Any, what: str, problems: list[Problem]) -> Iterator[T]:
    if not isinstance(listed, list):
        return
    for first in range(0, len(listed), PIECE):
        if len(problems) < MAX_PROBLEMS:
            yield from _checked(adapter, listed[first : first + PIECE], (what,), first, problems) or ()


def _checked(
    adapter: TypeAdapter[T], value: Any, above: tuple[str, ...], first: int, problems: list[Problem]
) -> T | None:
    """Return `value` if it has the shape, otherwise the problems with paths below `above`, counted from `first`."""
    from pydantic import ValidationError

    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        for detail in error.errors(include_url=False, include_context=False, include_input=False):
            where = detail["loc"]
            if above and where and isinstance(where[0], int):
                where = (first + where[0], *where[1:])
            problems.append(_problem(detail, (*above, *where)))
    return None


def _problem(detail: ErrorDetails, where: tuple[str | int, ...]) -> Problem:
    path = "$" + "".join(map(_step, where))
    code = CODES.get(detail["type"], "wrong_type")
    if code == "missing_field" and path.endswith(".data.channel"):
        return Problem("missing_channel", path, "every edge says its channel, flow or link")
    if code == "bad_channel":
        return Problem(code, path, "a channel is flow or link")
    sentence = detail["msg"]
    return Problem(code, path, sentence[:1].lower() + sentence[1:])


def _as_node(node: Node) -> NodeSpec:
    position = node.get("position")
    where = (0.0, 0.0) if position is None else (position["x"], position["y"])
    return NodeSpec(node["id"], node["type"], node.get("data", {}), where)


def _as_edge(edge: Edge) -> EdgeSpec:
    source_handle, target_handle = edge.get("sourceHandle"), edge.get("targetHandle")
    return EdgeSpec(
        edge["id"],
        edge["source"],
        edge["target"],
        edge["data"]["channel"],
        DEFAULT_OUTPUT if source_handle is None else source_handle,
        DEFAULT_INPUT if target_handle is None else target_handle,
    )


def _node_to_json(node: NodeSpec) -> dict[str, Any]:
    x, y = node.position
    return {"id": node.id, "type": node.type, "position": {"x": x, "y": y}, "data": thawed(node.data)}


def _edge_to_json(edge: EdgeSpec) -> dict[str, Any]:
    return {
        "id": edge.id,
        "source": edge.source,
        "sourceHandle": edge.source_handle,
        "target": edge.target,
        "targetHandle": edge.target_handle,
        "data": {"channel": edge.channel},
    }
