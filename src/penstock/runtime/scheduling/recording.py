"""Record the nodes of one graph as they complete, and replay recorded nodes instead of running them.

Used by the scheduler, which checks for each ready node whether it is recorded, reports when a node starts, and hands
over its result. The code that runs the graph defines what a node returns and how it is encoded as JSON.

`SharedState` is the state that nodes share, if it is a dict of JSON: changed keys are recorded with the node that
completes next, and set again when that node is replayed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from penstock.runtime.billing.usage import Reported
from penstock.runtime.call import CallSpec
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable import failpoints
from penstock.runtime.durable.journal import Journal, NotRecordable, must_be_json
from penstock.runtime.durable.keys import Scope, current_scope
from penstock.runtime.durable.ports import JournalEntry
from penstock.runtime.replay import FAILED, is_failure, replay, replay_failure
from penstock.tracing.record import CallRecord

Write = Callable[[int, Any], Any]
"""Encode a node's value as JSON; raises NotRecordable if it is not JSON."""
Read = Callable[[int, Any], Any]
"""Decode a node's value from its JSON."""


class RecordedNodes:
    """The journal of a graph's nodes, by their numbers in its plan."""

    __slots__ = (
        "_calls",
        "_journal",
        "_keys",
        "_names",
        "_pure",
        "_read",
        "_recorded_as",
        "_state",
        "_write",
        "place",
        "replayed",
    )

    def __init__(
        self,
        journal: Journal,
        names: Sequence[str],
        write: Write,
        read: Read,
        *,
        calls: Sequence[CallSpec],
        state: object = None,
        pure: Collection[int] = (),
    ) -> None:
        self._journal = journal
        self._names = names
        self._write = write
        self._read = read
        self._calls = calls
        self._pure = pure
        """Nodes that always return the same, call nothing and change nothing: computed again, and not recorded."""
        self._keys: dict[int, str] = {}
        self._state = SharedState.of(journal, state)
        self.place: Scope = journal.scope().graph()
        """The graph's place in the run."""
        renamed = journal.renamed.get(self.place.path)
        self._recorded_as = names if renamed is None else [renamed.get(name, name) for name in names]
        """The names of the nodes in the journal."""
        self.replayed: set[int] = set()
        """Nodes that were replayed."""

    def find(self, node: int) -> JournalEntry | None:
        """Return the recorded entry of the node, or None."""
        return self._journal.peek(self._key(node))

    def replay(self, node: int, found: JournalEntry, context: ExecutionContext) -> tuple[Any, CallRecord]:
        """Return the value of a recorded node, and its call record."""
        value = self._read(node, found.value["value"])
        if self._state is not None:
            self._state.restore([*self._journal.under(found.key), found])
        record = replay(self._journal, context, found, self._names[node], value, self._calls[node].metadata)
        self.replayed.add(node)
        if failpoints.hook is not None:
            failpoints.hook("node.replayed")
        return value, record

    async def before(self, node: int) -> None:
        """Store the waiting entries before a node that is not pure."""
        if node not in self._pure:
            await self._journal.flush()

    def begin(self, node: int, attempt: int) -> None:
        """Start the node at its place; raises JournalMissing if nothing new may run.

        Await `before` first: the entries of earlier nodes are stored before this one can have an effect.
        """
        key, place = self._key(node), self.place
        if node not in self._pure:
            self._journal.find(key)
        current_scope.set(
            Scope(place.run, place.run_id, key) if attempt == 1 else place.node(self._recorded_as[node], attempt)
        )
        if failpoints.hook is not None:
            failpoints.hook("node.started")

    async def record_failure(self, node: int, attempt: int, error: Mapping[str, Any]) -> None:
        """Record a failed attempt after which the node's policy continues; a resumed run continues from there."""
        written = {"name": self._names[node], **error}
        changes = None if self._state is None else self._state.changes()
        if changes is not None:
            written["state"] = changes
        await self._journal.append(self._failure_key(node, attempt), "value", written)

    def replay_failures(self, node: int, most: int, context: ExecutionContext) -> tuple[int, Mapping[str, Any]]:
        """Return the number of attempts recorded as failed, at most `most`, and the error of the last one."""
        failed, error = 0, {}
        while failed < most and (entry := self._journal.peek(self._failure_key(node, failed + 1))) is not None:
            failed += 1
            error = {name: entry.value[name] for name in ("error", "message")}
            key = self._key(node) if failed == 1 else self.place.node_path(self._recorded_as[node], failed)
            below = [one for one in self._journal.under(key) if one.key.startswith(f"{key}/")]
            if self._state is not None:
                self._state.restore(below)
            replay_failure(self._journal, context, self._names[node], self._calls[node].metadata, failed, error, below)
        return failed, error

    def _failure_key(self, node: int, attempt: int) -> str:
        return self.place.node(self._recorded_as[node], attempt).child(FAILED, attempt).path

    async def record(self, node: int, value: Any) -> None:
        """Record the node's result; when this returns, it survives the process."""
        if node in self._pure:
            return
        name = self._names[node]
        written = {"name": name, "value": self._write(node, value.value if type(value) is Reported else value)}
        changes = None if self._state is None else self._state.changes()
        if changes is not None:
            written["state"] = changes
        await self._journal.append(self._key(node), "node", written)

    def _key(self, node: int) -> str:
        key = self._keys.get(node)
        if key is None:
            key = self._keys[node] = self.place.node_path(self._recorded_as[node])
        return key


class SharedState:
    """The state that the nodes of a run share, with the part of it that is recorded in the journal."""

    __slots__ = ("_set_by", "_version", "_written", "state")

    def __init__(self, journal: Journal, state: dict[str, Any]) -> None:
        self.state = state
        self._version = max((_version(entry) for entry in journal), default=0)
        """Number of the latest change: changes may be written in another order than they were made."""
        self._written: dict[str, str] = {key: _text(key, item) for key, item in state.items()}
        """Each key's value as recorded in the journal."""
        self._set_by: dict[str, int] = {}
        """Number of the change each key was restored from."""

    @classmethod
    def of(cls, journal: Journal, state: object) -> SharedState | None:
        """Return the tracking of a state; None if the state is not a dict, in which case none of it is recorded."""
        if not isinstance(state, dict):
            return None
        known = journal.states.get(id(state))
        if known is None:
            known = journal.states[id(state)] = cls(journal, state)
        assert isinstance(known, SharedState)
        return known

    def changes(self) -> dict[str, Any] | None:
        """Return the changes since the last entry, as JSON; None if there are none."""
        state, written = self.state, self._written
        if not state and not written:
            return None
        now = {key: _text(key, item) for key, item in state.items()}
        changed = {key: json.loads(text) for key, text in now.items() if written.get(key) != text}
        removed = [key for key in written if key not in now]
        self._written = now
        if not changed and not removed:
            return None
        self._version += 1
        return {"version": self._version, "set": changed, "removed": removed}

    def restore(self, entries: Sequence[JournalEntry]) -> None:
        """Set the changes of these entries, unless a newer value is already set."""
        for entry in entries:
            if version := _version(entry):
                changes = entry.value["state"]
                for key in changes["removed"]:
                    self._restore(key, version, None)
                for key, item in changes["set"].items():
                    self._restore(key, version, _text(key, item))

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
    """Return the number of the state change recorded with a node or a failed attempt; 0 if the state did not change."""
    may_have = isinstance(entry.value, dict) and (entry.kind == "node" or is_failure(entry.key))
    changes = entry.value.get("state") if may_have else None
    return int(changes["version"]) if changes else 0


def _text(key: object, value: Any) -> str:
    if not isinstance(key, str):
        raise NotRecordable("the state of the run", f"a key of type {type(key).__name__}")
    must_be_json(f"state[{key!r}]", value)
    return json.dumps(value, sort_keys=True)
