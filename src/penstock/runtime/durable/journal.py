"""The journal of a run: results are recorded as they complete, and a resumed run reads them instead of repeating work.

A journalled run is the same run code in a context with a `Journal`. Completed nodes, model calls and tool calls are
appended under the key of their place (`keys`) before their results are visible to any caller; once `append` has
returned, they survive the process. When a run reaches a place that is already recorded, it uses the entry: nothing
runs, no request is made, and the recorded cost is counted in the accounts of this process, but not again where a store
has already counted it.

Failures are not recorded and run again; so does work that was in progress when the process died. The exception is an
attempt that a policy continues from: it is recorded with its error and not repeated. So work with external effects
happens at least once, and exactly once if it was recorded; `keys.idempotency_key()` identifies a repetition.

A host may let the entries of its built-in nodes wait (`may_wait`): they are stored before anything that happens after
them can be seen outside, by `flush`, or in the transaction that ends the run.

Values are JSON. A value that is not JSON cannot be recorded, and the node that returned it fails (`NotRecordable`).

Knows the storage of entries only as the `JournalStore` port; `replay` defines what a found entry does to the run.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from inspect import isawaitable
from math import isfinite
from typing import Any

from penstock import checks
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import InvalidValue, PenstockError
from penstock.runtime.durable import failpoints
from penstock.runtime.durable.keys import Scope, current_scope, root_node_key
from penstock.runtime.durable.ports import EntryKind, JournalEntry, JournalStore
from penstock.tracing.record import NOT_WHOLE

MAX_DEPTH = 90
"""Maximum nesting depth of a recorded value; stores accept a little more."""
MAX_INT_BITS = 4_096
PLAIN = frozenset({str, bool, type(None)})
"""Types that are JSON whatever their value; nearly all values have exactly these types."""
TEXT = frozenset({str})
"""The type of nearly all keys; lets all keys of a dict be checked in one operation."""
COST_UNKNOWN = "cost_unknown"
"""Field of a call's entry that is true if the cost of the call is unknown."""
SHORT_CHARACTERS = 500
"""Maximum length kept of a failed tool's message."""
ANSWER = re.compile(r"(/agent:[^/]*/turn:[^/]*)?/llm:[^/]*")
"""Key, below its node, of an answer that only the node itself receives: no tool, hook or nested model does."""
MAX_SHORT = 1_000
"""Maximum number of shortened entries held in memory; for a longer run, the store has to be read."""


class JournalMissing(PenstockError):
    """A run that may only replay reached something that was not recorded."""

    def __init__(self, run_id: str, key: str) -> None:
        self.run_id = run_id
        self.key = key
        super().__init__(f"run {run_id!r} has no record of {key!r}, and is only replayed: nothing new may run")


class NotRecordable(PenstockError):
    """A value of a journalled run is not JSON."""

    def __init__(self, where: str, what: str) -> None:
        self.where = where
        self.what = what
        super().__init__(f"{where} cannot be written to the journal: {what}; give JSON, or run without a journal")


class Journal:
    """The recorded entries of one run; appends new ones."""

    __slots__ = (
        "_broken",
        "_clock",
        "_entries",
        "_keys",
        "_order",
        "_short",
        "_store",
        "_waiting",
        "_whole",
        "epoch",
        "may_wait",
        "recorded",
        "renamed",
        "replay_only",
        "replayed",
        "root",
        "run_id",
        "states",
    )

    def __init__(
        self,
        store: JournalStore,
        run_id: str,
        entries: Iterable[JournalEntry] = (),
        *,
        epoch: int = 0,
        replay_only: bool = False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.run_id = run_id
        self.epoch = epoch
        """Epoch of the claim under which this process works on the run."""
        self.replay_only = replay_only
        """Whether reaching anything that is not recorded is an error."""
        self.may_wait: Collection[str] = ()
        """Keys of nodes whose entries, and the answers to whose own model calls, may wait until `flush`."""
        self.recorded = 0
        """Number of entries appended."""
        self.replayed = 0
        """Number of entries found and therefore not run again."""
        self.root = Scope(object(), run_id)
        self.renamed: dict[str, Mapping[str, str]] = {}
        """Names under which nodes are recorded, if not under their own: by the path of their graph, then by node id."""
        self.states: dict[int, Any] = {}
        """Tracking of the states that nodes of this run share, by identity of the state."""
        self._store = store
        self._clock = clock
        self._broken: Exception | None = None
        """The store's failure. From then on nothing is found or appended: code that recovers from errors (a policy, a
        model that receives a tool failure) would otherwise continue with work that is not recorded."""
        self._entries: dict[str, JournalEntry] = {}
        for entry in entries:
            self._entries.setdefault(entry.key, entry)
        self._waiting: dict[str, JournalEntry] = {}
        """Entries that are not stored yet."""
        self._whole: set[str] = set()
        """Keys of the nodes that this process appended."""
        self._short: list[JournalEntry] | None = None if self._entries else []
        """Shortened forms of the entries appended inside nodes; None if this process does not have all of them."""
        self._order = {key: number for number, key in enumerate(self._entries)}
        self._keys = sorted(self._entries)

    @classmethod
    async def open(
        cls,
        store: JournalStore,
        run_id: str,
        *,
        epoch: int = 0,
        replay_only: bool = False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> Journal:
        """Return the journal of a run, with everything recorded so far."""
        checks.text("run_id", run_id, minimum=1)
        return cls(store, run_id, await store.load(run_id), epoch=epoch, replay_only=replay_only, clock=clock)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[JournalEntry]:
        return iter(self._entries.values())

    # Places.

    def scope(self) -> Scope:
        """Return the place in this run that is being executed."""
        place = current_scope.get()
        return place if place is not None and place.run is self.root.run else self.root

    def key(self, name: str) -> str:
        """Return the key of the next value of that name at this place."""
        return self.scope().next("value", name).path

    # Recorded entries.

    def find(self, key: str) -> JournalEntry | None:
        """Return the entry recorded under the key, or None; a run that is only replayed raises JournalMissing."""
        if self._broken is not None:
            raise self._broken
        entry = self._entries.get(key)
        if entry is None and self.replay_only:
            self._broken = JournalMissing(self.run_id, key)
            raise self._broken
        return entry

    def peek(self, key: str) -> JournalEntry | None:
        """Return the entry recorded under the key, or None."""
        return self._entries.get(key)

    def under(self, key: str) -> list[JournalEntry]:
        """Return the entries recorded inside that place, in any attempt at it, in the order they were written."""
        found = [*self._starting_with(f"{key}/"), *self._starting_with(f"{key}~")]
        return [self._entries[one] for one in sorted(found, key=self._order.__getitem__)]

    def _starting_with(self, prefix: str) -> list[str]:
        keys, first = self._keys, bisect_left(self._keys, prefix)
        last = first
        while last < len(keys) and keys[last].startswith(prefix):
            last += 1
        return keys[first:last]

    # Appending.

    async def append(
        self, key: str, kind: EntryKind, value: Any, cost_nanos: int = 0, tokens_in: int = 0, tokens_out: int = 0
    ) -> None:
        """Append an entry; when this returns, the entry survives the process, unless it `may_wait`."""
        at_ms = self._clock.time_ns() // 1_000_000
        entry = JournalEntry(key, kind, value, cost_nanos, tokens_in, tokens_out, at_ms)
        if failpoints.hook is not None:
            failpoints.hook(f"{kind}.before_append")
        if self._broken is not None:
            raise self._broken
        if self._can_wait(entry):
            self._waiting[key] = entry
        else:
            await self._write([*self._waiting.values(), entry])
        self.recorded += 1
        if self._short is not None:
            self._remember(entry)

    def _can_wait(self, entry: JournalEntry) -> bool:
        if not self.may_wait:
            return False
        node = root_node_key(entry.key)
        if node not in self.may_wait or (entry.key != node and ANSWER.fullmatch(entry.key, len(node)) is None):
            return False
        return is_json(entry.value)  # a value that a store may refuse is refused at once, where it came from

    @property
    def waiting(self) -> list[JournalEntry]:
        """Entries that are not stored yet."""
        return [*self._waiting.values()]

    async def flush(self) -> None:
        """Store the waiting entries. Called before a node, a model call or a tool call starts."""
        if self._waiting:
            # They wait on until they are stored: a concurrent flush must not return before, and may store them twice.
            await self._write(self.waiting)

    async def _write(self, entries: Sequence[JournalEntry]) -> None:
        try:
            await self._store.append(self.run_id, entries, epoch=self.epoch)
        except Exception as error:
            self._broken = error
            raise
        self.stored(entries)

    def stored(self, entries: Iterable[JournalEntry]) -> None:
        """Note that these entries are stored."""
        for entry in entries:
            self._waiting.pop(entry.key, None)
            if failpoints.hook is not None:
                failpoints.hook(f"{entry.kind}.after_append")

    def _remember(self, entry: JournalEntry) -> None:
        """Keep the shortened entry in memory, so that the run need not be read again to be shortened."""
        assert self._short is not None
        if entry.kind == "node":
            self._whole.add(entry.key)
        if root_node_key(entry.key) != entry.key and (short := _short(entry.value)) != entry.value:
            used = entry.cost_nanos, entry.tokens_in, entry.tokens_out
            self._short.append(JournalEntry(entry.key, entry.kind, short, *used, entry.at_ms))
        if len(self._short) > MAX_SHORT or len(self._whole) > MAX_SHORT:
            self._short = None
            self._whole.clear()

    def shortened(self) -> list[JournalEntry] | None:
        """Return `shortened` of everything recorded; None if this process does not have all of it."""
        if self._short is None:
            return None
        return [entry for entry in self._short if root_node_key(entry.key) in self._whole]

    async def value(self, name: str, make: Callable[[], Any]) -> Any:
        """Return the recorded result of `make()`, sync or async, called once per run: a time, an id, an answer."""
        place = self.scope().next("value", name)
        found = self.find(place.path)
        if found is not None:
            self.replayed += 1
            return found.value
        value = make()
        if isawaitable(value):
            value = await value
        must_be_json(f"value {name!r}", value)
        await self.append(place.path, "value", value)
        return value

    def __repr__(self) -> str:
        return f"<Journal of run {self.run_id!r}: {len(self)} entries>"


async def fork_journal(
    store: JournalStore,
    from_run: str,
    to_run: str,
    *,
    without: Callable[[JournalEntry], bool] = lambda entry: False,
    epoch: int = 0,
) -> Sequence[JournalEntry]:
    """Copy the entries of a run to a new run, except those for which `without` is true, and return the copied entries.

    The node of an entry is `keys.entry_node(entry.key)`. Forking again changes nothing.
    """
    if from_run == to_run:
        raise InvalidValue("to_run", to_run, "the id of another run than the one that is forked")
    kept = [entry for entry in await store.load(from_run) if not without(entry)]
    if failpoints.hook is not None:
        failpoints.hook("fork.before_append")
    if kept:
        await store.append(to_run, kept, epoch=epoch)
    if failpoints.hook is not None:
        failpoints.hook("fork.after_append")
    return kept


def shortened(entries: Iterable[JournalEntry]) -> list[JournalEntry]:
    """Return shortened copies, without their results, of the entries inside nodes that are recorded as a whole.

    A replay uses the node's entry; the entries inside it only contribute their name, their usage and the state they
    left.
    """
    listed = list(entries)
    whole = {entry.key for entry in listed if entry.kind == "node"}
    inside = [entry for entry in listed if (node := root_node_key(entry.key)) in whole and node != entry.key]
    return [entry._replace(value=short) for entry in inside if (short := _short(entry.value)) != entry.value]


def _short(value: Any) -> Any:
    """Return the fields a replay needs from an entry that is only counted."""
    if not isinstance(value, dict):
        return None
    kept = {name: value[name] for name in ("name", "model", "state", "is_error", COST_UNKNOWN) if name in value}
    if value.get("finish_reason") in NOT_WHOLE:
        kept["finish_reason"] = value["finish_reason"]
    if value.get("is_error"):
        kept["content"] = str(value.get("content"))[:SHORT_CHARACTERS]
    return kept


def must_be_json(where: str, value: Any) -> None:
    """Raise NotRecordable if `value` would not survive a JSON round trip unchanged."""
    wrong = _wrong(value, 0)
    if wrong is not None:
        raise NotRecordable(where, wrong)


def is_json(value: Any) -> bool:
    """Return whether `value` survives a JSON round trip unchanged."""
    return _wrong(value, 0) is None


def _wrong(value: Any, depth: int) -> str | None:
    """Describe the first part of `value` that is not JSON; None if all of it is."""
    kind = type(value)
    if kind in PLAIN:
        return None
    if kind is not dict and kind is not list:  # a dict or list cannot be any of these types
        if isinstance(value, (str, bool)):
            return None
        if isinstance(value, int):
            return None if value.bit_length() <= MAX_INT_BITS else f"a whole number of {value.bit_length()} bits"
        if isinstance(value, float):
            return None if isfinite(value) else f"{value}, for which JSON has no number"
    if depth >= MAX_DEPTH:
        return f"more than {MAX_DEPTH} levels deep"
    if isinstance(value, list):
        return _wrong_among(value, depth + 1)
    if isinstance(value, dict):
        return _wrong_in(value, depth + 1)
    hint = ", which would come back as a list" if isinstance(value, tuple) else ""
    return f"a value of type {kind.__name__}{hint}"


def _wrong_among(values: Iterable[Any], depth: int) -> str | None:
    for one in values:
        kind = type(one)
        # The result of `_wrong` for nearly all values, without calling it.
        if kind in PLAIN or (kind is int and one.bit_length() <= MAX_INT_BITS) or (kind is float and isfinite(one)):
            continue
        if (wrong := _wrong(one, depth)) is not None:
            return wrong
    return None


def _wrong_in(value: dict[Any, Any], depth: int) -> str | None:
    if type(value) is dict and TEXT.issuperset(map(type, value)):
        return _wrong_among(value.values(), depth)
    for name, one in value.items():
        if not isinstance(name, str):
            return f"a key of type {type(name).__name__}"
        if (wrong := _wrong(one, depth)) is not None:
            return wrong
    return None
