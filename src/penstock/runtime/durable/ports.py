"""Where a journal is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

EntryKind = Literal["node", "llm", "tool", "value"]


class JournalEntry(NamedTuple):
    """What came of one piece of work, under the key that it has each time the run comes to it."""

    key: str
    """Where in the run: node, iteration, and which one there."""
    kind: EntryKind
    value: Any
    """What it gave, as JSON."""
    cost_nanos: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    at_ms: int = 0


class JournalStore(Protocol):
    """What runs have done, by key; written once."""

    async def load(self, run_id: str) -> Sequence[JournalEntry]:
        """All entries of the run, in the order they were written."""

    async def append(self, run_id: str, entries: Sequence[JournalEntry], *, epoch: int = 0) -> None:
        """Keep them, all or none; when this returns they survive the process. A key that is there already is skipped.

        `epoch` is that of the claim under which the run is worked on, where runs are claimed: a claim that another
        worker has taken over is refused (`hosting.ports.Fenced`). 0 where nobody claims.
        """

    async def shorten(self, run_id: str, entries: Sequence[JournalEntry], *, epoch: int = 0) -> None:
        """Put these in the place of those that have their keys, all or none; a key that is not there stays away.

        The one change that a journal knows: what nobody can ask for any more need not be kept whole.
        """

    async def forget(self, run_id: str) -> None:
        """The run is not wanted any more."""
