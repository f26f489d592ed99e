"""botocore, with fake credentials: its requests are signed, so nothing of them may be changed.

A refusal must not be retried or wrapped by it, in any of its retry modes.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from botocore.config import Config

from penstock import BudgetExceededError, CancelledError, ExecutionContext, Halted, contain
from penstock.providers import ExcessOutput, contained
from penstock.testing.provider import Endless, FakeProviderServer, Hang, RefuseFree, Say
from tests.providers.matrix import CALL_USD, CEILING_USD, MANY, PAID
from tests.providers.sdk_calls import outcome
from tests.providers.shapes import ANTHROPIC, CONVERSATION, CONVERSE, MODEL, SHAPES, Shape
from tests.providers.stack_calls import bedrock_client, read_bedrock

pytestmark = pytest.mark.requirement("X-11")

BODIES = {
    "converse": CONVERSE,
    "converse-stream": CONVERSE,
    "invoke": ANTHROPIC,
    "invoke-with-response-stream": ANTHROPIC,
}
"""The body of each operation."""
STREAMS = [operation for operation in BODIES if operation.endswith("stream")]
SIGNED = {name: shape for name, shape in SHAPES.items() if shape.headers}
TEXT = "hello " * 30
RETRY_MODES = ["legacy", "standard", "adaptive"]


@contextmanager
def client_of(server: FakeProviderServer, **options: Any) -> Iterator[Any]:
    client = bedrock_client(server.url, **options)
    try:
        yield client
    finally:
        client.close()


@contextmanager
def limited(server: FakeProviderServer, **limits: Any) -> Iterator[ExecutionContext]:
    with contain(prices=server.provider.prices, **limits) as run, contained(run, on_stop="ignore"):
        yield run


@contextmanager
def answering(fate: Say) -> Iterator[tuple[FakeProviderServer, Any, ExecutionContext]]:
    """A server that answers so, a client of it, and a run that can pay for it."""
    with (
        FakeProviderServer(script=[fate]) as server,
        client_of(server) as client,
        limited(server, max_cost_usd=1) as run,
    ):
        yield server, client, run


@pytest.mark.parametrize("operation", BODIES)
def test_a_call_costs_what_the_provider_bills_and_is_signed_as_it_was_sent(operation: str) -> None:
    with FakeProviderServer() as server, client_of(server) as client, limited(server, max_cost_usd=1) as run:
        assert read_bedrock(client, operation, MODEL, BODIES[operation])
    [request] = server.requests
    [line] = server.invoice.lines
    assert request.headers["authorization"].startswith("AWS4-HMAC-SHA256")
    assert request.body == BODIES[operation]
    assert (run.balance.tokens_in, run.balance.tokens_out) == (line.input_tokens, line.output_tokens)
    assert run.balance.spent_usd == pytest.approx(server.invoice.total_usd, abs=1e-9)
    assert (run.balance.steps, run.balance.held_nanos, run.balance.unresolved_nanos) == (1, 0, 0)
    assert f"llm {MODEL}" in run.explain()


@pytest.mark.parametrize("mode", RETRY_MODES)
@pytest.mark.parametrize("operation", BODIES)
def test_a_refusal_is_raised_as_it_is_and_not_retried(operation: str, mode: str) -> None:
    attempts: list[Any] = []
    config = Config(retries={"mode": mode, "max_attempts": 4})
    with FakeProviderServer.flat(CALL_USD) as server, client_of(server, config=config) as client:
        client.meta.events.register("before-send", lambda **_: attempts.append(_))
        with limited(server, max_cost_usd=CALL_USD) as run:
            assert read_bedrock(client, operation, MODEL, BODIES[operation])
            with pytest.raises(BudgetExceededError, match=f"\\${CALL_USD} spent of the"):
                read_bedrock(client, operation, MODEL, BODIES[operation])
    assert len(attempts) == 2
    assert len(server.requests) == run.balance.attempts == 1


def test_a_call_without_a_maximum_is_refused_with_an_error_that_says_what_to_set() -> None:
    with (
        FakeProviderServer() as server,
        client_of(server) as client,
        limited(server, max_cost_usd=1),
        pytest.raises(Halted, match=r"set inferenceConfig\.maxTokens"),
    ):
        client.converse(modelId=MODEL, messages=CONVERSATION)
    assert server.requests == ()


def test_each_retry_of_botocore_itself_is_an_attempt_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=lambda _: None))
    config = Config(retries={"mode": "legacy", "max_attempts": 4})
    script = [RefuseFree(503), RefuseFree(503), "hello"]
    with (
        FakeProviderServer(script=script) as server,
        client_of(server, config=config) as client,
        limited(server, max_cost_usd=1) as run,
    ):
        assert b"hello" in read_bedrock(client, "converse", MODEL, CONVERSE)
    assert (run.balance.attempts, run.balance.retries, len(server.requests)) == (3, 2, 3)
    assert run.balance.spent_usd == pytest.approx(server.invoice.total_usd, abs=1e-9)


def test_botocore_stops_retrying_when_the_retries_of_the_run_are_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=lambda _: None))
    config = Config(retries={"mode": "legacy", "max_attempts": 4})
    with (
        FakeProviderServer(script=[RefuseFree(503)] * 2) as server,
        client_of(server, config=config) as client,
        limited(server, max_retries=1),
        pytest.raises(Halted, match="the retry budget has nothing left"),
    ):
        read_bedrock(client, "converse", MODEL, CONVERSE)
    assert len(server.requests) == 2


@pytest.mark.parametrize("operation", BODIES)
def test_a_client_that_a_pool_of_threads_shares_stays_under_the_ceiling(operation: str) -> None:
    with (
        FakeProviderServer.flat(CALL_USD) as server,
        client_of(server) as client,
        ThreadPoolExecutor(4) as pool,
        limited(server, max_cost_usd=CEILING_USD) as run,
    ):
        call = partial(read_bedrock, client, operation, MODEL, BODIES[operation])
        items = [pool.submit(outcome, call) for _ in range(MANY)]
        outcomes = [item.result() for item in items]
    assert sum(isinstance(found, bytes) for found in outcomes) == PAID
    assert sum(isinstance(found, BudgetExceededError) for found in outcomes) == MANY - PAID
    assert server.invoice.total_usd == run.balance.spent_usd == CEILING_USD


@pytest.mark.parametrize("operation", STREAMS)
def test_a_stream_that_is_closed_early_is_unresolved_and_its_connection_is_broken(operation: str) -> None:
    with answering(Say(TEXT, then=Hang(after=3))) as (server, client, run):
        events = opened(client, operation)
        assert next(iter(events))
        assert run.balance.held_nanos > 0
        events.close()
        server.wait_until(lambda: server.disconnects)
    assert run.balance.held_nanos == 0
    assert run.balance.unresolved_nanos >= server.invoice.total_nanos > 0


@pytest.mark.parametrize("operation", STREAMS)
def test_an_abort_frees_a_caller_that_reads_a_stream(operation: str) -> None:
    with answering(Say(TEXT, then=Hang(after=3))) as (server, client, run):
        stopper = threading.Thread(target=lambda: (server.wait_until(lambda: server.in_flight), run.abort("enough")))
        stopper.start()
        with pytest.raises(CancelledError, match="enough"):
            read_bedrock(client, operation, MODEL, BODIES[operation])
        stopper.join()
        server.wait_until(lambda: server.disconnects)
    assert run.balance.held_nanos == 0
    assert run.balance.unresolved_nanos >= server.invoice.total_nanos


@pytest.mark.parametrize("operation", BODIES)
def test_an_endless_answer_is_cut(operation: str) -> None:
    with answering(Say(TEXT, then=Endless())) as (server, client, run):
        with pytest.raises(ExcessOutput):
            read_bedrock(client, operation, MODEL, BODIES[operation])
        server.wait_until(lambda: server.disconnects)
    assert len(server.requests) == 1
    assert run.balance.spent_usd + run.balance.unresolved_usd >= server.invoice.total_usd


def opened(client: Any, operation: str) -> Any:
    """Return the stream of an operation, with nothing read of it."""
    if operation == "converse-stream":
        return client.converse_stream(modelId=MODEL, **CONVERSE)["stream"]
    return client.invoke_model_with_response_stream(modelId=MODEL, body=json.dumps(ANTHROPIC))["body"]


# Requests that another library has signed.


@pytest.mark.parametrize("shape", SIGNED.values(), ids=SIGNED)
def test_a_signed_request_over_http_client_is_sent_byte_for_byte(shape: Shape) -> None:
    body = json.dumps(shape.body).encode()
    with FakeProviderServer() as server, limited(server, max_cost_usd=1) as run:
        connection = http.client.HTTPConnection(urlsplit(server.url).netloc)
        connection.request("POST", shape.path, body, {**shape.headers, "content-type": "application/json"})
        with connection.getresponse() as response:
            response.read()
        connection.close()
    assert server.requests[0].raw == body
    assert run.balance.spent_usd == pytest.approx(server.invoice.total_usd, abs=1e-9)


@pytest.mark.parametrize("shape", SIGNED.values(), ids=SIGNED)
async def test_a_signed_request_over_aiohttp_is_sent_byte_for_byte(shape: Shape) -> None:
    body = json.dumps(shape.body).encode()
    async with FakeProviderServer() as server:
        with limited(server, max_cost_usd=1) as run:
            async with (
                aiohttp.ClientSession() as session,
                session.post(server.url + shape.path, data=body, headers=shape.headers) as response,
            ):
                await response.read()
    assert server.requests[0].raw == body
    assert run.balance.spent_usd == pytest.approx(server.invoice.total_usd, abs=1e-9)
