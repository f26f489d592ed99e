"""`memory`: what outlives a run, kept per chat or per owner.

In the flow it remembers what comes in, or recalls what was remembered. Linked to an agent it is two tools, `remember`
and `recall`. Where things are kept is the service `memory`, a `MemoryStore`: each chat and each owner has a space of
their own there, and a graph cannot name another. A run that belongs to no chat, or to nobody, remembers for itself
alone.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

from penstock.agents.tools import Tool
from penstock.errors import InvalidValue
from penstock.kernel.executor import Handle
from penstock.kernel.values import DataValue
from penstock.nodes.parts.services import ServiceMissing
from penstock.nodes.parts.settings import Checked, Data, Name, Settings, Within
from penstock.nodes.parts.toolbox import tool_name
from penstock.nodes.parts.values import as_text, typed
from penstock.runtime.graphs.flow_context import FlowContext

MAX_KEY = 200
MAX_VALUE_CHARACTERS = 100_000
"""What one memory may have, as JSON."""
MAX_MEMORIES = 10_000
"""So many are kept in a space; one more, and the oldest is forgotten."""
MAX_SPACES = 10_000
"""So many spaces are kept in a process; the one that was used longest ago is forgotten first."""
MAX_FOUND = 100

WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Memory:
    """One thing that is remembered."""

    key: str
    value: Any


@runtime_checkable
class MemoryStore(Protocol):
    """Where memories are kept, by space and key; a space sees nothing of another one."""

    async def get(self, space: str, key: str) -> Memory | None:
        """What is remembered under a key."""

    async def put(self, space: str, key: str, value: Any) -> None:
        """Remember a JSON value under a key, in place of what was there."""

    async def search(self, space: str, text: str, limit: int = 10) -> Sequence[Memory]:
        """What has to do with a text, the nearest first; the newest, if the text is empty."""


class InProcessMemory:
    """Memories that last as long as the process; a search counts the words that a memory shares with the text."""

    def __init__(self) -> None:
        self._spaces: dict[str, dict[str, tuple[Any, frozenset[str]]]] = {}

    async def get(self, space: str, key: str) -> Memory | None:
        """What is remembered under a key."""
        found = self._spaces.get(space, {}).get(key)
        return None if found is None else Memory(key, found[0])

    async def put(self, space: str, key: str, value: Any) -> None:
        """Remember it; the oldest of a full space is forgotten."""
        kept, words = _kept(key, value)
        memories = self._spaces.pop(space, {})
        self._spaces[space] = memories  # the last one used
        memories.pop(key, None)
        memories[key] = (kept, words)
        _forget_oldest(memories, MAX_MEMORIES)
        _forget_oldest(self._spaces, MAX_SPACES)

    async def search(self, space: str, text: str, limit: int = 10) -> Sequence[Memory]:
        """Those with most words of the text, the newer of two first."""
        wanted = frozenset(WORD.findall(text.lower()))
        newest_first = reversed(self._spaces.get(space, {}).items())
        found = [(len(wanted & words), Memory(key, value)) for key, (value, words) in newest_first]
        if wanted:
            found = sorted((one for one in found if one[0]), key=lambda one: -one[0])
        return [memory for _, memory in found[:limit]]


def _kept(key: str, value: Any) -> tuple[Any, frozenset[str]]:
    """A copy of the value, and the words to find it by."""
    if not 1 <= len(key) <= MAX_KEY:
        raise InvalidValue("key of a memory", key, f"a text of 1 to {MAX_KEY} characters")
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        text = ""
    if not text or len(text) > MAX_VALUE_CHARACTERS:
        expected = f"JSON of at most {MAX_VALUE_CHARACTERS} characters"
        raise InvalidValue("value of a memory", f"this {type(value).__name__}", expected)
    return json.loads(text), frozenset(WORD.findall(f"{key} {as_text(value)}".lower()))


def _forget_oldest(kept: dict[str, Any], most: int) -> None:
    while len(kept) > most:
        del kept[next(iter(kept))]


@dataclass(frozen=True, slots=True)
class MemoryData(Data):
    """Whose memory it is, and what the node does in the flow."""

    scope: Literal["chat", "owner"] = "chat"
    action: Literal["remember", "recall"] = "recall"
    key: Name | None = None
    """What it is kept under. Without one, `remember` makes one of the value, and `recall` searches for the input."""
    default: Any = None
    """What `recall` gives if there is nothing under the key."""
    limit: Annotated[int, Within(1, MAX_FOUND)] = 10
    """So many are found by a search."""
    name: Name | None = None
    """What the tools are called by, behind `remember_` and `recall_`; for agents that have several memories."""


class MemoryNode(Checked[MemoryData]):
    """Remembers what comes in and passes it on, or recalls; linked, it lends an agent the tools for both."""

    settings = Settings(MemoryData)
    inputs = (Handle("input"),)
    outputs = (Handle("output"), Handle("tools", channel="link"))

    async def execute(
        self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext
    ) -> DataValue:
        """What was remembered just now, or what was recalled: a value by its key, or the list of what was found."""
        read = self.settings.read(data)
        given = inputs["input"].value if "input" in inputs else context.execution.input
        store, space = _store(context), _space(read, context)
        if read.action == "remember":
            await store.put(space, read.key or _key_of(given), given)
            return typed(given)
        if read.key is None:
            found = await store.search(space, as_text(given), read.limit)
            return DataValue("list", [_shown(one) for one in found])
        memory = await store.get(space, read.key)
        return typed(read.default if memory is None else memory.value)

    def materialize(self, data: Mapping[str, Any], output_handle: str, context: FlowContext) -> list[Tool]:
        """The tools `remember` and `recall`."""
        read = self.settings.read(data)
        store, space = _store(context), _space(read, context)
        whose = "this conversation" if read.scope == "chat" else "this user"
        suffix = "" if read.name is None else f"_{read.name}"

        async def remember(key: str, value: str) -> str:
            await store.put(space, key, value)
            return f"remembered as {key!r}"

        async def recall(about: str) -> Any:
            exact = await store.get(space, about)
            found = [one for one in await store.search(space, about, read.limit) if exact is None or one != exact]
            return [_shown(one) for one in ([] if exact is None else [exact]) + found][: read.limit]

        kept = f"Keep something for later in the memory of {whose}, under a short key that says what it is."
        found = f"Look up what the memory of {whose} has about something: words to search for, or a key."
        return [
            Tool(remember, name=tool_name(f"remember{suffix}"), description=kept),
            Tool(recall, name=tool_name(f"recall{suffix}"), description=found),
        ]


def _store(context: FlowContext) -> MemoryStore:
    found = context.services.get("memory")
    if not isinstance(found, MemoryStore):
        hint = "a MemoryStore, such as InProcessMemory()"
        raise ServiceMissing("memory", f"node {context.node_id!r}", hint)
    return found


def _space(data: MemoryData, context: FlowContext) -> str:
    """Where the memories of this node are: no graph can say it, only who runs and where."""
    run = context.services.get("run")
    owner = run.get("owner") if isinstance(run, Mapping) else None
    if data.scope == "chat" and context.chat_id is not None:
        return f"chat:{context.chat_id}"
    if data.scope == "owner" and owner:
        return f"owner:{owner}"
    return f"run:{context.run_id}"


def _key_of(value: Any) -> str:
    """A key that the same value has again, so that a run that is repeated remembers nothing twice."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _shown(memory: Memory) -> dict[str, Any]:
    return {"key": memory.key, "value": memory.value}
