"""Errors of model calls over HTTP."""

from __future__ import annotations

from penstock.errors import CancelledError, Halted, PenstockError
from penstock.providers.reading.families import in_the_families
from penstock.runtime.call import Call


class ProviderStatus(PenstockError):
    """The provider answered with an error status or a redirect."""

    def __init__(self, status_code: int, is_free: bool | None = None) -> None:
        self.status_code = status_code
        self.penstock_free = True if status_code < 400 else is_free
        """A redirect costs nothing; for other statuses, `error_bill` decides, or else the status."""
        super().__init__(f"the provider answered HTTP {status_code}")


class BrokenAnswer(PenstockError):
    """The response is incomplete, or the provider reported an error in the middle of it."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(why)


def refusal_of(call: Call) -> Halted | CancelledError:
    """Return the error that reports to the client's caller why the call was stopped."""
    error = call.stop_error()
    return error if isinstance(error, CancelledError) else in_the_families(error)
