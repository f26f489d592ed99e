"""Graphs as models: the id of a graph is the name of a model, and `graph@3` that of its third version.

As everywhere, whoever is let in may read and run all graphs; runs are their owner's alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.chat.scope import CHAT_START_TYPES
from penstock.hosting.host import GraphArchived
from penstock.hosting.records import GraphRecord
from penstock.server.openai.refusals import model_not_found
from penstock.server.runnable import Runnable

if TYPE_CHECKING:
    from penstock.hosting.ports import GraphStore

PAGE = 100
MAX_LISTED = 10_000


async def find(graphs: GraphStore, model: str) -> GraphRecord:
    """The graph behind a model; Refused if it is not there, or was archived."""
    graph_id, at, version = model.partition("@")
    if at and not (version.isascii() and version.isdigit() and len(version) < 10):
        raise model_not_found(model)
    record = await graphs.get(graph_id, int(version) if at else None)
    if record is None:
        raise model_not_found(model)
    if record.is_archived:
        raise model_not_found(model, str(GraphArchived(graph_id)))
    return record


def named_version(graph: GraphRecord, model: str) -> int | None:
    """The version that the name of the model asks for; None for the newest, whichever that is."""
    return graph.version if "@" in model else None


async def runnable(graphs: GraphStore, known: Runnable) -> list[GraphRecord]:
    """All graphs that can run, in order of their ids: those that converse, in a chat."""
    return [one for one in await listed(graphs) if not await known.problems(one, in_chat=converses(one))]


async def listed(graphs: GraphStore) -> list[GraphRecord]:
    """All graphs, in order of their ids; drafts are among them."""
    found: list[GraphRecord] = []
    before: str | None = None
    while len(found) < MAX_LISTED:
        page = await graphs.list(before=before, limit=PAGE)
        found.extend(page)
        if len(page) < PAGE:
            break
        before = page[-1].id
    return found


def converses(record: GraphRecord) -> bool:
    """Whether the graph takes part in a conversation: it has a node where one begins."""
    nodes: Sequence[Any] = record.document.get("nodes") or ()
    return any(isinstance(node, dict) and node.get("type") in CHAT_START_TYPES for node in nodes)


def described(record: GraphRecord) -> dict[str, Any]:
    """The graph as a model object."""
    about = {"name": record.name, "version": record.version, "chat": converses(record)}
    return {
        "id": record.id,
        "object": "model",
        "created": record.created_ms // 1000,
        "owned_by": record.owner,
        "penstock": about,
    }
