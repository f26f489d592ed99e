"""Workers as processes, as operators start them: frozen, killed and stopped in order."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import pytest

from tests.engines.fleet import Fleet, fleet_of
from tests.engines.temporal_server import TemporalServer, temporal_server
from tests.hosting.graphs import graph
from tests.storage.postgres import postgres_server, postgres_url

__all__ = ["postgres_server", "postgres_url", "temporal_server"]

NODES = """
import asyncio, os
from pathlib import Path
from penstock.kernel.executor import ExecutionResult, Handle

FOLDER = Path(os.environ["FOLDER"])

class Logged:
    inputs, outputs = (Handle("input"),), (Handle("output"),)

    def __init__(self, name):
        self.name = name

    async def execute(self, data, inputs, context):
        run = context.services["run"]["id"]
        with (FOLDER / f"{run}.log").open("a") as log:
            log.write(f"{self.name} {os.getpid()}\\n")
        while self.name == "hold" and not (FOLDER / f"{run}.go").exists():
            await asyncio.sleep(0.02)
        return ExecutionResult({"output": inputs["input"]})

NODES = {"once": Logged("once"), "hold": Logged("hold")}

# Runs that wait for an answer leave their worker at once, not after a minute.
from dataclasses import replace
from penstock.cli.service import worker_command

usual = worker_command.host_settings_of
worker_command.host_settings_of = lambda arguments: replace(usual(arguments), park_waiting_s=0.1)
"""
GRAPH = graph(
    ("in", "input", {}),
    ("once", "once", {}),
    ("hold", "hold", {}),
    ("out", "output", {}),
    edges="in>once once>hold hold>out",
)
APPROVED = graph(
    ("in", "input", {}),
    ("once", "once", {}),
    ("ask", "approval", {"question": "May it go?"}),
    ("hold", "hold", {}),
    ("out", "output", {}),
    edges="in>once once>ask ask.approved>hold hold>out",
)


Workers = dict[int, subprocess.Popen[str]]


@contextmanager
def workers(fleet: Fleet, folder: Path, count: int) -> Iterator[Workers]:
    """Start worker processes; by process id."""
    (folder / "logged_nodes.py").write_text(NODES)
    command = [sys.executable, "-m", "penstock.cli", "worker", "--db", fleet.url, "--engine", str(fleet.temporal)]
    command += ["--queue", fleet.queue, "--executors", "logged_nodes:NODES", "--lease", "2", "--drain", "0"]
    environ = {**os.environ, "FOLDER": str(folder), "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    started = [
        subprocess.Popen(command, env=environ, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(count)
    ]
    try:
        yield {process.pid: process for process in started}
    finally:
        for process in started:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def lines(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


async def logged(log: Path, times: int, processes: Workers) -> list[tuple[str, int]]:
    """The lines of a run's log, once it has so many."""
    while len(found := lines(log)) < times:
        assert any(process.poll() is None for process in processes.values()), "no worker is left to write it"
        await asyncio.sleep(0.02)
    return [(name, int(pid)) for name, pid in (line.split() for line in found)]


@pytest.mark.timeout(300)  # two processes start, and two heartbeats time out
@pytest.mark.requirement("X-4")
async def test_a_frozen_worker_and_a_killed_one_are_replaced_and_disturb_nothing(
    postgres_url: str, temporal_server: TemporalServer, tmp_path: Path
) -> None:
    async with fleet_of(postgres_url, temporal_server.url()) as fleet:
        front = fleet.front
        await fleet.stores.graphs.save("held", "ann", "held", GRAPH, now_ms=0)
        with workers(fleet, tmp_path, 2) as processes:
            await front.submit(owner="ann", graph_id="held", run_id="frozen", input="x")
            (_, (_, frozen)) = await logged(tmp_path / "frozen.log", 2, processes)
            os.kill(frozen, signal.SIGSTOP)
            (once, _, (_, second)) = await logged(tmp_path / "frozen.log", 3, processes)
            (tmp_path / "frozen.go").touch()
            left = await front.wait("frozen")
            assert (left.status, left.output, left.epoch) == ("completed", "x", 2)
            assert once == ("once", frozen) != ("once", second)
            events = await fleet.stores.events.read("frozen")
            os.kill(frozen, signal.SIGCONT)

            await front.submit(owner="ann", graph_id="held", run_id="killed", input="y")
            (_, (_, killed)) = await logged(tmp_path / "killed.log", 2, processes)
            processes[killed].kill()
            (_, _, (_, other)) = await logged(tmp_path / "killed.log", 3, processes)
            assert other in processes.keys() - {killed}
            (tmp_path / "killed.go").touch()
            left = await front.wait("killed")
            assert (left.status, left.output, left.epoch, left.crash_count) == ("completed", "y", 2, 1)

            assert await fleet.stores.events.read("frozen") == events, "the thawed worker has written nothing"
            processes[other].send_signal(signal.SIGTERM)
            code = await asyncio.to_thread(processes[other].wait)
            output = (processes[other].stdout or StringIO()).read()
    assert (code, output.splitlines()[-1]) == (0, "stopped"), output
    assert f"queues {fleet.queue}" in output


@pytest.mark.timeout(300)
@pytest.mark.requirement("X-4")
async def test_a_parked_run_is_continued_after_every_process_that_had_its_workflow_was_killed(
    postgres_url: str, temporal_server: TemporalServer, tmp_path: Path
) -> None:
    async with fleet_of(postgres_url, temporal_server.url()) as fleet:
        await fleet.stores.graphs.save("approved", "ann", "approved", APPROVED, now_ms=0)
        with workers(fleet, tmp_path, 2) as processes:
            await fleet.front.submit(owner="ann", graph_id="approved", run_id="r", input="x")
            await fleet.until("r", "parked")
            first = await logged(tmp_path / "r.log", 1, processes)
            for process in processes.values():
                process.kill()
        (tmp_path / "r.go").touch()
        (approval,) = await fleet.stores.approvals.list(run_id="r")
        await fleet.front.answer(approval.id, "approved", by="bob")  # while no worker is there
        with workers(fleet, tmp_path, 1) as processes:
            left = await fleet.front.wait("r")
            assert (left.status, left.output, left.epoch, left.crash_count) == ("completed", "x", 2, 0)
            (again, (name, pid)) = await logged(tmp_path / "r.log", 2, processes)
            assert ([again], name, pid in processes) == (first, "hold", True), "what was recorded has not run again"


def test_the_example_of_a_fleet_runs_and_repeats_no_model_call(
    temporal_server: TemporalServer, postgres_url: str
) -> None:
    program = Path(__file__).parents[2] / "examples" / "temporal_fleet.py"
    command = [sys.executable, str(program), "--db", postgres_url, "--engine", temporal_server.url()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "drafts     6 model calls for 6 drafts" in ended.stdout
