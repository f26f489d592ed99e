"""The shared objects of a host: the stores, the settings, the clocks and the run handlers."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock import logs
from penstock.clock import Clock
from penstock.errors import LedgerUnavailable
from penstock.hosting import trace_context
from penstock.hosting.event_batches import EventBatches
from penstock.hosting.figures import RunFigures
from penstock.hosting.forking import inputs_of
from penstock.hosting.limits import HostSettings
from penstock.hosting.ports import ENDED, GraphRecord, HostStores, RunRecord, StoreUnavailable
from penstock.ids import new_run_id
from penstock.kernel.executor import ExecutorRegistry
from penstock.money import to_usd
from penstock.runtime.billing.prices import PriceBook
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable.async_ledger import AsyncLedger
from penstock.runtime.durable.blocks import Blocks
from penstock.runtime.graphs.graph_runtime import GraphPlan

logger = logging.getLogger("penstock.hosting")

MAX_GRAPHS = 256


@dataclass(frozen=True, slots=True)
class Prepared:
    """The input and services that a run starts with."""

    input: Any = None
    services: Mapping[str, Any] = field(default_factory=dict)
    """Services that override those of the host."""


class RunHandler(Protocol):
    """Callbacks for the runs of one kind, which is `origin["kind"]` of a run."""

    async def on_start(self, run: RunRecord) -> Prepared:
        """Return the input and services that the run starts with; called again for each worker that continues it."""

    async def on_resume(self, run: RunRecord) -> None:
        """Check an ended run that is to be resumed, forked or replayed; raise Conflict if it cannot start."""

    async def on_end(self, run: RunRecord, stores: Any) -> None:
        """Store the end of a run; called in the transaction that ends or parks it, and may use only its `stores`.

        All events of the run are stored, including the last. Called again if the transaction could not be committed.
        """


class SteadyClock:
    """Wall time that is not affected by clock changes: the wall clock at creation plus the time elapsed since.

    Leases are compared between workers. Setting a clock by a day must not make one worker's leases expire, nor make
    those of others appear expired. After a suspend, a machine must not continue in the past, where its leases would
    already have expired when written: so suspended time counts, if the clock provides it (`passed_ns`).
    """

    def __init__(self, clock: Clock) -> None:
        self._passed_ns: Callable[[], int] = getattr(clock, "passed_ns", clock.monotonic_ns)
        self._offset_ns = clock.time_ns() - self._passed_ns()
        self.monotonic_ns = clock.monotonic_ns

    def time_ns(self) -> int:
        return self._passed_ns() + self._offset_ns


@dataclass(slots=True)
class HostContext:
    """The shared objects of one host."""

    stores: HostStores
    settings: HostSettings
    executors: ExecutorRegistry
    services: Mapping[str, Any]
    worker: str
    """The name of this host, unique among the hosts that share the stores."""
    clock: Clock
    steady: SteadyClock
    handlers: dict[str, RunHandler] = field(default_factory=dict)
    on_delete: dict[str, Callable[[int], Awaitable[object]]] = field(default_factory=dict)
    """Callbacks that remove further data with old runs, by name; called with the time before which runs are removed."""
    counted: Counter[str] = field(default_factory=Counter)
    """Counters of this host since its start, for metrics."""

    figures: RunFigures = field(default_factory=RunFigures)
    """Counters of this host by graph and by model."""
    graphs: dict[tuple[str, int], GraphPlan] = field(default_factory=dict)
    """Cache of recently read graphs, by id and version."""
    accounts: dict[str, bool] = field(default_factory=dict)
    """Existing daily accounts, by name or by `parent/name`; True for an account recently opened here, with the ceilings
    of the settings."""
    mark: str = field(default_factory=lambda: new_run_id()[-12:])
    """Distinguishes this host's holds in the ledger from those of any other host, even one with the same name."""
    observe: Callable[[ExecutionContext], object] | None = None
    """Called with the context of each run before it starts."""
    prices: PriceBook | None = None
    """Model prices; None is the price book shared by the process."""
    batches: EventBatches = field(init=False)
    """Writes the events of all runs."""
    blocks: Blocks = field(init=False)
    """The blocks of the daily budgets that this host has reserved."""

    def __post_init__(self) -> None:
        self.batches = EventBatches(self.stores.transaction)
        self.blocks = Blocks(self.ledger, self.mark, self.clock)

    @property
    def ledger(self) -> AsyncLedger:
        """The ledger of the stores, for tasks."""
        return AsyncLedger(self.stores.ledger)

    def graph_of(self, graph_id: str, version: int) -> GraphPlan | None:
        """Return the graph from the cache, or None; a version never changes."""
        return self.graphs.get((graph_id, version))

    async def parsed(self, graph: GraphRecord) -> GraphPlan:
        """Return the parsed graph of a record; raise GraphInvalid if it cannot be parsed."""
        plan = self.graph_of(graph.id, graph.version)
        if plan is None:
            plan = await GraphPlan.of(graph.document, self.executors)
            if len(self.graphs) >= MAX_GRAPHS:
                self.graphs.clear()
            self.graphs[graph.id, graph.version] = plan
        return plan

    def now_ms(self) -> int:
        """Return the current time on the clock used for leases."""
        return self.steady.time_ns() // 1_000_000

    def handler_of(self, run: RunRecord) -> RunHandler | None:
        """Return the handler of this run; None if it has none, such as a fork or a replay."""
        return self.handlers.get(str(run.origin.get("kind", "run")))

    async def guard(self, turn: Callable[[], Awaitable[None]]) -> None:
        """Await one turn of a periodic task; a failure is counted, and does not end the task."""
        try:
            await turn()
        except (StoreUnavailable, LedgerUnavailable):
            self.counted["store_failures"] += 1
        except Exception:  # one failure must not stop the other runs of this host
            self.counted["host_failures"] += 1
            logger.exception("a periodic task of the host failed; it is tried again at the next interval")

    def count_left(self, before: RunRecord, left: RunRecord) -> None:
        """Count the usage of a run since it was claimed and, if it has ended, its status and duration."""
        counted = self.counted
        counted["cost_nanos"] += max(0, left.cost_nanos - before.cost_nanos)
        counted["tokens_in"] += max(0, left.tokens_in - before.tokens_in)
        counted["tokens_out"] += max(0, left.tokens_out - before.tokens_out)
        counted["unknown_costs"] += max(0, left.unknown_costs - before.unknown_costs)
        counted[left.status] += 1
        self.figures.take_run(before, left)
        if left.status in ENDED:
            ended_ms = left.ended_ms or 0
            counted[f"ended:{left.status}:{left.stop_reason or ''}"] += 1
            counted["took_ms"] += max(0, ended_ms - (left.started_ms or ended_ms))
        if logs.RUNS.isEnabledFor(logging.INFO):
            self._log_left(left)

    def _log_left(self, left: RunRecord) -> None:
        """Log that a run has ended or is parked, with its identity and usage but none of its input or output."""
        until_ms = left.ended_ms or self.now_ms()
        about = {
            "run_id": left.id,
            "owner": left.owner,
            "kind": str(left.origin.get("kind", "run")),
            "graph_id": left.graph_id,
            "graph_version": left.graph_version,
            "chat_id": left.origin.get("chat_id"),
            "status": left.status,
            "stop_reason": left.stop_reason,
            "duration_ms": max(0, until_ms - (left.started_ms or until_ms)),
            "cost_usd": to_usd(left.cost_nanos),
            "tokens_in": left.tokens_in,
            "tokens_out": left.tokens_out,
            "unknown_costs": left.unknown_costs or None,
            "worker": self.worker,
        }
        logs.record(logs.RUNS, "run", about)

    async def prepare(self, run: RunRecord) -> Prepared:
        """Return the input and services that the run starts with; for a fork or a replay, those of the original run."""
        run = _as_taken_up(run)
        handler = self.handler_of(run)
        return Prepared(run.input) if handler is None else await handler.on_start(run)

    async def check_resume(self, run: RunRecord) -> None:
        """Raise Conflict if an ended run cannot be resumed, forked or replayed because its starting data is gone."""
        run = _as_taken_up(run)
        handler = self.handler_of(run)
        if handler is not None:
            await handler.on_resume(run)


def _as_taken_up(run: RunRecord) -> RunRecord:
    """Return a fork or a replay with the origin of its original run; any other run unchanged.

    The handler finds the replaced inputs, by node id, in `inputs` of the origin.
    """
    taken_up = run.origin.get("of")
    return run._replace(origin={**taken_up, "inputs": inputs_of(run)}) if isinstance(taken_up, Mapping) else run


def with_trace(origin: Mapping[str, Any]) -> dict[str, Any]:
    """Return the origin of a new run with the current span, or else with the trace in the headers of the request."""
    tracing = sys.modules.get("opentelemetry.trace")  # until a program imports it, no span is current
    span = None if tracing is None else tracing.get_current_span().get_span_context()
    if span is not None and span.is_valid:
        return trace_context.stored(origin, trace_context.headers_of(span))
    headers = trace_context.current.get()
    return trace_context.stored(origin, headers) if headers else dict(origin)
