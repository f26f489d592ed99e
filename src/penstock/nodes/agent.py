"""`agent`: a model with instructions and tools, under a budget of its own.

In a pipeline it runs on its input and outputs its answer. Linked into the `tools` of another agent it is a tool of that
agent. Both are possible at once: each use is a separate conversation. In a chat, an agent that the user talks to
receives the conversation so far; an agent downstream of another one receives that one's answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

from penstock.agents.agent import Agent
from penstock.agents.executor import MAX_ITERATIONS
from penstock.agents.formats import as_format
from penstock.agents.loop import OnDelta
from penstock.agents.tools import Tool
from penstock.kernel.executor import DataValue, Handle, typed
from penstock.nodes.approval import approve_with
from penstock.nodes.client_tools import (
    ClientRequest,
    ClientToolLoop,
    ResultsOverdue,
    client_output,
    client_request,
    without_client_calls,
)
from penstock.nodes.parts.chat import prompt_for, streamed, with_user_tools
from penstock.nodes.parts.services import (
    MaxOutputTokens,
    ModelData,
    Temperature,
    combine_tools,
    model_for,
    model_settings,
    offered_tool,
    runtime_of,
    tool_name,
)
from penstock.runtime.context import ExecutionContext
from penstock.runtime.graphs.graph_runtime import FlowContext
from penstock.runtime.graphs.settings import BudgetData, Checked, Data, Flag, Json, Name, Settings, Sized, Text, Within


@dataclass(frozen=True, slots=True)
class AgentData(Data):
    """The model, its instructions and tools, and the limits of the agent."""

    model: ModelData
    instructions: Text = ""
    name: Name | None = None
    """Name in traces and for other agents; the node's id if omitted."""
    description: Text | None = None
    """Description for an agent that uses it as a tool."""
    tools: Annotated[list[Name], Sized(0, 200)] = ()  # type: ignore[assignment]  # never mutated
    """Tools that the run offers, in addition to the linked ones."""
    output: Json | None = None
    """JSON Schema of the answer; without one the answer is text."""
    max_iterations: Annotated[int, Within(1, 1_000)] = MAX_ITERATIONS
    max_output_tokens: MaxOutputTokens | None = None
    temperature: Temperature | None = None
    stream: Flag = False
    """Whether the answer is emitted in pieces as it arrives."""
    budget: BudgetData | None = None
    """Budget of one call if the agent is a tool; if the node runs, the runtime enforces it."""


class AgentNode(Checked[AgentData]):
    """Runs an agent, or provides it to another agent as a tool."""

    settings = Settings(AgentData)
    uses = MappingProxyType({"model": "models", "tools": "tools"})
    inputs = (Handle("input"), Handle("tools", channel="link", many="list"))
    outputs = (Handle("output"), Handle("tool", channel="link"))
    follows = MappingProxyType({"execute": ("tools",), "materialize": ("tools",)})

    def execute(self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext) -> Any:
        """Return the answer to the user or to the node's input; to the graph's input if no edge leads to it."""
        read = self.settings.read(data)
        request = client_request(context)

        async def answering(place: ExecutionContext, on_delta: OnDelta | None) -> DataValue:
            agent = await _agent(read, context, on_delta, request)
            prompt = await prompt_for(inputs, context)
            result = await agent.run(prompt.text, place, history=prompt.history)
            if isinstance(result.error, ResultsOverdue) and request is not None and request.ends_with_calls:
                return typed(client_output(result.error))
            return typed(result.output, result.finish_reason)

        return streamed(context.execution, answering) if read.stream else answering(context.execution, None)

    async def materialize(self, data: Mapping[str, Any], output_handle: str, context: FlowContext) -> Tool:
        """Return the agent as a tool."""
        read = self.settings.read(data)
        agent = await _agent(read, context, None)
        return agent.as_tool(tool_name(agent.name), read.description)


async def _agent(
    data: AgentData, context: FlowContext, on_delta: OnDelta | None, request: ClientRequest | None = None
) -> Agent:
    node_id = str(context.node_id)
    linked = await runtime_of(context).resolve_links(node_id, "tools")
    own = combine_tools([*linked, *(offered_tool(name, context) for name in data.tools)])
    model, tools = await model_for(data.model, context), with_user_tools(own, context)
    settings, loop = model_settings(data.max_output_tokens, data.temperature), None
    if request is not None:
        output, instructions = as_format(data.output), data.instructions
        loop = ClientToolLoop(
            model, tools, request, context, instructions=instructions, output=output, settings=settings
        )
        # An answer with a format is emitted once it is checked: a stream cannot take back an attempt that failed.
        on_delta = without_client_calls(loop, None if request.schema is not None else on_delta)
    return Agent(
        model,
        data.instructions,
        tools,
        None if data.budget is None else data.budget.budget(),
        data.output,
        name=data.name or node_id,
        max_iterations=data.max_iterations,
        settings=settings,
        on_delta=on_delta,
        approve=approve_with(context),
        loop=loop,
    )
