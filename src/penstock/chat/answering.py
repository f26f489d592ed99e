"""Runs that answer somebody, as the host sees them: what they are given when they begin, what is kept when they end.

A run carries the ids of its chat and its messages, and nothing that was said: the conversation is read when the run
begins, on whatever worker that is, and its answer is written when it has ended. Both may happen again, after a crash,
and come to the same. For messages never change, but for answers that are being written: a run also carries the ids of
those that were unfinished on the way to its own when it was asked for (`untold`), and is never told what they became.
Otherwise a run that somebody else takes over, or that is granted more, would go on with another conversation than it
began with, and one that waits for somebody's approval with another than was approved.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Protocol

from penstock.chat import protocol
from penstock.chat.conversation import MessageTree
from penstock.chat.limits import MessageUnknown
from penstock.chat.message import ChatMessage
from penstock.chat.ports import ChatStore
from penstock.clock import Clock
from penstock.hosting.points import passing
from penstock.hosting.ports import Conflict, EventStore, GraphStore
from penstock.hosting.records import HostedEvent, RunRecord
from penstock.hosting.work.workplace import Prepared
from penstock.kernel.document import parse_graph
from penstock.runtime.graphs.graph_plan import aside

PAGE = 1_000
MAX_AT_HAND = 100
OF_ANSWERS = ("text.delta", "run.started", "run.resumed")
"""The events that tell what of an answer was told."""
MAX_GRAPHS = 256
LOG = logging.getLogger("penstock.chat")


class Stores(Protocol):
    """What is read here of a host's stores."""

    @property
    def events(self) -> EventStore: ...
    @property
    def graphs(self) -> GraphStore: ...


class ChatGone(Conflict):
    """The chat that a run answers in was deleted."""

    def __init__(self, run_id: str, chat_id: str) -> None:
        self.run_id = run_id
        self.chat_id = chat_id
        super().__init__(f"run {run_id!r} cannot begin again: the chat {chat_id!r} that it answers in was deleted")


class Answering:
    """The kind of run that answers somebody in a chat."""

    def __init__(self, chats: ChatStore, stores: Stores, clock: Clock) -> None:
        self._chats = chats
        self._stores = stores
        self._clock = clock
        self._at_hand: dict[str, tuple[ChatMessage, ...]] = {}
        """What leads to answers that were asked for here and are not begun yet, so that it is not read again."""
        self._of_graphs: dict[tuple[str, int], dict[str, Any]] = {}
        """What runs of graphs that were read lately are given; what is in a version never changes."""

    def keep_at_hand(self, run_id: str, path: tuple[ChatMessage, ...]) -> None:
        """What leads to the answer of a run that is about to be submitted; nothing in it is still being written."""
        self._at_hand[run_id] = path
        if len(self._at_hand) > MAX_AT_HAND:
            del self._at_hand[next(iter(self._at_hand))]

    async def prepare(self, run: RunRecord) -> Prepared:
        """The conversation on the way to the answer, and who in the graph is given it.

        A fork that was given an input where the chat enters the graph is given that as what the user said last.
        """
        path = self._at_hand.pop(run.id, None) or await self._before_answer(run)
        history = protocol.history_of(path, frozenset(run.origin.get("untold") or ()))
        of_graph = await self._of_graph(run.graph_id, run.graph_version)
        for node_id, instead in (run.origin.get("inputs") or {}).items():
            if node_id in of_graph["chat_scope"].entry_node_ids:
                history = protocol.said_instead(history, instead)
        services: dict[str, Any] = {
            **of_graph,
            "chat_input": {"messages": history},
            "user_tools": list(run.origin.get("user_tools") or ()),
            "attachments": self._loader(run.owner),
        }
        return Prepared(protocol.newest_text(history), services)

    async def again(self, run: RunRecord) -> None:
        """ChatGone if there is no conversation any more."""
        chat_id = str(run.origin["chat_id"])
        if await self._chats.get(chat_id) is None:
            raise ChatGone(run.id, chat_id)

    async def _of_graph(self, graph_id: str, version: int) -> dict[str, Any]:
        known = self._of_graphs.get((graph_id, version))
        if known is not None:
            return known
        record = await self._stores.graphs.get(graph_id, version)
        assert record is not None, "a run names a version that is there"
        services = protocol.chat_services(await aside(record.document, parse_graph))
        if len(self._of_graphs) >= MAX_GRAPHS:
            self._of_graphs.clear()
        self._of_graphs[graph_id, version] = services
        return services

    async def ended(self, run: RunRecord) -> None:
        """Write what the run came to into its answer; a run that is parked goes on later, and so does its answer."""
        if run.status not in protocol.STATES:
            return
        chat_id, message_id = str(run.origin["chat_id"]), str(run.origin["message_id"])
        content = protocol.answer_text(run.output) if run.status == "completed" else await self._partial(run)
        data = protocol.written(run)
        passing("answer.before_finish")
        try:
            await self._chats.finish_message(chat_id, message_id, content, data, now_ms=self._now_ms())
        except KeyError:
            return  # the chat was never written, or is not there any more
        except Conflict:  # it was finished before
            await self._add_beside(chat_id, message_id, run, content, data)
        passing("answer.after_finish")

    async def _before_answer(self, run: RunRecord) -> tuple[ChatMessage, ...]:
        tree = await kept_tree(self._chats, str(run.origin["chat_id"]))
        if run.origin["message_id"] not in tree:
            await self.again(run)
            raise MessageUnknown(str(run.origin["chat_id"]), str(run.origin["message_id"]))
        return tree.before(str(run.origin["message_id"]))

    async def _add_beside(
        self, chat_id: str, message_id: str, run: RunRecord, content: str, data: dict[str, Any]
    ) -> None:
        """What was said stays: a run that went on after its answer was finished gives another one beside it.

        In a chat that is full there is no room for one: then the run alone has what it came to.
        """
        tree = await kept_tree(self._chats, chat_id)
        message = tree[message_id]
        if not all(is_more(one, content, data) for one in (message, newest_of(tree, message_id, run.id))):
            return
        if tree.is_full:
            LOG.warning(
                "chat %r is full: what run %r came to is kept with the run, and not in the chat", chat_id, run.id
            )
            return
        id = f"{message_id}.{run.epoch}"
        beside = replace(message, id=id, content=content, data=data, at_ms=self._now_ms())
        await self._chats.add_messages(chat_id, [beside], now_ms=self._now_ms())

    async def _partial(self, run: RunRecord) -> str:
        told: list[HostedEvent] = []
        after = 0
        while page := await self._stores.events.read(run.id, after, PAGE):
            told.extend(event for event in page if event.type in OF_ANSWERS)
            after = page[-1].seq
        return protocol.partial_text(told)

    def _loader(self, owner: str) -> Any:
        async def load(attachment_id: str) -> bytes | None:
            found = await self._chats.attachment(attachment_id)
            return None if found is None or found[0].owner != owner else found[1]

        return load

    def _now_ms(self) -> int:
        return self._clock.time_ns() // 1_000_000


async def kept_tree(chats: ChatStore, chat_id: str) -> MessageTree:
    """Everything that was said in a chat; several turns at once may have added more than it takes."""
    return MessageTree.of(*await chats.messages(chat_id), is_kept=True)


def is_more(message: ChatMessage, content: str, data: dict[str, Any]) -> bool:
    """Whether a run came to something else than the answer that was written when it ended before.

    A whole answer was told as such: a worker that died then, and a cancel that came before the next, take nothing back.
    """
    state = message.data.get("state")
    is_whole = state == "complete" and data["state"] != "complete"
    return bool(content) and not is_whole and (message.content, state) != (content, data["state"])


def newest_of(tree: MessageTree, message_id: str, run_id: str) -> ChatMessage:
    """The answer that a run has come to last: it has several, if it went on after it had ended."""
    return [one for one in tree.siblings(message_id) if one.data.get("run_id") == run_id][-1]
