"""Contain the tools that are passed to an agent framework.

A tool is never changed: the framework gets a copy whose entry point makes a call of the run. `TOOL_TYPES` names the
entry point of each framework's tool type. The framework's work inside it (validation, callbacks, its own error
handling) stays the same; a stop of the run is raised outside of it, where the framework cannot turn it into an answer
for the model.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import importlib.metadata
import inspect
import sys
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from penstock import checks
from penstock.adapters.calls import acall_tool, call_tool, call_tool_on_worker
from penstock.errors import InvalidValue
from penstock.runtime.context import ExecutionContext

Function = Callable[..., Any]
Shown = Callable[[tuple[Any, ...], dict[str, Any]], object]
"""Returns the recorded input of a call, from its arguments."""


def contained_tools(run: ExecutionContext, tools: Iterable[Any]) -> list[Any]:
    """Return copies of the tools whose calls are calls of the run: counted, recorded, and stopped with it.

    Accepts functions, sync and async, and the tools of LangChain, pydantic-ai (toolsets too), the OpenAI Agents SDK,
    agno (toolkits too), smolagents and CrewAI. Tools that are run by the model provider are part of a model call: pass
    them to the framework as they are.
    """
    checks.instance("run", run, ExecutionContext, "an ExecutionContext, such as one of `contain(…)`")
    if isinstance(tools, str) or not isinstance(tools, Iterable):
        raise InvalidValue("tools", tools, "a list of tools")
    return [_contained(run, tool) for tool in tools]


def _contained(run: ExecutionContext, tool: Any) -> Any:
    for kind in TOOL_TYPES:
        if kind.matches(tool):
            kind.check(tool)
            return kind.wrap(run, tool)
    if not callable(tool) or isinstance(tool, type):
        raise InvalidValue("tools", tool, f"functions, or tools of {', '.join(_frameworks())}")
    return contained_function(run, tool, _name_of(tool), _arguments)


def contained_function(run: ExecutionContext, fn: Function, name: str, shown: Shown) -> Function:
    """Return a function with the signature of `fn` that makes a call of the run."""
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise InvalidValue("tools", fn, "functions that return a result; a generator cannot be stopped between pieces")
    if _is_async(fn):

        @functools.wraps(fn)
        async def acontained(*args: Any, **kwargs: Any) -> Any:
            return await acall_tool(run, name, shown(args, kwargs), functools.partial(fn, *args, **kwargs))

        return acontained

    @functools.wraps(fn)
    def contained(*args: Any, **kwargs: Any) -> Any:
        return call_tool(run, name, shown(args, kwargs), functools.partial(fn, *args, **kwargs))

    return contained


def _with_methods(run: ExecutionContext, tool: Any, methods: tuple[str, ...], shown: Shown) -> Any:
    """Return a copy of the tool, of a subclass whose `methods` make calls of the run."""
    own: type[Any] = type(tool)
    metaclass: Any = type(own)
    contained = {name: contained_function(run, getattr(own, name), tool.name, _of_method(shown)) for name in methods}
    same_name = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    tool = copy.copy(tool)
    # `object`: models of pydantic accept no assignment to `__class__`.
    object.__setattr__(tool, "__class__", metaclass(own.__name__, (own,), {**same_name, **contained}))
    return tool


# The input that is recorded.


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    return kwargs if not args else args if not kwargs else (*args, kwargs)


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    return args[0] if args else _arguments(args, kwargs)


def _second(args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    return args[1] if len(args) > 1 else _arguments((), kwargs)


def _of_method(shown: Shown) -> Shown:
    return lambda args, kwargs: shown(args[1:], kwargs)


# Frameworks.


def _langchain(run: ExecutionContext, tool: Any) -> Any:
    return _with_methods(run, tool, ("run", "arun"), _first)


def _pydantic_ai(run: ExecutionContext, tool: Any) -> Any:
    """Return a copy of a pydantic-ai tool: its schema has the function that is called."""
    schema = tool.function_schema
    shown = _second if schema.takes_ctx else _arguments
    tool = copy.copy(tool)
    tool.function_schema = replace(schema, function=contained_function(run, schema.function, tool.name, shown))
    return tool


def _pydantic_ai_toolset(run: ExecutionContext, toolset: Any) -> Any:
    """Return a toolset that wraps the toolset: copies that the framework makes of it for a run stay contained."""
    wrapper: Any = sys.modules["pydantic_ai.toolsets"].WrapperToolset

    class ContainedToolset(wrapper):  # type: ignore[misc]  # the base class is only known at run time
        async def call_tool(self, name: str, tool_args: dict[str, Any], ctx: Any, tool: Any) -> Any:
            work = functools.partial(super().call_tool, name, tool_args, ctx, tool)
            return await acall_tool(run, name, tool_args, work)

    return ContainedToolset(toolset)


def _openai_agents(run: ExecutionContext, tool: Any) -> Any:
    """Return a copy of a function tool.

    Its invoker returns an awaitable, and need not be an async function. For a sync function that awaitable waits for a
    thread of the event loop, which the end of the loop waits for: such an invoker gets a loop of its own, on a worker.
    """
    tool = copy.copy(tool)  # first: the copy may have an invoker of its own
    invoke = tool.on_invoke_tool
    function = getattr(tool, "__wrapped__", None)
    is_sync = function is not None and not _is_async(function)

    @functools.wraps(invoke)
    async def contained(context: Any, arguments: str) -> Any:
        work = functools.partial(invoke, context, arguments)
        if is_sync:
            return await call_tool_on_worker(run, tool.name, arguments, lambda: asyncio.run(_awaited(work)))
        return await acall_tool(run, tool.name, arguments, work)

    tool.on_invoke_tool = contained
    return tool


async def _awaited(work: Callable[[], Awaitable[Any]]) -> Any:
    return await work()


def _agno(run: ExecutionContext, tool: Any) -> Any:
    tool = copy.copy(tool)
    tool.entrypoint = contained_function(run, tool.entrypoint, tool.name, _arguments)
    return tool


def _agno_toolkit(run: ExecutionContext, toolkit: Any) -> Any:
    """Return a copy of a toolkit with contained functions."""
    toolkit = copy.copy(toolkit)
    for attribute in ("functions", "async_functions"):
        functions = getattr(toolkit, attribute)
        setattr(toolkit, attribute, type(functions)((name, _agno(run, fn)) for name, fn in functions.items()))
    return toolkit


def _smolagents(run: ExecutionContext, tool: Any) -> Any:
    return _with_methods(run, tool, ("__call__",), _arguments)


def _crewai(run: ExecutionContext, tool: Any) -> Any:
    """Return a copy of a CrewAI tool: one that was made from a function calls it from several methods."""
    if not hasattr(tool, "func"):
        return _with_methods(run, tool, ("_run", "_arun"), _arguments)
    tool = copy.copy(tool)
    tool.func = contained_function(run, tool.func, tool.name, _arguments)
    return tool


@dataclass(frozen=True, slots=True)
class ToolType:
    """A tool type of a framework, and how it is contained."""

    framework: str
    distribution: str
    module: str
    """Module that has the type; a tool can only exist once it is loaded."""
    name: str
    attributes: tuple[str, ...]
    """Attributes that containment uses."""
    wrap: Callable[[ExecutionContext, Any], Any]

    def matches(self, tool: Any) -> bool:
        known = getattr(sys.modules.get(self.module), self.name, None)
        return isinstance(known, type) and isinstance(tool, known)

    def check(self, tool: Any) -> None:
        """Raise if the installed version of the framework is not supported."""
        missing = [name for name in self.attributes if not hasattr(tool, name)]
        if missing:
            version = importlib.metadata.version(self.distribution)
            expected = f"of a supported version of {self.distribution}; {self.name} of {version} has no {missing[0]}"
            raise InvalidValue("tools", tool, f"{expected}, so upgrade it, or contain the function of the tool")


TOOL_TYPES = (
    ToolType("LangChain", "langchain-core", "langchain_core.tools", "BaseTool", ("run", "arun"), _langchain),
    ToolType("pydantic-ai", "pydantic-ai-slim", "pydantic_ai", "Tool", ("function_schema",), _pydantic_ai),
    ToolType(
        "pydantic-ai",
        "pydantic-ai-slim",
        "pydantic_ai.toolsets",
        "AbstractToolset",
        ("call_tool",),
        _pydantic_ai_toolset,
    ),
    ToolType("the OpenAI Agents SDK", "openai-agents", "agents", "FunctionTool", ("on_invoke_tool",), _openai_agents),
    ToolType("agno", "agno", "agno.tools.function", "Function", ("entrypoint",), _agno),
    ToolType("agno", "agno", "agno.tools", "Toolkit", ("functions", "async_functions"), _agno_toolkit),
    ToolType("smolagents", "smolagents", "smolagents", "Tool", ("forward",), _smolagents),
    ToolType("CrewAI", "crewai", "crewai.tools", "BaseTool", ("_run", "_arun"), _crewai),
)


def _frameworks() -> list[str]:
    return list(dict.fromkeys(kind.framework for kind in TOOL_TYPES))


def _name_of(fn: Function) -> str:
    name = getattr(fn, "__name__", type(fn).__name__)
    return "tool" if name == "<lambda>" else str(name)


def _is_async(fn: Function) -> bool:
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(type(fn), "__call__", None))  # noqa: B004
