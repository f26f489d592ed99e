"""Sums over calls: by context, by model, by tool.

A fold over the run's log. `Tallies` reads each entry once, when the sums are read or the entry is about to be dropped,
and counts it where it happened. A parent's figures are summed when they are read, so they always include its
children's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import add

from penstock.money import to_usd
from penstock.tracing.record import NO_EXTRAS, CallRecord, Settlement, Source


@dataclass(frozen=True, slots=True)
class ExecutionStats:
    """Usage of a context, its children included; `own` is the part without them."""

    total_input_tokens: int = 0
    total_output_tokens: int = 0
    total_cost: float = 0.0
    """US dollars, of everything that was billed: successes, failures and halted work. A lower bound if there are
    `unknown_costs`."""
    input_tokens_by_model: Mapping[str, int] = field(default_factory=dict)
    output_tokens_by_model: Mapping[str, int] = field(default_factory=dict)
    cost_by_model: Mapping[str, float] = field(default_factory=dict)
    model_call_count: int = 0
    model_calls_by_model: Mapping[str, int] = field(default_factory=dict)
    tool_call_count: int = 0
    tool_calls_by_name: Mapping[str, int] = field(default_factory=dict)
    cost_by_name: Mapping[str, float] = field(default_factory=dict)
    """By the name of the call, of any kind."""
    cost_by_child: Mapping[str, float] = field(default_factory=dict)
    """By the name of the direct child context."""
    failed_count: int = 0
    halted_count: int = 0
    unknown_costs: int = 0
    """Number of calls that were billed at an unknown cost, which is in no sum."""
    own: ExecutionStats | None = None


Row = list[int]
"""Calls, retries, cost, input tokens, output tokens and calls of unknown cost, of similar calls."""

CALLS, RETRIES, COST, TOKENS_IN, TOKENS_OUT, UNKNOWN = range(6)


class Tally:
    """Running sums: one row for the calls of one kind, status, name and model.

    All other sums are computed from the rows.
    """

    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str, str, str | None], Row] = {}

    def row(self, key: tuple[str, str, str, str | None]) -> Row:
        """Return the row for calls of that kind, status, name and model."""
        row = self.rows.get(key)
        if row is None:
            row = self.rows[key] = [0, 0, 0, 0, 0, 0]
        return row

    def include(self, other: Tally) -> None:
        """Add all counts of another tally."""
        for key, row in other.rows.items():
            mine = self.rows.get(key)
            self.rows[key] = row.copy() if mine is None else list(map(add, mine, row))

    def sum(self, figure: int, kind: str | None = None, status: str | None = None) -> int:
        """Sum one figure over the calls of that kind with that status; None means any."""
        return sum(row[figure] for (k, s, _, _), row in self.rows.items() if kind in (None, k) and status in (None, s))

    def by_model(self, figure: int, kind: str | None = None) -> dict[str, int]:
        """Return one figure by model, where it is not zero."""
        return self._by(
            (model or "unknown", row[figure]) for (k, _, _, model), row in self.rows.items() if kind in (None, k)
        )

    def by_name(self, figure: int, kind: str | None = None) -> dict[str, int]:
        """Return one figure by the name of the call, where it is not zero."""
        return self._by((name, row[figure]) for (k, _, name, _), row in self.rows.items() if kind in (None, k))

    @staticmethod
    def _by(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
        sums: dict[str, int] = {}
        for name, figure in pairs:
            if figure:
                sums[name] = sums.get(name, 0) + figure
        return sums

    def stats(
        self, own: ExecutionStats | None = None, cost_by_child: Mapping[str, int] | None = None
    ) -> ExecutionStats:
        """Return these sums as ExecutionStats."""
        return ExecutionStats(
            total_input_tokens=self.sum(TOKENS_IN),
            total_output_tokens=self.sum(TOKENS_OUT),
            total_cost=to_usd(self.sum(COST)),
            input_tokens_by_model=self.by_model(TOKENS_IN),
            output_tokens_by_model=self.by_model(TOKENS_OUT),
            cost_by_model=_in_usd(self.by_model(COST, "llm")),
            model_call_count=self.sum(CALLS, "llm"),
            model_calls_by_model=self.by_model(CALLS, "llm"),
            tool_call_count=self.sum(CALLS, "tool"),
            tool_calls_by_name=self.by_name(CALLS, "tool"),
            cost_by_name=_in_usd(self.by_name(COST)),
            cost_by_child=_in_usd(cost_by_child or {}),
            failed_count=self.sum(CALLS, status="fail"),
            halted_count=self.sum(CALLS, status="halt"),
            unknown_costs=self.sum(UNKNOWN),
            own=own,
        )


def _in_usd(costs: Mapping[str, int]) -> dict[str, float]:
    return {name: to_usd(cost) for name, cost in costs.items()}


class Tallies:
    """The sums of every context of a run. Each call is counted once, where it happened; totals are computed when they
    are read.
    """

    __slots__ = ("own", "run")

    def __init__(self) -> None:
        self.own: dict[Source, Tally] = {}
        self.run = Tally()
        """The sums of the whole run by kind and status alone: a few rows, cheap to copy."""

    def absorb(self, entries: Iterable[object], first_seq: int) -> None:
        """Count entries of the log, beginning at that seq; entries without figures are skipped."""
        like: CallRecord | None = None
        row: Row = []
        total: Row = []
        for seq, entry in enumerate(entries, first_seq):
            if type(entry) is CallRecord:
                if entry.end_seq == seq:
                    if like is None or not _are_alike(entry, like):  # most entries stand beside their like
                        if like is None or entry.status is not like.status or entry.kind is not like.kind:
                            total = self._total_row(entry)
                        like, row = entry, self._row(entry)
                    row[CALLS] += 1
                    total[CALLS] += 1
                    if entry.cost:
                        row[COST] += entry.cost
                        total[COST] += entry.cost
                    if entry.tokens_in:
                        row[TOKENS_IN] += entry.tokens_in
                        total[TOKENS_IN] += entry.tokens_in
                    if entry.tokens_out:
                        row[TOKENS_OUT] += entry.tokens_out
                        total[TOKENS_OUT] += entry.tokens_out
                    if entry.extras is not NO_EXTRAS:
                        row[RETRIES] += entry.extras.retries
                        total[RETRIES] += entry.extras.retries
                        row[UNKNOWN] += entry.extras.cost_unknown
                        total[UNKNOWN] += entry.extras.cost_unknown
            elif type(entry) is Settlement:
                for late in (self._row(entry.call), self._total_row(entry.call)):
                    late[COST] += entry.cost
                    late[TOKENS_IN] += entry.tokens_in
                    late[TOKENS_OUT] += entry.tokens_out
                    late[UNKNOWN] -= entry.call.cost_unknown and entry.cost > 0

    def plus(self, more: Tallies) -> Tallies:
        """Return the sums of both; neither is changed."""
        if not self.own:
            return more
        total = Tallies()
        total.own = {**self.own, **more.own}
        total.run.include(self.run)
        total.run.include(more.run)
        for source in self.own.keys() & more.own.keys():
            total.own[source] = tally = Tally()
            tally.include(self.own[source])
            tally.include(more.own[source])
        return total

    def of(self, source: Source) -> ExecutionStats:
        """Return the usage of `source`, its children included, with its own part separately."""
        own = self.own.get(source) or Tally()
        total, cost_by_child = self._total(source)
        return total.stats(own.stats(), cost_by_child)

    def _row(self, call: CallRecord) -> Row:
        tally = self.own.get(call.source)
        if tally is None:
            tally = self.own[call.source] = Tally()
        return tally.row((call.kind, call.status, call.name, call.model))

    def _total_row(self, call: CallRecord) -> Row:
        return self.run.row((call.kind, call.status, "", None))

    def _total(self, source: Source) -> tuple[Tally, dict[str, int]]:
        """Return the sums of `source` and everything below it, and the cost of each of its direct children."""
        total, cost_by_child = Tally(), dict[str, int]()
        for place, tally in self.own.items():
            child: Source | None = None
            above: Source | None = place
            while above is not None and above is not source:
                child, above = above, above.parent
            if above is None:
                continue
            total.include(tally)
            if child is not None and (cost := tally.sum(COST)):
                cost_by_child[child.name] = cost_by_child.get(child.name, 0) + cost
        return total, cost_by_child


def _are_alike(one: CallRecord, other: CallRecord) -> bool:
    """Whether two finished calls are certainly counted in the same row."""
    return (
        one.name is other.name
        and one.source is other.source
        and one.status is other.status
        and one.model is other.model
        and one.kind is other.kind
    )
