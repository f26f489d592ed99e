"""Additions to the OpenAPI description: the routes that need a token, errors as JSON, and a page of it.

Which routes are open is read from the access table.
"""

from __future__ import annotations

import gzip
from typing import Any

from fastapi import FastAPI

from penstock.server.api_page import api_page
from penstock.server.auth import ACCESS
from penstock.server.event_schemas import event_components

TOKEN = "token"
"""Name of the security scheme in the description."""
SCHEME = {"type": "http", "scheme": "bearer", "description": "The secret of a token from the operator of the server."}


class DescribedApp(FastAPI):
    """An app with a complete OpenAPI description."""

    needs_tokens = True
    """Whether a token is required; if not, it is described as optional."""
    documentation: tuple[bytes, bytes] | None = None
    """The page that `document` has rendered, and the same compressed by gzip."""

    def openapi(self) -> dict[str, Any]:
        """Return the description, built on first use."""
        if self.openapi_schema is None:
            _complete(super().openapi(), [{TOKEN: []}] if self.needs_tokens else [{TOKEN: []}, {}])
        return super().openapi()

    def document(self) -> tuple[bytes, bytes]:
        """Render the documentation once: it takes milliseconds, and clients without a token may request it."""
        page = api_page(self.openapi()).encode()
        self.documentation = page, gzip.compress(page, mtime=0)
        return self.documentation


def _complete(description: dict[str, Any], needed: list[dict[str, list[str]]]) -> None:
    for name, schema in event_components().items():
        description["components"]["schemas"].setdefault(name, schema)
    description["components"]["securitySchemes"] = {TOKEN: SCHEME}
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            if ACCESS.get(path, {}).get(method.upper()) != "open":
                operation["security"] = needed
            for error in (operation["responses"][status] for status in ("4XX", "5XX")):
                # FastAPI gives errors the media type of the route's success response, such as HTML or plain text.
                (shape,) = error["content"].values()
                error["content"] = {"application/json": shape}
