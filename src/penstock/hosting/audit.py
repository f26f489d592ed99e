"""The audit log of people's actions on runs, approvals, bills, graphs, chats and tokens, and the port of its store.

An entry has the actor, the action, the target, the time and the source: HTTP, or the command line of the database. It
has the figures and reasons that the person gave, but none of the input or output of runs. Entries are never changed,
except that the name of a person whose data is erased is replaced everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

AuditSource = Literal["api", "cli"]
AUDIT_SOURCES: tuple[AuditSource, ...] = get_args(AuditSource)


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One action of a person."""

    id: str
    at_ms: int
    actor: str
    """Name of the user of the token; on the command line, of the user of the machine."""
    action: str
    """Name of the action, such as `run.cancel`."""
    target: str = ""
    """Id of the object of the action."""
    owner: str = ""
    """Owner of the target; empty if it has none, or is the actor's own."""
    source: AuditSource = "api"
    details: Mapping[str, Any] = field(default_factory=dict)
    """Figures and reasons; never names of people, which are `actor` and `owner`."""


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """Conditions on a list of entries; None and empty text apply none."""

    actor: str | None = None
    """Entries of this person, and entries about objects that belong to them."""
    action: str | None = None
    """This action, or all actions that begin with it and a dot."""
    target: str | None = None
    since_ms: int | None = None
    until_ms: int | None = None
    """The entry is older than this."""


NO_AUDIT_FILTER = AuditFilter()


class AuditStore(Protocol):
    """Entries by id, ordered by time and id."""

    async def append(self, entry: AuditRecord) -> None:
        """Store an entry; do nothing if one with its id is stored."""

    async def list(
        self, matching: AuditFilter = NO_AUDIT_FILTER, *, before: str | None = None, limit: int = 100
    ) -> Sequence[AuditRecord]:
        """Return entries, newest first (by at_ms, then id); `before` is the last id of the previous page."""

    async def rename(self, name: str, pseudonym: str) -> int:
        """Replace the name of a person, as actor and as owner; return the number of entries that had it."""

    async def remove_before(self, before_ms: int, *, limit: int = 1_000) -> int:
        """Remove entries older than this time, oldest first, at most `limit`; return how many."""
