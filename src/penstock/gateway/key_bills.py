"""Unresolved bills of gateway keys: calls that may have been billed although no complete answer came.

The hold of such a call stays taken from the budgets of the key, its owner, its team and all keys, until a person
resolves it with the actual cost, or releases it because it cost nothing. The ledger knows the held amount. The model
and the time of the call are in the log of the gateway, under the same id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

from penstock.containment.ledger import Amounts
from penstock.errors import LedgerError, LedgerUnavailable
from penstock.gateway.key_accounts import GATEWAY_RUNS, call_id_of
from penstock.hosting.ports import Conflict
from penstock.runtime.durable.async_ledger import AsyncLedger


class KeyBillNotFound(Conflict):
    """The key has no unresolved bill of this call."""

    def __init__(self, key_id: str, call_id: str) -> None:
        self.key_id = key_id
        self.call_id = call_id
        super().__init__(
            f"gateway key {key_id!r} has no unresolved bill of call {call_id!r}; list its bills for their ids"
        )


@dataclass(frozen=True, slots=True)
class KeyBill:
    """A call of a gateway key whose bill is unknown."""

    call_id: str
    """The run, the day, the gateway's process and the call: `RUN:2026-12-31/…/…`."""
    held: Amounts

    @property
    def run(self) -> str:
        """The run that the request named; `day` if it named none."""
        return self.call_id.partition("/")[0].rpartition(":")[0]

    @property
    def day(self) -> date:
        """The day (UTC) to whose budgets the call belongs."""
        return date.fromisoformat(self.call_id.partition("/")[0].rpartition(":")[2])


async def key_bills(ledger: AsyncLedger, key_id: str) -> list[KeyBill]:
    """Return the unresolved bills of a gateway key, earliest day first; raises LedgerUnavailable."""
    unresolved = await ledger.unresolved(_prefix(key_id))
    bills = [KeyBill(call_id_of(key), held) for key, held in unresolved.items() if held.has_bill]
    return sorted(bills, key=lambda bill: (bill.day, bill.call_id))


async def resolve_key_bill(ledger: AsyncLedger, key_id: str, call_id: str, actual: Amounts | None) -> Sequence[KeyBill]:
    """Resolve a bill with the amounts that the call used, or release it if they are None; return the remaining bills.

    Raises KeyBillNotFound, and LedgerUnavailable.
    """
    bills = await key_bills(ledger, key_id)
    if all(bill.call_id != call_id for bill in bills):
        raise KeyBillNotFound(key_id, call_id)
    key = f"{_prefix(key_id)}{call_id}"
    try:
        if actual is None:
            await ledger.release(key)
        else:
            await ledger.settle(key, actual, succeeded=False)
    except LedgerUnavailable:
        raise
    except LedgerError:  # another person has resolved it meanwhile
        raise KeyBillNotFound(key_id, call_id) from None
    return [bill for bill in bills if bill.call_id != call_id]


def _prefix(key_id: str) -> str:
    return f"{GATEWAY_RUNS}{key_id}:"
