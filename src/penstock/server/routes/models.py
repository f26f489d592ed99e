"""The models that graphs can name: what each costs, whether its key is set, and which graphs name it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import Field

from penstock.hosting.ports import GraphRecord
from penstock.server.auth import User
from penstock.server.checkup import KEYS, has_key
from penstock.server.graph_check import all_graphs
from penstock.server.routes.money import PriceFigures, name_of, provider_of
from penstock.server.schemas import Shown
from penstock.server.state import KNOWN_QUERY, CurrentUser, ServerState, Service

router = APIRouter(prefix="/api/models", tags=["server"], dependencies=[KNOWN_QUERY])

MAX_GRAPHS_SHOWN = 50
"""Maximum number of graphs in `used_by` of a model; `graphs` counts them all."""


class UsingGraph(Shown):
    """A graph whose newest version names the model."""

    id: str
    name: str
    version: int


class ModelShown(Shown):
    """A model that graphs on this server can name."""

    id: str = Field(description="The name of the model in graphs")
    model: str = Field(description="Its name at its provider, by which it is priced")
    is_offered: bool = Field(description="Whether this server offers it; if not, a graph names it as a provider's")
    provider: str | None = Field(description="Null for a model of this server's own")
    priced: bool = Field(description="Whether calls can be charged")
    price: PriceFigures | None = Field(description="Null if no price is known")
    key: Literal["set", "missing"] | None = Field(
        description="For admins, whether the server has the provider's key; null if the provider requires none"
    )
    graphs: int = Field(description="Number of graphs that name it, by their newest versions")
    used_by: list[UsingGraph] = Field(description="These graphs by id, at most 50; archived ones are left out")


class OfferedModels(Shown):
    """The models of this server, by id."""

    models: list[ModelShown]


@router.get("")
async def models(service: Service, user: CurrentUser) -> OfferedModels:
    """List the models that graphs can name: those the server offers, and those of providers that graphs name.

    `used_by` has graphs of all users, which everyone may read. Models that Python code names are not seen. Keys are
    never shown.
    """
    used: dict[str, list[GraphRecord]] = {}
    for graph in await all_graphs(service.stores.graphs):
        for id in await service.graphs.models_in(graph):
            used.setdefault(id, []).append(graph)
    return OfferedModels(models=await asyncio.to_thread(_shown, service, user, service.graphs.models, used))


def _shown(
    service: ServerState, user: User, offered: Mapping[str, Any], used: Mapping[str, Sequence[GraphRecord]]
) -> list[ModelShown]:
    found = []
    for id in sorted({*offered, *used}):
        is_offered = id in offered
        if is_offered:
            name, provider = name_of(id, offered[id]), provider_of(offered[id])
        else:
            prefix, _, name = id.partition(":")
            provider = prefix.removesuffix("-responses")
        price = PriceFigures.of(service.host.prices, name)
        graphs = used.get(id, ())
        found.append(
            ModelShown(
                id=id,
                model=name,
                is_offered=is_offered,
                provider=provider,
                priced=service.host.prices.is_priced(name),
                price=None if price.source == "unknown" else price,
                key=_key(provider, is_offered) if user.is_admin else None,
                graphs=len(graphs),
                used_by=[
                    UsingGraph(id=graph.id, name=graph.name, version=graph.version)
                    for graph in graphs[:MAX_GRAPHS_SHOWN]
                ],
            )
        )
    return found


def _key(provider: str | None, is_offered: bool) -> Literal["set", "missing"] | None:
    if provider not in KEYS:
        return None
    # An offered model was created with a key, which need not be in the environment.
    return "set" if is_offered or has_key(provider) else "missing"
