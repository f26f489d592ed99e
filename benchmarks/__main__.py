"""Asks every question in turn: `python -m benchmarks [--quick] [--json FILE]`."""

from __future__ import annotations

from benchmarks import (
    _report,
    agents,
    cancel,
    door,
    engines,
    graphs,
    growth,
    hooks,
    imports,
    service,
    snapshot,
    telemetry,
)

if __name__ == "__main__":
    questions = (agents.ask, snapshot.ask, cancel.ask, telemetry.ask, hooks.ask, service.ask, engines.ask, imports.ask)
    _report.main(door.ask, growth.ask, *graphs.ASKS, *questions)
