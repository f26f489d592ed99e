"""Graphs: readable by every authenticated user, changed by their owners and admins."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Query

from penstock.hosting.ports import GraphRecord, newest_to_replace
from penstock.kernel.document import parse_graph
from penstock.nodes.program import SERVICE as PROGRAMS
from penstock.nodes.program import is_program, program_name
from penstock.server.auth import User, reserved
from penstock.server.errors import ApiError, not_found, problem_details
from penstock.server.schemas import (
    GraphDocument,
    GraphListed,
    GraphPage,
    GraphShown,
    GraphSummary,
    GraphVersion,
    NewGraph,
    Validity,
)
from penstock.server.state import KNOWN_QUERY, CurrentUser, PageSize, PathId, QueryId, ServerState, Service

router = APIRouter(prefix="/api/graphs", tags=["graphs"], dependencies=[KNOWN_QUERY])

RESERVED = reserved("/api/graphs/{graph_id}")


@router.get("")
async def list_graphs(
    service: Service, before: QueryId = None, limit: PageSize = 100, owner: QueryId = None
) -> GraphPage:
    """List the newest version of each graph that is not archived, by id."""
    found = await service.stores.graphs.list(owner=owner, before=before, limit=limit + 1)
    shown = [GraphListed.of(record, await service.graphs.problems(record)) for record in found[:limit]]
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
    return await _shown(service, await _save(service, body.id, user.name, body.name, document, expected))


@router.post("/validate")
async def validate_graph(body: GraphDocument, service: Service) -> Validity:
    """Return all problems that prevent a graph from running, without saving or running it."""
    problems = await service.graphs.problems_in(body.document)
    details = list(problem_details(problems))
    return Validity.model_validate({"valid": not problems, "problems": details})


@router.get("/{graph_id}")
async def get_graph(
    graph_id: PathId, service: Service, version: int | None = Query(None, ge=1, le=2**31 - 1)
) -> GraphShown:
    """Return one version of a graph, the newest by default."""
    record = await service.stores.graphs.get(graph_id, version)
    if record is None:
        raise not_found("graph")
    return await _shown(service, record)


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
    return await _shown(service, await _save(service, graph_id, owner, name, document, body.expected_version))


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


@router.get("/{graph_id}/versions")
async def list_versions(graph_id: PathId, service: Service) -> list[GraphSummary]:
    """List all versions of a graph, newest first."""
    found = await service.stores.graphs.versions(graph_id)
    if not found:
        raise not_found("graph")
    return [GraphSummary.model_validate(record) for record in found]


async def _shown(service: ServerState, record: GraphRecord) -> GraphShown:
    return GraphShown.whole(record, await service.graphs.problems(record))


async def _save(
    service: ServerState, graph_id: str, owner: str, name: str, document: dict[str, Any], expected: int | None
) -> GraphRecord:
    """Save the graph and return its record; an archived graph is restored."""
    now_ms = service.now_ms()
    saved: GraphRecord = await service.stores.graphs.save(
        graph_id, owner, name, document, now_ms=now_ms, expected_version=expected
    )
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
