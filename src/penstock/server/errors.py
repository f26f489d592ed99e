"""Every failure as a status, a code and a sentence.

One table maps Penstock's errors to statuses. Any other error is a fault of the server: the response says only that, and
the log says where it was raised. Under /v1 the same facts are returned in the shape that OpenAI's clients read.
"""

from __future__ import annotations

import logging
import math
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from penstock.chat.conversation import AttachmentNotFound, ChatNotFound, ConversationInvalid, MessageNotFound
from penstock.errors import Halted, InvalidValue, PenstockError, RunEnded
from penstock.hosting.control import ApprovalNotFound, RunNotFound
from penstock.hosting.host import GraphArchived, GraphNotFound
from penstock.hosting.ports import Conflict, Fenced, StoreCorrupt
from penstock.hosting.queue import Overloaded
from penstock.hosting.tokens import TokenNotFound
from penstock.ids import AN_ID, ID
from penstock.kernel.graph import GraphInvalid, Problem
from penstock.server import unavailable
from penstock.tracing.redaction import redact

LOG = logging.getLogger("penstock.server")
RETRY_AFTER_S = 2
MAX_DETAILS = 50
MAX_MESSAGE = 1_000

UNREADABLE = "unreadable_row"
"""Code of the error for a stored row that cannot be decoded."""

STATUS: Mapping[type[Exception], tuple[int, str]] = {
    **{kind: (503, code) for kind, code in unavailable.CODES.items()},
    StoreCorrupt: (500, UNREADABLE),
    Overloaded: (429, "overloaded"),
    GraphNotFound: (404, "not_found"),
    RunNotFound: (404, "not_found"),
    ApprovalNotFound: (404, "not_found"),
    ChatNotFound: (404, "not_found"),
    MessageNotFound: (404, "not_found"),
    AttachmentNotFound: (404, "not_found"),
    TokenNotFound: (404, "not_found"),
    GraphArchived: (409, "conflict"),
    Fenced: (409, "conflict"),
    Conflict: (409, "conflict"),
    RunEnded: (409, "conflict"),
    Halted: (409, "halted"),
    GraphInvalid: (422, "graph_invalid"),
    ConversationInvalid: (422, "conversation_invalid"),
    InvalidValue: (422, "invalid_value"),
}
"""HTTP status and code of each Penstock error; the nearest class in the MRO applies."""

CODES: Mapping[int, str] = {
    400: "bad_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    409: "conflict",
    413: "too_large",
    415: "unsupported_media_type",
    422: "invalid_value",
    429: "overloaded",
    431: "headers_too_large",
    503: "unavailable",
}

OPENAI_TYPES: Mapping[int, str] = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(PenstockError):
    """An error response: its status, a code for programs, a sentence for people, and the path of the bad value."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        path: str | None = None,
        details: Sequence[Mapping[str, Any]] = (),
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.code = code or CODES.get(status, "error")
        self.path = path
        self.details = list(details[:MAX_DETAILS])
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
        super().__init__(message)


def not_found(what: str) -> ApiError:
    """Create the 404 for a missing thing, and for another user's thing: both look the same."""
    return ApiError(404, f"there is no such {what}")


def api_error(error: BaseException) -> ApiError:
    """Convert `error` to its HTTP error; 500 for an unexpected one."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _invalid_request(error)
    if isinstance(error, HTTPException):
        return _of_starlette(error)
    for kind in type(error).__mro__:
        if kind in STATUS:
            return _known(error, *STATUS[kind])
    return ApiError(
        500, "the server failed to answer this request; its log has the location, under the request id", code="internal"
    )


def _known(error: BaseException, status: int, code: str) -> ApiError:
    problems = list(getattr(error, "problems", ()))
    advice = f" (PUT /api/graphs/{error.graph_id} restores it)" if isinstance(error, GraphArchived) else ""
    wait = getattr(error, "retry_after_s", None)
    return ApiError(
        status,
        public_text(error) + advice,
        code=code,
        path=getattr(error, "field", None) or (problems[0].path if problems else None),
        details=list(problem_details(problems)),
        retry_after_s=wait if wait is not None else RETRY_AFTER_S if status in {429, 503} else None,
    )


def public_text(error: BaseException) -> str:
    """Return the error's message, truncated, without apparent secrets or the location of a database."""
    if isinstance(error, StoreCorrupt):
        LOG.error("%s", error)
        return (
            f"a stored row of the table {error.table} cannot be read, so this cannot be shown; nothing else is "
            "affected. The operator of this server finds the row with penstock doctor, in /ready and in the log"
        )
    if (code := unavailable.log_outage(error)) is not None:
        return unavailable.MESSAGES[code]
    text = str(redact(str(error)[: MAX_MESSAGE * 2]))
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}…"


def problem_details(problems: Sequence[Problem]) -> Iterator[dict[str, str]]:
    """Yield the problems of a document as JSON, at most MAX_DETAILS."""
    for problem in problems[:MAX_DETAILS]:
        yield {"code": problem.code, "path": problem.path, "message": problem.detail}


def _invalid_request(error: RequestValidationError) -> ApiError:
    # Report only the place and the reason, never the value: it may be a secret.
    found = [{"path": _place(item["loc"]), "message": _why(item)} for item in error.errors()[:MAX_DETAILS]]
    first = found[0] if found else {"path": "$", "message": "cannot be read"}
    return ApiError(422, f"{first['path']}: {first['message']}", path=first["path"], details=found)


def _why(problem: Mapping[str, Any]) -> str:
    """Return the reason in words: without pydantic's name of an error, and with a description of an id's pattern."""
    pattern = (problem.get("ctx") or {}).get("pattern")
    return (
        f"must be an id: {AN_ID}" if pattern == f"^{ID.pattern}$" else str(problem["msg"]).removeprefix("Value error, ")
    )


def _place(loc: Sequence[int | str]) -> str:
    where, *steps = loc or ("body",)
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{str(step)[:80]}" for step in steps)
    return f"${path}" if where == "body" else f"{where}{path}"


def _of_starlette(error: HTTPException) -> ApiError:
    return ApiError(error.status_code, str(error.detail), headers=error.headers)


def error_response(error: ApiError, path: str) -> JSONResponse:
    """Return the error as a response, in the shape that clients of `path` expect."""
    if not path.startswith("/v1/"):
        return JSONResponse({"error": _shape(error)}, error.status, error.headers)
    status = 400 if error.status == 422 else error.status  # OpenAI's clients treat only 400 as an invalid request
    return JSONResponse({"error": _openai_shape(error)}, status, error.headers)


def _shape(error: ApiError) -> dict[str, Any]:
    body: dict[str, Any] = {"code": error.code, "message": str(error)}
    if error.path is not None:
        body["path"] = error.path
    if error.details:
        body["details"] = error.details
    return body


def _openai_shape(error: ApiError) -> dict[str, Any]:
    kind = OPENAI_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"message": str(error), "type": kind, "param": param_of(error), "code": error.code}


def param_of(error: ApiError) -> str | None:
    """Return the request field an error is about, in the notation of OpenAI's clients; None for the whole body."""
    path = (error.path or "").removeprefix("$").removeprefix(".")
    return path.replace("[", ".").replace("]", "") or None


async def send_error(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Respond with the error, outside of any route."""
    await error_response(error, scope["path"])(scope, receive, send)


def fault_location(error: BaseException) -> str:
    """Return the type and location of an error, without its message: files and lines."""
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    places = " < ".join(f"{frame.filename.rsplit('/', 2)[-1]}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(error).__name__} at {places}"


async def on_error(request: Request, error: Exception) -> JSONResponse:
    """Answer an error that a route raised; an unexpected one is raised again, to be logged and answered with 500."""
    known = api_error(error)
    if known.status == 500 and known.code != UNREADABLE:
        raise error
    if isinstance(error, InvalidValue | GraphInvalid | ConversationInvalid):
        known.path = _place_in(request, error)
    return error_response(known, request.url.path)


def _place_in(request: Request, error: InvalidValue | GraphInvalid | ConversationInvalid) -> str | None:
    """Map an error's field, which is an internal name, to its place in the request; None if it is not in there."""
    places = dict(_places(getattr(request.scope.get("route"), "dependant", None)))
    if isinstance(error, InvalidValue):
        name = re.match(r"\w*", error.field)[0]  # type: ignore[index]  # it always matches
        return places[name] + error.field[len(name) :] if name in places else None
    if isinstance(error, GraphInvalid):
        within = error.problems[0].path.removeprefix("$") if error.problems else ""
        return places["document"] + within if "document" in places else places.get("graph_id")
    return None  # the invalid value is in the stored conversation, not in the request


def _places(dependant: Any) -> Iterator[tuple[str, str]]:
    """Yield every parameter name of a route with its place; body fields come last and take precedence."""
    if dependant is None:
        return
    for where, fields in (("path", dependant.path_params), ("query", dependant.query_params)):
        yield from ((field.alias, f"{where}.{field.alias}") for field in fields)
    for field in dependant.body_params:
        yield from _places_within(field.field_info.annotation, "$")


def _places_within(kind: Any, where: str) -> Iterator[tuple[str, str]]:
    for model in (kind, *get_args(kind)):
        for name, field in getattr(model, "model_fields", {}).items():
            yield from _places_within(field.annotation, f"{where}.{name}")
            yield name, f"{where}.{name}"
