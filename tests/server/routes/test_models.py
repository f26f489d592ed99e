"""The models that graphs can name: their prices, the keys of their providers, and the graphs that name them."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.agents.scripted import ScriptedModel
from penstock.runtime.billing.prices import Price, PriceBook
from penstock.server.routes.models import MAX_GRAPHS_SHOWN
from tests.hosting.graphs import graph
from tests.server.served import ECHO, Served, served

KEY = "sk-canary-0123456789"
VARIABLES = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")
PRICES = PriceBook(
    registered={
        "gpt-small": Price("0.15", "0.60", cached_input_usd_per_mtok="0.075"),
        "gpt-4o": Price("2.50", 10),
    },
    use_genai_prices=False,
)


class Remote(ScriptedModel):
    """An offered model of a provider, without its client."""

    provider = "openai"


class Compatible(ScriptedModel):
    provider = "openai-compatible:http://models.internal:8080/v1"


OFFERED = {
    "small": Remote(["x"], name="gpt-small"),
    "local": Compatible(["x"], name="llama"),
    "scripted": ScriptedModel(["x"], name="unpriced"),
}


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def naming(*models: str) -> dict[str, Any]:
    """A graph with one node for each model."""
    ids = [f"n{at}" for at, _ in enumerate(models)]
    nodes = [(id, "llm-completion", {"model": name}) for id, name in zip(ids, models, strict=True)]
    return graph(("in", "input", {}), *nodes, edges=" ".join(f"in>{id}" for id in ids))


async def listed(server: Served, user: str = "vera") -> dict[str, Any]:
    async with server.client(user) as client:
        answer = await client.get("/api/models")
    assert answer.status_code == 200, answer.text
    assert KEY not in answer.text
    assert "models.internal" not in answer.text
    return {one["id"]: one for one in answer.json()["models"]}


async def test_model_has_its_provider_and_its_price() -> None:
    async with served(models=OFFERED, prices=PRICES) as server:
        models = await listed(server)
    assert [*models] == ["local", "scripted", "small"]
    assert models["small"] == {
        "id": "small",
        "model": "gpt-small",
        "is_offered": True,
        "provider": "openai",
        "priced": True,
        "price": {
            "source": "registered",
            "input_usd_per_mtok": 0.15,
            "output_usd_per_mtok": 0.6,
            "cached_input_usd_per_mtok": 0.075,
            "request_usd": 0.0,
            "has_tiers": False,
        },
        "key": None,
        "graphs": 0,
        "used_by": [],
    }
    assert (models["local"]["provider"], models["scripted"]["provider"]) == ("openai-compatible", None)
    assert (models["scripted"]["priced"], models["scripted"]["price"]) == (False, None)


async def test_assumed_price_is_a_price_and_says_that_it_is_assumed() -> None:
    book = PriceBook(use_genai_prices=False, unknown="assume", assumed=Price(5, 20))
    async with served(models=OFFERED, prices=book) as server:
        model = (await listed(server))["scripted"]
    assert (model["priced"], model["price"]["source"], model["price"]["output_usd_per_mtok"]) == (True, "assumed", 20)


async def test_prices_of_models_are_those_of_the_list_of_prices() -> None:
    async with served(models=OFFERED, prices=PRICES) as server, server.client("vera") as vera:
        of_models = {one["model"]: one for one in (await listed(server)).values()}
        for price in (await vera.get("/api/prices")).json()["prices"]:
            model = of_models[price["model"]]
            assert price["provider"] == model["provider"]
            figures = {name: price[name] for name in price if name not in ("model", "offered_as", "provider")}
            assert model["price"] == (None if price["source"] == "unknown" else figures)


async def test_graphs_of_all_users_are_listed_by_their_newest_versions_as_in_the_list_of_graphs() -> None:
    async with served(models=OFFERED, prices=PRICES) as server:
        await server.save("one", naming("small", "scripted"), owner="bob")
        await server.save("two", naming("small", "small"))
        await server.save("changed", naming("small"))
        await server.save("changed", naming("local"))
        await server.save("gone", naming("small"))
        await server.stores.graphs.archive("gone")
        nested = graph(("in", "input", {}), ("map", "map", {"graph": naming("scripted")}), edges="in>map")
        await server.save("outer", nested)
        models = await listed(server)
        async with server.client("vera") as vera:
            visible = {one["id"]: one["version"] for one in (await vera.get("/api/graphs")).json()["graphs"]}
    used = {id: [(one["id"], one["version"]) for one in model["used_by"]] for id, model in models.items()}
    assert used == {
        "small": [("one", 1), ("two", 1)],
        "local": [("changed", 2)],
        "scripted": [("one", 1), ("outer", 1)],
    }
    assert {id: model["graphs"] for id, model in models.items()} == {"small": 2, "local": 1, "scripted": 2}
    assert all(visible[id] == version for graphs in used.values() for id, version in graphs)


async def test_a_providers_model_is_listed_if_a_graph_names_it_and_may_name_it() -> None:
    allowed = ["openai:*", "anthropic:*", "openai-responses:*"]
    async with served(models=OFFERED, prices=PRICES, allowed_models=allowed) as server:
        await server.save(
            "g", naming("openai:gpt-4o", "openai-responses:gpt-4o", "ollama:llama", "mistyped", "openai:")
        )
        models = await listed(server)
    assert [*models] == ["local", "openai-responses:gpt-4o", "openai:gpt-4o", "scripted", "small"]
    for id in ("openai:gpt-4o", "openai-responses:gpt-4o"):
        named = models[id]
        assert (named["model"], named["provider"], named["is_offered"]) == ("gpt-4o", "openai", False)
        assert named["price"]["input_usd_per_mtok"] == 2.5
        assert [one["id"] for one in named["used_by"]] == ["g"]


@pytest.mark.parametrize(("variable", "model"), [(VARIABLES[0], "openai:gpt-4o"), (VARIABLES[2], "anthropic:sonnet")])
async def test_admins_see_whether_the_key_of_a_provider_is_set_and_never_its_value(
    monkeypatch: pytest.MonkeyPatch, variable: str, model: str
) -> None:
    async with served(models=OFFERED, prices=PRICES) as server:
        await server.save("g", naming(model, "ollama:llama"))
        without = await listed(server, "root")
        monkeypatch.setenv(variable, KEY)
        keyed = await listed(server, "root")
        assert {one["key"] for one in (await listed(server, "ann")).values()} == {None}
    assert (without[model]["key"], keyed[model]["key"]) == ("missing", "set")
    assert without["small"]["key"] == "set", "it was created with a key of its own"
    assert [without[id]["key"] for id in ("local", "scripted", "ollama:llama")] == [None] * 3


async def test_used_by_is_bounded_and_counts_all_graphs() -> None:
    async with served(models=OFFERED, prices=PRICES) as server:
        for number in range(MAX_GRAPHS_SHOWN + 1):
            await server.save(f"g{number:02}", naming("small"))
        small = (await listed(server))["small"]
    assert (small["graphs"], len(small["used_by"])) == (MAX_GRAPHS_SHOWN + 1, MAX_GRAPHS_SHOWN)


async def test_server_without_models_lists_none() -> None:
    async with served() as server:
        await server.save("echo", ECHO)
        assert await listed(server) == {}
