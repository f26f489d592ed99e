"""Approvals: questions of runs to people, and their decisions."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from penstock.hosting.ports import ApprovalState
from penstock.server.audit import note
from penstock.server.auth import User
from penstock.server.schemas import ApprovalPage, ApprovalShown, Edit, Verdict
from penstock.server.state import (
    KNOWN_QUERY,
    CurrentUser,
    PageSize,
    PathId,
    QueryId,
    ServerState,
    Service,
    check_cursor,
    owner_filter,
    readable,
)

router = APIRouter(prefix="/api/approvals", tags=["approvals"], dependencies=[KNOWN_QUERY])


@router.get("")
async def list_approvals(
    service: Service,
    user: CurrentUser,
    state: Annotated[list[ApprovalState] | None, Query(max_length=5)] = None,
    run_id: QueryId = None,
    owner: QueryId = None,
    before: QueryId = None,
    limit: PageSize = 100,
) -> ApprovalPage:
    """List approvals of your own runs, oldest first; only waiting ones unless `state` is given."""
    approvals = service.stores.approvals
    if before is not None:
        await check_cursor("approval", approvals.get(before), user)
    found = await approvals.list(
        run_id=run_id, owner=owner_filter(user, owner), states=state or ("waiting",), before=before, limit=limit + 1
    )
    shown = [ApprovalShown.of(approval) for approval in found[:limit]]
    return ApprovalPage(approvals=shown, next=shown[-1].id if len(found) > limit else None)


@router.get("/{approval_id}")
async def get_approval(approval_id: PathId, service: Service, user: CurrentUser) -> ApprovalShown:
    """Return one approval, with its answer if it has one."""
    return ApprovalShown.of(readable("approval", await service.stores.approvals.get(approval_id), user))


@router.post("/{approval_id}/approve")
async def approve(
    approval_id: PathId, service: Service, user: CurrentUser, body: Verdict | None = None
) -> ApprovalShown:
    """Approve: the run continues with the value unchanged; 409 if the approval is already answered."""
    return await _answer(service, user, approval_id, "approved", (body or Verdict()).reason)


@router.post("/{approval_id}/edit")
async def edit(approval_id: PathId, body: Edit, service: Service, user: CurrentUser) -> ApprovalShown:
    """Approve with changes: the run continues with `answer` in place of the value."""
    return await _answer(service, user, approval_id, "edited", body.reason, body.answer)


@router.post("/{approval_id}/reject")
async def reject(
    approval_id: PathId, service: Service, user: CurrentUser, body: Verdict | None = None
) -> ApprovalShown:
    """Reject: the run does not continue with the value."""
    return await _answer(service, user, approval_id, "rejected", (body or Verdict()).reason)


async def _answer(
    service: ServerState, user: User, approval_id: str, state: ApprovalState, reason: str, answer: Any = None
) -> ApprovalShown:
    approval = readable("approval", await service.stores.approvals.get(approval_id), user)
    note(run_id=approval.run_id, node_id=approval.node_id, reason=reason)
    return ApprovalShown.of(await service.host.answer(approval_id, state, answer=answer, reason=reason, by=user.name))
