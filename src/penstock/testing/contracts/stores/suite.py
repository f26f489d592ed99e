"""Base of the store contracts: fresh stores for each test, and records to put into them.

Only the standard library is imported; not even pytest.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Protocol, TypeVar

from penstock.chat.conversation import ChatMessage
from penstock.chat.ports import Attachment, ChatRecord, ChatStore
from penstock.hosting.audit import AuditRecord, AuditStore
from penstock.hosting.people import PersonStore
from penstock.hosting.ports import (
    ENDED,
    ApprovalRecord,
    CancelRequest,
    HostedEvent,
    HostStores,
    PayloadRecord,
    RunRecord,
    RunStatus,
)
from penstock.hosting.tokens import TokenRecord, TokenStore, digest_of
from penstock.nodes.memory import MemoryStore
from penstock.runtime.durable.ports import JournalEntry

Contract = TypeVar("Contract", bound="StoreContract")

SOON_S = 0.01
"""Timeout of a wait that is meant to time out."""
LONG_S = 60.0
"""Timeout of a wait that is meant to end earlier."""

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -0.0, 1.5, 2**53 + 1, 10**40, -(10**40), 5e-324, 1.7976931348623157e308),
    *("", " ", "a\x00b", "\ud83d", "\U0001f30a \u202e \ufeff \u2028", "'; DROP TABLE runs; --", "?$1%s{}", "\\u0000"),
    *([], {}, [[]], {"": {"": None}}, {"b": 1, "a": [1, 1.0, True, "1", None]}, ["long " * 50_000]),
)
"""JSON values that are easily altered by storing them in a column and reading them back."""

NOT_JSON: tuple[Any, ...] = (
    *(float("nan"), float("inf"), float("-inf"), [float("nan")], {"deep": [{"er": float("inf")}]}),
    *({1: "a key that is not text"}, {None: 1}, {"in": {True: 1}}, {("a",): 1}),
    *(object(), b"bytes", {1, 2}, 1j, [object()], {"in": b""}),
)

NOT_OBJECTS: tuple[Any, ...] = ([], "text", 5, True, None)
"""JSON values that are not objects."""

ODD_NAMES = ("'", '"', "a b", "%", "_", "\u00e9", "e\u0301", "\U0001f30a", "x" * 1_000, "run:1", "..", "NULL", "null")
NOT_NAMES = ("a\x00", "\x00", "\ud800", "a\udfffb")


class StoreBundle(HostStores, Protocol):
    """The stores of one service, over one database."""

    @property
    def chats(self) -> ChatStore: ...

    @property
    def memories(self) -> MemoryStore: ...

    @property
    def tokens(self) -> TokenStore: ...

    @property
    def audit(self) -> AuditStore: ...

    @property
    def people(self) -> PersonStore: ...

    async def close(self) -> None: ...


class StoreContract(ABC):
    """Defines how stores are opened for the tests."""

    claimants = 32
    """Number of concurrent callers in the tests with many."""

    @abstractmethod
    async def open_stores(self) -> StoreBundle:
        """Return new, empty stores; each test closes its own."""

    async def open_another(self, stores: StoreBundle) -> StoreBundle:
        """Open a second connection to the data of `stores`, as another process has; `stores` itself if none exists."""
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
    """Decorate a test so that it receives stores of its own."""

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
    """Yield to the loop until a started task has reached its wait, if only the loop delays it."""
    for _ in range(rounds):
        await asyncio.sleep(0)


async def until_nothing(ask: Callable[[str | None], Awaitable[Any]]) -> list[Any]:
    """Return all pages, requesting the page after the last id until a page is empty; at most 1,000 requests."""
    found: list[Any] = []
    for _ in range(1_000):
        page = await ask(found[-1].id if found else None)
        if not page:
            return found
        found += [page] if hasattr(page, "id") else page
    raise AssertionError(f"there is no end, after {len(found)}")


def a_payload(call_id: str = "n000001", run_id: str = "r", at_ms: int = 1, **fields: Any) -> PayloadRecord:
    """Return a payload of the run `r`."""
    return PayloadRecord(run_id, call_id, 0, "redacted", at_ms=at_ms)._replace(**fields)


def an_audit_record(id: str = "a", **fields: Any) -> AuditRecord:
    return AuditRecord(**{"id": id, "at_ms": 1_000, "actor": "ann", "action": "run.cancel", **fields})


def a_run(id: str = "r", **fields: Any) -> RunRecord:
    return RunRecord(**{"id": id, "owner": "ann", "graph_id": "g", "graph_version": 1, "created_ms": 1_000, **fields})


def an_event(seq: int, **data: Any) -> HostedEvent:
    return HostedEvent(seq, 1_000 + seq, "node.started", data)


def an_entry(key: str, value: Any = None, **fields: Any) -> JournalEntry:
    return JournalEntry(key, "node", value, **fields)


def an_approval(id: str = "a", **fields: Any) -> ApprovalRecord:
    defaults = {"id": id, "run_id": "r", "owner": "ann", "key": f"key of {id}", "node_id": "n", "question": "Send it?"}
    return ApprovalRecord(**{**defaults, "asked_ms": 1_000, **fields})


def a_cancel_request(run_id: str = "r", **fields: Any) -> CancelRequest:
    return CancelRequest(**{"run_id": run_id, "reason": "enough", "by": "ann", "at_ms": 100, "until_ms": 200, **fields})


def a_chat(id: str = "c", **fields: Any) -> ChatRecord:
    defaults = {"id": id, "owner": "ann", "title": "", "graph_id": "g", "created_ms": 1_000, "updated_ms": 1_000}
    return ChatRecord(**{**defaults, **fields})


def a_message(id: str, parent_id: str | None = None, content: str = "hello", **data: Any) -> ChatMessage:
    return ChatMessage(id, parent_id, "user" if parent_id is None else "assistant", content, 1_000, data)


def an_attachment(id: str = "f", size: int = 3, **fields: Any) -> Attachment:
    defaults = {
        "id": id,
        "owner": "ann",
        "name": "a.txt",
        "media_type": "text/plain",
        "size": size,
        "created_ms": 1_000,
    }
    return Attachment(**{**defaults, **fields})


def a_token(id: str = "0123456789ab", **fields: Any) -> TokenRecord:
    digest = digest_of("00", f"pen_{id}_secret".encode())
    defaults = {"id": id, "name": "ann", "role": "user", "salt": "00", "digest": digest, "created_ms": 1_000}
    return TokenRecord(**{**defaults, "created_by": "root", **fields})


async def claimed(stores: StoreBundle, id: str = "r", worker: str = "w", **fields: Any) -> RunRecord:
    """Add a run claimed by the worker at 1,000 for 100 ms."""
    await stores.runs.add(a_run(id, **fields))
    run = await stores.runs.claim(worker, now_ms=1_000, lease_ms=100, run_id=id)
    assert run is not None
    return run


async def brought_to(stores: StoreBundle, status: RunStatus, id: str = "r", **fields: Any) -> RunRecord:
    """Bring a run to that status by allowed transitions."""
    if status == "queued":
        return (await stores.runs.add(a_run(id, **fields))).run
    run = await claimed(stores, id, **fields)
    ended = {"ended_ms": 2_000} if status in ENDED else {}
    return run if status == "running" else await stores.runs.update(id, run.epoch, status=status, **ended)
