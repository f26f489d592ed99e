"""A dead collector changes nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from penstock import ExecutionContext
from penstock.telemetry import OtelExport, export_to_otel, otlp_provider
from penstock.telemetry.processor import BoundedSpanProcessor
from penstock.testing import check_history

CALLS = 200


class Collector(ThreadingHTTPServer):
    """A collector on this machine that takes what it gets, or never answers."""

    daemon_threads = False

    def __init__(self, answers: bool) -> None:
        self.spans: list[Span] = []
        self.requested = threading.Event()
        self.may_answer = threading.Event()
        if answers:
            self.may_answer.set()
        super().__init__(("127.0.0.1", 0), Take)

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.spans]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1/traces"


class Take(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requested.set()
        self.server.may_answer.wait(60)
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.close_connection = True
        try:
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()
        except OSError:
            return  # the sender has left

    def log_message(self, format: str, *args: object) -> None:
        return


@contextmanager
def collector(answers: bool) -> Iterator[Collector]:
    server = Collector(answers)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.may_answer.set()
        server.shutdown()
        thread.join(60)
        server.server_close()


@contextmanager
def closed_port() -> Iterator[str]:
    """An address on which nothing listens, and nothing else can."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}/v1/traces"


def exported_run(
    endpoint: str | None, shutdown_s: float = 60.0
) -> tuple[ExecutionContext, BoundedSpanProcessor | None]:
    run = ExecutionContext()
    processor: BoundedSpanProcessor | None = None
    export: OtelExport | None = None
    provider = None
    if endpoint is not None:
        provider = otlp_provider(endpoint, timeout_s=30.0, shutdown_s=shutdown_s)
        (processor,) = provider._active_span_processor._span_processors  # type: ignore[assignment]
        export = export_to_otel(run, provider)
    with run:
        for number in range(CALLS):
            run.llm(lambda: None, name=f"call {number}", cost_hint_usd=0.001)
    if export is not None and provider is not None:
        assert export.drain(30.0)
        export._subscription._thread.join(30.0)
        provider.shutdown()
    return run, processor


def events_of(run: ExecutionContext) -> list[tuple[int, str]]:
    return [(event.seq, event.kind) for event in run.history()]


def join(processor: BoundedSpanProcessor | None) -> None:
    assert processor is not None
    assert processor._thread is not None
    processor._thread.join(60)


@pytest.mark.reliability
def test_a_collector_gets_every_span() -> None:
    with collector(answers=True) as server:
        run, processor = exported_run(server.endpoint)
        join(processor)
    assert sorted(server.names) == sorted(["invoke_workflow main"] + ["chat"] * CALLS)
    assert processor is not None
    assert (processor.exported, processor.dropped, processor.failed) == (CALLS + 1, 0, 0)
    assert check_history(run.history()) == []


@pytest.mark.reliability
def test_run_is_the_same_without_a_collector() -> None:
    alone, _ = exported_run(None)
    with closed_port() as endpoint:
        run, processor = exported_run(endpoint, shutdown_s=0.2)
        join(processor)
    assert events_of(run) == events_of(alone)
    assert check_history(run.history()) == []
    assert run.stats.total_cost == alone.stats.total_cost
    assert processor is not None
    assert processor.exported == 0
    assert processor.dropped + processor.failed == CALLS + 1


@pytest.mark.reliability
def test_with_a_collector_that_never_answers_the_run_is_the_same_and_the_end_does_not_wait() -> None:
    alone, _ = exported_run(None)
    with collector(answers=False) as server:
        run, processor = exported_run(server.endpoint, shutdown_s=0.2)
        assert server.requested.is_set()
        assert server.names == []
        assert processor is not None
        assert processor.exported == 0
        server.may_answer.set()
        join(processor)
    assert events_of(run) == events_of(alone)
    assert check_history(run.history()) == []
