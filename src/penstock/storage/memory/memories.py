"""Memories that outlive their run, in memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from penstock.nodes import memory
from penstock.nodes.memory import Memory
from penstock.storage import codec
from penstock.storage.memory.chats import MemoryChatStore
from penstock.storage.memory.runs import MemoryRunStore
from penstock.storage.memory.undo import UndoLog
from penstock.storage.rules import EncodedMemory, encode_memory

MAX_SPACES = 10_000
"""Maximum number of spaces in a process; the least recently written one is removed first."""


class InProcessMemory:
    """Memories by space and key, the newest last."""

    def __init__(self, runs: MemoryRunStore | None = None, chats: MemoryChatStore | None = None) -> None:
        self._undo = UndoLog() if runs is None else runs.undo
        if runs is not None:
            runs.on_remove(lambda run_id: self._remove_space(memory.space_of_run(run_id)))
        if chats is not None:
            chats.on_remove(lambda chat_id: self._remove_space(memory.space_of_chat(chat_id)))
        self._spaces: dict[str, dict[str, EncodedMemory]] = {}

    async def get(self, space: str, key: str) -> Memory | None:
        encoded = self._spaces.get(space, {}).get(key)
        return None if encoded is None else _decode(key, encoded)

    async def put(self, space: str, key: str, value: Any) -> None:
        encoded = encode_memory(space, key, value)
        memories = self._spaces.pop(space, {})
        self._spaces[space] = memories  # move it to the end: the most recently written
        memories.pop(key, None)
        memories[key] = encoded
        _drop_oldest(memories, memory.MAX_MEMORIES)
        _drop_oldest(self._spaces, MAX_SPACES)

    async def search(self, space: str, text: str, limit: int = 10) -> Sequence[Memory]:
        codec.limit(limit)
        words = frozenset(memory.words_sought(text))
        found = [*reversed(self._spaces.get(space, {}).items())]
        if words:
            shared = {key: len(words & encoded.words) for key, encoded in found}
            found = sorted((item for item in found if shared[item[0]]), key=lambda item: -shared[item[0]])
        return [_decode(key, encoded) for key, encoded in found[:limit]]

    def _remove_space(self, space: str) -> None:
        self._undo.entry(self._spaces, space)
        self._spaces.pop(space, None)


def _decode(key: str, encoded: EncodedMemory) -> Memory:
    return Memory(key, json.loads(encoded.value))


def _drop_oldest(entries: dict[str, Any], maximum: int) -> None:
    while len(entries) > maximum:
        del entries[next(iter(entries))]
