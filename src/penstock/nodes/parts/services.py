"""The run's services as nodes use them: by name, models and tools.

A missing service may have a default, which is in a higher-level package and is imported by name when it is needed, so
that nodes do not depend on that package.

A model is one that the run offers by name, one of a provider, or a script written in the graph. A script is a list of
replies, for examples and tests: text, or a tool call. It restarts each time the node runs.

A link into a handle for tools provides a tool, an agent, a list of these, or a whole chain such as a server's. Names
must be unique across all links.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Annotated, Any, TypeVar

from penstock.agents.messages import ToolCall, ToolResult
from penstock.agents.model import Model, ModelSettings
from penstock.agents.scripted import ScriptedModel
from penstock.agents.tools import Tool, ToolChain, Tools, ToolSpec, as_tool, refuse, unknown_tool
from penstock.errors import InvalidValue, PenstockError
from penstock.runtime.context import ExecutionContext
from penstock.runtime.graphs.graph_runtime import FlowContext, GraphRuntime
from penstock.runtime.graphs.settings import Data, Json, Name, Sized, Text, Within

T = TypeVar("T")

ALLOWED_MODELS = "allowed_models"
"""Service with patterns of the providers' models that graphs may name; without it, they may name all."""

UNUSABLE = re.compile(r"[^A-Za-z0-9_-]+")

MAX_REPLIES = 1_000

MaxOutputTokens = Annotated[int, Within(1, 10_000_000)]
Temperature = Annotated[float, Within(0, 10)]


class ServiceMissing(PenstockError):
    """A node needs a service that the run does not have."""

    def __init__(self, service: str, needed_for: str, hint: str) -> None:
        self.service = service
        super().__init__(f"{needed_for} needs services[{service!r}]: {hint}")


class NotOffered(PenstockError):
    """A node names something that a service does not have."""

    def __init__(self, what: str, name: str, known: Mapping[str, Any]) -> None:
        self.name = name
        listed = ", ".join(sorted(map(str, known))[:20]) or "none"
        super().__init__(f"there is no {what} {name!r}; there are: {listed}")


def service_mapping(context: FlowContext, service: str) -> Mapping[str, Any]:
    """Return the mapping of names that a service offers; empty if the run has no such service."""
    found = context.services.get(service)
    if found is None:
        return {}
    if not isinstance(found, (dict, Mapping)):  # checking for dict first is faster than the abstract class
        raise ServiceMissing(service, "a node", f"it must be a mapping by name, not a {type(found).__name__}")
    return found


async def import_default(module: str, name: str) -> Any:
    """Import a name from a higher-level module; ImportError if it does not exist or cannot be loaded."""
    found = await asyncio.to_thread(import_module, module)  # reads files, possibly of a whole library
    try:
        return getattr(found, name)
    except AttributeError:
        raise ImportError(f"{module} has no {name}") from None


def runtime_of(context: FlowContext) -> GraphRuntime:
    """Return the runtime of the graph that contains the node."""
    assert context.runtime is not None, "nodes run in a graph"
    return context.runtime


# Models.


@dataclass(frozen=True, slots=True)
class CallData(Data):
    """A reply that calls a tool."""

    tool: Name
    arguments: Json


@dataclass(frozen=True, slots=True)
class ScriptData(Data):
    """A model with scripted replies."""

    script: Annotated[list[Text | CallData | list[CallData]], Sized(0, MAX_REPLIES)]


ModelData = Name | ScriptData


class ModelUnknown(PenstockError):
    """A node names a model that neither the run nor a provider has."""

    def __init__(self, name: str, known: list[str], why: str) -> None:
        self.name = name
        offered = ", ".join(known) or "none"
        super().__init__(f"there is no model {name!r}: services['models'] has {offered}, and {why}")


class ModelNotAllowed(PenstockError):
    """A node names a provider's model that the operator does not allow graphs to name."""

    def __init__(self, name: str, allowed: Iterable[str]) -> None:
        self.name = name
        listed = ", ".join(allowed) or "none"
        super().__init__(f"graphs may not name the model {name!r} here; of providers' models they may name: {listed}")


def check_allowed(name: str, services: Any) -> None:
    """Raise ModelNotAllowed if graphs may not name this model of a provider."""
    allowed = services.get(ALLOWED_MODELS)
    if allowed is not None and not any(fnmatchcase(name, pattern) for pattern in allowed):
        raise ModelNotAllowed(name, allowed)


async def model_for(data: ModelData, context: FlowContext) -> Model:
    """Return the model that the data selects; ModelNotAllowed for one that graphs may not name."""
    offered = service_mapping(context, "models")
    if isinstance(data, str) and data not in offered:
        check_allowed(data, context.services)
    return await model_among(data, offered)


async def model_among(data: ModelData, offered: Mapping[str, Any]) -> Model:
    """Return the model that the data selects: a script, one of those that are offered by name, or a provider's."""
    if isinstance(data, ScriptData):
        return ScriptedModel([_reply(reply, str(at)) for at, reply in enumerate(data.script)])
    if data in offered:
        found = offered[data]
    else:
        found = await _provided(data, sorted(map(str, offered))[:20])
    if not isinstance(found, Model):
        raise ModelUnknown(data, sorted(map(str, offered))[:20], f"this one is a {type(found).__name__}, not a Model")
    return found


def model_settings(max_output_tokens: int | None, temperature: float | None) -> ModelSettings:
    """Return the settings of a model request."""
    return ModelSettings(max_output_tokens=max_output_tokens, temperature=temperature)


async def _provided(name: str, known: list[str]) -> Any:
    if "://" in name:
        # The author of a graph could otherwise choose where requests, and our API key with them, are sent.
        raise ModelUnknown(name, known, "a graph may not contain the address of a model: add it there under a name")
    try:
        provider = await import_default("penstock.providers.models", "model")
        return await asyncio.to_thread(provider, name)  # imports the library of the provider
    except ImportError as error:
        raise ModelUnknown(name, known, f"providers cannot be loaded: {error}") from error
    except ValueError as error:
        raise ModelUnknown(name, known, f"no provider has it: {error}") from error


def _reply(reply: str | CallData | list[CallData], number: str) -> Any:
    if isinstance(reply, str):
        return reply
    if isinstance(reply, CallData):
        return ToolCall(number, reply.tool, reply.arguments)
    return [ToolCall(f"{number}-{at}", call.tool, call.arguments) for at, call in enumerate(reply)]


# Tools.


def tool_name(wanted: str) -> str:
    """Return the name in a form that every model accepts."""
    return UNUSABLE.sub("_", wanted).strip("_")[:64] or "node"


def offered_tool(name: str, context: FlowContext) -> Any:
    """Return the tool that the run offers under that name; NotOffered if there is none."""
    tools = service_mapping(context, "tools")
    if name not in tools:
        raise NotOffered("tool", name, tools)
    return tools[name]


def combine_tools(linked: Iterable[Any]) -> ToolChain:
    """Return one chain of all linked tools."""
    tools: list[Any] = []
    chains: list[ToolChain] = []
    for tool in _flat(linked):
        if isinstance(tool, ToolChain):
            chains.append(tool)
        else:
            tools.append(tool)
    if len(chains) == 1 and not tools:
        return chains[0]
    return CombinedTools([Tools(tools), *chains]) if chains else Tools(tools)


def flatten_tools(linked: Any) -> list[Any]:
    """Return the linked tools and chains as a flat list."""
    return [tool if isinstance(tool, Tool | ToolChain) else as_tool(tool) for tool in _flat([linked])]


def _flat(linked: Iterable[Any]) -> Iterable[Any]:
    for item in linked:
        if isinstance(item, list | tuple):
            yield from _flat(item)
        else:
            yield item


class CombinedTools:
    """Several chains as one, or a selection of their tools: each call goes to the chain that has the tool."""

    __slots__ = ("_by_name", "specs")

    def __init__(self, chains: Sequence[ToolChain], only: Iterable[str] | None = None) -> None:
        found: dict[str, tuple[ToolSpec, ToolChain]] = {}
        for chain in chains:
            for spec in chain.specs:
                if spec.name in found:
                    raise InvalidValue("tools", spec.name, "tools of different names")
                found[spec.name] = (spec, chain)
        self._by_name = found if only is None else _selected(found, only)
        self.specs: tuple[ToolSpec, ...] = tuple(spec for spec, _ in self._by_name.values())

    def execute(self, context: ExecutionContext, call: ToolCall) -> Awaitable[ToolResult]:
        """Run one call; an unknown tool is returned to the model as a tool error."""
        if call.name not in self._by_name:
            return self._refused(context, call)
        return self._by_name[call.name][1].execute(context, call)

    async def _refused(self, context: ExecutionContext, call: ToolCall) -> ToolResult:
        return refuse(context, call, "UnknownTool", unknown_tool(call.name, self._by_name))


def _selected(found: Mapping[str, T], names: Iterable[str]) -> dict[str, T]:
    for name in names:
        if name not in found:
            raise NotOffered("tool", name, found)
    return {name: found[name] for name in names}
