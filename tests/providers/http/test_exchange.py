"""What a model call over HTTP costs, however it ends: the ledger is never below what the provider charges."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from penstock import CancelledError, CircuitBreaker, contain
from penstock.containment import IncompleteOutput
from penstock.providers import contained
from penstock.providers.http.exchange import allowance_of
from penstock.providers.http.forms import form_of
from penstock.providers.http.request import parse_request
from penstock.runtime.billing.prices import Price, PriceBook
from penstock.testing.provider import (
    Cut,
    FailAfterBilling,
    FakeProviderServer,
    Fate,
    Garble,
    Hang,
    RefuseFree,
    Say,
    ServerError,
    Truncate,
)
from tests.providers.sdk_calls import (
    ASYNC_CALLS,
    CALLS,
    MODEL,
    PLAIN,
    PROMPT,
    STREAMS,
    AsyncCall,
    Call,
    async_clients,
    chat,
    clients,
    limits,
    outcome,
)

TEXT = "hello " * 30
BAD_COUNTS: list[Any] = [-1, 10**30, True, "5", 1.5, float("nan"), []]

KNOWN = {
    "answered": Say(TEXT),
    "cut at the cap": Say(TEXT * 10),
    "overstated": Say(TEXT, usage=(5_000, 5_000)),
}
UNRELIABLE_USAGE = {
    "says nothing of its usage": Say(TEXT, usage="absent"),
    "says it was free": Say(TEXT, usage="zero"),
    "says what cannot be": Say(TEXT, usage=(10**15, 10**15)),
    "says less than was seen": Say(TEXT, usage=(1, 1)),
    **{f"says {count!r}": Say(TEXT, usage=(count, count)) for count in BAD_COUNTS},
}
BROKEN: dict[str, Fate] = {
    "HTTP 504, billed": ServerError(504, billed=True, input_tokens=10, output_tokens=90),
    "reset after billing": FailAfterBilling(input_tokens=10, output_tokens=90),
    "cut in the middle": Say(TEXT, then=Cut(after=3)),
    "ends without its mark": Say(TEXT, then=Truncate(after=3)),
    "not JSON in the middle": Say(TEXT, then=Garble(after=3)),
}
FREE: dict[str, Fate] = {"HTTP 400": RefuseFree(400), "HTTP 401": RefuseFree(401), "HTTP 429": RefuseFree(429)}


@pytest.mark.requirement("X-1", "X-5")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("fate", KNOWN.values(), ids=KNOWN)
def test_an_answer_costs_what_its_usage_report_says(call: Call, fate: Say) -> None:
    with FakeProviderServer(script=[fate]) as server, clients(server) as to, limits(server, max_cost_usd=1) as run:
        assert call(to).startswith("hello")
    charged = server.provider.price_nanos(*fate.usage) if isinstance(fate.usage, tuple) else server.invoice.total_nanos
    assert run.balance.spent_nanos == charged >= server.invoice.total_nanos
    assert (run.balance.held_nanos, run.balance.unresolved_nanos) == (0, 0)


@pytest.mark.requirement("X-1", "X-5")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("fate", UNRELIABLE_USAGE.values(), ids=UNRELIABLE_USAGE)
def test_an_answer_without_usage_costs_what_was_held_for_it(call: Call, fate: Fate) -> None:
    with FakeProviderServer(script=[fate]) as server, clients(server) as to, limits(server, max_cost_usd=1) as run:
        assert call(to).startswith("hello")
    assert server.provider.price_nanos(0, 100) < run.balance.spent_nanos < server.provider.price_nanos(100, 100)
    assert run.balance.spent_nanos > server.invoice.total_nanos


@pytest.mark.requirement("X-1", "X-5")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("fate", BROKEN.values(), ids=BROKEN)
def test_the_hold_of_a_broken_answer_stays_unresolved(call: Call, fate: Fate) -> None:
    with (
        FakeProviderServer(script=[fate]) as server,
        clients(server, max_retries=0) as to,
        limits(server, max_cost_usd=1) as run,
    ):
        outcome(lambda: call(to))
    figures = run.balance
    assert (figures.spent_nanos, figures.held_nanos, figures.steps) == (0, 0, 0)
    assert figures.unresolved_nanos >= server.invoice.total_nanos > 0
    assert f"✓ {MODEL}" not in run.explain()


@pytest.mark.requirement("X-1", "X-5")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("fate", FREE.values(), ids=FREE)
def test_a_request_that_the_provider_refuses_is_free(call: Call, fate: Fate) -> None:
    with (
        FakeProviderServer(script=[fate]) as server,
        clients(server, max_retries=0) as to,
        limits(server, max_cost_usd=1) as run,
    ):
        assert type(outcome(lambda: call(to))).__name__.endswith("Error")
    assert run.balance.spent_nanos == run.balance.unresolved_nanos == server.invoice.total_nanos == 0
    assert run.balance.attempts == 1


@pytest.mark.requirement("X-5")
@pytest.mark.parametrize("call", PLAIN)
def test_ten_calls_that_were_billed_and_then_failed_cost_in_the_ledger_what_the_invoice_says(call: Call) -> None:
    with (
        FakeProviderServer.flat(0.25, script=lambda _: FailAfterBilling()) as server,
        clients(server, max_retries=0) as to,
        contain(prices=server.provider.prices) as run,
        contained(run),
    ):
        for _ in range(10):
            assert type(outcome(lambda: call(to))).__name__ == "APIConnectionError"
    assert run.balance.unresolved_usd == server.invoice.total_usd == 2.50


@pytest.mark.requirement("X-5")
def test_failures_with_an_unknown_bill_use_up_the_ceiling() -> None:
    with (
        FakeProviderServer.flat(0.25, script=lambda _: ServerError(502, billed=True)) as server,
        clients(server, max_retries=0) as to,
        contain(max_cost_usd=1, prices=server.provider.prices) as run,
        contained(run),
    ):
        for _ in range(10):
            outcome(lambda: chat(to))
    assert run.balance.unresolved_usd == server.invoice.total_usd == 1.00


def test_unknown_bills_are_released_if_the_settings_allow_it() -> None:
    with (
        FakeProviderServer(script=[ServerError(502)]) as server,
        clients(server, max_retries=0) as to,
        limits(server, unknown_bill="release") as run,
    ):
        outcome(lambda: chat(to))
    assert run.balance.unresolved_nanos == 0


@pytest.mark.requirement("X-5")
@pytest.mark.parametrize("call", CALLS)
def test_a_rate_limit_is_waited_out_by_the_client_and_every_attempt_is_in_the_tree(call: Call) -> None:
    script = [RefuseFree(429, retry_after_s=0.01), RefuseFree(429, retry_after_s=0.01), Say("at last")]
    with FakeProviderServer(script=script) as server, clients(server) as to, limits(server, max_cost_usd=1) as run:
        assert call(to) == "at last"
    assert run.balance.spent_nanos == server.invoice.total_nanos
    assert (run.balance.attempts, run.balance.retries, run.balance.steps) == (3, 2, 1)
    assert "attempt 3" in run.explain()


@pytest.mark.parametrize("call", STREAMS)
def test_a_stream_is_passed_on_as_it_was_sent(call: Call) -> None:
    with FakeProviderServer(script=[Say(TEXT), Say(TEXT)]) as server, clients(server) as to:
        outside = call(to)
        with contain(prices=server.provider.prices) as run, contained(run):
            assert call(to) == outside


def test_a_client_that_asks_for_the_usage_of_a_stream_gets_it_and_others_see_no_extra_chunk() -> None:
    def chunks(**options: Any) -> list[Any]:
        return list(to.openai.chat.completions.create(model=MODEL, messages=PROMPT, stream=True, **options))

    with FakeProviderServer(script=lambda _: "hello") as server, clients(server) as to, limits(server) as run:
        plain = chunks()
        with_usage = chunks(stream_options={"include_usage": True})
    assert [request.body["stream_options"] for request in server.requests] == [{"include_usage": True}] * 2
    assert all(chunk.choices for chunk in plain)
    assert with_usage[-1].choices == []
    assert with_usage[-1].usage.total_tokens > 0
    assert run.balance.spent_nanos == server.invoice.total_nanos


@pytest.mark.parametrize("api", ["chat", "messages"])
def test_a_stream_that_the_program_leaves_early_stays_held_as_unresolved(api: str) -> None:
    with FakeProviderServer(script=[Say(TEXT, drip_s=0.001)]) as server, clients(server) as to:
        with contain(max_cost_usd=1, prices=server.provider.prices) as run, contained(run):
            if api == "chat":
                stream = to.openai.chat.completions.create(model=MODEL, messages=PROMPT, max_tokens=100, stream=True)
            else:
                stream = to.anthropic.messages.create(model=MODEL, messages=PROMPT, max_tokens=100, stream=True)
            with stream:
                next(iter(stream))
                assert run.balance.held_nanos > 0
            assert run.balance.held_nanos == 0
            assert run.balance.unresolved_nanos > 0
        server.wait_until(lambda: server.disconnects)
        assert "closed the answer before its end" in run.explain()
    assert run.balance.unresolved_nanos >= server.invoice.total_nanos


@pytest.mark.requirement("C-17")
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
@pytest.mark.parametrize("stop", ["abort", "close"])
def test_the_text_of_a_stream_that_was_stopped_is_in_the_partial_results(api: str, stop: str) -> None:
    with FakeProviderServer(script=[Say(TEXT, drip_s=0.001, then=Hang(after=5))]) as server, clients(server) as to:
        with contain(max_cost_usd=1, prices=server.provider.prices) as run, contained(run):
            ask: Any = {
                "chat": lambda: to.openai.chat.completions.create(model=MODEL, messages=PROMPT, stream=True),
                "responses": lambda: to.openai.responses.create(model=MODEL, input="hello", stream=True),
                "messages": lambda: to.anthropic.messages.create(
                    model=MODEL, messages=PROMPT, max_tokens=100, stream=True
                ),
            }[api]
            with ask() as stream:
                came = "".join(piece for _, piece in zip(range(2), texts(api, stream), strict=False))
                if stop == "abort":
                    run.abort("enough")
                    with pytest.raises(CancelledError) as raised:
                        list(stream)
                    assert raised.value.partial == run.partial_results
        kept = run.partial_results[MODEL]
    assert isinstance(kept, IncompleteOutput)
    assert came
    assert "".join(kept.pieces).startswith(came)
    assert TEXT.startswith("".join(kept.pieces))


def texts(api: str, stream: Any) -> Iterator[str]:
    """The text in the events of a client's stream, piece by piece."""
    for event in stream:
        text = None
        if api == "chat":
            text = event.choices[0].delta.content if event.choices else None
        elif event.type in ("response.output_text.delta", "content_block_delta"):
            text = event.delta if api == "responses" else event.delta.text
        if text:
            yield text


def test_a_call_is_open_until_its_stream_has_been_read() -> None:
    with FakeProviderServer() as server, clients(server) as to, limits(server) as run:
        with to.openai.responses.create(model=MODEL, input="hello", stream=True) as stream:
            assert (run.balance.steps_open, run.balance.steps) == (1, 0)
            for _ in stream:
                pass
        assert (run.balance.steps_open, run.balance.steps) == (0, 1)


def test_a_stream_that_outlives_its_run_is_cut_off_with_it() -> None:
    with FakeProviderServer(script=[Say(TEXT, drip_s=0.001, then=Hang(after=5))]) as server, clients(server) as to:
        with limits(server) as run:
            stream = to.openai.chat.completions.create(model=MODEL, messages=PROMPT, max_tokens=100, stream=True)
        server.wait_until(lambda: server.disconnects)
        with pytest.raises(CancelledError, match="has ended"):
            list(stream)
    assert run.balance.unresolved_nanos >= server.invoice.total_nanos > 0


@pytest.mark.requirement("X-2")
def test_a_model_without_a_price_is_counted_as_unknown_assumed_or_refused() -> None:
    with FakeProviderServer() as server, clients(server) as to:
        with contain(prices=PriceBook(use_genai_prices=False)) as run, contained(run):
            assert chat(to)
        assert run.get_snapshot().unknown_costs == 1
        assumed = PriceBook(use_genai_prices=False, unknown="assume", assumed=Price(30, 150))
        with contain(prices=assumed) as run, contained(run):
            assert chat(to)
        assert run.balance.spent_nanos == 10 * server.invoice.lines[-1].cost_nanos
        with contain(prices=PriceBook(use_genai_prices=False, unknown="refuse")) as run, contained(run):
            assert "no price is known" in str(outcome(lambda: chat(to)))
    assert len(server.requests) == 2


def test_several_answers_to_one_request_are_all_held_for() -> None:
    def ask() -> Any:
        return to.openai.chat.completions.create(model=MODEL, messages=PROMPT, max_tokens=10_000, n=4)

    with FakeProviderServer() as server, clients(server) as to, limits(server, max_cost_usd=0.01):
        outcome(ask)  # this provider gives one only, and refuses
    assert 140 < server.requests[0].body["max_tokens"] < 167  # of the 666 tokens of output that a cent buys


def test_the_breaker_counts_the_providers_failures() -> None:
    breaker = CircuitBreaker(failure_threshold=2)
    with (
        FakeProviderServer(script=lambda _: ServerError(503)) as server,
        clients(server, max_retries=5) as to,
        limits(server, breaker=breaker) as run,
    ):
        found = outcome(lambda: chat(to))
    assert type(found).__name__ == "Halted"
    assert len(server.requests) == 2
    assert "circuit_open" in run.explain()


@pytest.mark.requirement("X-5")
@pytest.mark.parametrize("call", ASYNC_CALLS)
async def test_a_storm_of_faults_leaves_the_ledger_at_or_above_the_invoice(call: AsyncCall) -> None:
    fates = [*KNOWN.values(), *UNRELIABLE_USAGE.values(), *BROKEN.values(), *FREE.values(), "fine", "fine"]
    async with (
        FakeProviderServer(script=lambda request: fates[request.number % len(fates)]) as server,
        async_clients(server, max_retries=0) as to,
    ):
        with contain(max_cost_usd=1, prices=server.provider.prices) as run, contained(run):
            await asyncio.gather(*(call(to) for _ in range(60)), return_exceptions=True)
    figures = run.balance
    assert figures.held_nanos == 0
    assert server.invoice.total_nanos <= figures.spent_nanos + figures.unresolved_nanos <= 1_000_000_000


@pytest.mark.parametrize(
    ("path", "body", "allowance"),
    [
        ("/v1/completions", {"prompt": "x", "n": 2}, (200, 0, True)),
        ("/v1/completions", {"prompt": "x", "n": 2, "echo": True}, (200, 2, True)),
        ("/v1/embeddings", {"input": ["a", "b"]}, (0, 0, False)),
        ("/v1/images/generations", {"prompt": "x"}, (0, 0, False)),
        ("/models/m:generateContent", {"contents": []}, (100, 0, True)),
    ],
)
def test_how_much_is_read_follows_from_the_request(path: str, body: Any, allowance: tuple[int, int, bool]) -> None:
    form = form_of("POST", "127.0.0.1", path)
    assert form is not None
    request = parse_request(form, {}, json.dumps(body).encode())
    assert request is not None
    found = allowance_of(request, 100 if form.output == "text" else 0)
    repeated = found.repeated_tokens // request.input_tokens
    assert (found.output_tokens, repeated, found.has_text) == allowance
