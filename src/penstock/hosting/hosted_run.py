"""One run on one host: from its claim to its final status under that claim.

The end is one transaction: the remaining events including the last one, the data stored by the run's handler, the
withdrawn approvals, the dropped cancel requests, and the status. So a run whose last event can be read has ended, and a
worker that dies before the commit leaves a run that the next worker takes over.

The outcome is decided in one place, without awaiting, after the last check for cancel requests: a cancel that arrives
before the decision ends the run as cancelled; a later one returns ENDED.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import penstock.kernel.schema  # noqa: F401  # loads pydantic, here and not on the loop of the first run
from penstock.containment.accounts import Balance
from penstock.containment.safety import ChainMetadata
from penstock.errors import CancelledError, Halted, PenstockError
from penstock.hosting import trace_context
from penstock.hosting.approvals import RunApprovals, only_waits_for_answers
from penstock.hosting.budgets import BudgetReporter, DayBudgetWatch, has_day_budget
from penstock.hosting.durability import Durable, durable_parts, nodes_that_only_ask, paid, shortened_journal
from penstock.hosting.event_batches import MAX_INLINE_EVENTS
from penstock.hosting.event_data import (
    ENDINGS,
    MAX_ERROR,
    STATUS_OF,
    EventPayload,
    error_data,
    finish_reason,
    node_event,
    output_of,
    redact,
    sanitize,
    spent,
    stop_data,
    to_json,
    truncate,
    truncated_text,
)
from penstock.hosting.event_pipeline import EventWriter, TraceForwarder
from penstock.hosting.figures import SpendingTally
from penstock.hosting.forking import plan_of
from penstock.hosting.halts import limit_owner
from penstock.hosting.host_context import HostContext, Prepared, RunHandler
from penstock.hosting.payloads import PayloadRecorder
from penstock.hosting.ports import (
    ENDED,
    NO_DATA,
    ApprovalRecord,
    Conflict,
    Fenced,
    HostedEvent,
    PayloadRecord,
    RunRecord,
    RunStatus,
    StoreCorrupt,
    TransactionStores,
    is_short,
    retry_unavailable,
)
from penstock.money import to_nanos
from penstock.nodes.client_tools import EXPECTS as CLIENT_TOOLS
from penstock.runtime.call import running_call
from penstock.runtime.cancellation import CancellationToken
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable import failpoints
from penstock.runtime.durable.journal import Journal
from penstock.runtime.durable.ports import JournalEntry
from penstock.runtime.graphs.graph_runtime import FlowContext, GraphPlan, entry_node_ids_in
from penstock.runtime.graphs.node_execution import NodeEvent, emit_flow
from penstock.runtime.run import RunSettings
from penstock.runtime.watching.registry import CancelResult
from penstock.stops import Stop, StopReason
from penstock.tracing.execution_graph import ExecutionGraph
from penstock.tracing.record import CallRecord

logger = logging.getLogger("penstock.hosting")

EVENT_PAGE = 1_000
TAIL = 500
"""Number of events read at once to find the newest event of a run."""
MAX_CRASHES = 10
"""Maximum number of workers lost in a row on one run; a run that kills its process must not kill every worker."""

REQUEUED = ("run.queued", "run.granted")
"""Types of the events that queue a run: a new one, or one that is resumed on request."""
PARKED = "the host is closing"
TAKEN_OVER = "another worker has taken this run over"


class GraphVersionNotFound(PenstockError):
    """The graph version of a run is not in the store."""

    def __init__(self, graph_id: str, version: int) -> None:
        self.graph_id = graph_id
        self.version = version
        super().__init__(f"there is no version {version} of graph {graph_id!r}: save it, then resume the run")


class CrashLoop(PenstockError):
    """Too many workers in a row died, or lost the run, before it reached an end."""

    def __init__(self, run_id: str, times: int) -> None:
        self.run_id = run_id
        self.times = times
        super().__init__(f"{times} workers in a row were lost while they worked on it; resume it once that is mended")


class _HandlerFailed(Exception):
    """The run's handler raised Conflict in the transaction that ends the run."""


class Outcome(NamedTuple):
    """The outcome of a run: its status, the changes to its record, and the data of its last event."""

    status: RunStatus
    changes: Mapping[str, Any] = NO_DATA
    data: Mapping[str, Any] = NO_DATA


class HostedRun:
    """A run that this host has claimed."""

    def __init__(self, context: HostContext, run: RunRecord, *, is_new: bool = False) -> None:
        """With `is_new`, the run was claimed by the transaction that added it: it has no events or cancel requests."""
        self._context = context
        self.run = run
        self._is_new = is_new
        self.token = CancellationToken(name=f"run {run.id}", clock=context.clock)
        self.log = self._new_log(0) if is_new else None
        """Writer of the run's events; None until the last stored event is known."""
        self.approvals: RunApprovals | None = None
        self.is_fenced = False
        """Whether another worker has claimed the run; nothing more is written then."""
        self.decided: RunStatus | None = None
        """The final status, once it is decided."""
        self.is_waiting = False
        """Whether the stored status is `waiting` (for an answer)."""
        self.gone = asyncio.Event()
        """Set when this host has finished with the run and removed it from its active runs."""
        self._status_lock = asyncio.Lock()
        self._forwarder: TraceForwarder | None = None
        self._journal: Journal | None = None
        self._payloads: PayloadRecorder | None = None
        """Payloads of calls that are stored with the next events; None if the operator records none."""
        self._spending = SpendingTally()
        """Usage of the calls under this claim; at the end also of those under earlier claims."""
        self._has_questions = False
        self._lost_before = 0
        """Number of workers lost in a row on this run."""
        self._worked_ms = run.worked_ms
        """Execution time under earlier claims."""
        self._began_ms: int | None = None
        """When this worker started the run."""
        self._unsaved: dict[str, Any] = {}
        """Changes of the run that are stored with the next events."""
        self._ran_in: ExecutionContext | None = None
        """The context in which the graph runs or ran; None if the graph was never started."""
        self._trace: ExecutionGraph | None = None
        self._asking: dict[str, CallRecord | None] = {}
        """The calls that requested the run's approvals, by approval id."""
        self._idle_seq = 0
        """Sequence number of the last `run.waiting` event with `idle`."""
        self._halted_at: str | None = None
        """The first node ended by a stop; the graph ends with it."""
        self._handler_error: Exception | None = None
        """The error that the run's handler raised in the transaction that ends the run."""
        self._unreadable: StoreCorrupt | None = None
        """Why the run's earlier events cannot be read; the run fails with it."""
        self._paid: Mapping[str, int] = {}
        """Costs from the ledger, where this process does not know all of them."""

    # Called by the host, on its event loop.

    def cancel(self, reason: str) -> CancelResult:
        """Cancel the run, unless its outcome is already decided."""
        if self.decided is not None:
            return CancelResult.ENDED
        return CancelResult.CANCELLED if self.token.cancel(sanitize(reason)) else CancelResult.ALREADY_CANCELLED

    def park(self) -> None:
        """Stop the run so that another worker can continue it."""
        self.token.cancel(PARKED, cause="shutdown")

    def _is_leaving(self) -> bool:
        """Whether the run is being stopped for another worker to continue."""
        cancelled = self.token.cancellation
        return cancelled is not None and cancelled.cause == "shutdown"

    def fence(self) -> None:
        """Stop immediately and write nothing more, because another worker has claimed the run."""
        if not self.is_fenced:
            self.is_fenced = True
            self.token.cancel(TAKEN_OVER, cause="shutdown")
            if self.log is not None:
                self.log.fence()

    def answered(self, approval: ApprovalRecord) -> None:
        """Deliver the answer to one of the run's approvals."""
        if self.approvals is not None:
            self.approvals.give(approval)

    @property
    def balance(self) -> Balance | None:
        """The figures of the run's own account; None before its graph starts, and after it has ended."""
        return None if self._ran_in is None else self._ran_in.balance

    @property
    def asks(self) -> list[str]:
        """Ids of the approvals that the run is waiting for."""
        return [] if self.approvals is None else list(self.approvals.waiting)

    # Execution.

    async def work(self) -> RunRecord | None:
        """Execute the run to its end; return its final record, or None if another worker has claimed it."""
        try:
            return await self._worked()
        except Fenced:
            self.fence()
            return None
        finally:
            if self.log is not None:
                await self.log.close()
            self._release()

    def _release(self) -> None:
        """Break reference cycles, so that the memory of the run is freed immediately."""
        self.approvals = self._forwarder = self._journal = self._payloads = self._ran_in = self._trace = (
            self._handler_error
        ) = None
        self._asking.clear()

    async def _worked(self) -> RunRecord:
        if self._is_new:
            assert self.log is not None
            return await self._worked_with(self.log)
        run = self.run
        try:
            tail = await self._stored_events()
        except StoreCorrupt as error:  # the earlier progress is unknown: the run ends, after the events it has
            self._unreadable = error
            self.log = self._new_log(await retry_unavailable(lambda: self._context.stores.events.last_seq(run.id)))
            return await self._worked_with(self.log)
        seq = tail[-1].seq if tail else 0
        if tail and tail[-1].type in STATUS_OF:
            # Version 0.1 stored the last event before the status: a worker that died in between left the rest.
            outcome = _outcome_of(tail[-1], self._context.now_ms())
            self.decided = outcome.status
            short = await self._shortened_journal(outcome)
            return await retry_unavailable(
                lambda: self._context.stores.transaction(lambda stores: self._close(stores, outcome, short, None))
            )
        self._lost_before, self._worked_ms = before_this_claim(run, tail[-1] if tail else None)
        self.log = self._new_log(seq)
        return await self._worked_with(self.log)

    def _new_log(self, seq: int) -> EventWriter:
        host, run = self._context, self.run
        return EventWriter(
            self._append_events,
            run.id,
            run.epoch,
            seq,
            clock=host.steady,
            on_fenced=self.fence,
            batches=host.batches,
            has_more=self._has_more_to_store,
        )

    def _has_more_to_store(self) -> bool:
        """Whether other data is stored with the next events."""
        return bool((self._journal is not None and self._journal.waiting) or self._unsaved or self._waiting_payloads())

    async def _worked_with(self, log: EventWriter) -> RunRecord:
        seq = log.seq
        if not seq:
            log.emit("run.queued", at_ms=self.run.created_ms)
        try:
            outcome = await self._outcome()
            if self.run.epoch > 1:
                await self._count_earlier_claims(seq)
            return await self._end(outcome)
        finally:
            self._context.counted["events_stored"] += log.written - seq

    async def _stored_events(self) -> Sequence[HostedEvent]:
        """Return the newest events stored before this claim."""
        events, run = self._context.stores.events, self.run
        if run.epoch == 1:  # never executed before, so one page likely holds all its events
            first = await retry_unavailable(lambda: events.read(run.id, 0, TAIL))
            if len(first) < TAIL:
                return first
        seq = await retry_unavailable(lambda: events.last_seq(run.id))
        return await retry_unavailable(lambda: events.read(run.id, max(0, seq - TAIL), TAIL))

    async def _count_earlier_claims(self, last_seq: int) -> None:
        """Add the usage of calls under earlier claims; usage in unreadable events stays with the run as a whole."""
        events, seq = self._context.stores.events, 0
        try:
            while seq < last_seq:
                page = await retry_unavailable(partial(events.read, self.run.id, seq, min(EVENT_PAGE, last_seq - seq)))
                if not page:
                    return
                self._spending.take_events(page)
                seq = page[-1].seq
        except StoreCorrupt as error:
            logger.error("what run %s used under earlier claims is not known by node: %s", self.run.id, error)

    async def _outcome(self) -> Outcome:
        """Execute the run and decide its outcome."""
        error: BaseException | None = None
        came_to: Mapping[str, Any] = {}
        task = asyncio.current_task()
        if not self._is_new:
            await self._look_for_cancel()
        try:
            if self._unreadable is not None:
                raise self._unreadable
            if self._lost_before >= MAX_CRASHES:
                raise CrashLoop(self.run.id, self._lost_before)
            came_to = await self._ran()
        except asyncio.CancelledError as raised:
            if task is None or task.cancelling():
                raise
            error = raised  # this task was not cancelled: a node raised it
        except BaseException as raised:  # SystemExit or a panic in a node counts as an error of that node
            if isinstance(raised, KeyboardInterrupt) or _is_closed(task):
                raise
            error = raised
        if error is not None:
            error.__traceback__ = None  # its frames refer back to it and to the whole run
        self._paid = await paid(self._context, self.run, self._is_leaving)
        if error is None:
            await self._look_for_cancel()
        return self._decide(self._ran_in, error, came_to)

    async def _ran(self) -> Mapping[str, Any]:
        """Run the graph in its own context and return its result; all its trace entries are in the log afterwards."""
        host, run, log = self._context, self.run, self.log
        assert log is not None
        self.token.check()
        graph = await self._graph()
        prepared = await retry_unavailable(lambda: host.prepare(run))
        durable = await durable_parts(host, run, self._worked_ms, self.fence)
        self._journal = durable.journal
        context = self._execution_context(durable, prepared)
        if host.observe is not None:
            self._observe(host.observe, context)
        if failpoints.hook is not None:
            failpoints.hook("start.before_event")
        self._began_ms = host.now_ms()
        log.emit(*self._beginning(durable))
        if run.epoch > 1:  # stored now, so that it counts if the run kills its worker again
            facts = {"crash_count": self._lost_before, "worked_ms": self._worked_ms, "resumed_ms": self._began_ms}
            self._unsaved = facts
            await log.flush()
        clock_offset_ms = round((host.steady.time_ns() - context._run.wall_time_ns(context._run.now())) / 1_000_000)
        self._trace = context.graph
        own, budgets = context._account, BudgetReporter(context, log.schedule, durable.earlier)
        days = self._day_budgets(budgets) if has_day_budget(host, run) else None
        if host.settings.record_payloads != "off":
            self._payloads = PayloadRecorder(host.settings, run, host.now_ms)
        self._forwarder = forwarder = TraceForwarder(
            context.graph,
            log,
            clock_offset_ms,
            whose=lambda stop: limit_owner(stop, run, own, host.settings.zone),
            budgets=budgets,
            payloads=self._payloads,
            spending=self._spending,
            figures=host.figures,
        )
        forwarder.open()
        chat_id, services = run.origin.get("chat_id"), self._services(durable, prepared)
        flow_context = FlowContext(None, chat_id, run.id, None, None, services, context)
        try:
            with context:
                plan = plan_of(graph, run) if "of" in run.origin else graph
                durable.journal.may_wait = nodes_that_only_ask(plan)
                await plan.get_ready(entry_node_ids_in(services))
                self._ran_in = context
                result = await emit_flow(plan, flow_context, self)
                return {"output": output_of(result), **finish_reason(result.outputs.values())}
        finally:
            forwarder.close()
            context._children = None  # each of them refers back to this context
            await durable.settle(self._is_leaving)
            if days is not None:
                await days.close()

    def _observe(self, observe: Callable[[ExecutionContext], object], context: ExecutionContext) -> None:
        try:
            with trace_context.restored(self.run.origin):
                observe(context)
        except Exception as error:  # a tracer must not keep the run from starting
            self._context.counted["observer_failures"] += 1
            logger.error("run %s is not observed: %s", self.run.id, type(error).__name__)

    def _day_budgets(self, budgets: BudgetReporter) -> DayBudgetWatch:
        days = DayBudgetWatch(self._context, self.run, lambda payload: self._emit(*payload))
        budgets.on_report = days.notify
        return days

    def _beginning(self, durable: Durable) -> EventPayload:
        epoch, lost = self.run.epoch, self._lost_before
        if epoch == 1:
            return "run.started", {"epoch": 1}
        found = {"replayed": len(durable.journal), "worked_ms": self._worked_ms}
        return "run.resumed", {"epoch": epoch, **found, **({"lost": lost} if lost else {})}

    async def _graph(self) -> GraphPlan:
        host, id, version = self._context, self.run.graph_id, self.run.graph_version
        known = host.graph_of(id, version)
        if known is not None:
            return known
        graph = await retry_unavailable(lambda: host.stores.graphs.get(id, version))
        if graph is None:
            raise GraphVersionNotFound(id, version)
        return await host.parsed(graph)

    def _execution_context(self, durable: Durable, prepared: Prepared) -> ExecutionContext:
        run, host = self.run, self._context.settings
        ceilings = durable.ceilings
        return ExecutionContext(
            ceilings.config,
            metadata=ChainMetadata(run.id, run.id, user_id=run.owner),
            input=prepared.input,
            budget=ceilings.budget,
            cancellation=self.token,
            settings=RunSettings(
                max_wait_s=host.max_wait_s,
                record_payloads=host.record_payloads,
                max_payload_bytes=host.max_payload_bytes,
            ),
            prices=self._context.prices,
            clock=self._context.clock,
            journal=durable.journal,
            shared_budget=durable.shared,
        )

    def _services(self, durable: Durable, prepared: Prepared) -> Mapping[str, Any]:
        host, run = self._context, self.run
        self.approvals = RunApprovals(host.stores.approvals, run, self, host.now_ms, durable.journal.key)
        about = {"id": run.id, "owner": run.owner, "chat_id": run.origin.get("chat_id")}
        return {**host.services, "approvals": self.approvals, "run": about, **prepared.services}

    async def _look_for_cancel(self) -> None:
        cancels, id, owner = self._context.stores.cancels, self.run.id, self.run.owner
        found = await retry_unavailable(lambda: cancels.find({id: owner}, now_ms=self._context.now_ms()))
        if id in found:
            self.cancel(found[id].reason)

    # The end.

    def _decide(
        self, context: ExecutionContext | None, error: BaseException | None, came_to: Mapping[str, Any]
    ) -> Outcome:
        """Decide the outcome. Nothing is awaited here: a cancel comes either before or after the decision."""
        outcome = self._judged(context, error, came_to)
        self.decided = outcome.status
        used = {**_used(context), **self._paid}
        now_ms = self._context.now_ms()
        times = {"worked_ms": self._worked_ms + (0 if self._began_ms is None else max(0, now_ms - self._began_ms))}
        if outcome.status in ENDED:
            times["ended_ms"] = now_ms
        return Outcome(outcome.status, {**used, **times, **outcome.changes}, {**outcome.data, **spent(self.run, used)})

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
            changes = {"stop_reason": str(stop.reason), "error": redact(stop.message)}
            halt = {**stop_data(stop), **self._where(context, stop)}
            return Outcome("halted", changes | ({"halt": halt} if "whose" in halt else {}), halt)
        return _failed(error)

    def _where(self, context: ExecutionContext | None, stop: Stop) -> dict[str, Any]:
        """Return whose limit caused a stop, and at which node, as far as known."""
        whose = limit_owner(stop, self.run, None if context is None else context._account, self._context.settings.zone)
        # A node rejected by its own budget has not started; that budget has the name of the node.
        node_id = stop.budget if self._halted_at is None and whose == "node" else self._halted_at
        found = {"whose": whose, "node_id": to_json(node_id)}
        return {name: one for name, one in found.items() if one is not None}

    async def _end(self, outcome: Outcome) -> RunRecord:
        """Store the end in one transaction: remaining events, the handler's data, the journal and the status."""
        log = self.log
        assert log is not None
        if failpoints.hook is not None:
            failpoints.hook("end.decided")
        short = {entry.key: entry for entry in await self._shortened_journal(outcome)}
        waiting = [] if self._journal is None else self._journal.waiting
        journal = [short.pop(entry.key, entry) for entry in waiting]  # in its short form already
        handler = self._context.handler_of(self.run)
        is_small = len(short) + len(journal) <= MAX_INLINE_EVENTS and not self._waiting_payloads()
        inline = is_small and is_short(outcome.changes.get("output"))

        async def end(handler: RunHandler | None) -> RunRecord:
            return await log.end(
                ENDINGS[outcome.status],
                outcome.data,
                self._context.stores.transaction,
                lambda stores: self._close(stores, outcome, [*short.values()], handler, journal),
                inline=inline,
            )

        try:
            left = await end(handler)
        except Exception as error:
            if error is not self._handler_error:
                raise
            # A failing handler must not keep the run from ending.
            logger.exception("the handler of run %s could not store its end", self.run.id)
            self._context.counted["kind_failures"] += 1
            left = await end(None)
        if self._journal is not None:
            self._journal.stored(waiting)
        if failpoints.hook is not None:
            failpoints.hook("end.committed")
        return left

    async def _shortened_journal(self, outcome: Outcome) -> Sequence[JournalEntry]:
        if outcome.status != "completed":
            return ()
        return await shortened_journal(self._context.stores.journal, self.run, self._journal)

    async def _append_events(self, run_id: str, epoch: int, events: Sequence[HostedEvent]) -> None:
        """Store events, with the waiting journal entries: no reader may see a result that a crash would fence."""
        stores, journal, facts = self._context.stores, self._journal, self._unsaved
        waiting = [] if journal is None else journal.waiting
        payloads = self._waiting_payloads()
        if not waiting and not facts and not payloads:
            await stores.events.append(run_id, epoch, events)
            return

        async def unit(stores: TransactionStores) -> None:
            await stores.events.append(run_id, epoch, events)
            if waiting:
                await stores.journal.append(run_id, waiting, epoch=epoch)
            if facts:
                await stores.runs.update(run_id, epoch, **facts)
            if payloads:
                await stores.payloads.put(run_id, payloads, epoch=epoch)

        inline = not payloads and len(events) + len(waiting) <= MAX_INLINE_EVENTS
        await stores.transaction(unit, inline=inline)
        if self._payloads is not None:
            self._payloads.stored(payloads)
        if journal is not None:
            journal.stored(waiting)
        if facts is self._unsaved:
            self._unsaved = {}

    def _waiting_payloads(self) -> list[PayloadRecord]:
        return [] if self._payloads is None else list(self._payloads.waiting)

    def _as_left(self, outcome: Outcome) -> RunRecord:
        return self.run._replace(status=outcome.status, **outcome.changes)

    async def _call_handler(self, handler: RunHandler, outcome: Outcome, stores: TransactionStores) -> None:
        """Let the handler store its data, and remember the error that it raises.

        The error is raised unchanged: the database translates or retries its own errors, and then `_end` gets another
        one.
        """
        try:
            await handler.on_end(self._as_left(outcome), stores)
        except Conflict as error:  # unchanged, it would mean that another worker has written events
            self._handler_error = _HandlerFailed(str(error))
            raise self._handler_error from error
        except Exception as error:
            self._handler_error = error
            raise

    async def _close(
        self,
        stores: TransactionStores,
        outcome: Outcome,
        short: Sequence[JournalEntry],
        handler: RunHandler | None,
        journal: Sequence[JournalEntry] = (),
    ) -> RunRecord:
        """Inside a transaction: change the status, and remove the data that only an unfinished run needs."""
        run, is_over = self.run, outcome.status in ENDED
        if handler is not None:
            await self._call_handler(handler, outcome, stores)
        if journal:
            await stores.journal.append(run.id, journal, epoch=run.epoch)
        if short:
            await stores.journal.shorten(run.id, short, epoch=run.epoch)
        if payloads := self._waiting_payloads():
            await stores.payloads.put(run.id, payloads, epoch=run.epoch)
        if is_over and (self._has_questions or run.epoch > 1):
            await stores.approvals.withdraw(run.id, run.epoch, now_ms=self._context.now_ms())
        if is_over and (self.token.cancellation is not None or run.epoch > 1):
            await stores.cancels.drop(run.id)
        left = await stores.runs.update(run.id, run.epoch, status=outcome.status, **outcome.changes)
        await stores.spending.record(left, self._spending.shares(), is_first=run.epoch == 1)
        if failpoints.hook is not None:
            failpoints.hook("end.before_commit")
        return left

    # Node events.

    def emit(self, event: NodeEvent) -> None:
        """Emit a node event to the event log."""
        if isinstance(event.data, Halted):
            self._halted_at = self._halted_at or event.node_id
            if (cut := truncated_text(event)) is not None:
                self._emit(*cut)
        payload = node_event(event)
        if payload is not None:
            self._emit(*payload)

    @property
    def is_behind(self) -> bool:
        """Whether nodes that emit many events should wait until the store has caught up."""
        return self.log is not None and self.log.is_full

    async def make_room(self) -> None:
        """Wait until the store has caught up."""
        assert self.log is not None
        await self.log.room()

    def _emit(self, type: str, data: Mapping[str, Any]) -> None:
        """Emit an event, after the events of earlier calls: a node's calls must come between its start and end."""
        assert self.log is not None
        if self._forwarder is not None:
            self._forwarder.drain()
        self.log.emit(type, data)

    # Approval events.

    async def waits_for(self, approval: ApprovalRecord) -> None:
        """Emit the approval request, and update the status."""
        self._has_questions = True
        self._asking = {id: self._asking.get(id) for id in self.asks}
        asking = running_call.get()
        self._asking[approval.id] = None if asking is None else asking.record
        self._emit("approval.requested", {"approval": approval_data(approval)})
        self._emit_waiting(approval.id)
        await self._update_status()

    async def got(self, approval: ApprovalRecord) -> None:
        """Emit the answer, and update the status."""
        data = {"approval_id": approval.id, "state": approval.state, "by": approval.answered_by}
        self._emit("approval.answered", data)
        await self._update_status()

    async def gave_up(self, approval: ApprovalRecord) -> None:
        """Update the status: the run no longer waits for this approval."""
        await self._update_status()

    @property
    def is_idle(self) -> bool:
        """Whether the run only waits for answers, and its last event reports that."""
        return self.log is not None and self.log.seq == self._idle_seq and bool(self.asks) and self.decided is None

    def notice_idle(self) -> None:
        """Emit `run.waiting` with `idle`, once, when the last call that does not wait for an answer has ended."""
        asks, log = self.asks, self.log
        if not asks or self.decided is not None or log is None or log.seq == self._idle_seq:
            return
        if self._only_waits():
            self._emit_waiting(asks[0])

    def _emit_waiting(self, approval_id: str) -> None:
        is_idle = self._only_waits()
        if self._forwarder is not None:
            self._forwarder.drain()
            # A later report would follow the event, which has to be the last one of a worker lost while the run waits.
            self._forwarder.report_budgets()
        self._emit("run.waiting", {"approval_id": approval_id, **({"idle": True} if is_idle else {})})
        if is_idle and self.log is not None:
            self._idle_seq = self.log.seq

    def _only_waits(self) -> bool:
        """Whether all calls in progress are waiting for answers."""
        if self._trace is None:
            return False
        with self._trace.lock:
            under_way = self._trace.open_calls()
        return only_waits_for_answers(
            under_way, [call for id in self.asks if (call := self._asking.get(id)) is not None]
        )

    async def _update_status(self) -> None:
        async with self._status_lock:  # serialized, so that the last change is the one stored
            is_waiting = bool(self.asks)
            if is_waiting == self.is_waiting or self.decided is not None:
                return
            status: RunStatus = "waiting" if is_waiting else "running"
            runs = self._context.stores.runs
            try:
                await retry_unavailable(lambda: runs.update(self.run.id, self.run.epoch, status=status))
            except Fenced:
                self.fence()
            self.is_waiting = is_waiting


def _is_closed(task: asyncio.Task[Any] | None) -> bool:
    """Whether the task's coroutine was closed, as when its loop ends, so that nothing can be awaited any more."""
    try:
        return asyncio.current_task() is not task
    except RuntimeError:  # no loop is running
        return True


def before_this_claim(run: RunRecord, last: HostedEvent | None) -> tuple[int, int]:
    """Return the number of workers lost in a row on a claimed run, and its execution time under earlier claims.

    A run that kills its process must not kill every host, so crashes are counted; a run that was requeued lost no
    worker. A worker lost while the run only waited for answers was not killed by it and is not counted: the last event
    of such a claim is `run.waiting` with `idle`. Work after a lost worker's last event is not known.
    """
    if run.epoch == 1 or (last is not None and last.type in REQUEUED and last.seq > 1):
        return run.crash_count, run.worked_ms
    if last is None:  # a worker does not wait until its first event is stored
        return run.crash_count + 1, run.worked_ms
    is_idle = last.type == "run.waiting" and last.data.get("idle") is True
    began_ms = run.started_ms if run.resumed_ms is None else run.resumed_ms
    worked_ms = 0 if began_ms is None else max(0, last.at_ms - began_ms)
    return run.crash_count + (0 if is_idle else 1), run.worked_ms + worked_ms


def approval_data(approval: ApprovalRecord) -> dict[str, Any]:
    """Return an approval as JSON data."""
    is_for_client = isinstance(approval.expects, Mapping) and CLIENT_TOOLS in approval.expects
    return {
        "id": approval.id,
        "run_id": approval.run_id,
        "node_id": approval.node_id,
        "question": approval.question,
        # The client's program reads its calls from the event, so they are complete; any other value is for display.
        "value": approval.value if is_for_client else truncate(approval.value),
        "state": approval.state,
        "asked_ms": approval.asked_ms,
        **({"kind": CLIENT_TOOLS} if is_for_client else {}),
    }


def _cancelled(reason: str, cause: str) -> Outcome:
    reason = sanitize(reason)[:MAX_ERROR]
    changes = {"stop_reason": str(StopReason.ABORTED), "error": reason}
    return Outcome("cancelled", changes, {"reason": reason, "cause": cause})


def _failed(error: BaseException) -> Outcome:
    data = error_data(error)
    node_id = getattr(error, "node_id", None)
    if isinstance(node_id, str):
        data["node_id"] = to_json(node_id)
    return Outcome("failed", {"error": f"{data['error']}: {data['message']}"[:MAX_ERROR]}, data)


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


def _outcome_of(last: HostedEvent, now_ms: int) -> Outcome:
    """Return the outcome of a run whose last event is stored but whose status is not."""
    data = last.data
    changes: dict[str, Any] = {
        "cost_nanos": to_nanos(data.get("cost_usd") or 0),
        "tokens_in": data.get("tokens_in", 0),
        "tokens_out": data.get("tokens_out", 0),
        "unresolved_nanos": to_nanos(data.get("unresolved_usd", 0)),
        "unknown_costs": data.get("unknown_costs", 0),
    }
    status = STATUS_OF[last.type]
    if status in ENDED:
        changes["ended_ms"] = now_ms
    if status == "completed":
        changes["output"] = data.get("output")
    elif status == "halted":
        changes |= {"stop_reason": data.get("stop_reason"), "error": data.get("message")}
        changes["halt"] = data if "whose" in data else None
    elif status == "cancelled":
        changes |= {"stop_reason": str(StopReason.ABORTED), "error": data.get("reason")}
    elif status == "failed":
        changes["error"] = f"{data.get('error')}: {data.get('message')}"[:MAX_ERROR]
    return Outcome(status, changes, data)
