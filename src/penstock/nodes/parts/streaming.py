"""Telling the pieces of an answer while it comes.

Whoever asks a model is called back with pieces; a node tells its progress by yielding. Between the two stands a task
that does the asking, under a token of its own: leaving the stream cancels it and waits for it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable

from penstock.agents.hooks import OnDelta
from penstock.agents.model import Delta, TextDelta
from penstock.kernel.values import DataValue
from penstock.runtime.context import ExecutionContext
from penstock.runtime.graphs.node_events import NodeEvent
from penstock.runtime.scheduling.listener import Listener, Listening

Answering = Callable[[ExecutionContext, OnDelta], Awaitable[DataValue]]
"""Asks at a place, tells the pieces, and gives the answer."""


async def streamed(place: ExecutionContext, answering: Answering) -> AsyncGenerator[NodeEvent | DataValue, None]:
    """The pieces of the answer as `delta` events, and the answer."""
    token = place.cancellation.child("stream")
    answer: DataValue | None = None

    async def work(listener: Listener[Delta]) -> None:
        nonlocal answer
        answer = await answering(place._under(token), listener.tell)

    async with Listening(work, token) as listener:
        while await listener.has_more():
            while listener.events:
                yield _told(listener.events.popleft())
    assert answer is not None
    yield answer


def _told(delta: Delta) -> NodeEvent:
    if isinstance(delta, TextDelta):
        return NodeEvent.progress("delta", {"text": delta.text, "source": delta.source})
    call = {"id": delta.call.id, "name": delta.call.name, "arguments": delta.call.arguments}
    return NodeEvent.progress("delta", {"tool_call": call, "source": delta.source})
