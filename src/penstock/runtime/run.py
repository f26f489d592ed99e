"""What the contexts of one run share.

The run points at the parts (ledger, log, pipeline, breaker, prices) and keeps the few things that belong to none of
them: the safety events, the results so far, the figures behind un-hinted holds. It decides nothing; the door does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from penstock.clock import SYSTEM_CLOCK, Clock, utc_from_ns
from penstock.containment.breaker import CircuitBreaker
from penstock.containment.ledger import Ledger
from penstock.containment.safety import ChainMetadata, Decision, SafetyEvent
from penstock.containment.shield import ShieldPipeline, Slot
from penstock.errors import InvalidValue
from penstock.runtime import worker
from penstock.runtime.observers import Observers
from penstock.runtime.prices import PriceBook, default_prices
from penstock.stops import Stop
from penstock.tracing.divergence import DivergenceDetector
from penstock.tracing.events import LimitTrace, SafetyTrace, TraceEvent
from penstock.tracing.execution_graph import ExecutionGraph
from penstock.tracing.record import CallRecord, Source

SyncCalls = Literal["auto", "inline", "thread"]
UnknownBill = Literal["hold", "release"]


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How a run behaves where there is a choice; the defaults are the careful ones."""

    strict: bool = False
    """Refuse calls without a cost hint or a known worst case."""
    unknown_bill: UnknownBill = "hold"
    """What a call that failed with an unknown bill held: kept as unresolved, or released."""
    sync_calls: SyncCalls = "auto"
    """Where sync functions run: on a worker if a deadline or a given token may need the caller back (auto), in the
    caller's thread always (inline), on a worker always (thread)."""
    max_kept_calls: int | None = 100_000
    """Calls kept one by one; older finished ones are folded into their parents. None keeps all."""
    max_kept_results: int = 1_000
    """Results kept for whoever is told that the run was stopped."""
    max_safety_events: int = 1_000
    """Safety events kept; older ones are dropped and counted."""

    def __post_init__(self) -> None:
        if self.unknown_bill not in ("hold", "release"):
            raise InvalidValue("unknown_bill", self.unknown_bill, "'hold' or 'release'")
        if self.sync_calls not in ("auto", "inline", "thread"):
            raise InvalidValue("sync_calls", self.sync_calls, "'auto', 'inline' or 'thread'")


class Largest:
    """The most an un-hinted call of one kind has cost so far: what the next one of that kind holds."""

    __slots__ = ("cost", "tokens")

    def __init__(self) -> None:
        self.cost = 0
        self.tokens = 0


class Run:
    """One run's shared parts."""

    __slots__ = (
        "api_calls_of",
        "breaker",
        "clock",
        "divergence",
        "external_token",
        "graph",
        "guarded",
        "id",
        "largest",
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
        "unknown_costs",
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
    ) -> None:
        self.id = metadata.chain_id
        self.clock = clock
        self.now = clock.monotonic_ns
        self.metadata = metadata
        self.ledger = ledger
        self.lock = ledger.lock
        self.settings = settings = settings or RunSettings()
        self.graph = ExecutionGraph(
            self.id, clock=clock, lock=ledger.lock, source=source, max_kept=settings.max_kept_calls
        )
        self.pipeline = pipeline
        self.breaker = breaker
        self.prices = prices or default_prices()
        self.divergence = divergence
        self.external_token = external_token
        self.guarded = pipeline is not None or breaker is not None
        self.observers: Observers | None = None
        self.largest = {"llm": Largest(), "tool": Largest(), "system": Largest()}
        self.api_calls_of = {"llm": 1, "tool": 0, "system": 0}
        self.unknown_costs = 0
        """Successful model calls whose cost nobody could tell."""
        self.results: deque[tuple[CallRecord, Any]] = deque(maxlen=settings.max_kept_results)
        self.safety_events: deque[SafetyEvent] = deque(maxlen=settings.max_safety_events)
        self.safety_dropped = 0

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

    def record(self, event: TraceEvent, source: Source, parent: CallRecord | None) -> TraceEvent | None:
        """Write an event with time, place and seq filled in; None if the run has ended."""
        now_ns = self.now()
        with self.lock:
            if self.graph.closed:
                return None
            placed = self.place(event, source, parent, now_ns)
            self.graph.append(placed)
            return placed

    def place(self, event: TraceEvent, source: Source, parent: CallRecord | None, now_ns: int) -> TraceEvent:
        """The event with time, place and the next seq filled in. The caller holds the lock."""
        return replace(
            event,
            run_id=self.id,
            seq=self.graph.seq + 1,
            at_ms=self.wall_time_ns(now_ns) // 1_000_000,
            source=source.path,
            depth=source.depth,
            iteration=source.iteration,
            parent_id=parent.node_id if parent else None,
        )

    def record_stop(self, stop: Stop, decision: Decision, source: Source, call: CallRecord | None, hook: str) -> None:
        """Write down that something was stopped: as a safety event, and in the log."""
        self.keep_safety_event(
            SafetyEvent(
                event_type=str(stop.reason),
                decision=decision,
                reason=stop.message,
                hook=hook,
                request_id=self.metadata.request_id,
                ts=utc_from_ns(self.wall_time_ns(self.now())),
                metadata=self._about(stop, call),
            )
        )
        self.record(
            LimitTrace(
                stop_reason=str(stop.reason),
                message=stop.message,
                budget=stop.budget,
                unit=stop.unit,
                limit=stop.limit,
                used=stop.used,
                held=stop.held,
                asked=stop.asked,
            ),
            source,
            call,
        )

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
            if len(self.safety_events) == self.safety_events.maxlen:
                self.safety_dropped += 1
            self.safety_events.append(event)

    def partial_results(self) -> Mapping[str, Any]:
        """The results so far by call name; a name that comes again gets its call id after it."""
        with self.lock:
            kept = list(self.results)
        results: dict[str, Any] = {}
        for call, value in kept:
            results[call.name if call.name not in results else f"{call.name}#{call.node_id}"] = value
        return results

    def _about(self, stop: Stop, call: CallRecord | None) -> dict[str, Any]:
        about: dict[str, Any] = {"chain_id": self.id, "service": self.metadata.service, "team": self.metadata.team}
        about |= {"org_id": self.metadata.org_id, "user_id": self.metadata.user_id, "tags": dict(self.metadata.tags)}
        if call is not None:
            about |= {"node_id": call.node_id, "operation_name": call.name}
        if stop.unit is not None:
            about |= {"unit": stop.unit, "limit": stop.limit, "used": stop.used, "held": stop.held}
        return about | {"budget": stop.budget}
