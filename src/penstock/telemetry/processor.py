"""Export ended spans through a bounded queue and one thread that empties it.

Ending a span never waits: a full queue drops the span and counts it. Shutting down takes no longer than its time limit,
whatever the exporter does: spans still queued by then are dropped and counted, and an exporter that hangs is abandoned
on its daemon thread. Knows nothing of runs.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable

from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, attach, detach, set_value
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from penstock import checks

MAX_QUEUED = 8_192
MAX_BATCH = 512
LINGER_S = 0.5


class BoundedSpanProcessor(SpanProcessor):
    """Passes ended spans to `exporter` in batches; ending a span never blocks, and shutting down takes bounded time."""

    def __init__(
        self,
        exporter: SpanExporter,
        *,
        max_queued: int = MAX_QUEUED,
        max_batch: int = MAX_BATCH,
        linger_s: float = LINGER_S,
        shutdown_s: float,
    ) -> None:
        checks.integer("max_batch", max_batch, minimum=1, maximum=max_queued, of="spans")
        self.exported = 0
        """Spans that the exporter accepted."""
        self.dropped = 0
        """Spans dropped because the queue was full, the processor was closed, or they were still queued at the end."""
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
        """Number of spans in the batch being exported."""
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
                contextvars.Context().run(self._thread.start)  # it exports for all runs, and belongs to none
            elif len(self._queue) in (1, self._max_batch):
                self._changed.notify_all()

    def force_flush(self, timeout_millis: int = 2_000) -> bool:
        """Wait until all ended spans were exported; return False if that takes longer. Blocks the calling thread."""
        with self._changed:
            self._flushing = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._queue and not self._exporting, timeout_millis / 1_000)

    def shutdown(self) -> None:
        """Export what can be exported within the time limit, and stop; calling it again changes nothing."""
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
        _run_until(deadline, self._exporter.shutdown)
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
        """Return the next batch; an empty one if there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            self._changed.wait_for(self._is_due, self._linger_s)
            batch = [self._queue.popleft() for _ in range(min(self._max_batch, len(self._queue)))]
            self._exporting = len(batch)
            return batch

    def _is_due(self) -> bool:
        """Return whether waiting for more spans is pointless. The caller holds the condition."""
        return self._closed or self._flushing or len(self._queue) >= self._max_batch

    def _export(self, batch: list[ReadableSpan]) -> None:
        try:
            accepted = self._exporter.export(batch) is SpanExportResult.SUCCESS
        except BaseException:
            # SystemExit and similar would silently end this thread; they concern only the exporter.
            accepted = False
        with self._changed:
            if accepted:
                self.exported += len(batch)
            else:
                self.failed += len(batch)
            self._exporting = 0
            if not self._queue:
                self._flushing = False
            self._changed.notify_all()


def _run_until(deadline: float, action: Callable[[], None]) -> None:
    """Run `action` on a thread of its own, and wait for it until `deadline` at most."""

    def work() -> None:
        try:
            action()
        except BaseException:
            return

    thread = threading.Thread(target=work, name="penstock-span-export-end", daemon=True)
    thread.start()
    thread.join(max(0.0, deadline - time.monotonic()))
