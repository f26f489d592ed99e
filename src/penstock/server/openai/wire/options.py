"""Options of a request for the model: tools of the client, a tool choice, settings, an output format.

Every parameter is applied or refused by name, never dropped. A parameter without effect on the answer is not read here,
and is listed in `ignored`. A parameter at its neutral value, such as a penalty of 0, sets nothing. Knows no graphs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.agents.tools import TOOL_NAME
from penstock.errors import InvalidValue, PenstockError
from penstock.server.openai.wire.request import ChatCompletionBody, InvalidPart, ResponseBody, ResponseFormat

MAX_TOOLS = 128
MAX_CHARACTERS = 200_000
"""Maximum size of the tools and the output format together, in characters of JSON: they are stored with the run."""
MAX_SCHEMA_DEPTH = 40
MAX_SHOWN = 10
"""Maximum number of names in a message."""
TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
OBJECT: Mapping[str, Any] = {"type": "object"}

UNSUPPORTED: Mapping[str, Callable[[Any], bool]] = {
    "logit_bias": bool,
    "logprobs": bool,
    "top_logprobs": bool,
    "modalities": lambda value: value != ["text"],
    "audio": bool,
    "web_search_options": lambda _: True,
    "functions": bool,
    "function_call": lambda value: value not in ("none", "auto"),
    "verbosity": lambda value: value != "medium",
    "max_tool_calls": lambda _: True,
    "prompt": bool,
}
"""Parameters that this server cannot apply, each with a test for values that would change the answer."""
INSTEAD: Mapping[str, str] = {
    "functions": "; send `tools`",
    "function_call": "; send `tool_choice`",
    "max_tool_calls": "; send `penstock.limits`",
}


class UnsupportedParameter(PenstockError):
    """A parameter of a request cannot be applied."""

    def __init__(self, param: str, why: str) -> None:
        self.param = param
        super().__init__(f"{param} is not supported: {why}")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a request for the model."""

    tools: tuple[dict[str, Any], ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of `ModelSettings`; the choice of a tool by name is `{"name": …}`."""
    schema: Mapping[str, Any] | None = None
    is_strict: bool = False
    params: dict[str, str] = field(default_factory=dict)
    """The parameter of the request that sets each of these: a field of `ModelSettings`, `tools` or `schema`."""


def read_options(body: ChatCompletionBody | ResponseBody) -> Options:
    """Return the options of the request; raise UnsupportedParameter or InvalidValue with the parameter."""
    _check_supported(body)
    given = {**_sampling(body), **_lengths(body)}
    settings = {setting: value for setting, (_, value) in given.items()}
    params = {setting: param for setting, (param, _) in given.items()}
    tools, choice = _tools(body), _choice(body)
    names = [tool["name"] for tool in tools]
    if isinstance(choice, dict) and choice["name"] not in names:
        raise InvalidValue("tool_choice", choice["name"], f"one of the tools: {', '.join(names[:MAX_SHOWN]) or 'none'}")
    if choice == "required" and not tools:
        raise InvalidValue("tool_choice", choice, "auto or none in a request without tools")
    if choice == "none":
        tools = ()  # the model could call tools that it is offered
    if tools:
        params["tools"] = "tools"
        if choice not in (None, "auto"):
            settings["tool_choice"], params["tool_choice"] = choice, "tool_choice"
        if body.parallel_tool_calls is False:
            settings["parallel_tool_calls"], params["parallel_tool_calls"] = False, "parallel_tool_calls"
    where, schema, is_strict = _format(body)
    if schema is not None:
        params["schema"] = where
        if is_strict:
            params["output_schema"] = where
    if len(json.dumps([tools, schema])) > MAX_CHARACTERS:
        expected = f"tools and an output format of at most {MAX_CHARACTERS} characters of JSON"
        raise InvalidValue("tools" if tools else where, "too long", expected)
    return Options(tools, settings, schema, is_strict, params)


def _check_supported(body: ChatCompletionBody | ResponseBody) -> None:
    given = dict(body.model_extra or {})
    if isinstance(body, ResponseBody) and body.text is not None and body.text.verbosity is not None:
        given["text.verbosity"] = body.text.verbosity
    for param, value in given.items():
        changes_answer = UNSUPPORTED.get(param.removeprefix("text."))
        if value is not None and changes_answer is not None and changes_answer(value):
            raise UnsupportedParameter(param, f"this server has no such option{INSTEAD.get(param, '')}")


def _sampling(body: ChatCompletionBody | ResponseBody) -> dict[str, tuple[str, Any]]:
    """Return the settings that the request sets, each with its parameter; neutral values set nothing."""
    found: dict[str, tuple[str, Any]] = {"temperature": ("temperature", body.temperature)}
    found["top_p"] = ("top_p", None if body.top_p == 1 else body.top_p)
    if isinstance(body, ChatCompletionBody):
        for name in ("presence_penalty", "frequency_penalty"):
            found[name] = (name, getattr(body, name) or None)
        found["seed"] = ("seed", body.seed)
        found["stop"] = ("stop", [body.stop] if isinstance(body.stop, str) else body.stop or None)
        found["reasoning_effort"] = ("reasoning_effort", body.reasoning_effort)
    elif body.reasoning is not None:
        found["reasoning_effort"] = ("reasoning.effort", body.reasoning.effort)
    return {setting: given for setting, given in found.items() if given[1] is not None}


def _lengths(body: ChatCompletionBody | ResponseBody) -> dict[str, tuple[str, Any]]:
    if isinstance(body, ResponseBody):
        given = {"max_output_tokens": body.max_output_tokens}
    else:
        given = {"max_completion_tokens": body.max_completion_tokens, "max_tokens": body.max_tokens}
    known = [(value, param) for param, value in given.items() if value is not None]
    if not known:
        return {}
    value, param = min(known)
    return {"max_output_tokens": (param, value)}


def _tools(body: ChatCompletionBody | ResponseBody) -> tuple[dict[str, Any], ...]:
    given = body.tools or []
    if len(given) > MAX_TOOLS:
        raise InvalidValue("tools", len(given), f"at most {MAX_TOOLS} tools")
    tools: dict[str, dict[str, Any]] = {}
    for at, tool in enumerate(given):
        where = f"tools.{at}"
        if tool.get("type") != "function":
            what = f"tools of type {str(tool.get('type'))[:40]!r} do not run here; only functions of yours do"
            raise UnsupportedParameter(f"{where}.type", what)
        inside: Any = tool
        at_function = where
        if isinstance(body, ChatCompletionBody):
            inside, at_function = tool.get("function"), f"{where}.function"
        read = _function(inside, at_function)
        if read["name"] in tools:
            problem = f"there are two tools called {read['name']!r}; rename one"
            raise InvalidPart(f"{at_function}.name", read["name"], problem)
        tools[read["name"]] = read
    return tuple(tools.values())


def _function(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise InvalidValue(where, given, "an object with name, description and parameters")
    name, description = given.get("name"), given.get("description")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise InvalidValue(f"{where}.name", name, "1 to 64 letters, digits, _ or -")
    if not isinstance(description, str | None):
        raise InvalidValue(f"{where}.description", description, "a text")
    parameters = {**OBJECT, "properties": {}} if given.get("parameters") in (None, {}) else given["parameters"]
    _check_schema(parameters, f"{where}.parameters")
    if parameters.get("type", "object") != "object":
        raise InvalidValue(f"{where}.parameters.type", parameters["type"], "object: arguments have names")
    return {"name": name, "description": description or "", "parameters": parameters}


def _choice(body: ChatCompletionBody | ResponseBody) -> str | dict[str, str] | None:
    choice = body.tool_choice
    if choice is None or choice in ("auto", "none", "required"):
        return choice
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        named = choice.get("function") if isinstance(body, ChatCompletionBody) else choice
        name = named.get("name") if isinstance(named, Mapping) else None
        if isinstance(name, str):
            return {"name": name}
    elif isinstance(choice, Mapping) and isinstance(choice.get("type"), str):
        what = f"a choice of type {choice['type'][:40]!r} cannot be applied; use auto, none, required or a function"
        raise UnsupportedParameter("tool_choice", what)
    raise InvalidValue("tool_choice", choice, "auto, none, required, or a function by its name")


def _format(body: ChatCompletionBody | ResponseBody) -> tuple[str, Mapping[str, Any] | None, bool]:
    """Return the parameter of the output format, its JSON Schema if there is one, and whether it is strict."""
    form: ResponseFormat | None
    if isinstance(body, ChatCompletionBody):
        where, form = "response_format", body.response_format
    else:
        where, form = "text.format", body.text.format if body.text else None
    if form is None or form.type == "text":
        return where, None, False
    if form.type == "json_object":
        return where, OBJECT, False
    if form.type != "json_schema":
        raise UnsupportedParameter(f"{where}.type", "use text, json_object or json_schema")
    if isinstance(body, ResponseBody):
        schema, strict, inside = form.schema_, form.strict, where
    else:
        given = form.json_schema
        inside = f"{where}.json_schema"
        if given is None:
            raise InvalidValue(inside, None, "an object with name and schema")
        schema, strict = given.get("schema"), given.get("strict")
    if not isinstance(strict, bool | None):
        raise InvalidValue(f"{inside}.strict", strict, "true or false")
    _check_schema(schema, f"{inside}.schema")
    assert isinstance(schema, Mapping)
    return where, schema, strict is True


def _check_schema(schema: Any, where: str) -> None:
    if not isinstance(schema, Mapping):
        raise InvalidValue(where, schema, "a JSON Schema, which is an object")
    for wrong in _schema_problems(schema, where, 0):
        raise wrong


def _schema_problems(schema: Any, where: str, depth: int) -> Iterator[InvalidValue]:
    """Yield the problems of the keywords that the check of an answer reads."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        yield InvalidValue(where, schema, "a JSON Schema: an object, true or false")
        return
    if depth > MAX_SCHEMA_DEPTH:
        yield InvalidPart(where, schema, f"the JSON Schema has too many levels; use at most {MAX_SCHEMA_DEPTH}")
        return
    types = schema.get("type")
    listed = types if isinstance(types, list) else [types]
    if "type" in schema and not (listed and all(isinstance(one, str) and one in TYPES for one in listed)):
        yield InvalidValue(f"{where}.type", types, f"one or several of {', '.join(sorted(TYPES))}")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        yield InvalidValue(f"{where}.required", required, "a list of names")
    if not isinstance(schema.get("enum", []), list):
        yield InvalidValue(f"{where}.enum", schema["enum"], "a list of values")
    if not isinstance(schema.get("$ref", ""), str):
        yield InvalidValue(f"{where}.$ref", schema["$ref"], "a text such as #/$defs/name")
    for keyword in ("properties", "$defs", "definitions"):
        inside = schema.get(keyword, {})
        if not isinstance(inside, Mapping):
            yield InvalidValue(f"{where}.{keyword}", inside, "an object of JSON Schemas by name")
            continue
        for name, one in inside.items():
            yield from _schema_problems(one, f"{where}.{keyword}.{name}", depth + 1)
    for keyword in ("items", "additionalProperties", "not"):
        if keyword in schema:
            yield from _schema_problems(schema[keyword], f"{where}.{keyword}", depth + 1)
    for keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
        several = schema.get(keyword, [])
        if not isinstance(several, list):
            yield InvalidValue(f"{where}.{keyword}", several, "a list of JSON Schemas")
            continue
        for at, one in enumerate(several):
            yield from _schema_problems(one, f"{where}.{keyword}.{at}", depth + 1)
