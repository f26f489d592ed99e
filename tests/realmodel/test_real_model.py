"""A real language model behind our `Model`: what a scripted provider cannot show."""

from __future__ import annotations

import asyncio
import json

import pytest

from penstock import CancelledError, Price, PriceBook, contain
from penstock.agents import Agent, JsonFormat, Message, ModelSettings
from penstock.agents.messages import Delta
from penstock.providers.models import CompatibleModel
from tests.providers.remote_models import texts

pytestmark = [pytest.mark.realmodel, pytest.mark.timeout(300)]

NAME = "smollm2"
PRICES = PriceBook(registered={NAME: Price(1, 2)}, use_genai_prices=False)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "million_people": {"type": "integer"}},
    "required": ["city", "million_people"],
    "additionalProperties": False,
}


@pytest.mark.requirement("T-10", "X-1")
async def test_a_stream_has_pieces_a_usage_and_a_cost(model_url: str) -> None:
    model = CompatibleModel(NAME, model_url, max_output_tokens=24)
    deltas: list[Delta] = []
    async with contain(max_cost_usd=1, prices=PRICES) as run:
        answer = await model.generate(run, [Message.user("Tell me about rivers.")], on_delta=deltas.append)
    assert len(deltas) > 5
    assert "".join(texts(deltas)) == answer.text
    assert answer.usage is not None
    assert answer.usage.input_tokens > 5
    assert 5 < answer.usage.output_tokens <= 24
    assert answer.finish_reason == "length"
    assert run.balance.spent_nanos == PRICES.cost(answer.usage, NAME).nanos > 0


@pytest.mark.requirement("X-1")
async def test_the_input_is_estimated_from_above(model_url: str) -> None:
    model = CompatibleModel(NAME, model_url, max_output_tokens=16)
    messages = [Message.system("Be brief."), Message.user("Wie heißt die Hauptstadt von 日本? 🏯 " * 5)]
    async with contain(max_tokens=2_000) as run:
        answer = await model.generate(run, messages)
        assert answer.usage is not None
        assert run.balance.tokens_in == answer.usage.input_tokens
    assert answer.usage.output_tokens <= 16


async def test_a_cancel_in_the_middle_keeps_what_came_and_frees_the_model(model_url: str) -> None:
    model = CompatibleModel(NAME, model_url, max_output_tokens=2_000)
    deltas: list[Delta] = []
    some = asyncio.Event()

    def on_delta(delta: Delta) -> None:
        deltas.append(delta)
        if len(deltas) == 5:
            some.set()

    async with contain(max_cost_usd=1, prices=PRICES) as run:
        agent = Agent(model, "You are a storyteller.", on_delta=on_delta)
        running = asyncio.create_task(agent.run("Tell me a long story.", run))
        await some.wait()
        run.abort("enough")
        with pytest.raises(CancelledError):
            await running
        assert run.balance.unresolved_nanos > 0
    assert 5 <= len(deltas) < 2_000
    short = CompatibleModel(NAME, model_url, max_output_tokens=4)
    async with contain() as run:
        assert (await short.generate(run, [Message.user("Hi")])).text


async def test_an_answer_follows_a_json_schema(model_url: str) -> None:
    model = CompatibleModel(NAME, model_url, max_output_tokens=60)
    settings = ModelSettings(output_schema=SCHEMA, temperature=0)
    async with contain() as run:
        agent = Agent(model, "Answer in JSON.", output=JsonFormat(SCHEMA), settings=settings)
        found = (await agent.run("Which city do you like, and how many million people live there?", run)).output
    assert isinstance(found["city"], str), json.dumps(found)
    assert isinstance(found["million_people"], int)
