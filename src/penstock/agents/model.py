"""Models, as agents see them.

A `Model` traces itself and holds what it may cost before it asks: whoever calls `generate` with a context gets a call
in the run's tree, contained like any other. A provider implements `request`, and `request_stream` if it can stream; it
never looks at budgets.

The worst case of a call is its input, estimated from above, and as much output as it may give. If the budget cannot
pay for that much output, the call asks for less, down to `floor`; below that it is refused. An answer that was cut
there is a halt by that budget: it is paid, what came of it is kept, and a run that goes on with more asks again.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast

from penstock.agents.hooks import Execution, OnDelta, running_execution
from penstock.agents.messages import Message, ToolCall, Transcript, bytes_of
from penstock.agents.tools import MAX_CALLS_PER_TURN, ToolSpec
from penstock.errors import BudgetExceededError, InvalidValue, PenstockError
from penstock.runtime import door
from penstock.runtime.billing.usage import Usage
from penstock.runtime.call import Call, running_call
from penstock.runtime.clamping import Limit, can_be_less, clamp, clamp_to, cut
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable import points
from penstock.runtime.durable.journal import COST_UNKNOWN, Journal, must_be_json
from penstock.runtime.durable.keys import Entered
from penstock.runtime.durable.ports import JournalEntry
from penstock.runtime.durable.replay import paid, replay
from penstock.stops import Stop
from penstock.tracing.record import NOT_WHOLE

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]

BYTES_PER_TOKEN = 2
"""Input is taken to be no more than one token for so many bytes; plain text has three to four of them in a token."""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """How a model is to answer; None leaves it to the model."""

    max_output_tokens: int | None = None
    temperature: float | None = None
    stop: tuple[str, ...] = ()
    output_schema: Mapping[str, Any] | None = None
    """A JSON Schema the answer has to follow, where the provider can enforce one."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Passed on to the provider as it is."""


DEFAULT_SETTINGS = ModelSettings()


@dataclass(slots=True)
class ModelRequest:
    """What a model is asked. Hooks may change it before it is sent."""

    messages: Transcript
    """The conversation itself, not a copy: to send something else this once, put another transcript here."""
    tools: Sequence[ToolSpec] = ()
    settings: ModelSettings = DEFAULT_SETTINGS
    instructions: str = ""
    """What the model is told about itself, before the conversation."""
    max_output_tokens: int = 0
    """What the answer may have at most, from the settings, the model and the budget."""
    is_clamped: bool = False
    """Whether the budget pays for less output than was wanted."""
    received: list[str] | None = None
    """The pieces of a streamed answer that have come."""
    _limit: Limit | None = field(default=None, init=False)
    """What pays for no more, if it is clamped."""
    _is_told: bool = field(default=False, init=False)
    """Whether somebody has had a piece of the streamed answer: then the request is not sent again."""


@dataclass(slots=True)
class ModelResponse:
    """What a model answered, and what that used."""

    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    usage: Usage | None = None
    """None if the provider did not say."""
    finish_reason: FinishReason = "stop"
    model: str | None = None
    """The model that answered, which may be a dated version of the one that was asked."""
    raw: Any = None
    """What the provider's client gave, for whoever needs more."""

    @property
    def message(self) -> Message:
        """The answer as a message of the conversation."""
        return Message("assistant", self.text, self.tool_calls)

    @property
    def not_whole(self) -> FinishReason | None:
        """Why it ended before its own end; None if it came to that."""
        return self.finish_reason if self.finish_reason in NOT_WHOLE else None

    @property
    def is_cut(self) -> bool:
        """Whether it ended where it may have no more, in its text or in the middle of a tool call."""
        if self.finish_reason != "length":
            return False
        return not self.tool_calls or any(isinstance(call.arguments, str) for call in self.tool_calls)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next piece of a streamed answer."""

    text: str
    source: str = ""
    """Which context it comes from: `main`, `main/researcher`."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A tool call in a streamed answer has become known; those beyond what one turn may have are not told."""

    call: ToolCall
    source: str = ""


Delta = TextDelta | ToolCallDelta
Asking = Coroutine[Any, Any, Call]


class TruncatedResponse(PenstockError):
    """An answer broke off: what came is not the whole of it."""

    def __init__(self, model: str, partial: str, why: str = "without its end marker") -> None:
        self.model = model
        self.partial = partial
        """The text that came."""
        super().__init__(f"the answer of {model} broke off after {len(partial)} characters, {why}")


class AnswerCut(BudgetExceededError):
    """A budget paid for a part of an answer only: it is cut there, and nothing more is asked until there is more."""

    def __init__(self, context: ExecutionContext, stop: Stop, text: str, is_told: bool) -> None:
        behind, partial = context._budget_behind(stop), context.partial_results
        super().__init__(context.usage, behind, stop.message, stop=stop, partial=partial)
        self.text = text
        """What came of the answer."""
        self.is_told = is_told
        """Whether somebody was told it while it came."""
        self.source = context._source.path
        """Which context it comes from: `main`, `main/researcher`."""


class Model:
    """A language model. Subclass it, and implement `request`."""

    max_output_tokens: int = 4_096
    """What an answer may have at most where nobody says otherwise."""
    floor: int = 16
    """So much output has to be affordable for a call to make sense."""
    retries: int = 0
    """How often a request that failed is sent again, if nothing of its answer was streamed; each draws on the run's
    retry budget."""

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
        """Ask the model; the call is contained and recorded. With `on_delta` the answer is streamed to it as well.

        Raises Halted or CancelledError like every call, AnswerCut if the budget paid for a part of the answer only,
        TruncatedResponse for an answer that broke off, and what the provider raised.
        """
        transcript = messages if isinstance(messages, Transcript) else Transcript(messages)
        request = ModelRequest(transcript, tools, settings or DEFAULT_SETTINGS)
        return await self.send(context, request, on_delta)

    def send(
        self, context: ExecutionContext, request: ModelRequest, on_delta: OnDelta | None = None
    ) -> Coroutine[Any, Any, ModelResponse]:
        """The same for a request that somebody has made; hooks may change it, and deltas go to the execution's too."""
        # Every coroutine between a loop and its model costs time in each turn: where nobody listens there is one.
        execution = running_execution.get()
        if execution is None:
            execution = None if on_delta is None else Execution(on_delta=on_delta)
        elif on_delta is not None:
            execution = Execution(execution.listeners, on_delta, execution.approve)
        if execution is None or (not execution.listeners and execution.on_delta is None):
            return self._ask(context, request, None)
        return self._ask_told(context, request, execution)

    async def _ask_told(self, context: ExecutionContext, request: ModelRequest, execution: Execution) -> ModelResponse:
        """Ask, and tell those who listen."""
        said = await execution.fire("before_model_call", context, request)
        request = said if isinstance(said, ModelRequest) else request
        streamed = execution if execution.on_delta is not None else None
        try:
            response = await self._ask(context, request, streamed)
        except BaseException as error:
            if request.received:
                execution.partial = "".join(request.received)
            if not isinstance(error, GeneratorExit):
                await execution.fire("after_model_call", context, request, None, error)
            raise
        said = await execution.fire("after_model_call", context, request, response, None)
        return said if isinstance(said, ModelResponse) else response

    def _ask(
        self, context: ExecutionContext, request: ModelRequest, told: Execution | None
    ) -> Coroutine[Any, Any, ModelResponse]:
        journal = context._run.journal
        if journal is not None:
            return self._ask_once(journal, context, request, told)
        return self._ask_now(context, request, told)

    async def _ask_now(self, context: ExecutionContext, request: ModelRequest, told: Execution | None) -> ModelResponse:
        """Ask, in a run that writes no answers down."""
        made = await self._call(context, request, told)
        response: ModelResponse = made.value if made.stop is None and made.error is None else made.result()
        if request.is_clamped and response.is_cut:
            raise self._cut(context, request, response, made, told is not None)
        return response

    async def _ask_once(
        self, journal: Journal, context: ExecutionContext, request: ModelRequest, told: Execution | None
    ) -> ModelResponse:
        """The answer that the run has had here before; or ask, and write the answer down before anybody has it."""
        first = place = journal.here().next("llm", self.name)
        times = 1
        while (found := journal.find(place.path)) is not None:
            if not _was_cut(found):
                return self._answered(journal, context, request, told, found)
            # It was paid, and is no answer: the run goes on because there is more to pay with, and so it asks again.
            replay(journal, context, found, self.name, _read(found.value))
            times += 1
            place = first.again(times)
        if points.hook is not None:
            points.hook("llm.before_call")
        with Entered(place):
            made = await self._call(context, request, told)
        response: ModelResponse = made.result()
        record = made.record
        written = _written(self.name, request, response)
        if record.cost_unknown:
            written[COST_UNKNOWN] = True
        await journal.append(place.path, "llm", written, record.cost, record.tokens_in or 0, record.tokens_out or 0)
        if request.is_clamped and response.is_cut:
            raise self._cut(context, request, response, made, told is not None)
        return response

    def _answered(
        self,
        journal: Journal,
        context: ExecutionContext,
        request: ModelRequest,
        told: Execution | None,
        found: JournalEntry,
    ) -> ModelResponse:
        """What was answered then, told in one piece to whoever listens."""
        response = _read(found.value)
        request.max_output_tokens = found.value["max_output_tokens"]
        request.is_clamped = found.value["is_clamped"]
        replay(journal, context, found, self.name, response)
        paid(context, response)
        if told is not None:
            source = context._source.path
            request.received = [response.text] if response.text else []
            for piece in request.received:
                told.tell(context, TextDelta(piece, source))
            for call in response.tool_calls[:MAX_CALLS_PER_TURN]:
                told.tell(context, ToolCallDelta(call, source))
        return response

    def _call(self, context: ExecutionContext, request: ModelRequest, told: Execution | None) -> Asking:
        wanted = request.settings.max_output_tokens or self.max_output_tokens
        name, given, floor = self.name, self.count_input(request), min(self.floor, wanted)
        cost, tokens, output, limit = clamp(context, name, given, wanted, floor)
        request.max_output_tokens = output
        request.is_clamped = output < wanted
        request._limit = limit
        retries, work, unless = self.retries, self.request, None
        if told is not None:
            work, unless = self._streamed(context, told), (lambda: request._is_told) if retries else None
        less = None if context._run.shared is None else partial(self._with_less, context, request, given, floor)
        return door.acall(context, "llm", work, (request,), name, cost, name, None, retries, None, tokens, unless, less)

    def _with_less(
        self, context: ExecutionContext, request: ModelRequest, given: int, floor: int, refusal: Stop
    ) -> tuple[int | None, int] | None:
        """Let a request that a shared budget has refused ask for no more output than can be paid there.

        What it may cost and use then; None if that would not help.
        """
        if not can_be_less(refusal):
            return None
        asked = request.max_output_tokens
        worst = clamp_to(context, self.name, given, asked, floor, refusal)
        if worst.output_tokens < asked:
            request.max_output_tokens, request.is_clamped, request._limit = worst.output_tokens, True, refusal
        return worst.cost_nanos, worst.tokens

    def _cut(
        self, context: ExecutionContext, request: ModelRequest, response: ModelResponse, made: Call, is_told: bool
    ) -> AnswerCut:
        """The halt by the budget that has cut an answer; what came is kept where that of a broken stream is."""
        wanted = request.settings.max_output_tokens or self.max_output_tokens
        assert request._limit is not None, "what is clamped is clamped by something"
        stop = cut(context, made.record, request._limit, request.max_output_tokens, wanted)
        request.received = [response.text] if response.text else []
        if (execution := running_execution.get()) is not None:
            execution.partial = response.text
        return AnswerCut(context, stop, response.text, is_told)

    def _streamed(self, context: ExecutionContext, told: Execution) -> Any:
        async def stream(request: ModelRequest) -> ModelResponse:
            source = context._source.path
            received = request.received = []
            request._is_told = False
            calls_told = 0
            call = running_call.get()
            assert call is not None
            pieces = cast(AsyncGenerator[str | ToolCall | Usage | ModelResponse, None], self.request_stream(request))
            async with aclosing(pieces) as coming:
                async for piece in coming:
                    if isinstance(piece, str):
                        received.append(piece)
                        request._is_told = True
                        told.tell(context, TextDelta(piece, source))
                    elif isinstance(piece, ModelResponse):
                        if piece.usage is not None:
                            call.usage = None  # the whole knows better than what was said on the way
                        return piece
                    elif isinstance(piece, Usage):
                        call.usage = piece
                    elif not isinstance(piece, ToolCall):
                        raise InvalidValue(f"a piece of {self.name!r}", piece, "text, ToolCall, Usage or ModelResponse")
                    elif calls_told < MAX_CALLS_PER_TURN:
                        calls_told += 1
                        request._is_told = True
                        told.tell(context, ToolCallDelta(piece, source))
            raise TruncatedResponse(self.name, "".join(received))

        return stream

    # For providers.

    async def request(self, request: ModelRequest) -> ModelResponse:
        """Ask, and wait for the whole answer."""
        raise NotImplementedError(f"{type(self).__name__} does not implement request")

    async def request_stream(self, request: ModelRequest) -> AsyncIterator[str | ToolCall | Usage | ModelResponse]:
        """Ask, and give pieces of text, tool calls as they are complete, usage as it becomes known; the whole last.

        What ends without a ModelResponse has broken off. By default the answer comes in one piece.
        """
        response = await self.request(request)
        if response.text:
            yield response.text
        for call in response.tool_calls:
            yield call
        yield response

    def count_input(self, request: ModelRequest) -> int:
        """The most tokens the input can have; an estimate from above that costs next to nothing to make."""
        weight = request.messages.weight + bytes_of(request.instructions)
        for tool in request.tools:
            weight += tool.weight
        return weight // BYTES_PER_TOKEN + 1


# Answers in a journal.


def _was_cut(entry: JournalEntry) -> bool:
    """Whether the budget paid for a part of the answer only."""
    return entry.value["is_clamped"] and _read(entry.value).is_cut


def _written(name: str, request: ModelRequest, response: ModelResponse) -> dict[str, Any]:
    """An answer as JSON, with how much of one the budget had paid for."""
    written = {
        "name": name,
        "text": response.text,
        "tool_calls": [_written_call(call) for call in response.tool_calls],
        "usage": None if response.usage is None else _written_usage(response.usage),
        "finish_reason": response.finish_reason,
        "model": response.model,
        "max_output_tokens": request.max_output_tokens,
        "is_clamped": request.is_clamped,
    }
    must_be_json(f"the answer of model {name!r}", written)
    return written


def _written_usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "cached_input_tokens": usage.cached_input_tokens,
        "cache_write_tokens": usage.cache_write_tokens,
        "model": usage.model,
        "cost_nanos": usage.cost_nanos,
    }


def _written_call(call: ToolCall) -> dict[str, Any]:
    arguments = call.arguments if isinstance(call.arguments, str) else dict(call.arguments)
    return {"id": call.id, "name": call.name, "arguments": arguments}


def _read(written: Mapping[str, Any]) -> ModelResponse:
    calls = tuple(ToolCall(one["id"], one["name"], one["arguments"]) for one in written["tool_calls"])
    usage = None if written["usage"] is None else Usage(**written["usage"])
    return ModelResponse(written["text"], calls, usage, written["finish_reason"], written["model"])
