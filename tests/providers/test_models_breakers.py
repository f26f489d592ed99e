"""Circuits before models: shared by name, opened by failures and by nothing else."""

from __future__ import annotations

import pytest

from penstock import CircuitBreaker, Halted, StopReason, contain
from penstock.agents import Message, ModelSettings
from penstock.providers.models import Breakers, UnsupportedRequest, breakers
from penstock.testing import ManualClock
from penstock.testing.provider import Cut, Fail, FakeProviderServer, RefuseFree, Say, Truncate
from tests.providers.remote_models import FAILURES, Make, ask, chat, each_api, streamed_or_not


@each_api
@streamed_or_not
async def test_an_open_circuit_refuses_without_a_request_and_without_a_cost(make: Make, streams: bool) -> None:
    clock = ManualClock()
    breaker = CircuitBreaker(2, 60.0, clock=clock)
    async with FakeProviderServer(script=[RefuseFree(503), RefuseFree(503), "well again"]) as server:
        model = make(server, breaker=breaker)
        async with contain(max_cost_usd=1, prices=server.provider.prices) as run:
            for _ in range(2):
                with pytest.raises(Exception, match="503"):
                    await ask(model, run, streams)
            taken = run.balance.unresolved_nanos
            with pytest.raises(Halted) as stopped:
                await ask(model, run, streams)
            assert stopped.value.stop_reason is StopReason.CIRCUIT_OPEN
            assert run.balance.unresolved_nanos == taken
            assert len(server.requests) == 2
            clock.advance(60)
            assert (await ask(model, run, streams)).text == "well again"
            assert breaker.state == "closed"


@pytest.mark.parametrize("fate", [Say(then=Fail(500)), Say(then=Cut()), Say(then=Cut(1)), Say(then=Truncate(1))])
@streamed_or_not
async def test_failures_of_the_provider_open_the_circuit(fate: Say, streams: bool) -> None:
    breaker = CircuitBreaker(1)
    async with FakeProviderServer(script=[fate]) as server, contain() as run:
        with pytest.raises(FAILURES):
            await ask(chat(server, breaker=breaker), run, streams)
        assert breaker.state == "open"


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429])
async def test_what_the_provider_refuses_for_good_reason_does_not_open_the_circuit(status: int) -> None:
    breaker = CircuitBreaker(1)
    async with FakeProviderServer(script=[RefuseFree(status)]) as server, contain() as run:
        with pytest.raises(Exception, match=str(status)):
            await ask(chat(server, breaker=breaker), run, streams=False)
        assert breaker.state == "closed"


async def test_what_was_never_sent_does_not_open_the_circuit() -> None:
    breaker = CircuitBreaker(1)
    async with FakeProviderServer() as server, contain() as run:
        with pytest.raises(UnsupportedRequest):
            model = chat(server, breaker=breaker)
            await model.generate(run, [Message.user("hi")], settings=ModelSettings(extra={"n": 2}))
        assert breaker.state == "closed"


async def test_models_of_one_name_share_a_circuit_if_they_ask_for_it() -> None:
    async with FakeProviderServer() as server:
        one, other, without = chat(server, breaker=True), chat(server, breaker=True), chat(server)
    assert one.breaker is other.breaker is breakers.of("openai:fake-1")
    assert without.breaker is None


def test_circuits_are_listed_and_closed_by_hand() -> None:
    circuits = Breakers(1)
    circuits.of("a").record_failure()
    assert [(one.name, one.state) for one in circuits.snapshots()] == [("a", "open")]
    circuits.reset()
    assert circuits.of("a").state == "closed"
