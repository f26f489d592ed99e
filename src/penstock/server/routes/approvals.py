"""Approvals: what runs ask people, and what they answer."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from penstock.hosting.records import ApprovalState
from penstock.server.auth import User
from penstock.server.parts import (
    KNOWN_QUERY,
    Asker,
    PageSize,
    Parts,
    PathId,
    QueryId,
    Service,
    check_place,
    readable,
    whose,
)
from penstock.server.schemas import ApprovalPage, ApprovalShown, Edit, Verdict

router = APIRouter(prefix="/api/approvals", tags=["approvals"], dependencies=[KNOWN_QUERY])


@router.get("")
async def list_approvals(
    service: Service,
    user: Asker,
    state: Annotated[list[ApprovalState] | None, Query(max_length=5)] = None,
    run_id: QueryId = None,
    owner: QueryId = None,
    before: QueryId = None,
    limit: PageSize = 100,
) -> ApprovalPage:
    """Questions of one's own runs, the oldest first; those that wait, unless states are named."""
    approvals = service.stores.approvals
    if before is not None:
        check_place("approval", await approvals.get(before), user)
    found = await approvals.list(
        run_id=run_id, owner=whose(user, owner), states=state or ("waiting",), before=before, limit=limit + 1
    )
    shown = [ApprovalShown.of(one) for one in found[:limit]]
    return ApprovalPage(approvals=shown, next=shown[-1].id if len(found) > limit else None)


@router.get("/{approval_id}")
async def get_approval(approval_id: PathId, service: Service, user: Asker) -> ApprovalShown:
    """One question, and its answer if there is one."""
    return ApprovalShown.of(readable("approval", await service.stores.approvals.get(approval_id), user))


@router.post("/{approval_id}/approve")
async def approve(approval_id: PathId, service: Service, user: Asker, body: Verdict | None = None) -> ApprovalShown:
    """Let it go on as it is; 409 if somebody answered before."""
    return await _answered(service, user, approval_id, "approved", (body or Verdict()).reason)


@router.post("/{approval_id}/edit")
async def edit(approval_id: PathId, body: Edit, service: Service, user: Asker) -> ApprovalShown:
    """Let it go on with something else."""
    return await _answered(service, user, approval_id, "edited", body.reason, body.answer)


@router.post("/{approval_id}/reject")
async def reject(approval_id: PathId, service: Service, user: Asker, body: Verdict | None = None) -> ApprovalShown:
    """Do not let it go on this way."""
    return await _answered(service, user, approval_id, "rejected", (body or Verdict()).reason)


async def _answered(
    service: Parts, user: User, approval_id: str, state: ApprovalState, reason: str, answer: Any = None
) -> ApprovalShown:
    readable("approval", await service.stores.approvals.get(approval_id), user)
    return ApprovalShown.of(await service.host.answer(approval_id, state, answer=answer, reason=reason, by=user.name))
