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
"""A host that does nothing in the background."""


class Counted:
    """A store that counts its calls."""

    def __init__(self, store: Any, name: str, calls: Counter[str]) -> None:
        self._store = store
        self._name = name
        self._calls = calls

    def __getattr__(self, method: str) -> Callable[..., Any]:
        real = getattr(self._store, method)

        def ask(*args: Any, **options: Any) -> Any:
            self._calls[f"{self._name}.{method}"] += 1
            return real(*args, **options)

        return ask


class CountedStores:
    """Stores in memory that count their calls."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        kept = MemoryStores()
        self.ledger, self.memories = kept.ledger, kept.memories
        self._kept = kept
        for name in STORES:
            setattr(self, name, Counted(getattr(kept, name), name, self.calls))

    async def transaction(self, unit: Any, *, inline: bool = False) -> Any:
        self.calls["transaction"] += 1
        return await self._kept.transaction(unit, inline=inline)


async def turn(chats: Chats, content: str) -> None:
    began = await chats.service.stream_chat(chats.chat_id, content, owner=ANN)
    assert [event async for event in began.events()][-1].type == "run.completed"


async def test_turn_reads_and_writes_each_thing_once() -> None:
    stores: Any = CountedStores()
    model = ScriptedModel(lambda request: "an answer", name="A")
    async with chatting(models={"A": model}, stores=stores, settings=QUIET) as chats:
        await turn(chats, "the first one reads what is read once")
        stores.calls.clear()
        await turn(chats, "and this is what each costs")
    calls = stores.calls
    writes = calls["transaction"] + calls["events.append"]
    assert 2 <= writes <= 4, "the admission with its claim, the end, and events of a turn that takes a while"
    assert (calls["chats.get"], calls["chats.messages"], calls["chats.message"]) == (1, 1, 0)
    assert calls["cancels.find"] == 1, "a cancel is looked for with the admission and before the end"
    assert calls["journal.append"] == 0, "the model's answer and the node's entry are stored with events or the end"
    assert not [name for name in calls if name.startswith(("runs.", "graphs.", "events.read", "events.last"))], calls
    assert calls.total() <= 8, dict(calls)


async def test_turn_needs_no_more_store_operations_in_a_long_chat() -> None:
    stores: Any = CountedStores()
    model = ScriptedModel(lambda request: "an answer", name="A")
    async with chatting(models={"A": model}, stores=stores, settings=QUIET) as chats:
        totals = []
        for number in range(30):
            stores.calls.clear()
            await turn(chats, f"turn {number}")
            totals.append(stores.calls.total())
    assert max(totals[20:]) <= max(totals[1:10]) + 3, "how many events share an append is a matter of time"
