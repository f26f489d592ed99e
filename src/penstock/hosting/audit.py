"""The audit log: what people did to runs, approvals, bills, graphs, chats and tokens, and the port of its store.

An entry says who did what to which thing, when, and where: over HTTP, or on the command line of the database. It has
figures and reasons that the person gave, and nothing of what runs were given or wrote. Entries are never changed,
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
    """One thing that a person did."""

    id: str
    at_ms: int
    actor: str
    """Name of the user of the token; on the command line, of the user of the machine."""
    action: str
    """What was done, such as `run.cancel`."""
    target: str = ""
    """Id of the thing it was done to."""
    owner: str = ""
    """Whose thing it is; empty if it has no owner, or the actor's own."""
    source: AuditSource = "api"
    details: Mapping[str, Any] = field(default_factory=dict)
    """Figures and reasons; never names of people, which are `actor` and `owner`."""


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """Which entries a list contains; None and empty text apply no condition."""

    actor: str | None = None
    """Entries of this person, and entries about their things."""
    action: str | None = None
    """This action, or all that begin with it and a dot."""
    target: str | None = None
    since_ms: int | None = None
    until_ms: int | None = None
    """The entry is older than this."""


NO_AUDIT_FILTER = AuditFilter()


class AuditStore(Protocol):
    """Entries by id, ordered by time and id."""

    async def append(self, entry: AuditRecord) -> None:
        """Store an entry; one whose id is stored changes nothing."""

    async def list(
        self, matching: AuditFilter = NO_AUDIT_FILTER, *, before: str | None = None, limit: int = 100
    ) -> Sequence[AuditRecord]:
        """Return entries, newest first (by at_ms, then id); `before` is the last id of the previous page."""

    async def rename(self, name: str, pseudonym: str) -> int:
        """Replace the name of a person, as actor and as owner; return the number of entries that had it."""

    async def remove_before(self, before_ms: int, *, limit: int = 1_000) -> int:
        """Remove entries older than this time, oldest first, at most `limit`; return how many."""
