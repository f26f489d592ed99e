"""`agent`: a model with instructions and tools, under a budget of its own.

In a pipeline it runs on what comes in, and its answer goes on. Linked into the `tools` of another agent it is a tool of
that one. Both at once is no contradiction: each use of it is a conversation of its own. In a chat, an agent that the
user talks to is given what was said so far; one behind another agent, what that one answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

from penstock.agents.agent import Agent
from penstock.agents.executor import MAX_ITERATIONS
from penstock.agents.hooks import OnDelta
from penstock.agents.tools import Tool
from penstock.kernel.executor import Handle
from penstock.kernel.values import DataValue
from penstock.nodes.approval import approve_with
from penstock.nodes.parts.chat import question, with_user_tools
from penstock.nodes.parts.models import MaxOutputTokens, ModelData, Temperature, model_for, settings
from penstock.nodes.parts.nested import runtime_of
from penstock.nodes.parts.settings import BudgetData, Checked, Data, Flag, Json, Name, Settings, Sized, Text, Within
from penstock.nodes.parts.streaming import streamed
from penstock.nodes.parts.toolbox import gathered, offered, tool_name
from penstock.nodes.parts.values import typed
from penstock.runtime.context import ExecutionContext
from penstock.runtime.graphs.flow_context import FlowContext


@dataclass(frozen=True, slots=True)
class AgentData(Data):
    """The model, what it is told, what it may use and what it may spend."""

    model: ModelData
    instructions: Text = ""
    name: Name | None = None
    """What traces and other agents call it; the node's id, if it is not given."""
    description: Text | None = None
    """What another agent is told of it."""
    tools: Annotated[list[Name], Sized(0, 200)] = ()  # type: ignore[assignment]  # nobody changes it
    """Tools that the run offers, beside those that are linked."""
    output: Json | None = None
    """A JSON Schema that the answer has to follow; without one it is text."""
    max_iterations: Annotated[int, Within(1, 1_000)] = MAX_ITERATIONS
    max_output_tokens: MaxOutputTokens | None = None
    temperature: Temperature | None = None
    stream: Flag = False
    """Whether the answer is told in pieces while it comes."""
    budget: BudgetData | None = None


class AgentNode(Checked[AgentData]):
    """Runs an agent, or lends it to another one as a tool."""

    settings = Settings(AgentData)
    inputs = (Handle("input"), Handle("tools", channel="link", many="list"))
    outputs = (Handle("output"), Handle("tool", channel="link"))
    follows = MappingProxyType({"execute": ("tools",), "materialize": ("tools",)})

    def execute(self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext) -> Any:
        """The answer to what the user said, or to what came in; to the graph's own input, if no edge leads here."""
        read = self.settings.read(data)

        async def answering(place: ExecutionContext, on_delta: OnDelta | None) -> DataValue:
            agent = await _made(read, context, on_delta)
            asked = await question(inputs, context)
            result = await agent.run(asked.prompt, place, history=asked.history)
            return typed(result.output, result.finish_reason)

        return streamed(context.execution, answering) if read.stream else answering(context.execution, None)

    async def materialize(self, data: Mapping[str, Any], output_handle: str, context: FlowContext) -> Tool:
        """The agent as a tool."""
        read = self.settings.read(data)
        agent = await _made(read, context, None)
        return agent.as_tool(tool_name(agent.name), read.description)


async def _made(data: AgentData, context: FlowContext, on_delta: OnDelta | None) -> Agent:
    node_id = str(context.node_id)
    linked = await runtime_of(context).resolve_links(node_id, "tools")
    tools = gathered([*linked, *(offered(name, context) for name in data.tools)])
    return Agent(
        await model_for(data.model, context),
        data.instructions,
        with_user_tools(tools, context),
        None if data.budget is None else data.budget.budget(),
        data.output,
        name=data.name or node_id,
        max_iterations=data.max_iterations,
        settings=settings(data.max_output_tokens, data.temperature),
        on_delta=on_delta,
        approve=approve_with(context),
    )
