"""OpenAI's own client through the gateway, unmodified."""

from __future__ import annotations

import openai
import pytest

from penstock.testing.provider import FakeProviderServer
from tests.gateway.conftest import KEY, PROVIDER_KEY, gateway

HELLO = [{"role": "user", "content": "hello there"}]


@pytest.mark.requirement("X-12")
def test_chat_is_held_settled_and_paid_with_the_providers_key(provider: FakeProviderServer) -> None:
    with gateway(provider, max_cost_usd=1) as served, openai.OpenAI(api_key=KEY, base_url=served.openai) as client:
        answer = client.chat.completions.create(model="fake-1", messages=HELLO, max_tokens=20, extra_body={"odd": 1})  # type: ignore[call-overload]
    assert "hello there" in answer.choices[0].message.content
    (request,) = provider.requests
    assert request.headers["authorization"] == f"Bearer {PROVIDER_KEY}"
    assert request.body["odd"] == 1
    assert request.body["max_tokens"] == 20
    assert served.run.balance.spent_nanos == provider.invoice.total_nanos > 0
    assert served.run.balance.held_nanos == 0
