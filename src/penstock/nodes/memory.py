"""`memory`: values that outlive a run, stored per chat or per owner.

In the flow the node stores its input, or recalls stored values. Linked to an agent it provides two tools, `remember`
and `recall`. The service `memory`, a `MemoryStore`, holds the values: each chat and each owner has a separate space
there, and a graph cannot name another. A run without a chat or an owner has a space of its own, which is removed with
the run.

The limits of a store, and the words by which it finds memories, are defined here for all stores. How a store works is
not known here.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

from penstock.agents.tools import Tool
from penstock.errors import InvalidValue
from penstock.kernel.executor import DataValue, Handle, as_text, typed
from penstock.nodes.parts.services import ServiceMissing, tool_name
from penstock.runtime.graphs.graph_runtime import FlowContext
from penstock.runtime.graphs.settings import Checked, Data, Name, Settings, Within

MAX_KEY = 200
MAX_VALUE_CHARACTERS = 100_000
"""Maximum size of one memory, as JSON."""
MAX_MEMORIES = 10_000
"""Maximum number of memories in a space; beyond it the oldest is removed."""
MAX_FOUND = 100
MAX_WORDS = 1_000
"""Number of distinct words that a memory is indexed by, the first ones of its key and its value."""
MAX_WORDS_SOUGHT = 100
"""Number of distinct words that a search uses, the first ones of its text."""
MAX_WORD = 100
"""Number of significant characters of a word."""

WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Memory:
    """One stored value and its key."""

    key: str
    value: Any


@runtime_checkable
class MemoryStore(Protocol):
    """Store of memories by space and key; spaces are isolated from each other."""

    async def get(self, space: str, key: str) -> Memory | None:
        """Return the memory under a key, None if there is none."""

    async def put(self, space: str, key: str, value: Any) -> None:
        """Store a JSON value under a key, replacing any previous one, as the newest of its space.

        Idempotent. The oldest memory of a full space is removed. InvalidValue for a value that cannot be stored.
        """

    async def search(self, space: str, text: str, limit: int = 10) -> Sequence[Memory]:
        """Return the memories that share most words with a text, newer first on ties; the newest if it has no words."""


def words_in(text: str, most: int) -> Collection[str]:
    """Return the first `most` distinct words of a text, in lower case."""
    words: dict[str, None] = {}
    for found in WORD.finditer(text.lower()):
        words[found[0][:MAX_WORD]] = None
        if len(words) == most:
            break
    return words.keys()


def words_of(key: str, value: Any) -> Collection[str]:
    """Return the words that a memory is indexed by."""
    return words_in(f"{key} {as_text(value)}", MAX_WORDS)


def words_sought(text: str) -> Collection[str]:
    """Return the words that a search for a text uses."""
    return words_in(text, MAX_WORDS_SOUGHT)


def space_of_run(run_id: str) -> str:
    """Return the space of a run without a chat or an owner; it is removed with the run."""
    return f"run:{run_id}"


def space_of_owner(owner: str) -> str:
    """Return the space shared by all runs of an owner."""
    return f"owner:{owner}"


def space_of_chat(chat_id: str) -> str:
    """Return the space shared by all runs of a chat; it is removed with the chat."""
    return f"chat:{chat_id}"


@dataclass(frozen=True, slots=True)
class MemoryData(Data):
    """The scope of the memory, and what the node does."""

    scope: Literal["chat", "owner"] = "chat"
    action: Literal["remember", "recall"] = "recall"
    key: Name | None = None
    """Key of the memory. Without one, `remember` derives it from the value, and `recall` searches for the input."""
    default: Any = None
    """Output of `recall` if nothing is stored under the key."""
    limit: Annotated[int, Within(1, MAX_FOUND)] = 10
    """Maximum number of search results."""
    name: Name | None = None
    """Suffix of the tool names, after `remember_` and `recall_`; for agents with several memories."""


class MemoryNode(Checked[MemoryData]):
    """Stores its input and passes it on, or recalls; linked, it provides the tools for both to an agent."""

    settings = Settings(MemoryData)
    inputs = (Handle("input"),)
    outputs = (Handle("output"), Handle("tools", channel="link"))

    async def execute(
        self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext
    ) -> DataValue:
        """Return the value just stored, or the recalled one: the value under the key, or the list of search results."""
        read = self.settings.read(data)
        given = inputs["input"].value if "input" in inputs else context.execution.input
        store, space = _store(context), _space(read, context)
        if read.action == "remember":
            await store.put(space, read.key or _key_of(given), given)
            return typed(given)
        if read.key is None:
            found = await store.search(space, as_text(given), read.limit)
            return DataValue("list", [_shown(memory) for memory in found])
        memory = await store.get(space, read.key)
        return typed(read.default if memory is None else memory.value)

    def materialize(self, data: Mapping[str, Any], output_handle: str, context: FlowContext) -> list[Tool]:
        """Return the tools `remember` and `recall`."""
        read = self.settings.read(data)
        store, space = _store(context), _space(read, context)
        whose = "this conversation" if read.scope == "chat" else "this user"
        suffix = "" if read.name is None else f"_{read.name}"

        async def remember(key: str, value: str) -> str:
            await store.put(space, key, value)
            return f"remembered as {key!r}"

        async def recall(about: str) -> Any:
            exact = await store.get(space, about)
            similar = [memory for memory in await store.search(space, about, read.limit) if memory != exact]
            return [_shown(memory) for memory in ([] if exact is None else [exact]) + similar][: read.limit]

        remembers = f"Store something in the memory of {whose}, under a short descriptive key."
        recalls = f"Search the memory of {whose}, by words or by a key."
        return [
            Tool(remember, name=tool_name(f"remember{suffix}"), description=remembers),
            Tool(recall, name=tool_name(f"recall{suffix}"), description=recalls),
        ]


def _store(context: FlowContext) -> MemoryStore:
    found = context.services.get("memory")
    if not isinstance(found, MemoryStore):
        hint = "a MemoryStore, such as the `memories` of open_stores(...)"
        raise ServiceMissing("memory", f"node {context.node_id!r}", hint)
    return found


def _space(data: MemoryData, context: FlowContext) -> str:
    """Return the space of this node: determined by the run's chat and owner, never by the graph."""
    run = context.services.get("run")
    owner = run.get("owner") if isinstance(run, Mapping) else None
    if data.scope == "chat" and context.chat_id is not None:
        return space_of_chat(context.chat_id)
    if data.scope == "owner" and owner:
        return space_of_owner(owner)
    return space_of_run(context.execution.run_id if context.run_id is None else context.run_id)


def _key_of(value: Any) -> str:
    """Return a key derived from the value, so that a node that runs again stores nothing twice."""
    try:
        text = json.dumps(value, sort_keys=True, allow_nan=False, default=dict)
    except (TypeError, ValueError, RecursionError):
        raise InvalidValue("value of a memory", f"this {type(value).__name__}", "JSON") from None
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _shown(memory: Memory) -> dict[str, Any]:
    return {"key": memory.key, "value": memory.value}
