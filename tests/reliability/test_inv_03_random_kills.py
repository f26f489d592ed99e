"""INV 3 at random moments: a given number of kills, each of which hit a process that was working.

Runs on a journal, and chats on a host, each on both databases; and chats that Temporal dispatches. The time that a
process works, from its first node or its claim to its end, is measured first, on the same database; a kill comes at a
random share of that. It counts if the next process found work left to do: a kill after the end shows nothing, and
another is made instead.
"""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.engines.temporal_server import TemporalServer, temporal_server
from tests.reliability.fork_server import ForkServer
from tests.reliability.killed_runs import KilledChat, KilledRun
from tests.soak import SOAK, scaled
from tests.storage.postgres import postgres_schemas, postgres_server

__all__ = ["postgres_schemas", "postgres_server", "temporal_server"]

pytestmark = pytest.mark.reliability

KILLS = scaled(10, soak=100)
"""Kills of working processes, of each kind on each database."""
ON_TEMPORAL = scaled(1, soak=50)
"""Those on Temporal, which gives the run to the next process after a second without a heartbeat."""
KILLS_PER_RUN = 3
"""Attempted kills of one run."""


class Kind(NamedTuple):
    """What is killed: its driver, the failpoint where its work starts, and its stories."""

    driver: str
    starts_at: str
    stories: tuple[str, ...]
    make: Callable[[ForkServer, str, Path, str], KilledRun]


HOSTED, STORIES = "tests.reliability.hosted_driver", ("chat", "grant", "fork", "cancel")
KINDS = {
    "run": Kind(
        "tests.reliability.crash_driver", "node.started", ("",), lambda server, url, log, _: KilledRun(server, url, log)
    ),
    "chat": Kind(HOSTED, "claim.taken", STORIES, KilledChat),
}


@pytest.fixture(scope="module", params=KINDS)
def killing(request: pytest.FixtureRequest) -> Iterator[tuple[Kind, ForkServer]]:
    """What is killed, and the fork server of its processes."""
    kind = KINDS[request.param]
    server = ForkServer(kind.driver)
    yield kind, server
    server.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Returns a new, empty database at each call."""
    numbers = itertools.count()
    if request.param == "postgresql":
        schemas: Callable[[], str] = request.getfixturevalue("postgres_schemas")
        return schemas
    return lambda: str(tmp_path / f"{next(numbers)}.db")


class Killer:
    """Kills processes of one kind on one database."""

    def __init__(self, kind: Kind, server: ForkServer, new_url: Callable[[], str], folder: Path) -> None:
        self._kind, self._server, self._new_url, self._folder = kind, server, new_url, folder
        self._numbers = itertools.count()
        self._undisturbed = {story: self._run_without_kills(story) for story in kind.stories}
        self.hits = self.after_a_call = self.tried = 0

    def kill_runs(self, kills: int) -> None:
        """Kill processes of runs until so many kills have hit one, and a quarter of them one that had made a call."""
        for seed in itertools.count():
            if self.hits >= kills and 4 * self.after_a_call >= kills:
                break
            assert self.kill_one_run(random.Random(seed)) == [], f"seed {seed}"
            assert seed < 10 * kills, (
                f"{self.hits} of {self.tried} kills hit a process; {self.after_a_call} after a call"
            )

    def kill_one_run(self, chance: random.Random) -> list[str]:
        """Kill processes of one run until one completes it; the violations."""
        story = chance.choice(self._kind.stories)
        run = self._new_run(story)
        expected, works_s = self._undisturbed[story]
        status = -signal.SIGKILL
        while status == -signal.SIGKILL:
            kill_after_s = chance.uniform(0, works_s) if run.epoch < KILLS_PER_RUN else None
            self.tried += kill_after_s is not None
            status = run.work(starts_at=self._kind.starts_at, kill_after_s=kill_after_s)
            if status == 0 and run.epoch == 1 and self._server.worked_s is not None:  # the machine is faster now
                self._undisturbed[story] = expected, min(works_s, self._server.worked_s)
            if run.epoch > 1 and self._server.worked_s is not None:  # the process before it had left work
                self.hits += 1
                self.after_a_call += run.epoch - 1 in _callers(run)
        assert status == 0
        return run.violations(expected)

    def _run_without_kills(self, story: str) -> tuple[dict[str, Any], float]:
        """The outcome without kills, and how long the process works."""
        run = self._new_run(story)
        assert run.work(starts_at=self._kind.starts_at) == 0
        assert self._server.worked_s is not None, f"it does not pass {self._kind.starts_at}"
        return run.outcome(), self._server.worked_s

    def _new_run(self, story: str) -> KilledRun:
        return self._kind.make(self._server, self._new_url(), self._folder / f"{next(self._numbers)}.log", story)


def _callers(run: KilledRun) -> set[int]:
    """Epochs of the processes that have called a model or a tool."""
    return {line["epoch"] for line in run.lines() if "key" in line}


@pytest.mark.timeout(3_600 if SOAK else 300)
def test_work_killed_at_random_moments_ends_as_without_kills(
    killing: tuple[Kind, ForkServer], new_url: Callable[[], str], tmp_path: Path
) -> None:
    Killer(*killing, new_url, tmp_path).kill_runs(KILLS)


@pytest.mark.requirement("X-4")
@pytest.mark.timeout(3_600 if SOAK else 300)
def test_chats_on_temporal_killed_at_random_moments_end_as_without_kills(
    temporal_server: TemporalServer, postgres_schemas: Callable[[], str], tmp_path: Path
) -> None:
    server, url = ForkServer(HOSTED), temporal_server.url()
    try:
        kind = Kind(HOSTED, "claim.taken", STORIES if SOAK else ("chat",), partial(KilledChat, temporal=url))
        Killer(kind, server, postgres_schemas, tmp_path).kill_runs(ON_TEMPORAL)
    finally:
        server.close()
