"""One run on one host: from its claim to the status it is left in.

The order of the end is what makes it survive a crash anywhere: everything that was told is in the store; the kind of
run is told what became of it; the last event is written; its questions are withdrawn; the status is changed; the wish
to cancel it is dropped. A worker that takes over a run whose last event is there already does what comes after that,
and nothing else.

What becomes of a run is decided at one place, without waiting, after the last look at who wants it to stop: a cancel
that comes before finds it open, and it ends cancelled; one that comes later is told that it has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import penstock.kernel.schema  # noqa: F401  # loads pydantic, here and not on the loop of the first run
from penstock.containment.safety import ChainMetadata
from penstock.errors import CancelledError, Halted, PenstockError
from penstock.hosting.points import passing
from penstock.hosting.ports import Fenced
from penstock.hosting.records import ENDED, NO_DATA, ApprovalRecord, CancelIntent, HostedEvent, RunRecord, RunStatus
from penstock.hosting.work.approvals import RunApprovals
from penstock.hosting.work.claims import only_asks, workers_lost
from penstock.hosting.work.durable import Durable, durable_parts, paid, shorten_journal
from penstock.hosting.work.forking import plan_of
from penstock.hosting.work.halts import whose_limit
from penstock.hosting.work.log import RunLog
from penstock.hosting.work.patience import patiently
from penstock.hosting.work.tap import TraceTap
from penstock.hosting.work.told import (
    ENDINGS,
    MAX_ERROR,
    STATUS_OF,
    Told,
    clean,
    error_data,
    not_whole,
    of_cut,
    of_node,
    output_of,
    plain,
    safe,
    shown,
    spent,
    stop_data,
)
from penstock.hosting.work.workplace import Prepared, RunKind, Workplace
from penstock.money import to_nanos
from penstock.runtime.call import running_call
from penstock.runtime.cancellation import CancellationToken
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable.journal import Journal
from penstock.runtime.graphs.flow_context import FlowContext, entry_node_ids_in
from penstock.runtime.graphs.graph_plan import GraphPlan
from penstock.runtime.graphs.graph_runtime import tell_flow
from penstock.runtime.graphs.node_events import NodeEvent
from penstock.runtime.watching.registry import CancelResult
from penstock.stops import Stop, StopReason
from penstock.tracing.execution_graph import ExecutionGraph
from penstock.tracing.record import CallRecord

journal_of_failures = logging.getLogger("penstock.hosting")

TAIL = 500
"""So many of the events of a run are read at once to find the newest."""
MAX_DEATHS = 10
"""So many workers in a row may be lost at work on a run; a run that kills its process must not kill them all."""

PARKED = "the host is closing"
TAKEN_OVER = "another worker has taken this run over"


class GraphGone(PenstockError):
    """The graph of a run is not in the store."""

    def __init__(self, graph_id: str, version: int) -> None:
        self.graph_id = graph_id
        self.version = version
        super().__init__(f"there is no version {version} of graph {graph_id!r}: save it, then resume the run")


class WorkersDied(PenstockError):
    """Every worker that took a run on died, or lost it, before it had come to an end."""

    def __init__(self, run_id: str, times: int) -> None:
        self.run_id = run_id
        self.times = times
        super().__init__(f"{times} workers in a row were lost while they worked on it; resume it once that is mended")


class Outcome(NamedTuple):
    """What became of a run: the changes to its record, and the data of its last event."""

    status: RunStatus
    changes: Mapping[str, Any] = NO_DATA
    data: Mapping[str, Any] = NO_DATA


class HostedRun:
    """A run that this host has claimed."""

    def __init__(self, at: Workplace, run: RunRecord) -> None:
        self._at = at
        self.run = run
        self.token = CancellationToken(name=f"run {run.id}", clock=at.clock)
        self.log: RunLog | None = None
        self.approvals: RunApprovals | None = None
        self.is_lost = False
        """Another worker has it: nothing more is written."""
        self.decided: RunStatus | None = None
        """What it ends as, once that is certain."""
        self.is_waiting = False
        """Its status says that it waits for an answer."""
        self.gone = asyncio.Event()
        """Set when this host is done with it, and does not have it any more."""
        self._showing = asyncio.Lock()
        self._tap: TraceTap | None = None
        self._journal: Journal | None = None
        self._has_asked = False
        self._lost_before = 0
        """How many workers in a row were lost over it."""
        self._ran_in: ExecutionContext | None = None
        """Where its graph runs, or ran; None if it never came to that."""
        self._trace: ExecutionGraph | None = None
        self._asking: dict[str, CallRecord | None] = {}
        """Where in the run its questions were put, by their ids."""
        self._idle_seq = 0
        """The event that has said that it only waits."""
        self._halted_at: str | None = None
        """The first node that a stop has ended; the graph ends with it."""
        self._paid: Mapping[str, int] = {}
        """As the ledger has it, where this process does not know it all."""

    # From outside, on the loop of the host.

    def cancel(self, reason: str) -> CancelResult:
        """Stop it, if it is not over."""
        if self.decided is not None:
            return CancelResult.ENDED
        return CancelResult.CANCELLED if self.token.cancel(clean(reason)) else CancelResult.ALREADY_CANCELLED

    def park(self) -> None:
        """Stop it so that another worker can go on."""
        self.token.cancel(PARKED, cause="shutdown")

    def _is_leaving(self) -> bool:
        """Whether another worker is to go on with it."""
        cancelled = self.token.cancellation
        return cancelled is not None and cancelled.cause == "shutdown"

    def lose(self) -> None:
        """Another worker has it: stop at once."""
        if not self.is_lost:
            self.is_lost = True
            self.token.cancel(TAKEN_OVER, cause="shutdown")
            if self.log is not None:
                self.log.lose()

    def answered(self, approval: ApprovalRecord) -> None:
        """Somebody has answered a question of it."""
        if self.approvals is not None:
            self.approvals.give(approval)

    @property
    def asks(self) -> list[str]:
        """The questions that it waits for answers to."""
        return [] if self.approvals is None else list(self.approvals.waiting)

    # The work.

    async def work(self) -> RunRecord | None:
        """Run it to its end; the record as it was left, None if another worker has it."""
        try:
            return await self._worked()
        except Fenced:
            self.lose()
            return None
        finally:
            if self.log is not None:
                await self.log.close()
            self._let_go()

    def _let_go(self) -> None:
        """Keep nothing that leads back here: what a run leaves in memory goes at once."""
        self.approvals = self._tap = self._journal = self._ran_in = self._trace = None
        self._asking.clear()

    async def _worked(self) -> RunRecord:
        events, run = self._at.stores.events, self.run
        tail = await self._told_before()
        seq = tail[-1].seq if tail else 0
        if tail and tail[-1].type in STATUS_OF:
            outcome = _as_told(tail[-1])
            self.decided = outcome.status
            await self._shorten_journal(outcome)
            return await self._close(outcome)
        self._lost_before = await workers_lost(events, run)
        self.log = log = RunLog(events, run.id, run.epoch, seq, clock=self._at.steady, on_lost=self.lose)
        if not seq:
            log.tell("run.queued", at_ms=run.created_ms)
        try:
            return await self._end(await self._outcome())
        finally:
            self._at.counted["events_stored"] += log.written - seq

    async def _told_before(self) -> Sequence[HostedEvent]:
        """The newest of what was told before this claim."""
        events, run = self._at.stores.events, self.run
        if run.epoch == 1:  # it was never worked on, so that the newest are likely all
            first = await patiently(lambda: events.read(run.id, 0, TAIL))
            if len(first) < TAIL:
                return first
        seq = await patiently(lambda: events.last_seq(run.id))
        return await patiently(lambda: events.read(run.id, max(0, seq - TAIL), TAIL))

    async def _outcome(self) -> Outcome:
        """Run it, and decide what it ends as."""
        error: BaseException | None = None
        came_to: Mapping[str, Any] = {}
        task = asyncio.current_task()
        await self._look_for_cancel()
        try:
            if self._lost_before >= MAX_DEATHS:
                raise WorkersDied(self.run.id, self._lost_before)
            came_to = await self._ran()
        except asyncio.CancelledError as raised:
            if task is None or task.cancelling():
                raise
            error = raised  # nobody has cancelled this task: a node raised it
        except BaseException as raised:  # code that ends its program, or panics, is a node that raised
            if isinstance(raised, KeyboardInterrupt) or _is_closed(task):
                raise
            error = raised
        if error is not None:
            error.__traceback__ = None  # its frames lead back to it, and to the whole run
        self._paid = await paid(self._at, self.run, self._is_leaving)
        if error is None:
            await self._look_for_cancel()
        return self._decide(self._ran_in, error, came_to)

    async def _ran(self) -> Mapping[str, Any]:
        """Run its graph in a context of its own; what it came to. Afterwards, everything about it is told."""
        at, run, log = self._at, self.run, self.log
        assert log is not None
        self.token.check()
        graph = await self._graph()
        prepared = await patiently(lambda: at.prepare(run))
        durable = await durable_parts(at, run, self.lose)
        self._journal = durable.journal
        context = self._context(durable, prepared)
        passing("start.before_event")
        log.tell(*_beginning(run, durable, self._lost_before))
        if run.epoch > 1:  # should it kill its worker again, that has to be known
            await log.flush()
        later_ms = round((at.steady.time_ns() - context._run.wall_time_ns(context._run.now())) / 1_000_000)
        self._trace = context.graph
        self._tap = tap = TraceTap(context.graph, log, later_ms)
        tap.open()
        chat_id, services = run.origin.get("chat_id"), self._services(durable, prepared)
        flow_context = FlowContext(None, chat_id, run.id, None, None, services, context)
        try:
            with context:
                plan = plan_of(graph, run)
                await plan.get_ready(entry_node_ids_in(services))
                self._ran_in = context
                result = await tell_flow(plan, flow_context, self)
                return {"output": output_of(result), **not_whole(result.outputs.values())}
        finally:
            tap.close()
            context._children = None  # each of them leads back here
            await durable.settle(self._is_leaving)

    async def _graph(self) -> GraphPlan:
        at, id, version = self._at, self.run.graph_id, self.run.graph_version
        known = at.graph_of(id, version)
        if known is not None:
            return known
        graph = await patiently(lambda: at.stores.graphs.get(id, version))
        if graph is None:
            raise GraphGone(id, version)
        return await at.parsed(graph)

    def _context(self, durable: Durable, prepared: Prepared) -> ExecutionContext:
        run = self.run
        ceilings = durable.ceilings
        return ExecutionContext(
            ceilings.config,
            metadata=ChainMetadata(run.id, run.id, user_id=run.owner),
            input=prepared.input,
            budget=ceilings.budget,
            cancellation=self.token,
            prices=self._at.prices,
            clock=self._at.clock,
            journal=durable.journal,
            shared_budget=durable.shared,
        )

    def _services(self, durable: Durable, prepared: Prepared) -> Mapping[str, Any]:
        at, run = self._at, self.run
        self.approvals = RunApprovals(at.stores.approvals, run, self, at.now_ms, durable.journal.key)
        about = {"id": run.id, "owner": run.owner, "chat_id": run.origin.get("chat_id")}
        return {**at.services, "approvals": self.approvals, "run": about, **prepared.services}

    async def _look_for_cancel(self) -> None:
        cancels, id, owner = self._at.stores.cancels, self.run.id, self.run.owner
        found = await patiently(lambda: cancels.find({id: owner}, now_ms=self._at.now_ms()))
        if id in found:
            self.cancel(found[id].reason)

    # The end.

    def _decide(
        self, context: ExecutionContext | None, error: BaseException | None, came_to: Mapping[str, Any]
    ) -> Outcome:
        """What it ends as. Nothing is awaited here: who cancels comes before or after."""
        outcome = self._judged(context, error, came_to)
        self.decided = outcome.status
        used = {**_used(context), **self._paid}
        return Outcome(outcome.status, {**used, **outcome.changes}, {**outcome.data, **spent(self.run, used)})

    def _judged(
        self, context: ExecutionContext | None, error: BaseException | None, came_to: Mapping[str, Any]
    ) -> Outcome:
        cancelled = self.token.cancellation
        if cancelled is not None and cancelled.cause == "user":
            return _cancelled(cancelled.stop.message, cancelled.cause)
        if error is None:
            return Outcome("completed", {"output": came_to["output"]}, came_to)
        if cancelled is not None:
            return Outcome("parked")
        if isinstance(error, Halted | CancelledError):
            stop = error.stop
            if stop.reason is StopReason.ABORTED:
                return _cancelled(stop.message, "limit")
            changes = {"stop_reason": str(stop.reason), "error": safe(stop.message)}
            return Outcome("halted", changes, {**stop_data(stop), **self._where(context, stop)})
        return _failed(error)

    def _where(self, context: ExecutionContext | None, stop: Stop) -> dict[str, Any]:
        """Whose limit a stop is of, and at which node it came; as far as that is known."""
        whose = whose_limit(stop, self.run, None if context is None else context._account)
        found = {"whose": whose, "node_id": plain(self._halted_at)}
        return {name: one for name, one in found.items() if one is not None}

    async def _end(self, outcome: Outcome) -> RunRecord:
        log = self.log
        assert log is not None
        passing("end.decided")
        kind = self._at.kind_of(self.run)
        if kind is not None:
            await self._prove_claim(log)
        passing("end.before_kind")
        if kind is not None:
            await self._tell_kind(kind, outcome)
        passing("end.after_kind")
        log.put(ENDINGS[outcome.status], outcome.data)
        log.hasten()
        await self._shorten_journal(outcome)  # while the last event is being written: either may be there first
        await log.flush()
        return await self._close(outcome)

    async def _prove_claim(self, log: RunLog) -> None:
        """Fenced if another worker has it. What the log still had to write has proved it; else the store is asked."""
        written = log.written
        await log.flush()
        if log.written == written:
            known = await patiently(lambda: self._at.stores.runs.get(self.run.id))
            if known is None or known.epoch != self.run.epoch:
                raise Fenced(self.run.id, self.run.epoch)

    async def _shorten_journal(self, outcome: Outcome) -> None:
        if outcome.status == "completed":
            await shorten_journal(self._at.stores.journal, self.run, self._journal)

    async def _tell_kind(self, kind: RunKind, outcome: Outcome) -> None:
        record = self._as_left(outcome)
        try:
            await patiently(lambda: kind.ended(record))
        except Fenced:
            raise
        except Exception:  # a kind that cannot take the end must not keep the run from ending
            journal_of_failures.exception("the end of run %s could not be told to its kind", self.run.id)
            self._at.counted["kind_failures"] += 1

    def _as_left(self, outcome: Outcome) -> RunRecord:
        return self.run._replace(status=outcome.status, **self._changes(outcome))

    def _changes(self, outcome: Outcome) -> dict[str, Any]:
        ended = {"ended_ms": self._at.now_ms()} if outcome.status in ENDED else {}
        return {**outcome.changes, **ended}

    async def _close(self, outcome: Outcome) -> RunRecord:
        """Change the status, around it clear away what only a living run needs; who takes over does what is left."""
        self.decided = outcome.status
        stores, run = self._at.stores, self.run
        changes = self._changes(outcome)
        wishes: Sequence[CancelIntent] = ()
        if outcome.status in ENDED and (self.token.cancellation is not None or run.epoch > 1):
            wishes = await patiently(lambda: stores.cancels.of(run.id))  # no others: it may go on, and be stopped again
        if outcome.status in ENDED and (self._has_asked or run.epoch > 1):
            await patiently(lambda: stores.approvals.withdraw(run.id, run.epoch, now_ms=self._at.now_ms()))
        passing("end.before_status")
        left = await patiently(lambda: stores.runs.update(run.id, run.epoch, status=outcome.status, **changes))
        passing("end.after_status")
        if wishes:
            await patiently(lambda: stores.cancels.drop(run.id, wishes))
        return left

    # What its nodes tell.

    def tell(self, event: NodeEvent) -> None:
        """Say it in the log."""
        if isinstance(event.data, Halted):
            self._halted_at = self._halted_at or event.node_id
            if (cut := of_cut(event)) is not None:
                self._say(*cut)
        told = of_node(event)
        if told is not None:
            self._say(*told)

    @property
    def is_behind(self) -> bool:
        """Whether nodes that tell much should wait until the store has caught up."""
        return self.log is not None and self.log.is_full

    async def make_room(self) -> None:
        """Wait until it has."""
        assert self.log is not None
        await self.log.room()

    def _say(self, type: str, data: Mapping[str, Any]) -> None:
        """Put it into the log, after the calls that were made before: those of a node stand inside of it."""
        assert self.log is not None
        if self._tap is not None:
            self._tap.pump()
        self.log.tell(type, data)

    # What its questions tell.

    async def waits_for(self, approval: ApprovalRecord) -> None:
        """Say so in the log and in the status."""
        self._has_asked = True
        self._asking = {id: self._asking.get(id) for id in self.asks}
        asking = running_call.get()
        self._asking[approval.id] = None if asking is None else asking.record
        self._say("approval.requested", {"approval": approval_data(approval)})
        self._say_waiting(approval.id)
        await self._show_waiting()

    async def got(self, approval: ApprovalRecord) -> None:
        """Say so in the log and in the status."""
        told = {"approval_id": approval.id, "state": approval.state, "by": approval.answered_by}
        self._say("approval.answered", told)
        await self._show_waiting()

    async def gave_up(self, approval: ApprovalRecord) -> None:
        """Say so in the status."""
        await self._show_waiting()

    def notice_idle(self) -> None:
        """Say that it only waits, if that is so since something else of it has ended; once."""
        asks, log = self.asks, self.log
        if not asks or self.decided is not None or log is None or log.seq == self._idle_seq:
            return
        if self._only_waits():
            self._say_waiting(asks[0])

    def _say_waiting(self, approval_id: str) -> None:
        is_idle = self._only_waits()
        self._say("run.waiting", {"approval_id": approval_id, **({"idle": True} if is_idle else {})})
        if is_idle and self.log is not None:
            self._idle_seq = self.log.seq

    def _only_waits(self) -> bool:
        """Whether nothing of it is under way but its questions."""
        if self._trace is None:
            return False
        with self._trace.lock:
            under_way = self._trace.open_calls()
        return only_asks(under_way, [call for id in self.asks if (call := self._asking.get(id)) is not None])

    async def _show_waiting(self) -> None:
        async with self._showing:  # one after the other: the last change is the one that stays
            is_waiting = bool(self.asks)
            if is_waiting == self.is_waiting or self.decided is not None:
                return
            status: RunStatus = "waiting" if is_waiting else "running"
            try:
                await patiently(lambda: self._at.stores.runs.update(self.run.id, self.run.epoch, status=status))
            except Fenced:
                self.lose()
            self.is_waiting = is_waiting


def _is_closed(task: asyncio.Task[Any] | None) -> bool:
    """Whether the coroutine of a task was closed, as at the end of its loop, and nothing can be awaited any more."""
    try:
        return asyncio.current_task() is not task
    except RuntimeError:  # no loop is running
        return True


def _beginning(run: RunRecord, durable: Durable, lost: int) -> Told:
    if run.epoch == 1:
        return "run.started", {"epoch": 1}
    found = {"replayed": len(durable.journal), "worked_ms": durable.worked_ms}
    return "run.resumed", {"epoch": run.epoch, **found, **({"lost": lost} if lost else {})}


def approval_data(approval: ApprovalRecord) -> dict[str, Any]:
    """A question as JSON data."""
    return {
        "id": approval.id,
        "run_id": approval.run_id,
        "node_id": approval.node_id,
        "question": approval.question,
        "value": shown(approval.value),
        "state": approval.state,
        "asked_ms": approval.asked_ms,
    }


def _cancelled(reason: str, cause: str) -> Outcome:
    reason = clean(reason)[:MAX_ERROR]
    changes = {"stop_reason": str(StopReason.ABORTED), "error": reason}
    return Outcome("cancelled", changes, {"reason": reason, "cause": cause})


def _failed(error: BaseException) -> Outcome:
    told = error_data(error)
    node_id = getattr(error, "node_id", None)
    if isinstance(node_id, str):
        told["node_id"] = plain(node_id)
    return Outcome("failed", {"error": f"{told['error']}: {told['message']}"[:MAX_ERROR]}, told)


def _used(context: ExecutionContext | None) -> dict[str, Any]:
    if context is None:
        return {}
    balance = context.ledger.balance()
    return {
        "cost_nanos": balance.spent_nanos,
        "tokens_in": balance.tokens_in,
        "tokens_out": balance.tokens_out,
        "unresolved_nanos": balance.unresolved_nanos,
        "unknown_costs": context._run.unknown_costs,
    }


def _as_told(last: HostedEvent) -> Outcome:
    """What became of a run whose last event is there and whose status is not."""
    data = last.data
    changes: dict[str, Any] = {
        "cost_nanos": to_nanos(data.get("cost_usd", 0)),
        "tokens_in": data.get("tokens_in", 0),
        "tokens_out": data.get("tokens_out", 0),
        "unresolved_nanos": to_nanos(data.get("unresolved_usd", 0)),
        "unknown_costs": data.get("unknown_costs", 0),
    }
    status = STATUS_OF[last.type]
    if status == "completed":
        changes["output"] = data.get("output")
    elif status == "halted":
        changes |= {"stop_reason": data.get("stop_reason"), "error": data.get("message")}
    elif status == "cancelled":
        changes |= {"stop_reason": str(StopReason.ABORTED), "error": data.get("reason")}
    elif status == "failed":
        changes["error"] = f"{data.get('error')}: {data.get('message')}"[:MAX_ERROR]
    return Outcome(status, changes, data)
