"""One turn of a chat: the request for it, and the turn in progress with the run that answers it.

A request with a run id is idempotent: repeating it returns the same turn, and a different request with the same id is a
Conflict. Messages hold the names and sizes of attachments; the service compares their bytes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from penstock.agents.messages import Role
from penstock.chat.conversation import ChatMessage, MessageTree
from penstock.chat.ports import Attachment
from penstock.checks import choice
from penstock.hosting.limits import RunLimits
from penstock.hosting.ports import Conflict, HostedEvent, RunIdTaken, RunRecord, retry_unavailable

if TYPE_CHECKING:
    from penstock.hosting.host import RunHost

Limits = RunLimits | Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class NewMessage:
    """One message that the caller adds."""

    role: Role
    content: str
    attached: Sequence[Attachment] | None = ()
    """None to keep the attachments of the message that it replaces."""
    tool_round: Mapping[str, Any] | None = None
    """The `text` and `calls` of an answer that called the client's tools, each with `id`, `name`, `arguments` and
    `result`; `content` has them as text."""

    @property
    def data(self) -> dict[str, Any]:
        """The data stored with the message; attachments are referred to by id, never copied."""
        data: dict[str, Any] = {"state": "complete", "attachments": [_reference(one) for one in self.attached or ()]}
        return data if self.tool_round is None else {**data, "tool_round": dict(self.tool_round)}


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """The request for a turn; the ids of its messages are derived from the run id."""

    run_id: str
    digest: str
    """Digest of the run id."""
    at_ms: int
    limits: Limits
    user_tools: tuple[str, ...]
    is_named: bool
    """Whether the caller supplied the run id, so that this may be a repeated request."""
    messages: tuple[NewMessage, ...] = ()
    """The new messages, the newest last; empty if the turn only requests an answer."""
    version: int | None = None
    """Version of the graph; None means the newest."""
    about: Mapping[str, Any] | None = None
    """Further data stored with the run."""
    below: Callable[[MessageTree], str | None] | None = None
    """Returns the parent id of the first message of the turn; None if the caller gave no position."""
    mark: str | None = None
    """A key that will point to the newest of the new messages."""
    client_request: Mapping[str, Any] | None = None
    """What the client wants of the agents that the user talks to, stored as the input of the run."""

    @property
    def answer_id(self) -> str:
        return f"a-{self.digest}"

    def user_id(self, number: int = 0) -> str:
        return f"u-{self.digest}" if not number else f"u-{self.digest}-{number}"

    def found_in(self, tree: MessageTree) -> list[tuple[NewMessage, ChatMessage]]:
        """Pair each new message with its stored message in the tree; Conflict if the stored turn differs."""
        ids = [*map(self.user_id, range(1, max(len(self.messages), 1))), self.user_id()]
        there = [tree[id] for id in ids if id in tree]
        is_same = [(one.role, one.content) for one in there] == [(one.role, one.content) for one in self.messages]
        if not is_same or self.user_id(len(ids)) in tree or not self._is_in_place(tree, there):
            raise self.conflict()
        return [*zip(self.messages, there, strict=True)]

    def _is_in_place(self, tree: MessageTree, there: Sequence[ChatMessage]) -> bool:
        first = there[0].id if there else self.answer_id
        return self.below is None or (first in tree and tree[first].parent_id == self.below(tree))

    def conflict(self) -> Conflict:
        """Return the error for a different request with the same run id."""
        return answers_something_else(self.run_id)


def answers_something_else(run_id: str | None) -> RunIdTaken:
    """Return the error for a different request with the same run id."""
    return RunIdTaken(f"run {run_id!r} answers something else; give this one an id of its own")


def user_message_id(answer_id: str) -> str:
    """Return the id of the user message in the turn of an answer, if the turn has one."""
    return f"u-{answer_id.removeprefix('a-')}"


def without_ids(references: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the attachment references without their ids: the same bytes may be attached twice."""
    return [{key: value for key, value in one.items() if key != "id"} for one in references]


def _reference(attached: Attachment) -> dict[str, Any]:
    return {"id": attached.id, "name": attached.name, "media_type": attached.media_type, "size": attached.size}


OnLeave = Literal["continue", "cancel"]

ABANDONED = "the stream of the answer was left"


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A run that answers in a chat. The host owns the run: it continues whether or not a client reads its events."""

    chat_id: str
    run_id: str
    user_message_id: str | None
    """The user message; None if an answer is retried or continued."""
    message_id: str
    """The answer, which exists from the start and is empty until the run ends."""
    run: RunRecord = field(repr=False, compare=False)
    """The run as it was stored when this turn was requested; it has gone on since."""
    _host: RunHost = field(repr=False, compare=False)
    _read: Callable[[ChatTurn], Awaitable[ChatMessage]] = field(repr=False, compare=False)

    async def events(self, after: int = 0, *, on_leave: OnLeave = "continue") -> AsyncGenerator[HostedEvent, None]:
        """Yield the events of the run after `after`, until the run has ended or is parked.

        With `on_leave="cancel"`, closing the generator earlier cancels the run and waits until it has ended. Close it
        explicitly (`contextlib.aclosing`) to wait for that.
        """
        choice("on_leave", on_leave, ("continue", "cancel"))
        is_over = False
        try:
            async with aclosing(self._host.events(self.run_id, after)) as events:
                async for event in events:
                    yield event
            is_over = True
        finally:
            if not is_over and on_leave == "cancel":
                await retry_unavailable(lambda: self.cancel(ABANDONED))
                await self._over()

    async def cancel(self, reason: str = "cancelled", *, by: str = "") -> None:
        """Cancel the run; the text it has emitted so far is kept."""
        await self._host.cancel(self.run_id, reason=reason, by=by)

    async def result(self) -> ChatMessage:
        """Wait until the run has ended or is parked, and return the stored answer, complete or not."""
        await self._over()
        return await self._read(self)

    async def _over(self) -> None:
        """Wait for the end of the run by reading its events, which is faster than polling its status."""
        stored_events = self._host.stores.events
        after = await retry_unavailable(lambda: stored_events.last_seq(self.run_id))
        async with aclosing(self._host.events(self.run_id, after)) as events:
            async for _ in events:
                pass
