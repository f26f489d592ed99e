"""Responses that a client may cache and revalidates before each use: `ETag`, `If-None-Match`, 304."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

REVALIDATED: dict[int | str, dict[str, Any]] = {
    304: {"description": "What the client has, named in `If-None-Match`, is still right"}
}


def revalidated(request: Request, body: BaseModel) -> Response:
    """Return a body as JSON with an `ETag`, or 304 if the client already has it.

    Only the cache of one user's client may keep it, and the client revalidates it each time.
    """
    content = body.model_dump_json().encode()
    tag = f'W/"{sha256(content).hexdigest()[:32]}"'
    headers = {"ETag": tag, "Cache-Control": "private, no-cache", "Vary": "Authorization"}
    known = {one.strip() for one in request.headers.get("if-none-match", "").split(",")}
    if known & {tag, tag.removeprefix("W/"), "*"}:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type="application/json", headers=headers)
