"""When one node fails, what becomes of the others; and when a graph has what it needs.

    fail_fast    the first failure decides: nothing more starts, what runs is stopped
    collect      everything that does not hang on the failure runs to its end
    quorum(n)    n of the last nodes (those nothing comes after) are enough; `first` is quorum(1)

Each is a kind of frontier, so that the code that drives one drives them all.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from penstock.errors import InvalidValue
from penstock.kernel.frontier import Frontier
from penstock.kernel.plan import Plan


@dataclass(frozen=True, slots=True)
class Quorum:
    """So many of the last nodes are enough."""

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
    """Settle once `needed` of the last nodes have succeeded; what still runs is stopped."""
    return Quorum(needed)


def as_settle(given: object) -> Settle:
    """The policy that was meant; it may be written, as in JSON, as `quorum(2)`."""
    if isinstance(given, Quorum) or given in ("fail_fast", "collect", "first"):
        return given
    written = _WRITTEN.fullmatch(given) if isinstance(given, str) else None
    if written is not None:
        return Quorum(int(written[1]))
    raise InvalidValue("settle", given, "fail_fast, collect, first or quorum(n)")


def frontier_for(plan: Plan, settle: Settle, *, needs_all: bool = False) -> Frontier:
    """The frontier of one run of `plan` that settles like this."""
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
    """A frontier that counts the last nodes: how many have succeeded, and how many still can."""

    __slots__ = ("_counted_skips", "_needed", "_possible")

    def __init__(self, plan: Plan, settle: Quorum, *, needs_all: bool) -> None:
        super().__init__(plan, needs_all=needs_all)
        self._needed = settle.needed
        self._possible = sum(not successors for successors in plan.successors)
        self._counted_skips = 0

    @property
    def is_won(self) -> bool:
        """Whether as many as are needed have succeeded."""
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
