"""Embeddings over /v1 with the official client: contained like every run, and refused by name where none are made."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from penstock.agents.embedding import EmbeddingModel, EmbeddingRequest, Embeddings
from penstock.hosting.host import HostSettings, RunHost
from penstock.hosting.limits import RunLimits
from penstock.nodes import executors as standard_executors
from penstock.providers.models import embedding_model
from penstock.runtime.billing.prices import Price
from penstock.runtime.billing.usage import Usage
from penstock.storage.memory import MemoryStores
from penstock.testing.provider import FakeProviderServer
from tests.nodes.graphs import graph, node
from tests.server.openai_service import Served, serving
from tests.server.served import Echo, edge

pytestmark = pytest.mark.requirement("X-14")


class Counting(EmbeddingModel):
    """Vectors of lengths of texts; remembers what it was sent."""

    def __init__(self, name: str = "counting", vectors: int | None = None) -> None:
        super().__init__(name)
        self.sent: list[EmbeddingRequest] = []
        self.vectors = vectors

    async def request(self, request: EmbeddingRequest) -> Embeddings:
        self.sent.append(request)
        wanted = [[float(len(text)), 0.5][: request.dimensions] for text in request.texts]
        return Embeddings(wanted[: self.vectors], Usage(len(request.texts), 0))


def embedder(model: str, **data: Any) -> Any:
    return graph([node("in", "input", type="any"), node("embed", "embedding", model=model, **data)], ["in > embed"])


@asynccontextmanager
async def served(model: EmbeddingModel | None = None, settings: HostSettings | None = None) -> AsyncIterator[Served]:
    async with serving(settings) as it:
        context = it.app.state.server.host._context
        context.services["models"]["vectors"] = model or Counting()
        context.prices._registered["counting"] = Price("1000", None)
        await it.stores.graphs.save("embedder", "anna", "Embedder", embedder("vectors"), now_ms=1)
        await it.stores.graphs.save("packed", "anna", "Packed", embedder("vectors", encoding="base64"), now_ms=1)
        yield it


@pytest.mark.parametrize("model", ["embedder", "packed"])
@pytest.mark.parametrize("encoding", ["float", "base64", None])
async def test_vectors_come_in_the_order_of_the_texts_and_are_recorded(model: str, encoding: Any) -> None:
    how = {} if encoding is None else {"encoding_format": encoding}
    async with served() as it, it.client() as client:
        answer = await client.embeddings.create(model=model, input=["a", "four"], **how)
        assert answer.model == model
        assert [one.index for one in answer.data] == [0, 1]
        if encoding != "base64":
            assert [one.embedding for one in answer.data] == [[1.0, 0.5], [4.0, 0.5]]
        else:
            assert all(isinstance(one.embedding, str) for one in answer.data)
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (2, 2)
        (run,) = await it.runs()
        assert (run.graph_id, run.owner, run.status, run.tokens_in) == (model, "anna", "completed", 2)
        assert answer.model_extra is not None
        assert answer.model_extra["penstock"] | {"ignored": []} == {
            "run_id": run.id,
            "ignored": [],
            "status": "completed",
            "cost_usd": pytest.approx(0.002),
            "stop_reason": None,
        }


async def test_one_text_tokens_and_dimensions_are_applied() -> None:
    model = Counting()
    async with served(model) as it, it.client() as client:
        inputs: list[Any] = ["hello", [5, 6, 7], [[1, 2], [3]]]
        for given in inputs:
            answer = await client.embeddings.create(model="embedder", input=given, dimensions=1, user="me")
            assert all(len(one.embedding) == 1 for one in answer.data)
            assert answer.model_extra is not None
            assert answer.model_extra["penstock"]["ignored"] == ["user"]
    assert [request.texts for request in model.sent] == [["hello"], [[5, 6, 7]], [[1, 2], [3]]]
    assert {request.dimensions for request in model.sent} == {1}


async def test_a_request_that_the_budget_cannot_pay_is_not_sent() -> None:
    model = Counting()
    poor = HostSettings(drain_s=0, default_limits=RunLimits(max_cost_usd="0.001"))
    async with served(model, poor) as it, it.client() as client:
        with pytest.raises(openai.APIStatusError) as refused:
            await client.embeddings.create(model="embedder", input="a long text that costs too much")
        assert refused.value.status_code == 402
        assert model.sent == []
        (run,) = await it.runs()
        assert (run.status, run.cost_nanos) == ("halted", 0)
        allowed = await client.embeddings.create(
            model="embedder", input="a", extra_body={"penstock": {"limits": {"max_cost_usd": "0.01"}}}
        )
        assert allowed.data[0].embedding == [1.0, 0.5]


@pytest.mark.parametrize(
    ("model", "status", "code", "message"),
    [
        (
            "parrot",
            400,
            "unsupported_model",
            "makes no embeddings: it has no embedding node; models that make embeddings",
        ),
        ("nothing", 404, "model_not_found", "models that make embeddings: embedder, packed"),
        ("openai:text-embedding-3-small", 404, "model_not_found", "models that make embeddings: embedder, packed"),
    ],
)
async def test_a_model_without_embeddings_is_refused_by_name(model: str, status: int, code: str, message: str) -> None:
    async with served() as it, it.client() as client:
        with pytest.raises(openai.APIStatusError, match=message) as refused:
            await client.embeddings.create(model=model, input="a")
        assert (refused.value.status_code, refused.value.code, refused.value.param) == (status, code, "model")
        assert f"'{model}'" in refused.value.message
        assert await it.runs() == []


async def test_a_chat_request_to_an_embedding_model_is_refused_without_a_run() -> None:
    async with served() as it, it.client() as client:
        requests: list[Any] = [
            client.chat.completions.create(model="embedder", messages=[{"role": "user", "content": "a"}]),
            client.responses.create(model="embedder", input="a"),
        ]
        for request in requests:
            with pytest.raises(openai.BadRequestError, match="makes embeddings, and no text: send the texts to") as no:
                await request
            assert (no.value.code, no.value.param) == ("unsupported_model", "model")
        assert await it.runs() == []


async def test_a_server_without_any_says_how_to_offer_one() -> None:
    async with serving() as it, it.client() as client:
        with pytest.raises(openai.BadRequestError, match="offer an EmbeddingModel with --models"):
            await client.embeddings.create(model="parrot", input="a")


@pytest.mark.parametrize("given", ["", [], ["a", ""], [""], [[]], ["a"] * 2_049, [-1]], ids=lambda one: str(one)[:9])
async def test_input_that_is_no_text_is_refused_without_a_run(given: Any) -> None:
    async with served() as it, it.client() as client:
        with pytest.raises(openai.BadRequestError, match="input"):
            await client.embeddings.create(model="embedder", input=given)
        assert await it.runs() == []


async def test_a_repeated_request_gets_the_same_run() -> None:
    model = Counting()
    async with served(model) as it, it.client() as client:
        for _ in range(2):
            await client.embeddings.create(model="embedder", input="a", extra_headers={"Idempotency-Key": "one"})
        assert len(model.sent) == len(await it.runs()) == 1
        with pytest.raises(openai.ConflictError, match="this Idempotency-Key was sent with another request"):
            await client.embeddings.create(model="embedder", input="b", extra_headers={"Idempotency-Key": "one"})


async def test_an_answer_with_too_few_vectors_fails_and_is_paid() -> None:
    async with served(Counting(vectors=1)) as it, it.client(max_retries=0) as client:
        with pytest.raises(openai.APIStatusError, match="is not 2 vectors: it has 1"):
            await client.embeddings.create(model="embedder", input=["a", "b"])
        (run,) = await it.runs()
        assert run.status == "failed"


async def test_a_provider_gets_one_request_and_bills_what_is_recorded() -> None:
    async with FakeProviderServer() as provider:
        model = embedding_model(f"openai-compatible:{provider.url}/v1:fake-1")
        async with served(model) as it, it.client() as client:
            answer = await client.embeddings.create(model="embedder", input=["hello", "world"])
            (run,) = await it.runs()
        assert len(answer.data) == 2
        assert len(answer.data[0].embedding) == 8
        (billed,) = provider.invoice.lines
        assert run.tokens_in == billed.input_tokens == answer.usage.prompt_tokens


async def test_vectors_in_the_journal_are_not_paid_again() -> None:
    model = Counting()

    class Stumbling(Echo):
        fails = True

        async def execute(self, data: Any, inputs: Any, context: Any) -> Any:
            if self.fails:
                raise ConnectionError("not now")
            return await super().execute(data, inputs, context)

    stumbling = Stumbling()
    document = embedder("vectors")
    document["nodes"].append(node("after", "stumbling"))
    document["edges"].append(edge("embed", "after"))
    stores = MemoryStores()
    executors = {**standard_executors(), "stumbling": stumbling}
    async with RunHost(stores, executors=executors, services={"models": {"vectors": model}}) as host:
        await stores.graphs.save("two", "ann", "Two", document, now_ms=1)
        run = await host.submit(owner="ann", graph_id="two", input=["a", "four"])
        assert (await host.wait(run.id)).status == "failed"
        stumbling.fails = False
        await host.resume(run.id)
        ended = await host.wait(run.id)
        assert (ended.status, ended.output, ended.tokens_in) == ("completed", [[1.0, 0.5], [4.0, 0.5]], 2)
    assert len(model.sent) == 1
