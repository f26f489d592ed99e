"""INV 17: databases written by older releases open with this code, and what was under way in them goes on.

`upgrade/fixtures` has one folder for each release; `upgrade/make_fixture.py` says how they are made. Each test works on
a new copy, half an hour after the fixture was written by its own clock: the leases of the worker that was killed have
expired, the day is the same.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from penstock.chat.service import ChatService
from penstock.hosting.host import RunHost, RunLimits
from penstock.storage import Stores, migrate, newest_version, open_stores, schema_version
from tests.reliability.upgrade.service import (
    ANN,
    ANSWER_NANOS,
    BOB,
    CALL_NANOS,
    CANCELLED_EARLY,
    CHAT,
    CHAT_INTERRUPTED,
    DAY,
    LARGE,
    LOOK_NANOS,
    OPEN_RUNS,
    FixtureClock,
    accounts_in,
    host_on,
    run_in,
    snapshot,
    versioned,
)
from tests.storage.postgres import postgres_server, postgres_url

__all__ = ["postgres_server", "postgres_url"]

pytestmark = pytest.mark.reliability

FIXTURES = sorted((Path(__file__).parent / "upgrade" / "fixtures").iterdir())
MINUTES_LATER = 30
SPENT, UNRESOLVED = 0, 2
"""Places among the figures of an account."""
AMPLE = RunLimits(max_cost_usd="5")


@dataclass(frozen=True)
class Old:
    """A copy of a fixture, and what was in it when it was written."""

    url: str
    written: dict[str, Any]

    def run(self, run_id: str) -> dict[str, Any]:
        run: dict[str, Any] = self.written["runs"][run_id]
        return run

    def recorded(self) -> set[str]:
        """The idempotency keys of all steps that are in the journals."""
        return {f"{run_id}/{entry[0]}" for run_id, run in self.written["runs"].items() for entry in run["journal"]}


@pytest.fixture(params=["sqlite", "postgresql"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=FIXTURES, ids=lambda folder: folder.name)
def old(request: pytest.FixtureRequest, kind: str, tmp_path: Path) -> Old:
    folder: Path = request.param
    written = json.loads(gzip.decompress((folder / f"{kind}.json.gz").read_bytes()))
    if kind == "sqlite":
        for packed in folder.glob("sqlite.db*.gz"):
            (tmp_path / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
        return Old(str(tmp_path / "sqlite.db"), written)
    url: str = request.getfixturevalue("postgres_url")
    asyncio.run(_restore(url, gzip.decompress((folder / "postgresql.sql.gz").read_bytes()).decode()))
    return Old(url, written)


async def _restore(url: str, statements: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statements)
    finally:
        await connection.close()


@dataclass(frozen=True)
class Opened:
    """The service on an upgraded copy, at work."""

    stores: Stores
    host: RunHost
    chats: ChatService
    log: list[str]
    """The idempotency keys of all calls of models and tools that were made here."""

    async def ended(self, run_id: str) -> dict[str, Any]:
        await self.host.wait(run_id)
        return await run_in(self.stores, run_id)

    async def approve(self, run_id: str) -> None:
        [question] = await self.stores.approvals.list(run_id=run_id)
        await self.host.answer(question.id, "approved", by=BOB)

    def calls(self, run_id: str) -> list[str]:
        """The calls of one run, without the hash that ends the key of a tool."""
        keys = [key.removeprefix(f"{run_id}/") for key in self.log if key.startswith(f"{run_id}/")]
        return [key.rpartition(":")[0] if "/tool:" in key else key for key in keys]


_workers = count(1)


@asynccontextmanager
async def at_work(old: Old, **options: Any) -> AsyncIterator[Opened]:
    """Upgrade the copy as an operator does, and start a host on it."""
    await migrate(old.url)
    clock, log = FixtureClock(MINUTES_LATER), list[str]()
    async with await open_stores(old.url, clock=clock) as stores:
        host, _ = host_on(stores, log, clock, worker=f"upgraded-{next(_workers)}", **options)
        chats = ChatService(host, stores.chats, clock=clock)
        async with host:
            yield Opened(stores, host, chats, log)


def went_on(old: Old, run_id: str, run: dict[str, Any], last: str) -> list[str]:
    """What is wrong with the events of a run that went on: old ones changed, gaps, another end than one last event."""
    before, events = old.run(run_id)["events"], run["events"]
    ends = [one[2] for one in events[len(before) :] if one[2] in ("run.completed", "run.failed", "run.halted")]
    found = [] if events[: len(before)] == before else ["events that were there have changed"]
    found += [] if [one[0] for one in events] == list(range(1, len(events) + 1)) else ["events are missing"]
    return found + ([] if ends == [events[-1][2]] == [last] else [f"it ended with {ends}"])


async def test_everything_in_an_upgraded_database_reads_back_as_it_was_written(old: Old) -> None:
    assert await migrate(old.url) == newest_version() == await schema_version(old.url)
    async with await open_stores(old.url, clock=FixtureClock(MINUTES_LATER)) as stores:
        found = json.loads(json.dumps(await snapshot(stores)))
    assert found.keys() == old.written.keys()
    for part, content in old.written.items():
        assert found[part] == content, part
    statuses = {run["status"] for run in old.written["runs"].values()}
    assert statuses == {"queued", "running", "waiting", "parked", "completed", "failed", "halted", "cancelled"}
    assert {run_id: old.run(run_id)["status"] for run_id in OPEN_RUNS} == OPEN_RUNS
    assert old.run("large")["output"] == LARGE


async def test_the_run_of_a_killed_worker_continues_after_the_steps_in_its_journal(old: Old) -> None:
    before = old.run("interrupted")
    async with at_work(old) as service:
        run = await service.ended("interrupted")
        account = (await accounts_in(service.stores, ["interrupted"]))["run:interrupted"]
    turns = [f"thinks/agent:thinks/turn:{number}/" for number in (1, 2, 3)]
    tools = [f"{turns[1]}tool:0:t1-look", f"{turns[1]}tool:1:t1-count"]
    assert sorted(service.calls("interrupted")) == sorted([f"{turns[1]}llm:thinker", *tools, f"{turns[2]}llm:thinker"])
    assert not old.recorded().intersection(service.log)
    assert (run["status"], run["output"]) == ("completed", old.run("completed")["output"])
    assert [one[:2] for one in run["journal"][: len(before["journal"])]] == [one[:2] for one in before["journal"]]
    assert sorted(one[0] for one in run["journal"]) == sorted(one[0] for one in old.run("completed")["journal"])
    assert went_on(old, "interrupted", run, "run.completed") == []
    spent, held, _ = old.written["accounts"]["run:interrupted"][:3]
    added = 2 * CALL_NANOS + (1 + 2) * ANSWER_NANOS + LOOK_NANOS
    assert account[:3] == [spent + added, 0, held] == [run["cost"][0], 0, run["cost"][1]]


async def test_a_chat_whose_answer_was_under_way_is_answered_and_continues(old: Old) -> None:
    async with at_work(old) as service:
        run = await service.ended("chat-interrupted-1")
        before = [one.content for one in await service.chats.tree(CHAT_INTERRUPTED, owner=ANN)]
        turn = await service.chats.stream_chat(CHAT_INTERRUPTED, "And weirs?", owner=ANN, limits=AMPLE)
        answer = await turn.result()
    assert not old.recorded().intersection(service.log)
    assert went_on(old, "chat-interrupted-1", run, "run.completed") == []
    assert before == ["Which dams?", run["output"]] == ["Which dams?", "<Which dams? saw 0 saw 1>"]
    assert (answer.content, answer.data["state"]) == ("<Which dams? And weirs? saw 0 saw 1>", "complete")


async def test_a_chat_with_branches_continues_on_the_one_in_view_and_on_any_other(old: Old) -> None:
    messages = old.written["chats"][CHAT]["messages"]
    question, _, _, in_view, retried, edited, rivers = (message[0] for message in messages)
    async with at_work(old) as service:
        chats = service.chats
        tree = await chats.tree(CHAT, owner=ANN)
        assert [one.id for one in tree.active_path()][-1] == in_view
        assert [one.id for one in tree.siblings(edited)] == [question, edited]
        texts = {}
        turn = await chats.stream_chat(CHAT, "More?", owner=ANN, limits=AMPLE)
        texts["in view"] = (await turn.result()).content
        assert (await chats.tree(CHAT, owner=ANN))[str(turn.user_message_id)].parent_id == in_view
        turn = await chats.stream_chat(CHAT, "More?", owner=ANN, parent_id=retried, limits=AMPLE)
        texts["retried"] = (await turn.result()).content
        turn = await chats.retry_message(CHAT, rivers, owner=ANN, limits=AMPLE)
        texts["rivers"] = (await turn.result()).content
        turn = await chats.edit_user_message(CHAT, edited, "Which lakes?", owner=ANN, limits=AMPLE)
        texts["lakes"] = (await turn.result()).content
        kept = (await snapshot(service.stores))["chats"][CHAT]["messages"]
    attached = "\n[dams.txt is attached:]\nHoover, Itaipu"
    assert texts == {
        "in view": f"<Which?{attached} And weirs? More? saw 0 saw 1>",
        "retried": f"<Which?{attached} More? saw 0 saw 1>",
        "rivers": f"<Which rivers?{attached} saw 0 saw 1>",
        "lakes": f"<Which lakes?{attached} saw 0 saw 1>",
    }
    assert kept[: len(messages)] == messages


@pytest.mark.parametrize(("run_id", "about"), [("waiting", "the dams"), ("parked", "the weirs")])
async def test_a_run_that_waits_for_an_approval_continues_when_it_is_approved(
    run_id: str, about: str, old: Old
) -> None:
    async with at_work(old) as service:
        await service.approve(run_id)
        run = await service.ended(run_id)
    assert service.calls(run_id) == ["writer/llm:thinker"]
    assert (run["status"], run["output"]) == ("completed", f"<<{about}>>")
    assert run["cost"][:2] == [2 * CALL_NANOS, 0]
    assert went_on(old, run_id, run, "run.completed") == []


async def test_a_queued_run_runs_the_version_of_its_graph_that_it_was_submitted_for(old: Old) -> None:
    async with at_work(old) as service:
        run = await service.ended("queued")
        saved = [
            (await service.stores.graphs.save("versioned", ANN, f"versioned {n}", versioned(n), now_ms=0)).version
            for n in (3, 4)
        ]
        await service.host.submit(owner=ANN, graph_id="versioned", input="y", limits=AMPLE, run_id="newest")
        newest = await service.ended("newest")
    assert (run["status"], run["output"], run["graph"]) == ("completed", "<version 2: x>", ["versioned", 2])
    assert went_on(old, "queued", run, "run.completed") == []
    assert (saved, newest["output"]) == ([3, 4], "<version 4: y>")


async def test_a_halted_run_continues_after_a_grant_and_a_failed_run_after_a_resume(old: Old) -> None:
    async with at_work(old) as service:
        await service.host.grant("halted", RunLimits(max_api_calls=5), by=BOB)
        await service.host.resume("failed")
        halted, failed = await service.ended("halted"), await service.ended("failed")
    assert not old.recorded().intersection(service.log)
    assert (halted["status"], halted["output"]) == ("completed", old.run("completed")["output"])
    assert (failed["status"], failed["output"]) == ("completed", "sent <the dams>")
    assert service.calls("failed") == ["send/llm:courier"]
    assert went_on(old, "halted", halted, "run.completed") + went_on(old, "failed", failed, "run.completed") == []


async def test_a_completed_run_is_replayed_from_its_journal_and_forked_from_a_node(old: Old) -> None:
    async with at_work(old) as service:
        replayed = await service.host.wait((await service.host.replay("completed", owner=ANN)).id)
        assert not [key for key in service.log if key.startswith(replayed.id)]
        await service.host.fork("large", owner=BOB, at="long", run_id_new="large-again")
        forked = await service.ended("large-again")
    assert (replayed.status, replayed.output) == ("completed", old.run("completed")["output"])
    assert (forked["status"], forked["output"]) == ("completed", LARGE)


async def test_a_cancel_request_for_a_run_that_was_not_submitted_yet_still_counts(old: Old) -> None:
    async with at_work(old) as service:
        await service.host.submit(owner=ANN, graph_id="steps", input="x", limits=AMPLE, run_id=CANCELLED_EARLY)
        run = await service.ended(CANCELLED_EARLY)
    assert (run["status"], run["error"], service.calls(CANCELLED_EARLY)) == ("cancelled", "never mind", [])


async def test_day_budgets_count_what_was_spent_before_the_upgrade(old: Old) -> None:
    users = {owner: f"user:{owner}:{DAY}" for owner in (ANN, BOB)}
    async with at_work(old) as service:
        for run_id in ("waiting", "parked"):
            await service.approve(run_id)
        for run_id in OPEN_RUNS:
            assert (await service.ended(run_id))["status"] == "completed"
        runs = (await snapshot(service.stores))["runs"]
        after = await accounts_in(service.stores, [])
    for owner, name in users.items():
        cost = sum(run["cost"][0] for run in runs.values() if run["owner"] == owner)
        unresolved = sum(run["cost"][1] for run in runs.values() if run["owner"] == owner)
        assert after[name][:3] == [cost, 0, unresolved]
        assert after[name][SPENT] > old.written["accounts"][name][SPENT] > 0
    assert after[f"all:{DAY}"] == [
        sum(figures) for figures in zip(*(after[name] for name in users.values()), strict=True)
    ]
    spent = after[users[ANN]]
    async with at_work(old, owner_daily_usd=f"{(spent[SPENT] + spent[UNRESOLVED] + 1) / 1e9:.9f}") as service:
        for owner in (ANN, BOB):
            await service.host.submit(owner=owner, graph_id="versioned", input="x", limits=AMPLE, run_id=f"of-{owner}")
        of_ann, of_bob = await service.ended("of-ann"), await service.ended("of-bob")
    assert (of_ann["status"], service.calls("of-ann")) == ("halted", [])
    assert users[ANN] in of_ann["error"]
    assert of_bob["status"] == "completed"
