"""What lets a run go on on another worker: its journal, and its account at the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from typing import TypeVar

from penstock.clock import utc_from_ns
from penstock.containment.accounts import Balance
from penstock.containment.ledger import LedgerStore, WouldWait
from penstock.containment.limits import NO_LIMITS, Budget, Limits
from penstock.errors import LedgerError, LedgerUnavailable
from penstock.hosting.limits import Ceilings, RunLimits, ceilings_of
from penstock.hosting.points import passing
from penstock.hosting.ports import Fenced
from penstock.hosting.records import RunRecord
from penstock.hosting.work.elapsed import with_time_left, worked_ms
from penstock.hosting.work.patience import A_FEW, patiently
from penstock.hosting.work.workplace import Workplace
from penstock.money import Usd, to_usd
from penstock.runtime import worker
from penstock.runtime.durable.journal import Journal, shortened
from penstock.runtime.durable.keys import entry_node, known_as
from penstock.runtime.durable.ports import JournalEntry, JournalStore
from penstock.runtime.durable.shared import SharedBudget, ignore

T = TypeVar("T")

RUNS, OWNERS, ALL, UNKNOWN = "run:", "user:", "all:", "unknown:"
"""What the accounts of hosts begin with: of a run by its id, of an owner by name and day, of everybody by day, and of
the calls of a run, by its id, whose cost nobody can tell."""
INHERITED = "inherited"
"""What is kept about a run that takes up another: how many entries of its journal it has from there."""
MAX_ACCOUNTS = 10_000
"""So many accounts of days are remembered as open."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.25
ASKING_S = 5.0
"""So long the end of a run waits for a ledger that was asked for a hold and has not answered."""
TELLING_S = 15.0
"""So long it tries to tell the ledger what became of calls; what that is not told by then stays held there."""


@dataclass(frozen=True, slots=True)
class Durable:
    """The durable parts of one run."""

    journal: Journal
    shared: SharedBudget | None
    """None for a replay, which pays nothing."""
    ceilings: Ceilings
    """What the run may use; a run that takes up another finds what that one has used, and may use as much more."""
    worked_ms: int = 0
    """How long others have worked on it before; that time is taken off its ceilings."""

    async def settle(self, is_leaving: Callable[[], bool]) -> None:
        """Tell the ledger what it was not told yet; the run is over, and learns no more of what becomes of it.

        A hold that was being asked for when its caller left is given back when the ledger has answered: until then it
        would look like one whose bill nobody knows. A host that is leaving waits for nothing: the next one does.
        """
        shared = self.shared
        if shared is None:
            return
        shared.close()
        pause_s, waited_s = FIRST_PAUSE_S, 0.0
        while True:
            # Looked at before what waits: an answer leaves what is to be told first, and then asks no more.
            asking = shared.asking and waited_s < ASKING_S
            left = await shared.acatch_up() if shared.waiting else 0
            if is_leaving() or not (asking or (left and waited_s < TELLING_S)):
                break
            await asyncio.sleep(pause_s)
            waited_s += pause_s
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        shared.on_fault = None


NOTHING = {"cost_nanos": 0, "tokens_in": 0, "tokens_out": 0, "unresolved_nanos": 0, "unknown_costs": 0}


async def paid(at: Workplace, run: RunRecord, is_leaving: Callable[[], bool]) -> Mapping[str, int]:
    """What a run has paid, where its process does not know it all; empty where it does.

    Of a run that was taken over, only the ledger knows what failed before, or was under way; also if nothing of it was
    gone on with here. What a fork finds in its journal was paid by the run that it takes up. So a ledger that is away
    is waited for, as every store is at the end of a run; not by a host that is leaving, for a run that is parked.
    """
    if run.origin.get("kind") == "replay":
        return NOTHING
    if run.epoch == 1 and "of" not in run.origin:
        return {}
    shared = _shared(at, run)

    def look() -> tuple[Balance, int]:
        shared.adopt()
        return at.stores.ledger.balance(shared.account), shared.unknown_costs()

    while True:
        try:
            balance, unknown_costs = await ask_ledger(at, look)
            break
        except KeyError:  # it never came to have an account
            return {}
        except LedgerUnavailable:
            if is_leaving():
                return {}
            await asyncio.sleep(LONGEST_PAUSE_S)
    return {
        "cost_nanos": balance.spent_nanos,
        "tokens_in": balance.tokens_in,
        "tokens_out": balance.tokens_out,
        "unresolved_nanos": balance.unresolved_nanos + balance.held_nanos,  # what could not be told in time
        "unknown_costs": unknown_costs,
    }


def _shared(at: Workplace, run: RunRecord) -> SharedBudget:
    """The accounts of a run under the claim that it is worked on with.

    Whose claim it is says more than its number: with the stores brought back from a copy, or others beside them, a run
    is claimed under a number that this ledger knows already.
    """
    prefix = f"{run.id}/{run.epoch}-{at.mark}"
    return SharedBudget(at.stores.ledger, RUNS + run.id, prefix=prefix, unknown=UNKNOWN + run.id)


class PatientJournal:
    """A journal store that waits for one that is away, and tells who has lost the run."""

    def __init__(self, store: JournalStore, on_lost: Callable[[], None]) -> None:
        self._store = store
        self._on_lost = on_lost

    async def load(self, run_id: str) -> Sequence[JournalEntry]:
        return await patiently(lambda: self._store.load(run_id))

    async def append(self, run_id: str, entries: Sequence[JournalEntry], *, epoch: int = 0) -> None:
        try:
            await patiently(lambda: self._store.append(run_id, entries, epoch=epoch))
        except Fenced:
            self._on_lost()
            raise

    async def shorten(self, run_id: str, entries: Sequence[JournalEntry], *, epoch: int = 0) -> None:
        await patiently(lambda: self._store.shorten(run_id, entries, epoch=epoch))

    async def forget(self, run_id: str) -> None:
        await patiently(lambda: self._store.forget(run_id))


async def shorten_journal(store: JournalStore, run: RunRecord, journal: Journal | None) -> None:
    """Of a run that is complete, keep what a fork or a replay can still ask for."""
    short = None if journal is None else journal.shortened()
    if short is None:
        short = shortened(await patiently(lambda: store.load(run.id)))
    if short:
        await patiently(lambda: store.shorten(run.id, short, epoch=run.epoch))


async def durable_parts(at: Workplace, run: RunRecord, on_lost: Callable[[], None]) -> Durable:
    """The journal and the account of a run that was claimed."""
    store, is_replay = PatientJournal(at.stores.journal, on_lost), run.origin.get("kind") == "replay"
    if run.epoch == 1 and "of" not in run.origin:  # nobody can have written anything yet
        journal = Journal(store, run.id, epoch=run.epoch, clock=at.steady)
    else:
        journal = await Journal.open(store, run.id, epoch=run.epoch, replay_only=is_replay, clock=at.steady)
    worked = await worked_ms(at.stores.events, run)
    ceilings = with_time_left(_ceilings(journal, run), worked)
    if is_replay:
        return Durable(journal, None, ceilings, worked)
    await patiently(lambda: _blocking(at.stores.ledger, lambda: open_accounts(at, run), brief=True))
    shared = _shared(at, run)
    if run.epoch > 1:
        await patiently(lambda: _blocking(at.stores.ledger, shared.adopt))
        passing("claim.adopted")
    return Durable(journal, shared, ceilings, worked)


def _ceilings(journal: Journal, run: RunRecord) -> Ceilings:
    if "of" not in run.origin:
        return ceilings_of(run.limits)
    is_marked = INHERITED in (run.origin.get("about") or {})
    # As `journal_without` has left them; before it did, what came later than the run was its own.
    before = [entry for entry in journal if (entry.at_ms < 0 if is_marked else entry.at_ms <= run.created_ms)]
    inherited = RunLimits(
        max_cost_usd=to_usd(sum(entry.cost_nanos for entry in before)),
        max_steps=len(before),
        max_tokens=sum(entry.tokens_in + entry.tokens_out for entry in before),
        max_api_calls=sum(entry.kind == "llm" for entry in before),
    )
    return ceilings_of(RunLimits.from_dict(run.limits).plus(inherited).to_dict())


def open_accounts(at: Workplace, run: RunRecord) -> None:
    """Open the run's account, below those of the day on which it was submitted."""
    ledger, name, limits = at.stores.ledger, RUNS + run.id, ceilings_of(run.limits).in_ledger
    try:
        _open(ledger, name, limits, _open_day_accounts(at, run))
    except LedgerUnavailable:
        raise
    except (KeyError, LedgerError):  # what was opened before is not there any more, or others have put it elsewhere
        at.accounts.clear()
        _open(ledger, name, limits, _open_day_accounts(at, run))


def _open_day_accounts(at: Workplace, run: RunRecord) -> str | None:
    """Open what all may spend on that day, and what the owner may; the name of the lower one.

    Where no budget is set and none was, there is no account: one that all runs share is one that they all wait for.
    """
    budgets = at.settings.daily_usd, at.settings.owner_daily_usd
    parent: str | None = None
    for name, most in zip(day_accounts(run), budgets, strict=True):
        if _is_day_open(at, name, most, parent):
            parent = name
    return parent


def _is_day_open(at: Workplace, name: str, most: Usd | None, parent: str | None) -> bool:
    """Open the account of a day below `parent`, once; whether there is one.

    One that is there stays, and the ledger knows its ceiling, whoever sets it. One that is not there is looked for with
    every run: another host may bring it at any time, and it holds for us as well from then on. The same goes for what
    it is below, so that is remembered with it.
    """
    place = name if parent is None else f"{parent}/{name}"
    if place in at.accounts:
        return True
    limits = NO_LIMITS if most is None else Budget(max_cost_dollars=most).limits()
    if not _open_day(at.stores.ledger, name, limits, parent):
        return False
    if len(at.accounts) >= MAX_ACCOUNTS:
        at.accounts.clear()
    at.accounts[place] = True
    return True


def _open_day(ledger: LedgerStore, name: str, limits: Limits, parent: str | None) -> bool:
    """Open the account of a day; without limits, one that is there counts on as it is. Whether there is one.

    Who has set no budget takes back nobody's: another host may have one, and be the only one that knows.
    """
    if limits != NO_LIMITS:
        _open(ledger, name, limits, parent)
        return True
    try:
        ledger.balance(name)
    except KeyError:
        return False
    if parent is not None:
        ledger.put_under(name, parent)
    return True


def _open(ledger: LedgerStore, account: str, limits: Limits, parent: str | None) -> None:
    """Open an account; one that is there has these limits from now on, and counts at its parent from its first call."""
    try:
        ledger.open_account(account, limits, parent=parent)
    except LedgerUnavailable:
        raise
    except LedgerError:  # it is there, and more was granted since, or the settings are others
        ledger.grant(account, limits)
        if parent is not None:
            ledger.put_under(account, parent)


def day_accounts(run: RunRecord) -> tuple[str, str]:
    """The accounts of the day on which a run was submitted: of all, and below it of its owner."""
    day = day_of(run.created_ms)
    return f"{ALL}{day}", f"{OWNERS}{run.owner}:{day}"


def day_of(at_ms: int) -> date:
    """The day of a moment, in UTC."""
    return utc_from_ns(at_ms * 1_000_000).date()


async def _blocking(ledger: LedgerStore, ask: Callable[[], T], *, brief: bool = False) -> T:
    """Ask a ledger; one that may block, on a thread, unless the question is brief and it can answer at once."""
    if getattr(ledger, "is_immediate", False) is True:
        return ask()
    answer: T
    if brief and (at_once := getattr(ledger, "at_once", None)) is not None:
        with suppress(WouldWait):
            answer = at_once(ask)
            return answer
    answer = await worker.LoopJob(ask, ignore).result()
    return answer


async def journal_without(at: Workplace, run_id: str, nodes: Collection[str]) -> list[JournalEntry]:
    """What a run has done, but for these nodes of its graph, for one that takes it up.

    Each entry says from then on that another run has done it, by a moment that is negative: no clock could tell it from
    what the new run does itself, for machines have several.
    """
    again = {known_as(node_id) for node_id in nodes}
    found = [entry for entry in await at.stores.journal.load(run_id) if entry_node(entry.key) not in again]
    return [entry._replace(at_ms=-max(1, abs(entry.at_ms))) for entry in found]


async def ask_ledger(at: Workplace, ask: Callable[[], T]) -> T:
    """Ask the ledger, a few times if it is away."""
    return await patiently(lambda: _blocking(at.stores.ledger, ask), A_FEW)


async def forget_accounts(at: Workplace, names: Collection[str]) -> None:
    """Forget accounts that nobody asks for any more; what they used stays in those above them."""
    if names:
        await ask_ledger(at, lambda: at.stores.ledger.forget(names))
