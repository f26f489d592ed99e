"""One turn of a chat, on its way: what somebody said, and the run that answers it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from penstock.chat.message import ChatMessage
from penstock.errors import InvalidValue
from penstock.hosting.records import HostedEvent
from penstock.hosting.work.patience import patiently

if TYPE_CHECKING:
    from penstock.hosting.host import RunHost

OnLeave = Literal["continue", "cancel"]

ABANDONED = "the stream of the answer was left"


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A run that answers somebody. It belongs to the host: it goes on whether or not anybody looks."""

    chat_id: str
    run_id: str
    user_message_id: str | None
    """What was said; None if an answer is given again or continued."""
    message_id: str
    """The answer: it is there, empty, from the beginning."""
    _host: RunHost = field(repr=False, compare=False)
    _read: Callable[[ChatTurn], Awaitable[ChatMessage]] = field(repr=False, compare=False)

    async def events(self, after: int = 0, *, on_leave: OnLeave = "continue") -> AsyncGenerator[HostedEvent, None]:
        """What happens, from the event behind `after` on, until the run has ended or is parked.

        With `on_leave="cancel"`, leaving it before that cancels the run and waits until it has ended. Close it
        (`contextlib.aclosing`) to know when it has.
        """
        if on_leave not in ("continue", "cancel"):
            raise InvalidValue("on_leave", on_leave, "continue or cancel")
        is_over = False
        try:
            async with aclosing(self._host.events(self.run_id, after)) as events:
                async for event in events:
                    yield event
            is_over = True
        finally:
            if not is_over and on_leave == "cancel":
                await patiently(lambda: self.cancel(ABANDONED))
                await self._over()

    async def cancel(self, reason: str = "cancelled", *, by: str = "") -> None:
        """Stop the run; what it has said so far stays."""
        await self._host.cancel(self.run_id, reason=reason, by=by)

    async def result(self) -> ChatMessage:
        """Wait until the run has ended, or is parked: the answer, whole or not, as it is kept."""
        await self._over()
        return await self._read(self)

    async def _over(self) -> None:
        """Follow the run to its end, which is noticed sooner than by looking at its status."""
        events_kept = self._host.stores.events
        after = await patiently(lambda: events_kept.last_seq(self.run_id))
        async with aclosing(self._host.events(self.run_id, after)) as events:
            async for _ in events:
                pass
