"""Runs that are independent of any client connection.

A run is submitted, queued, executed by one worker at a time, and continued by another worker if that one dies. Its
state is kept in stores, whose ports are declared here.

host         public operations              admission   queue and concurrency limits
control      cancel, resume, grant, fork    reader      following a run
bills        unresolved bills               halts       advice for halted runs
hosted_run   one claimed run                limits      limits of a run
ports        stores and their records       retention   removal of old data

Modules are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.hosting.bills import BillNotFound as BillNotFound
    from penstock.hosting.bills import HostedBill as HostedBill
    from penstock.hosting.control import ApprovalNotFound as ApprovalNotFound
    from penstock.hosting.control import RunNotFound as RunNotFound
    from penstock.hosting.host import GraphArchived as GraphArchived
    from penstock.hosting.host import GraphNotFound as GraphNotFound
    from penstock.hosting.host import RunHost as RunHost
    from penstock.hosting.host_context import Prepared as Prepared
    from penstock.hosting.host_context import RunHandler as RunHandler
    from penstock.hosting.limits import HostSettings as HostSettings
    from penstock.hosting.limits import RunLimits as RunLimits
    from penstock.hosting.ports import Conflict as Conflict
    from penstock.hosting.ports import Fenced as Fenced
    from penstock.hosting.ports import HostedEvent as HostedEvent
    from penstock.hosting.ports import RunRecord as RunRecord
    from penstock.hosting.ports import StoreUnavailable as StoreUnavailable
    from penstock.hosting.queue import Overloaded as Overloaded

LATER = {
    "Conflict": "ports",
    "Fenced": "ports",
    "GraphArchived": "host",
    "HostSettings": "limits",
    "HostedEvent": "ports",
    "Overloaded": "admission",
    "Prepared": "host_context",
    "RunHost": "host",
    "RunHandler": "host_context",
    "RunLimits": "limits",
    "RunRecord": "ports",
    "StoreUnavailable": "ports",
    "ApprovalNotFound": "control",
    "BillNotFound": "bills",
    "HostedBill": "bills",
    "GraphNotFound": "host",
    "RunNotFound": "control",
}
"""Module of each public name."""

__all__ = [
    "ApprovalNotFound",
    "BillNotFound",
    "Conflict",
    "Fenced",
    "GraphArchived",
    "GraphNotFound",
    "HostSettings",
    "HostedBill",
    "HostedEvent",
    "Overloaded",
    "Prepared",
    "RunHandler",
    "RunHost",
    "RunLimits",
    "RunNotFound",
    "RunRecord",
    "StoreUnavailable",
]


def __getattr__(name: str) -> Any:
    if name in LATER:
        return getattr(import_module(f"{__name__}.{LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
