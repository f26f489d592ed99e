"""A worker finishes its job, whether or not a caller still waits for it, and is then used again."""

from __future__ import annotations

import contextvars
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from penstock import (
    CircuitBreaker,
    Decision,
    ExecutionConfig,
    ExecutionContext,
    Halted,
    Reported,
    RunSettings,
    StopReason,
    WrapOptions,
    contain,
)
from penstock.runtime import worker
from penstock.runtime.worker import Job, busy_workers, start
from penstock.testing import check_history

PATIENCE_S = 30.0
"""Far more than anything here takes: only a failing test waits for it."""


class Billed(Exception):
    cost_usd = 0.10


class Late:
    """Takes what comes after the caller has left."""

    def __init__(self) -> None:
        self.results: list[tuple[Any, BaseException | None]] = []
        self.arrived = threading.Event()

    def __call__(self, value: Any, error: BaseException | None) -> None:
        self.results.append((value, error))
        self.arrived.set()


def until(holds: Callable[[], object]) -> None:
    tick = threading.Event()
    for _ in range(3_000):
        if holds():
            return
        tick.wait(0.01)
    raise AssertionError("it never came to hold")


def started(fn: Callable[[], Any], late: Late | None = None) -> Job:
    job = Job(fn, late or Late())
    start(job)
    return job


@contextmanager
def no_new_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine that has no thread left to give."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        patched.setattr(worker, "_idle", [])
        yield


# One job.


def test_the_caller_gets_the_value() -> None:
    late = Late()
    job = started(lambda: 42, late)
    assert job.wait(PATIENCE_S)
    assert (job.value, job.error, job.abandoned, late.results) == (42, None, False, [])


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_the_caller_gets_what_was_raised_whatever_it_is(kind: type[BaseException]) -> None:
    def fails() -> None:
        raise kind("no")

    job = started(fails)
    assert job.wait(PATIENCE_S)
    assert type(job.error) is kind


def test_waiting_without_a_limit_lasts_until_the_function_is_done() -> None:
    release = threading.Event()
    job = started(lambda: release.wait(PATIENCE_S))
    release.set()
    assert job.wait(None)
    assert job.value is True


def test_a_wait_longer_than_the_maximum_lock_timeout_is_allowed() -> None:
    job = started(lambda: "done")
    assert job.wait(threading.TIMEOUT_MAX * 10)


@pytest.mark.requirement("C-4")
@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_a_result_after_the_caller_has_left_is_reported_once(fails: bool) -> None:
    late, release, error = Late(), threading.Event(), ValueError("late")

    def slow() -> str:
        release.wait(PATIENCE_S)
        if fails:
            raise error
        return "late"

    job = started(slow, late)
    assert not job.wait(0.001)
    assert (job.abandoned, late.results) == (True, [])
    release.set()
    assert late.arrived.wait(PATIENCE_S)
    assert late.results == [(None, error) if fails else ("late", None)]


def test_a_waiting_caller_may_be_woken_from_any_thread_any_number_of_times() -> None:
    release = threading.Event()
    job = started(lambda: release.wait(PATIENCE_S))
    for _ in range(3):
        job.wake()
    assert not job.wait(None)
    release.set()


def test_leaving_after_the_end_abandons_nothing() -> None:
    job = started(lambda: "done")
    assert job.wait(PATIENCE_S)
    assert not job.leave()
    assert not job.abandoned


def test_a_job_is_finished_or_abandoned_and_never_both() -> None:
    for _ in range(300):
        late, go = Late(), threading.Event()
        job = started(lambda go=go: go.wait(PATIENCE_S), late)  # type: ignore[misc]
        go.set()
        finished = job.wait(0.00001)
        until(lambda finished=finished, late=late: finished or late.results)  # type: ignore[misc]
        assert len(late.results) == (0 if finished else 1)


# The threads behind.


def test_a_worker_is_used_again_also_after_it_was_left_behind() -> None:
    names: list[str] = []

    def note() -> None:
        names.append(threading.current_thread().name)

    for _ in range(20):
        assert started(note).wait(PATIENCE_S)
        until(lambda: busy_workers() == 0)
    late, release = Late(), threading.Event()

    def note_and_wait() -> None:
        note()
        release.wait(PATIENCE_S)

    left = started(note_and_wait, late)
    assert not left.wait(0.001)
    release.set()
    assert late.arrived.wait(PATIENCE_S)
    until(lambda: busy_workers() == 0)
    assert started(note).wait(PATIENCE_S)
    assert len(set(names)) == 1
    assert names[0].startswith("penstock-worker-")


def test_a_worker_is_busy_until_its_function_is_done_left_behind_or_not() -> None:
    base, release = busy_workers(), threading.Event()
    jobs = [started(lambda: release.wait(PATIENCE_S)) for _ in range(3)]
    assert busy_workers() == base + 3
    assert not jobs[0].wait(0.001)
    assert busy_workers() == base + 3
    release.set()
    until(lambda: busy_workers() == base)


def test_workers_are_daemons_so_that_a_function_that_never_returns_ends_with_the_program() -> None:
    job = started(lambda: threading.current_thread().daemon)
    assert job.wait(PATIENCE_S)
    assert job.value is True


def test_a_worker_without_work_ends_after_a_while_and_jobs_given_at_that_moment_are_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "IDLE_SECONDS", 0.0005)
    tick = threading.Event()
    for number in range(200):
        assert started(lambda: None).wait(PATIENCE_S)
        tick.wait(0.0001 * (number % 10))
    until(lambda: not worker._idle)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_whose_late_report_fails_is_not_busy_for_ever() -> None:
    base, release = busy_workers(), threading.Event()

    def report(value: Any, error: BaseException | None) -> None:
        raise RuntimeError("the receiver is gone")

    job = Job(lambda: release.wait(PATIENCE_S), report)
    start(job)
    assert not job.wait(0.001)
    release.set()
    until(lambda: busy_workers() == base)
    assert started(lambda: "others work").wait(PATIENCE_S)


def test_two_hundred_at_the_same_time_all_run_at_the_same_time() -> None:
    together = threading.Barrier(200)
    jobs = [started(lambda: together.wait(PATIENCE_S)) for _ in range(200)]
    assert all(job.wait(PATIENCE_S) for job in jobs)
    assert sorted(job.value for job in jobs) == list(range(200))


def test_context_variables_of_the_caller_are_seen_and_not_changed() -> None:
    who: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="none")
    who.set("caller")

    def look_and_change() -> str:
        seen = who.get()
        who.set("worker")
        return seen

    job = started(look_and_change)
    assert job.wait(PATIENCE_S)
    assert (job.value, who.get()) == ("caller", "caller")
    again = started(who.get)
    assert again.wait(PATIENCE_S)
    assert again.value == "caller"


def test_a_forked_child_has_workers_of_its_own() -> None:
    script = """
import os, threading
from penstock import ExecutionContext, RunSettings
from penstock.runtime.worker import busy_workers

release = threading.Event()
run = ExecutionContext(settings=RunSettings(sync_calls="thread"))
assert run.tool(lambda: "warm") == "warm"
run.call_tool(lambda: release.wait(30), __import__("penstock").WrapOptions(timeout_ms=1))
assert busy_workers() == 1
child = os.fork()
if child == 0:
    assert busy_workers() == 0
    forked = ExecutionContext(settings=RunSettings(sync_calls="thread"))
    ok = [forked.tool(lambda: n * 2) for n in range(5)] == [0, 2, 4, 6, 8]
    os._exit(0 if ok else 1)
_, status = os.waitpid(child, 0)
release.set()
assert status == 0, status
assert run.tool(lambda: "still here") == "still here"
"""
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# Behind the door.


@pytest.mark.requirement("C-4")
def test_nested_calls_under_a_deadline_cannot_wait_for_each_other() -> None:
    run = ExecutionContext(ExecutionConfig(None, None, None, timeout_ms=60_000))

    def nest(depth: int) -> int:
        return 0 if depth == 0 else 1 + run.tool(nest, depth - 1, name=f"level {depth}")

    assert run.tool(nest, 50) == 50
    assert run.balance.steps == 51
    run.end()
    assert check_history(run.history(), ledger=run.balance) == []


@pytest.mark.requirement("C-3")
def test_two_hundred_threads_that_call_on_workers_share_the_limits() -> None:
    run = ExecutionContext(ExecutionConfig(None, 100, None), settings=RunSettings(sync_calls="thread"))
    together, decisions = threading.Barrier(200), list[Decision]()

    def ask() -> None:
        together.wait()
        decisions.append(run.wrap_tool_call(lambda: None))

    threads = [threading.Thread(target=ask) for _ in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert (decisions.count(Decision.ALLOW), decisions.count(Decision.HALT)) == (100, 100)
    run.end()
    assert check_history(run.history(), ledger=run.balance) == []


@pytest.mark.requirement("G-10")
def test_a_call_made_on_a_worker_knows_the_call_around_it() -> None:
    run = ExecutionContext(settings=RunSettings(sync_calls="thread"))
    run.tool(lambda: run.tool(lambda: None, name="inner"), name="outer")
    nodes = run.graph.snapshot()["nodes"]
    parent_of = {node["name"]: nodes[node["parent_id"]]["name"] for node in nodes.values() if node["parent_id"]}
    assert parent_of == {"outer": "main", "inner": "outer"}


@pytest.mark.requirement("C-14", "C-4")
@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_ctrl_c_while_waiting_for_a_worker_leaves_the_function_behind_and_settles_it_later(fails: bool) -> None:
    breaker = CircuitBreaker()
    run = ExecutionContext(ExecutionConfig(1, 10, 5), breaker=breaker, settings=RunSettings(sync_calls="thread"))
    release, noticed, struck = threading.Event(), threading.Event(), list[int]()

    def slow() -> Any:
        main = threading.main_thread().ident
        assert main is not None
        while not struck:  # a signal that comes just before a thread goes to sleep does not wake it
            signal.pthread_kill(main, signal.SIGALRM)
            release.wait(0.01)
        noticed.set()
        release.wait(PATIENCE_S)
        if fails:
            raise Billed
        return Reported.of("late", cost_usd=0.10)

    def interrupt(*_: object) -> None:
        struck.append(1)
        if len(struck) == 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            run.tool(slow, cost_hint_usd=0.25)
        assert noticed.wait(PATIENCE_S)
    finally:
        signal.signal(signal.SIGALRM, before)
    (call,) = run.get_snapshot().nodes
    assert call.status == "aborted"
    assert (run.balance.held_usd, run.balance.unresolved_usd) == (0, 0.25)
    release.set()
    until(lambda: run.balance.unresolved_nanos == 0)
    assert (run.balance.spent_usd, run.balance.retries) == (0.10, 0)
    assert run.wrap_tool_call(lambda: None) is Decision.ALLOW
    run.end()
    assert check_history(run.history(), ledger=run.balance) == []


@pytest.mark.requirement("C-14")
def test_ctrl_c_that_comes_when_the_function_is_just_done_loses_no_bill() -> None:
    run = ExecutionContext(settings=RunSettings(sync_calls="thread"))

    def strike(frame: Any, event: str, _: object) -> Any:
        if frame.f_code is not Job.leave.__code__:
            return strike
        until(lambda: busy_workers() == 0)
        raise KeyboardInterrupt

    before = sys.gettrace()
    sys.settrace(strike)
    try:
        with pytest.raises(KeyboardInterrupt):
            run.tool(lambda: None, cost_hint_usd=0.25)
    finally:
        sys.settrace(before)
    figures = run.balance
    assert (figures.held_usd, figures.unresolved_usd, figures.spent_usd) == (0, 0, 0.25)


@pytest.mark.requirement("X-1")
def test_a_call_without_an_available_thread_fails_and_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ExecutionContext(ExecutionConfig(1, 10, 5), settings=RunSettings(sync_calls="thread"))
    with no_new_threads(monkeypatch):
        outcome = run.call_tool(lambda: pytest.fail("it ran"), WrapOptions(cost_estimate_hint=0.5))
        with pytest.raises(RuntimeError, match="can't start new thread"):
            run.tool(lambda: pytest.fail("it ran"), cost_hint_usd=0.5)
    assert outcome.decision is Decision.RETRY
    figures = run.balance
    assert (figures.held_usd, figures.unresolved_usd, figures.spent_usd, figures.steps_open) == (0, 0, 0, 0)
    assert run.tool(lambda: "there are threads again") == "there are threads again"
    assert run.cancellation._callbacks == {}


@pytest.mark.requirement("C-4")
def test_a_late_result_is_recorded_once_after_its_stop() -> None:
    run, release = ExecutionContext(ExecutionConfig(1, 10, 5)), threading.Event()
    with pytest.raises(Halted) as raised:
        run.tool(release.wait, PATIENCE_S, name="slow", cost_hint_usd=0.25, timeout_s=0.01)
    assert raised.value.stop_reason is StopReason.TIMEOUT
    release.set()
    until(lambda: run.balance.spent_usd == 0.25)
    until(lambda: busy_workers() == 0)
    run.end()
    kinds = [event.kind for event in run.history()]
    assert (kinds.count("limit_reached"), kinds.count("call_settled")) == (1, 1)
    assert [event.event_type for event in run.get_snapshot().events] == ["timeout"]


@pytest.mark.requirement("C-3", "C-4")
def test_a_late_failure_draws_no_retry_and_settles_its_reported_cost() -> None:
    run, release = ExecutionContext(ExecutionConfig(1, 10, 5)), threading.Event()

    def slow() -> None:
        release.wait(PATIENCE_S)
        raise Billed

    assert run.wrap_tool_call(slow, WrapOptions(cost_estimate_hint=0.25, timeout_ms=10)) is Decision.HALT
    release.set()
    until(lambda: run.balance.unresolved_nanos == 0)
    assert (run.balance.spent_usd, run.balance.retries) == (0.10, 0)


@pytest.mark.requirement("C-14")
def test_a_signal_that_a_worker_receives_is_handled_while_the_main_thread_waits_for_it() -> None:
    heard = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.set())
    try:
        with contain(sync_calls="thread") as run:

            def raises_a_signal() -> bool:
                signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
                return heard.wait(30)

            assert run.tool(raises_a_signal)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_functions_that_hang_for_ever_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = threading.Event()
    monkeypatch.setitem(worker._limits, "abandoned", 2)
    left = [worker.Job(opened.wait, lambda value, error: None, is_counted=True) for _ in range(2)]
    for job in left:
        worker.start(job)
        assert job.leave()
    assert worker.abandoned_jobs() == 2
    refused = worker.Job(lambda: 1, lambda value, error: None, is_counted=True)
    with pytest.raises(worker.TooManyAbandoned, match="2 functions"):
        worker.start(refused)
    assert not refused.leave()
    own = worker.Job(lambda: 1, lambda value, error: None)
    worker.start(own)  # one of ours, such as a request to the ledger
    assert own.wait(10)
    opened.set()
    while worker.abandoned_jobs():
        threading.Event().wait(0.001)
    worker.start(again := worker.Job(lambda: 1, lambda value, error: None, is_counted=True))
    assert again.wait(10)


def test_a_call_that_is_not_started_because_others_hang_fails_and_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(worker._limits, "abandoned", 0)
    run = ExecutionContext(settings=RunSettings(sync_calls="thread"))
    with pytest.raises(worker.TooManyAbandoned):
        run.tool(lambda: 1)
    assert (run.balance.spent_usd, run.balance.held_usd) == (0, 0)
    run.end()
    assert check_history(run.history(), ledger=run.balance) == []
