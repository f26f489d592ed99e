"""Errors as clients of OpenAI's API expect them: a status, and `{"error": {"message", "type", "param", "code"}}`.

A run that was paid for is never repeated behind the user's back: where a client would try again by itself, the header
`x-should-retry: false` asks it not to, unless nothing was started.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.responses import Response

from penstock.errors import PenstockError
from penstock.hosting.work.halts import RAISED_BY
from penstock.kernel.graph import GraphInvalid
from penstock.nodes.parts.models import ModelUnknown
from penstock.server.errors import ApiError, api_error, param_of
from penstock.server.guards.envelope import fault
from penstock.server.openai.leaving import ClientLeft, ServerCloses
from penstock.server.openai.wire.answer import Ended
from penstock.server.openai.wire.bodies import ImageUrl
from penstock.server.openai.wire.chunks import spent
from penstock.server.openai.wire.response import response_id
from penstock.stops import StopReason

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
NO_RETRY: Mapping[str, str] = {"x-should-retry": "false"}
"""What OpenAI's clients read before they ask again by themselves."""
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
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """`about` is what is known of the run that came to no answer, if there was one."""
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.may_retry = may_retry
        self.about = about
        super().__init__(message)

    def to_dict(self) -> dict[str, Any]:
        """The body."""
        error: dict[str, Any] = {
            "message": self.message,
            "type": TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error"),
            "param": self.param,
            "code": self.code or CODES.get(self.status),
        }
        if self.about is not None:
            error |= {"run_id": self.about["run_id"], "penstock": dict(self.about)}
        return {"error": error}

    def response(self) -> Response:
        """As it is sent."""
        headers = self.headers if self.may_retry else {**self.headers, **NO_RETRY}
        return Response(written(self.to_dict()), self.status, headers, "application/json")


def written(data: Any) -> bytes:
    """JSON in ASCII: whatever a model said, half of a surrogate pair or a line separator, it can be sent."""
    return json.dumps(data, separators=(",", ":")).encode("ascii")


def model_not_found(model: str, why: str = "") -> Refused:
    """The graph is not there, or not this user's, or what `why` says."""
    is_not = f"the model {model!r} does not exist or you have no access to it"
    message = f"{is_not}; {why or 'GET /v1/models lists yours'}"
    return Refused(404, message, param="model", code="model_not_found")


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
    param = "model" if isinstance(error, GraphInvalid) else param_of(known)
    return Refused(status, str(known), param=param, code=code, headers=known.headers, may_retry=may_retry)


@contextmanager
def of_run(run_id: str) -> Iterator[None]:
    """What goes wrong once a run is there, told as its: whoever asked again would begin another, and pay for both."""
    try:
        yield
    except (Refused, ClientLeft):
        raise
    except Exception as error:
        if refused := refusal_of(error):
            message = f"run {run_id} was started, and what it says cannot be told: {_fact(refused)}; {_later(run_id)}"
            about = {"run_id": run_id}
            raise Refused(refused.status, message, code=refused.code, may_retry=False, about=about) from error
        LOG.error("a request failed once its run %s was started: %s", run_id, fault(error))
        message = f"the server failed to answer; its log says where. Run {run_id} was started: {_later(run_id)}"
        raise ApiError(500, message, code="internal", headers=NO_RETRY) from error


def unknown_end(run_id: str) -> Refused:
    """Nobody works on the run here any more, and it has not ended: the host was closed before it could park it."""
    return _parked(f"what becomes of run {run_id} is not known yet", {"run_id": run_id})


def set_aside(ended: Ended, run_id: str) -> Refused:
    """The run was parked: for the request it is over, and for nobody else."""
    message = f"run {run_id} was set aside before it ended, and goes on with the next server"
    return _parked(message, spent(run_id, ended))


def broken_off(error: Exception, run_id: str) -> Refused:
    """What a stream says that cannot go on; its status has been sent, so that nobody else can say it."""
    if isinstance(error, ServerCloses):
        return _parked(f"the server is closing; run {run_id} is kept, and goes on", {"run_id": run_id})
    if refused := refusal_of(error):
        refused.about = refused.about or {"run_id": run_id}
        return refused
    LOG.error("the stream of run %s broke off", run_id, exc_info=error)
    message = f"the stream of run {run_id} broke off; the server's log says why"
    return Refused(500, message, code="internal", about={"run_id": run_id})


def _parked(message: str, about: Mapping[str, Any]) -> Refused:
    return Refused(503, f"{message}; {_later(about['run_id'])}", code="parked", may_retry=False, about=about)


def _fact(error: Exception) -> str:
    """What has happened, without the advice behind it."""
    return str(error).partition(";")[0]


def _later(run_id: str) -> str:
    """How to come to the answer of a run that is there."""
    where = f"GET /v1/responses/{response_id(run_id)} or GET /api/runs/{run_id}"
    return f"ask for it at {where}, for a new request would be a new run"


def failure_of(ended: Ended, run_id: str, *, has_text: bool, asked: Collection[str] = ()) -> Refused | None:
    """What a run that did not come to an answer is told as; None if it did, or a limit cut its answer short.

    `asked` are the limits that the request set itself.
    """
    if ended.status == "completed" or (ended.is_limit and has_text):
        return None
    if ended.status == "parked":
        return set_aside(ended, run_id)
    status, code = _status_of(ended)
    helps = _what_helps(ended, run_id, asked) if ended.is_limit else None
    message = "; ".join(filter(None, (_told(ended, run_id), helps)))
    param = "model" if ended.reason == StopReason.PRICE_UNKNOWN else None
    return Refused(status, message, param=param, code=code, may_retry=False, about=spent(run_id, ended))


def _what_helps(ended: Ended, run_id: str, asked: Collection[str]) -> str | None:
    """Where the limit was set that has halted a run, and how to have more of it."""
    name = RAISED_BY.get(str(ended.reason))
    if ended.is_momentary:
        return "calls that are under way hold what is left of it, and may need less: ask again in a moment"
    if ended.whose == "node":
        return "a node of the graph sets that limit: give it more there, in a new version of the graph"
    if ended.whose in ("owner", "all"):
        payer = "you" if ended.whose == "owner" else "everybody together"
        return f"the server sets what {payer} may spend in a day: ask on another day, or ask whoever runs it for more"
    if name is None:
        return None
    field = f"penstock.limits.{name}"
    again = f"the request sets it, in {field}" if name in asked else f"the server sets it, unless a request has {field}"
    grant = f'POST /api/runs/{run_id}/grant with {{"limits": {{"{name}": …}}}}'
    return f"{again}: ask again with more, or let this run go on: {grant}"


def _status_of(ended: Ended) -> tuple[int, str]:
    if ended.status == "cancelled":
        return 409, "cancelled"
    if ended.is_limit:
        return 402, str(ended.reason)
    if ended.reason == ModelUnknown.__name__:  # the graph is wrong, and not the server
        return 400, ended.reason
    return (503 if ended.status == "halted" else 500), ended.reason or ended.status


def _told(ended: Ended, run_id: str) -> str:
    why = ": ".join(part for part in (ended.reason, ended.message) if part)
    return f"run {run_id} {'was ' if ended.status != 'failed' else ''}{ended.status}{': ' if why else ''}{why}"


def _of_validation(errors: Sequence[Any]) -> Refused:
    first = _nearest(errors) if errors else {}
    place = _place(first)
    is_read = first.get("type") != "json_invalid"  # else the place is one in the text, and no field
    param = ".".join(place) if place and is_read else None
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    what = f"{param}: " if param else ""
    return Refused(400, f"{what}{first.get('msg', 'not a valid request')}{more}", param=param, code="invalid_request")


def _nearest(errors: Sequence[Any]) -> Any:
    """The first error; where a field may be one of several things, the one that was nearest to what was sent."""
    within = _place(errors[0])
    return max((one for one in errors if _place(one)[: len(within)] == within), key=lambda one: len(_place(one)))


def _place(error: Any) -> list[str]:
    """The field that an error is about, and those that it stands in."""
    # The first part says where it stood, in the body or in the query. Where a field may be one of several things, which
    # of them was tried is said, by its class or in brackets: that is no field.
    parts = error.get("loc", ())[1:]
    return [str(part) for part in parts if "[" not in str(part) and part != ImageUrl.__name__]
