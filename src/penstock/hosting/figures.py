"""The usage of runs: of one run by node and model, for the store; of a host's runs by graph and model, for metrics.

Both count while a run works; the shares of a run also count its events of earlier claims. A call counts at the node of
the graph that it belongs to, however deep inside the node it was made, so that a run has few shares. Results found in
the journal were paid for earlier and do not count again.

Names of graphs and models are chosen by users. The first `MAX_LABELS` names have counters of their own, later ones
share those of `OTHER`, so that no user can make the metrics grow without end. Names are cleaned once, here: two names
that look the same are the same counter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from penstock.hosting.event_data import BILL_RESOLVED
from penstock.hosting.ports import ENDED, MAX_SHARES, CostShare, HostedEvent, RunRecord
from penstock.money import to_nanos
from penstock.tracing.record import CallRecord, Settlement

MAX_NAME = 200
"""Maximum length of the name of a node or a model."""


class SpendingTally:
    """Adds up the usage of the calls of one run."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], list[int]] = {}

    def take(self, node_id: str | None, call: CallRecord) -> None:
        """Add a call that has ended."""
        is_model = call.kind == "llm"
        if is_model or call.cost or call.cost_unknown:
            figures = call.cost, call.tokens_in or 0, call.tokens_out or 0, int(call.cost_unknown)
            self._add(node_id, call.model, int(is_model), *figures)

    def take_late(self, node_id: str | None, late: Settlement) -> None:
        """Add the bill of a call that had ended before."""
        self._add(node_id, late.call.model, 0, late.cost, late.tokens_in, late.tokens_out, 0)

    def take_events(self, events: Iterable[HostedEvent]) -> None:
        """Add the usage in stored events, of an earlier claim or of resolved bills."""
        for event in events:
            data = event.data
            if event.type == "call.ended" and not data.get("replayed"):
                self._take_ended(data)
            elif event.type in ("call.settled", BILL_RESOLVED):
                self._add(data.get("node_id"), data.get("model"), 0, *_figures(data), 0)

    def shares(self) -> list[CostShare]:
        """Return the shares so far."""
        return [CostShare(*key, *figures) for key, figures in self._found.items()]

    def _take_ended(self, data: Mapping[str, Any]) -> None:
        is_model, is_unknown = data.get("kind") == "llm", data.get("cost_usd") is None
        if is_model or is_unknown or data["cost_usd"]:
            self._add(data.get("node_id"), data.get("model"), int(is_model), *_figures(data), int(is_unknown))

    def _add(self, node_id: str | None, model: str | None, *figures: int) -> None:
        key = outer_node(node_id), label(model)
        known = self._found.get(key)
        if known is None:
            if len(self._found) >= MAX_SHARES - 1:
                return  # stored with the usage of the run as a whole
            known = self._found[key] = [0, 0, 0, 0, 0]
        for at, figure in enumerate(figures):
            known[at] += figure


def _figures(data: Mapping[str, Any]) -> tuple[int, int, int]:
    return to_nanos(data.get("cost_usd") or 0), data.get("tokens_in") or 0, data.get("tokens_out") or 0


def outer_node(node_id: str | None) -> str:
    """Return the node of the graph that a path of nodes begins with; empty for calls outside of nodes."""
    return label((node_id or "").partition("/")[0])


def label(text: str | None) -> str:
    """Return a name that every store accepts as a name; empty for None."""
    text = text or ""
    if text.isascii() and len(text) <= MAX_NAME and "\0" not in text:
        return text
    return text[:MAX_NAME].replace("\0", "\ufffd").encode("utf-8", "replace").decode()


MAX_LABELS = 100
MAX_LABEL = 100
"""Maximum length of a name; longer names are cut."""
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
    """The usage of a host's runs: by graph when they end or are parked, by model as calls end."""

    def __init__(self) -> None:
        self.by_graph = Figures()
        self.by_model = Figures()

    def take_run(self, before: RunRecord, left: RunRecord) -> None:
        """Add the usage of a run since it was claimed, and its end."""
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
    """Return a name in printable characters; an empty one becomes `unknown`."""
    short = name[:MAX_LABEL]
    if not short.isprintable():
        short = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in short)
    return short or "unknown"
