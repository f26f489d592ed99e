"""A request as one turn of a chat: what is new of its conversation is kept there, and the graph answers.

Pictures and files are kept with the message that they came with, as if the conversation had been held here; models take
them of the user alone, so those of others belong to what the user says next.

Whoever asks gets errors about the request: what a chat does not take is told by the field that says it. Of a request
that is refused nothing is kept.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from penstock.chat.answering import newest_of
from penstock.chat.asked import answers_something_else
from penstock.chat.limits import MAX_ATTACHMENTS, ChatLimitReached, ChatUnknown, MessageUnknown
from penstock.chat.ports import Attachment
from penstock.chat.protocol import KIND
from penstock.errors import InvalidValue
from penstock.hosting.limits import NAMES, RunLimits
from penstock.hosting.ports import Conflict, StoreUnavailable
from penstock.hosting.records import GraphRecord, RunRecord
from penstock.server.auth import User
from penstock.server.openai.models import named_version
from penstock.server.openai.retold import Retold, find, keys_of
from penstock.server.openai.wire.bodies import ChatCompletionBody, ResponseBody
from penstock.server.openai.wire.conversation import File, Turn, check_lengths, text_to_add
from penstock.server.schemas import limits_in

if TYPE_CHECKING:
    from penstock.chat.message import ChatMessage
    from penstock.chat.ports import ChatStore
    from penstock.chat.turn import ChatTurn
    from penstock.server.openai.running import Service

MADE_BY = "openai"
"""Chats that requests to /v1 make: nobody deletes them, so they go when their runs do."""
OF_CHATS = ("content", "attachments", "messages of the chat")
OF_ONE = " in one message, which has those of the tools before it too; send the others with other messages"
OF_NEXT = ", for it is kept as one message; send the others with the next request"
"""Why there are too many pictures and files."""
OF_FILES = ("attachment", "media_type")


async def converse(
    service: Service,
    user: User,
    graph: GraphRecord,
    turns: Sequence[Turn],
    body: ChatCompletionBody | ResponseBody,
    about: Mapping[str, Any] | None,
) -> str:
    """Say what is new of a conversation where it goes on, or all of it in a chat of its own; the run that answers."""
    check_lengths(turns)
    turns = [*_with_files_of_user(turns)]
    if await _is_known(service, user, graph, turns, body):
        return str(body.penstock.run_id)
    keys = await keys_of(user.name, body.user, graph.id, turns)
    place = await find(service.stores.chats, turns, keys)
    with _naming("messages" if isinstance(body, ChatCompletionBody) else "input", *OF_CHATS):
        try:
            turn = await _say(service, user, graph, place, body, about)
        except (ChatLimitReached, ChatUnknown, MessageUnknown):
            if place.chat_id is None:
                raise
            # It is full, or was removed a moment ago.
            turn = await _say(service, user, graph, Retold(turns), body, about)
        except Conflict:
            # Perhaps the same was asked for at the same time, and found another place.
            if not await _is_known(service, user, graph, turns, body):
                raise
            return str(body.penstock.run_id)
    with suppress(StoreUnavailable, KeyError):  # the run is there; at worst the history is kept once more
        await service.stores.chats.mark(keys[-1], turn.chat_id, str(turn.user_message_id))
    return turn.run_id


async def say_next(
    service: Service,
    graph: GraphRecord,
    before: RunRecord,
    turns: Sequence[Turn],
    body: ResponseBody,
    about: Mapping[str, Any] | None,
) -> str:
    """Say what the user says next, below the answer of an earlier run; the run that answers."""
    check_lengths(turns)
    text, files = text_to_add(turns, "input")
    _must_be_few(files, "input", OF_NEXT)
    limits, chat_id = limits_of(service, body), before.origin["chat_id"]
    answer = newest_of(await service.chats.tree(chat_id), before.origin["message_id"], before.id)
    with _naming("input", *OF_CHATS):
        async with _attached(service, before.owner, [files], body) as (attached,):
            turn = await service.chats.stream_chat(
                chat_id,
                text,
                owner=before.owner,
                parent_id=answer.id,
                attachments=attached,
                limits=limits,
                run_id=body.penstock.run_id,
                version=named_version(graph, body.model),
                about=about,
            )
    return turn.run_id


async def forget_chat_of(service: Service, run: RunRecord) -> None:
    """Remove the chat that a request made, once it has no run any more; while somebody goes on in it, it stays."""
    chats, chat_id = service.stores.chats, run.origin.get("chat_id")
    chat = None if chat_id is None else await chats.get(chat_id)
    if chat is not None and chat.made_by == MADE_BY and not await service.stores.runs.list(chat_id=chat.id, limit=1):
        with suppress(Conflict):
            await chats.remove(chat.id)


def limits_of(service: Service, body: ChatCompletionBody | ResponseBody) -> RunLimits | None:
    """What the request allows its run; InvalidValue names the field that asks for what there is not."""
    try:
        asked = limits_in(body.penstock.limits)
        return asked if asked is None else asked.within(service.host.settings.ceilings)
    except InvalidValue as error:
        name = f".{error.field}" if error.field in NAMES else ""
        raise InvalidValue(f"penstock.limits{name}", error.value, error.expected) from None


async def _is_known(
    service: Service, user: User, graph: GraphRecord, turns: Sequence[Turn], body: ChatCompletionBody | ResponseBody
) -> bool:
    """Whether the run that the request names is there already; Conflict if it answers something else."""
    run_id = body.penstock.run_id
    run = None if run_id is None else await service.host.get(run_id)
    if run is None:
        return False
    is_same = (run.origin.get("kind"), run.owner, run.graph_id) == (KIND, user.name, graph.id)
    if is_same and named_version(graph, body.model) in (None, run.graph_version):
        path = (await service.chats.tree(run.origin["chat_id"])).before(run.origin["message_id"])
        if await _is_said(service.stores.chats, path, turns):
            await service.chats.must_be_within(run, limits_of(service, body))
            return True
    raise answers_something_else(run_id)


async def _is_said(chats: ChatStore, path: Sequence[ChatMessage], turns: Sequence[Turn]) -> bool:
    """Whether the messages say what the turns do, with the same files."""
    if [(one.role, one.content) for one in path] != [(turn.role, turn.text) for turn in turns]:
        return False
    for message, turn in zip(path, turns, strict=True):
        attached = message.data.get("attachments") or []
        if [_named(one) for one in attached] != [(one.name, one.media_type, len(one.content)) for one in turn.files]:
            return False
        for one, file in zip(attached, turn.files, strict=True):
            found = await chats.attachment(one["id"])
            if found is None or found[1] != file.content:
                return False
    return True


def _named(attached: Mapping[str, Any]) -> tuple[str, str, int]:
    return attached["name"], attached["media_type"], attached["size"]


def _with_files_of_user(turns: Iterable[Turn]) -> Iterator[Turn]:
    """The turns, with what others sent in what the user says next; InvalidValue names one that has too much."""
    waiting: tuple[File, ...] = ()
    for turn in turns:
        files, waiting = (*waiting, *turn.files), ()
        if turn.role != "user":
            files, waiting = (), files
        _must_be_few(files, turn.where, OF_ONE)
        yield turn if files == turn.files else replace(turn, files=files)


def _must_be_few(files: Sequence[File], where: str, what: str) -> None:
    if len(files) > MAX_ATTACHMENTS:
        raise InvalidValue(where, f"{len(files)} pictures and files", f"at most {MAX_ATTACHMENTS} of them{what}")


async def _say(
    service: Service,
    user: User,
    graph: GraphRecord,
    place: Retold,
    body: ChatCompletionBody | ResponseBody,
    about: Mapping[str, Any] | None,
) -> ChatTurn:
    limits = limits_of(service, body)
    async with _attached(service, user.name, [turn.files for turn in place.turns], body) as attached:
        said = zip(place.turns, attached, strict=True)
        return await service.chats.stream_agent_chat(
            graph.id,
            [{"role": turn.role, "content": turn.text, "attachments": files} for turn, files in said],
            owner=user.name,
            chat_id=place.chat_id,
            limits=limits,
            run_id=body.penstock.run_id,
            version=named_version(graph, body.model),
            about=about,
            parent_id=place.parent_id,
            made_by=MADE_BY,
        )


@asynccontextmanager
async def _attached(
    service: Service, owner: str, of_turns: Sequence[Sequence[File]], body: ChatCompletionBody | ResponseBody
) -> AsyncIterator[list[list[Attachment]]]:
    """The files of each turn, as messages refer to them; those that no message comes to refer to are not kept."""
    attached: list[list[Attachment]] = [[] for _ in of_turns]
    are_used = False
    try:
        for files, kept in zip(of_turns, attached, strict=True):
            for file in files:
                with _naming(file.where, *OF_FILES), _naming(file.named_in, "name"):
                    kept.append(await service.chats.attach(owner, file.name, file.media_type, file.content))
        yield attached
        are_used = body.penstock.run_id is None  # else the run may have been there, with files of its own
    finally:
        for one in () if are_used else chain.from_iterable(attached):
            with suppress(StoreUnavailable):
                await service.stores.chats.detach(one.id)


@contextmanager
def _naming(where: str, *fields: str) -> Iterator[None]:
    """What a chat does not take in one of these fields of its own, by the field of the request that says it."""
    try:
        yield
    except InvalidValue as error:
        if error.field not in fields:
            raise
        raise InvalidValue(where, error.value, error.expected) from None
