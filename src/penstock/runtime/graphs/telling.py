"""The answer of an executor that is called back with what there is to tell, and does not yield it.

The runtime takes such an answer as it is: progress is told in the task of the node, as it is made. For anybody else, as
an executor around another one, it is a stream like any other; then a task does the work, under a token of its own:
leaving the stream cancels it and waits for it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from penstock.runtime.context import ExecutionContext
from penstock.runtime.graphs.node_events import NodeEvent
from penstock.runtime.scheduling.listener import Listener, Listening

Tell = Callable[[str, Any], None]
"""Tells progress of a node: what type of event it is, and its data."""
Work = Callable[[ExecutionContext, Tell], Awaitable[Any]]
"""Works at a place, tells on its way, and gives the answer."""


class Telling:
    """Progress, and an answer: `work` at `place`."""

    __slots__ = ("_place", "_work")

    def __init__(self, place: ExecutionContext, work: Work) -> None:
        self._place = place
        self._work = work

    def to(self, tell: Tell) -> Awaitable[Any]:
        """The answer; who is to be told is, on the way."""
        return self._work(self._place, tell)

    async def __aiter__(self) -> AsyncGenerator[Any, None]:
        token = self._place.cancellation.child("stream")
        answer: Any = None

        async def work(listener: Listener[NodeEvent]) -> None:
            nonlocal answer
            place = self._place._under(token)
            answer = await self._work(place, lambda name, data: listener.tell(NodeEvent.progress(name, data)))

        async with Listening(work, token) as listener:
            while await listener.has_more():
                while listener.events:
                    yield listener.events.popleft()
        yield answer
