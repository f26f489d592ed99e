"""The handle that goes through everything.

An `ExecutionContext` is thin: it points at its run, at its account in the ledger, at its cancellation token and at
its place in the call tree, and passes every request on to the one of them that answers it. Contexts form a tree;
`with_input`, `with_upstream` and `with_sub_budget` make another handle at the same place, `spawn_child` makes a place
of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from inspect import iscoroutine
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from penstock.clock import SYSTEM_CLOCK, Clock, utc_from_ns
from penstock.containment import accounts
from penstock.containment.accounts import Account, Balance
from penstock.containment.breaker import CircuitBreaker, PolicyContext
from penstock.containment.ledger import Ledger
from penstock.containment.limits import (
    NO_LIMITS,
    UNLIMITED,
    Budget,
    ExecutionConfig,
    Limits,
    ResourceUsage,
    seconds_to_ns,
)
from penstock.containment.safety import ChainMetadata, Decision, SafetyEvent
from penstock.containment.shield import ShieldPipeline, Slot, Verdict
from penstock.errors import InvalidValue, RunEnded
from penstock.ids import new_run_id
from penstock.money import Usd, to_nanos, to_usd
from penstock.runtime import door, ending
from penstock.runtime.cancellation import Cancellation, CancellationToken
from penstock.runtime.door import Call, Work
from penstock.runtime.observers import Observer, Observers, Subscription
from penstock.runtime.options import DEFAULT_OPTIONS, WrapOptions, must_be, must_be_text, whole
from penstock.runtime.prices import PriceBook
from penstock.runtime.run import THE_RUNS_OWN, Run, RunSettings
from penstock.runtime.snapshot import ContextSnapshot, abort_reason, node_records
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
from penstock.tracing.record import OPEN, CallRecord, Source
from penstock.tracing.stats import ExecutionStats

T = TypeVar("T")

_active: ContextVar[tuple[ExecutionContext, ...]] = ContextVar("penstock_context", default=())
"""The contexts that were entered here and not left yet, innermost last."""


def current_context() -> ExecutionContext | None:
    """The innermost context that was entered with `with` here; None outside of any."""
    entered = _active.get()
    return entered[-1] if entered else None


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
        "_child_names",
        "_children",
        "_ended_as",
        "_error",
        "_final",
        "_inside",
        "_iteration_started_ns",
        "_let_go",
        "_origin",
        "_run",
        "_source",
        "_started_ns",
        "_token",
        "data",
        "input",
        "name",
        "parent",
        "session",
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
        must_be("config", config, ExecutionConfig)
        must_be("pipeline", pipeline, ShieldPipeline)
        must_be("metadata", metadata, ChainMetadata)
        must_be_text("name", name)
        must_be("upstream", upstream, Mapping)
        must_be("budget", budget, Budget)
        must_be("cancellation", cancellation, CancellationToken)
        must_be("breaker", breaker, CircuitBreaker)
        must_be("prices", prices, PriceBook)
        must_be("divergence", divergence, DivergenceDetector)
        must_be("ledger", ledger, Ledger)
        must_be("settings", settings, RunSettings)
        clock = clock if ledger is None else _clock_of(ledger, clock)
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
        self._started_ns = account.opened_ns
        above = cancellation or CancellationToken(name=name, clock=clock)
        limit_s = limits.time_ns / 1_000_000_000 if limits.time_ns < UNLIMITED else None
        self._token = above.child(name, deadline_s=limit_s)
        described = _described(metadata)
        run.record(RunStarted(name=name, metadata=described), source, None)
        run.graph.create_root(name, described)
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
        self._budget = None
        self._children: list[ExecutionContext] = []
        self._child_names: dict[str, int] = {}
        self._iteration_started_ns: int | None = None
        self._origin = self
        """The context this is a handle of: the one that begins, iterates and ends. Most often it is itself."""
        self._inside = 0
        """How many `with` blocks of it are open, in any thread."""
        self._error: BaseException | None = None
        """What the first of them was left with."""
        self._ended_as: TerminationReason | None = None
        self._final: Cancellation | None = None
        """What had cancelled it by the time it ended; what cancels its token later did not stop it."""
        self._let_go: Callable[[], None] | None = None

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
        name, hint = self._said("llm", fn, name, cost_hint_usd, model, timeout_s, retries, degraded)
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
        name, hint = self._said("tool", fn, name, cost_hint_usd, None, timeout_s, retries, degraded)
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
        name, hint = self._said("llm", fn, name, cost_hint_usd, model, timeout_s, retries, degraded)
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
        name, hint = self._said("tool", fn, name, cost_hint_usd, None, timeout_s, retries, degraded)
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
        call = self._call_here()
        if call is None:
            raise InvalidValue("report", "from elsewhere", "called from inside a function that this run executes")
        if call.record.owner is not call:
            raise InvalidValue("report", "after its end", f"called while the call {call.record.name!r} runs")
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
        elapsed_ns = self._now_or_end() - self._account.opened_ns
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

    @property
    def stop(self) -> Stop | None:
        """What stopped this context: its cancel, or the first limit that refused a call; None if nothing did."""
        cancelled = self._cancelled
        return self._run.stops.get(self._source) if cancelled is None else cancelled.stop

    @property
    def _cancelled(self) -> Cancellation | None:
        origin = self._origin
        return self._token.cancellation if origin._ended_as is None else origin._final

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
        must_be_text("reason", reason)
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
        call = self._call_here() or Call(self, self._base, False, self._token)
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
        must_be("sub_budget", sub_budget, Budget)
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
        must_be_text("name", name)
        must_be("budget", budget, Budget)
        must_be("cancellation", cancellation, CancellationToken)
        run = self._run
        child: ExecutionContext = object.__new__(ExecutionContext)
        child._place(self, name, data, self.session, self.input, self.upstream)
        child._run, child._account, child._budget = run, self._account, self._budget
        child._started_ns = run.now()
        child._limit(budget, name, self._token)
        above = self._call_here()
        parent = above.record if above is not None and above.record.depth > self._base.depth else self._base
        with run.lock:
            if self._base.end_seq != OPEN:
                raise self._after_the_end(f"child {name!r}")
            child._source = Source(_distinct(name, self._child_names), self._source)
            child._base = run.graph.begin(parent, "system", name, None, child._source, child._started_ns)
            self._children.append(child)
        if cancellation is not None:
            child._obey(cancellation)
        run.record(ChildSpawnTrace(child_name=name, node_id=child._base.node_id), self._source, child._base.parent)
        return child

    def complete_child(self, child: ExecutionContext, reason: TerminationReason | None = None) -> None:
        """The child is done; again, it changes nothing. Without a reason it is success, unless a limit stopped it."""
        if not _is_child(child, self):
            raise InvalidValue("child", child, f"a child of {self.name!r}")
        if reason is not None and reason not in tuple(TerminationReason):
            raise InvalidValue("reason", reason, f"one of {', '.join(TerminationReason)}, or None")
        ending.end_child(child._origin, None if reason is None else TerminationReason(reason))

    @property
    def termination_reason(self) -> TerminationReason | None:
        """How this context ended; None while it is open."""
        return self._origin._ended_as

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
        self._origin._iteration_started_ns = self._run.now()
        self._run.record(IterationStartTrace(), self._source, self._base)
        return self._source.iteration

    def end_iteration(self, action: str = "continue") -> None:
        """Finish the iteration under way; `action` is what the loop does next: continue or terminate."""
        started_ns = self._origin._iteration_started_ns
        if started_ns is None:
            raise InvalidValue("end_iteration", "before the first", "called after start_iteration")
        duration_ms = (self._run.now() - started_ns) / 1_000_000
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
        with self._run.lock:
            if self._run.observers is None:
                self._run.observers = Observers(self._run.graph)
        return self._run.observers.add(observer)

    def record_event(self, event: SafetyEvent | TraceEvent) -> None:
        """Write an event into the run's log. A call that ran elsewhere is counted with what it cost."""
        if isinstance(event, SafetyEvent):
            self._run.record_safety(event, self._source, self._here())
        elif isinstance(event, CallEnded):
            self._run.record_call(event, self._account, self._source, self._here())
        elif isinstance(event, TraceEvent):
            if isinstance(event, THE_RUNS_OWN):
                raise InvalidValue("event", event, "one that the run does not write itself (subclass CustomTrace)")
            self._run.record(event, self._source, self._here())
        else:
            raise InvalidValue("event", event, "a SafetyEvent or a TraceEvent (subclass CustomTrace for your own)")

    def trace_custom(self, name: str, data: Mapping[str, Any] | None = None) -> None:
        """Write an event of your own into the run's log."""
        must_be_text("name", name)
        must_be("data", data, Mapping)
        self._run.record(CustomTrace(name=name, data=dict(data or {})), self._source, self._here())

    def note(self, verdict: Verdict, call: CallRecord) -> None:
        """Write down what a hook said of a call."""
        event = SafetyEvent(
            event_type=str(verdict.stop_reason) if verdict.decision is Decision.HALT else verdict.decision.lower(),
            decision=verdict.decision,
            reason=verdict.reason,
            hook=verdict.hook,
            request_id=self._run.metadata.request_id,
            ts=self._run.wall_time(),
            metadata=self._run.about(call),
        )
        self._run.record_safety(event, self._source, call)

    def get_snapshot(self) -> ContextSnapshot:
        """The state of the run now; at any time, also after it was stopped."""
        run = self._run
        if self._base.end_seq == OPEN:
            self._token.is_cancelled  # noqa: B018  notices the deadline
        with run.lock:
            figures = accounts.balance(self._account)
            seq, calls = run.graph.calls()
            events, dropped, unknown_costs = list(run.safety_events), run.safety_dropped, run.unknown_costs
            elapsed_ns = self._now_or_end() - self._started_ns
        cancelled = self._cancelled
        return ContextSnapshot(
            chain_id=run.id,
            request_id=run.metadata.request_id,
            step_count=figures.steps,
            cost_usd_accumulated=figures.spent_usd,
            retries_used=figures.retries,
            aborted=cancelled is not None,
            abort_reason=None if cancelled is None else abort_reason(cancelled.stop),
            elapsed_ms=elapsed_ns / 1_000_000,
            nodes=node_records(calls, seq, run.graph.wall_offset_ns),
            events=events,
            seq=seq,
            attempts=figures.attempts,
            held_usd=figures.held_usd,
            unresolved_usd=figures.unresolved_usd,
            unknown_costs=unknown_costs,
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
        with self._run.lock:
            self._inside += 1
        _active.set((*_active.get(), self))
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        entered = _active.get()
        if self in entered:  # left where it was not entered, as fixtures and generators do, there is nothing to undo
            last = len(entered) - 1 - entered[::-1].index(self)
            _active.set(entered[:last] + entered[last + 1 :])
        with self._run.lock:
            self._inside -= 1
            self._error = self._error or exc
            if self._inside:
                return
            exc, self._error = self._error, None
        self.end(exc)

    async def __aenter__(self) -> ExecutionContext:
        return self.__enter__()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.__exit__(exc_type, exc, traceback)

    def end(self, error: BaseException | None = None) -> None:
        """This context is over; `error` says what ended it, if something did. Again, it changes nothing.

        A handle from `with_input`, `with_upstream` or `with_sub_budget` ends nothing: its place is not its own.
        """
        if self._origin is not self:
            return
        if self.parent is not None:
            self._run.outside_the_lock(lambda: ending.end_child(self, ending.reason_for(self, error)))
        else:
            self._run.outside_the_lock(lambda: ending.end_run(self, error))

    def __repr__(self) -> str:
        return f"<ExecutionContext {self._source.path} of {self._run.id}>"

    # Inside.

    def budget_of(self, stop: Stop) -> Budget:
        """The ceilings of the budget that refused, as a Budget."""
        return _as_budget(self._refusing(stop).limits)

    def _refusing(self, stop: Stop) -> Account:
        """The account of the budget that refused: this one, or one above."""
        level: Account | None = self._account
        while level is not None and not _refuses(level, stop):
            level = level.parent
        return level or self._account

    def _remember(self, stop: Stop) -> None:
        """A limit refused something here: that is why this context stops, and those above it that share the budget."""
        refusing = self._refusing(stop)
        place: ExecutionContext | None = self
        while place is not None and accounts.is_under(place._account, refusing):
            self._run.stops.setdefault(place._source, stop)
            place = place.parent

    def _call(self, kind: CallKind, fn: Work, options: WrapOptions | None) -> Call:
        how = DEFAULT_OPTIONS if options is None else options
        if not isinstance(how, WrapOptions):
            raise InvalidValue("options", how, "WrapOptions or None")
        name = how.operation_name or kind
        self._check_work(kind, fn, name)
        return door.call(self, kind, fn, (), name, how.hint_nanos, how.model, how.timeout_s, how.retries, how.degraded)

    async def _acall(self, kind: CallKind, fn: Work, options: WrapOptions | None) -> Call:
        how = DEFAULT_OPTIONS if options is None else options
        if not isinstance(how, WrapOptions):
            raise InvalidValue("options", how, "WrapOptions or None")
        name = how.operation_name or kind
        self._check_work(kind, fn, name)
        return await door.acall(
            self, kind, fn, (), name, how.hint_nanos, how.model, how.timeout_s, how.retries, how.degraded
        )

    def _said(
        self,
        kind: CallKind,
        fn: Work,
        name: str,
        cost_hint_usd: Usd | None,
        model: str | None,
        timeout_s: float | None,
        retries: int,
        degraded: Work | None,
    ) -> tuple[str, int | None]:
        """The name and the hint of a call, once everything that was said about it has been checked."""
        if not isinstance(name, str):
            raise InvalidValue("name", name, "a string")
        name = name or _name_of(fn, kind)
        self._check_work(kind, fn, name)
        if timeout_s is not None:
            seconds_to_ns(timeout_s, "timeout_s")
        if retries:
            whole("retries", retries)
        if model is not None and not isinstance(model, str):
            raise InvalidValue("model", model, "a string, or None")
        if degraded is not None and not callable(degraded):
            raise InvalidValue("degraded", degraded, "a function, or None")
        return name, None if cost_hint_usd is None else to_nanos(cost_hint_usd, "cost_hint_usd")

    def _check_work(self, kind: CallKind, fn: object, name: str) -> None:
        if not callable(fn):
            if iscoroutine(fn):
                fn.close()
            raise InvalidValue(
                "fn", fn, "a function to call, as in (fetch, url), and not its result, as in (fetch(url))"
            )
        if self._base.end_seq != OPEN:
            raise self._after_the_end(f"{kind} call {name!r}")

    def _after_the_end(self, what: str) -> RunEnded:
        ended = self._run.id if self.parent is None else f"{self._run.id}, context {self._source.path!r},"
        error = RunEnded(ended, f"{what} came after its end")
        error.run_id = self._run.id
        return error

    def _now_or_end(self) -> int:
        return self._run.now() if self._base.end_seq == OPEN else self._base.ended_ns

    def _same_place(self) -> ExecutionContext:
        made: ExecutionContext = object.__new__(ExecutionContext)
        made._place(self.parent, self.name, self.data, self.session, self.input, self.upstream)
        made._run, made._source, made._account = self._run, self._source, self._account
        made._token, made._base, made._budget = self._token, self._base, self._budget
        made._started_ns, made._origin = self._started_ns, self._origin
        made._children, made._child_names = self._children, self._child_names
        return made

    def _limit(self, budget: Budget | None, name: str, above: CancellationToken) -> None:
        limits = NO_LIMITS if budget is None else budget.limits()
        if budget is not None:
            self._budget = budget
            self._account = self._run.ledger.open(name, limits, self._account)
        limit_s = limits.time_ns / 1_000_000_000 if limits.time_ns < UNLIMITED else None
        self._token = above.child(name, deadline_s=limit_s)

    def _obey(self, other: CancellationToken) -> None:
        """What cancels `other`, a deadline included, cancels this context too."""
        token = self._token
        if other.deadline_ns < token.deadline_ns:
            token.deadline_ns, token._deadline_of = other.deadline_ns, other._deadline_of or other
        self._run.external_token = True

        def follow() -> None:
            token.cancel(cause="parent", stop=other.stop)

        self._let_go = other.add_callback(follow)

    def _call_here(self) -> Call | None:
        """The call of this run that is being executed here."""
        call = door.current_call.get()
        return call if call is not None and call.context._run is self._run else None

    def _here(self) -> CallRecord:
        call = self._call_here()
        return self._base if call is None else call.record

    def _policy_context(self) -> PolicyContext:
        account = self._account
        spent = account.committed - account.held - account.unresolved
        return PolicyContext(cost_usd=to_usd(spent), step_count=account.steps_taken - account.steps_open)


def _outcome(call: Call) -> Outcome:
    return Outcome(call.value, call.decision, call)


def _name_of(fn: Callable[..., object], kind: str) -> str:
    name = getattr(fn, "__name__", kind)
    return name if isinstance(name, str) and name != "<lambda>" else kind


def _is_child(child: object, of: ExecutionContext) -> bool:
    parent = child.parent if isinstance(child, ExecutionContext) else None
    return parent is not None and parent._base is of._base


def _distinct(name: str, taken: dict[str, int]) -> str:
    """The name; with a number after it, if it is taken. The caller holds the lock."""
    taken[name] = times = taken.get(name, 0) + 1
    return name if times == 1 else _distinct(f"{name}#{times}", taken)


def _clock_of(ledger: Ledger, clock: Clock) -> Clock:
    if clock is not SYSTEM_CLOCK and clock is not ledger.clock:
        raise InvalidValue("clock", clock, "the clock of the ledger that is given, or left out")
    return ledger.clock


_CEILING_IN: Mapping[str, Callable[[Limits], float]] = {
    "usd": lambda limits: to_usd(limits.cost_nanos),
    "steps": lambda limits: limits.steps,
    "tokens": lambda limits: limits.tokens,
    "api calls": lambda limits: limits.api_calls,
    "retries": lambda limits: limits.retries,
    "seconds": lambda limits: limits.time_ns / 1_000_000_000,
}


def _refuses(level: Account, stop: Stop) -> bool:
    """Whether the stop came from this account; budgets may share a name, so the ceiling has to be the same too."""
    ceiling = _CEILING_IN.get(stop.unit or "")
    return level.name == stop.budget and (ceiling is None or ceiling(level.limits) == stop.limit)


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
