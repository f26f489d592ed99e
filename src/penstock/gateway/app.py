"""The gateway as an ASGI app: `/openai`, `/anthropic`, `/gemini`, and the upstreams with names of their own.

Each request is routed by its wire, paid by the grant of its key, and answered in the error format of its wire if it is
not passed on. Knows nothing of servers and processes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from penstock import logs
from penstock.gateway.client import Client, Gone, Receive, Send, Truncated
from penstock.gateway.connections import Connections
from penstock.gateway.denials import UNAVAILABLE, denial_of
from penstock.gateway.exchange import exchange_model_call, relay_free
from penstock.gateway.grants import Keyring
from penstock.gateway.upstreams import Upstream
from penstock.gateway.wires import OPENAI, Denied, presented_key, without_key
from penstock.ids import new_run_id

HEALTH = "/health"
_STOPPED = Denied(UNAVAILABLE, "the gateway was stopped before it had an answer", code="stopped")
_logger = logging.getLogger(__name__)


class Gateway:
    """Passes requests of any client on to the upstreams, as contained calls."""

    def __init__(
        self,
        upstreams: Mapping[str, Upstream],
        keyring: Keyring,
        connections: Connections,
        on_denied: Callable[[Denied], None] = lambda denied: None,
    ) -> None:
        self._upstreams = upstreams
        self._keyring = keyring
        self._connections = connections
        self._on_denied = on_denied

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request; nothing but HTTP is offered."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] == "lifespan":
            await _follow_lifespan(receive, send)
        elif logs.REQUESTS.isEnabledFor(logging.INFO):
            await self._answer_logged(Client(scope, receive, send), scope["path"])
        else:
            await self._answer(Client(scope, receive, send), scope["path"])

    async def _answer_logged(self, client: Client, path: str) -> None:
        fields: dict[str, Any] = {}
        logs.current_request.set(fields)
        started_ns = time.perf_counter_ns()
        try:
            await self._answer(client, path)
        finally:
            about = {
                "request_id": new_run_id(),
                "method": client.method,
                "route": fields.pop("route", "other"),
                "status": client.status,
                "duration_ms": round((time.perf_counter_ns() - started_ns) / 1_000_000, 3),
            }
            logs.record(logs.REQUESTS, "request", {**about, **fields})

    async def _answer(self, client: Client, path: str) -> None:
        if path == HEALTH:
            await client.answer(200, [(b"content-type", b"text/plain"), (b"content-length", b"3")], b"ok\n")
            return
        name, _, rest = path.lstrip("/").partition("/")
        upstream = self._upstreams.get(name)
        wire = OPENAI if upstream is None else upstream.wire
        try:
            if upstream is None:
                raise Denied(404, f"the gateway has no /{name[:100]}; it has {self._names()}", code="not_offered")
            await self._serve(client, upstream, f"/{rest}" if rest else "")
        except Gone:
            return
        except Truncated as truncated:  # without the end of its response, the server closes the connection
            _logger.warning("the answer to a request to %s was cut: %s", name[:100], truncated)
        except asyncio.CancelledError:  # the server ends: closing the connection is the only signal to a begun response
            if not client.has_begun:
                await client.answer(*wire.error(_STOPPED, client.user_agent))
        except BaseException as error:
            denied = denial_of(error, name)
            if denied is None and isinstance(error, Exception):
                _logger.exception("a request to %s failed", name[:100])
                denied = Denied(500, "the gateway failed; its log has the reason", code="internal_error")
            if denied is None or client.has_begun:
                raise
            if denied.status == UNAVAILABLE:
                _logger.warning("a request was refused: %s", error)
            logs.note(error=denied.code or None)
            self._on_denied(denied)
            await client.answer(*wire.error(denied, client.user_agent))

    def _names(self) -> str:
        return ", ".join(f"/{name}" for name in self._upstreams)

    async def _serve(self, client: Client, upstream: Upstream, path: str) -> None:
        kind, path = upstream.wire.route(client.method, path, upgrades="upgrade" in client.headers)
        logs.note(route=kind, upstream=upstream.name)
        if kind == "ping":  # some clients check that the address answers before they send a key
            await client.answer(200, [(b"content-length", b"0")], b"")
            return
        grant = await self._keyring.grant(presented_key(client.headers, client.query), client.headers)
        try:
            body = await client.body()
            if kind == "model":
                call = exchange_model_call(client, upstream, path, body, self._connections, grant)
            else:
                call = self._free_call(client, upstream, path, body if client.method == "POST" else None)
            await _unless_gone(client, call)
        finally:
            grant.release()

    async def _free_call(self, client: Client, upstream: Upstream, path: str, body: bytes | None) -> None:
        headers = upstream.headers(client.raw_headers, body)
        url = upstream.target(path, without_key(client.query))
        response = await self._connections.send(client.method, url, headers, body)
        try:
            await relay_free(response, client, upstream)
        finally:
            await response.aclose()


async def _unless_gone(client: Client, work: Coroutine[Any, Any, None]) -> None:
    """Do the work, unless the client disconnects before; then the work is cancelled where it waits."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(client.disconnected())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Gone
        working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        # Both have ended when this returns: the exchange is settled by then.
        await asyncio.wait((working, watching))


async def _follow_lifespan(receive: Receive, send: Send) -> None:
    """Confirm the start and the end of the server: there is nothing to do at either."""
    while (message := await receive())["type"] != "lifespan.shutdown":
        await send({"type": f"{message['type']}.complete"})
    await send({"type": "lifespan.shutdown.complete"})
