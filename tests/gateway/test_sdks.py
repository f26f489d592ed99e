"""Clients of OpenAI and Anthropic through the gateway, unmodified."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import openai
import pytest
from pydantic import BaseModel

from penstock.testing.provider import FakeProviderServer, Hang, RefuseFree, Say
from tests.gateway.conftest import KEY, PROVIDER_KEY, Served, gateway

HELLO = [{"role": "user", "content": "hello there"}]


class City(BaseModel):
    name: str


@pytest.fixture
def served(provider: FakeProviderServer) -> Iterator[Served]:
    with gateway(provider, max_cost_usd=1) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(api_key=KEY, base_url=served.openai) as client:
        yield client


@pytest.mark.requirement("X-12")
def test_chat_is_held_settled_and_paid_with_the_providers_key(served: Served, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake-1", messages=HELLO, max_tokens=20, extra_body={"odd": 1})  # type: ignore[arg-type]
    assert "hello there" in str(answer.choices[0].message.content)
    (request,) = served.provider.requests
    assert request.headers["authorization"] == f"Bearer {PROVIDER_KEY}"
    assert request.body["odd"] == 1
    assert request.body["max_tokens"] == 20
    assert served.run.balance.spent_nanos == served.provider.invoice.total_nanos > 0
    assert served.run.balance.held_nanos == 0


def test_chat_stream_arrives_in_pieces(served: Served, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="fake-1", messages=HELLO, stream=True)  # type: ignore[call-overload]
    pieces = [chunk.choices[0].delta.content for chunk in stream]
    assert "hello there" in "".join(filter(None, pieces))
    assert len(pieces) > 5
    assert served.run.balance.spent_nanos == served.provider.invoice.total_nanos


def test_structured_output_is_parsed_by_the_client() -> None:
    with FakeProviderServer(script=[Say('{"name": "Oroville"}')]) as provider, gateway(provider) as served:  # noqa: SIM117
        with openai.OpenAI(api_key=KEY, base_url=served.openai) as client:
            answer = client.chat.completions.parse(model="fake-1", messages=HELLO, response_format=City)  # type: ignore[arg-type]
    assert answer.choices[0].message.parsed == City(name="Oroville")


def test_responses_stream_and_embeddings(served: Served, client: openai.OpenAI) -> None:
    with client.responses.stream(model="fake-1", input="hello") as stream:
        assert "hello" in stream.get_final_response().output_text
    assert len(client.embeddings.create(model="fake-1", input=["a", "b"]).data) == 2
    assert served.run.balance.spent_nanos == served.provider.invoice.total_nanos


def test_error_of_the_provider_reaches_the_client_as_it_is() -> None:
    with FakeProviderServer(script=[RefuseFree(400)]) as provider, gateway(provider) as served:  # noqa: SIM117
        with (
            openai.OpenAI(api_key=KEY, base_url=served.openai) as client,
            pytest.raises(openai.BadRequestError) as raised,
        ):
            client.chat.completions.create(model="fake-1", messages=HELLO)  # type: ignore[arg-type]
    assert "the script says 400" in str(raised.value)
    assert raised.value.response.headers["x-request-id"]
    assert served.run.balance.unresolved_nanos == 0


def test_clients_own_retries_are_calls_of_their_own() -> None:
    script = [RefuseFree(429, 0.001), RefuseFree(503), Say("third time")]
    with FakeProviderServer(script=script) as provider, gateway(provider, max_cost_usd=1) as served:  # noqa: SIM117
        with openai.OpenAI(api_key=KEY, base_url=served.openai, max_retries=2) as client:
            client.chat.completions.create(model="fake-1", messages=HELLO)  # type: ignore[arg-type]
    assert len(provider.requests) == 3
    assert served.run.balance.spent_nanos == provider.invoice.total_nanos
    assert served.run.balance.unresolved_nanos == 0


def test_refusal_is_tried_once_by_both_clients(provider: FakeProviderServer) -> None:
    with gateway(provider, max_cost_usd=0) as served:
        with openai.OpenAI(api_key=KEY, base_url=served.openai) as client, pytest.raises(openai.APIStatusError) as ours:
            client.chat.completions.create(model="fake-1", messages=HELLO)  # type: ignore[arg-type]
        with (
            anthropic.Anthropic(api_key=KEY, base_url=f"{served.url}/anthropic") as other,
            pytest.raises(anthropic.APIStatusError) as theirs,
        ):
            other.messages.create(model="fake-1", max_tokens=9, messages=HELLO)  # type: ignore[arg-type]
    assert (ours.value.status_code, theirs.value.status_code) == (402, 402)
    assert len(served.denied) == 2
    assert provider.requests == ()


@pytest.mark.parametrize("streams", [False, True])
def test_client_that_disconnects_ends_the_upstreams_work(streams: bool) -> None:
    with FakeProviderServer(script=[Say("word " * 100, then=Hang(3 if streams else None))]) as provider:  # noqa: SIM117
        with (
            gateway(provider, max_cost_usd=1) as served,
            openai.OpenAI(api_key=KEY, base_url=served.openai, max_retries=0, timeout=0.5) as client,
        ):
            with pytest.raises(openai.APITimeoutError):
                for _ in client.chat.completions.create(model="fake-1", messages=HELLO, stream=streams):  # type: ignore[call-overload]
                    pass
            provider.wait_until(lambda: provider.disconnects)
            provider.wait_until(lambda: served.run.balance.unresolved_nanos)
    assert served.run.balance.held_nanos == 0
    spent = served.run.balance.spent_nanos + served.run.balance.unresolved_nanos
    assert spent >= provider.invoice.total_nanos


def test_messages_stream_and_count_of_tokens(served: Served) -> None:
    with anthropic.Anthropic(api_key=KEY, base_url=f"{served.url}/anthropic") as client:
        assert client.messages.count_tokens(model="fake-1", messages=HELLO).input_tokens > 0  # type: ignore[arg-type]
        with client.messages.stream(model="fake-1", max_tokens=50, messages=HELLO) as stream:  # type: ignore[arg-type]
            assert "hello there" in stream.get_final_text()
    assert {request.headers["x-api-key"] for request in served.provider.requests} == {PROVIDER_KEY}
    assert served.run.balance.spent_nanos == served.provider.invoice.total_nanos > 0
