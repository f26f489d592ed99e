"""`penstock.containment` has the names of a contained run, and loads them when they are used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import penstock
from penstock import containment


def loaded(program: str) -> set[str]:
    """The modules of Penstock that a fresh interpreter has loaded after the program."""
    code = f"import sys\n{program}\nprint(*(name for name in sys.modules if name.startswith('penstock.')))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(shown.stdout.split())


@pytest.mark.parametrize("name", sorted({*containment.__all__} & {*penstock.__all__}))
def test_a_name_is_the_one_of_the_package(name: str) -> None:
    assert getattr(containment, name) is getattr(penstock, name)


def test_names_that_few_programs_need_are_here_alone() -> None:
    few = {"CircuitSnapshot", "CircuitState", "IncompleteOutput", "Outcome", "UnresolvedBill"}
    assert {*containment.__all__} - {*penstock.__all__} == few
    assert all(isinstance(getattr(containment, name), type) for name in few)


def test_the_names_can_be_imported_from_there() -> None:
    found = loaded(
        "from penstock.containment import ExecutionContext, ExecutionConfig\n"
        "from penstock.containment import ChainMetadata, WrapOptions, ContextSnapshot, ExecutionGraph\n"
        "with ExecutionContext(ExecutionConfig(0.50, 10, 3, 15_000), None, ChainMetadata('r', 'c')) as ctx:\n"
        "    assert ctx.wrap_llm_call(lambda: 1, WrapOptions('ask')) == 'ALLOW'\n"
        "assert type(ctx.get_snapshot()) is ContextSnapshot and type(ctx.graph) is ExecutionGraph"
    )
    assert "penstock.runtime.context" in found


def test_importing_the_package_loads_nothing_else() -> None:
    assert loaded("import penstock.containment") == {"penstock.containment"}
    assert "penstock.runtime" not in loaded("from penstock.containment import ExecutionConfig")


def test_a_name_that_is_not_there_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'penstock\.containment' has no attribute 'no_such_name'"):
        _ = containment.no_such_name
