"""INV 3: kill -9 anywhere: the run goes on, nothing recorded runs again, nothing is lost, nothing ends wrongly.

Children of a fork server run a graph with parallel branches, agents with tools, an agent inside an agent, a map and a
loop on a journal and a shared budget. They are killed at every named point, the first time they come by and later
ones; then the next one goes on, until one comes to the end.
"""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.testing.crash_points import POINTS
from tests.reliability.crash_driver import said_whole
from tests.storage.postgres import postgres_server, postgres_url  # noqa: F401

pytestmark = pytest.mark.reliability

ROOT = Path(__file__).parents[2]
MAX_EPOCHS = 60


class Server:
    """The process that forks; `worked_s` is how long its last child was at work, if it was."""

    def __init__(self, driver: str = "tests.reliability.crash_driver") -> None:
        self.worked_s: float | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-m", driver],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def live(self, **command: Any) -> int:
        """How a child that does this ended; minus the signal, if it was killed."""
        self.begin(**command)
        return self.ended()

    def begin(self, **command: Any) -> None:
        """Have a child do this."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def ended(self) -> int:
        """How the child that was begun ended."""
        assert self._process.stdout is not None
        answer = json.loads(self._process.stdout.readline())
        self.worked_s = answer["worked_s"]
        return int(answer["status"])

    def close(self) -> None:
        self._process.communicate(timeout=60)


class Place:
    """A database, a log beside it, and the run in them."""

    def __init__(self, server: Server, url: str, log: Path) -> None:
        self._server = server
        self._url = url
        self.log = log
        self.epoch = 0

    def live(self, **command: Any) -> int:
        """One more process takes the run over."""
        self.epoch += 1
        return self._server.live(url=self._url, log=str(self.log), epoch=self.epoch, **command)

    def finish(self) -> None:
        """Let processes go on with it until one comes to the end."""
        while (status := self.live()) != 0:
            assert status == -signal.SIGKILL
            assert self.epoch < MAX_EPOCHS

    def lines(self) -> list[dict[str, Any]]:
        return (
            [json.loads(line) for line in said_whole(self.log.read_bytes()).splitlines()] if self.log.exists() else []
        )

    def outcome(self) -> dict[str, Any]:
        """What the last process came to; nothing, if none has come to the end."""
        return next((line for line in reversed(self.lines()) if "done" in line), {})

    def violations(self, right: dict[str, Any]) -> list[str]:
        """What went wrong, judged by the log alone."""
        found: list[str] = []
        recorded: set[str] = set()
        ran: set[tuple[int, str]] = set()
        for line in self.lines():
            if "recorded" in line:
                if not recorded <= set(line["recorded"]):
                    found.append(f"epoch {line['epoch']} has lost {recorded - set(line['recorded'])}")
                recorded = set(line["recorded"])
            elif "key" in line:
                if line["key"] in recorded:
                    found.append(f"{line['key']} was recorded and ran again in epoch {line['epoch']}")
                if (line["epoch"], line["key"]) in ran:
                    found.append(f"{line['key']} ran twice in epoch {line['epoch']}")
                ran.add((line["epoch"], line["key"]))
        ends = [line for line in self.lines() if "done" in line]
        for end, name in itertools.product(ends, ("done", "state", "entries", "here")):
            if end[name] != right[name]:
                found.append(f"{name} is {end[name]!r}, and {right[name]!r} without a crash")
        last = self.outcome()
        if last["committed"] < self.invoice:
            found.append(f"the ledger has {last['committed']}, and {self.invoice} were billed")
        if last["held"]:
            found.append(f"{last['held']} are still held")
        return found

    @property
    def invoice(self) -> int:
        return sum(line.get("billed", 0) for line in self.lines())


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture(scope="module")
def uninterrupted(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the run comes to when nobody is killed."""
    folder = tmp_path_factory.mktemp("whole")
    place = Place(server, str(folder / "run.db"), folder / "log")
    assert place.live() == 0
    last = place.outcome()
    assert last["committed"] >= place.invoice > 0
    return last


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, server: Server, tmp_path: Path) -> Place:
    """A new database for one run."""
    url = str(tmp_path / "run.db") if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    return Place(server, url, tmp_path / "log")


ON_THE_WAY = [one for one in POINTS if not one.startswith(("fork", "node.replayed"))]
WHICH = [("sqlite", point, number) for point in ON_THE_WAY for number in (1, 6)]
WHICH += [("postgresql", point, 1) for point in ON_THE_WAY]
"""Where, and the how-manieth time. A database server takes its time for each process that opens it."""


@pytest.mark.parametrize(("place", "point", "number"), WHICH, indirect=["place"])
def test_a_run_killed_at_a_named_point_goes_on(
    point: str, number: int, place: Place, uninterrupted: dict[str, Any]
) -> None:
    for killed in range(3):
        if place.live(crash_at=f"{point}:{number}") == 0:
            assert killed or number > 1, f"nothing came by {point}"
            break
    else:
        place.finish()
    assert place.violations(uninterrupted) == []


def test_a_run_killed_while_it_goes_over_what_is_recorded_goes_on(place: Place, uninterrupted: dict[str, Any]) -> None:
    assert place.live(crash_at="node.after_append:12") == -signal.SIGKILL
    for number in (1, 2, 3):
        assert place.live(crash_at=f"node.replayed:{number}") == -signal.SIGKILL
    place.finish()
    assert place.violations(uninterrupted) == []


def test_a_line_of_the_log_that_a_kill_has_cut_was_not_said(place: Place, uninterrupted: dict[str, Any]) -> None:
    assert place.live(crash_at="node.after_append:3") == -signal.SIGKILL
    said = place.lines()
    with place.log.open("ab") as log:
        log.write(b'{"epoch": 1, "done": {"output": ["<go saw')
    assert place.lines() == said
    place.finish()
    assert place.violations(uninterrupted) == []


@pytest.mark.parametrize("point", ["fork.before_append", "fork.after_append", "llm.after_append"])
def test_a_fork_killed_in_the_middle_is_made_again_and_is_whole(
    point: str, place: Place, uninterrupted: dict[str, Any]
) -> None:
    place.finish()
    before = len(place.lines())
    assert place.live(fork=True, crash_at=point) == -signal.SIGKILL
    assert place.live(fork=True) == 0
    last = place.lines()[-1]
    assert last["done"] == uninterrupted["done"]
    ran = [line["key"] for line in place.lines()[before:] if "key" in line]
    assert {key.split("/")[1] for key in ran} == {"left"}
    assert len(ran) == len(set(ran)), "something recorded ran again"
