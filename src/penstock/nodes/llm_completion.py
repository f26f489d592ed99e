"""`llm-completion`: a single model request and its answer; no tools, no loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.agents.loop import OnDelta
from penstock.agents.messages import Message, Transcript
from penstock.agents.model import ModelRequest
from penstock.kernel.executor import DataValue, Handle, as_text, typed
from penstock.nodes.parts.chat import streamed
from penstock.nodes.parts.services import MaxOutputTokens, ModelData, Temperature, model_for, model_settings
from penstock.runtime.context import ExecutionContext
from penstock.runtime.graphs.graph_runtime import FlowContext
from penstock.runtime.graphs.settings import Checked, Data, Flag, Settings, Text


@dataclass(frozen=True, slots=True)
class LlmCompletionData(Data):
    """The model, its instructions, and the limits of the answer."""

    model: ModelData
    instructions: Text = ""
    max_output_tokens: MaxOutputTokens | None = None
    temperature: Temperature | None = None
    stream: Flag = False
    """Whether the answer is emitted in pieces as it arrives."""


class LlmCompletion(Checked[LlmCompletionData]):
    """Sends the input to a model, and outputs its answer."""

    settings = Settings(LlmCompletionData)
    inputs = (Handle("input"),)
    outputs = (Handle("output", "text"),)

    def execute(self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext) -> Any:
        """Return the answer to the node's input; to the graph's input if no edge leads to it."""
        read = self.settings.read(data)
        prompt = as_text(inputs["input"].value if "input" in inputs else context.execution.input)
        answering = partial(_answer, read, prompt, context)
        return streamed(context.execution, answering) if read.stream else answering(context.execution, None)


async def _answer(
    data: LlmCompletionData, prompt: str, context: FlowContext, place: ExecutionContext, on_delta: OnDelta | None
) -> DataValue:
    model = await model_for(data.model, context)
    transcript = Transcript([Message.user(prompt)])
    request = ModelRequest(transcript, (), model_settings(data.max_output_tokens, data.temperature), data.instructions)
    response = await model.send(place, request, on_delta)
    return typed(response.text, response.incomplete_reason)
