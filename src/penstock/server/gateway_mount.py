"""The gateway below a path of the server, before its guards: it has keys, limits and errors of its own."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.server.metrics import Metrics

PREFIX = "/gateway"


class GatewayMount:
    """Passes requests below `PREFIX` to the gateway, and counts them; all others go on to the server."""

    def __init__(self, app: ASGIApp, gateway: ASGIApp, metrics: Metrics, clock: Clock = SYSTEM_CLOCK) -> None:
        self._app = app
        self._gateway = gateway
        self._metrics = metrics
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not f"{scope['path']}/".startswith(f"{PREFIX}/"):
            await self._app(scope, receive, send)
            return
        status, started_ns = 0, self._clock.monotonic_ns()

        async def observe(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._gateway({**scope, "path": scope["path"][len(PREFIX) :]}, receive, observe)
        finally:
            self._metrics.count_request(PREFIX, scope["method"], status, self._clock.monotonic_ns() - started_ns)
