"""INV 3 at random moments: as many kills as are asked for, each of which found the run at work.

Runs on a journal, and chats on a host, each on both databases. How long a process is at work, from its first node or
its claim to its end, is measured first, on the same database; a kill comes at a random share of that, counted from
there. It counts if the next process found work left to do: a kill that came when all was over shows nothing, and
another is made instead.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.reliability.test_inv_03_crash import Place, Server
from tests.reliability.test_inv_03_hosted import Scene
from tests.storage.postgres import postgres_schemas, postgres_server  # noqa: F401

pytestmark = pytest.mark.reliability

SOAK = bool(os.environ.get("PENSTOCK_SOAK"))
KILLS = 100 if SOAK else 20
"""At work, of each kind on each database."""
KILLS_OF_ONE = 3
"""So often the same run is tried to kill."""


class Kind(NamedTuple):
    """What is killed: who runs it, where its work begins, and its stories."""

    driver: str
    begins_at: str
    stories: tuple[str, ...]
    make: Callable[[Server, str, Path, str], Place]


KINDS = {
    "run": Kind(
        "tests.reliability.crash_driver", "node.started", ("",), lambda server, url, log, _: Place(server, url, log)
    ),
    "chat": Kind("tests.reliability.hosted_driver", "claim.taken", ("chat", "grant", "fork", "cancel"), Scene),
}


@pytest.fixture(scope="module", params=KINDS)
def killing(request: pytest.FixtureRequest) -> Iterator[tuple[Kind, Server]]:
    """What is killed, and the process that forks those who do it."""
    kind = KINDS[request.param]
    server = Server(kind.driver)
    yield kind, server
    server.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Gives an empty database each time it is called."""
    numbers = itertools.count()
    if request.param == "postgresql":
        schemas: Callable[[], str] = request.getfixturevalue("postgres_schemas")
        return schemas
    return lambda: str(tmp_path / f"{next(numbers)}.db")


class Killer:
    """Kills processes of one kind on one database."""

    def __init__(self, kind: Kind, server: Server, new_url: Callable[[], str], folder: Path) -> None:
        self._kind, self._server, self._new_url, self._folder = kind, server, new_url, folder
        self._numbers = itertools.count()
        self._undisturbed = {story: self._whole(story) for story in kind.stories}
        self.at_work = self.after_a_call = self.tried = 0

    def go(self, chance: random.Random) -> list[str]:
        """Kill some of one run's processes, until one comes to the end; what went wrong."""
        story = chance.choice(self._kind.stories)
        place = self._place(story)
        right, works_s = self._undisturbed[story]
        status = -signal.SIGKILL
        while status == -signal.SIGKILL:
            kill_after_s = chance.uniform(0, works_s) if place.epoch < KILLS_OF_ONE else None
            self.tried += kill_after_s is not None
            status = place.live(begins_at=self._kind.begins_at, kill_after_s=kill_after_s)
            if status == 0 and place.epoch == 1 and self._server.worked_s is not None:  # the machine has become faster
                self._undisturbed[story] = right, min(works_s, self._server.worked_s)
            if place.epoch > 1 and self._server.worked_s is not None:  # the one before it had left something to do
                self.at_work += 1
                self.after_a_call += place.epoch - 1 in _callers(place)
        assert status == 0
        return place.violations(right)

    def _whole(self, story: str) -> tuple[dict[str, Any], float]:
        """What it comes to when nobody is killed, and how long it is at work."""
        place = self._place(story)
        assert place.live(begins_at=self._kind.begins_at) == 0
        assert self._server.worked_s is not None, f"nothing came by {self._kind.begins_at}"
        return place.outcome(), self._server.worked_s

    def _place(self, story: str) -> Place:
        return self._kind.make(self._server, self._new_url(), self._folder / f"{next(self._numbers)}.log", story)


def _callers(place: Place) -> set[int]:
    """The processes that have called a model or a tool."""
    return {line["epoch"] for line in place.lines() if "key" in line}


@pytest.mark.timeout(3_600 if SOAK else 300)
def test_what_is_killed_at_work_at_random_moments_comes_to_the_end_it_would_have_had(
    killing: tuple[Kind, Server], new_url: Callable[[], str], tmp_path: Path
) -> None:
    killer = Killer(*killing, new_url, tmp_path)
    for seed in itertools.count():
        if killer.at_work >= KILLS:
            break
        assert killer.go(random.Random(seed)) == [], f"seed {seed}"
        assert seed < 4 * KILLS, f"{killer.at_work} of {killer.tried} kills found somebody at work"
    assert 3 * killer.at_work >= killer.tried, f"only {killer.at_work} of {killer.tried} kills found somebody at work"
    assert 4 * killer.after_a_call >= killer.at_work, f"only {killer.after_a_call} of those had made a call"
