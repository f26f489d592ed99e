"""Views of one run, or of two: its call tree as columns and as text, its budgets, and how two runs differ."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query

from penstock.hosting.call_columns import MAX_TREE_CALLS
from penstock.hosting.ports import RunRecord
from penstock.hosting.retention import DAY_S
from penstock.hosting.run_diff import NODE_ENDS, field_differences, node_differences, node_ends
from penstock.hosting.run_explanation import explain_columns
from penstock.server.errors import not_found
from penstock.server.schemas import (
    BudgetList,
    BudgetShown,
    CallPayload,
    Difference,
    RunDiff,
    RunExplanation,
    RunShown,
    RunTree,
)
from penstock.server.state import KNOWN_QUERY, CurrentUser, PathId, QueryId, ServerState, Service, readable_run
from penstock.server.trees import PAGE
from penstock.server.unavailable import public

router = APIRouter(prefix="/api/runs", tags=["runs"], dependencies=[KNOWN_QUERY])


@router.get("/{run_id}/tree")
async def get_tree(
    run_id: PathId,
    service: Service,
    user: CurrentUser,
    under: Annotated[QueryId, Query(description="Only this call and all below it")] = None,
    depth: Annotated[
        int | None,
        Query(ge=0, le=MAX_TREE_CALLS, description="Only calls so far below the first; 0 is the first alone"),
    ] = None,
) -> RunTree:
    """Return the call tree of a run as columns, up to the event `last_seq`; follow the events after it from there.

    404 if the call `under` is not in the tree.
    """
    run = await readable_run(service, run_id, user)
    tree = await service.trees.tree(service.stores.events, run_id)
    now: RunRecord = await service.host.get(run_id) or run
    if under is None and depth is None:
        return RunTree(run_id=run_id, status=now.status, **tree.to_dict())
    try:
        part = tree.part(under, depth)
    except KeyError:
        raise not_found("call") from None
    return RunTree(run_id=run_id, status=now.status, **part)


@router.get("/{run_id}/explain")
async def explain(run_id: PathId, service: Service, user: CurrentUser) -> RunExplanation:
    """Explain a run in words: its calls as lines of text, whose limit stopped it, and what helps."""
    run = await readable_run(service, run_id, user)
    tree = await service.trees.tree(service.stores.events, run_id)
    text, left_out = explain_columns(tree)
    return RunExplanation.of(await service.host.get(run_id) or run, text, left_out, tree.last_seq)


@router.get("/{run_id}/budgets")
async def get_budgets(run_id: PathId, service: Service, user: CurrentUser) -> BudgetList:
    """Return the spent, held and remaining amounts of the run's own budget and of the daily budgets above it.

    The figures come from the ledger, which every server sees; budgets inside a run are in its `budget` events.
    """
    run = await readable_run(service, run_id, user)
    seq = await service.stores.events.last_seq(run_id)
    budgets = [BudgetShown.model_validate(data) for data in await service.host.budgets(run)]
    return BudgetList(budgets=budgets, last_seq=seq)


@router.get("/{run_id}/calls/{call_id}")
async def get_call(run_id: PathId, call_id: PathId, service: Service, user: CurrentUser) -> CallPayload:
    """Return the recorded request and response of a call; `recording` is `off` if nothing is stored."""
    run = await readable_run(service, run_id, user)
    payload = await service.stores.payloads.get(run_id, call_id)
    oldest_ms = service.now_ms() - round(service.host.settings.keep_payload_days * DAY_S * 1_000)
    if payload is not None and payload.epoch == run.epoch and payload.at_ms >= oldest_ms:
        return CallPayload.of(payload)  # in an earlier epoch, the id was another call's: ids restart with each claim
    tree = await service.trees.tree(service.stores.events, run_id)
    ended_ms = tree.end_of(call_id)
    if ended_ms is None and not tree.left_out:
        raise not_found("call")
    return CallPayload.none(call_id, expired=ended_ms is not None and ended_ms < oldest_ms)


@router.get("/{run_id}/diff/{other_id}")
async def diff_runs(run_id: PathId, other_id: PathId, service: Service, user: CurrentUser) -> RunDiff:
    """Compare two runs: limits, input, how each node ended, cost and output; empty if they do not differ."""
    runs = [await readable_run(service, id, user) for id in (run_id, other_id)]
    first, second = [RunShown.whole(run, 0).model_dump(mode="json") for run in runs]
    nodes, other_nodes = [await _node_ends(service, run.id) for run in runs]
    found = [*field_differences(first, second), *node_differences(nodes, other_nodes)]
    return RunDiff(differences=[Difference(what=what, one=one, other=other) for what, one, other in found])


async def _node_ends(service: ServerState, run_id: str) -> dict[str, Any]:
    ends: dict[str, Any] = {}
    place = 0
    while page := await service.stores.events.read(run_id, place, PAGE, NODE_ENDS):
        ends |= node_ends((event.type, public(event).data) for event in page)
        place = page[-1].seq
        await asyncio.sleep(0)  # a long log must not block the event loop
    return ends
