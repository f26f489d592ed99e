"""The handle that goes through everything.

An `ExecutionContext` is thin: it points at its run, at its account in the ledger, at its cancellation token and at
its place in the call tree, and passes every request on to the one of them that answers it. Contexts form a tree;
`with_input`, `with_upstream` and `with_sub_budget` make another handle at the same place, `spawn_child` makes a place
of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from penstock.clock import SYSTEM_CLOCK, Clock, utc_from_ns
from penstock.containment import accounts
from penstock.containment.accounts import Account, Balance
from penstock.containment.breaker import CircuitBreaker, PolicyContext
from penstock.containment.ledger import Ledger
from penstock.containment.limits import NO_LIMITS, UNLIMITED, Budget, ExecutionConfig, Limits, ResourceUsage
from penstock.containment.safety import ChainMetadata, Decision, SafetyEvent
from penstock.containment.shield import ShieldPipeline, Slot, Verdict
from penstock.errors import InvalidValue
from penstock.ids import new_run_id
from penstock.money import Usd, to_nanos, to_usd
from penstock.runtime import door, ending
from penstock.runtime.cancellation import CancellationToken
from penstock.runtime.door import Call, Work
from penstock.runtime.observers import Observer, Observers, Subscription
from penstock.runtime.options import DEFAULT_OPTIONS, WrapOptions
from penstock.runtime.prices import PriceBook
from penstock.runtime.run import Run, RunSettings
from penstock.runtime.snapshot import ContextSnapshot, node_record
from penstock.runtime.usage import Usage
from penstock.stops import Stop, TerminationReason
from penstock.tracing.divergence import DivergenceDetector
from penstock.tracing.events import (
    CallEnded,
    ChildSpawnTrace,
    CustomTrace,
    IterationEndTrace,
    IterationStartTrace,
    RunStarted,
    TraceEvent,
)
from penstock.tracing.execution_graph import ExecutionGraph
from penstock.tracing.explain import explain
from penstock.tracing.lifecycle import CallKind
from penstock.tracing.record import CallRecord, Source
from penstock.tracing.stats import ExecutionStats

T = TypeVar("T")

_active: ContextVar[ExecutionContext | None] = ContextVar("penstock_context", default=None)


def current_context() -> ExecutionContext | None:
    """The innermost context that was entered with `with` here; None outside of any."""
    return _active.get()


class Outcome(NamedTuple):
    """What came of one call: its value (None if it has none), the decision on it, and the call itself."""

    value: Any
    decision: Decision
    call: Call


class ExecutionContext:
    """One run, or a child of one: limits, call tree, events, stats and cancellation for whatever runs under it."""

    __slots__ = (
        "__weakref__",
        "_account",
        "_base",
        "_budget",
        "_children",
        "_entered",
        "_first_stop",
        "_iteration_started_ns",
        "_owns_run",
        "_run",
        "_source",
        "_started_ns",
        "_token",
        "data",
        "input",
        "name",
        "parent",
        "session",
        "termination_reason",
        "upstream",
    )

    _run: Run
    _account: Account
    _token: CancellationToken
    _base: CallRecord
    _source: Source
    _budget: Budget | None
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
        cancellation: CancellationToken | None = None,
        breaker: CircuitBreaker | None = None,
        prices: PriceBook | None = None,
        divergence: DivergenceDetector | None = None,
        ledger: Ledger | None = None,
        settings: RunSettings | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        _must_be("config", config, ExecutionConfig)
        _must_be("pipeline", pipeline, ShieldPipeline)
        _must_be("metadata", metadata, ChainMetadata)
        _must_be("budget", budget, Budget)
        _must_be("cancellation", cancellation, CancellationToken)
        _must_be("name", name, str)
        limits = (config.limits() if config else NO_LIMITS).tighter(budget.limits() if budget else NO_LIMITS)
        metadata = metadata or _anonymous()
        source = Source(name)
        own = Ledger(name, limits, clock=clock) if ledger is None else ledger
        account = own.root if ledger is None else own.open(name, limits)
        self._place(None, name, data, session, input, upstream)
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
        )
        self._account = account
        self._source = source
        self._budget = budget
        self._owns_run = True
        self._started_ns = account.opened_ns
        above = cancellation or CancellationToken(name=name, clock=clock)
        limit_s = limits.time_ns / 1_000_000_000 if limits.time_ns < UNLIMITED else None
        self._token = above.child(name, deadline_s=limit_s)
        run.record(RunStarted(name=name, metadata=_described(metadata)), source, None)
        run.graph.create_root(name, {"request_id": metadata.request_id})
        assert run.graph.root is not None
        self._base = run.graph.root

    def _place(
        self,
        parent: ExecutionContext | None,
        name: str,
        data: Any,
        session: Any,
        input: Any,
        upstream: Mapping[str, Any] | None,
    ) -> None:
        self.parent = parent
        self.name = name
        self.data = data
        self.session = session
        self.input = input
        self.upstream: Mapping[str, Any] = dict(upstream or {})
        self.termination_reason: TerminationReason | None = None
        """How this context ended; None while it is open."""
        self._budget = None
        self._children: list[ExecutionContext] = []
        self._entered: list[Token[ExecutionContext | None]] = []
        self._first_stop: Stop | None = None
        self._iteration_started_ns = 0
        self._owns_run = False

    # Calls: the decision.

    def wrap_llm_call(self, fn: Work, options: WrapOptions | None = None) -> Decision:
        """Run a model call under containment; the decision on it."""
        return self._call("llm", fn, options).decision

    def wrap_tool_call(self, fn: Work, options: WrapOptions | None = None) -> Decision:
        """Run a tool call under containment; the decision on it."""
        return self._call("tool", fn, options).decision

    async def awrap_llm_call(self, fn: Work, options: WrapOptions | None = None) -> Decision:
        """Await a model call under containment; the decision on it."""
        return (await self._acall("llm", fn, options)).decision

    async def awrap_tool_call(self, fn: Work, options: WrapOptions | None = None) -> Decision:
        """Await a tool call under containment; the decision on it."""
        return (await self._acall("tool", fn, options)).decision

    # Calls: value, decision and call.

    def call_llm(self, fn: Work, options: WrapOptions | None = None) -> Outcome:
        """Run a model call under containment; its value, the decision, the call."""
        return _outcome(self._call("llm", fn, options))

    def call_tool(self, fn: Work, options: WrapOptions | None = None) -> Outcome:
        """Run a tool call under containment; its value, the decision, the call."""
        return _outcome(self._call("tool", fn, options))

    async def acall_llm(self, fn: Work, options: WrapOptions | None = None) -> Outcome:
        """Await a model call under containment; its value, the decision, the call."""
        return _outcome(await self._acall("llm", fn, options))

    async def acall_tool(self, fn: Work, options: WrapOptions | None = None) -> Outcome:
        """Await a tool call under containment; its value, the decision, the call."""
        return _outcome(await self._acall("tool", fn, options))

    # Calls: the value.

    def llm(
        self,
        fn: Work,
        *args: Any,
        name: str = "",
        cost_hint_usd: Usd | None = None,
        timeout_s: float | None = None,
        retries: int = 0,
        model: str | None = None,
        degraded: Work | None = None,
    ) -> Any:
        """The value of a model call `fn(*args)`; or raise Halted, CancelledError, or what the function raised."""
        hint = None if cost_hint_usd is None else to_nanos(cost_hint_usd, "cost_hint_usd")
        name = name or _name_of(fn, "llm")
        return door.call(self, "llm", fn, args, name, hint, model, timeout_s, retries, degraded).result()

    def tool(
        self,
        fn: Work,
        *args: Any,
        name: str = "",
        cost_hint_usd: Usd | None = None,
        timeout_s: float | None = None,
        retries: int = 0,
        degraded: Work | None = None,
    ) -> Any:
        """The value of a tool call `fn(*args)`; or raise Halted, CancelledError, or what the function raised."""
        hint = None if cost_hint_usd is None else to_nanos(cost_hint_usd, "cost_hint_usd")
        name = name or _name_of(fn, "tool")
        return door.call(self, "tool", fn, args, name, hint, None, timeout_s, retries, degraded).result()

    async def allm(
        self,
        fn: Work,
        *args: Any,
        name: str = "",
        cost_hint_usd: Usd | None = None,
        timeout_s: float | None = None,
        retries: int = 0,
        model: str | None = None,
        degraded: Work | None = None,
    ) -> Any:
        """Like `llm`, for functions that return an awaitable."""
        hint = None if cost_hint_usd is None else to_nanos(cost_hint_usd, "cost_hint_usd")
        name = name or _name_of(fn, "llm")
        return (await door.acall(self, "llm", fn, args, name, hint, model, timeout_s, retries, degraded)).result()

    async def atool(
        self,
        fn: Work,
        *args: Any,
        name: str = "",
        cost_hint_usd: Usd | None = None,
        timeout_s: float | None = None,
        retries: int = 0,
        degraded: Work | None = None,
    ) -> Any:
        """Like `tool`, for functions that return an awaitable."""
        hint = None if cost_hint_usd is None else to_nanos(cost_hint_usd, "cost_hint_usd")
        name = name or _name_of(fn, "tool")
        return (await door.acall(self, "tool", fn, args, name, hint, None, timeout_s, retries, degraded)).result()

    def report(
        self,
        *,
        cost_usd: Usd | None = None,
        input_tokens: int = 0,
        output_tokens: int = 0,
        model: str | None = None,
    ) -> None:
        """Say, from inside a call, what it has used so far; counts when the call ends, however it ends."""
        call = door.current_call.get()
        if call is None or call.context._run is not self._run:
            raise InvalidValue("report", "no call of this run", "called from inside a function that the run executes")
        said = Usage.of(cost_usd=cost_usd, input_tokens=input_tokens, output_tokens=output_tokens, model=model)
        call.usage = said if call.usage is None else call.usage.plus(said)

    # Limits and cancellation.

    @property
    def budget(self) -> Budget | None:
        """The budget this context was given, or the nearest one above it."""
        return self._budget

    @property
    def usage(self) -> ResourceUsage:
        """What was used of this context's budget so far."""
        figures = self.balance
        elapsed_ns = self._run.now() - self._account.opened_ns
        return ResourceUsage(
            tokens_used=figures.tokens_in + figures.tokens_out,
            steps_executed=figures.steps,
            api_calls=figures.api_calls,
            cost_dollars=figures.spent_usd,
            time_elapsed_seconds=elapsed_ns / 1_000_000_000,
            retries_used=figures.retries,
            start_time=utc_from_ns(self._run.wall_time_ns(self._account.opened_ns)),
        )

    @property
    def ledger(self) -> Ledger:
        """The judge of this run's money, steps, tokens, calls and retries."""
        return self._run.ledger

    @property
    def balance(self) -> Balance:
        """The figures of this context's account, all of one instant."""
        return self._run.ledger.balance(self._account)

    @property
    def cancellation(self) -> CancellationToken:
        """The token that stops this context and everything below it."""
        return self._token

    def check_budget(self) -> None:
        """Raise BudgetExceededError if nothing more may start under this budget or one above it."""
        with self._run.lock:
            stop = accounts.used_up(self._account, self._run.now())
        if stop is not None:
            raise door.stopped(self, stop)

    def check_cancelled(self) -> None:
        """Raise CancelledError if this context was cancelled, timed out or aborted."""
        self._token.check()

    def abort(self, reason: str = "aborted") -> None:
        """Stop everything under this context: running work is reached, new calls are refused. Raises nothing."""
        _must_be("reason", reason, str)
        if self._token.cancel(reason) and not self._run.graph.closed:
            stop = self._token.stop
            assert stop is not None
            self._run.outside_the_lock(
                lambda: self._run.record_stop(stop, Decision.HALT, self._source, self._base, "ExecutionContext")
            )

    def egress(self, url: str, method: str = "GET") -> Decision:
        """Ask the egress hooks whether something may be sent to `url`; a denial is recorded."""
        run = self._run
        if run.pipeline is None or not run.pipeline.has(Slot.EGRESS):
            return Decision.ALLOW
        call = door.current_call.get() or Call(self, self._base, False, self._token)
        verdict = run.pipeline.judge(Slot.EGRESS, door.describe(call), url, method)
        if verdict is None:
            return Decision.ALLOW
        self.note(verdict, call.record)
        return verdict.decision

    def with_input(self, input: Any) -> ExecutionContext:
        """The same place with another input."""
        made = self._same_place()
        made.input = input
        return made

    def with_upstream(self, upstream: Mapping[str, Any]) -> ExecutionContext:
        """The same place with these results added to the upstream ones."""
        made = self._same_place()
        made.upstream = {**self.upstream, **upstream}
        return made

    def with_sub_budget(self, sub_budget: Budget, name: str | None = None) -> ExecutionContext:
        """The same place under a budget of its own: it and every budget above it hold."""
        _must_be("sub_budget", sub_budget, Budget)
        made = self._same_place()
        made._limit(sub_budget, name or self.name, self._token)
        return made

    # The tree of contexts.

    def spawn_child(
        self,
        name: str,
        data: Any = None,
        *,
        budget: Budget | None = None,
        cancellation: CancellationToken | None = None,
    ) -> ExecutionContext:
        """A child context: its calls form a sub-tree, its figures count here too.

        Use it with `with`, or complete it.
        """
        _must_be("name", name, str)
        run = self._run
        same_name = sum(child.name == name for child in self._children)
        source = Source(name if not same_name else f"{name}#{same_name + 1}", self._source)
        child: ExecutionContext = object.__new__(ExecutionContext)
        child._place(self, name, data, self.session, self.input, self.upstream)
        child._run, child._source, child._account = run, source, self._account
        above = door.current_call.get()
        inside = above is not None and above.context._run is run and above.record.depth > self._base.depth
        parent = above.record if above is not None and inside else self._base
        child._started_ns = run.now()
        with run.lock:
            child._base = run.graph.begin(parent, "system", name, None, source, child._started_ns)
        child._limit(budget, name, cancellation or self._token)
        self._children.append(child)
        run.record(ChildSpawnTrace(child_name=name, node_id=child._base.node_id), self._source, child._base.parent)
        return child

    def complete_child(self, child: ExecutionContext, reason: TerminationReason | None = None) -> None:
        """The child is done; again, it changes nothing. Without a reason it is success, unless a limit stopped it."""
        if child.parent is not self:
            raise InvalidValue("child", child, f"a child of {self.name!r}")
        ending.end_child(child, reason)

    @property
    def children(self) -> Sequence[ExecutionContext]:
        """The child contexts, in the order they were spawned."""
        return tuple(self._children)

    @property
    def depth(self) -> int:
        """0 for a run's main context, 1 for its children, …"""
        return self._source.depth

    @property
    def iteration(self) -> int:
        """The number of the loop iteration under way; 0 before the first."""
        return self._source.iteration

    def start_iteration(self) -> int:
        """Begin the next iteration of a loop; its number."""
        self._source.iteration += 1
        self._iteration_started_ns = self._run.now()
        self._run.record(IterationStartTrace(), self._source, self._base)
        return self._source.iteration

    def end_iteration(self, action: str = "continue") -> None:
        """Finish the iteration under way; `action` is what the loop does next: continue or terminate."""
        duration_ms = (self._run.now() - self._iteration_started_ns) / 1_000_000
        self._run.record(IterationEndTrace(duration_ms=duration_ms, action=str(action)), self._source, self._base)

    # What happened.

    @property
    def run_id(self) -> str:
        """The id of the run, which is its chain id."""
        return self._run.id

    @property
    def metadata(self) -> ChainMetadata:
        """Who the run belongs to."""
        return self._run.metadata

    @property
    def graph(self) -> ExecutionGraph:
        """The call tree of the run."""
        return self._run.graph

    @property
    def stats(self) -> ExecutionStats:
        """What this context used, its children included."""
        return self._run.graph.stats(self._source)

    @property
    def events(self) -> list[TraceEvent]:
        """What happened in this context, its children apart."""
        return [event for event in self._run.graph.events() if event.source == self._source.path]

    def history(self, since: int = 0, limit: int | None = None) -> list[TraceEvent]:
        """What happened in the whole run after `since`, at most `limit` events."""
        return self._run.graph.events(since, limit)

    def observe(self, observer: Observer) -> Subscription:
        """Hand every event of the run to `observer`, in batches, from a thread of its own."""
        if self._run.observers is None:
            self._run.observers = Observers(self._run.graph)
        return self._run.observers.add(observer)

    def record_event(self, event: SafetyEvent | TraceEvent) -> None:
        """Write an event into the run's log. A call that ran elsewhere is counted with what it cost."""
        if isinstance(event, SafetyEvent):
            self._run.record_safety(event, self._source, self._here())
        elif isinstance(event, CallEnded):
            self._record_call(event)
        elif isinstance(event, TraceEvent):
            self._run.record(event, self._source, self._here())
        else:
            raise InvalidValue("event", event, "a SafetyEvent or a TraceEvent (subclass CustomTrace for your own)")

    def trace_custom(self, name: str, data: Mapping[str, Any] | None = None) -> None:
        """Write an event of your own into the run's log."""
        self._run.record(CustomTrace(name=name, data=dict(data or {})), self._source, self._here())

    def note(self, verdict: Verdict, call: CallRecord) -> None:
        """Write down what a hook said of a call."""
        event = SafetyEvent(
            event_type=str(verdict.stop_reason) if verdict.decision is Decision.HALT else verdict.decision.lower(),
            decision=verdict.decision,
            reason=verdict.reason,
            hook=verdict.hook,
            request_id=self._run.metadata.request_id,
            metadata={"chain_id": self._run.id, "node_id": call.node_id, "operation_name": call.name},
        )
        self._run.record_safety(event, self._source, call)

    def get_snapshot(self) -> ContextSnapshot:
        """The state of the run now; at any time, also after it was stopped."""
        run = self._run
        figures = run.ledger.balance(self._account)
        seq, calls = run.graph.calls()
        with run.lock:
            events, dropped = list(run.safety_events), run.safety_dropped
        cancelled = self._token.cancellation
        aborted = cancelled is not None and cancelled.cause != "shutdown"
        return ContextSnapshot(
            chain_id=run.id,
            request_id=run.metadata.request_id,
            step_count=figures.steps,
            cost_usd_accumulated=figures.spent_usd,
            retries_used=figures.retries,
            aborted=aborted,
            abort_reason=cancelled.stop.message if cancelled is not None and aborted else None,
            elapsed_ms=(run.now() - self._started_ns) / 1_000_000,
            nodes=[node_record(call, seq, run.graph.wall_offset_ns) for call in calls if call.kind != "system"],
            events=events,
            seq=seq,
            attempts=figures.attempts,
            held_usd=figures.held_usd,
            unresolved_usd=figures.unresolved_usd,
            unknown_costs=run.unknown_costs,
            events_dropped=dropped,
        )

    @property
    def partial_results(self) -> Mapping[str, Any]:
        """The values of the calls that succeeded so far, by call name."""
        return self._run.partial_results()

    def explain(self) -> str:
        """What ran, what it cost, what was refused and why, as a tree to read."""
        return explain(self._run.graph) + "\n" + ending.totals(self)

    # Beginning and end.

    def __enter__(self) -> ExecutionContext:
        self._entered.append(_active.set(self))
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _active.reset(self._entered.pop())
        self.end(exc)

    async def __aenter__(self) -> ExecutionContext:
        return self.__enter__()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.__exit__(exc_type, exc, traceback)

    def end(self, error: BaseException | None = None) -> None:
        """This context is over; `error` says what ended it, if something did. Again, it changes nothing."""
        if self.parent is not None:
            self._run.outside_the_lock(lambda: ending.end_child(self, ending.reason_for(self, error)))
        elif self._owns_run:
            self._run.outside_the_lock(lambda: ending.end_run(self, error))

    def __repr__(self) -> str:
        return f"<ExecutionContext {self._source.path} of {self._run.id}>"

    # Inside.

    def budget_of(self, stop: Stop) -> Budget:
        """The ceilings of the budget that refused, as a Budget."""
        level: Account | None = self._account
        while level is not None and level.name != stop.budget:
            level = level.parent
        limits = level.limits if level is not None else self._account.limits
        return _as_budget(limits)

    def _call(self, kind: CallKind, fn: Work, options: WrapOptions | None) -> Call:
        how = DEFAULT_OPTIONS if options is None else options
        name = how.operation_name or kind
        return door.call(self, kind, fn, (), name, how.hint_nanos, how.model, how.timeout_s, how.retries, how.degraded)

    async def _acall(self, kind: CallKind, fn: Work, options: WrapOptions | None) -> Call:
        how = DEFAULT_OPTIONS if options is None else options
        name = how.operation_name or kind
        return await door.acall(
            self, kind, fn, (), name, how.hint_nanos, how.model, how.timeout_s, how.retries, how.degraded
        )

    def _same_place(self) -> ExecutionContext:
        made: ExecutionContext = object.__new__(ExecutionContext)
        made._place(self.parent, self.name, self.data, self.session, self.input, self.upstream)
        made._run, made._source, made._account = self._run, self._source, self._account
        made._token, made._base, made._budget = self._token, self._base, self._budget
        made._started_ns = self._started_ns
        made._children = self._children
        return made

    def _limit(self, budget: Budget | None, name: str, above: CancellationToken) -> None:
        limits = NO_LIMITS if budget is None else budget.limits()
        self._budget = budget
        if budget is not None:
            self._account = self._run.ledger.open(name, limits, self._account)
        limit_s = limits.time_ns / 1_000_000_000 if limits.time_ns < UNLIMITED else None
        self._token = above.child(name, deadline_s=limit_s)

    def _here(self) -> CallRecord:
        call = door.current_call.get()
        return call.record if call is not None and call.context._run is self._run else self._base

    def _policy_context(self) -> PolicyContext:
        account = self._account
        spent = account.committed - account.held - account.unresolved
        return PolicyContext(cost_usd=to_usd(spent), step_count=account.steps_taken - account.steps_open)

    def _record_call(self, event: CallEnded) -> None:
        """A call that somebody made outside the door: it is in the tree, and its cost is spent."""
        run, cost, now_ns = self._run, event.cost_nanos, self._run.now()
        parent = self._here()
        with run.lock:
            call = run.graph.begin(parent, event.call_kind, event.name, event.model, self._source, now_ns)
            tokens_in, tokens_out = event.input_tokens, event.output_tokens
            accounts.charge(self._account, cost, tokens_in, tokens_out, run.api_calls_of[event.call_kind])
            status = "fail" if event.error else event.status
            run.graph.end(
                call,
                now_ns + round(event.duration_ms * 1_000_000),
                status,
                cost,
                tokens_in,
                tokens_out,
                event.stop_reason,
                event.error,
            )


def _outcome(call: Call) -> Outcome:
    return Outcome(call.value, call.decision, call)


def _name_of(fn: Callable[..., object], kind: str) -> str:
    name = getattr(fn, "__name__", kind)
    return name if isinstance(name, str) and name != "<lambda>" else kind


def _anonymous() -> ChainMetadata:
    run_id = new_run_id()
    return ChainMetadata(request_id=run_id, chain_id=run_id)


def _described(metadata: ChainMetadata) -> dict[str, Any]:
    return {
        "request_id": metadata.request_id,
        "org_id": metadata.org_id,
        "team": metadata.team,
        "service": metadata.service,
        "user_id": metadata.user_id,
        "model": metadata.model,
        "tags": dict(metadata.tags),
    }


def _as_budget(limits: Limits) -> Budget:
    def given(limit: int) -> int | None:
        return limit if limit < UNLIMITED else None

    return Budget(
        max_tokens=given(limits.tokens),
        max_time_seconds=limits.time_ns / 1_000_000_000 if limits.time_ns < UNLIMITED else None,
        max_steps=given(limits.steps),
        max_api_calls=given(limits.api_calls),
        max_cost_dollars=to_usd(limits.cost_nanos) if limits.cost_nanos < UNLIMITED else None,
    )


def _must_be(field: str, value: object, kind: type) -> None:
    if value is not None and not isinstance(value, kind):
        raise InvalidValue(field, value, f"{kind.__name__} or None")
