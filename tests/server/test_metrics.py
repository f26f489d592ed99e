"""What is counted, as Prometheus reads it."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from penstock.agents.scripted import ScriptedModel
from penstock.cli.app import invoke
from penstock.hosting.figures import MAX_LABELS, OTHER, RunFigures
from penstock.runtime.billing.usage import Usage
from penstock.server.metrics import Metrics
from penstock.testing.clock import ManualClock
from tests.hosting.graphs import graph
from tests.server.served import ECHO, served

COMMENT = re.compile(r"# (HELP|TYPE) ([a-zA-Z_:][a-zA-Z0-9_:]*) (.+)")
SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(?:,|$)')
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}

Labels = frozenset[tuple[str, str]]


@dataclass
class Family:
    """One metric, as a scraper takes it."""

    kind: str
    what: str
    samples: dict[tuple[str, Labels], float] = field(default_factory=dict)


def parsed(text: str) -> Mapping[str, Family]:
    """The text as strictly as its format is written down: whatever is out of order is an assertion."""
    assert text.endswith("\n")
    families: dict[str, Family] = {}
    help_of: dict[str, str] = {}
    name = ""
    for line in text.removesuffix("\n").split("\n"):
        if comment := COMMENT.fullmatch(line):
            what, name, rest = comment.groups()
            if what == "HELP":
                assert name not in help_of, f"{name} is described twice"
                help_of[name] = rest
            else:
                assert name in help_of, f"{name} is not described"
                assert name not in families, f"{name} comes twice"
                assert rest in {"counter", "gauge", "histogram", "summary"}
                families[name] = Family(rest, help_of[name])
            continue
        sample = SAMPLE.fullmatch(line)
        assert sample, line
        _add(families[name], name, *sample.groups())
    for name, family in families.items():
        _check(name, family)
    return families


def _add(family: Family, name: str, sample: str, labels: str | None, value: str) -> None:
    allowed = [name + suffix for suffix in SUFFIXES.get(family.kind, ("",))]
    assert sample in allowed, f"{sample} stands among {name}"
    found = LABEL.findall(labels or "")
    assert "".join(f'{key}="{inside}",' for key, inside in found).rstrip(",") == (labels or ""), labels
    assert len({key for key, _ in found}) == len(found)
    key = (sample, frozenset(found))
    assert key not in family.samples, f"{key} comes twice"
    family.samples[key] = float(value)


def _check(name: str, family: Family) -> None:
    if family.kind == "counter":
        assert name.endswith("_total"), name
        assert all(value >= 0 for value in family.samples.values())
    if family.kind == "histogram":
        for (sample, labels), count in family.samples.items():
            if sample == f"{name}_count":
                edges = {
                    float(dict(one)["le"]): value
                    for (which, one), value in family.samples.items()
                    if which == f"{name}_bucket" and labels < one
                }
                assert edges[float("inf")] == count
                assert all(less <= more for less, more in pairwise(edges[edge] for edge in sorted(edges)))


def value(families: Mapping[str, Family], name: str, **labels: str) -> float:
    family = next(one for key, one in families.items() if name in (key, f"{key}_sum", f"{key}_count", f"{key}_bucket"))
    return family.samples[name, frozenset(labels.items())]


def test_the_text_is_valid_prometheus_format() -> None:
    metrics = Metrics()
    metrics.count_request("/api/runs", "GET", 200, 7_000_000)
    metrics.count_request("/api/runs", "GET", 200, 20_000_000_000)
    metrics.count_request('odd "route"\n\\', "BREW", 429, 0)
    text = metrics.text({"running": 2, "totals": {"completed": 5}, "worker": "me", "ready": True})
    assert parsed(text)
    lines = text.splitlines()
    assert 'penstock_http_requests_total{route="/api/runs",method="GET",status="200"} 2' in lines
    assert 'penstock_http_request_seconds_bucket{route="/api/runs",le="0.01"} 1' in lines
    assert 'penstock_http_request_seconds_bucket{route="/api/runs",le="+Inf"} 2' in lines
    assert 'penstock_http_request_seconds_count{route="/api/runs"} 2' in lines
    assert 'penstock_http_refusals_total{status="429"} 1' in lines
    assert "penstock_host_running 2" in lines
    assert 'penstock_host_total{of="completed"} 5' in lines
    assert not any("me" in line.split()[-1] for line in lines if line.startswith("penstock_host"))


async def test_a_server_counts_by_route_and_not_by_path() -> None:
    async with served() as server, server.client("root") as root:
        await server.save("echo", ECHO)
        run = (await root.post("/api/runs", json={"graph_id": "echo"})).json()
        await server.host.wait(run["id"])
        for at in range(3):
            await root.get(f"/api/runs/none-{at}")
            await root.get(f"/nowhere/{at}")
        text = (await root.get("/metrics")).text
        assert 'penstock_http_requests_total{route="/api/runs/{run_id}",method="GET",status="404"} 3' in text
        assert 'penstock_http_requests_total{route="other",method="GET",status="404"} 3' in text
        assert 'penstock_host_total{of="completed"} 1' in text
        assert 'penstock_host_runs{of="completed"} 1' in text
        assert 'penstock_host_runs{of="parked"} 0' in text
        assert "none-0" not in text


TOTALS = {
    "submitted": 9,
    "completed": 3,
    "cost_nanos": 1_250_000_001,
    "tokens_in": 70,
    "tokens_out": 30,
    "events_stored": 123,
    "ended:completed:": 3,
    "ended:halted:budget_exceeded": 2,
    "ended:cancelled:aborted": 1,
    "took_ms": 12_345,
}


def test_host_totals_have_named_metrics_in_base_units() -> None:
    families = parsed(Metrics().text({"totals": TOTALS}))
    assert "penstock_runs_cost_usd_total 1.250000001" in Metrics().text({"totals": TOTALS})
    assert value(families, "penstock_runs_tokens_total", direction="input") == 70
    assert value(families, "penstock_runs_tokens_total", direction="output") == 30
    assert value(families, "penstock_events_stored_total") == 123
    assert value(families, "penstock_runs_ended_total", status="completed", stop_reason="") == 3
    assert value(families, "penstock_runs_ended_total", status="halted", stop_reason="budget_exceeded") == 2
    assert value(families, "penstock_run_seconds_sum") == 12.345
    assert value(families, "penstock_run_seconds_count") == 6
    assert families["penstock_run_seconds"].kind == "summary"
    shown = {dict(labels)["of"] for _, labels in families["penstock_host_total"].samples}
    assert shown == {"submitted", "completed"}, "what has a name of its own is not shown twice"


SPENDING = graph(("in", "input", {}), ("read", "llm-completion", {"model": "m"}), edges="in>read")


@pytest.mark.requirement("X-15")
async def test_runs_are_counted_by_graph_and_calls_by_model() -> None:
    usage = Usage.of(cost_usd="0.25", input_tokens=3, output_tokens=2)
    model = ScriptedModel(["fine", ValueError("broken")], name="gpt-x", usage=usage)
    async with served(models={"m": model}) as server, server.client("root") as root:
        await server.save("reader", SPENDING)
        await server.save("echo", ECHO)
        for graph_id in ("reader", "reader", "echo"):
            run = (await root.post("/api/runs", json={"graph_id": graph_id, "input": "x"})).json()
            await server.host.wait(run["id"])
            await root.get(f"/api/runs/{run['id']}")
        families = parsed((await root.get("/metrics")).text)
    assert value(families, "penstock_graph_runs_total", graph="reader", status="completed") == 1
    assert value(families, "penstock_graph_runs_total", graph="reader", status="failed") == 1
    assert value(families, "penstock_graph_runs_total", graph="echo", status="completed") == 1
    assert value(families, "penstock_graph_cost_usd_total", graph="reader") == 0.25
    assert value(families, "penstock_graph_tokens_total", graph="reader", direction="input") == 3
    assert value(families, "penstock_model_calls_total", model="gpt-x") == 2
    assert value(families, "penstock_model_failures_total", model="gpt-x") == 1
    assert value(families, "penstock_model_cost_usd_total", model="gpt-x") == 0.25
    assert value(families, "penstock_model_tokens_total", model="gpt-x", direction="output") == 2


HOSTILE = (
    'x"} 1\npenstock_runs_cost_usd_total 1e9\n#',
    "a\\",
    "\x1b[31mred",
    "\u202egnp.exe",
    "\u2028\r\x85",
    "\ud800",
    "",
    "x" * 5_000,
)


@pytest.mark.requirement("X-15")
def test_names_of_graphs_and_models_cannot_break_the_metrics_or_grow_without_end() -> None:
    runs = RunFigures()
    for name in (*HOSTILE, *(f"model {number}" for number in range(500))):
        runs.by_model.add(name, {"calls": 1})
        runs.by_graph.add(name, {"completed": 1, "cost_nanos": 5})
    text = Metrics().text({}, runs)
    families = parsed(text)
    text.encode("utf-8")
    assert "penstock_runs_cost_usd_total" not in families
    calls = families["penstock_model_calls_total"].samples
    assert len(calls) == MAX_LABELS + 1
    assert sum(calls.values()) == len(HOSTILE) + 500
    assert value(families, "penstock_model_calls_total", model=OTHER) == len(HOSTILE) + 500 - MAX_LABELS
    assert all(char.isprintable() or char == "\n" for char in text)


async def test_scraping_ten_times_a_second_counts_runs_once_in_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    async with served(clock=clock) as server, server.client("root") as root:
        count, counted = server.stores.runs.count, 0

        async def counting(**given: Any) -> int:
            nonlocal counted
            counted += given.get("owner") is None and given.get("statuses") == ("completed",)
            return await count(**given)

        monkeypatch.setattr(server.stores.runs, "count", counting)
        for _ in range(100):
            assert (await root.get("/metrics")).status_code == 200
            clock.advance(0.1)
        assert counted == 2


@pytest.mark.requirement("X-15")
async def test_the_dashboard_names_only_metrics_that_exist(penstock_dashboard: dict[str, Any]) -> None:
    usage = Usage.of(cost_usd="0.25", input_tokens=3, output_tokens=2)
    async with (
        served(models={"m": ScriptedModel(["fine"], usage=usage)}) as server,
        server.client("root") as root,
    ):
        await server.save("reader", SPENDING)
        run = (await root.post("/api/runs", json={"graph_id": "reader", "input": "x"})).json()
        await server.host.wait(run["id"])
        families = parsed((await root.get("/metrics")).text)
    exposed = {name: {key for _, labels in one.samples for key, _ in labels} for name, one in families.items()}
    queries = [target["expr"] for panel in penstock_dashboard["panels"] for target in panel.get("targets", ())]
    assert len(queries) > 20
    for query in queries:
        names = re.findall(r"penstock_\w+", query)
        assert names
        grouped = {label for found in re.findall(r"by \(([^)]*)\)", query) for label in found.split(", ")}
        for name in names:
            family = name.removesuffix("_bucket")
            assert family in exposed, query
            assert not exposed[family] or grouped <= exposed[family] | {"le"}, query


@pytest.fixture
def penstock_dashboard() -> dict[str, Any]:
    """The dashboard as `penstock grafana` prints it."""
    out = io.StringIO()
    with redirect_stdout(out):
        assert invoke(["grafana"]) == 0
    dashboard: dict[str, Any] = json.loads(out.getvalue())
    return dashboard


def test_unknown_totals_are_labelled_and_break_nothing() -> None:
    odd = {"totals": {'a "b"\n\\': 1, "ended:": 1, "ended:x": 2, "half": 0.5}, "odd name\n": 3, "load": {"x": 1}}
    families = parsed(Metrics().text(odd))
    assert value(families, "penstock_host_total", of='a \\"b\\"\\n\\\\') == 1
    assert value(families, "penstock_host_total", of="half") == 0.5
    assert value(families, "penstock_runs_ended_total", status="x", stop_reason="") == 2
    assert value(families, "penstock_host_load", of="x") == 1
    assert not any("odd" in name for name in families)


def test_nothing_is_rendered_before_anything_is_counted() -> None:
    families = parsed(Metrics().text({"totals": {}}))
    assert not [name for name in families if name.startswith(("penstock_run", "penstock_events"))]


async def test_a_scraper_can_read_the_metrics_of_a_server() -> None:
    async with served() as server, server.client("root") as root:
        await server.save("echo", ECHO)
        for text in ("x", "y"):
            run = (await root.post("/api/runs", json={"graph_id": "echo", "input": text})).json()
            await server.host.wait(run["id"])
        answer = await root.get("/metrics")
        families = parsed(answer.text)
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert value(families, "penstock_host_runs", of="completed") == 2
        assert value(families, "penstock_host_total", of="submitted") == 2
