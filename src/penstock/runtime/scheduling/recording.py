"""Record the nodes of one graph as they complete, and replay recorded nodes instead of running them.

Used by the scheduler, which checks for each ready node whether it is recorded, reports when a node starts, and hands
over its result. The code that runs the graph defines what a node returns and how it is encoded as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from penstock.runtime.billing.usage import Reported
from penstock.runtime.call import CallSpec
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable import failpoints
from penstock.runtime.durable.journal import Journal
from penstock.runtime.durable.keys import Scope, current_scope
from penstock.runtime.durable.ports import JournalEntry
from penstock.runtime.replay import FAILED, SharedState, replay, replay_failure
from penstock.tracing.record import CallRecord

Write = Callable[[int, Any], Any]
"""Encode a node's value as JSON; raises NotRecordable if it is not JSON."""
Read = Callable[[int, Any], Any]
"""Decode the value from what was written."""


class RecordedNodes:
    """The journal of a graph's nodes, by their numbers in its plan."""

    __slots__ = ("_calls", "_journal", "_keys", "_names", "_pure", "_read", "_state", "_write", "place", "replayed")

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
            Scope(place.run, place.run_id, key) if attempt == 1 else place.node(self._names[node], attempt)
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
            key = self._key(node) if failed == 1 else self.place.node_path(self._names[node], failed)
            below = [one for one in self._journal.under(key) if one.key.startswith(f"{key}/")]
            if self._state is not None:
                self._state.restore(below)
            replay_failure(self._journal, context, self._names[node], self._calls[node].metadata, failed, error, below)
        return failed, error

    def _failure_key(self, node: int, attempt: int) -> str:
        return self.place.node(self._names[node], attempt).child(FAILED, attempt).path

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
            key = self._keys[node] = self.place.node_path(self._names[node])
        return key
