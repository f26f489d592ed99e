"""What a run has done, written down as it is done, and found again instead of being done twice.

A journalled run is the same run code in a context with a `Journal`. Nodes, model calls and tool calls that complete are
appended under the key of their place (`keys`) before anybody sees what they gave; when `append` has returned, they
survive the process. A run that comes to a place it has been at finds what is there: nothing runs, no request is made,
and what it cost then is counted in the accounts of this process, but not again where a store has counted it already.

What failed is not written down and runs again; what was under way when the process died does, too. So work with
effects outside happens at least once, and once if it was recorded: `keys.idempotency_key()` is there to tell.

Values are JSON. What is none cannot be written down, and the node that gave it fails (`NotRecordable`).

Knows where entries are kept only as the `JournalStore` port; `replay` says what a found entry does to the run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from inspect import isawaitable
from math import isfinite
from typing import Any

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import InvalidValue, PenstockError
from penstock.runtime.durable import points
from penstock.runtime.durable.keys import Scope, here, outermost
from penstock.runtime.durable.ports import EntryKind, JournalEntry, JournalStore
from penstock.runtime.options import must_be_name
from penstock.tracing.record import NOT_WHOLE

MAX_DEPTH = 90
"""So deep may a recorded value be nested; stores take a little more."""
MAX_INT_BITS = 4_096
PLAIN = frozenset({str, bool, type(None)})
"""What is JSON whatever its value; nearly all values are of these very types."""
TEXT = frozenset({str})
"""What nearly all keys are of: that all of them are is asked at once."""
COST_UNKNOWN = "cost_unknown"
"""What the entry of a call says, as true, if nobody could tell what it cost."""
SHORT_CHARACTERS = 500
"""So much is kept of what a tool that failed has said."""
MAX_SHORT = 1_000
"""So many entries are remembered by what would be kept of them; of a longer run, the store has to be asked."""


class JournalMissing(PenstockError):
    """A run that may only replay came to something that was not recorded."""

    def __init__(self, run_id: str, key: str) -> None:
        self.run_id = run_id
        self.key = key
        super().__init__(f"run {run_id!r} has no record of {key!r}, and is only replayed: nothing new may run")


class NotRecordable(PenstockError):
    """A value of a journalled run is no JSON."""

    def __init__(self, where: str, what: str) -> None:
        self.where = where
        self.what = what
        super().__init__(f"{where} cannot be written to the journal: {what}; give JSON, or run without a journal")


class Journal:
    """What one run has recorded, and where more is appended."""

    __slots__ = (
        "_broken",
        "_clock",
        "_entries",
        "_keys",
        "_order",
        "_short",
        "_store",
        "_whole",
        "epoch",
        "recorded",
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
        """The claim under which this process works on the run."""
        self.replay_only = replay_only
        """Whether anything that is not recorded is an error."""
        self.recorded = 0
        """Entries that were appended."""
        self.replayed = 0
        """Entries that were found, and so were not run again."""
        self.root = Scope(object(), run_id)
        self.states: dict[int, Any] = {}
        """What is known of the states that nodes of this run share, by identity."""
        self._store = store
        self._clock = clock
        self._broken: Exception | None = None
        """What the store could not do. From then on nothing is found or written: whoever would make the best of an
        error (a policy, a model that is told of a failed tool) would go on with what nobody will know of."""
        self._entries: dict[str, JournalEntry] = {}
        for entry in entries:
            self._entries.setdefault(entry.key, entry)
        self._whole: set[str] = set()
        """Nodes that were appended here."""
        self._short: list[JournalEntry] | None = None if self._entries else []
        """What was appended inside of nodes and may be shortened, as it would be; None if that is not known here."""
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
        """The journal of a run, with all that was recorded so far."""
        must_be_name("run_id", run_id)
        return cls(store, run_id, await store.load(run_id), epoch=epoch, replay_only=replay_only, clock=clock)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[JournalEntry]:
        return iter(self._entries.values())

    # Where.

    def here(self) -> Scope:
        """The place in this run where this is being executed."""
        place = here.get()
        return place if place is not None and place.run is self.root.run else self.root

    def key(self, name: str) -> str:
        """The key of the next thing of that name at this place."""
        return self.here().next("value", name).path

    # What was.

    def find(self, key: str) -> JournalEntry | None:
        """What is recorded under the key; None if nothing is. A run that is only replayed raises JournalMissing."""
        if self._broken is not None:
            raise self._broken
        entry = self._entries.get(key)
        if entry is None and self.replay_only:
            self._broken = JournalMissing(self.run_id, key)
            raise self._broken
        return entry

    def peek(self, key: str) -> JournalEntry | None:
        """What is recorded under the key; None if nothing is."""
        return self._entries.get(key)

    def under(self, key: str) -> list[JournalEntry]:
        """What is recorded inside of that place, any attempt at it included, in the order it was written."""
        found = [*self._starting_with(f"{key}/"), *self._starting_with(f"{key}~")]
        return [self._entries[one] for one in sorted(found, key=self._order.__getitem__)]

    def _starting_with(self, prefix: str) -> list[str]:
        keys, first = self._keys, bisect_left(self._keys, prefix)
        last = first
        while last < len(keys) and keys[last].startswith(prefix):
            last += 1
        return keys[first:last]

    # What is.

    async def append(
        self, key: str, kind: EntryKind, value: Any, cost_nanos: int = 0, tokens_in: int = 0, tokens_out: int = 0
    ) -> None:
        """Write an entry down; when this returns, it survives the process."""
        at_ms = self._clock.time_ns() // 1_000_000
        entry = JournalEntry(key, kind, value, cost_nanos, tokens_in, tokens_out, at_ms)
        if points.hook is not None:
            points.hook(f"{kind}.before_append")
        if self._broken is not None:
            raise self._broken
        try:
            await self._store.append(self.run_id, [entry], epoch=self.epoch)
        except Exception as error:
            self._broken = error
            raise
        self.recorded += 1
        if self._short is not None:
            self._remember(entry)
        if points.hook is not None:
            points.hook(f"{kind}.after_append")

    def _remember(self, entry: JournalEntry) -> None:
        """So that the run need not be read again to be shortened."""
        assert self._short is not None
        if entry.kind == "node":
            self._whole.add(entry.key)
        if outermost(entry.key) != entry.key and (short := _short(entry.value)) != entry.value:
            used = entry.cost_nanos, entry.tokens_in, entry.tokens_out
            self._short.append(JournalEntry(entry.key, entry.kind, short, *used, entry.at_ms))
        if len(self._short) > MAX_SHORT or len(self._whole) > MAX_SHORT:
            self._short = None
            self._whole.clear()

    def shortened(self) -> list[JournalEntry] | None:
        """`shortened` of all that is recorded; None if this process does not know all of it."""
        if self._short is None:
            return None
        return [entry for entry in self._short if outermost(entry.key) in self._whole]

    async def value(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make()` gave the first time the run came here: a time, an id, an answer. It may be async."""
        place = self.here().next("value", name)
        found = self.find(place.path)
        if found is not None:
            self.replayed += 1
            return found.value
        made = make()
        if isawaitable(made):
            made = await made
        must_be_json(f"value {name!r}", made)
        await self.append(place.path, "value", made)
        return made

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
    """Give a new run what another one has recorded, but for what `without` says is to run again; what it was given.

    Which node an entry belongs to is `keys.entry_node(entry.key)`. Forking again changes nothing.
    """
    if from_run == to_run:
        raise InvalidValue("to_run", to_run, "the id of another run than the one that is forked")
    kept = [entry for entry in await store.load(from_run) if not without(entry)]
    if points.hook is not None:
        points.hook("fork.before_append")
    if kept:
        await store.append(to_run, kept, epoch=epoch)
    if points.hook is not None:
        points.hook("fork.after_append")
    return kept


def shortened(entries: Iterable[JournalEntry]) -> list[JournalEntry]:
    """Those that stand inside of nodes which are there as a whole, without what they gave.

    The node is found, and what it did inside is only counted then: who, how much, and what state it left.
    """
    listed = list(entries)
    whole = {entry.key for entry in listed if entry.kind == "node"}
    inside = [entry for entry in listed if (node := outermost(entry.key)) in whole and node != entry.key]
    return [entry._replace(value=short) for entry in inside if (short := _short(entry.value)) != entry.value]


def _short(value: Any) -> Any:
    """What a replay asks of an entry that is only counted."""
    if not isinstance(value, dict):
        return None
    kept = {name: value[name] for name in ("name", "model", "state", "is_error", COST_UNKNOWN) if name in value}
    if value.get("finish_reason") in NOT_WHOLE:
        kept["finish_reason"] = value["finish_reason"]
    if value.get("is_error"):
        kept["content"] = str(value.get("content"))[:SHORT_CHARACTERS]
    return kept


def must_be_json(where: str, value: Any) -> None:
    """Raise NotRecordable if `value` would not come back from JSON as it is."""
    wrong = _wrong(value, 0)
    if wrong is not None:
        raise NotRecordable(where, wrong)


def is_json(value: Any) -> bool:
    """Whether `value` comes back from JSON as it is."""
    return _wrong(value, 0) is None


def _wrong(value: Any, depth: int) -> str | None:
    """What of it is no JSON; None if it all is."""
    kind = type(value)
    if kind in PLAIN:
        return None
    if kind is not dict and kind is not list:  # nothing that is one of these can be one of those
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
        # What `_wrong` says of nearly all of them, without asking it.
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
