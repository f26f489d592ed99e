"""Telling the pieces of an answer while it comes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from penstock.agents.hooks import OnDelta
from penstock.agents.model import Delta, TextDelta
from penstock.kernel.values import DataValue
from penstock.runtime.context import ExecutionContext
from penstock.runtime.graphs.telling import Tell, Telling

Answering = Callable[[ExecutionContext, OnDelta], Awaitable[DataValue]]
"""Asks at a place, tells the pieces, and gives the answer."""


def streamed(place: ExecutionContext, answering: Answering) -> Telling:
    """The answer, and its pieces as `delta` events."""

    def work(place: ExecutionContext, tell: Tell) -> Awaitable[DataValue]:
        return answering(place, lambda delta: tell("delta", _told(delta)))

    return Telling(place, work)


def _told(delta: Delta) -> dict[str, object]:
    if isinstance(delta, TextDelta):
        return {"text": delta.text, "source": delta.source}
    call = {"id": delta.call.id, "name": delta.call.name, "arguments": delta.call.arguments}
    return {"tool_call": call, "source": delta.source}
