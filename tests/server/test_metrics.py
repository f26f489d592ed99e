"""What is counted, as Prometheus reads it."""

from __future__ import annotations

import re

from penstock.server.metrics import Metrics
from tests.server.served import ECHO, served

LINE = re.compile(r'[a-z_]+(\{([a-z]+="([^"\\\n]|\\.)*",?)+\})? -?[0-9.e+-]+')


def test_the_text_has_the_form_that_is_read() -> None:
    metrics = Metrics()
    metrics.answered("/api/runs", "GET", 200, 7_000_000)
    metrics.answered("/api/runs", "GET", 200, 20_000_000_000)
    metrics.answered('odd "route"\n\\', "BREW", 429, 0)
    lines = metrics.text({"running": 2, "totals": {"completed": 5}, "worker": "me", "ready": True}).splitlines()
    assert [line for line in lines if not line.startswith("# ") and not LINE.fullmatch(line)] == []
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
