"""The state that the contexts of one run share.

The run refers to its parts (ledger, log, pipeline, breaker, prices) and keeps what belongs to none of them: the safety
events, the results so far, the worst cases for holds without a hint. It decides nothing; admission does.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal, NamedTuple

from penstock import checks
from penstock.clock import SYSTEM_CLOCK, Clock, utc_from_ns
from penstock.containment import accounts
from penstock.containment.accounts import Account, Taken
from penstock.containment.breaker import CircuitBreaker
from penstock.containment.ledger import Ledger
from penstock.containment.limits import ResourceUsage, seconds_to_ns
from penstock.containment.safety import ChainMetadata, Decision, SafetyEvent
from penstock.containment.shield import ShieldPipeline, Slot, Verdict
from penstock.errors import InvalidValue
from penstock.runtime import worker
from penstock.runtime.billing.prices import PriceBook, default_prices
from penstock.runtime.billing.usage import Usage
from penstock.runtime.durable.journal import Journal
from penstock.runtime.durable.shared import SharedBudget, note_charge
from penstock.runtime.locking import all_or_nothing, unlock
from penstock.runtime.observers import Observers
from penstock.runtime.streams import IncompleteOutput
from penstock.stops import Stop, StopReason
from penstock.tracing.divergence import DivergenceDetector
from penstock.tracing.events import (
    CallEnded,
    CallSettled,
    CallStarted,
    LimitTrace,
    ModelCallTrace,
    RunCompleted,
    RunStarted,
    SafetyTrace,
    ToolCallTrace,
    TraceEvent,
)
from penstock.tracing.execution_graph import ExecutionGraph
from penstock.tracing.lifecycle import KINDS, TERMINAL, CallKind
from penstock.tracing.payloads import (
    LARGEST_PAYLOAD_BYTES,
    MAX_PAYLOAD_BYTES,
    RECORD_PAYLOADS,
    SMALLEST_PAYLOAD_BYTES,
    Payload,
    Payloads,
    RecordPayloads,
)
from penstock.tracing.record import (
    NOT_WHOLE,
    OPEN,
    RUN_BEGINS,
    CallRecord,
    Source,
    keep_payload,
    mark_cost_unknown,
    mark_not_whole,
)

SyncCalls = Literal["auto", "inline", "thread"]
UnknownBill = Literal["hold", "release"]

THE_RUNS_OWN = (RunStarted, RunCompleted, CallStarted, CallSettled)
"""Events that only the run itself may write; from elsewhere they would contradict its history."""

MAX_BILLS = 10_000
"""Maximum number of unresolved bills that a run keeps one by one; the holds of further ones stay taken all the same."""

MAX_UNPRICED = 100
"""Maximum number of models without a price that a run reports one by one."""

MAX_UNCONTAINED_HOSTS = 100
"""Maximum number of hosts by which uncontained requests are counted; those to further hosts are counted together."""

MAX_RECORDED_ABORTS = 1_000
"""Maximum number of recorded aborts that a run remembers; an old abort stops no further calls."""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Settings of a run; the defaults are the safest."""

    strict: bool = False
    """Refuse calls without a cost hint or a known worst case."""
    unknown_bill: UnknownBill = "hold"
    """The hold of a call that failed with an unknown bill: kept as unresolved, or released."""
    sync_calls: SyncCalls = "auto"
    """Where sync functions run: on a worker if a deadline, a given token or another thread of the program may need the
    caller back (auto), in the caller's thread always (inline), on a worker always (thread)."""
    max_wait_s: float = 300.0
    """Maximum time that a call waits for what other calls hold; 0 refuses it at once."""
    max_kept_calls: int | None = 100_000
    """Calls kept one by one; older finished ones are folded into their parents. None keeps all."""
    max_kept_results: int = 1_000
    """Maximum number of results kept for the error of a stopped run."""
    max_kept_pieces: int = 10_000
    """Maximum number of pieces kept of each stopped stream, from its beginning."""
    max_safety_events: int = 1_000
    """Safety events kept; older ones are dropped and counted."""
    record_steps: bool = True
    """Whether every step of a graph is a call in the tree. Without it, a step that no limit, hook, policy or trace
    applies to runs unrecorded; calls made inside it are recorded all the same."""
    record_payloads: RecordPayloads = "off"
    """Whether the arguments and results of tool calls and the messages of model calls are recorded: not at all, without
    what looks like a secret, or as they are. Child contexts record as their run does."""
    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    """Maximum size of one recorded payload, as JSON; a larger one is truncated."""
    adopt: bool = False
    """Charge this run for model requests of existing clients that belong to no scope, if it is the only run with an
    open scope in the process and the process hosts no runs for others."""

    def __post_init__(self) -> None:
        for flag in ("strict", "adopt", "record_steps"):
            if not isinstance(getattr(self, flag), bool):
                raise InvalidValue(flag, getattr(self, flag), "True or False")
        seconds_to_ns(self.max_wait_s, "max_wait_s")
        if self.max_kept_calls is not None and not _at_least(1, self.max_kept_calls):
            raise InvalidValue(
                "max_kept_calls", self.max_kept_calls, "a whole number, one or more, or None to keep all"
            )
        for field in ("max_kept_results", "max_kept_pieces", "max_safety_events"):
            if not _at_least(0, kept := getattr(self, field)):
                raise InvalidValue(field, kept, "a whole number, zero or more")
        if self.unknown_bill not in ("hold", "release"):
            raise InvalidValue("unknown_bill", self.unknown_bill, "'hold' or 'release'")
        if self.sync_calls not in ("auto", "inline", "thread"):
            raise InvalidValue("sync_calls", self.sync_calls, "'auto', 'inline' or 'thread'")
        if self.record_payloads not in RECORD_PAYLOADS:
            raise InvalidValue("record_payloads", self.record_payloads, "'off', 'redacted' or 'full'")
        if not _at_least(SMALLEST_PAYLOAD_BYTES, self.max_payload_bytes) or (
            self.max_payload_bytes > LARGEST_PAYLOAD_BYTES
        ):
            expected = f"a whole number of bytes from {SMALLEST_PAYLOAD_BYTES} to {LARGEST_PAYLOAD_BYTES}"
            raise InvalidValue("max_payload_bytes", self.max_payload_bytes, expected)


def _check_recorded(event: CallEnded) -> tuple[int, str | None]:
    """Return the duration and error class of a call that ran elsewhere; raise InvalidValue if the event is invalid."""
    checks.text("name", event.name)
    if event.call_kind not in tuple(KINDS):
        raise InvalidValue("call_kind", event.call_kind, f"one of {', '.join(sorted(KINDS))}")
    if event.status not in tuple(TERMINAL):
        raise InvalidValue("status", event.status, f"one of {', '.join(sorted(TERMINAL))}")
    Usage.of(input_tokens=event.input_tokens, output_tokens=event.output_tokens, model=event.model)
    checks.boolean("cost_unknown", event.cost_unknown)
    error: object = event.error
    if error is not None and not isinstance(error, str | BaseException):
        raise InvalidValue("error", error, "an exception, the name of its class, or None")
    if event.stop_reason is not None:
        checks.text("stop_reason", event.stop_reason, none="no reason")
    took: object = event.duration_ms
    if isinstance(took, bool) or not isinstance(took, int | float) or not 0 <= took <= 1e12:
        raise InvalidValue("duration_ms", took, "a finite, non-negative number of milliseconds")
    return round(took * 1_000_000), type(error).__name__ if isinstance(error, BaseException) else error


def _at_least(least: int, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= sys.maxsize


DEFAULT_SETTINGS = RunSettings()

open_hosts: set[object] = set()
"""The hosts of this process that work on runs for others."""


class OpenBill(NamedTuple):
    """A call that has ended with an unknown bill, and why the bill is unknown."""

    held: Taken
    record: CallRecord
    reason: str
    at_ns: int


class WorstCase:
    """The hold of a call whose worst case is unknown: the most that a call of its kind has used so far.

    A cost hint replaces the cost alone; tokens have no hint. Immutable: learning creates a new one, and runs that have
    learned nothing share theirs.
    """

    __slots__ = ("api_calls", "cost", "is_unknown", "model", "tokens", "tokens_unknown")

    def __init__(
        self,
        api_calls: int,
        model: str | None = None,
        cost: int = 0,
        tokens: int = 0,
        is_unknown: bool = False,
        tokens_unknown: bool = False,
    ) -> None:
        self.is_unknown = is_unknown
        """Whether no model call without a hint has succeeded or was billed: under a money limit, they run one at a time
        until then."""
        self.tokens_unknown = tokens_unknown
        """Whether none has succeeded or used tokens: the same under a token limit."""
        self.cost = cost
        self.tokens = tokens
        self.api_calls = api_calls
        self.model = model
        """Default model of calls that name none."""


NOTHING_LEARNED: Mapping[CallKind, WorstCase] = {
    "llm": WorstCase(1, is_unknown=True, tokens_unknown=True),
    "tool": WorstCase(0),
    "system": WorstCase(0),
}


class Run:
    """One run's shared parts."""

    __slots__ = (
        "bills",
        "breaker",
        "checks_calls",
        "checks_results",
        "clock",
        "demands_price",
        "divergence",
        "external_token",
        "first_calls",
        "gaps",
        "graph",
        "guarded",
        "id",
        "incomplete",
        "is_learning",
        "journal",
        "last_failure",
        "ledger",
        "lock",
        "metadata",
        "now",
        "observers",
        "payloads",
        "pipeline",
        "prices",
        "queues",
        "reads_args",
        "recorded_aborts",
        "results",
        "room",
        "safety_dropped",
        "safety_events",
        "settings",
        "shared",
        "stops",
        "swallowed",
        "uncontained",
        "unknown_costs",
        "unpriced",
        "usage",
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
        usage: ResourceUsage | None = None,
    ) -> None:
        self.id = metadata.chain_id
        self.clock = clock
        self.now = clock.monotonic_ns
        self.metadata = metadata
        self.ledger = ledger
        self.lock = ledger.lock
        self.room = ledger.room
        self.queues = ledger.room.queues
        """Its queues; empty while no call waits."""
        self.first_calls: tuple[Taken, ...] = ()
        """The model call of unknown worst case that runs alone, until it ends; then one that it made, and so on."""
        self.is_learning = True
        """Whether the end of a model call may show what such calls use."""
        self.settings = settings = settings or DEFAULT_SETTINGS
        self.graph = ExecutionGraph(
            self.id, clock=clock, lock=ledger.lock, source=source, max_kept=settings.max_kept_calls
        )
        self.journal = journal
        """Recorded results of the run, and where new ones are written; None for no journal."""
        self.shared = shared
        """Account at a store that model and tool calls are also paid from; None for no shared budget."""
        self.usage = usage
        """Usage object that the run starts from and updates; None if none was passed."""
        self.pipeline = pipeline
        self.breaker = breaker
        self.prices = prices or default_prices()
        self.divergence = divergence
        self.external_token = external_token
        self.guarded = pipeline is not None or breaker is not None
        self.payloads: Payloads | None = None
        """How payloads are recorded; None records none."""
        if settings.record_payloads != "off":
            self.payloads = Payloads(settings.record_payloads, settings.max_payload_bytes)
        self.reads_args = divergence is not None or self.payloads is not None
        """Whether the arguments of a call are inspected before it runs."""
        self.observers: Observers | None = None
        self.worst_case = NOTHING_LEARNED
        if metadata.model is not None:
            self.worst_case = {**NOTHING_LEARNED, "llm": WorstCase(1, metadata.model, 0, 0, True, True)}
        self.demands_price = settings.strict or self.prices.unknown == "refuse"
        """Whether a call without a hint may be refused for its price."""
        self.checks_calls = self.guarded or self.demands_price
        """Whether anything but limits decides on a call before it runs."""
        self.checks_results = pipeline is not None or self.payloads is not None
        """Whether the result of a call is judged by a hook or recorded."""
        self.unknown_costs = 0
        """Number of model calls of unknown cost."""
        self.unpriced: tuple[str, ...] = ()
        """Models without a price that were reported in a safety event."""
        self.results: deque[tuple[CallRecord, Any]] | None = None
        """The newest results; None until there is one."""
        self.incomplete: deque[tuple[CallRecord, IncompleteOutput]] | None = None
        """The newest outputs of streams that were stopped; None until there is one."""
        self.safety_events: deque[SafetyEvent] | None = None
        """The newest safety events; None until there is one."""
        self.safety_dropped = 0
        self.bills: dict[str, OpenBill] | None = None
        """Calls with an unresolved bill, by node id; some may be resolved since. None until there is one."""
        self.last_failure: tuple[Stop, Source, CallRecord] | None = None
        """The newest failure that the caller may retry; becomes a provider error if the retry budget refuses."""
        self.stops: dict[Source, Stop] = {}
        """The first limit that refused something in a context, or in one below it by a budget they share."""
        self.swallowed: Stop | None = None
        """The stop that did not come out of a block of the run: what ran inside has swallowed it."""
        self.uncontained: dict[str, int] | None = None
        """Number of model requests that belonged to no run meanwhile, by host; None until there is one."""
        self.gaps: set[str] | None = None
        """Sentences about how requests may have left blocks of the run uncounted; None until there is one."""
        self.recorded_aborts: dict[int, Stop] = {}
        """Recorded aborts, by identity: each is recorded once, however many calls it stops."""

    def begin(self, name: str, metadata: Mapping[str, Any], source: Source) -> CallRecord:
        """Write the run's first event and its root."""
        graph, now_ns = self.graph, self.now()
        with self.lock:
            graph.append(RUN_BEGINS)
            graph.root = graph.begin(None, "system", name, None, source, now_ns, True, metadata)
            return graph.root

    def learn(self, kind: CallKind, cost: int, tokens: int) -> None:
        """Raise the worst case of that kind to this usage. The caller holds the lock."""
        worst = self.worst_case[kind]
        more = WorstCase(
            worst.api_calls,
            worst.model,
            max(worst.cost, cost),
            max(worst.tokens, tokens),
            worst.is_unknown,
            worst.tokens_unknown,
        )
        self.worst_case = {**self.worst_case, kind: more}
        shared = self.ledger.unhinted
        if shared is not None and kind == "llm":
            shared.most_cost, shared.most_tokens = max(shared.most_cost, cost), max(shared.most_tokens, tokens)

    def begin_first_call(self, call: Taken, has_limits: bool) -> None:
        """Let model calls whose worst case is unknown wait for this one. The caller holds the lock.

        Without limits none waits; then the end of the first one is enough to know what such a call uses.
        """
        if call in self.first_calls or (self.first_calls and not has_limits):
            return
        shared = self.ledger.unhinted
        if shared is not None:
            shared.first_calls = (*shared.first_calls, call)
        self.first_calls = (*self.first_calls, call)
        self.is_learning = True

    def end_first_call(self, call: Taken, is_hinted: bool, has_succeeded: bool) -> None:
        """Let other model calls hold what this one has used, now that it has ended. The caller holds the lock.

        If it did not succeed, and nothing is known of what such a call uses, the next one runs alone. Nor does one show
        anything of what it knew before: its cost from a hint, or its tokens.
        """
        worst, shared = self.worst_case["llm"], self.ledger.unhinted
        is_unknown = worst.is_unknown and worst.cost == 0 and (is_hinted or not has_succeeded)
        tokens_unknown = worst.tokens_unknown and worst.tokens == 0 and (call._held_tokens > 0 or not has_succeeded)
        if shared is not None:
            shared.is_unknown = shared.is_unknown and is_unknown
            shared.tokens_unknown = shared.tokens_unknown and tokens_unknown
            shared.first_calls = tuple(each for each in shared.first_calls if each is not call)
        if (is_unknown, tokens_unknown) != (worst.is_unknown, worst.tokens_unknown):
            known = WorstCase(worst.api_calls, worst.model, worst.cost, worst.tokens, is_unknown, tokens_unknown)
            self.worst_case = {**self.worst_case, "llm": known}
        # Last: if a signal handler raises before, all of this is done again.
        self.first_calls = tuple(each for each in self.first_calls if each is not call)
        self.is_learning = tokens_unknown or bool(self.first_calls)

    def keep_result(self, record: CallRecord, value: Any) -> None:
        """Keep the first result of the run. The caller holds the lock."""
        self.results = deque([(record, value)], maxlen=self.settings.max_kept_results)

    def keep_incomplete(self, record: CallRecord, output: IncompleteOutput | None) -> None:
        """Keep the output of a stream that was stopped, if it has any. The caller holds the lock."""
        if output is None:
            return
        if self.incomplete is None:
            self.incomplete = deque(maxlen=self.settings.max_kept_results)
        self.incomplete.append((record, output))

    def keep_bill(self, held: Taken, record: CallRecord, reason: str, now_ns: int) -> None:
        """Keep a call whose hold was left unresolved, so that its bill can be resolved. The caller holds the lock."""
        if self.bills is None:
            self.bills = {}
        elif len(self.bills) >= MAX_BILLS:
            self.bills = {id: bill for id, bill in self.bills.items() if bill.held.state == "unresolved"}
        if len(self.bills) < MAX_BILLS:
            self.bills[record.node_id] = OpenBill(held, record, reason, now_ns)

    def outside_the_lock(self, act: Callable[[], None]) -> None:
        """Run `act` in this thread; if it already has the run's lock, on a worker that waits for the lock.

        A signal handler or a finalizer may run in the middle of a change and write to the run.
        """
        if self.lock._is_owned():  # type: ignore[attr-defined]
            worker.start(worker.Job(act, lambda value, error: None))
        else:
            act()

    def asks(self, slot: Slot) -> bool:
        """Whether the pipeline has hooks in that slot."""
        return self.pipeline is not None and self.pipeline.has(slot)

    def wall_time_ns(self, monotonic_ns: int) -> int:
        """Convert a monotonic reading of this run's clock to wall time."""
        return monotonic_ns + self.graph.wall_offset_ns

    def wall_time(self) -> datetime:
        """Return the current time in UTC, on this run's own clock."""
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
        """Return the common fields of the next event. The caller holds the lock."""
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
        """Record a call that was made elsewhere: add it to the tree, and charge its cost."""
        duration_ns, error = _check_recorded(event)
        cost, tokens_in, tokens_out = event.cost_nanos, event.input_tokens, event.output_tokens
        payload = None
        if self.payloads is not None and isinstance(event, ModelCallTrace | ToolCallTrace):
            payload = Payload(self.payloads.capture(event.input), self.payloads.capture(event.output))
        now_ns = self.now()
        charged, api_calls = Taken(), self.worst_case[event.call_kind].api_calls
        call: CallRecord | None = None
        unknown_costs = 0

        def change() -> None:
            nonlocal call, unknown_costs
            if call is None:
                unknown_costs = self.unknown_costs + event.cost_unknown
                begun = (one for one in self.graph.open_calls() if one.owner is charged)
                call = next(begun, None) or self.graph.begin(
                    parent, event.call_kind, event.name, event.model, source, now_ns - duration_ns, owner=charged
                )
            if charged.state is None:
                accounts.charge(account, cost, tokens_in, tokens_out, api_calls, charged=charged)
            self.unknown_costs = unknown_costs
            if call.end_seq == OPEN:
                if isinstance(event.finish_reason, str) and event.finish_reason in NOT_WHOLE:
                    mark_not_whole(call, event.finish_reason)
                if payload is not None:
                    keep_payload(call, payload)
                if event.cost_unknown:
                    mark_cost_unknown(call)
                status = "fail" if error else event.status
                self.graph.end(call, now_ns, status, cost, tokens_in, tokens_out, event.stop_reason, error)
            call.owner = None

        def report() -> None:
            if self.shared is not None and call is not None:
                note_charge(self.shared, call, cost, tokens_in, tokens_out, api_calls)

        all_or_nothing(self.lock, change, report)

    def record_stop(self, stop: Stop, decision: Decision, source: Source, call: CallRecord | None, hook: str) -> None:
        """Record a stop, as a safety event and in the log.

        A hook that denies for its own reason is named as the event's hook. Every other stop belongs to the run, and a
        hook that noticed it, such as a rate limit, is named in the metadata. An abort is recorded once, for the first
        call it stops; the other calls have it in their own records.
        """
        if stop.reason is StopReason.ABORTED and not self._is_first_record_of(stop):
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

    def _is_first_record_of(self, abort: Stop) -> bool:
        """Mark the abort as recorded; return whether it was not recorded before."""
        recorded = self.recorded_aborts
        with self.lock:
            if id(abort) in recorded:
                return False
            if len(recorded) >= MAX_RECORDED_ABORTS:
                del recorded[next(iter(recorded))]
            recorded[id(abort)] = abort
            return True

    def record_verdict(self, verdict: Verdict, source: Source, call: CallRecord) -> None:
        """Record a hook's verdict on a call."""
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
        """Record a safety event of a hook or of a caller."""
        trace: TraceEvent = SafetyTrace(
            event_type=event.event_type,
            decision=str(event.decision),
            reason=event.reason,
            hook=event.hook,
            request_id=event.request_id,
            metadata=event.metadata,
        )
        now_ns = self.now()
        placed: TraceEvent | None = None

        def change() -> None:
            nonlocal placed
            if not self.safety_events or self.safety_events[-1] is not event:
                self._append_safety_event(event)
            if placed is None and not self.graph.closed:
                placed = replace(trace, **self.where(source, call, now_ns))
            if placed is not None:
                self.graph.append(placed)

        all_or_nothing(self.lock, change)

    def record_unpriced(self, source: Source, call: CallRecord) -> None:
        """Record that the cost of a call is not limited because its model has no price, once for each model."""
        model, prices = call.model, self.prices
        # A table of prices that is not loaded yet is not loaded for this: it may take long, on an event loop.
        if model is None or model in self.unpriced or prices.is_pending or prices.is_priced(model):
            return
        with self.lock:
            if model in self.unpriced or len(self.unpriced) >= MAX_UNPRICED:
                return
            self.unpriced += (model,)
        event = SafetyEvent(
            event_type=str(StopReason.PRICE_UNKNOWN),
            decision=Decision.ALLOW,
            reason=prices.report_unpriced(model),
            hook="ExecutionContext",
            request_id=self.metadata.request_id,
            ts=self.wall_time(),
            metadata=self.about(call) | {"model": model},
        )
        self.record_safety(event, source, call)

    def record_uncontained(self, host: str) -> bool:
        """Count a model request that belongs to no run; return whether it is the first to that host."""
        with self.lock:
            if self.uncontained is None:
                self.uncontained = {}
            if host not in self.uncontained and len(self.uncontained) >= MAX_UNCONTAINED_HOSTS:
                host = "other hosts"
            self.uncontained[host] = count = self.uncontained.get(host, 0) + 1
        if count == 1:
            root = self.graph.root
            assert root is not None
            event = SafetyEvent(
                event_type="uncontained_request",
                decision=Decision.ALLOW,
                reason=f"a model request to {host} belonged to no run and was not limited",
                hook="ExecutionContext",
                request_id=self.metadata.request_id,
                ts=self.wall_time(),
                metadata=self.about(None) | {"host": host},
            )
            self.record_safety(event, root.source, root)
        return count == 1

    def note_gap(self, gap: str) -> bool:
        """Remember how requests may have left a block of the run uncounted; return whether it is new."""
        with self.lock:
            if self.gaps is None:
                self.gaps = set()
            is_new = gap not in self.gaps
            self.gaps.add(gap)
        return is_new

    def note_swallowed(self, stop: Stop) -> bool:
        """Remember that a block ended normally in spite of the stop; return whether it is the first of the run."""
        with self.lock:
            is_first, self.swallowed = self.swallowed is None, self.swallowed or stop
        return is_first

    def keep_safety_event(self, event: SafetyEvent) -> None:
        """Keep the event; when there is no room, drop and count the oldest."""
        with self.lock:
            self._append_safety_event(event)

    def _append_safety_event(self, event: SafetyEvent) -> None:
        """Keep the event. The caller holds the lock."""
        if self.safety_events is None:
            self.safety_events = deque(maxlen=self.settings.max_safety_events)
        if len(self.safety_events) == self.safety_events.maxlen:
            self.safety_dropped += 1
        self.safety_events.append(event)

    def partial_results(self) -> Mapping[str, Any]:
        """Return the results so far by call name, prefixed with the path of the child context; a repeated name has its
        call id appended. The output of stopped streams follows the results."""
        try:  # in place of `with`: see `locking`
            self.lock.acquire()
            kept = [*(self.results or ()), *(self.incomplete or ())]
            self.lock.release()
        except BaseException:
            unlock(self.lock)
            raise
        results: dict[str, Any] = {}
        for call, value in kept:
            name = call.result_name
            results[name if name not in results else f"{name}#{call.node_id}"] = value
        return results

    def about(self, call: CallRecord | None) -> dict[str, Any]:
        """Return the metadata of a safety event about its run and its call."""
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
