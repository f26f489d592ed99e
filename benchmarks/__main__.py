"""Asks every question in turn: `python -m benchmarks [--quick] [--json FILE]`."""

from __future__ import annotations

from benchmarks import _report, agents, cancel, door, graphs, growth, imports, snapshot, telemetry

if __name__ == "__main__":
    _report.main(door.ask, growth.ask, *graphs.ASKS, agents.ask, snapshot.ask, cancel.ask, telemetry.ask, imports.ask)
