"""Unresolved bills of a run: the calls that hold money for an unknown bill, and their resolution by a person.

A call that was lost, timed out or aborted may have been billed, so its hold stays taken. A person who knows the bill
resolves it at its amount, or releases it if the call cost nothing. Each bill is resolved once, and the resolution is
recorded as a safety event with the person's name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from penstock import checks
from penstock.clock import utc_from_ns
from penstock.containment.safety import Decision, SafetyEvent
from penstock.errors import InvalidValue, LedgerError
from penstock.money import Usd, format_usd, to_nanos, to_usd
from penstock.runtime.billing.usage import Usage
from penstock.runtime.call import Call
from penstock.runtime.handle import Handle
from penstock.runtime.locking import unlock
from penstock.runtime.run import OpenBill, Run

RESOLVED, RELEASED = "bill_resolved", "bill_released"
"""Types of the safety events that record a resolution."""
MAX_PERSON = 200


@dataclass(frozen=True, slots=True)
class UnresolvedBill:
    """A call whose bill is unknown, and the amount held for it."""

    call_id: str
    """Id of the call in the tree, to resolve it by."""
    name: str
    model: str | None
    held_usd: float
    held_tokens: int
    ended_at: datetime
    """When the call ended, in UTC."""
    reason: str
    """Why the bill is unknown: the error, or what stopped the call."""


def check_person(by: object) -> str:
    """Return the name of the person who resolves a bill; raise InvalidValue if it is not a valid name."""
    if not isinstance(by, str) or not by.strip():
        raise InvalidValue("by", by, "the name of the person who resolves the bill")
    return checks.line("by", by.strip(), maximum=MAX_PERSON)


def unresolved(run: Run) -> list[UnresolvedBill]:
    """Return the unresolved bills of the run, oldest first."""
    with run.lock:
        found = [bill for bill in (run.bills or {}).values() if bill.held.state == "unresolved"]
        return [_shown(run, bill) for bill in found]


def resolve(place: Handle, call_id: str, cost_usd: Usd, by: str, input_tokens: int, output_tokens: int) -> None:
    """Settle an unresolved bill at its amount, which may be more than its hold; record who did it."""
    by, cost = check_person(by), to_nanos(cost_usd, "cost_usd")
    call, bill = _open_bill(place._run, call_id)
    usage = Usage.of(cost_usd=cost_usd, input_tokens=input_tokens, output_tokens=output_tokens)
    message = f"{by} resolved the bill of call {call_id} at {format_usd(cost)}; it held {format_usd(call._held_cost)}"
    call._settle(usage, _recorder(place, bill, RESOLVED, message, {"by": by, "cost_usd": to_usd(cost)}))


def release(place: Handle, call_id: str, by: str) -> None:
    """Release the hold of a call that was not billed; record who did it."""
    by = check_person(by)
    call, bill = _open_bill(place._run, call_id)
    message = f"{by} released the bill of call {call_id}; it held {format_usd(call._held_cost)}"
    call._release(_recorder(place, bill, RELEASED, message, {"by": by, "cost_usd": 0.0}))


def _open_bill(run: Run, call_id: str) -> tuple[Call, OpenBill]:
    """Return the call with an unresolved bill; LedgerError if there is none of that id."""
    checks.text("call_id", call_id)
    lock = run.lock
    try:  # in place of `with`: see `locking`
        lock.acquire()
        bill = (run.bills or {}).get(call_id)
        earlier = [] if run.safety_events is None else [*run.safety_events]
        lock.release()
    except BaseException:
        unlock(lock)
        raise
    if bill is None:
        raise LedgerError(f"run {run.id!r} has no unresolved bill of call {call_id!r}; list them with unresolved()")
    call = bill.held
    assert isinstance(call, Call), "only calls leave bills"
    if call.state != "unresolved":
        by_whom = (
            event.reason
            for event in reversed(earlier)
            if event.event_type in (RESOLVED, RELEASED) and event.metadata.get("node_id") == call_id
        )
        why = next(by_whom, "its cost has become known")
        raise LedgerError(f"the bill of call {call_id} is not unresolved any more: {why}")
    return call, bill


def _shown(run: Run, bill: OpenBill) -> UnresolvedBill:
    held, record = bill.held, bill.record
    ended_at = utc_from_ns(run.wall_time_ns(bill.at_ns))
    cost_usd, tokens = to_usd(held._held_cost), held._held_tokens
    return UnresolvedBill(record.node_id, record.name, record.model, cost_usd, tokens, ended_at, bill.reason)


def _recorder(
    place: Handle, bill: OpenBill, event_type: str, message: str, facts: dict[str, Any]
) -> Callable[[], None]:
    """Return a function that records the resolution once, however often the change around it is repeated."""
    run = place._run
    event = SafetyEvent(
        event_type=event_type,
        decision=Decision.ALLOW,
        reason=message,
        hook="ExecutionContext",
        request_id=run.metadata.request_id,
        ts=run.wall_time(),
        metadata=run.about(bill.record) | {"held_usd": to_usd(bill.held._held_cost), **facts},
    )

    def record() -> None:
        newest = run.safety_events[-1] if run.safety_events else None
        if newest is not event:  # with the lock, so that nothing else was recorded since
            run.record_safety(event, place._source, bill.record)

    return record
