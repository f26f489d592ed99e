"""What the /v1 endpoints share: the services behind them, graphs as models, and a request to run a graph.

The name of a model is the id of its graph, or `graph@3` for the graph's third version. As in the rest of the API, every
authenticated user may read and run all graphs; runs are private to their owner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import InvalidValue
from penstock.hosting.host import GraphArchived
from penstock.hosting.limits import NAMES, RunLimits
from penstock.hosting.records import GraphRecord
from penstock.server.auth import User
from penstock.server.graph_check import GraphChecker, is_conversational
from penstock.server.openai.refusals import model_not_found
from penstock.server.openai.wire.request import ChatCompletionBody, ResponseBody, Turn
from penstock.server.schemas import parse_limits
from penstock.server.sse import Streams

if TYPE_CHECKING:
    from penstock.chat.service import ChatService
    from penstock.hosting.host import RunHost
    from penstock.hosting.ports import GraphStore
    from penstock.storage import Stores


@dataclass(frozen=True, slots=True)
class Service:
    """Shared objects of the endpoints."""

    host: RunHost
    chats: ChatService
    stores: Stores
    graphs: GraphChecker
    streams: Streams

    async def graph_of(self, model: str, run_id: str | None = None) -> GraphRecord:
        """Return the graph of a model; raise Refused if it does not exist, GraphInvalid if it cannot run.

        For an existing run, return the version that it runs, even if a newer one was saved or the graph was archived.
        """
        run = None if run_id is None else await self.host.get(run_id)
        if run is not None and model in (run.graph_id, f"{run.graph_id}@{run.graph_version}"):
            known = await self.stores.graphs.get(run.graph_id, run.graph_version)
            if known is not None:
                return known
        graph = await _find(self.stores.graphs, model)
        return await self.graphs.must_run(graph, in_chat=is_conversational(graph))


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A request to run a graph on a conversation."""

    service: Service
    user: User
    graph: GraphRecord
    turns: Sequence[Turn]
    body: ChatCompletionBody | ResponseBody
    about: Mapping[str, Any] | None = None
    """Stored with the run."""

    @property
    def run_id(self) -> str | None:
        """The id that the client chose for the run; None if the host chooses it."""
        return self.body.penstock.run_id

    @property
    def version(self) -> int | None:
        """The version of the graph that the model name selects; None for the newest version."""
        return self.graph.version if "@" in self.body.model else None

    def limits(self) -> RunLimits | None:
        """Return the limits that the request sets; raise InvalidValue with the field that is invalid or too high."""
        given = self.body.penstock.limits
        if given is None:
            return None
        try:
            return parse_limits(given).within(self.service.host.settings.ceilings)
        except InvalidValue as error:
            name = f".{error.field}" if error.field in NAMES else ""
            raise InvalidValue(f"penstock.limits{name}", error.value, error.expected) from None


async def _find(graphs: GraphStore, model: str) -> GraphRecord:
    """Return the graph of a model; raise Refused if it does not exist or is archived."""
    graph_id, at, version = model.partition("@")
    if at and not (version.isascii() and version.isdigit() and len(version) < 10):
        raise model_not_found(model)
    record = await graphs.get(graph_id, int(version) if at else None)
    if record is None:
        raise model_not_found(model)
    if record.is_archived:
        raise model_not_found(model, str(GraphArchived(graph_id)))
    return record


def model_object(record: GraphRecord) -> dict[str, Any]:
    """Return the graph as an OpenAI model object."""
    about = {"name": record.name, "version": record.version, "chat": is_conversational(record)}
    return {
        "id": record.id,
        "object": "model",
        "created": record.created_ms // 1000,
        "owned_by": record.owner,
        "penstock": about,
    }
