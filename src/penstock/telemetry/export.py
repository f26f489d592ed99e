"""The way from a run to a tracer.

An export is an observer: it reads the run's log on a thread of its own, so that whatever a tracer, a processor or a
collector does, the run neither waits for it nor hears of it. What it missed is counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from penstock.runtime.context import ExecutionContext
from penstock.runtime.options import must_be
from penstock.runtime.watching.observers import Subscription
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
    """Turn every event of the context's run into OpenTelemetry spans, those before this call included.

    Without a provider, the program's own is used. The run's span is put under the span that is current here. With
    `content`, the data of custom events is exported too; secrets are redacted either way, `secrets` among them.
    """
    must_be("context", context, ExecutionContext)
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
    """One run on its way to a tracer: what was written, what was missed. Made by `export_to_otel`."""

    def __init__(self, subscription: Subscription, writer: SpanWriter) -> None:
        self._subscription = subscription
        self._writer = writer

    @property
    def spans(self) -> int:
        """Spans that were begun and ended."""
        return self._writer.written

    @property
    def dropped(self) -> int:
        """Events of the run that were gone before they were read."""
        return self._subscription.dropped

    @property
    def failures(self) -> int:
        """Events on which the tracer raised."""
        return self._writer.failures + self._subscription.failures

    @property
    def last_error(self) -> BaseException | None:
        """What it raised last; None if it never did."""
        return self._writer.last_error or self._subscription.last_error

    def drain(self, timeout_s: float = 2.0) -> bool:
        """Wait until everything recorded so far was handed to the tracer; False if that takes longer.

        Blocks the calling thread.
        """
        self._writer.hurry.set()
        try:
            return self._subscription.drain(timeout_s)
        finally:
            self._writer.hurry.clear()

    def close(self) -> None:
        """Stop after what is being written; does not wait for that."""
        self._writer.hurry.set()
        self._subscription.close()
