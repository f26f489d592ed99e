"""Composition of the server: guards around routes around a host, a chat service and their stores.

This module only wires parts together; it makes no decisions of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import PenstockError
from penstock.providers.mcp.installed import mcp_problem
from penstock.server.audit import AuditGuard, AuditLog
from penstock.server.errors import on_error
from penstock.server.gateway_mount import GatewayMount
from penstock.server.graph_check import GraphChecker
from penstock.server.guards import (
    AuthGuard,
    BodyGuard,
    ClientGuard,
    Compression,
    ConcurrencyGuard,
    OriginGuard,
    RequestContextGuard,
)
from penstock.server.metrics import Metrics
from penstock.server.no_mcp import NoMcp
from penstock.server.openai.retries import Retries
from penstock.server.openai.router import create_openai_router
from penstock.server.openai.runs import RunHandle
from penstock.server.openapi import DescribedApp
from penstock.server.readiness import Readiness
from penstock.server.routes import (
    admin,
    approvals,
    audit,
    graphs,
    meta,
    models,
    money,
    people,
    run_views,
    runs,
    stream,
    tokens,
)
from penstock.server.routes import chats as conversations
from penstock.server.run_counts import RunCounts
from penstock.server.schemas import ErrorShown
from penstock.server.settings import ServerSettings
from penstock.server.sse import Streams
from penstock.server.state import ServerState
from penstock.server.tokens import StoredTokens
from penstock.server.ui_files import NO_UI, UiFiles

if TYPE_CHECKING:
    from penstock.chat.service import ChatService
    from penstock.hosting.host import RunHost
    from penstock.storage import Stores

TITLE = "Penstock"
MIN_COMPRESSED = 1_024
"""Smallest response in bytes that is compressed, for clients that accept gzip."""
DESCRIPTION = "An agent-graph runtime whose limits hold."
ERROR = {"model": ErrorShown, "description": "An error: a code, a message and, if known, the path of the bad value"}
RESPONSES: dict[int | str, dict[str, Any]] = {"4XX": ERROR, "5XX": ERROR}


def create_app(
    host: RunHost,
    chats: ChatService,
    stores: Stores,
    settings: ServerSettings | None = None,
    *,
    clock: Clock = SYSTEM_CLOCK,
    ui: UiFiles = NO_UI,
    gateway: ASGIApp | None = None,
) -> FastAPI:
    """Build the whole server as one ASGI app; the caller starts and closes the host.

    `ui` is the web UI to serve at `/`, as `load_ui()` returns it; without one there is a start page.
    `gateway` is served below `/gateway`, with its own keys.
    """
    settings = settings or ServerSettings()
    metrics = Metrics()
    checker = GraphChecker(host.executors, host.services)
    stored = StoredTokens(stores.tokens, clock)
    counts = RunCounts(stores.runs, clock)
    streams, readiness = Streams(settings, metrics), Readiness(stores, settings.ready_timeout_s, clock)
    state = ServerState(host, chats, stores, checker, settings, metrics, streams, readiness, clock, ui, stored, counts)
    mounted = [] if gateway is None else [Middleware(GatewayMount, gateway=gateway, metrics=metrics, clock=clock)]
    app = DescribedApp(
        title=TITLE,
        description=DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        servers=[{"url": settings.root_path}] if settings.root_path else None,
        responses=RESPONSES,
        exception_handlers=dict.fromkeys((PenstockError, RequestValidationError, HTTPException), on_error),
        middleware=[
            Middleware(ClientGuard, settings=settings),
            *mounted,
            Middleware(RequestContextGuard, metrics=metrics, clock=clock),
            Middleware(ConcurrencyGuard, settings=settings),
            Middleware(OriginGuard, settings=settings),
            Middleware(AuthGuard, settings=settings, clock=clock, stored=stored),
            Middleware(AuditGuard, log=AuditLog(stores.audit, clock)),
            Middleware(BodyGuard, settings=settings),
            Middleware(Compression, minimum_size=MIN_COMPRESSED, compresslevel=5),
        ],
        lifespan=_lifespan,
    )
    app.needs_tokens = bool(settings.tokens)
    app.state.server = state
    # Routes are tried in this order: models are called far more often than anything else.
    retries: Retries[RunHandle] = Retries(settings.retry_grace_s)
    app.state.retries = retries
    app.include_router(
        create_openai_router(host, chats, stores, checker, settings=settings, streams=state.streams, retries=retries)
    )
    app.router.routes.extend(_rest_routes())
    app.state.contexts = ()  # context managers entered at startup and exited at shutdown
    endpoint: ASGIApp
    if (problem := mcp_problem()) is not None:
        endpoint = NoMcp(problem)
    else:
        from penstock.server.mcp import create_mcp

        endpoint = mcp = create_mcp(host, chats, stores, checker, settings=settings, streams=state.streams)
        app.state.contexts = (mcp,)
    app.router.routes.append(Route("/mcp", endpoint, include_in_schema=False))
    return app


@cache
def _rest_routes() -> list[BaseRoute]:
    """Return the REST routes, cached: FastAPI resolves them at their first request, which takes 50 ms."""
    router = APIRouter(responses=RESPONSES)
    for_admins = (admin, money, tokens, audit, people)
    for routes in (meta, models, graphs, runs, run_views, stream, approvals, conversations, *for_admins):
        router.include_router(routes.router)
    return router.routes


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
    async with AsyncExitStack() as stack:
        for context in app.state.contexts:
            await stack.enter_async_context(context)
        watching = asyncio.create_task(state_of(app).readiness.watch_rows(), name="penstock watches rows")
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.wait((watching,))
            state_of(app).streams.close()


def state_of(app: FastAPI) -> ServerState:
    """Return the parts an app was composed of."""
    state: ServerState = app.state.server
    return state
