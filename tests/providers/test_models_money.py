"""What models behind APIs are charged, against the invoice of the provider."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from penstock import BudgetExceededError, contain
from penstock.agents import Agent, Message, ModelRequest, ModelSettings, Transcript, tool
from penstock.providers.models import AnthropicModel, OpenAIModel
from penstock.testing import check_history
from penstock.testing.provider import Cut, Fail, FakeProviderServer, Say, ToolCall, Truncate
from tests.providers.remote_models import FAILURES, Make, ask, each_api, streamed_or_not

LONG = "word " * 100


@pytest.mark.requirement("X-1")
@each_api
@streamed_or_not
@pytest.mark.parametrize(
    "usage",
    ["absent", "zero", (10**9, 10**9), (10**13, 1), (0, 50), (50, 0), (1, 1)]
    + [(count, count) for count in (-1, 10**30, True, "5", 1.5, float("nan"), [])],
    ids=str,
)
async def test_the_ledger_is_never_below_the_invoice_whatever_usage_says(make: Make, streams: bool, usage: Any) -> None:
    async with FakeProviderServer(script=[Say(LONG, usage=usage)]) as server:
        async with contain(max_cost_usd=1, prices=server.provider.prices) as run:
            assert (await ask(make(server), run, streams)).text == LONG
        assert run.balance.spent_nanos >= server.invoice.total_nanos > 0


@pytest.mark.requirement("X-1")
@each_api
@streamed_or_not
async def test_the_arguments_of_a_tool_are_output_too(make: Make, streams: bool) -> None:
    answer = Say(tool_calls=(ToolCall("dig", {"where": LONG}),), usage=(50, 1))
    async with FakeProviderServer(script=[answer]) as server:
        async with contain(max_cost_usd=1, prices=server.provider.prices) as run:
            assert (await ask(make(server), run, streams)).tool_calls[0].arguments == {"where": LONG}
        assert run.balance.spent_nanos >= server.invoice.total_nanos > 0


@each_api
@streamed_or_not
async def test_half_a_surrogate_pair_is_sent_as_a_question_mark(make: Make, streams: bool) -> None:
    async with FakeProviderServer(script=["fine"]) as server:
        async with contain(max_cost_usd=1, prices=server.provider.prices) as run:
            assert (await ask(make(server), run, streams, "a \ud83d b")).text == "fine"
        assert "a ? b" in json.dumps(server.requests[0].body)
        assert (run.balance.spent_nanos, run.balance.unresolved_nanos) == (server.invoice.total_nanos, 0)


@pytest.mark.requirement("X-1")
@each_api
async def test_sixteen_sub_agents_spend_no_more_than_the_ceiling(make: Make) -> None:
    async with FakeProviderServer.flat("0.50", latency_s=0.01) as server:
        agent = Agent(make(server), name="sub")
        async with contain(max_cost_usd=1, prices=server.provider.prices) as run:
            results = await asyncio.gather(*(agent.run(f"topic {n}", run) for n in range(16)))
        refused = [result.error for result in results if result.error is not None]
        assert len(refused) == 14
        assert all(isinstance(error, BudgetExceededError) for error in refused)
        assert server.invoice.total_usd == 1.00
        assert check_history(run.history(), invoice=server.invoice, ceiling_nanos=10**9, ledger=run.balance) == []


@pytest.mark.requirement("X-1", "T-8")
@each_api
@streamed_or_not
@pytest.mark.parametrize("fault", [Fail(502), Fail(504), Cut(), Truncate()])
async def test_what_was_billed_and_then_failed_is_in_the_ledger(make: Make, streams: bool, fault: Any) -> None:
    async with FakeProviderServer.flat("0.05", lambda _: Say(then=fault)) as server:
        model = make(server)
        async with contain(max_cost_usd=1, prices=server.provider.prices) as run:
            for _ in range(10):
                with pytest.raises(FAILURES):
                    await ask(model, run, streams)
        assert len(server.requests) == 10
        assert run.balance.spent_nanos + run.balance.unresolved_nanos == server.invoice.total_nanos == 500_000_000


@pytest.mark.requirement("X-1")
@each_api
async def test_the_input_is_never_estimated_below_what_the_provider_counts(make: Make) -> None:
    @tool
    def look_up(topic: str, language: str = "en") -> str:
        """Look something up in a place where there is much to be found."""
        return f"{topic} in {language}"

    calls = tuple(ToolCall("look_up", {"topic": f"topic {n}"}) for n in range(3))
    script = [*[Say("hm", tool_calls=calls)] * 4, "done"]
    async with FakeProviderServer(script=script) as server:
        model, estimates = make(server), []

        class Estimates:
            async def before_model_call(self, context: Any, request: ModelRequest) -> None:
                estimates.append(model.count_input(request))

        async with contain(max_cost_usd=1, prices=server.provider.prices) as run:
            agent = Agent(model, "Look things up.", [look_up], hooks=[Estimates()])
            assert (await agent.run("über alles — 天气", run)).output == "done"
        counted = [request.input_tokens for request in server.requests]
        assert len(counted) == len(estimates) == 5
        assert all(most >= count for most, count in zip(estimates, counted, strict=True)), (estimates, counted)
        assert run.balance.spent_nanos == server.invoice.total_nanos


def test_a_schema_and_the_text_before_tools_count_as_input() -> None:
    @tool
    def nothing() -> None:
        """Do nothing."""

    schema = {"type": "object", "properties": {"field": {"type": "string"}}}
    transcript = Transcript([Message.user("hi")])
    for model in (OpenAIModel("m", api_key="k"), AnthropicModel("m", api_key="k")):
        plain = model.count_input(ModelRequest(transcript))
        with_schema = model.count_input(ModelRequest(transcript, settings=ModelSettings(output_schema=schema)))
        with_tool = model.count_input(ModelRequest(transcript, [nothing.spec]))
        assert with_schema == plain + len(json.dumps(schema)) // 2
        assert with_tool - plain >= model.tools_tokens


@pytest.mark.requirement("X-2")
@each_api
async def test_a_model_without_a_price_is_counted_as_unknown(make: Make) -> None:
    async with FakeProviderServer() as server:
        async with contain(max_cost_usd=1) as run:
            await ask(make(server), run, streams=False)
        assert run.get_snapshot().unknown_costs == 1
