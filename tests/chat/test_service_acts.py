"""How often a turn asks the stores: each time is a way to a thread or over a network, and most of what a turn costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from penstock.agents.scripted import ScriptedModel
from penstock.hosting.limits import HostSettings
from penstock.storage.memory import MemoryStores
from tests.chat.chats import ANN, Chats, chatting

STORES = ("runs", "events", "graphs", "approvals", "cancels", "journal", "chats")
QUIET = HostSettings(tick_s=60, drain_s=0)
"""A host that does nothing beside what it is asked for."""


class Counted:
    """A store that counts what it is asked."""

    def __init__(self, store: Any, name: str, asked: Counter[str]) -> None:
        self._store = store
        self._name = name
        self._asked = asked

    def __getattr__(self, method: str) -> Callable[..., Any]:
        real = getattr(self._store, method)

        def ask(*args: Any, **options: Any) -> Any:
            self._asked[f"{self._name}.{method}"] += 1
            return real(*args, **options)

        return ask


class CountedStores:
    """Stores in memory that count what they are asked."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        kept = MemoryStores()
        self.ledger, self.memories = kept.ledger, kept.memories
        self._kept = kept
        for name in STORES:
            setattr(self, name, Counted(getattr(kept, name), name, self.asked))

    async def transaction(self, unit: Any, *, inline: bool = False) -> Any:
        self.asked["transaction"] += 1
        return await self._kept.transaction(unit, inline=inline)


async def turn(chats: Chats, said: str) -> None:
    began = await chats.service.stream_chat(chats.chat_id, said, owner=ANN)
    assert [event async for event in began.events()][-1].type == "run.completed"


async def test_turn_reads_and_writes_each_thing_once() -> None:
    stores: Any = CountedStores()
    model = ScriptedModel(lambda request: "an answer", name="A")
    async with chatting(models={"A": model}, stores=stores, settings=QUIET) as chats:
        await turn(chats, "the first one reads what is read once")
        stores.asked.clear()
        await turn(chats, "and this is what each costs")
    asked = stores.asked
    writes = asked["transaction"] + asked["events.append"]
    assert 2 <= writes <= 4, "the admission with its claim, the end, and events of a turn that takes a while"
    assert (asked["chats.get"], asked["chats.messages"], asked["chats.message"]) == (1, 1, 0)
    assert asked["cancels.find"] == 1, "a cancel is looked for with the admission and before the end"
    assert asked["journal.append"] == 0, "the model's answer and the node's entry are stored with events or the end"
    assert not [name for name in asked if name.startswith(("runs.", "graphs.", "events.read", "events.last"))], asked
    assert asked.total() <= 8, dict(asked)


async def test_turn_needs_no_more_store_operations_in_a_long_chat() -> None:
    stores: Any = CountedStores()
    model = ScriptedModel(lambda request: "an answer", name="A")
    async with chatting(models={"A": model}, stores=stores, settings=QUIET) as chats:
        totals = []
        for number in range(30):
            stores.asked.clear()
            await turn(chats, f"turn {number}")
            totals.append(stores.asked.total())
    assert max(totals[20:]) <= max(totals[1:10]) + 3, "how many events share an append is a matter of time"
