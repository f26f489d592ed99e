"""Runs that an engine dispatches to this host, and runs that the engine may not know of.

An engine gives a host the id of a run and a fence. The host takes the run from the store under that fence and works on
it as on any other; nothing of the run itself passes through the engine. The host declines a run if it lacks a model,
tool or node type of the graph, or has a program only in an earlier version. Another host may be able to work on the
run, and the run's events report what is missing.

A run is stored first, and then dispatched by another system: a process that dies in between leaves a row without work.
Every host looks for such rows and dispatches them again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress

from penstock.hosting.control import Control, RunNotFound, append_event
from penstock.hosting.engine import CannotWork, Ended, Fence, Leaving, Waiting, WorkResult
from penstock.hosting.host_context import HostContext
from penstock.hosting.hosted_run import HostedRun
from penstock.hosting.ports import (
    CLAIMED,
    ENDED,
    PARKED,
    QUEUED,
    ApprovalState,
    Conflict,
    Fenced,
    RunRecord,
    RunStatus,
    StoreCorrupt,
    TransactionStores,
)
from penstock.hosting.queue import ActiveRuns
from penstock.nodes.checking import NOT_OFFERED, DocumentCheck, check_document
from penstock.nodes.program import SERVICE as PROGRAMS
from penstock.nodes.program import fingerprints_in, fingerprints_of
from penstock.runtime.graphs.graph_runtime import aside

UNKNOWN_TYPE = "unknown_type"
"""Problem code of a node type that this host has no executor for."""
RUNNING: Sequence[RunStatus] = ("running",)
UNANSWERED: Sequence[ApprovalState] = ("waiting",)
MAX_CHECKS = 256
MAX_VERSIONS = 100
"""Maximum number of earlier versions of a graph that are searched for a program."""
PARKING_S = 2.0
"""How long a run may take to be parked after the engine has cancelled the work on it."""
REDISPATCH_S = 30.0
"""A row without work is dispatched again after this time."""
MAX_SHOWN = 500
FIRST_WAIT_MS, MAX_WAIT_MS = 500, 30_000
"""First and longest pause before a run is tried again while its owner is at the limit of concurrent runs."""


class DispatchedWork:
    """The work of one host on the runs that an engine dispatches to it; see `engine.Work`."""

    def __init__(self, context: HostContext, runs: ActiveRuns, control: Control, database: str) -> None:
        self._context = context
        self._runs = runs
        self._control = control
        self.worker = context.worker
        self.database = database
        self.slots = context.settings.max_running
        self._checks: dict[tuple[str, int], DocumentCheck] = {}
        self._outdated: dict[tuple[str, int], Sequence[str]] = {}
        self._idle_since_ms: dict[HostedRun, int] = {}
        """When each run that only waits for answers began to wait."""
        self._idle: set[str] = set()
        """Runs that are being parked because they only wait for answers."""

    async def __call__(self, run_id: str, fence: Fence, queue: str) -> WorkResult:
        taken = await self._take(run_id, fence, queue)
        if not isinstance(taken, RunRecord):
            return taken
        task = self._runs.begin(taken)
        hosted = self._runs.by_id[run_id]
        try:
            left = await asyncio.shield(task)
        except asyncio.CancelledError:
            hosted.park()
            await asyncio.wait((task,), timeout=PARKING_S)
            raise
        finally:
            self._idle_since_ms.pop(hosted, None)
        was_idle = run_id in self._idle
        self._idle.discard(run_id)
        return await self._result(taken, left, was_idle=was_idle)

    async def cancel(self, run_id: str, reason: str) -> None:
        """Cancel a run, because someone cancelled it in the engine's own tools."""
        await self._control.cancel(run_id, reason, "engine", None)

    async def _take(self, run_id: str, fence: Fence, queue: str) -> RunRecord | WorkResult:
        """Take the run under this fence; if there is nothing to work on now, return the result of the work."""
        context = self._context
        try:
            run = await context.stores.runs.get(run_id)
        except StoreCorrupt as error:
            await context.stores.runs.fail_unreadable(run_id, error, now_ms=context.now_ms())
            return Ended("failed")
        if run is None or run.status in ENDED:
            return Ended("" if run is None else run.status)
        missing = await self._missing(run)
        if missing:
            await self._report(run, missing)
            raise CannotWork(f"{context.worker} cannot work on it: {'; '.join(missing)}"[:MAX_SHOWN])
        if run.status in PARKED:
            try:
                run = await self._control.resume(run_id, statuses=PARKED)
            except (Conflict, RunNotFound):  # resumed or ended at this moment, and dispatched there
                return Leaving()
        return await self._taken(run, fence, queue)

    async def _taken(self, run: RunRecord, fence: Fence, queue: str) -> RunRecord | WorkResult:
        context = self._context
        lease_ms = round(context.settings.lease_s * 1_000)

        async def unit(stores: TransactionStores) -> RunRecord | None:
            if run.status in QUEUED:
                running = await stores.runs.count(owner=run.owner, statuses=RUNNING)
                if running >= context.settings.max_running_per_owner:
                    return run
            return await stores.runs.take(
                run.id, context.worker, fence.number, queue=queue, now_ms=context.now_ms(), lease_ms=lease_ms
            )

        taken = await context.stores.transaction(unit, inline=True)
        if taken is run:
            pause_ms = min(FIRST_WAIT_MS << min(fence.stretch, 10), MAX_WAIT_MS)
            return Waiting(context.now_ms() + pause_ms)
        if taken is None:
            now = await context.stores.runs.get(run.id)
            return Ended(now.status if now is not None and now.status in ENDED else "")
        return taken

    async def _result(self, run: RunRecord, left: RunRecord | None, *, was_idle: bool) -> WorkResult:
        if left is None:
            now = await self._context.stores.runs.get(run.id)
            if now is not None and now.status in CLAIMED and now.epoch == run.epoch:
                raise CannotWork(f"{self.worker} could not finish it; its log says why")
            return Ended(now.status if now is not None and now.status in ENDED else "")
        if left.status != "parked":
            return Ended(left.status)
        # An answer that arrived while the run was being parked was delivered to it here, without a nudge to the engine.
        if was_idle and await self._context.stores.approvals.list(run_id=run.id, states=UNANSWERED, limit=1):
            return Waiting()
        return Leaving()

    # Runs that wait for people leave their worker.

    def park_idle(self) -> None:
        """Park the runs that only wait for answers, and have for a while."""
        now_ms, most_ms = self._context.now_ms(), self._context.settings.park_waiting_s * 1_000
        for run_id, hosted in self._runs.by_id.items():
            if not hosted.is_idle:
                self._idle_since_ms.pop(hosted, None)
            elif now_ms - self._idle_since_ms.setdefault(hosted, now_ms) >= most_ms:
                self._idle.add(run_id)
                hosted.park()

    # Types and programs that this host lacks.

    async def _missing(self, run: RunRecord) -> Sequence[str]:
        """Return a description of each thing that this host lacks to work on the run; empty if nothing is missing."""
        check = self._checks.get((run.graph_id, run.graph_version)) or await self._checked(run)
        missing = [
            problem.detail
            for problem in check.problems_with(self._context.services)
            if problem.code in NOT_OFFERED or problem.code == UNKNOWN_TYPE
        ]
        return missing or await self._outdated_programs(run)

    async def _outdated_programs(self, run: RunRecord) -> Sequence[str]:
        """Return a description of each program that this host has in the version of an earlier graph version.

        Such a host has not been updated yet. A host whose programs are newer than the run, or were never saved, works
        on it: the run's event `program_changed` reports the difference.
        """
        key, graphs = (run.graph_id, run.graph_version), self._context.stores.graphs
        if key not in self._outdated:
            programs = self._context.services.get(PROGRAMS)
            here = fingerprints_of(programs) if isinstance(programs, Mapping) else {}
            graph = await graphs.get(*key) if here else None
            wanted = {} if graph is None else fingerprints_in(graph.document)
            other = {name for name, fingerprint in wanted.items() if here.get(name, fingerprint) != fingerprint}
            found: dict[str, str] = {}
            for version in range(run.graph_version - 1, max(0, run.graph_version - MAX_VERSIONS), -1):
                if not other - found.keys():
                    break
                earlier = await graphs.get(run.graph_id, version)
                had = {} if earlier is None else fingerprints_in(earlier.document)
                for name in other - found.keys():
                    if had.get(name) == here[name]:
                        found[name] = (
                            f"program {name!r} is that of version {version} of the graph here, and the run needs "
                            f"version {run.graph_version}: update this worker"
                        )
            if len(self._outdated) >= MAX_CHECKS:
                self._outdated.clear()
            self._outdated[key] = [*found.values()]
        return self._outdated[key]

    async def _checked(self, run: RunRecord) -> DocumentCheck:
        """Check the graph of a run; the result is cached, unless a missing node type may still be registered."""
        key = run.graph_id, run.graph_version
        graph = await self._context.stores.graphs.get(*key)
        if graph is None:
            return DocumentCheck(())  # the run fails with it
        check = await aside(graph.document, lambda spec: check_document(spec, self._context.executors))
        if check.names_providers:
            check = await asyncio.to_thread(check.with_providers)
        if UNKNOWN_TYPE not in {problem.code for problem in check.problems}:
            if len(self._checks) >= MAX_CHECKS:
                self._checks.clear()
            self._checks[key] = check
        return check

    async def _report(self, run: RunRecord, missing: Sequence[str]) -> None:
        """Emit an event with what a queued run waits for, unless its last event reports the same."""
        if run.status not in QUEUED:
            return
        data = {"missing": [text[:MAX_SHOWN] for text in missing]}

        async def unit(stores: TransactionStores) -> None:
            seq = await stores.events.last_seq(run.id)
            last = (await stores.events.read(run.id, seq - 1, 1))[-1] if seq else None
            if last is None or last.data.get("missing") != data["missing"]:
                await append_event(stores, run, last, "run.queued", data, self._context.now_ms())

        with suppress(Conflict, Fenced):  # another worker has taken the run, or reported the same, at this moment
            await self._context.stores.transaction(unit)


class Sweeper:
    """Finds runs that no host works on, and that the engine may not know of."""

    def __init__(self, context: HostContext) -> None:
        self._context = context
        self._seen_ms: dict[tuple[str, RunStatus, int], int] = {}
        """When each row was first seen in its current state, by id, status and epoch."""

    async def without_work(self) -> Sequence[RunRecord]:
        """Return the runs that have been without work for `REDISPATCH_S`; each is returned again at that interval."""
        now_ms, limit = self._context.now_ms(), self._context.settings.max_queued
        runs = self._context.stores.runs
        rows = [*await runs.list(statuses=QUEUED | PARKED, limit=limit)]
        rows += [run for run in await runs.list(statuses=CLAIMED, limit=limit) if run.lease_until_ms < now_ms]
        seen = {(run.id, run.status, run.epoch): run for run in rows}
        self._seen_ms = {key: self._seen_ms.get(key, now_ms) for key in seen}
        found = []
        for key, run in seen.items():
            if now_ms - self._seen_ms[key] >= REDISPATCH_S * 1_000 and not await self._waits(run):
                self._seen_ms[key] = now_ms
                found.append(run)
        return found

    async def _waits(self, run: RunRecord) -> bool:
        """Whether the run waits for people, so that there is no work until one of them answers."""
        if run.status not in PARKED:
            return False
        return bool(await self._context.stores.approvals.list(run_id=run.id, states=UNANSWERED, limit=1))
