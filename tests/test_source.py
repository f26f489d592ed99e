"""Rules about the source that no other tool checks.

Nothing revives objects or runs text as code, and the pure cores read neither the time nor randomness nor the world:
those come in as parameters, so that a simulated loop can drive every interleaving.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "penstock"
CORES = ("kernel", "containment", "tracing", "policies")

REVIVING = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle"}
RUNNING_TEXT = {"eval", "exec"}
WORLD = {"time", "random", "secrets", "asyncio", "uuid", "socket", "os", "subprocess"}
SYSTEM_CLOCKS = {"SystemClock", "SYSTEM_CLOCK"}
CLOCK_READS = {"now", "utcnow", "today"}


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The top-level package of every absolute import, wherever in the file it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module.partition(".")[0]


def called(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """The last name of everything called, and whether it is an attribute of something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.lineno, node.func.id, False
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node.lineno, node.func.attr, True


def read_from(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The names whose attributes are used: the machine's clock may be a parameter's default, nothing more."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.lineno, node.value.id


def unsafe(text: str) -> list[str]:
    """What in `text` revives objects or runs text as code."""
    tree = ast.parse(text)
    found = [f"line {line}: imports {name}" for line, name in imported(tree) if name in REVIVING]
    found += [f"line {line}: calls {name}" for line, name, of in called(tree) if name in RUNNING_TEXT and not of]
    return found


def impure(text: str) -> list[str]:
    """What in `text` reaches past its parameters."""
    tree = ast.parse(text)
    found = [f"line {line}: imports {name}" for line, name in imported(tree) if name in WORLD]
    found += [f"line {line}: reads a clock" for line, name, of in called(tree) if name in CLOCK_READS and of]
    found += [f"line {line}: reads the machine's clock" for line, name in read_from(tree) if name in SYSTEM_CLOCKS]
    return found


def files(*parts: str) -> list[Path]:
    return sorted(path for part in parts for path in [*SOURCE.glob(f"{part}.py"), *SOURCE.glob(f"{part}/**/*.py")])


def relative(path: Path) -> str:
    return str(path.relative_to(SOURCE))


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=relative)
def test_nothing_revives_objects_or_runs_text(path: Path) -> None:
    assert unsafe(path.read_text()) == []


@pytest.mark.parametrize("path", files(*CORES), ids=relative)
def test_a_core_reads_no_clock_and_touches_nothing_outside(path: Path) -> None:
    assert impure(path.read_text()) == []


@pytest.mark.parametrize(
    "text",
    ["import pickle", "from marshal import loads", "eval('1')", "def f():\n    exec('1')", "import pickle as p"],
)
def test_unsafe_source_is_found(text: str) -> None:
    assert unsafe(text)


@pytest.mark.parametrize(
    "text",
    [
        "import time",
        "from os import environ",
        "import asyncio.events",
        "def f():\n    import random",
        "datetime.now()",
        "datetime.datetime.utcnow()",
        "date.today()",
        "SYSTEM_CLOCK.monotonic_ns()",
    ],
)
def test_impure_source_is_found(text: str) -> None:
    assert impure(text)


@pytest.mark.parametrize(
    "text",
    [
        "import threading",
        "from datetime import datetime, UTC\ndatetime.fromtimestamp(0, UTC)",
        "def f(clock=SYSTEM_CLOCK):\n    return clock.monotonic_ns()",
    ],
)
def test_threads_dates_and_an_injected_clock_are_pure_enough(text: str) -> None:
    assert impure(text) == []
