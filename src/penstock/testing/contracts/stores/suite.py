"""What the suites of the service's stores stand on: fresh stores for each test, and records to put into them.

Only the standard library is imported; not even pytest.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Protocol, TypeVar

from penstock.chat.message import ChatMessage
from penstock.chat.ports import Attachment, ChatRecord, ChatStore
from penstock.hosting.ports import HostStores
from penstock.hosting.records import ENDED, ApprovalRecord, CancelIntent, HostedEvent, RunRecord, RunStatus
from penstock.nodes.memory import MemoryStore
from penstock.runtime.durable.ports import JournalEntry

Contract = TypeVar("Contract", bound="StoreContract")

SOON_S = 0.01
"""A wait that is meant to end by its time."""
LONG_S = 60.0
"""A wait that is meant to end before its time."""

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -0.0, 1.5, 2**53 + 1, 10**40, -(10**40), 5e-324, 1.7976931348623157e308),
    *("", " ", "a\x00b", "\ud83d", "\U0001f30a \u202e \ufeff \u2028", "'; DROP TABLE runs; --", "?$1%s{}", "\\u0000"),
    *([], {}, [[]], {"": {"": None}}, {"b": 1, "a": [1, 1.0, True, "1", None]}, ["long " * 50_000]),
)
"""JSON that is easily lost on the way to a column and back."""

NOT_JSON: tuple[Any, ...] = (
    *(float("nan"), float("inf"), float("-inf"), [float("nan")], {"deep": [{"er": float("inf")}]}),
    *({1: "a key that is not text"}, {None: 1}, {"in": {True: 1}}, {("a",): 1}),
    *(object(), b"bytes", {1, 2}, 1j, [object()], {"in": b""}),
)

NOT_OBJECTS: tuple[Any, ...] = ([], "text", 5, True, None)
"""JSON, and no object."""

ODD_NAMES = ("'", '"', "a b", "%", "_", "\u00e9", "e\u0301", "\U0001f30a", "x" * 1_000, "run:1", "..", "NULL", "null")
NOT_NAMES = ("a\x00", "\x00", "\ud800", "a\udfffb")


class StoreBundle(HostStores, Protocol):
    """The stores of one service, over one database."""

    @property
    def chats(self) -> ChatStore: ...

    @property
    def memories(self) -> MemoryStore: ...

    async def close(self) -> None: ...


class StoreContract(ABC):
    """How stores are made for the tests."""

    claimants = 32
    """How many ask at once, where the tests let many ask."""

    @abstractmethod
    async def open_stores(self) -> StoreBundle:
        """New, empty stores; each test closes its own."""

    async def open_another(self, stores: StoreBundle) -> StoreBundle:
        """Another way to what is in `stores`, as another process has; `stores` themselves if there is none."""
        return stores

    @asynccontextmanager
    async def another(self, stores: StoreBundle) -> AsyncIterator[StoreBundle]:
        other = await self.open_another(stores)
        try:
            yield other
        finally:
            if other is not stores:
                await other.close()


def fresh(
    test: Callable[[Contract, Any], Coroutine[Any, Any, None]],
) -> Callable[[Contract], Coroutine[Any, Any, None]]:
    """A test that is given stores of its own."""

    async def over_fresh_stores(self: Contract) -> None:
        stores = await self.open_stores()
        try:
            await test(self, stores)
        finally:
            await stores.close()

    over_fresh_stores.__name__, over_fresh_stores.__qualname__ = test.__name__, test.__qualname__
    return over_fresh_stores


@contextmanager
def raises(expected: type[Exception] | tuple[type[Exception], ...]) -> Iterator[None]:
    """Fail unless the body raises one of these."""
    try:
        yield
    except expected:
        return
    raise AssertionError(f"not raised: {expected}")


async def let_others_run(rounds: int = 10) -> None:
    """So that a task that was started has come to where it waits, if nothing but the loop is in its way."""
    for _ in range(rounds):
        await asyncio.sleep(0)


async def until_nothing(ask: Callable[[str | None], Awaitable[Any]]) -> list[Any]:
    """All that is given, asking for what comes after the id of the last until there is nothing; at most 1,000 times."""
    found: list[Any] = []
    for _ in range(1_000):
        given = await ask(found[-1].id if found else None)
        if not given:
            return found
        found += [given] if hasattr(given, "id") else given
    raise AssertionError(f"there is no end, after {len(found)}")


def a_run(id: str = "r", **fields: Any) -> RunRecord:
    return RunRecord(**{"id": id, "owner": "ann", "graph_id": "g", "graph_version": 1, "created_ms": 1_000, **fields})


def an_event(seq: int, **data: Any) -> HostedEvent:
    return HostedEvent(seq, 1_000 + seq, "node.started", data)


def an_entry(key: str, value: Any = None, **fields: Any) -> JournalEntry:
    return JournalEntry(key, "node", value, **fields)


def an_approval(id: str = "a", **fields: Any) -> ApprovalRecord:
    asked = {"id": id, "run_id": "r", "owner": "ann", "key": f"key of {id}", "node_id": "n", "question": "Send it?"}
    return ApprovalRecord(**{**asked, "asked_ms": 1_000, **fields})


def an_intent(run_id: str = "r", **fields: Any) -> CancelIntent:
    return CancelIntent(**{"run_id": run_id, "reason": "enough", "by": "ann", "at_ms": 100, "until_ms": 200, **fields})


def a_chat(id: str = "c", **fields: Any) -> ChatRecord:
    made = {"id": id, "owner": "ann", "title": "", "graph_id": "g", "created_ms": 1_000, "updated_ms": 1_000}
    return ChatRecord(**{**made, **fields})


def a_message(id: str, parent_id: str | None = None, content: str = "hello", **data: Any) -> ChatMessage:
    return ChatMessage(id, parent_id, "user" if parent_id is None else "assistant", content, 1_000, data)


def an_attachment(id: str = "f", size: int = 3, **fields: Any) -> Attachment:
    made = {"id": id, "owner": "ann", "name": "a.txt", "media_type": "text/plain", "size": size, "created_ms": 1_000}
    return Attachment(**{**made, **fields})


async def claimed(stores: StoreBundle, id: str = "r", worker: str = "w", **fields: Any) -> RunRecord:
    """A run that the worker has, from 1,000 on for 100 ms."""
    await stores.runs.add(a_run(id, **fields))
    run = await stores.runs.claim(worker, now_ms=1_000, lease_ms=100, run_id=id)
    assert run is not None
    return run


async def brought_to(stores: StoreBundle, status: RunStatus, id: str = "r", **fields: Any) -> RunRecord:
    """A run in that status, by the ways that lead there."""
    if status == "queued":
        return await stores.runs.add(a_run(id, **fields))
    run = await claimed(stores, id, **fields)
    ended = {"ended_ms": 2_000} if status in ENDED else {}
    return run if status == "running" else await stores.runs.update(id, run.epoch, status=status, **ended)
