"""Errors as clients of OpenAI's API expect them: a status, and `{"error": {"message", "type", "param", "code"}}`.

A run that has cost money is never repeated without the user's decision: where a client would retry automatically, the
header `x-should-retry: false` prevents it, unless no run was started. A run that was halted only because calls under
way hold the rest of a budget is 429 with `Retry-After`; clients retry it if it has cost nothing, and a retry starts a
new run. A limit that is used up is 402, because waiting does not help.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.responses import Response

from penstock.agents.formats import FormatError
from penstock.errors import PenstockError
from penstock.hosting.halts import RAISED_BY
from penstock.kernel.graph import GraphInvalid
from penstock.money import format_usd, to_nanos
from penstock.nodes.client_tools import ToolNameTaken
from penstock.nodes.parts.services import ModelUnknown
from penstock.server.errors import RETRY_AFTER_S, ApiError, api_error, fault_location, param_of
from penstock.server.openai.wire.answer import Ended
from penstock.server.openai.wire.chunks import run_facts
from penstock.server.openai.wire.options import UnsupportedParameter
from penstock.server.openai.wire.request import ImageUrl
from penstock.server.openai.wire.response import response_id
from penstock.server.sse import ClientDisconnected, ServerShutdown
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
PARAMS: Mapping[str, str] = {
    StopReason.PRICE_UNKNOWN: "model",
    ModelUnknown.__name__: "model",
    ToolNameTaken.__name__: "tools",
}
"""The parameter at fault, by stop reason or error class."""
ADVICE: Mapping[str, str] = {
    FormatError.__name__: "use a simpler schema, or a model that can enforce it and strict: true",
}
"""Advice by the error class for which a run stopped."""
NO_RETRY: Mapping[str, str] = {"x-should-retry": "false"}
"""Header that OpenAI's clients check before they retry automatically."""
CODES: Mapping[int, str] = {401: "invalid_api_key", 403: "insufficient_permissions", 404: "not_found"}


class Refused(PenstockError):
    """An error response to a request."""

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
        """`about` describes the run that produced no answer, if one was started."""
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.may_retry = may_retry
        self.about = about
        super().__init__(message)

    def to_dict(self) -> dict[str, Any]:
        """Return the response body."""
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
        """Return the HTTP response."""
        headers = self.headers if self.may_retry else {**self.headers, **NO_RETRY}
        return Response(encode_json(self.to_dict()), self.status, headers, "application/json")


def encode_json(data: Any) -> bytes:
    """Encode as ASCII JSON, so that any model output can be sent, even a lone surrogate or a line separator."""
    return json.dumps(data, separators=(",", ":")).encode("ascii")


def model_not_found(model: str, why: str = "") -> Refused:
    """Return the error for a model that does not exist or is not accessible, or for the reason in `why`."""
    fact = f"the model {model!r} does not exist or you have no access to it"
    message = f"{fact}; {why or 'GET /v1/models lists the available models'}"
    return Refused(404, message, param="model", code="model_not_found")


def refusal_of(error: Exception) -> Refused | None:
    """Convert an error to its /v1 form; None for an unexpected error, which the server logs and reports."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, RequestValidationError):
        return _of_validation(error.errors())
    if isinstance(error, UnsupportedParameter):
        return Refused(400, str(error), param=error.param, code="unsupported_parameter")
    known = api_error(error)
    if known.status == 500:
        return None
    # OpenAI's clients expect 400 for an invalid request.
    status = 400 if known.status == 422 else known.status
    code = known.code if status != 404 else CODES[404]
    may_retry = status != 409
    param = "model" if isinstance(error, GraphInvalid) else param_of(known)
    return Refused(status, str(known), param=param, code=code, headers=known.headers, may_retry=may_retry)


@contextmanager
def naming_run(run_id: str) -> Iterator[None]:
    """Report errors after a run was started with its id and no retry: a retry would start and pay for another run."""
    try:
        yield
    except (Refused, ClientDisconnected):
        raise
    except Exception as error:
        if refused := refusal_of(error):
            message = f"run {run_id} was started, but its answer cannot be read: {_fact(refused)}; {_advice(run_id)}"
            about = {"run_id": run_id}
            raise Refused(refused.status, message, code=refused.code, may_retry=False, about=about) from error
        LOG.error("a request failed after its run %s was started: %s", run_id, fault_location(error))
        message = f"the server failed to answer; its log has the location. Run {run_id} was started: {_advice(run_id)}"
        raise ApiError(500, message, code="internal", headers=NO_RETRY) from error


def outcome_unknown(run_id: str) -> Refused:
    """Return the error for a run that stopped here without an end: the host closed before it could park the run."""
    return _parked(f"the outcome of run {run_id} is not known yet", {"run_id": run_id})


def parked_error(ended: Ended, run_id: str) -> Refused:
    """Return the error for a parked run: the request ends here, but the run continues later."""
    message = f"run {run_id} was parked before it ended, and continues when the server is running again"
    return _parked(message, run_facts(run_id, ended))


def stream_error(error: Exception, run_id: str) -> Refused:
    """Return the error to send in a stream that cannot continue; its HTTP status has already been sent."""
    if isinstance(error, ServerShutdown):
        return _parked(f"the server is shutting down; run {run_id} is kept, and continues later", {"run_id": run_id})
    if refused := refusal_of(error):
        refused.about = refused.about or {"run_id": run_id}
        return refused
    LOG.error("the stream of run %s failed", run_id, exc_info=error)
    message = f"the stream of run {run_id} failed; the server's log has the reason"
    return Refused(500, message, code="internal", about={"run_id": run_id})


def _parked(message: str, about: Mapping[str, Any]) -> Refused:
    return Refused(503, f"{message}; {_advice(about['run_id'])}", code="parked", may_retry=False, about=about)


def _fact(error: Exception) -> str:
    """Return the error message without the advice after its first semicolon."""
    return str(error).partition(";")[0]


def _advice(run_id: str) -> str:
    """Return advice on how to get the answer of an existing run."""
    where = f"GET /v1/responses/{response_id(run_id)} or GET /api/runs/{run_id}"
    return f"get its answer with {where}; a new request would start a new run"


def failure_of(
    ended: Ended, run_id: str, *, has_text: bool, own_limits: Collection[str] = (), is_named: bool = False
) -> Refused | None:
    """Return the error for a run without an answer; None if it has one, even if a limit truncated it.

    `own_limits` are the names of the limits that the request set. A retry of a request that names its run
    (`is_named`) gets the same run again.
    """
    if ended.status == "completed" or (ended.is_limit and has_text):
        return None
    if ended.status == "parked":
        return parked_error(ended, run_id)
    status, code = _status_of(ended)
    reason = str(ended.reason)
    advice = _how_to_raise(ended, run_id, own_limits, is_named) if ended.is_limit else ADVICE.get(reason)
    message = "; ".join(filter(None, (_outcome(ended, run_id), advice)))
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 429 else None
    may_retry = status == 429 and ended.is_free and not is_named
    about = run_facts(run_id, ended)
    param = PARAMS.get(reason)
    return Refused(status, message, param=param, code=code, headers=headers, may_retry=may_retry, about=about)


def _how_to_raise(ended: Ended, run_id: str, own_limits: Collection[str], is_named: bool) -> str | None:
    """Return advice on where the limit that halted the run is set, and how to raise it."""
    name = RAISED_BY.get(str(ended.reason))
    if ended.is_momentary:
        how = f"continue this run with POST /api/runs/{run_id}/resume" if is_named else "retry"
        return f"the rest is held for calls in progress, which may need less: {how} in a moment"
    if ended.unresolved_usd and ended.reason == StopReason.BUDGET_EXCEEDED and ended.whose != "node":
        held = format_usd(to_nanos(ended.unresolved_usd))
        then = f"then continue this run with POST /api/runs/{run_id}/resume"
        return f"unresolved bills hold {held} of it: list them with GET /api/runs/{run_id}/bills, resolve them, {then}"
    if ended.whose == "node":
        return "a node of the graph sets that limit: raise it there, in a new version of the graph"
    if ended.whose in ("owner", "all"):
        payer = "you" if ended.whose == "owner" else "all users together"
        return f"it is the server's daily budget for {payer}: retry on another day, or ask the operator to raise it"
    if name is None:
        return None
    field = f"penstock.limits.{name}"
    source = f"the request sets it in {field}" if name in own_limits else f"the server sets it unless you send {field}"
    grant = f'POST /api/runs/{run_id}/grant with {{"limits": {{"{name}": …}}}}'
    return f"{source}: retry with a higher limit, or continue this run with {grant}"


def _status_of(ended: Ended) -> tuple[int, str]:
    if ended.status == "cancelled":
        return 409, "cancelled"
    if ended.is_limit:
        return 429 if ended.is_momentary else 402, str(ended.reason)
    if ended.reason in (ModelUnknown.__name__, ToolNameTaken.__name__):  # the graph or the request is at fault
        return 400, ended.reason
    return (503 if ended.status == "halted" else 500), ended.reason or ended.status


def _outcome(ended: Ended, run_id: str) -> str:
    why = ": ".join(part for part in (ended.reason, ended.message) if part)
    return f"run {run_id} {'was ' if ended.status != 'failed' else ''}{ended.status}{': ' if why else ''}{why}"


def _of_validation(errors: Sequence[Any]) -> Refused:
    first = _nearest(errors) if errors else {}
    place = _place(first)
    is_read = first.get("type") != "json_invalid"  # for invalid JSON, the place is a text position, not a field
    param = ".".join(place) if place and is_read else None
    others = len({tuple(_place(error)) for error in errors if not _is_below(error, _place(errors[0]))})
    more = f" (and {others} more)" if others else ""
    what = f"{param}: " if param else ""
    return Refused(400, f"{what}{_expected(errors, place)}{more}", param=param, code="invalid_request")


def _expected(errors: Sequence[Any], place: Sequence[str]) -> str:
    """Return the problem at this place; the alternatives of a union type become one sentence."""
    found = dict.fromkeys(str(error.get("msg")) for error in errors if _place(error) == place)
    first, *others = found or ["the request is invalid"]
    return ", or ".join([first, *(other.removeprefix("Input should be ") for other in others)])


def _nearest(errors: Sequence[Any]) -> Any:
    """Return the first error; for a field of a union type, the error of the alternative that matched deepest."""
    within = _place(errors[0])
    return max((error for error in errors if _is_below(error, within)), key=lambda error: len(_place(error)))


def _is_below(error: Any, place: Sequence[str]) -> bool:
    return _place(error)[: len(place)] == place


def _place(error: Any) -> list[str]:
    """Return the path of the field that an error is about."""
    # The first part is the location, body or query. For a union type, the path also contains the alternative that was
    # tried, as a class name or in brackets; that is not a field.
    parts = error.get("loc", ())[1:]
    return [str(part) for part in parts if "[" not in str(part) and part != ImageUrl.__name__]
