"""The loop of a model that calls tools natively: ask, run what it asks for, tell it the results, until it answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.agents.compaction import Compaction
from penstock.agents.formats import FormatError, TextOutputFormat
from penstock.agents.loop import (
    CONTINUE,
    AgentLoopResult,
    Iteration,
    LoopAction,
    LoopData,
    data_of,
    remember,
    transcript_of,
)
from penstock.agents.messages import Message
from penstock.agents.model import (
    DEFAULT_SETTINGS,
    Model,
    ModelRequest,
    ModelResponse,
    ModelSettings,
    TruncatedResponse,
)
from penstock.agents.tools import (
    MAX_CALLS_PER_TURN,
    MAX_PARALLEL_TOOLS,
    ToolChain,
    as_chain,
    execute_all,
    execute_one,
)
from penstock.runtime.context import ExecutionContext
from penstock.runtime.options import must_be, must_be_at_least, must_be_text

MAX_FORMAT_RETRIES = 2


class ToolCallingLoop:
    """Ask the model, run the tools it asks for, and so on; a reply without tool calls is the answer."""

    def __init__(
        self,
        model: Model,
        tools: ToolChain | Iterable[Any] = (),
        *,
        instructions: str = "",
        output: TextOutputFormat | None = None,
        settings: ModelSettings | None = None,
        compaction: Compaction | None = None,
        max_parallel_tools: int = MAX_PARALLEL_TOOLS,
        max_format_retries: int = MAX_FORMAT_RETRIES,
    ) -> None:
        must_be_text("instructions", instructions)
        must_be("compaction", compaction, Compaction)
        must_be_at_least(1, "max_parallel_tools", max_parallel_tools)
        must_be_at_least(0, "max_format_retries", max_format_retries)
        self.model = model
        self.tools = as_chain(tools)
        self.instructions = instructions if output is None else f"{instructions}\n\n{output.instructions}".strip()
        self.output = output
        """How the answer is read; None takes it as text."""
        self.settings = settings or DEFAULT_SETTINGS
        self.compaction = compaction
        self.max_parallel_tools = max_parallel_tools
        self.max_format_retries = max_format_retries
        """How often a model may answer again that did not keep to the format."""

    async def next(self, context: ExecutionContext) -> AgentLoopResult:
        """One turn: the model, and the tools it asks for."""
        data = data_of(context)
        if self.compaction is not None:
            await self.compaction.compact(context, data, self.model)
        tries_left = self.max_format_retries
        while True:
            request = ModelRequest(transcript_of(data), self.tools.specs, self.settings, self.instructions)
            response = await ask(self.model, context, data, request)
            calls = response.tool_calls
            if calls:
                if response.finish_reason == "length" and response.is_cut:
                    raise cut_in(self.model, data, request, response, "a tool call")
                break
            answered = self._answer(context, data, request, response, tries_left)
            if answered is not None:
                return answered
            tries_left -= 1
        # What is beyond the cap is refused: providers want a result for every call they are shown, and every turn that
        # follows would pay for both.
        said = Message.assistant(response.text, calls[:MAX_CALLS_PER_TURN])
        try:
            if len(calls) == 1:
                told: tuple[Message, ...] = (said, Message.tool(await execute_one(self.tools, context, calls[0])))
            else:
                results = await execute_all(self.tools, context, calls, self.max_parallel_tools)
                told = (said, *map(Message.tool, results[:MAX_CALLS_PER_TURN]))
        except BaseException:
            # A conversation in use has a result for every call; the history tells what was asked for.
            data.add_iteration_history(Iteration((said,), is_complete=False))
            raise
        remember(data, told)
        return CONTINUE

    def _answer(
        self,
        context: ExecutionContext,
        data: LoopData,
        request: ModelRequest,
        response: ModelResponse,
        tries_left: int,
    ) -> AgentLoopResult | None:
        """What a reply without tool calls comes to; None if it did not keep to the format, and the model may try again.

        The next reply may call a tool after all.
        """
        value: Any = response.text
        failed: FormatError | None = None
        if self.output is not None:
            try:
                value = self.output.parse(response.text, context)
            except FormatError as error:
                if response.is_cut:
                    raise cut_in(self.model, data, request, response, "its format") from error
                if tries_left:
                    remember(data, (response.message, Message.user(str(error))))
                    return None
                value, failed = None, error
        remember(data, (response.message,))
        return AgentLoopResult(LoopAction.TERMINATE, result=value, error=failed, finish_reason=response.not_whole)


async def ask(model: Model, context: ExecutionContext, data: LoopData, request: ModelRequest) -> ModelResponse:
    """Ask; what had come of an answer that broke off is remembered."""
    try:
        return await model.send(context, request)
    except BaseException:
        if request.received:
            remember(data, (Message.assistant("".join(request.received)),), is_complete=False)
        raise


def cut_in(
    model: Model, data: LoopData, request: ModelRequest, response: ModelResponse, what: str
) -> TruncatedResponse:
    """What is said of an answer of which a part is of no use, and that would be cut there again; it is remembered."""
    if response.text:
        remember(data, (Message.assistant(response.text),), is_complete=False)
    most = request.max_output_tokens
    why = f"in the middle of {what}: it may have {most} tokens (max_output_tokens), so allow it more"
    return TruncatedResponse(model.name, response.text, why)
