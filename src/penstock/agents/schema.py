"""JSON Schema in both directions: generated from Python types, and used to check values.

Problems are described for the model that wrote the value: where it is wrong, and what is expected there. Python types
are left to pydantic, which is imported on first use. For a schema given as JSON this module checks the keywords it
knows (types, properties, items, enums, sizes) and ignores all others.
"""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from penstock.errors import InvalidValue
from penstock.runtime.context import ExecutionContext

if TYPE_CHECKING:
    from pydantic import ValidationError

MAX_PROBLEMS = 10
"""Maximum number of reported problems."""
MAX_DEPTH = 64

Problems = list[str]
"""One line for each problem; empty if there is none."""


class Parameters:
    """The parameters of a function, as a schema for a model."""

    __slots__ = ("_invalid", "_validate", "context_name", "schema")

    def __init__(self, fn: Callable[..., Any], name: str) -> None:
        from pydantic import ValidationError

        fields, self.context_name, extra = _fields(fn, name)
        adapter = _adapter(fn, name, fields, extra)
        self._invalid = ValidationError
        self._validate: Callable[[Any], dict[str, Any]] = adapter.validator.validate_python
        self.schema: Mapping[str, Any] = _with_defaults(_tidy(adapter.json_schema()), fn)

    def read(self, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], Problems]:
        """Return the arguments in the types of the signature, or the problems."""
        try:
            return self._validate(arguments), []
        except self._invalid as error:
            return {}, problems_of(error)


def _fields(fn: Callable[..., Any], name: str) -> tuple[dict[str, Any], str | None, bool]:
    """The types of the parameters, the name of the one that takes the context, and whether others are accepted."""
    hints = _hints(fn)
    fields: dict[str, Any] = {}
    context_name, extra = None, False
    for known, parameter in inspect.signature(fn).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            extra = True
        elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise InvalidValue(f"parameter {known!r} of tool {name!r}", str(parameter), "one that is passed by name")
        elif _is_context(hints.get(known, parameter.annotation)):
            context_name = known
        else:
            hint = hints.get(known, Any)
            fields[known] = hint if parameter.default is parameter.empty else typing.NotRequired[hint]
    return fields, context_name, extra


def _is_context(hint: object) -> bool:
    if hint is ExecutionContext or hint == "ExecutionContext":
        return True
    return ExecutionContext in typing.get_args(hint)


def _hints(fn: Callable[..., Any]) -> dict[str, Any]:
    """The types of the parameters, without annotations that cannot be resolved."""
    target = fn if inspect.isroutine(fn) else getattr(fn, "__call__", fn)  # noqa: B004  an object that is called
    try:
        return typing.get_type_hints(target, include_extras=True)
    except Exception:
        annotations = getattr(inspect.unwrap(target), "__annotations__", {})
        return {known: hint for known, hint in annotations.items() if not isinstance(hint, str)}


def _adapter(fn: Callable[..., Any], name: str, fields: Mapping[str, Any], extra: bool) -> Any:
    """A validator that returns a dict: a parameter may have any name, and defaults are left to the function."""
    from pydantic import ConfigDict, PydanticUserError, TypeAdapter, with_config
    from pydantic.errors import PydanticSchemaGenerationError
    from typing_extensions import TypedDict

    arguments: Any = TypedDict(name, fields)  # type: ignore[misc]  # the names are known only at run time
    try:
        return TypeAdapter(with_config(ConfigDict(extra="allow" if extra else "forbid"))(arguments))
    except (PydanticUserError, PydanticSchemaGenerationError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise InvalidValue(f"the signature of tool {name!r}", fn, f"made of types JSON can carry ({reason})") from error


def _with_defaults(schema: Any, fn: Callable[..., Any]) -> Any:
    """Add the defaults that JSON can represent, so that the model may omit them."""
    for name, described in (schema.get("properties") or {}).items():
        default = inspect.signature(fn).parameters[name].default
        if default is None or type(default) in (bool, int, float, str):
            described["default"] = default
    return schema


def _tidy(schema: Any) -> Any:
    """Remove the titles that pydantic generates: they would be paid for in every request."""
    if isinstance(schema, list):
        return [_tidy(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    tidied = {}
    for key, value in schema.items():
        if key in ("properties", "$defs") and isinstance(value, dict):
            tidied[key] = {name: _tidy(item) for name, item in value.items()}
        elif key != "title" or not isinstance(value, str):
            tidied[key] = value if key in ("default", "enum", "const", "examples") else _tidy(value)
    return tidied


def problems_of(error: ValidationError) -> Problems:
    """The errors of pydantic, described for a model."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    lines = [f"{_place(problem['loc'])}: {problem['msg']}" for problem in found[:MAX_PROBLEMS]]
    return [*lines, f"… and {len(found) - MAX_PROBLEMS} more"] if len(found) > MAX_PROBLEMS else lines


def _place(at: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in at).lstrip(".") or "the whole"


def read_json(text: str) -> tuple[Any, str | None]:
    """Return the value of a JSON text, or the problem with it."""
    try:
        return json.loads(text), None
    except json.JSONDecodeError as error:
        return None, f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
    except (RecursionError, ValueError) as error:  # nested too deep; a number of too many digits
        return None, f"not JSON that can be parsed: {type(error).__name__}"


# Schemas given as JSON.

_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}

_KINDS = ("null", "boolean", "integer", "number", "string", "array", "object")


def check(value: Any, schema: Mapping[str, Any]) -> Problems:
    """The problems of `value` by the keywords of `schema` that this module knows."""
    found: Problems = []
    for problem in _check(value, schema, schema, "", 0):
        found.append(problem)
        if len(found) == MAX_PROBLEMS:
            break
    return found


def _check(value: Any, schema: Any, root: Mapping[str, Any], at: str, depth: int) -> Iterator[str]:
    if depth > MAX_DEPTH or not isinstance(schema, Mapping):
        return
    if isinstance(ref := schema.get("$ref"), str):
        yield from _check(value, _referred(ref, root), root, at, depth + 1)
        return
    where = at.lstrip(".") or "the whole"
    kinds = schema.get("type")
    if kinds is not None and not any(_is(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        yield f"{where}: expected {kinds if isinstance(kinds, str) else ' or '.join(kinds)}, not {_kind(value)}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where}: expected one of {', '.join(map(json.dumps, schema['enum']))}"
    if "const" in schema and value != schema["const"]:
        yield f"{where}: expected {json.dumps(schema['const'])}"
    if isinstance(options := schema.get("anyOf") or schema.get("oneOf"), list):
        failed = [list(_check(value, option, root, at, depth + 1)) for option in options]
        if all(failed):
            yield min(failed, key=len)[0]
    yield from _sizes(value, schema, where)
    if isinstance(value, dict):
        yield from _members(value, schema, root, at, depth)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _check(item, schema.get("items"), root, f"{at}[{number}]", depth + 1)


def _members(value: dict[str, Any], schema: Mapping[str, Any], root: Any, at: str, depth: int) -> Iterator[str]:
    known = schema.get("properties") or {}
    for name in schema.get("required") or ():
        if name not in value:
            yield f"{f'{at}.{name}'.lstrip('.')}: missing"
    for name, item in value.items():
        if name in known:
            yield from _check(item, known[name], root, f"{at}.{name}", depth + 1)
        elif schema.get("additionalProperties") is False:
            yield f"{f'{at}.{name}'.lstrip('.')}: not a known name; known are {', '.join(known) or 'none'}"
        else:
            yield from _check(item, schema.get("additionalProperties"), root, f"{at}.{name}", depth + 1)


def _sizes(value: Any, schema: Mapping[str, Any], where: str) -> Iterator[str]:
    sized = isinstance(value, str | list)
    length = len(value) if sized else None
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else None
    for word, measured, is_least in (
        ("minLength" if isinstance(value, str) else "minItems", length, True),
        ("maxLength" if isinstance(value, str) else "maxItems", length, False),
        ("minimum", number, True),
        ("maximum", number, False),
    ):
        bound = schema.get(word)
        if measured is None or not isinstance(bound, int | float):
            continue
        if measured < bound if is_least else measured > bound:
            yield f"{where}: expected at {'least' if is_least else 'most'} {bound}{' long' if sized else ''}"


def _referred(ref: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for part in ref.removeprefix("#").strip("/").split("/"):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _is(value: Any, kind: object) -> bool:
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES.get(str(kind), (object,)))


def _kind(value: Any) -> str:
    return next((kind for kind in _KINDS if _is(value, kind)), type(value).__name__)
