"""INV 20: calls that fit one after the other all complete, whatever their worst cases add up to.

Random workloads on a simulated loop: if the worst case of every call fits beside the real costs of the others, nothing
is unresolved and no wait expires, then no call is refused or clamped, spent and held never pass the ceiling, and no
schedule ends in a deadlock. Calls of unknown cost that all cost the same, of which some fail or are cancelled, never
pass a ceiling either, whatever made them. A third kind has nested holds, child contexts, calls without a hint, runs
that share a ledger and call each other, cancels and deadlines: then calls may be refused, and it must still end, with
nothing held and no call left waiting. Most of these may wait longer than the whole workload may take, so that no wait
that expires hides a deadlock.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from penstock import Budget, BudgetExceededError, CancelledError, ExecutionContext, contain
from penstock.containment import waiting
from penstock.containment.accounts import levels_of
from penstock.containment.ledger import Ledger
from penstock.testing import SimLoop, check_history, sim_run
from tests.soak import scaled

pytestmark = [pytest.mark.reliability, pytest.mark.requirement("X-9")]

SEEDS = scaled(300, soak=20_000)
MAX_TIME_S = 10_000


class Checked:
    """Looks at the accounts of a run whenever something happens to it."""

    def __init__(self, run: ExecutionContext) -> None:
        self.run = run
        self.most = 0

    def look(self) -> None:
        account = self.run._account
        assert all(level.committed <= level.max_cost for level in levels_of(account))
        assert all(level.tokens_committed <= level.max_tokens for level in levels_of(account))
        assert account.held >= 0
        self.most = max(self.most, account.committed)


def make_run(**limits: Any) -> ExecutionContext:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    return contain(clock=loop.clock, divergence=False, **limits)


def fitting(chance: random.Random) -> list[tuple[int, int]]:
    """Worst cases and real costs, in cents, of calls that fit under a dollar one after the other."""
    costs = [chance.randint(0, 6) for _ in range(chance.randint(2, 14))]
    return [(chance.randint(max(1, cost), 100 - (sum(costs) - cost)), cost) for cost in costs]


@pytest.mark.parametrize("part", range(4))
def test_inv_20_calls_that_fit_one_after_the_other_all_complete(part: int) -> None:
    for seed in range(part, SEEDS, 4):
        sim_run(lambda seed=seed: _fits(random.Random(seed)), seed=seed)  # type: ignore[misc]


async def _fits(chance: random.Random) -> None:
    calls = fitting(chance)
    run = make_run(max_cost_usd=1)
    checked = Checked(run)
    places = [run, run, run.with_sub_budget(Budget(max_cost_dollars=1)), run.spawn_child("child")]

    async def call(worst: int, cost: int) -> str:
        await asyncio.sleep(chance.randint(0, 3))
        place = chance.choice(places)

        async def work() -> str:
            checked.look()
            await asyncio.sleep(chance.randint(0, 5))
            place.report(cost_usd=cost / 100)
            return "done"

        outcome: str = await place.allm(work, cost_hint_usd=worst / 100)
        checked.look()
        return outcome

    outcomes = await asyncio.wait_for(asyncio.gather(*(call(*each) for each in calls)), MAX_TIME_S)
    assert outcomes == ["done"] * len(calls)
    assert run.balance.spent_nanos == sum(cost for _, cost in calls) * 10_000_000
    assert (run.balance.held_nanos, run.balance.unresolved_nanos, len(run._run.room)) == (0, 0, 0)


@pytest.mark.parametrize("part", range(4))
def test_inv_20_calls_of_unknown_cost_pass_no_ceiling_although_the_first_ones_fail(part: int) -> None:
    for seed in range(part, SEEDS, 4):
        sim_run(lambda seed=seed: _unknown(random.Random(seed)), seed=seed)  # type: ignore[misc]


async def _unknown(chance: random.Random) -> None:
    """Calls without a hint at ten cents, or of ten tokens, each; some make several such calls at once."""
    most, counts_tokens = chance.randint(1, 10) * 10, chance.random() < 0.3
    limit: dict[str, Any] = {"max_tokens": most} if counts_tokens else {"max_cost_usd": most / 100}
    part_of_it = Budget(max_tokens=30) if counts_tokens else Budget(max_cost_dollars=0.3)
    used: dict[str, Any] = {"output_tokens": 10} if counts_tokens else {"cost_usd": 0.1}
    if chance.random() < 0.5:
        runs = [make_run(**limit)]
    else:
        clock = make_run()._run.clock
        team = Ledger(
            "team", Budget(max_tokens=most) if counts_tokens else Budget(max_cost_dollars=most / 100), clock=clock
        )
        runs = [make_run(ledger=team) for _ in range(3)]
    checked = [Checked(run) for run in runs]
    failing = chance.choice([0.1, 0.5, 0.9])

    async def call(run: ExecutionContext, depth: int) -> None:
        place = chance.choice([run, run, run.spawn_child("child", budget=part_of_it)])
        makes_calls = depth > 0 and chance.random() < 0.5

        async def work() -> None:
            await asyncio.sleep(chance.randint(0, 3))
            if chance.random() < failing:
                raise ValueError("broken")
            if makes_calls:
                async with asyncio.TaskGroup() as group:
                    for _ in range(4):
                        group.create_task(call(chance.choice(runs), depth - 1))
            else:
                place.report(**used)
            for each in checked:
                each.look()

        make = place.atool if makes_calls and chance.random() < 0.3 else place.allm
        hint_usd = 0.01 if counts_tokens and chance.random() < 0.5 else None
        await make(work, cost_hint_usd=hint_usd, timeout_s=chance.choice([None, None, 2]))

    tasks = [asyncio.ensure_future(call(chance.choice(runs), 2)) for _ in range(chance.randint(2, 12))]
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), MAX_TIME_S)
    for run, each in zip(runs, checked, strict=True):
        each.look()
        assert (len(run._run.room), run._account.held, run._run.first_calls) == (0, 0, ())
        run.end()


@pytest.mark.parametrize("part", range(4))
def test_inv_20_nested_holds_cancels_and_deadlines_never_leave_a_call_waiting(part: int) -> None:
    for seed in range(part, SEEDS, 4):
        sim_run(lambda seed=seed: _ends(random.Random(seed)), seed=seed)  # type: ignore[misc]


async def _ends(chance: random.Random) -> None:
    limits: dict[str, Any] = {"timeout_s": chance.choice([None, None, 5, 50])}
    limits["max_wait_s"] = chance.choice([0, 7, 2 * MAX_TIME_S, 2 * MAX_TIME_S])
    if chance.random() < 0.7:
        runs = [make_run(max_cost_usd=1, **limits)]
    else:
        clock = make_run()._run.clock
        team = Ledger("team", Budget(max_cost_dollars=1), clock=clock)
        runs = [make_run(max_cost_usd=chance.choice([None, 1]), ledger=team, **limits) for _ in range(2)]
    checked = [Checked(run) for run in runs]

    async def call(place: ExecutionContext, depth: int) -> None:
        hint = None if chance.random() < 0.1 else chance.randint(0, 60)  # a call without one costs nothing here

        async def work() -> None:
            for each in checked:
                each.look()
            await asyncio.sleep(chance.randint(0, 4))
            inside = place.spawn_child("inside") if chance.random() < 0.2 else place
            try:
                if depth and chance.random() < 0.7:
                    places = [inside] * 3 + runs
                    calls = (call(chance.choice(places), depth - 1) for _ in range(chance.randint(1, 3)))
                    await asyncio.gather(*calls, return_exceptions=True)
                if chance.random() < 0.1:
                    raise ValueError("broken")
            finally:
                if inside is not place:
                    inside.end()
            place.report(cost_usd=chance.randint(0, min(10, hint or 0)) / 100)

        hint_usd = None if hint is None else hint / 100
        await place.allm(work, cost_hint_usd=hint_usd, timeout_s=chance.choice([None, None, 3]))

    async def disturb(tasks: list[asyncio.Task[None]]) -> None:
        await asyncio.sleep(chance.randint(1, 20))
        for task in tasks:
            if chance.random() < 0.2:
                task.cancel()
        if chance.random() < 0.1:
            runs[0].abort("enough")

    tasks = [
        asyncio.ensure_future(call(chance.choice(runs), chance.randint(0, 3))) for _ in range(chance.randint(1, 8))
    ]
    disturbing = asyncio.ensure_future(disturb(tasks))
    outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), MAX_TIME_S)
    await disturbing
    expected = (BudgetExceededError, CancelledError, asyncio.CancelledError, ValueError)
    unexpected = [each for each in outcomes if each is not None and not isinstance(each, expected)]
    assert unexpected == []
    for run in runs:
        assert (len(run._run.room), run._account.held) == (0, 0)
        assert run._run.first_calls == ()
        run.end()
        assert check_history(run.history(), ledger=run.balance) == []


def test_inv_20_a_rule_that_lets_every_call_pass_starves_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> int:
        run = make_run(max_cost_usd=1)
        order: list[str] = []

        async def one(name: str, after: float, hint: float) -> None:
            async def work() -> None:
                await asyncio.sleep(1)
                run.report(cost_usd=0)

            await asyncio.sleep(after)
            await run.allm(work, cost_hint_usd=hint)
            order.append(name)

        small = (one("small", number / 10, 0.1) for number in range(100))
        await asyncio.gather(one("large", 0.55, 0.9), *small)
        return order.index("large")

    assert sim_run(main, seed=1) < 15
    monkeypatch.setattr(waiting, "MAX_PASSED", 1_000)
    assert sim_run(main, seed=1) > 50
