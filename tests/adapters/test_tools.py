"""Tools that are passed to another framework are calls of the run, whatever their type."""

from __future__ import annotations

import asyncio
import importlib.metadata
import inspect
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, get_type_hints

import pytest
from pydantic import BaseModel

from penstock import BudgetExceededError, CancelledError, InvalidValue, RunEnded, RunSettings, contain
from penstock.adapters import contained_tools
from penstock.events import ToolCallTrace


def tool_calls(run: Any) -> list[tuple[str, str]]:
    return [(node.operation_name, node.status) for node in run.get_snapshot().nodes if node.kind == "tool"]


def search(query: str, limit: int = 3) -> str:
    """Search the archive."""
    return f"{limit} results for {query}"


async def fetch(url: str) -> str:
    """Fetch a page."""
    return f"page {url}"


# Functions.


def test_a_function_is_a_tool_call_of_the_run_with_its_name() -> None:
    with contain() as run:
        [contained] = contained_tools(run, [search])
        assert contained("dams", limit=2) == "2 results for dams"
    assert tool_calls(run) == [("search", "ok")]
    assert run.get_snapshot().step_count == 1


async def test_an_async_function_is_a_tool_call_of_the_run() -> None:
    with contain() as run:
        [contained] = contained_tools(run, [fetch])
        assert await contained(url="a") == "page a"
    assert tool_calls(run) == [("fetch", "ok")]


def test_a_contained_function_looks_like_the_function_to_a_framework() -> None:
    with contain() as run:
        first, second = contained_tools(run, [search, fetch])
    assert inspect.signature(first) == inspect.signature(search)
    assert get_type_hints(first) == get_type_hints(search)
    assert (first.__name__, first.__doc__) == ("search", "Search the archive.")
    assert inspect.iscoroutinefunction(second)


def test_a_tool_over_the_step_limit_does_not_run() -> None:
    ran: list[str] = []
    with contain(max_steps=1) as run:
        [contained] = contained_tools(run, [ran.append])
        contained("first")
        with pytest.raises(BudgetExceededError):
            contained("second")
    assert ran == ["first"]


def test_the_time_limit_releases_the_caller_of_a_sync_tool() -> None:
    released = threading.Event()
    with contain(timeout_s=0.05) as run:
        [contained] = contained_tools(run, [released.wait])
        with pytest.raises(BudgetExceededError, match="timeout"):
            contained()
    released.set()
    assert tool_calls(run) == [("wait", "timeout")]


async def test_a_cancel_from_another_thread_interrupts_an_async_tool() -> None:
    with contain() as run:

        async def endless() -> None:
            threading.Thread(target=run.abort).start()
            await asyncio.Event().wait()

        [contained] = contained_tools(run, [endless])
        with pytest.raises(CancelledError):
            await contained()
    assert tool_calls(run) == [("endless", "aborted")]


def test_an_error_of_a_tool_is_raised_as_it_is() -> None:
    error = LookupError("no such page")

    def broken() -> None:
        raise error

    with contain() as run:
        [contained] = contained_tools(run, [broken])
        with pytest.raises(LookupError) as raised:
            contained()
    assert raised.value is error
    assert tool_calls(run) == [("broken", "error")]


def test_a_usage_in_the_result_of_a_tool_is_not_billed_again() -> None:
    answer = SimpleNamespace(usage=SimpleNamespace(prompt_tokens=1_000, completion_tokens=1_000), model="gpt-4o")
    with contain(max_tokens=10) as run:
        [contained] = contained_tools(run, [lambda: answer])
        assert contained() is answer
    assert (run.stats.total_cost, run.stats.total_input_tokens) == (0, 0)


def test_a_tool_in_a_child_context_belongs_to_the_child() -> None:
    with contain() as run:
        [contained] = contained_tools(run, [search])
        with run.spawn_child("writer") as writer:
            contained("dams")
        assert writer.stats.tool_calls_by_name == {"search": 1}


def test_a_tool_called_by_a_tool_is_below_it() -> None:
    with contain() as run:
        [inner] = contained_tools(run, [search])

        def outer() -> str:
            return str(inner("dams"))

        [contained] = contained_tools(run, [outer])
        contained()
    nodes = {node.operation_name: node for node in run.get_snapshot().nodes}
    assert nodes["search"].parent_id == nodes["outer"].node_id


def test_the_arguments_are_recorded_if_the_run_records_payloads() -> None:
    with contain(record_payloads="full") as run:
        [contained] = contained_tools(run, [search])
        contained(query="dams")
    [call] = [event for event in run.history() if isinstance(event, ToolCallTrace)]
    assert (call.input, call.output) == ({"query": "dams"}, "3 results for dams")


@pytest.mark.parametrize("tool", [{"type": "web_search"}, 3, "search", str, None], ids=repr)
def test_what_is_no_tool_is_refused(tool: Any) -> None:
    with contain() as run, pytest.raises(InvalidValue, match="functions, or tools of LangChain, pydantic-ai"):
        contained_tools(run, [tool])


def test_a_generator_function_is_refused() -> None:
    def pieces() -> Any:
        yield "one"

    with contain() as run, pytest.raises(InvalidValue, match="generator"):
        contained_tools(run, [pieces])


@pytest.mark.parametrize("tools", ["search", search], ids=["a string", "one tool"])
def test_tools_must_be_a_list(tools: Any) -> None:
    with contain() as run, pytest.raises(InvalidValue, match="a list of tools"):
        contained_tools(run, tools)


def test_the_run_must_be_a_run() -> None:
    with pytest.raises(InvalidValue, match="run must be an ExecutionContext"):
        contained_tools(RunSettings(), [search])  # type: ignore[arg-type]


# Stand-ins with the protocols of the frameworks' tools; `make adopt` runs the frameworks themselves.


class LangChainTool(BaseModel):
    """Like `BaseTool`: `invoke` calls `run`, `ainvoke` calls `arun`, both call what a subclass implements."""

    name: str = "search"

    def invoke(self, tool_input: dict[str, Any]) -> Any:
        return self.run(tool_input, callbacks=None)

    async def ainvoke(self, tool_input: dict[str, Any]) -> Any:
        return await self.arun(tool_input, callbacks=None)

    def run(self, tool_input: dict[str, Any], *, callbacks: object) -> Any:
        return search(**tool_input)

    async def arun(self, tool_input: dict[str, Any], *, callbacks: object) -> Any:
        return search(**tool_input)


@dataclass
class Schema:
    function: Callable[..., Any]
    takes_ctx: bool = False


@dataclass
class PydanticTool:
    function_schema: Schema
    name: str = "search"


class Toolset:
    async def call_tool(self, name: str, tool_args: dict[str, Any], ctx: object, tool: object) -> Any:
        return search(**tool_args)


@dataclass
class WrapperToolset(Toolset):
    wrapped: Toolset

    async def call_tool(self, name: str, tool_args: dict[str, Any], ctx: object, tool: object) -> Any:
        return await self.wrapped.call_tool(name, tool_args, ctx, tool)


@dataclass
class AgentsTool:
    on_invoke_tool: Callable[[object, str], Awaitable[Any]]
    name: str = "search"


class AgnoFunction(BaseModel):
    name: str = "search"
    entrypoint: Callable[..., Any] | None = search


@dataclass
class AgnoToolkit:
    functions: dict[str, AgnoFunction] = field(default_factory=lambda: {"search": AgnoFunction()})
    async_functions: dict[str, AgnoFunction] = field(default_factory=lambda: {"fetch": AgnoFunction(entrypoint=fetch)})


class SmolTool:
    name = "search"

    def forward(self, query: str) -> str:
        return search(query)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


class CrewTool(BaseModel):
    name: str = "search"

    def run(self, **kwargs: Any) -> Any:
        return self._run(**kwargs)

    def _run(self, query: str) -> str:
        return search(query)

    async def _arun(self, query: str) -> str:
        return search(query)


class CrewFunctionTool(CrewTool):
    """Like the tools of CrewAI's decorator: `run` does not call `_run`."""

    func: Callable[..., Any] = search

    def run(self, **kwargs: Any) -> Any:
        return self.func(**kwargs)

    def _run(self, query: str) -> Any:
        return self.func(query)


@pytest.fixture(autouse=True)
def frameworks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins, under the names that the frameworks' types have."""
    types: dict[str, dict[str, type]] = {
        "langchain_core.tools": {"BaseTool": LangChainTool},
        "pydantic_ai": {"Tool": PydanticTool},
        "pydantic_ai.toolsets": {"AbstractToolset": Toolset, "WrapperToolset": WrapperToolset},
        "agents": {"FunctionTool": AgentsTool},
        "agno.tools.function": {"Function": AgnoFunction},
        "agno.tools": {"Toolkit": AgnoToolkit},
        "smolagents": {"Tool": SmolTool},
        "crewai.tools": {"BaseTool": CrewTool},
    }
    for name, members in types.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)


async def test_a_langchain_tool_is_contained_sync_and_async() -> None:
    tool = LangChainTool()
    with contain() as run:
        [contained] = contained_tools(run, [tool])
        assert contained.invoke({"query": "dams"}) == "3 results for dams"
        assert await contained.ainvoke({"query": "dams"}) == "3 results for dams"
    assert isinstance(contained, LangChainTool)
    assert tool_calls(run) == [("search", "ok")] * 2


async def test_a_pydantic_ai_tool_is_contained() -> None:
    with contain() as run:
        [contained] = contained_tools(run, [PydanticTool(Schema(search))])
        assert contained.function_schema.function("dams") == "3 results for dams"
    assert tool_calls(run) == [("search", "ok")]


async def test_a_toolset_is_contained_and_so_are_copies_of_it() -> None:
    toolset = Toolset()
    with contain() as run:
        [contained] = contained_tools(run, [toolset])
        for each in (contained, replace(contained, wrapped=toolset)):
            assert await each.call_tool("search", {"query": "dams"}, None, None) == "3 results for dams"
    assert tool_calls(run) == [("search", "ok")] * 2


async def test_a_tool_of_the_agents_sdk_is_contained() -> None:
    async def invoke(context: object, arguments: str) -> str:
        return search(arguments)

    for invoker in (invoke, partial(invoke)):
        with contain() as run:
            [contained] = contained_tools(run, [AgentsTool(invoker)])
            assert await contained.on_invoke_tool(None, "dams") == "3 results for dams"
        assert tool_calls(run) == [("search", "ok")]


async def test_a_sync_tool_of_the_agents_sdk_is_left_behind_at_the_time_limit() -> None:
    """The SDK runs it on a thread of the event loop, and the end of the loop would wait for that thread."""
    released = threading.Event()

    async def invoke(context: object, arguments: str) -> Any:
        return await asyncio.to_thread(released.wait)

    tool = AgentsTool(invoke)
    tool.__wrapped__ = released.wait  # type: ignore[attr-defined]
    with contain(timeout_s=0.05) as run:
        [contained] = contained_tools(run, [tool])
        with pytest.raises(BudgetExceededError, match="timeout"):
            await contained.on_invoke_tool(None, "{}")
    await asyncio.get_running_loop().shutdown_default_executor()
    assert tool_calls(run) == [("search", "timeout")]
    released.set()


async def test_a_sync_tool_of_the_agents_sdk_is_refused_after_the_end_of_the_run() -> None:
    async def invoke(context: object, arguments: str) -> str:
        return search(arguments)

    tool = AgentsTool(invoke)
    tool.__wrapped__ = search  # type: ignore[attr-defined]
    with contain() as run:
        [contained] = contained_tools(run, [tool])
        assert await contained.on_invoke_tool(None, "dams") == "3 results for dams"
    with pytest.raises(RunEnded):
        await contained.on_invoke_tool(None, "dams")


async def test_an_agno_toolkit_is_contained_function_by_function() -> None:
    with contain() as run:
        toolkit, tool = contained_tools(run, [AgnoToolkit(), AgnoFunction()])
        assert toolkit.functions["search"].entrypoint("dams") == tool.entrypoint("dams") == "3 results for dams"
        assert await toolkit.async_functions["fetch"].entrypoint("a") == "page a"
    assert len(tool_calls(run)) == 3


def test_a_smolagents_tool_is_contained() -> None:
    with contain() as run:
        [contained] = contained_tools(run, [SmolTool()])
        assert contained(query="dams") == "3 results for dams"
    assert tool_calls(run) == [("search", "ok")]


async def test_a_crewai_tool_is_contained_where_all_its_callers_meet() -> None:
    with contain() as run:
        [contained] = contained_tools(run, [CrewTool()])
        assert contained.run(query="dams") == contained._run("dams") == "3 results for dams"
        assert await contained._arun("dams") == "3 results for dams"
    assert len(tool_calls(run)) == 3


def test_a_crewai_tool_made_from_a_function_is_contained_once_per_call() -> None:
    with contain() as run:
        [contained] = contained_tools(run, [CrewFunctionTool()])
        assert contained.run(query="dams") == contained._run("dams") == "3 results for dams"
    assert tool_calls(run) == [("search", "ok")] * 2


async def test_the_tool_that_was_passed_is_not_changed() -> None:
    tools = [LangChainTool(), PydanticTool(Schema(search)), AgnoToolkit(), SmolTool(), CrewTool()]
    with contain() as run:
        contained_tools(run, tools)
        tools[0].invoke({"query": "dams"})  # type: ignore[attr-defined]
        tools[1].function_schema.function("dams")  # type: ignore[attr-defined]
        tools[2].functions["search"].entrypoint("dams")  # type: ignore[attr-defined]
        tools[3]("dams")  # type: ignore[operator]
        tools[4].run(query="dams")  # type: ignore[attr-defined]
    assert tool_calls(run) == []


def test_a_version_without_the_entry_point_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class OldTool:
        name = "search"

    monkeypatch.setattr(sys.modules["agents"], "FunctionTool", OldTool)
    monkeypatch.setattr(importlib.metadata, "version", lambda distribution: "0.0.1")
    expected = "openai-agents; FunctionTool of 0.0.1 has no on_invoke_tool, so upgrade it"
    with contain() as run, pytest.raises(InvalidValue, match=expected):
        contained_tools(run, [OldTool()])
