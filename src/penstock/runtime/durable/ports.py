"""The storage port of journals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

EntryKind = Literal["node", "llm", "tool", "value"]


class JournalEntry(NamedTuple):
    """The result of one piece of work, under the key that it has each time the run reaches it."""

    key: str
    """Place in the run: node, iteration, and number there."""
    kind: EntryKind
    value: Any
    """The result, as JSON."""
    cost_nanos: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    at_ms: int = 0


class JournalStore(Protocol):
    """Journal entries of runs, by key; each key is written once."""

    async def load(self, run_id: str) -> Sequence[JournalEntry]:
        """Return all entries of the run, in the order they were written."""

    async def append(self, run_id: str, entries: Sequence[JournalEntry], *, epoch: int = 0) -> None:
        """Store the entries, all or none; when this returns they survive the process. Existing keys are skipped.

        `epoch` is that of the claim under which the run is worked on, where runs are claimed: a claim that another
        worker has taken over is refused (`hosting.ports.Fenced`). 0 where runs are not claimed.
        """

    async def shorten(self, run_id: str, entries: Sequence[JournalEntry], *, epoch: int = 0) -> None:
        """Replace the entries that have these keys, all or none; keys that do not exist are skipped.

        The only change a journal allows: content that can no longer be requested need not be kept in full.
        """

    async def forget(self, run_id: str) -> None:
        """Remove all entries of the run."""
