"""What the description of the API says besides its routes: where a token is needed, and that every error is JSON.

Who may ask for what is read from the one table of every route.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from penstock.server.auth import ACCESS

TOKEN = "token"
"""The name under which the description has the way to say who is asking."""
SCHEME = {"type": "http", "scheme": "bearer", "description": "The secret of a token that whoever runs the server gave."}


class DescribedApp(FastAPI):
    """An app whose description is whole."""

    needs_tokens = True
    """Without, a token may be sent, and does no harm."""

    def openapi(self) -> dict[str, Any]:
        """The description, made once."""
        if self.openapi_schema is None:
            _complete(super().openapi(), [{TOKEN: []}] if self.needs_tokens else [{TOKEN: []}, {}])
        return super().openapi()


def _complete(description: dict[str, Any], needed: list[dict[str, list[str]]]) -> None:
    description["components"]["securitySchemes"] = {TOKEN: SCHEME}
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            if ACCESS.get(path, {}).get(method.upper()) != "open":
                operation["security"] = needed
            for error in (operation["responses"][status] for status in ("4XX", "5XX")):
                # FastAPI describes them in the type of the route's success, be it a page or a text.
                (shape,) = error["content"].values()
                error["content"] = {"application/json": shape}
