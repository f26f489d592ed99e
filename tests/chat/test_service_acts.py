"""How often a turn asks the stores: each time is a way to a thread or over a network, and most of what a turn costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from penstock.agents.scripted import ScriptedModel
from penstock.hosting.settings import HostSettings
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
        for name in STORES:
            setattr(self, name, Counted(getattr(kept, name), name, self.asked))


async def turn(chats: Chats, said: str) -> None:
    began = await chats.service.stream_chat(chats.chat_id, said, owner=ANN)
    assert [event async for event in began.events()][-1].type == "run.completed"


async def test_a_turn_asks_the_stores_for_what_it_does_not_know_and_for_nothing_twice() -> None:
    stores: Any = CountedStores()
    model = ScriptedModel(lambda request: "an answer", name="A")
    async with chatting(models={"A": model}, stores=stores, settings=QUIET) as chats:
        await turn(chats, "the first one reads what is read once")
        stores.asked.clear()
        await turn(chats, "and this is what each costs")
    asked = stores.asked
    assert (asked["graphs.head"], asked["graphs.get"]) == (1, 0), "which version is the newest"
    assert (asked["chats.get"], asked["chats.messages"], asked["chats.message"]) == (1, 1, 0)
    assert asked["runs.count"] == 1, "no owner has more in the queue than all have"
    assert asked["runs.claim"] == 1, "nothing else has come"
    assert asked["runs.get"] <= 1, "whether it is left as its last event says"
    assert asked["events.read"] <= 3, "its worker; and who follows it before it begins, and once if it is over by then"
    assert asked["events.append"] <= 3
    assert asked["journal.load"] == 0, "what was just appended is known"
    assert asked.total() <= 27, dict(asked)


async def test_a_turn_asks_no_more_often_in_a_long_chat_than_in_a_short_one() -> None:
    stores: Any = CountedStores()
    model = ScriptedModel(lambda request: "an answer", name="A")
    async with chatting(models={"A": model}, stores=stores, settings=QUIET) as chats:
        totals = []
        for number in range(30):
            stores.asked.clear()
            await turn(chats, f"turn {number}")
            totals.append(stores.asked.total())
    assert max(totals[20:]) <= max(totals[1:10]) + 3, "how many events share an append is a matter of time"
