"""A host in a process of its own, for tests that stop or kill it: `python worker_program.py FOLDER`.

It works on one run whose node says `entered` and goes on when the file `go` is there, and then says what it counted.
"""

# ruff: noqa: ASYNC110, T201  (a file gives it orders, and it polls for that)

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.hosting.host import HostSettings, RunHost
from penstock.kernel.executor import DataValue, ExecutionResult, Handle
from penstock.nodes import executors
from penstock.runtime.graphs.graph_runtime import FlowContext
from penstock.storage.stores import open_stores

SETTINGS = HostSettings(lease_s=1, tick_s=0.1, drain_s=0)


class UntilTold:
    """Says that it was entered, and waits for a file."""

    inputs = (Handle("input"),)
    outputs = (Handle("output"),)

    def __init__(self, go: Path) -> None:
        self._go = go

    async def execute(
        self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext
    ) -> ExecutionResult:
        print("entered", flush=True)
        while not self._go.exists():
            await asyncio.sleep(0.01)
        return ExecutionResult({"output": inputs["input"]})


async def work(folder: Path) -> None:
    async with await open_stores(str(folder / "runs.db")) as stores:
        gate = UntilTold(folder / "go")
        async with RunHost(stores, executors={**executors(), "gate": gate}, settings=SETTINGS, worker="child") as host:
            while not host.stats()["totals"].get("claimed"):
                await asyncio.sleep(0.01)
            while host.stats()["running"]:
                await asyncio.sleep(0.01)
            print(json.dumps(host.stats()["totals"]), flush=True)


if __name__ == "__main__":
    asyncio.run(work(Path(sys.argv[1])))
