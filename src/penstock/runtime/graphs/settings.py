"""The settings of node types: the `data` of a node as a frozen dataclass, validated before the graph runs.

`error_policy` and `budget` belong to the runtime (`node_options`) and are not settings of a type that runs.

A dataclass lists the settings, its annotations define the allowed values, and pydantic validates them. Pydantic is
imported when data is first validated, so the markers below (`Within`, `Sized`, `EXACT`) write the constraints into its
schema without importing it. Nothing is coerced: a number is not accepted as text, nor `true` as a number.

Knows no node type.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, TypeVar

from penstock.containment.limits import Budget
from penstock.errors import PenstockError
from penstock.kernel.executor import ExecutorRegistry

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError
    from pydantic_core import ErrorDetails

Finding = tuple[str, str]
"""A problem with data: its path, which continues that of the data, and a sentence."""

OPTIONS = ("error_policy", "budget")
"""Keys that the data of every node that runs may have beside the settings of its type: see `node_options`."""

MAX_SENTENCE = 300
BLANK = "String should have at least 1 character"
MAX_KNOWN = 500
MAX_KNOWN_TEXT = 2_000


@dataclass(frozen=True, slots=True)
class _Exact:
    """Accepts a value of exactly that type."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {**handler(source), "strict": True}


EXACT = _Exact()


@dataclass(frozen=True, slots=True)
class Within:
    """A number within these bounds, inclusive."""

    low: float
    high: float

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {**handler(source), "strict": True, "ge": self.low, "le": self.high}


@dataclass(frozen=True, slots=True)
class Sized:
    """A text, a list or an object whose length is within these bounds, inclusive."""

    least: int
    most: int

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {**handler(source), "strict": True, "min_length": self.least, "max_length": self.most}


ValueType = Literal["any", "text", "number", "boolean", "object", "list"]

MAX_TEXT = 100_000
MAX_NAME = 200

Name = Annotated[str, Sized(1, MAX_NAME)]
Text = Annotated[str, Sized(0, MAX_TEXT)]
Flag = Annotated[bool, EXACT]
Seconds = Annotated[float, Within(0.001, 86_400)]
Json = Annotated[dict[str, Any], EXACT]
"""A JSON object."""


class Data:
    """What the data of a node is: a setting that is not listed is refused."""

    __slots__ = ()
    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid", "allow_inf_nan": False}


@dataclass(frozen=True, slots=True)
class BudgetData(Data):
    """Limits of one run of the node; an omitted limit adds none of its own."""

    max_cost_usd: Annotated[float, Within(0, 1_000_000)] | None = None
    max_steps: Annotated[int, Within(0, 1_000_000_000)] | None = None
    max_tokens: Annotated[int, Within(0, 1_000_000_000_000)] | None = None
    max_api_calls: Annotated[int, Within(0, 1_000_000_000)] | None = None
    max_time_s: Annotated[float, Within(0.001, 31_536_000)] | None = None

    def budget(self) -> Budget:
        """Return the same limits as the ledger's Budget."""
        return Budget(
            max_tokens=self.max_tokens,
            max_time_seconds=self.max_time_s,
            max_steps=self.max_steps,
            max_api_calls=self.max_api_calls,
            max_cost_dollars=self.max_cost_usd,
        )


class DataInvalid(PenstockError):
    """The data of a node does not match its type."""

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__("; ".join(f"data{path}: {sentence}" for path, sentence in self.findings[:10]))


D = TypeVar("D", bound=Data)


class Settings(Generic[D]):
    """Reads the data of one node type.

    The options of nodes that run are ignored, unless the type has a setting of that name; where `runs` is False, they
    are refused like any other unknown setting.
    """

    def __init__(self, shape: type[D], *, runs: bool = True) -> None:
        self._shape = shape
        self._options = frozenset(OPTIONS if runs else ()) - set(self._names())
        self._known: dict[tuple[Any, ...], D] = {}
        """Cache of recently read data: a node's data is read each time it runs."""

    @property
    def shape(self) -> type[D]:
        """The dataclass of the data."""
        return self._shape

    @cached_property
    def _adapter(self) -> TypeAdapter[D]:
        from pydantic import TypeAdapter

        return TypeAdapter(self._shape)

    @cached_property
    def _is_for_all(self) -> bool:
        """Whether a result can be shared: no field has a fresh mutable default that its owner could change."""
        return all(field.default_factory is MISSING for field in fields(self._shape))  # type: ignore[arg-type]

    @cached_property
    def _invalid(self) -> type[ValidationError]:
        from pydantic import ValidationError

        return ValidationError

    def read(self, data: Mapping[str, Any]) -> D:
        """Return the data as its dataclass; raises DataInvalid with every problem found."""
        key = _key_of(data) if self._is_for_all else None
        if key is not None and (known := self._known.get(key)) is not None:
            return known
        read, findings = self._looked_at(data)
        if read is None:
            raise DataInvalid(findings)
        if key is not None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[key] = read
        return read

    def read_or_none(self, data: Mapping[str, Any]) -> D | None:
        """Return the data as its dataclass; None if it has a problem."""
        return self._looked_at(data)[0]

    def findings(self, data: Mapping[str, Any]) -> list[Finding]:
        """Return every problem with the data."""
        return self._looked_at(data)[1]

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the data."""
        return self._adapter.json_schema()

    def _looked_at(self, data: Mapping[str, Any]) -> tuple[D | None, list[Finding]]:
        kept = {name: value for name, value in data.items() if not _is_the_editors(name) and name not in self._options}
        try:
            return self._adapter.validate_python(kept), []
        except self._invalid as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)
            return None, list(self._of_nearest_kind(found, kept))

    def _of_nearest_kind(self, found: list[ErrorDetails], data: Any) -> Iterator[Finding]:
        """Yield the findings, without those of the other alternatives of a union.

        For a blank name where a name or a script is allowed, only the name is reported, and not that it is no script.
        """
        findings = [(self._finding(one, data), one["type"].endswith("_type")) for one in found]
        closer = [path for (path, _), is_of_other_kind in findings if not is_of_other_kind]
        for finding, is_of_other_kind in findings:
            path = finding[0]
            if not (
                is_of_other_kind and any(one == path or one.startswith((f"{path}.", f"{path}[")) for one in closer)
            ):
                yield finding

    def _finding(self, found: ErrorDetails, data: Any) -> Finding:
        where = _steps_in(data, found["loc"], is_there=found["type"] != "missing")
        if found["type"] == "missing":
            return path_of(where), "this is needed, and it is not there"
        if found["type"] == "unexpected_keyword_argument":
            names = [*self._names(), *(name for name in OPTIONS if name in self._options)]
            known = f"; there are: {', '.join(names)}" if len(where) == 1 else ""
            return path_of(where), f"there is no such setting{known}"
        if found["type"] in ("dataclass_type", "dict_type"):
            return path_of(where), "input should be an object"
        if found["type"] == "string_too_short" and found["msg"] == BLANK:
            return path_of(where), "this is needed, and it is blank"
        message = found["msg"][:MAX_SENTENCE]
        return path_of(where), message[:1].lower() + message[1:]

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of all settings."""
        return frozenset(self._names())

    def _names(self) -> list[str]:
        return [field.name for field in fields(self._shape)]  # type: ignore[arg-type]  # each is a dataclass


class Checked(Generic[D]):
    """An executor whose data is read by `settings`, and checked before the graph runs."""

    settings: Settings[D]

    def check(self, data: Mapping[str, Any], executors: ExecutorRegistry) -> list[Finding]:
        """Return all problems of the data; `executors` are used to check nested graphs."""
        read, findings = self.settings._looked_at(data)
        return [*findings, *self.look_inside(data, executors)] if read is None else list(self.look(read, executors))

    def look(self, data: D, executors: ExecutorRegistry) -> Iterable[Finding]:
        """Return the problems of data that has the right shape."""
        return ()

    def look_inside(self, data: Mapping[str, Any], executors: ExecutorRegistry) -> Iterable[Finding]:
        """Return further problems of data that does not have the right shape, such as those of a graph in it."""
        return ()

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the data."""
        return self.settings.schema()


def _steps_in(data: Any, where: tuple[str | int, ...], is_there: bool) -> list[str | int]:
    """Return the steps that lead through the data; the others name which alternative of a union was tried."""
    steps: list[str | int] = []
    for at, step in enumerate(where):
        if (isinstance(data, dict) and step in data) or (isinstance(data, list) and isinstance(step, int)):
            steps.append(step)
            data = data[step]  # type: ignore[index]  # a list has a number here
        elif not is_there and at == len(where) - 1:
            steps.append(step)
    return steps


def path_of(where: Iterable[str | int]) -> str:
    """Format steps into JSON as a path: `.name`, `[3]`, `["any other name"]`."""
    return "".join(_step(one) for one in where)


def _step(key: str | int) -> str:
    if isinstance(key, int):
        return f"[{key}]"
    return f".{key}" if key.isidentifier() else f"[{json.dumps(key[:80])}]"


def _key_of(data: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return a key that identifies data of a few short plain values; None for any other data."""
    size = 0
    key: list[Any] = []
    for name, value in data.items():
        kind = type(value)
        if kind is str:
            size += len(value)
        elif kind is not bool and kind is not int and value is not None:
            return None
        size += len(name)
        key += (name, kind, value)
    return tuple(key) if size <= MAX_KNOWN_TEXT else None


def _is_the_editors(name: object) -> bool:
    """Return whether this is an editor's own entry beside the settings."""
    return name == "label" or (isinstance(name, str) and name.startswith("_"))
