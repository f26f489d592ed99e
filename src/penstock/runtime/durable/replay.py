"""What a found entry does to the run: it is in the tree, it has taken its step, and what it cost is counted.

Nothing can refuse it, since it happened: neither a limit nor a hook is asked. Where a store counts for several
processes, it has counted this already, and is not told again. What was recorded inside of a place that is found as a
whole (the model calls of a node) is in the tree below it, each with its cost.

`SharedState` is what nodes share, as far as it is a dict of JSON: which of its keys changed is recorded with the node
that completed next, and set again when that node is found.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.containment import accounts
from penstock.runtime.call import Call, running_call
from penstock.runtime.durable.journal import COST_UNKNOWN, Journal, NotRecordable, must_be_json
from penstock.runtime.durable.ports import EntryKind, JournalEntry
from penstock.tracing.lifecycle import CallKind, Status
from penstock.tracing.record import NOT_WHOLE, OPEN, CallRecord, mark_cost_unknown, mark_not_whole

if TYPE_CHECKING:
    from penstock.runtime.handle import Handle

REPLAYED: Mapping[str, Any] = {"replayed": True}

KINDS: Mapping[EntryKind, CallKind] = {"node": "system", "llm": "llm", "tool": "tool"}
"""As which kind of call an entry is in the tree; a value is in none."""


def replay(
    journal: Journal,
    context: Handle,
    entry: JournalEntry,
    name: str,
    value: Any,
    about: Mapping[str, Any] | None = None,
) -> CallRecord:
    """Write down what is found instead of run, with all that is recorded inside of it; `value` is what it gave."""
    below = journal.under(entry.key)
    run, now_ns = context._run, context._run.now()
    with run.lock:
        record = _write(context, _parent(context), entry, name, now_ns, about, below)
        if run.results is not None:
            run.results.append((record, value))
        else:
            run.keep_result(record, value)
    journal.replayed += 1 + len(below)
    return record


def _parent(context: Handle) -> CallRecord:
    """The call that is being executed here, if it is still open. The caller holds the lock."""
    above = running_call.get()
    parent = context._base
    if above is not None and above.context._run is context._run and above.record.depth > parent.depth:
        parent = above.record
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
) -> CallRecord:
    """The call and its end, with what it cost and a step taken. The caller holds the lock."""
    graph, kind = context._run.graph, KINDS[entry.kind]
    said = REPLAYED if about is None else {**about, **REPLAYED}
    record = graph.begin(parent, kind, name, _model(entry), context._source, now_ns, True, said)
    for one in below:
        if one.kind in KINDS:
            _write(context, record, one, _name(one), now_ns, None, ())
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
    status: Status = "success" if failed is None else "fail"
    tokens, error = (entry.tokens_in or None, entry.tokens_out or None), None if failed is None else "ToolFailed"
    graph.end(record, now_ns, status, entry.cost_nanos, *tokens, failed, error)
    return record


def _learn(context: Handle, entry: JournalEntry, kind: CallKind) -> None:
    """The next call of which nothing better is known holds as much as it would have held then."""
    run = context._run
    if entry.cost_nanos and not (kind == "llm" and run.prices.is_priced(_model(entry))):
        run.learn(kind, entry.cost_nanos, entry.tokens_in + entry.tokens_out)


def _failure(entry: JournalEntry) -> str | None:
    """What the model was told of a tool that failed; such a call takes no step."""
    said = entry.value if entry.kind == "tool" and isinstance(entry.value, dict) else {}
    return str(said.get("content"))[:500] if said.get("is_error") else None


def _is_cost_unknown(entry: JournalEntry) -> bool:
    """Whether nobody could tell what it cost."""
    return isinstance(entry.value, dict) and entry.value.get(COST_UNKNOWN) is True and entry.kind in ("llm", "tool")


def _finish_reason(entry: JournalEntry) -> str | None:
    """Why the answer of a model was not whole."""
    said = entry.value.get("finish_reason") if entry.kind == "llm" and isinstance(entry.value, dict) else None
    return said if said in NOT_WHOLE else None


def _name(entry: JournalEntry) -> str:
    said = entry.value.get("name") if isinstance(entry.value, dict) else None
    return said if isinstance(said, str) else entry.key.rpartition("/")[2]


def _model(entry: JournalEntry) -> str | None:
    if entry.kind != "llm" or not isinstance(entry.value, dict):
        return None
    said = entry.value.get("model") or entry.value.get("name")
    return said if isinstance(said, str) else None


def paid(context: Handle, value: Any) -> None:
    """A value that says what it used was paid for when it was made: handing it on costs nothing more."""
    above: Call | None = running_call.get()
    if above is not None and above.context._run is context._run:
        if above.billed_below is None:
            above.billed_below = []
        above.billed_below.append(value)


class SharedState:
    """What the nodes of a run share, and which of it the journal has."""

    __slots__ = ("_set_by", "_version", "_written", "state")

    def __init__(self, journal: Journal, state: dict[str, Any]) -> None:
        self.state = state
        self._version = max((_version(entry) for entry in journal), default=0)
        """Changes are counted: they may be written in another order than they were made."""
        self._written: dict[str, str] = {key: _text(key, one) for key, one in state.items()}
        """Each key's value as the journal has it."""
        self._set_by: dict[str, int] = {}
        """Which change a key was restored from."""

    @classmethod
    def of(cls, journal: Journal, state: object) -> SharedState | None:
        """What is known of a state; None if it is no dict, and then nothing of it is recorded."""
        if not isinstance(state, dict):
            return None
        known = journal.states.get(id(state))
        if known is None:
            known = journal.states[id(state)] = cls(journal, state)
        assert isinstance(known, SharedState)
        return known

    def changes(self) -> dict[str, Any] | None:
        """What has changed since the last entry, as JSON; None if nothing has."""
        state, written = self.state, self._written
        if not state and not written:
            return None
        now = {key: _text(key, one) for key, one in state.items()}
        changed = {key: json.loads(text) for key, text in now.items() if written.get(key) != text}
        removed = [key for key in written if key not in now]
        self._written = now
        if not changed and not removed:
            return None
        self._version += 1
        return {"version": self._version, "set": changed, "removed": removed}

    def restore(self, entries: Sequence[JournalEntry]) -> None:
        """Set what changed with these entries, where nothing newer was set already."""
        for entry in entries:
            if version := _version(entry):
                changes = entry.value["state"]
                for key in changes["removed"]:
                    self._restore(key, version, None)
                for key, one in changes["set"].items():
                    self._restore(key, version, _text(key, one))

    def _restore(self, key: str, version: int, text: str | None) -> None:
        if self._set_by.get(key, 0) > version:
            return
        self._set_by[key] = version
        if text is None:
            self.state.pop(key, None)
            self._written.pop(key, None)
        else:
            self.state[key] = json.loads(text)
            self._written[key] = text


def _version(entry: JournalEntry) -> int:
    """Which change of the state was recorded with it; 0 if it had not changed."""
    changes = entry.value.get("state") if entry.kind == "node" and isinstance(entry.value, dict) else None
    return int(changes["version"]) if changes else 0


def _text(key: object, value: Any) -> str:
    if not isinstance(key, str):
        raise NotRecordable("the state of the run", f"a key of type {type(key).__name__}")
    must_be_json(f"state[{key!r}]", value)
    return json.dumps(value, sort_keys=True)
