"""Chats: their messages, and turns being answered."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from penstock.chat.ports import ChatRecord, PathWindow
from penstock.hosting.host import GraphArchived, GraphNotFound
from penstock.server.auth import User
from penstock.server.errors import ApiError, not_found
from penstock.server.graph_check import is_conversational
from penstock.server.routes.runs import STREAMED, Stream, event_stream, wants_events
from penstock.server.schemas import (
    MAX_NAME,
    MEDIA_TYPE,
    AgentPage,
    AgentShown,
    AttachmentShown,
    ChatListed,
    ChatPage,
    ChatPath,
    ChatShown,
    ChatTitle,
    Conversation,
    EditedMessage,
    MessageShown,
    NewAnswer,
    NewChat,
    NewMessage,
    TurnShown,
    run_limits,
)
from penstock.server.state import (
    KNOWN_QUERY,
    CurrentUser,
    PageSize,
    PathId,
    QueryId,
    ServerState,
    Service,
    check_cursor,
    owner_filter,
    readable,
)

if TYPE_CHECKING:
    from penstock.chat.turn import ChatTurn

router = APIRouter(prefix="/api", tags=["chats"], dependencies=[KNOWN_QUERY])

SHOWN_TYPES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp", "text/plain", "application/pdf"})
"""Types that attachments are returned with; any other type is returned as application/octet-stream."""
BYTES_TYPE = "application/octet-stream"
DEFAULT_TYPES = frozenset({"application/json", "application/x-www-form-urlencoded", "multipart/form-data"})
"""Content types that clients set by default, regardless of the body."""
OnLeave = Annotated[
    Literal["continue", "cancel"], Query(description="What to do with the run if the client of the stream disconnects")
]
_ANY_BYTES = {"schema": {"type": "string", "format": "binary"}}
RAW_BODY = {"requestBody": {"required": True, "content": {"*/*": _ANY_BYTES}}}
STORED_BYTES: dict[int | str, dict[str, Any]] = {
    200: {"description": "The bytes", "content": dict.fromkeys(sorted({*SHOWN_TYPES, BYTES_TYPE}), _ANY_BYTES)}
}
_SANDBOX = "sandbox; default-src 'none'"


@dataclass(frozen=True, slots=True)
class TurnResponse:
    """How to respond to a request for an answer: with the ids of its turn, or with a stream of the run's events."""

    service: ServerState
    user: User
    is_stream: bool
    cancel_on_disconnect: bool

    async def to(self, start: Callable[[], Awaitable[ChatTurn]]) -> Any:
        """Start the turn and respond; nothing is started if no stream can be opened."""
        if not self.is_stream:
            return TurnShown.model_validate(await start())
        with self.service.streams.place(self.user.name):
            run_id = (await start()).run_id
            return event_stream(self.service, self.user, run_id, cancel_on_disconnect=self.cancel_on_disconnect)


async def _turn_response(
    request: Request, service: Service, user: CurrentUser, stream: Stream = False, on_leave: OnLeave = "continue"
) -> TurnResponse:
    return TurnResponse(service, user, stream or wants_events(request), on_leave == "cancel")


Turn = Annotated[TurnResponse, Depends(_turn_response)]


@router.get("/chats")
async def list_chats(
    service: Service,
    user: CurrentUser,
    owner: QueryId = None,
    graph_id: QueryId = None,
    q: Annotated[
        str | None,
        Query(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$", description="Part of a title or message"),
    ] = None,
    before: QueryId = None,
    limit: PageSize = 50,
) -> ChatPage:
    """List your own chats with their last message, most recently used first."""
    chats = service.stores.chats
    if before is not None:
        await check_cursor("chat", chats.get(before), user)
    found = await chats.list(owner=owner_filter(user, owner), graph_id=graph_id, text=q, before=before, limit=limit + 1)
    last = await chats.previews([chat.id for chat in found[:limit]])
    shown = [ChatListed.with_last(chat, last.get(chat.id)) for chat in found[:limit]]
    return ChatPage(chats=shown, next=shown[-1].id if len(found) > limit else None)


@router.post("/chats", status_code=201)
async def create_chat(body: NewChat, service: Service, user: CurrentUser) -> ChatShown:
    """Create a chat with a graph. Idempotent: the same `chat_id` returns the existing chat."""
    user.check_new_id("chat_id", body.chat_id)
    await _check_graph(service, body.graph_id, body.chat_id)
    chat = await service.chats.create_chat(
        owner=user.name, graph_id=body.graph_id, title=body.title, chat_id=body.chat_id
    )
    return ChatShown.of(chat)


@router.get("/chats/{chat_id}")
async def get_chat(chat_id: PathId, service: Service, user: CurrentUser) -> Conversation:
    """Return a chat with all its messages."""
    chat = await _own(service, chat_id, user)
    tree = await service.chats.tree(chat_id)
    return Conversation(
        **ChatShown.of(chat).model_dump(),
        messages=[MessageShown.of(message) for message in tree],
        active=[message.id for message in tree.active_path()],
    )


@router.get("/chats/{chat_id}/path")
async def get_path(
    chat_id: PathId,
    service: Service,
    user: CurrentUser,
    around: QueryId = None,
    before: QueryId = None,
    after: QueryId = None,
    limit: PageSize = 50,
) -> ChatPath:
    """Return the last messages in view, or those around, before or after a message on the path through it.

    Each has its position among its siblings. Costs the same however large the chat is; `GET /api/chats/{id}` returns
    all its messages.
    """
    chat = await _own(service, chat_id, user)
    message_id, above, below = _window(around, before, after, limit)
    try:
        window = await service.stores.chats.path(chat_id, message_id, above=above, below=below)
    except KeyError:
        raise not_found("message") from None
    return ChatPath.whole(chat, _trimmed(window, is_before=before is not None, is_after=after is not None))


@router.patch("/chats/{chat_id}")
async def rename_chat(chat_id: PathId, body: ChatTitle, service: Service, user: CurrentUser) -> ChatShown:
    """Change the title of a chat."""
    await _own(service, chat_id, user)
    return ChatShown.of(await service.stores.chats.rename(chat_id, body.title, now_ms=service.now_ms()))


@router.delete("/chats/{chat_id}", status_code=204)
async def delete_chat(chat_id: PathId, service: Service, user: CurrentUser) -> None:
    """Delete a chat with its messages, and attachments used only there; 409 while an answer is being written."""
    await _own(service, chat_id, user)
    await service.chats.delete_chat(chat_id)


@router.post("/chats/{chat_id}/messages", response_model=TurnShown, responses=STREAMED)
async def send_message(chat_id: PathId, body: NewMessage, response: Turn) -> Any:
    """Send a message, at the end of the active path or below `parent_id`; the graph answers.

    If a turn is still running at the end of the path, the new turn becomes a branch beside it.
    """
    service, user = response.service, response.user
    chat = await _own(service, chat_id, user)
    await service.must_run(chat.graph_id, run_id=body.run_id, in_chat=True)
    options = {"owner": chat.owner, "parent_id": body.parent_id, **_message_options(body, user)}
    return await response.to(partial(service.chats.stream_chat, chat_id, body.content, **options))


@router.get("/agents")
async def list_agents(service: Service, before: QueryId = None, limit: PageSize = 100) -> AgentPage:
    """List the graphs that can answer in a chat, by id; a page may have fewer than `limit`, and still a next one."""
    found = await service.stores.graphs.list(before=before, limit=limit + 1)
    agents = [
        AgentShown(id=graph.id, name=graph.name, version=graph.version, made_for_chat=is_conversational(graph))
        for graph in found[:limit]
        if await service.graphs.can_chat(graph)
    ]
    return AgentPage(agents=agents, next=found[limit - 1].id if len(found) > limit else None)


@router.post("/agents/{graph_id}/chat", response_model=TurnShown, responses=STREAMED)
async def chat_with_agent(graph_id: PathId, body: NewMessage, response: Turn) -> Any:
    """Send a message to a graph in a new chat."""
    if body.parent_id is not None:
        raise ApiError(422, "a new chat has no message to continue below", path="$.parent_id")
    service, user = response.service, response.user
    await service.must_run(graph_id, run_id=body.run_id, in_chat=True)  # before a chat is created in vain
    options = {"owner": user.name, **_message_options(body, user)}
    return await response.to(partial(service.chats.stream_agent_chat, graph_id, body.content, **options))


@router.post("/chats/{chat_id}/messages/{message_id}/continue", response_model=TurnShown, responses=STREAMED)
async def continue_message(chat_id: PathId, message_id: PathId, response: Turn, body: NewAnswer | None = None) -> Any:
    """Continue an answer that stopped, from where it stopped."""
    options = await _retry_options(response, chat_id, message_id, body)
    return await response.to(partial(response.service.chats.continue_message, chat_id, message_id, **options))


@router.post("/chats/{chat_id}/messages/{message_id}/retry", response_model=TurnShown, responses=STREAMED)
async def retry_message(chat_id: PathId, message_id: PathId, response: Turn, body: NewAnswer | None = None) -> Any:
    """Create another answer beside this one; both are kept."""
    options = await _retry_options(response, chat_id, message_id, body)
    return await response.to(partial(response.service.chats.retry_message, chat_id, message_id, **options))


@router.post("/chats/{chat_id}/messages/{message_id}/edit", response_model=TurnShown, responses=STREAMED)
async def edit_message(chat_id: PathId, message_id: PathId, body: EditedMessage, response: Turn) -> Any:
    """Send a changed version of a user message, beside the original; both are kept."""
    options = await _retry_options(response, chat_id, message_id, body)
    chats = response.service.chats
    return await response.to(partial(chats.edit_user_message, chat_id, message_id, body.content, **options))


@router.post("/chats/{chat_id}/messages/{message_id}/choose", status_code=204)
async def choose_message(chat_id: PathId, message_id: PathId, service: Service, user: CurrentUser) -> None:
    """Select a message among its siblings for the active path."""
    await _own_message(service, chat_id, message_id, user)
    await service.stores.chats.choose(chat_id, message_id)


@router.post("/attachments", status_code=201, openapi_extra=RAW_BODY)
async def attach(
    request: Request,
    service: Service,
    user: CurrentUser,
    name: Annotated[str, Query(min_length=1, max_length=MAX_NAME, pattern=r"^[^\x00-\x1f\x7f/\\]+$")],
    media_type: Annotated[
        str | None, Query(pattern=MEDIA_TYPE, description="The media type, in place of the Content-Type")
    ] = None,
) -> AttachmentShown:
    """Store the bytes of the body as an attachment for messages.

    Its type is `media_type`, or else the Content-Type. A Content-Type of JSON or of forms is ignored, because clients
    set it by default.
    """
    kind = media_type or _declared(request)
    return AttachmentShown.of(await service.chats.attach(user.name, name, kind, await request.body()))


@router.get("/attachments/{attachment_id}", response_class=Response, responses=STORED_BYTES)
async def get_attachment(attachment_id: PathId, service: Service, user: CurrentUser) -> Response:
    """Return the bytes as a download; a browser neither displays nor executes them."""
    found = await service.stores.chats.attachment(attachment_id)
    record = readable("attachment", None if found is None else found[0], user)
    kind = record.media_type if record.media_type in SHOWN_TYPES else BYTES_TYPE
    disposition = f"attachment; filename*=UTF-8''{quote(record.name, safe='')}"
    headers = {"Content-Disposition": disposition, "Content-Security-Policy": _SANDBOX}
    return Response(found[1], media_type=kind, headers=headers)


@router.delete("/attachments/{attachment_id}", status_code=204)
async def detach(attachment_id: PathId, service: Service, user: CurrentUser) -> None:
    """Remove an attachment that no message refers to; 409 if one does: it is removed with the chat of that message."""
    chats = service.stores.chats
    found = await chats.attachment(attachment_id)
    readable("attachment", None if found is None else found[0], user)
    await chats.detach(attachment_id)
    if await chats.attachment(attachment_id) is not None:
        raise ApiError(409, "a message refers to this attachment; it is removed with the chat of that message")


def _window(around: str | None, before: str | None, after: str | None, limit: int) -> tuple[str | None, int, int]:
    """Return the message that a window is around, and how many messages above and below it."""
    given = [id for id in (around, before, after) if id is not None]
    if len(given) > 1:
        raise ApiError(422, "send one of `around`, `before` and `after`", path="query.around")
    if around is not None:
        return around, limit // 2, (limit - 1) // 2
    if after is not None:
        return after, 0, limit
    return before, limit if before is not None else limit - 1, 0


def _trimmed(window: PathWindow, *, is_before: bool, is_after: bool) -> PathWindow:
    """Return the window without the message that it is before or after."""
    if is_after and len(window.messages) == 1:
        return replace(window, messages=(), places=())
    first, last = int(is_after), len(window.messages) - int(is_before)
    return replace(window, messages=window.messages[first:last], places=window.places[first:last])


def _declared(request: Request) -> str:
    """Return the media type of the Content-Type, without parameters; raises 422 if it is malformed."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not media_type or media_type in DEFAULT_TYPES:
        return BYTES_TYPE
    if not re.fullmatch(MEDIA_TYPE, media_type):
        message = "the Content-Type must be the media type of the file, such as image/png, or be omitted"
        raise ApiError(422, message, path="header.content-type")
    return media_type


async def _own(service: ServerState, chat_id: str, user: User) -> ChatRecord:
    chat: ChatRecord = readable("chat", await service.stores.chats.get(chat_id), user)
    return chat


async def _own_message(service: ServerState, chat_id: str, message_id: str, user: User) -> ChatRecord:
    chat = await _own(service, chat_id, user)
    if await service.stores.chats.message(chat_id, message_id) is None:
        raise not_found("message")
    return chat


def _turn_options(body: NewMessage | NewAnswer, user: User) -> dict[str, Any]:
    """Return the arguments that every turn takes from its body."""
    user.check_new_id("run_id", body.run_id)
    return {"user_tools": body.user_tools, "limits": run_limits(body.limits), "run_id": body.run_id}


def _message_options(body: NewMessage, user: User) -> dict[str, Any]:
    return {"attachments": body.attachments, **_turn_options(body, user)}


async def _retry_options(
    response: TurnResponse, chat_id: str, message_id: str, body: NewAnswer | None
) -> dict[str, Any]:
    service, user, options = response.service, response.user, body or NewAnswer()
    chat = await _own_message(service, chat_id, message_id, user)
    await service.must_run(chat.graph_id, run_id=options.run_id, in_chat=True)
    return {"owner": chat.owner, **_turn_options(options, user)}


async def _check_graph(service: ServerState, graph_id: str, chat_id: str | None) -> None:
    """Raise unless the graph exists and, for a new chat, is not archived."""
    graph = await service.stores.graphs.get(graph_id)
    if graph is None:
        raise GraphNotFound(graph_id, None)
    if graph.is_archived and (chat_id is None or await service.stores.chats.get(chat_id) is None):
        raise GraphArchived(graph_id)
