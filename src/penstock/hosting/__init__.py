"""Runs that belong to nobody's connection.

A run is asked for, waits its turn, is worked on by one worker at a time, and goes on after that worker has died. What
is kept of it stands in stores, whose ports are declared here.

host       what people ask for            admission   how many wait and run at once
control    cancel, resume, grant, fork    reading     following a run
work/      one run that is claimed        limits      what a run may use
records    what is kept                   ports       of databases

Everything is loaded when it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.hosting.admission import Overloaded as Overloaded
    from penstock.hosting.control import UnknownApproval as UnknownApproval
    from penstock.hosting.control import UnknownRun as UnknownRun
    from penstock.hosting.host import GraphArchived as GraphArchived
    from penstock.hosting.host import RunHost as RunHost
    from penstock.hosting.host import UnknownGraph as UnknownGraph
    from penstock.hosting.limits import RunLimits as RunLimits
    from penstock.hosting.ports import Conflict as Conflict
    from penstock.hosting.ports import Fenced as Fenced
    from penstock.hosting.ports import StoreUnavailable as StoreUnavailable
    from penstock.hosting.records import HostedEvent as HostedEvent
    from penstock.hosting.records import RunRecord as RunRecord
    from penstock.hosting.settings import HostSettings as HostSettings
    from penstock.hosting.work.workplace import Prepared as Prepared
    from penstock.hosting.work.workplace import RunKind as RunKind

LATER = {
    "Conflict": "ports",
    "Fenced": "ports",
    "GraphArchived": "host",
    "HostSettings": "settings",
    "HostedEvent": "records",
    "Overloaded": "admission",
    "Prepared": "work.workplace",
    "RunHost": "host",
    "RunKind": "work.workplace",
    "RunLimits": "limits",
    "RunRecord": "records",
    "StoreUnavailable": "ports",
    "UnknownApproval": "control",
    "UnknownGraph": "host",
    "UnknownRun": "control",
}
"""Where the names are."""

__all__ = [
    "Conflict",
    "Fenced",
    "GraphArchived",
    "HostSettings",
    "HostedEvent",
    "Overloaded",
    "Prepared",
    "RunHost",
    "RunKind",
    "RunLimits",
    "RunRecord",
    "StoreUnavailable",
    "UnknownApproval",
    "UnknownGraph",
    "UnknownRun",
]


def __getattr__(name: str) -> Any:
    if name in LATER:
        return getattr(import_module(f"{__name__}.{LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
