"""The port of engines, which decide when and where a run is worked on.

The stores hold the state of a run: its row, journal, events, account and approvals. An engine only passes the id of the
run to a host that works on it. It does so again after that host has died, and whenever the run leaves a host without
having ended. `ClaimLoop` is the embedded engine: hosts that share a database claim runs from it.

The work on a run has one of three results: `Ended`, `Waiting` until something happens, or `Leaving` for another host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.hosting.ports import RunRecord

ATTEMPT_BITS = 32


class Fence(NamedTuple):
    """The dispatch under which a host works on a run; the newer one wins, however late the older one wakes up.

    A stretch is the work from one dispatch to its end. An engine that loses a worker repeats the stretch as another
    attempt. So neither a frozen worker nor one of an earlier stretch disturbs its successor.
    """

    stretch: int
    attempt: int

    @property
    def number(self) -> int:
        """The fence as it is stored: later fences are higher."""
        return (self.stretch << ATTEMPT_BITS) + self.attempt


def stretch_of(fence: int) -> int:
    """Return the stretch of a stored fence."""
    return fence >> ATTEMPT_BITS


@dataclass(frozen=True, slots=True)
class Ended:
    """The run has ended, or another host works on it; nothing is left to do under this fence."""

    status: str = ""
    """The final status; empty if another host decides it."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """The run is parked until it is nudged, for example because an approval was answered, or until `until_ms`."""

    until_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Leaving:
    """The run is parked because its host is closing: it is to be dispatched again immediately."""


WorkResult = Ended | Waiting | Leaving
Why = Literal["cancel", "answer"]


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """Whether an engine can be reached, for display."""

    is_ok: bool
    found: str


class EngineUnavailable(PenstockError):
    """The engine cannot be reached; the run is stored, and dispatched as soon as it can be."""


class CannotWork(PenstockError):
    """This host cannot work on the run, and another one may be able to: it is to be dispatched again later."""


class Work(Protocol):
    """The operations of a host that an engine calls for the runs it dispatches."""

    worker: str
    """The name of the host, unique among all."""
    database: str
    """The id of its database; an engine dispatches only runs of this database to it."""
    slots: int
    """Maximum number of runs it works on at once."""

    async def __call__(self, run_id: str, fence: Fence, queue: str) -> WorkResult:
        """Work on a run until it ends, waits or leaves; CannotWork if this host cannot.

        A cancelled call parks the run.
        """

    async def cancel(self, run_id: str, reason: str) -> None:
        """Cancel a run, because someone cancelled it in the engine's own tools."""


class Engine(Protocol):
    """Dispatches runs to the hosts that work on them."""

    queue: str | None
    """Queue of runs that are submitted without one; None if hosts claim runs from the database themselves."""

    async def start(self, work: Work) -> None:
        """Begin to dispatch, and, if this host is a worker, to call `work`; EngineUnavailable if it cannot."""

    async def drain(self) -> None:
        """Call `work` for no further run; those in progress continue."""

    async def close(self) -> None:
        """Release everything; all work in progress has returned, or was given up."""

    async def dispatch(self, run: RunRecord) -> None:
        """Ensure that a host works on this stored run; idempotent. EngineUnavailable if that is uncertain."""

    async def nudge(self, run: RunRecord, why: Why) -> None:
        """Wake a run that waits: the stores have an answer or a cancel request. EngineUnavailable as for `dispatch`."""

    async def health(self) -> EngineHealth:
        """Check whether the engine can be reached."""
