"""Everything to test agents with: a simulated loop, a clock, a provider with an invoice, and two judges.

- SimLoop, sim_run, explore: many interleavings, no waiting, each repeatable by its seed
- ManualClock: time that moves when told to
- FakeProvider: a scripted model; its invoice says what was really spent
- check_history: events, invoice, ledger and effects: do they tell one story?
- census: tasks, threads, descriptors and processes: has anything been left behind?
"""

from penstock.testing.census import Leak, census
from penstock.testing.clock import ManualClock
from penstock.testing.history import Violation, check_history
from penstock.testing.provider import (
    Answer,
    Behaviour,
    FailAfterBilling,
    FakeProvider,
    Invoice,
    InvoiceLine,
    LieAboutUsage,
    NoUsage,
    ProviderHTTPError,
    Raise,
    RefuseFree,
    ScriptEnded,
    ServerError,
    Stall,
)
from penstock.testing.sim import SimClock, SimDeadlock, SimError, SimLivelock, SimLoop, SimRefused, explore, sim_run

__all__ = [
    "Answer",
    "Behaviour",
    "FailAfterBilling",
    "FakeProvider",
    "Invoice",
    "InvoiceLine",
    "Leak",
    "LieAboutUsage",
    "ManualClock",
    "NoUsage",
    "ProviderHTTPError",
    "Raise",
    "RefuseFree",
    "ScriptEnded",
    "ServerError",
    "SimClock",
    "SimDeadlock",
    "SimError",
    "SimLivelock",
    "SimLoop",
    "SimRefused",
    "Stall",
    "Violation",
    "census",
    "check_history",
    "explore",
    "sim_run",
]
