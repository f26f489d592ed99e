"""Ended spans on their way out: a bounded queue, and one thread that empties it.

Whoever ends a span never waits: a full queue drops the span and counts it. Shutting down takes as long as it was given
and no longer, whatever the exporter does: what is still queued by then is dropped and counted, and an exporter that
hangs is left behind on its daemon thread. Knows nothing of runs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, attach, detach, set_value
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from penstock.errors import InvalidValue
from penstock.telemetry.collector import SHUTDOWN_S

MAX_QUEUED = 8_192
MAX_BATCH = 512
LINGER_S = 0.5


class BoundedSpanProcessor(SpanProcessor):
    """Hands ended spans to `exporter` in batches; never blocks the one who ends them, nor the one who shuts down."""

    def __init__(
        self,
        exporter: SpanExporter,
        *,
        max_queued: int = MAX_QUEUED,
        max_batch: int = MAX_BATCH,
        linger_s: float = LINGER_S,
        shutdown_s: float = SHUTDOWN_S,
    ) -> None:
        if not 1 <= max_batch <= max_queued:
            raise InvalidValue("max_batch", max_batch, "one or more, and no more than max_queued")
        self.exported = 0
        """Spans that the exporter took."""
        self.dropped = 0
        """Spans that found the queue full, came too late, or were still queued at the end."""
        self.failed = 0
        """Spans of batches that the exporter refused, or raised on."""
        self._exporter = exporter
        self._max_queued = max_queued
        self._max_batch = max_batch
        self._linger_s = linger_s
        self._shutdown_s = shutdown_s
        self._queue: deque[ReadableSpan] = deque()
        self._changed = threading.Condition()
        self._exporting = 0
        """Spans of the batch that the exporter has now."""
        self._flushing = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def on_end(self, span: ReadableSpan) -> None:
        """Queue the span, or drop it."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        with self._changed:
            if self._closed or len(self._queue) >= self._max_queued:
                self.dropped += 1
                return
            self._queue.append(span)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="penstock-span-export", daemon=True)
                self._thread.start()
            elif len(self._queue) in (1, self._max_batch):
                self._changed.notify_all()

    def force_flush(self, timeout_millis: int = 2_000) -> bool:
        """Wait until everything that has ended was exported; False if that takes longer. Blocks the calling thread."""
        with self._changed:
            self._flushing = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._queue and not self._exporting, timeout_millis / 1_000)

    def shutdown(self) -> None:
        """Export what can be exported in the time there is, and stop; again, it changes nothing."""
        deadline = time.monotonic() + self._shutdown_s
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._queue and not self._exporting, self._shutdown_s * 0.75)
            self.dropped += len(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        _run_for(self._exporter.shutdown, deadline)
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))

    # The thread's side.

    def _work(self) -> None:
        suppressed = attach(set_value(_SUPPRESS_INSTRUMENTATION_KEY, True))
        try:
            while batch := self._next():
                self._export(batch)
        finally:
            detach(suppressed)

    def _next(self) -> list[ReadableSpan]:
        """The next batch; none if there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            self._changed.wait_for(self._is_due, self._linger_s)
            batch = [self._queue.popleft() for _ in range(min(self._max_batch, len(self._queue)))]
            self._exporting = len(batch)
            return batch

    def _is_due(self) -> bool:
        """Whether nothing is won by waiting for more spans. The caller holds the condition."""
        return self._closed or self._flushing or len(self._queue) >= self._max_batch

    def _export(self, batch: list[ReadableSpan]) -> None:
        try:
            taken = self._exporter.export(batch) is SpanExportResult.SUCCESS
        except BaseException:
            # SystemExit and its kind would end this thread without a word; nobody but the exporter is meant by them.
            taken = False
        with self._changed:
            if taken:
                self.exported += len(batch)
            else:
                self.failed += len(batch)
            self._exporting = 0
            if not self._queue:
                self._flushing = False
            self._changed.notify_all()


def _run_for(act: Callable[[], None], deadline: float) -> None:
    """Run `act` on a thread of its own, and wait for it until `deadline` at most."""

    def acting() -> None:
        try:
            act()
        except BaseException:
            return

    thread = threading.Thread(target=acting, name="penstock-span-export-end", daemon=True)
    thread.start()
    thread.join(max(0.0, deadline - time.monotonic()))
