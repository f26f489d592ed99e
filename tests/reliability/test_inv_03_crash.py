"""INV 3: kill -9 anywhere: the run resumes, nothing recorded runs again, nothing is lost, nothing ends wrongly.

Children of a fork server run a graph with parallel branches, agents with tools, an agent inside an agent, a map and a
loop on a journal and a shared budget. They are killed at every failpoint, the first time they pass it and later ones;
then the next child resumes the run, until one completes it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.testing.crash_points import POINTS
from tests.reliability.fork_server import ForkServer
from tests.reliability.killed_runs import KilledRun
from tests.storage.postgres import postgres_schemas, postgres_server  # noqa: F401

pytestmark = pytest.mark.reliability


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer("tests.reliability.crash_driver")
    yield server
    server.close()


@pytest.fixture(scope="module")
def uninterrupted(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcome of the run when its process is not killed."""
    folder = tmp_path_factory.mktemp("whole")
    run = KilledRun(server, str(folder / "run.db"), folder / "log")
    assert run.work() == 0
    outcome = run.outcome()
    assert outcome["committed"] >= run.invoice > 0
    return outcome


@pytest.fixture(params=["sqlite", "postgresql"])
def run(request: pytest.FixtureRequest, server: ForkServer, tmp_path: Path) -> KilledRun:
    """A run in a new database."""
    url = str(tmp_path / "run.db") if request.param == "sqlite" else request.getfixturevalue("postgres_schemas")()
    return KilledRun(server, url, tmp_path / "log")


ON_THE_WAY = [point for point in POINTS if not point.startswith(("fork", "node.replayed"))]
KILLS = [("sqlite", point, number) for point in ON_THE_WAY for number in (1, 6)]
KILLS += [("postgresql", point, 1) for point in ON_THE_WAY]
"""The database, the failpoint, and which passing of it kills. A database server takes its time for each process."""


@pytest.mark.parametrize(("run", "point", "number"), KILLS, indirect=["run"])
def test_a_run_killed_at_a_failpoint_resumes(
    point: str, number: int, run: KilledRun, uninterrupted: dict[str, Any]
) -> None:
    for kills in range(3):
        if run.work(crash_at=f"{point}:{number}") == 0:
            assert kills or number > 1, f"the run does not pass {point}"
            break
    else:
        run.finish()
    assert run.violations(uninterrupted) == []


def test_a_run_killed_during_replay_resumes(run: KilledRun, uninterrupted: dict[str, Any]) -> None:
    assert run.work(crash_at="node.after_append:12") == -signal.SIGKILL
    for number in (1, 2, 3):
        assert run.work(crash_at=f"node.replayed:{number}") == -signal.SIGKILL
    run.finish()
    assert run.violations(uninterrupted) == []


def test_an_incomplete_line_in_the_log_does_not_count(run: KilledRun, uninterrupted: dict[str, Any]) -> None:
    assert run.work(crash_at="node.after_append:3") == -signal.SIGKILL
    lines = run.lines()
    with run.log.open("ab") as log:
        log.write(b'{"epoch": 1, "done": {"output": ["<go saw')
    assert run.lines() == lines
    run.finish()
    assert run.violations(uninterrupted) == []


@pytest.mark.parametrize("point", ["fork.before_append", "fork.after_append", "llm.after_append"])
def test_a_fork_that_was_killed_is_complete_when_it_is_forked_again(
    point: str, run: KilledRun, uninterrupted: dict[str, Any]
) -> None:
    run.finish()
    before = len(run.lines())
    assert run.work(fork=True, crash_at=point) == -signal.SIGKILL
    assert run.work(fork=True) == 0
    last = run.lines()[-1]
    assert last["done"] == uninterrupted["done"]
    ran = [line["key"] for line in run.lines()[before:] if "key" in line]
    assert {key.split("/")[1] for key in ran} == {"left"}
    assert len(ran) == len(set(ran)), "something recorded ran again"
