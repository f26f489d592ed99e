"""The public API is what `tests/public_api.txt` says it is.

A change here is a change for every user: look at the diff, then accept it with `UPDATE_SNAPSHOTS=1 pytest
tests/test_public_api.py`.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import penstock
from penstock import adapters, agents, containment, events, executors, export, providers, stores, telemetry

FACADES = (penstock, adapters, agents, containment, events, executors, export, providers, stores, telemetry)
SNAPSHOT = Path(__file__).with_name("public_api.txt")
HOW_TO_UPDATE = "if this is meant, run: UPDATE_SNAPSHOTS=1 .venv/bin/pytest tests/test_public_api.py"


def test_importing_the_package_loads_none_of_its_modules() -> None:
    code = "import sys, penstock; print([m for m in sys.modules if m.startswith('penstock.')])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


@pytest.mark.parametrize("module", FACADES, ids=lambda module: module.__name__)
def test_public_names_resolve_and_are_listed(module: ModuleType) -> None:
    for name in module.__all__:
        assert getattr(module, name) is getattr(module, name), name
        assert name in dir(module)


@pytest.mark.parametrize("module", FACADES, ids=lambda module: module.__name__)
def test_a_name_that_is_not_public_raises_attribute_error(module: ModuleType) -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = module.no_such_name


@pytest.mark.parametrize("module", FACADES[1:], ids=lambda module: module.__name__)
def test_a_name_in_a_module_and_at_the_root_is_the_same_object(module: ModuleType) -> None:
    for name in {*module.__all__} & {*penstock.__all__}:
        assert getattr(module, name) is getattr(penstock, name)


def test_the_public_api_is_the_recorded_one() -> None:
    now = "".join(f"{line}\n" for module in FACADES for line in api_of(module))
    if os.environ.get("UPDATE_SNAPSHOTS"):
        SNAPSHOT.write_text(now)
    recorded = SNAPSHOT.read_text() if SNAPSHOT.exists() else ""
    if recorded != now:
        diff = difflib.unified_diff(recorded.splitlines(), now.splitlines(), "recorded", "now", lineterm="")
        pytest.fail("\n".join([*diff, "", HOW_TO_UPDATE]), pytrace=False)


def api_of(module: ModuleType) -> Iterator[str]:
    """The public names of a module, without those that are at the root too."""
    names = {*module.__all__} if module is penstock else {*module.__all__} - {*penstock.__all__}
    yield f"# {module.__name__}"
    for name in sorted(names):
        yield from described(name, getattr(module, name))


def described(name: str, value: object) -> Iterator[str]:
    """One line for a public thing, and one for each public member of a class."""
    if isinstance(value, enum.EnumMeta):
        yield f"enum {name}: {', '.join(f'{member.name}={member.value!r}' for member in value)}"
    elif isinstance(value, type):
        bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
        yield f"class {name}{signature(value)}" + (f" is {bases}" if bases else "")
    elif callable(value) and hasattr(value, "__name__"):
        yield f"def {name}{signature(value)}"
    else:
        yield f"{name}: {type(value).__name__}"
    if isinstance(value, type):
        yield from (f"    {line}" for line in members(value))


def members(cls: type) -> Iterator[str]:
    """The public methods and properties a class has from Penstock; what it inherits from elsewhere is not ours."""
    ours = [base for base in cls.__mro__ if base.__module__.partition(".")[0] == "penstock"]
    names = {name for base in ours for name in vars(base) if not name.startswith("_")}
    if dataclasses.is_dataclass(cls):
        names -= {field.name for field in dataclasses.fields(cls) if field.init}  # the constructor shows them
    for name in sorted(names):
        value = inspect.getattr_static(cls, name)
        if isinstance(value, property):
            yield f".{name}{returns(value)}"
        elif isinstance(value, (staticmethod, classmethod)) or inspect.isfunction(value):
            prefix = "async " if inspect.iscoroutinefunction(getattr(cls, name)) else ""
            yield f"{prefix}.{name}{signature(getattr(cls, name))}"
        elif not isinstance(cls, enum.EnumMeta):
            yield f".{name}"


class Bare(str):
    """An annotation that is shown as it was written, without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def bare(annotation: object) -> object:
    return Bare(annotation) if isinstance(annotation, str) else annotation


def signature(value: object) -> str:
    """The signature as text, the same in every process."""
    try:
        found = inspect.signature(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return "(...)"
    parameters = [parameter.replace(annotation=bare(parameter.annotation)) for parameter in found.parameters.values()]
    text = str(found.replace(parameters=parameters, return_annotation=bare(found.return_annotation)))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def returns(value: property) -> str:
    return signature(value.fget).removeprefix("(self)")
