"""The parts of a run that let another worker continue it: its journal, and its account in the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, tzinfo
from typing import NamedTuple

from penstock.clock import utc_from_ns
from penstock.containment.accounts import Balance
from penstock.containment.limits import NO_LIMITS, Budget, Limits
from penstock.errors import LedgerError, LedgerUnavailable, UnderAnother
from penstock.hosting.host_context import HostContext
from penstock.hosting.limits import Ceilings, RunLimits, ceilings_of
from penstock.hosting.ports import INTERACTIVE_ATTEMPTS, Fenced, RunRecord, retry_unavailable
from penstock.money import to_usd
from penstock.nodes.agent import AgentNode
from penstock.nodes.llm_completion import LlmCompletion
from penstock.runtime.durable import failpoints
from penstock.runtime.durable.async_ledger import AsyncLedger
from penstock.runtime.durable.blocks import end_block, is_block
from penstock.runtime.durable.journal import Journal, shortened
from penstock.runtime.durable.keys import display_id, entry_node, escaped
from penstock.runtime.durable.ports import JournalEntry, JournalStore
from penstock.runtime.durable.shared import SharedBudget
from penstock.runtime.graphs.graph_runtime import GraphPlan

ONLY_ASK = (AgentNode, LlmCompletion)
RUNS, OWNERS, TEAMS, ALL, UNKNOWN = "run:", "user:", "team:", "all:", "unknown:"
"""Prefixes of account names: of a run (by id), of an owner and of a team (by name and day), of all owners (by day), and
of the calls of a run whose cost is unknown (by run id)."""
INHERITED = "inherited"
"""Key in the origin's `about` of a fork or replay: the number of journal entries inherited from the other run."""
MAX_ACCOUNTS = 10_000
"""Maximum number of daily accounts remembered as open."""
FIRST_PAUSE_S, MAX_BACKOFF_S = 0.005, 0.25
ASKING_S = 5.0
"""How long the end of a run waits for the ledger's response to a pending hold request."""
TELLING_S = 15.0
"""How long the end of a run tries to settle calls in the ledger; amounts not settled by then stay held there."""


class Earlier(NamedTuple):
    """Money that calls under earlier claims of a run took and that its journal does not have."""

    spent_nanos: int = 0
    """Of calls that failed, and of bills that were resolved since."""
    unresolved_nanos: int = 0


NOTHING_EARLIER = Earlier()


@dataclass(frozen=True, slots=True)
class Durable:
    """The durable parts of one run."""

    journal: Journal
    shared: SharedBudget | None
    """None for a replay, which costs nothing."""
    ceilings: Ceilings
    """Limits of the run, without the time worked under earlier claims; for a fork, raised by the usage of the journal
    entries it inherits."""
    earlier: Earlier = NOTHING_EARLIER

    async def settle(self, is_leaving: Callable[[], bool]) -> None:
        """Settle the remaining calls in the ledger after the run is over; later faults are not reported to the run.

        A hold whose request was pending when its caller left is released once the ledger has responded; until then it
        would look like a hold with unknown cost. A closing host does not wait: the next one does.
        """
        shared = self.shared
        if shared is None:
            return
        shared.close()
        pause_s, waited_s = FIRST_PAUSE_S, 0.0
        while True:
            # Read before `waiting`: a response first queues what is to be settled, then stops counting as `asking`.
            asking = shared.asking and waited_s < ASKING_S
            left = await shared.aflush() if shared.waiting else 0
            if is_leaving() or not (asking or (left and waited_s < TELLING_S)):
                break
            await asyncio.sleep(pause_s)
            waited_s += pause_s
            pause_s = min(2 * pause_s, MAX_BACKOFF_S)
        shared.on_fault = None


NOTHING = {"cost_nanos": 0, "tokens_in": 0, "tokens_out": 0, "unresolved_nanos": 0, "unknown_costs": 0}


async def paid(context: HostContext, run: RunRecord, is_leaving: Callable[[], bool]) -> Mapping[str, int]:
    """Return the usage of a run from the ledger, if this process does not know all of it; otherwise empty.

    For a run that was taken over, only the ledger knows the cost of calls that failed before or were in progress, even
    if this host did not continue any of it. The journal entries of a fork were paid for by the run it was forked from.
    So the end of a run waits for an unavailable ledger, as it does for every store; a closing host that parks the run
    does not wait.
    """
    if run.origin.get("kind") == "replay":
        return NOTHING
    if run.epoch == 1 and "of" not in run.origin:
        return {}
    shared = _shared(context, run)

    async def look() -> tuple[Balance, int]:
        await shared.arecover()
        return await context.ledger.balance(shared.account), await shared.aunknown_costs()

    while True:
        try:
            balance, unknown_costs = await retry_unavailable(look, INTERACTIVE_ATTEMPTS)
            break
        except KeyError:  # its account was never opened
            return {}
        except LedgerUnavailable:
            if is_leaving():
                return {}
            await asyncio.sleep(MAX_BACKOFF_S)
    return {
        "cost_nanos": balance.spent_nanos,
        "tokens_in": balance.tokens_in,
        "tokens_out": balance.tokens_out,
        "unresolved_nanos": balance.unresolved_nanos + balance.held_nanos,  # held: not settled in time
        "unknown_costs": unknown_costs,
    }


def _shared(context: HostContext, run: RunRecord, above: Sequence[str] = ()) -> SharedBudget:
    """Return the shared budget of a run under its current claim.

    The prefix contains the host's mark besides the epoch: after the stores are restored from a backup, or with other
    stores on the same ledger, a run may be claimed under an epoch that this ledger has already seen.
    """
    prefix = f"{run.id}/{run.epoch}-{context.mark}"
    ledger, account = context.stores.ledger, RUNS + run.id
    return SharedBudget(ledger, account, prefix=prefix, unknown=UNKNOWN + run.id, owner=run.owner, above=above)


class RetryingJournal:
    """A journal store that retries while the store is unavailable, and calls `on_fenced` if an append is fenced."""

    def __init__(self, store: JournalStore, on_fenced: Callable[[], None]) -> None:
        self._store = store
        self._on_fenced = on_fenced

    async def load(self, run_id: str) -> Sequence[JournalEntry]:
        return await retry_unavailable(lambda: self._store.load(run_id))

    async def append(self, run_id: str, entries: Sequence[JournalEntry], *, epoch: int = 0) -> None:
        try:
            await retry_unavailable(lambda: self._store.append(run_id, entries, epoch=epoch))
        except Fenced:
            self._on_fenced()
            raise

    async def shorten(self, run_id: str, entries: Sequence[JournalEntry], *, epoch: int = 0) -> None:
        await retry_unavailable(lambda: self._store.shorten(run_id, entries, epoch=epoch))

    async def forget(self, run_id: str) -> None:
        await retry_unavailable(lambda: self._store.forget(run_id))


def nodes_that_only_ask(plan: GraphPlan) -> frozenset[str]:
    """Return the journal keys of the nodes that only call a model and tools, through the journal.

    Between an answer and the next call, or the end of the node, these nodes have no outside effect. A subclass may have
    one, and is not included.
    """
    return frozenset(escaped(node.id) for node in plan.graph.nodes if type(plan.executors[node.type]) in ONLY_ASK)


async def shortened_journal(store: JournalStore, run: RunRecord, journal: Journal | None) -> Sequence[JournalEntry]:
    """Return the journal entries of a completed run that a fork or replay can still need, if fewer than recorded."""
    short = None if journal is None else journal.shortened()
    if journal is not None and short is None:
        await journal.flush()
    return shortened(await retry_unavailable(lambda: store.load(run.id))) if short is None else short


async def durable_parts(context: HostContext, run: RunRecord, worked_ms: int, on_fenced: Callable[[], None]) -> Durable:
    """Open the journal and the account of a claimed run; `worked_ms` is the execution time under earlier claims."""
    store, is_replay = RetryingJournal(context.stores.journal, on_fenced), run.origin.get("kind") == "replay"
    if run.epoch == 1 and "of" not in run.origin:  # nothing can have been written yet
        journal = Journal(store, run.id, epoch=run.epoch, clock=context.steady)
    else:
        journal = await Journal.open(store, run.id, epoch=run.epoch, replay_only=is_replay, clock=context.steady)
    ceilings = _ceilings(journal, run).after(worked_ms)
    if is_replay:
        return Durable(journal, None, ceilings)
    shared = _shared(context, run, await retry_unavailable(lambda: open_accounts(context, run)))
    if run.epoch == 1:
        return Durable(journal, shared, ceilings)
    await retry_unavailable(shared.arecover)
    if failpoints.hook is not None:
        failpoints.hook("claim.adopted")
    balance = await retry_unavailable(lambda: context.ledger.balance(shared.account))
    paid_nanos = sum(entry.cost_nanos for entry in journal) - sum(
        entry.cost_nanos for entry in _inherited(journal, run)
    )
    return Durable(
        journal, shared, ceilings, Earlier(max(0, balance.spent_nanos - paid_nanos), balance.unresolved_nanos)
    )


def _inherited(journal: Journal, run: RunRecord) -> list[JournalEntry]:
    """Return the entries of a fork or replay that the other run has paid for."""
    if "of" not in run.origin:
        return []
    is_marked = INHERITED in (run.origin.get("about") or {})
    # `journal_without` marks inherited entries by a negative time; without the mark, older entries are inherited.
    return [entry for entry in journal if (entry.at_ms < 0 if is_marked else entry.at_ms <= run.created_ms)]


def _ceilings(journal: Journal, run: RunRecord) -> Ceilings:
    if "of" not in run.origin:
        return ceilings_of(run.limits)
    before = _inherited(journal, run)
    inherited = RunLimits(
        max_cost_usd=to_usd(sum(entry.cost_nanos for entry in before)),
        max_steps=len(before),
        max_tokens=sum(entry.tokens_in + entry.tokens_out for entry in before),
        max_api_calls=sum(entry.kind == "llm" for entry in before),
    )
    return ceilings_of(RunLimits.from_dict(run.limits).plus(inherited).to_dict())


async def open_accounts(context: HostContext, run: RunRecord) -> Sequence[str]:
    """Open the run's account, below the daily accounts of the day on which it was submitted.

    Returns the accounts above it, the lowest first.
    """
    may_be_in_block = context.settings.day_blocks and run.epoch == 1 and "of" not in run.origin
    try:
        return await _open_account(context, run, may_be_in_block)
    except LedgerUnavailable:
        raise
    except (KeyError, LedgerError) as error:  # a remembered account was removed, or moved by another host
        context.accounts.clear()
        if isinstance(error, UnderAnother) and is_block(error.above):
            return await _without_block(context, run, error.above)
        return await _open_account(context, run, may_be_in_block)


async def _open_account(context: HostContext, run: RunRecord, may_be_in_block: bool) -> Sequence[str]:
    levels = await _open_day_accounts(context, run)
    above = [*levels]
    if levels and may_be_in_block:
        account = await context.blocks.account_for(levels)
        above = above if account == levels[-1] else [*levels, account]
    limits = ceilings_of(run.limits).in_ledger
    await _open(context.ledger, RUNS + run.id, limits, above[-1] if above else None)
    return above[::-1]


async def _without_block(context: HostContext, run: RunRecord, block: str) -> Sequence[str]:
    """Open the account of a run that began in a block of another host, after ending that block."""
    await end_block(context.ledger, block)
    try:
        return await _open_account(context, run, may_be_in_block=False)
    except UnderAnother as error:
        if error.above != block:
            raise
    # The block belongs to other daily accounts than those that this host would open: the run stays in it.
    return [block, *(await _open_day_accounts(context, run))[::-1]]


async def _open_day_accounts(context: HostContext, run: RunRecord) -> Sequence[str]:
    """Open the daily accounts of all owners and of the run's owner; return their names, the widest first.

    Without a budget, now or earlier, there is no account: all runs would contend for an account they share.

    An existing account stays, and the ledger knows its ceiling, whichever host sets it. A missing account is looked up
    for every run, those of both levels at once: another host may open it at any time, and from then on it applies to
    this host too. The same holds for its parent, so an account is remembered together with its parent.
    """
    names = day_accounts(run, context.settings.zone)
    budgets = context.settings.daily_usd, context.settings.owner_daily_usd
    found: list[str] = []
    existing: Collection[str] | None = None
    for name, most in zip(names, budgets, strict=True):
        parent = found[-1] if found else None
        place = name if parent is None else f"{parent}/{name}"
        if place not in context.accounts:
            limits = NO_LIMITS if most is None else Budget(max_cost_dollars=most).limits()
            if limits == NO_LIMITS and existing is None:
                existing = await context.ledger.balances(names)
            if not await _open_day(context.ledger, name, limits, parent, existing or ()):
                continue
            if len(context.accounts) >= MAX_ACCOUNTS:
                context.accounts.clear()
            context.accounts[place] = True
        found.append(name)
    return found


async def _open_day(
    ledger: AsyncLedger, name: str, limits: Limits, parent: str | None, existing: Collection[str]
) -> bool:
    """Open a daily account; without limits, keep an existing one as it is. Return whether the account exists.

    A host without a budget does not remove an existing one, which may be set on another host only.
    """
    if limits != NO_LIMITS:
        await _open(ledger, name, limits, parent)
        return True
    if name not in existing:
        return False
    if parent is not None:
        await ledger.put_under(name, parent)
    return True


async def _open(ledger: AsyncLedger, account: str, limits: Limits, parent: str | None) -> None:
    """Open an account; an existing one gets these limits, and all its usage counts toward its parent."""
    try:
        await ledger.open_account(account, limits, parent=parent)
    except LedgerUnavailable:
        raise
    except LedgerError:  # it exists, and more was granted since or the settings have changed
        await ledger.grant(account, limits)
        if parent is not None:
            await ledger.put_under(account, parent)


def day_accounts(run: RunRecord, zone: tzinfo = UTC) -> tuple[str, str]:
    """Return the daily accounts for the day a run was submitted: that of all owners, and below it its owner's."""
    day = day_of(run.created_ms, zone)
    return f"{ALL}{day}", f"{OWNERS}{run.owner}:{day}"


def day_of(at_ms: int, zone: tzinfo = UTC) -> date:
    """Return the date of a time in a time zone."""
    return utc_from_ns(at_ms * 1_000_000).astimezone(zone).date()


async def journal_without(context: HostContext, run_id: str, nodes: Collection[str]) -> list[JournalEntry]:
    """Return the journal of a run without the entries of these nodes, for a fork or replay.

    A negative time marks each entry as inherited: comparing times could not tell inherited entries from the new run's
    own, because the clocks of machines differ.
    """
    again = {display_id(node_id) for node_id in nodes}
    found = [entry for entry in await context.stores.journal.load(run_id) if entry_node(entry.key) not in again]
    return [entry._replace(at_ms=-max(1, abs(entry.at_ms))) for entry in found]


async def forget_accounts(context: HostContext, names: Collection[str]) -> None:
    """Remove accounts that are no longer needed; their usage still counts in their parents."""
    if names:
        await retry_unavailable(lambda: context.ledger.forget(names), INTERACTIVE_ATTEMPTS)
