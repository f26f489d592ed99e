"""`memory`: what outlives a run, kept per chat or per owner.

In the flow it remembers what comes in, or recalls what was remembered. Linked to an agent it is two tools, `remember`
and `recall`. Where things are kept is the service `memory`, a `MemoryStore`: each chat and each owner has a space of
their own there, and a graph cannot name another. A run that belongs to no chat, or to nobody, remembers for itself
alone, and is forgotten with it.

What a store keeps at most, and by which words it finds it, is said here and holds for all of them. How it keeps it is
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
MAX_FOUND = 100
MAX_WORDS = 1_000
"""A memory is found by so many different words, the first ones of its key and its value."""
MAX_WORDS_SOUGHT = 100
"""A search looks for so many different words, the first ones of its text."""
MAX_WORD = 100
"""So many characters of a word are looked at."""

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
        """Remember a JSON value under a key, in place of what was there, as the newest of its space.

        Done again, it comes to the same. The oldest of a full space is forgotten. InvalidValue for what cannot be kept.
        """

    async def search(self, space: str, text: str, limit: int = 10) -> Sequence[Memory]:
        """Those that share most words with a text, the newer of two first; the newest, if the text has no words."""


def words_in(text: str, most: int) -> Collection[str]:
    """The first different words of a text, in small letters."""
    words: dict[str, None] = {}
    for found in WORD.finditer(text.lower()):
        words[found[0][:MAX_WORD]] = None
        if len(words) == most:
            break
    return words.keys()


def words_of(key: str, value: Any) -> Collection[str]:
    """The words that a memory is found by."""
    return words_in(f"{key} {as_text(value)}", MAX_WORDS)


def words_sought(text: str) -> Collection[str]:
    """The words that a search for a text looks for."""
    return words_in(text, MAX_WORDS_SOUGHT)


def space_of_run(run_id: str) -> str:
    """Where a run remembers that belongs to no chat, or to nobody; whoever removes the run forgets it."""
    return f"run:{run_id}"


def space_of_chat(chat_id: str) -> str:
    """Where everything that runs in a chat remembers; whoever removes the chat forgets it."""
    return f"chat:{chat_id}"


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
        hint = "a MemoryStore, such as the `memories` of open_stores(...)"
        raise ServiceMissing("memory", f"node {context.node_id!r}", hint)
    return found


def _space(data: MemoryData, context: FlowContext) -> str:
    """Where the memories of this node are: no graph can say it, only who runs and where."""
    run = context.services.get("run")
    owner = run.get("owner") if isinstance(run, Mapping) else None
    if data.scope == "chat" and context.chat_id is not None:
        return space_of_chat(context.chat_id)
    if data.scope == "owner" and owner:
        return f"owner:{owner}"
    return space_of_run(context.execution.run_id if context.run_id is None else context.run_id)


def _key_of(value: Any) -> str:
    """A key that the same value has again, so that a node that is done again remembers nothing twice."""
    try:
        text = json.dumps(value, sort_keys=True, allow_nan=False, default=dict)
    except (TypeError, ValueError, RecursionError):
        raise InvalidValue("value of a memory", f"this {type(value).__name__}", "JSON") from None
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _shown(memory: Memory) -> dict[str, Any]:
    return {"key": memory.key, "value": memory.value}
