"""Language models, as agents see them.

A `Model` records its calls and holds their maximum cost before it sends anything: `generate` makes a call in the run's
tree, contained like any other. A provider implements `request`, and `request_stream` if it can stream; it never looks
at budgets.

The maximum cost of a call is that of its input, estimated from above, and of its maximum output. If the budget cannot
pay for that much output, the request is limited to less, down to `floor`; below that it is refused. An answer truncated
at such a limit is a halt by that budget: it is paid, its text is kept, and a run that continues with a larger budget
sends the request again.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast

from penstock.agents.loop import Execution, OnDelta, running_execution
from penstock.agents.messages import Message, TextDelta, ToolCall, ToolCallDelta, Transcript, bytes_of
from penstock.agents.tools import MAX_CALLS_PER_TURN, ToolSpec
from penstock.containment.limits import BudgetExceededError
from penstock.errors import InvalidValue, PenstockError
from penstock.runtime import execution
from penstock.runtime.billing.usage import Usage
from penstock.runtime.call import Call, CallSpec, running_call
from penstock.runtime.clamping import Limit, can_be_less, clamp, clamp_to, cut
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable import failpoints
from penstock.runtime.durable.journal import COST_UNKNOWN, Journal, must_be_json
from penstock.runtime.durable.keys import enter_scope
from penstock.runtime.durable.ports import JournalEntry
from penstock.runtime.execution import collect_into
from penstock.runtime.metering import measure
from penstock.runtime.replay import paid, replay
from penstock.stops import Stop
from penstock.tracing.payloads import Messages, PayloadSource
from penstock.tracing.record import NOT_WHOLE

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]

BYTES_PER_TOKEN = 2
"""Lower bound of bytes per input token; plain text has three to four."""


@dataclass(frozen=True, slots=True)
class NamedTool:
    """A tool choice: the model must call this tool."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Options of a model request; None leaves the choice to the model."""

    max_output_tokens: int | None = None
    temperature: float | None = None
    stop: tuple[str, ...] = ()
    output_schema: Mapping[str, Any] | None = None
    """A JSON Schema for the answer, where the provider can enforce one."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Passed to the provider unchanged."""
    top_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    reasoning_effort: str | None = None
    tool_choice: ToolChoice | None = None
    """Whether the model may, must or must not call a tool; has no effect on a request without tools."""
    parallel_tool_calls: bool | None = None
    """Whether one answer may call several tools; has no effect on a request without tools."""


DEFAULT_SETTINGS = ModelSettings()


@dataclass(slots=True)
class ModelRequest(PayloadSource):
    """A request to a model. Hooks may change it before it is sent."""

    messages: Transcript
    """The conversation itself, not a copy: to send something else once, assign another transcript."""
    tools: Sequence[ToolSpec] = ()
    settings: ModelSettings = DEFAULT_SETTINGS
    instructions: str = ""
    """Instructions for the model, before the conversation."""
    max_output_tokens: int = 0
    """Maximum number of output tokens, from the settings, the model and the budget."""
    is_clamped: bool = False
    """Whether the budget pays for less output than was requested."""
    received: list[str] | None = None
    """The received pieces of a streamed answer."""
    _limit: Limit | None = field(default=None, init=False)
    """The limit that clamps the output, if it is clamped."""
    _is_final: bool = field(default=False, init=False)
    """Whether the request is not sent again: a piece of its answer was emitted, or more came than was paid for."""

    def _payload(self) -> Messages:
        first = [Message.system(self.instructions)] if self.instructions else []
        return Messages([*first, *self.messages], self.messages.weight + sum(message.weight for message in first))


@dataclass(slots=True)
class ModelResponse(PayloadSource):
    """The answer of a model, and its usage."""

    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    usage: Usage | None = None
    """None if the provider reported none."""
    finish_reason: FinishReason = "stop"
    model: str | None = None
    """The model that answered, which may be a dated version of the requested one."""
    raw: Any = None
    """The response of the provider's client, unchanged."""

    @property
    def message(self) -> Message:
        """The answer as a message of the conversation."""
        return Message("assistant", self.text, self.tool_calls)

    def _payload(self) -> dict[str, Any]:
        return self.message.to_dict() | {"finish_reason": self.finish_reason}

    @property
    def incomplete_reason(self) -> FinishReason | None:
        """The finish reason of an incomplete answer; None if the answer is complete."""
        return self.finish_reason if self.finish_reason in NOT_WHOLE else None

    @property
    def is_truncated(self) -> bool:
        """Whether it ended at the maximum number of output tokens, in its text or inside a tool call."""
        if self.finish_reason != "length":
            return False
        return not self.tool_calls or any(isinstance(call.arguments, str) for call in self.tool_calls)


PendingCall = Coroutine[Any, Any, Call]


class TruncatedResponse(PenstockError):
    """An answer is incomplete: its stream broke off, or it ended where a part of it is of no use."""

    def __init__(self, model: str, partial: str, why: str = "without its end marker") -> None:
        self.model = model
        self.partial = partial
        """The received text."""
        super().__init__(f"the answer of {model} broke off after {len(partial)} characters, {why}")


class TruncatedByBudget(BudgetExceededError):
    """A budget paid for a part of an answer only; nothing more is sent until the budget is raised."""

    def __init__(self, context: ExecutionContext, stop: Stop, text: str, was_streamed: bool) -> None:
        budget, partial = context._budget_behind(stop), context.partial_results
        super().__init__(measure(context), budget, stop.message, stop=stop, partial=partial)
        self.text = text
        """The received part of the answer."""
        self.was_streamed = was_streamed
        """Whether the text was already emitted as deltas."""
        self.source = context._source.path
        """Path of the context that made the request: `main`, `main/researcher`."""


class Model:
    """A language model. Subclass it, and implement `request`."""

    max_output_tokens: int = 4_096
    """Default maximum number of output tokens."""
    floor: int = 16
    """Minimum number of affordable output tokens for a call to be made."""
    retries: int = 0
    """Maximum number of retries of a failed request, if nothing of its answer was streamed; each draws on the run's
    retry budget."""
    applies: frozenset[str] = frozenset({"max_output_tokens"})
    """Names of the fields of `ModelSettings` that have an effect. A server refuses requests that set others."""

    def __init__(self, name: str) -> None:
        self.name = name
        """The model's name, as price tables know it."""

    # For agents.

    async def generate(
        self,
        context: ExecutionContext,
        messages: Transcript | Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        settings: ModelSettings | None = None,
        on_delta: OnDelta | None = None,
    ) -> ModelResponse:
        """Send a request; the call is contained and recorded. With `on_delta`, the answer is streamed to it as well.

        Raises Halted or CancelledError like every call, TruncatedByBudget if the budget paid for a part of the answer
        only, TruncatedResponse for an answer that broke off, and the provider's exceptions.
        """
        transcript = messages if isinstance(messages, Transcript) else Transcript(messages)
        request = ModelRequest(transcript, tools, settings or DEFAULT_SETTINGS)
        return await self.send(context, request, on_delta)

    def send(
        self, context: ExecutionContext, request: ModelRequest, on_delta: OnDelta | None = None
    ) -> Coroutine[Any, Any, ModelResponse]:
        """Send a request, which hooks may change; deltas go to the consumer of the running execution too."""
        # Every coroutine between a loop and its model costs time in each turn: without listeners there is only one.
        execution = running_execution.get()
        if execution is None:
            execution = None if on_delta is None else Execution(on_delta=on_delta)
        elif on_delta is not None:
            execution = Execution(execution.listeners, on_delta, execution.approve)
        if execution is None or (not execution.listeners and execution.on_delta is None):
            return self._generate(context, request, None)
        return self._generate_observed(context, request, execution)

    async def _generate_observed(
        self, context: ExecutionContext, request: ModelRequest, execution: Execution
    ) -> ModelResponse:
        """Send the request, and call the hooks."""
        replacement = await execution.fire("before_model_call", context, request)
        request = replacement if isinstance(replacement, ModelRequest) else request
        streamed = execution if execution.on_delta is not None else None
        try:
            response = await self._generate(context, request, streamed)
        except BaseException as error:
            if request.received:
                execution.partial = "".join(request.received)
            if not isinstance(error, GeneratorExit):
                await execution.fire("after_model_call", context, request, None, error)
            raise
        replacement = await execution.fire("after_model_call", context, request, response, None)
        return replacement if isinstance(replacement, ModelResponse) else response

    def _generate(
        self, context: ExecutionContext, request: ModelRequest, stream_to: Execution | None
    ) -> Coroutine[Any, Any, ModelResponse]:
        journal = context._run.journal
        if journal is not None:
            return self._generate_once(journal, context, request, stream_to)
        return self._generate_now(context, request, stream_to)

    async def _generate_now(
        self, context: ExecutionContext, request: ModelRequest, stream_to: Execution | None
    ) -> ModelResponse:
        """Send the request, in a run without a journal."""
        if context._run.prices.is_pending:
            await execution.load_prices(context, self.name)
        call = await self._call(context, request, stream_to)
        response: ModelResponse = call.value if call.stop is None and call.error is None else call.result()
        if request.is_clamped and response.is_truncated:
            raise self._truncated(context, request, response, call, stream_to is not None)
        return response

    async def _generate_once(
        self, journal: Journal, context: ExecutionContext, request: ModelRequest, stream_to: Execution | None
    ) -> ModelResponse:
        """Return the journalled answer; or send the request, and journal its answer before anything else can use it."""
        if context._run.prices.is_pending:
            await execution.load_prices(context, self.name)
        first = place = journal.scope().next("llm", self.name)
        response: ModelResponse
        attempt = 1
        while (found := journal.find(place.path)) is not None:
            if not _was_truncated(found):
                return self._replayed(journal, context, request, stream_to, found)
            # It was paid, but is incomplete: the run continues because its budget was raised, so it is sent again.
            response = _decode(found.value)
            replay(journal, context, found, self.name, response, exchanged=(request, response))
            attempt += 1
            place = first.retry(attempt)
        await journal.flush()
        if failpoints.hook is not None:
            failpoints.hook("llm.before_call")
        with enter_scope(place):
            call = await self._call(context, request, stream_to)
        response = call.result()
        record = call.record
        value = _encode(self.name, request, response)
        if record.cost_unknown:
            value[COST_UNKNOWN] = True
        await journal.append(place.path, "llm", value, record.cost, record.tokens_in or 0, record.tokens_out or 0)
        if request.is_clamped and response.is_truncated:
            raise self._truncated(context, request, response, call, stream_to is not None)
        return response

    def _replayed(
        self,
        journal: Journal,
        context: ExecutionContext,
        request: ModelRequest,
        stream_to: Execution | None,
        found: JournalEntry,
    ) -> ModelResponse:
        """Return the journalled answer, and emit its text in one piece."""
        response = _decode(found.value)
        request.max_output_tokens = found.value["max_output_tokens"]
        request.is_clamped = found.value["is_clamped"]
        replay(journal, context, found, self.name, response, exchanged=(request, response))
        paid(context, response)
        if stream_to is not None:
            source = context._source.path
            request.received = [response.text] if response.text else []
            for piece in request.received:
                stream_to.emit(context, TextDelta(piece, source))
            for call in response.tool_calls[:MAX_CALLS_PER_TURN]:
                stream_to.emit(context, ToolCallDelta(call, source))
        return response

    def _call(self, context: ExecutionContext, request: ModelRequest, stream_to: Execution | None) -> PendingCall:
        wanted = request.settings.max_output_tokens or self.max_output_tokens
        name, input_tokens, floor = self.name, self.count_input(request), min(self.floor, wanted)

        def clamped() -> tuple[int | None, int]:
            cost, tokens, output, request._limit = clamp(context, name, input_tokens, wanted, floor)
            request.max_output_tokens = output
            request.is_clamped = output < wanted
            return cost, tokens

        cost, tokens = clamped()
        request._is_final = False
        retries = self.retries
        work = self.request if stream_to is None else self._streamed(context, stream_to)
        shrink = None if context._run.shared is None else partial(self._shrink, context, request, input_tokens, floor)
        spec = CallSpec("llm", name, cost, name, tokens)
        if not retries:
            return execution.attempt_async(context, spec, work, (request,), shrink=shrink, reclamp=clamped)
        return execution.run_async(
            context, spec, work, (request,), retries, unless=lambda: request._is_final, shrink=shrink, reclamp=clamped
        )

    def _shrink(
        self, context: ExecutionContext, request: ModelRequest, input_tokens: int, floor: int, refusal: Stop
    ) -> tuple[int | None, int] | None:
        """Reduce the output of a request that a shared budget has refused to the amount that budget can pay for.

        Return its maximum cost and tokens then; None if less output would not help.
        """
        if not can_be_less(refusal):
            return None
        requested = request.max_output_tokens
        worst = clamp_to(context, self.name, input_tokens, requested, floor, refusal)
        if worst.output_tokens < requested:
            request.max_output_tokens, request.is_clamped, request._limit = worst.output_tokens, True, refusal
        return worst.cost_nanos, worst.tokens

    def _truncated(
        self, context: ExecutionContext, request: ModelRequest, response: ModelResponse, call: Call, was_streamed: bool
    ) -> TruncatedByBudget:
        """The halt by the budget that truncated an answer; its text is kept as that of a broken stream is."""
        wanted = request.settings.max_output_tokens or self.max_output_tokens
        assert request._limit is not None, "a clamped request has the limit that clamps it"
        stop = cut(context, call.record, request._limit, request.max_output_tokens, wanted)
        request.received = [response.text] if response.text else []
        if (execution := running_execution.get()) is not None:
            execution.partial = response.text
        return TruncatedByBudget(context, stop, response.text, was_streamed)

    def _streamed(self, context: ExecutionContext, stream_to: Execution) -> Any:
        async def stream(request: ModelRequest) -> ModelResponse:
            source = context._source.path
            received = request.received = []
            yielded: list[str | ToolCall] = []
            emitted_calls = 0
            call = running_call.get()
            assert call is not None
            collect_into(call, yielded)
            pieces = cast(AsyncGenerator[str | ToolCall | Usage | ModelResponse, None], self.request_stream(request))
            async with aclosing(pieces) as coming:
                async for piece in coming:
                    if isinstance(piece, str):
                        received.append(piece)
                        yielded.append(piece)
                        request._is_final = True
                        stream_to.emit(context, TextDelta(piece, source))
                    elif isinstance(piece, ModelResponse):
                        if piece.usage is not None:
                            call.usage = None  # the final usage replaces intermediate reports
                        return piece
                    elif isinstance(piece, Usage):
                        call.usage = piece
                    elif not isinstance(piece, ToolCall):
                        raise InvalidValue(f"a piece of {self.name!r}", piece, "text, ToolCall, Usage or ModelResponse")
                    elif emitted_calls < MAX_CALLS_PER_TURN:
                        emitted_calls += 1
                        yielded.append(piece)
                        request._is_final = True
                        stream_to.emit(context, ToolCallDelta(piece, source))
            raise TruncatedResponse(self.name, "".join(received))

        return stream

    # For providers.

    async def request(self, request: ModelRequest) -> ModelResponse:
        """Send the request, and wait for the complete answer."""
        raise NotImplementedError(f"{type(self).__name__} does not implement request")

    async def request_stream(self, request: ModelRequest) -> AsyncIterator[str | ToolCall | Usage | ModelResponse]:
        """Yield pieces of text, tool calls once complete, usage as it is reported, and the complete ModelResponse last.

        A stream that ends without a ModelResponse has broken off. By default the answer comes in one piece.
        """
        response = await self.request(request)
        if response.text:
            yield response.text
        for call in response.tool_calls:
            yield call
        yield response

    def count_input(self, request: ModelRequest) -> int:
        """The maximum number of input tokens; a cheap estimate from above."""
        weight = request.messages.weight + bytes_of(request.instructions)
        for tool in request.tools:
            weight += tool.weight
        return weight // BYTES_PER_TOKEN + 1


# Answers in a journal.


def _was_truncated(entry: JournalEntry) -> bool:
    """Whether the budget paid for a part of the answer only."""
    return entry.value["is_clamped"] and _decode(entry.value).is_truncated


def _encode(name: str, request: ModelRequest, response: ModelResponse) -> dict[str, Any]:
    """An answer as JSON, with the output that the budget had paid for."""
    value = {
        "name": name,
        "text": response.text,
        "tool_calls": [_encode_call(call) for call in response.tool_calls],
        "usage": None if response.usage is None else _encode_usage(response.usage),
        "finish_reason": response.finish_reason,
        "model": response.model,
        "max_output_tokens": request.max_output_tokens,
        "is_clamped": request.is_clamped,
    }
    must_be_json(f"the answer of model {name!r}", value)
    return value


def _encode_usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "cached_input_tokens": usage.cached_input_tokens,
        "cache_write_tokens": usage.cache_write_tokens,
        "model": usage.model,
        "cost_nanos": usage.cost_nanos,
    }


def _encode_call(call: ToolCall) -> dict[str, Any]:
    arguments = call.arguments if isinstance(call.arguments, str) else dict(call.arguments)
    return {"id": call.id, "name": call.name, "arguments": arguments}


def _decode(value: Mapping[str, Any]) -> ModelResponse:
    calls = tuple(ToolCall(call["id"], call["name"], call["arguments"]) for call in value["tool_calls"])
    usage = None if value["usage"] is None else Usage(**value["usage"])
    return ModelResponse(value["text"], calls, usage, value["finish_reason"], value["model"])
