"""Error policies: what to do when a step fails.

A policy is data: how often to retry, how long to wait, and what replaces a missing result. It runs nothing; randomness
is passed in as a number. Cancellation and exceeded budgets pass through every policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from penstock import checks
from penstock.errors import InvalidValue

OnError = Literal["fail", "retry", "skip", "fallback", "continue"]

MAX_DELAY_S = 3_600.0
MAX_WHOLE = 1_000_000_000


@dataclass(frozen=True, slots=True)
class ErrorPolicy:
    """How one step recovers. Retries come first; when they are used up, `on_error` decides."""

    on_error: OnError = "fail"
    """fail and retry raise the last error; skip uses `fallback_value`; fallback uses the value or runs the node;
    continue uses the error as the value: `{"error": …, "message": …}`.
    """
    retry_count: int = 0
    """Attempts after the first."""
    retry_delay_ms: int = 1000
    retry_backoff: float = 2.0
    """Factor by which each wait is longer than the previous one."""
    timeout_ms: int | None = None
    """For each attempt."""
    fallback_value: Any = None
    fallback_node: Any = None
    retry_jitter: float = 0.1
    """Maximum relative deviation of a wait, so that steps that failed together do not retry together."""

    def __post_init__(self) -> None:
        checks.choice("on_error", self.on_error, get_args(OnError))
        checks.integer("retry_count", self.retry_count, maximum=MAX_WHOLE)
        checks.integer("retry_delay_ms", self.retry_delay_ms, maximum=MAX_WHOLE)
        if self.timeout_ms is not None:
            checks.integer("timeout_ms", self.timeout_ms, maximum=MAX_WHOLE)
        checks.number("retry_backoff", self.retry_backoff, minimum=1, maximum=1_000)
        checks.number("retry_jitter", self.retry_jitter, minimum=0, maximum=1)
        self._refuse_contradictions()

    def _refuse_contradictions(self) -> None:
        if self.on_error == "retry" and self.retry_count == 0:
            raise InvalidValue("retry_count", 0, "at least 1 with on_error='retry'")
        if self.timeout_ms == 0:
            raise InvalidValue("timeout_ms", 0, "at least 1, or None for no timeout")
        if self.fallback_node is not None and self.on_error != "fallback":
            raise InvalidValue("fallback_node", self.fallback_node, "None unless on_error='fallback'")
        if self.fallback_value is not None and self.on_error not in ("skip", "fallback"):
            raise InvalidValue("fallback_value", self.fallback_value, "None unless on_error is 'skip' or 'fallback'")
        if self.on_error == "fallback" and (self.fallback_node is None) == (self.fallback_value is None):
            expected = "given, or a fallback_value, but not both, with on_error='fallback'"
            raise InvalidValue("fallback_node", self.fallback_node, expected)

    def delay_s(self, attempt: int, chance: float) -> float:
        """Return the delay after the `attempt`-th failure (1, 2, …); `chance` is a number from 0 to 1.

        At most MAX_DELAY_S. The cap is applied before the jitter, so that waits at the cap differ as well.
        """
        try:
            growth = self.retry_backoff ** (attempt - 1)
        except OverflowError:
            growth = math.inf
        # 0 times infinity is not a number; no delay stays no delay
        delay = min(self.retry_delay_ms / 1_000 * growth, MAX_DELAY_S) if self.retry_delay_ms else 0.0
        return min(delay * (1 + self.retry_jitter * (2 * chance - 1)), MAX_DELAY_S)
