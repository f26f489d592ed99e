"""The server's columns of the recorded runs that the UI's model is tested with, at several of their events."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from penstock.hosting.call_columns import CallColumns
from penstock.hosting.event_data import STATUS_OF
from penstock.hosting.ports import HostedEvent

FOLDER = Path(__file__).parents[2] / "ui" / "src" / "test"
RUNS = ("completed", "halted-then-granted", "waiting", "whole-tree-halted")
CHANGED = {"run.started": "running", "run.resumed": "running", "run.waiting": "waiting", "run.granted": "queued"}
STEPS = 8
"""Number of places at which the columns of a run are written."""


def columns_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tree of a run as the server has it after a part of its events, for several parts."""
    tree, trees, status = CallColumns(), [], "queued"
    places = {len(events) * step // STEPS for step in range(1, STEPS + 1)}
    for event in events:
        tree.add([HostedEvent(event["seq"], event["at_ms"], event["type"], event["data"])])
        status = STATUS_OF.get(event["type"], CHANGED.get(event["type"], status))
        if event["seq"] in places and tree.epoch:
            trees.append({"run_id": "recorded", "status": status, **tree.to_dict()})
    return trees


def test_the_recorded_columns_are_those_of_the_recorded_events() -> None:
    runs = {name: json.loads((FOLDER / f"{name}.json").read_text("utf-8")) for name in RUNS}
    trees = {name: columns_of(run["events"]) for name, run in runs.items()}
    written = FOLDER / "trees.json"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        written.write_text(json.dumps(trees, separators=(",", ":")) + "\n", "utf-8")
    assert json.loads(written.read_text("utf-8")) == trees
