"""How every test is run: async ones on a fresh loop, each under a census, requirement marks checked both ways.

While an async test runs, a call of ours that would block its event loop raises `blockbuster.BlockingError`.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from blockbuster import blockbuster_ctx
from hypothesis import HealthCheck, settings

import penstock.kernel.schema  # noqa: F401  # reads files while it is loaded, which no test is to do on its event loop
from penstock.testing import census
from tests import requirements

pytest.register_assert_rewrite("penstock.testing.contracts")

# How long an example takes is the machine's affair, and that of whatever else it does: no test is about it.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

MARKED = pytest.StashKey[set[str]]()
PROOFS = pytest.StashKey["Proofs"]()
DESELECTED = pytest.StashKey[bool]()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No task, thread, descriptor or child process outlives the test that started it."""
    with census():
        yield


@pytest.fixture(autouse=True, scope="module")
def what_stays_set_apart() -> None:
    """No test's garbage is looked for among the half a million objects that are there for good."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an `async def` test, also one under hypothesis, each example on a loop of its own."""
    test = pyfuncitem.obj
    handle = getattr(test, "hypothesis", None)
    if handle is not None and inspect.iscoroutinefunction(handle.inner_test):
        handle.inner_test = _on_a_fresh_loop(handle.inner_test)
        return None
    if not inspect.iscoroutinefunction(test):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    _on_a_fresh_loop(test)(**{name: pyfuncitem.funcargs[name] for name in names})
    return True


def _on_a_fresh_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    def run(*args: Any, **kwargs: Any) -> None:
        with blockbuster_ctx(["penstock"]) as detector:
            # A sync call made on a loop waits for its worker, as sync calls do; and the census looks at /proc.
            detector.functions["threading.Lock.acquire"].can_block_in("penstock/runtime/worker.py", {"wait"})
            for name, function in detector.functions.items():
                function.can_block_in("penstock/testing/census.py", {"_count", "__exit__"})
                if (
                    name.startswith("sqlite3.") or name == "os.stat"
                ):  # what is brief waits neither for others nor a disk
                    function.can_block_in("penstock/storage/databases/sqlite.py", {"_written_now", "_read_now"})
                    function.can_block_in("penstock/storage/sqlite_ledger.py", {"at_once"})
            asyncio.run(test(*args, **kwargs))

    return run


def _ids(item: pytest.Item) -> Iterator[str]:
    for mark in item.iter_markers("requirement"):
        yield from mark.args


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As in a shell's background job: programs that tests start would inherit that, and could not be interrupted.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[MARKED] = set()
    config.stash[PROOFS] = Proofs()
    config.pluginmanager.register(config.stash[PROOFS])
    config.stash[DESELECTED] = False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = config.stash[MARKED]
    for item in items:
        marked.update(_ids(item))
        item.user_properties.extend(("requirement", i) for i in _ids(item))  # its reports have them, in any process
    if unknown := requirements.unknown(marked):
        raise pytest.UsageError(f"tests/requirements.py has no {', '.join(unknown)}")


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items[:1]:
        item.config.stash[DESELECTED] = True


class Proofs:
    """Which requirements had a test, and which of them had one that passed."""

    def __init__(self) -> None:
        self.passes: dict[str, bool] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        has_passed = report.when == "call" and report.passed
        for name, value in report.user_properties:
            if name == "requirement":
                i = str(value)
                self.passes[i] = self.passes.get(i, False) or has_passed


def is_whole_run(config: pytest.Config) -> bool:
    """Whether every test of the suite was asked for; a part of it cannot show that something is missing."""
    option = config.option
    chosen = (option.keyword, option.markexpr, option.deselect, option.ignore, option.ignore_glob)
    parts = (*chosen, getattr(option, "lf", False))
    asked_for_all = config.args == config.getini("testpaths") and not any(parts)
    return asked_for_all and not option.collectonly and not config.stash[DESELECTED]


@pytest.fixture
def marked(request: pytest.FixtureRequest) -> set[str]:
    """The ids the collected tests are marked with; the test is skipped when only a part of the suite is run."""
    if not is_whole_run(request.config):
        pytest.skip("looks at the whole suite")
    return request.config.stash[MARKED]


def _unproven(config: pytest.Config) -> list[str]:
    is_one_of_several = hasattr(config, "workerinput")  # and has seen its own share only
    if is_one_of_several or not is_whole_run(config):
        return []
    return requirements.unproven(config.stash[PROOFS].passes)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.OK and _unproven(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if unproven := _unproven(terminalreporter.config):
        terminalreporter.section("requirements", red=True)
        terminalreporter.line(f"no passing test for {', '.join(unproven)}")
