"""How every test is run: async tests on a new event loop, each under a census, requirement marks checked both ways.

While an async test runs, a call of ours that would block its event loop raises `blockbuster.BlockingError`.
"""

from __future__ import annotations

import asyncio
import encodings.idna  # noqa: F401  # as for `penstock.kernel.schema` below; host names are encoded with it
import gc
import inspect
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from blockbuster import BlockBuster
from hypothesis import HealthCheck, settings

import penstock.kernel.schema  # noqa: F401  # reads files when imported, which must not happen on an event loop
from penstock.testing import census
from tests import requirements, unit
from tests.forked import fork_server
from tests.storage import postgres
from tests.watchdog import Watchdog

pytest.register_assert_rewrite("penstock.testing.contracts")

# How long an example takes depends on the machine and its load: no test is about it.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

MEMORY = Path("/dev/shm")
MEMORY_NEEDED = 4_000_000_000
"""Bytes that must be free; a whole run needs less than one billion."""

MARKED = pytest.StashKey[set[str]]()
PROOFS = pytest.StashKey["Proofs"]()
DESELECTED = pytest.StashKey[bool]()

SLOWEST = (
    *(
        "reliability",
        "ui",
        "cli",
        "docs",
        "server",
        "test_structure_script.py",
        "test_docs_cover_the_api.py",
        "providers",
    ),
    *("realmodel", "storage", "tracing", "containment", "kernel", "scenarios", "chat", "hosting", "runtime"),
)
"""Folders and files."""


@pytest.fixture(autouse=True)
def leak_check() -> Iterator[None]:
    """No task, thread, descriptor or child process outlives the test that started it."""
    with census():
        yield


@pytest.fixture(scope="session")
def forks() -> Iterator[None]:
    """Where a test's `tests.forked.Program` comes from; it is there before a test is watched for what it leaves."""
    with fork_server():
        yield


@pytest.fixture(autouse=True)
def patient_postgres(request: pytest.FixtureRequest) -> None:
    """Wait for a busy PostgreSQL server, except in the tests of how soon its failures are reported."""
    if "postgres_server" in request.fixturenames and "test_inv_09" not in request.node.nodeid:
        postgres.be_patient(request.getfixturevalue("monkeypatch"))


@pytest.fixture(autouse=True, scope="module")
def frozen_imports() -> None:
    """Exclude the half a million objects of imported modules from garbage collection during tests."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an `async def` test on a new event loop; under hypothesis, one for each example."""
    test = pyfuncitem.obj
    handle = getattr(test, "hypothesis", None)
    if handle is not None and inspect.iscoroutinefunction(handle.inner_test):
        handle.inner_test = _on_new_loop(handle.inner_test)
        return None
    if not inspect.iscoroutinefunction(test):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    _on_new_loop(test)(**{name: pyfuncitem.funcargs[name] for name in names})
    return True


def _on_new_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    def run(*args: Any, **kwargs: Any) -> None:
        with _blocking_detected():
            asyncio.run(test(*args, **kwargs))

    return run


@contextmanager
def _blocking_detected() -> Iterator[None]:
    detector = _detector()
    for function in detector.functions.values():
        # Not what it was when the detector was made: a fixture, or one of our hooks, may have replaced it since.
        function.original_func = getattr(function.module, function.func_name, None)
    detector.activate()
    try:
        yield
    finally:
        detector.deactivate()


@cache
def _detector() -> BlockBuster:
    """One for all tests: making it takes as long as a short test."""
    detector = BlockBuster(["penstock"])
    # A sync call on an event loop blocks it until its worker is done, by design; and the census reads /proc.
    detector.functions["threading.Lock.acquire"].can_block_in("penstock/runtime/worker.py", {"wait"})
    for name, function in detector.functions.items():
        function.can_block_in("penstock/testing/census.py", {"_count", "__exit__"})
        # A sync request that a test makes on its event loop passes through our hooks, which stay installed.
        function.can_block_in("penstock/providers/hooks.py", {"ours"})
        if name.startswith("sqlite3.") or name == "os.stat":  # inline operations wait for no lock and no disk
            function.can_block_in("penstock/storage/sqlite/database.py", {"_write_inline", "_read_inline"})
            function.can_block_in("penstock/storage/sqlite/ledger.py", {"try_inline"})
    return detector


def _ids(item: pytest.Item) -> Iterator[str]:
    for mark in item.iter_markers("requirement"):
        yield from mark.args


def _keep_files_in_memory() -> None:
    """Put temporary files where a commit does not wait for a disk, if there is room and no other place is chosen."""
    is_chosen = any(name in os.environ for name in ("TMPDIR", "PYTEST_DEBUG_TEMPROOT"))
    if not is_chosen and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > MEMORY_NEEDED:
        os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)  # for processes that tests start, and for this one


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    _keep_files_in_memory()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # In a shell's background job; programs started by tests would inherit it and could not be interrupted.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[MARKED] = set()
    config.stash[PROOFS] = Proofs()
    config.pluginmanager.register(config.stash[PROOFS])
    config.stash[DESELECTED] = False
    config.pluginmanager.register(Watchdog())
    postgres.configure(config)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--unit", action="store_true", help="leave out what tests/unit.py lists: slow or outside tests")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.option.unit and not unit.is_unit(collection_path) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while half a million objects are made that all stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of pytest-xdist where the run's PostgreSQL server is."""
    node.workerinput[postgres.WORKERINPUT] = str(node.config.stash[postgres.FOLDER])


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, object, object]:
    """Escape what UTF-8 cannot encode: half a surrogate pair in a log line would end a worker of pytest-xdist."""
    return _encodable((yield))


def _encodable(value: object) -> object:
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode("utf-8")
        case dict():
            return {_encodable(key): _encodable(item) for key, item in value.items()}
        case list() | tuple():
            return type(value)(map(_encodable, value))
        case _:
            return value


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = config.stash[MARKED]
    for item in items:
        marked.update(_ids(item))
        item.user_properties.extend(("requirement", i) for i in _ids(item))  # its reports have them, in any process
    if unknown := requirements.unknown(marked):
        raise pytest.UsageError(f"tests/requirements.py has no {', '.join(unknown)}")
    if config.option.unit:
        config.hook.pytest_deselected(items=[item for item in items if not unit.is_unit_test(item)])
        items[:] = [item for item in items if unit.is_unit_test(item)]
    items.sort(key=_long_files_first)


def _long_files_first(item: pytest.Item) -> int:
    """The slowest first: a long file at the end would leave the other processes without work."""
    top = item.path.relative_to(unit.TESTS).parts[0]
    return SLOWEST.index(top) if top in SLOWEST else len(SLOWEST)


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items[:1]:
        item.config.stash[DESELECTED] = True


class Proofs:
    """For each requirement that has a test, whether one of its tests passed."""

    def __init__(self) -> None:
        self.passes: dict[str, bool] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        has_passed = report.when == "call" and report.passed
        for name, value in report.user_properties:
            if name == "requirement":
                i = str(value)
                self.passes[i] = self.passes.get(i, False) or has_passed


def is_whole_run(config: pytest.Config) -> bool:
    """Whether the whole suite runs; a part of it cannot show that something is missing."""
    option = config.option
    chosen = (option.keyword, option.markexpr, option.deselect, option.ignore, option.ignore_glob)
    parts = (*chosen, option.unit, getattr(option, "lf", False))
    is_everything_selected = config.args == config.getini("testpaths") and not any(parts)
    return is_everything_selected and not option.collectonly and not config.stash[DESELECTED]


@pytest.fixture
def marked(request: pytest.FixtureRequest) -> set[str]:
    """The requirement ids of the collected tests; skips the test unless the whole suite runs."""
    if not is_whole_run(request.config):
        pytest.skip("checks the whole suite")
    return request.config.stash[MARKED]


def _unproven(config: pytest.Config) -> list[str]:
    is_worker = hasattr(config, "workerinput")  # a worker of pytest-xdist knows its own share only
    if is_worker or not is_whole_run(config):
        return []
    return requirements.unproven(config.stash[PROOFS].passes)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.OK and _unproven(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if unproven := _unproven(terminalreporter.config):
        terminalreporter.section("requirements", red=True)
        terminalreporter.line(f"no passing test for {', '.join(unproven)}")
