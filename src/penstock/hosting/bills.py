"""Unresolved bills of hosted runs: the calls that hold money for an unknown bill, and their resolution by a person.

The ledger has the unresolved keys and their holds; the events of the run identify the calls. A resolution is stored as
an event first, in one transaction with the figures of the run, and then applied to the ledger. The first event about a
bill decides. Applying it is idempotent: if a host dies in between, the resolution is applied when the bills are next
listed or resolved.

A run that has not ended has a worker that writes its events, so its bills are resolved when it has ended or is parked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from penstock.containment.ledger import Amounts
from penstock.errors import LedgerError, LedgerUnavailable
from penstock.hosting.control import append_event, found
from penstock.hosting.durability import day_accounts
from penstock.hosting.event_data import BILL_RELEASED, BILL_RESOLVED, sanitize
from penstock.hosting.figures import label, outer_node
from penstock.hosting.host_context import HostContext
from penstock.hosting.ports import (
    ENDED,
    INTERACTIVE_ATTEMPTS,
    PARKED,
    Conflict,
    CostShare,
    Fenced,
    HostedEvent,
    RunRecord,
    TransactionStores,
    retry_unavailable,
)
from penstock.ids import new_run_id
from penstock.money import format_usd, to_nanos, to_usd
from penstock.runtime.durable.async_ledger import AsyncLedger
from penstock.runtime.durable.blocks import recall

PAGE = 1_000
MAX_ATTEMPTS = 10
"""Maximum number of transactions for one resolution, if others write events of the run at the same time."""
RESTING = ENDED | PARKED
WORKER_LOST = "the worker was lost before the call ended"
Place = tuple[int, str]
"""The epoch of a claim, and the id of a call in its tree."""


class BillNotFound(Conflict):
    """The run has no unresolved bill of this call."""

    def __init__(self, run_id: str, call_id: str) -> None:
        self.run_id = run_id
        self.call_id = call_id
        super().__init__(f"run {run_id!r} has no unresolved bill of call {call_id!r}; list its bills for their ids")


class BillAlreadyResolved(Conflict):
    """The bill was resolved by another request."""

    def __init__(self, run_id: str, resolution: HostedEvent) -> None:
        data = resolution.data
        what = "released"
        if resolution.type == BILL_RESOLVED:
            what = f"resolved at {format_usd(to_nanos(data['cost_usd']))}"
        super().__init__(f"the bill of call {data['call_id']!r} of run {run_id!r} was {what} by {data['by']!r}")


class RunGoesOn(Conflict):
    """The run has a worker, or waits for one, which counts its usage."""

    def __init__(self, run: RunRecord) -> None:
        super().__init__(f"run {run.id!r} has not ended: its bills can be resolved when it has ended")


class HostedBill(NamedTuple):
    """A call of a hosted run whose bill is unknown."""

    call_id: str
    """The claim under which the call was made, a slash, and the id of the call in its tree."""
    held: Amounts
    name: str | None = None
    model: str | None = None
    at_ms: int | None = None
    """When the call ended, or began if its worker was lost; None if no event records it."""
    reason: str = WORKER_LOST
    """Why the bill is unknown."""


class _History(NamedTuple):
    """The bills of a run, as recorded in its events."""

    calls: Mapping[Place, HostedEvent]
    """The newest event of each call."""
    resolutions: Mapping[str, HostedEvent]
    """The first resolution of each bill, by call id."""
    last: HostedEvent | None


class Bills:
    """The unresolved bills of the runs in one host's stores."""

    def __init__(self, context: HostContext) -> None:
        self._context = context

    async def unresolved(self, run_id: str) -> list[HostedBill]:
        """Return the unresolved bills of a run, oldest first."""
        run = await found(self._context.stores.runs, run_id)
        holds = await self._holds(run)
        if not holds:
            return []
        history = await self._history(run, holds)
        await self._apply(run, {id: history.resolutions[id] for id in holds if id in history.resolutions})
        bills = [_bill(id, held, history) for id, held in holds.items() if id not in history.resolutions]
        return sorted(bills, key=lambda bill: (bill.at_ms or 0, bill.call_id))

    async def resolve(self, run_id: str, call_id: str, actual: Amounts | None, by: str) -> RunRecord:
        """Resolve a bill at the `actual` amounts, or release it if they are None; return the run with its new figures.

        Raises BillNotFound, and another Conflict if the run has not ended or the bill was resolved already.
        """
        run = await found(self._context.stores.runs, run_id)
        _check_resting(run)
        holds = await self._holds(run)
        history = await self._history(run, [call_id])
        if call_id in history.resolutions:
            await self._apply(run, {call_id: history.resolutions[call_id]})
            raise BillAlreadyResolved(run.id, history.resolutions[call_id])
        if call_id not in holds:
            raise BillNotFound(run_id, call_id)
        resolution, changed = await self._store(run, history, _bill(call_id, holds[call_id], history), actual, by)
        await self._apply(run, {call_id: resolution})
        self._context.counted["cost_nanos"] += changed.cost_nanos - run.cost_nanos
        return changed

    async def _holds(self, run: RunRecord) -> dict[str, Amounts]:
        """Return the holds for unknown bills, by call id; for a run at rest, also those that no worker has settled."""
        prefix = f"{run.id}/"

        async def look() -> dict[str, Amounts]:
            ledger = self._context.ledger
            held = await ledger.held(prefix) if run.status in RESTING else {}
            holds = {**await ledger.unresolved(prefix), **held}
            return {key.removeprefix(prefix): held for key, held in holds.items() if held.has_bill}

        return await retry_unavailable(look, INTERACTIVE_ATTEMPTS)

    async def _history(self, run: RunRecord, call_ids: Collection[str]) -> _History:
        events, wanted = self._context.stores.events, {_place(call_id) for call_id in call_ids}
        calls: dict[Place, HostedEvent] = {}
        resolutions: dict[str, HostedEvent] = {}
        last, epoch, seq = None, 1, 0
        while page := await retry_unavailable(partial(events.read, run.id, seq, PAGE), INTERACTIVE_ATTEMPTS):
            for event in page:
                if event.type in ("run.started", "run.resumed"):
                    epoch = event.data.get("epoch", epoch)
                elif event.type in ("call.started", "call.ended"):
                    place = epoch, event.data["call_id"]
                    if place in wanted:
                        calls[place] = event
                elif event.type in (BILL_RESOLVED, BILL_RELEASED):
                    resolutions.setdefault(event.data["call_id"], event)
            last = page[-1]
            seq = last.seq
        return _History(calls, resolutions, last)

    async def _store(
        self, run: RunRecord, history: _History, bill: HostedBill, actual: Amounts | None, by: str
    ) -> tuple[HostedEvent, RunRecord]:
        """Store the resolution of a bill and the new figures of its run, in one transaction."""
        used, call = actual or Amounts(), history.calls.get(_place(bill.call_id))
        node_id = None if call is None else call.data.get("node_id")
        type = BILL_RELEASED if actual is None else BILL_RESOLVED
        data = {
            "call_id": bill.call_id,
            "name": bill.name,
            "model": bill.model,
            **({} if node_id is None else {"node_id": node_id}),
            "by": sanitize(by),
            "cost_usd": to_usd(used.cost_nanos),
            "tokens_in": used.tokens_in,
            "tokens_out": used.tokens_out,
            "held_usd": to_usd(bill.held.cost_nanos),
            "resolution_id": new_run_id(),
        }
        seq = 0 if history.last is None else history.last.seq
        share = CostShare(outer_node(node_id), label(bill.model), 0, used.cost_nanos, used.tokens_in, used.tokens_out)

        async def unit(stores: TransactionStores) -> tuple[HostedEvent, RunRecord]:
            behind = await stores.events.read(run.id, seq, PAGE)
            for event in behind:
                if event.data.get("resolution_id") == data["resolution_id"]:  # stored; only its response was lost
                    return event, await found(stores.runs, run.id)
                if event.data.get("call_id") == bill.call_id and event.type in (BILL_RESOLVED, BILL_RELEASED):
                    raise BillAlreadyResolved(run.id, event)
            last = behind[-1] if behind else history.last
            resolution = await append_event(stores, run, last, type, data, self._context.now_ms())
            now = await found(stores.runs, run.id)
            _check_resting(now)
            changed = await stores.runs.set_usage(run.id, run.epoch, **_changed_usage(now, bill.held, used))
            await stores.spending.record(changed, [*await stores.spending.of(run.id), share])
            return resolution, changed

        transaction = self._context.stores.transaction
        for _ in range(MAX_ATTEMPTS):
            try:
                return await retry_unavailable(lambda: transaction(unit, inline=True), INTERACTIVE_ATTEMPTS)
            except Fenced:
                raise RunGoesOn(run) from None
            except (BillAlreadyResolved, RunGoesOn):
                raise
            except Conflict:  # another event was appended after this transaction had read the last one
                continue
        raise Conflict(f"the events of run {run.id!r} change all the time; try again")

    async def _apply(self, run: RunRecord, resolutions: Mapping[str, HostedEvent]) -> None:
        """Apply stored resolutions to the ledger; without effect where they are applied already."""
        for call_id, resolution in resolutions.items():
            accounts = day_accounts(run, self._context.settings.zone)
            settle = partial(_settle, self._context.ledger, f"{run.id}/{call_id}", resolution, accounts)
            await retry_unavailable(settle, INTERACTIVE_ATTEMPTS)


async def _settle(ledger: AsyncLedger, key: str, resolution: HostedEvent, day: Sequence[str]) -> None:
    data = resolution.data
    for account in day:  # a bill may exceed its hold, and no block pays for that
        await recall(ledger, account)
    try:
        await ledger.leave_unresolved(key)  # a lost worker has left it held
        if resolution.type == BILL_RELEASED:
            await ledger.release(key)
        else:
            await ledger.settle(
                key, Amounts(to_nanos(data["cost_usd"]), data["tokens_in"], data["tokens_out"]), succeeded=False
            )
    except LedgerUnavailable:
        raise
    except LedgerError:  # settled already: by this resolution, or by a call that ended late
        return


def _changed_usage(run: RunRecord, held: Amounts, used: Amounts) -> dict[str, int]:
    return {
        "cost_nanos": run.cost_nanos + used.cost_nanos,
        "tokens_in": run.tokens_in + used.tokens_in,
        "tokens_out": run.tokens_out + used.tokens_out,
        "unresolved_nanos": max(0, run.unresolved_nanos - held.cost_nanos),
    }


def _bill(call_id: str, held: Amounts, history: _History) -> HostedBill:
    event = history.calls.get(_place(call_id))
    if event is None:
        return HostedBill(call_id, held)
    data: Mapping[str, Any] = event.data
    reason = WORKER_LOST
    if event.type == "call.ended":
        reason = data.get("stop_reason") or f"the call ended as {data['status']}"
    return HostedBill(call_id, held, data.get("name"), data.get("model"), event.at_ms, reason)


def _place(call_id: str) -> Place:
    """Return the claim and the call that an id names: `1-0123456789ab/n000002`."""
    claim, _, node_id = call_id.partition("/")
    epoch, _, _ = claim.partition("-")
    return int(epoch) if epoch.isascii() and epoch.isdigit() else 0, node_id.partition("/")[0]


def _check_resting(run: RunRecord) -> None:
    if run.status not in RESTING:
        raise RunGoesOn(run)
