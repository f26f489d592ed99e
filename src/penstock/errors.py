"""Everything Penstock raises.

    Exception
    └── PenstockError
        ├── InvalidValue (ValueError)          an argument is not valid
        ├── RunEnded (RuntimeError)            a call or a mark after the end of its run
        ├── DeadlockError                      the wait for a persistent node took too long, or could never end
        ├── LedgerError                        a hold was used twice, or does not exist
        │   ├── KeyTaken                       the key of a call is taken by another call: this call is not made
        │   ├── UnderAnother                   an account has another parent already
        │   └── LedgerUnavailable              the ledger cannot record, so no call may leave
        ├── StepTimeout (TimeoutError)         an attempt of a step took longer than its policy allows
        └── Halted                             a call was refused or stopped; carries the stop
            └── BudgetExceededError            … by a limit; carries usage, budget and partial results
    BaseException
    └── CancelledError                         the run was cancelled; `except Exception` does not catch it

BudgetExceededError is in `containment.limits`, beside the budget and the usage it carries. The errors of graphs
(GraphInvalid, CycleFound and others) are in the kernel, beside the checks that raise them. A halt is not a fault: a
limit did its work. Each class writes its message from the facts it is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, overload

from penstock.stops import Stop, StopReason


class PenstockError(Exception):
    """Base class of all errors of Penstock except `CancelledError`."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors are copied, and sent between processes: `args` is the message, not the arguments of `__init__`.
        return _copied, (type(self), self.args, self.__dict__)


class InvalidValue(PenstockError, ValueError):
    """An argument is not valid; `field` names it, `value` is what was given, `expected` describes a valid value."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        self.field = field
        self.value = value
        self.expected = expected
        super().__init__(f"{field} must be {expected}, not {_shown(value)}")


class RunEnded(PenstockError, RuntimeError):
    """Work was started in a run, or in a child context, that has already ended."""

    def __init__(self, run_id: str, attempted: str, context: str | None = None) -> None:
        self.run_id = run_id
        self.context = context
        where = f"run {run_id}" if context is None else f"context {context!r} of run {run_id}"
        what = "run" if context is None else "child"
        super().__init__(f"{where} has ended: {attempted}; start a new {what} for further work")


class DeadlockError(PenstockError):
    """A step waited too long for a persistent node, or its wait could never end: then `waited_s` is None.

    Raise it with a message alone for a lock of your own.
    """

    @overload
    def __init__(self, message: str, /) -> None: ...

    @overload
    def __init__(self, node: str, waited_s: float | None, why: str) -> None: ...

    def __init__(self, node: str, waited_s: float | None = None, why: str | None = None) -> None:
        self.node = None if why is None else node
        self.waited_s = waited_s
        self.why = node if why is None else why
        if why is None:
            super().__init__(node)
            return
        if waited_s is None:
            what = f"the wait for {node!r} could never end"
            to_do = "acquire such nodes in the same order everywhere, or release one before acquiring the next"
        else:
            what = f"no turn at {node!r} within {waited_s:g} s"
            to_do = "allow a longer wait, or shorten the steps that use it"
        super().__init__(f"{what}: {why}; {to_do}")


class LedgerError(PenstockError):
    """An operation was refused because it would make the figures of the ledger wrong."""


class KeyTaken(LedgerError):
    """The key of a hold belongs to another call; nothing was held, and the other call keeps its hold."""

    def __init__(self, key: str, why: str) -> None:
        self.key = key
        super().__init__(why)


class UnderAnother(LedgerError):
    """An account cannot be moved below `parent`, because its parent is `above` already."""

    def __init__(self, account: str, parent: str, above: str) -> None:
        self.above = above
        because = f"it is under {above!r}; put {parent!r} under that first"
        super().__init__(f"account {account!r} cannot be put under {parent!r}: {because}")


class LedgerUnavailable(LedgerError):
    """The ledger cannot record; no call that costs anything starts until it can."""


class StepTimeout(PenstockError, TimeoutError):
    """An attempt of a step took longer than its policy allows; like any failure, it can be retried."""

    def __init__(self, step: str, timeout_ms: int) -> None:
        self.step = step
        self.timeout_ms = timeout_ms
        super().__init__(f"step {step!r} took longer than the {timeout_ms} ms its policy allows")


class Halted(PenstockError):
    """A call was refused or stopped; `stop` has the reason."""

    def __init__(self, stop: Stop, *, partial: Mapping[str, Any] | None = None) -> None:
        self.stop = stop
        self.partial: Mapping[str, Any] = partial or {}
        """Results so far by call name; a stream that was stopped has an `IncompleteOutput` there."""
        super().__init__(str(stop))

    @property
    def partial_results(self) -> Mapping[str, Any]:
        """`partial`, under the name that every exception raised from a graph has."""
        return self.partial

    @property
    def stop_reason(self) -> StopReason:
        """The reason as one of the closed list, such as `budget_exceeded`."""
        return self.stop.reason

    @property
    def reason(self) -> str:
        """The reason in words: which limit, whose budget, how much."""
        return self.stop.message


class CancelledError(BaseException):
    """The work was cancelled. Not an Exception: code and policies that catch Exception cannot swallow it."""

    def __init__(self, message: str | None = None, *, stop: Stop | None = None) -> None:
        if message is None:
            message = "cancelled" if stop is None else stop.message
        self.stop = stop or Stop(StopReason.ABORTED, message)
        self.partial: Mapping[str, Any] = {}
        """Results of a graph so far, by step; a stream that was stopped has an `IncompleteOutput` there."""
        super().__init__(message)

    @property
    def partial_results(self) -> Mapping[str, Any]:
        """`partial`, under the name that every exception raised from a graph has."""
        return self.partial

    @property
    def reason(self) -> str:
        """Why the work was cancelled, in words."""
        return self.stop.message


def _copied(kind: type[PenstockError], args: tuple[Any, ...], facts: dict[str, Any]) -> PenstockError:
    error = kind.__new__(kind, *args)
    error.args = args  # an OSError, such as a TimeoutError, sets them elsewhere
    error.__dict__.update(facts)
    return error


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # whatever it is: an int of 5,000 digits, a broken __repr__
        text = f"<{type(value).__name__} that cannot be shown>"
    return text if len(text) <= 80 else text[:77] + "..."
