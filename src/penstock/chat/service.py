"""Chats: five ways to say something, and one way to be answered.

The five entry points differ in the conversation they prepare and in nothing else: each adds to the tree what is said
and an empty answer, and then `_answer` submits a run, the same for all. Both are written down when the host has room
for the run, and before the run is there: what is refused leaves the chat as it was, and a run finds what it answers.
The run belongs to the host, and what the graph does with the conversation is the graph's affair.

The answer is there from the beginning, in the state `writing`, and is finished when its run has ended, however it
ended: what had been said by then is kept. Who owns a chat is checked here, also where a server has looked before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from penstock.agents.messages import Role
from penstock.chat import protocol
from penstock.chat.answering import Answering, kept_tree, newest_of
from penstock.chat.arguments import (
    must_be_id,
    must_be_line,
    must_be_list,
    must_be_named,
    must_be_text,
    must_be_version,
)
from penstock.chat.asked import Asked, Limits, Spoken, said_for, without_ids
from penstock.chat.conversation import MessageTree
from penstock.chat.limits import (
    MAX_ATTACHMENT_BYTES,
    MAX_ATTACHMENTS,
    MAX_CHARACTERS,
    MAX_DEPTH,
    MAX_MESSAGES,
    MAX_NAME,
    MAX_TITLE,
    MAX_USER_TOOLS,
    AttachmentUnknown,
    ChatLimitReached,
    ChatUnknown,
    MessageUnknown,
    must_fit,
)
from penstock.chat.message import ChatMessage, can_be_written
from penstock.chat.pauses import pause_at
from penstock.chat.ports import Attachment, ChatRecord, ChatStore
from penstock.chat.turn import ChatTurn
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import InvalidValue
from penstock.hosting.host import Overloaded, RunHost, UnknownGraph
from penstock.hosting.limits import RunLimits
from penstock.hosting.points import passing
from penstock.hosting.ports import AnotherRun, Conflict, StoreUnavailable
from penstock.hosting.records import RunRecord
from penstock.hosting.work.claims import was_granted
from penstock.hosting.work.patience import A_FEW, patiently
from penstock.ids import new_run_id

Said = str | Sequence[Mapping[str, Any]]
"""What somebody says: a text, or a conversation of `role`, `content` and `attachments` that ends with the user."""
Attached = Sequence[str | Attachment]

SAID_BY: tuple[Role, ...] = ("system", "user", "assistant")
TITLE_CHARACTERS = 60
"""So much of what was said first is the title of a chat that was given none."""
LONG = "say it in fewer characters, or attach it"
FEWER = "attach fewer to one message"
INTERRUPTED_MS = 60_000
"""An answer that has waited so long for its run to be there waits in vain."""
INTERRUPTED = "interrupted before its run began: ask again"


@dataclass(frozen=True, slots=True)
class _Addition:
    """What a turn adds to a chat."""

    messages: Sequence[ChatMessage]
    path: tuple[ChatMessage, ...]
    """What leads to its answer."""
    untold: Sequence[str]
    """The answers on that way that are being written."""
    leaf_id: str | None
    """What was the last in view before."""
    begins_chat: bool


Prepare = Callable[[MessageTree, Asked], Awaitable[ChatMessage | None]]
"""Adds to the tree what is said, if something is, and the empty answer; what was said."""
Write = Callable[[], Awaitable[None]]


class ChatService:
    """Conversations with graphs, for many owners."""

    def __init__(
        self,
        host: RunHost,
        chats: ChatStore,
        *,
        clock: Clock = SYSTEM_CLOCK,
        new_id: Callable[[], str] = new_run_id,
    ) -> None:
        self._host = host
        self._chats = chats
        self._clock = clock
        self._new_id = new_id
        self._graphs: set[tuple[str, int | None]] = set()
        """Graphs and versions that were found here: what is there stays there."""
        self._answering = host.kinds[protocol.KIND] = Answering(chats, host.stores, clock)
        host.forgetting[protocol.KIND] = chats.remove_unused

    # Chats.

    async def create_chat(
        self, *, owner: str, graph_id: str, title: str = "", chat_id: str | None = None
    ) -> ChatRecord:
        """A chat that `graph_id` answers in; one of that id that is the owner's already is given back.

        Conflict if that is another owner's, or with another graph.
        """
        asked = self._new_chat(owner, graph_id, title, chat_id)
        chat = await self._chats.create(asked)
        _must_be_with(chat, asked)
        return chat

    async def get_chat(self, chat_id: str, *, owner: str | None = None) -> ChatRecord:
        """The chat; ChatUnknown if there is none, or it is another owner's."""
        must_be_named("chat_id", chat_id)
        if owner is not None:
            must_be_named("owner", owner)
        chat = await self._chats.get(chat_id)
        if chat is None or owner not in (None, chat.owner):
            raise ChatUnknown(chat_id)
        return chat

    async def tree(self, chat_id: str, *, owner: str | None = None) -> MessageTree:
        """Everything that was said, and what of it is in view.

        An answer whose run never came to be, because the process ended in between, is closed here as failed.
        """
        await self.get_chat(chat_id, owner=owner)
        tree = await self._tree(chat_id)
        before_ms = self._now_ms() - INTERRUPTED_MS
        old = [one for one in tree if one.data.get("state") == "writing" and one.at_ms <= before_ms]
        closed = [await self._closed(chat_id, one.id, str(one.data.get("run_id")), INTERRUPTED) for one in old]
        return await self._tree(chat_id) if any(closed) else tree

    async def switch(self, chat_id: str, message_id: str, *, owner: str | None = None) -> MessageTree:
        """Bring a message into view, and below it what was in view there last; the tree as it is then."""
        _must_have(await self.tree(chat_id, owner=owner), chat_id, message_id)
        await self._chats.choose(chat_id, message_id)
        return await self._tree(chat_id)

    async def delete_chat(self, chat_id: str, *, owner: str | None = None) -> None:
        """Remove a chat, what was said there, and what is attached there alone; its runs stay as long as runs do.

        Conflict while an answer is being written there.
        """
        await self.tree(chat_id, owner=owner)  # an answer that nobody writes any more is closed there
        await self._chats.remove(chat_id)

    async def attach(self, owner: str, name: str, media_type: str, content: bytes) -> Attachment:
        """Keep bytes that messages of this owner may refer to."""
        must_be_named("owner", owner)
        given: object = content
        if not isinstance(given, bytes):
            raise InvalidValue("attachment", f"a {type(given).__name__}", "bytes")
        must_fit("attachment", len(content), MAX_ATTACHMENT_BYTES, "attach a smaller one, in bytes")
        for field, text in (("name", name), ("media_type", media_type)):
            must_be_line(field, text, MAX_NAME)
        attached = Attachment(self._new_id(), owner, name, media_type.lower(), len(content), self._now_ms())
        return await self._chats.attach(attached, content)

    async def attachment(self, attachment_id: str, *, owner: str) -> tuple[Attachment, bytes]:
        """What this owner has attached under an id."""
        must_be_named("attachment", attachment_id)
        found = await self._chats.attachment(attachment_id)
        if found is None or found[0].owner != owner:
            raise AttachmentUnknown(attachment_id)
        return found

    async def must_be_within(self, run: RunRecord, limits: Limits) -> None:
        """AnotherRun if a run is asked for again within limits it does not have, and was not granted more since."""
        asked = (limits if isinstance(limits, RunLimits) else RunLimits.from_dict(limits or {})).to_dict()
        is_within = all(run.limits.get(name) == value for name, value in asked.items())
        if not is_within and not await was_granted(self._host.stores.events, run.id):
            raise AnotherRun(run, ("limits",))

    # The five entry points.

    async def stream_chat(
        self,
        chat_id: str,
        content: str,
        *,
        owner: str,
        parent_id: str | None = None,
        attachments: Attached = (),
        limits: Limits = None,
        run_id: str | None = None,
        user_tools: Sequence[str] = (),
        version: int | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> ChatTurn:
        """Say something at the end of what is in view, or below `parent_id`, and be answered.

        A turn that is under way there is not built upon, for nobody knows what it will say: this one goes beside it. By
        the newest version of the graph, unless one is named; `about` is kept in the origin of the run, as JSON.
        """
        chat = await self.get_chat(chat_id, owner=owner)
        spoken = await self._spoken(content, attachments, owner)
        data = spoken.data

        async def prepare(tree: MessageTree, turn: Asked) -> ChatMessage:
            if parent_id is not None:
                _must_have(tree, chat_id, parent_id)
            beside = _first_under_way(tree) if parent_id is None else None
            if beside is None:
                said = tree.append(turn.user_id(), "user", content, at_ms=turn.at_ms, data=data, parent_id=parent_id)
            else:
                said = tree.beside(beside.id, turn.user_id(), "user", content, at_ms=turn.at_ms, data=data)
            _add_answer(tree, turn)
            return said

        below = None if parent_id is None else lambda _: parent_id
        turn = self._asked(limits, run_id, user_tools, spoken, version=version, about=about, below=below)
        return await self._answer(chat, prepare, turn)

    async def stream_agent_chat(
        self,
        graph_id: str,
        said: Said,
        *,
        owner: str,
        title: str = "",
        chat_id: str | None = None,
        attachments: Attached = (),
        limits: Limits = None,
        run_id: str | None = None,
        user_tools: Sequence[str] = (),
        version: int | None = None,
        about: Mapping[str, Any] | None = None,
        parent_id: str | None = None,
        made_by: str = "",
    ) -> ChatTurn:
        """Say something to a graph, in a chat that is made for it, and be answered; `version` as for `stream_chat`.

        In one that is there already, below `parent_id`. One that is `made_by` something goes when its runs do. What is
        in `attachments` belongs to what is said last; the messages before it have their own.
        """
        *before, last = messages = await self._conversation(said, attachments, owner)
        place = None if parent_id is None else lambda _: parent_id
        turn = self._asked(limits, run_id, user_tools, *messages, version=version, about=about, below=place)
        must_be_text("title", title, MAX_TITLE, "say it in fewer characters")
        title = title or protocol.as_content(" ".join(last.content.split())[:TITLE_CHARACTERS])
        id = chat_id or (f"c-{turn.digest}" if turn.is_named else None)
        chat = self._new_chat(owner, graph_id, title, id, made_by)
        there = None if id is None else await self._chats.get(id)
        if there is not None:
            _must_be_with(there, chat)

        async def prepare(tree: MessageTree, turn: Asked) -> ChatMessage:
            below, at_ms = None if parent_id is None else _must_have(tree, chat.id, parent_id).id, turn.at_ms
            for number, one in enumerate(before, 1):
                await pause_at(number)
                data = one.data if one.attached else None
                tree.append(turn.user_id(number), one.role, one.content, at_ms=at_ms, data=data, parent_id=below)
                below = None
            newest = tree.append(turn.user_id(), "user", last.content, at_ms=at_ms, data=last.data, parent_id=below)
            _add_answer(tree, turn)
            return newest

        return await self._answer(there or chat, prepare, turn, begins=there is None)

    async def continue_message(
        self,
        chat_id: str,
        message_id: str,
        *,
        owner: str,
        limits: Limits = None,
        run_id: str | None = None,
        user_tools: Sequence[str] = (),
    ) -> ChatTurn:
        """Have an answer go on where it stopped, in a message below it."""
        chat = await self.get_chat(chat_id, owner=owner)

        async def prepare(tree: MessageTree, turn: Asked) -> None:
            message = _must_have(tree, chat_id, message_id)
            if message.data.get("state") == "writing":
                raise Conflict(f"message {message_id!r} is still being written: wait for its run, or cancel it")
            tree.continue_from(message_id, turn.answer_id, "", at_ms=turn.at_ms, data=protocol.writing(turn.run_id))

        turn = self._asked(limits, run_id, user_tools, below=lambda _: message_id)
        return await self._answer(chat, prepare, turn)

    async def retry_message(
        self,
        chat_id: str,
        message_id: str,
        *,
        owner: str,
        limits: Limits = None,
        run_id: str | None = None,
        user_tools: Sequence[str] = (),
    ) -> ChatTurn:
        """Be answered again: a sibling of the answer, which stays."""
        chat = await self.get_chat(chat_id, owner=owner)

        async def prepare(tree: MessageTree, turn: Asked) -> None:
            _must_have(tree, chat_id, message_id)
            tree.retry(message_id, turn.answer_id, "", at_ms=turn.at_ms, data=protocol.writing(turn.run_id))

        turn = self._asked(limits, run_id, user_tools, below=_above(chat_id, message_id))
        return await self._answer(chat, prepare, turn)

    async def edit_user_message(
        self,
        chat_id: str,
        message_id: str,
        content: str,
        *,
        owner: str,
        attachments: Attached | None = None,
        limits: Limits = None,
        run_id: str | None = None,
        user_tools: Sequence[str] = (),
    ) -> ChatTurn:
        """Say something else in place of a message, and be answered; without `attachments` it keeps those it had."""
        chat = await self.get_chat(chat_id, owner=owner)
        given = await self._spoken(content, attachments or (), owner)
        spoken = given if attachments is not None else replace(given, attached=None)

        async def prepare(tree: MessageTree, turn: Asked) -> ChatMessage:
            before, data = _must_have(tree, chat_id, message_id), spoken.data
            kept = data if attachments is not None else {**data, "attachments": before.data.get("attachments") or []}
            said = tree.edit(message_id, turn.user_id(), content, at_ms=turn.at_ms, data=kept)
            _add_answer(tree, turn)
            return said

        turn = self._asked(limits, run_id, user_tools, spoken, below=_above(chat_id, message_id))
        return await self._answer(chat, prepare, turn)

    # The one path.

    async def _answer(self, chat: ChatRecord, prepare: Prepare, turn: Asked, *, begins: bool = False) -> ChatTurn:
        """Submit a run, and write down before it what is said and the empty answer that it fills."""
        if turn.is_named and (known := await self._host.get(turn.run_id)) is not None:
            there = self._known(chat, known)
            await self._must_be_same(chat, turn, known)
            return there
        tree = await self._tree(chat.id)
        if turn.answer_id in tree:  # asked for before, and interrupted before its run was there
            await self._must_be_in(tree, turn)
            said_id = turn.user_id() if turn.user_id() in tree else None
            untold = protocol.unfinished(tree.before(turn.answer_id))
            return await self._submit(chat, turn, turn.limits, said_id, untold)
        before, leaf = len(tree), tree.leaf
        said = await _prepared(tree, prepare, turn)
        limits = await self._check(chat, turn)
        added, path = [*islice(tree, before, None)], tree.before(turn.answer_id)
        new = _Addition(added, path, protocol.unfinished(path), None if leaf is None else leaf.id, begins)
        return await self._add(chat, turn, limits, new, None if said is None else said.id)

    async def _must_be_same(self, chat: ChatRecord, turn: Asked, known: RunRecord) -> None:
        """Conflict unless a run that is there is what is asked for now."""
        tools = tuple(known.origin.get("user_tools") or ())
        if turn.version not in (None, known.graph_version) or turn.user_tools != tools:
            raise turn.is_another()
        await self._must_be_in(await self._tree(chat.id), turn)
        await self.must_be_within(known, turn.limits)

    async def _must_be_in(self, tree: MessageTree, turn: Asked) -> None:
        """Conflict unless what the tree has of a turn is what is asked for now."""
        for spoken, message in turn.found_in(tree):
            there, now = message.data.get("attachments") or [], spoken.data["attachments"]
            if spoken.attached is not None and there != now and not await self._are_same(there, now):
                raise turn.is_another()

    async def _are_same(self, there: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the same bytes are attached, by the same names."""
        if without_ids(there) != without_ids(now):
            return False
        for one, other in zip(there, now, strict=True):
            was, is_now = await self._chats.attachment(one["id"]), await self._chats.attachment(other["id"])
            if was is None or is_now is None or was[1] != is_now[1]:
                return False
        return True

    async def _add(
        self, chat: ChatRecord, turn: Asked, limits: RunLimits, new: _Addition, said_id: str | None
    ) -> ChatTurn:
        """Submit the run of a turn that is new; if it is refused, the chat is as it was."""
        try:
            return await self._submit(chat, turn, limits, said_id, new.untold, lambda: self._write(chat, turn, new))
        except (Overloaded, Conflict):  # nothing was written, or it is another's
            raise
        except StoreUnavailable:
            if turn.is_named:  # whoever named the run asks for it again, and finds the answer as it was
                raise
            run = await self._taken_back(chat.id, turn, new)
            if run is None:
                raise
            return self._known(chat, run)
        except BaseException as error:
            if not turn.is_named:  # else somebody may be asking for the same beside this one
                await self._give_up(chat.id, turn, f"{type(error).__name__}: {error}")
            raise

    async def _write(self, chat: ChatRecord, turn: Asked, new: _Addition) -> None:
        """What a run will look for."""
        if new.begins_chat:
            _must_be_with(await self._chats.create(chat), chat)
        try:
            await self._chats.add_messages(chat.id, new.messages, now_ms=turn.at_ms)
        except KeyError:  # it was removed meanwhile
            raise ChatUnknown(chat.id) from None
        except Conflict:
            tree = await self._tree(chat.id)
            if turn.answer_id not in tree:
                raise
            await self._must_be_in(tree, turn)  # then the same was asked for at the same time, and that was quicker
            return
        passing("chat.said")
        if not new.untold:
            self._answering.keep_at_hand(turn.run_id, new.path)

    async def _check(self, chat: ChatRecord, turn: Asked) -> RunLimits:
        """Its limits; what would keep the run from being taken on at any time is said before anything is written."""
        must_be_version("version", turn.version)
        if turn.about is not None and not isinstance(turn.about, Mapping):
            raise InvalidValue("about", turn.about, "an object, as JSON")
        given: RunLimits | Mapping[str, Any] = {} if turn.limits is None else turn.limits
        limits = given if isinstance(given, RunLimits) else RunLimits.from_dict(given)
        limits.within(self._host.settings.ceilings)
        if (chat.graph_id, turn.version) not in self._graphs:
            if await self._host.stores.graphs.head(chat.graph_id, turn.version) is None:
                raise UnknownGraph(chat.graph_id, turn.version)
            self._graphs.add((chat.graph_id, turn.version))
        return limits

    async def _submit(
        self,
        chat: ChatRecord,
        turn: Asked,
        limits: Limits,
        user_message_id: str | None,
        untold: Sequence[str],
        first: Write | None = None,
    ) -> ChatTurn:
        """Have the host take the run on; it is never told what the answers that are `untold` become."""
        origin: dict[str, Any] = {
            "kind": protocol.KIND,
            "chat_id": chat.id,
            "message_id": turn.answer_id,
            "user_message_id": user_message_id,
        }
        if turn.user_tools:
            origin["user_tools"] = list(turn.user_tools)
        if turn.about:
            origin["about"] = dict(turn.about)
        if untold:
            origin["untold"] = list(untold)
        try:
            run = await self._host.submit(
                owner=chat.owner,
                graph_id=chat.graph_id,
                version=turn.version,
                limits=limits,
                run_id=turn.run_id,
                origin=origin,
                first=first,
            )
        except AnotherRun as another:
            run = _but_for_untold(another, origin)
        return self._known(chat, run)

    async def _taken_back(self, chat_id: str, turn: Asked, new: _Addition) -> RunRecord | None:
        """Take back what was said, for whoever is told to come back says it again; the run, if it is there after all.

        If the store is still away, or somebody has said something below it by then, it stays, and `tree` closes it.
        """
        ids = [one.id for one in new.messages]
        with suppress(StoreUnavailable, Conflict, KeyError):
            if (run := await patiently(lambda: self._host.get(turn.run_id), A_FEW)) is not None:
                return run
            # A commit whose answer was lost may still come: then the run finds that it is not wanted.
            await self._host.cancel(turn.run_id, reason="it could not be said whether it was taken on", by="server")
            await patiently(lambda: self._chats.take_back(chat_id, ids, in_view=new.leaf_id), A_FEW)
            if new.begins_chat:
                await patiently(lambda: self._chats.remove(chat_id), A_FEW)
        return None

    async def _give_up(self, chat_id: str, turn: Asked, why: str) -> None:
        """There may be no run that would ever finish the answer: then say why. If that fails too, `tree` does later."""
        with suppress(StoreUnavailable, Conflict, KeyError):  # it may not have been written yet
            await self._closed(chat_id, turn.answer_id, turn.run_id, why)

    async def _closed(self, chat_id: str, message_id: str, run_id: str, why: str) -> bool:
        """Finish an answer that no run will; whether there is none."""
        run = await self._host.get(run_id)
        if run is not None and run.chat_id in (None, chat_id):  # else it answers elsewhere
            return False
        error = protocol.as_content(why, protocol.MAX_ERROR)
        data = {**protocol.writing(run_id), "state": "failed", "error": error}
        await self._chats.finish_message(chat_id, message_id, "", data, now_ms=self._now_ms())
        return True

    def _known(self, chat: ChatRecord, run: RunRecord) -> ChatTurn:
        origin = run.origin
        if (origin.get("kind"), origin.get("chat_id"), run.owner) != (protocol.KIND, chat.id, chat.owner):
            raise Conflict(f"the id {run.id!r} is that of another run; give this one an id of its own")
        return ChatTurn(
            chat.id, run.id, origin.get("user_message_id"), origin["message_id"], self._host, self._answer_of
        )

    async def _answer_of(self, turn: ChatTurn) -> ChatMessage:
        message = await self._chats.message(turn.chat_id, turn.message_id)
        if message is None:
            raise MessageUnknown(turn.chat_id, turn.message_id)
        if message.data.get("state") == "complete":
            return message
        return newest_of(await self._tree(turn.chat_id), message.id, turn.run_id)

    async def _tree(self, chat_id: str) -> MessageTree:
        return await kept_tree(self._chats, chat_id)

    # What is given.

    def _new_chat(self, owner: str, graph_id: str, title: str, chat_id: str | None, made_by: str = "") -> ChatRecord:
        must_be_text("title", title, MAX_TITLE, "say it in fewer characters")
        must_be_named("owner", owner)
        must_be_named("graph_id", graph_id)
        if chat_id is not None:
            must_be_id("chat_id", chat_id)
        now = self._now_ms()
        return ChatRecord(chat_id or self._new_id(), owner, title, graph_id, now, now, made_by)

    def _asked(
        self,
        limits: Limits,
        run_id: str | None,
        user_tools: Sequence[str],
        *said: Spoken,
        version: int | None = None,
        about: Mapping[str, Any] | None = None,
        below: Callable[[MessageTree], str | None] | None = None,
    ) -> Asked:
        if run_id is not None:
            must_be_id("run_id", run_id)
        must_be_list("user_tools", user_tools, "names of tools")
        tools: tuple[Any, ...] = tuple(user_tools)
        must_fit("user_tools", len(tools), MAX_USER_TOOLS, "name fewer of them")
        for name in tools:
            if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or not can_be_written(name):
                raise InvalidValue("user_tools", name, "names of tools that the service offers")
        id = self._new_id() if run_id is None else run_id
        digest = hashlib.sha256(id.encode()).hexdigest()[:32]
        return Asked(id, digest, self._now_ms(), limits, tools, run_id is not None, said, version, about, below)

    async def _conversation(self, said: Said, attachments: Attached, owner: str) -> list[Spoken]:
        """What somebody says, with what was said before it."""
        if isinstance(said, str):
            return [await self._spoken(said, attachments, owner)]
        given: object = said
        if not isinstance(given, Sequence) or not given:
            raise InvalidValue("messages", said, "a text, or a list of messages that ends with the user's")
        must_fit("messages of the chat", len(said) + 1, MAX_DEPTH, "leave the oldest out")
        messages = []
        for at, one in enumerate(said):
            await pause_at(at)
            messages.append(await self._heard(one, f"messages[{at}]", owner))
        last = messages[-1]
        if last.role != "user":
            raise InvalidValue(f"messages[{len(said) - 1}].role", last.role, "user: the last message is answered")
        more = await self._attached("attachments", attachments, owner)
        return [*messages[:-1], _asking(last.content, (*(last.attached or ()), *more))]

    async def _heard(self, one: Any, where: str, owner: str) -> Spoken:
        """A message of a conversation that is told."""
        if not isinstance(one, Mapping) or one.get("role") not in SAID_BY:
            raise InvalidValue(where, one, f"an object with content and a role of {', '.join(SAID_BY)}")
        must_be_text(f"{where}.content", one.get("content"), MAX_CHARACTERS, LONG)
        attached = one.get("attachments", ())
        return Spoken(one["role"], one["content"], await self._attached(f"{where}.attachments", attached, owner))

    async def _spoken(self, content: str, attachments: Attached, owner: str) -> Spoken:
        """What the user says, if it may be said."""
        must_be_text("content", content, MAX_CHARACTERS, LONG)
        return _asking(content, await self._attached("attachments", attachments, owner))

    async def _attached(self, field: str, attachments: Attached, owner: str) -> tuple[Attachment, ...]:
        """What is attached to a message, by what is there."""
        must_be_list(field, attachments, "attachments, or their ids")
        must_fit(field, len(attachments), MAX_ATTACHMENTS, FEWER)
        ids = [one.id if isinstance(one, Attachment) else one for one in attachments]
        return tuple([(await self.attachment(one, owner=owner))[0] for one in ids])

    def _now_ms(self) -> int:
        return self._clock.time_ns() // 1_000_000


async def _prepared(tree: MessageTree, prepare: Prepare, turn: Asked) -> ChatMessage | None:
    try:
        return await prepare(tree, turn)
    except InvalidValue as error:
        if error.field != "conversation":
            raise
        most = MAX_MESSAGES if len(tree) + 2 > MAX_MESSAGES else MAX_DEPTH
        raise ChatLimitReached("messages of the chat", len(tree), most, "begin another one") from None


def _first_under_way(tree: MessageTree) -> ChatMessage | None:
    """Where a turn that is under way at the end of what is in view begins; None if nothing is being written there."""
    first, last = None, tree.leaf
    while last is not None and last.data.get("state") == "writing":
        said = said_for(last.id)
        first = tree[said] if last.parent_id == said else last
        last = None if first.parent_id is None else tree[first.parent_id]
    return first


def _asking(content: str, attached: Sequence[Attachment]) -> Spoken:
    """What the user says last, if it may be said."""
    must_fit("attachments", len(attached), MAX_ATTACHMENTS, FEWER)
    if not content and not attached:
        raise InvalidValue("content", content, "something to say, or something that is attached")
    return Spoken("user", content, attached)


def _add_answer(tree: MessageTree, turn: Asked) -> None:
    tree.append(turn.answer_id, "assistant", "", at_ms=turn.at_ms, data=protocol.writing(turn.run_id))


def _must_be_with(chat: ChatRecord, asked: ChatRecord) -> None:
    """Conflict unless the chat of that id is the same owner's, and with the same graph."""
    if chat.owner != asked.owner:
        raise Conflict(f"chat {chat.id!r} is another owner's; give this one an id of its own")
    if chat.graph_id != asked.graph_id:
        raise Conflict(f"chat {chat.id!r} is one with graph {chat.graph_id!r}; leave its id out to begin another")


def _but_for_untold(another: AnotherRun, origin: Mapping[str, Any]) -> RunRecord:
    """The run that is there, if it is what is asked for, only at a moment when other answers were being written.

    Else the conflict stands. As in the store, what is kept `about` a run makes it no other.
    """
    besides = {"about": None, "untold": None}
    if another.fields != ("origin",) or {**another.known.origin, **besides} != {**origin, **besides}:
        raise another
    return another.known


def _above(chat_id: str, message_id: str) -> Callable[[MessageTree], str | None]:
    """What a message follows, and what stands beside it too."""
    return lambda tree: _must_have(tree, chat_id, message_id).parent_id


def _must_have(tree: MessageTree, chat_id: str, message_id: str) -> ChatMessage:
    must_be_named("message_id", message_id)
    if message_id not in tree:
        raise MessageUnknown(chat_id, message_id)
    return tree[message_id]
