"""The shape of a graph's JSON, for pydantic and for authors of editors.

The only module of the kernel that needs pydantic; `document` imports it when a graph is read, not before.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter, with_config
from typing_extensions import TypedDict  # comes with pydantic, which wants this one before Python 3.12

from penstock.kernel.graph import MAX_NAME_LENGTH

STRICT = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
"""No value is coerced; other fields, which an editor may add, are ignored."""

Name = Annotated[str, Field(max_length=MAX_NAME_LENGTH)]


@with_config(STRICT)
class Position(TypedDict):
    """Where the editor draws the node."""

    x: float
    y: float


@with_config(STRICT)
class Node(TypedDict):
    """A vertex and the settings of the executor behind its type."""

    id: Name
    type: Name
    position: NotRequired[Position]
    data: NotRequired[dict[str, Any]]


@with_config(STRICT)
class EdgeData(TypedDict):
    """The kind of connection: always given, never inferred."""

    channel: Literal["flow", "link"]


@with_config(STRICT)
class Edge(TypedDict):
    """A connection; a handle that is null or absent is the default handle of the node."""

    id: Name
    source: Name
    sourceHandle: NotRequired[Name | None]
    target: Name
    targetHandle: NotRequired[Name | None]
    data: EdgeData


@with_config(STRICT)
class Outline(TypedDict):
    """A graph as an editor writes it, before the items of its lists are checked."""

    id: NotRequired[Name]
    nodes: list[Any]
    edges: list[Any]


OUTLINE: TypeAdapter[Outline] = TypeAdapter(Outline)
NODES: TypeAdapter[list[Node]] = TypeAdapter(list[Node])
EDGES: TypeAdapter[list[Edge]] = TypeAdapter(list[Edge])
