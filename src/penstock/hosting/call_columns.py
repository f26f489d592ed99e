"""The call tree of a run as columns: folded from its events, compact enough to open a run of many thousand calls.

Each row is a call, in the order of their starts. Texts are stored once and referred to by their index; times are
relative to the first event of the epoch. The fold can be continued with later events. Calls of an earlier epoch are
dropped when another worker continues the run: it emits the results found in the journal again, with `replayed`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from penstock.hosting.ports import HostedEvent
from penstock.money import to_nanos

T = TypeVar("T")

KINDS = ("system", "llm", "tool")
STATUSES = ("running", "waiting", "success", "fail", "halt")
REPLAYED, ABANDONED, COST_UNKNOWN, WAITED = 1, 2, 4, 8
"""Bits of the column `flags`."""
MAX_TREE_CALLS = 100_000
"""Maximum number of calls in a tree; later ones are only counted."""

TYPES = (
    *("call.started", "call.ended", "call.waiting", "call.settled"),
    *("bill.resolved", "run.started", "run.resumed"),
)
"""Types of the events from which the columns are folded."""
COLUMNS = (
    *("call", "parent", "kind", "name", "node", "node_type", "model", "start_ms", "end_ms", "status"),
    *("cost_nanos", "tokens_in", "tokens_out", "attempt", "stop", "flags"),
)
TEXTS = ("name", "node", "node_type", "model")
"""Columns whose values are indexes of texts."""
NONE = -1
"""Stands for no parent, node, model, stop or end."""


class CallColumns:
    """The calls of the newest epoch of a run, up to the event `last_seq`."""

    def __init__(self) -> None:
        self.last_seq = 0
        self.epoch = 0
        self._reset(0)

    def _reset(self, base_ms: int) -> None:
        self.base_ms = base_ms
        self.columns: dict[str, array[int]] = {name: array("q") for name in COLUMNS}
        self._appends = [column.append for column in self.columns.values()]
        self.strings: list[str] = []
        self.stops: list[Mapping[str, Any]] = []
        self.left_out = 0
        """Number of calls beyond `MAX_TREE_CALLS`."""
        self._texts: dict[str, int] = {}
        self._rows: dict[str, int] = {}
        """Row of each call, by its id."""

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, events: Iterable[HostedEvent]) -> None:
        """Continue the fold with the next events; those of other types than `TYPES` change nothing."""
        for event in events:
            self.last_seq = event.seq
            if event.type == "call.started":
                self._start(event)
            elif event.type == "call.ended":
                self._end(event)
            elif event.type == "call.waiting":
                self._wait(event)
            elif event.type == "call.settled":
                self._settle(event.data)
            elif event.type == "bill.resolved":
                self._settle_bill(event.data)
            elif event.type in ("run.started", "run.resumed"):
                self.epoch = int(event.data.get("epoch", 1))
                self._reset(event.at_ms)

    def end_of(self, call_id: str) -> int | None:
        """Return when a call ended, in milliseconds since 1970, or began if it runs; None if it is not in the tree."""
        row = self._rows.get(call_id)
        if row is None:
            return None
        end_ms = self.columns["end_ms"][row]
        return self.base_ms + (self.columns["start_ms"][row] if end_ms == NONE else end_ms)

    def part(self, under: str | None = None, depth: int | None = None) -> dict[str, Any]:
        """Return a part of the columns as JSON data: the call `under` and its descendants, `depth` levels deep.

        Without `under`, the part begins at the outermost calls. `calls` also counts the calls that are too deep. Raises
        KeyError for a call that is not in the tree.
        """
        top = NONE if under is None else self._rows[under]
        parents, levels = self.columns["parent"], list[int]()
        for row, parent in enumerate(parents):
            above = NONE if parent == NONE else levels[parent]
            is_top = parent == NONE if under is None else row == top
            levels.append(0 if is_top else NONE if above == NONE else above + 1)
        rows = [row for row, level in enumerate(levels) if level != NONE and (depth is None or level <= depth)]
        place = {row: at for at, row in enumerate(rows)}
        columns = {name: [values[row] for row in rows] for name, values in self.columns.items()}
        columns["parent"] = [place.get(parent, NONE) for parent in columns["parent"]]
        strings = _used(columns, TEXTS, self.strings)
        stops = _used(columns, ("stop",), self.stops)
        calls = sum(level != NONE for level in levels) + (self.left_out if under is None else 0)
        facts = {"calls": calls, "truncated": len(rows) < calls or bool(self.left_out), "columns": columns}
        return {**self.to_dict(), **facts, "strings": strings, "stops": [dict(stop) for stop in stops]}

    def to_dict(self) -> dict[str, Any]:
        """Return the columns as JSON data."""
        return {
            "epoch": self.epoch,
            "last_seq": self.last_seq,
            "base_ms": self.base_ms,
            "calls": len(self._rows) + self.left_out,
            "truncated": bool(self.left_out),
            "kinds": list(KINDS),
            "statuses": list(STATUSES),
            "strings": list(self.strings),
            "stops": [dict(stop) for stop in self.stops],
            "columns": {name: values.tolist() for name, values in self.columns.items()},
        }

    def _start(self, event: HostedEvent) -> None:
        row = self._row(event, "running")
        if row is None:
            return
        data, columns = event.data, self.columns
        columns["status"][row] = STATUSES.index("running")
        columns["start_ms"][row] = event.at_ms - self.base_ms
        columns["attempt"][row] = data.get("attempt", 1)
        columns["node_type"][row] = self._text(data.get("node_type"))

    def _wait(self, event: HostedEvent) -> None:
        row = self._row(event, "waiting")
        if row is not None:
            self.columns["flags"][row] |= WAITED

    def _end(self, event: HostedEvent) -> None:
        row = self._row(event, "running")  # a call that was refused while it waited has no start
        if row is None:
            return
        data, columns = event.data, self.columns
        columns["end_ms"][row] = event.at_ms - self.base_ms
        columns["status"][row] = STATUSES.index(data["status"])
        columns["cost_nanos"][row] += to_nanos(data["cost_usd"] or 0)
        columns["tokens_in"][row] += data["tokens_in"]
        columns["tokens_out"][row] += data["tokens_out"]
        columns["model"][row] = self._text(data.get("model"))
        if data["cost_usd"] is None:
            columns["flags"][row] |= COST_UNKNOWN
        if data.get("abandoned"):
            columns["flags"][row] |= ABANDONED
        if (stop := data.get("stop")) is not None:
            columns["stop"][row] = len(self.stops)
            self.stops.append(stop)

    def _settle_bill(self, data: Mapping[str, Any]) -> None:
        """Add a bill that a person has resolved; its id, such as `1-534fa4e1e110/n000004`, names epoch and call."""
        claim, _, call = str(data["call_id"]).partition("/")
        if claim.partition("-")[0] == str(self.epoch):
            self._settle({**data, "call_id": call.partition("/")[0]})

    def _settle(self, data: Mapping[str, Any]) -> None:
        row = self._rows.get(data["call_id"])
        if row is not None:
            self.columns["cost_nanos"][row] += to_nanos(data["cost_usd"])
            self.columns["tokens_in"][row] += data["tokens_in"]
            self.columns["tokens_out"][row] += data["tokens_out"]

    def _row(self, event: HostedEvent, status: str) -> int | None:
        """Return the row of the event's call, added if it is new; None if there is no room for it."""
        data, id = event.data, event.data["call_id"]
        row = self._rows.get(id)
        if row is not None:
            return row
        if len(self._rows) >= MAX_TREE_CALLS:
            self.left_out += event.type != "call.ended"
            return None
        row = self._rows[id] = len(self._rows)
        values = (
            int(str(id).lstrip("n")),
            self._rows.get(data["parent_id"], NONE),
            KINDS.index(data["kind"]),
            self._text(data["name"]),
            self._text(data.get("node_id")),
            self._text(data.get("node_type")),
            self._text(data.get("model")),
            event.at_ms - self.base_ms,
            NONE,
            STATUSES.index(status),
            *(0, 0, 0),
            data.get("attempt", 1),
            NONE,
            REPLAYED if data.get("replayed") else 0,
        )
        for append, value in zip(self._appends, values, strict=True):
            append(value)
        return row

    def _text(self, text: str | None) -> int:
        if text is None:
            return NONE
        index = self._texts.get(text)
        if index is None:
            index = self._texts[text] = len(self.strings)
            self.strings.append(text)
        return index


def _used(columns: dict[str, list[int]], names: Sequence[str], values: Sequence[T]) -> list[T]:
    """Return the values that these columns refer to, and renumber the columns to match."""
    used = sorted({index for name in names for index in columns[name]} - {NONE})
    place = {index: at for at, index in enumerate(used)}
    for name in names:
        columns[name] = [place.get(index, NONE) for index in columns[name]]
    return [values[index] for index in used]
