"""Export a run to a tracer.

An export is an observer: it reads the run's log on a thread of its own, so that the run neither waits for nor is
affected by a tracer, a processor or a collector. Missed events are counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from penstock import checks
from penstock.runtime.context import ExecutionContext
from penstock.runtime.observers import Subscription
from penstock.tracing.redaction import Redaction

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from penstock.telemetry.spans import SpanWriter


def export_to_otel(
    context: ExecutionContext,
    tracer_provider: TracerProvider | None = None,
    *,
    content: bool = False,
    secrets: Iterable[str] = (),
) -> OtelExport:
    """Turn every event of the context's run into OpenTelemetry spans, including those before this call.

    Without a provider, the program's own is used. The run's span becomes a child of the current span. With `content`,
    the data of custom events and the payloads that the run records are exported too; secrets are redacted either way,
    including `secrets`.
    """
    checks.instance("context", context, ExecutionContext)
    rules = Redaction(secrets)
    while context.parent is not None:
        context = context.parent
    writer = _writer(context, tracer_provider, rules, content)
    return OtelExport(context.observe(writer), writer)


def _writer(
    context: ExecutionContext, tracer_provider: TracerProvider | None, rules: Redaction, content: bool
) -> SpanWriter:
    try:
        from penstock.telemetry.spans import SpanWriter
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"exporting spans needs {error.name}: install penstock[otel]", name=error.name
        ) from None
    return SpanWriter(context, tracer_provider, rules, content)


class OtelExport:
    """The export of one run to a tracer, with counts of spans written and events missed. Made by `export_to_otel`."""

    def __init__(self, subscription: Subscription, writer: SpanWriter) -> None:
        self._subscription = subscription
        self._writer = writer

    @property
    def spans(self) -> int:
        """Spans that were started and ended."""
        return self._writer.written

    @property
    def dropped(self) -> int:
        """Events of the run that the log dropped before they were read."""
        return self._subscription.dropped

    @property
    def ended(self) -> bool:
        """Whether everything of an ended run was passed to the tracer, or the export is closed."""
        return self._subscription.ended

    @property
    def failures(self) -> int:
        """Events on which the tracer raised."""
        return self._writer.failures + self._subscription.failures

    @property
    def last_error(self) -> BaseException | None:
        """The last error it raised; None if it never did."""
        return self._writer.last_error or self._subscription.last_error

    def drain(self, timeout_s: float = 2.0) -> bool:
        """Wait until everything recorded so far was passed to the tracer; return False if that takes longer.

        Blocks the calling thread.
        """
        self._writer.flushing.set()
        try:
            return self._subscription.drain(timeout_s)
        finally:
            self._writer.flushing.clear()

    def close(self) -> None:
        """Stop after the current write; does not wait for that."""
        self._writer.flushing.set()
        self._subscription.close()
