"""The chat service: five entry points for a turn, and one path that answers it.

The five entry points differ only in the conversation they prepare: each adds the new messages and an empty answer to
the tree, and then `_answer` submits a run, the same for all. Messages and run are stored in one transaction: a turn
that is refused leaves the chat unchanged. The host owns the run, and the graph decides how it uses the conversation.

The answer exists from the start, in the state `writing`, and is finished when its run ends, whatever the outcome: the
text emitted by then is kept. The owner of a chat is checked here, even if a server has checked it before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from penstock import checks
from penstock.agents.messages import Role
from penstock.chat.conversation import (
    MAX_ATTACHMENT_BYTES,
    MAX_ATTACHMENTS,
    MAX_CHARACTERS,
    MAX_DEPTH,
    MAX_MESSAGES,
    MAX_NAME,
    MAX_TITLE,
    MAX_USER_TOOLS,
    AttachmentNotFound,
    ChatLimitReached,
    ChatMessage,
    ChatNotFound,
    MessageNotFound,
    MessageTree,
    can_be_written,
    must_be_named,
    must_be_text,
    must_fit,
    yield_every,
)
from penstock.chat.ports import Attachment, ChatRecord, ChatStore, ChatTransaction
from penstock.chat.turn import (
    KIND,
    ChatRunHandler,
    ChatTurn,
    Limits,
    NewMessage,
    TurnRequest,
    as_content,
    latest_answer,
    load_tree,
    unfinished_answers,
    user_message_id,
    without_ids,
    writing,
)
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import InvalidValue
from penstock.hosting.host import RunHost
from penstock.hosting.limits import RunLimits
from penstock.hosting.ports import (
    INTERACTIVE_ATTEMPTS,
    Conflict,
    RunIdConflict,
    RunIdTaken,
    RunRecord,
    retry_unavailable,
)
from penstock.ids import new_run_id

Input = str | Sequence[Mapping[str, Any]]
"""The input of a turn: a text, or messages with `role`, `content` and `attachments`, the last one from the user."""
Attached = Sequence[str | Attachment]

ROLES: tuple[Role, ...] = ("system", "user", "assistant")
TITLE_CHARACTERS = 60
"""Length of the default title, which is taken from the first turn's user message."""
LONG = "say it in fewer characters, or attach it"
FEWER = "attach fewer to one message"


@dataclass(slots=True)
class _Addition:
    """The messages that a turn adds to a chat."""

    chat: ChatRecord
    turn: TurnRequest
    messages: Sequence[ChatMessage]
    path: tuple[ChatMessage, ...]
    """The messages before its answer."""
    begins_chat: bool
    is_written: bool = False
    """Whether `write` has run, so the run was new and the messages were added with it, as far as is known."""

    async def write(self, stores: ChatTransaction) -> None:
        """Add the messages, in the transaction that adds the run."""
        chat, turn = self.chat, self.turn
        if self.begins_chat:
            _must_be_with(await stores.chats.create(chat), chat)
        try:
            await stores.chats.add_messages(chat.id, self.messages, now_ms=turn.at_ms)
        except KeyError:  # the chat was removed meanwhile
            raise ChatNotFound(chat.id) from None
        if turn.mark is not None:
            await stores.chats.mark(turn.mark, chat.id, turn.user_id())
        self.is_written = True


Prepare = Callable[[MessageTree, TurnRequest], Awaitable[ChatMessage | None]]
"""Adds the new messages, if any, and the empty answer to the tree; returns the user message, if any."""


class ChatService:
    """Manages the conversations of many owners with graphs."""

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
        self._handler = host.handlers[KIND] = ChatRunHandler(chats, host.stores, clock)
        host.on_delete[KIND] = chats.remove_unused

    # Chats.

    async def create_chat(
        self, *, owner: str, graph_id: str, title: str = "", chat_id: str | None = None
    ) -> ChatRecord:
        """Create a chat that `graph_id` answers in, or return the owner's existing chat with that id.

        Conflict if the existing chat has another owner or another graph.
        """
        new_chat = self._new_chat(owner, graph_id, title, chat_id)
        chat = await self._chats.create(new_chat)
        _must_be_with(chat, new_chat)
        return chat

    async def get_chat(self, chat_id: str, *, owner: str | None = None) -> ChatRecord:
        """Return the chat; ChatNotFound if it does not exist or has another owner."""
        must_be_named("chat_id", chat_id)
        if owner is not None:
            must_be_named("owner", owner)
        chat = await self._chats.get(chat_id)
        if chat is None or owner not in (None, chat.owner):
            raise ChatNotFound(chat_id)
        return chat

    async def tree(self, chat_id: str, *, owner: str | None = None) -> MessageTree:
        """Return all messages of the chat, and which of them are in view."""
        await self.get_chat(chat_id, owner=owner)
        return await self._tree(chat_id)

    async def switch(self, chat_id: str, message_id: str, *, owner: str | None = None) -> MessageTree:
        """Bring a message and the replies last in view below it into view, and return the updated tree."""
        _must_have(await self.tree(chat_id, owner=owner), chat_id, message_id)
        await self._chats.choose(chat_id, message_id)
        return await self._tree(chat_id)

    async def delete_chat(self, chat_id: str, *, owner: str | None = None) -> None:
        """Remove a chat, its messages, and attachments used only there; its runs are kept as long as other runs.

        Conflict while an answer is being written.
        """
        await self.get_chat(chat_id, owner=owner)
        await self._chats.remove(chat_id)

    async def attach(self, owner: str, name: str, media_type: str, content: bytes) -> Attachment:
        """Store an attachment that messages of this owner may refer to."""
        must_be_named("owner", owner)
        given: object = content
        if not isinstance(given, bytes):
            raise InvalidValue("attachment", f"a {type(given).__name__}", "bytes")
        must_fit("attachment", len(content), MAX_ATTACHMENT_BYTES, "attach a smaller one, in bytes")
        for field, text in (("name", name), ("media_type", media_type)):
            checks.line(field, text, maximum=MAX_NAME)
        attached = Attachment(self._new_id(), owner, name, media_type.lower(), len(content), self._now_ms())
        return await self._chats.attach(attached, content)

    async def attachment(self, attachment_id: str, *, owner: str) -> tuple[Attachment, bytes]:
        """Return an attachment of this owner and its bytes; AttachmentNotFound if the owner has none with that id."""
        must_be_named("attachment", attachment_id)
        found = await self._chats.attachment(attachment_id)
        if found is None or found[0].owner != owner:
            raise AttachmentNotFound(attachment_id)
        return found

    def must_be_within(self, run: RunRecord, limits: Limits) -> None:
        """Raise RunIdConflict if a repeated request has other limits than the run, unless the run was granted more."""
        requested = (limits if isinstance(limits, RunLimits) else RunLimits.from_dict(limits or {})).to_dict()
        is_within = all(run.limits.get(name) == value for name, value in requested.items())
        if not is_within and not run.grants:
            raise RunIdConflict(run, ("limits",))

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
        client_request: Mapping[str, Any] | None = None,
    ) -> ChatTurn:
        """Add a user message at the end of the active path, or below `parent_id`, and start a run that answers it.

        If a turn is in progress at the end of the path, the message becomes its sibling, because its answer is not yet
        known. The newest version of the graph answers, unless `version` is given; `about` is stored in the origin of
        the run, as JSON. `client_request` is a `ClientRequest` as JSON: tools of the client, settings, a format.
        """
        chat = await self.get_chat(chat_id, owner=owner)
        new_message = await self._user_message(content, attachments, owner)
        data = new_message.data

        async def prepare(tree: MessageTree, turn: TurnRequest) -> ChatMessage:
            if parent_id is not None:
                _must_have(tree, chat_id, parent_id)
            beside = _first_under_way(tree) if parent_id is None else None
            if beside is None:
                message = tree.append(turn.user_id(), "user", content, at_ms=turn.at_ms, data=data, parent_id=parent_id)
            else:
                message = tree.beside(beside.id, turn.user_id(), "user", content, at_ms=turn.at_ms, data=data)
            _add_answer(tree, turn)
            return message

        below = None if parent_id is None else lambda _: parent_id
        turn = self._turn_request(limits, run_id, user_tools, new_message, version=version, about=about, below=below)
        return await self._answer(chat, prepare, replace(turn, client_request=client_request))

    async def stream_agent_chat(
        self,
        graph_id: str,
        input: Input,
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
        mark: str | None = None,
        client_request: Mapping[str, Any] | None = None,
    ) -> ChatTurn:
        """Add messages in a new chat with a graph, and start a run that answers; `version` as for `stream_chat`.

        In an existing chat, the messages go below `parent_id`. A chat with `made_by` is removed with its runs.
        `attachments` belong to the last message; earlier messages have their own. With a `mark`, that key points to the
        last message (`ChatStore.marked`). A message with a `tool_round` is an earlier answer that called tools of the
        client, with their results; it may be the last one. `client_request` as for `stream_chat`.
        """
        *before, last = messages = await self._conversation(input, attachments, owner)
        place = None if parent_id is None else lambda _: parent_id
        turn = self._turn_request(
            limits, run_id, user_tools, *messages, version=version, about=about, below=place, mark=mark
        )
        turn = replace(turn, client_request=client_request)
        must_be_text("title", title, MAX_TITLE, "say it in fewer characters")
        title = title or as_content(_shortened(" ".join(last.content.split())))
        id = chat_id or (f"c-{turn.digest}" if turn.is_named else None)
        chat = self._new_chat(owner, graph_id, title, id, made_by)
        there = None if id is None else await self._chats.get(id)
        if there is not None:
            _must_be_with(there, chat)

        async def prepare(tree: MessageTree, turn: TurnRequest) -> ChatMessage:
            below, at_ms = None if parent_id is None else _must_have(tree, chat.id, parent_id).id, turn.at_ms
            for number, one in enumerate(before, 1):
                await yield_every(number)
                data = one.data if one.attached or one.tool_round is not None else None
                tree.append(turn.user_id(number), one.role, one.content, at_ms=at_ms, data=data, parent_id=below)
                below = None
            newest = tree.append(turn.user_id(), last.role, last.content, at_ms=at_ms, data=last.data, parent_id=below)
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
        """Continue an answer where it stopped, in a new message below it."""
        chat = await self.get_chat(chat_id, owner=owner)

        async def prepare(tree: MessageTree, turn: TurnRequest) -> None:
            message = _must_have(tree, chat_id, message_id)
            if message.data.get("state") == "writing":
                raise Conflict(f"message {message_id!r} is still being written: wait for its run, or cancel it")
            tree.continue_from(message_id, turn.answer_id, "", at_ms=turn.at_ms, data=writing(turn.run_id))

        turn = self._turn_request(limits, run_id, user_tools, below=lambda _: message_id)
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
        """Request another answer, as a sibling of the existing one, which stays."""
        chat = await self.get_chat(chat_id, owner=owner)

        async def prepare(tree: MessageTree, turn: TurnRequest) -> None:
            _must_have(tree, chat_id, message_id)
            tree.retry(message_id, turn.answer_id, "", at_ms=turn.at_ms, data=writing(turn.run_id))

        turn = self._turn_request(limits, run_id, user_tools, below=_above(chat_id, message_id))
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
        """Add an edited user message as a sibling and have it answered; by default it keeps the attachments."""
        chat = await self.get_chat(chat_id, owner=owner)
        given = await self._user_message(content, attachments or (), owner)
        new_message = given if attachments is not None else replace(given, attached=None)

        async def prepare(tree: MessageTree, turn: TurnRequest) -> ChatMessage:
            before, data = _must_have(tree, chat_id, message_id), new_message.data
            kept = data if attachments is not None else {**data, "attachments": before.data.get("attachments") or []}
            message = tree.edit(message_id, turn.user_id(), content, at_ms=turn.at_ms, data=kept)
            _add_answer(tree, turn)
            return message

        turn = self._turn_request(limits, run_id, user_tools, new_message, below=_above(chat_id, message_id))
        return await self._answer(chat, prepare, turn)

    # The one path.

    async def _answer(self, chat: ChatRecord, prepare: Prepare, turn: TurnRequest, *, begins: bool = False) -> ChatTurn:
        """Submit a run, and store with it the new messages and the empty answer that the run fills."""
        is_empty = begins and not turn.is_named
        tree = MessageTree() if is_empty else await self._tree(chat.id)
        if turn.answer_id in tree:
            return await self._known_turn(chat, turn, tree)
        before = len(tree)
        message = await _prepared(tree, prepare, turn)
        _check_arguments(turn)
        path = tree.before(turn.answer_id)
        new = _Addition(chat, turn, [*islice(tree, before, None)], path, begins)
        message_id = None if message is None else message.id
        return await self._submit(chat, turn, message_id, unfinished_answers(path), new)

    async def _known_turn(self, chat: ChatRecord, turn: TurnRequest, tree: MessageTree) -> ChatTurn:
        """Return a turn whose messages already exist; Conflict unless they match the request."""
        known = await self._host.get(turn.run_id)
        if known is None:  # the run was removed but its messages were not: run it again
            await self._must_be_in(tree, turn)
            message_id = turn.user_id() if turn.user_id() in tree else None
            unfinished = unfinished_answers(tree.before(turn.answer_id))
            return await self._submit(chat, turn, message_id, unfinished)
        there = self._known(chat, known)
        tools = tuple(known.origin.get("user_tools") or ())
        is_same = turn.user_tools == tools and turn.client_request == known.input
        if turn.version not in (None, known.graph_version) or not is_same:
            raise turn.conflict()
        await self._must_be_in(tree, turn)
        self.must_be_within(known, turn.limits)
        return there

    async def _must_be_in(self, tree: MessageTree, turn: TurnRequest) -> None:
        """Raise Conflict unless the stored messages of the turn match the request."""
        for new_message, message in turn.found_in(tree):
            there, now = message.data.get("attachments") or [], new_message.data["attachments"]
            if new_message.attached is not None and there != now and not await self._are_same(there, now):
                raise turn.conflict()

    async def _are_same(self, there: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> bool:
        """Whether both lists refer to attachments with the same names and bytes."""
        if without_ids(there) != without_ids(now):
            return False
        for one, other in zip(there, now, strict=True):
            was, is_now = await self._chats.attachment(one["id"]), await self._chats.attachment(other["id"])
            if was is None or is_now is None or was[1] != is_now[1]:
                return False
        return True

    async def _submit(
        self,
        chat: ChatRecord,
        turn: TurnRequest,
        user_message_id: str | None,
        unfinished: Sequence[str],
        new: _Addition | None = None,
    ) -> ChatTurn:
        """Submit the run of a turn together with its messages: both are stored, or neither is.

        The answers in `unfinished` are not part of the run's history, even once they are finished.
        """
        origin: dict[str, Any] = {
            "kind": KIND,
            "chat_id": chat.id,
            "message_id": turn.answer_id,
            "user_message_id": user_message_id,
        }
        if turn.user_tools:
            origin["user_tools"] = list(turn.user_tools)
        if turn.about:
            origin["about"] = dict(turn.about)
        if unfinished:
            origin["untold"] = list(unfinished)
        if new is not None and not unfinished:
            self._handler.cache_history(turn.run_id, new.path)
        try:
            run = await retry_unavailable(
                lambda: self._host.submit(
                    owner=chat.owner,
                    graph_id=chat.graph_id,
                    version=turn.version,
                    input=turn.client_request,
                    limits=turn.limits,
                    run_id=turn.run_id,
                    origin=origin,
                    also=None if new is None else new.write,
                ),
                INTERACTIVE_ATTEMPTS,
            )
        except RunIdConflict as another:
            run = _same_but_unfinished(another, origin)
        except BaseException:
            self._handler.forget_history(turn.run_id)
            raise
        turn_there = self._known(chat, run)
        if new is not None and not new.is_written:  # another request for the same run was first
            await self._must_be_in(await self._tree(chat.id), turn)
        return turn_there

    def _known(self, chat: ChatRecord, run: RunRecord) -> ChatTurn:
        origin = run.origin
        if (origin.get("kind"), origin.get("chat_id"), run.owner) != (KIND, chat.id, chat.owner):
            raise RunIdTaken(f"run id {run.id!r} belongs to another run; choose a different one")
        return ChatTurn(
            chat.id, run.id, origin.get("user_message_id"), origin["message_id"], run, self._host, self._answer_of
        )

    async def _answer_of(self, turn: ChatTurn) -> ChatMessage:
        message = await self._chats.message(turn.chat_id, turn.message_id)
        if message is None:
            raise MessageNotFound(turn.chat_id, turn.message_id)
        if message.data.get("state") == "complete":
            return message
        return latest_answer(await self._tree(turn.chat_id), message.id, turn.run_id)

    async def _tree(self, chat_id: str) -> MessageTree:
        return await load_tree(self._chats, chat_id)

    # Arguments.

    def _new_chat(self, owner: str, graph_id: str, title: str, chat_id: str | None, made_by: str = "") -> ChatRecord:
        must_be_text("title", title, MAX_TITLE, "say it in fewer characters")
        must_be_named("owner", owner)
        must_be_named("graph_id", graph_id)
        if chat_id is not None:
            checks.identifier("chat_id", chat_id)
        now = self._now_ms()
        return ChatRecord(chat_id or self._new_id(), owner, title, graph_id, now, now, made_by)

    def _turn_request(
        self,
        limits: Limits,
        run_id: str | None,
        user_tools: Sequence[str],
        *messages: NewMessage,
        version: int | None = None,
        about: Mapping[str, Any] | None = None,
        below: Callable[[MessageTree], str | None] | None = None,
        mark: str | None = None,
    ) -> TurnRequest:
        if run_id is not None:
            checks.identifier("run_id", run_id)
        checks.sequence("user_tools", user_tools, "names of tools")
        tools: tuple[Any, ...] = tuple(user_tools)
        must_fit("user_tools", len(tools), MAX_USER_TOOLS, "name fewer of them")
        for name in tools:
            if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or not can_be_written(name):
                raise InvalidValue("user_tools", name, "names of tools that the service offers")
        id = self._new_id() if run_id is None else run_id
        digest = hashlib.sha256(id.encode()).hexdigest()[:32]
        return TurnRequest(
            id, digest, self._now_ms(), limits, tools, run_id is not None, messages, version, about, below, mark
        )

    async def _conversation(self, input: Input, attachments: Attached, owner: str) -> list[NewMessage]:
        """Parse the input of a turn: the user message last, after the messages before it."""
        if isinstance(input, str):
            return [await self._user_message(input, attachments, owner)]
        given: object = input
        if not isinstance(given, Sequence) or not given:
            raise InvalidValue("messages", input, "a text, or a list of messages that ends with the user's")
        must_fit("messages of the chat", len(input) + 1, MAX_DEPTH, "leave the oldest out")
        messages = []
        for at, one in enumerate(input):
            await yield_every(at)
            messages.append(await self._parse_message(one, f"messages[{at}]", owner))
        last = messages[-1]
        if last.tool_round is not None:
            return messages
        if last.role != "user":
            raise InvalidValue(f"messages[{len(input) - 1}].role", last.role, "user: the last message is answered")
        more = await self._attached("attachments", attachments, owner)
        return [*messages[:-1], _checked_message(last.content, (*(last.attached or ()), *more))]

    async def _parse_message(self, one: Any, where: str, owner: str) -> NewMessage:
        """Parse one message of a given conversation."""
        if not isinstance(one, Mapping) or one.get("role") not in ROLES:
            raise InvalidValue(where, one, f"an object with content and a role of {', '.join(ROLES)}")
        must_be_text(f"{where}.content", one.get("content"), MAX_CHARACTERS, LONG)
        attached = await self._attached(f"{where}.attachments", one.get("attachments", ()), owner)
        return NewMessage(one["role"], one["content"], attached, one.get("tool_round"))

    async def _user_message(self, content: str, attachments: Attached, owner: str) -> NewMessage:
        """Validate a user message and its attachments."""
        must_be_text("content", content, MAX_CHARACTERS, LONG)
        return _checked_message(content, await self._attached("attachments", attachments, owner))

    async def _attached(self, field: str, attachments: Attached, owner: str) -> tuple[Attachment, ...]:
        """Look up the attachments of a message; AttachmentNotFound if the owner does not have one of them."""
        checks.sequence(field, attachments, "attachments, or their ids")
        must_fit(field, len(attachments), MAX_ATTACHMENTS, FEWER)
        ids = [one.id if isinstance(one, Attachment) else one for one in attachments]
        return tuple([(await self.attachment(one, owner=owner))[0] for one in ids])

    def _now_ms(self) -> int:
        return self._clock.time_ns() // 1_000_000


async def _prepared(tree: MessageTree, prepare: Prepare, turn: TurnRequest) -> ChatMessage | None:
    try:
        return await prepare(tree, turn)
    except InvalidValue as error:
        if error.field != "conversation":
            raise
        most = MAX_MESSAGES if len(tree) + 2 > MAX_MESSAGES else MAX_DEPTH
        raise ChatLimitReached("messages of the chat", len(tree), most, "begin another one") from None


def _check_arguments(turn: TurnRequest) -> None:
    """Raise InvalidValue for arguments of a turn that the host does not check."""
    if turn.version is not None:
        checks.integer("version", turn.version, minimum=1, none="the newest version")
    if turn.about is not None:
        checks.mapping("about", turn.about, "JSON values by name")


def _first_under_way(tree: MessageTree) -> ChatMessage | None:
    """Return the first message of the unfinished turns at the end of the active path; None if there are none."""
    first, last = None, tree.leaf
    while last is not None and last.data.get("state") == "writing":
        user_id = user_message_id(last.id)
        first = tree[user_id] if last.parent_id == user_id else last
        last = None if first.parent_id is None else tree[first.parent_id]
    return first


def _checked_message(content: str, attached: Sequence[Attachment]) -> NewMessage:
    """Validate the last user message: it needs content or an attachment."""
    must_fit("attachments", len(attached), MAX_ATTACHMENTS, FEWER)
    if not content and not attached:
        raise InvalidValue("content", content, "something to say, or something that is attached")
    return NewMessage("user", content, attached)


def _add_answer(tree: MessageTree, turn: TurnRequest) -> None:
    tree.append(turn.answer_id, "assistant", "", at_ms=turn.at_ms, data=writing(turn.run_id))


def _shortened(text: str) -> str:
    return text if len(text) <= TITLE_CHARACTERS else f"{text[: TITLE_CHARACTERS - 1].rstrip()}…"


def _must_be_with(chat: ChatRecord, wanted: ChatRecord) -> None:
    """Raise Conflict unless the existing chat has the same owner and the same graph."""
    if chat.owner != wanted.owner:
        raise Conflict(f"chat {chat.id!r} is another owner's; give this one an id of its own")
    if chat.graph_id != wanted.graph_id:
        raise Conflict(f"chat {chat.id!r} uses graph {chat.graph_id!r}; omit the id to begin a new chat")


def _same_but_unfinished(another: RunIdConflict, origin: Mapping[str, Any]) -> RunRecord:
    """Return the existing run if it differs only in which answers were unfinished when it was submitted.

    Otherwise raise the conflict. As in the store, `about` is not part of a run's identity.
    """
    besides = {"about": None, "untold": None}
    if another.fields != ("origin",) or {**another.known.origin, **besides} != {**origin, **besides}:
        raise another
    return another.known


def _above(chat_id: str, message_id: str) -> Callable[[MessageTree], str | None]:
    """Return a function that finds the parent id of a message, and so of its siblings."""
    return lambda tree: _must_have(tree, chat_id, message_id).parent_id


def _must_have(tree: MessageTree, chat_id: str, message_id: str) -> ChatMessage:
    must_be_named("message_id", message_id)
    if message_id not in tree:
        raise MessageNotFound(chat_id, message_id)
    return tree[message_id]
