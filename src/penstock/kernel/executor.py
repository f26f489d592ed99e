"""Executors, which run the nodes of a type, and the typed values that nodes exchange.

An executor has `execute`, and `materialize` if other nodes may link to it. It may declare its handles: declared handles
are checked before a graph runs, undeclared ones accept anything. The kernel calls executors by these names and knows
nothing else about them.

Installed packages provide executors as entry points of the group `penstock.executors`, each under the name of its node
type. Each is loaded when its type is first used, so that a broken one does no harm until a graph names it.

A value on an edge carries its type. Where the types of both ends differ, a conversion must have been declared. Nothing
is converted by guessing, and a failed conversion names the place, both types and the reason.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from threading import RLock
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, runtime_checkable

from penstock.errors import InvalidValue, PenstockError
from penstock.kernel.graph import CHANNELS, Channel

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ANY = "any"
Convert = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class DataValue:
    """A value with its type; None is a value."""

    type: str
    value: Any


@dataclass(frozen=True, slots=True)
class PartialValue(DataValue):
    """An incomplete value, such as a truncated answer; it stays one where it is passed on unchanged."""

    finish_reason: str
    """Reason why it is incomplete, in one word, such as `length`."""


def type_of(value: Any) -> str:
    """Return the type of a JSON value; any for a value without a type of its own."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "text"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, Mapping):
        return "object"
    if isinstance(value, list | tuple):
        return "list"
    return ANY


def typed(value: Any, finish_reason: str | None = None) -> DataValue:
    """Return the value with its type; an incomplete one carries its finish reason."""
    if finish_reason is not None:
        return PartialValue(type_of(value), value, finish_reason)
    return DataValue(type_of(value), value)


def as_text(value: Any) -> str:
    """Return the value as text: text unchanged, None as an empty string, anything else as JSON."""
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False, allow_nan=False)


class ConversionFailed(PenstockError):
    """A value cannot be converted to the type of the handle that it reached."""

    def __init__(self, path: str, given: str, wanted: str, why: str) -> None:
        self.path = path
        self.given = given
        self.wanted = wanted
        self.why = why
        super().__init__(f"{path}: {given} cannot become {wanted}: {why}")


class Conversions:
    """Conversions between types. Immutable: `extended` returns a new one."""

    __slots__ = ("_table",)

    def __init__(self, table: Mapping[tuple[str, str], Convert] | None = None) -> None:
        self._table = dict(table or {})
        for (given, wanted), convert in self._table.items():
            if not callable(convert):
                raise InvalidValue(f"conversion from {given} to {wanted}", convert, "a function of one value")

    def extended(self, table: Mapping[tuple[str, str], Convert]) -> Conversions:
        """Return these conversions and those of `table`, which takes precedence; a conversion raises if it is not
        possible.
        """
        return Conversions({**self._table, **table})

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The pairs of types that can be converted."""
        return list(self._table)

    def fits(self, given: str, wanted: str) -> bool:
        """Whether a value of type `given` is accepted where `wanted` is expected; any is accepted everywhere."""
        return given == wanted or ANY in (given, wanted) or (given, wanted) in self._table

    def convert(self, value: DataValue, wanted: str, path: str) -> DataValue:
        """Return `value` converted to `wanted`; raises ConversionFailed, which names `path`."""
        if value.type == wanted or ANY in (value.type, wanted):
            return value
        convert = self._table.get((value.type, wanted))
        if convert is None:
            raise ConversionFailed(path, value.type, wanted, "no such conversion is declared")
        try:
            return DataValue(wanted, convert(value.value))
        except Exception as error:
            raise ConversionFailed(path, value.type, wanted, _reason(error)) from error


def _reason(error: Exception) -> str:
    try:
        text = str(error)
    except Exception:  # whatever the conversion raised may not be able to say itself
        text = ""
    return f"{type(error).__name__}: {text[:200]}"


def _parsed_number(text: str) -> float | int:
    number = json.loads(text)
    if isinstance(number, bool) or not isinstance(number, int | float) or not _is_finite(number):
        raise ValueError(f"{text[:40]!r} is not a number")
    return number


def _is_finite(number: float | int) -> bool:
    return isinstance(number, int) or math.isfinite(number)


def _parsed_boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"{str(text)[:40]!r} is neither true nor false")
    return text == "true"


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _as_only_item(value: Any) -> list[Any]:
    return [value]


STANDARD_CONVERSIONS = Conversions(
    {
        ("number", "text"): _as_json,
        ("boolean", "text"): _as_json,
        ("object", "text"): _as_json,
        ("list", "text"): _as_json,
        ("text", "number"): _parsed_number,
        ("text", "boolean"): _parsed_boolean,
        ("text", "list"): _as_only_item,
        ("object", "list"): _as_only_item,
        ("number", "list"): _as_only_item,
        ("boolean", "list"): _as_only_item,
    }
)
"""The default conversions."""


GROUP = "penstock.executors"
"""Group of entry points under which packages provide executors."""

Many = Literal["one", "list", "first"]
Side = Literal["inputs", "outputs"]


@dataclass(frozen=True, slots=True)
class Handle:
    """Where edges enter or leave a node: its type, its channel, and what several edges into it mean."""

    name: str
    type: str = ANY
    channel: Channel = "flow"
    many: Many = "one"
    """one: a second edge is an error; list: all values in the order of the edges; first: the first live one."""
    required: bool = False

    def __post_init__(self) -> None:
        for attribute in ("name", "type"):
            given = getattr(self, attribute)
            if not isinstance(given, str) or not given:
                raise InvalidValue(f"{attribute} of a handle", given, "a name")
        if self.channel not in CHANNELS:
            raise InvalidValue(f"channel of handle {self.name!r}", self.channel, "flow or link")
        if self.many not in get_args(Many):
            raise InvalidValue(f"many of handle {self.name!r}", self.many, "one, list or first")
        if not isinstance(self.required, bool):
            raise InvalidValue(f"required of handle {self.name!r}", self.required, "True or False")


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """The result of a node: a value on each handle it used, and the events to emit."""

    outputs: Mapping[str, DataValue] = field(default_factory=dict)
    events: Sequence[Any] = ()


@runtime_checkable
class NodeExecutor(Protocol):
    """The code behind a node type.

    It may also have `materialize(data, output_handle, context)`, and declare its handles as `inputs` and `outputs`. A
    type that has only `materialize` can be linked to, and does not run.
    """

    def execute(self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: Any) -> Any:
        """Run the node: an ExecutionResult, an awaitable of one, or an async iterator of events that ends with one."""


class ExecutorBroken(PenstockError):
    """An executor provided by a package cannot be used."""

    def __init__(self, node_type: str, offered: str, why: str) -> None:
        self.node_type = node_type
        self.offered = offered
        self.why = why
        super().__init__(f"the executor of type {node_type!r} that is installed as {offered} cannot be used: {why}")


@dataclass(frozen=True, slots=True)
class _Registered:
    executor: Any
    inputs: Mapping[str, Handle] | None
    outputs: Mapping[str, Handle] | None


class ExecutorRegistry:
    """Executors by node type."""

    __slots__ = ("_by_type", "_loading", "_offered")

    def __init__(self, executors: Mapping[str, Any] | None = None) -> None:
        self._by_type: dict[str, _Registered] = {}
        self._offered: dict[str, list[EntryPoint]] = {}
        """Executors of installed packages that are not loaded yet."""
        self._loading = RLock()
        for node_type, executor in (executors or {}).items():
            self.register(node_type, executor)

    @classmethod
    def from_entry_points(cls) -> ExecutorRegistry:
        """Return a registry of all executors of installed packages; each is loaded when its type is first used."""
        made = cls()
        for offered in _installed():
            same_type = made._offered.setdefault(offered.name, [])
            if all(offered.value != one.value for one in same_type):  # one package may be found twice
                same_type.append(offered)
        return made

    def register(self, node_type: str, executor: Any) -> None:
        """Register `executor` for nodes of this type, which must be new. Its handles are read now, once."""
        named: object = node_type
        if not isinstance(named, str) or not named:
            raise InvalidValue("node_type", node_type, "a name")
        if node_type in self._by_type:
            raise InvalidValue("node_type", node_type, "a type that is not registered yet")
        what = f"executor of {node_type!r}"
        if isinstance(executor, type):
            raise InvalidValue(what, executor, "an object; this is its class, so call it first")
        if not any(callable(getattr(executor, name, None)) for name in ("execute", "materialize")):
            raise InvalidValue(what, executor, "an object with execute(), materialize() or both")
        self._by_type[node_type] = _Registered(
            executor, _declared(what, executor, "inputs"), _declared(what, executor, "outputs")
        )
        self._offered.pop(node_type, None)

    def __contains__(self, node_type: object) -> bool:
        return node_type in self._by_type or node_type in self._offered

    def __iter__(self) -> Iterator[str]:
        return iter([*self._by_type, *self._offered])

    def __len__(self) -> int:
        return len(self._by_type) + len(self._offered)

    def __getitem__(self, node_type: str) -> Any:
        registered = self._found(node_type)
        if registered is None:
            raise KeyError(node_type)
        return registered.executor

    def handles(self, node_type: str, side: Side) -> Mapping[str, Handle] | None:
        """Return the handles that a type declares on that side, by name; None if it declares none or is unknown."""
        registered = self._found(node_type)
        if registered is None:
            return None
        return registered.inputs if side == "inputs" else registered.outputs

    def can(self, node_type: str, act: Literal["execute", "materialize"]) -> bool:
        """Whether nodes of this type run, or can be linked to; true for types that are not registered."""
        registered = self._found(node_type)
        return registered is None or callable(getattr(registered.executor, act, None))

    def _found(self, node_type: str) -> _Registered | None:
        if node_type in self._offered:
            with self._loading:  # graphs are looked at on several threads
                if node_type in self._offered:
                    self._load(node_type, self._offered[node_type])
        return self._by_type.get(node_type)

    def _load(self, node_type: str, offered: list[EntryPoint]) -> None:
        where = " and ".join(repr(one.value) for one in offered)
        if len(offered) > 1:
            raise ExecutorBroken(node_type, where, "a type is taken once")
        try:
            executor = offered[0].load()
            self.register(node_type, executor() if isinstance(executor, type) else executor)
        except Exception as error:
            raise ExecutorBroken(node_type, where, f"{type(error).__name__}: {error}") from error


@cache
def _installed() -> tuple[EntryPoint, ...]:
    """Return the executors of installed packages; looked up once, because that reads a file of every package."""
    from importlib.metadata import entry_points

    return tuple(entry_points(group=GROUP))


def _declared(what: str, executor: Any, side: Side) -> Mapping[str, Handle] | None:
    given = getattr(executor, side, None)
    if given is None:
        return None
    if not isinstance(given, Sequence) or not all(isinstance(handle, Handle) for handle in given):
        raise InvalidValue(f"{side} of the {what}", given, "a list of handles, or None to leave them open")
    handles = {handle.name: handle for handle in given}
    if len(handles) < len(given):
        raise InvalidValue(f"{side} of the {what}", [handle.name for handle in given], "handles of different names")
    return handles
