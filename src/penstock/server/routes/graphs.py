"""Graphs: readable by every authenticated user, changed by their owners and admins."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import islice
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from penstock.hosting.ports import GraphRecord, newest_to_replace
from penstock.kernel.document import parse_graph
from penstock.nodes.program import SERVICE as PROGRAMS
from penstock.nodes.program import is_program, program_name
from penstock.server import audit
from penstock.server.auth import User, reserved
from penstock.server.caching import REVALIDATED, revalidated
from penstock.server.errors import ApiError, not_found, problem_details
from penstock.server.graph_diff import diff
from penstock.server.schemas import (
    MAX_NAME,
    MAX_VERSION,
    ChangeShown,
    GraphDiff,
    GraphDocument,
    GraphListed,
    GraphPage,
    GraphShown,
    GraphSummary,
    GraphVersion,
    LayoutChange,
    LayoutShown,
    NewGraph,
    Validity,
)
from penstock.server.state import KNOWN_QUERY, CurrentUser, PageSize, PathId, QueryId, ServerState, Service

router = APIRouter(prefix="/api/graphs", tags=["graphs"], dependencies=[KNOWN_QUERY])

RESERVED = reserved("/api/graphs/{graph_id}")
MAX_CHANGES = 1_000
"""Maximum number of changes in a diff."""

SOURCE: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"application/json": {"schema": {"type": "object"}}},
        "description": "The document as it was written",
    },
    204: {"description": "The version has no text of its own"},
}

VersionQuery = Annotated[int | None, Query(ge=1, le=MAX_VERSION)]


@router.get("")
async def list_graphs(
    service: Service,
    before: QueryId = None,
    limit: PageSize = 100,
    owner: QueryId = None,
    q: Annotated[str | None, Query(max_length=MAX_NAME, pattern=r"^[^\x00-\x1f\x7f]*$")] = None,
    archived: bool = False,
) -> GraphPage:
    """List the newest version of each graph, by id; `q` is a part of its id or name. `archived` lists archived ones."""
    found = await service.stores.graphs.list(
        owner=owner, before=before, limit=limit + 1, text=q or None, is_archived=archived
    )
    shown = [
        GraphListed.of(record, await service.graphs.problems(record), can_chat=await service.graphs.can_chat(record))
        for record in found[:limit]
    ]
    return GraphPage(graphs=shown, next=shown[-1].id if len(found) > limit else None)


@router.post("", status_code=201)
async def create_graph(body: NewGraph, service: Service, user: CurrentUser) -> GraphShown:
    """Save a new graph; 409 if its id is taken by a different one. For a draft, `problems` says why it cannot run."""
    if body.id in RESERVED:
        raise ApiError(
            422, f"a graph cannot have the id {body.id}: /api/graphs/{body.id} is another route", path="$.id"
        )
    document = await asyncio.to_thread(_parsed, body.document)
    existing = await newest_to_replace(service.stores.graphs, body.id)
    _must_not_be_served(service, existing)
    expected = 0 if existing is None or existing.document != document else None
    saved = await _save(service, body.id, user.name, body.name, document, expected, body, saved_by=user.name)
    return await _shown(service, saved)


@router.post("/validate")
async def validate_graph(body: GraphDocument, service: Service, handles: bool = True) -> Validity:
    """Return all problems that prevent a graph from running, and the handles of its nodes, without saving it."""
    problems = await service.graphs.problems_in(body.document)
    shown = await service.graphs.handles_in(body.document) if handles else None
    details = list(problem_details(problems))
    return Validity.model_validate({"valid": not problems, "problems": details, "handles": shown})


@router.get("/{graph_id}", response_model=GraphShown, responses=REVALIDATED)
async def get_graph(graph_id: PathId, request: Request, service: Service, version: VersionQuery = None) -> Response:
    """Return one version of a graph, the newest by default."""
    return revalidated(request, await _shown(service, await _version(service, graph_id, version)))


@router.put("/{graph_id}")
async def put_graph(graph_id: PathId, body: GraphVersion, service: Service, user: CurrentUser) -> GraphShown:
    """Save the next version of a graph, or the first; 409 if the newest is not `expected_version`.

    Drafts are saved too: `valid` says whether the graph can run, and `problems` what prevents it.
    """
    document = await asyncio.to_thread(_parsed, body.document)
    record = await newest_to_replace(service.stores.graphs, graph_id)
    _must_not_be_served(service, record)
    owner = user.name if record is None else _changeable(record, user).owner
    name = body.name or (graph_id if record is None else record.name)
    expected = body.expected_version
    saved = await _save(service, graph_id, owner, name, document, expected, body, saved_by=user.name)
    return await _shown(service, saved)


@router.delete("/{graph_id}", status_code=204)
async def archive_graph(graph_id: PathId, service: Service, user: CurrentUser) -> None:
    """Archive a graph: it is not listed and cannot start new runs until it is saved again.

    Its versions can still be read; its existing runs continue, and can be resumed and forked.
    """
    record = await newest_to_replace(service.stores.graphs, graph_id)
    if record is None:
        raise not_found("graph")
    _changeable(record, user)
    _must_not_be_served(service, record)
    await service.stores.graphs.archive(graph_id)
    audit.note(owner=record.owner)


@router.get("/{graph_id}/versions")
async def list_versions(graph_id: PathId, service: Service) -> list[GraphSummary]:
    """List all versions of a graph, newest first."""
    found = await service.stores.graphs.versions(graph_id)
    if not found:
        raise not_found("graph")
    return [GraphSummary.model_validate(record) for record in found]


@router.get("/{graph_id}/diff")
async def diff_versions(
    graph_id: PathId,
    service: Service,
    before: Annotated[int, Query(ge=1, le=MAX_VERSION)],
    after: VersionQuery = None,
) -> GraphDiff:
    """List what changed from version `before` to version `after`, the newest by default; positions are left out."""
    first, second = await _version(service, graph_id, before), await _version(service, graph_id, after)
    changes = await asyncio.to_thread(lambda: list(islice(diff(first.document, second.document), MAX_CHANGES + 1)))
    return GraphDiff(
        graph_id=graph_id,
        before=GraphSummary.model_validate(first),
        after=GraphSummary.model_validate(second),
        changes=[ChangeShown.model_validate(change) for change in changes[:MAX_CHANGES]],
        truncated=len(changes) > MAX_CHANGES,
    )


@router.get("/{graph_id}/source", response_class=Response, responses=SOURCE)
async def get_source(graph_id: PathId, service: Service, version: VersionQuery = None) -> Response:
    """Return the JSON text that a version was saved with, byte for byte; 204 if it was saved without one."""
    if await service.stores.graphs.head(graph_id, version) is None:
        raise not_found("graph")
    text = await service.stores.graphs.source(graph_id, version)
    return Response(text, media_type="application/json") if text else Response(status_code=204)


@router.get("/{graph_id}/layout")
async def get_layout(graph_id: PathId, service: Service) -> LayoutShown:
    """Return the stored positions of a graph's nodes; a node without one is drawn where its document says."""
    if await service.stores.graphs.head(graph_id) is None:
        raise not_found("graph")
    return LayoutShown.model_validate({"positions": await service.stores.graphs.layout(graph_id)})


@router.patch("/{graph_id}/layout")
async def change_layout(graph_id: PathId, body: LayoutChange, service: Service, user: CurrentUser) -> LayoutShown:
    """Store positions of nodes, without a new version; the other positions stay as they are."""
    record = await _version(service, graph_id, None)
    _changeable(record, user)
    changes = body.model_dump()["positions"]
    merged = await service.stores.graphs.arrange(graph_id, changes)
    return LayoutShown.model_validate({"positions": merged})


async def _version(service: ServerState, graph_id: str, version: int | None) -> GraphRecord:
    record: GraphRecord | None = await service.stores.graphs.get(graph_id, version)
    if record is None:
        raise not_found("graph")
    return record


async def _shown(service: ServerState, record: GraphRecord) -> GraphShown:
    problems = await service.graphs.problems(record)
    return GraphShown.whole(record, problems, can_chat=await service.graphs.can_chat(record))


async def _save(
    service: ServerState,
    graph_id: str,
    owner: str,
    name: str,
    document: dict[str, Any],
    expected: int | None,
    body: NewGraph | GraphVersion,
    *,
    saved_by: str,
) -> GraphRecord:
    """Save the graph and return its record; an archived graph is restored."""
    now_ms = service.now_ms()
    texts = {"saved_by": saved_by, "note": body.note, "source": body.source or ""}
    saved: GraphRecord = await service.stores.graphs.save(
        graph_id, owner, name, document, now_ms=now_ms, expected_version=expected, **texts
    )
    audit.note(target=graph_id, owner=saved.owner, version=saved.version)
    if saved.is_archived:
        await service.stores.graphs.archive(graph_id, is_archived=False)
    return replace(saved, is_archived=False)


def _changeable(record: GraphRecord, user: User) -> GraphRecord:
    if not user.may_see(record.owner):
        raise ApiError(403, f"graph {record.id} belongs to {record.owner}; save it under another id to change it")
    return record


def _must_not_be_served(service: ServerState, record: GraphRecord | None) -> None:
    """Raise 409 for the graph of a program that this server serves: it follows its code."""
    name = None if record is None else program_name(record.document)
    if record is not None and name is not None and name in (service.host.services.get(PROGRAMS) or {}):
        advice = "change its code, or save a graph under another id"
        raise ApiError(409, f"graph {record.id} is a Python program and cannot be changed here; {advice}")


def _parsed(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document if it is well formed; it need not be runnable, since drafts are allowed."""
    parse_graph(document)
    if is_program(document):
        advice = "remove it; a `program` node may run a program that the server was started with"
        raise ApiError(422, f"only the server saves graphs with the source `program`; {advice}", path="$.source")
    return document
