"""Loads objects by module or file name: `package.module:attribute`, `file.py:attribute`.

Imports user code, which can fail in any way; every failure is reported in one sentence. Does not know what the
objects are for.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.cli.exits import Broken, Refused
from penstock.kernel.graph import shown

MAX_MESSAGE = 300
OURS = str(Path(__file__).parents[2]) + os.sep
STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep


def load_attribute(module: str, attribute: str) -> Any:
    """Return an attribute of a module or a `.py` file; it may be a path such as `flows.main`."""
    return attribute_of(load_module(module), module, attribute)


def attribute_of(owner: ModuleType, module: str, attribute: str, known: Callable[[Any], str] | None = None) -> Any:
    """Return an attribute of a loaded module; `known` lists the existing names for the error about a missing one."""
    found: Any = owner
    for name in attribute.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            close = difflib.get_close_matches(name, _names(found), 1)
            guess = f"; did you mean {close[0]!r}?" if close else ";"
            raise Refused(f"{module} has no attribute {attribute!r}{guess} {(known or _public)(found)}") from None
        except Exception as error:
            raise Broken(f"{module}:{attribute} cannot be read: {describe_error(error)}") from error
    return found


def load_module(name: str) -> ModuleType:
    """Import the module of that name, searching the current directory first, or the module in that `.py` file."""
    if name.endswith(".py"):
        return _from_file(Path(name))
    if not all(part.isidentifier() for part in name.split(".")):
        raise Refused(f"{shown(name)} is not the name of a module; write package.module:attribute or file.py:attribute")
    _search_first(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise Refused(f"there is no module {name!r}, neither in this directory nor installed") from None
        raise Broken(f"{name} cannot be imported: {describe_error(error)}") from error
    except (Exception, SystemExit) as error:
        raise Broken(f"{name} cannot be imported: {describe_error(error)}") from error


def resolve(value: Any, where: str) -> Any:
    """Return `value`, or its result if it is a function without required arguments."""
    if isinstance(value, type) or not (inspect.isroutine(value) or inspect.iscoroutinefunction(value)):
        return value
    if inspect.iscoroutinefunction(value) or inspect.isasyncgenfunction(value):
        raise Refused(f"{where} is an async function; give one that is not, or the object itself")
    if _needs_arguments(value):
        raise Refused(f"{where} is a function that needs arguments; give one without, or the object itself")
    try:
        return value()
    except (Exception, SystemExit) as error:
        raise Broken(f"{where} raised {describe_error(error)}") from error


def describe_error(error: BaseException) -> str:
    """Render the error in one line: type, message, and the innermost frame in user code."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # the error's own __str__ may raise
        text = ""
    text = text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}…"
    description = f"{type(error).__name__}: {text}" if text else type(error).__name__
    place = _place(error)
    return f"{description} ({place})" if place else description


def _place(error: BaseException) -> str | None:
    if isinstance(error, SyntaxError):
        return None  # its message has the location
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_code(frame.filename)]
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}" if own else None


def is_user_code(filename: str) -> bool:
    """Whether a source file is neither ours, nor an installed package's, nor Python's."""
    return "site-packages" not in filename and not filename.startswith((OURS, "<frozen", STANDARD_LIBRARY))


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise Refused(f"there is no file {shown(str(path))}" if not path.exists() else f"{path} is not a file")
    _search_first(str(path.resolve().parent))
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and type hints look up their module there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise Broken(f"{path} cannot be imported: {describe_error(error)}") from error
    return module


def _module_name(path: Path) -> str:
    """Return a unique module name: a file may be called json.py, and two folders may have a file of the same name."""
    name, file, number = f"_penstock_run_{path.stem}", str(path.resolve()), 1
    while getattr(sys.modules.get(name), "__file__", file) != file:
        number += 1
        name = f"_penstock_run_{path.stem}_{number}"
    return name


def _search_first(directory: str) -> None:
    if directory not in sys.path:
        sys.path.insert(0, directory)


def _public(owner: object) -> str:
    names = _names(owner)
    listed = ", ".join(names[:10]) or "none"
    return f"it has: {listed}" if len(names) <= 10 else f"it has: {listed}, and {len(names) - 10} more"


def _names(owner: object) -> list[str]:
    return [name for name in dir(owner) if not name.startswith("_")]


def _needs_arguments(function: Any) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(parameter.default is parameter.empty and parameter.kind not in optional for parameter in parameters)
