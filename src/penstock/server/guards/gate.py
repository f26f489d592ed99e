"""Who asks, and whether they may: deny by default, before any route is looked for.

A token is good until a moment, also while an answer goes on. To a stream that is open then, it is as if its client
left: what that means for a run, its route knows. What has not begun to answer by then is answered.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.server.auth import LOCAL, Rules, Token, secret_in, token_of, written
from penstock.server.errors import ApiError, not_found
from penstock.server.guards.asgi import App, Message, Receive, Scope, Send, headers_named, refuse
from penstock.server.settings import ServerSettings, is_loopback

UNASKED = Token(LOCAL, b"")
"""What everybody has where no tokens are asked for."""


class Gate:
    """Lets in whom the table of routes lets in; leaves `user`, `until_ns` and `route` in the request's state."""

    def __init__(
        self, app: App, settings: ServerSettings, rules: Rules | None = None, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._app = app
        self._tokens = settings.tokens
        self._look_s = settings.heartbeat_s
        self._rules = rules or Rules()
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._let_in(scope)
        except ApiError as error:
            await refuse(error, scope, receive, send)
            return
        until_ns = scope["state"]["until_ns"]
        if until_ns is None:
            await self._app(scope, receive, send)
        else:
            visit = _Visit(until_ns, self._clock, self._look_s, receive, send)
            await self._app(scope, visit.receive, visit.send)
            await visit.end()

    def _let_in(self, scope: Scope) -> None:
        secret = _presented(scope)
        token = self._token(scope, secret)
        is_good = token is not None and not token.has_expired(self._clock.time_ns())
        found = self._rules.find(scope["path"])
        state = scope.setdefault("state", {})
        state["user"] = token.user if token is not None and is_good else None
        state["until_ns"] = token.until_ns if token is not None and is_good else None
        if found is not None:
            state["route"], methods = found
            access = methods.get(scope["method"])
            if access == "open":
                return
        if token is None:
            raise _no_token() if secret is None else _unknown()
        if not is_good:
            raise _expired(token)
        if found is None:
            raise not_found("path")
        if access is None:
            allowed = ", ".join(sorted(methods))
            raise ApiError(405, f"{scope['method']} cannot be done here; {allowed} can", headers={"Allow": allowed})
        if not token.user.may(access):
            raise ApiError(403, f"this needs the role {access}, and {token.user.name} is a {token.user.role}")

    def _token(self, scope: Scope, secret: bytes | None) -> Token | None:
        if self._tokens:
            return None if secret is None else token_of(self._tokens, secret)
        client = scope.get("client")
        return UNASKED if client and is_loopback(client[0]) else None


def _presented(scope: Scope) -> bytes | None:
    """The secret that was sent; None without one, and where there is no telling which of several is meant."""
    sent = headers_named(scope, b"authorization")
    return secret_in(sent[0]) if len(sent) == 1 else None


def _expired(token: Token) -> ApiError:
    """What only somebody is told who has the right secret."""
    assert token.until_ns is not None, "what is always good does not expire"
    message = f"this token was good until {written(token.until_ns)}; ask whoever runs this server for a new one"
    return _invalid("token_expired", message)


def _no_token() -> ApiError:
    return ApiError(401, "send a token: Authorization: Bearer <secret>", headers={"WWW-Authenticate": "Bearer"})


def _unknown() -> ApiError:
    return _invalid("token_unknown", "this token is not known here; ask whoever runs this server for one")


def _invalid(code: str, message: str) -> ApiError:
    challenge = f'Bearer error="invalid_token", error_description="{message}"'
    return ApiError(401, message, code=code, headers={"WWW-Authenticate": challenge})


class _Visit:
    """A request with a token that ends: an answer that is still going out then is told that its client has left."""

    def __init__(self, until_ns: int, clock: Clock, look_s: float, receive: Receive, send: Send) -> None:
        self._until_ns = until_ns
        self._clock = clock
        self._look_s = look_s
        self._receive = receive
        self._send = send
        self._is_answering = False
        self._is_over = False

    async def receive(self) -> Message:
        """What the client says; that it has left, once its time is over."""
        while (left_s := self._left_s()) > 0 or not self._is_answering:
            # Timers do not run by the clock that says when a token ends, which may be set: it is looked at in between.
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, self._look_s) if left_s > 0 else self._look_s):
                    return await self._receive()
        self._is_over = True
        return {"type": "http.disconnect"}

    def _left_s(self) -> float:
        return (self._until_ns + 1 - self._clock.time_ns()) / 1_000_000_000

    async def send(self, message: Message) -> None:
        """Pass on a piece of the answer."""
        self._is_answering = message.get("more_body", message["type"] == "http.response.start")
        await self._send(message)

    async def end(self) -> None:
        """The app has left it at that: what it did not end, because we said that nobody is there, ends here."""
        if self._is_over and self._is_answering:
            await self.send({"type": "http.response.body", "body": b"", "more_body": False})
