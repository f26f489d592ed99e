"""The data of one person: the port of the store that finds, renames and forgets it.

A person is a name: the owner of runs, chats and memories, and the actor of the audit log. Runs and chats are removed by
their own stores; this one knows every other place where a name stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

OWNED = ("runs.owner", "chats.owner", "attachments.owner", "memories.owner")
"""Where a name means data of that person, which is removed."""
NAMED = (
    "tokens.name",
    "tokens.created_by",
    "tokens.revoked_by",
    "graphs.owner",
    "graph_versions.saved_by",
    "approvals.answered_by",
    "spending.owner",
    "audit.actor",
    "audit.owner",
)
"""Where a name only says who it was, which is replaced."""


class PersonStore(Protocol):
    """Finds and forgets a person in all tables."""

    async def places(self, name: str) -> Mapping[str, int]:
        """Return how many rows have the name, by place: those of `OWNED` and `NAMED` that have any."""

    async def attachments(self, name: str) -> Sequence[str]:
        """Return the ids of the person's attachments, in the order of ids."""

    async def forget(self, name: str, pseudonym: str) -> Mapping[str, int]:
        """Remove attachments and memories, and replace the name; return how many rows were changed, by place.

        Conflict, with nothing changed, while runs or chats of the person are stored.
        """
