"""A tracer provider that sends spans to a collector without blocking the program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

EXPORT_TIMEOUT_S = 5.0
SHUTDOWN_S = 1.8
"""Less than two seconds, including the time the threads themselves take."""


def otlp_provider(
    endpoint: str | None = None,
    *,
    headers: Mapping[str, str] | None = None,
    service_name: str = "penstock",
    timeout_s: float = EXPORT_TIMEOUT_S,
    shutdown_s: float = SHUTDOWN_S,
) -> TracerProvider:
    """Return a provider that sends spans to the OTLP/HTTP collector at `endpoint`.

    An endpoint is a URL such as `http://localhost:4318/v1/traces`. Without an endpoint and headers, OpenTelemetry's
    environment variables apply. Shut it down at the end of the program: that takes `shutdown_s` at most, even with a
    dead collector.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider

        from penstock.telemetry.processor import BoundedSpanProcessor
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"sending spans needs {error.name}: install penstock[otel]", name=error.name
        ) from None
    exporter = OTLPSpanExporter(endpoint, headers=None if headers is None else dict(headers), timeout=timeout_s)
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: service_name}))
    provider.add_span_processor(BoundedSpanProcessor(exporter, shutdown_s=shutdown_s))
    return provider
