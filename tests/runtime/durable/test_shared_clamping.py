"""A model call that a shared budget refuses asks once more, for as much as can be paid there."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from penstock.agents.agent import Agent
from penstock.agents.messages import Message
from penstock.agents.model import ModelRequest, ModelResponse, TruncatedByBudget
from penstock.agents.scripted import ScriptedModel
from penstock.containment.ledger import MemoryLedgerStore
from penstock.containment.limits import Budget, BudgetExceededError, Limits
from penstock.errors import CancelledError
from penstock.runtime.billing.prices import Price, PriceBook
from penstock.runtime.billing.usage import Usage
from penstock.runtime.cancellation import CancellationToken
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable.shared import SharedBudget
from penstock.testing import explore
from tests.runtime.durable.test_shared import Store

pytestmark = pytest.mark.requirement("X-1")

PRICES = PriceBook(registered={"scripted": Price(0, 1_000)}, use_genai_prices=False)
TOKEN = 1_000_000
"""What a token of output costs."""
MESSAGES = [Message.user("Go on.")]


class Sparing(ScriptedModel):
    """Its answers may have a hundred tokens, and have to be able to have four."""

    max_output_tokens = 100
    floor = 4

    def count_input(self, request: ModelRequest) -> int:
        return 0


def saying(tokens: int, seen: list[int] | None = None) -> Sparing:
    """A model that says so many tokens, or as many as it may."""

    def answer(request: ModelRequest) -> ModelResponse:
        if seen is not None:
            seen.append(request.max_output_tokens)
        output = min(tokens, request.max_output_tokens)
        finish: Any = "stop" if output == tokens else "length"
        return ModelResponse("x" * output, usage=Usage(0, output, model="scripted"), finish_reason=finish)

    return Sparing(answer)


def ledger(**limits: int) -> MemoryLedgerStore:
    store = MemoryLedgerStore()
    store.open_account("all", Limits())
    store.open_account("team", Limits(**limits), parent="all")
    return store


def run_at(store: Any, number: int = 1, **options: Any) -> ExecutionContext:
    shared = SharedBudget(store, "team", prefix=f"run{number}/1")
    return ExecutionContext(prices=PRICES, shared_budget=shared, **options)


@pytest.mark.parametrize(
    ("limits", "most"),
    [({"cost_nanos": 30 * TOKEN}, 30), ({"tokens": 20}, 20), ({"cost_nanos": 30 * TOKEN, "tokens": 9}, 9)],
)
async def test_it_asks_for_what_is_left_there_and_holds_the_same_here(limits: dict[str, int], most: int) -> None:
    store, run = ledger(**limits), None
    held: list[tuple[int, int, int, int]] = []

    def answer(request: ModelRequest) -> ModelResponse:
        here, there = run.balance, store.balance("team")
        held.append((here.held_nanos, there.held_nanos, here.tokens_held, there.tokens_held))
        assert (request.max_output_tokens, request.is_clamped) == (most, True)
        return ModelResponse("x", usage=Usage(0, 5, model="scripted"))

    run = run_at(store)
    assert (await Sparing(answer).generate(run, MESSAGES)).text == "x"
    assert held == [(most * TOKEN, most * TOKEN, most, most)]
    for left in (run.balance, store.balance("team"), store.balance("all")):
        assert (left.spent_nanos, left.held_nanos, left.tokens_held) == (5 * TOKEN, 0, 0)
    assert run.stop is None
    run.end()
    assert run.termination_reason == "success", "that it was refused first stopped nothing"


async def test_the_account_with_the_least_left_limits_the_output() -> None:
    store, seen = ledger(cost_nanos=50 * TOKEN), list[int]()
    store.grant("all", Limits(cost_nanos=20 * TOKEN))
    await saying(5, seen).generate(run_at(store), MESSAGES)
    assert seen == [20]


async def test_an_answer_that_was_cut_there_is_a_halt_by_that_budget() -> None:
    run = run_at(ledger(cost_nanos=10 * TOKEN))
    result = await Agent(saying(30)).run("go", run)
    error = result.error
    assert isinstance(error, TruncatedByBudget)
    assert (error.text, error.owner, error.budget) == ("x" * 10, "team", Budget(max_cost_dollars=0.01))
    assert "it paid for 10 of the 100 tokens" in error.reason
    assert run.stop is error.stop
    assert run._is_under(error.stop), "it stops whatever the run does"


async def test_a_budget_that_cannot_pay_for_the_smallest_answer_refuses_it_and_holds_nothing() -> None:
    store, seen = ledger(cost_nanos=3 * TOKEN), list[int]()
    run = run_at(store)
    with pytest.raises(BudgetExceededError, match=r"of 'team'; the call would hold \$0.004"):
        await saying(1, seen).generate(run, MESSAGES)
    assert (seen, run.balance.held_nanos, store.balance("team").held_nanos) == ([], 0, 0)
    assert run.stop is not None


@pytest.mark.parametrize("limits", [{"steps": 0}, {"api_calls": 0}, {"retries": 0}, {"cost_nanos": 0}])
async def test_a_call_that_less_output_does_not_help_is_refused_immediately(limits: dict[str, int]) -> None:
    store = ledger(**limits)
    holds = 0
    hold = store.hold

    def counting(*args: Any, **options: Any) -> Any:
        nonlocal holds
        holds += 1
        return hold(*args, **options)

    store.hold = counting  # type: ignore[method-assign]
    with pytest.raises(BudgetExceededError):
        await saying(1).generate(run_at(store), MESSAGES)
    assert holds == 1


async def test_a_request_that_is_sent_again_still_fits() -> None:
    store, tries = ledger(cost_nanos=30 * TOKEN), list[int]()

    def answer(request: ModelRequest) -> ModelResponse:
        tries.append(request.max_output_tokens)
        if len(tries) == 1:
            raise ConnectionRefusedError
        return ModelResponse("x", usage=Usage(0, 5, model="scripted"))

    model = Sparing(answer)
    model.retries = 1
    run = run_at(store)
    assert (await model.generate(run, MESSAGES)).text == "x"
    assert tries == [30, 30]
    assert (run.balance.held_nanos, store.balance("team").held_nanos) == (0, 0)


async def test_a_caller_that_leaves_during_a_hold_request_leaves_nothing_held() -> None:
    store = Store(cost_nanos=30 * TOKEN)
    store.gates["hold"] = gate = threading.Event()
    token = CancellationToken()
    run = run_at(store, cancellation=token)
    asking = asyncio.ensure_future(saying(5).generate(run, MESSAGES))
    await asyncio.to_thread(store.reached.wait, 60)
    token.cancel("enough")
    with pytest.raises(CancelledError):
        await asking
    gate.set()
    shared = run._run.shared
    assert shared is not None
    await shared.aflush()
    assert run.balance.held_nanos == 0


def test_concurrent_callers_together_never_overspend_the_budget() -> None:
    async def schedule(seed: int) -> int:
        store = ledger(cost_nanos=60 * TOKEN)

        async def one(number: int) -> None:
            async def answer(request: ModelRequest) -> ModelResponse:
                await asyncio.sleep(0)
                output = min(number * 7, request.max_output_tokens)
                finish: Any = "stop" if output == number * 7 else "length"
                return ModelResponse("x", usage=Usage(0, output, model="scripted"), finish_reason=finish)

            run = run_at(store, number)
            await Agent(Sparing(answer)).run("go", run)
            assert run.balance.held_nanos == 0

        await asyncio.gather(*(one(number) for number in range(1, 6)))
        left = store.balance("team")
        assert left.held_nanos == left.unresolved_nanos == 0
        assert left.spent_nanos <= 60 * TOKEN
        return left.spent_nanos // TOKEN

    assert max(explore(schedule, schedules=50)) > 0
