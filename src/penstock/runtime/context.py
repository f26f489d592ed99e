"""The context of a run or of a part of it.

An `ExecutionContext` is thin: it refers to its run, its account in the ledger, its cancellation token and its place in
the call tree, and delegates to them. Contexts form a tree; `with_input`, `with_upstream` and `with_sub_budget` return
another handle of the same place, `spawn_child` creates a new place.
"""

from __future__ import annotations

import asyncio
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, TypeVar

from penstock import checks
from penstock.clock import SYSTEM_CLOCK, Clock, utc_from_ns
from penstock.containment import accounts
from penstock.containment.accounts import Account
from penstock.containment.breaker import CircuitBreaker
from penstock.containment.ledger import Ledger, UnhintedCalls
from penstock.containment.limits import (
    NO_LIMITS,
    UNLIMITED,
    Budget,
    ExecutionConfig,
    ResourceUsage,
)
from penstock.containment.safety import ChainMetadata, Decision, SafetyEvent
from penstock.containment.shield import ShieldPipeline, Slot
from penstock.errors import CancelledError, Halted, InvalidValue
from penstock.ids import new_run_id
from penstock.money import Usd
from penstock.runtime import bills, metering, remote_holds
from penstock.runtime.admission import after_end
from penstock.runtime.billing.prices import PriceBook
from penstock.runtime.billing.usage import Usage
from penstock.runtime.bills import UnresolvedBill
from penstock.runtime.call import Call, describe, running_call, stopped
from penstock.runtime.calls import Calls
from penstock.runtime.cancellation import Cancellation, CancellationToken
from penstock.runtime.durable.journal import Journal
from penstock.runtime.durable.shared import SharedBudget
from penstock.runtime.handle import Handle
from penstock.runtime.observers import Observer, Observers, Subscription
from penstock.runtime.run import THE_RUNS_OWN, Run, RunSettings
from penstock.runtime.settlement import leave_running
from penstock.runtime.snapshot import ContextSnapshot, remarks, take_snapshot, totals
from penstock.stops import LIMIT_REASONS, Stop, StopReason, TerminationReason
from penstock.tracing.divergence import DivergenceDetector
from penstock.tracing.events import (
    CallEnded,
    ChildCompleteTrace,
    ChildSpawnTrace,
    CustomTrace,
    RunCompleted,
    TraceEvent,
)
from penstock.tracing.execution_graph import ExecutionGraph
from penstock.tracing.explain import explain
from penstock.tracing.lifecycle import Status
from penstock.tracing.record import OPEN, CallRecord, IterationMark, Source, mark_stopped
from penstock.tracing.stats import ExecutionStats

T = TypeVar("T")

NO_RESULTS: Mapping[str, Any] = MappingProxyType({})

_STATUS_OF: dict[TerminationReason, Status] = {
    TerminationReason.SUCCESS: "success",
    TerminationReason.MAX_ITERATIONS: "halt",
    TerminationReason.ERROR: "fail",
    TerminationReason.CONTEXT_CANCELED: "halt",
    TerminationReason.HOOK_ABORT: "halt",
    TerminationReason.LIMIT_EXCEEDED: "halt",
}

_STOPPED = frozenset(
    {TerminationReason.CONTEXT_CANCELED, TerminationReason.HOOK_ABORT, TerminationReason.LIMIT_EXCEEDED}
)
"""Ends of a context that was stopped, rather than completed or left with an error."""


class Outcome(NamedTuple):
    """The result of an execution in a context, or the error that ended the context."""

    result: Any
    error: BaseException | None
    reason: TerminationReason | None = None
    """How the execution ended; None if the error came from elsewhere."""


entered_contexts: ContextVar[tuple[ExecutionContext, ...]] = ContextVar("penstock_context", default=())
"""The contexts entered in this thread or task and not left yet, innermost last."""


def current_context() -> ExecutionContext | None:
    """Return the innermost context entered with `with` in this thread or task; None outside of any."""
    entered = entered_contexts.get()
    return entered[-1] if entered else None


def innermost(context: Handle) -> Handle:
    """Return the deepest open context of the same run in this thread or task: it makes the call and is charged."""
    places: list[Handle] = [context, *entered_contexts.get()[-1:]]
    parent = running_call.get()
    if parent is not None and parent.record.end_seq == OPEN:
        places.append(parent.context)
    same = [place for place in places if place._run is context._run and place._base.end_seq == OPEN]
    # Of two at the same depth, prefer the later one: it may be the same context with its own budget.
    return max(reversed(same), key=lambda place: place._base.depth, default=context)


def current_call() -> Call | None:
    """Return the call whose function is being executed in this thread or task; None outside of any."""
    return running_call.get()


def _log_in_run(pipeline: ShieldPipeline, event: SafetyEvent) -> None:
    """Record the event of a direct hook call in the current run, if that run has the pipeline."""
    call = running_call.get()
    places: list[Handle] = [*entered_contexts.get()[::-1], *([] if call is None else [call.context])]
    for place in places:
        run = place._run
        if run.pipeline is pipeline and place._base.end_seq == OPEN:
            record = call.record if call is not None and call.context._run is run else place._base
            run.record_safety(event, place._source, record)
            return


class ExecutionContext(Calls):
    """One run, or a child of one: limits, call tree, events, stats and cancellation of everything under it."""

    __slots__ = (
        "__weakref__",
        "_child_names",
        "_children",
        "_ended_as",
        "_error",
        "_final",
        "_handle_of",
        "_inside",
        "_iteration_ms",
        "_iteration_started_ns",
        "_let_go",
        "_outcome",
        "_started_ns",
        "_upstream",
        "_upstream_source",
        "data",
        "input",
        "session",
        "trace",
    )

    parent: ExecutionContext | None
    _upstream: dict[str, Any] | None
    _upstream_source: Mapping[str, Any]
    _started_ns: int

    def __init__(
        self,
        config: ExecutionConfig | None = None,
        pipeline: ShieldPipeline | None = None,
        metadata: ChainMetadata | None = None,
        *,
        name: str = "main",
        data: Any = None,
        session: Any = None,
        input: Any = None,
        upstream: Mapping[str, Any] | None = None,
        budget: Budget | None = None,
        usage: ResourceUsage | None = None,
        cancellation: CancellationToken | None = None,
        trace: Any = None,
        breaker: CircuitBreaker | None = None,
        prices: PriceBook | None = None,
        divergence: DivergenceDetector | None = None,
        ledger: Ledger | None = None,
        settings: RunSettings | None = None,
        clock: Clock = SYSTEM_CLOCK,
        journal: Journal | None = None,
        shared_budget: SharedBudget | None = None,
    ) -> None:
        checks.optional("config", config, ExecutionConfig)
        checks.optional("pipeline", pipeline, ShieldPipeline)
        checks.optional("metadata", metadata, ChainMetadata)
        checks.text("name", name)
        if upstream is not None:
            checks.mapping("upstream", upstream, "results by step")
        if trace is not None and not callable(getattr(trace, "add_step", None)):
            raise InvalidValue("trace", trace, "an ExecutionTrace, or None for no trace")
        checks.optional("budget", budget, Budget)
        checks.optional("usage", usage, ResourceUsage)
        checks.optional("cancellation", cancellation, CancellationToken)
        checks.optional("breaker", breaker, CircuitBreaker)
        checks.optional("prices", prices, PriceBook)
        checks.optional("divergence", divergence, DivergenceDetector)
        checks.optional("ledger", ledger, Ledger)
        checks.optional("settings", settings, RunSettings)
        checks.optional("journal", journal, Journal)
        checks.optional("shared_budget", shared_budget, SharedBudget)
        clock = clock if ledger is None else _clock_of(ledger, clock)
        limits = NO_LIMITS if config is None else config.limits()
        if budget is not None:
            limits = budget.limits() if config is None else budget.limits().tighter(limits)
        metadata = metadata or _anonymous()
        source = Source(name)
        if usage is not None:
            if ledger is not None:
                raise InvalidValue("usage", usage, "left out when a ledger is passed, which has its own figures")
            own = metering.open_ledger(usage, name, limits, clock)
        else:
            own = Ledger(name, limits, clock=clock) if ledger is None else ledger
        account = own.root if ledger is None else own.open(name, limits)
        if ledger is not None and ledger.unhinted is None:
            ledger.unhinted = UnhintedCalls()
        self._place(None, name, data, session, input, dict(upstream) if upstream else NO_RESULTS, trace)
        self._run = run = Run(
            own,
            source,
            metadata,
            pipeline=pipeline,
            breaker=breaker,
            prices=prices,
            divergence=divergence,
            settings=settings,
            external_token=cancellation is not None,
            clock=clock,
            journal=journal,
            shared=shared_budget,
            usage=usage,
        )
        if pipeline is not None:
            pipeline._log = _log_in_run
        self._account = account
        self._source = source
        self._started_ns = account.opened_ns if usage is None else run.now()
        opened_ns = None if usage is None else account.opened_ns
        if cancellation is None and ledger is None:
            self._token = CancellationToken(name=name, deadline_s=limits.time_s, clock=clock, _opened_ns=opened_ns)
        else:
            outer = cancellation or CancellationToken(name=name, clock=clock)
            if ledger is not None:
                outer = outer.child(own.root.name, deadline_s=_seconds_left(own))
            self._token = outer.child(name, deadline_s=limits.time_s, _opened_ns=opened_ns)
        self._base = run.begin(name, metadata.to_dict(), source)
        if usage is not None:
            metering.follow(usage, self._base, shared_budget)
        if shared_budget is not None:
            remote_holds.bind(shared_budget, run, source)

    def _place(
        self,
        parent: ExecutionContext | None,
        name: str,
        data: Any,
        session: Any,
        input: Any,
        upstream: Mapping[str, Any],
        trace: Any,
    ) -> None:
        self.parent = parent
        self.name = name
        self.data = data
        self.session = session
        self.input = input
        self.trace = trace
        """Where graphs under this context record their steps; None for nowhere."""
        self._upstream = None
        self._upstream_source = upstream
        """Source of `upstream`, or the copy itself once it exists. Contexts derived from this one copy it in turn."""
        self._children: list[ExecutionContext] | None = None
        """Set on the origin only."""
        self._child_names: dict[str, int] = {}
        self._iteration_started_ns: int | None = None
        self._iteration_ms = 0.0
        """Duration of the last iteration that ended."""
        self._handle_of: ExecutionContext | None = None
        """The context this is a handle of, if it is one."""
        self._inside = 0
        """Number of open `with` blocks of this context, in any thread."""
        self._error: BaseException | None = None
        """Error with which the first of them was left."""
        self._ended_as: TerminationReason | None = None
        self._final: Cancellation | None = None
        """Its cancellation when it ended; a later cancel of its token did not stop it."""
        self._let_go: Callable[[], None] | None = None
        self._outcome: Outcome | None = None
        """Result of the last execution in this context, or the error that ended the context."""

    @property
    def upstream(self) -> dict[str, Any]:
        """The results so far, by step: this context's own dict, copied on first access."""
        results = self._upstream
        if results is None:
            source = self._upstream_source
            if type(source) is ChainMap:  # copied map by map: iterating over it takes many times as long
                results = {}
                for part in reversed(source.maps):
                    results |= part
            else:
                results = dict(source)
            self._upstream = self._upstream_source = results
        return results

    @upstream.setter
    def upstream(self, upstream: dict[str, Any]) -> None:
        self._upstream = self._upstream_source = upstream

    def report(
        self,
        *,
        cost_usd: Usd | None = None,
        input_tokens: int = 0,
        output_tokens: int = 0,
        model: str | None = None,
    ) -> None:
        """Report, from inside a call, the usage so far; it is charged when the call ends, whatever its outcome."""
        call = self._call_here()
        if call is None:
            raise InvalidValue("report", "from elsewhere", "called from inside a function that this run executes")
        if call.record.owner is not call:
            raise InvalidValue("report", "after its end", f"called while the call {call.record.name!r} runs")
        usage = Usage.of(cost_usd=cost_usd, input_tokens=input_tokens, output_tokens=output_tokens, model=model)
        call.usage = usage if call.usage is None else call.usage.plus(usage)

    # Limits and cancellation.

    @property
    def budget(self) -> Budget | None:
        """The ceilings of this context: its own, or those of the nearest outer context; None if there are none."""
        budget = self._account.limits.as_budget()
        return None if budget == Budget() else budget

    @property
    def ledger(self) -> Ledger:
        """The ledger of this run's money, steps, tokens, calls and retries."""
        return self._run.ledger

    @property
    def cancellation(self) -> CancellationToken:
        """The token that stops this context and everything below it."""
        return self._token

    @property
    def stop(self) -> Stop | None:
        """What stopped this context: its cancel, or the first limit that refused a call; None if it was not stopped."""
        cancelled = self._cancelled
        return self._run.stops.get(self._source) if cancelled is None else cancelled.stop

    @property
    def _cancelled(self) -> Cancellation | None:
        origin = self._origin
        return self._token.cancellation if origin._ended_as is None else origin._final

    def check_budget(self) -> None:
        """Raise BudgetExceededError if this budget or an outer one is used up."""
        with self._run.lock:
            stop = accounts.used_up(self._account, self._run.now())
        if stop is not None:
            raise stopped(self, stop)

    def check_cancelled(self) -> None:
        """Raise CancelledError if this context was cancelled, timed out or aborted."""
        self._notice_deadline()
        self._token.check()

    def abort(self, reason: str = "aborted") -> None:
        """Stop everything under this context: cancel running work and refuse new calls. Raises nothing."""
        checks.text("reason", reason)
        if self._token.cancel(reason) and not self._run.graph.closed:
            stop = self._token.stop
            assert stop is not None
            self._run.outside_the_lock(
                lambda: self._run.record_stop(stop, Decision.HALT, self._source, self._base, "ExecutionContext")
            )

    def unresolved(self) -> list[UnresolvedBill]:
        """Return the calls of the run whose bill is unknown and whose hold stays taken, oldest first.

        Possible at any time, also after the end of the run.
        """
        return bills.unresolved(self._run)

    def resolve(self, call_id: str, *, cost_usd: Usd, by: str, input_tokens: int = 0, output_tokens: int = 0) -> None:
        """Resolve the unresolved bill of a call at its actual cost; `by` is the person who knows it.

        The amount replaces the hold, and may be more than it. The resolution is recorded as a safety event. Raises
        LedgerError if the call has no unresolved bill.
        """
        bills.resolve(self, call_id, cost_usd, by, input_tokens, output_tokens)

    def release(self, call_id: str, *, by: str) -> None:
        """Release the hold of a call with an unresolved bill, which cost nothing; `by` is the person who knows.

        The release is recorded as a safety event. Raises LedgerError if the call has no unresolved bill.
        """
        bills.release(self, call_id, by)

    def egress(self, url: str, method: str = "GET") -> Decision:
        """Ask the egress hooks whether something may be sent to `url`; a denial is recorded."""
        run = self._run
        if run.pipeline is None or not run.pipeline.has(Slot.EGRESS):
            return Decision.ALLOW
        call = self._call_here() or Call(self, self._base, False, self._token)
        verdict = run.pipeline.judge(Slot.EGRESS, describe(call), url, method)
        if verdict is None:
            return Decision.ALLOW
        run.record_verdict(verdict, self._source, call.record)
        return verdict.decision

    def with_input(self, input: Any) -> ExecutionContext:
        """Return the same place with another input."""
        handle = self._same_place()
        handle.input = input
        return handle

    def with_upstream(self, upstream: Mapping[str, Any]) -> ExecutionContext:
        """Return the same place with these results added to the upstream ones."""
        handle = self._same_place()
        handle._upstream_source = {**self._upstream_source, **upstream}
        return handle

    def with_sub_budget(self, sub_budget: Budget, name: str | None = None) -> ExecutionContext:
        """Return the same place under its own budget, in addition to every outer budget."""
        checks.optional("sub_budget", sub_budget, Budget)
        handle = self._same_place()
        handle._limit(sub_budget, name or self.name, self._token)
        return handle

    # The tree of contexts.

    def spawn_child(
        self,
        name: str,
        data: Any = None,
        *,
        budget: Budget | None = None,
        cancellation: CancellationToken | None = None,
    ) -> ExecutionContext:
        """Return a child context: its calls form a sub-tree, and its figures count in this context too.

        Use it with `with`, or end it with `complete_child`.
        """
        checks.text("name", name)
        checks.optional("budget", budget, Budget)
        checks.optional("cancellation", cancellation, CancellationToken)
        run = self._run
        child: ExecutionContext = object.__new__(ExecutionContext)
        child._place(self, name, data, self.session, self.input, self._upstream_source, self.trace)
        child._run, child._account = run, self._account
        child._started_ns = run.now()
        child._limit(budget, name, self._token)
        call = self._call_here()
        parent = call.record if call is not None and call.record.depth > self._base.depth else self._base
        with run.lock:
            if self._base.end_seq != OPEN:
                raise self._after_the_end(f"child {name!r}")
            child._source = Source(_distinct(name, self._child_names), self._source)
            child._base = base = run.graph.begin(parent, "system", name, None, child._source, child._started_ns)
            origin = self._origin
            if origin._children is None:
                origin._children = []
            origin._children.append(child)
            where = run.where(self._source, parent, child._started_ns)
            run.graph.append(ChildSpawnTrace(child_name=name, node_id=base.node_id, **where))
        if cancellation is not None:
            run.external_token = True
            child._let_go = child._token.follow(cancellation)
        return child

    def complete_child(self, child: ExecutionContext, reason: TerminationReason | None = None) -> None:
        """End the child; idempotent. Without a reason it is a success, unless a limit stopped it."""
        if not _is_child(child, self):
            raise InvalidValue("child", child, f"a child of {self.name!r}")
        _end_child(child._origin, None if reason is None else _as_reason(reason))

    @property
    def termination_reason(self) -> TerminationReason | None:
        """How this context ended; while it is open, how the last execution in it ended; None before that."""
        origin = self._origin
        if origin._ended_as is None and origin._outcome is not None:
            return origin._outcome.reason
        return origin._ended_as

    @property
    def final_result(self) -> Any:
        """Result of the last execution in this context; None until there is one."""
        outcome = self._origin._outcome
        return None if outcome is None else outcome.result

    @property
    def error(self) -> BaseException | None:
        """Error that ended this context or the last execution in it; None if there was none."""
        outcome = self._origin._outcome
        return None if outcome is None else outcome.error

    @property
    def start_time(self) -> datetime:
        """When this context began, in UTC."""
        return utc_from_ns(self._run.wall_time_ns(self._started_ns))

    @property
    def end_time(self) -> datetime | None:
        """When this context ended, in UTC; None while it is open."""
        base = self._base
        return None if base.end_seq == OPEN else utc_from_ns(self._run.wall_time_ns(base.ended_ns))

    @property
    def children(self) -> Sequence[ExecutionContext]:
        """The child contexts, in the order they were spawned."""
        return tuple(self._origin._children or ())

    @property
    def depth(self) -> int:
        """0 for a run's main context, 1 for its children, …"""
        return self._source.depth

    @property
    def iteration(self) -> int:
        """Number of the current loop iteration; 0 before the first."""
        return self._source.iteration

    def start_iteration(self) -> int:
        """Begin the next iteration of a loop; return its number."""
        run, source, base = self._run, self._source, self._base
        if base.end_seq != OPEN:
            raise self._after_the_end("iteration")
        (self._handle_of or self)._iteration_started_ns = now_ns = run.now()
        graph = run.graph
        with run.lock:
            source.iteration += 1
            if not graph.closed:
                graph.append(IterationMark(source, base, now_ns, now_ns, None))
            return source.iteration

    def end_iteration(self, action: str = "continue") -> None:
        """Finish the current iteration; `action` is the next action of the loop: continue or terminate."""
        origin = self._handle_of or self
        started_ns = origin._iteration_started_ns
        if started_ns is None:
            raise InvalidValue("end_iteration", "before the first", "called after start_iteration")
        run = self._run
        graph, now_ns = run.graph, run.now()
        origin._iteration_ms = (now_ns - started_ns) / 1_000_000
        with run.lock:
            if not graph.closed:
                graph.append(IterationMark(self._source, self._base, now_ns, started_ns, str(action)))

    # Events and figures.

    @property
    def run_id(self) -> str:
        """The id of the run, which is its chain id."""
        return self._run.id

    @property
    def metadata(self) -> ChainMetadata:
        """Owner and labels of the run."""
        return self._run.metadata

    @property
    def graph(self) -> ExecutionGraph:
        """The call tree of the run."""
        return self._run.graph

    @property
    def stats(self) -> ExecutionStats:
        """Usage of this context, its children included."""
        return self._run.graph.stats(self._source)

    @property
    def events(self) -> list[TraceEvent]:
        """Events of this context, without those of its children."""
        return [event for event in self._run.graph.events() if event.source == self._source.path]

    @property
    def uncontained_requests(self) -> int:
        """Number of model requests in this process that belonged to no run while a block of this run was open.

        They were not limited, and are in no figure of the run; `explain()` has their hosts.
        """
        return sum((self._run.uncontained or {}).values())

    def history(self, since: int = 0, limit: int | None = None) -> list[TraceEvent]:
        """Return the events of the whole run after `since`, at most `limit`."""
        return self._run.graph.events(since, limit)

    def observe(self, observer: Observer) -> Subscription:
        """Deliver every event of the run to `observer`, in batches, on its own thread."""
        with self._run.lock:
            if self._run.observers is None:
                self._run.observers = Observers(self._run.graph)
        return self._run.observers.add(observer)

    def record_event(self, event: SafetyEvent | TraceEvent) -> None:
        """Add an event to the run's log. A call that ran elsewhere is charged at its cost."""
        self._must_be_open("event")
        if isinstance(event, SafetyEvent):
            self._run.record_safety(event, self._source, self._here())
        elif isinstance(event, CallEnded):
            self._run.record_call(event, self._account, self._source, self._here())
        elif isinstance(event, TraceEvent):
            if isinstance(event, THE_RUNS_OWN):
                raise InvalidValue("event", event, "one that the run does not write itself (subclass CustomTrace)")
            if isinstance(event, CustomTrace):
                checks.text("name", event.name)
                data: object = event.data
                if not isinstance(data, Mapping):
                    raise InvalidValue("data", data, "a mapping")
            self._run.record(event, self._source, self._here())
        else:
            raise InvalidValue("event", event, "a SafetyEvent or a TraceEvent (subclass CustomTrace for your own)")

    def trace_custom(self, name: str, data: Mapping[str, Any] | None = None) -> None:
        """Add your own event to the run's log."""
        checks.text("name", name)
        checks.optional("data", data, Mapping)
        self._must_be_open(f"event {name!r}")
        self._run.record(CustomTrace(name=name, data=dict(data or {})), self._source, self._here())

    def get_snapshot(self) -> ContextSnapshot:
        """Return the current state of the run; possible at any time, also after a stop."""
        self._notice_deadline()
        return take_snapshot(self, self._started_ns, self._cancelled)

    @property
    def partial_results(self) -> Mapping[str, Any]:
        """The values of the calls that succeeded so far, by call name.

        A streaming call that was stopped has an `IncompleteOutput` there.
        """
        return self._run.partial_results()

    def explain(self) -> str:
        """Render the call tree: what ran, what it cost, what was refused and why."""
        return "\n".join((explain(self._run.graph), totals(self), *remarks(self._run)))

    def _repr_html_(self) -> str:
        """Return the run as a notebook shows it: limits, call tree, timeline, costs and events."""
        from penstock.tracing.page import trace_frame  # reads files that only a page needs

        return trace_frame(self)

    # Beginning and end.

    def __enter__(self) -> ExecutionContext:
        with self._run.lock:
            self._inside += 1
        entered_contexts.set((*entered_contexts.get(), self))
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        entered = entered_contexts.get()
        if self in entered:  # fixtures and generators may leave it in a context where it was not entered
            last = len(entered) - 1 - entered[::-1].index(self)
            entered_contexts.set(entered[:last] + entered[last + 1 :])
        with self._run.lock:
            self._inside -= 1
            self._error = self._error or exc_val
            if self._inside:
                return
            error, self._error = self._error, None
        self.end(error)

    async def __aenter__(self) -> ExecutionContext:
        return self.__enter__()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        self.__exit__(exc_type, exc_val, exc_tb)

    def end(self, error: BaseException | None = None) -> None:
        """End this context; `error` is what ended it, if anything. Idempotent.

        A handle from `with_input`, `with_upstream` or `with_sub_budget` ends nothing: it shares its place.
        """
        if self._origin is not self:
            return
        self._notice_deadline()
        if error is not None and self._base.end_seq == OPEN and error is not self.error:
            self._outcome = Outcome(self.final_result, error)
        if self.parent is not None:
            self._run.outside_the_lock(lambda: _end_child(self, reason_for(self, error)))
        else:
            self._run.outside_the_lock(lambda: _end_run(self, error))

    def __repr__(self) -> str:
        return f"<ExecutionContext {self._source.path} of {self._run.id}>"

    # Inside.

    def _same_place(self) -> ExecutionContext:
        handle: ExecutionContext = object.__new__(ExecutionContext)
        upstream = self._upstream_source
        handle._place(self.parent, self.name, self.data, self.session, self.input, upstream, self.trace)
        handle._run, handle._source, handle._account = self._run, self._source, self._account
        handle._token, handle._base = self._token, self._base
        handle._started_ns, handle._handle_of = self._started_ns, self._origin
        handle._child_names = self._child_names
        return handle

    @property
    def _origin(self) -> ExecutionContext:
        """The context that iterates and ends: itself, or the one this is a handle of."""
        return self._handle_of or self

    def _under(self, token: CancellationToken) -> ExecutionContext:
        """Return the same place, stopped by another token."""
        handle = self._same_place()
        handle._token = token
        return handle

    def _limit(self, budget: Budget | None, name: str, outer: CancellationToken) -> None:
        limits = NO_LIMITS if budget is None else budget.limits()
        if budget is not None:
            self._account = self._run.ledger.open(name, limits, self._account)
        self._token = outer.child(name, deadline_s=limits.time_s)

    @property
    def _own_account(self) -> Account:
        return self._origin._account

    def _call_here(self) -> Call | None:
        """Return the call of this run that is being executed in this thread or task."""
        call = running_call.get()
        return call if call is not None and call.context._run is self._run else None

    def _notice_deadline(self) -> None:
        """Stop the context if its deadline has passed, even if no call has noticed it."""
        if self._base.end_seq != OPEN or not self._token.is_cancelled:
            return
        stop = self._token.stop
        if stop is not None and stop.reason is StopReason.TIMEOUT and self._source not in self._run.stops:
            self._remember(stop)
            self._run.outside_the_lock(
                lambda: self._run.record_stop(stop, Decision.HALT, self._source, self._base, "ExecutionContext")
            )

    def _must_be_open(self, what: str) -> None:
        if self._base.end_seq != OPEN:
            raise self._after_the_end(what)

    def _must_take_work(self, what: str) -> None:
        """Raise if the context has ended: its stop, or RunEnded if it ended normally, below its limits."""
        if self._base.end_seq != OPEN:
            after_end(self, what).result()

    def _stop_after_end(self) -> Stop | None:
        place: ExecutionContext | None = self._origin
        while place is not None:
            cancelled, reason = place._token.cancellation, place._ended_as
            if place.stop is not None:
                return place.stop
            if reason in _STOPPED:
                return Stop(StopReason.ABORTED, f"{place.name!r} ended as {reason}", budget=place.name)
            if cancelled is not None and cancelled.cause == "user":  # aborted after a normal end
                return cancelled.stop
            place = place.parent
        with self._run.lock:  # a limit that was reached refuses every later call, also after a normal end
            return accounts.used_up(self._account, self._base.ended_ns)

    def _here(self) -> CallRecord:
        call = self._call_here()
        return self._base if call is None else call.record


# The end.


def reason_for(context: ExecutionContext, error: BaseException | None) -> TerminationReason:
    """Return how the context ended, given the error that ended it."""
    return _reason_for(context, error, context.cancellation.cancellation)


def _reason_for(
    context: ExecutionContext, error: BaseException | None, cancelled: Cancellation | None
) -> TerminationReason:
    outcome = context._outcome
    if outcome is not None and outcome.error is not None and outcome.reason is not None:
        is_the_end_of_both = error is outcome.error or (error is None and cancelled is None)
        if is_the_end_of_both:
            return outcome.reason
    if isinstance(error, BaseExceptionGroup):
        # A fault in the group is the reason; without one, its first stop is.
        reasons = [_reason_for(context, one, cancelled) for one in error.exceptions]
        return TerminationReason.ERROR if TerminationReason.ERROR in reasons else reasons[0]
    if isinstance(error, Halted):
        return _reason_of(error.stop)
    if isinstance(error, CancelledError | asyncio.CancelledError | KeyboardInterrupt | SystemExit | GeneratorExit):
        return TerminationReason.CONTEXT_CANCELED if cancelled is None else _reason_of(cancelled.stop)
    if error is not None:
        reason = getattr(error, "termination_reason", None)
        return reason if isinstance(reason, TerminationReason) else TerminationReason.ERROR
    stop = _stop(context, cancelled)
    return TerminationReason.SUCCESS if stop is None else _reason_of(stop)


def _stop(context: ExecutionContext, cancelled: Cancellation | None) -> Stop | None:
    return context._run.stops.get(context._source) if cancelled is None else cancelled.stop


def _reason_of(stop: Stop) -> TerminationReason:
    if stop.reason in LIMIT_REASONS:
        return TerminationReason.LIMIT_EXCEEDED
    if stop.reason is StopReason.HOOK_DENIED:
        return TerminationReason.HOOK_ABORT
    if stop.reason is StopReason.ABORTED:
        return TerminationReason.CONTEXT_CANCELED
    return TerminationReason.ERROR


def _end_child(child: ExecutionContext, reason: TerminationReason | None) -> None:
    """End the child's record in the tree, and write the event to its parent; once."""
    run, record, parent = child._run, child._base, child.parent
    reason = reason or reason_for(child, None)
    now_ns = run.now()
    stop = child.stop
    with run.lock:
        if record.end_seq != OPEN or parent is None:
            return
        below = [call for call in run.graph.open_calls() if call is not record and call.is_under(record)]
        if below:
            _abandon(child, below, now_ns, f"{child.name!r} ended while the call was running")
        mark_stopped(record, stop)
        run.graph.end(record, now_ns, _STATUS_OF[reason], stop_reason=str(stop) if stop else None)
        _tell_parent(child, reason, now_ns)
        if below and run.queues:
            run.room.changed(now_ns)
    _stop_leftovers(child, below)


def _end_run(context: ExecutionContext, error: BaseException | None) -> None:
    """Close the run: abandon open calls, end the root, and write the last event; once."""
    run, root = context._run, context._base
    now_ns = run.now()
    with run.lock:
        if run.graph.closed:
            return
        # Read once, under the lock: a caller that cancels and then finds the run open relies on it ending cancelled.
        cancelled = context.cancellation.cancellation
        reason, stop = _reason_for(context, error, cancelled), _stop(context, cancelled)
        below = [call for call in run.graph.open_calls() if call is not root]
        if below:
            _abandon(context, below, now_ns, "the run ended while the call was running")
        error_class = type(error).__name__ if error is not None else None
        mark_stopped(root, stop)
        run.graph.end(
            root, now_ns, _STATUS_OF[reason], stop_reason=str(stop) if stop else None, error_class=error_class
        )
        where = run.where(context._source, None, now_ns)
        run.graph.close(RunCompleted(termination_reason=reason, error=error_class, **where))
        if below and run.queues:
            run.room.changed(now_ns)
        context._final, context._ended_as = cancelled, reason
    _stop_leftovers(context, below)


def _abandon(context: ExecutionContext, open_calls: list[CallRecord], now_ns: int, why: str) -> None:
    """End open calls, newest first, so that children end before their parents. The caller holds the lock."""
    run, contexts = context._run, {child._base.number: child for child in _below(context)}
    for record in open_calls:
        leave_running(run, record, now_ns, f"{StopReason.ABORTED}: {why}")
        child = contexts.get(record.number)
        if child is not None:
            _tell_parent(child, _reason_of(child.stop) if child.stop else TerminationReason.CONTEXT_CANCELED, now_ns)


def _below(context: ExecutionContext) -> Iterator[ExecutionContext]:
    found = list(context._children or ())
    while found:
        child = found.pop()
        yield child
        found.extend(child._children or ())


def _tell_parent(child: ExecutionContext, reason: TerminationReason, now_ns: int) -> None:
    """Write the event that the child has ended. The caller holds the lock."""
    run, parent, record = child._run, child.parent, child._base
    assert parent is not None
    child._final, child._ended_as = child.cancellation.cancellation, reason
    duration_ms = (now_ns - child._started_ns) / 1_000_000
    run.graph.append(
        ChildCompleteTrace(
            child_name=child.name,
            node_id=record.node_id,
            termination_reason=reason,
            duration_ms=duration_ms,
            **run.where(parent._source, record.parent, now_ns),
        )
    )
    if child._let_go is not None:
        child._let_go()


def _stop_leftovers(context: ExecutionContext, leftovers: list[CallRecord]) -> None:
    """Cancel work that is still running; a context without such work ends without a cancel."""
    if context._run.shared is not None:
        context._run.shared.flush_soon()
    if leftovers:
        context.cancellation.cancel(f"{context.name!r} has ended", cause="shutdown")
    context.cancellation.close()


# Arguments.


def _is_child(child: object, of: ExecutionContext) -> bool:
    parent = child.parent if isinstance(child, ExecutionContext) else None
    return parent is not None and parent._base is of._base


def _as_reason(given: str) -> TerminationReason:
    if isinstance(given, TerminationReason):
        return given
    if given not in tuple(TerminationReason):
        raise InvalidValue("reason", given, f"one of {', '.join(TerminationReason)}, or None")
    return TerminationReason(given)


def _distinct(name: str, taken: dict[str, int]) -> str:
    """Return the name, with a number appended if it is taken. The caller holds the lock."""
    taken[name] = times = taken.get(name, 0) + 1
    return name if times == 1 else _distinct(f"{name}#{times}", taken)


def _clock_of(ledger: Ledger, clock: Clock) -> Clock:
    if clock is not SYSTEM_CLOCK and clock is not ledger.clock:
        raise InvalidValue("clock", clock, "the clock of the ledger, or left out")
    return ledger.clock


def _seconds_left(ledger: Ledger) -> float | None:
    """Return the seconds until the ledger's deadline, which no token has yet; None if it has none."""
    deadline_ns = ledger.root.deadline_ns
    return None if deadline_ns == UNLIMITED else max(0, deadline_ns - ledger.clock.monotonic_ns()) / 1_000_000_000


def _anonymous() -> ChainMetadata:
    run_id = new_run_id()
    return ChainMetadata(request_id=run_id, chain_id=run_id)
