"""The ReAct loop: steps and tool calls as text, for models without native tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from penstock.agents.compaction import Compaction
from penstock.agents.formats import FormatError, ReActFormat, Step, TextOutputFormat
from penstock.agents.loop import CONTINUE, AgentLoopResult, LoopAction, LoopData, data_of, remember, transcript_of
from penstock.agents.messages import Message, ToolCall
from penstock.agents.model import DEFAULT_SETTINGS, Model, ModelRequest, ModelResponse, ModelSettings
from penstock.agents.tool_calling import MAX_FORMAT_RETRIES, check_loop_arguments, send, truncated_in
from penstock.agents.tools import ToolChain, ToolSpec, as_chain, execute_one
from penstock.runtime.context import ExecutionContext

STOP = "\nObservation:"
"""Stops a model before it invents the observation."""


def _line(spec: ToolSpec) -> str:
    return f"- {spec.name}: {spec.description} Arguments: {json.dumps(spec.parameters)}"


class ReActLoop:
    """Thought, action, observation, and so on, until there is a final answer; all of it text."""

    def __init__(
        self,
        model: Model,
        tools: ToolChain | Iterable[Any] = (),
        *,
        instructions: str = "",
        output: TextOutputFormat | None = None,
        steps: TextOutputFormat | None = None,
        settings: ModelSettings | None = None,
        compaction: Compaction | None = None,
        max_format_retries: int = MAX_FORMAT_RETRIES,
    ) -> None:
        check_loop_arguments(instructions, compaction, max_format_retries)
        self.model = model
        self.tools = as_chain(tools)
        self.output = output
        """Parser of the final answer; None returns its text."""
        self.steps = steps or ReActFormat()
        """Parser of a step; returns a `Step`."""
        self.settings = settings or DEFAULT_SETTINGS
        if STOP not in self.settings.stop:
            self.settings = replace(self.settings, stop=(*self.settings.stop, STOP))
        self.compaction = compaction
        self.max_format_retries = max_format_retries
        """Maximum number of retries in a row after an answer that is not in the format."""
        self.instructions = "\n\n".join(self._instructions(instructions))

    def _instructions(self, instructions: str) -> Iterable[str]:
        if instructions:
            yield instructions
        if self.tools.specs:
            yield "Tools:\n" + "\n".join(map(_line, self.tools.specs))
        yield self.steps.instructions
        if self.output is not None:
            yield f"The final answer: {self.output.instructions}"

    async def next(self, context: ExecutionContext) -> AgentLoopResult:
        """Do one step: the model request, and the action it decides on."""
        data = data_of(context)
        if self.compaction is not None:
            await self.compaction.compact(context, data, self.model)
        tries_left = self.max_format_retries
        while True:
            request = ModelRequest(transcript_of(data), (), self.settings, self.instructions)
            response = await send(self.model, context, data, request)
            try:
                step: Step = self.steps.parse(response.text, context)
                if step.answer is None:
                    return await self._act(context, data, response, step)
                result = step.answer if self.output is None else self.output.parse(step.answer, context)
            except FormatError as error:
                if response.is_truncated:
                    raise truncated_in(self.model, data, request, response, "a step") from error
                if not tries_left:
                    remember(data, [response.message])
                    return AgentLoopResult(LoopAction.TERMINATE, error=error)
                tries_left -= 1
                remember(data, [response.message, Message.user(error.correction)])
            else:
                remember(data, [response.message])
                return AgentLoopResult(LoopAction.TERMINATE, result=result, finish_reason=response.incomplete_reason)

    async def _act(
        self, context: ExecutionContext, data: LoopData, response: ModelResponse, step: Step
    ) -> AgentLoopResult:
        call = ToolCall(f"step-{context.iteration}", step.action or "", step.action_input)
        result = await execute_one(self.tools, context, call)
        observation = f"Observation: {'error: ' if result.is_error else ''}{result.content}"
        remember(data, [Message.assistant(response.text), Message.user(observation)])
        return CONTINUE
