"""The contract of every `SpendingStore`."""

from __future__ import annotations

from penstock.errors import InvalidValue
from penstock.hosting.ports import MAX_SHARES, CostShare, RunFilter, RunRecord, SpendingFilter, SpendingSum
from penstock.testing.contracts.stores.suite import (
    NOT_NAMES,
    ODD_NAMES,
    StoreBundle,
    StoreContract,
    a_run,
    fresh,
    raises,
)

DAY_MS = 86_400_000


def spent(id: str = "r", cost_nanos: int = 10, day: int = 0, **fields: object) -> RunRecord:
    """Return a run submitted on this day, with its usage."""
    return a_run(id, created_ms=day * DAY_MS + 5, cost_nanos=cost_nanos, tokens_in=4, tokens_out=2, **fields)


class SpendingStoreContract(StoreContract):
    """Usage of runs, by day, owner, graph, node and model."""

    @fresh
    async def test_shares_of_a_run_add_up_to_its_usage(self, stores: StoreBundle) -> None:
        shares = [CostShare("b", "m", 1, 3, 1, 1), CostShare("a", "m", 2, 4, 2, 1), CostShare("b", "m", 1, 1)]
        await stores.spending.record(spent(unknown_costs=2), shares)
        rest = CostShare(cost_nanos=2, tokens_in=1, unknown_costs=2)
        assert list(await stores.spending.of("r")) == [
            rest,
            CostShare("a", "m", 2, 4, 2, 1),
            CostShare("b", "m", 2, 4, 1, 1),
        ]
        assert list(await stores.spending.sums()) == [SpendingSum(None, None, None, None, None, 1, 4, 10, 4, 2, 2)]
        assert list(await stores.spending.of("unknown")) == []

    @fresh
    async def test_shares_replace_those_recorded_before(self, stores: StoreBundle) -> None:
        await stores.spending.record(spent(), [CostShare("a", "m", 1, 10, 4, 2)])
        await stores.spending.record(spent(cost_nanos=12), [CostShare("b", "m", 1, 12, 4, 2)])
        assert list(await stores.spending.of("r")) == [CostShare("b", "m", 1, 12, 4, 2)]

    @fresh
    async def test_first_shares_are_recorded_once(self, stores: StoreBundle) -> None:
        shares = [CostShare("a", "m", 1, 6, 3, 1), CostShare("b", "m", 1, 4, 1, 1)]
        for _ in range(2):
            await stores.spending.record(spent(), shares, is_first=True)
        assert list(await stores.spending.of("r")) == shares
        await stores.spending.record(spent(), [CostShare("c", "m", 1, 10, 4, 2)])
        assert list(await stores.spending.of("r")) == [CostShare("c", "m", 1, 10, 4, 2)]

    @fresh
    async def test_a_run_without_shares_counts_as_a_whole(self, stores: StoreBundle) -> None:
        await stores.spending.record(spent(), [])
        await stores.spending.record(a_run("free", created_ms=0), [])
        assert list(await stores.spending.of("r")) == [CostShare("", "", 0, 10, 4, 2)]
        assert list(await stores.spending.of("free")) == [CostShare()]
        (all_of_it,) = await stores.spending.sums()
        assert (all_of_it.runs, all_of_it.cost_nanos) == (2, 10)

    @fresh
    async def test_shares_that_cannot_be_true_are_replaced_by_the_usage_of_the_run(self, stores: StoreBundle) -> None:
        await stores.spending.record(spent(), [CostShare("a", "m", 1, 11), CostShare("b", "m", 1, 0)])
        assert list(await stores.spending.of("r")) == [CostShare("", "", 2, 10, 4, 2)]
        many = [CostShare(f"n{number}", "m", 1, 0) for number in range(MAX_SHARES + 1)]
        await stores.spending.record(spent(), many)
        assert list(await stores.spending.of("r")) == [CostShare("", "", MAX_SHARES + 1, 10, 4, 2)]
        await stores.spending.record(spent(), [CostShare("a", "m", 1, 10, 9, 1, 5)])  # a late bill changed the tokens
        assert list(await stores.spending.of("r")) == [CostShare("", "", 0, 0, 0, 1), CostShare("a", "m", 1, 10, 4, 1)]

    @fresh
    async def test_spending_is_summed_by_any_keys(self, stores: StoreBundle) -> None:
        two = [CostShare("a", "m", 1, 6), CostShare("b", "n", 1, 4)]
        await stores.spending.record(spent("r1", 10, 1), two)
        await stores.spending.record(spent("r2", 20, 2, owner="bob", graph_id="h"), [CostShare("a", "m", 1, 20)])
        await stores.spending.record(spent("r3", 30, 2), [CostShare("a", "m", 1, 30)])
        by_model = {row.model: row.cost_nanos for row in await stores.spending.sums(["model"])}
        assert by_model == {"": 0, "m": 56, "n": 4} or by_model == {"m": 56, "n": 4}
        by_day = [(row.day, row.owner, row.cost_nanos) for row in await stores.spending.sums(["day", "owner"])]
        assert by_day == [(1, "ann", 10), (2, "ann", 30), (2, "bob", 20)]
        assert [row.cost_nanos for row in await stores.spending.sums(["graph_id", "node"])][-1] == 20
        assert [row.day for row in await stores.spending.sums(["day"], limit=1)] == [1]

        async def total(wanted: SpendingFilter) -> int:
            return sum([row.cost_nanos for row in await stores.spending.sums([], wanted)])

        assert await total(SpendingFilter(since_day=2)) == 50
        assert await total(SpendingFilter(until_day=1)) == 10
        assert await total(SpendingFilter(owner="ann", since_day=1, until_day=2)) == 40
        assert await total(SpendingFilter(graph_id="h")) == 20
        for name in ("eve", *NOT_NAMES):
            assert await total(SpendingFilter(owner=name)) == 0
        assert list(await stores.spending.sums([], SpendingFilter(owner="eve"))) == []

    @fresh
    async def test_spending_outlives_the_runs(self, stores: StoreBundle) -> None:
        for id in ("r", "s", "t"):
            await stores.runs.add(spent(id))
            await stores.spending.record(spent(id), [CostShare("a", "m", 1, 10, 4, 2)])
            await stores.runs.end(id, "cancelled", now_ms=5)
        before = list(await stores.spending.sums(["day", "owner", "graph_id", "node", "model"]))
        await stores.runs.remove("r")
        assert list(await stores.spending.of("r")) == []
        assert sorted(await stores.runs.remove_ended(6)) == ["s", "t"]
        assert list(await stores.spending.of("")) == []
        after = list(await stores.spending.sums(["day", "owner", "graph_id", "node", "model"]))
        assert after == before == [SpendingSum(0, "ann", "g", "a", "m", 3, 3, 30, 12, 6, 0)]

    @fresh
    async def test_what_cannot_be_stored_is_refused(self, stores: StoreBundle) -> None:
        wrong = [CostShare(name, "m") for name in NOT_NAMES] + [CostShare("a", name) for name in NOT_NAMES]
        for share in [*wrong, CostShare("a", "m", -1), CostShare("a", "m", 1, -1), CostShare("a", "m", cost_nanos=1.5)]:  # type: ignore[arg-type]
            with raises(InvalidValue):
                await stores.spending.record(spent(), [share])
        assert list(await stores.spending.of("r")) == []
        for by in (["hour"], ["day", "day"], ["1; DROP TABLE spending"]):
            with raises(InvalidValue):
                await stores.spending.sums(by)  # type: ignore[arg-type]
        await stores.spending.record(spent(cost_nanos=0), [CostShare(name, name) for name in ODD_NAMES])
        found = {share.model for share in await stores.spending.of("r")}
        assert found == {"", *ODD_NAMES}

    @fresh
    async def test_spending_of_a_failed_transaction_is_not_recorded(self, stores: StoreBundle) -> None:
        await stores.runs.add(spent())
        await stores.runs.end("r", "cancelled", now_ms=5)
        await stores.spending.record(spent(), [CostShare("a", "m", 1, 10, 4, 2)])
        before = list(await stores.spending.sums(["node"]))

        async def unit(inside: StoreBundle) -> None:
            await inside.spending.record(spent("other"), [])
            await inside.runs.remove("r")
            raise KeyError("on purpose")

        with raises(KeyError):
            await stores.transaction(unit)
        assert list(await stores.spending.sums(["node"])) == before
        assert list(await stores.spending.of("r")) == [CostShare("a", "m", 1, 10, 4, 2)]

    @fresh
    async def test_runs_with_open_bills_are_found(self, stores: StoreBundle) -> None:
        await stores.runs.add(a_run("plain"))
        await stores.runs.add(a_run("held", unresolved_nanos=5, created_ms=2_000))
        await stores.runs.add(a_run("unknown", unknown_costs=1, created_ms=3_000))

        async def found(state: str) -> list[str]:
            return [run.id for run in await stores.runs.list(matching=RunFilter(bills=state))]  # type: ignore[arg-type]

        assert await found("unresolved") == ["held"]
        assert await found("unknown") == ["unknown"]
