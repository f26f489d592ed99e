"""A function in a process of its own: what crosses, what comes back, and that every stop really ends it."""

from __future__ import annotations

import asyncio
import copy
import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from subprocess import DEVNULL, PIPE
from types import ModuleType
from typing import Any

import pytest

from penstock.containment.limits import Budget, BudgetExceededError
from penstock.errors import CancelledError, InvalidValue, StepTimeout
from penstock.flow import isolated_child, isolation
from penstock.flow.graph import Graph
from penstock.flow.isolated_child import NotJSON, to_json
from penstock.flow.isolation import IsolatedError, Process, isolated
from penstock.flow.node import FunctionNode
from penstock.policies import ErrorPolicy
from penstock.runtime.cancellation import CancellationToken
from penstock.runtime.context import ExecutionContext
from penstock.testing import ManualClock
from penstock.tracing.events import CallEnded

WORK = '''
import ctypes, json, os, re, signal, subprocess, sys, threading, time


def echo(ctx):
    return ctx.input


def where(ctx):
    return {"pid": os.getpid(), "argv": sys.argv, "penstock": "penstock" in sys.modules, "stdin": sys.stdin.read()}


def add(ctx):
    ctx.check_cancelled()
    return ctx.upstream["a"] + ctx.upstream["b"] + len(ctx.upstream)


def ask_for_object(ctx):
    return ctx.upstream.get("object")


def names_before(ctx):
    return [sorted(ctx.upstream), "object" in ctx.upstream, "unknown" in ctx.upstream]


def as_json(ctx):
    return [isinstance(ctx.upstream, dict), json.dumps(ctx.upstream)]


def call_a_model(ctx):
    return ctx.llm(print)


def loud(ctx):
    print("printed")
    sys.stderr.write("warned")
    os.write(1, b"raw")
    return "value"


def boom(ctx):
    raise ValueError("no such city")


def leave(ctx):
    sys.exit(3)


def vanish(ctx):
    os._exit(7)


def die(ctx):
    os.kill(os.getpid(), signal.SIGSEGV)


def give(ctx):
    return {
        "object": {"at": [1, object()]}, "keys": {1: "a"}, "nan": [float("nan")], "set": {1}, "circle": CIRCLE,
    }[ctx.input]


CIRCLE = []
CIRCLE.append(CIRCLE)


def bill(ctx):
    return {"text": "done", "model": "m", "usage": {"prompt_tokens": 7, "completion_tokens": 5}}


def tell(ctx):
    """Say which process this is; the line's other end sees the end of everybody who has it open."""
    line = os.open(ctx.input, os.O_WRONLY)
    os.set_inheritable(line, True)
    os.write(line, b"%d\\n" % os.getpid())
    return line


def wait(ctx):
    tell(ctx)
    time.sleep(3600)


def hog(ctx):
    tell(ctx)
    re.match(r"(a+)+$", "a" * 64 + "b")


def family(ctx):
    subprocess.Popen(["sleep", "3600"], close_fds=False)
    wait(ctx)


def leave_family(ctx):
    tell(ctx)
    subprocess.Popen(["sleep", "3600"], close_fds=False)
    threading.Thread(target=time.sleep, args=(3600,)).start()
    return "left"


def orphan(ctx):
    """Die while a process in another session holds all our descriptors open."""
    tell(ctx)
    if os.fork() == 0:
        os.setsid()
        line = os.open(ctx.input + ".orphan", os.O_RDONLY)
        os.read(line, 1)
        os._exit(0)
    os._exit(9)


def close_all(ctx):
    os.closerange(3, 256)
    time.sleep(0.01)
    os._exit(5)


class Tool:
    def method(self, ctx):
        return None

    @staticmethod
    def static(ctx):
        return "static"
'''


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module of functions that a child finds by its name."""
    (tmp_path / "isolated_work.py").write_text(WORK)
    monkeypatch.syspath_prepend(str(tmp_path))
    import isolated_work  # type: ignore[import-not-found]

    yield isolated_work
    del sys.modules["isolated_work"]


@pytest.fixture
def line(tmp_path: Path) -> str:
    """A named pipe: the child writes its number, and the line ends when no process has it open any more."""
    path = tmp_path / "line"
    os.mkfifo(path)
    return str(path)


class Line:
    """The reading end of such a line."""

    def __init__(self, path: str) -> None:
        self._path = path

    async def pid(self) -> int:
        """Wait until the function runs."""
        self._file = await asyncio.to_thread(open, self._path)
        return int(await asyncio.to_thread(self._file.readline))

    async def has_ended(self) -> bool:
        """Wait until everybody who had it open is gone."""
        with self._file:
            return await asyncio.to_thread(self._file.read) == ""


def graph_of(fn: Any, **options: Any) -> Graph:
    graph = Graph("g")
    graph.add_step(FunctionNode("n", fn, isolation="process"), "s", **options)
    return graph


async def value_of(fn: Any, input: Any = None) -> Any:
    return (await graph_of(fn).execute(ExecutionContext(input=input)))["s"]


def end_of(context: ExecutionContext) -> CallEnded:
    (ended,) = [event for event in context.history() if isinstance(event, CallEnded) and event.name == "s"]
    return ended


# What crosses.


@pytest.mark.parametrize("value", [None, 0, "ü\ud800", [1.5, True, {"a": {}}], "x" * 200_000])
async def test_input_and_value_cross_as_they_are(work: Any, value: Any) -> None:
    assert await value_of(work.echo, value) == value


async def test_ten_megabytes_cross_both_ways(work: Any) -> None:
    large = {"text": "x" * 10_000_000, "numbers": list(range(100_000))}
    assert await value_of(work.echo, large) == large


async def test_the_function_runs_elsewhere_without_penstock_or_a_stdin(work: Any) -> None:
    report = await value_of(work.where)
    assert report.pop("pid") != os.getpid()
    assert report == {"argv": sys.argv, "penstock": False, "stdin": ""}


async def test_the_results_before_are_there(work: Any) -> None:
    graph = Graph("g")
    graph.add_step(FunctionNode("n1", lambda ctx: 1), "a")
    graph.add_step(FunctionNode("n2", lambda ctx: 2), "b")
    graph.add_step(FunctionNode("n3", work.add, isolation="process"), "sum", depends_on=["a", "b"])
    graph.add_step(FunctionNode("n4", work.as_json, isolation="process"), "json", depends_on=["sum"])
    results = await graph.execute(ExecutionContext())
    assert results["sum"] == 5
    assert results["json"] == [True, '{"a": 1, "b": 2, "sum": 5}']


async def test_a_result_that_is_not_json_fails_only_when_it_is_read(work: Any) -> None:
    def graph(fn: Any) -> Graph:
        made = Graph("g")
        made.add_step(FunctionNode("maker", lambda ctx: object()), "object")
        made.add_step(FunctionNode("n", fn, isolation="process"), "s", input=1, depends_on=["object"])
        return made

    assert (await graph(work.names_before).execute(ExecutionContext()))["s"] == [["object"], True, False]
    with pytest.raises(IsolatedError, match=r"result of step 'object' did not come along: .*result is a object"):
        await graph(work.ask_for_object).execute(ExecutionContext())
    with pytest.raises(IsolatedError, match="did not come along"):
        await graph(work.as_json).execute(ExecutionContext())


async def test_prints_go_where_the_parents_go_and_do_not_touch_the_value(
    work: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # so that what is printed waits in the child
    assert await value_of(work.loud) == "value"
    out, err = capfd.readouterr()
    assert "printed" in out
    assert "raw" in out
    assert "warned" in err


@pytest.mark.parametrize(
    ("input", "where"),
    [
        ({"when": [datetime(2026, 1, 1, tzinfo=UTC)]}, r"input\['when'\]\[0\] is a datetime"),
        ({"a": {2: "b"}}, r"input\['a'\] has the key 2, which is not text"),
        (float("inf"), "input is inf"),
        ({1, 2}, "input is a set"),
    ],
)
async def test_an_input_that_is_not_json_is_refused_with_its_step_and_place(work: Any, input: Any, where: str) -> None:
    with pytest.raises(InvalidValue, match=f"input of step 's' must be JSON.*{where}"):
        await value_of(work.echo, input)


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ("object", r"value\['at'\]\[1\] is a object"),
        ("keys", "value has the key 1, which is not text"),
        ("nan", r"value\[0\] is nan"),
        ("set", "value is a set"),
        ("circle", "nested more than 500 deep, or contains itself"),
    ],
)
async def test_a_value_that_is_not_json_is_an_error_with_its_step_and_place(work: Any, given: str, where: str) -> None:
    with pytest.raises(IsolatedError, match=f"step 's' .*returned a value that is not JSON: .*{where}"):
        await value_of(work.give, given)


def test_what_is_too_large_does_not_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated_child, "MAX_BYTES", 10)
    with pytest.raises(NotJSON, match="value has 12 bytes of JSON; the maximum is 10"):
        to_json("0123456789", "value")


async def test_usage_in_the_value_is_counted(work: Any) -> None:
    context = ExecutionContext()
    await graph_of(work.bill).execute(context)
    ended = end_of(context)
    assert (ended.input_tokens, ended.output_tokens) == (7, 5)


# Which functions.


def refused(fn: Any) -> str:
    with pytest.raises(InvalidValue, match="fn of node 'n' must be a function at the top level of a module") as info:
        isolated(fn, "n")
    return str(info.value)


def test_only_what_another_process_can_find_is_taken(work: Any) -> None:
    def closure(ctx: Any) -> None: ...

    replaced = work.echo.__class__(work.echo.__code__, {}, "echo")
    replaced.__module__ = "isolated_work"
    homeless = ModuleType("homeless")
    exec("def f(ctx): ...", homeless.__dict__)
    for fn in (lambda ctx: 1, closure, work.Tool().method, functools.partial(work.echo), replaced, homeless.f):
        assert "another process has to find it by its name" in refused(fn)


def test_a_function_of_a_module_that_cannot_be_imported_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    homeless = ModuleType("homeless")
    exec("def f(ctx): ...", homeless.__dict__)
    monkeypatch.setitem(sys.modules, "homeless", homeless)
    refused(homeless.f)


async def test_a_static_method_is_found(work: Any) -> None:
    assert await value_of(work.Tool.static) == "static"


SCRIPT = """
import asyncio, sys
from penstock import ExecutionContext, FunctionNode, Graph

def mine(ctx):
    return [ctx.input, __name__]

def run():
    graph = Graph("g")
    graph.add_step(FunctionNode("n", mine, isolation="process"), "s")
    print(asyncio.run(graph.execute(ExecutionContext(input=1)))["s"])

{guard}run()
"""


def run_python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


def test_a_function_of_the_script_itself_is_found_in_its_file(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(guard="if __name__ == '__main__': "))
    assert run_python("script.py", cwd=tmp_path).stdout == "[1, '__isolated_main__']\n"
    assert run_python("-m", "script", cwd=tmp_path).stdout == "[1, 'script']\n"


def test_a_script_without_a_guard_does_not_make_processes_forever(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(guard=""))
    ended = run_python("script.py", cwd=tmp_path)
    assert ended.returncode == 1
    assert "runs its graphs under `if __name__ == '__main__':`" in ended.stderr


def test_a_function_typed_at_a_prompt_is_refused(tmp_path: Path) -> None:
    ended = run_python("-c", SCRIPT.format(guard=""), cwd=tmp_path)
    assert "must be a function at the top level of a module" in ended.stderr


# What goes wrong inside.


async def test_what_the_function_raises_comes_back_by_name_message_and_traceback(work: Any) -> None:
    with pytest.raises(
        IsolatedError, match=r"step 's' in a process of its own raised ValueError: no such city"
    ) as info:
        await value_of(work.boom)
    error = info.value
    assert (error.step, error.error_class, error.message) == ("s", "ValueError", "no such city")
    assert error.traceback is not None
    assert 'in boom\n    raise ValueError("no such city")' in error.traceback
    assert "isolation.py" not in error.traceback
    assert error.traceback in error.__notes__
    again = copy.copy(error)
    assert (str(again), again.error_class) == (str(error), "ValueError")


@pytest.mark.parametrize(
    ("name", "what", "exit_code", "by"),
    [
        ("vanish", "ended without a value, with exit code 7", 7, None),
        ("die", "was ended by SIGSEGV", -signal.SIGSEGV, signal.SIGSEGV),
        ("close_all", "ended without a value, with exit code 5", 5, None),
    ],
)
async def test_a_process_that_dies_says_how(work: Any, name: str, what: str, exit_code: int, by: int | None) -> None:
    with pytest.raises(IsolatedError, match=what) as info:
        await value_of(getattr(work, name))
    assert (info.value.exit_code, info.value.signal, info.value.error_class) == (exit_code, by, None)


async def test_sys_exit_is_something_it_raised(work: Any) -> None:
    with pytest.raises(IsolatedError, match="raised SystemExit: 3"):
        await value_of(work.leave)


async def test_a_dead_process_is_noticed_although_another_session_has_its_pipe_open(work: Any, line: str) -> None:
    os.mkfifo(line + ".orphan")
    reading = Line(line)
    task = asyncio.create_task(value_of(work.orphan, line))
    await reading.pid()
    with pytest.raises(IsolatedError, match="exit code 9"):
        await task
    await asyncio.to_thread(lambda: open(line + ".orphan", "w").close())
    assert await reading.has_ended()


async def test_what_the_context_does_not_have_there_is_named(work: Any) -> None:
    with pytest.raises(IsolatedError, match=r"ctx\.llm is not available in an isolated step"):
        await value_of(work.call_a_model)


async def test_a_failure_is_tried_again_like_any_other(work: Any) -> None:
    context = ExecutionContext()
    graph = graph_of(work.boom, error_policy=ErrorPolicy(retry_count=1, retry_delay_ms=0, on_error="skip"))
    assert await graph.execute(context) == {"s": None}
    assert [e.error for e in context.history() if isinstance(e, CallEnded) and e.status == "fail"] == [
        "IsolatedError"
    ] * 2


async def test_a_process_that_cannot_be_started_says_so(work: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(IsolatedError, match="could not be started"):
        await value_of(work.echo)


# Every stop ends it.


@pytest.mark.parametrize("name", ["wait", "hog", "family"])
async def test_a_cancel_ends_the_process_and_what_it_has_started(work: Any, line: str, name: str) -> None:
    context, reading = ExecutionContext(input=line), Line(line)
    task = asyncio.create_task(graph_of(getattr(work, name)).execute(context))
    await reading.pid()
    context.abort("enough")
    with pytest.raises(CancelledError) as info:
        await task
    assert info.value.reason == "enough"
    assert await reading.has_ended()
    ended = end_of(context)
    assert (ended.status, ended.abandoned) == ("halt", True)


async def test_the_time_limit_of_an_attempt_ends_the_process(work: Any, line: str) -> None:
    reading, clock = Line(line), ManualClock()
    graph = graph_of(work.wait, error_policy=ErrorPolicy(timeout_ms=60_000))
    task = asyncio.create_task(graph.execute(ExecutionContext(input=line, clock=clock)))
    await reading.pid()
    clock.advance(61)
    with pytest.raises(StepTimeout):
        await task
    assert await reading.has_ended()


async def test_a_deadline_ends_the_process(work: Any, line: str) -> None:
    reading, clock = Line(line), ManualClock()
    context = ExecutionContext(input=line, budget=Budget(max_time_seconds=60), clock=clock)
    task = asyncio.create_task(graph_of(work.wait).execute(context))
    await reading.pid()
    clock.advance(61)
    with pytest.raises(BudgetExceededError):
        await task
    assert await reading.has_ended()


async def test_a_task_that_is_cancelled_from_outside_ends_the_process(work: Any, line: str) -> None:
    reading = Line(line)
    context = ExecutionContext(input=line)
    task = asyncio.create_task(graph_of(work.wait).execute(context))
    await reading.pid()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not context.cancellation.is_cancelled
    assert await reading.has_ended()


async def test_the_end_of_the_function_ends_what_it_has_started(work: Any, line: str) -> None:
    reading = Line(line)
    task = asyncio.create_task(value_of(work.leave_family, line))
    await reading.pid()
    assert await task == "left"
    assert await reading.has_ended()


def test_a_cancel_before_there_is_a_process_starts_none(work: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    context = ExecutionContext()
    run = isolated(work.wait, "n")
    monkeypatch.setattr(subprocess, "Popen", None)
    context.abort("early")
    with pytest.raises(CancelledError, match="early"):
        run(context)


def test_a_kill_before_there_is_a_process_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    process = Process("s")
    process.kill()
    assert process.ask(b"", lambda: False) is None


def test_the_token_keeps_nothing_of_a_call_that_is_over(work: Any) -> None:
    token = CancellationToken()
    context = ExecutionContext(cancellation=token)
    before = len(context.cancellation._callbacks)
    isolated(work.echo, "n")(context)
    assert len(context.cancellation._callbacks) == before


def test_a_cancel_while_the_process_is_being_started_is_not_lost(work: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    token, popen = CancellationToken(), subprocess.Popen

    def cancelled_meanwhile(*args: Any, **options: Any) -> Any:
        started = popen(*args, **options)
        token.cancel("meanwhile")
        return started

    monkeypatch.setattr(subprocess, "Popen", cancelled_meanwhile)
    run = isolated(work.where, "n")
    with pytest.raises(CancelledError, match="meanwhile"):
        run(ExecutionContext(cancellation=token))


def test_a_deadline_is_noticed_where_no_loop_has_a_timer(work: Any, line: str) -> None:
    clock = ManualClock()
    context = ExecutionContext(input=line, budget=Budget(max_time_seconds=60), clock=clock)

    def let_time_pass() -> None:
        with open(line) as reading:
            reading.readline()
            clock.advance(61)
            reading.read()

    reader = threading.Thread(target=let_time_pass)
    reader.start()
    with pytest.raises(CancelledError):
        isolated(work.wait, "n")(context)
    reader.join()


def test_nothing_is_killed_once_the_process_is_reaped(work: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Process] = []

    class Kept(Process):
        def __init__(self, step: str) -> None:
            super().__init__(step)
            made.append(self)

    monkeypatch.setattr(isolation, "Process", Kept)
    assert isolated(work.echo, "n")(ExecutionContext(input=1)) == 1
    monkeypatch.setattr(os, "killpg", None)
    made[0].kill()


PARENT = """
import asyncio, sys
import isolated_work
from penstock import ExecutionContext, FunctionNode, Graph

async def main():
    graph = Graph("g")
    graph.add_step(FunctionNode("n", getattr(isolated_work, sys.argv[1]), isolation="process"), "s")
    task = asyncio.create_task(graph.execute(ExecutionContext(input=sys.argv[2])))
    await asyncio.to_thread(sys.stdin.read)
    sys.exit(0)

asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["exits", "is killed"])
@pytest.mark.parametrize("name", ["wait", "hog", "family"])
async def test_the_process_does_not_outlive_its_parent(
    work: Any, line: str, tmp_path: Path, name: str, how: str
) -> None:
    reading = Line(line)
    command = [sys.executable, "-c", PARENT, name, line]
    parent = await asyncio.create_subprocess_exec(*command, cwd=tmp_path, stdin=PIPE, stderr=DEVNULL)
    await reading.pid()
    parent.kill() if how == "is killed" else parent.stdin.close()
    await parent.wait()
    assert await reading.has_ended()
