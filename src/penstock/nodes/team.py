"""`team`: several agents that answer as one.

Its members are linked into `members`: agents, other teams, any tool. How they work together is its mode:

coordinate   a lead asks members what it needs, as often as it needs, and answers itself
route        a lead hands the task to one member, whose answer is the team's
parallel     every member is given the task at the same time; a lead makes one answer of theirs, if there is one

A team is an agent to everybody else: it runs in a pipeline, it is the one that the user of a chat talks to, and it can
be linked as a tool, or as a member of another team. Members have their own budgets, within that of the team.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

from penstock.agents.agent import Agent
from penstock.agents.executor import MAX_ITERATIONS
from penstock.agents.hooks import OnDelta
from penstock.agents.loop import CONTINUE, AgentLoopResult, LoopAction, data_of, remember, transcript_of
from penstock.agents.messages import Message, ToolCall, ToolResult
from penstock.agents.model import DEFAULT_SETTINGS, Model, ModelRequest
from penstock.agents.tool_calling import ask, cut_in
from penstock.agents.tools import MAX_PARALLEL_TOOLS, Tool, ToolChain, execute_all
from penstock.errors import InvalidValue, PenstockError
from penstock.kernel.executor import ExecutorRegistry, Handle
from penstock.kernel.values import DataValue
from penstock.nodes.approval import approve_with
from penstock.nodes.parts.chat import GO_ON, Question, messages_in, newest, question, with_user_tools
from penstock.nodes.parts.models import ModelData, model_for
from penstock.nodes.parts.nested import place_of, runtime_of
from penstock.nodes.parts.settings import (
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
from penstock.nodes.parts.streaming import streamed
from penstock.nodes.parts.toolbox import gathered, offered, tool_name
from penstock.nodes.parts.values import typed
from penstock.runtime.context import ExecutionContext
from penstock.runtime.graphs.flow_context import FlowContext

Mode = Literal["coordinate", "route", "parallel"]

LEADS: Mapping[Mode, str] = {
    "coordinate": "You lead a team. Its members are your tools: give each a task it can do without knowing anything "
    "else, and answer yourself when you have what you need.",
    "route": "You hand the task on to the one member of your team that is best at it, by calling it as a tool, once. "
    "Its answer is final, and goes to whoever asked.",
    "parallel": "Your team was given the task, and what each member answered is below it. Make one answer of it.",
}
"""What a lead is told, before its own instructions."""


class MemberFailed(PenstockError):
    """A member gave no answer, and there is no lead to make do without, or no other member who gave one."""

    def __init__(self, member: str, why: str) -> None:
        self.member = member
        super().__init__(f"{member!r} of the team gave no answer: {why}")


@dataclass(frozen=True, slots=True)
class TeamData(Data):
    """How the members work together, who leads them, and what the team may spend."""

    mode: Mode = "coordinate"
    model: ModelData | None = None
    """The lead's; needed but for `parallel`, where without one the answers go on by the names of the members."""
    instructions: Text = ""
    name: Name | None = None
    description: Text | None = None
    """What another agent is told of the team."""
    tools: Annotated[list[Name], Sized(0, 200)] = ()  # type: ignore[assignment]  # nobody changes it
    """Tools of the lead that the run offers, beside those that are linked."""
    max_iterations: Annotated[int, Within(1, 1_000)] = MAX_ITERATIONS
    stream: Flag = False
    """Whether answers are told in pieces while they come: the lead's, and those of the members it calls."""
    budget: BudgetData | None = None
    """What one run may use, members included."""


class TeamNode(Checked[TeamData]):
    """Runs a team, or lends it to an agent as a tool."""

    settings = Settings(TeamData)
    inputs = (
        Handle("input"),
        Handle("members", channel="link", many="list", required=True),
        Handle("tools", channel="link", many="list"),
    )
    outputs = (Handle("output"), Handle("tool", channel="link"))
    follows = MappingProxyType({"execute": ("members",)})  # as a tool it asks for its members when it is called

    def look(self, data: TeamData, executors: ExecutorRegistry) -> Iterator[Finding]:
        """Whether somebody leads where somebody has to."""
        if data.model is None and data.mode != "parallel":
            yield ".model", f"a team of mode {data.mode} has a lead, whose model is needed"
        if data.tools and data.mode != "coordinate":
            yield ".tools", "only the lead of mode coordinate uses tools beside the members"

    def execute(self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext) -> Any:
        """The team's answer to what the user said, or to what came in."""
        read = self.settings.read(data)

        async def answering(place: ExecutionContext, on_delta: OnDelta | None) -> DataValue:
            asked = await question(inputs, context)
            return await _answer(read, asked, context, place, on_delta)

        place = place_of(context, read.budget)
        return streamed(place, answering) if read.stream else answering(place, None)

    def materialize(self, data: Mapping[str, Any], output_handle: str, context: FlowContext) -> Tool:
        """The team as a tool, or as a member of another one."""
        read = self.settings.read(data)
        name = read.name or str(context.node_id)

        async def run(task: str, ctx: ExecutionContext) -> Any:
            with ctx.spawn_child(name, budget=None if read.budget is None else read.budget.budget()) as place:
                return (await _answer(read, Question(task), context, place, None)).value

        told = read.description or f"Ask the team {name!r} to do a task, described in words, and get its answer."
        return Tool(run, name=tool_name(name), description=told)


async def _answer(
    data: TeamData, asked: Question, context: FlowContext, place: ExecutionContext, on_delta: OnDelta | None
) -> DataValue:
    members = gathered(await runtime_of(context).resolve_links(str(context.node_id), "members"))
    if not members.specs:
        raise InvalidValue(f"members of team {context.node_id!r}", [], "at least one agent that is linked")
    if data.mode == "parallel":
        answers = await _answers(members, asked, context, place)
        if data.model is None or all(one.is_error for one in answers):
            _must_have_answered(answers)
        if data.model is None:
            return typed({one.name: _value(one) for one in answers})
        asked = _with(asked, answers)
    lead = await _lead(data, members, context, on_delta)
    result = await lead.run(asked.prompt, place, history=asked.history)
    return typed(result.output, result.finish_reason)


async def _lead(data: TeamData, members: ToolChain, context: FlowContext, on_delta: OnDelta | None) -> Agent:
    assert data.model is not None, "it was looked at before the graph ran"
    model = await model_for(data.model, context)
    instructions = f"{LEADS[data.mode]}\n\n{data.instructions}".strip()
    tools: ToolChain | Sequence[Any] = ()
    if data.mode == "coordinate":
        linked = await runtime_of(context).resolve_links(str(context.node_id), "tools")
        own = gathered([members, *linked, *(offered(name, context) for name in data.tools)])
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
    """The loop of a lead that hands its task on: what the first member it calls gives is the result."""

    def __init__(self, model: Model, members: ToolChain, instructions: str) -> None:
        self.model = model
        self.members = members
        self.instructions = instructions

    async def next(self, context: ExecutionContext) -> AgentLoopResult:
        """Ask who is to do it, and let them. A lead that calls nobody has answered; one that erred is told so."""
        data = data_of(context)
        request = ModelRequest(transcript_of(data), self.members.specs, DEFAULT_SETTINGS, self.instructions)
        response = await ask(self.model, context, data, request)
        if not response.tool_calls:
            remember(data, [response.message])
            return AgentLoopResult(LoopAction.TERMINATE, result=response.text, finish_reason=response.not_whole)
        if response.is_cut:
            raise cut_in(self.model, data, request, response, "a tool call")
        call = response.tool_calls[0]
        result = await self.members.execute(context, call)
        remember(data, [Message.assistant(response.text, [call]), Message.tool(result)])
        return CONTINUE if result.is_error else AgentLoopResult(LoopAction.TERMINATE, result=_value(result))


async def _answers(
    members: ToolChain, asked: Question, context: FlowContext, place: ExecutionContext
) -> list[ToolResult]:
    """What every member answers to the task, in the order they are linked."""
    task = asked.prompt if asked.prompt not in ("", GO_ON) else newest(messages_in(context))
    calls = [_call(spec.name, spec.parameters, task) for spec in members.specs]
    return await execute_all(members, place, calls, MAX_PARALLEL_TOOLS)


def _must_have_answered(answers: Sequence[ToolResult]) -> None:
    for one in answers:
        if one.is_error:
            raise MemberFailed(one.name, one.content)


def _with(asked: Question, answers: Sequence[ToolResult]) -> Question:
    """What a lead is asked when its members have answered."""
    told = [f"{one.name} {'failed' if one.is_error else 'answered'}:\n{one.content}" for one in answers]
    return Question("\n\n".join([*filter(None, [asked.prompt]), *told]), asked.history)


def _call(name: str, parameters: Mapping[str, Any], task: str) -> ToolCall:
    if "task" not in parameters.get("properties", {}):
        raise InvalidValue(f"member {name!r}", name, "an agent or a team, which is given a task")
    return ToolCall(name, name, {"task": task})


def _value(result: ToolResult) -> Any:
    return result.content if result.value is None else result.value
