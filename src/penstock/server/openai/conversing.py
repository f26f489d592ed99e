"""A request as one turn of a chat: what is new of its conversation is kept there, and the graph answers.

Whoever asks gets errors about the request: what a chat does not take is told by the field that says it. Of a request
that is refused nothing is kept.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from penstock.chat.answering import newest_of
from penstock.chat.limits import ChatLimitReached, ChatUnknown, MessageUnknown
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
    from penstock.chat.turn import ChatTurn
    from penstock.server.openai.running import Service

MADE_BY = "openai"
"""Chats that requests to /v1 make: nobody deletes them, so they go when their runs do."""
OF_CHATS = ("content", "attachments", "messages of the chat")
OF_FILES = ("attachment", "name", "media_type")


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
    if await _is_known(service, user, graph, turns, body):
        return str(body.penstock.run_id)
    keys = keys_of(user.name, body.user, graph.id, turns)
    place = await find(service.stores.chats, turns, keys)
    with _naming("messages" if isinstance(body, ChatCompletionBody) else "input", *OF_CHATS):
        try:
            turn = await _say(service, user, graph, place, body, about)
        except (ChatLimitReached, ChatUnknown, MessageUnknown):
            if place.chat_id is None:
                raise
            # It is full, or was removed a moment ago.
            turn = await _say(service, user, graph, Retold(turns), body, about)
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
    limits, chat_id = limits_of(service, body), before.origin["chat_id"]
    answer = newest_of(await service.chats.tree(chat_id), before.origin["message_id"], before.id)
    with _naming("input", *OF_CHATS):
        async with _attached(service, before.owner, files, body) as attached:
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
        if [(one.role, one.content) for one in path] == [(turn.role, turn.text) for turn in turns]:
            return True
    raise Conflict(f"run {run_id!r} answers something else; give this one an id of its own")


async def _say(
    service: Service,
    user: User,
    graph: GraphRecord,
    place: Retold,
    body: ChatCompletionBody | ResponseBody,
    about: Mapping[str, Any] | None,
) -> ChatTurn:
    limits = limits_of(service, body)
    files = [file for turn in place.turns for file in turn.files]
    async with _attached(service, user.name, files, body) as attached:
        return await service.chats.stream_agent_chat(
            graph.id,
            [{"role": turn.role, "content": turn.text} for turn in place.turns],
            owner=user.name,
            chat_id=place.chat_id,
            attachments=attached,
            limits=limits,
            run_id=body.penstock.run_id,
            version=named_version(graph, body.model),
            about=about,
            parent_id=place.parent_id,
            made_by=MADE_BY,
        )


@asynccontextmanager
async def _attached(
    service: Service, owner: str, files: Sequence[File], body: ChatCompletionBody | ResponseBody
) -> AsyncIterator[list[Attachment]]:
    """The files, as messages refer to them; those that no message comes to refer to are not kept."""
    attached: list[Attachment] = []
    are_used = False
    try:
        for file in files:
            with _naming(file.where, *OF_FILES):
                attached.append(await service.chats.attach(owner, file.name, file.media_type, file.content))
        yield attached
        are_used = body.penstock.run_id is None  # else the run may have been there, with files of its own
    finally:
        for one in () if are_used else attached:
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
