"""Reading the `data` of a node: a frozen dataclass per node type, checked before the graph runs.

A dataclass says what there is, its annotations say what may be in it, and pydantic does the looking. Pydantic is
loaded when data is first looked at, so the marks below (`Within`, `Sized`, `EXACT`) write the constraints into its
schema without importing it. Nothing is coerced: a number is no text, and `true` is no number.

Knows no node type.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, TypeVar

from penstock.containment.limits import Budget
from penstock.errors import PenstockError
from penstock.kernel.executor import ExecutorRegistry

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError
    from pydantic_core import ErrorDetails

Finding = tuple[str, str]
"""Something wrong with data: its path, which continues that of the data, and a sentence."""

MAX_TEXT = 100_000
MAX_NAME = 200
MAX_SENTENCE = 300
MAX_KNOWN = 500
MAX_KNOWN_TEXT = 2_000


@dataclass(frozen=True, slots=True)
class _Exact:
    """Takes a value of that type and no other."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {**handler(source), "strict": True}


EXACT = _Exact()


@dataclass(frozen=True, slots=True)
class Within:
    """A number no smaller and no larger than these."""

    low: float
    high: float

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {**handler(source), "strict": True, "ge": self.low, "le": self.high}


@dataclass(frozen=True, slots=True)
class Sized:
    """A text, a list or an object with no fewer and no more than these."""

    least: int
    most: int

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {**handler(source), "strict": True, "min_length": self.least, "max_length": self.most}


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
    """What one run of the node may use; what is left out is no limit of its own."""

    max_cost_usd: Annotated[float, Within(0, 1_000_000)] | None = None
    max_steps: Annotated[int, Within(0, 1_000_000_000)] | None = None
    max_tokens: Annotated[int, Within(0, 1_000_000_000_000)] | None = None
    max_api_calls: Annotated[int, Within(0, 1_000_000_000)] | None = None
    max_time_s: Annotated[float, Within(0.001, 31_536_000)] | None = None

    def budget(self) -> Budget:
        """The same as the ledger takes it."""
        return Budget(
            max_tokens=self.max_tokens,
            max_time_seconds=self.max_time_s,
            max_steps=self.max_steps,
            max_api_calls=self.max_api_calls,
            max_cost_dollars=self.max_cost_usd,
        )


class DataInvalid(PenstockError):
    """The data of a node is not what its type takes."""

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__("; ".join(f"data{path}: {sentence}" for path, sentence in self.findings[:10]))


D = TypeVar("D", bound=Data)


class Settings(Generic[D]):
    """How the data of one node type is read."""

    def __init__(self, shape: type[D]) -> None:
        self._shape = shape
        self._known: dict[tuple[Any, ...], D] = {}
        """What was read lately: a node is read each time it runs."""

    @cached_property
    def _adapter(self) -> TypeAdapter[D]:
        from pydantic import TypeAdapter

        return TypeAdapter(self._shape)

    @cached_property
    def _is_for_all(self) -> bool:
        """Whether nothing in it is made anew for each that is read, and could be changed by who has it."""
        return all(field.default_factory is MISSING for field in fields(self._shape))  # type: ignore[arg-type]

    @cached_property
    def _invalid(self) -> type[ValidationError]:
        from pydantic import ValidationError

        return ValidationError

    def read(self, data: Mapping[str, Any]) -> D:
        """The data as its dataclass; DataInvalid has all that is wrong with it."""
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
        """The data as its dataclass; None if something is wrong with it."""
        return self._looked_at(data)[0]

    def findings(self, data: Mapping[str, Any]) -> list[Finding]:
        """All that is wrong with the data."""
        return self._looked_at(data)[1]

    def schema(self) -> dict[str, Any]:
        """The JSON Schema of the data."""
        return self._adapter.json_schema()

    def _looked_at(self, data: Mapping[str, Any]) -> tuple[D | None, list[Finding]]:
        kept = {name: value for name, value in data.items() if not _is_the_editors(name)}
        try:
            return self._adapter.validate_python(kept), []
        except self._invalid as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)
            return None, [self._finding(one, kept) for one in found]

    def _finding(self, found: ErrorDetails, data: Any) -> Finding:
        where = _steps_in(data, found["loc"], is_there=found["type"] != "missing")
        if found["type"] == "missing":
            return path_of(where), "this is needed, and it is not there"
        if found["type"] == "unexpected_keyword_argument":
            known = f"; there are: {', '.join(self._names())}" if len(where) == 1 else ""
            return path_of(where), f"there is no such setting{known}"
        if found["type"] in ("dataclass_type", "dict_type"):
            return path_of(where), "input should be an object"
        said = found["msg"][:MAX_SENTENCE]
        return path_of(where), said[:1].lower() + said[1:]

    def _names(self) -> list[str]:
        return [field.name for field in fields(self._shape)]  # type: ignore[arg-type]  # each is a dataclass


def _steps_in(data: Any, where: tuple[str | int, ...], is_there: bool) -> list[str | int]:
    """The steps that lead through the data; others name the one of several shapes that was tried."""
    steps: list[str | int] = []
    for at, step in enumerate(where):
        if (isinstance(data, dict) and step in data) or (isinstance(data, list) and isinstance(step, int)):
            steps.append(step)
            data = data[step]  # type: ignore[index]  # a list has a number here
        elif not is_there and at == len(where) - 1:
            steps.append(step)
    return steps


def path_of(where: Iterable[str | int]) -> str:
    """Steps into JSON as a path: `.name`, `[3]`, `["any other name"]`."""
    return "".join(_step(one) for one in where)


def _step(key: str | int) -> str:
    if isinstance(key, int):
        return f"[{key}]"
    return f".{key}" if key.isidentifier() else f"[{json.dumps(key[:80])}]"


def _key_of(data: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """What tells data of a few short plain values from any other; None for what is more than that."""
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
    """Whether an editor keeps this beside the settings, for itself."""
    return name == "label" or (isinstance(name, str) and name.startswith("_"))


class Checked(Generic[D]):
    """An executor whose data is read by `settings`, and looked at before the graph runs."""

    settings: Settings[D]

    def check(self, data: Mapping[str, Any], executors: ExecutorRegistry) -> list[Finding]:
        """All that is wrong with the data; `executors` are those beside this one, for graphs inside it."""
        read, findings = self.settings._looked_at(data)
        return findings if read is None else list(self.look(read, executors))

    def look(self, data: D, executors: ExecutorRegistry) -> Iterable[Finding]:
        """What is wrong with data that has the right shape."""
        return ()

    def schema(self) -> dict[str, Any]:
        """The JSON Schema of the data."""
        return self.settings.schema()
