"""Providers' models that graphs may name: the operator's allow-list, when a graph is saved and when it runs."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.testing.provider import FakeProviderServer
from tests.server.served import edge, node, served

ALLOWED = ("ollama:llama*", "openai:gpt-4o-mini")
NAMED = {  # whether a graph may name the model
    "ollama:llama3:8b": True,
    "openai:gpt-4o-mini": True,
    "openai:gpt-4o": False,
    "openai-responses:gpt-4o-mini": False,
    "ollama:qwen": False,
    "OLLAMA:llama3": False,
}


def calling(type: str, model: str) -> dict[str, Any]:
    """A graph with one node that calls the model."""
    return {
        "nodes": [node("in", "input"), node("call", type, model=model)],
        "edges": [edge("in", "call")],
    }


def inside(document: dict[str, Any]) -> dict[str, Any]:
    return {"nodes": [node("in", "input"), node("box", "subgraph", graph=document)], "edges": [edge("in", "box")]}


@pytest.mark.requirement("X-15")
@pytest.mark.parametrize("type", ["agent", "llm-completion", "embedding"])
async def test_graphs_name_only_the_allowed_models_of_providers(type: str) -> None:
    async with served(allowed_models=ALLOWED) as server, server.client("ann") as ann:
        for model, is_allowed in NAMED.items():
            for document, path in (
                (calling(type, model), "$.nodes[1].data.model"),
                (inside(calling(type, model)), "$.nodes[1].data.graph.nodes[1].data.model"),
            ):
                found = (await ann.post("/api/graphs/validate", json={"document": document})).json()
                codes = [(one["code"], one["path"]) for one in found["problems"]]
                expected = "unknown_model" if model.startswith("OLLAMA") else "model_not_allowed"
                assert codes == ([] if is_allowed else [(expected, path)]), (model, found)
        await server.save("flow", calling(type, "openai:gpt-4o"))
        refused = await ann.post("/api/runs", json={"graph_id": "flow", "input": "hello"})
        assert refused.status_code == 422
        assert "graphs may not name the model 'openai:gpt-4o' here" in refused.text
        assert "they may name: ollama:llama*, openai:gpt-4o-mini" in refused.text


@pytest.mark.parametrize("type", ["agent", "llm-completion", "embedding"])
async def test_a_run_that_names_another_model_fails_before_a_request_leaves(
    type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check is passed by: a run that was submitted before the list was made is resumed after it."""
    async with FakeProviderServer() as provider:
        monkeypatch.setenv("OLLAMA_HOST", provider.url)
        for allowed in ([], ["openai:*"]):
            async with served(allowed_models=allowed) as server:
                await server.save("flow", inside(calling(type, "ollama:llama3")))
                run = await server.host.submit(owner="ann", graph_id="flow", input="hello")
                ended = await server.host.wait(run.id)
                assert ended.status == "failed"
                assert "ModelNotAllowed" in str(ended.error), ended
        assert provider.requests == ()


async def test_models_that_the_operator_offers_need_no_pattern() -> None:
    from penstock.agents.scripted import ScriptedModel

    models = {"house": ScriptedModel(["hello"]), "openai:gpt-4o": ScriptedModel(["mine"])}
    async with served(allowed_models=["none"], models=models) as server, server.client("ann") as ann:
        for model, answer in (("house", "hello"), ("openai:gpt-4o", "mine")):
            await server.save(model.replace(":", "-"), calling("agent", model))
            run = await ann.post("/api/runs", json={"graph_id": model.replace(":", "-"), "input": "hello"})
            assert run.status_code == 201, run.text
            assert (await server.host.wait(run.json()["id"])).output == answer
