"""Behaviours of a model provider, as data.

Each value is the outcome of one request; a script is a list of them. A closed union: `fake` plays every one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from penstock.money import Usd

Throwable: TypeAlias = BaseException | type[BaseException]


class ProviderHTTPError(Exception):
    """The provider answered with an error status."""

    def __init__(self, status_code: int, headers: dict[str, str] | None = None) -> None:
        super().__init__(f"the provider answered HTTP {status_code}")
        self.status_code = status_code
        self.headers = headers or {}


@dataclass(frozen=True, slots=True)
class Answer:
    """A normal answer; `cost_usd` replaces the list price, as a discount or a surcharge would."""

    text: str = "ok"
    input_tokens: int = 100
    output_tokens: int = 50
    latency_s: float | None = None
    cost_usd: Usd | None = None


@dataclass(frozen=True, slots=True)
class FailAfterBilling:
    """The answer is generated and billed in full, and the caller gets `error` instead."""

    error: Throwable = ConnectionResetError
    input_tokens: int = 100
    output_tokens: int = 50


@dataclass(frozen=True, slots=True)
class RefuseFree:
    """The request is refused before anything was generated: rate limit, bad request, bad key."""

    status: int = 429
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class ServerError:
    """The provider fails; the status does not show the caller whether the request was `billed`."""

    status: int = 500
    billed: bool = False
    input_tokens: int = 100
    output_tokens: int = 50


@dataclass(frozen=True, slots=True)
class LieAboutUsage:
    """The answer reports one usage, the invoice another."""

    reported_input: int
    reported_output: int
    real_input: int
    real_output: int
    text: str = "ok"


@dataclass(frozen=True, slots=True)
class NoUsage:
    """A normal, billed answer that does not report its usage."""

    text: str = "ok"
    input_tokens: int = 100
    output_tokens: int = 50


@dataclass(frozen=True, slots=True)
class Raise:
    """Nothing is generated or billed; the caller gets `exception`, as from a connection that never opened."""

    exception: Throwable = ConnectionRefusedError


@dataclass(frozen=True, slots=True)
class Stall:
    """A delay of `seconds` longer than usual, followed by the behaviour `then`."""

    seconds: float
    then: Behaviour = field(default_factory=Answer)


Behaviour: TypeAlias = Answer | FailAfterBilling | RefuseFree | ServerError | LieAboutUsage | NoUsage | Raise | Stall
