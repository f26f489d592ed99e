"""What the server counts, in the text that Prometheus reads.

Labels are routes of the table, methods and statuses, so there are as many series as routes and no more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counters of one server; on its event loop alone."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, int]] = Counter()
        self.faults = 0
        self.refusals: Counter[int] = Counter()
        self.open_streams = 0
        self.streams = 0
        self._durations: dict[str, list[int]] = {}
        self._seconds: Counter[str] = Counter()

    def answered(self, route: str, method: str, status: int, took_ns: int) -> None:
        """One request is over; status 0 is one whose client left before the answer."""
        self.requests[route, method if method in METHODS else "other", status] += 1
        if 400 <= status < 500 or status == 503:
            self.refusals[status] += 1
        seconds = took_ns / 1_000_000_000
        buckets = self._durations.setdefault(route, [0] * (len(BUCKETS_S) + 1))
        buckets[next((at for at, edge in enumerate(BUCKETS_S) if seconds <= edge), len(BUCKETS_S))] += 1
        self._seconds[route] += seconds  # type: ignore[assignment]

    def text(self, host: Mapping[str, object]) -> str:
        """Everything, with the figures of the host that runs things."""
        return "\n".join([*self._http(), *self._histogram(), *_host_lines(host)]) + "\n"

    def _http(self) -> Iterator[str]:
        rows = (
            ({"route": route, "method": method, "status": str(status)}, count)
            for (route, method, status), count in sorted(self.requests.items())
        )
        yield from _series("penstock_http_requests_total", "counter", "Requests by route and status", rows)
        refused = (({"status": str(status)}, count) for status, count in sorted(self.refusals.items()))
        yield from _series("penstock_http_refusals_total", "counter", "Requests that were refused", refused)
        yield from _series(
            "penstock_http_faults_total", "counter", "Requests the server failed at", [({}, self.faults)]
        )
        yield from _series("penstock_sse_streams_total", "counter", "Streams that were opened", [({}, self.streams)])
        yield from _series("penstock_sse_open_streams", "gauge", "Streams that are open", [({}, self.open_streams)])

    def _histogram(self) -> Iterator[str]:
        name = "penstock_http_request_seconds"
        yield from (f"# HELP {name} How long requests took", f"# TYPE {name} histogram")
        for route, buckets in sorted(self._durations.items()):
            for edge, count in zip((*BUCKETS_S, "+Inf"), accumulate(buckets), strict=True):
                yield f"{name}_bucket{_labels({'route': route, 'le': str(edge)})} {count}"
            yield f"{name}_sum{_labels({'route': route})} {self._seconds[route]:.6f}"
            yield f"{name}_count{_labels({'route': route})} {sum(buckets)}"


def _host_lines(host: Mapping[str, object]) -> Iterator[str]:
    """The host's own figures: `totals` are counters by what they count, every other number is a gauge."""
    for name, value in sorted(host.items()):
        if isinstance(value, Mapping):
            rows = [({"of": str(key)}, one) for key, one in sorted(value.items()) if _is_number(one)]
            kind, suffix = ("counter", "total") if name == "totals" else ("gauge", name)
            yield from _series(f"penstock_host_{suffix}", kind, f"The host's {name}", rows)
        elif _is_number(value):
            yield from _series(f"penstock_host_{name}", "gauge", f"The host's {name}", [({}, value)])


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _series(name: str, kind: str, what: str, rows: Iterable[tuple[Mapping[str, str], object]]) -> Iterator[str]:
    yield f"# HELP {name} {what}"
    yield f"# TYPE {name} {kind}"
    for labels, value in rows:
        yield f"{name}{_labels(labels)} {value}"


def _labels(labels: Mapping[str, str]) -> str:
    inside = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{inside}}}" if inside else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
