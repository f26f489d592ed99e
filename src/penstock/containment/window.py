"""How many calls in how much time.

A hook for a `ShieldPipeline`: counts the calls it lets through in a sliding window, and refuses the rest until the
window has moved on. Knows nothing of runs or money; time comes in through a clock.
"""

from __future__ import annotations

from collections import deque
from math import ceil
from threading import Lock
from typing import ClassVar

from penstock import checks
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.containment.limits import UNLIMITED
from penstock.containment.safety import Decision, ToolCallContext
from penstock.errors import InvalidValue
from penstock.stops import StopReason


class BudgetWindowHook:
    """At most `max_calls` in any `window_seconds`, degraded from `degrade_threshold` of them on.

    A call is counted when it is let through, degraded or not; a refused one is not, so that a refused caller gets in
    when the window has moved on. Serves as `pre_dispatch` or `tool_dispatch` hook; in both, the slots share one window.
    Among several hooks it belongs last: it cannot know that a later one refuses a call it has counted.
    """

    stop_reason: ClassVar[StopReason] = StopReason.PROVIDER_RATE_LIMIT

    def __init__(
        self,
        max_calls: int,
        window_seconds: float = 60.0,
        degrade_threshold: float | None = 0.8,
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._max_calls = checks.integer("max_calls", max_calls, maximum=UNLIMITED - 1)
        self._window_ns = _positive_ns("window_seconds", window_seconds)
        self._degrade_from = _degrade_from(self._max_calls, degrade_threshold)
        self._clock = clock
        self._lock = Lock()
        self._let_through: deque[int] = deque()
        """When each call of the window was let through, oldest first; never more than `max_calls`."""
        self._now_ns = clock.monotonic_ns()
        """The latest time seen: a clock that steps back does not bring calls back into the window."""

    def before_llm_call(self, ctx: ToolCallContext) -> Decision | None:
        """HALT if the window is full, DEGRADE if nearly full, None otherwise; counts the call unless it is HALT."""
        with self._lock:
            now_ns = self._forget_old()
            count = len(self._let_through)
            if count >= self._max_calls:
                return Decision.HALT
            self._let_through.append(now_ns)
            return Decision.DEGRADE if count >= self._degrade_from else None

    def before_tool_call(self, ctx: ToolCallContext) -> Decision | None:
        """The same window, before a tool call."""
        return self.before_llm_call(ctx)

    def explain(self) -> str:
        """The count, the window, and the seconds until a slot is free."""
        if self._max_calls == 0:
            return "no calls are allowed at all: max_calls is 0"
        with self._lock:
            now_ns = self._forget_old()
            count = len(self._let_through)
            free_in_ns = self._let_through[0] + self._window_ns - now_ns if count >= self._max_calls else 0
        free = f"a slot is free in {_seconds(free_in_ns)}" if free_in_ns else "a slot is free now"
        return f"{count} of {self._max_calls} calls in the last {_seconds(self._window_ns)}; {free}"

    def _forget_old(self) -> int:
        self._now_ns = now_ns = max(self._now_ns, self._clock.monotonic_ns())
        gone_ns = now_ns - self._window_ns
        let_through = self._let_through
        while let_through and let_through[0] <= gone_ns:
            let_through.popleft()
        return now_ns


def _degrade_from(max_calls: int, threshold: object) -> int:
    """The count in the window from which on a call is degraded; `max_calls` is never."""
    if threshold is None:
        return max_calls
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 <= threshold <= 1:
        raise InvalidValue("degrade_threshold", threshold, "a share from 0 to 1, or None to never degrade")
    # 0.07 * 100 is a hair above 7 in floats; the count that was meant is 7.
    return ceil(round(threshold * max_calls, 9))


def _seconds(ns: int) -> str:
    return f"{round(ns / 1e9, 3):g} s"


def _positive_ns(field: str, seconds: object) -> int:
    return max(1, round(checks.seconds(field, seconds, above_zero=True) * 1_000_000_000))
