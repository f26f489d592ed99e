"""Export the runs of a service to one tracer provider, and end the export in bounded time.

Each run is exported as by `export_to_otel`, as a child of the span that was current where it was submitted. The log of
a run is read on a thread of its own, which ends with the run.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from penstock.hosting import trace_context
from penstock.telemetry.export import OtelExport, export_to_otel

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from penstock.runtime.context import ExecutionContext

DRAIN_S = 2.0
"""How long the end of the service waits for the spans of its last runs."""


class ServiceExport:
    """Exports every run that a host passes to it."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._open: deque[OtelExport] = deque()

    def observe(self, context: ExecutionContext) -> None:
        """Export a run that is about to start."""
        from opentelemetry.context import Context, attach, detach
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        while self._open and self._open[0].ended:
            self._open.popleft()
        # Whatever span is current where the run is executed, its parent is that of the request which submitted it.
        attached = attach(TraceContextTextMapPropagator().extract(trace_context.current.get(), Context()))
        try:
            self._open.append(export_to_otel(context, self._provider))
        finally:
            detach(attached)

    def close(self) -> None:
        """Pass on what the last runs recorded, and shut the provider down; blocks for a few seconds at most."""
        deadline = time.monotonic() + DRAIN_S
        while self._open:
            self._open.popleft().drain(max(0.0, deadline - time.monotonic()))
        self._provider.shutdown()
