"""Test tools for agents: a simulated loop, a clock, a provider with an invoice, and two checkers.

- SimLoop, sim_run, explore: many interleavings, no waiting, each repeatable by its seed
- ManualClock: time that moves only when a test advances it; Clock: what every clock has
- FakeProvider: a scripted model; its invoice lists what was really spent
- check_history: are events, invoice, ledger and effects consistent?
- census: are tasks, threads, descriptors or processes left behind?
"""

from penstock.clock import Clock
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
    "Clock",
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
