"""The audit log, for admins."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from penstock.hosting.audit import AuditFilter, AuditRecord, AuditSource
from penstock.server.schemas import Shown
from penstock.server.state import KNOWN_QUERY, PageSize, QueryId, Service

router = APIRouter(prefix="/api/audit", tags=["audit"], dependencies=[KNOWN_QUERY])

MAX_MS = 2**53 - 1
TEXT = r"^[^\x00-\x1f\x7f]+$"


class AuditEntry(Shown):
    """One recorded action of a person."""

    id: str
    at_ms: int
    actor: str
    action: str
    target: str
    owner: str
    source: AuditSource
    details: dict[str, Any]

    @classmethod
    def of(cls, entry: AuditRecord) -> AuditEntry:
        """Convert a record."""
        return cls.model_validate(entry, from_attributes=True)


class AuditPage(Shown):
    """Entries, newest first."""

    entries: list[AuditEntry]
    next: str | None = None


@router.get("")
async def list_entries(
    service: Service,
    actor: Annotated[
        str | None, Query(max_length=200, pattern=TEXT, description="Entries of this person, or about their things")
    ] = None,
    action: Annotated[
        str | None, Query(max_length=200, pattern=TEXT, description="An action, such as run.cancel, or a kind: run")
    ] = None,
    target: Annotated[str | None, Query(max_length=200, pattern=TEXT, description="Id of what was acted on")] = None,
    since: Annotated[int | None, Query(ge=0, le=MAX_MS, description="At this time, in ms, or later")] = None,
    until: Annotated[int | None, Query(ge=0, le=MAX_MS, description="Before this time, in ms")] = None,
    before: QueryId = None,
    limit: PageSize = 100,
) -> AuditPage:
    """List the actions of people, newest first."""
    matching = AuditFilter(actor, action, target, since, until)
    found = await service.stores.audit.list(matching, before=before, limit=limit + 1)
    shown = [AuditEntry.of(entry) for entry in found[:limit]]
    return AuditPage(entries=shown, next=shown[-1].id if len(found) > limit else None)
