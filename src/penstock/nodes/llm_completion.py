"""`llm-completion`: one question to a model, one answer; no tools, no loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.agents.hooks import OnDelta
from penstock.agents.messages import Message, Transcript
from penstock.agents.model import ModelRequest
from penstock.kernel.executor import Handle
from penstock.kernel.values import DataValue
from penstock.nodes.parts.models import MaxOutputTokens, ModelData, Temperature, model_for, settings
from penstock.nodes.parts.nested import place_of
from penstock.nodes.parts.settings import BudgetData, Checked, Data, Flag, Settings, Text
from penstock.nodes.parts.streaming import streamed
from penstock.nodes.parts.values import as_text, typed
from penstock.runtime.context import ExecutionContext
from penstock.runtime.graphs.flow_context import FlowContext


@dataclass(frozen=True, slots=True)
class LlmCompletionData(Data):
    """The model, what it is told about itself, and what the answer may cost."""

    model: ModelData
    instructions: Text = ""
    max_output_tokens: MaxOutputTokens | None = None
    temperature: Temperature | None = None
    stream: Flag = False
    """Whether the answer is told in pieces while it comes."""
    budget: BudgetData | None = None


class LlmCompletion(Checked[LlmCompletionData]):
    """Asks a model what comes in, and gives its answer."""

    settings = Settings(LlmCompletionData)
    inputs = (Handle("input"),)
    outputs = (Handle("output", "text"),)

    def execute(self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext) -> Any:
        """The answer to what came in; to the graph's own input, if no edge leads here."""
        read = self.settings.read(data)
        prompt = as_text(inputs["input"].value if "input" in inputs else context.execution.input)
        answering = partial(_answer, read, prompt, context)
        place = place_of(context, read.budget)
        return streamed(place, answering) if read.stream else answering(place, None)


async def _answer(
    data: LlmCompletionData, prompt: str, context: FlowContext, place: ExecutionContext, on_delta: OnDelta | None
) -> DataValue:
    model = await model_for(data.model, context)
    asked = Transcript([Message.user(prompt)])
    request = ModelRequest(asked, (), settings(data.max_output_tokens, data.temperature), data.instructions)
    response = await model.send(place, request, on_delta)
    return typed(response.text, response.not_whole)
