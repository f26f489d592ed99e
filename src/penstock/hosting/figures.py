"""Counters of a host by graph and by model, with a bounded number of labels.

Names of graphs and models are chosen by users. The first `MAX_LABELS` names have counters of their own, later ones
share those of `OTHER`, so that no user can make the metrics grow without end. Names are cleaned once, here: two names
that look the same are the same counter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from penstock.hosting.ports import ENDED, RunRecord
from penstock.tracing.record import CallRecord, Settlement

MAX_LABELS = 100
MAX_LABEL = 100
"""Characters of a name that are kept."""
OTHER = "other"


class Figures:
    """Counters by name."""

    def __init__(self, max_labels: int = MAX_LABELS) -> None:
        self._max_labels = max_labels
        self._found: dict[str, Counter[str]] = {}

    def add(self, name: str, counts: Mapping[str, int]) -> None:
        """Add to the counters of a name."""
        cleaned = _cleaned(name)
        known = self._found.get(cleaned)
        if known is None:
            label = cleaned if len(self._found) < self._max_labels else OTHER
            known = self._found.setdefault(label, Counter())
        known.update(counts)

    def items(self) -> Iterator[tuple[str, Mapping[str, int]]]:
        """Yield each name with its counters, in the order of names."""
        yield from sorted(self._found.items())


class RunFigures:
    """What the runs of a host used: by graph when they end or are parked, by model as calls end."""

    def __init__(self) -> None:
        self.by_graph = Figures()
        self.by_model = Figures()

    def take_run(self, before: RunRecord, left: RunRecord) -> None:
        """Add what a run used since it was claimed, and its end."""
        counts = {
            "cost_nanos": max(0, left.cost_nanos - before.cost_nanos),
            "tokens_in": max(0, left.tokens_in - before.tokens_in),
            "tokens_out": max(0, left.tokens_out - before.tokens_out),
        }
        if left.status in ENDED:
            ended_ms = left.ended_ms or 0
            counts["took_ms"] = max(0, ended_ms - (left.started_ms or ended_ms))
            counts[left.status] = 1
        self.by_graph.add(left.graph_id, counts)

    def take_call(self, call: CallRecord) -> None:
        """Add a model call that has ended."""
        counts = {
            "calls": 1,
            "failed": int(call.status != "success"),
            "took_us": max(0, call.ended_ns - call.started_ns) // 1_000,
            "unknown_costs": int(call.cost_unknown),
        }
        figures = {"cost_nanos": call.cost, "tokens_in": call.tokens_in or 0, "tokens_out": call.tokens_out or 0}
        self.by_model.add(call.model or "", counts | figures)

    def take_late(self, late: Settlement) -> None:
        """Add the bill of a call that had ended before."""
        figures = {"cost_nanos": late.cost, "tokens_in": late.tokens_in, "tokens_out": late.tokens_out}
        self.by_model.add(late.call.model or "", figures)


def _cleaned(name: str) -> str:
    """Return a name in characters that every reader shows; what is missing is `unknown`."""
    short = name[:MAX_LABEL]
    if not short.isprintable():
        short = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in short)
    return short or "unknown"
