"""INV 3 over the hosted service: kill -9 anywhere, and the chat is answered as if no process had died.

Processes of a fork server are client and worker of one chat service: an agent with two turns of tools beside a map, an
approval, a writer; other stories grant more to a run that a limit halted, fork it, or cancel it. They are killed at
every failpoint; the next process sends the same request under the same id and takes over the run, whose lease has
expired. A process that is stopped and continues after that finds that another has its run. Temporal as the engine gives
the run to the next process; the soak has every failpoint there.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.durable.failpoints import HOSTED_POINTS, POINTS
from tests.engines.temporal_server import TemporalServer, temporal_server
from tests.reliability.fork_server import ForkServer
from tests.reliability.killed_runs import KilledChat, event_violations
from tests.soak import SOAK
from tests.storage.postgres import postgres_schemas, postgres_server

__all__ = ["postgres_schemas", "postgres_server", "temporal_server"]

pytestmark = pytest.mark.reliability

STORIES = ("chat", "grant", "fork", "cancel", "early", "unpriced")


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer("tests.reliability.hosted_driver")
    yield server
    server.close()


@pytest.fixture(scope="module")
def uninterrupted(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The outcome of each story when no process is killed."""
    whole = {}
    for story in STORIES:
        folder = tmp_path_factory.mktemp(story)
        chat = KilledChat(server, str(folder / "run.db"), folder / "log", story)
        assert chat.work() == 0
        whole[story] = chat.outcome()
        assert chat.violations(whole[story]) == []
    return whole


@pytest.fixture(params=["sqlite", "postgresql"])
def chat(request: pytest.FixtureRequest, server: ForkServer, tmp_path: Path) -> KilledChat:
    """A chat in a new database."""
    url = str(tmp_path / "run.db") if request.param == "sqlite" else request.getfixturevalue("postgres_schemas")()
    return KilledChat(server, url, tmp_path / "log")


@pytest.fixture
def chat_on_temporal(
    server: ForkServer,
    temporal_server: TemporalServer,
    postgres_schemas: Callable[[], str],
    tmp_path: Path,
) -> KilledChat:
    """A chat in a new database, whose runs Temporal dispatches."""
    return KilledChat(server, postgres_schemas(), tmp_path / "log", temporal=temporal_server.url())


def story_of(point: str) -> str:
    """A story that passes the failpoint."""
    early = {"cancel.committed": "early"}
    kinds = {"grant": "grant", "fork": "fork", "cancel": "cancel"}
    return early.get(point) or kinds.get(point.partition(".")[0], "chat")


AFTER_A_KILL = ("claim.adopted", "node.replayed")
"""Failpoints that only a process that takes over passes."""
ELSEWHERE = ("value.before_append", "value.after_append", "fork.before_append", "fork.after_append")
"""Failpoints that no graph passes, and those of `fork_journal`: a hosted fork is created with its journal."""
PASSED = [point for point in (*POINTS, *HOSTED_POINTS) if point not in ELSEWHERE]
TWICE = [
    "claim.taken",
    "start.before_event",
    "events.before_append:2",
    "llm.before_append",
    "hold.after",
    "approval.got",
]
"""Failpoints that the next worker passes too."""
LATER = [
    "events.before_append:3",
    "events.after_append:3",
    "llm.before_append:5",
    "node.after_append:6",
    "hold.after:9",
]


NAMED = [("sqlite", point) for point in (*PASSED, *LATER)] + [("postgresql", point) for point in PASSED]
ON_TEMPORAL = PASSED if SOAK else ("submit.added", "llm.before_append", "end.committed")
"""Few, because each kill takes as long as Temporal waits for a heartbeat."""


@pytest.mark.parametrize(("chat", "point"), NAMED, indirect=["chat"])
def test_a_chat_whose_worker_is_killed_at_a_failpoint_is_answered_as_without_a_kill(
    point: str, chat: KilledChat, uninterrupted: dict[str, dict[str, Any]]
) -> None:
    kill_at(point, chat, uninterrupted)


@pytest.mark.requirement("X-4")
@pytest.mark.parametrize("point", ON_TEMPORAL)
def test_a_chat_on_temporal_whose_worker_is_killed_at_a_failpoint_is_answered_as_without_a_kill(
    point: str, chat_on_temporal: KilledChat, uninterrupted: dict[str, dict[str, Any]]
) -> None:
    kill_at(point, chat_on_temporal, uninterrupted)


def kill_at(point: str, chat: KilledChat, uninterrupted: dict[str, dict[str, Any]]) -> None:
    """Kill a worker at the failpoint, have others finish its chat, and compare that with one without a kill."""
    chat.story = story_of(point)
    if point in AFTER_A_KILL:
        assert chat.work(crash_at="node.before_append:4") == -signal.SIGKILL
    assert chat.work(crash_at=point) == -signal.SIGKILL, f"the story does not pass {point}: {chat.lines()[-1]}"
    chat.finish()
    assert chat.violations(uninterrupted[chat.story]) == []


WITHOUT_PRICE = [f"{point}:{at}" for point in ("hold.after", "settle.before", "settle.after") for at in (1, 2, 7)]
WITHOUT_PRICE += ["llm.before_call:2", "llm.before_append", "llm.after_append:3", "node.after_append:6", "end.decided"]
PRICELESS = [("sqlite", point) for point in WITHOUT_PRICE] + [("postgresql", "settle.after:2")]


@pytest.mark.parametrize(("chat", "point"), PRICELESS, indirect=["chat"])
def test_each_call_of_a_model_without_a_price_is_counted_once_despite_kills(
    point: str, chat: KilledChat, uninterrupted: dict[str, dict[str, Any]]
) -> None:
    chat.story = "unpriced"
    assert chat.work(crash_at=point) == -signal.SIGKILL, f"the story does not pass {point}: {chat.lines()[-1]}"
    chat.work(crash_at="llm.before_append:2")
    chat.finish()
    assert chat.violations(uninterrupted["unpriced"]) == []


@pytest.mark.parametrize("chat", ["sqlite"], indirect=True)
@pytest.mark.parametrize("point", TWICE)
def test_a_chat_whose_workers_are_killed_repeatedly_is_answered_as_without_a_kill(
    point: str, chat: KilledChat, uninterrupted: dict[str, dict[str, Any]]
) -> None:
    for _ in range(3):
        chat.work(crash_at=point)
    chat.finish()
    assert chat.violations(uninterrupted["chat"]) == []


@pytest.mark.parametrize("chat", ["sqlite"], indirect=True)
def test_a_cancel_after_the_end_was_committed_by_a_killed_worker_does_not_change_the_answer(
    chat: KilledChat, uninterrupted: dict[str, dict[str, Any]]
) -> None:
    assert chat.work(crash_at="end.committed") == -signal.SIGKILL
    chat.story = "early"
    chat.finish()
    left = chat.outcome()["r"]
    assert left["conversation"] == uninterrupted["chat"]["r"]["conversation"]
    assert left["status"] == "completed"
    assert event_violations(left) + chat.bill_violations(left) == []


@pytest.mark.parametrize("chat", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    "point",
    [
        "end.decided",
        "end.before_commit",
        "end.committed",
    ],
)
def test_the_approval_of_a_cancelled_chat_is_closed_when_its_worker_is_killed_at_the_end(
    point: str, chat: KilledChat, uninterrupted: dict[str, dict[str, Any]]
) -> None:
    chat.story = "cancel"
    assert chat.work(crash_at=point) == -signal.SIGKILL
    chat.finish()
    assert chat.violations(uninterrupted["cancel"]) == []


@pytest.mark.parametrize("chat", ["sqlite", "postgresql"], indirect=True)
def test_calls_in_flight_in_a_killed_worker_are_billed_to_a_run_that_is_then_cancelled(chat: KilledChat) -> None:
    assert chat.work(crash_at="settle.before:3") == -signal.SIGKILL
    chat.story = "early"
    chat.finish()
    left = chat.outcome()["r"]
    assert (left["status"], left["held"]) == ("cancelled", 0)
    assert left["record"][1] > 0
    assert event_violations(left) + chat.bill_violations(left) == []


@pytest.fixture(scope="module")
def another_server() -> Iterator[ForkServer]:
    server = ForkServer("tests.reliability.hosted_driver")
    yield server
    server.close()


@pytest.mark.parametrize("chat", ["sqlite", "postgresql"], indirect=True)
@pytest.mark.parametrize("call", ["r/thinks/agent:thinks/turn:2", "r/writer"])
def test_a_worker_stopped_for_longer_than_its_lease_writes_nothing_when_it_continues(
    call: str, chat: KilledChat, another_server: ForkServer, uninterrupted: dict[str, dict[str, Any]]
) -> None:
    stopped = chat.start(another_server, stop_in=call)
    try:
        assert chat.work() == 0
        after = chat.outcome()["r"]
    finally:
        os.kill(stopped, signal.SIGCONT)
        status = another_server.wait()
    assert status == 0
    woken = chat.outcome()["r"]
    assert (after["claims"], after["totals"].get("completed")) == (2, 1)
    assert (woken["totals"].get("lost"), woken["totals"].get("completed")) == (1, None)
    settled = {"account", "record", "last", "epoch", "totals", "claims_before", "unresolved_bills"}
    # The cost of the call that was stopped may be known now.
    assert {name: fact for name, fact in woken.items() if name not in settled} == {
        name: fact for name, fact in after.items() if name not in settled
    }
    assert woken["record"] == after["record"] == after["account"]
    assert woken["account"][1] <= after["account"][1]
    assert [text for text in chat.violations(uninterrupted["chat"]) if "the record has" not in text] == []


@pytest.mark.parametrize("chat", ["sqlite", "postgresql"], indirect=True)
def test_a_stopped_worker_whose_successor_was_killed_must_claim_the_run_again(
    chat: KilledChat, another_server: ForkServer, uninterrupted: dict[str, dict[str, Any]]
) -> None:
    stopped = chat.start(another_server, stop_in="r/thinks/agent:thinks/turn:1")
    try:
        assert chat.work(crash_at="claim.adopted") == -signal.SIGKILL
    finally:
        os.kill(stopped, signal.SIGCONT)
        assert another_server.wait() == 0
    left = chat.outcome()["r"]
    assert (left["claims"], left["totals"]["lost"], left["totals"]["completed"]) == (3, 1, 1)
    requests = [line for line in chat.lines() if line.get("key", "").startswith("r/thinks/agent:thinks/turn:1/llm")]
    assert len(requests) == 2, "the response of its old claim was recorded"
    assert chat.violations(uninterrupted["chat"]) == []
