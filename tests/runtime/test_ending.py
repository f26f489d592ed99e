"""How a run and its children end, what becomes of what still runs, and what is left to read."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from penstock import (
    Budget,
    CancelledError,
    CircuitBreaker,
    CustomTrace,
    Decision,
    ExecutionConfig,
    ExecutionContext,
    Halted,
    InvalidValue,
    ModelCallTrace,
    Price,
    PriceBook,
    RunEnded,
    SafetyEvent,
    ShieldPipeline,
    TerminationReason,
    ToolCallContext,
    Verdict,
    WrapOptions,
    current_context,
)
from penstock.events import RunCompleted
from penstock.testing import Answer, FakeProvider, NoUsage, check_history


def nothing() -> None:
    pass


def fails() -> None:
    raise ValueError("no answer")


class Deny:
    """A hook that says no."""

    def before_tool_call(self, ctx: ToolCallContext) -> Verdict:
        return Verdict.deny("not today")


def make_run(**more: Any) -> ExecutionContext:
    """A run with one step, one retry, a hook against tools, and a circuit that is open once something has failed."""
    return ExecutionContext(
        ExecutionConfig(None, 1, None),
        ShieldPipeline(tool_dispatch=Deny()),
        breaker=CircuitBreaker(failure_threshold=1),
        **more,
    )


# How it ended.


def works(ctx: ExecutionContext) -> None:
    ctx.llm(nothing)


def breaks(ctx: ExecutionContext) -> None:
    ctx.llm(fails)


def swallows_its_error(ctx: ExecutionContext) -> None:
    ctx.wrap_llm_call(fails)


def takes_too_many_steps(ctx: ExecutionContext) -> None:
    ctx.llm(nothing)
    ctx.llm(nothing)


def swallows_its_limit(ctx: ExecutionContext) -> None:
    ctx.wrap_llm_call(nothing)
    ctx.wrap_llm_call(nothing)


def is_denied(ctx: ExecutionContext) -> None:
    ctx.tool(nothing)


def aborts_itself(ctx: ExecutionContext) -> None:
    ctx.abort("changed its mind")


def runs_into_its_abort(ctx: ExecutionContext) -> None:
    ctx.abort("changed its mind")
    ctx.check_cancelled()


def presses_ctrl_c(ctx: ExecutionContext) -> None:
    raise KeyboardInterrupt


def exits(ctx: ExecutionContext) -> None:
    raise SystemExit(3)


def meets_an_open_circuit(ctx: ExecutionContext) -> None:
    ctx.wrap_llm_call(fails)
    ctx.llm(nothing)


def gathers_stops(ctx: ExecutionContext) -> None:
    with pytest.raises(Halted) as stopped:
        takes_too_many_steps(ctx)
    raise BaseExceptionGroup("tasks", [stopped.value, ExceptionGroup("more", [stopped.value])])


def gathers_a_stop_and_a_fault(ctx: ExecutionContext) -> None:
    raise BaseExceptionGroup("tasks", [CancelledError(), ExceptionGroup("more", [ValueError("no")])])


ENDINGS: list[tuple[Callable[[ExecutionContext], None], TerminationReason, type[BaseException] | None]] = [
    (works, TerminationReason.SUCCESS, None),
    (swallows_its_error, TerminationReason.SUCCESS, None),
    (breaks, TerminationReason.ERROR, ValueError),
    (takes_too_many_steps, TerminationReason.LIMIT_EXCEEDED, Halted),
    (swallows_its_limit, TerminationReason.LIMIT_EXCEEDED, None),
    (is_denied, TerminationReason.HOOK_ABORT, Halted),
    (aborts_itself, TerminationReason.CONTEXT_CANCELED, None),
    (runs_into_its_abort, TerminationReason.CONTEXT_CANCELED, CancelledError),
    (presses_ctrl_c, TerminationReason.CONTEXT_CANCELED, KeyboardInterrupt),
    (exits, TerminationReason.CONTEXT_CANCELED, SystemExit),
    (meets_an_open_circuit, TerminationReason.ERROR, Halted),
    (gathers_stops, TerminationReason.LIMIT_EXCEEDED, BaseExceptionGroup),
    (gathers_a_stop_and_a_fault, TerminationReason.ERROR, BaseExceptionGroup),
]
STATUS = {"success": "success", "error": "fail"}
BY_NAME = pytest.mark.parametrize(("act", "reason", "raised"), ENDINGS, ids=[act.__name__ for act, _, _ in ENDINGS])


@pytest.mark.requirement("C-14")
@BY_NAME
def test_a_run_has_a_termination_reason_and_swallows_no_error(
    act: Callable[[ExecutionContext], None], reason: TerminationReason, raised: type[BaseException] | None
) -> None:
    ctx, caught = make_run(), None
    try:
        with ctx as entered:
            assert entered is ctx
            assert ctx.termination_reason is None
            act(ctx)
    except BaseException as error:
        caught = error
    assert isinstance(caught, raised) if raised else caught is None
    last = ctx.history()[-1]
    assert isinstance(last, RunCompleted)
    assert ctx.termination_reason is last.termination_reason is reason
    assert last.error == (type(caught).__name__ if caught else None)
    assert ctx.graph.snapshot()["nodes"]["n000001"]["status"] == STATUS.get(reason, "halt")
    assert check_history(ctx.history()) == []


@pytest.mark.requirement("T-4", "C-14")
@BY_NAME
def test_a_child_has_a_termination_reason_and_its_run_continues(
    act: Callable[[ExecutionContext], None], reason: TerminationReason, raised: type[BaseException] | None
) -> None:
    with ExecutionContext(
        pipeline=ShieldPipeline(tool_dispatch=Deny()), breaker=CircuitBreaker(failure_threshold=1)
    ) as run:
        caught = None
        try:
            with run.spawn_child("child", budget=Budget(max_steps=1)) as child:
                act(child)
        except BaseException as error:
            caught = error
        assert isinstance(caught, raised) if raised else caught is None
        assert child.termination_reason is reason
        (completed,) = [event for event in run.events if event.kind == "child_completed"]
        assert (completed.child_name, completed.termination_reason) == ("child", reason)  # type: ignore[attr-defined]
        assert run.graph.snapshot()["nodes"]["n000002"]["status"] == STATUS.get(reason, "halt")
    assert run.termination_reason is TerminationReason.SUCCESS
    assert check_history(run.history()) == []


@pytest.mark.requirement("C-14")
def test_leaving_cleanly_is_not_an_abort() -> None:
    with ExecutionContext() as ctx:
        ctx.tool(nothing)
    snapshot = ctx.get_snapshot()
    assert (snapshot.aborted, snapshot.abort_reason, snapshot.events) == (False, None, [])
    assert not ctx.cancellation.is_cancelled


@pytest.mark.requirement("C-14")
def test_leaving_while_work_runs_is_no_abort_but_cancels_the_work() -> None:
    started, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    ctx = ExecutionContext(ExecutionConfig(1, None, None))

    def outlive() -> None:
        started.set()
        assert go_on.wait(30)
        with suppress(CancelledError):
            ctx.check_cancelled()
            pytest.fail("it was not cancelled")
        ended.set()

    with ctx:
        thread = threading.Thread(target=lambda: ctx.wrap_tool_call(outlive, WrapOptions("late", 0.25)))
        thread.start()
        assert started.wait(30)
    (node,) = ctx.get_snapshot().nodes
    assert (node.status, node.end_ts is not None) == ("aborted", True)
    assert (ctx.termination_reason, ctx.get_snapshot().aborted) == ("success", False)
    assert ctx.balance.unresolved_usd == 0.25
    go_on.set()
    thread.join()
    assert ended.wait(30)
    assert ctx.balance.held_usd == 0
    assert check_history(ctx.history()) == []


@pytest.mark.requirement("C-14")
@pytest.mark.parametrize("end", [lambda ctx: ctx.end(), lambda ctx: ctx.end(ValueError()), lambda ctx: ctx.abort()])
def test_a_run_ends_once_and_what_comes_later_changes_nothing(end: Callable[[ExecutionContext], None]) -> None:
    with ExecutionContext() as ctx:
        ctx.tool(nothing)
    before, explained = ctx.history(), ctx.explain()
    end(ctx)
    with ctx:
        pass
    assert (ctx.history(), ctx.explain(), ctx.termination_reason) == (before, explained, "success")


@pytest.mark.requirement("C-14")
@pytest.mark.parametrize("door", ["wrap_llm_call", "wrap_tool_call", "call_llm", "call_tool", "llm", "tool"])
def test_a_call_after_the_end_raises_and_does_not_run(door: str) -> None:
    ctx, ran = ExecutionContext(), []
    child = ctx.spawn_child("child")
    child.end()
    with pytest.raises(RunEnded, match=rf"context 'main/child' of run {ctx.run_id} has ended: (llm|tool) call"):
        getattr(child, door)(lambda: ran.append(1))
    ctx.end()
    for ended in (ctx, child, ctx.with_input(1)):
        with pytest.raises(RunEnded, match=r"start a new (run|child) for further work") as refused:
            getattr(ended, door)(lambda: ran.append(1))
        assert refused.value.run_id == ctx.run_id
    assert ran == []
    assert check_history(ctx.history()) == []


@pytest.mark.requirement("C-14")
@pytest.mark.parametrize("door", ["awrap_llm_call", "awrap_tool_call", "acall_llm", "acall_tool", "allm", "atool"])
async def test_an_awaited_call_after_the_end_raises_and_does_not_run(door: str) -> None:
    ctx, ran = ExecutionContext(), []
    ctx.end()
    with pytest.raises(RunEnded):
        await getattr(ctx, door)(lambda: ran.append(1))
    assert ran == []


def test_nothing_is_written_into_a_run_that_has_ended() -> None:
    ctx = ExecutionContext()
    ctx.end()
    before = ctx.history()
    for late in (
        lambda: ctx.trace_custom("late"),
        lambda: ctx.record_event(CustomTrace(name="late")),
        lambda: ctx.record_event(SafetyEvent("late", Decision.ALLOW, "", "test")),
        lambda: ctx.record_event(ModelCallTrace(name="late", cost=1)),
        lambda: ctx.spawn_child("late"),
        ctx.start_iteration,
    ):
        with pytest.raises(RunEnded, match="came after its end"):
            late()
    ctx.abort("late")
    assert (ctx.history(), ctx.balance.spent_usd, ctx.get_snapshot().events) == (before, 0, [])


@pytest.mark.requirement("T-4")
def test_nothing_is_recorded_in_an_ended_child_although_its_run_continues() -> None:
    ctx = ExecutionContext()
    child = ctx.spawn_child("child")
    child.end()
    with pytest.raises(RunEnded, match="context 'main/child' of run"):
        child.record_event(ModelCallTrace(name="late", cost=1))
    assert ctx.balance.spent_usd == 0


# Entering and leaving.


@pytest.mark.requirement("C-14")
def test_a_run_entered_twice_ends_when_it_is_left_for_the_last_time() -> None:
    ctx = ExecutionContext()
    with ctx:
        with ctx:
            ctx.tool(nothing)
        assert (ctx.termination_reason, current_context()) == (None, ctx)
        ctx.tool(nothing)
    assert (ctx.termination_reason, current_context(), ctx.balance.steps) == ("success", None, 2)


@pytest.mark.requirement("C-14")
def test_threads_may_enter_one_run_together_and_the_last_to_leave_ends_it() -> None:
    ctx, here = ExecutionContext(), threading.Barrier(8)
    leave, open_still, seen = threading.Semaphore(0), [], []

    def work(number: int) -> None:
        with ctx:
            here.wait()
            seen.append(current_context() is ctx)
            assert leave.acquire(timeout=30)
            ctx.tool(nothing, name=f"step {number}")
            open_still.append(ctx.termination_reason is None)
            leave.release()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    leave.release()
    for thread in threads:
        thread.join()
    assert (seen, open_still) == ([True] * 8, [True] * 8)
    assert (ctx.termination_reason, ctx.balance.steps) == ("success", 8)
    assert check_history(ctx.history()) == []


@pytest.mark.requirement("C-14")
def test_the_first_error_of_several_with_blocks_counts() -> None:
    ctx = ExecutionContext()
    with ctx:
        with pytest.raises(ValueError, match="first"), ctx:
            raise ValueError("first")
        ctx.tool(nothing)
    assert ctx.termination_reason == "error"
    last = ctx.history()[-1]
    assert isinstance(last, RunCompleted)
    assert last.error == "ValueError"


def test_a_run_may_be_left_where_it_was_not_entered_as_fixtures_and_generators_do() -> None:
    def fixture() -> Iterator[ExecutionContext]:
        with ExecutionContext() as ctx:
            yield ctx

    generator = fixture()
    ctx = contextvars.copy_context().run(next, generator)
    ctx.tool(nothing)
    contextvars.copy_context().run(lambda: list(generator))
    assert ctx.termination_reason == "success"


@pytest.mark.requirement("C-14")
async def test_an_async_block_ends_the_run_as_a_plain_one_does() -> None:
    async with ExecutionContext() as ctx:
        await ctx.atool(lambda: asyncio.sleep(0))
        assert current_context() is ctx
    assert (ctx.termination_reason, current_context()) == ("success", None)
    with pytest.raises(ValueError, match="no"):
        async with ExecutionContext() as ctx:
            raise ValueError("no")
    assert ctx.termination_reason == "error"


@pytest.mark.requirement("C-14", "P-C2")
async def test_a_task_cancelled_inside_the_block_stays_cancelled_and_the_run_ends_cancelled() -> None:
    inside = asyncio.Event()
    ctx = ExecutionContext()

    async def work() -> None:
        async with ctx:
            inside.set()
            await ctx.atool(lambda: asyncio.sleep(30))

    task = asyncio.create_task(work())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ctx.termination_reason == "context_canceled"


@pytest.mark.requirement("C-14")
async def test_a_limit_that_stops_the_tasks_of_a_group_is_how_the_run_ended() -> None:
    ctx = ExecutionContext(ExecutionConfig(None, 1, None))
    with pytest.raises(ExceptionGroup):
        async with ctx, asyncio.TaskGroup() as tasks:
            for _ in range(3):
                tasks.create_task(ctx.atool(lambda: asyncio.sleep(0)))
    assert ctx.termination_reason == "limit_exceeded"


# Children that were never completed.


@pytest.mark.requirement("T-4")
def test_children_that_are_open_when_the_run_ends_are_closed_with_it_the_deepest_first() -> None:
    with ExecutionContext() as ctx:
        child = ctx.spawn_child("child")
        grandchild = child.spawn_child("grandchild")
        done = child.spawn_child("done")
        done.end()
    assert [each.termination_reason for each in (grandchild, child, done)] == [
        "context_canceled",
        "context_canceled",
        "success",
    ]
    completed = [event.child_name for event in ctx.history() if event.kind == "child_completed"]  # type: ignore[attr-defined]
    assert completed == ["done", "grandchild", "child"]
    assert ctx.termination_reason == "success"
    assert check_history(ctx.history()) == []


@pytest.mark.requirement("T-4")
def test_a_child_that_is_completed_takes_its_open_children_and_calls_with_it() -> None:
    started, go_on = threading.Event(), threading.Event()
    ctx = ExecutionContext()
    child = ctx.spawn_child("child")
    grandchild = child.spawn_child("grandchild")

    def outlive() -> None:
        started.set()
        assert go_on.wait(30)

    thread = threading.Thread(target=lambda: grandchild.wrap_tool_call(outlive, WrapOptions("late")))
    thread.start()
    assert started.wait(30)
    ctx.complete_child(child)
    assert (child.termination_reason, grandchild.termination_reason) == ("success", "context_canceled")
    assert ctx.get_snapshot().nodes[0].status == "aborted"
    assert ctx.wrap_tool_call(nothing) is Decision.ALLOW
    go_on.set()
    thread.join()
    ctx.end()
    assert check_history(ctx.history()) == []


def test_an_open_child_stopped_by_a_limit_ends_with_that_reason() -> None:
    with ExecutionContext() as ctx:
        child = ctx.spawn_child("child", budget=Budget(max_steps=0))
        child.wrap_tool_call(nothing)
    assert child.termination_reason == "limit_exceeded"


@pytest.mark.parametrize("reason", ["done", 5, ""], ids=repr)
def test_a_reason_for_the_end_of_a_child_is_one_of_the_list(reason: Any) -> None:
    ctx = ExecutionContext()
    child = ctx.spawn_child("child")
    with pytest.raises(InvalidValue, match="reason must be one of success, max_iterations, error"):
        ctx.complete_child(child, reason)
    ctx.complete_child(child, "max_iterations")  # type: ignore[arg-type]
    assert child.termination_reason is TerminationReason.MAX_ITERATIONS


# What is not known.


@pytest.mark.requirement("X-2")
def test_an_unknown_price_is_counted_and_the_report_shows_the_known_part() -> None:
    provider = FakeProvider([Answer(), NoUsage(), Answer()], model="mystery-1")
    book = PriceBook(use_genai_prices=False)
    ctx = ExecutionContext(ExecutionConfig(1, None, None), prices=book)
    ctx.llm(provider.complete, name="no price")
    ctx.llm(provider.complete, name="no usage")
    ctx.llm(provider.complete, name="hinted", cost_hint_usd=0.25)
    assert (ctx.get_snapshot().unknown_costs, ctx.get_snapshot().cost_usd_accumulated) == (2, 0.25)
    assert ctx.explain().splitlines()[-1].startswith("cost at least $0.25 of $1.00, 2 calls unknown · ")


@pytest.mark.requirement("X-2")
def test_one_call_of_unknown_cost_is_shown_in_the_singular_and_zero_is_not_shown() -> None:
    ctx = ExecutionContext()
    ctx.tool(nothing, name="tools that report nothing are free")
    assert ctx.explain().splitlines()[-1] == "cost $0.00 · 1 step"
    ctx.llm(nothing)
    assert ctx.explain().splitlines()[-1] == "cost unknown (1 call) · 2 steps · 1 api call"


@pytest.mark.requirement("X-2")
def test_a_model_of_unknown_price_is_refused_if_configured() -> None:
    book = PriceBook(registered={"fake-1": Price(3, 15)}, unknown="refuse", use_genai_prices=False)
    provider = FakeProvider(model="fake-1")
    ctx = ExecutionContext(prices=book)
    with pytest.raises(Halted, match="no price is known for model 'mystery-1'; register one, or pass a cost hint"):
        ctx.llm(provider.complete, model="mystery-1")
    assert provider.invoice.calls == 0
    ctx.llm(provider.complete, model="mystery-1", cost_hint_usd=0.01)
    ctx.llm(provider.complete, model="fake-1")
    assert provider.invoice.calls == 2
    assert [event.event_type for event in ctx.get_snapshot().events] == ["price_unknown"]


@pytest.mark.requirement("X-2")
def test_a_model_of_unknown_price_costs_the_assumed_price_if_configured() -> None:
    book = PriceBook(unknown="assume", assumed=Price(100, 1_000), use_genai_prices=False)
    provider = FakeProvider([Answer(input_tokens=1_000, output_tokens=100)] * 2)
    ctx = ExecutionContext(ExecutionConfig(0.20, None, None), prices=book)
    ctx.llm(provider.complete)
    assert (ctx.balance.spent_usd, ctx.get_snapshot().unknown_costs) == (0.20, 0)
    assert ctx.wrap_llm_call(provider.complete) is Decision.HALT


def test_the_explanation_shows_what_ran_what_was_refused_and_why() -> None:
    ctx = ExecutionContext(ExecutionConfig(0.50, 3, 4), budget=Budget(max_tokens=1_000), name="research")
    ctx.llm(lambda: ctx.report(cost_usd=0.30, input_tokens=100, output_tokens=20), name="plan", model="m-1")
    ctx.wrap_tool_call(fails, WrapOptions("search"))
    ctx.wrap_llm_call(nothing, WrapOptions("write", cost_estimate_hint=0.25))
    ctx.wrap_tool_call(fails, WrapOptions("bill unknown", cost_estimate_hint=0.10))
    root, plan, search, write, unknown, totals = ctx.explain().splitlines()
    assert root.startswith("… research")
    assert plan.startswith("├─ ✓ plan  llm m-1  $0.30  100→20 tokens  ")
    assert search.startswith("├─ ✗ search  tool  ")
    assert search.endswith("ValueError: no answer")
    assert write.startswith("├─ ■ write  llm  ")
    assert write.endswith("budget_exceeded: $0.30 spent of the $0.50 of 'research'; the call would hold $0.25")
    assert unknown.startswith("└─ ✗ bill unknown  tool  ")
    assert totals == ("cost $0.30 of $0.50 · unresolved $0.10 · 1/3 steps · 120/1000 tokens · 1 api call · 2/4 retries")
