"""Sums over what happened: by context, by model, by tool.

A fold over the run's log. `Tallies` reads each entry once, when somebody asks; a call counts for the context it
happened in and for every context above it at the same time, so that a parent's figures are never behind its children's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.money import to_usd
from penstock.tracing.record import CallRecord, Settlement, Source


@dataclass(frozen=True, slots=True)
class ExecutionStats:
    """What a context used, its children included; `own` is the part without them."""

    total_input_tokens: int = 0
    total_output_tokens: int = 0
    total_cost: float = 0.0
    """US dollars, of everything that was billed: successes, failures and halted work."""
    input_tokens_by_model: Mapping[str, int] = field(default_factory=dict)
    output_tokens_by_model: Mapping[str, int] = field(default_factory=dict)
    cost_by_model: Mapping[str, float] = field(default_factory=dict)
    model_call_count: int = 0
    model_calls_by_model: Mapping[str, int] = field(default_factory=dict)
    tool_call_count: int = 0
    tool_calls_by_name: Mapping[str, int] = field(default_factory=dict)
    cost_by_name: Mapping[str, float] = field(default_factory=dict)
    """By the name of the call, whatever its kind."""
    cost_by_child: Mapping[str, float] = field(default_factory=dict)
    """By the name of the direct child context it happened in."""
    failed_count: int = 0
    halted_count: int = 0
    own: ExecutionStats | None = None


class Tally:
    """Running sums of one context; counts every call that ended, by how it ended."""

    __slots__ = (
        "calls",
        "cost",
        "cost_by_child",
        "cost_by_model",
        "cost_by_name",
        "cost_by_status",
        "input_by_model",
        "llm_calls_by_model",
        "output_by_model",
        "retries",
        "tokens_by_status",
        "tokens_in",
        "tokens_out",
        "tools_by_name",
    )

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.cost = 0
        self.cost_by_status: Counter[str] = Counter()
        self.tokens_in = 0
        self.tokens_out = 0
        self.tokens_by_status: Counter[tuple[str, str]] = Counter()
        self.retries = 0
        self.cost_by_model: Counter[str] = Counter()
        self.cost_by_name: Counter[str] = Counter()
        self.cost_by_child: Counter[str] = Counter()
        self.input_by_model: Counter[str] = Counter()
        self.output_by_model: Counter[str] = Counter()
        self.llm_calls_by_model: Counter[str] = Counter()
        self.tools_by_name: Counter[str] = Counter()

    def add_call(self, call: CallRecord, child: str | None) -> None:
        """Count a call that ended, with what it cost by then."""
        self.calls[call.kind, call.status] += 1
        self.retries += call.retries
        if call.kind == "llm":
            self.llm_calls_by_model[call.model or "unknown"] += 1
        elif call.kind == "tool":
            self.tools_by_name[call.name] += 1
        self.add_bill(call, call.cost, call.tokens_in or 0, call.tokens_out or 0, child)

    def add_bill(self, call: CallRecord, cost: int, tokens_in: int, tokens_out: int, child: str | None) -> None:
        """Count what a call cost."""
        if cost:
            self.cost += cost
            self.cost_by_status[call.status] += cost
            self.cost_by_name[call.name] += cost
            if call.kind == "llm":
                self.cost_by_model[call.model or "unknown"] += cost
            if child is not None:
                self.cost_by_child[child] += cost
        if tokens_in or tokens_out:
            self.tokens_in += tokens_in
            self.tokens_out += tokens_out
            self.tokens_by_status[call.status, "in"] += tokens_in
            self.tokens_by_status[call.status, "out"] += tokens_out
            self.input_by_model[call.model or "unknown"] += tokens_in
            self.output_by_model[call.model or "unknown"] += tokens_out

    def count(self, kind: str | None = None, status: str | None = None) -> int:
        """How many calls of that kind ended in that status; None is any."""
        return sum(n for (k, s), n in self.calls.items() if kind in (None, k) and status in (None, s))

    def stats(self, own: ExecutionStats | None = None) -> ExecutionStats:
        """These sums as people read them."""
        return ExecutionStats(
            total_input_tokens=self.tokens_in,
            total_output_tokens=self.tokens_out,
            total_cost=to_usd(self.cost),
            input_tokens_by_model=dict(self.input_by_model),
            output_tokens_by_model=dict(self.output_by_model),
            cost_by_model={model: to_usd(cost) for model, cost in self.cost_by_model.items()},
            model_call_count=self.count("llm"),
            model_calls_by_model=dict(self.llm_calls_by_model),
            tool_call_count=self.count("tool"),
            tool_calls_by_name=dict(self.tools_by_name),
            cost_by_name={name: to_usd(cost) for name, cost in self.cost_by_name.items()},
            cost_by_child={name: to_usd(cost) for name, cost in self.cost_by_child.items()},
            failed_count=self.count(status="fail"),
            halted_count=self.count(status="halt"),
            own=own,
        )


AddToTally = Callable[[Tally, str | None], None]


class Tallies:
    """The sums of every context of a run."""

    def __init__(self) -> None:
        self.total: dict[Source, Tally] = {}
        self.own: dict[Source, Tally] = {}

    def absorb(self, entry: object, seq: int) -> None:
        """Count one entry of the log; entries that carry no figures are passed over."""
        if isinstance(entry, CallRecord):
            if entry.end_seq == seq:
                self._each(entry, lambda tally, child: tally.add_call(entry, child))
        elif isinstance(entry, Settlement):
            call, late = entry.call, entry
            self._each(
                call, lambda tally, child: tally.add_bill(call, late.cost, late.tokens_in, late.tokens_out, child)
            )

    def of(self, source: Source) -> ExecutionStats:
        """What `source` used, its children included, with its own part apart."""
        own = self.own.get(source) or Tally()
        return (self.total.get(source) or Tally()).stats(own.stats())

    def tally(self, source: Source) -> Tally:
        """The running sums of `source`, its children included."""
        return self.total.get(source) or Tally()

    def _each(self, call: CallRecord, add: AddToTally) -> None:
        source: Source | None = call.source
        own = self.own.get(call.source)
        if own is None:
            own = self.own[call.source] = Tally()
        add(own, None)
        child: str | None = None
        while source is not None:
            total = self.total.get(source)
            if total is None:
                total = self.total[source] = Tally()
            add(total, child)
            child = source.name
            source = source.parent
