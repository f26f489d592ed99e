"""What error answers of a provider cost, through the official clients and through our models."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from penstock import InvalidValue, contain
from penstock.providers import contained, contained_client
from penstock.testing.provider import FakeProviderServer, Say, ServerError
from tests.providers.remote_models import FAILURES, Make, ask, each_api, streamed_or_not
from tests.providers.sdk_calls import CALLS, MODEL, PROMPT, Call, clients, limits, outcome

FREE = (500, 503, 529)
UNRESOLVED = (408, 499, 502, 504, 520, 524)


@pytest.mark.requirement("X-10")
def test_one_http_500_does_not_end_a_run_whose_calls_have_no_maximum() -> None:
    script = [ServerError(500), Say("at last")]
    with (
        FakeProviderServer(script=script) as server,
        openai.OpenAI(base_url=server.openai_url, api_key="k", max_retries=1) as client,
        contain(max_cost_usd="0.10", prices=server.provider.prices) as run,
        contained(run, max_output_tokens=1_000_000),
    ):
        # Without a maximum, the first attempt holds the whole ceiling; the client's own retry needs it back.
        answer = client.chat.completions.create(model=MODEL, messages=PROMPT)
    assert answer.choices[0].message.content == "at last"
    assert (run.balance.unresolved_nanos, run.balance.spent_nanos) == (0, server.invoice.total_nanos)
    assert (run.balance.attempts, run.balance.steps) == (2, 1)


@pytest.mark.requirement("X-10")
@pytest.mark.parametrize("status", [*FREE, *UNRESOLVED])
@pytest.mark.parametrize("call", CALLS)
def test_the_status_of_an_error_answer_decides_what_it_costs(call: Call, status: int) -> None:
    with (
        FakeProviderServer(script=[ServerError(status)]) as server,
        clients(server, max_retries=0) as to,
        limits(server, max_cost_usd=1) as run,
    ):
        assert isinstance(outcome(lambda: call(to)), Exception)
    assert (run.balance.unresolved_nanos > 0) is (status in UNRESOLVED)
    assert (run.balance.held_nanos, run.balance.spent_nanos) == (0, 0)


@pytest.mark.requirement("X-10")
@pytest.mark.parametrize("status", [*FREE, *UNRESOLVED])
@each_api
@streamed_or_not
async def test_the_status_decides_for_our_models_too(make: Make, streams: bool, status: int) -> None:
    async with (
        FakeProviderServer(script=[ServerError(status)]) as server,
        contain(max_cost_usd=1, prices=server.provider.prices) as run,
    ):
        with pytest.raises(FAILURES):
            await ask(make(server), run, streams)
    assert (run.balance.unresolved_nanos > 0) is (status in UNRESOLVED)


@pytest.mark.requirement("X-10")
@pytest.mark.parametrize(
    ("error_bill", "status", "is_free"),
    [("unresolved", 500, False), ("free", 504, True), ({504: "free"}, 504, True), ({504: "free"}, 502, False)],
)
@each_api
async def test_error_bill_of_a_model_decides(make: Make, error_bill: Any, status: int, is_free: bool) -> None:
    async with (
        FakeProviderServer(script=[ServerError(status)]) as server,
        contain(max_cost_usd=1, prices=server.provider.prices) as run,
    ):
        with pytest.raises(FAILURES):
            await ask(make(server, error_bill=error_bill), run, streams=False)
    assert (run.balance.unresolved_nanos == 0) is is_free


@pytest.mark.requirement("X-10")
@pytest.mark.parametrize(("error_bill", "status", "is_free"), [("unresolved", 429, False), ({504: "free"}, 504, True)])
@pytest.mark.parametrize("call", CALLS)
def test_error_bill_of_a_scope_decides(call: Call, error_bill: Any, status: int, is_free: bool) -> None:
    with (
        FakeProviderServer(script=[ServerError(status)]) as server,
        clients(server, max_retries=0) as to,
        contain(max_cost_usd=1, prices=server.provider.prices) as run,
        contained(run, error_bill=error_bill),
    ):
        assert isinstance(outcome(lambda: call(to)), Exception)
    assert (run.balance.unresolved_nanos == 0) is is_free


def test_error_bill_of_a_contained_client_decides() -> None:
    with (
        FakeProviderServer(script=[ServerError(504)]) as server,
        contain(max_cost_usd=1, prices=server.provider.prices) as run,
        contained_client(run, error_bill="free") as http,
        openai.OpenAI(base_url=server.openai_url, api_key="k", max_retries=0, http_client=http) as client,
        pytest.raises(openai.APIStatusError),
    ):
        client.chat.completions.create(model=MODEL, messages=PROMPT)
    assert (run.balance.unresolved_nanos, run.balance.attempts) == (0, 1)


def test_an_invalid_error_bill_is_refused_where_it_is_configured() -> None:
    with contain() as run:
        for configure in (lambda: contained(run, error_bill="paid"), lambda: contained_client(run, error_bill="paid")):
            with pytest.raises(InvalidValue, match="error_bill must be"):
                configure()
