"""Errors as clients of OpenAI's API expect them: a status, and `{"error": {"message", "type", "param", "code"}}`.

A run that was paid for is never repeated behind the user's back: where a client would try again by itself, the header
`x-should-retry: false` asks it not to, unless nothing was started.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.responses import Response

from penstock.errors import PenstockError
from penstock.server.errors import api_error
from penstock.server.openai.wire.answer import Ended

LOG = logging.getLogger("penstock.server")

TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "limit_exceeded",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
CODES: Mapping[int, str] = {401: "invalid_api_key", 403: "insufficient_permissions", 404: "not_found"}


class Refused(PenstockError):
    """A request that is answered with an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        may_retry: bool = True,
        run_id: str | None = None,
    ) -> None:
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.may_retry = may_retry
        self.run_id = run_id
        super().__init__(message)

    def to_dict(self) -> dict[str, Any]:
        """The body."""
        error: dict[str, Any] = {
            "message": self.message,
            "type": TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error"),
            "param": self.param,
            "code": self.code or CODES.get(self.status),
        }
        if self.run_id is not None:
            error["run_id"] = self.run_id
        return {"error": error}

    def response(self) -> Response:
        """As it is sent."""
        headers = self.headers if self.may_retry else {**self.headers, "x-should-retry": "false"}
        return Response(written(self.to_dict()), self.status, headers, "application/json")


def written(data: Any) -> bytes:
    """JSON in ASCII: whatever a model said, half of a surrogate pair or a line separator, it can be sent."""
    return json.dumps(data, separators=(",", ":")).encode("ascii")


def model_not_found(model: str) -> Refused:
    """The graph is not there, or not this user's."""
    return Refused(
        404,
        f"the model {model!r} does not exist or you have no access to it; GET /v1/models lists yours",
        param="model",
        code="model_not_found",
    )


def refusal_of(error: Exception) -> Refused | None:
    """The error as it is told under /v1; None for one that nobody expected: that is the server's to log and tell."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, RequestValidationError):
        return _of_validation(error.errors())
    known = api_error(error)
    if known.status == 500:
        return None
    # What a client of OpenAI's takes for a fault of the request is 400.
    status = 400 if known.status == 422 else known.status
    code = known.code if status != 404 else CODES[404]
    may_retry = status != 409
    return Refused(status, str(known), param=known.path, code=code, headers=known.headers, may_retry=may_retry)


def unknown_end(run_id: str) -> Refused:
    """Nobody works on the run here any more, and it has not ended: the host was closed before it could park it."""
    message = f"what becomes of run {run_id} is not known yet; ask for it later at /api/runs/{run_id}"
    return Refused(503, message, code="parked", may_retry=False, run_id=run_id)


def broken_off(error: Exception, run_id: str) -> Refused:
    """What a stream says that cannot go on; its status has been sent, so that nobody else can say it."""
    if refused := refusal_of(error):
        return refused
    LOG.error("the stream of run %s broke off", run_id, exc_info=error)
    return Refused(
        500, f"the stream of run {run_id} broke off; the server's log says why", code="internal", run_id=run_id
    )


def failure_of(ended: Ended, run_id: str, *, has_text: bool) -> Refused | None:
    """What a run that did not come to an answer is told as; None if it did, or a limit cut its answer short."""
    if ended.status == "completed" or (ended.is_limit and has_text):
        return None
    status, code = _status_of(ended)
    return Refused(status, _told(ended, run_id), code=code, may_retry=False, run_id=run_id)


def _status_of(ended: Ended) -> tuple[int, str]:
    if ended.status == "cancelled":
        return 409, "cancelled"
    if ended.status == "parked":
        return 503, "parked"
    if ended.is_limit:
        return 402, str(ended.reason)
    return (503 if ended.status == "halted" else 500), ended.reason or ended.status


def _told(ended: Ended, run_id: str) -> str:
    if ended.status == "parked":
        return f"run {run_id} was set aside before it ended and goes on later; its events are at /api/runs/{run_id}"
    why = ": ".join(part for part in (ended.reason, ended.message) if part)
    return f"run {run_id} {'was ' if ended.status != 'failed' else ''}{ended.status}{': ' if why else ''}{why}"


def _of_validation(errors: Sequence[Any]) -> Refused:
    first = errors[0] if errors else {}
    # Where a field may be one of several things, which of them was tried is said in brackets: that is no field.
    place = [str(part) for part in first.get("loc", ()) if part != "body" and "[" not in str(part)]
    param = ".".join(place) or None
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    what = f"{param}: " if param and first.get("type") != "json_invalid" else ""
    return Refused(400, f"{what}{first.get('msg', 'not a valid request')}{more}", param=param, code="invalid_request")
