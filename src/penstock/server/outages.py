"""A database that is away: what clients are told of it, and what the operator finds in the log.

The errors of stores and ledgers name files, hosts and users. Whoever keeps the server needs that, and nobody else may
see it: the log has the error's own words, a client has a sentence that says what happened and what to do. A run that
was stopped by such an error carries its words in its events and its record; they are replaced on the way out. A circuit
is named after the address of its provider, which is left out the same way.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import LedgerUnavailable
from penstock.hosting.ports import StoreUnavailable
from penstock.hosting.records import HostedEvent
from penstock.stops import StopReason

QUIET_S = 60.0
"""The same words are in the log once in so long."""
MOST_AT_ONCE = 20
"""So many different ones in that time, and no more."""

CODES: Mapping[type[Exception], str] = {
    StoreUnavailable: "store_unavailable",
    LedgerUnavailable: "ledger_unavailable",
}
WORDS: Mapping[str, str] = {
    "store_unavailable": "the server's database does not answer; ask again in a moment",
    "ledger_unavailable": "the server's ledger cannot record, and nothing that costs may start until it can; "
    "ask again in a moment",
}
"""What clients are told."""

_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]{0,20}://[^\s'\"]+")
_CIRCUIT = str(StopReason.CIRCUIT_OPEN)
_CODE_OF = {kind.__name__: code for kind, code in CODES.items()}
_LEDGER = str(StopReason.LEDGER_UNAVAILABLE)


class NotTooOften(logging.Filter):
    """Lets the same words pass once in QUIET_S: an outage is news, not every request that meets it."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__()
        self._clock = clock
        self._passed: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is to be written."""
        now_ns, words = self._clock.monotonic_ns(), record.getMessage()
        recent = now_ns - round(QUIET_S * 1_000_000_000)
        self._passed = {said: at_ns for said, at_ns in self._passed.items() if at_ns > recent}
        if words in self._passed or len(self._passed) >= MOST_AT_ONCE:
            return False
        self._passed[words] = now_ns
        return True


LOG = logging.getLogger("penstock.server.outages")
LOG.addFilter(NotTooOften())


def note(error: BaseException) -> str | None:
    """Let the log have the words of a database that is away; the code of that outage, None for any other error."""
    code = next((code for kind, code in CODES.items() if isinstance(error, kind)), None)
    if code is not None:
        LOG.warning("%s: %s", code, error)
    return code


def public(event: HostedEvent) -> HostedEvent:
    """The event as a client may see it."""
    data = event.data
    code = _code(data.get("stop_reason"), data.get("error"), data.get("message"))
    if code is None:
        return event
    if code == _CIRCUIT:
        return event._replace(data={name: _without_address(one) for name, one in data.items()})
    about = {**data, "message": WORDS[code]} if "message" in data else {**data}
    if str(about.get("stop_reason")).startswith(_LEDGER):
        about["stop_reason"] = _LEDGER
    return event._replace(data=about)


def public_error(stop_reason: str | None, error: str | None) -> str | None:
    """What is said of a run's end, as a client may see it."""
    code = None if error is None else _code(stop_reason, error.partition(":")[0])
    if code is None or error is None:
        return error
    return str(_without_address(error)) if code == _CIRCUIT else WORDS[code]


def public_message(data: Mapping[str, Any]) -> dict[str, Any]:
    """The data of an answer in a chat, as a client may see it."""
    about = dict(data)
    if isinstance(about.get("error"), str):
        about["error"] = public_error(about.get("stop_reason"), about["error"])
    return about


def _code(stop_reason: object, error: object, message: object = None) -> str | None:
    """Which outage it was, by a stop, its text or the class of an error; None if it was none."""
    for text in (stop_reason, message):
        if isinstance(text, str) and text.startswith((_LEDGER, _CIRCUIT)):
            return _LEDGER if text.startswith(_LEDGER) else _CIRCUIT
    return _CODE_OF.get(error) if isinstance(error, str) else None


def _without_address(value: object) -> object:
    return _ADDRESS.sub("…", value) if isinstance(value, str) else value
