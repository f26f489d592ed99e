"""Making a conversation shorter before it no longer fits.

When the iterations in use weigh more than a threshold, the older ones are summed up by a nested agent, in a child
context called `compaction`, whose cost counts like any other. The full history stays where it is; only what the next
iteration builds on becomes shorter.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.agents.executor import Executor, ExecutorResult
from penstock.agents.loop import AgentLoopResult, Conversation, Iteration, LoopAction, LoopData, data_of, transcript_of
from penstock.agents.messages import Message, Transcript, written
from penstock.agents.model import BYTES_PER_TOKEN, Model, ModelRequest, ModelSettings
from penstock.errors import InvalidValue
from penstock.runtime.context import ExecutionContext
from penstock.runtime.options import must_be_at_least
from penstock.stops import TerminationReason
from penstock.tracing.events import CompactionTrace

INSTRUCTIONS = (
    "You are given a part of a conversation between a user, an assistant and its tools. Sum it up for the assistant, "
    "who will go on without it: what was asked, what was found out, what was decided, what is still open, with every "
    "name and number that matters. Write the summary and nothing else."
)
WORTHWHILE = 4
"""What is summed up has to weigh a fourth of the threshold at least: less would hardly make room."""


class Compaction:
    """When a conversation is summed up, by whom, and how much of it stays as it is."""

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
        must_be_at_least(1, "threshold_tokens", threshold_tokens)
        must_be_at_least(0, "keep_last", keep_last)
        if model is not None and not isinstance(model, Model):
            raise InvalidValue("model", model, "a Model, or None for the agent's own")
        self.threshold_tokens = threshold_tokens
        """Estimated from above, as for a model's input; the original input does not count."""
        self.keep_last = keep_last
        """So many of the latest iterations stay as they are."""
        self.model = model
        """Who sums up; None is the agent's own model."""
        self.instructions = instructions
        self.max_summary_tokens = max_summary_tokens

    async def compact(self, context: ExecutionContext, data: LoopData, model: Model) -> bool:
        """Sum up the older iterations if they have become too many; whether that was done."""
        if self._can_be_light(data):
            return False
        iterations = list(data.iterations)
        older, kept = iterations[: len(iterations) - self.keep_last], iterations[len(iterations) - self.keep_last :]
        before = _tokens(iterations)
        if before <= self.threshold_tokens or _tokens(older) * WORTHWHILE < self.threshold_tokens or len(older) < 2:
            return False
        summary = (await self._sum_up(context, older, model)).unwrap()
        told = Iteration((Message.user(f"What happened so far, summed up:\n{summary}"),))
        data.set_iterations([told, *kept])
        context.record_event(CompactionTrace(before=before, after=_tokens([told, *kept])))
        return True

    def _can_be_light(self, data: LoopData) -> bool:
        """What a conversation weighs in all is known at once: most often that settles it."""
        return isinstance(data, Conversation) and data.transcript.weight // BYTES_PER_TOKEN <= self.threshold_tokens

    async def _sum_up(self, context: ExecutionContext, older: Sequence[Iteration], model: Model) -> ExecutorResult:
        loop = _Summing(self.model or model, self.instructions, ModelSettings(self.max_summary_tokens))
        child = context.spawn_child("compaction", Conversation(_as_text(older)))
        reason = TerminationReason.CONTEXT_CANCELED
        try:
            result = await Executor(loop, max_iterations=1).execute(child)
            reason = result.termination_reason
        finally:
            context.complete_child(child, reason)
        return result


class _Summing:
    """An agent of one turn: asked once, its text is the summary."""

    def __init__(self, model: Model, instructions: str, settings: ModelSettings) -> None:
        self._model, self._instructions, self._settings = model, instructions, settings

    async def next(self, context: ExecutionContext) -> AgentLoopResult:
        request = ModelRequest(transcript_of(data_of(context)), (), self._settings, self._instructions)
        response = await self._model.send(context, request)
        return AgentLoopResult(LoopAction.TERMINATE, result=response.text)


def _tokens(iterations: Sequence[Iteration]) -> int:
    return Transcript(one for iteration in iterations for one in iteration.messages).weight // BYTES_PER_TOKEN


def _as_text(iterations: Sequence[Iteration]) -> str:
    """What was said, as text: the calls and results of tools are not for the one who sums up to act on."""
    lines: list[str] = []
    for message in (one for iteration in iterations for one in iteration.messages):
        if message.role == "tool":
            lines.append(f"tool {message.name}: {message.text}")
        elif message.text:
            lines.append(f"{message.role}: {message.text}")
        lines += [f"assistant calls {call.name}({written(call.arguments)})" for call in message.tool_calls]
    return "\n".join(lines)
