"""Apply a found journal entry to the run: add it to the call tree, take its step and count its cost.

A replayed entry cannot be refused, since it happened: no limit and no hook is checked. A store that counts for several
processes has counted it already, so nothing is reported to it again. Entries recorded inside a place that is replayed
as a whole (the model calls of a node) are added to the tree below it, each with its cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.containment import accounts
from penstock.runtime.call import Call, draw_retry, running_call
from penstock.runtime.durable.journal import COST_UNKNOWN, Journal
from penstock.runtime.durable.ports import EntryKind, JournalEntry
from penstock.runtime.handle import Handle
from penstock.tracing.lifecycle import CallKind, Status
from penstock.tracing.payloads import Payload
from penstock.tracing.record import (
    NOT_WHOLE,
    OPEN,
    CallRecord,
    keep_payload,
    mark_cost_unknown,
    mark_not_whole,
)

REPLAYED: Mapping[str, Any] = {"replayed": True}

FAILED = "failed"
"""Kind of the place where a failed attempt is recorded, inside the place of the attempt."""

KINDS: Mapping[EntryKind, CallKind] = {"node": "system", "llm": "llm", "tool": "tool"}
"""Kind of call an entry has in the tree; a value has none."""


def replay(
    journal: Journal,
    context: Handle,
    entry: JournalEntry,
    name: str,
    value: Any,
    about: Mapping[str, Any] | None = None,
    exchanged: tuple[Any, Any] | None = None,
) -> CallRecord:
    """Add a found entry to the tree, with everything recorded inside of it; `value` is its result.

    `exchanged` is the input and the output of a model or tool call, for runs that record payloads.
    """
    below = journal.under(entry.key)
    run, now_ns, payload = context._run, context._run.now(), None
    if run.payloads is not None and exchanged is not None:
        given, returned = exchanged
        output = None if _failure(entry) is not None else run.payloads.capture(returned)
        payload = Payload(run.payloads.capture(given), output)
    with run.lock:
        record = _write(context, _parent(context), entry, name, now_ns, about, below, payload)
        for inner in below:
            if is_failure(inner.key):
                draw_retry(context._account, record)  # as it was drawn then, if one is left
        if run.results is not None:
            run.results.append((record, value))
        else:
            run.keep_result(record, value)
    journal.replayed += 1 + len(below)
    return record


def replay_failure(
    journal: Journal,
    context: Handle,
    name: str,
    about: Mapping[str, Any] | None,
    attempt: int,
    error: Mapping[str, Any],
    below: Sequence[JournalEntry],
) -> None:
    """Add an attempt that failed earlier: it draws on the retry budget, and the work done in it counts as paid."""
    run, now_ns = context._run, context._run.now()
    metadata = {**(about or {}), **REPLAYED, **({"attempt": attempt} if attempt > 1 else {})}
    with run.lock:
        record = run.graph.begin(_parent(context), "system", name, None, context._source, now_ns, True, metadata)
        for inner in below:
            if inner.kind in KINDS:
                _write(context, record, inner, _name(inner), now_ns, None, ())
            elif is_failure(inner.key):
                draw_retry(context._account, record)
        run.graph.end(record, now_ns, "fail", stop_reason=error["message"], error_class=error["error"])
    journal.replayed += len(below)


def is_failure(key: str) -> bool:
    """Return whether the entry with this key records a failed attempt."""
    return key.rpartition("/")[2].startswith(f"{FAILED}:")


def _parent(context: Handle) -> CallRecord:
    """Return the call being executed, or its nearest open ancestor. The caller holds the lock."""
    call = running_call.get()
    parent = context._base
    if call is not None and call.context._run is context._run and call.record.depth > parent.depth:
        parent = call.record
    while parent.end_seq != OPEN and parent.parent is not None:
        parent = parent.parent
    return parent


def _write(
    context: Handle,
    parent: CallRecord,
    entry: JournalEntry,
    name: str,
    now_ns: int,
    about: Mapping[str, Any] | None,
    below: Sequence[JournalEntry],
    payload: Payload | None = None,
) -> CallRecord:
    """Begin and end the call's record, with its cost and one step taken. The caller holds the lock."""
    graph, kind = context._run.graph, KINDS[entry.kind]
    metadata = REPLAYED if about is None else {**about, **REPLAYED}
    record = graph.begin(parent, kind, name, _model(entry), context._source, now_ns, True, metadata)
    for inner in below:
        if inner.kind in KINDS:
            _write(context, record, inner, _name(inner), now_ns, None, ())
    api_calls = context._run.worst_case[kind].api_calls
    failed = _failure(entry)
    steps = 1 if failed is None else 0
    accounts.charge(context._account, entry.cost_nanos, entry.tokens_in, entry.tokens_out, api_calls, steps)
    _learn(context, entry, kind)
    if _is_cost_unknown(entry):
        context._run.unknown_costs += 1
        mark_cost_unknown(record)
    if (finish_reason := _finish_reason(entry)) is not None:
        mark_not_whole(record, finish_reason)
    if payload is not None:
        keep_payload(record, payload)
    status: Status = "success" if failed is None else "fail"
    tokens, error = (entry.tokens_in or None, entry.tokens_out or None), None if failed is None else "ToolFailed"
    graph.end(record, now_ns, status, entry.cost_nanos, *tokens, failed, error)
    return record


def _learn(context: Handle, entry: JournalEntry, kind: CallKind) -> None:
    """Update the estimate, so that the next call without a better one holds as much as it would have held then."""
    run = context._run
    if entry.cost_nanos and not (kind == "llm" and run.prices.is_priced(_model(entry))):
        run.learn(kind, entry.cost_nanos, entry.tokens_in + entry.tokens_out)


def _failure(entry: JournalEntry) -> str | None:
    """Return the error message of a failed tool call, as the model received it; such a call takes no step."""
    result = entry.value if entry.kind == "tool" and isinstance(entry.value, dict) else {}
    return str(result.get("content"))[:500] if result.get("is_error") else None


def _is_cost_unknown(entry: JournalEntry) -> bool:
    """Return whether the cost of the call is unknown."""
    return isinstance(entry.value, dict) and entry.value.get(COST_UNKNOWN) is True and entry.kind in ("llm", "tool")


def _finish_reason(entry: JournalEntry) -> str | None:
    """Return why the answer of a model is incomplete; None if it is complete."""
    reason = entry.value.get("finish_reason") if entry.kind == "llm" and isinstance(entry.value, dict) else None
    return reason if reason in NOT_WHOLE else None


def _name(entry: JournalEntry) -> str:
    name = entry.value.get("name") if isinstance(entry.value, dict) else None
    return name if isinstance(name, str) else entry.key.rpartition("/")[2]


def _model(entry: JournalEntry) -> str | None:
    if entry.kind != "llm" or not isinstance(entry.value, dict):
        return None
    model = entry.value.get("model") or entry.value.get("name")
    return model if isinstance(model, str) else None


def paid(context: Handle, value: Any) -> None:
    """Mark a value that reports its usage as already paid, so that returning it costs nothing more."""
    call: Call | None = running_call.get()
    if call is not None and call.context._run is context._run:
        if call.billed_below is None:
            call.billed_below = []
        call.billed_below.append(value)
