"""Start a run for a conversation.

A conversational graph runs as one turn of a chat: find the chat that the request continues, store its new messages, and
run the graph. Any other graph runs on the last user message. In both cases the host owns the run: it has an id, limits
and events, and outlives the request if the request says so.

Clients send the whole conversation again with each new turn. Every user message received over /v1 is marked in its chat
with a key derived from the owner, the graph and the whole conversation up to it, including files. A request whose
history contains a marked message continues that chat, below the stored answer if the client sends the same answer, so
that only new turns are stored. A changed or unknown history starts a new chat. So does a history that is marked in two
chats: users who share a token may send the same messages, and the memory of a chat must not be shared between them. The
key includes the owner and the `user` field of the request, so a request never matches another user's chat.

Pictures and files are stored with the message that they came with, as in a chat held on this server. Models accept them
only in user messages, so files of other messages are moved to the next user message.

Errors refer to the request: a value that the chat rejects is reported under the request field that contains it. A
rejected request stores nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from penstock.chat.conversation import yield_every
from penstock.chat.limits import MAX_ATTACHMENTS, ChatLimitReached, ChatNotFound, MessageNotFound
from penstock.chat.ports import Attachment
from penstock.chat.protocol import KIND
from penstock.chat.run_handler import latest_answer
from penstock.chat.turn import answers_something_else
from penstock.errors import InvalidValue
from penstock.hosting.forking import TAKES_UP
from penstock.hosting.ports import Conflict, StoreUnavailable
from penstock.hosting.records import ENDED, RunRecord
from penstock.server.errors import RETRY_AFTER_S, ApiError
from penstock.server.openai.refusals import Refused
from penstock.server.openai.service import ModelGraph, RunHandle, RunRequest, Service
from penstock.server.openai.wire.request import ChatCompletionBody, File, Turn, check_lengths, text_to_add
from penstock.server.sse import CLOSING

if TYPE_CHECKING:
    from penstock.chat.message import ChatMessage
    from penstock.chat.ports import ChatStore
    from penstock.chat.turn import ChatTurn

MADE_BY = "openai"
"""`made_by` of chats that requests to /v1 create: users do not delete them, so they are removed with their runs."""
OF_CHATS = ("content", "attachments", "messages of the chat")
OF_ONE = " in one message, including those of the tool results before it; send the others in other messages"
OF_NEXT = ", because it is stored as one message; send the others with the next request"
"""Explanations for too many pictures and files."""
OF_FILES = ("attachment", "media_type")
MAX_LOOKUPS = 100
"""Maximum number of user messages of a history that are looked up, newest first."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """The point where a conversation continues, and its new turns; without a chat, all turns are new."""

    turns: Sequence[Turn]
    chat_id: str | None = None
    parent_id: str | None = None


async def start(request: RunRequest) -> RunHandle:
    """Start a run on a conversation."""
    _check(request)
    return _handle(request, await (_start_turn if request.graph.is_conversational else _submit)(request))


async def continue_from(request: RunRequest, before: RunRecord, previous_response_id: str) -> RunHandle:
    """Start a run that continues the conversation of an earlier one."""
    _check(request)
    if request.graph.id != before.graph_id:
        raise InvalidValue("model", request.graph.id, f"{before.graph_id}, the model of the previous response")
    if before.origin.get("kind") != KIND:
        expected = f"a response of a conversation ({_why_no_turn(before, request.graph)})"
        raise InvalidValue("previous_response_id", previous_response_id, expected)
    if before.status not in ENDED:
        expected = f"a response that has ended; this one is {before.status}"
        raise InvalidValue("previous_response_id", previous_response_id, expected)
    try:
        run = await _start_next_turn(request, before)
    except (ChatNotFound, MessageNotFound):
        message = (
            f"the conversation of response {previous_response_id!r} was deleted: "
            "start a new one, with its messages in `input`"
        )
        raise Refused(404, message, param="previous_response_id", code="not_found") from None
    return _handle(request, run)


def _why_no_turn(run: RunRecord, graph: ModelGraph) -> str:
    """Return why no conversation can continue from the run."""
    kind = run.origin.get("kind")
    if kind in TAKES_UP:
        return f"this one is a {kind} of run {run.origin.get('run_id')}, outside its conversation"
    return "this one ran without a chat" if graph.is_conversational else "this graph has no chat-start, and so none"


def _handle(request: RunRequest, run: RunRecord) -> RunHandle:
    asked = request.body.penstock
    return RunHandle(
        request.service,
        run,
        request.graph.answering,
        own_limits=frozenset(asked.limits or ()),
        uses_history=request.graph.is_conversational,
        is_named=asked.run_id is not None,
    )


async def _submit(request: RunRequest) -> RunRecord:
    """Run the graph without a chat, on the last message; return the run."""
    if any(turn.files for turn in request.turns):
        raise InvalidValue("model", request.graph.id, "a graph with a chat-start; other graphs do not accept files")
    return await request.service.host.submit(
        owner=request.user.name,
        graph_id=request.graph.id,
        version=request.version,
        input=request.turns[-1].text,
        limits=request.limits(),
        run_id=request.run_id,
        origin={"kind": "run", "about": dict(request.about)} if request.about else None,
    )


def _check(request: RunRequest) -> None:
    """Reject a run id of another user, and any request during shutdown, when a run would be parked before it starts."""
    if request.service.streams.closing().is_set():
        raise ApiError(503, CLOSING, retry_after_s=RETRY_AFTER_S)
    request.user.check_new_id("penstock.run_id", request.run_id)


async def _start_turn(request: RunRequest) -> RunRecord:
    """Append the new turns to the chat that the conversation continues, or all to a new chat; return the run."""
    check_lengths(request.turns)
    request = replace(request, turns=[*_with_files_of_user(request.turns)])
    if known := await _known_run(request):
        return known
    keys = await conversation_keys(request.user.name, request.body.user, request.graph.id, request.turns)
    place = await find_continuation(request.service.stores.chats, request.turns, keys)
    with _naming("messages" if isinstance(request.body, ChatCompletionBody) else "input", *OF_CHATS):
        try:
            turn = await _send(request, place, keys[-1])
        except (ChatLimitReached, ChatNotFound, MessageNotFound):
            if place.chat_id is None:
                raise
            # The chat is full, or was just removed: use a new one.
            turn = await _send(request, Continuation(request.turns), keys[-1])
        except Conflict:
            # A concurrent identical request may have started the run in another place.
            if known := await _known_run(request):
                return known
            raise
    return turn.run


async def _start_next_turn(request: RunRequest, before: RunRecord) -> RunRecord:
    """Append the next user message below the answer of an earlier run; return the new run."""
    check_lengths(request.turns)
    text, files = text_to_add(request.turns, "input")
    _check_number_of_files(files, "input", OF_NEXT)
    chats, chat_id, limits = request.service.chats, before.origin["chat_id"], request.limits()
    answer = latest_answer(await chats.tree(chat_id), before.origin["message_id"], before.id)
    with _naming("input", *OF_CHATS):
        async with _attached(request, before.owner, [files]) as (attached,):
            turn = await chats.stream_chat(
                chat_id,
                text,
                owner=before.owner,
                parent_id=answer.id,
                attachments=attached,
                limits=limits,
                run_id=request.run_id,
                version=request.version,
                about=request.about,
            )
    return turn.run


async def remove_unused_chat(service: Service, run: RunRecord) -> None:
    """Remove the chat that a request created, if it has no runs left; keep it while another turn runs in it."""
    chats, chat_id = service.stores.chats, run.origin.get("chat_id")
    chat = None if chat_id is None else await chats.get(chat_id)
    if chat is not None and chat.made_by == MADE_BY and not await service.stores.runs.list(chat_id=chat.id, limit=1):
        with suppress(Conflict):
            await chats.remove(chat.id)


async def conversation_keys(owner: str, user: str | None, graph_id: str, turns: Sequence[Turn]) -> list[str]:
    """Return a key for each turn; keys are equal if everything up to that turn is equal."""
    keys = []
    digest = _digest(owner, graph_id, *([] if user is None else [user]))
    for at, turn in enumerate(turns):
        await yield_every(at)
        digest = _digest(digest, turn.role, turn.text, *(part for file in turn.files for part in _parts(file)))
        keys.append(digest[:32])
    return keys


async def find_continuation(chats: ChatStore, turns: Sequence[Turn], keys: Sequence[str]) -> Continuation:
    """Return where the conversation of these turns continues; `keys` are the keys of the turns."""
    user_keys = [key for turn, key in zip(turns[:-1], keys, strict=False) if turn.role == "user"]
    found = await chats.marked(user_keys[: -MAX_LOOKUPS - 1 : -1]) if user_keys else None
    if found is None:
        return Continuation(turns)
    new = turns[keys.index(found.key) + 1 :]
    answer = next((reply.id for reply in reversed(found.replies) if _repeats(new[0], reply)), None)
    if answer is None or len(new) == 1:
        return Continuation(new, found.chat_id, found.message_id)
    return Continuation(new[1:], found.chat_id, answer)


def _repeats(turn: Turn, answer: ChatMessage) -> bool:
    """Whether the turn repeats this stored answer; never true for an answer that is still being written."""
    is_same = (answer.role, answer.content) == (turn.role, turn.text)
    has_files = bool(turn.files or answer.data.get("attachments"))
    return is_same and not has_files and answer.data.get("state") != "writing"


def _parts(file: File) -> Iterator[str]:
    yield from (file.name, file.media_type, hashlib.sha256(file.content).hexdigest())


def _digest(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


async def _known_run(request: RunRequest) -> RunRecord | None:
    """Return the run with the requested id, if it exists already; raise Conflict if it answers another request."""
    service, run_id = request.service, request.run_id
    run = None if run_id is None else await service.host.get(run_id)
    if run is None:
        return None
    is_same = (run.origin.get("kind"), run.owner, run.graph_id) == (KIND, request.user.name, request.graph.id)
    if is_same and request.version in (None, run.graph_version):
        path = (await service.chats.tree(run.origin["chat_id"])).before(run.origin["message_id"])
        if await _has_same_messages(service.stores.chats, path, request.turns):
            service.chats.must_be_within(run, request.limits())
            return run
    raise answers_something_else(run_id)


async def _has_same_messages(chats: ChatStore, path: Sequence[ChatMessage], turns: Sequence[Turn]) -> bool:
    """Whether the messages have the same roles, texts and files as the turns."""
    if [(message.role, message.content) for message in path] != [(turn.role, turn.text) for turn in turns]:
        return False
    for message, turn in zip(path, turns, strict=True):
        attached = message.data.get("attachments") or []
        files = [(file.name, file.media_type, len(file.content)) for file in turn.files]
        if [_description(attachment) for attachment in attached] != files:
            return False
        for attachment, file in zip(attached, turn.files, strict=True):
            found = await chats.attachment(attachment["id"])
            if found is None or found[1] != file.content:
                return False
    return True


def _description(attachment: Mapping[str, Any]) -> tuple[str, str, int]:
    return attachment["name"], attachment["media_type"], attachment["size"]


def _with_files_of_user(turns: Iterable[Turn]) -> Iterator[Turn]:
    """Move files of other roles to the next user turn; raise InvalidValue with the turn that has too many."""
    waiting: tuple[File, ...] = ()
    for turn in turns:
        files, waiting = (*waiting, *turn.files), ()
        if turn.role != "user":
            files, waiting = (), files
        _check_number_of_files(files, turn.where, OF_ONE)
        yield turn if files == turn.files else replace(turn, files=files)


def _check_number_of_files(files: Sequence[File], where: str, what: str) -> None:
    if len(files) > MAX_ATTACHMENTS:
        raise InvalidValue(where, len(files), f"at most {MAX_ATTACHMENTS} pictures and files{what}")


async def _send(request: RunRequest, place: Continuation, mark: str) -> ChatTurn:
    limits = request.limits()
    async with _attached(request, request.user.name, [turn.files for turn in place.turns]) as attached:
        messages = [
            {"role": turn.role, "content": turn.text, "attachments": files}
            for turn, files in zip(place.turns, attached, strict=True)
        ]
        return await request.service.chats.stream_agent_chat(
            request.graph.id,
            messages,
            owner=request.user.name,
            chat_id=place.chat_id,
            limits=limits,
            run_id=request.run_id,
            version=request.version,
            about=request.about,
            parent_id=place.parent_id,
            made_by=MADE_BY,
            mark=mark,
        )


@asynccontextmanager
async def _attached(
    request: RunRequest, owner: str, files_of_turns: Sequence[Sequence[File]]
) -> AsyncIterator[list[list[Attachment]]]:
    """Store the files of each turn and yield their attachments; remove those that no message refers to on exit."""
    service = request.service
    attached: list[list[Attachment]] = [[] for _ in files_of_turns]
    are_used = False
    try:
        for files, attachments in zip(files_of_turns, attached, strict=True):
            for file in files:
                with _naming(file.where, *OF_FILES), _naming(file.named_in, "name"):
                    attachments.append(await service.chats.attach(owner, file.name, file.media_type, file.content))
        yield attached
        are_used = request.run_id is None  # with a run id, the run may have existed already with its own files
    finally:
        for attachment in () if are_used else chain.from_iterable(attached):
            with suppress(StoreUnavailable):
                await service.stores.chats.detach(attachment.id)


@contextmanager
def _naming(where: str, *fields: str) -> Iterator[None]:
    """Re-raise InvalidValue for one of these chat fields with `where`, the request field that the value came from."""
    try:
        yield
    except InvalidValue as error:
        if error.field not in fields:
            raise
        raise InvalidValue(where, error.value, error.expected) from None
