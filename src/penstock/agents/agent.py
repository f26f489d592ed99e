"""An agent: a model, what it is told, what it may use and what it may spend.

An agent keeps nothing between runs and may run any number of times at once. It is a node of a graph and a tool of
another agent as well; wherever it runs under a context, it is a child of that context, under its own budget and under
every one above.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from penstock.agents.compaction import Compaction
from penstock.agents.executor import MAX_ITERATIONS, Executor, ExecutorResult, as_input
from penstock.agents.formats import as_format
from penstock.agents.hooks import Approve, OnDelta
from penstock.agents.loop import AgentLoop, Conversation
from penstock.agents.messages import ContentPart, Message
from penstock.agents.model import Model, ModelSettings
from penstock.agents.tool_calling import MAX_FORMAT_RETRIES, ToolCallingLoop
from penstock.agents.tools import MAX_PARALLEL_TOOLS, TOOL_NAME, Tool, ToolChain
from penstock.containment.limits import Budget, ResourceUsage
from penstock.errors import CancelledError, InvalidValue
from penstock.runtime.context import ExecutionContext
from penstock.runtime.options import must_be, must_be_name
from penstock.stops import TerminationReason


class AgentResult:
    """What came of one run of an agent."""

    __slots__ = ("_value", "context", "error", "finish_reason", "partial", "termination_reason")

    def __init__(self, result: ExecutorResult) -> None:
        self._value = result.result
        self.context = result.context
        """Where it ran: the calls, the events, the stats."""
        self.error = result.error
        """What kept it from an answer; None if nothing did."""
        self.termination_reason: TerminationReason = result.termination_reason
        self.partial = result.partial
        """What had come of an answer that broke off."""
        self.finish_reason = result.finish_reason
        """Why the output is not whole, such as `length`: the answer came to what it may have at most; None if it is."""

    @property
    def output(self) -> Any:
        """The answer: text, or what the output format made of it. Raises what kept the agent from having one."""
        if self.error is not None:
            raise self.error
        return self._value

    @property
    def messages(self) -> list[Message]:
        """Everything that was said."""
        conversation: Conversation = self.context.data
        return conversation.messages

    @property
    def text(self) -> str:
        """The last thing the model said, whole or not; empty if it has said nothing."""
        said = (message.text for message in reversed(self.messages) if message.role == "assistant")
        return next((text for text in said if text), "")

    @property
    def usage(self) -> ResourceUsage:
        """What it used, as far as its own budget counts."""
        return self.context.usage

    @property
    def cost_usd(self) -> float:
        """What it cost, everything below it included."""
        return self.context.stats.total_cost

    def __repr__(self) -> str:
        return f"<AgentResult {self.termination_reason}: {self.text[:60]!r}>"


class Agent:
    """A model with instructions, tools and a budget: `await Agent(model).run("…")`."""

    node_type = "agent"
    persistent = False

    def __init__(
        self,
        model: Model,
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
        if not isinstance(model, Model):
            raise InvalidValue("model", model, "a Model, such as ScriptedModel(…)")
        must_be_name("name", name)
        must_be("budget", budget, Budget)
        self.name = name
        self.model = model
        self.budget = budget
        """What one run may use; None draws on what is above it alone."""
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
        """Its name, as a node of a graph."""
        return self.name

    async def run(
        self,
        prompt: str | Sequence[ContentPart],
        ctx: ExecutionContext | None = None,
        *,
        history: Sequence[Message] = (),
    ) -> AgentResult:
        """Run it, as a child of `ctx` if there is one, else as a run of its own; `history` is what was said before.

        Limits, errors and aborts are in the result, and its `output` raises them; a cancel is raised here.
        """
        data = Conversation(prompt, history)
        if ctx is None:
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
        """Run it as a node of a graph, on the context's input: its output."""
        return (await self.run(as_input(context.input), context)).output

    def as_tool(self, name: str | None = None, description: str | None = None) -> Tool:
        """The agent as a tool of another one: it is given a task, and its output is the result."""

        async def run(task: str, ctx: ExecutionContext) -> Any:
            return (await self.run(task, ctx)).output

        called = name or self.name
        if not TOOL_NAME.fullmatch(called):
            raise InvalidValue("name", called, "1 to 64 letters, digits, _ or -")
        told = description or f"Ask the agent {self.name!r} to do a task, described in words, and get its answer."
        return Tool(run, name=called, description=told)

    def __repr__(self) -> str:
        return f"<Agent {self.name!r} with {self.model.name}>"
