"""Every failure as a status, a code and a sentence.

One table says which error of ours is which status. What is not in it is a fault of the server: the answer then says
nothing but that, and the log says where. Under /v1 the same facts stand in the shape that OpenAI's clients read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from penstock.chat.conversation import ConversationInvalid
from penstock.chat.limits import AttachmentUnknown, ChatUnknown, MessageUnknown
from penstock.errors import Halted, InvalidValue, PenstockError, RunEnded
from penstock.hosting.admission import Overloaded
from penstock.hosting.control import UnknownApproval, UnknownRun
from penstock.hosting.host import GraphArchived, UnknownGraph
from penstock.hosting.ports import Conflict, Fenced
from penstock.ids import AN_ID, ID
from penstock.kernel.graph import GraphInvalid, Problem
from penstock.server import outages
from penstock.tracing.redaction import redact

RETRY_AFTER_S = 2
MAX_DETAILS = 50
MAX_MESSAGE = 1_000

STATUS: Mapping[type[Exception], tuple[int, str]] = {
    **{kind: (503, code) for kind, code in outages.CODES.items()},
    Overloaded: (429, "overloaded"),
    UnknownGraph: (404, "not_found"),
    UnknownRun: (404, "not_found"),
    UnknownApproval: (404, "not_found"),
    ChatUnknown: (404, "not_found"),
    MessageUnknown: (404, "not_found"),
    AttachmentUnknown: (404, "not_found"),
    GraphArchived: (409, "conflict"),
    Fenced: (409, "conflict"),
    Conflict: (409, "conflict"),
    RunEnded: (409, "conflict"),
    Halted: (409, "halted"),
    GraphInvalid: (422, "graph_invalid"),
    ConversationInvalid: (422, "conversation_invalid"),
    InvalidValue: (422, "invalid_value"),
}
"""What each error of ours is over HTTP; the nearest class counts."""

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
    """An answer that is no success: its status, a code for programs, a sentence for people, and where in the body."""

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
    """Nothing of that id, or nothing of theirs: both look the same."""
    return ApiError(404, f"there is no such {what}")


def api_error(error: BaseException) -> ApiError:
    """What `error` is over HTTP."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _invalid_request(error)
    if isinstance(error, HTTPException):
        return _of_starlette(error)
    for kind in type(error).__mro__:
        if kind in STATUS:
            return _known(error, *STATUS[kind])
    return ApiError(500, "the server failed to answer; its log says where, under this request's id", code="internal")


def _known(error: BaseException, status: int, code: str) -> ApiError:
    problems = list(getattr(error, "problems", ()))
    wait = getattr(error, "retry_after_s", None)
    return ApiError(
        status,
        told(error),
        code=code,
        path=getattr(error, "field", None) or (problems[0].path if problems else None),
        details=list(problem_details(problems)),
        retry_after_s=wait if wait is not None else RETRY_AFTER_S if status in {429, 503} else None,
    )


def told(error: BaseException) -> str:
    """The error's own sentence, short, without what looks like a secret or says where a database is."""
    if (code := outages.note(error)) is not None:
        return outages.WORDS[code]
    text = str(redact(str(error)[: MAX_MESSAGE * 2]))
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}…"


def problem_details(problems: Sequence[Problem]) -> Iterator[dict[str, str]]:
    """What is wrong with a document, place by place."""
    for problem in problems[:MAX_DETAILS]:
        yield {"code": problem.code, "path": problem.path, "message": problem.detail}


def _invalid_request(error: RequestValidationError) -> ApiError:
    # Only where and why, never what was sent: that may be anything, a secret among it.
    found = [{"path": _place(one["loc"]), "message": _why(one)} for one in error.errors()[:MAX_DETAILS]]
    first = found[0] if found else {"path": "$", "message": "it cannot be read"}
    return ApiError(422, f"{first['path']}: {first['message']}", path=first["path"], details=found)


def _why(problem: Mapping[str, Any]) -> str:
    """What is wrong, in words; a pattern says nothing to people."""
    pattern = (problem.get("ctx") or {}).get("pattern")
    return f"must be an id: {AN_ID}" if pattern == f"^{ID.pattern}$" else str(problem["msg"])


def _place(loc: Sequence[int | str]) -> str:
    where, *steps = loc or ("body",)
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{str(step)[:80]}" for step in steps)
    return f"${path}" if where == "body" else f"{where}{path}"


def _of_starlette(error: HTTPException) -> ApiError:
    return ApiError(error.status_code, str(error.detail), headers=error.headers)


def answer(error: ApiError, path: str) -> JSONResponse:
    """The error as a response, in the shape that callers of `path` read."""
    if not path.startswith("/v1/"):
        return JSONResponse({"error": _shape(error)}, error.status, error.headers)
    status = 400 if error.status == 422 else error.status  # all that OpenAI's clients take for a fault of the request
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
    """The field of the request that an error is about, as OpenAI's clients read it; None for the whole body."""
    path = (error.path or "").removeprefix("$").removeprefix(".")
    return path.replace("[", ".").replace("]", "") or None


async def on_error(request: Request, error: Exception) -> JSONResponse:
    """The handler of every error of ours that a route raises; one that nobody knows goes on, to be logged and told."""
    said = api_error(error)
    if said.status == 500:
        raise error
    if isinstance(error, InvalidValue | GraphInvalid | ConversationInvalid):
        said.path = _place_in(request, error)
    return answer(said, request.url.path)


def _place_in(request: Request, error: InvalidValue | GraphInvalid | ConversationInvalid) -> str | None:
    """Where the request said what an error of ours is about, which knows its own names alone; None if it did not."""
    places = dict(_places(getattr(request.scope.get("route"), "dependant", None)))
    if isinstance(error, InvalidValue):
        name = re.match(r"\w*", error.field)[0]  # type: ignore[index]  # it always matches
        return places[name] + error.field[len(name) :] if name in places else None
    if isinstance(error, GraphInvalid):
        within = error.problems[0].path.removeprefix("$") if error.problems else ""
        return places["document"] + within if "document" in places else places.get("graph_id")
    return None  # what is wrong was kept long ago


def _places(dependant: Any) -> Iterator[tuple[str, str]]:
    """Every name that a route knows, with its place; what stands in the body comes last, and counts."""
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
