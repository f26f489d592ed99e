"""The grant of a key: the run that pays for its requests, and the requests that it may make.

A `Keyring` finds the grant of a key. The gateway of one command has one key and one run; a gateway for a team has the
keys of a database.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, Protocol

from penstock.gateway.bounds import unbounded_by
from penstock.gateway.wires import Denied
from penstock.providers.http.exchange import Terms
from penstock.providers.http.request import ModelRequest

UnknownCost = Literal["count", "refuse"]
"""How to treat a request whose worst case is unknown: hold for the known part, or refuse it."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The permissions of one key, and the run that pays for it."""

    terms: Terms
    """The run that pays, and the output limits of its calls."""
    models: tuple[str, ...] = ()
    """Patterns of the models that may be called, such as `gpt-*`; empty for all."""
    unknown_cost: UnknownCost = "count"
    calls: str = ""
    """Prefix of the ids of its calls, in the log and among the bills of its key."""
    release: Callable[[], None] = lambda: None
    """Called when the request has ended."""

    def check(self, request: ModelRequest) -> None:
        """Raise Denied if the key does not allow the request."""
        if request.body.get("background"):
            raise Denied(
                400, "background: true is not offered by the gateway: its answer is not seen", code="background"
            )
        if self.models and not any(fnmatchcase(request.model, pattern) for pattern in self.models):
            allowed = ", ".join(self.models)
            raise Denied(
                403, f"this key may not call {request.model[:200]!r}; it allows {allowed}", code="model_not_allowed"
            )
        if self.unknown_cost == "refuse" and (unknown := self._unknown(request)) is not None:
            message = f"the cost of {unknown} is unknown before it is billed, and this gateway refuses such requests"
            raise Denied(400, message, code="unknown_cost")

    def _unknown(self, request: ModelRequest) -> str | None:
        if request.form.output == "unknown" and request.form.api != "speech":
            return f"a request to {request.form.api}"
        return unbounded_by(request)


class Keyring(Protocol):
    """Finds the grant of a key."""

    async def grant(self, key: str, headers: Mapping[str, str]) -> Grant:
        """Return the grant of the key; raise Denied (401) if it has none."""


class OneKey:
    """The keyring of one command: one key, one run."""

    def __init__(self, key: str, grant: Grant) -> None:
        self._key = key.encode()
        self._grant = grant

    async def grant(self, key: str, headers: Mapping[str, str]) -> Grant:
        """Return the grant of the run; raise Denied if the key is another."""
        if not hmac.compare_digest(key.encode("utf-8", "surrogateescape"), self._key):
            raise Denied(401, wrong_key(key), code="invalid_api_key")
        return self._grant


def wrong_key(key: str) -> str:
    """Return the message for a key that is missing or unknown; it never repeats the key."""
    if not key:
        return "no key was sent: set the key of the gateway as the API key of the client"
    return "this is no key of the gateway: provider keys stay with it, and its clients send a key of the gateway"
