"""Penstock over HTTP: graphs, runs, approvals and chats as REST and resumable streams.

serve     the process: listen, drain, park          settings   the operator's settings
app       composition of the ASGI app               auth       users, tokens and the access table
guards    middleware that runs before the routes    errors     every failure as a status and a code
routes/   REST, one file per resource               openai/    the /v1 routes
mcp/      graphs as tools                           sse        streaming responses, a run's events as a stream
examples/ a model without a key, graphs to start with   ui_files   the built web UI

Names are imported on first use, so that settings can be read without FastAPI.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.server.app import create_app as create_app
    from penstock.server.auth import User as User
    from penstock.server.serve import serve as serve
    from penstock.server.settings import ServerSettings as ServerSettings
    from penstock.server.ui_files import load_ui as load_ui

WHERE = {
    "create_app": "app",
    "User": "auth",
    "serve": "serve",
    "ServerSettings": "settings",
    "load_ui": "ui_files",
}

__all__ = ["ServerSettings", "User", "create_app", "load_ui", "serve"]


def __getattr__(name: str) -> Any:
    if name in WHERE:
        return getattr(import_module(f"penstock.server.{WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
