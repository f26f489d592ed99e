"""Everything that runs goes through one door: recorded, contained, executed, settled, and ended exactly once."""

from __future__ import annotations

import asyncio
import contextvars
import re
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest

from penstock import (
    Budget,
    BudgetExceededError,
    CancellationToken,
    CancelledError,
    ChainMetadata,
    CircuitBreaker,
    Decision,
    ExecutionConfig,
    ExecutionContext,
    Halted,
    InvalidValue,
    Price,
    PriceBook,
    Reported,
    RunEnded,
    RunSettings,
    ShieldPipeline,
    StopReason,
    Verdict,
    WrapOptions,
    contain,
)
from penstock.events import DivergenceDetector, LimitTrace
from penstock.runtime.admission import admit
from penstock.runtime.call import Call, CallSpec, blank, running_call
from penstock.runtime.calls import Outcome
from penstock.runtime.run import MAX_RECORDED_ABORTS
from penstock.runtime.settlement import succeed
from penstock.stops import Stop
from penstock.stores import Ledger
from penstock.testing import (
    Answer,
    FailAfterBilling,
    FakeProvider,
    ManualClock,
    NoUsage,
    ProviderHTTPError,
    Raise,
    RefuseFree,
    ServerError,
    SimLoop,
    check_history,
    explore,
    sim_run,
)

PATIENCE_S = 30.0
"""Far more than anything here takes: only a failing test waits for it."""

QUARTER = WrapOptions(operation_name="ask", cost_estimate_hint=0.25)


class Boom(Exception):
    pass


class Exit(BaseException):
    """A BaseException of the user's own."""


def until(holds: Callable[[], object]) -> None:
    tick = threading.Event()
    for _ in range(3_000):
        if holds():
            return
        tick.wait(0.01)
    raise AssertionError("it never came to hold")


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def simulated(main: Callable[[SimLoop], Awaitable[Any]], seed: int = 1) -> Any:
    """Run `main(loop)` in virtual time."""

    async def run() -> Any:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        return await main(loop)

    return sim_run(run, seed=seed)


def money(run: ExecutionContext) -> tuple[float, float, float]:
    """Spent, held and unresolved, in US dollars."""
    figures = run.balance
    return figures.spent_usd, figures.held_usd, figures.unresolved_usd


def statuses(run: ExecutionContext) -> list[tuple[str, str]]:
    return [(node.operation_name, node.status) for node in run.get_snapshot().nodes]


def whole(run: ExecutionContext) -> None:
    """End the run, and look whether its history is one that may happen."""
    run.end()
    assert check_history(run.history(), ledger=run.balance) == []


def parents(run: ExecutionContext) -> dict[str, str]:
    nodes = run.graph.snapshot()["nodes"]
    return {node["name"]: nodes[node["parent_id"]]["name"] for node in nodes.values() if node["parent_id"]}


def first_call(run: ExecutionContext) -> dict[str, Any]:
    return next(node for node in run.graph.snapshot()["nodes"].values() if node["parent_id"])


def cancelling() -> int:
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


# Twelve ways in.

SYNC = ("wrap_llm_call", "wrap_tool_call", "call_llm", "call_tool", "llm", "tool")
ASYNC = ("awrap_llm_call", "awrap_tool_call", "acall_llm", "acall_tool", "allm", "atool")


def ask(run: ExecutionContext, way: str, fn: Callable[[], Any]) -> tuple[Any, Decision | None]:
    """What one way in gives for `fn`: the value and the decision, None for the one it does not give."""
    result = getattr(run, way)(fn)
    if asyncio.iscoroutine(result):
        result = asyncio.run(result)
    if isinstance(result, Outcome):
        return result.value, result.decision
    return (None, result) if isinstance(result, Decision) else (result, None)


def shown(way: str, value: Any, decision: Decision) -> tuple[Any, Decision | None]:
    """What `way` shows of a value and a decision."""
    return (None if "wrap" in way else value), (decision if "_" in way else None)


@pytest.mark.requirement("C-6")
@pytest.mark.parametrize("way", SYNC + ASYNC)
def test_every_way_in_gives_the_value_or_the_decision_and_records_one_call_of_its_kind(way: str) -> None:
    run = ExecutionContext()
    assert ask(run, way, lambda: "done") == shown(way, "done", Decision.ALLOW)
    (node,) = run.get_snapshot().nodes
    assert (node.kind, node.status) == ("llm" if "llm" in way else "tool", "ok")
    assert run.balance.api_calls == ("llm" in way)
    assert list(run.partial_results.values()) == ["done"]
    whole(run)


@pytest.mark.requirement("C-6")
@pytest.mark.parametrize("way", ASYNC)
def test_every_async_way_in_awaits_what_the_function_returns(way: str) -> None:
    async def work() -> str:
        await asyncio.sleep(0)
        return "awaited"

    assert ask(ExecutionContext(), way, work) == shown(way, "awaited", Decision.ALLOW)


@pytest.mark.requirement("C-6", "C-3")
@pytest.mark.parametrize("way", SYNC + ASYNC)
def test_a_failure_is_a_decision_to_retry_or_the_error_itself(way: str) -> None:
    def fails() -> None:
        raise Boom("no")

    run = ExecutionContext(ExecutionConfig(None, None, 5))
    if "_" in way:
        assert ask(run, way, fails) == (None, Decision.RETRY)
    else:
        with pytest.raises(Boom, match="no"):
            ask(run, way, fails)
    assert [node.status for node in run.get_snapshot().nodes] == ["error"]
    assert (run.balance.retries, run.balance.steps) == (1, 0)


@pytest.mark.requirement("C-6", "C-2")
@pytest.mark.parametrize("way", SYNC + ASYNC)
def test_a_refusal_is_a_halt_or_raises_with_the_stop_and_nothing_runs(way: str) -> None:
    run = ExecutionContext(ExecutionConfig(None, 0, None))
    if "_" in way:
        assert ask(run, way, lambda: pytest.fail("it ran")) == (None, Decision.HALT)
    else:
        with pytest.raises(BudgetExceededError) as raised:
            ask(run, way, lambda: pytest.fail("it ran"))
        assert raised.value.stop_reason is StopReason.STEP_LIMIT_EXCEEDED
    assert [node.status for node in run.get_snapshot().nodes] == ["halted"]


@pytest.mark.requirement("C-4", "P-C2")
@pytest.mark.parametrize("way", SYNC + ASYNC)
def test_after_an_abort_every_way_in_is_shut(way: str) -> None:
    run = ExecutionContext()
    run.abort("enough")
    if "_" in way:
        assert ask(run, way, lambda: pytest.fail("it ran")) == (None, Decision.HALT)
    else:
        with pytest.raises(CancelledError, match="enough"):
            ask(run, way, lambda: pytest.fail("it ran"))


@pytest.mark.requirement("C-14")
@pytest.mark.parametrize("way", SYNC + ASYNC)
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, Exit])
def test_base_exceptions_pass_through_every_kind_of_call_and_are_recorded(kind: type[BaseException], way: str) -> None:
    def interrupted() -> None:
        raise kind("now")

    run = ExecutionContext()
    with pytest.raises(kind):
        ask(run, way, interrupted)
    assert [node.status for node in run.get_snapshot().nodes] == ["aborted"]
    assert (run.balance.steps_open, run.balance.retries) == (0, 0)
    whole(run)


@pytest.mark.requirement("C-14")
@pytest.mark.parametrize("way", SYNC + ASYNC)
def test_a_cancel_raised_by_a_function_passes_unchanged(way: str) -> None:
    def cancelled() -> None:
        raise asyncio.CancelledError

    run = ExecutionContext()
    with pytest.raises(asyncio.CancelledError):
        ask(run, way, cancelled)
    assert [node.status for node in run.get_snapshot().nodes] == ["aborted"]
    assert run.wrap_tool_call(lambda: None) is Decision.ALLOW


async def test_awaiting_a_cancelled_task_cancels_nothing_else() -> None:
    run, other = ExecutionContext(), asyncio.create_task(asyncio.sleep(3600))
    other.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run.atool(lambda: other)
    assert cancelling() == 0
    assert not run.cancellation.is_cancelled
    assert await run.atool(lambda: asyncio.sleep(0, "goes on")) == "goes on"


@pytest.mark.requirement("C-6")
async def test_awaitables_of_every_sort_are_awaited_and_everything_else_is_a_value() -> None:
    class Custom:
        def __await__(self) -> Generator[Any, None, str]:
            yield from asyncio.sleep(0).__await__()
            return "custom"

    class SaysYesToEverything:
        def __getattr__(self, name: str) -> Callable[..., int]:
            return lambda *_: 1

    run, loop = ExecutionContext(), asyncio.get_running_loop()
    future = loop.create_future()
    loop.call_soon(future.set_result, "future")
    assert await run.atool(lambda: future) == "future"
    assert await run.atool(lambda: asyncio.create_task(asyncio.sleep(0, "task"))) == "task"
    assert await run.atool(Custom) == "custom"
    assert await run.atool(lambda: "plain") == "plain"
    assert isinstance(await run.atool(SaysYesToEverything), SaysYesToEverything)


def test_arguments_are_passed_and_a_call_is_named_after_its_function() -> None:
    run = ExecutionContext()
    assert run.tool(max, 3, 7) == 7
    assert run.llm(lambda a: a, "echo") == "echo"
    assert run.tool(max, 1, 2, name="largest") == 2
    assert [name for name, _ in statuses(run)] == ["max", "llm", "largest"]


@pytest.mark.requirement("P-B2")
@pytest.mark.parametrize("way", SYNC + ASYNC)
def test_a_function_may_report_what_it_used_and_the_caller_gets_the_value_alone(way: str) -> None:
    run = ExecutionContext()
    reported = Reported.of("answer", cost_usd=0.05, input_tokens=10, output_tokens=5, model="m-1")
    assert ask(run, way, lambda: reported) == shown(way, "answer", Decision.ALLOW)
    assert (run.balance.spent_usd, run.usage.tokens_used) == (0.05, 15)
    assert first_call(run)["model"] == "m-1"


# Timeouts.


@pytest.mark.requirement("C-7", "C-4")
def test_a_timeout_of_one_async_call_halts_it_in_time_and_the_run_continues() -> None:
    async def main(loop: SimLoop) -> None:
        run = ExecutionContext(clock=loop.clock)
        options = WrapOptions(operation_name="slow", cost_estimate_hint=0.25, timeout_ms=500)
        outcome = await run.acall_tool(lambda: asyncio.sleep(3600), options)
        assert loop.time() == pytest.approx(0.5)
        assert (outcome.decision, outcome.value) == (Decision.HALT, None)
        stop = outcome.call.stop
        assert stop is not None
        assert (stop.reason, stop.budget, stop.limit) == (StopReason.TIMEOUT, "slow", 0.5)
        assert await run.atool(lambda: asyncio.sleep(1, "goes on")) == "goes on"
        assert statuses(run) == [("slow", "timeout"), ("tool", "ok")]
        assert money(run) == (0, 0, 0.25)
        whole(run)

    simulated(main)


@pytest.mark.requirement("C-7", "C-4")
def test_a_timeout_of_one_sync_call_frees_its_caller_and_the_run_continues() -> None:
    run, release = ExecutionContext(), threading.Event()
    outcome = run.call_tool(lambda: release.wait(PATIENCE_S), WrapOptions("slow", timeout_ms=10))
    stop = outcome.call.stop
    assert stop is not None
    assert (outcome.decision, stop.reason, stop.budget) == (Decision.HALT, StopReason.TIMEOUT, "slow")
    assert run.tool(lambda: "goes on") == "goes on"
    release.set()


@pytest.mark.requirement("C-7")
async def test_a_call_that_is_done_in_time_is_not_touched_by_its_timeout() -> None:
    run = ExecutionContext()
    assert run.tool(lambda: "sync", timeout_s=60) == "sync"
    assert await run.atool(lambda: asyncio.sleep(0, "async"), timeout_s=60) == "async"
    assert not run.cancellation.is_cancelled


@pytest.mark.requirement("C-4", "C-5")
def test_after_the_timeout_of_the_run_new_calls_halt_immediately() -> None:
    async def main(loop: SimLoop) -> None:
        run = ExecutionContext(ExecutionConfig(None, None, None, timeout_ms=1_000), clock=loop.clock)
        with pytest.raises(BudgetExceededError) as raised:
            await run.atool(lambda: asyncio.sleep(3600), timeout_s=1800)
        assert loop.time() == pytest.approx(1)
        assert (raised.value.stop_reason, raised.value.owner) == (StopReason.TIMEOUT, "main")
        assert await run.awrap_tool_call(lambda: pytest.fail("it ran")) is Decision.HALT
        assert run.wrap_llm_call(lambda: pytest.fail("it ran")) is Decision.HALT
        assert loop.time() == pytest.approx(1)
        run.end()
        assert run.termination_reason == "limit_exceeded"

    simulated(main)


@pytest.mark.requirement("C-4", "P-C2")
@pytest.mark.parametrize("way", ["call_tool", "acall_tool"])
def test_a_function_that_returns_after_the_deadline_without_ever_waiting_is_too_late(way: str) -> None:
    clock = ManualClock()
    settings = RunSettings(sync_calls="inline")
    run = ExecutionContext(ExecutionConfig(1, 10, None, timeout_ms=100), settings=settings, clock=clock)

    def slow() -> str:
        clock.advance(1)
        return "too late"

    pending = getattr(run, way)(slow, QUARTER)
    outcome = asyncio.run(pending) if asyncio.iscoroutine(pending) else pending
    assert (outcome.decision, outcome.value) == (Decision.HALT, None)
    assert statuses(run) == [("ask", "timeout")]
    assert money(run) == (0.25, 0, 0)
    assert (run.balance.steps, run.partial_results) == (0, {})


@pytest.mark.requirement("C-4", "P-C2")
def test_a_sync_call_inside_another_is_bound_by_the_timeout_of_that_one() -> None:
    run, release, inner = ExecutionContext(), threading.Event(), list[Any]()

    def outer() -> None:
        inner.append(run.call_tool(lambda: release.wait(PATIENCE_S), WrapOptions("inner", 0.25)))
        inner.append(run.call_tool(lambda: pytest.fail("it ran"), WrapOptions("next")))

    assert run.wrap_tool_call(outer, WrapOptions("outer", timeout_ms=30)) is Decision.HALT
    until(lambda: len(inner) == 2)
    assert [outcome.decision for outcome in inner] == [Decision.HALT] * 2
    assert money(run) == (0, 0, 0.25)
    release.set()
    until(lambda: run.balance.spent_usd == 0.25)
    assert statuses(run) == [("outer", "timeout"), ("inner", "timeout"), ("next", "timeout")]
    assert run.tool(lambda: "the run goes on") == "the run goes on"
    whole(run)


@pytest.mark.requirement("C-4")
async def test_code_that_swallows_the_timeout_of_its_call_gets_no_further_calls_admitted() -> None:
    run, inner = ExecutionContext(), list[Decision]()

    async def stubborn() -> str:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            inner.append(await run.awrap_tool_call(lambda: pytest.fail("it ran")))
        return "swallowed"

    outcome = await run.acall_tool(stubborn, WrapOptions("outer", timeout_ms=10))
    assert (outcome.decision, outcome.value, inner) == (Decision.HALT, None, [Decision.HALT])
    assert cancelling() == 0
    assert await run.atool(lambda: asyncio.sleep(0, "goes on")) == "goes on"
    whole(run)


@pytest.mark.requirement("C-4", "G-10")
def test_calls_under_way_inside_an_abandoned_call_end_with_it_children_first() -> None:
    run, release, under_way = ExecutionContext(), threading.Event(), threading.Event()

    def elsewhere() -> None:
        """Its own context has no deadline: nothing but the end of the outer call ends it."""
        child = run.spawn_child("child")
        under_way.set()
        child.call_tool(lambda: release.wait(PATIENCE_S), WrapOptions("inner", 0.25))

    assert run.wrap_tool_call(elsewhere, WrapOptions("outer", 0.5, timeout_ms=50)) is Decision.HALT
    assert under_way.is_set()
    assert money(run) == (0, 0, 0.75)
    ends = [event.name for event in run.history() if event.kind == "call_ended"]  # type: ignore[attr-defined]
    assert ends == ["inner", "child", "outer"]
    release.set()
    until(lambda: money(run) == (0.75, 0, 0))
    whole(run)


# Abort.


def reasons(run: ExecutionContext) -> tuple[list[str], list[str]]:
    """The reasons of all stops: in the safety events, and in the log."""
    events = [event.reason for event in run.get_snapshot().events]
    return events, [event.message for event in run.history() if isinstance(event, LimitTrace)]


@pytest.mark.requirement("C-4")
async def test_an_abort_is_recorded_once_and_in_the_record_of_every_call_it_stops() -> None:
    run = contain()
    under_way = [asyncio.create_task(run.awrap_tool_call(lambda: asyncio.sleep(PATIENCE_S))) for _ in range(3)]
    await turns()
    run.abort("enough")
    assert await asyncio.gather(*under_way) == [Decision.HALT] * 3
    assert run.wrap_tool_call(print) is Decision.HALT
    assert await run.awrap_llm_call(print) is Decision.HALT
    assert reasons(run) == (["enough"], ["enough"])
    stops = {node["stop_reason"] for node in run.graph.snapshot()["nodes"].values() if node["parent_id"]}
    assert stops == {"aborted: enough"}
    assert [status for _, status in statuses(run)] == ["aborted"] * 5
    whole(run)


@pytest.mark.parametrize("given", [False, True])
async def test_a_cancel_is_recorded_with_the_first_call_it_stops(given: bool) -> None:
    token = CancellationToken()
    run = contain(cancellation=token) if given else contain()
    under_way = [asyncio.create_task(run.awrap_tool_call(lambda: asyncio.sleep(PATIENCE_S))) for _ in range(3)]
    await turns()
    (token if given else run.cancellation).cancel("stop here")
    assert reasons(run) == ([], [])
    assert await asyncio.gather(*under_way) == [Decision.HALT] * 3
    assert run.wrap_tool_call(print) is Decision.HALT
    assert reasons(run) == (["stop here"], ["stop here"])
    assert run.get_snapshot().events[0].metadata["node_id"] == run.get_snapshot().nodes[0].node_id
    run.abort("and again")
    assert reasons(run) == (["stop here"], ["stop here"])
    whole(run)


@pytest.mark.parametrize("how", ["on the cancel", "on its cause"])
def test_a_bill_that_comes_with_a_cancel_is_settled(how: str) -> None:
    run = contain()

    def stops() -> None:
        run.abort("enough")
        try:
            run.check_cancelled()
        except CancelledError as cancelled:
            billed = Boom() if how == "on its cause" else cancelled
            billed.cost_usd = 0.05  # type: ignore[union-attr]
            raise cancelled from (billed if billed is not cancelled else None)

    assert run.call_llm(stops, QUARTER).decision is Decision.HALT
    until(lambda: money(run) == (0.05, 0, 0))  # it may be left behind on a thread that has no turn for long
    whole(run)


def test_two_aborts_with_the_same_message_are_recorded_separately() -> None:
    run = contain()
    for name in ("one", "other"):
        with run.spawn_child(name) as child:
            child.abort("enough")
            assert child.wrap_tool_call(print) is Decision.HALT
    assert reasons(run) == (["enough", "enough"], ["enough", "enough"])
    whole(run)


def test_a_run_forgets_the_oldest_aborts_and_never_remembers_more_than_its_bound() -> None:
    run = contain()
    for _ in range(MAX_RECORDED_ABORTS + 10):
        child = run.spawn_child("child")
        child.abort("enough")
        child.end()
    assert len(run._run.recorded_aborts) == MAX_RECORDED_ABORTS
    run.abort("enough of all")
    assert run.wrap_tool_call(print) is Decision.HALT
    assert [reason for reason in reasons(run)[0] if reason != "enough"] == ["enough of all"]
    whole(run)


def test_calls_that_reach_a_deadline_are_recorded_separately() -> None:
    async def main(loop: SimLoop) -> None:
        run = contain(timeout_s=1.0, clock=loop.clock)
        under_way = [run.awrap_tool_call(lambda: asyncio.sleep(60)) for _ in range(3)]
        assert await asyncio.gather(*under_way) == [Decision.HALT] * 3
        assert [event.name for event in run.history() if isinstance(event, LimitTrace)] == ["tool"] * 3
        whole(run)

    simulated(main)


def admitted(run: ExecutionContext, spec: CallSpec, attempt: int = 1) -> Call:
    call = blank(Call)
    admit(call, run, spec, run.cancellation, attempt=attempt)
    return call


def test_a_call_that_was_let_in_has_the_fields_of_one_made_by_hand() -> None:
    run = contain()
    entered = admitted(run, CallSpec("tool", "fetch", 0))
    by_hand = Call(run, entered.record, True, run.cancellation)
    fields = [field for field in Call.__slots__ if not field.startswith("_")]
    assert [getattr(entered, field) for field in fields] == [getattr(by_hand, field) for field in fields]
    assert (entered.hold, entered.state, entered.attempt) == (entered, "held", 1)
    assert (by_hand.hold, by_hand.state) == (None, None)
    succeed(entered, None)
    assert entered.state == "settled"
    whole(run)


def test_metadata_is_shared_between_records_and_copied_for_readers() -> None:
    run = contain()
    about = {"step": "fetch", "inputs": ["a"]}
    spec = CallSpec("system", "fetch", metadata=about)
    first = admitted(run, spec)
    succeed(first, None)
    second = admitted(run, spec, attempt=2)
    succeed(second, None)
    third = admitted(run, CallSpec("system", "fetch"), attempt=2)
    succeed(third, None)
    assert first.record.metadata is about
    nodes = run.graph.snapshot()["nodes"]
    shown = [nodes[call.node_id]["metadata"] for call in (first, second, third)]
    assert shown == [about, {**about, "attempt": 2}, {"attempt": 2}]
    shown[0]["inputs"].append("b")
    shown[0]["step"] = "changed"
    (started, *_) = [event for event in run.history() if event.kind == "call_started" and event.name == "fetch"]  # type: ignore[attr-defined]
    started.metadata["step"] = "changed"  # type: ignore[attr-defined]
    assert about == {"step": "fetch", "inputs": ["a"]}
    whole(run)


@pytest.mark.requirement("C-4")
def test_an_abort_ends_an_async_call_in_the_same_instant_within_a_few_turns_of_the_loop() -> None:
    async def schedule(seed: int) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        run = ExecutionContext(clock=loop.clock)
        asking = asyncio.ensure_future(run.acall_llm(lambda: asyncio.sleep(3600), QUARTER))
        await asyncio.sleep(1)
        run.abort("enough")
        await turns(5)
        assert asking.done()
        assert loop.time() == 1
        outcome = asking.result()
        assert outcome.decision is Decision.HALT
        assert outcome.call.stop.reason is StopReason.ABORTED  # type: ignore[union-attr]
        assert money(run) == (0, 0, 0.25)
        whole(run)

    explore(schedule, schedules=20)


@pytest.mark.requirement("C-4")
@pytest.mark.parametrize("way", ["call_tool", "acall_tool"])
def test_an_abort_from_inside_a_call_discards_its_value_and_counts_its_cost(way: str) -> None:
    run = ExecutionContext()

    def aborts() -> Any:
        run.abort("from inside")
        return Reported.of("value", cost_usd=0.10)

    pending = getattr(run, way)(aborts, QUARTER)
    outcome = asyncio.run(pending) if asyncio.iscoroutine(pending) else pending
    assert (outcome.decision, outcome.value) == (Decision.HALT, None)
    assert money(run) == (0.10, 0, 0)
    assert run.balance.steps == 0
    whole(run)


@pytest.mark.requirement("C-4")
def test_an_inline_sync_call_that_is_aborted_from_another_thread_is_discarded_and_settled() -> None:
    run = ExecutionContext(settings=RunSettings(sync_calls="inline"), cancellation=CancellationToken())

    def work() -> str:
        thread = threading.Thread(target=run.abort)
        thread.start()
        thread.join(PATIENCE_S)
        assert threading.current_thread() is threading.main_thread()
        return "value"

    outcome = run.call_tool(work, QUARTER)
    assert (outcome.decision, outcome.value) == (Decision.HALT, None)
    assert money(run) == (0.25, 0, 0)


@pytest.mark.requirement("C-4")
@pytest.mark.parametrize(
    ("mode", "token", "deadline", "threads", "on_a_worker"),
    [
        ("inline", True, True, True, False),
        ("thread", False, False, False, True),
        ("auto", False, False, False, False),
        ("auto", True, False, False, True),
        ("auto", False, True, False, True),
        ("auto", False, False, True, True),
    ],
)
def test_where_a_sync_function_runs(
    mode: Any, token: bool, deadline: bool, threads: bool, on_a_worker: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The test runner has a thread of its own, so that a program of one thread can only be played.
    monkeypatch.setattr("penstock.runtime.worker.others_alive", lambda: threads)
    run = ExecutionContext(
        ExecutionConfig(None, None, None, timeout_ms=60_000 if deadline else 0),
        cancellation=CancellationToken() if token else None,
        settings=RunSettings(sync_calls=mode),
    )
    thread = run.tool(threading.current_thread)
    assert (thread is not threading.current_thread()) == on_a_worker


@pytest.mark.requirement("C-4")
def test_an_abort_from_another_thread_frees_the_caller_of_a_sync_call_that_has_no_deadline() -> None:
    under_way, release = threading.Event(), threading.Event()
    run, outcomes = ExecutionContext(), list[Any]()

    def slow() -> str:
        under_way.set()
        release.wait(PATIENCE_S)
        return "late"

    thread = threading.Thread(target=lambda: outcomes.append(run.call_tool(slow, QUARTER)))
    thread.start()
    assert under_way.wait(PATIENCE_S)
    run.abort("enough")
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    release.set()
    assert outcomes[0].decision is Decision.HALT
    assert "abandoned" in run.explain()


@pytest.mark.requirement("C-4")
def test_a_program_of_one_thread_runs_its_sync_calls_itself() -> None:
    script = (
        "import threading; from penstock import contain\n"
        "with contain() as run: assert run.tool(threading.get_ident) == threading.get_ident()\n"
        "with contain(timeout_s=60) as run: assert run.tool(threading.get_ident) != threading.get_ident()\n"
        "with contain() as run: assert run.tool(threading.get_ident) == threading.get_ident(), 'workers do not count'\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.requirement("C-4", "P-C1")
def test_a_token_from_outside_frees_the_caller_of_a_sync_call() -> None:
    token, under_way, release = CancellationToken(), threading.Event(), threading.Event()
    run, outcomes = ExecutionContext(cancellation=token), list[Any]()

    def slow() -> str:
        under_way.set()
        release.wait(PATIENCE_S)
        return "late"

    thread = threading.Thread(target=lambda: outcomes.append(run.call_tool(slow, QUARTER)))
    thread.start()
    assert under_way.wait(PATIENCE_S)
    token.cancel("from outside")
    thread.join(PATIENCE_S)
    assert outcomes[0].decision is Decision.HALT
    assert money(run) == (0, 0, 0.25)
    release.set()
    until(lambda: money(run) == (0.25, 0, 0))


@pytest.mark.requirement("C-4", "P-C2")
async def test_sync_code_that_checks_for_a_cancel_stops_as_a_halt() -> None:
    run = ExecutionContext()

    def asks() -> None:
        run.abort("enough")
        run.check_cancelled()
        pytest.fail("it went on")

    assert run.wrap_tool_call(asks) is Decision.HALT
    assert statuses(run) == [("tool", "aborted")]
    assert run.balance.retries == 0


# Our cancels and those of others.


@pytest.mark.requirement("C-4")
@pytest.mark.parametrize("how", ["abort", "timeout"])
async def test_a_task_whose_call_we_stopped_has_no_cancel_pending_afterwards(how: str) -> None:
    run = ExecutionContext()
    if how == "abort":
        asyncio.get_running_loop().call_later(0.01, run.abort)
    outcome = await run.acall_tool(asyncio.Event().wait, WrapOptions(timeout_ms=10 if how == "timeout" else None))
    assert outcome.decision is Decision.HALT
    assert cancelling() == 0
    await asyncio.sleep(0.001)


@pytest.mark.requirement("C-4")
def test_an_asyncio_timeout_around_a_call_that_we_stopped_still_works() -> None:
    async def main(loop: SimLoop) -> None:
        run = ExecutionContext(clock=loop.clock)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10):
                assert await run.awrap_tool_call(asyncio.Event().wait, WrapOptions(timeout_ms=1_000)) is Decision.HALT
                assert cancelling() == 0
                await asyncio.sleep(3600)
        assert (loop.time(), cancelling()) == (10, 0)
        async with asyncio.timeout(10):
            assert await run.awrap_tool_call(asyncio.Event().wait, WrapOptions(timeout_ms=1_000)) is Decision.HALT
        assert (loop.time(), cancelling()) == (11, 0)

    simulated(main)


@pytest.mark.requirement("C-4")
def test_an_asyncio_timeout_that_comes_first_is_a_timeout_error_and_the_call_is_recorded() -> None:
    async def main(loop: SimLoop) -> None:
        run = ExecutionContext(clock=loop.clock)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await run.awrap_tool_call(asyncio.Event().wait, WrapOptions(timeout_ms=5_000))
        assert (loop.time(), cancelling()) == (1, 0)
        assert statuses(run) == [("tool", "aborted")]
        whole(run)

    simulated(main)


@pytest.mark.requirement("C-4")
def test_an_asyncio_timeout_and_ours_at_the_same_instant_are_both_kept() -> None:
    async def schedule(seed: int) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        run = ExecutionContext(clock=loop.clock)
        decisions: list[Decision] = []
        try:
            async with asyncio.timeout(1):
                decisions.append(await run.awrap_tool_call(asyncio.Event().wait, WrapOptions(timeout_ms=1_000)))
                await asyncio.sleep(0)  # if ours came alone, theirs has to strike here
                await asyncio.sleep(3600)
        except TimeoutError:
            pass
        else:
            pytest.fail("the asyncio timeout was lost")
        assert (loop.time(), cancelling()) == (1, 0)
        assert decisions in ([], [Decision.HALT])
        whole(run)

    explore(schedule, schedules=100)


@pytest.mark.requirement("C-4")
async def test_a_task_group_around_stopped_calls_continues() -> None:
    run = ExecutionContext()
    async with asyncio.TaskGroup() as group:
        asking = [group.create_task(run.awrap_tool_call(asyncio.Event().wait)) for _ in range(3)]
        await turns()
        run.abort("enough")
        assert await run.awrap_tool_call(lambda: None) is Decision.HALT
        await turns()
        assert cancelling() == 0
    assert [task.result() for task in asking] == [Decision.HALT] * 3


@pytest.mark.requirement("C-4")
async def test_a_task_group_whose_member_fails_cancels_its_own_call_as_usual() -> None:
    run = ExecutionContext()

    async def fails() -> None:
        await turns(2)
        raise Boom

    with pytest.raises(ExceptionGroup) as raised:
        async with asyncio.TaskGroup() as group:
            group.create_task(fails())
            await run.atool(asyncio.Event().wait, name="body")
    assert raised.group_contains(Boom)
    assert cancelling() == 0
    assert statuses(run) == [("body", "aborted")]
    assert not run.cancellation.is_cancelled


@pytest.mark.requirement("C-4")
@pytest.mark.parametrize("order", ["ours first", "theirs first"])
@pytest.mark.parametrize("apart", [0, 1, 3], ids=["same turn", "a turn apart", "three turns apart"])
@pytest.mark.parametrize("cleans_up", [False, True])
async def test_a_cancel_from_outside_is_never_swallowed_also_together_with_ours(
    order: str, apart: int, cleans_up: bool
) -> None:
    run, after = ExecutionContext(), list[str]()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            if cleans_up:
                await turns(5)

    async def body() -> None:
        await run.acall_tool(work, QUARTER)
        await asyncio.sleep(0)
        await asyncio.sleep(3600)
        after.append("went on")

    task = asyncio.create_task(body())
    await turns(3)
    acts: list[Callable[[], object]] = [lambda: run.abort("ours"), task.cancel]
    for act in acts if order == "ours first" else reversed(acts):
        act()
        await turns(apart)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, PATIENCE_S)
    assert (task.cancelled(), task.cancelling(), after) == (True, 1, [])
    assert money(run) == (0, 0, 0.25)
    whole(run)


@pytest.mark.requirement("C-4")
async def test_a_cancel_from_outside_that_comes_with_ours_from_inside_the_work_is_not_swallowed() -> None:
    run = ExecutionContext()

    async def work() -> str:
        run.abort("ours")
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return "done before either strikes"

    async def body() -> None:
        await run.acall_tool(work)
        await asyncio.sleep(3600)

    task = asyncio.create_task(body())
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, PATIENCE_S)
    assert task.cancelling() == 1


@pytest.mark.requirement("C-4")
def test_an_outside_cancel_while_ours_is_taken_back_leaves_no_trace_of_ours() -> None:
    async def main(loop: SimLoop) -> None:
        run = ExecutionContext(clock=loop.clock)

        async def swallows() -> str:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                assert task is not None
                loop.call_soon(task.cancel)
            return "swallowed"

        async def body() -> int:
            try:
                await run.acall_tool(swallows, WrapOptions(timeout_ms=10))
                await asyncio.sleep(1)
            except asyncio.CancelledError:
                return cancelling()
            raise AssertionError("theirs was lost")

        assert await asyncio.ensure_future(body()) == 1

    simulated(main)


@pytest.mark.requirement("C-4")
async def test_a_call_made_while_its_task_is_being_cancelled_is_stopped_by_us_alone() -> None:
    """Cleaning up after a cancel from outside may use the door, and a timeout in there is only that."""
    run, cleaned = ExecutionContext(), list[Any]()

    async def body() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            cleaned.append(await run.awrap_tool_call(asyncio.Event().wait, WrapOptions(timeout_ms=10)))
            cleaned.append(cancelling())

    task = asyncio.create_task(body())
    await turns(2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned == [Decision.HALT, 1]


@pytest.mark.requirement("C-4")
async def test_an_abort_from_inside_does_not_strike_what_the_task_does_after_the_call() -> None:
    run = ExecutionContext()

    async def aborts() -> None:
        run.abort("from inside")

    assert await run.awrap_tool_call(aborts) is Decision.HALT
    assert cancelling() == 0
    await asyncio.sleep(0)
    await asyncio.sleep(0.001)


@pytest.mark.requirement("C-4")
async def test_an_abort_of_calls_in_a_task_group_inside_a_call_halts_that_call() -> None:
    run = ExecutionContext()

    async def fan_out() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(run.atool(asyncio.Event().wait, name="inner"))

    asking = asyncio.create_task(run.acall_tool(fan_out, WrapOptions("outer")))
    await turns()
    run.abort("enough")
    outcome = await asyncio.wait_for(asking, PATIENCE_S)
    assert outcome.decision is Decision.HALT
    assert statuses(run) == [("outer", "aborted")] + [("inner", "aborted")] * 3
    assert asking.cancelling() == 0
    whole(run)


@pytest.mark.requirement("C-14")
async def test_an_interrupt_in_a_group_of_errors_is_not_kept_even_when_the_run_was_aborted() -> None:
    run = ExecutionContext()

    def fails() -> None:
        run.abort("enough")
        raise BaseExceptionGroup("both", [Exit(), Boom()])

    with pytest.raises(BaseExceptionGroup):
        run.wrap_tool_call(fails)
    assert statuses(run) == [("tool", "aborted")]


@pytest.mark.requirement("C-14")
def test_an_abandoned_coroutine_is_closed_and_its_call_recorded() -> None:
    run = ExecutionContext()
    loop = asyncio.new_event_loop()
    coroutine = run.acall_tool(loop.create_future, QUARTER)
    task = loop.create_task(coroutine)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    coroutine.close()
    assert statuses(run) == [("ask", "aborted")]
    assert money(run) == (0, 0, 0.25)
    assert running_call.get() is None


# Retries in place.


@pytest.mark.requirement("C-7")
@pytest.mark.parametrize("retries", [0, 1, 4])
@pytest.mark.parametrize("way", ["call_llm", "acall_llm"])
def test_a_call_that_keeps_failing_is_tried_once_and_then_as_often_as_allowed(way: str, retries: int) -> None:
    run, tried = ExecutionContext(), list[int]()

    def fails() -> None:
        tried.append(1)
        raise Boom

    pending = getattr(run, way)(fails, WrapOptions("ask", retry_policy_override=retries))
    outcome = asyncio.run(pending) if asyncio.iscoroutine(pending) else pending
    assert (len(tried), outcome.decision) == (1 + retries, Decision.RETRY)
    nodes = [node for node in run.graph.snapshot()["nodes"].values() if node["parent_id"]]
    assert [node["metadata"].get("attempt", 1) for node in nodes] == list(range(1, 2 + retries))
    assert {node["status"] for node in nodes} == {"fail"}
    assert run.balance.retries == run.balance.attempts == 1 + retries
    started = [event for event in run.history() if event.kind == "call_started"][1:]
    assert [event.metadata.get("attempt", 1) for event in started] == list(range(1, 2 + retries))  # type: ignore[attr-defined]
    whole(run)


@pytest.mark.requirement("C-7")
def test_the_first_attempt_that_succeeds_is_the_last() -> None:
    provider = FakeProvider([RefuseFree(503), Raise(), Answer("third time lucky")])
    run = ExecutionContext()
    answer = run.llm(provider.complete, retries=10)
    assert answer.choices[0].message.content == "third time lucky"
    assert (provider.invoice.calls, run.balance.steps) == (3, 1)


@pytest.mark.requirement("C-3", "C-7")
@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_retry_budget_is_drawn_by_every_failure_and_then_nothing_starts(budget: int) -> None:
    run, tried = ExecutionContext(ExecutionConfig(None, None, budget)), list[int]()

    def fails() -> None:
        tried.append(1)
        raise Boom

    outcome = run.call_tool(fails, WrapOptions(retry_policy_override=100))
    assert (outcome.decision, outcome.value) == (Decision.HALT, None)
    assert run.balance.retries == budget
    assert len(tried) == (budget + 1 if budget else 0)
    stop = outcome.call.stop
    assert stop is not None
    assert stop.reason is (StopReason.PROVIDER_ERROR if budget else StopReason.RETRY_BUDGET_EXCEEDED)
    later = run.call_tool(lambda: pytest.fail("it ran"))
    assert later.call.stop is not None
    assert later.call.stop.reason is StopReason.RETRY_BUDGET_EXCEEDED
    whole(run)


@pytest.mark.requirement("C-7")
def test_the_wait_a_provider_asks_for_is_kept_before_each_retry() -> None:
    async def main(loop: SimLoop) -> None:
        run = ExecutionContext(clock=loop.clock)
        provider = FakeProvider([RefuseFree(429, retry_after_s=20), RefuseFree(503, retry_after_s=40), Answer()])
        called_at: list[float] = []

        async def ask_provider() -> Any:
            called_at.append(loop.time())
            return await provider.acomplete()

        await run.allm(ask_provider, retries=5)
        assert called_at == pytest.approx([0, 20, 60])

    simulated(main)


@pytest.mark.requirement("C-4")
def test_a_deadline_ends_the_wait_before_a_retry() -> None:
    async def main(loop: SimLoop) -> None:
        run = ExecutionContext(ExecutionConfig(None, None, None, timeout_ms=30_000), clock=loop.clock)
        provider = FakeProvider(lambda _: RefuseFree(429, retry_after_s=3600))
        outcome = await run.acall_llm(provider.acomplete, WrapOptions(retry_policy_override=5))
        assert loop.time() == pytest.approx(30)
        assert (outcome.decision, provider.invoice.calls) == (Decision.HALT, 1)
        assert outcome.call.stop is not None
        assert outcome.call.stop.reason is StopReason.TIMEOUT
        assert cancelling() == 0
        whole(run)

    simulated(main)


@pytest.mark.requirement("P-C2")
@pytest.mark.parametrize("order", ["ours first", "theirs first"])
async def test_a_cancel_from_outside_in_the_wait_before_a_retry_is_not_swallowed_by_ours(order: str) -> None:
    run = ExecutionContext()
    provider = FakeProvider(lambda _: RefuseFree(429, retry_after_s=3600))
    asking = asyncio.create_task(run.acall_llm(provider.acomplete, WrapOptions(retry_policy_override=5)))
    await turns()
    acts: list[Callable[[], object]] = [lambda: run.abort("ours"), asking.cancel]
    for act in acts if order == "ours first" else reversed(acts):
        act()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asking, PATIENCE_S)
    assert provider.invoice.calls == 1


@pytest.mark.requirement("C-7")
def test_each_attempt_has_the_whole_timeout_of_the_call() -> None:
    async def main(loop: SimLoop) -> None:
        run, tried = ExecutionContext(clock=loop.clock), list[float]()

        async def slow_then_fails() -> None:
            await asyncio.sleep(0.9)
            tried.append(loop.time())
            raise Boom

        options = WrapOptions(timeout_ms=1_000, retry_policy_override=2)
        assert await run.awrap_tool_call(slow_then_fails, options) is Decision.RETRY
        assert tried == pytest.approx([0.9, 1.8, 2.7])

    simulated(main)


@pytest.mark.requirement("C-7")
def test_a_timeout_and_a_cancel_are_not_retried() -> None:
    async def main(loop: SimLoop) -> None:
        run, tried = ExecutionContext(clock=loop.clock), list[float]()

        async def hangs() -> None:
            tried.append(loop.time())
            await asyncio.sleep(3600)

        outcome = await run.acall_tool(hangs, WrapOptions(timeout_ms=1_000, retry_policy_override=5))
        assert (outcome.decision, tried, run.balance.retries) == (Decision.HALT, [0], 0)

    simulated(main)


# What failures cost.


class Billed(Exception):
    def __init__(self) -> None:
        self.usage = {"input_tokens": 100, "output_tokens": 50}
        self.cost_usd = 0.04


FAILURES: list[tuple[BaseException | type[BaseException], float, float]] = [
    (ProviderHTTPError(429), 0, 0),
    (ProviderHTTPError(400), 0, 0),
    (ConnectionRefusedError(), 0, 0),
    (ProviderHTTPError(500), 0, 0),
    (ProviderHTTPError(502), 0, 0.25),
    (ConnectionResetError(), 0, 0.25),
    (Boom(), 0, 0.25),
    (Billed(), 0.04, 0),
]


@pytest.mark.requirement("X-1")
@pytest.mark.parametrize(("error", "spent", "unresolved"), FAILURES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("way", ["call_llm", "acall_llm"])
def test_a_failure_costs_nothing_its_bill_or_what_was_held(
    way: str, error: BaseException, spent: float, unresolved: float
) -> None:
    def fails() -> None:
        raise error

    run = ExecutionContext(ExecutionConfig(1, 10, None))
    pending = getattr(run, way)(fails, QUARTER)
    if asyncio.iscoroutine(pending):
        asyncio.run(pending)
    assert money(run) == (spent, 0, unresolved)
    whole(run)


BAD_COUNTS = [-1, 10**30, True, "5", 1.5, float("nan"), float("inf"), [], {"value": 5}]


@pytest.mark.requirement("X-1", "X-2")
@pytest.mark.parametrize("field", ["prompt_tokens", "completion_tokens"])
@pytest.mark.parametrize("count", BAD_COUNTS, ids=repr)
@pytest.mark.parametrize("way", ["call_llm", "acall_llm"])
def test_a_usage_that_cannot_be_true_costs_the_hint_or_is_counted_as_unknown(way: str, count: Any, field: str) -> None:
    answer = {"model": "m", "usage": {"prompt_tokens": 5, "completion_tokens": 5, field: count}}
    run = ExecutionContext(ExecutionConfig(1, 10, None), prices=PriceBook(registered={"m": Price(3, 15)}))
    for options in (QUARTER, WrapOptions()):
        pending = getattr(run, way)(lambda: answer, options)
        outcome = asyncio.run(pending) if asyncio.iscoroutine(pending) else pending
        assert (outcome.decision, outcome.value) == (Decision.ALLOW, answer)
    assert money(run) == (0.25, 0, 0)
    assert (run.usage.tokens_used, run.get_snapshot().unknown_costs) == (0, 1)
    whole(run)


@pytest.mark.requirement("X-1")
@pytest.mark.parametrize(("beside", "unresolved"), [([], 0), ([Boom()], 0.25)], ids=["alone", "with a failure"])
@pytest.mark.parametrize("way", ["call_llm", "acall_llm"])
def test_a_halt_is_free_alone_and_not_in_a_group_with_a_failure(
    way: str, beside: list[Exception], unresolved: float
) -> None:
    halted = Halted(Stop(StopReason.DIVERGED, "stopped below"))

    def fails() -> None:
        raise ExceptionGroup("both", [halted, *beside]) if beside else halted

    run = ExecutionContext(ExecutionConfig(1, 10, None))
    pending = getattr(run, way)(fails, QUARTER)
    outcome = asyncio.run(pending) if asyncio.iscoroutine(pending) else pending
    assert (outcome.decision, outcome.call.stop) == (Decision.HALT, halted.stop)
    assert money(run) == (0, 0, unresolved)
    whole(run)


@pytest.mark.requirement("X-1")
@pytest.mark.parametrize("with_a_cancel", [False, True], ids=["failures alone", "with a cancel from below"])
@pytest.mark.parametrize("way", ["call_llm", "acall_llm"])
def test_a_group_of_errors_with_a_failure_of_unknown_bill_is_not_free(way: str, with_a_cancel: bool) -> None:
    free = Boom()
    free.penstock_free = True  # type: ignore[attr-defined]
    errors = [free, Boom(), *([CancelledError("below")] if with_a_cancel else [])]

    def fails() -> None:
        raise BaseExceptionGroup("several", errors)

    run = ExecutionContext(ExecutionConfig(1, 10, None))
    pending = getattr(run, way)(fails, QUARTER)
    outcome = asyncio.run(pending) if asyncio.iscoroutine(pending) else pending
    assert outcome.decision is (Decision.HALT if with_a_cancel else Decision.RETRY)
    assert money(run) == (0, 0, 0.25)
    whole(run)


@pytest.mark.requirement("X-1")
@pytest.mark.parametrize(("error", "spent"), [(Boom(), 0), (Billed(), 0.04)], ids=["unknown", "billed"])
def test_the_release_setting_gives_back_the_hold_of_an_unknown_bill_but_not_of_a_known_one(
    error: Exception, spent: float
) -> None:
    def fails() -> None:
        raise error

    run = ExecutionContext(settings=RunSettings(unknown_bill="release"))
    run.wrap_llm_call(fails, QUARTER)
    assert money(run) == (spent, 0, 0)


@pytest.mark.requirement("X-1", "P-B2")
@pytest.mark.parametrize("how", ["returns", "raises", "is interrupted", "is aborted"])
def test_usage_reported_during_a_call_counts_whatever_its_outcome(how: str) -> None:
    run = ExecutionContext()

    def work() -> None:
        run.report(cost_usd=0.03, input_tokens=10)
        run.report(cost_usd=0.04, output_tokens=5)
        if how == "raises":
            raise Boom
        if how == "is interrupted":
            raise Exit
        if how == "is aborted":
            run.abort("enough")

    try:
        run.wrap_llm_call(work, QUARTER)
    except Exit:
        assert how == "is interrupted"
    assert money(run) == (0.07, 0, 0)
    assert run.usage.tokens_used == 15


def test_a_report_from_outside_a_call_of_the_run_is_refused() -> None:
    run, other = ExecutionContext(), ExecutionContext()
    with pytest.raises(InvalidValue, match="report"):
        run.report(cost_usd=1)
    with pytest.raises(InvalidValue, match="report"):
        other.tool(lambda: run.report(cost_usd=1))


@pytest.mark.requirement("C-2", "X-1")
def test_a_call_that_cost_more_than_its_hint_is_counted_in_full_and_stops_the_next() -> None:
    run = ExecutionContext(ExecutionConfig(1, None, None))
    run.llm(lambda: Reported.of("dear", cost_usd=1.50), cost_hint_usd=0.10)
    assert money(run) == (1.50, 0, 0)
    assert run.wrap_llm_call(lambda: pytest.fail("it ran")) is Decision.HALT


@pytest.mark.requirement("X-1")
def test_an_unhinted_call_holds_the_largest_that_one_of_its_kind_has_cost_so_far() -> None:
    run, held = ExecutionContext(ExecutionConfig(10, None, None)), list[float]()

    def costs(usd: float) -> Any:
        held.append(run.balance.held_usd)
        return Reported.of("answer", cost_usd=usd)

    for usd in (0.30, 0.10, 0.50, 0.20):
        run.llm(costs, usd)
    run.tool(costs, 0.05)
    run.tool(costs, 0.01)
    run.llm(costs, 9, cost_hint_usd=0.01)
    assert held == [0, 0.30, 0.30, 0.50, 0, 0.05, 0.01]


@pytest.mark.requirement("X-1")
def test_a_call_holds_the_most_tokens_that_one_of_its_kind_has_used_also_with_a_cost_hint() -> None:
    run, held = contain(max_tokens=1_000), list[int]()

    def uses(tokens: int) -> Any:
        held.append(run.balance.tokens_held)
        return Reported.of("answer", cost_usd=0, output_tokens=tokens)

    run.llm(uses, 300, cost_hint_usd=0.01)
    run.llm(uses, 100, cost_hint_usd=0.01)
    run.llm(uses, 200)
    assert held == [0, 300, 300]


@pytest.mark.requirement("X-1")
def test_an_unhinted_call_that_may_cost_what_the_largest_did_does_not_start_when_that_is_not_left() -> None:
    run = ExecutionContext(ExecutionConfig(1, None, None))
    run.llm(lambda: Reported.of(1, cost_usd=0.60))
    outcome = run.call_llm(lambda: pytest.fail("it ran"))
    assert outcome.call.stop is not None
    assert (outcome.call.stop.reason, outcome.call.stop.asked) == (StopReason.BUDGET_EXCEEDED, 0.60)
    assert run.wrap_llm_call(lambda: None, WrapOptions(cost_estimate_hint=0.40)) is Decision.ALLOW


@pytest.mark.requirement("X-1")
def test_a_strict_run_refuses_calls_without_a_hint_and_takes_zero_for_one() -> None:
    run = ExecutionContext(settings=RunSettings(strict=True))
    with pytest.raises(Halted) as raised:
        run.tool(lambda: pytest.fail("it ran"))
    assert raised.value.stop_reason is StopReason.PRICE_UNKNOWN
    assert run.tool(lambda: "free", cost_hint_usd=0) == "free"
    assert run.llm(lambda: "hinted", cost_hint_usd=0.01) == "hinted"
    assert (run.balance.attempts, run.balance.steps) == (2, 2)


# Unknown prices.


def unpriced(unknown: Literal["refuse", "assume", "count"], assumed: Price | None = None) -> ExecutionContext:
    prices = PriceBook(unknown=unknown, assumed=assumed, use_genai_prices=False)
    return ExecutionContext(ExecutionConfig(10, None, None), prices=prices)


@pytest.mark.requirement("X-2")
def test_a_model_without_a_price_is_refused_before_it_runs_unless_there_is_a_hint() -> None:
    provider, run = FakeProvider(), unpriced("refuse")
    with pytest.raises(Halted) as raised:
        run.llm(provider.complete, model="fake-1")
    assert raised.value.stop_reason is StopReason.PRICE_UNKNOWN
    assert "fake-1" in raised.value.reason
    assert (provider.invoice.calls, money(run)) == (0, (0, 0, 0))
    run.llm(provider.complete, model="fake-1", cost_hint_usd=0.01)
    assert money(run) == (0.01, 0, 0)
    assert run.tool(lambda: "tools have no model") == "tools have no model"


@pytest.mark.requirement("X-2")
def test_a_model_without_a_price_costs_the_assumed_one() -> None:
    provider, run = (
        FakeProvider(lambda _: Answer(input_tokens=100, output_tokens=50)),
        unpriced("assume", Price(10, 20)),
    )
    run.llm(provider.complete, model="fake-1")
    assert money(run) == (0.002, 0, 0)
    assert "unknown" not in run.explain()


@pytest.mark.requirement("X-2")
def test_unknown_costs_are_counted_and_the_total_is_shown_as_a_lower_bound() -> None:
    provider, run = FakeProvider([Answer(), NoUsage(), Answer()]), unpriced("count")
    run.llm(lambda: Reported.of("known", cost_usd=0.50))
    run.llm(provider.complete)
    assert re.search(r"at least \$0\.50( of .*)?, 1 call unknown\b", run.explain())
    run.llm(provider.complete)
    run.llm(provider.complete, cost_hint_usd=0.25)
    assert run.get_snapshot().unknown_costs == 2
    assert re.search(r"at least \$0\.75( of .*)?, 2 calls unknown\b", run.explain())


# Hooks.


@pytest.mark.requirement("C-8")
@pytest.mark.parametrize("decision", [Decision.HALT, Decision.QUARANTINE, Decision.QUEUE])
def test_a_charge_that_a_hook_refuses_is_counted_and_its_value_withheld(decision: Decision) -> None:
    class Refuse:
        def before_charge(self, ctx: Any, cost_usd: float) -> Verdict:
            assert cost_usd == 0.25
            return Verdict(decision, "too dear")

    run = ExecutionContext(pipeline=ShieldPipeline(budget=Refuse()))
    outcome = run.call_llm(lambda: "value", QUARTER)
    assert (outcome.decision, outcome.value) == (decision, None)
    assert outcome.call.stop is not None
    assert (outcome.call.stop.reason, outcome.call.stop.message) == (StopReason.HOOK_DENIED, "too dear")
    assert money(run) == (0.25, 0, 0)
    assert (run.balance.steps, run.partial_results) == (0, {})
    assert [(event.hook, event.decision) for event in run.get_snapshot().events] == [("Refuse", decision)]
    whole(run)


@pytest.mark.requirement("C-8", "C-4")
@pytest.mark.parametrize("decision", [Decision.DEGRADE, Decision.QUARANTINE, Decision.HALT])
def test_an_aborted_call_is_halted_by_the_run_whatever_a_hook_decides_about_its_charge(decision: Decision) -> None:
    class Says:
        def before_charge(self, ctx: Any, cost_usd: float) -> Decision:
            return decision

    run = ExecutionContext(pipeline=ShieldPipeline(budget=Says()))
    before = run.wrap_tool_call(lambda: None, QUARTER)
    assert before is (Decision.ALLOW if decision is Decision.DEGRADE else decision)
    outcome = run.call_tool(run.abort, QUARTER)
    assert (outcome.decision, outcome.value) == (Decision.HALT, None)
    assert outcome.call.stop is not None
    assert outcome.call.stop.reason is StopReason.ABORTED
    assert [event.hook for event in run.get_snapshot().events] == ["Says", "ExecutionContext", "Says"]


@pytest.mark.requirement("C-8")
@pytest.mark.parametrize(
    ("answer", "decision", "stops"),
    [
        (None, Decision.RETRY, False),
        (Decision.ALLOW, Decision.RETRY, False),
        (Decision.RETRY, Decision.RETRY, False),
        (Decision.DEGRADE, Decision.DEGRADE, False),
        (Decision.HALT, Decision.HALT, True),
        (Decision.QUARANTINE, Decision.QUARANTINE, True),
        (Verdict.deny("give up"), Decision.HALT, True),
        ("nonsense", Decision.HALT, True),
    ],
)
def test_a_hooks_verdict_on_an_error_is_the_decision(answer: Any, decision: Decision, stops: bool) -> None:
    seen: list[BaseException] = []

    class OnError:
        def on_error(self, ctx: Any, err: BaseException) -> Any:
            seen.append(err)
            return answer

    def fails() -> None:
        raise Boom("no")

    run = ExecutionContext(ExecutionConfig(None, None, 10), pipeline=ShieldPipeline(retry=OnError()))
    outcome = run.call_tool(fails, WrapOptions(retry_policy_override=2))
    assert outcome.decision is decision
    assert (outcome.call.stop is not None) == stops
    assert len(seen) == (3 if decision is Decision.RETRY else 1)
    with pytest.raises(Halted if stops else Boom):
        outcome.call.result()
    assert isinstance(outcome.call.error, Boom)


@pytest.mark.requirement("C-8", "C-14")
@pytest.mark.parametrize("slot", ["pre_dispatch", "tool_dispatch", "budget", "retry"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, Exit])
def test_ctrl_c_inside_a_hook_is_raised_and_leaves_nothing_held(slot: str, kind: type[BaseException]) -> None:
    class Interrupted:
        def before_llm_call(self, ctx: Any) -> None:
            raise kind

        before_tool_call = before_llm_call

        def on_error(self, ctx: Any, err: BaseException) -> None:
            raise kind

        def before_charge(self, ctx: Any, cost_usd: float) -> None:
            raise kind

    def work() -> str:
        if slot == "retry":
            raise ConnectionRefusedError
        return "value"

    breaker = CircuitBreaker()
    run = ExecutionContext(pipeline=ShieldPipeline(**{slot: Interrupted()}), breaker=breaker)  # type: ignore[arg-type]
    with pytest.raises(kind):
        (run.wrap_tool_call if slot == "tool_dispatch" else run.wrap_llm_call)(work, QUARTER)
    assert money(run) == (0.25 if slot == "budget" else 0, 0, 0)
    assert run.balance.steps_open == 0
    assert [status for _, status in statuses(run)] == ["error" if slot == "retry" else "aborted"]
    whole(run)


@pytest.mark.requirement("C-5", "C-8")
def test_a_call_that_a_limit_refuses_asks_neither_hooks_nor_breaker() -> None:
    called: list[str] = []

    class Noted:
        def before_llm_call(self, ctx: Any) -> None:
            called.append("hook")

        def before_charge(self, ctx: Any, cost_usd: float) -> None:
            called.append("charge")

    clock = ManualClock()
    breaker = CircuitBreaker(1, 1.0, clock=clock)
    breaker.record_failure()
    clock.advance(2)
    hooks = ShieldPipeline(pre_dispatch=Noted(), budget=Noted())
    run = ExecutionContext(ExecutionConfig(0.10, None, None), pipeline=hooks, breaker=breaker)
    assert run.wrap_llm_call(lambda: None, QUARTER) is Decision.HALT
    assert (called, breaker.snapshot().probes_out) == ([], 0)


@pytest.mark.requirement("C-8", "C-10")
def test_a_call_that_a_hook_refuses_takes_no_probe() -> None:
    class Deny:
        def before_tool_call(self, ctx: Any) -> Decision:
            return Decision.HALT

    with half_open() as breaker:
        run = ExecutionContext(pipeline=ShieldPipeline(tool_dispatch=Deny()), breaker=breaker)
        assert run.wrap_tool_call(lambda: None) is Decision.HALT
        assert run.balance.attempts == 0


@pytest.mark.requirement("C-8")
def test_a_call_in_degraded_form_is_one_also_when_it_is_tried_again() -> None:
    class Cheaper:
        def before_tool_call(self, ctx: Any) -> Verdict:
            return Verdict.degrade(reason="over the soft limit")

    ran: list[str] = []

    def cheap() -> str:
        ran.append("cheap")
        if len(ran) == 1:
            raise Boom
        return "short"

    run = ExecutionContext(pipeline=ShieldPipeline(tool_dispatch=Cheaper()))
    options = WrapOptions(retry_policy_override=1, degraded=cheap)
    outcome = run.call_tool(lambda: ran.append("dear"), options)
    assert (outcome.value, outcome.decision, ran) == ("short", Decision.DEGRADE, ["cheap", "cheap"])


@pytest.mark.requirement("C-15")
def test_hooks_receive_the_owner_and_the_hold_of_a_call() -> None:
    contexts: list[Any] = []

    class Noted:
        def before_tool_call(self, ctx: Any) -> None:
            contexts.append(ctx)

    who = ChainMetadata("req-1", "chain-1", org_id="org", team="team", service="svc", user_id="u", tags={"k": "v"})
    run = ExecutionContext(pipeline=ShieldPipeline(tool_dispatch=Noted()), metadata=who)
    outcome = run.call_tool(lambda: None, QUARTER)
    (ctx,) = contexts
    assert (ctx.request_id, ctx.chain_id, ctx.org_id, ctx.team, ctx.service) == (
        "req-1",
        "chain-1",
        "org",
        "team",
        "svc",
    )
    assert (ctx.user_id, dict(ctx.tags), ctx.tool_name, ctx.kind) == ("u", {"k": "v"}, "ask", "tool")
    assert (ctx.cost_usd, ctx.node_id) == (0.25, outcome.call.node_id)


# The breaker.


@contextmanager
def half_open() -> Iterator[CircuitBreaker]:
    """A breaker with one probe to give; afterwards it must be there again."""
    clock = ManualClock()
    breaker = CircuitBreaker(1, 1.0, clock=clock)
    breaker.record_failure()
    clock.advance(2)
    yield breaker
    assert (breaker.snapshot().state, breaker.snapshot().probes_out) == ("half_open", 0)
    assert ExecutionContext(breaker=breaker).wrap_tool_call(lambda: None) is Decision.ALLOW
    assert breaker.state == "closed"


@pytest.mark.requirement("C-10")
@pytest.mark.parametrize("how", ["abort", "timeout", "cancel", "interrupt"])
async def test_a_probe_that_is_stopped_is_given_back(how: str) -> None:
    with half_open() as breaker:
        run = ExecutionContext(breaker=breaker)

        async def work() -> None:
            if how == "interrupt":
                raise Exit
            await asyncio.Event().wait()

        asking = asyncio.create_task(
            run.awrap_tool_call(work, WrapOptions(timeout_ms=10 if how == "timeout" else None))
        )
        if how == "interrupt":
            with pytest.raises(Exit):
                await asking
            return
        await turns(2)
        assert breaker.snapshot().probes_out == 1
        assert await run.awrap_tool_call(lambda: pytest.fail("a second probe")) is Decision.HALT
        if how == "abort":
            run.abort()
        elif how == "cancel":
            asking.cancel()
        await asyncio.wait([asking])


@pytest.mark.requirement("C-10", "C-4")
@pytest.mark.parametrize("nested", [False, True])
def test_the_permit_of_an_abandoned_probe_is_given_back_immediately(nested: bool) -> None:
    release = threading.Event()
    with half_open() as breaker:
        probing = ExecutionContext(breaker=breaker)
        outer = ExecutionContext(breaker=breaker) if not nested else probing

        def work() -> None:
            release.wait(PATIENCE_S)

        assert outer.wrap_tool_call(work, WrapOptions(timeout_ms=10)) is Decision.HALT
    release.set()


@pytest.mark.requirement("C-10")
def test_a_halt_inside_a_probe_is_not_counted_for_the_provider() -> None:
    with half_open() as breaker:
        guarded, limited = ExecutionContext(breaker=breaker), ExecutionContext(ExecutionConfig(None, 0, None))
        assert guarded.wrap_tool_call(lambda: limited.tool(lambda: None)) is Decision.HALT


@pytest.mark.requirement("C-10", "C-11")
def test_an_open_circuit_refuses_calls_and_failed_calls_open_it() -> None:
    clock = ManualClock()
    breaker = CircuitBreaker(3, 10.0, clock=clock)
    run = ExecutionContext(breaker=breaker)

    def fails() -> None:
        raise Boom

    assert [run.wrap_tool_call(fails) for _ in range(4)] == [Decision.RETRY] * 3 + [Decision.HALT]
    assert run.get_snapshot().events[-1].event_type == "circuit_open"
    clock.advance(10)
    assert run.wrap_tool_call(lambda: None) is Decision.ALLOW
    assert breaker.state == "closed"


# Calls inside calls.


@pytest.mark.requirement("C-3")
@pytest.mark.parametrize("wrapped", ["bare", "in a task group"])
async def test_a_refusal_inside_a_call_halts_the_calls_around_it_and_draws_no_retry(wrapped: str) -> None:
    run, tried = ExecutionContext(ExecutionConfig(None, 3, 10)), list[int]()

    async def inner() -> None:
        for _ in range(5):
            await run.atool(lambda: asyncio.sleep(0), name="leaf")

    async def middle() -> None:
        tried.append(1)
        if wrapped == "in a task group":
            async with asyncio.TaskGroup() as group:
                group.create_task(inner())
        else:
            await inner()

    async def outer() -> None:
        await run.atool(middle, name="middle", retries=3, cost_hint_usd=0.01)

    outcome = await run.acall_tool(outer, WrapOptions("outer", retry_policy_override=3))
    assert outcome.decision is Decision.HALT
    assert outcome.call.stop is not None
    assert outcome.call.stop.reason is StopReason.STEP_LIMIT_EXCEEDED
    assert (run.balance.retries, len(tried)) == (0, 1)
    assert [status for name, status in statuses(run) if name in ("outer", "middle")] == ["halted", "halted"]
    with pytest.raises(BudgetExceededError) as raised:
        outcome.call.result()
    assert raised.value.owner == "main"
    whole(run)


@pytest.mark.requirement("G-10")
def test_a_call_of_another_run_inside_a_call_is_not_its_child() -> None:
    one, other = ExecutionContext(name="one"), ExecutionContext(name="other")

    def inner() -> None:
        one.tool(lambda: None, name="one again")

    one.tool(lambda: other.tool(inner, name="of the other"), name="of the one")
    assert parents(one) == {"of the one": "one", "one again": "one"}
    assert parents(other) == {"of the other": "other"}
    assert (one.balance.steps, other.balance.steps) == (2, 1)
    whole(one)
    whole(other)


@pytest.mark.requirement("P-B4")
def test_runs_that_share_a_ledger_share_its_ceiling_and_not_their_trees() -> None:
    shared = Ledger("shared", Budget(max_cost_dollars=0.60).limits())
    one, other = ExecutionContext(ledger=shared), ExecutionContext(ledger=shared)
    assert one.wrap_llm_call(lambda: None, QUARTER) is Decision.ALLOW
    assert other.wrap_llm_call(lambda: None, QUARTER) is Decision.ALLOW
    assert other.wrap_llm_call(lambda: pytest.fail("it ran"), QUARTER) is Decision.HALT
    assert [len(run.get_snapshot().nodes) for run in (one, other)] == [1, 2]


@pytest.mark.requirement("G-10")
@pytest.mark.parametrize("mode", ["inline", "async"])
def test_calls_may_be_two_hundred_deep(mode: str) -> None:
    run = ExecutionContext(settings=RunSettings(sync_calls="inline"))

    def nest(depth: int) -> int:
        return 0 if depth == 0 else 1 + run.tool(nest, depth - 1)

    async def anest(depth: int) -> int:
        return 0 if depth == 0 else 1 + await run.atool(anest, depth - 1)

    assert (run.tool(nest, 200) if mode == "inline" else asyncio.run(run.atool(anest, 200))) == 200
    assert run.graph.aggregates["max_depth"] == 201
    whole(run)


@pytest.mark.requirement("C-4")
def test_an_abort_two_hundred_calls_deep_ends_them_all_children_first() -> None:
    async def main(loop: SimLoop) -> None:
        run = ExecutionContext(clock=loop.clock)

        async def nest(depth: int) -> None:
            if depth == 0:
                await asyncio.sleep(3600)
            else:
                await run.atool(nest, depth - 1)

        asking = asyncio.ensure_future(run.acall_tool(lambda: nest(200)))
        await asyncio.sleep(1)
        run.abort("enough")
        assert (await asking).decision is Decision.HALT
        assert loop.time() == 1
        assert {status for _, status in statuses(run)} == {"aborted"}
        whole(run)

    simulated(main)


@pytest.mark.requirement("G-10")
async def test_a_task_that_outlives_the_call_that_started_it_makes_its_calls_under_what_is_still_open() -> None:
    run, started = ExecutionContext(), list[asyncio.Task[Any]]()

    async def later() -> str:
        await turns()
        return await run.atool(lambda: asyncio.sleep(0, "later"), name="later")  # type: ignore[no-any-return]

    async def starts_and_leaves() -> None:
        started.append(asyncio.create_task(later()))

    await run.atool(starts_and_leaves, name="starter", timeout_s=60)
    assert await started[0] == "later"
    assert parents(run) == {"starter": "main", "later": "main"}
    whole(run)


def test_an_attempt_in_a_child_that_was_completed_meanwhile_does_not_start_and_is_recorded_where_it_can_be() -> None:
    run, tried = ExecutionContext(), list[int]()
    child = run.spawn_child("child")

    def fails() -> None:
        tried.append(1)
        run.complete_child(child)
        raise Boom

    assert child.wrap_tool_call(fails, WrapOptions("ask", retry_policy_override=3)) is Decision.HALT
    assert len(tried) == 1
    whole(run)


@pytest.mark.requirement("C-7")
def test_a_thread_that_outlives_the_call_that_started_it_is_not_bound_by_the_timeout_of_that_call() -> None:
    clock = ManualClock()
    run, passed, values = ExecutionContext(clock=clock), threading.Event(), list[Any]()

    def later() -> None:
        passed.wait(PATIENCE_S)
        values.append(run.tool(lambda: "later", name="later"))

    thread = threading.Thread(target=lambda: None)

    def starts_and_leaves() -> None:
        nonlocal thread
        thread = threading.Thread(target=contextvars.copy_context().run, args=(later,))
        thread.start()

    run.tool(starts_and_leaves, name="starter", timeout_s=5)
    clock.advance(10)
    passed.set()
    thread.join(PATIENCE_S)
    assert values == ["later"]
    assert parents(run) == {"starter": "main", "later": "main"}
    whole(run)


# Odd functions.


@pytest.mark.parametrize("way", ["call_tool", "acall_tool"])
def test_an_error_that_cannot_be_shown_is_recorded_all_the_same(way: str) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

        __repr__ = __str__

    def fails() -> None:
        raise Mute

    run = ExecutionContext(ExecutionConfig(None, None, 1))
    for decision in (Decision.RETRY, Decision.HALT):
        pending = getattr(run, way)(fails)
        outcome = asyncio.run(pending) if asyncio.iscoroutine(pending) else pending
        assert outcome.decision is decision
    assert first_call(run)["error_class"] == "Mute"
    assert "__str__ raised RuntimeError" in run.explain()
    whole(run)


def test_a_message_of_any_length_is_kept_short() -> None:
    def fails() -> None:
        raise Boom("x" * 1_000_000)

    run = ExecutionContext()
    run.wrap_tool_call(fails)
    assert len(first_call(run)["stop_reason"]) == 500


@pytest.mark.parametrize("mode", ["inline", "thread"])
def test_a_generator_runs_inside_its_call_and_its_value_is_the_list_of_its_pieces(mode: Any) -> None:
    run, inside = ExecutionContext(settings=RunSettings(sync_calls=mode)), list[str]()

    def generate() -> Iterator[int]:
        call = running_call.get()
        assert call is not None
        inside.append(call.record.name)
        yield 1
        yield run.tool(lambda: 2, name="below")

    assert run.tool(generate) == [1, 2]
    assert inside == ["generate"]
    assert run.partial_results == {"below": 2, "generate": [1, 2]}


async def test_a_generator_of_an_awaited_call_is_drained_too() -> None:
    run = ExecutionContext()

    async def count() -> Any:
        yield 1
        await asyncio.sleep(0)
        yield 2

    assert await run.atool(count) == [1, 2]
    assert await run.atool(lambda: (number for number in (3, 4))) == [3, 4]


@pytest.mark.parametrize("mode", ["inline", "thread"])
def test_an_async_generator_in_a_sync_call_is_refused(mode: Any) -> None:
    async def count() -> Any:
        yield 1

    run = ExecutionContext(settings=RunSettings(sync_calls=mode))
    with pytest.raises(InvalidValue, match="atool"):
        run.tool(count)
    assert run.wrap_tool_call(lambda: None) is Decision.ALLOW


def test_a_generator_that_is_closed_in_the_middle_of_a_call_ends_the_call() -> None:
    run = ExecutionContext()

    def steps() -> Iterator[int]:
        def inner() -> None:
            raise GeneratorExit

        yield 1
        run.tool(inner, name="closing")

    running = steps()
    next(running)
    with pytest.raises((GeneratorExit, StopIteration)):
        next(running)
    assert statuses(run) == [("closing", "aborted")]


async def test_a_call_inside_an_async_generator_that_is_closed_early_is_over() -> None:
    run = ExecutionContext()

    async def answers() -> Any:
        for number in range(10):
            yield await run.atool(lambda number=number: asyncio.sleep(0, number), name=f"step {number}")

    stream = answers()
    assert [await anext(stream) for _ in range(2)] == [0, 1]
    await stream.aclose()
    assert statuses(run) == [("step 0", "ok"), ("step 1", "ok")]
    assert running_call.get() is None
    whole(run)


@pytest.mark.parametrize("mode", ["inline", "thread"])
def test_a_sync_call_leaves_the_context_variables_of_its_caller_alone(mode: Any) -> None:
    run = ExecutionContext(settings=RunSettings(sync_calls=mode))
    who: contextvars.ContextVar[str] = contextvars.ContextVar("who")
    who.set("caller")
    assert run.tool(who.get) == "caller"
    assert running_call.get() is None


@pytest.mark.requirement("G-12")
def test_a_call_that_completes_a_runaway_shape_is_refused_if_the_detector_halts() -> None:
    run = ExecutionContext(divergence=DivergenceDetector(repeats=3, halts=True))
    for _ in range(2):
        run.tool(str.upper, "same", name="fetch")
    with pytest.raises(Halted) as raised:
        run.tool(str.upper, "same", name="fetch", cost_hint_usd=0.25)
    assert raised.value.stop_reason is StopReason.DIVERGED
    assert money(run) == (0, 0, 0)


# The run ends while calls are open.


def open_calls(run: ExecutionContext) -> int:
    return sum(node.end_ts is None for node in run.get_snapshot().nodes)


def after_the_end(run: ExecutionContext, held: float) -> None:
    """What holds at once when a run ends with calls under way that hold so much."""
    figures = run.balance
    assert (figures.held_nanos, figures.steps_open) == (0, 0)
    assert figures.unresolved_usd == held
    assert open_calls(run) == 0
    ended = [event for event in run.history() if event.kind == "call_ended" and event.abandoned]  # type: ignore[attr-defined]
    assert {event.status for event in ended} == {"halt"}  # type: ignore[attr-defined]
    assert all(event.stop_reason.startswith("aborted") for event in ended)  # type: ignore[attr-defined]
    assert check_history(run.history(), ledger=figures) == []
    with pytest.raises(RunEnded):
        run.wrap_tool_call(lambda: pytest.fail("it ran"))


@pytest.mark.requirement("C-4", "C-12", "X-1")
async def test_a_run_that_ends_while_a_task_is_inside_a_call_leaves_it_unresolved_and_stops_it() -> None:
    run = ExecutionContext()
    asking = asyncio.create_task(run.acall_llm(asyncio.Event().wait, QUARTER))
    await turns()
    run.end()
    after_the_end(run, 0.25)
    last = run.history()[-1]
    assert last.kind == "run_ended"
    outcome = await asyncio.wait_for(asking, PATIENCE_S)
    assert (outcome.decision, outcome.value, asking.cancelling()) == (Decision.HALT, None, 0)
    assert money(run) == (0, 0, 0.25)
    assert run.history()[-1] == last


@pytest.mark.requirement("C-4", "X-1")
async def test_a_task_that_swallows_the_end_of_its_run_settles_in_the_ledger_and_not_in_the_log() -> None:
    run = ExecutionContext()

    async def stubborn() -> Any:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return Reported.of("late", cost_usd=0.10)

    asking = asyncio.create_task(run.acall_llm(stubborn, QUARTER))
    await turns()
    run.end()
    after_the_end(run, 0.25)
    history = run.history()
    outcome = await asyncio.wait_for(asking, PATIENCE_S)
    assert (outcome.decision, outcome.value) == (Decision.HALT, None)
    assert money(run) == (0.10, 0, 0)
    assert run.history() == history


@pytest.mark.requirement("C-4", "X-1")
@pytest.mark.parametrize("mode", ["inline", "thread"])
@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_a_run_that_ends_while_another_thread_is_inside_a_call_leaves_it_unresolved_until_the_bill_comes(
    mode: Any, fails: bool
) -> None:
    run = ExecutionContext(settings=RunSettings(sync_calls=mode))
    under_way, release, outcomes = threading.Event(), threading.Event(), list[Any]()

    def slow() -> Any:
        under_way.set()
        release.wait(PATIENCE_S)
        if fails:
            raise Billed
        return Reported.of("late", cost_usd=0.04)

    thread = threading.Thread(target=lambda: outcomes.append(run.call_llm(slow, QUARTER)))
    thread.start()
    assert under_way.wait(PATIENCE_S)
    run.end()
    after_the_end(run, 0.25)
    history = run.history()
    if mode == "thread":
        thread.join(PATIENCE_S)  # the end of the run frees the caller while the function goes on
        assert not thread.is_alive()
    release.set()
    thread.join(PATIENCE_S)
    until(lambda: money(run) == (0.04, 0, 0))
    outcome = outcomes[0]
    assert (outcome.decision, outcome.value) == (Decision.HALT, None)
    assert outcome.call.stop is not None
    assert (outcome.call.stop.reason, run.balance.retries) == (StopReason.ABORTED, 0)
    assert run.history() == history


@pytest.mark.requirement("C-4", "X-1")
@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_the_bill_of_a_call_whose_caller_has_left_is_added_to_its_node_in_the_tree(fails: bool) -> None:
    run, release = ExecutionContext(), threading.Event()

    def slow() -> Any:
        release.wait(PATIENCE_S)
        if fails:
            raise Billed
        return Reported.of("late", cost_usd=0.04, input_tokens=100, output_tokens=50)

    outcome = run.call_llm(slow, WrapOptions(operation_name="ask", cost_estimate_hint=0.25, timeout_ms=50))
    assert (outcome.decision, outcome.call.cost_usd) == (Decision.HALT, 0)
    release.set()
    until(lambda: money(run) == (0.04, 0, 0))
    node = first_call(run)
    assert (node["status"], node["cost_usd"], node["tokens_in"], node["tokens_out"]) == ("halt", 0.04, 100, 50)
    whole(run)


@pytest.mark.requirement("C-4", "G-10")
async def test_open_calls_end_with_the_run_newest_first_children_before_parents() -> None:
    run = ExecutionContext()

    async def nested() -> None:
        with run.spawn_child("child") as child:
            await child.atool(lambda: child.atool(asyncio.Event().wait, name="innermost"), name="inner")

    first = asyncio.create_task(run.acall_tool(nested, WrapOptions("outer")))
    await turns()
    second = asyncio.create_task(run.acall_tool(asyncio.Event().wait, WrapOptions("beside")))
    await turns()
    run.end()
    ends = [event for event in run.history() if event.kind == "call_ended"]
    assert [event.name for event in ends] == ["beside", "innermost", "inner", "child", "outer", "main"]  # type: ignore[attr-defined]
    assert [event.abandoned for event in ends] == [True] * 5 + [False]  # type: ignore[attr-defined]
    assert run.history()[-1].kind == "run_ended"
    await asyncio.wait([first, second])
    assert check_history(run.history(), ledger=run.balance) == []


@pytest.mark.requirement("C-4", "T-4")
async def test_a_child_that_ends_while_its_calls_are_open_ends_those_and_no_others() -> None:
    run = ExecutionContext()
    child = run.spawn_child("child")
    inside = asyncio.create_task(child.acall_tool(asyncio.Event().wait, QUARTER))
    beside = asyncio.create_task(run.acall_tool(asyncio.Event().wait, WrapOptions("beside", 0.50)))
    await turns()
    run.complete_child(child)
    assert money(run) == (0, 0.50, 0.25)
    assert (await asyncio.wait_for(inside, PATIENCE_S)).decision is Decision.HALT
    assert not beside.done()
    run.end()
    assert (await asyncio.wait_for(beside, PATIENCE_S)).decision is Decision.HALT
    assert check_history(run.history(), ledger=run.balance) == []


@pytest.mark.requirement("C-14", "C-4")
async def test_leaving_a_run_aborts_open_work_only() -> None:
    with contain() as run:
        run.tool(lambda: None)
    assert (run.termination_reason, run.get_snapshot().aborted, run.cancellation.is_cancelled) == (
        "success",
        False,
        False,
    )
    with contain() as run:
        asking = asyncio.create_task(run.acall_tool(asyncio.Event().wait))
        await turns()
    assert (run.termination_reason, run.get_snapshot().aborted) == ("success", False)
    assert run.cancellation.cause == "shutdown"
    assert (await asyncio.wait_for(asking, PATIENCE_S)).decision is Decision.HALT


@pytest.mark.requirement("C-4")
def test_in_any_order_a_run_that_ends_while_calls_start_and_finish_has_a_consistent_log() -> None:
    async def schedule(seed: int) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        provider = FakeProvider(
            lambda n: (Answer(latency_s=0.01 * (n % 4)), FailAfterBilling(), ServerError(500), RefuseFree())[n % 4],
            output_usd_per_mtok=5_000,
            input_usd_per_mtok=0,
        )
        prices = PriceBook(registered={"fake-1": Price(0, 5_000)}, use_genai_prices=False)
        run = ExecutionContext(ExecutionConfig(2, None, None), prices=prices, clock=loop.clock)

        async def work() -> None:
            await run.acall_llm(provider.acomplete, QUARTER)
            await run.acall_tool(lambda: run.acall_llm(provider.acomplete, QUARTER), WrapOptions("outer"))

        asking = [asyncio.ensure_future(work()) for _ in range(4)]
        await asyncio.sleep(0.01 * (seed % 5))
        run.end()
        seq = run.history()[-1].seq
        results = await asyncio.gather(*asking, return_exceptions=True)
        assert all(result is None or isinstance(result, RunEnded) for result in results), results
        assert run.history()[-1].seq == seq
        figures = run.balance
        assert check_history(run.history(), ledger=figures, invoice=provider.invoice, ceiling_nanos=2_000_000_000) == []

    explore(schedule, schedules=100)


def test_a_value_whose_attributes_raise_is_paid_all_the_same() -> None:
    class Breaking(dict[str, Any]):
        def __getattr__(self, name: str) -> Any:
            return self[name]

    response = Breaking(model="gpt-4o", usage={"prompt_tokens": 1_000, "completion_tokens": 500})
    with contain(max_cost_usd=1) as run:
        assert run.llm(lambda: response) is response
        assert run.balance.spent_nanos > 0
