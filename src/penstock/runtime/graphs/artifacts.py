"""Artifacts behind links: each is made once for all its consumers, and only while at least one of them waits.

`kernel.links` decides which consumer makes an artifact, which ones wait and what is a cycle; this module does the
making and the waiting. An artifact is made in a task of its own, because the first consumer may be cancelled while
others still wait for it. When the last consumer leaves, it cancels the task and waits until the task has ended, so no
task outlives its consumers. A consumer that arrives during such a cancellation waits for its end, and requests the
artifact again.

Artifacts are opaque here; the runtime defines how one is made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar, copy_context
from typing import Any

from penstock.kernel.links import Key, LinkTable, Made
from penstock.runtime.call import Call, running_call
from penstock.runtime.scheduling.listener import until_done

Make = Callable[[Key], Awaitable[Any]]

_being_made: ContextVar[tuple[Artifacts, Key] | None] = ContextVar("penstock_artifact", default=None)
"""The artifact being made in this context: it is the consumer of the artifacts it requests."""


class _Making:
    """One artifact in progress."""

    __slots__ = ("artifact", "error", "given_up", "is_open", "key", "task", "waiting")

    task: asyncio.Task[None]

    def __init__(self, key: Key) -> None:
        self.key = key
        self.artifact: Any = None
        self.error: BaseException | None = None
        self.waiting = 0
        self.given_up = False
        """Whether all consumers left while it was being made; its outcome is then discarded."""
        self.is_open = True
        """Whether the table still counts it as being made."""


class Artifacts:
    """The artifacts of one run, on one event loop."""

    __slots__ = ("_make", "_making", "_table", "above")

    def __init__(self, make: Make) -> None:
        self._make = make
        self._table = LinkTable()
        self._making: dict[Key, _Making] = {}
        self.above: Call | None = None
        """The call under which making an artifact is recorded: it must outlive every consumer."""

    async def get(self, keys: Sequence[Key]) -> list[Any]:
        """Return the artifacts, making missing ones concurrently; raises LinkCycle if one needs itself."""
        found: list[Made | _Making] = []
        interrupted = None
        try:
            for key in keys:
                found.append(self._ask(key))
            return [one.artifact if isinstance(one, Made) else await self._made(one) for one in found]
        finally:
            for one in found:
                if isinstance(one, _Making):
                    interrupted = await self._leave(one) or interrupted
            if interrupted is not None:
                raise interrupted

    def _ask(self, key: Key) -> Made | _Making:
        here = _being_made.get()
        answer = self._table.ask(key, here[1] if here is not None and here[0] is self else None)
        if isinstance(answer, Made):
            return answer
        if answer == "make":
            self._making[key] = self._begin(key)
        making = self._making[key]
        making.waiting += 1
        return making

    def _begin(self, key: Key) -> _Making:
        making = _Making(key)
        around = copy_context()
        around.run(running_call.set, self.above)
        around.run(_being_made.set, (self, key))
        making.task = asyncio.get_running_loop().create_task(self._run(making), context=around)
        return making

    async def _run(self, making: _Making) -> None:
        try:
            making.artifact = await self._make(making.key)
        except BaseException as error:  # raised again to each waiting consumer, in its own task
            making.error = error
            self._close(making)
        else:
            making.is_open = False
            del self._making[making.key]
            self._table.done(making.key, making.artifact)

    async def _made(self, making: _Making) -> Any:
        await asyncio.wait([making.task])
        self._close(making)
        if making.given_up:
            return (await self.get([making.key]))[0]
        if making.task.cancelled():
            raise asyncio.CancelledError
        if making.error is not None:
            call = running_call.get()
            if call is not None:
                call.failed_below = making.error  # it is recorded and counted where it was made
            raise making.error
        return making.artifact

    async def _leave(self, making: _Making) -> asyncio.CancelledError | None:
        making.waiting -= 1
        if making.waiting or making.task.done():
            return None
        making.given_up = True
        making.task.cancel()
        interrupted = await until_done(making.task)
        self._close(making)
        return interrupted

    def _close(self, making: _Making) -> None:
        """Mark a failed artifact, which may not have begun, as not made; the next request makes it again."""
        if making.is_open:
            making.is_open = False
            del self._making[making.key]
            self._table.failed(making.key)
