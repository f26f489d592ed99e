"""Every invariant has tests under its own name, and those that are about faults, races or load are in the soak."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
INVARIANTS = {
    1: "budget",
    2: "lifecycle",
    3: "crash",
    4: "cancel",
    5: "leaks",
    6: "slow client",
    7: "bad graphs",
    8: "soak",
    9: "store faults",
    10: "clocks",
    11: "attacks",
    12: "secrets",
    13: "telemetry",
    14: "loop health",
    15: "retries, breaker",
    16: "early cancel",
    17: "upgrades",
    18: "exclusivity",
    19: "limits",
    20: "no starvation",
    21: "no way around",
    22: "signals",
    23: "poison",
    24: "fair loop",
    25: "endless provider",
}
WITHOUT_A_LONG_FORM = {19}
"""A table that is read from both sides: there is nothing to do for longer."""
NAME, OPENING = re.compile(r"test_inv_(\d\d)_\w+\.py"), re.compile(r"INV (\d+)\b")


@cache
def modules() -> dict[int, dict[Path, str]]:
    """The modules of each invariant: named after it, or opening with its number."""
    found: dict[int, dict[Path, str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        name, text = NAME.fullmatch(path.name), path.read_text()
        opening = OPENING.match(text.removeprefix('"""'))
        for match in (name, opening):
            if match is not None:
                found.setdefault(int(match[1]), {})[path] = text
    return found


def names_of_tests(source: str) -> Iterator[str]:
    """The names of a module's tests that run: an unconditional skip is none."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            marks = {ast.unparse(mark).partition("(")[0] for mark in node.decorator_list}
            if not marks & {"pytest.mark.skip", "pytest.mark.xfail"}:
                yield node.name


@pytest.mark.requirement("X-8")
@pytest.mark.parametrize("number", INVARIANTS, ids=lambda number: f"{number}: {INVARIANTS[number]}")
def test_an_invariant_has_tests_under_its_name(number: int) -> None:
    own = modules().get(number, {})
    assert [name for text in own.values() for name in names_of_tests(text)]
    if number not in WITHOUT_A_LONG_FORM:
        assert any("pytest.mark.reliability" in text for text in own.values()), "make soak leaves it out"


def test_no_module_is_named_after_an_invariant_that_does_not_exist() -> None:
    assert modules().keys() <= INVARIANTS.keys()
