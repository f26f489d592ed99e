"""Which nodes may run next, and what happens to the others when one fails.

Pure bookkeeping: no clock, no I/O, nothing awaited. The scheduler drives it; tests drive it by hand.

Every incoming flow edge of a node is *open* until its source has ended, and then *live* (a value came through it) or
*dead* (its source was skipped, or did not use that handle). A node is ready when no edge into it is open and at least
one is live, or when it has no incoming edge; it is skipped when none is live. Skipping a node makes the edges out of it
dead, and so on. Where a node needs all of its edges (`needs_all`), one dead edge is enough to skip it.

The settle policy of a graph decides what a failure means for the other nodes, and when the graph has its result:

    fail_fast    the first failure decides: nothing more starts, running nodes are stopped
    collect      everything that does not depend on the failed node runs to its end
    quorum(n)    n of the last nodes (those without successors) are enough; `first` is quorum(1)

Each policy is a kind of frontier, so that the same code drives all of them.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from penstock.errors import InvalidValue
from penstock.kernel.plan import Plan

WAITING, READY, DONE, SKIPPED = range(4)


class Frontier:
    """The boundary between the nodes that have run and those that have not."""

    __slots__ = ("_doomed", "_live", "_needs_all", "_open", "decided", "plan", "remaining", "skipped", "state")

    def __init__(self, plan: Plan, *, needs_all: bool = False) -> None:
        self.plan = plan
        self._needs_all = needs_all
        self._doomed: set[int] | None = None
        """Nodes that need all of their edges and have lost one."""
        self._open = plan.incoming.copy()
        # Bytes, and nothing made before it is needed: many graphs may be waiting at the same time.
        self._live = bytearray(plan.size)
        self.state = bytearray(plan.size)
        self.skipped: list[int] = []
        """Nodes that will not run because no value reached them, in the order in which that became known."""
        self.remaining = plan.size
        """Nodes that have neither ended nor been skipped."""
        self.decided = False
        """Whether the result of the graph is decided: nothing more starts, and running nodes are stopped."""

    def start(self) -> list[int]:
        """Return the nodes that may run immediately; a second call returns none."""
        state = self.state
        ready = [node for node in self.plan.entries if state[node] == WAITING]
        for node in ready:
            state[node] = READY
        return ready

    def finish(self, node: int, used: Collection[str] | None = None) -> list[int]:
        """Record that `node` has ended, and return the nodes that became ready. `used` are the handles with values;
        None is all.
        """
        plan, state, open_, live = self.plan, self.state, self._open, self._live
        if state[node] != READY:
            raise InvalidValue("node", plan.ids[node], "one that was ready and has not ended")
        state[node] = DONE
        self.remaining -= 1
        ready: list[int] = []
        if used is None and self._doomed is None:
            for after in plan.successors[node]:
                left = open_[after] = open_[after] - 1
                if left:
                    live[after] = True
                else:
                    state[after] = READY
                    ready.append(after)
            return ready
        dead: list[int] = []
        for after, handle in zip(plan.successors[node], plan.successor_handles[node], strict=True):
            if used is None or handle in used:
                live[after] = True
            elif self._needs_all:
                self._doom(after)
            self._close_edge(after, ready, dead)
        if dead:
            self._skip(dead, ready)
        return ready

    def fail(self, node: int) -> list[int]:
        """Record that `node` failed for good; return the nodes that became ready. By default the others continue."""
        return self.drop(node)

    def drop(self, node: int) -> list[int]:
        """Record that `node` ended without a value (it failed, or was given up): nodes that depend on it alone are
        skipped.
        """
        return self.finish(node, ())

    def _skip(self, dead: list[int], ready: list[int]) -> None:
        """Skip these nodes and their dependents; a node with a live edge that waited only for them becomes ready."""
        while dead:
            node = dead.pop()
            self.state[node] = SKIPPED
            self.remaining -= 1
            self.skipped.append(node)
            for after in self.plan.successors[node]:
                if self._needs_all:
                    self._doom(after)
                self._close_edge(after, ready, dead)

    def _doom(self, node: int) -> None:
        """Record that the node has lost an edge that it needs."""
        if self._doomed is None:
            self._doomed = set()
        self._doomed.add(node)

    def _close_edge(self, after: int, ready: list[int], dead: list[int]) -> None:
        """Close one edge into `after`; after the last one, the node is ready or skipped."""
        left = self._open[after] = self._open[after] - 1
        if left:
            return
        if self._live[after] and (self._doomed is None or after not in self._doomed):
            self.state[after] = READY
            ready.append(after)
        else:
            dead.append(after)


@dataclass(frozen=True, slots=True)
class Quorum:
    """The policy that this number of last nodes is enough."""

    needed: int

    def __post_init__(self) -> None:
        needed: object = self.needed
        if isinstance(needed, bool) or not isinstance(needed, int) or needed < 1:
            raise InvalidValue("quorum", needed, "a whole number of nodes, one or more")

    def __str__(self) -> str:
        return f"quorum({self.needed})"


Settle = Literal["fail_fast", "collect", "first"] | Quorum

FIRST = Quorum(1)
_WRITTEN = re.compile(r"quorum\((\d{1,9})\)")


def quorum(needed: int) -> Quorum:
    """Settle once `needed` of the last nodes have succeeded; the nodes still running are stopped."""
    return Quorum(needed)


def as_settle(given: object) -> Settle:
    """Return the settle policy; it may also be text, such as `quorum(2)` in JSON."""
    if isinstance(given, Quorum) or given in ("fail_fast", "collect", "first"):
        return given
    written = _WRITTEN.fullmatch(given) if isinstance(given, str) else None
    if written is not None:
        return Quorum(int(written[1]))
    raise InvalidValue("settle", given, "fail_fast, collect, first or quorum(n)")


def frontier_for(plan: Plan, settle: Settle, *, needs_all: bool = False) -> Frontier:
    """Return the frontier for one run of `plan` with this settle policy."""
    if settle == "fail_fast":
        return _FailFast(plan, needs_all=needs_all)
    if settle == "collect":
        return Frontier(plan, needs_all=needs_all)
    return Race(plan, FIRST if settle == "first" else settle, needs_all=needs_all)


class _FailFast(Frontier):
    __slots__ = ()

    def fail(self, node: int) -> list[int]:
        self.drop(node)
        self.decided = True
        return []


class Race(Frontier):
    """A frontier that counts how many last nodes have succeeded, and how many still can."""

    __slots__ = ("_counted_skips", "_needed", "_possible")

    def __init__(self, plan: Plan, settle: Quorum, *, needs_all: bool) -> None:
        super().__init__(plan, needs_all=needs_all)
        self._needed = settle.needed
        self._possible = sum(not successors for successors in plan.successors)
        self._counted_skips = 0

    @property
    def is_won(self) -> bool:
        """Whether as many have succeeded as are needed."""
        return self._needed <= 0

    def finish(self, node: int, used: Collection[str] | None = None) -> list[int]:
        ready = super().finish(node, used)
        if not self.plan.successors[node] and used != ():
            self._needed -= 1
            self._possible -= 1
        self._count_skips()
        return ready

    def fail(self, node: int) -> list[int]:
        ready = self.drop(node)
        if not self.plan.successors[node]:
            self._possible -= 1
            self._decide()
        return ready

    def _count_skips(self) -> None:
        newly = self.skipped[self._counted_skips :]
        self._counted_skips += len(newly)
        self._possible -= sum(not self.plan.successors[node] for node in newly)
        self._decide()

    def _decide(self) -> None:
        self.decided = self._needed <= 0 or self._possible < self._needed
