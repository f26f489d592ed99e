"""Graph documents in the published OpenAPI: described field by field, and refused with messages of their own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from penstock.runtime.graphs.document_schema import json_schema
from penstock.server.examples.graphs import example_graphs
from tests.server.served import edge, node, served

Json = dict[str, Any]

ROOT = Path(__file__).parents[2]
FILES = sorted([*ROOT.glob("examples/graphs/*.json"), *ROOT.glob("src/penstock/server/examples/*.json")])
OPTIONS = {
    "error_policy": {"on_error": "fallback", "fallback_value": "none", "retry_count": 2, "timeout_ms": 5_000},
    "budget": {"max_cost_usd": 0.1},
}
WITH_OPTIONS: Json = {"nodes": [node("a", "echo", **OPTIONS), node("b", "echo")], "edges": [edge("a", "b")]}


@pytest.fixture(scope="module")
def api() -> Json:
    async def described() -> Json:
        async with served() as server, server.client("ann") as ann:
            found: Json = (await ann.get("/api/openapi.json")).json()
            return found

    return asyncio.run(described())


def bodies_with_documents(api: Json) -> Iterator[tuple[str, Json]]:
    """The schema of every `document` that a route takes or returns, by what it is of."""
    for name, schema in api["components"]["schemas"].items():
        if "document" in schema.get("properties", {}):
            yield name, schema["properties"]["document"]


def validator(api: Json, name: str) -> Draft202012Validator:
    """Of the documents in one body."""
    return Draft202012Validator({**dict(bodies_with_documents(api))[name], "components": api["components"]})


def routes_of(api: Json, name: str) -> set[str]:
    """The operations whose description mentions a schema."""
    mention = json.dumps(f"#/components/schemas/{name}")
    return {
        f"{method.upper()} {path}"
        for path, operations in api["paths"].items()
        for method, one in operations.items()
        if mention in json.dumps(one)
    }


@pytest.mark.requirement("K-18")
def test_every_route_that_takes_or_returns_a_document_describes_it(api: Json) -> None:
    schemas = dict(bodies_with_documents(api))
    assert schemas.keys() == {"NewGraph", "GraphVersion", "GraphDocument", "GraphShown"}
    for schema in schemas.values():
        assert set(schema["required"]) == {"nodes", "edges"}
    routes = set().union(*(routes_of(api, name) for name in schemas))
    assert routes == {
        "POST /api/graphs",
        "POST /api/graphs/validate",
        "GET /api/graphs/{graph_id}",
        "PUT /api/graphs/{graph_id}",
    }


@pytest.mark.requirement("K-18", "K-2")
def test_the_channel_of_an_edge_is_flow_or_link_and_required(api: Json) -> None:
    schemas = api["components"]["schemas"]
    assert "data" in schemas["Edge"]["required"]
    assert schemas["EdgeData"]["required"] == ["channel"]
    assert schemas["EdgeData"]["properties"]["channel"]["enum"] == ["flow", "link"]


@pytest.mark.requirement("K-18", "P-E5")
def test_the_options_of_nodes_are_described(api: Json) -> None:
    schemas = api["components"]["schemas"]
    assert set(schemas["NodeData"]["properties"]) == {"error_policy", "budget"}
    policy = schemas["ErrorPolicyData"]
    assert policy["properties"]["on_error"]["enum"] == ["fail", "retry", "skip", "fallback", "continue"]
    assert policy["additionalProperties"] is False
    assert "max_cost_usd" in schemas["BudgetData"]["properties"]


@pytest.mark.requirement("K-18")
@pytest.mark.parametrize("name", ["NewGraph", "GraphVersion", "GraphDocument", "GraphShown"])
def test_example_documents_validate_against_the_published_schema(api: Json, name: str) -> None:
    assert len(FILES) >= 6
    valid = validator(api, name)
    for document in [*(json.loads(path.read_text()) for path in FILES), *example_graphs().values(), WITH_OPTIONS]:
        assert best_match(valid.iter_errors(document)) is None


def changed(at: list[str | int], value: Any) -> Json:
    document: Json = json.loads(json.dumps(WITH_OPTIONS))
    inner: Any = document
    for step in at[:-1]:
        inner = inner[step]
    if value is ...:
        del inner[at[-1]]
    else:
        inner[at[-1]] = value
    return document


REFUSED: list[tuple[list[str | int], Any]] = [
    (["edges", 0, "data", "channel"], ...),
    (["edges", 0, "data"], ...),
    (["edges", 0, "data", "channel"], "flwo"),
    (["edges", 0, "data", "channel"], None),
    (["nodes", 0, "id"], ...),
    (["nodes", 0, "data"], []),
    (["edges"], ...),
]
IN_DATA: list[tuple[list[str | int], Any]] = [
    (["nodes", 0, "data", "error_policy", "max_retries"], 3),
    (["nodes", 0, "data", "error_policy", "retry_count"], -1),
    (["nodes", 0, "data", "error_policy", "retry_count"], True),
    (["nodes", 0, "data", "budget", "max_steps"], "3"),
]


@pytest.mark.requirement("K-18")
@pytest.mark.parametrize(("at", "value"), [*REFUSED, *IN_DATA], ids=str)
def test_the_published_schema_refuses_what_the_server_refuses(api: Json, at: list[str | int], value: Any) -> None:
    assert not validator(api, "NewGraph").is_valid(changed(at, value))
    assert not Draft202012Validator(json_schema()).is_valid(changed(at, value))


@pytest.mark.requirement("K-18", "P-E5")
async def test_the_server_refuses_with_its_own_messages() -> None:
    async with served() as server, server.client("ann") as ann:
        for at, value in REFUSED:
            refused = await ann.put("/api/graphs/g", json={"document": changed(at, value)})
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (422, "graph_invalid")
            assert error["details"][0]["path"].startswith(f"$.{at[0]}")
        missing = await ann.post("/api/graphs/validate", json={"document": changed(*REFUSED[0])})
        (problem,) = missing.json()["problems"]
        assert (problem["code"], problem["path"]) == ("missing_channel", "$.edges[0].data.channel")
        for at, value in IN_DATA:
            looked = await ann.post("/api/graphs/validate", json={"document": changed(at, value)})
            (problem,) = looked.json()["problems"]
            assert problem["code"] == "bad_data"
            assert problem["path"] == "$.nodes[0].data." + ".".join(map(str, at[3:]))
        draft = await ann.put("/api/graphs/g", json={"document": changed(*IN_DATA[0])})
        assert (draft.status_code, draft.json()["valid"]) == (200, False)  # kept, like any other wrong setting


@pytest.mark.requirement("P-E5")
async def test_the_listing_of_node_types_has_the_options_of_those_that_run() -> None:
    async with served() as server, server.client("ann") as ann:
        listed = (await ann.get("/api/node-types")).json()["node_types"]
    schemas = {one["type"]: one["data_schema"] for one in listed if one["data_schema"] is not None}
    having = {name for name, schema in schemas.items() if "error_policy" in schema["properties"]}
    assert schemas.keys() - having == {"tool", "toolset", "mcp-server"}
    for name in having:
        data = {"error_policy": {"on_error": "retry", "retry_count": "3"}}
        errors = [list(one.absolute_path) for one in Draft202012Validator(schemas[name]).iter_errors(data)]
        assert ["error_policy"] in [path[:1] for path in errors]


@pytest.mark.requirement("P-E5")
async def test_a_run_over_http_recovers_and_its_events_say_how() -> None:
    policy = {"on_error": "fallback", "fallback_value": "none", "retry_count": 1, "retry_delay_ms": 0}
    document = {
        "nodes": [
            node("c", "constant", value=1),
            node("m", "merge", mode="object", error_policy=policy),  # a number is no object
            node("out", "output"),
        ],
        "edges": [edge("c", "m"), edge("m", "out")],
    }
    async with served() as server, server.client("ann") as ann:
        await ann.put("/api/graphs/g", json={"document": document})
        run = (await ann.post("/api/runs", json={"graph_id": "g"})).json()
        assert (await server.host.wait(run["id"])).output == "none"
        page = await ann.get(f"/api/runs/{run['id']}/events", headers={"Accept": "application/json"})
        events = page.json()["events"]
    progress = [(one["data"]["name"], one["data"]["data"]) for one in events if one["type"] == "node.progress"]
    assert [name for name, _ in progress] == ["retry", "recovered"]
    assert progress[1][1]["on_error"] == "fallback"
    assert progress[1][1]["error"] == "MergeFailed"
