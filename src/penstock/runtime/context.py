"""The handle that goes through everything.

An `ExecutionContext` is thin: it points at its run, at its account in the ledger, at its cancellation token and at
its place in the call tree, and passes every request on to the one of them that answers it. Contexts form a tree;
`with_input`, `with_upstream` and `with_sub_budget` make another handle at the same place, `spawn_child` makes a place
of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType, TracebackType
from typing import Any, TypeVar

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.containment import accounts
from penstock.containment.accounts import Account
from penstock.containment.breaker import CircuitBreaker
from penstock.containment.ledger import Ledger
from penstock.containment.limits import (
    NO_LIMITS,
    UNLIMITED,
    Budget,
    ExecutionConfig,
)
from penstock.containment.safety import ChainMetadata, Decision, SafetyEvent
from penstock.containment.shield import ShieldPipeline, Slot
from penstock.errors import InvalidValue
from penstock.ids import new_run_id
from penstock.money import Usd
from penstock.runtime import ending
from penstock.runtime.billing.prices import PriceBook
from penstock.runtime.billing.usage import Usage
from penstock.runtime.call import Call, describe, running_call, stopped
from penstock.runtime.calls import Calls
from penstock.runtime.cancellation import Cancellation, CancellationToken
from penstock.runtime.durable import holding
from penstock.runtime.durable.journal import Journal
from penstock.runtime.durable.shared import SharedBudget
from penstock.runtime.options import must_be, must_be_text
from penstock.runtime.run import THE_RUNS_OWN, Run, RunSettings
from penstock.runtime.watching.observers import Observer, Observers, Subscription
from penstock.runtime.watching.snapshot import ContextSnapshot, take_snapshot
from penstock.stops import Stop, StopReason, TerminationReason
from penstock.tracing.divergence import DivergenceDetector
from penstock.tracing.events import (
    CallEnded,
    ChildSpawnTrace,
    CustomTrace,
    TraceEvent,
)
from penstock.tracing.execution_graph import ExecutionGraph
from penstock.tracing.explain import explain
from penstock.tracing.record import OPEN, CallRecord, IterationMark, Source
from penstock.tracing.stats import ExecutionStats

T = TypeVar("T")

NO_RESULTS: Mapping[str, Any] = MappingProxyType({})

_active: ContextVar[tuple[ExecutionContext, ...]] = ContextVar("penstock_context", default=())
"""The contexts that were entered here and not left yet, innermost last."""


def current_context() -> ExecutionContext | None:
    """The innermost context that was entered with `with` here; None outside of any."""
    entered = _active.get()
    return entered[-1] if entered else None


def current_call() -> Call | None:
    """The call whose function is being executed here: what it may use, and whether it is to do with less."""
    return running_call.get()


class ExecutionContext(Calls):
    """One run, or a child of one: limits, call tree, events, stats and cancellation for whatever runs under it."""

    __slots__ = (
        "__weakref__",
        "_child_names",
        "_children",
        "_ended_as",
        "_error",
        "_final",
        "_handle_of",
        "_inside",
        "_iteration_started_ns",
        "_let_go",
        "_started_ns",
        "data",
        "input",
        "session",
        "trace",
        "upstream",
    )

    parent: ExecutionContext | None
    upstream: Mapping[str, Any]
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
        must_be("journal", journal, Journal)
        must_be("shared_budget", shared_budget, SharedBudget)
        clock = clock if ledger is None else _clock_of(ledger, clock)
        limits = NO_LIMITS if config is None else config.limits()
        if budget is not None:
            limits = budget.limits() if config is None else budget.limits().tighter(limits)
        metadata = metadata or _anonymous()
        source = Source(name)
        own = Ledger(name, limits, clock=clock) if ledger is None else ledger
        account = own.root if ledger is None else own.open(name, limits)
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
        )
        self._account = account
        self._source = source
        self._started_ns = account.opened_ns
        if cancellation is None and ledger is None:
            self._token = CancellationToken(name=name, deadline_s=limits.time_s, clock=clock)
        else:
            above = cancellation or CancellationToken(name=name, clock=clock)
            if ledger is not None:
                above = above.child(own.root.name, deadline_s=_seconds_left(own))
            self._token = above.child(name, deadline_s=limits.time_s)
        self._base = run.begin(name, metadata.to_dict(), source)
        if shared_budget is not None:
            holding.bind(shared_budget, run, source)

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
        """Where graphs that run under this context write down their steps, if anywhere."""
        self.upstream = upstream
        self._children: list[ExecutionContext] | None = None
        """The origin's alone to have."""
        self._child_names: dict[str, int] = {}
        self._iteration_started_ns: int | None = None
        self._handle_of: ExecutionContext | None = None
        """The context this is a handle of, if it is one."""
        self._inside = 0
        """How many `with` blocks of it are open, in any thread."""
        self._error: BaseException | None = None
        """What the first of them was left with."""
        self._ended_as: TerminationReason | None = None
        self._final: Cancellation | None = None
        """What had cancelled it by the time it ended; what cancels its token later did not stop it."""
        self._let_go: Callable[[], None] | None = None

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
        """The ceilings this context is under: its own, or those of the nearest context above; None if it has none."""
        budget = self._account.limits.as_budget()
        return None if budget == Budget() else budget

    @property
    def ledger(self) -> Ledger:
        """The judge of this run's money, steps, tokens, calls and retries."""
        return self._run.ledger

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
            raise stopped(self, stop)

    def check_cancelled(self) -> None:
        """Raise CancelledError if this context was cancelled, timed out or aborted."""
        self._notice_deadline()
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
        verdict = run.pipeline.judge(Slot.EGRESS, describe(call), url, method)
        if verdict is None:
            return Decision.ALLOW
        run.record_verdict(verdict, self._source, call.record)
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
        child._place(self, name, data, self.session, self.input, self.upstream, self.trace)
        child._run, child._account = run, self._account
        child._started_ns = run.now()
        child._limit(budget, name, self._token)
        above = self._call_here()
        parent = above.record if above is not None and above.record.depth > self._base.depth else self._base
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
        """The child is done; again, it changes nothing. Without a reason it is success, unless a limit stopped it."""
        if not _is_child(child, self):
            raise InvalidValue("child", child, f"a child of {self.name!r}")
        ending.end_child(child._origin, None if reason is None else _as_reason(reason))

    @property
    def termination_reason(self) -> TerminationReason | None:
        """How this context ended; None while it is open."""
        return self._origin._ended_as

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
        """The number of the loop iteration under way; 0 before the first."""
        return self._source.iteration

    def start_iteration(self) -> int:
        """Begin the next iteration of a loop; its number."""
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
        """Finish the iteration under way; `action` is what the loop does next: continue or terminate."""
        started_ns = (self._handle_of or self)._iteration_started_ns
        if started_ns is None:
            raise InvalidValue("end_iteration", "before the first", "called after start_iteration")
        run = self._run
        graph, now_ns = run.graph, run.now()
        with run.lock:
            if not graph.closed:
                graph.append(IterationMark(self._source, self._base, now_ns, started_ns, str(action)))

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
        self._must_be_open("event")
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
        self._must_be_open(f"event {name!r}")
        self._run.record(CustomTrace(name=name, data=dict(data or {})), self._source, self._here())

    def get_snapshot(self) -> ContextSnapshot:
        """The state of the run now; at any time, also after it was stopped."""
        self._notice_deadline()
        return take_snapshot(self, self._started_ns, self._cancelled)

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
        self._notice_deadline()
        if self.parent is not None:
            self._run.outside_the_lock(lambda: ending.end_child(self, ending.reason_for(self, error)))
        else:
            self._run.outside_the_lock(lambda: ending.end_run(self, error))

    def __repr__(self) -> str:
        return f"<ExecutionContext {self._source.path} of {self._run.id}>"

    # Inside.

    def _same_place(self) -> ExecutionContext:
        made: ExecutionContext = object.__new__(ExecutionContext)
        made._place(self.parent, self.name, self.data, self.session, self.input, self.upstream, self.trace)
        made._run, made._source, made._account = self._run, self._source, self._account
        made._token, made._base = self._token, self._base
        made._started_ns, made._handle_of = self._started_ns, self._origin
        made._child_names = self._child_names
        return made

    @property
    def _origin(self) -> ExecutionContext:
        """The context that begins, iterates and ends: itself, unless this is a handle of another."""
        return self._handle_of or self

    def _under(self, token: CancellationToken) -> ExecutionContext:
        """The same place, stopped by another token."""
        made = self._same_place()
        made._token = token
        return made

    def _limit(self, budget: Budget | None, name: str, above: CancellationToken) -> None:
        limits = NO_LIMITS if budget is None else budget.limits()
        if budget is not None:
            self._account = self._run.ledger.open(name, limits, self._account)
        self._token = above.child(name, deadline_s=limits.time_s)

    @property
    def _own_account(self) -> Account:
        return self._origin._account

    def _call_here(self) -> Call | None:
        """The call of this run that is being executed here."""
        call = running_call.get()
        return call if call is not None and call.context._run is self._run else None

    def _notice_deadline(self) -> None:
        """A deadline that has passed stops the context, whether or not a call was there to run into it."""
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

    def _here(self) -> CallRecord:
        call = self._call_here()
        return self._base if call is None else call.record


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
    """The name; with a number after it, if it is taken. The caller holds the lock."""
    taken[name] = times = taken.get(name, 0) + 1
    return name if times == 1 else _distinct(f"{name}#{times}", taken)


def _clock_of(ledger: Ledger, clock: Clock) -> Clock:
    if clock is not SYSTEM_CLOCK and clock is not ledger.clock:
        raise InvalidValue("clock", clock, "the clock of the ledger that is given, or left out")
    return ledger.clock


def _seconds_left(ledger: Ledger) -> float | None:
    """Until the deadline that a ledger brings along, which no token knows of yet."""
    deadline_ns = ledger.root.deadline_ns
    return None if deadline_ns == UNLIMITED else max(0, deadline_ns - ledger.clock.monotonic_ns()) / 1_000_000_000


def _anonymous() -> ChainMetadata:
    run_id = new_run_id()
    return ChainMetadata(request_id=run_id, chain_id=run_id)
