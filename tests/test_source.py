"""Rules about the source that no other tool checks.

Nothing revives objects or runs text as code, and the pure cores read neither the time nor randomness nor the world:
those come in as parameters, so that a simulated loop can drive every interleaving. Tests are named in ordinary words.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tools.structure import WORDS

TESTS = Path(__file__).parent
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
    if not any(word in text for word in REVIVING | RUNNING_TEXT):
        return []  # parsing takes a hundred times as long
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


def named(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The names that are defined, and the docstrings; attributes and keywords are the names of what is tested."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            line = getattr(node, "lineno", 1)
            yield line, getattr(node, "name", "")
            yield line, ast.get_docstring(node) or ""
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def unusual(text: str) -> list[str]:
    """The names and docstrings in `text` that use a word for which there is an ordinary one."""
    words = re.compile(rf"(?<![a-z])({'|'.join(WORDS)})(?![a-z])", re.IGNORECASE)
    if words.search(text) is None:
        return []
    return [f"line {line}: {found[0]}" for line, name in named(ast.parse(text)) if (found := words.search(name))]


def files(*parts: str) -> list[Path]:
    return sorted(path for part in parts for path in [*SOURCE.glob(f"{part}.py"), *SOURCE.glob(f"{part}/**/*.py")])


def found_in(paths: list[Path], check: Callable[[str], list[str]]) -> dict[str, list[str]]:
    """What `check` finds in the files, by the file it is in."""
    assert paths
    found = {str(path): check(path.read_text()) for path in paths}
    return {path: problems for path, problems in found.items() if problems}


def test_nothing_revives_objects_or_runs_text() -> None:
    assert found_in(sorted(SOURCE.rglob("*.py")), unsafe) == {}


def test_a_core_reads_no_clock_and_touches_nothing_outside() -> None:
    assert found_in(files(*CORES), impure) == {}


def test_tests_are_named_and_described_in_ordinary_words() -> None:
    assert found_in(sorted(TESTS.rglob("*.py")), unusual) == {}


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


def test_unusual_words_are_found_in_names_and_docstrings() -> None:
    for text in (
        "def test_it_is_told(): ...",
        "async def f(asked): ...",
        "class Untold: ...",
        "for said in []: ...",
        '"""Nobody waits."""',
        'def f():\n    """What was\n    asked for."""',
    ):
        assert unusual(text), text
    for text in ("stop.asked", "f(asked=1)", "foretold = 'told'", "def test_it_is_untoldable(): ..."):
        assert unusual(text) == [], text
