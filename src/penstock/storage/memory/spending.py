"""The usage of runs, in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from penstock.hosting.ports import (
    ALL_SPENDING,
    FIGURES,
    CostShare,
    RunRecord,
    SpendingFilter,
    SpendingKey,
    SpendingSum,
)
from penstock.storage import codec
from penstock.storage.memory.runs import MemoryRunStore
from penstock.storage.rules import check_spending_keys, complete_shares, day_number

SUMMED = ("runs", *FIGURES)
GROUP = ("day", "owner", "graph_id", "node", "model")


class MemorySpendingStore:
    """Shares by run, and sums of the runs that were removed."""

    def __init__(self, runs: MemoryRunStore | None = None) -> None:
        self._runs = runs or MemoryRunStore()
        self._runs.on_remove(self._remove_run)
        self._shares: dict[str, list[SpendingSum]] = {}
        self._removed: dict[tuple[object, ...], SpendingSum] = {}
        """Sums of removed runs, by their group."""

    async def record(self, run: RunRecord, shares: Sequence[CostShare], *, is_first: bool = False) -> None:
        codec.name("run_id", run.id)
        figures = [share._asdict() for share in complete_shares(run, shares)]
        self._runs.undo.entry(self._shares, run.id)
        self._shares[run.id] = [
            SpendingSum(day_number(run.created_ms), run.owner, run.graph_id, runs=int(at == 0), **share)
            for at, share in enumerate(figures)
        ]

    async def of(self, run_id: str) -> Sequence[CostShare]:
        found = self._shares.get(run_id, ())
        return [CostShare(*(getattr(share, field) for field in CostShare._fields)) for share in found]

    async def sums(
        self, by: Sequence[SpendingKey] = (), matching: SpendingFilter = ALL_SPENDING, *, limit: int = 1_000
    ) -> Sequence[SpendingSum]:
        check_spending_keys(by)
        codec.limit(limit)
        groups: dict[tuple[object, ...], SpendingSum] = {}
        for row in self._all():
            if _matches(row, matching):
                key = tuple(getattr(row, name) for name in by)
                known = groups.get(key, SpendingSum(**dict(zip(by, key, strict=True))))
                groups[key] = _added(known, row)
        return [groups[key] for key in islice(sorted(groups), limit)]

    def _all(self) -> Iterator[SpendingSum]:
        for shares in self._shares.values():
            yield from shares
        yield from self._removed.values()

    def _remove_run(self, run_id: str) -> None:
        self._runs.undo.entry(self._shares, run_id)
        for share in self._shares.pop(run_id, ()):
            key = tuple(getattr(share, name) for name in GROUP)
            self._runs.undo.entry(self._removed, key)
            known = self._removed.get(key)
            self._removed[key] = share if known is None else _added(known, share)


def _added(one: SpendingSum, other: SpendingSum) -> SpendingSum:
    return one._replace(**{figure: getattr(one, figure) + getattr(other, figure) for figure in SUMMED})


def _matches(row: SpendingSum, wanted: SpendingFilter) -> bool:
    day = row.day or 0
    return (
        (wanted.since_day is None or day >= wanted.since_day)
        and (wanted.until_day is None or day <= wanted.until_day)
        and (wanted.owner is None or row.owner == wanted.owner)
        and (wanted.graph_id is None or row.graph_id == wanted.graph_id)
    )
