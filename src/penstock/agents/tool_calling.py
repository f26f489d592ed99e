"""The loop for native tool calls: send a request, run its tool calls, send their results, until there is an answer."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Sequence
from typing import Any

from penstock import checks
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
from penstock.agents.messages import Message, ToolCall, ToolResult
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

MAX_FORMAT_RETRIES = 2


class ToolCallingLoop:
    """Send a request, run the tool calls of the response, and repeat; a response without tool calls is the answer."""

    runs_all_calls = True
    """Whether `tools` runs every call; a subclass that runs some of them elsewhere overrides `run_calls`."""

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
        check_loop_arguments(instructions, compaction, max_format_retries)
        checks.integer("max_parallel_tools", max_parallel_tools, minimum=1)
        self.model = model
        self.tools = as_chain(tools)
        self.instructions = instructions if output is None else f"{instructions}\n\n{output.instructions}".strip()
        self.output = output
        """Parser of the answer; None returns its text."""
        self.settings = settings or DEFAULT_SETTINGS
        self.compaction = compaction
        self.max_parallel_tools = max_parallel_tools
        self.max_format_retries = max_format_retries
        """Maximum number of retries after an answer that is not in the format."""

    async def next(self, context: ExecutionContext) -> AgentLoopResult:
        """Do one turn: the model request, and its tool calls."""
        data = data_of(context)
        if self.compaction is not None:
            await self.compaction.compact(context, data, self.model)
        tries_left = self.max_format_retries
        while True:
            request = ModelRequest(transcript_of(data), self.tools.specs, self.settings, self.instructions)
            response = await send(self.model, context, data, request)
            calls = response.tool_calls
            if calls:
                if response.is_truncated:
                    raise truncated_in(self.model, data, request, response, "a tool call")
                break
            answer = self._answer(context, data, request, response, tries_left)
            if answer is not None:
                return answer
            tries_left -= 1
        # Calls beyond the cap are refused and dropped: providers require a result for every call in a conversation, and
        # every later turn would pay for both.
        message = Message.assistant(response.text, calls[:MAX_CALLS_PER_TURN])
        try:
            if len(calls) == 1 and self.runs_all_calls:
                turn: tuple[Message, ...] = (message, Message.tool(await execute_one(self.tools, context, calls[0])))
            else:
                results = await self.run_calls(context, calls)
                turn = (message, *map(Message.tool, results[:MAX_CALLS_PER_TURN]))
        except BaseException:
            # Only the history gets the calls: a conversation in use must have a result for every call.
            data.add_iteration_history(Iteration((message,), is_complete=False))
            raise
        remember(data, turn)
        return CONTINUE

    def run_calls(self, context: ExecutionContext, calls: Sequence[ToolCall]) -> Awaitable[Sequence[ToolResult]]:
        """Run the calls of one turn; the results are in the order of the calls."""
        return execute_all(self.tools, context, calls, self.max_parallel_tools)

    def _answer(
        self,
        context: ExecutionContext,
        data: LoopData,
        request: ModelRequest,
        response: ModelResponse,
        tries_left: int,
    ) -> AgentLoopResult | None:
        """The result for a response without tool calls; None if it is not in the format, and the model may try again.

        The next response may call a tool after all.
        """
        value: Any = response.text
        failed: FormatError | None = None
        if self.output is not None:
            try:
                value = self.output.parse(response.text, context)
            except FormatError as error:
                if response.is_truncated:
                    raise truncated_in(self.model, data, request, response, "its format") from error
                if tries_left:
                    remember(data, (response.message, Message.user(error.correction)))
                    return None
                value, failed = None, error
        remember(data, (response.message,))
        return AgentLoopResult(
            LoopAction.TERMINATE, result=value, error=failed, finish_reason=response.incomplete_reason
        )


def check_loop_arguments(instructions: object, compaction: object, max_format_retries: object) -> None:
    """Check the arguments that both loops have."""
    checks.text("instructions", instructions)
    if compaction is not None:
        checks.instance("compaction", compaction, Compaction, none="no compaction")
    checks.integer("max_format_retries", max_format_retries)


async def send(model: Model, context: ExecutionContext, data: LoopData, request: ModelRequest) -> ModelResponse:
    """Send a request; the received part of an answer that broke off is remembered."""
    try:
        return await model.send(context, request)
    except BaseException:
        if request.received:
            remember(data, (Message.assistant("".join(request.received)),), is_complete=False)
        raise


def truncated_in(
    model: Model, data: LoopData, request: ModelRequest, response: ModelResponse, what: str
) -> TruncatedResponse:
    """The error for a truncated answer that is of no use, and that a retry would truncate again; it is remembered."""
    if response.text:
        remember(data, (Message.assistant(response.text),), is_complete=False)
    why = f"in the middle of {what}, at its maximum of {request.max_output_tokens} tokens; raise max_output_tokens"
    return TruncatedResponse(model.name, response.text, why)
