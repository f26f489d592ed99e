"""Tools of an MCP server: every call is contained, and an agent that never stops calling them is stopped.

    python examples/mcp_tools.py

Needs `pip install 'penstock[mcp]'`. The server is a process of this machine, connected over stdio; each call of its
tools is charged at $0.001. The model is scripted: no key, no network.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from penstock import Agent, BudgetExceededError, ExecutionContext, Price, PriceBook, ToolCall, contain
from penstock.agents import ModelRequest, ScriptedModel
from penstock.providers.mcp import McpServers, StdioServer

SERVER = """
try:
    from mcp.server import MCPServer
except ImportError:  # release 1 of the library
    from mcp.server import FastMCP as MCPServer

server = MCPServer("gates")

@server.tool()
def level(gate: str) -> float:
    "The water level at a gate, in metres."
    return {"north": 4.2, "south": 3.1}[gate]

server.run("stdio")
"""

FREE = PriceBook(registered={"scripted": Price(0, 0)}, use_genai_prices=False)
SERVERS = McpServers({"gates": StdioServer([sys.executable, "-c", SERVER])})


def compare(request: ModelRequest) -> Any:
    """Look at both gates, and compare them, as a model would."""
    results = [message.text for message in request.messages if message.role == "tool"]
    if not results:
        return [ToolCall("1", "gates_level", {"gate": "north"}), ToolCall("2", "gates_level", {"gate": "south"})]
    return f"{results[0]} m in the north, {results[1]} m in the south."


def look_for_ever(request: ModelRequest) -> Any:
    """Call the tool again and again, as a model does that is lost."""
    return ToolCall(str(len(request.messages)), "gates_level", {"gate": "north"})


async def ask(run: ExecutionContext, reply: Any) -> str:
    """Let an agent with the server's tools answer."""
    async with SERVERS.tools("gates", prefix="gates_", timeout_s=20, cost_usd=0.001) as tools:
        agent = Agent(ScriptedModel(reply), "Watch the gates.", tools=tools, max_iterations=100)
        return str((await agent.run("How high is the water?", run)).output)


async def main() -> int:
    """Ask once, then let a lost agent run into its limit."""
    async with contain(max_cost_usd=0.01, prices=FREE) as run:
        print(f"answer     {await ask(run, compare)}")
        print(f"spent      ${run.balance.spent_usd:.3f} for {run.stats.tool_call_count} tool calls")
    async with contain(max_cost_usd=0.01, prices=FREE, divergence=False) as lost:
        try:
            await ask(lost, look_for_ever)
        except BudgetExceededError as stopped:
            print(f"stopped    {stopped.reason}")
    return 0 if lost.balance.spent_usd == 0.01 else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
