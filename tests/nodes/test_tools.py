"""Tools, toolsets and servers: what agents are linked to."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from penstock.agents.messages import ToolCall, ToolResult
from penstock.agents.scripted import ScriptedModel
from penstock.agents.tools import Tool, Tools
from penstock.containment.limits import BudgetExceededError
from penstock.errors import CancelledError
from penstock.nodes.approval import Approvals
from penstock.nodes.parts.services import NotOffered, ServiceMissing
from penstock.providers.mcp import McpServers, StdioServer
from penstock.runtime.context import ExecutionContext
from tests.mcp_library import IMPORT_SERVER
from tests.nodes.graphs import Json, graph, node, output_of, problems
from tests.nodes.test_approval import first

HEIGHT = {"type": "object", "properties": {"dam": {"type": "string"}}, "required": ["dam"]}


def calling(*calls: ToolCall) -> ScriptedModel:
    """A model that makes calls one after the other, and then answers with the last result."""
    coming = iter(calls)
    return ScriptedModel(lambda request: next(coming, None) or request.messages[-1].text)


def linked(*parts: Json, link: list[str]) -> Json:
    return graph([node("a", "agent", model="m"), *parts], [], link)


async def answer(document: Json, *calls: ToolCall, **services: Any) -> Any:
    return await output_of(document, "go", services={"models": {"m": calling(*calls)}, **services})


async def height(dam: str) -> int:
    """How high a dam is."""
    return {"Hoover": 221}[dam]


ASKS = ToolCall("1", "height", {"dam": "Hoover"})


async def test_a_tool_that_the_run_offers_is_called() -> None:
    document = linked(node("t", "tool", tool="height"), link=["t.tool > a.tools"])
    assert await answer(document, ASKS, tools={"height": height}) == "221"


async def test_a_tool_may_be_held_tighter_and_called_otherwise() -> None:
    tool = node("t", "tool", tool="height", name="how_high", description="Say how high.", needs_approval=True)
    model = calling(ToolCall("1", "how_high", {"dam": "Hoover"}))
    services = {"models": {"m": model}, "tools": {"height": height}}
    output = await output_of(linked(tool, link=["t.tool > a.tools"]), "go", services=services)
    assert output == "not run: it needs approval, and this run has no approver"
    assert model.last_request is not None
    assert model.last_request.tools[0].description == "Say how high."


async def test_a_tools_own_schema_is_kept_when_it_is_held_tighter() -> None:
    given = Tool(lambda **arguments: arguments, name="any", description="", parameters=HEIGHT, timeout_s=5)
    document = linked(node("t", "tool", tool="any", timeout_s=9), link=["t.tool > a.tools"])
    output = await answer(document, ToolCall("1", "any", {"dam": "x"}), tools={"any": given})
    assert output == '{"dam": "x"}'


GRAPH_TOOL = node(
    "height",
    "tool",
    description="How high a dam is.",
    parameters=HEIGHT,
    graph=graph([node("in", "input"), node("p", "prompt-template", template="{{ call.dam }}: 221 m")], ["in > p.call"]),
)


async def test_a_graph_is_a_tool() -> None:
    with ExecutionContext(input="go") as run:
        services = {"models": {"m": calling(ASKS)}}
        document = linked(GRAPH_TOOL, link=["height.tool > a.tools"])
        assert await output_of(document, run=run, services=services) == "Hoover: 221 m"
        assert run.stats.tool_call_count == 1


async def test_the_arguments_of_a_graph_are_checked() -> None:
    output = await answer(linked(GRAPH_TOOL, link=["height.tool > a.tools"]), ToolCall("1", "height", {"dam": 3}))
    assert "the arguments of height are invalid" in output


async def test_a_graph_tool_that_fails_or_uses_up_its_budget_is_a_tool_error() -> None:
    broken = node("t", "tool", graph=graph([node("p", "prompt-template", template="{{ nothing }}")]))
    output = await answer(linked(broken, link=["t.tool > a.tools"]), ToolCall("1", "t", {}))
    assert output == "TemplateFailed: nothing has no value: no values arrived"
    poor = node("t", "tool", budget={"max_steps": 0}, graph=graph([node("c", "constant", value=1)]))
    output = await answer(linked(poor, link=["t.tool > a.tools"]), ToolCall("1", "t", {}))
    assert output.startswith("stopped: ")


async def test_the_calls_in_the_graph_of_a_tool_count_for_the_agent_that_calls_it() -> None:
    document = linked(GRAPH_TOOL, link=["height.tool > a.tools"])
    document["nodes"][0]["data"]["budget"] = {"max_steps": 3}
    with pytest.raises(BudgetExceededError, match="of the 3 steps of 'a' used"):
        await answer(document, ASKS)


async def test_a_cancel_reaches_the_graph_of_a_tool() -> None:
    approvals = Approvals()
    asks = node("t", "tool", graph=graph([node("in", "input"), node("ok", "approval")], ["in > ok"]))
    with ExecutionContext(input="go") as run:
        services = {"models": {"m": calling(ToolCall("1", "t", {}))}, "approvals": approvals}
        running = asyncio.ensure_future(output_of(linked(asks, link=["t.tool > a.tools"]), run=run, services=services))
        await first(approvals)
        run.abort("enough")
        with pytest.raises(CancelledError):
            await running
    assert approvals.list() == ()


async def test_a_toolset_provides_all_of_its_tools_to_several_agents() -> None:
    calls = [ASKS, ToolCall("2", "dig", {})]
    parts = [GRAPH_TOOL, node("set", "toolset", tools=["dig"]), node("b", "agent", model="n")]
    links = ["height.tool > set.tools", "set.tools > a.tools", "set.tools > b.tools"]
    document = linked(*parts, link=links)
    models = {"m": calling(*calls), "n": calling(*calls)}
    tools = {"dig": Tool(lambda: "a hole", name="dig", description="")}
    output = await output_of(document, "go", services={"models": models, "tools": tools})
    assert output == {"a.output": "a hole", "b.output": "a hole"}


# servers


class Server:
    """A chain of tools, as a server's are."""

    def __init__(self) -> None:
        self._tools = Tools([height, Tool(lambda: "gone", name="delete", description="")])
        self.specs = self._tools.specs

    async def execute(self, context: ExecutionContext, call: ToolCall) -> ToolResult:
        return await self._tools.execute(context, call)


async def test_the_tools_of_a_server_are_provided_beside_others() -> None:
    parts = [node("s", "mcp-server", server="dams"), node("t", "tool", tool="dig")]
    document = linked(*parts, link=["s.tools > a.tools", "t.tool > a.tools"])
    dig = Tool(lambda: "a hole", name="dig", description="")
    for call, output in ((ASKS, "221"), (ToolCall("1", "dig", {}), "a hole")):
        assert await answer(document, call, mcp={"dams": Server()}, tools={"dig": dig}) == output
    output = await answer(document, ToolCall("1", "fly", {}), mcp={"dams": Server()}, tools={"dig": dig})
    assert output.startswith("there is no tool 'fly'")


PROGRAM = f"""
{IMPORT_SERVER}
server = MCPServer("dams")

@server.tool()
def height(dam: str) -> str:
    return f"{{dam}}: 221 m"

server.run("stdio")
"""


async def test_the_tools_of_a_real_server_are_called() -> None:
    document = linked(node("s", "mcp-server", server="dams"), link=["s.tools > a.tools"])
    async with McpServers({"dams": StdioServer([sys.executable, "-c", PROGRAM])}).tools("dams") as opened:
        assert await answer(document, ASKS, mcp={"dams": opened}) == "Hoover: 221 m"


async def test_only_the_named_tools_are_provided() -> None:
    document = linked(node("s", "mcp-server", server="dams", tools=["height"]), link=["s.tools > a.tools"])
    assert await answer(document, ASKS, mcp={"dams": Server()}) == "221"
    output = await answer(document, ToolCall("1", "delete", {}), mcp={"dams": Server()})
    assert output == "there is no tool 'delete'; there are: height"


@pytest.mark.parametrize(
    ("services", "error", "why"),
    [
        ({}, ServiceMissing, "open servers by name"),
        ({"mcp": {"others": 1}}, NotOffered, "there is no MCP server 'dams'; there are: others"),
        (
            {"mcp": McpServers({"dams": StdioServer(["x"])})},
            ServiceMissing,
            "'dams' open: async with",
        ),
    ],
)
async def test_a_server_that_is_not_there_or_not_open_is_named(
    services: Json, error: type[Exception], why: str
) -> None:
    document = linked(node("s", "mcp-server", server="dams"), link=["s.tools > a.tools"])
    with pytest.raises(error, match=why):
        await answer(document, **services)


def test_a_graph_cannot_say_how_a_server_is_started() -> None:
    wrong = graph([node("s", "mcp-server", server="dams", command=["rm"])])
    assert problems(wrong) == [("$.nodes[0].data.command", "there is no such setting; there are: server, tools")]


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ({}, ""),
        ({"tool": "a", "graph": graph([])}, ""),
        ({"tool": "a", "parameters": HEIGHT}, ".parameters"),
        ({"tool": "a", "name": "two words"}, ".name"),
        ({"graph": graph([]), "parameters": {"type": "string"}}, ".parameters"),
        ({"graph": graph([node("x", "nope")])}, ".graph.nodes[0].type"),
    ],
)
def test_wrong_data_of_a_tool_is_found_before_the_run(data: Json, path: str) -> None:
    assert [one for one, _ in problems(graph([node("t", "tool", **data)]))] == [f"$.nodes[0].data{path}"]


def test_tools_do_not_run_in_a_flow() -> None:
    nodes = [node("in", "input"), node("t", "tool", tool="x")]
    assert "'t' does not run: its executor has no execute()" in dict(map(reversed, problems(graph(nodes, ["in > t"]))))
