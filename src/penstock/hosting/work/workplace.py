"""What everything that works on hosted runs shares: the stores, the settings, the time, and the kinds of runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.clock import Clock
from penstock.hosting.ports import HostStores
from penstock.hosting.records import ENDED, GraphRecord, RunRecord
from penstock.hosting.settings import HostSettings
from penstock.hosting.work.forking import inputs_of
from penstock.ids import new_run_id
from penstock.kernel.executor import ExecutorRegistry
from penstock.runtime.billing.prices import PriceBook
from penstock.runtime.graphs.graph_plan import GraphPlan

MAX_GRAPHS = 256


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a run of some kind begins with."""

    input: Any = None
    services: Mapping[str, Any] = field(default_factory=dict)
    """Over those of the host."""


class RunKind(Protocol):
    """What is to be done around the runs of one kind; `origin["kind"]` of a run names it."""

    async def prepare(self, run: RunRecord) -> Prepared:
        """What the run begins with; again for each worker that goes on with it."""

    async def again(self, run: RunRecord) -> None:
        """Somebody wants the run to go on after its end, or to take it up in another; Conflict if it cannot begin."""

    async def ended(self, run: RunRecord) -> None:
        """The run is over or parked, as the record says, and its last event is told when this returns.

        A worker that dies here leaves it to the next one: it may be called again with the same.
        """


class SteadyClock:
    """Wall time that nobody can set: the wall clock when it was made, and the time that has passed since.

    Leases are compared between workers. A clock that is set by a day must not make one worker's leases run out, nor
    those of others look as if they had. A machine that was suspended must not go on in the past, where its leases have
    run out when they are written: so the time that it slept counts, if the clock can tell (`passed_ns`).
    """

    def __init__(self, clock: Clock) -> None:
        self._passed_ns: Callable[[], int] = getattr(clock, "passed_ns", clock.monotonic_ns)
        self._offset_ns = clock.time_ns() - self._passed_ns()
        self.monotonic_ns = clock.monotonic_ns

    def time_ns(self) -> int:
        return self._passed_ns() + self._offset_ns


@dataclass(slots=True)
class Workplace:
    """The parts of one host."""

    stores: HostStores
    settings: HostSettings
    executors: ExecutorRegistry
    services: Mapping[str, Any]
    worker: str
    """The name of this host among all that share the stores."""
    clock: Clock
    steady: SteadyClock
    kinds: dict[str, RunKind] = field(default_factory=dict)
    forgetting: dict[str, Callable[[int], Awaitable[object]]] = field(default_factory=dict)
    """What else goes with runs, by whose it is: called with the moment before which those that ended are not kept."""
    counted: Counter[str] = field(default_factory=Counter)
    """What has happened here since the start, for metrics."""

    graphs: dict[tuple[str, int], GraphPlan] = field(default_factory=dict)
    """Graphs that were read lately, by id and version."""
    accounts: dict[str, bool] = field(default_factory=dict)
    """Accounts of days that are there, by their names, or by those of the account above and their own; True for one
    that was opened here lately, with the ceilings of the settings."""
    mark: str = field(default_factory=lambda: new_run_id()[-12:])
    """Tells what this host holds at the ledger from what any other, by whichever name, has held there for a run."""
    prices: PriceBook | None = None
    """What models cost; None is the book that the process shares."""

    def graph_of(self, graph_id: str, version: int) -> GraphPlan | None:
        """The graph of that id and version if it was read lately; what is in a version never changes."""
        return self.graphs.get((graph_id, version))

    async def parsed(self, graph: GraphRecord) -> GraphPlan:
        """The graph behind a record; GraphInvalid if there is none."""
        plan = self.graph_of(graph.id, graph.version)
        if plan is None:
            plan = await GraphPlan.of(graph.document, self.executors)
            if len(self.graphs) >= MAX_GRAPHS:
                self.graphs.clear()
            self.graphs[graph.id, graph.version] = plan
        return plan

    def now_ms(self) -> int:
        """The time that leases are written in."""
        return self.steady.time_ns() // 1_000_000

    def kind_of(self, run: RunRecord) -> RunKind | None:
        """What is to be done around this run; None if nothing is, as around a fork or a replay of another."""
        return self.kinds.get(str(run.origin.get("kind", "run")))

    def count_left(self, before: RunRecord, left: RunRecord) -> None:
        """Count what a run has used since it was claimed and, if it has ended, how, and after how long."""
        counted = self.counted
        counted["cost_nanos"] += max(0, left.cost_nanos - before.cost_nanos)
        counted["tokens_in"] += max(0, left.tokens_in - before.tokens_in)
        counted["tokens_out"] += max(0, left.tokens_out - before.tokens_out)
        counted["unknown_costs"] += max(0, left.unknown_costs - before.unknown_costs)
        counted[left.status] += 1
        if left.status in ENDED:
            ended_ms = left.ended_ms or 0
            counted[f"ended:{left.status}:{left.stop_reason or ''}"] += 1
            counted["took_ms"] += max(0, ended_ms - (left.started_ms or ended_ms))

    async def prepare(self, run: RunRecord) -> Prepared:
        """What the run begins with; a fork or a replay, with what the run had that it takes up."""
        run = _as_taken_up(run)
        kind = self.kind_of(run)
        return Prepared(run.input) if kind is None else await kind.prepare(run)

    async def check_again(self, run: RunRecord) -> None:
        """Conflict if a run that has ended cannot go on, nor be taken up, for what it would begin with is gone."""
        run = _as_taken_up(run)
        kind = self.kind_of(run)
        if kind is not None:
            await kind.again(run)


def _as_taken_up(run: RunRecord) -> RunRecord:
    """A fork or a replay as a run of the kind that it takes up; any other as it is.

    Its kind finds what it was given instead, by the ids of nodes, as `inputs` of the origin.
    """
    taken_up = run.origin.get("of")
    return run._replace(origin={**taken_up, "inputs": inputs_of(run)}) if isinstance(taken_up, Mapping) else run
