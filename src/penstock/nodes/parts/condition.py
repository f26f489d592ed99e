"""Conditions in CEL, the Common Expression Language: `input.score > 0.5 && input.kind in ["a", "b"]`.

CEL has no loops but its macros over lists (`map`, `filter`, `all`, `exists`), and those could run without limit: the
library does not bound them, and cannot be interrupted. So they are refused, and so is every function that is not
listed here; the size of an expression and of its values is bounded. The remaining expressions take time in proportion
to both.

Needs `common-expression-language` (`pip install penstock[conditions]`), loaded with the first condition.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

from penstock.errors import PenstockError

COMPILED = "cel.cel"

MAX_EXPRESSION = 1_000
MAX_ADDITIONS = 16
"""Each addition may copy both sides."""
MAX_VALUES = 10_000
MAX_CHARACTERS = 100_000

MACRO = re.compile(r"\b(map|filter|all|exists|exists_one|existsOne)\b(?:\s|//[^\n]*\n)*\(")

SYNTAX_ERROR = re.compile(r"ERROR: <input>:(\d+):(\d+): (?:Syntax error: )?(.+?)(?: expecting .*)?$", re.M)

FUNCTIONS = frozenset(
    {
        *("_&&_", "_||_", "!_", "-_", "_?_:_", "_[_]", "_==_", "_!=_", "_<_", "_<=_", "_>_", "_>=_"),
        *("_+_", "_-_", "_*_", "_/_", "_%_", "@in", "_in_", "in"),
        *("size", "contains", "startsWith", "endsWith", "int", "uint", "double", "string", "bool", "type"),
    }
)


class ConditionUnavailable(PenstockError):
    """The library that evaluates conditions is not installed."""

    def __init__(self) -> None:
        super().__init__("conditions need common-expression-language: pip install 'penstock[conditions]'")


class ConditionInvalid(PenstockError):
    """A condition cannot be parsed, or could take too long."""


class ConditionFailed(PenstockError):
    """A condition could not be evaluated to true or false with the given values."""

    def __init__(self, expression: str, why: str) -> None:
        self.expression = expression
        self.why = why
        super().__init__(f"{expression[:200]!r}: {why}")


class Condition:
    """A compiled CEL expression that evaluates to true or false."""

    __slots__ = ("_program", "expression")

    def __init__(self, expression: str, names: Iterable[str]) -> None:
        """Compile `expression`, which may use `names`; raise ConditionInvalid if it is not valid."""
        self.expression = expression
        if len(expression) > MAX_EXPRESSION:
            raise ConditionInvalid(f"it has {len(expression):,} characters, more than {MAX_EXPRESSION:,} characters")
        if macro := MACRO.search(expression):
            raise ConditionInvalid(f"{macro[1]}(…) iterates over a list, which takes an unbounded time")
        if expression.count("+") > MAX_ADDITIONS:
            raise ConditionInvalid(f"it has more than {MAX_ADDITIONS} additions, the maximum")
        if not expression.strip():
            raise ConditionInvalid("this is needed, and it is blank")
        cel = _cel()
        try:
            self._program = cel.compile(expression)
        except BaseException as error:
            if not _is_the_librarys(error):
                raise
            raise ConditionInvalid(_syntax_error(error)) from error
        self._refuse("there is no function", self._program.functions(), FUNCTIONS)
        self._refuse("there is no", self._program.variables(), frozenset(names))

    def _refuse(self, what: str, used: Iterable[str], known: frozenset[str]) -> None:
        for name in used:
            if name not in known:
                listed = ", ".join(sorted(name for name in known if name.isidentifier()))
                raise ConditionInvalid(f"{what} {name[:40]!r}; there are: {listed}")

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether it holds for these values; ConditionFailed if it cannot be evaluated."""
        _refuse_size(self.expression, values)
        try:
            answer = self._program.execute(dict(values))
        except BaseException as error:
            if not _is_the_librarys(error):
                raise
            raise ConditionFailed(self.expression, f"{type(error).__name__}: {_first_line(error)}") from error
        if not isinstance(answer, bool):
            raise ConditionFailed(self.expression, f"its value is {type(answer).__name__}; it must be true or false")
        return answer


def findings(expression: str, names: Iterable[str]) -> str | None:
    """Return the problem of a condition; None if it is valid."""
    try:
        Condition(expression, names)
    except (ConditionInvalid, ConditionUnavailable) as error:
        return str(error)
    return None


def _cel() -> ModuleType:
    """Import only the library's compiled module: the package also loads its command line, twenty times as much."""
    loaded = sys.modules.get(COMPILED)
    if loaded is not None:
        return loaded
    package = find_spec(COMPILED.partition(".")[0])
    places = None if package is None else package.submodule_search_locations
    spec = None if places is None else PathFinder.find_spec(COMPILED, places)
    if spec is None or spec.loader is None:
        raise ConditionUnavailable
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[COMPILED] = module
    return module


def _refuse_size(expression: str, values: Mapping[str, Any]) -> None:
    """Raise ConditionFailed if the values are too large; checked before they are copied."""
    seen = characters = 0
    todo: list[Any] = [values]
    while todo:
        value = todo.pop()
        seen += 1
        if isinstance(value, str):
            characters += len(value)
        elif isinstance(value, Mapping) and seen + len(todo) + len(value) <= MAX_VALUES:
            characters += sum(len(key) for key in value if isinstance(key, str))
            todo.extend(value.values())
        elif isinstance(value, list | tuple) and seen + len(todo) + len(value) <= MAX_VALUES:
            todo.extend(value)
        elif isinstance(value, Mapping | list | tuple):
            seen = MAX_VALUES + 1
        if seen > MAX_VALUES or characters > MAX_CHARACTERS:
            most = f"{MAX_VALUES:,} values and {MAX_CHARACTERS:,} characters"
            raise ConditionFailed(expression, f"the values are larger than the maximum of {most}")


def _is_the_librarys(error: BaseException) -> bool:
    """Whether the library raised it; a panic of its Rust code is not an Exception, but must not stop the program."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _syntax_error(error: BaseException) -> str:
    """Return the position of a syntax error, without the parser's names for everything it would have accepted there."""
    found = SYNTAX_ERROR.search(str(error))
    if found is None:
        return _first_line(error)
    line, column, why = found.groups()
    why = "it ends too early" if "'<EOF>'" in why else why[:200]
    return f"it cannot be read at line {line}, column {column}: {why}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]
