"""Fates of a request on the wire, as data.

`Say` defines the model's output, which is billed; its `then` is the failure after that, during delivery. The behaviours
of the in-process provider mean the same here, with the tokens that they state.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, assert_never

from penstock.money import Usd
from penstock.testing.provider.behaviours import (
    Answer,
    Behaviour,
    FailAfterBilling,
    LieAboutUsage,
    NoUsage,
    Raise,
    RefuseFree,
    ServerError,
    Stall,
)
from penstock.testing.provider.request import WireRequest


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call requested by the model; `arguments` given as text are sent unchanged, even if they are not JSON."""

    name: str
    arguments: Mapping[str, Any] | str = field(default_factory=dict)
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Fail:
    """An error status instead of the answer."""

    status: int = 500


@dataclass(frozen=True, slots=True)
class Cut:
    """The connection is reset: before the headers, `after` that many pieces of a stream, or half of a plain answer."""

    after: int | None = None


@dataclass(frozen=True, slots=True)
class Hang:
    """Nothing more is sent until the caller disconnects: before the headers, or `after` that many pieces."""

    after: int | None = None


@dataclass(frozen=True, slots=True)
class Truncate:
    """The answer ends normally `after` that many pieces, but without its end markers; a plain one in the middle."""

    after: int = 0


@dataclass(frozen=True, slots=True)
class Garble:
    """The event `after` that many pieces is not JSON, and the rest follows; a plain answer breaks in its second
    half."""

    after: int = 0


@dataclass(frozen=True, slots=True)
class Endless:
    """The answer never ends, whatever the request allows: its text, as events or inside one line; or no text at all.

    `padding` is comments between the events of a stream, or whitespace in a plain answer. With `compressed` the body is
    sent as gzip, which was not requested. `drip_s` of the answer is the delay before each part.
    """

    what: Literal["text", "line", "padding"] = "text"
    compressed: bool = False
    status: int = 200


Break: TypeAlias = Cut | Hang | Truncate | Garble | Endless
Fault: TypeAlias = Fail | Break
Reported: TypeAlias = Literal["true", "zero", "absent"] | tuple[int, int]


@dataclass(frozen=True, slots=True)
class Say:
    """The model's output, and its delivery: a stream has a piece per four characters and tool call.

    Fields that are None follow from the request: the text is an echo, and tokens are counted.
    """

    text: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    output_tokens: int | None = None
    input_tokens: int | None = None
    cost_usd: Usd | None = None
    """Replaces the list price."""
    usage: Reported = "true"
    """Usage reported in the answer, (input, output) for a false report; the invoice has the true usage."""
    latency_s: float | None = None
    """Delay before the headers; None for the provider's latency."""
    drip_s: float = 0.0
    """Delay before each piece of a stream."""
    then: Fault | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Nothing is generated or billed. Without a status the connection is reset."""

    status: int | None
    retry_after_s: float | None = None
    latency_s: float | None = None
    outcome: str = ""


ECHO = Say()
Fate: TypeAlias = Behaviour | Say | str
Script: TypeAlias = Iterable[Fate] | Callable[[WireRequest], Fate] | None


def by_chance(
    odds: Iterable[tuple[float, Fate]], *, seed: int, otherwise: Fate = ECHO
) -> Callable[[WireRequest], Fate]:
    """Return a script that draws each request's fate by probability; the same seed and number give the same fate."""
    table = tuple(odds)
    if any(chance < 0 for chance, _ in table) or sum(chance for chance, _ in table) > 1:
        raise ValueError("odds: probabilities are not negative, and their sum is not over 1")

    def fate(request: WireRequest) -> Fate:
        left = random.Random(f"{seed}/{request.number}").random()
        for chance, found in table:
            left -= chance
            if left < 0:
                return found
        return otherwise

    return fate


def on_the_wire(fate: Fate, latency_s: float) -> Say | Refusal:
    """Return `fate` as one of the two types that the server plays, with `latency_s` where it states none."""
    if isinstance(fate, Stall):
        found = on_the_wire(fate.then, latency_s)
        return replace(found, latency_s=(found.latency_s or 0.0) + fate.seconds)
    found = _translated(fate)
    return replace(found, latency_s=latency_s) if found.latency_s is None else found


def _translated(
    fate: Answer | FailAfterBilling | RefuseFree | ServerError | LieAboutUsage | NoUsage | Raise | Say | str,
) -> Say | Refusal:
    match fate:
        case Say():
            return fate
        case str():
            return Say(fate)
        case Answer(text, taken, given, latency_s, cost_usd):
            return Say(text, (), given, taken, cost_usd, latency_s=latency_s)
        case NoUsage(text, taken, given):
            return Say(text, (), given, taken, usage="absent")
        case LieAboutUsage(reported_input, reported_output, taken, given, text):
            return Say(text, (), given, taken, usage=(reported_input, reported_output))
        case FailAfterBilling(_, taken, given):
            return Say("", (), given, taken, then=Cut())
        case ServerError(status, True, taken, given):
            return Say("", (), given, taken, then=Fail(status))
        case ServerError(status):
            return Refusal(status, outcome=f"HTTP {status}")
        case RefuseFree(status, retry_after_s):
            return Refusal(status, retry_after_s, outcome=f"HTTP {status}")
        case Raise(exception):
            name = exception.__name__ if isinstance(exception, type) else type(exception).__name__
            return Refusal(None, outcome=f"raised {name}")
        case _:
            assert_never(fate)
