"""Compaction: shortening a conversation before it exceeds the context of a model.

When the iterations in use exceed a threshold, a nested agent summarizes the older ones, in a child context called
`compaction`, whose cost counts like any other. The full history is kept; only the iterations in use become shorter.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock import checks
from penstock.agents.executor import Executor
from penstock.agents.loop import (
    AgentLoopResult,
    Conversation,
    ExecutorResult,
    Iteration,
    LoopAction,
    LoopData,
    data_of,
    transcript_of,
)
from penstock.agents.messages import Message, arguments_json
from penstock.agents.model import BYTES_PER_TOKEN, Model, ModelRequest, ModelSettings
from penstock.runtime.context import ExecutionContext
from penstock.stops import TerminationReason
from penstock.tracing.events import CompactionTrace

INSTRUCTIONS = (
    "You are given a part of a conversation between a user, an assistant and its tools. Summarize it for the "
    "assistant, who will continue without it: the questions, the findings, the decisions, the open points, with "
    "every name and number that matters. Write the summary and nothing else."
)
MIN_SHARE = 4
"""Iterations are summarized only from a fourth of the threshold on: less would hardly make room."""


class Compaction:
    """When to summarize a conversation, with which model, and how many iterations to keep."""

    __slots__ = ("instructions", "keep_last", "max_summary_tokens", "model", "threshold_tokens")

    def __init__(
        self,
        threshold_tokens: int,
        *,
        keep_last: int = 2,
        model: Model | None = None,
        instructions: str = INSTRUCTIONS,
        max_summary_tokens: int | None = None,
    ) -> None:
        checks.integer("threshold_tokens", threshold_tokens, minimum=1)
        checks.integer("keep_last", keep_last)
        if model is not None:
            checks.instance("model", model, Model, none="the agent's own")
        self.threshold_tokens = threshold_tokens
        """Maximum size of the iterations in use, estimated from above; the original input does not count."""
        self.keep_last = keep_last
        """Number of latest iterations that are kept unchanged."""
        self.model = model
        """Model that writes the summary; None for the agent's own."""
        self.instructions = instructions
        self.max_summary_tokens = max_summary_tokens

    async def compact(self, context: ExecutionContext, data: LoopData, model: Model) -> bool:
        """Summarize the older iterations if they exceed the threshold; return whether that was done."""
        if self._is_surely_below(data):
            return False
        iterations = list(data.iterations)
        older, kept = iterations[: len(iterations) - self.keep_last], iterations[len(iterations) - self.keep_last :]
        before = _tokens(iterations)
        if before <= self.threshold_tokens or _tokens(older) * MIN_SHARE < self.threshold_tokens or len(older) < 2:
            return False
        text = (await self._summarize(context, older, model)).unwrap()
        summary = Iteration((Message.user(f"Summary of the conversation so far:\n{text}"),))
        data.set_iterations([summary, *kept])
        context.record_event(CompactionTrace(before=before, after=_tokens([summary, *kept])))
        return True

    def _is_surely_below(self, data: LoopData) -> bool:
        """Whether the whole conversation is below the threshold; its weight is known without counting."""
        return isinstance(data, Conversation) and data.transcript.weight // BYTES_PER_TOKEN <= self.threshold_tokens

    async def _summarize(self, context: ExecutionContext, older: Sequence[Iteration], model: Model) -> ExecutorResult:
        loop = _SummaryLoop(self.model or model, self.instructions, ModelSettings(self.max_summary_tokens))
        child = context.spawn_child("compaction", Conversation(_as_text(older)))
        reason = TerminationReason.CONTEXT_CANCELED
        try:
            result = await Executor(loop, max_iterations=1).execute(child)
            reason = result.termination_reason
        finally:
            context.complete_child(child, reason)
        return result


class _SummaryLoop:
    """A loop of one turn: the model's text is the summary."""

    def __init__(self, model: Model, instructions: str, settings: ModelSettings) -> None:
        self._model, self._instructions, self._settings = model, instructions, settings

    async def next(self, context: ExecutionContext) -> AgentLoopResult:
        request = ModelRequest(transcript_of(data_of(context)), (), self._settings, self._instructions)
        response = await self._model.send(context, request)
        return AgentLoopResult(LoopAction.TERMINATE, result=response.text)


def _tokens(iterations: Sequence[Iteration]) -> int:
    return sum(message.weight for iteration in iterations for message in iteration.messages) // BYTES_PER_TOKEN


def _as_text(iterations: Sequence[Iteration]) -> str:
    """The messages as text, so that the summarizing model does not act on the tool calls in them."""
    lines: list[str] = []
    for message in (message for iteration in iterations for message in iteration.messages):
        if message.role == "tool":
            lines.append(f"tool {message.name}: {message.text}")
        elif message.text:
            lines.append(f"{message.role}: {message.text}")
        lines += [f"assistant calls {call.name}({arguments_json(call.arguments)})" for call in message.tool_calls]
    return "\n".join(lines)
