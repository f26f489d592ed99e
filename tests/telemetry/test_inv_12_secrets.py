"""Planted secrets never leave: not in spans, not in any form of a trace."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock import ChainMetadata, CustomTrace, ExecutionConfig, ExecutionContext, Halted, SafetyEvent
from penstock.containment.safety import Decision
from penstock.telemetry import export_to_otel
from penstock.tracing.events import ErrorTrace
from penstock.tracing.page import trace_html
from penstock.tracing.tree import trace_json, trace_mermaid, trace_tree

PATTERNED = {
    "openai": "sk-proj-4nAryAbCdEf0123456789",
    "github": "ghp_4nAryAbCdEf0123456789AbCdEf",
    "aws": "AKIA4NARYABCDEF01234",
    "google": "AIza4nAryAbCdEf0123456789AbCdEf01234",
    "slack": "xoxb-4nAry-AbCdEf0123456789",
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJjYW5hcnkiOiI0bkFyeSJ9.4nAryAbCdEf",
    "canary": "canary-4nAryAbCdEf01",
}
"""Secrets by their look, wherever they stand."""

GIVEN = "Hoover Dam 4nAry / 1936"
"""A secret that has no known pattern, and is passed as `secrets=`."""


def leaky_run(secret: str) -> ExecutionContext:
    """A run with the secret everywhere that a user's text can get into one."""
    metadata = ChainMetadata(
        request_id=f"request {secret}",
        chain_id=f"chain {secret}",
        org_id=secret,
        team=secret,
        service=secret,
        user_id=secret,
        tags={"note": secret, secret: "as a key"},
    )
    config = ExecutionConfig(max_cost_usd=1.0, max_steps=None, max_retries_total=5)
    run = ExecutionContext(config, metadata=metadata, name=f"run {secret}")

    def fail() -> None:
        raise ValueError(f"refused: {secret}")

    with run:
        run.start_iteration()
        run.llm(lambda: None, name=f"ask {secret}", model=f"model {secret}")
        for _ in range(2):
            with pytest.raises(ValueError):
                run.tool(fail, name=f"tool {secret}")
        run.end_iteration(f"action {secret}")
        with run.spawn_child(f"child {secret}") as child, pytest.raises(Halted):
            child.tool(lambda: None, name="costly", cost_hint_usd=5.0)
        run.trace_custom(f"custom {secret}", {"text": f"x {secret} y", secret: {"deep": [secret, (secret,)]}})
        run.record_event(CustomTrace(name="object", data={"repr": Reveals(secret), "bytes": secret.encode()}))
        run.record_event(ErrorTrace(error_class=f"E {secret}", message=f"m {secret}"))
        run.record_event(
            SafetyEvent(
                event_type=f"type {secret}",
                decision=Decision.HALT,
                reason=f"reason {secret}",
                hook=f"hook {secret}",
                request_id=secret,
                metadata={"m": secret},
            )
        )
        run.abort(f"because of {secret}")
    return run


class Reveals:
    def __init__(self, secret: str) -> None:
        self._secret = secret

    def __repr__(self) -> str:
        return f"Reveals({self._secret})"


@pytest.fixture
def memory() -> Iterator[tuple[TracerProvider, InMemorySpanExporter]]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider, exporter
    provider.shutdown()


SECRETS = [*((secret, ()) for secret in PATTERNED.values()), (GIVEN, (GIVEN,))]


@pytest.mark.reliability
@pytest.mark.parametrize(("secret", "secrets"), SECRETS, ids=[*PATTERNED, "given"])
@pytest.mark.parametrize("form", [trace_tree, trace_json, trace_mermaid, trace_html], ids=lambda form: form.__name__)
def test_a_planted_secret_is_in_no_form_of_a_trace(
    form: Callable[..., str], secret: str, secrets: tuple[str, ...]
) -> None:
    text = form(leaky_run(secret), secrets=secrets)
    assert "4nAry" not in text
    assert "4NARY" not in text
    assert secret not in text


@pytest.mark.reliability
@pytest.mark.parametrize(("secret", "secrets"), SECRETS, ids=[*PATTERNED, "given"])
def test_a_planted_secret_is_in_no_span(secret: str, secrets: tuple[str, ...], memory: Any) -> None:
    provider, exporter = memory
    run = leaky_run(secret)
    export = export_to_otel(run, provider, content=True, secrets=secrets)
    assert export.drain(30.0)
    export._subscription._thread.join(30.0)
    spans = exporter.get_finished_spans()
    assert len(spans) == export.spans == 7
    sent = encode_spans(spans).SerializeToString()
    for trace in (secret.encode(), b"4nAry", b"4NARY", json.dumps(secret).encode()):
        assert trace not in sent
    assert b"[redacted]" in sent


def test_the_secret_is_really_in_the_run() -> None:
    """Otherwise none of the above would show anything."""
    run = leaky_run(GIVEN)
    assert trace_tree(run).count(GIVEN) > 10
    assert trace_json(run).count(GIVEN) > 20
