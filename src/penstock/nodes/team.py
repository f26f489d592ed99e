"""`team`: several agents that answer as one.

Its members are linked into `members`: agents, other teams, any tool. How they work together is its mode:

coordinate   a lead calls members as tools, as often as it needs, and answers itself
route        a lead passes the task to one member, whose answer is the team's
parallel     all members receive the task at the same time; a lead, if there is one, combines their answers

To other nodes a team behaves like an agent: it runs in a pipeline, the user of a chat can talk to it, and it can be
linked as a tool, or as a member of another team. Members have their own budgets, within that of the team.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

from penstock.agents.agent import Agent
from penstock.agents.executor import MAX_ITERATIONS
from penstock.agents.loop import CONTINUE, AgentLoopResult, LoopAction, OnDelta, data_of, remember, transcript_of
from penstock.agents.messages import Message, ToolCall, ToolResult
from penstock.agents.model import DEFAULT_SETTINGS, Model, ModelRequest
from penstock.agents.tool_calling import send, truncated_in
from penstock.agents.tools import MAX_PARALLEL_TOOLS, Tool, ToolChain, execute_all
from penstock.errors import InvalidValue, PenstockError
from penstock.kernel.executor import DataValue, ExecutorRegistry, Handle, typed
from penstock.nodes.approval import approve_with
from penstock.nodes.parts.chat import GO_ON, Prompt, messages_in, newest, prompt_for, streamed, with_user_tools
from penstock.nodes.parts.services import ModelData, combine_tools, model_for, offered_tool, runtime_of, tool_name
from penstock.runtime.context import ExecutionContext
from penstock.runtime.graphs.graph_runtime import FlowContext
from penstock.runtime.graphs.settings import (
    BudgetData,
    Checked,
    Data,
    Finding,
    Flag,
    Name,
    Settings,
    Sized,
    Text,
    Within,
)

Mode = Literal["coordinate", "route", "parallel"]

LEADS: Mapping[Mode, str] = {
    "coordinate": "You lead a team. Its members are your tools: give each a self-contained task, and answer yourself "
    "when you have what you need.",
    "route": "Pass the task to the member of your team that is best at it, by calling it as a tool, once. "
    "Its answer is final, and is returned to the user.",
    "parallel": "Your team was given the task, and each member's answer is below it. Combine them into one answer.",
}
"""Instructions of a lead, placed before those of the node."""


class MemberFailed(PenstockError):
    """A member failed, and there is no lead to combine the other answers, or no other answer."""

    def __init__(self, member: str, why: str) -> None:
        self.member = member
        super().__init__(f"{member!r} of the team gave no answer: {why}")


@dataclass(frozen=True, slots=True)
class TeamData(Data):
    """The mode of the team, its lead, and its limits."""

    mode: Mode = "coordinate"
    model: ModelData | None = None
    """Model of the lead; optional only for `parallel`, where without one the output is the answers by member name."""
    instructions: Text = ""
    name: Name | None = None
    description: Text | None = None
    """Description for an agent that uses the team as a tool."""
    tools: Annotated[list[Name], Sized(0, 200)] = ()  # type: ignore[assignment]  # never mutated
    """Tools of the lead that the run offers, in addition to the linked ones."""
    max_iterations: Annotated[int, Within(1, 1_000)] = MAX_ITERATIONS
    stream: Flag = False
    """Whether answers are emitted in pieces as they arrive: the lead's, and those of the members it calls."""
    budget: BudgetData | None = None
    """Budget of one call if the team is a tool, members included; if the node runs, the runtime enforces it."""


class TeamNode(Checked[TeamData]):
    """Runs a team of agents, or provides it to an agent as a tool."""

    settings = Settings(TeamData)
    uses = MappingProxyType({"model": "models", "tools": "tools"})
    inputs = (
        Handle("input"),
        Handle("members", channel="link", many="list", required=True),
        Handle("tools", channel="link", many="list"),
    )
    outputs = (Handle("output"), Handle("tool", channel="link"))
    follows = MappingProxyType({"execute": ("members",)})  # as a tool it resolves its members when it is called

    def look(self, data: TeamData, executors: ExecutorRegistry) -> Iterator[Finding]:
        """Check that the mode has the lead it requires, and that only coordinate has extra tools."""
        if data.model is None and data.mode != "parallel":
            yield ".model", f"a team of mode {data.mode} needs the model of its lead"
        if data.tools and data.mode != "coordinate":
            yield ".tools", "only the lead of mode coordinate uses tools beside the members"

    def execute(self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext) -> Any:
        """Return the team's answer to the user or to the node's input."""
        read = self.settings.read(data)

        async def answering(place: ExecutionContext, on_delta: OnDelta | None) -> DataValue:
            prompt = await prompt_for(inputs, context)
            return await _answer(read, prompt, context, place, on_delta)

        return streamed(context.execution, answering) if read.stream else answering(context.execution, None)

    def materialize(self, data: Mapping[str, Any], output_handle: str, context: FlowContext) -> Tool:
        """Return the team as a tool, or as a member of another team."""
        read = self.settings.read(data)
        name = read.name or str(context.node_id)

        async def run(task: str, ctx: ExecutionContext) -> Any:
            with ctx.spawn_child(name, budget=None if read.budget is None else read.budget.budget()) as place:
                return (await _answer(read, Prompt(task), context, place, None)).value

        text = read.description or f"Ask the team {name!r} to do a task, described in words, and get its answer."
        return Tool(run, name=tool_name(name), description=text)


async def _answer(
    data: TeamData, prompt: Prompt, context: FlowContext, place: ExecutionContext, on_delta: OnDelta | None
) -> DataValue:
    members = combine_tools(await runtime_of(context).resolve_links(str(context.node_id), "members"))
    if not members.specs:
        raise InvalidValue(f"members of team {context.node_id!r}", [], "at least one linked agent")
    if data.mode == "parallel":
        answers = await _answers(members, prompt, context, place)
        if data.model is None or all(answer.is_error for answer in answers):
            _must_have_answered(answers)
        if data.model is None:
            return typed({answer.name: _value(answer) for answer in answers})
        prompt = _with(prompt, answers)
    lead = await _lead(data, members, context, on_delta)
    result = await lead.run(prompt.text, place, history=prompt.history)
    return typed(result.output, result.finish_reason)


async def _lead(data: TeamData, members: ToolChain, context: FlowContext, on_delta: OnDelta | None) -> Agent:
    assert data.model is not None, "it was looked at before the graph ran"
    model = await model_for(data.model, context)
    instructions = f"{LEADS[data.mode]}\n\n{data.instructions}".strip()
    tools: ToolChain | Sequence[Any] = ()
    if data.mode == "coordinate":
        linked = await runtime_of(context).resolve_links(str(context.node_id), "tools")
        own = combine_tools([members, *linked, *(offered_tool(name, context) for name in data.tools)])
        tools = with_user_tools(own, context)
    return Agent(
        model,
        instructions,
        tools,
        name=data.name or str(context.node_id),
        max_iterations=data.max_iterations,
        on_delta=on_delta,
        approve=approve_with(context),
        loop=Routing(model, members, instructions) if data.mode == "route" else None,
    )


class Routing:
    """The loop of a routing lead: the result of the first member it calls is the final result."""

    def __init__(self, model: Model, members: ToolChain, instructions: str) -> None:
        self.model = model
        self.members = members
        self.instructions = instructions

    async def next(self, context: ExecutionContext) -> AgentLoopResult:
        """Run the member that the lead chooses. Without a call its text is the answer; after an error it retries."""
        data = data_of(context)
        request = ModelRequest(transcript_of(data), self.members.specs, DEFAULT_SETTINGS, self.instructions)
        response = await send(self.model, context, data, request)
        if not response.tool_calls:
            remember(data, [response.message])
            return AgentLoopResult(LoopAction.TERMINATE, result=response.text, finish_reason=response.incomplete_reason)
        if response.is_truncated:
            raise truncated_in(self.model, data, request, response, "a tool call")
        call = response.tool_calls[0]
        result = await self.members.execute(context, call)
        remember(data, [Message.assistant(response.text, [call]), Message.tool(result)])
        return CONTINUE if result.is_error else AgentLoopResult(LoopAction.TERMINATE, result=_value(result))


async def _answers(
    members: ToolChain, prompt: Prompt, context: FlowContext, place: ExecutionContext
) -> list[ToolResult]:
    """Return the answer of every member to the task, in the order they are linked."""
    is_from_user = bool(prompt.history) and prompt.text in ("", GO_ON)
    task = newest(messages_in(context)) if is_from_user else prompt.text
    calls = [_call(spec.name, spec.parameters, task) for spec in members.specs]
    return await execute_all(members, place, calls, MAX_PARALLEL_TOOLS)


def _must_have_answered(answers: Sequence[ToolResult]) -> None:
    for answer in answers:
        if answer.is_error:
            raise MemberFailed(answer.name, answer.content)


def _with(prompt: Prompt, answers: Sequence[ToolResult]) -> Prompt:
    """Return the prompt for a lead, with the answers of its members."""
    texts = [f"{each.name} {'failed' if each.is_error else 'answered'}:\n{each.content}" for each in answers]
    return Prompt("\n\n".join([*filter(None, [prompt.text]), *texts]), prompt.history)


def _call(name: str, parameters: Mapping[str, Any], task: str) -> ToolCall:
    if "task" not in parameters.get("properties", {}):
        raise InvalidValue(f"member {name!r}", name, "an agent or a team")
    return ToolCall(name, name, {"task": task})


def _value(result: ToolResult) -> Any:
    return result.content if result.value is None else result.value
