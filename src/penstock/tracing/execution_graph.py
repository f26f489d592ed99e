"""The call tree of one run, and the log behind it.

`ExecutionGraph` is the recorder: every call is a node under the call that made it, every change is an entry of one
log, and an entry's place in the log is its `seq`. It knows nothing of limits or of how calls run.

Locking. Writers hold `lock` for as long as it takes to write one entry. Readers hold it only to copy references out
of the log, and do their folding, formatting and copying afterwards; `record` explains why that is safe. So a snapshot
of any size keeps writers waiting for microseconds. The runtime shares one lock between this log and the ledger, takes
it once when a call begins and once when it ends, and uses `begin` and `end` directly; all other code uses the marking
methods.

Memory. With `max_kept` set, the oldest finished calls are folded into the nearest ancestor that is kept, and log
entries beyond a multiple of it are dropped from the front, after they have been counted.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from operator import add
from typing import Any

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import InvalidValue, RunEnded
from penstock.ids import call_number, new_run_id
from penstock.money import Usd, to_nanos
from penstock.tracing import views
from penstock.tracing.events import TraceEvent
from penstock.tracing.graph_state import Captured, Counted, GraphState, by_number
from penstock.tracing.lifecycle import KINDS, TRANSITIONS, CallKind, Status
from penstock.tracing.record import (
    NO_EXTRAS,
    ONLY_COST_UNKNOWN,
    OPEN,
    CallExtras,
    CallRecord,
    IterationMark,
    RunMark,
    Settlement,
    Source,
    count_retry,
)
from penstock.tracing.stats import ExecutionStats, Tallies, Tally
from penstock.tracing.views import Entry

NOTHING_COUNTED = Counted(0, Tally())
ONLY_CREATED = CallExtras(running=False)
ONLY_WAITING = CallExtras(running=False, waiting=True)
EVENTS_PER_CALL_KEPT = 4
TRIM_CHUNK = 1_024
FOLD_CHUNK = 256
"""Maximum number of calls folded while writers wait."""
MAX_TOKENS = 1 << 53
"""The largest count that every reader of JSON keeps exactly; more is a mistake."""


class ExecutionGraph:
    """Every call of one run as a tree, with its log; safe to write and read from any thread."""

    __slots__ = (
        "__weakref__",
        "_closed",
        "_counted",
        "_ended",
        "_first_seq",
        "_fold_lock",
        "_index",
        "_last_number",
        "_log",
        "_open",
        "_source",
        "_tallies",
        "chain_id",
        "clock",
        "folded",
        "lock",
        "max_depth",
        "max_kept",
        "notify",
        "root",
        "wall_offset_ns",
    )

    def __init__(
        self,
        chain_id: str | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        lock: threading.RLock | None = None,
        source: Source | None = None,
        max_kept: int | None = None,
    ) -> None:
        if max_kept is not None and not (_is_whole(max_kept) and max_kept >= 1):
            raise InvalidValue("max_kept", max_kept, "a whole number of calls to keep, or None to keep all")
        self.chain_id = chain_id or new_run_id()
        self.clock = clock
        self.lock = lock or threading.RLock()
        self.wall_offset_ns = clock.time_ns() - clock.monotonic_ns()
        """Added to a monotonic reading it gives the wall time: a jump of the wall clock cannot reorder a run."""
        self.root: CallRecord | None = None
        self.max_depth = 0
        self.max_kept = max_kept
        self.folded: dict[int, views.Folded] = {}
        """What was folded into a kept call, by the number of that call."""
        self._source = source or Source("main")
        self._log: list[Entry] = []
        self._first_seq = 1
        self._open: dict[int, CallRecord] = {}
        """The calls under way by their number, in the order they began."""
        self._ended: list[CallRecord] | deque[CallRecord] = []
        """The finished calls that are kept, in the order they ended."""
        self._index: dict[int, CallRecord] | None = None
        """See `_ended_by_number`; None until a finished call is looked up."""
        self._last_number = 0
        self._closed = False
        self._fold_lock = threading.RLock()
        """Held while entries are counted. It knows its owner: a finalizer that ends a call may run meanwhile."""
        self._tallies: Tallies | None = None
        """Created on first use."""
        self._counted = NOTHING_COUNTED
        """The sums of what has been counted; replaced, never changed."""
        self.notify: Callable[[], None] | None = None
        """Called, under the lock, after an entry was written; must return at once."""

    # Writing, for callers that hold the lock.

    def begin(
        self,
        parent: CallRecord | None,
        kind: CallKind,
        name: str,
        model: str | None,
        source: Source,
        now_ns: int,
        running: bool | None = True,
        metadata: Mapping[str, Any] | None = None,
        owner: object = None,
    ) -> CallRecord:
        """Write the beginning of a call: running, or only created. The caller holds the lock.

        With None it is created and has to wait: `start` writes its beginning later. As with `end`, an exception from a
        signal handler leaves all of it written, or nothing.
        """
        if self._closed:
            raise RunEnded(self.chain_id, f"{kind} call {name!r} came after its end")
        number = self._last_number + 1
        log = self._log
        # Field by field: an `__init__` would take longer than all of them.
        call = CallRecord()
        call.number = number
        call.parent = parent
        call.depth = depth = 0 if parent is None else parent.depth + 1
        if depth > self.max_depth:
            self.max_depth = depth
        call.kind = kind
        call.name = name
        call.model = model
        call.source = source
        call.iteration = source.iteration
        call.started_ns = now_ns
        call.metadata = metadata
        call.owner = owner
        call.extras = NO_EXTRAS if running else ONLY_WAITING if running is None else ONLY_CREATED
        call.end_seq = OPEN
        try:
            if running is not None:
                log.append(call)
            self._open[number] = call
            self._last_number = number
        except BaseException:
            if running is None or (log and log[-1] is call):
                self._open[number] = call
                self._last_number = number
            raise
        if self.notify is not None:
            self.notify()
        return call

    def start(self, call: CallRecord, now_ns: int, metadata: Mapping[str, Any] | None) -> None:
        """Write the beginning of a call that has waited. The caller holds the lock."""
        if call.running:
            return
        call.started_ns = now_ns
        call.metadata = metadata
        try:
            self._log.append(call)
            call.extras = call.extras._replace(running=True, waiting=False)
        except BaseException:
            if self._log[-1] is call:
                call.extras = call.extras._replace(running=True, waiting=False)
            raise
        if self.notify is not None:
            self.notify()

    def end(
        self,
        call: CallRecord,
        now_ns: int,
        status: Status,
        cost: int = 0,
        tokens_in: int | None = None,
        tokens_out: int | None = None,
        stop_reason: str | None = None,
        error_class: str | None = None,
        abandoned: bool = False,
    ) -> bool:
        """Write the end of a call; return False, and write nothing, if it had ended. The caller holds the lock."""
        open_calls, log = self._open, self._log
        number = call.number
        if number not in open_calls:
            return False
        call.status = status
        call.ended_ns = now_ns
        call.cost = cost
        call.tokens_in = tokens_in
        call.tokens_out = tokens_out
        if stop_reason is not None or error_class is not None or abandoned:
            call.extras = call.extras._replace(stop_reason=stop_reason, error_class=error_class, abandoned=abandoned)
        ended, max_kept = self._ended, self.max_kept
        end_seq = self._first_seq + len(log)
        try:
            call.end_seq = end_seq
            log.append(call)
            ended.append(call)
            del open_calls[number]
        except BaseException:
            call.end_seq = end_seq
            if self._first_seq + len(log) == end_seq:
                log.append(call)
            if not ended or ended[-1] is not call:
                ended.append(call)
            open_calls.pop(number, None)
            raise
        if max_kept is not None and self._last_number > max_kept and len(ended) + len(open_calls) > max_kept:
            self._fold_oldest(max_kept)
            self._trim_excess(max_kept)
        if self.notify is not None:
            self.notify()
        return True

    def settle_late(self, call: CallRecord, now_ns: int, cost: int, tokens_in: int, tokens_out: int) -> None:
        """Write the bill of a call that ended before its bill was known. The caller holds the lock."""
        if self._closed or call.settled is not None:
            return
        late = Settlement(call, self.seq + 1, now_ns, cost, tokens_in, tokens_out)
        settled, folded = call.extras._replace(settled=late), self.folded
        if call.folded_from is not None and (above := self._kept_above(call)) is not None:
            folded = {**folded, above.number: views.fold_late(folded.get(above.number), late)}
        try:
            self._log.append(late)
            self.folded = folded
            call.extras = settled
        except BaseException:
            if self._log[-1] is late:
                self.folded, call.extras = folded, settled
            raise
        if self.max_kept is not None:
            self._trim_excess(self.max_kept)
        if self.notify is not None:
            self.notify()

    def append(self, event: TraceEvent | IterationMark | RunMark) -> None:
        """Write an event whose `seq` is `self.seq + 1`, unless it is the newest one. The caller holds the lock."""
        log, max_kept = self._log, self.max_kept
        if log and log[-1] is event:  # a handler finishes what was interrupted
            return
        log.append(event)
        if max_kept is not None and len(log) > max_kept * EVENTS_PER_CALL_KEPT:
            self._trim_excess(max_kept)
        if self.notify is not None:
            self.notify()

    def close(self, event: TraceEvent) -> None:
        """Write the run's last event; nothing is accepted after it. The caller holds the lock."""
        self.append(event)
        self._closed = True

    @property
    def seq(self) -> int:
        """The seq of the newest entry."""
        return self._first_seq + len(self._log) - 1

    @property
    def closed(self) -> bool:
        """Whether the run has ended."""
        return self._closed

    def open_calls(self) -> list[CallRecord]:
        """The open calls, newest first. The caller holds the lock."""
        return list(reversed(self._open.values()))

    # Writing, for all other callers.

    def create_root(self, name: str, metadata: Mapping[str, Any] | None = None) -> str:
        """Create the root, a running system call at depth 0; raises RuntimeError if there is one."""
        _check_text("name", name)
        with self.lock:
            if self.root is not None:
                raise RuntimeError(f"run {self.chain_id} has its root already: {self.root.node_id}")
            now_ns = self.clock.monotonic_ns()
            self.root = self.begin(None, "system", name, None, self._source, now_ns, True, _copied(metadata))
            return self.root.node_id

    def begin_node(
        self,
        parent_id: str,
        kind: CallKind,
        name: str,
        model: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> str:
        """Create a call below `parent_id`, in status created; raises KeyError if there is no such call."""
        if kind not in tuple(KINDS):  # `in` works on a tuple for what has no hash
            raise InvalidValue("kind", kind, "llm, tool or system")
        _check_text("name", name)
        _check_text_or_none("model", model)
        now_ns = self.clock.monotonic_ns()
        with self.lock:
            parent = self._call(parent_id)
            call = self.begin(parent, kind, name, model, parent.source, now_ns, False, _copied(metadata))
            return call.node_id

    def mark_running(self, node_id: str) -> None:
        """created → running; no effect on a call that is running or has ended."""
        with self.lock:
            if (call := self._open_call(node_id)) is not None:
                call.extras = call.extras._replace(running=True)

    def mark_success(
        self, node_id: str, cost_usd: Usd = 0.0, tokens_in: int | None = None, tokens_out: int | None = None
    ) -> None:
        """running → success. On a call that is only created, it passes through running."""
        self._mark(node_id, "success", cost_usd, tokens_in, tokens_out)

    def mark_failure(
        self,
        node_id: str,
        error_class: str,
        stop_reason: str | None = None,
        *,
        cost_usd: Usd = 0.0,
        tokens_in: int | None = None,
        tokens_out: int | None = None,
    ) -> None:
        """→ fail, with what the failure cost."""
        _check_text("error_class", error_class)
        self._mark(node_id, "fail", cost_usd, tokens_in, tokens_out, stop_reason, error_class)

    def mark_halt(
        self,
        node_id: str,
        stop_reason: str | None = None,
        *,
        cost_usd: Usd = 0.0,
        tokens_in: int | None = None,
        tokens_out: int | None = None,
    ) -> None:
        """→ halt: stopped by a policy, not by an error."""
        self._mark(node_id, "halt", cost_usd, tokens_in, tokens_out, stop_reason)

    def increment_retries(self, node_id: str) -> None:
        """Count one retry for an open call; it joins the totals when the call ends."""
        with self.lock:
            if (call := self._open_call(node_id)) is not None:
                count_retry(call)

    # Reading.

    def snapshot(self) -> dict[str, Any]:
        """Return the whole tree as JSON data, as of the `seq` in it; later changes do not affect it."""
        with self._fold_lock:
            with self.lock:
                captured = self._capture()
            self._absorb(captured.uncounted)
            captured = captured._replace(counted=self._counted, uncounted=())
        return GraphState(captured).render()

    def _capture(self) -> Captured:
        """Copy the data of a snapshot, by reference. The caller holds the lock."""
        counted = self._counted
        return Captured(
            chain_id=self.chain_id,
            root=self.root,
            seq=self.seq,
            calls=self._kept(),
            folded=dict(self.folded),
            max_depth=self.max_depth,
            counted=counted,
            uncounted=self._since(counted.seq),
            now_ns=self.clock.monotonic_ns(),
            wall_offset_ns=self.wall_offset_ns,
        )

    def changes_since(self, seq: int) -> dict[str, Any]:
        """Return the calls that began, ended or were settled after `seq`, as JSON data; the cost depends on the changes
        alone.

        `complete` is False if entries after `seq` were dropped in the meantime; then take a snapshot.
        """
        with self.lock:
            entries, now_seq = self._since(seq), self.seq
            complete = seq + 1 >= self._first_seq
            folded = dict(self.folded)
        touched = {call.number: call for entry in entries if (call := views.call_of(entry)) is not None}
        nodes = {call.node_id: self._node(call, now_seq, folded) for call in touched.values()}
        return {"chain_id": self.chain_id, "nodes": nodes, "seq": now_seq, "complete": complete}

    @property
    def aggregates(self) -> dict[str, Any]:
        """Return the totals; failed and halted work is in fields of its own."""
        with self._fold_lock:
            self._catch_up()
            return views.aggregates(self._counted.sums, self.max_depth)

    def events(self, since: int = 0, limit: int | None = None) -> list[TraceEvent]:
        """The events after `since`, oldest first, at most `limit`."""
        if limit is not None and limit < 0:
            raise InvalidValue("limit", limit, "a number of events, zero or more, or None")
        with self.lock:
            first = max(since + 1, self._first_seq)
            entries = self._since(since, limit)
        return [views.event(self, entry, first + at) for at, entry in enumerate(entries)]

    @property
    def dropped_events(self) -> int:
        """Number of the oldest events that are no longer kept."""
        return self._first_seq - 1

    def stats(self, source: Source) -> ExecutionStats:
        """Return the usage of a context."""
        with self._fold_lock:
            self._catch_up()
            return self._sums().of(source)

    def call(self, node_id: str) -> CallRecord:
        """Return the record of a call; raises KeyError if there is none, or it was folded."""
        with self.lock:
            return self._call(node_id)

    def calls(self) -> tuple[int, list[CallRecord]]:
        """The newest seq and every kept call, oldest first."""
        with self.lock:
            seq, calls = self.seq, self._kept()
        calls.sort(key=by_number)
        return seq, calls

    # Inside.

    def _kept(self) -> list[CallRecord]:
        """Return every call that is kept individually, in no order. The caller holds the lock."""
        return [*self._ended, *self._open.values()]

    def _call(self, node_id: str) -> CallRecord:
        number = self._number(node_id)
        call = self._open.get(number)
        if call is None:
            call = self._ended_by_number().get(number)
        if call is None:
            raise KeyError(f"call {node_id!r} was folded into the totals of run {self.chain_id}")
        return call

    def _ended_by_number(self) -> dict[int, CallRecord]:
        """Return the kept finished calls by number. The caller holds the lock.

        Created when a finished call is first looked up, so that other runs pay nothing for it. Each look-up adds the
        calls that have ended since the previous one, which are at the end.
        """
        index = self._index
        if index is None:
            index = self._index = {}
        for call in reversed(self._ended):
            if call.number in index:
                if call is self.root:
                    continue  # folding moves the root to the end
                break
            index[call.number] = call
        return index

    def _open_call(self, node_id: str) -> CallRecord | None:
        """Return the call if it is open; None if it has ended, even if it was folded since."""
        call = self._open.get(self._number(node_id))
        if call is not None and self._closed:
            raise RunEnded(self.chain_id, f"the mark on {call.kind} call {call.name!r} came after its end")
        return call

    def _number(self, node_id: str) -> int:
        if not isinstance(node_id, str):
            raise KeyError(f"{node_id!r} is not a call id (they look like n000001)")
        number = call_number(node_id)
        if not 0 < number <= self._last_number:
            raise KeyError(f"call {node_id!r} does not exist in run {self.chain_id}")
        return number

    def _mark(
        self,
        node_id: str,
        status: Status,
        cost_usd: Usd,
        tokens_in: int | None,
        tokens_out: int | None,
        stop_reason: str | None = None,
        error_class: str | None = None,
    ) -> None:
        cost = to_nanos(cost_usd, "cost_usd")
        tokens_in, tokens_out = _tokens("tokens_in", tokens_in), _tokens("tokens_out", tokens_out)
        _check_text_or_none("stop_reason", stop_reason)
        now_ns = self.clock.monotonic_ns()
        with self.lock:
            if (call := self._open_call(node_id)) is None:
                return
            before: Status = "running" if call.running or status == "success" else "created"
            if status in TRANSITIONS[before]:
                self.end(call, now_ns, status, cost, tokens_in, tokens_out, stop_reason, error_class)

    def _since(self, seq: int, limit: int | None = None) -> list[Entry]:
        start = max(seq + 1 - self._first_seq, 0)
        return self._log[start:] if limit is None else self._log[start : start + limit]

    def _node(self, call: CallRecord, seq: int, folded: Mapping[int, views.Folded]) -> dict[str, Any]:
        return views.node(call, seq, self.wall_offset_ns, folded.get(call.number))

    def _catch_up(self) -> None:
        """Count the entries written since the last read. The caller holds the fold lock, and not the lock."""
        with self.lock:
            entries = self._since(self._counted.seq)
        self._absorb(entries)

    def _sums(self) -> Tallies:
        if self._tallies is None:
            self._tallies = Tallies()
        return self._tallies

    def _absorb(self, entries: Sequence[object]) -> None:
        """Count these entries. The caller holds the fold lock."""
        counted, more = self._counted, Tallies()
        more.absorb(entries, counted.seq + 1)
        sums = self._sums().plus(more)
        # In one assignment: a capture reads it under the lock, and this thread may hold the fold lock alone.
        counted = Counted(counted.seq + len(entries), sums.run)
        try:
            self._tallies = sums
            self._counted = counted
        except BaseException:  # from a signal handler: an entry is counted once
            self._tallies, self._counted = sums, counted
            raise

    def _fold_oldest(self, max_kept: int) -> None:
        """Fold some of the oldest finished calls, each into its nearest kept ancestor: many at once cost less.

        The result is computed first, and then written: all of it, even if a signal handler raises meanwhile.
        """
        ended = self._ended
        if isinstance(ended, list):  # a short run, as most are, needs no more than a list
            ended = self._ended = deque(ended)
        if ended[0] is self.root:
            ended.rotate(-1)
        root, folded = self.root, self.folded
        sums: dict[int, list[int]] = {}
        after: dict[int, tuple[CallRecord, CallExtras, CallRecord | None]] = {}
        mark = unpriced = NO_EXTRAS
        parent = kept = row = None
        for call in islice(ended, max(1, min(max_kept // 8, FOLD_CHUNK))):
            if call is root:
                break
            if mark is NO_EXTRAS or call.parent is not parent:  # most stand beside those that the same call made
                parent, kept = call.parent, self._kept_above(call, after)
                mark = CallExtras(folded_from=0 if parent is None else parent.number)
                unpriced = mark._replace(cost_unknown=True)
                row = None if kept is None else sums.setdefault(kept.number, [0] * len(views.Folded._fields))
            if call.extras is NO_EXTRAS:
                extras = mark
            elif call.extras is ONLY_COST_UNKNOWN:
                extras = unpriced
            else:
                extras = call.extras._replace(folded_from=mark.folded_from, payload=None)
            number = call.number
            after[number] = call, extras, kept
            if row is not None:
                _sum_up(row, call)
                if number in sums:
                    row[:] = map(add, row, sums.pop(number))
                if number in folded:
                    row[:] = map(add, row, folded[number])
        rows = {number: views.fold(folded.get(number), more) for number, more in sums.items()}
        left = len(ended) - len(after)
        try:
            self._write_folded(ended, left, after, rows)
        except BaseException:
            self._write_folded(ended, left, after, rows)
            raise

    def _write_folded(
        self,
        ended: deque[CallRecord],
        left: int,
        after: Mapping[int, tuple[CallRecord, CallExtras, CallRecord | None]],
        rows: Mapping[int, views.Folded],
    ) -> None:
        folded, index = self.folded, self._index
        for number, (call, extras, kept) in after.items():
            call.extras = extras
            call.parent = kept
            if number in folded:
                del folded[number]
            if index is not None:
                index.pop(number, None)
        folded.update(rows)
        while len(ended) > left:
            ended.popleft()

    def _kept_above(self, call: CallRecord, folded_now: Collection[int] = ()) -> CallRecord | None:
        above = call.parent
        while above is not None and (above.folded_from is not None or above.number in folded_now):
            above = above.parent
        return above

    def _trim_excess(self, max_kept: int) -> None:
        """Count entries that the log need not keep, a chunk at a time; drop them when that is worth moving the rest."""
        excess = len(self._log) - max_kept * EVENTS_PER_CALL_KEPT
        uncounted = self._first_seq + excess - 1 - self._counted.seq
        is_worth_it = excess >= max(TRIM_CHUNK, max_kept // 2)
        fold_lock = self._fold_lock
        if not (uncounted >= TRIM_CHUNK or is_worth_it) or fold_lock._is_owned():  # type: ignore[attr-defined]
            return
        try:
            # A reader that is counting holds the fold lock and wants ours next: never wait for it here.
            if fold_lock.acquire(blocking=False):
                if uncounted > 0:
                    self._absorb(self._since(self._counted.seq, uncounted))
                if is_worth_it:
                    self._drop_oldest(excess)
        finally:
            if fold_lock._is_owned():  # type: ignore[attr-defined]  # also if a signal handler has raised in between
                fold_lock.release()

    def _drop_oldest(self, excess: int) -> None:
        log, left, first_seq = self._log, len(self._log) - excess, self._first_seq + excess
        try:
            del log[:excess]
            self._first_seq = first_seq
        except BaseException:
            if len(log) == left:
                self._first_seq = first_seq
            raise


def _sum_up(row: list[int], call: CallRecord) -> None:
    """Add a finished call to a row of `views.Folded`."""
    row[0] += 1
    row[1] += call.cost
    if call.tokens_in:
        row[2] += call.tokens_in
    if call.tokens_out:
        row[3] += call.tokens_out
    row[4] += call.extras.retries
    if (late := call.extras.settled) is not None:
        row[1] += late.cost
        row[2] += late.tokens_in
        row[3] += late.tokens_out


def _copied(metadata: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    if metadata is not None and not isinstance(metadata, Mapping):
        raise InvalidValue("metadata", metadata, "a mapping, or None")
    return dict(metadata) if metadata else None


def _check_text(field: str, text: object) -> None:
    if not isinstance(text, str):
        raise InvalidValue(field, text, "text")


def _check_text_or_none(field: str, text: object) -> None:
    if text is not None and not isinstance(text, str):
        raise InvalidValue(field, text, "text, or None")


def _tokens(field: str, count: int | None) -> int | None:
    if count is not None and not (_is_whole(count) and 0 <= count <= MAX_TOKENS):
        raise InvalidValue(field, count, "a whole number of tokens, zero or more, or None")
    return count


def _is_whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)
