"""What the contexts of one run share.

The run points at the parts (ledger, log, pipeline, breaker, prices) and keeps the few things that belong to none of
them: the safety events, the results so far, the figures behind un-hinted holds. It decides nothing; the door does.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from penstock.clock import SYSTEM_CLOCK, Clock, utc_from_ns
from penstock.containment import accounts
from penstock.containment.accounts import Account
from penstock.containment.breaker import CircuitBreaker
from penstock.containment.ledger import Ledger
from penstock.containment.safety import ChainMetadata, Decision, SafetyEvent
from penstock.containment.shield import ShieldPipeline, Slot, Verdict
from penstock.errors import InvalidValue
from penstock.runtime import worker
from penstock.runtime.billing.prices import PriceBook, default_prices
from penstock.runtime.billing.usage import Usage
from penstock.runtime.durable.journal import Journal
from penstock.runtime.durable.shared import SharedBudget
from penstock.runtime.options import must_be_text
from penstock.runtime.watching.observers import Observers
from penstock.stops import Stop, StopReason
from penstock.tracing.divergence import DivergenceDetector
from penstock.tracing.events import (
    CallEnded,
    CallSettled,
    CallStarted,
    LimitTrace,
    RunCompleted,
    RunStarted,
    SafetyTrace,
    TraceEvent,
)
from penstock.tracing.execution_graph import ExecutionGraph
from penstock.tracing.lifecycle import KINDS, TERMINAL, CallKind
from penstock.tracing.record import NOT_WHOLE, RUN_BEGINS, CallRecord, Source, mark_not_whole

SyncCalls = Literal["auto", "inline", "thread"]
UnknownBill = Literal["hold", "release"]

THE_RUNS_OWN = (RunStarted, RunCompleted, CallStarted, CallSettled)
"""Events that keep the books of a run: written by somebody else, its history would contradict itself."""

MAX_TOLD_ABORTS = 1_000
"""Aborts that a run remembers having written down: one of a child that was stopped long ago stops nothing more."""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How a run behaves where there is a choice; the defaults are the careful ones."""

    strict: bool = False
    """Refuse calls without a cost hint or a known worst case."""
    unknown_bill: UnknownBill = "hold"
    """What a call that failed with an unknown bill held: kept as unresolved, or released."""
    sync_calls: SyncCalls = "auto"
    """Where sync functions run: on a worker if a deadline, a given token or another thread of the program may need the
    caller back (auto), in the caller's thread always (inline), on a worker always (thread)."""
    max_kept_calls: int | None = 100_000
    """Calls kept one by one; older finished ones are folded into their parents. None keeps all."""
    max_kept_results: int = 1_000
    """Results kept for whoever is told that the run was stopped."""
    max_safety_events: int = 1_000
    """Safety events kept; older ones are dropped and counted."""
    record_steps: bool = True
    """Whether every step of a graph is a call in the tree. Without it, a step that no limit, hook, policy or trace
    asks about runs as it is; calls made inside it are recorded all the same."""

    def __post_init__(self) -> None:
        for flag in ("strict", "record_steps"):
            if not isinstance(getattr(self, flag), bool):
                raise InvalidValue(flag, getattr(self, flag), "True or False")
        if self.max_kept_calls is not None and not _at_least(1, self.max_kept_calls):
            raise InvalidValue(
                "max_kept_calls", self.max_kept_calls, "a whole number, one or more, or None to keep all"
            )
        for field in ("max_kept_results", "max_safety_events"):
            if not _at_least(0, kept := getattr(self, field)):
                raise InvalidValue(field, kept, "a whole number, zero or more")
        if self.unknown_bill not in ("hold", "release"):
            raise InvalidValue("unknown_bill", self.unknown_bill, "'hold' or 'release'")
        if self.sync_calls not in ("auto", "inline", "thread"):
            raise InvalidValue("sync_calls", self.sync_calls, "'auto', 'inline' or 'thread'")


def _check_recorded(event: CallEnded) -> tuple[int, str | None]:
    """How long a call that ran elsewhere took and the class of its error; InvalidValue names what is no figure."""
    must_be_text("name", event.name)
    if event.call_kind not in tuple(KINDS):
        raise InvalidValue("call_kind", event.call_kind, f"one of {', '.join(sorted(KINDS))}")
    if event.status not in tuple(TERMINAL):
        raise InvalidValue("status", event.status, f"one of {', '.join(sorted(TERMINAL))}")
    Usage.of(input_tokens=event.input_tokens, output_tokens=event.output_tokens, model=event.model)
    error: object = event.error
    if error is not None and not isinstance(error, str | BaseException):
        raise InvalidValue("error", error, "an exception, the name of its class, or None")
    took: object = event.duration_ms
    if isinstance(took, bool) or not isinstance(took, int | float) or not 0 <= took <= 1e12:
        raise InvalidValue("duration_ms", took, "a finite, non-negative number of milliseconds")
    return round(took * 1_000_000), type(error).__name__ if isinstance(error, BaseException) else error


def _at_least(least: int, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= sys.maxsize


DEFAULT_SETTINGS = RunSettings()


class WorstCase:
    """What a call of one kind holds where nothing better is known: the most that one has used so far.

    A cost hint stands for the cost alone; tokens have no hint. It does not change: learning makes another one, and the
    runs that have learned nothing share theirs.
    """

    __slots__ = ("api_calls", "cost", "model", "tokens")

    def __init__(self, api_calls: int, model: str | None = None, cost: int = 0, tokens: int = 0) -> None:
        self.cost = cost
        self.tokens = tokens
        self.api_calls = api_calls
        self.model = model
        """The model that is meant where a call names none."""


NOTHING_LEARNED: Mapping[CallKind, WorstCase] = {"llm": WorstCase(1), "tool": WorstCase(0), "system": WorstCase(0)}


class Run:
    """One run's shared parts."""

    __slots__ = (
        "breaker",
        "clock",
        "demands_price",
        "divergence",
        "external_token",
        "graph",
        "guarded",
        "id",
        "journal",
        "ledger",
        "lock",
        "metadata",
        "now",
        "observers",
        "pipeline",
        "prices",
        "results",
        "safety_dropped",
        "safety_events",
        "settings",
        "shared",
        "stops",
        "told_aborts",
        "unknown_costs",
        "worst_case",
    )

    def __init__(
        self,
        ledger: Ledger,
        source: Source,
        metadata: ChainMetadata,
        *,
        pipeline: ShieldPipeline | None = None,
        breaker: CircuitBreaker | None = None,
        prices: PriceBook | None = None,
        divergence: DivergenceDetector | None = None,
        settings: RunSettings | None = None,
        external_token: bool = False,
        clock: Clock = SYSTEM_CLOCK,
        journal: Journal | None = None,
        shared: SharedBudget | None = None,
    ) -> None:
        self.id = metadata.chain_id
        self.clock = clock
        self.now = clock.monotonic_ns
        self.metadata = metadata
        self.ledger = ledger
        self.lock = ledger.lock
        self.settings = settings = settings or DEFAULT_SETTINGS
        self.graph = ExecutionGraph(
            self.id, clock=clock, lock=ledger.lock, source=source, max_kept=settings.max_kept_calls
        )
        self.journal = journal
        """What the run has done already, and where more is written; None keeps nothing."""
        self.shared = shared
        """The account at a store that model and tool calls are paid from as well; None if no store is asked."""
        self.pipeline = pipeline
        self.breaker = breaker
        self.prices = prices or default_prices()
        self.divergence = divergence
        self.external_token = external_token
        self.guarded = pipeline is not None or breaker is not None
        self.observers: Observers | None = None
        self.worst_case = NOTHING_LEARNED
        if metadata.model is not None:
            self.worst_case = {**NOTHING_LEARNED, "llm": WorstCase(1, metadata.model)}
        self.demands_price = settings.strict or self.prices.unknown == "refuse"
        """Whether a call without a hint may be refused for its price."""
        self.unknown_costs = 0
        """Model calls whose cost nobody could tell."""
        self.results: deque[tuple[CallRecord, Any]] | None = None
        """The newest results; None until there is one."""
        self.safety_events: deque[SafetyEvent] | None = None
        """The newest safety events; None until there is one."""
        self.safety_dropped = 0
        self.stops: dict[Source, Stop] = {}
        """The first limit that refused something in a context, or in one below it by a budget they share."""
        self.told_aborts: dict[int, Stop] = {}
        """The aborts that were written down, by identity: each is told once, however many calls it stops."""

    def begin(self, name: str, metadata: Mapping[str, Any], source: Source) -> CallRecord:
        """Write the run's first event and its root."""
        graph, now_ns = self.graph, self.now()
        with self.lock:
            graph.append(RUN_BEGINS)
            graph.root = graph.begin(None, "system", name, None, source, now_ns, True, metadata)
            return graph.root

    def learn(self, kind: CallKind, cost: int, tokens: int) -> None:
        """A call of that kind has used this. The caller holds the lock."""
        worst = self.worst_case[kind]
        more = WorstCase(worst.api_calls, worst.model, max(worst.cost, cost), max(worst.tokens, tokens))
        self.worst_case = {**self.worst_case, kind: more}

    def keep_result(self, record: CallRecord, value: Any) -> None:
        """Keep the first result of the run, and make room for more. The caller holds the lock."""
        self.results = deque([(record, value)], maxlen=self.settings.max_kept_results)

    def outside_the_lock(self, act: Callable[[], None]) -> None:
        """Run `act` here; or, if this thread is inside the run's lock already, on a worker that waits for it.

        A signal handler or a finalizer may strike in the middle of a change and want to write to the run.
        """
        if self.lock._is_owned():  # type: ignore[attr-defined]
            worker.start(worker.Job(act, lambda value, error: None))
        else:
            act()

    def asks(self, slot: Slot) -> bool:
        """Whether the pipeline has hooks in that slot."""
        return self.pipeline is not None and self.pipeline.has(slot)

    def wall_time_ns(self, monotonic_ns: int) -> int:
        """A monotonic reading of this run as wall time."""
        return monotonic_ns + self.graph.wall_offset_ns

    def wall_time(self) -> datetime:
        """Now, in UTC, on this run's own clock."""
        return utc_from_ns(self.wall_time_ns(self.now()))

    def record(self, event: TraceEvent, source: Source, parent: CallRecord | None) -> TraceEvent | None:
        """Write an event with time, place and seq filled in; None if the run has ended."""
        now_ns = self.now()
        with self.lock:
            if self.graph.closed:
                return None
            placed = replace(event, **self.where(source, parent, now_ns))
            self.graph.append(placed)
            return placed

    def where(self, source: Source, parent: CallRecord | None, now_ns: int) -> dict[str, Any]:
        """What every event carries, for the next one. The caller holds the lock."""
        graph = self.graph
        return {
            "run_id": self.id,
            "seq": graph.seq + 1,
            "at_ms": (now_ns + graph.wall_offset_ns) // 1_000_000,
            "source": source.path,
            "depth": source.depth,
            "iteration": source.iteration,
            "parent_id": parent.node_id if parent else None,
        }

    def record_call(self, event: CallEnded, account: Account, source: Source, parent: CallRecord) -> None:
        """Write down a call that somebody made outside the door: it is in the tree, and its cost is spent."""
        duration_ns, error = _check_recorded(event)
        cost, tokens_in, tokens_out = event.cost_nanos, event.input_tokens, event.output_tokens
        now_ns = self.now()
        with self.lock:
            call = self.graph.begin(parent, event.call_kind, event.name, event.model, source, now_ns - duration_ns)
            accounts.charge(account, cost, tokens_in, tokens_out, self.worst_case[event.call_kind].api_calls)
            if isinstance(event.finish_reason, str) and event.finish_reason in NOT_WHOLE:
                mark_not_whole(call, event.finish_reason)
            status = "fail" if error else event.status
            self.graph.end(call, now_ns, status, cost, tokens_in, tokens_out, event.stop_reason, error)
        if self.shared is not None:
            from penstock.runtime.durable.holding import note_charge

            note_charge(self.shared, call, cost, tokens_in, tokens_out, self.worst_case[event.call_kind].api_calls)

    def record_stop(self, stop: Stop, decision: Decision, source: Source, call: CallRecord | None, hook: str) -> None:
        """Write down that something was stopped: as a safety event, and in the log.

        A hook that denies for a reason of its own signs with its name. Every other stop is one of the run's, whoever
        noticed it: a hook that stands behind one, such as a rate limit, is named in the metadata. An abort is written
        once, with whatever it is first told of; the calls it stops beside that say so in their own records.
        """
        if stop.reason is StopReason.ABORTED and not self._tells_first(stop):
            return
        signed = hook if stop.reason is StopReason.HOOK_DENIED else "ExecutionContext"
        self.keep_safety_event(
            SafetyEvent(
                event_type=str(stop.reason),
                decision=decision,
                reason=stop.message,
                hook=signed,
                request_id=self.metadata.request_id,
                ts=self.wall_time(),
                metadata=self.about(call) | _figures(stop) | ({} if hook == signed else {"hook": hook}),
            )
        )
        now_ns = self.now()
        with self.lock:
            if self.graph.closed:
                return
            self.graph.append(
                LimitTrace(
                    **self.where(source, call, now_ns),
                    node_id=call.node_id if call else None,
                    name=call.name if call else "",
                    stop_reason=str(stop.reason),
                    message=stop.message,
                    budget=stop.budget,
                    unit=stop.unit,
                    limit=stop.limit,
                    used=stop.used,
                    held=stop.held,
                    asked=stop.asked,
                )
            )

    def _tells_first(self, abort: Stop) -> bool:
        """Whether nobody has told of this abort yet; from now on, somebody has."""
        told = self.told_aborts
        with self.lock:
            if id(abort) in told:
                return False
            if len(told) >= MAX_TOLD_ABORTS:
                del told[next(iter(told))]
            told[id(abort)] = abort
            return True

    def record_verdict(self, verdict: Verdict, source: Source, call: CallRecord) -> None:
        """Write down what a hook said of a call."""
        event = SafetyEvent(
            event_type=str(verdict.stop_reason) if verdict.decision is Decision.HALT else verdict.decision.lower(),
            decision=verdict.decision,
            reason=verdict.reason,
            hook=verdict.hook,
            request_id=self.metadata.request_id,
            ts=self.wall_time(),
            metadata=self.about(call),
        )
        self.record_safety(event, source, call)

    def record_safety(self, event: SafetyEvent, source: Source, call: CallRecord | None) -> None:
        """Write down a safety event of a hook or of a caller."""
        self.keep_safety_event(event)
        self.record(
            SafetyTrace(
                event_type=event.event_type,
                decision=str(event.decision),
                reason=event.reason,
                hook=event.hook,
                request_id=event.request_id,
                metadata=event.metadata,
            ),
            source,
            call,
        )

    def keep_safety_event(self, event: SafetyEvent) -> None:
        """Keep the event; the oldest makes room and is counted."""
        with self.lock:
            if self.safety_events is None:
                self.safety_events = deque(maxlen=self.settings.max_safety_events)
            if len(self.safety_events) == self.safety_events.maxlen:
                self.safety_dropped += 1
            self.safety_events.append(event)

    def partial_results(self) -> Mapping[str, Any]:
        """The results so far by call name, with the path of the child context before it; a name that comes again gets
        its call id after it."""
        with self.lock:
            kept = list(self.results or ())
        results: dict[str, Any] = {}
        for call, value in kept:
            _, _, place = call.source.path.partition("/")
            name = f"{place}/{call.name}" if place else call.name
            results[name if name not in results else f"{name}#{call.node_id}"] = value
        return results

    def about(self, call: CallRecord | None) -> dict[str, Any]:
        """What a safety event says of the run it belongs to, and of its call."""
        about: dict[str, Any] = {"chain_id": self.id, "service": self.metadata.service, "team": self.metadata.team}
        about |= {"org_id": self.metadata.org_id, "user_id": self.metadata.user_id, "tags": dict(self.metadata.tags)}
        if call is not None:
            about |= {"node_id": call.node_id, "operation_name": call.name}
        return about


def _figures(stop: Stop) -> dict[str, Any]:
    figures: dict[str, Any] = {"budget": stop.budget}
    if stop.unit is not None:
        figures |= {"unit": stop.unit, "limit": stop.limit, "used": stop.used, "held": stop.held, "asked": stop.asked}
    return figures
