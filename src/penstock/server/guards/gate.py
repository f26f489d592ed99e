"""Who asks, and whether they may: deny by default, before any route is looked for."""

from __future__ import annotations

from penstock.server.auth import LOCAL, Rules, User, user_of
from penstock.server.errors import ApiError, not_found
from penstock.server.guards.asgi import App, Receive, Scope, Send, headers_named, refuse
from penstock.server.settings import ServerSettings, is_loopback


class Gate:
    """Lets in whom the table of routes lets in; leaves `user` and `route` in the request's state."""

    def __init__(self, app: App, settings: ServerSettings, rules: Rules | None = None) -> None:
        self._app = app
        self._tokens = settings.tokens
        self._rules = rules or Rules()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._let_in(scope)
            except ApiError as error:
                await refuse(error, scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _let_in(self, scope: Scope) -> None:
        user = self._user(scope)
        found = self._rules.find(scope["path"])
        state = scope.setdefault("state", {})
        state["user"] = user
        if found is not None:
            state["route"], methods = found
            access = methods.get(scope["method"])
            if access == "open":
                return
        if user is None:
            raise ApiError(401, "send a token: Authorization: Bearer <secret>", headers={"WWW-Authenticate": "Bearer"})
        if found is None:
            raise not_found("path")
        if access is None:
            allowed = ", ".join(sorted(methods))
            raise ApiError(405, f"{scope['method']} cannot be done here; {allowed} can", headers={"Allow": allowed})
        if not user.may(access):
            raise ApiError(403, f"this needs the role {access}, and {user.name} is a {user.role}")

    def _user(self, scope: Scope) -> User | None:
        sent = headers_named(scope, b"authorization")
        if self._tokens:
            return user_of(self._tokens, sent[0]) if len(sent) == 1 else None
        client = scope.get("client")
        return LOCAL if client and is_loopback(client[0]) else None
