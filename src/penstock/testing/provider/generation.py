"""Generate the answer to a request: text, tool calls and tokens, never more than the request allows.

Knows how tokens are counted, and nothing of prices, connections or formats.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from penstock.testing.provider.fates import Say, ToolCall
from penstock.testing.provider.request import CHARACTERS_PER_TOKEN, WireRequest, compact, count_tokens


@dataclass(frozen=True, slots=True)
class Generation:
    """The generated output, and the answer's report of it."""

    text: str
    tool_calls: tuple[ToolCall, ...]
    """Their arguments are already text."""
    input_tokens: int
    output_tokens: int
    cut_short: bool
    """The output ended at the request's limit."""
    usage: tuple[int, int] | None
    """(input, output) tokens as the answer reports them; None if it does not."""
    model: str = ""
    number: int = 0
    created_s: int = 0
    usage_in_stream: bool = False
    """Whether the request asks for usage in the stream, for APIs where that is optional."""
    answers: int = 1
    """Number of answers in the response, each with the same text."""

    @property
    def pieces(self) -> list[str]:
        """Return the text as it is streamed, a token at a time."""
        step = CHARACTERS_PER_TOKEN
        return [self.text[at : at + step] for at in range(0, len(self.text), step)]

    @property
    def piece_count(self) -> int:
        """Number of pieces of a stream."""
        return (count_tokens(self.text) + len(self.tool_calls)) * self.answers

    def numbered(self, number: int, created_s: int) -> Generation:
        """Return a copy with a number, and with ids for tool calls that have none."""
        calls = (
            replace(call, id=call.id or f"call_{number}_{index}") for index, call in enumerate(self.tool_calls, start=1)
        )
        return replace(self, number=number, created_s=created_s, tool_calls=tuple(calls))


def generate(say: Say, request: WireRequest, default_tokens: int) -> Generation:
    """Return the output of `say` for this request; an echo without a stated length has `default_tokens`."""
    cap = request.max_tokens
    text, calls = _wanted(say, request, default_tokens)
    wanted = count_tokens(text) + sum(map(_size, calls)) if say.output_tokens is None else say.output_tokens
    kept_text = text if cap is None else text[: cap * CHARACTERS_PER_TOKEN]
    kept_calls = calls if cap is None else tuple(_fitting(calls, cap - count_tokens(kept_text)))
    output_tokens = wanted if cap is None else min(wanted, cap)
    if say.output_tokens is None:
        output_tokens = count_tokens(kept_text) + sum(map(_size, kept_calls))
    input_tokens = request.input_tokens if say.input_tokens is None else say.input_tokens
    cut_short = output_tokens < wanted or kept_text != text or kept_calls != calls
    output_tokens *= request.answers
    return Generation(
        kept_text,
        kept_calls,
        input_tokens,
        output_tokens,
        cut_short,
        _reported(say, input_tokens, output_tokens),
        request.model,
        usage_in_stream=request.asks_for_usage,
        answers=request.shown_answers,
    )


def _wanted(say: Say, request: WireRequest, default_tokens: int) -> tuple[str, tuple[ToolCall, ...]]:
    calls = tuple(replace(call, arguments=_arguments(call)) for call in say.tool_calls)
    if say.text is not None or calls:
        return say.text or "", calls
    length = default_tokens if say.output_tokens is None else say.output_tokens
    if request.max_tokens is not None:
        length = min(length, request.max_tokens + 1)  # one more, to be seen as cut short; a long echo is not built
    return _echo(request.last_text, length * CHARACTERS_PER_TOKEN), ()


def _echo(text: str, length: int) -> str:
    echoed = (text.strip() or "ok") + " "
    return (echoed * (length // len(echoed) + 1))[:length]


def _arguments(call: ToolCall) -> str:
    return call.arguments if isinstance(call.arguments, str) else compact(call.arguments)


def _size(call: ToolCall) -> int:
    return count_tokens(call.name + _arguments(call))


def _fitting(calls: tuple[ToolCall, ...], tokens: int) -> Iterator[ToolCall]:
    """Yield the calls, from the first on, that fit: a partial call is left out."""
    for call in calls:
        tokens -= _size(call)
        if tokens < 0:
            return
        yield call


def _reported(say: Say, input_tokens: int, output_tokens: int) -> tuple[int, int] | None:
    match say.usage:
        case "true":
            return input_tokens, output_tokens
        case "zero":
            return 0, 0
        case "absent":
            return None
        case lie:
            return lie
