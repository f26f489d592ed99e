"""An agent: a model with instructions, tools and a budget.

An agent has no state between runs and may run any number of times at once. It can be a node of a graph and a tool of
another agent; in a context it runs as a child of that context, under its own budget and all enclosing ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

from penstock import checks
from penstock.agents.compaction import Compaction
from penstock.agents.executor import MAX_ITERATIONS, Executor, as_input
from penstock.agents.formats import as_format
from penstock.agents.loop import AgentLoop, Approve, Conversation, ExecutorResult, OnDelta
from penstock.agents.messages import ContentPart, Message
from penstock.agents.model import Model, ModelSettings
from penstock.agents.tool_calling import MAX_FORMAT_RETRIES, ToolCallingLoop
from penstock.agents.tools import MAX_PARALLEL_TOOLS, TOOL_NAME, Tool, ToolChain
from penstock.containment.limits import Budget, ResourceUsage
from penstock.errors import CancelledError, InvalidValue
from penstock.money import known_usd, to_nanos
from penstock.runtime.billing.prices import default_prices
from penstock.runtime.context import ExecutionContext
from penstock.stops import TerminationReason


class AgentResult:
    """Result of one run of an agent."""

    __slots__ = ("_value", "context", "error", "finish_reason", "partial", "termination_reason")

    def __init__(self, result: ExecutorResult) -> None:
        self._value = result.result
        self.context = result.context
        """Where it ran: calls, events, stats."""
        self.error = result.error
        """Why there is no output; None if there is one."""
        self.termination_reason: TerminationReason = result.termination_reason
        self.partial = result.partial
        """The received part of an answer that broke off."""
        self.finish_reason = result.finish_reason
        """Why the output is incomplete, such as `length` (maximum output tokens); None if it is complete."""

    @property
    def output(self) -> Any:
        """The answer: text, or the value that the output format parsed. Raises the error if there is none."""
        if self.error is not None:
            raise self.error
        return self._value

    @property
    def messages(self) -> list[Message]:
        """All messages of the conversation."""
        conversation: Conversation = self.context.data
        return conversation.messages

    @property
    def text(self) -> str:
        """The last text of the model, complete or not; empty if there is none."""
        answers = (message.text for message in reversed(self.messages) if message.role == "assistant")
        return next((text for text in answers if text), "")

    @property
    def usage(self) -> ResourceUsage:
        """Usage as counted by the agent's own budget."""
        return self.context.usage

    @property
    def cost_usd(self) -> float | None:
        """Total cost, nested calls included: a lower bound if some costs are unknown, None if all of it is."""
        stats = self.context.stats
        return known_usd(to_nanos(stats.total_cost), stats.unknown_costs)

    def __repr__(self) -> str:
        return f"<AgentResult {self.termination_reason}: {self.text[:60]!r}>"


class Agent:
    """A model with instructions, tools and a budget: `await Agent(model).run("…")`.

    `model` is a Model, or the name of one: its provider, a colon, and the provider's name for it, as in
    `Agent("openai:gpt-4o")`.
    """

    node_type = "agent"
    persistent = False

    def __init__(
        self,
        model: Model | str,
        instructions: str = "",
        tools: ToolChain | Iterable[Any] = (),
        budget: Budget | None = None,
        output: Any = None,
        *,
        name: str = "agent",
        max_iterations: int = MAX_ITERATIONS,
        settings: ModelSettings | None = None,
        compaction: Compaction | None = None,
        hooks: Sequence[object] = (),
        on_delta: OnDelta | None = None,
        approve: Approve | None = None,
        max_parallel_tools: int = MAX_PARALLEL_TOOLS,
        max_format_retries: int = MAX_FORMAT_RETRIES,
        loop: AgentLoop | None = None,
    ) -> None:
        model = _as_model(model)
        checks.text("name", name, minimum=1)
        if budget is not None:
            checks.instance("budget", budget, Budget, none="no budget of its own")
        self.name = name
        self.model = model
        self.budget = budget
        """Limits of one run; None applies only those of the context."""
        self.loop = loop or ToolCallingLoop(
            model,
            tools,
            instructions=instructions,
            output=as_format(output),
            settings=settings,
            compaction=compaction,
            max_parallel_tools=max_parallel_tools,
            max_format_retries=max_format_retries,
        )
        self.executor = Executor(
            self.loop, hooks=hooks, max_iterations=max_iterations, on_delta=on_delta, approve=approve
        )

    @property
    def id(self) -> str:
        """Id as a node of a graph: its name."""
        return self.name

    async def run(
        self,
        prompt: str | Sequence[ContentPart],
        ctx: ExecutionContext | None = None,
        *,
        history: Sequence[Message] = (),
    ) -> AgentResult:
        """Run it as a child of `ctx`, or in a new run; `history` has the messages of an earlier conversation.

        Limits, errors and aborts are in the result, whose `output` raises them; a cancel is raised.
        """
        data = Conversation(prompt, history)
        if ctx is None:
            if default_prices().must_load_for(self.model.name):
                await default_prices().aload()  # before the run and its time limit begin
            context = ExecutionContext(name=self.name, data=data, budget=self.budget)
            try:
                result = await self.executor.execute(context)
            except BaseException as error:
                context.end(error)
                raise
            context.end(result.error)
        else:
            result = await self._run_below(ctx, data)
        if isinstance(result.error, CancelledError):
            raise result.error
        return AgentResult(result)

    def run_sync(
        self,
        prompt: str | Sequence[ContentPart],
        ctx: ExecutionContext | None = None,
        *,
        history: Sequence[Message] = (),
    ) -> AgentResult:
        """Like `run`, for code without an event loop: blocks until the agent has finished."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self.run(prompt, ctx, history=history))
        raise InvalidValue(
            "run_sync", "inside an event loop", "called where no event loop runs; use `await agent.run(…)`"
        )

    async def _run_below(self, ctx: ExecutionContext, data: Conversation) -> ExecutorResult:
        child = ctx.spawn_child(self.name, data, budget=self.budget)
        reason = TerminationReason.CONTEXT_CANCELED
        try:
            result = await self.executor.execute(child)
            reason = result.termination_reason
        finally:
            ctx.complete_child(child, reason)
        return result

    async def execute(self, context: ExecutionContext) -> Any:
        """Run it as a node of a graph on the context's input, and return its output."""
        return (await self.run(as_input(context.input), context)).output

    def as_tool(self, name: str | None = None, description: str | None = None) -> Tool:
        """The agent as a tool of another agent: the argument is a task, the result is its output."""

        async def run(task: str, ctx: ExecutionContext) -> Any:
            return (await self.run(task, ctx)).output

        tool_name = name or self.name
        if not TOOL_NAME.fullmatch(tool_name):
            raise InvalidValue("name", tool_name, "1 to 64 letters, digits, _ or -")
        text = description or f"Ask the agent {self.name!r} to do a task, described in words, and get its answer."
        return Tool(run, name=tool_name, description=text)

    def __repr__(self) -> str:
        return f"<Agent {self.name!r} with {self.model.name}>"


def _as_model(model: object) -> Model:
    if isinstance(model, str):
        # By name: models of providers are above agents, and are imported only if one is named.
        model = import_module("penstock.providers.models").model(model)
    return checks.instance(
        "model", model, Model, "a Model, such as ScriptedModel(…), or a name, such as 'openai:gpt-4o'"
    )
