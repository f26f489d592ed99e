"""Why something stopped.

A closed list of reasons, and the figures of a stop: which limit, whose budget, how much. Knows nothing of the code that
decides or records.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class StopReason(StrEnum):
    """Every reason to refuse a call or stop a run; the list is closed."""

    BUDGET_EXCEEDED = "budget_exceeded"
    RETRY_BUDGET_EXCEEDED = "retry_budget_exceeded"
    CIRCUIT_OPEN = "circuit_open"
    STEP_LIMIT_EXCEEDED = "step_limit_exceeded"
    TIMEOUT = "timeout"
    ABORTED = "aborted"
    PROVIDER_RATE_LIMIT = "provider_rate_limit"
    PROVIDER_ERROR = "provider_error"
    TOKEN_LIMIT_EXCEEDED = "token_limit_exceeded"
    API_CALL_LIMIT_EXCEEDED = "api_call_limit_exceeded"
    HOOK_DENIED = "hook_denied"
    PRICE_UNKNOWN = "price_unknown"
    DIVERGED = "diverged"
    LEDGER_UNAVAILABLE = "ledger_unavailable"


class TerminationReason(StrEnum):
    """How a context (a run, a child, an agent loop) ended."""

    SUCCESS = "success"
    MAX_ITERATIONS = "max_iterations"
    ERROR = "error"
    CONTEXT_CANCELED = "context_canceled"
    HOOK_ABORT = "hook_abort"
    LIMIT_EXCEEDED = "limit_exceeded"


LIMIT_REASONS = frozenset(
    {
        StopReason.BUDGET_EXCEEDED,
        StopReason.RETRY_BUDGET_EXCEEDED,
        StopReason.STEP_LIMIT_EXCEEDED,
        StopReason.TIMEOUT,
        StopReason.TOKEN_LIMIT_EXCEEDED,
        StopReason.API_CALL_LIMIT_EXCEEDED,
    }
)
"""The reasons that come from a configured limit."""


@dataclass(frozen=True, slots=True)
class Stop:
    """One stop, as data: the reason, and the figures behind it in the unit of the limit."""

    reason: StopReason
    message: str
    budget: str | None = None
    """Owner of the budget: the name of the context that set the limit."""
    unit: str | None = None
    """usd, steps, tokens, api calls, retries or seconds."""
    limit: float | None = None
    used: float | None = None
    held: float | None = None
    asked: float | None = None
    momentary: bool = False
    """Whether only calls in progress hold the missing amount: as they end, the part they do not use is free again."""
    unresolved: float = 0.0
    """The part of `held` that belongs to calls with an unknown bill: waiting does not free it."""

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"
