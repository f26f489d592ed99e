"""What a run used, by node and model: counted while it runs, and from its events for the claims before.

A call counts at the node of the graph that it belongs to, however deep inside the node it was made, so that a run has
few shares. Results found in the journal were paid for earlier and do not count again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.hosting.event_data import BILL_RESOLVED
from penstock.hosting.ports import MAX_SHARES, CostShare, HostedEvent
from penstock.money import to_nanos
from penstock.tracing.record import CallRecord, Settlement

MAX_LABEL = 200
"""Maximum length of the name of a node or a model."""


class SpendingTally:
    """Adds up what the calls of one run used."""

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
        """Add what stored events say: of an earlier claim, or of bills that were resolved."""
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
                return  # stored with what is known of the run as a whole
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
    if text.isascii() and len(text) <= MAX_LABEL and "\0" not in text:
        return text
    return text[:MAX_LABEL].replace("\0", "\ufffd").encode("utf-8", "replace").decode()
