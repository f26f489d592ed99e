"""The tools that are linked into a handle, as one chain.

A link brings a tool, an agent, a list of these, or a whole chain such as a server's. A name is there once, whoever
brings it.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from penstock.agents.messages import ToolCall, ToolResult
from penstock.agents.tools import MAX_NAME, Tool, ToolChain, Tools, ToolSpec, as_tool
from penstock.errors import InvalidValue
from penstock.nodes.parts.services import NotOffered, named
from penstock.runtime.context import ExecutionContext
from penstock.runtime.graphs.flow_context import FlowContext
from penstock.tracing.events import ToolCallTrace

T = TypeVar("T")

UNUSABLE = re.compile(r"[^A-Za-z0-9_-]+")


def tool_name(wanted: str) -> str:
    """A name as every model accepts it."""
    return UNUSABLE.sub("_", wanted).strip("_")[:64] or "node"


def offered(name: str, context: FlowContext) -> Any:
    """The tool that a run offers under that name."""
    tools = named(context, "tools")
    if name not in tools:
        raise NotOffered("tool", name, tools)
    return tools[name]


def gathered(linked: Iterable[Any]) -> ToolChain:
    """One chain of all that is linked."""
    tools: list[Any] = []
    chains: list[ToolChain] = []
    for one in _flat(linked):
        if isinstance(one, ToolChain):
            chains.append(one)
        else:
            tools.append(one)
    if len(chains) == 1 and not tools:
        return chains[0]
    return Chained([Tools(tools), *chains]) if chains else Tools(tools)


def pieces(linked: Any) -> list[Any]:
    """What is linked, one by one: tools as they are, chains as they are."""
    return [one if isinstance(one, Tool | ToolChain) else as_tool(one) for one in _flat([linked])]


def _flat(linked: Iterable[Any]) -> Iterable[Any]:
    for one in linked:
        if isinstance(one, list | tuple):
            yield from _flat(one)
        else:
            yield one


class Chained:
    """Several chains as one, or some of their tools alone: each call goes to the chain that has the tool."""

    __slots__ = ("_by_name", "specs")

    def __init__(self, chains: Sequence[ToolChain], only: Iterable[str] | None = None) -> None:
        found: dict[str, tuple[ToolSpec, ToolChain]] = {}
        for chain in chains:
            for spec in chain.specs:
                if spec.name in found:
                    raise InvalidValue("tools", spec.name, "tools of different names")
                found[spec.name] = (spec, chain)
        self._by_name = found if only is None else _some(found, only)
        self.specs: tuple[ToolSpec, ...] = tuple(spec for spec, _ in self._by_name.values())

    def execute(self, context: ExecutionContext, call: ToolCall) -> Awaitable[ToolResult]:
        """Run one call; the model is told of one that nobody has."""
        if call.name not in self._by_name:
            return self._refused(context, call)
        return self._by_name[call.name][1].execute(context, call)

    async def _refused(self, context: ExecutionContext, call: ToolCall) -> ToolResult:
        name = call.name[:MAX_NAME]
        told = f"there is no tool {name!r}; there are: {', '.join(self._by_name) or 'none'}"
        context.record_event(ToolCallTrace(name=name, status="fail", error="UnknownTool", stop_reason=told[:500]))
        return ToolResult(call.id, name, told, is_error=True)


def _some(found: Mapping[str, T], names: Iterable[str]) -> dict[str, T]:
    for name in names:
        if name not in found:
            raise NotOffered("tool", name, found)
    return {name: found[name] for name in names}
