"""Tools that the client of a chat run executes, and the model settings and output format that it requests.

The service `client_request` has the client's request to the agent that the user talks to (`ClientRequest`). Such an
agent may call the client's tools like its own. The calls of one turn are one question to the run's `approvals` service,
stored like any other: the run waits, may be parked and taken over meanwhile, and continues with the results. The answer
may carry another request, which replaces the one before: clients send their tools and settings anew with each request.

A client that does not come back is common: for many, such as those that use a tool for structured output, the tool call
is the answer. After `wait_s` the agent ends with its calls as its output, if the graph ends with the agent.

Knows nothing of HTTP and of OpenAI's formats.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from penstock.agents.agent import Agent
from penstock.agents.formats import JsonTextFormat, TextOutputFormat
from penstock.agents.loop import OnDelta
from penstock.agents.messages import Delta, ToolCall, ToolCallDelta, ToolResult
from penstock.agents.model import Model, ModelSettings, NamedTool
from penstock.agents.tool_calling import ToolCallingLoop
from penstock.agents.tools import (
    MAX_CALLS_PER_TURN,
    Tool,
    ToolChain,
    Tools,
    execute_all,
    execute_one,
    refuse,
)
from penstock.errors import PenstockError
from penstock.nodes.approval import Answer, answer_within, approvals_in
from penstock.nodes.parts.services import combine_tools
from penstock.runtime.context import ExecutionContext
from penstock.runtime.graphs.graph_runtime import FlowContext

SERVICE = "client_request"
EXPECTS = "client_tools"
"""Key in `ApprovalRequest.expects` of a question for the results of the client's tools; its value has their names."""
NO_RESULT = "the client gave no result"


class ToolNameTaken(PenstockError):
    """The client offers a tool that has the name of one of the agent's own tools."""

    def __init__(self, name: str, agent: str) -> None:
        self.name = name
        super().__init__(f"agent {agent!r} has its own tool {name!r}: offer yours under another name")


class LoopOfItsOwn(PenstockError):
    """The client offers tools to an agent whose loop cannot call them."""

    def __init__(self, name: str, loop: str) -> None:
        self.name = name
        super().__init__(f"agent {name!r} runs a loop of its own ({loop}), which calls no tools of the client")


class ResultsOverdue(PenstockError):
    """The client has not returned the results of its tools in time."""

    def __init__(self, calls: Sequence[Mapping[str, Any]], wait_s: float) -> None:
        self.calls = [dict(call) for call in calls]
        names = ", ".join(str(call["name"]) for call in calls)
        super().__init__(f"the client did not return the results of its tools ({names}) within {wait_s:g} s")


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A client's request to the agent that its user talks to; JSON when it is stored."""

    tools: tuple[Mapping[str, Any], ...] = ()
    """Each with `name`, `description` and `parameters`, a JSON Schema."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `ModelSettings`; the choice of a tool by name is `{"name": …}`."""
    schema: Mapping[str, Any] | None = None
    """JSON Schema of the answer; None for text."""
    is_strict: bool = False
    """Whether the provider enforces the schema too."""
    wait_s: float = 120.0
    """How long the run waits for results."""
    ends_with_calls: bool = False
    """Whether the graph ends with the agent, so that its calls may be the run's output."""

    @classmethod
    def restore(cls, stored: object) -> ClientRequest | None:
        """Restore a stored request; None if there is none."""
        if not isinstance(stored, Mapping):
            return None
        known = {one.name: stored[one.name] for one in fields(cls) if one.name in stored}
        return cls(**{**known, "tools": tuple(known.get("tools") or ())})

    def to_dict(self) -> dict[str, Any]:
        """Return the request as JSON; fields with their default are left out."""
        default = ClientRequest()
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in given.items()
            if value != getattr(default, name)
        }

    def settings_over(self, own: ModelSettings) -> ModelSettings:
        """Return the agent's own settings with those of the client over them; output is limited by both."""
        given = dict(self.settings)
        if isinstance(choice := given.get("tool_choice"), Mapping):
            given["tool_choice"] = NamedTool(str(choice["name"]))
        if "stop" in given:
            given["stop"] = tuple(given["stop"])
        if own.max_output_tokens is not None and "max_output_tokens" in given:
            given["max_output_tokens"] = min(own.max_output_tokens, given["max_output_tokens"])
        if self.schema is not None and self.is_strict:
            given["output_schema"] = self.schema
        return replace(own, **given)


def client_request(context: FlowContext) -> ClientRequest | None:
    """Return the client's request to this node's agent; None if there is none, or the user does not talk to it."""
    stored, scope = context.services.get(SERVICE), context.services.get("chat_scope")
    if stored is None or scope is None or not scope.is_entry_agent(str(context.node_id)):
        return None
    return ClientRequest.restore(stored)


class ClientToolLoop(ToolCallingLoop):
    """The loop of an agent for one run: calls of the client's tools are put to the client, all others are run here."""

    runs_all_calls = False

    def __init__(
        self,
        model: Model,
        own_tools: ToolChain,
        request: ClientRequest,
        context: FlowContext,
        *,
        instructions: str,
        output: TextOutputFormat | None,
        settings: ModelSettings,
        name: str | None = None,
    ) -> None:
        super().__init__(model, own_tools, instructions=instructions, output=output, settings=settings)
        self._own_tools, self._own_settings, self._own_instructions = self.tools, settings, instructions
        self._own_output = output
        self._context = context
        self._name = name or str(context.node_id)
        self._client_tools: dict[str, Tool] = {}
        self._request = request
        self._apply(request)

    def is_of_client(self, delta: Delta) -> bool:
        """Whether a delta is a call of one of the client's tools."""
        return isinstance(delta, ToolCallDelta) and delta.call.name in self._client_tools

    def _apply(self, request: ClientRequest) -> None:
        """Use the tools, settings and output format of a request from the next model call on."""
        self._request = request
        own = {spec.name for spec in self._own_tools.specs}
        offered = request.tools
        self._client_tools = {tool.name: tool for tool in map(_client_tool, offered)}
        for name in self._client_tools:
            if name in own:
                raise ToolNameTaken(name, self._name)
        self.tools = combine_tools([self._own_tools, *self._client_tools.values()]) if offered else self._own_tools
        settings = request.settings_over(self._own_settings)
        if not offered:  # a choice is between the client's tools
            settings = replace(settings, tool_choice=None, parallel_tool_calls=None)
        self.settings = settings
        output = self._own_output if request.schema is None else JsonTextFormat(request.schema)
        texts = [self._own_instructions, "" if output is None else output.instructions]
        self.instructions = "\n\n".join(filter(None, texts))
        self.output = output

    async def run_calls(self, context: ExecutionContext, calls: Sequence[ToolCall]) -> Sequence[ToolResult]:
        """Run the agent's own calls, put the others to the client, and return all results in order."""
        theirs = {at: call for at, call in enumerate(calls) if call.name in self._client_tools}
        if not theirs or len(calls) > MAX_CALLS_PER_TURN:
            return await execute_all(self.tools, context, calls, self.max_parallel_tools)
        ours = [at for at in range(len(calls)) if at not in theirs]
        done = await execute_all(self._own_tools, context, [calls[at] for at in ours], self.max_parallel_tools)
        results = dict(zip(ours, done, strict=True))
        valid: dict[int, ToolCall] = {}
        for at, call in theirs.items():
            arguments, problems = self._client_tools[call.name].read(call.arguments)
            if problems:
                listed = "\n".join(f"- {problem}" for problem in problems)
                reason = f"the arguments of {call.name} are invalid:\n{listed}"
                results[at] = refuse(context, call, "InvalidArguments", reason)
            else:
                valid[at] = replace(call, arguments=arguments)
        if valid:
            results |= await self._run_at_client(context, valid)
        return [results[at] for at in range(len(calls))]

    async def _run_at_client(self, context: ExecutionContext, calls: Mapping[int, ToolCall]) -> dict[int, ToolResult]:
        """Return the client's results as those of contained calls, which count and are recorded like any other."""
        tools, results = self._client_tools, {}
        contents = await self._contents([{"name": c.name, "arguments": c.arguments} for c in calls.values()], context)
        for (at, call), content in zip(calls.items(), contents, strict=True):
            spec = tools[call.name].spec
            run = Tool(_returning(content), name=spec.name, description=spec.description, parameters=spec.parameters)
            results[at] = await execute_one(Tools([run]), context, call, at)
        return results

    async def _contents(self, calls: Sequence[Mapping[str, Any]], context: ExecutionContext) -> Sequence[str]:
        journal = context._run.journal
        if journal is None:
            answered = await self._ask(calls)
        else:
            answered = await journal.value("client tools", lambda: self._ask(calls))
        if answered is None:
            raise ResultsOverdue(calls, self._request.wait_s)
        if (request := ClientRequest.restore(answered.get("request"))) is not None:
            self._apply(request)
        return [str(content) for content in answered["results"]]

    async def _ask(self, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """Put the calls to the client, and return the answer; None if there is none in time."""
        context = self._context
        approvals = approvals_in(context, f"node {context.node_id!r}")
        names = ", ".join(dict.fromkeys(str(call["name"]) for call in calls))
        question, value = f"The client runs {names} and returns the result", {"tool_calls": [*map(dict, calls)]}
        expects = {EXPECTS: [call["name"] for call in calls]}
        async with approvals.ask(str(context.run_id), str(context.node_id), question, value, expects) as opened:
            answer = await answer_within(opened, self._request.wait_s)
        return None if answer is None else _answered(answer, len(calls))


def can_use_client_tools(agent: Agent) -> bool:
    """Whether an agent written in Python can call tools of the client: not with a loop of its own."""
    return type(agent.loop) is ToolCallingLoop


def with_client_tools(agent: Agent, request: ClientRequest, context: FlowContext) -> Agent:
    """Return the agent for one run, with the client's request applied; the agent itself is not changed."""
    own = agent.loop
    if type(own) is not ToolCallingLoop:
        raise LoopOfItsOwn(agent.name, type(own).__name__)
    instructions = own.instructions if own.output is None else own.instructions.removesuffix(own.output.instructions)
    loop = ClientToolLoop(
        own.model,
        own.tools,
        request,
        context,
        instructions=instructions.strip(),
        output=own.output,
        settings=own.settings,
        name=agent.name,
    )
    loop.compaction, loop.max_parallel_tools = own.compaction, own.max_parallel_tools
    loop.max_format_retries = own.max_format_retries
    extended, executor = copy.copy(agent), copy.copy(agent.executor)
    extended.loop = executor.loop = loop
    extended.executor = executor
    return extended


def client_output(error: ResultsOverdue) -> dict[str, Any]:
    """Return the calls whose results never came as the output of the agent."""
    return {"tool_calls": error.calls}


def without_client_calls(loop: ClientToolLoop, on_delta: OnDelta | None) -> OnDelta | None:
    """Return a consumer of deltas without calls of the client's tools, which reach the client as a question instead."""
    if on_delta is None:
        return None
    return lambda delta: None if loop.is_of_client(delta) else on_delta(delta)


def _answered(answer: Answer, number: int) -> dict[str, Any]:
    """Return the results in an answer, one per call; a person who approves or rejects the question has none."""
    given = answer.value if answer.edited and isinstance(answer.value, Mapping) else {}
    results = given.get("results")
    if not isinstance(results, Sequence) or isinstance(results, str) or len(results) != number:
        reason = f"{NO_RESULT}{f': {answer.reason}' if answer.reason else ''}"
        return {"results": [reason] * number, "request": None}
    return {"results": list(results), "request": given.get("request")}


def _client_tool(given: Mapping[str, Any]) -> Tool:
    return Tool(_returning(""), name=given["name"], description=given["description"], parameters=given["parameters"])


def _returning(content: str) -> Any:
    async def result(**arguments: Any) -> str:
        return content

    return result
