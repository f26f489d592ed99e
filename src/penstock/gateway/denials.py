"""Translate the errors of a contained call into responses for the client.

A refusal by a limit is 402, which no client retries. A call that has no room only because of other calls is 429 with a
short `Retry-After`. Failures of the provider are 502 and 504, which clients may retry: each attempt is a call of its
own. An unavailable database is 503, and its error message never reaches the client.
"""

from __future__ import annotations

import httpcore2

from penstock.errors import CancelledError, Halted, LedgerUnavailable, PenstockError, RunEnded
from penstock.gateway.wires import PAYMENT_REQUIRED, TOO_MANY_REQUESTS, Denied
from penstock.hosting.ports import StoreUnavailable
from penstock.providers.http.refusals import BrokenAnswer
from penstock.providers.reading.bodies import UnreadableAnswer
from penstock.stops import Stop, StopReason

RETRY_AFTER_S = 5
UNAVAILABLE = 503
TRANSPORT_ERRORS = (httpcore2.NetworkError, httpcore2.TimeoutException, httpcore2.ProtocolError, OSError)


def denial_of(error: BaseException, upstream: str) -> Denied | None:
    """Return the response to a request that failed with this error; None if the error is the gateway's own."""
    match error:
        case Denied():
            return error
        case Halted() | CancelledError() if error.stop is not None:
            return _halted(error.stop)
        case RunEnded():
            return Denied(PAYMENT_REQUIRED, f"{error}; nothing is sent for it any more", code="run_ended")
        case StoreUnavailable() | LedgerUnavailable():
            return _unavailable()
        case httpcore2.TimeoutException():
            return Denied(504, f"the upstream {upstream} did not answer in time", code="upstream_timeout")
        case BrokenAnswer() | UnreadableAnswer():
            return Denied(502, f"the answer of the upstream {upstream} is broken: {error}", code="upstream_broken")
        case PenstockError():
            return Denied(PAYMENT_REQUIRED, str(error), code="answer_refused")
        case httpcore2.NetworkError() | httpcore2.ProtocolError() | OSError():
            return Denied(502, f"the upstream {upstream} cannot be reached: {_cause(error)}", code="upstream_failed")
        case _:
            return None


def _halted(stop: Stop) -> Denied:
    if stop.reason is StopReason.LEDGER_UNAVAILABLE:
        return _unavailable()
    message = f"penstock: {stop.message}"
    if stop.momentary:
        return Denied(TOO_MANY_REQUESTS, message, code=stop.reason.value, retry_after_s=RETRY_AFTER_S)
    return Denied(PAYMENT_REQUIRED, message, code=stop.reason.value)


def _unavailable() -> Denied:
    message = "the gateway cannot reach its database, and sends nothing without it"
    return Denied(UNAVAILABLE, message, code="unavailable")


def _cause(error: BaseException) -> str:
    return str(error) or type(error).__name__
