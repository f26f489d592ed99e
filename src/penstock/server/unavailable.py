"""Outages of the database: the messages that clients see, and the entries in the operator's log.

The errors of stores and ledgers name files, hosts and users, which only the operator may see: the log has the original
message, a client gets a sentence that says what happened and what to do. A run that was stopped by such an error has
the original message in its events and its record; it is replaced in responses. A circuit breaker is named after the
address of its provider, which is removed the same way.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import LedgerUnavailable
from penstock.hosting.ports import HostedEvent, StoreUnavailable
from penstock.stops import StopReason

QUIET_S = 60.0
"""Interval in which the same message is logged only once."""
MAX_MESSAGES = 20
"""Maximum number of different messages logged in that interval."""

CODES: Mapping[type[Exception], str] = {
    StoreUnavailable: "store_unavailable",
    LedgerUnavailable: "ledger_unavailable",
}
MESSAGES: Mapping[str, str] = {
    "store_unavailable": "the server's database is unavailable; retry in a moment",
    "ledger_unavailable": "the server's ledger is unavailable, so no paid work can start; retry in a moment",
}
"""Messages for clients, by code."""

_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]{0,20}://[^\s'\"]+")
_CIRCUIT = str(StopReason.CIRCUIT_OPEN)
_CODE_OF = {kind.__name__: code for kind, code in CODES.items()}
_LEDGER = str(StopReason.LEDGER_UNAVAILABLE)


class LogThrottle(logging.Filter):
    """Logs the same message once per QUIET_S, so that an outage is not logged for every failing request."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__()
        self._clock = clock
        self._passed: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged."""
        now_ns, message = self._clock.monotonic_ns(), record.getMessage()
        recent = now_ns - round(QUIET_S * 1_000_000_000)
        self._passed = {logged: at_ns for logged, at_ns in self._passed.items() if at_ns > recent}
        if message in self._passed or len(self._passed) >= MAX_MESSAGES:
            return False
        self._passed[message] = now_ns
        return True


LOG = logging.getLogger("penstock.server.unavailable")
LOG.addFilter(LogThrottle())


def log_outage(error: BaseException) -> str | None:
    """Log the error if it is a database outage, and return its code; None for any other error."""
    code = next((code for kind, code in CODES.items() if isinstance(error, kind)), None)
    if code is not None:
        LOG.warning("%s: %s", code, error)
    return code


def public(event: HostedEvent) -> HostedEvent:
    """Return the event without details that clients may not see."""
    data = event.data
    stop = data.get("stop") if isinstance(data.get("stop"), Mapping) else None
    code = _code(data.get("stop_reason"), data.get("error"), data.get("message"))
    if code is None and stop is not None:
        code = _code(stop.get("reason"), None, stop.get("message"))
    if code is None:
        return event
    if code == _CIRCUIT:
        about = {name: _without_address(value) for name, value in data.items()}
        if stop is not None:
            about["stop"] = {name: _without_address(value) for name, value in stop.items()}
        return event._replace(data=about)
    about = {**data, "message": MESSAGES[code]} if "message" in data else {**data}
    if str(about.get("stop_reason")).startswith(_LEDGER):
        about["stop_reason"] = _LEDGER
    elif event.type.startswith("call.") and "stop_reason" in about:  # for a call, it is the whole sentence
        about["stop_reason"] = MESSAGES[code]
    if stop is not None:
        about["stop"] = {**stop, "message": MESSAGES[code]}
    return event._replace(data=about)


def public_error(stop_reason: str | None, error: str | None) -> str | None:
    """Return a run's error without details that clients may not see."""
    code = None if error is None else _code(stop_reason, error.partition(":")[0])
    if code is None or error is None:
        return error
    return str(_without_address(error)) if code == _CIRCUIT else MESSAGES[code]


def public_message(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data of a chat message without details that clients may not see."""
    about = dict(data)
    if isinstance(about.get("error"), str):
        about["error"] = public_error(about.get("stop_reason"), about["error"])
    return about


def _code(stop_reason: object, error: object, message: object = None) -> str | None:
    """Classify an outage by stop reason, message or error class; None if it is none."""
    for text in (stop_reason, message):
        if isinstance(text, str) and text.startswith((_LEDGER, _CIRCUIT)):
            return _LEDGER if text.startswith(_LEDGER) else _CIRCUIT
    return _CODE_OF.get(error) if isinstance(error, str) else None


def _without_address(value: object) -> object:
    return _ADDRESS.sub("…", value) if isinstance(value, str) else value
