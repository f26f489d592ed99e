"""Ended spans on their way out."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from penstock import InvalidValue
from penstock.telemetry.collector import SHUTDOWN_S
from penstock.telemetry.processor import BoundedSpanProcessor


class Exporter(SpanExporter):
    """Keeps the names of what it gets; waits, raises or refuses on demand."""

    def __init__(self, error: BaseException | None = None, result: SpanExportResult = SpanExportResult.SUCCESS) -> None:
        self.batches: list[list[str]] = []
        self.entered = threading.Event()
        self.may_return = threading.Event()
        self.may_return.set()
        self.shut_down = 0
        self._error = error
        self._result = result

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.entered.set()
        assert self.may_return.wait(60)
        self.batches.append([span.name for span in spans])
        if self._error is not None:
            raise self._error
        return self._result

    def shutdown(self) -> None:
        self.shut_down += 1


def end_spans(processor: BoundedSpanProcessor, *names: str) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    for name in names:
        provider.get_tracer("test").start_span(name).end()


def test_spans_are_exported_in_order_and_in_batches() -> None:
    exporter = Exporter()
    processor = BoundedSpanProcessor(exporter, max_batch=2, linger_s=60, shutdown_s=SHUTDOWN_S)
    end_spans(processor, "a", "b", "c", "d", "e")
    assert processor.force_flush(60_000)
    processor.shutdown()
    assert [name for batch in exporter.batches for name in batch] == ["a", "b", "c", "d", "e"]
    assert max(map(len, exporter.batches)) == 2
    assert (processor.exported, processor.dropped, processor.failed, exporter.shut_down) == (5, 0, 0, 1)


def test_shutting_down_exports_what_is_queued() -> None:
    exporter = Exporter()
    processor = BoundedSpanProcessor(exporter, linger_s=60, shutdown_s=60)
    end_spans(processor, "a", "b")
    processor.shutdown()
    assert exporter.batches == [["a", "b"]]


def test_full_queue_drops_and_counts_spans_without_blocking() -> None:
    exporter = Exporter()
    exporter.may_return.clear()
    processor = BoundedSpanProcessor(exporter, max_queued=3, max_batch=1, shutdown_s=60)
    end_spans(processor, "out")
    assert exporter.entered.wait(60)
    end_spans(processor, "1", "2", "3", "4", "5")
    assert processor.dropped == 2
    exporter.may_return.set()
    processor.shutdown()
    assert (processor.exported, processor.dropped) == (4, 2)


@pytest.mark.reliability
def test_shutting_down_does_not_wait_for_an_exporter_that_hangs() -> None:
    exporter = Exporter()
    exporter.may_return.clear()
    processor = BoundedSpanProcessor(exporter, max_batch=1, shutdown_s=0.02)
    end_spans(processor, "stuck", "queued")
    assert exporter.entered.wait(60)
    processor.shutdown()
    assert exporter.batches == []
    assert processor.dropped == 1
    assert not processor.force_flush(1)
    exporter.may_return.set()
    assert processor._thread is not None
    processor._thread.join(60)
    assert processor.exported == 1


@pytest.mark.reliability
def test_shutting_down_does_not_wait_for_an_exporter_whose_own_shutdown_hangs() -> None:
    may_return, entered = threading.Event(), threading.Event()

    class Hanging(Exporter):
        def shutdown(self) -> None:
            entered.set()
            may_return.wait(60)
            self.shut_down += 1

    exporter = Hanging()
    processor = BoundedSpanProcessor(exporter, shutdown_s=0.02)
    processor.shutdown()
    assert exporter.shut_down == 0
    may_return.set()
    for thread in threading.enumerate():
        if thread.name == "penstock-span-export-end":
            thread.join(60)


@pytest.mark.parametrize(
    "exporter", [Exporter(ValueError("no")), Exporter(SystemExit()), Exporter(result=SpanExportResult.FAILURE)]
)
def test_failing_exporter_is_counted_and_used_again(exporter: Exporter) -> None:
    processor = BoundedSpanProcessor(exporter, max_batch=1, shutdown_s=60)
    end_spans(processor, "a", "b")
    processor.shutdown()
    assert exporter.batches == [["a"], ["b"]]
    assert (processor.failed, processor.exported) == (2, 0)


def test_after_the_end_spans_are_dropped_and_a_second_end_changes_nothing() -> None:
    exporter = Exporter()
    processor = BoundedSpanProcessor(exporter, shutdown_s=SHUTDOWN_S)
    processor.shutdown()
    processor.shutdown()
    end_spans(processor, "late")
    assert (processor.dropped, exporter.shut_down) == (1, 1)


def test_spans_that_are_not_sampled_are_not_exported() -> None:
    processor = BoundedSpanProcessor(Exporter(), shutdown_s=SHUTDOWN_S)
    provider = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
    provider.add_span_processor(processor)
    provider.get_tracer("test").start_span("unseen").end()
    assert processor.force_flush(0)
    processor.shutdown()
    assert processor.dropped == 0


def test_a_batch_larger_than_the_queue_is_refused() -> None:
    with pytest.raises(InvalidValue, match="max_batch"):
        BoundedSpanProcessor(Exporter(), max_queued=1, max_batch=2, shutdown_s=SHUTDOWN_S)
