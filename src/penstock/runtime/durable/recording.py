"""The nodes of one graph, recorded as they complete, and found instead of run.

Stands beside the scheduler, which asks for each node that is ready whether it is there already, says when one begins,
and hands over what it gave. What a node gives, and how it is written as JSON, is for whoever runs the graph to say.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from penstock.runtime.billing.usage import Reported
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable import points
from penstock.runtime.durable.journal import Journal
from penstock.runtime.durable.keys import Scope, here
from penstock.runtime.durable.ports import JournalEntry
from penstock.runtime.durable.replay import SharedState, replay
from penstock.tracing.record import CallRecord

Write = Callable[[int, Any], Any]
"""A node's value as JSON; NotRecordable if it is none."""
Read = Callable[[int, Any], Any]
"""The value in what was written."""


class RecordedNodes:
    """The journal of a graph's nodes, by their numbers in its plan."""

    __slots__ = ("_about", "_journal", "_keys", "_names", "_pure", "_read", "_state", "_write", "place", "replayed")

    def __init__(
        self,
        journal: Journal,
        names: Sequence[str],
        write: Write,
        read: Read,
        *,
        about: Sequence[Mapping[str, Any] | None],
        state: object = None,
        pure: Collection[int] = (),
    ) -> None:
        self._journal = journal
        self._names = names
        self._write = write
        self._read = read
        self._about = about
        self._pure = pure
        """Nodes that give the same each time, call nothing and change nothing: computed again, and not recorded."""
        self._keys: dict[int, str] = {}
        self._state = SharedState.of(journal, state)
        self.place: Scope = journal.here().graph()
        """Where in the run the graph stands."""
        self.replayed: set[int] = set()
        """Nodes that were found."""

    def find(self, node: int) -> JournalEntry | None:
        """What is recorded of the node."""
        return self._journal.peek(self._key(node))

    def replay(self, node: int, found: JournalEntry, context: ExecutionContext) -> tuple[Any, CallRecord]:
        """The value of a node that was found, and the record of it."""
        value = self._read(node, found.value["value"])
        if self._state is not None:
            self._state.restore([*self._journal.under(found.key), found])
        record = replay(self._journal, context, found, self._names[node], value, self._about[node])
        self.replayed.add(node)
        if points.hook is not None:
            points.hook("node.replayed")
        return value, record

    def begin(self, node: int, attempt: int) -> None:
        """The node begins, here; JournalMissing if nothing new may run."""
        key, place = self._key(node), self.place
        if node not in self._pure:
            self._journal.find(key)
        here.set(Scope(place.run, place.run_id, key) if attempt == 1 else place.node(self._names[node], attempt))
        if points.hook is not None:
            points.hook("node.started")

    async def record(self, node: int, value: Any) -> None:
        """Write down what the node gave; when this returns, it survives the process."""
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
