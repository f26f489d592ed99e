"""Clients that carry their run with them."""

from __future__ import annotations

import asyncio
import sys
import threading

import anthropic
import botocore.httpsession  # noqa: F401  # a program with boto3 has loaded it
import httpx2
import openai
import pytest

from penstock import BudgetExceededError, contain
from penstock.providers import contained_async_client, contained_client
from penstock.testing.provider import FakeProviderServer
from tests.providers.sdk_calls import ASYNC_CALLS, CALLS, AsyncCall, Call, Clients, outcome

pytestmark = pytest.mark.requirement("X-5")


@pytest.mark.parametrize("call", CALLS)
def test_a_contained_client_holds_the_limit_in_threads_that_know_nothing(call: Call) -> None:
    outcomes: list[object] = []
    with (
        FakeProviderServer.flat(0.25) as server,
        contain(max_cost_usd=1, prices=server.provider.prices) as run,
        contained_client(run) as http,
    ):
        one = openai.OpenAI(base_url=server.openai_url, api_key="k", http_client=http)
        other = anthropic.Anthropic(base_url=server.url, api_key="k", http_client=http)
        to = Clients(one, other)
        threads = [threading.Thread(target=lambda: outcomes.append(outcome(lambda: call(to)))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert server.invoice.total_usd == run.balance.spent_usd == 1.00
    assert sum(isinstance(found, BudgetExceededError) for found in outcomes) == 4


@pytest.mark.parametrize("call", ASYNC_CALLS)
async def test_a_contained_async_client_holds_the_limit(call: AsyncCall) -> None:
    async with FakeProviderServer.flat(0.25) as server:
        with contain(max_cost_usd=1, prices=server.provider.prices) as run:
            async with contained_async_client(run) as http:
                one = openai.AsyncOpenAI(base_url=server.openai_url, api_key="k", http_client=http)
                other = anthropic.AsyncAnthropic(base_url=server.url, api_key="k", http_client=http)
                to = Clients(one, other)
                outcomes = await asyncio.gather(*(call(to) for _ in range(8)), return_exceptions=True)
    assert server.invoice.total_usd == run.balance.spent_usd == 1.00
    assert sum(isinstance(found, BudgetExceededError) for found in outcomes) == 4


def test_its_options_are_those_of_the_library() -> None:
    with contain() as run, contained_client(run, timeout=7, headers={"x-team": "blue"}) as http:
        assert isinstance(http, httpx2.Client)
        assert (http.timeout.read, http.headers["x-team"], http.follow_redirects) == (7, "blue", True)


@pytest.mark.requirement("X-11")
def test_a_client_can_be_made_where_botocore_is_loaded() -> None:
    assert "botocore.httpsession" in sys.modules
    with contain() as run, contained_client(run) as http:
        assert isinstance(http, httpx2.Client)
