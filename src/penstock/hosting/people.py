"""The data of one person: the port of the store that finds, renames and forgets it.

A person is a name: the owner of runs, chats and memories, and the actor of the audit log. Runs and chats are removed by
their own stores; this store covers every other place where a name is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

OWNED = ("runs.owner", "chats.owner", "attachments.owner", "memories.owner")
"""Places where the name marks data as that person's; the data is removed."""
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
"""Places where the name only identifies the person; the name is replaced."""


class PersonStore(Protocol):
    """Finds and forgets a person in all tables."""

    async def places(self, name: str) -> Mapping[str, int]:
        """Return the number of rows with the name, by place of `OWNED` and `NAMED`; places without any are left out."""

    async def attachments(self, name: str) -> Sequence[str]:
        """Return the ids of the person's attachments, in the order of ids."""

    async def forget(self, name: str, pseudonym: str) -> Mapping[str, int]:
        """Remove attachments and memories, and replace the name; return how many rows were changed, by place.

        Conflict, with nothing changed, while runs or chats of the person are stored.
        """
