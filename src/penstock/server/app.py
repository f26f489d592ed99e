"""Composition of the server: guards around routes around a host, a chat service and their stores.

This module only wires parts together; it makes no decisions of its own.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import PenstockError
from penstock.server.bodies import BodyGuard
from penstock.server.errors import on_error
from penstock.server.graph_check import GraphChecker
from penstock.server.guards import AuthGuard, ConcurrencyGuard, OriginGuard, RequestContextGuard
from penstock.server.mcp import create_mcp
from penstock.server.metrics import Metrics
from penstock.server.openai.router import create_openai_router
from penstock.server.openapi import DescribedApp
from penstock.server.readiness import Readiness
from penstock.server.routes import approvals, graphs, meta, runs
from penstock.server.routes import chats as conversations
from penstock.server.schemas import ErrorShown
from penstock.server.settings import ServerSettings
from penstock.server.sse import Streams
from penstock.server.state import ServerState

if TYPE_CHECKING:
    from penstock.chat.service import ChatService
    from penstock.hosting.host import RunHost
    from penstock.storage import Stores

TITLE = "Penstock"
DESCRIPTION = "An agent-graph runtime whose limits hold."
ERROR = {"model": ErrorShown, "description": "An error: a code, a message and, if known, the path of the bad value"}


def create_app(
    host: RunHost,
    chats: ChatService,
    stores: Stores,
    settings: ServerSettings | None = None,
    *,
    clock: Clock = SYSTEM_CLOCK,
) -> FastAPI:
    """Build the whole server as one ASGI app; the caller starts and closes the host."""
    settings = settings or ServerSettings()
    metrics = Metrics()
    checker = GraphChecker(host.executors, host.services)
    streams, readiness = Streams(settings, metrics), Readiness(stores, settings.ready_timeout_s, clock)
    state = ServerState(host, chats, stores, checker, settings, metrics, streams, readiness, clock)
    app = DescribedApp(
        title=TITLE,
        description=DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        responses={"4XX": ERROR, "5XX": ERROR},
        exception_handlers=dict.fromkeys((PenstockError, RequestValidationError, HTTPException), on_error),
        middleware=[
            Middleware(RequestContextGuard, metrics=metrics, clock=clock),
            Middleware(ConcurrencyGuard, settings=settings),
            Middleware(OriginGuard, settings=settings),
            Middleware(AuthGuard, settings=settings, clock=clock),
            Middleware(BodyGuard, settings=settings),
        ],
        lifespan=_lifespan,
    )
    app.needs_tokens = bool(settings.tokens)
    app.state.server = state
    # Routes are tried in this order: models are called far more often than anything else.
    app.include_router(create_openai_router(host, chats, stores, checker, streams=state.streams))
    for routes in (meta, graphs, runs, approvals, conversations):
        app.include_router(routes.router)
    mcp = create_mcp(host, chats, stores, checker, settings=settings, streams=state.streams)
    app.router.routes.append(Route("/mcp", mcp, include_in_schema=False))
    app.state.contexts = (mcp,)  # context managers entered at startup and exited at shutdown
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
    async with AsyncExitStack() as stack:
        for context in app.state.contexts:
            await stack.enter_async_context(context)
        yield
        state_of(app).streams.close()


def state_of(app: FastAPI) -> ServerState:
    """Return the parts an app was composed of."""
    state: ServerState = app.state.server
    return state
