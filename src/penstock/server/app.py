"""The server, composed: guards around routes around a host, a chat service and their stores.

Nothing here decides anything; it says what stands where.
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
from penstock.server.errors import on_error
from penstock.server.guards.bodies import BodyGuard
from penstock.server.guards.crowd import CrowdGuard
from penstock.server.guards.envelope import Envelope
from penstock.server.guards.gate import Gate
from penstock.server.guards.origin import OriginGuard
from penstock.server.mcp import create_mcp
from penstock.server.metrics import Metrics
from penstock.server.openai.router import create_openai_router
from penstock.server.openapi import DescribedApp
from penstock.server.parts import Parts
from penstock.server.readiness import Readiness
from penstock.server.routes import approvals, graphs, meta, runs
from penstock.server.routes import chats as conversations
from penstock.server.runnable import Runnable
from penstock.server.schemas import ErrorShown
from penstock.server.settings import ServerSettings
from penstock.server.sse import Streams

if TYPE_CHECKING:
    from penstock.chat.service import ChatService
    from penstock.hosting.host import RunHost
    from penstock.storage import Stores

TITLE = "Penstock"
DESCRIPTION = "An agent-graph runtime whose limits hold."
ERROR = {"model": ErrorShown, "description": "What went wrong"}


def create_app(
    host: RunHost,
    chats: ChatService,
    stores: Stores,
    settings: ServerSettings | None = None,
    *,
    clock: Clock = SYSTEM_CLOCK,
) -> FastAPI:
    """The whole server as one ASGI app; the host is its caller's to start and to close."""
    settings = settings or ServerSettings()
    metrics = Metrics()
    graphs_to_run = Runnable(host.executors, host.services)
    streams, readiness = Streams(settings, metrics), Readiness(stores, settings.ready_timeout_s, clock)
    parts = Parts(host, chats, stores, graphs_to_run, settings, metrics, streams, readiness, clock)
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
            Middleware(Envelope, metrics=metrics, clock=clock),
            Middleware(CrowdGuard, settings=settings),
            Middleware(OriginGuard, settings=settings),
            Middleware(Gate, settings=settings, clock=clock),
            Middleware(BodyGuard, settings=settings),
        ],
        lifespan=_lifespan,
    )
    app.needs_tokens = bool(settings.tokens)
    app.state.parts = parts
    for routes in (meta, graphs, runs, approvals, conversations):
        app.include_router(routes.router)
    app.include_router(create_openai_router(host, chats, stores, graphs_to_run, streams=parts.streams))
    mcp = create_mcp(host, chats, stores, graphs_to_run, settings=settings, streams=parts.streams)
    app.router.routes.append(Route("/mcp", mcp, include_in_schema=False))
    app.state.living = (mcp,)  # what is entered when the server begins, and left when it ends
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
    async with AsyncExitStack() as stack:
        for part in app.state.living:
            await stack.enter_async_context(part)
        yield
        parts_of(app).streams.close()


def parts_of(app: FastAPI) -> Parts:
    """What an app was composed of."""
    parts: Parts = app.state.parts
    return parts
