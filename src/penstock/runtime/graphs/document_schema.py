"""The JSON Schema of graph documents, for editors, API clients and hand-written graphs.

The shape is that of the documents that `parse_graph` reads, including the options of nodes. The settings of each node
type are in the schema of its data (`data_schema`). Needs pydantic; import this module only when a schema is needed.
"""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter, with_config
from typing_extensions import TypedDict  # comes with pydantic, which wants this one before Python 3.12

from penstock.kernel.graph import MAX_EDGES, MAX_NODES
from penstock.kernel.schema import STRICT, Edge, Name, Position
from penstock.runtime.graphs.node_options import ErrorPolicyData, OptionsData
from penstock.runtime.graphs.settings import BudgetData


@with_config(ConfigDict(extra="allow"))
class NodeData(TypedDict):
    """The options of a node that runs, beside the settings of its type."""

    error_policy: NotRequired[ErrorPolicyData | None]
    budget: NotRequired[BudgetData | None]


@with_config(STRICT)
class Node(TypedDict):
    """A vertex and the settings of the executor behind its type."""

    id: Name
    type: Name
    position: NotRequired[Position]
    data: NotRequired[NodeData]


@with_config(STRICT)
class Document(TypedDict):
    """A graph as an editor writes it."""

    id: NotRequired[Name]
    nodes: Annotated[list[Node], Field(max_length=MAX_NODES)]
    edges: Annotated[list[Edge], Field(max_length=MAX_EDGES)]


DOCUMENT: TypeAdapter[Document] = TypeAdapter(Document)
OPTIONS: TypeAdapter[OptionsData] = TypeAdapter(OptionsData)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the documents that `parse_graph` reads."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **DOCUMENT.json_schema()}


def data_schema(executor: Any) -> dict[str, Any] | None:
    """Return the JSON Schema of an executor's node data, with the options of nodes that run; None if it has none."""
    own = getattr(executor, "schema", None)
    if not callable(own):
        return None
    schema: dict[str, Any] = own()
    if not callable(getattr(executor, "execute", None)):
        return schema
    options = OPTIONS.json_schema()
    return {
        **schema,
        "properties": {**schema.get("properties", {}), **options["properties"]},
        "$defs": {**schema.get("$defs", {}), **options["$defs"]},
    }
