"""What only Temporal adds: histories without contents, its own tools, and servers that are away or wrong."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError, WorkflowHistory
from temporalio.worker import Replayer
from temporalio.workflow import NondeterminismError

from penstock import Graph
from penstock.agents.scripted import ScriptedModel
from penstock.engines.temporal import TemporalEngine, TemporalSettings
from penstock.engines.temporal.engine import POLLS, SANDBOX, task_queue, workflow_id
from penstock.engines.temporal.workflow import RunWorkflow
from penstock.hosting import dispatched
from penstock.hosting.engine import EngineUnavailable
from penstock.hosting.ports import USUAL_PRIORITY
from penstock.nodes.program import Program
from tests.engines.fleet import SETTINGS, Fleet, fleet_of
from tests.engines.temporal_server import TemporalServer, free_port, release_calls, running_server, temporal_server
from tests.hosting.graphs import graph
from tests.storage.postgres import postgres_schemas, postgres_server, postgres_url

__all__ = ["postgres_schemas", "postgres_server", "postgres_url", "temporal_server"]

CANARY = "canary-7f3a"
MAX_EVENTS = 15
SHORT = "penstock.engines.temporal.workflow.MAX_WAITS"
HISTORIES = Path(__file__).parent / "histories"
OUT = ("out", "output", {})


def client_of(fleet: Fleet) -> Any:
    engine = fleet.front._engine
    assert isinstance(engine, TemporalEngine)
    return engine._client


async def on_temporal(fleet: Fleet, call: Callable[[], Awaitable[Any]]) -> Any:
    """Await a call of the client library where its client lives."""
    engine = fleet.front._engine
    assert isinstance(engine, TemporalEngine)
    assert engine._thread is not None

    async def called() -> Any:
        return await call()

    return await engine._thread.result(called())


async def id_of(fleet: Fleet, run_id: str) -> str:
    return workflow_id(await fleet.stores.runs.database_id(), run_id)


async def history_of(fleet: Fleet, run_id: str) -> WorkflowHistory:
    """The history of a run's newest workflow, once it is over."""
    handle = client_of(fleet).get_workflow_handle(await id_of(fleet, run_id))

    async def fetch() -> WorkflowHistory:
        await handle.result()
        history: WorkflowHistory = await handle.fetch_history()
        return history

    found: WorkflowHistory = await on_temporal(fleet, fetch)
    return found


def recorded(name: str, history: WorkflowHistory) -> None:
    """Keep a history of this version for the tests of later ones, under `UPDATE_SNAPSHOTS=1`."""
    if os.environ.get("UPDATE_SNAPSHOTS"):
        HISTORIES.mkdir(exist_ok=True)
        kept = json.loads(re.sub(r"\b\d+@[\w.-]+", "client", history.to_json()), object_hook=_without_places)
        text = json.dumps(kept, indent=1)
        (HISTORIES / f"{name}.json").write_text(f"{text}\n")


def _without_places(found: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key != "stackTrace"}


async def test_recorded_histories_are_replayed_by_the_workflow_of_today(
    temporal_server: TemporalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that waits for months is continued by newer workers: what its history has is what they would do, too."""
    names = ["plain", "broken", "waits", "poor", "cancelled", "continued"]
    assert {file.stem for file in HISTORIES.glob("*.json")} == {*names}
    histories = {name: WorkflowHistory.from_json(name, (HISTORIES / f"{name}.json").read_text()) for name in names}
    await replayed([histories[name] for name in names[:-1]])
    with monkeypatch.context() as patch:
        patch.setattr(SHORT, 2)
        await replayed([histories["continued"]])
    # What this would find: a workflow that does something else.
    monkeypatch.setattr(RunWorkflow, "_show", lambda self, status: None)
    with pytest.raises(NondeterminismError):
        await replayed([histories["waits"]])


async def replayed(histories: list[WorkflowHistory]) -> None:
    """Replay histories with the workflow as it is now; raises if it would do anything else."""
    replayer = Replayer(workflows=[RunWorkflow], workflow_runner=SANDBOX)
    for history in histories:
        await replayer.replay_workflow(history)


async def test_a_history_is_short_has_none_of_the_run_and_is_replayed(
    postgres_url: str, temporal_server: TemporalServer
) -> None:
    document = graph(
        ("in", "input", {}),
        ("ask", "llm-completion", {"model": "m"}),
        ("may", "approval", {"question": f"May {CANARY} {{{{ input }}}}?"}),
        OUT,
        edges="in>ask ask>may may.approved>out",
    )
    broken = graph(("in", "input", {}), ("no", "breaker", {"message": CANARY}), edges="in>no")
    poor = graph(("in", "input", {}), ("ask", "llm-completion", {"model": "rare"}), OUT, edges="in>ask ask>out")
    async with fleet_of(postgres_url, temporal_server.url()) as fleet:
        front = fleet.front
        for name, one in (("model", document), ("broken", broken), ("poor", poor)):
            await fleet.stores.graphs.save(name, "ann", name, one, now_ms=0)
        worker = await fleet.worker(services={"models": {"m": ScriptedModel([f"{CANARY} says"])}})
        await front.submit(owner="ann", graph_id="echo", run_id="plain", input=CANARY)
        await front.submit(owner="ann", graph_id="broken", run_id="broken", input=CANARY)
        await front.submit(owner="ann", graph_id="model", run_id="waits", input=CANARY)
        await front.submit(owner="ann", graph_id="poor", run_id="poor", input=CANARY)
        assert (await front.wait("plain")).output == CANARY
        assert (await front.wait("broken")).status == "failed"
        await fleet.until("waits", "parked")
        (approval,) = await fleet.stores.approvals.list(run_id="waits")
        await front.answer(approval.id, "edited", answer=f"{CANARY} edited", by="bob")
        assert (await front.wait("waits")).output == f"{CANARY} edited"
        while not (await fleet.stores.events.read("poor"))[-1].data.get("missing"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await fleet.close(worker)
        await fleet.worker(services={"models": {"rare": ScriptedModel([CANARY])}})
        assert (await front.wait("poor")).output == CANARY
        histories = [await history_of(fleet, run_id) for run_id in ("plain", "broken", "waits", "poor")]
        described = await on_temporal(fleet, client_of(fleet).get_workflow_handle(await id_of(fleet, "plain")).describe)
    for name, history in zip(("plain", "broken", "waits", "poor"), histories, strict=True):
        recorded(name, history)
    found = described.typed_search_attributes.search_attributes
    shown = {pair.key.name: pair.value for pair in found if pair.key.name.startswith("Penstock")}
    assert shown == {"PenstockGraph": "echo", "PenstockOwner": "ann", "PenstockStatus": "completed"}
    assert len(histories[0].events) <= MAX_EVENTS
    for history in histories:
        assert CANARY not in history.to_json()
        assert CANARY.encode() not in b"".join(event.SerializeToString() for event in history.events)
        assert "penstock.work" in history.to_json(), "it is the history of the run"
    await replayed(histories)


async def test_a_run_whose_workflow_is_cancelled_is_cancelled(
    postgres_url: str, temporal_server: TemporalServer
) -> None:
    async with fleet_of(postgres_url, temporal_server.url()) as fleet:
        await fleet.worker()
        await fleet.front.submit(owner="ann", graph_id="gate", run_id="runs", input="x")
        await fleet.front.submit(owner="ann", graph_id="ask", run_id="waits", input="x")
        await fleet.gate.has_come(1)
        await fleet.until("waits", "parked")
        for run_id in ("runs", "waits"):
            handle = client_of(fleet).get_workflow_handle(await id_of(fleet, run_id))
            await on_temporal(fleet, handle.cancel)
        for run_id in ("runs", "waits"):
            left = await fleet.until(run_id, "cancelled")
            assert left.error == "cancelled in Temporal"
        handle = client_of(fleet).get_workflow_handle(await id_of(fleet, "waits"))
        with pytest.raises(WorkflowFailureError):
            await on_temporal(fleet, handle.result)
        history = await on_temporal(fleet, handle.fetch_history)
    recorded("cancelled", history)
    await replayed([history])


async def test_a_long_wait_continues_as_a_new_workflow(
    postgres_url: str, temporal_server: TemporalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SHORT, 2)
    monkeypatch.setattr(dispatched, "FIRST_WAIT_MS", 1)
    settings = replace(SETTINGS, max_running_per_owner=1)
    async with fleet_of(postgres_url, temporal_server.url()) as fleet:
        await fleet.worker(settings=settings)
        await fleet.front.submit(owner="ann", graph_id="gate", run_id="first", input="x")
        await fleet.gate.has_come(1)
        await fleet.front.submit(owner="ann", graph_id="gate", run_id="second", input="x")
        handle = client_of(fleet).get_workflow_handle(await id_of(fleet, "second"))
        first = (await on_temporal(fleet, handle.describe)).run_id
        while (now := (await on_temporal(fleet, handle.describe)).run_id) == first:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        fleet.gate.opened.set()
        assert (await fleet.front.wait("second")).status == "completed"
        old = client_of(fleet).get_workflow_handle(await id_of(fleet, "second"), run_id=first)
        status = (await on_temporal(fleet, old.describe)).status
        history = await on_temporal(fleet, old.fetch_history)
        recorded("continued", history)
        assert (status, first == now) == (WorkflowExecutionStatus.CONTINUED_AS_NEW, False)


async def test_a_run_goes_to_workers_of_its_queue_only(postgres_url: str, temporal_server: TemporalServer) -> None:
    async with fleet_of(postgres_url, temporal_server.url()) as fleet:
        gpu = await fleet.worker("gpu", "gpu")
        run = await fleet.front.submit(owner="ann", graph_id="echo", run_id="r", input="x", queue="gpu", priority=1)
        assert (run.queue, run.priority) == ("gpu", 1)
        await fleet.front.submit(owner="ann", graph_id="echo", run_id="other", input="x")
        left = await fleet.front.wait("r")
        assert (left.status, gpu.stats()["totals"]["claimed"]) == ("completed", 1)
        assert (await fleet.run("other")).status == "queued"
        health = await fleet.front.engine_health()
        assert not health.is_ok
        assert health.found == f"no worker takes runs from {fleet.queue}; start penstock worker"
        await fleet.worker("usual", fleet.queue, "other")
        assert (await fleet.front.wait("other")).status == "completed"
        assert (await fleet.front.engine_health()).is_ok


async def test_two_fleets_on_one_queue_are_noticed_and_lose_nothing(
    postgres_url: str,
    postgres_schemas: Callable[[], str],
    temporal_server: TemporalServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    other_url = await asyncio.to_thread(postgres_schemas)
    async with (
        fleet_of(postgres_url, temporal_server.url()) as ours,
        fleet_of(other_url, temporal_server.url()) as theirs,
    ):
        with caplog.at_level(logging.ERROR, "penstock.engines"):
            await theirs.worker("theirs", ours.queue)
            await ours.front.submit(owner="ann", graph_id="echo", run_id="r", input="x")
            while not caplog.records:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert "theirs works with another database" in caplog.text
        assert f"two fleets use the task queue {ours.queue!r}" in caplog.text
        assert (await ours.run("r")).status == "queued"
        await ours.worker("ours")
        assert (await ours.front.wait("r")).status == "completed"


async def test_a_worker_that_was_not_updated_leaves_newer_runs_to_others(
    postgres_url: str, temporal_server: TemporalServer
) -> None:
    old, new = Program.of(publisher("old")), Program.of(publisher("old", "new"))
    async with fleet_of(postgres_url, temporal_server.url()) as fleet:
        for program in (old, new):
            await fleet.stores.graphs.save("publisher", "ann", "publisher", program.document(), now_ms=0)
        await fleet.worker("old", services={"programs": {"publisher": old}})
        first = await fleet.front.submit(owner="ann", graph_id="publisher", version=1, run_id="first", input="x")
        assert ((await fleet.front.wait("first")).output, first.graph_version) == ("x, old", 1)
        await fleet.front.submit(owner="ann", graph_id="publisher", run_id="second", input="x")
        while not (missing := (await fleet.stores.events.read("second"))[-1].data.get("missing")):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        (message,) = missing
        assert "'publisher' is that of version 1 of the graph here, and the run needs version 2" in message
        assert (await fleet.run("second")).status == "queued"
        await fleet.worker("new", services={"programs": {"publisher": new}})
        assert (await fleet.front.wait("second")).output == "x, old, new"


def publisher(*steps: str) -> Graph:
    """A program that adds the name of each of its steps, one after another."""
    made = Graph("publisher")
    for before, name in zip([None, *steps], steps, strict=False):
        made.step(adding(name), step_id=name, depends_on=[before] if before else [])
    return made


def adding(name: str) -> Callable[[Any], Any]:
    return lambda ctx: f"{ctx.input}, {name}"


async def test_runs_wait_while_temporal_is_away(
    postgres_url: str, temporal_server: TemporalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatched, "REDISPATCH_S", 0.2)
    monkeypatch.setattr("penstock.engines.temporal.engine.CALL_S", 0.5)
    monkeypatch.setattr("penstock.hosting.host.TIDY_S", 0.2)
    async with fleet_of(postgres_url, temporal_server.url()) as fleet:
        await fleet.worker()
        await fleet.front.submit(owner="ann", graph_id="gate", run_id="before", input="x")
        await fleet.gate.has_come(1)
        temporal_server.freeze()
        try:
            run = await fleet.front.submit(owner="ann", graph_id="echo", run_id="during", input="x")
            assert run.status == "queued"
            fleet.gate.opened.set()  # a run that a worker has does not need Temporal to end
            assert (await fleet.front.wait("before")).status == "completed"
            health = await fleet.front.engine_health()
            assert not health.is_ok
            assert "Temporal cannot be reached at" in health.found
        finally:
            temporal_server.thaw()
        assert (await fleet.front.wait("during")).status == "completed"


@pytest.mark.parametrize(
    ("scheme", "namespace", "is_there", "message"),
    [
        ("temporal:", "default", False, r"at temporal://127\.0\.0\.1:\d+/default \(Connection refused\); check"),
        ("temporals:", "default", True, r"temporals://.* \(its response is not TLS; without TLS it is temporal://\)"),
        ("temporal:", "nowhere", True, r"has no namespace 'nowhere'; create it: temporal operator namespace create"),
    ],
    ids=["not there", "not TLS", "no namespace"],
)
async def test_a_server_that_is_not_there_or_lacks_the_namespace_is_named(
    scheme: str, namespace: str, is_there: bool, message: str, temporal_server: TemporalServer
) -> None:
    class NoWork:
        worker, database, slots = "w", "d", 1

    url = temporal_server.url(namespace) if is_there else f"temporal://127.0.0.1:{free_port()}/{namespace}"
    engine = TemporalEngine(TemporalSettings.parse(url.replace("temporal:", scheme)))
    with pytest.raises(EngineUnavailable, match=message):
        await engine.start(NoWork())  # type: ignore[arg-type]
    assert not (await engine.health()).is_ok
    release_calls()


async def test_search_attributes_that_are_not_registered_are_left_out(postgres_url: str) -> None:
    with running_server() as bare:
        async with fleet_of(postgres_url, bare.url()) as fleet:
            await fleet.worker()
            await fleet.front.submit(owner="ann", graph_id="echo", run_id="r", input="x")
            assert (await fleet.front.wait("r")).status == "completed"
            history = await history_of(fleet, "r")
    assert len(history.events) <= MAX_EVENTS
    assert "PenstockOwner" not in history.to_json()


async def test_runs_of_high_priority_are_worked_on_before_those_that_were_submitted_earlier(
    postgres_url: str, temporal_server: TemporalServer
) -> None:
    async with fleet_of(postgres_url, temporal_server.url()) as fleet:
        worker = await fleet.worker(settings=replace(SETTINGS, max_running=1, max_running_per_owner=1))
        await fleet.front.submit(owner="ann", graph_id="gate", run_id="first", input="x")
        await fleet.gate.has_come(1)
        usual, urgent = ([f"{kind}-{number}" for number in range(18)] for kind in ("usual", "urgent"))
        for name in (*usual, *urgent):
            priority = 1 if name in urgent else USUAL_PRIORITY
            await fleet.front.submit(owner=name, graph_id="echo", run_id=name, input="x", priority=priority)
        while await backlog_of(fleet) < len(usual) + len(urgent) - POLLS:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        fleet.gate.opened.set()
        runs = [await fleet.front.wait(name) for name in (*usual, *urgent)]
        assert worker.stats()["totals"]["completed"] == 37
        order = [run.id for run in sorted(runs, key=lambda run: run.started_ms or 0)]
        # Temporal orders each partition of a queue by itself, so some of the others are among them. Without priorities
        # they would come last, as they were submitted.
        assert sum(map(order.index, urgent)) < sum(map(order.index, usual)), order


async def backlog_of(fleet: Fleet) -> int:
    """How many activities wait for a worker, as far as the server says."""
    request = DescribeTaskQueueRequest(
        namespace="default",
        task_queue=TaskQueue(name=task_queue(fleet.queue)),
        task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY,
        report_stats=True,
    )
    found = await on_temporal(fleet, lambda: client_of(fleet).workflow_service.describe_task_queue(request))
    return int(found.stats.approximate_backlog_count)
