"""Programs that use the official clients, under a run's limits; the provider's invoice is the judge."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
from typing import Any

import httpx2
import pytest

from penstock import Budget, BudgetExceededError, InvalidValue, ShieldPipeline, contain
from penstock.containment.shield import Verdict
from penstock.errors import RunEnded
from penstock.providers import contained
from penstock.testing.provider import FakeProviderServer, RefuseFree, Say
from tests.providers.sdk_calls import (
    ASYNC_CALLS,
    CALLS,
    MODEL,
    PROMPT,
    AsyncCall,
    Call,
    async_clients,
    chat,
    clients,
    in_threads,
    limits,
    messages,
    outcome,
)

pytestmark = pytest.mark.requirement("X-5")


@pytest.mark.parametrize("call", CALLS)
def test_sixteen_threads_spend_no_more_than_the_ceiling(call: Call) -> None:
    with FakeProviderServer.flat(0.50) as server, clients(server) as to:
        with contain(max_cost_usd=1.00, prices=server.provider.prices) as run, contained(run):
            outcomes = in_threads(16, lambda: call(to))
        assert server.invoice.total_usd == run.balance.spent_usd == 1.00
        assert sum(isinstance(found, str) for found in outcomes) == 2
        assert sum(isinstance(found, BudgetExceededError) for found in outcomes) == 14


@pytest.mark.parametrize("call", ASYNC_CALLS)
async def test_sixteen_tasks_spend_no_more_than_the_ceiling(call: AsyncCall) -> None:
    async with FakeProviderServer.flat(0.50) as server, async_clients(server) as to:
        with contain(max_cost_usd=1.00, prices=server.provider.prices) as run, contained(run):
            outcomes = await asyncio.gather(*(call(to) for _ in range(16)), return_exceptions=True)
        assert server.invoice.total_usd == run.balance.spent_usd == 1.00
        assert sum(isinstance(found, str) for found in outcomes) == 2
        assert sum(isinstance(found, BudgetExceededError) for found in outcomes) == 14


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("usage", ["true", "absent"])
def test_sixteen_threads_use_no_more_tokens_than_the_ceiling(call: Call, usage: Any) -> None:
    with (
        FakeProviderServer(script=lambda _: Say(output_tokens=1_000, usage=usage)) as server,
        clients(server) as to,
        limits(server, max_tokens=500) as run,
    ):
        outcomes = in_threads(16, lambda: call(to))
    used = sum(line.input_tokens + line.output_tokens for line in server.invoice.lines)
    assert used <= run.balance.tokens_in + run.balance.tokens_out <= 500
    assert sum(isinstance(found, str) for found in outcomes) >= 3


@pytest.mark.parametrize("call", CALLS)
def test_a_call_is_in_the_tree_with_its_model_its_tokens_and_its_bill(call: Call) -> None:
    with FakeProviderServer(script=["hello there"]) as server, clients(server) as to:
        with contain(max_cost_usd=1.00, prices=server.provider.prices) as run, contained(run):
            assert call(to) == "hello there"
        [line] = server.invoice.lines
        assert run.balance.spent_nanos == line.cost_nanos
        assert (run.balance.tokens_in, run.balance.tokens_out) == (line.input_tokens, line.output_tokens)
        assert (run.balance.steps, run.balance.api_calls) == (1, 1)
        assert f"✓ {MODEL}" in run.explain()


@pytest.mark.parametrize("call", CALLS)
def test_what_is_refused_never_leaves_and_is_not_tried_again(call: Call) -> None:
    with FakeProviderServer() as server, clients(server, max_retries=5) as to:
        with (
            contain(max_cost_usd=0, prices=server.provider.prices) as run,
            contained(run),
            pytest.raises(BudgetExceededError) as refused,
        ):
            call(to)
        assert refused.value.owner == "main"
        assert server.requests == ()
        assert run.explain().count(f"■ {MODEL}") == 1


def test_requests_outside_of_the_block_belong_to_no_run() -> None:
    with FakeProviderServer() as server, clients(server) as to, contain(max_cost_usd=0) as run:
        with contained(run):
            installed = httpx2.HTTPTransport.handle_request
        assert httpx2.HTTPTransport.handle_request is installed
        assert chat(to)
    assert (run.balance.attempts, run.uncontained_requests) == (0, 0)


def test_clients_made_before_and_inside_both_count() -> None:
    with FakeProviderServer.flat(0.25) as server, clients(server) as before, limits(server, max_cost_usd=1.00) as run:
        assert chat(before)
        with clients(server) as inside:
            assert chat(inside)
    assert server.invoice.total_usd == run.balance.spent_usd == 0.50


def test_the_innermost_run_pays_and_its_ancestors_hold() -> None:
    with FakeProviderServer.flat(0.25) as server, clients(server) as to, limits(server, max_cost_usd=0.50) as run:
        assert chat(to)
        with run.spawn_child("child", budget=Budget(max_cost_dollars=10.0)) as child, contained(child):
            assert chat(to)
            with pytest.raises(BudgetExceededError) as refused:
                chat(to)
        assert refused.value.owner == "main"
        assert (child.balance.spent_usd, run.balance.spent_usd) == (0.25, 0.50)


def test_another_run_inside_has_its_own_account() -> None:
    with FakeProviderServer.flat(0.25) as server, clients(server) as to:
        prices = server.provider.prices
        with contain(max_cost_usd=1, prices=prices) as outer, contained(outer):
            with contain(max_cost_usd=1, prices=prices) as inner, contained(inner):
                assert chat(to)
            assert chat(to)
            assert messages(to)
    assert (inner.balance.spent_usd, outer.balance.spent_usd) == (0.25, 0.50)


def test_a_child_that_was_entered_pays_without_a_block_of_its_own() -> None:
    with FakeProviderServer.flat(0.25) as server, clients(server) as to, limits(server, max_cost_usd=1) as run:
        with run.spawn_child("child", budget=Budget(max_cost_dollars=0.25)) as child:
            assert chat(to)
            with pytest.raises(BudgetExceededError) as refused:
                chat(to)
        assert chat(to)
    assert refused.value.owner == "child"
    assert (child.balance.spent_usd, run.balance.spent_usd) == (0.25, 0.50)


def test_a_call_made_by_a_tool_is_below_the_tool_and_under_its_budget() -> None:
    with FakeProviderServer.flat(0.25) as server, clients(server) as to, limits(server, max_cost_usd=1) as run:
        narrow = run.with_sub_budget(Budget(max_cost_dollars=0.25))
        assert narrow.tool(chat, to, name="search")
        with pytest.raises(BudgetExceededError):
            narrow.tool(chat, to, name="search again")
    _, search, below, *_ = run.explain().splitlines()
    assert "search" in search
    assert below.startswith("│")
    assert MODEL in below
    assert run.balance.spent_usd == server.invoice.total_usd == 0.25


def test_a_model_call_around_a_contained_one_is_not_billed_twice() -> None:
    with FakeProviderServer() as server, clients(server) as to, limits(server, max_cost_usd=1) as run:

        def ask() -> Any:
            return to.openai.chat.completions.create(model=MODEL, messages=PROMPT, max_tokens=50)

        assert run.llm(ask, model=MODEL).usage.completion_tokens
    assert run.balance.spent_nanos == server.invoice.total_nanos > 0


async def test_runs_in_different_tasks_do_not_mix() -> None:
    async def one(cents: int, count: int) -> float:
        with contain(max_cost_usd=cents / 100, prices=server.provider.prices) as run, contained(run):
            await asyncio.gather(*(achat(to) for _ in range(count)), return_exceptions=True)
        return run.balance.spent_usd

    achat = ASYNC_CALLS[0]
    async with FakeProviderServer.flat(0.25) as server, async_clients(server) as to:
        spent = await asyncio.gather(one(100, 2), one(50, 8), one(0, 4), one(75, 5))
    assert spent == [0.50, 0.50, 0.0, 0.75]
    assert server.invoice.total_usd == sum(spent)


def test_a_request_from_an_empty_context_is_reported() -> None:
    with FakeProviderServer() as server, clients(server) as to, limits(server, max_cost_usd=0) as run:
        with pytest.warns(RuntimeWarning, match="belongs to no run"):
            assert contextvars.Context().run(chat, to)
        with pytest.raises(BudgetExceededError):
            chat(to)
    assert len(server.requests) == run.uncontained_requests == 1


def test_an_attempt_of_the_client_draws_on_the_retry_budget() -> None:
    with (
        FakeProviderServer(script=lambda _: RefuseFree(429, retry_after_s=0.001)) as server,
        clients(server, max_retries=10) as to,
        contain(max_retries=2, prices=server.provider.prices) as run,
        contained(run),
    ):
        found = outcome(lambda: chat(to))
    assert "the retry budget has nothing left" in str(found)
    assert len(server.requests) == 3
    assert (run.balance.attempts, run.balance.retries) == (3, 2)


def test_what_the_client_does_not_cap_gets_a_cap_and_what_cannot_be_paid_for_is_cut_down() -> None:
    with FakeProviderServer(output_tokens=5_000) as server, clients(server) as to:
        prices = server.provider.prices
        with contain(prices=prices) as run, contained(run, max_output_tokens=321):
            to.openai.chat.completions.create(model=MODEL, messages=PROMPT)
            to.openai.responses.create(model=MODEL, input="hello")
        with contain(max_cost_usd=0.01, prices=prices) as run, contained(run):
            to.anthropic.messages.create(model=MODEL, messages=PROMPT, max_tokens=10_000)
        first, second, third = (request.body for request in server.requests)
    assert first["max_tokens"] == second["max_output_tokens"] == 321
    assert 600 < third["max_tokens"] < 667  # a cent buys 666 tokens of output, and there is the input
    assert server.invoice.lines[-1].output_tokens == third["max_tokens"]
    assert run.balance.spent_nanos == server.invoice.lines[-1].cost_nanos <= 10_000_000


def test_below_the_floor_a_call_is_refused() -> None:
    with (
        FakeProviderServer() as server,
        clients(server) as to,
        limits(server, max_cost_usd=0.001, floor=64),
        pytest.raises(BudgetExceededError),
    ):
        chat(to)
    assert server.requests == ()


def test_a_strict_run_refuses_what_it_cannot_price_and_another_lets_it_pass() -> None:
    with FakeProviderServer() as server, clients(server) as to:

        def tune() -> Any:
            return outcome(lambda: to.openai.fine_tuning.jobs.create(model=MODEL, training_file="file-1"))

        with contain(strict=True, prices=server.provider.prices) as run, contained(run):
            assert type(tune()).__name__ == "Halted"
            assert chat(to)
            assert to.openai.models.list().data
            assert to.anthropic.messages.count_tokens(model=MODEL, messages=PROMPT).input_tokens
        assert {request.path for request in server.requests}.isdisjoint({"/v1/fine_tuning/jobs"})
        with contain(prices=server.provider.prices) as run, contained(run):
            assert type(tune()).__name__ == "NotFoundError"  # of a server that has none
    assert run.balance.attempts == 1


def test_a_scope_that_outlives_its_run_lets_nothing_through() -> None:
    with FakeProviderServer() as server, clients(server) as to:
        with contain(prices=server.provider.prices) as run:
            scope = contained(run)
        with scope:
            for call in (chat, messages):
                with pytest.raises(RunEnded):
                    call(to)
    assert server.requests == ()


@pytest.mark.requirement("C-18")
def test_a_scope_that_outlives_a_stopped_run_reports_the_stop() -> None:
    with FakeProviderServer() as server, clients(server) as to:
        with contain(max_steps=0, prices=server.provider.prices) as run:
            run.call_tool(lambda: None)
            scope = contained(run)
        with scope:
            for call in (chat, messages):
                with pytest.raises(BudgetExceededError):
                    call(to)
    assert server.requests == ()


@pytest.mark.parametrize("options", [{"max_output_tokens": 0}, {"floor": 0}, {"floor": True}])
def test_what_is_no_number_of_tokens_is_named(options: dict[str, Any]) -> None:
    with contain() as run, pytest.raises(InvalidValue, match=next(iter(options))):
        contained(run, **options)


@pytest.mark.parametrize("on_stop", ["", "Raise", None])
def test_what_is_no_way_to_handle_a_stop_is_named(on_stop: Any) -> None:
    with contain() as run, pytest.raises(InvalidValue, match="on_stop must be 'warn', 'raise' or 'ignore'"):
        contained(run, on_stop=on_stop)


def test_a_decorated_function_is_one_block_in_each_call() -> None:
    with FakeProviderServer.flat(0.25) as server, clients(server) as to, contain(prices=server.provider.prices) as run:

        @contained(run)
        def ask() -> str:
            """Asks."""
            return chat(to)

        assert [ask(), ask()]
        assert chat(to)
    assert (ask.__name__, ask.__doc__) == ("ask", "Asks.")
    assert run.balance.spent_usd == 0.50


async def test_a_decorated_async_function_is_one_block_until_it_is_done() -> None:
    async with FakeProviderServer.flat(0.25) as server, async_clients(server) as to:
        with contain(max_cost_usd=0.50, prices=server.provider.prices) as run:

            @contained(run)
            async def ask() -> str:
                await asyncio.sleep(0)
                return await ASYNC_CALLS[0](to)

            outcomes = await asyncio.gather(*(ask() for _ in range(4)), return_exceptions=True)
    assert sum(isinstance(found, str) for found in outcomes) == 2
    assert server.invoice.total_usd == run.balance.spent_usd == 0.50


def test_what_cannot_be_decorated_is_named() -> None:
    def generator() -> Any:
        yield

    async def async_generator() -> Any:
        yield

    with contain() as run:
        for function in (generator, async_generator, int, "ask"):
            with pytest.raises(InvalidValue, match="function"):
                contained(run)(function)  # type: ignore[type-var]


def test_what_is_no_run_is_named() -> None:
    with pytest.raises(InvalidValue, match="run"):
        contained("run")  # type: ignore[arg-type]


def test_importing_the_package_imports_no_client() -> None:
    program = (
        "import sys; import penstock.providers;"
        "sys.exit(', '.join({'openai', 'anthropic', 'httpx', 'httpx2'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr.strip()) == ("", "")


def test_without_the_client_of_the_other_provider_it_works_too() -> None:
    program = """
import sys
sys.modules["anthropic"] = None
import openai
from penstock import BudgetExceededError, contain
from penstock.providers import contained
try:
    with contain(max_cost_usd=0) as run, contained(run):
        openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="k").responses.create(model="gpt-4o", input="hi")
except BudgetExceededError:
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("refused\n", "")


def test_a_degraded_call_goes_to_the_model_that_the_hook_names() -> None:
    class Cheaper:
        def before_llm_call(self, call: Any) -> Verdict:
            return Verdict.degrade(model="smaller", reason="budget is low")

    with (
        FakeProviderServer() as server,
        clients(server) as to,
        contain(pipeline=ShieldPipeline(pre_dispatch=Cheaper()), prices=server.provider.prices) as run,
        contained(run),
    ):
        assert chat(to)
    assert [request.model for request in server.requests] == ["smaller"]


async def test_a_decorated_function_that_returns_a_coroutine_runs_inside_its_block() -> None:
    async with FakeProviderServer.flat(0.25) as server, async_clients(server) as to:
        run = contain(max_cost_usd=0, prices=server.provider.prices)

        @contained(run)
        def ask() -> Any:
            return to.openai.responses.create(model=MODEL, input="hello")

        with pytest.raises(BudgetExceededError):
            await ask()
        assert server.requests == ()


def test_a_decorated_function_that_returns_a_generator_is_refused() -> None:
    @contained(contain())
    def pieces() -> Any:
        return (number for number in range(3))

    with pytest.raises(InvalidValue, match="generator"):
        pieces()


def test_the_error_of_a_run_that_was_not_stopped_is_not_replaced_by_that_of_another() -> None:
    def inner() -> None:
        with contain(max_steps=0) as other:
            other.tool(lambda: 1)

    with contain() as run, pytest.raises(KeyError), contained(run, on_stop="raise"):
        try:
            inner()
        except BudgetExceededError:
            raise KeyError("handled") from None
