"""SQL store of the usage of runs: rows of a run while it exists, and sums of runs that were removed.

Sums have an empty run id. They keep the figures that the web UI shows for past days, and none of a single run.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.hosting.ports import (
    ALL_SPENDING,
    FIGURES,
    MAX_FIGURE,
    CostShare,
    RunRecord,
    SpendingFilter,
    SpendingKey,
    SpendingSum,
)
from penstock.storage import codec
from penstock.storage.port import INLINE_MAX_ROWS, SqlStore, Transaction, Value, chunks, placeholders
from penstock.storage.rules import check_spending_keys, complete_shares, day_number

SHARE = ", ".join(CostShare._fields)
COLUMNS = f"run_id, day, owner, graph_id, runs, {SHARE}"
INSERT = f"INSERT INTO spending ({COLUMNS}) VALUES ({placeholders(5 + len(CostShare._fields))})"
INSERT_FIRST = f"{INSERT} ON CONFLICT (run_id, day, owner, graph_id, node, model) DO NOTHING"
DELETE = "DELETE FROM spending WHERE run_id = ?"
SELECT = f"SELECT {SHARE} FROM spending WHERE run_id = ? ORDER BY node, model"
SUMMED = ("runs", *FIGURES)
SUMS = ", ".join(
    f"CAST(sum(CASE WHEN {figure} BETWEEN 0 AND {MAX_FIGURE} THEN {figure} ELSE 0 END) AS BIGINT)" for figure in SUMMED
)
"""A figure out of range, which no store has written, counts as 0, so that it cannot make a sum overflow."""
GROUP = "day, owner, graph_id, node, model"
ROLL_UP = (
    f"INSERT INTO spending (run_id, {GROUP}, {', '.join(SUMMED)}) "
    f"SELECT '', {GROUP}, {SUMS} FROM spending WHERE run_id IN (%s) AND run_id <> '' GROUP BY {GROUP} ORDER BY {GROUP} "
    f"ON CONFLICT (run_id, {GROUP}) DO UPDATE SET "
    + ", ".join(f"{figure} = spending.{figure} + excluded.{figure}" for figure in SUMMED)
)
"""Adds the rows of runs to the sums, in a fixed order, so that two hosts cannot deadlock."""


class SqlSpendingStore(SqlStore):
    """A `SpendingStore` over a database."""

    async def record(self, run: RunRecord, shares: Sequence[CostShare], *, is_first: bool = False) -> None:
        of_run = codec.name("run_id", run.id), day_number(run.created_ms), run.owner, run.graph_id
        rows = [(*of_run, int(at == 0), *share) for at, share in enumerate(complete_shares(run, shares))]

        async def body(transaction: Transaction) -> None:
            if is_first:
                await transaction.run_many(INSERT_FIRST, rows)
                return
            await transaction.run(DELETE, run.id)
            await transaction.run_many(INSERT, rows)

        await self._database.write(body, inline=len(rows) <= INLINE_MAX_ROWS)

    async def of(self, run_id: str) -> Sequence[CostShare]:
        async def body(transaction: Transaction) -> Sequence[CostShare]:
            return [
                CostShare(*row) for row in await transaction.rows(SELECT, codec.lookup_key(run_id) or codec.NO_MATCH)
            ]

        return await self._database.read(body, single=True)

    async def sums(
        self, by: Sequence[SpendingKey] = (), matching: SpendingFilter = ALL_SPENDING, *, limit: int = 1_000
    ) -> Sequence[SpendingSum]:
        check_spending_keys(by)
        where, values = _conditions(matching)
        keys = ", ".join(by)
        grouped = f" GROUP BY {keys} ORDER BY {keys}" if by else " HAVING count(*) > 0"
        statement = f"SELECT {SUMS}{', ' if by else ''}{keys} FROM spending{where}{grouped} LIMIT ?"
        values.append(codec.limit(limit))

        async def body(transaction: Transaction) -> Sequence[SpendingSum]:
            names = (*SUMMED, *by)
            return [
                SpendingSum(**dict(zip(names, row, strict=True))) for row in await transaction.rows(statement, *values)
            ]

        return await self._database.read(body, single=True)


def _conditions(matching: SpendingFilter) -> tuple[str, list[Value]]:
    conditions: tuple[tuple[str, Value], ...] = (
        ("day >= ?", matching.since_day),
        ("day <= ?", matching.until_day),
        ("owner = ?", None if matching.owner is None else codec.lookup_key(matching.owner)),
        ("graph_id = ?", None if matching.graph_id is None else codec.lookup_key(matching.graph_id)),
    )
    given = [(condition, value) for condition, value in conditions if value is not None]
    where = f" WHERE {' AND '.join(condition for condition, _ in given)}" if given else ""
    return where, [value for _, value in given]


async def roll_up(transaction: Transaction, run_ids: Sequence[str]) -> None:
    """Add the spending of runs that are removed to the sums of their day, and remove their rows."""
    for chunk in chunks(run_ids):
        await transaction.run(ROLL_UP % placeholders(len(chunk)), *chunk)
    await transaction.run_many(DELETE, [(id,) for id in run_ids])
