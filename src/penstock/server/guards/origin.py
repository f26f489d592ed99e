"""Under which name the server was asked, by which web page, and with how much around it.

A page on the internet can make a browser ask a server on its user's machine, and a name can be made to point there.
So the Host must be one of ours on every method, and an Origin, where a browser sends one, the server's own or one that
the operator allows. There is no CORS: other pages are not answered at all.
"""

from __future__ import annotations

import re

from penstock.server.errors import ApiError
from penstock.server.guards.asgi import App, Receive, Scope, Send, headers_named, refuse
from penstock.server.settings import ServerSettings

HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9.-]+)(:[0-9]{1,5})?")
OWN_SITES = frozenset({b"same-origin", b"none"})
"""What browsers say of requests that come from the server's own pages, or from the address bar."""


class OriginGuard:
    """Lets requests through that were meant for this server."""

    def __init__(self, app: App, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        self._hosts = settings.hosts
        self._origins = frozenset(settings.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._wrong(scope)) is not None:
            await refuse(error, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _wrong(self, scope: Scope) -> ApiError | None:
        return self._too_large(scope) or self._wrong_host(scope) or self._wrong_origin(scope)

    def _too_large(self, scope: Scope) -> ApiError | None:
        settings = self._settings
        headers = scope["headers"]
        if len(headers) > settings.max_headers:
            return ApiError(431, f"{len(headers)} headers are more than the {settings.max_headers} a request may have")
        if sum(len(name) + len(value) for name, value in headers) > settings.max_header_bytes:
            return ApiError(431, f"the headers are larger than {settings.max_header_bytes} bytes")
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > settings.max_target_bytes:
            return ApiError(414, f"path and query are longer than {settings.max_target_bytes} bytes", code="too_large")
        return None

    def _wrong_host(self, scope: Scope) -> ApiError | None:
        name = _host_name(scope)
        if name is None:
            return ApiError(400, "a request must say one Host", code="bad_host")
        if name not in self._hosts:
            names = "penstock serve --allow-host NAME, PENSTOCK_ALLOWED_HOSTS, or allowed_hosts of its settings"
            message = f"this server is not known under that Host; whoever runs it can name it: {names}"
            return ApiError(421, message, code="bad_host")
        return None

    def _wrong_origin(self, scope: Scope) -> ApiError | None:
        origins = headers_named(scope, b"origin")
        if not origins:
            return self._foreign_site(scope)
        origin = origins[0].decode("latin-1").lower()
        own = {f"{scheme}://{_host(scope)}" for scheme in ("http", "https")}
        if len(origins) == 1 and (origin in own or origin in self._origins):
            return None
        return _FOREIGN

    def _foreign_site(self, scope: Scope) -> ApiError | None:
        """A request that another page made without saying which; following a link to the first page is fine."""
        sites = headers_named(scope, b"sec-fetch-site")
        if not sites or set(sites) <= OWN_SITES:
            return None
        is_link = scope["method"] == "GET" and headers_named(scope, b"sec-fetch-mode") == [b"navigate"]
        return None if is_link and scope["path"] == "/" else _FOREIGN


_FOREIGN = ApiError(403, "pages of other origins are not answered; an operator can allow one", code="bad_origin")


def _host(scope: Scope) -> str:
    return str(headers_named(scope, b"host")[0].decode("latin-1").lower())


def _host_name(scope: Scope) -> str | None:
    """The Host without its port; None if there is not exactly one that can be read."""
    hosts = headers_named(scope, b"host")
    match = HOST.fullmatch(_host(scope)) if len(hosts) == 1 else None
    return match["name"] if match else None
