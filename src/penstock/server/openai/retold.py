"""Conversations that clients tell again, each time with one turn more: what of them is kept here already.

Every question that is asked over /v1 is marked in its chat with a key that follows from whose it is, which graph is
asked, and all that was said up to it, files and all. A request whose history has such a question goes on in that chat,
below the answer that was given there if the client tells the same, so that only what is new is kept. A history that was
changed, or was never asked here, begins a chat of its own; so does one that was asked in two, for people who share a
token may say the same, and what is remembered in a chat is not the others'.

The owner is in the key, and the `user` that the client names: nobody comes upon what is another's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.chat.pauses import pause_at
from penstock.server.openai.wire.conversation import File, Turn

if TYPE_CHECKING:
    from penstock.chat.message import ChatMessage
    from penstock.chat.ports import ChatStore

MOST_SOUGHT = 100
"""So many of the newest questions of a history are looked for."""


@dataclass(frozen=True, slots=True)
class Retold:
    """Where a conversation goes on, and what is new there; without a chat, all of it is."""

    turns: Sequence[Turn]
    chat_id: str | None = None
    parent_id: str | None = None


async def keys_of(owner: str, user: str | None, graph_id: str, turns: Sequence[Turn]) -> list[str]:
    """A key for each turn; two are the same if everything up to there is."""
    keys = []
    digest = _digest(owner, graph_id, *([] if user is None else [user]))
    for at, turn in enumerate(turns):
        await pause_at(at)
        digest = _digest(digest, turn.role, turn.text, *(part for file in turn.files for part in _parts(file)))
        keys.append(digest[:32])
    return keys


async def find(chats: ChatStore, turns: Sequence[Turn], keys: Sequence[str]) -> Retold:
    """Where the conversation of these turns, with these keys, goes on."""
    asked = [key for turn, key in zip(turns[:-1], keys, strict=False) if turn.role == "user"]
    found = await chats.marked(asked[: -MOST_SOUGHT - 1 : -1]) if asked else None
    if found is None:
        return Retold(turns)
    new = turns[keys.index(found.key) + 1 :]
    answer = next((one.id for one in reversed(found.replies) if _is_told(one, new[0])), None)
    if answer is None or len(new) == 1:
        return Retold(new, found.chat_id, found.message_id)
    return Retold(new[1:], found.chat_id, answer)


def _is_told(answer: ChatMessage, turn: Turn) -> bool:
    """Whether the client tells what was answered; what is still being written was not told yet."""
    is_same = (answer.role, answer.content) == (turn.role, turn.text)
    has_files = bool(turn.files or answer.data.get("attachments"))
    return is_same and not has_files and answer.data.get("state") != "writing"


def _parts(file: File) -> Iterator[str]:
    yield from (file.name, file.media_type, hashlib.sha256(file.content).hexdigest())


def _digest(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
