"""INV 3 over the hosted service: kill -9 anywhere, and the answer is the one that nobody's death would have changed.

Processes of a fork server are client and worker of one chat service: an agent with two turns of tools beside a map, a
question to somebody, a writer; stories around it grant more to a run that was halted, fork it, cancel it. They are
killed at every named point; the next one asks again under the same id, and takes over when the lease has run out. A
stopped one that is let go on afterwards finds that the run is another's.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock.hosting.points import POINTS as HOSTED_POINTS
from penstock.hosting.work.told import STATUS_OF
from penstock.runtime.durable.points import POINTS
from tests.reliability.test_inv_03_crash import Place, Server
from tests.storage.postgres import postgres_server, postgres_url  # noqa: F401

pytestmark = pytest.mark.reliability

CEILING_NANOS = 5_000_000_000
SAME = ("status", "output", "entries", "questions")
"""What a run comes to, whoever died on the way."""
GOES_ON = ("run.granted", "run.queued")
STORIES = ("chat", "grant", "fork", "cancel", "early", "unpriced")
ENDS: dict[str, str] = {"cancel": "partial", "early": "partial"}
"""The state of the answer; else it is complete."""


class Scene(Place):
    """A database with one chat in it, and the processes that come and go."""

    def __init__(self, server: Server, url: str, log: Path, story: str = "chat") -> None:
        super().__init__(server, url, log)
        self.story = story

    def live(self, **command: Any) -> int:
        return super().live(story=self.story, **command)

    def begin(self, server: Server, **command: Any) -> int:
        """Have another server's process begin, until it says that it stops; its id."""
        self.epoch += 1
        server.begin(url=self._url, log=str(self.log), epoch=self.epoch, story=self.story, **command)
        while not (found := [line["stops"] for line in self.lines() if "stops" in line]):
            time.sleep(0.01)
        return int(found[0])

    def outcome(self) -> dict[str, dict[str, Any]]:
        """What the last process found, by run."""
        return {line["left"]: line for line in self.lines() if "left" in line}

    def violations(self, right: dict[str, Any]) -> list[str]:
        left = self.outcome()
        found = self._repeated()
        if left.keys() != right.keys():
            found.append(f"there are runs {sorted(left)}, and {sorted(right)} without a crash")
        for run_id, run in left.items():
            found += self._of_run(run, right[run_id])
        return found

    def _repeated(self) -> list[str]:
        """What was recorded and is lost, or ran again; what ran more often than its run was claimed.

        Each process claims it, and again if it lost the lease, which it may where it hardly gets to run.
        """
        found: list[str] = []
        recorded: dict[str, set[str]] = {}
        ran: Counter[str] = Counter()
        for line in self.lines():
            if "recorded" in line:
                before, now = recorded.get(line["run"], set()), set(line["recorded"])
                if not before <= now:
                    found.append(f"process {line['epoch']} finds {before - now} no more")
                recorded[line["run"]] = now
            elif "key" in line:
                ran[line["key"]] += 1
                if any(line["key"] in keys for keys in recorded.values()):
                    found.append(f"{line['key']} was recorded and ran again in process {line['epoch']}")
        claims = {run_id: run["claims"] for run_id, run in self.outcome().items()}
        often = [(key, times) for key, times in ran.items() if times > claims.get(key.split("/")[0], 0)]
        return [*found, *(f"{key} ran {times} times; the claims were {claims}" for key, times in often)]

    def _of_run(self, run: dict[str, Any], right: dict[str, Any]) -> list[str]:
        names = [name for name in SAME if run[name] != right[name]]
        found = [f"{name} is {run[name]!r}, and {right[name]!r} without a crash" for name in names]
        if run["worker"] is not None or run["held"]:
            found.append(f"it is over, and {run['worker']!r} has it still, with {run['held']} held")
        found += _of_log(run) + _of_answer(run, right, ENDS.get(self.story, "complete"))
        return found + self._of_bill(run)

    def _of_bill(self, run: dict[str, Any]) -> list[str]:
        spent, unresolved, *_ = run["account"]
        bills = [line.get("billed", 0) for line in self.lines() if line.get("key", "").startswith(f"{run['left']}/")]
        billed = 0 if self.story == "unpriced" else sum(bills)
        found = []
        if not billed <= spent + unresolved <= CEILING_NANOS:
            found.append(f"{billed} were billed; the ledger has {spent} and {unresolved} unresolved")
        if run["record"] != run["account"]:
            found.append(f"the record says {run['record']}, the ledger {run['account']}")
        unknown = run["api_calls"] if self.story == "unpriced" else 0
        if not run["unknown_costs"] == run["last"].get("unknown_costs", 0) == unknown:
            found.append(f"{unknown} calls left without a price; the record says {run['unknown_costs']}")
        told = [round(run["last"].get(name, 0) * 1e9) for name in ("cost_usd", "unresolved_usd")]
        if told != run["record"][:2]:
            found.append(f"the last event says {told}, the record {run['record']}")
        return found


def _of_log(run: dict[str, Any]) -> list[str]:
    """Numbers without gaps; after the end nothing, unless it was told, once, that it goes on."""
    found = [] if run["seqs"] == [*range(1, len(run["seqs"]) + 1)] else [f"there are gaps in {run['seqs']}"]
    told = run["told"]
    ends = [at for at, type in enumerate(told) if type in STATUS_OF]
    if [at for at in ends if at + 1 < len(told) and told[at + 1] not in GOES_ON] or ends[-1:] != [len(told) - 1]:
        found.append(f"it ended and went on: {told}")
    if any(one in GOES_ON and after in GOES_ON for one, after in pairwise(told)):
        found.append(f"it was told twice that it goes on: {told}")
    if STATUS_OF[told[-1]] != run["status"]:
        found.append(f"it is {run['status']}, and its last event is {told[-1]}")
    return found


def _of_answer(run: dict[str, Any], right: dict[str, Any], state: str) -> list[str]:
    """One question, one answer as it would have been; what was said when a limit halted it stands beside it."""
    said = [one for one in run["conversation"] if one[2] != "halted"]
    wanted = [one for one in right["conversation"] if one[2] != "halted"]
    if said != wanted or [one[2] for one in said if one[0] == "assistant"] != [state]:
        return [f"the conversation is {run['conversation']!r}, and {right['conversation']!r} without a crash"]
    return []


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server("tests.reliability.hosted_driver")
    yield made
    made.close()


@pytest.fixture(scope="module")
def uninterrupted(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each story comes to when nobody is killed."""
    whole = {}
    for story in STORIES:
        folder = tmp_path_factory.mktemp(story)
        scene = Scene(server, str(folder / "run.db"), folder / "log", story)
        assert scene.live() == 0
        whole[story] = scene.outcome()
        assert scene.violations(whole[story]) == []
    return whole


@pytest.fixture(params=["sqlite", "postgresql"])
def scene(request: pytest.FixtureRequest, server: Server, tmp_path: Path) -> Scene:
    """A new database for one chat."""
    url = str(tmp_path / "run.db") if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    return Scene(server, url, tmp_path / "log")


def story_of(point: str) -> str:
    """In which story somebody comes by."""
    early = {"cancel.told": "early"}
    kinds = {"grant": "grant", "fork": "fork", "cancel": "cancel"}
    return early.get(point) or kinds.get(point.partition(".")[0], "chat")


ONLY_BEHIND_OTHERS = ("claim.adopted", "node.replayed")
"""Points that only a process comes by that takes over."""
ELSEWHERE = ("value.before_append", "value.after_append", "fork.before_append", "fork.after_append")
"""Points that no graph comes by, and those of `fork_journal`: a hosted fork has its journal from its beginning."""
WHERE = [one for one in (*POINTS, *HOSTED_POINTS) if one not in ELSEWHERE]
TWICE = [
    "claim.taken",
    "start.before_event",
    "events.before_append:2",
    "llm.before_append",
    "hold.after",
    "approval.got",
]
"""Points that the next worker comes by as well."""
LATER = [
    "events.before_append:3",
    "events.after_append:3",
    "llm.before_append:5",
    "node.after_append:6",
    "hold.after:9",
]


NAMED = [("sqlite", point) for point in (*WHERE, *LATER)] + [("postgresql", point) for point in WHERE]


@pytest.mark.parametrize(("scene", "point"), NAMED, indirect=["scene"])
def test_a_chat_whose_worker_is_killed_at_a_named_point_is_answered_as_if_nobody_had_died(
    point: str, scene: Scene, uninterrupted: dict[str, dict[str, Any]]
) -> None:
    scene.story = story_of(point)
    if point in ONLY_BEHIND_OTHERS:
        assert scene.live(crash_at="node.before_append:4") == -signal.SIGKILL
    assert scene.live(crash_at=point) == -signal.SIGKILL, f"nothing came by {point}: {scene.lines()[-1]}"
    scene.finish()
    assert scene.violations(uninterrupted[scene.story]) == []


WITHOUT_PRICE = [f"{point}:{at}" for point in ("hold.after", "settle.before", "settle.after") for at in (1, 2, 7)]
WITHOUT_PRICE += ["llm.before_call:2", "llm.before_append", "llm.after_append:3", "node.after_append:6", "end.decided"]
PRICELESS = [("sqlite", point) for point in WITHOUT_PRICE] + [("postgresql", "settle.after:2")]


@pytest.mark.parametrize(("scene", "point"), PRICELESS, indirect=["scene"])
def test_each_call_of_a_model_without_a_price_is_counted_once_whoever_is_killed(
    point: str, scene: Scene, uninterrupted: dict[str, dict[str, Any]]
) -> None:
    scene.story = "unpriced"
    assert scene.live(crash_at=point) == -signal.SIGKILL, f"nothing came by {point}: {scene.lines()[-1]}"
    scene.live(crash_at="llm.before_append:2")
    scene.finish()
    assert scene.violations(uninterrupted["unpriced"]) == []


@pytest.mark.parametrize("scene", ["sqlite"], indirect=True)
@pytest.mark.parametrize("point", TWICE)
def test_a_chat_whose_next_worker_is_killed_there_too_is_answered_as_if_nobody_had_died(
    point: str, scene: Scene, uninterrupted: dict[str, dict[str, Any]]
) -> None:
    for _ in range(3):
        scene.live(crash_at=point)
    scene.finish()
    assert scene.violations(uninterrupted["chat"]) == []


@pytest.mark.parametrize("scene", ["sqlite"], indirect=True)
@pytest.mark.parametrize("point", ["answer.after_finish", "end.before_status"])
def test_a_cancel_that_comes_when_the_answer_is_written_and_its_worker_is_dead_leaves_the_answer_as_it_is(
    point: str, scene: Scene, uninterrupted: dict[str, dict[str, Any]]
) -> None:
    assert scene.live(crash_at=point) == -signal.SIGKILL
    scene.story = "early"
    scene.finish()
    left = scene.outcome()["r"]
    assert left["conversation"] == uninterrupted["chat"]["r"]["conversation"]
    assert left["status"] == ("completed" if point == "end.before_status" else "cancelled")
    assert _of_log(left) + scene._of_bill(left) == []


@pytest.mark.parametrize("scene", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    "point",
    [
        "end.decided",
        "end.after_kind",
        "end.before_status",
        "end.after_status",
    ],
)
def test_the_question_of_a_chat_that_is_cancelled_waits_for_nobody_when_its_worker_dies_at_its_end(
    point: str, scene: Scene, uninterrupted: dict[str, dict[str, Any]]
) -> None:
    scene.story = "cancel"
    assert scene.live(crash_at=point) == -signal.SIGKILL
    scene.finish()
    assert scene.violations(uninterrupted["cancel"]) == []


@pytest.mark.parametrize("scene", ["sqlite", "postgresql"], indirect=True)
def test_what_a_dead_worker_had_under_way_is_in_the_bill_of_a_run_that_nobody_went_on_with(scene: Scene) -> None:
    assert scene.live(crash_at="settle.before:3") == -signal.SIGKILL
    scene.story = "early"
    scene.finish()
    left = scene.outcome()["r"]
    assert (left["status"], left["held"]) == ("cancelled", 0)
    assert left["record"][1] > 0
    assert _of_log(left) + scene._of_bill(left) == []


@pytest.fixture
def another_server() -> Iterator[Server]:
    made = Server("tests.reliability.hosted_driver")
    yield made
    made.close()


@pytest.mark.parametrize("scene", ["sqlite", "postgresql"], indirect=True)
@pytest.mark.parametrize("place", ["r/thinks/agent:thinks/turn:2", "r/writer"])
def test_a_worker_that_is_stopped_for_longer_than_its_lease_writes_nothing_when_it_goes_on(
    place: str, scene: Scene, another_server: Server, uninterrupted: dict[str, dict[str, Any]]
) -> None:
    stopped = scene.begin(another_server, stop_in=place)
    try:
        assert scene.live() == 0
        after = scene.outcome()["r"]
    finally:
        os.kill(stopped, signal.SIGCONT)
        status = another_server.ended()
    assert status == 0
    woken = scene.outcome()["r"]
    assert (after["claims"], after["totals"].get("completed")) == (2, 1)
    assert (woken["totals"].get("lost"), woken["totals"].get("completed")) == (1, None)
    settled = {"account", "record", "last", "epoch", "totals"}  # what the stopped call has cost may be known now
    assert {name: one for name, one in woken.items() if name not in settled} == {
        name: one for name, one in after.items() if name not in settled
    }
    assert woken["record"] == after["record"] == after["account"]
    assert woken["account"][1] <= after["account"][1]
    assert [one for one in scene.violations(uninterrupted["chat"]) if "the record says" not in one] == []


@pytest.mark.parametrize("scene", ["sqlite", "postgresql"], indirect=True)
def test_a_stopped_worker_whose_run_was_taken_over_by_one_that_died_must_claim_it_anew(
    scene: Scene, another_server: Server, uninterrupted: dict[str, dict[str, Any]]
) -> None:
    stopped = scene.begin(another_server, stop_in="r/thinks/agent:thinks/turn:1")
    try:
        assert scene.live(crash_at="claim.adopted") == -signal.SIGKILL
    finally:
        os.kill(stopped, signal.SIGCONT)
        assert another_server.ended() == 0
    left = scene.outcome()["r"]
    assert (left["claims"], left["totals"]["lost"], left["totals"]["completed"]) == (3, 1, 1)
    asked = [line for line in scene.lines() if line.get("key", "").startswith("r/thinks/agent:thinks/turn:1/llm")]
    assert len(asked) == 2, "what it had to write down under its old claim was refused"
    assert scene.violations(uninterrupted["chat"]) == []
