"""What runs remember beyond their end, in memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import InvalidValue
from penstock.nodes import memory
from penstock.nodes.memory import Memory
from penstock.storage.memory.chats import MemoryChatStore
from penstock.storage.memory.runs import MemoryRunStore
from penstock.storage.sql import codec

MAX_SPACES = 10_000
"""So many spaces are kept in a process; the one that was written to longest ago is forgotten first."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A memory as it is kept."""

    written: str
    """Its value, as JSON."""
    words: frozenset[str]
    """What it is found by."""


class InProcessMemory:
    """Memories by space and key, the newest last."""

    def __init__(self, runs: MemoryRunStore | None = None, chats: MemoryChatStore | None = None) -> None:
        if runs is not None:
            runs.on_forget(lambda run_id: self._forget(memory.space_of_run(run_id)))
        if chats is not None:
            chats.on_forget(lambda chat_id: self._forget(memory.space_of_chat(chat_id)))
        self._spaces: dict[str, dict[str, Kept]] = {}

    async def get(self, space: str, key: str) -> Memory | None:
        kept = self._spaces.get(space, {}).get(key)
        return None if kept is None else _given(key, kept)

    async def put(self, space: str, key: str, value: Any) -> None:
        kept = to_keep(space, key, value)
        memories = self._spaces.pop(space, {})
        self._spaces[space] = memories  # the last one used
        memories.pop(key, None)
        memories[key] = kept
        _forget_oldest(memories, memory.MAX_MEMORIES)
        _forget_oldest(self._spaces, MAX_SPACES)

    async def search(self, space: str, text: str, limit: int = 10) -> Sequence[Memory]:
        codec.limit(limit)
        sought = frozenset(memory.words_sought(text))
        found = [*reversed(self._spaces.get(space, {}).items())]
        if sought:
            shared = {key: len(sought & kept.words) for key, kept in found}
            found = sorted((one for one in found if shared[one[0]]), key=lambda one: -shared[one[0]])
        return [_given(key, kept) for key, kept in found[:limit]]

    def _forget(self, space: str) -> None:
        self._spaces.pop(space, None)


def to_keep(space: str, key: str, value: Any) -> Kept:
    """The memory as it is kept; InvalidValue if it cannot be."""
    codec.name("space of a memory", space)
    if codec.sought(key) is codec.NOBODY or not 1 <= len(key) <= memory.MAX_KEY:
        expected = f"a text of 1 to {memory.MAX_KEY} characters, without NUL or half a surrogate pair"
        raise InvalidValue("key of a memory", key, expected)
    written = codec.document("value of a memory", value)
    copied = json.loads(written)
    size = len(json.dumps(copied, ensure_ascii=False))
    if size > memory.MAX_VALUE_CHARACTERS:
        expected = f"JSON of at most {memory.MAX_VALUE_CHARACTERS} characters"
        raise InvalidValue("value of a memory", f"this {type(value).__name__} of {size}", expected)
    return Kept(written, frozenset(memory.words_of(key, copied)))


def _given(key: str, kept: Kept) -> Memory:
    return Memory(key, json.loads(kept.written))


def _forget_oldest(kept: dict[str, Any], most: int) -> None:
    while len(kept) > most:
        del kept[next(iter(kept))]
