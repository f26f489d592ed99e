"""What a client sees is the same whichever engine gets the runs to workers, and wherever these are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.agents.scripted import ScriptedModel
from penstock.hosting.host import CancelResult
from tests.engines.fleet import SETTINGS, Fleet, fleet_of
from tests.engines.temporal_server import TemporalServer, temporal_server
from tests.hosting.graphs import graph
from tests.storage.postgres import postgres_server, postgres_url

__all__ = ["postgres_server", "postgres_url", "temporal_server"]

KINDS = ("sqlite", "postgres", "postgres+temporal")
Opened = Callable[[], AbstractAsyncContextManager[Fleet]]


@pytest.fixture(params=KINDS)
def opened(
    request: pytest.FixtureRequest, tmp_path: Path, postgres_server: str, temporal_server: TemporalServer
) -> Opened:
    """Opens a fleet of each kind."""
    kind: str = request.param
    url = f"sqlite:///{tmp_path / 'runs.db'}" if kind == "sqlite" else request.getfixturevalue("postgres_url")
    temporal = temporal_server.url() if kind.endswith("temporal") else None

    @asynccontextmanager
    async def open_fleet() -> AsyncIterator[Fleet]:
        async with fleet_of(url, temporal) as fleet:
            yield fleet

    return open_fleet


MODEL = graph(
    ("in", "input", {}),
    ("ask", "llm-completion", {"model": "m"}),
    ("gate", "gate", {}),
    ("out", "output", {}),
    edges="in>ask ask>gate gate>out",
)
CHAT = graph(("start", "chat-start", {}), ("ask", "llm-completion", {"model": "m"}), edges="start>ask")


@pytest.mark.requirement("X-4")
async def test_runs_are_submitted_cancelled_granted_forked_and_replayed(opened: Opened) -> None:
    async with opened() as fleet:
        front = fleet.front
        await front.submit(owner="ann", graph_id="echo", run_id="early", input="x")
        assert await front.cancel("early", reason="enough") is CancelResult.CANCELLED
        await fleet.worker()
        # Submitted twice, it is one run.
        for _ in range(2):
            await front.submit(owner="ann", graph_id="gate", run_id="twice", input="x")
        await fleet.gate.has_come(1)
        await front.submit(owner="ann", graph_id="gate", run_id="twice", input="x")
        # Cancelled while it runs, and after its end.
        await front.submit(owner="ann", graph_id="gate", run_id="during", input="x")
        await fleet.gate.has_come(2)
        assert await front.cancel("during", reason="enough") is CancelResult.CANCELLED
        fleet.gate.opened.set()
        assert (await front.wait("twice")).output == "x"
        assert await front.cancel("twice") is CancelResult.ENDED
        for run_id in ("early", "during"):
            left = await front.wait(run_id)
            assert (left.status, left.error) == ("cancelled", "enough")
        # Halted, and granted more.
        await front.submit(owner="ann", graph_id="echo", run_id="halted", input="y", limits={"max_steps": 1})
        assert (await front.wait("halted")).status == "halted"
        await front.grant("halted", {"max_steps": 10}, by="bob")
        assert (await front.wait("halted")).output == "y"
        # Forked and replayed.
        fork = await front.fork("twice", owner="ann", at="out", run_id_new="fork")
        replay = await front.replay("twice", owner="ann")
        for run in (fork, replay):
            assert (await front.wait(run.id)).output == "x"
        assert fleet.gate.came == 2
        for run_id in ("early", "twice", "during", "halted", "fork", replay.id):
            events = await fleet.stores.events.read(run_id)
            assert [event.seq for event in events] == [*range(1, len(events) + 1)]
            assert sum(event.type in ENDS for event in events) == (2 if run_id == "halted" else 1), run_id


ENDS = frozenset({"run.completed", "run.failed", "run.halted", "run.cancelled"})


async def test_an_approval_is_answered_after_its_worker_was_replaced(opened: Opened) -> None:
    async with opened() as fleet:
        first = await fleet.worker("first")
        await fleet.front.submit(owner="ann", graph_id="ask", run_id="r", input="it")
        await fleet.until("r", "waiting")
        await fleet.close(first)
        await fleet.worker("second")
        (approval,) = await fleet.stores.approvals.list(run_id="r")
        await fleet.front.answer(approval.id, "approved", by="bob")
        left = await fleet.front.wait("r")
        assert (left.status, left.output, left.crash_count) == ("completed", "it", 0)


@pytest.mark.requirement("X-4")
async def test_a_closing_worker_leaves_its_run_and_nothing_is_called_twice(opened: Opened) -> None:
    model = ScriptedModel(["answer"])
    services = {"models": {"m": model}}
    async with opened() as fleet:
        await fleet.stores.graphs.save("model", "ann", "model", MODEL, now_ms=0)
        first = await fleet.worker("first", services=services)
        await fleet.front.submit(owner="ann", graph_id="model", run_id="r", input="x")
        await fleet.gate.has_come(1)
        await fleet.worker("second", services=services)
        await fleet.close(first)
        await fleet.gate.has_come(2)
        fleet.gate.opened.set()
        left = await fleet.front.wait("r")
        assert (left.status, left.output, left.epoch, left.crash_count) == ("completed", "answer", 2, 0)
        assert model.calls == 1, "its answer is in the journal"


async def test_a_chat_is_answered_by_a_worker(opened: Opened) -> None:
    async with opened() as fleet:
        await fleet.stores.graphs.save("chat", "ann", "chat", CHAT, now_ms=0)
        await fleet.worker(services={"models": {"m": ScriptedModel(["hello", "again"])}})
        chat = await fleet.chats.create_chat(owner="ann", graph_id="chat")
        for text, expected in (("hi", "hello"), ("and", "again")):
            turn = await fleet.chats.stream_chat(chat.id, text, owner="ann")
            left = await fleet.front.wait(turn.run.id)
            assert (left.status, left.output) == ("completed", expected)


@pytest.mark.requirement("X-4")
async def test_a_run_that_ends_while_its_worker_drains_stays_there(opened: Opened) -> None:
    async with opened() as fleet:
        first = await fleet.worker("first", settings=replace(SETTINGS, drain_s=30))
        await fleet.front.submit(owner="ann", graph_id="gate", run_id="r", input="x")
        await fleet.gate.has_come(1)
        closing = asyncio.create_task(fleet.close(first))
        await asyncio.sleep(0)
        await fleet.front.submit(owner="ann", graph_id="echo", run_id="later", input="x")
        fleet.gate.opened.set()
        await closing
        left = await fleet.run("r")
        assert (left.status, left.epoch, fleet.gate.came) == ("completed", 1, 1)
        await fleet.worker("second")
        assert (await fleet.front.wait("later")).status == "completed"


@pytest.mark.requirement("X-4")
async def test_a_run_that_is_dispatched_many_times_at_any_moment_runs_once(opened: Opened) -> None:
    async with opened() as fleet:
        await fleet.worker("first")
        await fleet.worker("second")

        async def dispatched() -> None:
            """What sweepers of many hosts do to a run that they take for lost."""
            run = await fleet.run("r")
            if fleet.front._engine is not None:
                await asyncio.gather(*(fleet.front._engine.dispatch(run) for _ in range(10)))
                await asyncio.gather(*(fleet.front._engine.nudge(run, "answer") for _ in range(5)))

        await asyncio.gather(
            *(fleet.front.submit(owner="ann", graph_id="gate", run_id="r", input="x") for _ in range(10))
        )
        await dispatched()
        await fleet.gate.has_come(1)
        await dispatched()
        fleet.gate.opened.set()
        assert (await fleet.front.wait("r")).output == "x"
        await dispatched()
        await fleet.front.submit(owner="ann", graph_id="echo", run_id="after", input="x")
        assert (await fleet.front.wait("after")).status == "completed"
        left = await fleet.run("r")
        assert (left.status, left.epoch, left.crash_count, fleet.gate.came) == ("completed", 1, 0, 1)
        assert (await fleet.types("r")).count("run.completed") == 1
