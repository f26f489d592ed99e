"""The cost of the error answers of one upstream: the setting `error_bill`.

`usage.is_free_failure` decides by the status of an answer, for every upstream alike. An upstream that bills otherwise,
or a gateway in front of one, is configured with `error_bill`. It decides about complete error answers alone: a
connection that never opened is free, and a lost connection, a timeout or an error inside a stream stays unresolved.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from penstock.errors import InvalidValue
from penstock.runtime.billing.usage import http_status

Bill = Literal["free", "unresolved"]
BILLS = ("free", "unresolved")
ErrorBill = Bill | Mapping[int, Bill]
"""Cost of an error answer: the same for every status, or by status; the default decides for statuses not listed."""

EXPECTED = "'free', 'unresolved', or a mapping from HTTP status (400 to 599) to one of them"


def check_error_bill(error_bill: Any) -> ErrorBill | None:
    """Return the setting, a mapping as a copy; raise InvalidValue if it is invalid. None is the default reading."""
    if error_bill is None or (isinstance(error_bill, str) and error_bill in BILLS):
        return error_bill  # type: ignore[return-value]  # checked in this line
    if not isinstance(error_bill, Mapping):
        raise InvalidValue("error_bill", error_bill, EXPECTED)
    for status, bill in error_bill.items():
        is_status = isinstance(status, int) and not isinstance(status, bool) and 400 <= status <= 599
        if not is_status or not isinstance(bill, str) or bill not in BILLS:
            raise InvalidValue("error_bill", dict(error_bill), EXPECTED)
    return MappingProxyType(dict(error_bill))


def is_free_status(error_bill: ErrorBill | None, status: int) -> bool | None:
    """Return whether the setting makes an answer with that status free; None if it does not decide."""
    bill = error_bill if error_bill is None or isinstance(error_bill, str) else error_bill.get(status)
    return None if bill is None or status < 400 else bill == "free"


def mark_bill(error: Exception, error_bill: ErrorBill | None) -> None:
    """Mark an error that reports an error answer as free or not, if the setting decides."""
    if error_bill is None or (status := http_status(error)) is None:
        return
    is_free = is_free_status(error_bill, status)
    if is_free is not None:
        error.penstock_free = is_free  # type: ignore[attr-defined]  # read by `is_free_failure`
