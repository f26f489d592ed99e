"""Chats: what was said, and answers on their way."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from penstock.chat.ports import ChatRecord
from penstock.hosting.host import GraphArchived, UnknownGraph
from penstock.server.auth import User
from penstock.server.errors import ApiError, not_found
from penstock.server.parts import (
    KNOWN_QUERY,
    Asker,
    PageSize,
    Parts,
    PathId,
    QueryId,
    Service,
    check_new_id,
    check_place,
    readable,
    whose,
)
from penstock.server.routes.runs import STREAMED, Stream, told, wants_events
from penstock.server.schemas import (
    MAX_NAME,
    MEDIA_TYPE,
    Again,
    AttachmentShown,
    ChatPage,
    ChatShown,
    ChatTitle,
    Conversation,
    MessageShown,
    NewChat,
    Rephrase,
    Say,
    TurnShown,
    run_limits,
)

if TYPE_CHECKING:
    from penstock.chat.turn import ChatTurn

router = APIRouter(prefix="/api", tags=["chats"], dependencies=[KNOWN_QUERY])

SHOWN_TYPES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp", "text/plain", "application/pdf"})
"""What is given back under its own type; everything else is only bytes, whatever it was sent as."""
BYTES_TYPE = "application/octet-stream"
NOT_OF_FILES = frozenset({"application/json", "application/x-www-form-urlencoded", "multipart/form-data"})
"""What clients say of a body by themselves, whatever is in it."""
OnLeave = Annotated[Literal["continue", "cancel"], Query(description="what becomes of the run when a stream is left")]
_ANY_BYTES = {"schema": {"type": "string", "format": "binary"}}
RAW_BODY = {"requestBody": {"required": True, "content": {"*/*": _ANY_BYTES}}}
KEPT_BYTES: dict[int | str, dict[str, Any]] = {
    200: {"description": "The bytes", "content": dict.fromkeys(sorted({*SHOWN_TYPES, BYTES_TYPE}), _ANY_BYTES)}
}
_SANDBOX = "sandbox; default-src 'none'"


@router.get("/chats")
async def list_chats(
    service: Service, user: Asker, owner: QueryId = None, before: QueryId = None, limit: PageSize = 50
) -> ChatPage:
    """One's own chats, the one used last first."""
    if before is not None:
        check_place("chat", await service.stores.chats.get(before), user)
    found = await service.stores.chats.list(owner=whose(user, owner), before=before, limit=limit + 1)
    shown = [ChatShown.of(chat) for chat in found[:limit]]
    return ChatPage(chats=shown, next=shown[-1].id if len(found) > limit else None)


@router.post("/chats", status_code=201)
async def create_chat(body: NewChat, service: Service, user: Asker) -> ChatShown:
    """A new chat with a graph; the same `chat_id` again is the same chat."""
    check_new_id(body.chat_id, user, "chat_id")
    await _must_answer_in(service, body.graph_id, body.chat_id)
    chat = await service.chats.create_chat(
        owner=user.name, graph_id=body.graph_id, title=body.title, chat_id=body.chat_id
    )
    return ChatShown.of(chat)


@router.get("/chats/{chat_id}")
async def get_chat(chat_id: PathId, service: Service, user: Asker) -> Conversation:
    """A chat with everything that was said in it."""
    chat = await _own(service, chat_id, user)
    tree = await service.chats.tree(chat_id)
    return Conversation(
        **ChatShown.of(chat).model_dump(),
        messages=[MessageShown.of(message) for message in tree],
        active=[message.id for message in tree.active_path()],
    )


@router.patch("/chats/{chat_id}")
async def rename_chat(chat_id: PathId, body: ChatTitle, service: Service, user: Asker) -> ChatShown:
    """Give it another title."""
    await _own(service, chat_id, user)
    return ChatShown.of(await service.stores.chats.rename(chat_id, body.title, now_ms=service.now_ms()))


@router.delete("/chats/{chat_id}", status_code=204)
async def delete_chat(chat_id: PathId, service: Service, user: Asker) -> None:
    """Remove it with all that was said, and what is attached there alone; 409 while an answer is being written."""
    await _own(service, chat_id, user)
    await service.chats.delete_chat(chat_id)


@router.post("/chats/{chat_id}/messages", response_model=TurnShown, responses=STREAMED)
async def say(
    chat_id: PathId,
    body: Say,
    request: Request,
    service: Service,
    user: Asker,
    stream: Stream = False,
    on_leave: OnLeave = "continue",
) -> Any:
    """Say something, at the end of what is in view or below another message; the graph answers.

    A turn that is under way at the end is not built upon: this one is a branch beside it.
    """
    chat = await _own(service, chat_id, user)
    await service.must_run(chat.graph_id, run_id=body.run_id, in_chat=True)
    spoken = {"owner": chat.owner, "parent_id": body.parent_id, **_spoken(body, user)}
    begin = partial(service.chats.stream_chat, chat_id, body.content, **spoken)
    return await _answered(service, user, request, begin, stream, on_leave)


@router.post("/agents/{graph_id}/chat", response_model=TurnShown, responses=STREAMED)
async def chat_with_agent(
    graph_id: PathId,
    body: Say,
    request: Request,
    service: Service,
    user: Asker,
    stream: Stream = False,
    on_leave: OnLeave = "continue",
) -> Any:
    """Say something to a graph in a chat that begins with it."""
    if body.parent_id is not None:
        raise ApiError(422, "a chat that begins has no message to answer below", path="$.parent_id")
    await service.must_run(graph_id, run_id=body.run_id, in_chat=True)  # before there is a chat nobody answers in
    spoken = _spoken(body, user)
    begin = partial(service.chats.stream_agent_chat, graph_id, body.content, owner=user.name, **spoken)
    return await _answered(service, user, request, begin, stream, on_leave)


@router.post("/chats/{chat_id}/messages/{message_id}/continue", response_model=TurnShown, responses=STREAMED)
async def continue_message(
    chat_id: PathId,
    message_id: PathId,
    request: Request,
    service: Service,
    user: Asker,
    body: Again | None = None,
    stream: Stream = False,
    on_leave: OnLeave = "continue",
) -> Any:
    """Let an answer that stopped go on from where it is."""
    again = await _again(service, user, chat_id, message_id, body)
    begin = partial(service.chats.continue_message, chat_id, message_id, **again)
    return await _answered(service, user, request, begin, stream, on_leave)


@router.post("/chats/{chat_id}/messages/{message_id}/retry", response_model=TurnShown, responses=STREAMED)
async def retry_message(
    chat_id: PathId,
    message_id: PathId,
    request: Request,
    service: Service,
    user: Asker,
    body: Again | None = None,
    stream: Stream = False,
    on_leave: OnLeave = "continue",
) -> Any:
    """Another answer beside this one; both stay."""
    again = await _again(service, user, chat_id, message_id, body)
    begin = partial(service.chats.retry_message, chat_id, message_id, **again)
    return await _answered(service, user, request, begin, stream, on_leave)


@router.post("/chats/{chat_id}/messages/{message_id}/edit", response_model=TurnShown, responses=STREAMED)
async def edit_message(
    chat_id: PathId,
    message_id: PathId,
    body: Rephrase,
    request: Request,
    service: Service,
    user: Asker,
    stream: Stream = False,
    on_leave: OnLeave = "continue",
) -> Any:
    """Say it in other words, beside what was said; both stay."""
    again = await _again(service, user, chat_id, message_id, body)
    begin = partial(service.chats.edit_user_message, chat_id, message_id, body.content, **again)
    return await _answered(service, user, request, begin, stream, on_leave)


@router.post("/chats/{chat_id}/messages/{message_id}/choose", status_code=204)
async def choose_message(chat_id: PathId, message_id: PathId, service: Service, user: Asker) -> None:
    """Bring a message into view among its siblings."""
    await _own_message(service, chat_id, message_id, user)
    await service.chats.switch(chat_id, message_id)


@router.post("/attachments", status_code=201, openapi_extra=RAW_BODY)
async def attach(
    request: Request,
    service: Service,
    user: Asker,
    name: Annotated[str, Query(min_length=1, max_length=MAX_NAME, pattern=r"^[^\x00-\x1f\x7f/\\]+$")],
    media_type: Annotated[str | None, Query(pattern=MEDIA_TYPE, description="instead of the Content-Type")] = None,
) -> AttachmentShown:
    """Keep the bytes of the body, to refer to them in messages.

    They are of the type that the query says, or else the Content-Type. One of JSON or of forms says nothing of them:
    clients send it by themselves.
    """
    kind = media_type or _declared(request)
    return AttachmentShown.of(await service.chats.attach(user.name, name, kind, await request.body()))


@router.get("/attachments/{attachment_id}", response_class=Response, responses=KEPT_BYTES)
async def get_attachment(attachment_id: PathId, service: Service, user: Asker) -> Response:
    """The bytes, to be saved: a browser shows nothing of them, and runs nothing."""
    found = await service.stores.chats.attachment(attachment_id)
    record = readable("attachment", None if found is None else found[0], user)
    kind = record.media_type if record.media_type in SHOWN_TYPES else BYTES_TYPE
    disposition = f"attachment; filename*=UTF-8''{quote(record.name, safe='')}"
    headers = {"Content-Disposition": disposition, "Content-Security-Policy": _SANDBOX}
    return Response(found[1], media_type=kind, headers=headers)


def _declared(request: Request) -> str:
    """What the Content-Type says that the body is, without its parameters; 422 if that is no type."""
    said = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not said or said in NOT_OF_FILES:
        return BYTES_TYPE
    if not re.fullmatch(MEDIA_TYPE, said):
        message = "the Content-Type must be that of the file, such as image/png, or be left out"
        raise ApiError(422, message, path="header.content-type")
    return said


async def _own(service: Parts, chat_id: str, user: User) -> ChatRecord:
    chat: ChatRecord = readable("chat", await service.stores.chats.get(chat_id), user)
    return chat


async def _own_message(service: Parts, chat_id: str, message_id: str, user: User) -> ChatRecord:
    chat = await _own(service, chat_id, user)
    if await service.stores.chats.message(chat_id, message_id) is None:
        raise not_found("message")
    return chat


def _given(body: Say | Again, user: User) -> dict[str, Any]:
    """What every turn takes of its body."""
    check_new_id(body.run_id, user, "run_id")
    return {"user_tools": body.user_tools, "limits": run_limits(body.limits), "run_id": body.run_id}


def _spoken(body: Say, user: User) -> dict[str, Any]:
    return {"attachments": body.attachments, **_given(body, user)}


async def _again(service: Parts, user: User, chat_id: str, message_id: str, body: Again | None) -> dict[str, Any]:
    chat = await _own_message(service, chat_id, message_id, user)
    asked = body or Again()
    await service.must_run(chat.graph_id, run_id=asked.run_id, in_chat=True)
    return {"owner": chat.owner, **_given(asked, user)}


async def _must_answer_in(service: Parts, graph_id: str, chat_id: str | None) -> None:
    """A new chat needs a graph that begins something; one that is there needs nothing."""
    graph = await service.stores.graphs.get(graph_id)
    if graph is None:
        raise UnknownGraph(graph_id, None)
    if graph.is_archived and (chat_id is None or await service.stores.chats.get(chat_id) is None):
        raise GraphArchived(graph_id)


async def _answered(
    service: Parts,
    user: User,
    request: Request,
    begin: Callable[[], Awaitable[ChatTurn]],
    stream: bool,
    on_leave: Literal["continue", "cancel"],
) -> Any:
    """The turn, or the stream of its answer; nothing is begun for a stream that cannot be."""
    if not (stream or wants_events(request)):
        return TurnShown.model_validate(await begin())
    with service.streams.place(user.name):
        return told(service, user, (await begin()).run_id, is_cancelled_on_leave=on_leave == "cancel")
