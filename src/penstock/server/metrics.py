"""The server's counters, in Prometheus text format.

Labels are routes of the access table, methods and statuses, and a bounded number of graphs and models, so the number of
series is bounded. A total of the host has a metric name of its own, in base units, if `FIGURES` lists it; any other
total is labelled with its key.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

from penstock.hosting import ports
from penstock.hosting.figures import RunFigures

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
NAME = re.compile(r"[a-z_][a-z0-9_]*")

Labels = Mapping[str, str]
Row = tuple[Labels, object]
NO_LABELS: Labels = MappingProxyType({})


class Figure(NamedTuple):
    """A total of the host as a metric: its name, its labels, and how many counts make one unit."""

    metric: str
    labels: Labels = NO_LABELS
    per_unit: int = 1


COST, TOKENS, EVENTS = "penstock_runs_cost_usd_total", "penstock_runs_tokens_total", "penstock_events_stored_total"
UNKNOWN = "penstock_runs_unknown_costs_total"
ENDED, SECONDS = "penstock_runs_ended_total", "penstock_run_seconds"
FIGURES: Mapping[str, Figure] = {
    "cost_nanos": Figure(COST, per_unit=1_000_000_000),
    "unknown_costs": Figure(UNKNOWN),
    "tokens_in": Figure(TOKENS, {"direction": "input"}),
    "tokens_out": Figure(TOKENS, {"direction": "output"}),
    "events_stored": Figure(EVENTS),
}
"""Metrics by key of the host's totals."""
ENDED_KEY = "ended:"
"""Prefix of totals by status and stop reason, such as `ended:halted:budget_exceeded`."""
TOOK_KEY = "took_ms"
"""Key of the total duration of all ended runs, each from its first start."""
HELP: Mapping[str, str] = {
    COST: "Cost of the runs of this host in US dollars",
    UNKNOWN: "Calls of the runs of this host whose cost is unknown and missing from the cost",
    TOKENS: "Tokens used by the runs of this host",
    EVENTS: "Run events stored by this host",
    ENDED: "Runs ended on this host, by status and stop reason",
    SECONDS: "Duration of runs from their first start to their end, including waits for people",
}

HOST_HELP: Mapping[str, str] = {
    "running": "Runs that this host is working on",
    "waiting": "Runs on this host that wait for a person",
    "queued": "Runs waiting for a slot",
    "runs": "Runs in the store, by status",
    "unreadable_rows": "Stored rows that cannot be decoded, by table",
}
"""Help texts of the host's gauges."""


DIRECTIONS = (("tokens_in", {"direction": "input"}), ("tokens_out", {"direction": "output"}))
LABELLED: Mapping[str, Sequence[tuple[str, str, Sequence[tuple[str, Labels]], int]]] = {
    "graph": (
        (
            "penstock_graph_runs_total",
            "Runs ended, by graph and status",
            [(one, {"status": one}) for one in sorted(ports.ENDED)],
            1,
        ),
        ("penstock_graph_run_seconds_total", "Total duration of ended runs", [("took_ms", NO_LABELS)], 1_000),
        ("penstock_graph_cost_usd_total", "Cost of runs in US dollars", [("cost_nanos", NO_LABELS)], 1_000_000_000),
        ("penstock_graph_tokens_total", "Tokens used by runs", DIRECTIONS, 1),
    ),
    "model": (
        ("penstock_model_calls_total", "Model calls that have ended", [("calls", NO_LABELS)], 1),
        ("penstock_model_failures_total", "Model calls that failed or were stopped", [("failed", NO_LABELS)], 1),
        ("penstock_model_call_seconds_total", "Total duration of model calls", [("took_us", NO_LABELS)], 1_000_000),
        ("penstock_model_cost_usd_total", "Cost of calls in US dollars", [("cost_nanos", NO_LABELS)], 1_000_000_000),
        ("penstock_model_tokens_total", "Tokens used by model calls", DIRECTIONS, 1),
        ("penstock_model_unknown_costs_total", "Calls of unknown cost", [("unknown_costs", NO_LABELS)], 1),
    ),
}
"""Metrics by graph and by model: name, help, counters with their labels, and how many counts make one unit."""


class Metrics:
    """Counters of one server; used on its event loop only."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, int]] = Counter()
        self.faults = 0
        self.refusals: Counter[int] = Counter()
        self.open_streams = 0
        self.streams = 0
        self._durations: dict[str, list[int]] = {}
        self._seconds: Counter[str] = Counter()

    def count_request(self, route: str, method: str, status: int, took_ns: int) -> None:
        """Count a finished request; status 0 means that the client disconnected before the response."""
        self.requests[route, method if method in METHODS else "other", status] += 1
        if 400 <= status < 500 or status == 503:
            self.refusals[status] += 1
        seconds = took_ns / 1_000_000_000
        buckets = self._durations.setdefault(route, [0] * (len(BUCKETS_S) + 1))
        buckets[next((at for at, edge in enumerate(BUCKETS_S) if seconds <= edge), len(BUCKETS_S))] += 1
        self._seconds[route] += seconds  # type: ignore[assignment]

    def text(self, host: Mapping[str, object], runs: RunFigures | None = None) -> str:
        """Render all metrics, together with the figures of the host, and of its runs by graph and model."""
        labelled = _labelled(runs or RunFigures())
        return "\n".join([*self._http(), *self._histogram(), *_host_lines(host), *labelled]) + "\n"

    def _http(self) -> Iterator[str]:
        rows = (
            ({"route": route, "method": method, "status": str(status)}, count)
            for (route, method, status), count in sorted(self.requests.items())
        )
        yield from _series("penstock_http_requests_total", "counter", "Requests by route and status", rows)
        refused = (({"status": str(status)}, count) for status, count in sorted(self.refusals.items()))
        yield from _series("penstock_http_refusals_total", "counter", "Requests refused with 4xx or 503", refused)
        yield from _series(
            "penstock_http_faults_total",
            "counter",
            "Requests that failed with an unexpected error",
            [({}, self.faults)],
        )
        yield from _series("penstock_sse_streams_total", "counter", "Streams opened", [({}, self.streams)])
        yield from _series("penstock_sse_open_streams", "gauge", "Streams currently open", [({}, self.open_streams)])

    def _histogram(self) -> Iterator[str]:
        name = "penstock_http_request_seconds"
        yield from (f"# HELP {name} Duration of requests", f"# TYPE {name} histogram")
        for route, buckets in sorted(self._durations.items()):
            for edge, count in zip((*BUCKETS_S, "+Inf"), accumulate(buckets), strict=True):
                yield f"{name}_bucket{_labels({'route': route, 'le': str(edge)})} {count}"
            yield f"{name}_sum{_labels({'route': route})} {self._seconds[route]:.6f}"
            yield f"{name}_count{_labels({'route': route})} {sum(buckets)}"


def _host_lines(host: Mapping[str, object]) -> Iterator[str]:
    """Render the host's figures: `totals` as counters, every other number as a gauge."""
    for name, value in sorted(host.items()):
        if isinstance(value, Mapping):
            numbers = {str(key): number for key, number in sorted(value.items()) if _is_number(number)}
            yield from _totals(numbers) if name == "totals" else _by_key(name, "gauge", _help(name), numbers)
        elif _is_number(value):
            yield from _series(f"penstock_host_{name}", "gauge", _help(name), [({}, value)])


def _help(name: str) -> str:
    return HOST_HELP.get(name, f"Current value of {name} on this host")


def _by_key(name: str, kind: str, what: str, numbers: Mapping[str, object]) -> Iterator[str]:
    yield from _series(f"penstock_host_{name}", kind, what, [({"of": key}, number) for key, number in numbers.items()])


def _totals(totals: Mapping[str, float]) -> Iterator[str]:
    """Render the host's totals: named metrics, ended runs by status and reason, and the rest by key."""
    metrics: dict[str, list[Row]] = {}
    rest: dict[str, float] = {}
    for key, count in totals.items():
        if key in FIGURES:
            metric, labels, per_unit = FIGURES[key]
            metrics.setdefault(metric, []).append((labels, _in_units(count, per_unit)))
        elif key.startswith(ENDED_KEY):
            status, _, reason = key.removeprefix(ENDED_KEY).partition(":")
            metrics.setdefault(ENDED, []).append(({"status": status, "stop_reason": reason}, count))
        elif key != TOOK_KEY:
            rest[key] = count
    for metric, rows in sorted(metrics.items()):
        yield from _series(metric, "counter", HELP[metric], rows)
    if TOOK_KEY in totals:
        ended = sum(count for key, count in totals.items() if key.startswith(ENDED_KEY))
        yield from (f"# HELP {SECONDS} {HELP[SECONDS]}", f"# TYPE {SECONDS} summary")
        yield from (f"{SECONDS}_sum {_in_units(totals[TOOK_KEY], 1_000)}", f"{SECONDS}_count {ended}")
    yield from _by_key("total", "counter", "Other totals of this host, by key", rest)


def _labelled(runs: RunFigures) -> Iterator[str]:
    """Render the figures by graph and by model; both have a bounded number of names."""
    for family, figures in (("graph", runs.by_graph), ("model", runs.by_model)):
        found = list(figures.items())
        for name, what, columns, per_unit in LABELLED[family]:
            rows = [
                ({family: label, **labels}, _in_units(counts.get(key, 0), per_unit))
                for label, counts in found
                for key, labels in columns
                if counts.get(key, 0) or not labels
            ]
            yield from _series(name, "counter", what, rows)


def _in_units(count: float, per_unit: int) -> object:
    """Convert a count to base units, exactly."""
    return count if per_unit == 1 else format(Decimal(str(count)) / per_unit, "f")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _series(name: str, kind: str, what: str, rows: Iterable[Row]) -> Iterator[str]:
    if NAME.fullmatch(name) is None:  # an invalid name would make the whole text unreadable
        return
    yield f"# HELP {name} {what}"
    yield f"# TYPE {name} {kind}"
    for labels, value in rows:
        yield f"{name}{_labels(labels)} {value}"


def _labels(labels: Labels) -> str:
    inside = ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())
    return f"{{{inside}}}" if inside else ""


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
