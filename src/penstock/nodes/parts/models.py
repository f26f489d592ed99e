"""Which model a node asks: one that the run offers by name, one a provider has, or a script written in the graph.

A script is a list of replies, for examples and tests: text, or a tool call. It begins anew each time the node runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from penstock.agents.messages import ToolCall
from penstock.agents.model import Model, ModelSettings
from penstock.agents.scripted import ScriptedModel
from penstock.errors import PenstockError
from penstock.kernel.document import parse_part
from penstock.kernel.executor import ExecutorRegistry
from penstock.kernel.graph import GraphInvalid, GraphSpec
from penstock.nodes.parts.services import named, usual
from penstock.nodes.parts.settings import Checked, Data, Finding, Json, Name, Sized, Text, Within
from penstock.runtime.graphs.flow_context import FlowContext

MAX_REPLIES = 1_000

MaxOutputTokens = Annotated[int, Within(1, 10_000_000)]
Temperature = Annotated[float, Within(0, 10)]


@dataclass(frozen=True, slots=True)
class CallData(Data):
    """A reply that calls a tool."""

    tool: Name
    arguments: Json


@dataclass(frozen=True, slots=True)
class ScriptData(Data):
    """A model that says what it is told to say."""

    script: Annotated[list[Text | CallData | list[CallData]], Sized(0, MAX_REPLIES)]


ModelData = Name | ScriptData


class ModelUnknown(PenstockError):
    """A node names a model that nobody has."""

    def __init__(self, name: str, known: list[str], why: str) -> None:
        self.name = name
        offered = ", ".join(known) or "none"
        super().__init__(f"there is no model {name!r}: services['models'] has {offered}, and {why}")


async def model_for(data: ModelData, context: FlowContext) -> Model:
    """The model that data asks for."""
    if isinstance(data, ScriptData):
        return ScriptedModel([_reply(one, str(at)) for at, one in enumerate(data.script)])
    offered = named(context, "models")
    if data in offered:
        found = offered[data]
    else:
        found = await _provided(data, sorted(map(str, offered))[:20])
    if not isinstance(found, Model):
        raise ModelUnknown(data, sorted(map(str, offered))[:20], f"what there is, is a {type(found).__name__}")
    return found


def named_models(graph: GraphSpec, executors: ExecutorRegistry, at: str = "$") -> Iterator[Finding]:
    """Where nodes name a model, and which; graphs inside nodes are looked into, and data that is wrong is passed over.

    By the settings that all node types here have in common: a model is `model`, a graph inside is `graph`.
    """
    naming = [(number, node) for number, node in enumerate(graph.nodes) if "model" in node.data or "graph" in node.data]
    by_type = {one: executors[one] for one in {node.type for _, node in naming} if one in executors}
    for number, node in naming:
        executor = by_type.get(node.type)
        read = executor.settings.read_or_none(node.data) if isinstance(executor, Checked) else None
        place = f"{at}.nodes[{number}].data"
        if isinstance(name := getattr(read, "model", None), str):
            yield f"{place}.model", name
        if isinstance(inside := getattr(read, "graph", None), dict):
            try:
                nested = parse_part(inside)
            except GraphInvalid:
                continue
            yield from named_models(nested, executors, f"{place}.graph")


def settings(max_output_tokens: int | None, temperature: float | None) -> ModelSettings:
    """How a model is to answer."""
    return ModelSettings(max_output_tokens=max_output_tokens, temperature=temperature)


async def _provided(name: str, known: list[str]) -> Any:
    if "://" in name:
        # Whoever writes a graph would choose where requests, and a key of ours with them, are sent.
        raise ModelUnknown(name, known, "a graph names a model, and never an address: offer it there by a name")
    try:
        provider = await usual("penstock.providers.models", "model")
        return await asyncio.to_thread(provider, name)  # loads the library of the provider
    except ImportError as error:
        raise ModelUnknown(name, known, f"providers cannot be loaded: {error}") from error
    except ValueError as error:
        raise ModelUnknown(name, known, f"of the providers: {error}") from error


def _reply(one: str | CallData | list[CallData], number: str) -> Any:
    if isinstance(one, str):
        return one
    if isinstance(one, CallData):
        return ToolCall(number, one.tool, one.arguments)
    return [ToolCall(f"{number}-{at}", call.tool, call.arguments) for at, call in enumerate(one)]
